"""Placement kernel on many nodes: correct places, also while nodes change, come and go."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from msgspec.structs import replace

from remit.law.fit import Requirements
from remit.model.kinds import NodeHealth, NodeStatus, Taint
from remit.observation.node_columns import NodeColumns
from remit.observation.topology_counts import ColumnPeerCounts
from remit.proposal.placement.class_scores import top_k_fitting
from remit.proposal.placement.kernel import Kernel
from tests.unit.proposal.placement.kernel_fixture import PLACES, ask, full, kernel, node

NODES = 3_000
"""Enough nodes that a run takes samples."""


def one_by_one(kernel: Kernel, ask: Requirements, count: int) -> list[int]:
    one = kernel.class_for(ask.generation, ask)
    rows: list[int] = []
    while len(rows) < count and (row := kernel.best_row(one)) >= 0:
        kernel.post(one, row)
        rows.append(row)
    return rows


@pytest.mark.parametrize("size", [0, 1, 100, 3_000, 20_000])
@pytest.mark.parametrize("limit", [1, 7, 400])
@pytest.mark.parametrize("distinct", [2, 50, 1_000_000])
def test_top_k_are_highest_fitting_and_first_of_equals(size: int, limit: int, distinct: int) -> None:
    for seed, fitting in ((1, 0.9), (2, 0.5), (3, 0.001)):
        rng = np.random.default_rng(seed)
        numbers = rng.integers(0, distinct, size).astype(np.int32)
        numbers[rng.random(size) > fitting] = -1
        expected = sorted((place for place in range(size) if numbers[place] >= 0), key=lambda place: (-numbers[place], place))
        assert top_k_fitting(numbers, limit).tolist() == sorted(expected[:limit])


def test_misleading_sample_does_not_change_top_k() -> None:
    """All sampled places are high, or fit nowhere, unlike the others."""
    stride = 17_000 // 1_024 + 1
    numbers = np.zeros(17_000, dtype=np.int32)
    numbers[::stride] = np.arange(1_000, 2_000)
    numbers[5] = 3_000
    assert top_k_fitting(numbers, 900).tolist() == sorted([5, *range(stride * 101, 17_000, stride)])
    numbers[numbers == 0] = 7
    assert top_k_fitting(numbers, 950)[:3].tolist() == [5, 51 * stride, 52 * stride]
    low = np.full(17_000, 9, dtype=np.int32)
    low[::stride] = -1
    assert top_k_fitting(low, 40).tolist() == [place for place in range(60) if place % stride][:40]


@pytest.mark.parametrize("name", PLACES)
def test_run_over_many_nodes_equals_single_placements(name: str) -> None:
    rng = np.random.default_rng(11)
    base = NodeColumns([full(node(row, rng)) for row in range(NODES)])
    at_once, singly = kernel(base.freeze()), kernel(base.freeze())
    placed = 0
    for other in (name, "plain", name):
        for count in (1, 60, 300):
            found = at_once.place_run(at_once.class_for(other, ask(other)), count).rows
            assert found == one_by_one(singly, ask(other), count)
            placed += len(found)
    assert placed == 361 * 3 - (2 * 361 - 40 if name == "apart" else 0), "forty racks hold forty"
    assert at_once.columns.amounts.tolist() == singly.columns.amounts.tolist()


@pytest.mark.parametrize("name", PLACES)
def test_cached_class_equals_new_kernel_after_node_changes(name: str) -> None:
    """Nodes change, go and come, and other classes are placed: no cached value may outlive its inputs."""
    rng = np.random.default_rng(5)
    nodes = {row: node(row, rng) for row in range(60)}
    columns = NodeColumns([full(one) for one in nodes.values()])
    cached = kernel(columns)
    asks = [ask(name), ask("plain", 500), ask("shunned", 200)]
    placed = 0
    for step in range(120):
        row = int(rng.integers(0, 60))
        match step % 6:
            case 0:
                nodes[row] = replace(nodes[row], status=NodeStatus(health=NodeHealth.READY if step % 4 else NodeHealth.SUSPECT))
                columns.put(nodes[row])
            case 1:
                nodes[row] = node(row, rng, Taint(key="old", effect="PreferNoSchedule")) if step % 4 else node(row, rng)
                columns.put(nodes[row])
            case 2:
                columns.put(node(1_000 + step, rng))
            case 3 if step > 60:
                columns.drop(next(name for name in columns.rows if name.startswith("node-1")))
            case _:
                placed += len(cached.place_run(cached.class_for(1, asks[1]), 3).rows)
        for at, mine in enumerate(asks):
            one = cached.class_for(at, mine)
            fresh = Kernel(columns, cached.peers)
            expected_class = fresh.class_for(at, mine)
            expected = fresh.best_row(expected_class)
            assert cached.best_row(one) == expected, f"at step {step}"
            assert one.score.tolist() == expected_class.score.tolist(), f"at step {step}"
            if expected >= 0:
                cached.post(one, expected)
                placed += 1
    assert placed >= 200


@pytest.mark.parametrize("name", PLACES)
def test_cluster_without_nodes_has_no_place(name: str) -> None:
    tested = kernel(NodeColumns())
    one = tested.class_for(name, ask(name))
    assert tested.best_row(one) == -1
    assert tested.place_run(one, 5).rows == []


@pytest.mark.parametrize("name", ["spread", "soft", "near", "apart"])
@pytest.mark.parametrize("racks", [40, 400])
def test_group_scores_by_row_give_next_place(name: str, racks: int) -> None:
    """With four hundred racks there are too many topology groups: each row has its own gate."""
    rng = np.random.default_rng(8)
    tested = kernel(NodeColumns([full(node(row, rng, racks=racks)) for row in range(900)]))
    one = tested.class_for(name, ask(name))
    ever_shut = False
    for _ in range(30):
        row = tested.best_row(one)
        assert one.groups is not None
        numbers = one.groups.row_scores()
        assert row == int(numbers.argmax())
        shut = numbers < 0
        assert (one.groups.open() & (one.score >= 0)).tolist() == (~shut).tolist()
        ever_shut |= bool(shut.any())
        tested.post(one, row)
    assert (name == "soft") == (not ever_shut)


def test_classes_with_same_topology_keys_share_node_order() -> None:
    rng = np.random.default_rng(3)
    tested = kernel(NodeColumns([full(node(row, rng)) for row in range(100)]))
    near, spread, apart = (tested.class_for(name, ask(name)) for name in ("near", "spread", "apart"))
    for one in (near, spread, apart):
        tested.best_row(one)
    orders = [one.groups.order for one in (near, spread, apart) if one.groups]
    assert len(orders) == 3 and orders[0] is orders[1] and orders[0] is not orders[2]


def test_peer_added_after_class_was_built_closes_node() -> None:
    rng = np.random.default_rng(3)
    columns = NodeColumns([full(node(row, rng)) for row in range(4)])
    tested = kernel(columns)
    away = ask("away")
    one = tested.class_for("away", away)
    first = tested.best_row(one)
    (index,) = (term.peers for term in away.anti_affinity)
    tested.peers.add(index, f"node-{first}")
    assert tested.best_row(one) != first
    for row in range(4):
        tested.peers.add(index, f"node-{row}")
    assert tested.best_row(one) == -1
    tested.peers.add(index, "node-2", -1)
    assert tested.best_row(one) == 2


def test_class_reports_memory_by_node() -> None:
    rng = np.random.default_rng(3)
    columns = NodeColumns([full(node(row, rng)) for row in range(NODES)])
    tested = kernel(columns)
    plain, spread = (tested.class_for(name, ask(name)) for name in ("plain", "spread"))
    assert plain.memory_bytes == 0
    tested.best_row(plain)
    tested.best_row(spread)
    assert plain.memory_bytes == 6 * NODES
    assert spread.memory_bytes > plain.memory_bytes


def test_huge_request_fits_nowhere_without_overflow_warnings() -> None:
    rng = np.random.default_rng(3)
    columns = NodeColumns([full(node(row, rng)) for row in range(4)])
    kernel = Kernel(columns, ColumnPeerCounts(columns, {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cpu in (10**6, 10**9, 10**15):
            assert kernel.place_run(kernel.class_for(cpu, ask("plain", cpu)), 1).rows == []
