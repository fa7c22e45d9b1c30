"""Which rare paths can a scheduler take? Each has a name, told to whoever counts them; nothing is done here.

A path that no test takes says nothing, and does so in green: so simulated runs count these, and must reach them all.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Path(StrEnum):
    REFUSED = "refused"
    """A refusal is learned from."""
    EXPIRED = "expired"
    """What was assumed was not seen in time, and is dropped."""
    REDONE = "redone"
    """There is too little for all: one turn after another, in their order."""
    WHOLE = "whole"
    """A gang is tried whole, beyond what a batch takes."""
    PACED = "paced"
    """Nobody more may be pushed aside for now."""
    RESUMED = "resumed"
    """A proposal that was met with silence is asked for again."""
    OVER = "over"
    """The term ends while proposals are under way."""
    PLUGIN = "plugin"
    """A plug-in failed."""


Tell = Callable[[Path], None]


def untold(path: Path) -> None:
    """For whoever does not count."""
