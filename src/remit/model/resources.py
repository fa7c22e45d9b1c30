"""Resource amounts, durations and quantity syntax.

Quantities are exact integers; floats are never used. Bytes are counted in bytes, everything else in thousandths of its unit:
`cpu: 500m` is 500 and `gpu: 1` is 1000. A quantity that is finer, negative or above 2^63 - 1 is rejected.

Amounts are vectors that can be added.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Final

QUANTITY_MAX = (1 << 63) - 1
DURATION_MS_MAX = 10 * 365 * 24 * 3_600_000

_BYTE_RESOURCES = frozenset({"memory", "storage", "ephemeral-storage"})
QUANTITY = r"(\+?)([0-9]{1,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})(?:([eE][+-]?[0-9]{1,3})|(m|k|[KMGTPE]i|[MGTPE])?)"
_SUFFIX = {
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", start=1)},
    **{letter + "i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
}
DURATION = r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9}(?:\.[0-9]{1,3})?)s)?(?:([0-9]{1,12})ms)?"
"""Both patterns are also used in the JSON Schema. DURATION matches an empty text, which the parser rejects."""

_QUANTITY = re.compile(QUANTITY)
_DURATION = re.compile(DURATION)


def scale(resource: str) -> int:
    """Returns how many counted units make one unit of `resource`."""
    return 1 if resource in _BYTE_RESOURCES else 1000


def parse_quantity(resource: str, text: str | int | float) -> int:
    """Returns `text` in counted units of `resource`. Raises ValueError with a message for the author of the text."""
    return _parse_quantity(resource, "" if isinstance(text, bool) else str(text))


@lru_cache(maxsize=4_096)
def _parse_quantity(resource: str, text: str) -> int:
    """Cached: few distinct quantities are used, and each of them many times."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        if text.startswith("-"):
            raise ValueError("a quantity cannot be negative")
        raise ValueError("not a quantity: write a number with an optional suffix, such as 500m, 1.5, 2k or 64Gi")
    _, digits, exponent, suffix = match.groups()
    value = Fraction(digits) * (Fraction(10) ** int(exponent[1:]) if exponent else _SUFFIX[suffix or ""])
    counted = value * scale(resource)
    if counted > QUANTITY_MAX:
        raise ValueError(f"too large: use at most {format_quantity(resource, QUANTITY_MAX)}")
    if counted.denominator != 1:
        finest = "1 byte" if scale(resource) == 1 else "1m (a thousandth)"
        raise ValueError(f"finer than {finest}, the smallest unit of {resource}")
    return int(counted)


