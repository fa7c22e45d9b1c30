"""`scale`, `rollout status`, `rollout restart`, `wait`.

Waits for something to become true of objects, and says where they stand if it does not.

Waits for the current generation of a workload to stand, and shows how far it is; or begins another.

Changes one number of a workload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from remit.cli.main import examples
from remit.cli.session.kind_names import Meant, complete_kind, thing_meant, things_meant
from remit.cli.session.server_call import Asked, Failure, ask, asks_server
from remit.model.problems import closest_name, did_you_mean, escaped, one_of, quoted

if TYPE_CHECKING:
    from remit.cli.session.wait_conditions import Goal
    from remit.client.api import Api

PHASED = ("Replica", "Node", "Grant")
GOALS = "ready, complete, failed, delete, phase=PHASE or condition=TYPE"


@click.command(
    epilog=examples(
        "remit wait workload/web --for=ready                           rolled out, and all replicas ready",
        "remit wait workload/nightly --for=complete --timeout 1h       a job is done",
        "remit wait workload/nightly --for=failed                      a job is given up; as condition=Failed",
        "remit wait workload/web --for=condition=Available             a condition says True; =X=False for another",
        "remit wait replica/web-0 --for=phase=serving",
        "remit wait workload/web --for=delete                          it is gone",
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
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="How long at most.")
@asks_server()
def wait(asked: Asked, what: tuple[str, ...], goal: str, timeout: str) -> None:
    """Wait until something is true of objects.

    Exits with 1 if time is up or it cannot be any more, saying where it stands, and with 3 if work of it never found a place.
    """
    from remit.cli.session.object_lookup import find
    from remit.cli.session.wait_conditions import timeout_of, until

    async def wait_for(api: Api) -> None:
        for thing in things if goal != "delete" else ():
            await find(api, asked, thing)  # a name that is not there would be waited for in vain
        await until(api, goals, timeout_ms)

    timeout_ms = timeout_of(timeout)
    kinds, things = things_meant(what)
    if kinds:
        raise click.UsageError(f"say which: {escaped(what[0])}/NAME")
    goals = [_goal(asked, thing, goal) for thing in things]
    ask(asked, wait_for)
    for one in goals:
        click.echo(f"{escaped(one.name)} {_met(goal)}")


def _met(goal: str) -> str:
    return {"delete": "is gone", "ready": "is ready", "complete": "is complete", "failed": "has failed"}.get(
        goal, f"has {escaped(goal)}"
    )


def _goal(asked: Asked, thing: Meant, text: str) -> Goal:
    from remit.cli.session.object_lookup import path_of, tenant_of
    from remit.cli.session.wait_conditions import Arrived, Conditioned, Ended, Gone, InPhase, Ready

    word, _, rest = text.partition("=")
    tenant, path = tenant_of(asked, thing), path_of(asked, thing)
    if word in ("delete", "ready", "complete", "failed") and rest:
        raise click.UsageError(f"--for={word} takes no value")
    match word:
        case "delete":
            return Gone(thing, tenant, path)
        case "condition" if rest:
            type_, _, status = rest.partition("=")
            return Conditioned(thing, tenant, path, type_, status or "True")
        case "phase" if rest:
            _check(thing, PHASED, "a phase")
            return InPhase(thing, tenant, path, _phase(thing, rest))
        case "ready" | "complete" if thing.kind == "Workload":
            return Arrived(thing.name, tenant, shown=path, done=word == "complete")
        case "ready":
            _check(thing, ("Workload", "Replica", "Node"), "readiness")
            return Ready(thing, tenant, path)
        case "complete":
            _check(thing, ("Workload", "Replica"), "an end")
            return Ended(thing, tenant, path)
        case "failed" if thing.kind == "Workload":
            return Conditioned(thing, tenant, path, "Failed", "True")
        case "failed":
            raise click.UsageError("--for=failed is of workloads; of a replica write --for=phase=failed")
    raise click.UsageError(f"{quoted(text)} cannot be waited for; write {GOALS}")


def _check(thing: Meant, kinds: tuple[str, ...], what: str) -> None:
    if thing.kind not in kinds:
        raise click.UsageError(f"a {thing.kind.lower()} has not {what}; {one_of(kind.lower() for kind in kinds)} has")


def _phase(thing: Meant, word: str) -> str:
    from remit.model.kinds import NodeHealth
    from remit.model.records import GrantPhase, Phase

    phases: dict[str, Any] = {"Replica": Phase, "Node": NodeHealth, "Grant": GrantPhase}
    known = [str(one.value) for one in phases[thing.kind]]
    if word.lower() not in known:
        raise click.UsageError(f"there is no phase {quoted(word)}; {did_you_mean(closest_name(word, known)) or one_of(known)}")
    return word.lower()


RESTARTED: Final = "REMIT_RESTARTED"
"""Variables of such names are Remit's own, so work sees nothing of it; but its spec is another."""


