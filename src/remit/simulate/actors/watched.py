"""How far has a scheduler's view come? Told to whoever checks that observers never go back; the view itself is the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from remit.observation.tables import NONE
from remit.observation.things import KINDS
from remit.observation.view import View
from remit.store.protocol import Head
from remit.world.promises import Clock

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
