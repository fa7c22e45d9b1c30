"""How far is a rollout? Waits for the current generation of a workload to stand, and shows how far it is; or begins another."""

from __future__ import annotations

from typing import Final

import click

from remit.cli.main import examples
from remit.cli.reaching import Asked, ask, asks_server
from remit.cli.spoken import thing_meant
from remit.model.problems import escaped

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
    from remit.cli.finding import find, path_of, tenant_of
    from remit.cli.waiting import Arrived, timeout_of, until
    from remit.client.api import Api
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
