"""Watches objects and prints a row whenever it changes. The watch resumes after a lost connection."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from msgspec import Raw

from remit.cli.output.console import FAINT, Cell, Cells, Sheet, console
from remit.cli.output.object_columns import AGE, RowContext, columns_of, endpoint_columns, endpoint_row, row_of
from remit.cli.output.object_list import (
    ListOptions,
    ObjectList,
    decisions_of,
    load_row_context,
    name_of,
    progress_of,
    sort_objects,
)
from remit.cli.output.serialization import escape_json, to_builtins
from remit.cli.session.kind_names import ENDPOINTS, ObjectRef, is_tenant_scoped
from remit.cli.session.object_lookup import class_of
from remit.cli.session.workload_progress import summarize_progress
from remit.client.api import Changed, Deleted, Synced
from remit.model.kinds import Workload
from remit.model.objects import encode
from remit.model.problems import escaped
from remit.model.records import Phase, Replica
from remit.model.wire.api_types import WatchLine
from remit.world.clock import BootClock

if TYPE_CHECKING:
    from remit.cli.session.server_call import CommandContext
    from remit.client.api import Api

Key = tuple[str, str]


async def show_watch(
    api: Api, context: CommandContext, kinds: Sequence[str], refs: Sequence[ObjectRef], options: ListOptions
) -> None:
    """Print changes until interrupted."""
    kind = kinds[0] if kinds else refs[0].kind
    rows = _Rows(api, context, kind, {ref.name for ref in refs}, options)
    if options.output in ("table", "wide") and kind == "Workload":
        async with asyncio.TaskGroup() as group:  # workload rows show the state of replicas, so replicas are watched too
            group.create_task(rows.follow())
            group.create_task(rows.follow_replicas())
    else:
        await rows.follow()


def _report_lost(reason: str) -> None:
    click.echo(f"connection lost, reconnecting: {escaped(reason)}", err=True)


class _Rows:
    """Watches the objects of one kind, and remembers the last printed row of each to print only changes."""

    def __init__(self, api: Api, context: CommandContext, kind: str, names: set[str], options: ListOptions) -> None:
        self._api, self._context, self._kind, self._names, self._options = api, context, kind, names, options
        self._all_tenants = context.all_tenants and (kind == ENDPOINTS or is_tenant_scoped(kind))
        self._objects: dict[Key, Any] = {}
        self._replicas: dict[Key, Replica] = {}
        self._printed: dict[Key, list[str]] = {}
        self._row_context = RowContext()
        self._synced = False
        self._replicas_synced = asyncio.Event()
        self._refresh_lock = asyncio.Lock()
        columns = (
            endpoint_columns(all_tenants=self._all_tenants)
            if kind == ENDPOINTS
            else columns_of(kind, all_tenants=self._all_tenants)
        )
        wide = options.output == "wide"
        self._sheet = Sheet(console(), columns, wide=wide, headings=options.headings, live=True)
        self._compared = [n for n, column in enumerate(columns) if (wide or not column.wide) and column.heading != AGE]

    async def follow(self) -> None:
        async for event in self._watch():
            match event:
                case Changed():
                    await self._on_changed(event.object, event.revision)
                case Deleted():
                    await self._on_deleted(event)
                case Synced() if not self._synced:
                    await self._print_initial()

    def _watch(self) -> AsyncIterator[Any]:
        tenant = self._context.tenant
        if self._kind == ENDPOINTS:
            return self._api.watch_endpoints(tenant=tenant, lost=_report_lost)
        fields, labels = self._options.fields, self._options.labels
        name = next(iter(self._names)) if len(self._names) == 1 else ""
        return self._api.watch(class_of(self._kind), name=name, tenant=tenant, labels=labels, fields=fields, lost=_report_lost)

    async def _print_initial(self) -> None:
        """Print the initial objects, sorted, as one table."""
        if self._options.output not in ("table", "wide"):
            self._synced = True
            return
        self._row_context = await self._load(list(self._objects.values()))
        for obj in sort_objects(self._objects.values(), self._options.sort_by):
            self._record_row(obj)
        self._sheet.show(self._row(obj) for obj in sort_objects(self._objects.values(), self._options.sort_by))
        sys.stdout.flush()
        self._synced = True
        for key in list(self._objects) if self._kind == "Workload" else ():
            await self._recount(key)  # replicas may have changed while their pending reasons were loaded

    async def _load(self, objects: list[Any]) -> RowContext:
        if self._kind == ENDPOINTS:
            return RowContext()
        if self._kind == "Workload":
            await self._replicas_synced.wait()
            return await self._progress(objects)
        return await load_row_context(self._api, ObjectList(self._kind, objects, complete=not self._names))

    def _is_selected(self, obj: Any) -> bool:
        return not self._names or _key(obj)[1] in self._names

    async def _on_changed(self, obj: Any, revision: int) -> None:
        if not self._is_selected(obj):
            return
        self._objects[_key(obj)] = obj
        if self._options.output == "json":
            _print_json(WatchLine(type="changed", revision=revision, object=Raw(encode(to_builtins(obj)))))
        elif self._options.output == "name":
            _print_line(name_of(obj, self._context))
        elif self._synced:
            await self._refresh(obj)
            self._show(obj)

    async def _on_deleted(self, event: Deleted) -> None:
        obj = self._objects.pop((event.tenant, event.name), None)
        self._printed.pop((event.tenant, event.name), None)
        if obj is None:
            return
        if self._options.output == "json":
            deleted = {"kind": event.kind, "metadata": {"name": event.name, "tenant": event.tenant}}
            _print_json(WatchLine(type="deleted", revision=event.revision, object=Raw(encode(deleted))))
        elif self._options.output == "name":
            _print_line(f"{name_of(obj, self._context)} deleted")
        elif self._synced:
            row = [Cell(_text(cell), FAINT) for cell in self._row(obj)]
            row[2 if self._all_tenants else 1] = Cell("deleted", FAINT)
            self._sheet.show([row])
            sys.stdout.flush()

    async def _progress(self, workloads: list[Workload]) -> RowContext:
        """Compute the progress from the watched replicas. Decisions are requested only if a replica is pending."""
        members = self._members({_key(workload) for workload in workloads})
        tenants = sorted({workload.metadata.tenant for workload in workloads})
        any_pending = any(replica.status.phase is Phase.PENDING for replica in members)
        decisions = await decisions_of(self._api, tenants[0] if len(tenants) == 1 else "") if any_pending else []
        return RowContext(progress=progress_of(workloads, members, decisions), wall=BootClock().wall())

    def _members(self, keys: set[Key]) -> list[Replica]:
        return [replica for replica in self._replicas.values() if (replica.metadata.tenant, replica.spec.workload) in keys]

    async def _refresh(self, obj: Any) -> None:
        """Reload the data that the row needs besides the object. The lock keeps an older answer from replacing a newer one."""
        async with self._refresh_lock:
            if self._kind not in ("Workload", "Replica"):
                self._row_context = self._row_context._replace(wall=BootClock().wall())
                return
            loaded, previous = await self._load([obj]), self._row_context
            self._row_context = RowContext(
                {**previous.progress, **loaded.progress},
                {**previous.reasons, **loaded.reasons},
                replicas={**previous.replicas, **loaded.replicas},
                wall=loaded.wall,
            )

    def _show(self, obj: Any) -> None:
        if self._record_row(obj):
            self._sheet.show([self._row(obj)])
            sys.stdout.flush()

    def _record_row(self, obj: Any) -> bool:
        """Record the row. Returns False if it equals the last printed one."""
        cells = self._row(obj)
        row = [_text(cells[number]) for number in self._compared]
        if self._printed.get(_key(obj)) == row:
            return False
        self._printed[_key(obj)] = row
        return True

    def _row(self, obj: Any) -> Cells:
        if self._kind == ENDPOINTS:
            return endpoint_row(obj, all_tenants=self._all_tenants)
        return row_of(obj, self._row_context, all_tenants=self._all_tenants)

    # -- replicas of workloads -------------------------------------------------------------------------------------------------

    async def follow_replicas(self) -> None:
        """Watch replicas, and print the row of their workload again when its stages change."""
        async for event in self._api.watch(Replica, tenant=self._context.tenant):
            key: Key | None = None
            match event:
                case Changed():
                    self._replicas[_key(event.object)] = event.object
                    key = event.object.metadata.tenant, event.object.spec.workload
                case Deleted():
                    deleted = self._replicas.pop((event.tenant, event.name), None)
                    key = (deleted.metadata.tenant, deleted.spec.workload) if deleted is not None else None
                case Synced():
                    self._replicas_synced.set()
            if self._synced and self._replicas_synced.is_set() and key is not None:
                await self._recount(key)

    async def _recount(self, key: Key) -> None:
        obj: Workload | None = self._objects.get(key)
        previous = self._row_context.progress.get(key)
        if obj is None:
            return
        if previous is None or summarize_progress(obj, self._members({key})).stages != previous.stages:
            await self._refresh(obj)
            self._show(obj)


def _key(obj: Any) -> Key:
    if hasattr(obj, "metadata"):
        return obj.metadata.tenant, obj.metadata.name
    return obj.tenant, obj.replica


def _text(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def _print_json(line: WatchLine) -> None:
    sys.stdout.write(escape_json(encode(line).decode()) + "\n")
    sys.stdout.flush()


def _print_line(text: str) -> None:
    sys.stdout.write(f"{escaped(text)}\n")
    sys.stdout.flush()
