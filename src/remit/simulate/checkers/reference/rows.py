"""Reads amounts, times, phases and shapes from row JSON.

Pure functions over decoded rows; nothing is stored here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from remit.simulate.checkers.reference.lifecycle import HOLDING, lost_after_ms

Json = Any
Rows = dict[str, tuple[int, Json]]
"""Every row by key: the revision of its last change, and its content."""

Amounts = dict[str, int]
"""Amounts by resource: bytes for memory and storage, thousandths for everything else."""

WHOLE_DEVICE: Final = 1000
SCOPE_PREFIX: Final = "scope/"
RESTORE_MARKER: Final = "incarnation"

_BYTES = ("memory", "storage", "ephemeral-storage")
_UNITS = {"m": Decimal("0.001"), "": Decimal(1)}
_UNITS |= {char: Decimal(1000**power) for power, char in enumerate("kMGTPE", start=1)}
_UNITS |= {char + "i": Decimal(1024**power) for power, char in enumerate("KMGTPE", start=1)}
_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}

_decode: Callable[[bytes], Json] = msgspec.json.Decoder().decode


def decode_row(key: str, value: bytes) -> Json:
    return value.decode() if key == RESTORE_MARKER else _decode(value)


@lru_cache(maxsize=65_536)
def quantity(name: str, text: str | int | float) -> int:
    """Parse a quantity: memory and storage in bytes, everything else in thousandths."""
    literal = str(text)
    digits = literal.rstrip("mkKMGTPEi")
    value = Decimal(digits) * _UNITS[literal[len(digits) :]]
    return int(value if name in _BYTES else value * 1000)


def amount(written: Mapping[str, Any] | None) -> Amounts:
    counted = {}
    for name, value in (written or {}).items():
        if name == "devices":
            counted.update({f"devices/{kind}": quantity(kind, count) for kind, count in value.items()})
        else:
            counted[name] = quantity(name, value)
    return counted


@lru_cache(maxsize=4_096)
def milliseconds(text: str) -> int:
    total, digits, unit = 0.0, "", ""
    for char in text + " ":
        if char.isdigit() or char in ". ":
            if unit:
                total += float(digits) * _MS[unit]
                digits, unit = "", ""
            digits += char
        else:
            unit += char
    return round(total)


class BatchEntry(NamedTuple):
    """One operation as recorded in its batch row."""

    id: str
    digest: str
    operation: str
    subject: str
    actor: str
    role: str
    lease: str
    epoch: int
    seen: int
    age_ms: int
    number: int
    code: str
    detail: str
    trace: str


def phase_of(replica: Json) -> str | None:
    return None if replica is None else replica.get("status", {}).get("phase", "pending")


def attempt_of(replica: Json) -> int:
    return int(replica.get("status", {}).get("attempt", 1))


def failures_of(replica: Json) -> int:
    return int(replica.get("status", {}).get("failures", 0))


def attempt_id(replica: Json) -> str:
    """Return the attempt's id, as reservations name their victims."""
    return f"{replica['metadata']['uid']}/{attempt_of(replica)}"


def holds_capacity(replica: Json) -> bool:
    return phase_of(replica) in HOLDING


def group_of(replica: Json) -> tuple[str, str]:
    return replica["metadata"]["tenant"], replica["spec"]["workload"]


def owner_of(replica: Json) -> str:
    """Return the key of a replica's workload."""
    return f"workload/{replica['metadata']['tenant']}/{replica['spec']['workload']}"


def generation_key(replica: Json) -> str:
    spec = replica["spec"]
    return f"generation/{replica['metadata']['tenant']}/{spec['workload']}/{spec['generation']:08d}"


def health_of(node: Json) -> str:
    return str(node.get("status", {}).get("health", "joining"))


def is_open(node: Json) -> bool:
    """Whether the node accepts new work, provided that it is ready."""
    return not (node["spec"].get("unschedulable") or node["spec"].get("draining") or node["metadata"].get("deleting"))


