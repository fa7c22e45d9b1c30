"""Decision and event history from stored batches.

Reads decisions, events and batches of the authority, the newest first, since a long run leaves very many. `remit explain
--data` passes rows of a data directory; the API reads its store (`read_rows`, `read_batches`).

Repeated events are folded into one, with a count and the times of the first and last. An event record has no time of its
own: it gets the time of the batch that was committed with it, as long as that batch is kept.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import suppress
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec import Struct

from remit.commitment.outcomes import BATCH_PREFIX, AuditEntry, BatchRecord, batch_key, decode_batch, encode_batch
from remit.model.kinds import Workload
from remit.model.objects import decode
from remit.model.records import PROCESS_ENDED, Decision, Event, Replica
from remit.model.wire.api_types import HistoryEvent
from remit.observation.scheduler_view import SchedulerView
from remit.proposal.explain.pending import PlacementInputs
from remit.proposal.explain.result_types import HistoryEntry, ReplicaExplanation, WorkloadExplanation
from remit.proposal.explain.subjects import RecordedHistory, explain_replica, explain_workload
from remit.serve.diagnostics.event_texts import accepted_message, event_text, refused_message
from remit.serve.diagnostics.view_snapshots import ViewSnapshots
from remit.serve.http.streams import BookmarkLine, HeartbeatLine, ResyncLine, json_line
from remit.store.protocol import Compacted, Row, RowChange, Store, StoreError
from remit.store.protocol import Resync as Lagging

ROWS_MAX: Final = 8_192
BYTES_MAX: Final = 16 << 20
"""Limits of what is read for one answer, the newest rows first."""

SCANS_MAX: Final = 200
"""Scans for one answer; enough for all kept batches, also if most are empty."""

_PAGE_ROWS: Final = 512
_EMPTY_BATCH_END: Final = encode_batch(BatchRecord(0, 0, 0, 0, "", ()))[-13:]
"""How the row of an empty batch ends. An idle authority writes one per heartbeat, so most batches of a quiet scope are empty.
"""


class _BatchTime(msgspec.Struct):
    at: str = ""


_decode_batch_time = msgspec.json.Decoder(_BatchTime).decode


class StoredHistory(NamedTuple):
    """Rows of `decision/TENANT/` and `batch/`."""

    decisions: Iterable[Row] = ()
    batches: Iterable[Row] = ()

    def about(self, tenant: str, names: frozenset[str], name_prefix: str) -> RecordedHistory:
        """Return the decisions and verdicts about these replicas, whose names all begin with `name_prefix`, and the time of
        each batch.
        """
        named = f'"{tenant}/{name_prefix}'.encode()
        decisions = [decision for row in self.decisions if named in row.value and (decision := _decision(row, tenant, names))]
        subjects = {f"replica/{tenant}/{name}" for name in names}
        answers, times = list[HistoryEntry](), dict[int, str]()
        for row in self.batches:
            times[row.revision] = batch_time(row)
            if f"replica/{tenant}/{name_prefix}".encode() in row.value:
                answers += _verdicts_about(row, subjects)
        return RecordedHistory(decisions, answers, times)


def batch_time(row: Row) -> str:
    """Return the wall-clock time of a batch without decoding the rest."""
    return _decode_batch_time(row.value).at


def workload_explanation(
    view: SchedulerView,
    declared: Workload | None,
    tenant: str,
    name: str,
    written: StoredHistory,
    rules: PlacementInputs,
    node: str = "",
) -> WorkloadExplanation:
    """Explain a workload. Raises `NodeNotFound` as `explain_workload` does."""
    records = written.about(tenant, replica_names(view.replicas.slots, tenant, name), f"{name}-")
    return explain_workload(view, declared, tenant, name, records, rules, node)


def replica_explanation(
    view: SchedulerView, replica: Replica, revision: int, written: StoredHistory, rules: PlacementInputs, node: str = ""
) -> ReplicaExplanation:
    """Explain a replica. Raises `NodeNotFound` as `explain_replica` does."""
    meta = replica.metadata
    records = written.about(meta.tenant, frozenset({meta.name}), meta.name)
    return explain_replica(view, replica, revision, records, rules, node)


def replica_names(keys: Iterable[str], tenant: str, workload: str) -> frozenset[str]:
    """Return the names of a workload's replicas among these keys: `web-3` belongs to web, `web-api-3` does not."""
    prefix = f"replica/{tenant}/{workload}-"
    return frozenset(key.split("/", 2)[2] for key in keys if key.startswith(prefix) and key[len(prefix) :].isdigit())


