"""Progress of workloads, computed from the watch cache when it is read.

Replicas are counted from an index of the cache, so that a page of large workloads does not decode every replica. Only
workloads that are held up need a look at some of their replicas, and only pending ones need recorded decisions. Rows are
decoded off the event loop. The rules are in law/workload_rules.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import islice
from typing import Final, NamedTuple

from remit.law.workload_rules import (
    Limit,
    PendingReason,
    PendingReasons,
    ReplicaCounts,
    count_replicas,
    pending_limit,
    pending_reason,
    pending_reasons,
    phase_limit,
    workload_progress,
)
from remit.model.kinds import Workload
from remit.model.objects import decode
from remit.model.problems import quoted, suggest_names
from remit.model.records import Decision, DecisionSpec, Phase
from remit.model.wire.api_types import WorkloadLimit, WorkloadProgressItem
from remit.observation.watch_cache import CachedRow
from remit.serve.diagnostics.history import read_rows
from remit.serve.diagnostics.view_snapshots import ViewSnapshots
from remit.serve.http.replies import ApiProblem
from remit.store.protocol import Row
from remit.world.interfaces import Offload

REPLICAS_MAX: Final = 20_000
"""Replicas counted for one page; the page ends with the workload that reaches this number. Of the pending replicas of one
workload at most as many are looked at.
"""

STATED_MAX: Final = 64
"""Replicas of one workload that are decoded to find one that has a reason in its status."""


class _WorkloadState(NamedTuple):
    """A workload as cached at one moment: its replicas by phase, the pending ones, and those in the phase that limits it."""

    row: CachedRow
    counts: ReplicaCounts
    pending: Sequence[CachedRow] = ()
    held_up: Sequence[CachedRow] = ()


class WorkloadProgressReader:
    """Computes the progress of workloads. `offload` runs the decoding of rows off the event loop."""

    def __init__(self, snapshots: ViewSnapshots, offload: Offload) -> None:
        self._snapshots, self._offload = snapshots, offload
        self._watch_cache = snapshots.watch_cache

    async def read(self, tenant: str, name: str) -> WorkloadProgressItem:
        """Return the progress of one workload. Raises `ApiProblem`."""
        await self._snapshots.wait_until_current()
        prefix = f"workload/{tenant}/"
        row = self._watch_cache.rows.get(prefix + name)
        if row is None:
            names = [key.removeprefix(prefix) for key, _ in self._watch_cache.of_kind(prefix)]
            detail = f"there is no workload {quoted(name)} in tenant {quoted(tenant)}"
            raise ApiProblem(404, "not_found", detail, field="name", cure=suggest_names(name, names, "workloads"))
        (item,) = await self._items([self._state(row)], f"decision/{tenant}/", f'"{tenant}/{name}-')
        return item

    async def read_page(self, prefix: str, after: str, limit: int) -> tuple[int, list[WorkloadProgressItem], str]:
        """Return the revision of a page, the workloads after key `after` whose keys begin with `prefix`, and the key after
        which the list continues; empty at the end.
        """
        await self._snapshots.wait_until_current()
        revision, states, examined = self._watch_cache.revision, list[_WorkloadState](), 0
        following = (key for key, _ in self._watch_cache.of_kind(prefix) if key > after)
        keys = nsmallest(limit + 1, following)
        for key in keys[:limit]:
            states.append(self._state(self._watch_cache.rows[key]))
            examined += sum(states[-1].counts.phases.values())
            if examined >= REPLICAS_MAX:
                break
        items = await self._items(states, f"decision/{prefix.partition('/')[2]}")
        return revision, items, keys[len(states) - 1] if len(states) < len(keys) else ""

    def _state(self, row: CachedRow) -> _WorkloadState:
        workload: Workload = row.obj
        meta = workload.metadata
        counts = count_replicas(self._watch_cache.by_workload.get((meta.tenant, meta.name), {}).values())
        limit = phase_limit(workload.spec.type, counts.phases).code
        pending = tuple(islice(self._replicas_in(meta.tenant, meta.name, Phase.PENDING, counts), REPLICAS_MAX))
        held_up = islice(self._replicas_in(meta.tenant, meta.name, Phase(limit), counts), STATED_MAX) if limit else ()
        return _WorkloadState(row, counts, pending, () if pending else tuple(held_up))

    def _replicas_in(self, tenant: str, name: str, phase: Phase, counts: ReplicaCounts) -> Iterator[CachedRow]:
        if counts.phases.get(phase):
            cache = self._watch_cache
            in_phase = cache.by_phase[phase]
            yield from (cache.rows[key] for key in cache.by_workload.get((tenant, name), ()) if key in in_phase)

    async def _items(self, states: Sequence[_WorkloadState], decisions: str, mention: str = "") -> list[WorkloadProgressItem]:
        """Return the progress of each workload. `decisions` is the key prefix of decisions about them, `mention` a text that
        each of these decisions contains.
        """
        revision, age_ms = self._watch_cache.revision, self._watch_cache.age_ms()
        rows, oldest = list[Row](), min((row.revision for state in states for row in state.pending), default=0)
        if oldest:
            store = self._snapshots.store
            rows = await read_rows(store, decisions, await store.revision())

        def compute() -> list[WorkloadProgressItem]:
            reasons = pending_reasons(_decisions_since(rows, oldest, mention.encode()))
            return [_item(state, reasons, revision, age_ms) for state in states]

        return await self._offload(compute)


def _decisions_since(rows: Iterable[Row], oldest: int, mention: bytes) -> Iterator[tuple[int, DecisionSpec]]:
    """Yield decisions that are not older than revision `oldest` and have a reason."""
    for row in rows:
        if row.revision >= oldest and b'"reason"' in row.value and mention in row.value:
            decision = decode(row.value)
            if isinstance(decision, Decision):
                yield row.revision, decision.spec


def _item(state: _WorkloadState, reasons: PendingReasons, revision: int, age_ms: int) -> WorkloadProgressItem:
    workload: Workload = state.row.obj
    meta = workload.metadata
    progress = workload_progress(workload, state.counts, _pending_limit(state.pending, reasons), _stated(state.held_up))
    limit = progress.limit
    return WorkloadProgressItem(
        tenant=meta.tenant,
        name=meta.name,
        revision=state.row.revision,
        desired=progress.desired,
        ready=progress.ready,
        placed=progress.placed,
        done=progress.done,
        stages=dict(progress.stages),
        limit=WorkloadLimit(code=limit.code, detail=limit.detail, never=limit.never),
        cache_revision=revision,
        cache_age_ms=age_ms,
    )


def _pending_limit(pending: Sequence[CachedRow], reasons: PendingReasons) -> Limit | None:
    if not pending:
        return None
    return pending_limit([reason for row in pending if (reason := _reason(row, reasons)) is not None])


def _reason(row: CachedRow, reasons: PendingReasons) -> PendingReason | None:
    _, tenant, name = row.key.split("/", 2)
    return pending_reason(tenant, name, row.revision, reasons)


def _stated(rows: Iterable[CachedRow]) -> str:
    """Return the first reason that one of these replicas has in its status."""
    return next((reason for row in rows if (reason := row.obj.status.reason)), "")
