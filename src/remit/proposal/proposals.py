"""Proposals in flight and the decision records written with them.

Shared types between cycle.py, which makes proposals, and scheduler.py, which submits them. Nothing is decided here.

A decision record is the evidence of one result, stored by the authority. One record covers equal replicas that were tried
together. The expensive part, the funnel over all nodes and the best candidates, is computed once per class and reused for a
short time, so each record names the revision it was computed at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from remit.model.claims import AnyClaim, Evidence, RecordDecision
from remit.model.records import DecisionCandidate, DecisionSpec, NearestNode
from remit.observation.scheduler_view import SchedulerView
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.funnel import Funnel, funnel, nearest_fit
from remit.proposal.placement.kernel import Kernel
from remit.proposal.quota import QuotaSource

MEMBERS_MAX: Final = 256
"""Replicas in one record; more replicas make several records."""

SURVEY_AGE_MS_MAX: Final = 2_000
CANDIDATES: Final = 3
_PREFIX: Final = "replica/"
NO_VICTIMS: Final[Mapping[str, str]] = MappingProxyType({})


class ClassSurvey(NamedTuple):
    """Funnel and best candidates of a class at one time and revision."""

    at_ms: int
    revision: int
    funnel: Funnel
    candidates: tuple[DecisionCandidate, ...]


class DecisionOutcome(NamedTuple):
    """Outcome of an attempt. `unblock_events` are the kinds of events that end a wait; `never` is set if none of them can."""

    verdict: str
    reason: str = ""
    detail: str = ""
    unblock_events: tuple[str, ...] = ()
    never: bool = False


class DecisionRecorder:
    """Creates decision records for one term of a scheduler; `term` makes their names unique."""

    def __init__(self, view: SchedulerView, term: str) -> None:
        self._view, self._term = view, term
        self._count = 0

    def survey(self, kernel: Kernel, work_class: WorkClass, now_ms: int, *, refresh: bool = False) -> ClassSurvey:
        """Funnel and best candidates of a class, computed before anything of it is placed; cached for SURVEY_AGE_MS_MAX."""
        survey: ClassSurvey | None = work_class.survey
        if survey is None or refresh or now_ms - survey.at_ms > SURVEY_AGE_MS_MAX:
            rows = kernel.top_rows(work_class, CANDIDATES)
            candidates = tuple(
                DecisionCandidate(node=kernel.node_name(row), score=total, parts=parts) for row, total, parts in rows
            )
            survey = work_class.survey = ClassSurvey(now_ms, self._view.revision, funnel(kernel, work_class), candidates)
        return survey

    def records(
        self,
        tenant: str,
        placed: Mapping[int, str] | Iterable[int],
        verdict: DecisionOutcome,
        *,
        attempt: int,
        quota_source: QuotaSource | None = None,
        survey: ClassSurvey | None = None,
        nearest: NearestNode | None = None,
        overrides: Sequence[str] = (),
        victims: Mapping[str, str] = NO_VICTIMS,
    ) -> list[RecordDecision]:
        """Records for these replicas (by slot), with the node of each if it was placed."""
        view = self._view
        keys = view.replicas.keys
        nodes = placed if isinstance(placed, Mapping) else dict.fromkeys(placed, "")
        named = [(keys[slot].removeprefix(_PREFIX), node) for slot, node in nodes.items()]
        policy = view.shapes.policy
        quota_left = dict(quota_source.ledger.free) if quota_source is not None and quota_source.ledger is not None else {}
        records = []
        for start in range(0, len(named), MEMBERS_MAX):
            self._count += 1
            records.append(
                RecordDecision(
                    f"{self._term}-{self._count:x}",
                    tenant,
                    DecisionSpec(
                        replicas=dict(named[start : start + MEMBERS_MAX]),
                        attempt=max(1, attempt),
                        revision=view.revision if survey is None else survey.revision,
                        age_ms=view.age_ms(),
                        nodes=0 if survey is None else survey.funnel.nodes,
                        funnel=() if survey is None else survey.funnel.pairs(),
                        fits=0 if survey is None else survey.funnel.fits,
                        candidates=() if survey is None else survey.candidates,
                        nearest=nearest,
                        grant="" if quota_source is None else quota_source.name,
                        left=quota_left,
                        policy=0 if policy is None else policy.spec.number,
                        overrides=tuple(overrides),
                        verdict=verdict.verdict,
                        reason=verdict.reason,
                        detail=verdict.detail,
                        cures=verdict.unblock_events,
                        never=verdict.never,
                        victims=dict(victims),
                    ),
                )
            )
        return records


def nearest_node(kernel: Kernel, work_class: WorkClass) -> NearestNode | None:
    fit = nearest_fit(kernel, work_class)
    if fit is None:
        return None
    return NearestNode(node=kernel.node_name(fit.row), refused=tuple(f.name for f in fit.refused), lacks=fit.missing)


class Proposal(NamedTuple):
    """Claims that are submitted together, the slots behind each, and their evidence. `number` is unique within a term."""

    number: int
    claims: list[AnyClaim]
    slots: list[tuple[int, ...]]
    evidence: Evidence

    def __bool__(self) -> bool:
        return bool(self.claims)

    def add(self, claim: AnyClaim, *slots: int) -> None:
        self.claims.append(claim)
        self.slots.append(slots)


class InFlightClaim(NamedTuple):
    """The proposal in which a replica is claimed, and the revision of its row in that claim."""

    proposal: int
    revision: int


class HeldReplica(NamedTuple):
    """A replica that waits for the view to reach a revision."""

    proposal: int
    revision: int
    until_ms: int
    refusal: str
    """Refusal code; empty if its gang was accepted and the view must show whether this replica was part of it."""
    rebind: bool = False
    """Whether a reservation is to be bound again; otherwise it is released."""
