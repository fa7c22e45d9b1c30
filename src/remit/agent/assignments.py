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
        on_node = self._by_node.get(node, {})
        return ((key, self._replicas[key]) for key in (tuple(on_node) if keys is None else keys) if key in on_node)

    def spec_of(self, replica: Replica) -> GenerationSpec | None:
        meta, spec = replica.metadata, replica.spec
        return self._generations.get(generation_name(meta.tenant, spec.workload, spec.generation))

    def apply(self, update: AssignmentsUpdate) -> dict[str, str]:
        """Apply a message. Returns the keys of changed replicas and the nodes they are, or were, on."""
        removed = tuple(self._replicas.keys() - {row.key for row in update.replicas}) if update.whole else update.gone
        if update.whole:
            self._nodes.clear()
            self._generations.clear()
        changed = {key: old.replica.status.node for key in sorted(removed) if (old := self._replicas.get(key)) is not None}
        for key in changed:
            self._forget(key)
        for generation in update.generations:
            self._generations[_generation_name_of(generation)] = generation.spec
        for row in update.replicas:
            self._forget(row.key)
            self._replicas[row.key] = Assignment(row.replica, row.revision)
            self._by_node.setdefault(row.replica.status.node, {})[row.key] = None
            changed[row.key] = row.replica.status.node
        for name, (node, revision) in update.nodes.items():
            self._nodes[name] = node, revision
        for name in update.nodes_gone:
            self._nodes.pop(name, None)
        self.incarnation, self.revision = update.incarnation, update.revision
        self._as_of_ms = self._clock.now_ms() - update.age_ms
        return changed

    def drop_unused_generations(self) -> None:
        """Drop generations that no replica on these nodes belongs to."""
        used: Mapping[str, None] = dict.fromkeys(
            generation_name(
                assignment.replica.metadata.tenant, assignment.replica.spec.workload, assignment.replica.spec.generation
            )
            for assignment in self._replicas.values()
        )
        for name in [name for name in self._generations if name not in used]:
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


def slot_hold_ms(spec: ProcessSpec) -> int:
    """Return how long a start keeps its slot after the keeper reported it."""
    return SANDBOX_SETUP_MS if spec.sandbox == "bwrap" else 0


class StartQueue:
    """Start queue of one keeper, for all its nodes."""

    def __init__(self, limit: int = STARTS_MAX) -> None:
        self._limit = limit
        self._starting: dict[AttemptId, None] = {}
        self._admitted: dict[AttemptId, None] = {}
        self._queue: dict[AttemptId, str] = {}
        """Waiting attempts with their node, in FIFO order."""

    def may_start(self, attempt: AttemptId, node: str) -> bool:
        """Return whether the attempt may start now or is already starting. If not, it is queued."""
        if attempt in self._starting or attempt in self._admitted or (not self._queue and self._free_slots > 0):
            return True
        self._queue.setdefault(attempt, node)
        return False

    def mark_starting(self, attempt: AttemptId) -> None:
        self._admitted.pop(attempt, None)
        self._queue.pop(attempt, None)
        self._starting[attempt] = None

    def release(self, attempt: AttemptId) -> None:
        """Release the slot of an attempt, whether it started or failed."""
        self._starting.pop(attempt, None)

    def admit(self) -> list[tuple[str, AttemptId]]:
        """Admit waiting attempts to the free slots. Returns them with their nodes.

        An attempt admitted by the previous call that has not started since loses its slot.
        """
        self._admitted.clear()
        admitted = [(node, attempt) for attempt, node in islice(self._queue.items(), max(0, self._free_slots))]
        for _, attempt in admitted:
            del self._queue[attempt]
            self._admitted[attempt] = None
        return admitted

    def waiting_by_node(self) -> dict[str, list[AttemptId]]:
        """Return the first waiting attempts of each node."""
        waiting: dict[str, list[AttemptId]] = {}
        for attempt, node in self._queue.items():
            attempts = waiting.setdefault(node, [])
            if len(attempts) < REPORTED_MAX:
                attempts.append(attempt)
        return waiting

    @property
    def _free_slots(self) -> int:
        return self._limit - len(self._starting) - len(self._admitted)
