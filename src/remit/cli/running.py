"""How does a part of Remit run until somebody ends it? Options that all parts share, signals, and a line for what goes wrong."""

from __future__ import annotations

import asyncio
import signal  # noqa: TID251 - the program's own end
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from remit.model.problems import escaped
from remit.model.quantity import parse_duration

F = TypeVar("F", bound=Callable[..., Any])

BEAT: Final = "2s"
QUIET_MS: Final = 10_000
"""The same complaint is not written again for so long."""


class BeatType(click.ParamType):
    """A duration, as milliseconds."""

    name = "DURATION"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
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


def beat_option(command: F) -> F:
    return click.option(
        "--beat",
        "beat_ms",
        type=BeatType(),
        default=BEAT,
        show_default=True,
        help="How often everybody says that it is there. All silences are counted in beats; the same for every part of a scope.",
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
    """Run it until it ends, or a signal asks it to: then it is cancelled, and may finish what it has begun. `quick`: uvloop."""
    factory = None
    if quick:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_cancelled_by_signals(main))


async def _cancelled_by_signals(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    task = asyncio.ensure_future(main())
    loop = asyncio.get_running_loop()
    asked: list[signal.Signals] = []

    def ask(number: signal.Signals) -> None:
        if asked:  # asked twice: whoever asks has no more patience
            sys.stderr.flush()
            signal.raise_signal(signal.SIGKILL)
        asked.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, ask, number)
    try:
        await task
    except asyncio.CancelledError:
        if not asked:
            raise
    return 0


def server_and_token(servers: tuple[str, ...], token_file: Path | None) -> tuple[tuple[str, ...], str]:
    """Which servers are meant, and the token for them: by flags, the environment, or the context that is in use."""
    from remit.cli.contexts import resolve

    reach = resolve(server=servers[0] if servers else "", token_file=str(token_file or ""))
    return (reach.server, *servers[1:]), reach.token
