"""Planted bugs of capacity, devices, quota, gangs, constraints and transitions."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
from msgspec.structs import replace

from remit.commitment import draft, draft_replicas
from remit.commitment.draft import Draft
from remit.commitment.draft_replicas import DraftReplicas
from remit.commitment.generations import DraftRequirements, generation_key
from remit.commitment.rulings import declarations, placement, transitions, workloads
from remit.correction.controllers import repair
from remit.correction.controllers.repair import RepairController
from remit.correction.controllers.workloads import WorkloadController
from remit.correction.framework.actions import Action, ControllerPermissions, ReconcileResult
from remit.correction.framework.loop import ReconcileTime
from remit.law import charges
from remit.law.admission import UNRESTRICTED, Admission
from remit.law.fit import misfits
from remit.law.ledgers import GrantLedger, NodeLedger
from remit.law.lifecycle import HOLDING_PHASES, OWNERS
from remit.law.workload_rules import initial_replicas
from remit.model.claims import Apply, Code, Delete, Move, Operation, Refused, Reserve
from remit.model.kinds import Workload
from remit.model.records import Phase, Replica, ReplicaStatus
from remit.observation.holds import Holds, Reservations
from remit.observation.node_columns import NodeColumns
from remit.observation.replica_table import RESERVED
from remit.observation.watch_cache import CachedRow
from remit.proposal import attempts
from tests.planted.planted_bug import bug, overrule

CAPACITY_CHECKS = ("node_usage_never_rises_above_capacity", "ledger_charges_never_rise_above_amount")
CONSTRAINT_CHECKS = ("hard_constraints_hold_at_bind",)


@bug(38, scenario="contest", expects=CAPACITY_CHECKS)
def released_capacity_is_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """Released capacity is added to its node twice."""
    original_post = NodeLedger.post

    def buggy_post(self: NodeLedger, pairs: Any, sign: int) -> None:
        original_post(self, pairs, sign)
        if sign < 0:
            for name, count in pairs:
                self.free[name] += count

    patch.setattr(NodeLedger, "post", buggy_post)


@bug(27, scenario="contest", seed=2, expects=("ledger_charges_never_rise_above_amount", "tenant_usage_stays_within_quota"))
def released_quota_is_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """Released quota is added to its tenant twice."""
    draw = GrantLedger.draw
    patch.setattr(GrantLedger, "draw", lambda self, pairs, sign: draw(self, pairs, sign if sign > 0 else 2 * sign))


@bug(38, scenario="contest", seed=4, expects=("reservations_are_committed_once_or_released", *CAPACITY_CHECKS))
def capacity_is_freed_at_the_drain(patch: pytest.MonkeyPatch) -> None:
    """A draining or stopping replica holds no capacity."""
    early = HOLDING_PHASES - {Phase.DRAINING, Phase.STOPPING}
    patch.setattr(draft_replicas, "HOLDING_PHASES", early)
    patch.setattr(charges, "HOLDING_PHASES", early)


@bug(24, 38, scenario="contest", expects=("reservations_are_committed_once_or_released", *CAPACITY_CHECKS))
def bound_before_the_victims_stopped(patch: pytest.MonkeyPatch) -> None:
    """A reservation is bound as soon as its victims are evicted."""
    patch.setattr(placement, "_check_reservation", lambda draft, claim, replica: None)
    original_post = Holds.post

    def buggy_post(self: Holds, slot: int, row: int, grants: tuple[str, ...]) -> None:
        original_post(self, slot, row, grants)
        if self._replicas.at.phase[slot] == RESERVED:
            self._changes.ready[slot] = None

    patch.setattr(Holds, "post", buggy_post)
    patch.setattr(Reservations, "victims_gone", lambda self, slot: True)


@bug(25, scenario="contest", expects=("gangs_are_bound_together",))
def a_gang_is_bound_in_two_transactions(patch: pytest.MonkeyPatch) -> None:
    """The members of a gang are claimed and bound one by one."""
    patch.setattr(attempts, "gang_minimum", lambda view, key: 0)
    patch.setattr(DraftReplicas, "bound_count", lambda self, generation: 1_000)


@bug(25, scenario="contest", expects=("gangs_are_bound_together",))
def a_gang_is_bound_below_its_minimum(patch: pytest.MonkeyPatch) -> None:
    """As many members of a gang are bound as fit, below its minimum too."""
    original_of = DraftRequirements.of

    def buggy_of(self: DraftRequirements, generation: Any) -> Any:
        found = original_of(self, generation)
        return found._replace(gang=1) if found is not None and found.gang else found

    patch.setattr(DraftRequirements, "of", buggy_of)
    patch.setattr(attempts, "gang_minimum", lambda view, key: 1 if key.gang else 0)


@bug(2, scenario="contest", seed=2, expects=("exclusive_device_has_one_owner", *CAPACITY_CHECKS))
def a_device_has_two_owners(patch: pytest.MonkeyPatch) -> None:
    """Devices are not charged to their node, and the scheduler does not check them either."""
    for module in (draft_replicas, charges):
        patch.setattr(module, "node_charge", lambda ask, devices: ask.resources)
    post = NodeColumns.post
    patch.setattr(NodeColumns, "post", lambda self, row, pairs, devices=(), sign=1: post(self, row, pairs, {}, sign))


@bug(27, scenario="crowd", expects=("ledger_charges_never_rise_above_amount", "tenant_usage_stays_within_quota"))
def quota_is_not_checked_in_the_transaction(patch: pytest.MonkeyPatch) -> None:
    """A draw is charged whatever quota is left."""
    patch.setattr(GrantLedger, "shortage_for", lambda self, pairs: None)
    patch.setattr(placement, "fits_plainly", lambda *args: False)


def _ignoring(patch: pytest.MonkeyPatch, *codes: Code) -> None:
    def buggy_misfit(*args: Any) -> Code | None:
        return next((code for code in misfits(*args) if code not in codes), None)

    patch.setattr(placement, "misfit", buggy_misfit)
    patch.setattr(placement, "fits_plainly", lambda *args: False)


@bug(26, scenario="six-nodes", expects=CONSTRAINT_CHECKS)
def spread_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """The authority does not check topology spread."""
    _ignoring(patch, Code.SPREAD)


@bug(26, scenario="one-node", expects=CONSTRAINT_CHECKS)
def anti_affinity_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """The authority does not check anti-affinity."""
    _ignoring(patch, Code.ANTI_AFFINITY)


@bug(26, scenario="crowd", expects=CONSTRAINT_CHECKS)
def policy_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """The authority does not check the policy in force for placement."""
    _ignoring(patch, Code.POLICY)


@bug(3, 26, scenario="contest", expects=CAPACITY_CHECKS)
def capacity_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    """The authority does not check capacity, and the scheduler's columns do not charge it either."""
    _ignoring(patch, Code.NO_ROOM)
    original_post = NodeColumns.post

    def buggy_post(self: NodeColumns, row: int, pairs: Any, devices: Any = MappingProxyType({}), sign: int = 1) -> None:
        original_post(self, row, (), devices, sign)

    patch.setattr(NodeColumns, "post", buggy_post)


