"""Whose turn is it to be started? So many at once, the rest in the order in which they came; what a turn is used for: agent.py.

A machine that is asked for thousands of starts at once does none of them well. Nobody holds a turn while it waits: whoever is
called is looked at anew, since by then it may not be wanted any more. Only starts wait here: ends and fences never do.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from remit.agent.copies import Copy
from remit.world.promises import Order

AT_ONCE: Final = 32
"""A starter makes one process at a time; the others of these are being written down, or told."""

SANDBOX_MS: Final = 400
"""A sandbox is begun before it is made, and making it is most of the work of a start, of which nobody hears the end. So its
turn lasts for so long: 80 a second, after the first few.
"""

SHOWN_MAX: Final = 50
"""Of so many a node that wait it is told with each beat."""

WAITS: Final = "waiting for its turn: others are being started on its machine"


def held_ms(order: Order) -> int:
    """For how long after its beginning it keeps its turn."""
    return SANDBOX_MS if order.sandbox == "bwrap" else 0


class Lineup:
    """Of one keeper, on all its nodes."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._beginning: dict[Copy, None] = {}
        self._called: dict[Copy, None] = {}
        self._line: dict[Copy, str] = {}
        """On which nodes those are who wait, the first first."""

    def may_begin(self, copy: Copy, node: str) -> bool:
        """Is it its turn, or under way? If not, it waits from now on."""
        if copy in self._beginning or copy in self._called or (not self._line and self._room > 0):
            return True
        self._line.setdefault(copy, node)
        return False

    def begins(self, copy: Copy) -> None:
        self._called.pop(copy, None)
        self._line.pop(copy, None)
        self._beginning[copy] = None

    def over(self, copy: Copy) -> None:
        """It was begun, or was not."""
        self._beginning.pop(copy, None)

    def call(self) -> list[tuple[str, Copy]]:
        """Whose turn it is now, on which nodes. Whoever was called before and has not begun since has let its turn pass."""
        self._called.clear()
        called = [(node, copy) for copy, node in islice(self._line.items(), max(0, self._room))]
        for _, copy in called:
            del self._line[copy]
            self._called[copy] = None
        return called

    def waiting(self) -> dict[str, list[Copy]]:
        """By node, the first few of those who wait."""
        found: dict[str, list[Copy]] = {}
        for copy, node in self._line.items():
            there = found.setdefault(node, [])
            if len(there) < SHOWN_MAX:
                there.append(copy)
        return found

    @property
    def _room(self) -> int:
        return self._at_once - len(self._beginning) - len(self._called)
