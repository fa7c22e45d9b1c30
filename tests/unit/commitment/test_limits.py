"""Bounds on leases, summaries, conditions, policy revisions and time samples."""

from __future__ import annotations

import pytest

from remit.commitment import books
from remit.commitment.rulings import evidence, leases, policies
from remit.commitment.rulings.registry import DETAIL_CHARS_MAX
from remit.model.claims import (
    Acquire,
    Actor,
    Apply,
    Bind,
    Code,
    Delete,
    Issue,
    RecordDecision,
    RecordEvent,
    Refused,
    Report,
    Reserve,
    Rollback,
    SetCondition,
    Vacate,
)
from remit.model.kinds import Policy, PolicyAllow, PolicyRule, PolicySpec
from remit.model.metadata import Condition, Metadata
from remit.model.records import DecisionSpec, EventSpec, SummarySpec
from remit.model.resources import Duration
from remit.model.roles import Role
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, amounts, scope_test, workload
from tests.unit.commitment.authority_fixture import T1, commit_transitions, slice_of, spawn_replicas, transition_claim

MINUTE = Duration(60_000)


# -- leases -----------------------------------------------------------------------------------------------------------------


def test_lease_count_is_limited_but_leases_change_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    @scope_test
    async def run_test(scope: Scope) -> None:
        monkeypatch.setattr(leases, "LEASES_MAX", len(scope.books.keys("lease/")))
        assert await scope.refused(Actor("x", Role.SCHEDULER), Acquire("scheduler/x", HOUR)) is Code.LIMIT
        await scope.acquire("scheduler")
        monkeypatch.setattr(leases, "LEASES_MAX", len(scope.books.keys("lease/")) + 1)
        await scope.acquire("scheduler/x")

    run_test()


@scope_test
async def test_lease_term_outside_bounds_is_refused(scope: Scope) -> None:
    actor = Actor("x", Role.SCHEDULER)
    for ttl in (0, 99, 3_600_001):
        assert await scope.refused(actor, Acquire("scheduler/x", Duration(ttl))) is Code.INVALID
    await scope.must(actor, Acquire("scheduler/x", Duration(100)), Acquire("scheduler/x", Duration(3_600_000)))


@scope_test
async def test_lease_name_must_match_role_and_length(scope: Scope) -> None:
    actor = Actor("x", Role.SCHEDULER)
    for name in ("", "agent/n1", "schedulers", "scheduler/", "scheduler/" + "x" * 244):
        assert await scope.refused(actor, Acquire(name, HOUR)) is Code.NOT_OWNER, name
    await scope.must(actor, Acquire("scheduler/" + "x" * 243, HOUR))


@scope_test
async def test_lease_holder_name_length_is_checked(scope: Scope) -> None:
    for name in ("", "x" * 254):
        assert await scope.refused(Actor(name, Role.SCHEDULER), Acquire("scheduler/x", HOUR)) is Code.INVALID
    await scope.must(Actor("x" * 253, Role.SCHEDULER), Acquire("scheduler/x", HOUR))


def test_lease_limit_counts_leases_of_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    @scope_test
    async def run_test(scope: Scope) -> None:
        monkeypatch.setattr(leases, "LEASES_MAX", len(scope.books.keys("lease/")) + 2)
        claims = [Acquire(f"scheduler/{n}", HOUR) for n in range(4)]
        verdicts = await scope.ask(Actor("x", Role.SCHEDULER), *claims)
        assert [v.code if isinstance(v, Refused) else None for v in verdicts] == [None, None, Code.LIMIT, Code.LIMIT]

    run_test()


@scope_test
async def test_invalid_names_of_events_reports_and_decisions_are_refused(scope: Scope) -> None:
    """Names become parts of bounded keys; a caller's error must not be reported as a fault of the authority."""
    report, summed, explained = (
        EventSpec(regarding="node/n1"),
        SummarySpec(holder="x", epoch=1, sequence=1),
        DecisionSpec(replicas={"w-0": ""}),
    )
    for name in ("", "x" * 241, "ü" * 121):
        for claim in (
            RecordEvent(name, report),
            Report(name, summed),
            RecordDecision(name, "t1", explained),
            RecordDecision("d", name, explained),
        ):
            assert await scope.refused(USER, claim) is Code.INVALID, claim
    longest = "ü" * 120
    await scope.must(USER, RecordEvent(longest, report), Report(longest, summed), RecordDecision(longest, "t1", explained))
    assert await scope.refused(USER, RecordDecision("c", "a/b", explained)) is Code.INVALID, "key of b/c in tenant a"


