"""Decision checks pass true and timely decisions. False ones are in false_decisions.py, tested by test_safety_checks.py."""

from __future__ import annotations

from tests.unit.simulate.checkers.false_decisions import KEEPS_TWO, decide, override, preempt, three_running_two_must_stay
from tests.unit.simulate.checkers.history_builder import HistoryBuilder, healed, pass_time

UNTRIED = "pending_replicas_are_tried"
UNREPORTED = "pending_replicas_have_a_reason"


def impossible(h: HistoryBuilder) -> str:
    """A replica for which no node has capacity."""
    h.declare("big", template={"command": ["x"], "resources": {"cpu": "64"}})
    (key,) = h.spawn(0, workload="big")
    return key


def test_consistent_decision_is_no_violation() -> None:
    h = HistoryBuilder().prepare()
    key = impossible(h)
    decide(h, key)
    decide(h, key, funnel=[["resources", 1]], fits=1, verdict="bound", reason="", cures=[])
    decide(h, key, nodes=0, funnel=[], fits=0)
    assert h.found == []


def test_decision_records_of_other_roles_are_not_judged() -> None:
    h = HistoryBuilder().prepare()
    decide(h, impossible(h), role="user", fits=9)
    assert h.found == []


def test_decision_may_count_nodes_as_of_its_revision() -> None:
    h = HistoryBuilder().prepare()
    key = impossible(h)
    before = h.revision
    row = {**h.rows["node/n1"], "metadata": {"name": "n3"}, "status": {}}
    h.commit({"node/n3": row}, [h.entry("apply", "node/n3", "operator")])
    decide(h, key, revision=before)
    assert h.found == []
    decide(h, key)
    assert h.found == ["decision_counts_are_consistent"]


def test_override_may_be_cited_until_expired_in_view() -> None:
    h = HistoryBuilder().prepare()
    key = impossible(h)
    override(h, "o")
    before = h.revision
    h.world.now_ms += 9_999
    decide(h, key, overrides=["o"])
    h.world.now_ms += 5_000
    decide(h, key, overrides=["o"], revision=before)
    assert h.found == []


def test_regularly_tried_work_is_no_violation() -> None:
    h = HistoryBuilder().prepare()
    key = impossible(h)
    healed(h)
    for _ in range(5):
        decide(h, key)
        pass_time(h, 60)
    assert h.found == []


def test_untried_work_is_violation_and_claim_counts_as_try() -> None:
    h = HistoryBuilder().prepare()
    key = impossible(h)
    healed(h)
    pass_time(h, 40)
    h.commit({}, [h.entry("bind", key, "scheduler", code="no_room")])
    pass_time(h, 64)
    assert UNTRIED not in h.found
    pass_time(h, 3)
    assert UNTRIED in h.found


def test_waiting_without_reason_is_violation_and_claim_is_no_reason() -> None:
    h = HistoryBuilder().prepare()
    key = impossible(h)
    healed(h)
    pass_time(h, 60)
    h.commit({}, [h.entry("bind", key, "scheduler", code="no_room")])
    pass_time(h, 5)
    assert h.found == []
    pass_time(h, 2)
    assert h.found == [UNREPORTED]


def test_outdated_reason_is_violation() -> None:
    h = HistoryBuilder().prepare()
    key = impossible(h)
    healed(h)
    pass_time(h, 50)
    decide(h, key)
    pass_time(h, 30)
    h.commit({}, [h.entry("bind", key, "scheduler", code="no_room")])
    pass_time(h, 35)
    assert h.found == []
    pass_time(h, 2)
    assert h.found == [UNREPORTED]


def test_newly_pending_replica_needs_no_reason_yet() -> None:
    h = HistoryBuilder().prepare()
    healed(h)
    pass_time(h, 120)
    key = impossible(h)
    pass_time(h, 4)
    decide(h, key)
    pass_time(h, 30)
    assert h.found == []


def test_restored_scope_needs_new_reasons() -> None:
    h = HistoryBuilder().prepare()
    key = impossible(h)
    decide(h, key)
    rows = {name: row for name, row in h.rows.items() if not name.startswith("batch/")}
    h.restore(rows, incarnation="r1-i2")
    h.mark_restored()
    healed(h)
    pass_time(h, 67)
    assert {UNTRIED, UNREPORTED} <= set(h.found)


def test_preemption_that_leaves_enough_is_lawful() -> None:
    h = HistoryBuilder().prepare()
    low, high = three_running_two_must_stay(h)
    preempt(h, high[0], low[0], seen=h.revision)
    h.declare("more", **KEEPS_TWO)
    for key in h.spawn(0, 1, 2, workload="more"):
        h.run(key, "n2")
    preempt(h, high[1], "replica/t1/more-0", seen=h.revision, at="n2")
    assert "preemption_keeps_min_available" not in h.found


def test_node_failure_after_claim_is_not_blamed_on_preemption() -> None:
    h = HistoryBuilder().prepare()
    low, high = three_running_two_must_stay(h)
    seen = h.revision
    h.move(low[2], "unknown", "node-lifecycle", before="running")
    preempt(h, high[0], low[0], seen=seen)
    assert "preemption_keeps_min_available" not in h.found


def test_preemption_without_decisions_is_not_judged() -> None:
    h = HistoryBuilder().prepare()
    h.declare("s", **KEEPS_TWO)
    low = h.spawn(0, 1, 2, workload="s")
    for key in low:
        h.run(key)
    (high,) = h.spawn(9)
    preempt(h, high, low[0], low[1], seen=h.revision)
    assert "preemption_keeps_min_available" not in h.found
