"""Runs a scope's scheduler, or its controllers, as processes of their own; several take turns. What they do is elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remit.cli.main import examples
from remit.cli.running import (
    Complaints,
    Logging,
    asking_options,
    beat_option,
    log_options,
    metrics_option,
    run_until_ended,
    server_and_token,
)
from remit.model.problems import escaped
from remit.world.clock import BootClock
from remit.world.promises import WorldError

if TYPE_CHECKING:
    from remit.world.binding import Listen
    from remit.world.chronicle import Form, Level

name_option = click.option("--name", default="", help="What it is called in records.  [default: its sort and process number]")


@click.command(
    epilog=examples(
        "remit token create --role scheduler > scheduler.token",
        "remit scheduler --server http://127.0.0.1:7420 --token-file scheduler.token",
        "remit scheduler --name spare             a second one: it takes over when the first falls silent",
    )
)
@asking_options
@beat_option
@name_option
@metrics_option
@log_options
def scheduler(servers: tuple[str, ...], token_file: Path | None, **how: Any) -> None:
    """Place waiting work on nodes, until ended.

    Of several schedulers of a scope one acts, and the others are ready to take over.
    """
    from remit.assembly import run_scheduler

    _run("scheduler", run_scheduler, servers, token_file, **how)


@click.command(
    epilog=examples(
        "remit token create --role controllers > controllers.token",
        "remit controllers --server http://127.0.0.1:7420 --token-file controllers.token",
        "remit controllers --name spare           a second copy: it takes over, one controller at a time",
    )
)
@asking_options
@beat_option
@name_option
@metrics_option
@log_options
def controllers(servers: tuple[str, ...], token_file: Path | None, **how: Any) -> None:
    """Make what is there what was asked for, until ended: workloads, nodes, repair, endpoints, rollouts.

    Of several copies one acts in each role, and the others are ready to take over.
    """
    from remit.assembly import run_controllers

    _run("controllers", run_controllers, servers, token_file, **how)


def _run(
    sort: str,
    part: Callable[..., Awaitable[Any]],
    servers: tuple[str, ...],
    token_file: Path | None,
    *,
    ca_file: Path | None,
    beat_ms: int,
    name: str,
    metrics: Listen | None,
    log_format: Form | None,
    log_level: Level,
) -> None:
    urls, token, trust = server_and_token(servers, token_file, ca_file)

    async def main() -> None:
        from remit.assembly import component_world, part_name

        complain = Complaints(Logging(log_format, log_level).of(sort, BootClock()))
        async with component_world(urls, token, trust, complain) as connected:
            run = partial(part, connected, name=name or part_name(sort), beat_ms=beat_ms, failed=complain)
            if metrics is None:
                await run()
                return
            # Only who tells what it counts pays for loading what tells it.
            from remit.serve.exposing import exposed
            from remit.serve.measuring import of_log
            from remit.serve.metrics import Metrics

            counted = Metrics(of_log(complain.log))
            async with exposed(counted, metrics) as where:
                click.echo(f"remit {sort}: what it counts is at {where}")
                await run(metrics=counted)

    try:
        sys.exit(run_until_ended(main, quick=True))
    except WorldError as error:
        raise click.ClickException(escaped(str(error))) from error
