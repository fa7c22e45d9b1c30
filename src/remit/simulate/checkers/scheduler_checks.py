"""Scheduler claims fit what was seen, decisions add up, pending work is tried; a leader exists.

Decisions and claims are compared with the state at the revision they cite, and never with the state at the time they were
written: a scheduler may be late, but must not make claims that its view did not support. That the authority refuses a wrong
claim is no excuse. Constraints towards other replicas, quota and overrides are not checked here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from remit.simulate.checkers.liveness_checks import Core, Liveness, Waiting, look
from remit.simulate.checkers.progress_checks import decisions
from remit.simulate.checkers.reference.feasibility import room_for, shown_at
from remit.simulate.checkers.reference.history import VERSIONS_KEPT, History, Step
from remit.simulate.checkers.reference.placement import Site, barred
from remit.simulate.checkers.reference.rows import Counted, Json, Shape, health_of, is_open, phase_of
from remit.simulate.checkers.registry import Found, promise


@promise("S22")
def decisions_add_up(step: Step) -> Found:
    """Every node is counted once, as refused or as fitting; the number of nodes matches the cited revision, which is earlier
    than the decision; and a waiting replica has a reason and events that can end the wait.
    """
    for key, spec in decisions(step):
        seen, nodes, fits = spec.get("revision", 0), spec.get("nodes", 0), spec.get("fits", 0)
        refused = sum(count for _, count in spec.get("funnel", ()))
        if refused + fits != nodes:
            yield key, f"{refused} nodes were refused and {fits} fit, which is not {nodes} in total"
        if seen >= step.revision:
            yield key, f"it cites revision {seen}, but was written at {step.revision}"
        elif nodes and nodes != (stood := _nodes_at(step.history, seen)):
            yield key, f"it counts {nodes} nodes, but at revision {seen} there were {stood}"
        if spec.get("verdict") == "waiting" and not (spec.get("reason") and spec.get("cures")):
            yield key, f"it says to wait, for {spec.get('reason')!r}, until {spec.get('cures')!r}"


def _nodes_at(history: History, revision: int) -> int:
    at = bisect_right(history.past.nodes, revision, key=lambda one: one[0])
    return history.past.nodes[at - 1][1] if at else 0


@promise("S24")
def ended_overrides_are_not_cited(step: Step) -> Found:
    """An override cited by a decision existed at the revision it cites, with a deadline in the future."""
    for key, spec in decisions(step):
        for name in spec.get("overrides", ()):
            if why := _ended(step.history, name, spec.get("revision", 0)):
                yield key, f"it cites {name}, {why}"


def _ended(history: History, name: str, revision: int) -> str:
    """Return why an override was not in force at a revision; empty if it may have been."""
    told = next((one for one in reversed(history.stories.get(f"override/{name}", ())) if one.revision <= revision), None)
    content: Json = None if told is None else told.content
    if content is None:
        return f"which did not exist at revision {revision}"
    deadline = content.get("restored", content).get("status", {}).get("deadline")
    shown = None if deadline is None else shown_at(history, deadline["boot"], revision)
    if shown is not None and shown >= deadline["atMs"]:
        return f"whose deadline was {deadline['atMs']}, and the authority's clock showed {shown} at revision {revision}"
    return ""


# ---------------------------------------------------------------------------------------------------------------- latency


@look("L2")
def pending_work_is_tried(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """A scheduler has claimed a node for it, or recorded the result of its attempt."""
    tries = live.tries.get(history.scope)
    if tries is None or "scheduler" not in core.roles:
        return
    may, now = (live.bounds.tried_ms + live.bounds.told_slack_ms) * live.bounds.pace, live.now_ms()
    for key, since in tries.pending.items():
        last = max(since, core.since_ms, tries.tried.get(key, 0))
        if now - last > may:
            yield Waiting(
                history.scope, key, -1, f"it is pending since {since} ms, and was not tried for {now - last} ms"
            )


@look("L13")
def waiting_has_a_reason(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """Pending work has a recent decision that names it. A new leader gets time to take over first."""
    tries = live.tries.get(history.scope)
    if tries is None or "scheduler" not in core.roles:
        return
    bounds, now = live.bounds, live.now_ms()
    for key, since in tries.pending.items():
        waits = now - max(since, core.since_ms + bounds.bound_ms * bounds.pace) > bounds.reason_ms * bounds.pace
        told = tries.said.get(key)
        if waits and (told is None or now - told > (bounds.tried_ms + bounds.told_slack_ms) * bounds.pace):
            why = "no decision names it" if told is None else f"the last decision about it is {now - told} ms old"
            yield Waiting(history.scope, key, -1, f"it is pending since {since} ms, and {why}")


T = TypeVar("T")
_decode: Callable[[bytes], Json] = msgspec.json.Decoder().decode


def claims_fit_what_was_seen(history: History, lease: str, seen: int, payload: bytes) -> Found:
    """S26: at the revision a claim was decided on, each node existed, was ready and open, no rule forbade it, and there was
    capacity, unless victims provide it. Schedulers that record no decisions are not checked.
    """
    if lease not in history.past.explainers:
        return
    claim = _decode(payload)[2]
    claims = claim["members"] if claim.get("do") == "gang" else [claim] if claim.get("do") in ("bind", "reserve") else []
    free: dict[str, Counted | None] = {}
    for one in claims:
        replica = history.version(one["replica"], one["at"])
        shape = history.shape(replica) if replica is not None and phase_of(replica) == "pending" else None
        if shape is None:
            continue  # reservations are bound as they were reserved
        node = one["node"]
        row, known = _node_at(history, node, seen)
        if not known:
            continue
        why = _against(shape, node, row, _at(history.past.policies, seen))
        if not why and not one.get("victims"):
            if node not in free:
                left = _at(history.past.left.get(node, ()), seen)
                free[node] = None if left is None else dict(left)
            room = free[node]
            if room is not None and not room_for(shape, row, room, take=True):
                why = f"its free capacity was {room}, but {shape.resources} with {shape.asks} is needed"
        if why:
            yield one["replica"], f"node {node} was claimed based on revision {seen}: {why}"


def _against(shape: Shape, name: str, row: Json, policy: Json) -> str:
    if row is None:
        return "the node did not exist"
    if health_of(row) != "ready" or not is_open(row):
        return f"it accepted no new work: {row.get('status')} {row['spec']}"
    return barred(shape, Site(name, row), policy)


def _node_at(history: History, name: str, revision: int) -> tuple[Json, bool]:
    """Return the node's row at a revision, None if it did not exist; and whether that is remembered."""
    told = history.stories.get(f"node/{name}", ())
    at = bisect_right(told, revision, key=lambda one: one.revision)
    if not at:
        return None, len(told) < VERSIONS_KEPT // 2
    content = told[at - 1].content
    return (content.get("restored", content) if content is not None else None), True


def _at(known: Sequence[tuple[int, T]], revision: int) -> T | None:
    at = bisect_right(known, revision, key=lambda one: one[0])
    return known[at - 1][1] if at else None


@look("L8")
def somebody_leads(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """An idle leader commits heartbeat batches with a row of their own; a server that only reads does not count as leading."""
    bounds, now = live.bounds, live.now_ms()
    may = 2 * bounds.leader_ttl_ms + bounds.leader_ms
    last = max(core.since_ms, history.acted_ms)
    if now - last > may * bounds.pace:
        yield Waiting(history.scope, "head", -1, f"there was no leader for {now - last} ms")


@look("L8")
def leaders_stay(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """Once nothing is broken any more, no leader is deposed; one more takeover from the last faulty server is allowed."""
    since = core.since_ms + (2 * live.bounds.leader_ttl_ms + live.bounds.leader_ms) * live.bounds.pace
    if len(late := [at for at in history.takeovers[-9:] if at > since]) > 1:
        yield Waiting(history.scope, "head", -1, f"{len(late)} takeovers or more since all is healthy, the last at {late[-1]} ms")
