"""`bench end-to-end`: HTTP request to durable bind.

The whole way, each part a process of its own, at thousands of nodes.

A server (SQLite, every commit forced to the disk, tokens checked), a scheduler, the controllers, the hollow agents of all nodes
(bench_hollow.py) and the load (bench_load.py) are five processes on this machine's processors. This one follows the rows as any
component does, and so sees each bind once it is durable.

The clock runs from when the first request is sent until the last bind is seen. Between two rows it is waited until nothing is
written any more: what controllers say of work that has lasted belongs to none of them.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import uvloop

from remit.assembly import component_world
from remit.bench.growth_chart import Line, draw
from remit.bench.load.bench_processes import CLOCK, PartFailed, Parts, micros, parts, quantile, spent
from remit.bench.load.hollow_agents import Fared, shares
from remit.bench.load.http_load import Loads, Server, applied, commits, created, echoes, jobs, started, tokens
from remit.bench.load.load_generator import Found
from remit.bench.report import Aim, Report, say
from remit.client.remote_store import RemoteRows
from remit.model.identity import TokenRole
from remit.store.protocol import Event

BEAT_MS: Final = 2_000
HOSTS: Final = 50
CONNECTIONS: Final = 256
BATCH: Final = 500
BATCH_CONNECTIONS: Final = 4
STEADY_PER_S: Final = 200
QUIET_MS: Final = 7_000
"""What has lasted for five seconds is said of each job: this is longer."""
QUIET_MS_MAX: Final = 60_000
BOUND_MS_MAX: Final = 180_000
KUBE: Final = 280
"""Pods a second that kube-apiserver, kube-scheduler and etcd bind on such a machine at 5,000 nodes: 200 to 280."""
SLURM: Final = 130
"""Allocations a second of Slurm on such a machine."""

QUANTILES: Final = {"p50_ms": 2, "p90_ms": 10, "p99_ms": 100, "p999_ms": 1_000}
"""Each is the wait that one job of so many exceeds."""
SHOWN: Final = {"200 a second": "steady", "as fast as answered": "one request a job"}

_BOUND: Final = b'"phase":"bound"'
_READY: Final = b'"health":"ready"'


class Sizes(NamedTuple):
    nodes: int
    jobs: int
    steady_s: int
    echoes: int


def measure(quick: bool, nodes: int, count: int, data: Path | None, plot: Path | None = None) -> Report:
    sizes = Sizes(nodes, min(count, 2_000) if quick else count, 5 if quick else 20, 2_000 if quick else 10_000)
    with (
        tempfile.TemporaryDirectory(prefix="remit-bench-", dir=data) as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        report = runner.run(_measure(sizes, Path(directory)))
    if plot is not None:
        plot.write_text(drawn(report.rows))
        say(f"{plot} shows how long jobs wait")
    return report


async def _measure(sizes: Sizes, directory: Path) -> Report:
    rows: list[dict[str, Any]] = [await commits(directory / "yardstick")]
    async with parts(directory) as running:
        loads = Loads(running, directory)
        rows.append(await echoes(loads, running, sizes.echoes))
        say(f"a cluster of {sizes.nodes:,} nodes, each part a process of its own ...")
        async with _cluster(running, directory, sizes.nodes) as cluster:
            rows += await _runs(cluster, loads, sizes)
    named = {row["what"]: row for row in rows}
    echo = named["yardstick: plain ASGI echo"]["per_s"]
    for row in rows:
        if "jobs_per_s" in row and row["what"] != "steady":  # that one goes as fast as it is asked to
            row |= {
                "of_echo": row["jobs_per_s"] / echo,
                "of_kube": row["jobs_per_s"] / KUBE,
                "of_slurm": row["jobs_per_s"] / SLURM,
            }
    aims = [
        Aim("jobs bound, one request each", "1/s", 3_500, named["one request a job"]["jobs_per_s"], "higher"),
        Aim("jobs bound, in batches", "1/s", 10_000, named["in batches"]["jobs_per_s"], "higher"),
        Aim(f"p99 from submitting to bound at {STEADY_PER_S}/s", "ms", 60, named["steady"]["p99_ms"], "lower"),
    ]
    return Report("end-to-end", rows, aims)


# -------------------------------------------------------------------------------------------------------------- the cluster


class Cluster:
    """All parts, and what this process sees of them."""

    def __init__(self, running: Parts, server: Server, seen: Seen) -> None:
        self.running, self.server, self.seen = running, server, seen

    async def fared(self) -> Fared:
        hollow = self.running.by_name["hollow"]
        hollow.tell("fared")
        return msgspec.json.decode(await hollow.line(), type=Fared)

    async def start(self) -> None:
        """What was bound starts, as far as anybody can tell: it would not stay bound for ever."""
        hollow = self.running.by_name["hollow"]
        hollow.tell("start")
        await hollow.line()


class Seen:
    """The rows as they change: which replicas were bound when, which nodes are ready, how much was written."""

    def __init__(self) -> None:
        self.bound_ns: dict[str, int] = {}
        self.ready: dict[str, None] = {}
        self.commits = self.rows = 0
        self.changed_ns = 0

    async def follow(self, rows: RemoteRows) -> None:
        watch = await rows.watch("", after=await rows.revision())
        async for event in watch:
            self._take(event)

    def _take(self, event: Event) -> None:
        now_ns = CLOCK.now_ns()
        if event.span is not None:
            self.commits += event.span.last - event.span.first + 1
            self.rows += event.span.rows
        for key, value, _ in event.changes:
            if value is None:
                continue
            if key.startswith("replica/"):
                if _BOUND in value:
                    self.bound_ns.setdefault(key, now_ns)
            elif key.startswith("node/") and _READY in value:
                self.ready[key] = None
            self.changed_ns = now_ns if not key.startswith("batch/") else self.changed_ns

    async def until(self, enough: int, what: dict[str, Any]) -> None:
        until_ns = CLOCK.now_ns() + BOUND_MS_MAX * 1_000_000
        while len(what) < enough:
            if CLOCK.now_ns() > until_ns:
                raise PartFailed(f"only {len(what)} of {enough} came in {BOUND_MS_MAX // 1000} s")
            await asyncio.sleep(0.002)

    async def quiet(self) -> None:
        """Until nothing is written any more but the authority's own beat."""
        until_ns = CLOCK.now_ns() + QUIET_MS_MAX * 1_000_000
        while CLOCK.now_ns() - self.changed_ns < QUIET_MS * 1_000_000 and CLOCK.now_ns() < until_ns:
            await CLOCK.sleep_ms(50)


