"""Does a cycle claim what is right, learn from what it is told, and lose nobody? Before a real authority."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.model.claims import Apply, Bind, BindGang, Code, Delete, Forget, Move, Refused, Report, Spawn
from remit.model.kinds import Affinity, NodeHealth, Override, OverrideScope, OverrideSpec, Placement
from remit.model.metadata import Metadata
from remit.model.records import SummarySpec
from remit.model.resources import Duration
from tests.properties.authority_world import OPERATOR, Scope, amounts, furnished, node, run, workload
from tests.unit.commitment.authority_fixture import meets, move, offer
from tests.unit.proposal.scheduler_fixture import Mind, binds, mark, minds, nodes, quota, rank, refused, reserves, want


async def override(scope: Scope, name: str, effect: Any, ttl_s: int = 60, by: int = 0, **scoped: tuple[str, ...]) -> None:
    spec = OverrideSpec(
        effect=effect, scope=OverrideScope(**scoped), ttl=Duration(ttl_s * 1000), reason="test", author="me", by=by
    )
    await scope.must(OPERATOR, Apply(Override(metadata=Metadata(name=name), spec=spec)))


@minds
async def test_what_fits_is_bound_and_what_is_assumed_comes_true(m: Mind) -> None:
    await want(m.scope, "a", 6)
    await m.settle()
    assert len(m.where("a-")) == 6
    assert not m.view.assumed
    assert not len(m.cycle.backlog)
    assert not refused(m)


@minds
async def test_the_next_batch_does_not_wait_for_the_answer_to_the_last(m: Mind) -> None:
    await want(m.scope, "a", 12)
    m.limit = 3
    await m.see()
    made = [m.propose() for _ in range(4)]
    assert [len(binds(one)) for one in made] == [3, 3, 2, 0]
    for one in made:
        m.learn(one, await m.ask(one))
    assert not refused(m)


async def rival(m: Mind) -> None:
    """Another takes both nodes meanwhile, for `b`."""
    for i, at in enumerate(("n1", "n2")):
        key = f"replica/t1/b-{i}"
        await m.scope.must(m.scope.actors["scheduler"], Bind(key, m.scope.at(key), at, "tenant/t1"))


@minds
async def test_a_refused_claim_is_not_repeated_before_the_view_has_seen_what_it_was_refused_on(m: Mind) -> None:
    """A rival takes both nodes; the answer tells at which revision, and until then nothing is claimed again."""
    await want(m.scope, "a", 1, "4")
    await want(m.scope, "b", 2, "4")
    await m.see()
    made = m.propose()
    await rival(m)
    m.learn(made, await m.ask(made))
    assert set(refused(m)) <= {Code.NO_ROOM, Code.REVISION}
    for _ in range(5):
        m.scope.clock.at_ms += 5_000
        assert not binds(m.propose())
    await m.see()
    m.propose()
    assert m.reason("a-0") == Code.NO_ROOM
    assert m.wait("a-0").until_ms <= m.now_ms + 60_000  # type: ignore[union-attr]


@minds
async def test_refusals_of_one_batch_are_one_failure_of_their_line(m: Mind) -> None:
    """Eight of a line lose one race: the pause after the next is not eight times doubled."""
    await want(m.scope, "a", 8, "500m")
    await m.see()
    made = m.propose()
    assert len(binds(made)) == 8
    verdicts = [
        Refused(Code.REVISION, "", m.view.revision) if isinstance(c, Bind) else v
        for c, v in zip(made.claims, await m.ask(made), strict=True)
    ]
    m.learn(made, verdicts)
    m.hear()
    line = m.cycle.backlog.queue_of(m.slot("a-0"))
    assert line is not None
    assert line.failures == 1


@minds
async def test_a_line_of_which_a_part_waits_and_the_rest_is_refused_does_not_spin(m: Mind) -> None:
    """There is quota for two. They are refused, and what they give back is what the third waits for: it wakes the line."""
    await quota(m.scope, "t1", cpu="2")
    await want(m.scope, "a", 3, "1")
    claims = 0
    for _ in range(100):
        await m.see()
        made = m.propose()
        claims += len(binds(made))
        m.learn(made, [Refused(Code.POLICY_LAPSED, "", m.view.revision) for _ in made.claims])
        m.scope.clock.at_ms += 10
    assert 4 <= claims <= 10, "in a second: at once, once more, and then with pauses that grow"
    await m.settle()
    assert len(m.where("a-")) == 2


@minds
async def test_an_answer_to_a_claim_that_was_overtaken_teaches_nothing(m: Mind) -> None:
    """The row changed while the claim was under way, and the replica was claimed anew: the old refusal is not about that."""
    await want(m.scope, "a", 1)
    await m.see()
    first = m.propose()
    await move(m.scope, "replica/t1/a-0", "cancel", "requeue")
    await m.see()
    second = m.propose()
    assert binds(second)
    m.learn(first, await m.ask(first))
    assert Code.REVISION in refused(m)
    m.hear()
    assert m.slot("a-0") in m.view.assumed
    m.learn(second, await m.ask(second))
    await m.settle()
    assert len(m.where("a-")) == 1


@minds
async def test_an_answer_that_comes_after_everything_was_listed_anew_harms_nobody(m: Mind) -> None:
    await want(m.scope, "a", 40, "100m")
    await m.see()
    made = m.propose()
    verdicts = await m.ask(made)
    m.view._reset()
    await m.see()
    m.hear()
    m.learn(made, [Refused(Code.NO_ROOM, "", 1) for _ in verdicts])
    m.unanswered(made)
    await m.settle()
    assert len(m.where("a-")) == 40


@minds
async def test_a_lost_batch_is_tried_again_later(m: Mind) -> None:
    await want(m.scope, "a", 3)
    await m.see()
    made = m.propose()
    m.unanswered(made)
    assert not m.view.assumed
    line = m.cycle.backlog.queue_of(m.slot("a-0"))
    assert line is not None and line.state == "backoff"
    assert line.failures == 1, "one silence, however many were in it"
    await m.settle()
    assert len(m.where("a-")) == 3


@minds
async def test_a_deposed_scheduler_leaves_no_phantom_and_hears_nothing_more(m: Mind) -> None:
    await want(m.scope, "a", 3)
    await m.see()
    made = m.propose()
    old = m.cycle
    m.deposed()
    assert not m.view.assumed
    m.checked()
    verdicts = await m.ask(made)
    old.on_verdicts(made, verdicts, m.now_ms)
    await m.settle()
    assert len(m.where("a-")) == 3


@minds
async def test_reservations_outlive_a_term(m: Mind) -> None:
    await want(m.scope, "low", 8)
    await m.settle()
    await want(m.scope, "top", 1, "2", priority="top")
    await m.turn()
    assert m.where("top")
    m.deposed()
    await m.settle()
    for key in [k for k in m.scope.checker.rows if k.startswith("replica/") and m.scope.phase(k) == "draining"]:
        await move(m.scope, key, "stop", "stopped")
    await m.settle()
    assert m.scope.phase("replica/t1/top-0") == "bound"


@minds
async def test_a_reservation_whose_bind_was_not_heard_is_bound_later(m: Mind) -> None:
    await want(m.scope, "low", 8)
    await m.settle()
    await want(m.scope, "top", 1, "2", priority="top")
    await m.settle()
    for key in [k for k in m.scope.checker.rows if k.startswith("replica/") and m.scope.phase(k) == "draining"]:
        await move(m.scope, key, "stop", "stopped")
    await m.see()
    made = m.propose()
    assert binds(made)
    m.unanswered(made)
    await m.settle()
    assert m.scope.phase("replica/t1/top-0") == "bound"


@minds
async def test_a_reservation_on_a_node_that_fell_silent_is_given_up_and_made_elsewhere(m: Mind) -> None:
    await want(m.scope, "low", 8)
    await m.settle()
    await want(m.scope, "top", 1, "4", priority="top")
    await m.settle()
    there = m.where("top")["top-0"]
    for key in [k for k in m.scope.checker.rows if k.startswith("replica/") and m.scope.phase(k) == "draining"]:
        await move(m.scope, key, "stop", "stopped")
    await mark(m.scope, there, NodeHealth.SUSPECT)
    await m.settle()
    assert m.where("top")["top-0"] != there


@minds
async def test_stale_evidence_costs_a_reservation_nothing(m: Mind) -> None:
    """Its victims have gone already: to give it up for an old snapshot would be to have pushed them aside for nothing."""
    await want(m.scope, "low", 8)
    await m.settle()
    await want(m.scope, "top", 1, "2", priority="top")
    await m.settle()
    for key in [k for k in m.scope.checker.rows if k.startswith("replica/") and m.scope.phase(k) == "draining"]:
        await move(m.scope, key, "stop", "stopped")
    await m.see()
    made = m.propose()
    m.learn(made, [Refused(Code.STALE_EVIDENCE, "", m.view.revision) for _ in made.claims])
    assert not binds(m.propose()), "it waits for something to be seen"
    await want(m.scope, "more", 0)
    await m.settle()
    assert m.scope.phase("replica/t1/top-0") == "bound"
    assert not [c for made in m.proposed for c in made.claims if isinstance(c, Move)]


# -- one fate for equals, and no more than equals --------------------------------------------------------------------------


@minds
async def test_what_is_being_deleted_leaves_the_line_that_it_shares(m: Mind) -> None:
    """Two workloads ask the same and stand in one line; one of them is deleted before its turn."""
    await want(m.scope, "a", 2)
    await want(m.scope, "b", 2)
    await m.see()
    m.hear()
    await m.scope.must(OPERATOR, Delete("Workload", "a", "t1"))
    await m.settle()
    assert sorted(m.where()) == ["b-0", "b-1"]
    assert Code.DELETING not in refused(m)
    assert m.reason("a-0") == Code.DELETING


@minds
async def test_deleted_while_its_claim_was_under_way__it_does_not_hold_up_its_equals(m: Mind) -> None:
    await want(m.scope, "a", 2)
    await m.see()
    made = m.propose()
    await m.scope.must(OPERATOR, Delete("Workload", "a", "t1"))
    m.learn(made, await m.ask(made))
    assert set(refused(m)) == {Code.DELETING}
    await want(m.scope, "b", 2)
    await m.settle()
    assert sorted(m.where()) == ["b-0", "b-1"]
    assert m.reason("a-0") == Code.DELETING


@minds
async def test_a_name_that_is_given_again_has_none_of_the_old_ones_ways(m: Mind) -> None:
    """The generation's number is used again by another workload of the same shape, which is pinned."""
    await want(m.scope, "old", 1)
    await m.settle()
    await move(m.scope, "replica/t1/old-0", "remove", "stop", "stopped")
    await m.scope.must(OPERATOR, Delete("Workload", "old", "t1"))
    for key in [k for k in m.scope.checker.rows if k.startswith("replica/")]:
        await m.scope.must(m.scope.actors["workloads"], Forget(key, m.scope.at(key)))
    await m.scope.must(m.scope.actors["workloads"], Delete("Workload", "old", "t1"))
    await override(m.scope, "p", "pin", workloads=("t1/new",), nodes=("n2",))
    await m.see()
    m.hear()
    await want(m.scope, "new", 3)
    await m.settle()
    assert set(m.where("new").values()) == {"n2"}


