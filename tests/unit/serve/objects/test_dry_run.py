"""Plans: predict what an apply would do, and change nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from remit.model.claims import Actor
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
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Metadata
from remit.model.objects import dec_hook, encode
from remit.model.roles import Role
from remit.model.wire.api_types import PlanAnswer, PlanItem
from remit.proposal.explain.result_types import PendingExplanation
from remit.serve.auth.secrets import SealingKey, SealingKeys
from remit.serve.objects.dry_run import plan
from tests.properties.authority_world import amounts, workload
from tests.unit.observation.row_fixtures import generation, ready, replica, tenant
from tests.unit.proposal.cluster_fixtures import Cluster
from tests.unit.serve.watch_cache_fixtures import CacheFixture

ANN = Actor("ann", Role.OPERATOR)


def plan_all(cache: CacheFixture, *objects: AnyObject) -> PlanAnswer:
    return plan(cache.view_snapshot(), objects, ANN, cache.clock)


def plan_one(cache: CacheFixture, obj: AnyObject) -> PlanItem:
    (item,) = plan_all(cache, obj).items
    return item


def service(name: str = "web", cpu: str = "1", replicas: int = 1, **more: Any) -> Workload:
    made = workload(name, cpu, replicas=replicas, **more)
    return replace(made, spec=replace(made.spec, type="service"))


def declared(made: Workload, number: int = 1, uid: str = "u1") -> Workload:
    return replace(made, metadata=replace(made.metadata, generation=number, uid=uid))


def running(made: Workload, *nodes: str) -> list[AnyObject]:
    """A service as it is after its rollout."""
    declared_ = declared(made)
    name = made.metadata.name
    return [declared_, generation(declared_), *(replica(name, at, "serving", on) for at, on in enumerate(nodes))]


def test_plan_of_new_workload_uses_kernel_and_writes_nothing() -> None:
    cache = CacheFixture(ready("n1", "2"), ready("n2", "2"), tenant("t1"))
    before = dict(cache.board.rows)
    item = plan_one(cache, service(replicas=3))
    assert item.action == "create" and item.problem is None
    assert item.placement is not None
    assert (item.placement.wanted, item.placement.placed, item.placement.waits) == (3, 3, None)
    assert sorted(item.placement.nodes.values()) == [1, 2]
    assert cache.board.rows == before


def test_plan_beyond_capacity_names_reason_and_remedies() -> None:
    item = plan_one(CacheFixture(ready("n1", "2"), tenant("t1")), service(replicas=3))
    assert item.placement is not None and item.placement.waits is not None
    assert (item.placement.wanted, item.placement.placed, item.placement.nodes) == (3, 2, {"n1": 2})
    assert (item.placement.waits.verdict, item.placement.waits.reason) == ("not-now", "no_room")
    assert any(change.kind in ("nodes", "grow") for one in item.placement.waits.unblocks for change in one.changes)


def test_plan_for_request_larger_than_every_node_is_never() -> None:
    item = plan_one(CacheFixture(ready("n1", "2"), tenant("t1")), service(cpu="8"))
    assert item.placement is not None and item.placement.waits is not None
    assert (item.placement.placed, item.placement.waits.verdict) == (0, "never")


def test_plan_respects_quota() -> None:
    item = plan_one(CacheFixture(ready("n1", "8"), tenant("t1", "2")), service(replicas=4))
    assert item.placement is not None and item.placement.waits is not None
    assert (item.placement.placed, item.placement.waits.reason) == (2, "over_quota")


def test_plan_refuses_missing_tenant_or_priority_class() -> None:
    nowhere = plan_one(CacheFixture(ready("n1")), service())
    assert nowhere.action == "refused" and nowhere.problem is not None
    assert (nowhere.problem.code, nowhere.problem.status) == ("not_found", 404)
    assert "tenant t1 does not exist" in nowhere.problem.detail and nowhere.problem.cure
    unranked = plan_one(CacheFixture(ready("n1"), tenant("t1")), service(priority="gold"))
    assert unranked.problem is not None and "priority class gold" in unranked.problem.detail
    assert unranked.placement is None and unranked.diff == ()


def test_plan_uses_objects_of_same_request_in_any_order() -> None:
    cache = CacheFixture(ready("n1", "4"))
    found = plan_all(
        cache,
        service(priority="gold", replicas=2),
        PriorityClass(metadata=Metadata(name="gold"), spec=PriorityClassSpec(value=10)),
        Tenant(metadata=Metadata(name="t1"), spec=TenantSpec(quota=amounts(cpu="8"))),
    )
    assert [item.action for item in found.items] == ["create", "create", "create"]
    assert [item.kind for item in found.items] == ["Workload", "PriorityClass", "Tenant"]
    assert found.items[0].placement is not None and found.items[0].placement.placed == 2


def test_workloads_of_one_plan_share_capacity_by_priority() -> None:
    gold = PriorityClass(metadata=Metadata(name="gold"), spec=PriorityClassSpec(value=10))
    cache = CacheFixture(ready("n1", "3"), tenant("t1"), gold)
    low, high = plan_all(cache, service("low", replicas=2), service("high", replicas=2, priority="gold")).items
    assert low.placement is not None and high.placement is not None
    assert (low.placement.placed, high.placement.placed) == (1, 2)


def test_plan_respects_policy_of_same_request() -> None:
    cache = CacheFixture(ready("n1", "4"), tenant("t1"))
    rule = PolicyRule(allow=PolicyAllow(regions=("elsewhere",)))
    policy = Policy(metadata=Metadata(name="p"), spec=PolicySpec(rules=(rule,)))
    work, ruled = plan_all(cache, service(), policy).items
    assert ruled.action == "create"
    assert work.placement is not None and work.placement.waits is not None
    assert (work.placement.placed, work.placement.waits.reason) == (0, "policy")


def test_unchanged_object_is_reported_unchanged_despite_stored_metadata() -> None:
    made = service(replicas=1)
    item = plan_one(CacheFixture(ready("n1"), tenant("t1"), *running(made, "n1")), made)
    assert (item.action, item.diff, item.placement) == ("unchanged", (), None)


def test_plan_of_scale_up_counts_only_missing_replicas() -> None:
    made = service(replicas=2)
    cache = CacheFixture(ready("n1", "4"), tenant("t1"), *running(made, "n1", "n1"))
    item = plan_one(cache, replace(made, spec=replace(made.spec, replicas=5)))
    assert item.action == "replace"
    assert [(one.path, one.before, one.after) for one in item.diff] == [("spec.replicas", 2, 5)]
    assert item.placement is not None and item.placement.waits is not None
    assert (item.placement.wanted, item.placement.placed, item.placement.ends) == (3, 2, 0)


def test_plan_of_scale_down_counts_stopping_replicas() -> None:
    made = service(replicas=3)
    cache = CacheFixture(ready("n1", "4"), tenant("t1"), *running(made, "n1", "n1", "n1"))
    item = plan_one(cache, replace(made, spec=replace(made.spec, replicas=1)))
    assert item.placement is not None
    assert (item.placement.wanted, item.placement.placed, item.placement.ends) == (0, 0, 2)


def changed(made: Workload, **more: Any) -> Workload:
    return replace(made, spec=replace(made.spec, template=replace(made.spec.template, env={"MODE": "new"}), **more))


def test_plan_of_rollout_reuses_capacity_of_old_replicas() -> None:
    made = service(replicas=3, cpu="1")
    cache = CacheFixture(ready("n1", "4"), tenant("t1"), *running(made, "n1", "n1", "n1"))
    item = plan_one(cache, changed(made))
    assert [(one.path, one.before, one.after) for one in item.diff] == [("spec.template.env.MODE", UNSET, "new")]
    assert item.placement is not None
    assert (item.placement.wanted, item.placement.placed, item.placement.ends) == (3, 3, 3)


def test_plan_of_rollout_without_capacity_for_surge_does_not_start() -> None:
    made = service(replicas=2, cpu="2")
    cache = CacheFixture(ready("n1", "4"), tenant("t1"), *running(made, "n1", "n1"))
    item = plan_one(cache, changed(made, rollout=Rollout(max_surge=1)))
    assert item.placement is not None and item.placement.waits is not None
    assert (item.placement.wanted, item.placement.placed, item.placement.waits.reason) == (2, 0, "no_room")
    assert item.placement.stops["reason"] == "rollout_blocked"
    spared = plan_one(cache, changed(made, rollout=Rollout(max_surge=0, max_unavailable=1)))
    assert spared.placement is not None and (spared.placement.wanted, spared.placement.placed) == (2, 2)


def test_plan_places_gang_whole_or_not_at_all() -> None:
    made = workload("train", "1", replicas=3)
    made = replace(made, spec=replace(made.spec, gang=Gang(min=3)))
    item = plan_one(CacheFixture(ready("n1", "2"), tenant("t1")), made)
    assert item.placement is not None and item.placement.waits is not None
    assert (item.placement.placed, item.placement.waits.reason) == (0, "gang_short")


def test_plan_places_daemon_once_per_node() -> None:
    made = service("watch")
    made = replace(made, spec=replace(made.spec, type="daemon"))
    item = plan_one(CacheFixture(ready("n1", "2"), ready("n2", "2"), tenant("t1")), made)
    assert item.placement is not None and item.placement.nodes == {"n1": 1, "n2": 1}


def test_plan_refuses_object_being_deleted() -> None:
    made = declared(service())
    going = replace(made, metadata=replace(made.metadata, deleting=True, finalizers=("example.org/hold",)))
    item = plan_one(CacheFixture(ready("n1"), tenant("t1"), going), changed(service()))
    assert item.problem is not None and item.problem.code == "deleting"


def test_plan_reports_broken_rule_with_field() -> None:
    made = service()
    wrong = replace(made, spec=replace(made.spec, gang=Gang(min=5)))
    item = plan_one(CacheFixture(ready("n1"), tenant("t1")), wrong)
    assert item.problem is not None and item.problem.code == "invalid" and "gang" in item.problem.detail


def test_plan_of_secret_shows_changed_keys_without_values() -> None:
    before = Secret(
        metadata=Metadata(name="s", tenant="t1", uid="u", generation=1), spec=SecretSpec(data={"a": "old-1", "b": "same"})
    )
    after = Secret(metadata=Metadata(name="s", tenant="t1"), spec=SecretSpec(data={"a": "new-2", "b": "same", "c": "new-3"}))
    seals = SealingKeys([SealingKey.of(bytes(64))])
    item = plan_one(CacheFixture(tenant("t1"), seals.seal_object(before)), seals.seal_object(after))
    assert [(one.path, one.before, one.after) for one in item.diff] == [
        ("spec.data.a", "(hidden)", "(hidden)"),
        ("spec.data.c", UNSET, "(hidden)"),
    ]
    encoded = encode(item)
    assert not any(word in encoded for word in (b"old-1", b"new-2", b"new-3", b"remit:sealed"))
    assert plan_one(CacheFixture(tenant("t1"), seals.seal_object(before)), seals.seal_object(before)).action == "unchanged"
    shown = plan_one(
        CacheFixture(tenant("t1")), Config(metadata=Metadata(name="c", tenant="t1"), spec=DataSpec(data={"a": "x"}))
    )
    assert [(one.path, one.after) for one in shown.diff] == [("spec.data.a", "x")]


def test_plan_counts_released_replicas_as_requeued() -> None:
    made = service(replicas=2)
    declared_ = declared(made)
    over = replica("web", 0, "released", "")
    cache = CacheFixture(ready("n1", "4"), tenant("t1"), declared_, generation(declared_), over)
    item = plan_one(cache, replace(made, spec=replace(made.spec, replicas=3)))
    assert item.placement is not None and (item.placement.wanted, item.placement.placed) == (3, 3)


def test_plan_of_many_replicas_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.serve.objects.dry_run.TRIAL_REPLICAS_MAX", 5)
    item = plan_one(CacheFixture(ready("n1", "64"), tenant("t1", "64")), service(replicas=9))
    assert item.placement is not None and item.placement.capped
    assert (item.placement.wanted, item.placement.placed) == (9, 5)


def test_plan_decodes_with_pending_explanation() -> None:
    found = plan_all(CacheFixture(ready("n1", "2"), tenant("t1")), service(replicas=3))
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
def test_plan_places_as_many_as_scheduler(placement: Placement, replicas: int, nodes: tuple[str, ...], quota: str) -> None:
    objects: tuple[AnyObject, ...] = (*(ready(f"n{number}", cpu) for number, cpu in enumerate(nodes)), tenant("t1", quota))
    made = service("web", replicas=replicas, placement=placement, labels={"app": "x"})
    item = plan_one(CacheFixture(*objects), made)
    assert item.placement is not None
    found = Cluster(*objects).work(made, replicas).scheduled()
    assert item.placement.placed == len(found.bound)
    assert (item.placement.waits is None) == (not found.waits)
    if item.placement.waits is not None:
        assert {reason for reason, _ in found.waits.values()} == {item.placement.waits.reason}


def test_plan_out_of_time_omits_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.serve.objects.dry_run.PLACEMENT_MS_MAX", 0)
    item = plan_one(CacheFixture(ready("n1", "2"), tenant("t1")), service())
    assert (item.action, item.placement) == ("create", None)
