"""`bench run`: real jobs per second.

Server, scheduler, controllers, agent and keeper run as separate processes, as in production. A job is a workload with one
replica, submitted by one HTTP request. The scheduler places it, the agent's keeper starts it as a real process, and it
counts once its end is committed and delivered to a watch.

On an idle scope, the start time of a job is reported by the job itself: it runs `date`, which prints the current time. The
commit time of each step comes from the authority's audit record, which dates a batch when it is decided, in milliseconds.
"""

from __future__ import annotations

import asyncio
import os
import subprocess  # noqa: TID251 - the baseline: starting a process from Python alone
import tempfile
import time  # noqa: TID251 - jobs print the wall clock, and all clocks are of one machine
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from remit.agent.directory import AgentDirectory
from remit.bench.load.bench_processes import ProcessCluster
from remit.bench.report import BenchAim, BenchReport, print_progress
from remit.client.api import Api, Changed, Deleted, Synced
from remit.commitment.outcomes import BATCH_PREFIX, decode_batch
from remit.model.kinds import Template, Tenant, TenantSpec, Workload, WorkloadSpec
from remit.model.metadata import Metadata
from remit.model.records import Phase, Replica
from remit.model.resources import Amount
from remit.store.sqlite.store import SqliteStore
from remit.world.clock import BootClock
from remit.world.production import production

NODES: Final = 20
SUBMITTERS: Final = 16
JOBS_PER_S: Final = 300
START_MS: Final = 15
SLURM_PER_S: Final = 57
"""Jobs per second of Slurm with 20 daemons on a comparable machine."""

JOBS_TIMEOUT_MS: Final = 120_000
IDLE_PAUSE_MS: Final = 30
"""Pause between two jobs on an idle scope."""

_CLOCK: Final = BootClock()
_RESOURCES: Final = Amount({"cpu": 10, "memory": 32 << 20})
_TRUE, _DATE = ("true",), ("date", "+%s%N")

Sandbox = Literal["none", "bwrap"]
CommitTimes = Mapping[str, Mapping[str, int]]
"""Commit time of each step, by job."""


class RunSizes(NamedTuple):
    jobs: int
    idle: int
    forks: int


FULL: Final = RunSizes(3_000, 200, 500)
QUICK: Final = RunSizes(600, 50, 200)

AUDIT_NAMES: Final = {
    "bound": "bind",
    "starting": "move start",
    "running": "move run",
    "finished": "move finish",
    "released": "move settle",
}
"""Name of each step in the authority's audit record."""


class JobTimes(NamedTuple):
    """Times of one set of jobs, on the wall clock in nanoseconds: submitted, answered, and seen to have finished."""

    submitted: dict[str, int]
    answered: dict[str, int]
    finished: dict[str, int]
    uids: dict[str, str]
    cpu: dict[str, float]


def measure(quick: bool, data: Path | None) -> BenchReport:
    return asyncio.run(_measure(QUICK if quick else FULL, data))


async def _measure(sizes: RunSizes, data: Path | None) -> BenchReport:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="remit-", dir=data) as directory:
        root = Path(directory)
        root.chmod(0o711)  # noqa: ASYNC240 - replicas may run as another user
        print_progress("bench run: starting a server, a scheduler, controllers, an agent with 20 nodes and its keeper")
        async with _cluster(root) as cluster:
            sandboxes: tuple[Sandbox, ...] = ("none", "bwrap") if production().runner.isolation_support().sandbox else ("none",)
            idle: dict[Sandbox, JobTimes] = {}
            for sandbox in sandboxes:
                print_progress(f"bench run: {sizes.idle} jobs one at a time, sandbox {sandbox}")
                idle[sandbox] = await _run_one_at_a_time(cluster, sandbox, sizes.idle)
            for sandbox in sandboxes:
                print_progress(f"bench run: {sizes.jobs} jobs at once, sandbox {sandbox}")
                rows.append({**await _run_load(cluster, sandbox, sizes.jobs), **_fork_rate(sizes.forks)})
                rows[-1]["of_yardstick"] = rows[-1]["per_s"] / rows[-1]["yardstick_per_s"]
        started_ns = _start_times_from_logs(cluster.agent)
        record = await _commit_times(cluster.store)
        for row in rows:
            row |= _quantiles(_step_durations(f"load-{row['sandbox']}-", record))
        rows += [_idle_row(sandbox, timed, started_ns, record) for sandbox, timed in idle.items()]
    first, late = rows[0], rows[len(sandboxes)]
    aims = [
        BenchAim("jobs finished and reported, 20 nodes", "jobs/s", JOBS_PER_S, first["per_s"], "higher"),
        BenchAim("from submit to start, one job on an idle scope, p50", "ms", START_MS, late["start_p50_ms"], "lower"),
        BenchAim("jobs a second over Slurm's", "times", JOBS_PER_S / SLURM_PER_S, first["per_s"] / SLURM_PER_S, "higher"),
    ]
    return BenchReport("run", rows, aims)


