"""Does an intent keep its id, and does asking end? Each story has an authority that counts its deeds, endpoints that lose."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.endpoint import EndpointError, NotLeader, OutcomeUnknown
from remit.client.retry import RetryBudget, RetryPolicy
from remit.model.claims import Accepted, Code, Evidence, Operation, OperationID, Refused, Verdict, parse_operation_id
from tests.unit.client.fake_authority import ACTOR, BIND, WINDOW_MS, Bench, FakeAuthority, bench
from tests.unit.world.virtual_world import run_virtually, virtual_world

PLENTY = RetryBudget(per_second=1_000, tokens_max=10_000)
EXPIRED = Refused(Code.OPERATION_EXPIRED)


def ids_asked(b: Bench) -> set[str]:
    return {operation.id for operation in b.authority.asked}


# ------------------------------------------------------------------------------------------------------- the same id


@pytest.mark.parametrize("fault", ["lose after", "hang after", "short answer"])
def test_bind_times_out_after_commit__retry_finds_the_same_binding(fault: str) -> None:
    """F01."""

    async def scene() -> None:
        b = bench([fault])
        assert await b.client.submit(BIND) == Accepted(1)
        assert len(b.authority.deeds) == 1
        assert len(b.authority.asked) == 2
        assert len(ids_asked(b)) == 1

    run_virtually(scene())


@pytest.mark.parametrize("fault", ["lose before", "hang before", "turned", "overloaded 10", "delay 500", "duplicate"])
def test_whatever_happens_on_the_way__one_deed_under_one_id(fault: str) -> None:
    async def scene() -> None:
        b = bench([fault, fault], [])
        assert await b.client.submit(BIND) == Accepted(1)
        assert len(b.authority.deeds) == 1
        assert len(ids_asked(b)) == 1

    run_virtually(scene())


FAULTS = ["pass", "lose before", "lose after", "hang after", "hang before", "turned", "turned a", "overloaded 30", "duplicate"]
SCRIPT = st.lists(st.sampled_from(FAULTS), max_size=8)


@given(scripts=st.lists(SCRIPT, min_size=1, max_size=3), claims=st.integers(1, 4), seed=st.integers(0, 99))
def test_any_mixture_of_faults__one_id_an_intent_and_an_end_by_the_deadline(
    scripts: list[list[str]], claims: int, seed: int
) -> None:
    async def scene() -> None:
        b = bench(*scripts, budget=RetryBudget(per_second=1_000, tokens_max=1_000), seed=str(seed))
        began_ms = b.world.clock.now_ms()
        try:
            verdicts = await b.client.submit_many([BIND] * claims)
        except RetriesExhausted as error:
            assert len(error.operations) == claims
            assert ids_asked(b) <= set(error.operation_ids)
            assert error.outcome_unknown or not b.authority.deeds
            for endpoint in b.endpoints.values():
                endpoint.script.clear()
            verdicts = await b.client.resume(error.operations, submitted_ms=error.submitted_ms)
        else:
            assert b.world.clock.now_ms() - began_ms <= 10_000
        assert sorted(verdict.revision for verdict in verdicts) == list(range(1, claims + 1))
        assert len(b.authority.deeds) == len(ids_asked(b)) == claims

    run_virtually(scene())


def test_ids_carry_the_incarnation_and_window_of_the_status() -> None:
    async def scene() -> None:
        b = bench()
        await b.client.submit_many([BIND, BIND])
        first, second = b.authority.asked
        assert parse_operation_id(first.id) == parse_operation_id(second.id) == ("inc1", b.authority.window())
        assert first.id != second.id
        assert parse_operation_id(await b.client.new_operation_id()) == ("inc1", b.authority.window())

    run_virtually(scene())


def test_a_given_id_is_used_and_needs_no_status() -> None:
    async def scene() -> None:
        b = bench(["lose after"])
        b.endpoints["a"].status_script = ["hang before"] * 99
        mine = OperationID(f"inc1.{b.authority.window()}.mine")
        assert await b.client.submit(BIND, operation_id=mine) == Accepted(1)
        assert await b.client.submit(BIND, operation_id=mine) == Accepted(1)
        assert ids_asked(b) == {mine}
        assert b.authority.statuses == 0

    run_virtually(scene())


def test_nothing_to_ask_asks_nothing() -> None:
    async def scene() -> None:
        b = bench()
        assert await b.client.submit_many([]) == []
        assert await b.client.resume([]) == []
        assert b.authority.statuses == 0

    run_virtually(scene())


def test_evidence_grows_older_over_retries_and_none_stays_none() -> None:
    async def scene() -> None:
        b = bench(["hang before"], ["pass"])
        await b.client.submit(BIND, evidence=Evidence(9, 100))
        await b.client.submit(BIND)
        aged, none = b.authority.asked
        assert aged.evidence.revision == 9
        assert 3_100 <= aged.evidence.age_ms <= 3_300
        assert none.evidence == Evidence()

    run_virtually(scene())


# ----------------------------------------------------------------------------------------------------- when it ends


def test_the_deadline_is_kept_and_the_ids_are_handed_back() -> None:
    async def scene() -> None:
        b = bench([], then="hang after", budget=PLENTY)
        began_ms = b.world.clock.now_ms()
        with pytest.raises(RetriesExhausted, match="may have been applied: resume the same ids, or abandon") as caught:
            await b.client.submit_many([BIND, BIND])
        assert b.world.clock.now_ms() - began_ms <= 10_000
        assert set(caught.value.operation_ids) == ids_asked(b)
        assert caught.value.outcome_unknown
        b.endpoints["a"].then = "pass"
        verdicts = await b.client.resume(caught.value.operations, submitted_ms=caught.value.submitted_ms)
        assert verdicts == [Accepted(1), Accepted(2)]
        assert len(b.authority.deeds) == 2

    run_virtually(scene())


def test_a_call_may_bring_its_own_deadline() -> None:
    async def scene() -> None:
        b = bench([], then="hang before")
        began_ms = b.world.clock.now_ms()
        with pytest.raises(RetriesExhausted):
            await b.client.submit(BIND, deadline_ms=700)
        assert b.world.clock.now_ms() - began_ms <= 700

    run_virtually(scene())


def test_without_silence_no_answer_says_that_nothing_happened() -> None:
    async def scene() -> None:
        b = bench([], then="turned", shape=RetryPolicy(attempts_max=3))
        with pytest.raises(RetriesExhausted, match="none of 1 operations was applied") as caught:
            await b.client.submit(BIND)
        assert not caught.value.outcome_unknown
        assert len(b.endpoints["a"].sent_ms) == 3

    run_virtually(scene())


def test_without_a_status_nothing_is_asked() -> None:
    async def scene() -> None:
        b = bench()
        b.endpoints["a"].status_script = ["hang before"] * 99
        with pytest.raises(RetriesExhausted, match="nothing was submitted") as caught:
            await b.client.submit(BIND)
        assert caught.value.operations == ()
        assert not caught.value.outcome_unknown
        assert b.authority.asked == []

    run_virtually(scene())


def test_a_status_that_was_slow_to_come_is_no_silence_of_the_operation() -> None:
    async def scene() -> None:
        b = bench([], then="turned", shape=RetryPolicy(attempts_max=4))
        b.endpoints["a"].status_script = ["lose after"]
        with pytest.raises(RetriesExhausted) as caught:
            await b.client.submit(BIND)
        assert not caught.value.outcome_unknown

    run_virtually(scene())


def test_the_budget_caps_the_retries_of_many_callers() -> None:
    """F32, F40: a hundred callers and a dead authority: what the bucket holds and what flows in, not sixteen tries each."""

    async def scene() -> None:
        b = bench([], then="lose before", budget=RetryBudget(percent=20, per_second=10, tokens_max=100))
        await b.client.status()
        async with asyncio.TaskGroup() as group:
            for _ in range(100):
                group.create_task(fail(b))
        retries = len(b.endpoints["a"].sent_ms) - 100
        assert 50 <= retries <= 10 + 101 * 20 // 100 + 10 * 10

    async def fail(b: Bench) -> None:
        with pytest.raises(RetriesExhausted, match=r"budget|deadline"):
            await b.client.submit(BIND)

    run_virtually(scene())


def test_an_exhausted_budget_ends_a_call_before_its_deadline() -> None:
    async def scene() -> None:
        b = bench([], then="lose before", budget=RetryBudget(percent=0, per_second=0, tokens_max=1))
        began_ms = b.world.clock.now_ms()
        with pytest.raises(RetriesExhausted, match="the retry budget is exhausted"):
            await b.client.submit(BIND)
        assert b.world.clock.now_ms() == began_ms

    run_virtually(scene())


def test_cancelling_a_call_is_not_swallowed() -> None:
    async def scene() -> None:
        b = bench([], then="hang before")
        call = asyncio.ensure_future(b.client.submit(BIND))
        await b.world.clock.sleep_ms(50)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    run_virtually(scene())


def test_what_is_no_link_error_is_a_bug_and_passes_through() -> None:
    class Broken(FakeAuthority):
        async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
            raise KeyError("bug")

    async def scene() -> None:
        world = virtual_world()
        with pytest.raises(KeyError):
            await AuthorityClient({"a": Broken(world)}, ACTOR, world).submit(BIND)

    run_virtually(scene())


def test_a_client_needs_a_link() -> None:
    with pytest.raises(ValueError, match="at least one endpoint"):
        AuthorityClient({}, ACTOR, virtual_world())


# ------------------------------------------------------------------------------------------------------ which endpoint


def test_a_hint_is_followed_at_once_and_remembered() -> None:
    async def scene() -> None:
        b = bench(["turned c"], [], [])
        began_ms = b.world.clock.now_ms()
        await b.client.submit(BIND)
        await b.client.submit(BIND)
        assert b.world.clock.now_ms() == began_ms
        assert [len(endpoint.sent_ms) for endpoint in b.endpoints.values()] == [1, 0, 2]

    run_virtually(scene())


def test_two_that_point_at_each_other_do_not_spin_the_client() -> None:
    async def scene() -> None:
        b = bench([], [], budget=PLENTY)
        b.endpoints["a"].then, b.endpoints["b"].then = "turned b", "turned a"
        began_ms = b.world.clock.now_ms()
        with pytest.raises(RetriesExhausted, match="16 attempts failed"):
            await b.client.submit(BIND)
        assert b.world.clock.now_ms() > began_ms

    run_virtually(scene())


@pytest.mark.parametrize("hint", ["", "a", "unknown"])
def test_without_a_useful_hint_the_next_link_is_asked(hint: str) -> None:
    async def scene() -> None:
        b = bench([f"turned {hint}"], ["lose before"], [])
        assert await b.client.submit(BIND) == Accepted(1)
        assert [len(endpoint.sent_ms) for endpoint in b.endpoints.values()] == [1, 1, 1]

    run_virtually(scene())


def sent(b: Bench) -> list[int]:
    return [len(endpoint.sent_ms) for endpoint in b.endpoints.values()]


def test_whoever_leads_is_asked_directly() -> None:
    """The status tells who it is; one that passes on costs a hop and a look into the store."""

    async def scene() -> None:
        b = bench([], [], [])
        b.authority.leader = "c"
        await b.client.submit(BIND)
        assert sent(b) == [0, 0, 1]

    run_virtually(scene())


def test_one_that_strayed_learns_who_leads_before_it_asks_again__also_to_renew() -> None:
    async def scene() -> None:
        b = bench(["turned"], [], [])
        await b.client.submit(BIND)
        assert sent(b) == [1, 1, 0], "b passed it on"
        b.authority.leader = "c"
        assert (await b.client.renew(ACTOR)).held
        assert sent(b) == [1, 1, 1]
        assert b.authority.statuses == 2
        assert (await b.client.renew(ACTOR)).held
        assert b.authority.statuses == 2, "it has not strayed since"

    run_virtually(scene())


def test_a_leader_that_cannot_be_reached_is_not_tried_before_every_call() -> None:
    async def scene() -> None:
        b = bench([], [], [])
        b.endpoints["a"].then = "hang before"
        for _ in range(4):
            await b.client.submit(BIND)
        assert sent(b) == [1, 4, 0]
        await b.world.clock.sleep_ms(WINDOW_MS // 2)
        b.endpoints["a"].then = "pass"
        await b.client.submit(BIND)
        assert sent(b) == [2, 4, 0], "but now and then it is"

    run_virtually(scene())


def test_an_overloaded_endpoint_is_left_alone_for_as_long_as_it_says() -> None:
    async def scene() -> None:
        b = bench(["overloaded 2000"])
        await b.client.submit(BIND)
        first_ms, second_ms = b.endpoints["a"].sent_ms
        assert 2_000 <= second_ms - first_ms <= 2_050
        b.endpoints["a"].script = ["overloaded 60000"]
        began_ms = b.world.clock.now_ms()
        with pytest.raises(RetriesExhausted, match="before the next attempt"):
            await b.client.submit(BIND)
        assert b.world.clock.now_ms() == began_ms

    run_virtually(scene())


# --------------------------------------------------------------------------------------------------------- status


def test_the_status_is_read_again_after_half_a_window() -> None:
    async def scene() -> None:
        b = bench()
        for wait_ms, statuses in [(0, 1), (WINDOW_MS // 2 - 1, 1), (1, 2), (0, 2), (5 * WINDOW_MS, 3)]:
            await b.world.clock.sleep_ms(wait_ms)
            await b.client.submit(BIND)
            assert b.authority.statuses == statuses
        assert len(b.authority.deeds) == 5

    run_virtually(scene())


def test_many_callers_share_one_status() -> None:
    async def scene() -> None:
        b = bench()
        b.endpoints["a"].status_script = ["delay 100"]
        await asyncio.gather(*(b.client.submit(BIND) for _ in range(50)))
        assert b.authority.statuses == 1
        assert len(b.authority.deeds) == 50

    run_virtually(scene())


def test_callers_behind_a_status_that_hangs_keep_their_own_deadlines() -> None:
    async def scene() -> None:
        b = bench()
        b.endpoints["a"].status_script = ["hang before"] * 99
        patient = asyncio.ensure_future(b.client.submit(BIND))
        await b.world.clock.sleep_ms(0)
        began_ms = b.world.clock.now_ms()
        with pytest.raises(RetriesExhausted, match="nothing was submitted"):
            await b.client.submit(BIND, deadline_ms=500)
        assert b.world.clock.now_ms() - began_ms == 500
        with pytest.raises(RetriesExhausted):
            await patient

    run_virtually(scene())


def test_an_endpoint_that_lags_does_not_turn_windows_back() -> None:
    async def scene() -> None:
        b = bench()
        now = (await b.client.status()).window
        b.authority.window_shift = -2
        assert (await b.client.status()).window == now
        b.authority.incarnation = "inc2"
        assert (await b.client.status()).window == now - 2

    run_virtually(scene())


# -------------------------------------------------------------------------------------------------------- expired ids


def test_an_expired_id_that_was_never_executed_is_asked_once_more_under_a_fresh_one() -> None:
    """The scope was restored since the status was read: its ids have another incarnation now."""

    async def scene() -> None:
        b = bench(["pass", "turned", "overloaded 5", "pass"])
        await b.client.submit(BIND)
        b.authority.incarnation = "inc2"
        assert await b.client.submit(BIND) == Accepted(2)
        assert len(b.authority.deeds) == 2
        assert [parse_operation_id(operation.id) for operation in b.authority.asked[1:]] == [
            ("inc1", b.authority.window()),
            ("inc2", b.authority.window()),
        ]

    run_virtually(scene())


def test_after_a_silence_an_expired_id_is_not_changed() -> None:
    """The first try was committed, its answer lost, and the machine slept past the retention."""

    async def scene() -> None:
        b = bench(["suspend after"], shape=RetryPolicy(deadline_ms=20 * WINDOW_MS))
        assert await b.client.submit(BIND) == EXPIRED
        assert len(b.authority.deeds) == 1
        assert len(ids_asked(b)) == 1

    run_virtually(scene())


def test_an_expired_id_that_the_caller_gave_is_not_changed() -> None:
    async def scene() -> None:
        b = bench()
        assert await b.client.submit(BIND, operation_id=OperationID("inc0.1.mine")) == EXPIRED
        assert b.authority.deeds == []

    run_virtually(scene())


def test_an_id_that_expires_twice_is_refused() -> None:
    async def scene() -> None:
        b = bench()
        b.authority.window_shift = -10
        assert await b.client.submit(BIND) == EXPIRED
        assert len(b.authority.asked) == 2
        assert b.authority.statuses == 2

    run_virtually(scene())


def test_an_expired_id_stays_refused_if_no_new_status_can_be_had() -> None:
    async def scene() -> None:
        b = bench()
        await b.client.submit(BIND)
        b.authority.incarnation = "inc2"
        b.endpoints["a"].status_script = ["hang before"] * 99
        assert await b.client.submit(BIND) == EXPIRED

    run_virtually(scene())


@pytest.mark.parametrize("failure", [OutcomeUnknown(), NotLeader()])
def test_in_a_batch_only_the_expired_are_asked_anew_and_no_answer_then_hands_back_all(failure: EndpointError) -> None:
    class OneExpired(FakeAuthority):
        """Refuses the second operation of its first batch as expired."""

        async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
            if self.asked:
                self.asked.extend(operations)
                if hanging:
                    raise failure
                return [self._one(operation) for operation in operations]
            self.asked.extend(operations)
            return [EXPIRED if index == 1 else self._one(operation) for index, operation in enumerate(operations)]

    hanging = False

    async def scene() -> None:
        nonlocal hanging
        world = virtual_world()
        authority = OneExpired(world)
        assert await AuthorityClient({"a": authority}, ACTOR, world).submit_many([BIND] * 3) == [
            Accepted(1),
            Accepted(3),
            Accepted(2),
        ]
        assert len(authority.asked) == 4

        hanging, authority = True, OneExpired(world)
        client = AuthorityClient({"a": authority}, ACTOR, world)
        with pytest.raises(RetriesExhausted) as caught:
            await client.submit_many([BIND] * 3)
        assert caught.value.outcome_unknown  # two of them have happened, whatever became of the third
        first, changed, third = caught.value.operation_ids
        assert [operation.id for operation in authority.asked[:4]] == [first, authority.asked[1].id, third, changed]
        hanging = False
        assert await client.resume(caught.value.operations) == [Accepted(1), Accepted(3), Accepted(2)]

    run_virtually(scene())


# ------------------------------------------------------------------------------------------------------------- abandon


def test_abandoning_what_has_happened_answers_its_outcome() -> None:
    async def scene() -> None:
        b = bench([], then="lose after")
        with pytest.raises(RetriesExhausted) as caught:
            await b.client.submit(BIND)
        b.endpoints["a"].then = "pass"
        (lost,) = caught.value.operation_ids
        assert await b.client.abandon(lost) == Accepted(1)

    run_virtually(scene())


def test_abandoning_what_has_not_happened_keeps_it_from_happening() -> None:
    async def scene() -> None:
        b = bench([], then="lose before")
        with pytest.raises(RetriesExhausted) as caught:
            await b.client.submit(BIND)
        b.endpoints["a"].then, b.endpoints["a"].script = "pass", ["lose after"]
        (lost,) = caught.value.operation_ids
        assert await b.client.abandon(lost) == Refused(Code.ABANDONED)
        assert await b.client.resume(caught.value.operations) == [Refused(Code.ABANDONED)]
        assert b.authority.deeds == []
        assert lost not in {operation.id for operation in b.authority.asked[:-1]}  # abandon has an id of its own

    run_virtually(scene())


# ------------------------------------------------------------------------------------------------------ the last reason


def test_the_disk_stays_full__no_answer_says_so() -> None:
    """F11: that the deadline passed helps nobody; why it passed does."""

    async def scene() -> None:
        b = bench(then="overloaded 200 no room at /data; free space there")
        with pytest.raises(RetriesExhausted) as caught:
            await b.client.submit(BIND, deadline_ms=2_000)
        assert "(last error: no room at /data; free space there)" in caught.value.reason
        assert "none of 1 operations was applied" in str(caught.value)
        assert not caught.value.outcome_unknown

    run_virtually(scene())


def test_the_last_reason_counts__and_a_try_without_a_word_does_not_hide_it() -> None:
    async def scene() -> None:
        b = bench(["overloaded 1 first", "overloaded 1 second"], then="turned")
        with pytest.raises(RetriesExhausted, match=r"\(last error: second\)"):
            await b.client.submit(BIND, deadline_ms=2_000)
        b = bench(["overloaded 1 first"], then="lose after")
        with pytest.raises(RetriesExhausted, match=r"\(last error: the answer was lost\)") as caught:
            await b.client.submit(BIND, deadline_ms=2_000)
        assert caught.value.outcome_unknown

    run_virtually(scene())


def test_the_reason_of_a_status_that_never_came_is_told_too() -> None:
    async def scene() -> None:
        b = bench()
        b.endpoints["a"].status_script = ["overloaded 1 the store is away"] * 100
        with pytest.raises(RetriesExhausted, match=r"\(last error: the store is away\); nothing was submitted"):
            await b.client.submit(BIND, deadline_ms=2_000)

    run_virtually(scene())


def test_nobody_said_why__nothing_is_made_up() -> None:
    async def scene() -> None:
        b = bench(then="turned")
        with pytest.raises(RetriesExhausted) as caught:
            await b.client.submit(BIND, deadline_ms=2_000)
        assert "last error" not in str(caught.value)

    run_virtually(scene())
