"""Regression tests of retention: terms after takeovers, notes, audit, history, generations, quota slices."""

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
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, scope_test, tenant, workload
from tests.unit.commitment.authority_fixture import T1, accept_peer, bind, commit_transitions, credit, slice_of, spawn_replicas

MINUTE = Duration(60_000)
NOTHING = Delete("Secret", "none", "t1")


# -- terms, after a takeover ------------------------------------------------------------------------------------------------


@scope_test
async def test_local_grant_gets_full_new_term_at_takeover(scope: Scope) -> None:
    """Its holder could not renew it without an authority; local grants use the authority's clock on any boot."""
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("4", "scheduler", MINUTE)))
    a, b, c = await spawn_replicas(scope, "w", 3)
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
    assert await scope.refused(scope.actors["scheduler"], late) is Code.GRANT_EXPIRED, "exactly one term"


@scope_test
async def test_lease_gets_full_new_term_at_takeover(scope: Scope) -> None:
    await scope.acquire("scheduler/x", ttl=MINUTE)
    a, b = await spawn_replicas(scope, "w", 2)
    scope.clock.at_ms += 59_000
    await scope.take_over()
    scope.clock.at_ms += 60_000
    holder = scope.actors["scheduler/x"]
    await scope.must(holder, Bind(a, scope.at(a), "n1", T1))
    scope.clock.at_ms += 1
    assert await scope.refused(holder, Bind(b, scope.at(b), "n1", T1)) is Code.LEASE_EXPIRED, "exactly one term"


# -- notes ------------------------------------------------------------------------------------------------------------------


def record_event(name: str) -> RecordEvent:
    return RecordEvent(name, EventSpec(regarding="node/n1"))


def record_decision(name: str) -> RecordDecision:
    return RecordDecision(name, "t1", DecisionSpec(replicas={"w-0": ""}))


async def notes(scope: Scope) -> set[str]:
    """Last parts of the names in the store; the books must agree."""
    kept = {key for key in await scope.dump() if key.startswith(("event/", "decision/"))}
    assert set(scope.books.notes) == kept
    return {key.rsplit("/", 1)[1] for key in kept}


def test_only_latest_events_and_decisions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTES_MAX", 4)

    @scope_test
    async def one_after_another(scope: Scope) -> None:
        await scope.must(USER, record_event("z"), record_decision("y"), record_event("x"))
        assert await notes(scope) == {"z", "y", "x"}
        await scope.must(USER, record_event("w"), record_decision("v"))
        assert await notes(scope) == {"y", "x", "w", "v"}
        for name in ("u", "t"):
            await scope.must(USER, record_decision(name))
        assert await notes(scope) == {"w", "v", "u", "t"}

    one_after_another()


def test_note_limit_holds_after_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTES_MAX", 4)

    @scope_test
    async def one_after_another(scope: Scope) -> None:
        for claim in (record_event("a"), record_event("b"), record_decision("c"), record_decision("d")):
            await scope.must(USER, claim)
        await scope.take_over()
        await scope.must(USER, record_event("e"))
        assert await notes(scope) == {"b", "c", "d", "e"}
        await scope.must(USER, record_event("f"), record_decision("g"))
        assert await notes(scope) == {"d", "e", "f", "g"}

    one_after_another()


