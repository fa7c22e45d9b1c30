"""Whom has the authority heard, and what did they say? In its memory alone: a new authority gives every lease a full term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from remit.commitment.books import Books
from remit.commitment.moving import agent_lease
from remit.model.beats import Beat, Heard, NodeHeard, NodeState
from remit.model.claims import Actor, Role
from remit.model.objects import key_of

_AGENT: Final = f"{Role.AGENT}/"


class Hearing:
    """`at_ms` says when each lease was last renewed, on the authority's clock; `states` what nodes last said of themselves:
    of those alone that hold a lease, so there are no more than of these.
    """

    def __init__(self, since_ms: int) -> None:
        self.since_ms = since_ms
        self.at_ms: dict[str, int] = {}
        self._roles: dict[str, None] = {}
        """The leases among them that are not agents': these are few."""
        self._states: dict[str, NodeState] = {}

    def renewed(self, actor: Actor, received_ms: int) -> None:
        lease = actor.lease
        if received_ms >= self.at_ms.get(lease, 0):
            self.at_ms[lease] = received_ms
        if not lease.startswith(_AGENT):
            self._roles[lease] = None

    def took(self, at_ms: Mapping[str, int]) -> None:
        """Leases were taken, or renewed, at these times."""
        for lease in at_ms:
            if not lease.startswith(_AGENT):
                self._roles[lease] = None
        self.at_ms.update(at_ms)

    def silences(self, books: Books, now_ms: int) -> tuple[int, dict[str, int]]:
        """For how long this authority has listened; and of each lease of a role that somebody holds, for how long it was not
        renewed. One of which nothing was heard in all that time is not named.
        """
        held = {lease: books.things.get(key_of("Lease", lease)) for lease in self._roles}
        since = {lease: self.at_ms[lease] for lease, row in held.items() if row is not None and row[0].spec.holder}
        return now_ms - self.since_ms, {lease: now_ms - at_ms for lease, at_ms in since.items()}

    def told(self, beat: Beat) -> None:
        if beat.actor.lease == agent_lease(beat.state.node):
            self._states[beat.state.node] = beat.state

    def heard(self, incarnation: str, now_ms: int) -> Heard:
        """For how long nothing was heard of each node; also of one whose lease has lapsed."""
        nodes = dict[str, NodeHeard]()
        for lease, at_ms in self.at_ms.items():
            role, _, node = lease.partition("/")
            if role == Role.AGENT and node:
                state = self._states.get(node)
                nodes[node] = NodeHeard(max(0, now_ms - at_ms), "" if state is None else state.settled)
        return Heard(incarnation, now_ms - self.since_ms, nodes)

    def states(self, nodes: Sequence[str]) -> list[NodeState]:
        return [self._states[node] for node in nodes or sorted(self._states) if node in self._states]