@click.group(
    no_args_is_help=True,
    epilog=examples("remit rollout status web --timeout 5m", "remit rollout restart web    one by one"),
)
def rollout() -> None:
    """How the current generation of a workload comes out; or a new one that differs in nothing."""


@rollout.command(epilog=examples("remit rollout status web", "remit rollout status web --timeout 0s    only look"))
@click.argument("workload", metavar="WORKLOAD")
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="How long to wait.")
@asks_server()
def status(asked: Asked, workload: str, timeout: str) -> None:
    """Wait until a WORKLOAD's current generation is out, and show how far it is.

    Exits with 1 if that takes too long or has failed, and with 3 if replicas of it have no place.
    """
    from remit.cli.session.object_lookup import find, path_of, tenant_of
    from remit.cli.session.wait_conditions import Arrived, timeout_of, until

    thing = thing_meant(workload, "Workload")
    timeout_ms = timeout_of(timeout)
    if thing.kind != "Workload":
        raise click.UsageError(f"a {thing.kind.lower()} is not rolled out; name a workload")

    async def look(api: Api) -> None:
        await find(api, asked, thing)
        await until(api, [Arrived(thing.name, tenant_of(asked, thing), shown=path_of(asked, thing))], timeout_ms)

    ask(asked, look)
    click.echo(f"{escaped(path_of(asked, thing))} is rolled out")


@rollout.command(epilog=examples("remit rollout restart web", "remit rollout restart web --wait"))
@click.argument("workload", metavar="WORKLOAD")
@click.option("--wait", is_flag=True, help="Wait until the new generation is out.")
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="How long to wait.")
@asks_server()
def restart(asked: Asked, workload: str, wait: bool, timeout: str) -> None:
    """Begin a WORKLOAD anew: a generation like the current one takes its place, as any other would.

    What starts then reads the secrets and configs as they are by then. A file that is applied later, without the mark that
    this leaves, begins another.
    """
    from remit.cli.session.object_lookup import find, path_of, tenant_of
    from remit.cli.session.wait_conditions import Arrived, timeout_of, until
    from remit.model.kinds import Workload
    from remit.world.clock import BootClock

    thing = thing_meant(workload, "Workload")
    if thing.kind != "Workload":
        raise click.UsageError(f"a {thing.kind.lower()} is not restarted; name a workload")
    timeout_ms = timeout_of(timeout)

    async def begin(api: Api) -> None:
        await find(api, asked, thing)
        tenant, path = tenant_of(asked, thing), path_of(asked, thing)
        change = {"spec": {"template": {"env": {RESTARTED: BootClock().wall()}}}}
        made = await api.patch(Workload, thing.name, change, tenant=tenant)
        click.echo(f"{escaped(path)} begins anew, as generation {made.metadata.generation}")
        if wait:
            await until(api, [Arrived(thing.name, tenant, shown=path)], timeout_ms)

    ask(asked, begin)


@click.command(
    epilog=examples(
        "remit scale web --replicas 6             six of them from now on",
        "remit scale web --replicas 6 --wait      until they stand, and show how far each is",
    )
)
@click.argument("workload", metavar="WORKLOAD")
@click.option("--replicas", required=True, type=click.IntRange(0, 1_000_000), help="How many there should be.")
@click.option("--wait", is_flag=True, help="Wait until they stand.")
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="How long to wait.")
@asks_server()
def scale(asked: Asked, workload: str, replicas: int, wait: bool, timeout: str) -> None:
    """Set how many replicas a WORKLOAD should have.

    A file that says another number wins when it is applied again.
    """
    from remit.cli.session.wait_conditions import timeout_of

    thing = thing_meant(workload, "Workload")
    if thing.kind != "Workload":
        raise click.UsageError(f"a {thing.kind.lower()} is not scaled; name a workload")
    ask(asked, lambda api: _scale(api, asked, thing, replicas, timeout_of(timeout) if wait else 0))


async def _scale(api: Api, asked: Asked, thing: Meant, replicas: int, wait_ms: int) -> None:
    from remit.cli.session.object_lookup import find, path_of, tenant_of
    from remit.cli.session.wait_conditions import Arrived, until
    from remit.model.kinds import Workload

    before: Workload = await find(api, asked, thing)
    if before.spec.type == "daemon":
        raise Failure(f"{thing} is a daemon: it has one replica on each node that fits", "change its placement instead")
    tenant, path = tenant_of(asked, thing), path_of(asked, thing)
    await api.patch(Workload, thing.name, {"spec": {"replicas": replicas}}, tenant=tenant)
    click.echo(f"{escaped(path)} scaled from {before.spec.replicas} to {replicas}")
    if wait_ms:
        await until(api, [Arrived(thing.name, tenant, shown=path)], wait_ms)
