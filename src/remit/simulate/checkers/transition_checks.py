"""Safety: chain, phases, owners, leases, epochs, outcomes.

Sums and capacity are checked in capacity_checks.py.
"""

from __future__ import annotations

import math
from hashlib import sha256
from typing import Final

import msgspec

from remit.simulate.checkers.quota_checks import created_with_workload
from remit.simulate.checkers.reference.history import ID_REFUSALS, CommitStep, History, OperationOutcome
from remit.simulate.checkers.reference.lifecycle import (
    ASSIGNED,
    CLOCK_RATIO_MAX,
    DEFAULT_RETRIES,
    EDGES,
    MASS_SILENCE,
    NODE_EDGES,
    ON_NODE,
    REPORT_FRESH_MS,
    RESULT_EDGES,
    ROLES_WITHOUT_LEASE,
    SILENT_HEALTH,
    SNAPSHOT_FRESH_MS,
)
from remit.simulate.checkers.reference.rows import (
    RESTORE_MARKER,
    BatchEntry,
    Json,
    attempt_of,
    failures_of,
    group_of,
    health_of,
    milliseconds,
    owner_of,
    phase_of,
    replicas_max,
)
from remit.simulate.checkers.registry import Findings, check_property

WORK_OPERATIONS = ("bind", "reserve", "gang", "move", "mark", "spawn", "forget")

PREFIXES_WITH_UID: Final = ("replica/", "workload/", "node/", "grant/", "tenant/")
"""Kinds of objects that have a uid."""

LEASE_TTL: Final = "15s"

ADVERSARY_NODE_PREFIX: Final = "node/meddler-"
"""Prefix of the keys of the adversary's nodes, which have no agent."""

_encode = msgspec.json.Encoder().encode


@check_property("S6")
def chain_is_unbroken(step: CommitStep) -> Findings:
    """Epochs never decrease, sequences increase by one, and count and digest match the rows."""
    old, head = step.changed.get("head", (None, None))
    if head is None:
        yield "head", "commit without a head"
        return
    old = old or {"incarnation": head["incarnation"], "epoch": 0, "sequence": 0, "digest": ""}
    if head["sequence"] != old["sequence"] + 1 or head["epoch"] not in (old["epoch"], old["epoch"] + 1):
        yield "head", f"{old} was followed by {head}"
    if head["incarnation"] != old["incarnation"]:
        yield "head", f"the incarnation changed from {old['incarnation']} to {head['incarnation']} without a restore"
    if step.entries and head["epoch"] != old["epoch"]:
        yield "head", "a takeover decided operations"
    if head["epoch"] == old["epoch"] and head["holder"] != old.get("holder", head["holder"]):
        yield "head", f"{old['holder']} and {head['holder']} wrote in one epoch"
    if head["count"] != len(step.puts) - 1 + len(step.deletes):
        yield "head", f"{head} has a wrong row count"
    if head["digest"] != chain_digest(old, head, step):
        yield "head", f"the digest of {head} does not match its rows after {old}"


def chain_digest(old: Json, head: Json, step: CommitStep) -> str:
    """Recompute the digest of the head from the row bytes."""
    taken = head["epoch"] != old["epoch"]
    before = f"{old['digest']} {head['epoch']} {head['holder']}" if taken else old["digest"]
    rows = [(key, value) for key, value in step.puts if key != "head"]
    hashed = sha256(_encode([before, [[key, len(value)] for key, value in rows], list(step.deletes)]))
    for _, value in rows:
        hashed.update(value)
    return hashed.hexdigest()[:32]


@check_property("S22")
def entries_name_actor_and_operation(step: CommitStep) -> Findings:
    """Every change has an author: an id, an actor in a role, an operation, and evidence that is not from the future.

    Peer messages cite revisions of another scope, so only operations about this scope's work are compared.
    """
    for entry in step.entries:
        if not entry.code and not (entry.id and entry.digest and entry.operation and entry.actor and entry.role):
            yield "head", f"the entry lacks an id, actor, role or operation: {entry}"
        if not entry.code and entry.seen > step.revision and entry.operation.partition(" ")[0] in WORK_OPERATIONS:
            yield "head", f"{entry.id} was decided on revision {entry.seen}, later than its own revision {step.revision}"


@check_property("S16")
def accepted_evidence_was_fresh(step: CommitStep) -> Findings:
    """The evidence of an accepted operation was not older than the operation allows."""
    for entry in step.accepted:
        operation = entry.operation.partition(" ")[0]
        if operation not in ("bind", "reserve", "gang", "move"):
            continue
        age_ms_max = REPORT_FRESH_MS if entry.role == "agent" else SNAPSHOT_FRESH_MS
        if entry.age_ms > age_ms_max:
            yield (
                entry.subject,
                f"{entry.operation} {entry.id} was decided on evidence {entry.age_ms} ms old, limit {age_ms_max}",
            )


