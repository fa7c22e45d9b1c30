"""Does a holder stop believing in its lease before the authority may give it away?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from remit.client.authority_client import RetriesExhausted
from remit.client.lease_holder import LeaseCandidate, LeaseHold, acquire
from remit.client.retry import RetryBudget
from remit.model.claims import Code, Refused
from remit.model.resources import Duration
from tests.unit.client.fake_authority import ACTOR, bench
from tests.unit.world.virtual_world import VirtualClock, run_virtually

HOLDER = replace(ACTOR, lease="shard-1", epoch=5)


def test_a_tenure_counts_from_when_it_was_sent() -> None:
    tenure = LeaseHold(HOLDER, 15_000, 1_000)
    assert tenure.valid_until_ms == 16_000
    assert tenure.is_valid(15_999)
    assert not tenure.is_valid(16_000)


@given(st.permutations([1_000, 3_000, 5_000, 9_000]))
def test_answers_that_overtake_each_other_never_shorten_a_term(order: list[int]) -> None:
    tenure = LeaseHold(HOLDER, 15_000, 0)
    for sent_ms in order:
        tenure.on_renewed(sent_ms)
    assert tenure.valid_until_ms == 24_000


def test_a_slow_renewal_counts_from_its_sending_not_from_its_answer() -> None:
    """F16."""

    async def scene() -> None:
        b = bench(["delay 2000"])
        sent_ms = b.world.clock.now_ms()
        tenure = LeaseHold(HOLDER, 15_000, sent_ms - 10_000)
        assert await tenure.renew(b.client)
        assert b.world.clock.now_ms() == sent_ms + 2_000
        assert b.authority.renewals_ms == [sent_ms + 2_000]
        assert tenure.valid_until_ms == sent_ms + 15_000

    run_virtually(scene())


def test_after_lost_tries_it_counts_from_the_try_that_was_answered() -> None:
    async def scene() -> None:
        b = bench(["hang before", "lose after", "pass"])
        tenure = LeaseHold(HOLDER, 15_000, b.world.clock.now_ms())
        assert await tenure.renew(b.client)
        assert len(b.endpoints["a"].sent_ms) == 3
        assert tenure.valid_until_ms == b.endpoints["a"].sent_ms[-1] + 15_000
        # The holder's term ends no later than the authority's, which counts from receipt.
        assert tenure.valid_until_ms <= b.authority.renewals_ms[-1] + 15_000

    run_virtually(scene())


def test_without_an_answer_the_old_term_runs_on_to_its_end() -> None:
    async def scene() -> None:
        b = bench([], then="lose after")
        began_ms = b.world.clock.now_ms()
        tenure = LeaseHold(HOLDER, 15_000, began_ms)
        with pytest.raises(RetriesExhausted):
            await tenure.renew(b.client, deadline_ms=2_000)
        assert tenure.valid_until_ms == began_ms + 15_000
        assert tenure.is_valid(b.world.clock.now_ms())

    run_virtually(scene())


def test_renewals_are_not_starved_by_a_used_up_budget() -> None:
    async def scene() -> None:
        b = bench(["lose before", "lose before", "pass"], budget=RetryBudget(percent=0, per_second=0))
        assert (await b.client.renew(HOLDER)).held

    run_virtually(scene())


def test_no_is_final() -> None:
    async def scene() -> None:
        b = bench()
        b.authority.held = False
        tenure = LeaseHold(HOLDER, 15_000, b.world.clock.now_ms())
        assert not await tenure.renew(b.client)
        assert tenure.is_lost
        tenure.on_renewed(b.world.clock.now_ms())
        assert not tenure.is_valid(b.world.clock.now_ms())

    run_virtually(scene())


def test_a_machine_that_slept_through_its_term_may_not_act() -> None:
    """F15, F18."""

    async def scene() -> None:
        b = bench()
        tenure = LeaseHold(HOLDER, 15_000, b.world.clock.now_ms())
        assert isinstance(b.world.clock, VirtualClock)
        b.world.clock.suspend(15_000)
        assert not tenure.is_valid(b.world.clock.now_ms())

    run_virtually(scene())


def test_acquiring_counts_from_before_the_first_try() -> None:
    async def scene() -> None:
        b = bench(["lose after", "pass"])
        began_ms = b.world.clock.now_ms()
        tenure = await acquire(b.client, b.world.clock, "shard-1", Duration(15_000))
        assert isinstance(tenure, LeaseHold)
        assert tenure.actor == HOLDER
        assert tenure.valid_until_ms == began_ms + 15_000
        b.authority.incarnation = "inc2"
        b.authority.window_shift = -10
        assert await acquire(b.client, b.world.clock, "shard-1", Duration(1)) == Refused(Code.OPERATION_EXPIRED)

    run_virtually(scene())


@pytest.mark.parametrize(("lease", "epoch", "term_ms"), [("", 5, 1), ("shard-1", 0, 1), ("shard-1", 5, 0)])
def test_no_tenure_without_lease_epoch_and_term(lease: str, epoch: int, term_ms: int) -> None:
    with pytest.raises(ValueError, match="invalid lease hold"):
        LeaseHold(replace(ACTOR, lease=lease, epoch=epoch), term_ms, 0)


def test_a_candidate_asks_once_and_again_only_when_the_lease_may_be_free() -> None:
    """F32: a refusal is a commit too. It is free when it was not renewed for a term, or given back."""

    async def scene() -> None:
        b = bench()
        candidate = LeaseCandidate(b.client, b.world.clock, "shard-1", Duration(15_000))
        refused = Refused(Code.LEASE_HELD, "held by another")
        b.authority.refuses = refused
        assert await candidate.acquire() is None
        assert len(b.authority.asked) == 1
        for listened_ms, silent in ((1_000, {}), (900_000, {"shard-1": 15_000}), (15_000, {"shard-2": 99_000})):
            b.authority.listened_ms, b.authority.silent = listened_ms, silent
            assert await candidate.acquire() is None
        assert len(b.authority.asked) == 1
        for listened_ms, silent in ((900_000, {"shard-1": 15_001}), (15_001, {})):
            b.authority.listened_ms, b.authority.silent = listened_ms, silent
            assert await candidate.acquire() is None
        assert len(b.authority.asked) == 3
        b.authority.refuses = None
        found = await candidate.acquire()
        assert found is not None and found.actor.epoch == 5

    run_virtually(scene())


def test_a_candidate_that_was_refused_for_another_reason_asks_again() -> None:
    async def scene() -> None:
        b = bench()
        candidate = LeaseCandidate(b.client, b.world.clock, "shard-1", Duration(15_000))
        b.authority.refuses = Refused(Code.LIMIT, "too many leases")
        assert await candidate.acquire() is None
        assert await candidate.acquire() is None
        assert len(b.authority.asked) == 2

    run_virtually(scene())
