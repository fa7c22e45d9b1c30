"""Does anybody see the past after the present, or what is not there? What observers have seen, against the scope's history."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Final

from remit.simulate.checkers.history import History
from remit.simulate.checkers.promise import UNDECIDED, Found
from remit.simulate.checkers.rows import MARKER, phase_of

UNVIEWED: Final = ("head", MARKER)
UNVIEWED_KINDS: Final = ("batch/", "event/", "decision/")
"""What no view keeps: the chain itself, and notes that grow with the run and that nobody decides by."""


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

    def views_show_what_stands(
        self,
        history: History,
        observer: str,
        revision: int,
        rows: Mapping[str, int],
        *,
        late_ms: float | None,
        kinds: tuple[str, ...] = (),
        nodes: frozenset[str] | None = None,
    ) -> Found:
        """S23: a view at the last revision has exactly the keys that stand, each at its revision. One that is behind may still
        catch up; `late_ms` is for how long it could have and has not, beyond what is allowed, and None if nobody can say.
        """
        if revision < history.revision:
            behind = f"{observer} is at revision {revision}, and the last is {history.revision}"
            if late_ms is None or late_ms <= 0:
                yield observer, f"{UNDECIDED} {behind}"
            else:
                yield observer, f"{behind}: {late_ms:.0f} ms later than it may be"
            return
        stands = {
            key: at
            for key, (at, row) in history.rows.items()
            if key not in UNVIEWED and not key.startswith(UNVIEWED_KINDS) and (not kinds or key.startswith(kinds))
            if nodes is None or (row.get("status", {}).get("node") in nodes and phase_of(row) not in ("reserved", "released"))
        }
        for key in sorted(stands.keys() | rows.keys()):
            if key not in rows:
                yield key, f"{observer} at revision {revision} does not have it, and it stands since {stands[key]}"
            elif key not in stands:
                yield key, f"{observer} at revision {revision} has it as of {rows[key]}, and it is gone"
            elif rows[key] != stands[key]:
                yield key, f"{observer} at revision {revision} has it as of {rows[key]}, and it stands since {stands[key]}"


def behind_since_ms(history: History, revision: int) -> int:
    """When the first commit came that somebody at this revision has not seen."""
    return history.times[bisect_right(history.times, revision, key=lambda time: time[0])][1]
