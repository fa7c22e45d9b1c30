"""Result types of explanations, printed by `remit explain` and returned as JSON by the API.

Frozen values without logic: pending.py, subjects.py and capacity.py compute them. Field names are part of the HTTP API, so
they do not change when the code around them is renamed.
"""

from __future__ import annotations

from msgspec import Struct

from remit.model.records import DecisionCandidate
from remit.model.resources import Amount

_NOTHING = Amount()


class FilterStep(Struct, frozen=True):
    """One filter of a funnel: how many of the remaining nodes it rejected (`refused`) and how many remain after it (`left`)."""

    filter: str
    reason: str
    refused: int
    left: int
    meaning: str = ""
    """Why the filter rejects a node, as a sentence; empty if only the filter's name was recorded."""


class FilterFunnel(Struct, frozen=True):
    """How many nodes each filter rejected, in order. The rejected nodes and `fits` add up to `nodes`."""

    nodes: int
    steps: tuple[FilterStep, ...]
    fits: int


class FailedRule(Struct, frozen=True):
    """A rule that a node violates: its meaning as text, and what would fix it (`cure`)."""

    filter: str
    reason: str
    meaning: str
    cure: str


class NodeFitExplanation(Struct, frozen=True):
    """Whether a replica fits on one node now: the rules the node violates and what it lacks, or else its score."""

    node: str
    fits: bool
    broken: tuple[FailedRule, ...] = ()
    lacks: Amount = _NOTHING
    score: int | None = None
    parts: dict[str, int] = {}


class Change(Struct, frozen=True, omit_defaults=True):
    """One change that helps a pending workload to be placed. `kind` selects which fields apply:

    - `quota`: ledger `what` needs `amount` more
    - `grant`: grant `what` must be renewed or issued again
    - `tenant`: tenant `what` must be declared
    - `override`: override `what` must end
    - `filter`: filter `what` must stop rejecting the replica; `nodes` are the nodes to repair, if that is about node state
    - `grow`: node `what` needs `amount` more capacity; devices of one of `models`
    - `shrink`: each replica must request `amount` less
    - `nodes`: `count` more nodes like `what` are needed
    - `members`: `count` more replicas of the gang are needed
    - `policy`: the lease on policy `what` must be renewed
    """

    kind: str
    what: str = ""
    amount: Amount = _NOTHING
    count: int = 0
    models: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


class Remedy(Struct, frozen=True):
    """A minimal set of changes that is sufficient together. After them the replica fits on `fits` nodes, some of them listed in
    `nodes`.
    """

    changes: tuple[Change, ...]
    fits: int
    nodes: tuple[str, ...] = ()


class VictimInfo(Struct, frozen=True):
    replica: str
    workload: str
    priority: int


class PreemptionExplanation(Struct, frozen=True):
    """Whether preemption could make room, and which victims it would take. If it is not possible, `why` is one of:

    - `priority`: no replica of lower priority runs on a node where this one could run
    - `class`: the priority class does not preempt
    - `gang`: gangs do not preempt
    - `quota`: quota is exhausted, so freed capacity would not help
    - `place`: no node is rejected only for lack of capacity
    - `protected`: disruption limits (minAvailable) protect the victims
    - `little`: evicting all candidates would not free enough
    """

    possible: bool
    why: str = ""
    node: str = ""
    victims: tuple[VictimInfo, ...] = ()


class QuotaExplanation(Struct, frozen=True):
    """The ledger that the replica is charged to: what is left in it, the charge of one replica, and how many of `wanted` it
    covers. `dead` is the refusal code if nothing can be charged to it at all.
    """

    ledger: str
    left: Amount
    charge: Amount
    wanted: int
    covers: int
    dead: str = ""


class GangExplanation(Struct, frozen=True):
    """A gang: `min` replicas must be bound at once; how many run (`standing`), are pending (`waiting`), and would fit now."""

    min: int
    standing: int
    waiting: int
    fits: int


class NearestNodeExplanation(Struct, frozen=True):
    """The node that is nearest to fitting, the filters that reject it, and what it lacks."""

    node: str
    refused: tuple[str, ...]
    lacks: Amount


class PendingExplanation(Struct, frozen=True):
    """Why a replica is pending. `verdict` is `now` (it can be placed at once), `not-now`, or `never` (with the cluster as
    declared now).
    """

    verdict: str
    reason: str
    meaning: str
    cure: str
    detail: str
    cures: tuple[str, ...]
    passage: FilterFunnel
    quota: QuotaExplanation
    nearest: NearestNodeExplanation | None
    gang: GangExplanation | None
    preemption: PreemptionExplanation | None
    unblocks: tuple[Remedy, ...]
    candidates: tuple[DecisionCandidate, ...]


class HistoryEntry(Struct, frozen=True):
    """One recorded event of a replica: a scheduler's decision or the authority's verdict. `at` is a wall clock time."""

    revision: int
    at: str
    by: str
    said: str
    reason: str = ""
    detail: str = ""
    attempt: int = 0


class PlacementExplanation(Struct, frozen=True):
    """Why the replica runs on its node: the evidence in the decision that bound it. `seen` is the revision of that evidence and
    `age_ms` its age at the time of the decision.
    """

    revision: int
    at: str
    seen: int
    age_ms: int
    attempt: int
    passage: FilterFunnel
    candidates: tuple[DecisionCandidate, ...]
    grant: str
    left: Amount
    policy: int
    overrides: tuple[str, ...]
    victims: tuple[str, ...]


class ExplanationEvidence(Struct, frozen=True):
    """The data behind an explanation: one revision of the store and how long ago it was read, policy and overrides."""

    revision: int
    age_ms: int
    policy: int
    overrides: tuple[str, ...]


class ReplicaExplanation(Struct, frozen=True):
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
    evidence: ExplanationEvidence
    waits: PendingExplanation | None
    chosen: PlacementExplanation | None
    grants: tuple[str, ...]
    devices: dict[str, int]
    victims: dict[str, bool]
    """For a reservation: its preemption victims, and whether each one has released its capacity."""
    there: NodeFitExplanation | None
    here: NodeFitExplanation | None
    history: tuple[HistoryEntry, ...]
    result: str = ""
    reason: str = ""
    said: str = ""
    """Progress as reported by the node's agent, for example how far an artifact fetch is or why the replica is not ready."""


class PendingGroup(Struct, frozen=True):
    """Pending replicas of one workload that share a reason."""

    generation: int
    priority: int
    count: int
    first: str
    waits: PendingExplanation


class WorkloadExplanation(Struct, frozen=True):
    """Explanation of a workload. `stages` counts its replicas by phase; `missing` replicas are desired but not created yet."""

    kind: str
    tenant: str
    name: str
    wanted: int
    stages: dict[str, int]
    missing: int
    since: str
    evidence: ExplanationEvidence
    groups: tuple[PendingGroup, ...]
    limit: str
    """The current limit of the workload: a reason code, or the phase that most unfinished replicas are in; empty if it has
    reached its desired state.
    """
    there: NodeFitExplanation | None
    history: tuple[HistoryEntry, ...]
    detail: str = ""
    """The controllers' message about that limit, for example why the workload failed or what a rollout waits for."""
    unattended: str = ""
    """The component that should act on the workload but is not running, and how to fix that; empty if every component runs."""
