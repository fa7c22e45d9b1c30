"""`bench end-to-end`: HTTP request to durable bind.

Server (SQLite with FULL sync, token authentication), scheduler, controllers, simulated agents of all nodes
(load/hollow_agents.py) and load generator (load/load_generator.py) are five processes on this machine. This process follows
the rows as any component does, so it sees each bind once it is durable.

The clock runs from the first request to the last bind seen. Between two rows the benchmark waits until nothing is written
any more, because condition updates that controllers write some seconds later belong to no row.
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
from remit.bench.growth_chart import ChartLine, draw
from remit.bench.load.bench_processes import (
    CLOCK,
    BenchProcessError,
    BenchProcesses,
    bench_processes,
    cpu_micros,
    cpu_spent,
    quantile,
)
from remit.bench.load.hollow_agents import HeartbeatStats, split_nodes
from remit.bench.load.http_load import (
    LoadLauncher,
    ServerTarget,
    apply_requests,
    create_requests,
    create_tokens,
    job_manifests,
    measure_echo,
    measure_raw_store,
    start_server,
)
from remit.bench.load.load_generator import LoadResult
from remit.bench.report import BenchAim, BenchReport, print_progress
from remit.client.remote_store import RemoteStore
from remit.model.kinds import TokenRole
from remit.store.protocol import WatchEvent

BEAT_MS: Final = 2_000
AGENTS: Final = 50
CONNECTIONS: Final = 256
BATCH: Final = 500
BATCH_CONNECTIONS: Final = 4
STEADY_PER_S: Final = 200
QUIET_MS: Final = 7_000
"""Longer than the five seconds after which controllers update the conditions of a job."""
QUIET_MS_MAX: Final = 60_000
BOUND_MS_MAX: Final = 180_000
KUBE_PER_S: Final = 280
"""Pods per second that kube-apiserver, kube-scheduler and etcd bind on a comparable machine at 5,000 nodes: 200 to 280."""
SLURM_PER_S: Final = 130
"""Allocations per second of Slurm on a comparable machine."""

QUANTILES: Final = {"p50_ms": 2, "p90_ms": 10, "p99_ms": 100, "p999_ms": 1_000}
"""Each quantile is the latency that one job in this many exceeds."""
CHART_LINES: Final = {"200 a second": "steady", "as fast as answered": "one request a job"}

_BOUND: Final = b'"phase":"bound"'
_READY: Final = b'"health":"ready"'


class EndToEndSizes(NamedTuple):
    nodes: int
    jobs: int
    steady_s: int
    echo_requests: int


def measure(quick: bool, nodes: int, count: int, data: Path | None, plot: Path | None = None) -> BenchReport:
    sizes = EndToEndSizes(nodes, min(count, 2_000) if quick else count, 5 if quick else 20, 2_000 if quick else 10_000)
    with (
        tempfile.TemporaryDirectory(prefix="remit-bench-", dir=data) as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        report = runner.run(_measure(sizes, Path(directory)))
    if plot is not None:
        plot.write_text(latency_chart(report.rows))
        print_progress(f"wrote the chart of job latency to {plot}")
    return report


async def _measure(sizes: EndToEndSizes, directory: Path) -> BenchReport:
    rows: list[dict[str, Any]] = [await measure_raw_store(directory / "yardstick")]
    async with bench_processes(directory) as processes:
        launcher = LoadLauncher(processes, directory)
        rows.append(await measure_echo(launcher, processes, sizes.echo_requests))
        print_progress(f"starting a cluster of {sizes.nodes:,} nodes, each component in its own process ...")
        async with _cluster(processes, directory, sizes.nodes) as cluster:
            rows += await _run_all(cluster, launcher, sizes)
    named = {row["what"]: row for row in rows}
    echo = named["yardstick: plain ASGI echo"]["per_s"]
    for row in rows:
        if "jobs_per_s" in row and row["what"] != "steady":  # its rate is given
            row |= {
                "of_echo": row["jobs_per_s"] / echo,
                "of_kube": row["jobs_per_s"] / KUBE_PER_S,
                "of_slurm": row["jobs_per_s"] / SLURM_PER_S,
            }
    aims = [
        BenchAim("jobs bound, one request each", "1/s", 3_500, named["one request a job"]["jobs_per_s"], "higher"),
        BenchAim("jobs bound, in batches", "1/s", 10_000, named["in batches"]["jobs_per_s"], "higher"),
        BenchAim(f"p99 from submitting to bound at {STEADY_PER_S}/s", "ms", 60, named["steady"]["p99_ms"], "lower"),
    ]
    return BenchReport("end-to-end", rows, aims)


# -------------------------------------------------------------------------------------------------------------- the cluster


class EndToEndCluster:
    """The processes of the cluster, and what this process observes of it."""

    def __init__(self, processes: BenchProcesses, server: ServerTarget, watcher: RowWatcher) -> None:
        self.processes, self.server, self.watcher = processes, server, watcher

    async def heartbeat_stats(self) -> HeartbeatStats:
        hollow = self.processes.by_name["hollow"]
        hollow.send_line("stats")
        return msgspec.json.decode(await hollow.read_line(), type=HeartbeatStats)

    async def report_started(self) -> None:
        """Let the agents report all bound replicas as started. A replica that stays bound too long would be placed again."""
        hollow = self.processes.by_name["hollow"]
        hollow.send_line("start")
        await hollow.read_line()


class RowWatcher:
    """Follows row changes: when each replica was bound, which nodes are ready, how much was written."""

    def __init__(self) -> None:
        self.bound_ns: dict[str, int] = {}
        self.ready: dict[str, None] = {}
        self.commits = self.rows = 0
        self.changed_ns = 0

    async def follow(self, rows: RemoteStore) -> None:
        watch = await rows.watch("", after=await rows.revision())
        async for event in watch:
            self._apply(event)

    def _apply(self, event: WatchEvent) -> None:
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

    async def wait_for(self, count: int, items: dict[str, Any]) -> None:
        until_ns = CLOCK.now_ns() + BOUND_MS_MAX * 1_000_000
        while len(items) < count:
            if CLOCK.now_ns() > until_ns:
                raise BenchProcessError(f"only {len(items)} of {count} arrived within {BOUND_MS_MAX // 1000} s")
            await asyncio.sleep(0.002)

    async def wait_until_quiet(self) -> None:
        """Wait until nothing but the authority's own heartbeat is written."""
        until_ns = CLOCK.now_ns() + QUIET_MS_MAX * 1_000_000
        while CLOCK.now_ns() - self.changed_ns < QUIET_MS * 1_000_000 and CLOCK.now_ns() < until_ns:
            await CLOCK.sleep_ms(50)


