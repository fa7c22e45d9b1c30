"""Access log: which requests are logged, at which level, and with which fields."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from remit.commitment.outcomes import AuditEntry
from remit.serve.http.request_telemetry import AccessLine, AccessLog, decision_logger
from remit.world.structured_log import LogLevel, StructuredLog


class RecordedLog:
    def __init__(self, level: LogLevel = "info") -> None:
        self._file = io.BytesIO()
        self.log = StructuredLog("server", wall=lambda: "now", now_ms=lambda: 0, form="json", level=level, file=self._file)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._file.getvalue().splitlines()]


def line(
    status: int, *, took_s: float = 0.01, route: str = "getNode", streams: bool = False, path: str = "/v1/nodes/a"
) -> AccessLine:
    one = AccessLine("GET", path)
    one.route, one.status, one.duration_s, one.trace, one.streams = route, status, took_s, "t-1", streams
    return one


@pytest.mark.parametrize(
    ("one", "level"),
    [
        (line(200), ""),
        (line(404), ""),
        (line(503, route="getReadiness"), ""),
        (line(409), "info"),
        (line(401), "info"),
        (line(500), "warning"),
        (line(200, took_s=2.0), "warning"),
        (line(200, took_s=900.0, streams=True), ""),
    ],
)
def test_refused_or_slow_requests_are_logged_and_others_only_at_debug(one: AccessLine, level: str) -> None:
    log = RecordedLog()
    AccessLog(log.log).write(one)
    assert [record["level"] for record in log.records()] == ([level] if level else [])
    everything = RecordedLog("debug")
    AccessLog(everything.log).write(one)
    assert [record["trace"] for record in everything.records()] == ["t-1"]


def test_repeated_refusals_are_one_line_without_control_characters() -> None:
    """A37."""
    log = RecordedLog()
    access = AccessLog(log.log)
    for number in range(1_000):
        access.write(line(401, path=f"/v1/\x1b[2J\nfake line {number}"))
    assert len(log.records()) == 1
    assert log._file.getvalue().count(b"\n") == 1 and b"\x1b" not in log._file.getvalue()


def test_decisions_are_logged_at_debug_with_trace_of_request() -> None:
    assert decision_logger(RecordedLog().log) is None
    log = RecordedLog("debug")
    log_decision = decision_logger(log.log)
    assert log_decision is not None
    log_decision(AuditEntry("op-1", "d", "bind", "replica/a/b-0", "s", "scheduler", "l", 1, 7, 3, 0, "no_room", "full", "t-1"))
    (record,) = log.records()
    assert (record["trace"], record["operation"], record["subject"], record["code"]) == (
        "t-1",
        "op-1",
        "replica/a/b-0",
        "no_room",
    )
