"""What did the last authority leave? Reads a scope's rows into books and outcomes; it decides nothing and writes nothing.

Rows go in by the same door as new ones (`Draft.put`), in an order in which everything finds what it stands on: places and
tenants, generations and policies, grants from parents to children, replicas, and reservations last, since they post less
while their victims still hold.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from remit.commitment.books import Books, Moment
from remit.commitment.draft import Draft
from remit.commitment.outcomes import BATCH, Batch, Outcomes, batch_key, decode_batch
from remit.model.objects import AnyObject, decode
from remit.model.records import Grant, Phase, Replica
from remit.store.chain import Place
from remit.store.protocol import PAGE_ROWS_MAX, Corrupt, Row, Store

FIRST = ("Region", "NodePool", "Node", "Tenant", "PriorityClass", "Policy", "PolicyRevision", "Generation", "Workload")
LOOK_BACK = 16
"""So many sequences at once are looked through for the last batch that left a row."""

LAST = ("Secret", "Config", "Allotment", "Peer", "Lease", "Summary")


async def load(store: Store, place: Place, moment: Moment) -> tuple[Books, Outcomes]:
    """Everything as of one revision, at or after the one where this authority's epoch began."""
    books = Books()
    books.loaded = place.revision
    for kind in FIRST:
        await _absorb_kind(store, books, kind, place.revision, moment)
    await _absorb_grants(store, books, place.revision, moment)
    await _absorb_replicas(store, books, place.revision, moment)
    for kind in LAST:
        await _absorb_kind(store, books, kind, place.revision, moment)
    notes = [(row.revision, row.key) for kind in ("event/", "decision/") async for row in rows(store, kind, place.revision)]
    books.notes = dict.fromkeys(name for _, name in sorted(notes))
    return books, await _load_outcomes(store, place)


async def rows(store: Store, prefix: str, revision: int, after: str = "") -> AsyncIterator[Row]:
    while True:
        page = await store.range(prefix, after=after, limit=PAGE_ROWS_MAX, revision=revision)
        for row in page.rows:
            yield row
        if not page.more:
            return
        after = page.rows[-1].key


async def _absorb_kind(store: Store, books: Books, kind: str, revision: int, moment: Moment) -> None:
    async for row in rows(store, f"{kind.lower()}/", revision):
        draft = Draft(books, moment, takeover=True)
        draft.put(_decoded(row))
        books.absorb(draft, row.revision, {row.key: row.value})


async def _absorb_grants(store: Store, books: Books, revision: int, moment: Moment) -> None:
    found = [(row, _decoded(row)) async for row in rows(store, "grant/", revision)]
    grants = {thing.metadata.name: (row, thing) for row, thing in found if isinstance(thing, Grant)}
    while grants:
        ready = [name for name, (_, grant) in grants.items() if grant.spec.parent not in grants]
        if not ready:
            raise Corrupt(f"grants {', '.join(sorted(grants))} are carved out of each other; restore a backup")
        for name in ready:
            row, grant = grants.pop(name)
            draft = Draft(books, moment, takeover=True)
            draft.put(grant)
            books.absorb(draft, row.revision, {row.key: row.value})


async def _absorb_replicas(store: Store, books: Books, revision: int, moment: Moment) -> None:
    reserved: list[tuple[Row, Replica]] = []
    draft, encoded, last = Draft(books, moment, takeover=True), dict[str, bytes](), dict[str, int]()
    async for row in rows(store, "replica/", revision):
        replica = _decoded(row)
        if not isinstance(replica, Replica):
            raise Corrupt(f"{row.key} is a {type(replica).__name__}; restore a backup")
        if replica.status.phase is Phase.RESERVED:
            reserved.append((row, replica))
            continue
        draft.put_replica(row.key, None, replica)
        encoded[row.key], last[row.key] = row.value, row.revision
        if len(encoded) >= PAGE_ROWS_MAX:
            _absorb_page(books, draft, encoded, last)
            draft, encoded, last = Draft(books, moment, takeover=True), {}, {}
    _absorb_page(books, draft, encoded, last)
    for row, replica in reserved:
        draft = Draft(books, moment, takeover=True)
        draft.put_replica(row.key, None, replica)
        _absorb_page(books, draft, {row.key: row.value}, {row.key: row.revision})


def _absorb_page(books: Books, draft: Draft, encoded: dict[str, bytes], revisions: dict[str, int]) -> None:
    books.absorb(draft, 0, encoded)
    for name, revision in revisions.items():
        books.replicas[name] = (revision, encoded[name])


def _decoded(row: Row) -> AnyObject:
    try:
        return decode(row.value)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Corrupt(f"row {row.key} does not decode ({error}); restore a backup") from None


async def _load_outcomes(store: Store, place: Place) -> Outcomes:
    """From the last batch that left a row; batches without one (takeovers, settlements) decided nothing."""
    head = place.head
    last = None
    for after in range(head.sequence - LOOK_BACK, -LOOK_BACK, -LOOK_BACK):
        page = await store.range(BATCH, after=batch_key(max(after, 0)), limit=LOOK_BACK, revision=place.revision)
        if page.rows:
            last = _read_batch(page.rows[-1])
            break
    if last is None:
        return Outcomes(head.incarnation, 1, 1)
    outcomes = Outcomes(head.incarnation, last.window, last.horizon)
    async for row in rows(store, BATCH, place.revision, after=batch_key(last.first - 1)):
        outcomes.record(int(row.key.removeprefix(BATCH)), _read_batch(row), row.revision)
    return outcomes


def _read_batch(row: Row) -> Batch:
    try:
        return decode_batch(row.value)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Corrupt(f"row {row.key} does not decode ({error}); restore a backup") from None
