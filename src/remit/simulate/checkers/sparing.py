"""Do those who take work away leave enough of it? Drains, rollouts, endpoints and what is given up, by what each had seen.

Nobody promises more: a node may fail at the same moment. But whoever acts knows what it has asked for itself in its term.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from remit.simulate.checkers.history import Step
from remit.simulate.checkers.past import UP
from remit.simulate.checkers.promise import Found, promise
from remit.simulate.checkers.rows import Entry, Json, group_of, health_of, phase_of

TAKES: Final = ("move evict", "move retire")

GIVEN_UP_BURST: Final = 10
GIVEN_UP_PER_S: Final = 0.1
"""How many nodes of a zone one holder of the role calls unknown at once, and a second after that."""

Group = tuple[str, str]


@promise("S27")
def disruption_leaves_enough(step: Step) -> Found:
    """A drain keeps what a service declares to keep available, and a rollout what it may not miss; each by the counts at the
    revision that it had seen, less what it took itself since. What is not ready is nothing to keep.
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
            yield entry.subject, f"{why}, and {least} are to stay"


def _at(counts: list[tuple[int, int]], revision: int) -> int:
    at = bisect_right(counts, revision, key=lambda one: one[0])
    return counts[at - 1][1] if at else 0


def _least(step: Step, entry: Entry, group: Group, replica: Json) -> int:
    """How many must stay; 0 where nobody can say, or it was meant to go whatever it disrupts."""
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
    """That a node is silent proves nothing: an endpoint that may be dead is better than none."""
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
    """Of one zone no more become unknown at a time than its rate allows; each holder of the role counts for itself."""
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
                yield key, f"{len(times) - index} nodes of {zone} were given up within {at_ms - since_ms} ms, of {may:.1f}"
                break
