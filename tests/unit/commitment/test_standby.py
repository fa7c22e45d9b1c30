"""Does a standby lead when the leader is silent, and only then? It trusts the store alone, and never gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import msgspec
import pytest

from remit.client.endpoint import NotLeader
from remit.commitment import authority as module
from remit.commitment.authority import Authority, LeadershipLost
from remit.commitment.standby import Standby
from remit.model.claims import Accepted, Apply
from remit.store import chain
from remit.store.memory import MemoryStore
from remit.store.protocol import Compacted, Corrupt, Page, Store, Unavailable
from tests.properties.authority_world import USER, CountedIds, FakeClock, Scope, story, workload


def standby(scope: Scope, name: str = "s") -> Standby:
    leader = scope.lead.authority
    peers = {leader.head.holder: leader}
    return Standby(scope.store, scope="r1", name=name, clock=scope.clock, ids=CountedIds("s"), peers=peers, term_ms=100)


async def led_by(waiting: Standby, after: Authority | None = None) -> Authority:
    """The authority that it leads with; the next one, if it led before."""
    for _ in range(10_000):
        if waiting.leading is not None and waiting.leading is not after:
            return waiting.leading
        await asyncio.sleep(0)
    raise AssertionError("it never led")


async def seized(scope: Scope) -> None:
    for _ in range(1_000):
        if scope.row("head")["holder"] == "s":
            return
        await asyncio.sleep(0)
    raise AssertionError("it never took over")


async def ended(serving: asyncio.Task[None]) -> None:
    serving.cancel()
    await asyncio.wait({serving})


@story
async def test_a_standby_passes_everything_on_to_whoever_leads(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    answers = await standby(scope).submit([operation])
    assert isinstance(answers[0], Accepted)
    assert await standby(scope).renew(scope.actors["scheduler"])
    scope.clock.at_ms += 7
    status = await standby(scope).status()
    assert (status.leader, status.boot, status.now_ms) == ("a1", "boot-1", scope.clock.at_ms)


@story
async def test_a_standby_that_cannot_find_the_leader_turns_away_with_its_name(scope: Scope) -> None:
    waiting = standby(scope)
    await scope.take_over()
    with pytest.raises(NotLeader) as turned:
        await waiting.status()
    assert turned.value.hint == "a2"


class SteppedClock(FakeClock):
    """A sleeper wakes when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = asyncio.Semaphore(0)

    async def sleep_ms(self, ms: int) -> None:
        await self.steps.acquire()
        self.at_ms += ms

    async def step(self) -> None:
        self.steps.release()
        for _ in range(5):
            await asyncio.sleep(0)


