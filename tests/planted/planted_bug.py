"""What is a planted bug? A small wrong turn, made for one test only, and the promise whose breach must be noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import pytest

from remit.commitment.rulings.registry import RULINGS, Decider, Ruling
from remit.model.claims import Claim

Plant = Callable[[pytest.MonkeyPatch], None]


class Bug(NamedTuple):
    """`rows` are those of FAULTS.md section 1 that it belongs to, `expects` the checks of which one must fire, and `seed` is
    where it was last seen and is looked for first.
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
    """Have the authority decide this claim otherwise."""
    register: dict[type[Claim], Ruling] = RULINGS
    patch.setitem(register, claim, RULINGS[claim]._replace(decide=decide))


def bug(*rows: int, scenario: str, expects: tuple[str, ...], seed: int = 1) -> Callable[[Plant], Plant]:
    """Register a function that plants a bug: its name is the bug's, its docstring says what is changed."""

    def register(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", "-")
        assert name not in BUGS, name
        BUGS[name] = Bug(name, (plant.__doc__ or "").strip(), rows, scenario, seed, expects, plant)
        return plant

    return register
