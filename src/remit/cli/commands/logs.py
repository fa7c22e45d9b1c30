"""`logs`.

Of one replica, or of all that a workload has, each line with its name before it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from remit.cli.main import examples
from remit.cli.session.kind_names import Meant, thing_meant
from remit.cli.session.server_call import FAILED, OK, Asked, Failure, ask, asks_server, refusal
from remit.model.problems import escaped, quoted

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.model.records import Replica

COLOURS: Final = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
AT_ONCE_MAX: Final = 100
"""How many replicas are read side by side: each is a connection of its own."""
LOOK_MS: Final = 2_000
AGAIN_MS: Final = 1_000
TAIL_OF_MANY: Final = 100


class Wish(NamedTuple):
    stream: str = "both"
    follow: bool = False
    tail: int | None = None
    attempt: int | None = None
    previous: bool = False
    prefix: bool = False
    raw: bool = False


@click.command(
    epilog=examples(
        "remit logs web                       of all replicas of the workload web, each line with its name",
        "remit logs replica/web-0 -f          of one, and go on as it writes",
        "remit logs web-0 --previous          of the attempt before this one",
        "remit logs web --tail 20 --stream stderr",
    )
)
@click.argument("what", metavar="WORKLOAD|REPLICA")
@click.option("-f", "--follow", is_flag=True, help="Go on as more is written; of a workload, also by new replicas.")
@click.option(
    "--tail", type=click.IntRange(0, 1_000_000), metavar="N", help="The last N lines; of a workload 100 each, if not said."
)
@click.option("--stream", type=click.Choice(["stdout", "stderr", "both"]), default="both", show_default=True)
@click.option("--previous", is_flag=True, help="Of the attempt before the last one.")
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Of this attempt.")
@click.option("--prefix", is_flag=True, help="Name the replica before each line; of a workload that is always so.")
@click.option("--raw", is_flag=True, help="On a terminal too: every byte as it was written, also what steers the terminal.")
@asks_server()
def logs(
    asked: Asked,
    what: str,
    follow: bool,
    tail: int | None,
    stream: str,
    previous: bool,
    attempt: int | None,
    prefix: bool,
    raw: bool,
) -> None:
    """Print what a WORKLOAD's replicas, or one REPLICA, have written.

    On a terminal, what would steer it is made harmless; into a file or pipe every byte goes as it was written.
    """
    from remit.cli.output.console import until_nobody_reads

    if previous and attempt is not None:
        raise click.UsageError("--previous names an attempt, and so does --attempt; write one of the two")
    if previous and follow:
        raise click.UsageError("the attempt before is over: there is nothing to follow")
    wish = Wish(stream, follow, tail, attempt, previous, prefix, raw)
    thing = thing_meant(what) if "/" in what else None
    if thing is not None and thing.kind not in ("Workload", "Replica"):
        raise click.UsageError(f"a {thing.kind.lower()} writes nothing; name a workload or a replica")
    with until_nobody_reads():
        sys.exit(ask(asked, lambda api: _logs(api, asked, what, thing, wish)))


async def _logs(api: Api, asked: Asked, what: str, thing: Meant | None, wish: Wish) -> int:
    from remit.cli.session.object_lookup import find, tenant_of

    if thing is None:
        thing = await guessed(api, asked, what)
    found = await find(api, asked, thing)
    tenant = tenant_of(asked, thing)
    if thing.kind == "Replica":
        _check_begun(found)
        return await _Reader(api, tenant, wish, prefix=wish.prefix).read(thing.name)
    many = wish._replace(tail=TAIL_OF_MANY if wish.tail is None else wish.tail)
    return await _Reader(api, tenant, many, prefix=True).read_all(thing.name)


async def guessed(api: Api, asked: Asked, name: str) -> Meant:
    """A bare name is a workload's, or else a replica's."""
    from remit.cli.session.object_lookup import NOT_FOUND
    from remit.client.api import ApiError
    from remit.model.kinds import Workload
    from remit.model.records import Replica

    kinds: tuple[Any, ...] = (Workload, Replica)
    for kind in kinds:
        try:
            await api.get(kind, name, tenant=asked.reach.tenant)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
        else:
            return Meant(kind.__name__, name)
    raise Failure(
        f"there is neither a workload nor a replica {quoted(name)} in tenant {escaped(asked.reach.tenant)}",
        "`remit get wl,rp` lists them",
    )


def _check_begun(found: Replica) -> None:
    from remit.model.records import Phase

    if found.status.attempt == 1 and found.status.phase in (Phase.PENDING, Phase.RESERVED, Phase.BOUND):
        name = found.metadata.name
        what = f"replica {escaped(name)} is {found.status.phase}: it has written nothing yet"
        raise Failure(what, f"ask why: remit explain replica/{escaped(name)}")


class _Reader:
    """Prints lines as they come, those of one replica in their order."""

    def __init__(self, api: Api, tenant: str, wish: Wish, *, prefix: bool) -> None:
        from remit.cli.output.console import console

        self._api, self._tenant, self._wish, self._prefix = api, tenant, wish, prefix
        self._console = console()
        self._tame = sys.stdout.isatty() and not wish.raw
        self._styles: dict[str, str] = {}
        self._width = 0
        self._failed = 0

    async def read(self, name: str) -> int:
        from remit.client.api import ApiError

        try:
            await self._stream(name)
        except ApiError as error:
            raise refusal(error) from error
        return OK

    async def read_all(self, workload: str) -> int:
        """Of all its replicas, side by side; while it follows, of those that come later too."""
        from remit.world.clock import BootClock

        clock, begun = BootClock(), set[tuple[str, int]]()
        async with asyncio.TaskGroup() as group:
            while True:
                names = await self._begun(workload)
                if not begun and not names and not self._wish.follow:
                    raise Failure(
                        f"no replica of workload {escaped(workload)} has begun to run",
                        f"ask why: remit explain workload/{escaped(workload)}",
                    )
                for one in names[: AT_ONCE_MAX - len(begun)]:
                    if one not in begun:
                        self._width = max(self._width, len(one[0]))
                        begun.add(one)
                        group.create_task(self._member(one[0]))
                if len(names) > AT_ONCE_MAX:
                    click.echo(f"only the first {AT_ONCE_MAX} of {len(names)} replicas are read", err=True)
                if not self._wish.follow:
                    break
                await clock.sleep_ms(LOOK_MS)
        return FAILED if self._failed else OK

    async def _begun(self, workload: str) -> list[tuple[str, int]]:
        """Those that have run, each with its attempt: a new attempt is a log of its own."""
        from remit.cli.output.object_list import natural
        from remit.model.records import Phase, Replica

        listed = await self._api.list(Replica, tenant=self._tenant, fields=f"spec.workload={workload}")
        not_begun = (Phase.PENDING, Phase.RESERVED, Phase.BOUND)
        ran = [
            one for one in listed.items if one.status.phase not in not_begun or (one.status.attempt > 1 and self._wish.previous)
        ]
        return sorted(((one.metadata.name, one.status.attempt) for one in ran), key=lambda pair: natural(pair[0]))

    async def _member(self, name: str) -> None:
        """One that cannot be read does not keep the others from it."""
        from remit.client.api import ApiError, Unanswered

        try:
            await self._stream(name)
        except (ApiError, Unanswered) as error:
            self._failed += 1
            click.echo(f"{escaped(name)}: {escaped(str(error))}", err=True)

    async def _stream(self, name: str) -> None:
        from remit.cli.output.terminal import Lines

        wish, lines = self._wish, Lines()
        stream: Any = wish.stream
        pieces = self._api.logs(
            name,
            tenant=self._tenant,
            stream=stream,
            follow=wish.follow,
            tail=wish.tail,
            attempt=wish.attempt,
            previous=wish.previous,
        )
        async with aclosing(pieces) as told:
            async for piece in told:
                if not self._prefix and not self._tame:
                    sys.stdout.buffer.write(piece)
                    sys.stdout.buffer.flush()
                    continue
                self._print(name, lines.feed(piece))
        self._print(name, lines.rest())

    def _print(self, name: str, lines: list[str]) -> None:
        from rich.text import Text

        from remit.cli.output.terminal import harmless

        clean: Callable[[str], str] = harmless if self._tame else str
        style = self._styles.setdefault(name, COLOURS[len(self._styles) % len(COLOURS)])
        for line in lines:
            if not self._prefix:
                sys.stdout.write(f"{clean(line)}\n")
            elif self._console.color_system is None:
                sys.stdout.write(f"{name:<{self._width}} | {clean(line)}\n")
            else:
                self._console.print(Text.assemble((f"{name:<{self._width}} | ", style), clean(line)), soft_wrap=True)
        sys.stdout.flush()
