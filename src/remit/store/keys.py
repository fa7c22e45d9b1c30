"""Request validation, key ranges, ordered key index.

Pure checks that every backend shares; nothing here knows what is stored.

Keys in memory, in order, cheap to add to. Values and versions are kept elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge

from remit.store.chain import decode_head
from remit.store.protocol import (
    HEAD,
    KEY_BYTES_MAX,
    PAGE_ROWS_MAX,
    ROWS_PER_COMMIT_MAX,
    VALUE_BYTES_MAX,
    Commit,
    Compacted,
    Corrupt,
    Invalid,
)

_LAST_CHARACTER = "\U0010ffff"


def check_commit(commit: Commit) -> None:
    """Raise `Invalid` unless this may be tried at all. Guards are judged later, against what is stored."""
    rows = len(commit.puts) + len(commit.deletes)
    if rows > ROWS_PER_COMMIT_MAX:
        raise Invalid(f"{rows} rows in one commit; at most {ROWS_PER_COMMIT_MAX}: split it")
    if len(commit.guards) > ROWS_PER_COMMIT_MAX:
        raise Invalid(f"{len(commit.guards)} guards in one commit; at most {ROWS_PER_COMMIT_MAX}")
    for guard in commit.guards:
        check_key(guard.key)
        if guard.revision < 0:
            raise Invalid(f"guard of {guard.key!r} at revision {guard.revision}: 0 means absent, less means nothing")
    keys = [key for key, _ in commit.puts]
    keys += commit.deletes
    if not _plain(keys, [value for _, value in commit.puts]):
        _check_rows(commit)
    distinct = set(keys)
    if len(distinct) != rows:
        raise Invalid("a key is changed twice in one commit")
    if HEAD in distinct:
        if HEAD in commit.deletes:
            raise Invalid("the head row cannot be deleted: it fences every older writer")
        _check_head(next(value for key, value in commit.puts if key == HEAD))


def _plain(keys: Sequence[str], values: Sequence[bytes]) -> bool:
    """Are all of them short, of the right type, and the keys ASCII? Then nothing can be wrong, and no row is looked at."""
    return (
        {*map(type, keys)} <= {str}
        and {*map(type, values)} <= {bytes}
        and "".join(keys).isascii()
        and min(map(len, keys), default=1) > 0
        and max(map(len, keys), default=0) <= KEY_BYTES_MAX
        and max(map(len, values), default=0) <= VALUE_BYTES_MAX
    )


def _check_rows(commit: Commit) -> None:
    for key, value in commit.puts:
        check_key(key)
        if type(value) is not bytes:
            raise Invalid(f"the value of {key!r} is {type(value).__name__}, not bytes")
        if len(value) > VALUE_BYTES_MAX:
            raise Invalid(f"the value of {key!r} has {len(value)} bytes; at most {VALUE_BYTES_MAX}")
    for key in commit.deletes:
        check_key(key)


def check_key(key: str) -> None:
    if type(key) is not str or not key:
        raise Invalid(f"a key must be a non-empty string, not {key!r}")
    # Most keys are ASCII, for which the length says it all; only the others are worth encoding.
    if key.isascii():
        size = len(key)
    else:
        size = len(_encoded(key))
    if size > KEY_BYTES_MAX:
        raise Invalid(f"key {key[:40]!r}... has {size} bytes; at most {KEY_BYTES_MAX}")


def check_range(prefix: str, after: str, limit: int) -> None:
    _encoded(prefix)
    _encoded(after)
    if not 1 <= limit <= PAGE_ROWS_MAX:
        raise Invalid(f"limit {limit}: between 1 and {PAGE_ROWS_MAX}")


def check_revision(asked: int, *, compacted: int, now: int) -> None:
    if asked < 0 or asked > now:
        raise Invalid(f"revision {asked} is not in the past; the store is at {now}")
    if asked < compacted:
        raise Compacted(asked, compacted)


def prefix_end(prefix: str) -> str | None:
    """The first string after all those that start with `prefix`; None if no string is."""
    stem = prefix.rstrip(_LAST_CHARACTER)
    if not stem:
        return None
    follower = ord(stem[-1]) + 1
    # Surrogates are no characters: the one after U+D7FF is U+E000.
    return stem[:-1] + chr(0xE000 if follower == 0xD800 else follower)


def range_start(prefix: str, after: str) -> str:
    """The first key that a range may answer: `after` itself is excluded, and NUL makes its immediate successor."""
    return max(prefix, after + "\0") if after else prefix


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise Invalid(f"{text!r} is not valid Unicode") from None


def _check_head(value: bytes) -> None:
    try:
        decode_head(value)
    except Corrupt as error:
        raise Invalid(f"the row {HEAD!r} is the writer's chain, and this is none: {error}") from None


_FRESH_KEYS_MAX = 1 << 11
_RUN_KEYS_MAX = 1 << 16
"""Longer runs are not merged: one such merge would take many milliseconds, and a walk can bear some more runs."""


class KeyOrder:
    """Sorted runs of geometric size: adding is amortised logarithmic, and a walk merges a handful of runs.

    One sorted list would move half of itself for every new key. A key may stand in two runs; a walk shows it once. Keys are
    not taken out one by one: `reset` does it for all.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._fresh: list[str] = []
        self._runs: tuple[list[str], ...] = ()
        self.reset(keys)

    def reset(self, keys: Iterable[str]) -> None:
        run = sorted(keys)
        self._fresh = []
        self._runs = (run,) if run else ()

    def add(self, keys: Iterable[str]) -> None:
        self._fresh.extend(keys)
        # Sorted as they come: left for the next walk, one huge sort would hold up whoever walks.
        if len(self._fresh) >= _FRESH_KEYS_MAX:
            self._settle()

    def walk(self, start: str, end: str | None) -> Iterator[str]:
        """Keys from `start` up to but not including `end`. What is added during the walk is not in it."""
        self._settle()
        parts: list[list[str]] = []
        for run in self._runs:
            low = bisect_left(run, start)
            if low < len(run):
                parts.append(run)
        return _merged(parts, start, end)

    def _settle(self) -> None:
        if not self._fresh:
            return
        run = sorted(self._fresh)
        self._fresh = []
        runs = list(self._runs)
        while runs and len(runs[-1]) <= 2 * len(run) and len(runs[-1]) + len(run) <= _RUN_KEYS_MAX:
            # Sorting two sorted runs is one merge for timsort. A new list each time: a walk under way keeps its own.
            run = sorted(runs.pop() + run)
        self._runs = (*runs, run)


def _merged(runs: list[list[str]], start: str, end: str | None) -> Iterator[str]:
    for key in distinct(merge(*(_tail(run, start) for run in runs))):
        if end is not None and key >= end:
            return
        yield key


def distinct(keys: Iterable[str]) -> Iterator[str]:
    """Keys that come in order, each once."""
    last: str | None = None
    for key in keys:
        if key != last:
            last = key
            yield key


def _tail(run: list[str], start: str) -> Iterator[str]:
    for index in range(bisect_left(run, start), len(run)):
        yield run[index]
