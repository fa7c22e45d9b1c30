"""Preemption before a real authority: victims are the fewest and cheapest, none is evicted in vain, and it terminates."""

from __future__ import annotations

from typing import Any

from remit.model.claims import Code
from remit.model.kinds import Affinity, DeviceRequest, Disruption, NodeHealth, Placement, Spread
from remit.proposal.placement.preemption_candidates import VictimRateLimit
from tests.properties.authority_world import node, populated_scope, run
from tests.unit.commitment.authority_fixture import commit_transitions
from tests.unit.proposal.scheduler_fixture import (
    CycleFixture,
    create_pending,
    cycle_test,
    mark,
    nodes,
    quota,
    rank,
    refused,
    reserves,
)

ROUNDS_MAX = 30


def victims(m: CycleFixture) -> list[str]:
    """All victims in the order of the claims."""
    return [key.rpartition("/")[2] for made in m.proposed for one in reserves(made) for key in one.victims]


async def settle_evictions(m: CycleFixture) -> int:
    """Stop and requeue draining replicas until none is left; return the number of rounds."""
    for rounds in range(ROUNDS_MAX):
        await m.settle()
        keys = [key for key in m.scope.checker.rows if key.startswith("replica/")]
        leaving = [key for key in keys if m.scope.phase(key) == "draining"]
        for key in leaving:
            await commit_transitions(m.scope, key, "stop", "stopped", "requeue")
        if not leaving:
            return rounds
        m.scope.clock.at_ms += 1_000
    raise AssertionError("preemption does not terminate")


async def running(m: CycleFixture, name: str, count: int, cpu: str = "1", **shape: Any) -> None:
    await create_pending(m.scope, name, count, cpu, **shape)
    await m.settle()
    for i in range(count):
        await commit_transitions(m.scope, f"replica/{shape.get('owner', 't1')}/{name}-{i}", "start", "run")
    await m.settle()


@cycle_test
async def test_lowest_priority_is_evicted_and_no_more_than_needed(m: CycleFixture) -> None:
    await rank(m.scope, "mid", 10)
    await create_pending(m.scope, "mid", 4, priority="mid", placement=Placement(zones=("a",)))
    await create_pending(m.scope, "low", 4, placement=Placement(zones=("b",)))
    await m.settle()
    await create_pending(m.scope, "top", 1, "2", priority="top")
    await settle_evictions(m)
    assert len(victims(m)) == 2
    assert all(name.startswith("low") for name in victims(m))
    assert m.where("top")["top-0"] == "n2"


@cycle_test
async def test_victim_of_group_is_replica_that_frees_requested_device(m: CycleFixture) -> None:
    """The first of `safe` shares its GPU with a replica that stays: only the other one frees a whole GPU."""
    safe = Disruption(min_available=1)
    await create_pending(m.scope, "safe", 2, devices=(DeviceRequest(kind="gpu", share="600m"),), disruption=safe)
    await m.settle()
    await create_pending(m.scope, "stays", 1, devices=(DeviceRequest(kind="gpu", share="400m"),), priority="top")
    await m.settle()
    shared = m.scope.row("replica/t1/stays-0")["status"]["devices"]
    shared_gpu, sole_gpu = sorted(
        ("safe-0", "safe-1"), key=lambda name: m.scope.row(f"replica/t1/{name}")["status"]["devices"].keys() != shared.keys()
    )
    for name in (shared_gpu, sole_gpu):
        await commit_transitions(m.scope, f"replica/t1/{name}", "start", "run")
    await create_pending(m.scope, "whole", 1, devices=(DeviceRequest(kind="gpu", count=1),), priority="high")
    await settle_evictions(m)
    assert victims(m) == [sole_gpu]


@cycle_test
async def test_one_large_victim_is_preferred_to_several_small_ones(m: CycleFixture) -> None:
    await create_pending(m.scope, "small", 4, placement=Placement(zones=("a",)))
    await create_pending(m.scope, "large", 1, "4", placement=Placement(zones=("b",)))
    await m.settle()
    await create_pending(m.scope, "top", 1, "4", priority="top")
    await settle_evictions(m)
    assert victims(m) == ["large-0"]


@cycle_test
async def test_nothing_is_evicted_while_capacity_is_free(m: CycleFixture) -> None:
    await create_pending(m.scope, "low", 6)
    await m.settle()
    await create_pending(m.scope, "top", 2, priority="top")
    await settle_evictions(m)
    assert not victims(m)


@cycle_test
async def test_equal_priority_is_not_evicted_and_non_preempting_class_waits(m: CycleFixture) -> None:
    await rank(m.scope, "meek", 500, preempts=False)
    await create_pending(m.scope, "high", 8, priority="high")
    await m.settle()
    await create_pending(m.scope, "also", 1, priority="high")
    await create_pending(m.scope, "meek", 1, priority="meek")
    await settle_evictions(m)
    assert not victims(m)
    assert m.reason("also-0") == m.reason("meek-0") == Code.NO_ROOM


