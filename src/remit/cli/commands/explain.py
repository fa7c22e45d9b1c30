"""`explain`.

Asks a server, or looks into a scope's data; what it looks like is in explain_shown.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from remit.cli.main import examples
from remit.cli.session.contexts import Flags
from remit.model.problems import closest_name, did_you_mean, escaped, one_of, quoted, suggest_names

if TYPE_CHECKING:
    from remit.cli.session.offline_store import Scope
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
        "remit explain replica/risk-api-2                            why it is there, or why it waits",
        "remit explain replica/risk-api-2 --node n7                  why it is not on n7",
        "remit explain workload/risk/risk-api -o json                of the tenant risk, for programs",
        "remit explain workload/risk-api --data /var/lib/remit       without a server, from its data",
    )
)
@click.argument("what", metavar="WHAT")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="The data directory of a scope, in place of a server. It is only read, also while its owner runs.",
)
@click.option("-t", "-n", "--tenant", default="", metavar="TENANT", help="Whose; else REMIT_TENANT, or the context's.")
@click.option("--context", default="", metavar="NAME", help="The server, by its name in `remit context list`.")
@click.option("--server", default="", metavar="URL", help="The server itself; else REMIT_SERVER, or the context's.")
@click.option("--token-file", default="", metavar="FILE", help="The file with the token for it.")
@click.option("--ca-file", default="", metavar="FILE", help="Who signs for it at https; else REMIT_CA_FILE, the context's.")
@click.option("--node", default="", metavar="NODE", help="Say for this node why it could not stand there.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="For people, or for programs.",
)
@click.option("-v", "--verbose", is_flag=True, help="Also the whole funnel, scores and ledgers, and what was recorded of it.")
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
    """Why is it where it is, or why does it wait, and what would help?

    WHAT is workload/NAME or replica/NAME. Told are one dominant reason, where the nodes went (it adds up to all of them), the
    nearest fit, and the smallest changes that would let it be placed: each was tried on a copy of what is there.
    """
    kind, tenant, name = _meant(what, tenant)
    if data is None:
        _ask(Flags(context, server, token_file, tenant, ca_file), kind, name, node, output, verbose)
    elif context or server:
        raise click.UsageError("--data names a directory to look into; leave out the server, or --data")
    else:
        _look(data, kind, tenant, name, node, output, verbose)


def _ask(flags: Flags, kind: str, name: str, node: str, output: str, verbose: bool) -> None:
    """The server's answer is the same as would be found here."""
    import msgspec

    from remit.cli.session.kind_names import Meant
    from remit.cli.session.object_lookup import NOT_FOUND, missing
    from remit.cli.session.server_call import Asked, ask
    from remit.client.api import Api, ApiError
    from remit.model.kinds import Workload
    from remit.model.objects import dec_hook
    from remit.model.records import Replica
    from remit.proposal.explain.result_types import ReplicaExplanation, WorkloadExplanation
    from remit.world.clock import BootClock

    asked = Asked(flags.reach())
    workload = kind == "workload"

    async def explained(api: Api) -> dict[str, Any]:
        try:
            return await api.explain(Workload if workload else Replica, name, tenant=asked.reach.tenant, node=node)
        except ApiError as error:
            if error.status != NOT_FOUND or (node and node in error.detail):
                raise
            raise await missing(api, asked, Meant("Workload" if workload else "Replica", name)) from error

    found = ask(asked, explained)
    shape: Any = WorkloadExplanation if workload else ReplicaExplanation
    told: ReplicaExplanation | WorkloadExplanation = msgspec.convert(found, shape, dec_hook=dec_hook)
    _print(told, output, verbose, BootClock().wall())


def _look(data: Path, kind: str, tenant: str, name: str, node: str, output: str, verbose: bool) -> None:
    from remit.cli.session.offline_store import Unreadable, opened, rules_of
    from remit.proposal.explain.subjects import NodeNotFound
    from remit.proposal.placement.plugins import PluginError

    with opened(data) as scope:
        try:
            rules = rules_of(scope.clock)
            told = (
                _replica(scope, tenant, name, rules, node) if kind == "replica" else _workload(scope, tenant, name, rules, node)
            )
        except NodeNotFound:
            nodes = sorted(scope.view.columns.rows)
            raise Unreadable(f"there is no node {quoted(node)}; {suggest_names(node, nodes, 'nodes')}") from None
        except PluginError as error:
            raise Unreadable(escaped(str(error))) from error
    _print(told, output, verbose, scope.clock.wall())  # out here: that it cannot be printed is no fault of the data's


