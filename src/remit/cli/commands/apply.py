"""Commands `apply`, `plan`, `diff` and `delete`: change or compare the objects that manifests declare.

All manifests are read and validated before anything is sent, so a broken file changes nothing. The server computes plans and
differences and decides the order of writes; this module sends the request, prints the answer, and can wait for the result.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from remit.cli.main import examples
from remit.cli.session.kind_names import ENDPOINTS, ObjectRef, complete_kind, is_tenant_scoped, parse_object_refs
from remit.cli.session.server_call import (
    FAILED,
    MISUSE,
    NOT_PLACED,
    OK,
    CommandContext,
    call_server,
    command_error,
    print_problem_answer,
    server_options,
)
from remit.model.problems import escaped

if TYPE_CHECKING:
    from rich.console import Console

    from remit.client.api import Api
    from remit.model.kinds.registry import AnyObject
    from remit.model.wire.api_types import ApplyAnswer, Difference, PlanAnswer, PlanItem, PlannedPlacement

SIGNS: Final = {"create": ("+", "green"), "replace": ("~", "yellow"), "refused": ("!", "red"), "unchanged": ("=", "dim")}
NODES_SHOWN: Final = 8
VALUE_MAX: Final = 200
DIFFERS: Final = 1

FILES = click.option(
    "-f", "--file", "files", multiple=True, required=True, metavar="FILE", type=click.Path(allow_dash=True),
    help="Manifest file, directory of manifests, or - for stdin. Repeatable.",
)  # fmt: skip
OUTPUT = click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)


@click.command(
    epilog=examples(
        "remit plan -f risk-api.yaml       show changes, and the nodes of new replicas",
        "remit plan -f cluster/ -o json    JSON for scripts",
    )
)
@FILES
@OUTPUT
@server_options()
def plan(context: CommandContext, files: tuple[str, ...], output: str) -> None:
    """Show what an apply would change and where new replicas would be placed. Nothing is written.

    Placement is simulated with the scheduler's own rules on a copy of the cluster state. Exit codes: 0 if everything would
    succeed, 1 if an object would be refused, 3 if a replica would not be placed.
    """
    answer = _ask(context, files)
    placed = all(item.placement is None or item.placement.placed >= item.placement.wanted for item in answer.items)
    if output == "json":
        _print_json(answer)
    else:
        _print(answer, context, placement=True)
        _print_end(answer, context, files)
    sys.exit(FAILED if any(item.action == "refused" for item in answer.items) else OK if placed else NOT_PLACED)


@click.command(
    epilog=examples(
        "remit diff -f risk-api.yaml                   compare the stored objects with the file",
        "remit diff -f cluster/ || echo it differs     use the exit code in a script",
    )
)
@FILES
@OUTPUT
@server_options()
def diff(context: CommandContext, files: tuple[str, ...], output: str) -> None:
    """Show how manifests differ from the stored objects. Nothing is written.

    Exit codes are those of diff(1): 0 if nothing differs, 1 if something differs, 2 if the comparison failed or an object
    would be refused.
    """
    try:
        answer = _ask(context, files)
    except click.ClickException as error:
        error.show()
        sys.exit(MISUSE)
    except SystemExit:
        sys.exit(MISUSE)
    if output == "json":
        _print_json(answer)
    else:
        _print(answer, context, placement=False)
    actions = {item.action for item in answer.items}
    sys.exit(MISUSE if "refused" in actions else DIFFERS if actions - {"unchanged"} else OK)


def _ask(context: CommandContext, files: tuple[str, ...]) -> PlanAnswer:
    from remit.cli.local.validate import read_manifests

    objects = read_manifests(files, context.address.tenant if context.tenant_given else "")
    return call_server(context, lambda api: api.plan(objects))


def _print_json(answer: PlanAnswer) -> None:
    from remit.cli.output.console import until_broken_pipe
    from remit.cli.output.serialization import json_text

    with until_broken_pipe():
        sys.stdout.write(json_text(answer))


# -- text output ---------------------------------------------------------------------------------------------------------------


def _print(answer: PlanAnswer, context: CommandContext, *, placement: bool) -> None:
    from remit.cli.output.console import console, until_broken_pipe
    from remit.cli.session.object_lookup import display_name

    with until_broken_pipe():
        for item in answer.items:
            if placement or item.action != "unchanged":
                show_item(console(), item, display_name(context, item.kind, item.name, item.tenant), placement=placement)


def show_item(console: Console, item: PlanItem, path: str, *, placement: bool) -> None:
    from rich.text import Text

    sign, style = SIGNS[item.action]
    console.print(Text.assemble((escaped(f"{sign} {path}"), f"bold {style}"), f"  {item.action}"), soft_wrap=True)
    for change in item.diff if item.action != "create" else ():
        show_change(console, change)
    if item.action == "create" and not placement:
        for change in item.diff:
            show_change(console, change)
    if item.problem is not None:
        for text in (
            item.problem.detail,
            *(f"{p.field}: {p.message}; {p.cure}" for p in item.problem.problems),
            item.problem.cure,
        ):
            if text:
                console.print(Text(f"    {escaped(text)}", style="red"), soft_wrap=True)
    if placement and item.placement is not None:
        show_placement(console, item.placement)


def show_change(console: Console, change: Difference) -> None:
    from rich.text import Text

    before, after = change.before, change.after
    path = escaped(change.path)
    if before is msgspec.UNSET:
        console.print(Text(f"    + {path}: {format_value(after)}", style="green"), soft_wrap=True)
    elif after is msgspec.UNSET:
        console.print(Text(f"    - {path}: {format_value(before)}", style="red"), soft_wrap=True)
    else:
        line = Text.assemble(
            (f"    ~ {path}: ", "yellow"), (format_value(before), "red"), " -> ", (format_value(after), "green")
        )
        console.print(line, soft_wrap=True)


def format_value(value: Any) -> str:
    text = value if isinstance(value, str) and value else msgspec.json.encode(value).decode()
    return escaped(text if len(text) <= VALUE_MAX else text[: VALUE_MAX - 1] + "…")


def show_placement(console: Console, placement: PlannedPlacement) -> None:
    from rich.text import Text

    from remit.cli.output.explanations import many

    if not placement.wanted:
        return
    style = "green" if placement.placed >= placement.wanted else "yellow"
    nodes = list(placement.nodes.items())
    more = f" and {many(len(nodes) - NODES_SHOWN, 'more node')}" if len(nodes) > NODES_SHOWN else ""
    where = f": {', '.join(f'{name} {count}' for name, count in nodes[:NODES_SHOWN])}{more}" if nodes else ""
    error_text = f"    placement: {placement.placed:,} of {many(placement.wanted, 'new replica')} would be placed"
    console.print(Text.assemble((error_text, style), escaped(where)), soft_wrap=True)
    if placement.placed >= placement.wanted:
        return
    if placement.waits is not None:
        _show_pending(console, placement.waits)
    if placement.stops is not None:
        _show_blocked_rollout(console, placement.stops)


def _show_pending(console: Console, pending: Any) -> None:
    """Print why the remaining replicas would stay pending.

    `waits` is the JSON of a pending explanation. A placement trial that stopped early returns fewer of its fields, so every
    field is optional.
    """
    from rich.text import Text

    from remit.cli.output.explanations import format_nearest, format_reason, format_remedy, funnel_line
    from remit.model.objects import dec_hook
    from remit.proposal.explain.result_types import FilterFunnel, NearestNodeExplanation, Remedy

    verdict = f" ({pending['verdict']})" if pending.get("verdict") else ""
    passage = msgspec.convert(pending["passage"], FilterFunnel, dec_hook=dec_hook) if pending.get("passage") else None
    reason = format_reason(pending.get("meaning", ""), pending.get("detail", ""), passage)
    console.print(
        Text.assemble(
            "    the rest would stay pending: ", (f"{pending.get('reason')}{verdict}", "yellow"), f"  {escaped(reason)}"
        ),
        soft_wrap=True,
    )
    if passage is not None and passage.steps:
        console.print(Text(f"      {escaped(funnel_line(passage))}"), soft_wrap=True)
    if pending.get("nearest"):
        nearest = msgspec.convert(pending["nearest"], NearestNodeExplanation, dec_hook=dec_hook)
        console.print(Text(f"      nearest fit: {escaped(format_nearest(nearest))}"), soft_wrap=True)
    for item in pending.get("unblocks") or ():
        unblock = msgspec.convert(item, Remedy, dec_hook=dec_hook)
        console.print(Text(f"      unblocks if {escaped(format_remedy(unblock))}"), soft_wrap=True)


def _show_blocked_rollout(console: Console, stops: Any) -> None:
    """Print why the rollout would not get further, from the JSON of `stops`."""
    from rich.text import Text

    head = ("    the rollout would not proceed: ", (str(stops.get("reason", "")), "yellow"))
    console.print(Text.assemble(*head, f"  {escaped(str(stops.get('meaning', '')))}"), soft_wrap=True)
    if stops.get("cure"):
        console.print(Text(f"      fix: {escaped(stops['cure'])}"), soft_wrap=True)


def _print_end(answer: PlanAnswer, context: CommandContext, files: tuple[str, ...]) -> None:
    counts = {arg: sum(item.action == arg for item in answer.items) for arg in SIGNS}
    error_text = {"create": "to create", "replace": "to replace", "unchanged": "unchanged", "refused": "refused"}
    click.echo(", ".join(f"{counts[arg]} {outcome}" for arg, outcome in error_text.items() if counts[arg]) or "nothing to do")
    if counts["refused"] or not (counts["create"] or counts["replace"]):
        return
    args = ["remit", "apply", *(arg for name in files for arg in ("-f", name)), "--if-unchanged", str(answer.revision)]
    params = click.get_current_context().params
    args += [
        arg
        for name in ("context", "server", "token_file", "tenant", "ca_file")
        if params.get(name)
        for arg in (f"--{name.replace('_', '-')}", params[name])
    ]
    click.echo(f"to apply exactly this plan: {escaped(shlex.join(args))}")


STYLES = {"created": "green", "replaced": "yellow", "refused": "red"}


@click.command(
    epilog=examples(
        "remit apply -f risk-api.yaml                        create the objects, or replace existing ones",
        "remit apply -f cluster/ -f risk-api.yaml --wait     apply a directory and a file, wait until ready",
        "helm template chart | remit apply -f -              read manifests from stdin",
        "remit apply -f web.yaml --if-unchanged 812          only if nothing changed since `remit plan`",
    )
)
@FILES
@click.option(
    "--if-unchanged", type=click.IntRange(min=1), metavar="REVISION", help="Apply nothing if an object changed after REVISION."
)
@click.option("--wait", is_flag=True, help="Wait until services are ready and jobs are running; show progress.")
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="Maximum time to wait.")
@click.option(
    "-o", "--output", type=click.Choice(["text", "json", "name"]), default="text", show_default=True, help="Output format."
)
@server_options()
def apply(
    context: CommandContext, files: tuple[str, ...], if_unchanged: int | None, wait: bool, timeout: str, output: str
) -> None:
    """Create or replace the objects that manifests declare.

    All manifests are validated first: if one is invalid, nothing is sent. Objects that others depend on are written first.
    Exit codes: 0 if all objects were applied, 1 if not, 2 if a file cannot be read, 3 if --wait ended while replicas could
    not be placed.
    """
    from remit.cli.local.validate import read_manifests
    from remit.cli.session.wait_conditions import parse_timeout

    timeout_ms = parse_timeout(timeout)
    objects = read_manifests(files, context.address.tenant if context.tenant_given else "")
    sys.exit(call_server(context, lambda api: _apply(api, context, objects, if_unchanged, timeout_ms if wait else 0, output)))


async def _apply(
    api: Api, context: CommandContext, objects: Sequence[AnyObject], if_unchanged: int | None, wait_ms: int, output: str
) -> int:
    answer = await api.apply(objects, if_unchanged=if_unchanged)
    show(answer, context, output)
    refused = any(result.action == "refused" for result in answer.results)
    workloads = [result for result in answer.results if result.kind == "Workload" and result.action != "refused"]
    if wait_ms and workloads:
        from remit.cli.session.object_lookup import display_name
        from remit.cli.session.wait_conditions import WorkloadReady, wait_for_goals

        sys.stdout.flush()
        await wait_for_goals(
            api,
            [
                WorkloadReady(
                    workload.name,
                    workload.tenant,
                    display_name=display_name(context, workload.kind, workload.name, workload.tenant),
                )
                for workload in workloads
            ],
            wait_ms,
        )
    return FAILED if refused else OK


def show(answer: ApplyAnswer, context: CommandContext, output: str) -> None:
    from remit.cli.output.serialization import json_text
    from remit.cli.session.object_lookup import display_name

    if output == "json":
        sys.stdout.write(json_text(answer))
        return
    for result in answer.results:
        path = escaped(display_name(context, result.kind, result.name, result.tenant))
        if result.action == "refused":
            print_problem_answer(path, result.problem)
        elif output == "name":
            click.echo(path)
        else:
            click.echo(f"{path} {click.style(result.action, fg=STYLES.get(result.action))}")


@click.command(
    epilog=examples(
        "remit delete workload web                   drain and stop its replicas, then delete it",
        "remit delete workload web --wait            wait until it is deleted",
        "remit delete -f web.yaml                    delete all objects that the file declares",
        "remit delete workloads -l app=web           delete all workloads with this label",
    )
)
@click.argument("what", nargs=-1, metavar="[KIND NAME...]", shell_complete=complete_kind)
@click.option(
    "-f", "--file", "files", multiple=True, metavar="FILE", type=click.Path(allow_dash=True), help="Objects in this manifest."
)
@click.option("-l", "--selector", default="", metavar="LABELS", help="All objects of KIND with these labels.")
@click.option("--wait", is_flag=True, help="Wait until the objects are deleted.")
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="Maximum time to wait.")
@click.option("--ignore-not-found", is_flag=True, help="Do not fail if an object does not exist.")
@server_options()
def delete(
    context: CommandContext,
    what: tuple[str, ...],
    files: tuple[str, ...],
    selector: str,
    wait: bool,
    timeout: str,
    ignore_not_found: bool,
) -> None:
    """Delete objects by KIND and NAME, by manifest, or by label.

    A workload is deleted after its replicas have drained and stopped. Exits with 1 if an object could not be deleted.
    """
    from remit.cli.session.wait_conditions import parse_timeout

    if bool(what) == bool(files):
        raise click.UsageError("give KIND and NAME, or files with -f, but not both")
    timeout_ms = parse_timeout(timeout) if wait else 0
    kinds, objects = ([], _of_files(files, context)) if files else parse_object_refs(what)
    if kinds and not selector:
        raise click.UsageError(f"no NAME given for {what[0]}; add NAMEs, or select by label with -l")
    if objects and selector:
        raise click.UsageError("give NAMEs, or select by label with -l, but not both")
    sys.exit(call_server(context, lambda api: _delete(api, context, kinds, objects, selector, timeout_ms, ignore_not_found)))


def _of_files(files: tuple[str, ...], context: CommandContext) -> list[ObjectRef]:
    """Return the declared objects in reverse order, so that an object is deleted before the objects it depends on."""
    from remit.cli.local.validate import read_manifests

    objects = read_manifests(files, context.address.tenant if context.tenant_given else "")
    return [ObjectRef(type(obj).__name__, obj.metadata.name, obj.metadata.tenant) for obj in reversed(objects)]


async def _delete(
    api: Api,
    context: CommandContext,
    kinds: Sequence[str],
    refs: Sequence[ObjectRef],
    selector: str,
    timeout_ms: int,
    lenient: bool,
) -> int:
    from remit.cli.session.object_lookup import NOT_FOUND, class_of, display_name_of, not_found_error, tenant_of
    from remit.cli.session.wait_conditions import ObjectDeleted
    from remit.client.api_caller import ApiError

    for kind in kinds:
        listed = await api.list(class_of(kind), tenant=context.tenant if is_tenant_scoped(kind) else "", labels=selector)
        refs = [*refs, *(ObjectRef(kind, item.metadata.name, item.metadata.tenant) for item in listed.items)]
    if not refs:
        click.echo("no objects match", err=True)
    failed, deleted = 0, []
    for ref in refs:
        if ref.kind == ENDPOINTS:
            raise click.UsageError("endpoints cannot be deleted, they follow the replicas; delete or scale the workload")
        tenant = tenant_of(context, ref)
        try:
            done = await api.delete(class_of(ref.kind), ref.name, tenant=tenant)
        except ApiError as error:
            if error.status == NOT_FOUND and lenient:
                continue
            error_text = (
                await not_found_error(api, context, ref)
                if error.status == NOT_FOUND
                else command_error(error, display_name_of(context, ref))
            )
            click.echo(f"Error: {error_text.format_message()}", err=True)
            failed += 1
            continue
        deleted.append(ObjectDeleted(ref, tenant, display_name_of(context, ref)))
        held_by = "its replicas have stopped" if ref.kind == "Workload" else "its finalizers and dependents are gone"
        outcome = "deleted" if done.action == "deleted" else f"marked for deletion; it is deleted once {held_by}"
        click.echo(f"{escaped(display_name_of(context, ref))} {outcome}")
    if timeout_ms and deleted:
        from remit.cli.session.wait_conditions import wait_for_goals

        sys.stdout.flush()
        await wait_for_goals(api, deleted, timeout_ms)
        for item in deleted:
            click.echo(f"{escaped(item.name)} is deleted")
    return FAILED if failed else OK
