"""Request validation, key ranges, ordered key index.

All backends share these checks. The key index holds keys only; values and versions are stored elsewhere.
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
    """Raise `Invalid` for a malformed commit. Guards are checked later, against the stored rows."""
    rows = len(commit.puts) + len(commit.deletes)
    if rows > ROWS_PER_COMMIT_MAX:
        raise Invalid(f"{rows} rows in one commit; at most {ROWS_PER_COMMIT_MAX}: split the commit")
    if len(commit.guards) > ROWS_PER_COMMIT_MAX:
        raise Invalid(f"{len(commit.guards)} guards in one commit; at most {ROWS_PER_COMMIT_MAX}")
    for guard in commit.guards:
        check_key(guard.key)
        if guard.revision < 0:
            raise Invalid(f"guard of {guard.key!r} has revision {guard.revision}; use 0 for absent, or a positive revision")
    keys = [key for key, _ in commit.puts]
    keys += commit.deletes
    if not _obviously_valid(keys, [value for _, value in commit.puts]):
        _check_rows(commit)
    distinct = set(keys)
    if len(distinct) != rows:
        raise Invalid("a key is changed twice in one commit")
    if HEAD in distinct:
        if HEAD in commit.deletes:
            raise Invalid("the head row cannot be deleted: it fences older writers")
        _check_head(next(value for key, value in commit.puts if key == HEAD))


def _obviously_valid(keys: Sequence[str], values: Sequence[bytes]) -> bool:
    """Return whether all keys are short ASCII strings and all values short bytes. Then no row needs a check of its own."""
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
    # Most keys are ASCII, where the number of characters is the size; only the others must be encoded.
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
        raise Invalid(f"limit: {limit}; use 1 to {PAGE_ROWS_MAX}")


def check_revision(revision: int, *, compacted: int, now: int) -> None:
    if revision < 0 or revision > now:
        raise Invalid(f"revision {revision} does not exist; the store is at {now}")
    if revision < compacted:
        raise Compacted(revision, compacted)


def prefix_end(prefix: str) -> str | None:
    """Return the first string after all strings that start with `prefix`; None if there is none."""
    stem = prefix.rstrip(_LAST_CHARACTER)
    if not stem:
        return None
    follower = ord(stem[-1]) + 1
    # Surrogates cannot be encoded: the character after U+D7FF is U+E000.
    return stem[:-1] + chr(0xE000 if follower == 0xD800 else follower)


def range_start(prefix: str, after: str) -> str:
    """Return the first key of a range. `after` itself is excluded: its immediate successor is `after` with a NUL appended."""
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
        raise Invalid(f"the row {HEAD!r} must be a head of the writer chain: {error}") from None


_UNSORTED_KEYS_MAX = 1 << 11
_RUN_KEYS_MAX = 1 << 16
"""Longer runs are not merged: that would block for many milliseconds, and a walk can merge a few more runs."""


class KeyOrder:
    """Ordered set of keys as sorted runs of geometric size: adding is amortised logarithmic, and a walk merges a few runs.

    A single sorted list would move half of its entries for every new key. A key may be in two runs; a walk yields it once.
    Keys are not removed one by one: `reset` replaces all of them.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._unsorted: list[str] = []
        self._runs: tuple[list[str], ...] = ()
        self.reset(keys)

    def reset(self, keys: Iterable[str]) -> None:
        run = sorted(keys)
        self._unsorted = []
        self._runs = (run,) if run else ()

    def add(self, keys: Iterable[str]) -> None:
        self._unsorted.extend(keys)
        # Sort in small portions: one large sort at the next walk would block its caller.
        if len(self._unsorted) >= _UNSORTED_KEYS_MAX:
            self._sort()

    def walk(self, start: str, end: str | None) -> Iterator[str]:
        """Yield the keys from `start` up to but not including `end`. Keys added during the walk are not included."""
        self._sort()
        parts: list[list[str]] = []
        for run in self._runs:
            low = bisect_left(run, start)
            if low < len(run):
                parts.append(run)
        return _merged(parts, start, end)

    def _sort(self) -> None:
        if not self._unsorted:
            return
        run = sorted(self._unsorted)
        self._unsorted = []
        runs = list(self._runs)
        while runs and len(runs[-1]) <= 2 * len(run) and len(runs[-1]) + len(run) <= _RUN_KEYS_MAX:
            # timsort merges two sorted runs in one pass. A new list each time, because a running walk uses the old one.
            run = sorted(runs.pop() + run)
        self._runs = (*runs, run)


def _merged(runs: list[list[str]], start: str, end: str | None) -> Iterator[str]:
    for key in distinct(merge(*(_tail(run, start) for run in runs))):
        if end is not None and key >= end:
            return
        yield key


def distinct(keys: Iterable[str]) -> Iterator[str]:
    """Remove duplicates from ordered keys."""
    last: str | None = None
    for key in keys:
        if key != last:
            last = key
            yield key


def _tail(run: list[str], start: str) -> Iterator[str]:
    for index in range(bisect_left(run, start), len(run)):
        yield run[index]
