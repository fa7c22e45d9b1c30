"""Is a key looked at when there is cause, one look at a time, and ever more slowly while it fails?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remit.client.retry import RetryBudget
from remit.correction.framework.work_queue import BackoffPolicy, WorkQueue

PAUSES = BackoffPolicy(base_ms=100, cap_ms=1_000, stuck_after_ms=10_000, slow_ms=5_000)


def agenda(budget: RetryBudget | None = None) -> WorkQueue:
    """Every lot is the longest."""
    return WorkQueue(lambda most: most, PAUSES, budget)


def test_a_key_is_taken_once__however_much_news_there_was() -> None:
    made = agenda()
    for _ in range(3):
        made.enqueue("a", 0)
    made.enqueue("b", 0)
    assert [made.take(0, 1), made.take(0, 1), made.take(0, 1)] == ["a", "b", None]


def test_one_look_at_a_time__news_during_a_look_is_looked_at_after_it() -> None:
    made = agenda()
    made.enqueue("a", 0)
    assert made.take(0, 1) == "a"
    made.enqueue("a", 0)
    assert made.take(0, 1) is None
    made.done("a")
    assert made.take(0, 1) == "a"


def test_after_a_deed_a_key_waits_until_the_board_shows_it() -> None:
    """F29: before that it would look the same as before, and the deed would be asked for again."""
    made = agenda()
    made.enqueue("a", 0)
    made.take(0, 5)
    made.accepted("a", 9, 5)
    made.enqueue("a", 0)
    assert made.take(0, 8) is None
    assert made.take(0, 9) == "a"


def test_what_was_accepted_is_looked_at_once_more_without_any_news() -> None:
    made = agenda()
    made.enqueue("a", 0)
    made.take(0, 5)
    made.accepted("a", 5, 5)
    assert made.take(0, 5) == "a"
    made.done("a")
    assert made.take(0, 5) is None


def test_pauses_double_up_to_a_bound() -> None:
    """F32."""
    made, now_ms, waits = agenda(), 0, []
    made.enqueue("a", 0)
    for _ in range(6):
        assert made.take(now_ms, 1) == "a"
        made.failed("a", now_ms)
        following = made.next_run_ms()
        assert following is not None
        waits.append(following - now_ms)
        assert made.take(following - 1, 1) is None
        now_ms = following
    assert waits == [101, 201, 401, 801, 1_001, 1_001]


def test_news_shortens_a_pause_to_the_first__and_takes_nothing_from_the_count() -> None:
    made = agenda()
    made.enqueue("a", 0)
    for now_ms in (0, 2_000, 4_000):
        made.take(now_ms, 1)
        made.failed("a", now_ms)
    made.enqueue("a", 4_000)
    assert made.next_run_ms() == 4_101
    made.take(4_101, 1)
    made.failed("a", 4_101)
    assert made.next_run_ms() == 4_101 + 801


def test_progress_begins_the_count_anew() -> None:
    made = agenda()
    made.enqueue("a", 0)
    for now_ms in (0, 2_000, 4_000):
        made.take(now_ms, 1)
        made.failed("a", now_ms, progress=now_ms == 4_000)
    assert made.next_run_ms() == 4_101


def test_what_fails_for_long_is_stuck__that_is_told_once_and_it_goes_on_slowly() -> None:
    made, now_ms, told = agenda(), 0, list[str]()
    made.enqueue("a", 0)
    while now_ms < 40_000:
        assert made.take(now_ms, 1) == "a"
        made.failed("a", now_ms)
        told += made.take_stuck()
        following = made.next_run_ms()
        assert following is not None
        last_ms, now_ms = now_ms, following
    assert told == ["a"]
    assert now_ms - last_ms == PAUSES.slow_ms
    made.take(now_ms, 1)
    made.accepted("a", 1, 1)
    made.take(now_ms, 1)
    made.failed("a", now_ms)
    assert made.next_run_ms() == now_ms + 101


def test_retries_of_all_keys_come_out_of_one_budget__first_looks_do_not() -> None:
    made = agenda(RetryBudget(percent=0, per_second=0))
    for key in ("a", "b"):
        made.enqueue(key, 0)
    assert made.take(0, 1) == "a"
    made.failed("a", 0)
    assert made.take(101, 1) == "b"
    assert made.take(101, 1) is None, "a retry, and the budget is used up"
    assert made.next_run_ms() == 101 + PAUSES.base_ms + PAUSES.cap_ms


def test_time_itself_is_news_if_it_was_asked_for() -> None:
    made = agenda()
    made.enqueue_at("a", 500)
    made.enqueue_at("a", 700)
    assert made.next_run_ms() == 500
    assert made.take(499, 1) is None
    assert made.take(500, 1) == "a"


@given(st.lists(st.sampled_from(["news", "settled", "accepted", "failed", "later", "board"]), max_size=40))
def test_no_key_is_ever_lost__after_news_it_is_looked_at_sooner_or_later(steps: list[str]) -> None:
    made, now_ms, board, busy = agenda(), 0, 1, False
    for step in steps:
        match step:
            case "news":
                made.enqueue("a", now_ms)
            case "later":
                now_ms += 700
            case "board":
                board += 3
            case _ if busy:
                if step == "settled":
                    made.done("a")
                elif step == "accepted":
                    made.accepted("a", board + 2, board)
                else:
                    made.failed("a", now_ms)
                busy = False
        if not busy:
            busy = made.take(now_ms, board) == "a"
    if busy:
        made.done("a")
    made.enqueue("a", now_ms)
    assert any(made.take(now_ms + wait_ms, board + 3) == "a" for wait_ms in range(0, 400_000, 1_000))
