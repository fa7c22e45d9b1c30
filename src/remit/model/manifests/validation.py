"""Validates a document or an object; remembers specs already found valid.

If it is not, judging.py looks, and says what it breaks. No I/O here.

Work comes in floods of one shape: each time another name, and the same spec. No rule of a workload looks at metadata and
spec together (rules.py), so a spec that was once judged sound is sound again, byte for byte the same, under any name. What
is told by this is only `yes`: whatever is unusual is left to the judge.

One set for the reader of manifests and for the authority's door. No I/O.

The reader has a document with the place of each value. The door has an object that somebody built or decoded: it is written out
as a document without places, and judged by the same code. What one refuses the other refuses, in the same words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, Final, Generic, TypeVar, cast

import msgspec
from msgspec import inspect

from remit.model import objects
from remit.model.kinds import Workload, WorkloadSpec
from remit.model.manifests.documents import JSON_BYTES_MAX, JSON_NODES_MAX, DocumentNode, Position, ValueType
from remit.model.manifests.field_rules import FieldRules
from remit.model.manifests.suggestions import FieldIndex
from remit.model.manifests.type_checks import TypeChecker
from remit.model.metadata import API_VERSION, DNS_LABEL, END, LABEL_VALUE, Metadata
from remit.model.objects import encode_spec
from remit.model.problems import Problem, Problems
from remit.model.resources import Amount, Duration
from remit.model.secrets import Secret, sealing_overhead_bytes

V = TypeVar("V")

VALID_SPECS_MAX: Final = 4_096
SPEC_BYTES_MAX: Final = 8 << 10
"""Of a spec that is remembered: far below what a manifest may have."""
LABELS_MAX: Final = 16

_is_label: Final = re.compile(DNS_LABEL).search
_is_plain_key: Final = re.compile(r"^[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?" + END).search
"""A key without a prefix: whose prefix is reserved is the judge's to say."""
_is_label_value: Final = re.compile(LABEL_VALUE).search


class SpecCache(Generic[V]):
    """Values by the bytes that they stand for; all are forgotten when there are too many."""

    def __init__(self) -> None:
        self._values: dict[bytes, V] = {}
        self.get = self._values.get

    def put(self, spec: bytes, value: V) -> None:
        if len(spec) <= SPEC_BYTES_MAX:
            if len(self._values) >= VALID_SPECS_MAX:
                self._values.clear()
            self._values[spec] = value


_valid_specs: Final[SpecCache[bool]] = SpecCache()


def has_plain_metadata(name: str, tenant: str, labels: Mapping[str, str]) -> bool:
    """Would the judge find nothing wrong with metadata that say only this?"""
    if _is_label(name) is None or _is_label(tenant) is None or len(labels) > LABELS_MAX:
        return False
    for key, value in labels.items():  # noqa: SIM110  (a generator would cost more than what it goes through)
        if _is_plain_key(key) is None or _is_label_value(value) is None:
            return False
    return True


def is_known_valid(thing: Any) -> bool:
    """Is it known already that the judge finds nothing wrong?"""
    if type(thing) is not Workload or thing.api_version != API_VERSION:
        return False
    meta = thing.metadata
    if type(meta) is not Metadata or meta.annotations or meta.owners or meta.finalizers:
        return False
    return is_known_valid_spec(thing.spec) and has_plain_metadata(meta.name, meta.tenant, meta.labels)


def is_known_valid_spec(spec: WorkloadSpec) -> bool:
    """Was it judged before?"""
    return _valid_specs.get(encode_spec(spec)) is not None


def remember_valid(thing: Any) -> None:
    """The judge found nothing wrong."""
    if type(thing) is Workload:
        _valid_specs.put(encode_spec(thing.spec), True)


AUTHORITY_FIELDS = frozenset({"uid", "generation", "revision", "created", "deleting"})
"""Fields of metadata that the authority writes over. With the status they say nothing of what is declared."""

_NO_POSITION: Position = (1, 1)
_VALUE_TYPES: dict[type, ValueType] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


