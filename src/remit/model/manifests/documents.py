"""Document tree with source positions and size limits.

Text only; what they mean is in manifests.py.

Hostile bytes earn problems, never an exception, and never a long wait: size is judged before a parser sees the text, depth,
aliases and nodes while it reads.
"""

from __future__ import annotations

import codecs
import re
from typing import Literal, NamedTuple, NoReturn

from remit.model.problems import Path, Problems, shown

YAML_BYTES_MAX = 256 * 1024
YAML_NODES_MAX = 10_000
JSON_BYTES_MAX = 1024 * 1024
JSON_NODES_MAX = 50_000
DEPTH_MAX = 64
DOCUMENTS_MAX = 1000
DIGITS_MAX = 32

JSON_ENDINGS = (".json", ".ndjson", ".jsonl")

Place = tuple[int, int]
"""Line and column, from 1."""

Form = Literal["mapping", "list", "string", "integer", "number", "boolean", "null", "void"]

ARTICLE: dict[Form, str] = {
    "mapping": "a mapping",
    "list": "a list",
    "string": "a string",
    "integer": "a whole number",
    "number": "a number with a fraction",
    "boolean": "a boolean",
    "null": "empty",
}


class Node:
    """One value and where it stands. `text` is a scalar as it was written, so that no digit of a number is lost.

    A `void` node stands where a value was refused: that has been told, and nobody should complain of it again.
    """

    __slots__ = ("fields", "form", "height", "items", "place", "scalar", "size", "text")

    def __init__(self, form: Form, place: Place, scalar: str | int | float | bool | None = None, text: str = "") -> None:
        self.form: Form = form
        self.place = place
        self.scalar = scalar
        self.text = text
        self.fields: dict[str, Entry] = {}
        self.items: list[Node] = []
        self.size = 1
        self.height = 1

    def set(self, key: str, place: Place, value: Node) -> None:
        self.fields[key] = Entry(place, value)
        self._grow(value)

    def append(self, value: Node) -> None:
        self.items.append(value)
        self._grow(value)

    def _grow(self, value: Node) -> None:
        self.size += value.size
        self.height = max(self.height, value.height + 1)

    def get(self, key: str) -> Node | None:
        entry = self.fields.get(key)
        return entry.value if entry else None

    def at(self, *path: str | int) -> Node | None:
        """What stands under `path`, if anything does."""
        node: Node | None = self
        for step in path:
            if node is None:
                return None
            if isinstance(step, str):
                node = node.get(step)
            else:
                node = node.items[step] if step < len(node.items) else None
        return node


class Entry(NamedTuple):
    """A value under a key, and where the key stands."""

    place: Place
    value: Node


class Refused(Exception):
    """This document cannot be read further; the problem that says why has been told."""


class Exhausted(Refused):
    """Nor can any other of the file: a limit of the whole is reached."""


class Builder:
    """Puts a document together, value by value, and keeps the limits on the way. Both readers use it; it never recurses."""

    def __init__(self, problems: Problems, nodes_max: int) -> None:
        self._problems = problems
        self._nodes_max = nodes_max
        self._nodes = 0
        self._documents = 0
        self._stack: list[_Frame] = []
        self.root: Node | None = None

    def begin(self, place: Place) -> None:
        self._stack = []
        self.root = None
        self._documents += 1
        if self._documents > DOCUMENTS_MAX:
            self.exhausted(place, f"more than {DOCUMENTS_MAX} documents in one file", "split it into several files")

    @property
    def path(self) -> Path:
        return tuple(frame.step for frame in self._stack if frame.step is not None)

    @property
    def inside(self) -> Form | None:
        """What is open: a mapping, a list, or nothing."""
        return self._stack[-1].node.form if self._stack else None

    @property
    def key_place(self) -> Place | None:
        """Where the key stands that waits for its value."""
        return self._stack[-1].place if self.inside == "mapping" else None

    @property
    def wants_key(self) -> bool:
        return bool(self._stack) and self._stack[-1].node.form == "mapping" and self._stack[-1].step is None

    def key(self, name: str, place: Place, *, drop: bool = False) -> None:
        """`drop`: it has been refused, and so goes what will stand under it."""
        frame = self._stack[-1]
        first = frame.node.fields.get(name)
        frame.step, frame.place, frame.drop = name, place, drop or first is not None
        if first:
            message = f"the key {shown(name)} stands here twice, first in line {first.place[0]}"
            self.refuse(place, message, "keep one of the two")

    def open(self, node: Node) -> None:
        """A mapping or a list begins."""
        self._count(node)
        if len(self._stack) >= DEPTH_MAX:
            self.exhausted(node.place, f"more than {DEPTH_MAX} levels deep", "no manifest needs that many: flatten it")
        self._stack.append(_Frame(node))
        if node.form == "list":
            self._stack[-1].step = 0

    def close(self) -> Node:
        node = self._stack.pop().node
        self._put(node)
        return node

    def add(self, node: Node) -> None:
        """A scalar."""
        self._count(node)
        self._put(node)

    def repeat(self, node: Node, place: Place) -> None:
        """What an alias stands for: it counts as often as it is repeated, and its depth adds to that of its place."""
        self._nodes += node.size
        if self._nodes > self._nodes_max or len(self._stack) + node.height > DEPTH_MAX:
            message = f"aliases repeat this to more than {self._nodes_max} values or {DEPTH_MAX} levels"
            self.exhausted(place, message, "write the few values out that are needed")
        self._put(node)

    def refuse(self, place: Place, message: str, cure: str = "") -> None:
        self._problems.add(place, self.path, message, cure)

    def exhausted(self, place: Place, message: str, cure: str) -> NoReturn:
        self.refuse(place, message, cure)
        raise Exhausted

    def _count(self, node: Node) -> None:
        self._nodes += node.size
        if self._nodes > self._nodes_max:
            self.exhausted(node.place, f"more than {self._nodes_max} values in one file", "split it into several files")

    def _put(self, node: Node) -> None:
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
            frame.node.set(name, frame.place, node)


