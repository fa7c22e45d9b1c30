"""Decision and event history from stored batches.

Decisions and batches, put together with a view; nothing is decided.

Whoever has the rows asks here: `remit explain --data` with those of a data directory, the API with those of its store
(`decisions_of`, `batches_of`: the newest ones, since a run leaves very many).

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
from remit.model.wire.api_types import AccountItem
from remit.observation.scheduler_view import View
from remit.proposal.explain.pending import Rules
from remit.proposal.explain.result_types import ReplicaTold, Told, WorkloadTold
from remit.proposal.explain.subjects import Records, tell_replica, tell_workload
from remit.serve.diagnostics.view_snapshots import Looking
from remit.serve.http.streams import Bookmark, Heartbeat, Resync, line
from remit.store.protocol import Change, Compacted, Row, Store, StoreError
from remit.store.protocol import Resync as Lagging

ROWS_MAX: Final = 8_192
BYTES_MAX: Final = 16 << 20
"""How much of what was written down is read for one answer, the newest first."""

LOOKS_MAX: Final = 200
"""All batches that are kept, if most tell nothing."""

_STRIDE: Final = 512
_EMPTY: Final = encode_batch(Batch(0, 0, 0, 0, "", ()))[-13:]
"""How a batch ends that only says that the authority is there: one a beat, so most of a quiet scope's are such."""


class _At(msgspec.Struct):
    at: str = ""


_decode_at = msgspec.json.Decoder(_At).decode


class Written(NamedTuple):
    """Rows of `decision/tenant/` and `batch/`."""

    decisions: Iterable[Row] = ()
    batches: Iterable[Row] = ()

    def about(self, tenant: str, names: frozenset[str], alike: str) -> Records:
        """What is there about these replicas, all of whose names begin `alike`; and when each batch was written."""
        named = f'"{tenant}/{alike}'.encode()
        decisions = [found for row in self.decisions if named in row.value and (found := _decision(row, tenant, names))]
        subjects = {f"replica/{tenant}/{name}" for name in names}
        answers, at = list[Told](), dict[int, str]()
        for row in self.batches:
            at[row.revision] = written_at(row)
            if f"replica/{tenant}/{alike}".encode() in row.value:
                answers += _answers(row, subjects)
        return Records(decisions, answers, at)


def written_at(row: Row) -> str:
    """When a batch was, of a wall clock; the rest of the row is not looked at."""
    return _decode_at(row.value).at


def told_of_workload(
    view: View, declared: Workload | None, tenant: str, name: str, written: Written, rules: Rules, node: str = ""
) -> WorkloadTold:
    """Raises `NoNode` as `tell_workload` does."""
    records = written.about(tenant, members_of(view.replicas.slots, tenant, name), f"{name}-")
    return tell_workload(view, declared, tenant, name, records, rules, node)


def told_of_replica(view: View, replica: Replica, revision: int, written: Written, rules: Rules, node: str = "") -> ReplicaTold:
    """Raises `NoNode` as `tell_replica` does."""
    meta = replica.metadata
    records = written.about(meta.tenant, frozenset({meta.name}), meta.name)
    return tell_replica(view, replica, revision, records, rules, node)


def members_of(keys: Iterable[str], tenant: str, workload: str) -> frozenset[str]:
    """The names of a workload's replicas among these keys: `web-3` is one of web's, and `web-api-3` is not."""
    prefix = f"replica/{tenant}/{workload}-"
    return frozenset(key.split("/", 2)[2] for key in keys if key.startswith(prefix) and key[len(prefix) :].isdigit())


def _decision(row: Row, tenant: str, names: frozenset[str]) -> tuple[int, Decision] | None:
    thing = decode(row.value)
    if not isinstance(thing, Decision) or names.isdisjoint(name.removeprefix(f"{tenant}/") for name in thing.spec.replicas):
        return None
    return row.revision, thing


def _answers(row: Row, subjects: set[str]) -> Iterator[Told]:
    batch = decode_batch(row.value)
    for entry in batch.entries:
        if entry.subject in subjects:
            said = f"{entry.did} {'refused' if entry.code else 'accepted'}"
            yield Told(row.revision, batch.at, "authority", said, entry.code, entry.detail)


# -- reading them ----------------------------------------------------------------------------------------------------------