def _decision(row: Row, tenant: str, names: frozenset[str]) -> tuple[int, Decision] | None:
    obj = decode(row.value)
    if not isinstance(obj, Decision) or names.isdisjoint(name.removeprefix(f"{tenant}/") for name in obj.spec.replicas):
        return None
    return row.revision, obj


def _verdicts_about(row: Row, subjects: set[str]) -> Iterator[HistoryEntry]:
    batch = decode_batch(row.value)
    for entry in batch.entries:
        if entry.subject in subjects:
            summary = f"{entry.did} {'refused' if entry.code else 'accepted'}"
            yield HistoryEntry(row.revision, batch.at, "authority", summary, entry.code, entry.detail)


# -- reading rows ----------------------------------------------------------------------------------------------------------


async def read_rows(store: Store, prefix: str, revision: int, rows_max: int = 2 * ROWS_MAX) -> list[Row]:
    """Read events or decisions by key prefix. Their keys are not ordered by time, and their number is bounded
    (commitment/books.py).
    """
    rows, size, after = list[Row](), 0, ""
    while len(rows) < rows_max and size < BYTES_MAX:
        page = await store.range(prefix, after=after, limit=_PAGE_ROWS, revision=revision)
        rows += page.rows
        size += sum(len(row.value) for row in page.rows)
        if not page.more:
            break
        after = page.rows[-1].key
    return rows


async def read_batches(store: Store, last: int, revision: int, rows_max: int = ROWS_MAX) -> list[Row]:
    """Return the latest batches up to sequence `last` that are not empty, the oldest first. Some sequences have no row."""
    first = await store.range(BATCH_PREFIX, limit=1, revision=revision)
    if not first.rows:
        return []
    oldest = int(first.rows[0].key.removeprefix(BATCH_PREFIX))
    pages, size = list[list[Row]](), 0
    for _ in range(SCANS_MAX):
        low = last - _PAGE_ROWS
        page = await store.range(BATCH_PREFIX, after=batch_key(max(low, 0)), limit=_PAGE_ROWS, revision=revision)
        rows = [row for row in page.rows if row.key <= batch_key(last) and not row.value.endswith(_EMPTY_BATCH_END)]
        pages.append(rows)
        size += sum(len(row.value) for row in rows)
        last = low
        if last < oldest or size >= BYTES_MAX or sum(map(len, pages)) >= rows_max:
            break
    return [row for rows in reversed(pages) for row in rows][-rows_max:]


EVENTS_LIMIT: Final = 200
EVENTS_LIMIT_MAX: Final = 1_000
HEARTBEAT_MS: Final = 5_000

_ROWS_PER_EVENT: Final = 5
"""Rows read per event returned: some have none, and many are folded into one."""

_RECORD_PREFIXES: Final = ("event/", "decision/")
UNLISTED_OPERATIONS: Final = frozenset({"note", "explain", "observe", "report", "acquire", "vacate"})
"""Operations that are not listed when accepted: they leave records of their own, or concern no object."""

_FAILURE_TRANSITIONS: Final = frozenset({"crash", "doubt", "distrust", "lose", "abort"})
"""Transitions that are reported as warnings."""


_NAMED_KINDS: Final = {"mark": "node", "spawn": "workload"}
"""Operations whose audit entries state the name of an object of this kind instead of its key."""


