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

from remit.agent.attempts import START_TOO_LATE, AttemptId, attempt_from_env, is_attempt_name
from remit.agent.keeper.journal import GroupCommitWriter, Journal, tombstone
from remit.agent.keeper.log_retention import LogRetention
from remit.agent.keeper.protocol import (
    NO_START,
    BlockStart,
    ConfirmRenewals,
    ForgetProcess,
    GetUsage,
    KeeperReply,
    ProcessRecord,
    ProcessTable,
    ProcessUsage,
    Shutdown,
    StartProcess,
    StopProcess,
    decode_message,
    encode,
)
from remit.world.interfaces import DiskError, ExitStatus, NotStarted, ProcessHandle, StartTooLate, World, WorldError

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

    def update(self, attempt: AttemptId, record: ProcessRecord | None) -> None:
        self._changes[attempt] = record
        self._changed.set()

    async def next(self) -> ProcessTable:
        await self._changed.wait()
        self._changed.clear()
        changes, self._changes = self._changes, {}
        records = tuple(record for record in changes.values() if record is not None)
        return ProcessTable(kept=records, gone=tuple(attempt for attempt, record in changes.items() if record is None))


class Keeper:
    """Implements `world.interfaces.Service`. `run` returns after a `Shutdown` message.

    `log_retention` bounds the log files, if given. `work_directory` is the directory with one subdirectory for each attempt
    ever started here. `log` writes a line for operators.
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
        """Attempts whose last record could not be written. Writing is retried at `_retry_write_ms`, or together with the next
        write.
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
            for record in tuple(self._records.values()):
                await self._recover(record)
            await self._stop_unrecorded()
            self._ready.set()
            tasks = [group.create_task(self._enforce_deadlines(), name="deadlines")]
            if self._log_retention is not None:
                tasks.append(group.create_task(self._log_retention.run(self._records), name="logs"))
            await self._stopped.wait()
            for task in tasks:
                task.cancel()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def request(self, body: bytes, /) -> bytes:
        await self._ready.wait()
        match decode_message(body):
            case StartProcess() as message:
                return encode(KeeperReply(kept=await self._start_process(message)))
            case StopProcess(key, uid, attempt, grace_ms, result):
                self._stop_process(AttemptId(key, uid, attempt), grace_ms, result)
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
        subscriber = _TableSubscriber()
        self._subscribers.append(subscriber)
        try:
            yield encode(ProcessTable(whole=True, kept=tuple(self._records.values())))
            while True:
                yield encode(await subscriber.next())
        finally:
            self._subscribers.remove(subscriber)

    # -- starting ------------------------------------------------------------------------------------------------------

    async def _start_process(self, message: StartProcess) -> ProcessRecord | None:
        attempt = attempt_from_env(message.order.env)
        async with self._start_lock(attempt):
            return await self._start_if_allowed(message, attempt)

    def _start_lock(self, attempt: AttemptId) -> asyncio.Lock:
        """Return the lock under which an attempt is started or blocked. A lock in use is never discarded: with two locks for
        one attempt, two starts could run at once.
        """
        if len(self._start_locks) > BLOCKED_STARTS_MAX:
            self._start_locks = {key: lock for key, lock in self._start_locks.items() if lock.locked() or key in self._records}
        return self._start_locks.setdefault(attempt, asyncio.Lock())

    async def _start_if_allowed(self, message: StartProcess, attempt: AttemptId) -> ProcessRecord | None:
        current = self._records.get(attempt)
        if current is not None and (current.number >= message.number or current.alive):
            return current  # a repeated or delayed request must not start a second process
        record = self._new_record(message, attempt)
        if attempt in self._blocked:
            now_ms = self._world.clock.now_ms()
            failed, cure = "its end was already reported", "nothing to do"
            return replace(record, ended=ExitStatus(), ended_ms=now_ms, failed=failed, cure=cure)
        if self._shutting_down:
            return _not_started(record, "the keeper is shutting down", "retry: the next keeper will start it")
        if self._remaining_ms(record) <= 0:
            return None
        self._pending_starts[attempt] = record
        try:
            await self._journal_writer.write([record], durably=True, prepare=partial(self._make_directories, message.rooms))
            self._records[attempt] = record  # subscribers are informed of the outcome, a moment later
        except DiskError as error:
            # Not started: a start that is not durably recorded must not happen. A later request may find the disk working.
            return _not_started(record, error.cause, error.cure)
        finally:
            del self._pending_starts[attempt]
        return await self._run_process(message, record)

    def _make_directories(self, directories: Sequence[Path]) -> None:
        for directory in directories:
            self._world.disk.make_directory(directory, durably=False)

    def _new_record(self, message: StartProcess, attempt: AttemptId) -> ProcessRecord:
        env = message.order.env
        return ProcessRecord(
            node=env["REMIT_NODE"],
            scope=env["REMIT_SCOPE"],
            key=attempt.key,
            uid=attempt.uid,
            attempt=attempt.number,
            number=message.number,
            since_ms=self._world.clock.now_ms(),
            fence_ms=message.fence_ms,
            grace_ms=message.grace_ms,
            ports=message.ports,
            boot=self._world.clock.boot(),
        )

    async def _run_process(self, message: StartProcess, record: ProcessRecord) -> ProcessRecord:
        """Start a process whose start is recorded. Its number is not used again, even if the start fails."""
        try:
            # Checked again: the journal write may have taken longer than the time that was left.
            if self._remaining_ms(record) <= 0:
                cause = "its fencing deadline passed while it was being started"
                raise StartTooLate(cause, "nothing to do: it is scheduled again")
            process = await self._world.runner.start(message.order._replace(not_after_ms=self._deadline_ms(record)))
        except NotStarted as error:
            why, now_ms = START_TOO_LATE if isinstance(error, StartTooLate) else "", self._world.clock.now_ms()
            record = replace(record, ended=ExitStatus(), ended_ms=now_ms, failed=error.cause, cure=error.cure, why=why)
            await self._update_record(record)
            return record
        record = replace(record, pid=process.pid, began=process.start_time, group=process.group)
        self._publish(record)
        self._watch_exit(record)
        self._wake.set()
        await self._write_journal(record)  # the reply implies that a restarted keeper will find this process
        return record

    async def _recover(self, record: ProcessRecord) -> None:
        """Recover a record after a restart of the keeper.

        A live process is watched again. A start without a known process is cleaned up, in case it happened after all.
        """
        boot, now_ms = self._world.clock.boot(), self._world.clock.now_ms()
        if record.boot != boot:
            # The machine was rebooted: no process can be left, and times of the old boot cannot be compared with this clock.
            status = ExitStatus() if record.ended is None else record.ended
            await self._update_record(replace(record, boot=boot, since_ms=now_ms, ended=status, ended_ms=now_ms))
        elif record.alive and record.pid and self._world.runner.is_alive(record.running):
            self._watch_exit(record)
            if record.fence_ms:
                # It should have died with the previous keeper, which was the only one to know its deadline.
                self._fence(record)
        elif record.alive:
            self._spawn(self._clean_up(record), f"clean up {record.key}")

    async def _stop_unrecorded(self) -> None:
        """Stop processes that have a directory here and no journal entry: the journal was lost or damaged, so no agent knows of
        them.
        """
        known = {attempt.file_name for attempt in self._records}
        names: tuple[str, ...] = ()
        with suppress(DiskError):
            if self._work_directory is not None:
                names = await self._world.offload(partial(self._world.disk.list, self._work_directory))
        for name in names:
            if name not in known and is_attempt_name(name):
                await self._world.runner.kill_group(name)

    async def _clean_up(self, record: ProcessRecord) -> None:
        """Stop what is left of an attempt whose main process is gone or was never recorded."""
        if record.pid:
            await self._stop_with_retries(record.running, record.grace_ms)
        else:
            await self._world.runner.kill_group(record.attempt_id.file_name)
        await self._update_record(replace(record, ended=ExitStatus(), ended_ms=self._world.clock.now_ms()))

    # -- ending --------------------------------------------------------------------------------------------------------

    def _watch_exit(self, record: ProcessRecord) -> None:
        async def wait() -> None:
            status = await self._world.runner.wait(record.running)
            await self._stop_with_retries(record.running, record.grace_ms)  # descendants that outlived it
            # Meanwhile the attempt may have been forgotten, or its next process recorded: do not end that one.
            current = self._records.get(record.attempt_id)
            if current is not None and current.running == record.running:
                self._kill_at_ms.pop(record.attempt_id, None)
                await self._update_record(replace(current, ended=status, ended_ms=self._world.clock.now_ms()))

        self._spawn(wait(), f"wait for {record.pid}")

    def _stop_process(self, attempt: AttemptId, grace_ms: int, result: str = "") -> None:
        record = self._records.get(attempt)
        if record is None or not record.alive or not record.pid:
            return
        kill_at_ms = self._world.clock.now_ms() + grace_ms
        if attempt in self._kill_at_ms and self._kill_at_ms[attempt] <= kill_at_ms:
            return  # a repeated request may bring the kill forward, but never delay it
        self._kill_at_ms[attempt] = kill_at_ms
        if result and not record.why:
            self._publish(replace(record, why=result))
        self._spawn(self._stop_with_retries(record.running, grace_ms), f"stop {record.pid}")

    async def _block_start(self, attempt: AttemptId) -> ProcessRecord | None:
        async with self._start_lock(attempt):  # a start in progress finishes first
            record = self._records.get(attempt)
            if record is None or not record.alive:
                self._add_blocked(attempt)
        return record

    def _add_blocked(self, attempt: AttemptId) -> None:
        self._blocked[attempt] = None
        while len(self._blocked) > BLOCKED_STARTS_MAX:
            del self._blocked[next(iter(self._blocked))]

    async def _stop_with_retries(self, process: ProcessHandle, grace_ms: int) -> None:
        """Stop a process, and retry until it succeeds, so that a failure to signal it does not leave it running unnoticed."""
        while True:
            try:
                return await self._world.runner.stop(process, grace_ms=grace_ms)
            except (WorldError, OSError):
                await self._world.clock.sleep_ms(DEADLINE_CHECK_MS)

    def _fence(self, record: ProcessRecord) -> None:
        self._publish(replace(record, fenced=True))
        self._stop_process(record.attempt_id, record.grace_ms)

    async def _shut_down(self, grace_ms: int) -> None:
        self._shutting_down = True
        while alive := [record.attempt_id for record in self._records.values() if record.alive]:
            for attempt in alive:
                self._stop_process(attempt, grace_ms)
            await self._world.clock.sleep_ms(SHUTDOWN_POLL_MS)
        self._stopped.set()

    async def _enforce_deadlines(self) -> None:
        next_check_ms = self._world.clock.now_ms() + DEADLINE_CHECK_MS
        while True:
            if self._world.clock.now_ms() > next_check_ms + STALL_MS:
                # This process was suspended. Renewals that arrived meanwhile are read first, because they may have extended the
                # deadlines.
                await self._world.clock.sleep_ms(STALL_MS)
            self._wake.clear()
            wait_ms = IDLE_MS
            for record in tuple(self._records.values()):
                if not record.alive or not record.fence_ms or record.fenced:
                    continue
                remaining_ms = self._remaining_ms(record)
                if remaining_ms > 0:
                    wait_ms = min(wait_ms, DEADLINE_CHECK_MS, remaining_ms)
                elif record.pid:
                    self._fence(record)
            if self._unwritten:
                retry_in_ms = self._retry_write_ms - self._world.clock.now_ms()
                if retry_in_ms <= 0:
                    self._spawn(self._write_journal(), "write again")
                wait_ms = min(wait_ms, retry_in_ms if retry_in_ms > 0 else DEADLINE_CHECK_MS)
            next_check_ms = self._world.clock.now_ms() + wait_ms
            with suppress(TimeoutError):
                async with self._world.clock.timeout_ms(wait_ms):
                    await self._wake.wait()

    def _remaining_ms(self, record: ProcessRecord) -> int:
        """How long the process may still run without a renewal."""
        deadline_ms = self._deadline_ms(record)
        return DEADLINE_CHECK_MS if deadline_ms is None else deadline_ms - self._world.clock.now_ms()

    def _deadline_ms(self, record: ProcessRecord) -> int | None:
        """None: the process has no deadline. Without a known renewal of its node, a process with a fence must not start."""
        if not record.fence_ms:
            return None
        return self._renewed_ms.get(record.node, record.since_ms if record.pid else 0) + record.fence_ms

    def _record_renewals(self, sent_ms: dict[str, int]) -> None:
        now_ms = self._world.clock.now_ms()
        for node, at_ms in sent_ms.items():
            if at_ms <= now_ms:  # ignore renewals with a send time in the future
                self._renewed_ms[node] = max(at_ms, self._renewed_ms.get(node, 0))

    # -- records and journal -------------------------------------------------------------------------------------------

    async def _forget(self, attempt: AttemptId) -> None:
        record = self._records.get(attempt)
        if record is None or record.alive:
            return
        del self._records[attempt]
        self._add_blocked(attempt)  # an agent that got no reply may have sent the start twice
        for subscriber in self._subscribers:
            subscriber.update(attempt, None)
        await self._write_journal(tombstone(record))

    async def _update_record(self, record: ProcessRecord) -> None:
        """Publish a record and write it to the journal. A failed write is retried; the record is valid meanwhile."""
        self._publish(record)
        await self._write_journal(record)

    def _publish(self, record: ProcessRecord) -> None:
        self._records[record.attempt_id] = record
        for subscriber in self._subscribers:
            subscriber.update(record.attempt_id, record)

    async def _write_journal(self, *records: ProcessRecord) -> None:
        """Write records, together with the current state of those that could not be written before. A restarted keeper finds
        its processes by them.
        """
        unwritten, self._unwritten = self._unwritten, {}
        entries = [*(self._records.get(attempt, tombstone(record)) for attempt, record in unwritten.items()), *records]
        if not entries:
            return
        try:
            await self._journal_writer.write(entries, durably=False)
        except DiskError:
            self._unwritten |= {record.attempt_id: record for record in entries}
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
        last_error = ""
        while True:
            try:
                return await self._world.offload(self._journal.read)
            except DiskError as error:
                if str(error) != last_error:
                    last_error = str(error)
                    self._log(f"no process is started or stopped until the journal can be read: {last_error}")
                await self._world.clock.sleep_ms(DEADLINE_CHECK_MS)

    def _usage(self) -> tuple[ProcessUsage, ...]:
        running = [record for record in self._records.values() if record.alive and record.pid]
        usages = [(record, self._world.runner.usage(record.running)) for record in running]
        return tuple(ProcessUsage(record.uid, record.attempt, usage.cpu_ms, usage.memory_bytes) for record, usage in usages)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._group is None:
            raise RuntimeError("Keeper.run is not active: no task can be started")
        self._group.create_task(work, name=name)


def _not_started(record: ProcessRecord, failed: str, cure: str) -> ProcessRecord:
    """Return the reply for a start that did not happen."""
    return replace(record, number=NO_START, ended=ExitStatus(), failed=failed, cure=cure)
