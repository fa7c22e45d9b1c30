"""Scheduling cycle before a real authority: right claims, correct reaction to verdicts, and no replica lost."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.model.claims import Apply, Bind, BindGang, Code, Delete, Forget, Move, Refused, Report, Spawn
from remit.model.kinds import Affinity, NodeHealth, Override, OverrideScope, OverrideSpec, Placement
from remit.model.metadata import Metadata
from remit.model.records import SummarySpec
from remit.model.resources import Duration
from tests.properties.authority_world import OPERATOR, Scope, amounts, node, populated_scope, run, workload
from tests.unit.commitment.authority_fixture import accept_peer, commit_transitions, offer
from tests.unit.proposal.scheduler_fixture import (
    CycleFixture,
    binds,
    create_pending,
    cycle_test,
    mark,
    nodes,
    quota,
    rank,
    refused,
    reserves,
)


async def override(scope: Scope, name: str, effect: Any, ttl_s: int = 60, by: int = 0, **scoped: tuple[str, ...]) -> None:
    spec = OverrideSpec(
        effect=effect, scope=OverrideScope(**scoped), ttl=Duration(ttl_s * 1000), reason="test", author="me", by=by
    )
    await scope.must(OPERATOR, Apply(Override(metadata=Metadata(name=name), spec=spec)))


@cycle_test
async def test_fitting_replicas_are_bound_and_assumptions_confirmed(m: CycleFixture) -> None:
    await create_pending(m.scope, "a", 6)
    await m.settle()
    assert len(m.where("a-")) == 6
    assert not m.view.assumed
    assert not len(m.cycle.backlog)
    assert not refused(m)


@cycle_test
async def test_next_batch_is_proposed_before_last_is_answered(m: CycleFixture) -> None:
    await create_pending(m.scope, "a", 12)
    m.limit = 3
    await m.sync()
    made = [m.propose() for _ in range(4)]
    assert [len(binds(one)) for one in made] == [3, 3, 2, 0]
    for one in made:
        m.deliver(one, await m.ask(one))
    assert not refused(m)


async def rival(m: CycleFixture) -> None:
    """Another scheduler binds `b` on both nodes meanwhile."""
    for i, at in enumerate(("n1", "n2")):
        key = f"replica/t1/b-{i}"
        await m.scope.must(m.scope.actors["scheduler"], Bind(key, m.scope.at(key), at, "tenant/t1"))


@cycle_test
async def test_refused_claim_waits_until_view_reaches_refusal_revision(m: CycleFixture) -> None:
    """Another scheduler takes both nodes; the refusal names a revision, and until then nothing is claimed again."""
    await create_pending(m.scope, "a", 1, "4")
    await create_pending(m.scope, "b", 2, "4")
    await m.sync()
    made = m.propose()
    await rival(m)
    m.deliver(made, await m.ask(made))
    assert set(refused(m)) <= {Code.NO_ROOM, Code.REVISION}
    for _ in range(5):
        m.scope.clock.at_ms += 5_000
        assert not binds(m.propose())
    await m.sync()
    m.propose()
    assert m.reason("a-0") == Code.NO_ROOM
    assert m.wait("a-0").until_ms <= m.now_ms + 60_000  # type: ignore[union-attr]


@cycle_test
async def test_refusals_of_one_batch_count_as_one_failure(m: CycleFixture) -> None:
    """Eight replicas of a queue lose one race: the next backoff is not doubled eight times."""
    await create_pending(m.scope, "a", 8, "500m")
    await m.sync()
    made = m.propose()
    assert len(binds(made)) == 8
    verdicts = [
        Refused(Code.REVISION, "", m.view.revision) if isinstance(c, Bind) else v
        for c, v in zip(made.claims, await m.ask(made), strict=True)
    ]
    m.deliver(made, verdicts)
    m.notify()
    line = m.cycle.backlog.queue_of(m.slot("a-0"))
    assert line is not None
    assert line.failures == 1


@cycle_test
async def test_queue_partly_waiting_and_partly_refused_does_not_spin(m: CycleFixture) -> None:
    """Quota suffices for two. Their refusal frees quota, which is what the third waits for: it wakes the queue."""
    await quota(m.scope, "t1", cpu="2")
    await create_pending(m.scope, "a", 3, "1")
    claims = 0
    for _ in range(100):
        await m.sync()
        made = m.propose()
        claims += len(binds(made))
        m.deliver(made, [Refused(Code.POLICY_LAPSED, "", m.view.revision) for _ in made.claims])
        m.scope.clock.at_ms += 10
    assert 4 <= claims <= 10, "in a second: at once, again, then with growing backoff"
    await m.settle()
    assert len(m.where("a-")) == 2


@cycle_test
async def test_verdict_on_superseded_claim_is_ignored(m: CycleFixture) -> None:
    """The row changed while the claim was in flight, and the replica was claimed again: the old refusal is outdated."""
    await create_pending(m.scope, "a", 1)
    await m.sync()
    first = m.propose()
    await commit_transitions(m.scope, "replica/t1/a-0", "cancel", "requeue")
    await m.sync()
    second = m.propose()
    assert binds(second)
    m.deliver(first, await m.ask(first))
    assert Code.REVISION in refused(m)
    m.notify()
    assert m.slot("a-0") in m.view.assumed
    m.deliver(second, await m.ask(second))
    await m.settle()
    assert len(m.where("a-")) == 1


@cycle_test
async def test_verdict_after_view_reset_does_no_harm(m: CycleFixture) -> None:
    await create_pending(m.scope, "a", 40, "100m")
    await m.sync()
    made = m.propose()
    verdicts = await m.ask(made)
    m.view._reset()
    await m.sync()
    m.notify()
    m.deliver(made, [Refused(Code.NO_ROOM, "", 1) for _ in verdicts])
    m.deliver_no_answer(made)
    await m.settle()
    assert len(m.where("a-")) == 40


@cycle_test
async def test_unanswered_batch_is_retried_with_backoff(m: CycleFixture) -> None:
    await create_pending(m.scope, "a", 3)
    await m.sync()
    made = m.propose()
    m.deliver_no_answer(made)
    assert not m.view.assumed
    line = m.cycle.backlog.queue_of(m.slot("a-0"))
    assert line is not None and line.state == "backoff"
    assert line.failures == 1, "one failure for the whole batch"
    await m.settle()
    assert len(m.where("a-")) == 3


@cycle_test
async def test_deposed_cycle_leaves_no_assumptions_and_ignores_verdicts(m: CycleFixture) -> None:
    await create_pending(m.scope, "a", 3)
    await m.sync()
    made = m.propose()
    old = m.cycle
    m.depose()
    assert not m.view.assumed
    m.assert_consistent()
    verdicts = await m.ask(made)
    old.on_verdicts(made, verdicts, m.now_ms)
    await m.settle()
    assert len(m.where("a-")) == 3


@cycle_test
async def test_reservation_survives_change_of_term(m: CycleFixture) -> None:
    await create_pending(m.scope, "low", 8)
    await m.settle()
    await create_pending(m.scope, "top", 1, "2", priority="top")
    await m.run_cycle()
    assert m.where("top")
    m.depose()
    await m.settle()
    for key in [k for k in m.scope.checker.rows if k.startswith("replica/") and m.scope.phase(k) == "draining"]:
        await commit_transitions(m.scope, key, "stop", "stopped")
    await m.settle()
    assert m.scope.phase("replica/t1/top-0") == "bound"


@cycle_test
async def test_reservation_with_unanswered_bind_is_bound_later(m: CycleFixture) -> None:
    await create_pending(m.scope, "low", 8)
    await m.settle()
    await create_pending(m.scope, "top", 1, "2", priority="top")
    await m.settle()
    for key in [k for k in m.scope.checker.rows if k.startswith("replica/") and m.scope.phase(k) == "draining"]:
        await commit_transitions(m.scope, key, "stop", "stopped")
    await m.sync()
    made = m.propose()
    assert binds(made)
    m.deliver_no_answer(made)
    await m.settle()
    assert m.scope.phase("replica/t1/top-0") == "bound"


@cycle_test
async def test_reservation_on_suspect_node_is_moved_to_another(m: CycleFixture) -> None:
    await create_pending(m.scope, "low", 8)
    await m.settle()
    await create_pending(m.scope, "top", 1, "4", priority="top")
    await m.settle()
    there = m.where("top")["top-0"]
    for key in [k for k in m.scope.checker.rows if k.startswith("replica/") and m.scope.phase(k) == "draining"]:
        await commit_transitions(m.scope, key, "stop", "stopped")
    await mark(m.scope, there, NodeHealth.SUSPECT)
    await m.settle()
    assert m.where("top")["top-0"] != there


@cycle_test
async def test_stale_evidence_refusal_keeps_reservation(m: CycleFixture) -> None:
    """Its victims have gone already: giving it up for an old snapshot would waste their eviction."""
    await create_pending(m.scope, "low", 8)
    await m.settle()
    await create_pending(m.scope, "top", 1, "2", priority="top")
    await m.settle()
    for key in [k for k in m.scope.checker.rows if k.startswith("replica/") and m.scope.phase(k) == "draining"]:
        await commit_transitions(m.scope, key, "stop", "stopped")
    await m.sync()
    made = m.propose()
    m.deliver(made, [Refused(Code.STALE_EVIDENCE, "", m.view.revision) for _ in made.claims])
    assert not binds(m.propose()), "it waits for the view to advance"
    await create_pending(m.scope, "more", 0)
    await m.settle()
    assert m.scope.phase("replica/t1/top-0") == "bound"
    assert not [c for made in m.proposed for c in made.claims if isinstance(c, Move)]


# -- equal replicas in one queue -------------------------------------------------------------------------------------------


@cycle_test
async def test_replicas_of_deleted_workload_leave_shared_queue(m: CycleFixture) -> None:
    """Two workloads with equal requirements share one queue; one of them is deleted before it is tried."""
    await create_pending(m.scope, "a", 2)
    await create_pending(m.scope, "b", 2)
    await m.sync()
    m.notify()
    await m.scope.must(OPERATOR, Delete("Workload", "a", "t1"))
    await m.settle()
    assert sorted(m.where()) == ["b-0", "b-1"]
    assert Code.DELETING not in refused(m)
    assert m.reason("a-0") == Code.DELETING


@cycle_test
async def test_refusal_for_deletion_does_not_hold_up_other_workload_of_queue(m: CycleFixture) -> None:
    await create_pending(m.scope, "a", 2)
    await m.sync()
    made = m.propose()
    await m.scope.must(OPERATOR, Delete("Workload", "a", "t1"))
    m.deliver(made, await m.ask(made))
    assert set(refused(m)) == {Code.DELETING}
    await create_pending(m.scope, "b", 2)
    await m.settle()
    assert sorted(m.where()) == ["b-0", "b-1"]
    assert m.reason("a-0") == Code.DELETING


@cycle_test
async def test_reused_generation_slot_does_not_inherit_old_overrides(m: CycleFixture) -> None:
    """The generation's slot is reused by another workload of the same shape, which is pinned."""
    await create_pending(m.scope, "old", 1)
    await m.settle()
    await commit_transitions(m.scope, "replica/t1/old-0", "remove", "stop", "stopped")
    await m.scope.must(OPERATOR, Delete("Workload", "old", "t1"))
    for key in [k for k in m.scope.checker.rows if k.startswith("replica/")]:
        await m.scope.must(m.scope.actors["workloads"], Forget(key, m.scope.at(key)))
    await m.scope.must(m.scope.actors["workloads"], Delete("Workload", "old", "t1"))
    await override(m.scope, "p", "pin", workloads=("t1/new",), nodes=("n2",))
    await m.sync()
    m.notify()
    await create_pending(m.scope, "new", 3)
    await m.settle()
    assert set(m.where("new").values()) == {"n2"}


