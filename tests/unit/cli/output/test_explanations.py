"""Tests of the text of explanations."""

from __future__ import annotations

import io
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from remit.cli.output.explanations import (
    NOT_POSSIBLE,
    PASSED_LABELS,
    PHASE_ENDS,
    RELAXED,
    TIMED_PHASES,
    UNBLOCKED_BY,
    format_age,
    format_reason,
    format_remedy,
    show,
)
from remit.law.lifecycle import PHASE_TIMEOUTS, TRANSITIONS
from remit.law.refusals import REFUSALS
from remit.model.claims import Code
from remit.model.kinds import Workload, WorkloadStatus
from remit.model.metadata import Condition, RecordMetadata
from remit.model.records import Decision, DecisionCandidate, DecisionSpec, Phase, Replica
from remit.proposal.explain.result_types import FilterFunnel, HistoryEntry
from remit.proposal.explain.subjects import RecordedHistory, explain_replica, explain_workload
from remit.proposal.placement.plugins import BUILTIN_FILTERS, FORMER_FILTER_NAMES, GANG_MEMBER, UnblockEvent
from tests.properties.authority_world import workload
from tests.unit.proposal.cluster_fixtures import RULES, Cluster
from tests.unit.proposal.explain.pending_cases import CASES, full, outranked, three_nodes

WALL = "2026-01-01T00:10:00.000Z"
AT = {1: "2026-01-01T00:05:48.000Z"}


def replica_text(
    cluster: Cluster, name: str, records: RecordedHistory = RecordedHistory(at=AT), *, node: str = "", width: int = 100
) -> str:
    row = cluster.objects[f"replica/t1/{name}"]
    assert isinstance(row, Replica)
    explanation = explain_replica(cluster.view(), row, 1, records, RULES, node)
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=True, color_system=None), explanation, verbose=True, wall=WALL)
    return out.getvalue()


def workload_text(
    cluster: Cluster, name: str = "w", records: RecordedHistory = RecordedHistory(at=AT), *, width: int = 100
) -> str:
    declared = cluster.objects.get(f"workload/t1/{name}")
    assert declared is None or isinstance(declared, Workload)
    explanation = explain_workload(cluster.view(), declared, "t1", name, records, RULES)
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=True, color_system=None), explanation, verbose=True, wall=WALL)
    return out.getvalue()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [50, 80, 128])
def test_every_reason_fits_the_terminal_width(case: str, width: int) -> None:
    cluster = CASES[case][2]()
    for text in (workload_text(cluster, width=width), replica_text(cluster, "w-0", width=width)):
        plain = " ".join(text.split())
        assert f"reason={CASES[case][0].value}" in plain
        assert "Pending 4m12s" in plain
        assert max(map(len, text.splitlines())) <= width
        assert f"= {len(cluster.view().columns.rows)} nodes" in plain


def test_every_filter_has_labels() -> None:
    assert set(PASSED_LABELS) == {filter_.name for filter_ in BUILTIN_FILTERS} | {"overrides"}
    relaxed = set(RELAXED) | {"node-health", "schedulable", "resources", "devices", "device-shares"}
    assert relaxed == set(PASSED_LABELS)


def test_every_event_that_ends_a_wait_has_a_text() -> None:
    assert set(UNBLOCKED_BY) == {*UnblockEvent, GANG_MEMBER}
    for case in CASES:
        assert set(CASES[case][2]().explained().cures) <= set(UNBLOCKED_BY), case


def test_every_phase_with_a_limit_states_how_it_ends() -> None:
    assert set(PHASE_ENDS) == set(PHASE_TIMEOUTS)
    ends = {transition.name for transition in TRANSITIONS if "wait_over" in transition.guards}
    assert {phase for phase, wait in PHASE_TIMEOUTS.items() if wait.transition in ends} == TIMED_PHASES


NO_ROOM, OVER_QUOTA = REFUSALS[Code.NO_ROOM].meaning, REFUSALS[Code.OVER_QUOTA].meaning


@pytest.mark.parametrize(
    ("meaning", "detail", "nodes", "expected"),
    [
        (NO_ROOM, "0 of 4 nodes fit: 4 too little free cpu", 4, "0 of 4 nodes fit: 4 too little free cpu"),
        (NO_ROOM, "the cluster has no nodes", 0, "the cluster has no nodes"),
        (NO_ROOM, "paused by override o1", 4, f"{NO_ROOM}; paused by override o1"),
        (OVER_QUOTA, "tenant/t1 has too little quota left", 4, "tenant/t1 has too little quota left"),
        (
            "the rack has too little power",
            "0 of 4 nodes fit: 4 rejected by filter rack-power",
            4,
            "the rack has too little power; 0 of 4 nodes fit: 4 rejected by filter rack-power",
        ),
    ],
)
def test_meaning_about_one_node_is_left_out_before_the_counts_of_all_nodes(
    meaning: str, detail: str, nodes: int, expected: str
) -> None:
    assert format_reason(meaning, detail, FilterFunnel(nodes, (), 0)) == expected


