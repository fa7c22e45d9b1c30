"""`demo`.

Work runs for real; or a load is placed on simulated nodes, or two race for one GPU.
"""

from __future__ import annotations

import asyncio
import signal  # noqa: TID251 - the program's own end: asked to go, it leaves no process behind
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
    from remit.demo.verify import Account, Finding, Refusals
    from remit.model.kinds import Node, Workload
    from remit.model.objects import AnyObject

T = TypeVar("T")

FILES: Final = ("cluster.yaml", "fraud-batch.yaml")
QUICKSTART: Final = ("web.yaml", "sums.yaml", "train.yaml")
ROUNDS: Final = 100
WIDTH_MAX: Final = 110
INDENT: Final = 27
"""Where the text of a finding begins: behind its mark and its name."""


class Terminated(Exception):
    """SIGTERM came, and everything was tidied up."""


class Stage(NamedTuple):
    """What the manifests declare: everything, and the two that the race is about."""

    things: tuple[AnyObject, ...]
    job: Workload
    nodes: tuple[Node, ...]


@click.group(
    invoke_without_command=True,
    epilog=examples(
        "remit demo                                 work for real: a service, a batch, a machine and the server killed",
        "remit demo --keep                          and leave it running, to be looked at",
        "remit demo place --data /tmp/remit-placed  a load on a thousand simulated nodes; its store is kept",
        "remit demo race --rounds 300 --seed 7      two claimants race for one GPU, and the authority is killed",
    ),
)
@click.option("--keep", is_flag=True, help="Leave everything running at the end, and say how to use it and end it.")
@click.option(
    "--examples", "place", type=click.Path(path_type=Path, file_okay=False), help="Where quickstart/web.yaml and its like are."
)
@click.pass_context
def demo(context: click.Context, keep: bool, place: Path | None) -> None:
    """Run work for real, explain what waits, and kill a machine and then the server, in less than a minute.

    It ends by itself with what was checked, and exits with 0 only if all of it holds. Everything is in a temporary directory.
    """
    if context.invoked_subcommand is None:
        sys.exit(_live(keep, _examples(place, tuple(f"quickstart/{name}" for name in QUICKSTART)) / "quickstart"))


def _live(keep: bool, place: Path) -> int:
    from remit.cli.output.console import console
    from remit.demo.live import play

    told = console()
    try:
        with _told_failures(told):
            return asyncio.run(_until_terminated(play(told, place, keep=keep)))
    except Terminated:
        return 128 + signal.SIGTERM


@demo.command("place", epilog=examples("remit demo place", "remit demo place --data /tmp/remit-placed   keep the store"))
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Keep the store in this empty directory.")
def place_load(data: Path | None) -> None:
    """A mixed load comes to a thousand simulated nodes and is placed, live; one job must wait, and says why.

    The nodes are simulated. The authority, its SQLite store, the scheduler and every claim between them are real.
    """
    from remit.cli.commands.explain import explain
    from remit.cli.output.console import console
    from remit.demo.placement_demo import WAITING, show
    from remit.world.production import production

    told = console()

    async def placed(directory: Path) -> None:
        world = production()
        try:
            await show(told, directory, world)
        finally:
            await world.offload.close()

    with _directory(data) as directory:
        with _told_failures(told):
            asyncio.run(placed(directory))
        told.print(f"\nOne of them waits. $ remit explain workload/{WAITING} --data {data or 'DIR'}\n")
        explain.main([f"workload/{WAITING}", "--data", str(directory)], standalone_mode=False)


@demo.command(
    "race",
    epilog=examples(
        "remit demo race                         in a temporary directory, which is removed",
        "remit demo race --data /tmp/remit-demo  keep the store",
        "remit demo race --rounds 300 --seed 7   a longer race, with these lots",
    ),
)
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Keep the store in this empty directory.")
@click.option("--rounds", type=click.IntRange(2, 500), default=ROUNDS, show_default=True, help="How often they race.")
@click.option("--seed", default=None, help="Draw the same lots again. The machine's own timing stays its own.")
@click.option(
    "--examples", "place", type=click.Path(path_type=Path, file_okay=False), help="Where cluster.yaml and fraud-batch.yaml are."
)
def race(data: Path | None, rounds: int, seed: str | None, place: Path | None) -> None:
    """Two claimants race for one GPU; the authority is killed in the middle, restarted, and gives account.

    Everything is real: the process that is killed with SIGKILL, the SQLite store that it leaves, the sockets, the retries.
    Exits with 0 only if one owner, balanced books and every acknowledged operation were found afterwards.
    """
    from rich.console import Console

    console = Console(highlight=False, emoji=False)
    if console.width > WIDTH_MAX:
        console = Console(highlight=False, emoji=False, width=WIDTH_MAX)
    stage = _stage(_examples(place))
    try:
        with _told_failures(console):
            holds = asyncio.run(_until_terminated(_show_in_turn(console, stage, data, rounds, seed)))
    except Terminated:
        sys.exit(128 + signal.SIGTERM)
    sys.exit(0 if holds else 1)