@asynccontextmanager
async def _cluster(root: Path) -> AsyncIterator[ProcessCluster]:
    cluster = ProcessCluster(root, NODES, _CLOCK)
    try:
        await cluster.start()
        async with cluster.api() as api:
            quota = Amount({"cpu": 10_000_000, "memory": 1 << 50})
            await api.apply([Tenant(metadata=Metadata(name="default"), spec=TenantSpec(quota=quota))])
        yield cluster
    finally:
        await cluster.stop()


def _job(name: str, command: tuple[str, ...], sandbox: Sandbox) -> Workload:
    return Workload(
        metadata=Metadata(name=name, tenant="default"),
        spec=WorkloadSpec(type="job", replicas=1, template=Template(command=command, resources=_RESOURCES, sandbox=sandbox)),
    )


# ---------------------------------------------------------------------------------------------------------------- the loads


async def _run_one_at_a_time(cluster: ProcessCluster, sandbox: Sandbox, count: int) -> JobTimes:
    """Submit each job after the previous one has finished, and a pause."""
    timed, before = JobTimes({}, {}, {}, {}, {}), _cpu_ms(cluster)
    async with cluster.api() as api, _watch_finished(api, timed) as wait_finished:
        for index in range(count):
            await _submit(api, _job(f"idle-{sandbox}-{index}", _DATE, sandbox), timed)
            async with _CLOCK.timeout_ms(JOBS_TIMEOUT_MS):
                await wait_finished(index + 1)
            await _CLOCK.sleep_ms(IDLE_PAUSE_MS)
    timed.cpu.update(_cpu_per_job(before, _cpu_ms(cluster), count))
    return timed


async def _run_load(cluster: ProcessCluster, sandbox: Sandbox, count: int) -> dict[str, Any]:
    timed = JobTimes({}, {}, {}, {}, {})
    names = iter([f"load-{sandbox}-{index}" for index in range(count)])

    async def submit(api: Api) -> None:
        for name in names:
            await _submit(api, _job(name, _TRUE, sandbox), timed)

    async with cluster.api() as api, _watch_finished(api, timed) as wait_finished:
        before, began_ns = _cpu_ms(cluster), _CLOCK.now_ns()
        async with asyncio.TaskGroup() as group:
            for _ in range(SUBMITTERS):
                group.create_task(submit(api))
        submitted_s = (_CLOCK.now_ns() - began_ns) / 1e9
        async with _CLOCK.timeout_ms(JOBS_TIMEOUT_MS):
            await wait_finished(count)
        passed_s = (_CLOCK.now_ns() - began_ns) / 1e9
        after = _cpu_ms(cluster)
    return {
        "row": "load",
        "sandbox": sandbox,
        "nodes": NODES,
        "jobs": count,
        "per_s": count / passed_s,
        "submitted_per_s": count / submitted_s,
        **_cpu_per_job(before, after, count),
    }


def _cpu_per_job(before: Mapping[str, int], after: Mapping[str, int], count: int) -> dict[str, float]:
    """Return the CPU time per job, in total and by process."""
    per_process = {f"{name}_cpu_ms": (after[name] - before.get(name, 0)) / count for name in sorted(after)}
    return {"cpu_ms": sum(per_process.values()), **per_process}


def _cpu_ms(cluster: ProcessCluster) -> dict[str, int]:
    """Return the CPU time of each process. Includes this process, which submits and watches and is not part of the scope."""
    user_s, system_s, *_ = os.times()
    return {**cluster.cpu_ms(), "asker": int((user_s + system_s) * 1000)}


async def _submit(api: Api, job: Workload, timed: JobTimes) -> None:
    timed.submitted[job.metadata.name] = _now_ns()
    await api.create(job)
    timed.answered[job.metadata.name] = _now_ns()


