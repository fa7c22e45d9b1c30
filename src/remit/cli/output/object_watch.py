"""Watches objects, printing changed rows.

Prints a row whenever one is another than before; lists again by itself if the server is lost.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from msgspec import Raw

from remit.cli.output.console import FAINT, Cell, Cells, Sheet, console
from remit.cli.output.object_columns import AGE, RowContext, columns_of, endpoint_columns, endpoint_row, row_of
from remit.cli.output.object_list import Found, ListOptions, decisions_of, in_order, load_row_context, name_of, progress_of
from remit.cli.output.serialization import escape_json, plain
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
    """For ever; whoever has seen enough interrupts it."""
    kind = kinds[0] if kinds else refs[0].kind
    rows = _Rows(api, context, kind, {ref.name for ref in refs}, options)
    if options.output in ("table", "wide") and kind == "Workload":
        async with asyncio.TaskGroup() as group:  # its row says how its replicas fare, so they are watched as well
            group.create_task(rows.follow())
            group.create_task(rows.follow_replicas())
    else:
        await rows.follow()


def _lost(why: str) -> None:
    click.echo(f"lost the server, and looking for it: {escaped(why)}", err=True)


class _Rows:
    """What was printed last of each, so that only what differs is printed."""

    def __init__(self, api: Api, context: CommandContext, kind: str, names: set[str], options: ListOptions) -> None:
        self._api, self._context, self._kind, self._names, self._options = api, context, kind, names, options
        self._all_tenants = context.all_tenants and (kind == ENDPOINTS or is_tenant_scoped(kind))
        self._objects: dict[Key, Any] = {}
        self._replicas: dict[Key, Replica] = {}
        self._printed: dict[Key, list[str]] = {}
        self._row_context = RowContext()
        self._synced = False
        self._replicas_synced = asyncio.Event()
        self._turn = asyncio.Lock()
        columns = (
            endpoint_columns(all_tenants=self._all_tenants)
            if kind == ENDPOINTS
            else columns_of(kind, all_tenants=self._all_tenants)
        )
        wide = options.output == "wide"
        self._sheet = Sheet(console(), columns, wide=wide, heads=options.heads, live=True)
        self._compared = [n for n, column in enumerate(columns) if (wide or not column.wide) and column.head != AGE]

    async def follow(self) -> None:
        async for told in self._told():
            match told:
                case Changed():
                    await self._changed(told.object, told.revision)
                case Deleted():
                    await self._deleted(told)
                case Synced() if not self._synced:
                    await self._first()

    def _told(self) -> AsyncIterator[Any]:
        tenant = self._context.tenant
        if self._kind == ENDPOINTS:
            return self._api.watch_endpoints(tenant=tenant, lost=_lost)
        fields, labels = self._options.fields, self._options.labels
        name = next(iter(self._names)) if len(self._names) == 1 else ""
        return self._api.watch(class_of(self._kind), name=name, tenant=tenant, labels=labels, fields=fields, lost=_lost)

    async def _first(self) -> None:
        """All that stood, in order, in one table."""
        if self._options.output not in ("table", "wide"):
            self._synced = True
            return
        self._row_context = await self._look(list(self._objects.values()))
        for obj in in_order(self._objects.values(), self._options.sort_by):
            self._note(obj)
        self._sheet.show(self._row(obj) for obj in in_order(self._objects.values(), self._options.sort_by))
        sys.stdout.flush()
        self._synced = True
        for key in list(self._objects) if self._kind == "Workload" else ():
            await self._recount(key)  # they may have moved while it was asked what they wait for

    async def _look(self, objects: list[Any]) -> RowContext:
        if self._kind == ENDPOINTS:
            return RowContext()
        if self._kind == "Workload":
            await self._replicas_synced.wait()
            return await self._progress(objects)
        return await load_row_context(self._api, Found(self._kind, objects, whole=not self._names))

    def _wanted(self, obj: Any) -> bool:
        return not self._names or _key(obj)[1] in self._names

    async def _changed(self, obj: Any, revision: int) -> None:
        if not self._wanted(obj):
            return
        self._objects[_key(obj)] = obj
        if self._options.output == "json":
            _line(WatchLine(type="changed", revision=revision, object=Raw(encode(plain(obj)))))
        elif self._options.output == "name":
            _say(name_of(obj, self._context))
        elif self._synced:
            await self._refresh(obj)
            self._show(obj)

    async def _deleted(self, told: Deleted) -> None:
        obj = self._objects.pop((told.tenant, told.name), None)
        self._printed.pop((told.tenant, told.name), None)
        if obj is None:
            return
        if self._options.output == "json":
            gone = {"kind": told.kind, "metadata": {"name": told.name, "tenant": told.tenant}}
            _line(WatchLine(type="deleted", revision=told.revision, object=Raw(encode(gone))))
        elif self._options.output == "name":
            _say(f"{name_of(obj, self._context)} deleted")
        elif self._synced:
            row = [Cell(_text(cell), FAINT) for cell in self._row(obj)]
            row[2 if self._all_tenants else 1] = Cell("gone", FAINT)
            self._sheet.show([row])
            sys.stdout.flush()

    async def _progress(self, workloads: list[Workload]) -> RowContext:
        """From the replicas as they were told here; which reason they wait for is asked for only if any does."""
        members = self._members({_key(workload) for workload in workloads})
        tenants = sorted({workload.metadata.tenant for workload in workloads})
        waits = any(replica.status.phase is Phase.PENDING for replica in members)
        decisions = await decisions_of(self._api, tenants[0] if len(tenants) == 1 else "") if waits else []
        return RowContext(progress=progress_of(workloads, members, decisions), wall=BootClock().wall())

    def _members(self, keys: set[Key]) -> list[Replica]:
        return [replica for replica in self._replicas.values() if (replica.metadata.tenant, replica.spec.workload) in keys]

    async def _refresh(self, obj: Any) -> None:
        """What stands beside it, as far as that may have changed with it. One at a time: what is older must not come later."""
        async with self._turn:
            if self._kind not in ("Workload", "Replica"):
                self._row_context = self._row_context._replace(wall=BootClock().wall())
                return
            found, before = await self._look([obj]), self._row_context
            self._row_context = RowContext(
                {**before.progress, **found.progress},
                {**before.reasons, **found.reasons},
                replicas={**before.replicas, **found.replicas},
                wall=found.wall,
            )

    def _show(self, obj: Any) -> None:
        if self._note(obj):
            self._sheet.show([self._row(obj)])
            sys.stdout.flush()

    def _note(self, obj: Any) -> bool:
        """Is its row another than the one printed last?"""
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

    # -- a workload's replicas -------------------------------------------------------------------------------------------------

    async def follow_replicas(self) -> None:
        """Its row is printed anew when they move."""
        async for told in self._api.watch(Replica, tenant=self._context.tenant):
            key: Key | None = None
            match told:
                case Changed():
                    self._replicas[_key(told.object)] = told.object
                    key = told.object.metadata.tenant, told.object.spec.workload
                case Deleted():
                    gone = self._replicas.pop((told.tenant, told.name), None)
                    key = (gone.metadata.tenant, gone.spec.workload) if gone is not None else None
                case Synced():
                    self._replicas_synced.set()
            if self._synced and self._replicas_synced.is_set() and key is not None:
                await self._recount(key)

    async def _recount(self, key: Key) -> None:
        obj: Workload | None = self._objects.get(key)
        before = self._row_context.progress.get(key)
        if obj is None:
            return
        if before is None or summarize_progress(obj, self._members({key})).stages != before.stages:
            await self._refresh(obj)
            self._show(obj)


def _key(obj: Any) -> Key:
    if hasattr(obj, "metadata"):
        return obj.metadata.tenant, obj.metadata.name
    return obj.tenant, obj.replica


def _text(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def _line(line: WatchLine) -> None:
    sys.stdout.write(escape_json(encode(line).decode()) + "\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stdout.write(f"{escaped(text)}\n")
    sys.stdout.flush()
