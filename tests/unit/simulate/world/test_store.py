"""Does each trouble of a simulated store do what its name says, and keep to the letter of the protocol meanwhile?"""

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


class Shop:
    """One store, and ports to it. The witness writes down what it hears."""

    made: ClassVar[list[Shop]] = []

    def __init__(self, weather: NetworkConditions = EVEN, seed: str = "shop") -> None:
        self.loop = SimLoop.seeded(seed)
        self.network = Network(self.loop, seed, weather)
        self.heard: list[tuple[int, str, str]] = []
        self.restorations: list[str] = []
        self.service = StoreService(self.loop, self.network, "scope", seed, self)
        self.units: dict[str, ExecutionUnit] = {}
        self.loop.call_at(1e6, self.loop.stop)
        self.made.append(self)

    def commit_applied(self, scope: str, commit: Commit, revision: int, sent: CommitOrigin | None) -> None:
        self.heard.append((revision, "" if sent is None else sent.process, ",".join(key for key, _ in commit.puts)))

    def store_restored(self, scope: str, store: MemoryStore, backup: MemoryBackup) -> None:
        self.restorations.append(scope)

    def port(self, name: str = "anna", *, observer: bool = False) -> StorePort:
        unit = self.units.setdefault(name, self.loop.new_unit(name))
        return StorePort(
            self.service, name, unit, lambda: CommitOrigin(name, "boot", 0, 1.0, self.loop.time()), observer=observer
        )

    def do(self, work: Coroutine[Any, Any, T], name: str = "anna") -> T:
        """To its end; raises what it raises."""
        said: list[T] = []
        failed: list[BaseException] = []

        async def main() -> None:
            try:
                said.append(await work)
            except Exception as error:  # noqa: BLE001 - it is told to the test
                failed.append(error)
            self.loop.stop()

        self.loop.spawn(main(), name="deed", unit=self.units[name])
        self.loop.run(self.loop.time() + 600.0)
        assert not self.loop.failures, self.loop.failures
        if failed:
            raise failed[0]
        return said[0]

    def run(self, for_s: float) -> None:
        self.loop.run(self.loop.time() + for_s)
        assert not self.loop.failures, self.loop.failures

    def keys(self) -> list[str]:
        return [row.key for row in run_sync(self.service.store.range("")).rows]

    def put(self, key: str, *guards: Guard, value: bytes = b"") -> int:
        """By the port's way, without a fault of the service."""
        answer = self.do(self.port().commit(put(key, *guards, value=value)))
        assert isinstance(answer, Committed)
        return answer.revision


def put(key: str, *guards: Guard, value: bytes = b"") -> Commit:
    return Commit(guards=guards, puts=((key, value),))


@pytest.fixture(autouse=True)
def finished() -> Iterator[None]:
    yield
    while Shop.made:
        Shop.made.pop().loop.finish()


# A calm store


def test_a_calm_store_answers_over_the_network() -> None:
    shop = Shop()
    assert shop.put("a") == 1
    assert shop.loop.time() == pytest.approx(0.02)
    assert shop.do(shop.port().commit(put("a", Guard("a", 7)))) == Conflict("a", 7, 1)
    row = shop.do(shop.port().get("a"))
    assert row is not None
    assert row.revision == 1
    assert shop.do(shop.port().revision()) == 1
    assert shop.heard == [(1, "anna", "a")]
    assert shop.service.counts == {}


def test_the_witness_hears_every_applied_commit_once_and_in_order() -> None:
    """Also when the network repeats and reorders, and answers are lost."""
    shop = Shop(NetworkConditions(delay_s=(0.0, 0.5), repeat=0.5, loss=0.1))
    shop.service.degrade({"lost_after": 0.2, "lost_before": 0.1, "applied_late": 0.2, "slow_s": 3.0})
    answers: list[object] = []

    async def ask(n: int) -> None:
        try:
            answers.append(await shop.port().commit(put(f"k{n}", Guard(f"k{n}", 0))))
        except CommitOutcomeUnknown as error:
            answers.append(error)

    shop.port()
    for n in range(200):
        shop.loop.spawn(ask(n), name="ask", unit=shop.units["anna"])
    shop.run(60.0)
    assert len(answers) == 200
    assert not [answer for answer in answers if isinstance(answer, Conflict)], "each key was asked for once"
    assert [revision for revision, _, _ in shop.heard] == list(range(1, len(shop.heard) + 1))
    assert sorted(keys for _, _, keys in shop.heard) == shop.keys()
    told = {answer.revision for answer in answers if isinstance(answer, Committed)}
    assert told < {revision for revision, _, _ in shop.heard}


