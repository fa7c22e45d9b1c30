"""Does a board show what was told, find it by every index, and tell each change once to whom it concerns?"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from remit.model.kinds import NodeHealth
from remit.model.objects import encode, key
from remit.model.records import Phase, Replica
from remit.observation.watch_cache import WatchCache
from remit.store.protocol import HEAD, Head, Row, RowChange, WatchEvent
from tests.properties.authority_world import FakeClock
from tests.unit.correction.controller_fixture import ControllerBench, ready, replica, work


class Ear:
    """Writes down what a listener hears."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str, str]] = []
        self.reaches = 0

    def on_change(self, key: str, old: Any, new: Any) -> None:
        self.changes.append((key, _word(old), _word(new)))

    def on_commit(self) -> None:
        self.reaches += 1


def _word(thing: Any) -> str:
    if thing is None:
        return ""
    return str(thing.status.phase) if isinstance(thing, Replica) else thing.metadata.name


def listed(board: WatchCache, revision: int, *rows: Row, head: Head = Head("one", 1, 1, "a", 0, "")) -> None:
    board.begin_list(head, revision)
    board.add_page(rows)
    board.end_list()


def row(thing: Any, revision: int) -> Row:
    return Row(key(thing), encode(thing), revision)


def test_replicas_are_found_by_phase_node_and_workload__and_leave_no_trace_when_they_go() -> None:
    table = ControllerBench(replica("w", 0, "serving", "n1"), replica("w", 1), replica("v", 0, "serving", "n1"))
    board = table.board
    assert sorted(board.by_phase[Phase.SERVING]) == ["replica/t1/v-0", "replica/t1/w-0"]
    assert [one.key for one in board.replicas_of("t1", "w")] == ["replica/t1/w-0", "replica/t1/w-1"]
    assert [one.key for one in board.replicas_on("n1")] == ["replica/t1/w-0", "replica/t1/v-0"]
    table.write(replica("w", 0, "pending"))
    assert [one.key for one in board.replicas_on("n1")] == ["replica/t1/v-0"]
    table.write(drop=["replica/t1/w-0", "replica/t1/w-1", "replica/t1/v-0"])
    assert not any(board.by_phase.values())
    assert (board.by_node, board.by_workload, board.rows) == ({}, {}, {})


def test_a_list_is_taken_as_a_whole__while_its_pages_come_the_board_stays_as_it_was() -> None:
    table = ControllerBench(ready("n1"), ready("n2"))
    board, ear = table.board, Ear()
    board.subscribe(ear)
    board.begin_list(Head("one", 1, 1, "a", 0, ""), 9)
    board.add_page([row(ready("n2"), 1), row(ready("n3"), 9), Row("incarnation", b"one", 1)])
    assert sorted(board.rows) == ["node/n1", "node/n2"]
    assert ear.changes == []
    board.end_list()
    assert sorted(board.rows) == ["node/n2", "node/n3"]
    assert ear.changes == [("node/n1", "n1", ""), ("node/n3", "", "n3")], "what is as it was is no news"
    assert (ear.reaches, board.revision) == (1, 9)


def test_a_list_that_breaks_off_is_void() -> None:
    board = ControllerBench(ready("n1")).board
    board.begin_list(Head("one", 1, 1, "a", 0, ""), 9)
    board.add_page([row(ready("n7"), 9)])
    listed(board, 10, row(ready("n1"), 1), Row("incarnation", b"one", 1))
    assert sorted(board.rows) == ["node/n1"]


def test_a_row_that_was_made_anew_is_a_change_with_both_sides() -> None:
    table, ear = ControllerBench(replica("w", 0, "pending")), Ear()
    table.board.subscribe(ear)
    table.write(replica("w", 0, "bound", "n1"))
    table.write(drop=["replica/t1/w-0"])
    assert ear.changes == [("replica/t1/w-0", "pending", "bound"), ("replica/t1/w-0", "bound", "")]
    assert ear.reaches == 2


