"""Can everybody who is refused read what it means and what would cure it?"""

from __future__ import annotations

import pytest

from remit.law.fit import RULES
from remit.law.refusals import REFUSALS
from remit.model.claims import Code


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_a_meaning_and_a_cure(code: Code) -> None:
    refusal = REFUSALS[code]
    for words in (refusal.meaning, refusal.cure):
        assert words and words == words.strip() and not words.endswith(".")


def test_nothing_is_explained_that_cannot_be_said() -> None:
    assert set(REFUSALS) == set(Code)


def test_no_two_codes_mean_the_same() -> None:
    assert len({refusal.meaning for refusal in REFUSALS.values()}) == len(REFUSALS)


def test_what_does_not_fit_now_may_fit_later() -> None:
    assert not any(REFUSALS[rule.code].never for rule in RULES)
