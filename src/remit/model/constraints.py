"""Field constraints, each with its check and its JSON Schema.

Each limit is its check and its JSON Schema in one place.

They stand on the types beside `Meta`, and are judged wherever something is declared, by the reader and at the authority's door.
The decoder does not know them: an object stored before a limit was made stays readable.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from msgspec import Meta

from remit.model import resources
from remit.model.manifests.documents import Node, Place
from remit.model.problems import Path, one_of, shown

RESERVED: Final = "remit/"
"""Names under this prefix are Remit's own: a tenant who set them would place work where only the system may."""

NUL: Final = r"\u0000"
"""No text has one: it would end the text early for whoever reads it in C."""


class Breach(NamedTuple):
    """Where a limit is broken, in which words."""

    place: Place
    path: Path
    message: str
    cure: str


class Limit(ABC):
    """`breaches` passes over what has the wrong form, which its type has told; `schema` refuses nothing that it lets by."""

    people_only = False
    """Is what Remit itself writes exempt? Whoever else breaks it has said what is reserved."""

    @abstractmethod
    def breaches(self, node: Node, path: Path) -> Iterator[Breach]: ...

    @abstractmethod
    def schema(self) -> dict[str, Any]: ...


def limited(*limits: Limit, **bounds: Any) -> Meta:
    """`Meta` with these limits, and with the bounds that the decoder keeps too."""
    return Meta(extra={"limits": limits}, **bounds)


def text_of(node: Node | None) -> str | None:
    return node.scalar if node is not None and isinstance(node.scalar, str) else None


class Unreserved(Limit):
    """Not one of the names that are Remit's own."""

    people_only = True

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        text = text_of(node)
        if text is not None and text.startswith(RESERVED):
            message = f"{shown(text)} is reserved: only Remit writes what stands under {RESERVED}"
            yield Breach(node.place, path, message, "choose another prefix, or none")

    def schema(self) -> dict[str, Any]:
        return {"not": {"pattern": f"^{RESERVED}"}}


class AtMost(Limit):
    """A number above this is the system's."""

    people_only = True

    def __init__(self, most: int, whose: str) -> None:
        self._most, self._whose = most, whose

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        if node.form == "integer" and isinstance(node.scalar, int) and node.scalar > self._most:
            message = f"{node.scalar} is reserved: {self._whose} above {self._most} are Remit's own"
            yield Breach(node.place, path, message, f"use at most {self._most}")

    def schema(self) -> dict[str, Any]:
        return {"maximum": self._most}


class Matching(Limit):
    """A text that a pattern allows. What is longer than `longest` has been refused for that."""

    def __init__(self, pattern: str, longest: int, what: str, cure: str) -> None:
        self._pattern, self._longest, self._what, self._cure = pattern, longest, what, cure

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        text = text_of(node)
        if text is not None and len(text) <= self._longest and not re.search(self._pattern, text):
            yield Breach(node.place, path, f"{shown(text)} is not {self._what}", self._cure)

    def schema(self) -> dict[str, Any]:
        return {"pattern": self._pattern}


class Distinct(Limit):
    """No two items alike: texts, or mappings by one of their fields (of which a schema can say nothing)."""

    def __init__(self, by: str = "") -> None:
        self._by = by

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        seen: dict[str, int] = {}
        for index, item in enumerate(node.items):
            name = text_of(item.get(self._by) if self._by else item)
            if name is not None and seen.setdefault(name, index) != index:
                yield Breach(item.place, (*path, index), f"{shown(name)} is named twice", "keep one of the two, or rename it")

    def schema(self) -> dict[str, Any]:
        return {} if self._by else {"uniqueItems": True}


class NamesSome(Limit):
    """A list that is left out allows everything. An empty one must not: a residency rule whose last region was deleted would
    quietly open the whole world."""

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        if node.form == "list" and not node.items:
            message = f"an empty list would allow all {path[-1]}"
            yield Breach(node.place, path, message, f"name at least one, or leave {path[-1]} out")

    def schema(self) -> dict[str, Any]:
        return {}  # minItems is its type's: an object forgets whether a list was empty or left out, so the decoder asks it too


class TakesTime(Limit):
    """A duration that is not nothing."""

    def __init__(self, message: str, cure: str) -> None:
        self._message, self._cure = message, cure

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        text = text_of(node)
        try:
            if text is not None and resources.parse_duration(text) == 0:
                yield Breach(node.place, path, self._message, self._cure)
        except ValueError:
            pass  # told with the shapes

    def schema(self) -> dict[str, Any]:
        return {"allOf": [{"pattern": "[1-9]"}]}


class Lasts(Limit):
    """A duration that is not longer than this."""

    def __init__(self, most_ms: int, cure: str) -> None:
        self._most_ms, self._cure = most_ms, cure

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        text = text_of(node)
        try:
            if text is not None and resources.parse_duration(text) > self._most_ms:
                message = f"{shown(text)} is longer than {resources.format_duration(self._most_ms)}"
                yield Breach(node.place, path, message, self._cure)
        except ValueError:
            pass  # told with the shapes

    def schema(self) -> dict[str, Any]:
        return {}  # 8d and 169h are equally long: a pattern cannot add them up


