"""What may a controller do, and what does it want done? Its remit and its deeds; whether they are right is not judged here.

The authority refuses what a role may not do. A remit is narrower, and stands beside the code that it binds: a controller that
asks for more than it declared has a bug, and its loop says so before anybody is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from remit.law.lifecycle import OWNER
from remit.model.claims import AnyClaim, Apply, Claim, Delete, Forget, Move, Note, Observe, Role, Spawn

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
