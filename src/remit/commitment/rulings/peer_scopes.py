"""Which incarnation of another scope is accepted; rejects messages of any other.

Letters of any other are refused. Pure.

Authority crosses a border by letters: an offer (accept), a report (credit), a word after a restore (vouch). They may come late,
twice, or after either side was restored and has forgotten. So each names two incarnations, the sender's and the recipient's. It
is heeded only if it is addressed to this one, and sent by the one that this scope recognises. Why that is enough:

- To recognise is a step of its own, before anything new is said to the peer. The letters that follow name the new incarnation,
  and were written from books in which the old one's letters no longer count: what they say stays true until they are read.
- An incarnation ends for good at a restore, and one that was replaced is not recognised again. So no letter of a past pair is
  ever heeded, whatever either side has forgotten since.

    issuer restored   the holder recognises it, then vouches              until then the issuer grants nothing to other scopes
    holder restored   the issuer recognises it, then offers anew          until then the holder's grants are void
    both              each recognises the other; then both of the above

Nobody is trusted at first sight: the first contact is a `recognise` too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings.registry import BUDGETEERS, Coordination, refuse, ruling
from remit.law.ledgers import SCOPE
from remit.model.claims import Accept, Code, Credit, Operation, Recognise, Refused, Vouch
from remit.model.metadata import DNS_LABEL, Stamp
from remit.model.objects import key_of
from remit.model.records import Grant, Peer, PeerSpec, Standing

PEER: Final = key_of("Peer", "")
PEERS_MAX: Final = 10_000
FORMER_MAX: Final = 100
"""The oldest fall out. What guards against a late word is `replaces`; this guards against one that reads it too late."""


@ruling(Recognise, BUDGETEERS, Coordination.HARD, "of a peer one incarnation is dealt with, and never again one before it")
def recognise(draft: Draft, operation: Operation, claim: Recognise) -> int | Refused:
    """Answers how many came before. Between two incarnations serials and reports count anew."""
    name = claim.peer.removeprefix(SCOPE)
    if not claim.incarnation or not claim.peer.startswith(SCOPE) or re.fullmatch(DNS_LABEL, name) is None:
        return refuse(Code.INVALID, f"peer, incarnation: {SCOPE}NAME of another scope, and which incarnation of it")
    known = on_record(draft, claim.peer)
    if claim.incarnation == known.incarnation:
        return len(known.former)
    if claim.incarnation in known.former:
        return refuse(
            Code.GRANT_VOID,
            f"incarnation {claim.incarnation} of {claim.peer} is over here: ask it anew; a restore there starts another",
        )
    if claim.replaces != known.incarnation:
        return refuse(Code.REVISION, f"on record for {claim.peer} is {_named(known.incarnation)}, not {_named(claim.replaces)}")
    if draft.thing(PEER + claim.peer) is None and len(draft.keys(PEER)) >= PEERS_MAX:
        return refuse(Code.LIMIT, f"there are {PEERS_MAX} peers already")
    ended = parted(known)
    note(draft, claim.peer, replace(ended, incarnation=claim.incarnation, standing=known.standing))
    for key in draft.keys("grant/"):
        _count_anew(draft, key, claim.peer)
    return len(ended.former)


def misaddressed(draft: Draft, peer: str, letter: Accept | Credit | Vouch) -> Refused | None:
    """Is this letter between two others than this incarnation and the one of `peer` that is recognised here?"""
    own, known = draft.moment.incarnation, on_record(draft, peer).incarnation
    if letter.to != own:
        return refuse(
            Code.GRANT_VOID,
            f"addressed to {_named(letter.to)}, this is incarnation {own}: {peer} recognises it and writes anew",
        )
    if not known or letter.sender != known:
        return refuse(
            Code.GRANT_VOID,
            f"sent by {_named(letter.sender)} of {peer}, recognised here is {_named(known)}: "
            f"ask {peer} which it is now, recognise that, and it writes anew",
        )
    return None


def awaited_peers(draft: Draft) -> list[str]:
    """The peers that have not vouched since this scope was restored."""
    peers = [name.removeprefix(PEER) for name in draft.keys(PEER)]
    return [peer for peer in peers if on_record(draft, peer).standing is Standing.AWAITED]


def lenders(draft: Draft) -> list[str]:
    """Those of them that this scope has dealt with, so that they may hold of it what it does not remember."""
    if not draft.books.peers_awaited:
        return []
    return [peer for peer in awaited_peers(draft) if on_record(draft, peer).incarnation or on_record(draft, peer).former]


def forgetful(draft: Draft, unheard: Sequence[str]) -> Refused | None:
    """Until these have been heard of, what is still there to be given or drawn is not known."""
    if not unheard:
        return None
    own = draft.moment.incarnation
    return refuse(
        Code.AWAITING_REPORTS,
        f"restored: first {', '.join(unheard)} recognise incarnation {own} and vouch for what they hold, or are declared lost",
    )


def on_record(draft: Draft, peer: str) -> PeerSpec:
    found = draft.thing(PEER + peer)
    return PeerSpec() if found is None else found[0].spec


def note(draft: Draft, peer: str, spec: PeerSpec) -> None:
    draft.put(Peer(metadata=Stamp(name=peer), spec=spec))


def parted(known: PeerSpec) -> PeerSpec:
    """The record once the incarnation on it is dealt with no longer, and nothing is waited for."""
    former = (*known.former, known.incarnation) if known.incarnation else known.former
    return PeerSpec(former=former[-FORMER_MAX:])


def _count_anew(draft: Draft, key: str, peer: str) -> None:
    """A restored peer may have forgotten how far it had counted; the letters that did count are refused from now on."""
    found = draft.thing(key)
    if found is None:
        return
    grant: Grant = found[0]
    if grant.spec.issuer == peer:
        draft.put(replace(grant, status=replace(grant.status, serial=0)))
    elif grant.spec.holder == peer and not grant.spec.issuer:
        draft.put(replace(grant, status=replace(grant.status, epoch=0, report=0)))


def _named(incarnation: str) -> str:
    return f"incarnation {incarnation}" if incarnation else "none"
