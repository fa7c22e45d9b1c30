"""Registry of rulings: claim type, allowed roles, coordination class; and the constructor of refusals.

The coordination class states where agreement on a claim is needed:

    hard      before commit: two branches could each be valid and together break an invariant
    bounded   decided locally within bounds, with evidence; branches merge safely
    soft      hints and observations; branches merge safely

`tests/properties` shows both halves: every claim that is not hard merges safely, and every hard one has a counterexample.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeVar

from remit.commitment.draft import Draft
from remit.model.claims import Claim, Code, Operation, Refused
from remit.model.roles import Role


class Coordination(StrEnum):
    HARD = "hard"
    BOUNDED = "bounded"
    SOFT = "soft"


Decider = Callable[[Draft, Operation, Any], "int | Refused"]
"""Writes the changes of a claim into the draft and returns a number; or refuses and leaves the draft unchanged."""

F = TypeVar("F", bound=Callable[..., "int | Refused"])


class Ruling(NamedTuple):
    """The ruling of one claim type. `protects` is the invariant that makes it hard, or the reason why branches merge."""

    decide: Decider
    roles: frozenset[Role]
    coordination: Coordination
    protects: str


RULINGS: Final[dict[type[Claim], Ruling]] = {}

CONTROLLER_ROLES: Final = frozenset(
    {Role.NODES, Role.REPAIR, Role.ROLLOUT, Role.WORKLOADS, Role.ENDPOINTS, Role.BUDGETS, Role.POLICY, Role.AUTOSCALER}
)
ALL_ROLES: Final = frozenset(Role) - {Role.AUTHORITY}
BUDGET_ROLES: Final = frozenset({Role.BUDGETS, Role.OPERATOR})
UNLEASED_ROLES: Final = frozenset({Role.USER, Role.OPERATOR, Role.AUTHORITY})
"""Roles that act without a lease: users, operators, and the authority itself."""


def ruling(claim: type[Claim], roles: frozenset[Role], coordination: Coordination, protects: str) -> Callable[[F], F]:
    def register(decide: F) -> F:
        RULINGS[claim] = Ruling(decide, roles, coordination, protects)
        return decide

    return register


DETAIL_CHARS_MAX: Final = 500


def refuse(code: Code, detail: str) -> Refused:
    """Build a refusal. `detail` may quote the caller, so its stored length is limited."""
    return Refused(code, detail if len(detail) <= DETAIL_CHARS_MAX else detail[:DETAIL_CHARS_MAX] + "…")
