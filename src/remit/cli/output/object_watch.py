"""Watches objects and prints a row whenever it changes. The watch resumes after a lost connection."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Raw

from remit.cli.output.console import FAINT, Cell, Cells, Sheet, console
from remit.cli.output.object_columns import AGE, RowContext, columns_of, endpoint_columns, endpoint_row, row_of
from remit.cli.output.object_list import ListOptions, ObjectList, load_row_context, name_of, sort_objects
from remit.cli.output.serialization import escape_json, to_builtins
from remit.cli.session.kind_names import ENDPOINTS, ObjectRef, is_tenant_scoped
from remit.cli.session.object_lookup import class_of
from remit.client.api import ApiError, Changed, Deleted, Synced, Unanswered
from remit.model.objects import encode
from remit.model.problems import escaped
from remit.model.records import Replica
from remit.model.wire.api_types import WatchLine
from remit.world.clock import BootClock

if TYPE_CHECKING:
    from remit.cli.session.server_call import CommandContext
    from remit.client.api import Api

Key = tuple[str, str]

REFRESH_PAUSE_MS: Final = 300
"""Pause between two requests for the progress of changed workloads."""

NAMED_REFRESH_MAX: Final = 8
"""Workloads whose progress is requested one by one. If more have changed, all are listed."""


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
            group.create_task(rows.refresh_workloads())
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
        self._printed: dict[Key, list[str]] = {}
        self._row_context = RowContext()
        self._synced = asyncio.Event()
        """Set when the initial objects have been printed."""
        self._revision = 0
        """Revision of the initial objects."""
        self._stale_workloads: dict[Key, None] = {}
        """Workloads that have changed, or whose replicas have, since their progress was requested."""
        self._has_stale = asyncio.Event()
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
                case Synced() if not self._synced.is_set():
                    self._revision = event.revision
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
            self._synced.set()
            return
        self._row_context = await self._load(list(self._objects.values()))
        for obj in sort_objects(self._objects.values(), self._options.sort_by):
            self._record_row(obj)
        self._sheet.show(self._row(obj) for obj in sort_objects(self._objects.values(), self._options.sort_by))
        sys.stdout.flush()
        self._synced.set()

    async def _load(self, objects: list[Any]) -> RowContext:
        if self._kind == ENDPOINTS:
            return RowContext()
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
        elif self._synced.is_set() and self._kind == "Workload":
            self._mark_stale(_key(obj))
        elif self._synced.is_set():
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
        elif self._synced.is_set():
            row = [Cell(_text(cell), FAINT) for cell in self._row(obj)]
            row[2 if self._all_tenants else 1] = Cell("deleted", FAINT)
            self._sheet.show([row])
            sys.stdout.flush()

    async def _refresh(self, obj: Any) -> None:
        """Reload the data that the row needs besides the object."""
        if self._kind != "Replica":
            self._row_context = self._row_context._replace(wall=BootClock().wall())
            return
        loaded, previous = await self._load([obj]), self._row_context
        self._row_context = RowContext(
            reasons={**previous.reasons, **loaded.reasons}, replicas={**previous.replicas, **loaded.replicas}, wall=loaded.wall
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

    # -- progress of workloads -------------------------------------------------------------------------------------------------

    async def follow_replicas(self) -> None:
        """Watch changes of replicas, and mark the progress of their workloads as stale."""
        await self._synced.wait()
        async for event in self._api.watch(Replica, tenant=self._context.tenant, after=self._revision):
            match event:
                case Changed():
                    self._mark_stale((event.object.metadata.tenant, event.object.spec.workload))
                case Deleted():
                    self._mark_stale((event.tenant, event.name.rpartition("-")[0]))

    def _mark_stale(self, key: Key) -> None:
        if key in self._objects:
            self._stale_workloads[key] = None
            self._has_stale.set()

    async def refresh_workloads(self) -> None:
        """Request the progress of stale workloads, at most once per pause, and print the rows that have changed."""
        while True:
            await self._has_stale.wait()
            self._has_stale.clear()
            stale, self._stale_workloads = self._stale_workloads, {}
            if await self._load_progress([self._objects[key] for key in stale if key in self._objects]):
                for key in stale:
                    if key in self._objects:
                        self._show(self._objects[key])
            else:
                self._stale_workloads = {**stale, **self._stale_workloads}
                self._has_stale.set()
            await BootClock().sleep_ms(REFRESH_PAUSE_MS)

    async def _load_progress(self, workloads: list[Any]) -> bool:
        """Update the progress of these workloads. Returns False if the server did not answer; the watch goes on."""
        try:
            complete = len(workloads) > NAMED_REFRESH_MAX
            loaded = await load_row_context(self._api, ObjectList("Workload", workloads, complete=complete))
        except Unanswered:
            return False
        except ApiError as error:
            if error.status in (401, 403):
                raise
            return False
        progress = {**self._row_context.progress, **loaded.progress}
        self._row_context = RowContext({key: progress[key] for key in progress if key in self._objects}, wall=loaded.wall)
        return True


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
