"""Commands `scale`, `rollout status`, `rollout restart` and `wait`.

They change a workload, or wait for a goal with live progress. The goals themselves are in cli/session/wait_conditions.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from remit.cli.main import examples
from remit.cli.session.kind_names import ObjectRef, complete_kind, parse_object_ref, parse_object_refs
from remit.cli.session.server_call import CommandContext, CommandError, call_server, server_options
from remit.model.problems import closest_name, did_you_mean, escaped, one_of, quoted

if TYPE_CHECKING:
    from remit.cli.session.wait_conditions import Goal
    from remit.client.api import Api

PHASED = ("Replica", "Node", "Grant")
GOALS = "ready, complete, failed, delete, phase=PHASE or condition=TYPE"


@click.command(
    epilog=examples(
        "remit wait workload/web --for=ready                           rolled out, and all replicas ready",
        "remit wait workload/nightly --for=complete --timeout 1h       the job has completed",
        "remit wait workload/nightly --for=failed                      the job has failed; same as condition=Failed",
        "remit wait workload/web --for=condition=Available             the condition is True; condition=X=False for False",
        "remit wait replica/web-0 --for=phase=serving",
        "remit wait workload/web --for=delete                          it is deleted",
    )
)
@click.argument("what", nargs=-1, required=True, metavar="KIND/NAME...", shell_complete=complete_kind)
@click.option(
    "--for",
    "goal",
    required=True,
    metavar="GOAL",
    help="ready, complete, failed, delete, phase=PHASE or condition=TYPE[=STATUS].",
)
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="Maximum time to wait.")
@server_options()
def wait(context: CommandContext, what: tuple[str, ...], goal: str, timeout: str) -> None:
    """Wait until objects reach a goal.

    `ready`: a service is rolled out and ready; a job has started all replicas that may run at once. `complete` and `failed`:
    a job has ended. `delete`: the object is deleted.

    Exit codes: 1 if the timeout expired or the goal can no longer be reached, with the current state; 3 if replicas could
    not be placed.
    """
    from remit.cli.session.object_lookup import get_object
    from remit.cli.session.wait_conditions import parse_timeout, wait_for_goals

    async def wait_for(api: Api) -> None:
        for obj in objects if goal != "delete" else ():
            await get_object(api, context, obj)  # fail at once if the name does not exist, instead of waiting for the timeout
        await wait_for_goals(api, goals, timeout_ms)

    timeout_ms = parse_timeout(timeout)
    kinds, objects = parse_object_refs(what)
    if kinds:
        raise click.UsageError(f"no NAME given; write {escaped(what[0])}/NAME")
    goals = [_goal(context, obj, goal) for obj in objects]
    call_server(context, wait_for)
    for item in goals:
        click.echo(f"{escaped(item.name)} {_met(goal)}")


def _met(goal: str) -> str:
    return {"delete": "is deleted", "ready": "is ready", "complete": "is complete", "failed": "has failed"}.get(
        goal, f"has {escaped(goal)}"
    )


def _goal(context: CommandContext, ref: ObjectRef, text: str) -> Goal:
    from remit.cli.session.object_lookup import display_name_of, tenant_of
    from remit.cli.session.wait_conditions import (
        ConditionMet,
        ObjectDeleted,
        ObjectReady,
        PhaseReached,
        ReplicaSucceeded,
        WorkloadReady,
    )

    goal_kind, _, rest = text.partition("=")
    tenant, path = tenant_of(context, ref), display_name_of(context, ref)
    if goal_kind in ("delete", "ready", "complete", "failed") and rest:
        raise click.UsageError(f"--for={goal_kind} takes no value; write --for={goal_kind}")
    match goal_kind:
        case "delete":
            return ObjectDeleted(ref, tenant, path)
        case "condition" if rest:
            type_, _, status = rest.partition("=")
            return ConditionMet(ref, tenant, path, type_, status or "True")
        case "phase" if rest:
            _check(ref, PHASED, "phase")
            return PhaseReached(ref, tenant, path, _phase(ref, rest))
        case "ready" | "complete" if ref.kind == "Workload":
            return WorkloadReady(ref.name, tenant, display_name=path, must_complete=goal_kind == "complete")
        case "ready":
            _check(ref, ("Workload", "Replica", "Node"), "ready state")
            return ObjectReady(ref, tenant, path)
        case "complete":
            _check(ref, ("Workload", "Replica"), "completion")
            return ReplicaSucceeded(ref, tenant, path)
        case "failed" if ref.kind == "Workload":
            return ConditionMet(ref, tenant, path, "Failed", "True")
        case "failed":
            raise click.UsageError("--for=failed applies to workloads; for a replica use --for=phase=failed")
    raise click.UsageError(f"unknown goal {quoted(text)}; use {GOALS}")


def _check(ref: ObjectRef, kinds: tuple[str, ...], noun: str) -> None:
    if ref.kind not in kinds:
        raise click.UsageError(f"a {ref.kind.lower()} has no {noun}; use a {one_of(kind.lower() for kind in kinds)}")


def _phase(ref: ObjectRef, phase: str) -> str:
    from remit.model.kinds import NodeHealth
    from remit.model.records import GrantPhase, Phase

    phases: dict[str, Any] = {"Replica": Phase, "Node": NodeHealth, "Grant": GrantPhase}
    known = [str(item.value) for item in phases[ref.kind]]
    if phase.lower() not in known:
        raise click.UsageError(
            f"unknown phase {quoted(phase)}; {did_you_mean(closest_name(phase, known)) or f'use {one_of(known)}'}"
        )
    return phase.lower()


RESTARTED: Final = "REMIT_RESTARTED"
"""Environment variable that `rollout restart` sets in the template. Variables with the prefix REMIT_ are reserved and are not
passed to the replica, but the changed spec makes a new generation.
"""


@click.group(
    no_args_is_help=True,
    epilog=examples("remit rollout status web --timeout 5m", "remit rollout restart web    replace all replicas"),
)
def rollout() -> None:
    """Show the progress of a rollout, or restart the replicas of a workload."""


@rollout.command(
    epilog=examples("remit rollout status web", "remit rollout status web --timeout 0s    print progress without waiting")
)
@click.argument("workload", metavar="WORKLOAD")
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="Maximum time to wait.")
@server_options()
def status(context: CommandContext, workload: str, timeout: str) -> None:
    """Wait until the current generation of WORKLOAD is rolled out, and show progress.

    Exit codes: 1 if the timeout expired or the rollout failed, 3 if replicas could not be placed.
    """
    from remit.cli.session.object_lookup import display_name_of, get_object, tenant_of
    from remit.cli.session.wait_conditions import WorkloadReady, parse_timeout, wait_for_goals

    obj = parse_object_ref(workload, "Workload")
    timeout_ms = parse_timeout(timeout)
    if obj.kind != "Workload":
        raise click.UsageError(f"a {obj.kind.lower()} has no rollout; give a workload")

    async def wait_for_rollout(api: Api) -> None:
        await get_object(api, context, obj)
        await wait_for_goals(
            api, [WorkloadReady(obj.name, tenant_of(context, obj), display_name=display_name_of(context, obj))], timeout_ms
        )

    call_server(context, wait_for_rollout)
    click.echo(f"{escaped(display_name_of(context, obj))} is rolled out")


@rollout.command(epilog=examples("remit rollout restart web", "remit rollout restart web --wait"))
@click.argument("workload", metavar="WORKLOAD")
@click.option("--wait", is_flag=True, help="Wait until the new generation is rolled out.")
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="Maximum time to wait.")
@server_options()
def restart(context: CommandContext, workload: str, wait: bool, timeout: str) -> None:
    """Restart the replicas of WORKLOAD: roll out a new generation with the same spec, like any other change.

    New replicas read the current secrets and configs. The restart sets an environment variable in the template; applying a
    manifest without that variable later starts another rollout.
    """
    from remit.cli.session.object_lookup import display_name_of, get_object, tenant_of
    from remit.cli.session.wait_conditions import WorkloadReady, parse_timeout, wait_for_goals
    from remit.model.kinds import Workload
    from remit.world.clock import BootClock

    obj = parse_object_ref(workload, "Workload")
    if obj.kind != "Workload":
        raise click.UsageError(f"a {obj.kind.lower()} cannot be restarted; give a workload")
    timeout_ms = parse_timeout(timeout)

    async def restart_workload(api: Api) -> None:
        await get_object(api, context, obj)
        tenant, path = tenant_of(context, obj), display_name_of(context, obj)
        change = {"spec": {"template": {"env": {RESTARTED: BootClock().wall()}}}}
        patched = await api.patch(Workload, obj.name, change, tenant=tenant)
        click.echo(f"{escaped(path)}: rollout of generation {patched.metadata.generation} started")
        if wait:
            await wait_for_goals(api, [WorkloadReady(obj.name, tenant, display_name=path)], timeout_ms)

    call_server(context, restart_workload)


@click.command(
    epilog=examples(
        "remit scale web --replicas 6             set the number of replicas to 6",
        "remit scale web --replicas 6 --wait      also wait until they are ready; show progress",
    )
)
@click.argument("workload", metavar="WORKLOAD")
@click.option("--replicas", required=True, type=click.IntRange(0, 1_000_000), help="Desired number of replicas.")
@click.option("--wait", is_flag=True, help="Wait until all replicas are ready.")
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="Maximum time to wait.")
@server_options()
def scale(context: CommandContext, workload: str, replicas: int, wait: bool, timeout: str) -> None:
    """Set the number of replicas of WORKLOAD.

    Applying a manifest with another number overrides it.
    """
    from remit.cli.session.wait_conditions import parse_timeout

    obj = parse_object_ref(workload, "Workload")
    if obj.kind != "Workload":
        raise click.UsageError(f"a {obj.kind.lower()} cannot be scaled; give a workload")
    call_server(context, lambda api: _scale(api, context, obj, replicas, parse_timeout(timeout) if wait else 0))


async def _scale(api: Api, context: CommandContext, ref: ObjectRef, replicas: int, wait_ms: int) -> None:
    from remit.cli.session.object_lookup import display_name_of, get_object, tenant_of
    from remit.cli.session.wait_conditions import WorkloadReady, wait_for_goals
    from remit.model.kinds import Workload

    before: Workload = await get_object(api, context, ref)
    if before.spec.type == "daemon":
        raise CommandError(f"{ref} is a daemon: it has one replica on every eligible node", "change its placement instead")
    tenant, path = tenant_of(context, ref), display_name_of(context, ref)
    await api.patch(Workload, ref.name, {"spec": {"replicas": replicas}}, tenant=tenant)
    click.echo(f"{escaped(path)} scaled from {before.spec.replicas} to {replicas}")
    if wait_ms:
        await wait_for_goals(api, [WorkloadReady(ref.name, tenant, display_name=path)], wait_ms)
