"""Property: interned requirements, which share cached results, equal requirements compiled alone."""

from __future__ import annotations

from typing import Any, Literal
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from remit.law import shared_requirements
from remit.law.fit import Requirements, cached_static_misfit, static_misfit
from remit.law.requirements import compile_requirements
from remit.law.shared_requirements import RequirementsInterner
from remit.model.kinds import (
    Affinity,
    Placement,
    PolicyAllow,
    PolicyMatch,
    PolicyRule,
    PolicySpec,
    Spread,
    Template,
    WorkloadSpec,
)
from remit.model.resources import Amount
from tests.properties.commitment.books_check import LOOKED_UP, compared
from tests.unit.law.fit_oracle import PlacementCase, Work
from tests.unit.law.scalar_fit import OneNode
from tests.unit.law.strategies import scenes


def answers(ask: Requirements, nodes: list[OneNode]) -> list[Any]:
    places = [[getattr(ask, name)[at] for name, at in zip(LOOKED_UP, _seen(node), strict=True)] for node in nodes]
    return [places, [static_misfit(ask, node) for node in nodes]]


def _seen(node: OneNode) -> list[Any]:
    place = [node.region, node.zone, node.pool]
    return [*place, *place, node.taints, node.taints]


@given(scenes(loud=frozenset({"policy"})), st.integers(1, 3), st.data())
def test_interned_requirements_equal_separately_compiled_ones(scene: PlacementCase, most: int, data: st.DataObject) -> None:
    """Also when the cache is so small that entries are evicted."""
    asks = RequirementsInterner(scene.policies)
    nodes = [OneNode(one) for one in scene.left]
    works = [scene.work, *(work for work, _ in scene.standing)]
    works += [work._replace(name=name) for work in works for name in ("api", "db")]
    works += [work._replace(labels=other.labels) for work in works for other in works[:2]]
    with mock.patch.object(shared_requirements, "SHARED_MAX", most):
        for work in data.draw(st.lists(st.sampled_from(works), min_size=2, max_size=12)):
            number, is_open = data.draw(st.integers(1, 3)), data.draw(st.booleans())
            shared = asks.compile(work.tenant, work.name, work.labels, work.spec, number, is_open)
            alone = compile_requirements(
                work.tenant, work.name, work.labels, work.spec, scene.policies, number, (0, None), is_open
            )
            assert compared(shared) == compared(alone)
            assert answers(shared, nodes) == answers(alone, nodes)
            assert [cached_static_misfit(shared, node) for node in nodes] == [static_misfit(alone, node) for node in nodes]


def spec(placement: Placement = Placement(), type_: Literal["job", "daemon"] = "job", cpu: int = 100) -> WorkloadSpec:
    return WorkloadSpec(type=type_, template=Template(command=("x",), resources=Amount({"cpu": cpu})), placement=placement)


def shared_tables(asks: RequirementsInterner, *works: Work) -> int:
    """Number of distinct result tables used by these workloads."""
    return len({id(asks.compile(work.tenant, work.name, work.labels, work.spec).static_results) for work in works})


def test_unselected_names_and_labels_share_requirements() -> None:
    asks = RequirementsInterner()
    jobs = [Work("t1", f"job-{i}", {"app": f"a{i}"}, spec()) for i in range(5)]
    assert shared_tables(asks, *jobs) == 1
    assert shared_tables(asks, jobs[0], jobs[1]._replace(spec=spec(cpu=200)), jobs[2]._replace(tenant="t2")) == 3


def test_selector_separates_selected_from_unselected_labels() -> None:
    asks = RequirementsInterner()
    apart = spec(Placement(anti_affinity=(Affinity(topology_key="node", label_selector={"app": "x"}),)))
    jobs = [Work("t1", f"job-{i}", {"app": "x" if i < 4 else f"y{i}"}, apart) for i in range(8)]
    assert shared_tables(asks, *jobs[:4]) == 1
    assert shared_tables(asks, *jobs) == 2


def test_self_selecting_workloads_share_nothing() -> None:
    asks = RequirementsInterner()
    spread = spec(Placement(topology_spread=(Spread(topology_key="zone", max_skew=1),)))
    for one in (spread, spec(type_="daemon")):
        assert shared_tables(asks, *(Work("t1", f"w{i}", {}, one) for i in range(3))) == 3
        assert shared_tables(asks, *(Work("t1", "w", {"a": str(i)}, one) for i in range(3))) == 1


def test_policy_rule_separates_matching_from_other_labels() -> None:
    rule = PolicyRule(match=PolicyMatch(labels={"app": "x"}), allow=PolicyAllow(zones=("a",)))
    asks = RequirementsInterner((PolicySpec(rules=(rule,)),))
    assert shared_tables(asks, *(Work("t1", f"w{i}", {"app": "x", "n": str(i)}, spec()) for i in range(3))) == 1
    assert shared_tables(asks, *(Work("t1", f"w{i}", {"app": "x" if i else "y"}, spec()) for i in range(3))) == 2
