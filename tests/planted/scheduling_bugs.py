"""Planted bugs of schedulers and of the handling of their claims, each with a scenario of its own."""

from __future__ import annotations

from typing import Any

import pytest

from remit.client.authority_client import RetriesExhausted
from remit.client.lease_holder import LeaseHold
from remit.commitment import decide
from remit.commitment.draft import Draft
from remit.commitment.draft_replicas import DraftReplicas
from remit.commitment.rulings import placement
from remit.law.fit import misfit
from remit.law.overrides import ActiveOverrides
from remit.model.claims import Verdict
from remit.model.kinds import Override
from remit.model.objects import key_of
from remit.model.records import Replica
from remit.observation.holds import Holds
from remit.observation.reflector import Reflector
from remit.proposal import attempts
from remit.proposal.attempts import Attempts
from remit.proposal.cycle import Cycle
from remit.proposal.placement import builtin_plugins
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.preemption import DisruptionAllowance
from remit.proposal.placement.preemption_candidates import VictimSelector
from remit.proposal.proposals import Proposal
from remit.proposal.queue import backlog
from remit.proposal.queue.backlog import Backlog
from remit.proposal.scheduler import InFlightProposals
from remit.proposal.unreported import UnreportedReplicas
from remit.store import chain
from tests.planted.authority_bugs import ACKNOWLEDGEMENT_CHECKS, LEASE_CHECKS, a_lost_commit_is_settled_by_a_read
from tests.planted.ledger_bugs import CAPACITY_CHECKS, capacity_is_not_checked
from tests.planted.planted_bug import bug

PENDING_CHECKS = (
    "placeable_replicas_are_bound",
    "placeable_gang_runs",
    "pending_replicas_are_tried",
    "pending_replicas_have_a_reason",
)
"""Checks that report replicas waiting without any attempt."""
VIEW_CHECKS = (*PENDING_CHECKS, "views_match_store")
CLAIM_CHECK = "claims_fit_seen_state"
"""Checks that report a scheduler claiming on state it has not seen."""


@bug(3, scenario="stale-views", seed=2, expects=(*VIEW_CHECKS, "processes_do_not_end_by_themselves"))
def an_assumption_is_never_dropped(patch: pytest.MonkeyPatch) -> None:
    """A scheduler assumes that its claims are bound, also after a refusal."""
    patch.setattr(Holds, "forget", lambda self, slot: False)
    patch.setattr(Holds, "expire_assumed", lambda self, now_ms: [])


@bug(2, scenario="two-schedulers", seed=2, expects=CAPACITY_CHECKS)
def the_same_capacity_is_given_twice(patch: pytest.MonkeyPatch) -> None:
    """Two claims on the same capacity are both accepted."""
    capacity_is_not_checked(patch)


@bug(1, 3, scenario="unheard", seed=8, expects=VIEW_CHECKS)
def unanswered_claims_are_assumed_accepted(patch: pytest.MonkeyPatch) -> None:
    """An unanswered claim is assumed accepted for ever."""

    async def buggy_verdicts(self: InFlightProposals, proposal: Proposal) -> list[Verdict] | None:
        try:
            return await self._scheduler._client.submit_many(proposal.claims, evidence=proposal.evidence)
        except RetriesExhausted as error:
            self._scheduler._report_failure(error)
            return None

    patch.setattr(InFlightProposals, "_verdicts", buggy_verdicts)
    patch.setattr(Cycle, "on_no_answer", lambda self, proposal, now_ms: None)
    patch.setattr(Holds, "expire_assumed", lambda self, now_ms: [])


@bug(1, 8, 19, scenario="leader-after-timeout", expects=ACKNOWLEDGEMENT_CHECKS)
def the_next_leader_settles_by_a_read(patch: pytest.MonkeyPatch) -> None:
    """Whether a lost write was applied is determined by a read, not by a commit."""
    a_lost_commit_is_settled_by_a_read(patch)


