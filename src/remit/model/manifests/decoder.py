"""Decodes a JSON manifest in one pass and checks it, without positions.

`decode_manifest` either returns the object that the manifest reader (reader.py) would build, or None. It returns None for
everything that is invalid, and for a few valid forms that are rare: numbers with a fraction, shares and sizes that are numbers,
some escapes, a missing spec. The caller then lets the reader read the manifest, which reports each problem with its position,
or builds the object.

- Types, unknown fields, patterns, lengths and bounds are enforced by the decoder, because the types declare them.
- decoded_checks.py and field_rules.py check the rest, with the code that the reader uses.
- `has_unique_keys` finds keys that appear twice, of which the decoder drops all but one.

The specs of workloads are cached, because many workloads have the same spec under different names. No rule of a workload looks
at metadata and spec together, so a valid spec is valid under any name. No I/O.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final, Literal, NoReturn, cast

import msgspec
from msgspec import Raw, Struct, field

from remit.model import objects
from remit.model.constraints import RESERVED_PREFIX
from remit.model.kinds import Workload, WorkloadSpec
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.decoded_checks import DecodedCheck, struct_check
from remit.model.manifests.documents import JSON_BYTES_MAX, JSON_NODES_MAX, contains_control_character, to_document
from remit.model.manifests.field_rules import FieldRules
from remit.model.manifests.type_checks import TypeChecker
from remit.model.metadata import Metadata, Name, UserLabels
from remit.model.problems import Problems

VALID_SPECS_MAX: Final = 4_096


class ValidSpecs:
    """Valid specs of workloads by their bytes: as they were sent, and as they are encoded. Emptied when it is full.

    Bytes with control characters are left out: escaped, some are valid in a manifest in which they are not valid as they are.
    """

    def __init__(self) -> None:
        self._specs: dict[bytes, WorkloadSpec] = {}
        self.get = self._specs.get

    def add(self, spec: WorkloadSpec, sent: bytes = b"") -> None:
        if len(self._specs) >= VALID_SPECS_MAX:
            self._specs.clear()
        for encoded in (sent, objects.encode_spec(spec)):
            if encoded and len(encoded) <= objects.SPEC_BYTES_MAX and not contains_control_character(encoded):
                self._specs[encoded] = spec


valid_specs: Final = ValidSpecs()


class _Manifest(Struct, forbid_unknown_fields=True, rename="camel", gc=False):
    """A manifest with its spec left undecoded."""

    api_version: Literal["remit/v1"]
    kind: str
    metadata: dict[str, Any]
    spec: Raw


class _PlainMetadata(Struct, forbid_unknown_fields=True, gc=False):
    """The metadata of most workloads. The decoder checks all rules of these fields except the reserved prefix of labels."""

    name: Name
    tenant: Name
    labels: UserLabels = field(default_factory=dict)


def _reject_fraction(text: str) -> NoReturn:
    raise ValueError(text)


_manifest_decoder: Final = msgspec.json.Decoder(_Manifest, float_hook=_reject_fraction)
_plain_decoder: Final = msgspec.json.Decoder(float_hook=_reject_fraction)
_encode: Final = msgspec.json.Encoder().encode
_ESCAPE_LEFT_TO_READER: Final = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])").search
"""NUL, and halves of surrogate pairs."""
_ESCAPED_COLON: Final = re.compile(rb"\\u003[aA]").search


def has_unique_keys(body: bytes, decoded: object) -> bool:
    """Whether no object of a JSON text has a key twice. `decoded` is its value. Only "yes" is certain.

    A decoder drops all but one of two equal keys. Every member of an object has one colon, and a text has as many colons
    decoded as encoded unless one is written as an escape. So equal numbers of colons mean that no member was dropped.
    """
    return _encode(decoded).count(b":") == body.count(b":") and (b"\\u" not in body or _ESCAPED_COLON(body) is None)


def decode_manifest(body: bytes) -> AnyObject | None:
    """Returns the object of one manifest; None if it is invalid or of a form that is left to the reader."""
    if len(body) > JSON_BYTES_MAX or (b"\\u" in body and _ESCAPE_LEFT_TO_READER(body) is not None):
        return None
    try:
        if contains_control_character(body):
            return None
        manifest = _manifest_decoder.decode(body)
        if not has_unique_keys(body, manifest):
            return None
        spec = bytes(manifest.spec)
        known = valid_specs.get(spec) if manifest.kind == "Workload" else None
        workload = None if known is None else _with_known_spec(manifest, known)
        return _decode_in_full(manifest, spec) if workload is None else workload
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _with_known_spec(manifest: _Manifest, spec: WorkloadSpec) -> Workload | None:
    """Returns the workload of a manifest with a valid spec; None if its metadata is invalid or not plain."""
    try:
        plain = msgspec.convert(manifest.metadata, _PlainMetadata)
    except msgspec.MsgspecError:
        return None
    for label in plain.labels:
        if label.startswith(RESERVED_PREFIX):
            return None
    # The decoded `api_version` is passed on because the encoder leaves out only the default object itself, not an equal string.
    meta = Metadata(name=plain.name, tenant=plain.tenant, labels=plain.labels)
    return Workload(api_version=manifest.api_version, metadata=meta, spec=spec)


def _decode_in_full(manifest: _Manifest, spec: bytes) -> AnyObject | None:
    kind, plain_spec = manifest.kind, _plain_decoder.decode(spec)
    if kind not in objects.DECLARED or not has_unique_keys(spec, plain_spec):
        return None
    plain = {"apiVersion": manifest.api_version, "kind": kind, "metadata": manifest.metadata, "spec": plain_spec}
    obj = cast(AnyObject, msgspec.convert(plain, objects.KINDS[kind], dec_hook=objects.dec_hook))
    if not _is_valid(plain, kind):
        return None
    if isinstance(obj, Workload):
        valid_specs.add(obj.spec, spec)
    return obj


@cache
def _check_of(kind: str) -> DecodedCheck | None:
    return struct_check(objects.KINDS[kind])


def _is_valid(plain: dict[str, Any], kind: str) -> bool:
    """Whether a manifest that the decoder accepted passes all other checks."""
    problems = Problems(kind)
    document = to_document(plain)
    check = _check_of(kind)
    if check is not None:
        check(TypeChecker(problems, None), document, ())
    FieldRules(problems, document, kind, system=False).check()
    return not problems and document.size <= JSON_NODES_MAX
