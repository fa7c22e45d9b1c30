"""Kind registry, store keys, API paths, JSON encoding and decoding of objects.

Every kind in one list, its key in the store, and its bytes.

One spelling for the server, its description and the client. No I/O.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import islice
from typing import Any, Final, get_args
from urllib.parse import quote

import msgspec

from remit.model.identity import Token
from remit.model.kinds import Allotment, Node, NodePool, Override, Policy, PriorityClass, Region, Tenant, Workload
from remit.model.metadata import Object
from remit.model.records import Decision, Event, Generation, Grant, Lease, Peer, PolicyRevision, Replica, Summary
from remit.model.resources import Amount, Duration, format_duration
from remit.model.secrets import Config, Secret

AnyObject = (
    Region | Node | NodePool | Tenant | PriorityClass | Policy | Workload | Secret | Config | Allotment | Override
    | Token | Replica | Generation | PolicyRevision | Grant | Peer | Lease | Decision | Event | Summary
)  # fmt: skip

KINDS: dict[str, type[Object]] = {cls.__struct_config__.tag: cls for cls in get_args(AnyObject)}
"""Every kind by its name."""

TENANTED = frozenset({"Workload", "Secret", "Config", "Allotment", "Replica", "Generation", "Decision"})
"""Kinds whose name is unique only within a tenant."""

DECLARED = (
    "Region", "Node", "NodePool", "Tenant", "PriorityClass", "Policy", "Workload", "Secret", "Config", "Allotment", "Override",
    "Token",
)  # fmt: skip
"""Kinds that people write; the rest are the authority's own records."""


ALIKE_MAX = 4_096
"""Of amounts: work comes in few sizes, and each is written and read again and again."""


@lru_cache(ALIKE_MAX)
def _parsed(written: tuple[tuple[str, str], ...]) -> Amount:
    return Amount.parse(dict(written))


@lru_cache(ALIKE_MAX)
def _written(amount: Amount) -> dict[str, object]:
    return amount.written()


def dec_hook(type_: type, value: object) -> object:
    if type_ is Amount and isinstance(value, dict):
        if all(type(part) is str for part in value.values()):
            return _parsed(tuple(value.items()))
        return Amount.parse(value)
    if type_ is Duration:
        return Duration.parse(value)
    raise ValueError(f"expected a {type_.__name__}")


def enc_hook(value: object) -> object:
    if isinstance(value, Amount):
        return _written(value)  # which nobody changes: it is on its way to an encoder
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


_lately: dict[int, tuple[object, bytes]] = {}


def encoded_spec(spec: object) -> bytes:
    """As `encode`, and without doing it again for the same object: of a flood of one shape all have the same spec, and it is
    weighed, compared and written out for each. It is held on to here, so no other object can come to have its place in memory.
    """
    found = _lately.get(id(spec))
    if found is not None and found[0] is spec:
        return found[1]
    if len(_lately) >= ALIKE_MAX:
        _lately.clear()
    value = _encoder.encode(spec)
    _lately[id(spec)] = spec, value
    return value


DECODED_MAX = 20_000
DECODED_BYTES_MAX = 4 << 10
"""Of a row that is remembered. Rows may have a megabyte: who wrote one anew again and again would fill the memory with them."""


_read: dict[bytes, AnyObject] = {}


def decoded(value: bytes) -> AnyObject:
    """As `decode`, and the same object for the same bytes: for those who look at a row again and again, or after another."""
    found = _read.get(value)
    if found is None:
        found = _any_decoder.decode(value)
        remember(value, found)
    return found


def remember(value: bytes, thing: AnyObject) -> None:
    """This is what is read from these bytes: they were written from it. Of too many the oldest go."""
    if len(value) <= DECODED_BYTES_MAX:
        if len(_read) >= DECODED_MAX:
            for old in list(islice(_read, DECODED_MAX // 8)):
                _read.pop(old, None)  # another thread may have been here too
        _read[value] = thing


_WORDS = {kind: (kind.lower(), kind in TENANTED) for kind in KINDS}
_WORDS_OF = {cls: _WORDS[kind] for kind, cls in KINDS.items()}


def key_of(kind: str, name: str, tenant: str = "") -> str:
    """Where an object stands in its scope's store."""
    word, tenanted = _WORDS.get(kind) or (kind.lower(), False)
    return f"{word}/{tenant}/{name}" if tenanted else f"{word}/{name}"


def key(thing: AnyObject) -> str:
    word, tenanted = _WORDS_OF[type(thing)]
    return f"{word}/{thing.metadata.tenant}/{thing.metadata.name}" if tenanted else f"{word}/{thing.metadata.name}"


_UNUSUAL: Final = {"Policy": "policies", "PriorityClass": "priorityclasses", "Summary": "summaries"}

PLURALS: Final = {kind: _UNUSUAL.get(kind, f"{kind.lower()}s") for kind in KINDS}
"""How each kind is spelt in a path."""

BY_PLURAL: Final = {plural: kind for kind, plural in PLURALS.items()}


_PLAIN: Final = re.compile(r"[A-Za-z0-9_.~-]+").fullmatch


def _escaped(name: str) -> str:
    return name if _PLAIN(name) else quote(name, safe="")


def collection_path(kind: str, tenant: str = "") -> str:
    """Where a kind is listed and created; without a tenant, all tenants' of a kind that is tenanted."""
    plural = PLURALS[kind]
    return f"/v1/tenants/{_escaped(tenant)}/{plural}" if tenant and kind in TENANTED else f"/v1/{plural}"


def object_path(kind: str, name: str, tenant: str = "") -> str:
    """Where one object is. What people name needs no escaping; the authority's own records may be called anything."""
    return f"{collection_path(kind, tenant)}/{_escaped(name)}"