@bug(15, 18, scenario="deposed-scheduler", expects=LEASE_CHECKS)
def a_deposed_scheduler_keeps_claiming(patch: pytest.MonkeyPatch) -> None:
    """A scheduler goes on after its lease term, and its epoch is not checked."""
    patch.setattr(LeaseHold, "is_valid", lambda self, now_ms: True)
    patch.setattr(LeaseHold, "valid_until_ms", property(lambda self: self._valid_until_ms + 3_600_000))
    patch.setattr(decide, "check_fence", lambda draft, actor: None)


@bug(
    5,
    22,
    scenario="watch-gaps",
    expects=(
        *VIEW_CHECKS,
        CLAIM_CHECK,
        "deletions_complete",
        "unknown_replicas_are_resolved",
        "desired_state_is_reached",
        "returned_nodes_become_ready",
    ),
)
def a_scheduler_ignores_watch_gaps(patch: pytest.MonkeyPatch) -> None:
    """A watcher does not check whether an event is missing."""
    original_init = Reflector.__init__

    def buggy_init(self: Reflector, *args: Any, **more: Any) -> None:
        original_init(self, *args, **{**more, "idle_ms": 3_600_000})

    patch.setattr(Reflector, "__init__", buggy_init)
    patch.setattr(chain, "gap", lambda seen, event: None)


@bug(23, scenario="flood", expects=("scheduling_latency_is_bounded", *PENDING_CHECKS))
def the_head_of_the_queue_blocks(patch: pytest.MonkeyPatch) -> None:
    """While any replica waits, none of lower priority is tried."""
    original_take = Backlog.take

    def buggy_take(self: Backlog, limit: int, now_ms: int, shares: Any) -> Any:
        waits = max((line.priority for line, _ in self.waiting()), default=-1)
        runs = original_take(self, limit, now_ms, shares)
        for line, members in runs:
            if line.priority < waits:
                for member in members:
                    self.return_member(member)
        return [run for run in runs if run[0].priority >= waits]

    patch.setattr(Backlog, "take", buggy_take)


@bug(23, scenario="flood", expects=("pending_replicas_have_a_reason", "pending_replicas_are_tried"))
def only_tried_replicas_get_a_reason(patch: pytest.MonkeyPatch) -> None:
    """The waiting reason is recorded only for as many replicas as a batch tries."""
    patch.setattr(UnreportedReplicas, "take_due", lambda self, now_ms, line_of: {})


@bug(24, 38, scenario="preemption-churn", seed=2, expects=("preemption_keeps_min_available",))
def protected_replicas_are_preempted(patch: pytest.MonkeyPatch) -> None:
    """Preemption ignores the disruption limit of its victims."""
    patch.setattr(VictimSelector, "disruption_allowance", lambda self, view: DisruptionAllowance.unlimited(10_000))


@bug(25, scenario="two-gangs", expects=("gangs_are_bound_together",))
def gangs_are_claimed_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """The members of a gang are claimed one by one, by schedulers that crash in between."""
    patch.setattr(attempts, "gang_minimum", lambda view, key: 0)
    patch.setattr(DraftReplicas, "bound_count", lambda self, generation: 1_000)


@bug(17, scenario="overrides", expects=("ended_overrides_are_not_cited",))
def overrides_never_end(patch: pytest.MonkeyPatch) -> None:
    """A scheduler applies overrides past their deadline."""

    def buggy_active_overrides(overrides: Any, now: Any) -> Any:
        named: list[Override] = sorted(overrides, key=lambda one: one.metadata.name)
        return ActiveOverrides(tuple(named))

    patch.setattr(builtin_plugins, "active_overrides", buggy_active_overrides)


