"""What is there to know of one object? All of it on one page: what it is, how it fares, why it waits, what happened."""

from __future__ import annotations

import click

from remit.cli.main import examples
from remit.cli.reaching import Asked, ask, asks_server
from remit.cli.spoken import ENDPOINTS, complete_kind, things_meant


@click.command(
    epilog=examples(
        "remit describe workload web         spec, conditions, replicas, endpoints, why it waits, what happened",
        "remit describe node n7              what it has, what runs there, what it said",
        "remit describe replica/web-0",
    )
)
@click.argument("what", nargs=-1, required=True, metavar="KIND NAME...", shell_complete=complete_kind)
@asks_server()
def describe(asked: Asked, what: tuple[str, ...]) -> None:
    """Tell all about objects: what they are, how they fare, why they wait and what happened to them."""
    from remit.cli.described import show
    from remit.cli.told import until_nobody_reads

    kinds, things = things_meant(what)
    if kinds:
        raise click.UsageError(f"say which: remit describe {what[0]} NAME; `remit get {what[0]}` lists them")
    if any(thing.kind == ENDPOINTS for thing in things):
        raise click.UsageError("an endpoint is only listed, with `remit get endpoints`; describe its replica")
    with until_nobody_reads():
        ask(asked, lambda api: show(api, asked, things))
