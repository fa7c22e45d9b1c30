"""Authority client: stable operation ids, bounded retries, faulty endpoints."""

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


def submitted_ids(b: Bench) -> set[str]:
    return {operation.id for operation in b.authority.submitted}


# ------------------------------------------------------------------------------------------------------- one id per operation


@pytest.mark.parametrize("fault", ["lose after", "hang after", "short answer"])
def test_bind_times_out_after_commit__retry_finds_the_same_binding(fault: str) -> None:
    """F01."""

    async def scene() -> None:
        b = bench([fault])
        assert await b.client.submit(BIND) == Accepted(1)
        assert len(b.authority.applied) == 1
        assert len(b.authority.submitted) == 2
        assert len(submitted_ids(b)) == 1

    run_virtually(scene())


@pytest.mark.parametrize("fault", ["lose before", "hang before", "redirect", "overloaded 10", "delay 500", "duplicate"])
def test_transport_fault_leaves_one_effect_under_one_id(fault: str) -> None:
    async def scene() -> None:
        b = bench([fault, fault], [])
        assert await b.client.submit(BIND) == Accepted(1)
        assert len(b.authority.applied) == 1
        assert len(submitted_ids(b)) == 1

    run_virtually(scene())


FAULTS = [
    "pass",
    "lose before",
    "lose after",
    "hang after",
    "hang before",
    "redirect",
    "redirect a",
    "overloaded 30",
    "duplicate",
]
SCRIPT = st.lists(st.sampled_from(FAULTS), max_size=8)


@given(scripts=st.lists(SCRIPT, min_size=1, max_size=3), claims=st.integers(1, 4), seed=st.integers(0, 99))
def test_mixed_faults_keep_one_id_per_operation_and_meet_deadline(scripts: list[list[str]], claims: int, seed: int) -> None:
    async def scene() -> None:
        b = bench(*scripts, budget=RetryBudget(per_second=1_000, tokens_max=1_000), seed=str(seed))
        began_ms = b.world.clock.now_ms()
        try:
            verdicts = await b.client.submit_many([BIND] * claims)
        except RetriesExhausted as error:
            assert len(error.operations) == claims
            assert submitted_ids(b) <= set(error.operation_ids)
            assert error.outcome_unknown or not b.authority.applied
            for endpoint in b.endpoints.values():
                endpoint.script.clear()
            verdicts = await b.client.resume(error.operations, submitted_ms=error.submitted_ms)
        else:
            assert b.world.clock.now_ms() - began_ms <= 10_000
        assert sorted(verdict.revision for verdict in verdicts) == list(range(1, claims + 1))
        assert len(b.authority.applied) == len(submitted_ids(b)) == claims

    run_virtually(scene())


def test_operation_ids_carry_incarnation_and_window() -> None:
    async def scene() -> None:
        b = bench()
        await b.client.submit_many([BIND, BIND])
        first, second = b.authority.submitted
        assert parse_operation_id(first.id) == parse_operation_id(second.id) == ("inc1", b.authority.window())
        assert first.id != second.id
        assert parse_operation_id(await b.client.new_operation_id()) == ("inc1", b.authority.window())

    run_virtually(scene())


def test_given_id_is_used_without_status() -> None:
    async def scene() -> None:
        b = bench(["lose after"])
        b.endpoints["a"].status_script = ["hang before"] * 99
        mine = OperationID(f"inc1.{b.authority.window()}.mine")
        assert await b.client.submit(BIND, operation_id=mine) == Accepted(1)
        assert await b.client.submit(BIND, operation_id=mine) == Accepted(1)
        assert submitted_ids(b) == {mine}
        assert b.authority.statuses == 0

    run_virtually(scene())


def test_empty_batch_sends_nothing() -> None:
    async def scene() -> None:
        b = bench()
        assert await b.client.submit_many([]) == []
        assert await b.client.resume([]) == []
        assert b.authority.statuses == 0

    run_virtually(scene())


def test_evidence_age_grows_over_retries() -> None:
    async def scene() -> None:
        b = bench(["hang before"], ["pass"])
        await b.client.submit(BIND, evidence=Evidence(9, 100))
        await b.client.submit(BIND)
        aged, none = b.authority.submitted
        assert aged.evidence.revision == 9
        assert 3_100 <= aged.evidence.age_ms <= 3_300
        assert none.evidence == Evidence()

    run_virtually(scene())


# ----------------------------------------------------------------------------------------------------- deadlines and budgets


