"""State of one scope, commit by commit.

Holds the current rows, derived indexes, and what the checks need to know about rows that are gone. It evaluates nothing: see
transition_checks.py and capacity_checks.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from remit.simulate.checkers.reference.ledger_sums import LedgerSums, capacity_of, limits_of
from remit.simulate.checkers.reference.lifecycle import ACTIVE, ASSIGNED
from remit.simulate.checkers.reference.past_states import CommitTimes, PastStates
from remit.simulate.checkers.reference.rows import (
    RESTORE_MARKER,
    Amounts,
    BatchEntry,
    Json,
    ReferenceNode,
    ReferenceShape,
    Rows,
    attempt_of,
    decode_row,
    generation_key,
    group_of,
    health_of,
    phase_of,
)

VERSIONS_MAX: Final = 400
"""Versions kept of each object."""

ID_REFUSALS: Final = ("operation_expired", "operation_mismatch")
"""Refusals of the id itself; they are not the outcome of the operation with that id."""

AttemptKey = tuple[str, str, int]
"""One attempt of one replica: its key, its uid, and the attempt number."""


class ObjectVersion(NamedTuple):
    """One version of an object."""

    revision: int
    at_ms: int
    entries: tuple[BatchEntry, ...]
    content: Json


class OperationOutcome(NamedTuple):
    digest: str
    number: int
    code: str
    revision: int
    seen: int


class RevisionIndex:
    """When the objects of one incarnation changed: by key, each revision, and whether the object existed from then on."""

    def __init__(self) -> None:
        self._changes: dict[str, list[tuple[int, bool]]] = {}

    def add(self, key: str, revision: int, exists: bool) -> None:
        self._changes.setdefault(key, []).append((revision, exists))

    def last_before(self, key: str, revision: int) -> int:
        """Return when the object last changed before a revision; 0 if it did not exist then."""
        known = self._changes.get(key, [])
        before = bisect_left(known, (revision,))
        last, exists = known[before - 1] if before else (0, False)
        return last if exists else 0


class CommitStep:
    """One commit: old and new contents of each changed row, and the entries of its batch row."""

    __slots__ = (
        "accepted",
        "after_restore",
        "changed",
        "deletes",
        "entries",
        "history",
        "horizon_before",
        "ledgers_before",
        "missing_deletes",
        "moves",
        "nodes_before",
        "policy_before",
        "puts",
        "revision",
        "times",
    )  # fmt: skip

    def __init__(
        self, history: History, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str], revision: int, times: CommitTimes
    ) -> None:
        self.history, self.puts, self.deletes, self.revision, self.times = history, puts, deletes, revision, times
        self.changed: dict[str, tuple[Json, Json]] = {}
        self.missing_deletes: list[str] = []
        """Deleted keys that did not exist. This changes nothing, and only a faulty commit contains any."""
        self.entries: tuple[BatchEntry, ...] = ()
        self.accepted: list[BatchEntry] = []
        self.after_restore = False
        """Whether this is one of the first batches of a new incarnation, which mark restored rows as uncertain."""
        self.horizon_before = history.horizon
        self.moves: list[tuple[str, Json, Json]] = []
        """Changed replicas with their old and new contents. One deleted and created again in one batch appears twice."""
        self.nodes_before: dict[str, Amounts] = {}
        self.ledgers_before: dict[str, Amounts] = {}
        self.policy_before: Json = None

    def row_before(self, key: str) -> Json:
        """Return the content of a row before this commit."""
        if key in self.changed:
            return self.changed[key][0]
        entry = self.history.rows.get(key)
        return None if entry is None else entry[1]

    def of_kind(self, kind: str) -> Iterator[tuple[str, Json, Json]]:
        prefix = f"{kind}/"
        for key, (old, new) in self.changed.items():
            if key.startswith(prefix):
                yield key, old, new

    def placed(self, *phases: str) -> Iterator[tuple[str, Json]]:
        """Yield replicas that this commit moved into one of these phases from pending or reserved."""
        for key, old, new in self.moves:
            if new is not None and phase_of(new) in phases and phase_of(old) in (None, "pending", "reserved"):
                yield key, new


class History:
    """State of one scope."""

    def __init__(self, scope: str, pace: float = 1.0) -> None:
        self.scope, self.pace = scope, pace
        self.rows: Rows = {}
        self.kinds: dict[str, dict[str, Json]] = {}
        self.versions: dict[str, list[ObjectVersion]] = {}
        self.commits = self.revision = self.serial = 0
        """Number of commits, latest revision, and a counter that restores do not reset."""
        self.incarnations: list[str] = []
        self.uids: dict[str, str] = {}
        """The key that each uid was ever assigned to; survives restores."""
        self.revisions = RevisionIndex()
        self.revisions_before: dict[str, RevisionIndex] = {}
        """Revision indexes of earlier incarnations, by incarnation."""
        self.restored_ms: int | None = None
        """Virtual time of the last restore."""
        self.unreported_nodes: set[str] = set()
        """Nodes of the backup that were marked neither ready nor lost since the restore."""
        self.sums = LedgerSums(self.shape)
        self.shapes: dict[str, ReferenceShape] = {}
        self.reference_nodes: dict[str, ReferenceNode] = {}
        self.capacity: dict[str, Amounts] = {}
        self.limits: dict[str, Amounts] = {}
        self.members: dict[tuple[str, str], dict[str, None]] = {}
        """Replicas by tenant and workload."""
        self.phases: dict[str, dict[str, dict[str, Json]]] = {}  # replicas by phase and generation
        self.active: dict[tuple[str, str], int] = {}
        """Number of replicas that are not released, by tenant and workload."""
        self.policy: Json = None
        self.feasible_domains: dict[tuple[str, str], frozenset[str]] = {}
        """Domains in which a generation could be placed; cleared when nodes, policies or generations change."""
        self.outcomes: dict[str, OperationOutcome] = {}
        self.lost_outcomes: dict[str, OperationOutcome] = {}
        """Outcomes that a restore has lost."""
        self.abandons: dict[str, str] = {}
        """Operations that abandon another, with the id of that one."""
        self.abandoned: set[str] = set()
        self.horizon = 0
        """Ids of windows before this one are no longer executed."""
        self.acknowledged: dict[str, tuple[str, int]] = {}
        self.lost: list[str] = []
        """Operations that were acknowledged and are missing from a backup that was restored later."""
        self.results: dict[tuple[str, int], str] = {}
        self.attempt_nodes: dict[tuple[str, int], str] = {}
        self.released_attempts: dict[tuple[str, int], str] = {}
        """Attempts that were released, with the phase before."""
        self.starts: dict[AttemptKey, tuple[str, int]] = {}
        """Where each attempt was last committed as starting, and when, by `serial`."""
        self.releases: dict[AttemptKey, int] = {}
        self.declared_lost: set[AttemptKey] = set()
        """Attempts declared lost because their node was silent past its fence; no agent has reported their end."""
        self.shape_of: dict[tuple[str, str], ReferenceShape] = {}
        """Shapes by key and uid, also of deleted replicas."""
        self.lease_epochs: dict[str, int] = {}
        self.lease_acquired: dict[str, CommitTimes] = {}
        """When each lease was last acquired under the current leader."""
        self.terms: dict[str, tuple[int, float]] = {}
        """By lease: its epoch, and the earliest virtual time from which its holder may count its term."""
        self.last_led_ms = 0
        """When a leader last changed something. A server that only reads extends the chain too, by batches without changes."""
        self.takeovers: list[int] = []
        """Virtual times of all takeovers."""
        self.takeover_times: CommitTimes | None = None
        self.takeover_revision = 0
        self.first_batch_times: CommitTimes | None = None
        """The first batch of the current leader. The takeover happened between `takeover_times` and this batch."""
        self.latest_commit: tuple[int, CommitTimes] | None = None
        """The last commit, in virtual time and on its authority's clock."""
        self.commit_times: list[tuple[int, int]] = []
        """Every revision with its virtual time."""
        self.past = PastStates()

    # -- reading -----------------------------------------------------------------------------------------------------

    def row(self, key: str) -> Json:
        entry = self.rows.get(key)
        return None if entry is None else entry[1]

    def kind(self, kind: str) -> dict[str, Json]:
        return self.kinds.get(kind, {})

    def replicas(self, *phases: str) -> Iterator[tuple[str, Json]]:
        """Yield the replicas in these phases."""
        for group in (group for phase in phases for group in self.phases.get(phase, {}).values()):
            yield from group.items()

    def grouped_by_shape(self, phase: str) -> Iterator[tuple[ReferenceShape, dict[str, Json]]]:
        """Yield the replicas in a phase, grouped by shape."""
        for group in self.phases.get(phase, {}).values():
            shape = self.shape(next(iter(group.values())))
            if shape is not None:
                yield shape, group

    def shape(self, replica: Json) -> ReferenceShape | None:
        key = generation_key(replica)
        shape = self.shapes.get(key)
        if shape is None and key in self.rows:
            shape = self.shapes[key] = ReferenceShape(key, self.rows[key][1], self.pace)
        return shape

    def revisions_in(self, incarnation: str) -> RevisionIndex | None:
        current = self.incarnations and self.incarnations[-1] == incarnation
        return self.revisions if current else self.revisions_before.get(incarnation)

    def free_on(self, node: str) -> Amounts:
        """Return the free capacity of a node."""
        return {name: n - self.sums.nodes.get((node, name), 0) for name, n in self.capacity[node].items()}

    def content_at(self, key: str, revision: int) -> Json:
        """Return the content of an object since a revision; None if that version is not remembered."""
        return next((version.content for version in reversed(self.versions.get(key, ())) if version.revision == revision), None)

    @property
    def head(self) -> Json:
        return self.row("head")

    # -- updates -----------------------------------------------------------------------------------------------------

    def apply(
        self, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str], revision: int, times: CommitTimes, at_ms: int
    ) -> CommitStep:
        """Apply one commit."""
        self.commits += 1
        self.serial += 1
        self.revision = revision
        self.commit_times.append((revision, at_ms))
        timed = revision, at_ms, times
        self.past.commits.append(timed)
        self.past.commits_by_boot.setdefault(times.boot, []).append(timed)
        self.sums.begin_commit()
        step = CommitStep(self, puts, deletes, revision, times)
        rows = self.rows
        for key, value in puts:
            content = decode_row(key, value)
            current = rows.get(key)
            step.changed[key] = (None if current is None else current[1], content)
            rows[key] = (revision, content)
        for key in deletes:
            current = rows.pop(key, None)
            if current is None:
                step.missing_deletes.append(key)
            else:
                step.changed[key] = (current[1], None)
        entries: list[BatchEntry] = []
        for key, (_, new) in step.changed.items():
            if new is not None and key.startswith("batch/"):
                entries += [BatchEntry(*entry) for entry in new["entries"]]
                self.horizon = max(self.horizon, new["horizon"])
        step.entries = tuple(entries)
        step.accepted = [entry for entry in entries if not entry.code]
        self._update(step)
        self._record_versions(step, at_ms)
        self._track_leader(step, at_ms)
        return step

    def _update(self, step: CommitStep) -> None:
        replicas: dict[str, None] = {}
        step.policy_before = self.policy
        for key, (old, new) in step.changed.items():
            kind, _, name = key.partition("/")
            if not name or kind == "batch":
                continue
            rows_of_kind = self.kinds.setdefault(kind, {})
            if new is None:
                rows_of_kind.pop(key, None)
            else:
                rows_of_kind[key] = new
            match kind:
                case "replica":
                    replicas[key] = None
                    self._update_replica(step, key, old, new)
                case "node":
                    self._update_node(step, name, old, new)
                case "tenant" | "grant":
                    self._update_ledgers(step, key, old, new)
                case "generation":
                    self.shapes.pop(key, None)
                    self.feasible_domains.clear()
                    replicas.update(dict.fromkeys(k for k, r in self.kind("replica").items() if generation_key(r) == key))
                case "policyrevision":
                    revisions = [content["spec"] for content in rows_of_kind.values()]
                    self.policy = max(revisions, key=lambda spec: int(spec["number"]), default=None)
                    self.feasible_domains.clear()
        self.sums.repost(self.rows, replicas)
        self._record_past(step)

    def _record_past(self, step: CommitStep) -> None:
        past = self.past
        if not past.node_counts or past.node_counts[-1][1] != len(self.reference_nodes):
            past.node_counts.append((step.revision, len(self.reference_nodes)))
        if self.policy is not step.policy_before:
            past.policies.append((step.revision, self.policy))
        for name in {**step.nodes_before, **{node: None for node, _ in self.sums.nodes_before}}:
            if name in self.capacity:
                known = past.free.setdefault(name, [])
                known.append((step.revision, self.free_on(name)))
                if len(known) > VERSIONS_MAX:
                    del known[: VERSIONS_MAX // 2]

    def _update_replica(self, step: CommitStep, key: str, old: Json, new: Json) -> None:
        if old is not None and new is not None and old["metadata"]["uid"] != new["metadata"]["uid"]:
            step.moves += [(key, old, None), (key, None, new)]
        else:
            step.moves.append((key, old, new))
        if old is not None:
            by_generation, generation = self.phases[str(phase_of(old))], generation_key(old)
            del by_generation[generation][key]
            if not by_generation[generation]:
                del by_generation[generation]
        if new is not None:
            self.phases.setdefault(str(phase_of(new)), {}).setdefault(generation_key(new), {})[key] = new
        for replica, sign in ((old, -1), (new, 1)):
            if replica is None:
                continue
            group, members = group_of(replica), self.members.setdefault(group_of(replica), {})
            if sign < 0:
                members.pop(key, None)
            else:
                members[key] = None
            if phase_of(replica) != "released":
                self.active[group] = self.active.get(group, 0) + sign
            if not members:
                del self.members[group]
        self.sums.index_victims(key, old, new)

    def _update_node(self, step: CommitStep, name: str, old: Json, new: Json) -> None:
        if new is None or (health_of(new) in ("ready", "lost") and old is not None and health_of(old) != health_of(new)):
            self.unreported_nodes.discard(name)
        step.nodes_before[name] = self.capacity.pop(name, {})
        old_node = self.reference_nodes.pop(name, None)
        if new is not None:
            self.capacity[name] = capacity_of(new)
            self.reference_nodes[name] = ReferenceNode(name, new)
        if old_node is None or new is None or old_node.attributes != self.reference_nodes[name].attributes:
            self.feasible_domains.clear()

    def _update_ledgers(self, step: CommitStep, key: str, old: Json, new: Json) -> None:
        for ledger in limits_of(key, old) if old is not None else ():
            step.ledgers_before[ledger] = self.limits.pop(ledger, {})
        if new is not None:
            self.limits.update(limits_of(key, new))
        if key.startswith("grant/"):
            self.sums.repost_grant(key, new)

    def _record_versions(self, step: CommitStep, at_ms: int) -> None:
        for key, (_, new) in step.changed.items():
            if key == "head" or key.startswith("batch/"):
                continue
            self.revisions.add(key, step.revision, new is not None)
            versions = self.versions.setdefault(key, [])
            versions.append(ObjectVersion(step.revision, at_ms, step.entries, new))
            if len(versions) > VERSIONS_MAX:
                del versions[: VERSIONS_MAX // 2]

    def _track_leader(self, step: CommitStep, at_ms: int) -> None:
        """Track the leader, the incarnation, and whether restored rows are still being reviewed."""
        head, old = self.head or {}, (step.changed.get("head") or (None, None))[0]
        if old is None or head.get("epoch", 0) > old["epoch"]:
            self.takeovers.append(at_ms)
            self.takeover_times, self.takeover_revision, self.first_batch_times = step.times, step.revision, None
            self.lease_acquired.clear()
        elif self.first_batch_times is None and head.get("count"):  # otherwise it has only started to read
            self.first_batch_times = step.times
        self.latest_commit = at_ms, step.times
        if head.get("count"):
            self.last_led_ms = at_ms
        incarnation = head.get("incarnation", "")
        if not self.incarnations or self.incarnations[-1] != incarnation:
            self.incarnations.append(incarnation)
        step.after_restore = step.row_before(RESTORE_MARKER) != incarnation

    def renew(self, lease: str, epoch: int, since_ms: float) -> None:
        """Record that the holder's renewal succeeded. A late answer does not affect a later epoch."""
        self.terms[lease] = max(self.terms.get(lease, (0, 0.0)), (epoch, since_ms))

    # -- after a restore ---------------------------------------------------------------------------------------------

    def restore(self, rows: Sequence[tuple[str, bytes, int]], revision: int, at_ms: int) -> None:
        """Replace all rows by those of a backup and list the acknowledged operations that it lost."""
        self.lost_outcomes.update(self.outcomes)
        self.abandoned, self.horizon = set(), 0
        if self.incarnations:
            self.revisions_before[self.incarnations[-1]] = self.revisions
        self.revisions, self.restored_ms = RevisionIndex(), at_ms
        self.revision, self.serial = max(self.revision, revision), self.serial + 1
        self.commit_times.append((self.revision, at_ms))
        self.rows = {key: (at, decode_row(key, value)) for key, value, at in rows}
        self.kinds, self.shapes, self.reference_nodes, self.capacity, self.limits = {}, {}, {}, {}, {}
        self.members, self.active, self.feasible_domains, self.policy, self.outcomes = {}, {}, {}, None, {}
        self.terms, self.phases = {}, {}
        self.past.policies, self.past.free = [], {}
        self.sums = LedgerSums(self.shape)
        no_times = CommitTimes("", 0, 0, 0)
        step = CommitStep(self, (), (), revision, no_times)
        step.changed = {key: (None, content) for key, (_, content) in self.rows.items()}
        self._update(step)
        self.unreported_nodes = set(self.reference_nodes)
        runs = [group_of(replica) for replica in self.kind("replica").values() if phase_of(replica) in ACTIVE]
        self.past.running_counts, self.past.preempted = {group: [(revision, runs.count(group))] for group in runs}, {}
        self.past.restore(revision, self.kind("replica").values())
        for key, (at, content) in sorted(self.rows.items()):
            if key.startswith("batch/"):
                for entry in (BatchEntry(*fields) for fields in content["entries"]):
                    if entry.code not in ID_REFUSALS:
                        self.outcomes[entry.id] = OperationOutcome(entry.digest, entry.number, entry.code, at, entry.seen)
            elif key != "head":
                self.revisions.add(key, at, True)
                self.versions.setdefault(key, []).append(ObjectVersion(revision, at_ms, (), {"restored": content}))
        self.lost += sorted(operation for operation in self.acknowledged if operation not in self.outcomes)
        self.acknowledged = {i: v for i, v in self.acknowledged.items() if i in self.outcomes}
        self.incarnations.append(self.head["incarnation"])
        self._forget_attempts()

    def _forget_attempts(self) -> None:
        """Forget attempts made after the backup. They may be made again, on another node and with another result."""
        self.results, self.attempt_nodes, self.released_attempts = {}, {}, {}
        for key, replica in self.kind("replica").items():
            uid, attempt, status = replica["metadata"]["uid"], attempt_of(replica), replica.get("status", {})
            self.released_attempts.update({(uid, before): "restored" for before in range(1, attempt)})
            if status.get("result"):
                self.results[uid, attempt] = str(status["result"])
            if phase_of(replica) in ASSIGNED:
                self.attempt_nodes[uid, attempt] = str(status["node"])
            if phase_of(replica) == "released":
                self.released_attempts[uid, attempt] = "restored"
            else:
                self.releases.pop((key, uid, attempt), None)

    def describe(self, key: str) -> list[str]:
        """Return the history of one object, one line per version."""
        lines, before = [], None
        for version in self.versions.get(key, []):
            by = [e for e in version.entries if e.subject in (key, key.partition("/")[2], key.rpartition("/")[2])]
            operations = (
                ", ".join(f"{e.operation} by {e.actor} ({e.role} at {e.epoch}, {e.id})" for e in by)
                or "in a batch about other objects"
            )
            lines.append(
                f"  {version.at_ms} ms, revision {version.revision}: {operations}: {_difference(before, version.content)}"
            )
            before = version.content
        return lines


def _difference(old: Json, new: Json) -> str:
    if new is None:
        return "deleted"
    if not isinstance(old, dict) or not isinstance(new, dict):
        return str(new)
    parts = []
    for part in sorted({*old, *new}):
        a, b = old.get(part), new.get(part)
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            parts += [
                f"{part}.{name} {a.get(name)!r} -> {b.get(name)!r}" for name in sorted({*a, *b}) if a.get(name) != b.get(name)
            ]
        else:
            parts.append(f"{part} {a!r} -> {b!r}")
    return "; ".join(parts) or "unchanged"
