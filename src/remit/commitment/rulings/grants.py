"""Grants: issue, accept, renew, yield, close, credit, declare lost.

Grants, on both sides of a scope's border. Pure.

A grant is carved out of a parent: another grant here, or a tenant's quota. If its holder is of this scope (a framework, a
shard, a node), every draw on it passes this authority, so what is used is known here, and closing it returns the rest at
once. If its holder is another scope, that scope's own authority keeps the books of it, under the same name. Then amounts
cross the border by one rule, *debit before credit*:

    issue    here: the parent is debited        then  accept  there: the holder may draw
    yield    there: the holder is debited       then  credit  here: the parent gets it back

What is in flight belongs to nobody. Until the holder reports, it counts as having used everything: silence, expiry and a
restore never give anything back. Only the holder's own report does, or an operator who declares it lost. Whose letters count
after a restore of either side is in recognising.py.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings.leases import restored
from remit.commitment.rulings.peer_scopes import (
    PEER,
    awaited_peers,
    forgetful,
    lenders,
    misaddressed,
    note,
    on_record,
    parted,
)
from remit.commitment.rulings.placement import lifeless
from remit.commitment.rulings.registry import BUDGETEERS, Coordination, refuse, ruling
from remit.law.ledgers import SCOPE, GrantLedger, outstanding
from remit.model.claims import (
    Accept,
    Close,
    Code,
    Credit,
    DeclareLost,
    Issue,
    Operation,
    Refused,
    Renew,
    Role,
    Vouch,
    Yield,
)
from remit.model.metadata import DNS_LABEL, Deadline, Stamp
from remit.model.objects import key_of
from remit.model.records import Grant, GrantPhase, GrantSpec, GrantStatus, Standing
from remit.model.resources import Amount, format_quantity

SCHEDULING = frozenset({Role.BUDGETS, Role.OPERATOR, Role.SCHEDULER})


@ruling(Issue, SCHEDULING, Coordination.HARD, "granted on plus used never rises above the parent's amount")
def issue(draft: Draft, operation: Operation, claim: Issue) -> int | Refused:
    spec = claim.spec
    refused = _well_formed(claim.name, spec) or _unheard_of(draft, spec)
    if refused is not None:
        return refused
    if draft.thing(key_of("Grant", claim.name)) is not None or draft.grant(claim.name) is not None:
        return refuse(Code.EXISTS, f"there is a grant {claim.name} already")
    if operation.actor.role is Role.SCHEDULER and (spec.shares or not _held_by_asker(draft, operation, spec.parent)):
        return refuse(Code.NOT_OWNER, "spec.parent: a scheduler hands on only what it was granted itself, and makes no budgets")
    refused = _orphan(draft, spec)
    if refused is not None:
        return refused
    deadline = _term(draft, spec)
    for ledger_name, amount in _debits(spec):
        ledger = draft.grant(ledger_name)
        if ledger is None:
            return refuse(Code.NOT_FOUND, f"spec.parent: there is no grant {ledger_name}")
        short = _covers(draft, ledger, amount)
        if short is not None:
            return short
        if ledger.name == spec.parent:
            deadline = _capped(draft, deadline, ledger)
    draft.put(Grant(metadata=Stamp(name=claim.name, uid=draft.uid()), spec=spec, status=GrantStatus(deadline=deadline)))
    return 1


@ruling(Accept, BUDGETEERS, Coordination.HARD, "what was yielded is not held again: a serial is taken up once")
def accept(draft: Draft, operation: Operation, claim: Accept) -> int | Refused:
    """The copy that a holder keeps. Its term counts from when it was asked for, on this scope's own clock."""
    if not claim.spec.issuer or not claim.spec.ttl or not _is_name(claim.name):
        return refuse(Code.INVALID, "name, spec.issuer, spec.ttl: a grant from another scope names it, and its term")
    if any(count < 0 for _, count in claim.spec.amount):
        return refuse(Code.INVALID, "spec.amount: nothing negative is granted")
    refused = misaddressed(draft, claim.spec.issuer, claim)
    if refused is not None:
        return refused
    if claim.asked_ms > draft.moment.now_ms:
        return refuse(Code.INVALID, "asked_ms: it cannot have been asked for in the future")
    found = draft.thing(key_of("Grant", claim.name))
    deadline = Deadline(boot=draft.moment.boot, at_ms=claim.asked_ms + claim.spec.ttl)
    if found is None:
        status = GrantStatus(serial=claim.serial, deadline=deadline)
        draft.put(Grant(metadata=Stamp(name=claim.name, uid=draft.uid()), spec=replace(claim.spec, parent=""), status=status))
        return claim.serial
    before: Grant = found[0]
    if before.spec.issuer != claim.spec.issuer:
        return refuse(Code.EXISTS, f"grant {claim.name} is from {before.spec.issuer or 'this scope'}")
    if claim.serial <= before.status.serial:
        return refuse(
            Code.REVISION, f"grant {claim.name} was taken up at serial {before.status.serial}, {claim.serial} is older"
        )
    if before.status.phase is GrantPhase.CLOSED:
        return refuse(Code.GRANT_VOID, f"grant {claim.name} is closed; a new one needs a new name")
    # A renewal extends the term; the amount is what is still held. After a restore that is unknowable: then it is as reissued.
    amount = claim.spec.amount if before.status.phase is GrantPhase.VOID else before.spec.amount
    status = replace(before.status, phase=GrantPhase.LIVE, serial=claim.serial, deadline=deadline)
    draft.put(replace(before, spec=replace(before.spec, amount=amount, ttl=claim.spec.ttl), status=status))
    return claim.serial