@contextmanager
def _told_failures(console: Console) -> Iterator[None]:
    """What fails outside is said in a line, and ends the demo."""
    from remit.client.api_caller import ApiError, Unanswered
    from remit.client.authority_client import NoAnswer
    from remit.demo.authority_process import DemoFailed
    from remit.store.protocol import StoreError
    from remit.world.interfaces import WorldError

    known = (DemoFailed, NoAnswer, ApiError, Unanswered, StoreError, WorldError)
    try:
        yield
    except known as error:
        _tell_failure(console, error)
        sys.exit(1)
    except ExceptionGroup as group:
        expected = group.subgroup(known)
        if expected is None:
            raise
        _tell_failure(console, _first(expected))
        sys.exit(1)


def _first(error: BaseException) -> BaseException:
    """What went wrong first in a group of tasks; the rest usually follows from it."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _tell_failure(console: Console, error: BaseException) -> None:
    from rich.text import Text

    console.print(Text.assemble("\n", ("The demo failed:", "bold red"), f" {error}"), soft_wrap=True)


# ------------------------------------------------------------------------------------------------------------- the manifests


def _examples(place: Path | None, wanted: tuple[str, ...] = FILES) -> Path:
    """Manifests are the reader's to look at and change, so they are files of the repository and not inside the package."""
    tried = [place] if place else [Path(__file__).resolve().parents[3] / "examples", Path("examples").resolve()]
    for directory in tried:
        if all((directory / name).is_file() for name in wanted):
            return directory
    # Beside the package is only worth telling in a checkout; elsewhere it would name a directory of the installation.
    raise click.UsageError(
        f"{' and '.join(wanted)} are not in {tried[-1]}; they come with the repository: run this from a "
        "checkout of it, or name their directory with --examples"
    )


def _stage(directory: Path) -> Stage:
    from remit.model.kinds import Node, Workload
    from remit.model.manifests.reader import read

    things: list[AnyObject] = []
    for name in FILES:
        found = read((directory / name).read_bytes(), name)
        if found.problems:
            raise click.UsageError(f"{name} has {len(found.problems)} problems; `remit validate {directory / name}` tells them")
        things += found.objects
    jobs = [thing for thing in things if isinstance(thing, Workload)]
    nodes = tuple(thing for thing in things if isinstance(thing, Node) and thing.spec.devices)
    if len(jobs) != 1 or not nodes:
        raise click.UsageError(
            f"{directory} declares {len(jobs)} workloads and {len(nodes)} nodes with a GPU; one job and a GPU"
        )
    return Stage(tuple(things), jobs[0], nodes)


@contextmanager
def _directory(data: Path | None) -> Iterator[Path]:
    if data is None:
        with tempfile.TemporaryDirectory(prefix="remit-demo-") as made:
            yield Path(made)
        return
    if data.exists() and any(data.iterdir()):
        raise click.UsageError(f"{data} is not empty, and the demo starts from nothing; name another directory, or remove it")
    yield data


# ------------------------------------------------------------------------------------------------------------------ the show


async def _until_terminated(work: Coroutine[Any, Any, T]) -> T:
    """SIGTERM unwinds, as Ctrl-C does: the temporary directories go, and the processes with them."""
    showing = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        if not terminated:  # a second one must not cut the tidying short
            terminated = True
            showing.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await showing
    except asyncio.CancelledError:
        if terminated:
            raise Terminated from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _show_in_turn(console: Console, stage: Stage, kept: Path | None, rounds: int, seed: str | None) -> bool:
    from remit.demo.race import Race
    from remit.demo.verify import examine
    from remit.world.production import production
    from remit.world.randomness import SeededChance

    world = production()
    began_ms = world.clock.now_ms()
    seed = seed or world.ids.incarnation()
    # The socket has a directory of its own: the path of one may have about a hundred characters, and --data may have more.
    with _directory(kept) as data, tempfile.TemporaryDirectory(prefix="remit-demo-") as beside:
        race = Race(data, Path(beside) / "s", world, SeededChance(seed), rounds)
        try:
            await _set_the_stage(console, race, stage, data)
            await _race(console, race)
            asked = await race.ask_all_again()
            await race.stop()
            _line(console, f"All {asked:,} operations were asked once more under their ids; then the process was stopped")
            account = await examine(data, world, race)
        finally:
            await race.end()
            await world.offload.close()
    _print_account(console, account)
    _print_end(console, account, world.clock.now_ms() - began_ms, seed, kept)
    return account.holds


def _head(console: Console, number: int, title: str) -> None:
    console.print(f"\n[bold cyan]{number}[/]  [bold]{title}[/]")


