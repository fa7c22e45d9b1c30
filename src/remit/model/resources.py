"""Amounts of capacity: vectors that add, and three kinds of capacity that do not add to each other. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Self, TypeVar

from remit.model.quantity import format_duration, format_quantity, parse_duration, parse_quantity

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
