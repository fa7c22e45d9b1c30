"""What has this agent been ordered? The rows of its nodes as they were last told, and how old that is; no opinions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from remit.model.kinds import Node
from remit.model.orders import Orders
from remit.model.records import Generation, GenerationSpec, Replica
from remit.world.promises import Clock


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