@minds
async def test_a_new_shape_while_its_claim_is_under_way__nothing_is_posted_twice(m: Mind) -> None:
    """Somebody comes who shuns it: it is told apart from then on, and was already claimed."""
    await want(m.scope, "a", 2, cpu="3", labels={"app": "x"})
    await m.see()
    made = m.propose()
    shy = Placement(anti_affinity=(Affinity(label_selector={"app": "x"}, topology_key="node"),))
    await want(m.scope, "shy", 1, placement=shy)
    await m.see()
    again = m.propose()
    assert "a-0" not in binds(again)
    m.learn(made, await m.ask(made))
    m.learn(again, await m.ask(again))
    await m.settle()
    assert len(m.where("a-")) == 2
    assert m.reason("shy-0") == Code.ANTI_AFFINITY


@minds
async def test_work_draws_on_all_the_slices_of_its_tenant(m: Mind) -> None:
    """L1: what one slice does not cover the next does, at once."""
    await meets(m.scope, "scope/global")
    for name, cpu in (("a", "2"), ("b", "3")):
        claim = offer(m.scope, cpu)
        await m.scope.must(m.scope.actors["budgets"], replace(claim, name=name))
    await want(m.scope, "w", 6)
    await m.settle()
    assert (len(m.where("w-")), m.reason("w-5")) == (5, "over_quota")


