"""Which body says nothing that was not judged before? A workload of a known spec under another name; bodies.py judges the rest.

It answers with the very object that the whole reading would build, or not at all, for these reasons:

- *No key twice.* Whatever a decoder passes over, a second key of one name for one, is missing when it is written out again.
  Every member of an object has one colon, and without backslashes the colons inside of strings are the same bytes on both
  sides: so if both have as many, nothing was passed over. The spec is not decoded at all, and is written out as it came.
- *A sound spec.* The same bytes were read and judged whole before.
- *Sound metadata.* Nothing but a name, a tenant and labels, each of the plainest form (model/soundness.py).
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw, Struct

from remit.model.fields import API_VERSION, Metadata
from remit.model.kinds import Workload, WorkloadSpec
from remit.model.objects import AnyObject
from remit.model.soundness import Remembered, plainly_named


class _Named(Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    name: str
    tenant: str
    labels: dict[str, str] = {}


class Head(Struct, forbid_unknown_fields=True, rename="camel", omit_defaults=True, gc=False):
    """A manifest whose spec was not read."""

    api_version: str
    kind: str
    metadata: _Named
    spec: Raw


_heads: Final = msgspec.json.Decoder(Head)
_raws: Final = msgspec.json.Decoder(list[Raw])
_encode: Final = msgspec.json.Encoder().encode
_specs: Final[Remembered[WorkloadSpec]] = Remembered()


def head_of(body: bytes) -> Head | None:
    """None for whatever is not plain."""
    if b"\\" in body:
        return None
    try:
        head = _heads.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if head.kind != "Workload" or head.api_version != API_VERSION or _encode(head).count(b":") != body.count(b":"):
        return None
    meta = head.metadata
    return head if plainly_named(meta.name, meta.tenant, meta.labels) else None


def known(head: Head) -> AnyObject | None:
    spec = _specs.get(bytes(head.spec))
    if spec is None:
        return None
    meta = Metadata(name=head.metadata.name, tenant=head.metadata.tenant, labels=head.metadata.labels)
    # As it was said: the default is not written out, and a retry of what was read whole must be the same bytes.
    return Workload(api_version=head.api_version, metadata=meta, spec=spec)  # type: ignore[arg-type]  # head_of compared it


def learn(head: Head, thing: AnyObject) -> None:
    """This is what the whole reading made of it."""
    if isinstance(thing, Workload):
        _specs.put(bytes(head.spec), thing.spec)


COMMAS_EACH: Final = 32
"""What has more than so many commas for each manifest that may be is not plain."""


def pieces(body: bytes, most: int) -> list[bytes]:
    """The manifests of an array, each by itself; none if it is something else, or more than may be."""
    if body[:1] != b"[" or body.count(b",") > COMMAS_EACH * most:
        return []
    try:
        found = _raws.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return []
    return [bytes(raw) for raw in found] if len(found) <= most else []
