"""Which wrong turns could a scheduler take, or could be taken with what it asks? Each in the scenario that is there for it."""

from __future__ import annotations

from typing import Any

import pytest

from remit.client.client import NoAnswer
from remit.client.tenure import Tenure
from remit.commitment import decide
from remit.commitment.draft import Draft
from remit.law.overrides import Effects
from remit.model.claims import Verdict
from remit.model.kinds import Override
from remit.observation.following import Follower
from remit.observation.view import View
from remit.proposal import attempts, backlog, steering
from remit.proposal.asking import Proposal
from remit.proposal.attempts import Attempts
from remit.proposal.backlog import Backlog
from remit.proposal.cycle import Cycle
from remit.proposal.preemption import Spare
from remit.proposal.scheduler import Asking
from remit.proposal.victims import Victims
from remit.store import chain
from tests.planted.bug import bug
from tests.planted.in_authority import FENCED, TOLD, a_lost_commit_is_settled_by_a_read
from tests.planted.in_ledgers import ROOM, room_is_believed

LEFT = ("eligible_work_is_bound", "one_gang_runs", "pending_work_is_tried", "waiting_has_a_reason")
"""What tells that somebody waits of whom nobody thinks any more."""
PHANTOMS = (*LEFT, "views_show_what_stands")


@bug(3, scenario="stale-views", seed=2, expects=PHANTOMS)
def an_assumption_is_never_dropped(patch: pytest.MonkeyPatch) -> None:
    """What a scheduler has once claimed it takes for bound, whatever the answer was."""
    patch.setattr(View, "forget", lambda self, slot: False)
    patch.setattr(View, "expire", lambda self, now_ms: [])


@bug(2, scenario="two-schedulers", expects=ROOM)
def the_same_room_is_given_twice(patch: pytest.MonkeyPatch) -> None:
    """Of two who claim the same room both get it."""
    room_is_believed(patch)


@bug(1, 3, scenario="bind-unanswered", expects=PHANTOMS)
def silence_is_taken_for_a_yes(patch: pytest.MonkeyPatch) -> None:
    """What was asked and not answered is thought to have happened, for ever."""

    async def believed(self: Asking, proposal: Proposal) -> list[Verdict] | None:
        try:
            return await self._scheduler._client.ask_many(proposal.claims, evidence=proposal.evidence)
        except NoAnswer as error:
            self._scheduler._give_up(error)
            return None

    patch.setattr(Asking, "_answered", believed)
    patch.setattr(Cycle, "unanswered", lambda self, proposal, now_ms: None)
    patch.setattr(View, "expire", lambda self, now_ms: [])


@bug(1, 8, 19, scenario="leader-after-timeout", seed=2, expects=TOLD)
def whoever_leads_next_settles_by_a_read(patch: pytest.MonkeyPatch) -> None:
    """Whether a lost write has happened is read, and not decided."""
    a_lost_commit_is_settled_by_a_read(patch)


@bug(15, 18, scenario="deposed-scheduler", expects=FENCED)
def the_deposed_go_on(patch: pytest.MonkeyPatch) -> None:
    """A scheduler goes on past its term, and nobody asks for its epoch."""
    patch.setattr(Tenure, "may_act", lambda self, now_ms: True)
    patch.setattr(Tenure, "held_until_ms", property(lambda self: self._held_until_ms + 3_600_000))
    patch.setattr(decide, "claimant", lambda draft, actor: None)


@bug(5, 22, scenario="watch-gaps", expects=(*PHANTOMS, "deletion_completes", "unknown_resolves", "desire_is_met"))
def a_scheduler_does_not_miss_what_it_missed(patch: pytest.MonkeyPatch) -> None:
    """Whoever follows the store does not check whether an event is lacking."""
    make = Follower.__init__

    def patient(self: Follower, *args: Any, **more: Any) -> None:
        make(self, *args, **{**more, "idle_ms": 3_600_000})

    patch.setattr(Follower, "__init__", patient)
    patch.setattr(chain, "gap", lambda seen, event: None)


@bug(23, scenario="flood", expects=("work_is_bound_soon", *LEFT))
def the_head_of_the_queue_blocks(patch: pytest.MonkeyPatch) -> None:
    """As long as something waits nobody of a lower priority has a turn."""
    take = Backlog.take

    def strictly(self: Backlog, limit: int, now_ms: int, shares: Any) -> Any:
        waits = max((line.priority for line, _ in self.waiting()), default=-1)
        runs = take(self, limit, now_ms, shares)
        for line, members in runs:
            if line.priority < waits:
                for member in members:
                    self.returned(member)
        return [run for run in runs if run[0].priority >= waits]

    patch.setattr(Backlog, "take", strictly)


@bug(23, scenario="flood", expects=("waiting_has_a_reason", "pending_work_is_tried"))
def only_those_who_were_tried_are_told(patch: pytest.MonkeyPatch) -> None:
    """Why a line waits is written down of as many as a batch takes."""
    tell = Cycle._tell

    def first(self: Cycle, now_ms: int) -> Any:
        self._retell.clear()
        return tell(self, now_ms)

    patch.setattr(Cycle, "_tell", first)


@bug(24, 38, scenario="preemption-churn", expects=("preemption_leaves_enough",))
def what_is_to_stay_is_pushed_aside(patch: pytest.MonkeyPatch) -> None:
    """How many replicas a workload may not lose is not asked of who makes room."""
    patch.setattr(Victims, "limits", lambda self, view: Spare.boundless(10_000))


@bug(25, scenario="two-gangs", expects=("gangs_are_bound_together",))
def herds_come_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """The members of a gang are claimed one by one, by schedulers that die in between."""
    patch.setattr(attempts, "least_of", lambda view, key: 0)
    patch.setattr(Draft, "held", lambda self, generation: 1_000)


@bug(17, scenario="overrides", expects=("ended_overrides_are_not_cited",))
def overrides_never_end(patch: pytest.MonkeyPatch) -> None:
    """A scheduler heeds whatever override there is, past its time."""

    def always(overrides: Any, now: Any) -> Any:
        named: list[Override] = sorted(overrides, key=lambda one: one.metadata.name)
        return Effects(tuple(named))

    patch.setattr(steering, "in_force", always)


@bug(17, 22, scenario="overrides", expects=LEFT)
def the_end_of_an_override_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """Who was paused stays so: nothing is asked anew when a term is over, nor after a while."""
    renew = steering.Steering.renew

    def once(self: steering.Steering, overrides: Any, now: Any) -> bool:
        before = self.effects
        changed = renew(self, overrides, now)
        if changed and len(self.effects.overrides) < len(before.overrides):
            self.effects = before
            return False
        return changed

    patch.setattr(steering.Steering, "renew", once)
    patch.setattr(Effects, "until_ms", None)
    patch.setattr(Attempts, "_named", lambda self, key: ())
    for name in ("RETRY_MS_MIN", "RETRY_MS_MAX"):
        patch.setattr(backlog, name, 3_600_000)
