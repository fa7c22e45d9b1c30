"""`demo`: runs real work and kills real processes, places a load on simulated nodes, or runs a race for one GPU.

Parses options, prints progress and sets the exit code; the demos themselves are in live.py, placement_demo.py and race.py.
"""

from __future__ import annotations

import asyncio
import signal  # noqa: TID251 - handles SIGTERM of this program, so that it leaves no process behind
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click

from remit.cli.main import examples

if TYPE_CHECKING:
    from rich.console import Console

    from remit.demo.race import Kill, Race
    from remit.demo.verify import Finding, RefusalSummary, VerificationReport
    from remit.model.kinds import Node, Workload
    from remit.model.kinds.registry import AnyObject

T = TypeVar("T")

FILES: Final = ("cluster.yaml", "fraud-batch.yaml")
QUICKSTART: Final = ("web.yaml", "sums.yaml", "train.yaml")
ROUNDS: Final = 100
WIDTH_MAX: Final = 110
INDENT: Final = 27
"""Column at which the text of a finding starts, after its mark and name."""


class Terminated(Exception):
    """SIGTERM was received, and cleanup is complete."""


class RaceManifests(NamedTuple):
    """The declared objects: all of them, the job, and the nodes with a GPU."""

    objects: tuple[AnyObject, ...]
    job: Workload
    nodes: tuple[Node, ...]


@click.group(
    invoke_without_command=True,
    epilog=examples(
        "remit demo                                 a service, a batch job; then a machine and the server are killed",
        "remit demo --keep                          the same, and leave the cluster running",
        "remit demo place --data /tmp/remit-placed  a load on a thousand simulated nodes; keep its store",
        "remit demo race --rounds 300 --seed 7      two schedulers race for one GPU, and the authority is killed",
    ),
)
@click.option("--keep", is_flag=True, help="Leave everything running at the end, and print how to use and stop it.")
@click.option(
    "--examples",
    "examples_directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory that contains quickstart/web.yaml.",
)
@click.pass_context
def demo(context: click.Context, keep: bool, examples_directory: Path | None) -> None:
    """Run real work, explain a pending job, and kill a machine and then the server, in less than a minute.

    Prints the checks at the end, and exits with 0 only if all of them hold. Uses a temporary directory.
    """
    if context.invoked_subcommand is None:
        sys.exit(_live(keep, _examples(examples_directory, tuple(f"quickstart/{name}" for name in QUICKSTART)) / "quickstart"))


def _live(keep: bool, directory: Path) -> int:
    from remit.cli.output.console import console
    from remit.demo.live import run_live_demo

    output = console()
    try:
        with _report_failures(output):
            return asyncio.run(_until_terminated(run_live_demo(output, directory, keep=keep)))
    except Terminated:
        return 128 + signal.SIGTERM


@demo.command("place", epilog=examples("remit demo place", "remit demo place --data /tmp/remit-placed   keep the store"))
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Keep the store in this empty directory.")
def place_load(data: Path | None) -> None:
    """Place a mixed load on a thousand simulated nodes, live; one job stays pending and is explained.

    Only the nodes are simulated. The authority, its SQLite store, the scheduler and every claim between them are real.
    """
    from remit.cli.commands.explain import explain
    from remit.cli.output.console import console
    from remit.demo.placement_demo import PENDING_JOB, show
    from remit.world.production import production

    output = console()

    async def placed(directory: Path) -> None:
        world = production()
        try:
            await show(output, directory, world)
        finally:
            await world.offload.close()

    with _directory(data) as directory:
        with _report_failures(output):
            asyncio.run(placed(directory))
        output.print(f"\nOne job is pending. $ remit explain workload/{PENDING_JOB} --data {data or 'DIR'}\n")
        explain.main([f"workload/{PENDING_JOB}", "--data", str(directory)], standalone_mode=False)


