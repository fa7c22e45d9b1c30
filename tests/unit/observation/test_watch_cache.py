"""Watch cache: holds the listed rows, finds them by every index, and notifies the listeners of each change once."""

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


class RecordingListener:
    """Records the changes that a listener receives."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str, str]] = []
        self.reaches = 0

    def on_change(self, key: str, old: Any, new: Any) -> None:
        self.changes.append((key, _phase_or_name(old), _phase_or_name(new)))

    def on_commit(self) -> None:
        self.reaches += 1


def _phase_or_name(obj: Any) -> str:
    if obj is None:
        return ""
    return str(obj.status.phase) if isinstance(obj, Replica) else obj.metadata.name


def apply_list(cache: WatchCache, revision: int, *rows: Row, head: Head = Head("one", 1, 1, "a", 0, "")) -> None:
    cache.begin_list(head, revision)
    cache.add_page(rows)
    cache.end_list()


def row(obj: Any, revision: int) -> Row:
    return Row(key(obj), encode(obj), revision)


def test_replicas_are_indexed_by_phase_node_workload_until_deleted() -> None:
    table = ControllerBench(replica("w", 0, "serving", "n1"), replica("w", 1), replica("v", 0, "serving", "n1"))
    cache = table.board
    assert sorted(cache.by_phase[Phase.SERVING]) == ["replica/t1/v-0", "replica/t1/w-0"]
    assert [one.key for one in cache.replicas_of("t1", "w")] == ["replica/t1/w-0", "replica/t1/w-1"]
    assert [one.key for one in cache.replicas_on("n1")] == ["replica/t1/w-0", "replica/t1/v-0"]
    table.write(replica("w", 0, "pending"))
    assert [one.key for one in cache.replicas_on("n1")] == ["replica/t1/v-0"]
    table.write(drop=["replica/t1/w-0", "replica/t1/w-1", "replica/t1/v-0"])
    assert not any(cache.by_phase.values())
    assert (cache.by_node, cache.by_workload, cache.rows) == ({}, {}, {})


def test_list_pages_take_effect_only_when_list_ends() -> None:
    table = ControllerBench(ready("n1"), ready("n2"))
    cache, listener = table.board, RecordingListener()
    cache.subscribe(listener)
    cache.begin_list(Head("one", 1, 1, "a", 0, ""), 9)
    cache.add_page([row(ready("n2"), 1), row(ready("n3"), 9), Row("incarnation", b"one", 1)])
    assert sorted(cache.rows) == ["node/n1", "node/n2"]
    assert listener.changes == []
    cache.end_list()
    assert sorted(cache.rows) == ["node/n2", "node/n3"]
    assert listener.changes == [("node/n1", "n1", ""), ("node/n3", "", "n3")], "unchanged rows are not reported"
    assert (listener.reaches, cache.revision) == (1, 9)


def test_interrupted_list_is_discarded() -> None:
    cache = ControllerBench(ready("n1")).board
    cache.begin_list(Head("one", 1, 1, "a", 0, ""), 9)
    cache.add_page([row(ready("n7"), 9)])
    apply_list(cache, 10, row(ready("n1"), 1), Row("incarnation", b"one", 1))
    assert sorted(cache.rows) == ["node/n1"]


def test_rewritten_row_is_reported_with_old_and_new_value() -> None:
    table, listener = ControllerBench(replica("w", 0, "pending")), RecordingListener()
    table.board.subscribe(listener)
    table.write(replica("w", 0, "bound", "n1"))
    table.write(drop=["replica/t1/w-0"])
    assert listener.changes == [("replica/t1/w-0", "pending", "bound"), ("replica/t1/w-0", "bound", "")]
    assert listener.reaches == 2


def test_node_listener_receives_only_changes_of_that_node() -> None:
    table, listener = ControllerBench(ready("n1"), ready("n2"), replica("w", 0, "serving", "n2")), RecordingListener()
    table.board.subscribe(listener, "n1")
    table.write(replica("w", 0, "draining", "n2"), ready("n2", NodeHealth.SUSPECT))
    assert (listener.changes, listener.reaches) == ([], 0)
    table.write(replica("w", 0, "bound", "n1"), ready("n1", NodeHealth.SUSPECT))
    assert [key for key, *_ in listener.changes] == ["replica/t1/w-0", "node/n1"]
    assert listener.reaches == 1
    table.write(replica("w", 0, "released"))
    assert listener.changes[-1] == ("replica/t1/w-0", "bound", "released")
    table.board.unsubscribe(listener, "n1")
    table.write(ready("n1"))
    assert len(listener.changes) == 3


def test_notify_on_commit_fires_once_without_own_changes() -> None:
    table, listener = ControllerBench(ready("n1")), RecordingListener()
    table.board.subscribe(listener, "n1")
    table.board.notify_on_commit(listener)
    table.write(ready("n2"))
    table.write(ready("n2"))
    assert (listener.changes, listener.reaches) == ([], 1)


def test_batches_events_and_decisions_are_not_cached() -> None:
    cache = ControllerBench().board
    changes = tuple(RowChange(name, b"{}", 2) for name in ("batch/1", "event/e", "decision/d", HEAD))
    cache.apply(WatchEvent(1, 2, changes, 0, 0, None, Head("one", 1, 2, "a", 0, "")))
    assert cache.rows == {}


def test_cache_is_current_once_incarnation_row_was_seen() -> None:
    """F10."""
    cache, seen = WatchCache(FakeClock()), list[bool]()
    seen.append(cache.is_current)
    apply_list(cache, 3, row(ready("n1"), 1), Row("incarnation", b"one", 1))
    seen.append(cache.is_current)
    apply_list(cache, 4, row(ready("n1"), 1), Row("incarnation", b"one", 1), head=Head("two", 1, 1, "a", 0, ""))
    seen.append(cache.is_current)
    cache.apply(WatchEvent(4, 5, (RowChange("incarnation", b"two", 5),), 0, 0, None, Head("two", 1, 2, "a", 0, "")))
    seen.append(cache.is_current)
    assert seen == [False, True, False, True]


def test_cache_age_counts_from_last_event() -> None:
    table = ControllerBench(ready("n1"))
    table.clock.at_ms += 700
    assert table.board.age_ms() == 700
    table.write()
    assert table.board.age_ms() == 0


def test_of_kind_lists_one_tenant_or_all() -> None:
    cache = ControllerBench(*work("w"), *work("v", owner="t2"), ready("n1"), replica("w", 0)).board
    assert [key for key, _ in cache.of_kind("workload/")] == ["workload/t1/w", "workload/t2/v"]
    assert [key for key, _ in cache.of_kind("workload/t2/")] == ["workload/t2/v"]
    assert [key for key, _ in cache.of_kind("replica/")] == ["replica/t1/w-0"]
    assert list(cache.of_kind("tenant/")) == []


STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([*Phase, None]), st.sampled_from(["n1", "n2"])), max_size=30)


@given(STEPS, st.integers(0, 30))
def test_indexes_equal_those_of_fresh_list_after_any_changes(steps: list[Any], relist: int) -> None:
    """S23 F05: including a new list at an arbitrary point."""
    table = ControllerBench()
    for number, (index, phase, node) in enumerate(steps):
        if phase is None:
            table.write(drop=[f"replica/t1/w-{index}"])
        else:
            table.write(replica("w", index, phase, node))
        if number == relist:
            rows = [Row(one.key, one.value, one.revision) for one in table.board.rows.values()]
            apply_list(table.board, table.revision, *rows, Row("incarnation", b"one", 1))
    fresh = WatchCache(FakeClock())
    apply_list(fresh, table.revision, *(Row(one.key, one.value, one.revision) for one in table.board.rows.values()))
    for index in ("by_phase", "by_node", "by_workload"):
        seen, expected = getattr(table.board, index), getattr(fresh, index)
        assert {at: sorted(keys) for at, keys in seen.items()} == {at: sorted(keys) for at, keys in expected.items()}, index
