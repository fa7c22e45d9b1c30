"""What if a scope's store is a file, and the power goes in the middle of a write? The real SQLite store on a disk that tears.

The same service as in stores.py, over a `SqliteStore` in a directory of its own. A power cut falls inside any write, force or
truncation; what had not been forced is found by lot (torn.py). Then the store is opened anew. What it finds that nobody was
told of was written all the same, so the witness hears of it before anybody else does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from remit.simulate.loop import SimLoop
from remit.simulate.network import Network
from remit.simulate.offloads import SimOffload
from remit.simulate.stores import Sent, StoreService, T, Witness, Work
from remit.simulate.torn import TornDisk
from remit.store import chain
from remit.store.protocol import HEAD, Commit, Committed, Conflict, Event, StoreError
from remit.store.sqlite import SqliteStore
from remit.world.chance import SeededChance

CALLS_MAX: Final = 12
"""How many calls of the file system after a fault was injected the power may go: about one group of commits."""

_NEVER: Final = 1 << 60


class DurableService(StoreService):
    """Open it with `begin`, and let its directory go with `end`."""

    def __init__(self, loop: SimLoop, network: Network, scope: str, seed: str, witness: Witness) -> None:
        super().__init__(loop, network, scope, seed, witness)
        self._place = tempfile.TemporaryDirectory(prefix="remit-torn-")
        self._disk = TornDisk(Path(self._place.name) / "store")
        self._disk.__enter__()
        self._chance = SeededChance(f"{seed}/{self.name}/torn")
        self._seen = 0
        self._cuts = 0
        self._senders: dict[bytes, Sent] = {}
        self._closed = self.worsen({"away": True})

    def begin(self) -> None:
        """Open the store, in a new life of its process."""
        self.unit = self.loop.unit(self.name)
        self.loop.spawn(self._open(), name="open the store", unit=self.unit)

    def end(self) -> None:
        self._disk.__exit__(None, None, None)
        self._place.cleanup()

    async def _open(self) -> None:
        unit = self.unit
        offload = SimOffload(lambda: 1 + self.lots.randrange(4), lambda: not unit.dead)
        store = await SqliteStore.open(self._disk.directory, offload=offload, holder=self.name, incarnation="durable")
        watch = await store.watch("", after=self._seen)
        while self._seen < store.place.revision:  # opening raises the epoch
            self._found(await anext(aiter(watch)))
        await watch.close()
        self.store = store
        self._closed()

    def _found(self, event: Event) -> None:
        """One transaction, as it stands in the store; its sender is known by the head that it wrote."""
        puts = [(change.key, change.value) for change in event.changes if change.value is not None]
        deletes = [change.key for change in event.changes if change.value is None]
        head = b"" if event.head is None else chain.encode_head(event.head)
        self._seen = event.revision
        self.applied(Commit(puts=(*puts, (HEAD, head)), deletes=deletes), event.revision, self._senders.pop(head, None))

    def perform(self, work: Work[T], done: Callable[[T], None], failed: Callable[[StoreError], None]) -> None:
        async def performed() -> None:
            try:
                result = await work()
            except StoreError as error:
                failed(error)
                return
            done(result)

        self.loop.spawn(performed(), name="serve", unit=self.unit)

    async def apply(self, commit: Commit, sent: Sent) -> Committed | Conflict:
        self.check(writing=True)
        head = next((value for key, value in commit.puts if key == HEAD), b"")
        self._senders[head] = sent
        answer = await self.store.commit(commit)
        if isinstance(answer, Committed):
            self._seen = answer.revision
            self.applied(commit, answer.revision, self._senders.pop(head, None))
        else:
            self._senders.pop(head, None)
        return answer

    # -- what a fault does -----------------------------------------------------------------------------------------------

    def cut_power(self, calls: int) -> Callable[[], None]:
        """In the middle of the file system's `calls`-th call from now. Answers how to call it off, if it has not come."""
        self._cuts += 1
        self._disk.cut_after(calls, self._die)
        return lambda: self._disk.cut_after(_NEVER)

    def _die(self) -> None:
        """Its process is dead from here on; what is left of its files is looked at once the call is over."""
        self.loop.kill(self.unit)
        self._closed()  # it may have gone while it was being opened
        self._closed = self.worsen({"away": True})
        self.break_watches()
        self.loop.call_soon(self._lose, context=self.loop.root.context)

    def _lose(self) -> None:
        self._disk.crash(self._chance.stream(f"crash {self._cuts}"))
        self.loop.call_later(0.5 + 2 * self.lots.random(), self.begin, context=self.loop.root.context)
