"""Decisions of the node reconciler per phase, with and without a process or a lease. No I/O, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.agent.assignments import Assignments
from remit.agent.keeper.protocol import ProcessRecord
from remit.agent.preparation.preparer import PreparationProgress
from remit.agent.probes import ProcessHealth
from remit.agent.reconciler import ForgetAction, NodeReconciler, PrepareAction, ReportAction, StartAction, StopAction
from remit.agent.run_spec import NO_INPUTS
from remit.law.timing import lost_after_ms
from remit.model.kinds import Mount, Node, NodeHealth, NodeSpec, NodeStatus, Probe, Probes, Restart, TcpProbe
from remit.model.metadata import Metadata
from remit.model.records import Phase
from remit.model.resources import Amount, Duration
from tests.unit.agent.reconciler_bench import COPY, KEY, NOW_MS, TEMPO, Bench, template
from tests.unit.world.virtual_world import VirtualClock

ON_NODE = (
    Phase.BOUND,
    Phase.STARTING,
    Phase.RUNNING,
    Phase.READY,
    Phase.SERVING,
    Phase.DRAINING,
    Phase.STOPPING,
    Phase.UNKNOWN,
)


# -- no start on stale assignments ---------------------------------------------------------------------------------------------


def test_no_action_before_assignments_are_known() -> None:
    reconciler = NodeReconciler("n1", TEMPO)
    kept = {COPY: ProcessRecord("n1", "local", KEY, "u1", 1, pid=5)}
    assert reconciler.reconcile(NOW_MS, Assignments(VirtualClock()), kept, holds_lease=True) == []


def test_bound_replica_is_started_only_after_start_is_committed() -> None:
    bench = Bench(Phase.BOUND)
    bench.reconciler.on_lease_renewed(NOW_MS)
    assert bench.only_report() == ("start", "")
    bench.phase(Phase.STARTING)
    assert [type(action) for action in bench.actions(NOW_MS + 50)] == [StartAction]


@pytest.mark.parametrize("mounts", [{"configs": (Mount(name="c"),)}, {"secrets": (Mount(name="s"),)}])
def test_configs_and_secrets_are_prepared_again_for_each_start(mounts: dict[str, Any]) -> None:
    bench = Bench(Phase.STARTING, made=replace(template(), **mounts), kind="service")
    (action,) = bench.actions()
    assert isinstance(action, PrepareAction) and action.restarts == 0
    making = bench.reconciler.preparations[COPY] = PreparationProgress()
    assert bench.actions() == [], "the preparation is running"
    making.inputs = NO_INPUTS
    assert [type(action) for action in bench.actions()] == [StartAction]
    bench.ended(code=1)
    (action,) = [action for action in bench.actions(NOW_MS + 60_000) if not isinstance(action, ReportAction)]
    assert isinstance(action, PrepareAction) and action.restarts == 1, "the material of the first start is not reused"
    bench.reconciler.preparations[COPY] = PreparationProgress(1)
    bench.reconciler.preparations[COPY].inputs = NO_INPUTS
    assert [type(action) for action in bench.actions(NOW_MS + 60_000)] == [StartAction]


@pytest.mark.parametrize("phase", ON_NODE)
def test_node_without_lease_reports_and_starts_nothing(phase: Phase) -> None:
    bench = Bench(phase)
    assert not [action for action in bench.actions(holds_lease=False) if isinstance(action, (ReportAction, StartAction))]


def test_fenced_start_of_another_agent_is_reported_gone() -> None:
    """A killed agent may have requested it, and the silence since then is unknown."""
    assert Bench(Phase.STARTING).only_report() == ("crash", "start abandoned")
    eager = Bench(Phase.STARTING, kind="service")
    assert [type(action) for action in eager.actions()] == [StartAction]


def test_start_older_than_fence_is_reported_gone() -> None:
    bench = Bench(Phase.BOUND, fence=Duration(1_000))
    bench.reconciler.on_lease_renewed(NOW_MS)
    assert bench.only_report() == ("start", "")
    bench.phase(Phase.STARTING)
    assert bench.only_report(NOW_MS + 1_000) == ("crash", "start abandoned")
    bench.reconciler.on_lease_renewed(NOW_MS + 500)
    assert [type(action) for action in bench.actions(NOW_MS + 1_200)] == [StartAction]


# -- while it runs -------------------------------------------------------------------------------------------------------------


def test_job_reports_running_and_service_reports_ready() -> None:
    job = Bench(Phase.STARTING)
    job.runs(ports={"http": 80})
    action = job.actions()[0]
    assert isinstance(action, ReportAction)
    assert (action.move.transition, action.move.ports) == ("run", {"http": 80})
    job.phase(Phase.RUNNING)
    assert job.actions() == []
    service = Bench(Phase.RUNNING, kind="service")
    service.runs()
    assert service.only_report() == ("ready", "")
    for phase in (Phase.READY, Phase.SERVING):
        service.phase(phase)
        assert service.actions() == []


def test_probes_gate_reports_and_failing_live_probe_stops_process() -> None:
    probe = Probe(tcp=TcpProbe(port=80), failures=2)
    bench = Bench(Phase.STARTING, kind="service", made=template(probes=Probes(start=probe, ready=probe, live=probe)))
    bench.runs()
    assert bench.actions() == [], "no probe result yet"
    health = bench.reconciler.progress_of(COPY).health = ProcessHealth(bench.spec.template.probes, NOW_MS)
    health.record("start", True, "", NOW_MS)
    assert bench.only_report() == ("run", "")
    bench.phase(Phase.RUNNING)
    assert bench.actions() == []
    health.record("ready", True, "", NOW_MS)
    assert bench.only_report() == ("ready", "")
    bench.phase(Phase.SERVING)
    health.record("ready", False, "status 503", NOW_MS)
    assert bench.actions() == [], "one failure is below the threshold"
    health.record("ready", False, "status 503", NOW_MS)
    assert bench.only_report() == ("unready", "")
    for _ in range(2):
        health.record("live", False, "no answer", NOW_MS)
    assert bench.actions() == [StopAction(COPY, 30_000, "unhealthy")]
    bench.runs(number=1)
    bench.phase(Phase.RUNNING)
    assert bench.actions() == [], "probe results of the previous start do not count"


def test_timeout_stops_process_and_is_reported_after_agent_restart() -> None:
    bench = Bench(Phase.RUNNING, timeout=Duration(5_000), made=template(stop_grace=Duration(700)))
    bench.runs()
    assert bench.actions(NOW_MS + 4_999) == []
    assert min(bench.reconciler.requeue_at_ms.values()) == NOW_MS + 5_000
    assert bench.actions(NOW_MS + 5_000) == [StopAction(COPY, 700, "timeout")]
    bench.ended(code=None, signal=15, why="timeout")
    bench.reconciler = NodeReconciler("n1", TEMPO)
    assert bench.only_report() == ("crash", "timeout")


# -- exits ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ({"code": 0}, ("finish", "ok")),
        ({"code": 3}, ("crash", "exit 3")),
        ({"code": None, "signal": 11}, ("crash", "signal 11")),
        ({"code": None, "signal": 9, "oom": True}, ("crash", "oom")),
        ({"code": None}, ("crash", "gone")),
        ({"code": None, "failed": "no such program", "cure": "install it"}, ("crash", "not started")),
        ({"code": None, "signal": 15, "fenced": True}, ("crash", "signal 15")),
    ],
)
def test_exit_of_job_is_reported_with_transition_and_result(ended: dict[str, Any], expected: tuple[str, str]) -> None:
    bench = Bench(Phase.RUNNING)
    bench.ended(**ended)
    assert bench.only_report() == expected
    assert bench.actions(holds_lease=False) == []


def test_crash_reason_names_cause_in_readable_words() -> None:
    for ended, words in (
        ({"oom": True, "code": None, "signal": 9}, "its memory limit (64Mi)"),
        ({"code": None, "fenced": True}, "longer than spec.fence"),
        ({"code": None, "failed": "no such program", "cure": "install it"}, "no such program; install it"),
        ({"code": 1, "why": "timeout"}, "its timeout of 1m"),
    ):
        bench = Bench(Phase.RUNNING, timeout=Duration(60_000))
        bench.ended(**ended)
        action = bench.actions()[0]
        assert isinstance(action, ReportAction)
        assert words in action.move.reason


def test_job_that_exits_before_run_report_still_finishes() -> None:
    bench = Bench(Phase.STARTING)
    bench.ended(code=0)
    assert bench.only_report() == ("finish", "ok")
    bench.phase(Phase.RUNNING)
    assert bench.only_report() == ("finish", "ok")


def test_running_replica_without_process_is_reported_gone() -> None:
    for phase in (Phase.RUNNING, Phase.READY, Phase.SERVING):
        assert Bench(phase).only_report() == ("crash", "gone")


def test_crashed_service_restarts_with_backoff_after_it_is_unready() -> None:
    again = Restart(backoff=Duration(1_000), backoff_max=Duration(3_000))
    bench = Bench(Phase.SERVING, kind="service", made=template(restart=again))
    bench.ended(code=1)
    assert bench.only_report() == ("unready", "")
    bench.phase(Phase.RUNNING)
    for number, pause_ms in enumerate((1_000, 2_000, 3_000, 3_000)):
        bench.ended(code=1, number=number)
        assert bench.actions(NOW_MS + pause_ms - 1, holds_lease=False) == []
        assert min(bench.reconciler.requeue_at_ms.values()) == NOW_MS + pause_ms
        action = bench.actions(NOW_MS + pause_ms, holds_lease=False)[0]
        assert isinstance(action, StartAction), "a restart within the attempt needs no lease"
        assert action.restarts == number + 1


def test_process_is_not_restarted_when_policy_or_fence_forbids() -> None:
    for made, ended in (
        (template(restart=Restart(when="never")), {"code": 1}),
        (template(restart=Restart(limit=2)), {"code": 1, "number": 2}),
        (template(), {"code": None, "fenced": True}),
        (template(), {"code": 1, "why": "timeout"}),
        (template(), {"code": None, "failed": "x", "cure": "y"}),
    ):
        bench = Bench(Phase.RUNNING, kind="service", made=made)
        bench.ended(**ended)
        assert bench.only_report()[0] == "crash"


def test_fenced_process_is_not_restarted_after_silence_past_fence() -> None:
    """F34: the process exited during the silence of its node, which renews again with assignments from before."""
    again = template(restart=Restart(when="failure", backoff=Duration(10)))
    bench = Bench(Phase.RUNNING, made=again, fence=Duration(1_000))
    bench.reconciler.on_lease_renewed(NOW_MS)
    bench.ended(code=1)
    assert [type(action) for action in bench.actions(NOW_MS + 500)] == [StartAction]
    assert bench.actions(NOW_MS + 1_001, holds_lease=False) == []
    bench.reconciler.on_lease_renewed(NOW_MS + 1_100)
    assert bench.only_report(NOW_MS + 1_101) == ("crash", "exit 1")
    eager = Bench(Phase.RUNNING, made=again, fence=Duration(1_000), replace="eager")
    eager.reconciler.on_lease_renewed(NOW_MS)
    eager.ended(code=1)
    assert [type(action) for action in eager.actions(NOW_MS + 5_000, holds_lease=False)] == [StartAction]


def test_restarted_agent_waits_for_assignments_after_its_lease() -> None:
    """F36."""
    bench = Bench(Phase.RUNNING, made=template(restart=Restart(when="failure", backoff=Duration(10))), fence=Duration(1_000))
    bench.reconciler.on_lease_acquired(NOW_MS, continuous=True, revision=bench.orders.revision + 1)
    bench.reconciler.on_lease_renewed(NOW_MS)
    bench.ended(code=1)
    assert bench.actions(NOW_MS + 100) == []
    assert bench.reconciler.requeue_at_ms
    bench.phase(Phase.RUNNING)
    assert [type(action) for action in bench.actions(NOW_MS + 100)] == [StartAction]


def test_process_stopped_by_probe_counts_as_failed_despite_exit_zero() -> None:
    bench = Bench(Phase.RUNNING, kind="service", made=template(restart=Restart(when="failure", backoff=Duration(100))))
    bench.ended(code=0, why="unhealthy")
    assert isinstance(bench.actions(NOW_MS + 100)[0], StartAction)


def test_former_result_in_a_keeper_record_is_reported_by_its_new_name() -> None:
    bench = Bench(Phase.RUNNING)
    bench.ended(code=0, why="unwell")
    assert bench.only_report() == ("crash", "unhealthy")


# -- stop and drain ------------------------------------------------------------------------------------------------------------


def test_draining_replica_is_stopped_and_reports_stopped() -> None:
    bench = Bench(Phase.DRAINING, made=template(stop_grace=Duration(900)))
    bench.runs()
    assert bench.only_report() == ("stop", "")
    bench.phase(Phase.STOPPING)
    assert bench.actions(holds_lease=False) == [StopAction(COPY, 900)], "a committed stop needs no lease"
    bench.ended(code=0)
    assert bench.only_report() == ("stopped", "ok")
    bench.kept.clear()
    assert bench.only_report() == ("stopped", "ok")


def test_unknown_replica_resumes_unless_node_is_unknown() -> None:
    bench = Bench(Phase.UNKNOWN, before="running")
    bench.runs()
    assert bench.only_report() == ("resume", "")
    node = Node(
        metadata=Metadata(name="n1"),
        spec=NodeSpec(region="r", zone="z", capacity=Amount.parse({"cpu": "1"})),
        status=NodeStatus(health=NodeHealth.UNKNOWN),
    )
    bench.orders._nodes["n1"] = node, 3
    assert bench.actions() == []
    bench.orders._nodes["n1"] = replace(node, status=NodeStatus(health=NodeHealth.JOINING)), 4
    assert bench.only_report() == ("resume", "")


@pytest.mark.parametrize("phase", [Phase.RELEASED, Phase.FAILED, Phase.FINISHED])
def test_process_of_ended_replica_is_stopped_then_forgotten(phase: Phase) -> None:
    bench = Bench(phase)
    bench.runs()
    assert bench.actions(holds_lease=False) == [StopAction(COPY, TEMPO.kill_grace_ms)]
    bench.ended()
    assert bench.actions(holds_lease=False) == [ForgetAction(COPY)]


@pytest.mark.parametrize("other", [{"node": "n2"}, {"uid": "u2"}, {"attempt": 2}])
def test_process_of_other_node_uid_or_attempt_is_stopped(other: dict[str, Any]) -> None:
    bench = Bench(Phase.BOUND)
    bench.phase(Phase.BOUND, **other)
    bench.runs()
    assert StopAction(COPY, TEMPO.kill_grace_ms) in bench.actions(holds_lease=False)


# -- takeover from another agent ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING, Phase.STOPPING])
def test_new_agent_without_journal_reports_crash_only_after_fence(phase: Phase) -> None:
    bench = Bench(phase, fence=Duration(2_000))
    bench.reconciler.on_lease_acquired(NOW_MS, continuous=False)
    sure_ms = NOW_MS + lost_after_ms(2_000, TEMPO)
    assert bench.actions(sure_ms - 1) == []
    assert min(bench.reconciler.requeue_at_ms.values()) == sure_ms
    assert bench.only_report(sure_ms)[0] in ("crash", "stopped")
    follower = Bench(phase, fence=Duration(2_000))
    follower.reconciler.on_lease_acquired(NOW_MS, continuous=True)
    assert follower.only_report()[0] in ("crash", "stopped")
    eager = Bench(Phase.RUNNING, kind="service", fence=Duration(2_000))
    eager.reconciler.on_lease_acquired(NOW_MS, continuous=False)
    assert eager.only_report() == ("crash", "gone")


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.STOPPING])
def test_start_bound_after_takeover_needs_no_fence_wait(phase: Phase) -> None:
    bench = Bench(Phase.BOUND, fence=Duration(2_000))
    bench.reconciler.on_lease_acquired(NOW_MS, continuous=False, revision=bench.orders.revision)
    bench.reconciler.on_lease_renewed(NOW_MS)
    assert bench.only_report() == ("start", "")
    bench.phase(phase)
    assert bench.only_report(NOW_MS + 2_001)[0] in ("crash", "stopped"), "well before the fence of another agent"


@pytest.mark.parametrize("lacking", ["assignments after lease", "same incarnation", "no holder between", "same attempt"])
def test_new_agent_waits_for_fence_when_origin_of_start_is_unclear(lacking: str) -> None:
    bench = Bench(Phase.BOUND, fence=Duration(2_000))
    stale = lacking == "assignments after lease"
    bench.reconciler.on_lease_acquired(NOW_MS, continuous=False, revision=bench.orders.revision + stale)
    assert bench.only_report() == ("start", "")
    if lacking == "no holder between":
        bench.reconciler.on_lease_acquired(NOW_MS, continuous=False, revision=bench.orders.revision)
    bench.phase(Phase.STOPPING, attempt=2 if lacking == "same attempt" else 1)
    if lacking == "same incarnation":
        bench.orders.incarnation = "i2"
    assert bench.actions() == []
    sure_ms = NOW_MS + lost_after_ms(2_000, TEMPO)
    assert min(bench.reconciler.requeue_at_ms.values()) == sure_ms