@scope_test
async def test_actor_without_valid_lease_of_role_is_refused_as_stale_epoch(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    good = scope.actors["scheduler"]
    for lease in ("", "repair", "scheduler/none"):
        stranger = Actor(good.name, good.role, lease, good.epoch)
        assert await scope.refused(stranger, Bind(key, scope.at(key), "n1", T1)) is Code.STALE_EPOCH, lease
    repair = scope.actors["repair"]
    posing = Actor(repair.name, Role.SCHEDULER, repair.lease, repair.epoch)
    assert await scope.refused(posing, Bind(key, scope.at(key), "n1", T1)) is Code.STALE_EPOCH, "a lease of another role"
    assert not await scope.lead.authority.renew(posing)
    thief = Actor("thief", good.role, good.lease, good.epoch)
    assert await scope.refused(thief, Bind(key, scope.at(key), "n1", T1)) is Code.STALE_EPOCH, "right epoch, wrong holder"


@scope_test
async def test_vacated_lease_is_free_and_former_holder_refused(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    old = scope.actors["scheduler"]
    other = scope.actors["repair"]
    assert await scope.refused(other, Vacate("scheduler")) is Code.STALE_EPOCH, "not the holder"
    assert await scope.must(old, Vacate("scheduler")) == [old.epoch]
    assert await scope.refused(old, Bind(key, scope.at(key), "n1", T1)) is Code.STALE_EPOCH
    assert not await scope.lead.authority.renew(old)
    rival = Actor("rival", Role.SCHEDULER)
    assert await scope.must(rival, Acquire("scheduler", HOUR)) == [old.epoch + 1]


# -- summaries, conditions, policies ---------------------------------------------------------------------------------------


def report(name: str, sequence: int = 1, epoch: int = 1, cpu: str = "1") -> Report:
    return Report(name, SummarySpec(holder=name, epoch=epoch, sequence=sequence, used=amounts(cpu=cpu)))


def test_summary_count_is_limited_but_summaries_are_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "SUMMARIES_MAX", 2)

    @scope_test
    async def run_test(scope: Scope) -> None:
        *_, third = await scope.ask(USER, report("a"), report("b"), report("c"))
        assert isinstance(third, Refused) and third.code is Code.LIMIT, "within one batch too"
        assert await scope.refused(USER, report("c")) is Code.LIMIT
        assert await scope.must(USER, report("a", 2)) == [2]

    run_test()


@scope_test
async def test_later_summary_wins_and_its_sequence_is_returned(scope: Scope) -> None:
    assert await scope.must(USER, report("a", 5, cpu="5")) == [5]
    assert await scope.must(USER, report("a", 4, cpu="4")) == [5], "a late summary changes nothing"
    assert await scope.must(USER, report("a", 1, epoch=2, cpu="7")) == [1], "the epoch precedes the sequence"
    assert scope.row("summary/a")["spec"]["used"] == {"cpu": "7"}


def condition(kind: str, generation: int = 1, status: str = "True", at: str = "2026-01-01T00:00:00Z") -> SetCondition:
    return SetCondition(
        "Workload",
        "w",
        Condition(type=kind, status=status, observed_generation=generation, last_transition=at),  # type: ignore[arg-type]
        "t1",
    )


@scope_test
async def test_condition_count_is_limited_but_conditions_are_updated(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w")))
    await scope.must(USER, *(condition(f"C{n}") for n in range(evidence.CONDITIONS_MAX)))
    assert await scope.refused(USER, condition("One-More")) is Code.LIMIT
    await scope.must(USER, condition("C0", 2, "False"))
    kept = scope.row("workload/t1/w")["status"]["conditions"]
    assert len(kept) == evidence.CONDITIONS_MAX
    assert [c["status"] for c in kept if c["type"] == "C0"] == ["False"]
    await scope.must(USER, condition("C0", 1, "True"))
    assert scope.row("workload/t1/w")["status"]["conditions"] == kept, "an older observed generation is ignored"


@scope_test
async def test_condition_on_unsupported_or_missing_object_is_refused(scope: Scope) -> None:
    ready = Condition(type="Ready", status="True")
    assert await scope.refused(USER, SetCondition("Workload", "none", ready, "t1")) is Code.NOT_FOUND
    assert await scope.refused(USER, SetCondition("Tenant", "none", ready)) is Code.NOT_FOUND
    assert await scope.refused(USER, SetCondition("Lease", "scheduler", ready)) is Code.NOT_FOUND
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("1", "scheduler")))
    assert await scope.refused(USER, SetCondition("Grant", "offer", ready)) is Code.NOT_FOUND


