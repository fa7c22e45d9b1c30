"""Grants within a scope and between scopes: issue, accept, renew, yield, close, credit, vouch, declare lost. Pure.

A grant is carved out of a parent: another grant of this scope, or a tenant's quota. If the holder belongs to this scope (a
framework, a scheduler shard, a node), every draw passes this authority. The used amount is known here, and closing the grant
returns the rest at once. If the holder is another scope, the authority of that scope keeps the books of the grant, under the
same name. Amounts then cross between the scopes by one rule, *debit before credit*:

    issue    here: the parent is debited        then  accept  there: the holder may draw
    yield    there: the holder is debited       then  credit  here: the parent gets it back

An amount in flight belongs to neither side. Until the holder reports, the whole grant counts as used: silence, expiry and a
restore return nothing. Only the holder's own report does, or an operator who declares the holder lost. peer_scopes.py
decides which messages are valid after either side was restored.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings.leases import was_restored
from remit.commitment.rulings.peer_scopes import (
    PEER_PREFIX,
    awaited_peers,
    check_incarnations,
    closed_peer,
    may_have_forgotten_grants,
    peer_record,
    peers_to_confirm,
    put_peer,
)
from remit.commitment.rulings.placement import check_alive
from remit.commitment.rulings.registry import BUDGET_ROLES, Coordination, refuse, ruling
from remit.law.ledgers import SCOPE_PREFIX, GrantLedger, outstanding
from remit.model.claims import (
    Accept,
    Close,
    Code,
    ConfirmHoldings,
    Credit,
    DeclareLost,
    Issue,
    Operation,
    Refused,
    Renew,
    ReturnCapacity,
)
from remit.model.metadata import DNS_LABEL, Deadline, RecordMetadata
from remit.model.objects import key_of
from remit.model.records import Grant, GrantPhase, GrantSpec, GrantStatus, PeerConfirmation
from remit.model.resources import Amount, format_quantity
from remit.model.roles import Role

GRANTING_ROLES = frozenset({Role.BUDGETS, Role.OPERATOR, Role.SCHEDULER})


@ruling(Issue, GRANTING_ROLES, Coordination.HARD, "granted on plus used never exceeds the parent's amount")
def issue(draft: Draft, operation: Operation, claim: Issue) -> int | Refused:
    spec = claim.spec
    refused = _check_spec(claim.name, spec) or _check_forgotten_grants(draft, spec)
    if refused is not None:
        return refused
    if draft.lookup(key_of("Grant", claim.name)) is not None or draft.ledgers.grant(claim.name) is not None:
        return refuse(Code.EXISTS, f"name: grant {claim.name} exists already; choose another name")
    if operation.actor.role is Role.SCHEDULER and (spec.shares or not _is_held_by_caller(draft, operation, spec.parent)):
        return refuse(
            Code.NOT_OWNER,
            "spec.parent: a scheduler may only grant on what it holds itself, and may not issue budgets; ask an operator",
        )
    refused = _check_parent(draft, spec)
    if refused is not None:
        return refused
    deadline = _deadline(draft, spec)
    for ledger_name, amount in _debits(spec):
        ledger = draft.ledgers.grant(ledger_name)
        if ledger is None:
            return refuse(Code.NOT_FOUND, f"spec.parent: grant {ledger_name} does not exist; issue it first")
        shortage = _check_amount(draft, ledger, amount)
        if shortage is not None:
            return shortage
        if ledger.name == spec.parent:
            deadline = _capped(draft, deadline, ledger)
    draft.put(
        Grant(metadata=RecordMetadata(name=claim.name, uid=draft.new_uid()), spec=spec, status=GrantStatus(deadline=deadline))
    )
    return 1


@ruling(Accept, BUDGET_ROLES, Coordination.HARD, "yielded capacity is not held again: each serial is accepted once")
def accept(draft: Draft, operation: Operation, claim: Accept) -> int | Refused:
    """Store or renew the holder's copy of a grant. Its term counts from when it was requested, on this scope's clock."""
    if not claim.spec.issuer or not claim.spec.ttl or not _is_name(claim.name):
        return refuse(
            Code.INVALID,
            "name, spec.issuer, spec.ttl: a grant from another scope needs a DNS label as name, its issuer, and a term",
        )
    if any(count < 0 for _, count in claim.spec.amount):
        return refuse(Code.INVALID, "spec.amount: negative amounts cannot be granted")
    refused = check_incarnations(draft, claim.spec.issuer, claim)
    if refused is not None:
        return refused
    if claim.asked_ms > draft.time.now_ms:
        return refuse(
            Code.INVALID,
            f"asked_ms: {claim.asked_ms} is in the future (now {draft.time.now_ms}); send the time of the request on this "
            "scope's clock",
        )
    entry = draft.lookup(key_of("Grant", claim.name))
    deadline = Deadline(boot=draft.time.boot, at_ms=claim.asked_ms + claim.spec.ttl)
    if entry is None:
        status = GrantStatus(serial=claim.serial, deadline=deadline)
        draft.put(
            Grant(
                metadata=RecordMetadata(name=claim.name, uid=draft.new_uid()),
                spec=replace(claim.spec, parent=""),
                status=status,
            )
        )
        return claim.serial
    before: Grant = entry[0]
    if before.spec.issuer != claim.spec.issuer:
        return refuse(
            Code.EXISTS,
            f"name: grant {claim.name} exists already, issued by {before.spec.issuer or 'this scope'}; choose another name",
        )
    if claim.serial <= before.status.serial:
        return refuse(
            Code.REVISION,
            f"serial: grant {claim.name} is at serial {before.status.serial}, {claim.serial} is older; the message is a "
            "duplicate",
        )
    if before.status.phase is GrantPhase.CLOSED:
        return refuse(Code.GRANT_VOID, f"grant {claim.name} is closed; issue a new one under a new name")
    # A renewal extends the term and keeps the held amount. After a restore the held amount is unknown, so the reissued amount
    # counts.
    amount = claim.spec.amount if before.status.phase is GrantPhase.VOID else before.spec.amount
    status = replace(before.status, phase=GrantPhase.LIVE, serial=claim.serial, deadline=deadline)
    draft.put(replace(before, spec=replace(before.spec, amount=amount, ttl=claim.spec.ttl), status=status))
    return claim.serial


@ruling(Renew, GRANTING_ROLES, Coordination.HARD, "a grant never outlives its parent; a closed grant stays closed")
def renew(draft: Draft, operation: Operation, claim: Renew) -> int | Refused:
    grant = _find_issued(draft, claim.name)
    if isinstance(grant, Refused):
        return grant
    if not _may_manage(draft, operation, grant):
        return refuse(
            Code.NOT_OWNER,
            f"grant {claim.name} is held by {grant.spec.holder}; {operation.actor.name} neither holds nor issued it",
        )
    parent = draft.ledgers.grant(grant.spec.parent) if grant.spec.parent else None
    refusal = check_alive(draft, parent) if parent is not None else None
    if refusal is not None:
        return refusal
    deadline = _capped(draft, _deadline(draft, grant.spec), parent)
    draft.put(replace(grant, status=replace(grant.status, deadline=deadline, serial=grant.status.serial + 1)))
    return grant.status.serial + 1


@ruling(
    ReturnCapacity,
    BUDGET_ROLES,
    Coordination.HARD,
    "returned capacity is debited at the holder before it is credited at the issuer",
)
def return_capacity(draft: Draft, operation: Operation, claim: ReturnCapacity) -> int | Refused:
    entry = draft.lookup(key_of("Grant", claim.name))
    if entry is None:
        return refuse(Code.NOT_FOUND, f"grant {claim.name} does not exist")
    grant: Grant = entry[0]
    ledger = draft.ledgers.grant(claim.name)
    if not grant.spec.issuer or ledger is None:
        return refuse(Code.INVALID, f"grant {claim.name} was issued by this scope; close it instead of yielding")
    if grant.status.phase is GrantPhase.VOID:
        # A reissue may be in flight, and would bring back the amount that is yielded now.
        return refuse(
            Code.GRANT_VOID, f"grant {claim.name} is void since a restore; wait until its issuer reissues it, or close it"
        )
    if any(count < 0 for _, count in claim.amount):
        return refuse(Code.INVALID, f"amount: negative amounts cannot be yielded; got {claim.amount}")
    refusal = _check_amount(draft, ledger, claim.amount, drawing=False)
    if refusal is not None:
        return refusal
    report = grant.status.report + 1
    draft.put(
        replace(
            grant,
            spec=replace(grant.spec, amount=grant.spec.amount - claim.amount),
            status=replace(grant.status, report=report),
        )
    )
    return report


@ruling(
    Close,
    GRANTING_ROLES | {Role.REPAIR},
    Coordination.HARD,
    "drawn capacity stays charged; only the rest returns, and only once",
)
def close(draft: Draft, operation: Operation, claim: Close) -> int | Refused:
    entry = draft.lookup(key_of("Grant", claim.name))
    ledger = draft.ledgers.grant(claim.name)
    if entry is None or ledger is None:
        return refuse(Code.NOT_FOUND, f"grant {claim.name} does not exist")
    grant: Grant = entry[0]
    if not _may_manage(draft, operation, grant):
        return refuse(
            Code.NOT_OWNER,
            f"grant {claim.name} is held by {grant.spec.holder}; {operation.actor.name} neither holds nor issued it",
        )
    if operation.actor.role is Role.REPAIR and ledger.is_unexpired(draft.time.now_ms):
        return refuse(
            Code.WAIT, f"grant {claim.name} has not expired; until then only its holder {grant.spec.holder} closes it"
        )
    if ledger.granted_to_other_scope and grant.status.phase is GrantPhase.CLOSED and not outstanding(grant):
        draft.delete(key_of("Grant", claim.name))
        return grant.status.report
    if ledger.granted_to_other_scope and not ledger.is_unexpired(draft.time.now_ms):
        return refuse(
            Code.AWAITING_REPORTS,
            f"grant {claim.name} expired, but {grant.spec.holder} has not reported what it drew; wait for its report, or "
            "declare it lost",
        )
    if ledger.granted_to_other_scope:
        return refuse(
            Code.NOT_OWNER,
            f"grant {claim.name} is held by scope {grant.spec.holder}, which must close and report it; or declare that scope "
            "lost",
        )
    committed = ledger.committed()
    if grant.status.phase is GrantPhase.VOID and committed:
        # Only the issuer knows how much of this grant is still valid: what the backup shows as held may be granted to others.
        return refuse(
            Code.GRANT_VOID,
            f"grant {claim.name} is void since a restore and {committed} of it is in use; wait until its issuer reissues it, "
            "or release the work that uses it",
        )
    if grant.spec.issuer:
        # The reissued amount may be less than what the backup shows as drawn. Report as retained only what was granted.
        committed = committed - committed.excess_over(grant.spec.amount)
        status = replace(grant.status, phase=GrantPhase.CLOSED, report=grant.status.report + 1)
        draft.put(replace(grant, spec=replace(grant.spec, amount=committed), status=status))
        return status.report
    status = replace(grant.status, phase=GrantPhase.CLOSED, returned=grant.spec.amount - committed)
    if not committed:
        draft.delete(key_of("Grant", claim.name))
    elif status != grant.status:  # a closed grant in use is closed again repeatedly: do not rewrite an unchanged row
        draft.put(replace(grant, status=status))
    return grant.status.report


@ruling(Credit, BUDGET_ROLES, Coordination.HARD, "what a holder returned before it was restored is not granted to it again")
def credit(draft: Draft, operation: Operation, claim: Credit) -> int | Refused:
    """Take back what the holder returned. Reports are ordered by (epoch, report): the later wins, in any order of arrival."""
    grant = _find_issued(draft, claim.name, allow_closed=True)
    if isinstance(grant, Refused):
        return grant
    if not grant.spec.holder.startswith(SCOPE_PREFIX):
        return refuse(
            Code.INVALID,
            f"grant {claim.name} is held in this scope, so its draws are known here; close it instead of reporting",
        )
    refused = check_incarnations(draft, grant.spec.holder, claim)
    if refused is not None:
        return refused
    if (claim.epoch, claim.report) <= (grant.status.epoch, grant.status.report):
        return grant.status.report
    remaining = Amount(outstanding(grant))
    if any(count < 0 for _, count in claim.remaining):
        return refuse(Code.INVALID, f"remaining: negative amounts are invalid; got {claim.remaining}")
    if not claim.remaining <= remaining:
        return refuse(
            Code.INVALID,
            f"remaining: {claim.remaining} exceeds the outstanding amount {remaining} of grant {claim.name}",
        )
    status = replace(
        grant.status,
        returned=grant.spec.amount - claim.remaining,
        epoch=claim.epoch,
        report=claim.report,
        phase=GrantPhase.CLOSED if claim.final else grant.status.phase,
    )
    draft.put(replace(grant, status=status))
    return claim.report


@ruling(ConfirmHoldings, BUDGET_ROLES, Coordination.HARD, "after a restore no amount is granted twice")
def confirm_holdings(draft: Draft, operation: Operation, claim: ConfirmHoldings) -> int | Refused:
    """Record the grants that the backup lacked, as reported by their holder, and stop waiting for that holder.

    Nothing returns by this claim. Grants known here still count as fully used, since an offer may be in flight. Amounts that
    the holder gave back return through its reports, which it sends again.
    """
    refused = check_incarnations(draft, claim.holder, claim)
    if refused is not None:
        return refused
    record = peer_record(draft, claim.holder)
    if record.standing is PeerConfirmation.VOUCHED:
        return refuse(
            Code.EXISTS,
            f"holder: {claim.holder} has already vouched since the restore; it must send reports (credit) from now on",
        )
    for name, spec in sorted(claim.grants.items()):
        refused = _check_spec(name, spec)
        if refused is not None:
            return refused
        entry = draft.lookup(key_of("Grant", name))
        if claim.holder != spec.holder:
            return refuse(
                Code.NOT_OWNER,
                f"grants.{name}.holder: {spec.holder}, but {claim.holder} vouches; a holder vouches only for its own grants",
            )
        if entry is not None and entry[0].spec.holder != claim.holder:
            return refuse(
                Code.NOT_OWNER,
                f"grants.{name}: held by {entry[0].spec.holder} here, not by {claim.holder}; one of the two must "
                "close it first",
            )
        bad_parent = _check_parent(draft, spec) if entry is None else None
        if bad_parent is not None:
            return replace(bad_parent, detail=f"grants.{name}.{bad_parent.detail}")
        if not was_restored(draft) and (entry is None or not spec.amount <= entry[0].spec.amount):
            return refuse(
                Code.NOT_FOUND, f"grants.{name}: not granted by this scope, which was never restored; request a new grant"
            )
    for name, spec in sorted(claim.grants.items()):
        entry = draft.lookup(key_of("Grant", name))
        if entry is None:
            status = GrantStatus(epoch=claim.epoch, deadline=_deadline(draft, spec))
            draft.put(Grant(metadata=RecordMetadata(name=name, uid=draft.new_uid()), spec=spec, status=status))
        elif not spec.amount <= entry[0].spec.amount:
            larger = entry[0].spec.amount + spec.amount.excess_over(entry[0].spec.amount)
            draft.put(replace(entry[0], spec=replace(entry[0].spec, amount=larger)))
    put_peer(draft, claim.holder, replace(record, standing=PeerConfirmation.VOUCHED))
    return len(claim.grants)


@ruling(
    DeclareLost,
    frozenset({Role.OPERATOR}),
    Coordination.HARD,
    "the amount of a lost holder returns once, and only on an operator's decision",
)
def declare_lost(draft: Draft, operation: Operation, claim: DeclareLost) -> int | Refused:
    if not claim.holder.startswith(SCOPE_PREFIX):
        return refuse(
            Code.INVALID, f"holder: {claim.holder} is not another scope ({SCOPE_PREFIX}NAME); close its grants instead"
        )
    returned = 0
    for name in draft.keys("grant/"):
        entry = draft.lookup(name)
        if entry is not None and entry[0].spec.holder == claim.holder and not entry[0].spec.issuer:
            draft.delete(name)
            returned += 1
    if draft.lookup(PEER_PREFIX + claim.holder) is not None:
        # The returned amount may be granted to others soon, so no message of this incarnation of the holder may count any more.
        put_peer(draft, claim.holder, closed_peer(peer_record(draft, claim.holder)))
    return returned


def _check_spec(name: str, spec: GrantSpec) -> Refused | None:
    if not _is_name(name):
        return refuse(Code.INVALID, f"name: {name!r} is not a DNS label; use a-z, 0-9 and -")
    amounts = [spec.amount, *spec.shares.values()]
    if not spec.amount or any(count < 0 for amount in amounts for _, count in amount):
        return refuse(Code.INVALID, "spec.amount: must be positive; no part of it, or of spec.shares, may be negative")
    if spec.issuer:
        return refuse(
            Code.INVALID, "spec.issuer: must be empty in a grant issued here; grants from another scope are accepted instead"
        )
    if bool(spec.shares) != (spec.purpose == "budget"):
        return refuse(
            Code.INVALID,
            f"spec.shares: exactly the grants with purpose budget have shares per tenant; purpose is {spec.purpose!r}",
        )
    if spec.purpose == "quota" and (not spec.tenant or not spec.parent):
        return refuse(
            Code.INVALID, "spec.tenant, spec.parent: a quota slice needs its tenant and the quota that it is carved out of"
        )
    if any(not share <= spec.amount for share in spec.shares.values()):
        return refuse(Code.INVALID, f"spec.shares: a share must not exceed the budget's amount of {spec.amount}")
    if not spec.ttl:
        return refuse(Code.INVALID, "spec.ttl: a term is required; grants are always limited in time")
    return None


def _check_forgotten_grants(draft: Draft, spec: GrantSpec) -> Refused | None:
    """Refuse while a restored scope may have made grants that the backup does not contain."""
    return may_have_forgotten_grants(
        draft, awaited_peers(draft) if spec.holder.startswith(SCOPE_PREFIX) else peers_to_confirm(draft)
    )


def _is_held_by_caller(draft: Draft, operation: Operation, parent: str) -> bool:
    ledger = draft.ledgers.grant(parent)
    grant = None if ledger is None else ledger.grant
    return grant is not None and grant.spec.holder in (operation.actor.name, operation.actor.lease)


def _debits(spec: GrantSpec) -> list[tuple[str, Amount]]:
    """Return the debited ledgers, each once: a budget may be carved out of the same quota that its shares charge."""
    debits: dict[str, Amount] = {spec.parent: spec.amount} if spec.parent else {}
    for tenant, share in sorted(spec.shares.items()):
        name = f"tenant/{tenant}/emergency"
        debits[name] = debits.get(name, Amount()) + share
    return list(debits.items())


def _check_parent(draft: Draft, spec: GrantSpec) -> Refused | None:
    """Check that the parent may be carved up.

    A grant has no parent, another grant, or a tenant's quota as parent. Shares of a budget, and the emergency quota that
    they charge, are limits and cannot be granted on. A quota slice must be carved out of quota of the same tenant: draws on
    it are charged to nothing else, so a slice of an offer or a budget would create new quota.
    """
    name = spec.parent
    entry = draft.lookup(key_of("Grant", name)) if name else None
    is_quota = name.startswith("tenant/") and not name.endswith("/emergency") and draft.ledgers.grant(name) is not None
    if name and entry is None and not is_quota:
        return refuse(Code.NOT_FOUND, f"spec.parent: no grant or tenant quota named {name} exists; create it first")
    if spec.purpose != "quota":
        return None
    tenant = name.removeprefix("tenant/") if entry is None else entry[0].spec.tenant
    if tenant != spec.tenant:
        return refuse(
            Code.NOT_OWNER,
            f"spec.parent: {name} belongs to tenant {tenant or 'none'}, not to {spec.tenant}; choose quota of {spec.tenant}",
        )
    if entry is not None and entry[0].spec.purpose != "quota":
        return refuse(
            Code.INVALID, f"spec.parent: {name} has purpose {entry[0].spec.purpose}; a quota slice must be carved out of quota"
        )
    return None


def _may_manage(draft: Draft, operation: Operation, grant: Grant) -> bool:
    """Return whether the caller may renew or close the grant. A scheduler may do so only for grants that it holds or issued."""
    if operation.actor.role is not Role.SCHEDULER:
        return True
    identities = (operation.actor.name, operation.actor.lease)
    return grant.spec.holder in identities or _is_held_by_caller(draft, operation, grant.spec.parent)


def _check_amount(draft: Draft, ledger: GrantLedger, amount: Amount, drawing: bool = True) -> Refused | None:
    if drawing:
        if ledger.granted_to_other_scope:
            return refuse(Code.NOT_OWNER, f"grant {ledger.name} is held by another scope; only that scope grants it on")
        refusal = check_alive(draft, ledger)
        if refusal is not None:
            return refusal
    shortage = ledger.shortage_for(amount.pairs)
    if shortage is None:
        return None
    free, need = (
        format_quantity(shortage.resource, max(shortage.available, 0)),
        format_quantity(shortage.resource, shortage.need),
    )
    return refuse(Code.GRANT_SHORT, f"grant {ledger.name} has {free} {shortage.resource} free, {need} is needed")


def _find_issued(draft: Draft, name: str, allow_closed: bool = False) -> Grant | Refused:
    entry = draft.lookup(key_of("Grant", name))
    if entry is None:
        return refuse(Code.NOT_FOUND, f"grant {name} does not exist")
    grant: Grant = entry[0]
    if grant.spec.issuer:
        return refuse(Code.NOT_OWNER, f"grant {name} was issued by {grant.spec.issuer}; only its issuer may do this")
    if grant.status.phase is not GrantPhase.LIVE and not allow_closed:
        return refuse(Code.GRANT_VOID, f"grant {name} is {grant.status.phase}; issue a new one")
    return grant


def _deadline(draft: Draft, spec: GrantSpec) -> Deadline:
    return Deadline(boot=draft.time.boot, at_ms=draft.time.now_ms + spec.ttl)


def _capped(draft: Draft, deadline: Deadline, parent: GrantLedger | None) -> Deadline:
    if parent is None or parent.deadline_ms is None or parent.deadline_ms >= deadline.at_ms:
        return deadline
    return replace(deadline, at_ms=parent.deadline_ms)


def _is_name(name: str) -> bool:
    return re.fullmatch(DNS_LABEL, name) is not None
