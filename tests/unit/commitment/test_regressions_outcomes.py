"""Would anybody notice if something were not kept, or kept for ever? Terms, notes, audit, history, generations, slices."""

from __future__ import annotations

import asyncio

import pytest

from remit.commitment import authority
from remit.commitment import batch as module
from remit.commitment.outcomes import WINDOW_MS, WINDOWS_RETAINED, AuditEntry, batch_key, decode_batch
from remit.commitment.rulings import workloads
from remit.model.claims import (
    Apply,
    Bind,
    Code,
    Delete,
    Forget,
    Issue,
    Operation,
    OperationID,
    RecordDecision,
    RecordEvent,
    Refused,
)
from remit.model.records import DecisionSpec, EventSpec
from remit.model.resources import Duration
from remit.store.protocol import Compacted
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, story, tenant, workload
from tests.unit.commitment.authority_fixture import T1, bind, credit, meets, move, slice_of, spawned

MINUTE = Duration(60_000)
NOTHING = Delete("Secret", "none", "t1")


# -- terms, after a takeover ------------------------------------------------------------------------------------------------


@story
async def test_what_was_issued_here_gets_a_full_new_term_at_a_takeover(scope: Scope) -> None:
    """Who holds it could not renew it while nobody led; and this scope has a clock of its own, on whatever boot."""
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("4", "scheduler", MINUTE)))
    a, b, c = await spawned(scope, "w", 3)
    scope.clock.at_ms += 59_000
    await scope.take_over()
    scope.clock.at_ms += 59_999
    await bind(scope, a, grant="offer")
    scope.clock.on = "boot-2"
    await scope.take_over()
    scope.clock.at_ms += 59_999
    await bind(scope, b, grant="offer")
    scope.clock.at_ms += 1
    late = Bind(c, scope.at(c), "n1", "offer")
    assert await scope.refused(scope.actors["scheduler"], late) is Code.GRANT_EXPIRED, "one term, and no more"


@story
async def test_a_lease_gets_a_full_new_term_at_a_takeover(scope: Scope) -> None:
    await scope.acquire("scheduler/x", ttl=MINUTE)
    a, b = await spawned(scope, "w", 2)
    scope.clock.at_ms += 59_000
    await scope.take_over()
    scope.clock.at_ms += 60_000
    holder = scope.actors["scheduler/x"]
    await scope.must(holder, Bind(a, scope.at(a), "n1", T1))
    scope.clock.at_ms += 1
    assert await scope.refused(holder, Bind(b, scope.at(b), "n1", T1)) is Code.LEASE_EXPIRED, "one term, and no more"


# -- notes ------------------------------------------------------------------------------------------------------------------


def said(name: str) -> RecordEvent:
    return RecordEvent(name, EventSpec(regarding="node/n1"))


def explained(name: str) -> RecordDecision:
    return RecordDecision(name, "t1", DecisionSpec(replicas={"w-0": ""}))


async def notes(scope: Scope) -> set[str]:
    """By their last names, as the store has them; the books must have the same."""
    kept = {key for key in await scope.dump() if key.startswith(("event/", "decision/"))}
    assert set(scope.books.notes) == kept
    return {key.rsplit("/", 1)[1] for key in kept}


def test_of_events_and_decisions_only_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTES_MAX", 4)

    @story
    async def one_after_another(scope: Scope) -> None:
        await scope.must(USER, said("z"), explained("y"), said("x"))
        assert await notes(scope) == {"z", "y", "x"}
        await scope.must(USER, said("w"), explained("v"))
        assert await notes(scope) == {"y", "x", "w", "v"}
        for name in ("u", "t"):
            await scope.must(USER, explained(name))
        assert await notes(scope) == {"w", "v", "u", "t"}

    one_after_another()


def test_after_a_takeover_their_number_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTES_MAX", 4)

    @story
    async def one_after_another(scope: Scope) -> None:
        for claim in (said("a"), said("b"), explained("c"), explained("d")):
            await scope.must(USER, claim)
        await scope.take_over()
        await scope.must(USER, said("e"))
        assert await notes(scope) == {"b", "c", "d", "e"}
        await scope.must(USER, said("f"), explained("g"))
        assert await notes(scope) == {"d", "e", "f", "g"}

    one_after_another()


