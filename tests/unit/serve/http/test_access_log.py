"""Which requests come into the log, at which level, and as what?"""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from remit.commitment.outcomes import AuditEntry
from remit.serve.http.request_telemetry import AccessLine, AccessLog, decision_logger
from remit.world.structured_log import LogLevel, StructuredLog


class Log:
    def __init__(self, level: LogLevel = "info") -> None:
        self._file = io.BytesIO()
        self.log = StructuredLog("server", wall=lambda: "now", now_ms=lambda: 0, form="json", level=level, file=self._file)

    def said(self) -> list[dict[str, Any]]:
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
def test_what_is_refused_or_slow_is_told_and_the_rest_only_at_debug(one: AccessLine, level: str) -> None:
    log = Log()
    AccessLog(log.log).write(one)
    assert [said["level"] for said in log.said()] == ([level] if level else [])
    everything = Log("debug")
    AccessLog(everything.log).write(one)
    assert [said["trace"] for said in everything.said()] == ["t-1"]


def test_a_flood_of_refusals_is_one_line_and_what_an_asker_writes_steers_no_terminal() -> None:
    """A37."""
    log = Log()
    access = AccessLog(log.log)
    for number in range(1_000):
        access.write(line(401, path=f"/v1/\x1b[2J\nfake line {number}"))
    assert len(log.said()) == 1
    assert log._file.getvalue().count(b"\n") == 1 and b"\x1b" not in log._file.getvalue()


def test_each_decision_is_told_at_debug_with_what_joins_it_to_its_request() -> None:
    assert decision_logger(Log().log) is None
    log = Log("debug")
    tell = decision_logger(log.log)
    assert tell is not None
    tell(AuditEntry("op-1", "d", "bind", "replica/a/b-0", "s", "scheduler", "l", 1, 7, 3, 0, "no_room", "full", "t-1"))
    (said,) = log.said()
    assert (said["trace"], said["operation"], said["subject"], said["code"]) == ("t-1", "op-1", "replica/a/b-0", "no_room")
