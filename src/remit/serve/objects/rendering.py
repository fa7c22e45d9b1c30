"""Response JSON of a stored row, and redaction of secrets and of other tenants' names.

A row is the JSON of an object without default values. To render it, the revision is inserted at the front and the rest is
sent as stored, without decoding. Two fields that readers always look for are written even with their default value: the API
version, and the phase or health at the start of the status. Secret values are removed.

Preemption victims of a replica may belong to another tenant. Their number and priority explain why the replica waits; their
names are replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from remit.model.kinds import Secret
from remit.model.kinds.registry import BY_PREFIX
from remit.model.metadata import API_VERSION
from remit.model.objects import KINDS, decode, encode
from remit.model.secrets import plain_bytes
from remit.model.wire.api_types import GoneMeta, GoneObject

VICTIMS: Final = "victims"
_VICTIMS_FIELD: Final = b'"victims":'
_REDACTED_PREFIX: Final = "another-tenants/"
_NAME_FIELDS: Final = ("replica", "workload")


def redact_other_tenants(value: bytes, tenant: str) -> bytes:
    """Replace the names of victims of other tenants in a JSON document."""
    if _VICTIMS_FIELD not in value:
        return value
    return msgspec.json.encode(_redact(msgspec.json.decode(value), tenant))


def _redact(value: Any, tenant: str) -> Any:
    if isinstance(value, list):
        return [_redact(item, tenant) for item in value]
    if isinstance(value, dict):
        return {
            name: _redact_victims(item, tenant) if name == VICTIMS else _redact(item, tenant) for name, item in value.items()
        }
    return value


def _redact_victims(victims: Any, tenant: str) -> Any:
    """Redact victims in any of their forms: a map by name, a list of names, or a list of objects with name fields."""
    if isinstance(victims, dict):
        return {_redact_name(name, tenant, index): details for index, (name, details) in enumerate(victims.items(), 1)}
    if not isinstance(victims, list):
        return victims  # a number of victims
    return [_redact_victim(victim, tenant, index) for index, victim in enumerate(victims, 1)]


def _redact_victim(victim: Any, tenant: str, index: int) -> Any:
    if isinstance(victim, str):
        return _redact_name(victim, tenant, index)
    if not isinstance(victim, dict) or _is_own(victim.get("replica", ""), tenant):
        return victim
    return {**victim, **dict.fromkeys(_NAME_FIELDS, f"{_REDACTED_PREFIX}{index}")}


def _redact_name(name: str, tenant: str, index: int) -> str:
    if _is_own(name, tenant):
        return name
    return ("replica/" if name.startswith("replica/") else "") + f"{_REDACTED_PREFIX}{index}"


def _is_own(name: str, tenant: str) -> bool:
    return name.removeprefix("replica/").startswith(f"{tenant}/")


_WITH_VICTIMS: Final = ("Replica", "Decision")
_ROW_STARTS: Final = {
    kind: (
        f'{{"kind":"{kind}","apiVersion":"{API_VERSION}","metadata":{{'.encode(),
        f'{{"kind":"{kind}","metadata":{{'.encode(),
    )
    for kind in KINDS
}
"""How a row can begin. It has the API version only if the client sent it."""
_RENDERED_START: Final = {
    kind: f'{{"apiVersion":"{API_VERSION}","kind":"{kind}","metadata":{{"revision":%d,'.encode() for kind in KINDS
}


class _StatusField(Struct):
    status: Raw = Raw(b"")


_status_decoder: Final = msgspec.json.Decoder(_StatusField)


def _default_status_field(kind: str) -> bytes:
    """Return the first field of a default status of this kind, such as `"phase":"pending"`; empty if it is not an enum."""
    fields = {field.name: field for field in msgspec.structs.fields(KINDS[kind])}
    status: Any = fields["status"].default if "status" in fields else None
    first = msgspec.structs.fields(type(status))[0] if isinstance(status, Struct) else None
    if first is None or not isinstance(first.default, Enum):
        return b""
    return f'"{first.encode_name}":"{first.default.value}"'.encode()


_DEFAULT_STATUS_FIELDS: Final = {kind: word for kind in KINDS if (word := _default_status_field(kind))}


def render_object(kind: str, value: bytes, revision: int) -> bytes:
    """Render one object as JSON."""
    if kind == "Secret":
        value = _redact_secret_row(value)
    elif kind in _WITH_VICTIMS and b'"victims":' in value:
        value = redact_other_tenants(
            value, decode(value).metadata.tenant
        )  # for every reader; `explain` shows the names to admins
    with_version, without_version = _ROW_STARTS[kind]
    head = with_version if value.startswith(with_version) else without_version
    if not value.startswith(head):  # not in our field order: decode and encode it again
        value = encode(decode(value))
        head = with_version if value.startswith(with_version) else without_version
    if kind in _DEFAULT_STATUS_FIELDS:
        value = _with_default_status(value, _DEFAULT_STATUS_FIELDS[kind])
    return _RENDERED_START[kind] % revision + value[len(head) :]


def _with_default_status(value: bytes, field: bytes) -> bytes:
    status = bytes(_status_decoder.decode(value).status)
    if not status:
        return value[:-1] + b',"status":{' + field + b"}}"
    if status.startswith(b"{" + field[: field.index(b":") + 1]):
        return value
    # The status is the last field of a row, so its position follows from its length.
    start = len(value) - 1 - len(status)
    return value[:start] + b"{" + field + (b"," if len(status) > 2 else b"") + status[1:] + b"}"


def _redact_secret_row(value: bytes) -> bytes:
    """Remove the values of a secret. Keys and sizes are visible; values are delivered only to nodes that need them."""
    secret = decode(value)
    if not isinstance(secret, Secret):
        return value
    spec = msgspec.structs.replace(secret.spec, data=dict.fromkeys(secret.spec.data, ""))
    sizes = {name: plain_bytes(value) for name, value in secret.spec.data.items()}
    return encode(msgspec.structs.replace(secret, spec=spec, status=msgspec.structs.replace(secret.status, sizes=sizes)))


def split_key(key: str) -> tuple[str, str, str]:
    """Split a row key into kind, tenant and name. The kind is empty if it is not the key of an object."""
    prefix, _, rest = key.partition("/")
    definition = BY_PREFIX.get(prefix)
    if definition is None:
        return "", "", rest
    tenant, _, name = rest.partition("/") if definition.tenanted else ("", "", rest)
    return definition.kind, tenant, name


def deleted_object(key: str) -> GoneObject:
    kind, tenant, name = split_key(key)
    return GoneObject(kind=kind, metadata=GoneMeta(name=name, tenant=tenant))


def render_list(kind: str, items: Iterable[bytes], revision: int, rest: str) -> bytes:
    """Render a list of objects that are rendered already."""
    more = b',"continue":"' + rest.encode() + b'"' if rest else b""
    head = f'{{"apiVersion":"{API_VERSION}","kind":"{kind}List","metadata":{{"revision":{revision}'.encode()
    return head + more + b'},"items":[' + b",".join(items) + b"]}"


def etag(revision: int) -> str:
    """Return the ETag of an object at this revision."""
    return f'"{revision}"'
