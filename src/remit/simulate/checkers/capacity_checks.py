"""Safety: nodes, devices, ledgers, gangs, constraints.

Phases and leases are checked in transition_checks.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from remit.simulate.checkers.reference.history import CommitStep, History
from remit.simulate.checkers.reference.lifecycle import ACTIVE
from remit.simulate.checkers.reference.placement import peer_violation, static_violation
from remit.simulate.checkers.reference.rows import (
    SCOPE_PREFIX,
    WHOLE_DEVICE,
    Json,
    attempt_id,
    group_of,
    health_of,
    holds_capacity,
    is_open,
    milliseconds,
    owner_of,
    phase_of,
)
from remit.simulate.checkers.registry import UNDECIDED, Findings, check_property

PARENT_LEVELS_MAX = 64
HOLDERS_SHOWN = 4


@check_property("S3")
def exclusive_device_has_one_owner(step: CommitStep) -> Findings:
    owners = step.history.sums.owners
    for device in step.history.sums.devices_touched:
        held = owners.get(device, {})
        if len(held) > 1 and (WHOLE_DEVICE in held.values() or sum(held.values()) > WHOLE_DEVICE):
            yield list(held)[-1], f"{device} is held by {held}"


@check_property("S3")
def node_usage_never_rises_above_capacity(step: CommitStep) -> Findings:
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
        if node not in history.capacity and (holders := [key for key, p in history.sums.postings.items() if p.node == node]):
            yield f"node/{node}", f"the node was removed while {holders} hold capacity on it"


def _holders(step: CommitStep, node: str, name: str) -> str:
    """Return some holders, those that this commit changed first, to show whose history to read next."""
    postings = step.history.sums.postings.items()
    holders = sorted((key not in step.changed, key) for key, held in postings if held.node == node and held.on_node.get(name))
    shown = [key for _, key in holders[:HOLDERS_SHOWN]]
    more = f" and {len(holders) - len(shown)} more" if len(holders) > len(shown) else ""
    return f"held by {', '.join(shown)}{more}"


@check_property("S4")
def ledger_charges_never_rise_above_amount(step: CommitStep) -> Findings:
    """Charges and sub-grants of a ledger stay within its amount. A restore counts everything granted on as used, and confirmed
    holdings are accepted as reported: both may raise a sum.
    """
    if step.after_restore or any(entry.operation == "vouch" for entry in step.accepted):
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
        if ledger not in history.limits and (charged := [name for at, name in sums.used if at == ledger]):
            yield ledger, f"the ledger was removed while {charged} of it are charged"


@check_property("S4")
def charges_are_on_own_tenant_and_grants(step: CommitStep) -> Findings:
    """Replicas are charged to their own tenant, and a scheduler charges only grants that it holds or that its scope holds from
    another.
    """
    for key, new in step.placed("bound", "reserved"):
        if holds_capacity(step.row_before(key)):
            continue
        tenant = new["metadata"]["tenant"]
        by = [e for e in step.accepted if e.operation == "gang" or (e.operation in ("bind", "reserve") and e.subject == key)]
        holders = {name for entry in by for name in (entry.actor, entry.lease)}
        for ledger in new["status"].get("grants", ()):
            grant = step.row_before(f"grant/{ledger}") or step.history.row(f"grant/{ledger}")
            spec = {} if grant is None else grant["spec"]
            if grant is None and not ledger.endswith(f"/{tenant}"):  # its quota, or its share of a budget
                yield key, f"{ledger} does not belong to {tenant}"
            elif spec.get("tenant", "") not in ("", tenant):
                yield key, f"{ledger} belongs to {spec['tenant']}, not to {tenant}"
            elif spec and not spec.get("issuer") and spec["holder"] not in holders:
                yield key, f"{ledger} is held by {spec['holder']}, and {sorted(holders)} charged it"


@check_property("S4")
def charged_capacity_is_not_returned(step: CommitStep) -> Findings:
    """No holder returns or closes capacity that is charged. A grant may be reduced below what is charged; then charges stay.

    A reissue after a restore may bring less than is charged; grants reissued in the same batch are skipped, because no row
    shows what was returned in between.
    """
    history = step.history
    reissued = {entry.subject for entry in step.accepted if entry.operation == "accept"}
    for entry in step.accepted:
        if entry.operation not in ("yield", "close") or entry.subject in reissued:
            continue
        before, now = step.ledgers_before.get(entry.subject, {}), history.limits.get(entry.subject, {})
        for name, old_limit in before.items():
            new_limit, charged = now.get(name, 0), history.sums.taken(entry.subject, name)
            if new_limit < old_limit and charged > new_limit:
                yield (
                    f"grant/{entry.subject}",
                    f"{entry.operation} left {new_limit} {name} of {old_limit}, and {charged} of it are charged",
                )


@check_property("S5")
def quota_slices_are_part_of_own_quota(step: CommitStep) -> Findings:
    """Charges on a slice are posted to no other ledger, so a slice must be part of its tenant's own quota, over all levels."""
    grants = step.history.kind("grant")
    changed = {key: (old, new) for key, old, new in step.of_kind("grant")}
    sources_changed = any(old is not None and _source_of(old) != _source_of(new) for old, new in changed.values())
    for key in grants if sources_changed else changed:
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


