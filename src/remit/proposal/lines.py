"""What stands in one line? Equal work, first come first served, and why it waits. Whose turn it is, is not decided here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from remit.proposal.fairness import Vector

Member = Hashable
"""A replica, by whatever name the caller has for it."""

Cure = Hashable
"""An event that may end a wait: `("quota", "tenant/a")`, `("room",)`, `("node",)`, `("policy",)`, `("grant", name)`, ..."""

_SLACK: Final = 16


class Wait(NamedTuple):
    """Why a line is not tried now, what would end that, and when it is tried all the same.

    Without `cures` it is a backoff: only time ends it. `since` is the version that the attempt had seen, `at_ms` when it ended.
    """

    reason: str
    cures: frozenset[Cure]
    until_ms: int
    at_ms: int
    since: int


class Line:
    """Replicas of one tenant and one priority that ask the same of a node, so that all of them have one fate.

    Three places, and a member is in one of them. `_fresh` is the queue, in order of arrival. Those taken are `_flying`, each
    with its place; places are given in the order in which members are first taken. `_landed` are those that came back: their
    places lie before every fresh one, for nobody is taken before those in front of him.
    """

    __slots__ = (
        *("_flying", "_fresh", "_landed", "_places", "_taken", "_youngest"),
        *("amount", "attempts", "deadline_ms", "failed_ms", "failures", "key", "priority", "serial", "tenant", "told", "wait"),
    )

    def __init__(self, key: Hashable, tenant: str, priority: int, amount: Vector, deadline_ms: int | None = None) -> None:
        self.key, self.tenant, self.priority, self.amount, self.deadline_ms = key, tenant, priority, amount, deadline_ms
        self.serial = 0
        """Given by the backlog: the order in which lines were begun, to break ties."""
        self.wait: Wait | None = None
        self.attempts = 0
        self.failures = self.failed_ms = 0
        """How often it failed since something of it was last placed, or had a reason to wait for long; and when it last did."""
        self.told = ""
        """The last reason that everybody in it was told."""
        self._youngest = [0, 0]
        """Those that arrived together share one of these: when, and how many of them are fresh."""
        self._fresh: OrderedDict[Member, list[int]] = OrderedDict()
        self._flying: dict[Member, tuple[int, int]] = {}
        self._landed: dict[Member, tuple[int, int]] = {}
        self._places: list[tuple[int, Member]] = []
        """A heap of those that landed. One that was removed stays until it comes to the top, which is never stale."""
        self._taken = 0

    def __repr__(self) -> str:
        return f"Line({self.key!r}, {self.tenant}, {self.priority}, {self.standing}: {self.queued}+{self.flying})"

    def __len__(self) -> int:
        """Members, queued and in flight."""
        return len(self._fresh) + len(self._landed) + len(self._flying)

    @property
    def queued(self) -> int:
        return len(self._fresh) + len(self._landed)

    @property
    def flying(self) -> int:
        return len(self._flying)

    @property
    def standing(self) -> str:
        """`active`, `waiting` for a cure, or in `backoff`."""
        return "active" if self.wait is None else "waiting" if self.wait.cures else "backoff"

    def add(self, member: Member, now_ms: int) -> None:
        """At the end. No arrival counts as earlier than one that came before it."""
        together = self._youngest
        if now_ms > together[0]:
            together = self._youngest = [now_ms, 0]
        together[1] += 1
        self._fresh[member] = together

    def head_ms(self) -> int:
        """When the first in the queue arrived. Somebody must be queued."""
        if self._landed:
            return self._landed[self._places[0][1]][1]
        return next(iter(self._fresh.values()))[0]

    def run(self) -> int:
        """How many at the front arrived together, at least. Somebody must be queued."""
        return 1 if self._landed else next(iter(self._fresh.values()))[1]

    def arrived_ms(self, member: Member) -> int:
        fresh = self._fresh.get(member)
        return fresh[0] if fresh is not None else (self._landed.get(member) or self._flying[member])[1]

    def members(self) -> list[Member]:
        """Those queued, first one first."""
        return [*sorted(self._landed, key=lambda member: self._landed[member][0]), *self._fresh]

    def in_flight(self, member: Member) -> bool:
        return member in self._flying

    def pop(self, count: int) -> list[Member]:
        """So many from the front, who must be there; they are in flight then."""
        flying, popped = self._flying, self._pop_landed(count) if self._landed else []
        fresh, place = self._fresh, self._taken
        for _ in range(count - len(popped)):
            member, together = fresh.popitem(last=False)
            together[1] -= 1
            flying[member] = (place, together[0])
            place += 1
            popped.append(member)
        self._taken = place
        return popped

    def _pop_landed(self, count: int) -> list[Member]:
        popped: list[Member] = []
        while len(popped) < count and self._landed:
            member = heappop(self._places)[1]
            self._flying[member] = self._landed.pop(member)
            popped.append(member)
            self._clear_top()
        return popped

    def put_back(self, member: Member) -> None:
        """From flight to its old place."""
        place = self._landed[member] = self._flying.pop(member)
        heappush(self._places, (place[0], member))

    def remove(self, member: Member) -> bool:
        """From wherever it is: was it in flight?"""
        if self._flying.pop(member, None) is not None:
            return True
        together = self._fresh.pop(member, None)
        if together is not None:
            together[1] -= 1
        else:
            del self._landed[member]
            self._clear_top()
        return False

    def _clear_top(self) -> None:
        places, landed = self._places, self._landed
        while places and landed.get(places[0][1], (-1,))[0] != places[0][0]:
            heappop(places)
        if len(places) > 2 * len(landed) + _SLACK:
            places[:] = [(place, member) for member, (place, _) in landed.items()]
            heapify(places)
