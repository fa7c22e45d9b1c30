"""Is it noticed when work stands still in a healthy core? One history for each look, and some that are well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from remit.simulate.checkers.judge import Bounds, Core, Judge
from remit.simulate.checkers.liveness_checks import LIVENESS_CHECKS
from tests.unit.simulate.checkers.false_decisions import decide
from tests.unit.simulate.checkers.history_builder import ROLES, Pen, World, node

NEWER = {"command": ["y"], "resources": {"cpu": "1"}}
Story = Callable[[Pen], None]
STANDS: list[tuple[str, Story, int]] = []
"""The look that must find it, the story, and how many seconds may pass at most before that."""


def healed(
    pen: Pen, *, silent: frozenset[str] = frozenset(), roles: frozenset[str] = frozenset(ROLES), calm: bool = False
) -> None:
    nodes = frozenset({"n1", "n2"}) - silent
    core = Core(frozenset({pen.scope}), {pen.scope: nodes}, roles, pen.world.now_ms, {pen.scope: silent}, calm)
    pen.world.judge.heal(core)


def pass_time(pen: Pen, seconds: int, *, beats: bool = True) -> None:
    """A look each second, and a beat of the chain every two, as an idle authority makes it."""
    for second in range(seconds):
        pen.world.now_ms += 1_000
        if beats and second % 2:
            pen.commit({}, [])
        pen.world.judge.tick()


def stands(check: str, seconds: int) -> Callable[[Story], Story]:
    def register(story: Story) -> Story:
        STANDS.append((check, story, seconds))
        return story

    return register


@stands("eligible_work_is_bound", 60)
def pending_with_room(pen: Pen) -> None:
    pen.spawn(0)
    healed(pen)


@stands("one_gang_runs", 60)
def a_gang_with_room(pen: Pen) -> None:
    pen.declare("g", gang={"min": 3}, template={"command": ["x"], "resources": {"cpu": "2"}})
    pen.spawn(0, 1, 2, workload="g")
    healed(pen)


@stands("reservations_do_not_leak", 120)
def a_reservation_that_nobody_binds(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    held = pen.status(a, phase="reserved", node="n1", grants=["tenant/t1"])
    pen.commit({a: held}, [pen.entry("reserve", a, "scheduler")])
    healed(pen)


@stands("grants_return", 130)
def a_grant_that_nobody_closes(pen: Pen) -> None:
    pen.grant("s", ttl="10s", status={"deadline": {"boot": "b1", "atMs": pen.world.now_ms + 10_000}})
    healed(pen)


@stands("orphans_end", 120)
def a_process_of_a_released_attempt(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 1)
    pen.move(a, "unknown", "node-lifecycle", before="running")
    pen.world.now_ms += 31_000
    pen.move(a, "failed", "node-lifecycle", result="lost")
    pen.move(a, "released", "repair", grants=None)
    healed(pen)


@stands("what_is_said_to_run_runs", 60)
def running_by_the_agents_word_alone(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a)
    healed(pen)


@stands("silence_is_noticed", 21)
def a_silent_node_that_is_ready(pen: Pen) -> None:
    pen.commit({"node/n3": node("n3")}, [pen.entry("apply", "node/n3", "operator")])
    healed(pen, silent=frozenset({"n2"}))


@stands("silence_is_noticed", 21)
def most_nodes_are_silent_and_one_is_ready(pen: Pen) -> None:
    pen.mark("suspect", "n1")
    healed(pen, silent=frozenset({"n1", "n2"}))


@stands("returned_nodes_are_ready", 15)
def a_node_that_came_back_and_is_not_ready(pen: Pen) -> None:
    pen.mark("suspect", "n1")
    pen.mark("unknown", "n1")
    healed(pen)


@stands("unknown_resolves", 30)
def unknown_on_a_node_that_is_well(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.move(a, "unknown", "node-lifecycle", before="running")
    healed(pen)


@stands("unknown_resolves", 60)
def unknown_on_a_node_that_stays_silent(pen: Pen) -> None:
    pen.commit({"node/n3": node("n3")}, [pen.entry("apply", "node/n3", "operator")])
    (a,) = pen.spawn(0)
    pen.run(a, "n2")
    pen.move(a, "unknown", "node-lifecycle", before="running")
    healed(pen, silent=frozenset({"n2"}))


@stands("deletion_completes", 60)
def a_workload_that_does_not_go(pen: Pen) -> None:
    pen.spawn(0)
    work = pen.rows["workload/t1/w"]
    going = {**work, "metadata": {**work["metadata"], "deleting": True}}
    pen.commit({"workload/t1/w": going}, [pen.entry("delete", "workload/t1/w", "user")])
    healed(pen)


@stands("desire_is_met", 120)
def a_service_that_lacks_a_replica(pen: Pen) -> None:
    for key in pen.spawn(0, 1):
        pen.run(key)
    healed(pen, calm=True)


@stands("desire_is_met", 120)
def a_service_that_has_one_too_many(pen: Pen) -> None:
    pen.spawn(0, 1, 2, 3)
    healed(pen, calm=True)


@stands("desire_is_met", 120)
def a_service_of_an_older_generation(pen: Pen) -> None:
    pen.declare("w", replicas=1)
    pen.spawn(0)
    pen.declare("w", 2, replicas=1, template=NEWER, rollout={"maxSurge": 0})
    healed(pen, calm=True)


@stands("desire_is_met", 120)
def an_old_replica_that_can_be_spared(pen: Pen) -> None:
    pen.declare("w", replicas=1)
    (old,) = pen.spawn(0)
    pen.run(old, until="ready")
    pen.declare("w", 2, replicas=1, template=NEWER)
    (new,) = pen.spawn(1, generation=2)
    pen.run(new, "n2", until="ready")
    healed(pen, calm=True)


@stands("desire_is_met", 120)
def a_new_generation_of_which_nothing_is_made(pen: Pen) -> None:
    pen.declare("w", replicas=1)
    (old,) = pen.spawn(0)
    pen.run(old, until="ready")
    pen.declare("w", 2, replicas=1, template=NEWER)
    healed(pen, calm=True)


@stands("desire_is_met", 120)
def a_job_that_has_failed_and_is_not_said_to_have(pen: Pen) -> None:
    failed_job(pen, retries=0)
    healed(pen, calm=True)


@stands("desire_is_met", 120)
def a_job_that_lacks_a_replica(pen: Pen) -> None:
    pen.declare("w", replicas=0)
    pen.declare("j", type="job", replicas=1, completions=2)
    pen.spawn(0, workload="j")
    healed(pen, calm=True)


@stands("desire_is_met", 120)
def a_job_that_is_not_tried_again(pen: Pen) -> None:
    failed_job(pen, retries=1)
    healed(pen, calm=True)


@stands("what_is_ready_is_served", 60)
def ready_and_served_by_nobody(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a, until="ready")
    healed(pen)


@stands("health_does_not_flap", 0)
def a_node_that_is_called_this_and_that(pen: Pen) -> None:
    healed(pen, calm=True)
    for health in ("suspect", "ready") * 4:
        pen.mark(health, "n1")


def failed_job(pen: Pen, *, retries: int) -> None:
    """One replica, whose first attempt failed; and no service beside it."""
    pen.declare("w", replicas=0)
    pen.declare("j", type="job", replicas=1, retries=retries)
    (a,) = pen.spawn(0, workload="j")
    pen.run(a)
    pen.move(a, "failed", "agent/n1", result="failed")
    pen.move(a, "released", "repair", grants=None)


@pytest.mark.parametrize(("check", "story", "seconds"), STANDS, ids=[story.__name__ for _, story, _ in STANDS])
def test_what_stands_still_is_found_after_its_bound_and_not_before(check: str, story: Story, seconds: int) -> None:
    pen = Pen().furnish()
    story(pen)
    pass_time(pen, seconds)
    assert check not in pen.found
    pass_time(pen, 3)
    assert check in pen.found
    found = next(one for one in pen.world.judge.violations if one.check == check)
    assert found.property == LIVENESS_CHECKS[check][0]
    assert len([one for one in pen.world.judge.violations if one.check == check]) == 1, "told once"


def test_a_service_that_is_as_wanted_is_left_alone() -> None:
    """Served, with what is over beside it; a node that was suspect now and then; and a daemon, which is not counted."""
    pen = Pen().furnish(replicas=1)
    pen.declare("d", type="daemon")
    old, new = pen.spawn(0, 1)
    pen.run(old)
    pen.release(old)
    pen.run(new, until="ready")
    pen.world.judge.on_process_started("n1", "r1", new, "uw1", 1, 1)
    healed(pen, calm=True)
    for _ in range(6):
        pass_time(pen, 50)
        pen.move(new, "serving", "endpoints")
        pen.mark("suspect", "n1")
        pass_time(pen, 10)
        pen.mark("ready", "n1")
        pen.move(new, "ready", "endpoints")
    assert pen.found == []


def test_a_job_that_is_out_of_attempts_is_left_alone() -> None:
    pen = Pen().furnish()
    failed_job(pen, retries=0)
    job = pen.rows["workload/t1/j"]
    said = {**job, "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "RetriesExhausted"}]}}
    pen.commit({"workload/t1/j": said}, [pen.entry("observe", "workload/t1/j", "workloads")])
    healed(pen, calm=True)
    pass_time(pen, 200)
    assert pen.found == []


def test_what_differs_only_in_how_many_there_are_is_not_replaced() -> None:
    pen = Pen().furnish()
    for key in pen.spawn(0, 1, 2):
        pen.run(key)
    pen.declare("w", 2, rollout={"maxSurge": 3})
    healed(pen, calm=True)
    pass_time(pen, 200)
    assert "desire_is_met" not in pen.found


def test_what_is_old_stays_as_long_as_the_new_is_not_ready() -> None:
    pen = Pen().furnish()
    pen.declare("w", replicas=1)
    (old,) = pen.spawn(0)
    pen.run(old, until="ready")
    pen.declare("w", 2, replicas=1, template=NEWER)
    (new,) = pen.spawn(1, generation=2)
    pen.run(new, "n2")
    healed(pen, calm=True)
    pass_time(pen, 200)
    assert "desire_is_met" not in pen.found


def test_desire_is_judged_only_when_nobody_asks_for_anything_new() -> None:
    pen = Pen().furnish()
    healed(pen)
    pass_time(pen, 200)
    assert pen.found == []


def test_of_a_job_that_shrank_whoever_has_ended_is_spare_while_enough_are_at_work() -> None:
    pen = Pen().furnish()
    pen.declare("w", replicas=0)
    pen.declare("j", type="job", replicas=2, retries=3)
    a, b = pen.spawn(0, 1, workload="j")
    for key in (a, b):
        pen.run(key)
    pen.declare("j", 2, type="job", replicas=1, retries=3)
    pen.move(b, "failed", "agent/n1", result="failed")
    pen.move(b, "released", "repair", grants=None)
    healed(pen, calm=True)
    pass_time(pen, 200)
    assert "desire_is_met" not in pen.found


def test_what_is_outside_the_core_is_not_known_to_be_as_wanted() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.run(a, "n2")
    pen.world.judge.heal(Core(frozenset({"r1"}), {"r1": frozenset({"n1"})}, frozenset(ROLES), pen.world.now_ms, {}, calm=True))
    pass_time(pen, 200)
    pen.world.judge.conclude()
    assert pen.found == [] and any(why.startswith("desire_is_met") for why in pen.world.judge.undecided)


def test_a_chain_that_stands_still_has_no_leader() -> None:
    pen = Pen().furnish()
    healed(pen)
    pass_time(pen, 17, beats=False)
    assert pen.found == []
    pass_time(pen, 1, beats=False)
    assert pen.found == ["somebody_leads"]


def test_one_that_only_reads_what_there_is_leads_nobody() -> None:
    pen = Pen().furnish()
    healed(pen)
    for _ in range(9):
        pen.commit({}, [], audit=False)
        pass_time(pen, 2, beats=False)
    assert pen.found == ["somebody_leads"]


def test_leaders_who_depose_each_other_where_all_is_well_are_noticed() -> None:
    pen = Pen().furnish()
    healed(pen)
    pen.seize("a2")
    pen.seize("a1")
    pass_time(pen, 20)
    pen.seize("a2")
    pass_time(pen, 1)
    assert pen.found == [], "they may settle who leads, and the last to come back may be followed by one more"
    pen.seize("a1")
    pass_time(pen, 1)
    assert pen.found == ["leaders_stay"]


def test_every_look_finds_something_in_some_history() -> None:
    """Of leaders further up, of schedulers in test_reasons.py."""
    elsewhere = {"somebody_leads", "leaders_stay", "pending_work_is_tried", "waiting_has_a_reason"}
    assert {check for check, _, _ in STANDS} | elsewhere == set(LIVENESS_CHECKS)


def test_a_scenario_with_a_longer_beat_has_longer_bounds() -> None:
    world = World()
    world.judge = Judge(lambda: world.now_ms, Bounds(pace=2))
    pen = Pen(world).furnish()
    pending_with_room(pen)
    pass_time(pen, 120)
    assert pen.found == []
    pass_time(pen, 3)
    assert pen.found == ["eligible_work_is_bound"]


def test_work_that_moves_on_is_left_alone() -> None:
    pen = Pen().furnish(replicas=1)
    (a,) = pen.spawn(0)
    healed(pen, calm=True)
    pass_time(pen, 50)
    pen.bind(a)
    pen.move(a, "starting", "agent/n1")
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 1)
    pen.move(a, "running", "agent/n1")
    pass_time(pen, 200)
    pen.world.judge.conclude()
    assert pen.found == [] and pen.world.judge.undecided == []


BLOCKED: dict[str, dict[str, Any]] = {
    "no node has the room": {"template": {"command": ["x"], "resources": {"cpu": "5"}}},
    "no node has the labels": {"placement": {"nodeSelector": {"disk": "tape"}}},
    "no quota is left": {"template": {"command": ["x"], "resources": {"memory": "1Mi"}}},
    "no node has the device": {"template": {"command": ["x"], "devices": [{"kind": "gpu", "count": 1}]}},
    "it needs a friend": {"placement": {"affinity": [{"labelSelector": {"app": "friend"}, "topologyKey": "zone"}]}},
}


@pytest.mark.parametrize("why", BLOCKED)
def test_work_that_cannot_be_placed_may_wait(why: str) -> None:
    pen = Pen().furnish()
    pen.declare("c", **BLOCKED[why])
    (key,) = pen.spawn(0, workload="c")
    healed(pen)
    for _ in range(2):
        pass_time(pen, 50)
        decide(pen, key)
    assert pen.found == []


def test_work_of_roles_that_are_not_well_may_wait() -> None:
    pen = Pen().furnish()
    pending_with_room(pen)
    healed(pen, roles=frozenset())
    pass_time(pen, 200)
    assert pen.found == []


def test_a_break_in_the_waiting_begins_it_anew() -> None:
    pen = Pen().furnish()
    pending_with_room(pen)
    pass_time(pen, 40)
    shut = {
        f"node/{n}": {**pen.rows[f"node/{n}"], "spec": {**pen.rows[f"node/{n}"]["spec"], "draining": True}}
        for n in ("n1", "n2")
    }
    opened = {key: pen.rows[key] for key in shut}
    pen.commit(shut, [pen.entry("apply", key, "operator") for key in shut])
    pass_time(pen, 2)
    pen.commit(opened, [pen.entry("apply", key, "operator") for key in opened])
    pass_time(pen, 40)
    assert "eligible_work_is_bound" not in pen.found


def test_while_most_nodes_are_silent_unknown_is_held_by_name() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.mark("suspect", "n1", "n2")
    pen.mark("unknown", "n1", "n2")
    pen.move(a, "unknown", "node-lifecycle", before="running")
    healed(pen, silent=frozenset({"n1", "n2"}))
    pass_time(pen, 200)
    assert pen.found == []
    pen.world.judge.conclude()
    assert any("mass silence" in why for why in pen.world.judge.undecided)


def test_what_still_waits_at_the_end_is_not_known_to_be_well() -> None:
    pen = Pen().furnish()
    pending_with_room(pen)
    pass_time(pen, 5)
    pen.world.judge.conclude()
    assert pen.found == [] and any("at the end of the run" in why for why in pen.world.judge.undecided)


def test_the_end_of_a_run_is_a_look_too() -> None:
    pen = Pen().furnish()
    pending_with_room(pen)
    pass_time(pen, 1)
    pen.world.now_ms += 61_000
    pen.commit({}, [])
    pen.world.judge.conclude()
    assert pen.found == ["eligible_work_is_bound"]


def test_writes_that_do_not_cease_are_found_at_the_end() -> None:
    pen = Pen().furnish()
    healed(pen, calm=True)
    for _ in range(100):
        pass_time(pen, 1)
        pen.commit({"workload/t1/w": pen.rows["workload/t1/w"]}, [pen.entry("apply", "workload/t1/w", "user")])
    pen.world.judge.conclude()
    assert pen.found == ["writes_cease"]


@pytest.mark.parametrize(("every", "found"), [(1, ["refusals_back_off"]), (3, [])])
def test_what_is_refused_is_not_asked_faster_than_beats(every: int, found: list[str]) -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.run(a, until="ready")
    healed(pen, calm=True)
    for second in range(100):
        pass_time(pen, 1)
        if second % every == 0:
            pen.commit({}, [pen.entry("note", "e", "user", code="role")])
    pen.world.judge.conclude()
    assert [check for check in pen.found if check == "refusals_back_off"] == found


def test_a_run_that_ends_too_soon_says_nothing_of_its_writes() -> None:
    pen = Pen().furnish()
    healed(pen, calm=True)
    pass_time(pen, 10)
    pen.world.judge.conclude()
    assert pen.found == [] and any(why.startswith("writes_cease") for why in pen.world.judge.undecided)


def test_a_call_that_takes_too_long_is_found_when_it_ends_or_at_the_end() -> None:
    for ends in ("answered", "gave up", "never"):
        pen = Pen().furnish()
        pen.commit({}, [pen.entry("note", "e", "user", id="r1-i1.1.x", code="role")])
        at = pen.revision
        for operation in ("r1-i1.1.x", "quick"):
            pen.world.judge.on_submit("r1", operation)
        pen.world.judge.on_abandoned("r1", "quick")
        pass_time(pen, 41)
        if ends == "answered":
            pen.world.judge.on_answer("r1", "r1-i1.1.x", "role", 0, at)
        elif ends == "gave up":
            pen.world.judge.on_abandoned("r1", "r1-i1.1.x")
        else:
            pen.world.judge.conclude()
        assert pen.found == ["calls_are_answered"], ends
        assert [one.key for one in pen.world.judge.violations] == ["r1-i1.1.x"]


def crowded(pen: Pen) -> list[str]:
    """Four that need three processors each, where there is room for two: one on each node."""
    pen.declare("big", replicas=4, template={"command": ["x"], "resources": {"cpu": "3"}})
    keys = pen.spawn(0, 1, 2, 3, workload="big")
    healed(pen)
    return keys


def test_a_crowd_of_which_nobody_is_bound_waits_too_long() -> None:
    pen = Pen().furnish()
    crowded(pen)
    pass_time(pen, 62)
    assert pen.found == ["eligible_work_is_bound"]


def test_a_crowd_of_which_one_after_another_is_bound_is_well() -> None:
    pen = Pen().furnish()
    keys = crowded(pen)
    pass_time(pen, 50)
    pen.run(keys[3])
    pass_time(pen, 50)
    pen.run(keys[1], "n2")
    pass_time(pen, 120)
    assert "eligible_work_is_bound" not in pen.found
