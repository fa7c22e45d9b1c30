"""One attacked server for all attacks, and a summary line of rows and attacks at the end. Contains no tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.attacks.attack_server import AttackedServer


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    found = AttackedServer(tmp_path_factory.mktemp("attacked") / "data")
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
