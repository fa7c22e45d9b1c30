"""Keeper process: starts and stops processes, enforces fencing deadlines, streams its process table.

A small process beside the agent, which it outlives.

The fencing deadline of a workload that must never run twice is the send time of the last accepted renewal of its node's
lease, plus its fence. It holds whatever happens to the agent: killed, stopped, or with a blocked event loop. Therefore the
keeper checks the deadline and starts the process in one step.

The keeper is the parent of all processes, so only it learns their exit status. It writes each start to the journal
(journal.py) before it performs it, so that a repeated request cannot start it twice. It also bounds the log files of
processes (log_retention.py), because that has to continue without an agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from remit.agent.attempts import AttemptId, is_attempt_name, attempt_from_env
from remit.agent.keeper.journal import Journal, GroupCommitWriter, tombstone
from remit.agent.keeper.log_retention import LogRetention
from remit.agent.keeper.protocol import (
    NO_START,
    KeeperReply,
    BlockStart,
    StartProcess,
    ProcessRecord,
    ForgetProcess,
    StopProcess,
    Shutdown,
    ConfirmRenewals,
    ProcessTable,
    ProcessUsage,
    GetUsage,
    encode,
    decode_message,
)
from remit.world.interfaces import DiskError, ExitStatus, NotStarted, ProcessHandle, World, WorldError

DEADLINE_CHECK_MS: Final = 1_000
"""Interval between two checks of the fencing deadlines while any exist. A deadline that is nearer is checked when it comes."""

IDLE_MS: Final = 60_000
STALL_MS: Final = 20
BLOCKED_STARTS_MAX: Final = 10_000

SHUTDOWN_POLL_MS: Final = 50


def _discard(_: str) -> None:
    return


class _TableSubscriber:
    """Changes of the table that one subscriber has not received. Only the latest state of each attempt is stored, so a slow
    subscriber costs no more memory than the table.
    """

    def __init__(self) -> None:
        self._changes: dict[AttemptId, ProcessRecord | None] = {}
        self._changed = asyncio.Event()

    def update(self, copy: AttemptId, kept: ProcessRecord | None) -> None:
        self._changes[copy] = kept
        self._changed.set()

    async def next(self) -> ProcessTable:
        await self._changed.wait()
        self._changed.clear()
        news, self._changes = self._changes, {}
        kept = tuple(one for one in news.values() if one is not None)
        return ProcessTable(kept=kept, gone=tuple(copy for copy, one in news.items() if one is None))


class Keeper:
    """Implements `world.interfaces.Service`. `run` returns after a `Shutdown` message.

    `sayings` bounds the log files, if given. `rooms` is the directory with one subdirectory for each attempt ever started
    here. `tell` writes a line for operators.
    """

    def __init__(
        self,
        world: World,
        journal: Path,
        log_retention: LogRetention | None = None,
        *,
        work_directory: Path | None = None,
        log: Callable[[str], None] = _discard,
    ) -> None:
        self._world, self._log_retention, self._work_directory, self._log = world, log_retention, work_directory, log
        self._journal = Journal(world.disk, journal)
        self._journal_writer = GroupCommitWriter(self._journal, world.offload)
        self._records: dict[AttemptId, ProcessRecord] = {}
        self._renewed_ms: dict[str, int] = {}
        self._start_locks: dict[AttemptId, asyncio.Lock] = {}
        self._kill_at_ms: dict[AttemptId, int] = {}
        """When each stopping process will be killed."""
        self._blocked: dict[AttemptId, None] = {}
        """Attempts whose starts are refused. The request for such a start may be late, and its sender may be gone by now."""
        self._pending_starts: dict[AttemptId, ProcessRecord] = {}
        """Starts that are being written to the journal and are performed next. A compaction of the journal includes them."""
        self._unwritten: dict[AttemptId, ProcessRecord] = {}
        """Attempts whose last record could not be written. Writing is retried at `_again_ms`, or together with the next write.
        """
        self._retry_write_ms = 0
        self._wake = asyncio.Event()
        self._shutting_down = False
        self._stopped = asyncio.Event()
        self._subscribers: list[_TableSubscriber] = []
        self._group: asyncio.TaskGroup | None = None
        self._ready = asyncio.Event()

    async def run(self) -> None:
        self._records = await self._read_journal()
        async with asyncio.TaskGroup() as group:
            self._group = group
            for kept in tuple(self._records.values()):
                await self._recover(kept)
            await self._stop_unrecorded()
            self._ready.set()
            tasks = [group.create_task(self._enforce_deadlines(), name="deadlines")]
            if self._log_retention is not None:
                tasks.append(group.create_task(self._log_retention.run(self._records), name="logs"))
            await self._stopped.wait()
            for task in tasks:
                task.cancel()

    # -- requests --------------------------------------------------------------------------------------------------------------

    async def request(self, body: bytes, /) -> bytes:
        await self._ready.wait()
        match decode_message(body):
            case StartProcess() as begin:
                return encode(KeeperReply(kept=await self._start_process(begin)))
            case StopProcess(key, uid, attempt, grace_ms, why):
                self._stop_process(AttemptId(key, uid, attempt), grace_ms, why)
            case BlockStart(key, uid, attempt):
                return encode(KeeperReply(kept=await self._block_start(AttemptId(key, uid, attempt))))
            case ForgetProcess(key, uid, attempt):
                await self._forget(AttemptId(key, uid, attempt))
            case ConfirmRenewals(sent_ms):
                self._record_renewals(sent_ms)
            case GetUsage():
                return encode(KeeperReply(uses=self._usage()))
            case Shutdown(grace_ms):
                await self._shut_down(grace_ms)
        return encode(KeeperReply())

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        """Stream the full table, then its changes."""
        await self._ready.wait()
        reader = _TableSubscriber()
        self._subscribers.append(reader)
        try:
            yield encode(ProcessTable(whole=True, kept=tuple(self._records.values())))
            while True:
                yield encode(await reader.next())
        finally:
            self._subscribers.remove(reader)

    # -- starting --------------------------------------------------------------------------------------------------------

    async def _start_process(self, begin: StartProcess) -> ProcessRecord | None:
        copy = attempt_from_env(begin.order.env)
        async with self._start_lock(copy):
            return await self._start_if_allowed(begin, copy)

    def _start_lock(self, copy: AttemptId) -> asyncio.Lock:
        """Return the lock under which an attempt is started or blocked. A lock in use is never discarded: with two locks for
        one attempt, two starts could run at once.
        """
        if len(self._start_locks) > BLOCKED_STARTS_MAX:
            self._start_locks = {one: lock for one, lock in self._start_locks.items() if lock.locked() or one in self._records}
        return self._start_locks.setdefault(copy, asyncio.Lock())

    async def _start_if_allowed(self, begin: StartProcess, copy: AttemptId) -> ProcessRecord | None:
        known = self._records.get(copy)
        if known is not None and (known.number >= begin.number or known.alive):
            return known
        kept = self._new_record(begin, copy)
        if copy in self._blocked:
            now_ms = self._world.clock.now_ms()
            failed, cure = "its end was already reported", "nothing to do"
            return replace(kept, ended=ExitStatus(), ended_ms=now_ms, failed=failed, cure=cure)
        if self._shutting_down:
            return _not_started(kept, "the keeper is shutting down", "retry: the next keeper will start it")
        if self._remaining_ms(kept) <= 0:
            return None
        self._pending_starts[copy] = kept
        try:
            await self._journal_writer.write([kept], durably=True, prepare=partial(self._make_directories, begin.rooms))
            self._records[copy] = kept  # subscribers are informed of the outcome, a moment later
        except DiskError as error:
            # Not started: a start that is not durably recorded must not happen. A later request may find the disk working.
            return _not_started(kept, error.cause, error.cure)
        finally:
            del self._pending_starts[copy]
        return await self._run_process(begin, kept)

    def _make_directories(self, rooms: Sequence[Path]) -> None:
        for room in rooms:
            self._world.disk.make_directory(room, durably=False)

    def _new_record(self, begin: StartProcess, copy: AttemptId) -> ProcessRecord:
        env = begin.order.env
        return ProcessRecord(
            node=env["REMIT_NODE"],
            scope=env["REMIT_SCOPE"],
            key=copy.key,
            uid=copy.uid,
            attempt=copy.number,
            number=begin.number,
            since_ms=self._world.clock.now_ms(),
            fence_ms=begin.fence_ms,
            grace_ms=begin.grace_ms,
            ports=begin.ports,
            boot=self._world.clock.boot(),
        )

    async def _run_process(self, begin: StartProcess, kept: ProcessRecord) -> ProcessRecord:
        """Start a process whose start is recorded. Its number is not used again, even if the start fails."""
        try:
            if self._remaining_ms(kept) <= 0:
                cause = "its fencing deadline passed while it was being started"
                raise NotStarted(cause, "nothing to do: it is scheduled again")
            running = await self._world.runner.start(begin.order._replace(not_after_ms=self._deadline_ms(kept)))
        except NotStarted as error:
            kept = replace(kept, ended=ExitStatus(), ended_ms=self._world.clock.now_ms(), failed=error.cause, cure=error.cure)
            await self._update_record(kept)
            return kept
        kept = replace(kept, pid=running.pid, began=running.start_time, group=running.group)
        self._publish(kept)
        self._watch_exit(kept)
        self._wake.set()
        await self._write_journal(kept)  # the reply implies that a restarted keeper will find this process
        return kept

    async def _recover(self, kept: ProcessRecord) -> None:
        """Recover a record after a restart of the keeper.

        A live process is watched again. A start without a known process is cleaned up, in case it happened after all.
        """
        boot, now_ms = self._world.clock.boot(), self._world.clock.now_ms()
        if kept.boot != boot:
            # The machine was rebooted: no process can be left, and times of the old boot cannot be compared with this clock.
            ended = ExitStatus() if kept.ended is None else kept.ended
            await self._update_record(replace(kept, boot=boot, since_ms=now_ms, ended=ended, ended_ms=now_ms))
        elif kept.alive and kept.pid and self._world.runner.is_alive(kept.running):
            self._watch_exit(kept)
            if kept.fence_ms:
                # It should have died with the previous keeper, which was the only one to know its deadline.
                self._fence(kept)
        elif kept.alive:
            self._spawn(self._clean_up(kept), f"clear {kept.key}")

    async def _stop_unrecorded(self) -> None:
        """Stop processes that have a directory here and no journal entry: the journal was lost or damaged, so no agent knows of
        them.
        """
        known = {copy.file_name for copy in self._records}
        names: tuple[str, ...] = ()
        with suppress(DiskError):
            if self._work_directory is not None:
                names = await self._world.offload(partial(self._world.disk.list, self._work_directory))
        for name in names:
            if name not in known and is_attempt_name(name):
                await self._world.runner.kill_group(name)

    async def _clean_up(self, kept: ProcessRecord) -> None:
        """Stop what is left of an attempt whose main process is gone or was never recorded."""
        if kept.pid:
            await self._stop_with_retries(kept.running, kept.grace_ms)
        else:
            await self._world.runner.kill_group(kept.attempt_id.file_name)
        await self._update_record(replace(kept, ended=ExitStatus(), ended_ms=self._world.clock.now_ms()))

    # -- ending ----------------------------------------------------------------------------------------------------------

    def _watch_exit(self, kept: ProcessRecord) -> None:
        async def wait() -> None:
            ended = await self._world.runner.wait(kept.running)
            await self._stop_with_retries(kept.running, kept.grace_ms)  # descendants that outlived it
            current = self._records.get(kept.attempt_id)
            if current is not None and current.running == kept.running:
                self._kill_at_ms.pop(kept.attempt_id, None)
                await self._update_record(replace(current, ended=ended, ended_ms=self._world.clock.now_ms()))

        self._spawn(wait(), f"wait for {kept.pid}")

    def _stop_process(self, copy: AttemptId, grace_ms: int, why: str = "") -> None:
        kept = self._records.get(copy)
        if kept is None or not kept.alive or not kept.pid:
            return
        until_ms = self._world.clock.now_ms() + grace_ms
        if copy in self._kill_at_ms and self._kill_at_ms[copy] <= until_ms:
            return
        self._kill_at_ms[copy] = until_ms
        if why and not kept.why:
            self._publish(replace(kept, why=why))
        self._spawn(self._stop_with_retries(kept.running, grace_ms), f"end {kept.pid}")

    async def _block_start(self, copy: AttemptId) -> ProcessRecord | None:
        async with self._start_lock(copy):  # a start in progress finishes first
            kept = self._records.get(copy)
            if kept is None or not kept.alive:
                self._add_blocked(copy)
        return kept

    def _add_blocked(self, copy: AttemptId) -> None:
        self._blocked[copy] = None
        while len(self._blocked) > BLOCKED_STARTS_MAX:
            del self._blocked[next(iter(self._blocked))]

    async def _stop_with_retries(self, running: ProcessHandle, grace_ms: int) -> None:
        """Stop a process, and retry until it succeeds, so that a failure to signal it does not leave it running unnoticed."""
        while True:
            try:
                return await self._world.runner.stop(running, grace_ms=grace_ms)
            except (WorldError, OSError):
                await self._world.clock.sleep_ms(DEADLINE_CHECK_MS)

    def _fence(self, kept: ProcessRecord) -> None:
        self._publish(replace(kept, fenced=True))
        self._stop_process(kept.attempt_id, kept.grace_ms)

    async def _shut_down(self, grace_ms: int) -> None:
        self._shutting_down = True
        while alive := [kept.attempt_id for kept in self._records.values() if kept.alive]:
            for copy in alive:
                self._stop_process(copy, grace_ms)
            await self._world.clock.sleep_ms(SHUTDOWN_POLL_MS)
        self._stopped.set()

    async def _enforce_deadlines(self) -> None:
        until_ms = self._world.clock.now_ms() + DEADLINE_CHECK_MS
        while True:
            if self._world.clock.now_ms() > until_ms + STALL_MS:
                # This process was suspended. Renewals that arrived meanwhile are read first, because they may have extended the
                # deadlines.
                await self._world.clock.sleep_ms(STALL_MS)
            self._wake.clear()
            wait_ms = IDLE_MS
            for kept in tuple(self._records.values()):
                if not kept.alive or not kept.fence_ms or kept.fenced:
                    continue
                left_ms = self._remaining_ms(kept)
                if left_ms > 0:
                    wait_ms = min(wait_ms, DEADLINE_CHECK_MS, left_ms)
                elif kept.pid:
                    self._fence(kept)
            if self._unwritten:
                again_ms = self._retry_write_ms - self._world.clock.now_ms()
                if again_ms <= 0:
                    self._spawn(self._write_journal(), "write again")
                wait_ms = min(wait_ms, again_ms if again_ms > 0 else DEADLINE_CHECK_MS)
            until_ms = self._world.clock.now_ms() + wait_ms
            with suppress(TimeoutError):
                async with self._world.clock.timeout_ms(wait_ms):
                    await self._wake.wait()

    def _remaining_ms(self, kept: ProcessRecord) -> int:
        """How long the process may still run without a renewal."""
        deadline_ms = self._deadline_ms(kept)
        return DEADLINE_CHECK_MS if deadline_ms is None else deadline_ms - self._world.clock.now_ms()

    def _deadline_ms(self, kept: ProcessRecord) -> int | None:
        """None: the process has no deadline. Without a known renewal of its node, a process with a fence must not start."""
        if not kept.fence_ms:
            return None
        return self._renewed_ms.get(kept.node, kept.since_ms if kept.pid else 0) + kept.fence_ms

    def _record_renewals(self, sent_ms: dict[str, int]) -> None:
        now_ms = self._world.clock.now_ms()
        for node, at_ms in sent_ms.items():
            if at_ms <= now_ms:  # ignore renewals with a send time in the future
                self._renewed_ms[node] = max(at_ms, self._renewed_ms.get(node, 0))

    # -- records and journal ---------------------------------------------------------------------------------------------------

    async def _forget(self, copy: AttemptId) -> None:
        kept = self._records.get(copy)
        if kept is None or kept.alive:
            return
        del self._records[copy]
        self._add_blocked(copy)  # an agent that got no reply may have sent the start twice
        for reader in self._subscribers:
            reader.update(copy, None)
        await self._write_journal(tombstone(kept))

    async def _update_record(self, kept: ProcessRecord) -> None:
        """Publish a record and write it to the journal. A failed write is retried with the next; the record counts meanwhile.
        """
        self._publish(kept)
        await self._write_journal(kept)

    def _publish(self, kept: ProcessRecord) -> None:
        self._records[kept.attempt_id] = kept
        for reader in self._subscribers:
            reader.update(kept.attempt_id, kept)

    async def _write_journal(self, *news: ProcessRecord) -> None:
        """Write records, together with the current state of those that could not be written before. A restarted keeper finds
        its processes by them.
        """
        unwritten, self._unwritten = self._unwritten, {}
        entries = [*(self._records.get(copy, tombstone(one)) for copy, one in unwritten.items()), *news]
        if not entries:
            return
        try:
            await self._journal_writer.write(entries, durably=False)
        except DiskError:
            self._unwritten |= {one.attempt_id: one for one in entries}
            self._retry_write_ms = self._world.clock.now_ms() + DEADLINE_CHECK_MS
            self._wake.set()
            return
        if self._journal.needs_compaction(len(self._records)):
            live = [*self._records.values(), *self._pending_starts.values()]
            with suppress(DiskError):
                await self._world.offload(lambda: self._journal.compact(live))

    async def _read_journal(self) -> dict[AttemptId, ProcessRecord]:
        """Read the journal, and retry until it can be read. Before that the keeper cannot tell which processes are its own, so
        it starts and stops nothing.
        """
        said = ""
        while True:
            try:
                return await self._world.offload(self._journal.read)
            except DiskError as error:
                if str(error) != said:
                    said = str(error)
                    self._log(f"no process is started or stopped until the journal can be read: {said}")
                await self._world.clock.sleep_ms(DEADLINE_CHECK_MS)

    def _usage(self) -> tuple[ProcessUsage, ...]:
        runs = [kept for kept in self._records.values() if kept.alive and kept.pid]
        used = [(kept, self._world.runner.usage(kept.running)) for kept in runs]
        return tuple(ProcessUsage(kept.uid, kept.attempt, use.cpu_ms, use.memory_bytes) for kept, use in used)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._group is None:
            raise RuntimeError("Keeper.run is not active: no task can be started")
        self._group.create_task(work, name=name)


def _not_started(kept: ProcessRecord, failed: str, cure: str) -> ProcessRecord:
    """Return the reply for a start that did not happen."""
    return replace(kept, number=NO_START, ended=ExitStatus(), failed=failed, cure=cure)
