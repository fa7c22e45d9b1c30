"""Exec frames: reassembly from any chunks, validation of start and window messages."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.model.wire.exec_frames import (
    ARGV_BYTES_MAX,
    FRAME_BYTES_MAX,
    ExecFrame,
    ExecFrameError,
    ExecFrameReader,
    ExecFrameType,
    ExecStart,
    TerminalSize,
    decode_start,
    decode_terminal_size,
    encode_frame,
)

PARTS = st.lists(st.tuples(st.sampled_from(list(ExecFrameType)), st.binary(max_size=200)), max_size=8)


@given(PARTS, st.lists(st.integers(1, 50), max_size=100))
def test_frames_are_reassembled_from_any_chunks(parts: list[tuple[ExecFrameType, bytes]], cuts: list[int]) -> None:
    left = b"".join(encode_frame(part, body) for part, body in parts)
    reader, received = ExecFrameReader(), list[ExecFrame]()
    for cut in cuts:
        received += reader.feed(left[:cut])
        left = left[cut:]
    received += reader.feed(left)
    assert received == [ExecFrame(part, body) for part, body in parts]


def test_oversized_frame_is_refused_by_its_header() -> None:
    with pytest.raises(ExecFrameError, match="exceeds the limit"):
        ExecFrameReader().feed(encode_frame(ExecFrameType.INPUT)[:1] + (FRAME_BYTES_MAX + 1).to_bytes(4))


def test_start_and_window_round_trip() -> None:
    begin = ExecStart(("sh", "-c", ";$(id) \n \u202e"), 3, True, TerminalSize(10, 20), "xterm-256color")
    assert decode_start(msgspec.json.encode(begin)) == begin
    assert decode_terminal_size(msgspec.json.encode(TerminalSize(1, 10_000))) == TerminalSize(1, 10_000)


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
def test_invalid_start_is_refused(body: bytes) -> None:
    with pytest.raises(ExecFrameError):
        decode_start(body)


@pytest.mark.parametrize("body", [b"", b"{", b'{"rows": -1}', b'{"rows": 1e999}', b"[1, 2]"])
def test_invalid_window_is_refused(body: bytes) -> None:
    with pytest.raises(ExecFrameError):
        decode_terminal_size(body)
