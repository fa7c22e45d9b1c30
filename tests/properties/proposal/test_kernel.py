"""Property: the kernel places like a plain loop over nodes, one by one and in runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.proposal.placement.fragmentation import RANGE
from remit.proposal.placement.topology_gates import HIGH_PRECISION_FACTOR, SCALE
from tests.properties.effort import tries
from tests.properties.proposal.kernel_oracle import FRAGMENTATION, PROFILES, Coming, PlainPlacement, kernel_of, orders
from tests.unit.law.fit_fixtures import ask_of

NEAR = 1e-3 / RANGE * SCALE * HIGH_PRECISION_FACTOR
"""Sums in another order differ by less."""


on_devices = st.sampled_from([frozenset({"devices"} | more) for more in (set[str](), {"resources"}, {"taints"}, {"peers"})])


@tries(100, 300)
@given(orders(), st.booleans())
def test_kernel_places_like_plain_loop(order: Coming, freed: bool) -> None:
    place_one_by_one(order, freed)


@tries(150, 500)
@given(orders(on_devices, FRAGMENTATION), st.booleans())
def test_kernel_with_device_demand_places_by_formula(order: Coming, freed: bool) -> None:
    place_one_by_one(order, freed)


def place_one_by_one(order: Coming, freed: bool) -> None:
    scene, sorts, coming, profile = order
    asks = [ask_of(work, scene) for work in sorts]
    standing = [(ask_of(work, scene), row) for work, row in scene.standing]
    kernel, learnt = kernel_of(scene.left, asks, standing, profile)
    plain = PlainPlacement(scene.left, standing, PROFILES[profile])
    for at, count in coming:
        learnt.come(asks[at], 30 * count, plain)
        for _ in range(count):
            one = kernel.class_for(at, asks[at])
            row = kernel.best_row(one)
            if plain.slow is None or row < 0:
                assert row == plain.place(asks[at])
            else:
                numbers = plain.numbers(asks[at])
                assert numbers[row] == pytest.approx(max(numbers.values()), abs=NEAR)
                assert int(kernel.row_scores(one)[row]) == pytest.approx(numbers[row], abs=NEAR)
            if row < 0:
                break
            devices = kernel.choose_devices(one, row)
            assert bool(devices) == bool(
                sum(whole_device.amount for whole_device in asks[at].whole_devices) or asks[at].device_shares
            )
            kernel.post(one, row, devices)
            plain.post(asks[at], row, devices)
        if freed and plain.standing:
            # A replica leaves: a full node has capacity again.
            ask, row = plain.standing[0]
            if not (ask.whole_devices or ask.device_shares):
                kernel.post(kernel.class_for(asks.index(ask) if ask in asks else repr(ask), ask), row, sign=-1)
                plain.gone(0)


@tries(150, 500)
@given(orders())
def test_run_places_like_single_placements(order: Coming) -> None:
    place_a_run(order)


@tries(150, 500)
@given(orders(on_devices, FRAGMENTATION))
def test_run_with_device_demand_places_like_single_placements(order: Coming) -> None:
    place_a_run(order)


def place_a_run(order: Coming) -> None:
    scene, sorts, coming, profile = order
    asks = [ask_of(work, scene) for work in sorts]
    standing = [(ask_of(work, scene), row) for work, row in scene.standing]
    (at_once, learnt), (singly, learnt_too) = (kernel_of(scene.left, asks, standing, profile) for _ in range(2))
    for at, count in coming:
        for one_of_both in (learnt, learnt_too):
            one_of_both.come(asks[at], 30 * count)
        found = at_once.place_run(at_once.class_for(at, asks[at]), count)
        one = singly.class_for(at, asks[at])
        expected: list[int] = []
        while len(expected) < count and (row := singly.best_row(one)) >= 0:
            singly.post(one, row, singly.choose_devices(one, row))
            expected.append(row)
        assert found.rows == expected
    assert at_once.columns.amounts.tolist() == singly.columns.amounts.tolist()
    assert at_once.columns.used == singly.columns.used
