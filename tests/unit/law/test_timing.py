"""Timing derived from the heartbeat interval, and equivalence of generations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from remit.law.timing import DRIFT_MAX_PERCENT, Timing, lost_after_ms
from remit.law.workload_rules import is_equivalent
from remit.model.kinds import Disruption, Rollout
from remit.model.records import GenerationSpec
from remit.model.resources import Duration
from tests.properties.authority_world import workload

TERMS = ("suspect_ms", "unknown_ms", "eager_ms", "kill_grace_ms", "lease_ms", "call_operator_ms")


def test_two_second_heartbeat_gives_documented_timing() -> None:
    documented = {
        "suspect_ms": 6,
        "unknown_ms": 15,
        "eager_ms": 30,
        "kill_grace_ms": 5,
        "lease_ms": 24,
        "call_operator_ms": 300,
    }
    assert {name: getattr(Timing(2_000), name) for name in TERMS} == {name: s * 1_000 for name, s in documented.items()}


@given(st.integers(50, 30_000))
def test_timing_is_proportional_to_heartbeat(beat_ms: int) -> None:
    slow, fast = Timing(2 * beat_ms), Timing(beat_ms)
    for name in TERMS:
        assert abs(getattr(slow, name) - 2 * getattr(fast, name)) <= 1, name
    assert fast.suspect_ms < fast.unknown_ms < fast.eager_ms


@given(st.integers(0, 10_000_000), st.integers(50, 60_000))
def test_lost_after_covers_fence_and_maximum_drift(fence_ms: int, beat_ms: int) -> None:
    timing = Timing(beat_ms)
    assert lost_after_ms(fence_ms, timing) * 100 >= (fence_ms + timing.kill_grace_ms) * (100 + DRIFT_MAX_PERCENT)


def generation(number: int, labels: dict[str, str] | None = None, **changed: Any) -> GenerationSpec:
    spec = replace(workload("w").spec, **changed)
    return GenerationSpec(workload="w", generation=number, labels=labels or {}, spec=spec)


@pytest.mark.parametrize(
    "changed",
    [
        {"replicas": 9},
        {"completions": 9},
        {"retries": 9},
        {"deadline": Duration(1)},
        {"keep": Duration(1)},
        {"disruption": Disruption(min_available=1)},
        {"rollout": Rollout(max_surge=9)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_change_invisible_to_replica_keeps_generation_equivalent(changed: dict[str, Any]) -> None:
    assert is_equivalent(generation(1), generation(2, **changed))


def test_change_visible_to_replica_makes_new_generation() -> None:
    spec = workload("w").spec
    for changed in (
        {"template": replace(spec.template, command=("other",))},
        {"template": replace(spec.template, env={"A": "b"})},
        {"placement": replace(spec.placement, node_selector={"disk": "ssd"})},
        {"priority_class": "high"},
        {"fence": Duration(1)},
        {"replace": "fenced"},
    ):
        assert not is_equivalent(generation(1), generation(2, **changed)), changed
    assert not is_equivalent(generation(1), generation(2, labels={"a": "b"}))
    assert is_equivalent(generation(2), generation(2, replicas=9))
