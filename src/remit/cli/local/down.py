"""`down` and `keeper`: stop what runs in a data directory.

Asks its processes to go, and waits until they are gone.

Runs, or ends, the keeper of a directory. An agent starts its own: this is for ends, and for looking at one by hand.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from remit.cli.local.daemon_options import AGENT_DIRECTORY, SERVER_DIRECTORY, data_option, default_data_directory
from remit.cli.main import examples
from remit.model.problems import escaped
from remit.model.resources import parse_duration

if TYPE_CHECKING:
    from remit.agent.directory import AgentDirectory
    from remit.world.interfaces import Disk, World

STOP_TIMEOUT_MS: Final = 60_000
KEEPER_START_MS: Final = 5_000
POLL_MS: Final = 50
STOP_GRACE_MS: Final = 10_000
"""What each piece of work may take to end by itself."""


@click.command(
    epilog=examples(
        "remit down                        what `remit up` runs",
        "remit down --data /srv/remit      what runs on that directory",
    )
)
@data_option
def down(data: Path | None) -> None:
    """End the control plane of a directory, its agent, its keeper, and all that these run.

    What was applied stays in the directory, and is there again at the next `remit up`. What a killed `remit up` has left behind
    is ended too.
    """
    root = (data or default_data_directory()).absolute()
    lines = asyncio.run(_down(root))
    for line in lines:
        click.echo(line)
    if not lines:
        click.echo(f"nothing runs on {escaped(str(root))}")


async def _down(root: Path) -> list[str]:
    from remit.store.sqlite.directory_lock import owner_pid
    from remit.world.process.procfs import send_termination, watch_process
    from remit.world.production import production

    world = production()
    try:
        lines = []
        pid = owner_pid(root / SERVER_DIRECTORY)
        if pid is not None:
            with watch_process(pid) as is_there:
                if not _send_signal(lambda: send_termination(pid)):
                    who = f"process {pid} owns {escaped(str(root))}"
                    raise click.ClickException(f"{who} and cannot be reached; is it in another container?")
                await _wait_until(
                    world, lambda: owner_pid(root / SERVER_DIRECTORY) is None and not is_there(), f"process {pid} does not end"
                )
            lines.append(f"the control plane (process {pid}) has ended")
        return [*lines, *await stop_agent(root / AGENT_DIRECTORY, world)]
    finally:
        await world.offload.close()


async def stop_agent(root: Path, world: World, *, with_work: bool = True) -> list[str]:
    """The agent of a directory; and its keeper with all that it runs, also what a keeper that was killed has left behind.
    Answers what has ended, in words.
    """
    from remit.agent.directory import AgentDirectory
    from remit.agent.keeper.protocol import is_locked
    from remit.agent.setup import build_secret_files
    from remit.world.process.procfs import send_termination, watch_process

    directory, lines = AgentDirectory(root), list[str]()
    if not directory.run.exists():
        return lines
    if is_locked(world.disk, directory.agent_lock):
        pid = _agent_pid(directory)
        with watch_process(pid) as is_there:
            _send_signal(lambda: send_termination(pid))
            await _wait_until(
                world,
                lambda: not is_locked(world.disk, directory.agent_lock) and not is_there(),
                f"the agent (process {pid}) does not end",
            )
        lines.append(f"the agent (process {pid}) has ended")
    keeps = is_locked(world.disk, directory.keeper_lock)
    if with_work and (keeps or has_orphaned_work(directory, world.disk)):
        with watch_process(_read_pid(directory.keeper_pid) if keeps else None) as is_there:
            lines.append(await _retry_while_starting(world, lambda: stop_keeper(root, STOP_GRACE_MS)))
            await _wait_until(world, lambda: not is_there(), "the keeper does not end")
    if with_work:
        await world.offload(build_secret_files(directory).destroy)
        await world.offload(directory.remove_work_link)
    return lines


def _agent_pid(directory: AgentDirectory) -> int:
    pid = _read_pid(directory.agent_pid)
    if pid is None:
        raise click.ClickException(f"an agent runs on {escaped(str(directory.root))}, and does not say which; end it")
    return pid


def _read_pid(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _send_signal(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except PermissionError as error:
        raise click.ClickException("it runs as another user; run this as that one, or as root") from error


async def _retry_while_starting(world: World, ask: Callable[[], Awaitable[str]]) -> str:
    """A keeper that has only just begun does not answer yet."""
    until_ms = world.clock.now_ms() + KEEPER_START_MS
    while True:
        try:
            return await ask()
        except click.ClickException:
            if world.clock.now_ms() > until_ms:
                raise
        await world.clock.sleep_ms(POLL_MS)


async def _wait_until(world: World, holds: Callable[[], bool], what: str) -> None:
    until_ms = world.clock.now_ms() + STOP_TIMEOUT_MS
    while not holds():
        if world.clock.now_ms() > until_ms:
            raise click.ClickException(
                f"{what}, after {STOP_TIMEOUT_MS // 1000} s; see what it waits for, or kill it: it resumes"
            )
        await world.clock.sleep_ms(POLL_MS)


KEEPER_MODULE = "remit.cli.local.keeper_main"


@click.command(
    hidden=True,
    epilog=examples(
        "remit keeper --data agent             run one in the foreground",
        "remit keeper --data agent --end       end all that runs there, and then the keeper itself",
    ),
)
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), required=True, help="The agent's directory.")
@click.option("--end", is_flag=True, help="End all work of the directory's keeper, and the keeper.")
@click.option("--grace", default="10s", show_default=True, help="With --end: how long work may take before it is killed.")
@click.option("--log-bounds", default="", hidden=True, help="How much of what work says is kept.")
def keeper(data: Path, end: bool, grace: str, log_bounds: str) -> None:
    """Hold the deadlines of work that must never run twice, and end it when its agent cannot.

    One runs beside each agent, which starts it, and it outlives that one. Exits with 3 if another has the directory.
    """
    if not end:
        os.execv(sys.executable, [sys.executable, "-m", KEEPER_MODULE, str(data.absolute()), log_bounds])  # noqa: S606 - ourselves
    try:
        grace_ms = parse_duration(grace)
    except ValueError as error:
        raise click.BadParameter(f"{escaped(str(error))}; write one such as 10s", param_hint="--grace") from error
    click.echo(asyncio.run(stop_keeper(data.absolute(), grace_ms)))


async def stop_keeper(root: Path, grace_ms: int) -> str:
    """End all that runs there, and its keeper; also what one that was killed has left behind. Answers with what came of it;
    raises ClickException if it did not end.
    """
    from remit.agent.directory import KEEPER, AgentDirectory
    from remit.agent.keeper.protocol import KeeperClient, is_locked
    from remit.world.interfaces import LinkError, NotSent
    from remit.world.production import production

    directory = AgentDirectory(root)
    world = production(directory.addresses)
    try:
        if directory.run.is_dir() and is_locked(world.disk, directory.agent_lock):
            raise click.ClickException(f"an agent runs on {escaped(str(root))}, and would start a keeper anew; end it first")
        try:
            await KeeperClient(world.link, KEEPER, world.clock).shut_down(grace_ms)
        except NotSent as error:
            if directory.run.is_dir() and is_locked(world.disk, directory.keeper_lock):
                raise click.ClickException(f"the keeper of {escaped(str(root))} does not answer: {error.cause}") from error
            if not has_orphaned_work(directory, world.disk):
                await _remove_secret_files(directory, world)
                return f"no keeper runs on {root}"
            await _stop_orphaned_work(directory, world, grace_ms)
            await _remove_secret_files(directory, world)
            return f"no keeper runs on {root}; what one has left behind has ended"
        except LinkError as error:
            raise click.ClickException(f"the keeper of {escaped(str(root))} did not end: {error}") from error
        while is_locked(world.disk, directory.keeper_lock):
            await world.clock.sleep_ms(20)
        await _remove_secret_files(directory, world)
        return f"all work on {root} has ended, and its keeper"
    finally:
        await world.offload.close()


async def _remove_secret_files(directory: AgentDirectory, world: World) -> None:
    """What the work that has ended was to read, and the place in the machine's memory where it lay: nobody else removes that.

    Under the agent's lock: one that has been started meanwhile may have put there what it is about to start.
    """
    from remit.agent.setup import build_secret_files
    from remit.world.interfaces import DiskError, FileBusy

    if not directory.run.is_dir():
        return
    with suppress(FileBusy, DiskError), world.disk.lock(directory.agent_lock):
        await world.offload(build_secret_files(directory).destroy)


def has_orphaned_work(directory: AgentDirectory, disk: Disk) -> bool:
    """Does the journal of a keeper that is gone tell of work that may run still?"""
    from remit.agent.keeper.journal import Journal
    from remit.world.interfaces import DiskError

    if not directory.journal.exists():
        return False
    try:
        return any(kept.alive for kept in Journal(disk, directory.journal).read().values())
    except DiskError as error:
        raise click.ClickException(escaped(str(error))) from error


async def _stop_orphaned_work(directory: AgentDirectory, world: World, grace_ms: int) -> None:
    """By a keeper in this process: it finds again what the other had started, and ends it."""
    from remit.agent.keeper.log_retention import LogBounds
    from remit.agent.keeper.protocol import Shutdown, encode
    from remit.agent.setup import build_keeper as build
    from remit.world.interfaces import FileBusy

    try:
        with world.disk.lock(directory.keeper_lock):
            one = build(world, directory, LogBounds(), click.echo)
            async with asyncio.TaskGroup() as group:
                group.create_task(one.run())
                await one.request(encode(Shutdown(grace_ms)))
            world.disk.remove(directory.keeper_pid)
    except FileBusy as error:
        raise click.ClickException(f"another keeper has just been started ({error.cause}); do this again") from error
