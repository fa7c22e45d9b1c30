"""How is a whole control plane run on one machine? Wires it up, watches over its agent, and ends it all; no rules here.

This process is the API, the scheduler and the controllers. The agent beside it is a process of its own, and so is the agent's
keeper: when this process is killed, all that runs goes on, and the next `remit up` on the same directory finds it again.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from remit.cli.main import examples
from remit.cli.places import AGENT, LISTEN, TOKEN, data_directory
from remit.cli.running import Complaints, beat_option, run_until_ended
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.model.objects import AnyObject
    from remit.world.promises import World

SCOPE: Final = "local"
TENANT: Final = "default"
NODES_MAX: Final = 1_000
PLENTY: Final = {"cpu": "1000000", "memory": "1Pi", "devices": {"gpu": 100_000}}
"""What the tenant of a try-out may use: quota is there to be tried, not to be in the way."""
CLASSES: Final = {"critical": 1_000_000, "high": 10_000, "low": -10_000}


class Plan(NamedTuple):
    """What was asked for."""

    data: Path
    listen: str
    nodes: int
    regions: tuple[str, ...]
    beat_ms: int
    agent: tuple[str, ...]
    """Words for `remit agent`, beyond those that are always said."""


@click.command(
    epilog=examples(
        "remit up                                        a control plane and one node: this machine",
        "remit up --nodes 20 --regions eu-central,eu-west  twenty nodes to try things out, in two regions",
        "remit up --data /srv/remit --listen 127.0.0.1:9000",
        "remit up --cpu 8 --memory 16Gi --device gpu=2:A10 what each node says it has, instead of what was found",
    )
)
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Where all is kept.  [default: ~/.local/share/remit]")
@click.option("--listen", default=LISTEN, show_default=True, metavar="HOST:PORT", help="Where the API answers; port 0: any.")
@click.option("--nodes", type=click.IntRange(0, NODES_MAX), default=1, show_default=True, help="How many nodes this machine plays.")
@click.option("--regions", default="local", show_default=True, metavar="A,B", help="Regions that the nodes are dealt out over.")
@beat_option
@click.option("--cpu", default="", help="CPUs of each node.  [default: as found]")
@click.option("--memory", default="", help="Memory of each node.  [default: as found]")
@click.option("--device", "devices", multiple=True, metavar="KIND=N[:MODEL]", help="Devices of each node.  [default: as found]")
@click.option("--sandbox", type=click.Choice(["auto", "bwrap", "none"]), default="auto", show_default=True)
def up(
    data: Path | None,
    listen: str,
    nodes: int,
    regions: str,
    beat_ms: int,
    cpu: str,
    memory: str,
    devices: tuple[str, ...],
    sandbox: str,
) -> None:
    """Run the whole control plane on this machine: API, scheduler, controllers, and an agent with its nodes.

    Everything is kept in one directory. Killed at any moment, it resumes there, and what runs goes on meanwhile. Ctrl-C, or
    `remit down`, ends it with all that it runs; what was applied is there again at the next start.
    """
    said = [("--cpu", cpu), ("--memory", memory), ("--sandbox", sandbox), *(("--device", one) for one in devices)]
    words = tuple(word for name, value in said if value for word in (name, value))
    named = tuple(name.strip() for name in regions.split(",") if name.strip())
    if not named:
        raise click.UsageError("--regions names none; leave it out, or write names such as eu-central,eu-west")
    plan = Plan((data or data_directory()).absolute(), listen, nodes, named, beat_ms, words)
    sys.exit(run_until_ended(lambda: _up(plan), quick=True))


async def _up(plan: Plan) -> None:
    from remit.world.production import production

    world = production()
    try:
        await _run(plan, world)
    finally:
        await world.offload.close()


async def _run(plan: Plan, world: World) -> None:
    from remit.assembly import api_server, run_controllers, run_scheduler
    from remit.client.api import Api
    from remit.client.connecting import connect

    complain = Complaints("remit", world.clock.now_ms)
    async with api_server(plan.data, world, scope=SCOPE, name=SCOPE, listen=plan.listen, beat_ms=plan.beat_ms) as served:
        async with connect([served.url], served.token, world) as connected, asyncio.TaskGroup() as group:
            group.create_task(run_scheduler(connected, name="scheduler", beat_ms=plan.beat_ms, failed=complain))
            group.create_task(run_controllers(connected, name="controllers", beat_ms=plan.beat_ms, failed=complain))
            async with Api(served.url, served.token, tenant=TENANT) as api:
                await _bootstrap(api, plan.regions)
                _remember(plan, served.url)
                if plan.nodes:
                    group.create_task(_agent(plan, served.url, world, complain))
                await _announce(plan, served.url, api)
            await asyncio.Event().wait()


async def _bootstrap(api: Api, regions: Sequence[str]) -> None:
    """What a first manifest may refer to. What is there already stays as people have made it."""
    from remit.client.api import ApiError
    from remit.model.fields import Metadata
    from remit.model.kinds import PriorityClass, PriorityClassSpec, Region, Tenant, TenantSpec
    from remit.model.resources import Amount

    things: list[AnyObject] = [Region(metadata=Metadata(name=name)) for name in regions]
    things.append(Tenant(metadata=Metadata(name=TENANT), spec=TenantSpec(quota=Amount.parse(PLENTY))))
    things += [PriorityClass(metadata=Metadata(name=name), spec=PriorityClassSpec(value=value)) for name, value in CLASSES.items()]
    for thing in things:
        try:
            await api.create(thing)
        except ApiError as error:
            if error.code != "exists":
                raise
