"""A fake authority with idempotent outcomes, and endpoints that inject transport faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from remit.client.authority_client import AuthorityClient
from remit.client.endpoint import AuthorityStatus, Endpoint, NotLeader, OutcomeUnknown, Overloaded
from remit.client.retry import RetryBudget, RetryPolicy
from remit.model.claims import (
    Abandon,
    Accepted,
    Acquire,
    Actor,
    Bind,
    Code,
    Operation,
    Refused,
    Verdict,
    parse_operation_id,
    payload,
)
from remit.model.roles import Role
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeState
from remit.world.interfaces import World
from tests.unit.world.virtual_world import VirtualClock, virtual_world

ACTOR = Actor("scheduler-1", Role.SCHEDULER)
BIND = Bind("risk-api-0", 7, "node-1", "grant-1")
WINDOW_MS = 60_000


@dataclass
class FakeAuthority:
    """Every accepted claim counts in `applied`. Outcomes are kept for `retention` windows of the world's clock."""

    world: World
    incarnation: str = "inc1"
    retention: int = 3
    applied: list[Operation] = field(default_factory=list)
    outcomes: dict[str, tuple[bytes, Verdict]] = field(default_factory=dict)
    submitted: list[Operation] = field(default_factory=list)
    statuses: int = 0
    window_shift: int = 0
    leader: str = "a"
    held: bool = True
    refuses: Refused | None = None
    listened_ms: int = 0
    silent: dict[str, int] = field(default_factory=dict)
    renewals_ms: list[int] = field(default_factory=list)
    boot: str = "far-boot"
    ahead_ms: int = 77_000_000
    """Offset of its clock: the authority runs on another machine."""

    def window(self) -> int:
        return self.world.clock.now_ms() // WINDOW_MS

    def now_ms(self) -> int:
        return self.world.clock.now_ms() + self.ahead_ms

    async def status(self) -> AuthorityStatus:
        self.statuses += 1
        window = self.window() + self.window_shift
        stand = "eu", self.incarnation, 1, len(self.applied), window, WINDOW_MS, self.leader, self.boot, self.now_ms()
        return AuthorityStatus(*stand, listened_ms=self.listened_ms, silent=self.silent)

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        self.submitted.extend(operations)
        return [self._one(operation) for operation in operations]

    async def renew(self, actor: Actor, /) -> bool:
        self.renewals_ms.append(self.world.clock.now_ms())
        return self.held

    async def heartbeat(self, beats: Sequence[NodeHeartbeat], /) -> Sequence[bool]:
        self.renewals_ms.append(self.world.clock.now_ms())
        return [self.held for _ in beats]

    async def heartbeat_ages(self) -> HeartbeatReport:
        return HeartbeatReport(self.incarnation, 0, {})

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return [NodeState(node) for node in nodes]

    def _one(self, operation: Operation) -> Verdict:
        incarnation, window = parse_operation_id(operation.id) or ("", -1)
        if incarnation != self.incarnation or window < self.window() - self.retention:
            return Refused(Code.OPERATION_EXPIRED)
        digest = payload(operation)
        if (known := self.outcomes.get(operation.id)) is not None:
            return known[1] if known[0] in (digest, b"") else Refused(Code.OPERATION_MISMATCH)
        verdict = self._decide(operation)
        self.outcomes[operation.id] = (digest, verdict)
        return verdict

    def _decide(self, operation: Operation) -> Verdict:
        if isinstance(operation.claim, Abandon):
            none = (b"", Refused(Code.ABANDONED))
            return self.outcomes.setdefault(operation.claim.operation, none)[1]
        if self.refuses is not None:
            return self.refuses
        self.applied.append(operation)
        return Accepted(len(self.applied), number=5 if isinstance(operation.claim, Acquire) else 0)


class ForwardingEndpoint:
    """Forwards the calls that a test endpoint does not override."""

    target: Endpoint

    async def heartbeat(self, beats: Sequence[NodeHeartbeat], /) -> Sequence[bool]:
        return await self.target.heartbeat(beats)

    async def heartbeat_ages(self) -> HeartbeatReport:
        return await self.target.heartbeat_ages()

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return await self.target.node_states(nodes)


@dataclass
class FaultyEndpoint(ForwardingEndpoint):
    """Applies the next fault of its script to each call; after the script, always `then`."""

    target: Endpoint
    world: World
    script: list[str] = field(default_factory=list)
    then: str = "pass"
    status_script: list[str] = field(default_factory=list)
    sent_ms: list[int] = field(default_factory=list)

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        fault = self.script.pop(0) if self.script else self.then
        self.sent_ms.append(self.world.clock.now_ms())
        await self._before(fault)
        verdicts = await self.target.submit(operations)
        if fault == "duplicate":
            verdicts = await self.target.submit(operations)
        if fault == "short answer":
            return verdicts[1:]
        await self._after(fault)
        return verdicts

    async def status(self) -> AuthorityStatus:
        fault = self.status_script.pop(0) if self.status_script else "pass"
        await self._before(fault)
        status = await self.target.status()
        await self._after(fault)
        return status

    async def renew(self, actor: Actor, /) -> bool:
        fault = self.script.pop(0) if self.script else self.then
        self.sent_ms.append(self.world.clock.now_ms())
        await self._before(fault)
        held = await self.target.renew(actor)
        await self._after(fault)
        return held

    async def _before(self, fault: str) -> None:
        word, _, rest = fault.partition(" ")
        if word == "redirect":
            raise NotLeader(rest)
        if word == "overloaded":
            ms, _, why = rest.partition(" ")
            raise Overloaded(int(ms), why)
        if fault == "lose before":
            raise OutcomeUnknown("the request was lost")
        if fault == "hang before":
            await self.world.clock.sleep_ms(3_600_000)
        if word == "delay":
            await self.world.clock.sleep_ms(int(rest))

    async def _after(self, fault: str) -> None:
        if fault == "lose after":
            raise OutcomeUnknown("the answer was lost")
        if fault == "hang after":
            await self.world.clock.sleep_ms(3_600_000)
        if fault == "suspend after":
            if isinstance(self.world.clock, VirtualClock):
                self.world.clock.suspend(10 * WINDOW_MS)
            raise OutcomeUnknown("the machine slept, and the connection died")


@dataclass
class Bench:
    """A client with endpoints a, b, ... of one authority, each with its script."""

    world: World
    authority: FakeAuthority
    endpoints: dict[str, FaultyEndpoint]
    client: AuthorityClient


def bench(
    *scripts: list[str],
    shape: RetryPolicy = RetryPolicy(),
    budget: RetryBudget | None = None,
    then: str = "pass",
    seed: str = "1",
) -> Bench:
    world = virtual_world(seed)
    authority = FakeAuthority(world)
    names = "abcdef"[: max(1, len(scripts))]
    endpoints = {
        name: FaultyEndpoint(authority, world, list(script), then) for name, script in zip(names, scripts or ([],), strict=True)
    }
    return Bench(world, authority, endpoints, AuthorityClient(endpoints, ACTOR, world, policy=shape, budget=budget))
