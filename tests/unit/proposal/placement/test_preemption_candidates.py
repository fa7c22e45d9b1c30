"""Who may be pushed aside as a view has it, how many in a while, and who is spoken for?"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from remit.model.kinds import Disruption
from remit.model.objects import AnyObject
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.preemption import Eviction
from remit.proposal.placement.preemption_candidates import VictimRateLimit, VictimSelector
from tests.unit.observation.row_fixtures import Told, ready, replica, tenant, work


def scene(*more: AnyObject, low: int = 4, least: int = 0, phase: str = "running") -> tuple[Told, Kernel, WorkClass]:
    """One node of four cores, taken by as many small ones of priority 0."""
    made = work("low", replicas=8, disruption=Disruption(min_available=least))
    there = [replica("low", i, phase=phase, on="n1") for i in range(low)]
    t = Told(ready("n1"), tenant("t1"), *made, *there, *work("top", "2"), *more)
    kernel = Kernel(t.view.columns, t.view.peers)
    return t, kernel, kernel.class_for("top", t.view.shapes.requirements_of(t.shape("top")))


def plan(
    victims: VictimSelector, t: Told, kernel: Kernel, one: WorkClass, priority: int = 10, count: int = 1
) -> list[Eviction]:
    return victims.plan(t.view, kernel, one, kernel.without_capacity_check(one), priority, count)


def begun(t: Told, pace: VictimRateLimit = VictimRateLimit(), now_ms: int = 0) -> VictimSelector:
    made = VictimSelector(pace)
    made.begin(now_ms, t.view)
    return made


def test_only_lower_ones_may_go() -> None:
    t, kernel, one = scene()
    assert not plan(begun(t), t, kernel, one, priority=0)
    assert [len(each.victims) for each in plan(begun(t), t, kernel, one, priority=1)] == [2]


def test_whoever_does_not_run_is_no_victim() -> None:
    for phase in ("draining", "stopping", "unknown", "failed", "finished"):
        t, kernel, one = scene(phase=phase)
        assert not plan(begun(t), t, kernel, one)


def test_who_is_taken_stays_taken_until_he_is_seen_to_go_or_is_spared() -> None:
    t, kernel, one = scene()
    victims = begun(t)
    first = plan(victims, t, kernel, one)
    t.view.columns.post(first[0].row, one.requirements.resources, {})
    victims.begin(10, t.view)
    second = plan(victims, t, kernel, one)
    assert not set(first[0].victims) & set(second[0].victims)
    t.view.columns.post(first[0].row, one.requirements.resources, {})
    victims.begin(20, t.view)
    assert not plan(victims, t, kernel, one)
    t.view.columns.post(first[0].row, one.requirements.resources, {}, -1)
    victims.release([t.view.replicas.keys[slot] for slot in second[0].victims], t.view)
    assert set(plan(victims, t, kernel, one)[0].victims) == set(second[0].victims)


def test_a_workload_that_is_gone_protects_nobody() -> None:
    """Its number is given to another, which asked for no protection."""
    t, kernel, one = scene(*work("gone", disruption=Disruption(min_available=3)))
    t.tell(drop=["workload/t1/gone", "generation/t1/gone/00000001"])
    t.tell(*work("new"))
    assert plan(begun(t), t, kernel, one)


def test_too_few_are_there_already__nobody_of_them_goes() -> None:
    t, kernel, one = scene(least=4)
    assert not plan(begun(t), t, kernel, one)
    t, kernel, one = scene(least=2)
    assert len(plan(begun(t), t, kernel, one, count=2)) == 1
    t, kernel, one = scene(least=3)
    assert not plan(begun(t), t, kernel, one)


def test_the_pace_is_saved_up_and_bounded() -> None:
    t, kernel, one = scene()
    victims = begun(t, VictimRateLimit(per_s=1, burst=2))
    assert len(plan(victims, t, kernel, one)) == 1
    assert victims.retry_after_ms() == 1_001
    victims.begin(1_500, t.view)
    assert not plan(victims, t, kernel, one)
    victims.begin(60_000, t.view)
    assert victims.retry_after_ms() == 0
    t.tell(replica("low", 0, phase="running", on="n1"))
    assert np.isfinite(victims._tokens) and victims._tokens <= 2


def test_who_is_spared_does_not_count_towards_the_pace() -> None:
    t, kernel, one = scene()
    victims = begun(t, VictimRateLimit(per_s=1, burst=2))
    (first,) = plan(victims, t, kernel, one)
    for _ in range(2):
        victims.release([t.view.replicas.keys[slot] for slot in first.victims], t.view)
    assert len(plan(victims, t, kernel, one)) == 1
    assert not plan(victims, t, kernel, one)


def test_more_than_may_ever_go_at_once_is_not_waited_for() -> None:
    t, kernel, one = scene()
    victims = begun(t, VictimRateLimit(per_s=1, burst=1))
    assert not plan(victims, t, kernel, one)
    assert victims.retry_after_ms() == 0


def test_a_view_listed_anew_has_other_slots() -> None:
    t, kernel, one = scene()
    victims = begun(t)
    assert plan(victims, t, kernel, one)
    victims.forget()
    assert plan(victims, t, kernel, one)


def test_priorities_of_the_rows_count_not_those_of_their_classes() -> None:
    t, kernel, one = scene()
    high = [
        replace(each, spec=replace(each.spec, priority=20))
        for each in (replica("low", i, phase="running", on="n1") for i in (0, 1, 2))
    ]
    t.tell(*(replace(each, metadata=replace(each.metadata, uid=f"x{i}")) for i, each in enumerate(high)))
    assert not plan(begun(t), t, kernel, one, priority=10)
