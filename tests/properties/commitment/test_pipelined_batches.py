"""Property: a batch decided while the previous one is being written equals the batch decided afterwards.

In one scope each request is answered before the next is sent. In the other all are sent at once, so that each batch is
decided on top of the one in flight. Heads contain a digest of all rows since the beginning: equal heads mean equal rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remit.client.endpoint import EndpointError, NotLeader, OutcomeUnknown, Overloaded
from remit.commitment import batch
from remit.commitment.draft import Draft
from remit.model.claims import Abandon, Accepted, Apply, Bind, Code, Delete, Operation, RecordEvent, Refused, Spawn
from remit.model.records import EventSpec
from tests.properties.authority_world import OPERATOR, USER, Scope, node, populated_scope, run, tenant, workload
from tests.properties.commitment.authority_machine import STEPS
from tests.properties.commitment.faulty_scope_machine import books, summed
from tests.properties.commitment.twin_scopes import EACH, TwinScopes, one_by_one, plain
from tests.unit.commitment.authority_fixture import T1


@pytest.fixture(autouse=True, scope="module")
def _one_lane() -> Iterator[None]:
    """One queue lane: these tests depend on the order of requests, and lanes have tests of their own."""
    with mock.patch("remit.commitment.operation_queue.lane_of", lambda operations: ""):
        yield


async def at_once(scope: Scope, asks: Sequence[list[Operation]]) -> list[Any]:
    return list(await asyncio.gather(*(scope.send(ask) for ask in asks)))


@settings(max_examples=settings().max_examples // 2 or 1)
@given(
    sorts=st.sets(st.integers(0, 11), min_size=3, max_size=6), rounds=st.lists(STEPS, min_size=1, max_size=3), data=st.data()
)
def test_pipelined_batches_equal_sequential_ones(
    sorts: set[int], rounds: list[list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    twins = TwinScopes()
    twins.do(twins.set_up_both(sorts))
    try:
        for steps in rounds:
            asks = twins.collected(steps)
            if data.draw(st.booleans()) and asks:
                again = data.draw(st.sampled_from([op for ask in asks for op in ask]))
                made = Operation(twins.do(twins.r.operation(USER, Abandon(again.id))).id, USER, Abandon(again.id))
                asks.append([again, made, again])
            expected = twins.do(one_by_one(twins.r, asks))
            found = twins.do(at_once(twins.other, asks))
            assert plain(found) == plain(expected)
            assert twins.other.row("head") == twins.r.row("head")
            assert books(twins.other.books) == books(twins.r.books) == summed(twins.r)
            assert twins.do(twins.other.dump()) == twins.do(twins.r.dump())
    finally:
        twins.teardown()


def pipelined_test(test: Any) -> Any:
    """Run a test in a scope with small batches, and count the drafts decided on top of another."""

    def wrapper(*arguments: Any, **more: Any) -> None:
        followed: list[Draft] = []
        follow = Draft.follow

        def counted(draft: Draft, moment: Any) -> Draft:
            followed.append(draft)
            return follow(draft, moment)

        async def run_test() -> None:
            scope = await populated_scope(nodes=[node("n1", "4"), node("n2", "4", "b")])
            followed.clear()
            try:
                await test(scope, followed, *arguments, **more)
            finally:
                await scope.close()

        with mock.patch.object(Scope, "batch_max", EACH), mock.patch.object(Draft, "follow", counted):
            run(run_test())

    wrapper.__name__, wrapper.__doc__, wrapper.__module__ = test.__name__, test.__doc__, test.__module__
    return wrapper


async def binds(scope: Scope, count: int = 12, cpu: str = "1") -> list[list[Operation]]:
    """Requests of one batch each, for more capacity than there is: eight fit."""
    await scope.must(USER, Apply(workload("w", cpu, count)))
    await scope.must(scope.actors["workloads"], Spawn("t1", "w", 1, 0, count))
    claims = [Bind(f"replica/t1/w-{i}", scope.at(f"replica/t1/w-{i}"), f"n{i % 2 + 1}", T1) for i in range(count)]
    operations = [await scope.operation(scope.actors["scheduler"], claim) for claim in claims]
    return [operations[i : i + EACH] for i in range(0, count, EACH)]


@pipelined_test
async def test_capacity_taken_by_batch_in_flight_is_not_free(scope: Scope, followed: list[Draft]) -> None:
    """F02: eight of twelve fit, sent as four batches at once."""
    verdicts = plain(await at_once(scope, await binds(scope)))
    assert [isinstance(verdict, Accepted) for verdict in verdicts] == [True] * 8 + [False] * 4
    assert {v.code for v in verdicts if isinstance(v, Refused)} == {Code.NO_ROOM}
    assert len(followed) == 3


@pipelined_test
async def test_repeated_operation_in_flight_gets_same_verdict(scope: Scope, followed: list[Draft]) -> None:
    """F37: repeated before the first answer, the operations get the same verdicts at the same revision."""
    asks = await binds(scope, 6)
    first, second, third, fourth = await at_once(scope, [asks[0], asks[0], asks[1], asks[0]])
    assert first == second == fourth and {v.revision for v in third} != {v.revision for v in first}
    assert len(followed) == 3
    assert len(scope.checker.versions["replica/t1/w-0"]) == 2, "spawned, and bound once"


@pipelined_test
async def test_id_in_flight_with_other_payload_is_refused(scope: Scope, followed: list[Draft]) -> None:
    asks = await binds(scope, 6)
    other = [Operation(operation.id, USER, Delete("Secret", "x", "t1")) for operation in asks[0]]
    _, misused = await at_once(scope, [asks[0], other])
    assert [v.code for v in misused] == [Code.OPERATION_MISMATCH] * 3 and followed


@pipelined_test
async def test_operation_in_flight_is_not_abandoned(scope: Scope, followed: list[Draft]) -> None:
    asks = await binds(scope, 6)
    abandoning = [await scope.operation(USER, Abandon(operation.id)) for operation in asks[0]]
    done, abandoned = await at_once(scope, [asks[0], abandoning])
    assert done == abandoned and all(isinstance(v, Accepted) for v in done) and followed


WORDS = ["lost", "landed", "late", "later", "afloat", "unavailable"]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("word", WORDS)
def test_batches_on_top_of_failed_batch_are_decided_again(word: str, place: int) -> None:
    """F01 F12: whatever happens to a batch, every operation is applied once and answered."""

    @pipelined_test
    async def run_test(scope: Scope, followed: list[Draft]) -> None:
        asks = await binds(scope)
        scope.store.plan.extend(["ok"] * place + [word])
        answers = await at_once(scope, asks)
        failed = [ask for ask, answer in zip(asks, answers, strict=True) if isinstance(answer, EndpointError)]
        assert len(failed) == (1 if word == "unavailable" else 0)
        assert not any(isinstance(answer, OutcomeUnknown) for answer in answers)
        await scope.store.land()
        verdicts = plain(await one_by_one(scope, asks))
        assert sum(isinstance(verdict, Accepted) for verdict in verdicts) == 8
        assert all(len(scope.checker.versions[f"replica/t1/w-{i}"]) <= 2 for i in range(12))
        assert books(scope.books) == summed(scope) and followed

    run_test()


@pipelined_test
async def test_batches_on_top_are_dropped_at_takeover(scope: Scope, followed: list[Draft]) -> None:
    """F15: the batch in flight may have landed; queued callers are referred to the successor."""
    asks = await binds(scope)
    scope.store.plan.append("gate")
    old = scope.lead
    waiting = [asyncio.create_task(old.ask(ask)) for ask in asks]
    await scope.store.at_gate.wait()
    await scope.take_over()
    scope.store.gate.set()
    answers = await asyncio.gather(*waiting)
    assert all(isinstance(answer, NotLeader) for answer in answers) and followed
    assert scope.phase("replica/t1/w-0") == "pending"
    assert sum(isinstance(v, Accepted) for v in plain(await one_by_one(scope, asks))) == 8


@pipelined_test
async def test_stopped_authority_reports_unknown_outcome_only_for_batch_in_flight(scope: Scope, followed: list[Draft]) -> None:
    """F20: the batch in flight may have landed; batches on top and queued ones have not."""
    asks = await binds(scope)
    scope.store.plan.append("gated")
    waiting = [asyncio.create_task(scope.lead.ask(ask)) for ask in asks]
    await scope.store.at_gate.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    await scope.lead.stop()
    answers = await asyncio.gather(*waiting)
    assert [type(answer) for answer in answers] == [OutcomeUnknown, NotLeader, NotLeader, NotLeader] and followed
    await scope.take_over()
    assert [scope.phase(f"replica/t1/w-{i}") for i in (0, 3)] == ["bound", "pending"]


@pipelined_test
async def test_unwritable_claim_is_isolated_among_pipelined_batches(scope: Scope, followed: list[Draft]) -> None:
    """F31: the store refuses its batch; only this claim is refused, all others are applied."""
    asks = await binds(scope, 9)
    bad = await scope.operation(USER, RecordEvent("bad", EventSpec(regarding="node/n1", count=-1)))
    good = [await scope.operation(USER, Apply(workload(f"more-{i}"))) for i in range(2)]
    answers = await at_once(scope, [asks[0], [*good, bad], asks[1], asks[2]])
    codes = [v.code if isinstance(v, Refused) else None for v in plain(answers)]
    assert codes == [None] * 5 + [Code.INTERNAL_ERROR] + [None] * 5 + [Code.NO_ROOM] and followed


@pipelined_test
async def test_large_request_alternates_with_small_ones(scope: Scope, followed: list[Draft]) -> None:
    """A small request does not wait for a large one."""
    large = [operation for ask in await binds(scope) for operation in ask]
    small = await scope.operation(USER, Apply(workload("small")))
    answered: list[str] = []

    async def asking(name: str, operations: list[Operation]) -> Any:
        verdicts = await scope.send(operations)
        answered.append(name)
        return verdicts

    verdicts, _ = await asyncio.gather(asking("large", large), asking("small", [small]))
    assert answered == ["small", "large"]
    assert [isinstance(verdict, Accepted) for verdict in verdicts] == [True] * 8 + [False] * 4


@pipelined_test
async def test_partially_applied_large_request_is_outcome_unknown(scope: Scope, followed: list[Draft]) -> None:
    large = [operation for ask in await binds(scope) for operation in ask]
    scope.store.plan.extend(["ok", "unavailable"])
    assert isinstance(await scope.send(large), OutcomeUnknown)
    assert scope.lead.authority._queue.count == 0
    verdicts = await scope.send(large)
    assert not isinstance(verdicts, EndpointError)
    assert [isinstance(verdict, Accepted) for verdict in verdicts] == [True] * 8 + [False] * 4


@pipelined_test
async def test_request_cancelled_in_queue_is_not_applied(scope: Scope, followed: list[Draft]) -> None:
    asks = await binds(scope)
    scope.store.plan.append("gate")
    waiting = [asyncio.create_task(scope.lead.authority.submit(ask)) for ask in asks]
    await scope.store.at_gate.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    waiting[2].cancel()
    await asyncio.wait({waiting[2]})
    scope.store.gate.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert not isinstance(answers[3], (EndpointError, BaseException))
    assert [scope.phase(f"replica/t1/w-{i}") for i in (3, 6, 9)] == ["bound", "pending", "bound"]


def test_old_notes_are_pruned_in_pipelined_batches() -> None:
    @pipelined_test
    async def run_test(scope: Scope, followed: list[Draft]) -> None:
        spec = EventSpec(regarding="node/n1")
        operations = [await scope.operation(USER, RecordEvent(f"e{i:02d}", spec)) for i in range(12)]
        await at_once(scope, [operations[i : i + EACH] for i in range(0, 12, EACH)])
        kept = [key.removeprefix("event/") for key in scope.checker.rows if key.startswith("event/")]
        assert sorted(kept) == ["e08", "e09", "e10", "e11"] == sorted(n.removeprefix("event/") for n in scope.books.notes)
        assert followed

    with mock.patch.object(batch, "NOTES_MAX", 4):
        run_test()


@pipelined_test
async def test_full_store_fails_only_batch_in_flight(scope: Scope, followed: list[Draft]) -> None:
    """F11"""
    asks = await binds(scope)
    scope.store.plan.extend(["unavailable", "ok", "unavailable"])
    answers = await at_once(scope, asks)
    assert [isinstance(answer, Overloaded) for answer in answers] == [True, False, True, False]


def test_successor_knows_outcomes_of_first_batches() -> None:
    """F20 F37: nothing is recorded yet when the second batch states where outcomes start."""

    async def run_test() -> None:
        scope = Scope()
        await scope.take_over()
        names = [f"t{i}" for i in range(2 * EACH)]
        operations = [await scope.operation(OPERATOR, Apply(tenant(name), expect=0)) for name in names]
        first, second = await at_once(scope, [operations[:EACH], operations[EACH:]])
        await scope.take_over()
        again = await one_by_one(scope, [operations[:EACH], operations[EACH:]])
        assert plain(again) == plain([first, second]) and all(isinstance(v, Accepted) for v in plain(again))
        await scope.close()

    with mock.patch.object(Scope, "batch_max", EACH):
        run(run_test())
