"""`exec`.

Runs one there, with this program's streams or terminal, and ends as it does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from remit.cli.main import examples
from remit.cli.session.kind_names import Meant, thing_meant
from remit.cli.session.server_call import Asked, Failure, ask, asks_server
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.client.exec_session import ExecClientSession

NOT_RUN: Final = 125
"""With this Remit itself ends if the command was not run, or what became of it is not known."""
SIGNALLED: Final = 128


class NotRun(Failure):
    """The command has not been run, or nobody knows what became of it."""

    exit_code = NOT_RUN


class Wish(NamedTuple):
    argv: tuple[str, ...]
    stdin: bool
    terminal: bool
    attempt: int
    raw: bool


@click.command(
    "exec",
    epilog=examples(
        "remit exec web-0 -- ls -l                    in the directory of the replica web-0, as its user",
        "remit exec -it web -- bash                   a shell beside one of the replicas of web",
        "remit exec -i web-0 -- tar x < files.tar     what is piped in is its input",
        "remit exec web-0 -- sh -c 'ps ax | wc -l'    a shell only if you name one",
    ),
)
@click.argument("what", metavar="REPLICA|WORKLOAD")
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
@click.option("-i", "--stdin", "stdin", is_flag=True, help="Pass on the standard input, to its end.")
@click.option("-t", "--tty", "terminal", is_flag=True, help="Give it a terminal, of the size of this one.")
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Only beside this attempt.")
@click.option("--raw", is_flag=True, help="On a terminal too: every byte as it was written, also what steers the terminal.")
@asks_server(t_taken=True)
def execute(
    asked: Asked, what: str, command: tuple[str, ...], stdin: bool, terminal: bool, attempt: int | None, raw: bool
) -> None:
    """Run a COMMAND beside a REPLICA, or one of a WORKLOAD: as its user, in its directory, sandbox and limits.

    Its words are passed on as they are: no shell reads them. It ends with the replica, and when you leave. The exit code is the
    command's own, 128 and the number of the signal that ended it, or 125 if Remit could not run it.
    """
    from remit.cli.output.terminal import is_typed_at

    if terminal and not is_typed_at():
        raise click.UsageError("-t passes on a terminal, and the standard input is none; leave it out to pipe")
    wish = Wish(command, stdin, terminal, attempt or 0, raw)
    thing = thing_meant(what) if "/" in what else None
    if thing is not None and thing.kind not in ("Workload", "Replica"):
        raise click.UsageError(f"nothing runs in a {thing.kind.lower()}; name a workload or a replica")
    try:
        code = ask(asked, lambda api: _run(api, asked, what, thing, wish))
    except Failure as failure:
        raise NotRun(failure.message) from failure
    sys.exit(code)


async def _run(api: Api, asked: Asked, what: str, thing: Meant | None, wish: Wish) -> int:
    from remit.cli.commands.logs import guessed
    from remit.cli.output.terminal import raw, window
    from remit.cli.session.object_lookup import find, tenant_of
    from remit.client.api import Unanswered

    if thing is None:
        thing = await guessed(api, asked, what)
    tenant = tenant_of(asked, thing)
    await find(api, asked, thing)
    name = thing.name if thing.kind == "Replica" else await _one_of(api, tenant, thing.name)
    size = window() if wish.terminal else None
    kind = os.environ.get("TERM", "") if wish.terminal else ""
    opened = api.exec(
        name, wish.argv, tenant=tenant, attempt=wish.attempt, stdin=wish.stdin, window=size, terminal=_known(kind)
    )
    async with opened as session:
        try:
            with ExitStack() as held:
                if wish.terminal:
                    held.enter_context(raw())
                await _talk(session, wish, held)
        except* Unanswered:
            with suppress(Unanswered):
                await api.status()  # which tells why, if the token is not good any more
            cure = f"it was begun, and has been ended: look what it did, then run it again (`remit describe replica/{name}`)"
            raise Failure(f"the session beside {escaped(name)} was cut off in its middle", cure) from None
        return _code(session)


async def _one_of(api: Api, tenant: str, workload: str) -> str:
    """The replica of a workload that is furthest."""
    from remit.cli.output.object_list import natural
    from remit.model.records import Phase, Replica

    order = (Phase.SERVING, Phase.READY, Phase.RUNNING, Phase.STARTING)
    listed = await api.list(Replica, tenant=tenant, fields=f"spec.workload={workload}")
    found = [one for one in listed.items if one.status.phase in order]
    if not found:
        cure = f"ask why: remit explain workload/{escaped(workload)}"
        raise Failure(f"no replica of workload {escaped(workload)} runs", cure)
    best = min(found, key=lambda one: (order.index(one.status.phase), natural(one.metadata.name)))
    return best.metadata.name


async def _talk(session: ExecClientSession, wish: Wish, held: ExitStack) -> None:
    """Until the command has ended."""
    from remit.cli.output.terminal import resized, window

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_pass_on(session))] if wish.stdin else []
        if wish.terminal:
            changed = asyncio.Event()
            held.enter_context(resized(changed.set))

            async def resize() -> None:
                while True:
                    await changed.wait()
                    changed.clear()
                    await session.resize(window())

            tasks.append(group.create_task(resize()))
        await _show(session, wish)
        for task in tasks:
            task.cancel()


async def _pass_on(session: ExecClientSession) -> None:
    from remit.cli.output.terminal import typed

    while data := await typed():
        await session.feed(data)
    await session.end_input()


async def _show(session: ExecClientSession, wish: Wish) -> None:
    from remit.cli.output.terminal import Tame
    from remit.model.wire.exec_frames import ExecFrameType

    streams = {ExecFrameType.STDOUT: sys.stdout, ExecFrameType.STDERR: sys.stderr}
    # Whoever asks for a terminal wants to be steered by the command; nobody else does.
    tame = {part: Tame() for part, stream in streams.items() if stream.isatty() and not wish.terminal and not wish.raw}
    async for said in session.parts():
        stream = streams[ExecFrameType(said.type)]
        if said.type in tame:
            stream.write(tame[ExecFrameType(said.type)].feed(said.body))
        else:
            stream.buffer.write(said.body)
        stream.flush()


def _code(session: ExecClientSession) -> int:
    over = session.over
    if over is None or (over.code is None and over.signal is None):
        why = over.why if over is not None and over.why else "what became of the command is not known"
        raise Failure(escaped(why), "look whether the replica runs: remit get replicas")
    if over.why:
        click.echo(f"remit: the command was ended: {escaped(over.why)}", err=True)
    return over.code if over.code is not None else SIGNALLED + (over.signal or 0)


def _known(kind: str) -> str:
    """What a terminal may be called; any other name is nobody's."""
    return kind if len(kind) <= 64 and all(letter.isalnum() or letter in "._+-" for letter in kind) and kind.isascii() else ""
