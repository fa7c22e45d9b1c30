"""Did a scheduler claim only what could be, by what it had seen? A hint, a score and a hope authorise nothing.

What a claim is decided on is a revision. So it is held against how nodes, rules and room stood there, whatever came of it: that
an authority refuses what is wrong is no excuse for who asked. Terms towards others, quota and overrides are not looked at here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from remit.simulate.checkers.feasibility import room_for
from remit.simulate.checkers.history import VERSIONS_KEPT, History
from remit.simulate.checkers.placement import Site, barred
from remit.simulate.checkers.promise import Found
from remit.simulate.checkers.rows import Counted, Json, Shape, health_of, is_open, phase_of

T = TypeVar("T")
_decode: Callable[[bytes], Json] = msgspec.json.Decoder().decode


def claims_fit_what_was_seen(history: History, lease: str, seen: int, payload: bytes) -> Found:
    """S26: at the revision that it was decided on each place was there, ready and open, no rule forbade it, and there was room,
    unless somebody is to make it. Those who explain nothing are not asked: they guess.
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
            continue  # what is reserved is bound as it was reserved
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
                why = f"of it was left {room}, and {shape.resources} with {shape.asks} is asked for"
        if why:
            yield one["replica"], f"a place on {node} was claimed, by what stood at revision {seen}: {why}"


def _against(shape: Shape, name: str, row: Json, policy: Json) -> str:
    if row is None:
        return "there was no such node"
    if health_of(row) != "ready" or not is_open(row):
        return f"it took no new work: {row.get('status')} {row['spec']}"
    return barred(shape, Site(name, row), policy)


def _node_at(history: History, name: str, revision: int) -> tuple[Json, bool]:
    """Its row at that revision, None if there was none; and whether that is remembered."""
    told = history.stories.get(f"node/{name}", ())
    at = bisect_right(told, revision, key=lambda one: one.revision)
    if not at:
        return None, len(told) < VERSIONS_KEPT // 2
    content = told[at - 1].content
    return (content.get("restored", content) if content is not None else None), True


def _at(known: Sequence[tuple[int, T]], revision: int) -> T | None:
    at = bisect_right(known, revision, key=lambda one: one[0])
    return known[at - 1][1] if at else None
