"""What may a restored scope still believe? It doubts what it holds, what it lent, and what runs; it writes nothing itself.

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

from collections.abc import AsyncIterator, Iterable

from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE
from remit.commitment.draft import Draft
from remit.commitment.leasing import ANY_LEASE
from remit.commitment.loading import rows
from remit.commitment.outcomes import BATCH, Entry, batch_key, decode_batch
from remit.commitment.recognising import PEER, note, on_record
from remit.law.ledgers import SCOPE
from remit.law.lifecycle import edge
from remit.model.fields import Stamp
from remit.model.kinds import NodeHealth
from remit.model.records import Grant, GrantPhase, GrantStatus, Lease, LeaseSpec, Phase, Standing, Summary, SummarySpec
from remit.store.chain import Place
from remit.store.protocol import Store

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