async def notes_of(store: Store, prefix: str, revision: int, rows_max: int = 2 * ROWS_MAX) -> list[Row]:
    """What begins so: events or decisions. Their names tell no time, and there are only so many (commitment/books.py)."""
    found, size, after = list[Row](), 0, ""
    while len(found) < rows_max and size < BYTES_MAX:
        page = await store.range(prefix, after=after, limit=_STRIDE, revision=revision)
        found += page.rows
        size += sum(len(row.value) for row in page.rows)
        if not page.more:
            break
        after = page.rows[-1].key
    return found


async def batches_of(store: Store, last: int, revision: int, rows_max: int = ROWS_MAX) -> list[Row]:
    """The latest batches up to sequence `last` that tell something, the oldest of them first. Not every sequence left a row."""
    first = await store.range(BATCH, limit=1, revision=revision)
    if not first.rows:
        return []
    oldest = int(first.rows[0].key.removeprefix(BATCH))
    found, size = list[list[Row]](), 0
    for _ in range(LOOKS_MAX):
        low = last - _STRIDE
        page = await store.range(BATCH, after=batch_key(max(low, 0)), limit=_STRIDE, revision=revision)
        rows = [row for row in page.rows if row.key <= batch_key(last) and not row.value.endswith(_EMPTY)]
        found.append(rows)
        size += sum(len(row.value) for row in rows)
        last = low
        if last < oldest or size >= BYTES_MAX or sum(map(len, found)) >= rows_max:
            break
    return [row for rows in reversed(found) for row in rows][-rows_max:]


LIMIT: Final = 200
LIMIT_MAX: Final = 1_000
HEARTBEAT_MS: Final = 5_000

_EACH: Final = 5
"""So many rows are read for each thing that is told: some tell nothing, and many tell the same."""

_NOTED: Final = ("event/", "decision/")
_SPOKEN_FOR: Final = frozenset({"note", "explain", "observe", "report", "acquire", "release"})
"""Deeds that are told by what they leave behind, or that tell nothing of any object."""

_WRONG: Final = frozenset({"crash", "doubt", "distrust", "lose", "abort"})
"""Moves that nobody has wished for."""


class AccountChange(Struct, frozen=True, kw_only=True):
    """One line of a watch: something has happened."""

    type: Literal["changed"] = "changed"
    revision: int
    object: AccountItem


class _Did(NamedTuple):
    """One thing that happened, once."""

    revision: int
    at: str
    kind: Literal["Normal", "Warning"]
    reason: str
    regarding: str
    source: str
    message: str
    times: int = 1


async def accounted(looking: Looking, regarding: str = "", limit: int = LIMIT) -> tuple[int, list[AccountItem]]:
    """As of which revision, and what happened up to then; the newest last."""
    await looking.caught_up()
    at, last = await looking.store.revision(), looking.sequence
    enough = ROWS_MAX if regarding else _EACH * limit  # of everything, the newest suffices
    batches = await batches_of(looking.store, last, at, enough)
    notes = [row for prefix in _NOTED for row in await notes_of(looking.store, prefix, at)]
    notes = sorted(notes, key=lambda row: row.revision)[-2 * enough :]
    return at, await looking.elsewhere(lambda: folded(_all(batches, notes, regarding))[-limit:])


def folded(dids: Iterable[_Did]) -> list[AccountItem]:
    """Each thing once, in the order in which it happened last."""
    found: dict[tuple[str, ...], AccountItem] = {}
    for did in sorted(dids, key=lambda did: did.revision):
        same = (did.kind, did.reason, did.regarding, did.source, did.message)
        before = found.pop(same, None)
        found[same] = AccountItem(
            at=did.at,
            first=did.at if before is None else before.first,
            type=did.kind,
            reason=did.reason,
            regarding=did.regarding,
            source=did.source,
            message=did.message,
            count=did.times + (0 if before is None else before.count),
            revision=did.revision,
        )
    return list(found.values())


