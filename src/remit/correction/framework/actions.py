"""What a reconcile returns (claim, requeue-after) and what its controller may request.

Its remit and its deeds; whether they are right is not judged here.

The authority refuses what a role may not do. A remit is narrower, and stands beside the code that it binds: a controller that
asks for more than it declared has a bug, and its loop says so before anybody is asked.

As a claim, and only where it differs from what was said last. What is true others find out.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple

from remit.correction.controllers.desired_replicas import condition_of
from remit.law.lifecycle import OWNER
from remit.model.claims import AnyClaim, Apply, Claim, Delete, Forget, Move, Note, Observe, Role, Spawn
from remit.model.kinds import Node, Workload
from remit.model.metadata import Condition

_OWN = {Spawn: "create", Forget: "forget"}
"""Transitions with claims of their own."""


class Deed(NamedTuple):
    """One claim. `once` names what it does to what: whoever wants a deed of that name again has seen it undone. It names all
    that would make it another deed: the uid, the attempt, the generation. Empty: it may be wanted any number of times.
    """

    claim: AnyClaim
    once: str = ""


class Again(NamedTuple):
    """Look again after so long, whatever happens: time itself is news."""

    in_ms: int


class Later(NamedTuple):
    """There is news of a key that asks for nothing now: one look will do for all that comes until then."""

    key: str
    in_ms: int


Wish = Deed | Again
Concern = str | Later
"""A key that a change is news to: looked at right away, or later."""


class Remit:
    """All that one controller may ask for: claims by their type, moves by their name, and kinds that it applies or deletes.
    Everybody may note an event and observe a condition.
    """

    def __init__(
        self,
        role: Role,
        *,
        claims: Iterable[type[Claim]] = (),
        transitions: Iterable[str] = (),
        declares: Iterable[str] = (),
    ) -> None:
        self.role = role
        self.claims = frozenset(claims) | {Note, Observe}
        self.transitions = frozenset(transitions)
        self.declares = frozenset(declares)
        foreign = sorted(name for name in self.transitions if OWNER.get(name) is not role)
        if foreign:
            raise ValueError(f"{', '.join(foreign)} are not transitions of {role}")

    def outside(self, claim: AnyClaim) -> str:
        """Why a claim is not in this remit; empty if it is."""
        match claim:
            case Move(transition=name):
                return "" if name in self.transitions else f"{self.role} does not {name}"
            case Spawn() | Forget() if _OWN[type(claim)] in self.transitions:
                return ""
            case Apply(thing=thing):
                kind = type(thing).__name__
                return "" if Apply in self.claims and kind in self.declares else f"{self.role} does not apply a {kind}"
            case Delete(kind=kind):
                return "" if Delete in self.claims and kind in self.declares else f"{self.role} does not delete a {kind}"
            case _ if type(claim) in self.claims:
                return ""
            case _:
                return f"{self.role} does not {type(claim).__name__.lower()}"


MESSAGE_MAX: Final = 1_000

Truth = Literal["True", "False", "Unknown"]


def say(thing: Workload | Node, type_: str, status: Truth, reason: str, message: str, wall: str) -> list[Deed]:
    """Nothing if it stands so already."""
    meta, message = thing.metadata, message[:MESSAGE_MAX]
    known = condition_of(thing.status.conditions, type_)
    if known is not None and (known.status, known.reason, known.message, known.observed_generation) == (
        status,
        reason,
        message,
        meta.generation,
    ):
        return []
    condition = Condition(
        type=type_,
        status=status,
        reason=reason,
        message=message,
        observed_generation=meta.generation,
        last_transition=wall if known is None else later(wall, known.last_transition),
    )
    return [Deed(Observe(type(thing).__name__, meta.name, condition, meta.tenant))]


def later(wall: str, known: str) -> str:
    """Of two conditions of one generation the later stands. Whoever said the last may have had a clock that is ahead of this
    one: then a millisecond more than that.
    """
    if wall > known:
        return wall
    try:
        last = datetime.fromisoformat(known)
    except ValueError:
        return wall
    return (last + timedelta(milliseconds=1)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
