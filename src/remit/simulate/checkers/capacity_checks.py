"""Safety: nodes, devices, ledgers, gangs, constraints.

Phases and leases are checked in transition_checks.py.
"""

from __future__ import annotations

from remit.simulate.checkers.reference.history import History, Step
from remit.simulate.checkers.reference.lifecycle import RUNS
from remit.simulate.checkers.reference.placement import barred, towards_others
from remit.simulate.checkers.reference.rows import (
    SCOPE,
    WHOLE,
    Json,
    copy_of,
    group_of,
    health_of,
    holds,
    is_open,
    milliseconds,
    owner_of,
    phase_of,
)
from remit.simulate.checkers.registry import UNDECIDED, Found, promise

CHAIN_MAX = 64
HOLDERS_TOLD = 4


@promise("S3")
def exclusive_device_has_one_owner(step: Step) -> Found:
    owners = step.history.sums.owners
    for device in step.history.sums.devices_touched:
        held = owners.get(device, {})
        if len(held) > 1 and (WHOLE in held.values() or sum(held.values()) > WHOLE):
            yield list(held)[-1], f"{device} is held by {held}"


@promise("S3")
def node_sums_never_rise_above_capacity(step: Step) -> Found:
    history = step.history
    for (node, name), before in history.sums.nodes_before.items():
        n = history.sums.nodes.get((node, name), 0)
        if n <= before:
            continue
        if node not in history.capacity:
            yield f"node/{node}", f"replicas hold {n} {name} on node {node}, which does not exist"
            continue
        limit = max(history.capacity[node].get(name, 0), step.nodes_before.get(node, {}).get(name, 0))
        if n > limit:
            yield f"node/{node}", f"{name} rose from {before} to {n}, limit {limit}; {_holders(step, node, name)}"
    for node in step.nodes_before:
        if node not in history.capacity and (left := [key for key, p in history.sums.postings.items() if p.node == node]):
            yield f"node/{node}", f"the node was removed while {left} hold capacity on it"


def _holders(step: Step, node: str, name: str) -> str:
    """Return some holders, those that this commit changed first, to show whose history to read next."""
    postings = step.history.sums.postings.items()
    holders = sorted((key not in step.changed, key) for key, held in postings if held.node == node and held.on_node.get(name))
    told = [key for _, key in holders[:HOLDERS_TOLD]]
    more = f" and {len(holders) - len(told)} more" if len(holders) > len(told) else ""
    return f"held by {', '.join(told)}{more}"


@promise("S4")
def ledgers_never_rise_above_amount(step: Step) -> Found:
    """Charges and sub-grants of a ledger stay within its amount. A restore counts everything granted on as used, and confirmed
    holdings are accepted as reported: both may raise a sum.
    """
    if step.doubting or any(entry.did == "vouch" for entry in step.accepted):
        return
    history, sums = step.history, step.history.sums
    for (ledger, name), before in sums.ledgers_before.items():
        n = sums.taken(ledger, name)
        key = ledger if ledger.startswith("tenant/") else f"grant/{ledger}"
        if (ledger, name) in sums.used and ledger not in history.limits:
            yield key, f"{n} {name} is charged to ledger {ledger}, which does not exist"
        limit = max(history.limits.get(ledger, {}).get(name, 0), step.ledgers_before.get(ledger, {}).get(name, 0))
        if n > limit and n > before and ledger in history.limits:
            yield key, f"{name} of {ledger} rose from {before} to {n}, limit {limit}"
    for ledger in step.ledgers_before:
        if ledger not in history.limits and (left := [name for at, name in sums.used if at == ledger]):
            yield ledger, f"the ledger was removed while {left} of it are charged"


@promise("S4")
def draws_are_on_ones_own(step: Step) -> Found:
    """Replicas are charged to their own tenant, and a scheduler charges only grants that it holds or that its scope holds from
    another.
    """
    for key, new in step.placed("bound", "reserved"):
        if holds(step.was(key)):
            continue
        tenant = new["metadata"]["tenant"]
        by = [e for e in step.accepted if e.did == "gang" or (e.did in ("bind", "reserve") and e.subject == key)]
        hands = {name for entry in by for name in (entry.actor, entry.lease)}
        for ledger in new["status"].get("grants", ()):
            grant = step.was(f"grant/{ledger}") or step.history.row(f"grant/{ledger}")
            spec = {} if grant is None else grant["spec"]
            if grant is None and not ledger.endswith(f"/{tenant}"):  # its quota, or its share of a budget
                yield key, f"{ledger} does not belong to {tenant}"
            elif spec.get("tenant", "") not in ("", tenant):
                yield key, f"{ledger} belongs to {spec['tenant']}, not to {tenant}"
            elif spec and not spec.get("issuer") and spec["holder"] not in hands:
                yield key, f"{ledger} is held by {spec['holder']}, and {sorted(hands)} charged it"


