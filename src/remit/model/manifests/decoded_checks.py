"""Checks of decoded values that the decoder does not make.

The decoder enforces types, patterns, lengths and bounds, all of which the types declare. It does not check field constraints
(constraints.py), names of resources and quantities. The checks here find the parts of a type that have one of these, and run
the type checks of type_checks.py on these parts only. No rule is stated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from msgspec import inspect

from remit.model.constraints import FieldConstraint
from remit.model.manifests.documents import DocumentNode
from remit.model.manifests.type_checks import TypeChecker
from remit.model.problems import Path
from remit.model.resources import Amount

DecodedCheck = Callable[[TypeChecker, DocumentNode, Path], None]
"""Reports the violations in one value and in everything below it."""


def decoded_check(type_: inspect.Type) -> DecodedCheck | None:
    """Returns the check of a type; None if the decoder checks everything about it."""
    match type_:
        case inspect.StructType():
            return struct_check(type_.cls)
        case inspect.Metadata():
            return _annotated_check(type_, type_.extra or {})
        case inspect.UnionType(types=parts):
            checks = [decoded_check(part) for part in parts if not isinstance(part, inspect.NoneType)]
            return checks[0] if len(checks) == 1 else _complete_check(type_) if any(checks) else None
        case inspect.VarTupleType():
            return _items_check(type_.item_type)
        case inspect.DictType():
            return _dict_check(type_)
        case inspect.CustomType(cls=cls):
            return _complete_check(type_) if cls is Amount else None
        case inspect.TupleType():
            return _complete_check(type_)
    return None


def _annotated_check(type_: inspect.Metadata, extra: dict[str, Any]) -> DecodedCheck | None:
    if "quantity" in extra:
        return _quantity_check(type_)
    if isinstance(type_.type, inspect.CustomType) and type_.type.cls is Amount:
        return _complete_check(type_)
    check_inner = decoded_check(type_.type)
    return _constraint_check(extra["limits"], check_inner) if "limits" in extra else check_inner


def _complete_check(type_: inspect.Type) -> DecodedCheck:
    def check(checker: TypeChecker, node: DocumentNode, path: Path) -> None:
        checker.check(node, type_, path)

    return check


class LeftToReader(ValueError):
    """The reader builds another value from this form than the decoder."""


def _quantity_check(type_: inspect.Type) -> DecodedCheck:
    def check(checker: TypeChecker, node: DocumentNode, path: Path) -> None:
        if node.type != "string":  # the reader keeps the text of a number
            raise LeftToReader(path)
        checker.check(node, type_, path)

    return check


def _constraint_check(constraints: Sequence[FieldConstraint], check_inner: DecodedCheck | None) -> DecodedCheck:
    def check(checker: TypeChecker, node: DocumentNode, path: Path) -> None:
        checker.check_constraints(node, constraints, path)
        if check_inner is not None:
            check_inner(checker, node, path)

    return check


@cache
def struct_check(cls: type) -> DecodedCheck | None:
    info = inspect.type_info(cls)
    fields = info.fields if isinstance(info, inspect.StructType) else ()
    checks = {field.encode_name: check for field in fields if (check := decoded_check(field.type)) is not None}

    def check_fields(checker: TypeChecker, node: DocumentNode, path: Path) -> None:
        for name, entry in node.fields.items():
            check = checks.get(name)
            if check is not None:
                check(checker, entry.value, (*path, name))

    return check_fields if checks else None


def _items_check(item_type: inspect.Type) -> DecodedCheck | None:
    check = decoded_check(item_type)
    if check is None:
        return None

    def check_items(checker: TypeChecker, node: DocumentNode, path: Path) -> None:
        for index, item in enumerate(node.items):
            check(checker, item, (*path, index))

    return check_items


def _dict_check(type_: inspect.DictType) -> DecodedCheck | None:
    key_check, value_check = decoded_check(type_.key_type), decoded_check(type_.value_type)

    def check_entries(checker: TypeChecker, node: DocumentNode, path: Path) -> None:
        for name, entry in node.fields.items():
            if key_check is not None:
                key_check(checker, DocumentNode("string", entry.position, name, name), (*path, name))
            if value_check is not None:
                value_check(checker, entry.value, (*path, name))

    return None if key_check is None and value_check is None else check_entries