@pytest.mark.parametrize("effect", ["avoid", "pin", "pause-expansion"])
def test_an_override_comes_while_the_victims_go__nothing_is_bound_against_it(effect: str) -> None:
    """Nothing new is placed there, or for it: what was reserved before that is given up."""

    @minds
    async def tell(m: Mind) -> None:
        await want(m.scope, "low", 2, "4")
        await m.settle()
        await want(m.scope, "hi", 1, "4", priority="top")
        await m.settle()
        reserved = m.where("hi")["hi-0"]
        low = next(name for name, at in m.where("low").items() if at == reserved)
        scoped: dict[str, dict[str, Any]] = {
            "avoid": {"nodes": (reserved,)},
            "pin": {"tenants": ("t1",), "nodes": ("n1" if reserved == "n2" else "n2",)},
            "pause-expansion": {"tenants": ("t1",)},
        }
        await override(m.scope, "o", effect, **scoped[effect])
        await move(m.scope, f"replica/t1/{low}", "stop", "stopped")
        await m.settle()
        assert m.where("hi").get("hi-0") != reserved
        assert m.scope.phase("replica/t1/hi-0") == ("pending" if effect == "pause-expansion" else "reserved")
        await m.scope.must(OPERATOR, Delete("Override", "o"))
        await m.settle()
        assert m.where("hi")

    tell()


