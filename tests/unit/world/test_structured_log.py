"""Structured log: one line per record whatever its contents, without secrets, bounded, and rate-limited."""

from __future__ import annotations

import io
import json

import pytest

from remit.world.structured_log import (
    FIELDS_MAX,
    HIDDEN,
    RATE_LIMIT_KEYS_MAX,
    RATE_LIMIT_MS,
    VALUE_MAX,
    LogFormat,
    LogLevel,
    StructuredLog,
)

HOSTILE = (
    "\x1b[2J\x1b[31mroot@host# ",
    "a\nb",
    "a\r\nFAKE line",
    "\x00",
    "\x9b31m",
    "\u202ereversed",
    "\u2028",
    "\ud800",
    '"}',
)


class RecordedLog:
    def __init__(self, form: LogFormat = "json", level: LogLevel = "debug") -> None:
        self.file, self.now_ms = io.BytesIO(), 0
        self.log = StructuredLog(
            "test",
            wall=lambda: "2030-01-02T10:03:22.113Z",
            now_ms=lambda: self.now_ms,
            form=form,
            level=level,
            file=self.file,
        )

    def lines(self) -> list[str]:
        return self.file.getvalue().decode().splitlines()

    def records(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.lines()]


def test_line_has_time_level_part_event_and_fields() -> None:
    log = RecordedLog()
    log.log.bind(node="a").warning("it fell", replica="replica/shop/web-0", attempt=2, empty="", nothing=None)
    assert log.records() == [
        {
            "time": "2030-01-02T10:03:22.113Z",
            "level": "warning",
            "part": "test",
            "node": "a",
            "replica": "replica/shop/web-0",
            "attempt": 2,
            "event": "it fell",
        }
    ]
    text_log = RecordedLog("text")
    text_log.log.info("it fell", replica="replica/shop/web-0", why="no room")
    assert text_log.lines() == ['10:03:22.113 info    test: it fell  replica=replica/shop/web-0 why="no room"']


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_control_characters_and_newlines_are_escaped(form: LogFormat, hostile: str) -> None:
    """A37."""
    log = RecordedLog(form)
    log.log.info(f"asked {hostile}", name=hostile)
    written = log.file.getvalue()
    assert written.count(b"\n") == 1 and written.endswith(b"\n")
    assert written.decode().rstrip("\n").isprintable()
    if form == "json":
        json.loads(written)


@pytest.mark.parametrize("form", ["json", "text"])
def test_tokens_are_redacted_by_field_name_and_pattern(form: LogFormat) -> None:
    log = RecordedLog(form)
    secret = "remit_" + "k7" * 20
    log.log.info(
        f"asked with {secret}", token="t0p", Authorization="Bearer abc.def", note="header Bearer s3cret!", other=secret
    )
    records = log.file.getvalue().decode()
    assert HIDDEN in records
    for private in (secret, "t0p", "abc.def", "s3cret"):
        assert private not in records


def test_line_length_and_number_of_fields_are_bounded() -> None:
    log = RecordedLog()
    log.log.info("x" * 1_000_000, **{f"field{number}": "y" * 10_000 for number in range(1_000)})
    (line,) = log.lines()
    assert len(line) < (VALUE_MAX + 100) * (FIELDS_MAX + 2)
    assert len(json.loads(line)) <= FIELDS_MAX + 2


def test_repeated_records_are_rate_limited_and_counted() -> None:
    log = RecordedLog()
    for _ in range(100):
        log.log.rate_limited("warning", "sort", "again")
    log.now_ms += RATE_LIMIT_MS
    log.log.rate_limited("warning", "sort", "again")
    log.log.rate_limited("warning", "another", "something else")
    assert [(one["event"], one.get("passed_over")) for one in log.records()] == [
        ("again", None), ("again", 99), ("something else", None),
    ]  # fmt: skip
    for number in range(5 * RATE_LIMIT_KEYS_MAX):
        log.log.rate_limited("warning", f"sort {number}", "many sorts")
    assert len(log.log._last_written) <= RATE_LIMIT_KEYS_MAX


def test_records_below_level_are_dropped_and_others_counted() -> None:
    log = RecordedLog(level="warning")
    log.log.debug("no")
    log.log.info("no")
    log.log.rate_limited("info", "no", "no")
    log.log.warning("yes")
    log.log.error("yes")
    assert [one["level"] for one in log.records()] == ["warning", "error"]
    assert log.log.counts == {"warning": 1, "error": 1}
