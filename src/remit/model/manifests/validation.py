"""Validates a document or an object; remembers specs already found valid.

The manifest reader validates a document with the position of each value. The authority validates an object, which is first
written out as a document without positions. Both run the same code, so they reject the same things with the same messages.

Many workloads have the same spec under different names. No rule of a workload looks at metadata and spec together
(field_rules.py), so a spec that was found valid is valid under any name, if it is byte for byte the same. This cache only
answers "known to be valid"; everything unusual goes through the full validation. No I/O.
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
from remit.model.kinds import Secret, Workload, WorkloadSpec
from remit.model.manifests.documents import JSON_BYTES_MAX, JSON_NODES_MAX, DocumentNode, Position, ValueType
from remit.model.manifests.field_rules import FieldRules
from remit.model.manifests.suggestions import FieldIndex
from remit.model.manifests.type_checks import TypeChecker
from remit.model.metadata import API_VERSION, DNS_LABEL, END, LABEL_VALUE, Metadata
from remit.model.objects import encode_spec
from remit.model.problems import Problem, Problems
from remit.model.resources import Amount, Duration
from remit.model.secrets import sealing_overhead_bytes

V = TypeVar("V")

VALID_SPECS_MAX: Final = 4_096
SPEC_BYTES_MAX: Final = 8 << 10
"""Larger specs are not cached. This is far below the limit of a manifest."""
LABELS_MAX: Final = 16

_is_label: Final = re.compile(DNS_LABEL).search
_is_plain_key: Final = re.compile(r"^[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?" + END).search
"""Matches a key without a prefix. Whether a prefix is reserved is left to the full validation."""
_is_label_value: Final = re.compile(LABEL_VALUE).search


class SpecCache(Generic[V]):
    """Values by encoded spec. The cache is emptied when it is full."""

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
    """Whether metadata with only these fields would be found valid."""
    if _is_label(name) is None or _is_label(tenant) is None or len(labels) > LABELS_MAX:
        return False
    for key, value in labels.items():  # noqa: SIM110 (a generator expression would be slower)
        if _is_plain_key(key) is None or _is_label_value(value) is None:
            return False
    return True


def is_known_valid(obj: Any) -> bool:
    """Whether the object is already known to be valid."""
    if type(obj) is not Workload or obj.api_version != API_VERSION:
        return False
    meta = obj.metadata
    if type(meta) is not Metadata or meta.annotations or meta.owners or meta.finalizers:
        return False
    return is_known_valid_spec(obj.spec) and has_plain_metadata(meta.name, meta.tenant, meta.labels)


def is_known_valid_spec(spec: WorkloadSpec) -> bool:
    """Whether an equal spec was found valid before."""
    return _valid_specs.get(encode_spec(spec)) is not None


def remember_valid(obj: Any) -> None:
    """Records that the full validation found no problem."""
    if type(obj) is Workload:
        _valid_specs.put(encode_spec(obj.spec), True)


AUTHORITY_FIELDS = frozenset({"uid", "generation", "revision", "created", "deleting"})
"""Metadata fields that the authority sets. Like the status they are not part of what is declared."""

_NO_POSITION: Position = (1, 1)
_VALUE_TYPES: dict[type, ValueType] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


@cache
def struct_type_of(kind: str) -> inspect.StructType:
    return cast(inspect.StructType, inspect.type_info(objects.KINDS[kind]))


@cache
def field_index_of(kind: str) -> FieldIndex:
    return FieldIndex(struct_type_of(kind))


def validate_document(document: DocumentNode, kind: str, problems: Problems, *, system: bool) -> dict[str, Any]:
    """Reports all problems of the document. The returned plain value is usable only if there are none."""
    value = TypeChecker(problems, field_index_of(kind), system=system).struct(document, struct_type_of(kind), ())
    FieldRules(problems, document, kind, system=system).check()
    return value


def validate(obj: objects.AnyObject) -> tuple[Problem, ...]:
    """Returns the problems of a declared object. Fields that the authority sets (metadata, status) are not checked."""
    if is_known_valid(obj):
        return ()
    kind = type(obj).__name__
    problems = Problems(kind)
    problems.as_json = True
    document = _to_document(to_manifest(obj))
    # The limits of a file also hold for an object, so that every stored object can be written out and read again.
    if document.size > JSON_NODES_MAX:
        problems.add(_NO_POSITION, (), f"{document.size} values are too many", f"use at most {JSON_NODES_MAX}")
        return problems.sorted_problems()
    size = len(objects.encode(obj)) - (sealing_overhead_bytes(obj.spec.data) if isinstance(obj, Secret) else 0)
    if size > JSON_BYTES_MAX:
        problems.add(
            _NO_POSITION, (), f"{size} bytes are too many", f"use at most {JSON_BYTES_MAX}: split it into several objects"
        )
        return problems.sorted_problems()
    validate_document(document, kind, problems, system=False)
    if not problems:
        remember_valid(obj)
    return problems.sorted_problems()


def to_manifest(obj: objects.AnyObject) -> dict[str, Any]:
    """Returns the manifest that declares this object, without defaults and without fields that the authority sets.

    Defaults are compared by value. The encoder compares some by identity, so that equal objects could be written differently
    and validated differently.
    """
    manifest = {"apiVersion": obj.api_version, "kind": type(obj).__name__, **_to_plain(obj)}
    manifest.pop("status", None)
    if isinstance(manifest.get("metadata"), dict):
        manifest["metadata"] = {name: value for name, value in manifest["metadata"].items() if name not in AUTHORITY_FIELDS}
    return manifest


_REQUIRED = object()


@cache
def _struct_fields(cls: type[msgspec.Struct]) -> tuple[tuple[str, str, object], ...]:
    """Returns for each field its attribute name, its name in a manifest, and its default."""
    fields = []
    for field in msgspec.structs.fields(cls):
        default_value = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else _REQUIRED
        default = field.default if field.default is not msgspec.NODEFAULT else default_value
        fields.append((field.name, field.encode_name, default))
    return tuple(fields)


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
    """Recursion is bounded by the types: no struct contains itself."""
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
