"""Are the victims the fewest and cheapest, is nobody pushed aside in vain, and does it end? Before a real authority."""

from __future__ import annotations

from typing import Any

from remit.model.claims import Code
from remit.model.kinds import Affinity, DeviceRequest, Disruption, NodeHealth, Placement, Spread
from remit.proposal.placement.preemption_candidates import VictimRateLimit
from tests.properties.authority_world import furnished, node, run
from tests.unit.commitment.authority_fixture import commit_transitions
from tests.unit.proposal.scheduler_fixture import Mind, mark, minds, nodes, quota, rank, refused, reserves, want

ROUNDS_MAX = 30


def victims(m: Mind) -> list[str]:
    """Everybody who was named as one, in the order of the claims."""
    return [key.rpartition("/")[2] for made in m.proposed for one in reserves(made) for key in one.victims]


async def until_rest(m: Mind) -> int:
    """Who is asked to stop does, and is queued again; how many rounds that takes."""
    for rounds in range(ROUNDS_MAX):
        await m.settle()
        there = [key for key in m.scope.checker.rows if key.startswith("replica/")]
        leaving = [key for key in there if m.scope.phase(key) == "draining"]
        for key in leaving:
            await commit_transitions(m.scope, key, "stop", "stopped", "requeue")
        if not leaving:
            return rounds
        m.scope.clock.at_ms += 1_000
    raise AssertionError("it does not end")


async def running(m: Mind, name: str, count: int, cpu: str = "1", **shape: Any) -> None:
    await want(m.scope, name, count, cpu, **shape)
    await m.settle()
    for i in range(count):
        await commit_transitions(m.scope, f"replica/{shape.get('owner', 't1')}/{name}-{i}", "start", "run")
    await m.settle()


@minds
async def test_the_lowest_priority_goes_and_no_more_of_it_than_must(m: Mind) -> None:
    await rank(m.scope, "mid", 10)
    await want(m.scope, "mid", 4, priority="mid", placement=Placement(zones=("a",)))
    await want(m.scope, "low", 4, placement=Placement(zones=("b",)))
    await m.settle()
    await want(m.scope, "top", 1, "2", priority="top")
    await until_rest(m)
    assert len(victims(m)) == 2
    assert all(name.startswith("low") for name in victims(m))
    assert m.where("top")["top-0"] == "n2"


@minds
async def test_of_a_group_that_may_lose_one__he_goes_who_holds_what_is_asked_for(m: Mind) -> None:
    """The first of `safe` shares his GPU with somebody who stays: the other one makes room alone."""
    safe = Disruption(min_available=1)
    await want(m.scope, "safe", 2, devices=(DeviceRequest(kind="gpu", share="600m"),), disruption=safe)
    await m.settle()
    await want(m.scope, "stays", 1, devices=(DeviceRequest(kind="gpu", share="400m"),), priority="top")
    await m.settle()
    shared = m.scope.row("replica/t1/stays-0")["status"]["devices"]
    beside, alone = sorted(
        ("safe-0", "safe-1"), key=lambda name: m.scope.row(f"replica/t1/{name}")["status"]["devices"].keys() != shared.keys()
    )
    for name in (beside, alone):
        await commit_transitions(m.scope, f"replica/t1/{name}", "start", "run")
    await want(m.scope, "whole", 1, devices=(DeviceRequest(kind="gpu", count=1),), priority="high")
    await until_rest(m)
    assert victims(m) == [alone]


@minds
async def test_one_large_victim_rather_than_several_small_ones(m: Mind) -> None:
    await want(m.scope, "small", 4, placement=Placement(zones=("a",)))
    await want(m.scope, "large", 1, "4", placement=Placement(zones=("b",)))
    await m.settle()
    await want(m.scope, "top", 1, "4", priority="top")
    await until_rest(m)
    assert victims(m) == ["large-0"]


@minds
async def test_nobody_goes_where_there_is_room(m: Mind) -> None:
    await want(m.scope, "low", 6)
    await m.settle()
    await want(m.scope, "top", 2, priority="top")
    await until_rest(m)
    assert not victims(m)


@minds
async def test_equals_and_betters_stay_and_a_class_that_preempts_nobody_waits(m: Mind) -> None:
    await rank(m.scope, "meek", 500, preempts=False)
    await want(m.scope, "high", 8, priority="high")
    await m.settle()
    await want(m.scope, "also", 1, priority="high")
    await want(m.scope, "meek", 1, priority="meek")
    await until_rest(m)
    assert not victims(m)
    assert m.reason("also-0") == m.reason("meek-0") == Code.NO_ROOM


