"""Does one tenant's flood leave the others, and the heartbeats of agents, alone? A real server and real load, for some seconds.

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
"""A second is little on a machine that has something else to do."""


def test_a_thousand_creates_a_second__others_and_heartbeats_are_answered_within_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A35, F41: fair queues; who floods is told to come back (429), and others see nothing of it."""
    monkeypatch.setattr(flood, "QUICK", FloodSizes(1.0, 4.0))
    for _ in range(TRIES):
        result = CliRunner().invoke(remit, ["bench", "flood", "--quick", "--json"], prog_name="remit")
        assert result.exit_code in (0, 1), result.output
        found = json.loads(result.stdout.splitlines()[-1])
        assert list(found) == ["bench", "revision", "machine", "rows", "aims"]
        before, during, after = found["rows"]
        for row in (before, during, after):
            assert row["others_answered"] == row["beats_answered"] == 1.0, "nobody but the flooder is refused anything"
        assert during["flood_created"] >= 200 and during["flood_refused"] >= RATE and during["flood_other"] == 0
        if result.exit_code == 0:
            break
    assert result.exit_code == 0, found["aims"]
    assert during["others_p99_ms"] < P99_MS and during["beats_p99_ms"] < P99_MS
