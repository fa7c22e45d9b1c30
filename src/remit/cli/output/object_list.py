"""Lists objects as table, JSON or YAML.

Asks the server for what a table needs besides the objects themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from remit.cli.output.console import Sheet, console
from remit.cli.output.object_columns import Around, columns_of, endpoint_columns, endpoint_row, row_of
from remit.cli.output.serialization import json_text, manifest_text, plain
from remit.cli.session.kind_names import ENDPOINTS, ObjectRef, is_tenant_scoped, plural_name
from remit.cli.session.object_lookup import class_of, display_name, get_object
from remit.cli.session.workload_progress import summarize_progress
from remit.client.api_caller import ApiError
from remit.law.workload_rules import pending_reasons
from remit.model.kinds import Workload
from remit.model.objects import encode
from remit.model.problems import escaped
from remit.model.records import Decision, Phase, Replica
from remit.model.resources import Amount
from remit.model.wire.api_types import EndpointItem
from remit.world.clock import BootClock

if TYPE_CHECKING:
    from remit.cli.session.server_call import CommandContext
    from remit.client.api import Api

TABLES: Final = ("table", "wide")


class Wish(NamedTuple):
    """How it is to be printed, and which of it."""

    output: str = "table"
    labels: str = ""
    fields: str = ""
    sort_by: str = ""
    heads: bool = True


class Found(NamedTuple):
    """Objects of one kind as of one revision; endpoints are no objects, but found alike."""

    kind: str
    items: list[Any]
    revision: int = 0
    whole: bool = True
    """All of the kind that match, and not some by their names."""


async def show(api: Api, asked: CommandContext, kinds: Sequence[str], things: Sequence[ObjectRef], wish: Wish) -> None:
    found = await _named(api, asked, things) if things else [await listing(api, asked, kind, wish) for kind in kinds]
    found = [one._replace(items=in_order(one.items, wish.sort_by)) for one in found]
    if wish.output == "json":
        sys.stdout.write(json_text(_document(found, things)))
    elif wish.output == "yaml":
        texts = [_yaml(thing) for one in found for thing in one.items]
        sys.stdout.write("---\n".join(texts))
    elif wish.output == "name":
        for one in found:
            for thing in one.items:
                sys.stdout.write(f"{escaped(name_of(thing, asked))}\n")
    else:
        await _tables(api, asked, found, wish)


async def listing(api: Api, asked: CommandContext, kind: str, wish: Wish) -> Found:
    if kind == ENDPOINTS:
        if wish.labels or wish.fields:
            raise click.UsageError("endpoints have neither labels nor fields to select by")
        listed = await api.endpoints(tenant=asked.tenant)
        return Found(kind, list(listed.items), listed.revision)
    tenant = asked.tenant if is_tenant_scoped(kind) else ""
    found = await api.list(class_of(kind), tenant=tenant, labels=wish.labels, fields=wish.fields)
    return Found(kind, list(found.items), found.revision)


async def _named(api: Api, asked: CommandContext, things: Sequence[ObjectRef]) -> list[Found]:
    by_kind: dict[str, list[Any]] = {}
    for thing in things:
        by_kind.setdefault(thing.kind, []).append(await get_object(api, asked, thing))
    return [Found(kind, items, whole=False) for kind, items in by_kind.items()]


# -- what is printed -----------------------------------------------------------------------------------------------------------


def name_of(thing: Any, asked: CommandContext) -> str:
    if isinstance(thing, EndpointItem):
        return display_name(asked, ENDPOINTS, thing.replica, thing.tenant)
    return display_name(asked, type(thing).__name__, thing.metadata.name, thing.metadata.tenant)


def _yaml(thing: Any) -> str:
    from remit.cli.output.serialization import yaml_text

    return yaml_text(plain(thing)) if isinstance(thing, EndpointItem) else manifest_text(thing)


def _document(found: Sequence[Found], things: Sequence[ObjectRef]) -> Any:
    """One object, if one was named; a list of one kind, as the API gives it; or a list of several kinds."""
    if len(things) == 1:
        return plain(found[0].items[0])
    kind = f"{found[0].kind}List" if len(found) == 1 else "List"
    revision = min((one.revision for one in found), default=0)
    metadata = {"revision": revision} if revision else {}
    items = [plain(thing) for one in found for thing in one.items]
    return {"apiVersion": "remit/v1", "kind": kind, "metadata": metadata, "items": items}


async def _tables(api: Api, asked: CommandContext, found: Sequence[Found], wish: Wish) -> None:
    shown = [one for one in found if one.items]
    for number, one in enumerate(shown):
        if number:
            sys.stdout.write("\n")
        await _table(api, asked, one, wish, prefixed=len(found) > 1)
    if not shown:
        whose = "" if asked.everyone or not any(is_tenant_scoped(one.kind) for one in found) else f" of tenant {asked.tenant}"
        click.echo(f"there are no {' or '.join(plural_name(one.kind) for one in found)}{escaped(whose)}", err=True)


async def _table(api: Api, asked: CommandContext, found: Found, wish: Wish, *, prefixed: bool) -> None:
    wide = wish.output == "wide"
    if found.kind == ENDPOINTS:
        sheet = Sheet(console(), endpoint_columns(everyone=asked.everyone), wide=wide, heads=wish.heads)
        sheet.show(endpoint_row(item, everyone=asked.everyone) for item in found.items)
        return
    everyone = asked.everyone and is_tenant_scoped(found.kind)
    around = await surroundings(api, found)
    sheet = Sheet(console(), columns_of(found.kind, everyone=everyone), wide=wide, heads=wish.heads)
    sheet.show(row_of(thing, around, everyone=everyone, prefixed=prefixed) for thing in found.items)


async def surroundings(api: Api, found: Found) -> Around:
    """What a table of these shows besides them. What cannot be had is left out: the objects themselves were told."""
    wall = BootClock().wall()
    tenants = sorted({thing.metadata.tenant for thing in found.items})
    tenant = tenants[0] if len(tenants) == 1 else ""
    if found.kind == "Workload":
        return Around(progress=await _progress(api, found.items, tenant, whole=found.whole), wall=wall)
    if found.kind == "Replica":
        waits = any(one.status.phase is Phase.PENDING for one in found.items)
        reasons = pending_reasons(await decisions_of(api, tenant)) if waits else {}
        tops = await or_none(api.top_replicas(tenant=tenant))
        return Around(reasons=reasons, replicas={(one.tenant, one.replica): one for one in tops or ()}, wall=wall)
    if found.kind == "Node":
        nodes = await or_none(api.top_nodes())
        return Around(nodes={one.node: one for one in nodes or ()}, wall=wall)
    return Around(wall=wall)


async def _progress(api: Api, workloads: Sequence[Workload], tenant: str, *, whole: bool) -> dict[tuple[str, str], Any]:
    replicas: list[Replica] = []
    if whole:
        replicas = list((await api.list(Replica, tenant=tenant)).items)
    else:
        for one in workloads:
            meta = one.metadata
            replicas += (await api.list(Replica, tenant=meta.tenant, fields=f"spec.workload={meta.name}")).items
    waits = any(one.status.phase is Phase.PENDING for one in replicas)
    return progress_of(workloads, replicas, await decisions_of(api, tenant) if waits else ())


def progress_of(
    workloads: Iterable[Workload], replicas: Iterable[Replica], decisions: Iterable[Decision]
) -> dict[tuple[str, str], Any]:
    by_workload: dict[tuple[str, str], list[Replica]] = {}
    for one in replicas:
        by_workload.setdefault((one.metadata.tenant, one.spec.workload), []).append(one)
    reasons = pending_reasons(decisions)
    found = {}
    for workload in workloads:
        key = workload.metadata.tenant, workload.metadata.name
        found[key] = summarize_progress(workload, by_workload.get(key, []), reasons)
    return found


async def decisions_of(api: Api, tenant: str) -> list[Decision]:
    """Those that left somebody waiting."""
    found = await or_none(api.list(Decision, tenant=tenant, fields="spec.verdict!=bound"))
    return list(found.items) if found is not None else []


async def or_none(asking: Any) -> Any:
    try:
        return await asking
    except ApiError as error:
        if error.status in (401, 403):
            raise
        return None


# -- order ---------------------------------------------------------------------------------------------------------------------


def in_order(items: Iterable[Any], path: str) -> list[Any]:
    """By the value under a dotted path; what has none comes last. Without a path by tenant and name, numbers as numbers."""
    if not path:
        return sorted(items, key=_by_name)
    steps = [step for step in path.strip("{}").split(".") if step]
    return sorted(items, key=lambda item: (_rank(_value(item, steps)), _by_name(item)))


def _by_name(item: Any) -> tuple[Any, ...]:
    if isinstance(item, EndpointItem):
        return (item.tenant, item.service, natural(item.replica))
    return (item.metadata.tenant, natural(item.metadata.name))


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """web-2 before web-10."""
    import re

    parts = re.split(r"([0-9]+)", text)
    return tuple((0, int(part), "") if part.isdigit() and len(part) < 19 else (1, 0, part) for part in parts if part)


def _value(value: Any, steps: Sequence[str]) -> Any:
    """What stands under a path, with its default where nothing was said."""
    for step in steps:
        if isinstance(value, msgspec.Struct):
            names = dict(zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True))
            value = getattr(value, names[step]) if step in names else None
        elif isinstance(value, Amount):
            value = value.get(step)
        else:
            value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _rank(value: Any) -> tuple[int, float, Any]:
    if value is None:
        return (2, 0, ())
    if isinstance(value, bool | int | float):
        return (0, float(value), ())
    text = value if isinstance(value, str) else encode(value).decode()
    return (1, 0, natural(text))
