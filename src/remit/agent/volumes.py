"""Preparation step: scratch and host-path volumes, with size enforcement.

A step of its preparing: directories of its room, and those the node lends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from remit.agent.assignments import Assigned
from remit.agent.attempts import SCRATCH_FULL, Copy
from remit.agent.hosted_node import Site
from remit.agent.keeper.protocol import Keeping
from remit.agent.preparation import NotPrepared, Subject, Tell
from remit.agent.run_spec import HOME, NOTHING, Place, Prepared, is_sandboxed
from remit.law.timing import Tempo
from remit.model.artifacts import HostPath, Volume
from remit.model.kinds import Template
from remit.world.interfaces import LinkError, Mounted, World

KEPT: Final = ".volumes"
"""In a room: what is shown elsewhere under a root of its own."""


LOOK_BEATS: Final = 5
"""So often it is looked at how much scratch volumes hold."""


class Volumes:
    """Satisfies `preparing.Step`. `lent`: directories of the machine that work may have, where a policy permits it too."""

    def __init__(self, world: World, lent: tuple[Path, ...]) -> None:
        self._world, self._lent = world, lent

    def wanted(self, template: Template, /) -> bool:
        return bool(template.volumes)

    async def prepare(self, subject: Subject, room: Path, tell: Tell, /) -> Prepared:
        prepared = NOTHING
        for volume in subject.template.volumes:
            if volume.host is None:
                prepared = prepared.joined(await self._scratch(subject, volume, room))
            else:
                prepared = prepared.joined(await self._host(subject, volume, volume.host, room))
        return prepared

    def forget(self, copy: Copy, /) -> None:
        pass

    def forget_all_but(self, known: Collection[str], /) -> None:
        pass

    async def _scratch(self, subject: Subject, volume: Volume, room: Path) -> Prepared:
        inside = scratch_path(volume)
        if subject.fresh:
            await self._world.carrier.make(room / inside, below=room, user=subject.user)
        if not PurePosixPath(volume.path).is_absolute():
            return NOTHING
        there = subject.place.directory(subject.copy) / inside
        return Prepared(mounts=(Mounted(there, Path(volume.path), writable=True),))

    async def _host(self, subject: Subject, volume: Volume, host: HostPath, room: Path) -> Prepared:
        found = await self._world.carrier.stands(Path(host.path), self._lent)
        if found is None:
            cure = "start its agent with --host-path and that directory, or use one that is lent"
            raise NotPrepared(f"{host.path} is no directory that this node lends", cure)
        path = PurePosixPath(volume.path)
        if is_sandboxed(subject.template, subject.place):
            home = HOME if subject.template.rootfs is not None else subject.place.directory(subject.copy)
            if subject.fresh and not path.is_absolute():
                await self._world.carrier.make(room / path, below=room, user=subject.user)
            return Prepared(mounts=(Mounted(found, home / path, writable=not host.read_only),))
        if host.read_only:
            cure = "write readOnly: false, or keep this work to nodes that have bubblewrap"
            raise NotPrepared(f"nothing holds it to reading {host.path} without a sandbox", cure)
        if subject.fresh:
            await self._world.carrier.lead(room / path, found, below=room)
        return NOTHING


def scratch_path(volume: Volume) -> PurePosixPath:
    """Where it is in the copy's directory."""
    path = PurePosixPath(volume.path)
    return PurePosixPath(KEPT) / volume.name if path.is_absolute() else path


async def hold_scratch(world: World, keeping: Keeping, orders: Assigned, sites: Mapping[str, Site], tempo: Tempo) -> None:
    """For ever: end what keeps more in a scratch volume than it may."""
    while True:
        await world.clock.sleep_ms(LOOK_BEATS * tempo.beat_ms)
        for site in tuple(sites.values()):
            for copy in tuple(site.mind.making):
                kept, order = site.kept.get(copy), orders.get(copy.key)
                generation = None if order is None else orders.spec_of(order.replica)
                if kept is None or not kept.alive or generation is None:
                    continue
                template = generation.spec.template
                if await _is_overfull(world, site.place, copy, template):
                    with suppress(LinkError):
                        await keeping.halt(copy, int(template.stop_grace), SCRATCH_FULL)


async def _is_overfull(world: World, place: Place, copy: Copy, template: Template) -> bool:
    """Does it keep more in one of its scratch volumes than that may hold?"""
    room = place.directory(copy)
    for one in template.volumes:
        most = one.scratch.bytes_max if one.scratch is not None else 0
        if most and await world.carrier.size(room / scratch_path(one)) > most:
            return True
    return False