@cycle_test
async def test_shape_split_during_claim_posts_nothing_twice(m: CycleFixture) -> None:
    """A new workload has anti-affinity to it: it gets a shape of its own while its claim is in flight."""
    await create_pending(m.scope, "a", 2, cpu="3", labels={"app": "x"})
    await m.sync()
    made = m.propose()
    anti = Placement(anti_affinity=(Affinity(label_selector={"app": "x"}, topology_key="node"),))
    await create_pending(m.scope, "shy", 1, placement=anti)
    await m.sync()
    again = m.propose()
    assert "a-0" not in binds(again)
    m.deliver(made, await m.ask(made))
    m.deliver(again, await m.ask(again))
    await m.settle()
    assert len(m.where("a-")) == 2
    assert m.reason("shy-0") == Code.ANTI_AFFINITY


@cycle_test
async def test_work_draws_on_all_quota_slices_of_tenant(m: CycleFixture) -> None:
    """L1: what one slice does not cover is taken from the next at once."""
    await accept_peer(m.scope, "scope/global")
    for name, cpu in (("a", "2"), ("b", "3")):
        claim = offer(m.scope, cpu)
        await m.scope.must(m.scope.actors["budgets"], replace(claim, name=name))
    await create_pending(m.scope, "w", 6)
    await m.settle()
    assert (len(m.where("w-")), m.reason("w-5")) == (5, "over_quota")