@ruling(Renew, SCHEDULING, Coordination.HARD, "a child never outlives its parent; a closed grant stays closed")
def renew(draft: Draft, operation: Operation, claim: Renew) -> int | Refused:
    grant = _issued(draft, claim.name)
    if isinstance(grant, Refused):
        return grant
    if not _may_end(draft, operation, grant):
        return refuse(Code.NOT_OWNER, f"{claim.name} is held by {grant.spec.holder}, not by {operation.actor.name}")
    parent = draft.grant(grant.spec.parent) if grant.spec.parent else None
    dead = lifeless(draft, parent) if parent is not None else None
    if dead is not None:
        return dead
    deadline = _capped(draft, _term(draft, grant.spec), parent)
    draft.put(replace(grant, status=replace(grant.status, deadline=deadline, serial=grant.status.serial + 1)))
    return grant.status.serial + 1


@ruling(Yield, BUDGETEERS, Coordination.HARD, "what is given back is debited here before it is credited there")
def give_back(draft: Draft, operation: Operation, claim: Yield) -> int | Refused:
    found = draft.thing(key_of("Grant", claim.name))
    if found is None:
        return refuse(Code.NOT_FOUND, f"there is no grant {claim.name}")
    grant: Grant = found[0]
    ledger = draft.grant(claim.name)
    if not grant.spec.issuer or ledger is None:
        return refuse(Code.INVALID, f"grant {claim.name} was issued here: close it instead")
    if grant.status.phase is GrantPhase.VOID:
        # A reissue may be under way: it would bring again what is given back here.
        return refuse(Code.GRANT_VOID, f"grant {claim.name} is void since a restore; it is reissued first, or closed")
    if any(count < 0 for _, count in claim.amount):
        return refuse(Code.INVALID, "amount: nothing negative can be given back")
    short = _covers(draft, ledger, claim.amount, drawing=False)
    if short is not None:
        return short
    report = grant.status.report + 1
    draft.put(
        replace(
            grant,
            spec=replace(grant.spec, amount=grant.spec.amount - claim.amount),
            status=replace(grant.status, report=report),
        )
    )
    return report


