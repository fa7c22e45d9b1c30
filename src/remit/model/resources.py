"""Resource amounts, durations and quantity syntax; hard, reclaimable and soft capacity.

Text to integers and back; floats never take part.

Bytes are counted in bytes, everything else in thousandths of its unit, so `cpu: 500m` is 500 and `gpu: 1` is 1000. What is
finer than that, negative, or past 2^63 - 1 is refused, with the reason.

Amounts of capacity: vectors that add, and three kinds of capacity that do not add to each other. Arithmetic only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Final, Self, TypeVar

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


C = TypeVar("C", bound="_Capacity")

DEVICES = "devices/"
"""Devices stand in an amount as `devices/<kind>`, in thousandths: one whole GPU is 1000, a share of 250m is 250."""

INTERNAL = (DEVICES, "@")
"""No written resource begins like this: these names are Remit's own, inside an amount and inside a ledger."""

WHOLE: Final = 1000


class Amount:
    """How much of each resource, as exact integers (see quantity.py). Resources that are zero are not in it.

    Amounts are values: equal amounts are equal, and every operation answers a new one.
    """

    __slots__ = ("pairs",)
    pairs: tuple[tuple[str, int], ...]

    def __init__(self, counted: Mapping[str, int] | Iterable[tuple[str, int]] = ()) -> None:
        self.pairs = tuple(sorted((name, count) for name, count in dict(counted).items() if count))

    @classmethod
    def parse(cls, written: Mapping[str, object]) -> Amount:
        """From a manifest: `{cpu: 500m, memory: 1Gi, devices: {gpu: 1}}`. Raises ValueError."""
        counted: dict[str, int] = {}
        for name, value in written.items():
            if name == "devices" and isinstance(value, Mapping):
                counted.update({DEVICES + kind: _parse(DEVICES + kind, count) for kind, count in value.items()})
            else:
                if name.startswith(INTERNAL):
                    raise ValueError(f"{name}: no name of a resource: write devices by kind, as devices: {{gpu: 1}}")
                counted[name] = _parse(name, value)
        return cls(counted)

    def written(self) -> dict[str, object]:
        """As a manifest has it; `parse` reads it back to an equal amount."""
        devices = {name[len(DEVICES) :]: format_quantity(name, n) for name, n in self.pairs if name.startswith(DEVICES)}
        plain: dict[str, object] = {name: format_quantity(name, n) for name, n in self.pairs if not name.startswith(DEVICES)}
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
        """Does this fit into `other`, resource by resource? Two amounts may each fail to fit into the other."""
        room = dict(other.pairs)
        return all(count <= room.get(name, 0) for name, count in self.pairs)

    def over(self, limit: Amount) -> Amount:
        """What of this exceeds `limit`; empty if nothing does."""
        room = dict(limit.pairs)
        return Amount({name: count - room.get(name, 0) for name, count in self.pairs if count > room.get(name, 0)})

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.pairs)

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Amount) and self.pairs == other.pairs

    def __hash__(self) -> int:
        return hash(self.pairs)

    def __str__(self) -> str:
        parts = [f"{name.removeprefix(DEVICES)} {format_quantity(name, count)}" for name, count in self.pairs]
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


class _Capacity:
    """Capacity of one kind. Only equals add: what may be reclaimed, or may come, never backs what is promised."""

    __slots__ = ("amount",)
    amount: Amount

    def __init__(self, amount: Amount) -> None:
        self.amount = amount

    def __add__(self, other: Self) -> Self:
        return type(self)(self.amount + _same(self, other).amount)

    def __sub__(self, other: Self) -> Self:
        return type(self)(self.amount - _same(self, other).amount)

    def covers(self, ask: Amount) -> bool:
        return ask <= self.amount

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Capacity) and type(self) is type(other) and self.amount == other.amount

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.amount))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.amount})"


class Hard(_Capacity):
    """Committed: quota, a reserved recovery pool, an exclusive binding."""


class Reclaimable(_Capacity):
    """Held by lower work that may be preempted or drained."""


class Soft(_Capacity):
    """Hints, forecasts, nodes that an autoscaler may bring."""


def _same(one: C, other: C) -> C:
    if type(one) is not type(other):
        raise TypeError(f"{type(other).__name__} capacity does not add to {type(one).__name__}")
    return other


def _parse(name: str, value: object) -> int:
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise ValueError(f"{name}: not a quantity")
    return parse_quantity(name, value)
