"""Bind, reserve (with preemption victims) and gang bind.

Bind, reserve and gang: the claims on scarce room. Pure: it reads and writes a draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE, add, decode_replica, generation_key, generation_of
from remit.commitment.draft import Draft
from remit.commitment.rulings.peer_scopes import forgetful, lenders
from remit.commitment.rulings.registry import Coordination, refuse, ruling
from remit.law.charges import copy_of, held_by
from remit.law.fit import NOBODY, Ask, Devices, Model, devices_left, misfit, static_answer
from remit.law.fit import devices as fit_devices
from remit.law.ledgers import DEVICE, GrantLedger, NodeLedger
from remit.law.lifecycle import PLACED_BY, SNAPSHOT_FRESH_MS, edge
from remit.model.claims import Bind, Code, Ganged, Operation, Refused, Reserve, Role
from remit.model.kinds import Device
from remit.model.metadata import Deadline
from remit.model.objects import key_of
from remit.model.records import Phase, Replica, ReplicaStatus
from remit.model.resources import WHOLE, format_quantity

SCHEDULERS = frozenset({Role.SCHEDULER})
CHAIN_MAX = 64


@ruling(Bind, SCHEDULERS, Coordination.HARD, "one binding per replica, one owner per device, no ledger above its limit")
def bind(draft: Draft, operation: Operation, claim: Bind) -> int | Refused:
    if _plainly(draft, operation, claim):
        return 0
    found = find(draft, claim.replica, claim.at)
    if isinstance(found, Refused):
        return found
    ask = draft.ask(generation_of(found))
    if ask is not None and ask.gang and draft.held(ask.generation) < ask.gang:
        return refuse(Code.GANG_SHORT, f"{claim.replica} is one of a gang of at least {ask.gang}: bind them together")
    placed = place(draft, operation, claim, found, ask)
    if isinstance(placed, Refused):
        return placed
    if found.status.phase is Phase.PENDING and ask is not None:
        draft.bind(claim.replica, placed, ask)
    else:
        draft.put_replica(claim.replica, found, placed)
    return 0


def _plainly(draft: Draft, operation: Operation, claim: Bind) -> bool:
    """Bind it in one go, if it is as most are: without devices or terms, on its tenant's own quota, pending or reserved there,
    and it fits.

    The same conditions as in `place` and the same postings as of any bind, without the way through the rules one by one.
    Whatever is not plain is left to them; so is every refusal.
    """
    books, name = draft.books, claim.replica
    kept = books.replicas.get(name)
    if kept is None or kept[0] != claim.at or name in draft.replicas or claim.devices:
        return False
    replica = decode_replica(kept[1])
    meta, spec, status = replica.metadata, replica.spec, replica.status
    generation = meta.tenant, spec.workload, spec.generation
    ask = books.asks.get(generation) or books.ask(generation)
    ground = _plain_ground(draft, operation, claim, ask)
    if ask is None or ground is None or status.phase not in PLACED_BY:
        return False
    reserved = status.phase is Phase.RESERVED
    if reserved and (status.grants != ask.quota or _misses_reservation(draft, claim, replica) is not None):
        return False
    # What is reserved is posted, now that all of its victims have gone.
    free, left = ground[0].free, ground[1].left
    for resource, count in ask.resources:
        if free.get(resource, 0) < (0 if reserved else count):
            return False
    for resource, count in ask.charge.pairs:
        if left.get(resource, 0) < (0 if reserved else count):
            return False
    bound = ReplicaStatus(
        phase=Phase.BOUND,
        attempt=status.attempt,
        failures=status.failures,
        node=claim.node,
        grants=ask.quota,
        policy=ask.policy,
    )
    new = Replica(metadata=meta, spec=spec, status=bound)
    if reserved:
        draft.settle(name, replica, new)
    else:
        draft.bind(name, new, ask)
    return True


def _plain_ground(
    draft: Draft, operation: Operation, claim: Bind | Reserve, ask: Ask | None
) -> tuple[NodeLedger, GrantLedger] | None:
    """The node and the quota, if it takes no more than a look at what is left of them to decide."""
    books = draft.books
    if ask is None or not (ask.plain and ask.open) or (ask.fenced and books.awaited):
        return None
    if draft.policy is not None or books.peers_awaited or (draft.reshaped and ask.generation[:2] in draft.reshaped):
        return None
    ledger, quota = draft.node(claim.node), draft.grant(claim.grant)
    if ledger is None or quota is None or claim.grant != ask.quota[0] or operation.evidence.age_ms > SNAPSHOT_FRESH_MS:
        return None
    facts = ledger.facts
    if not (facts.ready and facts.open) or static_answer(ask, ledger) is not None or draft.shunners(ask):
        return None
    return ledger, quota


@ruling(Reserve, SCHEDULERS, Coordination.HARD, "room that victims free belongs to their preemptor; no ledger above its limit")
def reserve(draft: Draft, operation: Operation, claim: Reserve) -> int | Refused:
    """Checked as if the victims were gone; posted less what they still hold (see draft.py)."""
    found = find(draft, claim.replica, claim.at)
    if isinstance(found, Refused):
        return found
    row = edge("reserve", found.status.phase)
    if row is None:
        return refuse(Code.PHASE, f"{claim.replica} is {found.status.phase}; only a pending replica is reserved for")
    leaving: dict[str, tuple[Replica, Replica]] = {}
    for victim, at in claim.victims.items():
        ruled = _victim(draft, claim, found, victim, at)
        if isinstance(ruled, Refused):
            return ruled
        leaving[victim] = ruled
    copies = {victim: copy_of(after) for victim, (_, after) in leaving.items()}
    if _plainly_reserved(draft, operation, claim, found, leaving, copies):
        return 0
    gone = {victim: _moved(after, phase=Phase.RELEASED, devices={}, grants=()) for victim, (_, after) in leaving.items()}
    for victim, (before, _) in leaving.items():
        draft.put_replica(victim, before, gone[victim])
    placed = place(draft, operation, claim, found, draft.ask(generation_of(found)))
    if isinstance(placed, Refused):
        for victim, (before, _) in leaving.items():
            draft.retract(victim, gone[victim], before)
        return placed
    for victim, (_, after) in leaving.items():
        draft.put_replica(victim, gone[victim], after)
    draft.put_replica(claim.replica, found, _moved(placed, phase=Phase.RESERVED, victims=copies))
    return 0


def _plainly_reserved(
    draft: Draft,
    operation: Operation,
    claim: Reserve,
    found: Replica,
    leaving: Mapping[str, tuple[Replica, Replica]],
    copies: dict[str, str],
) -> bool:
    """The same for a reservation: what its victims hold is counted as free, and only the sums are looked at."""
    ask = None if claim.devices else draft.ask(generation_of(found))
    ground = _plain_ground(draft, operation, claim, ask)
    if ask is None or ground is None:
        return False
    free, left = ground[0].free.copy(), ground[1].left.copy()
    for before, _ in leaving.values():
        theirs = draft.ask(generation_of(before))
        if theirs is None or before.status.devices:
            return False
        add(free, dict(theirs.resources))
        if claim.grant in before.status.grants:
            add(left, dict(theirs.charge.pairs))
    short = [name for name, count in ask.resources if free.get(name, 0) < count]
    if short or any(left.get(name, 0) < count for name, count in ask.charge.pairs):
        return False
    for victim, (before, after) in leaving.items():
        draft.settle(victim, before, after)
    held = ReplicaStatus(
        phase=Phase.RESERVED,
        attempt=found.status.attempt,
        failures=found.status.failures,
        node=claim.node,
        grants=ask.quota,
        policy=ask.policy,
        victims=copies,
    )
    draft.put_replica(claim.replica, found, Replica(metadata=found.metadata, spec=found.spec, status=held))
    return True


@ruling(Ganged, SCHEDULERS, Coordination.HARD, "one transaction binds at least the gang's minimum, or nothing")
def bind_gang(draft: Draft, operation: Operation, claim: Ganged) -> int | Refused:
    """Members that do not fit are left out; the answer is how many were bound."""
    trial = draft.fork()
    bound, minimum, groups, last = 0, 0, set(), refuse(Code.GANG_SHORT, "no member")
    for member in claim.members:
        found = find(trial, member.replica, member.at)
        if isinstance(found, Refused):
            last = found
            continue
        ask = trial.ask(generation_of(found))
        if ask is None or not ask.gang:
            return refuse(Code.INVALID, f"{member.replica} is not of a gang: bind it alone")
        groups.add(ask.generation)  # its minimum is counted by generation: see `bind`
        if len(groups) > 1:
            return refuse(
                Code.INVALID, f"{member.replica} is of another gang, or another generation of it: one claim binds one gang"
            )
        minimum = max(minimum, ask.gang)
        placed = place(trial, operation, member, found, ask)
        if isinstance(placed, Refused):
            last = placed
            continue
        trial.put_replica(member.replica, found, placed)
        bound += 1
    if bound < max(minimum, 1):
        return refuse(
            Code.GANG_SHORT, f"{bound} of at least {max(minimum, 1)} members fit; the last misfit: {last.code}: {last.detail}"
        )
    draft.absorb(trial)
    return bound


def find(draft: Draft, name: str, at: int) -> Replica | Refused:
    found = draft.replica(name)
    if found is None:
        return refuse(Code.NOT_FOUND, f"there is no {name}")
    if found[1] != at or at < 0:
        return refuse(Code.REVISION, f"{name} was seen at revision {at} and has changed since")
    return found[0]


def place(draft: Draft, operation: Operation, claim: Bind | Reserve, replica: Replica, ask: Ask | None) -> Replica | Refused:
    """The replica as it would be bound; every guard of the lifecycle table's `bind` and `confirm` is here, in its order."""
    status = replica.status
    if status.phase not in PLACED_BY:
        return refuse(Code.PHASE, f"{claim.replica} is {status.phase}; only a pending or reserved replica is bound")
    if operation.evidence.age_ms > SNAPSHOT_FRESH_MS:
        return refuse(
            Code.STALE_EVIDENCE, f"the snapshot is {operation.evidence.age_ms} ms old, {SNAPSHOT_FRESH_MS} is the limit"
        )
    if status.phase is not Phase.RESERVED:
        return _placed(draft, operation, claim, replica, ask)
    wrong = _misses_reservation(draft, claim, replica)
    if wrong is not None:
        return wrong
    # As if the reservation was given up: what it held is there for the binding it was made for.
    waiting = ReplicaStatus(phase=Phase.PENDING, attempt=status.attempt, failures=status.failures)
    pending = Replica(metadata=replica.metadata, spec=replica.spec, status=waiting)
    draft.put_replica(claim.replica, replica, pending)
    placed = _placed(draft, operation, claim, pending, ask, drawn=True)
    draft.retract(claim.replica, pending, replica)
    return placed


