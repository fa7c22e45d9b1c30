"""Which requests are well formed? Pure checks that every backend shares; nothing here knows what is stored."""

from __future__ import annotations

from collections.abc import Sequence

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
