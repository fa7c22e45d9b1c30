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
from remit.cli.output.object_columns import AGE, Around, columns_of, endpoint_columns, endpoint_row, row_of
from remit.cli.output.object_list import Found, Wish, decisions_of, in_order, name_of, progress_of, surroundings
from remit.cli.output.serialization import plain, spelt
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


async def show_watch(api: Api, asked: CommandContext, kinds: Sequence[str], things: Sequence[ObjectRef], wish: Wish) -> None:
    """For ever; whoever has seen enough interrupts it."""
    kind = kinds[0] if kinds else things[0].kind
    rows = _Rows(api, asked, kind, {thing.name for thing in things}, wish)
    if wish.output in ("table", "wide") and kind == "Workload":
        async with asyncio.TaskGroup() as group:  # its row says how its replicas fare, so they are watched as well
            group.create_task(rows.follow())
            group.create_task(rows.follow_replicas())
    else:
        await rows.follow()


def _lost(why: str) -> None:
    click.echo(f"lost the server, and looking for it: {escaped(why)}", err=True)


class _Rows:
    """What was printed last of each, so that only what differs is printed."""

    def __init__(self, api: Api, asked: CommandContext, kind: str, names: set[str], wish: Wish) -> None:
        self._api, self._asked, self._kind, self._names, self._wish = api, asked, kind, names, wish
        self._everyone = asked.everyone and (kind == ENDPOINTS or is_tenant_scoped(kind))
        self._things: dict[Key, Any] = {}
        self._replicas: dict[Key, Replica] = {}
        self._printed: dict[Key, list[str]] = {}
        self._around = Around()
        self._synced = False
        self._members_told = asyncio.Event()
        self._turn = asyncio.Lock()
        columns = endpoint_columns(everyone=self._everyone) if kind == ENDPOINTS else columns_of(kind, everyone=self._everyone)
        wide = wish.output == "wide"
        self._sheet = Sheet(console(), columns, wide=wide, heads=wish.heads, live=True)
        self._compared = [n for n, one in enumerate(columns) if (wide or not one.wide) and one.head != AGE]

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
        tenant = self._asked.tenant
        if self._kind == ENDPOINTS:
            return self._api.watch_endpoints(tenant=tenant, lost=_lost)
        fields, labels = self._wish.fields, self._wish.labels
        name = next(iter(self._names)) if len(self._names) == 1 else ""
        return self._api.watch(class_of(self._kind), name=name, tenant=tenant, labels=labels, fields=fields, lost=_lost)

    async def _first(self) -> None:
        """All that stood, in order, in one table."""
        if self._wish.output not in ("table", "wide"):
            self._synced = True
            return
        self._around = await self._look(list(self._things.values()))
        for thing in in_order(self._things.values(), self._wish.sort_by):
            self._note(thing)
        self._sheet.show(self._row(thing) for thing in in_order(self._things.values(), self._wish.sort_by))
        sys.stdout.flush()
        self._synced = True
        for key in list(self._things) if self._kind == "Workload" else ():
            await self._recount(key)  # they may have moved while it was asked what they wait for

    async def _look(self, things: list[Any]) -> Around:
        if self._kind == ENDPOINTS:
            return Around()
        if self._kind == "Workload":
            await self._members_told.wait()
            return await self._progress(things)
        return await surroundings(self._api, Found(self._kind, things, whole=not self._names))

    def _wanted(self, thing: Any) -> bool:
        return not self._names or _key(thing)[1] in self._names

    async def _changed(self, thing: Any, revision: int) -> None:
        if not self._wanted(thing):
            return
        self._things[_key(thing)] = thing
        if self._wish.output == "json":
            _line(WatchLine(type="changed", revision=revision, object=Raw(encode(plain(thing)))))
        elif self._wish.output == "name":
            _say(name_of(thing, self._asked))
        elif self._synced:
            await self._refresh(thing)
            self._show(thing)

    async def _deleted(self, told: Deleted) -> None:
        thing = self._things.pop((told.tenant, told.name), None)
        self._printed.pop((told.tenant, told.name), None)
        if thing is None:
            return
        if self._wish.output == "json":
            gone = {"kind": told.kind, "metadata": {"name": told.name, "tenant": told.tenant}}
            _line(WatchLine(type="deleted", revision=told.revision, object=Raw(encode(gone))))
        elif self._wish.output == "name":
            _say(f"{name_of(thing, self._asked)} deleted")
        elif self._synced:
            row = [Cell(_text(cell), FAINT) for cell in self._row(thing)]
            row[2 if self._everyone else 1] = Cell("gone", FAINT)
            self._sheet.show([row])
            sys.stdout.flush()

    async def _progress(self, workloads: list[Workload]) -> Around:
        """From the replicas as they were told here; which reason they wait for is asked for only if any does."""
        members = self._members({_key(one) for one in workloads})
        tenants = sorted({one.metadata.tenant for one in workloads})
        waits = any(one.status.phase is Phase.PENDING for one in members)
        decisions = await decisions_of(self._api, tenants[0] if len(tenants) == 1 else "") if waits else []
        return Around(progress=progress_of(workloads, members, decisions), wall=BootClock().wall())

    def _members(self, keys: set[Key]) -> list[Replica]:
        return [one for one in self._replicas.values() if (one.metadata.tenant, one.spec.workload) in keys]

    async def _refresh(self, thing: Any) -> None:
        """What stands beside it, as far as that may have changed with it. One at a time: what is older must not come later."""
        async with self._turn:
            if self._kind not in ("Workload", "Replica"):
                self._around = self._around._replace(wall=BootClock().wall())
                return
            found, before = await self._look([thing]), self._around
            self._around = Around(
                {**before.progress, **found.progress},
                {**before.reasons, **found.reasons},
                replicas={**before.replicas, **found.replicas},
                wall=found.wall,
            )

    def _show(self, thing: Any) -> None:
        if self._note(thing):
            self._sheet.show([self._row(thing)])
            sys.stdout.flush()

    def _note(self, thing: Any) -> bool:
        """Is its row another than the one printed last?"""
        cells = self._row(thing)
        row = [_text(cells[number]) for number in self._compared]
        if self._printed.get(_key(thing)) == row:
            return False
        self._printed[_key(thing)] = row
        return True

    def _row(self, thing: Any) -> Cells:
        if self._kind == ENDPOINTS:
            return endpoint_row(thing, everyone=self._everyone)
        return row_of(thing, self._around, everyone=self._everyone)

    # -- a workload's replicas -------------------------------------------------------------------------------------------------

    async def follow_replicas(self) -> None:
        """Its row is printed anew when they move."""
        async for told in self._api.watch(Replica, tenant=self._asked.tenant):
            key: Key | None = None
            match told:
                case Changed():
                    self._replicas[_key(told.object)] = told.object
                    key = told.object.metadata.tenant, told.object.spec.workload
                case Deleted():
                    gone = self._replicas.pop((told.tenant, told.name), None)
                    key = (gone.metadata.tenant, gone.spec.workload) if gone is not None else None
                case Synced():
                    self._members_told.set()
            if self._synced and self._members_told.is_set() and key is not None:
                await self._recount(key)

    async def _recount(self, key: Key) -> None:
        thing: Workload | None = self._things.get(key)
        before = self._around.progress.get(key)
        if thing is None:
            return
        if before is None or summarize_progress(thing, self._members({key})).stages != before.stages:
            await self._refresh(thing)
            self._show(thing)


def _key(thing: Any) -> Key:
    if hasattr(thing, "metadata"):
        return thing.metadata.tenant, thing.metadata.name
    return thing.tenant, thing.replica


def _text(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def _line(line: WatchLine) -> None:
    sys.stdout.write(spelt(encode(line).decode()) + "\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stdout.write(f"{escaped(text)}\n")
    sys.stdout.flush()
