"""Commands `get` and `describe`: list objects, watch them, or print all details of one.

This module checks the arguments; columns, watching and details are in cli/output/.
"""

from __future__ import annotations

from typing import Final

import click

from remit.cli.main import examples
from remit.cli.session.kind_names import ENDPOINTS, complete_kind, parse_object_refs
from remit.cli.session.server_call import CommandContext, call_server, server_options

ALL: Final = ("Workload", "Replica", ENDPOINTS)
"""The kinds that `get all` lists: a tenant's workloads, their replicas and their endpoints."""


@click.command(
    epilog=examples(
        "remit get workloads                         progress of each, and what limits it",
        "remit get replicas -l app=web -o wide       select by label, print more columns",
        "remit get nodes -w                          list, then print changes",
        "remit get workload web -o yaml > web.yaml   a manifest for `remit apply`",
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
    help="Output format; yaml prints manifests.",
)
@click.option("-l", "--selector", default="", metavar="LABELS", help="Label selector: app=web,tier!=x,zone in (a,b).")
@click.option("--field-selector", default="", metavar="FIELDS", help="Field selector: status.phase=pending,spec.type!=job.")
@click.option("-w", "--watch", is_flag=True, help="Keep printing changes.")
@click.option("--sort-by", default="", metavar="PATH", help="Sort by this field, such as spec.replicas or metadata.revision.")
@click.option("--no-headers", is_flag=True, help="Print no header line.")
@server_options(all_tenants=True)
def get(
    context: CommandContext,
    what: tuple[str, ...],
    output: str,
    selector: str,
    field_selector: str,
    watch: bool,
    sort_by: str,
    no_headers: bool,
) -> None:
    """List objects of a KIND, or only those with the given NAMEs.

    KIND is singular, plural or an abbreviation: workloads (wl), replicas (rp), nodes (no), tenants (ten), endpoints (ep),
    priorityclasses (pc), events (ev) and so on. Separate several kinds by commas: wl,rp. KIND/NAME and KIND/TENANT/NAME are
    also accepted.
    """
    from remit.cli.output.console import until_broken_pipe
    from remit.cli.output.object_list import ListOptions, show

    kinds, objects = (list(ALL), []) if what == ("all",) else parse_object_refs(what)
    if context.all_tenants and objects:
        raise click.UsageError("-A cannot be combined with NAMEs; give the tenant with -t, or leave the NAMEs out")
    if objects and (selector or field_selector):
        raise click.UsageError("give NAMEs, or select by labels and fields, but not both")
    options = ListOptions(output, selector, field_selector, sort_by, headings=not no_headers)
    if watch and (len(kinds) + len({obj.kind for obj in objects}) != 1 or output == "yaml"):
        raise click.UsageError("-w watches one kind at a time, and -o yaml is not supported; use table, wide, name or json")
    with until_broken_pipe():
        if watch:
            from remit.cli.output.object_watch import show_watch

            call_server(context, lambda api: show_watch(api, context, kinds, objects, options))
        else:
            call_server(context, lambda api: show(api, context, kinds, objects, options))


@click.command(
    epilog=examples(
        "remit describe workload web         spec, conditions, replicas, endpoints, pending reasons, events",
        "remit describe node n7              capacity, replicas, last report",
        "remit describe replica/web-0",
    )
)
@click.argument("what", nargs=-1, required=True, metavar="KIND NAME...", shell_complete=complete_kind)
@server_options()
def describe(context: CommandContext, what: tuple[str, ...]) -> None:
    """Show all details of objects: spec, status, reasons for pending replicas, and events."""
    from remit.cli.output.console import until_broken_pipe
    from remit.cli.output.object_details import show

    kinds, objects = parse_object_refs(what)
    if kinds:
        raise click.UsageError(f"no NAME given; write remit describe {what[0]} NAME (`remit get {what[0]}` lists the names)")
    if any(obj.kind == ENDPOINTS for obj in objects):
        raise click.UsageError("endpoints cannot be described; list them with `remit get endpoints`, or describe the replica")
    with until_broken_pipe():
        call_server(context, lambda api: show(api, context, objects))
