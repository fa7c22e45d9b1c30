"""How many should there be? Changes one number of a workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from remit.cli.main import examples
from remit.cli.reaching import Asked, Failure, ask, asks_server
from remit.cli.spoken import Meant, thing_meant
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api


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
    from remit.cli.waiting import timeout_of

    thing = thing_meant(workload, "Workload")
    if thing.kind != "Workload":
        raise click.UsageError(f"a {thing.kind.lower()} is not scaled; name a workload")
    ask(asked, lambda api: _scale(api, asked, thing, replicas, timeout_of(timeout) if wait else 0))


async def _scale(api: Api, asked: Asked, thing: Meant, replicas: int, wait_ms: int) -> None:
    from remit.cli.finding import find, path_of, tenant_of
    from remit.cli.waiting import Arrived, until
    from remit.model.kinds import Workload

    before: Workload = await find(api, asked, thing)
    if before.spec.type == "daemon":
        raise Failure(f"{thing} is a daemon: it has one replica on each node that fits", "change its placement instead")
    tenant, path = tenant_of(asked, thing), path_of(asked, thing)
    await api.patch(Workload, thing.name, {"spec": {"replicas": replicas}}, tenant=tenant)
    click.echo(f"{escaped(path)} scaled from {before.spec.replicas} to {replicas}")
    if wait_ms:
        await until(api, [Arrived(thing.name, tenant, shown=path)], wait_ms)