@cache
def struct_type_of(kind: str) -> inspect.StructType:
    return cast(inspect.StructType, inspect.type_info(objects.KINDS[kind]))


@cache
def field_index_of(kind: str) -> FieldIndex:
    return FieldIndex(struct_type_of(kind))


def validate_document(document: DocumentNode, kind: str, problems: Problems, *, system: bool) -> dict[str, Any]:
    """Tell every rule that the document breaks; the answer is its plain value, good only if nothing was told."""
    value = TypeChecker(problems, field_index_of(kind), system=system).struct(document, struct_type_of(kind), ())
    FieldRules(problems, document, kind, system=system).check()
    return value


def validate(thing: objects.AnyObject) -> tuple[Problem, ...]:
    """The rules that a declared object breaks, by path. What the authority stamps (metadata, status) is not judged."""
    if is_known_valid(thing):
        return ()
    kind = type(thing).__name__
    problems = Problems(kind)
    problems.as_json = True
    document = _to_document(to_manifest(thing))
    # The limits of a file hold for an object as well: what is stored can be written out and read again.
    if document.size > JSON_NODES_MAX:
        problems.add(_NO_POSITION, (), f"{document.size} values are too many", f"use at most {JSON_NODES_MAX}")
        return problems.sorted_problems()
    size = len(objects.encode(thing)) - (sealing_overhead_bytes(thing.spec.data) if isinstance(thing, Secret) else 0)
    if size > JSON_BYTES_MAX:
        problems.add(_NO_POSITION, (), f"{size} bytes are too many", f"use at most {JSON_BYTES_MAX}: split it into several")
        return problems.sorted_problems()
    validate_document(document, kind, problems, system=False)
    if not problems:
        remember_valid(thing)
    return problems.sorted_problems()


def to_manifest(thing: objects.AnyObject) -> dict[str, Any]:
    """The manifest that declares this object: without its defaults, and without what the authority stamps on it.

    By value, unlike the encoder, which leaves a default out only if it is the very same one: equal objects earn one verdict.
    """
    manifest = {"apiVersion": thing.api_version, "kind": type(thing).__name__, **_to_plain(thing)}
    manifest.pop("status", None)
    if isinstance(manifest.get("metadata"), dict):
        manifest["metadata"] = {name: value for name, value in manifest["metadata"].items() if name not in AUTHORITY_FIELDS}
    return manifest


_REQUIRED = object()


@cache
def _struct_fields(cls: type[msgspec.Struct]) -> tuple[tuple[str, str, object], ...]:
    """Each field: what it is called here, what it is called in a manifest, and its default."""
    parts = []
    for field in msgspec.structs.fields(cls):
        made = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else _REQUIRED
        default = field.default if field.default is not msgspec.NODEFAULT else made
        parts.append((field.name, field.encode_name, default))
    return tuple(parts)


def _to_plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        parts = ((name, getattr(value, field), default) for field, name, default in _struct_fields(type(value)))
        return {name: _to_plain(part) for name, part, default in parts if part != default}
    if isinstance(value, (tuple, list)):
        return [_to_plain(part) for part in value]
    if isinstance(value, dict):
        return {name: _to_plain(part) for name, part in value.items()}
    if isinstance(value, Amount):
        return value.to_manifest()
    if isinstance(value, Duration):
        return objects.enc_hook(value)
    return value.value if isinstance(value, Enum) else value


def _to_document(value: Any) -> DocumentNode:
    """As deep as the types go, which is not deep: a struct cannot hold itself."""
    if isinstance(value, dict):
        node = DocumentNode("mapping", _NO_POSITION)
        for key, part in value.items():
            node.set(key, _NO_POSITION, _to_document(part))
        return node
    if isinstance(value, list):
        node = DocumentNode("list", _NO_POSITION)
        for part in value:
            node.append(_to_document(part))
        return node
    return DocumentNode(_VALUE_TYPES[type(value)], _NO_POSITION, value, str(value))
