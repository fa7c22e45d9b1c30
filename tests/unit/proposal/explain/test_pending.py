"""Explanations of pending work name the scheduler's reason, and each suggested remedy suffices while less does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from remit.law.refusals import REFUSALS
from remit.model.claims import Code
from remit.model.kinds import Disruption, Override, Placement, PolicyAllow, PolicyRule, Tenant
from remit.model.metadata import Deadline
from remit.proposal.explain.capacity import compute_capacity
from remit.proposal.explain.pending import explain_node, explain_pending, pending_work
from remit.proposal.explain.result_types import PendingExplanation
from remit.proposal.placement.plugins import Filter
from tests.properties.authority_world import TAINTED, amounts, workload
from tests.unit.proposal.cluster_fixtures import NOW, RULES, Cluster, smaller
from tests.unit.proposal.explain.pending_cases import (
    CASES,
    EVENLY,
    full,
    outranked,
    override,
    poor,
    published,
    sums,
    three_nodes,
)

WITHOUT_REMEDY = {"deleting", "no nodes"}


def explained(case: str) -> tuple[Cluster, PendingExplanation]:
    cluster = CASES[case][2]()
    return cluster, cluster.explained()


@pytest.mark.parametrize("case", CASES)
def test_reason_equals_that_of_scheduler(case: str) -> None:
    cluster, explanation = explained(case)
    code, never, _ = CASES[case]
    assert (explanation.reason, explanation.verdict) == (code.value, "never" if never else "not-now"), explanation
    assert set(cluster.scheduled().waits.values()) == {(code.value, never)}
    assert explanation.meaning == REFUSALS[code].meaning
    assert sums(explanation.passage)
    assert explanation.cures


@pytest.mark.parametrize("case", [case for case in CASES if case not in WITHOUT_REMEDY])
def test_each_remedy_suffices_and_less_does_not(case: str) -> None:
    cluster, explanation = explained(case)
    assert explanation.unblocks, explanation
    want = explanation.quota.wanted
    for unblock in explanation.unblocks:
        assert cluster.with_remedy(unblock).bound() >= want, (unblock, cluster.with_remedy(unblock).scheduled())
        for less in smaller(unblock):
            assert cluster.with_remedy(less).bound() < want, (unblock, less)


@pytest.mark.parametrize("case", sorted(WITHOUT_REMEDY))
def test_no_remedy_is_suggested_where_none_helps(case: str) -> None:
    assert explained(case)[1].unblocks == ()


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        ("quota", [["quota"]]),
        ("paused", [["override"]]),
        ("grant expired", [["grant"]]),
        ("no tenant", [["tenant"]]),
        ("gang short of members", [["members"]]),
        ("room", [["grow"], ["shrink"], ["nodes"]]),
        ("device", [["grow"], ["nodes"]]),
        ("share", [["grow"], ["nodes"]]),
        ("too large", [["grow"], ["shrink"]]),
        ("selector", [["filter"]]),
        ("quota and room", [["quota", "grow"], ["shrink"], ["quota", "nodes"]]),
        ("taint and room", [["filter", "grow"], ["filter", "shrink"], ["filter", "nodes"]]),
        ("gang short of room", [["nodes"]]),
    ],
)
def test_remedies_by_case(case: str, kinds: list[list[str]]) -> None:
    assert [[change.kind for change in one.changes] for one in explained(case)[1].unblocks] == kinds


@pytest.mark.parametrize("code", [Code.OVER_QUOTA, Code.GANG_SHORT, Code.OVERRIDE])
def test_request_larger_than_every_node_is_never_despite_other_reasons(code: Code) -> None:
    hold = override("hold", "pause-expansion", workloads=("t1/w",))
    first: dict[Code, list[Tenant | Override]] = {Code.OVER_QUOTA: [poor("4")], Code.OVERRIDE: [hold]}
    for cpu, verdict in (("5", "never"), ("1" if code is not Code.OVER_QUOTA else "3", "not-now")):
        made = workload("w", cpu, gang=2) if code is Code.GANG_SHORT else workload("w", cpu)
        cluster = three_nodes().with_(*first.get(code, ())).work(workload("other", "2"), 0, on=("n1",)).work(made)
        explanation = cluster.explained()
        assert (explanation.reason, explanation.verdict) == (code.value, verdict)


def test_third_party_filter_is_explained_in_its_own_words() -> None:
    third_party_filter = Filter(
        "rack", Code.SELECTOR, lambda ask, site, peers: False, reason="the rack is dark", third_party=True
    )
    cluster = three_nodes().work(workload("w"))
    view = cluster.view()
    rules = RULES._replace(filters=(third_party_filter,))
    generation = view.shapes.find("t1", "w", 1)
    assert generation is not None
    explanation = explain_pending(view, generation, 0, rules)
    assert (explanation.reason, explanation.meaning) == ("selector", "the rack is dark")
    assert [(step.filter, step.meaning) for step in explanation.passage.steps] == [("rack", "the rack is dark")]
    on_node = explain_node(pending_work(view, generation, 0, rules).trial, "n1")
    assert on_node is not None and [one.meaning for one in on_node.broken] == ["the rack is dark"]
    stop = compute_capacity(view, workload("w"), rules).stop
    assert stop is not None and (stop.meaning, stop.passage.steps[0].meaning) == ("the rack is dark", "the rack is dark")


def test_remedy_counts_nodes_that_would_fit() -> None:
    explanation = explained("selector")[1]
    assert (explanation.unblocks[0].fits, explanation.unblocks[0].changes[0].what) == (3, "labels")


def test_work_that_fits_is_explained_with_its_candidate_node() -> None:
    cluster = three_nodes().work(workload("w"))
    explanation = cluster.explained()
    assert (explanation.verdict, explanation.reason, explanation.unblocks, explanation.preemption) == ("now", "", (), None)
    assert explanation.candidates[0].node == cluster.scheduled().bound["replica/t1/w-0"]
    assert explanation.candidates[0].parts["least-allocated"] <= explanation.candidates[0].score


def test_lapsed_policy_lease_stops_work_that_would_fit() -> None:
    """The scheduler learns that from the authority; an explanation predicts the authority's refusal."""
    policy = published(PolicyRule(allow=PolicyAllow(zones=("a", "b", "c"))))
    for at_ms, reason in ((NOW[1] - 1, "policy_lapsed"), (NOW[1] + 1, "")):
        leased = replace(policy, spec=replace(policy.spec, deadline=Deadline(boot=NOW[0], at_ms=at_ms)))
        explanation = three_nodes().with_(leased).work(workload("w")).explained()
        assert explanation.reason == reason
        assert [change.kind for one in explanation.unblocks for change in one.changes] == (["policy"] if reason else [])


