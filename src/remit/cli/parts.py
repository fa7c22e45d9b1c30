"""Runs a scope's scheduler, or its controllers, as processes of their own; several take turns. What they do is elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click

from remit.cli.main import examples
from remit.cli.running import Complaints, asking_options, beat_option, run_until_ended, server_and_token

name_option = click.option("--name", default="", help="What it is called in records.  [default: its sort and process number]")


@click.command(
    epilog=examples(
        "remit scheduler --server http://127.0.0.1:7420 --token-file data/token",
        "remit scheduler --name spare             a second one: it takes over when the first falls silent",
    )
)
@asking_options
@beat_option
@name_option
def scheduler(servers: tuple[str, ...], token_file: Path | None, beat_ms: int, name: str) -> None:
    """Place waiting work on nodes, until ended.

    Of several schedulers of a scope one acts, and the others are ready to take over.
    """
    from remit.assembly import run_scheduler

    _run("scheduler", run_scheduler, servers, token_file, beat_ms, name)


@click.command(
    epilog=examples(
        "remit controllers --server http://127.0.0.1:7420 --token-file data/token",
        "remit controllers --name spare           a second copy: it takes over, one controller at a time",
    )
)
@asking_options
@beat_option
@name_option
def controllers(servers: tuple[str, ...], token_file: Path | None, beat_ms: int, name: str) -> None:
    """Make what is there what was asked for, until ended: workloads, nodes, repair, endpoints, rollouts.

    Of several copies one acts in each role, and the others are ready to take over.
    """
    from remit.assembly import run_controllers

    _run("controllers", run_controllers, servers, token_file, beat_ms, name)


def _run(
    sort: str,
    part: Callable[..., Awaitable[Any]],
    servers: tuple[str, ...],
    token_file: Path | None,
    beat_ms: int,
    name: str,
) -> None:
    urls, token = server_and_token(servers, token_file)

    async def main() -> None:
        from remit.assembly import component_world, part_name

        async with component_world(urls, token) as connected:
            complain = Complaints(sort, connected.world.clock.now_ms)
            await part(connected, name=name or part_name(sort), beat_ms=beat_ms, failed=complain)

    sys.exit(run_until_ended(main))
