"""Which replicas hold room, and when is it the same room? No ledger is known here: draft.py posts to those."""

from __future__ import annotations

from remit.law.lifecycle import HOLDS
from remit.model.records import Phase, Replica

Pairs = tuple[tuple[str, int], ...]

UNSETTLED = HOLDS - {Phase.BOUND, Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING}
"""Phases that hold room, but in which a replica is not, or no longer, one that works."""


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


def lessen(wanted: dict[str, int], by: Pairs) -> None:
    for name, count in by:
        if name in wanted:
            wanted[name] = max(0, wanted[name] - count)