class Inside(Limit):
    """A path that does not lead out of the replica's directory."""

    def __init__(self, *, absolute: bool) -> None:
        self._absolute = absolute

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        text = text_of(node)
        if text and (".." in text.split("/") or (text.startswith("/") and not self._absolute)):
            message = f"{shown(text)} leads out of the replica's directory"
            yield Breach(node.place, path, message, "write a path below it, without ..")

    def schema(self) -> dict[str, Any]:
        return {"not": {"pattern": r"(^|/)\.\.(/|$)" if self._absolute else r"^/|(^|/)\.\.(/|$)"}}


_MACHINE = ("dev", "proc", "sys")


class MountPoint(Limit):
    """Where files are put for a replica: below its directory or at an absolute path, and not where the machine shows itself."""

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        text = text_of(node)
        if not text:
            return
        first, *_ = [part for part in text.split("/") if part not in ("", ".")] or [""]
        if not first or (text.startswith("/") and first in _MACHINE):
            message = f"{shown(text)} is {'everything there is' if not first else 'where the machine shows itself'}"
            yield Breach(node.place, path, message, "choose a place of its own, such as secrets or /run/secrets")

    def schema(self) -> dict[str, Any]:
        return {"not": {"pattern": r"^(/|\.)$|^/(dev|proc|sys)(/|$)"}}


class Program(Limit):
    """A command whose first word is a program."""

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        word = node.items[0] if node.items else None
        text = text_of(word)
        if word is not None and text is not None and not text.strip():
            yield Breach(word.place, (*path, 0), "names no program", "write the program to run as the first word")

    def schema(self) -> dict[str, Any]:
        return {"prefixItems": [{"pattern": r"\S"}]}


class Part(Limit):
    """A part of one device: more than nothing, less than all of it. Empty: none is asked for."""

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        if node.form not in ("string", "integer", "number") or node.scalar == "":
            return
        try:
            thousandths = resources.parse_quantity("share", node.text if node.form == "number" else str(node.scalar))
        except ValueError:
            return  # told with the shapes
        if thousandths >= 1000:
            cure = f"write count: {thousandths // 1000} for whole devices"
            yield Breach(node.place, path, "a share is a part of one device: at most 999m", cure)
        elif thousandths < 1:
            yield Breach(node.place, path, "a share of nothing", "write 1m to 999m")

    def schema(self) -> dict[str, Any]:
        whole = r"^\+?0*[1-9][0-9]*(\.[0-9]*)?(k|[KMGTPE]i|[MGTPE])?$"
        return {"not": {"pattern": whole}, "exclusiveMinimum": 0, "exclusiveMaximum": 1}


_CRON = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_CRON_WORDS = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
_CRON_PART = r"(?:\*|([0-9]{1,2}|[A-Za-z]{3})(?:-([0-9]{1,2}|[A-Za-z]{3}))?)(?:/([0-9]{1,2}))?"
_MONTHS = dict(
    zip(("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"), range(1, 13), strict=True)
)
_WEEKDAYS = {"SUN": 0, "MON": 1, "TUE": 2, "WED": 3, "THU": 4, "FRI": 5, "SAT": 6}
_CRON_NAMES: tuple[dict[str, int], ...] = ({}, {}, {}, _MONTHS, _WEEKDAYS)
_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


class Schedule(Limit):
    """Times in five fields, or in one word. Empty: none."""

    def breaches(self, node: Node, path: Path) -> Iterator[Breach]:
        text = text_of(node)
        if not text or text in _CRON_WORDS:
            return
        fields = text.split()
        times = [_cron(field, *limits, names) for field, limits, names in zip(fields, _CRON, _CRON_NAMES, strict=False)]
        if len(fields) != 5 or not all(times):
            cure = f'write minute, hour, day, month and weekday, such as "30 2 * * *", or {one_of(_CRON_WORDS)}'
            yield Breach(node.place, path, f"{shown(text)} is not a schedule", cure)
        elif fields[4] == "*" and min(times[2]) > max(_DAYS[month - 1] for month in times[3]):
            message = f"{shown(text)} never comes: no such month has a day {min(times[2])}"
            yield Breach(node.place, path, message, "choose a day that the month has")

    def schema(self) -> dict[str, Any]:
        field = rf"{_CRON_PART}(?:,{_CRON_PART})*"
        return {"anyOf": [{"enum": ["", *_CRON_WORDS]}, {"pattern": rf"^\s*{field}(?:\s+{field}){{4}}\s*$"}]}


def _cron(field: str, low: int, high: int, names: dict[str, int]) -> frozenset[int]:
    """The times that one field of a schedule names; none if it cannot be read."""
    times: set[int] = set()
    for part in field.split(","):
        match = re.fullmatch(_CRON_PART, part)
        if match is None:
            return frozenset()
        begin, end, pace = match.groups()
        first = low if begin is None else _cron_number(begin, names)
        last = high if end is None and (begin is None or pace) else first if end is None else _cron_number(end, names)
        if end and end.upper() == "SUN" and names:
            last = 7  # FRI-SUN: a week may end with it as well as begin
        step = int(pace) if pace else 1
        if not low <= first <= last <= high or not 1 <= step <= high:
            return frozenset()
        times.update(range(first, last + 1, step))
    return frozenset(times)


def _cron_number(word: str, names: dict[str, int]) -> int:
    return int(word) if word.isdigit() else names.get(word.upper(), -1)
