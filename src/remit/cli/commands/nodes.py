"""`cordon`, `uncordon`, `drain`, `top`.

Prints what nodes last said of themselves, beside what they have and what was asked for.

Changes what is declared of it; controllers do the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from remit.cli.main import examples
from remit.cli.session.kind_names import Meant, thing_meant
from remit.cli.session.server_call import Asked, ask, asks_server
from remit.model.problems import escaped, quoted

if TYPE_CHECKING:
    from remit.cli.output.console import Cell, Cells
    from remit.client.api import Api
    from remit.model.kinds import Node
    from remit.model.wire.api_types import NodeTop, ReplicaTop

SORTS = {"cpu": lambda one: -one.cpu_milli, "memory": lambda one: -one.memory_bytes}
SORT = click.option("--sort-by", type=click.Choice(["name", "cpu", "memory"]), default="name", show_default=True)
OUTPUT = click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)


@click.group(
    no_args_is_help=True,
    epilog=examples("remit top nodes --sort-by cpu", "remit top replicas -A --sort-by memory"),
)
def top() -> None:
    """What nodes and replicas use just now, as nodes last said."""


@top.command(epilog=examples("remit top nodes", "remit top nodes --sort-by memory"))
@SORT
@OUTPUT
@asks_server()
def nodes(asked: Asked, sort_by: str, output: str) -> None:
    """What each node uses of what it has, and how much of it is asked for."""
    ask(asked, lambda api: _nodes(api, sort_by, output))


@top.command(epilog=examples("remit top replicas", "remit top replicas -A --sort-by cpu"))
@click.argument("workload", required=False, default="")
@SORT
@OUTPUT
@asks_server(everyone=True)
def replicas(asked: Asked, workload: str, sort_by: str, output: str) -> None:
    """What each replica uses of what it asked for; only a WORKLOAD's, if one is named."""
    ask(asked, lambda api: _replicas(api, asked, workload, sort_by, output))


async def _nodes(api: Api, sort_by: str, output: str) -> None:
    from remit.cli.output.console import Column, Sheet, console, until_nobody_reads
    from remit.cli.output.object_list import natural

    found = sorted(await api.top_nodes(), key=lambda one: natural(one.node))
    found = sorted(found, key=SORTS.get(sort_by, lambda one: 0))
    heads = ("NODE", "CPU", "CPU%", "CPU ASKED", "MEMORY", "MEMORY%", "MEMORY ASKED", "REPLICAS", "HEALTH", "SAID")
    with until_nobody_reads():
        if output == "json":
            _print_json("NodeTopList", found)
        elif not found:
            click.echo("there are no nodes", err=True)
        else:
            Sheet(console(), [Column(head, right=head not in ("NODE", "HEALTH")) for head in heads]).show(map(node_row, found))


def node_row(one: NodeTop) -> Cells:
    from remit.cli.output.console import UNSURE, Cell
    from remit.cli.output.object_columns import bytes_words, cpu_words

    said = one.age_ms is not None
    return (
        one.node,
        cpu_words(one.cpu_milli) if said else "-",
        share(one.cpu_milli, one.capacity.cpu_milli) if said else "-",
        f"{cpu_words(one.requests.cpu_milli)}/{cpu_words(one.capacity.cpu_milli)}",
        bytes_words(one.memory_bytes) if said else "-",
        share(one.memory_bytes, one.capacity.memory_bytes) if said else "-",
        f"{bytes_words(one.requests.memory_bytes)}/{bytes_words(one.capacity.memory_bytes)}",
        str(one.replicas),
        Cell(one.health, "" if one.health == "ready" else UNSURE),
        said_words(one.age_ms),
    )


async def _replicas(api: Api, asked: Asked, workload: str, sort_by: str, output: str) -> None:
    from remit.cli.output.console import Column, Sheet, console, until_nobody_reads
    from remit.cli.output.object_list import natural

    found = sorted(await api.top_replicas(tenant=asked.tenant), key=lambda one: (one.tenant, natural(one.replica)))
    if workload:
        found = [one for one in found if one.workload == workload]
    found = sorted(found, key=SORTS.get(sort_by, lambda one: 0))
    heads = ("REPLICA", "CPU", "CPU%", "MEMORY", "MEMORY%", "RESTARTS", "PHASE", "NODE", "SAID")
    columns = [Column(head, right=head not in ("REPLICA", "PHASE", "NODE")) for head in heads]
    with until_nobody_reads():
        if output == "json":
            _print_json("ReplicaTopList", found)
        elif not found:
            click.echo(f"no replica{f' of {quoted(workload)}' if workload else ''} runs", err=True)
        else:
            tenant = [Column("TENANT")] if asked.everyone else []
            Sheet(console(), [*tenant, *columns]).show(replica_row(one, everyone=asked.everyone) for one in found)


def replica_row(one: ReplicaTop, *, everyone: bool) -> Cells:
    from remit.cli.output.object_columns import bytes_words, cpu_words

    said = one.age_ms is not None
    return (
        *((one.tenant,) if everyone else ()),
        one.replica,
        cpu_words(one.cpu_milli) if said else "-",
        share(one.cpu_milli, one.requests.cpu_milli) if said else "-",
        bytes_words(one.memory_bytes) if said else "-",
        share(one.memory_bytes, one.requests.memory_bytes) if said else "-",
        str(one.restarts),
        one.phase,
        one.node or "-",
        said_words(one.age_ms),
    )


