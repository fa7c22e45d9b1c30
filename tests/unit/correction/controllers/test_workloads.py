"""Are as many replicas made and ended as are wanted, and is it said how they fare? On a board laid out by hand."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from remit.correction.controllers.desired_replicas import DesiredReplicas
from remit.correction.controllers.workload_status import condition_debounce_ms
from remit.correction.controllers.workloads import WorkloadController
from remit.correction.framework.actions import Action
from remit.law.workload_rules import condition_of
from remit.model.claims import Accepted, Code, Refused, Spawn
from remit.model.kinds import NodeHealth, Placement, Rollout, Workload
from remit.model.records import Phase, Replica
from remit.model.resources import Duration
from tests.unit.correction.controller_fixture import TEMPO, Table, ready, replica, said, short, work

KEY = "workload/t1/w"
PATIENCE_MS = condition_debounce_ms(TEMPO)


def controller(table: Table) -> WorkloadController:
    return WorkloadController(DesiredReplicas(table.board), table.clock)


def members(*phases: str, **status: Any) -> list[Replica]:
    return [
        replica("w", n, phase, "" if phase in ("pending", "released") else "n1", **status) for n, phase in enumerate(phases)
    ]


def message_of(workload: Workload, type_: str) -> str:
    found = condition_of(workload.status.conditions, type_)
    assert found is not None
    return found.message


def deeds(*things: Any) -> list[str]:
    table = Table(*things)
    return short(table.look(controller(table), KEY))


# -- services ----------------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_made_under_the_lowest_free_names() -> None:
    """F29: the names follow from the workload, so a second creation finds the first."""
    kept = [replica("w", 1), replica("w", 3)]
    assert deeds(*work("w", 5), *kept) == ["spawn 0+1", "spawn 2+1", "spawn 4+1"]


def test_nothing_is_done_when_all_is_as_it_should_be() -> None:
    assert deeds(*work("w", 2), *members("serving", "starting")) == []


def test_a_replica_that_leaves_or_has_failed_still_counts__nothing_is_made_beside_it() -> None:
    """S13: never more live than desired and surge."""
    for phase in ("draining", "stopping", "unknown", "failed"):
        assert deeds(*work("w", 2), *members("serving", phase)) == [], phase


def test_a_released_one_that_is_wanted_is_left_to_repair__one_that_is_not_is_forgotten() -> None:
    assert deeds(*work("w", 2), *members("serving", "released")) == []
    assert deeds(*work("w", 1), *members("serving", "released")) == ["forget w-1"]


def test_scaling_down_takes_the_least_useful_first() -> None:
    phases = ("serving", "pending", "serving", "starting", "serving")
    assert deeds(*work("w", 3), ready("n1"), *members(*phases)) == ["cancel w-1", "remove w-3"]


def test_scaling_down_takes_first_what_is_on_a_node_that_is_not_well_or_drains() -> None:
    on = [replica("w", n, "serving", f"n{n}") for n in range(4)]
    nodes = [ready("n0", NodeHealth.SUSPECT), ready("n1"), ready("n2", draining=True), ready("n3")]
    assert deeds(*work("w", 2), *nodes, *on) == ["remove w-2", "remove w-0"]


def test_scaling_down_leaves_the_rest_spread() -> None:
    on = [replica("w", n, "serving", node) for n, node in enumerate(("n0", "n0", "n1", "n2"))]
    assert deeds(*work("w", 3), ready("n0"), ready("n1"), ready("n2"), *on) == ["remove w-1"]


def test_those_who_leave_anyway_are_counted_first() -> None:
    assert deeds(*work("w", 1), *members("serving", "draining")) == []


def test_what_is_not_known_to_run_is_not_kept_in_place_of_what_serves() -> None:
    assert deeds(*work("w", 2), *members("serving", "unknown", "serving")) == []
    assert deeds(*work("w", 1), *members("serving", "unknown", "serving")) == ["remove w-2"]


def test_a_surge_is_made_only_while_an_older_generation_stands() -> None:
    rollout = Rollout(max_surge=1)
    made, new = work("w", 2, at=2)
    spec = replace(made.spec, rollout=rollout, template=replace(made.spec.template, command=("new",)))
    made, new = replace(made, spec=spec), replace(new, spec=replace(new.spec, spec=spec))
    _, old = work("w", 2)
    assert deeds(made, new, old, *members("serving", "serving")) == ["spawn 2+1"]
    current = [replace(one, spec=replace(one.spec, generation=2)) for one in members("serving", "serving")]
    assert deeds(made, new, *current) == []


def test_a_generation_of_before_a_restore_is_no_word_on_that_of_its_number_after_it() -> None:
    """F10: it was scaled, a backup without that was put back, and then it was changed: generation 2 both times."""
    made, new = work("w", 3, at=2)
    _, old = work("w", 2)
    table = Table(made, new, old, *members("serving", "serving", "serving"))
    watching = controller(table)
    assert short(table.look(watching, KEY)) == []
    spec = replace(made.spec, rollout=Rollout(max_surge=1), template=replace(made.spec.template, command=("new",)))
    table.write(replace(made, spec=spec), replace(new, spec=replace(new.spec, spec=spec)))
    assert short(table.look(watching, KEY)) == ["spawn 3+1"]


def test_whoever_scales_a_service_does_not_restart_it() -> None:
    made, new = work("w", 3, at=2)
    _, old = work("w", 2)
    assert deeds(made, new, old, *members("serving", "serving")) == ["spawn 2+1"]


# -- jobs --------------------------------------------------------------------------------------------------------------------


def job(replicas: int = 2, *, done: Any = (), **more: Any) -> Table:
    return Table(*work("w", replicas, type_="job", **more), *done)


def test_completions_are_made_so_many_at_a_time__what_is_done_is_kept() -> None:
    table = job(2, completions=5)
    assert short(table.look(controller(table), KEY)) == ["spawn 0+2"]
    table = job(2, done=members("released", "running", result="ok"), completions=5)
    assert short(table.look(controller(table), KEY)) == ["spawn 2+1"]


def test_what_has_finished_is_settled() -> None:
    table = job(1, done=members("finished", result="ok"))
    assert short(table.look(controller(table), KEY)) == ["settle w-0"]


def test_a_job_is_complete_when_enough_have_ended_well__kept_for_a_while_and_deleted() -> None:
    table = job(1, done=members("released", result="ok"), keep=Duration(60_000))
    made = controller(table)
    claims = table.look(made, KEY)
    assert said(claims)["Complete"] == ("True", "Done")
    table.observe(table.board.get(KEY), claims)
    assert short(table.look(made, KEY)) == []
    assert table.again_in(made, KEY) == 60_000
    table.clock.at_ms += 60_000
    assert short(table.look(made, KEY)) == ["delete Workload w"]


def test_a_job_with_a_schedule_is_not_run_at_once__and_says_that_nobody_keeps_schedules() -> None:
    table = job(1, schedule="0 3 * * *")
    made = controller(table)
    assert short(table.look(made, KEY)) == []
    table.clock.at_ms += PATIENCE_MS
    after = table.observe(table.board.get(KEY), table.look(made, KEY))
    assert message_of(after, "Admitted").startswith("schedules are not implemented yet")


def test_a_job_fails_when_one_has_failed_too_often__the_rest_is_ended() -> None:
    done = [replica("w", 0, "released", result="exit 1", failures=4), replica("w", 1, "running", "n1")]
    table = job(2, done=done, retries=3)
    claims = table.look(controller(table), KEY)
    assert short(claims) == ["remove w-1"]
    assert said(claims)["Failed"] == ("True", "RetriesExhausted")
    assert message_of(table.observe(table.board.get(KEY), claims), "Failed") == "w-0 failed 4 times; last failure: exit 1"


def test_why_a_job_has_failed_stays_said_when_its_replicas_are_gone() -> None:
    table = job(1, done=[replica("w", 0, "released", result="exit 1", failures=1)], retries=0)
    made = controller(table)
    after = table.observe(table.board.get(KEY), table.look(made, KEY))
    assert message_of(after, "Failed") == "w-0 failed once; last failure: exit 1"
    table.write(replica("w", 0, "released", failures=1))
    assert "Failed" not in said(table.look(made, KEY))


def test_a_job_fails_when_its_deadline_has_passed() -> None:
    table = job(1, done=members("running"), deadline=Duration(30_000))
    made = controller(table)
    assert table.again_in(made, KEY) is not None
    assert "Failed" not in said(table.look(made, KEY))
    table.clock.at_ms += 30_000
    claims = table.look(made, KEY)
    assert said(claims)["Failed"] == ("True", "DeadlineExceeded")
    table.observe(table.board.get(KEY), claims)
    assert short(table.look(made, KEY)) == ["remove w-0"]


def test_a_failed_job_that_is_changed_begins_anew() -> None:
    table = job(1, done=members("released", result="exit 1", failures=4))
    made = controller(table)
    after = table.observe(table.board.get(KEY), table.look(made, KEY))
    meta = replace(after.metadata, generation=2)
    table.write(replace(after, metadata=meta, spec=replace(after.spec, retries=9)))
    assert said(table.look(made, KEY))["Failed"] == ("False", "Changed")


# -- daemons -----------------------------------------------------------------------------------------------------------------


def test_a_daemon_has_one_on_each_node_that_is_for_it() -> None:
    placement = Placement(node_selector={"disk": "ssd"})
    nodes = [ready(f"n{n}", labels={"disk": "ssd" if n else "hdd"}) for n in range(3)]
    assert deeds(*work("w", type_="daemon", placement=placement), *nodes) == ["spawn 0+2"]


def test_a_daemon_waits_for_a_node_that_takes_no_work__and_leaves_one_that_is_not_its_own_any_more() -> None:
    placement = Placement(node_selector={"disk": "ssd"})
    nodes = [ready("n0", NodeHealth.SUSPECT, labels={"disk": "ssd"}), ready("n1", labels={"disk": "hdd"})]
    astray = replica("w", 0, "serving", "n1")
    assert deeds(*work("w", type_="daemon", placement=placement), *nodes, astray) == ["remove w-0"]


def test_news_of_a_node_is_news_to_daemons_alone() -> None:
    table = Table(*work("w"), *work("d", type_="daemon"))
    made = controller(table)
    for key, kept in tuple(table.board.of_kind("workload/")):
        made.keys_for(key, None, kept.obj)
    assert list(made.keys_for("node/n", None, ready("n"))) == ["workload/t1/d"]
    assert list(made.keys_for("node/n", ready("n"), ready("n"))) == []


# -- going -------------------------------------------------------------------------------------------------------------------


def deleting(made: Workload, **more: Any) -> Workload:
    return replace(made, metadata=replace(made.metadata, deleting=True, **more))


def test_what_is_deleted_goes_step_by_step_and_last_itself() -> None:
    made, first = work("w", 4)
    phases = ("pending", "serving", "finished", "released")
    assert deeds(deleting(made), first, *members(*phases)) == ["cancel w-0", "remove w-1", "settle w-2", "forget w-3"]
    assert deeds(deleting(made), first, *members("draining", "unknown")) == []
    assert deeds(deleting(made), first) == ["delete Workload w"]


def test_a_finalizer_holds_what_is_deleted__its_replicas_go_all_the_same() -> None:
    made, first = work("w")
    held = deleting(made, finalizers=("example.com/hold",))
    assert deeds(held, first, *members("serving")) == ["remove w-0"]
    assert deeds(held, first) == []


def test_orphans_of_a_workload_that_is_gone_are_found_by_a_sweep_and_ended() -> None:
    """F31."""
    table = Table(*members("pending", "serving", "released"))
    made = controller(table)
    assert list(made.all_keys()) == [KEY]
    assert short(table.look(made, KEY)) == ["cancel w-0", "remove w-1", "forget w-2"]


# -- how it fares ------------------------------------------------------------------------------------------------------------


def test_the_conditions_of_a_service_chain_from_admitted_to_rolled_out() -> None:
    made, first = work("w", 2)
    table = Table(made, first)
    loop = controller(table)
    claims = table.look(loop, KEY)
    assert said(claims) == {
        "Admitted": ("True", "Accepted"), "Available": ("False", "TooFewReady"), "Progressing": ("True", "RollingOut")
    }  # fmt: skip
    made = table.observe(made, claims)
    for phases, then in (
        (("bound", "starting"), {"Scheduled": ("True", "AllBound")}),
        (("ready", "running"), {"Available": ("True", "EnoughReady")}),
        (("serving", "serving"), {"Ready": ("True", "AllReady"), "Progressing": ("True", "RolledOut")}),
    ):
        table.write(*members(*phases))
        claims = table.look(loop, KEY)
        assert said(claims) == then
        made = table.observe(made, claims)
    assert table.look(loop, KEY) == []
    assert {one.observed_generation for one in made.status.conditions} == {1}
    assert all(one.last_transition for one in made.status.conditions)


def test_bad_news_is_told_when_it_has_lasted__with_what_limits_it() -> None:
    made, first = work("w", 2)
    table = Table(made, first, *members("serving", "serving"))
    loop = controller(table)
    made = table.observe(made, table.look(loop, KEY))
    table.write(replica("w", 0, "pending"))
    assert table.again_in(loop, KEY) == PATIENCE_MS
    assert "Scheduled" not in said(table.look(loop, KEY))
    table.clock.at_ms += PATIENCE_MS
    assert said(table.look(loop, KEY))["Scheduled"] == ("False", "Queued")
    assert said(table.look(loop, KEY))["Ready"] == ("False", "Queued")


def test_what_comes_and_goes_is_not_written_down() -> None:
    """L10."""
    made, first = work("w", 2)
    table = Table(made, first, *members("serving", "serving"))
    loop = controller(table)
    table.observe(made, table.look(loop, KEY))
    for _ in range(4):
        for phase in ("running", "serving"):
            table.write(replica("w", 0, phase, "n1"))
            assert {"Scheduled", "Ready"}.isdisjoint(said(table.look(loop, KEY)))
            table.clock.at_ms += PATIENCE_MS - 1


def test_a_short_job_costs_no_conditions_but_its_end() -> None:
    table = job(1, done=members("running"))
    assert said(table.look(controller(table), KEY)) == {}


def test_a_job_that_waits_says_so() -> None:
    table = job(1, done=members("pending"))
    loop = controller(table)
    table.look(loop, KEY)
    table.clock.at_ms += PATIENCE_MS
    assert said(table.look(loop, KEY)) == {"Admitted": ("True", "Accepted"), "Scheduled": ("False", "Queued")}


def test_why_no_replicas_can_be_made_is_said_of_the_workload() -> None:
    made, first = work("w", 2)
    table = Table(made, first)
    loop = controller(table)
    deed = Action(Spawn("t1", "w", 1, 0, 2))
    loop.on_verdict(KEY, deed, Refused(Code.LIMIT, "there are too many replicas"))
    table.look(loop, KEY)
    table.clock.at_ms += PATIENCE_MS
    claims = table.look(loop, KEY)
    assert said(claims)["Admitted"] == ("False", "Limit")
    table.observe(made, claims)
    loop.on_verdict(KEY, deed, Accepted(7))
    assert said(table.look(loop, KEY))["Admitted"] == ("True", "Accepted")


def test_a_refusal_is_over_once_nothing_is_to_be_made_any_more() -> None:
    """Another copy of this controller may have made them meanwhile."""
    table = Table(*work("w", 2))
    loop = controller(table)
    loop.on_verdict(KEY, Action(Spawn("t1", "w", 1, 0, 2)), Refused(Code.STALE_EPOCH, "another acts"))
    table.write(*members("pending", "pending"))
    assert said(table.look(loop, KEY))["Admitted"] == ("True", "Accepted")


def test_a_rollout_says_what_a_new_replica_died_of__also_while_it_is_tried_again() -> None:
    made, first = work("w", 1)
    table = Table(made, first, replica("w", 0, "released", result="not started", reason="no such file", failures=1))
    loop = controller(table)
    made = table.observe(made, table.look(loop, KEY))
    assert message_of(made, "Progressing") == "w-0: not started no such file"
    table.write(replica("w", 0, "pending", failures=1))
    assert "Progressing" not in said(table.look(loop, KEY))
    table.write(replica("w", 0, "released", result="exit 3", failures=2))
    assert message_of(table.observe(made, table.look(loop, KEY)), "Progressing") == "w-0: exit 3"


def test_a_rollout_that_does_not_come_closer_for_its_deadline_says_so() -> None:
    made, first = work("w", 1)
    table = Table(made, first, *members("starting"))
    loop = controller(table)
    made = table.observe(made, table.look(loop, KEY))
    table.clock.at_ms += int(made.spec.rollout.progress_deadline)
    assert said(table.look(loop, KEY))["Progressing"] == ("False", "ProgressDeadlineExceeded")


# -- all of it ---------------------------------------------------------------------------------------------------------------

PHASES = st.sampled_from([phase.value for phase in Phase])


@given(st.lists(PHASES, max_size=8), st.integers(0, 6), st.sampled_from(["job", "service"]))
def test_whatever_stands_there_are_never_more_live_than_desired(phases: list[str], wanted: int, type_: str) -> None:
    """S13: what is made, with what repair is to bring back, fits beside what lives."""
    made, first = work("w", wanted, type_=type_)
    table = Table(made, first, *members(*phases))
    census = DesiredReplicas(table.board)
    found = census.diff(made)
    live = sum(phase != "released" for phase in phases)
    coming = sum(count for _, count in found.spawn) + len(found.requeue)
    assert not coming or live + coming <= wanted
    taken = {n for n, _ in enumerate(phases)}
    assert all(taken.isdisjoint(range(start, start + count)) for start, count in found.spawn)


@given(st.lists(PHASES, max_size=8), st.integers(0, 6), st.sampled_from(["job", "service"]))
def test_looking_twice_asks_for_the_same(phases: list[str], wanted: int, type_: str) -> None:
    """F20 F21: it is told no event, and keeps no note by which it would decide otherwise."""
    things: list[Any] = [*work("w", wanted, type_=type_), *members(*phases)]
    table = Table(*things)
    once = controller(table)
    assert table.look(once, KEY) == table.look(once, KEY) == table.look(controller(Table(*things)), KEY)
