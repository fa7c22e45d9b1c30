"""`bench schedule`: queue to durable bind.

The whole way: view, backlog, kernel, claims, authority, SQLite.

Everything is real and in one process: the authority on a SQLite store with FULL durability, the scheduler following that store,
asking by reference. The jobs are in the store before the clock starts, each a workload of its own with one replica, and the
scheduler's view has them (`listed_s` says how long the list took; `with_list_per_s` counts it in). The clock runs from the
moment that the scheduler may ask for its lease until the last bind is durable and seen.

A job that arrives is measured from when its replica is durably pending until its bind is durable and seen.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess  # noqa: TID251 - memory is measured in a process of its own
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from remit.assembly import embedded, scheduler
from remit.bench.commit import Asker, accepted
from remit.bench.report import Aim, Report, say
from remit.client.authority_client import Client
from remit.client.endpoint import InProcess
from remit.commitment.authority import Authority
from remit.law.refusals import REFUSALS
from remit.model.claims import Acquire, Actor, Apply, Code, Mark, Move, Operation, Role, Spawn, operation_id
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
from remit.observation.replica_table import NUMBER, PENDING
from remit.observation.scheduler_view import View
from remit.proposal.placement.preemption_candidates import Pace
from remit.proposal.scheduler import Rhythm, Scheduler
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
KUBE: Final = {"plain": 280, "spread": 80, "anti-affinity": 180, "preemption of 3": 26}
"""Binds a second of kube-scheduler, with API server and etcd on such a machine; preemption at 1,000 nodes."""


class Sizes(NamedTuple):
    nodes: int
    plain: tuple[int, ...]
    coupled: int
    low: int
    urgent: int
    arrivals_s: int
    memory: int


FULL: Final = Sizes(5_000, (10_000, 50_000), 5_000, 20_000, 5_000, 10, 1_000_000)
QUICK: Final = Sizes(5_000, (10_000,), 3_000, 8_000, 2_000, 3, 100_000)
ARRIVALS_PER_S: Final = 500
EACH: Final = Amount({"cpu": 100, "memory": 500 << 20})
LOW: Final = Amount({"cpu": 900, "memory": 500 << 20})
URGENT: Final = {"preemption": LOW, "preemption of 3": Amount({"cpu": 3_000, "memory": 500 << 20})}
"""Where each takes the place of one that is as large as it is, and where three have to go for it, as in kube's benchmark."""


def measure(quick: bool, data: Path | None) -> Report:
    with tempfile.TemporaryDirectory(prefix="remit-bench-", dir=data) as directory:
        return asyncio.run(_measure(QUICK if quick else FULL, Path(directory)))


async def _measure(sizes: Sizes, directory: Path) -> Report:
    rows: list[dict[str, Any]] = []
    for feature, counts in (("plain", sizes.plain), ("spread", (sizes.coupled,)), ("anti-affinity", (sizes.coupled,))):
        for count in counts:
            say(f"{feature}: {count:,} jobs on {sizes.nodes:,} nodes ...")
            rows.append(await _drain(directory / f"{feature}-{count}", feature, sizes.nodes, count))
    for feature, each in URGENT.items():
        say(f"{feature}: {sizes.urgent:,} urgent jobs among {sizes.low:,} ...")
        rows.append(await _preempt(directory / feature, sizes, feature, each))
    say(f"arrivals: {ARRIVALS_PER_S} jobs a second for {sizes.arrivals_s} s ...")
    rows.append(await _arrive(directory / "arrivals", sizes))
    say(f"memory: a view of 50,000 nodes and {sizes.memory:,} replicas, in a process of its own ...")
    held = _memory_apart(50_000, sizes.memory)
    rows.append(held)
    plain = max(row["per_s"] for row in rows if row.get("feature") == "plain")
    named = {row.get("feature"): row for row in rows}
    aims = [
        Aim("binds, from a full queue", "1/s", 20_000, plain, "higher"),
        Aim("p99 of one job that arrives at 500/s", "ms", 25, named["arrivals"]["p99_ms"], "lower"),
        Aim("binds with topology spread", "1/s", 3_000, named["spread"]["per_s"], "higher"),
        Aim("binds with anti-affinity", "1/s", 3_000, named["anti-affinity"]["per_s"], "higher"),
        Aim("binds by preemption", "1/s", 3_000, named["preemption"]["per_s"], "higher"),
        Aim("memory of a million replicas on 50,000 nodes", "MiB", 1_536, held["million_mib"], "lower"),
    ]
    return Report("schedule", rows, aims)


