"""Runs the preparation of attempts as tasks, and abandons those that are no longer needed."""

from __future__ import annotations

import asyncio

from remit.agent.attempts import AttemptId
from remit.agent.hosted_node import HostedNode
from remit.agent.preparation.preparer import PreparationProgress, Preparer
from remit.agent.reconciler import PrepareAction
from remit.agent.run_spec import NO_INPUTS, NodeSettings, PreparedInputs, needs_preparation
from remit.agent.runtime import AgentRuntime
from remit.model.counters import LONG_SECONDS_BUCKETS, Histogram
from remit.model.records import GenerationSpec, Replica


class PreparationTasks:
    """Preparations of all hosted nodes."""

    def __init__(self, runtime: AgentRuntime, preparer: Preparer) -> None:
        self._runtime, self._preparer = runtime, preparer
        self.fetches = Histogram(LONG_SECONDS_BUCKETS)
        """Duration of artifact and rootfs preparation, one sample per attempt."""

    async def remove_orphans(self) -> None:
        """Remove the directories of attempts that the keeper does not know."""
        nodes = self._runtime.nodes.values()
        known = {attempt.file_name for hosted in nodes for attempt in hosted.records}
        await self._preparer.remove_orphans([hosted.settings.work for hosted in nodes], known)

    def start(self, hosted: HostedNode, action: PrepareAction) -> PreparationProgress:
        preparation = hosted.reconciler.preparations[action.attempt] = PreparationProgress(action.restarts)
        record = hosted.records.get(action.attempt)
        is_running, clock = record is not None and record.alive, self._runtime.world.clock

        async def prepare() -> None:
            started_ms = clock.now_ms()
            await self._preparer.prepare(
                hosted.settings, action.attempt, action.replica, action.generation, preparation, is_running=is_running
            )
            if action.generation.spec.template.artifacts or action.generation.spec.template.rootfs:
                self.fetches.add((clock.now_ms() - started_ms) / 1000)
            self._runtime.enqueue(hosted.name)

        preparation.task = self._runtime.create_task(prepare(), f"prepare {action.attempt.key}")
        return preparation

    def inputs_of(
        self, hosted: HostedNode, attempt: AttemptId, replica: Replica, generation: GenerationSpec
    ) -> PreparedInputs | None:
        """Return the prepared inputs of a running attempt, or None while they are being prepared.

        An agent that finds a process already running prepares its inputs again, for probes and exec sessions beside it.
        """
        if not needs_preparation(generation.spec.template):
            return NO_INPUTS
        preparation = hosted.reconciler.preparations.get(attempt)
        if preparation is None:
            preparation = self.start(hosted, PrepareAction(attempt, replica, generation, hosted.records[attempt].number))
        return (preparation.inputs or NO_INPUTS) if preparation.is_done else None

    def abandon_unneeded(self, hosted: HostedNode) -> None:
        reconciler = hosted.reconciler
        for attempt in [
            attempt
            for attempt in reconciler.preparations
            if attempt not in hosted.records and not reconciler.should_run(self._runtime.assignments, attempt)
        ]:
            task = reconciler.preparations.pop(attempt).task
            self._runtime.spawn(self._abandon(hosted.settings, attempt, task), f"abandon {attempt.key}")

    async def _abandon(self, settings: NodeSettings, attempt: AttemptId, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._preparer.abandon(settings, attempt)

    def forget(self, hosted: HostedNode, attempt: AttemptId) -> None:
        preparation = hosted.reconciler.preparations.pop(attempt, None)
        if preparation is not None and preparation.task is not None:
            preparation.task.cancel()
        self._preparer.forget(attempt)
