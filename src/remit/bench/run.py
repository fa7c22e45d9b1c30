"""`bench run`: real jobs per second.

Everything runs as in earnest, in processes of its own.

A job is a workload of its own with one replica, submitted by one HTTP request. It is placed by the scheduler, started by the
agent's keeper as a real process, and counts once its end is committed and told to whoever watches.

When a job that is submitted to an idle scope starts is told by the job itself: it is `date`, and writes the time at which it
runs. When each step was committed is told by the authority's own record, dated where its batch was decided, to a millisecond.
"""

from __future__ import annotations

import asyncio
import os
import subprocess  # noqa: TID251 - the yardstick: what starting a process costs without anything around it
import tempfile
import time  # noqa: TID251 - a job can tell the wall's clock alone, and both are of one machine
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from remit.agent.setup import Directory
from remit.bench.load.bench_processes import Cluster
from remit.bench.report import Aim, Report, say
from remit.client.api import Api, Changed, Deleted, Synced
from remit.commitment.outcomes import BATCH, decode_batch
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
"""Of Slurm with 20 daemons, on such a machine."""

PATIENCE_MS: Final = 120_000
REST_MS: Final = 30
"""Between two jobs on an idle scope."""

_CLOCK: Final = BootClock()
_EACH: Final = Amount({"cpu": 10, "memory": 32 << 20})
_TRUE, _DATE = ("true",), ("date", "+%s%N")

Sandbox = Literal["none", "bwrap"]
Record = Mapping[str, Mapping[str, int]]
"""By job: when each of its steps was committed."""


class Sizes(NamedTuple):
    jobs: int
    idle: int
    forks: int


FULL: Final = Sizes(3_000, 200, 500)
QUICK: Final = Sizes(600, 50, 200)

STEPS: Final = {
    "bound": "bind",
    "starting": "move start",
    "running": "move run",
    "finished": "move finish",
    "released": "move settle",
}
"""What the authority's record calls each step."""


class Timed(NamedTuple):
    """One set of jobs: when each was submitted, answered, seen to have ended, all on the wall's clock in nanoseconds."""

    submitted: dict[str, int]
    answered: dict[str, int]
    seen: dict[str, int]
    uids: dict[str, str]
    took: dict[str, float]


def measure(quick: bool, data: Path | None) -> Report:
    return asyncio.run(_measure(QUICK if quick else FULL, data))


async def _measure(sizes: Sizes, data: Path | None) -> Report:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="remit-", dir=data) as made:
        root = Path(made)
        root.chmod(0o711)  # noqa: ASYNC240 - work may run as another user
        say("bench run: starts a server, a scheduler, controllers, an agent with 20 nodes and its keeper")
        async with _cluster(root) as cluster:
            sandboxes: tuple[Sandbox, ...] = ("none", "bwrap") if production().runner.confinement().sandbox else ("none",)
            idle: dict[Sandbox, Timed] = {}
            for sandbox in sandboxes:
                say(f"bench run: {sizes.idle} jobs one at a time, sandbox {sandbox}")
                idle[sandbox] = await _one_at_a_time(cluster, sandbox, sizes.idle)
            for sandbox in sandboxes:
                say(f"bench run: {sizes.jobs} jobs at once, sandbox {sandbox}")
                rows.append({**await _at_once(cluster, sandbox, sizes.jobs), **_forked(sizes.forks)})
                rows[-1]["of_yardstick"] = rows[-1]["per_s"] / rows[-1]["yardstick_per_s"]
        begun = _said_themselves(cluster.agent)
        record = await _record(cluster.store)
        for row in rows:
            row |= _quantiles(_waits(f"load-{row['sandbox']}-", record))
        rows += [_idle_row(sandbox, timed, begun, record) for sandbox, timed in idle.items()]
    first, late = rows[0], rows[len(sandboxes)]
    aims = [
        Aim("jobs finished and reported, 20 nodes", "jobs/s", JOBS_PER_S, first["per_s"], "higher"),
        Aim("from submit to start, one job on an idle scope, p50", "ms", START_MS, late["start_p50_ms"], "lower"),
        Aim("jobs a second over Slurm's", "times", JOBS_PER_S / SLURM_PER_S, first["per_s"] / SLURM_PER_S, "higher"),
    ]
    return Report("run", rows, aims)