@check_property("S7")
def refusals_change_nothing(step: CommitStep) -> Findings:
    if not step.accepted and not step.after_restore:
        for key in step.changed:
            if key != "head" and not key.startswith("batch/"):
                yield key, "changed by a batch that accepted nothing"


@check_property("S1")
def one_binding_per_attempt(step: CommitStep) -> Findings:
    homes = step.history.attempt_nodes
    for key, _, new in step.moves:
        if phase_of(new) not in ASSIGNED:
            continue
        this, node = (new["metadata"]["uid"], attempt_of(new)), new["status"]["node"]
        if homes.setdefault(this, node) != node:
            yield key, f"attempt {this} was bound to {homes[this]}, and is on {node}"


@check_property("S7")
def phase_changes_match_lifecycle_table(step: CommitStep) -> Findings:
    for key in step.missing_deletes:
        if key.startswith("replica/"):
            yield key, "it was deleted, but did not exist"
    for key, old, new in step.moves:
        old_phase, new_phase = phase_of(old), phase_of(new)
        if step.after_restore:
            if (old_phase, new_phase, "authority") not in EDGES:
                yield key, f"a restore moved it from {old_phase} to {new_phase}"
            continue
        named = _entries_that_may_move(step, key, (old or new)["spec"]["workload"], new_phase)
        is_initial = old_phase is None and new_phase == "pending" and created_with_workload(step, new)
        if not is_initial and not any((old_phase, new_phase, entry.role) in EDGES for entry in named):
            yield key, f"from {old_phase} to {new_phase} by {[(e.operation, e.role, e.subject) for e in named]}"
        if old_phase == "unknown" and new_phase in ON_NODE and old["status"].get("before") != new_phase:
            yield key, f"it was {old['status'].get('before')} before unknown, and resumed as {new_phase}"


def _entries_that_may_move(step: CommitStep, key: str, workload: str, phase: str | None) -> list[BatchEntry]:
    """Return the accepted operations of this batch that can have moved a replica to this phase."""
    return [
        entry
        for entry in step.accepted
        if entry.subject in (key, workload)
        or entry.operation == "gang"
        or (entry.operation == "reserve" and phase == "draining")
    ]


@check_property("S16")
def restore_marks_replicas_and_nodes_unknown(step: CommitStep) -> Findings:
    """Rows of a backup are outdated: before any component acts on them, everything that may have run on nodes is marked
    unknown.
    """
    if not step.after_restore or step.history.row(RESTORE_MARKER) != step.history.incarnations[-1]:
        return
    for key, replica in step.history.kind("replica").items():
        if phase_of(replica) in ON_NODE:
            yield key, f"it is {phase_of(replica)} according to the backup only"
    for key, node in step.history.kind("node").items():
        if health_of(node) != "unknown":
            yield key, f"it is {health_of(node)} according to the backup only"


@check_property("S7")
def agents_change_only_own_replicas(step: CommitStep) -> Findings:
    for entry in step.accepted:
        if entry.role != "agent" or entry.subject not in step.changed or not entry.subject.startswith("replica/"):
            continue
        replica = step.row_before(entry.subject) or {}
        node = replica.get("status", {}).get("node", "")
        if entry.lease != f"agent/{node}":
            yield entry.subject, f"{entry.actor}, with lease {entry.lease}, moved a replica on {node or 'no node'}"


@check_property("S6")
def accepted_operations_hold_their_lease(step: CommitStep) -> Findings:
    """Fencing: operations are accepted only at the epoch in the lease's row, from its holder."""
    for entry in step.accepted:
        if entry.role in ROLES_WITHOUT_LEASE or entry.operation in ("acquire", "abandon"):
            continue
        key = f"lease/{entry.lease}"
        rows = [row["spec"] for row in (step.row_before(key), step.history.row(key)) if row is not None]
        # A vacate removes the holder in the same batch and keeps the epoch.
        if not any(spec.get("epoch", 0) == entry.epoch and spec.get("holder", "") in (entry.actor, "") for spec in rows):
            yield key, f"{entry.actor} acted at epoch {entry.epoch} of {entry.lease}: {rows}"
        if entry.operation == "vacate" and entry.subject != entry.lease:
            yield key, f"{entry.actor}, holder of {entry.lease}, vacated {entry.subject}"
        if entry.lease != entry.role and not entry.lease.startswith(f"{entry.role}/"):
            yield key, f"{entry.lease} is not a lease of role {entry.role}"


