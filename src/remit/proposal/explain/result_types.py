"""Result types of explanations.

Frozen values that are printed and written as JSON; how they are found is in explaining.py.
"""

from __future__ import annotations

from msgspec import Struct

from remit.model.records import Candidate
from remit.model.resources import Amount

_NOTHING = Amount()


class Step(Struct, frozen=True):
    """One filter of a funnel: how many nodes it refused of those that came so far, and how many it left."""

    filter: str
    reason: str
    refused: int
    left: int
    meaning: str = ""
    """Why it refuses, in words; nothing, if only its name was recorded."""


class Passage(Struct, frozen=True):
    """Where all nodes went: what the steps refused and what `fits` add up to `nodes`."""

    nodes: int
    steps: tuple[Step, ...]
    fits: int


class Broken(Struct, frozen=True):
    """A rule that a node breaks, in words, and what would mend it."""

    filter: str
    reason: str
    meaning: str
    cure: str


class NodeAnswer(Struct, frozen=True):
    """Could it stand on this node now? Every rule that the node breaks, and what it lacks; its score, if it breaks none."""

    node: str
    fits: bool
    broken: tuple[Broken, ...] = ()
    lacks: Amount = _NOTHING
    score: int | None = None
    parts: dict[str, int] = {}


class Change(Struct, frozen=True, omit_defaults=True):
    """One thing to change. `kind` says what:

    `quota` (the ledger `what` needs `amount` more), `grant` (`what` renewed or issued anew), `tenant` (declared), `override`
    (`what` ended), `filter` (the filter `what` no longer in the way; by putting `nodes` right, if it has any), `grow` (node
    `what` has `amount` more; devices of one of `models`), `shrink` (each replica asks for `amount` less), `nodes` (`count` more
    nodes like `what`), `members` (`count` more replicas of the gang), `policy` (the lease on policy `what` renewed).
    """

    kind: str
    what: str = ""
    amount: Amount = _NOTHING
    count: int = 0
    models: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


class Unblock(Struct, frozen=True):
    """Changes that together are enough, each as small as can be; then it fits on so many nodes, of which some are named."""

    changes: tuple[Change, ...]
    fits: int
    nodes: tuple[str, ...] = ()


class VictimTold(Struct, frozen=True):
    replica: str
    workload: str
    priority: int


class Preemption(Struct, frozen=True):
    """Who would have to go. `why` is a word if nobody can: `priority` (nothing lower runs where it could stand), `class`,
    `gang`, `quota`, `place` (room is not what is lacking), `protected` (disruption limits), `little` (it would not be enough).
    """

    possible: bool
    why: str = ""
    node: str = ""
    victims: tuple[VictimTold, ...] = ()


class QuotaTold(Struct, frozen=True):
    """The ledger that it draws on, what is left there, what one replica is charged, and for how many of `wanted` that does."""

    ledger: str
    left: Amount
    charge: Amount
    wanted: int
    covers: int
    dead: str = ""


class GangTold(Struct, frozen=True):
    """So many must be bound at once; so many stand, wait, and would find a place now."""

    min: int
    standing: int
    waiting: int
    fits: int


class Nearest(Struct, frozen=True):
    """The node that came closest, the filters that refuse it, and what it lacks."""

    node: str
    refused: tuple[str, ...]
    lacks: Amount


class Waits(Struct, frozen=True):
    """Why work waits. `verdict` is `now` (nothing is in its way), `not-now` or `never` (as things are declared now)."""

    verdict: str
    reason: str
    meaning: str
    cure: str
    detail: str
    cures: tuple[str, ...]
    passage: Passage
    quota: QuotaTold
    nearest: Nearest | None
    gang: GangTold | None
    preemption: Preemption | None
    unblocks: tuple[Unblock, ...]
    candidates: tuple[Candidate, ...]


class Told(Struct, frozen=True):
    """What was recorded of one attempt: a scheduler's decision, or the authority's answer. `at` is of a wall clock."""

    revision: int
    at: str
    by: str
    said: str
    reason: str = ""
    detail: str = ""
    attempt: int = 0


class Chosen(Struct, frozen=True):
    """Why here: what the decision that bound it had seen, as its record says; `seen` was its revision, `age_ms` old."""

    revision: int
    at: str
    seen: int
    age_ms: int
    attempt: int
    passage: Passage
    candidates: tuple[Candidate, ...]
    grant: str
    left: Amount
    policy: int
    overrides: tuple[str, ...]
    victims: tuple[str, ...]


class Evidence(Struct, frozen=True):
    """What this explanation was made from: one revision of the store, read so long ago."""

    revision: int
    age_ms: int
    policy: int
    overrides: tuple[str, ...]


class ReplicaTold(Struct, frozen=True):
    kind: str
    tenant: str
    name: str
    workload: str
    generation: int
    phase: str
    attempt: int
    priority: int
    node: str
    since: str
    evidence: Evidence
    waits: Waits | None
    chosen: Chosen | None
    grants: tuple[str, ...]
    devices: dict[str, int]
    victims: dict[str, bool]
    """Of a reservation: who must go, and whether it has."""
    there: NodeAnswer | None
    here: NodeAnswer | None
    history: tuple[Told, ...]
    result: str = ""
    reason: str = ""
    said: str = ""
    """What its node says of it meanwhile: how far a fetch is, or why it is not ready."""


class Group(Struct, frozen=True):
    """Replicas of a workload that wait for the same reason."""

    generation: int
    priority: int
    count: int
    first: str
    waits: Waits


class WorkloadTold(Struct, frozen=True):
    """`stages` counts its replicas by where they stand; `missing` are wanted and not made yet."""

    kind: str
    tenant: str
    name: str
    wanted: int
    stages: dict[str, int]
    missing: int
    since: str
    evidence: Evidence
    groups: tuple[Group, ...]
    limit: str
    """What limits it now, in a word: a reason's code; the stage that most are in; or empty, if it is where it should be."""
    there: NodeAnswer | None
    history: tuple[Told, ...]
    detail: str = ""
    """What its controllers say of that, in words: why it failed, or what a rollout waits for."""
    unattended: str = ""
    """Who should move it on and does not act, and the cure, in words; empty if nobody is missed."""
