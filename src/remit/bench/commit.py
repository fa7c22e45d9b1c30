"""`bench commit`: durable binds per second.

Runs the real authority on a real disk. For each batch size, new replicas are bound: decision, ledgers, policy, devices,
outcome, audit, encoding, and SQLite with FULL sync. The commits are recorded and written again, row by row, by the raw store
alone. The two alternate, a tenth of the work at a time, so that the ratio of their rates shows the overhead of the authority
even on a machine whose speed varies.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess  # noqa: TID251 - memory is measured in a fresh child process, over a pipe
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from remit.assembly import embedded_authority, tune_interpreter
from remit.bench.report import BenchAim, BenchReport, print_progress
from remit.commitment.authority import Authority
from remit.model.claims import Acquire, Actor, Apply, Bind, Evidence, Mark, Operation, Refused, Spawn, Verdict, operation_id
from remit.model.kinds import (
    Device,
    DeviceRequest,
    Node,
    NodeHealth,
    NodeSpec,
    Placement,
    Policy,
    PolicyAllow,
    PolicyMatch,
    PolicyRule,
    PolicySpec,
    Template,
    Tenant,
    TenantSpec,
    Workload,
    WorkloadSpec,
)
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Metadata
from remit.model.resources import WHOLE_DEVICE, Amount, Duration
from remit.model.roles import Role
from remit.store.protocol import HEAD, Commit, Committed, Conflict, Guard
from remit.store.sqlite.store import SqliteStore
from remit.world.clock import BootClock
from remit.world.interfaces import World
from remit.world.production import production

NODES = 1_000
WORKLOADS = 40
ROUNDS = 10
IN_FLIGHT = 2
"""Concurrent batches: one being written, one waiting to be decided."""

_CLOCK = BootClock()


class BindTarget(NamedTuple):
    replica: str
    revision: int
    node: str
    devices: dict[str, int]


class CommitRun(NamedTuple):
    """Measurement of one batch size: number of binds, time taken, latency of each request, and the time of the raw store."""

    batch: int
    binds: int
    seconds: float
    raw_seconds: float
    waits_ms: list[float]
    rows: int
    bytes: int

    @property
    def rate(self) -> float:
        return self.binds / self.seconds

    @property
    def raw_rate(self) -> float:
        return self.binds / self.raw_seconds


def measure(quick: bool, replicas: int, data: Path | None) -> BenchReport:
    with tempfile.TemporaryDirectory(prefix="remit-bench-", dir=data) as directory:
        return asyncio.run(_measure(quick, replicas, Path(directory)))


async def _measure(quick: bool, replicas: int, directory: Path) -> BenchReport:
    world = production()
    counts = {1: 500, 32: 6_000, 256: 60_000} if quick else {1: 3_000, 32: 40_000, 256: 300_000}
    rows: list[dict[str, Any]] = []
    runs: dict[int, CommitRun] = {}
    fsync = _measure_fsync_ms(directory / "fsync", 300 if quick else 1_000)
    try:
        for batch, binds in counts.items():
            print_progress(
                f"batch {batch}: {binds:,} binds through the authority, alternating with the same rows in the raw store ..."
            )
            runs[batch] = await _bind_all(directory / f"batch-{batch}", world, batch, binds)
            rows.append(_row(runs[batch]))
    finally:
        await world.offload.close()
    print_progress(f"memory: {replicas:,} replicas, in a separate process ...")
    memory = _memory_in_child(directory / "memory", replicas)
    rows.append({"replicas": replicas, **memory})
    single = _quantile(runs[1].waits_ms, 0.99)
    aims = [
        BenchAim("binds at batch 256", "1/s", 30_000, runs[256].rate, "higher"),
        BenchAim("of the raw store's rate at batch 256", "", 0.35, runs[256].rate / runs[256].raw_rate, "higher"),
        BenchAim("p99 of a single claim, in p99s of one fsync", "fsyncs", 4, single / _quantile(fsync, 0.99), "lower"),
        BenchAim("memory a replica", "bytes", 2_048, memory["bytes_a_replica"], "lower"),
    ]
    rows[0]["fsync_p50_ms"], rows[0]["fsync_p99_ms"] = _quantile(fsync, 0.5), _quantile(fsync, 0.99)
    return BenchReport("commit", rows, aims)


def _row(run: CommitRun) -> dict[str, Any]:
    return {
        "batch": run.batch,
        "binds_per_s": run.rate,
        "raw_binds_per_s": run.raw_rate,
        "ratio": run.rate / run.raw_rate,
        "p50_ms": _quantile(run.waits_ms, 0.5),
        "p99_ms": _quantile(run.waits_ms, 0.99),
        "rows_per_bind": run.rows / run.binds,
        "bytes_per_bind": run.bytes / run.binds,
    }


# -------------------------------------------------------------------------------------------------------------- the cluster


def _cluster(replicas: int) -> list[AnyObject]:
    """Return nodes with GPUs in three zones, a tenant, a residency policy, and workloads, a tenth with device shares."""
    zones = ("eu-a", "eu-b", "eu-c")
    node_capacity = -(-replicas // NODES) + WORKLOADS
    nodes: list[AnyObject] = [
        Node(
            metadata=Metadata(name=f"node-{i}", labels={"disk": "ssd"}),
            spec=NodeSpec(
                region="eu",
                zone=zones[i % 3],
                capacity=Amount({"cpu": 1_000 * node_capacity, "memory": (1 << 30) * node_capacity}),
                devices=tuple(Device(name=f"gpu-{d}", kind="gpu", model="A10") for d in range(8)),
            ),
        )
        for i in range(NODES)
    ]
    rule = PolicyRule(match=PolicyMatch(tenants=("acme",)), allow=PolicyAllow(regions=("eu",)))
    everything = Amount(
        {
            "cpu": 1_000 * node_capacity * NODES,
            "memory": (1 << 30) * node_capacity * NODES,
            "devices/gpu": 8 * WHOLE_DEVICE * NODES,
        }
    )
    return [
        *nodes,
        Tenant(metadata=Metadata(name="acme"), spec=TenantSpec(quota=everything)),
        Policy(metadata=Metadata(name="residency"), spec=PolicySpec(rules=(rule,))),
        *(_workload(i, -(-replicas // WORKLOADS)) for i in range(WORKLOADS)),
    ]


def _workload(index: int, replicas: int) -> Workload:
    return Workload(
        metadata=Metadata(name=f"work-{index}", tenant="acme", labels={"app": f"work-{index}"}),
        spec=WorkloadSpec(
            type="service",
            replicas=replicas,
            template=Template(
                command=("serve",),
                resources=Amount({"cpu": 100 + 10 * index, "memory": 128 << 20}),
                devices=(DeviceRequest(kind="gpu", share="1m"),) if index % 10 == 9 else (),
            ),
            placement=Placement(regions=("eu",), node_selector={"disk": "ssd"}),
        ),
    )


class ClaimClient:
    """Submits claims to the authority in one role, with new operation ids."""

    def __init__(self, authority: Authority, role: Role) -> None:
        self.authority = authority
        self.actor = Actor(f"bench-{role}", role)
        self.submitted = 0

    async def acquire_lease(self) -> ClaimClient:
        if self.actor.role is not Role.OPERATOR:
            (verdict,) = await self.submit([Acquire(self.actor.role, Duration(3_600_000))])
            self.actor = Actor(self.actor.name, self.actor.role, self.actor.role.value, require_accepted(verdict))
        return self

    async def operations(self, claims: Iterable[Any], revision: int = 0) -> list[Operation]:
        status = await self.authority.status()
        operations, nonce, evidence = [], self.actor.role.value, Evidence(revision, 5)
        for claim in claims:
            self.submitted += 1
            name = operation_id(status.incarnation, status.window, f"{nonce}{self.submitted}")
            operations.append(Operation(name, self.actor, claim, evidence))
        return operations

    async def submit(self, claims: Iterable[Any]) -> list[Verdict]:
        return await self.authority.submit(await self.operations(claims))


def require_accepted(verdict: Verdict) -> int:
    if isinstance(verdict, Refused):
        raise RuntimeError(f"refused: {verdict.code}: {verdict.detail}")
    return verdict.number


@asynccontextmanager
async def _running_authority(directory: Path, world: World) -> AsyncIterator[Authority]:
    async with embedded_authority(directory, world) as authority, asyncio.TaskGroup() as group:
        task = group.create_task(authority.run())
        try:
            yield authority
        finally:
            task.cancel()


async def _populate(authority: Authority, replicas: int) -> None:
    """Create the cluster and its replicas, all pending."""
    operator = ClaimClient(authority, Role.OPERATOR)
    nodes = await ClaimClient(authority, Role.NODES).acquire_lease()
    workloads = await ClaimClient(authority, Role.WORKLOADS).acquire_lease()
    for verdict in await operator.submit(Apply(obj) for obj in _cluster(replicas)):
        require_accepted(verdict)
    rows = [authority.books.objects[name] for name in authority.books.keys("node/")]
    for verdict in await nodes.submit(Mark(node.metadata.name, revision, NodeHealth.READY) for node, revision in rows):
        require_accepted(verdict)
    per_workload = -(-replicas // WORKLOADS)
    for shape in range(WORKLOADS):
        for first in range(0, per_workload, 10_000):
            count = min(10_000, per_workload - first)
            for verdict in await workloads.submit([Spawn("acme", f"work-{shape}", 1, first, count)]):
                require_accepted(verdict)


def _targets(authority: Authority, names: Sequence[str], start: int = 0) -> list[BindTarget]:
    """Assign replicas to nodes round-robin, as a spreading scheduler would, and device shares to devices round-robin."""
    return [
        BindTarget(
            name,
            authority.books.replicas[name][0],
            f"node-{i % NODES}",
            {f"gpu-{(i // NODES) % 8}": 1} if int(name.split("work-")[1].split("-")[0]) % 10 == 9 else {},
        )
        for i, name in enumerate(names, start)
    ]


async def _bind_all(directory: Path, world: World, batch: int, binds: int) -> CommitRun:
    raw = await SqliteStore.open(directory / "raw", offload=world.offload, holder="raw", incarnation="raw")
    try:
        async with _running_authority(directory / "authority", world) as authority:
            recorder = RecordingStore(authority.store)
            authority.store = recorder
            await _populate(authority, binds)
            scheduler = await ClaimClient(authority, Role.SCHEDULER).acquire_lease()
            targets = _targets(authority, list(authority.books.replicas)[:binds])
            revision = await _write_all(raw, raw.position.revision, recorder.take())
            tune_interpreter()
            waits: list[float] = []
            spent = raw_spent = rows = size = 0
            round_size = -(-len(targets) // (ROUNDS * batch)) * batch
            for start_index in range(0, len(targets), round_size):
                start = _CLOCK.now_ns()
                await _bind(
                    scheduler, targets[start_index : start_index + round_size], batch, waits, 1 if batch == 1 else IN_FLIGHT
                )
                spent += _CLOCK.now_ns() - start
                commits = recorder.take()
                start = _CLOCK.now_ns()
                revision = await _write_all(raw, revision, commits)
                raw_spent += _CLOCK.now_ns() - start
                rows += sum(len(commit.puts) + len(commit.deletes) for commit in commits)
                size += sum(len(key) + len(value) for commit in commits for key, value in commit.puts)
            return CommitRun(batch, len(targets), spent / 1e9, raw_spent / 1e9, waits, rows, size)
    finally:
        await raw.close()


async def _bind(scheduler: ClaimClient, targets: Sequence[BindTarget], batch: int, waits: list[float], in_flight: int) -> None:
    """Bind all targets. Each batch is built just before it is submitted, as a scheduler does: claims that have left the CPU
    caches would be slower to read.
    """
    slots = iter(range(0, len(targets), batch))

    async def work() -> None:
        for start_index in slots:
            claims = [
                Bind(t.replica, t.revision, t.node, "tenant/acme", t.devices, 1)
                for t in targets[start_index : start_index + batch]
            ]
            operations = await scheduler.operations(claims, revision=1)
            submitted = _CLOCK.now_ns()
            for verdict in await scheduler.authority.submit(operations):
                require_accepted(verdict)
            waits.append((_CLOCK.now_ns() - submitted) / 1e6)

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(work())


# -------------------------------------------------------------------------------------------------------------- the baselines


class RecordingStore:
    """A store that records the commits made to it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.commits: list[Commit] = []

    async def commit(self, commit: Commit) -> Committed | Conflict:
        self.commits.append(commit)
        result: Committed | Conflict = await self._store.commit(commit)
        return result

    def take(self) -> list[Commit]:
        """Return the commits since the last call."""
        commits, self.commits = self.commits, []
        return commits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


