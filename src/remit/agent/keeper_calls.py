"""The agent's side of its keeper: follows the process table, and starts, stops and forgets processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Final

from remit.agent.assignments import slot_hold_ms
from remit.agent.attempts import AttemptId, log_fields
from remit.agent.hosted_node import HostedNode
from remit.agent.keeper.protocol import NO_START, KeeperClient, ProcessRecord, ProcessTable
from remit.agent.reconciler import ReportAction, StartAction, StopAction
from remit.agent.run_spec import NO_INPUTS, build_process_spec, fence_ms
from remit.agent.runtime import AgentRuntime
from remit.model.counters import BoundedCounter
from remit.world.interfaces import DiskError, LinkError, WorldError

RETRY_MS: Final = 5_000
"""Minimum time between two identical calls to the keeper. A call whose effect is not visible by then is repeated."""

CALLS_MAX: Final = 10_000
"""Above this number of remembered calls, entries older than two retry intervals are discarded."""

START_RESULTS: Final = ("begun", "late", "failed")
_TERMINAL_TRANSITIONS: Final = ("stopped", "crash", "finish")


class KeeperTable:
    """Copies the keeper's process table into the hosted nodes. `launch` starts a keeper if none answers."""

    def __init__(self, runtime: AgentRuntime, keeper: KeeperClient, launch: Callable[[], Awaitable[None]] | None) -> None:
        self._runtime, self._keeper, self._launch = runtime, keeper, launch
        self._received = asyncio.Event()

    async def follow(self) -> None:
        """Follow the table, until cancelled."""
        while True:
            with suppress(LinkError):
                async with aclosing(self._keeper.watch_table()) as tables:
                    async for table in tables:
                        self.apply(table)
            if self._launch is not None:
                await self._launch()
            await self._runtime.sleep_with_jitter(self._runtime.timing.heartbeat_ms // 8)

    async def wait_until_received(self) -> None:
        """Wait for the first process table of the keeper. No lease is acquired before: until then it is unknown what runs here.

        A delay is logged once, and so is its end.
        """
        runtime = self._runtime
        try:
            async with runtime.world.clock.timeout_ms(runtime.timing.unknown_ms):
                await self._received.wait()
        except TimeoutError:
            runtime.log("the keeper has not sent its process table, so no node lease is acquired yet; see run/keeper.log")
            await self._received.wait()
            runtime.log("the keeper has sent its process table; acquiring node leases")

    def apply(self, table: ProcessTable) -> None:
        nodes = self._runtime.nodes
        if table.whole:
            for hosted in nodes.values():
                hosted.records.clear()
                self._runtime.enqueue(hosted.name)
        for record in table.kept:
            self.apply_record(record)
        for gone in table.gone:
            for hosted in nodes.values():
                if hosted.records.pop(AttemptId(*gone), None) is not None:
                    self._runtime.enqueue(hosted.name, gone[0])
        self._received.set()

    def apply_record(self, record: ProcessRecord) -> None:
        hosted = self._runtime.nodes.get(record.node) or self._runtime.adopt_former_node(record.node)
        known = hosted.records.get(record.attempt_id)
        # The reply to a start and the table report the same record: only a later stage counts as a change.
        if known is None or (record.stage >= known.stage and record != known):
            hosted.records[record.attempt_id] = record
            self._runtime.enqueue(hosted.name, record.key)


class KeeperCalls:
    """Calls to the keeper, each repeated until its effect is visible. `on_forgotten` is called after it forgot a process."""

    def __init__(
        self,
        runtime: AgentRuntime,
        keeper: KeeperClient,
        table: KeeperTable,
        on_forgotten: Callable[[HostedNode, AttemptId], Awaitable[None]],
    ) -> None:
        self._runtime, self._keeper, self._table, self._on_forgotten = runtime, keeper, table, on_forgotten
        self._called_ms: dict[tuple[str, AttemptId], int] = {}
        """When each operation was last requested, by operation and attempt."""
        self.starts = BoundedCounter(START_RESULTS)

    def start(self, hosted: HostedNode, action: StartAction, now_ms: int) -> None:
        if self._runtime.start_queue.may_start(action.attempt, hosted.name):
            self._call_once("start", hosted.name, action.attempt, now_ms, lambda: self._start(hosted, action))

    def stop(self, hosted: HostedNode, action: StopAction, now_ms: int) -> None:
        attempt, grace_ms, result = action
        self._call_once("stop", hosted.name, attempt, now_ms, lambda: self._keeper.stop(attempt, grace_ms, result))

    def forget(self, hosted: HostedNode, attempt: AttemptId, now_ms: int) -> None:
        self._call_once("forget", hosted.name, attempt, now_ms, lambda: self._forget(hosted, attempt))

    def is_end_certain(self, hosted: HostedNode, report: ReportAction, now_ms: int) -> bool:
        """Return whether an end may be reported, that is, the keeper cannot start this attempt any more.

        A start requested earlier, perhaps by a previous agent process, may still be in progress in the keeper. So the agent
        blocks further starts first and reports the end only after the keeper confirmed that. A recorded process that exited
        and is not restarted needs no block.
        """
        attempt = report.attempt
        has_record = attempt in hosted.records and report.move.transition != "stopped"
        if (
            report.move.transition not in _TERMINAL_TRANSITIONS
            or has_record
            or hosted.reconciler.progress_of(attempt).start_blocked
        ):
            return True
        self._call_once("block start", hosted.name, attempt, now_ms, lambda: self._block_start(hosted, attempt))
        return False

    def _call_once(
        self, operation: str, node: str, attempt: AttemptId, now_ms: int, call: Callable[[], Awaitable[None]]
    ) -> None:
        """Call the keeper unless the same call is in progress or was made less than `RETRY_MS` ago."""
        called_ms = self._called_ms.get((operation, attempt))
        if called_ms is not None and now_ms < called_ms + RETRY_MS:
            self._runtime.enqueue(node, attempt.key, called_ms + RETRY_MS)
            return
        if len(self._called_ms) > CALLS_MAX:
            late_ms = now_ms - 2 * RETRY_MS
            self._called_ms = {key: at_ms for key, at_ms in self._called_ms.items() if at_ms > late_ms}
        self._called_ms[operation, attempt] = now_ms
        if operation == "start":
            self._runtime.start_queue.mark_starting(attempt)
        self._runtime.spawn(self._call(operation, node, attempt, call), f"{operation} {attempt.key}")

    async def _call(self, operation: str, node: str, attempt: AttemptId, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
            if operation != "stop":  # a stop lasts for its grace period; keeping the entry prevents a repeated call until then
                self._called_ms.pop((operation, attempt), None)
        except WorldError as error:
            self._called_ms[operation, attempt] = self._runtime.world.clock.now_ms()
            if operation == "start":
                self._runtime.start_queue.release(attempt)
                self.starts.add("failed")
            self._runtime.log(f"{operation} {attempt.key}: {error}", **log_fields(node, attempt))
        self._runtime.enqueue(node, attempt.key)

    async def _start(self, hosted: HostedNode, start: StartAction) -> None:
        runtime, attempt, generation = self._runtime, start.attempt, start.generation
        known, port_specs = hosted.records.get(attempt), generation.spec.template.ports
        ports = known.ports if known is not None else await self._assign_ports({port.name: port.port for port in port_specs})
        preparation = hosted.reconciler.preparations.get(attempt)
        inputs = preparation.inputs if preparation is not None and preparation.inputs is not None else NO_INPUTS
        spec = build_process_spec(hosted.settings, attempt, start.replica, generation, ports, inputs)
        record = await self._keeper.start(
            spec,
            restarts=start.restarts,
            fence_ms=fence_ms(generation),
            grace_ms=runtime.timing.kill_grace_ms,
            ports=ports,
            directories=(hosted.settings.logs, hosted.settings.attempt_directory(attempt)),
        )
        runtime.spawn(self._release_slot(attempt, slot_hold_ms(spec)), f"slot of {attempt.key}")
        if record is not None and record.number == NO_START:
            raise DiskError(record.failed, record.cure)
        self._called_ms.pop(("stop", attempt), None)
        self.starts.add("begun" if record is not None else "late")
        runtime.log_debug("process started", number=start.restarts, late=record is None, **log_fields(hosted.name, attempt))
        if record is not None:
            self._table.apply_record(record)
        else:  # the fencing deadline has passed, or the renewal has not reached the keeper yet
            await runtime.sleep_with_jitter(runtime.timing.heartbeat_ms // 4)

    async def _release_slot(self, attempt: AttemptId, delay_ms: int) -> None:
        await self._runtime.world.clock.sleep_ms(delay_ms)
        self._runtime.start_queue.release(attempt)
        self._runtime.wake.set()

    async def _assign_ports(self, requested: dict[str, int]) -> dict[str, int]:
        free = iter(await self._runtime.world.ports.find_free(sum(port == 0 for port in requested.values())))
        return {name: port or next(free) for name, port in requested.items()}

    async def _block_start(self, hosted: HostedNode, attempt: AttemptId) -> None:
        record = await self._keeper.block_start(attempt)
        hosted.reconciler.progress_of(attempt).start_blocked = record is None or not record.alive
        if record is not None:
            self._table.apply_record(record)

    async def _forget(self, hosted: HostedNode, attempt: AttemptId) -> None:
        await self._keeper.forget(attempt)
        hosted.records.pop(attempt, None)
        self._called_ms.pop(("stop", attempt), None)
        await self._on_forgotten(hosted, attempt)
