"""Demo: mixed load on a thousand simulated nodes.

Shows the placement live; demo_command.py then explains the one job that stays pending. No scheduling decision is made here.

Only the nodes are simulated: they have no agents. The authority, its SQLite store, the scheduler that watches it, and every
claim between them are real.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from remit.assembly import build_scheduler, embedded_authority
from remit.client.authority_client import AuthorityClient
from remit.client.endpoint import InProcessEndpoint
from remit.client.lease_holder import LeaseHold, acquire
from remit.commitment.authority import Authority
from remit.law.refusals import REFUSALS
from remit.model.claims import Actor, AnyClaim, Apply, Code, Mark, Refused, Spawn
from remit.model.kinds import (
    Affinity,
    Device,
    DeviceRequest,
    Gang,
    Node,
    NodeHealth,
    NodeSpec,
    Placement,
    PriorityClass,
    PriorityClassSpec,
    Spread,
    Template,
    Tenant,
    TenantSpec,
    Workload,
    WorkloadSpec,
)
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Metadata
from remit.model.records import Phase
from remit.model.resources import WHOLE_DEVICE, Amount, Duration
from remit.model.roles import Role
from remit.observation.replica_table import PHASE_NUMBERS
from remit.proposal.scheduler import Scheduler
from remit.world.interfaces import World

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NODES: Final = 1_000
GPU_NODES: Final = 120
ZONES: Final = ("eu-a", "eu-b", "eu-c")
PENDING_JOB: Final = "train-large"
"""The job that is explained: it requests more GPUs on one node than any node has."""
DURATION_MS_MAX: Final = 30_000
_GI: Final = 1 << 30


class LoadStatus(NamedTuple):
    """State of the load at one moment."""

    bound: int
    pending: int
    by_zone: dict[str, int]
    reasons: dict[str, int]
    cpu_used: float
    """Fraction of all CPU that is allocated."""


class PlacementDemo:
    """A scope in a directory, its scheduler, and the load."""

    def __init__(self, authority: Authority, world: World) -> None:
        self.authority, self.world = authority, world
        self.scheduler = self._scheduler()
        self.submitted = 0

    def _client(self, name: str, role: Role) -> AuthorityClient:
        return AuthorityClient({"authority": InProcessEndpoint(self.authority)}, Actor(name, role), self.world)

    def _scheduler(self) -> Scheduler:
        store = self.authority.store
        return build_scheduler(store, store, self._client("scheduler-1", Role.SCHEDULER), self.world, name="scheduler-1")

    async def declare_cluster(self) -> None:
        """Declares a thousand ready nodes and three tenants."""
        await self._submit("operator", Role.OPERATOR, [Apply(obj) for obj in _cluster()])
        books = self.authority.books
        nodes = [books.objects[name] for name in books.keys("node/")]
        marks = [Mark(node.metadata.name, revision, NodeHealth.READY) for node, revision in nodes]
        await self._submit("node-lifecycle", Role.NODES, marks)

    async def submit(self) -> None:
        """Submits the load in waves."""
        workloads = await self._client_with_lease("workloads", Role.WORKLOADS)
        for wave in _waves():
            await self._submit("operator", Role.OPERATOR, [Apply(workload) for workload in wave])
            spawns = [
                Spawn(workload.metadata.tenant, workload.metadata.name, 1, 0, workload.spec.replicas) for workload in wave
            ]
            _check_accepted(await workloads.submit_many(spawns))
            self.submitted += sum(workload.spec.replicas for workload in wave)
            await self.world.clock.sleep_ms(250)

    def status(self) -> LoadStatus:
        view = self.scheduler.view
        phases, nodes = view.replicas.column("phase"), view.replicas.column("node")
        columns, zones = view.columns, {}
        for number, zone in enumerate(columns.zones):
            rows = columns.zone == number
            zones[zone] = int(rows[nodes[nodes >= 0]].sum())
        at = columns.resources.get("cpu", 0)
        cpu_total = int(columns.capacity[at].sum())
        cycle = self.scheduler.cycle
        reasons = {} if cycle is None else {reason: count.members for reason, count in cycle.backlog.reasons().items()}
        return LoadStatus(
            bound=int((phases == PHASE_NUMBERS[Phase.BOUND]).sum()),
            pending=int((phases == PHASE_NUMBERS[Phase.PENDING]).sum()),
            by_zone=zones,
            reasons=reasons,
            cpu_used=1 - int(columns.amounts[at].sum()) / cpu_total if cpu_total else 0.0,
        )

    async def _client_with_lease(self, name: str, role: Role) -> AuthorityClient:
        client = self._client(name, role)
        lease = await acquire(client, self.world.clock, role.value, Duration(600_000))
        if not isinstance(lease, LeaseHold):
            raise RuntimeError(f"{name} did not get its lease: {lease.code}: {lease.detail}")
        client.actor = lease.actor
        return client

    async def _submit(self, name: str, role: Role, claims: Sequence[AnyClaim]) -> None:
        client = self._client(name, role) if role is Role.OPERATOR else await self._client_with_lease(name, role)
        _check_accepted(await client.submit_many(claims))


def _check_accepted(verdicts: Sequence[Any]) -> None:
    for verdict in verdicts:
        if isinstance(verdict, Refused):
            raise RuntimeError(f"refused: {verdict.code}: {verdict.detail}")


async def show(console: Console, directory: Path, world: World) -> LoadStatus:
    """Places the load with a live display; the store stays in the directory."""
    async with embedded_authority(directory, world) as authority, asyncio.TaskGroup() as group:
        authority_task = group.create_task(authority.run())
        placement = PlacementDemo(authority, world)
        await placement.declare_cluster()
        console.print(f"{NODES:,} simulated nodes are ready, {GPU_NODES} of them with 8 GPUs, in 3 zones; there are 3 tenants.")
        scheduler_task = group.create_task(placement.scheduler.run())
        submitting = group.create_task(placement.submit())
        last = await _watch(console, placement, submitting)
        for task in (scheduler_task, authority_task):
            task.cancel()
    return last


async def _watch(console: Console, placing: PlacementDemo, submitting: asyncio.Task[None]) -> LoadStatus:
    from rich.live import Live

    clock = placing.world.clock
    began_ms = clock.now_ms()
    quiet_since_ms, bound_before, ended_ms = began_ms, -1, 0
    with Live(console=console, refresh_per_second=8, transient=False) as live:
        while True:
            await clock.sleep_ms(120)
            now = placing.status()
            if now.bound != bound_before:
                quiet_since_ms, bound_before, ended_ms = clock.now_ms(), now.bound, clock.now_ms() - began_ms
            live.update(_table(placing, now, max(ended_ms, 1)))
            is_quiet = submitting.done() and clock.now_ms() - quiet_since_ms > 1_500
            if is_quiet or clock.now_ms() - began_ms > DURATION_MS_MAX:
                return now


def _table(placement: PlacementDemo, now: LoadStatus, passed_ms: int) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("submitted", f"{placement.submitted:,} replicas")
    table.add_row("bound", f"{now.bound:,}, durably", ProgressBar(max(placement.submitted, 1), now.bound, width=40))
    table.add_row("rate", f"{1000 * now.bound / passed_ms:,.0f} binds a second so far, submission included")
    table.add_row("CPU taken", f"{100 * now.cpu_used:.0f} %", ProgressBar(1, now.cpu_used, width=40))
    for zone, count in now.by_zone.items():
        table.add_row(f"in {zone}", f"{count:,}", ProgressBar(max(now.bound, 1), count, width=40))
    for reason, count in now.reasons.items():
        table.add_row("waiting", f"{count:,}", REFUSALS[Code(reason)].meaning)
    return table


# ------------------------------------------------------------------------------------------------------- cluster and load


def _cluster() -> Iterator[AnyObject]:
    for i in range(NODES):
        gpus = i < GPU_NODES
        yield Node(
            metadata=Metadata(name=f"node-{i:04d}", labels={"disk": "ssd" if i % 4 else "hdd"}),
            spec=NodeSpec(
                region="eu",
                zone=ZONES[i % len(ZONES)],
                pool="gpu" if gpus else "default",
                capacity=Amount({"cpu": 64_000 if gpus else 32_000, "memory": (512 if gpus else 128) * _GI}),
                devices=tuple(Device(name=f"gpu-{d}", kind="gpu", model="A100") for d in range(8)) if gpus else (),
            ),
        )
    for name, share in (("ads", 3), ("fraud", 1), ("search", 6)):
        quota = {"cpu": share * 4_000_000, "memory": share * 16_000 * _GI, "devices/gpu": share * 120 * WHOLE_DEVICE}
        yield Tenant(metadata=Metadata(name=name), spec=TenantSpec(quota=Amount(quota), weight=share))
    yield PriorityClass(metadata=Metadata(name="critical"), spec=PriorityClassSpec(value=1_000))
    yield PriorityClass(metadata=Metadata(name="batch"), spec=PriorityClassSpec(value=-100))


def _waves() -> Iterator[list[Workload]]:
    """Services with topology spread, large jobs, gangs, GPU shares, and one job that fits on no node."""
    yield [_workload("search", f"api-{i}", 150, 1_000, 1, spread="zone", priority_class="critical") for i in range(8)]
    yield [_workload("ads", f"ranker-{i}", 200, 2_000, 4, one_per_node=i % 2 == 0) for i in range(6)]
    yield [_workload("fraud", f"features-{i}", 500, 1_000, 1, type_="job", priority_class="batch") for i in range(6)]
    yield [_workload("search", f"embed-{i}", 50, 1_000, 4, share="250m") for i in range(6)]
    yield [_workload("ads", f"train-{i}", 8, 4_000, 16, gpus=4, gang=8, type_="job") for i in range(8)]
    yield [
        _workload("fraud", PENDING_JOB, 4, 8_000, 64, gpus=16, type_="job"),
        _workload("search", "index", 2_000, 500, 1, type_="job"),
    ]


def _workload(
    tenant: str,
    name: str,
    replicas: int,
    cpu: int,
    memory: int,
    *,
    spread: str = "",
    one_per_node: bool = False,
    share: str = "",
    gpus: int = 0,
    gang: int = 0,
    priority_class: str = "",
    type_: Any = "service",
) -> Workload:
    labels = {"app": name}
    devices = (DeviceRequest(kind="gpu", share=share),) if share else (DeviceRequest(kind="gpu", count=gpus),) if gpus else ()
    return Workload(
        metadata=Metadata(name=name, tenant=tenant, labels=labels),
        spec=WorkloadSpec(
            type=type_,
            replicas=replicas,
            priority_class=priority_class,
            gang=Gang(min=gang) if gang else None,
            template=Template(command=("work",), resources=Amount({"cpu": cpu, "memory": memory * _GI}), devices=devices),
            placement=Placement(
                topology_spread=(Spread(topology_key=spread, label_selector=labels),) if spread else (),
                anti_affinity=(Affinity(topology_key="node", label_selector=labels),) if one_per_node else (),
            ),
        ),
    )
