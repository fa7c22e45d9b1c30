"""KeyOrder walks keys like a sorted set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remit.store.keys import KeyOrder

KEY = st.text("ab/\0\U0010ffff", min_size=1, max_size=4)


@given(st.lists(st.lists(KEY, max_size=6), max_size=8), KEY, st.one_of(st.none(), KEY))
def test_walk_equals_sorted_keys_in_range(batches: list[list[str]], start: str, end: str | None) -> None:
    order, known = KeyOrder(), set[str]()
    for batch in batches:
        order.add(batch)
        known.update(batch)
        expected = sorted(key for key in known if key >= start and (end is None or key < end))
        assert list(order.walk(start, end)) == expected


def test_key_added_during_walk_is_not_visited() -> None:
    order = KeyOrder(["a", "c"])
    walk = order.walk("", None)
    assert next(walk) == "a"
    order.add(["b"])
    assert list(order.walk("", None)) == ["a", "b", "c"]
    assert list(walk) == ["c"]


def test_reset_replaces_all_keys() -> None:
    order = KeyOrder(["a", "b"])
    order.add(["c"])
    order.reset(["b"])
    assert list(order.walk("", None)) == ["b"]
