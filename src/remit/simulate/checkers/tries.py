"""When was each pending replica last tried, and when was it last said why it waits? Read from rows; nothing is judged here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from remit.simulate.checkers.history import Step
from remit.simulate.checkers.rows import Json, phase_of

VERDICTS: Final = ("bound", "reserved", "refused", "waiting")
_REPLICA: Final = "replica/"
_CLAIMS: Final = ("bind", "reserve")


def decisions(step: Step) -> Iterator[tuple[str, Json]]:
    """Those that a scheduler has written in this commit; what others write under that name says nothing of a scheduler."""
    by = {entry.subject for entry in step.accepted if entry.did == "explain" and entry.role == "scheduler" and entry.lease}
    for key, _, new in step.of_kind("decision") if by else ():
        if new is not None and key.rpartition("/")[2] in by:
            yield key, new["spec"]


class Tries:
    """Of one scope."""

    def __init__(self) -> None:
        self.pending: dict[str, int] = {}
        """Since when, in virtual time."""
        self.tried: dict[str, int] = {}
        self.said: dict[str, int] = {}

    def absorb(self, step: Step, at_ms: int) -> None:
        for key, old, new in step.moves:
            if phase_of(new) != "pending":
                for kept in (self.pending, self.tried, self.said):
                    kept.pop(key, None)
            elif phase_of(old) != "pending" or key not in self.pending:
                self.pending[key] = at_ms
        for entry in step.entries:
            if entry.did in _CLAIMS and entry.role == "scheduler" and entry.subject in self.pending:
                self.tried[entry.subject] = at_ms
        for _, spec in decisions(step):
            for name in spec.get("replicas", ()):
                key = _REPLICA + name
                if key in self.pending:
                    self.tried[key] = at_ms
                    if spec.get("verdict") in VERDICTS:
                        self.said[key] = at_ms

    def restore(self, pending: Iterable[str], at_ms: int) -> None:
        """A backup stands in the store's place, and whoever waits there waits anew."""
        self.pending, self.tried, self.said = dict.fromkeys(pending, at_ms), {}, {}