@minds
async def test_a_workload_keeps_as_many_as_it_must(m: Mind) -> None:
    await running(m, "kept", 8, disruption=Disruption(min_available=6))
    await want(m.scope, "top", 4, priority="top")
    await until_rest(m)
    assert len(victims(m)) == 2
    assert len(m.where("kept")) == 6
    assert len(m.where("top")) == 2


@minds
async def test_two_batches_under_way_do_not_take_more_than_a_workload_may_lose(m: Mind) -> None:
    """The second is proposed before the first is seen: what it took counts all the same."""
    await running(m, "kept", 8, disruption=Disruption(min_available=6))
    m.limit = 1
    await want(m.scope, "top", 4, priority="top")
    await m.see()
    made = []
    for _ in range(5):
        made.append(m.propose())
        m.scope.clock.at_ms += 2_000
    assert sum(len(one.victims) for each in made for one in reserves(each)) == 2
    for each in made:
        m.learn(each, await m.ask(each))
    await until_rest(m)
    assert len(m.where("kept")) == 6


@minds
async def test_those_who_are_up_are_kept_up_whoever_else_is_on_the_way(m: Mind) -> None:
    await want(m.scope, "kept", 8, disruption=Disruption(min_available=3))
    await m.settle()
    for i in range(3):
        await commit_transitions(m.scope, f"replica/t1/kept-{i}", "start", "run")
    await want(m.scope, "top", 8, priority="top")
    await until_rest(m)
    assert not {"kept-0", "kept-1", "kept-2"} & set(victims(m))
    assert len(victims(m)) == 5


@minds
async def test_protected_ones_do_not_hide_those_who_may_go(m: Mind) -> None:
    """Many nodes look cheaper, and on none of them may anybody go."""
    things = [node(f"p{i:03}", "1", zone="p") for i in range(150)]
    await nodes(m.scope, *things)
    await quota(m.scope, "t1", cpu="1000")
    await want(m.scope, "kept", 150, disruption=Disruption(min_available=150), placement=Placement(zones=("p",)))
    await rank(m.scope, "mid", 10)
    await want(m.scope, "mid", 8, priority="mid", placement=Placement(zones=("a", "b")))
    m.limit = 200
    await m.settle()
    assert len(m.where()) == 158
    await want(m.scope, "top", 1, priority="top")
    await until_rest(m)
    assert [name[:3] for name in victims(m)] == ["mid"]


@minds
async def test_several_find_room_on_one_node_at_once(m: Mind) -> None:
    await want(m.scope, "low", 8)
    await m.settle()
    await want(m.scope, "top", 4, "2", priority="top")
    await m.see()
    made = m.propose()
    assert len(reserves(made)) == 4
    assert len({key for one in reserves(made) for key in one.victims}) == 8
    m.learn(made, await m.ask(made))
    assert not refused(m)
    await until_rest(m)
    assert len(m.where("top")) == 4


@minds
async def test_a_second_class_does_not_pay_for_the_first_ones_room(m: Mind) -> None:
    """Both make room on the nodes that there are, in one cycle: each takes what it needs, and no more."""
    await want(m.scope, "low", 8)
    await m.settle()
    await want(m.scope, "one", 1, "3", priority="top")
    await want(m.scope, "two", 1, "2", priority="top")
    await want(m.scope, "three", 1, "2", priority="high")
    await m.see()
    made = m.propose()
    assert sorted(len(one.victims) for one in reserves(made)) == [2, 2, 3]
    m.learn(made, await m.ask(made))
    assert not refused(m)


@minds
async def test_what_is_left_over_when_a_large_one_goes_is_waited_for(m: Mind) -> None:
    await want(m.scope, "large", 2, "4")
    await m.settle()
    await want(m.scope, "top", 2, "2", priority="top")
    await until_rest(m)
    assert len(victims(m)) == 1
    assert len(m.where("top")) == 2
    assert len(m.where("large")) == 1


@minds
async def test_devices_are_made_free_and_the_right_ones_named(m: Mind) -> None:
    gpu = (DeviceRequest(kind="gpu", count=1),)
    await want(m.scope, "low", 2, "100m", devices=gpu)
    await m.settle()
    await want(m.scope, "top", 1, "100m", devices=(DeviceRequest(kind="gpu", count=2),), priority="top")
    await until_rest(m)
    assert sorted(victims(m)) == ["low-0", "low-1"]
    assert m.where("top") == {"top-0": "n1"}
    assert not refused(m)