@bug(17, 22, scenario="overrides", seed=5, expects=PENDING_CHECKS)
def the_end_of_an_override_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """A paused replica stays paused: it is tried neither at the end of the override nor after a while."""
    renew = builtin_plugins.OverrideFilter.update

    def buggy_update(self: builtin_plugins.OverrideFilter, overrides: Any, now: Any) -> bool:
        before = self.effects
        changed = renew(self, overrides, now)
        if changed and len(self.effects.overrides) < len(before.overrides):
            self.effects = before
            return False
        return changed

    patch.setattr(builtin_plugins.OverrideFilter, "update", buggy_update)
    patch.setattr(ActiveOverrides, "until_ms", None)
    patch.setattr(Attempts, "_affecting_overrides", lambda self, key: ())
    for name in ("RETRY_MS_MIN", "RETRY_MS_MAX"):
        patch.setattr(backlog, name, 3_600_000)


def _warm(kernel: Kernel, one: WorkClass) -> Any:
    """By row: whether the node is warm for this class."""
    score = next(score for score in kernel.scores if score.name == "locality")
    return score.score(one.requirements, kernel.columns) > 0


def _warm_nodes_pass_every_filter(patch: pytest.MonkeyPatch) -> None:
    original_update_static = Kernel._update_static

    def buggy_update_static(self: Kernel, one: WorkClass, rows: int) -> None:
        original_update_static(self, one, rows)
        if one.requirements.hinted_workload:
            one.closed &= ~_warm(self, one)

    patch.setattr(Kernel, "_update_static", buggy_update_static)


@bug(45, scenario="stale-hint", expects=(CLAIM_CHECK,))
def a_hint_bypasses_filters(patch: pytest.MonkeyPatch) -> None:
    """On warm nodes a scheduler checks neither taints nor policies nor cordons."""
    _warm_nodes_pass_every_filter(patch)


@bug(45, scenario="stale-hint", expects=(CLAIM_CHECK,))
def a_hint_is_taken_for_capacity(patch: pytest.MonkeyPatch) -> None:
    """On warm nodes a scheduler does not check capacity."""
    original_score_rows = Kernel._score_rows

    def buggy_score_rows(self: Kernel, one: WorkClass, rows: Any, *spent: Any) -> Any:
        found = original_score_rows(self, one, rows, *spent)
        if one.requirements.hinted_workload and not (one.requirements.whole_devices or one.requirements.device_shares):
            found[_warm(self, one)[rows] & ~one.closed[rows]] = 1_000
        return found

    patch.setattr(Kernel, "_score_rows", buggy_score_rows)


@bug(45, scenario="stale-hint", expects=("hard_constraints_hold_at_bind",))
def a_hint_authorises_placement(patch: pytest.MonkeyPatch) -> None:
    """Schedulers claim warm nodes, and the authority does not check them either."""
    _warm_nodes_pass_every_filter(patch)
    original_place = placement.place
    is_warm: list[bool] = [False]

    def buggy_place(draft: Draft, operation: Any, claim: Any, replica: Replica, ask: Any) -> Any:
        summary = draft.lookup(key_of("Summary", f"warm/{claim.node}"))
        counts = {} if summary is None else summary[0].spec.counts
        is_warm[0] = f"{replica.metadata.tenant}/{replica.spec.workload}" in counts
        return original_place(draft, operation, claim, replica, ask)

    patch.setattr(placement, "place", buggy_place)
    patch.setattr(placement, "misfit", lambda *args: None if is_warm[0] else misfit(*args))
    patch.setattr(placement, "fits_plainly", lambda *args: False)


@bug(22, 45, scenario="stale-hint", expects=("scheduling_latency_is_bounded", *PENDING_CHECKS))
def replicas_wait_for_warm_nodes(patch: pytest.MonkeyPatch) -> None:
    """A class that is warm anywhere goes to those nodes only."""
    original_score_rows = Kernel._score_rows

    def buggy_score_rows(self: Kernel, one: WorkClass, rows: Any, *spent: Any) -> Any:
        found = original_score_rows(self, one, rows, *spent)
        if one.requirements.hinted_workload and (warm := _warm(self, one)).any():
            found[~warm[rows]] = -1
        return found

    patch.setattr(Kernel, "_score_rows", buggy_score_rows)
