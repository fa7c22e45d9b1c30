"""How far is a rollout? Waits for the current generation of a workload to stand, and shows how far it is."""

from __future__ import annotations

import click

from remit.cli.main import examples
from remit.cli.reaching import Asked, ask, asks_server
from remit.cli.spoken import thing_meant
from remit.model.problems import escaped


@click.group(no_args_is_help=True, epilog=examples("remit rollout status web --timeout 5m"))
def rollout() -> None:
    """How the current generation of a workload comes out."""


@rollout.command(epilog=examples("remit rollout status web", "remit rollout status web --timeout 0s    only look"))
@click.argument("workload", metavar="WORKLOAD")
@click.option("--timeout", default="60s", show_default=True, metavar="DURATION", help="How long to wait.")
@asks_server()
def status(asked: Asked, workload: str, timeout: str) -> None:
    """Wait until a WORKLOAD's current generation is out, and show how far it is.

    Exits with 1 if that takes too long or has failed, and with 3 if replicas of it have no place.
    """
    from remit.cli.finding import find, path_of, tenant_of
    from remit.cli.waiting import Arrived, timeout_of, until
    from remit.client.api import Api

    thing = thing_meant(workload, "Workload")
    timeout_ms = timeout_of(timeout)
    if thing.kind != "Workload":
        raise click.UsageError(f"a {thing.kind.lower()} is not rolled out; name a workload")

    async def look(api: Api) -> None:
        await find(api, asked, thing)
        await until(api, [Arrived(thing.name, tenant_of(asked, thing), shown=path_of(asked, thing))], timeout_ms)

    ask(asked, look)
    click.echo(f"{escaped(path_of(asked, thing))} is rolled out")
