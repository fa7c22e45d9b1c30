"""Replicas assigned to this agent's nodes, with the age of that knowledge, and the start queue.

The rows of its nodes as they were last told, and how old that is; no opinions.

So many at once, the rest in the order in which they came; what a turn is used for: agent.py.

A machine that is asked for thousands of starts at once does none of them well. Nobody holds a turn while it waits: whoever is
called is looked at anew, since by then it may not be wanted any more. Only starts wait here: ends and fences never do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from remit.agent.attempts import Copy
from remit.model.kinds import Node
from remit.model.records import Generation, GenerationSpec, Replica
from remit.model.wire.agent_messages import Orders
from remit.world.interfaces import Clock, Order


class Ordered(NamedTuple):
    replica: Replica
    revision: int


class Assigned:
    """Replicas of this agent's nodes by key, the generations they are of, and the nodes' own rows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.incarnation = ""
        self.revision = 0
        self._seen_ms = 0
        self._nodes: dict[str, tuple[Node, int]] = {}
        self._replicas: dict[str, Ordered] = {}
        self._by_node: dict[str, dict[str, None]] = {}
        self._generations: dict[str, GenerationSpec] = {}

    @property
    def known(self) -> bool:
        """Until they were told nothing is known: not that there is no order for what runs here."""
        return bool(self.incarnation)

    def age_ms(self) -> int:
        return max(0, self._clock.now_ms() - self._seen_ms)

    def node(self, name: str) -> tuple[Node, int] | None:
        return self._nodes.get(name)

    def get(self, key: str) -> Ordered | None:
        return self._replicas.get(key)

    def on(self, node: str, keys: Collection[str] | None = None) -> Iterator[tuple[str, Ordered]]:
        """All of a node, or those of `keys` that are there."""
        here = self._by_node.get(node, {})
        return ((key, self._replicas[key]) for key in (tuple(here) if keys is None else keys) if key in here)

    def spec_of(self, replica: Replica) -> GenerationSpec | None:
        meta, spec = replica.metadata, replica.spec
        return self._generations.get(generation_name(meta.tenant, spec.workload, spec.generation))

    def take(self, told: Orders) -> dict[str, str]:
        """What was told. Answers of which replicas that was news, and on which nodes they are, or were."""
        gone = tuple(self._replicas.keys() - {row.key for row in told.replicas}) if told.whole else told.gone
        if told.whole:
            self._nodes.clear()
            self._generations.clear()
        news = {key: old.replica.status.node for key in sorted(gone) if (old := self._replicas.get(key)) is not None}
        for key in news:
            self._forget(key)
        for generation in told.generations:
            self._generations[_name_of(generation)] = generation.spec
        for row in told.replicas:
            self._forget(row.key)
            self._replicas[row.key] = Ordered(row.replica, row.revision)
            self._by_node.setdefault(row.replica.status.node, {})[row.key] = None
            news[row.key] = row.replica.status.node
        for name, (node, revision) in told.nodes.items():
            self._nodes[name] = node, revision
        for name in told.nodes_gone:
            self._nodes.pop(name, None)
        self.incarnation, self.revision = told.incarnation, told.revision
        self._seen_ms = self._clock.now_ms() - told.age_ms
        return news

    def let_go(self) -> None:
        """Generations that no replica here is of any more are not needed."""
        wanted: Mapping[str, None] = dict.fromkeys(
            generation_name(one.replica.metadata.tenant, one.replica.spec.workload, one.replica.spec.generation)
            for one in self._replicas.values()
        )
        for name in [name for name in self._generations if name not in wanted]:
            del self._generations[name]

    def _forget(self, key: str) -> None:
        old = self._replicas.pop(key, None)
        if old is not None:
            self._by_node.get(old.replica.status.node, {}).pop(key, None)


def generation_name(tenant: str, workload: str, number: int) -> str:
    return f"{tenant}/{workload}/{number:08d}"


def _name_of(generation: Generation) -> str:
    return generation_name(generation.metadata.tenant, generation.spec.workload, generation.spec.generation)


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
