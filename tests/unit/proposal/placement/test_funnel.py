"""Filter funnel: its steps add up to the number of nodes, and the nearest node is the nearest."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from msgspec.structs import replace

from remit.law.fit import Requirements
from remit.model.claims import Code
from remit.model.kinds import DeviceRequest, NodeHealth, NodeStatus, Placement
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.funnel import could_ever_fit, funnel, nearest_fit, rejection_text
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import Filter, UnblockEvent
from tests.properties.proposal.kernel_oracle import kernel_of, orders
from tests.unit.law.fit_fixtures import ask_of
from tests.unit.law.fit_oracle import violations
from tests.unit.observation.row_fixtures import ViewFixture, ready, replica, tenant, work


def kernel_and_class(t: ViewFixture, name: str, *filters: Filter) -> tuple[Kernel, WorkClass]:
    kernel = Kernel(t.view.columns, t.view.peers, filters=filters)
    return kernel, kernel.class_for(name, t.view.shapes.requirements_of(t.shape(name)))


def suspect(name: str, cpu: str = "4", **more: Any) -> Any:
    return replace(ready(name, cpu, **more), status=NodeStatus(health=NodeHealth.SUSPECT))


def test_each_node_is_counted_at_first_filter_that_refuses_it() -> None:
    nodes = (ready("n1"), ready("n2", zone="b"), suspect("n3", zone="b"), ready("n4", "1", zone="b"))
    t = ViewFixture(*nodes, tenant("t1"), *work("a", "2", placement=Placement(zones=("b",))))
    found = funnel(*kernel_and_class(t, "a"))
    assert found.pairs() == (("node-health", 1), ("placement", 1), ("resources", 1))
    assert (found.nodes, found.fits) == (4, 1)
    assert found.reason == Code.NO_ROOM
    assert set(found.unblock_events()) == {UnblockEvent.NODE, UnblockEvent.ROOM}


def test_deleted_node_is_not_counted() -> None:
    t = ViewFixture(ready("n1"), ready("n2"), tenant("t1"), *work("a"))
    t.apply(drop=["node/n1"])
    found = funnel(*kernel_and_class(t, "a"))
    assert (found.nodes, found.fits) == (1, 1)


def test_cluster_without_nodes_reports_no_room() -> None:
    t = ViewFixture(tenant("t1"), *work("a"))
    found = funnel(*kernel_and_class(t, "a"))
    assert (found.nodes, found.reason, found.unblock_events()) == (0, Code.NO_ROOM, (UnblockEvent.NODE,))
    assert nearest_fit(*kernel_and_class(t, "a")) is None
    assert not could_ever_fit(*kernel_and_class(t, "a"))


def test_nearest_node_lacks_least_and_names_missing_amount() -> None:
    t = ViewFixture(ready("n1", "3"), ready("n2", "4"), suspect("n3", "9"), tenant("t1"), *work("a", "5"))
    near = nearest_fit(*kernel_and_class(t, "a"))
    assert near is not None
    assert (near.row, near.missing) == (t.view.columns.rows["n2"], {"cpu": 1000})
    assert [one.name for one in near.refused] == ["resources"]


def test_missing_devices_are_named_by_kind() -> None:
    t = ViewFixture(ready("n1", gpus=1), tenant("t1"), *work("a", "1", devices=(DeviceRequest(kind="gpu", count=2),)))
    near = nearest_fit(*kernel_and_class(t, "a"))
    assert near is not None
    assert near.missing == {"gpu": 1}
    assert not could_ever_fit(*kernel_and_class(t, "a"))


def test_nearest_node_is_one_with_most_requested_devices() -> None:
    nodes = ready("n1"), ready("n2", gpus=1), ready("n3", gpus=3), ready("n4", gpus=2)
    for asks in (DeviceRequest(kind="gpu", count=4),), (DeviceRequest(kind="gpu", models=("A10",), count=4),):
        t = ViewFixture(*nodes, tenant("t1"), *work("a", "1", devices=asks))
        near = nearest_fit(*kernel_and_class(t, "a"))
        assert near is not None
        assert (near.row, near.missing) == (t.view.columns.rows["n3"], {"gpu": 1})


def test_nodes_without_the_requested_devices_are_told_from_those_in_use() -> None:
    def text(t: ViewFixture, name: str) -> str:
        kernel, work_class = kernel_and_class(t, name)
        return rejection_text(funnel(kernel, work_class), work_class.requirements)

    one, two = (DeviceRequest(kind="gpu", count=1),), (DeviceRequest(kind="gpu", count=2),)
    nodes = ready("n1"), ready("n2"), ready("n3", gpus=1)
    t = ViewFixture(*nodes, tenant("t1"), *work("a", devices=one), *work("b", devices=two))
    assert text(t, "a") == "1 of 3 nodes fit: 2 have no gpu"
    assert text(t, "b") == "0 of 3 nodes fit: 3 have fewer than 2 gpu"
    kernel, work_class = kernel_and_class(t, "a")
    placed = kernel.place_run(work_class, 1)
    taken = rejection_text(funnel(kernel, work_class), work_class.requirements)
    assert taken == "0 of 3 nodes fit: 2 have no gpu, 1 no free gpu"
    kernel.undo(work_class, placed)
    t.apply(replace(nodes[0], spec=ready("n1", gpus=1).spec), drop=["node/n2"])
    kernel.place_run(work_class, 2)
    assert rejection_text(funnel(kernel, work_class), work_class.requirements) == "0 of 2 nodes fit: 2 no free gpu"
    shared = ViewFixture(ready("n1"), tenant("t1"), *work("a", devices=(DeviceRequest(kind="gpu", share="500m"),)))
    assert text(shared, "a") == "0 of 1 nodes fit: 1 has no gpu"


def test_third_party_filter_does_not_see_workload_identity() -> None:
    """Workloads with equal requirements share one class; its labels and name would be only those of the first."""
    calls: list[Any] = []

    def check(ask: Requirements, site: Any, peers: Any) -> bool:
        calls.append((ask.generation, dict(ask.labels), [(name, int(need)) for name, need in ask.resources]))
        return True

    t = ViewFixture(ready("n1"), tenant("t1"), *work("a", "2", labels={"app": "a"}))
    third_party_filter = Filter("theirs", Code.POLICY, check, third_party=True, applies=lambda ask: not ask.labels)
    assert funnel(*kernel_and_class(t, "a", third_party_filter)).fits == 1
    assert calls and all(one == (("", "", 0), {}, [("cpu", 2000)]) for one in calls)


def test_request_that_fits_empty_node_could_ever_fit() -> None:
    t = ViewFixture(ready("n1"), tenant("t1"), *work("a", "3"), *work("full", "3"), replica("full", phase="bound", on="n1"))
    assert funnel(*kernel_and_class(t, "a")).fits == 0
    assert could_ever_fit(*kernel_and_class(t, "a"))
    never = Filter("theirs", Code.POLICY, lambda ask, site, peers: False, third_party=True)
    assert not could_ever_fit(*kernel_and_class(t, "a", never))
    for cure in (UnblockEvent.ROOM, UnblockEvent.PEERS, UnblockEvent.OVERRIDE, UnblockEvent.QUOTA, UnblockEvent.TIME):
        assert could_ever_fit(*kernel_and_class(t, "a", never._replace(unblock_events=(UnblockEvent.NODE, cure)))), (
            "this event may change the filter's answer"
        )


@settings(max_examples=100)
@given(orders())
def test_funnel_steps_and_fitting_add_up_and_match_rules(order: Any) -> None:
    scene, sorts, _, profile = order
    asks = [ask_of(one, scene) for one in sorts]
    standing = [(ask_of(one, scene), row) for one, row in scene.standing]
    kernel, _ = kernel_of(scene.left, asks, standing, profile)
    found = funnel(kernel, kernel.class_for(0, asks[0]))
    assert sum(step.refused for step in found.steps) + found.fits == found.nodes == len(scene.left)
    assert found.fits == sum(not violations(scene, row) for row in range(len(scene.left)))
