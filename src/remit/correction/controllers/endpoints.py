"""Publishes ready service replicas as endpoints, and withdraws those on unhealthy nodes.

A replica that its agent reports as ready is published (`serving`). It is withdrawn only if its node is suspect, unknown or
lost, and never if it is the last published one of its service: silence is no proof of failure, and an endpoint that may be
dead is better than none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from remit.correction.framework.actions import Action, ControllerPermissions, ReconcileResult
from remit.correction.framework.loop import Controller, ReconcileTime
from remit.model.claims import Move
from remit.model.kinds import Node, NodeHealth, Workload
from remit.model.records import Phase, Replica
from remit.model.roles import Role
from remit.observation.watch_cache import WatchCache

_PUBLISHABLE_PHASES = (Phase.READY, Phase.SERVING)
_UNHEALTHY = (NodeHealth.SUSPECT, NodeHealth.UNKNOWN, NodeHealth.LOST)


class EndpointController(Controller):
    """The endpoint controller. Keys: replicas."""

    permissions = ControllerPermissions(Role.ENDPOINTS, transitions=("serve", "unserve"))

    def __init__(self, cache: WatchCache) -> None:
        super().__init__(cache)
        self._triggers: dict[str, int] = {}
        """By replica: a number that changes with every new reason to publish or withdraw it, so that the undo detector does not
        count legitimate repetitions.
        """

    def keys_for(self, key: str, old: Any, new: Any) -> Iterable[str]:
        if isinstance(new, Node) or isinstance(old, Node):
            health_changed = old is None or new is None or old.status.health is not new.status.health
            replicas = self.cache.by_node.get(key.removeprefix("node/"), {}) if health_changed else {}
            keys = tuple(
                replica_key for replica_key in replicas if self.cache.rows[replica_key].obj.status.phase in _PUBLISHABLE_PHASES
            )
            for replica_key in keys:
                self._triggers[replica_key] = self._triggers.get(replica_key, 0) + 1
            return keys
        if not isinstance(new, Replica):
            self._triggers.pop(key, None)
            return ()
        if new.status.phase not in _PUBLISHABLE_PHASES:
            self._triggers.pop(key, None)
            return ()
        if old is None or old.status.phase not in _PUBLISHABLE_PHASES:
            self._triggers[key] = self.cache.revision
        return (key,)

    def all_keys(self) -> Iterable[str]:
        for phase in _PUBLISHABLE_PHASES:
            yield from tuple(self.cache.by_phase[phase])

    def reconcile(self, key: str, time: ReconcileTime) -> Iterator[ReconcileResult]:
        row = self.cache.rows.get(key)
        if row is None or row.obj.status.phase not in _PUBLISHABLE_PHASES:
            return
        replica: Replica = row.obj
        workload: Workload | None = self.cache.get(f"workload/{replica.metadata.tenant}/{replica.spec.workload}")
        if workload is None or workload.spec.type == "job":
            return
        node: Node | None = self.cache.get(f"node/{replica.status.node}")
        health = NodeHealth.LOST if node is None else node.status.health
        undo_suffix = f"{replica.metadata.uid} {replica.status.attempt} for trigger {self._triggers.get(key, 0)}"
        if replica.status.phase is Phase.READY and health is NodeHealth.READY:
            yield Action(Move(key, row.revision, "serve"), f"serve {undo_suffix}")
        elif replica.status.phase is Phase.SERVING and health in _UNHEALTHY and self._has_other_endpoint(replica):
            yield Action(
                Move(key, row.revision, "unserve", reason=f"node {replica.status.node} is {health}"), f"unserve {undo_suffix}"
            )

    def _has_other_endpoint(self, replica: Replica) -> bool:
        """Return whether another replica of the service is published on a ready node."""
        for row in self.cache.replicas_of(replica.metadata.tenant, replica.spec.workload):
            node: Node | None = self.cache.get(f"node/{row.obj.status.node}")
            ready = node is not None and node.status.health is NodeHealth.READY
            if row.obj.status.phase is Phase.SERVING and ready:
                return True
        return False
