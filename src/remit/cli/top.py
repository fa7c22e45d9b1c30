"""What is used just now? Prints what nodes last said of themselves, beside what they have and what was asked for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from remit.cli.main import examples
from remit.cli.reaching import Asked, ask, asks_server
from remit.model.problems import shown

if TYPE_CHECKING:
    from remit.cli.columns import Cell, Cells
    from remit.client.api import Api
    from remit.model.answers import NodeTop, ReplicaTop

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
    from remit.cli.columns import Column, Sheet
    from remit.cli.get_shown import natural
    from remit.cli.told import console, until_nobody_reads

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
    from remit.cli.columns import UNSURE, Cell
    from remit.cli.listed import bytes_words, cpu_words

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
    from remit.cli.columns import Column, Sheet
    from remit.cli.get_shown import natural
    from remit.cli.told import console, until_nobody_reads

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
            click.echo(f"no replica{f' of {shown(workload)}' if workload else ''} runs", err=True)
        else:
            tenant = [Column("TENANT")] if asked.everyone else []
            Sheet(console(), [*tenant, *columns]).show(replica_row(one, everyone=asked.everyone) for one in found)


def replica_row(one: ReplicaTop, *, everyone: bool) -> Cells:
    from remit.cli.listed import bytes_words, cpu_words

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
    from remit.cli.columns import BAD, UNSURE, Cell

    if not whole:
        return "-"
    percent = round(100 * used / whole)
    return Cell(f"{percent}%", BAD if percent > 100 else UNSURE if percent > 90 else "")


def said_words(age_ms: int | None) -> str:
    from remit.cli.listed import span

    return "never" if age_ms is None else f"{span(age_ms // 1000)} ago"


def _print_json(kind: str, items: list[Any]) -> None:
    from remit.cli.written import json_text

    sys.stdout.write(json_text({"kind": kind, "items": items}))
