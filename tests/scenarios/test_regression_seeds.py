"""Seeds that once found a bug stay clean. Each names what it found; the cause has a test of its own too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest

from remit.simulate.scenarios import names
from tests.scenarios.standing_runs import simulate_all

REGRESSION_SEEDS: Final[Mapping[tuple[str, int], str]] = {
    ("mayhem", 7): "L13: replicas behind one that was refused repeatedly got no waiting reason",
    ("restored-draining", 6): "L10: a generation was confused with that of its number before a restore, and never rolled out",
}


@pytest.mark.parametrize(("name", "seed"), REGRESSION_SEEDS)
def test_regression_seed_stays_clean(name: str, seed: int) -> None:
    run = simulate_all(tuple(REGRESSION_SEEDS))[name, seed].run
    assert not run.violations, "\n".join(
        [REGRESSION_SEEDS[name, seed], *map(str, run.violations), f"remit simulate {name} --seed {seed}"]
    )


def test_regression_seeds_name_existing_scenarios() -> None:
    assert {name for name, _ in REGRESSION_SEEDS} <= set(names())
