"""How does a part of Remit run until somebody ends it? Options that parts share, signals, and a line for what goes wrong."""

from __future__ import annotations

import asyncio
import signal  # noqa: TID251 - the program's own end
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from remit.model.problems import escaped, shown
from remit.model.quantity import parse_duration

if TYPE_CHECKING:
    from remit.world.binding import Listen

F = TypeVar("F", bound=Callable[..., Any])

BEAT: Final = "2s"
QUIET_MS: Final = 10_000
"""The same complaint is not written again for so long."""


_ENDS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ListenType(click.ParamType["Listen"]):
    """Where to listen."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Listen:
        from remit.world.binding import Listen

        host, colon, port = str(value).rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
            self.fail(f"{shown(str(value))} is no HOST:PORT; write 127.0.0.1:7420, or port 0 for any that is free", param, ctx)
        return Listen(host.strip("[]") or "127.0.0.1", int(port))


class BeatType(click.ParamType[int]):
    """A duration, as milliseconds."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from remit.law.tempo import BEAT_MS_MAX, BEAT_MS_MIN

        if isinstance(value, int):
            return value
        try:
            found = parse_duration(str(value))
        except ValueError as error:
            self.fail(f"{escaped(str(error))}; write one such as {BEAT} or 500ms", param, ctx)
        if not BEAT_MS_MIN <= found <= BEAT_MS_MAX:
            self.fail(f"{escaped(str(value))} is no beat; from {BEAT_MS_MIN}ms to {BEAT_MS_MAX // 1000}s are", param, ctx)
        return found


def data_option(command: F) -> F:
    """Of `remit up` and `remit down`: the same directory for both."""
    return click.option(
        "--data",
        type=click.Path(path_type=Path, file_okay=False),
        help="Where all is kept.  [default: ~/.local/share/remit]",
    )(command)


def beat_option(command: F) -> F:
    return click.option(
        "--beat",
        "beat_ms",
        type=BeatType(),
        default=BEAT,
        show_default=True,
        help="How often all say that they are there; every silence counts in beats. The same for all parts of a scope.",
    )(command)


def asking_options(command: F) -> F:
    """For whoever asks a server: where it is, and as whom."""
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


class Complaints:
    """What goes wrong, a line each on stderr, and the same not again and again."""

    def __init__(self, name: str, now_ms: Callable[[], int]) -> None:
        self._name, self._now_ms = name, now_ms
        self._said: dict[str, int] = {}

    def __call__(self, what: object) -> None:
        words, now_ms = str(what), self._now_ms()
        kind = words[:40]
        if now_ms - self._said.get(kind, -QUIET_MS) >= QUIET_MS:
            self._said[kind] = now_ms
            click.echo(f"{self._name}: {escaped(words)}", err=True)


def run_until_ended(main: Callable[[], Coroutine[Any, Any, None]], *, quick: bool = False) -> int:
    """Run it until it ends, or a signal asks it to: then it is cancelled, and has its time to come to an end. `quick`: uvloop.

    After SIGINT this raises KeyboardInterrupt, as everywhere; after SIGTERM it answers 0, since that is how a part is ended.
    """
    factory = None
    if quick:
        import uvloop  # only who serves needs it

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        asked = runner.run(_cancelled_by_signals(main))
    if asked == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


async def _cancelled_by_signals(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    task = asyncio.ensure_future(main())
    loop = asyncio.get_running_loop()
    asked = 0

    def ask(number: int) -> None:
        nonlocal asked
        if not asked:  # a second one must not cut the tidying short
            asked = number
            task.cancel()

    for number in _ENDS:
        loop.add_signal_handler(number, ask, number)
    try:
        await task
    except asyncio.CancelledError:
        if not asked:
            raise
    finally:
        for number in _ENDS:
            loop.remove_signal_handler(number)
    return asked


def server_and_token(servers: tuple[str, ...], token_file: Path | None) -> tuple[tuple[str, ...], str]:
    """Which servers are meant, and the token for them: by flags, the environment, or the context that is in use."""
    from remit.cli.contexts import resolve

    reach = resolve(server=servers[0] if servers else "", token_file=str(token_file or ""))
    return (reach.server, *servers[1:]), reach.token
