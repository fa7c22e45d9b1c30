"""Lists objects as table, JSON or YAML, and loads the further data that tables show."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from remit.cli.output.console import Sheet, console
from remit.cli.output.object_columns import RowContext, columns_of, endpoint_columns, endpoint_row, row_of
from remit.cli.output.serialization import json_text, manifest_text, to_builtins
from remit.cli.session.kind_names import ENDPOINTS, ObjectRef, is_tenant_scoped, plural_name
from remit.cli.session.object_lookup import class_of, display_name, get_object
from remit.cli.session.workload_progress import list_progress, load_progress
from remit.client.api_caller import ApiError
from remit.law.workload_rules import PendingReasons, pending_reasons
from remit.model.kinds import Workload
from remit.model.objects import encode
from remit.model.problems import escaped
from remit.model.records import Decision, Phase
from remit.model.resources import Amount
from remit.model.wire.api_types import EndpointItem, WorkloadProgressItem
from remit.world.clock import BootClock

if TYPE_CHECKING:
    from remit.cli.session.server_call import CommandContext
    from remit.client.api import Api

TABLES: Final = ("table", "wide")


class ListOptions(NamedTuple):
    """Output format, selectors and sort order of a listing."""

    output: str = "table"
    labels: str = ""
    fields: str = ""
    sort_by: str = ""
    headings: bool = True


class ObjectList(NamedTuple):
    """Objects of one kind at one revision, or endpoints."""

    kind: str
    items: list[Any]
    revision: int = 0
    complete: bool = True
    """True for all matching objects of the kind, false for objects selected by name."""


async def show(
    api: Api, context: CommandContext, kinds: Sequence[str], refs: Sequence[ObjectRef], options: ListOptions
) -> None:
    lists = await _named(api, context, refs) if refs else [await list_objects(api, context, kind, options) for kind in kinds]
    lists = [result._replace(items=sort_objects(result.items, options.sort_by)) for result in lists]
    if options.output == "json":
        sys.stdout.write(json_text(_document(lists, refs)))
    elif options.output == "yaml":
        texts = [_yaml(obj) for result in lists for obj in result.items]
        sys.stdout.write("---\n".join(texts))
    elif options.output == "name":
        for result in lists:
            for obj in result.items:
                sys.stdout.write(f"{escaped(name_of(obj, context))}\n")
    else:
        await _tables(api, context, lists, options)


async def list_objects(api: Api, context: CommandContext, kind: str, options: ListOptions) -> ObjectList:
    if kind == ENDPOINTS:
        if options.labels or options.fields:
            raise click.UsageError("endpoints have neither labels nor fields to select by")
        listed = await api.endpoints(tenant=context.tenant)
        return ObjectList(kind, list(listed.items), listed.revision)
    tenant = context.tenant if is_tenant_scoped(kind) else ""
    result = await api.list(class_of(kind), tenant=tenant, labels=options.labels, fields=options.fields)
    return ObjectList(kind, list(result.items), result.revision)


async def _named(api: Api, context: CommandContext, refs: Sequence[ObjectRef]) -> list[ObjectList]:
    by_kind: dict[str, list[Any]] = {}
    for ref in refs:
        by_kind.setdefault(ref.kind, []).append(await get_object(api, context, ref))
    return [ObjectList(kind, items, complete=False) for kind, items in by_kind.items()]


# -- output formats -----------------------------------------------------------------------------------------------------------


def name_of(obj: Any, context: CommandContext) -> str:
    if isinstance(obj, EndpointItem):
        return display_name(context, ENDPOINTS, obj.replica, obj.tenant)
    return display_name(context, type(obj).__name__, obj.metadata.name, obj.metadata.tenant)


def _yaml(obj: Any) -> str:
    from remit.cli.output.serialization import yaml_text

    return yaml_text(to_builtins(obj)) if isinstance(obj, EndpointItem) else manifest_text(obj)


def _document(lists: Sequence[ObjectList], refs: Sequence[ObjectRef]) -> Any:
    """Return one object if one was named, else a list of one kind as in the API, or a list of several kinds."""
    if len(refs) == 1:
        return to_builtins(lists[0].items[0])
    kind = f"{lists[0].kind}List" if len(lists) == 1 else "List"
    revision = min((result.revision for result in lists), default=0)
    metadata = {"revision": revision} if revision else {}
    items = [to_builtins(obj) for result in lists for obj in result.items]
    return {"apiVersion": "remit/v1", "kind": kind, "metadata": metadata, "items": items}


async def _tables(api: Api, context: CommandContext, lists: Sequence[ObjectList], options: ListOptions) -> None:
    nonempty = [result for result in lists if result.items]
    for number, result in enumerate(nonempty):
        if number:
            sys.stdout.write("\n")
        await _table(api, context, result, options, prefixed=len(lists) > 1)
    if not nonempty and [result.kind for result in lists] == ["Event"]:
        click.echo("no event records found; `remit events` lists what happened", err=True)
    elif not nonempty:
        location = (
            ""
            if context.all_tenants or not any(is_tenant_scoped(result.kind) for result in lists)
            else f" in tenant {context.tenant}"
        )
        click.echo(f"no {' or '.join(plural_name(result.kind) for result in lists)} found{escaped(location)}", err=True)


async def _table(api: Api, context: CommandContext, objects: ObjectList, options: ListOptions, *, prefixed: bool) -> None:
    wide = options.output == "wide"
    if objects.kind == ENDPOINTS:
        sheet = Sheet(console(), endpoint_columns(all_tenants=context.all_tenants), wide=wide, headings=options.headings)
        sheet.show(endpoint_row(endpoint, all_tenants=context.all_tenants) for endpoint in objects.items)
        return
    all_tenants = context.all_tenants and is_tenant_scoped(objects.kind)
    row_context = await load_row_context(api, objects)
    sheet = Sheet(console(), columns_of(objects.kind, all_tenants=all_tenants), wide=wide, headings=options.headings)
    sheet.show(row_of(obj, row_context, all_tenants=all_tenants, prefixed=prefixed) for obj in objects.items)


async def load_row_context(api: Api, objects: ObjectList) -> RowContext:
    """Load the data that a table shows besides the objects. If a request fails, its data is left out."""
    wall = BootClock().wall()
    tenants = sorted({obj.metadata.tenant for obj in objects.items})
    tenant = tenants[0] if len(tenants) == 1 else ""
    if objects.kind == "Workload":
        return RowContext(progress=await _progress(api, objects.items, tenant, complete=objects.complete), wall=wall)
    if objects.kind == "Replica":
        any_pending = any(replica.status.phase is Phase.PENDING for replica in objects.items)
        reasons = await _pending_reasons(api, tenant) if any_pending else {}
        tops = await or_none(api.top_replicas(tenant=tenant))
        return RowContext(reasons=reasons, replicas={(top.tenant, top.replica): top for top in tops or ()}, wall=wall)
    if objects.kind == "Node":
        nodes = await or_none(api.top_nodes())
        return RowContext(nodes={node.node: node for node in nodes or ()}, wall=wall)
    return RowContext(wall=wall)


async def _progress(
    api: Api, workloads: Sequence[Workload], tenant: str, *, complete: bool
) -> dict[tuple[str, str], WorkloadProgressItem]:
    if complete:
        items = await list_progress(api, tenant)
    else:
        loaded = [await load_progress(api, workload.metadata.name, workload.metadata.tenant) for workload in workloads]
        items = [item for item in loaded if item is not None]
    return {(item.tenant, item.name): item for item in items}


async def _pending_reasons(api: Api, tenant: str) -> PendingReasons:
    """Return why replicas are pending, according to the recorded decisions."""
    result = await or_none(api.list(Decision, tenant=tenant, fields="spec.verdict!=bound"))
    decisions = () if result is None else result.items
    return pending_reasons((decision.metadata.revision, decision.spec) for decision in decisions)


async def or_none(request: Any) -> Any:
    try:
        return await request
    except ApiError as error:
        if error.status in (401, 403):
            raise
        return None


# -- sort order ----------------------------------------------------------------------------------------------------------------


def sort_objects(items: Iterable[Any], path: str) -> list[Any]:
    """Sort by the field at a dotted path; objects without it come last. Without a path, sort by tenant and name."""
    if not path:
        return sorted(items, key=_name_key)
    steps = [step for step in path.strip("{}").split(".") if step]
    return sorted(items, key=lambda endpoint: (_sort_key(_field_at(endpoint, steps)), _name_key(endpoint)))


def _name_key(endpoint: Any) -> tuple[Any, ...]:
    if isinstance(endpoint, EndpointItem):
        return (endpoint.tenant, endpoint.service, natural_key(endpoint.replica))
    return (endpoint.metadata.tenant, natural_key(endpoint.metadata.name))


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that compares digits as numbers: web-2 before web-10."""
    import re

    parts = re.split(r"([0-9]+)", text)
    return tuple((0, int(part), "") if part.isdigit() and len(part) < 19 else (1, 0, part) for part in parts if part)


def _field_at(value: Any, steps: Sequence[str]) -> Any:
    """Return the field at a path, or its default."""
    for step in steps:
        if isinstance(value, msgspec.Struct):
            names = dict(zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True))
            value = getattr(value, names[step]) if step in names else None
        elif isinstance(value, Amount):
            value = value.get(step)
        else:
            value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _sort_key(value: Any) -> tuple[int, float, Any]:
    if value is None:
        return (2, 0, ())
    if isinstance(value, bool | int | float):
        return (0, float(value), ())
    text = value if isinstance(value, str) else encode(value).decode()
    return (1, 0, natural_key(text))
