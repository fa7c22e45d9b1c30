"""Violation type and registry of checks.

The shape of a finding, and the register of what every commit is asked; it judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from remit.simulate.checkers.reference.history import Step

Found = Iterator[tuple[str, str]]
"""The key concerned, and what is wrong with it."""

UNDECIDED: Final = "?"
"""Begins what a check says of something that it cannot decide."""


class Violation(NamedTuple):
    """`check` is the name of the function that found it, `property` is what FAULTS.md or DESIGN.md call it."""

    check: str
    property: str
    scope: str
    key: str
    why: str
    at_ms: int

    def __str__(self) -> str:
        return f"{self.check} ({self.property}) in {self.scope} at {self.at_ms} ms: {self.key}: {self.why}"


class Promise(NamedTuple):
    property: str
    check: Callable[[Step], Found]


PROMISES: Final[dict[str, Promise]] = {}
"""Everything that must hold at every commit, by the name of the function that looks."""


def promise(property_: str) -> Callable[[Callable[[Step], Found]], Callable[[Step], Found]]:
    def register(check: Callable[[Step], Found]) -> Callable[[Step], Found]:
        PROMISES[check.__name__] = Promise(property_, check)
        return check

    return register
