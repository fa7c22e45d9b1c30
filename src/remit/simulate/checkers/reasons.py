"""Does a scheduler say what it does, in time, and does what it says add up? Decisions against the rows that they speak of.

What a decision says it has seen is a revision. So it is compared with how things stood at that revision, and never with how
they stand by the time it is written down: a scheduler may be late, and may not make things up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from remit.simulate.checkers.history import History, Step
from remit.simulate.checkers.liveness import Core, Liveness, Waiting, look
from remit.simulate.checkers.overriding import shown_at
from remit.simulate.checkers.promise import Found, promise
from remit.simulate.checkers.rows import Json
from remit.simulate.checkers.tries import decisions


@promise("S22")
def decisions_add_up(step: Step) -> Found:
    """Every node is counted once: where it was refused, or among those that fit; there were as many at the revision that the
    decision has seen, which was there before it; and what waits has a reason, and something that ends the wait.
    """
    for key, spec in decisions(step):
        seen, nodes, fits = spec.get("revision", 0), spec.get("nodes", 0), spec.get("fits", 0)
        refused = sum(count for _, count in spec.get("funnel", ()))
        if refused + fits != nodes:
            yield key, f"{refused} nodes were refused and {fits} fit, which are not {nodes}"
        if seen >= step.revision:
            yield key, f"it has seen revision {seen}, and was written at {step.revision}"
        elif nodes and nodes != (stood := _nodes_at(step.history, seen)):
            yield key, f"it speaks of {nodes} nodes, and at revision {seen} there were {stood}"
        if spec.get("verdict") == "waiting" and not (spec.get("reason") and spec.get("cures")):
            yield key, f"it says to wait, for {spec.get('reason')!r}, until {spec.get('cures')!r}"


def _nodes_at(history: History, revision: int) -> int:
    at = bisect_right(history.past.nodes, revision, key=lambda one: one[0])
    return history.past.nodes[at - 1][1] if at else 0


@promise("S24")
def ended_overrides_are_not_cited(step: Step) -> Found:
    """What a decision names as an override stood at the revision that it has seen, and its deadline was ahead then."""
    for key, spec in decisions(step):
        for name in spec.get("overrides", ()):
            if why := _ended(step.history, name, spec.get("revision", 0)):
                yield key, f"it cites {name}, {why}"


def _ended(history: History, name: str, revision: int) -> str:
    """Why an override was not in force at a revision; empty if it may have been."""
    told = next((one for one in reversed(history.stories.get(f"override/{name}", ())) if one.revision <= revision), None)
    content: Json = None if told is None else told.content
    if content is None:
        return f"which did not stand at revision {revision}"
    deadline = content.get("restored", content).get("status", {}).get("deadline")
    shown = None if deadline is None else shown_at(history, deadline["boot"], revision)
    if shown is not None and shown >= deadline["atMs"]:
        return f"whose deadline was {deadline['atMs']}, and the authority's clock showed {shown} at revision {revision}"
    return ""


# ---------------------------------------------------------------------------------------------------------------- in time


@look("L2")
def pending_work_is_tried(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """A scheduler has claimed a place for it, or written down what came of its turn."""
    tries = live.tries.get(history.scope)
    if tries is None or "scheduler" not in core.roles:
        return
    may, now = (live.bounds.tried_ms + live.bounds.told_slack_ms) * live.bounds.pace, live.now_ms()
    for key, since in tries.pending.items():
        last = max(since, core.since_ms, tries.tried.get(key, 0))
        if now - last > may:
            yield Waiting(
                history.scope, key, -1, f"it is pending since {since} ms, and nobody has tried it for {now - last} ms"
            )


@look("L13")
def waiting_has_a_reason(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """Whoever waits for a while finds a decision that names it, and is not old. Who leads may only have come to lead."""
    tries = live.tries.get(history.scope)
    if tries is None or "scheduler" not in core.roles:
        return
    bounds, now = live.bounds, live.now_ms()
    for key, since in tries.pending.items():
        waits = now - max(since, core.since_ms + bounds.bound_ms * bounds.pace) > bounds.reason_ms * bounds.pace
        told = tries.said.get(key)
        if waits and (told is None or now - told > (bounds.tried_ms + bounds.told_slack_ms) * bounds.pace):
            why = "no decision speaks of it" if told is None else f"the last decision about it is {now - told} ms old"
            yield Waiting(history.scope, key, -1, f"it is pending since {since} ms, and {why}")
