"""Does the authority answer only what is durable and still its own to say? Lost answers, deposed ones, full queues."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest

from remit.client.endpoint import EndpointError, NotLeader, OutcomeUnknown, Overloaded
from remit.commitment import authority as module
from remit.commitment.outcomes import batch_key
from remit.model.claims import Accepted, Apply, Bind, Delete, Refused, Spawn
from remit.store import chain
from tests.properties.authority_world import USER, Scope, furnished, node, run, story, workload
from tests.unit.commitment.authority_fixture import T1, spawned

NOTHING = Delete("Secret", "none", "t1")


@story
async def test_a_lost_batch_that_lands_during_the_settlement_is_absorbed_once(scope: Scope) -> None:
    """F01: the write arrives after the settlement began; the settlement loses to it, and finds it."""
    scope.store.plan.extend(["late"])
    (number,) = await scope.must(USER, Apply(workload("w")))
    assert number == 1
    assert scope.row("head")["count"] > 0, "the lost batch stands in the head, not the empty one"
    assert "workload/t1/w" in scope.books.objects


@story
async def test_a_lost_batch_that_lands_after_the_settlement_never_applies(scope: Scope) -> None:
    """F01: the empty batch won, the claim was decided anew, and the write that comes at last fails its guard."""
    scope.store.plan.extend(["later"])
    await scope.must(USER, Apply(workload("w")))
    assert len(scope.checker.versions["workload/t1/w"]) == 1


@story
async def test_a_write_that_lands_long_after_is_refused_by_the_store(scope: Scope) -> None:
    """F01 F15"""
    scope.store.plan.extend(["afloat"])
    await scope.must(USER, Apply(workload("w")))
    revision = await scope.store.inner.revision()
    await scope.store.land()
    assert await scope.store.inner.revision() == revision


@story
async def test_settling_goes_on_through_lost_and_unavailable_answers(scope: Scope) -> None:
    scope.store.plan.extend(["lost", "unavailable", "lost", "landed"])
    await scope.must(USER, Apply(workload("w")))
    assert not scope.store.plan, "each of these was met on the way"
    assert len(scope.checker.versions["workload/t1/w"]) == 1


@story
async def test_a_refusal_is_not_answered_by_a_deposed_authority(scope: Scope) -> None:
    """F15: only a transaction that went through proves that the books were current."""
    old = scope.lead
    await scope.take_over()
    answer = await old.ask([await scope.operation(USER, NOTHING)])
    assert isinstance(answer, NotLeader) and answer.hint == "a2"
    assert not old.alive


@story
async def test_a_batch_lost_by_a_deposed_authority_is_silence_and_the_successor_tells(scope: Scope) -> None:
    """F01 F15: landed, its answer lost, and somebody took over before it was settled."""
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


@story
async def test_a_renewal_is_refused_by_a_deposed_authority(scope: Scope) -> None:
    """F15 F16: the successor has begun to count; its predecessor must not promise more."""
    old = scope.lead.authority
    assert await old.renew(scope.actors["scheduler"])
    await scope.take_over()
    with pytest.raises(NotLeader):
        await old.renew(scope.actors["scheduler"])


@story
async def test_renewals_share_one_confirming_read_that_began_after_them(scope: Scope) -> None:
    before = scope.store.calls
    scope.store.reads.extend(["slow"] * 3)
    held = await asyncio.gather(*(scope.lead.authority.renew(scope.actors["scheduler"]) for _ in range(20)))
    assert all(held)
    assert scope.store.calls - before <= 3


@story
async def test_a_renewal_that_the_store_cannot_confirm_is_silence(scope: Scope) -> None:
    scope.store.reads.append("unavailable")
    with pytest.raises(OutcomeUnknown):
        await scope.lead.authority.renew(scope.actors["scheduler"])


@story
async def test_an_unavailable_store_is_overload_and_nothing_happened(scope: Scope) -> None:
    """F11"""
    scope.store.plan.append("unavailable")
    operation = await scope.operation(USER, Apply(workload("w")))
    assert isinstance(await scope.send([operation]), Overloaded)
    assert "workload/t1/w" not in scope.checker.rows
    assert isinstance(await scope.send([operation]), list)


@story
async def test_a_full_queue_is_overload(scope: Scope) -> None:
    """Whoever comes when there is no room is told to come back; those inside are answered."""
    scope.store.plan.append("gate")
    operation = await scope.operation(USER, NOTHING)
    asking = asyncio.create_task(scope.lead.authority.submit([operation]))
    await scope.store.at_gate.wait()
    inside = asyncio.create_task(scope.lead.authority.submit([operation] * module.QUEUE_MAX))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await scope.lead.authority.submit([operation])
    scope.store.gate.set()
    assert (await asking) * module.QUEUE_MAX == await inside
    assert isinstance(await scope.send([operation]), list), "and there is room again"


@story
async def test_an_ask_larger_than_the_queue_is_taken_when_nothing_else_waits(scope: Scope) -> None:
    operation = await scope.operation(USER, NOTHING)
    verdicts = await scope.lead.authority.submit([operation] * (module.QUEUE_MAX + 1))
    assert len(verdicts) == module.QUEUE_MAX + 1 and len(set(map(str, verdicts))) == 1


@story
async def test_an_asker_that_is_cancelled_leaves_the_others_their_answers(scope: Scope) -> None:
    scope.store.plan.append("gate")
    first = await scope.operation(USER, Apply(workload("a")))
    second = await scope.operation(USER, Apply(workload("b")))
    asking = [asyncio.create_task(scope.lead.authority.submit([operation])) for operation in (first, second)]
    await scope.store.at_gate.wait()
    asking[0].cancel()
    scope.store.gate.set()
    assert isinstance((await asking[1])[0], Accepted)
    verdicts = await scope.send([first])
    assert isinstance(verdicts, list) and isinstance(verdicts[0], Accepted), "it was done, and its outcome kept"


@story
async def test_an_authority_that_is_cancelled_in_the_middle_of_a_commit_tells_nobody_anything(scope: Scope) -> None:
    """F20: whether it landed is for the successor to tell."""
    scope.store.plan.append("gated")
    operation = await scope.operation(USER, Apply(workload("w")))
    waiting = await scope.operation(USER, NOTHING)
    asking = asyncio.create_task(scope.lead.ask([operation]))
    await scope.store.at_gate.wait()
    queued = asyncio.create_task(scope.lead.ask([waiting]))
    await asyncio.sleep(0)
    await scope.lead.stop()
    assert isinstance(await asking, OutcomeUnknown)
    assert isinstance(await queued, NotLeader), "what was only queued did not happen"
    await scope.take_over()
    verdicts = await scope.send([operation])
    assert isinstance(verdicts, list) and isinstance(verdicts[0], Accepted)


@story
async def test_claims_of_one_batch_see_each_other(scope: Scope) -> None:
    """F02: two claims on the last room; one is refused."""
    a, b = await spawned(scope, "w", 2, cpu="3")
    claims = [Bind(key, scope.at(key), "n1", T1) for key in (a, b)]
    first, second = await scope.ask(scope.actors["scheduler"], *claims)
    assert isinstance(first, Accepted) and isinstance(second, Refused)


def test_tens_of_thousands_of_replicas_in_one_ask() -> None:
    """Several spawns of 10,000 travel together; they are written in slices, and each is answered once it is durable."""

    async def tell() -> None:
        scope = await furnished(nodes=[node("n1")], checked=False)
        await scope.must(USER, Apply(workload("w", "1m", 40_000)))
        claims = [Spawn("t1", "w", 1, first, 10_000) for first in range(0, 40_000, 10_000)]
        verdicts = await scope.ask(scope.actors["workloads"], *claims)
        assert [v.number for v in verdicts if isinstance(v, Accepted)] == [10_000] * 4
        assert len({v.revision for v in verdicts}) > 1, "in more than one transaction"
        assert len(scope.books.replicas) == 40_000
        await scope.close()

    run(tell())


def test_part_of_a_large_ask_that_was_done_is_silence_when_the_rest_fails() -> None:
    """F01: an asker must not hear that nothing happened when some of it did."""

    async def tell() -> None:
        scope = await furnished(nodes=[node("n1")], checked=False)
        await scope.must(USER, Apply(workload("w", "1m", 40_000)))
        claims = [Spawn("t1", "w", 1, first, 10_000) for first in range(0, 40_000, 10_000)]
        operations = [await scope.operation(scope.actors["workloads"], claim) for claim in claims]
        scope.store.plan.extend(["ok", "unavailable"])
        assert isinstance(await scope.send(operations), OutcomeUnknown)
        verdicts = await scope.send(operations)
        assert not isinstance(verdicts, EndpointError) and all(isinstance(v, Accepted) for v in verdicts)
        assert len(scope.books.replicas) == 40_000
        await scope.close()

    run(tell())


@story
async def test_an_idle_authority_beats_so_that_standbys_see_it_live(scope: Scope) -> None:
    before = scope.row("head")["sequence"]
    await scope.lead.stop()
    beating = asyncio.create_task(scope.lead.authority.run(heartbeat_ms=10))
    await asyncio.sleep(0.1)
    beating.cancel()
    await asyncio.wait({beating})
    assert scope.row("head")["sequence"] > before
    assert not scope.row(batch_key(scope.row("head")["sequence"]))["entries"]
