"""What does a node's mind answer in each phase, with and without a process, with and without its lease? No I/O, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.agent.assignments import Assignments, generation_name
from remit.agent.attempts import AttemptId
from remit.agent.keeper.protocol import ProcessRecord
from remit.agent.preparation.preparer import PreparationProgress
from remit.agent.probes import ProcessHealth
from remit.agent.reconciler import (
    AgentAction,
    ForgetAction,
    NodeReconciler,
    PrepareAction,
    ReportAction,
    StartAction,
    StopAction,
)
from remit.agent.run_spec import NO_INPUTS
from remit.law.timing import Timing, lost_after_ms
from remit.model.kinds import (
    Mount,
    Node,
    NodeHealth,
    NodeSpec,
    NodeStatus,
    Probe,
    Probes,
    Restart,
    TcpProbe,
    Template,
    WorkloadSpec,
)
from remit.model.metadata import Metadata, RecordMetadata
from remit.model.records import Generation, GenerationSpec, Phase, Replica, ReplicaSpec, ReplicaStatus
from remit.model.resources import Amount, Duration
from remit.model.wire.agent_messages import AssignmentRow, AssignmentsUpdate
from remit.world.interfaces import ExitStatus
from tests.unit.world.virtual_world import VirtualClock, run_virtually

TEMPO = Timing(100)
KEY, NOW_MS = "replica/t/a-0", 100_000
COPY = AttemptId(KEY, "u1", 1)
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


def template(**more: Any) -> Template:
    return Template(command=("work",), resources=Amount.parse({"cpu": "1", "memory": "64Mi"}), **more)


class Bench:
    """One mind, one replica in some phase, and what the keeper has of it."""

    def __init__(self, phase: Phase, *, kind: str = "job", before: str = "", made: Template | None = None, **spec: Any) -> None:
        self.mind = NodeReconciler("n1", TEMPO)
        self.orders = Assignments(VirtualClock())
        self.spec = WorkloadSpec(type=kind, template=made or template(), **spec)  # type: ignore[arg-type]
        self.kept: dict[AttemptId, ProcessRecord] = {}
        self.phase(phase, before)

    def phase(self, phase: Phase, before: str = "", *, node: str = "n1", uid: str = "u1", attempt: int = 1) -> None:
        replica = Replica(
            metadata=RecordMetadata(name="a-0", tenant="t", uid=uid),
            spec=ReplicaSpec(workload="a", generation=1),
            status=ReplicaStatus(phase=phase, node=node, attempt=attempt, before=before),
        )
        generation = Generation(
            metadata=RecordMetadata(name="a-1", tenant="t"),
            spec=GenerationSpec(workload="a", generation=1, labels={}, spec=self.spec),
        )
        assert generation_name("t", "a", 1)
        rows = (AssignmentRow(KEY, 7, replica),)

        async def take() -> None:
            self.orders.apply(
                AssignmentsUpdate("i1", self.orders.revision + 1, whole=True, replicas=rows, generations=(generation,))
            )

        run_virtually(take())

    def runs(self, **more: Any) -> None:
        common = {"node": "n1", "scope": "local", "key": KEY, "uid": "u1", "attempt": 1, "pid": 5, "since_ms": NOW_MS}
        self.kept[COPY] = ProcessRecord(**{**common, **more})

    def ended(self, *, code: int | None = 0, signal: int | None = None, oom: bool = False, **more: Any) -> None:
        self.runs(ended=ExitStatus(code, signal, oom), ended_ms=NOW_MS, **more)

    def look(self, at_ms: int = NOW_MS, *, may_act: bool = True) -> list[AgentAction]:
        return self.mind.reconcile(at_ms, self.orders, self.kept, holds_lease=may_act)

    def says(self, at_ms: int = NOW_MS) -> tuple[str, str]:
        """The one move that is said, and its result."""
        deeds = self.look(at_ms)
        assert len(deeds) == 1, deeds
        assert isinstance(deeds[0], ReportAction), deeds
        assert (deeds[0].move.replica, deeds[0].move.attempt) == (KEY, 1)
        return deeds[0].move.transition, deeds[0].move.result


# -- nothing starts on a stale order -------------------------------------------------------------------------------------------


def test_until_orders_are_known_nothing_is_done() -> None:
    mind = NodeReconciler("n1", TEMPO)
    kept = {COPY: ProcessRecord("n1", "local", KEY, "u1", 1, pid=5)}
    assert mind.reconcile(NOW_MS, Assignments(VirtualClock()), kept, holds_lease=True) == []


def test_what_is_bound_is_asked_to_start_and_only_then_started() -> None:
    bench = Bench(Phase.BOUND)
    bench.mind.on_lease_renewed(NOW_MS)
    assert bench.says() == ("start", "")
    bench.phase(Phase.STARTING)
    assert [type(deed) for deed in bench.look(NOW_MS + 50)] == [StartAction]


@pytest.mark.parametrize("asked", [{"configs": (Mount(name="c"),)}, {"secrets": (Mount(name="s"),)}])
def test_work_that_reads_is_started_once_it_is_there__and_asked_for_anew_at_each_start(asked: dict[str, Any]) -> None:
    bench = Bench(Phase.STARTING, made=replace(template(), **asked), kind="service")
    (deed,) = bench.look()
    assert isinstance(deed, PrepareAction) and deed.restarts == 0
    making = bench.mind.preparations[COPY] = PreparationProgress()
    assert bench.look() == [], "it is under way"
    making.inputs = NO_INPUTS
    assert [type(deed) for deed in bench.look()] == [StartAction]
    bench.ended(code=1)
    (deed,) = [deed for deed in bench.look(NOW_MS + 60_000) if not isinstance(deed, ReportAction)]
    assert isinstance(deed, PrepareAction) and deed.restarts == 1, (
        "what was read for the first start is not good for the second"
    )
    bench.mind.preparations[COPY] = PreparationProgress(1)
    bench.mind.preparations[COPY].inputs = NO_INPUTS
    assert [type(deed) for deed in bench.look(NOW_MS + 60_000)] == [StartAction]


@pytest.mark.parametrize("phase", ON_NODE)
def test_without_its_lease_a_node_claims_nothing(phase: Phase) -> None:
    bench = Bench(phase)
    assert not [deed for deed in bench.look(may_act=False) if isinstance(deed, (ReportAction, StartAction))]


def test_a_start_that_this_agent_did_not_ask_for_itself_is_void_if_it_is_fenced() -> None:
    """Another agent, before it was killed, may have asked: nobody knows what silence lay between."""
    assert Bench(Phase.STARTING).says() == ("crash", "start abandoned")
    eager = Bench(Phase.STARTING, kind="service")
    assert [type(deed) for deed in eager.look()] == [StartAction]


def test_a_silence_as_long_as_its_fence_makes_a_start_void() -> None:
    bench = Bench(Phase.BOUND, fence=Duration(1_000))
    bench.mind.on_lease_renewed(NOW_MS)
    assert bench.says() == ("start", "")
    bench.phase(Phase.STARTING)
    assert bench.says(NOW_MS + 1_000) == ("crash", "start abandoned")
    bench.mind.on_lease_renewed(NOW_MS + 500)
    assert [type(deed) for deed in bench.look(NOW_MS + 1_200)] == [StartAction]


# -- while it runs -------------------------------------------------------------------------------------------------------------


def test_a_job_runs_and_a_service_gets_ready() -> None:
    job = Bench(Phase.STARTING)
    job.runs(ports={"http": 80})
    deed = job.look()[0]
    assert isinstance(deed, ReportAction)
    assert (deed.move.transition, deed.move.ports) == ("run", {"http": 80})
    job.phase(Phase.RUNNING)
    assert job.look() == []
    service = Bench(Phase.RUNNING, kind="service")
    service.runs()
    assert service.says() == ("ready", "")
    for phase in (Phase.READY, Phase.SERVING):
        service.phase(phase)
        assert service.look() == []


def test_probes_hold_back_what_is_said_and_end_what_is_dead() -> None:
    probe = Probe(tcp=TcpProbe(port=80), failures=2)
    bench = Bench(Phase.STARTING, kind="service", made=template(probes=Probes(start=probe, ready=probe, live=probe)))
    bench.runs()
    assert bench.look() == [], "nothing was answered yet"
    health = bench.mind.progress_of(COPY).health = ProcessHealth(bench.spec.template.probes, NOW_MS)
    health.record("start", True, "", NOW_MS)
    assert bench.says() == ("run", "")
    bench.phase(Phase.RUNNING)
    assert bench.look() == []
    health.record("ready", True, "", NOW_MS)
    assert bench.says() == ("ready", "")
    bench.phase(Phase.SERVING)
    health.record("ready", False, "status 503", NOW_MS)
    assert bench.look() == [], "once is not too often"
    health.record("ready", False, "status 503", NOW_MS)
    assert bench.says() == ("unready", "")
    for _ in range(2):
        health.record("live", False, "no answer", NOW_MS)
    assert bench.look() == [StopAction(COPY, 30_000, "unwell")]
    bench.runs(number=1)
    bench.phase(Phase.RUNNING)
    assert bench.look() == [], "what a former start answered says nothing of this one"


def test_a_timeout_ends_it_and_is_its_result_also_for_an_agent_that_did_not_see_it() -> None:
    bench = Bench(Phase.RUNNING, timeout=Duration(5_000), made=template(stop_grace=Duration(700)))
    bench.runs()
    assert bench.look(NOW_MS + 4_999) == []
    assert min(bench.mind.requeue_at_ms.values()) == NOW_MS + 5_000
    assert bench.look(NOW_MS + 5_000) == [StopAction(COPY, 700, "timeout")]
    bench.ended(code=None, signal=15, why="timeout")
    bench.mind = NodeReconciler("n1", TEMPO)
    assert bench.says() == ("crash", "timeout")


# -- how it ended --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "said"),
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
def test_each_end_of_a_job_is_told_by_its_move(ended: dict[str, Any], said: tuple[str, str]) -> None:
    bench = Bench(Phase.RUNNING)
    bench.ended(**ended)
    assert bench.says() == said
    assert bench.look(may_act=False) == []


def test_reasons_are_for_people() -> None:
    for ended, words in (
        ({"oom": True, "code": None, "signal": 9}, "its memory limit (64Mi)"),
        ({"code": None, "fenced": True}, "longer than the workload's fence"),
        ({"code": None, "failed": "no such program", "cure": "install it"}, "no such program; install it"),
        ({"code": 1, "why": "timeout"}, "its timeout of 1m"),
    ):
        bench = Bench(Phase.RUNNING, timeout=Duration(60_000))
        bench.ended(**ended)
        deed = bench.look()[0]
        assert isinstance(deed, ReportAction)
        assert words in deed.move.reason


def test_one_that_was_quicker_than_that_it_runs_could_be_told_has_finished_all_the_same() -> None:
    bench = Bench(Phase.STARTING)
    bench.ended(code=0)
    assert bench.says() == ("finish", "ok")
    bench.phase(Phase.RUNNING)
    assert bench.says() == ("finish", "ok")


def test_what_ran_and_is_not_known_any_more_is_gone() -> None:
    for phase in (Phase.RUNNING, Phase.READY, Phase.SERVING):
        assert Bench(phase).says() == ("crash", "gone")


def test_a_service_is_started_again_after_its_pause_once_nobody_is_sent_to_it() -> None:
    again = Restart(backoff=Duration(1_000), backoff_max=Duration(3_000))
    bench = Bench(Phase.SERVING, kind="service", made=template(restart=again))
    bench.ended(code=1)
    assert bench.says() == ("unready", "")
    bench.phase(Phase.RUNNING)
    for number, pause_ms in enumerate((1_000, 2_000, 3_000, 3_000)):
        bench.ended(code=1, number=number)
        assert bench.look(NOW_MS + pause_ms - 1, may_act=False) == []
        assert min(bench.mind.requeue_at_ms.values()) == NOW_MS + pause_ms
        deed = bench.look(NOW_MS + pause_ms, may_act=False)[0]
        assert isinstance(deed, StartAction), "its attempt goes on: no lease is needed for that"
        assert deed.restarts == number + 1


def test_one_that_is_not_to_be_restarted_or_was_fenced_is_not() -> None:
    for made, ended in (
        (template(restart=Restart(when="never")), {"code": 1}),
        (template(restart=Restart(limit=2)), {"code": 1, "number": 2}),
        (template(), {"code": None, "fenced": True}),
        (template(), {"code": 1, "why": "timeout"}),
        (template(), {"code": None, "failed": "x", "cure": "y"}),
    ):
        bench = Bench(Phase.RUNNING, kind="service", made=made)
        bench.ended(**ended)
        assert bench.says()[0] == "crash"


def test_what_must_never_run_twice_is_not_started_again_after_a_silence_in_which_it_may_have_been_given_up() -> None:
    """F34: it ended by itself while its node was silent. Its orders are those of before, and the node renews again."""
    again = template(restart=Restart(when="failure", backoff=Duration(10)))
    bench = Bench(Phase.RUNNING, made=again, fence=Duration(1_000))
    bench.mind.on_lease_renewed(NOW_MS)
    bench.ended(code=1)
    assert [type(deed) for deed in bench.look(NOW_MS + 500)] == [StartAction]
    assert bench.look(NOW_MS + 1_001, may_act=False) == []
    bench.mind.on_lease_renewed(NOW_MS + 1_100)
    assert bench.says(NOW_MS + 1_101) == ("crash", "exit 1")
    eager = Bench(Phase.RUNNING, made=again, fence=Duration(1_000), replace="eager")
    eager.mind.on_lease_renewed(NOW_MS)
    eager.ended(code=1)
    assert [type(deed) for deed in eager.look(NOW_MS + 5_000, may_act=False)] == [StartAction]


def test_an_agent_that_comes_back_starts_nothing_again_on_orders_from_before_it_held_its_node() -> None:
    """F36."""
    bench = Bench(Phase.RUNNING, made=template(restart=Restart(when="failure", backoff=Duration(10))), fence=Duration(1_000))
    bench.mind.on_lease_acquired(NOW_MS, continuous=True, revision=bench.orders.revision + 1)
    bench.mind.on_lease_renewed(NOW_MS)
    bench.ended(code=1)
    assert bench.look(NOW_MS + 100) == []
    assert bench.mind.requeue_at_ms
    bench.phase(Phase.RUNNING)
    assert [type(deed) for deed in bench.look(NOW_MS + 100)] == [StartAction]


def test_one_that_a_probe_ended_has_failed_although_it_exited_with_0() -> None:
    bench = Bench(Phase.RUNNING, kind="service", made=template(restart=Restart(when="failure", backoff=Duration(100))))
    bench.ended(code=0, why="unwell")
    assert isinstance(bench.look(NOW_MS + 100)[0], StartAction)


# -- leaving -------------------------------------------------------------------------------------------------------------------


def test_draining_stopping_and_stopped() -> None:
    bench = Bench(Phase.DRAINING, made=template(stop_grace=Duration(900)))
    bench.runs()
    assert bench.says() == ("stop", "")
    bench.phase(Phase.STOPPING)
    assert bench.look(may_act=False) == [StopAction(COPY, 900)], "what is decided is done, lease or not"
    bench.ended(code=0)
    assert bench.says() == ("stopped", "ok")
    bench.kept.clear()
    assert bench.says() == ("stopped", "ok")


def test_unknown_is_resumed_unless_the_node_is_given_up() -> None:
    bench = Bench(Phase.UNKNOWN, before="running")
    bench.runs()
    assert bench.says() == ("resume", "")
    node = Node(
        metadata=Metadata(name="n1"),
        spec=NodeSpec(region="r", zone="z", capacity=Amount.parse({"cpu": "1"})),
        status=NodeStatus(health=NodeHealth.UNKNOWN),
    )
    bench.orders._nodes["n1"] = node, 3
    assert bench.look() == []
    bench.orders._nodes["n1"] = replace(node, status=NodeStatus(health=NodeHealth.JOINING)), 4
    assert bench.says() == ("resume", "")


@pytest.mark.parametrize("phase", [Phase.RELEASED, Phase.FAILED, Phase.FINISHED])
def test_what_is_over_is_ended_and_then_forgotten(phase: Phase) -> None:
    bench = Bench(phase)
    bench.runs()
    assert bench.look(may_act=False) == [StopAction(COPY, TEMPO.kill_grace_ms)]
    bench.ended()
    assert bench.look(may_act=False) == [ForgetAction(COPY)]


@pytest.mark.parametrize("other", [{"node": "n2"}, {"uid": "u2"}, {"attempt": 2}])
def test_a_copy_that_is_not_the_one_ordered_is_ended(other: dict[str, Any]) -> None:
    bench = Bench(Phase.BOUND)
    bench.phase(Phase.BOUND, **other)
    bench.runs()
    assert StopAction(COPY, TEMPO.kill_grace_ms) in bench.look(may_act=False)


# -- where another agent held the node before ---------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING, Phase.STOPPING])
def test_an_heir_without_the_data_says_that_nothing_runs_only_when_it_was_surely_fenced(phase: Phase) -> None:
    bench = Bench(phase, fence=Duration(2_000))
    bench.mind.on_lease_acquired(NOW_MS, continuous=False)
    sure_ms = NOW_MS + lost_after_ms(2_000, TEMPO)
    assert bench.look(sure_ms - 1) == []
    assert min(bench.mind.requeue_at_ms.values()) == sure_ms
    assert bench.says(sure_ms)[0] in ("crash", "stopped")
    follower = Bench(phase, fence=Duration(2_000))
    follower.mind.on_lease_acquired(NOW_MS, continuous=True)
    assert follower.says()[0] in ("crash", "stopped")
    eager = Bench(Phase.RUNNING, kind="service", fence=Duration(2_000))
    eager.mind.on_lease_acquired(NOW_MS, continuous=False)
    assert eager.says() == ("crash", "gone")


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.STOPPING])
def test_what_was_still_bound_once_the_heir_held_the_node_was_begun_by_nobody_else(phase: Phase) -> None:
    bench = Bench(Phase.BOUND, fence=Duration(2_000))
    bench.mind.on_lease_acquired(NOW_MS, continuous=False, revision=bench.orders.revision)
    bench.mind.on_lease_renewed(NOW_MS)
    assert bench.says() == ("start", "")
    bench.phase(phase)
    assert bench.says(NOW_MS + 2_001)[0] in ("crash", "stopped"), "and long before another's would be fenced"


@pytest.mark.parametrize("lacking", ["orders from after the lease", "this incarnation", "nobody between", "the same attempt"])
def test_an_heir_waits_where_it_cannot_tell_who_began_it(lacking: str) -> None:
    bench = Bench(Phase.BOUND, fence=Duration(2_000))
    stale = lacking == "orders from after the lease"
    bench.mind.on_lease_acquired(NOW_MS, continuous=False, revision=bench.orders.revision + stale)
    assert bench.says() == ("start", "")
    if lacking == "nobody between":
        bench.mind.on_lease_acquired(NOW_MS, continuous=False, revision=bench.orders.revision)
    bench.phase(Phase.STOPPING, attempt=2 if lacking == "the same attempt" else 1)
    if lacking == "this incarnation":
        bench.orders.incarnation = "i2"
    assert bench.look() == []
    sure_ms = NOW_MS + lost_after_ms(2_000, TEMPO)
    assert min(bench.mind.requeue_at_ms.values()) == sure_ms
