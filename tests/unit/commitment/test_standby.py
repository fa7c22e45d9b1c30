"""Standby authority: takes over after silence of the leader, judged by the store alone."""

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
from tests.properties.authority_world import USER, CountedIds, FakeClock, Scope, scope_test, workload


def standby(scope: Scope, name: str = "s") -> Standby:
    leader = scope.lead.authority
    peers = {leader.head.holder: leader}
    return Standby(scope.store, scope="r1", name=name, clock=scope.clock, ids=CountedIds("s"), peers=peers, term_ms=100)


async def wait_until_leading(waiting: Standby, after: Authority | None = None) -> Authority:
    """Wait until the standby leads with another authority than `after`, and return that authority."""
    for _ in range(10_000):
        if waiting.leading is not None and waiting.leading is not after:
            return waiting.leading
        await asyncio.sleep(0)
    raise AssertionError("the standby never led")


async def wait_until_seized(scope: Scope) -> None:
    for _ in range(1_000):
        if scope.row("head")["holder"] == "s":
            return
        await asyncio.sleep(0)
    raise AssertionError("the standby never took over")


async def stop_task(serving: asyncio.Task[None]) -> None:
    serving.cancel()
    await asyncio.wait({serving})


@scope_test
async def test_standby_forwards_calls_to_leader(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    answers = await standby(scope).submit([operation])
    assert isinstance(answers[0], Accepted)
    assert await standby(scope).renew(scope.actors["scheduler"])
    scope.clock.at_ms += 7
    status = await standby(scope).status()
    assert (status.leader, status.boot, status.now_ms) == ("a1", "boot-1", scope.clock.at_ms)


@scope_test
async def test_standby_without_connection_refers_to_leader_by_name(scope: Scope) -> None:
    waiting = standby(scope)
    await scope.take_over()
    with pytest.raises(NotLeader) as refused:
        await waiting.status()
    assert refused.value.hint == "a2"


class SteppedClock(FakeClock):
    """A sleep ends when the test steps."""

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


class HeartbeatClock(FakeClock):
    """A timeout ends when the test triggers the heartbeat."""

    def __init__(self) -> None:
        super().__init__()
        self._due = asyncio.Event()

    async def trigger_heartbeat(self) -> None:
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


@scope_test
async def test_advancing_chain_counts_as_live_leader(scope: Scope) -> None:
    """F16: four checks a term; one advance in that time is enough."""
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
    assert silence.done(), "the term ends in silence"


@scope_test
async def test_restarted_leader_leads_again_at_once(scope: Scope) -> None:
    """F15: names are unique, so the former process of this name is gone."""
    await scope.must(USER, Apply(workload("w")))
    again, before_ms = standby(scope, scope.lead.authority.head.holder), scope.clock.at_ms
    await again.wait_for_silence()
    assert scope.clock.at_ms == before_ms


@scope_test
async def test_deposed_standby_waits_a_term_despite_own_name(scope: Scope) -> None:
    waiting = standby(scope)
    serving = asyncio.create_task(waiting.serve(heartbeat_ms=1_000_000))
    leading = await wait_until_leading(waiting)
    again = await Authority.take_over(scope.store, scope="r1", holder="s", clock=scope.clock, ids=CountedIds("t"))
    running = asyncio.create_task(again.run())
    operation = await scope.operation(USER, Apply(workload("w")))
    assert isinstance((await again.submit([operation]))[0], Accepted)
    waiting.clock = clock = SteppedClock()
    with pytest.raises(NotLeader):
        await leading.submit([operation])
    for _ in range(4):
        await clock.step()
        assert waiting.leading is None, "the head has its own name, but with rows of another process"
    await stop_task(running)
    await stop_task(serving)


@scope_test
async def test_failed_takeovers_are_two_terms_apart(scope: Scope) -> None:
    """F09, L8: the other standbys get a term in between, however often it fails."""
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
        for _ in range(4 * 7 + 4):  # four checks a term
            await clock.step()
        assert (await wait_until_leading(waiting)).head.holder == "s"
    assert [(at_ms - began_ms) // waiting.term_ms for at_ms in tried] == [1, 3, 5, 7]
    await stop_task(serving)


@scope_test
async def test_leader_that_wrote_nothing_waits_a_term(scope: Scope) -> None:
    """F15: it may crash at every takeover and would keep the others from leading."""
    leader = (await scope.take_over()).authority
    clock, again = SteppedClock(), standby(scope, leader.head.holder)
    again.clock = clock
    assert leader.head.count == 0
    silence = asyncio.create_task(again.wait_for_silence())
    for _ in range(4):
        assert not silence.done()
        await clock.step()
    assert silence.done()


@scope_test
async def test_unreadable_store_is_not_silence(scope: Scope) -> None:
    """F09"""
    scope.store.reads.extend(["unavailable"] * 12)
    waiting = asyncio.create_task(standby(scope).wait_for_silence())
    for _ in range(12):
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


@scope_test
async def test_standby_leads_after_silence_and_waits_when_deposed(scope: Scope) -> None:
    """F15 F16: whichever is mistaken about the other, the store lets only one of them write."""
    waiting = standby(scope)
    serving = asyncio.create_task(waiting.serve(heartbeat_ms=1_000_000))
    await wait_until_leading(waiting)
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
def test_store_failure_during_takeover_does_not_stop_standby(failing: str) -> None:
    """F09 F11: otherwise no authority would lead once the store is back."""

    @scope_test
    async def run_test(scope: Scope) -> None:
        waiting = standby(scope)
        await waiting.wait_for_silence()
        if failing == "commit":
            scope.store.plan.append("unavailable")
        else:
            # Four checks of the chain and the read that seizes it; then the rows of the last authority are read.
            scope.store.reads.extend(["ok"] * 8 + ["unavailable"])
        serving = asyncio.create_task(waiting.serve(heartbeat_ms=1_000_000))
        leading = await wait_until_leading(waiting)
        assert leading.head.holder == "s" and not serving.done()
        serving.cancel()
        await asyncio.wait({serving})

    run_test()


# -- slow reads ---------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def slow_takeover(
    store: Store, clock: FakeClock, beat_ms: int = 50
) -> AsyncIterator[tuple[asyncio.Task[Authority], asyncio.Event]]:
    """A takeover by `b` with heartbeats, which reads the rows only once the test sets the event."""
    inner, read = store.range, asyncio.Event()

    async def slow(*arguments: Any, **more: Any) -> Page:
        if more.get("limit") != 1:  # a limit of 1 only tests for emptiness
            await read.wait()
        return await inner(*arguments, **more)

    with mock.patch.object(store, "range", slow):
        work = Authority.take_over(store, scope="r1", holder="b", clock=clock, ids=CountedIds("b"), heartbeat_ms=beat_ms)
        yield asyncio.create_task(work), read


@scope_test
async def test_takeover_with_long_read_writes_heartbeats(scope: Scope) -> None:
    """F16, L8: without them it would be deposed each time, and no authority would ever lead."""
    await scope.must(USER, Apply(workload("w")))
    clock, before = HeartbeatClock(), scope.row("head")
    async with slow_takeover(scope.store, clock) as (taking, read):
        seen = []
        for _ in range(5):
            await clock.trigger_heartbeat()
            seen.append(scope.row("head")["sequence"] - before["sequence"])
        assert seen == [2, 3, 4, 5, 6], "the takeover, and then one heartbeat each"
        read.set()
        leading = await taking
    assert leading.head.sequence == scope.row("head")["sequence"]
    assert (leading.head.epoch, leading.head.holder) == (before["epoch"] + 1, "b")
    running = asyncio.create_task(leading.run())
    again = await scope.operation(USER, Apply(workload("v")))
    assert isinstance((await leading.submit([again]))[0], Accepted), "continues from the last heartbeat"
    await stop_task(running)


@pytest.mark.parametrize("word", ["lost", "late", "unavailable"])
def test_unanswered_heartbeat_does_not_end_takeover(word: str) -> None:
    """F01 F09: it is settled, or the next one is written."""

    @scope_test
    async def run_test(scope: Scope) -> None:
        await scope.must(USER, Apply(workload("w")))
        clock = HeartbeatClock()
        async with slow_takeover(scope.store, clock) as (taking, read):
            await clock.trigger_heartbeat()
            scope.store.plan.append(word)
            await clock.trigger_heartbeat()
            await clock.trigger_heartbeat()
            read.set()
            leading = await taking
        assert not scope.store.plan, "the fault occurred"
        running = asyncio.create_task(leading.run())
        assert isinstance((await leading.submit([await scope.operation(USER, Apply(workload("v")))]))[0], Accepted)
        await stop_task(running)

    run_test()


@scope_test
async def test_takeover_deposed_while_reading_stops(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w")))
    clock = HeartbeatClock()
    async with slow_takeover(scope.store, clock) as (taking, _):
        await clock.trigger_heartbeat()
        await chain.raise_epoch(scope.store, "c", "x")
        await clock.trigger_heartbeat()
        with pytest.raises(LeadershipLost) as deposed:
            await asyncio.wait_for(taking, 5)
    assert deposed.value.by is not None and deposed.value.by.holder == "c"


@pytest.mark.parametrize("first", [True, False], ids=["new", "restored"])
def test_takeover_heartbeats_in_restored_store_but_not_in_new_one(first: bool) -> None:
    """They are distinguished by takeovers and decisions: a heartbeat in a new store would make it look restored."""

    @scope_test
    async def run_test(scope: Scope) -> None:
        store, clock = MemoryStore() if first else scope.store.inner, HeartbeatClock()
        if not first:
            await _raise_epoch_to_sequence(store)
        async with slow_takeover(store, clock) as (taking, read):
            await clock.trigger_heartbeat()
            before = await _sequence(store)
            for _ in range(3):
                await clock.trigger_heartbeat()
            assert await _sequence(store) - before == (0 if first else 3)
            read.set()
            await taking

    run_test()


async def _raise_epoch_to_sequence(store: Store) -> None:
    """A restore raises the epoch by more than one."""
    place = await chain.read_position(store)
    assert place is not None
    head = chain.advance(place.head, (), ())
    await store.commit(chain.batch(place, msgspec.structs.replace(head, epoch=head.sequence), ()))


async def _sequence(store: Store) -> int:
    place = await chain.read_position(store)
    return 0 if place is None else place.head.sequence


@scope_test
async def test_takeover_without_heartbeats_writes_nothing_while_reading(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w")))
    clock = HeartbeatClock()
    async with slow_takeover(scope.store, clock, beat_ms=0) as (taking, read):
        await clock.trigger_heartbeat()
        before = scope.row("head")["sequence"]
        await clock.trigger_heartbeat()
        assert scope.row("head")["sequence"] == before
        read.set()
        await taking


@scope_test
async def test_standby_writes_heartbeats_during_takeover(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w")))
    waiting, clock = standby(scope), HeartbeatClock()
    waiting.clock = clock
    async with slow_takeover(scope.store, clock) as (other, read):
        other.cancel()
        serving = asyncio.create_task(waiting.serve(heartbeat_ms=50))
        await wait_until_seized(scope)
        before = scope.row("head")["sequence"]
        for _ in range(3):
            await clock.trigger_heartbeat()
        assert scope.row("head")["sequence"] - before == 3
        read.set()
        await wait_until_leading(waiting)
    await stop_task(serving)


@scope_test
async def test_takeover_that_never_finishes_reading_stops_heartbeats(scope: Scope) -> None:
    """L8: so that another standby may take over."""
    await scope.must(USER, Apply(workload("w")))
    clock = HeartbeatClock()
    async with slow_takeover(scope.store, clock) as (taking, _):
        await clock.trigger_heartbeat()
        clock.at_ms += module.LOAD_HEARTBEATS_MS_MAX
        await clock.trigger_heartbeat()
        before = scope.row("head")["sequence"]
        for _ in range(3):
            await clock.trigger_heartbeat()
        assert scope.row("head")["sequence"] == before
        taking.cancel()
        await asyncio.wait({taking})


@scope_test
async def test_compaction_during_takeover_read_loses_nothing(scope: Scope) -> None:
    """F06: only its own heartbeats lie between the start of the read and now."""
    await scope.must(USER, Apply(workload("w")))
    clock = HeartbeatClock()
    async with slow_takeover(scope.store, clock) as (taking, read):
        for _ in range(3):
            await clock.trigger_heartbeat()
        await scope.store.inner.compact(await scope.store.inner.revision())
        read.set()
        leading = await taking
    found = [key for key in leading.books.objects if key.startswith("workload/")]
    assert found == [key for key in scope.books.objects if key.startswith("workload/")] != []


@scope_test
async def test_failed_read_during_takeover_is_retried(scope: Scope) -> None:
    """F09: a takeover makes many reads."""
    await scope.must(USER, Apply(workload("w")))
    scope.store.reads.extend(["ok", "ok", "unavailable", "unavailable", "ok", "unavailable"])
    leading = await Authority.take_over(scope.store, scope="r1", holder="b", clock=scope.clock, ids=CountedIds("b"))
    assert not scope.store.reads
    assert leading.head.holder == "b"


@pytest.mark.parametrize("failing", ["read", "trigger_heartbeat"])
def test_standby_cancelled_during_failure_ends(failing: str) -> None:
    """A failing task group may swallow the cancellation, and the standby would serve on."""

    @scope_test
    async def run_test(scope: Scope) -> None:
        await scope.must(USER, Apply(workload("w")))
        waiting, clock, held = standby(scope), HeartbeatClock(), asyncio.Event()
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
            await wait_until_seized(scope)
            await clock.trigger_heartbeat()
            if failing == "beat":
                await chain.raise_epoch(scope.store, "c", "x")
                with mock.patch.object(chain, "read_position", cancelling):
                    await clock.trigger_heartbeat()
            for _ in range(50):
                await asyncio.sleep(0)
            assert serving.done()

    run_test()


@scope_test
async def test_duration_of_chain_check_extends_wait_twice(scope: Scope) -> None:
    """F12: a leader needs as long for a heartbeat; on a slow store standbys would depose each other."""
    waiting, inner = standby(scope), chain.read_position
    check_ms: list[int] = []

    async def slow(store: Any) -> Any:
        scope.clock.at_ms += check_ms.pop(0)
        return await inner(store)

    with mock.patch.object(chain, "read_position", slow):
        for drawn, waited_ms in (
            ([0] * 9, 4 * 25),
            ([60] * 9, 60 + 3 * 85),
            ([200] * 9, 200 + 3 * 225),
            ([0, 60, 0, 0, 0, 0, 60], 85 + 4 * 25),
        ):
            check_ms[:], began_ms = drawn, scope.clock.at_ms
            await waiting.wait_for_silence()
            assert scope.clock.at_ms - began_ms == waited_ms, "the slowest check of a term counts"


@scope_test
async def test_lost_race_doubles_wait_until_another_leads(scope: Scope) -> None:
    waiting = standby(scope)
    await scope.take_over()
    with mock.patch.object(waiting, "take_over", mock.AsyncMock(side_effect=LeadershipLost(None))):
        serving = asyncio.create_task(waiting.serve(heartbeat_ms=1_000_000))
        for _ in range(50):
            await asyncio.sleep(0)
        await stop_task(serving)
    began_ms = scope.clock.at_ms
    await waiting.wait_for_silence()
    assert scope.clock.at_ms - began_ms == 2 * waiting.term_ms, "no authority has led since"
    await scope.must(USER, Apply(workload("w")))
    began_ms = scope.clock.at_ms
    await waiting.wait_for_silence()
    assert scope.clock.at_ms - began_ms == waiting.term_ms


# -- fatal and transient errors ---------------------------------------------------------------------------------------------


@scope_test
async def test_standby_overtaken_by_compaction_waits_again(scope: Scope) -> None:
    """F16: another authority has led since, and compacted; this must not end the standby."""
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
    await wait_until_leading(waiting)
    assert outcomes == [Compacted]
    await stop_task(serving)


@scope_test
async def test_corrupt_head_ends_standby_with_cure(scope: Scope) -> None:
    """Otherwise the operator would not learn that no authority can lead."""
    damaged = mock.AsyncMock(side_effect=Corrupt("the head row does not decode; restore a backup"))
    waiting = standby(scope)
    with mock.patch.object(chain, "read_position", damaged):
        with pytest.raises(Corrupt, match="restore a backup"):
            await waiting.serve(heartbeat_ms=1_000_000)
        with pytest.raises(NotLeader, match="restore a backup"):
            await waiting.status()


@scope_test
async def test_corrupt_row_ends_standby_after_one_takeover(scope: Scope) -> None:
    """It must not depose others again and again."""
    waiting = standby(scope)
    epoch = scope.row("head")["epoch"]
    with (
        mock.patch.object(module, "load", mock.AsyncMock(side_effect=Corrupt("row node/n1 does not decode"))),
        pytest.raises(Corrupt, match="node/n1"),
    ):
        await waiting.serve(heartbeat_ms=1_000_000)
    assert scope.row("head")["epoch"] == epoch + 1
    assert waiting.leading is None


@scope_test
async def test_leading_standby_answers_itself(scope: Scope) -> None:
    waiting = standby(scope)
    serving = asyncio.create_task(waiting.serve(heartbeat_ms=1_000_000))
    await wait_until_leading(waiting)
    assert (await waiting.status()).leader == "s"
    await stop_task(serving)


@scope_test
async def test_standby_that_cannot_read_leader_refuses_without_hint(scope: Scope) -> None:
    """F09: nothing was applied, and another server may know the leader."""
    scope.store.reads.append("unavailable")
    with pytest.raises(NotLeader) as refused:
        await standby(scope).status()
    assert refused.value.hint == "" and "planned" in refused.value.reason


def test_standby_that_opened_store_leads_without_waiting() -> None:
    """The store is its own: it waits no term."""

    async def main() -> None:
        store, clock = MemoryStore(), FakeClock()
        place = await chain.raise_epoch(store, "s", "i1")
        waiting = Standby(
            store, scope="r1", name="s", clock=clock, ids=CountedIds("s"), peers={}, term_ms=1_000, position=place
        )
        serving = asyncio.ensure_future(waiting.serve(heartbeat_ms=0))
        leads = await wait_until_leading(waiting)
        assert leads.head.epoch == place.head.epoch and clock.at_ms == FakeClock().at_ms
        await stop_task(serving)

    asyncio.run(main())