@demo.command(
    "race",
    epilog=examples(
        "remit demo race                         in a temporary directory",
        "remit demo race --data /tmp/remit-demo  keep the store",
        "remit demo race --rounds 300 --seed 7   a longer race, with this random seed",
    ),
)
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Keep the store in this empty directory.")
@click.option("--rounds", type=click.IntRange(2, 500), default=ROUNDS, show_default=True, help="Number of rounds.")
@click.option("--seed", default=None, help="Random seed. The timing of the machine still varies.")
@click.option(
    "--examples",
    "examples_directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory with cluster.yaml and fraud-batch.yaml.",
)
def race(data: Path | None, rounds: int, seed: str | None, examples_directory: Path | None) -> None:
    """Two schedulers race for one GPU; the authority is killed in the middle, restarted, and its store is verified.

    Everything is real: the process killed with SIGKILL, the SQLite store it leaves behind, the sockets, the retries. Exits
    with 0 only if afterwards the GPU has one owner, the books balance, and every acknowledged operation is found.
    """
    from rich.console import Console

    console = Console(highlight=False, emoji=False)
    if console.width > WIDTH_MAX:
        console = Console(highlight=False, emoji=False, width=WIDTH_MAX)
    manifests = _race_manifests(_examples(examples_directory))
    try:
        with _report_failures(console):
            holds = asyncio.run(_until_terminated(_run_race(console, manifests, data, rounds, seed)))
    except Terminated:
        sys.exit(128 + signal.SIGTERM)
    sys.exit(0 if holds else 1)


@contextmanager
def _report_failures(console: Console) -> Iterator[None]:
    """Prints an expected failure in one line and exits with 1."""
    from remit.client.api_caller import ApiError, Unanswered
    from remit.client.authority_client import RetriesExhausted
    from remit.demo.authority_process import DemoFailed
    from remit.store.protocol import StoreError
    from remit.world.interfaces import WorldError

    known = (DemoFailed, RetriesExhausted, ApiError, Unanswered, StoreError, WorldError)
    try:
        yield
    except known as error:
        _print_failure(console, error)
        sys.exit(1)
    except ExceptionGroup as group:
        expected = group.subgroup(known)
        if expected is None:
            raise
        _print_failure(console, _first_failure(expected))
        sys.exit(1)


