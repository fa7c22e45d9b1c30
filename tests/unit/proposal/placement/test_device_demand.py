"""Is what comes counted by shape, and forgotten in good time?"""

from __future__ import annotations

import pytest

from remit.law.fit import Ask
from remit.law.requirements import make_ask
from remit.model.kinds import DeviceAsk, Placement, Template, WorkloadSpec
from remit.model.resources import WHOLE, Amount
from remit.proposal.placement.fragmentation_model import FADES_AT, SHAPES_MAX, Demand, Shape


def ask(*devices: DeviceAsk, cpu: int = 1_000, memory: int = 1 << 30, where: Placement = Placement()) -> Ask:
    template = Template(command=("run",), resources=Amount({"cpu": cpu, "memory": memory}), devices=devices)
    return make_ask("acme", "work", {}, WorkloadSpec(type="service", template=template, placement=where), ())


def gpus(count: int, *models: str) -> DeviceAsk:
    return DeviceAsk(kind="gpu", count=count, models=models)


def share(size: int, kind: str = "gpu") -> DeviceAsk:
    return DeviceAsk(kind=kind, share=f"{size}m")


def test_shapes_are_counted__with_the_mean_of_their_memory() -> None:
    demand = Demand()
    demand.arrived(ask(gpus(2, "A", "B"), memory=10), 3)
    demand.arrived(ask(gpus(2, "B", "A"), memory=50))
    demand.arrived(ask(share(320), cpu=0), 6)
    demand.arrived(ask(), 90)
    assert demand.arrivals == 100
    first, second = demand.popular(10)
    assert first.shape == Shape("gpu", (), 1, 320, 0) and first.arrivals == 6
    assert second.shape == Shape("gpu", ("A", "B"), 2, WHOLE, 1_000)
    assert (second.arrivals, second.memory) == (4, 20)
    assert demand.shares() == {"gpu": {320: 6}}
    assert demand.popular(1) == [first]


def test_each_part_of_an_ask_is_a_shape__and_unions_are_none() -> None:
    demand = Demand()
    demand.arrived(ask(gpus(1, "A", "B"), gpus(1, "B", "C"), share(250, "fpga")))
    assert {(one.shape.kind, one.shape.models, one.shape.number, one.shape.share) for one in demand.popular(9)} == {
        ("gpu", ("A", "B"), 1, WHOLE),
        ("gpu", ("B", "C"), 1, WHOLE),
        ("fpga", (), 1, 250),
    }
    assert demand.shares() == {"gpu": {}, "fpga": {250: 1}}


def test_an_ask_for_no_devices_at_all_is_no_shape() -> None:
    demand = Demand()
    demand.arrived(ask(DeviceAsk(kind="gpu", count=0)))
    assert demand.popular(9) == [] and demand.arrivals == 1


def test_the_rarest_are_left_out_of_account() -> None:
    demand = Demand()
    for size in range(100, 110):
        demand.arrived(ask(share(size)), 1_000)
    demand.arrived(ask(share(200)), 5)
    assert len(demand.popular(99)) == 10


@pytest.mark.parametrize("step", [1, 100, 10 * FADES_AT])
def test_what_came_long_ago_fades(step: int) -> None:
    demand = Demand()
    demand.arrived(ask(share(100)), FADES_AT)
    later = ask(share(200))
    for _ in range(0, 4 * FADES_AT, step):
        demand.arrived(later, step)
    counts = demand.shares()["gpu"]
    assert sum(counts.values()) <= FADES_AT
    assert counts[100] < counts[200] / 5
    assert demand.popular(9)[0].shape.share == 200


def test_there_are_never_more_shapes_than_the_bound__and_the_popular_stay() -> None:
    demand = Demand()
    demand.arrived(ask(share(500)), 50)
    for cpu in range(2 * SHAPES_MAX):
        demand.arrived(ask(gpus(1), cpu=cpu))
        assert len(demand._counts) <= SHAPES_MAX and demand._counts.keys() == demand._memory.keys()
    assert demand.popular(1)[0].shape.share == 500
    assert Shape("gpu", (), 1, WHOLE, 2 * SHAPES_MAX - 1) in demand._counts, "the latest has a chance"
    assert demand._total == pytest.approx(sum(demand._counts.values()))
