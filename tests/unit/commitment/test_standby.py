"""Does a standby lead when the leader is silent, and only then? It trusts the store alone, and never gives up."""

from __future__ import annotations

import asyncio

import pytest

from remit.client.link import Turned
from remit.commitment.standby import Standby
from remit.model.claims import Accepted, Apply
from tests.properties.machines import USER, CountedIds, FakeClock, Scope, story, workload


def standby(scope: Scope, name: str = "s") -> Standby:
    leader = scope.lead.authority
    peers = {leader.head.holder: leader}
    return Standby(scope.store, scope="r1", name=name, clock=scope.clock, ids=CountedIds("s"), peers=peers, term_ms=100)


async def led_by(waiting: Standby) -> None:
    for _ in range(1_000):
        if waiting.leading is not None:
            return
        await asyncio.sleep(0)
    raise AssertionError("it never led")


@story
async def test_a_standby_passes_everything_on_to_whoever_leads(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    answers = await standby(scope).ask([operation])
    assert isinstance(answers[0], Accepted)
    assert await standby(scope).renew(scope.actors["scheduler"])
    assert (await standby(scope).status()).leader == "a1"


@story
async def test_a_standby_that_cannot_find_the_leader_turns_away_with_its_name(scope: Scope) -> None:
    waiting = standby(scope)
    await scope.take_over()
    with pytest.raises(Turned) as turned:
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
    serving = asyncio.create_task(waiting.serve(beat_ms=1_000_000))
    await led_by(waiting)
    assert waiting.leading is not None and waiting.leading.head.holder == "s"
    await scope.take_over()
    operation = await scope.operation(USER, Apply(workload("w")))
    with pytest.raises(Turned):
        await waiting.leading.ask([operation])
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
        serving = asyncio.create_task(waiting.serve(beat_ms=1_000_000))
        await led_by(waiting)
        serving.cancel()
        await asyncio.wait({serving})

    tell()