@cycle_test
async def test_eviction_keeps_min_available_of_workload(m: CycleFixture) -> None:
    await running(m, "kept", 8, disruption=Disruption(min_available=6))
    await create_pending(m.scope, "top", 4, priority="top")
    await settle_evictions(m)
    assert len(victims(m)) == 2
    assert len(m.where("kept")) == 6
    assert len(m.where("top")) == 2


@cycle_test
async def test_two_proposals_in_flight_respect_disruption_limit_together(m: CycleFixture) -> None:
    """The second is proposed before the first is answered: the victims of the first count already."""
    await running(m, "kept", 8, disruption=Disruption(min_available=6))
    m.limit = 1
    await create_pending(m.scope, "top", 4, priority="top")
    await m.sync()
    made = []
    for _ in range(5):
        made.append(m.propose())
        m.scope.clock.at_ms += 2_000
    assert sum(len(one.victims) for each in made for one in reserves(each)) == 2
    for each in made:
        m.deliver(each, await m.ask(each))
    await settle_evictions(m)
    assert len(m.where("kept")) == 6


@cycle_test
async def test_running_replicas_are_kept_while_bound_ones_are_evicted(m: CycleFixture) -> None:
    await create_pending(m.scope, "kept", 8, disruption=Disruption(min_available=3))
    await m.settle()
    for i in range(3):
        await commit_transitions(m.scope, f"replica/t1/kept-{i}", "start", "run")
    await create_pending(m.scope, "top", 8, priority="top")
    await settle_evictions(m)
    assert not {"kept-0", "kept-1", "kept-2"} & set(victims(m))
    assert len(victims(m)) == 5


@cycle_test
async def test_protected_replicas_do_not_hide_evictable_ones(m: CycleFixture) -> None:
    """Many nodes look cheaper, and on none of them may a replica be evicted."""
    protected_nodes = [node(f"p{i:03}", "1", zone="p") for i in range(150)]
    await nodes(m.scope, *protected_nodes)
    await quota(m.scope, "t1", cpu="1000")
    await create_pending(m.scope, "kept", 150, disruption=Disruption(min_available=150), placement=Placement(zones=("p",)))
    await rank(m.scope, "mid", 10)
    await create_pending(m.scope, "mid", 8, priority="mid", placement=Placement(zones=("a", "b")))
    m.limit = 200
    await m.settle()
    assert len(m.where()) == 158
    await create_pending(m.scope, "top", 1, priority="top")
    await settle_evictions(m)
    assert [name[:3] for name in victims(m)] == ["mid"]


@cycle_test
async def test_several_replicas_reserve_one_node_in_one_proposal(m: CycleFixture) -> None:
    await create_pending(m.scope, "low", 8)
    await m.settle()
    await create_pending(m.scope, "top", 4, "2", priority="top")
    await m.sync()
    made = m.propose()
    assert len(reserves(made)) == 4
    assert len({key for one in reserves(made) for key in one.victims}) == 8
    m.deliver(made, await m.ask(made))
    assert not refused(m)
    await settle_evictions(m)
    assert len(m.where("top")) == 4


@cycle_test
async def test_second_class_does_not_pay_for_first_classs_reservation(m: CycleFixture) -> None:
    """Both preempt on the same nodes in one cycle: each evicts what it needs and no more."""
    await create_pending(m.scope, "low", 8)
    await m.settle()
    await create_pending(m.scope, "one", 1, "3", priority="top")
    await create_pending(m.scope, "two", 1, "2", priority="top")
    await create_pending(m.scope, "three", 1, "2", priority="high")
    await m.sync()
    made = m.propose()
    assert sorted(len(one.victims) for one in reserves(made)) == [2, 2, 3]
    m.deliver(made, await m.ask(made))
    assert not refused(m)


@cycle_test
async def test_capacity_left_by_large_victim_is_reused_instead_of_new_eviction(m: CycleFixture) -> None:
    await create_pending(m.scope, "large", 2, "4")
    await m.settle()
    await create_pending(m.scope, "top", 2, "2", priority="top")
    await settle_evictions(m)
    assert len(victims(m)) == 1
    assert len(m.where("top")) == 2
    assert len(m.where("large")) == 1


@cycle_test
async def test_eviction_frees_requested_devices(m: CycleFixture) -> None:
    gpu = (DeviceRequest(kind="gpu", count=1),)
    await create_pending(m.scope, "low", 2, "100m", devices=gpu)
    await m.settle()
    await create_pending(m.scope, "top", 1, "100m", devices=(DeviceRequest(kind="gpu", count=2),), priority="top")
    await settle_evictions(m)
    assert sorted(victims(m)) == ["low-0", "low-1"]
    assert m.where("top") == {"top-0": "n1"}
    assert not refused(m)


