"""JSON Schema of each kind for editors.

Generated from the types and their constraints. The schema accepts everything that the reader accepts. It cannot express the
rules between fields (field_rules.py), so an editor does not report their violations; `remit validate` does.
"""

from __future__ import annotations

from typing import Any, cast

from msgspec import inspect

from remit.model import metadata, objects, resources
from remit.model.constraints import NUL_PATTERN
from remit.model.kinds.registry import BY_KIND
from remit.model.manifests.type_checks import (
    DEVICE_NAME_PATTERN,
    RESOURCE_ALIASES,
    RESOURCES,
    RESOURCES_MAX,
    UNSUPPORTED_AMOUNTS,
)
from remit.model.resources import INTERNAL_PREFIXES, Duration

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_QUANTITY_DESCRIPTIONS = {"share": "a part of one device, 1m to 999m"}
_QUANTITY = f"^{resources.QUANTITY}$"
_DURATION = f"^(?=.){resources.DURATION}$"


def schema(kind: str) -> dict[str, Any]:
    """Returns the schema of one kind. Raises KeyError for an unknown kind."""
    writer = SchemaWriter()
    reference = writer.root(kind)
    return {"$schema": DIALECT, "title": kind, **reference, "$defs": writer.definitions}


def schema_of_all() -> dict[str, Any]:
    """Returns one schema for all declared kinds, selected by `kind`: for an editor that validates a whole directory."""
    writer = SchemaWriter()
    references = {kind: writer.root(kind) for kind in objects.DECLARED}
    mapping = {kind: reference["$ref"] for kind, reference in references.items()}
    choice = {"oneOf": list(references.values()), "discriminator": {"propertyName": "kind", "mapping": mapping}}
    return {"$schema": DIALECT, "title": "Remit manifest", "type": "object", **choice, "$defs": writer.definitions}


class SchemaWriter:
    """Writes the schemas of msgspec types. msgspec's own writer is not used because it cannot write defaults that are an Amount
    or a Duration. References start with `prefix`.
    """

    def __init__(self, prefix: str = "#/$defs/") -> None:
        self.definitions: dict[str, Any] = {}
        self._prefix = prefix
        self._names: dict[Any, str] = {}

    def schema_of(self, type_: Any) -> dict[str, Any]:
        """Returns the schema of any request or response type."""
        return self._type(inspect.type_info(type_))

    def shared(self, name: str, written: dict[str, Any]) -> dict[str, Any]:
        """Hook for schemas that are used in many places. Here they are written inline; the OpenAPI writer shares them."""
        return written

    def root(self, kind: str) -> dict[str, Any]:
        """Returns the schema of a kind as it is written in a manifest, without its status."""
        type_ = cast(inspect.StructType, inspect.type_info(objects.KINDS[kind]))
        reference = self._struct(type_)
        definition = self.definitions[kind]
        definition["description"] = BY_KIND[kind].summary or definition.get("description", "")
        definition["required"] = sorted({"apiVersion", "kind", *definition["required"]})
        definition["properties"] = {
            "apiVersion": {"const": metadata.API_VERSION},
            "kind": {"const": kind},
            **{name: field for name, field in definition["properties"].items() if name not in ("apiVersion", "status")},
        }
        if kind in objects.DECLARED:
            required_tenant = {"required": ["tenant"], "properties": {"tenant": {"minLength": 1}}}
            tenant_schema = required_tenant if kind in objects.TENANTED else {"properties": {"tenant": False}}
            definition["properties"]["metadata"] = {"allOf": [{"$ref": f"{self._prefix}Metadata"}, tenant_schema]}
            self.definitions["Metadata"]["properties"].pop("deleting", None)
        return reference

    def _struct(self, type_: inspect.StructType) -> dict[str, Any]:
        name = self._name(type_.cls)
        if name not in self.definitions:
            definition: dict[str, Any] = {"type": "object"}
            self.definitions[name] = definition
            if type_.forbid_unknown_fields:
                definition["additionalProperties"] = False
            described = (getattr(type_.cls, "__origin__", type_.cls).__dict__.get("__doc__") or "").strip().split("\n\n")[0]
            if described:
                definition["description"] = " ".join(described.split())
            tag = {} if type_.tag_field is None else {type_.tag_field: {"const": type_.tag}}
            definition["properties"] = {**tag, **{field.encode_name: self._field(field) for field in type_.fields}}
            definition["required"] = [*tag, *(field.encode_name for field in type_.fields if field.required)]
        return {"$ref": f"{self._prefix}{name}"}

    def _name(self, cls: Any) -> str:
        """Returns the name of a type's definition: its class name, prefixed with its module's name if that is taken."""
        name = self._names.get(cls)
        if name is None:
            parts = getattr(cls, "__args__", ())
            name = f"{self._name(parts[0])}List" if parts else str(cls.__name__)
            if name in self._names.values():
                name = cls.__module__.rpartition(".")[2].capitalize() + name
            self._names[cls] = name
        return name

    def _field(self, field: inspect.Field) -> dict[str, Any]:
        written = self._type(field.type)
        if isinstance(field.default, Duration):
            return {**written, "default": str(field.default)}
        if isinstance(field.default, (bool, int, str)) and field.default != "":
            return {**written, "default": field.default}
        return written

    def _type(self, type_: inspect.Type) -> dict[str, Any]:
        if isinstance(type_, inspect.Metadata):
            extra = type_.extra or {}
            described = type_.extra_json_schema or {}
            if "quantity" in extra:
                text = _QUANTITY_DESCRIPTIONS.get(extra["quantity"], "a number with an optional suffix, such as 64Mi")
                written = {**_quantity(extra["quantity"]), "description": text}
            elif extra.get("devices") is False:
                written = self.shared("Resources", _amount(devices=False))
            else:
                written = self._type(type_.type)
            for constraint in extra.get("limits", ()):
                written = _combine(written, constraint.schema())
            return {**written, **described}
        if isinstance(type_, inspect.StructType):
            return self._struct(type_)
        if isinstance(type_, inspect.UnionType):
            return self._union(type_)
        if isinstance(type_, inspect.CustomType):
            if type_.cls is Duration:
                return self.shared("Duration", _duration())
            return self.shared("Amount", _amount(devices=True))
        return self._container(type_) or _scalar(type_)

    def _union(self, type_: inspect.UnionType) -> dict[str, Any]:
        parts = [self._type(part) for part in type_.types]
        tagged = [part for part in type_.types if isinstance(part, inspect.StructType) and part.tag_field is not None]
        if len(tagged) < len(parts):
            return {"anyOf": parts}
        mapping = {str(type_part.tag): part["$ref"] for type_part, part in zip(tagged, parts, strict=True)}
        return {"oneOf": parts, "discriminator": {"propertyName": tagged[0].tag_field, "mapping": mapping}}

    def _container(self, type_: inspect.Type) -> dict[str, Any] | None:
        if isinstance(type_, inspect.DictType):
            written: dict[str, Any] = {"type": "object", "additionalProperties": self._type(type_.value_type)}
            names = self._type(type_.key_type)
            names.pop("description", None)
            return {
                **written,
                "propertyNames": names,
                **_limits(type_, {"min_length": "minProperties", "max_length": "maxProperties"}),
            }
        if isinstance(type_, (inspect.VarTupleType, inspect.ListType)):
            items = {"type": "array", "items": self._type(type_.item_type)}
            return {**items, **_limits(type_, {"min_length": "minItems", "max_length": "maxItems"})}
        if isinstance(type_, inspect.TupleType):
            return {"type": "array", "prefixItems": [self._type(part) for part in type_.item_types], "items": False}
        return None


