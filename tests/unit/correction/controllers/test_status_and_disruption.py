"""Is nobody woken for what asks for nothing yet, and is it looked at in time all the same?"""

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
from tests.unit.correction.controller_fixture import TEMPO, Table, replica, said, short, work
from tests.unit.correction.framework.test_loop import CADENCE, Room, room

KEY = "workload/t1/w"
ONE = "replica/t1/w-0"
PATIENCE_MS = condition_debounce_ms(TEMPO)
SOON = RequeueCoalesced(KEY, PATIENCE_MS)


class Listening:
    """The controller of workloads on a board, and what each change is news to."""

    def __init__(self, *things: Any, tempo: Timing = TEMPO) -> None:
        self.table = Table()
        self.workloads = WorkloadController(DesiredReplicas(self.table.board), self.table.clock, tempo)
        self.heard: list[KeyTrigger] = []
        self.table.board.subscribe(self)
        self.write(*things)

    def on_change(self, key: str, old: Any, new: Any) -> None:
        self.heard += self.workloads.keys_for(key, old, new)

    def on_commit(self) -> None:
        pass

    def write(self, *things: Any, drop: Iterable[str] = ()) -> list[KeyTrigger]:
        """One commit: what it is news to."""
        self.heard = []
        self.table.write(*things, drop=drop)
        return self.heard

    def told(self) -> dict[str, tuple[str, str]]:
        return said(self.table.look(self.workloads, KEY))


def a_job(*phases: str, replicas: int = 1, **more: Any) -> list[Any]:
    """As an authority writes it: replicas come before their workload."""
    declared, first = work("w", replicas, type_="job", **more)
    return [first, *(replica("w", n, phase) for n, phase in enumerate(phases)), declared]


def on(phase: str, **status: Any) -> Replica:
    return replica("w", 0, phase, "" if phase in ("pending", "released") else "n1", **status)


# -- workloads -------------------------------------------------------------------------------------------------------------


def test_a_job_that_came_with_all_its_replicas_is_looked_at_after_the_patience() -> None:
    listening = Listening(*a_job("pending", "pending", replicas=2))
    assert set(listening.heard) == {SOON}
    assert short(listening.table.look(listening.workloads, KEY)) == []


def test_one_that_lacks_some_or_has_a_schedule_or_goes_is_looked_at_right_away() -> None:
    assert KEY in Listening(*a_job()).heard
    assert KEY in Listening(*a_job("pending", replicas=2)).heard
    assert KEY in Listening(*a_job("pending", schedule="0 3 * * *")).heard
    declared, first = work("w", 1, type_="job")
    going = replace(declared, metadata=replace(declared.metadata, deleting=True))
    assert KEY in Listening(first, on("pending"), going).heard


def test_a_service_or_a_daemon_is_looked_at_right_away__however_full_it_is() -> None:
    for type_ in ("service", "daemon"):
        declared, first = work("w", 1, type_=type_)
        listening = Listening(first, on("pending"), declared)
        assert KEY in listening.heard, type_
        assert listening.write(on("bound")) == [KEY], type_


def test_the_patience_is_that_of_the_tempo() -> None:
    tempo = Timing(100)
    assert set(Listening(*a_job("pending"), tempo=tempo).heard) == {RequeueCoalesced(KEY, condition_debounce_ms(tempo))}


def test_a_job_with_a_short_deadline_is_looked_at_when_that_has_passed() -> None:
    listening = Listening(*a_job("pending", deadline=Duration(1_000)))
    assert RequeueCoalesced(KEY, 1_000) in listening.heard
    listening.table.clock.at_ms += 1_000
    assert listening.told()["Failed"] == ("True", "DeadlineExceeded")


def test_a_jobs_replica_on_its_way_is_looked_at_later__one_that_ends_or_fails_right_away() -> None:
    listening = Listening(*a_job("pending"))
    for phase in ("reserved", "bound", "starting", "running"):
        assert listening.write(on(phase)) == [SOON], phase
    for phase in ("finished", "failed", "unknown", "draining", "released"):
        assert listening.write(on(phase)) == [KEY], phase
        assert listening.write(on("running")) == [KEY], f"back from {phase}"
    assert listening.write(drop=[ONE]) == [KEY]
    assert listening.write(on("pending")) == [KEY], "one that is made for a workload that was there"


def test_news_of_a_job_that_goes_is_looked_at_right_away() -> None:
    listening = Listening(*a_job("pending"))
    declared = listening.table.board.get(KEY)
    assert listening.write(replace(declared, metadata=replace(declared.metadata, deleting=True))) == [KEY]
    assert listening.write(on("bound")) == [KEY]


def test_what_moves_without_a_workload_is_looked_at_right_away() -> None:
    listening = Listening(on("pending"))
    assert listening.heard == [SOON], "its workload comes with it"
    assert listening.write(on("bound")) == [KEY]


def test_of_a_job_that_waits_it_is_said_once_that_has_lasted__and_that_it_was_admitted() -> None:
    listening = Listening(*a_job("pending"))
    listening.table.clock.at_ms += PATIENCE_MS
    assert listening.told() == {"Admitted": ("True", "Accepted"), "Scheduled": ("False", "Queued")}


