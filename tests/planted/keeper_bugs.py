"""Planted bugs between an agent, its keeper and their processes, each with a scenario of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from remit.agent.attempts import GONE
from remit.agent.keeper import keeper
from remit.agent.keeper.journal import Journal
from remit.agent.keeper.keeper import Keeper
from remit.agent.keeper.protocol import ProcessRecord
from remit.agent.keeper_calls import KeeperCalls
from remit.agent.probes import ProcessHealth
from remit.agent.reconciler import AgentAction, NodeReconciler, ReportAction, StartAction
from remit.model.claims import Move
from remit.world.interfaces import ExitStatus
from tests.planted.node_bugs import OVERLAP_CHECKS
from tests.planted.planted_bug import bug

START_CHECKS = ("processes_have_committed_start", *OVERLAP_CHECKS)
STOP_CHECKS = ("assigned_processes_are_not_stopped",)


@bug(37, 38, scenario="keepers-stall", expects=START_CHECKS)
def an_end_is_reported_during_a_start(patch: pytest.MonkeyPatch) -> None:
    """An agent reports an attempt as ended as soon as the keeper's table lacks it."""
    patch.setattr(KeeperCalls, "is_end_certain", lambda self, *args: True)


@bug(37, 38, scenario="keepers-stall", expects=START_CHECKS)
def a_blocked_start_is_executed(patch: pytest.MonkeyPatch) -> None:
    """A keeper forgets which attempts it must not start."""

    async def buggy_block_start(self: Keeper, copy: Any) -> ProcessRecord | None:
        return self._records.get(copy)

    patch.setattr(Keeper, "_block_start", buggy_block_start)


@bug(18, scenario="keepers-stall", expects=STOP_CHECKS)
def a_resumed_keeper_enforces_before_it_reads_renewals(patch: pytest.MonkeyPatch) -> None:
    """A keeper that was suspended enforces its deadlines before it reads the renewals sent meanwhile."""
    patch.setattr(keeper, "STALL_MS", 1 << 40)


@bug(34, scenario="cut-nodes", expects=OVERLAP_CHECKS)
def renewals_count_from_the_future(patch: pytest.MonkeyPatch) -> None:
    """A renewal counts from half a minute after its send time."""

    def buggy_record_renewals(self: Keeper, sent_ms: dict[str, int]) -> None:
        for node, at_ms in sent_ms.items():
            self._renewed_ms[node] = at_ms + 30_000

    patch.setattr(Keeper, "_record_renewals", buggy_record_renewals)


@bug(14, 36, scenario="keepers-killed", expects=(*START_CHECKS, "orphan_processes_end"))
def a_keeper_forgets_its_journal(patch: pytest.MonkeyPatch) -> None:
    """The journal stays empty: a restarted keeper knows nothing of what it had started."""
    patch.setattr(Journal, "write", lambda self, entries, *, durably: None)


@bug(36, scenario="keepers-killed", expects=START_CHECKS)
def processes_of_a_dead_keeper_are_taken_for_ended(patch: pytest.MonkeyPatch) -> None:
    """A restarted keeper takes all its processes for ended without checking."""

    async def buggy_recover(self: Keeper, kept: ProcessRecord) -> None:
        if kept.alive:
            await self._update_record(replace(kept, ended=ExitStatus(), ended_ms=self._world.clock.now_ms()))

    patch.setattr(Keeper, "_recover", buggy_recover)


@bug(36, scenario="agents-killed", expects=(*START_CHECKS, "attempts_have_one_result"))
def a_restart_is_reported_as_a_crash(patch: pytest.MonkeyPatch) -> None:
    """A restart within the attempt is reported as its end, and started all the same."""
    original_reconcile_exited = NodeReconciler._reconcile_exited

    def buggy_reconcile_exited(
        self: NodeReconciler, now_ms: int, attempt: Any, assignment: Any, *args: Any
    ) -> Iterator[AgentAction]:
        for action in original_reconcile_exited(self, now_ms, attempt, assignment, *args):
            yield action
            if isinstance(action, StartAction):
                yield ReportAction(attempt, Move(attempt.key, assignment.revision, "crash", attempt.number, GONE))

    patch.setattr(NodeReconciler, "_reconcile_exited", buggy_reconcile_exited)
    patch.setattr(KeeperCalls, "is_end_certain", lambda self, *args: True)


@bug(36, scenario="unwell", expects=STOP_CHECKS)
def a_start_probe_runs_again_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A restarted agent runs start probes again, also on replicas that became unhealthy since."""
    original_init = ProcessHealth.__init__

    def buggy_init(self: ProcessHealth, probes: Any, now_ms: int, restarts: int = 0, *, started: bool = False) -> None:
        original_init(self, probes, now_ms, restarts)

    patch.setattr(ProcessHealth, "__init__", buggy_init)


@bug(18, 34, scenario="agent-stalls", expects=OVERLAP_CHECKS)
def the_agent_enforces_the_fence(patch: pytest.MonkeyPatch) -> None:
    """The deadline is checked only when the agent sends a message: a suspended agent is not fenced."""

    async def buggy_enforce_deadlines(self: Keeper) -> None:
        await asyncio.Event().wait()

    patch.setattr(Keeper, "_enforce_deadlines", buggy_enforce_deadlines)
