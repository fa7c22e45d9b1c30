"""How many rows and attacks were tried? One server for all of them, and one line at the end. No test is in here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.attacks.attack_server import Stage


@pytest.fixture(scope="package")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    found = Stage(tmp_path_factory.mktemp("attacked") / "data")
    try:
        yield found
    finally:
        found.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    tried = [dict(one.user_properties) for one in terminalreporter.stats.get("passed", []) if one.when == "call"]
    rows = {one["row"] for one in tried if "row" in one}
    if rows:
        requests = sum(one.get("requests", 0) for one in tried)
        attacks = sum("row" in one for one in tried)
        terminalreporter.write_line(
            f"attacks: {len(rows)} rows, {attacks} attacks, {requests} tries were refused as the table says"
        )
