"""Options and signal handling of long-running commands: data directory, server connection, listen address, TLS, logging.

It imports little, because light commands import it too. Certificates are created in world/net/server_keys.py.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import signal  # noqa: TID251 - handles signals to this program itself
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import click

from remit.model.problems import escaped, quoted
from remit.model.resources import parse_duration

if TYPE_CHECKING:
    from remit.world.interfaces import Clock
    from remit.world.net.connections import ListenAddress
    from remit.world.net.server_keys import TlsOptions
    from remit.world.net.tls import Trust
    from remit.world.structured_log import LogFormat, LogLevel, StructuredLog

F = TypeVar("F", bound=Callable[..., Any])

HEARTBEAT_INTERVAL: Final = "2s"
RATE_LIMIT_KEY_CHARS: Final = 40
"""Messages that share a prefix of this length share one rate limit."""


_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ListenType(click.ParamType["ListenAddress"]):
    """A listen address, HOST:PORT."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ListenAddress:
        from remit.world.net.connections import ListenAddress

        host, colon, port = str(value).rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
            self.fail(f"{quoted(str(value))} is not HOST:PORT; write 127.0.0.1:7420, or port 0 for any free port", param, ctx)
        return ListenAddress(host.strip("[]") or "127.0.0.1", int(port))


class HeartbeatIntervalType(click.ParamType[int]):
    """A heartbeat interval, converted to milliseconds."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from remit.law.timing import HEARTBEAT_MS_MAX, HEARTBEAT_MS_MIN

        if isinstance(value, int):
            return value
        try:
            interval_ms = parse_duration(str(value))
        except ValueError as error:
            self.fail(f"{escaped(str(error))}; use a duration such as {HEARTBEAT_INTERVAL} or 500ms", param, ctx)
        if not HEARTBEAT_MS_MIN <= interval_ms <= HEARTBEAT_MS_MAX:
            self.fail(
                f"{escaped(str(value))} is out of range; use {HEARTBEAT_MS_MIN}ms to {HEARTBEAT_MS_MAX // 1000}s", param, ctx
            )
        return interval_ms


def data_option(command: F) -> F:
    """Add the option --data of `remit up` and `remit down`."""
    return click.option(
        "--data",
        type=click.Path(path_type=Path, file_okay=False),
        help="Data directory.  [default: ~/.local/share/remit]",
    )(command)


class RenamedOption(click.Option):
    """An option whose former names are accepted, but not shown in the help text."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        names, self.opts = self.opts, self.opts[:1]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names


