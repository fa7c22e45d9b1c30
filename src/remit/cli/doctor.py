"""What is missing on this machine, and what is the cure? Prints what world/fitness.py found; nothing is mended here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from remit.cli.main import examples
from remit.cli.places import LISTEN_PORT, data_directory

if TYPE_CHECKING:
    from remit.world.fitness import Finding

OK, MISSING = 0, 1


@click.command(
    epilog=examples(
        "remit doctor                        before `remit up`, or before an agent is put on a machine",
        "remit doctor --data /srv/remit      look at the disk that it would use",
        "remit doctor -o json                for programs: one object for each finding",
    )
)
@click.option("--data", type=click.Path(path_type=Path), help="Where data would be kept.  [default: as `remit up`]")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=LISTEN_PORT, show_default=True, help="Where the API would listen."
)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def doctor(data: Path | None, port: int, output: str) -> None:
    """Try what Remit needs of this machine, and say what is missing and the cure.

    Looked at are clock, disk, ports, cgroups, sandbox and limits. Exits with 1 if something is missing without which nothing
    runs; what only takes something away is a warning.
    """
    from remit.world.fitness import examined

    found = examined(data or data_directory(), port)
    if output == "json":
        from remit.model.objects import encode

        click.echo(encode([one._asdict() for one in found]).decode())
    else:
        _show(found)
    sys.exit(MISSING if any(one.state == "fail" for one in found) else OK)


def _show(found: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from remit.cli.told import console, until_nobody_reads

    marks = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}
    table = Table.grid(padding=(0, 2))
    for one in found:
        mark, colour = marks[one.state]
        said = Text(one.found)
        if one.cure:
            said.append(f"\n→ {one.cure}", style="cyan")
        table.add_row(Text(mark, style=f"bold {colour}"), Text(one.name, style="bold"), said)
    missing, less = (sum(one.state == state for one in found) for state in ("fail", "warn"))
    with until_nobody_reads():
        out = console()
        out.print(table)
        if missing:
            out.print(Text(f"\nnothing runs here until {missing} of these are mended", style="bold red"))
        elif less:
            out.print(Text(f"\nfit to run, with less than all: {less} to look at", style="bold yellow"))
        else:
            out.print(Text("\nfit to run", style="bold green"))
