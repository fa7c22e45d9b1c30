"""What must be there before a copy starts? Gathered in its room, step by step; the order itself is work.py's.

Preparing comes between the committed `start` and the keeper's order, and is a part of `starting`: how far it is, is told with
every beat. A room is made under another name and gets its own once it is whole, so a copy's directory is there with all that
belongs in it or not at all, whoever was killed meanwhile. Work that asks for nothing never comes by here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from remit.agent.copies import Copy
from remit.agent.work import NOTHING, Place, Prepared, user_of
from remit.model.kinds import Template
from remit.model.records import GenerationSpec, Replica
from remit.world.promises import DiskError, World, WorldError

MAKING: Final = ".making"
"""A room that is not whole yet has this after its name: no copy is called so."""

Tell = Callable[[str], None]
"""How far it is, in a few words for people; as often as one likes."""


class NotPrepared(WorldError):
    """What the work asks for cannot be had here: it is not started."""


class Making:
    """How far the preparing of one copy is. It is over when one of `prepared` and `failed` is there."""

    __slots__ = ("failed", "number", "prepared", "said", "task")

    def __init__(self, number: int = 0) -> None:
        self.number = number
        """For which start within its attempt."""
        self.said = "gathers what it needs"
        self.prepared: Prepared | None = None
        self.failed = ""
        """Why it cannot be started, with the cure."""
        self.task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.prepared is not None or bool(self.failed)

    def tell(self, said: str) -> None:
        self.said = said


class Subject(NamedTuple):
    """For whom is prepared. `fresh`: its room is new, and empty but for what earlier steps put there; else it stood before,
    with all that belongs in it and all that the work made of it."""

    place: Place
    copy: Copy
    replica: Replica
    generation: GenerationSpec
    fresh: bool
    runs: bool = False
    """It runs already, and what is prepared is for what is to run beside it."""

    @property
    def template(self) -> Template:
        return self.generation.spec.template

    @property
    def user(self) -> str:
        """As whom the work runs, and so whose its files are."""
        return user_of(self.template, self.place, self.replica.metadata.tenant)


class Step(Protocol):
    """One sort of thing that work may ask for."""

    def wanted(self, template: Template, /) -> bool: ...

    async def prepare(self, subject: Subject, room: Path, tell: Tell, /) -> Prepared:
        """Put it in the `room`, or say what the order is to have. It may be cancelled at any time, and asked for again: after a
        restart of the agent, of the work, or of both. Raises `WorldError`, whose words are told as the reason.
        """
        ...

    def forget(self, copy: Copy, /) -> None:
        """It has ended, or is not wanted any more."""
        ...

    def forget_all_but(self, known: Collection[str], /) -> None:
        """Of other copies than these, by their file names, nothing is left: an agent that was killed could not forget them.
        Asked once, before anything begins.
        """
        ...


class Preparer:
    """Takes the steps one after another, in this order."""

    def __init__(self, world: World, steps: Sequence[Step]) -> None:
        self._world, self._steps = world, tuple(steps)

    async def prepare(
        self, place: Place, copy: Copy, replica: Replica, generation: GenerationSpec, making: Making, *, runs: bool = False
    ) -> None:
        """Raises nothing but cancellation: how it went is in `making`."""
        room = place.directory(copy)
        beside = room.with_name(room.name + MAKING)
        try:
            fresh = not await self._world.offload(lambda: self._world.disk.exists(room))
            if fresh:
                await self._world.offload(lambda: self._make_anew(beside))
            subject, prepared = Subject(place, copy, replica, generation, fresh, runs), NOTHING
            for step in self._steps:
                if step.wanted(subject.template):
                    prepared = prepared.joined(await step.prepare(subject, beside if fresh else room, making.tell))
            if fresh:
                await self._world.carrier.publish(beside, room)
            making.said, making.prepared = "", prepared
        except WorldError as error:
            making.said, making.failed = "", f"{error.cause}; {error.cure}"
            await self._world.offload(lambda: self._world.disk.remove_tree(beside))

    def forget(self, copy: Copy) -> None:
        for step in self._steps:
            step.forget(copy)

    async def clear(self, works: Sequence[Path], known: Collection[str]) -> None:
        """Of what the keeper does not know any more nothing is left: whoever should have removed it was killed before."""
        disk, offload = self._world.disk, self._world.offload
        for work in dict.fromkeys(works):
            with suppress(DiskError):
                for name in await offload(partial(disk.list, work)):
                    if name not in known:
                        await offload(partial(disk.remove_tree, work / name))
        for step in self._steps:
            step.forget_all_but(known)

    async def abandon(self, place: Place, copy: Copy) -> None:
        """Of what was prepared and never begun nothing is left."""
        self.forget(copy)
        room = place.directory(copy)
        with suppress(DiskError):
            for path in (room.with_name(room.name + MAKING), room):
                await self._world.offload(partial(self._world.disk.remove_tree, path))

    def _make_anew(self, room: Path) -> None:
        self._world.disk.remove_tree(room)
        self._world.disk.make_directory(room, durably=False)
