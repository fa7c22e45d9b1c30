"""What may a person's override keep a scheduler from just now? Read from its row and the authority's clock; nothing is judged.

An override may end a little early for whoever reads it. So whoever asks here is told that it *may* still be in force: it
stands, and its deadline is ahead by the least that the clock which it is on can show.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from remit.simulate.checkers.history import History
from remit.simulate.checkers.past import Timed
from remit.simulate.checkers.placement import Site
from remit.simulate.checkers.rows import Json, Shape

CLOCKS_DRIFT: Final = 0.01
"""How much slower a clock may have run since it was last read."""

Specs = Sequence[Json]


def shown_at(history: History, boot: str, revision: int, at_ms: int | None = None) -> int | None:
    """The least that the clock of this boot can show, when a revision was the last, or at a later moment; None if nobody has
    read it by then.
    """
    past = history.past
    last, known = _last(past.stands, revision), past.of_boot.get(boot, ())
    read = _last(known, revision)
    if read < 0:
        return None
    _, read_ms, stand = known[read]
    at_ms = past.stands[last][1] if at_ms is None else at_ms
    return stand.applied_ms + int((at_ms - read_ms) * (1 - CLOCKS_DRIFT))


def _last(stands: Sequence[Timed], revision: int) -> int:
    """The index of the last one up to this revision; mostly that is the very last."""
    if stands and stands[-1][0] <= revision:
        return len(stands) - 1
    return bisect_right(stands, revision, key=lambda one: one[0]) - 1


def in_force(history: History, now_ms: int) -> Specs:
    found = []
    for row in history.kind("override").values():
        deadline = row.get("status", {}).get("deadline")
        shown = None if deadline is None else shown_at(history, deadline["boot"], history.revision, now_ms)
        if shown is not None and shown < deadline["atMs"]:
            found.append(row["spec"])
    return found


def paused(specs: Specs, shape: Shape) -> bool:
    return any(spec["effect"] == "pause-expansion" and _speaks_of(spec, shape) for spec in specs)


def kept_off(specs: Specs, shape: Shape, site: Site) -> bool:
    """Is this place avoided, or is such work pinned elsewhere?"""
    return any(
        (spec["effect"] == "avoid" and _covers(spec, site))
        or (spec["effect"] == "pin" and _speaks_of(spec, shape) and not _covers(spec, site))
        for spec in specs
    )


def _speaks_of(spec: Json, shape: Shape) -> bool:
    scope = spec["scope"]
    return shape.tenant in scope.get("tenants", ()) or f"{shape.tenant}/{shape.workload}" in scope.get("workloads", ())


def _covers(spec: Json, site: Site) -> bool:
    scope = spec["scope"]
    return site.name in scope.get("nodes", ()) or any(value in scope.get(f"{name}s", ()) for name, value in site.places.items())