# -------------------------------------------------------------------------------------------------------------- the cluster


class Scope:
    """An authority, and whoever asks it."""

    def __init__(self, authority: Authority, world: World, group: asyncio.TaskGroup) -> None:
        self.authority, self.world, self.group = authority, world, group
        self.operator = Asker(authority, Role.OPERATOR)
        self.nodes, self.workloads = Asker(authority, Role.NODES), Asker(authority, Role.WORKLOADS)

    async def declare(self, things: Iterable[Any]) -> None:
        for verdict in await self.operator.ask(Apply(thing) for thing in things):
            accepted(verdict)

    async def furnish(self, nodes: int, cpu: int) -> None:
        await self.nodes.lease()
        await self.workloads.lease()
        capacity = Amount({"cpu": cpu, "memory": 32 << 30})
        await self.declare(
            Node(metadata=Metadata(name=f"node-{i}"), spec=NodeSpec(region="eu", zone=ZONES[i % 3], capacity=capacity))
            for i in range(nodes)
        )
        quota = Amount({"cpu": 10**12, "memory": 10**16})
        await self.declare(
            [
                Tenant(metadata=Metadata(name=TENANT), spec=TenantSpec(quota=quota)),
                PriorityClass(metadata=Metadata(name="urgent"), spec=PriorityClassSpec(value=1_000)),
            ]
        )
        known = [self.authority.books.things[name] for name in self.authority.books.keys("node/")]
        marks = [Mark(node.metadata.name, revision, NodeHealth.READY) for node, revision in known]
        for verdict in await self.nodes.ask(marks):
            accepted(verdict)

    async def submit(self, jobs: Sequence[Workload]) -> None:
        """Declared, and their replicas pending."""
        for start in range(0, len(jobs), 5_000):
            part = jobs[start : start + 5_000]
            await self.declare(part)
            spawns = [Spawn(TENANT, job.metadata.name, 1, 0, job.spec.replicas) for job in part]
            for verdict in await self.workloads.ask(spawns):
                accepted(verdict)

    def scheduler(self, rhythm: Rhythm = Rhythm()) -> Scheduler:
        store: Store = self.authority.store
        client = Client({"authority": InProcess(self.authority, by_reference=True)}, Actor("bench", Role.SCHEDULER), self.world)
        return scheduler(store, store, client, self.world, name="bench", rhythm=rhythm, pace=Pace(1_000_000, 1_000_000))


def _job(index: int, feature: str = "plain", each: Amount = EACH, rank: str = "", sort: str = "job") -> Workload:
    return Workload(
        metadata=Metadata(name=f"{sort}-{index}", tenant=TENANT, labels=_LABEL),
        spec=WorkloadSpec(
            type="job",
            priority_class=rank,
            template=Template(command=("work",), resources=each),
            placement=FEATURES[feature],
        ),
    )


@asynccontextmanager
async def _scope(directory: Path) -> AsyncIterator[Scope]:
    world = production()
    try:
        async with embedded(directory, world) as authority, asyncio.TaskGroup() as group:
            running = group.create_task(authority.run())
            try:
                yield Scope(authority, world, group)
            finally:
                running.cancel()
    finally:
        await world.offload.close()


@asynccontextmanager
async def _following(scope: Scope, placing: Scheduler) -> AsyncIterator[float]:
    """The scheduler follows, and does not lead yet; answers how long its list took."""
    start = _CLOCK.now_ns()
    following = scope.group.create_task(placing.follow())
    try:
        wake = placing.view.subscribe()
        while not placing.view.sober:
            await wake.wait()
            wake.clear()
        gc.collect()
        gc.freeze()
        yield (_CLOCK.now_ns() - start) / 1e9
    finally:
        following.cancel()


@asynccontextmanager
async def _leading(scope: Scope, placing: Scheduler) -> AsyncIterator[None]:
    leading = scope.group.create_task(placing.lead())
    try:
        yield
    finally:
        leading.cancel()


