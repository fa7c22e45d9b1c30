"""Planted bugs of agents, keepers, leases and node health, and of restores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from remit.agent.agent import Agent
from remit.agent.assignments import Assignments
from remit.agent.attempts import OK
from remit.agent.keeper.keeper import DEADLINE_CHECK_MS, Keeper
from remit.agent.keeper_calls import KeeperCalls, KeeperTable
from remit.agent.reconciler import AgentAction, NodeReconciler, ReportAction, StartAction, StopAction
from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.commitment import recovery
from remit.commitment.authority import Authority
from remit.commitment.books import AWAITED_NODE
from remit.commitment.draft import Draft
from remit.commitment.rulings import transitions
from remit.correction.controllers import node_lifecycle
from remit.model.claims import Move
from remit.model.objects import key_of
from remit.model.records import Phase
from remit.observation import health
from tests.planted.planted_bug import bug

OVERLAP_CHECKS = ("ended_attempts_have_no_process", "fenced_replica_has_one_process", "run_intervals_are_disjoint")
FENCE_CHECKS = ("attempts_are_lost_only_after_fence", *OVERLAP_CHECKS)


@bug(34, scenario="cut-nodes", seed=2, expects=OVERLAP_CHECKS)
def the_fence_is_not_enforced(patch: pytest.MonkeyPatch) -> None:
    """A partitioned node does not stop its processes."""
    patch.setattr(Keeper, "_remaining_ms", lambda self, kept: DEADLINE_CHECK_MS)


@bug(34, scenario="cut-nodes", expects=FENCE_CHECKS)
def the_fence_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Replicas on a silent node are lost at once."""
    patch.setitem(transitions.GUARD_CHECKS, "fence_passed", lambda *args: None)
    patch.setattr(node_lifecycle, "_fence_ms", lambda spec, tempo: 0)


