"""Runs a scope's scheduler as a process of its own; several take turns by lease. What it does is in proposal/."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from remit.cli.main import examples
from remit.cli.running import Complaints, asking_options, beat_option, run_until_ended


@click.command(
    epilog=examples(
        "remit scheduler --server http://127.0.0.1:7420 --token-file data/token",
        "remit scheduler --name spare             a second one: it takes over when the first falls silent",
    )
)
@asking_options
@beat_option
@click.option("--name", default="", help="What it is called in records.  [default: scheduler and the process number]")
def scheduler(servers: tuple[str, ...], token_file: Path | None, beat_ms: int, name: str) -> None:
    """Place waiting work on nodes, until ended.

    Of several schedulers of a scope one acts, and the others are ready to take over.
    """
    from remit.cli.running import server_and_token

    urls, token = server_and_token(servers, token_file)

    async def main() -> None:
        from remit.assembly import component_world, part_name, run_scheduler

        async with component_world(urls, token) as connected:
            complain = Complaints("scheduler", connected.world.clock.now_ms)
            await run_scheduler(connected, name=name or part_name("scheduler"), beat_ms=beat_ms, failed=complain)

    sys.exit(run_until_ended(main))
