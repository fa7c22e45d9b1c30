"""Does each silence decide only what its uncertainty allows, and a drain only what can be spared? On hand-made boards."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from remit.correction.controllers.disruption import NODE_EVICTIONS_MAX, PendingEvictions
from remit.correction.controllers.node_lifecycle import (
    LOST_AFTER_UNKNOWN_TIMES,
    UNKNOWN_NODES_BURST,
    UNKNOWN_NODES_MILLI_PER_S,
    NodeController,
)
from remit.law.timing import lost_after_ms
from remit.model.claims import Accepted, AnyClaim, Code, Move, RecordEvent, Refused
from remit.model.kinds import Disruption, Node, NodeHealth, Taint, Workload
from remit.model.resources import Duration
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeatAge
from remit.observation.health import HeartbeatAges
from tests.unit.correction.controller_fixture import TEMPO, Table, ready, replica, said, short, work

SUSPECT_MS, UNKNOWN_MS = TEMPO.suspect_ms, TEMPO.unknown_ms
FENCE = Duration(60_000)


class Watch:
    """The controller, and what the authority has heard."""

    def __init__(self, *things: Any) -> None:
        self.table = Table(*things)
        self.nodes = NodeController(self.table.board, PendingEvictions(self.table.board))
        self.silent: dict[str, int] = {}
        self.settled: dict[str, str] = {}
        self.incarnation = "one"

    def hear(self, **silent: int) -> None:
        """So long nothing was heard of these; all others have just been."""
        nodes = {key.removeprefix("node/"): NodeHeartbeatAge(0, "one") for key, _ in self.table.board.of_kind("node/")}
        nodes |= {name: NodeHeartbeatAge(ms, self.settled.get(name, "one")) for name, ms in silent.items()}
        heard = HeartbeatReport(self.incarnation, 3_600_000, nodes)
        self.nodes.set_heartbeat_ages(HeartbeatAges(heard, self.table.clock.now_ms()), self.table.times())

    def look(self, at: str = "node/n1") -> list[AnyClaim]:
        return self.table.look(self.nodes, at)

    def after(self, silent_ms: int, health: NodeHealth) -> list[str]:
        self.table.write(ready("n1", health))
        self.hear(n1=silent_ms)
        return short(self.look())


def others(count: int = 5) -> list[Node]:
    return [ready(f"other{n}") for n in range(count)]


# -- the ladder --------------------------------------------------------------------------------------------------------------


def test_the_evidence_ladder_step_by_step() -> None:
    """L5: no step before its time, and each a step further than the last."""
    watch = Watch(ready("n1"), *others())
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
        assert watch.after(silent_ms, health) == then, (health, silent_ms)


def test_a_node_that_is_heard_again_comes_back_by_the_same_door_as_a_new_one() -> None:
    watch = Watch(ready("n1"), *others())
    assert watch.after(0, NodeHealth.SUSPECT) == ["mark n1 ready"]
    assert watch.after(0, NodeHealth.UNKNOWN) == ["mark n1 joining"]
    assert watch.after(0, NodeHealth.LOST) == ["mark n1 joining"]
    assert watch.after(0, NodeHealth.JOINING) == ["mark n1 ready"]


def test_a_node_takes_work_only_once_it_has_come_to_terms_with_this_incarnation() -> None:
    """F10 F34: something may run there that this one knows nothing of."""
    watch = Watch(ready("n1"), *others())
    watch.settled = {"n1": "an earlier one"}
    assert watch.after(0, NodeHealth.JOINING) == []
    watch.settled = {"n1": "one"}
    assert watch.after(0, NodeHealth.JOINING) == ["mark n1 ready"]


def test_a_hearing_that_is_old_or_of_another_incarnation_is_no_evidence() -> None:
    watch = Watch(ready("n1"), *others())
    watch.hear(n1=SUSPECT_MS + 1)
    watch.table.clock.at_ms += 3 * TEMPO.heartbeat_ms + 1
    assert watch.look() == []
    watch.incarnation = "another"
    watch.hear(n1=SUSPECT_MS + 1)
    assert watch.look() == []


def test_a_term_begins_without_evidence() -> None:
    watch = Watch(ready("n1"), *others())
    watch.hear(n1=SUSPECT_MS + 1)
    watch.nodes.on_lease_acquired(watch.table.times())
    assert watch.look() == []


def test_nodes_of_a_zone_become_unknown_no_faster_than_its_rate() -> None:
    """S17: a burst, and then one in ten seconds; another zone has a rate of its own."""
    many = [ready(f"n{n}", NodeHealth.SUSPECT) for n in range(UNKNOWN_NODES_BURST + 2)]
    watch = Watch(*many, ready("b", NodeHealth.SUSPECT, zone="b"), *others(40))
    watch.hear(**{f"n{n}": UNKNOWN_MS + 1 for n in range(len(many))}, b=UNKNOWN_MS + 1)
    marked = [name for name in (*(f"n{n}" for n in range(len(many))), "b") if short(watch.look(f"node/{name}"))]
    assert marked == [*(f"n{n}" for n in range(UNKNOWN_NODES_BURST)), "b"]
    wait_ms = 1_000_000 // UNKNOWN_NODES_MILLI_PER_S
    assert watch.table.again_in(watch.nodes, f"node/n{UNKNOWN_NODES_BURST}") == wait_ms
    watch.table.clock.at_ms += wait_ms
    watch.hear(**{f"n{n}": UNKNOWN_MS + 1 for n in range(len(many))})
    assert short(watch.look(f"node/n{UNKNOWN_NODES_BURST}")) == [f"mark n{UNKNOWN_NODES_BURST} unknown"]


# -- what is there -----------------------------------------------------------------------------------------------------------


def on_silent(phase: str, silent_ms: int, **more: Any) -> list[str]:
    made, first = work("w", **more)
    watch = Watch(ready("n1", NodeHealth.UNKNOWN), *others(), made, first, replica("w", 0, phase, "n1", before="serving"))
    watch.hear(n1=silent_ms)
    return short(watch.look())


def test_what_is_on_an_unknown_node_is_doubted() -> None:
    for phase in ("bound", "starting", "running", "ready", "serving", "draining", "stopping"):
        assert on_silent(phase, UNKNOWN_MS + 1) == ["doubt w-0"], phase


def test_what_must_never_run_twice_is_given_up_only_past_its_fence() -> None:
    fence_ms = lost_after_ms(FENCE, TEMPO)
    assert on_silent("unknown", fence_ms - 1, replace="fenced", fence=FENCE) == []
    assert on_silent("unknown", fence_ms, replace="fenced", fence=FENCE) == ["lose w-0"]


def test_what_would_rather_run_twice_is_given_up_soon() -> None:
    assert on_silent("unknown", TEMPO.eager_ms - 1, replace="eager", fence=FENCE) == []
    assert on_silent("unknown", TEMPO.eager_ms, replace="eager", fence=FENCE) == ["lose w-0"]


def test_the_next_fence_is_waited_for_by_time_alone() -> None:
    made, first = work("w", replace="fenced", fence=FENCE)
    watch = Watch(ready("n1", NodeHealth.UNKNOWN), *others(), made, first, replica("w", 0, "unknown", "n1", before="running"))
    watch.hear(n1=UNKNOWN_MS + 1)
    assert watch.table.again_in(watch.nodes, "node/n1") == lost_after_ms(FENCE, TEMPO) - UNKNOWN_MS - 1


def test_a_node_with_work_on_it_is_not_lost() -> None:
    made, first = work("w", replace="fenced", fence=FENCE)
    watch = Watch(ready("n1", NodeHealth.UNKNOWN), *others(), made, first, replica("w", 0, "unknown", "n1", before="running"))
    watch.hear(n1=LOST_AFTER_UNKNOWN_TIMES * UNKNOWN_MS + 1)
    assert "mark n1 lost" not in short(watch.look())


# -- most of a region --------------------------------------------------------------------------------------------------------


def silenced(count: int, of: int, health: NodeHealth = NodeHealth.SUSPECT) -> Watch:
    watch = Watch(*(ready(f"n{n}", health if n < count else NodeHealth.READY) for n in range(of)))
    watch.hear(**{f"n{n}": UNKNOWN_MS + 1 for n in range(count)})
    return watch


def test_when_most_of_a_region_is_silent_nothing_is_given_up() -> None:
    """F35 S17: from 55 in a hundred."""
    assert short(silenced(5, 10).look("node/n0")) == ["mark n0 unknown"]
    assert short(silenced(6, 10).look("node/n0")) == []


def test_in_a_mass_silence_nothing_is_evicted__lost_or_pushed_out_either() -> None:
    made, first = work("w", replace="eager")
    watch = silenced(6, 10, NodeHealth.UNKNOWN)
    watch.table.write(made, first, replica("w", 0, "unknown", "n0", before="serving"), replica("w", 1, "serving", "n9"))
    watch.table.write(ready("n9", draining=True, taints=(Taint(key="out", effect="NoExecute"),)))
    watch.hear(**{f"n{n}": 100 * UNKNOWN_MS for n in range(6)})
    assert short(watch.look("node/n0")) == []
    assert short(watch.look("node/n9")) == []


def test_a_mass_silence_is_told__calls_an_operator_after_its_deadline__and_its_end_is_told() -> None:
    watch = silenced(6, 10)

    def told() -> list[tuple[str, str]]:
        return [(one.event.type, one.event.reason) for one in watch.look("region/r1") if isinstance(one, RecordEvent)]

    assert told() == [("Warning", "MassSilence")]
    assert told() == []
    watch.table.clock.at_ms += TEMPO.call_operator_ms
    watch.hear(**{f"n{n}": UNKNOWN_MS + 1 for n in range(6)})
    assert told() == [("Warning", "CallOperator")]
    assert told() == []
    watch.hear()
    assert told() == [("Normal", "MassSilenceOver")]
    assert told() == []


def test_two_nodes_of_a_region_are_no_mass__unless_nobody_else_is_heard_either() -> None:
    """F35 S17: where nothing is heard at all there is nowhere to go, and what runs there may be well."""
    watch = Watch(ready("n0", NodeHealth.SUSPECT), ready("n1"))
    watch.hear(n0=UNKNOWN_MS + 1, n1=UNKNOWN_MS + 1)
    assert short(watch.look("node/n0")) == []
    watch.hear(n0=UNKNOWN_MS + 1)
    assert short(watch.look("node/n0")) == ["mark n0 unknown"]
    alone = Watch(ready("n0", NodeHealth.SUSPECT))
    alone.hear(n0=UNKNOWN_MS + 1)
    assert short(alone.look("node/n0")) == ["mark n0 unknown"]


# -- pushing out -------------------------------------------------------------------------------------------------------------


def test_a_taint_that_pushes_out_takes_what_does_not_tolerate_it() -> None:
    watch = Watch(
        ready("n1", taints=(Taint(key="out", effect="NoExecute"),)), *work("w"),
        replica("w", 0, "serving", "n1"), replica("w", 1, "draining", "n1"),
    )  # fmt: skip
    watch.hear()
    assert short(watch.look()) == ["evict w-0"]
    watch.table.write(ready("n1", taints=(Taint(key="out", effect="NoSchedule"),)))
    assert short(watch.look()) == []


# -- draining ----------------------------------------------------------------------------------------------------------------


def spared(name: str = "w", least: int = 0, replicas: int = 3) -> Workload:
    made, _ = work(name, replicas)
    return replace(made, spec=replace(made.spec, disruption=Disruption(min_available=least)))


def draining(*things: Any, **more: Any) -> Watch:
    watch = Watch(ready("n1", draining=True, **more), ready("n2"), *things)
    watch.hear()
    return watch


def test_a_drain_takes_what_can_be_spared__and_no_more() -> None:
    on = [replica("w", n, "serving", "n1" if n < 2 else "n2") for n in range(3)]
    assert short(draining(spared(), *on).look()) == ["evict w-0", "evict w-1"]
    assert short(draining(spared(least=2), *on).look()) == ["evict w-0"]
    assert short(draining(spared(least=3), *on).look()) == []


def test_what_is_not_ready_is_nothing_to_wait_for() -> None:
    assert short(draining(spared(least=3), replica("w", 0, "starting", "n1")).look()) == ["evict w-0"]


def test_two_nodes_that_drain_at_once_do_not_each_spare_the_last_one() -> None:
    on = [replica("w", n, "serving", f"n{n + 1}") for n in range(2)]
    watch = Watch(ready("n1", draining=True), ready("n2", draining=True), spared(least=1, replicas=2), *on)
    watch.hear()
    first, second = watch.look("node/n1"), watch.look("node/n2")
    assert (short(first), short(second)) == (["evict w-0"], [])
    (claim,) = (one for one in first if isinstance(one, Move))
    watch.nodes.evictions.on_verdict(claim.replica, Refused(Code.REVISION, "it has changed"))
    assert short(watch.look("node/n2")) == ["evict w-1"], "the first was refused, so that one stays"


def test_what_was_accepted_counts_as_gone_until_it_is_seen() -> None:
    on = [replica("w", n, "serving", f"n{n + 1}") for n in range(2)]
    watch = Watch(ready("n1", draining=True), ready("n2", draining=True), spared(least=1, replicas=2), *on)
    watch.hear()
    (claim,) = (one for one in watch.look("node/n1") if isinstance(one, Move))
    watch.nodes.evictions.on_verdict(claim.replica, Accepted(9))
    assert short(watch.look("node/n2")) == []


def test_a_drain_is_not_an_outage__so_many_leave_at_a_time() -> None:
    on = [replica("w", n, "serving", "n1") for n in range(NODE_EVICTIONS_MAX + 5)]
    assert len(short(draining(spared(), *on).look())) == NODE_EVICTIONS_MAX
    leaving = [replica("w", n, "draining", "n1") for n in range(NODE_EVICTIONS_MAX)]
    assert short(draining(spared(), *leaving, replica("w", 90, "serving", "n1")).look()) == []


def test_how_a_drain_comes_along_is_said_of_the_node() -> None:
    watch = draining(spared(least=3), *(replica("w", n, "serving", "n1") for n in range(3)), drain_deadline=Duration(60_000))
    assert said(watch.look()) == {"Drained": ("False", "Draining")}
    assert watch.table.again_in(watch.nodes, "node/n1") == 60_000
    watch.table.clock.at_ms += 60_000
    watch.hear()
    overdue = watch.look()
    assert said(overdue) == {"Drained": ("False", "DeadlinePassed")}
    assert "t1/w-0, t1/w-1, t1/w-2 cannot be evicted" in str(overdue)
    watch.table.write(drop=[f"replica/t1/w-{n}" for n in range(3)])
    assert said(watch.look()) == {"Drained": ("True", "Empty")}


def test_past_its_deadline_a_drain_that_may_goes_on_in_spite_of_limits() -> None:
    on = [replica("w", n, "serving", "n1") for n in range(3)]
    watch = draining(spared(least=3), *on, drain_deadline=Duration(60_000), drain_force=True)
    assert short(watch.look()) == []
    watch.table.clock.at_ms += 60_000
    watch.hear()
    assert short(watch.look()) == ["evict w-0", "evict w-1", "evict w-2"]


def test_what_is_going_for_good_can_always_be_spared() -> None:
    made = spared(least=3)
    gone = replace(made, metadata=replace(made.metadata, deleting=True))
    assert short(draining(gone, replica("w", 0, "serving", "n1")).look()) == ["evict w-0"]


# -- hearing -----------------------------------------------------------------------------------------------------------------


def test_only_nodes_of_which_there_may_be_something_to_say_are_looked_at_each_beat() -> None:
    watch = Watch(ready("n1"), ready("n2", draining=True), ready("n3", NodeHealth.JOINING), ready("n4"), *others())
    watch.hear(n4=SUSPECT_MS + 1)
    assert watch.nodes._keys_to_check(watch.table.times()) == ["node/n2", "node/n3", "node/n4"]


def test_a_change_on_a_node_is_news_only_if_the_node_is_watched() -> None:
    watch = Watch(ready("n1"), ready("n2", draining=True))
    for node, news in (("n1", ()), ("n2", ("node/n2",))):
        was, now = replica("w", 0, "serving", node), replica("w", 0, "draining", node)
        assert watch.nodes.keys_for("replica/t1/w-0", was, now) == news
