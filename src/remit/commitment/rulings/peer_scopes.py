"""Tracks which incarnation of each other scope is accepted, and rejects messages from any other. Pure.

Scopes exchange authority by messages: an offer (accept), a report (credit), a confirmation after a restore (vouch). A
message may arrive late, twice, or after either side was restored and has lost state. So each message names two incarnations,
the sender's and the recipient's. It is processed only if it is addressed to this incarnation and was sent by the one that
this scope has accepted. This is sufficient, because:

- Accepting an incarnation is a separate step, before any new message is sent to the peer. Later messages name the new
  incarnation and are written from books that already ignore messages of the old one, so their content stays true until read.
- A restore ends an incarnation for good, and a replaced incarnation is never accepted again. So no message of an earlier pair
  is ever processed, even if either side has lost state since.

    issuer restored   the holder accepts it, then confirms its holdings   until then the issuer grants nothing to other scopes
    holder restored   the issuer accepts it, then offers the grants anew  until then the holder's grants are void
    both              each accepts the other; then both of the above

The first contact needs a `recognise` claim too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings.registry import BUDGET_ROLES, Coordination, refuse, ruling
from remit.law.ledgers import SCOPE_PREFIX
from remit.model.claims import Accept, AcceptIncarnation, Code, ConfirmHoldings, Credit, Operation, Refused
from remit.model.metadata import DNS_LABEL, RecordMetadata
from remit.model.objects import key_of
from remit.model.records import Grant, Peer, PeerConfirmation, PeerSpec

PEER_PREFIX: Final = key_of("Peer", "")
PEERS_MAX: Final = 10_000
FORMER_INCARNATIONS_MAX: Final = 100
"""Former incarnations kept per peer; the oldest are dropped. `replaces` already rejects a late `recognise` claim. This list
also rejects one whose `replaces` was read after the change.
"""


@ruling(
    AcceptIncarnation,
    BUDGET_ROLES,
    Coordination.HARD,
    "one incarnation of a peer is accepted at a time, and never an earlier one again",
)
def accept_incarnation(draft: Draft, operation: Operation, claim: AcceptIncarnation) -> int | Refused:
    """Accept a new incarnation of a peer. Return how many preceded it. Serials and report numbers restart with it."""
    name = claim.peer.removeprefix(SCOPE_PREFIX)
    if not claim.incarnation or not claim.peer.startswith(SCOPE_PREFIX) or re.fullmatch(DNS_LABEL, name) is None:
        return refuse(
            Code.INVALID,
            f"peer, incarnation: need the name of another scope ({SCOPE_PREFIX}NAME) and its incarnation; got {claim.peer!r}, "
            f"{claim.incarnation!r}",
        )
    record = peer_record(draft, claim.peer)
    if claim.incarnation == record.incarnation:
        return len(record.former)
    if claim.incarnation in record.former:
        return refuse(
            Code.GRANT_VOID,
            f"incarnation {claim.incarnation} of {claim.peer} was replaced and is never accepted again; read the peer's "
            "current incarnation and recognise that one",
        )
    if claim.replaces != record.incarnation:
        return refuse(
            Code.REVISION,
            f"replaces: the accepted incarnation of {claim.peer} is {_describe(record.incarnation)}, not "
            f"{_describe(claim.replaces)}; read the record and retry",
        )
    if draft.lookup(PEER_PREFIX + claim.peer) is None and len(draft.keys(PEER_PREFIX)) >= PEERS_MAX:
        return refuse(Code.LIMIT, f"the scope has reached its limit of {PEERS_MAX} peers")
    closed = closed_peer(record)
    put_peer(draft, claim.peer, replace(closed, incarnation=claim.incarnation, standing=record.standing))
    for key in draft.keys("grant/"):
        _reset_counters(draft, key, claim.peer)
    return len(closed.former)


def check_incarnations(draft: Draft, peer: str, message: Accept | Credit | ConfirmHoldings) -> Refused | None:
    """Refuse a message that is not from the accepted incarnation of `peer` to this incarnation."""
    own, accepted = draft.time.incarnation, peer_record(draft, peer).incarnation
    if message.to != own:
        return refuse(
            Code.GRANT_VOID,
            f"to: the message is addressed to {_describe(message.to)}, this is incarnation {own}; {peer} must recognise it and "
            "send again",
        )
    if not accepted or message.sender != accepted:
        return refuse(
            Code.GRANT_VOID,
            f"sender: the message is from {_describe(message.sender)} of {peer}, accepted here is {_describe(accepted)}; read "
            f"the current incarnation of {peer}, recognise it, and let it send again",
        )
    return None


def awaited_peers(draft: Draft) -> list[str]:
    """Return the peers that have not confirmed their holdings since this scope was restored."""
    peers = [name.removeprefix(PEER_PREFIX) for name in draft.keys(PEER_PREFIX)]
    return [peer for peer in peers if peer_record(draft, peer).standing is PeerConfirmation.AWAITED]


def peers_to_confirm(draft: Draft) -> list[str]:
    """Return the awaited peers that this scope had contact with: they may hold grants that the backup does not contain."""
    if not draft.books.awaited_peers:
        return []
    return [peer for peer in awaited_peers(draft) if peer_record(draft, peer).incarnation or peer_record(draft, peer).former]


def may_have_forgotten_grants(draft: Draft, awaited: Sequence[str]) -> Refused | None:
    """Refuse until these peers have confirmed their holdings: before that, the free amount is not known."""
    if not awaited:
        return None
    own = draft.time.incarnation
    return refuse(
        Code.AWAITING_REPORTS,
        f"the scope was restored: {', '.join(awaited)} must first recognise incarnation {own} and vouch for the grants they "
        "hold; or declare them lost",
    )


def peer_record(draft: Draft, peer: str) -> PeerSpec:
    entry = draft.lookup(PEER_PREFIX + peer)
    return PeerSpec() if entry is None else entry[0].spec


def put_peer(draft: Draft, peer: str, spec: PeerSpec) -> None:
    draft.put(Peer(metadata=RecordMetadata(name=peer), spec=spec))


def closed_peer(record: PeerSpec) -> PeerSpec:
    """Return the record of a peer whose incarnation is no longer accepted and from which nothing is awaited."""
    former = (*record.former, record.incarnation) if record.incarnation else record.former
    return PeerSpec(former=former[-FORMER_INCARNATIONS_MAX:])


def _reset_counters(draft: Draft, key: str, peer: str) -> None:
    """Reset the counters of a grant shared with a restored peer, which may have lost how far it had counted. Messages with the
    old numbers are refused from now on because of their incarnation.
    """
    entry = draft.lookup(key)
    if entry is None:
        return
    grant: Grant = entry[0]
    if grant.spec.issuer == peer:
        draft.put(replace(grant, status=replace(grant.status, serial=0)))
    elif grant.spec.holder == peer and not grant.spec.issuer:
        draft.put(replace(grant, status=replace(grant.status, epoch=0, report=0)))


def _describe(incarnation: str) -> str:
    return f"incarnation {incarnation}" if incarnation else "none"
