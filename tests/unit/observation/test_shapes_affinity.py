"""Shapes of generations with terms on other replicas: names and labels matter where a selector uses them."""

from __future__ import annotations

from remit.law.requirements import WORKLOAD_LABEL
from remit.model.kinds import Affinity, Placement, Spread, Template, WorkloadSpec
from remit.model.metadata import RecordMetadata
from remit.model.objects import encode
from remit.model.records import Generation, GenerationSpec
from remit.model.resources import Amount
from remit.observation.shapes import ShapeTable

ANTI_AFFINITY = Placement(anti_affinity=(Affinity(topology_key="node", label_selector={"app": "x"}),))
SPREAD = Placement(topology_spread=(Spread(topology_key="zone", label_selector={"app": "x"}, max_skew=5),))


def shape_of(shapes: ShapeTable, name: str, placement: Placement, **labels: str) -> int:
    spec = WorkloadSpec(type="job", template=Template(command=("x",), resources=Amount({"cpu": 100})), placement=placement)
    made = Generation(
        metadata=RecordMetadata(name=f"{name}/00000001", tenant="t1"),
        spec=GenerationSpec(workload=name, generation=1, labels=labels, spec=spec),
    )
    return shapes.info(shapes.put_generation(f"t1/{name}/00000001", encode(made), 1)).shape


def test_generations_selected_alike_share_shape() -> None:
    for placement in (ANTI_AFFINITY, SPREAD):
        shapes = ShapeTable()
        found = {shape_of(shapes, f"job-{i}", placement, app="x", number=str(i)) for i in range(1_000)}
        assert len(found) == 1
        assert len(shapes.shapes) == 1


def test_selected_and_unselected_generations_differ_in_shape() -> None:
    shapes = ShapeTable()
    x, y, z = (shape_of(shapes, name, SPREAD, app=name) for name in "xyz")
    assert x != y == z
    assert [term.own for term in (*shapes.requirements_of(x).spread, *shapes.requirements_of(y).spread)] == [1, 0]


def test_term_on_own_workload_keeps_its_name() -> None:
    shapes = ShapeTable()
    own = Placement(topology_spread=(Spread(topology_key="zone"),))
    a, b = shape_of(shapes, "a", own), shape_of(shapes, "b", own)
    assert a != b
    assert [shapes.requirements_of(shape).spread[0].peers.selector for shape in (a, b)] == [
        ((WORKLOAD_LABEL, "a"),),
        ((WORKLOAD_LABEL, "b"),),
    ]


def test_selector_on_workload_label_separates_that_workload() -> None:
    shapes = ShapeTable()
    named = Placement(anti_affinity=(Affinity(topology_key="node", label_selector={WORKLOAD_LABEL: "a"}),))
    a, b, c = (shape_of(shapes, name, named) for name in "abc")
    assert a != b == c


def test_anti_affinity_of_third_workload_separates_equally_selected_shapes() -> None:
    shapes = ShapeTable()
    old, other = (shape_of(shapes, name, SPREAD, app="x", tier=tier) for name, tier in (("a", "1"), ("b", "2")))
    assert old == other
    shape_of(shapes, "c", Placement(anti_affinity=(Affinity(topology_key="node", label_selector={"tier": "2"}),)))
    a, b = (shapes.info(found).shape for name in "ab" if (found := shapes.find("t1", name, 1)) is not None)
    assert a != b
