"""Property: explanations name the scheduler's reason, funnels add up, and suggestions suffice without excess."""

from __future__ import annotations

from hypothesis import given, note

from tests.properties.proposal.cluster_strategies import clusters
from tests.unit.proposal.cluster_fixtures import Cluster, smaller
from tests.unit.proposal.explain.pending_cases import sums

BEFORE_CAPACITY = ("over_quota", "grant_expired", "grant_void", "gang_short", "override")


@given(clusters())
def test_explanation_names_scheduler_reason_and_minimal_suggestions(cluster: Cluster) -> None:
    explanation = cluster.explained()
    note(str(explanation))
    result = cluster.scheduled()
    assert sums(explanation.passage)
    want = explanation.quota.wanted
    if explanation.verdict == "now":
        assert sum(name.startswith("replica/t1/w-") for name in result.bound) >= want
        assert explanation.unblocks == ()
        return
    reason, never = result.waits["replica/t1/w-0"]
    assert reason == explanation.reason
    assert explanation.verdict == "never" or not never
    if reason in BEFORE_CAPACITY:  # the scheduler looks at no node then; the explanation still states if none could ever fit
        kinds = [{change.kind for change in suggestion.changes} for suggestion in explanation.unblocks]
        assert explanation.verdict == "not-now" or all(found & {"grow", "shrink", "filter", "nodes"} for found in kinds)
    else:
        assert never is (explanation.verdict == "never")
    for unblock in explanation.unblocks:
        note(str(unblock))
        after = cluster.with_remedy(unblock)
        assert after.bound() >= want, after.scheduled()
        for less in smaller(unblock):
            assert cluster.with_remedy(less).bound() < want, less
