"""Does a funnel add up to the nodes that there are, and is the nearest node the nearest?"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from msgspec.structs import replace

from remit.law.fit import Requirements
from remit.model.claims import Code
from remit.model.kinds import DeviceRequest, NodeHealth, NodeStatus, Placement
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.funnel import could_ever_fit, funnel, nearest_fit
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import Filter, UnblockEvent
from tests.properties.test_fit import ask_of
from tests.properties.test_kernel import kernel_of, orders
from tests.unit.law.fit_oracle import violations
from tests.unit.observation.row_fixtures import Told, ready, replica, tenant, work


def seen(t: Told, name: str, *filters: Filter) -> tuple[Kernel, WorkClass]:
    kernel = Kernel(t.view.columns, t.view.peers, filters=filters)
    return kernel, kernel.class_for(name, t.view.shapes.requirements_of(t.shape(name)))


def sick(name: str, cpu: str = "4", **more: Any) -> Any:
    return replace(ready(name, cpu, **more), status=NodeStatus(health=NodeHealth.SUSPECT))


def test_each_node_is_counted_at_the_first_filter_that_refuses_it() -> None:
    nodes = (ready("n1"), ready("n2", zone="b"), sick("n3", zone="b"), ready("n4", "1", zone="b"))
    t = Told(*nodes, tenant("t1"), *work("a", "2", placement=Placement(zones=("b",))))
    found = funnel(*seen(t, "a"))
    assert found.pairs() == (("node-health", 1), ("place", 1), ("resources", 1))
    assert (found.nodes, found.fits) == (4, 1)
    assert found.reason == Code.NO_ROOM
    assert set(found.unblock_events()) == {UnblockEvent.NODE, UnblockEvent.ROOM}


def test_a_node_that_went_is_not_counted() -> None:
    t = Told(ready("n1"), ready("n2"), tenant("t1"), *work("a"))
    t.tell(drop=["node/n1"])
    found = funnel(*seen(t, "a"))
    assert (found.nodes, found.fits) == (1, 1)


def test_without_nodes_there_is_no_room_and_a_node_would_help() -> None:
    t = Told(tenant("t1"), *work("a"))
    found = funnel(*seen(t, "a"))
    assert (found.nodes, found.reason, found.unblock_events()) == (0, Code.NO_ROOM, (UnblockEvent.NODE,))
    assert nearest_fit(*seen(t, "a")) is None
    assert not could_ever_fit(*seen(t, "a"))


def test_the_nearest_node_lacks_the_least_and_says_of_what() -> None:
    t = Told(ready("n1", "3"), ready("n2", "4"), sick("n3", "9"), tenant("t1"), *work("a", "5"))
    near = nearest_fit(*seen(t, "a"))
    assert near is not None
    assert (near.row, near.missing) == (t.view.columns.rows["n2"], {"cpu": 1000})
    assert [one.name for one in near.refused] == ["resources"]


def test_devices_that_lack_are_named_by_kind() -> None:
    t = Told(ready("n1", gpus=1), tenant("t1"), *work("a", "1", devices=(DeviceRequest(kind="gpu", count=2),)))
    near = nearest_fit(*seen(t, "a"))
    assert near is not None
    assert near.missing == {"gpu": 1}
    assert not could_ever_fit(*seen(t, "a"))


def test_the_nearest_node_is_the_one_with_most_of_the_devices() -> None:
    nodes = ready("n1"), ready("n2", gpus=1), ready("n3", gpus=3), ready("n4", gpus=2)
    for asks in (DeviceRequest(kind="gpu", count=4),), (DeviceRequest(kind="gpu", models=("A10",), count=4),):
        t = Told(*nodes, tenant("t1"), *work("a", "1", devices=asks))
        near = nearest_fit(*seen(t, "a"))
        assert near is not None
        assert (near.row, near.missing) == (t.view.columns.rows["n3"], {"gpu": 1})


def test_others_are_not_told_whose_an_ask_is() -> None:
    """Work that needs the same shares one: its labels and its name are only those of the first."""
    told: list[Any] = []

    def check(ask: Requirements, site: Any, peers: Any) -> bool:
        told.append((ask.generation, dict(ask.labels), [(name, int(need)) for name, need in ask.resources]))
        return True

    t = Told(ready("n1"), tenant("t1"), *work("a", "2", labels={"app": "a"}))
    theirs = Filter("theirs", Code.POLICY, check, third_party=True, applies=lambda ask: not ask.labels)
    assert funnel(*seen(t, "a", theirs)).fits == 1
    assert told and all(one == (("", "", 0), {}, [("cpu", 2000)]) for one in told)


def test_what_would_fit_an_empty_node_may_fit_some_day() -> None:
    t = Told(ready("n1"), tenant("t1"), *work("a", "3"), *work("full", "3"), replica("full", phase="bound", on="n1"))
    assert funnel(*seen(t, "a")).fits == 0
    assert could_ever_fit(*seen(t, "a"))
    never = Filter("theirs", Code.POLICY, lambda ask, site, peers: False, third_party=True)
    assert not could_ever_fit(*seen(t, "a", never))
    for cure in (UnblockEvent.ROOM, UnblockEvent.PEERS, UnblockEvent.OVERRIDE, UnblockEvent.QUOTA, UnblockEvent.TIME):
        assert could_ever_fit(*seen(t, "a", never._replace(unblock_events=(UnblockEvent.NODE, cure)))), (
            "what may pass by itself is worth waiting for"
        )


@settings(max_examples=100)
@given(orders())
def test_the_steps_and_the_fitting_add_up_and_the_fitting_are_those_that_no_rule_refuses(order: Any) -> None:
    scene, sorts, _, profile = order
    asks = [ask_of(one, scene) for one in sorts]
    standing = [(ask_of(one, scene), row) for one, row in scene.standing]
    kernel, _ = kernel_of(scene.left, asks, standing, profile)
    found = funnel(kernel, kernel.class_for(0, asks[0]))
    assert sum(step.refused for step in found.steps) + found.fits == found.nodes == len(scene.left)
    assert found.fits == sum(not violations(scene, row) for row in range(len(scene.left)))
