"""Does anybody see the past after the present? What each observer has seen, by scope and incarnation."""

from __future__ import annotations

from remit.simulate.checkers.history import History
from remit.simulate.checkers.promise import Found


class Observers:
    """By name; an observer keeps its name over restarts."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], tuple[int, int]] = {}
        """The incarnation, by its place in the scope's history, and the revision."""

    def observers_never_go_back(self, history: History, observer: str, incarnation: str, revision: int) -> Found:
        """S10: revisions never go back within an incarnation, nor does anybody return to one that is over."""
        if incarnation not in history.incarnations:
            yield observer, f"it saw incarnation {incarnation}, and there was none"
            return
        if revision > history.revision:
            yield observer, f"it saw revision {revision}, and the last was {history.revision}"
        # A new incarnation's revisions are past all that were ever used.
        which = len(history.incarnations) - 1 - history.incarnations[::-1].index(incarnation)
        before = self.seen.get((observer, history.scope), (-1, 0))
        if (which, revision) < before:
            was = history.incarnations[before[0]]
            yield observer, f"it saw revision {before[1]} of {was}, and then {revision} of {incarnation}"
            return
        self.seen[observer, history.scope] = which, revision