def _pending(view: View) -> int:
    return int(np.count_nonzero(view.replicas.column("phase") == PENDING))


async def _bound(placing: Scheduler, least: int = 0, patience_s: float = 120) -> None:
    """Until no more than so many are pending."""
    until = _CLOCK.now_ns() + patience_s * 1e9
    while (left := _pending(placing.view)) > least:
        if _CLOCK.now_ns() > until:
            raise RuntimeError(f"{left} replicas still wait: {_why(placing)}")
        await asyncio.sleep(0.005)


def _why(placing: Scheduler) -> str:
    reasons = {} if placing.cycle is None else placing.cycle.backlog.reasons()
    return "; ".join(f"{count.members} {REFUSALS[Code(reason)].meaning}" for reason, count in reasons.items()) or "no reason"


# ------------------------------------------------------------------------------------------------------------------ the runs


async def _drain(directory: Path, feature: str, nodes: int, count: int) -> dict[str, Any]:
    async with _scope(directory) as scope:
        await scope.furnish(nodes, 32_000)
        await scope.submit([_job(i, feature) for i in range(count)])
        placing = scope.scheduler()
        async with _following(scope, placing) as listed_s:
            start = _CLOCK.now_ns()
            async with _leading(scope, placing):
                await _bound(placing)
                seconds = (_CLOCK.now_ns() - start) / 1e9
        return {
            "feature": feature,
            "nodes": nodes,
            "jobs": count,
            "seconds": seconds,
            "per_s": count / seconds,
            "kube_ratio": count / seconds / KUBE[feature],
            "listed_s": listed_s,
            "with_list_per_s": count / (seconds + listed_s),
        }


async def _preempt(directory: Path, sizes: Sizes, feature: str, each: Amount) -> dict[str, Any]:
    """Nodes full of work of low priority, four on each; urgent work that needs some of them to go, and agents that confirm
    every stop as soon as they see the order."""
    nodes = sizes.low // 4
    async with _scope(directory) as scope:
        await scope.furnish(nodes, 4_000)
        await scope.submit([_job(i, each=LOW, sort="low") for i in range(sizes.low)])
        placing = scope.scheduler()
        async with _following(scope, placing):
            async with _leading(scope, placing):
                await _bound(placing)
            agents = await _agents(scope, nodes)
            await scope.submit([_job(i, each=each, rank="urgent", sort="urgent") for i in range(sizes.urgent)])
            stopping = scope.group.create_task(_stop_all(scope, placing.view, agents))
            start = _CLOCK.now_ns()
            async with _leading(scope, placing):
                await _urgent_bound(placing, sizes.urgent)
                seconds = (_CLOCK.now_ns() - start) / 1e9
            stopping.cancel()
        return {
            "feature": feature,
            "nodes": nodes,
            "jobs": sizes.urgent,
            "seconds": seconds,
            "per_s": sizes.urgent / seconds,
            **({"kube_ratio": sizes.urgent / seconds / KUBE[feature]} if feature in KUBE else {}),
        }


async def _urgent_bound(placing: Scheduler, count: int) -> None:
    bound, until = NUMBER[Phase.BOUND], _CLOCK.now_ns() + 120e9
    while True:
        kept = placing.view.replicas
        if int(np.count_nonzero((kept.column("phase") == bound) & (kept.column("priority") == 1_000))) >= count:
            return
        if _CLOCK.now_ns() > until:
            raise RuntimeError(f"urgent work still waits: {_why(placing)}")
        await asyncio.sleep(0.005)


async def _agents(scope: Scope, nodes: int) -> dict[str, Actor]:
    """The lease of every node's agent."""
    actors = {}
    status = await scope.authority.status()
    operations = []
    for index in range(nodes):
        actor = Actor(f"agent-{index}", Role.AGENT)
        claim = Acquire(f"agent/node-{index}", Duration(3_600_000))
        operations.append(Operation(_id(status, f"agent{index}"), actor, claim))
    for index, verdict in enumerate(await scope.authority.ask(operations)):
        actors[f"node-{index}"] = Actor(f"agent-{index}", Role.AGENT, f"agent/node-{index}", accepted(verdict))
    return actors


