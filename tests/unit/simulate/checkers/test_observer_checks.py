"""Observer checks: views that show wrong rows or fall behind are reported."""

from __future__ import annotations

import pytest

from remit.simulate.checkers.judge import Core
from tests.unit.simulate.checkers.history_builder import ROLES, HistoryBuilder

GONE = "summary/x"
CHECK = "views_match_store"


def correct_rows(h: HistoryBuilder) -> dict[str, int]:
    """Rows that a correct view shows."""
    rows = h.world.judge.history(h.scope).rows
    return {key: at for key, (at, _) in rows.items() if key not in ("head", "incarnation") and not key.startswith("batch/")}


def check_view(h: HistoryBuilder, rows: dict[str, int], *, back: int = 0) -> list[str]:
    """Violations that the judge reports for this view."""
    h.world.judge.on_view("anna", h.scope, h.revision - back, rows)
    assert set(h.found) <= {CHECK}
    return [f"{violation.key}: {violation.why}" for violation in h.world.judge.violations]


def heal(h: HistoryBuilder) -> None:
    h.world.judge.heal(Core(frozenset({h.scope}), {}, frozenset(ROLES), h.world.now_ms))


@pytest.fixture
def h() -> HistoryBuilder:
    h = HistoryBuilder().prepare()
    h.spawn(0, 1)
    h.bind("replica/t1/w-0")
    h.commit({GONE: {"spec": {}}}, [h.entry("report", GONE, "workloads")])
    return h


def test_correct_view_is_no_violation(h: HistoryBuilder) -> None:
    rows = {"event/1": {"a": 1}, "decision/1": {"a": 1}, GONE: None}
    h.commit(rows, [h.entry("report", GONE, "workloads")])
    right = {key: at for key, at in correct_rows(h).items() if not key.startswith(("event/", "decision/"))}
    assert "replica/t1/w-0" in right and GONE not in right
    assert check_view(h, right) == []
    assert h.world.judge.undecided == []


def test_deleted_row_still_shown_is_violation(h: HistoryBuilder) -> None:
    rows = correct_rows(h)
    h.commit({GONE: None}, [h.entry("report", GONE, "workloads")])
    (why,) = check_view(h, rows)
    assert why.startswith(f"{GONE}: anna at revision ") and why.endswith("but it was deleted")


def test_missing_row_is_violation(h: HistoryBuilder) -> None:
    rows = correct_rows(h)
    del rows["node/n2"]
    (why,) = check_view(h, rows)
    assert why.startswith("node/n2: anna at revision ") and "lacks it" in why


def test_old_row_version_is_violation(h: HistoryBuilder) -> None:
    rows = correct_rows(h)
    rows["replica/t1/w-0"] -= 1
    (why,) = check_view(h, rows)
    assert why.startswith("replica/t1/w-0: anna at revision ") and "changed at" in why


def test_view_behind_within_limit_is_undecided(h: HistoryBuilder) -> None:
    heal(h)
    rows = correct_rows(h)
    h.spawn(2)
    h.world.now_ms += 60_000
    assert check_view(h, rows, back=1) == []
    assert len(h.world.judge.undecided) == 1 and CHECK in h.world.judge.undecided[0]


def test_view_behind_too_long_is_violation(h: HistoryBuilder) -> None:
    heal(h)
    rows = correct_rows(h)
    h.spawn(2)
    h.world.now_ms += 60_001
    h.spawn(3)
    (why,) = check_view(h, rows, back=2)
    assert why.startswith("anna: ") and why.endswith("1 ms later than allowed")


def test_catch_up_time_counts_from_end_of_faults(h: HistoryBuilder) -> None:
    rows = correct_rows(h)
    h.spawn(2)
    h.world.now_ms += 100_000
    heal(h)
    h.world.now_ms += 60_000
    assert check_view(h, rows, back=1) == []
    assert len(h.world.judge.undecided) == 1


def test_late_view_during_faults_is_undecided(h: HistoryBuilder) -> None:
    h.world.now_ms += 1_000_000
    assert check_view(h, {}, back=3) == []
    assert len(h.world.judge.undecided) == 1


def test_after_restore_view_of_lost_rows_is_behind_and_of_backup_correct(h: HistoryBuilder) -> None:
    before = dict(h.rows)
    h.spawn(2)
    lost = correct_rows(h)
    h.restore(before, incarnation="r1-i2")
    assert check_view(h, lost, back=1) == []
    assert len(h.world.judge.undecided) == 1
    assert "replica/t1/w-2" not in correct_rows(h)
    assert check_view(h, correct_rows(h)) == []
