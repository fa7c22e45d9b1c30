"""Do seeds that once broke a promise still hold? What each has found is beside it; the cause has a test of its own too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest

from remit.simulate.scenarios import names
from tests.scenarios.standing_runs import performed_together

KEPT: Final[Mapping[tuple[str, int], str]] = {
    ("mayhem", 7): "L13: those behind one that the authority refused again and again were not told that they wait",
    ("restored-draining", 6): "L10: a generation was taken for that of its number before a restore, and never rolled out",
}


@pytest.mark.parametrize(("name", "seed"), KEPT)
def test_what_was_found_is_not_found_again(name: str, seed: int) -> None:
    run = performed_together(tuple(KEPT))[name, seed].run
    assert not run.violations, "\n".join([KEPT[name, seed], *map(str, run.violations), f"remit simulate {name} --seed {seed}"])


def test_kept_seeds_are_of_scenarios_that_exist() -> None:
    assert {name for name, _ in KEPT} <= set(names())