def test_a_store_does_not_take_one_request_for_two__though_the_network_repeats_it() -> None:
    """A commit without a guard would be applied twice; one with a guard would be told of a conflict with itself."""
    shop = Shop(NetworkConditions(delay_s=(0.01, 0.01), repeat=1.0))
    shop.put("a")
    shop.run(5.0)
    assert [revision for revision, _, _ in shop.heard] == [1]


# Commits


def test_lost_after__applied_and_unanswered() -> None:
    shop = Shop()
    shop.port()
    shop.service.degrade({"lost_after": 1.0})
    with pytest.raises(CommitOutcomeUnknown):
        shop.do(shop.port().commit(put("a")))
    assert shop.loop.time() == pytest.approx(ANSWER_S_MAX)
    assert shop.keys() == ["a"]
    assert shop.heard == [(1, "anna", "a")]
    assert shop.service.counts == {"lost-after": 1}


def test_lost_before__unanswered_and_never_applied() -> None:
    shop = Shop()
    shop.port()
    shop.service.degrade({"lost_before": 1.0})
    with pytest.raises(CommitOutcomeUnknown):
        shop.do(shop.port().commit(put("a")))
    shop.run(60.0)
    assert shop.keys() == []
    assert shop.heard == []


def test_applied_late__unanswered_first_and_applied_some_seconds_later() -> None:
    shop = Shop()
    shop.port()
    back = shop.service.degrade({"applied_late": 1.0})
    with pytest.raises(CommitOutcomeUnknown):
        shop.do(shop.port().commit(put("a")))
    assert shop.keys() == [], "whoever looks now finds nothing yet"
    back()
    shop.run(10.0)
    assert shop.keys() == ["a"]
    assert shop.heard == [(1, "anna", "a")]


def test_applied_late__not_if_its_guards_hold_no_more() -> None:
    shop = Shop()
    first = shop.put("a", value=b"first")
    back = shop.service.degrade({"applied_late": 1.0})
    with pytest.raises(CommitOutcomeUnknown):
        shop.do(shop.port().commit(put("a", Guard("a", first), value=b"late")))
    back()
    shop.put("a", Guard("a", first), value=b"meanwhile")
    shop.run(10.0)
    row = shop.do(shop.port().get("a"))
    assert row is not None
    assert row.value == b"meanwhile"
    assert [revision for revision, _, _ in shop.heard] == [1, 2]


@pytest.mark.parametrize("trouble", ["away", "no_space"])
def test_applied_late__not_if_the_store_cannot_write_then(trouble: str) -> None:
    shop = Shop()
    shop.port()
    shop.service.degrade({"applied_late": 1.0})
    with pytest.raises(CommitOutcomeUnknown):
        shop.do(shop.port().commit(put("a")))
    shop.service.degrade({trouble: True})
    shop.run(10.0)
    assert shop.keys() == []


def test_applied_late__not_through_a_cut() -> None:
    shop = Shop()
    shop.port()
    shop.service.degrade({"applied_late": 1.0})
    shop.network.cut("anna", shop.service.name)
    with pytest.raises(CommitOutcomeUnknown):
        shop.do(shop.port().commit(put("a")))
    shop.run(10.0)
    assert shop.keys() == []


def test_slow__everything_takes_its_time() -> None:
    shop = Shop()
    shop.port()
    shop.service.degrade({"slow_s": 3.0})
    took = []
    for n in range(30):
        since_s = shop.loop.time()
        shop.put(f"{n}")
        took.append(shop.loop.time() - since_s)
    assert max(took) <= 3.02
    assert 1.0 < sum(took) / 30 < 2.0


