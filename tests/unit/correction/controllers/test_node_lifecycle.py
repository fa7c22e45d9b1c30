"""Node lifecycle: health after silence, mass silence, taints and drains (hand-made cache)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.correction.controllers.disruption import NODE_EVICTIONS_MAX, PendingEvictions
from remit.correction.controllers.node_lifecycle import (
    LOST_AFTER_UNKNOWN_TIMES,
    UNKNOWN_NODES_BURST,
    UNKNOWN_NODES_MILLI_PER_S,
    NodeController,
)
from remit.law.timing import lost_after_ms
from remit.model.claims import Accepted, AnyClaim, Code, Mark, Move, RecordEvent, Refused
from remit.model.kinds import Disruption, Node, NodeHealth, Taint, Workload
from remit.model.resources import Duration
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeatAge
from remit.observation.health import HeartbeatAges
from tests.unit.correction.controller_fixture import (
    TEMPO,
    ControllerBench,
    claim_words,
    condition_reasons,
    ready,
    replica,
    work,
)

SUSPECT_MS, UNKNOWN_MS = TEMPO.suspect_ms, TEMPO.unknown_ms
FENCE = Duration(60_000)


class NodeBench:
    """The node controller and the heartbeat ages it is given."""

    def __init__(self, *objects: Any) -> None:
        self.table = ControllerBench(*objects)
        self.nodes = NodeController(self.table.board, PendingEvictions(self.table.board))
        self.silent: dict[str, int] = {}
        self.settled: dict[str, str] = {}
        self.incarnation = "one"

    def set_ages(self, **silent: int) -> None:
        """Heartbeat ages of these nodes; all others have just sent one."""
        nodes = {key.removeprefix("node/"): NodeHeartbeatAge(0, "one") for key, _ in self.table.board.of_kind("node/")}
        nodes |= {name: NodeHeartbeatAge(ms, self.settled.get(name, "one")) for name, ms in silent.items()}
        report = HeartbeatReport(self.incarnation, 3_600_000, nodes)
        self.nodes.set_heartbeat_ages(HeartbeatAges(report, self.table.clock.now_ms()), self.table.times())

    def reconcile(self, at: str = "node/n1") -> list[AnyClaim]:
        return self.table.reconcile(self.nodes, at)

    def marks_after(self, silent_ms: int, health: NodeHealth) -> list[str]:
        self.table.write(ready("n1", health))
        self.set_ages(n1=silent_ms)
        return claim_words(self.reconcile())


def others(count: int = 5) -> list[Node]:
    return [ready(f"other{n}") for n in range(count)]


# -- health after silence ----------------------------------------------------------------------------------------------------


def test_node_health_degrades_at_its_silence_limits() -> None:
    """L5: no step before its time, and each further than the last."""
    watch = NodeBench(ready("n1"), *others())
    ladder = [
        (NodeHealth.READY, SUSPECT_MS, []),
        (NodeHealth.READY, SUSPECT_MS + 1, ["mark n1 suspect"]),
        (NodeHealth.SUSPECT, UNKNOWN_MS, []),
        (NodeHealth.SUSPECT, UNKNOWN_MS + 1, ["mark n1 unknown"]),
        (NodeHealth.UNKNOWN, LOST_AFTER_UNKNOWN_TIMES * UNKNOWN_MS, []),
        (NodeHealth.UNKNOWN, LOST_AFTER_UNKNOWN_TIMES * UNKNOWN_MS + 1, ["mark n1 lost"]),
        (NodeHealth.LOST, 10 * LOST_AFTER_UNKNOWN_TIMES * UNKNOWN_MS, []),
    ]
    for health, silent_ms, then in ladder:
        assert watch.marks_after(silent_ms, health) == then, (health, silent_ms)


def test_returning_node_rejoins_or_becomes_ready() -> None:
    watch = NodeBench(ready("n1"), *others())
    assert watch.marks_after(0, NodeHealth.SUSPECT) == ["mark n1 ready"]
    assert watch.marks_after(0, NodeHealth.UNKNOWN) == ["mark n1 joining"]
    assert watch.marks_after(0, NodeHealth.LOST) == ["mark n1 joining"]
    assert watch.marks_after(0, NodeHealth.JOINING) == ["mark n1 ready"]


def test_joining_node_is_ready_only_after_settling_with_incarnation() -> None:
    """F10 F34: it may run replicas unknown to this incarnation."""
    watch = NodeBench(ready("n1"), *others())
    watch.settled = {"n1": "an earlier one"}
    assert watch.marks_after(0, NodeHealth.JOINING) == []
    watch.settled = {"n1": "one"}
    assert watch.marks_after(0, NodeHealth.JOINING) == ["mark n1 ready"]


def test_stale_heartbeats_or_of_other_incarnation_change_nothing() -> None:
    watch = NodeBench(ready("n1"), *others())
    watch.set_ages(n1=SUSPECT_MS + 1)
    watch.table.clock.at_ms += 3 * TEMPO.heartbeat_ms + 1
    assert watch.reconcile() == []
    watch.incarnation = "another"
    watch.set_ages(n1=SUSPECT_MS + 1)
    assert watch.reconcile() == []


def test_new_lease_term_starts_without_heartbeats() -> None:
    watch = NodeBench(ready("n1"), *others())
    watch.set_ages(n1=SUSPECT_MS + 1)
    watch.nodes.on_lease_acquired(watch.table.times())
    assert watch.reconcile() == []


def test_nodes_of_zone_become_unknown_at_limited_rate() -> None:
    """S17: a burst, then one in ten seconds; each zone has its own rate."""
    many = [ready(f"n{n}", NodeHealth.SUSPECT) for n in range(UNKNOWN_NODES_BURST + 2)]
    watch = NodeBench(*many, ready("b", NodeHealth.SUSPECT, zone="b"), *others(40))
    watch.set_ages(**{f"n{n}": UNKNOWN_MS + 1 for n in range(len(many))}, b=UNKNOWN_MS + 1)
    marked = [name for name in (*(f"n{n}" for n in range(len(many))), "b") if claim_words(watch.reconcile(f"node/{name}"))]
    assert marked == [*(f"n{n}" for n in range(UNKNOWN_NODES_BURST)), "b"]
    wait_ms = 1_000_000 // UNKNOWN_NODES_MILLI_PER_S
    assert watch.table.requeue_ms(watch.nodes, f"node/n{UNKNOWN_NODES_BURST}") == wait_ms
    watch.table.clock.at_ms += wait_ms
    watch.set_ages(**{f"n{n}": UNKNOWN_MS + 1 for n in range(len(many))})
    assert claim_words(watch.reconcile(f"node/n{UNKNOWN_NODES_BURST}")) == [f"mark n{UNKNOWN_NODES_BURST} unknown"]


# -- replicas on silent nodes ------------------------------------------------------------------------------------------------


def claims_on_silent_node(phase: str, silent_ms: int, **more: Any) -> list[str]:
    declared, first = work("w", **more)
    watch = NodeBench(
        ready("n1", NodeHealth.UNKNOWN), *others(), declared, first, replica("w", 0, phase, "n1", before="serving")
    )
    watch.set_ages(n1=silent_ms)
    return claim_words(watch.reconcile())


def test_replicas_on_unknown_node_are_marked_unknown() -> None:
    for phase in ("bound", "starting", "running", "ready", "serving", "draining", "stopping"):
        assert claims_on_silent_node(phase, UNKNOWN_MS + 1) == ["doubt w-0"], phase


def test_fenced_replica_is_lost_only_after_fence() -> None:
    fence_ms = lost_after_ms(FENCE, TEMPO)
    assert claims_on_silent_node("unknown", fence_ms - 1, replace="fenced", fence=FENCE) == []
    assert claims_on_silent_node("unknown", fence_ms, replace="fenced", fence=FENCE) == ["lose w-0"]


def test_eager_replica_is_lost_soon() -> None:
    assert claims_on_silent_node("unknown", TEMPO.eager_ms - 1, replace="eager", fence=FENCE) == []
    assert claims_on_silent_node("unknown", TEMPO.eager_ms, replace="eager", fence=FENCE) == ["lose w-0"]


@pytest.mark.parametrize(("replacement", "limit"), [("fenced", "spec.fence (1m)"), ("eager", f"{Duration(TEMPO.eager_ms)}")])
def test_lost_replica_names_the_limit_that_has_passed(replacement: Any, limit: str) -> None:
    declared, first = work("w", replace=replacement, fence=FENCE)
    watch = NodeBench(ready("n1", NodeHealth.UNKNOWN), *others(), declared, first, replica("w", 0, "unknown", "n1"))
    watch.set_ages(n1=lost_after_ms(FENCE, TEMPO))
    (lose,) = (claim for claim in watch.reconcile() if isinstance(claim, Move))
    assert (lose.result, lose.reason) == ("lost", f"node n1 sent no heartbeats for longer than {limit}")


def test_health_reason_gives_the_silence_in_seconds() -> None:
    watch = NodeBench(ready("n1"), *others())
    watch.set_ages(n1=SUSPECT_MS + 1_234)
    (mark,) = watch.reconcile()
    assert isinstance(mark, Mark) and mark.reason == f"no heartbeat for {Duration(SUSPECT_MS + 1_000)}"


def test_next_fence_is_waited_for_by_requeue() -> None:
    declared, first = work("w", replace="fenced", fence=FENCE)
    watch = NodeBench(
        ready("n1", NodeHealth.UNKNOWN), *others(), declared, first, replica("w", 0, "unknown", "n1", before="running")
    )
    watch.set_ages(n1=UNKNOWN_MS + 1)
    assert watch.table.requeue_ms(watch.nodes, "node/n1") == lost_after_ms(FENCE, TEMPO) - UNKNOWN_MS - 1


def test_node_with_replicas_is_not_marked_lost() -> None:
    declared, first = work("w", replace="fenced", fence=FENCE)
    watch = NodeBench(
        ready("n1", NodeHealth.UNKNOWN), *others(), declared, first, replica("w", 0, "unknown", "n1", before="running")
    )
    watch.set_ages(n1=LOST_AFTER_UNKNOWN_TIMES * UNKNOWN_MS + 1)
    assert "mark n1 lost" not in claim_words(watch.reconcile())


# -- mass silence ------------------------------------------------------------------------------------------------------------


def bench_with_silent(count: int, of: int, health: NodeHealth = NodeHealth.SUSPECT) -> NodeBench:
    watch = NodeBench(*(ready(f"n{n}", health if n < count else NodeHealth.READY) for n in range(of)))
    watch.set_ages(**{f"n{n}": UNKNOWN_MS + 1 for n in range(count)})
    return watch


def test_nothing_is_marked_when_most_of_region_is_silent() -> None:
    """F35 S17: from 55 percent."""
    assert claim_words(bench_with_silent(5, 10).reconcile("node/n0")) == ["mark n0 unknown"]
    assert claim_words(bench_with_silent(6, 10).reconcile("node/n0")) == []


def test_mass_silence_stops_loss_eviction_and_drain() -> None:
    declared, first = work("w", replace="eager")
    watch = bench_with_silent(6, 10, NodeHealth.UNKNOWN)
    watch.table.write(declared, first, replica("w", 0, "unknown", "n0", before="serving"), replica("w", 1, "serving", "n9"))
    watch.table.write(ready("n9", draining=True, taints=(Taint(key="out", effect="NoExecute"),)))
    watch.set_ages(**{f"n{n}": 100 * UNKNOWN_MS for n in range(6)})
    assert claim_words(watch.reconcile("node/n0")) == []
    assert claim_words(watch.reconcile("node/n9")) == []


def test_mass_silence_warns_then_calls_operator_and_reports_end() -> None:
    watch = bench_with_silent(6, 10)

    def events() -> list[tuple[str, str]]:
        return [
            (result.event.type, result.event.reason)
            for result in watch.reconcile("region/r1")
            if isinstance(result, RecordEvent)
        ]

    assert events() == [("Warning", "MassSilence")]
    assert events() == []
    watch.table.clock.at_ms += TEMPO.call_operator_ms
    watch.set_ages(**{f"n{n}": UNKNOWN_MS + 1 for n in range(6)})
    assert events() == [("Warning", "CallOperator")]
    assert events() == []
    watch.set_ages()
    assert events() == [("Normal", "MassSilenceOver")]
    assert events() == []


def test_two_silent_nodes_are_mass_silence_only_without_live_node() -> None:
    """F35 S17: if no node is heard, there is no place to move to, and the replicas may well run."""
    watch = NodeBench(ready("n0", NodeHealth.SUSPECT), ready("n1"))
    watch.set_ages(n0=UNKNOWN_MS + 1, n1=UNKNOWN_MS + 1)
    assert claim_words(watch.reconcile("node/n0")) == []
    watch.set_ages(n0=UNKNOWN_MS + 1)
    assert claim_words(watch.reconcile("node/n0")) == ["mark n0 unknown"]
    alone = NodeBench(ready("n0", NodeHealth.SUSPECT))
    alone.set_ages(n0=UNKNOWN_MS + 1)
    assert claim_words(alone.reconcile("node/n0")) == ["mark n0 unknown"]


# -- taints ------------------------------------------------------------------------------------------------------------------


def test_no_execute_taint_evicts_intolerant_replicas() -> None:
    watch = NodeBench(
        ready("n1", taints=(Taint(key="out", effect="NoExecute"),)), *work("w"),
        replica("w", 0, "serving", "n1"), replica("w", 1, "draining", "n1"),
    )  # fmt: skip
    watch.set_ages()
    assert claim_words(watch.reconcile()) == ["evict w-0"]
    watch.table.write(ready("n1", taints=(Taint(key="out", effect="NoSchedule"),)))
    assert claim_words(watch.reconcile()) == []


# -- drains ------------------------------------------------------------------------------------------------------------------


def with_min_available(name: str = "w", least: int = 0, replicas: int = 3) -> Workload:
    declared, _ = work(name, replicas)
    return replace(declared, spec=replace(declared.spec, disruption=Disruption(min_available=least)))


def draining_bench(*objects: Any, **more: Any) -> NodeBench:
    watch = NodeBench(ready("n1", draining=True, **more), ready("n2"), *objects)
    watch.set_ages()
    return watch


def test_drain_evicts_down_to_min_available() -> None:
    on = [replica("w", n, "serving", "n1" if n < 2 else "n2") for n in range(3)]
    assert claim_words(draining_bench(with_min_available(), *on).reconcile()) == ["evict w-0", "evict w-1"]
    assert claim_words(draining_bench(with_min_available(least=2), *on).reconcile()) == ["evict w-0"]
    assert claim_words(draining_bench(with_min_available(least=3), *on).reconcile()) == []


def test_unready_replica_is_drained_despite_min_available() -> None:
    assert claim_words(draining_bench(with_min_available(least=3), replica("w", 0, "starting", "n1")).reconcile()) == [
        "evict w-0"
    ]


def test_two_draining_nodes_share_disruption_budget() -> None:
    on = [replica("w", n, "serving", f"n{n + 1}") for n in range(2)]
    watch = NodeBench(ready("n1", draining=True), ready("n2", draining=True), with_min_available(least=1, replicas=2), *on)
    watch.set_ages()
    first, second = watch.reconcile("node/n1"), watch.reconcile("node/n2")
    assert (claim_words(first), claim_words(second)) == (["evict w-0"], [])
    (claim,) = (one for one in first if isinstance(one, Move))
    watch.nodes.evictions.on_verdict(claim.replica, Refused(Code.REVISION, "it has changed"))
    assert claim_words(watch.reconcile("node/n2")) == ["evict w-1"], "the refused eviction freed the budget"


def test_accepted_eviction_counts_until_it_is_seen() -> None:
    on = [replica("w", n, "serving", f"n{n + 1}") for n in range(2)]
    watch = NodeBench(ready("n1", draining=True), ready("n2", draining=True), with_min_available(least=1, replicas=2), *on)
    watch.set_ages()
    (claim,) = (result for result in watch.reconcile("node/n1") if isinstance(result, Move))
    watch.nodes.evictions.on_verdict(claim.replica, Accepted(9))
    assert claim_words(watch.reconcile("node/n2")) == []


def test_drain_evicts_limited_number_at_a_time() -> None:
    on = [replica("w", n, "serving", "n1") for n in range(NODE_EVICTIONS_MAX + 5)]
    assert len(claim_words(draining_bench(with_min_available(), *on).reconcile())) == NODE_EVICTIONS_MAX
    leaving = [replica("w", n, "draining", "n1") for n in range(NODE_EVICTIONS_MAX)]
    assert claim_words(draining_bench(with_min_available(), *leaving, replica("w", 90, "serving", "n1")).reconcile()) == []


def test_drain_progress_is_reported_as_node_condition() -> None:
    watch = draining_bench(
        with_min_available(least=3), *(replica("w", n, "serving", "n1") for n in range(3)), drain_deadline=Duration(60_000)
    )
    assert condition_reasons(watch.reconcile()) == {"Drained": ("False", "Draining")}
    assert watch.table.requeue_ms(watch.nodes, "node/n1") == 60_000
    watch.table.clock.at_ms += 60_000
    watch.set_ages()
    overdue = watch.reconcile()
    assert condition_reasons(overdue) == {"Drained": ("False", "DeadlinePassed")}
    assert "t1/w-0, t1/w-1, t1/w-2 cannot be evicted: their eviction would leave" in str(overdue)
    watch.table.write(drop=[f"replica/t1/w-{n}" for n in range(3)])
    assert condition_reasons(watch.reconcile()) == {"Drained": ("True", "Empty")}


def test_forced_drain_ignores_min_available_after_deadline() -> None:
    on = [replica("w", n, "serving", "n1") for n in range(3)]
    watch = draining_bench(with_min_available(least=3), *on, drain_deadline=Duration(60_000), drain_force=True)
    assert claim_words(watch.reconcile()) == []
    watch.table.clock.at_ms += 60_000
    watch.set_ages()
    assert claim_words(watch.reconcile()) == ["evict w-0", "evict w-1", "evict w-2"]


def test_replicas_of_deleted_workload_are_drained_without_limit() -> None:
    declared = with_min_available(least=3)
    gone = replace(declared, metadata=replace(declared.metadata, deleting=True))
    assert claim_words(draining_bench(gone, replica("w", 0, "serving", "n1")).reconcile()) == ["evict w-0"]


# -- triggers ----------------------------------------------------------------------------------------------------------------


def test_only_conspicuous_nodes_are_checked_each_heartbeat() -> None:
    watch = NodeBench(ready("n1"), ready("n2", draining=True), ready("n3", NodeHealth.JOINING), ready("n4"), *others())
    watch.set_ages(n4=SUSPECT_MS + 1)
    assert watch.nodes._keys_to_check(watch.table.times()) == ["node/n2", "node/n3", "node/n4"]


def test_replica_change_triggers_only_draining_node() -> None:
    watch = NodeBench(ready("n1"), ready("n2", draining=True))
    for node, news in (("n1", ()), ("n2", ("node/n2",))):
        was, now = replica("w", 0, "serving", node), replica("w", 0, "draining", node)
        assert watch.nodes.keys_for("replica/t1/w-0", was, now) == news
