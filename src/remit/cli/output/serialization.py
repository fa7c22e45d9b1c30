"""Formats objects as JSON and YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from remit.model.objects import DECLARED, encode

_PLAIN: Final = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*\Z")
_MEASURE: Final = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:[KMGTPE]i|ms|[mshd]))+\Z")
"""An amount or a duration, which no YAML version reads as a number."""
_AMBIGUOUS: Final = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""Words that YAML 1.1 or 1.2 reads as booleans or null."""

_REPORTED: Final = ("uid", "generation", "revision", "deleting")
"""Metadata fields that Remit sets."""


def to_builtins(obj: object) -> Any:
    """Convert an object to dicts and lists with the field names of the API. As in the API, the main state of the status (phase
    or health) is included even if it has the default value.
    """
    value, status = msgspec.json.decode(encode(obj)), getattr(obj, "status", None)
    first_field = status.__struct_fields__[0] if isinstance(status, msgspec.Struct) else ""
    if isinstance(state := getattr(status, first_field, None), Enum):
        value["status"] = {first_field: state.value, **value.get("status", {})}
    return value


def json_text(value: object) -> str:
    """Format a value as one indented JSON document, with unprintable characters as \\u escapes."""
    lines = msgspec.json.format(encode(value), indent=2).decode().split("\n")
    return "".join(f"{escape_json(line)}\n" for line in lines)


def escape_json(line: str) -> str:
    """Escape the unprintable characters of a line of JSON. They can occur only inside strings."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)


def manifest_text(obj: object) -> str:
    """Format an object as YAML. Objects that users declare can be applied unchanged: fields set by Remit follow as comments."""
    value = to_builtins(obj)
    if value.get("kind") not in DECLARED:
        return yaml_text(_in_order(value))
    meta = value.get("metadata", {})
    reported = {name: meta.pop(name) for name in _REPORTED if name in meta}
    if status := value.pop("status", None):
        reported["status"] = status
    if value["kind"] == "Secret":
        # Secret values are never returned. null is refused by apply, while an empty text would replace the value.
        data = value.get("spec", {}).get("data", {})
        value["spec"] = {"data": dict.fromkeys(data)}
    reported_text = yaml_text(reported) if reported else ""
    comments = "".join(f"# {line}\n" for line in reported_text.splitlines())
    return yaml_text(_in_order(value)) + (f"# Set by Remit:\n{comments}" if comments else "")


def _in_order(value: dict[str, Any]) -> dict[str, Any]:
    first = ("apiVersion", "kind", "metadata", "spec", "status")
    with_version = {"apiVersion": "remit/v1", **value}
    return {name: with_version[name] for name in (*first, *with_version) if name in with_version}


# -- YAML ----------------------------------------------------------------------------------------------------------------------


def yaml_text(value: Mapping[str, Any]) -> str:
    """Format a mapping in block style. Ambiguous strings are quoted, so that reading it back yields the same values."""
    return "".join(f"{line}\n" for line in _mapping(value, ""))


def _mapping(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, below in value.items():
        yield from _entry(f"{indent}{_scalar(str(key))}:", below, indent)


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        yield head
        yield from _mapping(value, indent + "  ")
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        yield head
        for item in value:
            yield from _item(item, indent)
    elif isinstance(value, str) and _fits_block_scalar(value):
        yield f"{head} |{'' if value.endswith(chr(10)) else '-'}"
        yield from (f"{indent}  {line}" if line else "" for line in value.removesuffix("\n").split("\n"))
    else:
        yield f"{head} {_scalar(value)}"


def _item(value: Any, indent: str) -> Iterator[str]:
    if not isinstance(value, Mapping | list | tuple) or not value:
        yield from _entry(f"{indent}-", value, indent)
        return
    lines = _mapping(value, indent + "  ") if isinstance(value, Mapping) else (
        line for below in value for line in _item(below, indent + "  ")
    )  # fmt: skip
    for number, line in enumerate(lines):
        yield line if number else f"{indent}- {line[len(indent) + 2 :]}"


def _fits_block_scalar(text: str) -> bool:
    """Check whether a string can be a literal block: printable lines without spaces at the edges, and one final line end."""
    lines = text.removesuffix("\n").split("\n")
    return (
        len(lines) > 1
        and bool(lines[0])
        and bool(lines[-1])
        and all(line.isprintable() and line == line.strip("\t ") for line in (lines[0], lines[-1]))
        and all(line.isprintable() and not line.endswith((" ", "\t")) for line in lines)
    )


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        if (_PLAIN.match(value) and value.lower() not in _AMBIGUOUS) or _MEASURE.match(value):
            return value
        return _quoted(value)
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return "[]"
    return json.dumps(value)


def _quoted(text: str) -> str:
    """Quote a string. Unprintable characters are written as escapes."""
    return '"' + "".join(_quote_char(char) for char in text) + '"'


def _quote_char(char: str) -> str:
    if char in ('"', "\\"):
        return f"\\{char}"
    if char.isprintable():
        return char
    code = ord(char)
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return named.get(char) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