def _source_of(grant: Json) -> Json:
    return grant and [grant["spec"].get(name) for name in ("purpose", "tenant", "parent", "issuer")]


@check_property("S18")
def hard_constraints_hold_at_bind(step: CommitStep) -> Findings:
    """Evaluated on the state after the batch: exact if nothing later in the batch could have changed it."""
    bound = dict(step.placed("bound"))
    if not bound or _changed_after_a_bind(step):
        return
    freed = any(holds_capacity(old) and not holds_capacity(new) for _, old, new in step.moves)
    exact = not freed and (len(step.accepted) == 1 or len({group_of(new) for _, new in step.placed("bound", "reserved")}) == 1)
    for key, new in bound.items():
        for violation in _violations_at(step.history, new, peers=not freed, spread=exact):
            yield key, violation


def _changed_after_a_bind(step: CommitStep) -> bool:
    """Whether the batch changed an object that constraints depend on after it had bound a replica."""
    binders = [i for i, entry in enumerate(step.accepted) if entry.operation in ("bind", "gang")]
    shapers = [
        i for i, entry in enumerate(step.accepted) if entry.operation in ("apply", "delete", "mark", "adopt", "rollback")
    ]
    return bool(binders and shapers and max(shapers) > min(binders))


def _violations_at(history: History, replica: Json, *, peers: bool, spread: bool) -> Iterator[str]:
    """Yield the hard constraints that a bound replica breaks on its node."""
    node = replica["status"]["node"]
    node_attributes, shape = history.reference_nodes.get(node), history.shape(replica)
    if node_attributes is None or shape is None:
        yield f"node {node} does not exist" if node_attributes is None else "the replica has no generation"
        return
    if reason := static_violation(shape, node_attributes, history.policy):
        yield f"bound to {node}: {reason}"
    row = history.row(f"node/{node}")
    if health_of(row) != "ready" or not is_open(row):
        yield f"bound to {node}, which accepts no new work: {row.get('status')} {row['spec']}"
    if peers and (reason := peer_violation(history, shape, node_attributes, spread=spread)):
        yield f"bound to {node}: {reason}"


@check_property("S18")
def assigned_devices_match_request(step: CommitStep) -> Findings:
    for key, new in step.placed("bound", "reserved"):
        shape, assigned = step.history.shape(new), new["status"].get("devices") or {}
        if shape is None or not (shape.device_requests or assigned) or new["status"]["node"] in step.nodes_before:
            continue  # a node that changed in this batch may have had other devices at the time of the bind
        row = step.history.row(f"node/{new['status']['node']}") or {"spec": {}}
        known = {device["name"]: device for device in row["spec"].get("devices", ())}
        charged = {name: n for name, n in shape.charge.items() if name.startswith("devices/") and n}
        if _amounts_by_kind(assigned, known) != charged or not _are_models_allowed(shape.device_requests, assigned, known):
            yield key, f"requested {shape.device_requests}, got {assigned} of {sorted(known)}"


def _amounts_by_kind(assigned: Mapping[str, int], known: Mapping[str, Json]) -> dict[str, int]:
    held: dict[str, int] = {}
    for name, share in assigned.items():
        kind = f"devices/{known.get(name, {}).get('kind', '?')}"
        held[kind] = held.get(kind, 0) + share
    return held


def _are_models_allowed(requests: Sequence[Json], assigned: Iterable[str], known: Mapping[str, Json]) -> bool:
    """Whether each device is of a requested model. A request without models accepts any."""
    if any(not request.get("models") for request in requests):
        return True
    models = {model for request in requests for model in request["models"]}
    return not models or all(known.get(name, {}).get("model") in models for name in assigned)


