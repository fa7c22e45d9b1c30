"""Work queue of a controller: one reconcile a key at a time, backoff, retry budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remit.client.retry import RetryBudget
from remit.correction.framework.work_queue import BackoffPolicy, WorkQueue

PAUSES = BackoffPolicy(base_ms=100, cap_ms=1_000, stuck_after_ms=10_000, slow_ms=5_000)


def queue(budget: RetryBudget | None = None) -> WorkQueue:
    """Backoff without jitter: always the maximum."""
    return WorkQueue(lambda most: most, PAUSES, budget)


def test_key_is_queued_once_despite_repeated_triggers() -> None:
    keys = queue()
    for _ in range(3):
        keys.enqueue("a", 0)
    keys.enqueue("b", 0)
    assert [keys.take(0, 1), keys.take(0, 1), keys.take(0, 1)] == ["a", "b", None]


def test_trigger_during_reconcile_is_handled_afterwards() -> None:
    keys = queue()
    keys.enqueue("a", 0)
    assert keys.take(0, 1) == "a"
    keys.enqueue("a", 0)
    assert keys.take(0, 1) is None
    keys.done("a")
    assert keys.take(0, 1) == "a"


def test_accepted_key_waits_until_cache_shows_revision() -> None:
    """F29: before that the cache looks as before, and the claim would be repeated."""
    keys = queue()
    keys.enqueue("a", 0)
    keys.take(0, 5)
    keys.accepted("a", 9, 5)
    keys.enqueue("a", 0)
    assert keys.take(0, 8) is None
    assert keys.take(0, 9) == "a"


def test_accepted_key_is_reconciled_once_more() -> None:
    keys = queue()
    keys.enqueue("a", 0)
    keys.take(0, 5)
    keys.accepted("a", 5, 5)
    assert keys.take(0, 5) == "a"
    keys.done("a")
    assert keys.take(0, 5) is None


def test_backoff_doubles_up_to_maximum() -> None:
    """F32."""
    keys, now_ms, waits = queue(), 0, []
    keys.enqueue("a", 0)
    for _ in range(6):
        assert keys.take(now_ms, 1) == "a"
        keys.failed("a", now_ms)
        following = keys.next_run_ms()
        assert following is not None
        waits.append(following - now_ms)
        assert keys.take(following - 1, 1) is None
        now_ms = following
    assert waits == [101, 201, 401, 801, 1_001, 1_001]


def test_trigger_shortens_backoff_but_keeps_failure_count() -> None:
    keys = queue()
    keys.enqueue("a", 0)
    for now_ms in (0, 2_000, 4_000):
        keys.take(now_ms, 1)
        keys.failed("a", now_ms)
    keys.enqueue("a", 4_000)
    assert keys.next_run_ms() == 4_101
    keys.take(4_101, 1)
    keys.failed("a", 4_101)
    assert keys.next_run_ms() == 4_101 + 801


def test_progress_resets_failure_count() -> None:
    keys = queue()
    keys.enqueue("a", 0)
    for now_ms in (0, 2_000, 4_000):
        keys.take(now_ms, 1)
        keys.failed("a", now_ms, progress=now_ms == 4_000)
    assert keys.next_run_ms() == 4_101


def test_long_failing_key_is_reported_stuck_once_and_retried_slowly() -> None:
    keys, now_ms, stuck = queue(), 0, list[str]()
    keys.enqueue("a", 0)
    while now_ms < 40_000:
        assert keys.take(now_ms, 1) == "a"
        keys.failed("a", now_ms)
        stuck += keys.take_stuck()
        following = keys.next_run_ms()
        assert following is not None
        last_ms, now_ms = now_ms, following
    assert stuck == ["a"]
    assert now_ms - last_ms == PAUSES.slow_ms
    keys.take(now_ms, 1)
    keys.accepted("a", 1, 1)
    keys.take(now_ms, 1)
    keys.failed("a", now_ms)
    assert keys.next_run_ms() == now_ms + 101


def test_retries_share_budget_but_first_attempts_are_free() -> None:
    keys = queue(RetryBudget(percent=0, per_second=0))
    for key in ("a", "b"):
        keys.enqueue(key, 0)
    assert keys.take(0, 1) == "a"
    keys.failed("a", 0)
    assert keys.take(101, 1) == "b"
    assert keys.take(101, 1) is None, "a retry, and the budget is exhausted"
    assert keys.next_run_ms() == 101 + PAUSES.base_ms + PAUSES.cap_ms


def test_delayed_key_is_due_at_its_earliest_time() -> None:
    keys = queue()
    keys.enqueue_at("a", 500)
    keys.enqueue_at("a", 700)
    assert keys.next_run_ms() == 500
    assert keys.take(499, 1) is None
    assert keys.take(500, 1) == "a"


@given(st.lists(st.sampled_from(["news", "settled", "accepted", "failed", "later", "board"]), max_size=40))
def test_triggered_key_is_always_reconciled_eventually(steps: list[str]) -> None:
    keys, now_ms, board, busy = queue(), 0, 1, False
    for step in steps:
        match step:
            case "news":
                keys.enqueue("a", now_ms)
            case "later":
                now_ms += 700
            case "board":
                board += 3
            case _ if busy:
                if step == "settled":
                    keys.done("a")
                elif step == "accepted":
                    keys.accepted("a", board + 2, board)
                else:
                    keys.failed("a", now_ms)
                busy = False
        if not busy:
            busy = keys.take(now_ms, board) == "a"
    if busy:
        keys.done("a")
    keys.enqueue("a", now_ms)
    assert any(keys.take(now_ms + wait_ms, board + 3) == "a" for wait_ms in range(0, 400_000, 1_000))
