"""Field constraints, each with its check and its JSON Schema.

A constraint is attached to a field's type, beside `Meta`. The manifest reader and the authority check it whenever an object
is declared. The decoder does not: an object that was stored before a constraint existed stays readable.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from msgspec import Meta

from remit.model import resources
from remit.model.manifests.documents import DocumentNode, Position
from remit.model.problems import Path, one_of, quoted

RESERVED_PREFIX: Final = "remit/"
"""Names under this prefix are written by Remit only. If tenants could set them, they could place work where only the system
may.
"""

NUL_PATTERN: Final = r"\u0000"
"""No text may contain a NUL character: C programs would read the text only up to it."""


class ConstraintViolation(NamedTuple):
    """One violation of a constraint: position in the file, path of the field, message and fix."""

    position: Position
    path: Path
    message: str
    cure: str


class FieldConstraint(ABC):
    """Base of all constraints.

    `violations` ignores a value of the wrong type, which the type check has already reported. `schema` must accept every
    value that `violations` accepts.
    """

    users_only = False
    """Whether objects that Remit itself writes are exempt. For other writers a violation is reported as use of a reserved name.
    """

    @abstractmethod
    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]: ...

    @abstractmethod
    def schema(self) -> dict[str, Any]: ...


def constrained(*constraints: FieldConstraint, **bounds: Any) -> Meta:
    """Returns `Meta` with these constraints, and with the bounds that the decoder checks as well."""
    return Meta(extra={"limits": constraints}, **bounds)


def text_of(node: DocumentNode | None) -> str | None:
    return node.scalar if node is not None and isinstance(node.scalar, str) else None


class UnreservedName(FieldConstraint):
    """A name that does not start with Remit's reserved prefix."""

    users_only = True

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        text = text_of(node)
        if text is not None and text.startswith(RESERVED_PREFIX):
            message = f"{quoted(text)} is reserved: only Remit sets names that start with {RESERVED_PREFIX}"
            yield ConstraintViolation(node.position, path, message, "choose another prefix, or none")

    def schema(self) -> dict[str, Any]:
        return {"not": {"pattern": f"^{RESERVED_PREFIX}"}}


class UserMaximum(FieldConstraint):
    """An upper bound for users; Remit itself may use higher numbers."""

    users_only = True

    def __init__(self, most: int, whose: str) -> None:
        self._most, self._whose = most, whose

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        if node.type == "integer" and isinstance(node.scalar, int) and node.scalar > self._most:
            message = f"{node.scalar} is reserved: {self._whose} above {self._most} are used by Remit itself"
            yield ConstraintViolation(node.position, path, message, f"use at most {self._most}")

    def schema(self) -> dict[str, Any]:
        return {"maximum": self._most}


class MatchesPattern(FieldConstraint):
    """A text that matches a pattern. Texts longer than `longest` are skipped, because their length has already been
    reported.
    """

    def __init__(self, pattern: str, longest: int, what: str, cure: str) -> None:
        self._pattern, self._longest, self._what, self._cure = pattern, longest, what, cure

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        text = text_of(node)
        if text is not None and len(text) <= self._longest and not re.search(self._pattern, text):
            yield ConstraintViolation(node.position, path, f"{quoted(text)} is not {self._what}", self._cure)

    def schema(self) -> dict[str, Any]:
        return {"pattern": self._pattern}


class DistinctItems(FieldConstraint):
    """A list without duplicates: of texts, or of mappings compared by one field (which JSON Schema cannot express)."""

    def __init__(self, by: str = "") -> None:
        self._by = by

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        seen: dict[str, int] = {}
        for index, item in enumerate(node.items):
            name = text_of(item.get(self._by) if self._by else item)
            if name is not None and seen.setdefault(name, index) != index:
                yield ConstraintViolation(
                    item.position, (*path, index), f"{quoted(name)} is listed twice", "keep one of the two, or rename it"
                )

    def schema(self) -> dict[str, Any]:
        return {} if self._by else {"uniqueItems": True}


class NonEmptyList(FieldConstraint):
    """A list that has at least one item if it is present. An absent list allows everything, and an empty list must not do the
    same: removing the last region of a data residency rule would silently allow every region.
    """

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        if node.type == "list" and not node.items:
            message = f"an empty list would allow all {path[-1]}"
            yield ConstraintViolation(node.position, path, message, f"name at least one, or leave {path[-1]} out")

    def schema(self) -> dict[str, Any]:
        return {}  # the type sets minItems: a decoded object does not distinguish an empty list from an absent one


class NonZeroDuration(FieldConstraint):
    """A duration greater than zero."""

    def __init__(self, message: str, cure: str) -> None:
        self._message, self._cure = message, cure

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        text = text_of(node)
        try:
            if text is not None and resources.parse_duration(text) == 0:
                yield ConstraintViolation(node.position, path, self._message, self._cure)
        except ValueError:
            pass  # the type check has reported it

    def schema(self) -> dict[str, Any]:
        return {"allOf": [{"pattern": "[1-9]"}]}


class MaxDuration(FieldConstraint):
    """A duration with an upper bound."""

    def __init__(self, most_ms: int, cure: str) -> None:
        self._most_ms, self._cure = most_ms, cure

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        text = text_of(node)
        try:
            if text is not None and resources.parse_duration(text) > self._most_ms:
                message = f"{quoted(text)} is longer than {resources.format_duration(self._most_ms)}"
                yield ConstraintViolation(node.position, path, message, self._cure)
        except ValueError:
            pass  # the type check has reported it

    def schema(self) -> dict[str, Any]:
        return {}  # a pattern cannot compare durations such as 8d and 169h


