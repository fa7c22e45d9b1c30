"""How is a whole control plane run on one machine? Wires it up, watches over its agent, and ends it all; no rules here.

This process is the API, the scheduler and the controllers. The agent beside it is a process of its own, and so is the agent's
keeper: when this process is killed, all that runs goes on, and the next `remit up` on the same directory finds it again.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from remit.cli.main import examples
from remit.cli.places import AGENT, AGENT_ASKS, LISTEN, SERVER, TOKEN, URL, data_directory
from remit.cli.running import Complaints, ListenType, beat_option, data_option, run_until_ended
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.model.objects import AnyObject
    from remit.world.binding import Listen
    from remit.world.promises import Order, Running, World

SCOPE: Final = "local"
TENANT: Final = "default"
NODES_MAX: Final = 1_000
PLENTY: Final = {"cpu": "1000000", "memory": "1Pi", "devices": {"gpu": 100_000}}
"""What the tenant of a try-out may use: quota is there to be tried, not to be in the way."""
CLASSES: Final = {"critical": 1_000_000, "high": 10_000, "low": -10_000}
CONTEXT: Final = "local"
READY_BEATS: Final = 5
READY_MS: Final = 10_000
LOOK_MS: Final = 1_000
PAUSE_MS: Final = 500
PAUSE_MS_MAX: Final = 30_000
STEADY_MS: Final = 60_000


class Installation(NamedTuple):
    """What was asked for."""

    data: Path
    listen: Listen
    context: str
    nodes: int
    regions: tuple[str, ...]
    beat_ms: int
    agent: tuple[str, ...]
    """Words for `remit agent`, beyond those that are always said."""

    @property
    def server(self) -> Path:
        """Nobody else may look there; but work that runs as another user must find its own place, which is beside it."""
        return self.data / SERVER

    @property
    def token(self) -> Path:
        return self.server / TOKEN


@click.command(
    epilog=examples(
        "remit up                                        a control plane and one node: this machine",
        "remit up --nodes 20 --regions eu-central,eu-west  twenty nodes to try things out, in two regions",
        "remit up --data /srv/remit --listen 127.0.0.1:9000",
        "remit up --cpu 8 --memory 16Gi --device gpu=2:A10 what each node says it has, instead of what was found",
    )
)
@data_option
@click.option("--listen", type=ListenType(), default=LISTEN, show_default=True, help="Where the API answers; port 0: any.")
@click.option("--context", default=CONTEXT, show_default=True, help="Under which name other commands find it; or none.")
@click.option(
    "--nodes", type=click.IntRange(0, NODES_MAX), default=1, show_default=True, help="How many nodes this machine plays."
)
@click.option("--regions", default="local", show_default=True, metavar="A,B", help="Regions that the nodes are dealt out over.")
@beat_option
@click.option("--cpu", default="", help="CPUs of each node.  [default: as found]")
@click.option("--memory", default="", help="Memory of each node.  [default: as found]")
@click.option("--device", "devices", multiple=True, metavar="KIND=N[:MODEL]", help="Devices of each node.  [default: as found]")
@click.option("--sandbox", type=click.Choice(["auto", "bwrap", "none"]), default="auto", show_default=True)
def up(
    data: Path | None,
    listen: Listen,
    context: str,
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
    root = (data or data_directory()).absolute()
    if nodes:
        _refuse_long(root)
    here = Installation(root, listen, context, nodes, named, beat_ms, words)
    sys.exit(run_until_ended(lambda: _up(here), quick=True))


def _refuse_long(root: Path) -> None:
    """Said now, and not by an agent that ends again and again."""
    from remit.agent.directory import SOCKET_BYTES_MAX, Directory

    socket = Directory(root / AGENT).socket
    if len(os.fsencode(socket)) > SOCKET_BYTES_MAX:
        long = f"{escaped(str(socket))} has more than {SOCKET_BYTES_MAX} bytes, which no socket may"
        raise click.ClickException(f"{long}\n  name a shorter directory with --data")


async def _up(here: Installation) -> None:
    from remit.commitment.authority import one_failure
    from remit.store.protocol import Owned, StoreError
    from remit.world.production import production
    from remit.world.promises import WorldError

    world = production()
    try:
        with one_failure():
            await _run(here, world)
    except Owned as error:
        raise click.ClickException(_runs_already(here.data, error.pid)) from error
    except (StoreError, WorldError) as error:
        raise click.ClickException(escaped(str(error))) from error
    finally:
        await world.offload.close()


async def _run(here: Installation, world: World) -> None:
    from remit.assembly import run_controllers, run_scheduler, served
    from remit.cli.server import token_in
    from remit.client.api import Api
    from remit.client.connecting import connect
    from remit.law.tempo import Tempo

    say = Complaints("remit", world.clock.now_ms)
    token = token_in(here.token, world.ids)
    async with served(
        here.server, world, scope=SCOPE, name=SCOPE, listen=_address(here), token=token,
        tempo=Tempo(here.beat_ms), complain=lambda asked, error: say(f"{asked}: {error!r}"),
    ) as server, connect([server.url], token, world) as connected:  # fmt: skip
        beside = Beside(here, server.url, world, say)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(run_scheduler(connected, name="scheduler", beat_ms=here.beat_ms, failed=say))
                group.create_task(run_controllers(connected, name="controllers", beat_ms=here.beat_ms, failed=say))
                async with Api(server.url, token, tenant=TENANT) as api:
                    await _bootstrap(api, here.regions)
                    if here.nodes:
                        group.create_task(beside.watch_over())
                    _announce(here, server.url)
                    await _tell_nodes(here, api, world)
                await asyncio.Event().wait()
        finally:
            await beside.end()


def _address(here: Installation) -> Listen:
    """Any free port is, the next time, the same one if nobody has taken it: whoever knows the address finds it again."""
    from remit.world.machine import port_is_free

    known = _line_in(here.server / URL).rpartition(":")[2]
    if here.listen.port == 0 and known.isdigit() and port_is_free(int(known), here.listen.host):
        return here.listen._replace(port=int(known))
    return here.listen


def _line_in(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _runs_already(data: Path, pid: int | None) -> str:
    place, who = escaped(str(data)), f" (process {pid})" if pid else ""
    known = _line_in(data / SERVER / URL)
    where = f" at {escaped(known)}" if known else ""
    cure = f"use it, end it with `remit down --data {place}`, or name another --data"
    return f"a control plane runs already on {place}{who}{where}\n  {cure}"


async def _bootstrap(api: Api, regions: Sequence[str]) -> None:
    """What a first manifest may refer to. What is there already stays as people have made it."""
    from remit.cli.finding import NOT_FOUND
    from remit.client.api import ApiError
    from remit.model.fields import Metadata
    from remit.model.kinds import PriorityClass, PriorityClassSpec, Region, Tenant, TenantSpec
    from remit.model.resources import Amount

    things: list[AnyObject] = [Region(metadata=Metadata(name=name)) for name in regions]
    things.append(Tenant(metadata=Metadata(name=TENANT), spec=TenantSpec(quota=Amount.parse(PLENTY))))
    for name, value in CLASSES.items():
        things.append(PriorityClass(metadata=Metadata(name=name), spec=PriorityClassSpec(value=value)))
    for thing in things:
        try:
            await api.get(type(thing), thing.metadata.name)  # a refusal would be on record as something that went wrong
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
        else:
            continue
        try:
            await api.create(thing)
        except ApiError as error:
            if error.code != "exists":
                raise


def _announce(here: Installation, url: str) -> None:
    """Where it is, for people and for the next command that they type."""
    from remit.cli.contexts import Unconfigured, remember

    (here.server / URL).write_text(f"{url}\n")
    click.echo(f"remit: the API is at {url}, all is kept in {escaped(str(here.data))}")
    if not here.context:
        return
    try:
        file = remember(here.context, url, here.token, TENANT)
        click.echo(f"remit: `remit` commands in other terminals find it as context {here.context} ({escaped(str(file))})")
    except Unconfigured as error:
        click.echo(f"remit: {error.message}\n  say --server {url} --token-file {here.token} instead", err=True)


async def _tell_nodes(here: Installation, api: Api, world: World) -> None:
    """Until all are ready, or it has taken long."""
    from remit.client.api import Unanswered
    from remit.model.kinds import Node, NodeHealth

    until_ms = world.clock.now_ms() + READY_BEATS * here.beat_ms + READY_MS
    ready = 0
    while ready < here.nodes and world.clock.now_ms() < until_ms:
        await world.clock.sleep_ms(max(50, here.beat_ms // 8))
        with suppress(Unanswered):
            ready = sum(one.status.health is NodeHealth.READY for one in (await api.list(Node)).items)
    more = "" if ready >= here.nodes else f" of {here.nodes}; `remit get nodes` says why the others are not"
    many = "1 node is" if ready == 1 else f"{ready} nodes are"
    click.echo(f"remit: {many} ready{more}. Ctrl-C ends everything; try: remit apply -f examples/quickstart/web.yaml --wait")


class Beside:
    """The agent of this machine: started, and started again when it ends; one that an earlier `up` has left is watched too."""

    def __init__(self, here: Installation, url: str, world: World, say: Complaints) -> None:
        self._here, self._url, self._world, self._say = here, url, world, say
        self._root = here.data / AGENT
        self._running: Running | None = None

    async def watch_over(self) -> None:
        from remit.agent.directory import PASSABLE, Directory
        from remit.agent.reviving import is_held
        from remit.cli.down import end_agent

        directory, pause_ms = Directory(self._root), PAUSE_MS
        self._here.data.chmod(PASSABLE)
        asked = self._here.server / AGENT_ASKS
        if is_held(self._world.disk, directory.agent_lock) and _line_in(asked) != self._words():
            # It outlived the `up` that started it, and asks elsewhere, or plays other nodes. What it runs is not touched.
            await end_agent(self._root, self._world, with_work=False)
        asked.write_text(self._words() + "\n")
        while True:
            if is_held(self._world.disk, directory.agent_lock):
                await self._world.clock.sleep_ms(LOOK_MS)
                continue
            began_ms = self._world.clock.now_ms()
            self._running = await self._world.runner.start(self._order())
            ended = await self._world.runner.wait(self._running)
            lasted_ms = self._world.clock.now_ms() - began_ms
            pause_ms = PAUSE_MS if lasted_ms > STEADY_MS else min(2 * pause_ms, PAUSE_MS_MAX)
            how = ended.code if ended.code is not None else f"signal {ended.signal}"
            self._say(f"the agent has ended ({how}); its last words are in {self._log}")
            await self._world.clock.sleep_ms(pause_ms)

    @property
    def _log(self) -> Path:
        return self._here.data / "agent.log"

    def _words(self) -> str:
        here = self._here
        regions = [word for name in here.regions for word in ("--region", name)]
        asks = ["--server", self._url, "--token-file", str(here.token), "--data", str(self._root)]
        return shlex.join([*asks, "--nodes", str(here.nodes), *regions, *here.agent])

    def _order(self) -> Order:
        from remit.world.promises import Order

        words = (sys.executable, "-m", "remit.cli", "agent", *shlex.split(self._words()))
        return Order(argv=words, env=dict(os.environ), directory=Path("/"), stdout=self._log, stderr=self._log)

    async def end(self) -> None:
        """The agent, then the keeper with all that it runs."""
        from remit.cli.down import end_agent

        click.echo("remit: ending")
        for line in await end_agent(self._root, self._world):
            click.echo(f"remit: {line}")
