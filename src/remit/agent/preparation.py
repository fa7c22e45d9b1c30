"""Preparation of an attempt before its start: step framework, secret and config delivery.

Gathered in its room, step by step; the order itself is work.py's.

Preparing comes between the committed `start` and the keeper's order, and is a part of `starting`: how far it is, is told with
every beat. A room is made under another name and gets its own once it is whole, so a copy's directory is there with all that
belongs in it or not at all, whoever was killed meanwhile. Work that asks for nothing never comes by here.

A step of its preparing: asked for when it starts, kept in memory, gone with it.

Files lie in a vault of the machine's memory (world/files/secret_files.py), and the copy's directory leads there; variables
travel in the order. Neither is written to a disk, to the keeper's journal or into a command: `$(NAME)` does not stand for
what is secret. A start reads what is there at that moment. While something is missing the copy waits, says for what, and goes
on when it comes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, Protocol

from remit.agent.attempts import Copy
from remit.agent.run_spec import HOME, NOTHING, RESERVED, Place, Prepared, is_sandboxed, user_of
from remit.client.rpc import Source
from remit.model.claims import Actor
from remit.model.kinds import Mount, Template
from remit.model.metadata import ENV_NAME
from remit.model.records import GenerationSpec, Replica
from remit.model.wire.agent_messages import Material, MaterialOf
from remit.world.files.secret_files import Vault
from remit.world.interfaces import DiskError, LinkError, Mounted, World, WorldError

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


WAIT_MS: Final = 300_000
"""For so long what is missing is waited for; then the attempt has failed, and another may begin elsewhere."""

LOOK_MS: Final = 250
LOOK_MS_MAX: Final = 5_000
SILENT: Final = "nobody answers who has what it reads"


class Delivered(NamedTuple):
    """What one copy reads: files by their path, and variables, the secret ones apart."""

    files: dict[PurePosixPath, bytes]
    env: dict[str, str]
    hidden: dict[str, str]

    def __repr__(self) -> str:
        return f"Delivered({len(self.files)} files, {len(self.env) + len(self.hidden)} variables)"


class Delivering:
    """Satisfies `preparing.Step`. `speaks`, set by whoever builds it: as whom this agent speaks for a node now, if it may."""

    def __init__(self, world: World, source: Source, vault: Vault) -> None:
        self._world, self._source, self._vault = world, source, vault
        self.speaks: Callable[[str], Actor | None] = lambda _: None
        self._held: set[str] = set()
        """Whose files the vault may have: of all others there is nothing to forget."""

    def wanted(self, template: Template, /) -> bool:
        return bool(template.secrets or template.configs)

    async def prepare(self, subject: Subject, room: Path, tell: Tell, /) -> Prepared:
        template, name = subject.template, subject.copy.file_name
        delivered = read(template, await self._material(subject, tell))
        if not delivered.files:
            return Prepared(env=delivered.env, hidden=delivered.hidden)
        if not (subject.runs and self._vault.has(name)):  # what runs keeps what it was started with
            self._held.add(name)
            await self._world.offload(partial(self._vault.put, name, delivered.files, subject.user))
        mounts = await self._lead(subject, room, self._vault.place(name))
        return Prepared(delivered.env, mounts, hidden=delivered.hidden)

    def forget(self, copy: Copy, /) -> None:
        if copy.file_name in self._held:
            self._held.discard(copy.file_name)
            with suppress(DiskError):  # it is tried again by the next agent
                self._vault.remove(copy.file_name)

    def forget_all_but(self, known: Collection[str], /) -> None:
        for name in self._vault.names():
            self._held.add(name)
            if name not in known:
                with suppress(DiskError):
                    self._vault.remove(name)

    async def _material(self, subject: Subject, tell: Tell) -> Material:
        """Once all of it is there. Raises `NotPrepared`."""
        until_ms, pause_ms, clock = self._world.clock.now_ms() + WAIT_MS, LOOK_MS, self._world.clock
        tell("asks for its secrets and configs")
        while True:
            actor = self.speaks(subject.place.node)
            if actor is None:
                why, cure = SILENT, "nothing to do: it is asked again once its node's lease is held"
            else:
                try:
                    found = await self._source(MaterialOf(actor, subject.copy.key, subject.copy.uid, subject.copy.attempt))
                    if not found.failed:
                        return found
                    why, cure = found.why, found.cure
                except LinkError as error:
                    why, cure = f"{SILENT} ({error.cause})", error.cure
            if clock.now_ms() >= until_ms:
                raise NotPrepared(why, cure)
            tell(f"waits, {(until_ms - clock.now_ms()) // 1000} s more: {why}; {cure}")
            await clock.sleep_ms(pause_ms)
            pause_ms = min(2 * pause_ms, LOOK_MS_MAX)

    async def _lead(self, subject: Subject, room: Path, place: Path) -> tuple[Mounted, ...]:
        """Where the copy finds its files: shown there by the sandbox, or by a link."""
        template, carrier = subject.template, self._world.carrier
        mounts: list[Mounted] = []
        for path in outermost(template):
            if path.is_absolute():
                mounts.append(Mounted(place / _inside(path), Path(path)))
            elif is_sandboxed(template, subject.place):
                home = HOME if template.rootfs is not None else subject.place.directory(subject.copy)
                if subject.fresh:
                    await carrier.make(room / path, below=room, user=subject.user)
                mounts.append(Mounted(place / path, home / path))
            elif subject.fresh:
                await carrier.lead(room / path, place / path, below=room)
        return tuple(mounts)


def read(template: Template, material: Material) -> Delivered:
    """What is to be put where. Raises `NotPrepared`, with the names of what is wrong and never its value."""
    delivered = Delivered({}, {}, {})
    for kind, mounts, given in (("secret", template.secrets, material.secrets), ("config", template.configs, material.configs)):
        for mount in mounts:
            if mount.name not in given:
                raise NotPrepared(f"the server has not told {kind} {mount.name}", "do both run the same version?")
            if mount.path:
                _put(delivered.files, kind, mount, given[mount.name])
            else:
                into = delivered.hidden if kind == "secret" else delivered.env
                into.update(_variables(kind, mount, given[mount.name]))
    return delivered


def _put(files: dict[PurePosixPath, bytes], kind: str, mount: Mount, data: Mapping[str, str]) -> None:
    for key, value in data.items():
        path = _inside(PurePosixPath(mount.path)) / key
        if path in files or any(one in files for one in path.parents) or any(path in one.parents for one in files):
            raise NotPrepared(f"{kind} {mount.name}: something else is at {path} too", "give one of them another path")
        files[path] = value.encode()


def _variables(kind: str, mount: Mount, data: Mapping[str, str]) -> dict[str, str]:
    for key in data:
        if not re.search(ENV_NAME, key) or key.startswith(RESERVED):
            cure = "name its keys as variables are, pick some with keys:, or give it a path"
            raise NotPrepared(f"{kind} {mount.name}: {key} cannot be a variable", cure)
    return dict(data)


def outermost(template: Template) -> Iterator[PurePosixPath]:
    """The directories that hold all files, none inside of another."""
    paths = sorted({PurePosixPath(one.path) for one in (*template.secrets, *template.configs) if one.path})
    for path in paths:
        if not any(one in path.parents for one in paths):
            yield path


def _inside(path: PurePosixPath) -> PurePosixPath:
    """Below the vault's directory of the copy; what is absolute lies apart from what is not."""
    return PurePosixPath(".root", *path.parts[1:]) if path.is_absolute() else path
