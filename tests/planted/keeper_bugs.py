"""Which wrong turns could be taken between an agent, its keeper and what they run? Each in a world that is there for it."""

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
from tests.planted.node_bugs import APART
from tests.planted.planted_bug import bug

ORDERED = ("runs_only_what_was_ordered", *APART)
KEPT = ("what_is_ordered_is_not_stopped",)


@bug(37, 38, scenario="keepers-stall", expects=ORDERED)
def an_end_is_told_while_a_start_is_under_way(patch: pytest.MonkeyPatch) -> None:
    """An agent says that a copy has ended as soon as its keeper's table does not have it."""
    patch.setattr(KeeperCalls, "is_end_certain", lambda self, *args: True)


@bug(37, 38, scenario="keepers-stall", expects=ORDERED)
def a_start_that_was_given_up_is_begun(patch: pytest.MonkeyPatch) -> None:
    """A keeper forgets which copies it was told to begin no more."""

    async def forget(self: Keeper, copy: Any) -> ProcessRecord | None:
        return self._records.get(copy)

    patch.setattr(Keeper, "_block_start", forget)


@bug(18, scenario="keepers-stall", expects=KEPT)
def a_keeper_that_wakes_ends_before_it_listens(patch: pytest.MonkeyPatch) -> None:
    """A keeper that stood still looks at its deadlines before it hears what was renewed meanwhile."""
    patch.setattr(keeper, "STALL_MS", 1 << 40)


@bug(34, scenario="cut-nodes", expects=APART)
def renewals_are_taken_from_the_future(patch: pytest.MonkeyPatch) -> None:
    """A renewal counts from half a minute after it was sent."""

    def ahead(self: Keeper, sent_ms: dict[str, int]) -> None:
        for node, at_ms in sent_ms.items():
            self._renewed_ms[node] = at_ms + 30_000

    patch.setattr(Keeper, "_record_renewals", ahead)


@bug(14, 36, scenario="keepers-killed", expects=(*ORDERED, "orphans_end"))
def a_keeper_forgets_its_journal(patch: pytest.MonkeyPatch) -> None:
    """Of what a keeper writes down nothing stays: one that was killed finds nothing of what it had started."""
    patch.setattr(Journal, "write", lambda self, entries, *, durably: None)


@bug(36, scenario="keepers-killed", expects=ORDERED)
def what_a_dead_keeper_began_is_taken_for_ended(patch: pytest.MonkeyPatch) -> None:
    """A keeper that comes back takes all that it had begun for ended, and does not look."""

    async def over(self: Keeper, kept: ProcessRecord) -> None:
        if kept.alive:
            await self._update_record(replace(kept, ended=ExitStatus(), ended_ms=self._world.clock.now_ms()))

    patch.setattr(Keeper, "_recover", over)


@bug(36, scenario="agents-killed", expects=(*ORDERED, "attempts_have_one_result"))
def a_restart_is_told_as_a_crash(patch: pytest.MonkeyPatch) -> None:
    """What is started again within its attempt is told as the attempt's end, and started all the same."""
    following = NodeReconciler._reconcile_exited

    def both(self: NodeReconciler, now_ms: int, attempt: Any, assignment: Any, *args: Any) -> Iterator[AgentAction]:
        for deed in following(self, now_ms, attempt, assignment, *args):
            yield deed
            if isinstance(deed, StartAction):
                yield ReportAction(attempt, Move(attempt.key, assignment.revision, "crash", attempt.number, GONE))

    patch.setattr(NodeReconciler, "_reconcile_exited", both)
    patch.setattr(KeeperCalls, "is_end_certain", lambda self, *args: True)


@bug(36, scenario="unwell", expects=KEPT)
def a_start_up_probe_is_asked_again_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """An agent that comes back asks whether everything has started, also of what has been unwell since."""
    make = ProcessHealth.__init__

    def anew(self: ProcessHealth, probes: Any, now_ms: int, restarts: int = 0, *, started: bool = False) -> None:
        make(self, probes, now_ms, restarts)

    patch.setattr(ProcessHealth, "__init__", anew)


@bug(18, 34, scenario="agent-stalls", expects=APART)
def the_agent_keeps_the_fence(patch: pytest.MonkeyPatch) -> None:
    """The deadline is looked at only when the agent says something: one that stands still is not fenced."""

    async def never(self: Keeper) -> None:
        await asyncio.Event().wait()

    patch.setattr(Keeper, "_enforce_deadlines", never)
