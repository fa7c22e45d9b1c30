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
from remit.world.interfaces import DiskError, Ended, NotStarted, Running, World, WorldError

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
        self._news: dict[AttemptId, ProcessRecord | None] = {}
        self._came = asyncio.Event()

    def tell(self, copy: AttemptId, kept: ProcessRecord | None) -> None:
        self._news[copy] = kept
        self._came.set()

    async def next(self) -> ProcessTable:
        await self._came.wait()
        self._came.clear()
        news, self._news = self._news, {}
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
        sayings: LogRetention | None = None,
        *,
        rooms: Path | None = None,
        tell: Callable[[str], None] = _discard,
    ) -> None:
        self._world, self._sayings, self._rooms, self._say = world, sayings, rooms, tell
        self._journal = Journal(world.disk, journal)
        self._scribe = GroupCommitWriter(self._journal, world.offload)
        self._starts: dict[AttemptId, ProcessRecord] = {}
        self._renewed_ms: dict[str, int] = {}
        self._beginning: dict[AttemptId, asyncio.Lock] = {}
        self._ending_ms: dict[AttemptId, int] = {}
        """When each stopping process will be killed."""
        self._barred: dict[AttemptId, None] = {}
        """Attempts whose starts are refused. The request for such a start may be late, and its sender may be gone by now."""
        self._promised: dict[AttemptId, ProcessRecord] = {}
        """Starts that are being written to the journal and are performed next. A compaction of the journal includes them."""
        self._unwritten: dict[AttemptId, ProcessRecord] = {}
        """Attempts whose last record could not be written. Writing is retried at `_again_ms`, or together with the next write.
        """
        self._again_ms = 0
        self._news = asyncio.Event()
        self._quitting = False
        self._over = asyncio.Event()
        self._readers: list[_TableSubscriber] = []
        self._group: asyncio.TaskGroup | None = None
        self._ready = asyncio.Event()

    async def run(self) -> None:
        self._starts = await self._read()
        async with asyncio.TaskGroup() as group:
            self._group = group
            for kept in tuple(self._starts.values()):
                await self._find_again(kept)
            await self._end_strangers()
            self._ready.set()
            tasks = [group.create_task(self._hold_deadlines(), name="deadlines")]
            if self._sayings is not None:
                tasks.append(group.create_task(self._sayings.hold(self._starts), name="logs"))
            await self._over.wait()
            for task in tasks:
                task.cancel()

    # -- requests --------------------------------------------------------------------------------------------------------------

    async def request(self, body: bytes, /) -> bytes:
        await self._ready.wait()
        match decode_message(body):
            case StartProcess() as begin:
                return encode(KeeperReply(kept=await self._begin(begin)))
            case StopProcess(key, uid, attempt, grace_ms, why):
                self._halt(AttemptId(key, uid, attempt), grace_ms, why)
            case BlockStart(key, uid, attempt):
                return encode(KeeperReply(kept=await self._bar(AttemptId(key, uid, attempt))))
            case ForgetProcess(key, uid, attempt):
                await self._drop(AttemptId(key, uid, attempt))
            case ConfirmRenewals(sent_ms):
                self._renew(sent_ms)
            case GetUsage():
                return encode(KeeperReply(uses=self._uses()))
            case Shutdown(grace_ms):
                await self._quit(grace_ms)
        return encode(KeeperReply())

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        """Stream the full table, then its changes."""
        await self._ready.wait()
        reader = _TableSubscriber()
        self._readers.append(reader)
        try:
            yield encode(ProcessTable(whole=True, kept=tuple(self._starts.values())))
            while True:
                yield encode(await reader.next())
        finally:
            self._readers.remove(reader)

    # -- starting --------------------------------------------------------------------------------------------------------

    async def _begin(self, begin: StartProcess) -> ProcessRecord | None:
        copy = attempt_from_env(begin.order.env)
        async with self._turn(copy):
            return await self._begin_one(begin, copy)

    def _turn(self, copy: AttemptId) -> asyncio.Lock:
        """Return the lock under which an attempt is started or blocked. A lock in use is never discarded: with two locks for
        one attempt, two starts could run at once.
        """
        if len(self._beginning) > BLOCKED_STARTS_MAX:
            self._beginning = {one: lock for one, lock in self._beginning.items() if lock.locked() or one in self._starts}
        return self._beginning.setdefault(copy, asyncio.Lock())

    async def _begin_one(self, begin: StartProcess, copy: AttemptId) -> ProcessRecord | None:
        known = self._starts.get(copy)
        if known is not None and (known.number >= begin.number or known.alive):
            return known
        kept = self._as_begun(begin, copy)
        if copy in self._barred:
            now_ms = self._world.clock.now_ms()
            failed, cure = "its end was already reported", "nothing to do"
            return replace(kept, ended=Ended(), ended_ms=now_ms, failed=failed, cure=cure)
        if self._quitting:
            return _not_started(kept, "the keeper is shutting down", "retry: the next keeper will start it")
        if self._left_ms(kept) <= 0:
            return None
        self._promised[copy] = kept
        try:
            await self._scribe.write([kept], durably=True, first=partial(self._make_rooms, begin.rooms))
            self._starts[copy] = kept  # subscribers are informed of the outcome, a moment later
        except DiskError as error:
            # Not started: a start that is not durably recorded must not happen. A later request may find the disk working.
            return _not_started(kept, error.cause, error.cure)
        finally:
            del self._promised[copy]
        return await self._start(begin, kept)

    def _make_rooms(self, rooms: Sequence[Path]) -> None:
        for room in rooms:
            self._world.disk.make_directory(room, durably=False)

    def _as_begun(self, begin: StartProcess, copy: AttemptId) -> ProcessRecord:
        env = begin.order.env
        return ProcessRecord(
            node=env["REMIT_NODE"],
            scope=env["REMIT_SCOPE"],
            key=copy.key,
            uid=copy.uid,
            attempt=copy.attempt,
            number=begin.number,
            since_ms=self._world.clock.now_ms(),
            fence_ms=begin.fence_ms,
            grace_ms=begin.grace_ms,
            ports=begin.ports,
            boot=self._world.clock.boot(),
        )

    async def _start(self, begin: StartProcess, kept: ProcessRecord) -> ProcessRecord:
        """Start a process whose start is recorded. Its number is not used again, even if the start fails."""
        try:
            if self._left_ms(kept) <= 0:
                cause = "its fencing deadline passed while it was being started"
                raise NotStarted(cause, "nothing to do: it is scheduled again")
            running = await self._world.runner.start(begin.order._replace(not_after_ms=self._deadline_ms(kept)))
        except NotStarted as error:
            kept = replace(kept, ended=Ended(), ended_ms=self._world.clock.now_ms(), failed=error.cause, cure=error.cure)
            await self._note(kept)
            return kept
        kept = replace(kept, pid=running.pid, began=running.began, group=running.group)
        self._tell(kept)
        self._watch(kept)
        self._news.set()
        await self._write(kept)  # the reply implies that a restarted keeper will find this process
        return kept

    async def _find_again(self, kept: ProcessRecord) -> None:
        """Recover a record after a restart of the keeper.

        A live process is watched again. A start without a known process is cleaned up, in case it happened after all.
        """
        boot, now_ms = self._world.clock.boot(), self._world.clock.now_ms()
        if kept.boot != boot:
            # The machine was rebooted: no process can be left, and times of the old boot cannot be compared with this clock.
            ended = Ended() if kept.ended is None else kept.ended
            await self._note(replace(kept, boot=boot, since_ms=now_ms, ended=ended, ended_ms=now_ms))
        elif kept.alive and kept.pid and self._world.runner.alive(kept.running):
            self._watch(kept)
            if kept.fence_ms:
                # It should have died with the previous keeper, which was the only one to know its deadline.
                self._fence(kept)
        elif kept.alive:
            self._spawn(self._clear(kept), f"clear {kept.key}")

    async def _end_strangers(self) -> None:
        """Stop processes that have a directory here and no journal entry: the journal was lost or damaged, so no agent knows of
        them.
        """
        known = {copy.file_name for copy in self._starts}
        names: tuple[str, ...] = ()
        with suppress(DiskError):
            if self._rooms is not None:
                names = await self._world.offload(partial(self._world.disk.list, self._rooms))
        for name in names:
            if name not in known and is_attempt_name(name):
                await self._world.runner.clear(name)

    async def _clear(self, kept: ProcessRecord) -> None:
        """Stop what is left of an attempt whose main process is gone or was never recorded."""
        if kept.pid:
            await self._end(kept.running, kept.grace_ms)
        else:
            await self._world.runner.clear(kept.copy.file_name)
        await self._note(replace(kept, ended=Ended(), ended_ms=self._world.clock.now_ms()))

    # -- ending ----------------------------------------------------------------------------------------------------------

    def _watch(self, kept: ProcessRecord) -> None:
        async def wait() -> None:
            ended = await self._world.runner.wait(kept.running)
            await self._end(kept.running, kept.grace_ms)  # descendants that outlived it
            current = self._starts.get(kept.copy)
            if current is not None and current.running == kept.running:
                self._ending_ms.pop(kept.copy, None)
                await self._note(replace(current, ended=ended, ended_ms=self._world.clock.now_ms()))

        self._spawn(wait(), f"wait for {kept.pid}")

    def _halt(self, copy: AttemptId, grace_ms: int, why: str = "") -> None:
        kept = self._starts.get(copy)
        if kept is None or not kept.alive or not kept.pid:
            return
        until_ms = self._world.clock.now_ms() + grace_ms
        if copy in self._ending_ms and self._ending_ms[copy] <= until_ms:
            return
        self._ending_ms[copy] = until_ms
        if why and not kept.why:
            self._tell(replace(kept, why=why))
        self._spawn(self._end(kept.running, grace_ms), f"end {kept.pid}")

    async def _bar(self, copy: AttemptId) -> ProcessRecord | None:
        async with self._turn(copy):  # a start in progress finishes first
            kept = self._starts.get(copy)
            if kept is None or not kept.alive:
                self._begin_no_more(copy)
        return kept

    def _begin_no_more(self, copy: AttemptId) -> None:
        self._barred[copy] = None
        while len(self._barred) > BLOCKED_STARTS_MAX:
            del self._barred[next(iter(self._barred))]

    async def _end(self, running: Running, grace_ms: int) -> None:
        """Stop a process, and retry until it succeeds, so that a failure to signal it does not leave it running unnoticed."""
        while True:
            try:
                return await self._world.runner.stop(running, grace_ms=grace_ms)
            except (WorldError, OSError):
                await self._world.clock.sleep_ms(DEADLINE_CHECK_MS)

    def _fence(self, kept: ProcessRecord) -> None:
        self._tell(replace(kept, fenced=True))
        self._halt(kept.copy, kept.grace_ms)

    async def _quit(self, grace_ms: int) -> None:
        self._quitting = True
        while alive := [kept.copy for kept in self._starts.values() if kept.alive]:
            for copy in alive:
                self._halt(copy, grace_ms)
            await self._world.clock.sleep_ms(SHUTDOWN_POLL_MS)
        self._over.set()

    async def _hold_deadlines(self) -> None:
        until_ms = self._world.clock.now_ms() + DEADLINE_CHECK_MS
        while True:
            if self._world.clock.now_ms() > until_ms + STALL_MS:
                # This process was suspended. Renewals that arrived meanwhile are read first, because they may have extended the
                # deadlines.
                await self._world.clock.sleep_ms(STALL_MS)
            self._news.clear()
            wait_ms = IDLE_MS
            for kept in tuple(self._starts.values()):
                if not kept.alive or not kept.fence_ms or kept.fenced:
                    continue
                left_ms = self._left_ms(kept)
                if left_ms > 0:
                    wait_ms = min(wait_ms, DEADLINE_CHECK_MS, left_ms)
                elif kept.pid:
                    self._fence(kept)
            if self._unwritten:
                again_ms = self._again_ms - self._world.clock.now_ms()
                if again_ms <= 0:
                    self._spawn(self._write(), "write again")
                wait_ms = min(wait_ms, again_ms if again_ms > 0 else DEADLINE_CHECK_MS)
            until_ms = self._world.clock.now_ms() + wait_ms
            with suppress(TimeoutError):
                async with self._world.clock.timeout_ms(wait_ms):
                    await self._news.wait()

    def _left_ms(self, kept: ProcessRecord) -> int:
        """How long the process may still run without a renewal."""
        deadline_ms = self._deadline_ms(kept)
        return DEADLINE_CHECK_MS if deadline_ms is None else deadline_ms - self._world.clock.now_ms()

    def _deadline_ms(self, kept: ProcessRecord) -> int | None:
        """None: the process has no deadline. Without a known renewal of its node, a process with a fence must not start."""
        if not kept.fence_ms:
            return None
        return self._renewed_ms.get(kept.node, kept.since_ms if kept.pid else 0) + kept.fence_ms

    def _renew(self, sent_ms: dict[str, int]) -> None:
        now_ms = self._world.clock.now_ms()
        for node, at_ms in sent_ms.items():
            if at_ms <= now_ms:  # ignore renewals with a send time in the future
                self._renewed_ms[node] = max(at_ms, self._renewed_ms.get(node, 0))

    # -- records and journal ---------------------------------------------------------------------------------------------------

    async def _drop(self, copy: AttemptId) -> None:
        kept = self._starts.get(copy)
        if kept is None or kept.alive:
            return
        del self._starts[copy]
        self._begin_no_more(copy)  # an agent that got no reply may have sent the start twice
        for reader in self._readers:
            reader.tell(copy, None)
        await self._write(tombstone(kept))

    async def _note(self, kept: ProcessRecord) -> None:
        """Publish a record and write it to the journal. A failed write is retried with the next; the record counts meanwhile.
        """
        self._tell(kept)
        await self._write(kept)

    def _tell(self, kept: ProcessRecord) -> None:
        self._starts[kept.copy] = kept
        for reader in self._readers:
            reader.tell(kept.copy, kept)

    async def _write(self, *news: ProcessRecord) -> None:
        """Write records, together with the current state of those that could not be written before. A restarted keeper finds
        its processes by them.
        """
        unwritten, self._unwritten = self._unwritten, {}
        entries = [*(self._starts.get(copy, tombstone(one)) for copy, one in unwritten.items()), *news]
        if not entries:
            return
        try:
            await self._scribe.write(entries, durably=False)
        except DiskError:
            self._unwritten |= {one.copy: one for one in entries}
            self._again_ms = self._world.clock.now_ms() + DEADLINE_CHECK_MS
            self._news.set()
            return
        if self._journal.grown(len(self._starts)):
            live = [*self._starts.values(), *self._promised.values()]
            with suppress(DiskError):
                await self._world.offload(lambda: self._journal.rewrite(live))

    async def _read(self) -> dict[AttemptId, ProcessRecord]:
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
                    self._say(f"no process is started or stopped until the journal can be read: {said}")
                await self._world.clock.sleep_ms(DEADLINE_CHECK_MS)

    def _uses(self) -> tuple[ProcessUsage, ...]:
        runs = [kept for kept in self._starts.values() if kept.alive and kept.pid]
        used = [(kept, self._world.runner.usage(kept.running)) for kept in runs]
        return tuple(ProcessUsage(kept.uid, kept.attempt, use.cpu_ms, use.memory_bytes) for kept, use in used)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._group is None:
            raise RuntimeError("Keeper.run is not active: no task can be started")
        self._group.create_task(work, name=name)


def _not_started(kept: ProcessRecord, failed: str, cure: str) -> ProcessRecord:
    """Return the reply for a start that did not happen."""
    return replace(kept, number=NO_START, ended=Ended(), failed=failed, cure=cure)
