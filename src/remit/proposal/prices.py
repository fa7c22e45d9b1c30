"""What is a device worth that is partly free? Prices from the shares that are asked for; nothing is placed here.

A device with 190 thousandths free is worth nothing if nobody asks for less than 220, however much is free of it; one with 680
may be worth two thirds of a whole one. Which it is depends on what comes, and on what can be packed together.

Let `count[s]` shares of size `s` come. A *pattern* is a multiset of sizes that one device has room for. The fewest devices that
all of them need, patterns taken by fractions, are a linear programme: least sum of `x[P]`, where each size is covered. Its dual
says what one share of each size costs, in devices: no pattern is worth more than the device it fills, and what comes is worth
all the devices it needs. What is free on a device is then worth the dearest multiset that fits into it (a knapsack).

There are as many patterns as there are ways to fill a device, so none is listed: the simplex method begins with patterns of one
size each, and as long as some pattern is worth more than a device, the knapsack finds it and it enters the basis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from remit.law.columns import Floats
from remit.model.resources import WHOLE

LEVELS: Final = 100
"""How finely a device is looked at. Sizes are rounded up and what is free down, so a price never promises too much."""
UNIT: Final = WHOLE // LEVELS
SIZES_MAX: Final = 32
"""How many sizes have a price of their own: those that take up most. The others are worth what else fits in their place."""
_PIVOTS_MAX: Final = 128
_ENOUGH: Final = 1e-7
_TINY: Final = 1e-9


def worth(counts: Mapping[int, float]) -> Floats:
    """For 0 to WHOLE thousandths free, the worth of the device in whole ones; `counts` says how many shares of which size come.

    If none do, only a whole device is worth anything.
    """
    by_level: dict[int, float] = {}
    for size, count in counts.items():
        if 0 < size < WHOLE and count > 0:
            level = -(-size // UNIT)
            by_level[level] = by_level.get(level, 0.0) + count
    largest = sorted(by_level, key=lambda level: (-level * by_level[level], level))[:SIZES_MAX]
    sizes = sorted(largest)
    values = np.zeros(LEVELS + 1)
    if sizes:
        values[:] = best_fill(sizes, dual_prices(sizes, [by_level[size] for size in sizes]))[0]
        if values[LEVELS] > 1.0:
            values /= values[LEVELS]  # a basis that was left before it was the best asks too much
    values[LEVELS] = 1.0
    return values[np.arange(WHOLE + 1) // UNIT]


def best_fill(sizes: Sequence[int], prices: Sequence[float], room: int = LEVELS) -> tuple[list[float], list[int]]:
    """For each level up to `room`: the dearest multiset of sizes that fits, and the place of one of them in `sizes`; -1 where
    leaving one level idle is as good.
    """
    items = [(size, price, at) for at, (size, price) in enumerate(zip(sizes, prices, strict=True)) if price > _TINY]
    values, picks = [0.0] * (room + 1), [-1] * (room + 1)
    for level in range(1, room + 1):
        most, pick = values[level - 1], -1
        for size, price, at in items:
            if size > level:
                break
            found = values[level - size] + price
            if found > most + _TINY:
                most, pick = found, at
        values[level], picks[level] = most, pick
    return values, picks


def dual_prices(sizes: Sequence[int], counts: Sequence[float]) -> list[float]:
    """What one share of each of these ascending sizes, in levels, costs, when so many of each come."""
    demand = np.array(counts, dtype=np.float64)
    inverse = np.diag([1.0 / (LEVELS // size) for size in sizes])
    """Of the basis: one column a pattern."""
    cost = np.ones(len(sizes))
    prices: Floats = cost @ inverse
    for _ in range(_PIVOTS_MAX):
        entering, price = _entering(sizes, prices)
        if entering is None:
            break
        along = inverse @ entering
        share = np.full(len(sizes), np.inf)
        np.divide(inverse @ demand, along, out=share, where=along > _TINY)
        leaving = int(share.argmin())
        if not np.isfinite(share[leaving]):
            break
        row = inverse[leaving] / along[leaving]
        inverse -= np.outer(along, row)
        inverse[leaving] = row
        cost[leaving] = price
        prices = cost @ inverse
    return [max(float(one), 0.0) for one in prices]


def _entering(sizes: Sequence[int], prices: Floats) -> tuple[Floats | None, float]:
    """A column that makes it cheaper, and what it costs; none if these are the prices."""
    column = np.zeros(len(sizes))
    lowest = int(prices.argmin())
    if prices[lowest] < -_TINY:
        column[lowest] = -1.0  # one too many of a size costs nothing
        return column, 0.0
    values, picks = best_fill(sizes, prices.tolist())
    if values[LEVELS] <= 1.0 + _ENOUGH:
        return None, 0.0
    level = LEVELS
    while level:
        pick = picks[level]
        if pick >= 0:
            column[pick] += 1.0
        level -= sizes[pick] if pick >= 0 else 1
    return column, 1.0