async def _write_all(store: SqliteStore, revision: int, commits: Sequence[Commit]) -> int:
    """Write the recorded rows with the raw store alone."""
    for commit in commits:
        result = await store.commit(Commit((Guard(HEAD, revision),), commit.puts, commit.deletes))
        if not isinstance(result, Committed):
            raise RuntimeError(f"another writer changed the raw store: {result}")
        revision = result.revision
    return revision


def _measure_fsync_ms(path: Path, times: int) -> list[float]:
    """Measure appending a page with fdatasync: the minimum cost of a durable write on this disk."""
    waits = []
    with path.open("wb", buffering=0) as file:
        for _ in range(times):
            start = _CLOCK.now_ns()
            file.write(b"x" * 8192)
            os.fdatasync(file.fileno())
            waits.append((_CLOCK.now_ns() - start) / 1e6)
    return waits


def _memory_in_child(directory: Path, replicas: int) -> dict[str, Any]:
    """Measure memory in a fresh process, so that earlier measurements do not influence it."""
    child = [sys.executable, "-m", "remit.bench.commit", str(directory), str(replicas)]
    done = subprocess.run(child, stdout=subprocess.PIPE, check=True)  # noqa: S603 (our own interpreter and module)
    memory: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
    return memory


async def _memory_main(directory: Path, replicas: int) -> dict[str, Any]:
    world = production()
    try:
        return await _measure_memory(directory, world, replicas)
    finally:
        await world.offload.close()


async def _measure_memory(directory: Path, world: World, replicas: int) -> dict[str, Any]:
    """Measure by how much the process grows when its authority holds this many bound replicas, including outcomes and store
    cache.
    """
    gc.collect()
    before = _resident_bytes()
    async with _running_authority(directory, world) as authority:
        await _populate(authority, replicas)
        scheduler = await ClaimClient(authority, Role.SCHEDULER).acquire_lease()
        targets = iter(list(authority.books.replicas)[:replicas])
        bound = 0
        while names := [name for name, _ in zip(targets, range(20_000), strict=False)]:
            await _bind(scheduler, _targets(authority, names, bound), 256, [], IN_FLIGHT)
            bound += len(names)
            print_progress(f"  {bound:,} bound, {(_resident_bytes() - before) >> 20:,} MiB")
        gc.collect()
        grown = _resident_bytes() - before
        return {"bytes_a_replica": grown / replicas, "resident_mib": grown / (1 << 20), "outcomes": len(authority.outcomes)}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(asyncio.run(_memory_main(Path(sys.argv[1]), int(sys.argv[2])))).decode() + "\n")
