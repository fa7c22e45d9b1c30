"""Node drain within disruption budgets, and the list of evictions in flight that drains and rollouts share.

Drains and rollouts both remove replicas that a workload can spare. Two of them deciding at the same moment could each take
the last spare replica. So a replica that was asked to leave, and is not yet seen to change, counts as gone for both.

`minAvailable` counts ready replicas (for a job: running ones). A replica that is not ready can always be evicted. When the
drain deadline has passed, the node's `Drained` condition names the replicas that block it. The deadline counts from when
this process first saw the node drain, on its own clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from remit.correction.controllers.desired_replicas import RUNS, available, condition_of
from remit.correction.framework.actions import Again, Deed, Wish, say
from remit.correction.framework.loop import Times
from remit.model.claims import Accepted, Move, Verdict
from remit.model.kinds import Node, Workload
from remit.model.records import Phase, Replica
from remit.observation.watch_cache import Board, Kept


class Leaving:
    """Evictions in flight. Listens to the watch cache: an eviction is over once its replica is seen to change."""

    def __init__(self, board: Board) -> None:
        self._asked: dict[str, int] = {}
        """By replica: the revision at which it was asked to leave."""
        board.subscribe(self)

    def changed(self, key: str, old: Any, new: Any) -> None:
        self._asked.pop(key, None)

    def reached(self) -> None:
        pass

    def ask(self, one: Kept) -> None:
        self._asked[one.key] = one.revision

    def heard(self, replica: str, verdict: Verdict | None) -> None:
        """Drop the eviction unless it was accepted. An accepted one counts until its effect is seen."""
        if not isinstance(verdict, Accepted):
            self._asked.pop(replica, None)

    def stays(self, one: Kept) -> bool:
        return self._asked.get(one.key) != one.revision


AT_ONCE: Final = 32
"""Maximum number of replicas leaving one node at a time, so that a drain does not become an outage."""

NAMED_MAX: Final = 5
_LEAVES: Final = (Phase.DRAINING, Phase.STOPPING)
OFF_NODE: Final = (Phase.PENDING, Phase.RELEASED)


class Draining:
    """Drain logic of the node controller. It has no keys of its own."""

    def __init__(self, board: Board, leaving: Leaving) -> None:
        self._board, self._leaving = board, leaving
        self._since: dict[str, int] = {}
        """By node: when it was first seen to drain."""

    def gone(self, node: str) -> None:
        self._since.pop(node, None)

    def evict(self, one: Kept, reason: str) -> Deed:
        self._leaving.ask(one)
        return Deed(Move(one.key, one.revision, "evict", reason=reason))

    def reconcile(self, node: Node, times: Times) -> Iterator[Wish]:
        name = node.metadata.name
        if not node.spec.draining:
            self._since.pop(name, None)
            if condition_of(node.status.conditions, "Drained") is not None:
                yield from say(node, "Drained", "False", "InService", "", times.wall)
            return
        here = [one for one in self._board.on(name) if one.thing.status.phase not in OFF_NODE]
        left_ms = self._since.setdefault(name, times.now_ms) + int(node.spec.drain_deadline) - times.now_ms
        if not here:
            yield from say(node, "Drained", "True", "Empty", "", times.wall)
            return
        room = AT_ONCE - sum(one.thing.status.phase in _LEAVES for one in here)
        held: list[str] = []
        for one in here:
            if one.thing.status.phase not in RUNS:
                continue
            if (left_ms <= 0 and node.spec.drain_force) or self._spares(one):
                room -= 1
                if room >= 0:
                    yield self.evict(one, f"node {name} is being drained")
            else:
                held.append(f"{one.thing.metadata.tenant}/{one.thing.metadata.name}")
        if left_ms > 0:
            yield Again(left_ms)
            yield from say(node, "Drained", "False", "Draining", "", times.wall)
        else:
            yield from say(node, "Drained", "False", "DeadlinePassed", _named(held, here), times.wall)

    def _spares(self, one: Kept) -> bool:
        """Return whether the workload can spare this replica now."""
        replica: Replica = one.thing
        meta, spec = replica.metadata, replica.spec
        workload: Workload | None = self._board.get(f"workload/{meta.tenant}/{spec.workload}")
        if workload is None or workload.metadata.deleting or not workload.spec.disruption.min_available:
            return True
        members = self._board.of(meta.tenant, spec.workload)
        up = [other for other in available(workload, members) if self._leaving.stays(other)]
        if all(other.key != one.key for other in up):
            return True
        return len(up) > workload.spec.disruption.min_available


def _named(held: list[str], here: list[Kept]) -> str:
    """Name the replicas that block the drain: those that cannot be spared, else those that have not stopped."""
    if held:
        names, why = held, "cannot be evicted: minAvailable of their workloads would be violated"
    else:
        names, why = [f"{one.thing.metadata.tenant}/{one.thing.metadata.name}" for one in here], "have not stopped yet"
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{', '.join(sorted(names)[:NAMED_MAX])}{more} {why}"
