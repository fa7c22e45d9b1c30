"""What was written down about a replica or a workload? Decisions and batches, put together with a view; nothing is decided.

Whoever has the rows asks here: `remit explain --data` with those of a data directory, the API with those of its store
(`decisions_of`, `batches_of`: the newest ones, since a run leaves very many).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from remit.commitment.outcomes import BATCH, Batch, batch_key, decode_batch, encode_batch
from remit.model.kinds import Workload
from remit.model.objects import decode
from remit.model.records import Decision, Replica
from remit.observation.view import View
from remit.proposal.explained import ReplicaTold, Told, WorkloadTold
from remit.proposal.explaining import Rules
from remit.proposal.telling import Records, tell_replica, tell_workload
from remit.store.protocol import Row, Store

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
