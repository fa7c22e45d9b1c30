"""Is every row of the table of attacks refused as it says? `docs/faults.md`, section Attacks; how is in rows_*.py.

After each: no 500, the server alive and ready, its memory grown by less than 50 MiB, and what was refused in the audit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.integration.attacks import rows_enrollment as rows_joining
from tests.integration.attacks import rows_identity, rows_input, rows_load, rows_tenants
from tests.integration.attacks.attack_server import ATTACKS, Attack, Stage, run

PARTS: Final = (rows_identity, rows_joining, rows_tenants, rows_input, rows_load)
LATER: Final = {
    "A38": "a page that shows names and logs",
    "A41": "a page that can be framed, or asks for a WebSocket",
    "A42": "a store that is asked over a network",
}
"""What there is nothing to attack of yet."""
PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "faults.md"


@pytest.mark.smoke
@pytest.mark.parametrize("one", ATTACKS, ids=str)
def test_it_is_refused_as_the_table_says(one: Attack, stage: Stage, record_property: Callable[[str, object], None]) -> None:
    record_property("row", one.row)
    record_property("requests", run(stage, one))


@pytest.mark.smoke
def test_no_row_is_left_out() -> None:
    rows = {line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| A")}
    assert rows == {one.row for one in ATTACKS} | set(LATER)
    assert all(part.__doc__ for part in PARTS)