@asynccontextmanager
async def _cluster(processes: BenchProcesses, directory: Path, nodes: int) -> AsyncIterator[EndToEndCluster]:
    server = await start_server(processes, directory, BEAT_MS)
    url, node_groups = server.url, split_nodes(nodes, min(AGENTS, nodes))
    components: list[tuple[TokenRole, Sequence[str]]] = [("scheduler", ()), ("scheduler", ()), ("controllers", ())]
    own_token, *tokens = await create_tokens(
        server, [*components, *(("agent", [node.metadata.name for node in node_group]) for node_group in node_groups)]
    )
    files = [directory / name for name in ("scheduler.token", "controllers.token", "agents.tokens")]
    for file, text in zip(files, (tokens[0], tokens[1], "\n".join(tokens[2:])), strict=True):
        _write_secret(file, text)
    async with component_world((url,), own_token) as connected, asyncio.TaskGroup() as group:
        watcher = RowWatcher()
        follow_task = group.create_task(watcher.follow(connected.store))
        server_options = "--server", url, "--heartbeat-interval", f"{BEAT_MS}ms", "--token-file"
        await processes.start("scheduler", "scheduler", *server_options, str(files[0]))
        await processes.start("controllers", "controllers", *server_options, str(files[1]))
        args = url, str(files[2]), str(nodes), str(BEAT_MS)
        hollow = await processes.start("hollow", *args, module="remit.bench.load.hollow_agents")
        await hollow.read_line()
        await watcher.wait_for(nodes, watcher.ready)
        gc.collect()
        gc.freeze()
        yield EndToEndCluster(processes, server, watcher)
        follow_task.cancel()


