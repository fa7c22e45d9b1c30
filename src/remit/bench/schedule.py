"""`bench schedule`: queue to durable bind.

Runs view, queue, kernel, claims, authority and SQLite (FULL durability) in one process; the scheduler follows the store and
passes claims by reference. Before the clock starts, all jobs are in the store, each a workload with one replica, and the
scheduler's view has listed them (`listed_s` is the time of the list; `with_list_per_s` includes it). The clock runs from the
moment the scheduler may acquire its lease until the last bind is durable and visible in the view.

The latency of an arriving job is the time from its replica being durably pending to its bind being durable and visible.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess  # noqa: TID251 - memory is measured in a separate process
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from remit.assembly import build_scheduler, embedded_authority
from remit.bench.commit import ClaimClient, require_accepted
from remit.bench.report import BenchAim, BenchReport, print_progress
from remit.client.authority_client import AuthorityClient
from remit.client.endpoint import InProcessEndpoint
from remit.commitment.authority import Authority
from remit.law.refusals import REFUSALS
from remit.model.claims import Acquire, Actor, Apply, Code, Mark, Move, Operation, Spawn, operation_id
from remit.model.kinds import (
    Affinity,
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
from remit.model.metadata import Metadata
from remit.model.records import Phase
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from remit.observation.replica_table import PENDING, PHASE_NUMBERS
from remit.observation.scheduler_view import SchedulerView
from remit.proposal.placement.preemption_candidates import VictimRateLimit
from remit.proposal.scheduler import Scheduler, SchedulerTiming
from remit.store.protocol import Store
from remit.world.clock import BootClock
from remit.world.interfaces import World
from remit.world.production import production

TENANT: Final = "acme"
ZONES: Final = ("eu-a", "eu-b", "eu-c")
_CLOCK: Final = BootClock()
_LABEL: Final = {"app": "batch"}
FEATURES: Final[dict[str, Placement]] = {
    "plain": Placement(),
    "spread": Placement(topology_spread=(Spread(topology_key="zone", max_skew=5, label_selector=_LABEL),)),
    "anti-affinity": Placement(anti_affinity=(Affinity(topology_key="node", label_selector=_LABEL),)),
}
KUBE_PER_S: Final = {"plain": 280, "spread": 80, "anti-affinity": 180, "preemption of 3": 26}
"""Binds per second of kube-scheduler with API server and etcd on a comparable machine; preemption at 1,000 nodes."""


class ScheduleSizes(NamedTuple):
    nodes: int
    plain: tuple[int, ...]
    coupled: int
    low: int
    urgent: int
    arrivals_s: int
    memory: int


FULL: Final = ScheduleSizes(5_000, (10_000, 50_000), 5_000, 20_000, 5_000, 10, 1_000_000)
QUICK: Final = ScheduleSizes(5_000, (10_000,), 3_000, 8_000, 2_000, 3, 100_000)
ARRIVALS_PER_S: Final = 500
JOB_RESOURCES: Final = Amount({"cpu": 100, "memory": 500 << 20})
LOW_RESOURCES: Final = Amount({"cpu": 900, "memory": 500 << 20})
URGENT_RESOURCES: Final = {"preemption": LOW_RESOURCES, "preemption of 3": Amount({"cpu": 3_000, "memory": 500 << 20})}
"""Requests of urgent jobs: with the first, each replaces one victim of its own size; with the second, three victims, as in the
benchmark of kube-scheduler.
"""


def measure(quick: bool, data: Path | None) -> BenchReport:
    with tempfile.TemporaryDirectory(prefix="remit-bench-", dir=data) as directory:
        return asyncio.run(_measure(QUICK if quick else FULL, Path(directory)))


async def _measure(sizes: ScheduleSizes, directory: Path) -> BenchReport:
    rows: list[dict[str, Any]] = []
    for feature, counts in (("plain", sizes.plain), ("spread", (sizes.coupled,)), ("anti-affinity", (sizes.coupled,))):
        for count in counts:
            print_progress(f"{feature}: {count:,} jobs on {sizes.nodes:,} nodes ...")
            rows.append(await _drain_queue(directory / f"{feature}-{count}", feature, sizes.nodes, count))
    for feature, resources in URGENT_RESOURCES.items():
        print_progress(f"{feature}: {sizes.urgent:,} urgent jobs among {sizes.low:,} ...")
        rows.append(await _preempt(directory / feature, sizes, feature, resources))
    print_progress(f"arrivals: {ARRIVALS_PER_S} jobs per second for {sizes.arrivals_s} s ...")
    rows.append(await _measure_arrivals(directory / "arrivals", sizes))
    print_progress(f"memory: a view of 50,000 nodes and {sizes.memory:,} replicas, in a separate process ...")
    memory = _memory_in_child(50_000, sizes.memory)
    rows.append(memory)
    plain = max(row["per_s"] for row in rows if row.get("feature") == "plain")
    named = {row.get("feature"): row for row in rows}
    aims = [
        BenchAim("binds, from a full queue", "1/s", 20_000, plain, "higher"),
        BenchAim("p99 of one job that arrives at 500/s", "ms", 25, named["arrivals"]["p99_ms"], "lower"),
        BenchAim("binds with topology spread", "1/s", 3_000, named["spread"]["per_s"], "higher"),
        BenchAim("binds with anti-affinity", "1/s", 3_000, named["anti-affinity"]["per_s"], "higher"),
        BenchAim("binds by preemption", "1/s", 3_000, named["preemption"]["per_s"], "higher"),
        BenchAim("memory of a million replicas on 50,000 nodes", "MiB", 1_536, memory["million_mib"], "lower"),
    ]
    return BenchReport("schedule", rows, aims)


# -------------------------------------------------------------------------------------------------------------- the cluster


class BenchScope:
    """An authority and the clients that submit claims to it."""

    def __init__(self, authority: Authority, world: World, group: asyncio.TaskGroup) -> None:
        self.authority, self.world, self.group = authority, world, group
        self.operator = ClaimClient(authority, Role.OPERATOR)
        self.nodes, self.workloads = ClaimClient(authority, Role.NODES), ClaimClient(authority, Role.WORKLOADS)

    async def apply(self, objects: Iterable[Any]) -> None:
        for verdict in await self.operator.submit(Apply(obj) for obj in objects):
            require_accepted(verdict)

    async def create_cluster(self, nodes: int, cpu: int) -> None:
        await self.nodes.acquire_lease()
        await self.workloads.acquire_lease()
        capacity = Amount({"cpu": cpu, "memory": 32 << 30})
        await self.apply(
            Node(metadata=Metadata(name=f"node-{i}"), spec=NodeSpec(region="eu", zone=ZONES[i % 3], capacity=capacity))
            for i in range(nodes)
        )
        quota = Amount({"cpu": 10**12, "memory": 10**16})
        await self.apply(
            [
                Tenant(metadata=Metadata(name=TENANT), spec=TenantSpec(quota=quota)),
                PriorityClass(metadata=Metadata(name="urgent"), spec=PriorityClassSpec(value=1_000)),
            ]
        )
        rows = [self.authority.books.objects[name] for name in self.authority.books.keys("node/")]
        marks = [Mark(node.metadata.name, revision, NodeHealth.READY) for node, revision in rows]
        for verdict in await self.nodes.submit(marks):
            require_accepted(verdict)

    async def submit(self, jobs: Sequence[Workload]) -> None:
        """Create workloads and their replicas, all pending."""
        for start in range(0, len(jobs), 5_000):
            batch = jobs[start : start + 5_000]
            await self.apply(batch)
            spawns = [Spawn(TENANT, job.metadata.name, 1, 0, job.spec.replicas) for job in batch]
            for verdict in await self.workloads.submit(spawns):
                require_accepted(verdict)

    def scheduler(self, rhythm: SchedulerTiming = SchedulerTiming()) -> Scheduler:
        store: Store = self.authority.store
        client = AuthorityClient(
            {"authority": InProcessEndpoint(self.authority, by_reference=True)}, Actor("bench", Role.SCHEDULER), self.world
        )
        return build_scheduler(
            store, store, client, self.world, name="bench", timing=rhythm, victim_rate=VictimRateLimit(1_000_000, 1_000_000)
        )


def _job(
    index: int, feature: str = "plain", resources: Amount = JOB_RESOURCES, priority_class: str = "", prefix: str = "job"
) -> Workload:
    return Workload(
        metadata=Metadata(name=f"{prefix}-{index}", tenant=TENANT, labels=_LABEL),
        spec=WorkloadSpec(
            type="job",
            priority_class=priority_class,
            template=Template(command=("work",), resources=resources),
            placement=FEATURES[feature],
        ),
    )


@asynccontextmanager
async def _scope(directory: Path) -> AsyncIterator[BenchScope]:
    world = production()
    try:
        async with embedded_authority(directory, world) as authority, asyncio.TaskGroup() as group:
            task = group.create_task(authority.run())
            try:
                yield BenchScope(authority, world, group)
            finally:
                task.cancel()
    finally:
        await world.offload.close()


@asynccontextmanager
async def _following_scheduler(scope: BenchScope, scheduler_: Scheduler) -> AsyncIterator[float]:
    """Let the scheduler follow the store without leading. Yields the duration of its initial list in seconds."""
    start = _CLOCK.now_ns()
    task = scope.group.create_task(scheduler_.follow())
    try:
        wake = scheduler_.view.subscribe()
        while not scheduler_.view.is_current:
            await wake.wait()
            wake.clear()
        gc.collect()
        gc.freeze()
        yield (_CLOCK.now_ns() - start) / 1e9
    finally:
        task.cancel()


@asynccontextmanager
async def _leading_scheduler(scope: BenchScope, scheduler_: Scheduler) -> AsyncIterator[None]:
    task = scope.group.create_task(scheduler_.lead())
    try:
        yield
    finally:
        task.cancel()


def _pending_count(view: SchedulerView) -> int:
    return int(np.count_nonzero(view.replicas.column("phase") == PENDING))


async def _wait_until_bound(scheduler_: Scheduler, at_most: int = 0, timeout_s: float = 120) -> None:
    """Wait until at most `at_most` replicas are pending."""
    until = _CLOCK.now_ns() + timeout_s * 1e9
    while (pending := _pending_count(scheduler_.view)) > at_most:
        if _CLOCK.now_ns() > until:
            raise RuntimeError(f"{pending} replicas are still pending: {_pending_reasons(scheduler_)}")
        await asyncio.sleep(0.005)


def _pending_reasons(scheduler_: Scheduler) -> str:
    reasons = {} if scheduler_.cycle is None else scheduler_.cycle.backlog.reasons()
    return "; ".join(f"{count.members} {REFUSALS[Code(reason)].meaning}" for reason, count in reasons.items()) or "no reason"


# ------------------------------------------------------------------------------------------------------------------ the runs


async def _drain_queue(directory: Path, feature: str, nodes: int, count: int) -> dict[str, Any]:
    async with _scope(directory) as scope:
        await scope.create_cluster(nodes, 32_000)
        await scope.submit([_job(i, feature) for i in range(count)])
        scheduler_ = scope.scheduler()
        async with _following_scheduler(scope, scheduler_) as listed_s:
            start = _CLOCK.now_ns()
            async with _leading_scheduler(scope, scheduler_):
                await _wait_until_bound(scheduler_)
                seconds = (_CLOCK.now_ns() - start) / 1e9
        return {
            "feature": feature,
            "nodes": nodes,
            "jobs": count,
            "seconds": seconds,
            "per_s": count / seconds,
            "kube_ratio": count / seconds / KUBE_PER_S[feature],
            "listed_s": listed_s,
            "with_list_per_s": count / (seconds + listed_s),
        }


async def _preempt(directory: Path, sizes: ScheduleSizes, feature: str, resources: Amount) -> dict[str, Any]:
    """Fill nodes with four low-priority replicas each, then submit urgent jobs that need some of them preempted. Simulated
    agents confirm every stop as soon as they see it.
    """
    nodes = sizes.low // 4
    async with _scope(directory) as scope:
        await scope.create_cluster(nodes, 4_000)
        await scope.submit([_job(i, resources=LOW_RESOURCES, prefix="low") for i in range(sizes.low)])
        scheduler_ = scope.scheduler()
        async with _following_scheduler(scope, scheduler_):
            async with _leading_scheduler(scope, scheduler_):
                await _wait_until_bound(scheduler_)
            agents = await _acquire_agent_leases(scope, nodes)
            await scope.submit(
                [_job(i, resources=resources, priority_class="urgent", prefix="urgent") for i in range(sizes.urgent)]
            )
            stopping = scope.group.create_task(_confirm_stops(scope, scheduler_.view, agents))
            start = _CLOCK.now_ns()
            async with _leading_scheduler(scope, scheduler_):
                await _wait_until_urgent_bound(scheduler_, sizes.urgent)
                seconds = (_CLOCK.now_ns() - start) / 1e9
            stopping.cancel()
        return {
            "feature": feature,
            "nodes": nodes,
            "jobs": sizes.urgent,
            "seconds": seconds,
            "per_s": sizes.urgent / seconds,
            **({"kube_ratio": sizes.urgent / seconds / KUBE_PER_S[feature]} if feature in KUBE_PER_S else {}),
        }


async def _wait_until_urgent_bound(scheduler_: Scheduler, count: int) -> None:
    bound, until = PHASE_NUMBERS[Phase.BOUND], _CLOCK.now_ns() + 120e9
    while True:
        replicas = scheduler_.view.replicas
        if int(np.count_nonzero((replicas.column("phase") == bound) & (replicas.column("priority") == 1_000))) >= count:
            return
        if _CLOCK.now_ns() > until:
            raise RuntimeError(f"urgent replicas are still pending: {_pending_reasons(scheduler_)}")
        await asyncio.sleep(0.005)


async def _acquire_agent_leases(scope: BenchScope, nodes: int) -> dict[str, Actor]:
    """Acquire the agent lease of every node."""
    actors = {}
    status = await scope.authority.status()
    operations = []
    for index in range(nodes):
        actor = Actor(f"agent-{index}", Role.AGENT)
        claim = Acquire(f"agent/node-{index}", Duration(3_600_000))
        operations.append(Operation(_operation_id(status, f"agent{index}"), actor, claim))
    for index, verdict in enumerate(await scope.authority.submit(operations)):
        actors[f"node-{index}"] = Actor(f"agent-{index}", Role.AGENT, f"agent/node-{index}", require_accepted(verdict))
    return actors


def _operation_id(status: Any, nonce: str) -> Any:
    return operation_id(status.incarnation, status.window, nonce)


async def _confirm_stops(scope: BenchScope, view: SchedulerView, agents: dict[str, Actor]) -> None:
    """Confirm every drain at once: `stop`, then `stopped`."""
    wake = view.subscribe()
    draining, stopping = PHASE_NUMBERS[Phase.DRAINING], PHASE_NUMBERS[Phase.STOPPING]
    count = 0
    while True:
        wake.clear()
        phases = view.replicas.column("phase")
        operations = []
        status = await scope.authority.status()
        for phase, transition in ((draining, "stop"), (stopping, "stopped")):
            for slot in np.flatnonzero(phases == phase).tolist():
                count += 1
                replicas = view.replicas
                node = view.columns.nodes[replicas.at.node[slot]]
                if node is None:
                    continue
                claim = Move(
                    replicas.keys[slot],
                    replicas.at.revision[slot],
                    transition,
                    replicas.at.attempt[slot],
                    "stopped" if transition == "stopped" else "",
                )
                operations.append(Operation(_operation_id(status, f"stop{count}"), agents[node.metadata.name], claim))
        if operations:
            await scope.authority.submit(operations)
        else:
            await wake.wait()


async def _measure_arrivals(directory: Path, sizes: ScheduleSizes) -> dict[str, Any]:
    async with _scope(directory) as scope:
        await scope.create_cluster(sizes.nodes, 32_000)
        count = ARRIVALS_PER_S * sizes.arrivals_s
        await scope.apply([_job(i) for i in range(count)])
        await scope.submit([_job(i, prefix="first") for i in range(100)])
        scheduler_ = scope.scheduler()
        async with _following_scheduler(scope, scheduler_), _leading_scheduler(scope, scheduler_):
            await _wait_until_bound(scheduler_)
            waits = await _submit_one_by_one(scope, scheduler_, count)
        return {
            "feature": "arrivals",
            "nodes": sizes.nodes,
            "jobs": count,
            "per_s": ARRIVALS_PER_S,
            "p50_ms": _quantile(waits, 0.5),
            "p99_ms": _quantile(waits, 0.99),
            "max_ms": max(waits),
        }


async def _submit_one_by_one(scope: BenchScope, scheduler_: Scheduler, count: int) -> list[float]:
    waits: dict[str, float] = {}
    pending_at: dict[str, int] = {}
    all_bound = asyncio.Event()
    view = scheduler_.view

    async def watch() -> None:
        """Record the latency of each job when its row shows it bound."""
        wake = view.subscribe()
        waiting: set[str] = set()
        while len(waits) < count:
            await wake.wait()
            wake.clear()
            now = _CLOCK.now_ns()
            waiting.update(pending_at.keys() - waits.keys())
            for key in sorted(waiting):
                slot = view.replicas.slots.get(key)
                if slot is not None and view.replicas.at.phase[slot] != PENDING:
                    waits[key] = (now - pending_at[key]) / 1e6
                    waiting.discard(key)
        all_bound.set()

    async def submit(index: int) -> None:
        for verdict in await scope.workloads.submit([Spawn(TENANT, f"job-{index}", 1, 0, 1)]):
            require_accepted(verdict)
        pending_at[f"replica/{TENANT}/job-{index}-0"] = _CLOCK.now_ns()

    watching = scope.group.create_task(watch())
    start = _CLOCK.now_ns()
    async with asyncio.TaskGroup() as group:
        for index in range(count):
            due_ns = start + index * 1_000_000_000 // ARRIVALS_PER_S
            if (pause := (due_ns - _CLOCK.now_ns()) / 1e9) > 0:
                await asyncio.sleep(pause)
            group.create_task(submit(index))
    async with scope.world.clock.timeout_ms(60_000):
        await all_bound.wait()
    await watching
    return list(waits.values())


# ---------------------------------------------------------------------------------------------------------------- the memory


def _memory_in_child(nodes: int, replicas: int) -> dict[str, Any]:
    child = [sys.executable, "-m", "remit.bench.schedule", str(nodes), str(replicas)]
    done = subprocess.run(child, stdout=subprocess.PIPE, check=True)  # noqa: S603  (our own interpreter and module)
    memory: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
    return memory


def _quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


if __name__ == "__main__":
    from remit.bench.view_memory import measure_view_memory

    sys.stdout.write(msgspec.json.encode(measure_view_memory(int(sys.argv[1]), int(sys.argv[2]))).decode() + "\n")
