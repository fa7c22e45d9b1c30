"""Demo: two schedulers race for one GPU, and the authority is killed.

Two schedulers claim the same GPU from a real authority, round after round, and the authority's process is killed in the
middle.

No decision is made here: each client submits claims over its own socket, and sends and verdicts are recorded in an
`OperationRecorder`. After the kill the clients retry with the same operation ids until the restarted process answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from remit.client.authority_client import AuthorityClient
from remit.client.lease_holder import acquire
from remit.client.retry import RetryBudget, RetryPolicy
from remit.demo.authority_process import AUTHORITY, AuthorityReady, DemoFailed, RecordingEndpoint
from remit.demo.demo_processes import AuthorityProcess
from remit.model.claims import (
    Accepted,
    Actor,
    AnyClaim,
    Apply,
    Bind,
    Evidence,
    Mark,
    Move,
    Operation,
    OperationID,
    Refused,
    Spawn,
    Verdict,
)
from remit.model.kinds import Node, NodeHealth, Workload
from remit.model.kinds.registry import AnyObject
from remit.model.objects import DECLARED, key_of
from remit.model.resources import WHOLE_DEVICE, Duration
from remit.model.roles import Role
from remit.world.interfaces import Randomness, World

CLAIMS_EACH: Final = 4
"""Replicas for which each scheduler claims the GPU at once: enough to have claims in flight at any moment."""

SPREAD_MS: Final = 3
KILLS_MAX: Final = 4
TTL: Final = Duration(600_000)
RETRY_POLICY: Final = RetryPolicy(deadline_ms=60_000, try_ms=15_000, base_ms=20, cap_ms=200, attempts_max=1_000)


class RaceTarget(NamedTuple):
    """The device that the schedulers race for."""

    node: str
    device: str
    tenant: str


class Kill(NamedTuple):
    """One kill of the authority: the round, the operations sent but not answered at that moment, and the process that took
    over.
    """

    round: int
    pid: int
    epoch: int
    in_flight: frozenset[OperationID]
    answered_in_round: int
    after: AuthorityReady
    down_ms: int


class OperationRecorder:
    """All operations sent and verdicts received by the clients. The first verdict of an operation is kept; a different later
    one is recorded as a contradiction.
    """

    def __init__(self) -> None:
        self.operations: dict[OperationID, Operation] = {}
        self.sends: Counter[OperationID] = Counter()
        self.verdicts: dict[OperationID, Verdict] = {}
        self.epochs: dict[OperationID, int] = {}
        self.contradictions: list[str] = []
        self.operation_sent = asyncio.Event()
        self.answer_received = asyncio.Event()
        self._round_start = 0

    def sent(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self.operations.setdefault(operation.id, operation)
            self.sends[operation.id] += 1
        if operations:
            self.operation_sent.set()

    def answered(self, ids: Sequence[OperationID], verdicts: Sequence[Verdict], epoch: int) -> None:
        for name, verdict in zip(ids, verdicts, strict=True):
            first = self.verdicts.setdefault(name, verdict)
            self.epochs.setdefault(name, epoch)
            if first != verdict:
                self.contradictions.append(f"{name}: first {first}, later {verdict}")
        self.answer_received.set()

    def unanswered(self) -> frozenset[OperationID]:
        return frozenset(name for name in self.operations if name not in self.verdicts)

    def begin_round(self) -> None:
        self.operation_sent.clear()
        self.answer_received.clear()
        self._round_start = len(self.operations)

    def operations_of_round(self) -> list[OperationID]:
        return list(self.operations)[self._round_start :]


class RaceClient:
    """One actor with its own client and connection."""

    def __init__(self, name: str, role: Role, socket: Path, recorder: OperationRecorder, world: World) -> None:
        endpoint = RecordingEndpoint(socket, recorder, world.clock)
        # The restart may take long; the retry budget must not run out while eight clients wait for it.
        budget = RetryBudget(percent=100, per_second=200, tokens_max=2_000)
        self.client = AuthorityClient({AUTHORITY: endpoint}, Actor(name, role), world, policy=RETRY_POLICY, budget=budget)
        self._world = world

    async def lease(self, lease: str) -> int:
        hold = await acquire(self.client, self._world.clock, lease, TTL)
        if isinstance(hold, Refused):
            raise unexpected_refusal(f"acquiring {lease}", hold)
        self.client.actor = hold.actor
        return hold.actor.epoch

    async def submit_accepted(self, claim: AnyClaim, evidence: Evidence = Evidence()) -> Accepted:
        verdict = await self.client.submit(claim, evidence=evidence)
        if isinstance(verdict, Refused):
            raise unexpected_refusal(f"{claim}", verdict)
        return verdict


def unexpected_refusal(action: str, refused: Refused) -> DemoFailed:
    return DemoFailed(f"{action} was refused ({refused.code}: {refused.detail}), which is unexpected; please report it")


class Race:
    """The race: authority process, clients and results. `start`, `declare` and `set_up_race` set it up; `run` runs it."""

    def __init__(self, data: Path, socket: Path, world: World, chance: Randomness, rounds: int) -> None:
        self.recorder = OperationRecorder()
        self.rounds = rounds
        self.target = RaceTarget("", "", "")
        self.kills: list[Kill] = []
        self.wins: Counter[str] = Counter()
        self.owner = self.owned_by = ""
        self.retried = 0
        self.server: AuthorityProcess | None = None
        self._data, self._socket, self._world, self._rng = data, socket, world, chance
        self._clients: dict[str, RaceClient] = {}
        self._queues: dict[str, list[tuple[str, int]]] = {}
        self._seen = 0
        self._kill_round = rounds // 2 + 1

    # -- setup -------------------------------------------------------------------------------------------------------------

    async def start(self) -> AuthorityReady:
        self.server = await AuthorityProcess.start(self._data, self._socket, self._world.clock)
        return self.server.ready

    async def declare(self, objects: Sequence[AnyObject]) -> int:
        """Applies the manifests in order of dependency and marks the nodes ready; returns the number of objects."""
        operator, nodes = self._add_client("operator", Role.OPERATOR), self._add_client("node-watch", Role.NODES)
        await nodes.lease(Role.NODES)
        for obj in sorted(objects, key=lambda obj: DECLARED.index(type(obj).__name__)):
            verdict = await operator.submit_accepted(
                Apply(self._with_enough_completions(obj) if isinstance(obj, Workload) else obj, expect=0)
            )
            if isinstance(obj, Node):
                await nodes.submit_accepted(Mark(obj.metadata.name, verdict.revision, NodeHealth.READY))
        return len(objects)

    def _with_enough_completions(self, job: Workload) -> Workload:
        """The job with enough completions for all claims of the race."""
        return replace(job, spec=replace(job.spec, completions=2 * (CLAIMS_EACH + self.rounds)))

    async def set_up_race(self, job: Workload, node: Node) -> dict[str, int]:
        """Creates the replicas, two schedulers with half of them each, and the node's agent; returns each scheduler's lease
        epoch.
        """
        tenant, name = job.metadata.tenant, job.metadata.name
        self.target = RaceTarget(node.metadata.name, node.spec.devices[0].name, tenant)
        workloads = self._add_client("workloads", Role.WORKLOADS)
        await workloads.lease(Role.WORKLOADS)
        await self._add_client("agent", Role.AGENT).lease(f"{Role.AGENT}/{node.metadata.name}")
        spawned = await workloads.submit_accepted(
            Spawn(tenant, name, 1, 0, self._with_enough_completions(job).spec.completions)
        )
        keys = [key_of("Replica", f"{name}-{index}", tenant) for index in range(spawned.number)]
        self._seen = spawned.revision
        epochs = {}
        for start, lease in enumerate((f"{Role.SCHEDULER}/a", f"{Role.SCHEDULER}/b")):
            epochs[lease] = await self._add_client(lease, Role.SCHEDULER).lease(lease)
            self._queues[lease] = [(key, spawned.revision) for key in keys[start::2]]
        return epochs

    def _add_client(self, name: str, role: Role) -> RaceClient:
        client = self._clients[name] = RaceClient(name, role, self._socket, self.recorder, self._world)
        return client

    # -- the race --------------------------------------------------------------------------------------------------------

    async def run(self, on_round: Callable[[int], None]) -> None:
        for number in range(1, self.rounds + 1):
            await self._round(number)
            on_round(number)

    async def _round(self, number: int) -> None:
        """Both schedulers claim the same GPU. The winner's job runs to completion, so that the GPU is free afterwards."""
        self.recorder.begin_round()
        contenders = [
            (lease, replica, at) for lease, queue in sorted(self._queues.items()) for replica, at in queue[:CLAIMS_EACH]
        ]
        async with asyncio.TaskGroup() as group:
            claims = [group.create_task(self._claim(*contender)) for contender in self._rng.shuffled(contenders)]
            if number == self._kill_round:
                group.create_task(self._kill(number))
        winners = [won for claim in claims if (won := claim.result()) is not None]
        if len(winners) != 1:
            result = f"{len(winners)} of {len(claims)} claims for one GPU were accepted ({self._verdicts_of_round()})"
            raise DemoFailed(f"round {number}: {result}; please report it with the store (run with --data DIR to keep it)")
        lease, replica, at = winners[0]
        self.wins[lease] += 1
        self.owner, self.owned_by = replica, lease
        self._queues[lease] = [item for item in self._queues[lease] if item[0] != replica]
        await self._run_job(replica, at, to_the_end=number < self.rounds)

    def _verdicts_of_round(self) -> str:
        verdicts = [self.recorder.verdicts.get(name) for name in self.recorder.operations_of_round()]
        counts = Counter(verdict.code.value if isinstance(verdict, Refused) else "accepted" for verdict in verdicts)
        return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))

    async def _claim(self, lease: str, replica: str, at: int) -> tuple[str, str, int] | None:
        await self._world.clock.sleep_ms(self._rng.jitter_ms(SPREAD_MS))
        target = self.target
        claim = Bind(replica, at, target.node, f"tenant/{target.tenant}", {target.device: WHOLE_DEVICE})
        verdict = await self._clients[lease].client.submit(claim, evidence=Evidence(self._seen))
        self._seen = max(self._seen, verdict.revision)
        return (lease, replica, verdict.revision) if isinstance(verdict, Accepted) else None

    async def _run_job(self, replica: str, at: int, *, to_the_end: bool) -> None:
        """Reports as the node's agent; at the end the job is settled and releases its GPU. The last owner keeps it."""
        agent, workloads = self._clients["agent"], self._clients["workloads"]
        for step in ("start", "run"):
            at = (await agent.submit_accepted(Move(replica, at, step, attempt=1))).revision
        if not to_the_end:
            return
        at = (await agent.submit_accepted(Move(replica, at, "finish", attempt=1, result="ok"))).revision
        await workloads.submit_accepted(Move(replica, at, "settle"))

    async def _kill(self, number: int) -> None:
        """Kills the authority while claims are in flight: at the first answer of the round, or shortly after the first send."""
        if self.server is None:
            raise DemoFailed("no authority process is running; please report it")
        if self._rng.randrange(2):
            await self.recorder.answer_received.wait()
        else:
            await self.recorder.operation_sent.wait()
            await self._world.clock.sleep_ms(self._rng.jitter_ms(SPREAD_MS))
        struck_ms, before = self._world.clock.now_ms(), self.server.ready
        self.server.kill()
        under_way = self.recorder.unanswered()
        await self.server.wait()
        acknowledged = max((verdict.revision for verdict in self.recorder.verdicts.values()), default=0)
        ready = await self.start()
        if ready.revision <= acknowledged:
            # Checked here already: later steps would fail in ways that hide the cause.
            raise DemoFailed(
                f"revision {acknowledged} was acknowledged before the kill, but the restarted store ends at {ready.revision}: "
                f"acknowledged operations are lost; please report it with the store (run with --data DIR to keep it)"
            )
        took_ms = self._world.clock.now_ms() - struck_ms
        # Answers that the killed process wrote to the socket before it died are read later; only then is it known which were
        # lost.
        lost = frozenset(name for name in under_way if self.recorder.epochs.get(name) != before.epoch)
        answered = sum(self.recorder.epochs.get(name) == before.epoch for name in self.recorder.operations_of_round())
        self.kills.append(Kill(number, before.pid, before.epoch, lost, answered, ready, took_ms))
        if not lost and len(self.kills) < KILLS_MAX:
            self._kill_round = number + 1  # nothing was in flight, which shows little: kill again in the next round

    # -- afterwards ------------------------------------------------------------------------------------------------------

    async def resubmit_all(self) -> int:
        """Submits every operation again under its id; the recorder compares the verdicts. Returns the number of operations."""
        submitted = 0
        self.retried = sum(count > 1 for count in self.recorder.sends.values())
        for client in self._clients.values():
            operations = [
                operation for operation in self.recorder.operations.values() if operation.actor.name == client.client.actor.name
            ]
            for first in range(0, len(operations), 256):
                submitted += len(await client.client.resume(operations[first : first + 256]))
        return submitted

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(self._world.clock)

    async def end(self) -> None:
        if self.server is not None:
            await self.server.kill_if_running()
