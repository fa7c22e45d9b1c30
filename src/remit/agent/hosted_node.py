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
from remit.model.kinds import Node
from remit.model.roles import Role
from remit.world.interfaces import DiskError, FileMissing, World

ALL_KEYS: Final = ""
"""Used in place of a replica key for all replicas of a node."""


class HostedNodeSpec(NamedTuple):
    """A node that this agent hosts: the Node object it registers, and the settings its processes are started with."""

    node: Node
    settings: NodeSettings


class HostedNode:
    """State of one hosted node. `node` is None for a node that was hosted here earlier and whose remaining processes are
    stopped.
    """

    def __init__(self, settings: NodeSettings, timing: Timing, node: Node | None) -> None:
        self.name, self.node, self.settings = settings.node, node, settings
        self.lease_name = f"{Role.AGENT}/{self.name}"
        self.reconciler = NodeReconciler(self.name, timing)
        self.lease_hold: LeaseHold | None = None
        self.records: dict[AttemptId, ProcessRecord] = {}
        self.settled_incarnation = ""
        self._next_run_ms = {ALL_KEYS: 0}
        """When each replica has to be reconciled next, by key; the key `ALL_KEYS` is the whole node."""

    def enqueue(self, key: str, at_ms: int) -> None:
        self._next_run_ms[key] = min(at_ms, self._next_run_ms.get(key, at_ms))

    def next_run_ms(self) -> int | None:
        return min(self._next_run_ms.values(), default=None)

    def pop_due(self, now_ms: int) -> dict[str, None] | None:
        """Remove and return the keys that are due; None: all of them. A full reconcile also covers keys that are due later."""
        if self._next_run_ms.get(ALL_KEYS, now_ms + 1) <= now_ms:
            self._next_run_ms.clear()
            return None
        keys = [key for key, at_ms in self._next_run_ms.items() if at_ms <= now_ms]
        for key in keys:
            del self._next_run_ms[key]
        return dict.fromkeys(keys)

    def holds_lease(self, now_ms: int) -> bool:
        return self.lease_hold is not None and self.lease_hold.is_valid(now_ms)


class UnconfirmedWrites:
    """Accepted claims that the assignments do not show yet, with the revision at which they will."""

    def __init__(self) -> None:
        self._writes: dict[str, tuple[int, str]] = {}

    def add(self, key: str, node: str, revision: int) -> None:
        self._writes[key] = revision, node

    def is_unconfirmed(self, key: str, revision: int) -> bool:
        return self._writes.get(key, (0, ""))[0] > revision

    def pop_confirmed(self, revision: int) -> dict[str, str]:
        """Remove the writes that are visible at `revision`. Returns their keys and nodes."""
        confirmed = {key: node for key, (at, node) in self._writes.items() if at <= revision}
        for key in confirmed:
            del self._writes[key]
        return confirmed

    def clear(self) -> None:
        """Forget all writes. Called when a different store takes over, whose revisions cannot be compared with the old ones."""
        self._writes.clear()


_epochs_decoder: msgspec.json.Decoder[dict[str, int]] = msgspec.json.Decoder(dict[str, int])


class LeaseContinuity:
    """Tells whether another agent held a node's lease since this data directory last did: then the epoch has increased by more
    than one. The epochs are stored in `path`. Without a path, every acquisition counts as continuous.
    """

    def __init__(self, world: World, path: Path | None) -> None:
        self._world, self._path = world, path
        self._known: dict[str, int] | None = None

    async def record_acquired(self, epochs: Mapping[str, int]) -> frozenset[str]:
        """Record the epochs at which leases were acquired. Returns the nodes whose lease no other agent held since the recorded
        one.
        """
        path = self._path
        if path is None or not epochs:
            return frozenset(epochs)
        if self._known is None:
            self._known = await self._world.offload(lambda: _read_epochs(self._world, path))
        continuous = frozenset(node for node, epoch in epochs.items() if self._known.get(node, 0) == epoch - 1)
        self._known |= epochs
        data = msgspec.json.encode(self._known, order="sorted")
        # After a failed write the next agent on this directory cannot prove continuity, and waits for fences instead.
        with suppress(DiskError):
            await self._world.offload(lambda: self._world.disk.write_atomically(path, data))
        return continuous


def _read_epochs(world: World, path: Path) -> dict[str, int]:
    try:
        world.disk.make_directory(path.parent)
        return _epochs_decoder.decode(world.disk.read(path))
    except (FileMissing, DiskError, msgspec.DecodeError):
        return {}
