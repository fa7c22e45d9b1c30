"""Store keys, API paths, JSON encoding and decoding of objects.

The server, its OpenAPI description and the client all take keys and paths from here. Derived from the definitions of the kinds
(kinds/registry.py). No I/O.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import islice
from typing import Any, Final
from urllib.parse import quote

import msgspec

from remit.model.kinds.registry import DEFINITIONS, AnyObject
from remit.model.metadata import Object
from remit.model.resources import Amount, Duration, format_duration

KINDS: dict[str, type[Object]] = {definition.kind: definition.struct for definition in DEFINITIONS}
"""All kinds by name."""

TENANTED: Final = frozenset(definition.kind for definition in DEFINITIONS if definition.tenanted)
"""Kinds whose names are unique only within a tenant."""

DECLARED: Final = tuple(definition.kind for definition in DEFINITIONS if definition.is_declared)
"""Kinds that users declare. The other kinds are records of the authority."""


CACHE_ENTRIES_MAX = 4_096
"""Bound of each cache of amounts and specs. Workloads use few distinct values, and each of them is read and written often."""

SPEC_BYTES_MAX: Final = 8 << 10
"""Specs above this size are not cached: most are small, and many large ones would fill the memory."""


@lru_cache(CACHE_ENTRIES_MAX)
def _parse_amount(pairs: tuple[tuple[str, str], ...]) -> Amount:
    return Amount.parse(dict(pairs))


@lru_cache(CACHE_ENTRIES_MAX)
def _write_amount(amount: Amount) -> dict[str, object]:
    return amount.to_manifest()


def dec_hook(type_: type, value: object) -> object:
    if type_ is Amount and isinstance(value, dict):
        if all(type(part) is str for part in value.values()):
            return _parse_amount(tuple(value.items()))
        return Amount.parse(value)
    if type_ is Duration:
        return Duration.parse(value)
    raise ValueError(f"expected a {type_.__name__}")


def enc_hook(value: object) -> object:
    if isinstance(value, Amount):
        return _write_amount(value)  # the cached dict is shared: the encoder only reads it
    if isinstance(value, Duration):
        return format_duration(int(value))
    raise TypeError(f"{type(value).__name__} cannot be encoded")


_encoder = msgspec.json.Encoder(enc_hook=enc_hook)
_decoders: dict[str, Any] = {kind: msgspec.json.Decoder(cls, dec_hook=dec_hook) for kind, cls in KINDS.items()}
_any_decoder: msgspec.json.Decoder[AnyObject] = msgspec.json.Decoder(AnyObject, dec_hook=dec_hook)


def encode(value: object) -> bytes:
    return _encoder.encode(value)


def decode(value: bytes) -> AnyObject:
    return _any_decoder.decode(value)


_encoded_specs: dict[int, tuple[object, bytes]] = {}


def encode_spec(spec: object) -> bytes:
    """Encodes a spec, with a cache by object identity.

    Many workloads share one spec object, and each of them is measured, compared and stored. The cache keeps a reference to
    the spec, so that its id cannot be reused by another object.
    """
    cached = _encoded_specs.get(id(spec))
    if cached is not None and cached[0] is spec:
        return cached[1]
    value = _encoder.encode(spec)
    if len(value) <= SPEC_BYTES_MAX:
        if len(_encoded_specs) >= CACHE_ENTRIES_MAX:
            _encoded_specs.clear()
        _encoded_specs[id(spec)] = spec, value
    return value


DECODED_MAX = 20_000
DECODED_BYTES_MAX = 4 << 10
"""Rows above this size are not cached. A row may have 1 MiB, and a client that rewrites such rows would fill the memory."""


_decoded: dict[bytes, AnyObject] = {}


def decode_cached(value: bytes) -> AnyObject:
    """Decodes a row, with a cache: equal bytes return the same object, for callers that read the same row many times."""
    obj = _decoded.get(value)
    if obj is None:
        obj = _any_decoder.decode(value)
        cache_decoded(value, obj)
    return obj


def cache_decoded(value: bytes, obj: AnyObject) -> None:
    """Stores the object that these bytes were encoded from, so that the next `decode_cached` returns it. When the cache is
    full, the oldest eighth is dropped.
    """
    if len(value) <= DECODED_BYTES_MAX:
        if len(_decoded) >= DECODED_MAX:
            for oldest in list(islice(_decoded, DECODED_MAX // 8)):
                _decoded.pop(oldest, None)  # another thread may have removed it already
        _decoded[value] = obj


_KEY_PREFIXES = {definition.kind: (definition.prefix, definition.tenanted) for definition in DEFINITIONS}
_KEY_PREFIXES_BY_TYPE: dict[type, tuple[str, bool]] = {
    definition.struct: (definition.prefix, definition.tenanted) for definition in DEFINITIONS
}


def key_of(kind: str, name: str, tenant: str = "") -> str:
    """Returns the store key of an object."""
    prefix, tenanted = _KEY_PREFIXES.get(kind) or (kind.lower(), False)
    return f"{prefix}/{tenant}/{name}" if tenanted else f"{prefix}/{name}"


def key(obj: AnyObject) -> str:
    prefix, tenanted = _KEY_PREFIXES_BY_TYPE[type(obj)]
    return f"{prefix}/{obj.metadata.tenant}/{obj.metadata.name}" if tenanted else f"{prefix}/{obj.metadata.name}"


PLURALS: Final = {definition.kind: definition.plural for definition in DEFINITIONS}
"""The plural of each kind, as used in API paths."""

BY_PLURAL: Final = {plural: kind for kind, plural in PLURALS.items()}


_is_plain: Final = re.compile(r"[A-Za-z0-9_.~-]+").fullmatch


def _escape(name: str) -> str:
    return name if _is_plain(name) else quote(name, safe="")


def collection_path(kind: str, tenant: str = "") -> str:
    """Returns the path at which a kind is listed and created. Without a tenant it lists a tenanted kind across all tenants."""
    plural = PLURALS[kind]
    return f"/v1/tenants/{_escape(tenant)}/{plural}" if tenant and kind in TENANTED else f"/v1/{plural}"


def object_path(kind: str, name: str, tenant: str = "") -> str:
    """Returns the path of one object. Names of declared objects need no escaping; names of the authority's records may."""
    return f"{collection_path(kind, tenant)}/{_escape(name)}"
