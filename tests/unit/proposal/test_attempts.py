"""What comes of one line's turn: reasons that are true, cures that help, plug-ins that harm only their own."""

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
from tests.properties.authority_world import amounts, furnished, node, run
from tests.unit.commitment.authority_fixture import incarnation, meets, move
from tests.unit.proposal.scheduler_fixture import Mind, binds, nodes, quota, rank, want

SPREAD = Placement(topology_spread=(Spread(topology_key="zone"),))


def told(test: Any, **shape: Any) -> None:
    async def tell() -> None:
        scope = await furnished()
        try:
            await test(Mind(scope, **shape))
        finally:
            await scope.close()

    run(tell())


def odd(ask: Requirements) -> bool:
    """Only work that spreads: the rest of the cluster must not notice the plug-in."""
    return bool(ask.spread)


def foreign(check: Any, applies: Any = odd) -> Filter:
    return Filter("theirs", Code.POLICY, check, applies=applies, third_party=True)


class Fickle:
    """Answers well, and then fails: half way through a run."""

    def __init__(self, good: int) -> None:
        self.left = good

    def __call__(self, ask: Requirements, site: Any, peers: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("no more")
        return np.ones(len(site), dtype=bool)


def fails(*_: Any) -> Any:
    raise RuntimeError("broken")


NONSENSE = {
    "raises": fails,
    "too many": lambda ask, site, peers: np.ones(len(site) + 1, dtype=bool),
    "two dimensions": lambda ask, site, peers: np.ones((len(site), 2), dtype=bool),
    "text": lambda ask, site, peers: ["no"] * (len(site) + 3),
}


@pytest.mark.parametrize("nonsense", sorted(NONSENSE))
def test_a_filter_that_answers_nonsense_makes_only_its_own_wait(nonsense: str) -> None:
    async def test(m: Mind) -> None:
        await want(m.scope, "odd", 2, placement=SPREAD)
        await want(m.scope, "fine", 2)
        await m.settle()
        assert sorted(m.where()) == ["fine-0", "fine-1"]
        assert m.reason("odd-0") == Code.INTERNAL_ERROR
        assert any("theirs" in one.detail for one in m.decisions("waiting"))

    told(test, filters=[foreign(NONSENSE[nonsense])])


@pytest.mark.parametrize("good", range(6))
def test_a_filter_that_fails_half_way_leaves_nothing_posted(good: int) -> None:
    async def test(m: Mind) -> None:
        await want(m.scope, "odd", 6)
        await want(m.scope, "top", 2, "3", priority="top")
        for _ in range(3):
            await m.turn()
            m.checked()

    told(test, filters=[foreign(Fickle(good), lambda ask: True)])


@pytest.mark.parametrize("where", ["applies", "epoch", "score", "shape"])
def test_a_score_that_fails_makes_only_its_own_wait(where: str) -> None:
    score = {"score": fails, "shape": lambda ask, site: [0.5, 0.5, 0.5, 0.5, 0.5]}.get(where, lambda ask, site: 0.5)
    applies = fails if where == "applies" else lambda ask: True
    theirs = Score("theirs", score, applies=applies, epoch=fails if where == "epoch" else lambda: 1, third_party=True)

    async def test(m: Mind) -> None:
        await want(m.scope, "a", 2)
        await m.settle()
        assert m.reason("a-0") == Code.INTERNAL_ERROR

    told(test, scores=(*DEFAULT_SCORES, theirs))


def test_scores_out_of_range_make_no_place_impossible() -> None:
    theirs = Score("theirs", lambda ask, site: np.full(len(site), -np.inf), weight=1_000, third_party=True)

    async def test(m: Mind) -> None:
        await want(m.scope, "a", 8)
        await m.settle()
        assert len(m.where()) == 8

    told(test, scores=(*DEFAULT_SCORES, theirs))


def test_weights_that_no_number_holds_are_refused_at_once() -> None:
    heavy = [Score(f"s{i}", lambda ask, site: 1.0, weight=1_000, third_party=True) for i in range(3)]
    with pytest.raises(PluginError, match="weights"):
        told(lambda m: want(m.scope, "a"), scores=heavy)


# -- reasons and cures -----------------------------------------------------------------------------------------------------


async def _reasons(m: Mind) -> None:
    await want(m.scope, "never", 1, "9")
    await want(m.scope, "elsewhere", 1, placement=Placement(zones=("z",)))
    await want(m.scope, "picky", 1, placement=Placement(node_selector={"disk": "ssd"}))
    await m.settle()


def test_each_waits_for_its_own_reason_with_cures_and_a_deadline() -> None:
    async def test(m: Mind) -> None:
        await _reasons(m)
        found = {name: m.wait(f"{name}-0") for name in ("never", "elsewhere", "picky")}
        assert {name: wait.reason for name, wait in found.items() if wait} == {
            "never": Code.NO_ROOM, "elsewhere": Code.PLACE, "picky": Code.SELECTOR,
        }  # fmt: skip
        for wait in found.values():
            assert wait is not None
            assert wait.unblock_events and m.now_ms < wait.until_ms <= m.now_ms + 60_000
        assert all(one.never for one in m.decisions("waiting"))

    told(test)


def test_a_node_that_comes_wakes_whom_it_may_help_and_nobody_else() -> None:
    async def test(m: Mind) -> None:
        await _reasons(m)
        await nodes(m.scope, node("n9", "4", labels={"disk": "ssd"}))
        await m.see()
        m.hear()
        assert m.reason("picky-0") == ""
        assert m.reason("elsewhere-0") == Code.PLACE
        await m.settle()
        assert m.where("picky") == {"picky-0": "n9"}

    told(test)


def test_freed_room_wakes_only_those_who_fit_there() -> None:
    async def test(m: Mind) -> None:
        await want(m.scope, "full", 8)
        await m.settle()
        await want(m.scope, "small", 1)
        await want(m.scope, "large", 1, "3")
        await m.settle()

        await move(m.scope, "replica/t1/full-0", "remove", "stop", "stopped")
        await m.see()
        m.hear()
        assert m.reason("small-0") == ""
        assert m.reason("large-0") == Code.NO_ROOM
        assert "small-0" in binds(m.propose())

    told(test)


def test_a_priority_class_that_changes_is_asked_anew() -> None:
    """What preempted nobody does from now on; nobody loses his place for it."""

    async def test(m: Mind) -> None:
        await rank(m.scope, "meek", 50, preempts=False)
        await want(m.scope, "low", 8)
        await m.settle()
        await want(m.scope, "meek", 1, priority="meek")
        await m.settle()
        line = m.cycle.backlog.queue_of(m.slot("meek-0"))
        assert line is not None
        arrived = line.arrived_ms(m.slot("meek-0"))
        m.scope.clock.at_ms += 5_000
        await rank(m.scope, "meek", 50, preempts=True)
        await m.see()
        m.hear()
        line = m.cycle.backlog.queue_of(m.slot("meek-0"))
        assert line is not None and line.arrived_ms(m.slot("meek-0")) == arrived
        await m.settle()
        assert m.where("meek")

    told(test)


def test_a_new_slice_of_quota_wakes_who_waits_for_quota() -> None:
    """It has another name than the quota that was too small."""

    async def test(m: Mind) -> None:
        await quota(m.scope, "t1", cpu="0", memory="0")
        await want(m.scope, "a", 1)
        await m.settle()
        assert m.reason("a-0") == Code.OVER_QUOTA
        await meets(m.scope, "scope/global")
        spec = GrantSpec(holder="scope/r1", issuer="scope/global", amount=amounts(cpu="2"), tenant="t1", ttl=Duration(60_000))
        budgets = m.scope.actors["budgets"]
        await m.scope.must(budgets, Accept("s", spec, 1, m.now_ms, "one", incarnation(m.scope)))
        await m.see()
        assert "a-0" in binds(m.propose())

    told(test)


def test_words_are_what_people_read() -> None:
    assert event_names([("quota", "t1"), ("room",), ("member", ("a", "key"))]) == ("member", "quota", "room")


def test_records_stay_small_for_ten_thousand_members() -> None:
    async def test(m: Mind) -> None:
        m.limit = 1_000
        await want(m.scope, "a", 3_000, "9", replicas=3_000)
        made = await m.turn()
        explains = [claim for claim in made.claims if isinstance(claim, RecordDecision)]
        assert all(len(one.decision.replicas) <= 256 for one in explains)
        assert len(explains) <= 20
        await m.settle()
        told_ = {name for one in m.decisions("waiting") for name in one.replicas}
        assert len(told_) == 3_000

    told(test)


def test_whom_it_must_be_near_is_placed_after_it_in_one_batch__it_hears_of_that() -> None:
    """It comes first, by its priority, and finds nobody to be near; its reason is what it found, not what was true later."""

    async def test(m: Mind) -> None:
        near = Placement(affinity=(Affinity(label_selector={"app": "x"}, topology_key="zone"),))
        await want(m.scope, "near", 1, placement=near, priority="high")
        await want(m.scope, "friend", 1, labels={"app": "x"})
        await m.see()
        m.propose()
        assert m.reason("near-0") == Code.AFFINITY
        assert "near-0" in binds(m.propose())

    told(test)
