"""Command `exec`: runs a command next to a replica and exits with its exit code.

The command uses this program's stdin, stdout and stderr, or its terminal with -t.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from remit.cli.main import examples
from remit.cli.session.kind_names import ObjectRef, parse_object_ref
from remit.cli.session.server_call import CommandContext, CommandError, call_server, server_options
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.client.exec_session import ExecClientSession

NOT_RUN: Final = 125
"""Exit code of Remit itself if the command was not run or its outcome is unknown; the convention of env(1) and Docker.
"""
SIGNALLED: Final = 128


class NotRun(CommandError):
    """The command was not run, or its outcome is unknown."""

    exit_code = NOT_RUN


class ExecOptions(NamedTuple):
    argv: tuple[str, ...]
    stdin: bool
    terminal: bool
    attempt: int
    raw: bool


@click.command(
    "exec",
    epilog=examples(
        "remit exec web-0 -- ls -l                    in the directory of replica web-0, as its user",
        "remit exec -it web -- bash                   interactive shell next to a replica of web",
        "remit exec -i web-0 -- tar x < files.tar     pass stdin to the command",
        "remit exec web-0 -- sh -c 'ps ax | wc -l'    start a shell explicitly for pipes",
    ),
)
@click.argument("what", metavar="REPLICA|WORKLOAD")
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
@click.option("-i", "--stdin", "stdin", is_flag=True, help="Pass standard input to the command, until end of file.")
@click.option("-t", "--tty", "terminal", is_flag=True, help="Allocate a terminal with the size of this one.")
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Only if the replica is at this attempt.")
@click.option("--raw", is_flag=True, help="Write output unchanged, including terminal control sequences.")
@server_options(without_short_t=True)
def execute(
    context: CommandContext,
    what: str,
    command: tuple[str, ...],
    stdin: bool,
    terminal: bool,
    attempt: int | None,
    raw: bool,
) -> None:
    """Run COMMAND next to a REPLICA, or one replica of a WORKLOAD, with the replica's user, directory, sandbox and limits.

    Arguments are passed unchanged; no shell interprets them. The command ends when the replica ends or when you disconnect.
    The exit code is that of the command, 128 plus the signal number if a signal ended it, or 125 if Remit could not run it.
    """
    from remit.cli.output.terminal import stdin_is_terminal

    if terminal and not stdin_is_terminal():
        raise click.UsageError("-t needs a terminal, and standard input is not one; leave out -t to use a pipe")
    options = ExecOptions(command, stdin, terminal, attempt or 0, raw)
    obj = parse_object_ref(what) if "/" in what else None
    if obj is not None and obj.kind not in ("Workload", "Replica"):
        raise click.UsageError(f"cannot run a command in a {obj.kind.lower()}; give a workload or a replica")
    try:
        code = call_server(context, lambda api: _run(api, context, what, obj, options))
    except CommandError as failure:
        raise NotRun(failure.message) from failure
    sys.exit(code)


async def _run(api: Api, context: CommandContext, what: str, ref: ObjectRef | None, options: ExecOptions) -> int:
    from remit.cli.commands.logs import resolve_name
    from remit.cli.output.terminal import raw_mode, window_size
    from remit.cli.session.object_lookup import get_object, tenant_of
    from remit.client.api import Unanswered

    if ref is None:
        ref = await resolve_name(api, context, what)
    tenant = tenant_of(context, ref)
    await get_object(api, context, ref)
    name = ref.name if ref.kind == "Replica" else await _one_of(api, tenant, ref.name)
    size = window_size() if options.terminal else None
    kind = os.environ.get("TERM", "") if options.terminal else ""
    opened = api.exec(
        name, options.argv, tenant=tenant, attempt=options.attempt, stdin=options.stdin, window=size, terminal=_known(kind)
    )
    async with opened as session:
        try:
            with ExitStack() as cleanup:
                if options.terminal:
                    cleanup.enter_context(raw_mode())
                await _talk(session, options, cleanup)
        except* Unanswered:
            with suppress(Unanswered):
                await api.status()  # raises the actual error if the token was revoked or has expired
            fix = f"the command was ended: check what it did before you run it again (`remit describe replica/{name}`)"
            raise CommandError(f"the connection to {escaped(name)} was lost while the command ran", fix) from None
        return _code(session)


async def _one_of(api: Api, tenant: str, workload: str) -> str:
    """Return the replica of the workload that is furthest in its lifecycle, so that a serving one is preferred."""
    from remit.cli.output.object_list import natural_key
    from remit.model.records import Phase, Replica

    order = (Phase.SERVING, Phase.READY, Phase.RUNNING, Phase.STARTING)
    listed = await api.list(Replica, tenant=tenant, fields=f"spec.workload={workload}")
    running = [item for item in listed.items if item.status.phase in order]
    if not running:
        fix = f"find out why: remit explain workload/{escaped(workload)}"
        raise CommandError(f"no replica of workload {escaped(workload)} is running", fix)
    best = min(running, key=lambda replica: (order.index(replica.status.phase), natural_key(replica.metadata.name)))
    return best.metadata.name


async def _talk(session: ExecClientSession, options: ExecOptions, cleanup: ExitStack) -> None:
    """Copy input, output and window size until the command has ended."""
    from remit.cli.output.terminal import on_resize, window_size

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_pass_on(session))] if options.stdin else []
        if options.terminal:
            changed = asyncio.Event()
            cleanup.enter_context(on_resize(changed.set))

            async def resize() -> None:
                while True:
                    await changed.wait()
                    changed.clear()
                    await session.resize(window_size())

            tasks.append(group.create_task(resize()))
        await _show(session, options)
        for task in tasks:
            task.cancel()


async def _pass_on(session: ExecClientSession) -> None:
    from remit.cli.output.terminal import read_stdin

    while data := await read_stdin():
        await session.feed(data)
    await session.end_input()


async def _show(session: ExecClientSession, options: ExecOptions) -> None:
    from remit.cli.output.terminal import TerminalFilter
    from remit.model.wire.exec_frames import ExecFrameType

    streams = {ExecFrameType.STDOUT: sys.stdout, ExecFrameType.STDERR: sys.stderr}
    # With -t, the command may control the terminal. Without it, escape sequences in its output are neutralized, so that
    # untrusted output cannot manipulate the user's terminal.
    terminal_filter = {
        part: TerminalFilter()
        for part, stream in streams.items()
        if stream.isatty() and not options.terminal and not options.raw
    }
    async for frame in session.parts():
        stream = streams[ExecFrameType(frame.type)]
        if frame.type in terminal_filter:
            stream.write(terminal_filter[ExecFrameType(frame.type)].feed(frame.body))
        else:
            stream.buffer.write(frame.body)
        stream.flush()


def _code(session: ExecClientSession) -> int:
    result = session.over
    if result is None or (result.code is None and result.signal is None):
        why = result.why if result is not None and result.why else "the outcome of the command is unknown"
        raise CommandError(escaped(why), "check whether the replica is running: remit get replicas")
    if result.why:
        click.echo(f"remit: the command was ended: {escaped(result.why)}", err=True)
    return result.code if result.code is not None else SIGNALLED + (result.signal or 0)


def _known(kind: str) -> str:
    """Return the value of TERM if the server accepts it, else an empty string."""
    return kind if len(kind) <= 64 and all(char.isalnum() or char in "._+-" for char in kind) and kind.isascii() else ""