@ruling(Close, SCHEDULING | {Role.REPAIR}, Coordination.HARD, "what is drawn stays charged; only the rest returns, once")
def close(draft: Draft, operation: Operation, claim: Close) -> int | Refused:
    found = draft.thing(key_of("Grant", claim.name))
    ledger = draft.grant(claim.name)
    if found is None or ledger is None:
        return refuse(Code.NOT_FOUND, f"there is no grant {claim.name}")
    grant: Grant = found[0]
    if not _may_end(draft, operation, grant):
        return refuse(Code.NOT_OWNER, f"{claim.name} is held by {grant.spec.holder}, not by {operation.actor.name}")
    if operation.actor.role is Role.REPAIR and ledger.alive(draft.moment.now_ms):
        return refuse(Code.WAIT, f"grant {claim.name} has not run out; its holder may close it")
    if ledger.lent_away and grant.status.phase is GrantPhase.CLOSED and not outstanding(grant):
        draft.drop(key_of("Grant", claim.name))
        return grant.status.report
    if ledger.lent_away and not ledger.alive(draft.moment.now_ms):
        return refuse(Code.AWAITING_REPORTS, f"{grant.spec.holder} has not reported what it drew on {claim.name}")
    if ledger.lent_away:
        return refuse(
            Code.NOT_OWNER, f"{claim.name} is held by {grant.spec.holder}: it closes and reports, or is declared lost"
        )
    taken = ledger.taken()
    if grant.status.phase is GrantPhase.VOID and taken:
        # Only the issuer knows how much of this is still lent to us; what a backup remembers may be in other hands by now.
        return refuse(
            Code.GRANT_VOID, f"grant {claim.name} is void since a restore; it is reissued first, or {taken} is released"
        )
    if grant.spec.issuer:
        # A reissue may have brought less than a backup remembers as drawn. What was not lent is not reported as kept.
        taken = taken - taken.over(grant.spec.amount)
        status = replace(grant.status, phase=GrantPhase.CLOSED, report=grant.status.report + 1)
        draft.put(replace(grant, spec=replace(grant.spec, amount=taken), status=status))
        return status.report
    status = replace(grant.status, phase=GrantPhase.CLOSED, returned=grant.spec.amount - taken)
    if not taken:
        draft.drop(key_of("Grant", claim.name))
    elif status != grant.status:  # closed and still drawn on, it is asked about again and again: that is no news to watchers
        draft.put(replace(grant, status=status))
    return grant.status.report


@ruling(Credit, BUDGETEERS, Coordination.HARD, "a holder is not offered anew what it reported back before its restore")
def credit(draft: Draft, operation: Operation, claim: Credit) -> int | Refused:
    """Reports count by (epoch, report): the later stands, in any order of arrival."""
    grant = _issued(draft, claim.name, closed=True)
    if isinstance(grant, Refused):
        return grant
    if not grant.spec.holder.startswith(SCOPE):
        return refuse(Code.INVALID, f"{claim.name} is held in this scope: its draws are known here")
    refused = misaddressed(draft, grant.spec.holder, claim)
    if refused is not None:
        return refused
    if (claim.epoch, claim.report) <= (grant.status.epoch, grant.status.report):
        return grant.status.report
    left = Amount(outstanding(grant))
    if any(count < 0 for _, count in claim.remaining):
        return refuse(Code.INVALID, "remaining: nobody has less than nothing left")
    if not claim.remaining <= left:
        return refuse(Code.INVALID, f"remaining: {claim.remaining} is more than {left}, which is all that was not given back")
    status = replace(
        grant.status,
        returned=grant.spec.amount - claim.remaining,
        epoch=claim.epoch,
        report=claim.report,
        phase=GrantPhase.CLOSED if claim.final else grant.status.phase,
    )
    draft.put(replace(grant, status=status))
    return claim.report


