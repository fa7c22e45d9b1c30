"""Commands `server`, `scheduler` and `controllers`: run the components of a scope as separate processes.

This module prepares data directory, token and address; assembly.py wires the components.
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

TOKEN_FILE_NAME: Final = "token"  # noqa: S105 - a file name


@click.command(
    epilog=examples(
        "remit server --data ./data                          listen on 127.0.0.1:7420; the admin token is in ./data/token",
        "remit server --data ./data --listen 127.0.0.1:0     listen on any free port",
        "remit server --data ./data --listen 10.0.0.5:7420 --tls --tls-name remit.example    reachable from other machines",
    )
)
@click.option(
    "--data", required=True, type=click.Path(path_type=Path, file_okay=False), help="Data directory; created if missing."
)
@click.option(
    "--listen",
    type=ListenType(),
    default="127.0.0.1:7420",
    show_default=True,
    help="Listen address of the API. Addresses beyond this machine require --tls.",
)
@click.option("--scope", default="local", show_default=True, help="Name of the scope.")
@click.option("--name", default="server", show_default=True, help="Name of this server; unique in its scope.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the first admin token; created if missing.  [default: DATA/token]",
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
    """Run a server: the authority of a scope, its SQLite store and its HTTP API.

    On SIGTERM or Ctrl-C it answers all accepted requests, then exits.
    """
    token_path = token_file or data / TOKEN_FILE_NAME
    try:
        logging = LoggingOptions(log_format, log_level)
        run_until_signalled(
            lambda: serve(data, listen, scope, name, token_path, Timing(beat_ms), logging, secured), use_uvloop=True
        )
    except (StoreError, WorldError) as error:
        raise click.ClickException(escaped(str(error))) from error


async def serve(
    data: Path,
    listen: ListenAddress,
    scope: str,
    name: str,
    token_file: Path,
    timing: Timing,
    logging: LoggingOptions = LoggingOptions(),
    tls: TlsOptions | None = None,
) -> None:
    world = production()
    report = ErrorReporter(logging.of("server", world.clock))
    try:
        token, new = read_or_create_token(token_file, world.ids)
        async with api_server(
            data,
            world,
            scope=scope,
            name=name,
            listen=listen,
            token=token,
            timing=timing,
            report_bug=report.bug,
            log=report.log,
            tls_options=tls,
            report=report,
        ) as api:
            ca_note = f", CA certificate in {escaped(str(api.ca_file))}" if api.ca_file else ""
            click.echo(f"remit server: {scope} at {api.url}, token in {escaped(str(token_file))}{ca_note}")
            if new:
                print_admin_token(token)
            await asyncio.Event().wait()
    finally:
        await world.offload.close()


def print_admin_token(token: str) -> None:
    """Print the first admin token. It is shown only when it is created."""
    click.echo(f"remit: first admin token, not shown again: {token}\n  create others with `remit token create`")


name_option = click.option("--name", default="", help="Name in leases and records.  [default: role and process id]")


@click.command(
    epilog=examples(
        "remit token create --role scheduler > scheduler.token",
        "remit scheduler --server http://127.0.0.1:7420 --token-file scheduler.token",
        "remit scheduler --name spare             a standby: it takes over when the first stops renewing its lease",
    )
)
@server_connection_options
@heartbeat_interval_option
@name_option
@metrics_option
@log_options
def scheduler(servers: tuple[str, ...], token_file: Path | None, **options: Any) -> None:
    """Run a scheduler, which places pending replicas on nodes.

    Several schedulers of a scope elect a leader by lease; the others are standbys.
    """
    from remit.assembly import run_scheduler

    _run_component("scheduler", run_scheduler, servers, token_file, **options)


@click.command(
    epilog=examples(
        "remit token create --role controllers > controllers.token",
        "remit controllers --server http://127.0.0.1:7420 --token-file controllers.token",
        "remit controllers --name spare           a standby: it takes over leases, one controller at a time",
    )
)
@server_connection_options
@heartbeat_interval_option
@name_option
@metrics_option
@log_options
def controllers(servers: tuple[str, ...], token_file: Path | None, **options: Any) -> None:
    """Run the controllers of a scope: workloads, nodes, repair, endpoints, rollouts.

    Several copies elect a leader by lease for each controller; the others are standbys.
    """
    from remit.assembly import run_controllers

    _run_component("controllers", run_controllers, servers, token_file, **options)


def _run_component(
    role: str,
    run_role: Callable[..., Awaitable[Any]],
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

        report = ErrorReporter(LoggingOptions(log_format, log_level).of(role, BootClock()))
        async with component_world(urls, token, trust, report) as connected:
            run = partial(run_role, connected, name=name or component_name(role), heartbeat_ms=beat_ms, on_failure=report)
            if metrics is None:
                await run()
                return
            # Imported only with --metrics, to save memory.
            from remit.serve.metrics.collectors import log_metrics
            from remit.serve.metrics.exposition import MetricsRegistry, serve_metrics

            registry = MetricsRegistry(log_metrics(report.log))
            async with serve_metrics(registry, metrics) as address:
                click.echo(f"remit {role}: metrics at {address}")
                await run(metrics=registry)

    try:
        sys.exit(run_until_signalled(main, use_uvloop=True))
    except WorldError as error:
        raise click.ClickException(escaped(str(error))) from error