@bug(34, scenario="meddlers", expects=CONSTRAINT_CHECKS)
def a_node_need_not_be_ready(patch: pytest.MonkeyPatch) -> None:
    """The authority binds to suspect, unknown and cordoned nodes."""
    _ignoring(patch, Code.NODE_UNREADY, Code.DRAINING)


@bug(29, scenario="meddlers", expects=("replicas_stay_within_desired_and_surge",))
def replica_count_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    """The authority does not count the replicas of a workload."""
    patch.setattr(transitions, "_replicas_max", lambda spec: 1_000)


@bug(29, scenario="services", expects=("initial_replicas_match_workload_spec",))
def one_surplus_initial_replica(patch: pytest.MonkeyPatch) -> None:
    """A workload is created with one initial replica too many; its surge would permit it."""
    patch.setattr(workloads, "initial_replicas", lambda spec: initial_replicas(spec) + (spec.type == "service"))


@bug(29, scenario="services", expects=("phase_changes_match_lifecycle_table", "replicas_stay_within_desired_and_surge"))
def changed_workloads_get_initial_replicas(patch: pytest.MonkeyPatch) -> None:
    """Not only a new workload gets initial replicas, but every changed one."""
    original_apply = declarations.apply

    def buggy_apply(draft: Draft, operation: Operation, claim: Apply) -> int | Refused:
        ruled = original_apply(draft, operation, claim)
        if isinstance(claim.thing, Workload) and claim.fill and not isinstance(ruled, Refused) and ruled > 1:
            meta, spec = claim.thing.metadata, claim.thing.spec
            found = draft.lookup(generation_key((meta.tenant, meta.name, ruled)))
            if found is not None:
                first = draft.replicas.active_count(meta.tenant, meta.name)
                transitions.create_replicas(draft, found[0], range(first, first + initial_replicas(spec)))
        return ruled

    overrule(patch, Apply, buggy_apply)