def of_kind(rows: Rows, kind: str) -> Iterator[tuple[str, Json]]:
    for key, (_, content) in rows.items():
        if key.startswith(f"{kind}/"):
            yield key, content


def replicas_max(workload: Json) -> int | None:
    """Return how many unreleased replicas a workload may have; None for a daemon, which has one per node."""
    spec = workload["spec"]
    if spec["type"] == "daemon":
        return None
    surge = spec.get("rollout", {}).get("maxSurge", 1) if spec["type"] == "service" else 0
    return int(max(spec.get("replicas", 1), spec.get("completions", 0)) + surge)


def outstanding(grant: Json) -> Amounts:
    granted, returned = amount(grant["spec"]["amount"]), amount(grant.get("status", {}).get("returned"))
    difference = {name: granted.get(name, 0) - returned.get(name, 0) for name in {**granted, **returned}}
    return {name: n for name, n in difference.items() if n}


class ReferenceShape:
    """Requirements of the replicas of one generation, read from its row."""

    __slots__ = (
        "anti_affinity",
        "charge",
        "device_requests",
        "fails_probe_after_ms",
        "fence_ms",
        "fenced",
        "gang",
        "grace_ms",
        "has_liveness_probe",
        "has_start_probe",
        "key",
        "labels",
        "lost_after_ms",
        "placement",
        "resources",
        "tenant",
        "workload",
    )  # fmt: skip

    def __init__(self, key: str, content: Json, pace: float = 1.0) -> None:
        generation = content["spec"]
        spec, self.key = generation["spec"], key
        template = spec["template"]
        self.tenant, self.workload = key.split("/")[1], str(generation["workload"])
        self.resources = amount(template.get("resources"))
        self.device_requests: list[Json] = template.get("devices", [])
        self.charge = dict(self.resources)
        for request in self.device_requests:
            kind = f"devices/{request['kind']}"
            share = quantity("share", request["share"]) if request.get("share") else request.get("count", 0) * WHOLE_DEVICE
            self.charge[kind] = self.charge.get(kind, 0) + share
        self.labels: dict[str, str] = {**generation.get("labels", {}), "remit/workload": self.workload}
        self.placement: Json = spec.get("placement", {})
        self.anti_affinity: list[Json] = list(self.placement.get("antiAffinity", ()))
        if spec["type"] == "daemon":
            self.anti_affinity.append({"labelSelector": {"remit/workload": self.workload}, "topologyKey": "node"})
        self.gang = int((spec.get("gang") or {}).get("min", 0))
        self.fenced = spec.get("replace", "") == "fenced" or (not spec.get("replace") and spec["type"] == "job")
        self.fence_ms = _duration(spec.get("fence"), 300_000)
        self.grace_ms = _duration(template.get("stopGrace"), 30_000)
        self.has_liveness_probe = bool(template.get("probes", {}).get("live"))
        self.has_start_probe = bool(template.get("probes", {}).get("start"))
        arguments = [argument.partition("=")[2] for argument in template.get("command", ()) if argument.startswith("sick=")]
        self.fails_probe_after_ms = int(arguments[0]) if arguments else None
        """The age at which the simulated program starts to fail its probe; None if it never does."""
        self.lost_after_ms = lost_after_ms(self.fenced, self.fence_ms, pace)


def _duration(written: str | int | None, default: int) -> int:
    return default if written is None else written if isinstance(written, int) else milliseconds(written)


class ReferenceNode:
    """Attributes and location of a node."""

    __slots__ = ("attributes", "labels", "locations", "name", "taints")

    def __init__(self, name: str, node: Json) -> None:
        spec = node["spec"]
        self.name = name
        self.labels: dict[str, str] = node["metadata"].get("labels", {})
        self.locations = {"region": str(spec["region"]), "zone": str(spec["zone"]), "pool": str(spec.get("pool", "default"))}
        self.taints: list[Json] = spec.get("taints", [])
        self.attributes = (self.labels, self.locations, self.taints)

    def domain(self, key: str) -> str:
        return self.name if key == "node" else self.locations[key] if key in self.locations else str(self.labels.get(key, ""))