def _write_secret(file: Path, text: str) -> None:
    file.touch(0o600)
    file.write_text(text + "\n")


# ------------------------------------------------------------------------------------------------------------------ the runs


async def _run_all(cluster: EndToEndCluster, launcher: LoadLauncher, sizes: EndToEndSizes) -> list[dict[str, Any]]:
    server, count = cluster.server, sizes.jobs
    rows = []
    for name, prefix, unique in (("one request a job", "single", False), ("one request a job, no spec twice", "own", True)):
        print_progress(f"{name}: {count:,} jobs ...")
        requests = create_requests(server, job_manifests(prefix, count, unique=unique))
        rows.append(await _run(cluster, launcher, name, requests, count, connections=CONNECTIONS))
    print_progress(f"in batches of {BATCH}: {count:,} jobs ...")
    requests = apply_requests(server, job_manifests("batch", count), BATCH)
    rows.append(await _run(cluster, launcher, "in batches", requests, count, connections=BATCH_CONNECTIONS))
    steady = STEADY_PER_S * sizes.steady_s
    print_progress(f"steady: {STEADY_PER_S} jobs per second for {sizes.steady_s} s ...")
    requests = create_requests(server, job_manifests("steady", steady))
    rows.append(await _run(cluster, launcher, "steady", requests, steady, connections=CONNECTIONS, per_s=STEADY_PER_S))
    return rows


async def _run(
    cluster: EndToEndCluster, launcher: LoadLauncher, name: str, requests: Sequence[bytes], count: int, **load_options: Any
) -> dict[str, Any]:
    watcher, processes = cluster.watcher, cluster.processes
    await watcher.wait_until_quiet()
    await cluster.heartbeat_stats()
    load = await launcher.prepare(cluster.server, requests, **load_options)
    enough, before = len(watcher.bound_ns) + count, processes.cpu_s()
    rows, commits_ = watcher.rows, watcher.commits
    bound_before = set(watcher.bound_ns)
    load.start()
    result = await load.result()
    failures = [status for status in result.status if status >= 300]
    if failures:
        raise BenchProcessError(
            f"{name}: {len(failures)} of {len(result.status)} requests failed with status {failures[0]}: {result.problem}"
        )
    await watcher.wait_for(enough, watcher.bound_ns)
    cpu = cpu_spent(before, processes.cpu_s())
    written = {"rows_per_job": (watcher.rows - rows) / count, "commits": watcher.commits - commits_}
    stats = await cluster.heartbeat_stats()
    await load.stop()
    await cluster.report_started()
    bound = {key: at_ns for key, at_ns in watcher.bound_ns.items() if key not in bound_before}
    seconds = (max(bound.values()) - min(result.sent_ns)) / 1e9
    return {
        "what": name,
        "jobs": count,
        "seconds": seconds,
        "jobs_per_s": count / seconds,
        "accepted_per_s": count / ((max(result.done_ns) - min(result.sent_ns)) / 1e9),
        **_latencies(result, bound, count),
        **cpu_micros(cpu, count),
        "cpu_s": sum(cpu.values()),
        **written,
        "beat_p99_ms": stats.p99_ms,
        "beats_lost": stats.lost,
    }


def _latencies(result: LoadResult, bound: dict[str, int], count: int) -> dict[str, float]:
    """Return the latency from request to bind, if each request is one job."""
    if len(result.which) != count:
        return {}
    sent = dict(zip(result.which, result.sent_ns, strict=True))
    waits = [(at_ns - sent[int(key.split("-")[-2])]) / 1e6 for key, at_ns in bound.items()]
    return {**{name: quantile(waits, 1 - 1 / among) for name, among in QUANTILES.items()}, "max_ms": max(waits)}


def latency_chart(rows: Sequence[dict[str, Any]]) -> str:
    """Draw the latency quantiles of the runs in which each request is one job."""
    lines = [
        ChartLine(name, [(among, row[quantile_]) for quantile_, among in QUANTILES.items()])
        for name, row_name in CHART_LINES.items()
        for row in rows
        if row["what"] == row_name and "p50_ms" in row
    ]
    return draw("From a request to its durable bind", "one job in this many is slower", "milliseconds", lines)
