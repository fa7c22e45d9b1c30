"""Operation queue: fair order between tenants and components, bounded lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from remit.commitment.operation_queue import BatchSlice, OperationQueue, split_slices
from remit.model.claims import Accepted, Actor, Delete, Operation, OperationID
from remit.model.roles import Role


def operations(name: str, count: int, role: Role = Role.USER) -> list[Operation]:
    actor = Actor(name, role, tenant=name if role is Role.USER else "")
    return [Operation(OperationID(f"i.1.{name}{at}"), actor, Delete("Node", str(at))) for at in range(count)]


def scheduler(count: int) -> list[Operation]:
    return operations("scheduler", count, Role.SCHEDULER)


def names(pieces: Sequence[BatchSlice]) -> list[tuple[str, int]]:
    return [(piece.operations[0].actor.name, len(piece.operations)) for piece in pieces]


def event_loop_test(test: Callable[[], None]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        async def main() -> None:
            test()

        asyncio.run(main())

    return run


@event_loop_test
def test_bind_waits_for_one_batch_of_flood_at_most() -> None:
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


@event_loop_test
def test_tenants_alternate_with_one_batch_each() -> None:
    queue = OperationQueue(10)
    _ = queue.put(operations("flood", 1_000))
    for _ in range(100):
        _ = queue.put(operations("flood", 10))
    _ = queue.put(operations("gentle", 2))
    _ = queue.put(operations("other", 1))
    assert names(queue.take()) == [("flood", 10)]
    assert names(queue.take()) == [("gentle", 2), ("other", 1)]
    assert names(queue.take()) == [("flood", 10)]


@event_loop_test
def test_small_request_is_not_split_and_starts_next_batch() -> None:
    queue = OperationQueue(10)
    _ = queue.put(scheduler(6))
    _ = queue.put(operations("a", 7))
    _ = queue.put(operations("b", 2))
    assert names(queue.take()) == [("scheduler", 6)]
    _ = queue.put(scheduler(5))
    assert names(queue.take()) == [("a", 7)]
    assert names(queue.take()) == [("scheduler", 5), ("b", 2)]
    assert not queue and queue.count == 0


@event_loop_test
def test_each_lane_is_bounded_separately() -> None:
    queue = OperationQueue(10)
    _ = queue.put(operations("flood", 90))
    assert not queue.has_capacity(operations("flood", 20), 100)
    assert queue.has_capacity(operations("gentle", 20), 100) and queue.has_capacity(scheduler(100), 100)
    queue.take()
    assert queue.has_capacity(operations("flood", 20), 100)


@event_loop_test
def test_returned_operations_keep_order_and_go_first() -> None:
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


@event_loop_test
def test_returned_large_request_resumes_in_order() -> None:
    queue = OperationQueue(10)
    answer = queue.put(operations("a", 25))
    first, second = queue.take(), queue.take()
    queue.return_to_queue(second)
    queue.return_to_queue(first)
    seen: list[Any] = []
    while queue:
        seen += [operation.id for piece in queue.take() for operation in piece.operations]
    assert seen == [operation.id for operation in operations("a", 25)] and not answer.done()


@event_loop_test
def test_cancelled_requests_are_skipped_in_every_lane() -> None:
    queue = OperationQueue(10)
    for name in ("a", "b"):
        _ = queue.put(operations(name, 3)).cancel()
    _ = queue.put(scheduler(3)).cancel()
    assert queue.count == 9 and queue.take() == [] and queue.count == 0 and not queue


@event_loop_test
def test_deferred_rest_does_not_delay_others() -> None:
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


@event_loop_test
def test_deferred_controller_operations_do_not_delay_bind() -> None:
    queue = OperationQueue(10)
    _ = queue.put(operations("controller", 10, Role.WORKLOADS))
    pieces = queue.take()
    _ = queue.put(scheduler(2))
    decided, rest = split_slices(pieces, 1)
    queue.defer(rest, decided)
    assert names(queue.take())[0] == ("scheduler", 2)


@event_loop_test
def test_deferred_requests_are_decided_in_next_batch() -> None:
    queue = OperationQueue(10)
    for _ in range(5):
        _ = queue.put(operations("flood", 4))
    gentle, own = queue.put(operations("gentle", 1)), queue.put(scheduler(1))
    turns = 0
    while not (gentle.done() and own.done()):
        decided, rest = split_slices(queue.take(), 2)  # a batch has room for two
        queue.defer(rest, decided)
        queue.answer(decided, [Accepted(1)] * sum(len(piece.operations) for piece in decided))
        turns += 1
    assert turns <= 3
