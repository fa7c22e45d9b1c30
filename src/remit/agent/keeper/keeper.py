"""Keeper process: starts and stops processes, enforces fencing deadlines, streams its process table.

A small process beside the agent: it starts, holds the deadlines, and outlives it.

The deadline of what must never run twice is the last renewal of its node's lease that was answered, counted from when it was
*sent*, and its fence. It holds whatever becomes of the agent: dead, stopped, or with an event loop that stands still. So
looking at the deadline and starting is one step, and it is the keeper's.

It is the parent of all that runs here, so it alone learns how each ended; and it writes down that a start is begun before it
is (journal.py), so a copy that was begun is never begun again, whoever asks. What work says is held to a size here too
(saying.py): that must go on without an agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from remit.agent.attempts import Copy, is_copy_name, known_by
from remit.agent.keeper.journal import Journal, Scribe, forgotten
from remit.agent.keeper.log_retention import Sayings
from remit.agent.keeper.protocol import (
    NEVER,
    Answer,
    Bar,
    Begin,
    Begun,
    Drop,
    Halt,
    Quit,
    Renewed,
    Table,
    Use,
    Uses,
    encode,
    read_word,
)
from remit.world.interfaces import DiskError, Ended, NotStarted, Running, World, WorldError

LOOK_MS: Final = 1_000
"""It looks at the deadlines at least so often while it holds any; and whenever one comes."""

IDLE_MS: Final = 60_000
LATE_MS: Final = 20
BARRED_MAX: Final = 10_000

QUIT_LOOK_MS: Final = 50


def _unsaid(_: str) -> None:
    return


class _Reader:
    """What one reader of the table has not been told yet: of each copy the last, so a slow one costs no more than the table."""

    def __init__(self) -> None:
        self._news: dict[Copy, Begun | None] = {}
        self._came = asyncio.Event()

    def tell(self, copy: Copy, kept: Begun | None) -> None:
        self._news[copy] = kept
        self._came.set()

    async def next(self) -> Table:
        await self._came.wait()
        self._came.clear()
        news, self._news = self._news, {}
        kept = tuple(one for one in news.values() if one is not None)
        return Table(kept=kept, gone=tuple(copy for copy, one in news.items() if one is None))


class Keeper:
    """Satisfies `world.promises.Service`. `run` goes on until one says `Quit`. `sayings`: what work says, if it is kept.
    `rooms`: where each copy that was ever begun here has a directory of its name. `tell` is for people.
    """

    def __init__(
        self,
        world: World,
        journal: Path,
        sayings: Sayings | None = None,
        *,
        rooms: Path | None = None,
        tell: Callable[[str], None] = _unsaid,
    ) -> None:
        self._world, self._sayings, self._rooms, self._say = world, sayings, rooms, tell
        self._journal = Journal(world.disk, journal)
        self._scribe = Scribe(self._journal, world.offload)
        self._starts: dict[Copy, Begun] = {}
        self._renewed_ms: dict[str, int] = {}
        self._beginning: dict[Copy, asyncio.Lock] = {}
        self._ending_ms: dict[Copy, int] = {}
        """When each that was asked to end is made to."""
        self._barred: dict[Copy, None] = {}
        """Copies of which nothing more is begun. Whoever asked for a start may have been slow, or may be gone by now."""
        self._promised: dict[Copy, Begun] = {}
        """Starts that are being written down, and are begun right after. A journal that is written anew keeps them."""
        self._unwritten: dict[Copy, Begun] = {}
        """Of which copies the last could not be written. It is tried again at this instant, or with what is written before."""
        self._again_ms = 0
        self._news = asyncio.Event()
        self._quitting = False
        self._over = asyncio.Event()
        self._readers: list[_Reader] = []
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

    # -- what is asked of it ---------------------------------------------------------------------------------------------

    async def request(self, body: bytes, /) -> bytes:
        await self._ready.wait()
        match read_word(body):
            case Begin() as begin:
                return encode(Answer(kept=await self._begin(begin)))
            case Halt(key, uid, attempt, grace_ms, why):
                self._halt(Copy(key, uid, attempt), grace_ms, why)
            case Bar(key, uid, attempt):
                return encode(Answer(kept=await self._bar(Copy(key, uid, attempt))))
            case Drop(key, uid, attempt):
                await self._drop(Copy(key, uid, attempt))
            case Renewed(sent_ms):
                self._renew(sent_ms)
            case Uses():
                return encode(Answer(uses=self._uses()))
            case Quit(grace_ms):
                await self._quit(grace_ms)
        return encode(Answer())

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        """The whole table, and then what changes."""
        await self._ready.wait()
        reader = _Reader()
        self._readers.append(reader)
        try:
            yield encode(Table(whole=True, kept=tuple(self._starts.values())))
            while True:
                yield encode(await reader.next())
        finally:
            self._readers.remove(reader)

    # -- starting --------------------------------------------------------------------------------------------------------

    async def _begin(self, begin: Begin) -> Begun | None:
        copy = known_by(begin.order.env)
        async with self._turn(copy):
            return await self._begin_one(begin, copy)

    def _turn(self, copy: Copy) -> asyncio.Lock:
        """One at a time decides whether a copy is begun. A lock is kept while anybody may wait for it: two would let two in."""
        if len(self._beginning) > BARRED_MAX:
            self._beginning = {one: lock for one, lock in self._beginning.items() if lock.locked() or one in self._starts}
        return self._beginning.setdefault(copy, asyncio.Lock())

    async def _begin_one(self, begin: Begin, copy: Copy) -> Begun | None:
        known = self._starts.get(copy)
        if known is not None and (known.number >= begin.number or known.alive):
            return known
        kept = self._as_begun(begin, copy)
        if copy in self._barred:
            now_ms = self._world.clock.now_ms()
            return replace(kept, ended=Ended(), ended_ms=now_ms, failed="its end was told already", cure="nothing to do")
        if self._quitting:
            return _never(kept, "its keeper is about to end", "ask the next one")
        if self._left_ms(kept) <= 0:
            return None
        self._promised[copy] = kept
        try:
            await self._scribe.write([kept], durably=True, first=partial(self._make_rooms, begin.rooms))
            self._starts[copy] = kept  # readers are told what has come of it: that is a moment away
        except DiskError as error:
            # Not begun: what was not surely written down must not run. Whoever asks again may find a better disk.
            return _never(kept, error.cause, error.cure)
        finally:
            del self._promised[copy]
        return await self._start(begin, kept)

    def _make_rooms(self, rooms: Sequence[Path]) -> None:
        for room in rooms:
            self._world.disk.make_directory(room, durably=False)

    def _as_begun(self, begin: Begin, copy: Copy) -> Begun:
        env = begin.order.env
        return Begun(
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

    async def _start(self, begin: Begin, kept: Begun) -> Begun:
        """Its start is on record. Whatever comes of it, it is not begun again under this number."""
        try:
            if self._left_ms(kept) <= 0:
                raise NotStarted("its fence passed while it was being started", "nothing to do: it is placed anew")
            running = await self._world.runner.start(begin.order._replace(not_after_ms=self._deadline_ms(kept)))
        except NotStarted as error:
            kept = replace(kept, ended=Ended(), ended_ms=self._world.clock.now_ms(), failed=error.cause, cure=error.cure)
            await self._note(kept)
            return kept
        kept = replace(kept, pid=running.pid, began=running.began, group=running.group)
        self._tell(kept)
        self._watch(kept)
        self._news.set()
        await self._write(kept)  # whoever was answered may rely on it: the next keeper finds this process
        return kept

    async def _find_again(self, kept: Begun) -> None:
        """After a restart: what runs is watched again. What was begun and is not known to run is ended, if it does run."""
        boot, now_ms = self._world.clock.boot(), self._world.clock.now_ms()
        if kept.boot != boot:
            # The machine was started anew: nothing of it can be left, and its instants mean nothing on this clock.
            ended = Ended() if kept.ended is None else kept.ended
            await self._note(replace(kept, boot=boot, since_ms=now_ms, ended=ended, ended_ms=now_ms))
        elif kept.alive and kept.pid and self._world.runner.alive(kept.running):
            self._watch(kept)
            if kept.fence_ms:
                # It should have died with its keeper, which alone knew how long it may run.
                self._fence(kept)
        elif kept.alive:
            self._spawn(self._clear(kept), f"clear {kept.key}")

    async def _end_strangers(self) -> None:
        """Of what has a room here and is not in the journal nobody will ever ask: the journal was lost, or is damaged."""
        known = {copy.file_name for copy in self._starts}
        names: tuple[str, ...] = ()
        with suppress(DiskError):
            if self._rooms is not None:
                names = await self._world.offload(partial(self._world.disk.list, self._rooms))
        for name in names:
            if name not in known and is_copy_name(name):
                await self._world.runner.clear(name)

    async def _clear(self, kept: Begun) -> None:
        """Its first process is gone, or never known; others that came of it may be there."""
        if kept.pid:
            await self._end(kept.running, kept.grace_ms)
        else:
            await self._world.runner.clear(kept.copy.file_name)
        await self._note(replace(kept, ended=Ended(), ended_ms=self._world.clock.now_ms()))

    # -- ending ----------------------------------------------------------------------------------------------------------

    def _watch(self, kept: Begun) -> None:
        async def wait() -> None:
            ended = await self._world.runner.wait(kept.running)
            await self._end(kept.running, kept.grace_ms)  # whatever it has left behind
            current = self._starts.get(kept.copy)
            if current is not None and current.running == kept.running:
                self._ending_ms.pop(kept.copy, None)
                await self._note(replace(current, ended=ended, ended_ms=self._world.clock.now_ms()))

        self._spawn(wait(), f"wait for {kept.pid}")

    def _halt(self, copy: Copy, grace_ms: int, why: str = "") -> None:
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

    async def _bar(self, copy: Copy) -> Begun | None:
        async with self._turn(copy):  # what is being begun comes first
            kept = self._starts.get(copy)
            if kept is None or not kept.alive:
                self._begin_no_more(copy)
        return kept

    def _begin_no_more(self, copy: Copy) -> None:
        self._barred[copy] = None
        while len(self._barred) > BARRED_MAX:
            del self._barred[next(iter(self._barred))]

    async def _end(self, running: Running, grace_ms: int) -> None:
        """Until it is done: what may not be ended, or not now, is not forgotten for that."""
        while True:
            try:
                return await self._world.runner.stop(running, grace_ms=grace_ms)
            except (WorldError, OSError):
                await self._world.clock.sleep_ms(LOOK_MS)

    def _fence(self, kept: Begun) -> None:
        self._tell(replace(kept, fenced=True))
        self._halt(kept.copy, kept.grace_ms)

    async def _quit(self, grace_ms: int) -> None:
        self._quitting = True
        while alive := [kept.copy for kept in self._starts.values() if kept.alive]:
            for copy in alive:
                self._halt(copy, grace_ms)
            await self._world.clock.sleep_ms(QUIT_LOOK_MS)
        self._over.set()

    async def _hold_deadlines(self) -> None:
        until_ms = self._world.clock.now_ms() + LOOK_MS
        while True:
            if self._world.clock.now_ms() > until_ms + LATE_MS:
                # This process stood still. Renewals that came meanwhile are heard first: they may say that nothing is over.
                await self._world.clock.sleep_ms(LATE_MS)
            self._news.clear()
            wait_ms = IDLE_MS
            for kept in tuple(self._starts.values()):
                if not kept.alive or not kept.fence_ms or kept.fenced:
                    continue
                left_ms = self._left_ms(kept)
                if left_ms > 0:
                    wait_ms = min(wait_ms, LOOK_MS, left_ms)
                elif kept.pid:
                    self._fence(kept)
            if self._unwritten:
                again_ms = self._again_ms - self._world.clock.now_ms()
                if again_ms <= 0:
                    self._spawn(self._write(), "write again")
                wait_ms = min(wait_ms, again_ms if again_ms > 0 else LOOK_MS)
            until_ms = self._world.clock.now_ms() + wait_ms
            with suppress(TimeoutError):
                async with self._world.clock.timeout_ms(wait_ms):
                    await self._news.wait()

    def _left_ms(self, kept: Begun) -> int:
        """How long it may still run without a renewal."""
        deadline_ms = self._deadline_ms(kept)
        return LOOK_MS if deadline_ms is None else deadline_ms - self._world.clock.now_ms()

    def _deadline_ms(self, kept: Begun) -> int | None:
        """None: it runs for ever. Of a node whose renewals are not known, nothing more may start."""
        if not kept.fence_ms:
            return None
        return self._renewed_ms.get(kept.node, kept.since_ms if kept.pid else 0) + kept.fence_ms

    def _renew(self, sent_ms: dict[str, int]) -> None:
        now_ms = self._world.clock.now_ms()
        for node, at_ms in sent_ms.items():
            if at_ms <= now_ms:  # nobody renews in the future
                self._renewed_ms[node] = max(at_ms, self._renewed_ms.get(node, 0))

    # -- what is known ---------------------------------------------------------------------------------------------------

    async def _drop(self, copy: Copy) -> None:
        kept = self._starts.get(copy)
        if kept is None or kept.alive:
            return
        del self._starts[copy]
        self._begin_no_more(copy)  # one who asked for it and heard nothing may have asked twice
        for reader in self._readers:
            reader.tell(copy, None)
        await self._write(forgotten(kept))

    async def _note(self, kept: Begun) -> None:
        """What runs and how it ended. Where that cannot be written it is known here all the same, and written with the rest."""
        self._tell(kept)
        await self._write(kept)

    def _tell(self, kept: Begun) -> None:
        self._starts[kept.copy] = kept
        for reader in self._readers:
            reader.tell(kept.copy, kept)

    async def _write(self, *news: Begun) -> None:
        """And what could not be written before, as it stands now: a keeper that is killed finds by it what runs."""
        unwritten, self._unwritten = self._unwritten, {}
        entries = [*(self._starts.get(copy, forgotten(one)) for copy, one in unwritten.items()), *news]
        if not entries:
            return
        try:
            await self._scribe.write(entries, durably=False)
        except DiskError:
            self._unwritten |= {one.copy: one for one in entries}
            self._again_ms = self._world.clock.now_ms() + LOOK_MS
            self._news.set()
            return
        if self._journal.grown(len(self._starts)):
            live = [*self._starts.values(), *self._promised.values()]
            with suppress(DiskError):
                await self._world.offload(lambda: self._journal.rewrite(live))

    async def _read(self) -> dict[Copy, Begun]:
        """Until its journal can be read a keeper starts and ends nothing: it does not know what is its own."""
        said = ""
        while True:
            try:
                return await self._world.offload(self._journal.read)
            except DiskError as error:
                if str(error) != said:
                    said = str(error)
                    self._say(f"nothing is begun or ended until the journal can be read: {said}")
                await self._world.clock.sleep_ms(LOOK_MS)

    def _uses(self) -> tuple[Use, ...]:
        runs = [kept for kept in self._starts.values() if kept.alive and kept.pid]
        used = [(kept, self._world.runner.usage(kept.running)) for kept in runs]
        return tuple(Use(kept.uid, kept.attempt, use.cpu_ms, use.memory_bytes) for kept, use in used)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._group is None:
            raise RuntimeError("a keeper that does not run starts and ends nothing")
        self._group.create_task(work, name=name)


def _never(kept: Begun, failed: str, cure: str) -> Begun:
    """What is answered of a start that was not begun."""
    return replace(kept, number=NEVER, ended=Ended(), failed=failed, cure=cure)
