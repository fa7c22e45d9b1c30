"""Loads all rows at takeover, and marks the state of a restored scope as unconfirmed.

Loading: rows enter the books through the same code as new ones (`Draft.put`), in an order that satisfies references: kind by
kind in the order of the registry, grants from parents to children, and reservations after all other replicas, because they
post less while their victims still hold capacity. Loading writes nothing.

Restore: a backup is older than the present. Since it was made, replicas were bound and released, and grants were made and
returned. The first batches of a new incarnation therefore change the restored state (the authority commits them):

- Every replica that a node may be running becomes `unknown` until its node reports.
- Every node becomes `unknown` and is awaited. A replica that was pending in the backup may be running there, so no workload
  that must never run twice is placed until every node is ready again or lost.
- Every lease becomes vacant, at an epoch higher than any that its holders can have had, also leases missing in the backup.
- Every grant held from another scope is void until its issuer accepts this incarnation and reissues it.
- Every grant made to another scope counts as fully used until its holder reports. Grants may also be missing in the backup, so
  this scope grants nothing to other scopes until each known scope has accepted this incarnation and confirmed its holdings, or
  is declared lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

import msgspec
from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE, Books, DecisionTime
from remit.commitment.draft import Draft
from remit.commitment.outcomes import BATCH_PREFIX, AuditEntry, BatchRecord, Outcomes, batch_key, decode_batch
from remit.commitment.rulings.leases import LEASE_EPOCH_RECORD
from remit.commitment.rulings.peer_scopes import PEER_PREFIX, peer_record, put_peer
from remit.law.ledgers import SCOPE_PREFIX
from remit.law.lifecycle import find_transition
from remit.model.kinds import NodeHealth
from remit.model.kinds.registry import DEFINITIONS, AnyObject
from remit.model.metadata import RecordMetadata
from remit.model.objects import decode
from remit.model.records import (
    Grant,
    GrantPhase,
    GrantStatus,
    Lease,
    LeaseSpec,
    PeerConfirmation,
    Phase,
    Replica,
    Summary,
    SummarySpec,
)
from remit.store.chain import ChainPosition
from remit.store.protocol import PAGE_ROWS_MAX, Compacted, Corrupt, Head, Page, Row, Store, Unavailable

RevisionSource = Callable[[], int]
"""Returns the revision to read at."""

READ_ATTEMPTS = 3
LOOKBACK_SEQUENCES = 16
"""Sequences read per step when searching backwards for the last batch that has a row."""


async def load(
    store: Store, position: ChainPosition, time: DecisionTime, now: Callable[[], int] | None = None
) -> tuple[Books, Outcomes]:
    """Load everything as of one revision, at or after the one at which this authority's epoch began.

    `now` returns the revision that the chain has reached by this authority's own empty batches. The rows there are
    identical, and reading at a later revision survives a compaction of the earlier one.
    """
    revision_now = now or (lambda: position.revision)
    books = Books()
    books.loaded_revision = position.revision
    notes: list[tuple[int, str]] = []
    for definition in DEFINITIONS:
        if definition.note:
            notes += [(row.revision, row.key) async for row in read_rows(store, f"{definition.prefix}/", revision_now)]
        else:
            absorb = _ABSORBERS.get(definition.kind, _absorb_rows)
            await absorb(store, books, f"{definition.prefix}/", revision_now, time)
    books.notes = dict.fromkeys(name for _, name in sorted(notes))
    return books, await _load_outcomes(store, position.head, revision_now)


async def read_rows(store: Store, prefix: str, revision_now: RevisionSource, after: str = "") -> AsyncIterator[Row]:
    while True:
        page = await _read_page(store, prefix, revision_now, after, PAGE_ROWS_MAX)
        for row in page.rows:
            yield row
        if not page.more:
            return
        after = page.rows[-1].key


async def _read_page(store: Store, prefix: str, revision_now: RevisionSource, after: str, limit: int) -> Page:
    """Read one page, with retries.

    A takeover reads many pages and must not start over because one read failed. A read whose revision was compacted is
    repeated at a later revision, if there is one.
    """
    for _ in range(READ_ATTEMPTS - 1):
        revision = revision_now()
        try:
            return await store.range(prefix, after=after, limit=limit, revision=revision)
        except Unavailable:
            continue
        except Compacted:
            if revision_now() == revision:
                raise
    return await store.range(prefix, after=after, limit=limit, revision=revision_now())


async def _absorb_rows(store: Store, books: Books, prefix: str, revision_now: RevisionSource, time: DecisionTime) -> None:
    async for row in read_rows(store, prefix, revision_now):
        draft = Draft(books, time, takeover=True)
        draft.put(_decode_row(row))
        books.absorb(draft.changes, time, row.revision, {row.key: row.value})


async def _absorb_grants(store: Store, books: Books, prefix: str, revision_now: RevisionSource, time: DecisionTime) -> None:
    """Absorb grants from parents to children."""
    rows = [(row, _decode_row(row)) async for row in read_rows(store, prefix, revision_now)]
    grants = {obj.metadata.name: (row, obj) for row, obj in rows if isinstance(obj, Grant)}
    while grants:
        ready = [name for name, (_, grant) in grants.items() if grant.spec.parent not in grants]
        if not ready:
            raise Corrupt(f"grants {', '.join(sorted(grants))} form a cycle of parents; restore a backup")
        for name in ready:
            row, grant = grants.pop(name)
            draft = Draft(books, time, takeover=True)
            draft.put(grant)
            books.absorb(draft.changes, time, row.revision, {row.key: row.value})


async def _absorb_replicas(store: Store, books: Books, prefix: str, revision_now: RevisionSource, time: DecisionTime) -> None:
    """Absorb replicas page by page, and reservations last."""
    reserved: list[tuple[Row, Replica]] = []
    draft, encoded, revisions = Draft(books, time, takeover=True), dict[str, bytes](), dict[str, int]()
    async for row in read_rows(store, prefix, revision_now):
        replica = _decode_row(row)
        if not isinstance(replica, Replica):
            raise Corrupt(f"row {row.key} contains a {type(replica).__name__}, not a Replica; restore a backup")
        if replica.status.phase is Phase.RESERVED:
            reserved.append((row, replica))
            continue
        draft.replicas.put(row.key, None, replica)
        encoded[row.key], revisions[row.key] = row.value, row.revision
        if len(encoded) >= PAGE_ROWS_MAX:
            _absorb_page(books, draft, encoded, revisions)
            draft, encoded, revisions = Draft(books, time, takeover=True), {}, {}
    _absorb_page(books, draft, encoded, revisions)
    for row, replica in reserved:
        draft = Draft(books, time, takeover=True)
        draft.replicas.put(row.key, None, replica)
        _absorb_page(books, draft, {row.key: row.value}, {row.key: row.revision})


_ABSORBERS: Final = {"Grant": _absorb_grants, "Replica": _absorb_replicas}
"""Kinds whose rows are absorbed in an order of their own."""


def _absorb_page(books: Books, draft: Draft, encoded: dict[str, bytes], revisions: dict[str, int]) -> None:
    books.absorb(draft.changes, draft.time, 0, encoded)
    for name, revision in revisions.items():
        books.replicas[name] = (revision, encoded[name])


def _decode_row(row: Row) -> AnyObject:
    try:
        return decode(row.value)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Corrupt(f"row {row.key} does not decode: {error}; restore a backup") from None


async def _load_outcomes(store: Store, head: Head, revision_now: RevisionSource) -> Outcomes:
    """Load outcomes, starting from the last batch that has a row. Batches without one (takeovers, settlements, heartbeats)
    decided nothing.
    """
    last = None
    for after in range(head.sequence - LOOKBACK_SEQUENCES, -LOOKBACK_SEQUENCES, -LOOKBACK_SEQUENCES):
        page = await _read_page(store, BATCH_PREFIX, revision_now, batch_key(max(after, 0)), LOOKBACK_SEQUENCES)
        if page.rows:
            last = _decode_batch_row(page.rows[-1])
            break
    if last is None:
        return Outcomes(head.incarnation, 1, 1)
    outcomes = Outcomes(head.incarnation, last.window, last.horizon)
    async for row in read_rows(store, BATCH_PREFIX, revision_now, after=batch_key(last.first - 1)):
        outcomes.record(int(row.key.removeprefix(BATCH_PREFIX)), _decode_batch_row(row), row.revision)
    return outcomes


def _decode_batch_row(row: Row) -> BatchRecord:
    try:
        return decode_batch(row.value)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Corrupt(f"row {row.key} does not decode: {error}; restore a backup") from None


LEASE_EPOCHS_PER_STORE_EPOCH = 1_000_000
INCARNATION_KEY = "incarnation"
"""Key of the row that names the incarnation for which the state was last marked as unconfirmed."""


async def needs_distrust(store: Store, incarnation: str) -> bool:
    row = await store.get(INCARNATION_KEY)
    return row is None or row.value.decode() != incarnation


def mark_replicas_unknown(draft: Draft, names: Iterable[str]) -> None:
    """Mark these replicas unknown, where a node may be running them."""
    for name in names:
        entry = draft.replicas.get(name)
        if entry is None or find_transition("distrust", entry[0].status.phase) is None:
            continue
        status = replace(entry[0].status, phase=Phase.UNKNOWN, before=entry[0].status.phase.value, reason="restored")
        draft.replicas.put(name, entry[0], replace(entry[0], status=status))


def is_new_store(position: ChainPosition, has_batches: bool) -> bool:
    """Return whether this store has seen only takeovers. A takeover raises epoch and sequence by one each, a restore raises the
    epoch by more, and every decided batch leaves a row (`has_batches`).
    """
    return not has_batches and position.head.sequence == position.head.epoch


def vacate_leases(draft: Draft, epoch: int, *, new: bool) -> None:
    """Vacate all leases and raise their epochs, so that no earlier epoch is ever current again.

    The store's own epoch is higher than in any earlier incarnation, which makes the new lease epochs higher too. In a `new`
    store there are no earlier epochs.
    """
    for name in draft.keys("lease/"):
        entry = draft.lookup(name)
        if entry is not None:
            spec = replace(entry[0].spec, holder="", epoch=max(entry[0].spec.epoch + 1, epoch * LEASE_EPOCHS_PER_STORE_EPOCH))
            draft.put(replace(entry[0], spec=spec))
    if not new:
        draft.put(
            Lease(metadata=RecordMetadata(name=LEASE_EPOCH_RECORD), spec=LeaseSpec(epoch=epoch * LEASE_EPOCHS_PER_STORE_EPOCH))
        )


def mark_nodes_unknown(draft: Draft) -> None:
    """Mark every node unknown and awaited. Lost nodes too: one may have returned since the backup and run replicas unknown
    here.
    """
    for name in draft.keys("node/"):
        entry = draft.lookup(name)
        if entry is None:
            continue
        draft.put(replace(entry[0], status=replace(entry[0].status, health=NodeHealth.UNKNOWN)))
        note = SummarySpec(holder=name, epoch=0, sequence=0)
        draft.put(Summary(metadata=RecordMetadata(name=AWAITED_NODE + entry[0].metadata.name), spec=note))


def void_grants(draft: Draft) -> None:
    """Void grants held from other scopes, count grants made to them as used, and list the scopes that must confirm their
    holdings.

    Serials and report numbers restart between two incarnations, so no message is refused because of a number lost in the
    restore.
    """
    holders = {SCOPE_PREFIX + name.removeprefix("region/"): None for name in draft.keys("region/")}
    holders |= {name.removeprefix(PEER_PREFIX): None for name in draft.keys(PEER_PREFIX)}
    for name in draft.keys("grant/"):
        entry = draft.lookup(name)
        if entry is None:
            continue
        grant: Grant = entry[0]
        if grant.spec.issuer:
            draft.put(replace(grant, status=replace(grant.status, phase=GrantPhase.VOID, serial=0)))
        elif grant.spec.holder.startswith(SCOPE_PREFIX):
            holders[grant.spec.holder] = None
            status = GrantStatus(phase=GrantPhase.LIVE, deadline=grant.status.deadline, serial=grant.status.serial + 1)
            draft.put(replace(grant, status=status))
    for holder in holders:
        put_peer(draft, holder, replace(peer_record(draft, holder), standing=PeerConfirmation.AWAITED))


async def acknowledged_after(store: Store, sequence: int) -> AsyncIterator[tuple[int, AuditEntry]]:
    """Yield the sequence and entry of every operation answered after this sequence. Restoring a backup that was taken at this
    sequence loses them.
    """
    revision = await store.revision()
    async for row in read_rows(store, BATCH_PREFIX, lambda: revision, after=batch_key(sequence)):
        for entry in decode_batch(row.value).entries:
            yield int(row.key.removeprefix(BATCH_PREFIX)), entry
