"""Prices of device shares: equal to those of the best packing, compared with loops over all packings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import ceil

import numpy as np
import pytest

from remit.proposal.placement.fragmentation_model import LEVELS, SIZES_MAX, best_fill, dual_prices, worth


def patterns(sizes: Sequence[int], room: int = LEVELS) -> Iterator[tuple[int, ...]]:
    """Every multiset of sizes that fits on a device."""
    for counts in product(*(range(room // size + 1) for size in sizes)):
        if sum(count * size for count, size in zip(counts, sizes, strict=True)) <= room:
            yield counts


def fewest(sizes: Sequence[int], counts: Sequence[int]) -> int:
    """Fewest whole devices for these counts of sizes, by trying every packing."""
    ways = [way for way in patterns(sizes) if any(way)]

    @cache
    def need(left: tuple[int, ...]) -> int:
        if not any(left):
            return 0
        first = next(at for at, count in enumerate(left) if count)
        return 1 + min(
            need(tuple(max(have - took, 0) for have, took in zip(left, way, strict=True))) for way in ways if way[first]
        )

    return need(tuple(counts))


@pytest.mark.parametrize("room", [1, 7, 50, LEVELS])
def test_best_fill_equals_best_of_all_packings(room: int) -> None:
    rng = np.random.default_rng(room)
    for _ in range(10):
        sizes = sorted(rng.choice(np.arange(9, 80), 4, replace=False).tolist())
        prices = rng.random(4).tolist()
        values, picks = best_fill(sizes, prices, room)
        for level in range(0, room + 1, 5):
            best = max(sum(n * price for n, price in zip(way, prices, strict=True)) for way in patterns(sizes, level))
            assert values[level] == pytest.approx(best)
        level, total = room, 0.0
        while level:
            total += prices[picks[level]] if picks[level] >= 0 else 0.0
            level -= sizes[picks[level]] if picks[level] >= 0 else 1
        assert total == pytest.approx(values[room]), "the picks add up to the value"


@pytest.mark.parametrize("seed", range(12))
def test_prices_bound_fewest_devices_from_below_within_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = sorted(rng.choice(np.arange(18, 75), 3, replace=False).tolist())
    counts = rng.integers(1, 7, 3).tolist()
    prices = dual_prices(sizes, counts)
    for way in patterns(sizes):
        assert sum(n * price for n, price in zip(way, prices, strict=True)) <= 1 + 1e-6, (
            "no packing of one device is worth more than one"
        )
    bound = sum(n * price for n, price in zip(counts, prices, strict=True))
    assert bound <= fewest(sizes, counts) + 1e-6
    assert fewest(sizes, counts) - ceil(bound - 1e-6) in (0, 1), "the fractional bound is within one device"


def test_prices_of_known_packings() -> None:
    assert dual_prices([50], [7.0]) == pytest.approx([0.5])
    assert sum(dual_prices([25, 75], [9.0, 9.0])) == pytest.approx(1.0), "a device for each pair"
    low, high = dual_prices([34, 66], [1.0, 100.0])
    assert (low, high) == pytest.approx((0.0, 1.0)), "each large share needs a device and leaves room for a small one"
    low, high = dual_prices([30, 80], [100.0, 1.0])
    assert (low, high) == pytest.approx((1 / 3, 1.0)), "nothing fits beside the large share"


def test_worth_of_remainder_is_worth_of_what_fits_into_it() -> None:
    found = worth({320: 60, 650: 40, 810: 20})
    assert len(found) == 1_001 and found[1_000] == 1.0 and found[0] == 0.0
    assert (np.diff(found) >= 0).all()
    assert found[319] == 0.0 and found[320] > 0.2
    assert found[640] == pytest.approx(2 * found[320])
    assert found[650] == found[640], "both packings are two thirds of a device"


@pytest.mark.parametrize(
    "counts",
    [{}, {0: 5.0}, {1_000: 5.0}, {500: 0.0}, {-3: 1.0}],
    ids=["none", "zero size", "whole", "zero count", "negative size"],
)
def test_without_shares_only_whole_device_has_worth(counts: dict[int, float]) -> None:
    found = worth(counts)
    assert found[1_000] == 1.0 and not found[:1_000].any()


@pytest.mark.parametrize("sizes", [1, 2, SIZES_MAX, 100, 200, 999])
def test_prices_are_bounded_and_monotonic_for_any_number_of_sizes(sizes: int) -> None:
    rng = np.random.default_rng(sizes)
    for scale in (1e-6, 1.0, 1e12):
        counts = {int(size): float(rng.random() * scale) for size in rng.choice(np.arange(1, 1_000), sizes, replace=False)}
        found = worth(counts)
        assert np.isfinite(found).all() and found[1_000] == 1.0
        assert (np.diff(found) >= -1e-9).all() and found.min() >= 0.0 and found.max() <= 1 + 1e-6


def test_tiny_share_is_worth_its_level() -> None:
    found = worth({1: 1_000.0})
    assert found[9] == 0.0 and found[10] == pytest.approx(1 / LEVELS) and found[999] == pytest.approx(0.99)
