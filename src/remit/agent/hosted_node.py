"""State of each hosted node in the agent: reconciler, lease, writes not yet visible, last lease epoch.

Plain state: the agent (agent.py) and the heartbeat sender (heartbeat.py) act on it.

The lease epoch grows by one with each acquisition. An agent whose data directory holds the previous epoch therefore knows
that no other agent held the node in between, and that its keeper's table lists all processes of the node. If the data was
lost, or another machine used the node's name, the agent cannot know this and must not report that nothing runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from remit.agent.attempts import AttemptId
from remit.agent.keeper.protocol import ProcessRecord
from remit.agent.reconciler import NodeReconciler
from remit.agent.run_spec import NodeSettings
from remit.client.lease_holder import LeaseHold
from remit.law.timing import Timing
from remit.model.claims import Role
from remit.model.kinds import Node
from remit.world.interfaces import DiskError, Missing, World

ALL_KEYS: Final = ""
"""Used in place of a replica key for all replicas of a node."""


class HostedNodeSpec(NamedTuple):
    """A node that this agent hosts: the Node object it registers, and the settings its processes are started with."""

    node: Node
    place: NodeSettings


class HostedNode:
    """State of one hosted node. `node` is None for a node that was hosted here earlier and whose remaining processes are
    stopped.
    """

    def __init__(self, place: NodeSettings, tempo: Timing, node: Node | None) -> None:
        self.name, self.node, self.place = place.node, node, place
        self.lease = f"{Role.AGENT}/{self.name}"
        self.mind = NodeReconciler(self.name, tempo)
        self.tenure: LeaseHold | None = None
        self.kept: dict[AttemptId, ProcessRecord] = {}
        self.settled = ""
        self._due_ms = {ALL_KEYS: 0}
        """When each replica has to be reconciled next, by key; the key `ALL_KEYS` is the whole node."""

    def touch(self, key: str, at_ms: int) -> None:
        self._due_ms[key] = min(at_ms, self._due_ms.get(key, at_ms))

    def due_ms(self) -> int | None:
        return min(self._due_ms.values(), default=None)

    def take_due(self, now_ms: int) -> dict[str, None] | None:
        """Remove and return the keys that are due; None: all of them. A full reconcile also covers keys that are due later."""
        if self._due_ms.get(ALL_KEYS, now_ms + 1) <= now_ms:
            self._due_ms.clear()
            return None
        keys = [key for key, at_ms in self._due_ms.items() if at_ms <= now_ms]
        for key in keys:
            del self._due_ms[key]
        return dict.fromkeys(keys)

    def may_act(self, now_ms: int) -> bool:
        return self.tenure is not None and self.tenure.is_valid(now_ms)


class UnconfirmedWrites:
    """Accepted claims that the assignments do not show yet, with the revision at which they will."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[int, str]] = {}

    def add(self, key: str, node: str, revision: int) -> None:
        self._at[key] = revision, node

    def is_ahead(self, key: str, revision: int) -> bool:
        return self._at.get(key, (0, ""))[0] > revision

    def pop_reached(self, revision: int) -> dict[str, str]:
        """Remove the writes that are visible at `revision`. Returns their keys and nodes."""
        reached = {key: node for key, (at, node) in self._at.items() if at <= revision}
        for key in reached:
            del self._at[key]
        return reached

    def clear(self) -> None:
        """Forget all writes. Called when a different store takes over, whose revisions cannot be compared with the old ones."""
        self._at.clear()


_epochs_decoder: msgspec.json.Decoder[dict[str, int]] = msgspec.json.Decoder(dict[str, int])


class LeaseContinuity:
    """Persists the lease epochs in `path`. Without a path, every acquisition counts as continuous."""

    def __init__(self, world: World, path: Path | None) -> None:
        self._world, self._path = world, path
        self._known: dict[str, int] | None = None

    async def took_over(self, epochs: Mapping[str, int]) -> frozenset[str]:
        """Record the epochs at which leases were acquired. Returns the nodes whose lease no other agent held since the recorded
        one.
        """
        path = self._path
        if path is None or not epochs:
            return frozenset(epochs)
        if self._known is None:
            self._known = await self._world.offload(lambda: _read_epochs(self._world, path))
        follows = frozenset(node for node, epoch in epochs.items() if self._known.get(node, 0) == epoch - 1)
        self._known |= epochs
        data = msgspec.json.encode(self._known, order="sorted")
        # After a failed write the next agent on this directory cannot prove continuity, and waits for fences instead.
        with suppress(DiskError):
            await self._world.offload(lambda: self._world.disk.write_atomically(path, data))
        return follows


def _read_epochs(world: World, path: Path) -> dict[str, int]:
    try:
        world.disk.make_directory(path.parent)
        return _epochs_decoder.decode(world.disk.read(path))
    except (Missing, DiskError, msgspec.DecodeError):
        return {}
