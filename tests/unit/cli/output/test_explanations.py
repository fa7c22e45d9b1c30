"""Is every explanation said in words, and never wider than the terminal?"""

from __future__ import annotations

import io
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from remit.cli.output.explanations import EASED, PASSED, STANDS_IN, age_words, show, unblock_words
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
    told = explain_replica(cluster.view(), row, 1, records, RULES, node)
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=True, color_system=None), told, verbose=True, wall=WALL)
    return out.getvalue()


def workload_text(
    cluster: Cluster, name: str = "w", records: RecordedHistory = RecordedHistory(at=AT), *, width: int = 100
) -> str:
    made = cluster.objects.get(f"workload/t1/{name}")
    assert made is None or isinstance(made, Workload)
    told = explain_workload(cluster.view(), made, "t1", name, records, RULES)
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=True, color_system=None), told, verbose=True, wall=WALL)
    return out.getvalue()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [50, 80, 128])
def test_every_reason_is_told_within_the_terminal(case: str, width: int) -> None:
    cluster = CASES[case][2]()
    for text in (workload_text(cluster, width=width), replica_text(cluster, "w-0", width=width)):
        plain = " ".join(text.split())
        assert f"reason={CASES[case][0].value}" in plain
        assert "Pending 4m12s" in plain
        assert max(map(len, text.splitlines())) <= width
        assert f"= {len(cluster.view().columns.rows)} nodes" in plain


def test_every_filter_has_its_words() -> None:
    assert set(PASSED) == {one.name for one in BUILTIN_FILTERS} | {"overrides"}
    eased = set(EASED) | {"node-health", "takes-work", "resources", "devices", "device-shares"}
    assert eased == set(PASSED)


def test_every_suggestion_is_said_in_words() -> None:
    for case in CASES:
        for unblock in CASES[case][2]().explained().unblocks:
            said = unblock_words(unblock)
            assert "filter" not in said and "then it fits" in said, said


def test_work_that_arrived_is_limited_by_nothing() -> None:
    cluster = three_nodes().work(workload("w", replicas=2), 0, on=("n1", "n2"), phase=Phase.SERVING)
    text = workload_text(cluster)
    assert "serving 2 of 2 wanted" in text
    assert "limited by:   nothing" in text


def test_what_is_not_made_yet_and_what_is_under_way_is_said() -> None:
    cluster = three_nodes().work(workload("w", replicas=4), 0, on=("n1", "n2"), phase=Phase.STARTING)
    text = workload_text(cluster)
    assert "starting 2 of 4 wanted; 2 not made yet" in text
    assert "replicas that are not made yet" in text
    under_way = three_nodes().work(workload("w", replicas=2), 0, on=("n1", "n2"), phase=Phase.STARTING)
    assert "limited by:   starting may last" in workload_text(under_way)


@pytest.mark.parametrize(
    ("type_", "status", "reason", "message", "words"),
    [
        ("Complete", "True", "Done", "", "nothing: the job is complete"),
        ("Failed", "True", "RetriesExhausted", "w-0 has failed once", "RetriesExhausted: w-0 has failed once"),
        ("Admitted", "False", "NoSchedules", "nobody keeps them", "NoSchedules: nobody keeps them"),
        ("Progressing", "True", "RollingOut", "w-1: exit 3", "rollout: w-1: exit 3"),
        ("Progressing", "True", "RolledOut", "", "nothing: it is where it should be"),
    ],
)
def test_what_its_controllers_say_of_it_is_said(type_: str, status: Any, reason: str, message: str, words: str) -> None:
    cluster = three_nodes()
    made = workload("w", replicas=2, type_="service" if type_ == "Progressing" else "job")
    said = Condition(type=type_, status=status, reason=reason, message=message, observed_generation=made.metadata.generation)
    declared = replace(made, status=WorkloadStatus((said,)))
    told = explain_workload(cluster.view(), declared, "t1", "gone", RecordedHistory(at=AT), RULES)
    out = io.StringIO()
    show(Console(file=out, width=100, color_system=None), told, verbose=False, wall=WALL)
    if type_ in ("Complete", "Failed"):
        assert told.missing == 0, "what has ended waits for nothing more"
    if reason != "RolledOut":
        assert f"limited by:   {words}" in out.getvalue()
    else:
        assert told.limit == "missing"


def test_pieces_that_have_ended_take_nobodys_place__although_nobody_has_settled_them() -> None:
    """As while no controllers run: what is missing is said, and not that all is well."""
    made = workload("w", replicas=2, type_="job", completions=5)
    cluster = three_nodes().work(made, 0, on=("n1", "n2"), phase=Phase.FINISHED, result="ok")
    told = explain_workload(cluster.view(), made, "t1", "w", RecordedHistory(at=AT), RULES)
    assert (told.wanted, told.missing, told.limit) == (5, 2, "missing")


def test_a_decision_that_is_no_longer_kept_is_said_to_be_so() -> None:
    text = replica_text(three_nodes().work(workload("w"), 0, on=("n1",)), "w-0")
    assert "the decision is no longer kept" in text


def test_a_decision_that_is_kept_is_retold() -> None:
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
    assert "revision 7, 40 ms old then; policy 3" in text
    assert "attempt 2; refused 1 time, waited 0 times before (no_room)" in text
    assert "bind accepted at revision 9" in text
    assert "it would fit there now" in text
    assert "where it is, on n1: score" in text


def test_a_reservation_tells_who_is_still_there() -> None:
    cluster = outranked()
    low = cluster.objects["replica/t1/low-0"]
    assert isinstance(low, Replica)
    made = workload("w", "2", priority="high")
    victims = {"replica/t1/low-0": f"{low.metadata.uid}/1", "replica/t1/gone-1": "u/1"}
    cluster = cluster.work(made, 0, on=("n1",), phase=Phase.RESERVED, victims=victims, priority=100)
    text = replica_text(cluster, "w-0")
    assert "1 of 2 victims have gone; still there: t1/low-0" in text


def test_who_would_have_to_go_is_named() -> None:
    cluster = outranked().work(workload("w", "2", priority="high"), priority=100)
    assert "t1/low-0 (priority 0) on n1, at the scheduler's next turn" in replica_text(cluster, "w-0")
    assert STANDS_IN["priority"] in replica_text(full(three_nodes()).work(workload("w", "2")), "w-0")


def test_ages_are_told_only_where_they_are_known() -> None:
    assert age_words(AT[1], WALL) == "4m12s"
    assert age_words("", WALL) == ""
    assert age_words(WALL, AT[1]) == ""