@minds
async def test_whom_it_wants_to_be_near_is_not_sent_away_for_it(m: Mind) -> None:
    """Without that one it would not be allowed to stand there: the claim would be refused for ever."""
    near = Placement(affinity=(Affinity(label_selector={"app": "x"}, topology_key="node"),), zones=("a",))
    await want(m.scope, "friend", 1, "1", labels={"app": "x"}, placement=Placement(zones=("a",)))
    await want(m.scope, "low", 3, "1", placement=Placement(zones=("a",)))
    await m.settle()
    await want(m.scope, "top", 1, "2", priority="top", placement=near)
    await until_rest(m)
    assert len(victims(m)) == 2
    assert "friend-0" not in victims(m)
    assert m.where("top") == {"top-0": "n1"}
    assert not refused(m)


@minds
async def test_those_who_spread_make_room_one_zone_after_another(m: Mind) -> None:
    await want(m.scope, "low", 8)
    await m.settle()
    spread = Placement(topology_spread=(Spread(topology_key="zone"),))
    await want(m.scope, "top", 4, priority="top", placement=spread)
    await until_rest(m)
    assert sorted(m.where("top").values()) == ["n1", "n1", "n2", "n2"]
    assert not refused(m)
    assert len(victims(m)) == 4


@minds
async def test_a_node_that_takes_no_work_gains_nothing_by_victims(m: Mind) -> None:
    await want(m.scope, "low", 4, placement=Placement(zones=("a",)))
    await m.settle()
    await mark(m.scope, "n1", NodeHealth.SUSPECT)
    await want(m.scope, "top", 1, "4", priority="top", placement=Placement(zones=("a",)))
    await until_rest(m)
    assert not victims(m)


def test_no_more_go_in_a_while_than_the_pace_allows_and_then_the_next() -> None:
    async def tell() -> None:
        scope = await furnished()
        m = Mind(scope, victim_rate=VictimRateLimit(per_s=1, burst=2))
        await want(scope, "low", 8)
        await m.settle()
        await want(scope, "top", 4, priority="top")
        await m.turn()
        assert len(victims(m)) == 2
        wait = m.wait("top-3")
        assert wait is not None and wait.until_ms <= m.now_ms + 1_500
        began = m.now_ms
        while len(victims(m)) < 4:
            await m.turn()
            scope.clock.at_ms += 100
        assert m.now_ms - began >= 1_900
        await scope.close()

    run(tell())


def test_one_that_needs_many_waits_until_the_pace_has_saved_up_for_it() -> None:
    async def tell() -> None:
        scope = await furnished()
        m = Mind(scope, victim_rate=VictimRateLimit(per_s=2, burst=4))
        await want(scope, "low", 8)
        await m.settle()
        await want(scope, "first", 1, "2", priority="top")
        await m.turn()
        await want(scope, "top", 1, "4", priority="top")
        await m.turn()
        wait = m.wait("top-0")
        assert len(victims(m)) == 2
        assert wait is not None and wait.until_ms <= m.now_ms + 2_000, "not only after a minute"
        await scope.close()

    run(tell())


@minds
async def test_along_a_chain_of_priorities_it_ends(m: Mind) -> None:
    """Each pushes aside the next lower, which is queued again and does the same; nobody is pushed aside by an equal."""
    for i in range(6):
        await rank(m.scope, f"p{i}", 10 * i)
        await want(m.scope, f"w{i}", 4, "2", priority=f"p{i}")
        await until_rest(m)
    assert set(m.where()) == {f"w5-{i}" for i in range(4)}
    assert len(victims(m)) <= 6 * 4


@minds
async def test_the_victims_are_in_the_records(m: Mind) -> None:
    await want(m.scope, "low", 8)
    await m.settle()
    await want(m.scope, "top", 1, "2", priority="top")
    await until_rest(m)
    said = m.decisions("reserved")
    assert [sorted(one.victims) for one in said] == [sorted(f"replica/t1/{name}" for name in victims(m))]


@minds
async def test_room_that_is_only_coming_is_not_claimed_with_a_few_victims_more(m: Mind) -> None:
    """Who drains already cannot be named as a victim, and until he has gone the authority does not count on it."""
    await want(m.scope, "low", 8)
    await m.settle()
    for i in range(8):
        if m.where()[f"low-{i}"] == "n1":
            await commit_transitions(m.scope, f"replica/t1/low-{i}", "remove")
            break
    await want(m.scope, "top", 2, "4", priority="top")
    await m.settle()
    assert not refused(m)
    await until_rest(m)
    assert len(m.where("top")) == 2
    assert not refused(m)
