"""Simulated SQLite store: the witness sees every commit once and in order, whenever the power is cut."""

from __future__ import annotations

from remit.simulate.world.event_loop import ExecutionUnit, SimLoop
from remit.simulate.world.network import Network
from remit.simulate.world.power_loss import POWER_CUT_CALLS_MAX, SqliteStoreService
from remit.simulate.world.store import CommitOrigin, StorePort
from remit.store import chain
from remit.store.memory import MemoryBackup, MemoryStore
from remit.store.protocol import HEAD, Commit, CommitOutcomeUnknown, Committed, Conflict, StoreError
from remit.store.protocol import Watch as StoreWatch


class PowerCutRun:
    """One writer commits batch after batch, and takes over again whenever its position is unknown."""

    def __init__(self, seed: str) -> None:
        self.loop = SimLoop.seeded(seed)
        self.network = Network(self.loop, seed)
        self.applied: list[tuple[int, str, list[str]]] = []
        self.acknowledged: dict[str, int] = {}
        self.unanswered: list[str] = []
        self.rows: list[str] = []
        self.service = SqliteStoreService(self.loop, self.network, "scope", seed, self)
        self.loop.call_at(1e6, self.loop.stop)
        self.loop.root.context.copy().run(self.service.begin)

    def commit_applied(self, scope: str, commit: Commit, revision: int, sent: CommitOrigin | None) -> None:
        keys = [key for key, _ in commit.puts if key != HEAD]
        self.applied.append((revision, "" if sent is None else sent.process, keys))

    def store_restored(self, scope: str, store: MemoryStore, backup: MemoryBackup) -> None:
        raise AssertionError("nothing is restored here")

    def port(self, name: str) -> tuple[StorePort, ExecutionUnit]:
        unit = self.loop.new_unit(name)
        return StorePort(self.service, name, unit, lambda: CommitOrigin(name, "boot", 0, 1.0, self.loop.time())), unit

    async def write(self, port: StorePort, many: int) -> None:
        place: chain.ChainPosition | None = None
        clock = self.loop
        for n in range(many):
            key = f"k{n:03}"
            try:
                if place is None:
                    place = await chain.raise_epoch(port, "writer", "durable")
                head = chain.advance(place.head, [(key, b"x" * 3_000)], ())
                answer = await port.commit(chain.batch(place, head, [(key, b"x" * 3_000)]))
                assert isinstance(answer, Committed | Conflict)
                place = chain.ChainPosition(head, answer.revision) if isinstance(answer, Committed) else None
                if isinstance(answer, Committed):
                    self.acknowledged[key] = answer.revision
            except CommitOutcomeUnknown:
                self.unanswered.append(key)
                place = None
            except StoreError:
                place = None
            pause = clock.create_future()
            clock.call_later(0.05, pause.set_result, None)
            await pause

    async def read(self, port: StorePort) -> None:
        page = await port.range("", limit=10_000)
        self.rows = [row.key for row in page.rows if row.key.startswith("k")]
        assert page.revision == self.applied[-1][0]
        self.loop.stop()

    def play(self, cut_at_s: float, calls: int) -> None:
        port, unit = self.port("writer")
        self.loop.call_at(cut_at_s, lambda: self.service.cut_power(calls))
        self.loop.call_at(2.0, lambda: self.loop.spawn(self.write(port, 60), name="write", unit=unit))
        self.loop.run(60.0)
        assert not self.loop.failures, self.loop.failures
        reader, unit = self.port("reader")
        self.loop.spawn(self.read(reader), name="read", unit=unit)
        self.loop.run(120.0)
        self.loop.finish()
        self.service.end()


def test_witness_sees_each_commit_once_including_unanswered_ones() -> None:
    written_unanswered = 0
    for calls in range(1, POWER_CUT_CALLS_MAX + 1):
        run = PowerCutRun(f"cellar {calls}")
        run.play(2.5 + calls / 37, calls)
        revisions = [revision for revision, _, _ in run.applied]
        assert revisions == list(range(1, len(revisions) + 1))
        from_writer = {keys[0]: revision for revision, sender, keys in run.applied if sender == "writer" and keys}
        assert run.acknowledged.items() <= from_writer.items(), "every answered commit was applied"
        assert sorted(from_writer) == run.rows, "every stored row was seen with its sender"
        assert len(run.acknowledged) > 30
        assert len(run.unanswered) <= 3
        written_unanswered += len(from_writer.keys() - run.acknowledged.keys())
    assert written_unanswered > 0, "no cut fell between a write and its answer, so this proves nothing"


def test_power_cut_ends_watches_and_store_recovers() -> None:
    run, received = PowerCutRun("watch"), list[str]()

    async def follow(port: StorePort) -> None:
        watch: StoreWatch = await port.watch("", after=0)
        try:
            async for event in watch:
                received.append(f"{event.revision}")
        except StoreError as error:
            received.append(type(error).__name__)

    port, unit = run.port("watcher")
    run.loop.call_at(1.0, lambda: run.loop.spawn(follow(port), name="follow", unit=unit))
    run.play(2.5, 3)
    assert received[-1] == "Unavailable"
    assert [int(one) for one in received[:-1]] == list(range(1, len(received)))
    assert len(run.acknowledged) > 30


def test_cancelled_power_cut_does_not_happen() -> None:
    run = PowerCutRun("off")
    back: list[object] = []

    def cut() -> None:
        off = run.service.cut_power(POWER_CUT_CALLS_MAX)
        run.loop.call_later(0.001, lambda: back.append(off()))

    run.loop.call_at(2.5, cut)
    run.play(100.0, 1)
    assert back == [None]
    assert len(run.acknowledged) == 60
    assert run.unanswered == []
