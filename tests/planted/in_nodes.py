"""Which wrong turns could be taken by agents, keepers, leases and those who judge nodes?"""

from __future__ import annotations

from typing import Any

import pytest

from remit.client.client import Client, NoAnswer, Renewal
from remit.client.tenure import Tenure
from remit.commitment import moving, restoring
from remit.commitment.authority import Authority
from remit.commitment.books import AWAITED_NODE
from remit.commitment.draft import Draft
from remit.model.claims import Actor, AnyClaim, Move
from remit.model.objects import key_of
from remit.model.records import Phase, Replica
from remit.simulate.actors.agents import Agent, Copy, Keeper
from remit.simulate.runners import Run
from tests.planted.bug import bug

APART = ("ended_work_runs_no_more", "one_copy_at_a_time", "intervals_are_disjoint")
FENCE = ("lost_only_after_its_fence", *APART)


@bug(34, scenario="cut-nodes", expects=APART)
def nobody_keeps_the_fence(patch: pytest.MonkeyPatch) -> None:
    """A node that is cut off stops nothing by itself."""
    patch.setattr(Keeper, "_left_ms", lambda self, order: None)


@bug(34, scenario="cut-nodes", expects=FENCE)
def the_fence_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """What a silent node runs is given up at once."""
    patch.setitem(moving.GUARDED, "fence_passed", lambda *args: None)