@pytest.mark.parametrize("effect", ["avoid", "pin", "pause-expansion"])
def test_override_during_preemption_gives_up_reservation(effect: str) -> None:
    """Nothing new is placed there or for it: an earlier reservation is given up."""

    @cycle_test
    async def scenario(m: CycleFixture) -> None:
        await create_pending(m.scope, "low", 2, "4")
        await m.settle()
        await create_pending(m.scope, "hi", 1, "4", priority="top")
        await m.settle()
        reserved = m.where("hi")["hi-0"]
        low = next(name for name, at in m.where("low").items() if at == reserved)
        scoped: dict[str, dict[str, Any]] = {
            "avoid": {"nodes": (reserved,)},
            "pin": {"tenants": ("t1",), "nodes": ("n1" if reserved == "n2" else "n2",)},
            "pause-expansion": {"tenants": ("t1",)},
        }
        await override(m.scope, "o", effect, **scoped[effect])
        await commit_transitions(m.scope, f"replica/t1/{low}", "stop", "stopped")
        await m.settle()
        assert m.where("hi").get("hi-0") != reserved
        assert m.scope.phase("replica/t1/hi-0") == ("pending" if effect == "pause-expansion" else "reserved")
        await m.scope.must(OPERATOR, Delete("Override", "o"))
        await m.settle()
        assert m.where("hi")

    scenario()


