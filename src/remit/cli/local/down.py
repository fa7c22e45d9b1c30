"""Commands `down` and `keeper`: stop the processes of a data directory, and run or stop a single keeper.

An agent starts its keeper itself; `remit keeper` is for stopping replicas, and for debugging.
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
    from remit.agent.setup import AgentDirectory
    from remit.world.interfaces import Disk, World

STOP_TIMEOUT_MS: Final = 60_000
KEEPER_START_MS: Final = 5_000
POLL_MS: Final = 50
STOP_GRACE_MS: Final = 10_000
"""Grace period of replicas before they are killed."""


@click.command(
    epilog=examples(
        "remit down                        stop what `remit up` started",
        "remit down --data /srv/remit      stop everything on that data directory",
    )
)
@data_option
def down(data: Path | None) -> None:
    """Stop the control plane of a data directory, its agent, its keeper and all replicas.

    Applied objects stay in the directory and are back at the next `remit up`. Processes left by a killed `remit up` are
    stopped too.
    """
    root = (data or default_data_directory()).absolute()
    lines = asyncio.run(_down(root))
    for line in lines:
        click.echo(line)
    if not lines:
        click.echo(f"nothing is running on {escaped(str(root))}")


async def _down(root: Path) -> list[str]:
    from remit.store.sqlite.directory_lock import owner_pid
    from remit.world.process.procfs import send_termination, watch_process
    from remit.world.production import production

    world = production()
    try:
        lines = []
        pid = owner_pid(root / SERVER_DIRECTORY)
        if pid is not None:
            with watch_process(pid) as is_running:
                if not _send_signal(lambda: send_termination(pid)):
                    owner = f"process {pid} holds the lock of {escaped(str(root))}"
                    raise click.ClickException(
                        f"{owner} but does not exist here; it may run in another container: stop it there"
                    )
                await _wait_for(
                    world,
                    lambda: owner_pid(root / SERVER_DIRECTORY) is None and not is_running(),
                    f"process {pid} does not stop",
                )
            lines.append(f"control plane stopped (process {pid})")
        return [*lines, *await stop_agent(root / AGENT_DIRECTORY, world)]
    finally:
        await world.offload.close()


async def stop_agent(root: Path, world: World, *, with_work: bool = True) -> list[str]:
    """Stop the agent of a directory. With `with_work`, also its keeper and all replicas, including those left by a killed
    keeper. Returns a line of text for each stopped process.
    """
    from remit.agent.keeper.protocol import is_locked
    from remit.agent.setup import AgentDirectory, build_secret_files
    from remit.world.process.procfs import send_termination, watch_process

    directory, lines = AgentDirectory(root), list[str]()
    if not directory.run.exists():
        return lines
    if is_locked(world.disk, directory.agent_lock):
        pid = _agent_pid(directory)
        with watch_process(pid) as is_running:
            _send_signal(lambda: send_termination(pid))
            await _wait_for(
                world,
                lambda: not is_locked(world.disk, directory.agent_lock) and not is_running(),
                f"the agent (process {pid}) does not stop",
            )
        lines.append(f"agent stopped (process {pid})")
    keeper_runs = is_locked(world.disk, directory.keeper_lock)
    if with_work and (keeper_runs or has_orphaned_work(directory, world.disk)):
        with watch_process(_read_pid(directory.keeper_pid) if keeper_runs else None) as is_running:
            lines.append(await _retry_while_starting(world, lambda: stop_keeper(root, STOP_GRACE_MS)))
            await _wait_for(world, lambda: not is_running(), "the keeper does not stop")
    if with_work:
        await world.offload(build_secret_files(directory).destroy)
        await world.offload(directory.remove_work_link)
    return lines


def _agent_pid(directory: AgentDirectory) -> int:
    pid = _read_pid(directory.agent_pid)
    if pid is None:
        raise click.ClickException(
            f"an agent runs on {escaped(str(directory.root))}, but its pid file is unreadable; stop the process yourself"
        )
    return pid


def _read_pid(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _send_signal(send: Callable[[], bool]) -> bool:
    try:
        return send()
    except PermissionError as error:
        raise click.ClickException("the process runs as another user; repeat this as that user or as root") from error


async def _retry_while_starting(world: World, send: Callable[[], Awaitable[str]]) -> str:
    """Retry for a moment: a keeper that has just started does not respond yet."""
    deadline_ms = world.clock.now_ms() + KEEPER_START_MS
    while True:
        try:
            return await send()
        except click.ClickException:
            if world.clock.now_ms() > deadline_ms:
                raise
        await world.clock.sleep_ms(POLL_MS)


async def _wait_for(world: World, is_done: Callable[[], bool], message: str) -> None:
    deadline_ms = world.clock.now_ms() + STOP_TIMEOUT_MS
    while not is_done():
        if world.clock.now_ms() > deadline_ms:
            raise click.ClickException(
                f"{message} after {STOP_TIMEOUT_MS // 1000} s; check its log, or kill it: no data is lost"
            )
        await world.clock.sleep_ms(POLL_MS)


KEEPER_MODULE = "remit.cli.local.keeper_main"


@click.command(
    hidden=True,
    epilog=examples(
        "remit keeper --data agent             run a keeper in the foreground",
        "remit keeper --data agent --end       stop all replicas, then the keeper",
    ),
)
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), required=True, help="Data directory of the agent.")
@click.option("--end", is_flag=True, help="Stop all replicas of the keeper, and the keeper.")
@click.option(
    "--grace", default="10s", show_default=True, help="With --end: time that replicas have to stop before they are killed."
)
@click.option("--log-bounds", default="", hidden=True, help="Retention of replica logs.")
def keeper(data: Path, end: bool, grace: str, log_bounds: str) -> None:
    """Run the keeper of an agent directory: it supervises replicas and enforces fencing deadlines without the agent.

    Each agent starts its own keeper, which outlives the agent. Exits with 3 if another keeper runs on the directory.
    """
    if not end:
        os.execv(sys.executable, [sys.executable, "-m", KEEPER_MODULE, str(data.absolute()), log_bounds])  # noqa: S606 - runs this program
    try:
        grace_ms = parse_duration(grace)
    except ValueError as error:
        raise click.BadParameter(f"{escaped(str(error))}; use a duration such as 10s", param_hint="--grace") from error
    click.echo(asyncio.run(stop_keeper(data.absolute(), grace_ms)))


async def stop_keeper(root: Path, grace_ms: int) -> str:
    """Stop all replicas of a directory and its keeper, including replicas left by a killed keeper. Returns the outcome as text;
    raises ClickException if something does not stop.
    """
    from remit.agent.keeper.protocol import KeeperClient, is_locked
    from remit.agent.setup import KEEPER, AgentDirectory
    from remit.world.interfaces import LinkError, NotSent
    from remit.world.production import production

    directory = AgentDirectory(root)
    world = production(directory.addresses)
    try:
        if directory.run.is_dir() and is_locked(world.disk, directory.agent_lock):
            raise click.ClickException(
                f"an agent runs on {escaped(str(root))} and would restart the keeper; stop the agent first"
            )
        try:
            await KeeperClient(world.link, KEEPER, world.clock).shut_down(grace_ms)
        except NotSent as error:
            if directory.run.is_dir() and is_locked(world.disk, directory.keeper_lock):
                raise click.ClickException(f"the keeper of {escaped(str(root))} does not respond: {error.cause}") from error
            if not has_orphaned_work(directory, world.disk):
                await _remove_secret_files(directory, world)
                return f"no keeper runs on {root}"
            await _stop_orphaned_work(directory, world, grace_ms)
            await _remove_secret_files(directory, world)
            return f"no keeper runs on {root}; replicas left by an earlier one are stopped"
        except LinkError as error:
            raise click.ClickException(f"the keeper of {escaped(str(root))} did not stop: {error}") from error
        while is_locked(world.disk, directory.keeper_lock):
            await world.clock.sleep_ms(20)
        await _remove_secret_files(directory, world)
        return f"all replicas and the keeper on {root} are stopped"
    finally:
        await world.offload.close()


async def _remove_secret_files(directory: AgentDirectory, world: World) -> None:
    """Delete the secret files of stopped replicas from memory.

    It holds the agent's lock: an agent started in the meantime may already have written secrets for its next replica.
    """
    from remit.agent.setup import build_secret_files
    from remit.world.interfaces import DiskError, FileBusy

    if not directory.run.is_dir():
        return
    with suppress(FileBusy, DiskError), world.disk.lock(directory.agent_lock):
        await world.offload(build_secret_files(directory).destroy)


def has_orphaned_work(directory: AgentDirectory, disk: Disk) -> bool:
    """Check whether the journal of a stopped keeper lists processes that may still run."""
    from remit.agent.keeper.journal import Journal
    from remit.world.interfaces import DiskError

    if not directory.journal.exists():
        return False
    try:
        return any(record.alive for record in Journal(disk, directory.journal).read().values())
    except DiskError as error:
        raise click.ClickException(escaped(str(error))) from error


async def _stop_orphaned_work(directory: AgentDirectory, world: World, grace_ms: int) -> None:
    """Stop the replicas of a dead keeper, with a keeper in this process that recovers them from the journal."""
    from remit.agent.keeper.log_retention import LogBounds
    from remit.agent.keeper.protocol import Shutdown, encode
    from remit.agent.setup import build_keeper as build
    from remit.world.interfaces import FileBusy

    try:
        with world.disk.lock(directory.keeper_lock):
            keeper_ = build(world, directory, LogBounds(), click.echo)
            async with asyncio.TaskGroup() as group:
                group.create_task(keeper_.run())
                await keeper_.request(encode(Shutdown(grace_ms)))
            world.disk.remove(directory.keeper_pid)
    except FileBusy as error:
        raise click.ClickException(f"another keeper has just started ({error.cause}); run this again") from error
