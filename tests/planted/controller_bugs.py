"""Which wrong turns could controllers take with what others rely on? Drains, rollouts, endpoints, and what is made anew."""

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


@bug(38, scenario="drains", expects=("disruption_leaves_enough",))
def a_drain_takes_what_cannot_be_spared(patch: pytest.MonkeyPatch) -> None:
    """Whatever is on a draining node goes at once."""
    patch.setattr(NodeDrain, "_can_spare", lambda self, one: True)


@bug(38, scenario="drains", expects=("disruption_leaves_enough",))
def two_drains_take_the_same_spare(patch: pytest.MonkeyPatch) -> None:
    """What was asked to go and is still seen to be there counts as if it stayed."""
    patch.setattr(NodeDrain, "evict", lambda self, one, reason: Action(Move(one.key, one.revision, "evict", reason=reason)))


@bug(20, scenario="drains", expects=("disruption_leaves_enough",))
def a_rollout_takes_all_that_is_old(patch: pytest.MonkeyPatch) -> None:
    """A new generation takes the place of the old at once, ready or not."""
    patch.setattr(rollout, "available_min", lambda spec, wanted: 0)


@bug(34, scenario="left-behind", expects=("the_last_endpoint_is_not_withdrawn",))
def the_last_endpoint_is_withdrawn(patch: pytest.MonkeyPatch) -> None:
    """What is on a node that is suspected is withdrawn, whoever else there is."""
    patch.setattr(EndpointController, "_has_other_endpoint", lambda self, replica: True)


@bug(34, 35, scenario="zone-silent", expects=("nodes_are_given_up_one_after_another",))
def a_zone_is_given_up_at_once(patch: pytest.MonkeyPatch) -> None:
    """How many nodes of a zone were given up already is not asked."""
    patch.setattr(TokenBucket, "wait_ms", lambda self, now_ms, milli_per_s: 0)


@bug(29, scenario="services", expects=("writes_cease", "desire_is_met", "no_more_replicas_than_desired", "refusals_back_off"))
def one_more_is_made_than_is_wanted(patch: pytest.MonkeyPatch) -> None:
    """Of a service there is always one more than it wants, and that one goes again."""
    wanted = DesiredReplicas._service_diff

    def more(self: DesiredReplicas, *args: Any) -> ReplicaDiff:
        found = wanted(self, *args)
        free = 1 + max((one.obj.spec.index for one in args[1]), default=0)
        return found if found.spawn or found.remove else found._replace(spawn=((free, 1),))

    patch.setattr(DesiredReplicas, "_service_diff", more)
    patch.setattr(UndoDetector, "is_held", lambda self, once, now_ms: False)