class ContainedPath(FieldConstraint):
    """A path that stays inside the replica's directory."""

    def __init__(self, *, absolute: bool) -> None:
        self._absolute = absolute

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        text = text_of(node)
        if text and (".." in text.split("/") or (text.startswith("/") and not self._absolute)):
            message = f"{quoted(text)} leaves the replica's directory"
            yield ConstraintViolation(node.position, path, message, "write a path below it, without ..")

    def schema(self) -> dict[str, Any]:
        return {"not": {"pattern": r"(^|/)\.\.(/|$)" if self._absolute else r"^/|(^|/)\.\.(/|$)"}}


_SYSTEM_DIRECTORIES = ("dev", "proc", "sys")


class MountPoint(FieldConstraint):
    """A path at which files are mounted for a replica: below its directory or absolute, but not / and not a system
    directory.
    """

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        text = text_of(node)
        if not text:
            return
        first, *_ = [part for part in text.split("/") if part not in ("", ".")] or [""]
        if not first or (text.startswith("/") and first in _SYSTEM_DIRECTORIES):
            message = f"{quoted(text)} is {'the root directory' if not first else 'a system directory'}"
            yield ConstraintViolation(node.position, path, message, "choose another directory, such as secrets or /run/secrets")

    def schema(self) -> dict[str, Any]:
        return {"not": {"pattern": r"^(/|\.)$|^/(dev|proc|sys)(/|$)"}}


class NamesProgram(FieldConstraint):
    """A command whose first word is not empty."""

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        program = node.items[0] if node.items else None
        text = text_of(program)
        if program is not None and text is not None and not text.strip():
            yield ConstraintViolation(
                program.position, (*path, 0), "the program is empty", "write the program to run as the first word"
            )

    def schema(self) -> dict[str, Any]:
        return {"prefixItems": [{"pattern": r"\S"}]}


class DeviceShare(FieldConstraint):
    """A share of one device, 1m to 999m. An empty text means that no share is requested."""

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        if node.type not in ("string", "integer", "number") or node.scalar == "":
            return
        try:
            thousandths = resources.parse_quantity("share", node.text if node.type == "number" else str(node.scalar))
        except ValueError:
            return  # the type check has reported it
        if thousandths >= 1000:
            cure = f"write count: {thousandths // 1000} for whole devices"
            yield ConstraintViolation(node.position, path, "a share is a part of one device: at most 999m", cure)
        elif thousandths < 1:
            yield ConstraintViolation(node.position, path, "a share must be greater than 0", "write 1m to 999m")

    def schema(self) -> dict[str, Any]:
        at_least_one = r"^\+?0*[1-9][0-9]*(\.[0-9]*)?(k|[KMGTPE]i|[MGTPE])?$"
        return {"not": {"pattern": at_least_one}, "exclusiveMinimum": 0, "exclusiveMaximum": 1}


_CRON_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_CRON_ALIASES = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
_CRON_TERM = r"(?:\*|([0-9]{1,2}|[A-Za-z]{3})(?:-([0-9]{1,2}|[A-Za-z]{3}))?)(?:/([0-9]{1,2}))?"
_MONTHS = dict(
    zip(("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"), range(1, 13), strict=True)
)
_WEEKDAYS = {"SUN": 0, "MON": 1, "TUE": 2, "WED": 3, "THU": 4, "FRI": 5, "SAT": 6}
_CRON_NAMES: tuple[dict[str, int], ...] = ({}, {}, {}, _MONTHS, _WEEKDAYS)
_DAYS_IN_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


class CronSchedule(FieldConstraint):
    """A cron schedule of five fields, or an alias such as @daily. An empty text means that there is no schedule."""

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        text = text_of(node)
        if not text or text in _CRON_ALIASES:
            return
        fields = text.split()
        times = [
            _cron_values(field, *range_, names) for field, range_, names in zip(fields, _CRON_RANGES, _CRON_NAMES, strict=False)
        ]
        if len(fields) != 5 or not all(times):
            cure = f'write minute, hour, day, month and weekday, such as "30 2 * * *", or {one_of(_CRON_ALIASES)}'
            yield ConstraintViolation(node.position, path, f"{quoted(text)} is not a schedule", cure)
        elif fields[4] == "*" and min(times[2]) > max(_DAYS_IN_MONTH[month - 1] for month in times[3]):
            message = f"{quoted(text)} never matches: none of its months has a day {min(times[2])}"
            yield ConstraintViolation(node.position, path, message, "choose a day that the month has")

    def schema(self) -> dict[str, Any]:
        field = rf"{_CRON_TERM}(?:,{_CRON_TERM})*"
        return {"anyOf": [{"enum": ["", *_CRON_ALIASES]}, {"pattern": rf"^\s*{field}(?:\s+{field}){{4}}\s*$"}]}


def _cron_values(field: str, low: int, high: int, names: dict[str, int]) -> frozenset[int]:
    """Returns the numbers that one field of a schedule matches; empty if the field is invalid."""
    times: set[int] = set()
    for term in field.split(","):
        match = re.fullmatch(_CRON_TERM, term)
        if match is None:
            return frozenset()
        start, end, step_text = match.groups()
        first = low if start is None else _cron_value(start, names)
        last = high if end is None and (start is None or step_text) else first if end is None else _cron_value(end, names)
        if end and end.upper() == "SUN" and names:
            last = 7  # in FRI-SUN the Sunday ends the range, so it counts as 7 and not as 0
        step = int(step_text) if step_text else 1
        if not low <= first <= last <= high or not 1 <= step <= high:
            return frozenset()
        times.update(range(first, last + 1, step))
    return frozenset(times)


def _cron_value(word: str, names: dict[str, int]) -> int:
    return int(word) if word.isdigit() else names.get(word.upper(), -1)
