"""Every row of the attack table in `docs/faults.md` is refused as stated there; the attacks are in rows_*.py.

After each: no 500, the server alive and ready, its memory grown by less than 50 MiB, and the refusal in the audit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.integration.attacks import rows_enrollment, rows_identity, rows_input, rows_load, rows_tenants
from tests.integration.attacks.attack_server import ATTACKS, Attack, AttackedServer, run

PARTS: Final = (rows_identity, rows_enrollment, rows_tenants, rows_input, rows_load)
LATER: Final = {
    "A38": "a web page that shows names and logs",
    "A41": "a web page that can be framed or uses WebSockets",
    "A42": "a store reached over the network",
}
"""Rows about parts that do not exist yet."""
PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "faults.md"


@pytest.mark.smoke
@pytest.mark.parametrize("one", ATTACKS, ids=str)
def test_attack_is_refused_as_table_states(
    one: Attack, target: AttackedServer, record_property: Callable[[str, object], None]
) -> None:
    record_property("row", one.row)
    record_property("requests", run(target, one))


@pytest.mark.smoke
def test_every_row_has_attack_or_reason() -> None:
    rows = {line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| A")}
    assert rows == {one.row for one in ATTACKS} | set(LATER)
    assert all(part.__doc__ for part in PARTS)
