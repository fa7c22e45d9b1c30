"""How is any object named, written and read? Every kind in one list, its key in the store, and its bytes."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from remit.model.fields import Object
from remit.model.kinds import (
    Allotment,
    Config,
    Node,
    NodePool,
    Override,
    Policy,
    PriorityClass,
    Region,
    Secret,
    Tenant,
    Workload,
)
from remit.model.quantity import format_duration
from remit.model.records import Decision, Event, Generation, Grant, Lease, Peer, PolicyRevision, Replica, Summary
from remit.model.resources import Amount, Duration

AnyObject = (
    Region | Node | NodePool | Tenant | PriorityClass | Policy | Workload | Secret | Config | Allotment | Override
    | Replica | Generation | PolicyRevision | Grant | Peer | Lease | Decision | Event | Summary
)  # fmt: skip

KINDS: dict[str, type[Object]] = {cls.__struct_config__.tag: cls for cls in get_args(AnyObject)}
"""Every kind by its name."""

TENANTED = frozenset({"Workload", "Secret", "Config", "Allotment", "Replica", "Generation", "Decision"})
"""Kinds whose name is unique only within a tenant."""

DECLARED = (
    "Region", "Node", "NodePool", "Tenant", "PriorityClass", "Policy", "Workload", "Secret", "Config", "Allotment", "Override",
)  # fmt: skip
"""Kinds that people write; the rest are the authority's own records."""


def dec_hook(type_: type, value: object) -> object:
    if type_ is Amount and isinstance(value, dict):
        return Amount.parse(value)
    if type_ is Duration:
        return Duration.parse(value)
    raise ValueError(f"expected a {type_.__name__}")


def enc_hook(value: object) -> object:
    if isinstance(value, Amount):
        return value.written()
    if isinstance(value, Duration):
        return format_duration(int(value))
    raise TypeError(f"{type(value).__name__} is not stored")


_encoder = msgspec.json.Encoder(enc_hook=enc_hook)
_decoders: dict[str, Any] = {kind: msgspec.json.Decoder(cls, dec_hook=dec_hook) for kind, cls in KINDS.items()}
_any_decoder: msgspec.json.Decoder[AnyObject] = msgspec.json.Decoder(AnyObject, dec_hook=dec_hook)


def encode(value: object) -> bytes:
    return _encoder.encode(value)


def decode(value: bytes) -> AnyObject:
    return _any_decoder.decode(value)


def key_of(kind: str, name: str, tenant: str = "") -> str:
    """Where an object stands in its scope's store."""
    return f"{kind.lower()}/{tenant}/{name}" if kind in TENANTED else f"{kind.lower()}/{name}"


def key(thing: AnyObject) -> str:
    return key_of(type(thing).__name__, thing.metadata.name, thing.metadata.tenant)
