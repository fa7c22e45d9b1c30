"""Outcomes of operations: one per id while it is retained, none afterwards."""

from __future__ import annotations

import pytest

from remit.commitment import batch as module
from remit.commitment import outcomes as kept
from remit.commitment.outcomes import WINDOW_MS, WINDOWS_RETAINED, AuditEntry, BatchRecord, Outcomes, batch_key
from remit.model.claims import (
    Abandon,
    Accepted,
    AnyClaim,
    Apply,
    Bind,
    Code,
    Delete,
    Mark,
    Move,
    Operation,
    OperationID,
    Refused,
    Spawn,
)
from remit.model.kinds import Config, DataSpec, NodeHealth
from remit.model.metadata import Metadata
from remit.store import chain
from tests.properties.authority_world import USER, Scope, scope_test, workload
from tests.unit.commitment.authority_fixture import spawn_replicas

NOTHING = Delete("Secret", "none", "t1")


def code(answer: object) -> Code | None:
    assert isinstance(answer, list)
    return answer[0].code if isinstance(answer[0], Refused) else None


@pytest.mark.parametrize(
    ("claim", "detail"),
    [
        (Bind("replica/t1/w-0", 1, "n3", "tenant/t1"), "to n3"),
        (Move("replica/t1/w-0", 1, "lose", 1, "lost", "node n3 sent no heartbeats"), "lost: node n3 sent no heartbeats"),
        (Move("replica/t1/w-0", 1, "crash", 1, "exit 3"), "exit 3"),
        (Move("replica/t1/w-0", 1, "evict", 1, reason="node n3 is draining"), "node n3 is draining"),
        (Move("replica/t1/w-0", 1, "run", 1), ""),
        (Mark("n3", 1, NodeHealth.SUSPECT, "no heartbeat for 15s"), "suspect: no heartbeat for 15s"),
        (Mark("n3", 1, NodeHealth.READY), "ready"),
    ],
)
def test_audit_entry_of_accepted_claim_states_its_cause(claim: AnyClaim, detail: str) -> None:
    operation = Operation(OperationID("o.1.x"), USER, claim)
    assert module.audit_entry(operation, module.audit_names(operation), "digest", 7).detail == detail


@scope_test
async def test_first_id_of_new_window_after_idle_time_is_accepted(scope: Scope) -> None:
    """Status advances windows by the clock; the books learn of one only from a batch."""
    scope.clock.at_ms += 3 * WINDOW_MS
    operation = await scope.operation(USER, Apply(workload("w")))
    assert operation.id.split(".")[1] == "4"
    assert code(await scope.send([operation])) is None


