"""Validates a document or an object.

The manifest reader validates a document with the position of each value. The authority validates an object, which is first
written out as a document without positions. Both run the same code, so they reject the same things with the same messages.
An object that was just decoded from a valid manifest in this process is not validated again. No I/O.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any, Final, cast

import msgspec
from msgspec import Raw, inspect

from remit.model import objects
from remit.model.kinds import Secret, Workload, WorkloadSpec
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.decoder import decode_manifest, valid_specs
from remit.model.manifests.documents import JSON_BYTES_MAX, JSON_NODES_MAX, NO_POSITION, DocumentNode, to_document
from remit.model.manifests.field_rules import FieldRules
from remit.model.manifests.suggestions import FieldIndex
from remit.model.manifests.type_checks import TypeChecker
from remit.model.objects import encode_spec
from remit.model.problems import Problem, Problems
from remit.model.resources import Amount, Duration
from remit.model.secrets import sealing_overhead_bytes

AUTHORITY_FIELDS = frozenset({"uid", "generation", "revision", "created", "deleting"})
"""Metadata fields that the authority sets. Like the status they are not part of what is declared."""


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


def is_known_valid_spec(spec: WorkloadSpec) -> bool:
    """Whether an equal spec was found valid before."""
    return valid_specs.get(encode_spec(spec)) is not None


def _is_valid_workload(workload: Workload) -> bool:
    """Whether a workload whose spec is known is valid. Only "yes" is certain: the full validation decides the rest."""
    if not is_known_valid_spec(workload.spec):
        return False
    manifest = {
        "apiVersion": workload.api_version,
        "kind": "Workload",
        "metadata": _plain_metadata(workload),
        "spec": Raw(encode_spec(workload.spec)),
    }
    return decode_manifest(objects.encode(manifest)) is not None


_validated: Final[dict[int, AnyObject]] = {}
VALIDATED_MAX: Final = 2_048


def mark_validated(obj: AnyObject) -> None:
    """Spares this very object its next validation in this process.

    The mark is by identity: an object decoded from a message is another one, so no sender can forge it. The table refers to
    the object, so that its identity cannot pass to another, until `validate` uses the mark up.
    """
    if len(_validated) >= VALIDATED_MAX:
        _validated.clear()
    _validated[id(obj)] = obj


def validate(obj: AnyObject) -> tuple[Problem, ...]:
    """Returns the problems of a declared object. Fields that the authority sets (metadata, status) are not checked."""
    if _validated.pop(id(obj), None) is obj or (type(obj) is Workload and _is_valid_workload(obj)):
        return ()
    kind = type(obj).__name__
    problems = Problems(kind)
    problems.as_json = True
    document = to_document(to_manifest(obj))
    # The limits of a file also hold for an object, so that every stored object can be written out and read again.
    if document.size > JSON_NODES_MAX:
        problems.add(NO_POSITION, (), f"{document.size} values are too many", f"use at most {JSON_NODES_MAX}")
        return problems.sorted_problems()
    size = len(objects.encode(obj)) - (sealing_overhead_bytes(obj.spec.data) if isinstance(obj, Secret) else 0)
    if size > JSON_BYTES_MAX:
        problems.add(
            NO_POSITION, (), f"{size} bytes are too many", f"use at most {JSON_BYTES_MAX}: split it into several objects"
        )
        return problems.sorted_problems()
    validate_document(document, kind, problems, system=False)
    if not problems and isinstance(obj, Workload):
        valid_specs.add(obj.spec)
    return problems.sorted_problems()


def to_manifest(obj: AnyObject) -> dict[str, Any]:
    """Returns the manifest that declares this object, without defaults and without fields that the authority sets.

    Defaults are compared by value. The encoder compares some by identity, so that equal objects could be written differently
    and validated differently.
    """
    manifest = {"apiVersion": obj.api_version, "kind": type(obj).__name__, **_to_plain(obj)}
    manifest.pop("status", None)
    manifest["metadata"] = _plain_metadata(obj)
    return manifest


def _plain_metadata(obj: AnyObject) -> Any:
    plain = _to_plain(obj.metadata)
    return {name: value for name, value in plain.items() if name not in AUTHORITY_FIELDS} if isinstance(plain, dict) else plain


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