def share(used: int, whole: int) -> str | Cell:
    """In percent; nothing of nothing is not known."""
    from remit.cli.output.console import BAD, UNSURE, Cell

    if not whole:
        return "-"
    percent = round(100 * used / whole)
    return Cell(f"{percent}%", BAD if percent > 100 else UNSURE if percent > 90 else "")


def said_words(age_ms: int | None) -> str:
    from remit.cli.output.object_columns import span

    return "never" if age_ms is None else f"{span(age_ms // 1000)} ago"


def _print_json(kind: str, items: list[Any]) -> None:
    from remit.cli.output.serialization import json_text

    sys.stdout.write(json_text({"kind": kind, "items": items}))


NODES = click.argument("nodes", nargs=-1, required=True, metavar="NODE...")


@click.command(epilog=examples("remit cordon n7 n8      nothing new is placed there; what runs stays"))
@NODES
@asks_server()
def cordon(asked: Asked, nodes: tuple[str, ...]) -> None:
    """Place nothing new on NODEs. What runs there stays; `remit drain` empties one."""
    ask(asked, lambda api: _change(api, asked, nodes, {"unschedulable": True}, "cordoned"))


@click.command(epilog=examples("remit uncordon n7       it takes work again; a drain of it ends"))
@NODES
@asks_server()
def uncordon(asked: Asked, nodes: tuple[str, ...]) -> None:
    """Let NODEs take work again. A drain of one ends."""
    undone = {"unschedulable": None, "draining": None, "drainForce": None, "drainDeadline": None}
    ask(asked, lambda api: _change(api, asked, nodes, undone, "takes work again"))


@click.command(
    epilog=examples(
        "remit drain n7 --wait                   until it is empty, showing what is left and what holds it",
        "remit drain n7 --deadline 30m --force   past the deadline go on in spite of disruption limits",
        "remit uncordon n7                       take it back",
    )
)
@NODES
@click.option(
    "--deadline",
    default="10m",
    show_default=True,
    metavar="DURATION",
    help="How long it may take before it is said to be overdue.",
)
@click.option("--force", is_flag=True, help="Past the deadline, go on in spite of disruption limits.")
@click.option("--wait", is_flag=True, help="Wait until they are empty, and show what is left.")
@click.option("--timeout", default="", metavar="DURATION", help="How long to wait; else the deadline and a minute.")
@asks_server()
def drain(asked: Asked, nodes: tuple[str, ...], deadline: str, force: bool, wait: bool, timeout: str) -> None:
    """Empty NODEs: nothing new is placed there, and what runs is moved within what each workload can spare.

    Exits with 1 if --wait ended before they were empty, and says what held them.
    """
    from remit.cli.session.wait_conditions import timeout_of
    from remit.model.resources import format_duration, parse_duration

    try:
        deadline_ms = parse_duration(deadline)
    except ValueError as error:
        raise click.BadParameter(f"{escaped(deadline)}: {error}", param_hint="--deadline") from error
    timeout_ms = timeout_of(timeout) if timeout else deadline_ms + 60_000
    wanted = {
        "unschedulable": True,
        "draining": True,
        "drainDeadline": format_duration(deadline_ms),
        "drainForce": True if force else None,
    }
    ask(asked, lambda api: _drain(api, asked, nodes, wanted, timeout_ms if wait else 0))


async def _drain(api: Api, asked: Asked, nodes: Sequence[str], wanted: dict[str, Any], wait_ms: int) -> None:
    from remit.cli.session.wait_conditions import Drained, until

    await _change(api, asked, nodes, wanted, "drains")
    if wait_ms:
        await until(api, [Drained(thing.name) for thing in _meant(nodes)], wait_ms)
        for thing in _meant(nodes):
            click.echo(f"{escaped(str(thing))} is empty")


def _meant(nodes: Sequence[str]) -> list[Meant]:
    things = [thing_meant(node, "Node") for node in nodes]
    other = next((thing for thing in things if thing.kind != "Node"), None)
    if other is not None:
        raise click.UsageError(f"{escaped(str(other))} is no node")
    return things


async def _change(api: Api, asked: Asked, nodes: Sequence[str], wanted: dict[str, Any], said: str) -> None:
    """Those that are not there are told before anything is changed."""
    from remit.cli.output.serialization import plain
    from remit.cli.session.object_lookup import find
    from remit.model.kinds import Node

    things = _meant(nodes)
    found: list[Node] = [await find(api, asked, thing) for thing in things]
    for thing, node in zip(things, found, strict=True):
        spec = plain(node)["spec"]
        if all(spec.get(name) == value for name, value in wanted.items()):
            click.echo(f"{escaped(str(thing))} {said} already")
            continue
        await api.patch(Node, thing.name, {"spec": wanted})
        click.echo(f"{escaped(str(thing))} {said}")
