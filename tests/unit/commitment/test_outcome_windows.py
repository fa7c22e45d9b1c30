"""Is an id good with every authority that it may be asked of? Windows: when they are announced, when they end, what is kept."""

from __future__ import annotations

import asyncio

import pytest

from remit.client.endpoint import AuthorityStatus, NotLeader
from remit.commitment import outcomes as kept
from remit.commitment.authority import Authority
from remit.commitment.outcomes import WINDOW_MS, WINDOWS_RETAINED, batch_key
from remit.model.claims import Abandon, Accepted, Actor, Apply, Bind, Code, Delete, Operation, OperationID, Refused, Role
from tests.properties.authority_world import USER, Scope, story, workload
from tests.unit.commitment.authority_fixture import T1, spawned

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


# -- announced --------------------------------------------------------------------------------------------------------------


@story
async def test_a_new_window_is_recorded_before_it_is_announced(scope: Scope) -> None:
    before = await status(scope)
    scope.clock.at_ms += WINDOW_MS
    after = await status(scope)
    assert after.window == before.window + 1
    assert scope.row(batch_key(after.sequence))["window"] == after.window, "a batch of its own, as nobody asked anything"
    assert (await status(scope)).sequence == after.sequence, "and no other until the next window"


@story
async def test_an_id_of_a_window_just_announced_is_good_with_the_successor(scope: Scope) -> None:
    """The authority that announced it has decided nothing in it, and dies."""
    scope.clock.at_ms += WINDOW_MS
    operation = await scope.operation(USER, Apply(workload("w")))
    await scope.lead.stop()
    await scope.take_over()
    assert isinstance(await verdict(scope, operation), Accepted)


@story
async def test_a_deposed_authority_announces_no_window(scope: Scope) -> None:
    """It finds out by trying, and sends whoever asks to its successor."""
    old = scope.lead
    await scope.take_over()
    scope.clock.at_ms += WINDOW_MS
    for _ in range(2):
        with pytest.raises(NotLeader) as turned:
            await asyncio.wait_for(old.authority.status(), 5)
        assert turned.value.hint == "a2"
    assert not old.alive


@story
async def test_an_authority_that_does_not_run_yet_tells_where_the_scope_stands(scope: Scope) -> None:
    await scope.lead.stop()
    idle = await Authority.take_over(scope.store, scope="r1", holder="idle", clock=scope.clock, ids=scope.ids)
    scope.clock.at_ms += WINDOW_MS
    told = await asyncio.wait_for(idle.status(), 5)
    assert (told.leader, told.window, told.scope) == ("idle", 1, "r1")


@story
async def test_a_window_that_cannot_be_recorded_is_not_announced(scope: Scope) -> None:
    before = await status(scope)
    scope.clock.at_ms += WINDOW_MS
    scope.store.plan.append("unavailable")
    assert (await status(scope)).window == before.window
    assert (await status(scope)).window == before.window + 1, "but as soon as it can be"


@story
async def test_windows_go_on_counting_over_takeovers(scope: Scope) -> None:
    scope.clock.at_ms += 3 * WINDOW_MS
    before = await status(scope)
    await scope.take_over()
    await scope.ask(USER, NOTHING)
    assert (await status(scope)).window == before.window, "a new authority begins where the last one was"
    scope.clock.at_ms += WINDOW_MS
    assert (await status(scope)).window == before.window + 1


# -- ended early ------------------------------------------------------------------------------------------------------------


