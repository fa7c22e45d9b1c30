"""Planted bugs of controllers: drains, rollouts, endpoints, replica counts."""

from __future__ import annotations

from typing import Any

import pytest

from remit.correction.controllers import rollout
from remit.correction.controllers.desired_replicas import DesiredReplicas, ReplicaDiff
from remit.correction.controllers.disruption import NodeDrain
from remit.correction.controllers.endpoints import EndpointController
from remit.correction.framework.actions import Action
from remit.correction.framework.work_queue import TokenBucket, UndoDetector
from remit.model.claims import Move
from tests.planted.planted_bug import bug


@bug(38, scenario="drains", expects=("disruption_keeps_min_available",))
def a_drain_ignores_min_available(patch: pytest.MonkeyPatch) -> None:
    """Every replica on a draining node is evicted at once."""
    patch.setattr(NodeDrain, "_can_spare", lambda self, one: True)


@bug(38, scenario="drains", expects=("disruption_keeps_min_available",))
def two_drains_share_one_disruption(patch: pytest.MonkeyPatch) -> None:
    """A replica with a pending eviction still counts as available."""
    patch.setattr(NodeDrain, "evict", lambda self, one, reason: Action(Move(one.key, one.revision, "evict", reason=reason)))


@bug(20, scenario="drains", expects=("disruption_keeps_min_available",))
def a_rollout_ignores_min_available(patch: pytest.MonkeyPatch) -> None:
    """A new generation replaces the old one at once, ready or not."""
    patch.setattr(rollout, "available_min", lambda spec, service_diff: 0)


@bug(34, scenario="left-behind", expects=("last_endpoint_is_not_withdrawn",))
def the_last_endpoint_is_withdrawn(patch: pytest.MonkeyPatch) -> None:
    """An endpoint on a suspect node is withdrawn even if it is the last one."""
    patch.setattr(EndpointController, "_has_other_endpoint", lambda self, replica: True)


@bug(34, 35, scenario="zone-silent", expects=("marking_nodes_unknown_is_rate_limited",))
def a_zone_is_marked_unknown_at_once(patch: pytest.MonkeyPatch) -> None:
    """Marking nodes unknown is not rate limited per zone."""
    patch.setattr(TokenBucket, "wait_ms", lambda self, now_ms, milli_per_s: 0)


@bug(
    29,
    scenario="services",
    expects=("writes_cease", "desired_state_is_reached", "replicas_stay_within_desired_and_surge", "refused_requests_back_off"),
)
def one_surplus_replica_is_spawned(patch: pytest.MonkeyPatch) -> None:
    """A service always gets one replica too many, which is removed again."""
    original_service_diff = DesiredReplicas._service_diff

    def buggy_service_diff(self: DesiredReplicas, *args: Any) -> ReplicaDiff:
        found = original_service_diff(self, *args)
        free = 1 + max((row.obj.spec.index for row in args[1]), default=0)
        return found if found.spawn or found.remove else found._replace(spawn=((free, 1),))

    patch.setattr(DesiredReplicas, "_service_diff", buggy_service_diff)
    patch.setattr(UndoDetector, "is_held", lambda self, once, now_ms: False)
