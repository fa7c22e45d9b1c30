"""`get`, `describe`.

Lists objects, and goes on telling what changes; which columns they have is in listed.py.

All of it on one page: what it is, how it fares, why it waits, what happened.
"""

from __future__ import annotations

from typing import Final

import click

from remit.cli.main import examples
from remit.cli.session.kind_names import ENDPOINTS, complete_kind, things_meant
from remit.cli.session.server_call import Asked, ask, asks_server

ALL: Final = ("Workload", "Replica", ENDPOINTS)
"""What `get all` means: a tenant's work, what runs of it, and where it is reached."""


@click.command(
    epilog=examples(
        "remit get workloads                         what limits each, beside how far it has come",
        "remit get replicas -l app=web -o wide       of one label, with more columns",
        "remit get nodes -w                          and every change from now on",
        "remit get workload web -o yaml > web.yaml   as `remit apply` takes it back",
        "remit get replicas -A --field-selector status.phase=pending",
        "remit get all                               workloads, replicas and endpoints of the tenant",
    )
)
@click.argument("what", nargs=-1, required=True, metavar="KIND [NAME...]", shell_complete=complete_kind)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json", "yaml", "name"]),
    default="table",
    show_default=True,
    help="For people, for programs, or as manifests.",
)
@click.option("-l", "--selector", default="", metavar="LABELS", help="Only with these labels: app=web,tier!=x,zone in (a,b).")
@click.option(
    "--field-selector", default="", metavar="FIELDS", help="Only with these values: status.phase=pending,spec.type!=job."
)
@click.option("-w", "--watch", is_flag=True, help="Go on telling what changes.")
@click.option(
    "--sort-by", default="", metavar="PATH", help="In the order of a value, such as spec.replicas or metadata.revision."
)
@click.option("--no-headers", is_flag=True, help="Rows only.")
@asks_server(everyone=True)
def get(
    asked: Asked,
    what: tuple[str, ...],
    output: str,
    selector: str,
    field_selector: str,
    watch: bool,
    sort_by: str,
    no_headers: bool,
) -> None:
    """List objects of a KIND, or only those of the NAMEs.

    A KIND may be said by one or many or in short: workloads (wl), replicas (rp), nodes (no), tenants (ten), endpoints (ep),
    priorityclasses (pc), events (ev) and so on. Several kinds: wl,rp. KIND/NAME and KIND/TENANT/NAME work too.
    """
    from remit.cli.output.console import until_nobody_reads
    from remit.cli.output.object_list import Wish, show

    kinds, things = (list(ALL), []) if what == ("all",) else things_meant(what)
    if asked.everyone and things:
        raise click.UsageError("a NAME is one tenant's; name the tenant with -t, or leave the NAMEs out")
    if things and (selector or field_selector):
        raise click.UsageError("name objects, or select them by labels and fields, and not both")
    wish = Wish(output, selector, field_selector, sort_by, heads=not no_headers)
    if watch and (len(kinds) + len({thing.kind for thing in things}) != 1 or output == "yaml"):
        raise click.UsageError("one kind can be watched at a time, as a table, by name or as json")
    with until_nobody_reads():
        if watch:
            from remit.cli.output.object_watch import show_watch

            ask(asked, lambda api: show_watch(api, asked, kinds, things, wish))
        else:
            ask(asked, lambda api: show(api, asked, kinds, things, wish))


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
    from remit.cli.output.console import until_nobody_reads
    from remit.cli.output.object_details import show

    kinds, things = things_meant(what)
    if kinds:
        raise click.UsageError(f"say which: remit describe {what[0]} NAME; `remit get {what[0]}` lists them")
    if any(thing.kind == ENDPOINTS for thing in things):
        raise click.UsageError("an endpoint is only listed, with `remit get endpoints`; describe its replica")
    with until_nobody_reads():
        ask(asked, lambda api: show(api, asked, things))