@pytest.mark.parametrize(
    ("deed", "error"),
    [
        (lambda port: port.commit(put("a")), CommitOutcomeUnknown),
        (lambda port: port.compact(1), CommitOutcomeUnknown),
        (lambda port: port.get("b"), Unavailable),
        (lambda port: port.range(""), Unavailable),
    ],
)
def test_slower_than_anybody_waits__only_what_may_have_changed_something_is_unanswered(
    deed: Callable[[StorePort], Coroutine[Any, Any, object]], error: type[StoreError]
) -> None:
    """Unless it is `CommitOutcomeUnknown`, nothing was applied: and what was asked too slowly happens all the same."""
    shop = Shop()
    shop.put("b")
    shop.service.degrade({"slow_s": 1_000.0})
    with pytest.raises(error):
        shop.do(deed(shop.port()))
    assert shop.loop.time() == pytest.approx(0.02 + ANSWER_S_MAX)


def test_no_space__refused_and_nothing_applied__reads_and_compaction_go_on() -> None:
    shop = Shop()
    shop.put("a")
    back = shop.service.degrade({"no_space": True})
    with pytest.raises(NoSpace):
        shop.do(shop.port().commit(put("b")))
    assert shop.do(shop.port().revision()) == 1
    shop.do(shop.port().compact(1))
    assert shop.keys() == ["a"]
    back()
    shop.put("b")


@pytest.mark.parametrize(("trouble", "error"), [("away", Unavailable), ("damaged", Corrupt)])
def test_away_or_damaged__nothing_is_served(trouble: str, error: type[StoreError]) -> None:
    shop = Shop()
    shop.put("a")
    back = shop.service.degrade({trouble: True})
    port = shop.port()
    deeds: list[Callable[[], Coroutine[Any, Any, object]]] = [
        lambda: port.commit(put("b")),
        lambda: port.get("a"),
        lambda: port.range(""),
        port.revision,
        lambda: port.watch("", after=0),
        lambda: port.compact(1),
    ]
    for deed in deeds:
        with pytest.raises(error):
            shop.do(deed())
    back()
    assert shop.do(port.range("")).revision == 1
    assert shop.heard == [(1, "anna", "a")]


@pytest.mark.parametrize("way", [("anna", "store/scope"), ("store/scope", "anna")])
def test_a_cut_between_a_process_and_its_store(way: tuple[str, str]) -> None:
    shop = Shop()
    shop.port()
    shop.network.cut(*way)
    with pytest.raises(CommitOutcomeUnknown):
        shop.do(shop.port().commit(put("a")))
    with pytest.raises(Unavailable):
        shop.do(shop.port().get("a"))
    assert shop.keys() == (["a"] if way[1] == "anna" else [])


def test_a_dead_process_reaches_no_store() -> None:
    shop = Shop()
    port = shop.port("dead")
    shop.port("anna")
    shop.loop.kill(shop.units["dead"])
    with pytest.raises(StoreClosed):
        shop.do(port.commit(put("a")))
    assert shop.keys() == []


def test_troubles_add_up_and_are_taken_back_in_any_order() -> None:
    shop = Shop()
    one = shop.service.degrade({"slow_s": 1.0, "away": True})
    other = shop.service.degrade({"slow_s": 3.0, "lost_after": 0.5})
    assert shop.service.faults == StoreFaults(slow_s=3.0, away=True, lost_after=0.5)
    other()
    assert shop.service.faults == StoreFaults(slow_s=1.0, away=True)
    one()
    assert shop.service.faults == StoreFaults()


# Lagging members


def lagging() -> Shop:
    """Ten keys, one a second; then a member that is five seconds behind."""
    shop = Shop()
    for n in range(10):
        shop.put(f"k{n}")
        shop.run(1.0)
    shop.service.degrade({"lag_s": 5.0})
    return shop


