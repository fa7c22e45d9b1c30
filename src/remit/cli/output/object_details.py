"""`describe` page of an object.

Asks for what belongs to it, and prints; the explaining is in explain_shown.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Console
from rich.text import Text

from remit.cli.commands.events import account_path
from remit.cli.commands.events import columns as event_columns
from remit.cli.commands.events import row as event_row
from remit.cli.commands.nodes import format_report_age
from remit.cli.output.console import BAD, GOOD, UNSURE, Sheet, console
from remit.cli.output.object_columns import (
    age,
    columns_of,
    endpoint_columns,
    endpoint_row,
    format_bytes,
    format_cpu,
    row_of,
)
from remit.cli.output.object_list import Found, in_order, load_row_context, or_none
from remit.cli.output.serialization import plain
from remit.cli.session.object_lookup import get_object, tenant_of
from remit.cli.session.workload_progress import format_stages
from remit.model.kinds import Node, Workload
from remit.model.metadata import Condition
from remit.model.objects import AnyObject, dec_hook
from remit.model.problems import escaped
from remit.model.records import Phase, Replica
from remit.world.clock import BootClock

if TYPE_CHECKING:
    from remit.cli.session.kind_names import ObjectRef
    from remit.cli.session.server_call import CommandContext
    from remit.client.api import Api
    from remit.model.wire.api_types import HistoryEvent

INDENT: Final = 14
EVENTS_SHOWN: Final = 20
REPLICAS_SHOWN: Final = 50
TRUTHS: Final = {"True": GOOD, "False": UNSURE, "Unknown": UNSURE}
_AGAINST: Final = ("Failed",)
"""Conditions that are bad if they are true."""


async def show(api: Api, context: CommandContext, refs: Sequence[ObjectRef]) -> None:
    for number, ref in enumerate(refs):
        if number:
            sys.stdout.write("\n")
        await _show(api, context, ref)


async def _show(api: Api, context: CommandContext, ref: ObjectRef) -> None:
    found: AnyObject = await get_object(api, context, ref)
    account = await or_none(api.account(account_path(context, ref), limit=EVENTS_SHOWN)) or ()
    to, wall = console(), BootClock().wall()
    _head(to, found, account, wall)
    if isinstance(found, Workload):
        await _workload(api, to, found)
    elif isinstance(found, Node):
        await _node(api, to, found)
    _values(to, "spec", plain(found).get("spec", {}))
    status = {name: value for name, value in plain(found).get("status", {}).items() if name != "conditions"}
    _values(to, "status", status)
    _conditions(to, getattr(getattr(found, "status", None), "conditions", ()), wall)
    if isinstance(found, Workload | Replica):
        await _explained(api, to, found, tenant_of(context, ref), wall)
    _account(to, account, wall)


# -- parts ---------------------------------------------------------------------------------------------------------------------


def title(to: Console, text: str) -> None:
    to.print(Text(text, style="bold underline" if to.is_terminal else ""), soft_wrap=True)


def field(to: Console, name: str, value: str, style: str = "") -> None:
    to.print(Text.assemble((f"{name + ':':<{INDENT}}", "bold"), (escaped(value), style)), soft_wrap=True)


def _head(to: Console, obj: AnyObject, account: Sequence[HistoryEvent], wall: str) -> None:
    meta, kind = obj.metadata, type(obj).__name__
    field(to, kind.lower(), meta.name)
    if meta.tenant:
        field(to, "tenant", meta.tenant)
    for name in ("labels", "annotations"):
        pairs: Mapping[str, str] = getattr(meta, name, {})
        if pairs:
            field(to, name, ", ".join(f"{key}={value}" for key, value in sorted(pairs.items())))
    owners = ", ".join(f"{one.kind.lower()}/{one.name}" for one in getattr(meta, "owners", ()))
    if owners:
        field(to, "owned by", owners)
    stands = [f"revision {meta.revision}", *([f"generation {meta.generation}"] if meta.generation else [])]
    if account:
        stands.append(f"last change {age(account[-1].at, wall) or '?'} ago")
    field(to, "stands at", ", ".join(stands))
    if getattr(meta, "deleting", False):
        held = ", ".join(getattr(meta, "finalizers", ()))
        field(to, "deleting", f"held by {held}" if held else "once what is left of it has ended", BAD)


async def _workload(api: Api, to: Console, obj: Workload) -> None:
    meta = obj.metadata
    listed = await api.list(Replica, tenant=meta.tenant, fields=f"spec.workload={meta.name}")
    row_context = await load_row_context(api, Found("Workload", [obj], whole=False))
    found = row_context.progress[meta.tenant, meta.name]
    field(to, "progress", f"{found.arrived} of {found.wanted} ready; {format_stages(found)}", GOOD if found.settled else UNSURE)
    if found.limit:
        field(to, "limited by", found.limit + (f": {found.detail}" if found.detail else ""), BAD if found.never else UNSURE)
    if listed.items:
        await _replicas(api, to, in_order(listed.items, ""), all_tenants=False)
    endpoints = [endpoint for endpoint in (await api.endpoints(tenant=meta.tenant)).items if endpoint.service == meta.name]
    if endpoints:
        title(to, "\nEndpoints")
        Sheet(to, endpoint_columns(all_tenants=False)).show(
            endpoint_row(endpoint, all_tenants=False) for endpoint in endpoints[:REPLICAS_SHOWN]
        )


async def _replicas(api: Api, to: Console, replicas: Sequence[Replica], *, all_tenants: bool) -> None:
    title(to, "\nReplicas")
    row_context = await load_row_context(api, Found("Replica", list(replicas)))
    rows = (row_of(replica, row_context, all_tenants=all_tenants) for replica in replicas[:REPLICAS_SHOWN])
    Sheet(to, columns_of("Replica", all_tenants=all_tenants)).show(rows)
    if len(replicas) > REPLICAS_SHOWN:
        to.print(f"and {len(replicas) - REPLICAS_SHOWN} more; `remit get replicas` lists them")


async def _node(api: Api, to: Console, obj: Node) -> None:
    name = obj.metadata.name
    here = (await api.list(Replica, tenant="", fields=f"status.node={name}")).items
    here = [one for one in here if one.status.phase is not Phase.RELEASED]
    tops = [one for one in await or_none(api.top_nodes()) or () if one.node == name]
    for top in tops:
        asked, has = top.requests, top.capacity
        said = top.age_ms is not None
        _used(to, "cpu", format_cpu, asked.cpu_milli, has.cpu_milli, top.cpu_milli if said else None)
        _used(to, "memory", format_bytes, asked.memory_bytes, has.memory_bytes, top.memory_bytes if said else None)
        field(to, "said so", format_report_age(top.age_ms))
    if here:
        await _replicas(api, to, in_order(here, ""), all_tenants=True)


def _used(to: Console, name: str, words: Callable[[int], str], asked: int, has: int, used: int | None) -> None:
    field(to, name, f"{words(asked)} of {words(has)} asked for" + ("" if used is None else f", {words(used)} used"))


def _values(to: Console, name: str, values: Mapping[str, Any]) -> None:
    """As a manifest has them, for what is short; the whole of it is `-o yaml`."""
    from remit.cli.output.serialization import yaml_text

    if not values:
        return
    title(to, f"\n{name.capitalize()}")
    for text in yaml_text(values).splitlines():
        to.print(Text(f"  {text}"), soft_wrap=True)


def _conditions(to: Console, conditions: Sequence[Condition], wall: str) -> None:
    from remit.cli.output.console import Cell, Column

    if not conditions:
        return
    title(to, "\nConditions")
    columns = Column("TYPE"), Column("STATUS"), Column("REASON"), Column("SINCE", right=True), Column("MESSAGE", fluid=True)
    rows = []
    for condition in conditions:
        style = TRUTHS[condition.status] if condition.type not in _AGAINST else BAD if condition.status == "True" else GOOD
        since = age(condition.last_transition, wall) or "-"
        rows.append((condition.type, Cell(condition.status, style), condition.reason or "-", since, condition.message or "-"))
    Sheet(to, columns).show(rows)


async def _explained(api: Api, to: Console, obj: Workload | Replica, tenant: str, wall: str) -> None:
    """Why it waits, if it does; and of what has a place, why there."""
    from remit.cli.output.explanations import show as show_explained
    from remit.proposal.explain.result_types import ReplicaExplanation, WorkloadExplanation

    told = await or_none(api.explain(type(obj), obj.metadata.name, tenant=tenant))
    if told is None:
        return
    shape: Any = WorkloadExplanation if isinstance(obj, Workload) else ReplicaExplanation
    found: ReplicaExplanation | WorkloadExplanation = msgspec.convert(told, shape, dec_hook=dec_hook)
    if isinstance(found, WorkloadExplanation) and not found.groups:
        return
    title(to, "\nWhy")
    show_explained(to, found, verbose=False, wall=wall)


def _account(to: Console, account: Sequence[HistoryEvent], wall: str) -> None:
    if not account:
        return
    title(to, "\nWhat happened")
    about = len({event.regarding for event in account}) > 1
    Sheet(to, event_columns(about=about)).show(event_row(event, wall, about=about) for event in account)
