"""Controllers for repair, endpoints, rollout and garbage collection (hand-made cache)."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from remit.correction.controllers.desired_replicas import DesiredReplicas
from remit.correction.controllers.disruption import PendingEvictions
from remit.correction.controllers.endpoints import EndpointController
from remit.correction.controllers.garbage_collection import GarbageCollector
from remit.correction.controllers.repair import LIMIT_MARGIN_MS, RepairController, retry_backoff_ms
from remit.correction.controllers.rollout import RolloutController
from remit.correction.framework.actions import Action
from remit.law.lifecycle import PHASE_TIMEOUTS
from remit.model.claims import Accepted, Close, Code, Delete, Refused
from remit.model.kinds import (
    Config,
    DataSpec,
    Disruption,
    NodeHealth,
    Override,
    OverrideScope,
    OverrideSpec,
    OverrideStatus,
    Rollout,
    Workload,
)
from remit.model.metadata import Deadline, Metadata, Owner, RecordMetadata
from remit.model.records import Grant, GrantPhase, GrantSpec, GrantStatus, Phase, Replica
from remit.model.resources import Amount, Duration
from tests.unit.correction.controller_fixture import ControllerBench, claim_words, ready, replica, work

KEY = "workload/t1/w"

# -- repair ------------------------------------------------------------------------------------------------------------------


class RepairBench:
    """The repair controller on a cache that it has watched from the beginning."""

    def __init__(self, *objects: Any) -> None:
        self.table = ControllerBench()
        self.repair = RepairController(DesiredReplicas(self.table.board), self.table.clock)
        self.table.board.subscribe(self)
        self.table.write(*objects)

    def on_change(self, key: str, old_replicas: Any, new: Any) -> None:
        self.repair.keys_for(key, old_replicas, new)

    def on_commit(self) -> None:
        pass

    def reconcile(self, at: str = KEY) -> list[str]:
        return claim_words(self.table.reconcile(self.repair, at))

    def requeue_ms(self, at: str = KEY) -> int | None:
        return self.table.requeue_ms(self.repair, at)


def test_failed_replica_is_released_at_once() -> None:
    assert RepairBench(replica("w", 0, "failed", "n1")).reconcile("replica/t1/w-0") == ["release w-0"]


def test_phase_timeout_is_ended_by_its_transition() -> None:
    for phase, transition in (("reserved", "reclaim"), ("bound", "abort"), ("starting", "abort")):
        limit_ms = PHASE_TIMEOUTS[Phase(phase)].limit_ms + LIMIT_MARGIN_MS
        mending = RepairBench(replica("w", 0, phase, "n1"))
        assert mending.reconcile("replica/t1/w-0") == []
        assert mending.requeue_ms("replica/t1/w-0") == limit_ms
        mending.table.clock.at_ms += limit_ms
        assert mending.reconcile("replica/t1/w-0") == [f"{transition} w-0"], phase


def test_phase_timeout_restarts_with_new_attempt() -> None:
    mending = RepairBench(replica("w", 0, "bound", "n1"))
    mending.table.clock.at_ms += 50_000
    mending.table.write(replica("w", 0, "bound", "n1", attempt=2))
    mending.table.clock.at_ms += 50_000
    assert mending.reconcile("replica/t1/w-0") == []


def test_running_and_pending_replicas_have_no_timeout() -> None:
    for phase in ("pending", "running", "ready", "serving", "draining", "stopping", "unknown", "finished"):
        mending = RepairBench(replica("w", 0, phase, "n1"))
        mending.table.clock.at_ms += 10_000_000
        assert mending.reconcile("replica/t1/w-0") == [], phase


def test_moved_replica_requeues_at_once_and_crashed_one_after_backoff() -> None:
    assert RepairBench(*work("w", 1), replica("w", 0, "released")).reconcile() == ["requeue w-0"]
    mending = RepairBench(*work("w", 1), replica("w", 0, "released", failures=3))
    assert mending.reconcile() == []
    assert mending.requeue_ms() == retry_backoff_ms(3) == 4_000
    mending.table.clock.at_ms += 4_000
    assert mending.reconcile() == ["requeue w-0"]


def test_retry_backoff_is_bounded() -> None:
    assert [retry_backoff_ms(n) for n in (0, 1, 2, 3, 7, 1_000)] == [0, 1_000, 2_000, 4_000, 60_000, 60_000]


def test_unwanted_replica_is_not_requeued() -> None:
    declared, first = work("w", 1)
    gone = replace(declared, metadata=replace(declared.metadata, deleting=True))
    assert RepairBench(gone, first, replica("w", 0, "released")).reconcile() == []
    assert RepairBench(*work("w", 0), replica("w", 0, "released")).reconcile() == []
    done = work("w", 1, type_="job")
    assert RepairBench(*done, replica("w", 0, "released", result="ok")).reconcile() == []


def hold_repair(deadline_ms: int) -> Override:
    spec = OverrideSpec(
        effect="hold-repair", scope=OverrideScope(tenants=("t1",)), ttl=Duration(60_000), reason="looking", author="me"
    )
    status = OverrideStatus(deadline=Deadline(boot="b", at_ms=deadline_ms))
    return Override(metadata=Metadata(name="hold"), spec=spec, status=status)


def test_hold_repair_override_stops_repair_until_deadline() -> None:
    mending = RepairBench(*work("w", 1), hold_repair(5_000), replica("w", 0, "failed", "n1"), replica("w", 1, "released"))
    mending.table.authority = ("b", 4_000)
    assert mending.reconcile("replica/t1/w-0") == []
    assert mending.reconcile() == []
    mending.table.authority = ("b", 5_001)
    assert mending.reconcile("replica/t1/w-0") == ["release w-0"]


def grant(at_ms: int | None = 5_000, phase: GrantPhase = GrantPhase.LIVE, **spec: Any) -> Grant:
    deadline = None if at_ms is None else Deadline(boot="b", at_ms=at_ms)
    return Grant(
        metadata=RecordMetadata(name="g"),
        spec=GrantSpec(holder="scheduler", amount=Amount(), ttl=Duration(8_000), **spec),
        status=GrantStatus(phase=phase, deadline=deadline),
    )


def test_expired_grant_is_closed() -> None:
    mending = RepairBench(grant())
    mending.table.authority = ("b", 4_000)
    assert mending.reconcile("grant/g") == []
    assert mending.requeue_ms("grant/g") == 1_000 + LIMIT_MARGIN_MS
    mending.table.authority = ("b", 5_000)
    assert mending.reconcile("grant/g") == ["close"]


def test_unlimited_or_foreign_grant_is_not_closed() -> None:
    other = replace(grant(), spec=replace(grant().spec, holder="scope/eu"))
    for one in (grant(None), other, grant(issuer="scope/global")):
        mending = RepairBench(one)
        mending.table.authority = ("b", 9_000)
        assert mending.reconcile("grant/g") == []


def test_closed_grant_with_draws_is_closed_again_when_one_ends() -> None:
    mending = RepairBench(grant(phase=GrantPhase.CLOSED), *work("w", 1), replica("w", 0, "serving", "n1", grants=("g",)))
    assert mending.reconcile("grant/g") == ["close"]
    mending.repair.on_verdict("grant/g", Action(Close("g")), Accepted(3))
    assert mending.reconcile("grant/g") == []
    was = replica("w", 0, "serving", "n1", grants=("g",))
    assert "grant/g" in mending.repair.keys_for("replica/t1/w-0", was, replica("w", 0, "released"))
    assert mending.reconcile("grant/g") == ["close"]


def test_grant_that_was_not_expired_is_retried_later() -> None:
    mending = RepairBench(grant())
    mending.table.authority = ("another boot", 9_000)
    assert mending.reconcile("grant/g") == ["close"]
    mending.repair.on_verdict("grant/g", Action(Close("g")), Refused(Code.IN_USE, "not yet"))
    assert mending.reconcile("grant/g") == []
    assert mending.requeue_ms("grant/g") == 2_000 + LIMIT_MARGIN_MS


# -- endpoints ---------------------------------------------------------------------------------------------------------------


def endpoint_claims(*objects: Any, at: str = "replica/t1/w-0") -> list[str]:
    table = ControllerBench(*objects)
    return claim_words(table.reconcile(EndpointController(table.board), at))


def test_ready_replica_on_ready_node_is_served() -> None:
    assert endpoint_claims(*work("w"), ready("n1"), replica("w", 0, "ready", "n1")) == ["serve w-0"]
    for phase in ("running", "serving", "draining"):
        assert endpoint_claims(*work("w"), ready("n1"), replica("w", 0, phase, "n1")) == [], phase


def test_replica_of_job_or_on_suspect_node_is_not_served() -> None:
    assert endpoint_claims(*work("w"), ready("n1", NodeHealth.SUSPECT), replica("w", 0, "ready", "n1")) == []
    assert endpoint_claims(*work("w", type_="job"), ready("n1"), replica("w", 0, "ready", "n1")) == []


def test_replica_on_suspect_node_is_unserved_unless_last() -> None:
    here = (*work("w"), ready("n1", NodeHealth.SUSPECT), ready("n2"), replica("w", 0, "serving", "n1"))
    assert endpoint_claims(*here, replica("w", 1, "serving", "n2")) == ["unserve w-0"]
    assert endpoint_claims(*here) == []
    assert endpoint_claims(*here, replica("w", 1, "ready", "n2")) == []


def test_node_health_change_triggers_its_endpoints() -> None:
    table = ControllerBench(*work("w"), ready("n1"), replica("w", 0, "serving", "n1"), replica("w", 1, "starting", "n1"))
    endpoints = EndpointController(table.board)
    assert endpoints.keys_for("node/n1", ready("n1"), ready("n1", NodeHealth.SUSPECT)) == ("replica/t1/w-0",)
    assert endpoints.keys_for("node/n1", ready("n1"), ready("n1", zone="b")) == ()


def test_undo_key_changes_with_its_cause() -> None:
    """Repeated undoing is detected by this key; a node that becomes ready again is a new cause."""
    table = ControllerBench(*work("w"), ready("n1"), replica("w", 0, "ready", "n1"))
    endpoints = EndpointController(table.board)

    def undo_key() -> str:
        (action,) = (result for result in endpoints.reconcile("replica/t1/w-0", table.times()) if isinstance(result, Action))
        return action.undo_key

    first = undo_key()
    assert undo_key() == first != ""
    endpoints.keys_for("node/n1", ready("n1", NodeHealth.SUSPECT), ready("n1"))
    assert undo_key() != first


# -- rollouts ----------------------------------------------------------------------------------------------------------------


def rollout_bench(
    ready_new: int, *old_replicas: Replica, surge: int = 1, unavailable: int = 0, least: int = 0, type_: str = "service"
) -> ControllerBench:
    declared, first = work("w", 3, type_=type_)
    spec = replace(
        declared.spec,
        template=replace(declared.spec.template, command=("new",)),
        rollout=Rollout(max_surge=surge, max_unavailable=unavailable),
        disruption=Disruption(min_available=least),
    )
    new = replace(declared, spec=spec, metadata=replace(declared.metadata, generation=2))
    fresh = [replica("w", 10 + n, "serving", "n1") for n in range(ready_new)]
    fresh = [replace(one, spec=replace(one.spec, generation=2)) for one in fresh]
    return ControllerBench(new, first, ready("n1"), *fresh, *old_replicas)


def rollout_claims(table: ControllerBench) -> list[str]:
    return claim_words(table.reconcile(RolloutController(DesiredReplicas(table.board), PendingEvictions(table.board)), KEY))


def old_replicas(*phases: str) -> list[Replica]:
    return [replica("w", n, phase, "n1") for n, phase in enumerate(phases)]


def test_old_replica_is_retired_when_new_one_is_ready() -> None:
    assert rollout_claims(rollout_bench(0, *old_replicas("serving", "serving", "serving"))) == []
    assert rollout_claims(rollout_bench(1, *old_replicas("serving", "serving", "serving"))) == ["retire w-2"]


def test_idle_old_replicas_are_retired_at_once() -> None:
    assert rollout_claims(rollout_bench(0, *old_replicas("serving", "starting", "bound"))) == ["retire w-2", "retire w-1"]


def test_rollout_respects_max_unavailable_and_min_available() -> None:
    assert rollout_claims(rollout_bench(0, *old_replicas("serving", "serving", "serving"), unavailable=2)) == [
        "retire w-2",
        "retire w-1",
    ]
    assert rollout_claims(rollout_bench(0, *old_replicas("serving", "serving", "serving"), unavailable=2, least=3)) == []


def test_jobs_and_deleted_workloads_are_not_rolled() -> None:
    assert rollout_claims(rollout_bench(3, *old_replicas("running"), type_="job")) == []
    table = rollout_bench(3, *old_replicas("serving"))
    declared: Workload = table.board.get(KEY)
    table.write(replace(declared, metadata=replace(declared.metadata, deleting=True)))
    assert rollout_claims(table) == []


def test_pending_eviction_counts_as_unavailable_in_rollout() -> None:
    table = rollout_bench(1, *old_replicas("serving", "serving", "serving"))
    leaving = PendingEvictions(table.board)
    rollouts = RolloutController(DesiredReplicas(table.board), leaving)
    leaving.add(table.board.rows["replica/t1/w-0"])
    assert claim_words(table.reconcile(rollouts, KEY)) == []
    leaving.on_verdict("replica/t1/w-0", None)
    assert claim_words(table.reconcile(rollouts, KEY)) == ["retire w-2"]


def test_replica_changes_trigger_only_active_rollout() -> None:
    table = rollout_bench(0, *old_replicas("serving"))
    rollouts = RolloutController(DesiredReplicas(table.board), PendingEvictions(table.board))
    (was,), (now,) = old_replicas("ready"), old_replicas("serving")
    assert rollouts.keys_for("replica/t1/w-0", was, now) == ()
    table.reconcile(rollouts, KEY)
    assert rollouts.keys_for("replica/t1/w-0", was, now) == (KEY,)


# -- garbage collection ------------------------------------------------------------------------------------------------------


def owned(*owners: Owner, **meta: Any) -> Config:
    return Config(metadata=Metadata(name="c", tenant="t1", owners=owners, **meta), spec=DataSpec())


def collected(*objects: Any) -> list[str]:
    table = ControllerBench()
    cascade = GarbageCollector(table.board)

    class Watcher:
        def on_change(self, key: str, old_replicas: Any, new: Any) -> None:
            cascade.keys_for(key, old_replicas, new)

        def on_commit(self) -> None:
            pass

    table.board.subscribe(Watcher())
    table.write(*objects)
    return [name for key in cascade.all_keys() for name in claim_words(table.reconcile(cascade, key))]


BY_UID = Owner(kind="Workload", name="w", uid="uid-w")


def test_object_without_owner_is_deleted_by_uid_not_name() -> None:
    """F30: an owner is compared by uid."""
    assert collected(owned(BY_UID)) == ["delete Config c"]
    assert collected(owned(BY_UID), work("w")[0]) == []
    declared = work("w")[0]
    assert collected(owned(BY_UID), replace(declared, metadata=replace(declared.metadata, uid="another"))) == [
        "delete Config c"
    ]


def test_object_with_one_owner_left_is_kept() -> None:
    assert collected(owned(BY_UID, Owner(kind="Workload", name="v")), work("v")[0]) == []


def test_orphan_is_deleted_at_seen_revision() -> None:
    """S16."""
    table = ControllerBench(owned(BY_UID))
    (claim,) = table.reconcile(GarbageCollector(table.board), "config/t1/c")
    assert isinstance(claim, Delete) and claim.expect == 1


def test_marked_object_is_deleted_once_without_finalizers() -> None:
    assert collected(owned(deleting=True)) == ["delete Config c"]
    assert collected(owned(deleting=True, finalizers=("example.com/hold",))) == []
    declared = work("w")[0]
    assert collected(replace(declared, metadata=replace(declared.metadata, deleting=True))) == []


def test_deleted_owner_triggers_its_dependents() -> None:
    table = ControllerBench()
    cascade = GarbageCollector(table.board)
    cascade.keys_for("config/t1/c", None, owned(BY_UID))
    declared = work("w")[0]
    assert cascade.keys_for(KEY, declared, None) == ("config/t1/c",)
    assert cascade.keys_for(KEY, declared, declared) == ()
    cascade.keys_for("config/t1/c", owned(BY_UID), None)
    assert cascade.keys_for(KEY, declared, None) == ()