def test_an_observer_reads_the_past__an_authority_never() -> None:
    shop = lagging()
    observer, authority = shop.port("ben", observer=True), shop.port("anna")
    page = shop.do(observer.range(""), "ben")
    assert page.revision == 6
    assert [row.key for row in page.rows] == [f"k{n}" for n in range(6)]
    assert shop.do(observer.revision(), "ben") == 6
    assert shop.do(observer.get("k9"), "ben") is None
    row = shop.do(observer.get("k5"), "ben")
    assert row is not None
    assert row.revision == 6

    assert shop.do(authority.range("")).revision == 10
    assert shop.do(authority.revision()) == 10
    assert shop.do(authority.get("k9")) is not None


def test_an_observer_who_asks_for_a_revision_gets_it_or_hears_that_it_has_not_been() -> None:
    shop = lagging()
    observer = shop.port("ben", observer=True)
    assert shop.do(observer.range("", revision=3), "ben").revision == 3
    with pytest.raises(Invalid):
        shop.do(observer.range("", revision=9), "ben")
    with pytest.raises(Invalid):
        shop.do(observer.watch("", after=9), "ben")


def test_a_watch_at_a_lagging_member_is_late_but_whole__and_catches_up() -> None:
    shop = Shop()
    writer = Chain(shop)
    for n in range(5):
        writer.write(f"k{n}")
        shop.run(1.0)
    back = shop.service.degrade({"lag_s": 3.0})
    watcher = Watcher(shop, after=1, observer=True)
    for n in range(5, 10):
        writer.write(f"k{n}")
        shop.run(1.0)
    assert 5 <= watcher.revision < 10
    back()
    shop.run(0.5)
    assert watcher.revision == shop.do(shop.port().revision())
    assert watcher.gaps == []
    assert watcher.revisions == sorted(set(watcher.revisions))


# Watches


