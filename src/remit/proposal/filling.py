"""Who is given how much of one round? One turn at a time to whoever has the least. Nobody is charged here: see fairness.py."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace

from remit.proposal.fairness import Parts, Standing
from remit.proposal.lines import Line, Member
from remit.proposal.turns import Order, Ranks

Run = tuple[Line, list[Member]]
"""Members of one line whose turns follow each other."""


class _Hand:
    """What one tenant is given: counted turn by turn, and taken out of the lines in larger pieces, which is cheaper."""

    __slots__ = ("_lanes", "_round", "_start", "left", "line", "parts", "standing")

    def __init__(self, standing: Standing, lanes: list[Order], round_: Round) -> None:
        self.standing = standing
        self._lanes, self._round = lanes, round_
        self.line: Line | None = None
        self.parts: Parts = []
        self.left = self._start = 0

    def draw(self) -> Line | None:
        """The line whose turn it is, with `left` for how many turns at least; None if nobody is queued."""
        self.settle()
        entries = [entry for lane in self._lanes if (entry := lane.first()) is not None]
        if not entries:
            return None
        line = self.line = min(entries)[3]
        self.parts = self.standing.parts(line.amount)
        # Alone, it is next whatever the arrivals of those behind its head.
        alone = len(entries) == 1 and sum(map(len, self._lanes)) == 1
        self.left = self._start = line.queued if alone else line.run()
        return line

    def settle(self) -> None:
        """Take out of the line what was given of it."""
        if self.line is not None and self._start > self.left:
            self._round.draw(self.line, self._start - self.left)
        self.left = self._start = 0


class Round:
    """One taking of turns by progressive filling: the tenant with the least share gets a turn, which counts at once, and so on.

    Each tenant that competes costs once, each turn costs a step of a heap; one tenant alone is given everything in bulk.
    """

    __slots__ = ("_counts", "_drawn", "_lines", "_ranks", "_standing", "_standings", "left")

    def __init__(self, limit: int, ranks: Ranks, standing: Callable[[str], Standing]) -> None:
        self.left = limit
        self._ranks = ranks
        self._standing = standing
        self._standings: dict[str, Standing] = {}
        """Kept for the whole round: what a tenant is given at one priority counts at the next."""
        self._lines: list[Line] = []
        self._counts: list[int] = []
        self._drawn: dict[Line, list[Member]] = {}

    def fill(self, lanes: dict[str, list[Order]]) -> None:
        """Turns among equals, until nobody is queued or the limit is reached. Equal shares go by the tenants' names."""
        hands = [_Hand(self._of(tenant), lanes[tenant], self) for tenant in sorted(lanes)]
        turns = [(hand.standing.share, i, hand) for i, hand in enumerate(hands)]
        heapify(turns)
        lines, counts, limit = self._lines, self._counts, self.left
        last: Line | None = None
        while limit and turns:
            _, i, hand = turns[0]
            line = hand.line if hand.left else hand.draw()
            if line is None:
                heappop(turns)
                continue
            count = 1 if len(turns) > 1 else min(limit, hand.left)
            limit -= count
            hand.left -= count
            heapreplace(turns, (hand.standing.add(hand.parts, count), i, hand))
            if line is last:
                counts[-1] += count
            else:
                lines.append(line)
                counts.append(count)
                last = line
        for hand in hands:
            hand.settle()
        self.left = limit

    def _of(self, tenant: str) -> Standing:
        found = self._standings.get(tenant)
        if found is None:
            found = self._standings[tenant] = self._standing(tenant)
        return found

    def draw(self, line: Line, count: int) -> None:
        """So many of the line are given out; their order is that of the line."""
        self._drawn.setdefault(line, []).extend(line.pop(count))
        if not line.queued:
            self._ranks.drop(line)

    def drawn(self) -> list[Line]:
        """The lines of which something was given out."""
        return list(self._drawn)

    def runs(self) -> list[Run]:
        """What was given out, in the order of the turns."""
        given = dict.fromkeys(self._drawn, 0)
        found = []
        for line, count in zip(self._lines, self._counts, strict=True):
            start = given[line]
            given[line] = end = start + count
            found.append((line, self._drawn[line][start:end]))
        return found
