"""Authority: only durable answers, settlement of lost commits, deposition, queue limits."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest

from remit.client.endpoint import EndpointError, NotLeader, OutcomeUnknown, Overloaded
from remit.commitment import authority as module
from remit.commitment.outcomes import batch_key
from remit.model.claims import Accepted, Apply, Bind, Delete, Refused, Spawn
from remit.store import chain
from tests.properties.authority_world import USER, Scope, node, populated_scope, run, scope_test, workload
from tests.unit.commitment.authority_fixture import T1, spawn_replicas

NOTHING = Delete("Secret", "none", "t1")


@scope_test
async def test_lost_batch_landing_during_settlement_applies_once(scope: Scope) -> None:
    """F01: the write arrives after the settlement began; the settlement loses to it, and finds it."""
    scope.store.plan.extend(["late"])
    (number,) = await scope.must(USER, Apply(workload("w")))
    assert number == 1
    assert scope.row("head")["count"] > 0, "the head is the lost batch, not the empty one"
    assert "workload/t1/w" in scope.books.objects


@scope_test
async def test_lost_batch_landing_after_settlement_never_applies(scope: Scope) -> None:
    """F01: the empty batch won, the claim was decided again, and the late write fails its guard."""
    scope.store.plan.extend(["later"])
    await scope.must(USER, Apply(workload("w")))
    assert len(scope.checker.versions["workload/t1/w"]) == 1


@scope_test
async def test_very_late_write_is_refused_by_store(scope: Scope) -> None:
    """F01 F15"""
    scope.store.plan.extend(["afloat"])
    await scope.must(USER, Apply(workload("w")))
    revision = await scope.store.inner.revision()
    await scope.store.land()
    assert await scope.store.inner.revision() == revision


@scope_test
async def test_settlement_retries_lost_and_unavailable_commits(scope: Scope) -> None:
    scope.store.plan.extend(["lost", "unavailable", "lost", "landed"])
    await scope.must(USER, Apply(workload("w")))
    assert not scope.store.plan, "each fault occurred"
    assert len(scope.checker.versions["workload/t1/w"]) == 1


@scope_test
async def test_deposed_authority_answers_refusal_with_not_leader(scope: Scope) -> None:
    """F15: only a successful transaction proves that the books were current."""
    old = scope.lead
    await scope.take_over()
    answer = await old.ask([await scope.operation(USER, NOTHING)])
    assert isinstance(answer, NotLeader) and answer.hint == "a2"
    assert not old.alive


@scope_test
async def test_batch_lost_by_deposed_authority_is_answered_by_successor(scope: Scope) -> None:
    """F01 F15: the commit landed, its answer was lost, and another authority took over before the settlement."""
    scope.store.plan.append("landed")
    operation = await scope.operation(USER, Apply(workload("w")))
    settle = chain.settle

    async def late(*arguments: object) -> object:
        await scope.take_over()
        return await settle(*arguments)  # type: ignore[arg-type]

    with mock.patch.object(chain, "settle", late):
        answer = await scope.lead.ask([operation])
    assert isinstance(answer, OutcomeUnknown)
    verdicts = await scope.send([operation])
    assert isinstance(verdicts, list) and isinstance(verdicts[0], Accepted)
    assert len(scope.checker.versions["workload/t1/w"]) == 1


@scope_test
async def test_deposed_authority_refuses_renewal(scope: Scope) -> None:
    """F15 F16: the successor counts already; its predecessor must not extend a lease."""
    old = scope.lead.authority
    assert await old.renew(scope.actors["scheduler"])
    await scope.take_over()
    with pytest.raises(NotLeader):
        await old.renew(scope.actors["scheduler"])


@scope_test
async def test_renewals_share_one_later_confirming_read(scope: Scope) -> None:
    before = scope.store.calls
    scope.store.reads.extend(["slow"] * 3)
    held = await asyncio.gather(*(scope.lead.authority.renew(scope.actors["scheduler"]) for _ in range(20)))
    assert all(held)
    assert scope.store.calls - before <= 3


@scope_test
async def test_renewal_without_confirming_read_is_outcome_unknown(scope: Scope) -> None:
    scope.store.reads.append("unavailable")
    with pytest.raises(OutcomeUnknown):
        await scope.lead.authority.renew(scope.actors["scheduler"])


@scope_test
async def test_unavailable_store_is_overloaded_without_effect(scope: Scope) -> None:
    """F11"""
    scope.store.plan.append("unavailable")
    operation = await scope.operation(USER, Apply(workload("w")))
    assert isinstance(await scope.send([operation]), Overloaded)
    assert "workload/t1/w" not in scope.checker.rows
    assert isinstance(await scope.send([operation]), list)


@scope_test
async def test_full_queue_is_overloaded_and_queued_operations_are_answered(scope: Scope) -> None:
    """Callers without room are told to retry; queued ones are answered."""
    scope.store.plan.append("gate")
    operation = await scope.operation(USER, NOTHING)
    first_call = asyncio.create_task(scope.lead.authority.submit([operation]))
    await scope.store.at_gate.wait()
    queued_call = asyncio.create_task(scope.lead.authority.submit([operation] * module.QUEUE_MAX))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await scope.lead.authority.submit([operation])
    scope.store.gate.set()
    assert (await first_call) * module.QUEUE_MAX == await queued_call
    assert isinstance(await scope.send([operation]), list), "the queue has room again"


@scope_test
async def test_request_larger_than_queue_is_accepted_when_queue_is_empty(scope: Scope) -> None:
    operation = await scope.operation(USER, NOTHING)
    verdicts = await scope.lead.authority.submit([operation] * (module.QUEUE_MAX + 1))
    assert len(verdicts) == module.QUEUE_MAX + 1 and len(set(map(str, verdicts))) == 1


@scope_test
async def test_cancelled_caller_leaves_other_answers_intact(scope: Scope) -> None:
    scope.store.plan.append("gate")
    first = await scope.operation(USER, Apply(workload("a")))
    second = await scope.operation(USER, Apply(workload("b")))
    first_call = [asyncio.create_task(scope.lead.authority.submit([operation])) for operation in (first, second)]
    await scope.store.at_gate.wait()
    first_call[0].cancel()
    scope.store.gate.set()
    assert isinstance((await first_call[1])[0], Accepted)
    verdicts = await scope.send([first])
    assert isinstance(verdicts, list) and isinstance(verdicts[0], Accepted), "applied, with its outcome retained"


@scope_test
async def test_authority_cancelled_during_commit_leaves_outcome_unknown(scope: Scope) -> None:
    """F20: the successor determines whether the commit landed."""
    scope.store.plan.append("gated")
    operation = await scope.operation(USER, Apply(workload("w")))
    waiting = await scope.operation(USER, NOTHING)
    first_call = asyncio.create_task(scope.lead.ask([operation]))
    await scope.store.at_gate.wait()
    queued = asyncio.create_task(scope.lead.ask([waiting]))
    await asyncio.sleep(0)
    await scope.lead.stop()
    assert isinstance(await first_call, OutcomeUnknown)
    assert isinstance(await queued, NotLeader), "queued operations were not applied"
    await scope.take_over()
    verdicts = await scope.send([operation])
    assert isinstance(verdicts, list) and isinstance(verdicts[0], Accepted)


@scope_test
async def test_claims_of_one_batch_see_each_other(scope: Scope) -> None:
    """F02: two claims on the last capacity; one is refused."""
    a, b = await spawn_replicas(scope, "w", 2, cpu="3")
    claims = [Bind(key, scope.at(key), "n1", T1) for key in (a, b)]
    first, second = await scope.ask(scope.actors["scheduler"], *claims)
    assert isinstance(first, Accepted) and isinstance(second, Refused)


def test_large_spawn_request_is_sliced_into_several_commits() -> None:
    """Four spawns of 10,000 in one request are written in slices, and each is answered once durable."""

    async def run_test() -> None:
        scope = await populated_scope(nodes=[node("n1")], checked=False)
        await scope.must(USER, Apply(workload("w", "1m", 40_000)))
        claims = [Spawn("t1", "w", 1, first, 10_000) for first in range(0, 40_000, 10_000)]
        verdicts = await scope.ask(scope.actors["workloads"], *claims)
        assert [v.number for v in verdicts if isinstance(v, Accepted)] == [10_000] * 4
        assert len({v.revision for v in verdicts}) > 1, "in more than one transaction"
        assert len(scope.books.replicas) == 40_000
        await scope.close()

    run(run_test())


def test_partially_applied_request_is_outcome_unknown() -> None:
    """F01: the caller must not conclude that nothing was applied."""

    async def run_test() -> None:
        scope = await populated_scope(nodes=[node("n1")], checked=False)
        await scope.must(USER, Apply(workload("w", "1m", 40_000)))
        claims = [Spawn("t1", "w", 1, first, 10_000) for first in range(0, 40_000, 10_000)]
        operations = [await scope.operation(scope.actors["workloads"], claim) for claim in claims]
        scope.store.plan.extend(["ok", "unavailable"])
        assert isinstance(await scope.send(operations), OutcomeUnknown)
        verdicts = await scope.send(operations)
        assert not isinstance(verdicts, EndpointError) and all(isinstance(v, Accepted) for v in verdicts)
        assert len(scope.books.replicas) == 40_000
        await scope.close()

    run(run_test())


@scope_test
async def test_idle_authority_writes_heartbeats_for_standbys(scope: Scope) -> None:
    before = scope.row("head")["sequence"]
    await scope.lead.stop()
    running = asyncio.create_task(scope.lead.authority.run(heartbeat_ms=10))
    await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.wait({running})
    assert scope.row("head")["sequence"] > before
    assert not scope.row(batch_key(scope.row("head")["sequence"]))["entries"]
