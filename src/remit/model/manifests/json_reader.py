"""Strict JSON reader with positions.

Written by hand, because no common parser reports columns, duplicate keys and depth. A file holds one object, an array of
objects, or a sequence of objects (for example one on each line).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from typing import NoReturn

from remit.model.manifests.documents import (
    DIGITS_MAX,
    JSON_NODES_MAX,
    DocumentBuilder,
    DocumentNode,
    DocumentRejected,
    FileLimitExceeded,
    Position,
)
from remit.model.problems import Problems, did_you_mean, quoted

_TOKEN = re.compile(
    r"""[\ \t\n\r]*(?:
      (?P<mark>[{}\[\]:,])
    | (?P<string>"[^"\\\n\r\t]*(?:\\.[^"\\\n\r\t]*)*")
    | (?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?![-+.\w])
    | (?P<word>true|false|null|-?NaN|-?Infinity)(?!\w)
    | (?P<end>\Z)
    | (?P<other>.))""",
    re.VERBOSE | re.DOTALL,
)
_LINE_BREAK = re.compile(r"\r\n|\n|\r")
_NEXT_DOCUMENT = re.compile(r"[\n\r](?=\{)")
_LITERALS = {"true": True, "false": False, "null": None}
_FOREIGN_LITERALS = {**{word: word for word in _LITERALS}, "none": "null", "nil": "null", "undefined": "null"}
"""Spellings of JSON's literals in other languages, in lower case."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_json(text: str, problems: Problems) -> tuple[list[DocumentNode], int | None]:
    """Returns the documents, and the offset at which the text stopped being JSON, if it did."""
    return _Reader(text, problems).read()


def looks_like_yaml(text: str, failed_at: int, name: str) -> bool:
    """Whether a text that failed as JSON is a YAML flow mapping: by its file name, or because reading stopped at a character
    that only YAML allows there.
    """
    return name.lower().endswith((".yaml", ".yml")) or bool(re.match(r"[A-Za-z_#'&*!./~$-]", text[failed_at : failed_at + 1]))


class _Reader:
    def __init__(self, text: str, problems: Problems) -> None:
        self._text = text
        self._problems = problems
        self._builder = DocumentBuilder(problems, JSON_NODES_MAX)
        self._line_starts = [0, *(match.end() for match in _LINE_BREAK.finditer(text))]
        self._lexeme_type = ""
        self._lexeme = ""
        self._offset = 0
        self._next_offset = 0

    def read(self) -> tuple[list[DocumentNode], int | None]:
        documents: list[DocumentNode] = []
        failed_at = None
        self._advance()
        while self._lexeme_type != "end":
            try:
                documents += self._document()
            except FileLimitExceeded:
                break
            except DocumentRejected:
                failed_at = self._offset if failed_at is None else failed_at
                # The next object at the start of a line is probably the next document: go on there, to report its problems as
                # well.
                resume = _NEXT_DOCUMENT.search(self._text, self._offset)
                if resume is None:
                    break
                self._next_offset = resume.end()
                self._advance()
        return documents, failed_at

    def _document(self) -> list[DocumentNode]:
        """Reads one value; each item of an array is a document."""
        builder = self._builder
        builder.start_document(self._position())
        opened = self._value()
        while builder.open_container:
            closing = "}" if builder.open_container == "mapping" else "]"
            if self._is_mark(closing):
                builder.close()
                self._advance()
                opened = False
                continue
            if not opened:
                if not self._is_mark(","):
                    self._unexpected(f'"," or "{closing}"')
                self._advance()
            if closing == "}":
                self._key()
            opened = self._value()
        root = builder.root
        if root is None:
            return []
        if root.type == "list" and not root.items:
            builder.add_problem(root.position, "the list is empty", "write at least one manifest in it")
        return root.items if root.type == "list" else [root]

    def _key(self) -> None:
        if self._lexeme_type != "string":
            self._unexpected("a key in double quotes")
        self._builder.key(self._string(), self._position())
        self._advance()
        if not self._is_mark(":"):
            self._unexpected('":" after the key')
        self._advance()

    def _value(self) -> bool:
        """Reads a scalar, or opens a mapping or list. Returns whether one was opened."""
        builder, lexeme, position = self._builder, self._lexeme, self._position()
        if self._is_mark("{") or self._is_mark("["):
            builder.open(DocumentNode.container("mapping" if lexeme == "{" else "list", position))
            self._advance()
            return True
        if self._lexeme_type == "string":
            builder.add(DocumentNode("string", position, self._string(), lexeme))
        elif self._lexeme_type == "number":
            builder.add(self._number(lexeme, position))
        elif lexeme in _LITERALS:
            value = _LITERALS[lexeme]
            builder.add(DocumentNode("null" if value is None else "boolean", position, value, lexeme))
        elif self._lexeme_type == "word":
            builder.add_problem(position, f"{lexeme} is not a finite number", "write a finite number")
            builder.add(DocumentNode("void", position))
        else:
            self._unexpected("a value")
        self._advance()
        return False

    def _number(self, text: str, position: Position) -> DocumentNode:
        if len(text) > DIGITS_MAX:
            self._builder.add_problem(position, f"a number of {len(text)} digits is too long", f"use at most {DIGITS_MAX}")
            return DocumentNode("void", position)
        if text.lstrip("-").isdigit():
            return DocumentNode("integer", position, int(text), text)
        value = float(text)
        if value in (float("inf"), float("-inf")):
            self._builder.add_problem(position, f"{text} is too large for a number", "write a finite number")
            return DocumentNode("void", position)
        return DocumentNode("number", position, value, text)

    def _string(self) -> str:
        if "\\" not in self._lexeme:
            return self._lexeme[1:-1]
        try:
            value = str(json.loads(self._lexeme))
        except ValueError:
            self._fail("invalid escape sequence", 'write "\\\\" for a backslash')
        if _SURROGATE.search(value):
            self._builder.add_problem(
                self._position(), "unpaired surrogate in a string", "remove the escape, or write both halves"
            )
            return _SURROGATE.sub("\ufffd", value)
        return value

    def _is_mark(self, mark: str) -> bool:
        return self._lexeme_type == "mark" and self._lexeme == mark

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._next_offset)
        if match is None or match.lastgroup is None:  # unreachable: `other` matches any character, `end` matches the end
            self._lexeme_type, self._lexeme = "end", ""
            return
        self._lexeme_type = match.lastgroup
        self._lexeme = match[self._lexeme_type]
        self._offset, self._next_offset = match.start(self._lexeme_type), match.end()

    def _position(self) -> Position:
        line = bisect_right(self._line_starts, self._offset)
        return line, self._offset - self._line_starts[line - 1] + 1

    def _unexpected(self, expected: str) -> NoReturn:
        if self._lexeme_type == "end":
            self._fail(f"the file ends where {expected} is expected", "is the document incomplete?")
        if self._lexeme == '"':
            self._fail("the string is not closed on its line", 'close it with ", and write a line break as \\n')
        if self._lexeme == "'":
            self._fail("JSON strings need double quotes", f'write "…" instead; {expected} is expected here')
        if self._lexeme in "/#":
            self._fail("JSON has no comments", "remove it, or write YAML")
        if self._is_mark("}") or self._is_mark("]"):
            self._fail(f'"{self._lexeme}" where {expected} is expected', "is there an extra comma before it?")
        match = re.match(r"[-+.\w]+", self._text[self._offset : self._offset + 60])
        word = match.group() if match else self._lexeme.strip('"')
        cure = did_you_mean(_FOREIGN_LITERALS.get(word.lower(), "")) if expected == "a value" else ""
        self._fail(f"{quoted(word)} where {expected} is expected", cure or "is a comma or a quote missing before it?")

    def _fail(self, message: str, cure: str) -> NoReturn:
        self._builder.add_problem(self._position(), message, cure)
        raise DocumentRejected