@check_property("S6")
def lease_epochs_never_decrease(step: CommitStep) -> Findings:
    """Also over restores: an epoch that was ever used is never given to another holder."""
    used_epochs = step.history.lease_epochs
    for key, old, new in step.of_kind("lease"):
        if new is None:
            continue
        a, b = {} if old is None else old["spec"], new["spec"]
        if b.get("epoch", 0) < a.get("epoch", 0):
            yield key, f"its epoch fell from {a.get('epoch', 0)} to {b.get('epoch', 0)}"
        if b.get("holder", "") not in ("", a.get("holder", "")) and b.get("epoch", 0) <= used_epochs.get(
            key.removeprefix("lease/"), 0
        ):
            yield key, f"{b['holder']} took it at epoch {b.get('epoch', 0)}, which was used before"
    for entry in step.accepted:
        if entry.role in ROLES_WITHOUT_LEASE or entry.operation in ("acquire", "abandon"):
            continue
        if entry.epoch < used_epochs.get(entry.lease, 0):
            yield f"lease/{entry.lease}", f"{entry.actor} acted at epoch {entry.epoch}, after {used_epochs[entry.lease]}"
        used_epochs[entry.lease] = max(entry.epoch, used_epochs.get(entry.lease, 0))


@check_property("S6")
def valid_leases_are_not_taken_over(step: CommitStep) -> Findings:
    """A holder whose renewal succeeded keeps its lease for a term, counted from when it sent the renewal, unless it vacates the
    lease.
    """
    history, times = step.history, step.times
    at_ms = 0 if history.latest_commit is None else history.latest_commit[0]
    vacated = {entry.subject for entry in step.accepted if entry.operation == "vacate"}
    for key, old, new in step.of_kind("lease"):
        lease, a, b = key.removeprefix("lease/"), {} if old is None else old["spec"], {} if new is None else new["spec"]
        if a.get("epoch", 0) == b.get("epoch", 0):
            continue
        epoch, since_ms = history.terms.get(lease, (0, 0.0))
        taken = a.get("holder", "") and b.get("holder", "") not in ("", a["holder"])
        if taken and epoch == a["epoch"] and lease not in vacated and not step.after_restore:
            term_ms = milliseconds(a.get("ttl", LEASE_TTL)) / CLOCK_RATIO_MAX
            if at_ms - since_ms < term_ms:
                yield key, f"{b['holder']} took it {at_ms - since_ms:.0f} ms after {a['holder']} renewed it, term {term_ms:.0f}"
        if times.boot:  # it was decided before it was applied, on a clock that may be fast
            history.renew(lease, b.get("epoch", 0), at_ms - (times.applied_ms - times.decided_ms) * CLOCK_RATIO_MAX)


@check_property("S2")
def one_outcome_per_operation(step: CommitStep) -> Findings:
    outcomes, revision = step.history.outcomes, step.revision
    for entry in step.entries:
        if entry.code in ID_REFUSALS:
            continue
        outcome = OperationOutcome(entry.digest, entry.number, entry.code, revision, entry.seen)
        before = outcomes.setdefault(entry.id, outcome)
        if before is not outcome and before != outcome and entry.code != "invalid":
            yield "head", f"operation {entry.id} had outcome {before}, and then {outcome}"


@check_property("S2")
def abandoned_operations_are_not_applied(step: CommitStep) -> Findings:
    """An operation reported as abandoned was not applied, and never will be."""
    history, in_batch = step.history, {entry.id: entry for entry in step.entries if entry.code not in ID_REFUSALS}
    for entry in step.entries:
        if entry.operation != "abandon" or entry.code != "abandoned":
            continue
        target, outcome = entry.subject, history.outcomes.get(entry.subject) or in_batch.get(entry.subject)
        if outcome is not None and outcome.code != "abandoned":
            yield "head", f"operation {target} was abandoned by {entry.id}, but had outcome {outcome}"
        history.abandoned.add(target)
    for operation, entry in in_batch.items():
        if operation in history.abandoned and entry.code != "abandoned":
            yield "head", f"operation {operation} was abandoned, but got outcome {entry.code or 'accepted'}"


