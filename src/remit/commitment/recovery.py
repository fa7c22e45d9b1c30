"""Takeover load of all rows, and the distrust rules of a restored scope.

Reads a scope's rows into books and outcomes; it decides nothing and writes nothing.

Rows go in by the same door as new ones (`Draft.put`), in an order in which everything finds what it stands on: places and
tenants, generations and policies, grants from parents to children, replicas, and reservations last, since they post less
while their victims still hold.

It doubts what it holds, what it lent, and what runs; it writes nothing itself.

A backup is a memory of the past, put in the place of the present. Since then replicas were bound and released, and grants came
and went. So in its first batches a new incarnation says:

- every replica that a node may be running becomes `unknown`, until its node reports;
- every node is `unknown` too, and awaited: a replica that was pending then may be running there now, so nothing that must never
  run twice is placed anywhere until each node is ready again, or lost;
- every lease is vacant, at an epoch past any that its holders can have had, also one that the backup does not know;
- every grant held from another scope is void, until its issuer recognises this incarnation and reissues it;
- every grant made to another scope counts as fully used, until its holder reports; and as there may be grants that this
  scope does not even remember, it grants nothing to other scopes until each that it knows has recognised this incarnation and
  vouched for what it holds, or is declared lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable

import msgspec
from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE, Books, Moment
from remit.commitment.draft import Draft
from remit.commitment.outcomes import BATCH, Batch, Entry, Outcomes, batch_key, decode_batch
from remit.commitment.rulings.leases import ANY_LEASE
from remit.commitment.rulings.peer_scopes import PEER, note, on_record
from remit.law.ledgers import SCOPE
from remit.law.lifecycle import edge
from remit.model.kinds import NodeHealth
from remit.model.metadata import Stamp
from remit.model.objects import AnyObject, decode
from remit.model.records import Grant, GrantPhase, GrantStatus, Lease, LeaseSpec, Phase, Replica, Standing, Summary, SummarySpec
from remit.store.chain import Place
from remit.store.protocol import PAGE_ROWS_MAX, Compacted, Corrupt, Head, Page, Row, Store, Unavailable

Revision = Callable[[], int]
"""At which to read now."""

FIRST = ("Region", "NodePool", "Node", "Tenant", "PriorityClass", "Policy", "PolicyRevision", "Generation", "Workload")
TRIES = 3
LOOK_BACK = 16
"""So many sequences at once are looked through for the last batch that left a row."""

LAST = ("Token", "Secret", "Config", "Allotment", "Override", "Peer", "Lease", "Summary")


async def load(store: Store, place: Place, moment: Moment, now: Callable[[], int] | None = None) -> tuple[Books, Outcomes]:
    """Everything as of one revision, at or after the one where this authority's epoch began.

    `now` tells how far the chain has come since by empty batches of its own. The rows are the same there, and a history that is
    compacted meanwhile is not missed.
    """
    at = now or (lambda: place.revision)
    books = Books()
    books.loaded = place.revision
    for kind in FIRST:
        await _absorb_kind(store, books, kind, at, moment)
    await _absorb_grants(store, books, at, moment)
    await _absorb_replicas(store, books, at, moment)
    for kind in LAST:
        await _absorb_kind(store, books, kind, at, moment)
    notes = [(row.revision, row.key) for kind in ("event/", "decision/") async for row in rows(store, kind, at)]
    books.notes = dict.fromkeys(name for _, name in sorted(notes))
    return books, await _load_outcomes(store, place.head, at)


async def rows(store: Store, prefix: str, at: Revision, after: str = "") -> AsyncIterator[Row]:
    while True:
        page = await _page(store, prefix, at, after, PAGE_ROWS_MAX)
        for row in page.rows:
            yield row
        if not page.more:
            return
        after = page.rows[-1].key


async def _page(store: Store, prefix: str, at: Revision, after: str, limit: int) -> Page:
    """A read that was lost is asked again: a takeover has many, and must not begin anew over one of them. So is one whose
    history was compacted on its way, if it can be asked at a later revision.
    """
    for _ in range(TRIES - 1):
        revision = at()
        try:
            return await store.range(prefix, after=after, limit=limit, revision=revision)
        except Unavailable:
            continue
        except Compacted:
            if at() == revision:
                raise
    return await store.range(prefix, after=after, limit=limit, revision=at())


async def _absorb_kind(store: Store, books: Books, kind: str, at: Revision, moment: Moment) -> None:
    async for row in rows(store, f"{kind.lower()}/", at):
        draft = Draft(books, moment, takeover=True)
        draft.put(_decoded(row))
        books.absorb(draft, row.revision, {row.key: row.value})


async def _absorb_grants(store: Store, books: Books, at: Revision, moment: Moment) -> None:
    found = [(row, _decoded(row)) async for row in rows(store, "grant/", at)]
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


async def _absorb_replicas(store: Store, books: Books, at: Revision, moment: Moment) -> None:
    reserved: list[tuple[Row, Replica]] = []
    draft, encoded, last = Draft(books, moment, takeover=True), dict[str, bytes](), dict[str, int]()
    async for row in rows(store, "replica/", at):
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


async def _load_outcomes(store: Store, head: Head, at: Revision) -> Outcomes:
    """From the last batch that left a row; batches without one (takeovers, settlements, beats) decided nothing."""
    last = None
    for after in range(head.sequence - LOOK_BACK, -LOOK_BACK, -LOOK_BACK):
        page = await _page(store, BATCH, at, batch_key(max(after, 0)), LOOK_BACK)
        if page.rows:
            last = _read_batch(page.rows[-1])
            break
    if last is None:
        return Outcomes(head.incarnation, 1, 1)
    outcomes = Outcomes(head.incarnation, last.window, last.horizon)
    async for row in rows(store, BATCH, at, after=batch_key(last.first - 1)):
        outcomes.record(int(row.key.removeprefix(BATCH)), _read_batch(row), row.revision)
    return outcomes


def _read_batch(row: Row) -> Batch:
    try:
        return decode_batch(row.value)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Corrupt(f"row {row.key} does not decode ({error}); restore a backup") from None


LEASE_EPOCHS = 1_000_000
MARKER = "incarnation"
"""The row that says which incarnation these books were last doubted for."""


async def is_due(store: Store, incarnation: str) -> bool:
    row = await store.get(MARKER)
    return row is None or row.value.decode() != incarnation


def doubt(draft: Draft, names: Iterable[str]) -> None:
    """Make these replicas unknown, where a node may be running them."""
    for name in names:
        found = draft.replica(name)
        if found is None or edge("distrust", found[0].status.phase) is None:
            continue
        status = replace(found[0].status, phase=Phase.UNKNOWN, before=found[0].status.phase.value, reason="restored")
        draft.put_replica(name, found[0], replace(found[0], status=status))


def is_new(place: Place, kept: bool) -> bool:
    """Has this store seen takeovers only, and nothing else? A takeover counts epoch and sequence up by one, a restore counts
    the epoch up by more, and whatever was decided is `kept`.
    """
    return not kept and place.head.sequence == place.head.epoch


def vacate(draft: Draft, epoch: int, *, new: bool) -> None:
    """Nobody leads, and no epoch of before is current again: the store's own epoch is past every one that it has had.
    In a `new` store nothing came before.
    """
    for name in draft.keys("lease/"):
        found = draft.thing(name)
        if found is not None:
            spec = replace(found[0].spec, holder="", epoch=max(found[0].spec.epoch + 1, epoch * LEASE_EPOCHS))
            draft.put(replace(found[0], spec=spec))
    if not new:
        draft.put(Lease(metadata=Stamp(name=ANY_LEASE), spec=LeaseSpec(epoch=epoch * LEASE_EPOCHS)))


def await_nodes(draft: Draft) -> None:
    """Those that were lost as well: one may have come back since, and run what nobody here knows of."""
    for name in draft.keys("node/"):
        found = draft.thing(name)
        if found is None:
            continue
        draft.put(replace(found[0], status=replace(found[0].status, health=NodeHealth.UNKNOWN)))
        note = SummarySpec(holder=name, epoch=0, sequence=0)
        draft.put(Summary(metadata=Stamp(name=AWAITED_NODE + found[0].metadata.name), spec=note))


def disown(draft: Draft) -> None:
    """Void what is held, count what was lent as used, and note the scopes that must vouch.

    Serials and reports count anew between two incarnations, so nothing is refused for a number that was lost with the past.
    """
    holders = {SCOPE + name.removeprefix("region/"): None for name in draft.keys("region/")}
    holders |= {name.removeprefix(PEER): None for name in draft.keys(PEER)}
    for name in draft.keys("grant/"):
        found = draft.thing(name)
        if found is None:
            continue
        grant: Grant = found[0]
        if grant.spec.issuer:
            draft.put(replace(grant, status=replace(grant.status, phase=GrantPhase.VOID, serial=0)))
        elif grant.spec.holder.startswith(SCOPE):
            holders[grant.spec.holder] = None
            status = GrantStatus(phase=GrantPhase.LIVE, deadline=grant.status.deadline, serial=grant.status.serial + 1)
            draft.put(replace(grant, status=status))
    for holder in holders:
        note(draft, holder, replace(on_record(draft, holder), standing=Standing.AWAITED))


async def acknowledged_after(store: Store, sequence: int) -> AsyncIterator[tuple[int, Entry]]:
    """Every operation that `store` answered after that sequence: what a restore of an older backup has lost."""
    revision = await store.revision()
    async for row in rows(store, BATCH, lambda: revision, after=batch_key(sequence)):
        for entry in decode_batch(row.value).entries:
            yield int(row.key.removeprefix(BATCH)), entry
