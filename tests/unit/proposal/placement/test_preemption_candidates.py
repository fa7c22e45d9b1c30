"""Victim selection on a view: which replicas may be evicted, at which rate, and which are already selected."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from remit.model.kinds import Disruption
from remit.model.kinds.registry import AnyObject
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.preemption import Eviction
from remit.proposal.placement.preemption_candidates import VictimRateLimit, VictimSelector
from tests.unit.observation.row_fixtures import ViewFixture, ready, replica, tenant, work


def scene(*more: AnyObject, low: int = 4, least: int = 0, phase: str = "running") -> tuple[ViewFixture, Kernel, WorkClass]:
    """One node of four cores, taken by as many small replicas of priority 0."""
    made = work("low", replicas=8, disruption=Disruption(min_available=least))
    there = [replica("low", i, phase=phase, on="n1") for i in range(low)]
    t = ViewFixture(ready("n1"), tenant("t1"), *made, *there, *work("top", "2"), *more)
    kernel = Kernel(t.view.columns, t.view.peers)
    return t, kernel, kernel.class_for("top", t.view.shapes.requirements_of(t.shape("top")))


def plan(
    victims: VictimSelector, t: ViewFixture, kernel: Kernel, one: WorkClass, priority: int = 10, count: int = 1
) -> list[Eviction]:
    return victims.plan(t.view, kernel, one, kernel.without_capacity_check(one), priority, count)


def started(t: ViewFixture, pace: VictimRateLimit = VictimRateLimit(), now_ms: int = 0) -> VictimSelector:
    made = VictimSelector(pace)
    made.begin(now_ms, t.view)
    return made


def test_only_lower_priority_replicas_may_be_evicted() -> None:
    t, kernel, one = scene()
    assert not plan(started(t), t, kernel, one, priority=0)
    assert [len(each.victims) for each in plan(started(t), t, kernel, one, priority=1)] == [2]


def test_replica_that_is_not_running_is_no_victim() -> None:
    for phase in ("draining", "stopping", "unknown", "failed", "finished"):
        t, kernel, one = scene(phase=phase)
        assert not plan(started(t), t, kernel, one)


def test_selected_victim_stays_selected_until_gone_or_released() -> None:
    t, kernel, one = scene()
    victims = started(t)
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


def test_deleted_workload_protects_no_replicas() -> None:
    """Its row is reused by another workload without a disruption limit."""
    t, kernel, one = scene(*work("gone", disruption=Disruption(min_available=3)))
    t.apply(drop=["workload/t1/gone", "generation/t1/gone/00000001"])
    t.apply(*work("new"))
    assert plan(started(t), t, kernel, one)


def test_workload_at_min_available_loses_no_replica() -> None:
    t, kernel, one = scene(least=4)
    assert not plan(started(t), t, kernel, one)
    t, kernel, one = scene(least=2)
    assert len(plan(started(t), t, kernel, one, count=2)) == 1
    t, kernel, one = scene(least=3)
    assert not plan(started(t), t, kernel, one)


def test_eviction_tokens_accumulate_up_to_burst() -> None:
    t, kernel, one = scene()
    victims = started(t, VictimRateLimit(per_s=1, burst=2))
    assert len(plan(victims, t, kernel, one)) == 1
    assert victims.retry_after_ms() == 1_001
    victims.begin(1_500, t.view)
    assert not plan(victims, t, kernel, one)
    victims.begin(60_000, t.view)
    assert victims.retry_after_ms() == 0
    t.apply(replica("low", 0, phase="running", on="n1"))
    assert np.isfinite(victims._tokens) and victims._tokens <= 2


def test_released_victim_returns_its_token() -> None:
    t, kernel, one = scene()
    victims = started(t, VictimRateLimit(per_s=1, burst=2))
    (first,) = plan(victims, t, kernel, one)
    for _ in range(2):
        victims.release([t.view.replicas.keys[slot] for slot in first.victims], t.view)
    assert len(plan(victims, t, kernel, one)) == 1
    assert not plan(victims, t, kernel, one)


def test_eviction_larger_than_burst_is_not_waited_for() -> None:
    t, kernel, one = scene()
    victims = started(t, VictimRateLimit(per_s=1, burst=1))
    assert not plan(victims, t, kernel, one)
    assert victims.retry_after_ms() == 0


def test_forget_clears_selection_after_relist() -> None:
    t, kernel, one = scene()
    victims = started(t)
    assert plan(victims, t, kernel, one)
    victims.forget()
    assert plan(victims, t, kernel, one)


def test_priority_of_replica_row_counts_not_that_of_class() -> None:
    t, kernel, one = scene()
    high = [
        replace(each, spec=replace(each.spec, priority=20))
        for each in (replica("low", i, phase="running", on="n1") for i in (0, 1, 2))
    ]
    t.apply(*(replace(each, metadata=replace(each.metadata, uid=f"x{i}")) for i, each in enumerate(high)))
    assert not plan(started(t), t, kernel, one, priority=10)
