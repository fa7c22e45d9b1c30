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

from remit.simulate.checkers.liveness_checks import Core, Liveness, WaitingItem, liveness_check
from remit.simulate.checkers.progress_checks import decisions
from remit.simulate.checkers.reference.feasibility import clock_lower_bound, has_capacity
from remit.simulate.checkers.reference.history import VERSIONS_MAX, CommitStep, History
from remit.simulate.checkers.reference.placement import static_violation
from remit.simulate.checkers.reference.rows import Amounts, Json, ReferenceNode, ReferenceShape, health_of, is_open, phase_of
from remit.simulate.checkers.registry import Findings, check_property


@check_property("S22")
def decision_counts_are_consistent(step: CommitStep) -> Findings:
    """Every node is counted once, as refused or as fitting; the number of nodes matches the cited revision, which is earlier
    than the decision; and a waiting replica has a reason and events that can end the wait.
    """
    for key, spec in decisions(step):
        revision, nodes, fits = spec.get("revision", 0), spec.get("nodes", 0), spec.get("fits", 0)
        refused = sum(count for _, count in spec.get("funnel", ()))
        if refused + fits != nodes:
            yield key, f"{refused} nodes were refused and {fits} fit, which is not {nodes} in total"
        if revision >= step.revision:
            yield key, f"it cites revision {revision}, but was written at {step.revision}"
        elif nodes and nodes != (actual := _nodes_at(step.history, revision)):
            yield key, f"it counts {nodes} nodes, but at revision {revision} there were {actual}"
        if spec.get("verdict") == "waiting" and not (spec.get("reason") and spec.get("cures")):
            yield key, f"it says to wait, for {spec.get('reason')!r}, until {spec.get('cures')!r}"


def _nodes_at(history: History, revision: int) -> int:
    at = bisect_right(history.past.node_counts, revision, key=lambda item: item[0])
    return history.past.node_counts[at - 1][1] if at else 0


@check_property("S24")
def ended_overrides_are_not_cited(step: CommitStep) -> Findings:
    """An override cited by a decision existed at the revision it cites, with a deadline in the future."""
    for key, spec in decisions(step):
        for name in spec.get("overrides", ()):
            if reason := _ended_reason(step.history, name, spec.get("revision", 0)):
                yield key, f"it cites {name}, {reason}"


def _ended_reason(history: History, name: str, revision: int) -> str:
    """Return why an override was not in force at a revision; empty if it may have been."""
    version = next((item for item in reversed(history.versions.get(f"override/{name}", ())) if item.revision <= revision), None)
    content: Json = None if version is None else version.content
    if content is None:
        return f"which did not exist at revision {revision}"
    deadline = content.get("restored", content).get("status", {}).get("deadline")
    clock_ms = None if deadline is None else clock_lower_bound(history, deadline["boot"], revision)
    if clock_ms is not None and clock_ms >= deadline["atMs"]:
        return f"whose deadline was {deadline['atMs']}, and the authority's clock showed {clock_ms} at revision {revision}"
    return ""


# ---------------------------------------------------------------------------------------------------------------- latency


