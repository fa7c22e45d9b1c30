"""Disruption budgets under preemption, drain, rollout; endpoint withdrawal.

Each actor is checked by the state at the revision it had seen, less its own actions since. More cannot be required: a node
may fail at the same moment, and an operator may drain one. But an actor knows what it has claimed in its lease term, and may
not take the last replica twice because its first claim is not visible yet.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from remit.simulate.checkers.progress_checks import decisions
from remit.simulate.checkers.reference.history import CommitStep, History
from remit.simulate.checkers.reference.lifecycle import ACTIVE
from remit.simulate.checkers.reference.past_states import READY_PHASES
from remit.simulate.checkers.reference.rows import BatchEntry, Json, group_of, health_of, phase_of
from remit.simulate.checkers.registry import Findings, check_property

DISRUPTING_OPERATIONS: Final = ("move evict", "move retire")

UNKNOWN_BURST: Final = 10
UNKNOWN_PER_S: Final = 0.1
"""How many nodes of a zone one lease holder may mark unknown at once, and per second after that."""

WorkloadKey = tuple[str, str]


@check_property("S27")
def disruption_keeps_min_available(step: CommitStep) -> Findings:
    """A drain keeps the declared minimum of available replicas, and a rollout at most maxUnavailable below the desired number.

    Both are checked by the counts at the revision the actor had seen, less what it has taken since. Replicas that are not
    ready do not count.
    """
    history = step.history
    for _, old, new in step.moves:
        history.past.count(step.revision, old, new)
    for entry in step.accepted:
        if entry.operation not in DISRUPTING_OPERATIONS:
            continue
        replica = step.row_before(entry.subject)
        if replica is None or phase_of(replica) not in READY_PHASES:
            continue
        group = group_of(replica)
        taken = history.past.evicted.setdefault((entry.lease, entry.epoch, group), [])
        unseen = sum(at > entry.seen for at in taken)
        taken.append(step.revision)
        required = _required(step, entry, group, replica)
        ready = _count_at(history.past.ready_counts.get(group, []), entry.seen)
        if required and ready - unseen - 1 < required:
            reason = (
                f"{entry.operation} of {entry.id}: {ready} were ready at revision {entry.seen}, it has taken {unseen} since"
            )
            yield entry.subject, f"{reason}, and {required} must stay"


def _count_at(counts: list[tuple[int, int]], revision: int) -> int:
    at = bisect_right(counts, revision, key=lambda item: item[0])
    return counts[at - 1][1] if at else 0


def _required(step: CommitStep, entry: BatchEntry, group: WorkloadKey, replica: Json) -> int:
    """Return how many must stay ready; 0 if that is unknown, or if the drain is forced."""
    workload = step.history.row(f"workload/{group[0]}/{group[1]}")
    if workload is None or workload["metadata"].get("deleting"):
        return 0
    number = workload["metadata"].get("generation", 1)
    generation_row = step.history.rows.get(f"generation/{group[0]}/{group[1]}/{number:08d}")
    if generation_row is None or generation_row[0] > entry.seen or generation_row[1]["spec"]["spec"]["type"] != "service":
        return 0
    spec = generation_row[1]["spec"]["spec"]
    minimum = int(spec.get("disruption", {}).get("minAvailable", 0))
    if entry.operation == "move retire":
        return max(minimum, int(spec.get("replicas", 1)) - int(spec.get("rollout", {}).get("maxUnavailable", 0)))
    node = step.history.row(f"node/{replica['status']['node']}")
    forced = node is None or node["spec"].get("drainForce") or node["spec"].get("taints")
    return 0 if forced else minimum


@check_property("S28")
def last_endpoint_is_not_withdrawn(step: CommitStep) -> Findings:
    """The silence of a node proves nothing: an endpoint that may be dead is better than none."""
    for entry in step.accepted:
        if entry.operation != "move unserve" or entry.role != "endpoints":
            continue
        replica = step.row_before(entry.subject)
        if replica is None or phase_of(replica) != "serving":
            continue
        serving = _count_at(step.history.past.serving_counts.get(group_of(replica), []), entry.seen)
        if serving < 2:
            yield entry.subject, f"{entry.id} withdraws it, and {serving} were serving at revision {entry.seen}"


@check_property("S17")
def marking_nodes_unknown_is_rate_limited(step: CommitStep) -> Findings:
    """Nodes of one zone become unknown no faster than the rate limit allows; each lease holder is counted separately."""
    history = step.history
    at_ms = 0 if history.latest_commit is None else history.latest_commit[0]
    for key, old, new in step.of_kind("node"):
        if old is None or new is None or step.after_restore or (health_of(old), health_of(new)) != ("suspect", "unknown"):
            continue
        epoch = max((entry.epoch for entry in step.accepted if entry.operation == "mark"), default=0)
        zone = new["spec"].get("region", ""), new["spec"].get("zone", "")
        times = history.past.became_unknown.setdefault((epoch, *zone), [])
        times.append(at_ms)
        for index, since_ms in enumerate(times):
            limit = UNKNOWN_BURST + 1 + UNKNOWN_PER_S * (at_ms - since_ms) / 1000
            if len(times) - index > limit:
                yield (
                    key,
                    f"{len(times) - index} nodes of {zone} were marked unknown within {at_ms - since_ms} ms, limit {limit:.1f}",
                )
                break


@check_property("S25")
def preemption_keeps_min_available(step: CommitStep) -> Findings:
    """Preemption leaves the declared minimum of a workload running, by the revision the claim has seen, less what its scheduler
    has preempted since. Schedulers that record no decisions are not checked.
    """
    history = step.history
    for _, old, new in step.moves:
        group = group_of(new if new is not None else old)
        now, was = phase_of(new) in ACTIVE, phase_of(old) in ACTIVE
        if now != was:
            counts = history.past.running_counts.setdefault(group, [])
            counts.append((step.revision, (counts[-1][1] if counts else 0) + now - was))
    by = {entry.subject: entry.lease for entry in step.accepted if entry.operation == "explain"}
    history.past.recording_leases.update(by[key.rpartition("/")[2]] for key, spec in decisions(step) if spec.get("verdict"))
    for entry in step.accepted:
        if entry.operation != "reserve" or entry.lease not in history.past.recording_leases:
            continue
        taken: dict[WorkloadKey, int] = {}
        for victim in (history.row(entry.subject) or {}).get("status", {}).get("victims", ()):
            replica = history.row(victim)
            if replica is not None:
                taken[group_of(replica)] = taken.get(group_of(replica), 0) + 1
        for group, count in taken.items():
            yield from _check_preemption(history, step, entry, group, count)


def _check_preemption(history: History, step: CommitStep, entry: BatchEntry, group: WorkloadKey, count: int) -> Findings:
    preempted = history.past.preempted.setdefault((entry.lease, entry.epoch, group), [])
    unseen = sum(number for at, number in preempted if at > entry.seen)
    preempted.append((step.revision, count))
    minimum = _min_available(history, group, entry.seen)
    counts = history.past.running_counts.get(group, [])
    at = bisect_right(counts, entry.seen, key=lambda item: item[0])
    running = counts[at - 1][1] if at else 0
    if minimum and running - unseen - count < minimum:
        reason = f"{entry.id} takes {count} of {'/'.join(group)}, of which {running} ran at revision {entry.seen}"
        yield entry.subject, f"{reason}; its scheduler has taken {unseen} since, and {minimum} must stay"


def _min_available(history: History, group: WorkloadKey, revision: int) -> int:
    """Return the highest minAvailable of the workload's generations that existed at this revision and still exist."""
    prefix = f"generation/{group[0]}/{group[1]}/"
    minimum = 0
    for key, content in history.kind("generation").items():
        if key.startswith(prefix) and history.rows[key][0] <= revision:
            minimum = max(minimum, int(content["spec"]["spec"].get("disruption", {}).get("minAvailable", 0)))
    return minimum