async def watched(looking: Looking, regarding: str, after: int | None) -> AsyncGenerator[bytes, None]:
    """Whatever happens past revision `after`, or from now on, one line each; it is not folded."""
    told = looking.board.revision if after is None else after
    try:
        watch = await looking.store.watch("", after=told)
    except Compacted:
        yield line(Resync("compacted"))
        return
    try:
        while True:
            event = None
            with suppress(TimeoutError):
                async with looking.clock.timeout_ms(HEARTBEAT_MS):
                    event = await anext(aiter(watch), None)
                    if event is None:
                        return
            if event is None:
                yield line(Heartbeat(told))
                continue
            told = event.revision
            lines = [_line(did) for did in _changed(event.changes, regarding)]
            if lines:
                yield b"".join((*lines, line(Bookmark(told))))
    except Lagging:
        yield line(Resync("lagging"))
    except Compacted:
        yield line(Resync("compacted"))
    except StoreError:
        yield line(Resync("lagging", "the store was away: list again, then watch after its revision"))
    finally:
        await watch.close()


def _line(did: _Did) -> bytes:
    (item,) = folded((did,))
    return line(AccountChange(revision=did.revision, object=item))


def _changed(changes: Iterable[Change], regarding: str) -> Iterator[_Did]:
    rows = [Row(change.key, change.value, change.revision) for change in changes if change.value is not None]
    batches = [row for row in rows if row.key.startswith(BATCH)]
    yield from _all(batches, [row for row in rows if row.key.startswith(_NOTED)], regarding)


# -- what a row tells ----------------------------------------------------------------------------------------------------------


def _all(batches: Iterable[Row], notes: Iterable[Row], regarding: str) -> Iterator[_Did]:
    about, named, at = _About(regarding), regarding.partition("/")[2].encode(), dict[int, str]()
    for row in batches:
        batch = decode_batch(row.value)
        at[row.revision] = batch.at
        if named in row.value:
            yield from (did for did in _batch(row, batch) if about.meant(did.regarding))
    for row in notes:
        if named in row.value:
            yield from (did for did in _note(row, at.get(row.revision, ""), about) if about.meant(did.regarding))


class _About:
    """Which subjects are asked about: one, with its own; a workload's replicas are its own."""

    def __init__(self, regarding: str) -> None:
        self._regarding = regarding
        kind, _, path = regarding.partition("/")
        self._replicas = f"replica/{path}-" if kind == "workload" else ""

    def __bool__(self) -> bool:
        return bool(self._regarding)

    def meant(self, subject: str) -> bool:
        if not self._regarding or subject == self._regarding:
            return True
        return bool(self._replicas) and subject.startswith(self._replicas) and subject[len(self._replicas) :].isdigit()


def _batch(row: Row, batch: Batch) -> Iterator[_Did]:
    for entry in batch.entries:
        if entry.did in _SPOKEN_FOR and not entry.code:
            continue
        verb = entry.did.removeprefix("move ")
        source = entry.actor if entry.actor.startswith(entry.role) else f"{entry.role}/{entry.actor}"
        if entry.code:
            yield _Did(
                row.revision, batch.at, "Warning", entry.code, _subject(entry), source, f"{verb} refused: {entry.detail}"
            )
        else:
            said = f"{verb} accepted" + (f": {entry.detail}" if entry.detail else "")
            kind: Literal["Normal", "Warning"] = "Warning" if verb in _WRONG else "Normal"
            yield _Did(row.revision, batch.at, kind, _reason(verb), _subject(entry), source, said)


def _reason(verb: str) -> str:
    """As reasons are written: `declare-lost` is `DeclareLost`."""
    return "".join(part.capitalize() for part in verb.replace("-", " ").split())


def _subject(entry: Entry) -> str:
    return f"node/{entry.subject}" if entry.did == "mark" and "/" not in entry.subject else entry.subject


def _note(row: Row, at: str, about: _About) -> Iterator[_Did]:
    try:
        thing = decode(row.value)
    except (msgspec.MsgspecError, ValueError):
        return
    if isinstance(thing, Event):
        spec = thing.spec
        yield _Did(row.revision, at, spec.type, spec.reason, spec.regarding, spec.source, spec.message, max(1, spec.count))
    elif isinstance(thing, Decision) and thing.spec.verdict == "waiting":
        decision = thing.spec
        message = f"waits: {decision.detail}" + ("; nothing that is declared now will change that" if decision.never else "")
        names = list(decision.replicas)
        for name in names if about else names[:1]:
            more = f" (and {len(names) - 1} more like it)" if not about and len(names) > 1 else ""
            yield _Did(row.revision, at, "Warning", decision.reason, f"replica/{name}", "scheduler", message + more)
