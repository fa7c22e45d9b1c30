"""How do secrets and configs come to a copy? A step of its preparing: asked for when it starts, kept in memory, gone with it.

Files lie in a vault of the machine's memory (world/vault.py), and the copy's directory leads there; variables travel in the
order. Neither is written to a disk, to the keeper's journal or into a command: `$(NAME)` does not stand for what is secret. A
start reads what is there at that moment. While something is missing the copy waits, says for what, and goes on when it comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from remit.agent.copies import Copy
from remit.agent.preparing import NotPrepared, Subject, Tell
from remit.agent.work import HOME, RESERVED, Prepared, is_sandboxed
from remit.client.material import Source
from remit.model.claims import Actor
from remit.model.fields import ENV_NAME
from remit.model.kinds import Mount, Template
from remit.model.material import Material, MaterialOf
from remit.world.promises import DiskError, LinkError, Mounted, World
from remit.world.vault import Vault

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
