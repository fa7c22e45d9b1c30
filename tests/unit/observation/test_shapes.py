"""Shapes: which generations share one equivalence class and which must not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from remit.model.kinds import Affinity, Placement, Spread
from remit.model.metadata import Deadline
from remit.model.policies import PolicyAllow, PolicyMatch, PolicyRule
from tests.unit.observation.row_fixtures import ViewFixture, policy, ready, tenant, work

ANTI_AFFINITY = Placement(anti_affinity=(Affinity(label_selector={"app": "shy"}, topology_key="node"),))
SPREAD = Placement(topology_spread=(Spread(topology_key="zone"),))


def view_with_workloads(**labels: str) -> ViewFixture:
    """A workload for each name, equal but for its name and its label `app`."""
    objects = [obj for name, app in labels.items() for obj in work(name, labels={"app": app} if app else {})]
    return ViewFixture(ready("n1"), tenant("t1"), *objects)


def test_equal_specs_share_shape_regardless_of_names_and_labels() -> None:
    t = view_with_workloads(a="", b="", c="x")
    assert t.shape("a") == t.shape("b") == t.shape("c")
    assert len(t.view.shapes.shapes) == 1


@pytest.mark.parametrize(
    "other",
    [{"cpu": "2"}, {"type_": "job"}, {"gang": 2}, {"placement": Placement(zones=("a",))}, {"replace": "fenced"}],
)
def test_different_node_requirements_make_another_shape(other: dict[str, object]) -> None:
    t = view_with_workloads(a="")
    t.apply(*work("b", **other))  # type: ignore[arg-type]
    assert t.shape("a") != t.shape("b")


def test_workloads_with_own_spread_terms_do_not_share_shape() -> None:
    t = view_with_workloads()
    t.apply(*work("a", placement=SPREAD), *work("b", placement=SPREAD))
    assert t.shape("a") != t.shape("b")


def test_anti_affinity_separates_selected_from_unselected() -> None:
    t = view_with_workloads(a="", b="shy", c="shy")
    assert t.shape("a") == t.shape("b")
    t.apply(*work("x", placement=ANTI_AFFINITY))
    assert t.shape("a") != t.shape("b") == t.shape("c")
    owners = list(t.view.shapes.anti_affinity_of("t1"))
    assert t.view.peers.anti_affinity_owners(t.view.shapes.requirements_of(t.shape("b"))) == owners
    assert t.view.peers.anti_affinity_owners(t.view.shapes.requirements_of(t.shape("a"))) == []
    t.apply(*work("d", labels={"app": "shy"}))
    assert t.shape("d") == t.shape("b")


def test_deleted_anti_affinity_blocks_nothing_and_may_be_created_again() -> None:
    t = view_with_workloads(a="", b="shy")
    for _ in range(2):
        t.apply(*work("x", placement=ANTI_AFFINITY))
        assert t.shape("a") != t.shape("b")
        t.apply(drop=["generation/t1/x/00000001", "workload/t1/x"])
        assert t.view.shapes.anti_affinity_of("t1") == ()
    t.apply(*work("e"), *work("f", labels={"app": "shy"}))
    assert t.shape("e") == t.shape("f")


def test_policy_rule_on_labels_separates_matching_workloads() -> None:
    t = view_with_workloads(a="", b="shy")
    rule = PolicyRule(match=PolicyMatch(labels={"app": "shy"}), allow=PolicyAllow(zones=("b",)))
    t.apply(policy(1, rule))
    assert t.shape("a") != t.shape("b")
    ask = t.view.shapes.requirements_of
    assert (ask(t.shape("a")).allowed_zones["a"], ask(t.shape("b")).allowed_zones["a"]) == (True, False)
    assert ("policy",) in t.view.take_changes().unblock_events
    t.apply(policy(2))
    assert t.shape("a") == t.shape("b")


def test_policy_rule_without_match_applies_to_all_and_separates_none() -> None:
    t = view_with_workloads(a="", b="shy")
    t.apply(policy(1, PolicyRule(allow=PolicyAllow(zones=("b",)))))
    assert t.shape("a") == t.shape("b")
    assert not t.view.shapes.requirements_of(t.shape("a")).allowed_zones["a"]


def test_requirements_follow_policy_in_force() -> None:
    t = view_with_workloads(a="")
    assert t.view.shapes.requirements_of(t.shape("a")).policy == 0
    leased = policy(3)
    t.apply(replace(leased, spec=replace(leased.spec, deadline=Deadline(boot="b", at_ms=9))))
    ask = t.view.shapes.requirements_of(t.shape("a"))
    assert (ask.policy, ask.policy_deadline) == (3, Deadline(boot="b", at_ms=9))
    t.apply(policy(2))
    assert t.view.shapes.requirements_of(t.shape("a")).policy == 3
    assert t.view.policy is not None
    assert t.view.policy.spec.number == 3


def test_many_equal_jobs_share_one_shape() -> None:
    objects = [obj for i in range(2_000) for obj in work(f"j{i}", type_="job", replicas=1)]
    t = ViewFixture(ready("n1"), tenant("t1"), *objects)
    assert len(t.view.shapes.shapes) == 1
    assert len(t.view.shapes) == 2_000


def test_generation_info_shows_fields_scheduler_needs() -> None:
    t = view_with_workloads()
    t.apply(*work("g", gang=2, priority="high", labels={"app": "x"}))
    found = t.view.shapes.find("t1", "g", 1)
    assert found is not None
    info = t.view.shapes.info(found)
    assert (info.tenant, info.workload, info.number, info.gang, info.priority_class) == ("t1", "g", 1, 2, "high")
    assert (info.labels, info.open, info.min_available, info.deadline_ms) == ((("app", "x"),), True, 0, 0)
