"""Placement claims: bind, reserve (with preemption victims) and gang bind. Pure: reads and writes a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE, add_counts, decode_replica, generation_key, generation_of
from remit.commitment.draft import Draft
from remit.commitment.rulings.peer_scopes import may_have_forgotten_grants, peers_to_confirm
from remit.commitment.rulings.registry import Coordination, refuse, ruling
from remit.law.charges import attempt_key, still_holds
from remit.law.fit import NO_PEERS, DeviceModel, DeviceRequirement, Requirements, cached_static_misfit, free_devices, misfit
from remit.law.fit import devices as fit_devices
from remit.law.ledgers import DEVICE_PREFIX, GrantLedger, NodeLedger
from remit.law.lifecycle import BINDING_TRANSITIONS, SNAPSHOT_AGE_MS_MAX, find_transition
from remit.law.refusals import REFUSALS
from remit.model.claims import Bind, BindGang, Code, Operation, Refused, Reserve, Role
from remit.model.kinds import Device
from remit.model.metadata import Deadline
from remit.model.objects import key_of
from remit.model.records import Phase, Replica, ReplicaStatus
from remit.model.resources import WHOLE_DEVICE, format_quantity

SCHEDULER_ROLES = frozenset({Role.SCHEDULER})
GRANT_DEPTH_MAX = 64


@ruling(Bind, SCHEDULER_ROLES, Coordination.HARD, "one binding per replica, one owner per device, no ledger above its limit")
def bind(draft: Draft, operation: Operation, claim: Bind) -> int | Refused:
    if _bind_fast(draft, operation, claim):
        return 0
    replica = find_replica(draft, claim.replica, claim.at)
    if isinstance(replica, Refused):
        return replica
    requirements = draft.requirements_of(generation_of(replica))
    if requirements is not None and requirements.gang and draft.bound_count(requirements.generation) < requirements.gang:
        return refuse(
            Code.GANG_SHORT,
            f"{claim.replica} belongs to a gang of at least {requirements.gang}, {draft.bound_count(requirements.generation)} "
            "are bound; bind the members in one gang claim",
        )
    placed = place(draft, operation, claim, replica, requirements)
    if isinstance(placed, Refused):
        return placed
    if replica.status.phase is Phase.PENDING and requirements is not None:
        draft.bind(claim.replica, placed, requirements)
    else:
        draft.put_replica(claim.replica, replica, placed)
    return 0


def _bind_fast(draft: Draft, operation: Operation, claim: Bind) -> bool:
    """Fast path of a bind for the common case; return whether it was bound.

    Applies to replicas without devices and placement terms, charged to their tenant's own quota, that are pending or
    reserved on this node and fit. The conditions are those of `place`, and the postings those of any bind, without
    evaluating each rule. Every other case, and every refusal, is left to the rules.
    """
    books, name = draft.books, claim.replica
    row = books.replicas.get(name)
    if row is None or row[0] != claim.at or name in draft.replicas or claim.devices:
        return False
    replica = decode_replica(row[1])
    meta, spec, status = replica.metadata, replica.spec, replica.status
    generation = meta.tenant, spec.workload, spec.generation
    requirements = books.requirements.get(generation) or books.requirements_of(generation)
    ledgers = _fast_path_ledgers(draft, operation, claim, requirements)
    if requirements is None or ledgers is None or status.phase not in BINDING_TRANSITIONS:
        return False
    reserved = status.phase is Phase.RESERVED
    if reserved and (status.grants != requirements.quota or _check_reservation(draft, claim, replica) is not None):
        return False
    # Now that all victims are gone, a reservation has posted its full need, so nothing more is taken.
    free, quota_free = ledgers[0].free, ledgers[1].free
    for resource, count in requirements.resources:
        if free.get(resource, 0) < (0 if reserved else count):
            return False
    for resource, count in requirements.charge.pairs:
        if quota_free.get(resource, 0) < (0 if reserved else count):
            return False
    bound = ReplicaStatus(
        phase=Phase.BOUND,
        attempt=status.attempt,
        failures=status.failures,
        node=claim.node,
        grants=requirements.quota,
        policy=requirements.policy,
    )
    new = Replica(metadata=meta, spec=spec, status=bound)
    if reserved:
        draft.put_same_hold(name, replica, new)
    else:
        draft.bind(name, new, requirements)
    return True


def _fast_path_ledgers(
    draft: Draft, operation: Operation, claim: Bind | Reserve, requirements: Requirements | None
) -> tuple[NodeLedger, GrantLedger] | None:
    """Return the ledgers of node and quota, if their free amounts alone decide the claim; None otherwise."""
    books = draft.books
    if (
        requirements is None
        or not (requirements.resources_only and requirements.placeable)
        or (requirements.fenced and books.awaited_nodes)
    ):
        return None
    if (
        draft.policy is not None
        or books.awaited_peers
        or (draft.changed_workloads and requirements.generation[:2] in draft.changed_workloads)
    ):
        return None
    ledger, quota = draft.node(claim.node), draft.grant(claim.grant)
    if (
        ledger is None
        or quota is None
        or claim.grant != requirements.quota[0]
        or operation.evidence.age_ms > SNAPSHOT_AGE_MS_MAX
    ):
        return None
    facts = ledger.facts
    if (
        not (facts.ready and facts.open)
        or cached_static_misfit(requirements, ledger) is not None
        or draft.anti_affinity_owners(requirements)
    ):
        return None
    return ledger, quota


@ruling(
    Reserve,
    SCHEDULER_ROLES,
    Coordination.HARD,
    "capacity freed by victims belongs to their preemptor; no ledger above its limit",
)
def reserve(draft: Draft, operation: Operation, claim: Reserve) -> int | Refused:
    """Reserve capacity for a replica and drain its victims. Checked as if the victims were gone, posted minus what they still
    hold (see draft.py).
    """
    replica = find_replica(draft, claim.replica, claim.at)
    if isinstance(replica, Refused):
        return replica
    row = find_transition("reserve", replica.status.phase)
    if row is None:
        return refuse(Code.PHASE, f"{claim.replica} is {replica.status.phase}; capacity is reserved only for a pending replica")
    leaving: dict[str, tuple[Replica, Replica]] = {}
    for victim, revision in claim.victims.items():
        checked = _check_victim(draft, claim, replica, victim, revision)
        if isinstance(checked, Refused):
            return checked
        leaving[victim] = checked
    attempts = {victim: attempt_key(after) for victim, (_, after) in leaving.items()}
    if _reserve_fast(draft, operation, claim, replica, leaving, attempts):
        return 0
    gone = {victim: _with_status(after, phase=Phase.RELEASED, devices={}, grants=()) for victim, (_, after) in leaving.items()}
    for victim, (before, _) in leaving.items():
        draft.put_replica(victim, before, gone[victim])
    placed = place(draft, operation, claim, replica, draft.requirements_of(generation_of(replica)))
    if isinstance(placed, Refused):
        for victim, (before, _) in leaving.items():
            draft.retract(victim, gone[victim], before)
        return placed
    for victim, (_, after) in leaving.items():
        draft.put_replica(victim, gone[victim], after)
    draft.put_replica(claim.replica, replica, _with_status(placed, phase=Phase.RESERVED, victims=attempts))
    return 0


def _reserve_fast(
    draft: Draft,
    operation: Operation,
    claim: Reserve,
    replica: Replica,
    leaving: Mapping[str, tuple[Replica, Replica]],
    attempts: dict[str, str],
) -> bool:
    """Fast path of a reservation: the victims' capacity counts as free, and only the sums are compared. Return whether it was
    made.
    """
    requirements = None if claim.devices else draft.requirements_of(generation_of(replica))
    ledgers = _fast_path_ledgers(draft, operation, claim, requirements)
    if requirements is None or ledgers is None:
        return False
    free, quota_free = ledgers[0].free.copy(), ledgers[1].free.copy()
    for before, _ in leaving.values():
        victim_requirements = draft.requirements_of(generation_of(before))
        if victim_requirements is None or before.status.devices:
            return False
        add_counts(free, dict(victim_requirements.resources))
        if claim.grant in before.status.grants:
            add_counts(quota_free, dict(victim_requirements.charge.pairs))
    short_resources = [name for name, count in requirements.resources if free.get(name, 0) < count]
    if short_resources or any(quota_free.get(name, 0) < count for name, count in requirements.charge.pairs):
        return False
    for victim, (before, after) in leaving.items():
        draft.put_same_hold(victim, before, after)
    status = ReplicaStatus(
        phase=Phase.RESERVED,
        attempt=replica.status.attempt,
        failures=replica.status.failures,
        node=claim.node,
        grants=requirements.quota,
        policy=requirements.policy,
        victims=attempts,
    )
    draft.put_replica(claim.replica, replica, Replica(metadata=replica.metadata, spec=replica.spec, status=status))
    return True


@ruling(BindGang, SCHEDULER_ROLES, Coordination.HARD, "one transaction binds at least the gang's minimum, or nothing")
def bind_gang(draft: Draft, operation: Operation, claim: BindGang) -> int | Refused:
    """Bind the members of a gang that fit, and return how many. Refused as a whole if fewer than the minimum fit."""
    fork = draft.fork()
    bound, minimum, generations, last = 0, 0, set(), refuse(Code.GANG_SHORT, "the claim has no members")
    for member in claim.members:
        replica = find_replica(fork, member.replica, member.at)
        if isinstance(replica, Refused):
            last = replica
            continue
        requirements = fork.requirements_of(generation_of(replica))
        if requirements is None or not requirements.gang:
            return refuse(Code.INVALID, f"{member.replica} does not belong to a gang; use a bind claim")
        generations.add(requirements.generation)  # the minimum is counted per generation: see `bind`
        if len(generations) > 1:
            return refuse(
                Code.INVALID,
                f"{member.replica} belongs to another gang or another generation; one claim binds members of one gang",
            )
        minimum = max(minimum, requirements.gang)
        placed = place(fork, operation, member, replica, requirements)
        if isinstance(placed, Refused):
            last = placed
            continue
        fork.put_replica(member.replica, replica, placed)
        bound += 1
    if bound < max(minimum, 1):
        return refuse(
            Code.GANG_SHORT,
            f"{bound} members fit, the gang needs at least {max(minimum, 1)}; last misfit: {last.code}: {last.detail}",
        )
    draft.absorb(fork)
    return bound


def find_replica(draft: Draft, name: str, at: int) -> Replica | Refused:
    entry = draft.replica(name)
    if entry is None:
        return refuse(Code.NOT_FOUND, f"{name} does not exist")
    if entry[1] != at or at < 0:
        return refuse(Code.REVISION, f"{name} was observed at revision {at} and has changed since; read it again")
    return entry[0]


def place(
    draft: Draft, operation: Operation, claim: Bind | Reserve, replica: Replica, requirements: Requirements | None
) -> Replica | Refused:
    """Return the replica as it would be bound. Checks every guard of `bind` and `confirm` in the lifecycle table, in order."""
    status = replica.status
    if status.phase not in BINDING_TRANSITIONS:
        return refuse(Code.PHASE, f"{claim.replica} is {status.phase}; only a pending or reserved replica can be bound")
    if operation.evidence.age_ms > SNAPSHOT_AGE_MS_MAX:
        return refuse(
            Code.STALE_EVIDENCE,
            f"the snapshot is {operation.evidence.age_ms} ms old, the limit is {SNAPSHOT_AGE_MS_MAX} ms; decide again on a "
            "newer one",
        )
    if status.phase is not Phase.RESERVED:
        return _place_pending(draft, operation, claim, replica, requirements)
    refusal = _check_reservation(draft, claim, replica)
    if refusal is not None:
        return refusal
    # Decide as if the reservation were cancelled: the capacity it holds is available to this binding.
    pending_status = ReplicaStatus(phase=Phase.PENDING, attempt=status.attempt, failures=status.failures)
    pending = Replica(metadata=replica.metadata, spec=replica.spec, status=pending_status)
    draft.put_replica(claim.replica, replica, pending)
    placed = _place_pending(draft, operation, claim, pending, requirements, drawn=True)
    draft.retract(claim.replica, pending, replica)
    return placed


def _place_pending(
    draft: Draft,
    operation: Operation,
    claim: Bind | Reserve,
    replica: Replica,
    requirements: Requirements | None,
    *,
    drawn: bool = False,
) -> Replica | Refused:
    ledger = draft.node(claim.node)
    if requirements is None or ledger is None:
        return refuse(
            Code.NOT_FOUND,
            f"node {claim.node} does not exist" if ledger is None else f"{claim.replica} has no stored generation",
        )
    if requirements.fenced and draft.books.awaited_nodes and draft.keys(key_of("Summary", AWAITED_NODE)):
        return refuse(
            Code.AWAITING_REPORTS,
            f"the scope was restored: {claim.replica} must never run twice, and may be running on a node that has not reported "
            "yet",
        )
    if not requirements.placeable:
        return refuse(Code.DELETING, f"workload {replica.spec.workload} is being deleted; no replica of it is placed")
    if requirements.policy_deadline is not None and not _is_before(draft, requirements.policy_deadline):
        return refuse(
            Code.POLICY_LAPSED,
            f"the lease on policy revision {requirements.policy} has expired here; it must be renewed from the scope above",
        )
    code = misfit(requirements, ledger, draft)
    if code is not None:
        return refuse(code, f"{claim.replica} does not fit node {claim.node}: {_misfit_detail(code, requirements, ledger)}")
    if claim.devices or requirements.whole_devices or requirements.device_shares:
        refusal = _check_devices(requirements, ledger, claim.devices)
        if refusal is not None:
            return refusal
    charged = charge(draft, operation, requirements, claim.grant, drawn=drawn)
    if isinstance(charged, Refused):
        return charged
    return Replica(
        metadata=replica.metadata,
        spec=replica.spec,
        status=ReplicaStatus(
            phase=Phase.BOUND,
            attempt=replica.status.attempt,
            failures=replica.status.failures,
            node=claim.node,
            devices=dict(claim.devices) if claim.devices else {},
            grants=charged,
            policy=requirements.policy,
        ),
    )


def _check_reservation(draft: Draft, claim: Bind | Reserve, replica: Replica) -> Refused | None:
    """Refuse a binding that differs from the reservation, or comes before all victims have stopped."""
    status = replica.status
    if (claim.node, claim.devices, claim.grant) != (status.node, status.devices, status.grants[0]):
        return refuse(
            Code.INVALID,
            f"{claim.replica} is reserved on node {status.node}; bind it with the reserved node, devices and grant, or "
            "unreserve it first",
        )
    for victim, attempt in status.victims.items():
        entry = draft.replica(victim)
        if entry is not None and still_holds(entry[0], attempt):
            return refuse(
                Code.VICTIMS, f"victim {victim} of {claim.replica} is still {entry[0].status.phase}; wait until it has stopped"
            )
    return None


def _check_victim(draft: Draft, claim: Reserve, preemptor: Replica, name: str, at: int) -> tuple[Replica, Replica] | Refused:
    victim = find_replica(draft, name, at)
    if isinstance(victim, Refused):
        return victim
    if find_transition("preempt", victim.status.phase) is None or victim.status.node != claim.node:
        return refuse(
            Code.VICTIMS,
            f"victim {name} is {victim.status.phase} on {victim.status.node or 'no node'}; preempting it frees nothing on "
            f"{claim.node}",
        )
    if not _preempts(draft, preemptor):
        return refuse(Code.VICTIMS, f"the priority class of {claim.replica} does not allow preemption")
    if victim.spec.priority >= preemptor.spec.priority:
        return refuse(
            Code.VICTIMS,
            f"victim {name} has priority {victim.spec.priority}, which is not lower than {preemptor.spec.priority} of "
            f"{claim.replica}",
        )
    same_tenant = victim.metadata.tenant == preemptor.metadata.tenant
    preemptor_name = claim.replica if same_tenant else f"a replica of another tenant with priority {preemptor.spec.priority}"
    return victim, _with_status(victim, phase=Phase.DRAINING, reason=f"preempted by {preemptor_name}")


def _preempts(draft: Draft, preemptor: Replica) -> bool:
    generation_row = draft.lookup(generation_key(generation_of(preemptor)))
    name = generation_row[0].spec.spec.priority_class if generation_row is not None else ""
    priority_class = draft.lookup(key_of("PriorityClass", name)) if name else None
    return priority_class is None or bool(priority_class[0].spec.preempts)


def _with_status(replica: Replica, **changes: object) -> Replica:
    return replace(replica, status=replace(replica.status, **changes))


def _check_devices(requirements: Requirements, ledger: NodeLedger, devices: Mapping[str, int]) -> Refused | None:
    """Refuse unless the named devices match the requirements exactly and are free."""
    known = ledger.facts.devices
    if any(name not in known for name in devices):
        return refuse(
            Code.DEVICE_MISMATCH, f"devices: node {ledger.node.metadata.name} does not have all of {', '.join(sorted(devices))}"
        )
    # Treat the named whole devices as the only ones of the node: the requirements must fit on them and use all of them.
    whole = [known[name] for name, amount in devices.items() if amount == WHOLE_DEVICE]
    counts, _ = free_devices(whole, {})
    shares = [(known[name], amount) for name, amount in devices.items() if amount != WHOLE_DEVICE]
    is_exact = len(whole) == sum(request.amount for request in requirements.whole_devices) and len(shares) == len(
        requirements.device_shares
    )
    if (
        not is_exact
        or not fit_devices(requirements, cast(Any, _NamedDevices(counts)), NO_PEERS)
        or not all(_has_share(request, shares) for request in requirements.device_shares)
    ):
        return refuse(
            Code.DEVICE_MISMATCH,
            f"devices: {', '.join(sorted(devices)) or 'none'} of node {ledger.node.metadata.name} do not match what the "
            "workload requires",
        )
    for name, amount in devices.items():
        if ledger.free.get(DEVICE_PREFIX + name, 0) < amount:
            return refuse(
                Code.DEVICE_TAKEN, f"devices: {name} of node {ledger.node.metadata.name} is in use by another replica"
            )
    return None


class _NamedDevices(NamedTuple):
    """The part of a node view that the device rule reads."""

    whole_devices: Mapping[DeviceModel, int]


def _has_share(request: DeviceRequirement, shares: Sequence[tuple[Device, int]]) -> bool:
    return any(
        device.kind == request.kind and amount == request.amount and (not request.models or device.model in request.models)
        for device, amount in shares
    )


def charge(
    draft: Draft, operation: Operation, requirements: Requirements, name: str, *, drawn: bool = False
) -> tuple[str, ...] | Refused:
    """Return all ledgers that a draw on grant `name` is charged to, if each is alive and has enough left; or the refusal.

    With `drawn`, a reservation has drawn the amount before: it stays valid when the grant expires, which ends only new
    draws.
    """
    ledger = draft.grant(name)
    if ledger is None:
        return refuse(Code.NOT_FOUND, f"grant {name} does not exist")
    if ledger.grant is None:
        if name != requirements.quota[0]:
            return refuse(
                Code.NOT_OWNER,
                f"grant: {name} is not the quota of tenant {requirements.tenant}; draw on {requirements.quota[0]} or "
                "on a grant",
            )
        charged = requirements.quota
    else:
        ledgers = _ledgers_for_draw(draft, operation, requirements, ledger)
        if isinstance(ledgers, Refused):
            return ledgers
        charged = ledgers
    for ledger_name in charged:
        charged_ledger = draft.grant(ledger_name)
        if charged_ledger is None:
            return refuse(Code.NOT_FOUND, f"grant {ledger_name} does not exist")
        refusal = check_alive(draft, charged_ledger) if charged_ledger.grant is not None and not drawn else None
        if (
            refusal is None
            and not drawn
            and draft.books.awaited_peers
            and (charged_ledger.grant is None or not charged_ledger.grant.spec.issuer)
        ):
            refusal = may_have_forgotten_grants(draft, peers_to_confirm(draft))
        if refusal is not None:
            return refusal
        shortage = charged_ledger.shortage_for(requirements.charge.pairs)
        if shortage is not None:
            quota = charged_ledger.grant is None or charged_ledger.grant.spec.purpose == "quota"
            need, free = (
                format_quantity(shortage.resource, shortage.need),
                format_quantity(shortage.resource, max(shortage.available, 0)),
            )
            return refuse(
                Code.OVER_QUOTA if quota else Code.GRANT_SHORT,
                f"{ledger_name} has {free} {shortage.resource} free, {need} is needed",
            )
    return charged


def _ledgers_for_draw(
    draft: Draft, operation: Operation, requirements: Requirements, ledger: GrantLedger
) -> tuple[str, ...] | Refused:
    """Return the ledgers that a draw on this grant is charged to, which depends on its purpose."""
    grant = ledger.grant
    if grant is None:
        return (ledger.name,)
    spec = grant.spec
    if ledger.granted_to_other_scope:
        return refuse(Code.NOT_OWNER, f"grant {ledger.name} is held by scope {spec.holder}; only that scope draws on it")
    if not spec.issuer and spec.holder not in (operation.actor.name, operation.actor.lease):
        return refuse(
            Code.NOT_OWNER, f"grant {ledger.name} is held by {spec.holder}; {operation.actor.name} may not draw on it"
        )
    if spec.tenant and spec.tenant != requirements.tenant:
        return refuse(
            Code.NOT_OWNER, f"grant {ledger.name} is for tenant {spec.tenant}; {requirements.tenant} may not draw on it"
        )
    if spec.purpose == "quota":
        return (ledger.name,)
    if spec.purpose == "budget":
        if requirements.tenant not in spec.shares:
            return refuse(
                Code.NOT_OWNER, f"budget {ledger.name} has no share for tenant {requirements.tenant}; add one to spec.shares"
            )
        return (ledger.name, f"{ledger.name}/{requirements.tenant}")
    quota = quota_ledger(draft, requirements.tenant)
    if quota is None:
        return refuse(Code.OVER_QUOTA, f"tenant {requirements.tenant} has no quota in this scope; grant it a quota slice")
    return (ledger.name, quota)


def quota_ledger(draft: Draft, tenant: str) -> str | None:
    """Return the ledger of a tenant's quota: the slice that this scope holds from another scope, else the tenant's own quota.

    In a scope that holds a slice the tenant is also declared, with no quota of its own, so that it can declare workloads.
    """
    for name in draft.keys("grant/"):
        entry = draft.lookup(name)
        if entry is not None and entry[0].spec.issuer and (entry[0].spec.tenant, entry[0].spec.purpose) == (tenant, "quota"):
            return str(entry[0].metadata.name)
    return f"tenant/{tenant}" if draft.grant(f"tenant/{tenant}") is not None else None


def check_alive(draft: Draft, ledger: GrantLedger) -> Refused | None:
    """Refuse draws on a grant that is closed, void or expired, or whose parents are."""
    current: GrantLedger | None = ledger
    for _ in range(GRANT_DEPTH_MAX):
        if current is None:
            return None
        if not current.is_live:
            return refuse(
                Code.GRANT_VOID,
                f"grant {current.name} is {current.grant.status.phase if current.grant else 'gone'}; draw on another grant",
            )
        if not current.is_unexpired(draft.time.now_ms):
            return refuse(Code.GRANT_EXPIRED, f"grant {current.name} has expired; renew it, or draw on another grant")
        current = draft.grant(current.parent) if current.parent else None
    return refuse(Code.GRANT_VOID, f"grant {ledger.name} has more than {GRANT_DEPTH_MAX} levels of parents")


def _is_before(draft: Draft, deadline: Deadline) -> bool:
    return deadline.boot == draft.time.boot and draft.time.now_ms < deadline.at_ms


def _misfit_detail(code: Code, requirements: Requirements, ledger: NodeLedger) -> str:
    match code:
        case Code.NO_ROOM:
            shortages = [
                f"{name}: {format_quantity(name, need)} needed, {format_quantity(name, max(ledger.free.get(name, 0), 0))} free"
                for name, need in requirements.resources
                if ledger.free.get(name, 0) < need
            ]
            return ", ".join(shortages)
        case Code.NODE_UNREADY:
            return f"the node is {ledger.node.status.health}"
        case Code.PLACE | Code.POLICY:
            return f"the node is in region {ledger.region}, zone {ledger.zone}, pool {ledger.pool}"
        case _:
            return REFUSALS[code].meaning
