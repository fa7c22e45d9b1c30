"""Who is decided next? No tenant's flood of accepted writes stands before another's, or before what keeps the scope going."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from remit.commitment.operation_queue import BatchSlice, OperationQueue, split_slices
from remit.model.claims import Accepted, Actor, Delete, Operation, OperationID, Role


def operations(who: str, count: int, role: Role = Role.USER) -> list[Operation]:
    actor = Actor(who, role, tenant=who if role is Role.USER else "")
    return [Operation(OperationID(f"i.1.{who}{at}"), actor, Delete("Node", str(at))) for at in range(count)]


def scheduler(count: int) -> list[Operation]:
    return operations("scheduler", count, Role.SCHEDULER)


def names(pieces: Sequence[BatchSlice]) -> list[tuple[str, int]]:
    return [(piece.operations[0].actor.name, len(piece.operations)) for piece in pieces]


def story(test: Callable[[], None]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        async def main() -> None:
            test()

        asyncio.run(main())

    return run


@story
def test_a_bind_waits_for_one_turn_of_a_flood__not_for_the_flood() -> None:
    queue = OperationQueue(10)
    for _ in range(50):
        _ = queue.put(operations("flood", 10))
    _ = queue.put(scheduler(3))
    assert names(queue.take()) == [("scheduler", 3)]
    assert names(queue.take()) == [("flood", 10)]
    _ = queue.put(scheduler(25))
    assert [names(queue.take())[0] for _ in range(5)] == [
        ("scheduler", 10), ("flood", 10), ("scheduler", 10), ("flood", 10), ("scheduler", 5)
    ]  # fmt: skip


@story
def test_tenants_take_turns__one_batch_each_at_most() -> None:
    queue = OperationQueue(10)
    _ = queue.put(operations("flood", 1_000))
    for _ in range(100):
        _ = queue.put(operations("flood", 10))
    _ = queue.put(operations("gentle", 2))
    _ = queue.put(operations("other", 1))
    assert names(queue.take()) == [("flood", 10)]
    assert names(queue.take()) == [("gentle", 2), ("other", 1)]
    assert names(queue.take()) == [("flood", 10)]


@story
def test_a_small_ask_is_not_split__and_begins_the_next_batch() -> None:
    queue = OperationQueue(10)
    _ = queue.put(scheduler(6))
    _ = queue.put(operations("a", 7))
    _ = queue.put(operations("b", 2))
    assert names(queue.take()) == [("scheduler", 6)]
    _ = queue.put(scheduler(5))
    assert names(queue.take()) == [("a", 7)]
    assert names(queue.take()) == [("scheduler", 5), ("b", 2)]
    assert not queue and queue.count == 0


@story
def test_each_lane_has_its_own_bound__so_a_flood_turns_nobody_else_away() -> None:
    queue = OperationQueue(10)
    _ = queue.put(operations("flood", 90))
    assert not queue.has_capacity(operations("flood", 20), 100)
    assert queue.has_capacity(operations("gentle", 20), 100) and queue.has_capacity(scheduler(100), 100)
    queue.take()
    assert queue.has_capacity(operations("flood", 20), 100)


@story
def test_what_is_given_back_comes_first_in_its_order__also_one_by_one() -> None:
    queue = OperationQueue(10)
    _ = queue.put(operations("a", 4))
    _ = queue.put(scheduler(4))
    taken = queue.take()
    _ = queue.put(operations("b", 1))
    _ = queue.put(scheduler(1))
    queue.return_to_queue(taken)
    assert queue.count == 10
    alone = [queue.take(single=True) for _ in range(8)]
    assert [names(one)[0][0] for one in alone] == ["scheduler"] * 4 + ["a"] * 4
    assert sorted(names(queue.take())) == [("b", 1), ("scheduler", 1)]
    assert not queue and queue.count == 0


@story
def test_a_large_ask_that_is_given_back_goes_on_where_it_was() -> None:
    queue = OperationQueue(10)
    answer = queue.put(operations("a", 25))
    first, second = queue.take(), queue.take()
    queue.return_to_queue(second)
    queue.return_to_queue(first)
    seen: list[Any] = []
    while queue:
        seen += [operation.id for piece in queue.take() for operation in piece.operations]
    assert seen == [operation.id for operation in operations("a", 25)] and not answer.done()


@story
def test_those_who_left_are_passed_over_in_every_lane() -> None:
    queue = OperationQueue(10)
    for who in ("a", "b"):
        _ = queue.put(operations(who, 3)).cancel()
    _ = queue.put(scheduler(3)).cancel()
    assert queue.count == 9 and queue.take() == [] and queue.count == 0 and not queue


@story
def test_what_is_put_off_stands_before_nobody_else__nor_before_others_of_its_lane() -> None:
    queue = OperationQueue(10)
    first = queue.put(operations("flood", 10))
    _ = queue.put(operations("flood", 5))
    pieces = queue.take()
    _ = queue.put(scheduler(2))
    _ = queue.put(operations("gentle", 1))
    decided, rest = split_slices(pieces, 3)
    queue.defer(rest, decided)
    queue.answer(decided, [Accepted(1)] * 3)
    assert names(queue.take()) == [("scheduler", 2), ("flood", 5), ("gentle", 1)]
    assert not first.done()
    assert names(queue.take()) == [("flood", 7)]
    assert not queue and not queue.count


@story
def test_a_bind_does_not_wait_until_a_controller_has_made_all_that_it_asked_for() -> None:
    queue = OperationQueue(10)
    _ = queue.put(operations("controller", 10, Role.WORKLOADS))
    pieces = queue.take()
    _ = queue.put(scheduler(2))
    decided, rest = split_slices(pieces, 1)
    queue.defer(rest, decided)
    assert names(queue.take())[0] == ("scheduler", 2)


@story
def test_whoever_was_only_put_off_is_decided_in_the_next_batch__however_little_each_has_room_for() -> None:
    queue = OperationQueue(10)
    for _ in range(5):
        _ = queue.put(operations("flood", 4))
    gentle, own = queue.put(operations("gentle", 1)), queue.put(scheduler(1))
    turns = 0
    while not (gentle.done() and own.done()):
        decided, rest = split_slices(queue.take(), 2)  # no more fit into a batch than two
        queue.defer(rest, decided)
        queue.answer(decided, [Accepted(1)] * sum(len(piece.operations) for piece in decided))
        turns += 1
    assert turns <= 3
