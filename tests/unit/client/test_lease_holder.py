"""A lease holder stops acting before the authority may give its lease away."""

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


def test_hold_term_counts_from_send_time() -> None:
    hold = LeaseHold(HOLDER, 15_000, 1_000)
    assert hold.valid_until_ms == 16_000
    assert hold.is_valid(15_999)
    assert not hold.is_valid(16_000)


@given(st.permutations([1_000, 3_000, 5_000, 9_000]))
def test_reordered_renewals_never_shorten_term(order: list[int]) -> None:
    hold = LeaseHold(HOLDER, 15_000, 0)
    for sent_ms in order:
        hold.on_renewed(sent_ms)
    assert hold.valid_until_ms == 24_000


def test_slow_renewal_counts_from_send_not_reply() -> None:
    """F16."""

    async def scene() -> None:
        b = bench(["delay 2000"])
        sent_ms = b.world.clock.now_ms()
        hold = LeaseHold(HOLDER, 15_000, sent_ms - 10_000)
        assert await hold.renew(b.client)
        assert b.world.clock.now_ms() == sent_ms + 2_000
        assert b.authority.renewals_ms == [sent_ms + 2_000]
        assert hold.valid_until_ms == sent_ms + 15_000

    run_virtually(scene())


def test_renewal_after_lost_tries_counts_from_answered_try() -> None:
    async def scene() -> None:
        b = bench(["hang before", "lose after", "pass"])
        hold = LeaseHold(HOLDER, 15_000, b.world.clock.now_ms())
        assert await hold.renew(b.client)
        assert len(b.endpoints["a"].sent_ms) == 3
        assert hold.valid_until_ms == b.endpoints["a"].sent_ms[-1] + 15_000
        # The holder's term ends no later than the authority's, which counts from receipt.
        assert hold.valid_until_ms <= b.authority.renewals_ms[-1] + 15_000

    run_virtually(scene())


def test_failed_renewal_keeps_previous_term() -> None:
    async def scene() -> None:
        b = bench([], then="lose after")
        began_ms = b.world.clock.now_ms()
        hold = LeaseHold(HOLDER, 15_000, began_ms)
        with pytest.raises(RetriesExhausted):
            await hold.renew(b.client, deadline_ms=2_000)
        assert hold.valid_until_ms == began_ms + 15_000
        assert hold.is_valid(b.world.clock.now_ms())

    run_virtually(scene())


def test_renewal_ignores_exhausted_retry_budget() -> None:
    async def scene() -> None:
        b = bench(["lose before", "lose before", "pass"], budget=RetryBudget(percent=0, per_second=0))
        assert (await b.client.renew(HOLDER)).held

    run_virtually(scene())


def test_refused_renewal_ends_hold_for_good() -> None:
    async def scene() -> None:
        b = bench()
        b.authority.held = False
        hold = LeaseHold(HOLDER, 15_000, b.world.clock.now_ms())
        assert not await hold.renew(b.client)
        assert hold.is_lost
        hold.on_renewed(b.world.clock.now_ms())
        assert not hold.is_valid(b.world.clock.now_ms())

    run_virtually(scene())


def test_hold_is_invalid_after_suspend_past_term() -> None:
    """F15, F18."""

    async def scene() -> None:
        b = bench()
        hold = LeaseHold(HOLDER, 15_000, b.world.clock.now_ms())
        assert isinstance(b.world.clock, VirtualClock)
        b.world.clock.suspend(15_000)
        assert not hold.is_valid(b.world.clock.now_ms())

    run_virtually(scene())


def test_acquired_term_counts_from_before_first_try() -> None:
    async def scene() -> None:
        b = bench(["lose after", "pass"])
        began_ms = b.world.clock.now_ms()
        hold = await acquire(b.client, b.world.clock, "shard-1", Duration(15_000))
        assert isinstance(hold, LeaseHold)
        assert hold.actor == HOLDER
        assert hold.valid_until_ms == began_ms + 15_000
        b.authority.incarnation = "inc2"
        b.authority.window_shift = -10
        assert await acquire(b.client, b.world.clock, "shard-1", Duration(1)) == Refused(Code.OPERATION_EXPIRED)

    run_virtually(scene())


@pytest.mark.parametrize(("lease", "epoch", "term_ms"), [("", 5, 1), ("shard-1", 0, 1), ("shard-1", 5, 0)])
def test_hold_needs_lease_epoch_and_term(lease: str, epoch: int, term_ms: int) -> None:
    with pytest.raises(ValueError, match="invalid lease hold"):
        LeaseHold(replace(ACTOR, lease=lease, epoch=epoch), term_ms, 0)


def test_candidate_retries_only_when_lease_may_be_free() -> None:
    """F32: a refusal costs a commit too. The lease is free after a silent term or a release."""

    async def scene() -> None:
        b = bench()
        candidate = LeaseCandidate(b.client, b.world.clock, "shard-1", Duration(15_000))
        refused = Refused(Code.LEASE_HELD, "held by another")
        b.authority.refuses = refused
        assert await candidate.acquire() is None
        assert len(b.authority.submitted) == 1
        for listened_ms, silent in ((1_000, {}), (900_000, {"shard-1": 15_000}), (15_000, {"shard-2": 99_000})):
            b.authority.listened_ms, b.authority.silent = listened_ms, silent
            assert await candidate.acquire() is None
        assert len(b.authority.submitted) == 1
        for listened_ms, silent in ((900_000, {"shard-1": 15_001}), (15_001, {})):
            b.authority.listened_ms, b.authority.silent = listened_ms, silent
            assert await candidate.acquire() is None
        assert len(b.authority.submitted) == 3
        b.authority.refuses = None
        found = await candidate.acquire()
        assert found is not None and found.actor.epoch == 5

    run_virtually(scene())


def test_candidate_refused_for_other_reason_retries() -> None:
    async def scene() -> None:
        b = bench()
        candidate = LeaseCandidate(b.client, b.world.clock, "shard-1", Duration(15_000))
        b.authority.refuses = Refused(Code.LIMIT, "too many leases")
        assert await candidate.acquire() is None
        assert await candidate.acquire() is None
        assert len(b.authority.submitted) == 2

    run_virtually(scene())