# -- gangs -----------------------------------------------------------------------------------------------------------------


@minds
async def test_a_gang_is_bound_at_once_or_not_at_all(m: Mind) -> None:
    await want(m.scope, "g", 3, "3", gang=3, type_="job")
    await m.settle()
    assert not m.where("g-")
    assert m.reason("g-0") in (Code.GANG_SHORT, Code.NO_ROOM)
    await nodes(m.scope, node("n3"))
    await m.settle()
    assert len(m.where("g-")) == 3


@minds
async def test_a_gang_waits_for_its_members(m: Mind) -> None:
    await want(m.scope, "g", 2, gang=3, type_="job", replicas=3)
    await m.settle()
    assert m.reason("g-0") == Code.GANG_SHORT
    await m.scope.must(m.scope.actors["workloads"], Spawn("t1", "g", 1, 2, 1))
    await m.settle()
    assert len(m.where("g-")) == 3


@minds
async def test_members_of_a_gang_were_made_under_two_values_of_its_class__they_come_together(m: Mind) -> None:
    await want(m.scope, "g", 2, gang=4, type_="job", replicas=4, priority="high")
    await rank(m.scope, "high", 200)
    await m.scope.must(m.scope.actors["workloads"], Spawn("t1", "g", 1, 2, 2))
    await m.settle()
    assert len(m.where("g-")) == 4


@minds
async def test_members_of_a_gang_came_before_and_after_a_hint__they_come_together(m: Mind) -> None:
    await want(m.scope, "g", 2, gang=4, type_="job", replicas=4)
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
    """For which work a node says it is warm, from now on."""
    summary = SummarySpec(holder=on, epoch=1, sequence=sequence, counts=dict.fromkeys(works, 1_000))
    await scope.must(scope.actors[f"agent/{on}"], Report(f"warm/{on}", summary))


@minds
async def test_whoever_joins_a_line_that_is_being_tried_is_told_when_it_waits_again(m: Mind) -> None:
    """Tried are no more than a batch takes, and the others of the line were told a while ago."""
    m.limit = 2
    await want(m.scope, "w", 6, "9", replicas=9)
    await m.settle()
    for index in (6, 7, 8):
        await m.scope.must(m.scope.actors["workloads"], Spawn("t1", "w", 1, index, 1))
        await m.see()
        m.cycle.backlog.on_event(("room",), m.view.changes.version + 1)  # it is to be tried, and has not been yet
        await m.settle()
        assert f"t1/w-{index}" in {name for one in m.decisions("waiting") for name in one.replicas}


