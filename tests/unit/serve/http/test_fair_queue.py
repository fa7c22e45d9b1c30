"""Whose request is next? Flows take turns by cost; a flood waits for itself alone, and is told when to come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from remit.serve.http import fair_queue as module
from remit.serve.http.fair_queue import FairQueue, Flow, Rate
from remit.serve.http.replies import ApiProblem


class Still:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.ms = 1_000

    def now_ms(self) -> int:
        return self.ms


def queue(clock: Still | None = None) -> FairQueue:
    return FairQueue(clock or Still())  # type: ignore[arg-type]


def refused(deed: Any) -> ApiProblem:
    with pytest.raises(ApiProblem) as raised:
        deed()
    return raised.value


async def wait_for(turns: FairQueue, flow: Flow, cost: int, told: list[str], hold: asyncio.Event) -> None:
    with await turns.acquire(flow, cost):
        told.append(flow.name)
        await hold.wait()


def test_one_who_asks_gently_is_next_however_many_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 1)

    async def main() -> None:
        turns, told, hold = queue(), list[str](), asyncio.Event()
        flood, gentle = turns.admit("flood", 0, None), turns.admit("gentle", 0, None)
        waiting = [asyncio.ensure_future(wait_for(turns, flood, 1, told, hold)) for _ in range(100)]
        await asyncio.sleep(0)
        waiting.append(asyncio.ensure_future(wait_for(turns, gentle, 1, told, hold)))
        await asyncio.sleep(0)
        assert told == ["flood"] and turns.waiting == 100
        hold.set()
        await asyncio.gather(*waiting)
        assert told.index("gentle") <= 1 + module.QUANTUM
        assert turns.waiting == 0 and not turns._ring

    asyncio.run(main())


def test_who_asks_for_much_gets_as_much_work_as_who_asks_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 1)

    async def main() -> None:
        turns, told, hold = queue(), list[str](), asyncio.Event()
        dear, cheap = turns.admit("dear", 0, None), turns.admit("cheap", 0, None)
        waiting = [asyncio.ensure_future(wait_for(turns, dear, 16, told, hold)) for _ in range(50)]
        waiting += [asyncio.ensure_future(wait_for(turns, cheap, 1, told, hold)) for _ in range(200)]
        await asyncio.sleep(0)
        hold.set()
        while len(told) < 100:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        seen = Counter(told[:100])
        assert 3 <= seen["dear"] <= 8, seen
        await asyncio.gather(*waiting)

    asyncio.run(main())


def test_no_flow_has_all_the_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 4)
    monkeypatch.setattr(module, "FLOW_SEATS_MAX", 3)

    async def main() -> None:
        turns, told, hold = queue(), list[str](), asyncio.Event()
        slow, other = turns.admit("slow", 0, None), turns.admit("other", 0, None)
        waiting = [asyncio.ensure_future(wait_for(turns, slow, 1, told, hold)) for _ in range(10)]
        await asyncio.sleep(0)
        waiting.append(asyncio.ensure_future(wait_for(turns, other, 1, told, hold)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert told == ["slow"] * 3 + ["other"]
        hold.set()
        await asyncio.gather(*waiting)

    asyncio.run(main())


def test_who_leaves_while_waiting_or_as_it_is_called_takes_no_seat_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 1)

    async def main() -> None:
        turns, told, hold = queue(), list[str](), asyncio.Event()
        flow = turns.admit("a", 0, None)
        first, second, third = (asyncio.ensure_future(wait_for(turns, flow, 1, told, hold)) for _ in range(3))
        await asyncio.sleep(0)
        second.cancel()
        first.cancel()  # its seat goes to the third, who is cancelled as it is called
        await asyncio.sleep(0)
        third.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert (turns.waiting, turns._free_seats, flow.seats) == (0, 1, 0)

    asyncio.run(main())


def test_a_bucket_lets_a_burst_by_then_its_rate__and_those_refused_are_told_to_come_one_after_another() -> None:
    clock = Still()
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
    turns.admit("t", 0, rate)  # what costs nothing is not refused


def test_what_costs_more_than_a_whole_burst_takes_a_full_bucket() -> None:
    clock = Still()
    turns, rate = queue(clock), Rate(10, 20)
    turns.admit("t", 1_000, rate)
    refused(lambda: turns.admit("t", 1, rate))
    clock.ms += 2_000
    turns.admit("t", 1_000, rate)


def test_what_was_not_announced_is_paid_for_by_what_comes_next() -> None:
    clock = Still()
    turns, rate = queue(clock), Rate(10, 20)
    turns.admit("t", 1, rate).charge(1_000, rate)
    clock.ms += 1_000
    refused(lambda: turns.admit("t", 1, rate))
    clock.ms += 1_200
    turns.admit("t", 1, rate)  # a burst and no more is owed


def test_when_all_queues_are_full_only_those_over_their_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 1)
    monkeypatch.setattr(module, "WAITING_MAX", 10)

    async def main() -> None:
        turns, told, hold = queue(), list[str](), asyncio.Event()
        flood, gentle = turns.admit("flood", 0, None), turns.admit("gentle", 0, None)
        waiting = [asyncio.ensure_future(wait_for(turns, flood, 1, told, hold)) for _ in range(11)]
        await asyncio.sleep(0)
        assert turns.waiting == 10
        turned = refused(lambda: turns.admit("flood", 0, None))
        assert turned.document.code == "overloaded" and int(turned.headers["Retry-After"]) >= 1
        assert turns.admit("gentle", 0, None) is gentle
        waiting.append(asyncio.ensure_future(wait_for(turns, gentle, 1, told, hold)))
        hold.set()
        await asyncio.gather(*waiting)
        assert len(told) == 12

    asyncio.run(main())


def test_flows_that_have_rested_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLOWS_MAX", 10)
    clock = Still()
    turns = queue(clock)
    for at in range(1_000):
        clock.ms += 10_000
        turns.admit(f"t{at}", 1, Rate(10, 20))
    assert len(turns._flows) <= 11


async def sit(turns: FairQueue, flow: Flow, seats: int, told: list[str], hold: asyncio.Event) -> None:
    with await turns.acquire(flow, 1, seats):
        told.append(flow.name)
        await hold.wait()


def test_what_works_for_long_takes_many_seats_and_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 16)
    monkeypatch.setattr(module, "FLOW_SEATS_MAX", 12)

    async def main() -> None:
        turns, told, hold = queue(), list[str](), asyncio.Event()
        lists, gets = turns.admit("lists", 0, None), turns.admit("gets", 0, None)
        waiting = [asyncio.ensure_future(sit(turns, lists, 6, told, hold)) for _ in range(5)]
        await asyncio.sleep(0)
        assert told == ["lists"] * 2 and turns._free_seats == 4
        waiting += [asyncio.ensure_future(sit(turns, gets, 1, told, hold)) for _ in range(4)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert told == ["lists"] * 2 + ["gets"] * 4
        hold.set()
        await asyncio.gather(*waiting)
        assert (turns.waiting, turns._free_seats, lists.seats, gets.seats) == (0, 16, 0, 0)
        with await turns.acquire(lists, 1, 1_000):
            assert lists.seats == 12, "nobody waits for more than there can be"

    asyncio.run(main())


def test_those_who_need_little_go_before_one_who_needs_much__but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEATS", 4)
    monkeypatch.setattr(module, "FLOW_SEATS_MAX", 4)
    monkeypatch.setattr(module, "PASSED_OVER_MAX", 10)

    async def main() -> None:
        turns, told = queue(), list[str]()
        large, small = turns.admit("large", 0, None), turns.admit("small", 0, None)

        async def ask_on() -> None:
            while "large" not in told:
                with await turns.acquire(small, 1):
                    told.append("small")
                    await asyncio.sleep(0)

        asking = [asyncio.ensure_future(ask_on()) for _ in range(8)]
        await asyncio.sleep(0)
        done = asyncio.Event()
        done.set()
        async with asyncio.timeout(10):
            await sit(turns, large, 4, told, done)
            await asyncio.gather(*asking)
        assert 4 <= told.index("large") <= 200, told.index("large")

    asyncio.run(main())
