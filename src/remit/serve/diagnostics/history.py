"""Decision and event history from stored batches.

Decisions and batches, put together with a view; nothing is decided.

Whoever has the rows asks here: `remit explain --data` with those of a data directory, the API with those of its store
(`decisions_of`, `read_batches`: the newest ones, since a run leaves very many).

Events, the authority's own record and waits, folded; read from the newest backwards.

What happens often is told once, with how often, and when first and last. A note carries no time of its own: it has that of the
batch which was committed with it, as long as that is kept.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import suppress
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec import Struct

from remit.commitment.outcomes import BATCH, Batch, Entry, batch_key, decode_batch, encode_batch
from remit.model.kinds import Workload
from remit.model.objects import decode
from remit.model.records import Decision, Event, Replica
from remit.model.wire.api_types import HistoryEvent
from remit.observation.scheduler_view import View
from remit.proposal.explain.pending import PlacementInputs
from remit.proposal.explain.result_types import ReplicaExplanation, HistoryEntry, WorkloadExplanation
from remit.proposal.explain.subjects import RecordedHistory, explain_replica, explain_workload
from remit.serve.diagnostics.view_snapshots import ViewSnapshots
from remit.serve.http.streams import BookmarkLine, HeartbeatLine, ResyncLine, json_line
from remit.store.protocol import Change, Compacted, Row, Store, StoreError
from remit.store.protocol import Resync as Lagging

ROWS_MAX: Final = 8_192
BYTES_MAX: Final = 16 << 20
"""How much of what was written down is read for one answer, the newest first."""

SCANS_MAX: Final = 200
"""All batches that are kept, if most tell nothing."""

_PAGE_ROWS: Final = 512
_EMPTY_BATCH_END: Final = encode_batch(Batch(0, 0, 0, 0, "", ()))[-13:]
"""How a batch ends that only says that the authority is there: one a beat, so most of a quiet scope's are such."""


class _BatchTime(msgspec.Struct):
    at: str = ""


_decode_batch_time = msgspec.json.Decoder(_BatchTime).decode


class StoredHistory(NamedTuple):
    """Rows of `decision/tenant/` and `batch/`."""

    decisions: Iterable[Row] = ()
    batches: Iterable[Row] = ()

    def about(self, tenant: str, names: frozenset[str], name_prefix: str) -> RecordedHistory:
        """What is there about these replicas, all of whose names begin `alike`; and when each batch was written."""
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
    """When a batch was, of a wall clock; the rest of the row is not looked at."""
    return _decode_batch_time(row.value).at


def workload_explanation(
    view: View, declared: Workload | None, tenant: str, name: str, written: StoredHistory, rules: PlacementInputs, node: str = ""
) -> WorkloadExplanation:
    """Raises `NoNode` as `explain_workload` does."""
    records = written.about(tenant, replica_names(view.replicas.slots, tenant, name), f"{name}-")
    return explain_workload(view, declared, tenant, name, records, rules, node)


def replica_explanation(view: View, replica: Replica, revision: int, written: StoredHistory, rules: PlacementInputs, node: str = "") -> ReplicaExplanation:
    """Raises `NoNode` as `explain_replica` does."""
    meta = replica.metadata
    records = written.about(meta.tenant, frozenset({meta.name}), meta.name)
    return explain_replica(view, replica, revision, records, rules, node)


def replica_names(keys: Iterable[str], tenant: str, workload: str) -> frozenset[str]:
    """The names of a workload's replicas among these keys: `web-3` is one of web's, and `web-api-3` is not."""
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


# -- reading them ----------------------------------------------------------------------------------------------------------


async def read_rows(store: Store, prefix: str, revision: int, rows_max: int = 2 * ROWS_MAX) -> list[Row]:
    """What begins so: events or decisions. Their names tell no time, and there are only so many (commitment/books.py)."""
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
    """The latest batches up to sequence `last` that tell something, the oldest of them first. Not every sequence left a row."""
    first = await store.range(BATCH, limit=1, revision=revision)
    if not first.rows:
        return []
    oldest = int(first.rows[0].key.removeprefix(BATCH))
    pages, size = list[list[Row]](), 0
    for _ in range(SCANS_MAX):
        low = last - _PAGE_ROWS
        page = await store.range(BATCH, after=batch_key(max(low, 0)), limit=_PAGE_ROWS, revision=revision)
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
"""So many rows are read for each thing that is told: some tell nothing, and many tell the same."""

_RECORD_PREFIXES: Final = ("event/", "decision/")
_UNLISTED_OPERATIONS: Final = frozenset({"note", "explain", "observe", "report", "acquire", "release"})
"""Deeds that are told by what they leave behind, or that tell nothing of any object."""

_FAILURE_TRANSITIONS: Final = frozenset({"crash", "doubt", "distrust", "lose", "abort"})
"""Moves that nobody has wished for."""


class AccountChange(Struct, frozen=True, kw_only=True):
    """One line of a watch: something has happened."""

    type: Literal["changed"] = "changed"
    revision: int
    object: HistoryEvent


class _Occurrence(NamedTuple):
    """One thing that happened, once."""

    revision: int
    at: str
    kind: Literal["Normal", "Warning"]
    reason: str
    regarding: str
    source: str
    message: str
    count: int = 1


