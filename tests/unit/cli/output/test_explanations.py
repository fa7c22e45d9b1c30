"""Tests of the text of explanations."""

from __future__ import annotations

import io
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from remit.cli.output.explanations import NOT_POSSIBLE, PASSED_LABELS, RELAXED, format_age, format_remedy, show
from remit.model.kinds import Workload, WorkloadStatus
from remit.model.metadata import Condition, RecordMetadata
from remit.model.records import Decision, DecisionCandidate, DecisionSpec, Phase, Replica
from remit.proposal.explain.result_types import HistoryEntry
from remit.proposal.explain.subjects import RecordedHistory, explain_replica, explain_workload
from remit.proposal.placement.plugins import BUILTIN_FILTERS
from tests.properties.authority_world import workload
from tests.unit.proposal.cluster_fixtures import RULES, Cluster
from tests.unit.proposal.explain.test_pending import CASES, full, outranked, three_nodes

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
    relaxed = set(RELAXED) | {"node-health", "takes-work", "resources", "devices", "device-shares"}
    assert relaxed == set(PASSED_LABELS)


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
    assert "replicas that are not created yet" in text
    under_way = three_nodes().work(workload("w", replicas=2), 0, on=("n1", "n2"), phase=Phase.STARTING)
    assert "limited by:   starting may last" in workload_text(under_way)


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
    assert "nodes 3 -> labels match 2" in text
    assert "revision 7, 40 ms old at the decision; policy 3" in text
    assert "attempt 2; refused 1 time, pending 0 times before (no_room)" in text
    assert "bind accepted at revision 9" in text
    assert "it would fit there now" in text
    assert "on its current node n1: score" in text


def test_reservation_lists_victims_not_released_yet() -> None:
    cluster = outranked()
    low = cluster.objects["replica/t1/low-0"]
    assert isinstance(low, Replica)
    declared = workload("w", "2", priority="high")
    victims = {"replica/t1/low-0": f"{low.metadata.uid}/1", "replica/t1/gone-1": "u/1"}
    cluster = cluster.work(declared, 0, on=("n1",), phase=Phase.RESERVED, victims=victims, priority=100)
    text = replica_text(cluster, "w-0")
    assert "1 of 2 victims are released; not released yet: t1/low-0" in text


def test_preemption_victims_are_named() -> None:
    cluster = outranked().work(workload("w", "2", priority="high"), priority=100)
    assert "t1/low-0 (priority 0) on n1, in the scheduler's next cycle" in replica_text(cluster, "w-0")
    assert NOT_POSSIBLE["priority"] in replica_text(full(three_nodes()).work(workload("w", "2")), "w-0")


def test_unknown_or_future_times_have_no_age() -> None:
    assert format_age(AT[1], WALL) == "4m12s"
    assert format_age("", WALL) == ""
    assert format_age(WALL, AT[1]) == ""
