"""Fragmentation score: equals its formulas, learns the demand, follows the nodes, and decides placements."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from remit.law.fit import Requirements
from remit.model.kinds import Device, DeviceRequest, Node, NodeHealth, NodeSpec, NodeStatus, Placement, Spread, Taint
from remit.model.metadata import Metadata
from remit.model.resources import WHOLE_DEVICE, Amount
from remit.observation.node_columns import NodeColumns, NodeFree, SelectedRows
from remit.observation.topology_counts import ColumnPeerCounts
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.devices import FreeDeviceShares
from remit.proposal.placement.fragmentation import CELLS_MAX, RANGE, SHAPES_WEIGHED_MAX, WEIGH_INTERVAL, Fragmentation
from remit.proposal.placement.kernel import Kernel
from tests.unit.proposal.placement.device_requests import ask, gpus, share
from tests.unit.proposal.placement.fragmentation_oracle import ReferenceScore

GIB = 1 << 30
KINDS = (("gpu", "A"), ("gpu", "B"), ("gpu", ""), ("fpga", "A"))


def node(
    name: str, *devices: tuple[str, str], cpu: int = 64_000, memory: int = 256 * GIB, taints: tuple[Taint, ...] = ()
) -> Node:
    """Named devices in order."""
    found = tuple(Device(name=f"d{at}", kind=kind, model=model) for at, (kind, model) in enumerate(devices))
    capacity = Amount({name: count for name, count in (("cpu", cpu), ("memory", memory)) if count})
    spec = NodeSpec(region="eu", zone=f"eu-{len(name) % 2}", capacity=capacity, devices=found, taints=taints)
    return Node(metadata=Metadata(name=name), spec=spec, status=NodeStatus(health=NodeHealth.READY))


def full(one: Node) -> NodeFree:
    return NodeFree(one, dict(one.spec.capacity.pairs), {})


def kernel_on(columns: NodeColumns) -> tuple[Kernel, Fragmentation]:
    made = Fragmentation(columns)
    return Kernel(columns, ColumnPeerCounts(columns, {}), scores=(*DEFAULT_SCORES, made.score)), made


def lefts(columns: NodeColumns) -> dict[int, NodeFree]:
    """Every node as it is now, by row."""
    found = {}
    for row, one in enumerate(columns.nodes):
        if one is not None:
            found[row] = NodeFree(one, {name: int(column[row]) for name, column in columns.free.items()}, columns.used[row])
    return found


def drawn(rng: np.random.Generator, count: int) -> list[Node]:
    """Nodes with up to eight devices: most with one model, some with several, some without devices."""
    nodes = []
    for at in range(count):
        sort = KINDS[int(rng.integers(len(KINDS)))]
        devices = [sort] * int(rng.choice((0, 1, 2, 4, 8)))
        if at % 3 == 0:
            devices += [KINDS[int(rng.integers(len(KINDS)))] for _ in range(int(rng.integers(3)))]
        nodes.append(node(f"n{at}", *devices, cpu=int(rng.choice((8_000, 64_000))), memory=int(rng.choice((16, 128))) * GIB))
    return nodes


ASKS = (
    ask(share(320), cpu=4_000, memory=8 * GIB),
    ask(share(650), cpu=6_000, memory=4 * GIB),
    ask(share(90), cpu=500, memory=GIB),
    ask(DeviceRequest(kind="gpu", share="470m", models=("A",)), cpu=2_000),
    ask(gpus(1), cpu=8_000, memory=16 * GIB),
    ask(gpus(2, "A", "B"), cpu=4_000, memory=16 * GIB),
    ask(gpus(8), cpu=32_000, memory=64 * GIB),
    ask(gpus(1, "A"), gpus(1, "A", "B"), cpu=1_000),
    ask(share(250, "fpga"), cpu=1_000),
    ask(share(250, "fpga"), gpus(1), cpu=1_000),
    ask(cpu=2_000, memory=4 * GIB),
)


def compare(columns: NodeColumns, made: Fragmentation, reference: ReferenceScore, asks: Sequence[Requirements]) -> int:
    """Assert that score and devices equal the reference wherever a request fits; return how many places were compared."""
    compared = 0
    kernel = Kernel(columns, ColumnPeerCounts(columns, {}), scores=(made.score,))
    for at, one_ask in enumerate(asks):
        one = kernel.class_for(at, one_ask)
        rows = np.flatnonzero(kernel.refresh(one) >= 0)
        found = made.score.score(one_ask, SelectedRows(columns, rows))
        for row, score in zip(rows.tolist(), found.tolist(), strict=True):
            left = lefts(columns)[row]
            assert (score - 1) * RANGE + 1 == pytest.approx(reference.gain(one_ask, left), abs=1e-3)
            chosen = kernel.choose_devices(one, row)
            if not one_ask.whole_devices:
                assert chosen == reference.chosen(one_ask, left)[0]
            compared += 1
    return compared


@pytest.mark.parametrize("seed", range(6))
def test_score_equals_reference_while_nodes_come_and_go(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = drawn(rng, 12)
    columns = NodeColumns([full(one) for one in nodes])
    kernel, made = kernel_on(columns)
    for _ in range(40):
        made.arrived(ASKS[int(rng.integers(len(ASKS)))], int(rng.integers(1, 30)))
    made.update_weights()
    reference = ReferenceScore(
        made.demand.frequent_shapes(SHAPES_WEIGHED_MAX),
        {kind: found.tolist() for kind, found in made._worths.items()},
        list(lefts(columns).values()),
    )
    assert compare(columns, made, reference, ASKS) > 40
    epoch = made.score.epoch()
    for step in range(25):
        at = int(rng.integers(len(ASKS)))
        one = kernel.class_for(at, ASKS[at])
        row = kernel.best_row(one)
        if row >= 0:
            kernel.post(one, row, kernel.choose_devices(one, row))
        if step == 10:
            columns.drop("n3")
        if step == 15:
            columns.put(node("new", ("gpu", "A"), ("fpga", "A"), cpu=8_000))
        if step == 20:
            columns.put(replace(nodes[5], status=NodeStatus(health=NodeHealth.LOST)))
    assert made.score.epoch() == epoch, "no device model is new, so weights are not recomputed"
    assert compare(columns, made, reference, ASKS) > 10


def test_score_applies_only_while_nodes_have_devices() -> None:
    columns = NodeColumns([full(node("a", cpu=4_000)), full(node("b", cpu=8_000))])
    kernel, made = kernel_on(columns)
    one = kernel.class_for("plain", ask(cpu=1_000))
    assert kernel.best_row(one) == 1
    assert [score.name for score in one.scores] == ["least-allocated"] and one.score.dtype == np.int32
    made.update_weights()
    columns.put(node("c", ("gpu", "A"), cpu=32_000))
    assert kernel.best_row(one) == 1, "work without devices goes to device nodes last"
    assert [score.name for score in one.scores] == ["fragmentation"] and one.score.dtype == np.int64
    columns.drop("c")
    assert kernel.best_row(one) == 1


def test_work_without_devices_fills_plain_nodes_before_device_nodes() -> None:
    columns = NodeColumns([full(node("a", ("gpu", "A"), ("gpu", "A"))), full(node("b", cpu=4_000)), full(node("c", cpu=4_000))])
    kernel, made = kernel_on(columns)
    made.arrived(ask(gpus(1), cpu=30_000), 100)
    made.update_weights()
    found = kernel.place_run(kernel.class_for("work", ask(cpu=1_000)), 10)
    assert found.rows[:4] == [1, 2, 1, 2] and sorted(found.rows[4:8]) == [1, 1, 2, 2] and found.rows[8:] == [0, 0]


def test_prefer_no_schedule_taint_outweighs_fragmentation() -> None:
    avoid = (Taint(key="old", effect="PreferNoSchedule"),)
    columns = NodeColumns([full(node("a", ("gpu", "A"), taints=avoid)), full(node("b", *[("gpu", "A")] * 8))])
    kernel, made = kernel_on(columns)
    made.arrived(ask(gpus(8)), 100)
    made.update_weights()
    assert kernel.best_row(kernel.class_for("one", ask(gpus(1)))) == 1, "although it fragments the only node for eight"
    columns.put(node("a", ("gpu", "A")))
    assert kernel.best_row(kernel.class_for("one", ask(gpus(1)))) == 0


def test_soft_spread_outweighs_fragmentation() -> None:
    columns = NodeColumns([full(node("a", ("gpu", "A"))), full(node("bb", *[("gpu", "A")] * 8))])
    kernel, made = kernel_on(columns)
    made.arrived(ask(gpus(8)), 100)
    made.update_weights()
    spread = Placement(topology_spread=(Spread(topology_key="zone", max_skew=1, when_unsatisfiable="ScheduleAnyway"),))
    evenly = ask(share(100), where=spread)
    assert sorted(kernel.place_run(kernel.class_for("one", evenly), 4).rows) == [0, 0, 1, 1]


def test_share_goes_where_it_fragments_least_not_where_tightest() -> None:
    """320 beside 470 thousandths leave 210, which nothing requests; on a whole device they leave room for another 650."""
    columns = NodeColumns([full(node("a", ("gpu", "A"), ("gpu", "A")))])
    kernel, made = kernel_on(columns)
    for size, count in ((320, 30), (650, 30), (470, 30)):
        made.arrived(ask(share(size)), count)
    made.update_weights()
    for size, device in ((470, "d0"), (320, "d1"), (650, "d1")):
        one = kernel.class_for(size, ask(share(size)))
        row = kernel.best_row(one)
        assert list(kernel.choose_devices(one, row)) == [device]
        kernel.post(one, row, kernel.choose_devices(one, row))


def test_whole_nodes_are_kept_for_requests_that_need_them() -> None:
    columns = NodeColumns([full(node("a", *[("gpu", "A")] * 8)), full(node("b", *[("gpu", "A")] * 8, cpu=16_000))])
    kernel, made = kernel_on(columns)
    made.arrived(ask(gpus(8), cpu=60_000), 50)
    made.arrived(ask(gpus(1), cpu=1_000), 50)
    made.update_weights()
    assert kernel.place_run(kernel.class_for("one", ask(gpus(1), cpu=1_000)), 8).rows == [1] * 8


def test_run_without_devices_equals_single_placements() -> None:
    rng = np.random.default_rng(3)
    base = NodeColumns([full(one) for one in drawn(rng, 150)])
    (at_once, made), (singly, other) = (kernel_on(base.freeze()) for _ in range(2))
    for _ in range(60):
        at, count = int(rng.integers(len(ASKS))), int(rng.integers(1, 120))
        for one_of_both in (made, other):
            one_of_both.arrived(ASKS[at], count)
            one_of_both.update_weights()
        found = at_once.place_run(at_once.class_for(at, ASKS[at]), count)
        one = singly.class_for(at, ASKS[at])
        rows: list[int] = []
        while len(rows) < count and (row := singly.best_row(one)) >= 0:
            singly.post(one, row, singly.choose_devices(one, row))
            rows.append(row)
        assert found.rows == rows
    assert at_once.columns.amounts.tolist() == singly.columns.amounts.tolist()
    assert at_once.columns.used == singly.columns.used


def test_deep_run_on_few_nodes_equals_single_placements() -> None:
    base = NodeColumns([full(node(f"n{at}", *[("gpu", "A")] * (at + 1), cpu=20_000 + 7_000 * at)) for at in range(3)])
    (at_once, made), (singly, other) = (kernel_on(base.freeze()) for _ in range(2))
    for one_of_both in (made, other):
        for count in (1, 2, 3):
            one_of_both.arrived(ask(gpus(count), cpu=9_000 * count), 40)
        one_of_both.update_weights()
    small = ask(cpu=500, memory=GIB)
    found = at_once.place_run(at_once.class_for("small", small), 150).rows
    one = singly.class_for("small", small)
    rows: list[int] = []
    while len(rows) < 150 and (row := singly.best_row(one)) >= 0:
        singly.post(one, row)
        rows.append(row)
    assert found == rows and max(rows.count(row) for row in range(3)) > 40
    assert sum(before != after for before, after in pairwise(rows)) > 2, "placements alternate between nodes"


def test_two_requests_of_one_replica_take_different_devices() -> None:
    columns = NodeColumns(
        [full(node("a", ("gpu", "A"), ("gpu", "B"))), full(node("b", ("gpu", "A"), ("gpu", "A"), ("gpu", "B")))]
    )
    _, made = kernel_on(columns)
    both = ask(gpus(1, "A"), gpus(1, "A", "B"))
    made.arrived(ask(gpus(1, "B")), 50)
    made.arrived(both, 10)
    made.update_weights()
    reference = ReferenceScore(made.demand.frequent_shapes(SHAPES_WEIGHED_MAX), {}, list(lefts(columns).values()))
    reference.worths = {kind: found.tolist() for kind, found in made._worths.items()}
    assert compare(columns, made, reference, (both,)) == 2


def test_incremental_score_equals_recomputed_score() -> None:
    rng = np.random.default_rng(8)
    columns = NodeColumns([full(one) for one in drawn(rng, 30)])
    kernel, made = kernel_on(columns)
    for step in range(80):
        at = int(rng.integers(len(ASKS)))
        made.arrived(ASKS[at], 3)
        made.update_weights()
        one = kernel.class_for(at, ASKS[at])
        row = kernel.best_row(one)
        if row >= 0:
            kernel.post(one, row, kernel.choose_devices(one, row))
        if step % 9 == 0:
            columns.put(node(f"more-{step}", KINDS[step % 4], KINDS[step % 3]))
    made.score.epoch()
    incremental = [made._room.tolist(), made._worth.tolist(), made._base.tolist(), made._free.tolist(), made._devices.tolist()]
    made._device_shares = FreeDeviceShares(columns)
    made._device_shares.update()
    for row in range(len(columns)):
        made._update_devices(np.array([row]))
        made._update_base(np.array([row]))
    assert incremental == [
        made._room.tolist(),
        made._worth.tolist(),
        made._base.tolist(),
        made._free.tolist(),
        made._devices.tolist(),
    ]
    assert any(one is not None and len({d.kind for d in one.spec.devices}) > 1 for one in columns.nodes)


# ------------------------------------------------------------------------------------------------------------------ learning


def test_weights_are_recomputed_often_at_first_and_rarely_later() -> None:
    columns = NodeColumns([full(node("a", *[("gpu", "A")] * 4))])
    _, made = kernel_on(columns)
    weighed = []
    for came in range(1, 4_001):
        before = made.score.epoch()
        made.arrived(ask(share(300)))
        made.update_weights()
        if made.score.epoch() != before:
            weighed.append(came)
    assert weighed[:4] == [1, 2, 4, 7]
    assert len(weighed) < 40
    assert max(np.diff(weighed)) <= WEIGH_INTERVAL


def test_weights_are_recomputed_after_many_placements_without_arrivals() -> None:
    columns = NodeColumns([full(node("a", *[("gpu", "A")] * 8)), full(node("b", *[("gpu", "A")] * 8))])
    kernel, made = kernel_on(columns)
    made.arrived(ask(share(1)), 10_000)
    made.update_weights()
    epoch = made.score.epoch()
    one = kernel.class_for("one", ask(share(1), cpu=1, memory=1))
    assert len(kernel.place_run(one, 2 * WEIGH_INTERVAL).rows) == 2 * WEIGH_INTERVAL
    assert made.score.epoch() == epoch, "weights stay during a run"
    made.update_weights()
    assert made.score.epoch() == epoch + 1


def test_new_device_model_recomputes_weights_at_once() -> None:
    columns = NodeColumns([full(node("a", ("gpu", "A")))])
    kernel, made = kernel_on(columns)
    made.arrived(ask(gpus(1, "B")), 50)
    made.update_weights()
    one = kernel.class_for("b", ask(gpus(1, "B")))
    assert kernel.best_row(one) == -1
    epoch = made.score.epoch()
    columns.put(node("b", ("gpu", "B"), ("gpu", "A")))
    assert kernel.best_row(one) == 1 and made.score.epoch() > epoch


def test_number_of_weighed_shapes_is_limited_on_many_nodes() -> None:
    columns = NodeColumns([full(node(f"n{at}", ("gpu", "A"))) for at in range(40)])
    made = Fragmentation(columns)
    for cpu in range(500):
        made.arrived(ask(gpus(1), cpu=cpu + 1))
    made.update_weights()
    assert len(made._potential) == SHAPES_WEIGHED_MAX
    assert CELLS_MAX // 50_000 < SHAPES_WEIGHED_MAX


# --------------------------------------------------------------------------------------------------------------- robustness


@pytest.mark.parametrize("cpu", [0, 1, 1 << 60])
@pytest.mark.parametrize("memory", [0, 1, 1 << 61])
@pytest.mark.parametrize("sizes", [1, 200])
def test_score_is_finite_for_extreme_amounts(cpu: int, memory: int, sizes: int) -> None:
    columns = NodeColumns([full(node(f"n{at}", *[("gpu", "A")] * at, cpu=cpu, memory=memory)) for at in range(4)])
    kernel, made = kernel_on(columns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in range(1, 1_000, 1_000 // sizes):
            made.arrived(ask(share(size), cpu=cpu // 2, memory=memory // 2), 7)
            made.arrived(ask(gpus(3), cpu=0, memory=0), 1)
            made.update_weights()
            for key, one_ask in enumerate(
                (ask(share(size), cpu=0, memory=0), ask(gpus(1), cpu=cpu // 4), ask(cpu=0, memory=0))
            ):
                one = kernel.class_for(key, one_ask)
                row = kernel.best_row(one)
                if row >= 0:
                    kernel.post(one, row, kernel.choose_devices(one, row))
    assert np.isfinite(made._base).all()


def test_overcommitted_device_has_nothing_left() -> None:
    columns = NodeColumns([full(node("a", ("gpu", "A"), ("gpu", "A"))), full(node("b", ("gpu", "A")))])
    kernel, made = kernel_on(columns)
    made.arrived(ask(share(500), cpu=1_000), 50)
    made.update_weights()
    columns.post(0, (("cpu", 100_000),), {"d0": 1_700})
    assert kernel.best_row(kernel.class_for("one", ask(share(500), cpu=1_000))) == 1
    assert np.isfinite(made._base).all() and made._base[0] == 0.0
    assert made._device_shares.free[0].tolist() == [0, WHOLE_DEVICE]


def test_score_handles_missing_nodes_devices_and_arrivals() -> None:
    for columns in (NodeColumns(), NodeColumns([full(node("a"))]), NodeColumns([full(node("a", ("gpu", "A")))])):
        kernel, made = kernel_on(columns)
        made.update_weights()
        assert kernel.best_row(kernel.class_for("one", ask(gpus(1)))) == (0 if columns.whole_devices else -1)
        assert kernel.best_row(kernel.class_for("two", ask(gpus(1, "B")))) == -1