@asynccontextmanager
async def _cluster(running: Parts, directory: Path, nodes: int) -> AsyncIterator[Cluster]:
    server = await started(running, directory, BEAT_MS)
    url, hosts = server.url, shares(nodes, min(HOSTS, nodes))
    own: list[tuple[TokenRole, Sequence[str]]] = [("scheduler", ()), ("scheduler", ()), ("controllers", ())]
    mine, *theirs = await tokens(server, [*own, *(("agent", [one.metadata.name for one in host]) for host in hosts)])
    files = [directory / name for name in ("scheduler.token", "controllers.token", "agents.tokens")]
    for file, text in zip(files, (theirs[0], theirs[1], "\n".join(theirs[2:])), strict=True):
        _keep(file, text)
    async with component_world((url,), mine) as connected, asyncio.TaskGroup() as group:
        seen = Seen()
        following = group.create_task(seen.follow(connected.rows))
        asking = "--server", url, "--beat", f"{BEAT_MS}ms", "--token-file"
        await running.start("scheduler", "scheduler", *asking, str(files[0]))
        await running.start("controllers", "controllers", *asking, str(files[1]))
        words = url, str(files[2]), str(nodes), str(BEAT_MS)
        hollow = await running.start("hollow", *words, module="remit.bench.load.hollow_agents")
        await hollow.line()
        await seen.until(nodes, seen.ready)
        gc.collect()
        gc.freeze()
        yield Cluster(running, server, seen)
        following.cancel()


