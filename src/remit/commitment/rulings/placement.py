"""Placement claims: bind, reserve (with preemption victims) and gang bind. Pure: reads and writes a draft."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE
from remit.commitment.draft import Draft
from remit.commitment.generations import generation_key, generation_of
from remit.commitment.rulings.peer_scopes import may_have_forgotten_grants, peers_to_confirm
from remit.commitment.rulings.registry import Coordination, refuse, ruling
from remit.law.charges import attempt_key, node_charge, still_holds
from remit.law.fit import NO_PEERS, DeviceModel, DeviceRequirement, Requirements, free_devices, misfit
from remit.law.fit import devices as fit_devices
from remit.law.ledgers import DEVICE_PREFIX, GrantLedger, NodeLedger
from remit.law.lifecycle import BINDING_TRANSITIONS, SNAPSHOT_AGE_MS_MAX, find_transition
from remit.law.refusals import REFUSALS
from remit.model.claims import Bind, BindGang, Code, Operation, Refused, Reserve
from remit.model.kinds import Device
from remit.model.metadata import Deadline
from remit.model.objects import key_of
from remit.model.records import Phase, Replica, ReplicaStatus
from remit.model.resources import WHOLE_DEVICE, format_quantity
from remit.model.roles import Role

SCHEDULER_ROLES = frozenset({Role.SCHEDULER})
GRANT_DEPTH_MAX = 64


@ruling(Bind, SCHEDULER_ROLES, Coordination.HARD, "one binding per replica, one owner per device, no ledger above its limit")
def bind(draft: Draft, operation: Operation, claim: Bind) -> int | Refused:
    replica = find_replica(draft, claim.replica, claim.at)
    if isinstance(replica, Refused):
        return replica
    requirements = draft.requirements.of(generation_of(replica))
    if requirements is not None:
        if replica.status.phase is Phase.PENDING and fits_plainly(draft, operation, claim, requirements, ()):
            draft.replicas.bind(claim.replica, _bound(replica, claim, requirements, requirements.quota), requirements)
            return 0
        if (
            replica.status.phase is Phase.RESERVED
            and replica.status.grants == requirements.quota
            and _check_reservation(draft, claim, replica) is None
            and fits_plainly(draft, operation, claim, requirements, (replica,))
        ):
            draft.replicas.put(claim.replica, replica, _bound(replica, claim, requirements, requirements.quota))
            return 0
    bound = draft.replicas.bound_count(requirements.generation) if requirements is not None and requirements.gang else 0
    if requirements is not None and bound < requirements.gang:
        return refuse(
            Code.GANG_SHORT,
            f"{claim.replica} belongs to a gang of at least {requirements.gang}, {bound} are bound; bind the members in one "
            "gang claim",
        )
    placed = place(draft, operation, claim, replica, requirements)
    if isinstance(placed, Refused):
        return placed
    if replica.status.phase is Phase.PENDING and requirements is not None:
        draft.replicas.bind(claim.replica, placed, requirements)
    else:
        draft.replicas.put(claim.replica, replica, placed)
    return 0


def fits_plainly(
    draft: Draft, operation: Operation, claim: Bind | Reserve, requirements: Requirements, leaving: Collection[Replica]
) -> bool:
    """Decide the common case by the same predicates as `place`, in fewer steps. Return whether the replica fits on the claimed
    node once the replicas in `leaving` have released their capacity there.

    The common case is a replica without devices and placement terms that is charged to its tenant's own quota. In every
    other case the result is False, and `place` decides.
    """
    books, changes = draft.books, draft.changes
    if (
        not (requirements.resources_only and requirements.placeable)
        or claim.devices
        or claim.grant != requirements.quota[0]
        or operation.evidence.age_ms > SNAPSHOT_AGE_MS_MAX
        or books.awaited_peers
        or (requirements.fenced and books.awaited_nodes)
    ):
        return False
    if changes.policy is not None or requirements.generation[:2] in changes.changed_workloads:
        return False
    ledger, quota = draft.ledgers.node(claim.node), draft.ledgers.grant(claim.grant)
    if ledger is None or quota is None:
        return False
    if leaving:
        ledger, quota = ledger.copy(), quota.copy()
        for replica in leaving:
            held = draft.requirements.of(generation_of(replica))
            if held is None:
                return False
            ledger.post(node_charge(held, replica.status.devices), -1)
            if claim.grant in replica.status.grants:
                quota.draw(held.charge.pairs, -1)
    return misfit(requirements, ledger, draft.peers) is None and quota.shortage_for(requirements.charge.pairs) is None


def _bound(replica: Replica, claim: Bind | Reserve, requirements: Requirements, charged: tuple[str, ...]) -> Replica:
    """Return the replica as it is once it is bound."""
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


@ruling(
    Reserve,
    SCHEDULER_ROLES,
    Coordination.HARD,
    "capacity freed by victims belongs to their preemptor; no ledger above its limit",
)
def reserve(draft: Draft, operation: Operation, claim: Reserve) -> int | Refused:
    """Reserve capacity for a replica and drain its victims. Checked as if the victims were gone, posted minus what they still
    hold (see draft_replicas.py).
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
    requirements = draft.requirements.of(generation_of(replica))
    placed = _place_without(draft, operation, claim, replica, requirements, {name: row[0] for name, row in leaving.items()})
    if isinstance(placed, Refused):
        return placed
    for victim, (before, after) in leaving.items():
        draft.replicas.put(victim, before, after)
    attempts = {victim: attempt_key(after) for victim, (_, after) in leaving.items()}
    draft.replicas.put(claim.replica, replica, _with_status(placed, phase=Phase.RESERVED, victims=attempts))
    return 0