@ruling(Vouch, BUDGETEERS, Coordination.HARD, "after a restore nothing is granted twice")
def vouch(draft: Draft, operation: Operation, claim: Vouch) -> int | Refused:
    """Record the grants that the backup lacked, by their holder's word, and stop waiting for it.

    Nothing returns by this: what is known here stays written off in full, since an offer of it may still be on its way. What
    the holder gave back comes back by its reports, which it sends again.
    """
    refused = misaddressed(draft, claim.holder, claim)
    if refused is not None:
        return refused
    known = on_record(draft, claim.holder)
    if known.standing is Standing.VOUCHED:
        return refuse(Code.EXISTS, f"{claim.holder} has vouched; after a restore each holder does so once, then it reports")
    for name, spec in sorted(claim.grants.items()):
        refused = _well_formed(name, spec)
        if refused is not None:
            return refused
        found = draft.thing(key_of("Grant", name))
        if claim.holder != spec.holder:
            return refuse(Code.NOT_OWNER, f"grants.{name}: not held by {claim.holder}")
        if found is not None and found[0].spec.holder != claim.holder:
            return refuse(
                Code.NOT_OWNER, f"grants.{name}: {found[0].spec.holder} has it here; one of the two must close it first"
            )
        orphan = _orphan(draft, spec) if found is None else None
        if orphan is not None:
            return replace(orphan, detail=f"grants.{name}.{orphan.detail}")
        if not restored(draft) and (found is None or not spec.amount <= found[0].spec.amount):
            return refuse(Code.NOT_FOUND, f"grants.{name}: not lent by this scope, which was never restored; ask for a grant")
    for name, spec in sorted(claim.grants.items()):
        found = draft.thing(key_of("Grant", name))
        if found is None:
            status = GrantStatus(epoch=claim.epoch, deadline=_term(draft, spec))
            draft.put(Grant(metadata=Stamp(name=name, uid=draft.uid()), spec=spec, status=status))
        elif not spec.amount <= found[0].spec.amount:
            larger = found[0].spec.amount + spec.amount.over(found[0].spec.amount)
            draft.put(replace(found[0], spec=replace(found[0].spec, amount=larger)))
    note(draft, claim.holder, replace(known, standing=Standing.VOUCHED))
    return len(claim.grants)


@ruling(DeclareLost, frozenset({Role.OPERATOR}), Coordination.HARD, "what a lost holder had returns once, by one person's word")
def declare_lost(draft: Draft, operation: Operation, claim: DeclareLost) -> int | Refused:
    if not claim.holder.startswith(SCOPE):
        return refuse(Code.INVALID, f"holder: {claim.holder} is not another scope; close its grants instead")
    returned = 0
    for name in draft.keys("grant/"):
        found = draft.thing(name)
        if found is not None and found[0].spec.holder == claim.holder and not found[0].spec.issuer:
            draft.drop(name)
            returned += 1
    if draft.thing(PEER + claim.holder) is not None:
        # What returned here may be in other hands soon, so nothing that this incarnation of it sends is heeded any more.
        note(draft, claim.holder, parted(on_record(draft, claim.holder)))
    return returned


def _well_formed(name: str, spec: GrantSpec) -> Refused | None:
    if not _is_name(name):
        return refuse(Code.INVALID, f"name: {name!r} is not a DNS label")
    amounts = [spec.amount, *spec.shares.values()]
    if not spec.amount or any(count < 0 for amount in amounts for _, count in amount):
        return refuse(Code.INVALID, "spec.amount: something, and nothing negative")
    if spec.issuer:
        return refuse(Code.INVALID, "spec.issuer: accept a grant from another scope; issue one of this scope's own")
    if bool(spec.shares) != (spec.purpose == "budget"):
        return refuse(Code.INVALID, "spec.shares: a budget names each tenant's share; other grants have none")
    if spec.purpose == "quota" and (not spec.tenant or not spec.parent):
        return refuse(Code.INVALID, "spec.tenant, spec.parent: a slice of quota names its tenant, and what it is a slice of")
    if any(not share <= spec.amount for share in spec.shares.values()):
        return refuse(Code.INVALID, "spec.shares: a share is at most the budget itself")
    if not spec.ttl:
        return refuse(Code.INVALID, "spec.ttl: authority is handed on for a bounded time")
    return None


def _unheard_of(draft: Draft, spec: GrantSpec) -> Refused | None:
    """After a restore this scope may have granted what it no longer remembers; it grants nothing on until all have said."""
    return forgetful(draft, awaited_peers(draft) if spec.holder.startswith(SCOPE) else lenders(draft))


