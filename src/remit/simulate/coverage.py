"""Which refusals, faults, transitions and rare paths the runs have reached.

Refusals, faults, transitions and rare paths that nobody has reached.

A simulation that never takes a path says nothing about it, and does so in green. So the runs of the suite are added up here and
compared with the code's own tables. What is left over is named by the test of this page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from remit.law.lifecycle import TABLE, Row
from remit.model.claims import Code, Role
from remit.proposal.metrics import Path
from remit.simulate.checkers.rare_events import Sight
from remit.simulate.faults.kinds import KINDS
from remit.simulate.scenarios import names
from remit.simulate.simulation import Run

UNREACHABLE: Final[Mapping[str, str]] = {
    "code fault": "it answers a bug of ours",
    "transition abort from starting": "starting may last for ten minutes, which is longer than a scenario of the suite",
}
"""What no run can reach, with the reason. This list only shrinks."""

SAID_ONLY: Final = (Code.OVERRIDE,)
"""Codes that no authority answers with: they are reasons of schedulers."""

STANDING: Final[Mapping[str, int]] = {"agents-killed": 4, "damaged": 2, "preemption-churn": 2, "slow-starts": 2}
"""Seeds that reach what is rare, where the first does not: it saves the search."""

RARE: Final = (
    ("deposed-scheduler", 2),
    ("mayhem", 3),
    ("preemption-churn", 6),
    ("restored-draining", 8),
    ("slow-starts", 1),
)
"""Runs that reach what no standing one does. They are tried first: a whole round of further seeds is dear."""

SEEKERS: Final = (
    "restored",
    "repair-in-incident",
    "reservations",
    "orphaned",
    "nominee-deleted",
    "drained",
    "mayhem",
    "small-batches",
    "restored-draining",
    "bind-unanswered",
    "stale-views",
    "region-lost",
    "preemption-churn",
    "slow-starts",
    "agents-killed",
)
"""Scenarios whose further seeds are tried for what the first seeds of all have missed."""
SEEK_MAX: Final = 10
"""Up to which seed. What is not reached by then is as good as never tried."""


class Edge(NamedTuple):
    """A move as a run has seen it. Equal for two transitions only if they have one owner: `twins` names those."""

    source: str | None
    target: str | None
    role: str


def suite() -> tuple[tuple[str, int], ...]:
    """Every scenario that comes with Remit, with its standing seed."""
    return tuple((name, STANDING.get(name, 1)) for name in names())


def further() -> Iterator[tuple[tuple[str, int], ...]]:
    """What to try next, round by round, as long as something is missed."""
    yield RARE
    for seed in range(2, SEEK_MAX + 1):
        yield tuple((name, seed) for name in SEEKERS)


def edge_of(row: Row) -> Edge:
    source = None if row.source is None else row.source.value
    target = None if row.target is None else row.target.value
    return Edge(source, target, row.role.value)


def twins() -> list[list[str]]:
    """Names of transitions that a run cannot tell apart."""
    found: dict[Edge, list[str]] = {}
    for row in TABLE:
        found.setdefault(edge_of(row), []).append(row.name)
    return [rows for rows in found.values() if len(set(rows)) > 1]


def wanted() -> Iterator[str]:
    """Every mark by its name."""
    yield from (f"code {code.value}" for code in Code)
    yield from (f"fault {kind}" for kind in KINDS)
    yield from (f"path {path.value}" for path in Path)
    yield from (f"sight {sight.value}" for sight in Sight)
    yield from map(_named, TABLE)


def reached(runs: Iterable[Run]) -> set[str]:
    """The marks of these runs."""
    edges: set[Edge] = set()
    found: set[str] = set()
    for run in runs:
        found.update(f"code {code}" for code in run.codes)
        found.update(f"fault {kind}" for kind in run.faults)
        found.update(f"path {path}" for path in run.paths)
        found.update(f"sight {sight}" for sight in run.sights)
        found.update(f"code {code.value}" for code in SAID_ONLY if code.value in run.reasons)
        edges.update(Edge(*edge) for edge in run.edges)
    return found | {_named(row) for row in TABLE if edge_of(row) in edges}


def unreached(runs: Iterable[Run]) -> list[str]:
    """Marks that these runs have missed, but for those that none can reach."""
    seen = reached(runs)
    return [mark for mark in wanted() if mark not in seen and mark not in UNREACHABLE]


def _named(row: Row) -> str:
    source = "nothing" if row.source is None else row.source.value
    if row.role is Role.AGENT and row.name == "resume":
        return f"transition resume from {source} to {row.target}"
    return f"transition {row.name} from {source}"