@minds
async def test_a_gang_whose_workload_goes_says_so_at_once(m: Mind) -> None:
    await quota(m.scope, "t1", cpu="2")
    await want(m.scope, "g", 3, gang=3, type_="job")
    await m.settle()
    assert m.reason("g-0") == "over_quota"
    await m.scope.must(OPERATOR, Delete("Workload", "g", "t1"))
    await m.settle()
    assert m.reason("g-0") == "deleting"


@minds
async def test_of_two_gangs_with_room_for_one__one_runs(m: Mind) -> None:
    """F25: and none of the other is placed."""
    for name in ("g", "h"):
        await want(m.scope, name, 2, "3", gang=2, type_="job")
    await m.settle()
    assert sorted(len(m.where(name)) for name in ("g-", "h-")) == [0, 2]


@minds
async def test_two_tenants_gangs_compete_in_turns__nobody_is_lost(m: Mind) -> None:
    """Turns go to and fro between tenants, but a gang is tried whole; with too little room for all it is tried again."""
    await want(m.scope, "g", 4, "1", gang=3, type_="job")
    await want(m.scope, "h", 4, "1", gang=3, type_="job", owner="t2")
    await want(m.scope, "s", 3, "1", owner="t2")
    for limit in (1, 2, 3, 5, 100):
        m.limit = limit
        await m.turn()
    await m.settle()
    assert len(m.where("g-")) in (0, 3, 4)
    assert len(m.where("h-")) in (0, 3, 4)
    assert len(m.where()) == 8
    for line in m.cycle.backlog.queues():
        assert not line.in_flight_count, f"{line} has somebody in flight for ever"


@pytest.mark.parametrize("limit", [2, 3, 4, 5])
def test_gangs_are_tried_again_in_turns__those_beyond_the_limit_come_along(limit: int) -> None:
    """There is room for one gang of two; to find out who comes first they are tried a second time, and whole again."""

    @minds
    async def tell(m: Mind) -> None:
        m.limit = limit
        await want(m.scope, "old", 3)
        await m.settle()
        await want(m.scope, "g", 4, gang=3, type_="job")
        await want(m.scope, "h", 4, gang=3, type_="job", owner="t2")
        await m.settle()
        assert sorted((len(m.where("g-")), len(m.where("h-")))) in ([0, 3], [0, 4])
        for line in m.cycle.backlog.queues():
            assert not line.in_flight_count, f"{line} has somebody in flight for ever"
        for i in range(3):
            await move(m.scope, f"replica/t1/old-{i}", "remove", "stop", "stopped")
        await m.settle()
        assert len(m.where()) == 8

    tell()


@minds
async def test_a_gang_larger_than_a_batch_is_tried_whole(m: Mind) -> None:
    m.limit = 2
    await want(m.scope, "g", 6, gang=6, type_="job")
    await want(m.scope, "h", 6, owner="t2")
    await m.settle()
    assert len(m.where("g-")) in (0, 6)
    assert len(m.where()) == 8


@minds
async def test_a_gang_that_loses_a_race_is_tried_again_whole(m: Mind) -> None:
    await want(m.scope, "g", 2, "3", gang=2, type_="job")
    await m.see()
    made = m.propose()
    await want(m.scope, "b", 1, "2")
    key = "replica/t1/b-0"
    await m.scope.must(m.scope.actors["scheduler"], Bind(key, m.scope.at(key), "n1", "tenant/t1"))
    m.learn(made, await m.ask(made))
    assert Code.GANG_SHORT in refused(m)
    await m.settle()
    assert not m.where("g-")
    await move(m.scope, key, "remove", "stop", "stopped")
    await m.settle()
    assert len(m.where("g-")) == 2
    assert not any(isinstance(c, Bind) and "g-" in c.replica for p in m.proposed for c in p.claims)
    assert any(isinstance(c, BindGang) for p in m.proposed for c in p.claims)