def test_deadline_is_met_and_ids_can_be_resumed() -> None:
    async def scene() -> None:
        b = bench([], then="hang after", budget=PLENTY)
        began_ms = b.world.clock.now_ms()
        with pytest.raises(RetriesExhausted, match="may have been applied: resume the same ids, or abandon") as caught:
            await b.client.submit_many([BIND, BIND])
        assert b.world.clock.now_ms() - began_ms <= 10_000
        assert set(caught.value.operation_ids) == submitted_ids(b)
        assert caught.value.outcome_unknown
        b.endpoints["a"].then = "pass"
        verdicts = await b.client.resume(caught.value.operations, submitted_ms=caught.value.submitted_ms)
        assert verdicts == [Accepted(1), Accepted(2)]
        assert len(b.authority.applied) == 2

    run_virtually(scene())


def test_call_may_set_its_own_deadline() -> None:
    async def scene() -> None:
        b = bench([], then="hang before")
        began_ms = b.world.clock.now_ms()
        with pytest.raises(RetriesExhausted):
            await b.client.submit(BIND, deadline_ms=700)
        assert b.world.clock.now_ms() - began_ms <= 700

    run_virtually(scene())


def test_calls_surely_not_received_report_nothing_applied() -> None:
    async def scene() -> None:
        b = bench([], then="redirect", shape=RetryPolicy(attempts_max=3))
        with pytest.raises(RetriesExhausted, match="none of 1 operations was applied") as caught:
            await b.client.submit(BIND)
        assert not caught.value.outcome_unknown
        assert len(b.endpoints["a"].sent_ms) == 3

    run_virtually(scene())


def test_nothing_is_submitted_without_status() -> None:
    async def scene() -> None:
        b = bench()
        b.endpoints["a"].status_script = ["hang before"] * 99
        with pytest.raises(RetriesExhausted, match="nothing was submitted") as caught:
            await b.client.submit(BIND)
        assert caught.value.operations == ()
        assert not caught.value.outcome_unknown
        assert b.authority.submitted == []

    run_virtually(scene())


def test_lost_status_reply_does_not_count_as_unknown_outcome() -> None:
    async def scene() -> None:
        b = bench([], then="redirect", shape=RetryPolicy(attempts_max=4))
        b.endpoints["a"].status_script = ["lose after"]
        with pytest.raises(RetriesExhausted) as caught:
            await b.client.submit(BIND)
        assert not caught.value.outcome_unknown

    run_virtually(scene())


def test_retry_budget_caps_retries_of_many_callers() -> None:
    """F32, F40: a hundred callers of a dead authority share one budget instead of sixteen tries each."""

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


def test_exhausted_budget_fails_call_before_deadline() -> None:
    async def scene() -> None:
        b = bench([], then="lose before", budget=RetryBudget(percent=0, per_second=0, tokens_max=1))
        began_ms = b.world.clock.now_ms()
        with pytest.raises(RetriesExhausted, match="the retry budget is exhausted"):
            await b.client.submit(BIND)
        assert b.world.clock.now_ms() == began_ms

    run_virtually(scene())


def test_cancellation_of_call_propagates() -> None:
    async def scene() -> None:
        b = bench([], then="hang before")
        call = asyncio.ensure_future(b.client.submit(BIND))
        await b.world.clock.sleep_ms(50)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    run_virtually(scene())


def test_exception_other_than_endpoint_error_propagates() -> None:
    class Broken(FakeAuthority):
        async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
            raise KeyError("bug")

    async def scene() -> None:
        world = virtual_world()
        with pytest.raises(KeyError):
            await AuthorityClient({"a": Broken(world)}, ACTOR, world).submit(BIND)

    run_virtually(scene())


def test_client_without_endpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one endpoint"):
        AuthorityClient({}, ACTOR, virtual_world())


# ------------------------------------------------------------------------------------------------------ choice of endpoint


def test_leader_hint_is_followed_at_once_and_remembered() -> None:
    async def scene() -> None:
        b = bench(["redirect c"], [], [])
        began_ms = b.world.clock.now_ms()
        await b.client.submit(BIND)
        await b.client.submit(BIND)
        assert b.world.clock.now_ms() == began_ms
        assert [len(endpoint.sent_ms) for endpoint in b.endpoints.values()] == [1, 0, 2]

    run_virtually(scene())


def test_endpoints_hinting_at_each_other_are_retried_with_backoff() -> None:
    async def scene() -> None:
        b = bench([], [], budget=PLENTY)
        b.endpoints["a"].then, b.endpoints["b"].then = "redirect b", "redirect a"
        began_ms = b.world.clock.now_ms()
        with pytest.raises(RetriesExhausted, match="16 attempts failed"):
            await b.client.submit(BIND)
        assert b.world.clock.now_ms() > began_ms

    run_virtually(scene())


