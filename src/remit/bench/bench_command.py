"""The `bench` command group. Each benchmark is a module beside this one and is loaded when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from remit.bench.report import finish
from remit.model.problems import escaped

PICTURE = click.Path(path_type=Path, dir_okay=False, writable=True)
DIRECTORY = click.Path(path_type=Path, exists=True, file_okay=False, writable=True)


@click.group()
def bench() -> None:
    """Measure this machine, next to a yardstick in the same run.

    \b
    Examples:
      remit bench commit --quick          a look in a few seconds
      remit bench commit --json           one line for programs; exit 1 if an aim is missed
      remit bench place --quick           how fast the scheduler's kernel finds places
      remit bench flood --quick           does one tenant's flood leave the others alone?
      remit bench packing --trace DIR     how much of a GPU cluster is put to use
      remit bench schedule --quick        from a full queue to the last durable bind
      remit bench end-to-end --quick      from a request over HTTP to the durable bind, at 5,000 nodes
      remit bench api --quick             what requests, watches and heartbeats cost a server
      remit bench simulate --quick        how much simulated time a minute buys
      remit bench run --quick             real jobs a second, and how soon one starts
    """


def _check_place(plot: Path | None) -> None:
    """Said at once: after minutes of measuring, what was measured would be lost."""
    if plot is not None and not plot.parent.is_dir():
        raise click.BadParameter(f"there is no directory {escaped(str(plot.parent))} to write in", param_hint="'--plot'")


@bench.command("commit")
@click.option("--quick", is_flag=True, help="Fewer binds; good enough for a look.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line, last on stdout; progress goes to stderr.")
@click.option(
    "--replicas", type=click.IntRange(1_000, 5_000_000), default=None, help="How many replicas the memory is measured at."
)
@click.option("--data", type=DIRECTORY, default=None, help="An existing directory to write in; a real disk.")
def commit(quick: bool, as_json: bool, replicas: int | None, data: Path | None) -> None:
    """Durable binds a second through the whole authority, next to the raw store writing the same rows.

    \b
    Examples:
      remit bench commit
      remit bench commit --json --replicas 1000000      the memory of a million replicas
      remit bench commit --data /var/tmp                on another disk
    """
    from remit.bench.commit import measure

    finish(measure(quick, replicas or (100_000 if quick else 300_000), data), as_json)


@bench.command("place")
@click.option("--quick", is_flag=True, help="Fewer sizes and shorter looks; every aim is measured.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line, last on stdout; progress goes to stderr.")
@click.option("--plot", type=PICTURE, default=None, help="An SVG file to draw the growth with the nodes in.")
def place(quick: bool, as_json: bool, plot: Path | None) -> None:
    """Placements a second in the scheduler's kernel, from 1,000 to 50,000 nodes, next to a plain loop over the nodes.

    \b
    By class and one by one, with 40 and 400 classes, with and without spread, affinity, anti-affinity and devices.

    \b
    Examples:
      remit bench place
      remit bench place --quick --json
      remit bench place --plot place.svg
    """
    from remit.bench.placement import measure

    _check_place(plot)
    finish(measure(quick, plot), as_json)


@bench.command("simulate")
@click.option("--quick", is_flag=True, help="Shorter runs; good enough for a look.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line, last on stdout; progress goes to stderr.")
def simulate(quick: bool, as_json: bool) -> None:
    """Simulated hours a minute on two processes, at 10, 100 and 1,000 nodes, next to the bare loop.

    \b
    An hour counts only as far as it had 70 faults and 1,000 commits that decided something.

    \b
    Examples:
      remit bench simulate
      remit bench simulate --quick --json
    """
    from remit.bench.simulation_speed import measure

    finish(measure(quick), as_json)


@bench.command("schedule")
@click.option("--quick", is_flag=True, help="Fewer jobs; good enough for a look.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line, last on stdout; progress goes to stderr.")
@click.option("--data", type=DIRECTORY, default=None, help="An existing directory to write in; a real disk.")
def schedule(quick: bool, as_json: bool, data: Path | None) -> None:
    """From a full queue to the last durable bind: jobs a second, with spread, anti-affinity and preemption; and how long one
    job waits that arrives.

    \b
    Examples:
      remit bench schedule --quick
      remit bench schedule --json --data /var/tmp       on another disk
    """
    from remit.bench.schedule import measure

    finish(measure(quick, data), as_json)


@bench.command("end-to-end")
@click.option("--nodes", type=click.IntRange(1, 10_000), default=5_000, show_default=True, help="Hollow nodes with leases.")
@click.option("--jobs", type=click.IntRange(100, 100_000), default=10_000, show_default=True, help="Jobs in each of the runs.")
@click.option("--quick", is_flag=True, help="At most 2,000 jobs a run; good enough for a look.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line, last on stdout; progress goes to stderr.")
@click.option("--data", type=DIRECTORY, default=None, help="An existing directory to write in; a real disk.")
@click.option("--plot", type=PICTURE, default=None, help="An SVG file to draw in how long jobs wait.")
def end_to_end(nodes: int, jobs: int, quick: bool, as_json: bool, data: Path | None, plot: Path | None) -> None:
    """Over HTTP, from the first request to the last durable bind; server, scheduler, controllers and agents are processes.

    \b
    Jobs with one request each and in batches; and how long one waits at 200 jobs a second. Next to a plain echo and the raw
    store in the same run.

    \b
    Examples:
      remit bench end-to-end --quick
      remit bench end-to-end --nodes 5000 --jobs 10000 --json
      remit bench end-to-end --plot waits.svg
    """
    from remit.bench.end_to_end import measure

    _check_place(plot)
    finish(measure(quick, nodes, jobs, data, plot), as_json)


@bench.command("api")
@click.option("--quick", is_flag=True, help="Shorter looks; good enough for a look.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line, last on stdout; progress goes to stderr.")
@click.option("--data", type=DIRECTORY, default=None, help="An existing directory to write in; a real disk.")
def api(quick: bool, as_json: bool, data: Path | None) -> None:
    """Requests a second and CPU time for each; what 500 watchers cost, and the heartbeats of 5,000 agents.

    \b
    Examples:
      remit bench api --quick
      remit bench api --json
    """
    from remit.bench.api import measure

    finish(measure(quick, data), as_json)


@bench.command("flood")
@click.option("--quick", is_flag=True, help="A shorter flood; good enough for a look.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line, last on stdout; progress goes to stderr.")
@click.option("--data", type=DIRECTORY, default=None, help="An existing directory to write in; a real disk.")
@click.option("--rate", type=click.IntRange(1, 20_000), default=1_000, show_default=True, help="Creates a second of the flood.")
def flood(quick: bool, as_json: bool, data: Path | None, rate: int) -> None:
    """One tenant creates a thousand objects a second: how long do others wait, and the heartbeats of 50 agents?

    \b
    Before the flood, during it, and after it. Who floods is told to come back later (429), and costs the server little.

    \b
    Examples:
      remit bench flood --quick
      remit bench flood --rate 5000 --json
    """
    from remit.bench.flood import measure

    finish(measure(quick, data, rate), as_json)


@bench.command("run")
@click.option("--quick", is_flag=True, help="Fewer jobs; good enough for a look.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line, last on stdout; progress goes to stderr.")
@click.option("--data", type=DIRECTORY, default=None, help="An existing directory to write in; a real disk.")
def run(quick: bool, as_json: bool, data: Path | None) -> None:
    """Real jobs, submitted over HTTP and run as processes on 20 nodes: how many a second, and how soon one starts on an idle
    scope, step by step; with and without a sandbox, next to starting the same program from Python alone.

    \b
    Examples:
      remit bench run --quick
      remit bench run --json --data /var/tmp            on another disk
    """
    from remit.bench.run import measure

    finish(measure(quick, data), as_json)


class Seeds(click.ParamType[tuple[int, ...]]):
    """Whole numbers and ranges of them, as in `42-51` or `1,3,5-7`."""

    name = "seeds"
    most = 1_000

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        found: dict[int, None] = {}
        for part in str(value).split(","):
            first, dash, last = part.strip().partition("-")
            if not (first.isdecimal() and (last.isdecimal() or not dash)) or max(len(first), len(last)) > 9:
                self.fail(f"{part!r} is neither a whole number nor a range such as 42-51", param, ctx)
            ends = int(first), int(last or first)
            if not 0 <= ends[1] - ends[0] < self.most or len(found) > self.most:
                self.fail(f"{part!r} goes backwards, or there are more than {self.most} seeds", param, ctx)
            found.update(dict.fromkeys(range(ends[0], ends[1] + 1)))
        return tuple(found)


POLICY_NAMES: Final = ("random", "dotprod", "clustering", "packing", "bestfit", "fgd", "default")


@bench.command("packing")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="A directory with openb_nodes_gpu.csv and, for each workload W, openb_pods_W.csv or openb_pods_W.csv.gz.",
)
@click.option("--workload", "workloads", multiple=True, default=("default",), show_default=True, help="W; may be given again.")
@click.option("--policy", "policies", multiple=True, type=click.Choice(POLICY_NAMES), help="Only this one; may be given again.")
@click.option("--seeds", type=Seeds(), default="42-51", show_default=True, help="A run for each, as in 42-51 or 1,3,5-7.")
@click.option("--quick", is_flag=True, help="The first two seeds, next to bestfit and fgd alone.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line, last on stdout; progress goes to stderr.")
def packing(
    trace: Path, workloads: tuple[str, ...], policies: tuple[str, ...], seeds: tuple[int, ...], quick: bool, as_json: bool
) -> None:
    """How many GPUs are given out when pods come one by one until they ask for 130 per cent of them, and never leave.

    \b
    Remit's own placing is `default`; the others are published policies, on the same nodes and arrivals. Seconds are CPU time.

    \b
    Examples:
      remit bench packing --trace DIR --quick
      remit bench packing --trace DIR --workload gpushare100 --workload cpu200 --json
      remit bench packing --trace DIR --policy fgd --policy default --seeds 42-45
    """
    from remit.bench.packing import measure

    finish(measure(trace, workloads, policies, seeds, quick), as_json)
