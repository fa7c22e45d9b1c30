"""Attempts: recorded reasons are true, unblock events help, and a failing plug-in harms only its own work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from remit.law.fit import Requirements
from remit.model.claims import Accept, Code, RecordDecision
from remit.model.kinds import Affinity, Placement, Spread
from remit.model.records import GrantSpec
from remit.model.resources import Duration
from remit.proposal.attempts import event_names
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.plugins import Filter, PluginError, Score
from tests.properties.authority_world import amounts, node, populated_scope, run
from tests.unit.commitment.authority_fixture import accept_peer, commit_transitions, incarnation
from tests.unit.proposal.scheduler_fixture import CycleFixture, binds, create_pending, nodes, quota, rank

SPREAD = Placement(topology_spread=(Spread(topology_key="zone"),))


def run_with(test: Any, **shape: Any) -> None:
    async def scenario() -> None:
        scope = await populated_scope()
        try:
            await test(CycleFixture(scope, **shape))
        finally:
            await scope.close()

    run(scenario())


def has_spread(ask: Requirements) -> bool:
    """Applies only to work with spread terms: the rest of the cluster must not notice the plug-in."""
    return bool(ask.spread)


def third_party(check: Any, applies: Any = has_spread) -> Filter:
    return Filter("theirs", Code.POLICY, check, applies=applies, third_party=True)


class FailsLater:
    """Answers well for a while and then fails, in the middle of a run."""

    def __init__(self, good: int) -> None:
        self.left = good

    def __call__(self, ask: Requirements, site: Any, peers: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("no more")
        return np.ones(len(site), dtype=bool)


def fails(*_: Any) -> Any:
    raise RuntimeError("violations")


NONSENSE = {
    "raises": fails,
    "too many": lambda ask, site, peers: np.ones(len(site) + 1, dtype=bool),
    "two dimensions": lambda ask, site, peers: np.ones((len(site), 2), dtype=bool),
    "text": lambda ask, site, peers: ["no"] * (len(site) + 3),
}


@pytest.mark.parametrize("nonsense", sorted(NONSENSE))
def test_filter_with_wrong_result_blocks_only_its_own_work(nonsense: str) -> None:
    async def test(m: CycleFixture) -> None:
        await create_pending(m.scope, "odd", 2, placement=SPREAD)
        await create_pending(m.scope, "fine", 2)
        await m.settle()
        assert sorted(m.where()) == ["fine-0", "fine-1"]
        assert m.reason("odd-0") == Code.INTERNAL_ERROR
        assert any("theirs" in one.detail for one in m.decisions("waiting"))

    run_with(test, filters=[third_party(NONSENSE[nonsense])])


@pytest.mark.parametrize("good", range(6))
def test_filter_that_fails_during_run_leaves_nothing_posted(good: int) -> None:
    async def test(m: CycleFixture) -> None:
        await create_pending(m.scope, "odd", 6)
        await create_pending(m.scope, "top", 2, "3", priority="top")
        for _ in range(3):
            await m.run_cycle()
            m.assert_consistent()

    run_with(test, filters=[third_party(FailsLater(good), lambda ask: True)])


@pytest.mark.parametrize("where", ["applies", "epoch", "score", "shape"])
def test_failing_score_blocks_only_its_own_work(where: str) -> None:
    score = {"score": fails, "shape": lambda ask, site: [0.5, 0.5, 0.5, 0.5, 0.5]}.get(where, lambda ask, site: 0.5)
    applies = fails if where == "applies" else lambda ask: True
    plugin = Score("theirs", score, applies=applies, epoch=fails if where == "epoch" else lambda: 1, third_party=True)

    async def test(m: CycleFixture) -> None:
        await create_pending(m.scope, "a", 2)
        await m.settle()
        assert m.reason("a-0") == Code.INTERNAL_ERROR

    run_with(test, scores=(*DEFAULT_SCORES, plugin))


def test_out_of_range_scores_exclude_no_node() -> None:
    plugin = Score("theirs", lambda ask, site: np.full(len(site), -np.inf), weight=1_000, third_party=True)

    async def test(m: CycleFixture) -> None:
        await create_pending(m.scope, "a", 8)
        await m.settle()
        assert len(m.where()) == 8

    run_with(test, scores=(*DEFAULT_SCORES, plugin))


def test_weights_over_limit_are_refused_when_loaded() -> None:
    heavy = [Score(f"s{i}", lambda ask, site: 1.0, weight=1_000, third_party=True) for i in range(3)]
    with pytest.raises(PluginError, match="weights"):
        run_with(lambda m: create_pending(m.scope, "a"), scores=heavy)


# -- reasons and unblock events --------------------------------------------------------------------------------------------


async def _reasons(m: CycleFixture) -> None:
    await create_pending(m.scope, "never", 1, "9")
    await create_pending(m.scope, "elsewhere", 1, placement=Placement(zones=("z",)))
    await create_pending(m.scope, "picky", 1, placement=Placement(node_selector={"disk": "ssd"}))
    await m.settle()


def test_each_queue_waits_with_own_reason_events_and_deadline() -> None:
    async def test(m: CycleFixture) -> None:
        await _reasons(m)
        found = {name: m.wait(f"{name}-0") for name in ("never", "elsewhere", "picky")}
        assert {name: wait.reason for name, wait in found.items() if wait} == {
            "never": Code.NO_ROOM, "elsewhere": Code.PLACE, "picky": Code.SELECTOR,
        }  # fmt: skip
        for wait in found.values():
            assert wait is not None
            assert wait.unblock_events and m.now_ms < wait.until_ms <= m.now_ms + 60_000
        assert all(one.never for one in m.decisions("waiting"))

    run_with(test)


def test_new_node_wakes_only_replicas_it_may_help() -> None:
    async def test(m: CycleFixture) -> None:
        await _reasons(m)
        await nodes(m.scope, node("n9", "4", labels={"disk": "ssd"}))
        await m.sync()
        m.notify()
        assert m.reason("picky-0") == ""
        assert m.reason("elsewhere-0") == Code.PLACE
        await m.settle()
        assert m.where("picky") == {"picky-0": "n9"}

    run_with(test)


def test_freed_capacity_wakes_only_replicas_that_fit() -> None:
    async def test(m: CycleFixture) -> None:
        await create_pending(m.scope, "full", 8)
        await m.settle()
        await create_pending(m.scope, "small", 1)
        await create_pending(m.scope, "large", 1, "3")
        await m.settle()

        await commit_transitions(m.scope, "replica/t1/full-0", "remove", "stop", "stopped")
        await m.sync()
        m.notify()
        assert m.reason("small-0") == ""
        assert m.reason("large-0") == Code.NO_ROOM
        assert "small-0" in binds(m.propose())

    run_with(test)


def test_changed_priority_class_reschedules_its_replicas_in_place() -> None:
    """A class that did not preempt does from now on; its replicas keep their position in the queue."""

    async def test(m: CycleFixture) -> None:
        await rank(m.scope, "meek", 50, preempts=False)
        await create_pending(m.scope, "low", 8)
        await m.settle()
        await create_pending(m.scope, "meek", 1, priority="meek")
        await m.settle()
        line = m.cycle.backlog.queue_of(m.slot("meek-0"))
        assert line is not None
        arrived = line.arrived_ms(m.slot("meek-0"))
        m.scope.clock.at_ms += 5_000
        await rank(m.scope, "meek", 50, preempts=True)
        await m.sync()
        m.notify()
        line = m.cycle.backlog.queue_of(m.slot("meek-0"))
        assert line is not None and line.arrived_ms(m.slot("meek-0")) == arrived
        await m.settle()
        assert m.where("meek")

    run_with(test)


def test_new_quota_slice_wakes_replicas_waiting_for_quota() -> None:
    """The grant has another name than the quota that was too small."""

    async def test(m: CycleFixture) -> None:
        await quota(m.scope, "t1", cpu="0", memory="0")
        await create_pending(m.scope, "a", 1)
        await m.settle()
        assert m.reason("a-0") == Code.OVER_QUOTA
        await accept_peer(m.scope, "scope/global")
        spec = GrantSpec(holder="scope/r1", issuer="scope/global", amount=amounts(cpu="2"), tenant="t1", ttl=Duration(60_000))
        budgets = m.scope.actors["budgets"]
        await m.scope.must(budgets, Accept("s", spec, 1, m.now_ms, "one", incarnation(m.scope)))
        await m.sync()
        assert "a-0" in binds(m.propose())

    run_with(test)


def test_event_names_are_readable() -> None:
    assert event_names([("quota", "t1"), ("room",), ("member", ("a", "key"))]) == ("member", "quota", "room")


def test_decision_records_stay_small_for_thousands_of_replicas() -> None:
    async def test(m: CycleFixture) -> None:
        m.limit = 1_000
        await create_pending(m.scope, "a", 3_000, "9", replicas=3_000)
        made = await m.run_cycle()
        explains = [claim for claim in made.claims if isinstance(claim, RecordDecision)]
        assert all(len(one.decision.replicas) <= 256 for one in explains)
        assert len(explains) <= 20
        await m.settle()
        recorded = {name for one in m.decisions("waiting") for name in one.replicas}
        assert len(recorded) == 3_000

    run_with(test)


def test_replica_is_woken_when_its_affinity_peer_is_placed_in_same_batch() -> None:
    """Its priority puts it first, and it finds no peer; its reason is what it found, not what became true later."""

    async def test(m: CycleFixture) -> None:
        near = Placement(affinity=(Affinity(label_selector={"app": "x"}, topology_key="zone"),))
        await create_pending(m.scope, "near", 1, placement=near, priority="high")
        await create_pending(m.scope, "friend", 1, labels={"app": "x"})
        await m.sync()
        m.propose()
        assert m.reason("near-0") == Code.AFFINITY
        assert "near-0" in binds(m.propose())

    run_with(test)
