"""Property: the authority keeps its invariants under any claims in any order, store faults and takeovers.

One scope with up to three authorities at once (the active one, and deposed ones that do not know it yet), and a store that
loses answers and delays writes. The independent judge checks every commit (simulate/checkers); after every step the books of
the running authority must equal its sums. Grants between two scopes are in test_authority_grants.py.
"""

from __future__ import annotations

from collections import Counter

from hypothesis.stateful import run_state_machine_as_test

from remit.model.claims import Accepted
from tests.properties.commitment.authority_machine import AuthorityMachine
from tests.properties.commitment.coverage_counts import Tallies
from tests.properties.commitment.faulty_scope_machine import REACHED
from tests.properties.effort import tries


class BusyMachine(AuthorityMachine):
    """Without rules that undo progress, so that load builds up; always with some work of higher priority."""

    always = frozenset({0, 2, 3, 10})

    restore_backup = None  # type: ignore[assignment]
    take_backup = None  # type: ignore[assignment]
    delete_object = None  # type: ignore[assignment]
    adopt_leased_policy = None  # type: ignore[assignment]
    publish_or_roll_back_policy = None  # type: ignore[assignment]
    contend_for_lease = None  # type: ignore[assignment]
    record_soft_state = None  # type: ignore[assignment]
    mark_node = None  # type: ignore[assignment]


def test_authority_keeps_invariants_under_any_claims_and_faults() -> None:
    """F01 F02 F10 F12 F15 F16 F19 F20 F24 F25 F27 F33 F34 F37 F38"""
    run_state_machine_as_test(AuthorityMachine, settings=tries(60, 150))
    REACHED.write()


def test_busy_authority_keeps_invariants() -> None:
    """F01 F02 F12 F15 F16 F19 F20 F24 F25 F33 F34 F37 F38"""
    run_state_machine_as_test(BusyMachine, settings=tries(60, 150))
    REACHED.write()


def test_tallies_count_codes_transitions_and_claims() -> None:
    """The soak prints these counts; they start empty."""
    tallies = Tallies("nothing")
    tallies.count("x")
    assert tallies.counted == Counter({"x": 1})
    assert isinstance(Accepted(1), Accepted)