def _line(console: Console, text: str, lead: str = "", indent: int = 3) -> None:
    """`text`, wrapped and hung behind `lead`. Not a table: one would fill every line with blanks, also in a file."""
    from rich.text import Text

    first, rest = Text.from_markup(" " * 3 + lead), Text(" " * indent)
    first.pad_right(indent - first.cell_len)
    for number, line in enumerate(Text.from_markup(text).wrap(console, max(20, console.width - indent))):
        line.rstrip()
        console.print(Text.assemble(rest if number else first, line), soft_wrap=True)


async def _set_the_stage(console: Console, race: Race, stage: Stage, data: Path) -> None:
    from rich.markup import escape

    console.print("[bold]Remit demo: one GPU, two claimants, one kill[/]")
    _head(console, 1, "The stage")
    ready = await race.start()
    _line(console, f"Process {ready.pid} owns a fresh SQLite store in {escape(str(data))} (epoch {ready.epoch})")
    count = await race.declare(stage.things)
    _line(console, f"{count} objects from {' and '.join(FILES)}, each applied and answered")
    names = ", ".join(node.metadata.name for node in stage.nodes)
    _line(console, f"{len(stage.nodes)} nodes are ready: {names}")
    leases = await race.enlist(stage.job, stage.nodes[0])
    job = stage.job.metadata
    _line(console, f"Tenant {job.tenant} has a job, {job.name}; each replica wants a GPU of its own")
    _line(console, f"{' and '.join(leases)} hold a lease each, and half of the replicas")


async def _race(console: Console, race: Race) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from remit.demo.race import CLAIMS_EACH

    prize = race.prize
    _head(console, 2, f"The race for {prize.device} of {prize.node}")
    _line(console, f"Each round both send {CLAIMS_EACH} claims for it at once. One wins, runs, and frees it")
    columns = (
        TextColumn("   {task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
    )
    told = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("rounds", total=race.rounds, told="")

        def on_round(number: int) -> None:
            nonlocal told
            for kill in race.kills[told:]:
                _print_kill(progress.console, kill)
            told = len(race.kills)
            progress.update(task, completed=number, told=_wins(race))

        await race.run(on_round)
    _line(console, f"{race.rounds} rounds: {_wins(race)}")


def _wins(race: Race) -> str:
    return ", ".join(f"{lease} won {count}" for lease, count in sorted(race.wins.items()))


def _print_kill(console: Console, kill: Kill) -> None:
    count = len(kill.open)
    flight = f"{count} claim{'s' * (count > 1)} in flight" if count else "nothing in flight, so once more next round"
    _line(console, f"[bold red]SIGKILL[/] to process {kill.pid} in round {kill.round}, with {flight}")
    after = kill.after
    took = f"took over {kill.down_ms / 1000:.1f} s later from the store alone (epoch {after.epoch})"
    _line(console, f"[bold green]Restarted[/]: process {after.pid} {took}")


# --------------------------------------------------------------------------------------------------------------- the account


def _print_account(console: Console, account: Account) -> None:
    _head(console, 3, "The account, from the store alone")
    for finding in account.findings:
        _print_finding(console, finding)
    _head(console, 4, "The books, added up again from the rows")
    for finding in account.books:
        _print_finding(console, finding)
    _head(console, 5, "Who was refused, and why")
    for one in account.refusals:
        _print_refusals(console, one)


def _print_finding(console: Console, finding: Finding) -> None:
    from rich.markup import escape

    _line(console, escape(finding.told), f"{_mark(console, finding)} {finding.name}", INDENT)
    for why in finding.wrong:
        _line(console, f"[red]{escape(why)}[/]", indent=INDENT)


def _mark(console: Console, finding: Finding) -> str:
    utf = (console.encoding or "").lower().startswith("utf")
    if finding.wrong:
        return "[bold red]✗[/]" if utf else "[bold red]NO[/]"
    return "[bold green]✓[/]" if utf else "[bold green]ok[/]"


def _print_refusals(console: Console, one: Refusals) -> None:
    from rich.markup import escape

    who = ", ".join(f"{name} {times:,} times" for name, times in sorted(one.askers.items()))
    _line(console, f"{one.meaning} ({who})", f"[yellow]{one.code}[/]", INDENT)
    _line(console, escape(one.example), "  for example", INDENT)
    _line(console, one.cure, "  cure", INDENT)


def _print_end(console: Console, account: Account, took_ms: int, seed: str, kept: Path | None) -> None:
    from rich.markup import escape

    every = (*account.findings, *account.books)
    wrong = sum(bool(finding.wrong) for finding in every)
    if wrong:
        told = f"[bold red]{wrong} of {len(every)} do not hold.[/] Please report it, with the store (--data DIR keeps it)."
    else:
        told = "[bold green]One owner, balanced books, nothing lost.[/]"
    console.print(f"\n{told}")
    where = f"The store is in {kept}." if kept else "The store was removed; --data DIR keeps it."
    console.print(f"{took_ms / 1000:.1f} s, seed {escape(seed)}. {escape(where)}", soft_wrap=True)
