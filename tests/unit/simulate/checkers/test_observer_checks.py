"""Is it noticed when a view shows what does not stand, or does not keep up? Views of a small history, right and wrong."""

from __future__ import annotations

import pytest

from remit.simulate.checkers.judge import Core
from tests.unit.simulate.checkers.history_builder import ROLES, Pen

GONE = "summary/x"
CHECK = "views_show_what_stands"


def shown(pen: Pen) -> dict[str, int]:
    """What a view that is right shows of it."""
    rows = pen.world.judge.history(pen.scope).rows
    return {key: at for key, (at, _) in rows.items() if key not in ("head", "incarnation") and not key.startswith("batch/")}


def viewed(pen: Pen, rows: dict[str, int], *, back: int = 0) -> list[str]:
    """Why the judge does not like it."""
    pen.world.judge.on_view("anna", pen.scope, pen.revision - back, rows)
    assert set(pen.found) <= {CHECK}
    return [f"{violation.key}: {violation.why}" for violation in pen.world.judge.violations]


def heal(pen: Pen) -> None:
    pen.world.judge.heal(Core(frozenset({pen.scope}), {}, frozenset(ROLES), pen.world.now_ms))


@pytest.fixture
def pen() -> Pen:
    pen = Pen().furnish()
    pen.spawn(0, 1)
    pen.bind("replica/t1/w-0")
    pen.commit({GONE: {"spec": {}}}, [pen.entry("report", GONE, "workloads")])
    return pen


def test_a_view_of_all_that_stands_is_right__notes_and_the_chain_are_not_in_it(pen: Pen) -> None:
    rows = {"event/1": {"a": 1}, "decision/1": {"a": 1}, GONE: None}
    pen.commit(rows, [pen.entry("report", GONE, "workloads")])
    right = {key: at for key, at in shown(pen).items() if not key.startswith(("event/", "decision/"))}
    assert "replica/t1/w-0" in right and GONE not in right
    assert viewed(pen, right) == []
    assert pen.world.judge.undecided == []


def test_a_row_that_is_gone_and_still_shown_is_told(pen: Pen) -> None:
    rows = shown(pen)
    pen.commit({GONE: None}, [pen.entry("report", GONE, "workloads")])
    (why,) = viewed(pen, rows)
    assert why.startswith(f"{GONE}: anna at revision ") and why.endswith("but it was deleted")


def test_a_row_that_is_not_shown_is_told(pen: Pen) -> None:
    rows = shown(pen)
    del rows["node/n2"]
    (why,) = viewed(pen, rows)
    assert why.startswith("node/n2: anna at revision ") and "lacks it" in why


def test_an_old_version_of_a_row_is_told(pen: Pen) -> None:
    rows = shown(pen)
    rows["replica/t1/w-0"] -= 1
    (why,) = viewed(pen, rows)
    assert why.startswith("replica/t1/w-0: anna at revision ") and "changed at" in why


def test_a_view_that_is_behind_may_still_catch_up(pen: Pen) -> None:
    heal(pen)
    rows = shown(pen)
    pen.spawn(2)
    pen.world.now_ms += 60_000
    assert viewed(pen, rows, back=1) == []
    assert len(pen.world.judge.undecided) == 1 and CHECK in pen.world.judge.undecided[0]


def test_a_view_that_is_behind_for_too_long_is_told(pen: Pen) -> None:
    heal(pen)
    rows = shown(pen)
    pen.spawn(2)
    pen.world.now_ms += 60_001
    pen.spawn(3)
    (why,) = viewed(pen, rows, back=2)
    assert why.startswith("anna: ") and why.endswith("1 ms later than allowed")


def test_the_time_to_catch_up_counts_from_when_the_faults_ended(pen: Pen) -> None:
    rows = shown(pen)
    pen.spawn(2)
    pen.world.now_ms += 100_000
    heal(pen)
    pen.world.now_ms += 60_000
    assert viewed(pen, rows, back=1) == []
    assert len(pen.world.judge.undecided) == 1


def test_while_faults_last_nobody_is_told_to_be_late(pen: Pen) -> None:
    pen.world.now_ms += 1_000_000
    assert viewed(pen, {}, back=3) == []
    assert len(pen.world.judge.undecided) == 1


def test_after_a_restore_a_view_of_what_was_lost_is_behind__one_of_the_backup_is_right(pen: Pen) -> None:
    before = dict(pen.rows)
    pen.spawn(2)
    lost = shown(pen)
    pen.restore(before, incarnation="r1-i2")
    assert viewed(pen, lost, back=1) == []
    assert len(pen.world.judge.undecided) == 1
    assert "replica/t1/w-2" not in shown(pen)
    assert viewed(pen, shown(pen)) == []