# -- shares ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 7, 100])
@pytest.mark.parametrize("hear", ["at once", "late"])
def test_dominant_shares_come_out_as_in_the_paper(limit: int, hear: str) -> None:
    """Ghodsi et al., NSDI'11, section 4.1: of <9 CPU, 18 GB>, A asks <1, 4> and B <3, 1>: three tasks of A, two of B."""

    async def tell() -> None:
        scope = await furnished(nodes=[])
        m = Mind(scope, limit=limit)
        await nodes(scope, big("n1", "9", "18Gi"))
        await quota(scope, "a", cpu="100")
        await quota(scope, "b", cpu="100")
        for name, cpu, memory in (("a", "1", "4Gi"), ("b", "3", "1Gi")):
            made = workload(name, cpu, 10, owner=name, type_="job")
            await scope.must(OPERATOR, Apply(sized(made, cpu, memory)))
            await scope.must(scope.actors["workloads"], Spawn(name, name, 1, 0, 10))
        if hear == "late":
            await m.see()
            made_ = [m.propose() for _ in range(12)]
            for one in made_:
                m.learn(one, await m.ask(one))
        await m.settle()
        assert (len(m.where("a-")), len(m.where("b-"))) == (3, 2)
        await scope.close()

    run(tell())


def big(name: str, cpu: str, memory: str) -> Any:
    made = node(name, cpu)
    return replace(made, spec=replace(made.spec, capacity=amounts(cpu=cpu, memory=memory)))


def sized(work: Any, cpu: str, memory: str) -> Any:
    template = replace(work.spec.template, resources=amounts(cpu=cpu, memory=memory))
    return replace(work, spec=replace(work.spec, template=template))


@minds
async def test_priority_comes_before_shares(m: Mind) -> None:
    await want(m.scope, "mine", 6)
    await m.settle()
    await want(m.scope, "other", 2, owner="t2")
    await want(m.scope, "urgent", 2, priority="high")
    await m.settle()
    assert len(m.where("urgent")) == 2


@minds
async def test_a_tenant_with_twice_the_weight_gets_twice_as_much(m: Mind) -> None:
    await quota(m.scope, "t2", weight=3, cpu="16")
    await want(m.scope, "a", 12)
    await want(m.scope, "b", 12, owner="t2")
    m.limit = 5
    await m.settle()
    assert (len(m.where("a-")), len(m.where("b-"))) == (2, 6)


# -- quota -----------------------------------------------------------------------------------------------------------------


@minds
async def test_what_is_assumed_never_overdraws_a_quota(m: Mind) -> None:
    await quota(m.scope, "t1", cpu="3")
    await want(m.scope, "a", 3)
    await want(m.scope, "b", 3, "500m")
    await m.see()
    for _ in range(4):
        m.propose()
        assert all(left >= 0 for ledger in m.view.quota_ledgers.ledgers.values() for left in ledger.free.values())
    await m.settle()
    assert not refused(m)
    assert Code.OVER_QUOTA in {m.reason("a-2"), m.reason("b-2")}


@minds
async def test_who_waits_for_quota_wakes_when_there_is_more(m: Mind) -> None:
    await quota(m.scope, "t1", cpu="1")
    await want(m.scope, "a", 2)
    await m.settle()
    assert m.reason("a-1") == Code.OVER_QUOTA
    await quota(m.scope, "t1", cpu="2")
    await m.settle()
    assert len(m.where("a-")) == 2


@minds
async def test_nobody_is_pushed_aside_for_work_that_no_quota_covers(m: Mind) -> None:
    await want(m.scope, "low", 8)
    await m.settle()
    await quota(m.scope, "t2", cpu="1")
    await want(m.scope, "top", 1, "2", priority="top", owner="t2")
    await m.settle()
    assert m.reason("top-0", "t2") == Code.OVER_QUOTA
    assert not [one for made in m.proposed for one in reserves(made)]


# -- overrides -------------------------------------------------------------------------------------------------------------


@minds
async def test_paused_work_waits_and_goes_on_when_the_pause_ends_by_itself(m: Mind) -> None:
    await override(m.scope, "p", "pause-expansion", 20, workloads=("t1/a",))
    await want(m.scope, "a", 1)
    await want(m.scope, "b", 1)
    await m.settle()
    assert sorted(m.where()) == ["b-0"]
    assert m.reason("a-0") == Code.OVERRIDE
    ends = m.cycle.next_ms()
    assert ends is not None and ends <= m.now_ms + 20_000
    m.scope.clock.at_ms = ends
    m.propose()
    assert m.slot("a-0") in m.view.assumed