def _placed(
    draft: Draft, operation: Operation, claim: Bind | Reserve, replica: Replica, ask: Ask | None, *, drawn: bool = False
) -> Replica | Refused:
    ledger = draft.node(claim.node)
    if ask is None or ledger is None:
        return refuse(
            Code.NOT_FOUND, f"there is no node {claim.node}" if ledger is None else f"{claim.replica} has no generation"
        )
    if ask.fenced and draft.books.awaited and draft.keys(key_of("Summary", AWAITED_NODE)):
        return refuse(Code.AWAITING_REPORTS, f"restored: {claim.replica} may be running on a node that has not reported yet")
    if not ask.open:
        return refuse(Code.DELETING, f"workload {replica.spec.workload} is being deleted")
    if ask.policy_until is not None and not _ahead(draft, ask.policy_until):
        return refuse(Code.POLICY_LAPSED, f"policy revision {ask.policy} is past its lease here")
    code = misfit(ask, ledger, draft)
    if code is not None:
        return refuse(code, f"{claim.replica} does not fit {claim.node}: {_why(code, ask, ledger)}")
    if claim.devices or ask.whole or ask.shares:
        wrong = _check_devices(ask, ledger, claim.devices)
        if wrong is not None:
            return wrong
    charged = charge(draft, operation, ask, claim.grant, drawn=drawn)
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
            policy=ask.policy,
        ),
    )


