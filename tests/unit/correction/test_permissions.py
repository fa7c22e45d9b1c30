"""Controller permissions, undo detection, token buckets and condition updates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.correction.controller_set import CONTROLLERS
from remit.correction.framework.actions import (
    MESSAGE_MAX,
    Action,
    ControllerPermissions,
    later_timestamp,
    update_condition,
)
from remit.correction.framework.work_queue import ACTIONS_TRACKED_MAX, TokenBucket, UndoDetector
from remit.law.lifecycle import OWNERS
from remit.model.claims import Apply, Close, Delete, Forget, Mark, Move, RecordEvent, SetCondition, Spawn
from remit.model.kinds import NodeHealth
from remit.model.metadata import Condition
from remit.model.records import EventSpec
from remit.model.roles import Role
from tests.properties.authority_world import workload
from tests.unit.correction.controller_fixture import ControllerBench, ready, work

# -- permissions -------------------------------------------------------------------------------------------------------------


def test_permission_for_transition_of_other_role_is_refused() -> None:
    with pytest.raises(ValueError, match="transitions evict are not owned by role repair"):
        ControllerPermissions(Role.REPAIR, transitions=("release", "evict"))


def test_undeclared_claim_violates_permissions() -> None:
    permissions = ControllerPermissions(
        Role.WORKLOADS, claims=(Spawn, Delete), transitions=("create", "cancel"), declares=("Workload",)
    )
    inside = (Move("r", 1, "cancel"), Spawn("t", "w", 1, 0, 1), Delete("Workload", "w", "t"))
    outside = (
        Move("r", 1, "remove"), Forget("r", 1), Delete("Node", "n"), Apply(workload("w")), Close("g"),
        Mark("n", 1, NodeHealth.LOST), Move("r", 1, "no-such-move"),
    )  # fmt: skip
    assert [permissions.violation_of(claim) for claim in inside] == [""] * 3
    assert all(permissions.violation_of(claim) for claim in outside)
    assert permissions.violation_of(outside[0]) == (
        "role workloads requested transition remove, which it did not declare; this is a bug in the controller"
    )


def test_every_controller_may_record_events_and_conditions() -> None:
    for controller in CONTROLLERS:
        assert not controller.permissions.violation_of(RecordEvent("e", EventSpec(regarding="node/n")))
        assert not controller.permissions.violation_of(SetCondition("Node", "n", Condition(type="A", status="True")))


def test_each_controller_transition_is_permitted_to_exactly_one() -> None:
    """Except those of schedulers, agents and the authority itself."""
    loops = {Role.WORKLOADS, Role.NODES, Role.REPAIR, Role.ENDPOINTS, Role.ROLLOUT}
    owned = sorted(name for name, role in OWNERS.items() if role in loops)
    declared = sorted(name for controller in CONTROLLERS for name in controller.permissions.transitions)
    assert declared == owned


# -- undo detection ----------------------------------------------------------------------------------------------------------


def test_action_repeated_twice_is_held_and_reported_once() -> None:
    detector = UndoDetector(10_000)
    for now_ms in (0, 1_000):
        assert not detector.is_held("serve a", now_ms)
        detector.record("serve a", now_ms)
    assert detector.is_held("serve a", 2_000)
    assert not detector.is_held("serve b", 2_000), "another action"
    assert detector.take_unreported("serve a")
    assert not detector.take_unreported("serve a")


def test_held_action_is_released_after_long_pause() -> None:
    detector = UndoDetector(10_000)
    for now_ms in (0, 1_000):
        detector.record("serve a", now_ms)
    assert detector.is_held("serve a", 10_999)
    assert not detector.is_held("serve a", 11_000)


def test_tracked_actions_are_bounded_by_age() -> None:
    detector = UndoDetector(1 << 40)
    for action in ("old", "kept"):
        for _ in range(2):
            detector.record(action, 0)
    for number in range(ACTIONS_TRACKED_MAX - 1):
        detector.record(f"n{number}", 0)
    assert not detector.is_held("old", 0)
    assert detector.is_held("kept", 0)


# -- buckets -----------------------------------------------------------------------------------------------------------------


def test_token_bucket_allows_burst_then_rate() -> None:
    bucket = TokenBucket(2)
    assert [bucket.wait_ms(0, 100) for _ in range(3)] == [0, 0, 10_000]
    assert bucket.wait_ms(5_000, 100) == 5_000
    assert bucket.wait_ms(10_000, 100) == 0
    assert bucket.wait_ms(10_000, 10) == 100_000, "a slower rate counts from now on"


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=80), st.integers(1, 5))
def test_token_bucket_never_exceeds_burst_and_rate(gaps: list[int], burst: int) -> None:
    bucket, now_ms, taken = TokenBucket(burst), 0, 0
    for gap in gaps:
        now_ms += gap
        taken += bucket.wait_ms(now_ms, 100) == 0
        assert taken <= burst + (now_ms - 0) // 10_000 + 1


# -- conditions --------------------------------------------------------------------------------------------------------------


def condition(actions: list[Action]) -> Condition:
    (action,) = actions
    assert isinstance(action.claim, SetCondition)
    return action.claim.condition


def test_condition_is_set_only_when_it_differs() -> None:
    made, _ = work("w", at=4)
    table = ControllerBench(made)
    first = condition(update_condition(made, "Available", "True", "EnoughReady", "", "2026-01-01T00:00:01.000Z"))
    assert (first.observed_generation, first.last_transition) == (4, "2026-01-01T00:00:01.000Z")
    after = table.observe(made, [SetCondition("Workload", "w", first, "t1")])
    assert update_condition(after, "Available", "True", "EnoughReady", "", "2026-01-01T00:00:09.000Z") == []
    for status, reason, message in (("False", "EnoughReady", ""), ("True", "Other", ""), ("True", "EnoughReady", "more")):
        changed = update_condition(after, "Available", status, reason, message, "2026-01-01T00:00:09.000Z")  # type: ignore[arg-type]
        assert changed, (status, reason, message)


def test_condition_is_set_again_for_new_generation() -> None:
    made, _ = work("w", at=4)
    table = ControllerBench(made)
    first = condition(update_condition(made, "Available", "True", "EnoughReady", "", "2026-01-01T00:00:01.000Z"))
    after = table.observe(work("w", at=5)[0], [SetCondition("Workload", "w", first, "t1")])
    assert (
        condition(
            update_condition(after, "Available", "True", "EnoughReady", "", "2026-01-01T00:00:02.000Z")
        ).observed_generation
        == 5
    )


def test_lagging_clock_still_gives_later_timestamp() -> None:
    assert later_timestamp("2026-01-01T00:00:02.000Z", "2026-01-01T00:00:01.000Z") == "2026-01-01T00:00:02.000Z"
    assert later_timestamp("2026-01-01T00:00:01.000Z", "2026-01-01T00:00:59.999Z") == "2026-01-01T00:01:00.000Z"
    assert later_timestamp("2026-01-01T00:00:01.000Z", "zzz") == "2026-01-01T00:00:01.000Z"


def test_condition_message_is_truncated() -> None:
    assert len(condition(update_condition(ready("n"), "Drained", "False", "Draining", "x" * 5_000, "")).message) == MESSAGE_MAX
