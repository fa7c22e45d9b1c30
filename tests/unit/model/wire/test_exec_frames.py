"""Are the parts of a session the same however their bytes are cut, and is what is no part refused?"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.model.wire.exec_frames import (
    ARGV_BYTES_MAX,
    PART_BYTES_MAX,
    Begin,
    Ear,
    Part,
    Spoken,
    Unspoken,
    Window,
    begin_of,
    spoken,
    window_of,
)

PARTS = st.lists(st.tuples(st.sampled_from(list(Part)), st.binary(max_size=200)), max_size=8)


@given(PARTS, st.lists(st.integers(1, 50), max_size=100))
def test_however_it_is_cut_the_same_parts_are_heard(parts: list[tuple[Part, bytes]], cuts: list[int]) -> None:
    left = b"".join(spoken(part, body) for part, body in parts)
    ear, heard = Ear(), list[Spoken]()
    for cut in cuts:
        heard += ear.hear(left[:cut])
        left = left[cut:]
    heard += ear.hear(left)
    assert heard == [Spoken(part, body) for part, body in parts]


def test_a_part_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(Unspoken, match="at most"):
        Ear().hear(spoken(Part.INPUT)[:1] + (PART_BYTES_MAX + 1).to_bytes(4))


def test_a_beginning_is_read_as_it_was_written() -> None:
    begin = Begin(("sh", "-c", ";$(id) \n \u202e"), 3, True, Window(10, 20), "xterm-256color")
    assert begin_of(msgspec.json.encode(begin)) == begin
    assert window_of(msgspec.json.encode(Window(1, 10_000))) == Window(1, 10_000)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"argv": []}',
        b'{"argv": [""]}',
        b'{"argv": "sh -c id"}',
        b'{"argv": ["a\\u0000b"]}',
        b'{"argv": ["\\ud800"]}',
        b'{"argv": ["a"], "shell": true}',
        b'{"argv": ["a"], "attempt": -1}',
        b'{"argv": ["a"], "window": {"rows": 0}}',
        b'{"argv": ["a"], "window": {"rows": 99999999}}',
        b'{"argv": ["a"], "terminal": "x\\ny"}',
        b'{"argv": ["' + b"x" * (ARGV_BYTES_MAX + 1) + b'"]}',
        b"[" * 100_000,
        b"\xff",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_what_is_no_beginning_is_refused(body: bytes) -> None:
    with pytest.raises(Unspoken):
        begin_of(body)


@pytest.mark.parametrize("body", [b"", b"{", b'{"rows": -1}', b'{"rows": 1e999}', b"[1, 2]"])
def test_what_is_no_window_is_refused(body: bytes) -> None:
    with pytest.raises(Unspoken):
        window_of(body)