@promise("S4")
def what_is_given_back_is_not_drawn(step: Step) -> Found:
    """No holder returns or closes capacity that is charged. A grant may be reduced below what is charged; then charges stay.

    A reissue after a restore may bring less than is charged; grants reissued in the same batch are skipped, because no row
    shows what was returned in between.
    """
    history = step.history
    reissued = {entry.subject for entry in step.accepted if entry.did == "accept"}
    for entry in step.accepted:
        if entry.did not in ("yield", "close") or entry.subject in reissued:
            continue
        before, now = step.ledgers_before.get(entry.subject, {}), history.limits.get(entry.subject, {})
        for name, had in before.items():
            has, taken = now.get(name, 0), history.sums.taken(entry.subject, name)
            if has < had and taken > has:
                yield f"grant/{entry.subject}", f"{entry.did} left {has} {name} of {had}, and {taken} of it are charged"


@promise("S5")
def quota_comes_from_quota(step: Step) -> Found:
    """Charges on a slice are posted to no other ledger, so a slice must be part of its tenant's own quota, over all levels."""
    grants = step.history.kind("grant")
    changed = {key: (old, new) for key, old, new in step.of_kind("grant")}
    turned = any(old is not None and _sort(old) != _sort(new) for old, new in changed.values())
    for key in grants if turned else changed:
        if key not in grants:
            continue
        spec = grants[key]["spec"]
        if spec.get("purpose", "quota") != "quota" or spec.get("issuer"):
            continue
        parent, tenant = spec.get("parent", ""), spec.get("tenant", "")
        above = grants.get(f"grant/{parent}", {}).get("spec")
        of_slice = above is not None and (above.get("purpose", "quota"), above.get("tenant", "")) == ("quota", tenant)
        if parent != f"tenant/{tenant}" and not of_slice:
            yield key, f"a slice of the quota of {tenant} was issued from {parent or 'nothing'}: {above}"


def _sort(grant: Json) -> Json:
    return grant and [grant["spec"].get(name) for name in ("purpose", "tenant", "parent", "issuer")]


@promise("S18")
def hard_constraints_hold_at_the_bind(step: Step) -> Found:
    """Evaluated on the state after the batch: exact if nothing later in the batch could have changed it."""
    bound = dict(step.placed("bound"))
    if not bound:
        return
    binders = [i for i, entry in enumerate(step.accepted) if entry.did in ("bind", "gang")]
    shapers = [i for i, entry in enumerate(step.accepted) if entry.did in ("apply", "delete", "mark", "adopt", "rollback")]
    if binders and shapers and max(shapers) > min(binders):
        return
    history = step.history
    freed = any(holds(old) and not holds(new) for _, old, new in step.moves)
    exact = not freed and (len(step.accepted) == 1 or len({group_of(new) for _, new in step.placed("bound", "reserved")}) == 1)
    for key, new in bound.items():
        node = new["status"]["node"]
        site, shape = history.sites.get(node), history.shape(new)
        if site is None or shape is None:
            yield key, f"node {node} does not exist" if site is None else "the replica has no generation"
            return
        if why := barred(shape, site, history.policy):
            yield key, f"bound to {node}: {why}"
        row = history.row(f"node/{node}")
        if health_of(row) != "ready" or not is_open(row):
            yield key, f"bound to {node}, which accepts no new work: {row.get('status')} {row['spec']}"
        if not freed and (why := towards_others(history, shape, site, spread=exact)):
            yield key, f"bound to {node}: {why}"


@promise("S18")
def devices_are_those_that_were_asked_for(step: Step) -> Found:
    for key, new in step.placed("bound", "reserved"):
        shape, given = step.history.shape(new), new["status"].get("devices") or {}
        if shape is None or not (shape.asks or given) or new["status"]["node"] in step.nodes_before:
            continue  # a node that changed in this batch may have had other devices at the time of the bind
        row = step.history.row(f"node/{new['status']['node']}") or {"spec": {}}
        known = {device["name"]: device for device in row["spec"].get("devices", ())}
        charged = {name: n for name, n in shape.charge.items() if name.startswith("devices/") and n}
        held: dict[str, int] = {}
        for name, share in given.items():
            kind = f"devices/{known.get(name, {}).get('kind', '?')}"
            held[kind] = held.get(kind, 0) + share
        models = {model for ask in shape.asks for model in ask.get("models", ())}
        odd = [
            name
            for name in given
            if models and all(a.get("models") for a in shape.asks) and known.get(name, {}).get("model") not in models
        ]
        if held != charged or odd:
            yield key, f"requested {shape.asks}, got {given} of {sorted(known)}"


