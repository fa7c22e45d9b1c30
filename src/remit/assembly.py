"""How is a process put together? Builds each from a world, so that the simulator and the program run the same code."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from remit.commitment.authority import Authority
from remit.store.sqlite import SqliteStore
from remit.world.promises import World


@asynccontextmanager
async def embedded(directory: Path, world: World, *, scope: str = "local", holder: str = "remit") -> AsyncIterator[Authority]:
    """The authority of one scope on a SQLite store in `directory`, owned by this process. The caller runs it."""
    store = await SqliteStore.open(directory, offload=world.offload, holder=holder, incarnation=world.ids.incarnation())
    try:
        authority = await Authority.take_over(
            store, scope=scope, holder=holder, clock=world.clock, ids=world.ids, place=store.place
        )
        settle_memory()
        yield authority
    finally:
        await store.close()


def settle_memory() -> None:
    """Books are large and have no cycles: what was loaded is set aside, and the collector looks for garbage less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