@check_property("S2")
def operation_ids_are_executed_within_window(step: CommitStep) -> Findings:
    """An id is valid in the incarnation that issued it, from its window on, for as long as outcomes of that window are
    retained.
    """
    head = step.history.head or {}
    for key, (_, batch) in step.changed.items():
        if not key.startswith("batch/") or batch is None:
            continue
        for entry in (BatchEntry(*fields) for fields in batch["entries"]):
            if entry.code:
                continue
            incarnation, _, rest = entry.id.partition(".")
            window = rest.partition(".")[0]
            if incarnation != head.get("incarnation"):
                yield "head", f"{entry.id} was executed in incarnation {head.get('incarnation')}"
            elif not window.isdigit() or not step.horizon_before <= int(window) <= batch["window"]:
                yield "head", f"{entry.id} was executed while windows {step.horizon_before} to {batch['window']} were valid"


@check_property("S15")
def attempts_have_one_result(step: CommitStep) -> Findings:
    results = step.history.results
    for key, old, new in step.moves:
        if new is None:
            continue
        if old is not None:
            rise = attempt_of(new) - attempt_of(old)
            if rise != (phase_of(old) == "released" and phase_of(new) == "pending"):
                yield key, f"attempt {attempt_of(old)} became {attempt_of(new)}"
            crashed = phase_of(new) == "failed" and phase_of(old) in ("starting", "running", "ready", "serving")
            if failures_of(new) - failures_of(old) != crashed:
                yield (
                    key,
                    f"its failures went from {failures_of(old)} to {failures_of(new)} on {phase_of(old)} to {phase_of(new)}",
                )
        result = new.get("status", {}).get("result", "")
        if not result:
            continue
        this = new["metadata"]["uid"], attempt_of(new)
        if this not in results:
            roles = [e.role for e in step.accepted if e.subject == key]
            if not any((phase_of(new), role) in RESULT_EDGES for role in roles):
                yield key, f"{phase_of(new)} by {roles} does not end an attempt, but set the result {result}"
        if results.setdefault(this, result) != result:
            yield key, f"attempt {this} had result {results[this]}, and then {result}"


@check_property("S9")
def new_attempt_follows_release_of_previous(step: CommitStep) -> Findings:
    history = step.history
    for key, old, new in step.moves:
        if phase_of(new) == "released":
            history.released_attempts[new["metadata"]["uid"], attempt_of(new)] = str(phase_of(old))
        elif phase_of(new) in ("reserved", "bound") and phase_of(old) in (None, "pending"):
            last = new["metadata"]["uid"], attempt_of(new) - 1
            if last[1] and last not in history.released_attempts:
                yield key, f"attempt {last[1] + 1} was placed, but attempt {last[1]} was not released"


@check_property("S15")
def only_retryable_replicas_are_requeued(step: CommitStep) -> Findings:
    """A job that succeeded is not run again, and one that failed is retried only as often as its spec allows."""
    for key, old, new in step.moves:
        if (phase_of(old), phase_of(new)) != ("released", "pending"):
            continue
        owner = owner_of(new)
        specs = [row["spec"] for row in (step.row_before(owner), step.history.row(owner)) if row is not None]
        if any(spec.get("type", "job") != "job" for spec in specs):
            continue
        if old["status"].get("result") == "ok":
            yield key, "it is queued again, although it succeeded"
        elif failures_of(old) > max((spec.get("retries", DEFAULT_RETRIES) for spec in specs), default=DEFAULT_RETRIES):
            yield key, f"it is queued again after {failures_of(old)} failures, of {specs}"


@check_property("S9")
def attempts_are_lost_only_after_fence(step: CommitStep) -> Findings:
    """An attempt is declared lost only after its agent was silent for the complete fence.

    Renewals are in no row. The check therefore uses the acquisition of the lease, the takeover, which restarts the term of
    every lease, and the renewals that were answered to the agent.
    """
    history, times = step.history, step.times
    at_ms = 0 if history.latest_commit is None else history.latest_commit[0]
    for key, old, new in step.moves:
        if (phase_of(old), phase_of(new)) != ("unknown", "failed") or history.takeover_times is None:
            continue
        shape, lease = history.shape(new), f"agent/{new['status']['node']}"
        since = history.takeover_times.sent_ms
        if lease in history.lease_acquired:
            since = max(since, history.lease_acquired[lease].decided_ms)
        if shape is None or history.takeover_times.boot != times.boot:
            continue
        if times.sent_ms - since < shape.lost_after_ms:
            yield key, f"declared lost {times.sent_ms - since} ms after its agent was last heard, limit {shape.lost_after_ms}"
        renewed_ms = history.terms.get(lease, (0, -math.inf))[1]
        if f"lease/{lease}" in step.changed:
            renewed_ms = -math.inf  # acquired in this very batch, after the attempt was declared lost
        if at_ms - renewed_ms < shape.lost_after_ms / CLOCK_RATIO_MAX:
            yield key, f"declared lost {at_ms - renewed_ms:.0f} ms after its agent sent a renewal of {lease} that succeeded"
    for entry in step.accepted:
        if entry.operation == "acquire":
            history.lease_acquired[entry.subject] = times