def _first_failure(error: BaseException) -> BaseException:
    """The first failure in a group of tasks; the others usually follow from it."""
    return _first_failure(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _print_failure(console: Console, error: BaseException) -> None:
    from rich.text import Text

    console.print(Text.assemble("\n", ("The demo failed:", "bold red"), f" {error}"), soft_wrap=True)


# ----------------------------------------------------------------------------------------------------------------- manifests


def _examples(directory_option: Path | None, names: tuple[str, ...] = FILES) -> Path:
    """Directory of the example manifests. They are files of the repository rather than package data, so that users can read and
    change them.
    """
    directories = (
        [directory_option]
        if directory_option
        else [Path(__file__).resolve().parents[3] / "examples", Path("examples").resolve()]
    )
    for directory in directories:
        if all((directory / name).is_file() for name in names):
            return directory
    # The directory next to the package exists only in a checkout; naming it elsewhere would point into the installation.
    raise click.UsageError(
        f"{' and '.join(names)} are not in {directories[-1]}; they come with the repository: run this from a "
        "checkout, or name their directory with --examples"
    )


def _race_manifests(directory: Path) -> RaceManifests:
    from remit.model.kinds import Node, Workload
    from remit.model.manifests.reader import read

    objects: list[AnyObject] = []
    for name in FILES:
        result = read((directory / name).read_bytes(), name)
        if result.problems:
            raise click.UsageError(
                f"{name} has {len(result.problems)} problems; run `remit validate {directory / name}` to list them"
            )
        objects += result.objects
    jobs = [obj for obj in objects if isinstance(obj, Workload)]
    nodes = tuple(obj for obj in objects if isinstance(obj, Node) and obj.spec.devices)
    if len(jobs) != 1 or not nodes:
        raise click.UsageError(
            f"{directory} declares {len(jobs)} workloads and {len(nodes)} nodes with a GPU; "
            "expected one job and at least one node with a GPU"
        )
    return RaceManifests(tuple(objects), jobs[0], nodes)


@contextmanager
def _directory(data: Path | None) -> Iterator[Path]:
    if data is None:
        with tempfile.TemporaryDirectory(prefix="remit-demo-") as temporary:
            yield Path(temporary)
        return
    if data.exists() and any(data.iterdir()):
        raise click.UsageError(
            f"{data} is not empty, and the demo needs an empty directory; name another directory, or remove it"
        )
    yield data


# --------------------------------------------------------------------------------------------------------------------- output


async def _until_terminated(work: Coroutine[Any, Any, T]) -> T:
    """Runs the demo until it ends or SIGTERM arrives, which cancels it like Ctrl-C, so that directories and processes are
    cleaned up.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        if not terminated:  # a second SIGTERM must not interrupt the cleanup
            terminated = True
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await task
    except asyncio.CancelledError:
        if terminated:
            raise Terminated from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _run_race(console: Console, manifests: RaceManifests, keep_in: Path | None, rounds: int, seed: str | None) -> bool:
    from remit.demo.race import Race
    from remit.demo.verify import verify_race
    from remit.world.production import production
    from remit.world.randomness import SeededRandomness

    world = production()
    began_ms = world.clock.now_ms()
    seed = seed or world.ids.incarnation()
    # The socket gets its own directory, because a socket path is limited to about 100 characters and --data may be longer.
    with _directory(keep_in) as data, tempfile.TemporaryDirectory(prefix="remit-demo-") as socket_directory:
        race = Race(data, Path(socket_directory) / "s", world, SeededRandomness(seed), rounds)
        try:
            await _set_up(console, race, manifests, data)
            await _race(console, race)
            resubmitted = await race.resubmit_all()
            await race.stop()
            _print_line(
                console, f"All {resubmitted:,} operations were submitted again under their ids; then the process was stopped"
            )
            report = await verify_race(data, world, race)
        finally:
            await race.end()
            await world.offload.close()
    _print_report(console, report)
    _print_end(console, report, world.clock.now_ms() - began_ms, seed, keep_in)
    return report.holds


def _print_heading(console: Console, number: int, title: str) -> None:
    console.print(f"\n[bold cyan]{number}[/]  [bold]{title}[/]")


def _print_line(console: Console, text: str, lead: str = "", indent: int = 3) -> None:
    """Prints `text` wrapped and indented after `lead`. A table would pad every line with blanks, which shows in files."""
    from rich.text import Text

    first, rest = Text.from_markup(" " * 3 + lead), Text(" " * indent)
    first.pad_right(indent - first.cell_len)
    for number, line in enumerate(Text.from_markup(text).wrap(console, max(20, console.width - indent))):
        line.rstrip()
        console.print(Text.assemble(rest if number else first, line), soft_wrap=True)


async def _set_up(console: Console, race: Race, manifests: RaceManifests, data: Path) -> None:
    from rich.markup import escape

    console.print("[bold]Remit demo: one GPU, two schedulers, one kill[/]")
    _print_heading(console, 1, "Setup")
    ready = await race.start()
    _print_line(console, f"Process {ready.pid} owns a fresh SQLite store in {escape(str(data))} (epoch {ready.epoch})")
    count = await race.declare(manifests.objects)
    _print_line(console, f"{count} objects from {' and '.join(FILES)} applied")
    names = ", ".join(node.metadata.name for node in manifests.nodes)
    _print_line(console, f"{len(manifests.nodes)} nodes are ready: {names}")
    leases = await race.set_up_race(manifests.job, manifests.nodes[0])
    job = manifests.job.metadata
    _print_line(console, f"Tenant {job.tenant} has a job, {job.name}; each replica needs one GPU")
    _print_line(console, f"{' and '.join(leases)} hold one lease each, and half of the replicas each")


async def _race(console: Console, race: Race) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from remit.demo.race import CLAIMS_EACH

    target = race.target
    _print_heading(console, 2, f"The race for {target.device} of {target.node}")
    _print_line(
        console, f"In each round both send {CLAIMS_EACH} claims for it at once. One wins, runs its job, and frees the GPU"
    )
    columns = (
        TextColumn("   {task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[wins]}"),
    )
    kills_printed = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("rounds", total=race.rounds, wins="")

        def on_round(number: int) -> None:
            nonlocal kills_printed
            for kill in race.kills[kills_printed:]:
                _print_kill(progress.console, kill)
            kills_printed = len(race.kills)
            progress.update(task, completed=number, wins=_wins(race))

        await race.run(on_round)
    _print_line(console, f"{race.rounds} rounds: {_wins(race)}")


def _wins(race: Race) -> str:
    return ", ".join(f"{lease} won {count}" for lease, count in sorted(race.wins.items()))


def _print_kill(console: Console, kill: Kill) -> None:
    count = len(kill.in_flight)
    flight = f"{count} claim{'s' * (count > 1)} in flight" if count else "nothing in flight, so the kill is repeated next round"
    _print_line(console, f"[bold red]SIGKILL[/] to process {kill.pid} in round {kill.round}, with {flight}")
    after = kill.after
    took = f"took over {kill.down_ms / 1000:.1f} s later from the store alone (epoch {after.epoch})"
    _print_line(console, f"[bold green]Restarted[/]: process {after.pid} {took}")


# --------------------------------------------------------------------------------------------------------------- verification


def _print_report(console: Console, report: VerificationReport) -> None:
    _print_heading(console, 3, "Verification from the store alone")
    for finding in report.findings:
        _print_finding(console, finding)
    _print_heading(console, 4, "Books recomputed from the rows")
    for finding in report.books:
        _print_finding(console, finding)
    _print_heading(console, 5, "Refused claims")
    for refusal in report.refusals:
        _print_refusals(console, refusal)


def _print_finding(console: Console, finding: Finding) -> None:
    from rich.markup import escape

    _print_line(console, escape(finding.result), f"{_mark(console, finding)} {finding.name}", INDENT)
    for violation in finding.violations:
        _print_line(console, f"[red]{escape(violation)}[/]", indent=INDENT)


def _mark(console: Console, finding: Finding) -> str:
    utf = (console.encoding or "").lower().startswith("utf")
    if finding.violations:
        return "[bold red]✗[/]" if utf else "[bold red]NO[/]"
    return "[bold green]✓[/]" if utf else "[bold green]ok[/]"


def _print_refusals(console: Console, refusal: RefusalSummary) -> None:
    from rich.markup import escape

    clients = ", ".join(f"{name} {times:,} times" for name, times in sorted(refusal.clients.items()))
    _print_line(console, f"{refusal.meaning} ({clients})", f"[yellow]{refusal.code}[/]", INDENT)
    _print_line(console, escape(refusal.example), "  for example", INDENT)
    _print_line(console, refusal.cure, "  fix", INDENT)


def _print_end(console: Console, report: VerificationReport, took_ms: int, seed: str, keep_in: Path | None) -> None:
    from rich.markup import escape

    every = (*report.findings, *report.books)
    failed = sum(bool(finding.violations) for finding in every)
    if failed:
        summary = f"[bold red]{failed} of {len(every)} checks failed.[/] Please report it with the store (--data DIR keeps it)."
    else:
        summary = "[bold green]One owner, balanced books, nothing lost.[/]"
    console.print(f"\n{summary}")
    where = f"The store is in {keep_in}." if keep_in else "The store was removed; run with --data DIR to keep it."
    console.print(f"{took_ms / 1000:.1f} s, seed {escape(seed)}. {escape(where)}", soft_wrap=True)
