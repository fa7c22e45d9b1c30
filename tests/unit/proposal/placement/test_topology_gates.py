"""Topology gates over groups of equivalent nodes: equal to the fit rules of each node, also after placements."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from remit.law import fit
from remit.model.kinds import Affinity, Placement, Spread
from remit.observation.node_columns import translate_requirements
from remit.proposal.placement.topology_gates import GROUPS_MAX, TopologyGates, group_rows, topology_keys
from tests.unit.observation.row_fixtures import ViewFixture, ready, replica, tenant, work

TERMS = [
    Placement(topology_spread=(Spread(topology_key="zone"),)),
    Placement(topology_spread=(Spread(topology_key="zone", max_skew=2), Spread(topology_key="node"))),
    Placement(anti_affinity=(Affinity(label_selector={"app": "x"}, topology_key="zone"),)),
    Placement(affinity=(Affinity(label_selector={"app": "x"}, topology_key="zone"),)),
    Placement(
        affinity=(Affinity(label_selector={"app": "y"}, topology_key="zone"),), topology_spread=(Spread(topology_key="node"),)
    ),
]
COUPLED = tuple(
    rule for rule in fit.RULES if rule.check in (fit.spread, fit.affinity, fit.anti_affinity, fit.symmetric_anti_affinity)
)


def scene(term: Placement, standing: list[int]) -> tuple[ViewFixture, Any]:
    nodes = [ready(f"n{i}", "64", zone="abc"[i % 2 if i < 5 else 2]) for i in range(6)]
    there = [replica("other", i, phase="bound", on=f"n{at}") for i, at in enumerate(standing)]
    mine = work("a", labels={"app": "x"}, placement=term)
    t = ViewFixture(*nodes, tenant("t1", "100"), *work("other", replicas=9, labels={"app": "y"}), *mine, *there)
    return t, translate_requirements(t.view.shapes.requirements_of(t.shape("a")), t.view.columns)


@settings(max_examples=60)
@given(st.sampled_from(TERMS), st.lists(st.integers(0, 5), max_size=4), st.lists(st.integers(0, 5), max_size=6))
def test_gates_equal_fit_rules_after_every_placement(term: Placement, standing: list[int], placed: list[int]) -> None:
    t, ask = scene(term, standing)
    columns, peers = t.view.columns, t.view.peers
    static = np.broadcast_to(fit.mask(ask, columns, peers, fit.STATIC_RULES), len(columns)).copy()
    gates = TopologyGates(ask, columns, peers, static, slice(None), peers.anti_affinity_owners(ask))
    gates.load(ours=True)
    for row in placed:
        assert gates.open().tolist() == np.broadcast_to(fit.mask(ask, columns, peers, COUPLED), len(columns)).tolist()
        gates.placed(row)
        peers.post(ask, row, 1)
    assert gates.open().tolist() == np.broadcast_to(fit.mask(ask, columns, peers, COUPLED), len(columns)).tolist()


def test_groups_hold_nodes_of_same_domains_up_to_limit() -> None:
    t, ask = scene(TERMS[0], [])
    order = group_rows(topology_keys(ask, ()), t.view.columns)
    assert order is not None
    groups = [order.rows[start:end].tolist() for start, end in zip(order.starts, order.ends, strict=True)]
    zones = [{t.view.columns.nodes[row].spec.zone for row in rows} for rows in groups]
    assert sorted(map(sorted, zones)) == [["a"], ["b"], ["c"]]
    assert sorted(row for rows in groups for row in rows) == list(range(6))
    many = ViewFixture(*(ready(f"n{i:03}") for i in range(GROUPS_MAX + 1)), *work("a", placement=TERMS[1]))
    requirements_ = translate_requirements(many.view.shapes.requirements_of(many.shape("a")), many.view.columns)
    assert group_rows(topology_keys(requirements_, ()), many.view.columns) is None