def test_after_a_takeover_it_is_still_the_oldest_that_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their names: an event is not older than a decision because it was read first."""
    monkeypatch.setattr(module, "NOTES_MAX", 4)

    @story
    async def one_after_another(scope: Scope) -> None:
        for claim in (explained("z"), said("y"), explained("x"), said("w")):
            await scope.must(USER, claim)
        await scope.take_over()
        await scope.must(USER, said("a"), explained("b"))
        assert await notes(scope) == {"x", "w", "a", "b"}

    one_after_another()


# -- audit ------------------------------------------------------------------------------------------------------------------


async def audited(scope: Scope) -> list[AuditEntry]:
    """What the last batch says that it decided, as it stands in the store."""
    row = await scope.store.inner.get(batch_key(scope.lead.authority.head.sequence))
    assert row is not None
    return list(decode_batch(row.value).entries)


async def refusal(scope: Scope, operation: Operation) -> Code:
    answers = await scope.send([operation])
    assert isinstance(answers, list) and isinstance(answers[0], Refused)
    return answers[0].code


@story
async def test_where_work_went_and_how_it_ended_is_on_record(scope: Scope) -> None:
    (one,) = await spawned(scope, "w", 1)
    await bind(scope, one)
    assert [(entry.did, entry.detail) for entry in await audited(scope)] == [("bind", "to n1")]
    await move(scope, one, "start", "crash")
    assert [(entry.did, entry.detail) for entry in await audited(scope)] == [("move crash", "r")]


@story
async def test_the_refusal_of_an_expired_id_is_on_record(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    scope.clock.at_ms += (WINDOWS_RETAINED + 2) * WINDOW_MS
    await scope.ask(USER, NOTHING)
    assert await refusal(scope, operation) is Code.OPERATION_EXPIRED
    (entry,) = await audited(scope)
    assert (entry.id, entry.code, entry.actor) == (operation.id, "operation_expired", "user")
    assert (entry.did, entry.subject) == ("apply", "workload/t1/w")


@story
async def test_the_refusal_of_an_id_of_another_incarnation_is_on_record(scope: Scope) -> None:
    operation = Operation(OperationID("elsewhere.1.x"), USER, NOTHING)
    assert await refusal(scope, operation) is Code.OPERATION_EXPIRED
    assert [(entry.id, entry.code) for entry in await audited(scope)] == [(operation.id, "operation_expired")]


@story
async def test_the_refusal_of_a_mismatched_id_is_on_record_and_is_not_its_outcome(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    first = await scope.send([operation])
    other = Operation(operation.id, OPERATOR, Apply(workload("other")))
    assert await refusal(scope, other) is Code.OPERATION_MISMATCH
    (entry,) = await audited(scope)
    assert (entry.id, entry.code, entry.actor) == (operation.id, "operation_mismatch", "op")
    assert entry.subject == "workload/t1/other"
    await scope.take_over()
    assert await scope.send([operation]) == first
    assert await audited(scope) == [], "a retry is no second deed"


@story
async def test_the_refusal_of_an_id_used_twice_in_one_batch_is_on_record(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    other = Operation(operation.id, OPERATOR, Apply(workload("other")))
    answers = await scope.send([operation, other])
    assert isinstance(answers, list) and isinstance(answers[1], Refused)
    assert [(entry.actor, entry.code) for entry in await audited(scope)] == [("user", ""), ("op", "operation_mismatch")]
    await scope.take_over()
    assert await scope.send([operation]) == answers[:1]


# -- history ----------------------------------------------------------------------------------------------------------------


def test_the_authority_compacts_history_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "COMPACT_EVERY_BATCHES", 4)
    monkeypatch.setattr(authority, "HISTORY_REVISIONS", 6)

    @story
    async def batch_after_batch(scope: Scope) -> None:
        store = scope.store.inner
        early = await store.revision()
        for _ in range(12):
            await scope.ask(USER, NOTHING)
        for _ in range(5):
            await asyncio.sleep(0)
        with pytest.raises(Compacted) as gone:
            await store.range("", revision=early)
        now = await store.revision()
        assert now - 6 - 4 < gone.value.oldest <= now - 6, "as much as is promised, and not much more"
        await store.range("", revision=now - 6)

    batch_after_batch()


# -- generations ------------------------------------------------------------------------------------------------------------


def test_an_old_generation_goes_with_its_last_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "GENERATIONS_KEPT", 2)

    @story
    async def version_after_version(scope: Scope) -> None:
        async def changed(*replicas: int) -> list[int]:
            """The generations that are kept once the workload was changed so often."""
            for count in replicas:
                await scope.must(USER, Apply(workload("w", replicas=count)))
            kept = [key for key in await scope.dump() if key.startswith("generation/t1/w/")]
            assert kept == scope.books.keys("generation/t1/w/")
            return [int(key.rsplit("/", 1)[1]) for key in kept]

        (key,) = await spawned(scope, "w", replicas=1)
        assert await changed(2, 3, 4) == [1, 3, 4]
        assert await changed(4) == [1, 3, 4], "what is not changed is no new generation"
        await bind(scope, key)
        assert await changed(5) == [1, 4, 5]
        await scope.take_over()
        await move(scope, key, "remove", "stop", "stopped")
        assert await changed(6) == [1, 5, 6], "a record of it is left"
        await scope.must(scope.actors["workloads"], Forget(key, scope.at(key)))
        assert await changed(7) == [6, 7]

    version_after_version()


# -- slices of quota --------------------------------------------------------------------------------------------------------


@story
async def test_what_was_sliced_off_for_another_scope_is_not_drawn_here(scope: Scope) -> None:
    """A quota of 4, of which another scope has 3."""
    budgets, scheduler = scope.actors["budgets"], scope.actors["scheduler"]
    await scope.must(OPERATOR, Apply(tenant("t1", "4")))
    await scope.must(budgets, Issue("s", slice_of("3")))
    a, b = await spawned(scope, "w", 2)
    await bind(scope, a)
    assert await scope.refused(scheduler, Bind(b, scope.at(b), "n1", T1)) is Code.OVER_QUOTA
    assert await scope.refused(scheduler, Bind(b, scope.at(b), "n1", "s")) is Code.NOT_OWNER, "nor out of the slice itself"
    await scope.take_over()
    assert await scope.refused(scheduler, Bind(b, scope.at(b), "n1", T1)) is Code.OVER_QUOTA
    await meets(scope, "scope/r2")
    await scope.must(budgets, credit(scope, 1, "2"))
    await bind(scope, b)


@story
async def test_no_more_is_sliced_off_than_the_quota_has_left(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(OPERATOR, Apply(tenant("t1", "4")))
    (key,) = await spawned(scope, "w")
    await bind(scope, key)
    assert await scope.refused(budgets, Issue("s", slice_of("4"))) is Code.GRANT_SHORT, "one is drawn"
    await scope.must(budgets, Issue("s", slice_of("2")))
    assert await scope.refused(budgets, Issue("t", slice_of("2", "scope/r3"))) is Code.GRANT_SHORT
    await scope.must(budgets, Issue("t", slice_of("1", "scope/r3")))
    assert await scope.refused(budgets, Issue("u", slice_of("1", "scheduler"))) is Code.GRANT_SHORT


@story
async def test_a_quota_that_shrinks_below_its_slices_lists_the_excess(scope: Scope) -> None:
    """What was granted on stays with its holder; the excess is to be drained."""
    budgets, scheduler = scope.actors["budgets"], scope.actors["scheduler"]
    await scope.must(budgets, Issue("s", slice_of("3", ttl=HOUR)))
    a, b = await spawned(scope, "w", 2)
    await bind(scope, a)
    assert dict(scope.books.excess()) == {}
    await scope.must(OPERATOR, Apply(tenant("t1", "2")))
    assert dict(scope.books.excess()) == {"tenant/t1": "cpu 2"}, "3 granted on and 1 drawn, of 2"
    assert await scope.refused(budgets, Issue("t", slice_of("1", "scope/r3"))) is Code.GRANT_SHORT
    assert await scope.refused(scheduler, Bind(b, scope.at(b), "n1", T1)) is Code.OVER_QUOTA
    await scope.take_over()
    assert dict(scope.books.excess()) == {"tenant/t1": "cpu 2"}
    await meets(scope, "scope/r2")
    await scope.must(budgets, credit(scope, 1, "1"))
    assert dict(scope.books.excess()) == {}
