"""Runs, or ends, the keeper of a directory. An agent starts its own: this is for ends, and for looking at one by hand."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from remit.cli.main import examples
from remit.model.problems import escaped
from remit.model.quantity import parse_duration

if TYPE_CHECKING:
    from remit.agent.directory import Directory
    from remit.world.promises import Disk, World

PROCESS = "remit.cli.keeper_process"


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
        os.execv(sys.executable, [sys.executable, "-m", PROCESS, str(data.absolute()), log_bounds])  # noqa: S606 - ourselves
    try:
        grace_ms = parse_duration(grace)
    except ValueError as error:
        raise click.BadParameter(f"{escaped(str(error))}; write one such as 10s", param_hint="--grace") from error
    click.echo(asyncio.run(end_keeper(data.absolute(), grace_ms)))


async def end_keeper(root: Path, grace_ms: int) -> str:
    """End all that runs there, and its keeper; also what one that was killed has left behind. Answers with what came of it;
    raises ClickException if it did not end.
    """
    from remit.agent.directory import KEEPER, Directory
    from remit.agent.keeping import Keeping
    from remit.agent.reviving import is_held
    from remit.world.production import production
    from remit.world.promises import LinkError, Unreached

    directory = Directory(root)
    world = production(directory.addresses)
    try:
        if directory.run.is_dir() and is_held(world.disk, directory.agent_lock):
            raise click.ClickException(f"an agent runs on {escaped(str(root))}, and would start a keeper anew; end it first")
        try:
            await Keeping(world.link, KEEPER, world.clock).quit(grace_ms)
        except Unreached as error:
            if directory.run.is_dir() and is_held(world.disk, directory.keeper_lock):
                raise click.ClickException(f"the keeper of {escaped(str(root))} does not answer: {error.cause}") from error
            if not has_left_work(directory, world.disk):
                await _forget(directory, world)
                return f"no keeper runs on {root}"
            await _end_what_is_left(directory, world, grace_ms)
            await _forget(directory, world)
            return f"no keeper runs on {root}; what one has left behind has ended"
        except LinkError as error:
            raise click.ClickException(f"the keeper of {escaped(str(root))} did not end: {error}") from error
        while is_held(world.disk, directory.keeper_lock):
            await world.clock.sleep_ms(20)
        await _forget(directory, world)
        return f"all work on {root} has ended, and its keeper"
    finally:
        await world.offload.close()


async def _forget(directory: Directory, world: World) -> None:
    """What the work that has ended was to read, and the place in the machine's memory where it lay: nobody else removes that.

    Under the agent's lock: one that has been started meanwhile may have put there what it is about to start.
    """
    from remit.agent.building import vault
    from remit.world.promises import Busy, DiskError

    if not directory.run.is_dir():
        return
    with suppress(Busy, DiskError), world.disk.lock(directory.agent_lock):
        await world.offload(vault(directory).destroy)


def has_left_work(directory: Directory, disk: Disk) -> bool:
    """Does the journal of a keeper that is gone tell of work that may run still?"""
    from remit.agent.journal import Journal
    from remit.world.promises import DiskError

    if not directory.journal.exists():
        return False
    try:
        return any(kept.alive for kept in Journal(disk, directory.journal).read().values())
    except DiskError as error:
        raise click.ClickException(escaped(str(error))) from error


async def _end_what_is_left(directory: Directory, world: World, grace_ms: int) -> None:
    """By a keeper in this process: it finds again what the other had started, and ends it."""
    from remit.agent.building import keeper as build
    from remit.agent.keeping import Quit, encode
    from remit.agent.saying import LogBounds
    from remit.world.promises import Busy

    try:
        with world.disk.lock(directory.keeper_lock):
            one = build(world, directory, LogBounds(), click.echo)
            async with asyncio.TaskGroup() as group:
                group.create_task(one.run())
                await one.request(encode(Quit(grace_ms)))
            world.disk.remove(directory.keeper_pid)
    except Busy as error:
        raise click.ClickException(f"another keeper has just been started ({error.cause}); do this again") from error