def format_quantity(resource: str, counted: int) -> str:
    """Returns the shortest exact text; `parse_quantity` parses it to the same integer."""
    if scale(resource) == 1:
        for suffix in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
            if counted and counted % int(_SUFFIX[suffix]) == 0:
                return f"{counted // int(_SUFFIX[suffix])}{suffix}"
        return str(counted)
    return str(counted // 1000) if counted % 1000 == 0 else f"{counted}m"


def parse_duration(text: str | int | float) -> int:
    """Returns `90s`, `5m`, `1h30m` or `250ms` in milliseconds. Raises ValueError with a message for the author of the text."""
    return _parse_duration(text if isinstance(text, str) else "")


@lru_cache(maxsize=4_096)
def _parse_duration(text: str) -> int:
    match = _DURATION.fullmatch(text) if text else None
    if match is None:
        raise ValueError("not a duration: write a number and its unit, such as 250ms, 30s, 5m or 1h30m")
    days, hours, minutes, seconds, milliseconds = (Fraction(part or 0) for part in match.groups())
    total = int((((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000 + milliseconds)
    if total > DURATION_MS_MAX:
        raise ValueError("too long: use at most ten years")
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


DEVICES_PREFIX = "devices/"
"""Devices are part of an amount as `devices/<kind>`, in thousandths: one whole GPU is 1000, a share of 250m is 250."""

INTERNAL_PREFIXES = (DEVICES_PREFIX, "@")
"""Prefixes of names that Remit uses inside amounts and ledgers. No resource in a manifest may start with one of them."""

WHOLE_DEVICE: Final = 1000


class Amount:
    """An amount of each resource, as exact integers. Resources of which there are zero are left out.

    Amounts are immutable values: they compare by content, and every operation returns a new one.
    """

    __slots__ = ("pairs",)
    pairs: tuple[tuple[str, int], ...]

    def __init__(self, counted: Mapping[str, int] | Iterable[tuple[str, int]] = ()) -> None:
        self.pairs = tuple(sorted((name, count) for name, count in dict(counted).items() if count))

    @classmethod
    def parse(cls, manifest: Mapping[str, object]) -> Amount:
        """Parses the form of a manifest: `{cpu: 500m, memory: 1Gi, devices: {gpu: 1}}`. Raises ValueError."""
        counted: dict[str, int] = {}
        for name, value in manifest.items():
            if name == "devices" and isinstance(value, Mapping):
                counted.update(
                    {DEVICES_PREFIX + kind: _parse_amount_value(DEVICES_PREFIX + kind, count) for kind, count in value.items()}
                )
            else:
                if name.startswith(INTERNAL_PREFIXES):
                    raise ValueError(f"{name}: not a resource name: write devices by kind, such as devices: {{gpu: 1}}")
                counted[name] = _parse_amount_value(name, value)
        return cls(counted)

    def to_manifest(self) -> dict[str, object]:
        """Returns the form of a manifest; `parse` parses it to an equal amount."""
        devices = {
            name[len(DEVICES_PREFIX) :]: format_quantity(name, n) for name, n in self.pairs if name.startswith(DEVICES_PREFIX)
        }
        plain: dict[str, object] = {
            name: format_quantity(name, n) for name, n in self.pairs if not name.startswith(DEVICES_PREFIX)
        }
        return {**plain, "devices": devices} if devices else plain

    def get(self, name: str) -> int:
        return dict(self.pairs).get(name, 0)

    def __add__(self, other: Amount) -> Amount:
        if not isinstance(other, Amount):
            return NotImplemented
        counted = dict(self.pairs)
        for name, count in other.pairs:
            counted[name] = counted.get(name, 0) + count
        return Amount(counted)

    def __sub__(self, other: Amount) -> Amount:
        return self + Amount({name: -count for name, count in other.pairs})

    def __mul__(self, times: int) -> Amount:
        return Amount({name: count * times for name, count in self.pairs})

    def __le__(self, other: Amount) -> bool:
        """Whether this fits into `other`, resource by resource. This is a partial order: it may be false in both directions."""
        limit = dict(other.pairs)
        return all(count <= limit.get(name, 0) for name, count in self.pairs)

    def excess_over(self, limit: Amount) -> Amount:
        """Returns the part of this that exceeds `limit`; empty if nothing does."""
        available = dict(limit.pairs)
        return Amount({name: count - available.get(name, 0) for name, count in self.pairs if count > available.get(name, 0)})

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.pairs)

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Amount) and self.pairs == other.pairs

    def __hash__(self) -> int:
        return hash(self.pairs)

    def __str__(self) -> str:
        parts = [f"{name.removeprefix(DEVICES_PREFIX)} {format_quantity(name, count)}" for name, count in self.pairs]
        return ", ".join(parts) or "nothing"

    def __repr__(self) -> str:
        return f"Amount({dict(self.pairs)!r})"


class Duration(int):
    """A length of time in whole milliseconds."""

    @classmethod
    def parse(cls, text: object) -> Duration:
        return cls(parse_duration(text if isinstance(text, (str, int, float)) else ""))

    @property
    def seconds(self) -> float:
        return self / 1000

    def __str__(self) -> str:
        return format_duration(int(self))


def _parse_amount_value(name: str, value: object) -> int:
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise ValueError(f"{name}: not a quantity")
    return parse_quantity(name, value)
