"""Benchmarks over HTTP report plausible measurements in their documented format. A small cluster of real processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from remit.bench import api, end_to_end
from remit.bench.end_to_end import EndToEndSizes


def test_end_to_end_benchmark_follows_jobs_to_durable_bind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "QUIET_MS", 500)  # interference between rows matters only for real measurements
    report = asyncio.run(end_to_end._measure(EndToEndSizes(nodes=12, jobs=100, steady_s=1, echo_requests=50), tmp_path))
    line = json.loads(report.json_line())
    rows = {row["what"]: row for row in line["rows"]}
    assert line["bench"] == "end-to-end"
    assert [aim["aim"] for aim in line["aims"]] == [3_500, 10_000, 60]
    for what in ("one request a job", "one request a job, no spec twice", "in batches", "steady"):
        row = rows[what]
        assert row["jobs"] == (200 if what == "steady" else 100)
        assert row["jobs_per_s"] > 0
        # Workload, generation and replica are written once, and the replica again at its bind.
        assert row["rows_per_job"] >= 4
        assert row["beats_lost"] == 0
        assert {"server_us", "scheduler_us", "controllers_us", "hollow_us", "load_us"} <= row.keys()
    assert rows["steady"]["p50_ms"] <= rows["steady"]["p99_ms"] <= rows["steady"]["max_ms"]
    assert rows["yardstick: raw store"]["rows_per_s"] > rows["yardstick: raw store"]["commits_per_s"] > 0


@pytest.mark.smoke
def test_api_benchmark_counts_requests_watches_and_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