# ----------------------------------------------------------------------------------------------------------- transitions


@bug(33, scenario="crowd", expects=("phase_changes_match_lifecycle_table",))
def a_transition_is_made_by_another_role(patch: pytest.MonkeyPatch) -> None:
    """Repair settles finished replicas, which it does not own, and is permitted."""
    original_move, original_repair_replica = transitions.move, RepairController._repair_replica

    def buggy_move(draft: Draft, operation: Operation, claim: Move) -> int | Refused:
        role = OWNERS.get(claim.transition, operation.actor.role)
        return original_move(draft, replace(operation, actor=replace(operation.actor, role=role)), claim)

    def buggy_repair_replica(self: RepairController, kept: CachedRow, times: ReconcileTime) -> Iterator[ReconcileResult]:
        if kept.obj.status.phase is Phase.FINISHED:
            yield Action(Move(kept.key, kept.revision, "settle"))
        else:
            yield from original_repair_replica(self, kept, times)

    overrule(patch, Move, buggy_move)
    patch.setattr(RepairController, "_repair_replica", buggy_repair_replica)
    patch.setattr(ControllerPermissions, "violation_of", lambda self, claim: "")
    patch.setattr(repair, "_REPAIRED_PHASES", (*repair._REPAIRED_PHASES, Phase.FINISHED))


@bug(33, scenario="crowd", expects=("attempts_have_one_result",))
def a_result_is_written_twice(patch: pytest.MonkeyPatch) -> None:
    """A release overwrites the result of the attempt."""
    original_status_after = transitions._status_after

    def buggy_status_after(status: ReplicaStatus, row: Any, claim: Move) -> ReplicaStatus:
        done = original_status_after(status, row, claim)
        return replace(done, result=f"{status.result}, released") if row.target is Phase.RELEASED and status.result else done

    patch.setattr(transitions, "_status_after", buggy_status_after)


@bug(37, scenario="crowd", expects=("attempts_have_one_result", "new_attempt_follows_release_of_previous"))
def an_attempt_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A requeued replica keeps the number of its failed attempt."""
    original_status_after = transitions._status_after

    def buggy_status_after(status: ReplicaStatus, row: Any, claim: Move) -> ReplicaStatus:
        done = original_status_after(status, row, claim)
        return replace(done, attempt=status.attempt) if row.name == "requeue" else done

    patch.setattr(transitions, "_status_after", buggy_status_after)


@bug(2, 3, 37, scenario="two-schedulers", expects=("one_binding_per_attempt", "phase_changes_match_lifecycle_table"))
def a_bound_replica_is_bound_again(patch: pytest.MonkeyPatch) -> None:
    """A claim on a replica that was bound since moves it to another node."""
    original_find_replica, original_place = placement.find_replica, placement.place

    def buggy_find_replica(draft: Draft, name: str, at: int) -> Replica | Refused:
        found = draft.replicas.get(name)
        return original_find_replica(draft, name, at) if found is None or found[1] < 0 else found[0]

    def buggy_place(draft: Draft, operation: Operation, claim: Any, replica: Replica, ask: Any) -> Replica | Refused:
        if replica.status.phase in (Phase.BOUND, Phase.STARTING, Phase.RUNNING):
            replica = replace(replica, status=ReplicaStatus(phase=Phase.PENDING, attempt=replica.status.attempt))
        return original_place(draft, operation, claim, replica, ask)

    patch.setattr(placement, "find_replica", buggy_find_replica)
    patch.setattr(placement, "place", buggy_place)
    patch.setattr(placement, "fits_plainly", lambda *args: False)


@bug(30, scenario="crowd", expects=("objects_in_use_are_not_removed",))
def a_workload_is_removed_before_its_replicas(patch: pytest.MonkeyPatch) -> None:
    """A workload is deleted although it still has replicas."""

    def buggy_end_workload(
        self: WorkloadController, tenant: str, name: str, workload: Workload | None
    ) -> Iterator[ReconcileResult]:
        return iter(() if workload is None else (Action(Delete("Workload", name, tenant)),))

    patch.setattr(DraftReplicas, "count", lambda self, generation: 0)
    patch.setattr(WorkloadController, "_end_workload", buggy_end_workload)


# -------------------------------------------------------------------------------------------------------------- preemption


@bug(23, scenario="meddlers", seed=4, expects=("victims_have_lower_priority",))
def equal_priority_is_preempted(patch: pytest.MonkeyPatch) -> None:
    """Preemption does not compare priorities."""
    original_check_victim = placement._check_victim

    def buggy_check_victim(
        held: Draft, claim: Reserve, preemptor: Replica, name: str, at: int
    ) -> tuple[Replica, Replica] | Refused:
        return original_check_victim(held, claim, replace(preemptor, spec=replace(preemptor.spec, priority=1 << 30)), name, at)

    patch.setattr(placement, "_check_victim", buggy_check_victim)


@bug(24, scenario="deleted-unseen", seed=6, expects=("deleting_workloads_are_not_placed",))
def replicas_of_a_deleted_workload_are_placed(patch: pytest.MonkeyPatch) -> None:
    """Placement does not check whether the workload is being deleted."""
    original_place = placement.place

    def buggy_place(held: Draft, operation: Operation, claim: Any, replica: Replica, ask: Any) -> Replica | Refused:
        return original_place(held, operation, claim, replica, None if ask is None else ask._replace(placeable=True))

    patch.setattr(placement, "place", buggy_place)


# ---------------------------------------------------------------------------------------------------------------- evidence


@bug(33, 37, scenario="meddlers", expects=("cited_evidence_was_true",))
def attempts_are_not_distinguished(patch: pytest.MonkeyPatch) -> None:
    """A report about one attempt is taken for one about another."""
    patch.setitem(transitions.GUARD_CHECKS, "attempt", lambda *args: None)


@bug(4, 21, scenario="meddlers", seed=5, expects=("accepted_evidence_was_fresh",))
def evidence_age_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    """The age of a scheduler's evidence is not checked."""
    patch.setattr(placement, "SNAPSHOT_AGE_MS_MAX", 1 << 40)


