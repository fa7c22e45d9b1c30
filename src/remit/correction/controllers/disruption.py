"""Node drain and eviction within `minAvailable`, and the list of evictions in flight that drains and rollouts share.

Drains and rollouts both remove replicas that a workload can spare. Two of them deciding at the same moment could each take
the last spare replica. So a replica that was asked to leave, and is not yet seen to change, counts as gone for both.

`minAvailable` counts ready replicas (for a job: running ones). A replica that is not ready can always be evicted. When the
drain deadline has passed, the node's `Drained` condition names the replicas that block it. The deadline counts from when
this process first saw the node drain, on its own clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from remit.correction.controllers.desired_replicas import RUNNING_PHASES, available
from remit.correction.framework.actions import Action, ReconcileResult, RequeueAfter, update_condition
from remit.correction.framework.loop import ReconcileTime
from remit.law.workload_rules import condition_of
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

    def add(self, row: CachedRow) -> None:
        self._evicting[row.key] = row.revision

    def on_verdict(self, replica: str, verdict: Verdict | None) -> None:
        """Drop the eviction unless it was accepted. An accepted one counts until its effect is seen."""
        if not isinstance(verdict, Accepted):
            self._evicting.pop(replica, None)

    def is_staying(self, row: CachedRow) -> bool:
        return self._evicting.get(row.key) != row.revision


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

    def evict(self, row: CachedRow, reason: str) -> Action:
        self._evictions.add(row)
        return Action(Move(row.key, row.revision, "evict", reason=reason))

    def reconcile(self, node: Node, time: ReconcileTime) -> Iterator[ReconcileResult]:
        name = node.metadata.name
        if not node.spec.draining:
            self._draining_since.pop(name, None)
            if condition_of(node.status.conditions, "Drained") is not None:
                yield from update_condition(node, "Drained", "False", "InService", "", time.wall)
            return
        rows = [row for row in self._cache.replicas_on(name) if row.obj.status.phase not in OFF_NODE_PHASES]
        remaining_ms = self._draining_since.setdefault(name, time.now_ms) + int(node.spec.drain_deadline) - time.now_ms
        if not rows:
            yield from update_condition(node, "Drained", "True", "Empty", "", time.wall)
            return
        evictions_left = NODE_EVICTIONS_MAX - sum(row.obj.status.phase in _LEAVING_PHASES for row in rows)
        blocked: list[str] = []
        for row in rows:
            if row.obj.status.phase not in RUNNING_PHASES:
                continue
            if (remaining_ms <= 0 and node.spec.drain_force) or self._can_spare(row):
                evictions_left -= 1
                if evictions_left >= 0:
                    yield self.evict(row, f"node {name} is being drained")
            else:
                blocked.append(f"{row.obj.metadata.tenant}/{row.obj.metadata.name}")
        if remaining_ms > 0:
            yield RequeueAfter(remaining_ms)
            yield from update_condition(node, "Drained", "False", "Draining", "", time.wall)
        else:
            yield from update_condition(node, "Drained", "False", "DeadlinePassed", _blockers_message(blocked, rows), time.wall)

    def _can_spare(self, row: CachedRow) -> bool:
        """Return whether the workload can spare this replica now."""
        replica: Replica = row.obj
        meta, spec = replica.metadata, replica.spec
        workload: Workload | None = self._cache.get(f"workload/{meta.tenant}/{spec.workload}")
        if workload is None or workload.metadata.deleting or not workload.spec.disruption.min_available:
            return True
        members = self._cache.replicas_of(meta.tenant, spec.workload)
        available_rows = [other for other in available(workload, members) if self._evictions.is_staying(other)]
        if all(other.key != row.key for other in available_rows):
            return True
        return len(available_rows) > workload.spec.disruption.min_available


def _blockers_message(blocked: list[str], rows: list[CachedRow]) -> str:
    """Name the replicas that block the drain: those that cannot be spared, else those that have not stopped."""
    if blocked:
        names, problem = (
            blocked,
            (
                "cannot be evicted: its eviction would leave its workload with fewer than minAvailable replicas"
                if len(blocked) == 1
                else "cannot be evicted: their eviction would leave their workloads with fewer than minAvailable replicas"
            ),
        )
    else:
        names, problem = (
            [f"{row.obj.metadata.tenant}/{row.obj.metadata.name}" for row in rows],
            "has not stopped yet" if len(rows) == 1 else "have not stopped yet",
        )
    more = f" and {len(names) - BLOCKERS_NAMED_MAX} more" if len(names) > BLOCKERS_NAMED_MAX else ""
    return f"{', '.join(sorted(names)[:BLOCKERS_NAMED_MAX])}{more} {problem}"