def _misses_reservation(draft: Draft, claim: Bind | Reserve, replica: Replica) -> Refused | None:
    """Why this is not the binding that the reservation was made for, or not yet."""
    status = replica.status
    if (claim.node, claim.devices, claim.grant) != (status.node, status.devices, status.grants[0]):
        return refuse(Code.INVALID, f"{claim.replica} is reserved on {status.node}; bind it as reserved, or unreserve it first")
    for victim, copy in status.victims.items():
        found = draft.replica(victim)
        if found is not None and held_by(found[0], copy):
            return refuse(Code.VICTIMS, f"{victim} is {found[0].status.phase} and has not gone yet")
    return None


def _victim(draft: Draft, claim: Reserve, preemptor: Replica, name: str, at: int) -> tuple[Replica, Replica] | Refused:
    found = find(draft, name, at)
    if isinstance(found, Refused):
        return found
    if edge("preempt", found.status.phase) is None or found.status.node != claim.node:
        return refuse(
            Code.VICTIMS,
            f"{name} is {found.status.phase} on {found.status.node or 'no node'}; it frees nothing on {claim.node}",
        )
    if not _preempts(draft, preemptor):
        return refuse(Code.VICTIMS, f"the priority class of {claim.replica} preempts nobody")
    if found.spec.priority >= preemptor.spec.priority:
        return refuse(Code.VICTIMS, f"{name} has priority {found.spec.priority}, not below {preemptor.spec.priority}")
    own = found.metadata.tenant == preemptor.metadata.tenant
    by = claim.replica if own else f"work of another tenant, of priority {preemptor.spec.priority}"
    return found, _moved(found, phase=Phase.DRAINING, reason=f"preempted by {by}")