@asynccontextmanager
async def _watch_finished(api: Api, timed: JobTimes) -> AsyncIterator[Callable[[int], Any]]:
    """Watch for finished jobs and record them. Yields a function that waits until a given number have finished."""
    changed, ready = asyncio.Event(), asyncio.Event()

    async def watch() -> None:
        async with aclosing(api.watch(Replica, fields=f"status.phase={Phase.FINISHED}")) as events:
            async for event in events:
                match event:
                    case Synced():
                        ready.set()
                    case Changed() | Deleted() if ready.is_set():
                        name = event.object.metadata.name if isinstance(event, Changed) else event.name
                        timed.finished.setdefault(name.rpartition("-")[0], _now_ns())
                        if isinstance(event, Changed):
                            timed.uids[name.rpartition("-")[0]] = event.object.metadata.uid
                        changed.set()

    async def over(count: int) -> None:
        while len(timed.finished) < count:
            changed.clear()
            await changed.wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(watch())
        await ready.wait()
        yield over
        task.cancel()


def _fork_rate(count: int) -> dict[str, Any]:
    """Measure the baseline: run `true` repeatedly from Python alone."""
    began_ns = _CLOCK.now_ns()
    for _ in range(count):
        subprocess.run(_TRUE, check=True)  # noqa: S603 (a fixed command, no shell)
    return {"yardstick_per_s": count * 1e9 / (_CLOCK.now_ns() - began_ns)}


# ----------------------------------------------------------------------------------------------------------- times of steps


def _start_times_from_logs(agent: Path) -> dict[str, int]:
    """Read when each `date` ran from the log files, by the uid of its replica."""
    started_ns = {}
    for path in AgentDirectory(agent).logs.glob("*/*.out"):
        output = path.read_text().strip()
        if output.isdigit():
            started_ns[path.name.removesuffix(".out").rpartition(".")[0]] = int(output)
    return started_ns


async def _commit_times(store: Path) -> dict[str, dict[str, int]]:
    """Read when each step of each job was committed, from the authority's audit record."""
    world = production()
    times: dict[str, dict[str, int]] = {}
    try:
        opened = await SqliteStore.open(store, offload=world.offload, holder="bench", incarnation="bench")
        try:
            after = ""
            while True:
                page = await opened.range(BATCH_PREFIX, after=after)
                for row in page.rows:
                    _add_batch(row.value, times)
                if not page.more:
                    return times
                after = page.rows[-1].key
        finally:
            await opened.close()
    finally:
        await world.offload.close()


def _add_batch(row: bytes, times: dict[str, dict[str, int]]) -> None:
    batch = decode_batch(row)
    at_ns = int(datetime.fromisoformat(batch.at).timestamp() * 1e9)
    step_names = {did: step for step, did in AUDIT_NAMES.items()} | {"apply": "submitted"}
    for entry in batch.entries:
        if entry.code or entry.did not in step_names:
            continue
        name = entry.subject.rpartition("/")[2]
        job = name.rpartition("-")[0] if entry.subject.startswith("replica/") else name
        times.setdefault(job, {}).setdefault(step_names[entry.did], at_ns)


def _idle_row(
    sandbox: Sandbox, timed: JobTimes, started: Mapping[str, int], record: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Return the latency of each step since the submission of the job, as p50 and p99."""
    times: dict[str, dict[str, int]] = {"answered": timed.answered, "told": timed.finished}
    times["start"] = {job: started[uid] for job, uid in timed.uids.items() if uid in started}
    for step in AUDIT_NAMES:
        times[step] = {job: record[job][step] for job in timed.submitted if step in record.get(job, {})}
    row: dict[str, Any] = {"row": "idle", "sandbox": sandbox, "nodes": NODES, "jobs": len(timed.submitted)}
    for step in ("start", "answered", *AUDIT_NAMES, "told"):
        waits = [(at_ns - timed.submitted[job]) / 1e6 for job, at_ns in times[step].items()]
        if waits:
            row[f"{step}_p50_ms"], row[f"{step}_p99_ms"] = _quantile(waits, 0.5), _quantile(waits, 0.99)
    return {**row, **timed.cpu}


def _step_durations(prefix: str, record: CommitTimes) -> dict[str, list[float]]:
    """Return the time between consecutive steps, for the jobs of one load run."""
    durations: dict[str, list[float]] = {}
    for job, times in record.items():
        if job.startswith(prefix):
            steps = [step for step in ("submitted", *AUDIT_NAMES) if step in times]
            for before, step in pairwise(steps):
                durations.setdefault(step, []).append((times[step] - times[before]) / 1e6)
    return durations


def _quantiles(waits: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {f"{step}_after_p50_ms": _quantile(durations, 0.5) for step, durations in waits.items()}


def _quantile(values: Iterable[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def _now_ns() -> int:
    return time.time_ns()
