"""Violation type and registry of checks.

The checks themselves are in the other modules of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from remit.simulate.checkers.reference.history import CommitStep

Findings = Iterator[tuple[str, str]]
"""Findings of a check: the key concerned, and what is wrong with it."""

UNDECIDED: Final = "?"
"""Prefix of a finding that the check cannot decide."""


class Violation(NamedTuple):
    """`check` is the name of the check function; `property` is the id of the property in docs/faults.md."""

    check: str
    property: str
    scope: str
    key: str
    why: str
    at_ms: int

    def __str__(self) -> str:
        return f"{self.check} ({self.property}) in {self.scope} at {self.at_ms} ms: {self.key}: {self.why}"


class Check(NamedTuple):
    property: str
    check: Callable[[CommitStep], Findings]


CHECKS: Final[dict[str, Check]] = {}
"""All checks that run after every commit, by function name."""


def check_property(property_: str) -> Callable[[Callable[[CommitStep], Findings]], Callable[[CommitStep], Findings]]:
    def register(check: Callable[[CommitStep], Findings]) -> Callable[[CommitStep], Findings]:
        CHECKS[check.__name__] = Check(property_, check)
        return check

    return register
