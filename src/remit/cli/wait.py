"""When is it so far? Waits for something to become true of objects, and says where they stand if it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from remit.cli.main import examples
from remit.cli.reaching import Asked, ask, asks_server
from remit.cli.spoken import Meant, complete_kind, things_meant
from remit.model.problems import did_you_mean, escaped, meant, one_of, shown

if TYPE_CHECKING:
    from remit.cli.waiting import Goal
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
    from remit.cli.finding import find
    from remit.cli.waiting import timeout_of, until

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
    from remit.cli.finding import path_of, tenant_of
    from remit.cli.waiting import Arrived
    from remit.cli.waits import Conditioned, Ended, Gone, InPhase, Ready

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
    raise click.UsageError(f"{shown(text)} cannot be waited for; write {GOALS}")


def _check(thing: Meant, kinds: tuple[str, ...], what: str) -> None:
    if thing.kind not in kinds:
        raise click.UsageError(f"a {thing.kind.lower()} has not {what}; {one_of(kind.lower() for kind in kinds)} has")


def _phase(thing: Meant, word: str) -> str:
    from remit.model.kinds import NodeHealth
    from remit.model.records import GrantPhase, Phase

    phases: dict[str, Any] = {"Replica": Phase, "Node": NodeHealth, "Grant": GrantPhase}
    known = [str(one.value) for one in phases[thing.kind]]
    if word.lower() not in known:
        raise click.UsageError(f"there is no phase {shown(word)}; {did_you_mean(meant(word, known)) or one_of(known)}")
    return word.lower()