def test_a_listener_of_one_node_hears_of_what_comes_and_goes_there_alone() -> None:
    table, ear = ControllerBench(ready("n1"), ready("n2"), replica("w", 0, "serving", "n2")), Ear()
    table.board.subscribe(ear, "n1")
    table.write(replica("w", 0, "draining", "n2"), ready("n2", NodeHealth.SUSPECT))
    assert (ear.changes, ear.reaches) == ([], 0)
    table.write(replica("w", 0, "bound", "n1"), ready("n1", NodeHealth.SUSPECT))
    assert [key for key, *_ in ear.changes] == ["replica/t1/w-0", "node/n1"]
    assert ear.reaches == 1
    table.write(replica("w", 0, "released"))
    assert ear.changes[-1] == ("replica/t1/w-0", "bound", "released")
    table.board.unsubscribe(ear, "n1")
    table.write(ready("n1"))
    assert len(ear.changes) == 3


def test_whoever_asked_is_told_at_the_next_word_although_nothing_of_its_own_changed() -> None:
    table, ear = ControllerBench(ready("n1")), Ear()
    table.board.subscribe(ear, "n1")
    table.board.notify_on_commit(ear)
    table.write(ready("n2"))
    table.write(ready("n2"))
    assert (ear.changes, ear.reaches) == ([], 1)


def test_what_grows_with_the_run_is_not_kept() -> None:
    board = ControllerBench().board
    changes = tuple(RowChange(name, b"{}", 2) for name in ("batch/1", "event/e", "decision/d", HEAD))
    board.apply(WatchEvent(1, 2, changes, 0, 0, None, Head("one", 1, 2, "a", 0, "")))
    assert board.rows == {}


def test_a_board_is_sober_once_this_incarnation_has_doubted_what_its_backup_says() -> None:
    """F10."""
    board, seen = WatchCache(FakeClock()), list[bool]()
    seen.append(board.is_current)
    listed(board, 3, row(ready("n1"), 1), Row("incarnation", b"one", 1))
    seen.append(board.is_current)
    listed(board, 4, row(ready("n1"), 1), Row("incarnation", b"one", 1), head=Head("two", 1, 1, "a", 0, ""))
    seen.append(board.is_current)
    board.apply(WatchEvent(4, 5, (RowChange("incarnation", b"two", 5),), 0, 0, None, Head("two", 1, 2, "a", 0, "")))
    seen.append(board.is_current)
    assert seen == [False, True, False, True]


def test_a_board_knows_how_old_it_is() -> None:
    table = ControllerBench(ready("n1"))
    table.clock.at_ms += 700
    assert table.board.age_ms() == 700
    table.write()
    assert table.board.age_ms() == 0


def test_of_a_kind_by_tenant_or_of_all() -> None:
    board = ControllerBench(*work("w"), *work("v", owner="t2"), ready("n1"), replica("w", 0)).board
    assert [key for key, _ in board.of_kind("workload/")] == ["workload/t1/w", "workload/t2/v"]
    assert [key for key, _ in board.of_kind("workload/t2/")] == ["workload/t2/v"]
    assert [key for key, _ in board.of_kind("replica/")] == ["replica/t1/w-0"]
    assert list(board.of_kind("tenant/")) == []


STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([*Phase, None]), st.sampled_from(["n1", "n2"])), max_size=30)


@given(STEPS, st.integers(0, 30))
def test_whatever_came_the_indexes_are_those_of_a_board_that_lists_it_now(steps: list[Any], relist: int) -> None:
    """S23 F05: also if somewhere on the way it had to list anew."""
    table = ControllerBench()
    for number, (index, phase, node) in enumerate(steps):
        if phase is None:
            table.write(drop=[f"replica/t1/w-{index}"])
        else:
            table.write(replica("w", index, phase, node))
        if number == relist:
            rows = [Row(one.key, one.value, one.revision) for one in table.board.rows.values()]
            listed(table.board, table.revision, *rows, Row("incarnation", b"one", 1))
    fresh = WatchCache(FakeClock())
    listed(fresh, table.revision, *(Row(one.key, one.value, one.revision) for one in table.board.rows.values()))
    for index in ("by_phase", "by_node", "by_workload"):
        seen, anew = getattr(table.board, index), getattr(fresh, index)
        assert {at: sorted(keys) for at, keys in seen.items()} == {at: sorted(keys) for at, keys in anew.items()}, index