def _preempts(draft: Draft, preemptor: Replica) -> bool:
    shape = draft.thing(generation_key(generation_of(preemptor)))
    name = shape[0].spec.spec.priority_class if shape is not None else ""
    rank = draft.thing(key_of("PriorityClass", name)) if name else None
    return rank is None or bool(rank[0].spec.preempts)


def _moved(replica: Replica, **changes: object) -> Replica:
    return replace(replica, status=replace(replica.status, **changes))


def _check_devices(ask: Ask, ledger: NodeLedger, devices: Mapping[str, int]) -> Refused | None:
    """Do the devices named satisfy the ask exactly, and are they free?"""
    known = ledger.facts.devices
    if any(name not in known for name in devices):
        return refuse(Code.DEVICE_MISMATCH, f"{ledger.node.metadata.name} has no such device: {', '.join(sorted(devices))}")
    # The whole devices named, as if they were all there is: the ask must fit on them, and leave none over.
    whole = [known[name] for name, amount in devices.items() if amount == WHOLE]
    counts, _ = devices_left(whole, {})
    parts = [(known[name], amount) for name, amount in devices.items() if amount != WHOLE]
    exact = len(whole) == sum(one.amount for one in ask.whole) and len(parts) == len(ask.shares)
    if (
        not exact
        or not fit_devices(ask, cast(Any, _Named(counts)), NOBODY)
        or not all(_has_part(one, parts) for one in ask.shares)
    ):
        return refuse(Code.DEVICE_MISMATCH, f"{', '.join(sorted(devices)) or 'no device'}: not what is asked for")
    for name, amount in devices.items():
        if ledger.free.get(DEVICE + name, 0) < amount:
            return refuse(Code.DEVICE_TAKEN, f"device {name} on {ledger.node.metadata.name} is taken")
    return None


class _Named(NamedTuple):
    """As much of a site as the rule about devices asks of it."""

    whole: Mapping[Model, int]


def _has_part(one: Devices, parts: Sequence[tuple[Device, int]]) -> bool:
    return any(
        device.kind == one.kind and amount == one.amount and (not one.models or device.model in one.models)
        for device, amount in parts
    )


def charge(draft: Draft, operation: Operation, ask: Ask, name: str, *, drawn: bool = False) -> tuple[str, ...] | Refused:
    """Every ledger that a draw on grant `name` is charged to, each of them alive and with room for it; or why not.

    What a reservation has `drawn` before the grant ran out stays drawn: only new draws end with it.
    """
    ledger = draft.grant(name)
    if ledger is None:
        return refuse(Code.NOT_FOUND, f"there is no grant {name}")
    if ledger.grant is None:
        if name != ask.quota[0]:
            return refuse(Code.NOT_OWNER, f"{name} is not the quota of tenant {ask.tenant}")
        charged = ask.quota
    else:
        ruled = _drawn(draft, operation, ask, ledger)
        if isinstance(ruled, Refused):
            return ruled
        charged = ruled
    for one in charged:
        own = draft.grant(one)
        if own is None:
            return refuse(Code.NOT_FOUND, f"there is no grant {one}")
        dead = lifeless(draft, own) if own.grant is not None and not drawn else None
        if dead is None and not drawn and draft.books.peers_awaited and (own.grant is None or not own.grant.spec.issuer):
            dead = forgetful(draft, lenders(draft))
        if dead is not None:
            return dead
        short = own.short_of(ask.charge.pairs)
        if short is not None:
            quota = own.grant is None or own.grant.spec.purpose == "quota"
            need, left = format_quantity(short.resource, short.need), format_quantity(short.resource, max(short.left, 0))
            return refuse(
                Code.OVER_QUOTA if quota else Code.GRANT_SHORT, f"{one} has {left} {short.resource} left, {need} is needed"
            )
    return charged