def test_oldest_notes_are_dropped_after_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their names: an event is not older than a decision because it was read first."""
    monkeypatch.setattr(module, "NOTES_MAX", 4)

    @scope_test
    async def one_after_another(scope: Scope) -> None:
        for claim in (record_decision("z"), record_event("y"), record_decision("x"), record_event("w")):
            await scope.must(USER, claim)
        await scope.take_over()
        await scope.must(USER, record_event("a"), record_decision("b"))
        assert await notes(scope) == {"x", "w", "a", "b"}

    one_after_another()


# -- audit ------------------------------------------------------------------------------------------------------------------


async def audit_entries(scope: Scope) -> list[AuditEntry]:
    """Audit entries of the last batch in the store."""
    row = await scope.store.inner.get(batch_key(scope.lead.authority.head.sequence))
    assert row is not None
    return list(decode_batch(row.value).entries)


async def refusal(scope: Scope, operation: Operation) -> Code:
    answers = await scope.send([operation])
    assert isinstance(answers, list) and isinstance(answers[0], Refused)
    return answers[0].code


@scope_test
async def test_audit_records_node_and_result(scope: Scope) -> None:
    (one,) = await spawn_replicas(scope, "w", 1)
    await bind(scope, one)
    assert [(entry.did, entry.detail) for entry in await audit_entries(scope)] == [("bind", "to n1")]
    await commit_transitions(scope, one, "start", "crash")
    assert [(entry.did, entry.detail) for entry in await audit_entries(scope)] == [("move crash", "r")]


@scope_test
async def test_audit_records_refusal_of_expired_id(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    scope.clock.at_ms += (WINDOWS_RETAINED + 2) * WINDOW_MS
    await scope.ask(USER, NOTHING)
    assert await refusal(scope, operation) is Code.OPERATION_EXPIRED
    (entry,) = await audit_entries(scope)
    assert (entry.id, entry.code, entry.actor) == (operation.id, "operation_expired", "user")
    assert (entry.did, entry.subject) == ("apply", "workload/t1/w")


@scope_test
async def test_audit_records_refusal_of_other_incarnation(scope: Scope) -> None:
    operation = Operation(OperationID("elsewhere.1.x"), USER, NOTHING)
    assert await refusal(scope, operation) is Code.OPERATION_EXPIRED
    assert [(entry.id, entry.code) for entry in await audit_entries(scope)] == [(operation.id, "operation_expired")]


@scope_test
async def test_audit_records_mismatched_id_without_changing_outcome(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    first = await scope.send([operation])
    other = Operation(operation.id, OPERATOR, Apply(workload("other")))
    assert await refusal(scope, other) is Code.OPERATION_MISMATCH
    (entry,) = await audit_entries(scope)
    assert (entry.id, entry.code, entry.actor) == (operation.id, "operation_mismatch", "op")
    assert entry.subject == "workload/t1/other"
    await scope.take_over()
    assert await scope.send([operation]) == first
    assert await audit_entries(scope) == [], "a retry is not recorded again"


@scope_test
async def test_audit_records_id_used_twice_in_batch(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    other = Operation(operation.id, OPERATOR, Apply(workload("other")))
    answers = await scope.send([operation, other])
    assert isinstance(answers, list) and isinstance(answers[1], Refused)
    assert [(entry.actor, entry.code) for entry in await audit_entries(scope)] == [("user", ""), ("op", "operation_mismatch")]
    await scope.take_over()
    assert await scope.send([operation]) == answers[:1]


# -- history ----------------------------------------------------------------------------------------------------------------


def test_authority_compacts_history_beyond_retained_revisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "COMPACT_EVERY_BATCHES", 4)
    monkeypatch.setattr(authority, "HISTORY_REVISIONS", 6)

    @scope_test
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
        assert now - 6 - 4 < gone.value.oldest <= now - 6, "keeps the promised history and little more"
        await store.range("", revision=now - 6)

    batch_after_batch()


# -- generations ------------------------------------------------------------------------------------------------------------


def test_old_generation_is_removed_with_its_last_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "GENERATIONS_KEPT", 2)

    @scope_test
    async def version_after_version(scope: Scope) -> None:
        async def changed(*replicas: int) -> list[int]:
            """The generations that are kept after these changes."""
            for count in replicas:
                await scope.must(USER, Apply(workload("w", replicas=count)))
            kept = [key for key in await scope.dump() if key.startswith("generation/t1/w/")]
            assert kept == scope.books.keys("generation/t1/w/")
            return [int(key.rsplit("/", 1)[1]) for key in kept]

        (key,) = await spawn_replicas(scope, "w", replicas=1)
        assert await changed(2, 3, 4) == [1, 3, 4]
        assert await changed(4) == [1, 3, 4], "an unchanged spec makes no generation"
        await bind(scope, key)
        assert await changed(5) == [1, 4, 5]
        await scope.take_over()
        await commit_transitions(scope, key, "remove", "stop", "stopped")
        assert await changed(6) == [1, 5, 6], "the released replica still has a record"
        await scope.must(scope.actors["workloads"], Forget(key, scope.at(key)))
        assert await changed(7) == [6, 7]

    version_after_version()


# -- slices of quota --------------------------------------------------------------------------------------------------------


@scope_test
async def test_quota_slice_of_other_scope_is_not_drawn_locally(scope: Scope) -> None:
    """Of a quota of 4, another scope holds 3."""
    budgets, scheduler = scope.actors["budgets"], scope.actors["scheduler"]
    await scope.must(OPERATOR, Apply(tenant("t1", "4")))
    await scope.must(budgets, Issue("s", slice_of("3")))
    a, b = await spawn_replicas(scope, "w", 2)
    await bind(scope, a)
    assert await scope.refused(scheduler, Bind(b, scope.at(b), "n1", T1)) is Code.OVER_QUOTA
    assert await scope.refused(scheduler, Bind(b, scope.at(b), "n1", "s")) is Code.NOT_OWNER, "nor from the slice itself"
    await scope.take_over()
    assert await scope.refused(scheduler, Bind(b, scope.at(b), "n1", T1)) is Code.OVER_QUOTA
    await accept_peer(scope, "scope/r2")
    await scope.must(budgets, credit(scope, 1, "2"))
    await bind(scope, b)


@scope_test
async def test_slices_exceed_neither_quota_nor_draws(scope: Scope) -> None:
    budgets = scope.actors["budgets"]
    await scope.must(OPERATOR, Apply(tenant("t1", "4")))
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key)
    assert await scope.refused(budgets, Issue("s", slice_of("4"))) is Code.GRANT_SHORT, "1 is drawn"
    await scope.must(budgets, Issue("s", slice_of("2")))
    assert await scope.refused(budgets, Issue("t", slice_of("2", "scope/r3"))) is Code.GRANT_SHORT
    await scope.must(budgets, Issue("t", slice_of("1", "scope/r3")))
    assert await scope.refused(budgets, Issue("u", slice_of("1", "scheduler"))) is Code.GRANT_SHORT


@scope_test
async def test_quota_shrunk_below_its_slices_lists_excess(scope: Scope) -> None:
    """Granted capacity stays with its holder; the excess has to be drained."""
    budgets, scheduler = scope.actors["budgets"], scope.actors["scheduler"]
    await scope.must(budgets, Issue("s", slice_of("3", ttl=HOUR)))
    a, b = await spawn_replicas(scope, "w", 2)
    await bind(scope, a)
    assert dict(scope.books.excess()) == {}
    await scope.must(OPERATOR, Apply(tenant("t1", "2")))
    assert dict(scope.books.excess()) == {"tenant/t1": "cpu 2"}, "3 granted and 1 drawn, of 2"
    assert await scope.refused(budgets, Issue("t", slice_of("1", "scope/r3"))) is Code.GRANT_SHORT
    assert await scope.refused(scheduler, Bind(b, scope.at(b), "n1", T1)) is Code.OVER_QUOTA
    await scope.take_over()
    assert dict(scope.books.excess()) == {"tenant/t1": "cpu 2"}
    await accept_peer(scope, "scope/r2")
    await scope.must(budgets, credit(scope, 1, "1"))
    assert dict(scope.books.excess()) == {}