@check_property("S17")
def evictions_stop_at_mass_silence(step: CommitStep) -> Findings:
    """While most nodes are silent, nothing on them is declared lost: so many nodes do not fail at once, but the network may.

    The adversary's nodes have no agent and are not counted.
    """
    declared_lost = [key for key, old, new in step.moves if (phase_of(old), phase_of(new)) == ("unknown", "failed")]
    if not declared_lost:
        return
    nodes = {key: node for key, node in step.history.kind("node").items() if not key.startswith(ADVERSARY_NODE_PREFIX)}
    silent = sorted(key for key, node in nodes.items() if health_of(node) in SILENT_HEALTH)
    if len(nodes) > 2 and len(silent) >= MASS_SILENCE * len(nodes):
        yield declared_lost[0], f"{declared_lost} were declared lost while {silent} of {len(nodes)} nodes are silent"


@check_property("S13")
def replicas_stay_within_desired_and_surge(step: CommitStep) -> Findings:
    """Unreleased replicas stay within the desired number plus the surge; more may remain after a reduction."""
    rises: dict[tuple[str, str], int] = {}
    for _, old, new in step.moves:
        for replica, sign in ((old, -1), (new, 1)):
            if replica is not None and phase_of(replica) != "released":
                rises[group_of(replica)] = rises.get(group_of(replica), 0) + sign
    for group, rise in rises.items():
        if rise <= 0:
            continue
        key = f"workload/{group[0]}/{group[1]}"
        if sum(entry.operation in ("apply", "delete") and entry.subject == key for entry in step.accepted) > 1:
            continue  # the desired number in the middle of the batch is in no row
        versions = [row for row in (step.row_before(key), step.history.row(key)) if row is not None]
        limits = [replicas_max(row) for row in versions if not row["metadata"].get("deleting")]
        if not limits:
            yield key, f"{rise} more replicas of a workload that is gone or being deleted"
        elif None not in limits and step.history.active[group] > max(limit or 0 for limit in limits):
            yield key, f"{step.history.active[group]} replicas are not released; desired with surge: {limits}"


@check_property("S7")
def node_health_is_changed_by_its_owner(step: CommitStep) -> Findings:
    for key, old, new in step.of_kind("node"):
        if new is None:
            continue
        old_health, new_health = "joining" if old is None else health_of(old), health_of(new)
        if old_health == new_health or (step.after_restore and new_health == "unknown"):
            continue  # after a restore every node is unknown
        marks = [e for e in step.accepted if e.operation == "mark" and e.subject == key.removeprefix("node/")]
        if (old_health, new_health) not in NODE_EDGES or not any(e.role == "node-lifecycle" for e in marks):
            yield key, f"its health went from {old_health} to {new_health} by {[(e.operation, e.role) for e in step.accepted]}"


@check_property("S16")
def uids_are_never_reused(step: CommitStep) -> Findings:
    """Also across restores: a component that still refers to a lost uid must not find another object under it."""
    assigned = step.history.uids
    for key, (old, new) in step.changed.items():
        if old is not None or new is None or not key.startswith(PREFIXES_WITH_UID):
            continue
        uid = new.get("metadata", {}).get("uid", "")
        if uid in assigned:
            yield key, f"uid {uid} was assigned to {assigned[uid]} before"
        elif uid:
            assigned[uid] = key


@check_property("S16")
def objects_in_use_are_not_removed(step: CommitStep) -> Findings:
    history = step.history
    for key in history.sums.without_generation:
        yield key, "it holds capacity, but its generation is gone"
    for key, (old, new) in step.changed.items():
        if old is None or new is not None:
            continue
        kind, _, name = key.partition("/")
        if kind == "workload" and (members := history.members.get((old["metadata"]["tenant"], old["metadata"]["name"]))):
            yield key, f"it was removed before its replicas {sorted(members)}"
        elif kind == "tenant":
            remaining = sorted(group for group in history.members if group[0] == name)
            if remaining:
                yield key, f"it was removed before its workloads {remaining}"
        elif kind in ("priorityclass", "region"):
            users = _referrers(history, kind, name)
            if users and all(step.row_before(user) is not None for user in users):
                yield key, f"it was removed while {users} refer to it"


def _referrers(history: History, kind: str, name: str) -> list[str]:
    if kind == "region":
        return [key for key, node in history.kind("node").items() if node["spec"].get("region") == name]
    return [key for key, work in history.kind("workload").items() if work["spec"].get("priorityClass", "") == name]