@asynccontextmanager
async def _cluster(root: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(root, NODES, _CLOCK)
    try:
        await cluster.start()
        async with cluster.api() as api:
            quota = Amount({"cpu": 10_000_000, "memory": 1 << 50})
            await api.apply([Tenant(metadata=Metadata(name="default"), spec=TenantSpec(quota=quota))])
        yield cluster
    finally:
        await cluster.end()


def _job(name: str, command: tuple[str, ...], sandbox: Sandbox) -> Workload:
    return Workload(
        metadata=Metadata(name=name, tenant="default"),
        spec=WorkloadSpec(type="job", replicas=1, template=Template(command=command, resources=_EACH, sandbox=sandbox)),
    )


# ---------------------------------------------------------------------------------------------------------------- the loads


async def _one_at_a_time(cluster: Cluster, sandbox: Sandbox, count: int) -> Timed:
    """The next one once the last has been released, and a moment of rest."""
    timed, before = Timed({}, {}, {}, {}, {}), _cpu_ms(cluster)
    async with cluster.api() as api, _watching(api, timed) as over:
        for index in range(count):
            await _submit(api, _job(f"idle-{sandbox}-{index}", _DATE, sandbox), timed)
            async with _CLOCK.timeout_ms(PATIENCE_MS):
                await over(index + 1)
            await _CLOCK.sleep_ms(REST_MS)
    timed.took.update(_taken(before, _cpu_ms(cluster), count))
    return timed


async def _at_once(cluster: Cluster, sandbox: Sandbox, count: int) -> dict[str, Any]:
    timed = Timed({}, {}, {}, {}, {})
    names = iter([f"load-{sandbox}-{index}" for index in range(count)])

    async def submit(api: Api) -> None:
        for name in names:
            await _submit(api, _job(name, _TRUE, sandbox), timed)

    async with cluster.api() as api, _watching(api, timed) as over:
        before, began_ns = _cpu_ms(cluster), _CLOCK.now_ns()
        async with asyncio.TaskGroup() as group:
            for _ in range(SUBMITTERS):
                group.create_task(submit(api))
        submitted_s = (_CLOCK.now_ns() - began_ns) / 1e9
        async with _CLOCK.timeout_ms(PATIENCE_MS):
            await over(count)
        passed_s = (_CLOCK.now_ns() - began_ns) / 1e9
        after = _cpu_ms(cluster)
    return {
        "row": "load",
        "sandbox": sandbox,
        "nodes": NODES,
        "jobs": count,
        "per_s": count / passed_s,
        "submitted_per_s": count / submitted_s,
        **_taken(before, after, count),
    }


def _taken(before: Mapping[str, int], after: Mapping[str, int], count: int) -> dict[str, float]:
    """Of processor time for each job: in all, and by each part."""
    each = {f"{name}_cpu_ms": (after[name] - before.get(name, 0)) / count for name in sorted(after)}
    return {"cpu_ms": sum(each.values()), **each}


def _cpu_ms(cluster: Cluster) -> dict[str, int]:
    """Also what submitting and watching takes, which is not the scope's."""
    user_s, system_s, *_ = os.times()
    return {**cluster.cpu_ms(), "asker": int((user_s + system_s) * 1000)}


async def _submit(api: Api, job: Workload, timed: Timed) -> None:
    timed.submitted[job.metadata.name] = _now_ns()
    await api.create(job)
    timed.answered[job.metadata.name] = _now_ns()


@asynccontextmanager
async def _watching(api: Api, timed: Timed) -> AsyncIterator[Callable[[int], Any]]:
    """Notes each job that is told to have ended; what it yields waits until so many were."""
    came, ready = asyncio.Event(), asyncio.Event()

    async def watch() -> None:
        async with aclosing(api.watch(Replica, fields=f"status.phase={Phase.FINISHED}")) as told:
            async for event in told:
                match event:
                    case Synced():
                        ready.set()
                    case Changed() | Deleted() if ready.is_set():
                        name = event.object.metadata.name if isinstance(event, Changed) else event.name
                        timed.seen.setdefault(name.rpartition("-")[0], _now_ns())
                        if isinstance(event, Changed):
                            timed.uids[name.rpartition("-")[0]] = event.object.metadata.uid
                        came.set()

    async def over(count: int) -> None:
        while len(timed.seen) < count:
            came.clear()
            await came.wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(watch())
        await ready.wait()
        yield over
        task.cancel()


def _forked(count: int) -> dict[str, Any]:
    """The yardstick: `true` started and waited for, one after another, by nothing but Python."""
    began_ns = _CLOCK.now_ns()
    for _ in range(count):
        subprocess.run(_TRUE, check=True)  # noqa: S603  (a fixed word, no shell)
    return {"yardstick_per_s": count * 1e9 / (_CLOCK.now_ns() - began_ns)}


# ------------------------------------------------------------------------------------------------------------ what was told


def _said_themselves(agent: Path) -> dict[str, int]:
    """When each `date` ran, by the uid of its replica."""
    found = {}
    for place in Directory(agent).logs.glob("*/*.out"):
        said = place.read_text().strip()
        if said.isdigit():
            found[place.name.removesuffix(".out").rpartition(".")[0]] = int(said)
    return found


async def _record(store: Path) -> dict[str, dict[str, int]]:
    """When each step of each job was committed, as the authority has written it down."""
    world = production()
    found: dict[str, dict[str, int]] = {}
    try:
        opened = await SqliteStore.open(store, offload=world.offload, holder="bench", incarnation="bench")
        try:
            after = ""
            while True:
                page = await opened.range(BATCH, after=after)
                for row in page.rows:
                    _note(row.value, found)
                if not page.more:
                    return found
                after = page.rows[-1].key
        finally:
            await opened.close()
    finally:
        await world.offload.close()


def _note(row: bytes, found: dict[str, dict[str, int]]) -> None:
    batch = decode_batch(row)
    at_ns = int(datetime.fromisoformat(batch.at).timestamp() * 1e9)
    words = {did: step for step, did in STEPS.items()} | {"apply": "submitted"}
    for entry in batch.entries:
        if entry.code or entry.did not in words:
            continue
        name = entry.subject.rpartition("/")[2]
        job = name.rpartition("-")[0] if entry.subject.startswith("replica/") else name
        found.setdefault(job, {}).setdefault(words[entry.did], at_ns)


def _idle_row(
    sandbox: Sandbox, timed: Timed, begun: Mapping[str, int], record: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """How long after its submission each step of a job was there; half of the jobs are quicker, at p50."""
    at: dict[str, dict[str, int]] = {"answered": timed.answered, "told": timed.seen}
    at["start"] = {job: begun[uid] for job, uid in timed.uids.items() if uid in begun}
    for step in STEPS:
        at[step] = {job: record[job][step] for job in timed.submitted if step in record.get(job, {})}
    found: dict[str, Any] = {"row": "idle", "sandbox": sandbox, "nodes": NODES, "jobs": len(timed.submitted)}
    for step in ("start", "answered", *STEPS, "told"):
        waits = [(at_ns - timed.submitted[job]) / 1e6 for job, at_ns in at[step].items()]
        if waits:
            found[f"{step}_p50_ms"], found[f"{step}_p99_ms"] = _quantile(waits, 0.5), _quantile(waits, 0.99)
    return {**found, **timed.took}


def _waits(prefix: str, record: Record) -> dict[str, list[float]]:
    """Between one step and the next, for the jobs of a load."""
    found: dict[str, list[float]] = {}
    for job, at in record.items():
        if job.startswith(prefix):
            steps = [step for step in ("submitted", *STEPS) if step in at]
            for before, step in pairwise(steps):
                found.setdefault(step, []).append((at[step] - at[before]) / 1e6)
    return found


def _quantiles(waits: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {f"{step}_after_p50_ms": _quantile(each, 0.5) for step, each in waits.items()}


def _quantile(values: Iterable[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def _now_ns() -> int:
    return time.time_ns()