# -- gangs -----------------------------------------------------------------------------------------------------------------


@cycle_test
async def test_gang_is_bound_whole_or_not_at_all(m: CycleFixture) -> None:
    await create_pending(m.scope, "g", 3, "3", gang=3, type_="job")
    await m.settle()
    assert not m.where("g-")
    assert m.reason("g-0") in (Code.GANG_SHORT, Code.NO_ROOM)
    await nodes(m.scope, node("n3"))
    await m.settle()
    assert len(m.where("g-")) == 3


@cycle_test
async def test_gang_waits_for_missing_members(m: CycleFixture) -> None:
    await create_pending(m.scope, "g", 2, gang=3, type_="job", replicas=3)
    await m.settle()
    assert m.reason("g-0") == Code.GANG_SHORT
    await m.scope.must(m.scope.actors["workloads"], Spawn("t1", "g", 1, 2, 1))
    await m.settle()
    assert len(m.where("g-")) == 3


@cycle_test
async def test_gang_members_created_under_two_priorities_are_bound_together(m: CycleFixture) -> None:
    await create_pending(m.scope, "g", 2, gang=4, type_="job", replicas=4, priority="high")
    await rank(m.scope, "high", 200)
    await m.scope.must(m.scope.actors["workloads"], Spawn("t1", "g", 1, 2, 2))
    await m.settle()
    assert len(m.where("g-")) == 4


