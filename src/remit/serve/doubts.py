"""What does a restored scope not believe yet? Counted on the board, for people; the authority knows it by itself."""

from __future__ import annotations

from typing import Final

from remit.commitment.books import AWAITED_NODE
from remit.model.records import GrantPhase, Phase
from remit.observation.board import Board

RESTORED: Final = "restored"
_NODE: Final = f"summary/{AWAITED_NODE}"


def doubts(board: Board) -> dict[str, object]:
    """How many of each are awaited or void; nothing, if the scope doubts nothing."""
    unknown = sum(board.get(key).status.reason == RESTORED for key in board.by_phase[Phase.UNKNOWN])
    nodes = sum(key.startswith(_NODE) for key, _ in board.kind("summary/"))
    void = sum(kept.thing.status.phase is GrantPhase.VOID for _, kept in board.kind("grant/"))
    found = {"replicas_unknown": unknown, "nodes_awaited": nodes, "grants_void": void}
    return {name: count for name, count in found.items() if count}
