"""JSON and YAML of objects.

Text only: what is printed where is decided elsewhere.
"""

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
"""An amount or a duration, which no YAML takes for a number."""
_AMBIGUOUS: Final = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""Words that are no text in this or an older YAML."""

_REPORTED: Final = ("uid", "generation", "revision", "deleting")
"""Metadata that Remit writes."""


def plain(obj: object) -> Any:
    """As mappings and lists, with the names that the API gives its fields. As there, where it stands (the phase, the health) is
    said also where that is the default.
    """
    value, status = msgspec.json.decode(encode(obj)), getattr(obj, "status", None)
    first = status.__struct_fields__[0] if isinstance(status, msgspec.Struct) else ""
    if isinstance(stands := getattr(status, first, None), Enum):
        value["status"] = {first: stands.value, **value.get("status", {})}
    return value


def json_text(value: object) -> str:
    """One document, for programs. What a terminal would obey, or hide, is written as its number: that is the same JSON."""
    lines = msgspec.json.format(encode(value), indent=2).decode().split("\n")
    return "".join(f"{escape_json(line)}\n" for line in lines)


def escape_json(line: str) -> str:
    """A line of JSON. Letters that are not printable can only stand inside of its texts."""
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in line)


def manifest_text(obj: object) -> str:
    """YAML of one object. What a person may declare can be applied as it is: what Remit reports stands below it in comments."""
    value = plain(obj)
    if value.get("kind") not in DECLARED:
        return yaml_text(_in_order(value))
    meta = value.get("metadata", {})
    reported = {name: meta.pop(name) for name in _REPORTED if name in meta}
    if status := value.pop("status", None):
        reported["status"] = status
    if value["kind"] == "Secret":
        # Nobody is shown a secret. Empty text would be applied as its new value; nothing is refused.
        data = value.get("spec", {}).get("data", {})
        value["spec"] = {"data": dict.fromkeys(data)}
    said = yaml_text(reported) if reported else ""
    comments = "".join(f"# {line}\n" for line in said.splitlines())
    return yaml_text(_in_order(value)) + (f"# What Remit says of it:\n{comments}" if comments else "")


def _in_order(value: dict[str, Any]) -> dict[str, Any]:
    heads = ("apiVersion", "kind", "metadata", "spec", "status")
    kept = {"apiVersion": "remit/v1", **value}
    return {name: kept[name] for name in (*heads, *kept) if name in kept}


# -- YAML ----------------------------------------------------------------------------------------------------------------------


def yaml_text(value: Mapping[str, Any]) -> str:
    """In blocks; texts that could be read as anything else are quoted. The reader of manifests reads it back the same."""
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
    elif isinstance(value, str) and _in_lines(value):
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


def _in_lines(text: str) -> bool:
    """May it stand as a block of lines? Without blanks at an edge or letters that a terminal obeys, and not ending in two."""
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
    """In double quotes; what is not printable is written by its number, which YAML reads back as that one letter."""
    return '"' + "".join(_letter(letter) for letter in text) + '"'


def _letter(letter: str) -> str:
    if letter in ('"', "\\"):
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    code = ord(letter)
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return named.get(letter) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
