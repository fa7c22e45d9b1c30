"""What sort of work comes, and how often? Counts by shape that fade, of work that asks for devices. Nothing is placed here."""

from __future__ import annotations

from typing import Final, NamedTuple

from remit.law.fit import Ask
from remit.model.resources import WHOLE

CPU: Final = "cpu"
MEMORY: Final = "memory"
FADES_AT: Final = 32_768
"""When so many arrivals are remembered, they are made to count as half as many: what comes now outweighs what came long ago."""
SHAPES_MAX: Final = 4_096
COVERED: Final = 0.99
"""Of all arrivals: the rarest shapes are left out of account."""


class Shape(NamedTuple):
    """So many devices of a kind and of any of these models, so much of each, and the cpu that goes with them. Memory is not in
    it: that differs from one to the next, and its mean will do.
    """

    kind: str
    models: tuple[str, ...]
    number: int
    share: int
    """In thousandths of a device; WHOLE, unless it is one share."""
    cpu: int


class Popular(NamedTuple):
    shape: Shape
    arrivals: float
    memory: float
    """Its mean."""


class Demand:
    """`arrivals` is how many replicas came in all, whatever they ask for."""

    def __init__(self) -> None:
        self.arrivals = 0
        self._counts: dict[Shape, float] = {}
        self._memory: dict[Shape, float] = {}
        self._total = 0.0

    def arrived(self, ask: Ask, count: int = 1) -> None:
        """So many replicas with this ask have come, wherever they will be placed, if at all."""
        self.arrivals += count
        if not (ask.whole or ask.shares):
            return
        needs = dict(ask.resources)
        cpu, memory = needs.get(CPU, 0), needs.get(MEMORY, 0)
        for shape in shapes_of(ask, cpu):
            self._counts[shape] = self._counts.get(shape, 0.0) + count
            self._memory[shape] = self._memory.get(shape, 0.0) + count * memory
            self._total += count
        if self._total > FADES_AT:
            self._fade(0.5 * FADES_AT / self._total)
        if len(self._counts) > SHAPES_MAX:
            self._keep(SHAPES_MAX // 2)

    def popular(self, most: int) -> list[Popular]:
        """The shapes that come most often, at most so many, and no more than cover nearly all arrivals."""
        found, covered = [], 0.0
        for shape in sorted(self._counts, key=lambda shape: (-self._counts[shape], shape))[:most]:
            if covered >= COVERED * self._total:
                break
            count = self._counts[shape]
            covered += count
            found.append(Popular(shape, count, self._memory[shape] / count))
        return found

    def shares(self) -> dict[str, dict[int, float]]:
        """How many shares of which size came, by kind of device; a kind of which no share came has none."""
        found: dict[str, dict[int, float]] = {}
        for shape, count in self._counts.items():
            sizes = found.setdefault(shape.kind, {})
            if shape.share < WHOLE:
                sizes[shape.share] = sizes.get(shape.share, 0.0) + count
        return found

    def _fade(self, factor: float) -> None:
        for kept in (self._counts, self._memory):
            for shape in kept:
                kept[shape] *= factor
        self._total *= factor

    def _keep(self, most: int) -> None:
        """The most popular, and of equals the latest, so that what is new has a chance."""
        latest = reversed(list(self._counts))
        kept = sorted(latest, key=lambda shape: -self._counts[shape])[:most]
        self._counts = {shape: self._counts[shape] for shape in reversed(kept)}
        self._memory = {shape: self._memory[shape] for shape in self._counts}
        self._total = sum(self._counts.values())


def shapes_of(ask: Ask, cpu: int) -> list[Shape]:
    """One for each part of the ask that is about devices; most have one. Whoever meets one meets the cpu of the whole ask."""
    parts = [Shape(one.kind, one.models, one.amount, WHOLE, cpu) for one in ask.whole if one.amount > 0]
    return parts + [Shape(one.kind, one.models, 1, one.amount, cpu) for one in ask.shares]
