"""Runs a scope's controllers as a process of its own; several take turns by lease. What they do is in correction/."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from remit.cli.main import examples
from remit.cli.running import Complaints, asking_options, beat_option, run_until_ended


@click.command(
    epilog=examples(
        "remit controllers --server http://127.0.0.1:7420 --token-file data/token",
        "remit controllers --name spare           a second copy: it takes over, one controller at a time",
    )
)
@asking_options
@beat_option
@click.option("--name", default="", help="What it is called in records.  [default: controllers and the process number]")
def controllers(servers: tuple[str, ...], token_file: Path | None, beat_ms: int, name: str) -> None:
    """Make what is there what was asked for, until ended: workloads, nodes, repair, endpoints, rollouts.

    Of several copies one acts in each role, and the others are ready to take over.
    """
    from remit.cli.running import server_and_token

    urls, token = server_and_token(servers, token_file)

    async def main() -> None:
        from remit.assembly import component_world, part_name, run_controllers

        async with component_world(urls, token) as connected:
            complain = Complaints("controllers", connected.world.clock.now_ms)
            await run_controllers(connected, name=name or part_name("controllers"), beat_ms=beat_ms, failed=complain)

    sys.exit(run_until_ended(main))