class _Frame:
    """A mapping or list that is open, and the key or index that comes next."""

    __slots__ = ("drop", "node", "place", "step")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.place = node.place
        self.drop = False
        self.step: str | int | None = None


def read_documents(data: bytes, name: str, problems: Problems) -> list[Node]:
    """Every document that could be read, in order; what could not is in `problems`."""
    text = _text(data, problems)
    if text is None:
        return []
    if not text.strip():
        problems.add((1, 1), (), "the file is empty", "write at least one manifest, beginning with apiVersion and kind")
        return []
    is_json = name.lower().endswith(JSON_ENDINGS)
    if is_json or text.lstrip()[0] in "{[":
        documents = _read_json(text, name, is_json, problems)
        if documents is not None:
            return documents
    if len(data) > YAML_BYTES_MAX:
        cure = "split it into several files, or write it as JSON (up to 1 MiB)"
        problems.add((1, 1), (), f"{len(data)} bytes of YAML, and at most {YAML_BYTES_MAX} are read", cure)
        return []
    from remit.model.manifests.yaml_reader import read_yaml  # the parser costs 0.1 s to import, and JSON does not need it

    return read_yaml(text, problems)


def _read_json(text: str, name: str, is_json: bool, problems: Problems) -> list[Node] | None:
    """None: it only looked like JSON, and is a YAML flow mapping such as `{kind: Region}`."""
    from remit.model.manifests.json_reader import looks_like_yaml, read_json

    told = Problems("")
    documents, failed_at = read_json(text, told)
    if failed_at is not None and not is_json and looks_like_yaml(text, failed_at, name):
        return None
    problems.take(told)
    return documents


_UNSAFE = re.compile(r"[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def _text(data: bytes, problems: Problems) -> str | None:
    """UTF-8 without control characters: what else could be in the bytes is told apart, because the cures differ."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or data[1:2] == b"\0" or data[:1] == b"\0" != data[1:2]:
        problems.add((1, 1), (), "this is UTF-16 or UTF-32, or no text at all", "save the file as UTF-8")
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
        problems.add(place_in(before, len(before)), (), message, "save the file as UTF-8")
        return None
    unsafe = _UNSAFE.search(text)
    if unsafe:
        message = f"the control character U+{ord(unsafe.group()):04X} cannot stand in a manifest (is the file binary?)"
        cure = f'remove it, or write it as "\\u{ord(unsafe.group()):04x}" in double quotes'
        problems.add(place_in(text, unsafe.start()), (), message, cure)
        return None
    return text


def place_in(text: str, offset: int) -> Place:
    """Line breaks are counted as both parsers count them: \\n, \\r\\n, or \\r alone."""
    before = text[:offset]
    lines = before.count("\n") + before.count("\r") - before.count("\r\n")
    return lines + 1, offset - max(before.rfind("\n"), before.rfind("\r"))
