"""Validation problems: location, message, suggested fix; text quoting.

Words only: what is a mistake is decided elsewhere.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

Path = tuple[str | int, ...]
"""Where in a document: `("spec", "ports", 0, "name")`."""

PROBLEMS_MAX = 1000
SUGGESTIONS_MAX = 100
CANDIDATES_MAX = 64
COMPARISONS_MAX = 3200
NAMES_MAX = 10_000
_SHOWN_MAX = 60
_PATH_MAX = 120
_LISTED_MAX = 24
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


class Problem(Struct, frozen=True, order=True):
    """One mistake: where it stands (line and column count from 1), what is wrong, and what would mend it."""

    file: str
    line: int
    column: int
    path: str
    message: str
    cure: str = ""
    reserved: bool = False
    """Does it say what only Remit itself may?"""

    def __str__(self) -> str:
        return f"{escaped(self.file)}:{self.line}:{self.column}: {self.words}"

    @property
    def words(self) -> str:
        """For whoever has an object and no file: without the place."""
        return (f"{self.path}: " if self.path else "") + self.message + (f"; {self.cure}" if self.cure else "")


class Problems:
    """The problems of one file. Bounded: a file that is all mistakes costs no more than one with a thousand."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._told: dict[Problem, None] = {}
        self._suggestions_left = SUGGESTIONS_MAX
        self._comparisons_left = COMPARISONS_MAX
        self.left_off = 0
        self.as_json = False
        """Is the file JSON? A cure is written in the language of its file."""

    def add(self, place: tuple[int, int], path: Path, message: str, cure: str = "", *, reserved: bool = False) -> None:
        if len(self._told) < PROBLEMS_MAX:
            # Escaped here once more, for every author: a message that quotes a file must not steer the terminal.
            self._told[Problem(self._file, *place, path_text(path), escaped(message), escaped(cure), reserved)] = None
        else:
            self.left_off += 1

    def take(self, other: Problems) -> None:
        """Those of another reading of the same file."""
        for problem in other._told:
            self._told[msgspec.structs.replace(problem, file=self._file)] = None
        self.left_off += other.left_off

    def meant(self, word: str, known: Iterable[str]) -> str:
        """The known word that was probably meant, or nothing. A comparison is slow, so one file gets only so many."""
        candidates = list(itertools.islice(known, CANDIDATES_MAX))
        if self._suggestions_left <= 0 or self._comparisons_left < len(candidates):
            return ""
        self._suggestions_left -= 1
        self._comparisons_left -= len(candidates)
        return meant(word, candidates)

    def __bool__(self) -> bool:
        return bool(self._told)

    def told(self) -> tuple[Problem, ...]:
        """In the order of the file."""
        ordered = sorted(self._told)
        if self.left_off:
            last = ordered[-1]
            message = f"{self.left_off} more problems are not shown"
            ordered.append(Problem(self._file, last.line, last.column, "", message, "mend these first"))
        return tuple(ordered)


def meant(word: str, known: Iterable[str]) -> str:
    if not word or len(word) > 64:
        return ""
    by_lower = {name.lower(): name for name in itertools.islice(known, CANDIDATES_MAX) if len(name) <= 64}
    bare = word.lower()
    for spelling in (bare, bare.replace("_", "").replace("-", ""), bare + "s", bare.removesuffix("s")):
        if spelling in by_lower:
            return by_lower[spelling]
    close = difflib.get_close_matches(bare, by_lower, n=1, cutoff=0.7)
    return by_lower[close[0]] if close else ""


def an(word: str) -> str:
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


def did_you_mean(word: str) -> str:
    return f"did you mean {word}?" if word else ""


def one_of(words: Iterable[str]) -> str:
    """For a cure: `a, b or c`; of very many, the first few."""
    listed = [word or '""' for word in itertools.islice(words, _LISTED_MAX + 1)]
    if len(listed) > _LISTED_MAX:
        return f"{', '.join(listed[:_LISTED_MAX])}, …"
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"


def there_are(name: str, names: Sequence[str], what: str) -> str:
    """For a cure: names that are like the one that is not there, or the first few of all."""
    close = difflib.get_close_matches(name, names[:NAMES_MAX], n=3, cutoff=0.6) if len(name) <= 2 * _SHOWN_MAX else []
    if close:
        return f"did you mean {one_of(close)}?"
    return f"there are {one_of(names)}" if names else f"there are no {what}"


def path_text(path: Path) -> str:
    text = ""
    for step in path:
        if len(text) > _PATH_MAX:
            return text + "…"
        if isinstance(step, int):
            text += f"[{step}]"
        elif step and len(step) <= 2 * _SHOWN_MAX and _PLAIN.issuperset(step):
            text += f".{step}" if text else step
        else:
            text += f"[{shown(step)}]"
    return text


def shown(text: str) -> str:
    """A piece of somebody's file inside quotes: short, on one line, and without a letter that a terminal would obey."""
    return f'"{escaped(text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 1] + "…")}"'


def escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def _escape(letter: str) -> str:
    code = ord(letter)
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return named.get(letter) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