@scope_test
async def test_id_before_horizon_is_refused_and_never_applied(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    scope.clock.at_ms += (WINDOWS_RETAINED + 2) * WINDOW_MS
    await scope.ask(USER, NOTHING)
    assert code(await scope.send([operation])) is Code.OPERATION_EXPIRED
    assert "workload/t1/w" not in scope.checker.rows


@scope_test
async def test_id_of_future_window_is_refused(scope: Scope) -> None:
    status = await scope.lead.authority.status()
    early = Operation(OperationID(f"{status.incarnation}.{status.window + 1}.x"), USER, NOTHING)
    assert code(await scope.send([early])) is Code.OPERATION_EXPIRED


@scope_test
async def test_retry_in_retained_windows_gets_first_answer_after_takeover(scope: Scope) -> None:
    """F01"""
    operation = await scope.operation(USER, Apply(workload("w")))
    first = await scope.send([operation])
    for _ in range(WINDOWS_RETAINED - 1):
        scope.clock.at_ms += WINDOW_MS
        await scope.ask(USER, NOTHING)
    assert await scope.send([operation]) == first
    await scope.take_over()
    assert await scope.send([operation]) == first


@scope_test
async def test_reused_id_with_other_payload_is_refused(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    first = await scope.send([operation])
    other = Operation(operation.id, USER, Apply(workload("other")))
    assert code(await scope.send([other])) is Code.OPERATION_MISMATCH
    both = await scope.operation(USER, Apply(workload("a")))
    answers = await scope.send([both, Operation(both.id, USER, Apply(workload("b"))), both])
    assert isinstance(answers, list) and [code([answer]) for answer in answers] == [None, Code.OPERATION_MISMATCH, None]
    assert await scope.send([operation]) == first


@scope_test
async def test_abandon_of_decided_operation_returns_its_outcome(scope: Scope) -> None:
    await spawn_replicas(scope, "w", 2, replicas=5)
    done = await scope.operation(scope.actors["workloads"], Spawn("t1", "w", 1, 2, 3))
    refused = await scope.operation(USER, NOTHING)
    await scope.send([done, refused])
    (verdict,) = await scope.ask(USER, Abandon(done.id))
    assert isinstance(verdict, Accepted) and verdict.number == 3
    (verdict,) = await scope.ask(USER, Abandon(refused.id))
    assert isinstance(verdict, Refused) and verdict.code is Code.NOT_FOUND


@scope_test
async def test_abandoned_operation_is_never_applied(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    (verdict,) = await scope.ask(USER, Abandon(operation.id))
    assert isinstance(verdict, Refused) and verdict.code is Code.ABANDONED
    assert code(await scope.send([operation])) is Code.ABANDONED
    await scope.take_over()
    assert code(await scope.send([operation])) is Code.ABANDONED
    assert "workload/t1/w" not in scope.checker.rows


@scope_test
async def test_abandon_within_batch_follows_request_order(scope: Scope) -> None:
    first, second = [await scope.operation(USER, Apply(workload(name))) for name in ("a", "b")]
    before = await scope.operation(USER, Abandon(first.id))
    after = await scope.operation(USER, Abandon(second.id))
    answers = await scope.send([before, first, second, after])
    assert isinstance(answers, list)
    assert [code([answer]) for answer in answers] == [Code.ABANDONED, Code.ABANDONED, None, None]


def entry(name: str) -> AuditEntry:
    return AuditEntry(name, "d", "note", "", "", "", "", 0, 0, 0, 0, "", "", "")


def test_outcome_limit_raises_horizon_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is bounded too: an operation is refused rather than forgotten and repeated."""
    monkeypatch.setattr(kept, "OUTCOMES_MAX", 5)
    outcomes = Outcomes("i", 1, 1)
    for window in (1, 2):
        batch = BatchRecord(1, window, outcomes.next_horizon(window), 1, "", tuple(entry(f"i.{window}.{n}") for n in range(3)))
        outcomes.record(window, batch, window)
    assert outcomes.next_horizon(3) == 2
    outcomes.record(3, BatchRecord(1, 3, 2, 2, "", ()), 3)
    assert len(outcomes) == 3
    judged = outcomes.check_id("i.1.0", "d")
    assert isinstance(judged, Refused) and judged.code is Code.OPERATION_EXPIRED
    assert isinstance(outcomes.check_id("i.2.0", "d"), Accepted)
    assert outcomes.first_sequence(2, 9) == 2


def test_batch_with_retained_outcomes_is_not_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """F01 F20: otherwise a new authority would not find the outcome and apply the operation again."""
    monkeypatch.setattr(module, "AUDIT_BATCHES", 10)

    @scope_test
    async def within_one_window(scope: Scope) -> None:
        operation = await scope.operation(USER, Apply(workload("w")))
        first = await scope.send([operation])
        for _ in range(20):
            await scope.ask(USER, NOTHING)
        await scope.take_over()
        assert await scope.send([operation]) == first

    within_one_window()


def test_batch_outlives_audit_while_window_is_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    """However frequent batches are, a retry in the retained windows gets the first answer."""
    monkeypatch.setattr(module, "AUDIT_BATCHES", 10)

    @scope_test
    async def over_many_windows(scope: Scope) -> None:
        operation = await scope.operation(USER, Apply(workload("w")))
        await scope.send([operation])
        first = scope.answers[operation.id]
        scope.clock.at_ms += WINDOW_MS
        for _ in range(20):
            await scope.ask(USER, NOTHING)
        for _ in range(15):
            assert await scope.send([operation]) == [first]
            await scope.take_over()
        scope.clock.at_ms += 20 * WINDOW_MS
        for _ in range(40):
            await scope.ask(USER, NOTHING)
        assert code(await scope.send([operation])) is Code.OPERATION_EXPIRED
        assert batch_key(first.revision) not in scope.checker.rows, "now its batch is pruned"

    over_many_windows()


@scope_test
async def test_outcomes_are_found_behind_thousands_of_takeovers(scope: Scope) -> None:
    """F20: repeated crashes at start leave many empty batches, which must not hide the last decisions."""
    operation = await scope.operation(USER, Apply(workload("w")))
    first = await scope.send([operation])
    for _ in range(10_050):
        await chain.raise_epoch(scope.store.inner, "crashing", "x")
    scope.store.judged = None
    await scope.take_over()
    again = await scope.lead.ask([operation])
    assert again == first


@scope_test
async def test_oversized_claim_is_refused_and_authority_survives(scope: Scope) -> None:
    data = {f"k{i}": "x" * 60_000 for i in range(200)}
    huge = Config(metadata=Metadata(name="c", tenant="t1"), spec=DataSpec(data=data))
    assert await scope.refused(USER, Apply(huge)) is Code.LIMIT
    await scope.must(USER, Apply(workload("w")))