@promise("S18")
def nothing_is_placed_for_what_goes(step: Step) -> Found:
    """A workload that is being deleted, before the batch and after it, gets no more capacity."""
    for key, new in step.placed("bound", "reserved"):
        if holds(step.was(key)):
            continue
        owner = owner_of(new)
        both = step.was(owner), step.history.row(owner)
        if all(row is not None and row["metadata"].get("deleting") for row in both):
            yield key, f"it was placed although {owner} is being deleted"


@promise("S18")
def victims_rank_lower(step: Step) -> Found:
    """Preemption takes capacity only from replicas of lower priority, on the node where it is needed, and only if the class may
    preempt.
    """
    for key, new in step.placed("reserved"):
        rank = new["spec"].get("priority", 0)
        if new["status"].get("victims") and not _preempts(step, new):
            yield key, "its priority class may not preempt"
        for victim in new["status"].get("victims", {}):
            found = step.was(victim) or step.history.row(victim)
            if found is None or found["spec"].get("priority", 0) >= rank:
                yield key, f"{victim} has priority {found and found['spec'].get('priority', 0)}, not below {rank}"
            elif found["status"].get("node") != new["status"]["node"]:
                yield key, f"{victim} is on {found['status'].get('node')}, and capacity is needed on {new['status']['node']}"


def _preempts(step: Step, replica: Json) -> bool:
    """Whether its class may preempt, before the batch or after it: either may have been in force at the decision."""
    owner = owner_of(replica)
    for workload in (step.was(owner), step.history.row(owner)):
        named = "" if workload is None else workload["spec"].get("priorityClass", "")
        for rank in (step.was(f"priorityclass/{named}"), step.history.row(f"priorityclass/{named}")):
            if rank is None or rank["spec"].get("preempts", True):
                return True
    return False


@promise("S18")
def policy_in_force_is_recorded_and_alive(step: Step) -> Found:
    stand = step.stand
    for key, new in step.placed("bound", "reserved"):
        latest = [step.policy_before, step.history.policy]
        numbers = [0 if one is None else one["number"] for one in latest]
        if not min(numbers) <= new["status"].get("policy", 0) <= max(numbers):
            yield key, f"placed under policy {new['status'].get('policy', 0)}; in force is {numbers}"
        if not any(_in_force(one, stand.boot, stand.decided_ms) for one in latest):
            yield key, f"placed under policy {numbers} after its lease expired, at {stand.decided_ms} on {stand.boot}"
        elif not any(_in_force(one, stand.boot, stand.applied_ms) for one in latest):
            yield key, f"{UNDECIDED} a policy's lease expired between a decision under it and its commit"


def _in_force(policy: Json, boot: str, now_ms: int) -> bool:
    deadline = None if policy is None else policy.get("deadline")
    return not deadline or bool(deadline["boot"] == boot and now_ms < deadline["atMs"])


@promise("S18")
def nothing_fenced_is_placed_before_all_nodes_reported(step: Step) -> Found:
    """After a restore, work that was pending in the backup may be running on a node that has not reported since."""
    unheard = step.history.unheard
    if not unheard:
        return
    for key, new in step.placed("bound"):
        shape, node = step.history.shape(new), new["status"]["node"]
        if node in unheard:
            yield key, f"it was bound to {node}, which has not reported since a restore"
        elif shape is not None and shape.fenced:
            yield key, f"it must never run twice, and was bound while {sorted(unheard)} have not reported since a restore"


@promise("S12")
def gangs_are_bound_together(step: Step) -> Found:
    newly: dict[tuple[str, str], list[str]] = {}
    for key, new in step.placed("bound"):
        shape = step.history.shape(new)
        if shape is not None and shape.gang:
            newly.setdefault(group_of(new), []).append(key)
    for group, keys in newly.items():
        shapes = [step.history.shape(step.history.row(key)) for key in keys]
        least = max(shape.gang for shape in shapes if shape is not None)
        members = step.history.members.get(group, {})
        standing = [k for k in members if phase_of(step.was(k)) in RUNS]
        if len(keys) < least and len(standing) < least:
            yield keys[0], f"{len(keys)} members were bound and {len(standing)} were running; the gang's minimum is {least}"


