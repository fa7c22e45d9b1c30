"""Deferred reconciles: changes without urgency are coalesced and still handled in time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from remit.correction.controllers.desired_replicas import DesiredReplicas
from remit.correction.controllers.repair import LIMIT_MARGIN_MS, RepairController
from remit.correction.controllers.workload_status import condition_debounce_ms
from remit.correction.controllers.workloads import WorkloadController
from remit.correction.framework.actions import KeyTrigger, RequeueCoalesced
from remit.law.lifecycle import PHASE_TIMEOUTS
from remit.law.timing import Timing
from remit.model.claims import Apply
from remit.model.records import Phase, Replica
from remit.model.resources import Duration
from tests.properties.authority_world import OPERATOR, node
from tests.unit.correction.controller_fixture import TEMPO, ControllerBench, claim_words, condition_reasons, replica, work
from tests.unit.correction.framework.loop_bench import CADENCE, LoopBench, loop_test

KEY = "workload/t1/w"
ONE = "replica/t1/w-0"
DEBOUNCE_MS = condition_debounce_ms(TEMPO)
SOON = RequeueCoalesced(KEY, DEBOUNCE_MS)


class WorkloadBench:
    """The workload controller on a cache, with the keys that each change triggers."""

    def __init__(self, *objects: Any, tempo: Timing = TEMPO) -> None:
        self.table = ControllerBench()
        self.workloads = WorkloadController(DesiredReplicas(self.table.board), self.table.clock, tempo)
        self.triggers: list[KeyTrigger] = []
        self.table.board.subscribe(self)
        self.write(*objects)

    def on_change(self, key: str, old: Any, new: Any) -> None:
        self.triggers += self.workloads.keys_for(key, old, new)

    def on_commit(self) -> None:
        pass

    def write(self, *objects: Any, drop: Iterable[str] = ()) -> list[KeyTrigger]:
        """Write one commit, and return the keys it triggers."""
        self.triggers = []
        self.table.write(*objects, drop=drop)
        return self.triggers

    def conditions(self) -> dict[str, tuple[str, str]]:
        return condition_reasons(self.table.reconcile(self.workloads, KEY))


def job_rows(*phases: str, replicas: int = 1, **more: Any) -> list[Any]:
    """In the order of an authority: replicas before their workload."""
    declared, first = work("w", replicas, type_="job", **more)
    return [first, *(replica("w", n, phase) for n, phase in enumerate(phases)), declared]


def on(phase: str, **status: Any) -> Replica:
    return replica("w", 0, phase, "" if phase in ("pending", "released") else "n1", **status)


# -- workloads -------------------------------------------------------------------------------------------------------------


def test_job_with_all_replicas_is_reconciled_after_debounce() -> None:
    bench = WorkloadBench(*job_rows("pending", "pending", replicas=2))
    assert set(bench.triggers) == {SOON}
    assert claim_words(bench.table.reconcile(bench.workloads, KEY)) == []


def test_incomplete_scheduled_or_deleted_job_is_reconciled_at_once() -> None:
    assert KEY in WorkloadBench(*job_rows()).triggers
    assert KEY in WorkloadBench(*job_rows("pending", replicas=2)).triggers
    assert KEY in WorkloadBench(*job_rows("pending", schedule="0 3 * * *")).triggers
    declared, first = work("w", 1, type_="job")
    going = replace(declared, metadata=replace(declared.metadata, deleting=True))
    assert KEY in WorkloadBench(first, on("pending"), going).triggers


def test_service_and_daemon_are_reconciled_at_once() -> None:
    for type_ in ("service", "daemon"):
        declared, first = work("w", 1, type_=type_)
        bench = WorkloadBench(first, on("pending"), declared)
        assert KEY in bench.triggers, type_
        assert bench.write(on("bound")) == [KEY], type_


def test_debounce_is_derived_from_heartbeat_timing() -> None:
    tempo = Timing(100)
    assert set(WorkloadBench(*job_rows("pending"), tempo=tempo).triggers) == {
        RequeueCoalesced(KEY, condition_debounce_ms(tempo))
    }


def test_job_with_short_deadline_is_reconciled_at_deadline() -> None:
    bench = WorkloadBench(*job_rows("pending", deadline=Duration(1_000)))
    assert RequeueCoalesced(KEY, 1_000) in bench.triggers
    bench.table.clock.at_ms += 1_000
    assert bench.conditions()["Failed"] == ("True", "DeadlineExceeded")


def test_job_replica_progress_is_deferred_and_end_is_immediate() -> None:
    bench = WorkloadBench(*job_rows("pending"))
    for phase in ("reserved", "bound", "starting", "running"):
        assert bench.write(on(phase)) == [SOON], phase
    for phase in ("finished", "failed", "unknown", "draining", "released"):
        assert bench.write(on(phase)) == [KEY], phase
        assert bench.write(on("running")) == [KEY], f"back from {phase}"
    assert bench.write(drop=[ONE]) == [KEY]
    assert bench.write(on("pending")) == [KEY], "a new replica of an existing workload"


def test_changes_of_deleted_job_are_reconciled_at_once() -> None:
    bench = WorkloadBench(*job_rows("pending"))
    declared = bench.table.board.get(KEY)
    assert bench.write(replace(declared, metadata=replace(declared.metadata, deleting=True))) == [KEY]
    assert bench.write(on("bound")) == [KEY]


def test_replica_without_workload_is_reconciled_at_once() -> None:
    bench = WorkloadBench(on("pending"))
    assert bench.triggers == [SOON], "its workload is in the same commit"
    assert bench.write(on("bound")) == [KEY]


def test_waiting_job_reports_queued_and_admitted_after_debounce() -> None:
    bench = WorkloadBench(*job_rows("pending"))
    bench.table.clock.at_ms += DEBOUNCE_MS
    assert bench.conditions() == {"Admitted": ("True", "Accepted"), "Scheduled": ("False", "Queued")}


def test_job_placed_within_debounce_reports_both_at_once() -> None:
    bench = WorkloadBench(*job_rows("pending"))
    bench.write(on("running"))
    bench.table.clock.at_ms += DEBOUNCE_MS - 1
    assert bench.conditions() == {}
    bench.table.clock.at_ms += 1
    assert bench.conditions() == {"Admitted": ("True", "Accepted"), "Scheduled": ("True", "AllBound")}


def test_condition_needs_debounce_after_earlier_reconcile() -> None:
    bench = WorkloadBench(*job_rows("pending", replicas=1))
    declared = bench.table.board.get(KEY)
    bench.write(replace(declared, metadata=replace(declared.metadata, annotations={"a": "b"})))
    bench.workloads.conditions._pending_updates.clear()
    assert bench.conditions() == {}, "the debounce starts now"
    bench.write(on("running"))
    bench.table.clock.at_ms += DEBOUNCE_MS
    assert bench.conditions() == {"Admitted": ("True", "Accepted")}
    bench.table.clock.at_ms += DEBOUNCE_MS
    assert bench.conditions()["Scheduled"] == ("True", "AllBound")


def test_job_finished_within_debounce_reports_only_complete() -> None:
    bench = WorkloadBench(*job_rows("pending"))
    bench.write(on("released", result="ok"))
    bench.table.clock.at_ms += DEBOUNCE_MS
    assert bench.conditions() == {"Complete": ("True", "Done")}


def test_deleted_job_leaves_no_pending_conditions() -> None:
    bench = WorkloadBench(*job_rows("pending"))
    bench.write(drop=[ONE, KEY])
    assert not bench.workloads.conditions._pending_updates


# -- repair ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["reserved", "bound", "starting"])
def test_phase_timeout_is_reconciled_when_it_ends(phase: str) -> None:
    table = ControllerBench()
    repair = RepairController(DesiredReplicas(table.board), table.clock)
    limit_ms = PHASE_TIMEOUTS[Phase(phase)].limit_ms + LIMIT_MARGIN_MS
    before = replica("w", 0, "pending")
    table.write(replica("w", 0, phase, "n1"))
    assert list(repair.keys_for(ONE, before, table.board.get(ONE))) == [RequeueCoalesced(ONE, limit_ms)]
    table.clock.at_ms += limit_ms
    assert len(table.reconcile(repair, ONE)) == 1


def test_failed_replica_is_reconciled_at_once() -> None:
    table = ControllerBench()
    repair = RepairController(DesiredReplicas(table.board), table.clock)
    assert ONE in list(repair.keys_for(ONE, on("running"), on("failed")))


# -- the controller loop ---------------------------------------------------------------------------------------------------


@loop_test
async def test_deferred_triggers_of_key_share_one_reconcile(bench: LoopBench) -> None:
    controller, _, _, _ = bench.loop()
    await bench.nodes("n1")
    await bench.sleep(1_000)
    controller.reconciled.clear()
    controller.keys_for = lambda key, old, new: (RequeueCoalesced(key, 3_000),) if key.startswith("node/") else ()  # type: ignore[method-assign]
    began_ms = bench.world.clock.now_ms()
    for number in range(4):
        await bench.ask(OPERATOR, Apply(node("n1", labels={"turn": str(number)})))
        await bench.sleep(200)
    await bench.sleep(4_000)
    assert [key for key, _ in controller.reconciled] == ["node/n1"]
    assert controller.reconciled[0][1] - began_ms in range(2_900, 3_200)


@loop_test
async def test_loop_is_woken_only_for_earlier_due_time(bench: LoopBench) -> None:
    controller, loop, _, _ = bench.loop()
    await bench.nodes("n1")
    await bench.sleep(1_000)
    controller.reconciled.clear()

    async def wakes(key: str, in_ms: int) -> bool:
        loop._wake.clear()
        loop.enqueue([RequeueCoalesced(key, in_ms)])
        woken = loop._wake.is_set()
        await bench.sleep(CADENCE.coalesce_ms + 1)
        return woken

    assert await wakes("node/a", 5_000), "no earlier wake-up is scheduled"
    assert not await wakes("node/b", 8_000)
    assert not await wakes("node/a", 8_000), "already due earlier"
    assert await wakes("node/c", 2_000)
    began_ms = bench.world.clock.now_ms()
    await bench.sleep(9_000)
    assert [key for key, _ in controller.reconciled if key != "node/n1"] == ["node/c", "node/a", "node/b"]
    assert all(at_ms - began_ms <= 8_100 + CADENCE.requeue_grid_ms for _, at_ms in controller.reconciled)


@loop_test
async def test_deferred_keys_due_together_are_reconciled_together(bench: LoopBench) -> None:
    controller, loop, _, _ = bench.loop()
    await bench.nodes("n1")
    await bench.sleep(1_000)
    controller.reconciled.clear()
    for number in range(5):
        loop.enqueue([RequeueCoalesced(f"node/{number}", 5_000)])
        await bench.sleep(CADENCE.requeue_grid_ms // 5)
    await bench.sleep(6_000)
    times = sorted({at_ms for key, at_ms in controller.reconciled if key != "node/n1"})
    assert len(controller.reconciled) >= 5 and times[-1] - times[0] <= 1.5 * CADENCE.requeue_grid_ms
    assert len(times) <= 3, times


@loop_test
async def test_urgent_trigger_replaces_deferred_one(bench: LoopBench) -> None:
    controller, loop, _, _ = bench.loop()
    await bench.nodes("n1")
    await bench.sleep(1_000)
    controller.reconciled.clear()
    loop.enqueue([RequeueCoalesced("node/a", 5_000)])
    loop.enqueue(["node/a"])
    await bench.sleep(500)
    assert [key for key, _ in controller.reconciled] == ["node/a"]
