"""Prints the `describe` page of an object. Explanations are formatted in explanations.py."""

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
from remit.cli.output.object_list import ObjectList, load_row_context, or_none, sort_objects
from remit.cli.output.serialization import to_builtins
from remit.cli.session.object_lookup import get_object, tenant_of
from remit.cli.session.workload_progress import format_limit, format_stages, load_progress
from remit.model.kinds import Node, Workload
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Condition
from remit.model.objects import dec_hook
from remit.model.problems import escaped
from remit.model.records import Phase, Replica
from remit.world.clock import BootClock

if TYPE_CHECKING:
    from remit.cli.session.kind_names import ObjectRef
    from remit.cli.session.server_call import CommandContext
    from remit.client.api import Api
    from remit.model.wire.api_types import HistoryEvent, WorkloadProgressItem

INDENT: Final = 14
EVENTS_SHOWN: Final = 20
REPLICAS_SHOWN: Final = 50
TRUTHS: Final = {"True": GOOD, "False": UNSURE, "Unknown": UNSURE}
_AGAINST: Final = ("Failed",)
"""Condition types whose true status is a failure."""


async def show(api: Api, context: CommandContext, refs: Sequence[ObjectRef]) -> None:
    for number, ref in enumerate(refs):
        if number:
            sys.stdout.write("\n")
        await _show(api, context, ref)


async def _show(api: Api, context: CommandContext, ref: ObjectRef) -> None:
    obj: AnyObject = await get_object(api, context, ref)
    events = await or_none(api.account(account_path(context, ref), limit=EVENTS_SHOWN)) or ()
    out, now = console(), BootClock().wall()
    _head(out, obj, events, now)
    if isinstance(obj, Workload):
        await _workload(api, out, obj)
    elif isinstance(obj, Node):
        await _node(api, out, obj)
    _values(out, "spec", to_builtins(obj).get("spec", {}))
    status = {name: value for name, value in to_builtins(obj).get("status", {}).items() if name != "conditions"}
    if isinstance(obj, Replica):
        status = {"charged to" if name == "grants" else name: value for name, value in status.items()}
    _values(out, "status", status)
    _conditions(out, getattr(getattr(obj, "status", None), "conditions", ()), now)
    if isinstance(obj, Workload | Replica):
        await _explanation(api, out, obj, tenant_of(context, ref), now)
    _events(out, events, now)


# -- sections ------------------------------------------------------------------------------------------------------------------


def title(out: Console, text: str) -> None:
    out.print(Text(text, style="bold underline" if out.is_terminal else ""), soft_wrap=True)


def field(out: Console, name: str, value: str, style: str = "") -> None:
    out.print(Text.assemble((f"{name + ':':<{INDENT}}", "bold"), (escaped(value), style)), soft_wrap=True)


def _head(out: Console, obj: AnyObject, events: Sequence[HistoryEvent], now: str) -> None:
    meta, kind = obj.metadata, type(obj).__name__
    field(out, kind.lower(), meta.name)
    if meta.tenant:
        field(out, "tenant", meta.tenant)
    for name in ("labels", "annotations"):
        pairs: Mapping[str, str] = getattr(meta, name, {})
        if pairs:
            field(out, name, ", ".join(f"{key}={value}" for key, value in sorted(pairs.items())))
    owners = ", ".join(f"{item.kind.lower()}/{item.name}" for item in getattr(meta, "owners", ()))
    if owners:
        field(out, "owned by", owners)
    versions = [f"revision {meta.revision}", *([f"generation {meta.generation}"] if meta.generation else [])]
    field(out, "version", ", ".join(versions))
    if events:
        field(out, "last event", f"{age(events[-1].at, now) or '?'} ago")
    if getattr(meta, "deleting", False):
        finalizers = ", ".join(getattr(meta, "finalizers", ()))
        field(
            out,
            "deleting",
            f"waiting for finalizers {finalizers}" if finalizers else "waiting until its replicas have stopped",
            BAD,
        )


async def _workload(api: Api, out: Console, workload: Workload) -> None:
    meta = workload.metadata
    listed = await api.list(Replica, tenant=meta.tenant, fields=f"spec.workload={meta.name}")
    progress = await load_progress(api, meta.name, meta.tenant)
    if progress is not None:
        limit = format_limit(progress)
        released = sum(replica.status.phase is Phase.RELEASED for replica in listed.items)
        text = _progress_text(workload, progress, released)
        field(out, "progress", text, UNSURE if limit else GOOD)
        if limit:
            field(out, "limited by", limit, BAD if progress.limit.never else UNSURE)
    if listed.items:
        await _replicas(api, out, sort_objects(listed.items, ""), all_tenants=False)
    endpoints = [endpoint for endpoint in (await api.endpoints(tenant=meta.tenant)).items if endpoint.service == meta.name]
    if endpoints:
        title(out, "\nEndpoints")
        Sheet(out, endpoint_columns(all_tenants=False)).show(
            endpoint_row(endpoint, all_tenants=False) for endpoint in endpoints[:REPLICAS_SHOWN]
        )


