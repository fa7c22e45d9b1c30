"""What does a plan foresee, and does it leave everything as it is?"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from remit.model.claims import Actor, Role
from remit.model.kinds import (
    Affinity,
    Config,
    DataSpec,
    Gang,
    Placement,
    Policy,
    PolicyAllow,
    PolicyRule,
    PolicySpec,
    PriorityClass,
    PriorityClassSpec,
    Rollout,
    Secret,
    SecretSpec,
    Spread,
    Tenant,
    TenantSpec,
    Workload,
)
from remit.model.metadata import Metadata
from remit.model.objects import AnyObject, dec_hook, encode
from remit.model.wire.api_types import PlanAnswer, PlanItem
from remit.proposal.explain.result_types import PendingExplanation
from remit.serve.auth.secrets import SealingKey, SealingKeys
from remit.serve.objects.dry_run import plan
from tests.properties.authority_world import amounts, workload
from tests.unit.observation.row_fixtures import generation, ready, replica, tenant
from tests.unit.proposal.cluster_fixtures import Cluster
from tests.unit.serve.watch_cache_fixtures import Told

ANN = Actor("ann", Role.OPERATOR)


def planned(told: Told, *things: AnyObject) -> PlanAnswer:
    return plan(told.look(), things, ANN, told.clock)


def only(told: Told, thing: AnyObject) -> PlanItem:
    (item,) = planned(told, thing).items
    return item


def service(name: str = "web", cpu: str = "1", replicas: int = 1, **more: Any) -> Workload:
    made = workload(name, cpu, replicas=replicas, **more)
    return replace(made, spec=replace(made.spec, type="service"))


def declared(made: Workload, number: int = 1, uid: str = "u1") -> Workload:
    return replace(made, metadata=replace(made.metadata, generation=number, uid=uid))


def running(made: Workload, *nodes: str) -> list[AnyObject]:
    """A service as it stands once it was rolled out."""
    stands = declared(made)
    name = made.metadata.name
    return [stands, generation(stands), *(replica(name, at, "serving", on) for at, on in enumerate(nodes))]


def test_a_new_workload__is_placed_by_the_kernel_and_nothing_is_written() -> None:
    told = Told(ready("n1", "2"), ready("n2", "2"), tenant("t1"))
    before = dict(told.board.rows)
    item = only(told, service(replicas=3))
    assert item.action == "create" and item.problem is None
    assert item.placement is not None
    assert (item.placement.wanted, item.placement.placed, item.placement.waits) == (3, 3, None)
    assert sorted(item.placement.nodes.values()) == [1, 2]
    assert told.board.rows == before


def test_more_than_there_is_room_for__says_why_the_rest_would_wait_and_what_would_help() -> None:
    item = only(Told(ready("n1", "2"), tenant("t1")), service(replicas=3))
    assert item.placement is not None and item.placement.waits is not None
    assert (item.placement.wanted, item.placement.placed, item.placement.nodes) == (3, 2, {"n1": 2})
    assert (item.placement.waits.verdict, item.placement.waits.reason) == ("not-now", "no_room")
    assert any(change.kind in ("nodes", "grow") for one in item.placement.waits.unblocks for change in one.changes)


def test_what_no_node_could_ever_take__is_never() -> None:
    item = only(Told(ready("n1", "2"), tenant("t1")), service(cpu="8"))
    assert item.placement is not None and item.placement.waits is not None
    assert (item.placement.placed, item.placement.waits.verdict) == (0, "never")


def test_quota__bounds_what_is_placed() -> None:
    item = only(Told(ready("n1", "8"), tenant("t1", "2")), service(replicas=4))
    assert item.placement is not None and item.placement.waits is not None
    assert (item.placement.placed, item.placement.waits.reason) == (2, "over_quota")


def test_a_missing_tenant_or_priority_class__is_foreseen_with_its_cure() -> None:
    nowhere = only(Told(ready("n1")), service())
    assert nowhere.action == "refused" and nowhere.problem is not None
    assert (nowhere.problem.code, nowhere.problem.status) == ("not_found", 404)
    assert "tenant t1 does not exist" in nowhere.problem.detail and nowhere.problem.cure
    unranked = only(Told(ready("n1"), tenant("t1")), service(priority="gold"))
    assert unranked.problem is not None and "priority class gold" in unranked.problem.detail
    assert unranked.placement is None and unranked.diff == ()


def test_what_is_declared_in_the_same_request__counts_whatever_the_order() -> None:
    told = Told(ready("n1", "4"))
    found = planned(
        told,
        service(priority="gold", replicas=2),
        PriorityClass(metadata=Metadata(name="gold"), spec=PriorityClassSpec(value=10)),
        Tenant(metadata=Metadata(name="t1"), spec=TenantSpec(quota=amounts(cpu="8"))),
    )
    assert [item.action for item in found.items] == ["create", "create", "create"]
    assert [item.kind for item in found.items] == ["Workload", "PriorityClass", "Tenant"]
    assert found.items[0].placement is not None and found.items[0].placement.placed == 2


def test_two_workloads_of_one_request__share_the_room_and_the_more_urgent_goes_first() -> None:
    gold = PriorityClass(metadata=Metadata(name="gold"), spec=PriorityClassSpec(value=10))
    told = Told(ready("n1", "3"), tenant("t1"), gold)
    low, high = planned(told, service("low", replicas=2), service("high", replicas=2, priority="gold")).items
    assert low.placement is not None and high.placement is not None
    assert (low.placement.placed, high.placement.placed) == (1, 2)


def test_a_policy_of_the_same_request__keeps_the_work_out() -> None:
    told = Told(ready("n1", "4"), tenant("t1"))
    rule = PolicyRule(allow=PolicyAllow(regions=("elsewhere",)))
    policy = Policy(metadata=Metadata(name="p"), spec=PolicySpec(rules=(rule,)))
    work, ruled = planned(told, service(), policy).items
    assert ruled.action == "create"
    assert work.placement is not None and work.placement.waits is not None
    assert (work.placement.placed, work.placement.waits.reason) == (0, "policy")


def test_the_same_again__is_unchanged_although_the_authority_stamped_it() -> None:
    made = service(replicas=1)
    item = only(Told(ready("n1"), tenant("t1"), *running(made, "n1")), made)
    assert (item.action, item.diff, item.placement) == ("unchanged", (), None)


def test_scaling_up__adds_only_what_is_missing() -> None:
    made = service(replicas=2)
    told = Told(ready("n1", "4"), tenant("t1"), *running(made, "n1", "n1"))
    item = only(told, replace(made, spec=replace(made.spec, replicas=5)))
    assert item.action == "replace"
    assert [(one.path, one.before, one.after) for one in item.diff] == [("spec.replicas", 2, 5)]
    assert item.placement is not None and item.placement.waits is not None
    assert (item.placement.wanted, item.placement.placed, item.placement.ends) == (3, 2, 0)


def test_scaling_down__tells_how_many_stop() -> None:
    made = service(replicas=3)
    told = Told(ready("n1", "4"), tenant("t1"), *running(made, "n1", "n1", "n1"))
    item = only(told, replace(made, spec=replace(made.spec, replicas=1)))
    assert item.placement is not None
    assert (item.placement.wanted, item.placement.placed, item.placement.ends) == (0, 0, 2)


def changed(made: Workload, **more: Any) -> Workload:
    return replace(made, spec=replace(made.spec, template=replace(made.spec.template, env={"MODE": "new"}), **more))


def test_a_rollout__takes_the_room_that_the_old_ones_leave() -> None:
    made = service(replicas=3, cpu="1")
    told = Told(ready("n1", "4"), tenant("t1"), *running(made, "n1", "n1", "n1"))
    item = only(told, changed(made))
    assert [(one.path, one.before, one.after) for one in item.diff] == [("spec.template.env.MODE", UNSET, "new")]
    assert item.placement is not None
    assert (item.placement.wanted, item.placement.placed, item.placement.ends) == (3, 3, 3)


def test_a_rollout_without_room_for_its_surge__would_not_begin() -> None:
    made = service(replicas=2, cpu="2")
    told = Told(ready("n1", "4"), tenant("t1"), *running(made, "n1", "n1"))
    item = only(told, changed(made, rollout=Rollout(max_surge=1)))
    assert item.placement is not None and item.placement.waits is not None
    assert (item.placement.wanted, item.placement.placed, item.placement.waits.reason) == (2, 0, "no_room")
    assert item.placement.stops["reason"] == "surge"
    spared = only(told, changed(made, rollout=Rollout(max_surge=0, max_unavailable=1)))
    assert spared.placement is not None and (spared.placement.wanted, spared.placement.placed) == (2, 2)


def test_a_gang__is_placed_whole_or_not_at_all() -> None:
    made = workload("train", "1", replicas=3)
    made = replace(made, spec=replace(made.spec, gang=Gang(min=3)))
    item = only(Told(ready("n1", "2"), tenant("t1")), made)
    assert item.placement is not None and item.placement.waits is not None
    assert (item.placement.placed, item.placement.waits.reason) == (0, "gang_short")


def test_a_daemon__comes_once_to_each_node_for_it() -> None:
    made = service("watch")
    made = replace(made, spec=replace(made.spec, type="daemon"))
    item = only(Told(ready("n1", "2"), ready("n2", "2"), tenant("t1")), made)
    assert item.placement is not None and item.placement.nodes == {"n1": 1, "n2": 1}


def test_what_is_being_deleted__is_refused() -> None:
    made = declared(service())
    going = replace(made, metadata=replace(made.metadata, deleting=True, finalizers=("example.org/hold",)))
    item = only(Told(ready("n1"), tenant("t1"), going), changed(service()))
    assert item.problem is not None and item.problem.code == "deleting"


def test_a_rule_that_is_broken__is_told_with_its_field() -> None:
    made = service()
    wrong = replace(made, spec=replace(made.spec, gang=Gang(min=5)))
    item = only(Told(ready("n1"), tenant("t1")), wrong)
    assert item.problem is not None and item.problem.code == "invalid" and "gang" in item.problem.detail


def test_a_secret__shows_which_keys_change_and_never_what_they_hold() -> None:
    before = Secret(
        metadata=Metadata(name="s", tenant="t1", uid="u", generation=1), spec=SecretSpec(data={"a": "old-1", "b": "same"})
    )
    after = Secret(metadata=Metadata(name="s", tenant="t1"), spec=SecretSpec(data={"a": "new-2", "b": "same", "c": "new-3"}))
    seals = SealingKeys([SealingKey.of(bytes(64))])
    item = only(Told(tenant("t1"), seals.seal_object(before)), seals.seal_object(after))
    assert [(one.path, one.before, one.after) for one in item.diff] == [
        ("spec.data.a", "(hidden)", "(hidden)"),
        ("spec.data.c", UNSET, "(hidden)"),
    ]
    told = encode(item)
    assert not any(word in told for word in (b"old-1", b"new-2", b"new-3", b"remit:sealed"))
    assert only(Told(tenant("t1"), seals.seal_object(before)), seals.seal_object(before)).action == "unchanged"
    shown = only(Told(tenant("t1")), Config(metadata=Metadata(name="c", tenant="t1"), spec=DataSpec(data={"a": "x"})))
    assert [(one.path, one.after) for one in shown.diff] == [("spec.data.a", "x")]


def test_replicas_that_were_released__are_queued_again_under_their_names() -> None:
    made = service(replicas=2)
    stands = declared(made)
    over = replica("web", 0, "released", "")
    told = Told(ready("n1", "4"), tenant("t1"), stands, generation(stands), over)
    item = only(told, replace(made, spec=replace(made.spec, replicas=3)))
    assert item.placement is not None and (item.placement.wanted, item.placement.placed) == (3, 3)


def test_very_many__are_not_all_tried_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.serve.objects.dry_run.TRIAL_REPLICAS_MAX", 5)
    item = only(Told(ready("n1", "64"), tenant("t1", "64")), service(replicas=9))
    assert item.placement is not None and item.placement.capped
    assert (item.placement.wanted, item.placement.placed) == (9, 5)


def test_a_plan__is_read_back_by_the_other_end_with_its_waits() -> None:
    found = planned(Told(ready("n1", "2"), tenant("t1")), service(replicas=3))
    (item,) = msgspec.json.decode(encode(found), type=PlanAnswer).items
    assert item.placement is not None and found.items[0].placement is not None
    assert msgspec.convert(item.placement.waits, PendingExplanation, dec_hook=dec_hook) == found.items[0].placement.waits
    assert item.diff == found.items[0].diff


@pytest.mark.parametrize(
    ("placement", "replicas", "nodes", "quota"),
    [
        (Placement(), 7, ("2", "3", "1"), "64"),
        (Placement(), 7, ("2", "3", "4"), "5"),
        (Placement(topology_spread=(Spread(topology_key="node", max_skew=1),)), 6, ("1", "4", "4"), "64"),
        (Placement(anti_affinity=(Affinity(label_selector={"app": "x"}, topology_key="node"),)), 4, ("4", "4", "4"), "64"),
    ],
    ids=["room", "quota", "spread", "anti-affinity"],
)
def test_as_many_are_placed_as_the_scheduler_then_places(
    placement: Placement, replicas: int, nodes: tuple[str, ...], quota: str
) -> None:
    there: tuple[AnyObject, ...] = (*(ready(f"n{number}", cpu) for number, cpu in enumerate(nodes)), tenant("t1", quota))
    made = service("web", replicas=replicas, placement=placement, labels={"app": "x"})
    item = only(Told(*there), made)
    assert item.placement is not None
    found = Cluster(*there).work(made, replicas).scheduled()
    assert item.placement.placed == len(found.bound)
    assert (item.placement.waits is None) == (not found.waits)
    if item.placement.waits is not None:
        assert {reason for reason, _ in found.waits.values()} == {item.placement.waits.reason}


def test_a_plan_that_takes_too_long__tells_no_placement_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.serve.objects.dry_run.PLACEMENT_MS_MAX", 0)
    item = only(Told(ready("n1", "2"), tenant("t1")), service())
    assert (item.action, item.placement) == ("create", None)
