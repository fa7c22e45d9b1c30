"""Node drain within disruption budgets, and evictions in flight shared with rollouts.

One list for all who may ask it of what is ready. No decisions here.

Nodes that drain and rollouts each spare what a workload can do without. Two that look at the same moment would each spare the
last one: so what was asked of one replica counts at once for everybody in this process.

Within what each workload can spare; past the deadline it is said who holds it.

What was asked to go and is still seen as it was counts as gone (leaving.py): two nodes that drain at once must not each spare
the last one. `minAvailable` is kept by what is ready (of a job: by what runs); what is not ready is nothing to wait for.

The deadline counts from when this process first saw the node drain, on its own clock.
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
    """A listener of the board: once a replica is seen to change, what was asked of it is over."""

    def __init__(self, board: Board) -> None:
        self._asked: dict[str, int] = {}
        """By replica: at which revision it was asked to go."""
        board.subscribe(self)

    def changed(self, key: str, old: Any, new: Any) -> None:
        self._asked.pop(key, None)

    def reached(self) -> None:
        pass

    def ask(self, one: Kept) -> None:
        self._asked[one.key] = one.revision

    def heard(self, replica: str, verdict: Verdict | None) -> None:
        """What came of it. Until an accepted one is seen it counts."""
        if not isinstance(verdict, Accepted):
            self._asked.pop(replica, None)

    def stays(self, one: Kept) -> bool:
        return self._asked.get(one.key) != one.revision


AT_ONCE: Final = 32
"""So many may be leaving a node at a time: a drain is not an outage."""

NAMED_MAX: Final = 5
_LEAVES: Final = (Phase.DRAINING, Phase.STOPPING)
OFF_NODE: Final = (Phase.PENDING, Phase.RELEASED)


class Draining:
    """Part of the controller of nodes: it has no keys of its own."""

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
                    yield self.evict(one, "the node drains")
            else:
                held.append(f"{one.thing.metadata.tenant}/{one.thing.metadata.name}")
        if left_ms > 0:
            yield Again(left_ms)
            yield from say(node, "Drained", "False", "Draining", "", times.wall)
        else:
            yield from say(node, "Drained", "False", "DeadlinePassed", _named(held, here), times.wall)

    def _spares(self, one: Kept) -> bool:
        """Can its workload do without it just now?"""
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
    """Who holds it: those that cannot be spared, or else those that do not end."""
    if held:
        names, why = held, "cannot be spared"
    else:
        names, why = [f"{one.thing.metadata.tenant}/{one.thing.metadata.name}" for one in here], "have not ended"
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{', '.join(sorted(names)[:NAMED_MAX])}{more} {why}"