def _keep(file: Path, text: str) -> None:
    file.touch(0o600)
    file.write_text(text + "\n")


# ------------------------------------------------------------------------------------------------------------------ the runs


async def _runs(cluster: Cluster, loads: Loads, sizes: Sizes) -> list[dict[str, Any]]:
    server, count = cluster.server, sizes.jobs
    rows = []
    for what, prefix, own in (("one request a job", "single", False), ("one request a job, no spec twice", "own", True)):
        say(f"{what}: {count:,} jobs ...")
        requests = created(server, jobs(prefix, count, own=own))
        rows.append(await _run(cluster, loads, what, requests, count, connections=CONNECTIONS))
    say(f"in batches of {BATCH}: {count:,} jobs ...")
    requests = applied(server, jobs("batch", count), BATCH)
    rows.append(await _run(cluster, loads, "in batches", requests, count, connections=BATCH_CONNECTIONS))
    steady = STEADY_PER_S * sizes.steady_s
    say(f"steady: {STEADY_PER_S} jobs a second for {sizes.steady_s} s ...")
    requests = created(server, jobs("steady", steady))
    rows.append(await _run(cluster, loads, "steady", requests, steady, connections=CONNECTIONS, per_s=STEADY_PER_S))
    return rows


async def _run(cluster: Cluster, loads: Loads, what: str, requests: Sequence[bytes], count: int, **how: Any) -> dict[str, Any]:
    seen, running = cluster.seen, cluster.running
    await seen.quiet()
    await cluster.fared()
    load = await loads.ready(cluster.server, requests, **how)
    enough, before = len(seen.bound_ns) + count, running.cpu_s()
    rows, commits_ = seen.rows, seen.commits
    known = set(seen.bound_ns)
    load.begin()
    found = await load.done()
    wrong = [status for status in found.status if status >= 300]
    if wrong:
        raise PartFailed(f"{what}: {len(wrong)} of {len(found.status)} were answered with {wrong[0]}: {found.problem}")
    await seen.until(enough, seen.bound_ns)
    cpu = spent(before, running.cpu_s())
    written = {"rows_per_job": (seen.rows - rows) / count, "commits": seen.commits - commits_}
    fared = await cluster.fared()
    await load.end()
    await cluster.start()
    bound = {key: at for key, at in seen.bound_ns.items() if key not in known}
    seconds = (max(bound.values()) - min(found.sent_ns)) / 1e9
    return {
        "what": what,
        "jobs": count,
        "seconds": seconds,
        "jobs_per_s": count / seconds,
        "accepted_per_s": count / ((max(found.done_ns) - min(found.sent_ns)) / 1e9),
        **_waits(found, bound, count),
        **micros(cpu, count),
        "cpu_s": sum(cpu.values()),
        **written,
        "beat_p99_ms": fared.p99_ms,
        "beats_lost": fared.lost,
    }


def _waits(found: Found, bound: dict[str, int], count: int) -> dict[str, float]:
    """From sending to seeing the bind, where each request is one job."""
    if len(found.which) != count:
        return {}
    sent = dict(zip(found.which, found.sent_ns, strict=True))
    waits = [(at - sent[int(key.split("-")[-2])]) / 1e6 for key, at in bound.items()]
    return {**{name: quantile(waits, 1 - 1 / among) for name, among in QUANTILES.items()}, "max_ms": max(waits)}


def drawn(rows: Sequence[dict[str, Any]]) -> str:
    """How long the slowest wait, in each run in which a request is a job."""
    lines = [
        Line(name, [(among, row[quantile_]) for quantile_, among in QUANTILES.items()])
        for name, what in SHOWN.items()
        for row in rows
        if row["what"] == what and "p50_ms" in row
    ]
    return draw("From a request to its durable bind", "the slowest one of so many jobs", "milliseconds", lines)
