"""Exact bounds of prefixes and ranges for any characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.store.keys import check_revision, prefix_end, range_start
from remit.store.protocol import Compacted, Invalid

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.text("a\ud7ff\ue000\U0010ffff", max_size=4)


@given(TEXT, TEXT)
def test_key_is_within_prefix_bounds_exactly_if_it_has_prefix(prefix: str, key: str) -> None:
    for one in (key, prefix + key):
        end = prefix_end(prefix)
        assert (prefix <= one and (end is None or one < end)) is one.startswith(prefix)


@given(TEXT, TEXT, TEXT)
def test_range_starts_after_given_key(prefix: str, after: str, key: str) -> None:
    for one in (key, prefix + key, after + key):
        if one.startswith(prefix):
            assert (one >= range_start(prefix, after)) is (one > after or not after)


def test_compacted_or_future_revision_is_refused() -> None:
    check_revision(5, compacted=5, now=5)
    with pytest.raises(Compacted, match="list again"):
        check_revision(4, compacted=5, now=9)
    for wrong in (-1, 10):
        with pytest.raises(Invalid):
            check_revision(wrong, compacted=5, now=9)
