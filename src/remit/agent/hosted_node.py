"""What the agent tracks per hosted node: reconciler, lease, writes not yet visible, last lease epoch.

Its mind, its lease, what its keeper has; nothing is done here.

Only then does its keeper know all that may run there. One small file.

A lease's epoch grows by one each time that it is acquired. So whoever wrote down the one before has missed nobody in between;
and whoever cannot tell, since its data was lost or another machine had its name, must not say that nothing runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from remit.agent.attempts import Copy
from remit.agent.keeper.protocol import Begun
from remit.agent.reconciler import Mind
from remit.agent.run_spec import Place
from remit.client.lease_holder import Tenure
from remit.law.timing import Tempo
from remit.model.claims import Role
from remit.model.kinds import Node
from remit.world.interfaces import DiskError, Missing, World

ALL: Final = ""
"""Stands for the keys of all replicas of a node."""


class Hosted(NamedTuple):
    """A node of this agent: as it declares itself, and where what belongs to its work is kept."""

    node: Node
    place: Place


class Site:
    """What goes on at one node. Without a `node` to declare it is one that was hosted here once: what is left of it ends."""

    def __init__(self, place: Place, tempo: Tempo, node: Node | None) -> None:
        self.name, self.node, self.place = place.node, node, place
        self.lease = f"{Role.AGENT}/{self.name}"
        self.mind = Mind(self.name, tempo)
        self.tenure: Tenure | None = None
        self.kept: dict[Copy, Begun] = {}
        self.settled = ""
        self._due_ms = {ALL: 0}
        """When there is something to see of a replica, by its key; `ALL`: of all of them."""

    def touch(self, key: str, at_ms: int) -> None:
        self._due_ms[key] = min(at_ms, self._due_ms.get(key, at_ms))

    def due_ms(self) -> int | None:
        return min(self._due_ms.values(), default=None)

    def take_due(self, now_ms: int) -> dict[str, None] | None:
        """At whom to look now; None: at everybody. That serves whoever was to be looked at later, too."""
        if self._due_ms.get(ALL, now_ms + 1) <= now_ms:
            self._due_ms.clear()
            return None
        keys = [key for key, at_ms in self._due_ms.items() if at_ms <= now_ms]
        for key in keys:
            del self._due_ms[key]
        return dict.fromkeys(keys)

    def may_act(self, now_ms: int) -> bool:
        return self.tenure is not None and self.tenure.may_act(now_ms)


class Awaited:
    """Which replicas' last move the orders do not show yet, and at which revision they will."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[int, str]] = {}

    def add(self, key: str, node: str, revision: int) -> None:
        self._at[key] = revision, node

    def is_ahead(self, key: str, revision: int) -> bool:
        return self._at.get(key, (0, ""))[0] > revision

    def pop_reached(self, revision: int) -> dict[str, str]:
        """Which, and on which nodes they are."""
        reached = {key: node for key, (at, node) in self._at.items() if at <= revision}
        for key in reached:
            del self._at[key]
        return reached

    def clear(self) -> None:
        """Another store tells from now on: its revisions are no later or earlier than those before."""
        self._at.clear()


_epochs: msgspec.json.Decoder[dict[str, int]] = msgspec.json.Decoder(dict[str, int])


class Continuity:
    """`path`: where the epochs are written down. Without one everything is taken to follow."""

    def __init__(self, world: World, path: Path | None) -> None:
        self._world, self._path = world, path
        self._known: dict[str, int] | None = None

    async def took_over(self, epochs: Mapping[str, int]) -> frozenset[str]:
        """These nodes' leases were acquired at these epochs. Of which is it known that nobody else held them since?"""
        path = self._path
        if path is None or not epochs:
            return frozenset(epochs)
        if self._known is None:
            self._known = await self._world.offload(lambda: _read(self._world, path))
        follows = frozenset(node for node, epoch in epochs.items() if self._known.get(node, 0) == epoch - 1)
        self._known |= epochs
        data = msgspec.json.encode(self._known, order="sorted")
        with suppress(DiskError):  # then the next one to start here cannot tell, and waits
            await self._world.offload(lambda: self._world.disk.write_atomically(path, data))
        return follows


def _read(world: World, path: Path) -> dict[str, int]:
    try:
        world.disk.make_directory(path.parent)
        return _epochs.decode(world.disk.read(path))
    except (Missing, DiskError, msgspec.DecodeError):
        return {}
