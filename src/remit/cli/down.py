"""How is what `remit up` runs ended from elsewhere? Asks its processes to go, and waits until they are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from remit.cli.main import examples
from remit.cli.places import AGENT, SERVER, data_directory
from remit.cli.running import data_option
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.agent.directory import Directory
    from remit.world.promises import World

PATIENCE_MS: Final = 60_000
START_MS: Final = 5_000
LOOK_MS: Final = 50
GRACE_MS: Final = 10_000
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
    root = (data or data_directory()).absolute()
    lines = asyncio.run(_down(root))
    for line in lines:
        click.echo(line)
    if not lines:
        click.echo(f"nothing runs on {escaped(str(root))}")


async def _down(root: Path) -> list[str]:
    from remit.store.owner import owner_of
    from remit.world.leaving import ask_to_go, watched
    from remit.world.production import production

    world = production()
    try:
        lines = []
        pid = owner_of(root / SERVER)
        if pid is not None:
            with watched(pid) as is_there:
                if not _asked(lambda: ask_to_go(pid)):
                    who = f"process {pid} owns {escaped(str(root))}"
                    raise click.ClickException(f"{who} and cannot be reached; is it in another container?")
                await _until(world, lambda: owner_of(root / SERVER) is None and not is_there(), f"process {pid} does not end")
            lines.append(f"the control plane (process {pid}) has ended")
        return [*lines, *await end_agent(root / AGENT, world)]
    finally:
        await world.offload.close()


async def end_agent(root: Path, world: World, *, with_work: bool = True) -> list[str]:
    """The agent of a directory; and its keeper with all that it runs, also what a keeper that was killed has left behind.
    Answers what has ended, in words.
    """
    from remit.agent.building import vault
    from remit.agent.directory import Directory
    from remit.agent.reviving import is_held
    from remit.cli.keeper import end_keeper, has_left_work
    from remit.world.leaving import ask_to_go, watched

    directory, lines = Directory(root), list[str]()
    if not directory.run.exists():
        return lines
    if is_held(world.disk, directory.agent_lock):
        pid = _agent_pid(directory)
        with watched(pid) as is_there:
            _asked(lambda: ask_to_go(pid))
            await _until(
                world,
                lambda: not is_held(world.disk, directory.agent_lock) and not is_there(),
                f"the agent (process {pid}) does not end",
            )
        lines.append(f"the agent (process {pid}) has ended")
    keeps = is_held(world.disk, directory.keeper_lock)
    if with_work and (keeps or has_left_work(directory, world.disk)):
        with watched(_pid_in(directory.keeper_pid) if keeps else None) as is_there:
            lines.append(await _patiently(world, lambda: end_keeper(root, GRACE_MS)))
            await _until(world, lambda: not is_there(), "the keeper does not end")
    if with_work:
        await world.offload(vault(directory).destroy)
        await world.offload(directory.tidy)
    return lines


def _agent_pid(directory: Directory) -> int:
    pid = _pid_in(directory.agent_pid)
    if pid is None:
        raise click.ClickException(f"an agent runs on {escaped(str(directory.root))}, and does not say which; end it")
    return pid


def _pid_in(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _asked(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except PermissionError as error:
        raise click.ClickException("it runs as another user; run this as that one, or as root") from error


async def _patiently(world: World, ask: Callable[[], Awaitable[str]]) -> str:
    """A keeper that has only just begun does not answer yet."""
    until_ms = world.clock.now_ms() + START_MS
    while True:
        try:
            return await ask()
        except click.ClickException:
            if world.clock.now_ms() > until_ms:
                raise
        await world.clock.sleep_ms(LOOK_MS)


async def _until(world: World, holds: Callable[[], bool], what: str) -> None:
    until_ms = world.clock.now_ms() + PATIENCE_MS
    while not holds():
        if world.clock.now_ms() > until_ms:
            raise click.ClickException(f"{what}, after {PATIENCE_MS // 1000} s; see what it waits for, or kill it: it resumes")
        await world.clock.sleep_ms(LOOK_MS)
