"""Device demand: requests are counted by shape and decay over time."""

from __future__ import annotations

import pytest

from remit.model.kinds import DeviceRequest
from remit.model.resources import WHOLE_DEVICE
from remit.proposal.placement.fragmentation_model import DECAY_AT, SHAPES_MAX, Demand, DeviceShape
from tests.unit.proposal.placement.device_requests import ask, gpus, share


def test_demand_counts_shapes_with_mean_memory() -> None:
    demand = Demand()
    demand.arrived(ask(gpus(2, "A", "B"), memory=10), 3)
    demand.arrived(ask(gpus(2, "B", "A"), memory=50))
    demand.arrived(ask(share(320), cpu=0), 6)
    demand.arrived(ask(), 90)
    assert demand.arrivals == 100
    first, second = demand.frequent_shapes(10)
    assert first.shape == DeviceShape("gpu", (), 1, 320, 0) and first.arrivals == 6
    assert second.shape == DeviceShape("gpu", ("A", "B"), 2, WHOLE_DEVICE, 1_000)
    assert (second.arrivals, second.memory) == (4, 20)
    assert demand.shares() == {"gpu": {320: 6}}
    assert demand.frequent_shapes(1) == [first]


def test_each_device_request_is_own_shape_without_unions() -> None:
    demand = Demand()
    demand.arrived(ask(gpus(1, "A", "B"), gpus(1, "B", "C"), share(250, "fpga")))
    assert {(one.shape.kind, one.shape.models, one.shape.number, one.shape.share) for one in demand.frequent_shapes(9)} == {
        ("gpu", ("A", "B"), 1, WHOLE_DEVICE),
        ("gpu", ("B", "C"), 1, WHOLE_DEVICE),
        ("fpga", (), 1, 250),
    }
    assert demand.shares() == {"gpu": {}, "fpga": {250: 1}}


def test_request_without_devices_has_no_shape() -> None:
    demand = Demand()
    demand.arrived(ask(DeviceRequest(kind="gpu", count=0)))
    assert demand.frequent_shapes(9) == [] and demand.arrivals == 1


def test_rarest_shapes_are_left_out() -> None:
    demand = Demand()
    for size in range(100, 110):
        demand.arrived(ask(share(size)), 1_000)
    demand.arrived(ask(share(200)), 5)
    assert len(demand.frequent_shapes(99)) == 10


@pytest.mark.parametrize("step", [1, 100, 10 * DECAY_AT])
def test_old_arrivals_decay(step: int) -> None:
    demand = Demand()
    demand.arrived(ask(share(100)), DECAY_AT)
    later = ask(share(200))
    for _ in range(0, 4 * DECAY_AT, step):
        demand.arrived(later, step)
    counts = demand.shares()["gpu"]
    assert sum(counts.values()) <= DECAY_AT
    assert counts[100] < counts[200] / 5
    assert demand.frequent_shapes(9)[0].shape.share == 200


def test_number_of_shapes_is_bounded_and_frequent_ones_stay() -> None:
    demand = Demand()
    demand.arrived(ask(share(500)), 50)
    for cpu in range(2 * SHAPES_MAX):
        demand.arrived(ask(gpus(1), cpu=cpu))
        assert len(demand._counts) <= SHAPES_MAX and demand._counts.keys() == demand._memory.keys()
    assert demand.frequent_shapes(1)[0].shape.share == 500
    assert DeviceShape("gpu", (), 1, WHOLE_DEVICE, 2 * SHAPES_MAX - 1) in demand._counts, "the latest shape is counted"
    assert demand._total == pytest.approx(sum(demand._counts.values()))
