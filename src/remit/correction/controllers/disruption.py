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

from remit.correction.controllers.desired_replicas import RUNNING_PHASES, available, condition_of
from remit.correction.framework.actions import Action, ReconcileResult, RequeueAfter, update_condition
from remit.correction.framework.loop import ReconcileTime
from remit.model.claims import Accepted, Move, Verdict
from remit.model.kinds import Node, Workload
from remit.model.records import Phase, Replica
from remit.observation.watch_cache import CachedRow, WatchCache


class PendingEvictions:
    """Evictions in flight. Listens to the watch cache: an eviction is over once its replica is seen to change."""

    def __init__(self, cache: WatchCache) -> None:
        self._evicting: dict[str, int] = {}
        """By replica: the revision at which it was asked to leave."""
        cache.subscribe(self)

    def on_change(self, key: str, old: Any, new: Any) -> None:
        self._evicting.pop(key, None)

    def on_commit(self) -> None:
        pass

    def add(self, one: CachedRow) -> None:
        self._evicting[one.key] = one.revision

    def on_verdict(self, replica: str, verdict: Verdict | None) -> None:
        """Drop the eviction unless it was accepted. An accepted one counts until its effect is seen."""
        if not isinstance(verdict, Accepted):
            self._evicting.pop(replica, None)

    def is_staying(self, one: CachedRow) -> bool:
        return self._evicting.get(one.key) != one.revision


NODE_EVICTIONS_MAX: Final = 32
"""Maximum number of replicas leaving one node at a time, so that a drain does not become an outage."""

BLOCKERS_NAMED_MAX: Final = 5
_LEAVING_PHASES: Final = (Phase.DRAINING, Phase.STOPPING)
OFF_NODE_PHASES: Final = (Phase.PENDING, Phase.RELEASED)


class NodeDrain:
    """Drain logic of the node controller. It has no keys of its own."""

    def __init__(self, cache: WatchCache, evictions: PendingEvictions) -> None:
        self._cache, self._evictions = cache, evictions
        self._draining_since: dict[str, int] = {}
        """By node: when it was first seen to drain."""

    def forget_node(self, node: str) -> None:
        self._draining_since.pop(node, None)

    def evict(self, one: CachedRow, reason: str) -> Action:
        self._evictions.add(one)
        return Action(Move(one.key, one.revision, "evict", reason=reason))

    def reconcile(self, node: Node, times: ReconcileTime) -> Iterator[ReconcileResult]:
        name = node.metadata.name
        if not node.spec.draining:
            self._draining_since.pop(name, None)
            if condition_of(node.status.conditions, "Drained") is not None:
                yield from update_condition(node, "Drained", "False", "InService", "", times.wall)
            return
        here = [one for one in self._cache.replicas_on(name) if one.obj.status.phase not in OFF_NODE_PHASES]
        left_ms = self._draining_since.setdefault(name, times.now_ms) + int(node.spec.drain_deadline) - times.now_ms
        if not here:
            yield from update_condition(node, "Drained", "True", "Empty", "", times.wall)
            return
        room = NODE_EVICTIONS_MAX - sum(one.obj.status.phase in _LEAVING_PHASES for one in here)
        held: list[str] = []
        for one in here:
            if one.obj.status.phase not in RUNNING_PHASES:
                continue
            if (left_ms <= 0 and node.spec.drain_force) or self._can_spare(one):
                room -= 1
                if room >= 0:
                    yield self.evict(one, f"node {name} is being drained")
            else:
                held.append(f"{one.obj.metadata.tenant}/{one.obj.metadata.name}")
        if left_ms > 0:
            yield RequeueAfter(left_ms)
            yield from update_condition(node, "Drained", "False", "Draining", "", times.wall)
        else:
            yield from update_condition(node, "Drained", "False", "DeadlinePassed", _blockers_message(held, here), times.wall)

    def _can_spare(self, one: CachedRow) -> bool:
        """Return whether the workload can spare this replica now."""
        replica: Replica = one.obj
        meta, spec = replica.metadata, replica.spec
        workload: Workload | None = self._cache.get(f"workload/{meta.tenant}/{spec.workload}")
        if workload is None or workload.metadata.deleting or not workload.spec.disruption.min_available:
            return True
        members = self._cache.replicas_of(meta.tenant, spec.workload)
        up = [other for other in available(workload, members) if self._evictions.is_staying(other)]
        if all(other.key != one.key for other in up):
            return True
        return len(up) > workload.spec.disruption.min_available


def _blockers_message(held: list[str], here: list[CachedRow]) -> str:
    """Name the replicas that block the drain: those that cannot be spared, else those that have not stopped."""
    if held:
        names, why = held, "cannot be evicted: minAvailable of their workloads would be violated"
    else:
        names, why = [f"{one.obj.metadata.tenant}/{one.obj.metadata.name}" for one in here], "have not stopped yet"
    more = f" and {len(names) - BLOCKERS_NAMED_MAX} more" if len(names) > BLOCKERS_NAMED_MAX else ""
    return f"{', '.join(sorted(names)[:BLOCKERS_NAMED_MAX])}{more} {why}"