def test_stored_funnel_with_former_filter_names_is_read_under_their_new_names() -> None:
    spec = DecisionSpec(
        replicas={"t1/w-0": "n1"}, nodes=9, funnel=tuple((name, 2) for name in FORMER_FILTER_NAMES), fits=3, verdict="bound"
    )
    decision = Decision(metadata=RecordMetadata(name="d", tenant="t1"), spec=spec)
    cluster = three_nodes().work(workload("w"), 0, on=("n1",))
    text = replica_text(cluster, "w-0", RecordedHistory([(9, decision)], (), {9: AT[1]}), width=128)
    assert (
        "9 nodes -> 7 schedulable -> 5 in the requested regions, zones and pools -> 3 with others' anti-affinity met"
        in " ".join(text.split())
    )
    row = cluster.objects["replica/t1/w-0"]
    assert isinstance(row, Replica)
    chosen = explain_replica(cluster.view(), row, 1, RecordedHistory([(9, decision)]), RULES).chosen
    assert chosen is not None
    assert [(step.filter, step.reason) for step in chosen.passage.steps] == [
        ("schedulable", "draining"), ("placement", "place"), ("others-anti-affinity", "anti_affinity"),
    ]  # fmt: skip


def test_every_remedy_is_described_in_words() -> None:
    for case in CASES:
        for remedy in CASES[case][2]().explained().unblocks:
            text = format_remedy(remedy)
            assert "filter" not in text and "then it fits" in text, text


def test_serving_workload_has_no_limit() -> None:
    cluster = three_nodes().work(workload("w", replicas=2), 0, on=("n1", "n2"), phase=Phase.SERVING)
    text = workload_text(cluster)
    assert "serving 2 of 2 desired" in text
    assert "limited by:   nothing" in text


def test_missing_and_starting_replicas_are_the_limit() -> None:
    cluster = three_nodes().work(workload("w", replicas=4), 0, on=("n1", "n2"), phase=Phase.STARTING)
    text = workload_text(cluster)
    assert "starting 2 of 4 desired; 2 not created yet" in text
    assert "missing: replicas have not been created yet" in text
    under_way = three_nodes().work(workload("w", replicas=2), 0, on=("n1", "n2"), phase=Phase.STARTING)
    assert "limited by:   starting: preparing the process (times out after 10m)" in workload_text(under_way)


@pytest.mark.parametrize(
    ("type_", "status", "reason", "message", "expected"),
    [
        ("Complete", "True", "Done", "", "nothing: the job is complete"),
        ("Failed", "True", "RetriesExhausted", "w-0 has failed once", "RetriesExhausted: w-0 has failed once"),
        ("Admitted", "False", "NoSchedules", "schedules are not supported", "NoSchedules: schedules are not supported"),
        ("Progressing", "True", "RollingOut", "w-1: exit 3", "rollout: w-1: exit 3"),
        ("Progressing", "True", "RolledOut", "", "nothing: it is in its desired state"),
    ],
)
def test_conditions_of_controllers_are_the_limit(type_: str, status: Any, reason: str, message: str, expected: str) -> None:
    cluster = three_nodes()
    declared = workload("w", replicas=2, type_="service" if type_ == "Progressing" else "job")
    condition = Condition(
        type=type_, status=status, reason=reason, message=message, observed_generation=declared.metadata.generation
    )
    declared = replace(declared, status=WorkloadStatus((condition,)))
    explanation = explain_workload(cluster.view(), declared, "t1", "gone", RecordedHistory(at=AT), RULES)
    out = io.StringIO()
    show(Console(file=out, width=100, color_system=None), explanation, verbose=False, wall=WALL)
    if type_ in ("Complete", "Failed"):
        assert explanation.missing == 0, "a finished job has no missing replicas"
    if reason != "RolledOut":
        assert f"limited by:   {expected}" in out.getvalue()
    else:
        assert explanation.limit == "missing"


def test_finished_job_replicas_leave_the_rest_missing_in_explanations() -> None:
    """As while no controllers run."""
    declared = workload("w", replicas=2, type_="job", completions=5)
    cluster = three_nodes().work(declared, 0, on=("n1", "n2"), phase=Phase.FINISHED, result="ok")
    explanation = explain_workload(cluster.view(), declared, "t1", "w", RecordedHistory(at=AT), RULES)
    assert (explanation.wanted, explanation.missing, explanation.limit) == (5, 2, "missing")


def test_expired_decision_is_reported_as_not_stored() -> None:
    text = replica_text(three_nodes().work(workload("w"), 0, on=("n1",)), "w-0")
    assert "the decision is no longer stored" in text


