"""The table of refusals: every code has a meaning and a cure."""

from __future__ import annotations

import pytest

from remit.law.fit import RULES
from remit.law.refusals import REFUSALS
from remit.model.claims import Code


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_meaning_and_cure(code: Code) -> None:
    refusal = REFUSALS[code]
    for words in (refusal.meaning, refusal.cure):
        assert words and words == words.strip() and not words.endswith(".")


def test_refusal_table_has_no_unknown_code() -> None:
    assert set(REFUSALS) == set(Code)


def test_refusal_meanings_are_unique() -> None:
    assert len({refusal.meaning for refusal in REFUSALS.values()}) == len(REFUSALS)


def test_refusals_of_placement_rules_are_curable() -> None:
    assert not any(REFUSALS[rule.code].never for rule in RULES)
