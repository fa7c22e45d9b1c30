"""Is a store that nobody has led taken up at once, and told apart from one that was restored? Takeovers alone leave no past."""

from __future__ import annotations

import asyncio

from remit.commitment.authority import Authority
from remit.commitment.rulings.leases import LEASE_EPOCH_RECORD
from remit.commitment.standby import Standby
from remit.model.objects import key_of
from remit.store import chain
from remit.store.memory import MemoryStore
from tests.properties.authority_world import CountedIds, FakeClock

FLOOR = key_of("Lease", LEASE_EPOCH_RECORD)


async def led(store: MemoryStore, holder: str) -> Authority:
    return await Authority.take_over(store, scope="r1", holder=holder, clock=FakeClock(), ids=CountedIds(holder))


def test_where_nobody_has_ever_led_a_standby_waits_for_nobody() -> None:
    async def scene() -> int:
        clock = FakeClock()
        standby = Standby(MemoryStore(), scope="r1", name="s", clock=clock, ids=CountedIds("s"), peers={}, term_ms=60_000)
        began_ms = clock.now_ms()
        await standby.wait_for_silence()
        return clock.now_ms() - began_ms

    assert asyncio.run(scene()) == 0


def test_two_who_race_for_a_new_store__the_second_does_not_take_it_for_a_restored_one() -> None:
    async def scene() -> tuple[int, object]:
        store = MemoryStore()
        await chain.raise_epoch(store, "first", "inc")  # it is deposed before it has written anything
        authority = await led(store, "second")
        return authority.head.epoch, await store.get(FLOOR)

    assert asyncio.run(scene()) == (2, None)


def test_a_backup_of_an_empty_store_is_restored__epochs_of_before_do_not_come_again() -> None:
    async def scene() -> object:
        store = MemoryStore()
        await chain.raise_epoch(store, "first", "inc")
        empty = await store.backup()
        await led(store, "second")  # leases are taken from here on, which the backup knows nothing of
        restored, _ = MemoryStore.restore(empty, incarnation="other", replacing=store)
        await led(restored, "third")
        return await restored.get(FLOOR)

    assert asyncio.run(scene()) is not None


def test_a_store_that_has_decided_something_is_restored__epochs_of_before_do_not_come_again() -> None:
    async def scene() -> object:
        store = MemoryStore()
        await led(store, "first")
        backup = await store.backup()
        restored, _ = MemoryStore.restore(backup, incarnation="other", replacing=store)
        await led(restored, "second")
        return await restored.get(FLOOR)

    assert asyncio.run(scene()) is not None
