"""Register of rulings: claim type, allowed roles, coordination class, refusal constructor.

The register of rulings; each stands elsewhere.

The coordination class says where a claim's truth must be agreed:

    hard      before it is committed: alone, two branches could each be right and together break an invariant
    bounded   decided locally inside bounds, evidence left behind; branches merge without harm
    soft      hints and observations; branches merge without harm

`tests/properties` shows both halves: every claim that is not hard merges safely, every hard one has a counter-example.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeVar

from remit.commitment.draft import Draft
from remit.model.claims import Claim, Code, Operation, Refused, Role


class Coordination(StrEnum):
    HARD = "hard"
    BOUNDED = "bounded"
    SOFT = "soft"


Decider = Callable[[Draft, Operation, Any], "int | Refused"]
"""Writes what follows from the claim into the draft and answers a number; or refuses, and leaves the draft as it was."""

F = TypeVar("F", bound=Callable[..., "int | Refused"])


class Ruling(NamedTuple):
    """`protects`: the invariant that makes it hard, or the reason why branches merge."""

    decide: Decider
    roles: frozenset[Role]
    coordination: Coordination
    protects: str


RULINGS: Final[dict[type[Claim], Ruling]] = {}

LOOPS: Final = frozenset(
    {Role.NODES, Role.REPAIR, Role.ROLLOUT, Role.WORKLOADS, Role.ENDPOINTS, Role.BUDGETS, Role.POLICY, Role.AUTOSCALER}
)
EVERYONE: Final = frozenset(Role) - {Role.AUTHORITY}
BUDGETEERS: Final = frozenset({Role.BUDGETS, Role.OPERATOR})
UNLEASED: Final = frozenset({Role.USER, Role.OPERATOR, Role.AUTHORITY})
"""Roles that act without a lease: people, and the authority itself."""


def ruling(claim: type[Claim], roles: frozenset[Role], coordination: Coordination, protects: str) -> Callable[[F], F]:
    def register(decide: F) -> F:
        RULINGS[claim] = Ruling(decide, roles, coordination, protects)
        return decide

    return register


DETAIL_MAX: Final = 500


def refuse(code: Code, detail: str) -> Refused:
    """`detail` may quote the asker; what is stored of it is bounded."""
    return Refused(code, detail if len(detail) <= DETAIL_MAX else detail[:DETAIL_MAX] + "…")
