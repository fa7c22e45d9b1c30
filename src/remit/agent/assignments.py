"""Replicas assigned to this agent's nodes, with the age of that knowledge, and the start queue.

`Assignments` stores the rows last received from a server and decides nothing.

The start queue bounds how many processes start concurrently and admits the rest in FIFO order, because thousands of
simultaneous starts would slow every one of them down. A queued attempt holds no slot. When admitted it is reconciled again,
since it may no longer be assigned by then. Only starts are queued: stops and fences never wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from remit.agent.attempts import AttemptId
from remit.model.kinds import Node
from remit.model.records import Generation, GenerationSpec, Replica
from remit.model.wire.agent_messages import AssignmentsUpdate
from remit.world.interfaces import Clock, ProcessSpec


class Assignment(NamedTuple):
    replica: Replica
    revision: int


class Assignments:
    """Replicas of this agent's nodes by key, the generations they belong to, and the node rows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.incarnation = ""
        self.revision = 0
        self._as_of_ms = 0
        self._nodes: dict[str, tuple[Node, int]] = {}
        self._replicas: dict[str, Assignment] = {}
        self._by_node: dict[str, dict[str, None]] = {}
        self._generations: dict[str, GenerationSpec] = {}

    @property
    def is_loaded(self) -> bool:
        """Return whether assignments were received. Before that, a process without an assignment proves nothing."""
        return bool(self.incarnation)

    def age_ms(self) -> int:
        return max(0, self._clock.now_ms() - self._as_of_ms)

    def node(self, name: str) -> tuple[Node, int] | None:
        return self._nodes.get(name)

    def get(self, key: str) -> Assignment | None:
        return self._replicas.get(key)

    def on_node(self, node: str, keys: Collection[str] | None = None) -> Iterator[tuple[str, Assignment]]:
        """Iterate over the replicas of a node, or over those of `keys` that are on it."""
        here = self._by_node.get(node, {})
        return ((key, self._replicas[key]) for key in (tuple(here) if keys is None else keys) if key in here)

    def spec_of(self, replica: Replica) -> GenerationSpec | None:
        meta, spec = replica.metadata, replica.spec
        return self._generations.get(generation_name(meta.tenant, spec.workload, spec.generation))

    def apply(self, told: AssignmentsUpdate) -> dict[str, str]:
        """Apply a message. Returns the keys of changed replicas and the nodes they are, or were, on."""
        gone = tuple(self._replicas.keys() - {row.key for row in told.replicas}) if told.whole else told.gone
        if told.whole:
            self._nodes.clear()
            self._generations.clear()
        news = {key: old.replica.status.node for key in sorted(gone) if (old := self._replicas.get(key)) is not None}
        for key in news:
            self._forget(key)
        for generation in told.generations:
            self._generations[_generation_name_of(generation)] = generation.spec
        for row in told.replicas:
            self._forget(row.key)
            self._replicas[row.key] = Assignment(row.replica, row.revision)
            self._by_node.setdefault(row.replica.status.node, {})[row.key] = None
            news[row.key] = row.replica.status.node
        for name, (node, revision) in told.nodes.items():
            self._nodes[name] = node, revision
        for name in told.nodes_gone:
            self._nodes.pop(name, None)
        self.incarnation, self.revision = told.incarnation, told.revision
        self._as_of_ms = self._clock.now_ms() - told.age_ms
        return news

    def drop_unused_generations(self) -> None:
        """Drop generations that no replica on these nodes belongs to."""
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


def _generation_name_of(generation: Generation) -> str:
    return generation_name(generation.metadata.tenant, generation.spec.workload, generation.spec.generation)


STARTS_MAX: Final = 32
"""Starts in progress at once. The spawn server creates one process at a time; the other starts are being written to the journal
or reported.
"""

SANDBOX_SETUP_MS: Final = 400
"""How long a sandboxed start keeps its slot. The sandbox is set up after the start is reported, takes most of the time, and its
completion is not signalled. With 32 slots this allows 80 sandboxed starts per second.
"""

REPORTED_MAX: Final = 50
"""Maximum number of queued attempts per node that a heartbeat lists."""

WAITING_FOR_SLOT: Final = "waiting for a start slot: other processes are being started on this machine"


def slot_hold_ms(order: ProcessSpec) -> int:
    """Return how long a start keeps its slot after the keeper reported it."""
    return SANDBOX_SETUP_MS if order.sandbox == "bwrap" else 0


class StartQueue:
    """Start queue of one keeper, for all its nodes."""

    def __init__(self, limit: int = STARTS_MAX) -> None:
        self._limit = limit
        self._starting: dict[AttemptId, None] = {}
        self._admitted: dict[AttemptId, None] = {}
        self._queue: dict[AttemptId, str] = {}
        """Waiting attempts with their node, in FIFO order."""

    def may_start(self, copy: AttemptId, node: str) -> bool:
        """Return whether the attempt may start now or is already starting. If not, it is queued."""
        if copy in self._starting or copy in self._admitted or (not self._queue and self._free_slots > 0):
            return True
        self._queue.setdefault(copy, node)
        return False

    def mark_starting(self, copy: AttemptId) -> None:
        self._admitted.pop(copy, None)
        self._queue.pop(copy, None)
        self._starting[copy] = None

    def release(self, copy: AttemptId) -> None:
        """Release the slot of an attempt, whether it started or failed."""
        self._starting.pop(copy, None)

    def admit(self) -> list[tuple[str, AttemptId]]:
        """Admit waiting attempts to the free slots. Returns them with their nodes.

        An attempt admitted by the previous call that has not started since loses its slot.
        """
        self._admitted.clear()
        called = [(node, copy) for copy, node in islice(self._queue.items(), max(0, self._free_slots))]
        for _, copy in called:
            del self._queue[copy]
            self._admitted[copy] = None
        return called

    def waiting_by_node(self) -> dict[str, list[AttemptId]]:
        """Return the first waiting attempts of each node."""
        found: dict[str, list[AttemptId]] = {}
        for copy, node in self._queue.items():
            there = found.setdefault(node, [])
            if len(there) < REPORTED_MAX:
                there.append(copy)
        return found

    @property
    def _free_slots(self) -> int:
        return self._limit - len(self._starting) - len(self._admitted)