def _id(status: Any, nonce: str) -> Any:
    return operation_id(status.incarnation, status.window, nonce)


async def _stop_all(scope: Scope, view: View, agents: dict[str, Actor]) -> None:
    """Every order to drain is followed at once: `stop`, then `stopped`."""
    wake = view.subscribe()
    draining, stopping = NUMBER[Phase.DRAINING], NUMBER[Phase.STOPPING]
    asked = 0
    while True:
        wake.clear()
        phases = view.replicas.column("phase")
        operations = []
        status = await scope.authority.status()
        for phase, transition in ((draining, "stop"), (stopping, "stopped")):
            for slot in np.flatnonzero(phases == phase).tolist():
                asked += 1
                kept = view.replicas
                node = view.columns.nodes[kept.at.node[slot]]
                if node is None:
                    continue
                claim = Move(
                    kept.keys[slot],
                    kept.at.revision[slot],
                    transition,
                    kept.at.attempt[slot],
                    "stopped" if transition == "stopped" else "",
                )
                operations.append(Operation(_id(status, f"stop{asked}"), agents[node.metadata.name], claim))
        if operations:
            await scope.authority.ask(operations)
        else:
            await wake.wait()


async def _arrive(directory: Path, sizes: Sizes) -> dict[str, Any]:
    async with _scope(directory) as scope:
        await scope.furnish(sizes.nodes, 32_000)
        count = ARRIVALS_PER_S * sizes.arrivals_s
        await scope.declare([_job(i) for i in range(count)])
        await scope.submit([_job(i, sort="first") for i in range(100)])
        placing = scope.scheduler()
        async with _following(scope, placing), _leading(scope, placing):
            await _bound(placing)
            waits = await _one_by_one(scope, placing, count)
        return {
            "feature": "arrivals",
            "nodes": sizes.nodes,
            "jobs": count,
            "per_s": ARRIVALS_PER_S,
            "p50_ms": _quantile(waits, 0.5),
            "p99_ms": _quantile(waits, 0.99),
            "max_ms": max(waits),
        }


async def _one_by_one(scope: Scope, placing: Scheduler, count: int) -> list[float]:
    waits: dict[str, float] = {}
    pending_at: dict[str, int] = {}
    seen = asyncio.Event()
    view = placing.view

    async def watch() -> None:
        """As soon as its row shows it bound."""
        wake = view.subscribe()
        left: set[str] = set()
        while len(waits) < count:
            await wake.wait()
            wake.clear()
            now = _CLOCK.now_ns()
            left.update(pending_at.keys() - waits.keys())
            for key in sorted(left):
                slot = view.replicas.slots.get(key)
                if slot is not None and view.replicas.at.phase[slot] != PENDING:
                    waits[key] = (now - pending_at[key]) / 1e6
                    left.discard(key)
        seen.set()

    async def submit(index: int) -> None:
        for verdict in await scope.workloads.ask([Spawn(TENANT, f"job-{index}", 1, 0, 1)]):
            accepted(verdict)
        pending_at[f"replica/{TENANT}/job-{index}-0"] = _CLOCK.now_ns()

    watching = scope.group.create_task(watch())
    start = _CLOCK.now_ns()
    async with asyncio.TaskGroup() as group:
        for index in range(count):
            due = start + index * 1_000_000_000 // ARRIVALS_PER_S
            if (pause := (due - _CLOCK.now_ns()) / 1e9) > 0:
                await asyncio.sleep(pause)
            group.create_task(submit(index))
    async with scope.world.clock.timeout_ms(60_000):
        await seen.wait()
    await watching
    return list(waits.values())


# ---------------------------------------------------------------------------------------------------------------- the memory


def _memory_apart(nodes: int, replicas: int) -> dict[str, Any]:
    child = [sys.executable, "-m", "remit.bench.schedule", str(nodes), str(replicas)]
    done = subprocess.run(child, stdout=subprocess.PIPE, check=True)  # noqa: S603  (our own interpreter and module)
    held: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
    return held


def _quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


if __name__ == "__main__":
    from remit.bench.view_memory import held

    sys.stdout.write(msgspec.json.encode(held(int(sys.argv[1]), int(sys.argv[2]))).decode() + "\n")