def test_gang_explanation_counts_members_that_would_fit() -> None:
    gang = explained("gang short of room")[1].gang
    assert gang is not None
    assert (gang.min, gang.standing, gang.waiting, gang.fits) == (5, 0, 5, 3)


def test_explaining_does_not_change_view() -> None:
    cluster = full(three_nodes()).work(workload("w", "2", placement=EVENLY))
    view = cluster.view()
    generation = view.shapes.find("t1", "w", 1)
    assert generation is not None
    before = {name: column.tolist() for name, column in view.columns.free.items()}
    work = pending_work(view, generation, 0, RULES)
    work.trial.kernel.place_run(work.trial.work_class, 5)
    assert {name: column.tolist() for name, column in view.columns.free.items()} == before
    assert len(view.columns) == 3


# -- preemption ----------------------------------------------------------------------------------------------------------------


def test_explained_victims_equal_those_of_scheduler() -> None:
    cluster = outranked().work(workload("w", "2", priority="high"), priority=100)
    explanation = cluster.explained(priority=100).preemption
    assert explanation is not None and explanation.possible
    assert [f"replica/{one.replica}" for one in explanation.victims] == list(cluster.scheduled().reserved["replica/t1/w-0"])
    assert explanation.victims[0].workload == "low"


@pytest.mark.parametrize(
    ("why", "cluster", "priority"),
    [
        ("priority", lambda: outranked().work(workload("w", "2")), 0),
        ("class", lambda: outranked().work(workload("w", "2", priority="meek"), priority=50), 50),
        ("gang", lambda: outranked().work(workload("w", "2", gang=2, priority="high"), 2, priority=100), 100),
        ("quota", lambda: outranked().with_(poor("9")).work(workload("w", "2", priority="high"), priority=100), 100),
        ("place", lambda: outranked().work(workload("w", "2", placement=Placement(zones=("z",))), priority=100), 100),
        (
            "protected",
            lambda: outranked(disruption=Disruption(min_available=3)).work(workload("w", "2", priority="high"), priority=100),
            100,
        ),
    ],
)
def test_reason_why_preemption_is_impossible(why: str, cluster: Callable[[], Cluster], priority: int) -> None:
    built = cluster()
    explanation = built.explained(priority=priority).preemption
    assert explanation is not None
    assert (explanation.possible, explanation.why) == (False, why)
    assert not built.scheduled().reserved


# -- one node ------------------------------------------------------------------------------------------------------------------


def test_node_explanation_lists_every_failed_rule() -> None:
    cluster = full(three_nodes(taints=(TAINTED,))).work(workload("w", "2", placement=Placement(node_selector={"disk": "ssd"})))
    view = cluster.view()
    generation = view.shapes.find("t1", "w", 1)
    assert generation is not None
    work = pending_work(view, generation, 0, RULES)
    explanation = explain_node(work.trial, "n2")
    assert explanation is not None and not explanation.fits
    assert [one.filter for one in explanation.broken] == ["taints", "labels", "resources"]
    assert explanation.lacks == amounts(cpu="1")
    assert explain_node(work.trial, "n9") is None