def test_of_a_job_that_is_placed_by_then_both_are_said_at_once() -> None:
    listening = Listening(*a_job("pending"))
    listening.write(on("running"))
    listening.table.clock.at_ms += PATIENCE_MS - 1
    assert listening.told() == {}
    listening.table.clock.at_ms += 1
    assert listening.told() == {"Admitted": ("True", "Accepted"), "Scheduled": ("True", "AllBound")}


def test_of_one_that_was_looked_at_what_is_so_must_have_lasted() -> None:
    listening = Listening(*a_job("pending", replicas=1))
    declared = listening.table.board.get(KEY)
    listening.write(replace(declared, metadata=replace(declared.metadata, annotations={"a": "b"})))
    listening.workloads.conditions._pending_updates.clear()
    assert listening.told() == {}, "from now on it counts"
    listening.write(on("running"))
    listening.table.clock.at_ms += PATIENCE_MS
    assert listening.told() == {"Admitted": ("True", "Accepted")}
    listening.table.clock.at_ms += PATIENCE_MS
    assert listening.told()["Scheduled"] == ("True", "AllBound")


def test_of_a_job_that_is_over_by_then_only_that_is_said() -> None:
    listening = Listening(*a_job("pending"))
    listening.write(on("released", result="ok"))
    listening.table.clock.at_ms += PATIENCE_MS
    assert listening.told() == {"Complete": ("True", "Done")}


def test_nothing_is_kept_of_a_job_that_is_gone() -> None:
    listening = Listening(*a_job("pending"))
    listening.write(drop=[ONE, KEY])
    assert not listening.workloads.conditions._pending_updates


# -- repair ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["reserved", "bound", "starting"])
def test_a_wait_that_begins_is_looked_at_when_it_is_over(phase: str) -> None:
    table = Table()
    repair = RepairController(DesiredReplicas(table.board), table.clock)
    limit_ms = PHASE_TIMEOUTS[Phase(phase)].limit_ms + LIMIT_MARGIN_MS
    before = replica("w", 0, "pending")
    table.write(replica("w", 0, phase, "n1"))
    assert list(repair.keys_for(ONE, before, table.board.get(ONE))) == [RequeueCoalesced(ONE, limit_ms)]
    table.clock.at_ms += limit_ms
    assert len(table.look(repair, ONE)) == 1


def test_what_has_failed_is_looked_at_right_away() -> None:
    table = Table()
    repair = RepairController(DesiredReplicas(table.board), table.clock)
    assert ONE in list(repair.keys_for(ONE, on("running"), on("failed")))


# -- the loop --------------------------------------------------------------------------------------------------------------


@room
async def test_one_look_does_for_all_that_is_to_be_looked_at_later(r: Room) -> None:
    marker, _, _, _ = r.loop()
    await r.nodes("n1")
    await r.sleep(1_000)
    marker.looks.clear()
    marker.keys_for = lambda key, old, new: (RequeueCoalesced(key, 3_000),) if key.startswith("node/") else ()  # type: ignore[method-assign]
    began_ms = r.world.clock.now_ms()
    for number in range(4):
        await r.ask(OPERATOR, Apply(node("n1", labels={"turn": str(number)})))
        await r.sleep(200)
    await r.sleep(4_000)
    assert [key for key, _ in marker.looks] == ["node/n1"]
    assert marker.looks[0][1] - began_ms in range(2_900, 3_200)


@room
async def test_nobody_is_woken_for_what_is_due_after_the_next_that_is(r: Room) -> None:
    marker, loop, _, _ = r.loop()
    await r.nodes("n1")
    await r.sleep(1_000)
    marker.looks.clear()

    async def wakes(key: str, in_ms: int) -> bool:
        loop._wake.clear()
        loop.enqueue([RequeueCoalesced(key, in_ms)])
        woken = loop._wake.is_set()
        await r.sleep(CADENCE.coalesce_ms + 1)
        return woken

    assert await wakes("node/a", 5_000), "nothing else would wake it in time"
    assert not await wakes("node/b", 8_000)
    assert not await wakes("node/a", 8_000), "it is due before"
    assert await wakes("node/c", 2_000)
    began_ms = r.world.clock.now_ms()
    await r.sleep(9_000)
    assert [key for key, _ in marker.looks if key != "node/n1"] == ["node/c", "node/a", "node/b"]
    assert all(at_ms - began_ms <= 8_100 + CADENCE.requeue_grid_ms for _, at_ms in marker.looks)


@room
async def test_what_is_due_at_about_the_same_time_is_looked_at_together(r: Room) -> None:
    marker, loop, _, _ = r.loop()
    await r.nodes("n1")
    await r.sleep(1_000)
    marker.looks.clear()
    for number in range(5):
        loop.enqueue([RequeueCoalesced(f"node/{number}", 5_000)])
        await r.sleep(CADENCE.requeue_grid_ms // 5)
    await r.sleep(6_000)
    times = sorted({at_ms for key, at_ms in marker.looks if key != "node/n1"})
    assert len(marker.looks) >= 5 and times[-1] - times[0] <= 1.5 * CADENCE.requeue_grid_ms
    assert len(times) <= 3, times


@room
async def test_news_hastens_what_was_to_be_looked_at_later(r: Room) -> None:
    marker, loop, _, _ = r.loop()
    await r.nodes("n1")
    await r.sleep(1_000)
    marker.looks.clear()
    loop.enqueue([RequeueCoalesced("node/a", 5_000)])
    loop.enqueue(["node/a"])
    await r.sleep(500)
    assert [key for key, _ in marker.looks] == ["node/a"]
