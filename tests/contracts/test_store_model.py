"""Every store agrees with a plain model of all its states, compared after each random step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from remit.store.protocol import Commit, Committed, Compacted, Conflict, Guard, Row, Store
from remit.store.sqlite import maintenance
from remit.store.sqlite.store import SqliteStore
from remit.store.watch_feed import FeedLimits
from tests.contracts.stores import Backend, MemoryBackend, SqliteBackend, next_event

T = TypeVar("T")
KEYS = st.sampled_from([f"k/{letter}" for letter in "abcdefg"] + ["k/a/1", "k/\U0010ffff", "kz", "l"])
PREFIXES = st.sampled_from(["k", "k/", "k/a", "kz", "l", "m"])
SMALL = {
    "RECENT_VERSIONS_MAX": 6,
    "INDEX_SLICE_KEYS": 2,
    "SWEEP_SLICE_ROWS": 3,
    "SWEEP_READ_ROWS": 4,
    "SWEEP_KEYS_MAX": 3,
    "WAL_PAGES_DUE": 8,
    "BACKUP_SLICE_PAGES": 1,
}
"""Limits so small that indexing, sweeping and checkpoints happen within a few steps, in slices."""
BOUNDS = FeedLimits(window_rows_max=5, fold_after=2)

State = dict[str, Row]


class StoreMachine(RuleBasedStateMachine):
    make: Callable[[], Backend]

    def __init__(self) -> None:
        super().__init__()
        self.limits = {name: getattr(maintenance, name) for name in SMALL}
        for name, value in SMALL.items():
            setattr(maintenance, name, value)
        self.runner = asyncio.Runner()
        self.backend = self.make()
        self.store: Store = self.run(self.backend.open(BOUNDS))
        self.states: dict[int, State] = {}
        self.compacted = 0
        self.now = self.run(self.store.revision())
        for revision in range(self.now + 1):
            self.states[revision] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(work, 30)

        return self.runner.run(bounded())

    def teardown(self) -> None:
        self.run(self.backend.close())
        self.runner.close()
        for name, value in self.limits.items():
            setattr(maintenance, name, value)

    def apply(self, commit: Commit) -> Committed | Conflict:
        """The answer the store should give, from the model alone."""
        state = self.states[self.now]
        for guard in commit.guards:
            found = state[guard.key].revision if guard.key in state else 0
            if found != guard.revision:
                return Conflict(guard.key, guard.revision, found)
        self.now += 1
        changed = dict(state)
        changed.update((key, Row(key, value, self.now)) for key, value in commit.puts)
        for key in commit.deletes:
            changed.pop(key, None)
        self.states[self.now] = changed
        return Committed(self.now)

    def draw_commit(self, data: st.DataObject) -> Commit:
        changed = data.draw(st.lists(KEYS, unique=True, max_size=5))
        split = data.draw(st.integers(0, len(changed)))
        puts = tuple((key, data.draw(st.binary(max_size=3))) for key in changed[:split])
        guards = []
        for key in data.draw(st.lists(KEYS, max_size=2)):
            row = self.states[self.now].get(key)
            true = row.revision if row else 0
            guards.append(Guard(key, data.draw(st.sampled_from([true, true, true, 0, max(0, true - 1)]))))
        return Commit(tuple(guards), puts, tuple(changed[split:]))

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        commit = self.draw_commit(data)
        assert self.run(self.store.commit(commit)) == self.apply(commit)

    @rule(data=st.data(), count=st.integers(2, 6))
    def commit_concurrently(self, data: st.DataObject, count: int) -> None:
        commits = [self.draw_commit(data) for _ in range(count)]

        async def together() -> list[Committed | Conflict]:
            return await asyncio.gather(*(self.store.commit(commit) for commit in commits))

        assert self.run(together()) == [self.apply(commit) for commit in commits]

    @rule(data=st.data(), prefix=PREFIXES, after=st.one_of(st.just(""), KEYS), limit=st.integers(1, 4))
    def range_at(self, data: st.DataObject, prefix: str, after: str, limit: int) -> None:
        revision = data.draw(st.integers(self.compacted, self.now))
        page = self.run(self.store.range(prefix, after=after, limit=limit, revision=revision))
        state = self.states[revision or self.now]
        expected = [state[key] for key in sorted(state) if key.startswith(prefix) and key > after]
        assert page.rows == tuple(expected[:limit])
        assert page.more == (len(expected) > limit)
        assert page.revision == (revision or self.now)

    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        revision = data.draw(st.integers(0, self.now))
        self.run(self.store.compact(revision))
        self.compacted = max(self.compacted, revision)

    @precondition(lambda self: self.compacted > 1)
    @rule(data=st.data())
    def query_compacted(self, data: st.DataObject) -> None:
        revision = data.draw(st.integers(1, self.compacted - 1))
        with pytest.raises(Compacted):
            self.run(self.store.range("k", revision=revision))
        with pytest.raises(Compacted):
            self.run(self.store.watch("k", after=revision))

    @rule(data=st.data(), prefix=PREFIXES)
    def watch_from(self, data: st.DataObject, prefix: str) -> None:
        """A past state plus the changes since then equals the current state."""
        start = data.draw(st.integers(self.compacted, self.now))

        async def follow() -> State:
            state, seen = dict(self.states[start]), start
            watch = await self.store.watch(prefix, after=start)
            while seen < self.now:
                event = await next_event(watch)
                assert event.after == seen
                for key, value, revision in event.changes:
                    assert key.startswith(prefix)
                    state.pop(key, None)
                    if value is not None:
                        state[key] = Row(key, value, revision)
                seen = event.revision
            await watch.close()
            return state

        followed = self.run(follow())
        now = self.states[self.now]
        assert {key: followed[key] for key in followed if key.startswith(prefix)} == {
            key: now[key] for key in now if key.startswith(prefix)
        }

    @rule()
    def back_up(self) -> None:
        self.run(self.backend.backup(self.store))

    @invariant()
    def agrees_now(self) -> None:
        state = self.states[self.now]
        assert self.run(self.store.revision()) == self.now
        for key in ("k/a", "k/c", "l"):
            assert self.run(self.store.get(key)) == state.get(key)


class MemoryMachine(StoreMachine):
    make = MemoryBackend


class SqliteMachine(StoreMachine):
    make = SqliteBackend

    @rule()
    def open_again(self) -> None:
        assert isinstance(self.store, SqliteStore)
        assert isinstance(self.backend, SqliteBackend)
        self.run(self.store.close())
        self.store = self.run(self.backend.open_in(self.backend.directory / "store-0", BOUNDS))
        # Opening raises the epoch: one transaction that changes none of the compared rows.
        self.now += 1
        self.states[self.now] = self.states[self.now - 1]


TestMemory = MemoryMachine.TestCase
TestSqlite = SqliteMachine.TestCase
