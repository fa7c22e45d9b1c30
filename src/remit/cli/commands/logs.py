"""Command `logs`: prints the output of one replica, or of all replicas of a workload.

The lines of a workload's replicas are interleaved; each line is prefixed with the name of its replica.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from remit.cli.main import examples
from remit.cli.session.kind_names import ObjectRef, parse_object_ref
from remit.cli.session.server_call import FAILED, OK, CommandContext, CommandError, call_server, command_error, server_options
from remit.model.problems import escaped, quoted

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.model.records import Replica

COLOURS: Final = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
AT_ONCE_MAX: Final = 100
"""Replicas that are read concurrently, at most: each needs a connection of its own."""
POLL_MS: Final = 2_000
AGAIN_MS: Final = 1_000
TAIL_OF_MANY: Final = 100


class LogsOptions(NamedTuple):
    stream: str = "both"
    follow: bool = False
    tail: int | None = None
    attempt: int | None = None
    previous: bool = False
    prefix: bool = False
    raw: bool = False


@click.command(
    epilog=examples(
        "remit logs web                       all replicas of workload web, each line with the replica's name",
        "remit logs replica/web-0 -f          one replica, and follow its output",
        "remit logs web-0 --previous          the previous attempt",
        "remit logs web --tail 20 --stream stderr",
    )
)
@click.argument("what", metavar="WORKLOAD|REPLICA")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new output, for a workload also that of new replicas.")
@click.option(
    "--tail", type=click.IntRange(0, 1_000_000), metavar="N", help="Last N lines. Default for a workload: 100 per replica."
)
@click.option(
    "--stream",
    type=click.Choice(["stdout", "stderr", "both"]),
    default="both",
    show_default=True,
    help="Output stream to print.",
)
@click.option("--previous", is_flag=True, help="Print the log of the previous attempt.")
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Print the log of this attempt.")
@click.option("--prefix", is_flag=True, help="Prefix each line with the replica's name; always on for a workload.")
@click.option("--raw", is_flag=True, help="Write output unchanged, including terminal control sequences.")
@server_options()
def logs(
    context: CommandContext,
    what: str,
    follow: bool,
    tail: int | None,
    stream: str,
    previous: bool,
    attempt: int | None,
    prefix: bool,
    raw: bool,
) -> None:
    """Print the output of a WORKLOAD's replicas or of one REPLICA.

    On a terminal, control sequences are neutralized. Output to a file or a pipe is unchanged.
    """
    from remit.cli.output.console import until_broken_pipe

    if previous and attempt is not None:
        raise click.UsageError("--previous and --attempt cannot be combined; leave one of them out")
    if previous and follow:
        raise click.UsageError("the previous attempt has ended and cannot be followed; leave out -f or --previous")
    options = LogsOptions(stream, follow, tail, attempt, previous, prefix, raw)
    obj = parse_object_ref(what) if "/" in what else None
    if obj is not None and obj.kind not in ("Workload", "Replica"):
        raise click.UsageError(f"a {obj.kind.lower()} has no log; give a workload or a replica")
    with until_broken_pipe():
        sys.exit(call_server(context, lambda api: _logs(api, context, what, obj, options)))


async def _logs(api: Api, context: CommandContext, what: str, ref: ObjectRef | None, options: LogsOptions) -> int:
    from remit.cli.session.object_lookup import get_object, tenant_of

    if ref is None:
        ref = await resolve_name(api, context, what)
    obj = await get_object(api, context, ref)
    tenant = tenant_of(context, ref)
    if ref.kind == "Replica":
        _check_started(obj)
        return await _Reader(api, tenant, options, prefix=options.prefix).read(ref.name)
    limited = options._replace(tail=TAIL_OF_MANY if options.tail is None else options.tail)
    return await _Reader(api, tenant, limited, prefix=True).read_all(ref.name)


async def resolve_name(api: Api, context: CommandContext, name: str) -> ObjectRef:
    """Resolve a name without a kind: first as a workload, then as a replica."""
    from remit.cli.session.object_lookup import NOT_FOUND
    from remit.client.api import ApiError
    from remit.model.kinds import Workload
    from remit.model.records import Replica

    kinds: tuple[Any, ...] = (Workload, Replica)
    for kind in kinds:
        try:
            await api.get(kind, name, tenant=context.address.tenant)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
        else:
            return ObjectRef(kind.__name__, name)
    raise CommandError(
        f"no workload or replica {quoted(name)} in tenant {escaped(context.address.tenant)}",
        "`remit get wl,rp` lists them",
    )


def _check_started(obj: Replica) -> None:
    from remit.model.records import Phase

    if obj.status.attempt == 1 and obj.status.phase in (Phase.PENDING, Phase.RESERVED, Phase.BOUND):
        name = obj.metadata.name
        message = f"replica {escaped(name)} is {obj.status.phase}: it has not started and has no log yet"
        raise CommandError(message, f"find out why: remit explain replica/{escaped(name)}")


class _Reader:
    """Prints log lines as they arrive. Lines of one replica keep their order."""

    def __init__(self, api: Api, tenant: str, options: LogsOptions, *, prefix: bool) -> None:
        from remit.cli.output.console import console

        self._api, self._tenant, self._options, self._prefix = api, tenant, options, prefix
        self._console = console()
        self._escape = sys.stdout.isatty() and not options.raw
        self._styles: dict[str, str] = {}
        self._width = 0
        self._failed = 0

    async def read(self, name: str) -> int:
        from remit.client.api import ApiError

        try:
            await self._stream(name)
        except ApiError as error:
            raise command_error(error) from error
        return OK

    async def read_all(self, workload: str) -> int:
        """Print the logs of all replicas concurrently. With `follow`, also those of replicas that start later."""
        from remit.world.clock import BootClock

        clock, started = BootClock(), set[tuple[str, int]]()
        async with asyncio.TaskGroup() as group:
            while True:
                names = await self._started(workload)
                if not started and not names and not self._options.follow:
                    raise CommandError(
                        f"no replica of workload {escaped(workload)} has started",
                        f"find out why: remit explain workload/{escaped(workload)}",
                    )
                for name in names[: AT_ONCE_MAX - len(started)]:
                    if name not in started:
                        self._width = max(self._width, len(name[0]))
                        started.add(name)
                        group.create_task(self._member(name[0]))
                if len(names) > AT_ONCE_MAX:
                    click.echo(
                        f"printing the logs of {AT_ONCE_MAX} of {len(names)} replicas; give a replica's name to read another",
                        err=True,
                    )
                if not self._options.follow:
                    break
                await clock.sleep_ms(POLL_MS)
        return FAILED if self._failed else OK

    async def _started(self, workload: str) -> list[tuple[str, int]]:
        """Return name and attempt of the replicas that have started. The attempt is included because each attempt has its own
        log.
        """
        from remit.cli.output.object_list import natural_key
        from remit.model.records import Phase, Replica

        listed = await self._api.list(Replica, tenant=self._tenant, fields=f"spec.workload={workload}")
        not_started = (Phase.PENDING, Phase.RESERVED, Phase.BOUND)
        started_replicas = [
            item
            for item in listed.items
            if item.status.phase not in not_started or (item.status.attempt > 1 and self._options.previous)
        ]
        return sorted(
            ((replica.metadata.name, replica.status.attempt) for replica in started_replicas),
            key=lambda pair: natural_key(pair[0]),
        )

    async def _member(self, name: str) -> None:
        """Print the log of one replica. An error is printed and counted, so that the other replicas are still read."""
        from remit.client.api import ApiError, Unanswered

        try:
            await self._stream(name)
        except (ApiError, Unanswered) as error:
            self._failed += 1
            click.echo(f"{escaped(name)}: {escaped(str(error))}", err=True)

    async def _stream(self, name: str) -> None:
        from remit.cli.output.terminal import LineDecoder

        options, lines = self._options, LineDecoder()
        stream: Any = options.stream
        pieces = self._api.logs(
            name,
            tenant=self._tenant,
            stream=stream,
            follow=options.follow,
            tail=options.tail,
            attempt=options.attempt,
            previous=options.previous,
        )
        async with aclosing(pieces) as chunks:
            async for piece in chunks:
                if not self._prefix and not self._escape:
                    sys.stdout.buffer.write(piece)
                    sys.stdout.buffer.flush()
                    continue
                self._print(name, lines.feed(piece))
        self._print(name, lines.rest())

    def _print(self, name: str, lines: list[str]) -> None:
        from rich.text import Text

        from remit.cli.output.terminal import escape_terminal

        clean: Callable[[str], str] = escape_terminal if self._escape else str
        style = self._styles.setdefault(name, COLOURS[len(self._styles) % len(COLOURS)])
        for line in lines:
            if not self._prefix:
                sys.stdout.write(f"{clean(line)}\n")
            elif self._console.color_system is None:
                sys.stdout.write(f"{name:<{self._width}} | {clean(line)}\n")
            else:
                self._console.print(Text.assemble((f"{name:<{self._width}} | ", style), clean(line)), soft_wrap=True)
        sys.stdout.flush()