@promise("S5")
def reservations_are_committed_once_or_released(step: Step) -> Found:
    for key, old, new in step.moves:
        if new is None:
            continue
        status = new.get("status", {})
        if phase_of(old) == "reserved" and phase_of(new) == "bound":
            a = old["status"]
            if any(a.get(name) != status.get(name) for name in ("node", "devices", "grants", "attempt")):
                yield key, f"reserved as {a}, bound as {status}"
            left = [victim for victim, copy in a.get("victims", {}).items() if _stood(step, victim, copy)]
            if left:
                yield key, f"bound before its victims {left} were gone"
        if not holds(new) and any(status.get(name) for name in ("devices", "grants", "victims")):
            yield key, f"holds no capacity, but has {status}"
        if phase_of(new) != "reserved" and status.get("victims"):
            yield key, f"has victims without a reservation: {status}"


def _stood(step: Step, victim: str, copy: str) -> bool:
    """Whether this attempt of the victim held its capacity both before the batch and after it."""
    both = step.was(victim), step.history.row(victim)
    return all(row is not None and holds(row) and copy_of(row) == copy for row in both)


@promise("S5")
def draws_are_on_living_grants(step: Step) -> Found:
    """Nothing is charged to a grant that has expired, or is closed or void. What a reservation charged before stays charged,
    and is bound as it was reserved (`reservations_are_committed_once_or_released`).
    """
    stand = step.stand
    for key, old, new in step.moves:
        if phase_of(old) not in (None, "pending") or phase_of(new) not in ("bound", "reserved"):
            continue
        for ledger in new["status"].get("grants", ()):
            if ledger.startswith("tenant/") or _rewritten(step, ledger.split("/")[0]):
                continue
            dead = [_dead(step, ledger, stand.decided_ms, before) for before in (True, False)]
            if all(dead):
                yield key, f"charged {ledger}: {dead[1]}"
            elif all(_dead(step, ledger, stand.applied_ms, before) for before in (True, False)):
                yield key, f"{UNDECIDED} a grant expired between a charge on it and its commit"


def _rewritten(step: Step, name: str) -> bool:
    """Whether the grant was changed more than once in this batch. It may have been alive in between, which no row shows."""
    return sum(entry.subject == name for entry in step.accepted) > 1


def _dead(step: Step, ledger: str, now_ms: int, before: bool) -> str:
    """Return why nothing may be charged to the ledger, as of before or after the commit; empty if it was alive."""
    history, name = step.history, ledger.split("/")[0]
    for _ in range(CHAIN_MAX):
        key = f"grant/{name}"
        grant = step.was(key) if before else history.row(key)
        if grant is None:
            return f"{name} does not exist"
        # The version that was just replaced may be older than the current leader's takeover.
        fresh = before if key in step.changed else history.rows[key][0] < history.seized_at
        if why := grant_is_dead(history, key, grant, step.stand.boot, now_ms, fresh=fresh):
            return why
        parent = "" if grant["spec"].get("issuer") else grant["spec"].get("parent", "")
        if not parent or parent.startswith("tenant/"):
            return ""
        name = parent
    return f"{ledger} has more than {CHAIN_MAX} levels of parents"


def grant_is_dead(history: History, key: str, grant: Json, boot: str, now_ms: int, *, fresh: bool) -> str:
    """Return why a grant is dead by its own row; empty if it is alive.

    Grants issued here before the current takeover (`fresh`) got a full new term at the takeover, which happened at the
    latest before the leader's first batch. Grants held from another scope have expired on any other boot.
    """
    status, spec = grant.get("status", {}), grant["spec"]
    if status.get("phase", "live") != "live":
        return f"{key} is {status['phase']}"
    deadline = status.get("deadline")
    if not deadline:
        return ""
    until = deadline["atMs"] if deadline["boot"] == boot else 0
    if not spec.get("issuer") and (fresh or deadline["boot"] != boot):
        takeover = history.first or history.seized
        until = max(until, (takeover.sent_ms if takeover is not None else 0) + milliseconds(spec["ttl"]))
    return f"{key} expired at {until} on {deadline['boot']}, and it is {now_ms} on {boot}" if now_ms >= until else ""


@promise("S4")
def grants_are_held_by_somebody(step: Step) -> Found:
    """Only the holder of a grant charges it: a grant issued to another scope is charged there, never here."""
    for key, old, new in step.moves:
        if phase_of(old) not in (None, "pending") or phase_of(new) not in ("bound", "reserved"):
            continue
        for ledger in new["status"].get("grants", ()):
            grant = None if ledger.startswith("tenant/") else step.history.row(f"grant/{ledger.split('/')[0]}")
            if grant is not None and not grant["spec"].get("issuer") and grant["spec"]["holder"].startswith(SCOPE):
                yield key, f"charged {ledger}, which {grant['spec']['holder']} holds"
