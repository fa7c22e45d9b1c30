"""Does a preemption leave a workload what it declares to keep? Judged by what the scheduler had seen, and had asked for itself.

Nobody promises more than that: a node may fail at the same moment, and an operator may drain one. But a scheduler knows what it
has claimed in its term, and may not take the last copy twice because the first claim does not show yet.
"""

from __future__ import annotations

from bisect import bisect_right

from remit.simulate.checkers.history import History, Step
from remit.simulate.checkers.lifecycle import RUNS
from remit.simulate.checkers.promise import Found, promise
from remit.simulate.checkers.rows import Entry, group_of, phase_of
from remit.simulate.checkers.tries import decisions

Group = tuple[str, str]


@promise("S25")
def preemption_leaves_enough(step: Step) -> Found:
    """Of a workload that declares a minimum as many run, by what the claim has seen, less all that its claimant has preempted
    since. Those who explain nothing are not asked: they guess.
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
        yield entry.subject, f"{why}; its claimant has taken {unseen} since, and {least} are to stay"


def _declared(history: History, group: Group, revision: int) -> int:
    """The most that any generation of it which stood at this revision, and stands, wants to keep."""
    prefix = f"generation/{group[0]}/{group[1]}/"
    found = 0
    for key, content in history.kind("generation").items():
        if key.startswith(prefix) and history.rows[key][0] <= revision:
            found = max(found, int(content["spec"]["spec"].get("disruption", {}).get("minAvailable", 0)))
    return found
