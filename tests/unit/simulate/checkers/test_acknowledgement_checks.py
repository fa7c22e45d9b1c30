"""Acknowledgement checks: answers to clients and observed revisions are compared with the history."""

from __future__ import annotations

from tests.unit.simulate.checkers.history_builder import HistoryBuilder, Json


def history_with_note(code: str = "", number: int = 0) -> tuple[HistoryBuilder, str]:
    h = HistoryBuilder().prepare()
    rows: dict[str, Json] = {} if code else {"event/e": {"spec": {}}}
    h.commit(rows, [h.entry("note", "e", "user", id="r1-i1.1.x", code=code, number=number)])
    return h, "r1-i1.1.x"


def test_answer_recorded_in_batch_is_true() -> None:
    h, operation = history_with_note(number=3)
    h.world.judge.on_answer("r1", operation, "", 3, h.revision)
    h.world.judge.on_answer("r1", operation, "", 3, h.revision)
    assert h.found == []


def test_recorded_refusal_is_true() -> None:
    h, operation = history_with_note("role")
    h.world.judge.on_answer("r1", operation, "role", 0, h.revision)
    assert h.found == []


def test_answer_without_batch_record_is_violation() -> None:
    h, _ = history_with_note()
    h.world.judge.on_answer("r1", "r1-i1.1.y", "", 0, 7)
    assert h.found == ["acknowledged_operations_are_in_history"]


def test_answer_that_differs_from_record_is_violation() -> None:
    for answer in (("role", 0, 0), ("", 4, 0), ("", 3, 1)):
        h, operation = history_with_note(number=3)
        h.world.judge.on_answer("r1", operation, answer[0], answer[1], h.revision + answer[2])
        assert h.found == ["acknowledged_operations_are_in_history"], answer


def test_two_answers_to_one_operation_id_are_violation() -> None:
    h, operation = history_with_note(number=3)
    h.world.judge.on_answer("r1", operation, "", 3, h.revision)
    h.world.judge.on_answer("r1", operation, "", 5, h.revision)
    assert "one_answer_per_operation" in h.found


def test_answer_that_id_expired_is_no_violation() -> None:
    h, _ = history_with_note()
    h.world.judge.on_answer("r1", "r1-i1.1.y", "operation_expired", 0, 0)
    assert h.found == []


def test_id_with_matching_payload_is_no_violation() -> None:
    h, operation = history_with_note(number=3)
    for taken in ("d", ""):
        h.world.judge.on_answer("r1", operation, "", 3, h.revision, taken)
    for code in ("operation_mismatch", "operation_expired"):
        h.world.judge.on_answer("r1", operation, code, 0, 0, "other")
    h.commit({}, [h.entry("abandoned", "", "user", id="r1-i1.1.gone", digest="", code="abandoned")])
    h.world.judge.on_answer("r1", "r1-i1.1.gone", "abandoned", 0, h.revision, "other")
    assert h.found == []


def test_answer_to_other_payload_under_same_id_is_violation() -> None:
    for code in ("", "role"):
        h, operation = history_with_note(code)
        h.world.judge.on_answer("r1", operation, code, 0, h.revision, "other")
        assert h.found == ["operation_id_has_one_payload"]


def test_answer_lost_by_restore_is_listed_as_lost() -> None:
    h, operation = history_with_note()
    at = h.revision
    h.restore({}, incarnation="r1-i2")
    h.world.judge.on_answer("r1", operation, "", 0, at)
    assert h.found == [] and h.world.judge.lost == {"r1": [operation]}


def test_abandon_is_answered_with_earlier_outcome() -> None:
    h, _ = history_with_note(number=3)
    first = h.revision
    h.commit({}, [h.entry("abandon", "r1-i1.1.x", "user", id="r1-i1.1.a")])
    h.world.judge.on_answer("r1", "r1-i1.1.a", "", 3, first)
    assert h.found == []


def test_observer_may_advance_over_restarts_and_restores() -> None:
    h = HistoryBuilder().prepare()
    for revision in (3, 3, h.revision):
        h.world.judge.on_observed("scheduler-1", "r1", "r1-i1", revision)
    h.restore({}, incarnation="r1-i2")
    h.world.judge.on_observed("scheduler-1", "r1", "r1-i2", h.revision)
    h.world.judge.on_observed("scheduler-2", "r1", "r1-i1", 2)
    assert h.found == []


def test_observer_going_back_is_violation() -> None:
    h = HistoryBuilder().prepare()
    h.world.judge.on_observed("o", "r1", "r1-i1", 4)
    h.world.judge.on_observed("o", "r1", "r1-i1", 3)
    assert h.found == ["observed_revisions_never_go_back"]


def test_observer_returning_to_old_incarnation_is_violation() -> None:
    h = HistoryBuilder().prepare()
    h.restore({}, incarnation="r1-i2")
    h.world.judge.on_observed("o", "r1", "r1-i2", h.revision)
    h.world.judge.on_observed("o", "r1", "r1-i1", h.revision)
    assert h.found == ["observed_revisions_never_go_back"]


def test_observer_of_unknown_revision_or_incarnation_is_violation() -> None:
    for incarnation, ahead in (("r1-i1", 1), ("r1-i9", 0)):
        h = HistoryBuilder().prepare()
        h.world.judge.on_observed("o", "r1", incarnation, h.revision + ahead)
        assert h.found == ["observed_revisions_never_go_back"]
