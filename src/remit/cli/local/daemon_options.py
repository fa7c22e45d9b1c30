"""Options and signal handling of long-running commands: data directory, listen, TLS, logging.

Options that parts share, signals, and a line for what goes wrong.

Names of places only; little is loaded here.

The options of those who serve; what comes of them is in world/net/server_keys.py.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal  # noqa: TID251 - the program's own end
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

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
"""Complaints that begin with the same so many signs are of one sort."""


_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ListenType(click.ParamType["ListenAddress"]):
    """Where to listen."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ListenAddress:
        from remit.world.net.connections import ListenAddress

        host, colon, port = str(value).rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
            self.fail(f"{quoted(str(value))} is no HOST:PORT; write 127.0.0.1:7420, or port 0 for any that is free", param, ctx)
        return ListenAddress(host.strip("[]") or "127.0.0.1", int(port))


class HeartbeatIntervalType(click.ParamType[int]):
    """A duration, as milliseconds."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from remit.law.timing import HEARTBEAT_MS_MAX, HEARTBEAT_MS_MIN

        if isinstance(value, int):
            return value
        try:
            found = parse_duration(str(value))
        except ValueError as error:
            self.fail(f"{escaped(str(error))}; write one such as {HEARTBEAT_INTERVAL} or 500ms", param, ctx)
        if not HEARTBEAT_MS_MIN <= found <= HEARTBEAT_MS_MAX:
            self.fail(
                f"{escaped(str(value))} is no beat; from {HEARTBEAT_MS_MIN}ms to {HEARTBEAT_MS_MAX // 1000}s are", param, ctx
            )
        return found


def data_option(command: F) -> F:
    """Of `remit up` and `remit down`: the same directory for both."""
    return click.option(
        "--data",
        type=click.Path(path_type=Path, file_okay=False),
        help="Where all is kept.  [default: ~/.local/share/remit]",
    )(command)


def heartbeat_interval_option(command: F) -> F:
    return click.option(
        "--beat",
        "beat_ms",
        type=HeartbeatIntervalType(),
        default=HEARTBEAT_INTERVAL,
        show_default=True,
        help="How often all say that they are there; every silence counts in beats. The same for all parts of a scope.",
    )(command)


def server_connection_options(command: F) -> F:
    """For whoever asks a server: where it is, who signs for it, and as whom."""
    command = click.option(
        "--ca-file",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="REMIT_CA_FILE",
        help="Who signs for an https:// server, if the system does not know.  [env: REMIT_CA_FILE]",
    )(command)
    command = click.option(
        "--token-file",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="REMIT_TOKEN_FILE",
        help="The file with the token.  [env: REMIT_TOKEN_FILE, or the token itself in REMIT_TOKEN]",
    )(command)
    return click.option(
        "--server",
        "servers",
        multiple=True,
        envvar="REMIT_SERVER",
        metavar="URL",
        help="Where a server of the scope answers; say it once for each.  [env: REMIT_SERVER]",
    )(command)


def log_options(command: F) -> F:
    """How a part tells of itself, on stderr."""
    command = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        envvar="REMIT_LOG_LEVEL",
        help="From which level on lines are logged; debug: every request and decision.",
    )(command)
    return click.option(
        "--log-format",
        type=click.Choice(["json", "text"]),
        envvar="REMIT_LOG_FORMAT",
        help="How lines are logged.  [default: text on a terminal, else json]",
    )(command)


def metrics_option(command: F) -> F:
    return click.option(
        "--metrics",
        type=ListenType(),
        help="Where what it counts is told to Prometheus, on this machine only.  [default: nowhere]",
    )(command)


class LoggingOptions(NamedTuple):
    """What was asked for."""

    form: LogFormat | None = None
    level: LogLevel = "info"

    def of(self, part: str, clock: Clock) -> StructuredLog:
        from remit.world.structured_log import StructuredLog

        form: LogFormat = self.form or ("text" if sys.stderr.isatty() else "json")
        return StructuredLog(part, wall=clock.wall, now_ms=clock.now_ms, form=form, level=self.level)

    @property
    def words(self) -> tuple[str, ...]:
        """For another part, that is to tell of itself as this one does."""
        return (*(("--log-format", self.form) if self.form else ()), "--log-level", self.level)


class ErrorReporter:
    """What goes wrong, a line each, and the same not again and again."""

    def __init__(self, log: StructuredLog) -> None:
        self.log = log

    def __call__(self, what: object, **fields: object) -> None:
        words = str(what)
        self.log.rate_limited("warning", words[:RATE_LIMIT_KEY_CHARS], words, **fields)

    def bug(self, asked: str, error: BaseException) -> None:
        """One of ours: whoever asked was told only that there is one."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else ""
        self.log.error(f"{asked}: {type(error).__name__}: {error}", where=where)