async def list_events(snapshots: ViewSnapshots, regarding: str = "", limit: int = EVENTS_LIMIT) -> tuple[int, list[HistoryEvent]]:
    """As of which revision, and what happened up to then; the newest last."""
    await snapshots.wait_until_current()
    revision, sequence = await snapshots.store.revision(), snapshots.sequence
    enough = ROWS_MAX if regarding else _ROWS_PER_EVENT * limit  # of everything, the newest suffices
    batches = await read_batches(snapshots.store, sequence, revision, enough)
    notes = [row for prefix in _RECORD_PREFIXES for row in await read_rows(snapshots.store, prefix, revision)]
    notes = sorted(notes, key=lambda row: row.revision)[-2 * enough :]
    return revision, await snapshots.offload(lambda: fold_occurrences(_occurrences(batches, notes, regarding))[-limit:])


def fold_occurrences(occurrences: Iterable[_Occurrence]) -> list[HistoryEvent]:
    """Each thing once, in the order in which it happened last."""
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
            count=occurrence.count + (0 if before is None else before.count),
            revision=occurrence.revision,
        )
    return list(events.values())


async def watch_events(snapshots: ViewSnapshots, regarding: str, after: int | None) -> AsyncGenerator[bytes, None]:
    """Whatever happens past revision `after`, or from now on, one line each; it is not folded."""
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
        yield json_line(ResyncLine("lagging", "the store was away: list again, then watch after its revision"))
    finally:
        await watch.close()


def _change_line(occurrence: _Occurrence) -> bytes:
    (item,) = fold_occurrences((occurrence,))
    return json_line(AccountChange(revision=occurrence.revision, object=item))


def _occurrences_in_changes(changes: Iterable[Change], regarding: str) -> Iterator[_Occurrence]:
    rows = [Row(change.key, change.value, change.revision) for change in changes if change.value is not None]
    batches = [row for row in rows if row.key.startswith(BATCH)]
    yield from _occurrences(batches, [row for row in rows if row.key.startswith(_RECORD_PREFIXES)], regarding)


# -- what a row tells ----------------------------------------------------------------------------------------------------------


def _occurrences(batches: Iterable[Row], notes: Iterable[Row], regarding: str) -> Iterator[_Occurrence]:
    subjects, named, times = _SubjectFilter(regarding), regarding.partition("/")[2].encode(), dict[int, str]()
    for row in batches:
        batch = decode_batch(row.value)
        times[row.revision] = batch.at
        if named in row.value:
            yield from (occurrence for occurrence in _occurrences_in_batch(row, batch) if subjects.matches(occurrence.regarding))
    for row in notes:
        if named in row.value:
            yield from (occurrence for occurrence in _occurrences_in_record(row, times.get(row.revision, ""), subjects) if subjects.matches(occurrence.regarding))


class _SubjectFilter:
    """Which subjects are asked about: one, with its own; a workload's replicas are its own."""

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


def _occurrences_in_batch(row: Row, batch: Batch) -> Iterator[_Occurrence]:
    for entry in batch.entries:
        if entry.did in _UNLISTED_OPERATIONS and not entry.code:
            continue
        verb = entry.did.removeprefix("move ")
        source = entry.actor if entry.actor.startswith(entry.role) else f"{entry.role}/{entry.actor}"
        if entry.code:
            yield _Occurrence(
                row.revision, batch.at, "Warning", entry.code, _subject(entry), source, f"{verb} refused: {entry.detail}"
            )
        else:
            message = f"{verb} accepted" + (f": {entry.detail}" if entry.detail else "")
            kind: Literal["Normal", "Warning"] = "Warning" if verb in _FAILURE_TRANSITIONS else "Normal"
            yield _Occurrence(row.revision, batch.at, kind, _reason_of_verb(verb), _subject(entry), source, message)


def _reason_of_verb(verb: str) -> str:
    """As reasons are written: `declare-lost` is `DeclareLost`."""
    return "".join(part.capitalize() for part in verb.replace("-", " ").split())


def _subject(entry: Entry) -> str:
    return f"node/{entry.subject}" if entry.did == "mark" and "/" not in entry.subject else entry.subject


def _occurrences_in_record(row: Row, at: str, subjects: _SubjectFilter) -> Iterator[_Occurrence]:
    try:
        obj = decode(row.value)
    except (msgspec.MsgspecError, ValueError):
        return
    if isinstance(obj, Event):
        spec = obj.spec
        yield _Occurrence(row.revision, at, spec.type, spec.reason, spec.regarding, spec.source, spec.message, max(1, spec.count))
    elif isinstance(obj, Decision) and obj.spec.verdict == "waiting":
        decision = obj.spec
        message = f"waits: {decision.detail}" + ("; nothing that is declared now will change that" if decision.never else "")
        names = list(decision.replicas)
        for name in names if subjects else names[:1]:
            more = f" (and {len(names) - 1} more like it)" if not subjects and len(names) > 1 else ""
            yield _Occurrence(row.revision, at, "Warning", decision.reason, f"replica/{name}", "scheduler", message + more)
