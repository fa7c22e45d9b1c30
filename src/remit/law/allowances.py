"""How much of its tenant's limits does an object take? Counted from the object alone, so that sums can be kept. Pure."""

from __future__ import annotations

from typing import Any, Final

from remit.model.data import Config, Secret
from remit.model.kinds import Workload
from remit.model.objects import encode, encoded_spec

COUNTED: Final = (Workload, Secret, Config)
SAYS: Final = {"replicas": "spec.replicas", "bytes": "spec"}
"""Which field says so, where it is not that there is one more."""

Use = dict[tuple[str, str], int]
"""By tenant and limit."""


def takes(thing: Any) -> dict[str, int]:
    """By limit: what this object takes of it."""
    if thing is None:
        return {}
    match thing:
        case Workload(spec=spec):
            many = 0 if spec.type == "daemon" else max(spec.replicas, spec.completions)
            return {"workloads": 1, "replicas": many, "bytes": len(encoded_spec(spec))}
        case Secret(spec=spec):
            return {"secrets": 1, "bytes": len(encode(spec))}
        case Config(spec=spec):
            return {"configs": 1, "bytes": len(encode(spec))}
    return {}


def reckon(use: Use, before: Any, after: Any) -> None:
    """One object became another; None stands for none. What is said of its state takes nothing."""
    if not isinstance(before if after is None else after, COUNTED):
        return
    if before is not None and after is not None and before.spec is after.spec:
        return
    for sign, thing in ((-1, before), (1, after)):
        for limit, amount in takes(thing).items():
            key = thing.metadata.tenant, limit
            use[key] = use.get(key, 0) + sign * amount