@cycle_test
async def test_gang_members_created_before_and_after_hint_are_bound_together(m: CycleFixture) -> None:
    await create_pending(m.scope, "g", 2, gang=4, type_="job", replicas=4)
    await m.settle()
    assert m.reason("g-0") == Code.GANG_SHORT
    await hint(m.scope, "n1", 1, "t1/g")
    await m.scope.must(m.scope.actors["workloads"], Spawn("t1", "g", 1, 2, 1))
    await m.settle()
    await hint(m.scope, "n1", 2)
    await m.scope.must(m.scope.actors["workloads"], Spawn("t1", "g", 1, 3, 1))
    await m.settle()
    assert len(m.where("g-")) == 4


async def hint(scope: Scope, on: str, sequence: int, *works: str) -> None:
    """Report that a node has warm artifacts for these workloads from now on."""
    summary = SummarySpec(holder=on, epoch=1, sequence=sequence, counts=dict.fromkeys(works, 1_000))
    await scope.must(scope.actors[f"agent/{on}"], Report(f"warm/{on}", summary))


@cycle_test
async def test_replica_joining_active_queue_gets_recorded_reason(m: CycleFixture) -> None:
    """A batch tries only a few, and the reasons of the others in the queue were recorded earlier."""
    m.limit = 2
    await create_pending(m.scope, "w", 6, "9", replicas=9)
    await m.settle()
    for index in (6, 7, 8):
        await m.scope.must(m.scope.actors["workloads"], Spawn("t1", "w", 1, index, 1))
        await m.sync()
        m.cycle.backlog.on_event(("room",), m.view.changes.version + 1)  # it is to be tried, and has not been yet
        await m.settle()
        assert f"t1/w-{index}" in {name for one in m.decisions("waiting") for name in one.replicas}


@cycle_test
async def test_gang_of_deleted_workload_reports_deleting_at_once(m: CycleFixture) -> None:
    await quota(m.scope, "t1", cpu="2")
    await create_pending(m.scope, "g", 3, gang=3, type_="job")
    await m.settle()
    assert m.reason("g-0") == "over_quota"
    await m.scope.must(OPERATOR, Delete("Workload", "g", "t1"))
    await m.settle()
    assert m.reason("g-0") == "deleting"


@cycle_test
async def test_one_of_two_gangs_runs_when_capacity_suffices_for_one(m: CycleFixture) -> None:
    """F25: no member of the other gang is placed."""
    for name in ("g", "h"):
        await create_pending(m.scope, name, 2, "3", gang=2, type_="job")
    await m.settle()
    assert sorted(len(m.where(name)) for name in ("g-", "h-")) == [0, 2]


@cycle_test
async def test_gangs_of_two_tenants_compete_without_losing_replicas(m: CycleFixture) -> None:
    """Tenants alternate, but a gang is tried whole; with too little capacity for all it is tried again."""
    await create_pending(m.scope, "g", 4, "1", gang=3, type_="job")
    await create_pending(m.scope, "h", 4, "1", gang=3, type_="job", owner="t2")
    await create_pending(m.scope, "s", 3, "1", owner="t2")
    for limit in (1, 2, 3, 5, 100):
        m.limit = limit
        await m.run_cycle()
    await m.settle()
    assert len(m.where("g-")) in (0, 3, 4)
    assert len(m.where("h-")) in (0, 3, 4)
    assert len(m.where()) == 8
    for line in m.cycle.backlog.queues():
        assert not line.in_flight_count, f"{line} still has members in flight"


