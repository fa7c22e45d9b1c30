"""Mutations of valid inputs: changed, cut and repeated bytes, and unexpected numbers, depths, keys and characters.

All of it is drawn from the given random generator, so a seed determines a run. Contains no tests.
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


def mutated(rng: random.Random, body: bytes, others: list[bytes]) -> bytes:
    """Apply one to three mutations, of values or of bytes."""
    for _ in range(rng.randint(1, 3)):
        body = rng.choice(_MUTATIONS)(rng, body, others)
    return body[: 1 << 20]


def _change_bytes(rng: random.Random, body: bytes, others: list[bytes]) -> bytes:
    found = bytearray(body or b"\0")
    for _ in range(rng.randint(1, 8)):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def _truncate(rng: random.Random, body: bytes, others: list[bytes]) -> bytes:
    return body[: rng.randint(0, len(body))]


def _repeat(rng: random.Random, body: bytes, others: list[bytes]) -> bytes:
    first, last = sorted(rng.randint(0, len(body)) for _ in range(2))
    return body[:last] + body[first:last] * rng.choice((1, 2, 50)) + body[last:]


def _remove(rng: random.Random, body: bytes, others: list[bytes]) -> bytes:
    first, last = sorted(rng.randint(0, len(body)) for _ in range(2))
    return body[:first] + body[min(last, first + 40) :]


def _splice(rng: random.Random, body: bytes, others: list[bytes]) -> bytes:
    other = rng.choice(others)
    return body[: rng.randint(0, len(body))] + other[rng.randint(0, len(other)) :]


def _nest(rng: random.Random, body: bytes, others: list[bytes]) -> bytes:
    depth = rng.choice((63, 64, 65, 1_000, 50_000))
    return b"[" * depth + body + b"]" * depth if rng.random() < 0.5 else b'{"a":' * depth + body + b"}" * depth


def _repeat_key(rng: random.Random, body: bytes, others: list[bytes]) -> bytes:
    """Repeat a key of some object."""
    places = [at for at, sign in enumerate(body) if sign == ord("{")]
    if not places:
        return body
    at = rng.choice(places) + 1
    end = body.find(b":", at)
    return body[:at] + body[at : end + 1] + b"0," + body[at:] if end > 0 else body


def _replace_value(rng: random.Random, body: bytes, others: list[bytes]) -> bytes:
    """Replace one value or one key, or insert text that is not JSON."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return _change_bytes(rng, body, others)
    raw = rng.random() < 0.2
    replaced = _with_replacement(rng, value, MARK if raw else rng.choice(NASTY))
    text = json.dumps(replaced, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return text.replace(json.dumps(MARK).encode(), rng.choice(RAW)).replace(f'"{MARK}"'.encode(), rng.choice(RAW))


def _with_replacement(rng: random.Random, value: Any, new: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        if rng.random() < 0.1:
            other = {key: one for key, one in value.items() if key != name}
            return other if rng.random() < 0.5 else {**other, f"{name}{rng.choice(('s', 'X', ''))}x": value[name]}
        return {**value, name: _with_replacement(rng, value[name], new)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], _with_replacement(rng, value[at], new), *value[at + 1 :]]
    return new


_MUTATIONS: Final[tuple[Callable[[random.Random, bytes, list[bytes]], bytes], ...]] = (
    _change_bytes, _truncate, _repeat, _remove, _splice, _nest, _repeat_key,
    _replace_value, _replace_value, _replace_value, _replace_value, _replace_value,
)  # fmt: skip