def test_stored_decision_is_printed_with_attempts_and_verdict() -> None:
    spec = DecisionSpec(
        replicas={"t1/w-0": "n1"}, attempt=2, revision=7, age_ms=40, nodes=3, funnel=(("labels", 1),), fits=2,
        candidates=(DecisionCandidate(node="n1", score=700, parts={"least-allocated": 700}),),
        grant="tenant/t1", left={"cpu": 2000},
        policy=3, verdict="bound",
    )  # fmt: skip
    decision = Decision(metadata=RecordMetadata(name="d", tenant="t1"), spec=spec)
    answers = [
        HistoryEntry(8, AT[1], "authority", "bind refused", "no_room", "too little"),
        HistoryEntry(9, AT[1], "authority", "bind accepted"),
    ]
    text = replica_text(
        three_nodes().work(workload("w"), 0, on=("n1",)),
        "w-0",
        RecordedHistory([(9, decision)], answers, {9: AT[1]}),
        node="n2",
    )
    assert "the best of 2 nodes that fit" in text
    assert "3 nodes -> 2 with matching labels" in text
    assert "revision 7, 40 ms old at the decision; policy 3" in text
    assert "placement:    on try 2 of its queue; earlier refused 1 time, pending 0 times (no_room)" in text
    assert "bind accepted at revision 9" in text
    assert "it would fit there now" in text
    assert "on its current node n1: score" in text


@pytest.mark.parametrize(
    ("scores", "fits", "expected"),
    [
        ({"n1": 700, "n2": 600}, 3, "the best of 3 nodes that fit"),
        ({"n1": 600, "n2": 600}, 3, "one of 3 nodes that fit; scores when its batch began"),
        ({"n2": 700, "n1": 600}, 3, "one of 3 nodes that fit; scores when its batch began"),
        ({"n2": 700}, 3, "one of 3 nodes that fit; scores when its batch began"),
        ({"n1": 700}, 1, "the only node that fits"),
        ({}, 0, "replicas of lower priority were preempted to make room on it"),
    ],
)
def test_node_is_called_the_best_only_if_its_score_is_the_highest_shown(
    scores: dict[str, int], fits: int, expected: str
) -> None:
    candidates = tuple(DecisionCandidate(node=node, score=score, parts={}) for node, score in scores.items())
    spec = DecisionSpec(replicas={"t1/w-0": "n1"}, nodes=fits, fits=fits, candidates=candidates, verdict="bound")
    decision = Decision(metadata=RecordMetadata(name="d", tenant="t1"), spec=spec)
    text = replica_text(
        three_nodes().work(workload("w"), 0, on=("n1",)), "w-0", RecordedHistory([(9, decision)], (), {9: AT[1]})
    )
    assert f"why here:     {expected}" in text
    assert "placement:    on the first try\n" in text
    assert " -> " not in text, "no filter rejected a node"


def test_running_job_is_not_called_finished() -> None:
    declared = workload("w", replicas=2, type_="job")
    text = workload_text(three_nodes().work(declared, 0, on=("n1", "n2"), phase=Phase.RUNNING))
    assert "limited by:   nothing: all its replicas that may run now are running" in text


def test_charge_above_the_total_quota_says_that_only_more_quota_helps() -> None:
    plain = " ".join(replica_text(CASES["quota"][2](), "w-0").split())
    assert "tenant/t1 has too little quota left: it has" in plain and "so only a raised quota helps" in plain
    assert OVER_QUOTA not in plain


def test_reservation_lists_victims_not_released_yet() -> None:
    cluster = outranked()
    low = cluster.objects["replica/t1/low-0"]
    assert isinstance(low, Replica)
    declared = workload("w", "2", priority="high")
    victims = {"replica/t1/low-0": f"{low.metadata.uid}/1", "replica/t1/gone-1": "u/1"}
    cluster = cluster.work(declared, 0, on=("n1",), phase=Phase.RESERVED, victims=victims, priority=100)
    text = replica_text(cluster, "w-0")
    assert "waiting for 1 of 2 preempted replicas to stop: t1/low-0" in text
    assert "times out after 1m in phase reserved; then the repair controller returns it to pending" in text


def test_pending_gang_and_missing_tenant_are_described_in_words() -> None:
    gang = three_nodes().work(workload("w", gang=3, replicas=3), 2)
    assert "another replica of the gang, a change of the workload" in " ".join(replica_text(gang, "w-0").split())
    without_tenant = CASES["no tenant"][2]()
    assert "if tenant t1 is declared in this scope" in replica_text(without_tenant, "w-0")


def test_preemption_victims_are_named() -> None:
    cluster = outranked().work(workload("w", "2", priority="high"), priority=100)
    assert "t1/low-0 (priority 0) on n1, in the scheduler's next cycle" in replica_text(cluster, "w-0")
    assert NOT_POSSIBLE["priority"] in replica_text(full(three_nodes()).work(workload("w", "2")), "w-0")


def test_unknown_or_future_times_have_no_age() -> None:
    assert format_age(AT[1], WALL) == "4m12s"
    assert format_age("", WALL) == ""
    assert format_age(WALL, AT[1]) == ""
