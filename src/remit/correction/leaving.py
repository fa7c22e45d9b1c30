"""Who has been asked to go, and is still seen as it was? One list for all who may ask it of what is ready. No decisions here.

Nodes that drain and rollouts each spare what a workload can do without. Two that look at the same moment would each spare the
last one: so what was asked of one replica counts at once for everybody in this process.
"""

from __future__ import annotations

from typing import Any

from remit.model.claims import Accepted, Verdict
from remit.observation.board import Board, Kept


class Leaving:
    """A listener of the board: once a replica is seen to change, what was asked of it is over."""

    def __init__(self, board: Board) -> None:
        self._asked: dict[str, int] = {}
        """By replica: at which revision it was asked to go."""
        board.subscribe(self)

    def changed(self, key: str, old: Any, new: Any) -> None:
        self._asked.pop(key, None)

    def reached(self) -> None:
        pass

    def ask(self, one: Kept) -> None:
        self._asked[one.key] = one.revision

    def heard(self, replica: str, verdict: Verdict | None) -> None:
        """What came of it. Until an accepted one is seen it counts."""
        if not isinstance(verdict, Accepted):
            self._asked.pop(replica, None)

    def stays(self, one: Kept) -> bool:
        return self._asked.get(one.key) != one.revision
