"""Simulated store: each fault has its named effect and keeps to the store protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ClassVar, TypeVar, cast

import pytest

from remit.simulate.world.event_loop import ExecutionUnit, SimLoop
from remit.simulate.world.network import Network, NetworkConditions
from remit.simulate.world.store import ANSWER_S_MAX, CommitOrigin, StoreFaults, StorePort, StoreService, run_sync
from remit.store import chain
from remit.store.memory import MemoryBackup, MemoryStore
from remit.store.protocol import (
    Commit,
    CommitOutcomeUnknown,
    Committed,
    Compacted,
    Conflict,
    Corrupt,
    Guard,
    Head,
    Invalid,
    NoSpace,
    StoreClosed,
    StoreError,
    Unavailable,
    WatchEvent,
)

T = TypeVar("T")
EVEN = NetworkConditions(delay_s=(0.01, 0.01))


class StoreScene:
    """One store with ports to it. The witness records the applied commits."""

    made: ClassVar[list[StoreScene]] = []

    def __init__(self, conditions: NetworkConditions = EVEN, seed: str = "shop") -> None:
        self.loop = SimLoop.seeded(seed)
        self.network = Network(self.loop, seed, conditions)
        self.applied: list[tuple[int, str, str]] = []
        self.restorations: list[str] = []
        self.service = StoreService(self.loop, self.network, "scope", seed, self)
        self.units: dict[str, ExecutionUnit] = {}
        self.loop.call_at(1e6, self.loop.stop)
        self.made.append(self)

    def commit_applied(self, scope: str, commit: Commit, revision: int, sent: CommitOrigin | None) -> None:
        self.applied.append((revision, "" if sent is None else sent.process, ",".join(key for key, _ in commit.puts)))

    def store_restored(self, scope: str, store: MemoryStore, backup: MemoryBackup) -> None:
        self.restorations.append(scope)

    def port(self, name: str = "anna", *, observer: bool = False) -> StorePort:
        unit = self.units.setdefault(name, self.loop.new_unit(name))
        return StorePort(
            self.service, name, unit, lambda: CommitOrigin(name, "boot", 0, 1.0, self.loop.time()), observer=observer
        )

    def do(self, work: Coroutine[Any, Any, T], name: str = "anna") -> T:
        """Run to the end; raise what it raises."""
        results: list[T] = []
        failed: list[BaseException] = []

        async def main() -> None:
            try:
                results.append(await work)
            except Exception as error:  # noqa: BLE001 - it is told to the test
                failed.append(error)
            self.loop.stop()

        self.loop.spawn(main(), name="deed", unit=self.units[name])
        self.loop.run(self.loop.time() + 600.0)
        assert not self.loop.failures, self.loop.failures
        if failed:
            raise failed[0]
        return results[0]

    def run(self, for_s: float) -> None:
        self.loop.run(self.loop.time() + for_s)
        assert not self.loop.failures, self.loop.failures

    def keys(self) -> list[str]:
        return [row.key for row in run_sync(self.service.store.range("")).rows]

    def put(self, key: str, *guards: Guard, value: bytes = b"") -> int:
        """Commit through a port, without a fault of the service."""
        answer = self.do(self.port().commit(put(key, *guards, value=value)))
        assert isinstance(answer, Committed)
        return answer.revision


def put(key: str, *guards: Guard, value: bytes = b"") -> Commit:
    return Commit(guards=guards, puts=((key, value),))


@pytest.fixture(autouse=True)
def finished() -> Iterator[None]:
    yield
    while StoreScene.made:
        StoreScene.made.pop().loop.finish()


# Without faults


def test_store_answers_over_network() -> None:
    scene = StoreScene()
    assert scene.put("a") == 1
    assert scene.loop.time() == pytest.approx(0.02)
    assert scene.do(scene.port().commit(put("a", Guard("a", 7)))) == Conflict("a", 7, 1)
    row = scene.do(scene.port().get("a"))
    assert row is not None
    assert row.revision == 1
    assert scene.do(scene.port().revision()) == 1
    assert scene.applied == [(1, "anna", "a")]
    assert scene.service.counts == {}


def test_witness_sees_every_applied_commit_once_and_in_order() -> None:
    """Also when the network repeats and reorders messages, and answers are lost."""
    scene = StoreScene(NetworkConditions(delay_s=(0.0, 0.5), repeat=0.5, loss=0.1))
    scene.service.degrade({"lost_after": 0.2, "lost_before": 0.1, "applied_late": 0.2, "slow_s": 3.0})
    answers: list[object] = []

    async def ask(n: int) -> None:
        try:
            answers.append(await scene.port().commit(put(f"k{n}", Guard(f"k{n}", 0))))
        except CommitOutcomeUnknown as error:
            answers.append(error)

    scene.port()
    for n in range(200):
        scene.loop.spawn(ask(n), name="ask", unit=scene.units["anna"])
    scene.run(60.0)
    assert len(answers) == 200
    assert not [answer for answer in answers if isinstance(answer, Conflict)], "each key was committed once"
    assert [revision for revision, _, _ in scene.applied] == list(range(1, len(scene.applied) + 1))
    assert sorted(keys for _, _, keys in scene.applied) == scene.keys()
    answered = {answer.revision for answer in answers if isinstance(answer, Committed)}
    assert answered < {revision for revision, _, _ in scene.applied}


def test_repeated_network_request_is_applied_once() -> None:
    """A commit without a guard would be applied twice; one with a guard would conflict with itself."""
    scene = StoreScene(NetworkConditions(delay_s=(0.01, 0.01), repeat=1.0))
    scene.put("a")
    scene.run(5.0)
    assert [revision for revision, _, _ in scene.applied] == [1]


# Commits


def test_lost_after_is_applied_and_unanswered() -> None:
    scene = StoreScene()
    scene.port()
    scene.service.degrade({"lost_after": 1.0})
    with pytest.raises(CommitOutcomeUnknown):
        scene.do(scene.port().commit(put("a")))
    assert scene.loop.time() == pytest.approx(ANSWER_S_MAX)
    assert scene.keys() == ["a"]
    assert scene.applied == [(1, "anna", "a")]
    assert scene.service.counts == {"lost-after": 1}


def test_lost_before_is_unanswered_and_never_applied() -> None:
    scene = StoreScene()
    scene.port()
    scene.service.degrade({"lost_before": 1.0})
    with pytest.raises(CommitOutcomeUnknown):
        scene.do(scene.port().commit(put("a")))
    scene.run(60.0)
    assert scene.keys() == []
    assert scene.applied == []


def test_applied_late_is_unanswered_first_and_applied_seconds_later() -> None:
    scene = StoreScene()
    scene.port()
    back = scene.service.degrade({"applied_late": 1.0})
    with pytest.raises(CommitOutcomeUnknown):
        scene.do(scene.port().commit(put("a")))
    assert scene.keys() == [], "it is not applied yet"
    back()
    scene.run(10.0)
    assert scene.keys() == ["a"]
    assert scene.applied == [(1, "anna", "a")]


def test_applied_late_is_not_applied_if_guards_fail_by_then() -> None:
    scene = StoreScene()
    first = scene.put("a", value=b"first")
    back = scene.service.degrade({"applied_late": 1.0})
    with pytest.raises(CommitOutcomeUnknown):
        scene.do(scene.port().commit(put("a", Guard("a", first), value=b"late")))
    back()
    scene.put("a", Guard("a", first), value=b"meanwhile")
    scene.run(10.0)
    row = scene.do(scene.port().get("a"))
    assert row is not None
    assert row.value == b"meanwhile"
    assert [revision for revision, _, _ in scene.applied] == [1, 2]


@pytest.mark.parametrize("fault", ["away", "no_space"])
def test_applied_late_is_not_applied_if_store_cannot_write(fault: str) -> None:
    scene = StoreScene()
    scene.port()
    scene.service.degrade({"applied_late": 1.0})
    with pytest.raises(CommitOutcomeUnknown):
        scene.do(scene.port().commit(put("a")))
    scene.service.degrade({fault: True})
    scene.run(10.0)
    assert scene.keys() == []


def test_applied_late_is_not_applied_through_cut() -> None:
    scene = StoreScene()
    scene.port()
    scene.service.degrade({"applied_late": 1.0})
    scene.network.cut("anna", scene.service.name)
    with pytest.raises(CommitOutcomeUnknown):
        scene.do(scene.port().commit(put("a")))
    scene.run(10.0)
    assert scene.keys() == []


def test_slow_store_delays_everything() -> None:
    scene = StoreScene()
    scene.port()
    scene.service.degrade({"slow_s": 3.0})
    took = []
    for n in range(30):
        since_s = scene.loop.time()
        scene.put(f"{n}")
        took.append(scene.loop.time() - since_s)
    assert max(took) <= 3.02
    assert 1.0 < sum(took) / 30 < 2.0


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (lambda port: port.commit(put("a")), CommitOutcomeUnknown),
        (lambda port: port.compact(1), CommitOutcomeUnknown),
        (lambda port: port.get("b"), Unavailable),
        (lambda port: port.range(""), Unavailable),
    ],
)
def test_timeout_is_outcome_unknown_only_for_writes(
    operation: Callable[[StorePort], Coroutine[Any, Any, object]], error: type[StoreError]
) -> None:
    """Any error but `CommitOutcomeUnknown` promises that nothing was applied; a slow write is applied all the same."""
    scene = StoreScene()
    scene.put("b")
    scene.service.degrade({"slow_s": 1_000.0})
    with pytest.raises(error):
        scene.do(operation(scene.port()))
    assert scene.loop.time() == pytest.approx(0.02 + ANSWER_S_MAX)


def test_no_space_refuses_writes_while_reads_and_compaction_work() -> None:
    scene = StoreScene()
    scene.put("a")
    back = scene.service.degrade({"no_space": True})
    with pytest.raises(NoSpace):
        scene.do(scene.port().commit(put("b")))
    assert scene.do(scene.port().revision()) == 1
    scene.do(scene.port().compact(1))
    assert scene.keys() == ["a"]
    back()
    scene.put("b")


@pytest.mark.parametrize(("fault", "error"), [("away", Unavailable), ("damaged", Corrupt)])
def test_store_away_or_damaged_serves_nothing(fault: str, error: type[StoreError]) -> None:
    scene = StoreScene()
    scene.put("a")
    back = scene.service.degrade({fault: True})
    port = scene.port()
    operations: list[Callable[[], Coroutine[Any, Any, object]]] = [
        lambda: port.commit(put("b")),
        lambda: port.get("a"),
        lambda: port.range(""),
        port.revision,
        lambda: port.watch("", after=0),
        lambda: port.compact(1),
    ]
    for operation in operations:
        with pytest.raises(error):
            scene.do(operation())
    back()
    assert scene.do(port.range("")).revision == 1
    assert scene.applied == [(1, "anna", "a")]


@pytest.mark.parametrize("way", [("anna", "store/scope"), ("store/scope", "anna")])
def test_cut_between_process_and_store(way: tuple[str, str]) -> None:
    scene = StoreScene()
    scene.port()
    scene.network.cut(*way)
    with pytest.raises(CommitOutcomeUnknown):
        scene.do(scene.port().commit(put("a")))
    with pytest.raises(Unavailable):
        scene.do(scene.port().get("a"))
    assert scene.keys() == (["a"] if way[1] == "anna" else [])


def test_killed_process_cannot_reach_store() -> None:
    scene = StoreScene()
    port = scene.port("dead")
    scene.port("anna")
    scene.loop.kill(scene.units["dead"])
    with pytest.raises(StoreClosed):
        scene.do(port.commit(put("a")))
    assert scene.keys() == []


def test_faults_combine_and_are_undone_in_any_order() -> None:
    scene = StoreScene()
    one = scene.service.degrade({"slow_s": 1.0, "away": True})
    other = scene.service.degrade({"slow_s": 3.0, "lost_after": 0.5})
    assert scene.service.faults == StoreFaults(slow_s=3.0, away=True, lost_after=0.5)
    other()
    assert scene.service.faults == StoreFaults(slow_s=1.0, away=True)
    one()
    assert scene.service.faults == StoreFaults()


# Lagging members


def lagging() -> StoreScene:
    """Ten keys, one a second, then a member that is five seconds behind."""
    scene = StoreScene()
    for n in range(10):
        scene.put(f"k{n}")
        scene.run(1.0)
    scene.service.degrade({"lag_s": 5.0})
    return scene


def test_observer_reads_lagging_member_and_authority_never() -> None:
    scene = lagging()
    observer, authority = scene.port("ben", observer=True), scene.port("anna")
    page = scene.do(observer.range(""), "ben")
    assert page.revision == 6
    assert [row.key for row in page.rows] == [f"k{n}" for n in range(6)]
    assert scene.do(observer.revision(), "ben") == 6
    assert scene.do(observer.get("k9"), "ben") is None
    row = scene.do(observer.get("k5"), "ben")
    assert row is not None
    assert row.revision == 6

    assert scene.do(authority.range("")).revision == 10
    assert scene.do(authority.revision()) == 10
    assert scene.do(authority.get("k9")) is not None


def test_observer_reads_past_revision_or_gets_invalid() -> None:
    scene = lagging()
    observer = scene.port("ben", observer=True)
    assert scene.do(observer.range("", revision=3), "ben").revision == 3
    with pytest.raises(Invalid):
        scene.do(observer.range("", revision=9), "ben")
    with pytest.raises(Invalid):
        scene.do(observer.watch("", after=9), "ben")


def test_watch_at_lagging_member_is_late_but_complete() -> None:
    scene = StoreScene()
    writer = ChainWriter(scene)
    for n in range(5):
        writer.write(f"k{n}")
        scene.run(1.0)
    back = scene.service.degrade({"lag_s": 3.0})
    watcher = Watcher(scene, after=1, observer=True)
    for n in range(5, 10):
        writer.write(f"k{n}")
        scene.run(1.0)
    assert 5 <= watcher.revision < 10
    back()
    scene.run(0.5)
    assert watcher.revision == scene.do(scene.port().revision())
    assert watcher.gaps == []
    assert watcher.revisions == sorted(set(watcher.revisions))


# Watches


class ChainWriter:
    """A writer of the chain."""

    def __init__(self, scene: StoreScene) -> None:
        self.shop = scene
        scene.port()
        self.place = scene.do(chain.raise_epoch(scene.port(), "anna", "first"))

    def write(self, key: str) -> None:
        head = chain.advance(self.place.head, [(key, b"")], ())
        answer = self.shop.do(self.shop.port().commit(chain.batch(self.place, head, [(key, b"")])))
        assert isinstance(answer, Committed)
        self.place = chain.ChainPosition(head, answer.revision)


class Watcher:
    """Follows from one position and records gaps and the end. Repeated events are skipped, as a view does."""

    def __init__(self, scene: StoreScene, *, after: int, head: Head | None = None, observer: bool = False) -> None:
        self.revisions: list[int] = []
        self.gaps: list[str] = []
        self.repeated = 0
        self.ended = ""
        self.head = head
        self._after = after
        port = scene.port("ben", observer=observer)
        scene.loop.spawn(self._follow(port), name="watcher", unit=scene.units["ben"])
        scene.run(0.1)

    @property
    def revision(self) -> int:
        return self.revisions[-1] if self.revisions else self._after

    async def _follow(self, port: StorePort) -> None:
        try:
            watch = await port.watch("", after=self._after)
            async for event in watch:
                self._on_event(event)
            self.ended = "end"
        except StoreError as error:
            self.ended = type(error).__name__

    def _on_event(self, event: WatchEvent) -> None:
        if event.revision <= self.revision:
            self.repeated += 1
            return
        if self.head is not None and (gap := chain.gap(self.head, event)) is not None:
            self.gaps.append(gap)
        self.revisions.append(event.revision)
        self.head = event.head


def watched(many: int = 40, **fault: float) -> tuple[StoreScene, Watcher]:
    """A writer and a watcher, with a fault during the middle part."""
    scene = StoreScene()
    writer = ChainWriter(scene)
    watcher = Watcher(scene, after=writer.place.revision, head=writer.place.head)
    back = scene.service.degrade(dict(fault))
    for n in range(many):
        writer.write(f"k{n}")
        scene.run(0.2)
    back()
    scene.run(10.0)
    writer.write("last")
    scene.run(1.0)
    return scene, watcher


def test_watch_without_faults_misses_nothing() -> None:
    _, watcher = watched()
    assert watcher.revisions == list(range(2, 43))
    assert (watcher.gaps, watcher.repeated, watcher.ended) == ([], 0, "")


def test_lost_events_show_as_gaps() -> None:
    scene, watcher = watched(events_lost=0.3)
    lost = scene.service.counts["event-lost"]
    assert lost > 3
    assert len(watcher.revisions) == 41 - lost
    assert watcher.gaps
    assert watcher.revisions == sorted(watcher.revisions)


def test_late_events_delay_later_ones_and_none_is_missing() -> None:
    scene, watcher = watched(events_late=0.5)
    assert scene.service.counts["event-late"] > 5
    assert watcher.revisions == list(range(2, 43))
    assert watcher.gaps == []


def test_repeated_events_arrive_again_later() -> None:
    scene, watcher = watched(events_repeated=0.5)
    assert watcher.repeated == scene.service.counts["event-repeated"] > 5
    assert watcher.revisions == list(range(2, 43))
    assert watcher.gaps == []


def test_cut_loses_events_and_gap_shows_after_heal() -> None:
    scene = StoreScene()
    writer = ChainWriter(scene)
    watcher = Watcher(scene, after=writer.place.revision, head=writer.place.head)
    scene.network.cut(scene.service.name, "ben")
    writer.write("a")
    scene.run(1.0)
    scene.network.heal(scene.service.name, "ben")
    assert watcher.revisions == []
    writer.write("b")
    scene.run(1.0)
    assert watcher.revisions == [3]
    assert len(watcher.gaps) == 1


def test_broken_watch_ends_with_error_and_watching_fails_for_a_while() -> None:
    scene = StoreScene()
    scene.put("a")
    watcher = Watcher(scene, after=1)
    scene.service.break_watches(for_s=5.0)
    scene.run(1.0)
    assert watcher.ended == "Unavailable"
    assert Watcher(scene, after=1).ended == "Unavailable"
    scene.run(5.0)
    again = Watcher(scene, after=1)
    scene.put("b")
    scene.run(1.0)
    assert (again.revisions, again.ended) == ([2], "")
    assert watcher.revisions == []


def test_watch_of_compacted_revision_must_relist() -> None:
    scene = StoreScene()
    for n in range(5):
        scene.put(f"k{n}")
    scene.do(scene.port().compact(4))
    assert Watcher(scene, after=2).ended == "Compacted"
    with pytest.raises(Compacted):
        scene.do(scene.port().range("", revision=2))
    watcher = Watcher(scene, after=4)
    assert watcher.revisions == [5]


def test_closed_watch_ends_for_waiting_reader() -> None:
    scene = StoreScene()
    scene.port()

    async def scenario() -> list[WatchEvent]:
        watch = await scene.port().watch("", after=0)

        async def all_of_it() -> list[WatchEvent]:
            return [event async for event in watch]

        waiting = asyncio.ensure_future(all_of_it())
        await asyncio.sleep(1.0)
        await watch.close()
        await watch.close()
        return await asyncio.wait_for(waiting, 5.0)

    assert scene.do(scenario()) == []


# Restored


def test_restore_ends_old_watches_and_refuses_late_commit() -> None:
    scene = StoreScene()
    writer = ChainWriter(scene)
    writer.write("a")
    backup = run_sync(cast(MemoryStore, scene.service.store).backup())
    writer.write("b")
    watcher = Watcher(scene, after=writer.place.revision, head=writer.place.head)
    back = scene.service.degrade({"applied_late": 1.0})
    lost = chain.advance(writer.place.head, [("late", b"")], ())
    with pytest.raises(CommitOutcomeUnknown):
        scene.do(scene.port().commit(chain.batch(writer.place, lost, [("late", b"")])))
    back()
    scene.service.restore(backup, "second")
    scene.run(10.0)
    assert scene.restorations == ["scope"]
    assert scene.keys() == ["a", "head"]
    assert watcher.ended == "StoreClosed"
    place = scene.do(chain.read_position(scene.port()))
    assert place is not None
    assert place.head.incarnation == "second"
    assert place.revision > writer.place.revision
    assert scene.service.counts["applied-late"] == 1
