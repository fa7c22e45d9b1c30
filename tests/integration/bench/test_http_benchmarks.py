"""Do the benchmarks over HTTP measure what they say, in the shape that programs read? A small cluster of real processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from remit.bench import api, end_to_end
from remit.bench.end_to_end import EndToEndSizes


def test_jobs_are_followed_from_the_request_to_the_durable_bind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "QUIET_MS", 500)  # what one row leaves to the next matters to figures alone
    report = asyncio.run(end_to_end._measure(EndToEndSizes(nodes=12, jobs=100, steady_s=1, echo_requests=50), tmp_path))
    line = json.loads(report.json_line())
    rows = {row["what"]: row for row in line["rows"]}
    assert line["bench"] == "end-to-end"
    assert [aim["aim"] for aim in line["aims"]] == [3_500, 10_000, 60]
    for what in ("one request a job", "one request a job, no spec twice", "in batches", "steady"):
        row = rows[what]
        assert row["jobs"] == (200 if what == "steady" else 100)
        assert row["jobs_per_s"] > 0
        # Workload, generation and replica are written once, and the replica again when it is bound.
        assert row["rows_per_job"] >= 4
        assert row["beats_lost"] == 0
        assert {"server_us", "scheduler_us", "controllers_us", "hollow_us", "load_us"} <= row.keys()
    assert rows["steady"]["p50_ms"] <= rows["steady"]["p99_ms"] <= rows["steady"]["max_ms"]
    assert rows["yardstick: raw store"]["rows_per_s"] > rows["yardstick: raw store"]["commits_per_s"] > 0


@pytest.mark.smoke
def test_requests_watches_and_heartbeats_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "WATCHERS", 5)
    monkeypatch.setattr(api, "AGENTS", 100)
    report = asyncio.run(api._measure(api.ApiSizes(creates=60, reads_s=0.2, changes=10, beats_s=0.5), tmp_path))
    line = json.loads(report.json_line())
    rows = {row["what"]: row for row in line["rows"]}
    assert rows["create"]["requests"] == 60
    assert rows["get"]["requests"] > 60
    assert rows["fan-out, one at a time"]["deliveries"] == 50
    assert rows["heartbeats"]["requests"] == 25
    assert [aim["aim"] for aim in line["aims"]] == [45_000, 200, 0.5]
