"""Windows of operation ids: announcement, early end, retention, abandoned ids."""

from __future__ import annotations

import asyncio

import pytest

from remit.client.endpoint import AuthorityStatus, NotLeader
from remit.commitment import outcomes as kept
from remit.commitment.authority import Authority
from remit.commitment.outcomes import WINDOW_MS, WINDOWS_RETAINED, batch_key
from remit.model.claims import Abandon, Accepted, Actor, Apply, Bind, Code, Delete, Operation, OperationID, Refused
from remit.model.roles import Role
from tests.properties.authority_world import USER, Scope, scope_test, workload
from tests.unit.commitment.authority_fixture import T1, spawn_replicas

NOTHING = Delete("Secret", "none", "t1")


async def status(scope: Scope) -> AuthorityStatus:
    return await scope.lead.authority.status()


async def verdict(scope: Scope, operation: Operation) -> Accepted | Refused:
    answers = await scope.send([operation])
    assert isinstance(answers, list)
    return answers[0]


async def code(scope: Scope, operation: Operation) -> Code | None:
    answer = await verdict(scope, operation)
    return answer.code if isinstance(answer, Refused) else None


# -- announcement ----------------------------------------------------------------------------------------------------------


@scope_test
async def test_new_window_is_recorded_before_announced(scope: Scope) -> None:
    before = await status(scope)
    scope.clock.at_ms += WINDOW_MS
    after = await status(scope)
    assert after.window == before.window + 1
    assert scope.row(batch_key(after.sequence))["window"] == after.window, "in a batch of its own without operations"
    assert (await status(scope)).sequence == after.sequence, "no further batch until the next window"


@scope_test
async def test_id_of_announced_window_is_accepted_by_successor(scope: Scope) -> None:
    """The authority that announced it stops without a decision in it."""
    scope.clock.at_ms += WINDOW_MS
    operation = await scope.operation(USER, Apply(workload("w")))
    await scope.lead.stop()
    await scope.take_over()
    assert isinstance(await verdict(scope, operation), Accepted)


@scope_test
async def test_deposed_authority_announces_no_window(scope: Scope) -> None:
    """It notices on its next commit, and refers callers to its successor."""
    old = scope.lead
    await scope.take_over()
    scope.clock.at_ms += WINDOW_MS
    for _ in range(2):
        with pytest.raises(NotLeader) as turned:
            await asyncio.wait_for(old.authority.status(), 5)
        assert turned.value.hint == "a2"
    assert not old.alive


@scope_test
async def test_authority_that_is_not_running_reports_status(scope: Scope) -> None:
    await scope.lead.stop()
    idle = await Authority.take_over(scope.store, scope="r1", holder="idle", clock=scope.clock, ids=scope.ids)
    scope.clock.at_ms += WINDOW_MS
    reported = await asyncio.wait_for(idle.status(), 5)
    assert (reported.leader, reported.window, reported.scope) == ("idle", 1, "r1")


@scope_test
async def test_unrecorded_window_is_not_announced(scope: Scope) -> None:
    before = await status(scope)
    scope.clock.at_ms += WINDOW_MS
    scope.store.plan.append("unavailable")
    assert (await status(scope)).window == before.window
    assert (await status(scope)).window == before.window + 1, "once it can be recorded"


@scope_test
async def test_window_numbers_continue_over_takeovers(scope: Scope) -> None:
    scope.clock.at_ms += 3 * WINDOW_MS
    before = await status(scope)
    await scope.take_over()
    await scope.ask(USER, NOTHING)
    assert (await status(scope)).window == before.window, "a new authority continues the window"
    scope.clock.at_ms += WINDOW_MS
    assert (await status(scope)).window == before.window + 1


# -- early end --------------------------------------------------------------------------------------------------------------


