"""Command `capacity`: counts how many more replicas of a manifest fit.

The answer comes from a server, or is computed here from a data directory or from cluster manifests with the same function
(proposal/explain/capacity.py). This module only reads input and prints the answer.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from remit.cli.main import examples
from remit.cli.session.contexts import ServerFlags
from remit.model.problems import escaped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console

    from remit.model.kinds import NodePool, Workload
    from remit.model.kinds.registry import AnyObject
    from remit.observation.scheduler_view import SchedulerView
    from remit.proposal.explain.capacity import CapacityAnswer, ReplicaDistribution
    from remit.world.interfaces import Clock

OK, SHORT, MISUSE = 0, 1, 2
COUNT_MAX = 100_000
NODES_SHOWN = 5
QUOTA = ("over_quota", "grant_expired", "grant_void")
NEEDS_NOTHING_ELSE = "Node, Tenant, Policy, PriorityClass or NodePool"


@click.command(
    epilog=examples(
        "remit capacity -f risk-api.yaml                               how many more fit, and what limits the next one",
        "remit capacity -f risk-api.yaml --count 12                    exit with 1 if fewer than 12 fit now, within quota",
        "remit capacity -f risk-api.yaml --data /var/lib/remit         read a data directory, without a server",
        "remit capacity -f job.yaml --cluster cluster.yaml -o json     a cluster described by manifests",
    )
)
@click.option(
    "-f",
    "--file",
    "manifest",
    required=True,
    metavar="MANIFEST",
    type=click.Path(allow_dash=True),
    help="Manifest of the workload, or - for stdin.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Read this data directory instead of calling a server. Read-only; safe while the server runs.",
)
@click.option(
    "--cluster",
    metavar="FILE",
    type=click.Path(),
    help="Use Node, Tenant and Policy manifests instead of calling a server; nodes count as ready.",
)
@click.option("--context", default="", metavar="NAME", help="Server by its context name, see `remit context list`.")
@click.option("--server", default="", metavar="URL", help="URL of the server. Default: REMIT_SERVER, then the context.")
@click.option("--token-file", default="", metavar="FILE", help="File with the access token.")
@click.option(
    "--ca-file", default="", metavar="FILE", help="CA certificate for https. Default: REMIT_CA_FILE, then the context."
)
@click.option("--count", type=click.IntRange(1, COUNT_MAX), help="Stop counting at this number; exit with 1 if fewer fit.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format.",
)
def capacity(
    manifest: str,
    data: Path | None,
    cluster: str | None,
    context: str,
    server: str,
    token_file: str,
    ca_file: str,
    count: int | None,
    output: str,
) -> None:
    """Show how many more replicas of a manifest fit, where they fit, and what limits the next one.

    Replicas are placed one after another on a copy of the cluster state, with the scheduler's own rules. Three kinds of
    capacity are reported separately because they do not add up: hard (free now), reclaimable (after preempting replicas of
    lower priority) and soft (on nodes that accept no replicas now, or that a pool may still add).
    """
    if data is not None and cluster is not None:
        raise click.UsageError("use --data DIR or --cluster FILE, but not both")
    if data is None and cluster is None:
        answer = _ask(ServerFlags(context, server, token_file, ca_file=ca_file), _workload(manifest), count)
    elif context or server:
        raise click.UsageError("--server and --context cannot be combined with --data or --cluster; leave one of them out")
    else:
        answer = _compute_offline(manifest, data, cluster, count)
    _print(answer, output)
    sys.exit(SHORT if count is not None and answer.hard.replicas < count else OK)


def _ask(flags: ServerFlags, workload: Workload, count: int | None) -> CapacityAnswer:
    """Ask the server, which computes its answer with the same function as `_look`."""
    import msgspec

    from remit.cli.session.server_call import CommandContext, call_server
    from remit.model.objects import dec_hook
    from remit.proposal.explain.capacity import CapacityAnswer

    answer = call_server(CommandContext(flags.resolve()), lambda api: api.capacity(workload, count))
    return msgspec.convert(answer, CapacityAnswer, dec_hook=dec_hook)


def _compute_offline(manifest: str, data: Path | None, cluster: str | None, count: int | None) -> CapacityAnswer:
    from remit.cli.session.offline_store import OfflineStoreError, placement_inputs
    from remit.proposal.explain.capacity import compute_capacity
    from remit.proposal.placement.plugins import PluginError

    workload = _workload(manifest)
    with _open_view(data, cluster) as (view, pools, clock):
        try:
            return compute_capacity(view, workload, placement_inputs(clock), most=count or COUNT_MAX, pools=pools)
        except PluginError as error:
            raise OfflineStoreError(escaped(str(error))) from error
        except ValueError as error:
            raise OfflineStoreError(f"{escaped(manifest)}: {escaped(str(error))}") from error


def _read(name: str) -> tuple[AnyObject, ...]:
    """Return the objects of a manifest. Print its problems as `remit validate` does, and exit if there are any."""
    from remit.cli.local.validate import print_problem, read_bytes
    from remit.model.manifests.reader import read

    data = read_bytes(name)
    if data is None:
        sys.exit(MISUSE)
    answer = read(data, "<stdin>" if name == "-" else name)
    for problem in answer.problems:
        print_problem(problem)
    if answer.problems:
        sys.exit(MISUSE)
    return answer.objects


def _workload(name: str) -> Workload:
    from remit.cli.session.offline_store import OfflineStoreError
    from remit.model.kinds import Workload

    answer = [obj for obj in _read(name) if isinstance(obj, Workload)]
    if len(answer) != 1:
        names = f": {', '.join(obj.metadata.name for obj in answer)}" if answer else ""
        raise OfflineStoreError(f"{escaped(name)} declares {len(answer)} workloads{names}; give a file with exactly one")
    return answer[0]


@contextmanager
def _open_view(data: Path | None, cluster: str | None) -> Iterator[tuple[SchedulerView, list[NodePool], Clock]]:
    from remit.cli.session.offline_store import OfflineStoreError, open_offline_scope
    from remit.model.kinds import Node, NodePool
    from remit.observation.frozen_view import view_of_manifests
    from remit.world.clock import BootClock

    if data is not None:
        with open_offline_scope(data) as scope:
            yield scope.view, scope.pools(), scope.clock
        return
    objects = _read(cluster or "")
    if not any(isinstance(obj, Node) for obj in objects):
        raise OfflineStoreError(f"{escaped(cluster or '')} declares no Node; a cluster file has {NEEDS_NOTHING_ELSE} manifests")
    clock = BootClock()
    yield view_of_manifests(clock, objects), [obj for obj in objects if isinstance(obj, NodePool)], clock


# -- text output ---------------------------------------------------------------------------------------------------------------


def _print(answer: CapacityAnswer, output: str) -> None:
    from remit.cli.output.console import console, until_broken_pipe
    from remit.cli.output.serialization import escape_json
    from remit.model.objects import encode

    with until_broken_pipe():
        if output == "json":
            sys.stdout.write(escape_json(encode(answer).decode()) + "\n")
        else:
            _show(console(), answer)


def _show(console: Console, answer: CapacityAnswer) -> None:
    from rich.text import Text

    from remit.cli.output.explanations import (
        NOT_POSSIBLE,
        format_nearest,
        format_reason,
        format_remedy,
        funnel_line,
        line,
        many,
    )

    least = "at least " if answer.capped else ""
    console.print(
        Text.assemble(
            ("workload ", ""),
            (f"{answer.tenant}/{answer.workload}", "bold"),
            f"  each needs {answer.charge}, priority {answer.priority}",
        ),
        soft_wrap=True,
    )
    hard = answer.hard
    style = "bold green" if hard.replicas else "bold yellow"
    quota = f"at least {hard.quota:,}" if hard.quota >= answer.most else f"{hard.quota:,}"
    text = Text.assemble(
        (f"{least if hard.replicas == answer.most else ''}{hard.replicas:,}", style),
        f" fit now: capacity for {least}{hard.room:,}, quota for {quota}",
    )
    line(console, "hard", text)
    _show_where(console, hard.where)
    reclaimable, soft = answer.reclaimable, answer.soft
    if reclaimable.room:
        line(
            console,
            "reclaimable",
            f"{reclaimable.replicas:,} more within quota, capacity for {reclaimable.room:,},"
            f" by preempting {many(reclaimable.victims, 'replica')}",
        )
        _show_where(console, reclaimable.where)
    else:
        line(console, "reclaimable", f"0: {NOT_POSSIBLE.get(reclaimable.why, reclaimable.why)}")
    if soft.room:
        causes = ", ".join(f"{count:,} {_format_cause(cause)}" for cause, count in soft.causes.items())
        line(console, "soft", f"{soft.replicas:,} more within quota, capacity for {soft.room:,}: {causes}")
        _show_where(console, soft.where)
    else:
        line(console, "soft", f"0: {NOT_POSSIBLE['soft' if soft.why == 'place' else soft.why]}")
    stop = answer.stop
    if stop is None:
        line(console, "next one", f"not computed: counting stops at {answer.most:,}")
    else:
        reason = format_reason(stop.meaning, stop.detail, stop.passage)
        line(console, "next one", Text.assemble("blocked by ", (stop.reason, "bold yellow"), f": {reason}"))
        line(console, "nodes", funnel_line(stop.passage) + (" -> quota for 0 replicas" if stop.reason in QUOTA else ""))
        if stop.nearest is not None:
            line(console, "nearest fit", format_nearest(stop.nearest))
        for number, unblock in enumerate(stop.unblocks):
            line(console, "" if number else "unblocks", f"{'or ' if number else ''}if {format_remedy(unblock)}")
    line(console, "evidence", f"revision {answer.revision}, {many(answer.nodes, 'node')}")


def _format_cause(cause: str) -> str:
    return f"as {cause}" if cause.startswith("pool ") else f"on {cause} nodes"


def _show_where(console: Console, where: ReplicaDistribution) -> None:
    from remit.cli.output.explanations import line, many

    if not where.nodes:
        return
    nodes = list(where.nodes.items())
    more = f" and {many(len(nodes) - NODES_SHOWN, 'more node')}" if len(nodes) > NODES_SHOWN else ""
    groups = [("zones", where.zones), ("pools", where.pools), ("nodes", where.nodes)]
    parts = [f"{name} {_format_counts(counts)}" for name, counts in groups]
    line(console, "", f"capacity: {'; '.join(parts)}{more}")


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:NODES_SHOWN])