@bug(34, scenario="cut-nodes", seed=4, expects=("attempts_are_lost_only_after_fence",))
def kill_grace_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Replicas on a silent node are lost after the fence, without the kill grace."""
    for page in (transitions, node_lifecycle):
        patch.setattr(page, "lost_after_ms", lambda fence_ms, tempo: fence_ms * 9 // 10)


@bug(12, 18, scenario="late-renewals", seed=7, expects=(*OVERLAP_CHECKS, "assigned_processes_are_not_stopped"))
def a_term_counts_from_receipt(patch: pytest.MonkeyPatch) -> None:
    """The keeper counts a term from the answer to a renewal, not from its send time."""

    async def buggy_heartbeat_once(self: AuthorityClient, endpoint: Any, beats: Any) -> Any:
        held = await endpoint.heartbeat(beats)
        return held, self._world.clock.now_ms()

    patch.setattr(AuthorityClient, "_heartbeat_once", buggy_heartbeat_once)


@bug(15, 16, scenario="cut-nodes", expects=FENCE_CHECKS)
def a_takeover_keeps_the_old_clocks(patch: pytest.MonkeyPatch) -> None:
    """A new authority counts the silence of all leases from long before its takeover."""
    original_init = Authority.__init__

    def buggy_init(self: Authority, *args: Any, **more: Any) -> None:
        original_init(self, *args, **more)
        self.renewals.since_ms -= 3_600_000
        self._first_window -= 60

    patch.setattr(Authority, "__init__", buggy_init)


@bug(36, 37, scenario="cut-nodes", expects=("processes_have_committed_start",))
def an_agent_starts_before_its_start_is_committed(patch: pytest.MonkeyPatch) -> None:
    """An agent starts a bound replica before its own `start` is committed."""
    original_reconcile_attempt = NodeReconciler._reconcile_attempt

    def buggy_reconcile_attempt(
        self: NodeReconciler,
        now_ms: int,
        assignments: Assignments,
        attempt: Any,
        assignment: Any,
        record: Any,
        holds_lease: bool,
    ) -> Iterator[AgentAction]:
        generation = assignments.spec_of(assignment.replica)
        if assignment.replica.status.phase is Phase.BOUND and record is None and generation is not None:
            yield StartAction(attempt, assignment.replica, generation, 0)
        yield from original_reconcile_attempt(self, now_ms, assignments, attempt, assignment, record, holds_lease)

    patch.setattr(NodeReconciler, "_reconcile_attempt", buggy_reconcile_attempt)


@bug(4, 37, scenario="crowd", seed=2, expects=("processes_have_committed_start", *OVERLAP_CHECKS))
def an_attempt_is_started_after_its_release(patch: pytest.MonkeyPatch) -> None:
    """An agent starts a replica late, after it has reported its end."""
    original_start = KeeperCalls._start

    async def buggy_start(self: KeeperCalls, *args: Any) -> None:
        await self._runtime.world.clock.sleep_ms(8_000)
        await original_start(self, *args)

    patch.setattr(KeeperCalls, "_start", buggy_start)
    patch.setattr(KeeperCalls, "is_end_certain", lambda self, *args: True)
    patch.setattr(NodeReconciler, "_may_have_been_lost", lambda self, *args: False)


@bug(
    36,
    scenario="cut-nodes",
    expects=("ended_attempts_have_no_process", "orphan_processes_end", "assigned_processes_are_not_stopped"),
)
def a_restarted_agent_does_not_adopt_processes(patch: pytest.MonkeyPatch) -> None:
    """A restarted agent does not adopt the processes of its keeper."""
    original_apply = KeeperTable.apply

    def buggy_apply(self: KeeperTable, table: Any) -> None:
        original_apply(self, type(table)(whole=True) if table.whole else table)

    patch.setattr(KeeperTable, "apply", buggy_apply)
    patch.setattr(KeeperCalls, "is_end_certain", lambda self, *args: True)


@bug(38, scenario="crowd", expects=("ended_attempts_have_no_process",))
def stopping_is_taken_for_stopped(patch: pytest.MonkeyPatch) -> None:
    """An agent reports a replica as stopped when it has only requested the stop."""
    original_reconcile_attempt = NodeReconciler._reconcile_attempt

    def buggy_reconcile_attempt(
        self: NodeReconciler,
        now_ms: int,
        assignments: Assignments,
        attempt: Any,
        assignment: Any,
        record: Any,
        holds_lease: bool,
    ) -> Iterator[AgentAction]:
        for action in original_reconcile_attempt(self, now_ms, assignments, attempt, assignment, record, holds_lease):
            yield action
            if isinstance(action, StopAction) and assignment.replica.status.phase is Phase.STOPPING and holds_lease:
                yield ReportAction(attempt, Move(attempt.key, assignment.revision, "stopped", attempt.number, result=OK))

    patch.setattr(NodeReconciler, "_reconcile_attempt", buggy_reconcile_attempt)
    patch.setattr(KeeperCalls, "is_end_certain", lambda self, *args: True)


@bug(35, scenario="all-silent", seed=2, expects=("evictions_stop_at_mass_silence",))
def mass_silence_evicts_everything(patch: pytest.MonkeyPatch) -> None:
    """Silence of all nodes at once is taken for the loss of all nodes."""
    patch.setattr(health, "MASS_PERCENT", 1_000)


@bug(9, 11, scenario="cut-nodes", expects=("assigned_processes_are_not_stopped",))
def an_unanswered_renewal_stops_all_processes(patch: pytest.MonkeyPatch) -> None:
    """An agent stops all its processes after one unanswered heartbeat."""
    original_heartbeat = AuthorityClient.heartbeat

    async def buggy_heartbeat(self: AuthorityClient, beats: Any, **more: Any) -> Any:
        try:
            return await original_heartbeat(self, beats, **more)
        except RetriesExhausted:
            for agent in afraid:
                if agent._client is self:
                    for name in {one.state.node for one in beats}:
                        _end_all(agent, name)
            raise

    original_init = Agent.__init__
    afraid: list[Agent] = []

    def buggy_init(self: Agent, *args: Any, **more: Any) -> None:
        original_init(self, *args, **more)
        afraid.append(self)

    patch.setattr(Agent, "__init__", buggy_init)
    patch.setattr(AuthorityClient, "heartbeat", buggy_heartbeat)


def _end_all(agent: Agent, node: str) -> None:
    for copy, kept in agent._nodes[node].records.items():
        if kept.alive:
            agent._runtime.spawn(agent._keeper.stop(copy, 0), "end")


@bug(4, 36, scenario="cut-nodes", seed=2, expects=("assigned_processes_are_not_stopped",))
def an_empty_view_is_taken_for_no_assignments(patch: pytest.MonkeyPatch) -> None:
    """A restarted agent stops processes before it has read its assignments."""
    patch.setattr(Assignments, "is_loaded", True)


# --------------------------------------------------------------------------------------------------------------- restores


@bug(10, scenario="restored", seed=1, expects=("uids_are_never_reused",))
def uids_repeat_after_a_restore(patch: pytest.MonkeyPatch) -> None:
    """A uid consists of batch number and counter, without the incarnation."""

    def buggy_new_uid(self: Draft) -> str:
        self.uids_issued += 1
        return f"{self.time.sequence:x}-{self.uids_issued:x}"

    patch.setattr(Draft, "new_uid", buggy_new_uid)


@bug(10, scenario="restores", seed=3, expects=("lease_epochs_never_decrease", "accepted_operations_hold_their_lease"))
def epochs_repeat_after_a_restore(patch: pytest.MonkeyPatch) -> None:
    """A restored scope keeps the leases of its backup."""
    patch.setattr(recovery, "vacate_leases", lambda *args, **more: None)


@bug(10, scenario="restores", expects=("restore_marks_replicas_and_nodes_unknown",))
def a_backup_is_trusted_about_replicas(patch: pytest.MonkeyPatch) -> None:
    """A restored scope keeps the phases of replicas in its backup."""
    patch.setattr(recovery, "mark_replicas_unknown", lambda *args: None)


@bug(10, scenario="restores", expects=("restore_marks_replicas_and_nodes_unknown",))
def a_backup_is_trusted_about_nodes(patch: pytest.MonkeyPatch) -> None:
    """A restored scope keeps the health of nodes in its backup."""
    patch.setattr(recovery, "mark_nodes_unknown", lambda draft: None)


@bug(10, scenario="restores", expects=("fenced_replicas_wait_for_all_nodes_after_restore",))
def nodes_are_not_awaited_after_a_restore(patch: pytest.MonkeyPatch) -> None:
    """Fenced replicas are placed as soon as one node is ready again."""

    def buggy_mark_nodes_unknown(draft: Draft) -> None:
        original_mark_nodes_unknown(draft)
        for key in draft.keys(key_of("Summary", AWAITED_NODE)):
            draft.delete(key)

    original_mark_nodes_unknown = recovery.mark_nodes_unknown
    patch.setattr(recovery, "mark_nodes_unknown", buggy_mark_nodes_unknown)
