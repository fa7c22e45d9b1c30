"""How is something good made bad? Bytes turned, cut and doubled; numbers, depths, keys and letters that nobody expects.

All of it follows from the lots that are given, so a seed is a run. No test is in here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Final

NASTY: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, "", " ", "a" * 300, "a" * 70_000,
    "\0", "a\nb", "\x1b[2J", "\u202eb", "\u200b", "\ud7ff", "\U0001f4a3", "../../etc/passwd", "remit/x", "1e999", "NaN", "-1",
    "9" * 400, "1Gi", "-5Mi", "1e400Gi", "0.0000001", "2999-99-99T99:99:99Z", "$(id)", "{{x}}", "<script>",
    [], {}, [[]], [{}], {"": ""},
    {"a": {"a": {"a": {}}}}, list(range(300)), {f"k{at}": "v" for at in range(300)},
    "http://169.254.169.254/", "Workload", "acme", "bolt",
)  # fmt: skip
RAW: Final = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"9" * 5_000,
    b"-",
    b"01",
    b'"\\ud800"',
    b'"\xff"',
    b"[" * 200 + b"]" * 200,
    b"\x00",
)
MARK: Final = "\ue000here\ue000"


def mutated(chance: random.Random, body: bytes, others: list[bytes]) -> bytes:
    """One to three changes, of what it says or of its bytes."""
    for _ in range(chance.randint(1, 3)):
        body = chance.choice(_WAYS)(chance, body, others)
    return body[: 1 << 20]


def _turned(chance: random.Random, body: bytes, others: list[bytes]) -> bytes:
    found = bytearray(body or b"\0")
    for _ in range(chance.randint(1, 8)):
        found[chance.randrange(len(found))] = chance.randrange(256)
    return bytes(found)


def _cut(chance: random.Random, body: bytes, others: list[bytes]) -> bytes:
    return body[: chance.randint(0, len(body))]


def _doubled(chance: random.Random, body: bytes, others: list[bytes]) -> bytes:
    first, last = sorted(chance.randint(0, len(body)) for _ in range(2))
    return body[:last] + body[first:last] * chance.choice((1, 2, 50)) + body[last:]


def _left_out(chance: random.Random, body: bytes, others: list[bytes]) -> bytes:
    first, last = sorted(chance.randint(0, len(body)) for _ in range(2))
    return body[:first] + body[min(last, first + 40) :]


def _spliced(chance: random.Random, body: bytes, others: list[bytes]) -> bytes:
    other = chance.choice(others)
    return body[: chance.randint(0, len(body))] + other[chance.randint(0, len(other)) :]


def _deep(chance: random.Random, body: bytes, others: list[bytes]) -> bytes:
    depth = chance.choice((63, 64, 65, 1_000, 50_000))
    return b"[" * depth + body + b"]" * depth if chance.random() < 0.5 else b'{"a":' * depth + body + b"}" * depth


def _twice(chance: random.Random, body: bytes, others: list[bytes]) -> bytes:
    """A key of its own once more, at the beginning of some object."""
    places = [at for at, sign in enumerate(body) if sign == ord("{")]
    if not places:
        return body
    at = chance.choice(places) + 1
    end = body.find(b":", at)
    return body[:at] + body[at : end + 1] + b"0," + body[at:] if end > 0 else body


def _said(chance: random.Random, body: bytes, others: list[bytes]) -> bytes:
    """Another value at one place, or another name for it; or one that no JSON has."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return _turned(chance, body, others)
    raw = chance.random() < 0.2
    replaced = _replaced(chance, value, MARK if raw else chance.choice(NASTY))
    text = json.dumps(replaced, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    return text.replace(json.dumps(MARK).encode(), chance.choice(RAW)).replace(f'"{MARK}"'.encode(), chance.choice(RAW))


def _replaced(chance: random.Random, value: Any, new: Any) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(sorted(value))
        if chance.random() < 0.1:
            other = {key: one for key, one in value.items() if key != name}
            return other if chance.random() < 0.5 else {**other, f"{name}{chance.choice(('s', 'X', ''))}x": value[name]}
        return {**value, name: _replaced(chance, value[name], new)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], _replaced(chance, value[at], new), *value[at + 1 :]]
    return new


_WAYS: Final[tuple[Callable[[random.Random, bytes, list[bytes]], bytes], ...]] = (
    _turned, _cut, _doubled, _left_out, _spliced, _deep, _twice, _said, _said, _said, _said, _said,
)  # fmt: skip
