"""Are pauses spread over their whole range, and retries kept to their share?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.client.retry import RetryBudget, RetryPolicy
from remit.world.randomness import SeededRandomness

T = TypeVar("T")


class Highest:
    """A chance that always draws the last lot, so that a ceiling can be read off."""

    def randrange(self, limit: int) -> int:
        return limit - 1

    def jitter_ms(self, limit: int) -> int:
        return limit

    def choice(self, items: Sequence[T], /) -> T:
        return items[-1]

    def shuffled(self, items: Sequence[T], /) -> list[T]:
        return list(items)

    def stream(self, name: str) -> Highest:
        return self


def test_the_ceiling_doubles_up_to_its_cap() -> None:
    shape = RetryPolicy(base_ms=50, cap_ms=2_000)
    assert [shape.backoff_ms(n, 1 << 40, Highest()) for n in (1, 2, 3, 6, 7, 1_000_000)] == [50, 100, 200, 1_600, 2_000, 2_000]


def test_half_of_what_is_left_is_kept_for_the_try() -> None:
    shape = RetryPolicy(base_ms=50, cap_ms=2_000)
    assert shape.backoff_ms(9, 1_000, Highest()) == 500
    assert shape.backoff_ms(9, -7, Highest()) == 0


@given(failures=st.integers(0, 100), left_ms=st.integers(-10, 100_000), seed=st.integers(0, 1 << 32))
def test_a_pause_is_within_its_bounds(failures: int, left_ms: int, seed: int) -> None:
    pause_ms = RetryPolicy().backoff_ms(failures, left_ms, SeededRandomness(str(seed)))
    assert 0 <= pause_ms <= min(2_000, max(0, left_ms // 2), 50 * 2 ** max(0, failures - 1))


def test_jitter_is_full_and_repeats_with_its_seed() -> None:
    def pauses(seed: str) -> list[int]:
        chance = SeededRandomness(seed)
        return [RetryPolicy().backoff_ms(10, 1 << 40, chance) for _ in range(2_000)]

    assert pauses("7") == pauses("7") != pauses("8")
    tenths = {pause_ms // 200 for pause_ms in pauses("7")}
    assert tenths >= set(range(10))


@pytest.mark.parametrize("field", ["deadline_ms", "try_ms", "base_ms", "cap_ms", "attempts_max"])
def test_no_part_of_a_shape_is_nothing(field: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RetryPolicy(**{field: 0})


def taken(budget: RetryBudget, now_ms: int, wait_ms_max: int = 0) -> int:
    count = 0
    while budget.take(now_ms, wait_ms_max) is not None:
        count += 1
    return count


def test_a_new_budget_holds_one_second_of_its_flow() -> None:
    assert taken(RetryBudget(), 1_000_000) == 10


def test_first_tries_put_in_a_fifth_and_time_ten_a_second() -> None:
    budget = RetryBudget()
    taken(budget, 0)
    for _ in range(50):
        budget.on_first_attempt(0)
    assert taken(budget, 0) == 10
    assert taken(budget, 2_000) == 20
    assert taken(budget, 2_000) == 0


def test_the_bucket_has_a_brim() -> None:
    budget = RetryBudget(tokens_max=100)
    budget.on_first_attempt(0)
    assert taken(budget, 1 << 40) == 100
    for _ in range(1_000):
        budget.on_first_attempt(1 << 40)
    assert taken(budget, 1 << 40) == 100


def test_a_retry_may_be_taken_ahead_within_the_wait() -> None:
    budget = RetryBudget(per_second=10)
    taken(budget, 0)
    assert [budget.take(0, 250) for _ in range(3)] == [100, 200, None]
    assert budget.take(99, 0) is None
    assert budget.take(300, 0) == 0


def test_a_clock_that_stands_or_goes_back_puts_nothing_in() -> None:
    budget = RetryBudget()
    taken(budget, 5_000)
    assert taken(budget, 5_000) == taken(budget, 4_000) == 0


def test_without_flow_an_empty_budget_stays_empty() -> None:
    assert RetryBudget(percent=0, per_second=0).take(0, 1 << 40) is None


@pytest.mark.parametrize("wrong", [{"percent": 101}, {"per_second": -1}, {"tokens_max": 0}])
def test_a_budget_is_a_budget(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="invalid retry budget"):
        RetryBudget(**wrong)


@given(st.lists(st.tuples(st.integers(0, 500), st.booleans(), st.integers(0, 300)), max_size=200))
def test_retries_never_exceed_their_share_and_their_flow(steps: list[tuple[int, bool, int]]) -> None:
    budget, now_ms, first, retries, latest_ms = RetryBudget(), 0, 0, 0, 0
    for passed_ms, is_first, wait_ms_max in steps:
        now_ms += passed_ms
        if is_first:
            first += 1
            budget.on_first_attempt(now_ms)
        elif (wait_ms := budget.take(now_ms, wait_ms_max)) is not None:
            retries += 1
            latest_ms = max(latest_ms, now_ms + wait_ms)
        assert retries <= 10 + first * 0.2 + max(latest_ms, now_ms) / 100
