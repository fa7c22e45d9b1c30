"""`server`, `scheduler`, `controllers`.

Its data, its token and its address are made ready here; what it does is put together in assembly.py.

Runs a scope's scheduler, or its controllers, as processes of their own; several take turns. What they do is elsewhere.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from remit.assembly import api_server
from remit.cli.local.daemon_options import (
    ErrorReporter,
    ListenType,
    LoggingOptions,
    heartbeat_interval_option,
    log_options,
    metrics_option,
    resolve_servers,
    run_until_signalled,
    server_connection_options,
    tls_options,
)
from remit.cli.main import examples
from remit.cli.session.token_files import read_or_create_token
from remit.law.timing import Timing
from remit.model.problems import escaped
from remit.store.protocol import StoreError
from remit.world.clock import BootClock
from remit.world.interfaces import WorldError
from remit.world.net.connections import ListenAddress
from remit.world.production import production
from remit.world.structured_log import LogFormat, LogLevel

if TYPE_CHECKING:
    from remit.world.net.connections import ListenAddress
    from remit.world.net.server_keys import TlsOptions
    from remit.world.structured_log import LogFormat, LogLevel

TOKEN_FILE_NAME: Final = "token"  # noqa: S105 - of a file


@click.command(
    epilog=examples(
        "remit server --data ./data                          at 127.0.0.1:7420, with a token in ./data/token",
        "remit server --data ./data --listen 127.0.0.1:0     at any port that is free",
        "remit server --data ./data --listen 10.0.0.5:7420 --tls --tls-name remit.example    for other machines too",
    )
)
@click.option(
    "--data", required=True, type=click.Path(path_type=Path, file_okay=False), help="Directory of the store; made if absent."
)
@click.option(
    "--listen",
    type=ListenType(),
    default="127.0.0.1:7420",
    show_default=True,
    help="Where the API answers; beyond this machine with --tls only.",
)
@click.option("--scope", default="local", show_default=True, help="The name of what this server is the authority of.")
@click.option("--name", default="server", show_default=True, help="The name of this server among those of its scope.")
@click.option(
    "--token-file", type=click.Path(path_type=Path, dir_okay=False), help="Who may ask; made if absent.  [default: DATA/token]"
)
@heartbeat_interval_option
@tls_options
@log_options
def server(
    data: Path,
    listen: ListenAddress,
    scope: str,
    name: str,
    token_file: Path | None,
    beat_ms: int,
    secured: TlsOptions | None,
    log_format: LogFormat | None,
    log_level: LogLevel,
) -> None:
    """Run a server: the authority of a scope, on a SQLite store, with its HTTP API.

    It ends at SIGTERM or Ctrl-C, once everything that it has taken is answered.
    """
    place = token_file or data / TOKEN_FILE_NAME
    try:
        logging = LoggingOptions(log_format, log_level)
        run_until_signalled(lambda: serve(data, listen, scope, name, place, Timing(beat_ms), logging, secured), quick=True)
    except (StoreError, WorldError) as error:
        raise click.ClickException(escaped(str(error))) from error


async def serve(
    data: Path,
    listen: ListenAddress,
    scope: str,
    name: str,
    token_file: Path,
    tempo: Timing,
    logging: LoggingOptions = LoggingOptions(),
    secured: TlsOptions | None = None,
) -> None:
    world = production()
    say = ErrorReporter(logging.of("server", world.clock))
    try:
        token, new = read_or_create_token(token_file, world.ids)
        async with api_server(
            data,
            world,
            scope=scope,
            name=name,
            listen=listen,
            token=token,
            timing=tempo,
            report_bug=say.bug,
            log=say.log,
            tls_options=secured,
            report=say,
        ) as one:
            believed = f", its authority in {escaped(str(one.ca_file))}" if one.ca_file else ""
            click.echo(f"remit server: {scope} at {one.url}, token in {escaped(str(token_file))}{believed}")
            if new:
                print_admin_token(token)
            await asyncio.Event().wait()
    finally:
        await world.offload.close()


def print_admin_token(token: str) -> None:
    """Once: the first token is how all the others are made."""
    click.echo(f"remit: the first admin's token, shown this once: {token}\n  make others with `remit token create`")


name_option = click.option("--name", default="", help="What it is called in records.  [default: its sort and process number]")


@click.command(
    epilog=examples(
        "remit token create --role scheduler > scheduler.token",
        "remit scheduler --server http://127.0.0.1:7420 --token-file scheduler.token",
        "remit scheduler --name spare             a second one: it takes over when the first falls silent",
    )
)
@server_connection_options
@heartbeat_interval_option
@name_option
@metrics_option
@log_options
def scheduler(servers: tuple[str, ...], token_file: Path | None, **how: Any) -> None:
    """Place waiting work on nodes, until ended.

    Of several schedulers of a scope one acts, and the others are ready to take over.
    """
    from remit.assembly import run_scheduler

    _run_component("scheduler", run_scheduler, servers, token_file, **how)


@click.command(
    epilog=examples(
        "remit token create --role controllers > controllers.token",
        "remit controllers --server http://127.0.0.1:7420 --token-file controllers.token",
        "remit controllers --name spare           a second copy: it takes over, one controller at a time",
    )
)
@server_connection_options
@heartbeat_interval_option
@name_option
@metrics_option
@log_options
def controllers(servers: tuple[str, ...], token_file: Path | None, **how: Any) -> None:
    """Make what is there what was asked for, until ended: workloads, nodes, repair, endpoints, rollouts.

    Of several copies one acts in each role, and the others are ready to take over.
    """
    from remit.assembly import run_controllers

    _run_component("controllers", run_controllers, servers, token_file, **how)


def _run_component(
    sort: str,
    part: Callable[..., Awaitable[Any]],
    servers: tuple[str, ...],
    token_file: Path | None,
    *,
    ca_file: Path | None,
    beat_ms: int,
    name: str,
    metrics: ListenAddress | None,
    log_format: LogFormat | None,
    log_level: LogLevel,
) -> None:
    urls, token, trust = resolve_servers(servers, token_file, ca_file)

    async def main() -> None:
        from remit.assembly import component_name, component_world

        complain = ErrorReporter(LoggingOptions(log_format, log_level).of(sort, BootClock()))
        async with component_world(urls, token, trust, complain) as connected:
            run = partial(part, connected, name=name or component_name(sort), heartbeat_ms=beat_ms, on_failure=complain)
            if metrics is None:
                await run()
                return
            # Only who tells what it counts pays for loading what tells it.
            from remit.serve.metrics.collectors import log_metrics
            from remit.serve.metrics.exposition import MetricsRegistry, serve_metrics

            counted = MetricsRegistry(log_metrics(complain.log))
            async with serve_metrics(counted, metrics) as where:
                click.echo(f"remit {sort}: what it counts is at {where}")
                await run(metrics=counted)

    try:
        sys.exit(run_until_signalled(main, quick=True))
    except WorldError as error:
        raise click.ClickException(escaped(str(error))) from error