def test_only_latest_policy_revisions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "POLICY_REVISIONS_KEPT", 3)

    @scope_test
    async def run_test(scope: Scope) -> None:
        rule = PolicyRule(allow=PolicyAllow(zones=("a",)))
        for name in "abcde":
            await scope.must(OPERATOR, Apply(Policy(metadata=Metadata(name=name), spec=PolicySpec(rules=(rule,)))))
        numbers = [int(key.rsplit("/", 1)[1]) for key in await scope.dump() if key.startswith("policyrevision/")]
        assert numbers == [3, 4, 5]
        assert await scope.refused(OPERATOR, Rollback(2)) is Code.NOT_FOUND
        assert await scope.must(OPERATOR, Rollback(3)) == [6]

    run_test()


def test_total_size_of_policies_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    @scope_test
    async def run_test(scope: Scope) -> None:
        monkeypatch.setattr(policies, "POLICIES_BYTES_MAX", 300)
        rule = PolicyRule(allow=PolicyAllow(zones=("a",)), reason="x" * 60)
        declared = [Policy(metadata=Metadata(name=name), spec=PolicySpec(rules=(rule,))) for name in "abc"]
        await scope.must(OPERATOR, *(Apply(policy) for policy in declared[:2]))
        assert await scope.refused(OPERATOR, Apply(declared[2])) is Code.LIMIT
        await scope.must(OPERATOR, Delete("Policy", "a"), Apply(declared[2]))

    run_test()


@scope_test
async def test_refusal_detail_is_truncated(scope: Scope) -> None:
    (verdict,) = await scope.ask(USER, Delete("Secret", "x" * 512, "t" * 512))
    assert isinstance(verdict, Refused) and verdict.code is Code.NOT_FOUND
    assert len(verdict.detail) == DETAIL_CHARS_MAX + 1 and verdict.detail.endswith("…")


# -- duration of phases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_ms", [0, 1, 100, 249, 250, 251, 400, 499, 500, 700])
def test_phase_duration_is_never_overestimated_and_little_underestimated(after_ms: int) -> None:
    """Times are sampled four times a second: an early timeout would be wrong, a slightly late one is harmless."""

    @scope_test
    async def run_test(scope: Scope) -> None:
        first, second = await spawn_replicas(scope, "w", 2)
        scope.clock.at_ms += 10_000
        scheduler = scope.actors["scheduler"]
        await scope.must(scheduler, Reserve(first, scope.at(first), "n1", T1))
        scope.clock.at_ms += after_ms
        await scope.must(scheduler, Reserve(second, scope.at(second), "n1", T1))
        scope.clock.at_ms += 59_999
        assert await scope.refused(*transition_claim(scope, second, "reclaim")) is Code.WAIT
        scope.clock.at_ms += 1 + books.TIME_SAMPLE_MS
        await commit_transitions(scope, second, "reclaim")
        assert scope.phase(second) == "pending"

    run_test()


@scope_test
async def test_time_samples_are_few_and_old_ones_are_dropped(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    await scope.must(scope.actors["scheduler"], Reserve(key, scope.at(key), "n1", T1))
    for _ in range(20):
        scope.clock.at_ms += books.TIME_SAMPLE_MS // 5
        await scope.ask(USER, Delete("Secret", "none", "t1"))
    assert len(scope.books.commit_times) <= 6, "20 batches in one second"
    for _ in range(50):
        scope.clock.at_ms += books.PHASE_LIMIT_MS_MAX // 10
        await scope.ask(USER, Delete("Secret", "none", "t1"))
    assert len(scope.books.commit_times) <= 22
    assert scope.books.commit_times[0][1] >= scope.clock.at_ms - 2 * books.PHASE_LIMIT_MS_MAX
    await commit_transitions(scope, key, "reclaim")