def _combine(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema that requires both. If they share a key, merging would lose one of them, so they go into `allOf`."""
    return {**first, **second} if first.keys().isdisjoint(second) else {"allOf": [first, second]}


def _scalar(type_: inspect.Type) -> dict[str, Any]:
    if isinstance(type_, (inspect.AnyType, inspect.RawType)):
        return {}
    if isinstance(type_, inspect.BytesType):
        return {"type": "string", "format": "binary"}
    if isinstance(type_, inspect.StrType):
        limits = {"min_length": "minLength", "max_length": "maxLength", "pattern": "pattern"}
        written = {"type": "string", **_limits(type_, limits)}
        return written if type_.pattern else {**written, "not": {"pattern": NUL_PATTERN}}
    if isinstance(type_, inspect.IntType):
        return {"type": "integer", **_limits(type_, {"ge": "minimum", "le": "maximum"})}
    if isinstance(type_, inspect.BoolType):
        return {"type": "boolean"}
    if isinstance(type_, inspect.NoneType):
        return {"type": "null"}
    if isinstance(type_, inspect.FloatType):
        return {"type": "number"}
    if isinstance(type_, inspect.LiteralType):
        return {"enum": list(type_.values)}
    if isinstance(type_, inspect.EnumType):
        return {"enum": [member.value for member in type_.cls]}
    if isinstance(type_, inspect.BytesType):
        return {"type": "string", "format": "binary"}
    raise TypeError(f"json_schema.py does not support {type(type_).__name__}: add it to _scalar()")


def _limits(type_: inspect.Type, names: dict[str, str]) -> dict[str, Any]:
    return {target: getattr(type_, source) for source, target in names.items() if getattr(type_, source) is not None}


def _quantity(resource: str = "") -> dict[str, Any]:
    """Returns the schema of a quantity. Bytes have no thousandths, and cpu has no binary suffixes such as Gi."""
    if resource and resources.scale(resource) == 1:
        return {"anyOf": [{"type": "string", "pattern": _QUANTITY.replace("(m|k|", "(k|")}, {"type": "integer", "minimum": 0}]}
    pattern = _QUANTITY.replace("[KMGTPE]i|", "") if resource == "cpu" else _QUANTITY
    return {"anyOf": [{"type": "string", "pattern": pattern}, {"type": "number", "minimum": 0}]}


def _duration() -> dict[str, Any]:
    return {"type": "string", "pattern": _DURATION, "examples": ["250ms", "30s", "5m", "1h30m"]}


def _amount(*, devices: bool) -> dict[str, Any]:
    """Returns the schema of an amount. Without `devices` that key is forbidden: nodes and templates list their devices in a
    field of its own.
    """
    of_devices = {
        "type": "object",
        "additionalProperties": _quantity(),
        "propertyNames": {"pattern": metadata.DNS_LABEL},
        "maxProperties": RESOURCES_MAX,
        "description": "devices by kind",
    }
    misnamed = [
        {"pattern": f"^({'|'.join(INTERNAL_PREFIXES)})"},
        {"pattern": DEVICE_NAME_PATTERN},
        {"enum": sorted({*RESOURCE_ALIASES, *UNSUPPORTED_AMOUNTS})},
    ]
    return {
        "type": "object",
        "properties": {
            **{name: _quantity(name) for name in RESOURCES},
            "devices": of_devices if devices else False,
        },
        "propertyNames": {"pattern": metadata.LABEL_KEY, "not": {"anyOf": misnamed}},
        "maxProperties": RESOURCES_MAX,
        "additionalProperties": _quantity(),
    }