def _place_without(
    draft: Draft,
    operation: Operation,
    claim: Reserve,
    replica: Replica,
    requirements: Requirements | None,
    victims: Mapping[str, Replica],
) -> Replica | Refused:
    """Return the replica as it would be bound if the victims held nothing any more."""
    if requirements is not None and fits_plainly(draft, operation, claim, requirements, victims.values()):
        return _bound(replica, claim, requirements, requirements.quota)
    for victim, before in victims.items():
        draft.replicas.withdraw(victim, before)
    placed = place(draft, operation, claim, replica, requirements)
    for victim, before in victims.items():
        draft.replicas.restore(victim, before)
    return placed


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
        requirements = fork.requirements.of(generation_of(replica))
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
        fork.replicas.put(member.replica, replica, placed)
        bound += 1
    if bound < max(minimum, 1):
        return refuse(
            Code.GANG_SHORT,
            f"{bound} members fit, the gang needs at least {max(minimum, 1)}; last misfit: {last.code}: {last.detail}",
        )
    draft.absorb(fork)
    return bound


def find_replica(draft: Draft, name: str, at: int) -> Replica | Refused:
    entry = draft.replicas.get(name)
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
    draft.replicas.withdraw(claim.replica, replica)
    placed = _place_pending(draft, operation, claim, replica, requirements, drawn=True)
    draft.replicas.restore(claim.replica, replica)
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
    ledger = draft.ledgers.node(claim.node)
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
    code = misfit(requirements, ledger, draft.peers)
    if code is not None:
        return refuse(code, f"{claim.replica} does not fit node {claim.node}: {_misfit_detail(code, requirements, ledger)}")
    if claim.devices or requirements.whole_devices or requirements.device_shares:
        refusal = _check_devices(requirements, ledger, claim.devices)
        if refusal is not None:
            return refusal
    charged = charge(draft, operation, requirements, claim.grant, drawn=drawn)
    if isinstance(charged, Refused):
        return charged
    return _bound(replica, claim, requirements, charged)


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
        entry = draft.replicas.get(victim)
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
    whole_devices = [known[name] for name, amount in devices.items() if amount == WHOLE_DEVICE]
    counts, _ = free_devices(whole_devices, {})
    shares = [(known[name], amount) for name, amount in devices.items() if amount != WHOLE_DEVICE]
    is_exact = len(whole_devices) == sum(request.amount for request in requirements.whole_devices) and len(shares) == len(
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
    ledger = draft.ledgers.grant(name)
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
        charged_ledger = draft.ledgers.grant(ledger_name)
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
    return f"tenant/{tenant}" if draft.ledgers.grant(f"tenant/{tenant}") is not None else None


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
        current = draft.ledgers.grant(current.parent) if current.parent else None
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
