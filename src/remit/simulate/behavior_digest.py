"""Digest of what a run did, without the texts it wrote for people.

`Run.digest` covers every byte that was sent or stored, so rewording one condition message changes it. This digest covers the
rows of every commit with their virtual time, and the starts and ends of processes. It leaves out human-readable text, digests
derived from that text, and fields without a value. Two revisions that behave the same have the same digest, although one of
them has better messages or a new field that nothing sets yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

import msgspec

HEAD: Final = "head"
BATCH: Final = "batch/"
TEXT_FIELDS: Final = frozenset({"message", "detail"})
"""Prose for people in conditions, events, decisions and refusals."""

STATUS_REASON: Final = ("node/", "replica/")
"""Rows whose `status.reason` is prose; the `reason` of a condition or an event is a word for programs."""

ENTRY_DIGEST: Final = 1
ENTRY_DETAIL: Final = 12
"""Positions in an entry of a batch row that depend on texts: the digest of the payload, and the detail of a refusal."""

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder().decode


class BehaviorDigest:
    """Accumulates the commits and process events of one run."""

    def __init__(self) -> None:
        self._hash = sha256()

    def commit(self, at_s: float, scope: str, revision: int, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str]) -> None:
        rows = [(key, _without_text(key, value)) for key, value in puts]
        self._hash.update(_encode((round(at_s * 1_000_000), scope, revision, rows, deletes)))

    def event(self, at_s: float, name: str) -> None:
        self._hash.update(_encode((round(at_s * 1_000_000), name)))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _without_text(key: str, row: bytes) -> Any:
    try:
        value = _decode(row)
    except msgspec.DecodeError:
        return row.decode()  # a plain word, such as the name of an incarnation
    if key == HEAD:
        return {name: field for name, field in value.items() if name != "digest"}
    if key.startswith(BATCH):
        entries = [[*entry] for entry in value["entries"]]
        for entry in entries:
            entry[ENTRY_DIGEST] = entry[ENTRY_DETAIL] = ""
        return {**value, "entries": entries}
    if key.startswith(STATUS_REASON):
        value.get("status", {}).pop("reason", None)
    return _pruned(value)


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        pruned = {name: _pruned(field) for name, field in value.items() if name not in TEXT_FIELDS}
        return {name: field for name, field in pruned.items() if field not in ("", None, [], {})}
    if isinstance(value, list):
        return [_pruned(item) for item in value]
    return value
