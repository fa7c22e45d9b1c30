"""Strict JSON reader with positions.

Strict, and by its own hand: no common reader tells columns, duplicates and depth at once.

A file holds one object, an array of objects, or objects one after another (such as one on each line).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from typing import NoReturn

from remit.model.manifests.documents import DIGITS_MAX, JSON_NODES_MAX, Builder, Exhausted, Node, Place, Refused
from remit.model.problems import Problems, did_you_mean, shown

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
_BREAK = re.compile(r"\r\n|\n|\r")
_RESUME = re.compile(r"[\n\r](?=\{)")
_WORDS = {"true": True, "false": False, "null": None}
_FOREIGN = {**{word: word for word in _WORDS}, "none": "null", "nil": "null", "undefined": "null"}
"""How others write what JSON writes so, in small letters."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_json(text: str, problems: Problems) -> tuple[list[Node], int | None]:
    """The documents, and where the text first ceased to be JSON, if it did."""
    return _Reader(text, problems).read()


def looks_like_yaml(text: str, failed_at: int, name: str) -> bool:
    """Was it a YAML flow mapping all along? Its name says so, or reading stopped at what only YAML would have there."""
    return name.lower().endswith((".yaml", ".yml")) or bool(re.match(r"[A-Za-z_#'&*!./~$-]", text[failed_at : failed_at + 1]))


class _Reader:
    def __init__(self, text: str, problems: Problems) -> None:
        self._text = text
        self._problems = problems
        self._builder = Builder(problems, JSON_NODES_MAX)
        self._starts = [0, *(match.end() for match in _BREAK.finditer(text))]
        self._group = ""
        self._word = ""
        self._at = 0
        self._next = 0

    def read(self) -> tuple[list[Node], int | None]:
        documents: list[Node] = []
        failed_at = None
        self._advance()
        while self._group != "end":
            try:
                documents += self._document()
            except Exhausted:
                break
            except Refused:
                failed_at = self._at if failed_at is None else failed_at
                # The next object that begins a line is, most likely, the next document: its problems are told too.
                resume = _RESUME.search(self._text, self._at)
                if resume is None:
                    break
                self._next = resume.end()
                self._advance()
        return documents, failed_at

    def _document(self) -> list[Node]:
        """One value with everything in it; of an array, each item is a document."""
        builder = self._builder
        builder.begin(self._place())
        opened = self._value()
        while builder.inside:
            closing = "}" if builder.inside == "mapping" else "]"
            if self._is(closing):
                builder.close()
                self._advance()
                opened = False
                continue
            if not opened:
                if not self._is(","):
                    self._wrong(f'"," or "{closing}"')
                self._advance()
            if closing == "}":
                self._key()
            opened = self._value()
        root = builder.root
        if root is None:
            return []
        if root.form == "list" and not root.items:
            builder.refuse(root.place, "the list is empty", "write at least one manifest in it")
        return root.items if root.form == "list" else [root]

    def _key(self) -> None:
        if self._group != "string":
            self._wrong("a key in double quotes")
        self._builder.key(self._string(), self._place())
        self._advance()
        if not self._is(":"):
            self._wrong('":" after the key')
        self._advance()

    def _value(self) -> bool:
        """Did a mapping or list open?"""
        builder, word, place = self._builder, self._word, self._place()
        if self._is("{") or self._is("["):
            builder.open(Node("mapping" if word == "{" else "list", place))
            self._advance()
            return True
        if self._group == "string":
            builder.add(Node("string", place, self._string(), word))
        elif self._group == "number":
            builder.add(self._number(word, place))
        elif word in _WORDS:
            value = _WORDS[word]
            builder.add(Node("null" if value is None else "boolean", place, value, word))
        elif self._group == "word":
            builder.refuse(place, f"{word} is not a number", "write a finite number")
            builder.add(Node("void", place))
        else:
            self._wrong("a value")
        self._advance()
        return False

    def _number(self, token: str, place: Place) -> Node:
        if len(token) > DIGITS_MAX:
            self._builder.refuse(place, f"a number of {len(token)} digits", f"use at most {DIGITS_MAX}")
            return Node("void", place)
        if token.lstrip("-").isdigit():
            return Node("integer", place, int(token), token)
        value = float(token)
        if value in (float("inf"), float("-inf")):
            self._builder.refuse(place, f"{token} is too large for a number", "write a finite number")
            return Node("void", place)
        return Node("number", place, value, token)

    def _string(self) -> str:
        if "\\" not in self._word:
            return self._word[1:-1]
        try:
            value = str(json.loads(self._word))
        except ValueError:
            self._stop("a backslash that begins no escape", 'write "\\\\" for a backslash')
        if _SURROGATE.search(value):
            self._builder.refuse(
                self._place(), "half of a surrogate pair is no character", "remove the escape, or write both halves"
            )
            return _SURROGATE.sub("\ufffd", value)
        return value

    def _is(self, mark: str) -> bool:
        return self._group == "mark" and self._word == mark

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._next)
        if match is None or match.lastgroup is None:  # cannot be: `other` takes any letter, `end` takes none
            self._group, self._word = "end", ""
            return
        self._group = match.lastgroup
        self._word = match[self._group]
        self._at, self._next = match.start(self._group), match.end()

    def _place(self) -> Place:
        line = bisect_right(self._starts, self._at)
        return line, self._at - self._starts[line - 1] + 1

    def _wrong(self, expected: str) -> NoReturn:
        if self._group == "end":
            self._stop(f"the file ends where {expected} is expected", "is the document only half written?")
        if self._word == '"':
            self._stop("a string that is not closed on its line", 'close it with ", and write a line break as \\n')
        if self._word == "'":
            self._stop("JSON has only double quotes", f'write "…" instead; {expected} is expected here')
        if self._word in "/#":
            self._stop("JSON has no comments", "remove it, or write YAML")
        if self._is("}") or self._is("]"):
            self._stop(f'"{self._word}" where {expected} is expected', "is there a comma too many before it?")
        found = re.match(r"[-+.\w]+", self._text[self._at : self._at + 60])
        word = found.group() if found else self._word.strip('"')
        cure = did_you_mean(_FOREIGN.get(word.lower(), "")) if expected == "a value" else ""
        self._stop(f"{shown(word)} where {expected} is expected", cure or "is a comma or a quote missing before it?")

    def _stop(self, message: str, cure: str) -> NoReturn:
        self._builder.refuse(self._place(), message, cure)
        raise Refused
