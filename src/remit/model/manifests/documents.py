"""Document tree with source positions and size limits.

Reads bytes as YAML or JSON documents; reader.py turns the documents into objects. Untrusted input never raises an exception
and never takes long to reject: the size is checked before parsing, and depth, aliases and the number of values while
parsing.
"""

from __future__ import annotations

import codecs
import re
from types import MappingProxyType
from typing import Any, Final, Literal, NoReturn

from msgspec import Struct

from remit.model.problems import Path, Problems, quoted

YAML_BYTES_MAX = 256 * 1024
YAML_NODES_MAX = 10_000
JSON_BYTES_MAX = 1024 * 1024
JSON_NODES_MAX = 50_000
DEPTH_MAX = 64
DOCUMENTS_MAX = 1000
DIGITS_MAX = 32

JSON_SUFFIXES = (".json", ".ndjson", ".jsonl")

Position = tuple[int, int]
"""Line and column, from 1."""

ValueType = Literal["mapping", "list", "string", "integer", "number", "boolean", "null", "void"]

TYPE_NAMES: dict[ValueType, str] = {
    "mapping": "a mapping",
    "list": "a list",
    "string": "a string",
    "integer": "a whole number",
    "number": "a number with a fraction",
    "boolean": "a boolean",
    "null": "empty",
}


_NO_FIELDS: Final[Any] = MappingProxyType({})
_NO_ITEMS: Final[Any] = ()
"""Shared by all scalars, because most values are scalars and empty containers cost as much as the rest of a node."""


class DocumentNode(Struct, eq=False, gc=False):
    """One value with its position. `text` is a scalar exactly as it was written, so that no digit of a number is lost.

    A `void` node replaces a value that was rejected. Its problem has been reported, so later checks skip it.
    """

    type: ValueType
    position: Position
    scalar: str | int | float | bool | None = None
    text: str = ""
    fields: dict[str, MappingEntry] = _NO_FIELDS
    items: list[DocumentNode] = _NO_ITEMS
    size: int = 1
    height: int = 1

    @classmethod
    def container(cls, type_: Literal["mapping", "list"], position: Position) -> DocumentNode:
        """Returns an empty mapping or list."""
        return cls(type_, position, fields={}) if type_ == "mapping" else cls(type_, position, items=[])

    def set(self, key: str, position: Position, value: DocumentNode) -> None:
        self.fields[key] = MappingEntry(position, value)
        self._update_size(value)

    def append(self, value: DocumentNode) -> None:
        self.items.append(value)
        self._update_size(value)

    def _update_size(self, value: DocumentNode) -> None:
        self.size += value.size
        self.height = max(self.height, value.height + 1)

    def get(self, key: str) -> DocumentNode | None:
        entry = self.fields.get(key)
        return entry.value if entry else None

    def at(self, *path: str | int) -> DocumentNode | None:
        """Returns the value under `path`, or None."""
        node: DocumentNode | None = self
        for step in path:
            if node is None:
                return None
            if isinstance(step, str):
                node = node.get(step)
            else:
                node = node.items[step] if step < len(node.items) else None
        return node


class MappingEntry(Struct, gc=False):
    """A value of a mapping, and the position of its key."""

    position: Position
    value: DocumentNode


class DocumentRejected(Exception):
    """The current document cannot be read any further. The problem has been reported."""


class FileLimitExceeded(DocumentRejected):
    """No further document of the file can be read: a limit of the whole file is reached. The problem has been reported."""


NO_POSITION: Position = (1, 1)
_SCALAR_TYPES: dict[type, ValueType] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def to_document(value: Any) -> DocumentNode:
    """Returns plain values as a document without positions. The types of manifests bound the recursion."""
    type_ = type(value)
    if type_ is str:  # most values are strings
        return DocumentNode("string", NO_POSITION, value, value)
    if type_ is dict:
        fields, size = dict[str, MappingEntry](), 1
        for key, part in value.items():
            node = to_document(part)
            fields[key] = MappingEntry(NO_POSITION, node)
            size += node.size
        return DocumentNode("mapping", NO_POSITION, fields=fields, size=size)
    scalar_type = _SCALAR_TYPES.get(type_)
    if scalar_type is not None:
        return DocumentNode(scalar_type, NO_POSITION, value, str(value))
    items = [to_document(part) for part in value]
    return DocumentNode("list", NO_POSITION, items=items, size=1 + sum([node.size for node in items]))