@pytest.mark.parametrize("hint", ["", "a", "unknown"])
def test_next_endpoint_is_tried_without_useful_hint(hint: str) -> None:
    async def scene() -> None:
        b = bench([f"redirect {hint}"], ["lose before"], [])
        assert await b.client.submit(BIND) == Accepted(1)
        assert [len(endpoint.sent_ms) for endpoint in b.endpoints.values()] == [1, 1, 1]

    run_virtually(scene())


def sent(b: Bench) -> list[int]:
    return [len(endpoint.sent_ms) for endpoint in b.endpoints.values()]


def test_leader_from_status_is_called_directly() -> None:
    """A non-leader would forward the request, at the cost of a hop and a store read."""

    async def scene() -> None:
        b = bench([], [], [])
        b.authority.leader = "c"
        await b.client.submit(BIND)
        assert sent(b) == [0, 0, 1]

    run_virtually(scene())


def test_client_rereads_leader_after_redirect_also_for_renewal() -> None:
    async def scene() -> None:
        b = bench(["redirect"], [], [])
        await b.client.submit(BIND)
        assert sent(b) == [1, 1, 0], "b forwarded it"
        b.authority.leader = "c"
        assert (await b.client.renew(ACTOR)).held
        assert sent(b) == [1, 1, 1]
        assert b.authority.statuses == 2
        assert (await b.client.renew(ACTOR)).held
        assert b.authority.statuses == 2, "no redirect since"

    run_virtually(scene())


