"""Is a scheduler left alone that says what is so, and in time? What is not so is in said.py, and judged in test_safety.py."""

from __future__ import annotations

from tests.unit.simulate.checkers.false_decisions import KEEPS_TWO, decide, override, preempt, three_that_keep_two
from tests.unit.simulate.checkers.history_builder import Pen
from tests.unit.simulate.checkers.test_liveness_checks import healed, pass_time

UNTRIED = "pending_work_is_tried"
UNTOLD = "waiting_has_a_reason"


def impossible(pen: Pen) -> str:
    """One that no node has room for."""
    pen.declare("big", template={"command": ["x"], "resources": {"cpu": "64"}})
    (key,) = pen.spawn(0, workload="big")
    return key


def test_a_decision_that_adds_up_breaks_nothing() -> None:
    pen = Pen().furnish()
    key = impossible(pen)
    decide(pen, key)
    decide(pen, key, funnel=[["resources", 1]], fits=1, verdict="bound", reason="", cures=[])
    decide(pen, key, nodes=0, funnel=[], fits=0)
    assert pen.found == []


def test_what_others_write_under_that_name_is_not_judged() -> None:
    pen = Pen().furnish()
    decide(pen, impossible(pen), role="user", fits=9)
    assert pen.found == []


def test_a_decision_may_speak_of_fewer_nodes_than_there_are_by_now() -> None:
    pen = Pen().furnish()
    key = impossible(pen)
    before = pen.revision
    row = {**pen.rows["node/n1"], "metadata": {"name": "n3"}, "status": {}}
    pen.commit({"node/n3": row}, [pen.entry("apply", "node/n3", "operator")])
    decide(pen, key, revision=before)
    assert pen.found == []
    decide(pen, key)
    assert pen.found == ["decisions_add_up"]


def test_an_override_may_be_cited_as_long_as_it_lasts_by_what_was_seen() -> None:
    pen = Pen().furnish()
    key = impossible(pen)
    override(pen, "o")
    before = pen.revision
    pen.world.now_ms += 9_999
    decide(pen, key, overrides=["o"])
    pen.world.now_ms += 5_000
    decide(pen, key, overrides=["o"], revision=before)
    assert pen.found == []


def test_work_that_is_tried_again_and_again_is_left_alone() -> None:
    pen = Pen().furnish()
    key = impossible(pen)
    healed(pen)
    for _ in range(5):
        decide(pen, key)
        pass_time(pen, 60)
    assert pen.found == []


def test_work_that_nobody_tries_is_found_and_a_claim_counts_as_a_try() -> None:
    pen = Pen().furnish()
    key = impossible(pen)
    healed(pen)
    pass_time(pen, 40)
    pen.commit({}, [pen.entry("bind", key, "scheduler", code="no_room")])
    pass_time(pen, 64)
    assert UNTRIED not in pen.found
    pass_time(pen, 3)
    assert UNTRIED in pen.found


def test_work_that_waits_without_a_word_is_found_and_a_claim_is_no_word() -> None:
    pen = Pen().furnish()
    key = impossible(pen)
    healed(pen)
    pass_time(pen, 60)
    pen.commit({}, [pen.entry("bind", key, "scheduler", code="no_room")])
    pass_time(pen, 5)
    assert pen.found == []
    pass_time(pen, 2)
    assert pen.found == [UNTOLD]


def test_a_reason_that_is_too_old_is_none() -> None:
    pen = Pen().furnish()
    key = impossible(pen)
    healed(pen)
    pass_time(pen, 50)
    decide(pen, key)
    pass_time(pen, 30)
    pen.commit({}, [pen.entry("bind", key, "scheduler", code="no_room")])
    pass_time(pen, 35)
    assert pen.found == []
    pass_time(pen, 2)
    assert pen.found == [UNTOLD]


def test_what_became_pending_just_now_need_not_have_a_reason() -> None:
    pen = Pen().furnish()
    healed(pen)
    pass_time(pen, 120)
    key = impossible(pen)
    pass_time(pen, 4)
    decide(pen, key)
    pass_time(pen, 30)
    assert pen.found == []


def test_a_restored_scope_has_its_reasons_told_anew() -> None:
    pen = Pen().furnish()
    key = impossible(pen)
    decide(pen, key)
    rows = {name: row for name, row in pen.rows.items() if not name.startswith("batch/")}
    pen.restore(rows, incarnation="r1-i2")
    pen.doubt()
    healed(pen)
    pass_time(pen, 67)
    assert {UNTRIED, UNTOLD} <= set(pen.found)


def test_a_preemption_that_leaves_enough_breaks_nothing() -> None:
    pen = Pen().furnish()
    low, high = three_that_keep_two(pen)
    preempt(pen, high[0], low[0], seen=pen.revision)
    pen.declare("more", **KEEPS_TWO)
    for key in pen.spawn(0, 1, 2, workload="more"):
        pen.run(key, "n2")
    preempt(pen, high[1], "replica/t1/more-0", seen=pen.revision, at="n2")
    assert "preemption_leaves_enough" not in pen.found


def test_a_node_that_fails_after_the_claim_is_not_the_claimants_fault() -> None:
    pen = Pen().furnish()
    low, high = three_that_keep_two(pen)
    seen = pen.revision
    pen.move(low[2], "unknown", "node-lifecycle", before="running")
    preempt(pen, high[0], low[0], seen=seen)
    assert "preemption_leaves_enough" not in pen.found


def test_who_guesses_is_not_asked() -> None:
    pen = Pen().furnish()
    pen.declare("s", **KEEPS_TWO)
    low = pen.spawn(0, 1, 2, workload="s")
    for key in low:
        pen.run(key)
    (high,) = pen.spawn(9)
    preempt(pen, high, low[0], low[1], seen=pen.revision)
    assert "preemption_leaves_enough" not in pen.found
