"""Fair queue: flows alternate by cost; a flooding flow delays only itself and gets a Retry-After."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from remit.serve.http import fair_queue as module
from remit.serve.http.fair_queue import FairQueue, Flow, Rate
from remit.serve.http.replies import ApiProblem


class FixedClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.ms = 1_000

    def now_ms(self) -> int:
        return self.ms


def queue(clock: FixedClock | None = None) -> FairQueue:
    return FairQueue(clock or FixedClock())  # type: ignore[arg-type]


def refused(action: Any) -> ApiProblem:
    with pytest.raises(ApiProblem) as raised:
        action()
    return raised.value


async def wait_for(turns: FairQueue, flow: Flow, cost: int, served: list[str], hold: asyncio.Event) -> None:
    with await turns.acquire(flow, cost):
        served.append(flow.name)
        await hold.wait()


def test_flow_with_one_request_is_next_despite_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 1)

    async def main() -> None:
        turns, served, hold = queue(), list[str](), asyncio.Event()
        flood, gentle = turns.admit("flood", 0, None), turns.admit("gentle", 0, None)
        waiting = [asyncio.ensure_future(wait_for(turns, flood, 1, served, hold)) for _ in range(100)]
        await asyncio.sleep(0)
        waiting.append(asyncio.ensure_future(wait_for(turns, gentle, 1, served, hold)))
        await asyncio.sleep(0)
        assert served == ["flood"] and turns.waiting == 100
        hold.set()
        await asyncio.gather(*waiting)
        assert served.index("gentle") <= 1 + module.QUANTUM
        assert turns.waiting == 0 and not turns._ring

    asyncio.run(main())


def test_expensive_and_cheap_flows_get_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 1)

    async def main() -> None:
        turns, served, hold = queue(), list[str](), asyncio.Event()
        expensive, cheap = turns.admit("dear", 0, None), turns.admit("cheap", 0, None)
        waiting = [asyncio.ensure_future(wait_for(turns, expensive, 16, served, hold)) for _ in range(50)]
        waiting += [asyncio.ensure_future(wait_for(turns, cheap, 1, served, hold)) for _ in range(200)]
        await asyncio.sleep(0)
        hold.set()
        while len(served) < 100:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0)
        seen = Counter(served[:100])
        assert 3 <= seen["dear"] <= 8, seen
        await asyncio.gather(*waiting)

    asyncio.run(main())


def test_single_flow_cannot_take_all_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 4)
    monkeypatch.setattr(module, "FLOW_SEATS_MAX", 3)

    async def main() -> None:
        turns, served, hold = queue(), list[str](), asyncio.Event()
        slow, other = turns.admit("slow", 0, None), turns.admit("other", 0, None)
        waiting = [asyncio.ensure_future(wait_for(turns, slow, 1, served, hold)) for _ in range(10)]
        await asyncio.sleep(0)
        waiting.append(asyncio.ensure_future(wait_for(turns, other, 1, served, hold)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert served == ["slow"] * 3 + ["other"]
        hold.set()
        await asyncio.gather(*waiting)

    asyncio.run(main())


def test_cancelled_request_releases_its_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 1)

    async def main() -> None:
        turns, served, hold = queue(), list[str](), asyncio.Event()
        flow = turns.admit("a", 0, None)
        first, second, third = (asyncio.ensure_future(wait_for(turns, flow, 1, served, hold)) for _ in range(3))
        await asyncio.sleep(0)
        second.cancel()
        first.cancel()  # its seat goes to the third, which is cancelled as it gets it
        await asyncio.sleep(0)
        third.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert (turns.waiting, turns._free_seats, flow.seats) == (0, 1, 0)

    asyncio.run(main())


def test_token_bucket_admits_burst_then_rate_and_staggers_retry_after() -> None:
    clock = FixedClock()
    turns, rate = queue(clock), Rate(10, 20)
    for _ in range(20):
        turns.admit("t", 1, rate)
    first = refused(lambda: turns.admit("t", 1, rate))
    assert (first.document.status, first.document.code, first.headers["Retry-After"]) == (429, "throttled", "1")
    assert "10 requests per second" in first.document.detail and "requestsPerSecond" in first.document.cure
    for _ in range(40):
        last = refused(lambda: turns.admit("t", 1, rate))
    assert 4 <= int(last.headers["Retry-After"]) <= 5
    clock.ms += 1_000
    for _ in range(10):
        turns.admit("t", 1, rate)
    refused(lambda: turns.admit("t", 1, rate))
    turns.admit("another", 1, rate)
    turns.admit("t", 0, rate)  # a request without cost is not refused


def test_request_over_burst_cost_needs_full_bucket() -> None:
    clock = FixedClock()
    turns, rate = queue(clock), Rate(10, 20)
    turns.admit("t", 1_000, rate)
    refused(lambda: turns.admit("t", 1, rate))
    clock.ms += 2_000
    turns.admit("t", 1_000, rate)


def test_cost_charged_afterwards_is_paid_by_next_requests() -> None:
    clock = FixedClock()
    turns, rate = queue(clock), Rate(10, 20)
    turns.admit("t", 1, rate).charge(1_000, rate)
    clock.ms += 1_000
    refused(lambda: turns.admit("t", 1, rate))
    clock.ms += 1_200
    turns.admit("t", 1, rate)  # at most one burst is owed


def test_full_queues_refuse_only_flows_over_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 1)
    monkeypatch.setattr(module, "WAITING_MAX", 10)

    async def main() -> None:
        turns, served, hold = queue(), list[str](), asyncio.Event()
        flood, gentle = turns.admit("flood", 0, None), turns.admit("gentle", 0, None)
        waiting = [asyncio.ensure_future(wait_for(turns, flood, 1, served, hold)) for _ in range(11)]
        await asyncio.sleep(0)
        assert turns.waiting == 10
        refused_ = refused(lambda: turns.admit("flood", 0, None))
        assert refused_.document.code == "overloaded" and int(refused_.headers["Retry-After"]) >= 1
        assert turns.admit("gentle", 0, None) is gentle
        waiting.append(asyncio.ensure_future(wait_for(turns, gentle, 1, served, hold)))
        hold.set()
        await asyncio.gather(*waiting)
        assert len(served) == 12

    asyncio.run(main())


def test_idle_flows_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLOWS_MAX", 10)
    clock = FixedClock()
    turns = queue(clock)
    for at in range(1_000):
        clock.ms += 10_000
        turns.admit(f"t{at}", 1, Rate(10, 20))
    assert len(turns._flows) <= 11


async def hold_seats(turns: FairQueue, flow: Flow, seats: int, served: list[str], hold: asyncio.Event) -> None:
    with await turns.acquire(flow, 1, seats):
        served.append(flow.name)
        await hold.wait()


def test_long_requests_take_many_seats_but_leave_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 16)
    monkeypatch.setattr(module, "FLOW_SEATS_MAX", 12)

    async def main() -> None:
        turns, served, hold = queue(), list[str](), asyncio.Event()
        lists, gets = turns.admit("lists", 0, None), turns.admit("gets", 0, None)
        waiting = [asyncio.ensure_future(hold_seats(turns, lists, 6, served, hold)) for _ in range(5)]
        await asyncio.sleep(0)
        assert served == ["lists"] * 2 and turns._free_seats == 4
        waiting += [asyncio.ensure_future(hold_seats(turns, gets, 1, served, hold)) for _ in range(4)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert served == ["lists"] * 2 + ["gets"] * 4
        hold.set()
        await asyncio.gather(*waiting)
        assert (turns.waiting, turns._free_seats, lists.seats, gets.seats) == (0, 16, 0, 0)
        with await turns.acquire(lists, 1, 1_000):
            assert lists.seats == 12, "seats per request are capped"

    asyncio.run(main())


def test_small_requests_pass_large_one_for_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 4)
    monkeypatch.setattr(module, "FLOW_SEATS_MAX", 4)
    monkeypatch.setattr(module, "PASSED_OVER_MAX", 10)

    async def main() -> None:
        turns, served = queue(), list[str]()
        large, small = turns.admit("large", 0, None), turns.admit("small", 0, None)

        async def ask_on() -> None:
            while "large" not in served:
                with await turns.acquire(small, 1):
                    served.append("small")
                    await asyncio.sleep(0)

        asking = [asyncio.ensure_future(ask_on()) for _ in range(8)]
        await asyncio.sleep(0)
        done = asyncio.Event()
        done.set()
        async with asyncio.timeout(10):
            await hold_seats(turns, large, 4, served, done)
            await asyncio.gather(*asking)
        assert 4 <= served.index("large") <= 200, served.index("large")

    asyncio.run(main())