class DocumentBuilder:
    """Builds a document tree value by value and enforces the limits. Used by the YAML and the JSON reader; not recursive, so
    that deep input cannot exhaust the stack.
    """

    def __init__(self, problems: Problems, nodes_max: int) -> None:
        self._problems = problems
        self._nodes_max = nodes_max
        self._nodes = 0
        self._documents = 0
        self._stack: list[_Frame] = []
        self.root: DocumentNode | None = None

    def start_document(self, position: Position) -> None:
        self._stack = []
        self.root = None
        self._documents += 1
        if self._documents > DOCUMENTS_MAX:
            self.abort_file(position, f"more than {DOCUMENTS_MAX} documents in one file", "split it into several files")

    @property
    def path(self) -> Path:
        return tuple(frame.step for frame in self._stack if frame.step is not None)

    @property
    def open_container(self) -> ValueType | None:
        """The type of the innermost open container; None if there is none."""
        return self._stack[-1].node.type if self._stack else None

    @property
    def key_position(self) -> Position | None:
        """The position of the key whose value comes next."""
        return self._stack[-1].key_position if self.open_container == "mapping" else None

    @property
    def expects_key(self) -> bool:
        return bool(self._stack) and self._stack[-1].node.type == "mapping" and self._stack[-1].step is None

    def key(self, name: str, position: Position, *, drop: bool = False) -> None:
        """Starts an entry of the open mapping. With `drop` the key has been rejected and its value is ignored."""
        frame = self._stack[-1]
        first = frame.node.fields.get(name)
        frame.step, frame.key_position, frame.drop = name, position, drop or first is not None
        if first:
            message = f"the key {quoted(name)} appears twice, first in line {first.position[0]}"
            self.add_problem(position, message, "keep one of the two")

    def open(self, node: DocumentNode) -> None:
        """Opens a mapping or a list."""
        self._count(node)
        if len(self._stack) >= DEPTH_MAX:
            self.abort_file(
                node.position, f"more than {DEPTH_MAX} levels of nesting", "no manifest needs that many: flatten it"
            )
        self._stack.append(_Frame(node))
        if node.type == "list":
            self._stack[-1].step = 0

    def close(self) -> DocumentNode:
        node = self._stack.pop().node
        self._attach(node)
        return node

    def add(self, node: DocumentNode) -> None:
        """Adds a scalar."""
        self._count(node)
        self._attach(node)

    def add_alias(self, node: DocumentNode, position: Position) -> None:
        """Adds the value that an alias refers to. Its size counts at every use, and its depth adds to the depth of the
        alias.
        """
        self._nodes += node.size
        if self._nodes > self._nodes_max or len(self._stack) + node.height > DEPTH_MAX:
            message = f"aliases expand to more than {self._nodes_max} values or {DEPTH_MAX} levels"
            self.abort_file(position, message, "write out the values that are needed")
        self._attach(node)

    def add_problem(self, position: Position, message: str, cure: str = "") -> None:
        self._problems.add(position, self.path, message, cure)

    def abort_file(self, position: Position, message: str, cure: str) -> NoReturn:
        self.add_problem(position, message, cure)
        raise FileLimitExceeded

    def _count(self, node: DocumentNode) -> None:
        self._nodes += node.size
        if self._nodes > self._nodes_max:
            self.abort_file(node.position, f"more than {self._nodes_max} values in one file", "split it into several files")

    def _attach(self, node: DocumentNode) -> None:
        if not self._stack:
            self.root = node
            return
        frame = self._stack[-1]
        if isinstance(frame.step, int):
            frame.node.append(node)
            frame.step += 1
            return
        name, frame.step = frame.step or "", None
        if not frame.drop:
            frame.node.set(name, frame.key_position, node)


