"""Are the terms of silence in proportion, and is a replica replaced only for what it would see? Pure."""

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


def test_at_a_beat_of_two_seconds_the_terms_are_those_that_people_are_told() -> None:
    told = {"suspect_ms": 6, "unknown_ms": 15, "eager_ms": 30, "kill_grace_ms": 5, "lease_ms": 24, "call_operator_ms": 300}
    assert {name: getattr(Timing(2_000), name) for name in TERMS} == {name: s * 1_000 for name, s in told.items()}


@given(st.integers(50, 30_000))
def test_a_slower_beat_makes_every_term_longer_in_proportion(beat_ms: int) -> None:
    slow, fast = Timing(2 * beat_ms), Timing(beat_ms)
    for name in TERMS:
        assert abs(getattr(slow, name) - 2 * getattr(fast, name)) <= 1, name
    assert fast.suspect_ms < fast.unknown_ms < fast.eager_ms


@given(st.integers(0, 10_000_000), st.integers(50, 60_000))
def test_an_old_copy_is_surely_gone__even_if_its_clock_is_as_slow_as_is_allowed(fence_ms: int, beat_ms: int) -> None:
    tempo = Timing(beat_ms)
    assert lost_after_ms(fence_ms, tempo) * 100 >= (fence_ms + tempo.kill_grace_ms) * (100 + DRIFT_MAX_PERCENT)


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
def test_what_a_replica_never_sees_replaces_nobody(changed: dict[str, Any]) -> None:
    assert is_equivalent(generation(1), generation(2, **changed))


def test_what_it_runs_where_and_how_does() -> None:
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