def run_until_signalled(main: Callable[[], Coroutine[Any, Any, None]], *, quick: bool = False) -> int:
    """Run it until it ends, or a signal asks it to: then it is cancelled, and has its time to come to an end. `quick`: uvloop.

    After SIGINT this raises KeyboardInterrupt, as everywhere; after SIGTERM it answers 0, since that is how a part is ended.
    """
    factory = None
    if quick:
        import uvloop  # only who serves, or follows all that is served, needs it

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        asked = runner.run(_run_cancellable(main))
    if asked == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


async def _run_cancellable(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    task = asyncio.ensure_future(main())
    loop = asyncio.get_running_loop()
    asked = 0

    def ask(number: int) -> None:
        nonlocal asked
        if not asked:  # a second one must not cut the tidying short
            asked = number
            task.cancel()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, ask, number)
    try:
        await task
    except asyncio.CancelledError:
        if not asked:
            raise
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
    return asked


def resolve_servers(
    servers: tuple[str, ...], token_file: Path | None, ca_file: Path | None = None
) -> tuple[tuple[str, ...], str, Trust]:
    """Which servers are meant, the token for them, and who is believed to be them: by flags, the environment, or the context
    that is in use.
    """
    from remit.cli.session.contexts import resolve_server

    address = resolve_server(server=servers[0] if servers else "", token_file=str(token_file or ""), ca_file=str(ca_file or ""))
    return (address.server, *servers[1:]), address.token, address.trust


LISTEN_PORT: Final = 7420
LISTEN: Final = f"127.0.0.1:{LISTEN_PORT}"
TOKEN_FILE: Final = "token"  # noqa: S105 - the name of the file
SERVER_DIRECTORY: Final = "server"
AGENT_DIRECTORY: Final = "agent"
URL_FILE: Final = "url"
TOKENS_DIRECTORY: Final = "tokens"
AGENT_ARGS_FILE: Final = "agent-asks"


def default_data_directory() -> Path:
    """As the machine's other programs have it."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "remit"


def tls_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds them to a command, which gets them together as `secured`; None: it speaks plain HTTP."""
    file = click.Path(path_type=Path, dir_okay=False, exists=True)

    @click.option("--tls", is_flag=True, help="Speak TLS, with an authority made here; needed beyond this machine.")
    @click.option("--tls-name", "tls_names", multiple=True, metavar="HOST", help="One more name it is known by.")
    @click.option("--tls-cert", type=file, help="A certificate of your own to answer with, instead of one made here.")
    @click.option("--tls-key", type=file, help="The key of --tls-cert.")
    @click.option("--tls-ca", type=file, help="Who has signed that certificate, for clients to believe; else the system's.")
    @functools.wraps(command)
    def taking(
        *,
        tls: bool,
        tls_names: tuple[str, ...],
        tls_cert: Path | None,
        tls_key: Path | None,
        tls_ca: Path | None,
        **others: Any,
    ) -> None:
        command(secured=_tls_options(tls, tls_names, tls_cert, tls_key, tls_ca), **others)

    return taking


def _tls_options(
    tls: bool, names: tuple[str, ...], certificate: Path | None, key: Path | None, ca: Path | None
) -> TlsOptions | None:
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together; name both, or neither")
    if certificate is None and ca is not None:
        raise click.UsageError("--tls-ca belongs to --tls-cert; without that, the authority is made here")
    if certificate is None and names and not tls:
        raise click.UsageError("--tls-name is for a certificate; say --tls as well")
    if certificate is None and not tls:
        return None
    from remit.world.net.server_keys import ProvidedCertificate, TlsOptions

    if certificate is None or key is None:
        return TlsOptions(names)
    return TlsOptions(names, ProvidedCertificate(certificate.absolute(), key.absolute(), ca.absolute() if ca else None))
