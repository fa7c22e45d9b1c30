"""Committed in-memory state of a scope: rows, ledgers and topology counts. Decides nothing, no I/O.

`Books` hold what is committed. A `Draft` lies over them (or over another draft) while a batch is decided: it reads through
to the layer below, keeps copies of what it changes, and is either absorbed as a whole or discarded. Uncommitted changes are
therefore never visible, and loading at takeover uses the same code as normal operation: every stored row is put into a draft
over empty books.

Ledgers are sums of postings, and the rows define the postings, so no ledger is stored. draft.py and draft_replicas.py define
what each row posts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from remit.commitment.changes import Changes, GenerationKey, add_counts, apply_changes
from remit.commitment.generations import GENERATION_PREFIX, CommittedRequirements
from remit.commitment.peer_counts import CommittedPeerCounts
from remit.law.charges import LimitUsage
from remit.law.ledgers import GrantLedger, NodeLedger
from remit.law.lifecycle import PHASE_TIMEOUTS
from remit.law.timing import Timing
from remit.model.kinds.registry import AnyObject
from remit.model.objects import dec_hook, key_of
from remit.model.records import Peer, PeerConfirmation, PolicyRevision, Replica

decode_replica = msgspec.json.Decoder(Replica, dec_hook=dec_hook).decode

AWAITED_NODE = "awaited/node/"
"""Key prefix of records that exist, after a restore, for each node that has not reported yet."""

_AWAITED_NODE_PREFIX = key_of("Summary", AWAITED_NODE)
_PEER_PREFIX = key_of("Peer", "")
_GENERATION_DEPTH = 3
"""Number of slashes in a generation key before its number."""

TIME_SAMPLE_MS = 250
PHASE_LIMIT_MS_MAX = max(wait.limit_ms for wait in PHASE_TIMEOUTS.values())

NOTES_MAX = 20_000
"""Maximum number of stored events and decisions. The oldest are deleted when new ones arrive."""


class DecisionTime(NamedTuple):
    """When a decision is made, on the authority's own clock, and when each lease was last renewed."""

    now_ms: int
    boot: str
    renewed_ms: Mapping[str, int]
    since_ms: int
    sequence: int
    incarnation: str
    timing: Timing = Timing()
    wall: str = ""
    """Wall clock, recorded for display. No decision depends on it."""

    def silent_ms(self, lease: str) -> int:
        """Return the time since the lease was last renewed. A new authority counts from its takeover."""
        return self.now_ms - self.renewed_ms.get(lease, self.since_ms)