class Chain:
    """One writer of the chain."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        shop.port()
        self.place = shop.do(chain.raise_epoch(shop.port(), "anna", "first"))

    def write(self, key: str) -> None:
        head = chain.advance(self.place.head, [(key, b"")], ())
        answer = self.shop.do(self.shop.port().commit(chain.batch(self.place, head, [(key, b"")])))
        assert isinstance(answer, Committed)
        self.place = chain.ChainPosition(head, answer.revision)


class Watcher:
    """Follows from one place on, and notes every gap and every end. What was said before is passed over, as a view does."""

    def __init__(self, shop: Shop, *, after: int, head: Head | None = None, observer: bool = False) -> None:
        self.revisions: list[int] = []
        self.gaps: list[str] = []
        self.repeated = 0
        self.ended = ""
        self.head = head
        self._after = after
        port = shop.port("ben", observer=observer)
        shop.loop.spawn(self._follow(port), name="watcher", unit=shop.units["ben"])
        shop.run(0.1)

    @property
    def revision(self) -> int:
        return self.revisions[-1] if self.revisions else self._after

    async def _follow(self, port: StorePort) -> None:
        try:
            watch = await port.watch("", after=self._after)
            async for event in watch:
                self._heard(event)
            self.ended = "end"
        except StoreError as error:
            self.ended = type(error).__name__

    def _heard(self, event: WatchEvent) -> None:
        if event.revision <= self.revision:
            self.repeated += 1
            return
        if self.head is not None and (gap := chain.gap(self.head, event)) is not None:
            self.gaps.append(gap)
        self.revisions.append(event.revision)
        self.head = event.head


def watched(many: int = 40, **trouble: float) -> tuple[Shop, Watcher]:
    """A writer writes, a watcher follows, with a trouble in the middle part."""
    shop = Shop()
    writer = Chain(shop)
    watcher = Watcher(shop, after=writer.place.revision, head=writer.place.head)
    back = shop.service.degrade(dict(trouble))
    for n in range(many):
        writer.write(f"k{n}")
        shop.run(0.2)
    back()
    shop.run(10.0)
    writer.write("last")
    shop.run(1.0)
    return shop, watcher


def test_a_calm_watch_misses_nothing() -> None:
    _, watcher = watched()
    assert watcher.revisions == list(range(2, 43))
    assert (watcher.gaps, watcher.repeated, watcher.ended) == ([], 0, "")


def test_lost_events_show_as_gaps() -> None:
    shop, watcher = watched(events_lost=0.3)
    lost = shop.service.counts["event-lost"]
    assert lost > 3
    assert len(watcher.revisions) == 41 - lost
    assert watcher.gaps
    assert watcher.revisions == sorted(watcher.revisions)


def test_late_events_hold_up_those_behind_them__nothing_is_missing() -> None:
    shop, watcher = watched(events_late=0.5)
    assert shop.service.counts["event-late"] > 5
    assert watcher.revisions == list(range(2, 43))
    assert watcher.gaps == []


def test_repeated_events_come_again_later() -> None:
    shop, watcher = watched(events_repeated=0.5)
    assert watcher.repeated == shop.service.counts["event-repeated"] > 5
    assert watcher.revisions == list(range(2, 43))
    assert watcher.gaps == []


def test_a_cut_loses_events__the_gap_shows_once_it_is_mended() -> None:
    shop = Shop()
    writer = Chain(shop)
    watcher = Watcher(shop, after=writer.place.revision, head=writer.place.head)
    shop.network.cut(shop.service.name, "ben")
    writer.write("a")
    shop.run(1.0)
    shop.network.heal(shop.service.name, "ben")
    assert watcher.revisions == []
    writer.write("b")
    shop.run(1.0)
    assert watcher.revisions == [3]
    assert len(watcher.gaps) == 1


def test_a_watch_that_is_broken_says_so__and_for_a_while_nobody_can_watch() -> None:
    shop = Shop()
    shop.put("a")
    watcher = Watcher(shop, after=1)
    shop.service.break_watches(for_s=5.0)
    shop.run(1.0)
    assert watcher.ended == "Unavailable"
    assert Watcher(shop, after=1).ended == "Unavailable"
    shop.run(5.0)
    again = Watcher(shop, after=1)
    shop.put("b")
    shop.run(1.0)
    assert (again.revisions, again.ended) == ([2], "")
    assert watcher.revisions == []


def test_compacted_under_a_watcher__it_is_told_to_list_anew() -> None:
    shop = Shop()
    for n in range(5):
        shop.put(f"k{n}")
    shop.do(shop.port().compact(4))
    assert Watcher(shop, after=2).ended == "Compacted"
    with pytest.raises(Compacted):
        shop.do(shop.port().range("", revision=2))
    watcher = Watcher(shop, after=4)
    assert watcher.revisions == [5]


def test_a_closed_watch_ends__also_for_one_who_waits() -> None:
    shop = Shop()
    shop.port()

    async def story() -> list[WatchEvent]:
        watch = await shop.port().watch("", after=0)

        async def all_of_it() -> list[WatchEvent]:
            return [event async for event in watch]

        waiting = asyncio.ensure_future(all_of_it())
        await asyncio.sleep(1.0)
        await watch.close()
        await watch.close()
        return await asyncio.wait_for(waiting, 5.0)

    assert shop.do(story()) == []


# Restored


def test_restore__a_new_incarnation__old_watchers_end_and_a_late_commit_is_refused() -> None:
    shop = Shop()
    writer = Chain(shop)
    writer.write("a")
    backup = run_sync(cast(MemoryStore, shop.service.store).backup())
    writer.write("b")
    watcher = Watcher(shop, after=writer.place.revision, head=writer.place.head)
    back = shop.service.degrade({"applied_late": 1.0})
    lost = chain.advance(writer.place.head, [("late", b"")], ())
    with pytest.raises(CommitOutcomeUnknown):
        shop.do(shop.port().commit(chain.batch(writer.place, lost, [("late", b"")])))
    back()
    shop.service.restore(backup, "second")
    shop.run(10.0)
    assert shop.restorations == ["scope"]
    assert shop.keys() == ["a", "head"]
    assert watcher.ended == "StoreClosed"
    place = shop.do(chain.read_position(shop.port()))
    assert place is not None
    assert place.head.incarnation == "second"
    assert place.revision > writer.place.revision
    assert shop.service.counts["applied-late"] == 1
