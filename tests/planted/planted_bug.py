"""Planted bugs: a small defect for one test only, and the checks of which one must detect it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import pytest

from remit.commitment.rulings.registry import RULINGS, Decider, Ruling
from remit.model.claims import Claim

Plant = Callable[[pytest.MonkeyPatch], None]


class Bug(NamedTuple):
    """`rows` refers to FAULTS.md section 1, `expects` lists the checks of which one must fire.

    `seed` is where it was last detected, and is tried first.
    """

    name: str
    what: str
    rows: tuple[int, ...]
    scenario: str
    seed: int
    expects: tuple[str, ...]
    plant: Plant


BUGS: Final[dict[str, Bug]] = {}


def overrule(patch: pytest.MonkeyPatch, claim: type[Claim], decide: Decider) -> None:
    """Replace the authority's decision on this claim type."""
    register: dict[type[Claim], Ruling] = RULINGS
    patch.setitem(register, claim, RULINGS[claim]._replace(decide=decide))


def bug(*rows: int, scenario: str, expects: tuple[str, ...], seed: int = 1) -> Callable[[Plant], Plant]:
    """Register a function that plants a bug: its name is the bug's name, its docstring what it changes."""

    def register(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", "-")
        assert name not in BUGS, name
        BUGS[name] = Bug(name, (plant.__doc__ or "").strip(), rows, scenario, seed, expects, plant)
        return plant

    return register
