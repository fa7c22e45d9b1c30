"""Uncommitted changes of one batch over the books: what rulings read and write. No I/O.

A draft reads through to the books, and its parts keep copies of what the batch changes: object rows here, replica rows and
their postings in draft_replicas.py, ledgers in draft_ledgers.py, topology counts in peer_counts.py, compiled requirements in
generations.py. An issued grant posts its outstanding amount on its parent, and a budget's shares on the tenants' emergency
quota.
"""

from __future__ import annotations

from typing import Any

from remit.commitment.books import Books, DecisionTime
from remit.commitment.changes import Changes
from remit.commitment.draft_ledgers import DraftLedgers
from remit.commitment.draft_replicas import DraftReplicas
from remit.commitment.generations import DraftRequirements, find_object
from remit.commitment.peer_counts import DraftPeerCounts
from remit.law.charges import post_charge_difference
from remit.law.ledgers import deadline_ms
from remit.model.claims import Refused
from remit.model.kinds import Node, Tenant, Workload
from remit.model.kinds.registry import AnyObject
from remit.model.objects import key
from remit.model.records import Generation, Grant, PolicyRevision, Replica


class Draft:
    """A batch that is being decided. A `fork` starts with everything in this draft, and is either discarded or taken over by
    `absorb`.
    """

    __slots__ = (
        "books", "changes", "fence_results", "ledgers", "peers", "replicas", "requirements", "takeover", "time", "uids_issued",
    )  # fmt: skip

    def __init__(self, books: Books, time: DecisionTime, *, takeover: bool = False, changes: Changes | None = None) -> None:
        self.books, self.time, self.takeover = books, time, takeover
        self.changes = Changes() if changes is None else changes
        self.ledgers = DraftLedgers(books.nodes, books.grants, self.changes)
        self.requirements = DraftRequirements(books.requirements, self.changes, books.objects)
        self.peers = DraftPeerCounts(books.peers, books.requirements, self.changes, self.ledgers, self.requirements)
        self.replicas = DraftReplicas(books, self.changes, self.ledgers, self.requirements, self.peers)
        self.uids_issued = 0
        self.fence_results: dict[tuple[str, str, str, int], Refused | None] = {}
        """Cached results of the fencing check. Valid while no object changes in this draft."""

    def fork(self) -> Draft:
        """Return a draft that starts as a copy of this one. Writes to it do not affect this draft."""
        copy = Draft(self.books, self.time, takeover=self.takeover, changes=self.changes.copy())
        copy.requirements.take_interner(self.requirements)
        copy.peers.copy_terms(self.peers)
        copy.uids_issued = self.uids_issued
        return copy

    def absorb(self, fork: Draft) -> None:
        """Take over the state of a fork of this draft."""
        self.changes.replace_with(fork.changes)
        self.ledgers.add_copied(fork.ledgers)
        self.requirements.replace_with(fork.requirements)
        self.peers.replace_with(fork.peers)
        self.uids_issued, self.fence_results = fork.uids_issued, fork.fence_results

    def follow(self, time: DecisionTime) -> Draft:
        """Return a draft for the next batch, started before this one is absorbed."""
        following = self.fork()
        following.time, following.uids_issued = time, 0
        return following

    def lookup(self, name: str) -> tuple[Any, int] | None:
        """Return an object and its revision, which is -1 if the draft has written it."""
        return find_object(self.books.objects, self.changes, name)

    def keys(self, prefix: str) -> list[str]:
        present = dict.fromkeys(self.books.keys(prefix), True)
        present.update({name: obj is not None for name, obj in self.changes.objects.items() if name.startswith(prefix)})
        return sorted(name for name in present if present[name])

    def current_policy(self) -> PolicyRevision | None:
        return self.changes.policy if self.changes.policy is not None else self.books.policy

    def put(self, obj: AnyObject) -> None:
        """Write one object of any kind, and post what follows from it to the ledgers."""
        name = key(obj)
        if isinstance(obj, Replica):
            entry = self.replicas.get(name)
            self.replicas.put(name, None if entry is None else entry[0], obj)
            return
        before = (self.lookup(name) or (None,))[0]
        self.changes.objects[name] = obj
        post_charge_difference(self.changes.used, before, obj)
        self.fence_results.clear()
        match obj:
            case Node():
                self.ledgers.put_node(obj)
            case Tenant():
                self.ledgers.put_tenant(obj)
            case Grant():
                deadline = deadline_ms(obj, self.time.boot, self.time.now_ms, new_term=self.takeover)
                self.ledgers.put_grant(obj, before if isinstance(before, Grant) else None, deadline)
            case Generation() | Workload():
                self.requirements.mark_changed(obj)
            case PolicyRevision():
                latest = self.current_policy()
                if latest is None or obj.spec.number >= latest.spec.number:
                    self.requirements.set_policy(obj)

    def delete(self, name: str) -> None:
        """Delete one object. The caller has checked that nothing depends on it."""
        if name.startswith("replica/"):
            entry = self.replicas.get(name)
            if entry is not None:
                self.replicas.put(name, entry[0], None)
            return
        row = self.lookup(name)
        if row is None:
            return
        self.changes.objects[name] = None
        post_charge_difference(self.changes.used, row[0], None)
        match row[0]:
            case Node() as node:
                self.ledgers.drop_node(node)
            case Tenant() | Grant() as owner:
                self.ledgers.drop(owner)
            case Generation() | Workload() as changed:
                self.requirements.mark_changed(changed)

    def put_note(self, obj: AnyObject) -> None:
        """Write an event or a decision. No decision depends on these, and the oldest are deleted when there are too many."""
        self.changes.notes[key(obj)] = obj

    def new_uid(self) -> str:
        """Return an identifier unique over the whole life of this scope: incarnation, batch sequence, and a count within the
        batch.

        The incarnation is needed because a backup does not know ids issued after it was made: they could be issued again.
        """
        self.uids_issued += 1
        return f"{self.time.incarnation}-{self.time.sequence:x}-{self.uids_issued:x}"