def _meant(what: str, tenant: str) -> tuple[str, str, str]:
    """The kind, the tenant if one is named, and the name."""
    kind, _, rest = what.partition("/")
    kind = SHORT.get(kind.lower(), kind.lower())
    if not rest and kind not in KINDS:
        raise click.UsageError(f"{quoted(what)} names no kind; write workload/{escaped(what)} or replica/{escaped(what)}")
    if kind == "node":
        raise click.UsageError("name the work, and the node with it: remit explain workload/NAME --node NODE")
    if kind not in KINDS:
        cure = did_you_mean(closest_name(kind, KINDS)) or f"explained are {one_of(KINDS)}"
        raise click.UsageError(f"there is nothing to explain about a {quoted(kind)}; {cure}")
    owner, slash, name = rest.partition("/")
    if not slash:
        owner, name = "", rest
    if owner and tenant and owner != tenant:
        raise click.UsageError(f"{quoted(what)} is of tenant {quoted(owner)}, and --tenant says {quoted(tenant)}; name one")
    if not name:
        raise click.UsageError(f"{quoted(what)} has no name; write {kind}/NAME")
    return kind, owner or tenant, name


def _workload(scope: Scope, tenant: str, name: str, rules: PlacementInputs, node: str) -> WorkloadExplanation:
    from remit.observation.column_table import NONE
    from remit.serve.diagnostics.history import workload_explanation

    workloads = scope.view.shapes.workloads
    there = [path for path, owner in workloads.ids.items() if workloads.at.state[owner] != NONE or workloads.at.users[owner]]
    tenant = _owner(there, "workload", tenant, name)
    return workload_explanation(scope.view, scope.workload(tenant, name), tenant, name, scope.written(tenant), rules, node)


def _replica(scope: Scope, tenant: str, name: str, rules: PlacementInputs, node: str) -> ReplicaExplanation:
    from remit.serve.diagnostics.history import replica_explanation

    there = [key.partition("/")[2] for key in scope.view.replicas.slots]
    tenant = _owner(there, "replica", tenant, name)
    found = scope.replica(tenant, name)
    if found is None:
        raise click.ClickException(
            f"replica {tenant}/{name} was listed and is not there: the data is damaged; restore a backup"
        )
    return replica_explanation(scope.view, *found, scope.written(tenant), rules, node)


def _owner(paths: list[str], kind: str, tenant: str, name: str) -> str:
    """Whose it is: the tenant named, or the only one who has such a thing."""
    from remit.cli.session.offline_store import Unreadable

    owners = sorted(path.partition("/")[0] for path in paths if path.partition("/")[2] == name)
    if tenant in owners or (not tenant and len(owners) == 1):
        return tenant or owners[0]
    if owners and not tenant:
        raise Unreadable(f"{len(owners)} tenants have a {kind} {name}: {one_of(owners)}; say which with --tenant")
    if owners:
        raise Unreadable(f"tenant {quoted(tenant)} has no {kind} {name}, but {one_of(owners)} has; say --tenant {owners[0]}")
    names = sorted({path.partition("/")[2] for path in paths if not tenant or path.startswith(f"{tenant}/")})
    raise Unreadable(f"there is no {kind} {quoted(name)}; {suggest_names(name, names, f'{kind}s')}")


def _print(told: ReplicaExplanation | WorkloadExplanation, output: str, verbose: bool, wall: str) -> None:
    from remit.cli.output.console import console, until_nobody_reads
    from remit.cli.output.explanations import show
    from remit.cli.output.serialization import spelt
    from remit.model.objects import encode

    with until_nobody_reads():
        if output == "json":
            sys.stdout.write(spelt(encode(told).decode()) + "\n")
        else:
            show(console(), told, verbose=verbose, wall=wall)
