"""Proposals in flight and the decision records written with them.

Its evidence, as a record that the authority keeps. Nothing is decided here.

One record speaks of equal replicas that were tried together. What costs most, the funnel over all nodes and who came first, is
found once for a class in a while, not for every one placed: so it says at which revision it was true.

The words between cycle.py, which proposes, and scheduler.py, which asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from remit.model.claims import AnyClaim, Evidence, Explain
from remit.model.records import Candidate, DecisionSpec, Nearest
from remit.observation.scheduler_view import View
from remit.proposal.placement.class_scores import Class
from remit.proposal.placement.funnel import Funnel, funnel, nearest
from remit.proposal.placement.kernel import Kernel
from remit.proposal.quota import Purse

MEMBERS_MAX: Final = 256
"""How many replicas one record speaks of at most; more of them make more records."""

FRESH_MS: Final = 2_000
CANDIDATES: Final = 3
_PREFIX: Final = "replica/"
NO_VICTIMS: Final[Mapping[str, str]] = MappingProxyType({})


class Seen(NamedTuple):
    """What was found out about a class, and when."""

    at_ms: int
    revision: int
    funnel: Funnel
    candidates: tuple[Candidate, ...]


class Verdict(NamedTuple):
    """What came of it. `cures` are the events that end a wait; `never`, that none of them can."""

    word: str
    reason: str = ""
    detail: str = ""
    cures: tuple[str, ...] = ()
    never: bool = False


class Decisions:
    """Writes records for one term of a scheduler; `term` makes their names its own."""

    def __init__(self, view: View, term: str) -> None:
        self._view, self._term = view, term
        self._count = 0

    def look(self, kernel: Kernel, one: Class, now_ms: int, *, anew: bool = False) -> Seen:
        """Which nodes the filters leave, and who is ahead; before anything of the class is placed."""
        seen: Seen | None = one.looked
        if seen is None or anew or now_ms - seen.at_ms > FRESH_MS:
            rows = kernel.best(one, CANDIDATES)
            candidates = tuple(Candidate(node=kernel.name(row), score=total, parts=parts) for row, total, parts in rows)
            seen = one.looked = Seen(now_ms, self._view.revision, funnel(kernel, one), candidates)
        return seen

    def records(
        self,
        tenant: str,
        placed: Mapping[int, str] | Iterable[int],
        verdict: Verdict,
        *,
        attempt: int,
        purse: Purse | None = None,
        seen: Seen | None = None,
        near: Nearest | None = None,
        overrides: Sequence[str] = (),
        victims: Mapping[str, str] = NO_VICTIMS,
    ) -> list[Explain]:
        """One or more records of replicas by slot, each with its node if it found one."""
        view = self._view
        keys = view.replicas.keys
        where = placed if isinstance(placed, Mapping) else dict.fromkeys(placed, "")
        named = [(keys[slot].removeprefix(_PREFIX), node) for slot, node in where.items()]
        policy = view.policy
        left = dict(purse.ledger.left) if purse is not None and purse.ledger is not None else {}
        made = []
        for start in range(0, len(named), MEMBERS_MAX):
            self._count += 1
            made.append(
                Explain(
                    f"{self._term}-{self._count:x}",
                    tenant,
                    DecisionSpec(
                        replicas=dict(named[start : start + MEMBERS_MAX]),
                        attempt=max(1, attempt),
                        revision=view.revision if seen is None else seen.revision,
                        age_ms=view.age_ms(),
                        nodes=0 if seen is None else seen.funnel.nodes,
                        funnel=() if seen is None else seen.funnel.pairs(),
                        fits=0 if seen is None else seen.funnel.fits,
                        candidates=() if seen is None else seen.candidates,
                        nearest=near,
                        grant="" if purse is None else purse.name,
                        left=left,
                        policy=0 if policy is None else policy.spec.number,
                        overrides=tuple(overrides),
                        verdict=verdict.word,
                        reason=verdict.reason,
                        detail=verdict.detail,
                        cures=verdict.cures,
                        never=verdict.never,
                        victims=dict(victims),
                    ),
                )
            )
        return made


def near(kernel: Kernel, one: Class) -> Nearest | None:
    found = nearest(kernel, one)
    if found is None:
        return None
    return Nearest(node=kernel.name(found.row), refused=tuple(f.name for f in found.refused), lacks=found.lacks)


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