class BeatingClock(FakeClock):
    """A timeout ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._due = asyncio.Event()

    async def beat(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        self._due.set()
        for _ in range(20):
            await asyncio.sleep(0)

    @asynccontextmanager
    async def timeout_ms(self, ms: int) -> AsyncIterator[None]:
        self._due.clear()
        async with asyncio.timeout(None) as limit:
            ending = asyncio.create_task(self._end(limit))
            try:
                yield
            finally:
                ending.cancel()

    async def _end(self, limit: asyncio.Timeout) -> None:
        await self._due.wait()
        limit.reschedule(0.0)


@story
async def test_a_chain_that_advances_is_a_leader_that_lives(scope: Scope) -> None:
    """F16: four looks a term; one advance in that time is enough."""
    waiting, clock = standby(scope), SteppedClock()
    waiting.clock = clock
    silence = asyncio.create_task(waiting.wait_for_silence())
    for number in range(4):
        for _ in range(3):
            await clock.step()
        await scope.must(USER, Apply(workload(f"w{number}")))
        await clock.step()
        assert not silence.done()
    for _ in range(4):
        assert not silence.done()
        await clock.step()
    assert silence.done(), "and silence is its end"


@story
async def test_a_leader_that_was_restarted_leads_again_at_once(scope: Scope) -> None:
    """F15: nobody else has its name, so the one who led is gone."""
    await scope.must(USER, Apply(workload("w")))
    again, before_ms = standby(scope, scope.lead.authority.head.holder), scope.clock.at_ms
    await again.wait_for_silence()
    assert scope.clock.at_ms == before_ms


@story
async def test_one_that_was_deposed_waits_like_the_others__whatever_its_name(scope: Scope) -> None:
    waiting = standby(scope)
    serving = asyncio.create_task(waiting.serve(heartbeat_ms=1_000_000))
    leading = await led_by(waiting)
    again = await Authority.take_over(scope.store, scope="r1", holder="s", clock=scope.clock, ids=CountedIds("t"))
    running = asyncio.create_task(again.run())
    operation = await scope.operation(USER, Apply(workload("w")))
    assert isinstance((await again.submit([operation]))[0], Accepted)
    waiting.clock = clock = SteppedClock()
    with pytest.raises(NotLeader):
        await leading.submit([operation])
    for _ in range(4):
        await clock.step()
        assert waiting.leading is None, "its own name stands in the head, with rows"
    await ended(running)
    await ended(serving)


@story
async def test_one_that_failed_to_take_over_lets_the_others_have_their_turn__and_then_tries_again(scope: Scope) -> None:
    """F09, L8: two terms, however often it failed."""
    waiting, clock = standby(scope), SteppedClock()
    waiting.clock = clock
    failing = iter([True, True, True, False])
    tried: list[int] = []

    async def take_over(beat_ms: int) -> Authority:
        tried.append(clock.at_ms)
        await chain.raise_epoch(scope.store, "s", "unused")
        if next(failing):
            raise Unavailable("the store is gone")
        return await Authority.take_over(scope.store, scope="r1", holder="s", clock=scope.clock, ids=CountedIds("t"))

    began_ms = clock.at_ms
    with mock.patch.object(waiting, "take_over", take_over):
        serving = asyncio.create_task(waiting.serve(heartbeat_ms=1_000_000))
        for _ in range(4 * 7 + 4):  # four looks a term
            await clock.step()
        assert (await led_by(waiting)).head.holder == "s"
    assert [(at_ms - began_ms) // waiting.term_ms for at_ms in tried] == [1, 3, 5, 7]
    await ended(serving)


@story
async def test_one_that_wrote_nothing_when_it_led_waits_like_the_others(scope: Scope) -> None:
    """F15: it may end at every takeover, and nobody else would ever come to lead."""
    leader = (await scope.take_over()).authority
    clock, again = SteppedClock(), standby(scope, leader.head.holder)
    again.clock = clock
    assert leader.head.count == 0
    silence = asyncio.create_task(again.wait_for_silence())
    for _ in range(4):
        assert not silence.done()
        await clock.step()
    assert silence.done()


@story
async def test_a_store_that_cannot_be_read_proves_nothing(scope: Scope) -> None:
    """F09"""
    scope.store.reads.extend(["unavailable"] * 12)
    waiting = asyncio.create_task(standby(scope).wait_for_silence())
    for _ in range(12):
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


@story
async def test_a_standby_leads_after_silence_and_waits_again_when_deposed(scope: Scope) -> None:
    """F15 F16: whichever of the two is wrong about the other, the store lets only one of them write."""
    waiting = standby(scope)
    serving = asyncio.create_task(waiting.serve(heartbeat_ms=1_000_000))
    await led_by(waiting)
    assert waiting.leading is not None and waiting.leading.head.holder == "s"
    await scope.take_over()
    operation = await scope.operation(USER, Apply(workload("w")))
    with pytest.raises(NotLeader):
        await waiting.leading.submit([operation])
    for _ in range(5):
        await asyncio.sleep(0)
    assert not serving.done()
    serving.cancel()
    await asyncio.wait({serving})


@pytest.mark.parametrize("failing", ["commit", "read"])
def test_a_store_that_fails_at_the_takeover_does_not_end_the_standby(failing: str) -> None:
    """F09 F11: nobody would lead any more once the store is back."""

    @story
    async def tell(scope: Scope) -> None:
        waiting = standby(scope)
        await waiting.wait_for_silence()
        if failing == "commit":
            scope.store.plan.append("unavailable")
        else:
            # Four looks at the chain and the one that seizes it; then what the last authority left is read.
            scope.store.reads.extend(["ok"] * 8 + ["unavailable"])
        serving = asyncio.create_task(waiting.serve(heartbeat_ms=1_000_000))
        await led_by(waiting)
        serving.cancel()
        await asyncio.wait({serving})

    tell()


# -- slowness -----------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def slowly(
    store: Store, clock: FakeClock, beat_ms: int = 50
) -> AsyncIterator[tuple[asyncio.Task[Authority], asyncio.Event]]:
    """A takeover by `b` that beats, and reads what there is only when the test says so."""
    inner, read = store.range, asyncio.Event()

    async def slow(*arguments: Any, **more: Any) -> Page:
        if more.get("limit") != 1:  # is there anything?
            await read.wait()
        return await inner(*arguments, **more)

    with mock.patch.object(store, "range", slow):
        work = Authority.take_over(store, scope="r1", holder="b", clock=clock, ids=CountedIds("b"), heartbeat_ms=beat_ms)
        yield asyncio.create_task(work), read


@story
async def test_a_takeover_that_reads_for_longer_than_a_term_beats_meanwhile(scope: Scope) -> None:
    """F16, L8: it has nothing else to show yet; deposed each time, nobody would ever lead."""
    await scope.must(USER, Apply(workload("w")))
    clock, before = BeatingClock(), scope.row("head")
    async with slowly(scope.store, clock) as (taking, read):
        seen = []
        for _ in range(5):
            await clock.beat()
            seen.append(scope.row("head")["sequence"] - before["sequence"])
        assert seen == [2, 3, 4, 5, 6], "the takeover, and a beat each time"
        read.set()
        leading = await taking
    assert leading.head.sequence == scope.row("head")["sequence"]
    assert (leading.head.epoch, leading.head.holder) == (before["epoch"] + 1, "b")
    running = asyncio.create_task(leading.run())
    again = await scope.operation(USER, Apply(workload("v")))
    assert isinstance((await leading.submit([again]))[0], Accepted), "and goes on from there"
    await ended(running)


@pytest.mark.parametrize("word", ["lost", "late", "unavailable"])
def test_a_beat_that_is_not_answered_does_not_end_the_takeover(word: str) -> None:
    """F01 F09: it is settled, or the next one is made."""

    @story
    async def tell(scope: Scope) -> None:
        await scope.must(USER, Apply(workload("w")))
        clock = BeatingClock()
        async with slowly(scope.store, clock) as (taking, read):
            await clock.beat()
            scope.store.plan.append(word)
            await clock.beat()
            await clock.beat()
            read.set()
            leading = await taking
        assert not scope.store.plan, "it was met on the way"
        running = asyncio.create_task(leading.run())
        assert isinstance((await leading.submit([await scope.operation(USER, Apply(workload("v")))]))[0], Accepted)
        await ended(running)

    tell()


@story
async def test_whoever_is_deposed_while_it_reads_leaves_off(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w")))
    clock = BeatingClock()
    async with slowly(scope.store, clock) as (taking, _):
        await clock.beat()
        await chain.raise_epoch(scope.store, "c", "x")
        await clock.beat()
        with pytest.raises(LeadershipLost) as deposed:
            await asyncio.wait_for(taking, 5)
    assert deposed.value.by is not None and deposed.value.by.holder == "c"


@pytest.mark.parametrize("first", [True, False], ids=["new", "restored"])
def test_a_store_that_nobody_ever_led_stays_new__one_that_was_restored_beats(first: bool) -> None:
    """They are told apart by takeovers and by what was decided: a beat in a new store would hide that it is new."""

    @story
    async def tell(scope: Scope) -> None:
        store, clock = MemoryStore() if first else scope.store.inner, BeatingClock()
        if not first:
            await _as_many_epochs_as_batches(store)
        async with slowly(store, clock) as (taking, read):
            await clock.beat()
            before = await _sequence(store)
            for _ in range(3):
                await clock.beat()
            assert await _sequence(store) - before == (0 if first else 3)
            read.set()
            await taking

    tell()


async def _as_many_epochs_as_batches(store: Store) -> None:
    """As after a restore, which counts the epoch up by more than one."""
    place = await chain.read_position(store)
    assert place is not None
    head = chain.advance(place.head, (), ())
    await store.commit(chain.batch(place, msgspec.structs.replace(head, epoch=head.sequence), ()))


async def _sequence(store: Store) -> int:
    place = await chain.read_position(store)
    return 0 if place is None else place.head.sequence


@story
async def test_without_a_beat_nothing_is_written_while_it_reads(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w")))
    clock = BeatingClock()
    async with slowly(scope.store, clock, beat_ms=0) as (taking, read):
        await clock.beat()
        before = scope.row("head")["sequence"]
        await clock.beat()
        assert scope.row("head")["sequence"] == before
        read.set()
        await taking


@story
async def test_a_standby_that_takes_over_beats_as_it_will_when_it_leads(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w")))
    waiting, clock = standby(scope), BeatingClock()
    waiting.clock = clock
    async with slowly(scope.store, clock) as (other, read):
        other.cancel()
        serving = asyncio.create_task(waiting.serve(heartbeat_ms=50))
        await seized(scope)
        before = scope.row("head")["sequence"]
        for _ in range(3):
            await clock.beat()
        assert scope.row("head")["sequence"] - before == 3
        read.set()
        await led_by(waiting)
    await ended(serving)


@story
async def test_one_that_never_comes_to_the_end_of_its_reading_stops_beating(scope: Scope) -> None:
    """L8: somebody else may."""
    await scope.must(USER, Apply(workload("w")))
    clock = BeatingClock()
    async with slowly(scope.store, clock) as (taking, _):
        await clock.beat()
        clock.at_ms += module.LOAD_HEARTBEATS_MS_MAX
        await clock.beat()
        before = scope.row("head")["sequence"]
        for _ in range(3):
            await clock.beat()
        assert scope.row("head")["sequence"] == before
        taking.cancel()
        await asyncio.wait({taking})


@story
async def test_a_history_that_is_compacted_while_it_reads_is_not_missed(scope: Scope) -> None:
    """F06: nothing but its own beats lies between what it began to read and now."""
    await scope.must(USER, Apply(workload("w")))
    clock = BeatingClock()
    async with slowly(scope.store, clock) as (taking, read):
        for _ in range(3):
            await clock.beat()
        await scope.store.inner.compact(await scope.store.inner.revision())
        read.set()
        leading = await taking
    found = [key for key in leading.books.objects if key.startswith("workload/")]
    assert found == [key for key in scope.books.objects if key.startswith("workload/")] != []


@story
async def test_a_read_that_is_lost_is_asked_again(scope: Scope) -> None:
    """F09: a takeover has many of them."""
    await scope.must(USER, Apply(workload("w")))
    scope.store.reads.extend(["ok", "ok", "unavailable", "unavailable", "ok", "unavailable"])
    leading = await Authority.take_over(scope.store, scope="r1", holder="b", clock=scope.clock, ids=CountedIds("b"))
    assert not scope.store.reads
    assert leading.head.holder == "b"


@pytest.mark.parametrize("failing", ["read", "beat"])
def test_whoever_is_cancelled_in_the_moment_of_a_failure_ends(failing: str) -> None:
    """A group of tasks that fails forgets that it was cancelled too; a server would serve on."""

    @story
    async def tell(scope: Scope) -> None:
        await scope.must(USER, Apply(workload("w")))
        waiting, clock, held = standby(scope), BeatingClock(), asyncio.Event()
        inner, read_place, waiting.clock = scope.store.range, chain.read_position, clock

        async def slow(*arguments: Any, **more: Any) -> Page:
            if more.get("limit") == 1:
                return await inner(*arguments, **more)
            if failing == "beat":
                await held.wait()
            if len(tried) == 2:
                await asyncio.sleep(0)
                asyncio.get_running_loop().call_soon(serving.cancel)
            tried.append(1)
            raise Unavailable("gone")

        async def cancelling(store: Any) -> Any:
            if asyncio.current_task() is not serving:
                serving.cancel()
            return await read_place(store)

        tried: list[int] = []
        with mock.patch.object(scope.store, "range", slow):
            serving = asyncio.create_task(waiting.serve(heartbeat_ms=50))
            await seized(scope)
            await clock.beat()
            if failing == "beat":
                await chain.raise_epoch(scope.store, "c", "x")
                with mock.patch.object(chain, "read_position", cancelling):
                    await clock.beat()
            for _ in range(50):
                await asyncio.sleep(0)
            assert serving.done()

    tell()


@story
async def test_what_a_look_at_the_chain_takes_is_added_twice(scope: Scope) -> None:
    """F12: a leader needs as long for a beat; standbys would depose each other because the store is slow."""
    waiting, inner = standby(scope), chain.read_position
    looks: list[int] = []

    async def slow(store: Any) -> Any:
        scope.clock.at_ms += looks.pop(0)
        return await inner(store)

    with mock.patch.object(chain, "read_position", slow):
        for drawn, waited_ms in (
            ([0] * 9, 4 * 25),
            ([60] * 9, 60 + 3 * 85),
            ([200] * 9, 200 + 3 * 225),
            ([0, 60, 0, 0, 0, 0, 60], 85 + 4 * 25),
        ):
            looks[:], began_ms = drawn, scope.clock.at_ms
            await waiting.wait_for_silence()
            assert scope.clock.at_ms - began_ms == waited_ms, "the slowest of those of one term counts"


@story
async def test_one_that_lost_a_race_for_the_lead_waits_no_longer_than_others_once_somebody_has_led(scope: Scope) -> None:
    waiting = standby(scope)
    await scope.take_over()
    with mock.patch.object(waiting, "take_over", mock.AsyncMock(side_effect=LeadershipLost(None))):
        serving = asyncio.create_task(waiting.serve(heartbeat_ms=1_000_000))
        for _ in range(50):
            await asyncio.sleep(0)
        await ended(serving)
    began_ms = scope.clock.at_ms
    await waiting.wait_for_silence()
    assert scope.clock.at_ms - began_ms == 2 * waiting.term_ms, "nobody has led since"
    await scope.must(USER, Apply(workload("w")))
    began_ms = scope.clock.at_ms
    await waiting.wait_for_silence()
    assert scope.clock.at_ms - began_ms == waiting.term_ms


# -- what ends it, and what does not ----------------------------------------------------------------------------------------


@story
async def test_a_standby_that_reads_so_slowly_that_its_history_is_gone_waits_again(scope: Scope) -> None:
    """F16: somebody else has led since, and has compacted; whoever waits to lead must not be lost over that."""
    waiting, inner = standby(scope), scope.store.range
    outcomes: list[type[Exception]] = []

    async def overtaken(*arguments: Any, **more: Any) -> Page:
        if more.get("limit") == 1:
            return await inner(*arguments, **more)
        patch.stop()
        await scope.take_over()
        await scope.must(USER, Apply(workload("w")))
        await scope.store.inner.compact(await scope.store.inner.revision())
        try:
            return await scope.store.range(*arguments, **more)
        except Compacted:
            outcomes.append(Compacted)
            raise

    patch = mock.patch.object(scope.store, "range", overtaken)
    patch.start()
    serving = asyncio.create_task(waiting.serve(heartbeat_ms=1_000_000))
    await led_by(waiting)
    assert outcomes == [Compacted]
    await ended(serving)


@story
async def test_a_standby_ends_with_damage_that_no_waiting_mends_and_says_so(scope: Scope) -> None:
    """Else nobody would learn that nobody can lead."""
    damaged = mock.AsyncMock(side_effect=Corrupt("the head row does not decode; restore a backup"))
    waiting = standby(scope)
    with mock.patch.object(chain, "read_position", damaged):
        with pytest.raises(Corrupt, match="restore a backup"):
            await waiting.serve(heartbeat_ms=1_000_000)
        with pytest.raises(NotLeader, match="restore a backup"):
            await waiting.status()


@story
async def test_a_standby_that_finds_what_it_cannot_read_does_not_depose_others_over_and_over(scope: Scope) -> None:
    """It ends, once."""
    waiting = standby(scope)
    epoch = scope.row("head")["epoch"]
    with (
        mock.patch.object(module, "load", mock.AsyncMock(side_effect=Corrupt("row node/n1 does not decode"))),
        pytest.raises(Corrupt, match="node/n1"),
    ):
        await waiting.serve(heartbeat_ms=1_000_000)
    assert scope.row("head")["epoch"] == epoch + 1
    assert waiting.leading is None


@story
async def test_while_a_standby_leads_it_answers_itself(scope: Scope) -> None:
    waiting = standby(scope)
    serving = asyncio.create_task(waiting.serve(heartbeat_ms=1_000_000))
    await led_by(waiting)
    assert (await waiting.status()).leader == "s"
    await ended(serving)


@story
async def test_a_standby_that_cannot_read_who_leads_turns_away(scope: Scope) -> None:
    """F09: nothing happened, and another may know."""
    scope.store.reads.append("unavailable")
    with pytest.raises(NotLeader) as turned:
        await standby(scope).status()
    assert turned.value.hint == "" and "planned" in turned.value.reason


def test_one_who_has_raised_the_epoch_by_opening_its_store_waits_for_nobody() -> None:
    """The store is its own: no term passes before it leads, and none before it leads again."""

    async def main() -> None:
        store, clock = MemoryStore(), FakeClock()
        place = await chain.raise_epoch(store, "s", "i1")
        waiting = Standby(
            store, scope="r1", name="s", clock=clock, ids=CountedIds("s"), peers={}, term_ms=1_000, position=place
        )
        serving = asyncio.ensure_future(waiting.serve(heartbeat_ms=0))
        leads = await led_by(waiting)
        assert leads.head.epoch == place.head.epoch and clock.at_ms == FakeClock().at_ms
        await ended(serving)

    asyncio.run(main())