# ------------------------------------------------------------------------------------------------------- ownership


@bug(27, scenario="meddlers", seed=4, expects=("charges_are_on_own_tenant_and_grants",))
def a_tenant_is_charged_to_another_quota(patch: pytest.MonkeyPatch) -> None:
    """A draw may be charged to any tenant's quota."""
    original_charge = placement.charge

    def buggy_charge(held: Draft, operation: Operation, ask: Any, name: str, **more: Any) -> tuple[str, ...] | Refused:
        ledger = held.ledgers.grant(name)
        own = ask._replace(quota=(name,)) if ledger is not None and ledger.grant is None else ask
        return original_charge(held, operation, own, name, **more)

    patch.setattr(placement, "charge", buggy_charge)


@bug(27, scenario="meddlers", seed=3, expects=("charges_are_on_own_tenant_and_grants",))
def a_scheduler_charges_a_grant_of_another(patch: pytest.MonkeyPatch) -> None:
    """The holder of a grant is not checked at a draw."""

    def buggy_ledgers_for_draw(held: Draft, operation: Operation, ask: Any, ledger: GrantLedger) -> tuple[str, ...] | Refused:
        if ledger.grant is not None and not ledger.granted_to_other_scope and not ledger.grant.spec.issuer:
            operation = replace(operation, actor=replace(operation.actor, name=ledger.grant.spec.holder))
        return original_ledgers_for_draw(held, operation, ask, ledger)

    original_ledgers_for_draw = placement._ledgers_for_draw
    patch.setattr(placement, "_ledgers_for_draw", buggy_ledgers_for_draw)


@bug(33, scenario="errands", expects=("only_retryable_replicas_are_requeued",))
def retries_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A requeue checks neither the number of failures of a job nor its completion."""
    left = transitions.GUARD_CHECKS["attempts_left"]

    def buggy_attempts_left(held: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
        again = replace(replica, status=replace(replica.status, attempt=1, result="failed"))
        refused: Refused | None = left(held, operation, claim, again)
        return refused

    patch.setitem(transitions.GUARD_CHECKS, "attempts_left", buggy_attempts_left)


@bug(25, scenario="meddlers", expects=("gangs_are_bound_together",))
def draining_members_count_for_the_gang(patch: pytest.MonkeyPatch) -> None:
    """All members that hold capacity count for the gang, draining ones too."""
    patch.setattr(draft_replicas, "NOT_WORKING_PHASES", frozenset({Phase.RESERVED}))


@bug(26, scenario="admitted", expects=("replica_priorities_stay_within_policy",))
def priority_limits_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """The policies in force do not limit priorities."""
    patch.setattr(Admission, "terms", lambda self, tenant, workload, labels: UNRESTRICTED)


@bug(27, scenario="admitted", expects=("tenant_objects_stay_within_limits",))
def tenant_usage_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    """The books do not count what a tenant has declared."""
    patch.setattr(draft, "post_charge_difference", lambda use, before, after: None)
