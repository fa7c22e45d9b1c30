"""A small simulated world for actors: scopes with two servers each, no faults, and one process that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from remit.assembly import run_server
from remit.model.claims import Accepted, Acquire, Actor, AnyClaim, Apply, Bind, Claim, Mark, Operation, Refused, Spawn, Verdict
from remit.model.kinds import (
    Device,
    Node,
    NodeHealth,
    NodeSpec,
    Region,
    RegionSpec,
    Template,
    Tenant,
    TenantSpec,
    Workload,
    WorkloadSpec,
)
from remit.model.metadata import Metadata
from remit.model.objects import decode
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from remit.simulate.actors.role import RoleContext, RunTiming, SimulatedRole
from remit.simulate.world.event_loop import SimLoop
from remit.simulate.world.network import Network, NetworkConditions
from remit.simulate.world.processes import ProcessMain, SimMachine, SimProcess
from remit.simulate.world.store import CommitOrigin, StoreService, run_sync
from remit.store.memory import MemoryBackup, MemoryStore
from remit.store.protocol import Commit
from remit.world.interfaces import ProcessSpec

T = TypeVar("T")
HOUR = Duration(3_600_000)


class Listener:
    """Receives all callbacks: of role contexts, of stores and of machines."""

    def __init__(self) -> None:
        self.verdicts: list[tuple[str, str, Verdict]] = []
        self.call_count = 0
        self.given_up: list[str] = []

    def operation_sent(self, sender: str, scope: str, operation: str) -> None:
        self.call_count += 1

    def operation_answered(self, sender: str, scope: str, operation: Operation, verdict: Verdict) -> None:
        self.verdicts.append((scope, operation.id, verdict))

    def operation_abandoned(self, sender: str, scope: str, operation: str) -> None:
        self.given_up.append(operation)

    def lease_renewed(self, sender: str, scope: str, lease: str, epoch: int, sent_s: float) -> None:
        return

    def revision_observed(self, observer: str, scope: str, incarnation: str, revision: int) -> None:
        return

    def commit_applied(self, scope: str, commit: Commit, revision: int, sent: CommitOrigin | None) -> None:
        return

    def store_restored(self, scope: str, store: MemoryStore, backup: MemoryBackup) -> None:
        return

    def program_started(self, machine: str, order: ProcessSpec, pid: int) -> None:
        return

    def program_stop_requested(self, machine: str, pid: int, by: str) -> None:
        return

    def program_ended(self, machine: str, pid: int) -> None:
        return

    def codes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for _, _, verdict in self.verdicts:
            if isinstance(verdict, Refused):
                found[verdict.code.value] = found.get(verdict.code.value, 0) + 1
        return found


class ActorScene:
    """Scopes by name. Every machine has a clock that started at another time."""

    def __init__(self, seed: str, scopes: Sequence[str], *, servers: int = 2) -> None:
        self.seed = seed
        self.loop = SimLoop(seed)  # type: ignore[abstract]  # as much of a loop as is used here
        self.network = Network(self.loop, seed, NetworkConditions())
        self.listener = Listener()
        self.pace = RunTiming()
        self.processes: dict[str, SimProcess] = {}
        self.failed: list[tuple[str, BaseException | None]] = []
        self.recorded_verdicts: list[tuple[AnyClaim, Verdict]] = []
        self.stores = {scope: StoreService(self.loop, self.network, scope, seed, self.listener) for scope in scopes}
        self.servers = {scope: [f"{scope}-s{n}" for n in range(servers)] for scope in scopes}
        for scope in scopes:
            for name in self.servers[scope]:
                self.start(name, self._server(scope, name))

    def _server(self, scope: str, name: str) -> ProcessMain:
        async def main(process: SimProcess) -> None:
            store = process.port(self.stores[scope])
            await run_server(store, process.world, scope=scope, name=name, peers=self.servers[scope])

        return main

    def start(self, name: str, main: ProcessMain) -> SimProcess:
        number = len(self.processes)
        machine = SimMachine(self.loop, f"m-{name}", self.listener, start_ms=7_000_000 * (1 + number % 5), rate=1.0)
        process = self.processes[name] = SimProcess(self.loop, self.network, name, machine, self.seed, main)
        process.on_end = lambda ended, failure: self.failed.append((ended.name, failure))
        process.start()
        return process

    def role_context(self, process: SimProcess, scope: str) -> RoleContext:
        return RoleContext(process, self.stores[scope], self.servers[scope], self.listener, self.pace)

    def run(self, minutes: float) -> None:
        self.loop.run(self.loop.time() + 60 * minutes)
        assert not self.loop.failures, self.loop.failures
        assert not self.failed, self.failed

    def do(self, scope: str, work: Callable[[RoleContext], Coroutine[Any, Any, T]], *, minutes: float = 2) -> T:
        """Run an action as a person in this scope, to its end."""
        results: list[T] = []

        async def main(process: SimProcess) -> None:
            results.append(await work(self.role_context(process, scope)))
            self.loop.stop()
            await asyncio.Event().wait()

        process = self.start(f"person-{len(self.processes)}", main)
        self.run(minutes)
        process.kill()
        assert results, f"no answer within {minutes} minutes"
        return results[0]

    def rows(self, scope: str, prefix: str) -> dict[str, Any]:
        """The rows of the store itself."""
        page = run_sync(self.stores[scope].store.range(prefix))
        return {row.key: decode(row.value) for row in page.rows}

    def restore(self, scope: str, backup: MemoryBackup, incarnation: str) -> None:
        """Replace a scope's store by a backup, as an operator would: its servers are stopped first."""
        for name in self.servers[scope]:
            self.processes[name].kill()
        self.stores[scope].restore(backup, incarnation)
        for name in self.servers[scope]:
            self.processes[name].start()

    def backup(self, scope: str) -> MemoryBackup:
        return run_sync(cast(MemoryStore, self.stores[scope].store).backup())

    def accepted(self, kind: type[Claim]) -> int:
        """Number of accepted claims of a kind, by recorded roles."""
        return sum(1 for claim, verdict in self.recorded_verdicts if isinstance(claim, kind) and isinstance(verdict, Accepted))

    def record(self, player: SimulatedRole) -> None:
        """Record the verdicts that a role receives."""
        original = player.on_verdict

        def recording(claim: AnyClaim, verdict: Verdict) -> None:
            self.recorded_verdicts.append((claim, verdict))
            original(claim, verdict)

        setattr(player, "on_verdict", recording)  # noqa: B010 - one instance's method, for this test only

    def finish(self) -> None:
        self.loop.finish()


