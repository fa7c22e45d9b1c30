"""Which node may have what a replica reads? The one that it is bound to, in that attempt, while it may run there. No I/O."""

from __future__ import annotations

from typing import Final

from remit.model.material import MaterialOf
from remit.model.records import Phase, Replica

MAY_RUN: Final = frozenset({Phase.BOUND, Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING})
"""In which it is started, or started again within its attempt. What ends, is unknown or was given up reads nothing any more."""


def why_not(asked: MaterialOf, replica: Replica | None) -> str:
    """Why whoever holds the lease that is named may not have it, by the replica as it is stored; empty: it may."""
    node = asked.actor.lease.partition("/")[2]
    if replica is None or replica.metadata.uid != asked.uid or replica.status.node != node:
        return f"{asked.key} is not bound to {node}"  # also if there is none: who asks for others' learns nothing
    if replica.status.attempt != asked.attempt:
        return f"{asked.key} is in another attempt than {asked.attempt}"
    if replica.status.phase not in MAY_RUN:
        return f"{asked.key} is {replica.status.phase}, and is not started any more"
    return ""
