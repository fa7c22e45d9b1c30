"""Takeover of a new store, distinguished from a restored one."""

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


def test_standby_takes_over_new_store_without_waiting() -> None:
    async def scene() -> int:
        clock = FakeClock()
        standby = Standby(MemoryStore(), scope="r1", name="s", clock=clock, ids=CountedIds("s"), peers={}, term_ms=60_000)
        began_ms = clock.now_ms()
        await standby.wait_for_silence()
        return clock.now_ms() - began_ms

    assert asyncio.run(scene()) == 0


def test_second_authority_does_not_take_new_store_for_restored() -> None:
    async def scene() -> tuple[int, object]:
        store = MemoryStore()
        await chain.raise_epoch(store, "first", "inc")  # deposed before its first write
        authority = await led(store, "second")
        return authority.head.epoch, await store.get(FLOOR)

    assert asyncio.run(scene()) == (2, None)


def test_restored_backup_of_empty_store_does_not_reuse_epochs() -> None:
    async def scene() -> object:
        store = MemoryStore()
        await chain.raise_epoch(store, "first", "inc")
        empty = await store.backup()
        await led(store, "second")  # leases acquired from here on are unknown to the backup
        restored, _ = MemoryStore.restore(empty, incarnation="other", replacing=store)
        await led(restored, "third")
        return await restored.get(FLOOR)

    assert asyncio.run(scene()) is not None


def test_restored_backup_does_not_reuse_epochs() -> None:
    async def scene() -> object:
        store = MemoryStore()
        await led(store, "first")
        backup = await store.backup()
        restored, _ = MemoryStore.restore(backup, incarnation="other", replacing=store)
        await led(restored, "second")
        return await restored.get(FLOOR)

    assert asyncio.run(scene()) is not None
