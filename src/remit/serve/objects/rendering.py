"""JSON of a stored row; redaction of secrets and of other tenants' names.

That there are so many, and no names. Who asks is known elsewhere.

Who must go for a replica may be another tenant's: how many they are, and of which priority, says why it has to wait; what they
are called is theirs.

Its own bytes, with its revision put in; a secret without its values.

A row is the object's JSON without what has its default, so a few words are put in at the front, and the rest goes out as it
was stored: nothing is decoded. Two things people always look for are written out even where they have their default: which
version of the API an object is of, and where it stands (the phase, the health).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from remit.model.metadata import API_VERSION
from remit.model.objects import KINDS, TENANTED, AnyObject, decode, encode
from remit.model.secrets import Secret, SecretStatus, plain_bytes
from remit.model.wire.api_types import GoneMeta, GoneObject

VICTIMS: Final = "victims"
_MARK: Final = b'"victims":'
_NAMELESS: Final = "another-tenants/"
_NAMED: Final = ("replica", "workload")


def nameless(value: bytes, tenant: str) -> bytes:
    """JSON, in which those who must go have names only if they are of this tenant."""
    if _MARK not in value:
        return value
    return msgspec.json.encode(_walked(msgspec.json.decode(value), tenant))


def _walked(value: Any, tenant: str) -> Any:
    if isinstance(value, list):
        return [_walked(one, tenant) for one in value]
    if isinstance(value, dict):
        return {name: _redact_victims(one, tenant) if name == VICTIMS else _walked(one, tenant) for name, one in value.items()}
    return value


def _redact_victims(victims: Any, tenant: str) -> Any:
    """They are told as names, by their names, or as parts of which one is the name."""
    if isinstance(victims, dict):
        return {_name(name, tenant, at): told for at, (name, told) in enumerate(victims.items(), 1)}
    if not isinstance(victims, list):
        return victims  # how many there are
    return [_one(one, tenant, at) for at, one in enumerate(victims, 1)]


def _one(victim: Any, tenant: str, at: int) -> Any:
    if isinstance(victim, str):
        return _name(victim, tenant, at)
    if not isinstance(victim, dict) or _is_own(victim.get("replica", ""), tenant):
        return victim
    return {**victim, **dict.fromkeys(_NAMED, f"{_NAMELESS}{at}")}


def _name(name: str, tenant: str, at: int) -> str:
    if _is_own(name, tenant):
        return name
    return ("replica/" if name.startswith("replica/") else "") + f"{_NAMELESS}{at}"


def _is_own(name: str, tenant: str) -> bool:
    return name.removeprefix("replica/").startswith(f"{tenant}/")


BY_WORD: Final = {kind.lower(): kind for kind in KINDS}
"""The kind by the first word of its keys."""

_WITH_VICTIMS: Final = ("Replica", "Decision")
_HEADS: Final = {
    kind: (
        f'{{"kind":"{kind}","apiVersion":"{API_VERSION}","metadata":{{'.encode(),
        f'{{"kind":"{kind}","metadata":{{'.encode(),
    )
    for kind in KINDS
}
"""How a row begins: whether it has its version depends on who made the object."""
_SHOWN: Final = {kind: f'{{"apiVersion":"{API_VERSION}","kind":"{kind}","metadata":{{"revision":%d,'.encode() for kind in KINDS}


class _Standing(Struct):
    status: Raw = Raw(b"")


_standing: Final = msgspec.json.Decoder(_Standing)


def _first_word(kind: str) -> bytes:
    """`"phase":"pending"`: what a status of this kind begins with where nothing else was stored."""
    fields = {field.name: field for field in msgspec.structs.fields(KINDS[kind])}
    status: Any = fields["status"].default if "status" in fields else None
    first = msgspec.structs.fields(type(status))[0] if isinstance(status, Struct) else None
    if first is None or not isinstance(first.default, Enum):
        return b""
    return f'"{first.encode_name}":"{first.default.value}"'.encode()


_STANDINGS: Final = {kind: word for kind in KINDS if (word := _first_word(kind))}


def shown(kind: str, value: bytes, revision: int) -> bytes:
    """One object as JSON."""
    if kind == "Secret":
        value = _veiled(value)
    elif kind in _WITH_VICTIMS and b'"victims":' in value:
        value = nameless(value, decode(value).metadata.tenant)  # whoever reads it; `explain` tells admins their names
    with_version, plain = _HEADS[kind]
    head = with_version if value.startswith(with_version) else plain
    if not value.startswith(head):  # in nobody's spelling: read, and written as ours
        value = encode(decode(value))
        head = with_version if value.startswith(with_version) else plain
    if kind in _STANDINGS:
        value = _with_standing(value, _STANDINGS[kind])
    return _SHOWN[kind] % revision + value[len(head) :]


def _with_standing(value: bytes, word: bytes) -> bytes:
    status = bytes(_standing.decode(value).status)
    if not status:
        return value[:-1] + b',"status":{' + word + b"}}"
    if status.startswith(b"{" + word[: word.index(b":") + 1]):
        return value
    # The status is the last thing in a row, so it is found from the end.
    begin = len(value) - 1 - len(status)
    return value[:begin] + b"{" + word + (b"," if len(status) > 2 else b"") + status[1:] + b"}"


def _veiled(value: bytes) -> bytes:
    """Which keys there are may be known; what they hold goes to the nodes that need it, and to nobody else."""
    thing = decode(value)
    if not isinstance(thing, Secret):
        return value
    spec = msgspec.structs.replace(thing.spec, data=dict.fromkeys(thing.spec.data, ""))
    sizes = {name: plain_bytes(value) for name, value in thing.spec.data.items()}
    return encode(msgspec.structs.replace(thing, spec=spec, status=SecretStatus(sizes=sizes)))


def parts_of(key: str) -> tuple[str, str, str]:
    """The kind, tenant and name that a key stands for; the kind is empty if it is no object's."""
    word, _, rest = key.partition("/")
    kind = BY_WORD.get(word, "")
    if kind in TENANTED:
        tenant, _, name = rest.partition("/")
        return kind, tenant, name
    return kind, "", rest


def gone(key: str) -> GoneObject:
    kind, tenant, name = parts_of(key)
    return GoneObject(kind=kind, metadata=GoneMeta(name=name, tenant=tenant))


def listed(kind: str, items: Iterable[bytes], revision: int, rest: str) -> bytes:
    """A list of objects that are written already."""
    more = b',"continue":"' + rest.encode() + b'"' if rest else b""
    head = f'{{"apiVersion":"{API_VERSION}","kind":"{kind}List","metadata":{{"revision":{revision}'.encode()
    return head + more + b'},"items":[' + b",".join(items) + b"]}"


def tag(revision: int) -> str:
    """The ETag of an object that stands at a revision."""
    return f'"{revision}"'


def veiled(thing: AnyObject) -> AnyObject:
    """For objects that are no rows yet."""
    return decode(_veiled(encode(thing))) if isinstance(thing, Secret) else thing