class Books:
    """Committed state. Replicas are kept as encoded bytes to save memory; the other objects, far fewer, are kept decoded."""

    def __init__(self) -> None:
        self.replicas: dict[str, tuple[int, bytes]] = {}
        self.objects: dict[str, tuple[Any, int]] = {}
        self.by_kind: dict[str, dict[str, None]] = {}
        self.by_workload: dict[str, dict[str, None]] = {}
        """Generation keys by their prefix before the number. Every declaration looks up the generations of its workload."""
        self.awaited_nodes: set[str] = set()
        """Keys of the records of nodes that have not reported since a restore."""
        self.awaited_peers: set[str] = set()
        """Keys of the records of scopes that have not confirmed their holdings since a restore."""
        self.nodes: dict[str, NodeLedger] = {}
        self.grants: dict[str, GrantLedger] = {}
        self.population: dict[GenerationKey, int] = {}
        """All replicas by generation, in whatever phase."""
        self.reserved: dict[GenerationKey, int] = {}
        """Replicas that hold capacity but do not work yet, by generation; a gang's minimum does not count them."""
        self.active: dict[tuple[str, str], int] = {}
        """Replicas that count towards the limit of their workload, by tenant and workload."""
        self.used: LimitUsage = {}
        """Declared amounts by tenant and limit."""
        self.preemptors: dict[str, str] = {}
        """By victim: the replica whose reservation receives what the victim frees."""
        self.commit_times: list[tuple[int, int]] = []
        """Samples of (revision, commit time on the authority's clock). A replica's row changes only with its phase, so they
        tell how long a phase has lasted.
        """
        self.notes: dict[str, None] = {}
        """Keys of stored events and decisions, oldest first."""
        self.loaded_revision = 0
        """Revision of the takeover load. When rows at or before it were written is not known."""
        self.policy: PolicyRevision | None = None
        self.requirements = CommittedRequirements(self.objects)
        self.peers = CommittedPeerCounts(self.nodes, self.requirements)

    # -- reading ---------------------------------------------------------------------------------------------------------

    def replica(self, name: str) -> tuple[Replica, int] | None:
        row = self.replicas.get(name)
        return None if row is None else (decode_replica(row[1]), row[0])

    def lookup(self, name: str) -> tuple[Any, int] | None:
        return self.objects.get(name)

    def current_policy(self) -> PolicyRevision | None:
        return self.policy

    def keys(self, prefix: str) -> list[str]:
        """Return the sorted keys of objects with this prefix. Replicas are not included."""
        if prefix.startswith(GENERATION_PREFIX) and prefix.endswith("/") and prefix.count("/") == _GENERATION_DEPTH:
            return sorted(self.by_workload.get(prefix, ()))
        return sorted(name for name in self.by_kind.get(prefix.split("/", 1)[0], ()) if name.startswith(prefix))

    def excess(self) -> Iterator[tuple[str, str]]:
        """Yield ledgers that exceed their amount after a legal reduction, with the excess. They must be drained."""
        for name, node in sorted(self.nodes.items()):
            if over := node.over():
                yield f"node/{name}", str(over)
        for name, grant in sorted(self.grants.items()):
            if over := grant.over():
                yield name, str(over)

    # -- absorbing -------------------------------------------------------------------------------------------------------

    def absorb(self, changes: Changes, time: DecisionTime, revision: int, encoded: Mapping[str, bytes]) -> None:
        """Apply the changes of a draft, which were decided at `time` and committed at `revision` as the given bytes."""
        self._sample_time(revision, time.now_ms)
        replicas = self.replicas
        for name, replica in changes.replicas.items():
            if replica is None:
                replicas.pop(name, None)
            else:
                replicas[name] = (revision, encoded[name])
        for name, obj in changes.objects.items():
            self._absorb_object(name, obj, revision)
        for name, note in changes.notes.items():
            self.notes.pop(name, None)
            if note is not None:
                self.notes[name] = None
        apply_changes(self.grants, changes.grants)
        apply_changes(self.preemptors, changes.preemptors)
        add_counts(self.population, changes.population)
        add_counts(self.reserved, changes.reserved)
        add_counts(self.active, changes.active)
        add_counts(self.used, changes.used)
        if changes.policy is not None:
            self.policy = changes.policy
            self.requirements.set_policy(changes.policy)
        elif changes.changed_workloads:
            self.requirements.recompile(changes.objects, self.by_workload)
        if changes.topology_changed:
            # Before the node counts are absorbed: those may lie on nodes that were just deleted.
            self.peers.clear_domain_counts()
        apply_changes(self.nodes, changes.nodes)
        self.peers.absorb(changes.node_counts)
        if changes.changed_workloads:
            self.peers.refresh_terms(changes.objects)
        if changes.topology_changed or changes.policy is not None:
            self.peers.clear_eligible()

    def _absorb_object(self, name: str, obj: AnyObject | None, revision: int) -> None:
        kind = self.by_kind.setdefault(name.split("/", 1)[0], {})
        if obj is None:
            self.objects.pop(name, None)
            kind.pop(name, None)
        else:
            self.objects[name] = (obj, revision)
            kind[name] = None
        if name.startswith(GENERATION_PREFIX):
            self._index_generation(name, present=obj is not None)
        elif name.startswith(_AWAITED_NODE_PREFIX):
            (self.awaited_nodes.discard if obj is None else self.awaited_nodes.add)(name)
        elif name.startswith(_PEER_PREFIX):
            awaited = isinstance(obj, Peer) and obj.spec.standing is PeerConfirmation.AWAITED
            (self.awaited_peers.add if awaited else self.awaited_peers.discard)(name)

    def _index_generation(self, name: str, *, present: bool) -> None:
        prefix = name[: name.rindex("/") + 1]
        names = self.by_workload.setdefault(prefix, {})
        if present:
            names[name] = None
        else:
            names.pop(name, None)
            if not names:
                del self.by_workload[prefix]

    def _sample_time(self, revision: int, now_ms: int) -> None:
        """Record a sample now and then. Between samples a phase is reported slightly younger than it is, never older."""
        if not self.commit_times or now_ms - self.commit_times[-1][1] >= TIME_SAMPLE_MS:
            self.commit_times.append((revision, now_ms))
            while len(self.commit_times) > 1 and now_ms - self.commit_times[0][1] > 2 * PHASE_LIMIT_MS_MAX:
                del self.commit_times[0]

    def phase_age_ms(self, revision: int, time: DecisionTime) -> int:
        """Return how long a replica whose row is at `revision` has been in its phase, as far as this authority knows."""
        if revision <= self.loaded_revision:
            return time.now_ms - time.since_ms
        at = bisect_left(self.commit_times, (revision, 0))
        if at < len(self.commit_times) and (at == 0 or self.commit_times[at][0] == revision):
            return time.now_ms - self.commit_times[at][1]
        # The commit lies within one interval of the previous sample, otherwise it would have recorded one.
        return max(0, time.now_ms - self.commit_times[at - 1][1] - TIME_SAMPLE_MS)