def _progress_text(workload: Workload, progress: WorkloadProgressItem, released: int) -> str:
    """Format how many replicas are ready, or done, and the stages of all. Released replicas have ended and are in no stage."""
    is_job = workload.spec.type == "job"
    stages = format_stages(progress) if progress.stages else f"ended {released:,}" if released else "no replicas"
    return f"{progress.ready} of {progress.desired} {'done' if is_job else 'ready'}; {stages}"


async def _replicas(api: Api, out: Console, replicas: Sequence[Replica], *, all_tenants: bool) -> None:
    title(out, "\nReplicas")
    row_context = await load_row_context(api, ObjectList("Replica", list(replicas)))
    rows = (row_of(replica, row_context, all_tenants=all_tenants) for replica in replicas[:REPLICAS_SHOWN])
    Sheet(out, columns_of("Replica", all_tenants=all_tenants)).show(rows)
    if len(replicas) > REPLICAS_SHOWN:
        out.print(f"and {len(replicas) - REPLICAS_SHOWN} more; `remit get replicas` lists them")


async def _node(api: Api, out: Console, obj: Node) -> None:
    name = obj.metadata.name
    replicas = (await api.list(Replica, tenant="", fields=f"status.node={name}")).items
    replicas = [item for item in replicas if item.status.phase is not Phase.RELEASED]
    tops = [item for item in await or_none(api.top_nodes()) or () if item.node == name]
    for top in tops:
        requested, capacity = top.requests, top.capacity
        reported = top.age_ms is not None
        _used(out, "cpu", format_cpu, requested.cpu_milli, capacity.cpu_milli, top.cpu_milli if reported else None)
        _used(
            out, "memory", format_bytes, requested.memory_bytes, capacity.memory_bytes, top.memory_bytes if reported else None
        )
        field(out, "last report", format_report_age(top.age_ms))
    if replicas:
        await _replicas(api, out, sort_objects(replicas, ""), all_tenants=True)


def _used(out: Console, name: str, format_value: Callable[[int], str], requested: int, capacity: int, used: int | None) -> None:
    field(
        out,
        name,
        f"{format_value(requested)} of {format_value(capacity)} requested"
        + ("" if used is None else f", {format_value(used)} used"),
    )


def _values(out: Console, name: str, values: Mapping[str, Any]) -> None:
    """Print fields as in a manifest."""
    from remit.cli.output.serialization import yaml_text

    if not values:
        return
    title(out, f"\n{name.capitalize()}")
    for text in yaml_text(values).splitlines():
        out.print(Text(f"  {text}"), soft_wrap=True)


def _conditions(out: Console, conditions: Sequence[Condition], now: str) -> None:
    from remit.cli.output.console import Cell, Column

    if not conditions:
        return
    title(out, "\nConditions")
    columns = Column("TYPE"), Column("STATUS"), Column("REASON"), Column("SINCE", right=True), Column("MESSAGE", fluid=True)
    rows = []
    for condition in conditions:
        style = TRUTHS[condition.status] if condition.type not in _AGAINST else BAD if condition.status == "True" else GOOD
        since = age(condition.last_transition, now) or "-"
        rows.append((condition.type, Cell(condition.status, style), condition.reason or "-", since, condition.message or "-"))
    Sheet(out, columns).show(rows)


async def _explanation(api: Api, out: Console, obj: Workload | Replica, tenant: str, now: str) -> None:
    """Print why a replica is pending, or why it was placed where it is."""
    from remit.cli.output.explanations import show as show_explanation
    from remit.proposal.explain.result_types import ReplicaExplanation, WorkloadExplanation

    answer = await or_none(api.explain(type(obj), obj.metadata.name, tenant=tenant))
    if answer is None:
        return
    result_type: Any = WorkloadExplanation if isinstance(obj, Workload) else ReplicaExplanation
    explanation: ReplicaExplanation | WorkloadExplanation = msgspec.convert(answer, result_type, dec_hook=dec_hook)
    if isinstance(explanation, WorkloadExplanation) and not explanation.groups:
        return
    title(out, "\nExplanation")
    show_explanation(out, explanation, verbose=False, wall=now)


def _events(out: Console, events: Sequence[HistoryEvent], now: str) -> None:
    if not events:
        return
    title(out, "\nEvents")
    about = len({event.regarding for event in events}) > 1
    Sheet(out, event_columns(about=about)).show(event_row(event, now, about=about) for event in events)