@pytest.mark.parametrize("limit", [2, 3, 4, 5])
def test_gangs_are_retried_whole_for_any_batch_limit(limit: int) -> None:
    """Capacity suffices for one gang; both are tried a second time, and whole again."""

    @cycle_test
    async def scenario(m: CycleFixture) -> None:
        m.limit = limit
        await create_pending(m.scope, "old", 3)
        await m.settle()
        await create_pending(m.scope, "g", 4, gang=3, type_="job")
        await create_pending(m.scope, "h", 4, gang=3, type_="job", owner="t2")
        await m.settle()
        assert sorted((len(m.where("g-")), len(m.where("h-")))) in ([0, 3], [0, 4])
        for line in m.cycle.backlog.queues():
            assert not line.in_flight_count, f"{line} still has members in flight"
        for i in range(3):
            await commit_transitions(m.scope, f"replica/t1/old-{i}", "remove", "stop", "stopped")
        await m.settle()
        assert len(m.where()) == 8

    scenario()


@cycle_test
async def test_gang_larger_than_batch_limit_is_tried_whole(m: CycleFixture) -> None:
    m.limit = 2
    await create_pending(m.scope, "g", 6, gang=6, type_="job")
    await create_pending(m.scope, "h", 6, owner="t2")
    await m.settle()
    assert len(m.where("g-")) in (0, 6)
    assert len(m.where()) == 8


@cycle_test
async def test_gang_that_loses_race_is_retried_whole(m: CycleFixture) -> None:
    await create_pending(m.scope, "g", 2, "3", gang=2, type_="job")
    await m.sync()
    made = m.propose()
    await create_pending(m.scope, "b", 1, "2")
    key = "replica/t1/b-0"
    await m.scope.must(m.scope.actors["scheduler"], Bind(key, m.scope.at(key), "n1", "tenant/t1"))
    m.deliver(made, await m.ask(made))
    assert Code.GANG_SHORT in refused(m)
    await m.settle()
    assert not m.where("g-")
    await commit_transitions(m.scope, key, "remove", "stop", "stopped")
    await m.settle()
    assert len(m.where("g-")) == 2
    assert not any(isinstance(c, Bind) and "g-" in c.replica for p in m.proposed for c in p.claims)
    assert any(isinstance(c, BindGang) for p in m.proposed for c in p.claims)


# -- fair shares -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 7, 100])
@pytest.mark.parametrize("notify", ["at once", "late"])
def test_dominant_shares_match_drf_paper_example(limit: int, notify: str) -> None:
    """Ghodsi et al., NSDI'11, section 4.1: of <9 CPU, 18 GB>, A asks <1, 4> and B <3, 1>: three tasks of A, two of B."""

    async def scenario() -> None:
        scope = await populated_scope(nodes=[])
        m = CycleFixture(scope, limit=limit)
        await nodes(scope, big("n1", "9", "18Gi"))
        await quota(scope, "a", cpu="100")
        await quota(scope, "b", cpu="100")
        for name, cpu, memory in (("a", "1", "4Gi"), ("b", "3", "1Gi")):
            made = workload(name, cpu, 10, owner=name, type_="job")
            await scope.must(OPERATOR, Apply(sized(made, cpu, memory)))
            await scope.must(scope.actors["workloads"], Spawn(name, name, 1, 0, 10))
        if notify == "late":
            await m.sync()
            made_ = [m.propose() for _ in range(12)]
            for one in made_:
                m.deliver(one, await m.ask(one))
        await m.settle()
        assert (len(m.where("a-")), len(m.where("b-"))) == (3, 2)
        await scope.close()

    run(scenario())


def big(name: str, cpu: str, memory: str) -> Any:
    made = node(name, cpu)
    return replace(made, spec=replace(made.spec, capacity=amounts(cpu=cpu, memory=memory)))


def sized(work: Any, cpu: str, memory: str) -> Any:
    template = replace(work.spec.template, resources=amounts(cpu=cpu, memory=memory))
    return replace(work, spec=replace(work.spec, template=template))