def _held_by_asker(draft: Draft, operation: Operation, parent: str) -> bool:
    ledger = draft.grant(parent)
    grant = None if ledger is None else ledger.grant
    return grant is not None and grant.spec.holder in (operation.actor.name, operation.actor.lease)


def _debits(spec: GrantSpec) -> list[tuple[str, Amount]]:
    """What is taken from where, each ledger once: a budget may be carved out of the same quota that its shares burden."""
    debits: dict[str, Amount] = {spec.parent: spec.amount} if spec.parent else {}
    for tenant, share in sorted(spec.shares.items()):
        name = f"tenant/{tenant}/emergency"
        debits[name] = debits.get(name, Amount()) + share
    return list(debits.items())


def _orphan(draft: Draft, spec: GrantSpec) -> Refused | None:
    """A grant is carved out of nothing, another grant, or a tenant's quota. A share of a budget, and the emergency quota that
    shares burden, are limits, and are not handed on. A slice of quota is carved out of quota of the same tenant: draws on it
    are charged to nothing else, so out of an offer or a budget it would be new quota.
    """
    name = spec.parent
    found = draft.thing(key_of("Grant", name)) if name else None
    home = name.startswith("tenant/") and not name.endswith("/emergency") and draft.grant(name) is not None
    if name and found is None and not home:
        return refuse(Code.NOT_FOUND, f"spec.parent: there is no grant or quota {name} to carve it out of")
    if spec.purpose != "quota":
        return None
    tenant = name.removeprefix("tenant/") if found is None else found[0].spec.tenant
    if tenant != spec.tenant:
        return refuse(Code.NOT_OWNER, f"spec.parent: {name} is not of tenant {spec.tenant}")
    if found is not None and found[0].spec.purpose != "quota":
        return refuse(Code.INVALID, f"spec.parent: {name} is {found[0].spec.purpose}; a slice of quota is carved out of quota")
    return None


def _may_end(draft: Draft, operation: Operation, grant: Grant) -> bool:
    """May the asker renew or close it? A scheduler only what it holds, or has handed on itself."""
    if operation.actor.role is not Role.SCHEDULER:
        return True
    mine = (operation.actor.name, operation.actor.lease)
    return grant.spec.holder in mine or _held_by_asker(draft, operation, grant.spec.parent)


def _covers(draft: Draft, ledger: GrantLedger, amount: Amount, drawing: bool = True) -> Refused | None:
    if drawing:
        if ledger.lent_away:
            return refuse(Code.NOT_OWNER, f"{ledger.name} is held by another scope, which hands it on itself")
        dead = lifeless(draft, ledger)
        if dead is not None:
            return dead
    short = ledger.short_of(amount.pairs)
    if short is None:
        return None
    left, need = format_quantity(short.resource, max(short.left, 0)), format_quantity(short.resource, short.need)
    return refuse(Code.GRANT_SHORT, f"{ledger.name} has {left} {short.resource} left, {need} is needed")


def _issued(draft: Draft, name: str, closed: bool = False) -> Grant | Refused:
    found = draft.thing(key_of("Grant", name))
    if found is None:
        return refuse(Code.NOT_FOUND, f"there is no grant {name}")
    grant: Grant = found[0]
    if grant.spec.issuer:
        return refuse(Code.NOT_OWNER, f"grant {name} was issued by {grant.spec.issuer}, not here")
    if grant.status.phase is not GrantPhase.LIVE and not closed:
        return refuse(Code.GRANT_VOID, f"grant {name} is {grant.status.phase}")
    return grant


def _term(draft: Draft, spec: GrantSpec) -> Deadline:
    return Deadline(boot=draft.moment.boot, at_ms=draft.moment.now_ms + spec.ttl)


def _capped(draft: Draft, deadline: Deadline, parent: GrantLedger | None) -> Deadline:
    if parent is None or parent.deadline_ms is None or parent.deadline_ms >= deadline.at_ms:
        return deadline
    return replace(deadline, at_ms=parent.deadline_ms)


def _is_name(name: str) -> bool:
    return re.fullmatch(DNS_LABEL, name) is not None