class AccountChange(Struct, frozen=True, kw_only=True):
    """One line of an event watch: one event, not folded with earlier ones."""

    type: Literal["changed"] = "changed"
    revision: int
    object: HistoryEvent


class _Occurrence(NamedTuple):
    """One occurrence of an event, before folding."""

    revision: int
    at: str
    kind: Literal["Normal", "Warning"]
    reason: str
    regarding: str
    source: str
    message: str
    repetitions: int = 1


async def list_events(
    snapshots: ViewSnapshots, regarding: str = "", limit: int = EVENTS_LIMIT
) -> tuple[int, list[HistoryEvent]]:
    """Return the latest events, the newest last, and the revision they are read at."""
    await snapshots.wait_until_current()
    revision, sequence = await snapshots.store.revision(), snapshots.sequence
    enough = ROWS_MAX if regarding else _ROWS_PER_EVENT * limit  # without a subject the newest rows suffice
    batches = await read_batches(snapshots.store, sequence, revision, enough)
    notes = [row for prefix in _RECORD_PREFIXES for row in await read_rows(snapshots.store, prefix, revision)]
    notes = sorted(notes, key=lambda row: row.revision)[-2 * enough :]
    return revision, await snapshots.offload(lambda: fold_occurrences(_occurrences(batches, notes, regarding))[-limit:])


def fold_occurrences(occurrences: Iterable[_Occurrence]) -> list[HistoryEvent]:
    """Fold repeated events into one each, ordered by their last occurrence."""
    events: dict[tuple[str, ...], HistoryEvent] = {}
    for occurrence in sorted(occurrences, key=lambda did: did.revision):
        identity = (occurrence.kind, occurrence.reason, occurrence.regarding, occurrence.source, occurrence.message)
        before = events.pop(identity, None)
        events[identity] = HistoryEvent(
            at=occurrence.at,
            first=occurrence.at if before is None else before.first,
            type=occurrence.kind,
            reason=occurrence.reason,
            regarding=occurrence.regarding,
            source=occurrence.source,
            message=occurrence.message,
            count=occurrence.repetitions + (0 if before is None else before.count),
            revision=occurrence.revision,
        )
    return list(events.values())


async def watch_events(snapshots: ViewSnapshots, regarding: str, after: int | None) -> AsyncGenerator[bytes, None]:
    """Yield every event after revision `after`, or from now on, one line each, not folded."""
    revision = snapshots.watch_cache.revision if after is None else after
    try:
        watch = await snapshots.store.watch("", after=revision)
    except Compacted:
        yield json_line(ResyncLine("compacted"))
        return
    try:
        while True:
            event = None
            with suppress(TimeoutError):
                async with snapshots.clock.timeout_ms(HEARTBEAT_MS):
                    event = await anext(aiter(watch), None)
                    if event is None:
                        return
            if event is None:
                yield json_line(HeartbeatLine(revision))
                continue
            revision = event.revision
            lines = [_change_line(occurrence) for occurrence in _occurrences_in_changes(event.changes, regarding)]
            if lines:
                yield b"".join((*lines, json_line(BookmarkLine(revision))))
    except Lagging:
        yield json_line(ResyncLine("lagging"))
    except Compacted:
        yield json_line(ResyncLine("compacted"))
    except StoreError:
        yield json_line(ResyncLine("lagging", "the store was unavailable: list again, then watch after its revision"))
    finally:
        await watch.close()


def _change_line(occurrence: _Occurrence) -> bytes:
    (item,) = fold_occurrences((occurrence,))
    return json_line(AccountChange(revision=occurrence.revision, object=item))


def _occurrences_in_changes(changes: Iterable[RowChange], regarding: str) -> Iterator[_Occurrence]:
    rows = [Row(change.key, change.value, change.revision) for change in changes if change.value is not None]
    batches = [row for row in rows if row.key.startswith(BATCH_PREFIX)]
    yield from _occurrences(batches, [row for row in rows if row.key.startswith(_RECORD_PREFIXES)], regarding)


