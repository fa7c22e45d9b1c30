"""A small world for actors: scopes with two servers each, no faults, and one process that sits where it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from remit.assembly import run_server
from remit.model.claims import (
    Accepted,
    Acquire,
    Actor,
    AnyClaim,
    Apply,
    Bind,
    Claim,
    Mark,
    Operation,
    Refused,
    Role,
    Spawn,
    Verdict,
)
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
    """Hears everything: an ear for seats, a witness for stores, a recorder for machines."""

    def __init__(self) -> None:
        self.verdicts: list[tuple[str, str, Verdict]] = []
        self.asked_count = 0
        self.given_up: list[str] = []

    def operation_sent(self, asker: str, scope: str, operation: str) -> None:
        self.asked_count += 1

    def operation_answered(self, asker: str, scope: str, operation: Operation, verdict: Verdict) -> None:
        self.verdicts.append((scope, operation.id, verdict))

    def operation_abandoned(self, asker: str, scope: str, operation: str) -> None:
        self.given_up.append(operation)

    def lease_renewed(self, asker: str, scope: str, lease: str, epoch: int, sent_s: float) -> None:
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


class Scene:
    """Scopes by name. Every machine has a clock that began elsewhere."""

    def __init__(self, seed: str, scopes: Sequence[str], *, servers: int = 2) -> None:
        self.seed = seed
        self.loop = SimLoop(seed)  # type: ignore[abstract]  # as much of a loop as is used here
        self.network = Network(self.loop, seed, NetworkConditions())
        self.listener = Listener()
        self.pace = RunTiming()
        self.processes: dict[str, SimProcess] = {}
        self.failed: list[tuple[str, BaseException | None]] = []
        self.noted: list[tuple[AnyClaim, Verdict]] = []
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

    def seat(self, process: SimProcess, scope: str) -> RoleContext:
        return RoleContext(process, self.stores[scope], self.servers[scope], self.listener, self.pace)

    def run(self, minutes: float) -> None:
        self.loop.run(self.loop.time() + 60 * minutes)
        assert not self.loop.failures, self.loop.failures
        assert not self.failed, self.failed

    def do(self, scope: str, work: Callable[[RoleContext], Coroutine[Any, Any, T]], *, minutes: float = 2) -> T:
        """Let a person do something there, to its end."""
        said: list[T] = []

        async def main(process: SimProcess) -> None:
            said.append(await work(self.seat(process, scope)))
            self.loop.stop()
            await asyncio.Event().wait()

        process = self.start(f"person-{len(self.processes)}", main)
        self.run(minutes)
        process.kill()
        assert said, f"nobody answered within {minutes} minutes"
        return said[0]

    def rows(self, scope: str, prefix: str) -> dict[str, Any]:
        """What the store has, as its own truth."""
        page = run_sync(self.stores[scope].store.range(prefix))
        return {row.key: decode(row.value) for row in page.rows}

    def restore(self, scope: str, backup: MemoryBackup, incarnation: str) -> None:
        """Put a backup in the place of a scope's store, as an operator would: its servers are ended first."""
        for name in self.servers[scope]:
            self.processes[name].kill()
        self.stores[scope].restore(backup, incarnation)
        for name in self.servers[scope]:
            self.processes[name].start()

    def backup(self, scope: str) -> MemoryBackup:
        return run_sync(cast(MemoryStore, self.stores[scope].store).backup())

    def accepted(self, kind: type[Claim]) -> int:
        """How many claims of a kind were accepted, by the players who noted them."""
        return sum(1 for claim, verdict in self.noted if isinstance(claim, kind) and isinstance(verdict, Accepted))

    def note(self, player: SimulatedRole) -> None:
        """Write down what a player hears."""
        heard = player.on_verdict

        def noting(claim: AnyClaim, verdict: Verdict) -> None:
            self.noted.append((claim, verdict))
            heard(claim, verdict)

        setattr(player, "on_verdict", noting)  # noqa: B010 - one instance's method, for this test only

    def finish(self) -> None:
        self.loop.finish()


async def must(seat: RoleContext, role: Role, *claims: AnyClaim, lease: str = "") -> list[Accepted]:
    client = seat.client(Actor("person", role))
    if lease:
        taken = await client.submit(Acquire(lease, HOUR))
        assert isinstance(taken, Accepted), taken
        client.actor = Actor("person", role, lease, taken.number)
    said = []
    for claim in claims:
        verdict = await client.submit(claim)
        assert isinstance(verdict, Accepted), (claim, verdict)
        said.append(verdict)
    return said


def tenant(name: str, cpu: int = 100_000, emergency: int = 40_000) -> Apply:
    quota = Amount({"cpu": cpu, "memory": 200 << 30, "devices/gpu": 16_000})
    spec = TenantSpec(quota=quota, emergency_quota=Amount({"cpu": emergency}))
    return Apply(Tenant(metadata=Metadata(name=name), spec=spec))


def node(name: str, region: str, zone: str, *, cpu: int = 8_000, gpus: int = 0) -> Apply:
    devices = tuple(Device(name=f"gpu-{n}", kind="gpu", model="a100") for n in range(gpus))
    capacity = Amount({"cpu": cpu, "memory": 16 << 30})
    spec = NodeSpec(region=region, zone=zone, capacity=capacity, devices=devices)
    return Apply(Node(metadata=Metadata(name=name, labels={"disk": "ssd"}), spec=spec))


async def furnish_region(seat: RoleContext) -> None:
    region = seat.scope
    nodes = [node(f"{region}-n{n}", region, "ab"[n % 2], gpus=2 if n < 2 else 0) for n in range(4)]
    made = await must(
        seat, Role.OPERATOR, Apply(Region(metadata=Metadata(name=region), spec=RegionSpec(zones=("a", "b")))), *nodes
    )
    marks = [Mark(f"{region}-n{n}", made[n + 1].revision, NodeHealth.READY) for n in range(4)]
    await must(seat, Role.NODES, *marks, lease="node-lifecycle/person")


async def furnish_upper(seat: RoleContext) -> None:
    regions = [Apply(Region(metadata=Metadata(name="r1"), spec=RegionSpec(zones=("a", "b"))))]
    await must(seat, Role.OPERATOR, *regions, tenant("t1"), tenant("t2"))


async def furnish_work(seat: RoleContext) -> None:
    """Somebody's work in a region: one replica bound, one that waits."""
    template = Template(command=("work", "-", "0"), resources=Amount({"cpu": 500}))
    work = Workload(metadata=Metadata(name="w", tenant="t1"), spec=WorkloadSpec(type="service", template=template, replicas=2))
    await must(seat, Role.OPERATOR, tenant("t1"), Apply(work))
    spawned = await must(seat, Role.WORKLOADS, Spawn("t1", "w", 1, 0, 2), lease="workloads/person")
    bind = Bind("replica/t1/w-0", spawned[0].revision, f"{seat.scope}-n0", "tenant/t1")
    await must(seat, Role.SCHEDULER, bind, lease="scheduler/person")