@liveness_check("L2")
def pending_replicas_are_tried(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """A scheduler has claimed a node for it, or recorded the result of its attempt."""
    tries = live.attempts.get(history.scope)
    if tries is None or "scheduler" not in core.roles:
        return
    bound, now = (live.bounds.tried_ms + live.bounds.record_slack_ms) * live.bounds.pace, live.now_ms()
    for key, since in tries.pending.items():
        last = max(since, core.since_ms, tries.tried.get(key, 0))
        if now - last > bound:
            yield WaitingItem(history.scope, key, -1, f"it is pending since {since} ms, and was not tried for {now - last} ms")


@liveness_check("L13")
def pending_replicas_have_a_reason(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """Pending work has a recent decision that names it. A new leader gets time to take over first."""
    tries = live.attempts.get(history.scope)
    if tries is None or "scheduler" not in core.roles:
        return
    bounds, now = live.bounds, live.now_ms()
    for key, since in tries.pending.items():
        is_due = now - max(since, core.since_ms + bounds.bound_ms * bounds.pace) > bounds.reason_ms * bounds.pace
        recorded_ms = tries.recorded.get(key)
        if is_due and (recorded_ms is None or now - recorded_ms > (bounds.tried_ms + bounds.record_slack_ms) * bounds.pace):
            reason = (
                "no decision names it" if recorded_ms is None else f"the last decision about it is {now - recorded_ms} ms old"
            )
            yield WaitingItem(history.scope, key, -1, f"it is pending since {since} ms, and {reason}")


T = TypeVar("T")
_decode: Callable[[bytes], Json] = msgspec.json.Decoder().decode


def claims_fit_seen_state(history: History, lease: str, seen: int, payload: bytes) -> Findings:
    """S26: at the revision a claim was decided on, each node existed, was ready and open, no rule forbade it, and there was
    capacity, unless victims provide it. Schedulers that record no decisions are not checked.
    """
    if lease not in history.past.recording_leases:
        return
    claim = _decode(payload)[2]
    claims = claim["members"] if claim.get("do") == "gang" else [claim] if claim.get("do") in ("bind", "reserve") else []
    free: dict[str, Amounts | None] = {}
    for part in claims:
        replica = history.content_at(part["replica"], part["at"])
        shape = history.shape(replica) if replica is not None and phase_of(replica) == "pending" else None
        if shape is None:
            continue  # reservations are bound as they were reserved
        node = part["node"]
        row, known = _node_at(history, node, seen)
        if not known:
            continue
        reason = _node_violation(shape, node, row, _value_at(history.past.policies, seen))
        if not reason and not part.get("victims"):
            if node not in free:
                free_then = _value_at(history.past.free.get(node, ()), seen)
                free[node] = None if free_then is None else dict(free_then)
            node_free = free[node]
            if node_free is not None and not has_capacity(shape, row, node_free, take=True):
                reason = f"its free capacity was {node_free}, but {shape.resources} with {shape.device_requests} is needed"
        if reason:
            yield part["replica"], f"node {node} was claimed based on revision {seen}: {reason}"


def _node_violation(shape: ReferenceShape, name: str, row: Json, policy: Json) -> str:
    if row is None:
        return "the node did not exist"
    if health_of(row) != "ready" or not is_open(row):
        return f"it accepted no new work: {row.get('status')} {row['spec']}"
    return static_violation(shape, ReferenceNode(name, row), policy)


def _node_at(history: History, name: str, revision: int) -> tuple[Json, bool]:
    """Return the node's row at a revision, None if it did not exist; and whether that is remembered."""
    versions = history.versions.get(f"node/{name}", ())
    at = bisect_right(versions, revision, key=lambda item: item.revision)
    if not at:
        return None, len(versions) < VERSIONS_MAX // 2
    content = versions[at - 1].content
    return (content.get("restored", content) if content is not None else None), True


def _value_at(known: Sequence[tuple[int, T]], revision: int) -> T | None:
    at = bisect_right(known, revision, key=lambda item: item[0])
    return known[at - 1][1] if at else None


@liveness_check("L8")
def leader_exists(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """An idle leader commits heartbeat batches with a row of their own; a server that only reads does not count as leading."""
    bounds, now = live.bounds, live.now_ms()
    bound = 2 * bounds.leader_ttl_ms + bounds.leader_ms
    last = max(core.since_ms, history.last_led_ms)
    if now - last > bound * bounds.pace:
        yield WaitingItem(history.scope, "head", -1, f"there was no leader for {now - last} ms")


@liveness_check("L8")
def leader_is_stable(live: Liveness, history: History, core: Core) -> Iterator[WaitingItem]:
    """Once nothing is broken any more, no leader is deposed; one more takeover from the last faulty server is allowed."""
    since = core.since_ms + (2 * live.bounds.leader_ttl_ms + live.bounds.leader_ms) * live.bounds.pace
    if len(late := [at for at in history.takeovers[-9:] if at > since]) > 1:
        yield WaitingItem(
            history.scope, "head", -1, f"{len(late)} takeovers or more since all is healthy, the last at {late[-1]} ms"
        )
