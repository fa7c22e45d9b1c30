"""Validation problems: location, message, suggested fix; text quoting.

Formatting only: the checks are in manifests/ and constraints.py.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

Path = tuple[str | int, ...]
"""Path of a field in a document, such as `("spec", "ports", 0, "name")`."""

PROBLEMS_MAX = 1000
SUGGESTIONS_MAX = 100
CANDIDATES_MAX = 64
COMPARISONS_MAX = 3200
NAMES_MAX = 10_000
_QUOTED_MAX = 60
_PATH_MAX = 120
_LISTED_MAX = 24
_PLAIN_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


class Problem(Struct, frozen=True, order=True):
    """One problem: its position (line and column count from 1), what is wrong (`message`), and how to fix it (`cure`)."""

    file: str
    line: int
    column: int
    path: str
    message: str
    cure: str = ""
    reserved: bool = False
    """Whether the problem is the use of a name or number that is reserved for Remit itself."""

    def __str__(self) -> str:
        return f"{escaped(self.file)}:{self.line}:{self.column}: {self.description}"

    @property
    def description(self) -> str:
        """The problem without its position, for callers that have an object and no file."""
        return (f"{self.path}: " if self.path else "") + self.message + (f"; {self.cure}" if self.cure else "")


class Problems:
    """The problems of one file. At most PROBLEMS_MAX are kept, which bounds the cost of a file full of errors."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._problems: dict[Problem, None] = {}
        self._suggestions_remaining = SUGGESTIONS_MAX
        self._comparisons_remaining = COMPARISONS_MAX
        self.omitted = 0
        self.as_json = False
        """Whether the file is JSON. Fixes are written in the syntax of the file."""

    def add(self, position: tuple[int, int], path: Path, message: str, cure: str = "", *, reserved: bool = False) -> None:
        if len(self._problems) < PROBLEMS_MAX:
            # Escaped here for all callers: a message that quotes the file must not send control sequences to the terminal.
            self._problems[Problem(self._file, *position, format_path(path), escaped(message), escaped(cure), reserved)] = None
        else:
            self.omitted += 1

    def merge(self, other: Problems) -> None:
        """Adds the problems of another pass over the same file."""
        for problem in other._problems:
            self._problems[msgspec.structs.replace(problem, file=self._file)] = None
        self.omitted += other.omitted

    def suggest(self, word: str, known: Iterable[str]) -> str:
        """Returns the known word that was probably meant, or "". Comparisons are slow, so their number is limited per file."""
        candidates = list(itertools.islice(known, CANDIDATES_MAX))
        if self._suggestions_remaining <= 0 or self._comparisons_remaining < len(candidates):
            return ""
        self._suggestions_remaining -= 1
        self._comparisons_remaining -= len(candidates)
        return closest_name(word, candidates)

    def __bool__(self) -> bool:
        return bool(self._problems)

    def sorted_problems(self) -> tuple[Problem, ...]:
        """Returns the problems in the order of the file."""
        ordered = sorted(self._problems)
        if self.omitted:
            last = ordered[-1]
            message = f"{self.omitted} more problems are not shown"
            ordered.append(Problem(self._file, last.line, last.column, "", message, "fix these first"))
        return tuple(ordered)


def closest_name(word: str, known: Iterable[str]) -> str:
    if not word or len(word) > 64:
        return ""
    by_lower = {name.lower(): name for name in itertools.islice(known, CANDIDATES_MAX) if len(name) <= 64}
    lowered = word.lower()
    for spelling in (lowered, lowered.replace("_", "").replace("-", ""), lowered + "s", lowered.removesuffix("s")):
        if spelling in by_lower:
            return by_lower[spelling]
    close = difflib.get_close_matches(lowered, by_lower, n=1, cutoff=0.7)
    return by_lower[close[0]] if close else ""


def an(word: str) -> str:
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


def did_you_mean(word: str) -> str:
    return f"did you mean {word}?" if word else ""


def one_of(words: Iterable[str]) -> str:
    """Formats a list of alternatives: `a, b or c`. Long lists are cut."""
    listed = [word or '""' for word in itertools.islice(words, _LISTED_MAX + 1)]
    if len(listed) > _LISTED_MAX:
        return f"{', '.join(listed[:_LISTED_MAX])}, …"
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"


def suggest_names(name: str, names: Sequence[str], what: str) -> str:
    """Formats a fix for an unknown name: the most similar names or, without any, the first few of all names."""
    close = difflib.get_close_matches(name, names[:NAMES_MAX], n=3, cutoff=0.6) if len(name) <= 2 * _QUOTED_MAX else []
    if close:
        return f"did you mean {one_of(close)}?"
    return f"there are {one_of(names)}" if names else f"there are no {what}"


def format_path(path: Path) -> str:
    text = ""
    for step in path:
        if len(text) > _PATH_MAX:
            return text + "…"
        if isinstance(step, int):
            text += f"[{step}]"
        elif step and len(step) <= 2 * _QUOTED_MAX and _PLAIN_CHARS.issuperset(step):
            text += f".{step}" if text else step
        else:
            text += f"[{quoted(step)}]"
    return text


def quoted(text: str) -> str:
    """Quotes user input for a message: short, on one line, and with control characters escaped."""
    return f'"{escaped(text if len(text) <= _QUOTED_MAX else text[: _QUOTED_MAX - 1] + "…")}"'


def escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return named.get(char) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