@check_property("S18")
def deleting_workloads_are_not_placed(step: CommitStep) -> Findings:
    """A workload that is being deleted, before the batch and after it, gets no more capacity."""
    for key, new in step.placed("bound", "reserved"):
        if holds_capacity(step.row_before(key)):
            continue
        owner = owner_of(new)
        versions = step.row_before(owner), step.history.row(owner)
        if all(row is not None and row["metadata"].get("deleting") for row in versions):
            yield key, f"it was placed although {owner} is being deleted"


@check_property("S18")
def victims_have_lower_priority(step: CommitStep) -> Findings:
    """Preemption takes capacity only from replicas of lower priority, on the node where it is needed, and only if the class may
    preempt.
    """
    for key, new in step.placed("reserved"):
        priority = new["spec"].get("priority", 0)
        if new["status"].get("victims") and not _may_preempt(step, new):
            yield key, "its priority class may not preempt"
        for victim in new["status"].get("victims", {}):
            victim_row = step.row_before(victim) or step.history.row(victim)
            if victim_row is None or victim_row["spec"].get("priority", 0) >= priority:
                yield key, f"{victim} has priority {victim_row and victim_row['spec'].get('priority', 0)}, not below {priority}"
            elif victim_row["status"].get("node") != new["status"]["node"]:
                yield (
                    key,
                    f"{victim} is on {victim_row['status'].get('node')}, and capacity is needed on {new['status']['node']}",
                )


def _may_preempt(step: CommitStep, replica: Json) -> bool:
    """Whether its class may preempt, before the batch or after it: either may have been in force at the decision."""
    owner = owner_of(replica)
    for workload in (step.row_before(owner), step.history.row(owner)):
        named = "" if workload is None else workload["spec"].get("priorityClass", "")
        for priority_class in (step.row_before(f"priorityclass/{named}"), step.history.row(f"priorityclass/{named}")):
            if priority_class is None or priority_class["spec"].get("preempts", True):
                return True
    return False


@check_property("S18")
def placement_policy_is_recorded_and_in_force(step: CommitStep) -> Findings:
    times = step.times
    for key, new in step.placed("bound", "reserved"):
        policies = [step.policy_before, step.history.policy]
        numbers = [0 if policy is None else policy["number"] for policy in policies]
        if not min(numbers) <= new["status"].get("policy", 0) <= max(numbers):
            yield key, f"placed under policy {new['status'].get('policy', 0)}; in force is {numbers}"
        if not any(_in_force(policy, times.boot, times.decided_ms) for policy in policies):
            yield key, f"placed under policy {numbers} after its lease expired, at {times.decided_ms} on {times.boot}"
        elif not any(_in_force(policy, times.boot, times.applied_ms) for policy in policies):
            yield key, f"{UNDECIDED} a policy's lease expired between a decision under it and its commit"


def _in_force(policy: Json, boot: str, now_ms: int) -> bool:
    deadline = None if policy is None else policy.get("deadline")
    return not deadline or bool(deadline["boot"] == boot and now_ms < deadline["atMs"])


@check_property("S18")
def fenced_replicas_wait_for_all_nodes_after_restore(step: CommitStep) -> Findings:
    """After a restore, work that was pending in the backup may be running on a node that has not reported since."""
    unreported = step.history.unreported_nodes
    if not unreported:
        return
    for key, new in step.placed("bound"):
        shape, node = step.history.shape(new), new["status"]["node"]
        if node in unreported:
            yield key, f"it was bound to {node}, which has not reported since a restore"
        elif shape is not None and shape.fenced:
            yield key, f"it must never run twice, and was bound while {sorted(unreported)} have not reported since a restore"


@check_property("S12")
def gangs_are_bound_together(step: CommitStep) -> Findings:
    newly: dict[tuple[str, str], list[str]] = {}
    for key, new in step.placed("bound"):
        shape = step.history.shape(new)
        if shape is not None and shape.gang:
            newly.setdefault(group_of(new), []).append(key)
    for group, keys in newly.items():
        shapes = [step.history.shape(step.history.row(key)) for key in keys]
        minimum = max(shape.gang for shape in shapes if shape is not None)
        members = step.history.members.get(group, {})
        running = [k for k in members if phase_of(step.row_before(k)) in ACTIVE]
        if len(keys) < minimum and len(running) < minimum:
            yield keys[0], f"{len(keys)} members were bound and {len(running)} were running; the gang's minimum is {minimum}"


