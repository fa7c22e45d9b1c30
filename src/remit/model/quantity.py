"""How much is `500m`, `1.5` or `64Gi`, exactly? Text to integers and back; floats never take part.

Bytes are counted in bytes, everything else in thousandths of its unit, so `cpu: 500m` is 500 and `gpu: 1` is 1000. What is
finer than that, negative, or past 2^63 - 1 is refused, with the reason.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

QUANTITY_MAX = (1 << 63) - 1
DURATION_MS_MAX = 10 * 365 * 24 * 3_600_000

_BYTES = frozenset({"memory", "storage", "ephemeral-storage"})
QUANTITY = r"(\+?)([0-9]{1,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})(?:([eE][+-]?[0-9]{1,3})|(m|k|[KMGTPE]i|[MGTPE])?)"
_SUFFIX = {
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", start=1)},
    **{letter + "i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
}
DURATION = r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9}(?:\.[0-9]{1,3})?)s)?(?:([0-9]{1,12})ms)?"
"""Both as the JSON Schema has them too. Empty, a duration matches, and is refused all the same."""

_QUANTITY = re.compile(QUANTITY)
_DURATION = re.compile(DURATION)


def scale(resource: str) -> int:
    """How many counted units make one unit of `resource`."""
    return 1 if resource in _BYTES else 1000


def parse_quantity(resource: str, text: str | int | float) -> int:
    """`text` in counted units of `resource`. Raises ValueError, worded for the person who wrote it."""
    return _counted(resource, "" if isinstance(text, bool) else str(text))


@lru_cache(maxsize=4_096)
def _counted(resource: str, text: str) -> int:
    """Few amounts are ever written, and each of them a thousand times."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        if text.startswith("-"):
            raise ValueError("a quantity cannot be negative")
        raise ValueError("not a quantity: write a number with an optional suffix, such as 500m, 1.5, 2k or 64Gi")
    _, digits, exponent, suffix = match.groups()
    value = Fraction(digits) * (Fraction(10) ** int(exponent[1:]) if exponent else _SUFFIX[suffix or ""])
    counted = value * scale(resource)
    if counted > QUANTITY_MAX:
        raise ValueError(f"too large: at most {format_quantity(resource, QUANTITY_MAX)}")
    if counted.denominator != 1:
        finest = "1 byte" if scale(resource) == 1 else "1m (a thousandth)"
        raise ValueError(f"finer than {finest}, the smallest amount of {resource} that is counted")
    return int(counted)


def format_quantity(resource: str, counted: int) -> str:
    """The shortest exact text; `parse_quantity` reads it back to the same integer."""
    if scale(resource) == 1:
        for suffix in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
            if counted and counted % int(_SUFFIX[suffix]) == 0:
                return f"{counted // int(_SUFFIX[suffix])}{suffix}"
        return str(counted)
    return str(counted // 1000) if counted % 1000 == 0 else f"{counted}m"


def parse_duration(text: str | int | float) -> int:
    """`90s`, `5m`, `1h30m`, `250ms` in milliseconds. Raises ValueError, worded for the person who wrote it."""
    return _milliseconds(text if isinstance(text, str) else "")


@lru_cache(maxsize=4_096)
def _milliseconds(text: str) -> int:
    match = _DURATION.fullmatch(text) if text else None
    if match is None:
        raise ValueError("not a duration: write a number and its unit, such as 250ms, 30s, 5m or 1h30m")
    days, hours, minutes, seconds, milliseconds = (Fraction(part or 0) for part in match.groups())
    total = int((((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000 + milliseconds)
    if total > DURATION_MS_MAX:
        raise ValueError("too long: at most ten years")
    return total


def format_duration(ms: int) -> str:
    if ms == 0:
        return "0s"
    text = ""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, ms = divmod(ms, size)
        if count:
            text += f"{count}{unit}"
    return text
