"""Do a remit, the memory of fights, and a bucket hold back what they should, and nothing else?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.correction.controller_set import CONTROLLERS
from remit.correction.framework.actions import MESSAGE_MAX, Action, ControllerPermissions, later_timestamp, update_condition
from remit.correction.framework.work_queue import ACTIONS_TRACKED_MAX, TokenBucket, UndoDetector
from remit.law.lifecycle import OWNERS
from remit.model.claims import Apply, Close, Delete, Forget, Mark, Move, RecordEvent, Role, SetCondition, Spawn
from remit.model.kinds import NodeHealth
from remit.model.metadata import Condition
from remit.model.records import EventSpec
from tests.properties.authority_world import workload
from tests.unit.correction.controller_fixture import Table, ready, work

# -- remits ------------------------------------------------------------------------------------------------------------------


def test_a_remit_of_another_roles_transition_cannot_be_declared() -> None:
    with pytest.raises(ValueError, match="transitions evict are not owned by role repair"):
        ControllerPermissions(Role.REPAIR, transitions=("release", "evict"))


def test_what_was_not_declared_is_outside() -> None:
    remit = ControllerPermissions(
        Role.WORKLOADS, claims=(Spawn, Delete), transitions=("create", "cancel"), declares=("Workload",)
    )
    inside = (Move("r", 1, "cancel"), Spawn("t", "w", 1, 0, 1), Delete("Workload", "w", "t"))
    outside = (
        Move("r", 1, "remove"), Forget("r", 1), Delete("Node", "n"), Apply(workload("w")), Close("g"),
        Mark("n", 1, NodeHealth.LOST), Move("r", 1, "no-such-move"),
    )  # fmt: skip
    assert [remit.violation_of(claim) for claim in inside] == [""] * 3
    assert all(remit.violation_of(claim) for claim in outside)
    assert remit.violation_of(outside[0]) == (
        "role workloads requested transition remove, which it did not declare; this is a bug in the controller"
    )


def test_everybody_may_note_an_event_and_observe_a_condition() -> None:
    for controller in CONTROLLERS:
        assert not controller.permissions.violation_of(RecordEvent("e", EventSpec(regarding="node/n")))
        assert not controller.permissions.violation_of(SetCondition("Node", "n", Condition(type="A", status="True")))


def test_every_loop_owned_transition_is_in_exactly_one_remit() -> None:
    """But those of schedulers, agents and the authority itself."""
    loops = {Role.WORKLOADS, Role.NODES, Role.REPAIR, Role.ENDPOINTS, Role.ROLLOUT}
    owned = sorted(name for name, role in OWNERS.items() if role in loops)
    declared = sorted(name for controller in CONTROLLERS for name in controller.permissions.transitions)
    assert declared == owned


# -- fights ------------------------------------------------------------------------------------------------------------------


def test_what_was_done_twice_and_is_wanted_again_is_held_and_told_once() -> None:
    fights = UndoDetector(10_000)
    for now_ms in (0, 1_000):
        assert not fights.is_held("serve a", now_ms)
        fights.record("serve a", now_ms)
    assert fights.is_held("serve a", 2_000)
    assert not fights.is_held("serve b", 2_000), "another deed"
    assert fights.take_unreported("serve a")
    assert not fights.take_unreported("serve a")


def test_a_long_pause_ends_a_fight() -> None:
    fights = UndoDetector(10_000)
    for now_ms in (0, 1_000):
        fights.record("serve a", now_ms)
    assert fights.is_held("serve a", 10_999)
    assert not fights.is_held("serve a", 11_000)


def test_fights_are_bounded__the_oldest_is_forgotten_first() -> None:
    fights = UndoDetector(1 << 40)
    for deed in ("old", "kept"):
        for _ in range(2):
            fights.record(deed, 0)
    for number in range(ACTIONS_TRACKED_MAX - 1):
        fights.record(f"n{number}", 0)
    assert not fights.is_held("old", 0)
    assert fights.is_held("kept", 0)


# -- buckets -----------------------------------------------------------------------------------------------------------------


def test_a_burst_and_then_the_rate_of_each_draw() -> None:
    bucket = TokenBucket(2)
    assert [bucket.wait_ms(0, 100) for _ in range(3)] == [0, 0, 10_000]
    assert bucket.wait_ms(5_000, 100) == 5_000
    assert bucket.wait_ms(10_000, 100) == 0
    assert bucket.wait_ms(10_000, 10) == 100_000, "a slower rate counts from now on"


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=80), st.integers(1, 5))
def test_never_more_than_the_burst_and_the_rate(gaps: list[int], burst: int) -> None:
    bucket, now_ms, taken = TokenBucket(burst), 0, 0
    for gap in gaps:
        now_ms += gap
        taken += bucket.wait_ms(now_ms, 100) == 0
        assert taken <= burst + (now_ms - 0) // 10_000 + 1


# -- conditions --------------------------------------------------------------------------------------------------------------


def condition(deeds: list[Action]) -> Condition:
    (deed,) = deeds
    assert isinstance(deed.claim, SetCondition)
    return deed.claim.condition


def test_a_condition_is_said_where_it_differs_and_carries_its_generation_and_time() -> None:
    made, _ = work("w", at=4)
    table = Table(made)
    first = condition(update_condition(made, "Available", "True", "EnoughReady", "", "2026-01-01T00:00:01.000Z"))
    assert (first.observed_generation, first.last_transition) == (4, "2026-01-01T00:00:01.000Z")
    after = table.observe(made, [SetCondition("Workload", "w", first, "t1")])
    assert update_condition(after, "Available", "True", "EnoughReady", "", "2026-01-01T00:00:09.000Z") == []
    for status, reason, message in (("False", "EnoughReady", ""), ("True", "Other", ""), ("True", "EnoughReady", "more")):
        changed = update_condition(after, "Available", status, reason, message, "2026-01-01T00:00:09.000Z")  # type: ignore[arg-type]
        assert changed, (status, reason, message)


def test_a_new_generation_is_spoken_of_anew() -> None:
    made, _ = work("w", at=4)
    table = Table(made)
    first = condition(update_condition(made, "Available", "True", "EnoughReady", "", "2026-01-01T00:00:01.000Z"))
    after = table.observe(work("w", at=5)[0], [SetCondition("Workload", "w", first, "t1")])
    assert (
        condition(
            update_condition(after, "Available", "True", "EnoughReady", "", "2026-01-01T00:00:02.000Z")
        ).observed_generation
        == 5
    )


def test_a_clock_that_lags_still_says_something_later() -> None:
    assert later_timestamp("2026-01-01T00:00:02.000Z", "2026-01-01T00:00:01.000Z") == "2026-01-01T00:00:02.000Z"
    assert later_timestamp("2026-01-01T00:00:01.000Z", "2026-01-01T00:00:59.999Z") == "2026-01-01T00:01:00.000Z"
    assert later_timestamp("2026-01-01T00:00:01.000Z", "zzz") == "2026-01-01T00:00:01.000Z"


def test_messages_are_bounded() -> None:
    assert len(condition(update_condition(ready("n"), "Drained", "False", "Draining", "x" * 5_000, "")).message) == MESSAGE_MAX