class _Frame:
    """An open mapping or list, and the next key or index."""

    __slots__ = ("drop", "key_position", "node", "step")

    def __init__(self, node: DocumentNode) -> None:
        self.node = node
        self.key_position = node.position
        self.drop = False
        self.step: str | int | None = None


def read_documents(data: bytes, name: str, problems: Problems) -> list[DocumentNode]:
    """Returns all documents that could be read, in order; adds the rest to `problems`."""
    text = _decode_text(data, problems)
    if text is None:
        return []
    if not text.strip():
        problems.add((1, 1), (), "the file is empty", "write at least one manifest, starting with apiVersion and kind")
        return []
    is_json = name.lower().endswith(JSON_SUFFIXES)
    if is_json or text.lstrip()[0] in "{[":
        documents = _read_json(text, name, is_json, problems)
        if documents is not None:
            return documents
    if len(data) > YAML_BYTES_MAX:
        cure = "split it into several files, or write it as JSON (up to 1 MiB)"
        problems.add((1, 1), (), f"the file has {len(data)} bytes of YAML; the limit is {YAML_BYTES_MAX}", cure)
        return []
    from remit.model.manifests.yaml_reader import read_yaml  # importing the parser takes 0.1 s, and JSON does not need it

    return read_yaml(text, problems)


def _read_json(text: str, name: str, is_json: bool, problems: Problems) -> list[DocumentNode] | None:
    """Returns None if the text only looked like JSON and is a YAML flow mapping such as `{kind: Region}`."""
    from remit.model.manifests.json_reader import looks_like_yaml, read_json

    json_problems = Problems("")
    documents, failed_at = read_json(text, json_problems)
    if failed_at is not None and not is_json and looks_like_yaml(text, failed_at, name):
        return None
    problems.merge(json_problems)
    return documents


_UNSAFE = re.compile(r"[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


_SAFE_ASCII: Final = bytes(code for code in range(128) if not _UNSAFE.match(chr(code)))


def contains_control_character(data: bytes) -> bool:
    """Whether UTF-8 text contains a character that no manifest may contain as it is. Raises UnicodeDecodeError."""
    return bool(data.translate(None, _SAFE_ASCII)) and _UNSAFE.search(data.decode()) is not None


def _decode_text(data: bytes, problems: Problems) -> str | None:
    """Decodes UTF-8 without control characters. Other encodings, binary data and control characters are reported separately,
    because their fixes differ.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or data[1:2] == b"\0" or data[:1] == b"\0" != data[1:2]:
        problems.add((1, 1), (), "this is UTF-16, UTF-32 or binary data", "save the file as UTF-8")
        return None
    if len(data) > JSON_BYTES_MAX:
        problems.add((1, 1), (), f"more than {JSON_BYTES_MAX} bytes in one file", "split it into several")
        return None
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode()
        message = f"byte 0x{data[error.start]:02x} is not UTF-8: a binary file, or another encoding"
        problems.add(position_of(before, len(before)), (), message, "save the file as UTF-8")
        return None
    unsafe = _UNSAFE.search(text)
    if unsafe:
        message = f"the control character U+{ord(unsafe.group()):04X} is not allowed in a manifest (is the file binary?)"
        cure = f'remove it, or write it as "\\u{ord(unsafe.group()):04x}" in double quotes'
        problems.add(position_of(text, unsafe.start()), (), message, cure)
        return None
    return text


def position_of(text: str, offset: int) -> Position:
    """Returns the position of an offset. Line breaks are \\n, \\r\\n, or \\r alone, as in both parsers."""
    before = text[:offset]
    lines = before.count("\n") + before.count("\r") - before.count("\r\n")
    return lines + 1, offset - max(before.rfind("\n"), before.rfind("\r"))
