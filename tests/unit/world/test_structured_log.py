"""Is a line of the log one line, whatever was put into it; without secrets, within bounds, and not again and again?"""

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


class Log:
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

    def said(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.lines()]


def test_a_line_has_its_time_level_part_event_and_fields() -> None:
    log = Log()
    log.log.bind(node="a").warning("it fell", replica="replica/shop/web-0", attempt=2, empty="", nothing=None)
    assert log.said() == [
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
    words = Log("text")
    words.log.info("it fell", replica="replica/shop/web-0", why="no room")
    assert words.lines() == ['10:03:22.113 info    test: it fell  replica=replica/shop/web-0 why="no room"']


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("odd", HOSTILE)
def test_control_signs_and_newlines_are_escaped(form: LogFormat, odd: str) -> None:
    """A37."""
    log = Log(form)
    log.log.info(f"asked {odd}", name=odd)
    written = log.file.getvalue()
    assert written.count(b"\n") == 1 and written.endswith(b"\n")
    assert written.decode().rstrip("\n").isprintable()
    if form == "json":
        json.loads(written)


@pytest.mark.parametrize("form", ["json", "text"])
def test_tokens_are_hidden_by_their_field_and_by_their_looks(form: LogFormat) -> None:
    log = Log(form)
    secret = "remit_" + "k7" * 20
    log.log.info(
        f"asked with {secret}", token="t0p", Authorization="Bearer abc.def", note="header Bearer s3cret!", other=secret
    )
    said = log.file.getvalue().decode()
    assert HIDDEN in said
    for private in (secret, "t0p", "abc.def", "s3cret"):
        assert private not in said


def test_lines_are_bounded_in_length_and_in_fields() -> None:
    log = Log()
    log.log.info("x" * 1_000_000, **{f"field{number}": "y" * 10_000 for number in range(1_000)})
    (line,) = log.lines()
    assert len(line) < (VALUE_MAX + 100) * (FIELDS_MAX + 2)
    assert len(json.loads(line)) <= FIELDS_MAX + 2


def test_what_repeats_itself_is_told_once_in_a_while_with_how_many_were_not() -> None:
    log = Log()
    for _ in range(100):
        log.log.rate_limited("warning", "sort", "again")
    log.now_ms += RATE_LIMIT_MS
    log.log.rate_limited("warning", "sort", "again")
    log.log.rate_limited("warning", "another", "something else")
    assert [(one["event"], one.get("passed_over")) for one in log.said()] == [
        ("again", None), ("again", 99), ("something else", None),
    ]  # fmt: skip
    for number in range(5 * RATE_LIMIT_KEYS_MAX):
        log.log.rate_limited("warning", f"sort {number}", "many sorts")
    assert len(log.log._last_written) <= RATE_LIMIT_KEYS_MAX


def test_what_is_below_the_level_is_not_told_and_all_is_counted_that_is() -> None:
    log = Log(level="warning")
    log.log.debug("no")
    log.log.info("no")
    log.log.rate_limited("info", "no", "no")
    log.log.warning("yes")
    log.log.error("yes")
    assert [one["level"] for one in log.said()] == ["warning", "error"]
    assert log.log.counts == {"warning": 1, "error": 1}
