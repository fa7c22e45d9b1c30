"""A flood by one tenant does not affect other tenants and heartbeats. A real server under real load, for some seconds.

The long form is `remit bench flood`, which `make soak` runs.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from remit.bench import flood
from remit.bench.flood import P99_MS, RATE, FloodSizes
from remit.cli.main import remit

TRIES = 3
"""A second is short on a machine with other load."""


def test_flood_of_creates_leaves_others_and_heartbeats_under_one_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A35, F41: fair queues; the flooding tenant gets 429, and others are not affected."""
    monkeypatch.setattr(flood, "QUICK", FloodSizes(1.0, 4.0))
    for _ in range(TRIES):
        result = CliRunner().invoke(remit, ["bench", "flood", "--quick", "--json"], prog_name="remit")
        assert result.exit_code in (0, 1), result.output
        found = json.loads(result.stdout.splitlines()[-1])
        assert list(found) == ["bench", "revision", "machine", "rows", "aims"]
        before, during, after = found["rows"]
        for row in (before, during, after):
            assert row["others_answered"] == row["beats_answered"] == 1.0, "only the flooding tenant may be refused"
        assert during["flood_created"] >= 200 and during["flood_refused"] >= RATE and during["flood_other"] == 0
        if result.exit_code == 0:
            break
    assert result.exit_code == 0, found["aims"]
    assert during["others_p99_ms"] < P99_MS and during["beats_p99_ms"] < P99_MS
