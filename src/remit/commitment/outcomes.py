"""Idempotency table: one stored outcome per operation id, by issue window.

One outcome per operation id, with its audit. No I/O here.

Every batch writes one row with an entry for each operation it decided: the outcome and the audit are the same record. Ids carry
the **window** that they were issued in, a number that the authority counts up by its own clock and keeps in these rows.
Outcomes are kept for a number of windows; an id from before that **horizon** is refused, never executed. So an outcome may be
forgotten, but a deed is never repeated: `id's window <= window of its execution < horizon` means refused.

The memory is bounded twice: by time, and by count. If there are too many, the horizon moves up early.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Struct

from remit.model.claims import Accepted, Code, Operation, Refused, Verdict, payload, window_of

WINDOW_MS: Final = 60_000
WINDOWS_KEPT: Final = 10
OUTCOMES_MAX: Final = 1_000_000
BATCH: Final = "batch/"

_NOT_OUTCOMES: Final = frozenset({Code.OPERATION_EXPIRED, Code.OPERATION_MISMATCH})
"""Refusals of an id as such; they say nothing of the operation that the id belongs to."""


class Entry(Struct, frozen=True, array_like=True, gc=False):
    """One operation: who did what to which object on what evidence, and what came of it (`code` is empty if accepted)."""

    id: str
    digest: str
    did: str
    subject: str
    actor: str
    role: str
    lease: str
    epoch: int
    seen: int
    age_ms: int
    number: int
    code: str
    detail: str
    trace: str

    @property
    def plain(self) -> bool:
        """Accepted, with nothing more to say; an abandonment is answered with another operation's outcome."""
        return not (self.code or self.number or self.did == "abandon")


class Batch(Struct, frozen=True, gc=False):
    """What one batch decided. `first` is the sequence of the oldest batch whose outcomes are kept; `at` is for display."""

    epoch: int
    window: int
    horizon: int
    first: int
    at: str
    entries: tuple[Entry, ...]


_encode = msgspec.json.Encoder().encode
_decode: msgspec.json.Decoder[Batch] = msgspec.json.Decoder(Batch)


def encode_batch(batch: Batch) -> bytes:
    return _encode(batch)


def decode_batch(value: bytes) -> Batch:
    return _decode.decode(value)


def batch_key(sequence: int) -> str:
    return f"{BATCH}{sequence:016d}"


def digest(operation: Operation) -> tuple[str, int]:
    """Over who asks what; and how many bytes that is. Raises UnicodeEncodeError, also for what only the audit keeps of it."""
    taken = payload(operation)
    if not (operation.id.isascii() and operation.trace.isascii() and operation.actor.lease.isascii()):
        (operation.id + operation.trace + operation.actor.lease).encode()
    return blake2b(taken, digest_size=8).hexdigest(), len(taken)


class Outcomes:
    """What was answered to every operation of the windows that are kept."""

    def __init__(self, incarnation: str, window: int, horizon: int) -> None:
        self.incarnation = incarnation
        self.window = window
        self.horizon = horizon
        self._prefix = f"{incarnation}.{window}."
        self._kept: dict[str, tuple[str, Verdict]] = {}
        self._by_window: dict[int, list[str]] = {}
        self._first_by_window: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def judge(self, operation_id: str, taken: str) -> Verdict | None:
        """The answer to an id that needs no deciding: known, spent on another payload, expired, or none at all.

        Windows are announced only once a batch has recorded them, so an id from a later one was issued by nobody.
        """
        known = self._kept.get(operation_id)
        if known is not None:
            if known[0] not in ("", taken):
                return Refused(Code.OPERATION_MISMATCH, f"operation {operation_id} was used for something else")
            return known[1]
        if operation_id.startswith(self._prefix) and operation_id.find(".", len(self._prefix)) < 0 and len(operation_id) <= 128:
            return None if len(operation_id) > len(self._prefix) else Refused(Code.INVALID, "id: it has no nonce")
        issued = window_of(operation_id)
        if issued is None:
            return Refused(Code.INVALID, "id: not an operation id; take the incarnation and window from the status")
        if issued[0] != self.incarnation:
            return Refused(Code.OPERATION_EXPIRED, f"incarnation {issued[0]} has ended; this is {self.incarnation}")
        if not self.horizon <= issued[1] <= self.window:
            kept = f"those from {self.horizon} to {self.window} are"
            return Refused(Code.OPERATION_EXPIRED, f"window {issued[1]} is not kept; {kept}")
        return None

    def known(self, operation_id: str) -> Verdict | None:
        found = self._kept.get(operation_id)
        return None if found is None else found[1]

    def record(self, sequence: int, batch: Batch, revision: int) -> None:
        """Absorb a committed batch."""
        plain = Accepted(revision)
        ids = self._by_window.setdefault(batch.window, [])
        self._first_by_window.setdefault(batch.window, sequence)
        for entry in batch.entries:
            if not entry.code:
                verdict: Verdict = Accepted(revision, entry.number) if entry.number else plain
            elif entry.code in _NOT_OUTCOMES:
                continue
            else:
                verdict = Refused(Code(entry.code), entry.detail, revision)
            if entry.did == "abandon" and entry.subject in self._kept:
                verdict = self._kept[entry.subject][1]
            self._kept[entry.id] = (entry.digest, verdict)
            ids.append(entry.id)
        if batch.window > self.window:
            self.begin(batch.window)
        self.horizon = max(self.horizon, batch.horizon)
        for window in [w for w in self._by_window if w < self.horizon]:
            for old in self._by_window.pop(window):
                self._kept.pop(old, None)
            self._first_by_window.pop(window, None)

    def begin(self, window: int) -> None:
        """A new window; most ids that come are of the current one, and are known by their first characters."""
        self.window = window
        self._prefix = f"{self.incarnation}.{window}."

    def crowded(self) -> bool:
        """Has the current window so many outcomes that the next should begin early? Else the count could not be bounded."""
        return len(self._by_window.get(self.window, ())) > OUTCOMES_MAX // 4

    def next_horizon(self, window: int) -> int:
        """Where the horizon should stand for a batch in `window`."""
        horizon = max(self.horizon, window - WINDOWS_KEPT)
        if len(self._kept) > OUTCOMES_MAX:
            horizon = max(horizon, min((w for w in self._by_window if w < window), default=horizon - 1) + 1)
        return horizon

    def first(self, horizon: int, sequence: int) -> int:
        """The sequence of the oldest batch that a new authority must read to know all outcomes from `horizon` on."""
        return min((s for w, s in self._first_by_window.items() if w >= horizon), default=sequence)