@minds
async def test_paused_while_its_claim_was_under_way__a_refused_one_is_not_claimed_again(m: Mind) -> None:
    await want(m.scope, "a", 1, "3")
    await want(m.scope, "b", 2, "3")
    await m.see()
    m.hear()
    m.limit = 1
    made = m.propose()
    m.limit = 100
    await rival(m)
    await override(m.scope, "p", "pause-expansion", 60, workloads=("t1/a",))
    await m.see()
    m.hear()
    m.learn(made, await m.ask(made))
    await move(m.scope, "replica/t1/b-0", "remove", "stop", "stopped")
    await m.settle()
    assert m.reason("a-0") == Code.OVERRIDE


@minds
async def test_an_avoided_place_is_left_alone_until_the_override_goes(m: Mind) -> None:
    await override(m.scope, "x", "avoid", zones=("a",))
    await want(m.scope, "a", 5)
    await m.settle()
    assert set(m.where().values()) == {"n2"} and len(m.where()) == 4
    assert m.reason("a-4") in (Code.NO_ROOM, Code.OVERRIDE)
    await m.scope.must(OPERATOR, Delete("Override", "x"))
    await m.settle()
    assert len(m.where()) == 5


@minds
async def test_a_boost_decides_who_comes_first_and_pushes_nobody_aside(m: Mind) -> None:
    await want(m.scope, "low", 4)
    await m.settle()
    await want(m.scope, "a", 4)
    await want(m.scope, "b", 4, "500m")
    await override(m.scope, "b", "boost", by=50, workloads=("t1/b",))
    m.limit = 4
    await m.turn()
    await m.see()
    assert len(m.where("b-")) == 4
    await m.settle()
    assert len(m.where("low-")) == 4


# -- reasons ---------------------------------------------------------------------------------------------------------------


@minds
async def test_every_one_of_a_line_that_waits_is_told_why(m: Mind) -> None:
    """Also those beyond the batch, who were not tried themselves."""
    m.limit = 3
    await want(m.scope, "big", 20, "5", replicas=20)
    await m.settle()
    told = {name for one in m.decisions("waiting") for name in one.replicas}
    assert len(told) == 20
    assert all(one.reason == Code.NO_ROOM and one.never for one in m.decisions("waiting") if one.nodes)
    assert all("(" not in cure for one in m.decisions() for cure in one.cures)


@minds
async def test_a_refusal_is_in_the_records(m: Mind) -> None:
    await want(m.scope, "a", 1, "4")
    await want(m.scope, "b", 2, "4")
    await m.see()
    made = m.propose()
    await rival(m)
    m.learn(made, await m.ask(made))
    await m.settle()
    assert {one.reason for one in m.decisions("refused")} & {Code.NO_ROOM}


@minds
async def test_what_cannot_be_placed_stands_in_nobodys_way(m: Mind) -> None:
    """F23."""
    for i in range(10):
        await want(m.scope, f"huge{i}", 1, str(10 + i), priority="top")
    await want(m.scope, "a", 8)
    m.limit = 4
    await m.settle()
    assert len(m.where("a-")) == 8


@minds
async def test_room_that_a_refused_claim_gives_back_wakes_who_waits_for_it(m: Mind) -> None:
    """The assumption goes when the view has seen why; nobody else's event has to come for the others to hear of it."""
    await want(m.scope, "a", 2, "4")
    await m.see()
    made = m.propose()
    await want(m.scope, "b", 1, "3")
    await m.see()
    m.propose()
    assert m.reason("b-0") == Code.NO_ROOM
    await m.scope.must(OPERATOR, Delete("Workload", "a", "t1"))
    verdicts = await m.ask(made)
    assert all(isinstance(v, Refused) for c, v in zip(made.claims, verdicts, strict=True) if isinstance(c, Bind))
    m.learn(made, verdicts)
    await m.see()
    assert "b-0" in binds(m.propose())