@cycle_test
async def test_priority_precedes_fair_share(m: CycleFixture) -> None:
    await create_pending(m.scope, "mine", 6)
    await m.settle()
    await create_pending(m.scope, "other", 2, owner="t2")
    await create_pending(m.scope, "urgent", 2, priority="high")
    await m.settle()
    assert len(m.where("urgent")) == 2


@cycle_test
async def test_tenant_share_is_proportional_to_weight(m: CycleFixture) -> None:
    await quota(m.scope, "t2", weight=3, cpu="16")
    await create_pending(m.scope, "a", 12)
    await create_pending(m.scope, "b", 12, owner="t2")
    m.limit = 5
    await m.settle()
    assert (len(m.where("a-")), len(m.where("b-"))) == (2, 6)


# -- quota -----------------------------------------------------------------------------------------------------------------


@cycle_test
async def test_assumed_replicas_never_overdraw_quota(m: CycleFixture) -> None:
    await quota(m.scope, "t1", cpu="3")
    await create_pending(m.scope, "a", 3)
    await create_pending(m.scope, "b", 3, "500m")
    await m.sync()
    for _ in range(4):
        m.propose()
        assert all(left >= 0 for ledger in m.view.quota_ledgers.ledgers.values() for left in ledger.free.values())
    await m.settle()
    assert not refused(m)
    assert Code.OVER_QUOTA in {m.reason("a-2"), m.reason("b-2")}


@cycle_test
async def test_raised_quota_wakes_waiting_replica(m: CycleFixture) -> None:
    await quota(m.scope, "t1", cpu="1")
    await create_pending(m.scope, "a", 2)
    await m.settle()
    assert m.reason("a-1") == Code.OVER_QUOTA
    await quota(m.scope, "t1", cpu="2")
    await m.settle()
    assert len(m.where("a-")) == 2


@cycle_test
async def test_nothing_is_evicted_for_work_without_quota(m: CycleFixture) -> None:
    await create_pending(m.scope, "low", 8)
    await m.settle()
    await quota(m.scope, "t2", cpu="1")
    await create_pending(m.scope, "top", 1, "2", priority="top", owner="t2")
    await m.settle()
    assert m.reason("top-0", "t2") == Code.OVER_QUOTA
    assert not [one for made in m.proposed for one in reserves(made)]


# -- overrides -------------------------------------------------------------------------------------------------------------


@cycle_test
async def test_paused_work_resumes_when_override_expires(m: CycleFixture) -> None:
    await override(m.scope, "p", "pause-expansion", 20, workloads=("t1/a",))
    await create_pending(m.scope, "a", 1)
    await create_pending(m.scope, "b", 1)
    await m.settle()
    assert sorted(m.where()) == ["b-0"]
    assert m.reason("a-0") == Code.OVERRIDE
    ends = m.cycle.next_ms()
    assert ends is not None and ends <= m.now_ms + 20_000
    m.scope.clock.at_ms = ends
    m.propose()
    assert m.slot("a-0") in m.view.assumed


@cycle_test
async def test_pause_during_claim_prevents_retry_of_refused_claim(m: CycleFixture) -> None:
    await create_pending(m.scope, "a", 1, "3")
    await create_pending(m.scope, "b", 2, "3")
    await m.sync()
    m.notify()
    m.limit = 1
    made = m.propose()
    m.limit = 100
    await rival(m)
    await override(m.scope, "p", "pause-expansion", 60, workloads=("t1/a",))
    await m.sync()
    m.notify()
    m.deliver(made, await m.ask(made))
    await commit_transitions(m.scope, "replica/t1/b-0", "remove", "stop", "stopped")
    await m.settle()
    assert m.reason("a-0") == Code.OVERRIDE