def _drawn(draft: Draft, operation: Operation, ask: Ask, ledger: GrantLedger) -> tuple[str, ...] | Refused:
    """Which ledgers a draw on this grant is charged to, by its purpose."""
    grant = ledger.grant
    if grant is None:
        return (ledger.name,)
    spec = grant.spec
    if ledger.lent_away:
        return refuse(Code.NOT_OWNER, f"{ledger.name} is held by {spec.holder}; only that scope draws on it")
    if not spec.issuer and spec.holder not in (operation.actor.name, operation.actor.lease):
        return refuse(Code.NOT_OWNER, f"{ledger.name} is held by {spec.holder}, not by {operation.actor.name}")
    if spec.tenant and spec.tenant != ask.tenant:
        return refuse(Code.NOT_OWNER, f"{ledger.name} is for tenant {spec.tenant}, not {ask.tenant}")
    if spec.purpose == "quota":
        return (ledger.name,)
    if spec.purpose == "budget":
        if ask.tenant not in spec.shares:
            return refuse(Code.NOT_OWNER, f"budget {ledger.name} has no share for tenant {ask.tenant}")
        return (ledger.name, f"{ledger.name}/{ask.tenant}")
    slice_ = tenant_slice(draft, ask.tenant)
    if slice_ is None:
        return refuse(Code.OVER_QUOTA, f"tenant {ask.tenant} has no quota in this scope")
    return (ledger.name, slice_)


def tenant_slice(draft: Draft, tenant: str) -> str | None:
    """The slice of it that this scope holds from another, else the tenant's own quota: where a slice is held is not its home,
    and the tenant is there with no quota at all, so that it may declare its work.
    """
    for name in draft.keys("grant/"):
        found = draft.thing(name)
        if found is not None and found[0].spec.issuer and (found[0].spec.tenant, found[0].spec.purpose) == (tenant, "quota"):
            return str(found[0].metadata.name)
    return f"tenant/{tenant}" if draft.grant(f"tenant/{tenant}") is not None else None


def lifeless(draft: Draft, ledger: GrantLedger) -> Refused | None:
    """Why nothing may be drawn on this grant any more: it, or one that it was carved out of, is closed or ran out."""
    at: GrantLedger | None = ledger
    for _ in range(CHAIN_MAX):
        if at is None:
            return None
        if not at.live:
            return refuse(Code.GRANT_VOID, f"grant {at.name} is {at.grant.status.phase if at.grant else 'gone'}")
        if not at.alive(draft.moment.now_ms):
            return refuse(Code.GRANT_EXPIRED, f"grant {at.name} ran out")
        at = draft.grant(at.parent) if at.parent else None
    return refuse(Code.GRANT_VOID, f"grant {ledger.name} is handed down over more than {CHAIN_MAX} steps")


def _ahead(draft: Draft, deadline: Deadline) -> bool:
    return deadline.boot == draft.moment.boot and draft.moment.now_ms < deadline.at_ms


def _why(code: Code, ask: Ask, ledger: NodeLedger) -> str:
    match code:
        case Code.NO_ROOM:
            short = [
                f"{name} {format_quantity(name, need)} asked, {format_quantity(name, max(ledger.free.get(name, 0), 0))} left"
                for name, need in ask.resources
                if ledger.free.get(name, 0) < need
            ]
            return ", ".join(short)
        case Code.NODE_UNREADY:
            return f"it is {ledger.node.status.health}"
        case Code.PLACE | Code.POLICY:
            return f"region {ledger.region}, zone {ledger.zone}, pool {ledger.pool}"
        case _:
            return code.value