@cycle_test
async def test_peer_required_by_affinity_is_not_evicted(m: CycleFixture) -> None:
    """Without that peer its affinity would not hold there: the claim would be refused for ever."""
    near = Placement(affinity=(Affinity(label_selector={"app": "x"}, topology_key="node"),), zones=("a",))
    await create_pending(m.scope, "friend", 1, "1", labels={"app": "x"}, placement=Placement(zones=("a",)))
    await create_pending(m.scope, "low", 3, "1", placement=Placement(zones=("a",)))
    await m.settle()
    await create_pending(m.scope, "top", 1, "2", priority="top", placement=near)
    await settle_evictions(m)
    assert len(victims(m)) == 2
    assert "friend-0" not in victims(m)
    assert m.where("top") == {"top-0": "n1"}
    assert not refused(m)


@cycle_test
async def test_spread_workload_evicts_zone_by_zone(m: CycleFixture) -> None:
    await create_pending(m.scope, "low", 8)
    await m.settle()
    spread = Placement(topology_spread=(Spread(topology_key="zone"),))
    await create_pending(m.scope, "top", 4, priority="top", placement=spread)
    await settle_evictions(m)
    assert sorted(m.where("top").values()) == ["n1", "n1", "n2", "n2"]
    assert not refused(m)
    assert len(victims(m)) == 4


@cycle_test
async def test_suspect_node_gets_no_evictions(m: CycleFixture) -> None:
    await create_pending(m.scope, "low", 4, placement=Placement(zones=("a",)))
    await m.settle()
    await mark(m.scope, "n1", NodeHealth.SUSPECT)
    await create_pending(m.scope, "top", 1, "4", priority="top", placement=Placement(zones=("a",)))
    await settle_evictions(m)
    assert not victims(m)


def test_eviction_rate_is_limited_and_recovers() -> None:
    async def scenario() -> None:
        scope = await populated_scope()
        m = CycleFixture(scope, victim_rate=VictimRateLimit(per_s=1, burst=2))
        await create_pending(scope, "low", 8)
        await m.settle()
        await create_pending(scope, "top", 4, priority="top")
        await m.run_cycle()
        assert len(victims(m)) == 2
        wait = m.wait("top-3")
        assert wait is not None and wait.until_ms <= m.now_ms + 1_500
        began = m.now_ms
        while len(victims(m)) < 4:
            await m.run_cycle()
            scope.clock.at_ms += 100
        assert m.now_ms - began >= 1_900
        await scope.close()

    run(scenario())


def test_eviction_of_many_waits_until_rate_allows_them_at_once() -> None:
    async def scenario() -> None:
        scope = await populated_scope()
        m = CycleFixture(scope, victim_rate=VictimRateLimit(per_s=2, burst=4))
        await create_pending(scope, "low", 8)
        await m.settle()
        await create_pending(scope, "first", 1, "2", priority="top")
        await m.run_cycle()
        await create_pending(scope, "top", 1, "4", priority="top")
        await m.run_cycle()
        wait = m.wait("top-0")
        assert len(victims(m)) == 2
        assert wait is not None and wait.until_ms <= m.now_ms + 2_000, "retried well before a minute"
        await scope.close()

    run(scenario())


@cycle_test
async def test_preemption_terminates_along_chain_of_priorities(m: CycleFixture) -> None:
    """Each class evicts the next lower one, which is requeued and does the same; equals are never evicted."""
    for i in range(6):
        await rank(m.scope, f"p{i}", 10 * i)
        await create_pending(m.scope, f"w{i}", 4, "2", priority=f"p{i}")
        await settle_evictions(m)
    assert set(m.where()) == {f"w5-{i}" for i in range(4)}
    assert len(victims(m)) <= 6 * 4


@cycle_test
async def test_victims_are_recorded_in_decisions(m: CycleFixture) -> None:
    await create_pending(m.scope, "low", 8)
    await m.settle()
    await create_pending(m.scope, "top", 1, "2", priority="top")
    await settle_evictions(m)
    reserved = m.decisions("reserved")
    assert [sorted(one.victims) for one in reserved] == [sorted(f"replica/t1/{name}" for name in victims(m))]


@cycle_test
async def test_capacity_of_draining_replica_is_not_claimed_early(m: CycleFixture) -> None:
    """A draining replica cannot be a victim, and until it has gone the authority does not count on its capacity."""
    await create_pending(m.scope, "low", 8)
    await m.settle()
    for i in range(8):
        if m.where()[f"low-{i}"] == "n1":
            await commit_transitions(m.scope, f"replica/t1/low-{i}", "remove")
            break
    await create_pending(m.scope, "top", 2, "4", priority="top")
    await m.settle()
    assert not refused(m)
    await settle_evictions(m)
    assert len(m.where("top")) == 2
    assert not refused(m)
