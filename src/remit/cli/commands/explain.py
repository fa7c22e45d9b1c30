"""Command `explain`: prints why a workload or replica is pending, or why it runs where it does.

The explanation comes from a server, or is computed here from a data directory with the same functions. The text layout is in
cli/output/explanations.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remit.cli.main import examples
from remit.cli.session.contexts import ServerFlags
from remit.model.problems import closest_name, did_you_mean, escaped, one_of, quoted, suggest_names

if TYPE_CHECKING:
    from remit.cli.session.offline_store import OfflineScope
    from remit.proposal.explain.pending import PlacementInputs
    from remit.proposal.explain.result_types import ReplicaExplanation, WorkloadExplanation

KINDS = ("workload", "replica")
SHORT = {
    **dict.fromkeys(("w", "wl", "workloads"), "workload"),
    **dict.fromkeys(("r", "rp", "replicas"), "replica"),
}


@click.command(
    epilog=examples(
        "remit explain workload/risk-api                             what limits it now, and what would help",
        "remit explain replica/risk-api-2                            why it is on its node, or why it is pending",
        "remit explain replica/risk-api-2 --node n7                  why it is not on n7",
        "remit explain workload/risk/risk-api -o json                workload of tenant risk, JSON output",
        "remit explain workload/risk-api --data /var/lib/remit       read a data directory, without a server",
    )
)
@click.argument("what", metavar="WHAT")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Read this data directory instead of calling a server. Read-only; safe while the server runs.",
)
@click.option("-t", "-n", "--tenant", default="", metavar="TENANT", help="Tenant. Default: REMIT_TENANT, then the context.")
@click.option("--context", default="", metavar="NAME", help="Server by its context name, see `remit context list`.")
@click.option("--server", default="", metavar="URL", help="URL of the server. Default: REMIT_SERVER, then the context.")
@click.option("--token-file", default="", metavar="FILE", help="File with the access token.")
@click.option(
    "--ca-file", default="", metavar="FILE", help="CA certificate for https. Default: REMIT_CA_FILE, then the context."
)
@click.option("--node", default="", metavar="NODE", help="Also explain whether it fits this node, and why not.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format.",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Also print the complete filter funnel, scores, ledgers and recorded events."
)
def explain(
    what: str,
    data: Path | None,
    tenant: str,
    context: str,
    server: str,
    token_file: str,
    ca_file: str,
    node: str,
    output: str,
    verbose: bool,
) -> None:
    """Explain why a workload or replica is pending or where it is, and which changes would help.

    WHAT is workload/NAME or replica/NAME. The answer has one dominant reason, the number of nodes left after each filter (-v:
    also how many each rejected), the node that comes nearest, and the smallest changes that would allow placement, each tried
    on a copy of the cluster state.
    """
    kind, tenant, name = _parse_target(what, tenant)
    if data is None:
        _ask(ServerFlags(context, server, token_file, tenant, ca_file), kind, name, node, output, verbose)
    elif context or server:
        raise click.UsageError("--data cannot be combined with --server or --context; leave one of them out")
    else:
        _explain_offline(data, kind, tenant, name, node, output, verbose)


def _ask(flags: ServerFlags, kind: str, name: str, node: str, output: str, verbose: bool) -> None:
    """Ask the server, which computes its explanation with the same functions as `_look`."""
    import msgspec

    from remit.cli.session.kind_names import ObjectRef
    from remit.cli.session.object_lookup import NOT_FOUND, not_found_error
    from remit.cli.session.server_call import CommandContext, call_server
    from remit.client.api import Api, ApiError
    from remit.model.kinds import Workload
    from remit.model.objects import dec_hook
    from remit.model.records import Replica
    from remit.proposal.explain.result_types import ReplicaExplanation, WorkloadExplanation
    from remit.world.clock import BootClock

    command_context = CommandContext(flags.resolve())
    workload = kind == "workload"

    async def request(api: Api) -> dict[str, Any]:
        try:
            return await api.explain(Workload if workload else Replica, name, tenant=command_context.address.tenant, node=node)
        except ApiError as error:
            if error.status != NOT_FOUND or (node and node in error.detail):
                raise
            raise await not_found_error(api, command_context, ObjectRef("Workload" if workload else "Replica", name)) from error

    answer = call_server(command_context, request)
    result_type: Any = WorkloadExplanation if workload else ReplicaExplanation
    explanation: ReplicaExplanation | WorkloadExplanation = msgspec.convert(answer, result_type, dec_hook=dec_hook)
    _print(explanation, output, verbose, BootClock().wall())


def _explain_offline(data: Path, kind: str, tenant: str, name: str, node: str, output: str, verbose: bool) -> None:
    from remit.cli.session.offline_store import OfflineStoreError, open_offline_scope, placement_inputs
    from remit.proposal.explain.subjects import NodeNotFound
    from remit.proposal.placement.plugins import PluginError

    with open_offline_scope(data) as scope:
        try:
            rules = placement_inputs(scope.clock)
            explanation = (
                _replica(scope, tenant, name, rules, node) if kind == "replica" else _workload(scope, tenant, name, rules, node)
            )
        except NodeNotFound:
            nodes = sorted(scope.view.columns.rows)
            raise OfflineStoreError(f"there is no node {quoted(node)}; {suggest_names(node, nodes, 'nodes')}") from None
        except PluginError as error:
            raise OfflineStoreError(escaped(str(error))) from error
    # Printed outside of the block, so that an output error is not reported as damaged data.
    _print(explanation, output, verbose, scope.clock.wall())


def _parse_target(what: str, tenant: str) -> tuple[str, str, str]:
    """Return kind, tenant (empty if none was given) and name."""
    kind, _, rest = what.partition("/")
    kind = SHORT.get(kind.lower(), kind.lower())
    if not rest and kind not in KINDS:
        raise click.UsageError(f"{quoted(what)} has no kind; write workload/{escaped(what)} or replica/{escaped(what)}")
    if kind == "node":
        raise click.UsageError("a node is explained for a workload: remit explain workload/NAME --node NODE")
    if kind not in KINDS:
        fix = did_you_mean(closest_name(kind, KINDS)) or f"use {one_of(KINDS)}"
        raise click.UsageError(f"kind {quoted(kind)} cannot be explained; {fix}")
    owner, slash, name = rest.partition("/")
    if not slash:
        owner, name = "", rest
    if owner and tenant and owner != tenant:
        raise click.UsageError(f"{quoted(what)} is in tenant {quoted(owner)}, but --tenant is {quoted(tenant)}; give one")
    if not name:
        raise click.UsageError(f"{quoted(what)} has no name; write {kind}/NAME")
    return kind, owner or tenant, name


def _workload(scope: OfflineScope, tenant: str, name: str, rules: PlacementInputs, node: str) -> WorkloadExplanation:
    from remit.observation.column_table import NONE
    from remit.serve.diagnostics.history import workload_explanation

    workloads = scope.view.shapes.workloads
    paths = [path for path, owner in workloads.ids.items() if workloads.at.state[owner] != NONE or workloads.at.users[owner]]
    tenant = _owner(paths, "workload", tenant, name)
    return workload_explanation(scope.view, scope.workload(tenant, name), tenant, name, scope.history(tenant), rules, node)


def _replica(scope: OfflineScope, tenant: str, name: str, rules: PlacementInputs, node: str) -> ReplicaExplanation:
    from remit.serve.diagnostics.history import replica_explanation

    paths = [key.partition("/")[2] for key in scope.view.replicas.slots]
    tenant = _owner(paths, "replica", tenant, name)
    answer = scope.replica(tenant, name)
    if answer is None:
        raise click.ClickException(f"replica {tenant}/{name} is listed but missing: the data is damaged; restore a backup")
    return replica_explanation(scope.view, *answer, scope.history(tenant), rules, node)


def _owner(paths: list[str], kind: str, tenant: str, name: str) -> str:
    """Return the given tenant if it has an object of this name, or the only tenant that has one. Raise an error with
    suggestions otherwise.
    """
    from remit.cli.session.offline_store import OfflineStoreError

    owners = sorted(path.partition("/")[0] for path in paths if path.partition("/")[2] == name)
    if tenant in owners or (not tenant and len(owners) == 1):
        return tenant or owners[0]
    if owners and not tenant:
        raise OfflineStoreError(f"{len(owners)} tenants have a {kind} {name}: {one_of(owners)}; choose one with --tenant")
    if owners:
        raise OfflineStoreError(
            f"tenant {quoted(tenant)} has no {kind} {name}, but {one_of(owners)} has; use --tenant {owners[0]}"
        )
    names = sorted({path.partition("/")[2] for path in paths if not tenant or path.startswith(f"{tenant}/")})
    raise OfflineStoreError(f"there is no {kind} {quoted(name)}; {suggest_names(name, names, f'{kind}s')}")


def _print(explanation: ReplicaExplanation | WorkloadExplanation, output: str, verbose: bool, wall: str) -> None:
    from remit.cli.output.console import console, until_broken_pipe
    from remit.cli.output.explanations import show
    from remit.cli.output.serialization import escape_json
    from remit.model.objects import encode

    with until_broken_pipe():
        if output == "json":
            sys.stdout.write(escape_json(encode(explanation).decode()) + "\n")
        else:
            show(console(), explanation, verbose=verbose, wall=wall)
