"""The `bench` command group. Each benchmark is a module of this package and is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from remit.bench.report import print_report
from remit.model.problems import escaped

SVG_FILE = click.Path(path_type=Path, dir_okay=False, writable=True)
DIRECTORY = click.Path(path_type=Path, exists=True, file_okay=False, writable=True)


@click.group()
def bench() -> None:
    """Measure this machine, next to a baseline in the same run.

    \b
    Examples:
      remit bench commit --quick          durable binds per second, in a few seconds
      remit bench commit --json           one JSON line; exit code 1 if a goal is missed
      remit bench place --quick           placements per second in the scheduler's kernel
      remit bench flood --quick           latency of other tenants while one tenant floods the API
      remit bench packing --trace DIR     GPU allocation on a published trace
      remit bench schedule --quick        from a full queue to the last durable bind
      remit bench end-to-end --quick      from an HTTP request to the durable bind, on 5,000 nodes
      remit bench api --quick             server CPU time of requests, watches and heartbeats
      remit bench simulate --quick        simulated hours per minute
      remit bench run --quick             real jobs per second, and the time until one starts
    """


def _check_plot_directory(plot: Path | None) -> None:
    """Check the output directory before measuring, so that minutes of results are not lost."""
    if plot is not None and not plot.parent.is_dir():
        raise click.BadParameter(f"directory {escaped(str(plot.parent))} does not exist", param_hint="'--plot'")


@bench.command("commit")
@click.option("--quick", is_flag=True, help="Run fewer binds, for a rough result.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout; progress goes to stderr.")
@click.option(
    "--replicas", type=click.IntRange(1_000, 5_000_000), default=None, help="Number of replicas at which memory is measured."
)
@click.option("--data", type=DIRECTORY, default=None, help="Existing directory for the data, on a real disk.")
def commit(quick: bool, as_json: bool, replicas: int | None, data: Path | None) -> None:
    """Durable binds per second through the whole authority, next to the raw store writing the same rows.

    \b
    Examples:
      remit bench commit
      remit bench commit --json --replicas 1000000      memory of a million replicas
      remit bench commit --data /var/tmp                on another disk
    """
    from remit.bench.commit import measure

    print_report(measure(quick, replicas or (100_000 if quick else 300_000), data), as_json)


@bench.command("place")
@click.option("--quick", is_flag=True, help="Measure fewer sizes for a shorter time; every goal is still measured.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout; progress goes to stderr.")
@click.option("--plot", type=SVG_FILE, default=None, help="Write a chart of the time per placement to this SVG file.")
def place(quick: bool, as_json: bool, plot: Path | None) -> None:
    """Placements per second in the scheduler's kernel, from 1,000 to 50,000 nodes, next to a plain loop over the nodes.

    \b
    In batches by class and one by one, with 40 and 400 classes, with and without spread, affinity, anti-affinity and devices.

    \b
    Examples:
      remit bench place
      remit bench place --quick --json
      remit bench place --plot place.svg
    """
    from remit.bench.placement import measure

    _check_plot_directory(plot)
    print_report(measure(quick, plot), as_json)


@bench.command("simulate")
@click.option("--quick", is_flag=True, help="Simulate shorter runs, for a rough result.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout; progress goes to stderr.")
def simulate(quick: bool, as_json: bool) -> None:
    """Simulated hours per minute on two processes, at 10, 100 and 1,000 nodes, next to the bare event loop.

    \b
    An hour counts in full only if it had 70 faults and 1,000 commits that decided a claim.

    \b
    Examples:
      remit bench simulate
      remit bench simulate --quick --json
    """
    from remit.bench.simulation_speed import measure

    print_report(measure(quick), as_json)


@bench.command("schedule")
@click.option("--quick", is_flag=True, help="Schedule fewer jobs, for a rough result.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout; progress goes to stderr.")
@click.option("--data", type=DIRECTORY, default=None, help="Existing directory for the data, on a real disk.")
def schedule(quick: bool, as_json: bool, data: Path | None) -> None:
    """Jobs per second from a full queue to the last durable bind, with spread, anti-affinity and preemption; and the latency of
    single arriving jobs.

    \b
    Examples:
      remit bench schedule --quick
      remit bench schedule --json --data /var/tmp       on another disk
    """
    from remit.bench.schedule import measure

    print_report(measure(quick, data), as_json)


@bench.command("end-to-end")
@click.option(
    "--nodes",
    type=click.IntRange(1, 10_000),
    default=5_000,
    show_default=True,
    help="Number of simulated nodes, each with a lease.",
)
@click.option(
    "--jobs", type=click.IntRange(100, 100_000), default=10_000, show_default=True, help="Number of jobs in each run."
)
@click.option("--quick", is_flag=True, help="Run at most 2,000 jobs each, for a rough result.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout; progress goes to stderr.")
@click.option("--data", type=DIRECTORY, default=None, help="Existing directory for the data, on a real disk.")
@click.option("--plot", type=SVG_FILE, default=None, help="Write a chart of job latency to this SVG file.")
def end_to_end(nodes: int, jobs: int, quick: bool, as_json: bool, data: Path | None, plot: Path | None) -> None:
    """Jobs per second over HTTP, from the first request to the last durable bind, with every component as a process.

    \b
    Measures jobs with one request each and in batches, and the latency of a job at 200 jobs per second, next to a plain HTTP
    echo server and the raw store.

    \b
    Examples:
      remit bench end-to-end --quick
      remit bench end-to-end --nodes 5000 --jobs 10000 --json
      remit bench end-to-end --plot waits.svg
    """
    from remit.bench.end_to_end import measure

    _check_plot_directory(plot)
    print_report(measure(quick, nodes, jobs, data, plot), as_json)


@bench.command("api")
@click.option("--quick", is_flag=True, help="Measure for a shorter time, for a rough result.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout; progress goes to stderr.")
@click.option("--data", type=DIRECTORY, default=None, help="Existing directory for the data, on a real disk.")
def api(quick: bool, as_json: bool, data: Path | None) -> None:
    """Requests per second and their CPU time; the cost of 500 watches, and of the heartbeats of 5,000 agents.

    \b
    Examples:
      remit bench api --quick
      remit bench api --json
    """
    from remit.bench.api import measure

    print_report(measure(quick, data), as_json)


@bench.command("flood")
@click.option("--quick", is_flag=True, help="Flood for a shorter time, for a rough result.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout; progress goes to stderr.")
@click.option("--data", type=DIRECTORY, default=None, help="Existing directory for the data, on a real disk.")
@click.option(
    "--rate",
    type=click.IntRange(1, 20_000),
    default=1_000,
    show_default=True,
    help="Create requests per second of the flooding tenant.",
)
def flood(quick: bool, as_json: bool, data: Path | None, rate: int) -> None:
    """Latency of other tenants and of the heartbeats of 50 agents while one tenant creates a thousand objects per second.

    \b
    Measured before, during and after the flood. Excess requests are rejected with 429, at little cost to the server.

    \b
    Examples:
      remit bench flood --quick
      remit bench flood --rate 5000 --json
    """
    from remit.bench.flood import measure

    print_report(measure(quick, data, rate), as_json)


@bench.command("run")
@click.option("--quick", is_flag=True, help="Run fewer jobs, for a rough result.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout; progress goes to stderr.")
@click.option("--data", type=DIRECTORY, default=None, help="Existing directory for the data, on a real disk.")
def run(quick: bool, as_json: bool, data: Path | None) -> None:
    """Jobs per second of real jobs, submitted over HTTP and run as processes on 20 nodes.

    Also measures the time until one job starts on an idle scope, by step. Everything is measured with and without a sandbox,
    next to starting the same program from Python alone.

    \b
    Examples:
      remit bench run --quick
      remit bench run --json --data /var/tmp            on another disk
    """
    from remit.bench.run import measure

    print_report(measure(quick, data), as_json)


class SeedsParam(click.ParamType[tuple[int, ...]]):
    """Numbers and ranges, such as `42-51` or `1,3,5-7`."""

    name = "seeds"
    most = 1_000

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        seeds: dict[int, None] = {}
        for part in str(value).split(","):
            first, dash, last = part.strip().partition("-")
            if not (first.isdecimal() and (last.isdecimal() or not dash)) or max(len(first), len(last)) > 9:
                self.fail(f"{part!r} is not a number or a range such as 42-51", param, ctx)
            ends = int(first), int(last or first)
            if not 0 <= ends[1] - ends[0] < self.most or len(seeds) > self.most:
                self.fail(f"{part!r} is a descending range, or there are more than {self.most} seeds", param, ctx)
            seeds.update(dict.fromkeys(range(ends[0], ends[1] + 1)))
        return tuple(seeds)


POLICY_NAMES: Final = ("random", "dotprod", "clustering", "packing", "bestfit", "fgd", "default")


@bench.command("packing")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="Directory with openb_nodes_gpu.csv and, for each workload W, openb_pods_W.csv or openb_pods_W.csv.gz.",
)
@click.option("--workload", "workloads", multiple=True, default=("default",), show_default=True, help="Workload W; repeatable.")
@click.option(
    "--policy", "policies", multiple=True, type=click.Choice(POLICY_NAMES), help="Measure only this policy; repeatable."
)
@click.option(
    "--seeds", type=SeedsParam(), default="42-51", show_default=True, help="Seeds, one run for each, such as 42-51 or 1,3,5-7."
)
@click.option("--quick", is_flag=True, help="Use the first two seeds, and only the policies bestfit, fgd and default.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout; progress goes to stderr.")
def packing(
    trace: Path, workloads: tuple[str, ...], policies: tuple[str, ...], seeds: tuple[int, ...], quick: bool, as_json: bool
) -> None:
    """Percentage of GPUs allocated when pods arrive one by one, never leave, and request 130 per cent of all GPUs in total.

    \b
    `default` is Remit's own placement; the others are published policies, on the same nodes and arrivals. Seconds are CPU time.

    \b
    Examples:
      remit bench packing --trace DIR --quick
      remit bench packing --trace DIR --workload gpushare100 --workload cpu200 --json
      remit bench packing --trace DIR --policy fgd --policy default --seeds 42-45
    """
    from remit.bench.packing import measure

    print_report(measure(trace, workloads, policies, seeds, quick), as_json)