def test_unreachable_leader_is_not_tried_before_every_call() -> None:
    async def scene() -> None:
        b = bench([], [], [])
        b.endpoints["a"].then = "hang before"
        for _ in range(4):
            await b.client.submit(BIND)
        assert sent(b) == [1, 4, 0]
        await b.world.clock.sleep_ms(WINDOW_MS // 2)
        b.endpoints["a"].then = "pass"
        await b.client.submit(BIND)
        assert sent(b) == [2, 4, 0], "tried again after half a window"

    run_virtually(scene())


def test_overloaded_endpoint_is_left_alone_for_retry_after() -> None:
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


def test_status_is_refreshed_after_half_window() -> None:
    async def scene() -> None:
        b = bench()
        for wait_ms, statuses in [(0, 1), (WINDOW_MS // 2 - 1, 1), (1, 2), (0, 2), (5 * WINDOW_MS, 3)]:
            await b.world.clock.sleep_ms(wait_ms)
            await b.client.submit(BIND)
            assert b.authority.statuses == statuses
        assert len(b.authority.applied) == 5

    run_virtually(scene())


def test_concurrent_callers_share_one_status() -> None:
    async def scene() -> None:
        b = bench()
        b.endpoints["a"].status_script = ["delay 100"]
        await asyncio.gather(*(b.client.submit(BIND) for _ in range(50)))
        assert b.authority.statuses == 1
        assert len(b.authority.applied) == 50

    run_virtually(scene())


def test_callers_waiting_for_status_keep_their_deadlines() -> None:
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


def test_lagging_endpoint_does_not_move_window_back() -> None:
    async def scene() -> None:
        b = bench()
        now = (await b.client.status()).window
        b.authority.window_shift = -2
        assert (await b.client.status()).window == now
        b.authority.incarnation = "inc2"
        assert (await b.client.status()).window == now - 2

    run_virtually(scene())


# -------------------------------------------------------------------------------------------------------- expired ids


def test_expired_id_never_applied_is_retried_once_under_fresh_id() -> None:
    """The scope was restored after the status was read: ids have another incarnation now."""

    async def scene() -> None:
        b = bench(["pass", "redirect", "overloaded 5", "pass"])
        await b.client.submit(BIND)
        b.authority.incarnation = "inc2"
        assert await b.client.submit(BIND) == Accepted(2)
        assert len(b.authority.applied) == 2
        assert [parse_operation_id(operation.id) for operation in b.authority.submitted[1:]] == [
            ("inc1", b.authority.window()),
            ("inc2", b.authority.window()),
        ]

    run_virtually(scene())


def test_expired_id_of_unknown_outcome_is_kept() -> None:
    """The first try was committed, its reply lost, and the machine slept past the retention."""

    async def scene() -> None:
        b = bench(["suspend after"], shape=RetryPolicy(deadline_ms=20 * WINDOW_MS))
        assert await b.client.submit(BIND) == EXPIRED
        assert len(b.authority.applied) == 1
        assert len(submitted_ids(b)) == 1

    run_virtually(scene())


def test_expired_id_given_by_caller_is_kept() -> None:
    async def scene() -> None:
        b = bench()
        assert await b.client.submit(BIND, operation_id=OperationID("inc0.1.mine")) == EXPIRED
        assert b.authority.applied == []

    run_virtually(scene())


def test_id_that_expires_twice_is_refused() -> None:
    async def scene() -> None:
        b = bench()
        b.authority.window_shift = -10
        assert await b.client.submit(BIND) == EXPIRED
        assert len(b.authority.submitted) == 2
        assert b.authority.statuses == 2

    run_virtually(scene())


def test_expired_id_is_refused_when_status_is_unavailable() -> None:
    async def scene() -> None:
        b = bench()
        await b.client.submit(BIND)
        b.authority.incarnation = "inc2"
        b.endpoints["a"].status_script = ["hang before"] * 99
        assert await b.client.submit(BIND) == EXPIRED

    run_virtually(scene())


@pytest.mark.parametrize("failure", [OutcomeUnknown(), NotLeader()])
def test_only_expired_operations_of_batch_are_retried_and_failure_returns_all(failure: EndpointError) -> None:
    class OneExpired(FakeAuthority):
        """Refuses the second operation of its first batch as expired."""

        async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
            if self.submitted:
                self.submitted.extend(operations)
                if hanging:
                    raise failure
                return [self._one(operation) for operation in operations]
            self.submitted.extend(operations)
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
        assert len(authority.submitted) == 4

        hanging, authority = True, OneExpired(world)
        client = AuthorityClient({"a": authority}, ACTOR, world)
        with pytest.raises(RetriesExhausted) as caught:
            await client.submit_many([BIND] * 3)
        assert caught.value.outcome_unknown  # two of the operations are applied
        first, changed, third = caught.value.operation_ids
        assert [operation.id for operation in authority.submitted[:4]] == [first, authority.submitted[1].id, third, changed]
        hanging = False
        assert await client.resume(caught.value.operations) == [Accepted(1), Accepted(3), Accepted(2)]

    run_virtually(scene())


# ------------------------------------------------------------------------------------------------------------- abandon


def test_abandon_of_applied_operation_returns_its_outcome() -> None:
    async def scene() -> None:
        b = bench([], then="lose after")
        with pytest.raises(RetriesExhausted) as caught:
            await b.client.submit(BIND)
        b.endpoints["a"].then = "pass"
        (lost,) = caught.value.operation_ids
        assert await b.client.abandon(lost) == Accepted(1)

    run_virtually(scene())


def test_abandon_of_unapplied_operation_prevents_it() -> None:
    async def scene() -> None:
        b = bench([], then="lose before")
        with pytest.raises(RetriesExhausted) as caught:
            await b.client.submit(BIND)
        b.endpoints["a"].then, b.endpoints["a"].script = "pass", ["lose after"]
        (lost,) = caught.value.operation_ids
        assert await b.client.abandon(lost) == Refused(Code.ABANDONED)
        assert await b.client.resume(caught.value.operations) == [Refused(Code.ABANDONED)]
        assert b.authority.applied == []
        assert lost not in {operation.id for operation in b.authority.submitted[:-1]}  # the abandon has an id of its own

    run_virtually(scene())


# ------------------------------------------------------------------------------------------------------ last error


def test_error_after_deadline_names_full_disk_as_last_error() -> None:
    """F11: an operator needs the cause, not the passed deadline."""

    async def scene() -> None:
        b = bench(then="overloaded 200 no room at /data; free space there")
        with pytest.raises(RetriesExhausted) as caught:
            await b.client.submit(BIND, deadline_ms=2_000)
        assert "(last error: no room at /data; free space there)" in caught.value.reason
        assert "none of 1 operations was applied" in str(caught.value)
        assert not caught.value.outcome_unknown

    run_virtually(scene())


def test_latest_reason_wins_and_error_without_reason_keeps_it() -> None:
    async def scene() -> None:
        b = bench(["overloaded 1 first", "overloaded 1 second"], then="redirect")
        with pytest.raises(RetriesExhausted, match=r"\(last error: second\)"):
            await b.client.submit(BIND, deadline_ms=2_000)
        b = bench(["overloaded 1 first"], then="lose after")
        with pytest.raises(RetriesExhausted, match=r"\(last error: the answer was lost\)") as caught:
            await b.client.submit(BIND, deadline_ms=2_000)
        assert caught.value.outcome_unknown

    run_virtually(scene())


def test_reason_of_failed_status_is_reported() -> None:
    async def scene() -> None:
        b = bench()
        b.endpoints["a"].status_script = ["overloaded 1 the store is away"] * 100
        with pytest.raises(RetriesExhausted, match=r"\(last error: the store is away\); nothing was submitted"):
            await b.client.submit(BIND, deadline_ms=2_000)

    run_virtually(scene())


def test_error_without_reason_reports_no_last_error() -> None:
    async def scene() -> None:
        b = bench(then="redirect")
        with pytest.raises(RetriesExhausted) as caught:
            await b.client.submit(BIND, deadline_ms=2_000)
        assert "last error" not in str(caught.value)

    run_virtually(scene())
