"""State of one scope, commit by commit.

Holds the current rows, derived indexes, and what the checks need to know about rows that are gone. It evaluates nothing: see
transition_checks.py and capacity_checks.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from remit.simulate.checkers.reference.ledger_sums import Sums, capacity_of, limits_of
from remit.simulate.checkers.reference.lifecycle import HOUSED, RUNS
from remit.simulate.checkers.reference.past_states import Past, Stand
from remit.simulate.checkers.reference.placement import Site
from remit.simulate.checkers.reference.rows import (
    MARKER,
    Counted,
    Entry,
    Json,
    Rows,
    Shape,
    attempt_of,
    generation_key,
    group_of,
    health_of,
    phase_of,
    read,
)

VERSIONS_KEPT: Final = 400
"""Versions kept of each object."""

NOT_OUTCOMES: Final = ("operation_expired", "operation_mismatch")
"""Refusals of the id itself; they are not the outcome of the operation with that id."""

Run = tuple[str, str, int]
"""One attempt of one replica: its key, its uid, and the attempt number."""


class Told(NamedTuple):
    """One version of an object."""

    revision: int
    at_ms: int
    entries: tuple[Entry, ...]
    content: Json


class Outcome(NamedTuple):
    digest: str
    number: int
    code: str
    revision: int
    seen: int


class Revisions:
    """When the objects of one incarnation changed: by key, each revision, and whether the object existed from then on."""

    def __init__(self) -> None:
        self._of: dict[str, list[tuple[int, bool]]] = {}

    def add(self, key: str, revision: int, there: bool) -> None:
        self._of.setdefault(key, []).append((revision, there))

    def last_before(self, key: str, revision: int) -> int:
        """Return when the object last changed before a revision; 0 if it did not exist then."""
        known = self._of.get(key, [])
        before = bisect_left(known, (revision,))
        last, there = known[before - 1] if before else (0, False)
        return last if there else 0


class Step:
    """One commit: old and new contents of each changed row, and the entries of its batch row."""

    __slots__ = (
        "accepted", "changed", "deletes", "doubting", "entries", "history", "horizon_before", "ledgers_before", "moves",
        "nodes_before", "policy_before", "puts", "revision", "stand", "vain",
    )  # fmt: skip

    def __init__(
        self, history: History, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str], revision: int, stand: Stand
    ) -> None:
        self.history, self.puts, self.deletes, self.revision, self.stand = history, puts, deletes, revision, stand
        self.changed: dict[str, tuple[Json, Json]] = {}
        self.vain: list[str] = []
        """Deleted keys that did not exist. This changes nothing, and only a faulty commit contains any."""
        self.entries: tuple[Entry, ...] = ()
        self.accepted: list[Entry] = []
        self.doubting = False
        """Whether this is one of the first batches of a new incarnation, which mark restored rows as uncertain."""
        self.horizon_before = history.horizon
        self.moves: list[tuple[str, Json, Json]] = []
        """Changed replicas with their old and new contents. One deleted and created again in one batch appears twice."""
        self.nodes_before: dict[str, Counted] = {}
        self.ledgers_before: dict[str, Counted] = {}
        self.policy_before: Json = None

    def was(self, key: str) -> Json:
        """Return the content of a row before this commit."""
        if key in self.changed:
            return self.changed[key][0]
        found = self.history.rows.get(key)
        return None if found is None else found[1]

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
        self.stories: dict[str, list[Told]] = {}
        self.commits = self.revision = self.serial = 0
        """Number of commits, latest revision, and a counter that restores do not reset."""
        self.incarnations: list[str] = []
        self.uids: dict[str, str] = {}
        """The key that each uid was ever assigned to; survives restores."""
        self.revisions = Revisions()
        self.revisions_before: dict[str, Revisions] = {}
        """Revision indexes of earlier incarnations, by incarnation."""
        self.restored_ms: int | None = None
        """Virtual time of the last restore."""
        self.unheard: set[str] = set()
        """Nodes of the backup that were marked neither ready nor lost since the restore."""
        self.sums = Sums(self.shape)
        self.shapes: dict[str, Shape] = {}
        self.sites: dict[str, Site] = {}
        self.capacity: dict[str, Counted] = {}
        self.limits: dict[str, Counted] = {}
        self.members: dict[tuple[str, str], dict[str, None]] = {}
        """Replicas by tenant and workload."""
        self.phases: dict[str, dict[str, dict[str, Json]]] = {}  # replicas by phase and generation
        self.active: dict[tuple[str, str], int] = {}
        """Number of replicas that are not released, by tenant and workload."""
        self.policy: Json = None
        self.open_to: dict[tuple[str, str], frozenset[str]] = {}
        """Domains in which a generation could be placed; cleared when nodes, policies or generations change."""
        self.outcomes: dict[str, Outcome] = {}
        self.former: dict[str, Outcome] = {}
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
        self.homes: dict[tuple[str, int], str] = {}
        self.over: dict[tuple[str, int], str] = {}
        """Attempts that were released, with the phase before."""
        self.starts: dict[Run, tuple[str, int]] = {}
        """Where each attempt was last committed as starting, and when, by `serial`."""
        self.releases: dict[Run, int] = {}
        self.given_up: set[Run] = set()
        """Attempts declared lost because their node was silent past its fence; no agent has reported their end."""
        self.shape_of: dict[tuple[str, str], Shape] = {}
        """Shapes by key and uid, also of deleted replicas."""
        self.lease_epochs: dict[str, int] = {}
        self.heard: dict[str, Stand] = {}
        """When each lease was last acquired under the current leader."""
        self.terms: dict[str, tuple[int, float]] = {}
        """By lease: its epoch, and the earliest virtual time from which its holder may count its term."""
        self.acted_ms = 0
        """When a leader last changed something. A server that only reads extends the chain too, by batches without changes."""
        self.takeovers: list[int] = []
        """Virtual times of all takeovers."""
        self.seized: Stand | None = None
        self.seized_at = 0
        self.first: Stand | None = None
        """The first batch of the current leader. The takeover happened between `seized` and this batch."""
        self.latest: tuple[int, Stand] | None = None
        """The last commit, in virtual time and on its authority's clock."""
        self.times: list[tuple[int, int]] = []
        """Every revision with its virtual time."""
        self.past = Past()

    # -- reading -----------------------------------------------------------------------------------------------------

    def row(self, key: str) -> Json:
        found = self.rows.get(key)
        return None if found is None else found[1]

    def kind(self, kind: str) -> dict[str, Json]:
        return self.kinds.get(kind, {})

    def replicas(self, *phases: str) -> Iterator[tuple[str, Json]]:
        """Yield the replicas in these phases."""
        for alike in (alike for phase in phases for alike in self.phases.get(phase, {}).values()):
            yield from alike.items()

    def alike(self, phase: str) -> Iterator[tuple[Shape, dict[str, Json]]]:
        """Yield the replicas in a phase, grouped by shape."""
        for alike in self.phases.get(phase, {}).values():
            shape = self.shape(next(iter(alike.values())))
            if shape is not None:
                yield shape, alike

    def shape(self, replica: Json) -> Shape | None:
        key = generation_key(replica)
        shape = self.shapes.get(key)
        if shape is None and key in self.rows:
            shape = self.shapes[key] = Shape(key, self.rows[key][1], self.pace)
        return shape

    def revisions_in(self, incarnation: str) -> Revisions | None:
        current = self.incarnations and self.incarnations[-1] == incarnation
        return self.revisions if current else self.revisions_before.get(incarnation)

    def left(self, node: str) -> Counted:
        """Return the free capacity of a node."""
        return {name: n - self.sums.nodes.get((node, name), 0) for name, n in self.capacity[node].items()}

    def version(self, key: str, revision: int) -> Json:
        """Return the content of an object since a revision; None if that version is not remembered."""
        return next((told.content for told in reversed(self.stories.get(key, ())) if told.revision == revision), None)

    @property
    def head(self) -> Json:
        return self.row("head")

    # -- updates -----------------------------------------------------------------------------------------------------

    def apply(self, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str], revision: int, stand: Stand, at_ms: int) -> Step:
        """Apply one commit."""
        self.commits += 1
        self.serial += 1
        self.revision = revision
        self.times.append((revision, at_ms))
        standing = revision, at_ms, stand
        self.past.stands.append(standing)
        self.past.of_boot.setdefault(stand.boot, []).append(standing)
        self.sums.begin()
        step = Step(self, puts, deletes, revision, stand)
        rows = self.rows
        for key, value in puts:
            content = read(key, value)
            found = rows.get(key)
            step.changed[key] = (None if found is None else found[1], content)
            rows[key] = (revision, content)
        for key in deletes:
            found = rows.pop(key, None)
            if found is None:
                step.vain.append(key)
            else:
                step.changed[key] = (found[1], None)
        entries: list[Entry] = []
        for key, (_, new) in step.changed.items():
            if new is not None and key.startswith("batch/"):
                entries += [Entry(*entry) for entry in new["entries"]]
                self.horizon = max(self.horizon, new["horizon"])
        step.entries = tuple(entries)
        step.accepted = [entry for entry in entries if not entry.code]
        self._absorb(step)
        self._tell(step, at_ms)
        self._reign(step, at_ms)
        return step

    def _absorb(self, step: Step) -> None:
        replicas: dict[str, None] = {}
        step.policy_before = self.policy
        for key, (old, new) in step.changed.items():
            kind, _, name = key.partition("/")
            if not name or kind == "batch":
                continue
            there = self.kinds.setdefault(kind, {})
            if new is None:
                there.pop(key, None)
            else:
                there[key] = new
            match kind:
                case "replica":
                    replicas[key] = None
                    self._absorb_replica(step, key, old, new)
                case "node":
                    self._absorb_node(step, name, old, new)
                case "tenant" | "grant":
                    self._absorb_ledgers(step, key, old, new)
                case "generation":
                    self.shapes.pop(key, None)
                    self.open_to.clear()
                    replicas.update(dict.fromkeys(k for k, r in self.kind("replica").items() if generation_key(r) == key))
                case "policyrevision":
                    revisions = [content["spec"] for content in there.values()]
                    self.policy = max(revisions, key=lambda spec: int(spec["number"]), default=None)
                    self.open_to.clear()
        self.sums.repost(self.rows, replicas)
        self._remember(step)

    def _remember(self, step: Step) -> None:
        past = self.past
        if not past.nodes or past.nodes[-1][1] != len(self.sites):
            past.nodes.append((step.revision, len(self.sites)))
        if self.policy is not step.policy_before:
            past.policies.append((step.revision, self.policy))
        for name in {**step.nodes_before, **{node: None for node, _ in self.sums.nodes_before}}:
            if name in self.capacity:
                known = past.left.setdefault(name, [])
                known.append((step.revision, self.left(name)))
                if len(known) > VERSIONS_KEPT:
                    del known[: VERSIONS_KEPT // 2]

    def _absorb_replica(self, step: Step, key: str, old: Json, new: Json) -> None:
        if old is not None and new is not None and old["metadata"]["uid"] != new["metadata"]["uid"]:
            step.moves += [(key, old, None), (key, None, new)]
        else:
            step.moves.append((key, old, new))
        if old is not None:
            there, generation = self.phases[str(phase_of(old))], generation_key(old)
            del there[generation][key]
            if not there[generation]:
                del there[generation]
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
        self.sums.name_victims(key, old, new)

    def _absorb_node(self, step: Step, name: str, old: Json, new: Json) -> None:
        if new is None or (health_of(new) in ("ready", "lost") and old is not None and health_of(old) != health_of(new)):
            self.unheard.discard(name)
        step.nodes_before[name] = self.capacity.pop(name, {})
        site = self.sites.pop(name, None)
        if new is not None:
            self.capacity[name] = capacity_of(new)
            self.sites[name] = Site(name, new)
        if site is None or new is None or site.standing != self.sites[name].standing:
            self.open_to.clear()

    def _absorb_ledgers(self, step: Step, key: str, old: Json, new: Json) -> None:
        for ledger in limits_of(key, old) if old is not None else ():
            step.ledgers_before[ledger] = self.limits.pop(ledger, {})
        if new is not None:
            self.limits.update(limits_of(key, new))
        if key.startswith("grant/"):
            self.sums.reburden(key, new)

    def _tell(self, step: Step, at_ms: int) -> None:
        for key, (_, new) in step.changed.items():
            if key == "head" or key.startswith("batch/"):
                continue
            self.revisions.add(key, step.revision, new is not None)
            versions = self.stories.setdefault(key, [])
            versions.append(Told(step.revision, at_ms, step.entries, new))
            if len(versions) > VERSIONS_KEPT:
                del versions[: VERSIONS_KEPT // 2]

    def _reign(self, step: Step, at_ms: int) -> None:
        """Track the leader, the incarnation, and whether restored rows are still being reviewed."""
        head, old = self.head or {}, (step.changed.get("head") or (None, None))[0]
        if old is None or head.get("epoch", 0) > old["epoch"]:
            self.takeovers.append(at_ms)
            self.seized, self.seized_at, self.first = step.stand, step.revision, None
            self.heard.clear()
        elif self.first is None and head.get("count"):  # otherwise it has only started to read
            self.first = step.stand
        self.latest = at_ms, step.stand
        if head.get("count"):
            self.acted_ms = at_ms
        incarnation = head.get("incarnation", "")
        if not self.incarnations or self.incarnations[-1] != incarnation:
            self.incarnations.append(incarnation)
        step.doubting = step.was(MARKER) != incarnation

    def renew(self, lease: str, epoch: int, since_ms: float) -> None:
        """Record that the holder's renewal succeeded. A late answer does not affect a later epoch."""
        self.terms[lease] = max(self.terms.get(lease, (0, 0.0)), (epoch, since_ms))

    # -- after a restore ---------------------------------------------------------------------------------------------

    def restore(self, rows: Sequence[tuple[str, bytes, int]], revision: int, at_ms: int) -> None:
        """Replace all rows by those of a backup and list the acknowledged operations that it lost."""
        self.former.update(self.outcomes)
        self.abandoned, self.horizon = set(), 0
        if self.incarnations:
            self.revisions_before[self.incarnations[-1]] = self.revisions
        self.revisions, self.restored_ms = Revisions(), at_ms
        self.revision, self.serial = max(self.revision, revision), self.serial + 1
        self.times.append((self.revision, at_ms))
        self.rows = {key: (at, read(key, value)) for key, value, at in rows}
        self.kinds, self.shapes, self.sites, self.capacity, self.limits = {}, {}, {}, {}, {}
        self.members, self.active, self.open_to, self.policy, self.outcomes = {}, {}, {}, None, {}
        self.terms, self.phases = {}, {}
        self.past.policies, self.past.left = [], {}
        self.sums = Sums(self.shape)
        nobody = Stand("", 0, 0, 0)
        step = Step(self, (), (), revision, nobody)
        step.changed = {key: (None, content) for key, (_, content) in self.rows.items()}
        self._absorb(step)
        self.unheard = set(self.sites)
        runs = [group_of(replica) for replica in self.kind("replica").values() if phase_of(replica) in RUNS]
        self.past.running, self.past.preempted = {group: [(revision, runs.count(group))] for group in runs}, {}
        self.past.restore(revision, self.kind("replica").values())
        for key, (at, content) in sorted(self.rows.items()):
            if key.startswith("batch/"):
                for entry in (Entry(*one) for one in content["entries"]):
                    if entry.code not in NOT_OUTCOMES:
                        self.outcomes[entry.id] = Outcome(entry.digest, entry.number, entry.code, at, entry.seen)
            elif key != "head":
                self.revisions.add(key, at, True)
                self.stories.setdefault(key, []).append(Told(revision, at_ms, (), {"restored": content}))
        self.lost += sorted(operation for operation in self.acknowledged if operation not in self.outcomes)
        self.acknowledged = {i: v for i, v in self.acknowledged.items() if i in self.outcomes}
        self.incarnations.append(self.head["incarnation"])
        self._forget_attempts()

    def _forget_attempts(self) -> None:
        """Forget attempts made after the backup. They may be made again, on another node and with another result."""
        self.results, self.homes, self.over = {}, {}, {}
        for key, replica in self.kind("replica").items():
            uid, attempt, status = replica["metadata"]["uid"], attempt_of(replica), replica.get("status", {})
            self.over.update({(uid, before): "restored" for before in range(1, attempt)})
            if status.get("result"):
                self.results[uid, attempt] = str(status["result"])
            if phase_of(replica) in HOUSED:
                self.homes[uid, attempt] = str(status["node"])
            if phase_of(replica) == "released":
                self.over[uid, attempt] = "restored"
            else:
                self.releases.pop((key, uid, attempt), None)

    def retell(self, key: str) -> list[str]:
        """Return the history of one object, one line per version."""
        lines, before = [], None
        for told in self.stories.get(key, []):
            by = [e for e in told.entries if e.subject in (key, key.partition("/")[2], key.rpartition("/")[2])]
            said = ", ".join("part of a batch about other objects" for e in by) or "in a batch of others"
            lines.append(f"  {told.at_ms} ms, revision {told.revision}: {said}: {_difference(before, told.content)}")
            before = told.content
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
