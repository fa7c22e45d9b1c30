"""Commands `cordon`, `uncordon`, `drain` and `top`.

The first three change the spec of a node; controllers do the rest. `top` prints the usage that nodes last reported, next to
capacity and requests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from remit.cli.main import examples
from remit.cli.session.kind_names import ObjectRef, parse_object_ref
from remit.cli.session.server_call import CommandContext, call_server, server_options
from remit.model.problems import escaped, quoted

if TYPE_CHECKING:
    from remit.cli.output.console import Cell, Cells
    from remit.client.api import Api
    from remit.model.kinds import Node
    from remit.model.wire.api_types import NodeTop, ReplicaTop

SORTS = {"cpu": lambda item: -item.cpu_milli, "memory": lambda item: -item.memory_bytes}
SORT = click.option("--sort-by", type=click.Choice(["name", "cpu", "memory"]), default="name", show_default=True)
OUTPUT = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format."
)


@click.group(
    no_args_is_help=True,
    epilog=examples("remit top nodes --sort-by cpu", "remit top replicas -A --sort-by memory"),
)
def top() -> None:
    """Show current resource usage of nodes or replicas, as nodes last reported it."""


@top.command(epilog=examples("remit top nodes", "remit top nodes --sort-by memory"))
@SORT
@OUTPUT
@server_options()
def nodes(context: CommandContext, sort_by: str, output: str) -> None:
    """Show the usage of each node, in percent of its capacity, and the requests placed on it.

    Requests and replicas may be 3 s old.
    """
    call_server(context, lambda api: _nodes(api, sort_by, output))


@top.command(epilog=examples("remit top replicas", "remit top replicas -A --sort-by cpu"))
@click.argument("workload", required=False, default="")
@SORT
@OUTPUT
@server_options(all_tenants=True)
def replicas(context: CommandContext, workload: str, sort_by: str, output: str) -> None:
    """Show the usage of each replica, in percent of its requests. WORKLOAD limits the list to its replicas."""
    call_server(context, lambda api: _replicas(api, context, workload, sort_by, output))


async def _nodes(api: Api, sort_by: str, output: str) -> None:
    from remit.cli.output.console import Column, Sheet, console, until_broken_pipe
    from remit.cli.output.object_list import natural_key

    items = sorted(await api.top_nodes(), key=lambda item: natural_key(item.node))
    items = sorted(items, key=SORTS.get(sort_by, lambda item: 0))
    headings = ("NODE", "CPU", "CPU%", "CPU REQUESTS", "MEMORY", "MEMORY%", "MEMORY REQUESTS", "REPLICAS", "HEALTH", "REPORTED")
    with until_broken_pipe():
        if output == "json":
            _print_json("NodeTopList", items)
        elif not items:
            click.echo("no nodes found", err=True)
        else:
            Sheet(console(), [Column(heading, right=heading not in ("NODE", "HEALTH")) for heading in headings]).show(
                map(node_row, items)
            )


def node_row(item: NodeTop) -> Cells:
    from remit.cli.output.console import UNSURE, Cell
    from remit.cli.output.object_columns import format_bytes, format_cpu

    reported = item.age_ms is not None
    return (
        item.node,
        format_cpu(item.cpu_milli) if reported else "-",
        share(item.cpu_milli, item.capacity.cpu_milli) if reported else "-",
        f"{format_cpu(item.requests.cpu_milli)}/{format_cpu(item.capacity.cpu_milli)}",
        format_bytes(item.memory_bytes) if reported else "-",
        share(item.memory_bytes, item.capacity.memory_bytes) if reported else "-",
        f"{format_bytes(item.requests.memory_bytes)}/{format_bytes(item.capacity.memory_bytes)}",
        str(item.replicas),
        Cell(item.health, "" if item.health == "ready" else UNSURE),
        format_report_age(item.age_ms),
    )


async def _replicas(api: Api, context: CommandContext, workload: str, sort_by: str, output: str) -> None:
    from remit.cli.output.console import Column, Sheet, console, until_broken_pipe
    from remit.cli.output.object_list import natural_key

    items = sorted(await api.top_replicas(tenant=context.tenant), key=lambda item: (item.tenant, natural_key(item.replica)))
    if workload:
        items = [result for result in items if result.workload == workload]
    items = sorted(items, key=SORTS.get(sort_by, lambda item: 0))
    headings = ("REPLICA", "CPU", "CPU%", "MEMORY", "MEMORY%", "RESTARTS", "PHASE", "NODE", "REPORTED")
    columns = [Column(heading, right=heading not in ("REPLICA", "PHASE", "NODE")) for heading in headings]
    with until_broken_pipe():
        if output == "json":
            _print_json("ReplicaTopList", items)
        elif not items:
            click.echo(f"no replica{f' of workload {quoted(workload)}' if workload else ''} has a process now", err=True)
        else:
            tenant = [Column("TENANT")] if context.all_tenants else []
            Sheet(console(), [*tenant, *columns]).show(replica_row(result, all_tenants=context.all_tenants) for result in items)


def replica_row(item: ReplicaTop, *, all_tenants: bool) -> Cells:
    from remit.cli.output.object_columns import format_bytes, format_cpu

    reported = item.age_ms is not None
    return (
        *((item.tenant,) if all_tenants else ()),
        item.replica,
        format_cpu(item.cpu_milli) if reported else "-",
        share(item.cpu_milli, item.requests.cpu_milli) if reported else "-",
        format_bytes(item.memory_bytes) if reported else "-",
        share(item.memory_bytes, item.requests.memory_bytes) if reported else "-",
        str(item.restarts),
        item.phase,
        item.node or "-",
        format_report_age(item.age_ms),
    )


def share(used: int, complete: int) -> str | Cell:
    """Return usage in percent; `-` if the total is zero, because the percentage is undefined then."""
    from remit.cli.output.console import BAD, UNSURE, Cell

    if not complete:
        return "-"
    percent = round(100 * used / complete)
    return Cell(f"{percent}%", BAD if percent > 100 else UNSURE if percent > 90 else "")


def format_report_age(age_ms: int | None) -> str:
    from remit.cli.output.object_columns import format_span

    return "never" if age_ms is None else f"{format_span(age_ms // 1000)} ago"


def _print_json(kind: str, items: list[Any]) -> None:
    from remit.cli.output.serialization import json_text

    sys.stdout.write(json_text({"kind": kind, "items": items}))


NODES = click.argument("nodes", nargs=-1, required=True, metavar="NODE...")


@click.command(epilog=examples("remit cordon n7 n8      place nothing new there; running replicas stay"))
@NODES
@server_options()
def cordon(context: CommandContext, nodes: tuple[str, ...]) -> None:
    """Mark NODEs unschedulable. Replicas that run there stay; `remit drain` moves them away."""
    call_server(context, lambda api: _change(api, context, nodes, {"unschedulable": True}, "cordoned"))


@click.command(epilog=examples("remit uncordon n7       place replicas there again, and end its drain"))
@NODES
@server_options()
def uncordon(context: CommandContext, nodes: tuple[str, ...]) -> None:
    """Mark NODEs schedulable again. This also ends a drain."""
    undone = {"unschedulable": None, "draining": None, "drainForce": None, "drainDeadline": None}
    call_server(context, lambda api: _change(api, context, nodes, undone, "uncordoned"))


@click.command(
    epilog=examples(
        "remit drain n7 --wait                   wait until it is empty; show remaining replicas and what blocks them",
        "remit drain n7 --deadline 30m --force   ignore disruption limits after 30 minutes",
        "remit uncordon n7                       cancel the drain",
    )
)
@NODES
@click.option(
    "--deadline",
    default="10m",
    show_default=True,
    metavar="DURATION",
    help="Time after which the drain is reported as overdue.",
)
@click.option("--force", is_flag=True, help="Ignore disruption limits after the deadline.")
@click.option("--wait", is_flag=True, help="Wait until the nodes are empty; show remaining replicas.")
@click.option("--timeout", default="", metavar="DURATION", help="Maximum time to wait. Default: the deadline plus one minute.")
@server_options()
def drain(context: CommandContext, nodes: tuple[str, ...], deadline: str, force: bool, wait: bool, timeout: str) -> None:
    """Drain NODEs: place nothing new on them, and move their replicas within each workload's disruption limits.

    Exits with 1 if --wait ended before the nodes were empty, and prints what blocked the drain.
    """
    from remit.cli.session.wait_conditions import parse_timeout
    from remit.model.resources import format_duration, parse_duration

    try:
        deadline_ms = parse_duration(deadline)
    except ValueError as error:
        raise click.BadParameter(f"{escaped(deadline)}: {error}", param_hint="--deadline") from error
    timeout_ms = parse_timeout(timeout) if timeout else deadline_ms + 60_000
    change = {
        "unschedulable": True,
        "draining": True,
        "drainDeadline": format_duration(deadline_ms),
        "drainForce": True if force else None,
    }
    call_server(context, lambda api: _drain(api, context, nodes, change, timeout_ms if wait else 0))


async def _drain(api: Api, context: CommandContext, nodes: Sequence[str], change: dict[str, Any], wait_ms: int) -> None:
    from remit.cli.session.wait_conditions import NodeDrained, wait_for_goals

    await _change(api, context, nodes, change, "draining")
    if wait_ms:
        await wait_for_goals(api, [NodeDrained(obj.name) for obj in _parse_target(nodes)], wait_ms)
        for obj in _parse_target(nodes):
            click.echo(f"{escaped(str(obj))} is empty")


def _parse_target(nodes: Sequence[str]) -> list[ObjectRef]:
    objects = [parse_object_ref(node, "Node") for node in nodes]
    invalid = next((obj for obj in objects if obj.kind != "Node"), None)
    if invalid is not None:
        raise click.UsageError(f"{escaped(str(invalid))} is not a node; give the name of a node")
    return objects


async def _change(api: Api, context: CommandContext, nodes: Sequence[str], change: dict[str, Any], outcome: str) -> None:
    """Patch the spec of each node. All nodes are looked up first, so that an unknown name changes nothing."""
    from remit.cli.output.serialization import to_builtins
    from remit.cli.session.object_lookup import get_object
    from remit.model.kinds import Node

    objects = _parse_target(nodes)
    items: list[Node] = [await get_object(api, context, obj) for obj in objects]
    for obj, node in zip(objects, items, strict=True):
        spec = to_builtins(node)["spec"]
        if all(spec.get(name) == value for name, value in change.items()):
            click.echo(f"{escaped(str(obj))} already {outcome}")
            continue
        await api.patch(Node, obj.name, {"spec": change})
        click.echo(f"{escaped(str(obj))} {outcome}")