def test_a_crowded_window_ends_early_so_that_outcomes_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes at all: else the count could only be kept by forgetting ids that are still good."""
    monkeypatch.setattr(kept, "OUTCOMES_MAX", 40)

    @story
    async def at_one_instant(scope: Scope) -> None:
        first = await status(scope)
        early = await scope.operation(USER, Apply(workload("early")))
        answered = await verdict(scope, early)
        for _ in range(8):
            await scope.ask(USER, *[NOTHING] * 10)
        later = await status(scope)
        assert later.window > first.window + 3
        assert len(scope.lead.authority.outcomes) <= 40 + 20, "a batch and a window's rest over, at most"
        assert await code(scope, early) is Code.OPERATION_EXPIRED, f"refused, and not done again: it was {answered}"
        last = await scope.operation(USER, Apply(workload("last")))
        done = await verdict(scope, last)
        assert await verdict(scope, last) == done
        await scope.take_over()
        assert await verdict(scope, last) == done
        assert await code(scope, early) is Code.OPERATION_EXPIRED

    at_one_instant()


def test_a_window_that_ended_early_is_not_counted_again_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "OUTCOMES_MAX", 40)

    @story
    async def crowded_once(scope: Scope) -> None:
        before = await status(scope)
        await scope.ask(USER, *[NOTHING] * 11)
        crowded = await status(scope)
        await scope.ask(USER, NOTHING)
        assert before.window + 1 == crowded.window == (await status(scope)).window, "one crowd ends one window"
        scope.clock.at_ms += WINDOW_MS
        assert (await status(scope)).window == crowded.window + 1

    crowded_once()


# -- kept -------------------------------------------------------------------------------------------------------------------


@story
async def test_outcomes_are_kept_for_ten_windows_and_not_one_more(scope: Scope) -> None:
    operation = await scope.operation(USER, Apply(workload("w")))
    first = await verdict(scope, operation)
    unused = await scope.operation(USER, Apply(workload("v")))
    for _ in range(WINDOWS_RETAINED):
        scope.clock.at_ms += WINDOW_MS
        await scope.ask(USER, NOTHING)
    assert await verdict(scope, operation) == first
    scope.clock.at_ms += WINDOW_MS
    await scope.ask(USER, NOTHING)
    said = await verdict(scope, operation)
    assert isinstance(said, Refused) and said.code is Code.OPERATION_EXPIRED
    assert said.detail == "id: window 1 is not retained; windows 2 to 12 are"
    assert await code(scope, unused) is Code.OPERATION_EXPIRED, "also if it never happened: who could tell?"
    assert "workload/t1/v" not in scope.checker.rows


@story
async def test_what_is_no_operation_id_is_refused(scope: Scope) -> None:
    prefix = f"{scope.row('head')['incarnation']}.1."
    for wrong in ("", "x", prefix, f"{prefix}a.b", prefix + "n" * 128, f"{prefix[:-2]}x.n", f"{prefix[:-2]}-1.n"):
        assert await code(scope, Operation(OperationID(wrong), USER, Apply(workload("w")))) is Code.INVALID, wrong
    assert "workload/t1/w" not in scope.checker.rows


# -- abandoned --------------------------------------------------------------------------------------------------------------


@story
async def test_nobody_abandons_at_an_epoch_that_is_over_or_as_the_authority(scope: Scope) -> None:
    """A zombie scheduler must not keep its successor's operations from happening."""
    (key,) = await spawned(scope, "w")
    operation = await scope.operation(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1))
    good = scope.actors["scheduler"]
    zombie = Actor(good.name, good.role, good.lease, good.epoch - 1)
    assert await scope.refused(zombie, Abandon(operation.id)) is Code.STALE_EPOCH
    assert await scope.refused(Actor("a1", Role.AUTHORITY), Abandon(operation.id)) is Code.ROLE
    assert isinstance(await verdict(scope, operation), Accepted)


@story
async def test_what_is_too_old_to_be_known_cannot_be_abandoned_and_need_not_be(scope: Scope) -> None:
    old = await scope.operation(USER, Apply(workload("w")))
    scope.clock.at_ms += (WINDOWS_RETAINED + 1) * WINDOW_MS
    await scope.ask(USER, NOTHING)
    assert await scope.refused(USER, Abandon(old.id)) is Code.OPERATION_EXPIRED
    assert await scope.refused(USER, Abandon("elsewhere.12.x")) is Code.OPERATION_EXPIRED
    assert await scope.refused(USER, Abandon("nonsense")) is Code.INVALID
    assert await code(scope, old) is Code.OPERATION_EXPIRED