def option_group(parameter: str, build: Callable[..., object], *options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that adds these options to a command. The command receives them as one value: the argument `parameter`
    is the result of `build`, which is called with the option values that its parameters name.
    """
    names = tuple(inspect.signature(build).parameters)

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def wrapped(*args: Any, **values: Any) -> Any:
            group = build(**{name: values.pop(name) for name in names})
            return command(*args, **{parameter: group}, **values)

        decorated: Any = wrapped
        for option in reversed(options):
            decorated = option(decorated)
        return cast(F, decorated)

    return decorate


def heartbeat_interval_option(command: F) -> F:
    return click.option(
        "--heartbeat-interval",
        "--beat",
        "heartbeat_ms",
        cls=RenamedOption,
        type=HeartbeatIntervalType(),
        default=HEARTBEAT_INTERVAL,
        show_default=True,
        help="Heartbeat interval. Failure detection times are multiples of it. Must be the same for all components of a scope.",
    )(command)


class ServerConnection(NamedTuple):
    """Server URLs, token file and CA certificate of a component, as given on the command line."""

    servers: tuple[str, ...]
    token_file: Path | None
    ca_file: Path | None

    def resolve(self) -> tuple[tuple[str, ...], str, Trust]:
        """Return server URLs, token and trusted CA from flags, the environment or the current context."""
        from remit.cli.session.contexts import resolve_server

        first = self.servers[0] if self.servers else ""
        address = resolve_server(server=first, token_file=str(self.token_file or ""), ca_file=str(self.ca_file or ""))
        return (address.server, *self.servers[1:]), address.token, address.trust


server_connection_options = option_group(
    "connection",
    ServerConnection,
    click.option(
        "--server",
        "servers",
        multiple=True,
        envvar="REMIT_SERVER",
        metavar="URL",
        help="URL of a server of the scope. Repeat it for each server.  [env: REMIT_SERVER]",
    ),
    click.option(
        "--token-file",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="REMIT_TOKEN_FILE",
        help="File with the access token.  [env: REMIT_TOKEN_FILE, or the token itself in REMIT_TOKEN]",
    ),
    click.option(
        "--ca-file",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="REMIT_CA_FILE",
        help="CA certificate for https. Default: CA certificates of the system.  [env: REMIT_CA_FILE]",
    ),
)
"""Options of components that connect to a server; the command receives a `ServerConnection` as `connection`."""


def metrics_option(command: F) -> F:
    return click.option(
        "--metrics",
        type=ListenType(),
        help="Serve Prometheus metrics at this address, on this machine only.  [default: off]",
    )(command)


class LoggingOptions(NamedTuple):
    """Log format and level of a process."""

    form: LogFormat | None = None
    level: LogLevel = "info"

    def of(self, component: str, clock: Clock) -> StructuredLog:
        from remit.world.structured_log import StructuredLog

        form: LogFormat = self.form or ("text" if sys.stderr.isatty() else "json")
        return StructuredLog(component, wall=clock.wall, now_ms=clock.now_ms, form=form, level=self.level)

    @property
    def args(self) -> tuple[str, ...]:
        """The command-line arguments that give another component the same logging."""
        return (*(("--log-format", self.form) if self.form else ()), "--log-level", self.level)


def _logging(log_format: LogFormat | None, log_level: LogLevel) -> LoggingOptions:
    return LoggingOptions(log_format, log_level)


log_options = option_group(
    "logging",
    _logging,
    click.option(
        "--log-format",
        type=click.Choice(["json", "text"]),
        envvar="REMIT_LOG_FORMAT",
        help="Format of log lines.  [default: text on a terminal, else json]",
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        envvar="REMIT_LOG_LEVEL",
        help="Minimum level of log lines. debug logs every request and decision.",
    ),
)
"""Options for log format and level; the command receives `LoggingOptions` as `logging`. Logs go to stderr."""


class ErrorReporter:
    """Logs failures as warnings, rate-limited by their message."""

    def __init__(self, log: StructuredLog) -> None:
        self.log = log

    def __call__(self, message: object, **fields: object) -> None:
        text = str(message)
        self.log.rate_limited("warning", text[:RATE_LIMIT_KEY_CHARS], text, **fields)

    def bug(self, operation: str, error: BaseException) -> None:
        """Log an exception that is a bug, with its source line. The caller of the API gets only a generic error."""
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        where = f"{Path(traceback.tb_frame.f_code.co_filename).name}:{traceback.tb_lineno}" if traceback is not None else ""
        self.log.error(f"{operation}: {type(error).__name__}: {error}", where=where)


def run_until_signalled(main: Callable[[], Coroutine[Any, Any, None]], *, use_uvloop: bool = False) -> int:
    """Run `main` until it returns or a stop signal cancels it. Cancellation lets it clean up.

    Raises KeyboardInterrupt after SIGINT, as every command does. Returns 0 after SIGTERM, the regular way to stop a component.
    """
    factory = None
    if use_uvloop:
        import uvloop  # imported late: only processes with many connections use it

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        stop_signal = runner.run(_run_cancellable(main))
    if stop_signal == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


async def _run_cancellable(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    task = asyncio.ensure_future(main())
    loop = asyncio.get_running_loop()
    stop_signal = 0

    def stop(number: int) -> None:
        nonlocal stop_signal
        if not stop_signal:  # a second signal must not interrupt the cleanup
            stop_signal = number
            task.cancel()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not stop_signal:
            raise
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
    return stop_signal


LISTEN_PORT: Final = 7420
LISTEN: Final = f"127.0.0.1:{LISTEN_PORT}"
TOKEN_FILE: Final = "token"  # noqa: S105 - the name of the file
SERVER_DIRECTORY: Final = "server"
AGENT_DIRECTORY: Final = "agent"
URL_FILE: Final = "url"
TOKENS_DIRECTORY: Final = "tokens"
AGENT_ARGS_FILE: Final = "agent-asks"


def default_data_directory() -> Path:
    """Return the data directory below XDG_DATA_HOME or ~/.local/share."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "remit"


_EXISTING_FILE: Final = click.Path(path_type=Path, dir_okay=False, exists=True)


def _tls_options(
    tls: bool, tls_names: tuple[str, ...], tls_cert: Path | None, tls_key: Path | None, tls_ca: Path | None
) -> TlsOptions | None:
    names, certificate, key, ca = tls_names, tls_cert, tls_key, tls_ca
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key must be given together")
    if certificate is None and ca is not None:
        raise click.UsageError("--tls-ca requires --tls-cert; without it a CA is generated")
    if certificate is None and names and not tls:
        raise click.UsageError("--tls-name requires --tls")
    if certificate is None and not tls:
        return None
    from remit.world.net.server_keys import ProvidedCertificate, TlsOptions

    if certificate is None or key is None:
        return TlsOptions(names)
    return TlsOptions(names, ProvidedCertificate(certificate.absolute(), key.absolute(), ca.absolute() if ca else None))


tls_options = option_group(
    "secured",
    _tls_options,
    click.option("--tls", is_flag=True, help="Serve TLS with a generated CA. Required for listening beyond this machine."),
    click.option(
        "--tls-name", "tls_names", multiple=True, metavar="HOST", help="Additional host name in the certificate. Repeatable."
    ),
    click.option("--tls-cert", type=_EXISTING_FILE, help="Use this server certificate instead of a generated one."),
    click.option("--tls-key", type=_EXISTING_FILE, help="Private key of --tls-cert."),
    click.option(
        "--tls-ca",
        type=_EXISTING_FILE,
        help="CA certificate of --tls-cert for clients. Default: CA certificates of the system.",
    ),
)
"""TLS options of a server; the command receives `TlsOptions` as `secured`. None means plain HTTP."""