@bug(34, scenario="cut-nodes", expects=("lost_only_after_its_fence",))
def a_part_of_the_fence_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    """What a silent node runs is given up when its fence has passed, and its end was not waited for."""
    patch.setattr(moving, "lost_after_ms", lambda fence_ms, tempo: fence_ms * 9 // 10)


@bug(12, 18, scenario="late-renewals", seed=6, expects=APART)
def a_term_counts_from_receipt(patch: pytest.MonkeyPatch) -> None:
    """The holder of a lease counts its term from when the answer came, not from when it asked."""
    renew = Client._renew_once

    async def received(self: Client, endpoint: Any, actor: Actor) -> Renewal:
        renewal = await renew(self, endpoint, actor)
        return renewal._replace(sent_ms=self._world.clock.now_ms())

    patch.setattr(Client, "_renew_once", received)


@bug(15, 16, scenario="cut-nodes", expects=FENCE)
def a_takeover_keeps_the_old_clocks(patch: pytest.MonkeyPatch) -> None:
    """A new authority takes everybody for silent since long before its takeover."""
    make = Authority.__init__

    def long_ago(self: Authority, *args: Any, **more: Any) -> None:
        make(self, *args, **more)
        self.hearing.since_ms -= 3_600_000
        self._first_window -= 60

    patch.setattr(Authority, "__init__", long_ago)


@bug(36, 37, scenario="cut-nodes", expects=("runs_only_what_was_ordered",))
def an_agent_starts_without_its_own_start(patch: pytest.MonkeyPatch) -> None:
    """An agent starts what its view shows as bound, before its own `start` is committed."""
    following = Agent._next

    def hasty(self: Agent, copy: Copy, replica: Replica, at: int, run: Run | None) -> AnyClaim | None:
        if replica.status.phase is Phase.BOUND and run is None:
            self._start(copy, replica)
        return following(self, copy, replica, at, run)

    patch.setattr(Agent, "_next", hasty)


@bug(4, 37, scenario="crowd", seed=2, expects=("runs_only_what_was_ordered", *APART))
def an_order_is_executed_after_its_release(patch: pytest.MonkeyPatch) -> None:
    """An agent takes its time over what it was ordered to start, and does not look again before it does."""
    begin = Agent._start
    waiting: set[Copy] = set()

    def later(self: Agent, copy: Copy, replica: Replica) -> None:
        async def start() -> None:
            await self.world.clock.sleep_ms(8_000)
            begin(self, copy, replica)

        if copy not in waiting:
            waiting.add(copy)
            self.seat.process.loop.spawn(start(), name="start late")

    patch.setattr(Agent, "_start", later)
    patch.setattr(Agent, "_void", lambda self, copy, replica: False)


@bug(36, scenario="cut-nodes", expects=("ended_work_runs_no_more",))
def an_agent_forgets_what_it_started(patch: pytest.MonkeyPatch) -> None:
    """An agent that was killed does not find what it had started before."""
    runs = Agent._runs
    begun: dict[int, set[int]] = {}

    def mine(self: Agent) -> dict[Copy, Run]:
        known = begun.setdefault(id(self), {run.running.pid for run in runs(self).values()})
        return {copy: run for copy, run in runs(self).items() if run.running.pid not in known}

    patch.setattr(Agent, "_runs", mine)


@bug(38, scenario="crowd", expects=("ended_work_runs_no_more",))
def stopping_is_taken_for_stopped(patch: pytest.MonkeyPatch) -> None:
    """An agent reports as stopped what it has only asked to stop."""
    following = Agent._next

    def hasty(self: Agent, copy: Copy, replica: Replica, at: int, run: Run | None) -> AnyClaim | None:
        claim = following(self, copy, replica, at, run)
        if replica.status.phase is Phase.STOPPING and run is not None:
            return Move(copy.key, at, "stopped", replica.status.attempt, result="ok")
        return claim

    patch.setattr(Agent, "_next", hasty)


@bug(35, scenario="all-silent", expects=("evictions_cease_at_mass_silence",))
def mass_silence_evicts_everything(patch: pytest.MonkeyPatch) -> None:
    """That every node falls silent at once is taken for the loss of every node."""
    patch.setattr("remit.simulate.actors.controllers._MASS_PERCENT", 1_000)


@bug(9, 11, scenario="cut-nodes", expects=("what_is_ordered_is_not_stopped",))
def an_unanswered_renewal_stops_what_runs(patch: pytest.MonkeyPatch) -> None:
    """An agent stops all that it runs when one renewal of its lease is not answered."""

    async def fearful(self: Agent, tenure: Tenure) -> None:
        pause_ms = self.seat.pace.lease_ms // 3
        while not tenure.lost:
            await self.world.clock.sleep_ms(pause_ms)
            try:
                await tenure.renew(self.client, deadline_ms=pause_ms)
            except NoAnswer:
                for run in self._runs().values():
                    self._stop(run)
            else:
                self.renewed(tenure)

    patch.setattr(Agent, "_renew", fearful)


@bug(4, 36, scenario="cut-nodes", seed=2, expects=("what_is_ordered_is_not_stopped",))
def an_empty_view_is_taken_for_no_orders(patch: pytest.MonkeyPatch) -> None:
    """An agent that comes back ends what runs on its node before it has read what is ordered there."""

    async def hasty(self: Agent) -> None:
        self._end_strays(self._runs())

    patch.setattr(Agent, "_read_orders", hasty)


# --------------------------------------------------------------------------------------------------------------- restores


@bug(10, scenario="restores", seed=2, expects=("uids_are_given_once",))
def uids_come_again_after_a_restore(patch: pytest.MonkeyPatch) -> None:
    """A uid is the number of its batch and a count, and says nothing of the incarnation."""

    def short(self: Draft) -> str:
        self.born += 1
        return f"{self.moment.sequence:x}-{self.born:x}"

    patch.setattr(Draft, "uid", short)


@bug(10, scenario="restores", seed=3, expects=("lease_epochs_never_decrease", "accepted_entries_held_their_lease"))
def epochs_come_again_after_a_restore(patch: pytest.MonkeyPatch) -> None:
    """A restored scope leaves its leases as the backup has them."""
    patch.setattr(restoring, "vacate", lambda *args, **more: None)


@bug(10, scenario="restores", expects=("a_restored_scope_doubts_what_may_run",))
def a_backup_is_believed_about_what_runs(patch: pytest.MonkeyPatch) -> None:
    """A restored scope leaves its replicas as the backup has them."""
    patch.setattr(restoring, "doubt", lambda *args: None)


@bug(10, scenario="restores", expects=("a_restored_scope_doubts_what_may_run",))
def a_backup_is_believed_about_nodes(patch: pytest.MonkeyPatch) -> None:
    """A restored scope leaves its nodes as the backup has them."""
    patch.setattr(restoring, "await_nodes", lambda draft: None)


@bug(10, scenario="restores", expects=("nothing_fenced_is_placed_before_all_nodes_reported",))
def nodes_are_not_waited_for_after_a_restore(patch: pytest.MonkeyPatch) -> None:
    """What must never run twice is placed as soon as one node is ready again."""

    def note_nothing(draft: Draft) -> None:
        await_nodes(draft)
        for key in draft.keys(key_of("Summary", AWAITED_NODE)):
            draft.drop(key)

    await_nodes = restoring.await_nodes
    patch.setattr(restoring, "await_nodes", note_nothing)
