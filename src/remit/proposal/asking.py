"""What is asked, and whose answer is awaited? The words between cycle.py, which proposes, and scheduler.py, which asks."""

from __future__ import annotations

from typing import NamedTuple

from remit.model.claims import AnyClaim, Evidence


class Proposal(NamedTuple):
    """Claims that travel together, the slots behind each, and what they were made from. No two have one number."""

    number: int
    claims: list[AnyClaim]
    slots: list[tuple[int, ...]]
    evidence: Evidence

    def __bool__(self) -> bool:
        return bool(self.claims)

    def add(self, claim: AnyClaim, *slots: int) -> None:
        self.claims.append(claim)
        self.slots.append(slots)


class Asked(NamedTuple):
    """In which proposal a replica is claimed, and at which revision of its row."""

    number: int
    at: int


class Held(NamedTuple):
    """A replica that waits for the view to reach a revision."""

    number: int
    revision: int
    until_ms: int
    refused: str
    """Why it was refused; empty if its gang was accepted, and it is to be seen whether it was with them."""
    again: bool = False
    """Is a reservation to be bound all the same? Else it is given up."""
