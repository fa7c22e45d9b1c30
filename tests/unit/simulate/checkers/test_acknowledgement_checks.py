"""Is what clients and observers were told held against the history?"""

from __future__ import annotations

from tests.unit.simulate.checkers.history_builder import Json, Pen


def noted(code: str = "", number: int = 0) -> tuple[Pen, str]:
    pen = Pen().furnish()
    rows: dict[str, Json] = {} if code else {"event/e": {"spec": {}}}
    pen.commit(rows, [pen.entry("note", "e", "user", id="r1-i1.1.x", code=code, number=number)])
    return pen, "r1-i1.1.x"


def test_an_answer_that_stands_in_a_batch_is_true() -> None:
    pen, operation = noted(number=3)
    pen.world.judge.on_answer("r1", operation, "", 3, pen.revision)
    pen.world.judge.on_answer("r1", operation, "", 3, pen.revision)
    assert pen.found == []


def test_a_refusal_is_an_answer_too() -> None:
    pen, operation = noted("role")
    pen.world.judge.on_answer("r1", operation, "role", 0, pen.revision)
    assert pen.found == []


def test_an_answer_that_no_batch_tells_of_is_caught() -> None:
    pen, _ = noted()
    pen.world.judge.on_answer("r1", "r1-i1.1.y", "", 0, 7)
    assert pen.found == ["acknowledged_is_in_history"]


def test_another_answer_than_the_one_that_was_stored_is_caught() -> None:
    for said in (("role", 0, 0), ("", 4, 0), ("", 3, 1)):
        pen, operation = noted(number=3)
        pen.world.judge.on_answer("r1", operation, said[0], said[1], pen.revision + said[2])
        assert pen.found == ["acknowledged_is_in_history"], said


def test_two_answers_to_one_id_are_caught() -> None:
    pen, operation = noted(number=3)
    pen.world.judge.on_answer("r1", operation, "", 3, pen.revision)
    pen.world.judge.on_answer("r1", operation, "", 5, pen.revision)
    assert "one_answer_per_operation" in pen.found


def test_a_refused_id_says_nothing_of_the_operation() -> None:
    pen, _ = noted()
    pen.world.judge.on_answer("r1", "r1-i1.1.y", "operation_expired", 0, 0)
    assert pen.found == []


def test_an_id_that_stands_for_what_was_asked_is_well() -> None:
    pen, operation = noted(number=3)
    for taken in ("d", ""):
        pen.world.judge.on_answer("r1", operation, "", 3, pen.revision, taken)
    for code in ("operation_mismatch", "operation_expired"):
        pen.world.judge.on_answer("r1", operation, code, 0, 0, "other")
    pen.commit({}, [pen.entry("abandoned", "", "user", id="r1-i1.1.gone", digest="", code="abandoned")])
    pen.world.judge.on_answer("r1", "r1-i1.1.gone", "abandoned", 0, pen.revision, "other")
    assert pen.found == []


def test_an_answer_to_something_else_under_the_same_id_is_caught() -> None:
    for code in ("", "role"):
        pen, operation = noted(code)
        pen.world.judge.on_answer("r1", operation, code, 0, pen.revision, "other")
        assert pen.found == ["an_id_stands_for_one_payload"]


def test_an_answer_heard_after_a_restore_lost_it_is_listed() -> None:
    pen, operation = noted()
    at = pen.revision
    pen.restore({}, incarnation="r1-i2")
    pen.world.judge.on_answer("r1", operation, "", 0, at)
    assert pen.found == [] and pen.world.judge.lost == {"r1": [operation]}


def test_to_abandon_is_answered_with_what_had_happened() -> None:
    pen, _ = noted(number=3)
    first = pen.revision
    pen.commit({}, [pen.entry("abandon", "r1-i1.1.x", "user", id="r1-i1.1.a")])
    pen.world.judge.on_answer("r1", "r1-i1.1.a", "", 3, first)
    assert pen.found == []


def test_an_observer_goes_forward_over_restarts_and_restores() -> None:
    pen = Pen().furnish()
    for revision in (3, 3, pen.revision):
        pen.world.judge.on_observed("scheduler-1", "r1", "r1-i1", revision)
    pen.restore({}, incarnation="r1-i2")
    pen.world.judge.on_observed("scheduler-1", "r1", "r1-i2", pen.revision)
    pen.world.judge.on_observed("scheduler-2", "r1", "r1-i1", 2)
    assert pen.found == []


def test_an_observer_that_goes_back_is_caught() -> None:
    pen = Pen().furnish()
    pen.world.judge.on_observed("o", "r1", "r1-i1", 4)
    pen.world.judge.on_observed("o", "r1", "r1-i1", 3)
    assert pen.found == ["observers_never_go_back"]


def test_an_observer_that_returns_to_a_past_incarnation_is_caught() -> None:
    pen = Pen().furnish()
    pen.restore({}, incarnation="r1-i2")
    pen.world.judge.on_observed("o", "r1", "r1-i2", pen.revision)
    pen.world.judge.on_observed("o", "r1", "r1-i1", pen.revision)
    assert pen.found == ["observers_never_go_back"]


def test_an_observer_that_sees_what_never_was_is_caught() -> None:
    for incarnation, ahead in (("r1-i1", 1), ("r1-i9", 0)):
        pen = Pen().furnish()
        pen.world.judge.on_observed("o", "r1", incarnation, pen.revision + ahead)
        assert pen.found == ["observers_never_go_back"]
