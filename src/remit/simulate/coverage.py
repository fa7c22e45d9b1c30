"""Which refusals, faults, transitions and rare paths the runs have reached.

A simulation that never takes a path gives no evidence about it, although it passes. So the results of the test suite are
added up here and compared with the tables of the product: everything in a table must be reached. The test of this module
reports what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from remit.law.lifecycle import TRANSITIONS, Transition
from remit.model.claims import Code
from remit.model.roles import Role
from remit.proposal.metrics import CoverageMark
from remit.simulate.checkers.rare_events import RareEvent
from remit.simulate.faults.kinds import KINDS
from remit.simulate.scenarios import names
from remit.simulate.simulation import RunResult

UNREACHABLE: Final[Mapping[str, str]] = {
    "code internal_error": "only a bug in Remit returns it",
    "transition abort from starting": "starting may take ten minutes, longer than any scenario of the suite",
}
"""Marks that no run can reach, with the reason. This list may only become shorter."""

REASON_ONLY_CODES: Final = (Code.OVERRIDE,)
"""Codes that are never returned by an authority, only recorded by schedulers as reasons."""

SUITE_SEEDS: Final[Mapping[str, int]] = {"agents-killed": 4, "damaged": 2, "preemption-churn": 2, "slow-starts": 2}
"""Seeds that reach rare paths, for scenarios whose seed 1 does not. They shorten the search."""

RARE_RUNS: Final = (
    ("deposed-scheduler", 2),
    ("mayhem", 3),
    ("preemption-churn", 6),
    ("restored-draining", 8),
    ("slow-starts", 1),
)
"""Runs that reach paths which no suite run reaches. They are tried first, because a round of further seeds is expensive."""

SEARCH_SCENARIOS: Final = (
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
"""Scenarios whose further seeds are tried for marks that the suite has missed."""
SEARCH_SEED_MAX: Final = 10
"""The last seed that is tried. A path that is not reached by then counts as untested."""


class TransitionEdge(NamedTuple):
    """A transition as a run records it. Transitions with the same owner may share an edge: `indistinguishable_transitions`
    lists them.
    """

    source: str | None
    target: str | None
    role: str


def suite_runs() -> tuple[tuple[str, int], ...]:
    """Every scenario shipped with Remit, with its seed."""
    return tuple((name, SUITE_SEEDS.get(name, 1)) for name in names())


def further_runs() -> Iterator[tuple[tuple[str, int], ...]]:
    """Runs to try next, round by round, while something is missing."""
    yield RARE_RUNS
    for seed in range(2, SEARCH_SEED_MAX + 1):
        yield tuple((name, seed) for name in SEARCH_SCENARIOS)


def edge_of(row: Transition) -> TransitionEdge:
    source = None if row.source is None else row.source.value
    target = None if row.target is None else row.target.value
    return TransitionEdge(source, target, row.role.value)


def indistinguishable_transitions() -> list[list[str]]:
    """Groups of transitions that share an edge, so that a run cannot distinguish them."""
    marks: dict[TransitionEdge, list[str]] = {}
    for row in TRANSITIONS:
        marks.setdefault(edge_of(row), []).append(row.name)
    return [rows for rows in marks.values() if len(set(rows)) > 1]


def all_marks() -> Iterator[str]:
    """The names of all marks."""
    yield from (f"code {code.value}" for code in Code)
    yield from (f"fault {kind}" for kind in KINDS)
    yield from (f"path {path.value}" for path in CoverageMark)
    yield from (f"sight {sight.value}" for sight in RareEvent)
    yield from map(_transition_mark, TRANSITIONS)


def reached_marks(runs: Iterable[RunResult]) -> set[str]:
    """The marks that these runs have reached."""
    edges: set[TransitionEdge] = set()
    marks: set[str] = set()
    for run in runs:
        marks.update(f"code {code}" for code in run.codes)
        marks.update(f"fault {kind}" for kind in run.faults)
        marks.update(f"path {path}" for path in run.scheduler_paths)
        marks.update(f"sight {sight}" for sight in run.rare_events)
        marks.update(f"code {code.value}" for code in REASON_ONLY_CODES if code.value in run.reasons)
        edges.update(TransitionEdge(*edge) for edge in run.edges)
    return marks | {_transition_mark(row) for row in TRANSITIONS if edge_of(row) in edges}


def missing_marks(runs: Iterable[RunResult]) -> list[str]:
    """The marks that these runs have missed, except for unreachable ones."""
    reached = reached_marks(runs)
    return [mark for mark in all_marks() if mark not in reached and mark not in UNREACHABLE]


def _transition_mark(row: Transition) -> str:
    source = "nothing" if row.source is None else row.source.value
    if row.role is Role.AGENT and row.name == "resume":
        return f"transition resume from {source} to {row.target}"
    return f"transition {row.name} from {source}"
