"""How far has an observer come? Told to whoever checks that observers never go back; views and boards are the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from remit.observation.board import Board
from remit.observation.following import Follower
from remit.observation.tables import NONE
from remit.observation.things import KINDS
from remit.observation.view import View
from remit.store.protocol import Head, Store
from remit.world.promises import Clock, World

SEEN: Final = ("replica/", *(f"{kind}/" for kind in KINDS))


class Watched(View):
    def __init__(self, clock: Clock, observed: Callable[[str, int], None]) -> None:
        super().__init__(clock)
        self._observed = observed

    def reached(self, head: Head, revision: int) -> None:
        super().reached(head, revision)
        self._observed(head.incarnation, revision)

    def revisions(self) -> dict[str, int]:
        """The revision of each row that it keeps, by key."""
        kept, shapes = self.replicas, self.shapes
        found = {key: kept.at.revision[slot] for key, slot in kept.slots.items()}
        found |= self.things.revisions
        for path, owner in shapes.workloads.ids.items():
            if shapes.workloads.at.state[owner] != NONE:
                found[f"workload/{path}"] = shapes.workloads.at.revision[owner]
        for generation in shapes.ids.values():
            seen = shapes.seen(generation)
            found[f"generation/{seen.tenant}/{seen.workload}/{seen.number:08d}"] = shapes.at.revision[generation]
        return found


Concern = Callable[[str, Any, Any], bool]
"""Does this change of a key, from what it was to what it is, concern one?"""


class WatchedBoard(Board):
    """With its own follower, for whoever plays a part."""

    def __init__(
        self, store: Store, sure: Store, world: World, observed: Callable[[str, int], None], *, idle_ms: int = 10_000
    ) -> None:
        super().__init__(world.clock)
        self._observed = observed
        self._follower = Follower(store, sure, world, self, idle_ms=idle_ms)

    async def follow(self) -> None:
        await self._follower.follow()

    def reached(self, head: Head, revision: int) -> None:
        self._observed(head.incarnation, revision)
        super().reached(head, revision)


class Changes:
    """What changed since its owner last looked, of all that concerns it; or on one node, whatever it is."""

    def __init__(self, board: Board, concerns: Concern, node: str = "") -> None:
        self.keys: dict[str, None] = dict.fromkeys(board.rows)
        self._board, self._concerns, self._all = board, concerns, bool(node)
        self._event = asyncio.Event()
        self._told = False
        board.subscribe(self, node)

    def changed(self, key: str, old: Any, new: Any) -> None:
        if self._all or self._concerns(key, old, new):
            self.keys[key] = None
            self._told = True

    def remind(self) -> None:
        """At the next word from the scope."""
        self._told = True
        self._board.remind(self)

    def reached(self) -> None:
        if self._told:
            self._told = False
            self.wake()

    def wake(self) -> None:
        if self.keys:
            self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def take(self) -> list[str]:
        self._event.clear()
        keys, self.keys = self.keys, {}
        return list(keys)
