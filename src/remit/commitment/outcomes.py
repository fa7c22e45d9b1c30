"""Idempotency table: one stored outcome per operation id, grouped by issue window. No I/O.

Every batch writes one row with an entry for each operation that it decided. The entry is both the outcome and the audit
record. Ids carry the **window** in which they were issued, a number that the authority advances by its own clock and stores
in these rows. Outcomes are kept for a number of windows. An id from before that **horizon** is refused and never executed.
So an outcome may be forgotten, but an operation is never executed twice: `id's window <= window of its execution < horizon`
means refused.

Memory is bounded by time and by count: when there are too many outcomes, the horizon moves up early.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Struct

from remit.model.claims import Accepted, Code, Operation, Refused, Verdict, parse_operation_id, payload

WINDOW_MS: Final = 60_000
WINDOWS_RETAINED: Final = 10
OUTCOMES_MAX: Final = 1_000_000
BATCH_PREFIX: Final = "batch/"

_NOT_OUTCOMES: Final = frozenset({Code.OPERATION_EXPIRED, Code.OPERATION_MISMATCH})
"""Refusals that concern the id itself. They are not outcomes of the operation to which the id belongs."""


class AuditEntry(Struct, frozen=True, array_like=True, gc=False):
    """One operation: which actor did what to which object, on what evidence, and the outcome (`code` is empty if accepted)."""

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
        """Whether the verdict is an acceptance with a revision only. An `abandon` returns another operation's outcome."""
        return not (self.code or self.number or self.did == "abandon")


class BatchRecord(Struct, frozen=True, gc=False):
    """The row of one batch. `first` is the sequence of the oldest batch whose outcomes are kept; `at` is for display."""

    epoch: int
    window: int
    horizon: int
    first: int
    at: str
    entries: tuple[AuditEntry, ...]


_encode = msgspec.json.Encoder().encode
_decode: msgspec.json.Decoder[BatchRecord] = msgspec.json.Decoder(BatchRecord)


def encode_batch(batch: BatchRecord) -> bytes:
    return _encode(batch)


def decode_batch(value: bytes) -> BatchRecord:
    return _decode.decode(value)


def batch_key(sequence: int) -> str:
    return f"{BATCH_PREFIX}{sequence:016d}"


def digest(operation: Operation) -> tuple[str, int]:
    """Return the digest of actor and claim, and their encoded size.

    Raises UnicodeEncodeError for invalid text, also in fields that only the audit entry contains.
    """
    encoded = payload(operation)
    if not (operation.id.isascii() and operation.trace.isascii() and operation.actor.lease.isascii()):
        (operation.id + operation.trace + operation.actor.lease).encode()
    return blake2b(encoded, digest_size=8).hexdigest(), len(encoded)


class Outcomes:
    """Outcomes of all operations in the retained windows."""

    def __init__(self, incarnation: str, window: int, horizon: int) -> None:
        self.incarnation = incarnation
        self.window = window
        self.horizon = horizon
        self.begin_window(window)
        self._outcomes: dict[str, tuple[str, Verdict]] = {}
        self._by_window: dict[int, list[str]] = {}
        self._first_by_window: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._outcomes)

    def check_id(self, operation_id: str, payload_digest: str) -> Verdict | None:
        """Return the verdict of an id that needs no decision (known, used for another payload, expired, malformed), or None.

        An id from a window after the current one is refused: windows are announced only once a batch has recorded them.
        """
        known = self._outcomes.get(operation_id)
        if known is not None:
            if known[0] not in ("", payload_digest):
                return Refused(
                    Code.OPERATION_MISMATCH,
                    f"id: operation {operation_id} was used for a different payload; use a new operation id",
                )
            return known[1]
        length = len(operation_id)
        if length <= 128 and operation_id.startswith(self._prefix) and operation_id.find(".", self._prefix_length) < 0:
            return (
                None
                if length > self._prefix_length
                else Refused(Code.INVALID, "id: the part after the window is empty; append a unique nonce")
            )
        issued = parse_operation_id(operation_id)
        if issued is None:
            return Refused(
                Code.INVALID, "id: not an operation id; build it from the incarnation and window of the scope's status"
            )
        if issued[0] != self.incarnation:
            return Refused(
                Code.OPERATION_EXPIRED,
                f"id: issued in incarnation {issued[0]}, which ended; the scope is now {self.incarnation}",
            )
        if not self.horizon <= issued[1] <= self.window:
            retained = f"windows {self.horizon} to {self.window} are"
            return Refused(Code.OPERATION_EXPIRED, f"id: window {issued[1]} is not retained; {retained}")
        return None

    def get(self, operation_id: str) -> Verdict | None:
        entry = self._outcomes.get(operation_id)
        return None if entry is None else entry[1]

    def record(self, sequence: int, batch: BatchRecord, revision: int) -> None:
        """Record the outcomes of a committed batch, and drop those before its horizon."""
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
            if entry.did == "abandon" and entry.subject in self._outcomes:
                verdict = self._outcomes[entry.subject][1]
            self._outcomes[entry.id] = (entry.digest, verdict)
            ids.append(entry.id)
        if batch.window > self.window:
            self.begin_window(batch.window)
        self.horizon = max(self.horizon, batch.horizon)
        for window in [w for w in self._by_window if w < self.horizon]:
            for operation_id in self._by_window.pop(window):
                self._outcomes.pop(operation_id, None)
            self._first_by_window.pop(window, None)

    def begin_window(self, window: int) -> None:
        """Begin a new window. Most ids belong to the current one and are recognised by its prefix."""
        self.window = window
        self._prefix = f"{self.incarnation}.{window}."
        self._prefix_length = len(self._prefix)

    def is_window_full(self) -> bool:
        """Return whether the current window has so many outcomes that the next must begin early. Only whole windows can be
        dropped, so large windows would make the total count unbounded.
        """
        return len(self._by_window.get(self.window, ())) > OUTCOMES_MAX // 4

    def next_horizon(self, window: int) -> int:
        """Return the horizon for a batch in `window`."""
        horizon = max(self.horizon, window - WINDOWS_RETAINED)
        if len(self._outcomes) > OUTCOMES_MAX:
            horizon = max(horizon, min((w for w in self._by_window if w < window), default=horizon - 1) + 1)
        return horizon

    def first_sequence(self, horizon: int, sequence: int) -> int:
        """Return the sequence of the oldest batch that a successor must read to know all outcomes since `horizon`."""
        return min((s for w, s in self._first_by_window.items() if w >= horizon), default=sequence)
