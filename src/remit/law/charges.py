"""Charges of an object: capacity and quota held by a replica, object counts against tenant limits.

Used by the authority for its ledgers and by every cached copy of them, so that both compute the same postings. Charges
depend on the object alone, which allows sums to be updated incrementally. Pure; the ledgers are in ledgers.py.
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
"""Phases that hold capacity in which a replica does not work yet, or no longer."""

ACTIVE_PHASES = frozenset(Phase) - {Phase.RELEASED}
"""Phases that count toward the number of replicas of a workload."""


class Hold(Protocol):
    """The part of a replica's status that its postings depend on."""

    @property
    def phase(self) -> Phase: ...
    @property
    def devices(self) -> Mapping[str, int]: ...
    @property
    def grants(self) -> tuple[str, ...]: ...
    @property
    def victims(self) -> Mapping[str, str]: ...


def attempt_key(replica: Replica) -> str:
    """Identifies one attempt of one replica. The name alone is not enough: it can be reused after the replica was forgotten,
    and attempts then start from 1 again.
    """
    return f"{replica.metadata.uid}/{replica.status.attempt}"


def still_holds(replica: Replica, attempt: str) -> bool:
    """Whether this attempt still holds its capacity."""
    return replica.status.phase in HOLDING_PHASES and attempt_key(replica) == attempt


def same_charge(old: Replica, new: Replica) -> bool:
    a, b = old.status, new.status
    reserved = Phase.RESERVED in (a.phase, b.phase)
    return a.node == b.node and a.devices == b.devices and a.grants == b.grants and not reserved


def node_charge(requirements: Requirements, devices: Mapping[str, int]) -> Pairs:
    """Returns what a replica takes from its node: its resources and its allocated devices."""
    return (
        (*requirements.resources, *((DEVICE_PREFIX + device, share) for device, share in devices.items()))
        if devices
        else requirements.resources
    )


def replica_postings(
    hold: Hold, requirements: Requirements, victims: Sequence[tuple[Hold, Requirements]] = ()
) -> tuple[Pairs, list[Pairs]]:
    """Returns the postings of a replica that holds capacity: on its node, and on each of its grants. A reservation posts only
    what its `victims` that still hold capacity will not free.
    """
    pairs = node_charge(requirements, hold.devices)
    if not victims:
        return pairs, [requirements.charge.pairs] * len(hold.grants)
    needed, charges = dict(pairs), list[Pairs]()
    for victim, victim_requirements in victims:
        _subtract(needed, node_charge(victim_requirements, victim.devices))
    for grant in hold.grants:
        charge = dict(requirements.charge.pairs)
        for victim, victim_requirements in victims:
            if grant in victim.grants:
                _subtract(charge, victim_requirements.charge.pairs)
        charges.append(tuple(charge.items()))
    return tuple(needed.items()), charges


def freed_by_victim(
    hold: Hold, requirements: Requirements, released: tuple[Hold, Requirements], others: Sequence[tuple[Hold, Requirements]]
) -> tuple[Pairs, list[Pairs]]:
    """Returns by how much a reservation's postings increase when one more victim is gone: on its node, and on each of its
    grants.
    """
    before, after = replica_postings(hold, requirements, (released, *others)), replica_postings(hold, requirements, others)
    return _increase(before[0], after[0]), [_increase(*charges) for charges in zip(before[1], after[1], strict=True)]


def _increase(before: Pairs, after: Pairs) -> Pairs:
    return tuple((name, count - less) for (name, count), (_, less) in zip(after, before, strict=True) if count != less)


def _subtract(counts: dict[str, int], pairs: Pairs) -> None:
    for name, count in pairs:
        if name in counts:
            remaining = counts[name] - count
            counts[name] = remaining if remaining > 0 else 0


LIMITED_KINDS: Final = (Workload, Secret, Config)
LIMIT_FIELDS: Final = {"replicas": "spec.replicas", "bytes": "spec"}
"""The field that causes a charge, for limits that are not simply the number of objects."""

LimitUsage = dict[tuple[str, str], int]
"""Usage by tenant and limit."""


def limit_charges(obj: Any) -> dict[str, int]:
    """Returns what an object uses of each tenant limit."""
    if obj is None:
        return {}
    match obj:
        case Workload(spec=spec):
            replicas = 0 if spec.type == "daemon" else max(spec.replicas, spec.completions)
            return {"workloads": 1, "replicas": replicas, "bytes": len(encode_spec(spec))}
        case Secret(spec=spec):
            return {"secrets": 1, "bytes": len(encode(spec))}
        case Config(spec=spec):
            return {"configs": 1, "bytes": len(encode(spec))}
    return {}


def post_charge_difference(usage: LimitUsage, before: Any, after: Any) -> None:
    """Updates the usage for an object that changed from `before` to `after`; None means no object. The status is not
    charged.
    """
    if not isinstance(before if after is None else after, LIMITED_KINDS):
        return
    if before is not None and after is not None and before.spec is after.spec:
        return
    for sign, obj in ((-1, before), (1, after)):
        for limit, amount in limit_charges(obj).items():
            key = obj.metadata.tenant, limit
            usage[key] = usage.get(key, 0) + sign * amount