async def must(role_context: RoleContext, role: Role, *claims: AnyClaim, lease: str = "") -> list[Accepted]:
    client = role_context.client(Actor("person", role))
    if lease:
        taken = await client.submit(Acquire(lease, HOUR))
        assert isinstance(taken, Accepted), taken
        client.actor = Actor("person", role, lease, taken.number)
    results = []
    for claim in claims:
        verdict = await client.submit(claim)
        assert isinstance(verdict, Accepted), (claim, verdict)
        results.append(verdict)
    return results


def tenant(name: str, cpu: int = 100_000, emergency: int = 40_000) -> Apply:
    quota = Amount({"cpu": cpu, "memory": 200 << 30, "devices/gpu": 16_000})
    spec = TenantSpec(quota=quota, emergency_quota=Amount({"cpu": emergency}))
    return Apply(Tenant(metadata=Metadata(name=name), spec=spec))


def node(name: str, region: str, zone: str, *, cpu: int = 8_000, gpus: int = 0) -> Apply:
    devices = tuple(Device(name=f"gpu-{n}", kind="gpu", model="a100") for n in range(gpus))
    capacity = Amount({"cpu": cpu, "memory": 16 << 30})
    spec = NodeSpec(region=region, zone=zone, capacity=capacity, devices=devices)
    return Apply(Node(metadata=Metadata(name=name, labels={"disk": "ssd"}), spec=spec))


async def create_region(role_context: RoleContext) -> None:
    region = role_context.scope
    nodes = [node(f"{region}-n{n}", region, "ab"[n % 2], gpus=2 if n < 2 else 0) for n in range(4)]
    made = await must(
        role_context, Role.OPERATOR, Apply(Region(metadata=Metadata(name=region), spec=RegionSpec(zones=("a", "b")))), *nodes
    )
    marks = [Mark(f"{region}-n{n}", made[n + 1].revision, NodeHealth.READY) for n in range(4)]
    await must(role_context, Role.NODES, *marks, lease="node-lifecycle/person")


async def create_parent_scope(role_context: RoleContext) -> None:
    regions = [Apply(Region(metadata=Metadata(name="r1"), spec=RegionSpec(zones=("a", "b"))))]
    await must(role_context, Role.OPERATOR, *regions, tenant("t1"), tenant("t2"))


async def create_work(role_context: RoleContext) -> None:
    """Work in a region: one replica bound, one pending."""
    template = Template(command=("work", "-", "0"), resources=Amount({"cpu": 500}))
    work = Workload(metadata=Metadata(name="w", tenant="t1"), spec=WorkloadSpec(type="service", template=template, replicas=2))
    await must(role_context, Role.OPERATOR, tenant("t1"), Apply(work))
    spawned = await must(role_context, Role.WORKLOADS, Spawn("t1", "w", 1, 0, 2), lease="workloads/person")
    bind = Bind("replica/t1/w-0", spawned[0].revision, f"{role_context.scope}-n0", "tenant/t1")
    await must(role_context, Role.SCHEDULER, bind, lease="scheduler/person")
