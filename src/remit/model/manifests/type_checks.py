"""Type checks of document values against msgspec types.

Every mismatch is reported with a fix, and none stops the check of the rest. The types are those of model/kinds as msgspec
describes them, so that a new field needs no code here. Rules between values are in field_rules.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from msgspec import inspect

from remit.model import metadata, resources
from remit.model.constraints import FieldConstraint
from remit.model.manifests.documents import TYPE_NAMES, DocumentNode
from remit.model.manifests.suggestions import SET_BY_REMIT, FieldIndex, suggest_field_fix
from remit.model.problems import Path, Problems, closest_name, did_you_mean, one_of, quoted
from remit.model.resources import DEVICES_PREFIX, Amount, Duration

_LEAVE_OUT = "write a value, or leave the field out if it may be missing"
_LABEL_RULE = "use letters, digits, -, _ and . with a letter or digit at both ends, at most 63"
_PATTERNS: dict[str, tuple[str, str]] = {
    metadata.DNS_LABEL: (
        "is not a DNS label",
        "use a-z, 0-9 and -, with a letter or digit at both ends, at most 63 characters",
    ),
    metadata.QUALIFIED_NAME: ("is not TENANT/NAME", "write both, as in risk/risk-api"),
    metadata.LABEL_KEY: ("is not a label key", f"{_LABEL_RULE}; optionally with a lower-case domain and / in front"),
    metadata.LABEL_VALUE: ("is not a label value", _LABEL_RULE),
    metadata.ENV_NAME: ("is not a name of an environment variable", "use letters, digits and _, and no digit first"),
    metadata.FILE_NAME: ("is not a file name", "use letters, digits, -, _ and ., without .. in front, at most 253 characters"),
    metadata.URL_PATH: ("is not a path", 'start it with "/"'),
    metadata.KIND: ("is not a kind", "use letters and digits, such as Workload"),
    metadata.UID: ("is not a uid", "use letters, digits, -, _, . and :"),
    "^[0-9a-f]{64}" + metadata.END: (
        "is not a SHA-256",
        "write its 64 hexadecimal digits in lower case, as sha256sum prints them",
    ),
}
DATA_PATH = ("spec", "data")
"""Path of the values of a Secret."""
_TYPOGRAPHIC_QUOTES = "“”„‘’‚«»"
RESOURCES_MAX = 64
RESOURCES = ("cpu", "memory", "storage", "ephemeral-storage")
RESOURCE_ALIASES = {"mem": "memory", "ram": "memory", "cpus": "cpu", "cores": "cpu", "disk": "storage", "vcpu": "cpu"}
DEVICE_NAME_PATTERN = r"^(?:.*[./])?(?:gpus?|tpus?|fpgas?)" + metadata.END
UNSUPPORTED_AMOUNTS = ("requests", "limits")
"""Other systems have separate requests and limits; Remit has one amount of each resource."""


class TypeChecker:
    """Checks one document. `check` returns the plain value for msgspec, which is usable only if no problem was reported."""

    def __init__(self, problems: Problems, fields: FieldIndex | None, *, system: bool = False) -> None:
        self._problems = problems
        self._field_index = fields
        self._system = system

    def check(self, node: DocumentNode, type_: inspect.Type, path: Path) -> Any:
        if node.type == "void":
            return None
        if isinstance(type_, inspect.Metadata):
            return self._constrained(node, type_, type_.extra, path) if type_.extra else self.check(node, type_.type, path)
        if isinstance(type_, inspect.UnionType):
            return self._union(node, type_, path)
        if node.type == "null":
            self._add_problem(node, path, "is empty", _LEAVE_OUT)
            return None
        if isinstance(type_, inspect.StructType):
            return self.struct(node, type_, path)
        if isinstance(type_, inspect.DictType):
            return self._dict(node, type_, path)
        if isinstance(type_, (inspect.VarTupleType, inspect.TupleType)):
            return self._list(node, type_, path)
        return self._scalar(node, type_, path)

    def _constrained(self, node: DocumentNode, type_: inspect.Metadata, extra: dict[str, Any], path: Path) -> Any:
        """Checks the constraints of a field (constraints.py) before its type, and reports both."""
        if self.check_constraints(node, extra.get("limits", ()), path) and node.type == "list" and not node.items:
            return []  # the violation is a better message than the number of items
        if "quantity" in extra:
            return self._quantity(node, str(extra["quantity"]), path)
        if isinstance(type_.type, inspect.CustomType) and type_.type.cls is Amount:
            return self._amount(node, path, devices=bool(extra.get("devices")))
        return self.check(node, type_.type, path)

    def check_constraints(self, node: DocumentNode, constraints: Sequence[FieldConstraint], path: Path) -> bool:
        """Reports the violations of field constraints. Returns whether there are any."""
        violated = False
        for constraint in constraints:
            for violation in () if self._system and constraint.users_only else constraint.violations(node, path):
                self._problems.add(*violation, reserved=constraint.users_only)
                violated = True
        return violated

    def _scalar(self, node: DocumentNode, type_: inspect.Type, path: Path) -> Any:
        if isinstance(type_, inspect.StrType):
            return self._string(node, type_, path)
        if isinstance(type_, inspect.IntType):
            return self._integer(node, type_, path)
        if isinstance(type_, inspect.BoolType):
            return self._boolean(node, path)
        if isinstance(type_, inspect.LiteralType):
            return self._choice(node, [str(value) for value in type_.values], path)
        if isinstance(type_, inspect.EnumType):
            return self._choice(node, [str(member.value) for member in type_.cls], path)
        if isinstance(type_, inspect.CustomType) and type_.cls is Duration:
            return self._duration(node, path)
        if isinstance(type_, inspect.CustomType) and type_.cls is Amount:
            return self._amount(node, path, devices=True)
        raise TypeError(f"type_checks.py does not support {type(type_).__name__}: add it to _scalar()")

    # ------------------------------------------------------------------------------------------------------- containers

    def struct(self, node: DocumentNode, type_: inspect.StructType, path: Path) -> dict[str, Any]:
        if not self._expect(node, "mapping", path, "fields by name"):
            return {}
        fields = {field.encode_name: field for field in type_.fields}
        value: dict[str, Any] = {}
        meant: set[str] = set()
        for key, entry in node.fields.items():
            if key in fields:
                value[key] = self.check(entry.value, fields[key].type, (*path, key))
            elif key != type_.tag_field:
                known = [name for name in fields if self._system or name != SET_BY_REMIT.get(path)]
                cure = suggest_field_fix(key, known, self._field_index, self._problems)
                self._problems.add(entry.position, (*path, key), "unknown field", cure)
                for name in (name for name in known if cure == did_you_mean(name) and name not in node.fields):
                    meant.add(name)  # checked as the intended field, so that its own problems are reported in the same run
                    self.check(entry.value, fields[name].type, (*path, key))
        for name, field in fields.items():
            if field.required and name not in node.fields and name not in meant:
                self._add_problem(node, (*path, name), "is missing", f"add {name}{_choices(field.type)}")
        return value

    def _dict(self, node: DocumentNode, type_: inspect.DictType, path: Path) -> dict[str, Any]:
        if not self._expect(node, "mapping", path, "values by name"):
            return {}
        self._length(node, len(node.fields), type_.min_length, type_.max_length, "entries", path)
        value = {}
        for key, entry in itertools.islice(node.fields.items(), type_.max_length):
            self.check(DocumentNode("string", entry.position, key, key), type_.key_type, (*path, key))
            value[key] = self.check(entry.value, type_.value_type, (*path, key))
        return value

    def _list(self, node: DocumentNode, type_: inspect.VarTupleType | inspect.TupleType, path: Path) -> list[Any]:
        if node.type != "list":
            cure = "write it as a list: [a, b], or one item on each line after -"
            if self._problems.as_json:
                cure = 'write it as a list: ["a", "b"]'
            self._add_problem(node, path, f"expected a list, found {TYPE_NAMES[node.type]}", cure)
            return []
        if isinstance(type_, inspect.TupleType):
            self._length(node, len(node.items), len(type_.item_types), len(type_.item_types), "items", path)
            pairs = zip(node.items, type_.item_types, strict=False)
            return [self.check(item, part, (*path, index)) for index, (item, part) in enumerate(pairs)]
        self._length(node, len(node.items), type_.min_length, type_.max_length, "items", path)
        return [self.check(item, type_.item_type, (*path, index)) for index, item in enumerate(node.items)]

    def _union(self, node: DocumentNode, type_: inspect.UnionType, path: Path) -> Any:
        parts = [part for part in type_.types if not isinstance(part, inspect.NoneType)]
        if node.type == "null" and len(parts) < len(type_.types):
            return None
        if len(parts) > 1:
            preferred = inspect.IntType if node.type == "integer" else inspect.StrType
            by_type = {type(part.type if isinstance(part, inspect.Metadata) else part): part for part in parts}
            return self.check(node, by_type.get(preferred, parts[0]), path)
        return self.check(node, parts[0], path)

    # ---------------------------------------------------------------------------------------------------------- scalars

    def _string(self, node: DocumentNode, type_: inspect.StrType, path: Path) -> str:
        if node.type in ("integer", "number", "boolean"):
            # Values under data may be secret and must not be repeated in a message.
            example = "" if path[:2] == DATA_PATH else f': "{node.text}"'
            self._add_problem(node, path, f"expected a string, found {TYPE_NAMES[node.type]}", f"write it in quotes{example}")
            return ""
        if not self._expect(node, "string", path, "a string"):
            return ""
        text = str(node.scalar)
        if type_.pattern in (metadata.LINE, metadata.URL_PATH) and not re.search(metadata.LINE, text):
            what = "a NUL character" if "\0" in text else "a line break" if "\n" in text else "a control character"
            self._add_problem(node, path, f"contains {what}", "remove it: this is one line of plain text")
        elif type_.pattern and not re.search(type_.pattern, text):
            message, cure = _PATTERNS.get(type_.pattern, ("is not a DNS label", _PATTERNS[metadata.DNS_LABEL][1]))
            if not text:
                message, prefix = "is empty", ""
            else:
                prefix = quoted(text) + " "
            if any(char in _TYPOGRAPHIC_QUOTES for char in text):
                cure = "replace the typographic quotes with plain quotes, \" or '"
            self._add_problem(node, path, prefix + message, did_you_mean(_suggest_label(text, type_.pattern)) or cure)
        elif type_.max_length is not None and len(text) > type_.max_length:
            self._add_problem(node, path, f"{len(text)} characters are too many", f"use at most {type_.max_length}")
        elif type_.min_length is not None and len(text) < type_.min_length:
            self._add_problem(node, path, "is empty", _LEAVE_OUT)
        elif "\0" in text:
            self._add_problem(node, path, "contains a NUL character", "remove it")
        return text

    def _integer(self, node: DocumentNode, type_: inspect.IntType, path: Path) -> int:
        if node.type != "integer" or not isinstance(node.scalar, int):
            cure = "write a whole number"
            if node.type == "string" and re.fullmatch(r"-?[0-9]{1,18}", str(node.scalar)):
                cure = f"write {node.scalar} without quotes"
            elif isinstance(node.scalar, float) and node.scalar == int(node.scalar):
                cure = f"write {int(node.scalar)}"
            self._add_problem(node, path, f"expected a whole number, found {TYPE_NAMES[node.type]}", cure)
            return 0
        low, high = type_.ge, type_.le
        limits = f"use {low} to {high}" if low is not None and high is not None else "use a smaller one"
        if low is not None and node.scalar < low:
            self._add_problem(node, path, f"{node.text} is too small", limits)
        elif node.scalar > ((1 << 63) - 1 if high is None else high):
            self._add_problem(node, path, f"{node.text} is too large", limits)
        return node.scalar

    def _boolean(self, node: DocumentNode, path: Path) -> bool:
        if node.type == "boolean":
            return bool(node.scalar)
        yes = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
        meant = yes.get(str(node.scalar).lower(), "") if node.type == "string" else ""
        self._add_problem(
            node, path, f"expected true or false, found {TYPE_NAMES[node.type]}", did_you_mean(meant) or "write true or false"
        )
        return False

    def _choice(self, node: DocumentNode, values: list[str], path: Path) -> str:
        listed = [value for value in values if value]
        if node.type != "string":
            self._add_problem(node, path, f"expected a keyword, found {TYPE_NAMES[node.type]}", f"write {one_of(listed)}")
            return ""
        text = str(node.scalar)
        if text not in values:
            meant = self._problems.suggest(text, listed)
            cure = f"did you mean {meant}? Allowed are {one_of(listed)}" if meant else f"write {one_of(listed)}"
            self._add_problem(node, path, f"{quoted(text)} is not allowed here", cure)
        return text

    def _duration(self, node: DocumentNode, path: Path) -> str:
        if node.type in ("integer", "number"):
            cure = "write 0s" if not node.scalar else f"did you mean {node.text.lstrip('-+')}s?"
            self._add_problem(node, path, "a duration without a unit", f"{cure} Units are ms, s, m, h and d")
            return "0s"
        if self._expect(node, "string", path, "a duration such as 30s"):
            try:
                resources.parse_duration(str(node.scalar))
            except ValueError as error:
                message, _, cure = str(error).partition(": ")
                cure = cure or "write a shorter one"
                text = (
                    "a duration cannot be negative"
                    if str(node.scalar).startswith("-")
                    else f"{quoted(str(node.scalar))} is {message}"
                )
                self._add_problem(node, path, text, cure)
        return str(node.scalar)

    # -------------------------------------------------------------------------------------------------------- quantities

    def _amount(self, node: DocumentNode, path: Path, *, devices: bool) -> dict[str, Any]:
        if not self._expect(node, "mapping", path, "amounts by name, such as {cpu: 500m, memory: 1Gi}"):
            return {}
        self._length(node, len(node.fields), None, RESOURCES_MAX, "resources", path)
        value: dict[str, Any] = {}
        for name, entry in itertools.islice(node.fields.items(), RESOURCES_MAX):
            below = (*path, name)
            if name == "devices" and devices and entry.value.type == "mapping":
                value[name] = self._devices(entry.value, below)
            else:
                resource = self._resource(entry.position, name, below, devices=devices)
                if resource:
                    value[name] = self._quantity(entry.value, resource, below)
        return value

    def _devices(self, node: DocumentNode, path: Path) -> dict[str, str]:
        self._length(node, len(node.fields), None, RESOURCES_MAX, "kinds", path)
        value = {}
        for kind, entry in node.fields.items():
            name = inspect.StrType(max_length=63, pattern=metadata.DNS_LABEL)
            self._string(DocumentNode("string", entry.position, kind, kind), name, (*path, kind))
            value[kind] = self._quantity(entry.value, kind, (*path, kind))
        return value

    def _resource(self, position: tuple[int, int], name: str, path: Path, *, devices: bool) -> str:
        """Returns the resource to check the amount against, which is the intended one for a misspelt name; "" if there is
        none.
        """
        if name in RESOURCES:
            return name
        if name == "devices" or re.search(DEVICE_NAME_PATTERN, name.lower()):
            kind = name.lower().replace("/", ".").rsplit(".", 1)[-1].removesuffix("s") if name != "devices" else "gpu"
            example = f"{{name: {kind}-0, kind: {kind}}}" if "capacity" in path else f"{{kind: {kind}, count: 1}}"
            cure = f"devices: {{{kind}: 1}}" if devices else f"devices: [{example}] beside it"
            message = "expected devices by kind" if name == "devices" and devices else "devices are not listed under resources"
            self._problems.add(position, path, message, f"write {cure}")
            return ""
        if name.startswith(DEVICES_PREFIX):
            kind = name.removeprefix(DEVICES_PREFIX)[:63]
            cure = f"write devices: {{{kind}: 1}}" if devices else f"write devices: [{{kind: {kind}, count: 1}}] beside it"
            self._problems.add(position, path, f"{quoted(name)} is not a resource name", cure)
            return ""
        if name in UNSUPPORTED_AMOUNTS:
            self._problems.add(position, path, "unknown resource", "write the amounts here: each resource has one amount")
            return ""
        # `Problems.suggest` stops after a number of comparisons per file. That must not decide what is rejected, so the limit
        # is bypassed here.
        intended = RESOURCE_ALIASES.get(name.lower()) or closest_name(name, RESOURCES)
        if intended:
            self._problems.add(position, path, "unknown resource", did_you_mean(intended))
            return intended
        if not re.search(metadata.LABEL_KEY, name):
            cure = 'put a space after ":"' if ":" in name and not self._problems.as_json else _LABEL_RULE
            self._problems.add(position, path, f"{quoted(name)} is not a resource name", cure)
            return ""
        return name

    def _quantity(self, node: DocumentNode, resource: str, path: Path) -> str:
        if node.type not in ("string", "integer", "number"):
            cure = (
                _LEAVE_OUT if node.type == "null" else "write a number with an optional suffix, such as 500m, 1.5, 2k or 64Gi"
            )
            mismatch = (
                "is empty" if node.type == "null" else f"expected a quantity, found {TYPE_NAMES.get(node.type, 'nothing')}"
            )
            if node.type != "void":
                self._add_problem(node, path, mismatch, cure)
            return "0"
        text = node.text if node.type == "number" else str(node.scalar)
        if resource == "cpu" and text.endswith("i") and re.fullmatch(r"\+?[0-9.]{1,81}[KMGTPE]i", text):
            # A valid number, but 0.5Gi would be half a billion cores: the author probably meant memory.
            self._add_problem(
                node, path, f"{quoted(text)} is a size in bytes, and cpu is counted in cores", "write 500m, 1.5 or 2"
            )
            return text
        try:
            resources.parse_quantity(resource, text)
        except ValueError as error:
            message, _, cure = str(error).partition(": ")
            text_message = f"{quoted(text)} is {message}" if message.startswith(("not", "too", "finer")) else message
            rounded = "round it" if message.startswith("finer") else "write 0 or more"
            self._add_problem(node, path, text_message, did_you_mean(_suggest_quantity(resource, text)) or cure or rounded)
        return text

    # ---------------------------------------------------------------------------------------------------------- problems

    def _expect(self, node: DocumentNode, form: str, path: Path, expected: str) -> bool:
        if node.type == form:
            return True
        if node.type == "null":
            self._add_problem(node, path, "is empty", _LEAVE_OUT)
        elif node.type != "void":
            cure = self._mapping_fix(node) if form == "mapping" else f"write {TYPE_NAMES['string']} in its place"
            self._add_problem(node, path, f"expected {expected}, found {TYPE_NAMES[node.type]}", cure)
        return False

    def _mapping_fix(self, node: DocumentNode) -> str:
        if self._problems.as_json:
            return 'write an object: {"key": value}'
        if node.type == "list":
            return "write key: value on each line, without the dashes or brackets"
        if node.type == "string" and re.match(r"[A-Za-z]+:\S", node.text):
            return 'put a space after ":"'
        return "indent its fields below it, as key: value"

    def _length(self, node: DocumentNode, length: int, low: int | None, high: int | None, what: str, path: Path) -> None:
        if low is not None and length < low:
            self._add_problem(node, path, f"{length} {what} are too few", f"write at least {low}")
        if high is not None and length > high:
            self._add_problem(node, path, f"{length} {what} are too many", f"use at most {high}")

    def _add_problem(self, node: DocumentNode, path: Path, message: str, cure: str) -> None:
        self._problems.add(node.position, path, message, cure)


def _suggest_label(text: str, pattern: str) -> str:
    """Returns the label that was probably meant, such as `risk-api` for `Risk API`."""
    if pattern != metadata.DNS_LABEL or len(text) > 63 or not text.isascii() or not text.isprintable():
        return ""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return label if re.search(pattern, label) and ".." not in text else ""


def _suggest_quantity(resource: str, text: str) -> str:
    """Returns the quantity that was probably meant: 64G for `64GB`, 256Mi for `256 mib`. Only for bytes: for other resources a
    wrong guess of upper or lower case (m and M) would differ by a factor of a billion.
    """
    comma = re.fullmatch(r"([0-9]{1,18}),([0-9]{1,2})((?:m|k|[KMGTPE]i|[MGTPE])?)", text)
    if comma:  # three digits after the comma may be thousands, so these are not matched
        return f"{comma[1]}.{comma[2]}{comma[3]}"
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{1,5})", text)
    if not match:
        return ""
    digits, unit = match.groups()
    if unit.lower() in ("cores", "core", "cpus", "cpu", "vcpu", "vcpus"):
        return digits if resource == "cpu" else ""
    if resources.scale(resource) != 1:
        return ""
    if unit == "m":
        return f"{digits}Mi"
    char, rest = unit[0].upper(), unit[1:].lower()
    if char not in "KMGTPE" or rest not in ("", "b", "i", "ib"):
        return ""
    guess = digits + (char + "i" if "i" in rest else "k" if char == "K" else char)
    return guess if guess != text else ""


def _choices(type_: inspect.Type) -> str:
    return f": {one_of(str(value) for value in type_.values if value)}" if isinstance(type_, inspect.LiteralType) else ""
