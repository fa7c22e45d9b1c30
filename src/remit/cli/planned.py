"""What would an apply change, and would it find a place? Asks the server, which writes nothing, and prints."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from remit.cli.main import examples
from remit.cli.reaching import FAILED, MISUSE, NOT_PLACED, OK, Asked, ask, asks_server
from remit.model.problems import escaped

if TYPE_CHECKING:
    from rich.console import Console

    from remit.model.answers import Difference, PlanAnswer, PlanItem, PlannedPlacement

SIGNS: Final = {"create": ("+", "green"), "replace": ("~", "yellow"), "refused": ("!", "red"), "unchanged": ("=", "dim")}
NODES_SHOWN: Final = 8
VALUE_MAX: Final = 200
DIFFERS: Final = 1

FILES = click.option(
    "-f", "--file", "files", multiple=True, required=True, metavar="FILE", type=click.Path(allow_dash=True),
    help="A manifest, a directory of them, or - for a pipe; may be given again.",
)  # fmt: skip
OUTPUT = click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)


@click.command(
    epilog=examples(
        "remit plan -f risk-api.yaml       what would change, and where its replicas would go",
        "remit plan -f cluster/ -o json    for programs",
    )
)
@FILES
@OUTPUT
@asks_server()
def plan(asked: Asked, files: tuple[str, ...], output: str) -> None:
    """Show what an apply would change, and try where new replicas would be placed. Nothing is written.

    The placement is tried with the scheduler's own rules on a copy of what is there. Exits with 0, with 1 if something would
    be refused, and with 3 if something would not be placed.
    """
    answer = _ask(asked, files)
    placed = all(one.placement is None or one.placement.placed >= one.placement.wanted for one in answer.items)
    if output == "json":
        _print_json(answer)
    else:
        _print(answer, asked, placement=True)
        _print_end(answer, asked, files)
    sys.exit(FAILED if any(one.action == "refused" for one in answer.items) else OK if placed else NOT_PLACED)


@click.command(
    epilog=examples(
        "remit diff -f risk-api.yaml                   how what is there differs from the file",
        "remit diff -f cluster/ || echo it differs     for scripts",
    )
)
@FILES
@OUTPUT
@asks_server()
def diff(asked: Asked, files: tuple[str, ...], output: str) -> None:
    """Show how manifests differ from what is there. Nothing is written.

    Exits as diff(1) does: with 0 if nothing differs, 1 if something does, and 2 if that could not be found out or would be
    refused.
    """
    try:
        answer = _ask(asked, files)
    except click.ClickException as error:
        error.show()
        sys.exit(MISUSE)
    except SystemExit:
        sys.exit(MISUSE)
    if output == "json":
        _print_json(answer)
    else:
        _print(answer, asked, placement=False)
    actions = {one.action for one in answer.items}
    sys.exit(MISUSE if "refused" in actions else DIFFERS if actions - {"unchanged"} else OK)


def _ask(asked: Asked, files: tuple[str, ...]) -> PlanAnswer:
    from remit.cli.reading import declared

    things = declared(files, asked.reach.tenant if asked.tenant_said else "")
    return ask(asked, lambda api: api.plan(things))


def _print_json(answer: PlanAnswer) -> None:
    from remit.cli.told import until_nobody_reads
    from remit.cli.written import json_text

    with until_nobody_reads():
        sys.stdout.write(json_text(answer))


# -- what it looks like --------------------------------------------------------------------------------------------------------


def _print(answer: PlanAnswer, asked: Asked, *, placement: bool) -> None:
    from remit.cli.finding import said_path
    from remit.cli.told import console, until_nobody_reads

    with until_nobody_reads():
        for one in answer.items:
            if placement or one.action != "unchanged":
                show_item(console(), one, said_path(asked, one.kind, one.name, one.tenant), placement=placement)


def show_item(console: Console, one: PlanItem, path: str, *, placement: bool) -> None:
    from rich.text import Text

    sign, style = SIGNS[one.action]
    console.print(Text.assemble((escaped(f"{sign} {path}"), f"bold {style}"), f"  {one.action}"), soft_wrap=True)
    for change in one.diff if one.action != "create" else ():
        show_change(console, change)
    if one.action == "create" and not placement:
        for change in one.diff:
            show_change(console, change)
    if one.problem is not None:
        for text in (
            one.problem.detail,
            *(f"{p.field}: {p.message}; {p.cure}" for p in one.problem.problems),
            one.problem.cure,
        ):
            if text:
                console.print(Text(f"    {escaped(text)}", style="red"), soft_wrap=True)
    if placement and one.placement is not None:
        show_placement(console, one.placement)


def show_change(console: Console, change: Difference) -> None:
    from rich.text import Text

    before, after = change.before, change.after
    path = escaped(change.path)
    if before is msgspec.UNSET:
        console.print(Text(f"    + {path}: {value_words(after)}", style="green"), soft_wrap=True)
    elif after is msgspec.UNSET:
        console.print(Text(f"    - {path}: {value_words(before)}", style="red"), soft_wrap=True)
    else:
        line = Text.assemble((f"    ~ {path}: ", "yellow"), (value_words(before), "red"), " -> ", (value_words(after), "green"))
        console.print(line, soft_wrap=True)


def value_words(value: Any) -> str:
    text = value if isinstance(value, str) and value else msgspec.json.encode(value).decode()
    return escaped(text if len(text) <= VALUE_MAX else text[: VALUE_MAX - 1] + "…")


def show_placement(console: Console, found: PlannedPlacement) -> None:
    from rich.text import Text

    from remit.cli.explain_words import many

    if not found.wanted:
        return
    style = "green" if found.placed >= found.wanted else "yellow"
    nodes = list(found.nodes.items())
    more = f" and {len(nodes) - NODES_SHOWN} more nodes" if len(nodes) > NODES_SHOWN else ""
    where = f": {', '.join(f'{name} {count}' for name, count in nodes[:NODES_SHOWN])}{more}" if nodes else ""
    told = f"    placement: {found.placed:,} of {many(found.wanted, 'new replica')} would be placed"
    console.print(Text.assemble((told, style), escaped(where)), soft_wrap=True)
    waits = found.waits if found.waits is not None else found.stops
    if found.placed < found.wanted and waits is not None:
        _show_waits(console, waits)


def _show_waits(console: Console, waits: Any) -> None:
    """`waits` are as an explanation has them; of the stop of a trial, fewer fields are there."""
    from rich.text import Text

    from remit.cli.explain_words import funnel_line, nearest_words, unblock_words
    from remit.model.objects import dec_hook
    from remit.proposal.explained import Nearest, Passage, Unblock

    verdict = f" ({waits['verdict']})" if waits.get("verdict") else ""
    why = f"{waits.get('meaning', '')}; {waits.get('detail', '')}".strip("; ")
    console.print(
        Text.assemble("    the rest waits: ", (f"{waits.get('reason')}{verdict}", "yellow"), f"  {escaped(why)}"),
        soft_wrap=True,
    )
    if waits.get("passage"):
        passage = msgspec.convert(waits["passage"], Passage, dec_hook=dec_hook)
        console.print(Text(f"      {escaped(funnel_line(passage))}"), soft_wrap=True)
    if waits.get("nearest"):
        nearest = msgspec.convert(waits["nearest"], Nearest, dec_hook=dec_hook)
        console.print(Text(f"      nearest fit: {escaped(nearest_words(nearest))}"), soft_wrap=True)
    for one in waits.get("unblocks") or ():
        unblock = msgspec.convert(one, Unblock, dec_hook=dec_hook)
        console.print(Text(f"      unblocks if {escaped(unblock_words(unblock))}"), soft_wrap=True)


def _print_end(answer: PlanAnswer, asked: Asked, files: tuple[str, ...]) -> None:
    counts = {word: sum(one.action == word for one in answer.items) for word in SIGNS}
    told = {"create": "to create", "replace": "to replace", "unchanged": "unchanged", "refused": "refused"}
    click.echo(", ".join(f"{counts[word]} {said}" for word, said in told.items() if counts[word]) or "nothing to do")
    if counts["refused"] or not (counts["create"] or counts["replace"]):
        return
    words = ["remit", "apply", *(word for name in files for word in ("-f", name)), "--if-unchanged", str(answer.revision)]
    params = click.get_current_context().params
    words += [
        word
        for name in ("context", "server", "token_file", "tenant")
        if params.get(name)
        for word in (f"--{name.replace('_', '-')}", params[name])
    ]
    click.echo(f"to apply exactly this: {escaped(shlex.join(words))}")
