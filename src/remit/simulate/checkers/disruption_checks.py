"""Disruption budgets under preemption, drain, rollout; endpoint withdrawal.

Each actor is checked by the state at the revision it had seen, less its own actions since. More cannot be required: a node
may fail at the same moment, and an operator may drain one. But an actor knows what it has claimed in its lease term, and may
not take the last replica twice because its first claim is not visible yet.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from remit.simulate.checkers.progress_checks import decisions
from remit.simulate.checkers.reference.history import History, Step
from remit.simulate.checkers.reference.lifecycle import RUNS
from remit.simulate.checkers.reference.past_states import UP
from remit.simulate.checkers.reference.rows import Entry, Json, group_of, health_of, phase_of
from remit.simulate.checkers.registry import Found, promise

TAKES: Final = ("move evict", "move retire")

GIVEN_UP_BURST: Final = 10
GIVEN_UP_PER_S: Final = 0.1
"""How many nodes of a zone one lease holder may mark unknown at once, and per second after that."""

Group = tuple[str, str]


@promise("S27")
def disruption_leaves_enough(step: Step) -> Found:
    """A drain keeps the declared minimum of available replicas, and a rollout at most maxUnavailable below the desired number.

    Both are checked by the counts at the revision the actor had seen, less what it has taken since. Replicas that are not
    ready do not count.
    """
    history = step.history
    for _, old, new in step.moves:
        history.past.count(step.revision, old, new)
    for entry in step.accepted:
        if entry.did not in TAKES:
            continue
        replica = step.was(entry.subject)
        if replica is None or phase_of(replica) not in UP:
            continue
        group = group_of(replica)
        taken = history.past.spared.setdefault((entry.lease, entry.epoch, group), [])
        unseen = sum(at > entry.seen for at in taken)
        taken.append(step.revision)
        least = _least(step, entry, group, replica)
        there = _at(history.past.up.get(group, []), entry.seen)
        if least and there - unseen - 1 < least:
            why = f"{entry.did} of {entry.id}: {there} were ready at revision {entry.seen}, it has taken {unseen} since"
            yield entry.subject, f"{why}, and {least} must stay"


def _at(counts: list[tuple[int, int]], revision: int) -> int:
    at = bisect_right(counts, revision, key=lambda one: one[0])
    return counts[at - 1][1] if at else 0


def _least(step: Step, entry: Entry, group: Group, replica: Json) -> int:
    """Return how many must stay ready; 0 if that is unknown, or if the drain is forced."""
    workload = step.history.row(f"workload/{group[0]}/{group[1]}")
    if workload is None or workload["metadata"].get("deleting"):
        return 0
    number = workload["metadata"].get("generation", 1)
    found = step.history.rows.get(f"generation/{group[0]}/{group[1]}/{number:08d}")
    if found is None or found[0] > entry.seen or found[1]["spec"]["spec"]["type"] != "service":
        return 0
    spec = found[1]["spec"]["spec"]
    least = int(spec.get("disruption", {}).get("minAvailable", 0))
    if entry.did == "move retire":
        return max(least, int(spec.get("replicas", 1)) - int(spec.get("rollout", {}).get("maxUnavailable", 0)))
    node = step.history.row(f"node/{replica['status']['node']}")
    forced = node is None or node["spec"].get("drainForce") or node["spec"].get("taints")
    return 0 if forced else least


@promise("S28")
def the_last_endpoint_is_not_withdrawn(step: Step) -> Found:
    """The silence of a node proves nothing: an endpoint that may be dead is better than none."""
    for entry in step.accepted:
        if entry.did != "move unserve" or entry.role != "endpoints":
            continue
        replica = step.was(entry.subject)
        if replica is None or phase_of(replica) != "serving":
            continue
        there = _at(step.history.past.serving.get(group_of(replica), []), entry.seen)
        if there < 2:
            yield entry.subject, f"{entry.id} withdraws it, and {there} were serving at revision {entry.seen}"


@promise("S17")
def nodes_are_given_up_one_after_another(step: Step) -> Found:
    """Nodes of one zone become unknown no faster than the rate limit allows; each lease holder is counted separately."""
    history = step.history
    at_ms = 0 if history.latest is None else history.latest[0]
    for key, old, new in step.of_kind("node"):
        if old is None or new is None or step.doubting or (health_of(old), health_of(new)) != ("suspect", "unknown"):
            continue
        epoch = max((entry.epoch for entry in step.accepted if entry.did == "mark"), default=0)
        zone = new["spec"].get("region", ""), new["spec"].get("zone", "")
        times = history.past.silenced.setdefault((epoch, *zone), [])
        times.append(at_ms)
        for index, since_ms in enumerate(times):
            may = GIVEN_UP_BURST + 1 + GIVEN_UP_PER_S * (at_ms - since_ms) / 1000
            if len(times) - index > may:
                yield key, f"{len(times) - index} nodes of {zone} were marked unknown within {at_ms - since_ms} ms, limit {may:.1f}"
                break


@promise("S25")
def preemption_leaves_enough(step: Step) -> Found:
    """Preemption leaves the declared minimum of a workload running, by the revision the claim has seen, less what its scheduler
    has preempted since. Schedulers that record no decisions are not checked.
    """
    history = step.history
    for _, old, new in step.moves:
        group = group_of(new if new is not None else old)
        now, was = phase_of(new) in RUNS, phase_of(old) in RUNS
        if now != was:
            counts = history.past.running.setdefault(group, [])
            counts.append((step.revision, (counts[-1][1] if counts else 0) + now - was))
    by = {entry.subject: entry.lease for entry in step.accepted if entry.did == "explain"}
    history.past.explainers.update(by[key.rpartition("/")[2]] for key, spec in decisions(step) if spec.get("verdict"))
    for entry in step.accepted:
        if entry.did != "reserve" or entry.lease not in history.past.explainers:
            continue
        taken: dict[Group, int] = {}
        for victim in (history.row(entry.subject) or {}).get("status", {}).get("victims", ()):
            replica = history.row(victim)
            if replica is not None:
                taken[group_of(replica)] = taken.get(group_of(replica), 0) + 1
        for group, count in taken.items():
            yield from _enough(history, step, entry, group, count)


def _enough(history: History, step: Step, entry: Entry, group: Group, count: int) -> Found:
    mine = history.past.preempted.setdefault((entry.lease, entry.epoch, group), [])
    unseen = sum(many for at, many in mine if at > entry.seen)
    mine.append((step.revision, count))
    least = _declared(history, group, entry.seen)
    counts = history.past.running.get(group, [])
    at = bisect_right(counts, entry.seen, key=lambda one: one[0])
    there = counts[at - 1][1] if at else 0
    if least and there - unseen - count < least:
        why = f"{entry.id} takes {count} of {'/'.join(group)}, of which {there} ran at revision {entry.seen}"
        yield entry.subject, f"{why}; its scheduler has taken {unseen} since, and {least} must stay"


def _declared(history: History, group: Group, revision: int) -> int:
    """Return the highest minAvailable of the workload's generations that existed at this revision and still exist."""
    prefix = f"generation/{group[0]}/{group[1]}/"
    found = 0
    for key, content in history.kind("generation").items():
        if key.startswith(prefix) and history.rows[key][0] <= revision:
            found = max(found, int(content["spec"]["spec"].get("disruption", {}).get("minAvailable", 0)))
    return found
