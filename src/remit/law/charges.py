"""What an object charges: capacity held by a replica, object counts against tenant limits.

No ledger is known here.

The authority posts by these lines, and so does whoever keeps a copy of its books; what each row comes to is said once.

Counted from the object alone, so that sums can be kept. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from remit.law.fit import Requirements
from remit.law.ledgers import DEVICE_PREFIX
from remit.law.lifecycle import HOLDING_PHASES
from remit.model.kinds import Workload
from remit.model.objects import encode, encode_spec
from remit.model.records import Phase, Replica
from remit.model.secrets import Config, Secret

Pairs = tuple[tuple[str, int], ...]

NOT_WORKING_PHASES = HOLDING_PHASES - {Phase.BOUND, Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING}
"""Phases that hold room, but in which a replica is not, or no longer, one that works."""

ACTIVE_PHASES = frozenset(Phase) - {Phase.RELEASED}
"""Phases that count toward how many replicas a workload may have."""


class Hold(Protocol):
    """As much of a replica's status as its postings depend on."""

    @property
    def phase(self) -> Phase: ...
    @property
    def devices(self) -> Mapping[str, int]: ...
    @property
    def grants(self) -> tuple[str, ...]: ...
    @property
    def victims(self) -> Mapping[str, str]: ...


def attempt_key(replica: Replica) -> str:
    """Which attempt of which replica: a name is given again once its replica was forgotten, and attempts count anew."""
    return f"{replica.metadata.uid}/{replica.status.attempt}"


def still_holds(replica: Replica, copy: str) -> bool:
    """Does this very copy still hold its room?"""
    return replica.status.phase in HOLDING_PHASES and attempt_key(replica) == copy


def same_charge(old: Replica, new: Replica) -> bool:
    a, b = old.status, new.status
    reserved = Phase.RESERVED in (a.phase, b.phase)
    return a.node == b.node and a.devices == b.devices and a.grants == b.grants and not reserved


def node_charge(ask: Requirements, devices: Mapping[str, int]) -> Pairs:
    """What a replica takes of its node: its resources, and the devices that it was given."""
    return (
        (*ask.resources, *((DEVICE_PREFIX + device, share) for device, share in devices.items())) if devices else ask.resources
    )


def replica_postings(
    held: Hold, ask: Requirements, victims: Sequence[tuple[Hold, Requirements]] = ()
) -> tuple[Pairs, list[Pairs]]:
    """What a replica that holds room posts: on its node, and on each of its grants. A reservation posts only what the going of
    those `victims` of its that still hold will not free.
    """
    pairs = node_charge(ask, held.devices)
    if not victims:
        return pairs, [ask.charge.pairs] * len(held.grants)
    wanted, charges = dict(pairs), list[Pairs]()
    for theirs, their_ask in victims:
        _subtract(wanted, node_charge(their_ask, theirs.devices))
    for grant in held.grants:
        charge = dict(ask.charge.pairs)
        for theirs, their_ask in victims:
            if grant in theirs.grants:
                _subtract(charge, their_ask.charge.pairs)
        charges.append(tuple(charge.items()))
    return tuple(wanted.items()), charges


def freed_by_victim(
    held: Hold, ask: Requirements, gone: tuple[Hold, Requirements], rest: Sequence[tuple[Hold, Requirements]]
) -> tuple[Pairs, list[Pairs]]:
    """How much more a reservation posts once this victim has gone as well: on its node, and on each of its grants."""
    before, after = replica_postings(held, ask, (gone, *rest)), replica_postings(held, ask, rest)
    return _increase(before[0], after[0]), [_increase(*charges) for charges in zip(before[1], after[1], strict=True)]


def _increase(before: Pairs, after: Pairs) -> Pairs:
    return tuple((name, count - less) for (name, count), (_, less) in zip(after, before, strict=True) if count != less)


def _subtract(wanted: dict[str, int], by: Pairs) -> None:
    for name, count in by:
        if name in wanted:
            left = wanted[name] - count
            wanted[name] = left if left > 0 else 0


LIMITED_KINDS: Final = (Workload, Secret, Config)
LIMIT_FIELDS: Final = {"replicas": "spec.replicas", "bytes": "spec"}
"""Which field says so, where it is not that there is one more."""

LimitUsage = dict[tuple[str, str], int]
"""By tenant and limit."""


def limit_charges(thing: Any) -> dict[str, int]:
    """By limit: what this object takes of it."""
    if thing is None:
        return {}
    match thing:
        case Workload(spec=spec):
            many = 0 if spec.type == "daemon" else max(spec.replicas, spec.completions)
            return {"workloads": 1, "replicas": many, "bytes": len(encode_spec(spec))}
        case Secret(spec=spec):
            return {"secrets": 1, "bytes": len(encode(spec))}
        case Config(spec=spec):
            return {"configs": 1, "bytes": len(encode(spec))}
    return {}


def post_charge_difference(use: LimitUsage, before: Any, after: Any) -> None:
    """One object became another; None stands for none. What is said of its state takes nothing."""
    if not isinstance(before if after is None else after, LIMITED_KINDS):
        return
    if before is not None and after is not None and before.spec is after.spec:
        return
    for sign, thing in ((-1, before), (1, after)):
        for limit, amount in limit_charges(thing).items():
            key = thing.metadata.tenant, limit
            use[key] = use.get(key, 0) + sign * amount
