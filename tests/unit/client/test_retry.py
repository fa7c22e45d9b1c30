"""Retry policy and budget: full jitter, bounded share of retries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.client.retry import RetryBudget, RetryPolicy
from remit.world.randomness import SeededRandomness

T = TypeVar("T")


class HighestDraw:
    """Randomness that always draws the maximum, which shows the ceiling."""

    def randrange(self, limit: int) -> int:
        return limit - 1

    def jitter_ms(self, limit: int) -> int:
        return limit

    def choice(self, items: Sequence[T], /) -> T:
        return items[-1]

    def shuffled(self, items: Sequence[T], /) -> list[T]:
        return list(items)

    def stream(self, name: str) -> HighestDraw:
        return self


def test_backoff_ceiling_doubles_up_to_cap() -> None:
    policy = RetryPolicy(base_ms=50, cap_ms=2_000)
    assert [policy.backoff_ms(n, 1 << 40, HighestDraw()) for n in (1, 2, 3, 6, 7, 1_000_000)] == [
        50,
        100,
        200,
        1_600,
        2_000,
        2_000,
    ]


def test_backoff_leaves_half_of_remaining_time() -> None:
    policy = RetryPolicy(base_ms=50, cap_ms=2_000)
    assert policy.backoff_ms(9, 1_000, HighestDraw()) == 500
    assert policy.backoff_ms(9, -7, HighestDraw()) == 0


@given(failures=st.integers(0, 100), left_ms=st.integers(-10, 100_000), seed=st.integers(0, 1 << 32))
def test_backoff_stays_within_bounds(failures: int, left_ms: int, seed: int) -> None:
    pause_ms = RetryPolicy().backoff_ms(failures, left_ms, SeededRandomness(str(seed)))
    assert 0 <= pause_ms <= min(2_000, max(0, left_ms // 2), 50 * 2 ** max(0, failures - 1))


def test_backoff_has_full_jitter_and_repeats_for_seed() -> None:
    def pauses(seed: str) -> list[int]:
        chance = SeededRandomness(seed)
        return [RetryPolicy().backoff_ms(10, 1 << 40, chance) for _ in range(2_000)]

    assert pauses("7") == pauses("7") != pauses("8")
    tenths = {pause_ms // 200 for pause_ms in pauses("7")}
    assert tenths >= set(range(10))


@pytest.mark.parametrize("field", ["deadline_ms", "try_ms", "base_ms", "cap_ms", "attempts_max"])
def test_policy_field_of_zero_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RetryPolicy(**{field: 0})


def take_all(budget: RetryBudget, now_ms: int, wait_ms_max: int = 0) -> int:
    count = 0
    while budget.take(now_ms, wait_ms_max) is not None:
        count += 1
    return count


def test_new_budget_holds_one_second_of_refill() -> None:
    assert take_all(RetryBudget(), 1_000_000) == 10


def test_budget_refills_by_first_attempts_and_by_time() -> None:
    budget = RetryBudget()
    take_all(budget, 0)
    for _ in range(50):
        budget.on_first_attempt(0)
    assert take_all(budget, 0) == 10
    assert take_all(budget, 2_000) == 20
    assert take_all(budget, 2_000) == 0


def test_budget_never_exceeds_its_maximum() -> None:
    budget = RetryBudget(tokens_max=100)
    budget.on_first_attempt(0)
    assert take_all(budget, 1 << 40) == 100
    for _ in range(1_000):
        budget.on_first_attempt(1 << 40)
    assert take_all(budget, 1 << 40) == 100


def test_retry_may_be_taken_ahead_within_wait() -> None:
    budget = RetryBudget(per_second=10)
    take_all(budget, 0)
    assert [budget.take(0, 250) for _ in range(3)] == [100, 200, None]
    assert budget.take(99, 0) is None
    assert budget.take(300, 0) == 0


def test_clock_that_stops_or_goes_back_refills_nothing() -> None:
    budget = RetryBudget()
    take_all(budget, 5_000)
    assert take_all(budget, 5_000) == take_all(budget, 4_000) == 0


def test_empty_budget_without_refill_stays_empty() -> None:
    assert RetryBudget(percent=0, per_second=0).take(0, 1 << 40) is None


@pytest.mark.parametrize("wrong", [{"percent": 101}, {"per_second": -1}, {"tokens_max": 0}])
def test_invalid_budget_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="invalid retry budget"):
        RetryBudget(**wrong)


@given(st.lists(st.tuples(st.integers(0, 500), st.booleans(), st.integers(0, 300)), max_size=200))
def test_retries_stay_within_share_and_refill(steps: list[tuple[int, bool, int]]) -> None:
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