@check_property("S5")
def reservations_are_committed_once_or_released(step: CommitStep) -> Findings:
    for key, old, new in step.moves:
        if new is None:
            continue
        status = new.get("status", {})
        if phase_of(old) == "reserved" and phase_of(new) == "bound":
            a = old["status"]
            if any(a.get(name) != status.get(name) for name in ("node", "devices", "grants", "attempt")):
                yield key, f"reserved as {a}, bound as {status}"
            remaining = [victim for victim, copy in a.get("victims", {}).items() if _held_throughout(step, victim, copy)]
            if remaining:
                yield key, f"bound before its victims {remaining} were gone"
        if not holds_capacity(new) and any(status.get(name) for name in ("devices", "grants", "victims")):
            yield key, f"holds no capacity, but has {status}"
        if phase_of(new) != "reserved" and status.get("victims"):
            yield key, f"has victims without a reservation: {status}"


def _held_throughout(step: CommitStep, victim: str, attempt: str) -> bool:
    """Whether this attempt of the victim held its capacity both before the batch and after it."""
    versions = step.row_before(victim), step.history.row(victim)
    return all(row is not None and holds_capacity(row) and attempt_id(row) == attempt for row in versions)


@check_property("S5")
def charges_are_on_live_grants(step: CommitStep) -> Findings:
    """Nothing is charged to a grant that has expired, or is closed or void. An earlier charge of a reservation stays charged,
    and is bound as it was reserved (`reservations_are_committed_once_or_released`).
    """
    times = step.times
    for key, old, new in step.moves:
        if phase_of(old) not in (None, "pending") or phase_of(new) not in ("bound", "reserved"):
            continue
        for ledger in new["status"].get("grants", ()):
            if ledger.startswith("tenant/") or _changed_repeatedly(step, ledger.split("/")[0]):
                continue
            dead = [_dead_reason(step, ledger, times.decided_ms, before) for before in (True, False)]
            if all(dead):
                yield key, f"charged {ledger}: {dead[1]}"
            elif all(_dead_reason(step, ledger, times.applied_ms, before) for before in (True, False)):
                yield key, f"{UNDECIDED} a grant expired between a charge on it and its commit"


def _changed_repeatedly(step: CommitStep, name: str) -> bool:
    """Whether the grant was changed more than once in this batch. It may have been alive in between, which no row shows."""
    return sum(entry.subject == name for entry in step.accepted) > 1


def _dead_reason(step: CommitStep, ledger: str, now_ms: int, before: bool) -> str:
    """Return why nothing may be charged to the ledger, as of before or after the commit; empty if it was alive."""
    history, name = step.history, ledger.split("/")[0]
    for _ in range(PARENT_LEVELS_MAX):
        key = f"grant/{name}"
        grant = step.row_before(key) if before else history.row(key)
        if grant is None:
            return f"{name} does not exist"
        # The version that was just replaced may be older than the current leader's takeover.
        fresh = before if key in step.changed else history.rows[key][0] < history.takeover_revision
        if reason := grant_dead_reason(history, key, grant, step.times.boot, now_ms, fresh=fresh):
            return reason
        parent = "" if grant["spec"].get("issuer") else grant["spec"].get("parent", "")
        if not parent or parent.startswith("tenant/"):
            return ""
        name = parent
    return f"{ledger} has more than {PARENT_LEVELS_MAX} levels of parents"


def grant_dead_reason(history: History, key: str, grant: Json, boot: str, now_ms: int, *, fresh: bool) -> str:
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
        takeover = history.first_batch_times or history.takeover_times
        until = max(until, (takeover.sent_ms if takeover is not None else 0) + milliseconds(spec["ttl"]))
    return f"{key} expired at {until} on {deadline['boot']}, and it is {now_ms} on {boot}" if now_ms >= until else ""


@check_property("S4")
def grants_are_charged_only_in_holding_scope(step: CommitStep) -> Findings:
    """Only the holder of a grant charges it: a grant issued to another scope is charged there, never here."""
    for key, old, new in step.moves:
        if phase_of(old) not in (None, "pending") or phase_of(new) not in ("bound", "reserved"):
            continue
        for ledger in new["status"].get("grants", ()):
            grant = None if ledger.startswith("tenant/") else step.history.row(f"grant/{ledger.split('/')[0]}")
            if grant is not None and not grant["spec"].get("issuer") and grant["spec"]["holder"].startswith(SCOPE_PREFIX):
                yield key, f"charged {ledger}, which {grant['spec']['holder']} holds"