@cycle_test
async def test_avoided_zone_stays_empty_until_override_is_deleted(m: CycleFixture) -> None:
    await override(m.scope, "x", "avoid", zones=("a",))
    await create_pending(m.scope, "a", 5)
    await m.settle()
    assert set(m.where().values()) == {"n2"} and len(m.where()) == 4
    assert m.reason("a-4") in (Code.NO_ROOM, Code.OVERRIDE)
    await m.scope.must(OPERATOR, Delete("Override", "x"))
    await m.settle()
    assert len(m.where()) == 5


@cycle_test
async def test_boost_changes_order_but_evicts_nothing(m: CycleFixture) -> None:
    await create_pending(m.scope, "low", 4)
    await m.settle()
    await create_pending(m.scope, "a", 4)
    await create_pending(m.scope, "b", 4, "500m")
    await override(m.scope, "b", "boost", by=50, workloads=("t1/b",))
    m.limit = 4
    await m.run_cycle()
    await m.sync()
    assert len(m.where("b-")) == 4
    await m.settle()
    assert len(m.where("low-")) == 4


# -- reasons ---------------------------------------------------------------------------------------------------------------


@cycle_test
async def test_reason_is_recorded_for_every_waiting_replica_of_queue(m: CycleFixture) -> None:
    """Including those beyond the batch limit, which were not tried themselves."""
    m.limit = 3
    await create_pending(m.scope, "big", 20, "5", replicas=20)
    await m.settle()
    recorded = {name for one in m.decisions("waiting") for name in one.replicas}
    assert len(recorded) == 20
    assert all(one.reason == Code.NO_ROOM and one.never for one in m.decisions("waiting") if one.nodes)
    assert all("(" not in cure for one in m.decisions() for cure in one.cures)


@cycle_test
async def test_bound_replica_is_not_recorded_as_waiting_with_the_rest_of_its_queue(m: CycleFixture) -> None:
    """Replicas that no attempt reached have the detail of the last attempt."""
    m.limit = 3
    await create_pending(m.scope, "big", 20, "4", replicas=20)
    await m.settle()
    bound = {name for one in m.decisions("bound") for name in one.replicas}
    waiting = {name: one.detail for one in m.decisions("waiting") for name in one.replicas}
    assert bound and not bound & set(waiting)
    assert len(bound | set(waiting)) == 20
    untried = {detail for detail in waiting.values() if detail.endswith("; not tried again since")}
    assert untried and all(" nodes fit: " in detail for detail in untried)


@cycle_test
async def test_refusal_is_recorded_in_decisions(m: CycleFixture) -> None:
    await create_pending(m.scope, "a", 1, "4")
    await create_pending(m.scope, "b", 2, "4")
    await m.sync()
    made = m.propose()
    await rival(m)
    m.deliver(made, await m.ask(made))
    await m.settle()
    assert {one.reason for one in m.decisions("refused")} & {Code.NO_ROOM}


@cycle_test
async def test_unplaceable_replicas_do_not_block_others(m: CycleFixture) -> None:
    """F23."""
    for i in range(10):
        await create_pending(m.scope, f"huge{i}", 1, str(10 + i), priority="top")
    await create_pending(m.scope, "a", 8)
    m.limit = 4
    await m.settle()
    assert len(m.where("a-")) == 8


@cycle_test
async def test_capacity_returned_by_refused_claim_wakes_waiting_replica(m: CycleFixture) -> None:
    """The assumption is dropped when the view has caught up; the others wake without any other event."""
    await create_pending(m.scope, "a", 2, "4")
    await m.sync()
    made = m.propose()
    await create_pending(m.scope, "b", 1, "3")
    await m.sync()
    m.propose()
    assert m.reason("b-0") == Code.NO_ROOM
    await m.scope.must(OPERATOR, Delete("Workload", "a", "t1"))
    verdicts = await m.ask(made)
    assert all(isinstance(v, Refused) for c, v in zip(made.claims, verdicts, strict=True) if isinstance(c, Bind))
    m.deliver(made, verdicts)
    await m.sync()
    assert "b-0" in binds(m.propose())