def test_crowded_window_ends_early_so_outcomes_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes: otherwise the bound would drop ids that are still valid."""
    monkeypatch.setattr(kept, "OUTCOMES_MAX", 40)

    @scope_test
    async def at_one_instant(scope: Scope) -> None:
        first = await status(scope)
        early = await scope.operation(USER, Apply(workload("early")))
        answered = await verdict(scope, early)
        for _ in range(8):
            await scope.ask(USER, *[NOTHING] * 10)
        later = await status(scope)
        assert later.window > first.window + 3
        assert len(scope.lead.authority.outcomes) <= 40 + 20, "at most a batch and the rest of a window over"
        assert await code(scope, early) is Code.OPERATION_EXPIRED, f"refused, and not applied again: it was {answered}"
        last = await scope.operation(USER, Apply(workload("last")))
        done = await verdict(scope, last)
        assert await verdict(scope, last) == done
        await scope.take_over()
        assert await verdict(scope, last) == done
        assert await code(scope, early) is Code.OPERATION_EXPIRED

    at_one_instant()


def test_window_ended_early_is_not_counted_again_by_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "OUTCOMES_MAX", 40)

    @scope_test
    async def crowded_once(scope: Scope) -> None:
        before = await status(scope)
        await scope.ask(USER, *[NOTHING] * 11)
        crowded = await status(scope)
        await scope.ask(USER, NOTHING)
        assert before.window + 1 == crowded.window == (await status(scope)).window, "one crowd ends one window"
        scope.clock.at_ms += WINDOW_MS
        assert (await status(scope)).window == crowded.window + 1

    crowded_once()


# -- retention --------------------------------------------------------------------------------------------------------------


@scope_test
async def test_outcomes_are_retained_for_ten_windows(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    first = await verdict(scope, operation)
    unused = await scope.operation(USER, Apply(workload("v")))
    for _ in range(WINDOWS_RETAINED):
        scope.clock.at_ms += WINDOW_MS
        await scope.ask(USER, NOTHING)
    assert await verdict(scope, operation) == first
    scope.clock.at_ms += WINDOW_MS
    await scope.ask(USER, NOTHING)
    answer = await verdict(scope, operation)
    assert isinstance(answer, Refused) and answer.code is Code.OPERATION_EXPIRED
    assert answer.detail == "id: window 1 is not retained; windows 2 to 12 are"
    assert await code(scope, unused) is Code.OPERATION_EXPIRED, "also if it was never applied: that is unknown by now"
    assert "workload/t1/v" not in scope.checker.rows


@scope_test
async def test_malformed_operation_id_is_refused(scope: Scope) -> None:
    prefix = f"{scope.row('head')['incarnation']}.1."
    for wrong in ("", "x", prefix, f"{prefix}a.b", prefix + "n" * 128, f"{prefix[:-2]}x.n", f"{prefix[:-2]}-1.n"):
        assert await code(scope, Operation(OperationID(wrong), USER, Apply(workload("w")))) is Code.INVALID, wrong
    assert "workload/t1/w" not in scope.checker.rows


# -- abandoned ids ----------------------------------------------------------------------------------------------------------


@scope_test
async def test_abandon_at_stale_epoch_or_as_authority_is_refused(scope: Scope) -> None:
    """A deposed scheduler must not abandon its successor's operations."""
    (key,) = await spawn_replicas(scope, "w")
    operation = await scope.operation(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1))
    good = scope.actors["scheduler"]
    zombie = Actor(good.name, good.role, good.lease, good.epoch - 1)
    assert await scope.refused(zombie, Abandon(operation.id)) is Code.STALE_EPOCH
    assert await scope.refused(Actor("a1", Role.AUTHORITY), Abandon(operation.id)) is Code.ROLE
    assert isinstance(await verdict(scope, operation), Accepted)


@scope_test
async def test_abandon_of_expired_id_is_refused(scope: Scope) -> None:
    old = await scope.operation(USER, Apply(workload("w")))
    scope.clock.at_ms += (WINDOWS_RETAINED + 1) * WINDOW_MS
    await scope.ask(USER, NOTHING)
    assert await scope.refused(USER, Abandon(old.id)) is Code.OPERATION_EXPIRED
    assert await scope.refused(USER, Abandon("elsewhere.12.x")) is Code.OPERATION_EXPIRED
    assert await scope.refused(USER, Abandon("nonsense")) is Code.INVALID
    assert await code(scope, old) is Code.OPERATION_EXPIRED
