"""Which generations come to one shape, and which must not?"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from remit.model.kinds import Affinity, Placement, Spread
from remit.model.metadata import Deadline
from remit.model.policies import PolicyAllow, PolicyMatch, PolicyRule
from tests.unit.observation.row_fixtures import Told, policy, ready, tenant, work

APART = Placement(anti_affinity=(Affinity(label_selector={"app": "shy"}, topology_key="node"),))
SPREAD = Placement(topology_spread=(Spread(topology_key="zone"),))


def told(**labels: str) -> Told:
    """A workload for each name, equal but for its name and its label `app`."""
    things = [thing for name, app in labels.items() for thing in work(name, labels={"app": app} if app else {})]
    return Told(ready("n1"), tenant("t1"), *things)


def test_equal_specs_are_one_shape_whatever_their_names_and_labels() -> None:
    t = told(a="", b="", c="x")
    assert t.shape("a") == t.shape("b") == t.shape("c")
    assert len(t.view.shapes.shapes) == 1


@pytest.mark.parametrize(
    "other",
    [{"cpu": "2"}, {"type_": "job"}, {"gang": 2}, {"placement": Placement(zones=("a",))}, {"replace": "fenced"}],
)
def test_what_a_node_is_asked_for_makes_another_shape(other: dict[str, object]) -> None:
    t = told(a="")
    t.tell(*work("b", **other))  # type: ignore[arg-type]
    assert t.shape("a") != t.shape("b")


def test_who_has_a_term_towards_others_is_like_nobody_else() -> None:
    t = told()
    t.tell(*work("a", placement=SPREAD), *work("b", placement=SPREAD))
    assert t.shape("a") != t.shape("b")


def test_those_whom_an_anti_affinity_shuns_differ_from_those_it_does_not() -> None:
    t = told(a="", b="shy", c="shy")
    assert t.shape("a") == t.shape("b")
    t.tell(*work("x", placement=APART))
    assert t.shape("a") != t.shape("b") == t.shape("c")
    shuns = list(t.view.shapes.anti_affinity_of("t1"))
    assert t.view.peers.anti_affinity_owners(t.view.shapes.requirements_of(t.shape("b"))) == shuns
    assert t.view.peers.anti_affinity_owners(t.view.shapes.requirements_of(t.shape("a"))) == []
    t.tell(*work("d", labels={"app": "shy"}))
    assert t.shape("d") == t.shape("b")


def test_an_anti_affinity_that_is_gone_shuns_nobody_and_may_come_again() -> None:
    t = told(a="", b="shy")
    for _ in range(2):
        t.tell(*work("x", placement=APART))
        assert t.shape("a") != t.shape("b")
        t.tell(drop=["generation/t1/x/00000001", "workload/t1/x"])
        assert t.view.shapes.anti_affinity_of("t1") == ()
    t.tell(*work("e"), *work("f", labels={"app": "shy"}))
    assert t.shape("e") == t.shape("f")


def test_a_rule_that_looks_at_labels_parts_those_it_speaks_of() -> None:
    t = told(a="", b="shy")
    rule = PolicyRule(match=PolicyMatch(labels={"app": "shy"}), allow=PolicyAllow(zones=("b",)))
    t.tell(policy(1, rule))
    assert t.shape("a") != t.shape("b")
    ask = t.view.shapes.requirements_of
    assert (ask(t.shape("a")).allowed_zones["a"], ask(t.shape("b")).allowed_zones["a"]) == (True, False)
    assert ("policy",) in t.view.changes.take().unblock_events
    t.tell(policy(2))
    assert t.shape("a") == t.shape("b")


def test_a_rule_for_everybody_parts_nobody_and_binds_all() -> None:
    t = told(a="", b="shy")
    t.tell(policy(1, PolicyRule(allow=PolicyAllow(zones=("b",)))))
    assert t.shape("a") == t.shape("b")
    assert not t.view.shapes.requirements_of(t.shape("a")).allowed_zones["a"]


def test_asks_follow_the_policy_in_force() -> None:
    t = told(a="")
    assert t.view.shapes.requirements_of(t.shape("a")).policy == 0
    leased = policy(3)
    t.tell(replace(leased, spec=replace(leased.spec, deadline=Deadline(boot="b", at_ms=9))))
    ask = t.view.shapes.requirements_of(t.shape("a"))
    assert (ask.policy, ask.policy_deadline) == (3, Deadline(boot="b", at_ms=9))
    t.tell(policy(2))
    assert t.view.shapes.requirements_of(t.shape("a")).policy == 3
    assert t.view.shapes.policy is not None
    assert t.view.shapes.policy.spec.number == 3


def test_many_equal_jobs_are_one_shape() -> None:
    things = [thing for i in range(2_000) for thing in work(f"j{i}", type_="job", replicas=1)]
    t = Told(ready("n1"), tenant("t1"), *things)
    assert len(t.view.shapes.shapes) == 1
    assert len(t.view.shapes) == 2_000


def test_a_generation_shows_what_a_scheduler_asks_of_it() -> None:
    t = told()
    t.tell(*work("g", gang=2, priority="high", labels={"app": "x"}))
    found = t.view.shapes.find("t1", "g", 1)
    assert found is not None
    seen = t.view.shapes.info(found)
    assert (seen.tenant, seen.workload, seen.number, seen.gang, seen.priority_class) == ("t1", "g", 1, 2, "high")
    assert (seen.labels, seen.open, seen.min_available, seen.deadline_ms) == ((("app", "x"),), True, 0, 0)
