"""Structured log lines (JSON or text), rate-limited, redacted.

A log entry is always a single line: control characters are escaped, long values are truncated, and anything that looks like
a token is replaced by `[hidden]`. Repeated entries are written once per interval, with the number of suppressed ones.

Fields that join the lines of different processes have one name everywhere: `trace` (of a request), `operation` (its id),
`tenant`, `workload`, `replica`, `attempt`, `node`, `revision`.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Final, Literal

import msgspec

from remit.model.counters import BoundedCounter
from remit.model.problems import escaped

LogFormat = Literal["json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]
LEVELS: Final[tuple[LogLevel, ...]] = ("debug", "info", "warning", "error")

VALUE_MAX: Final = 2_000
FIELDS_MAX: Final = 40
RATE_LIMIT_MS: Final = 10_000
"""Interval in which a rate-limited entry is written at most once."""
RATE_LIMIT_KEYS_MAX: Final = 1_000
"""Number of rate-limit keys that are remembered."""
RECENT_MAX: Final = 500
"""Number of recent lines kept in memory for support reports."""
HIDDEN: Final = "[hidden]"

_SECRET: Final = re.compile(r"remit_[A-Za-z0-9]{12,}|(?i:bearer)[ \t]+\S+")
_PRIVATE: Final = frozenset(("authorization", "token", "secret", "password", "cookie", "key"))
_CONTROL: Final = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""Characters that JSON leaves unescaped and a terminal would interpret."""
_NUMBERS: Final[dict[LogLevel, int]] = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class StructuredLog:
    """The log of one component of a process. `bind` returns a log that adds fields to each line."""

    def __init__(
        self,
        part: str,
        *,
        wall: Callable[[], str],
        now_ms: Callable[[], int],
        form: LogFormat = "text",
        level: LogLevel = "info",
        file: BinaryIO | None = None,
    ) -> None:
        self.part, self.level, self.counts = part, level, BoundedCounter(LEVELS)
        self._now_ms = now_ms
        self._last_written: dict[str, tuple[int, int]] = {}
        """By rate-limit key: when an entry was last written, and how many were suppressed since."""
        self._write = _Writer(form, wall, self.counts, file)
        self._fields: dict[str, object] = {"part": part}

    def bind(self, **fields: object) -> StructuredLog:
        """Return a log that adds these fields to each line. Rate limits and counters are shared with this one."""
        bound = object.__new__(StructuredLog)
        bound.__dict__.update(self.__dict__)
        bound._fields = {**self._fields, **fields}
        return bound

    def recent(self) -> list[str]:
        """Return the last lines as they were written."""
        return [line.decode() for line in self._write.recent]

    def is_enabled(self, level: LogLevel) -> bool:
        """Return whether entries of this level are written."""
        return _NUMBERS[level] >= _NUMBERS[self.level]

    def debug(self, event: str, **fields: object) -> None:
        self._log("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._log("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._log("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._log("error", event, fields)

    def rate_limited(self, level: LogLevel, key: str, event: str, **fields: object) -> None:
        """Write an entry at most once per `RATE_LIMIT_MS` and `key`. It carries the number of suppressed entries."""
        if not self.is_enabled(level):
            return
        now_ms = self._now_ms()
        at_ms, passed = self._last_written.pop(key, (now_ms - RATE_LIMIT_MS, 0))
        if now_ms - at_ms < RATE_LIMIT_MS:
            self._last_written[key] = at_ms, passed + 1
            return
        while len(self._last_written) >= RATE_LIMIT_KEYS_MAX:
            del self._last_written[next(iter(self._last_written))]
        self._last_written[key] = now_ms, 0
        more = {"passed_over": passed} if passed else {}
        self._log(level, event, {**fields, **more})

    def _log(self, level: LogLevel, event: str, fields: Mapping[str, object]) -> None:
        if _NUMBERS[level] >= _NUMBERS[self.level]:
            self._write(level, event, {**self._fields, **fields})


class _Writer:
    """Writes each line with one write call, so that lines of several processes in one file do not mix.

    It needs no logging library. Loading one at the first log line blocked an agent's event loop so long that its node missed
    heartbeats.
    """

    def __init__(self, form: LogFormat, wall: Callable[[], str], counts: BoundedCounter, file: BinaryIO | None) -> None:
        self._form, self._wall, self._counts, self._file = form, wall, counts, file
        self.recent: deque[bytes] = deque(maxlen=RECENT_MAX)

    def __call__(self, level: LogLevel, event: str, fields: Mapping[str, object]) -> None:
        self._counts.add(level)
        entry = {"time": self._wall(), **_sanitize(level, {**fields, "event": event})}
        line = _json(entry) if self._form == "json" else _text(entry)
        self.recent.append(line)
        file = sys.stderr.buffer if self._file is None else self._file
        with suppress(OSError, ValueError):  # the reader of the log is gone: that must not end the process
            file.write(line + b"\n")
            file.flush()


def _sanitize(level: LogLevel, fields: Mapping[str, object]) -> dict[str, Any]:
    """Drop empty fields, redact secrets, and bound the number and length of fields."""
    sanitized: dict[str, Any] = {"level": level}
    for field, value in fields.items():
        if value is None or value == "":
            continue
        if len(sanitized) >= FIELDS_MAX:
            break
        sanitized[field] = HIDDEN if field.lower() in _PRIVATE else _printable(value)
    return sanitized


def _printable(value: object) -> object:
    if isinstance(value, bool | int | float):
        return value
    text = str(value)
    if len(text) > VALUE_MAX:
        text = f"{text[:VALUE_MAX]}… ({len(text)} characters)"
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()  # escape lone surrogates, which cannot be encoded
    return _SECRET.sub(HIDDEN, text)


def _json(fields: Mapping[str, Any]) -> bytes:
    encoded = msgspec.json.encode(fields)
    if encoded.isascii():
        return encoded
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", encoded.decode()).encode()


def _text(fields: Mapping[str, Any]) -> bytes:
    """Format a line like `10:03:22.113 warning agent: it happened  node=a replica=shop/web-0`."""
    rest = dict(fields)
    time, level, part, event = (str(rest.pop(field, "")) for field in ("time", "level", "part", "event"))
    pairs = " ".join(f"{field}={_quoted(value)}" for field, value in rest.items())
    line = f"{time[11:23]} {level:<7} {part}: {event}" + (f"  {pairs}" if pairs else "")
    return escaped(line).encode("utf-8", "backslashreplace")


def _quoted(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text or not text else text