# -- occurrences in rows ------------------------------------------------------------------------------------------------------


def _occurrences(batches: Iterable[Row], notes: Iterable[Row], regarding: str) -> Iterator[_Occurrence]:
    subjects, named, times = _SubjectFilter(regarding), regarding.partition("/")[2].encode(), dict[int, str]()
    for row in batches:
        batch = decode_batch(row.value)
        times[row.revision] = batch.at
        if named in row.value:
            yield from (
                occurrence for occurrence in _occurrences_in_batch(row, batch) if subjects.matches(occurrence.regarding)
            )
    for row in notes:
        if named in row.value:
            yield from (
                occurrence
                for occurrence in _occurrences_in_record(row, times.get(row.revision, ""), subjects)
                if subjects.matches(occurrence.regarding)
            )


class _SubjectFilter:
    """Matches one subject, or all if it is empty. A workload includes its replicas."""

    def __init__(self, regarding: str) -> None:
        self._regarding = regarding
        kind, _, path = regarding.partition("/")
        self._replicas = f"replica/{path}-" if kind == "workload" else ""

    def __bool__(self) -> bool:
        return bool(self._regarding)

    def matches(self, subject: str) -> bool:
        if not self._regarding or subject == self._regarding:
            return True
        return bool(self._replicas) and subject.startswith(self._replicas) and subject[len(self._replicas) :].isdigit()


def _occurrences_in_batch(row: Row, batch: BatchRecord) -> Iterator[_Occurrence]:
    for entry in batch.entries:
        if entry.did in UNLISTED_OPERATIONS and not entry.code:
            continue
        verb = entry.did.removeprefix("move ")
        source = entry.actor if entry.actor.startswith(entry.role) else f"{entry.role}/{entry.actor}"
        text = event_text(verb)
        if entry.code:
            message = refused_message(text, entry.detail)
            yield _Occurrence(row.revision, batch.at, "Warning", entry.code, _subject(entry), source, message)
        else:
            message = accepted_message(text, entry.detail)
            kind: Literal["Normal", "Warning"] = "Warning" if _is_failure(verb, entry.detail) else "Normal"
            yield _Occurrence(row.revision, batch.at, kind, text.reason, _subject(entry), source, message)


def _is_failure(verb: str, cause: str) -> bool:
    """Return whether an accepted transition is a failure. A service is restarted within its attempt, so the end of its process
    appears only as the cause of `unready`.
    """
    return verb in _FAILURE_TRANSITIONS or (verb == "unready" and cause.startswith(PROCESS_ENDED))


def _subject(entry: AuditEntry) -> str:
    """Return the key of the object. An entry of `spawn` states only the name of the workload, without the tenant."""
    kind = _NAMED_KINDS.get(entry.did, "")
    return f"{kind}/{entry.subject}" if kind and "/" not in entry.subject else entry.subject


def _occurrences_in_record(row: Row, at: str, subjects: _SubjectFilter) -> Iterator[_Occurrence]:
    try:
        obj = decode(row.value)
    except (msgspec.MsgspecError, ValueError):
        return
    if isinstance(obj, Event):
        spec = obj.spec
        yield _Occurrence(
            row.revision, at, spec.type, spec.reason, spec.regarding, spec.source, spec.message, max(1, spec.count)
        )
    elif isinstance(obj, Decision) and obj.spec.verdict == "waiting":
        decision = obj.spec
        message = f"pending: {decision.detail}" + (
            "; it can never be placed with the nodes, quotas and policies declared now" if decision.never else ""
        )
        names = list(decision.replicas)
        for name in names if subjects else names[:1]:
            more = f" (and {len(names) - 1} more like it)" if not subjects and len(names) > 1 else ""
            yield _Occurrence(row.revision, at, "Warning", decision.reason, f"replica/{name}", "scheduler", message + more)
