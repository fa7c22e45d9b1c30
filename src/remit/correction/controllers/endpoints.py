"""Publishes ready service replicas as endpoints, and withdraws those on unhealthy nodes.

A replica that its agent reports as ready is published (`serving`). It is withdrawn only if its node is suspect, unknown or
lost, and never if it is the last published one of its service: silence is no proof of failure, and an endpoint that may be
dead is better than none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from remit.correction.framework.actions import Deed, Remit, Wish
from remit.correction.framework.loop import Controller, Times
from remit.model.claims import Move, Role
from remit.model.kinds import Node, NodeHealth, Workload
from remit.model.records import Phase, Replica
from remit.observation.watch_cache import Board

_PUBLISHED = (Phase.READY, Phase.SERVING)
_DOUBTED = (NodeHealth.SUSPECT, NodeHealth.UNKNOWN, NodeHealth.LOST)


class Endpoints(Controller):
    """Keys: replicas."""

    remit = Remit(Role.ENDPOINTS, transitions=("serve", "unserve"))

    def __init__(self, board: Board) -> None:
        super().__init__(board)
        self._cause: dict[str, int] = {}
        """By replica: a number that changes with every new reason to publish or withdraw it, so that the undo detector does not
        count legitimate repetitions.
        """

    def concerns(self, key: str, old: Any, new: Any) -> Iterable[str]:
        if isinstance(new, Node) or isinstance(old, Node):
            changed = old is None or new is None or old.status.health is not new.status.health
            found = self.board.by_node.get(key.removeprefix("node/"), {}) if changed else {}
            keys = tuple(one for one in found if self.board.rows[one].thing.status.phase in _PUBLISHED)
            for one in keys:
                self._cause[one] = self._cause.get(one, 0) + 1
            return keys
        if not isinstance(new, Replica):
            self._cause.pop(key, None)
            return ()
        if new.status.phase not in _PUBLISHED:
            self._cause.pop(key, None)
            return ()
        if old is None or old.status.phase not in _PUBLISHED:
            self._cause[key] = self.board.revision
        return (key,)

    def everything(self) -> Iterable[str]:
        for phase in _PUBLISHED:
            yield from tuple(self.board.by_phase[phase])

    def reconcile(self, key: str, times: Times) -> Iterator[Wish]:
        kept = self.board.rows.get(key)
        if kept is None or kept.thing.status.phase not in _PUBLISHED:
            return
        replica: Replica = kept.thing
        workload: Workload | None = self.board.get(f"workload/{replica.metadata.tenant}/{replica.spec.workload}")
        if workload is None or workload.spec.type == "job":
            return
        node: Node | None = self.board.get(f"node/{replica.status.node}")
        health = NodeHealth.LOST if node is None else node.status.health
        named = f"{replica.metadata.uid} {replica.status.attempt} for cause {self._cause.get(key, 0)}"
        if replica.status.phase is Phase.READY and health is NodeHealth.READY:
            yield Deed(Move(key, kept.revision, "serve"), f"serve {named}")
        elif replica.status.phase is Phase.SERVING and health in _DOUBTED and self._others(replica):
            yield Deed(
                Move(key, kept.revision, "unserve", reason=f"node {replica.status.node} is {health}"), f"unserve {named}"
            )

    def _others(self, replica: Replica) -> bool:
        """Return whether another replica of the service is published on a ready node."""
        for one in self.board.of(replica.metadata.tenant, replica.spec.workload):
            node: Node | None = self.board.get(f"node/{one.thing.status.node}")
            ready = node is not None and node.status.health is NodeHealth.READY
            if one.thing.status.phase is Phase.SERVING and ready:
                return True
        return False
