"""Which replicas hold room, when is it the same room, and what do they post for it? No ledger is known here.

The authority posts by these lines, and so does whoever keeps a copy of its books; what each row comes to is said once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from remit.law.fit import Ask
from remit.law.ledgers import DEVICE
from remit.law.lifecycle import HOLDS
from remit.model.records import Phase, Replica

Pairs = tuple[tuple[str, int], ...]

UNSETTLED = HOLDS - {Phase.BOUND, Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING}
"""Phases that hold room, but in which a replica is not, or no longer, one that works."""


class Held(Protocol):
    """As much of a replica's status as its postings depend on."""

    @property
    def phase(self) -> Phase: ...
    @property
    def devices(self) -> Mapping[str, int]: ...
    @property
    def grants(self) -> tuple[str, ...]: ...
    @property
    def victims(self) -> Mapping[str, str]: ...


Find = Callable[[str, str], "tuple[Held, Ask] | None"]
"""A replica, by its key, and what it asks for; None unless this very copy of it still holds its room."""


def copy_of(replica: Replica) -> str:
    """Which attempt of which replica: a name is given again once its replica was forgotten, and attempts count anew."""
    return f"{replica.metadata.uid}/{replica.status.attempt}"


def held_by(replica: Replica, copy: str) -> bool:
    """Does this very copy still hold its room?"""
    return replica.status.phase in HOLDS and copy_of(replica) == copy


def same_hold(old: Replica, new: Replica) -> bool:
    a, b = old.status, new.status
    reserved = Phase.RESERVED in (a.phase, b.phase)
    return a.node == b.node and a.devices == b.devices and a.grants == b.grants and not reserved


def on_node(ask: Ask, devices: Mapping[str, int]) -> Pairs:
    """What a replica takes of its node: its resources, and the devices that it was given."""
    return (*ask.resources, *((DEVICE + device, share) for device, share in devices.items())) if devices else ask.resources


def needs(held: Held, ask: Ask, find: Find) -> tuple[Pairs, list[Pairs]]:
    """What a replica that holds room posts: on its node, and on each of its grants. A reservation whose victims still hold
    posts only what their going will not free.
    """
    pairs = on_node(ask, held.devices)
    if held.phase is not Phase.RESERVED or not held.victims:
        return pairs, [ask.charge.pairs] * len(held.grants)
    wanted, charges = dict(pairs), [dict(ask.charge.pairs) for _ in held.grants]
    for victim, copy in held.victims.items():
        found = find(victim, copy)
        if found is None:
            continue
        theirs, their_charges = needs(*found, find)
        lessen(wanted, theirs)
        for grant, charge in zip(held.grants, charges, strict=True):
            if grant in found[0].grants:
                lessen(charge, their_charges[found[0].grants.index(grant)])
    return tuple(wanted.items()), [tuple(charge.items()) for charge in charges]


def freed_by(victim: str, held: Held, ask: Ask, find: Find) -> tuple[Pairs, list[Pairs]]:
    """How much more a reservation posts once this victim of its has gone: on its node, and on each of its grants."""
    before = needs(held, ask, find)
    after = needs(held, ask, lambda other, copy: None if other == victim else find(other, copy))
    return _more(before[0], after[0]), [_more(*charges) for charges in zip(before[1], after[1], strict=True)]


def _more(before: Pairs, after: Pairs) -> Pairs:
    return tuple((name, count - less) for (name, count), (_, less) in zip(after, before, strict=True) if count != less)


def lessen(wanted: dict[str, int], by: Pairs) -> None:
    for name, count in by:
        if name in wanted:
            wanted[name] = max(0, wanted[name] - count)
