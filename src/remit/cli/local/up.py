"""`up`: control plane and agent on this machine.

Wires it up, watches over its agent, and ends it all; no rules here.

This process is the API, the scheduler and the controllers. The agent beside it is a process of its own, and so is the agent's
keeper: when this process is killed, all that runs goes on, and the next `remit up` on the same directory finds it again.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from remit.cli.local.agent_options import HostOptions, host_options
from remit.cli.local.daemon_options import (
    AGENT_ARGS_FILE,
    AGENT_DIRECTORY,
    LISTEN,
    SERVER_DIRECTORY,
    TOKEN_FILE,
    TOKENS_DIRECTORY,
    URL_FILE,
    ErrorReporter,
    ListenType,
    LoggingOptions,
    data_option,
    default_data_directory,
    heartbeat_interval_option,
    log_options,
    run_until_signalled,
    tls_options,
)
from remit.cli.main import examples
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.agent.credentials import Credentials
    from remit.assembly import ApiServer
    from remit.client.api import Api
    from remit.model.objects import AnyObject
    from remit.serve.server_context import ServerContext
    from remit.world.interfaces import ProcessHandle, ProcessSpec, World
    from remit.world.net.connections import ListenAddress
    from remit.world.net.server_keys import TlsOptions
    from remit.world.structured_log import LogFormat, LogLevel

SCOPE: Final = "local"
TENANT: Final = "default"
NODES_MAX: Final = 1_000
TRIAL_QUOTA: Final = {"cpu": "1000000", "memory": "1Pi", "devices": {"gpu": 100_000}}
"""What the tenant of a try-out may use: quota is there to be tried, not to be in the way."""
PRIORITY_CLASSES: Final = {"critical": 1_000_000, "high": 10_000, "low": -10_000}
CONTEXT: Final = "local"
READY_HEARTBEATS: Final = 5
READY_MS: Final = 10_000
POLL_MS: Final = 1_000
RESTART_DELAY_MS: Final = 100
"""Before the first new start: whoever waits for the agent counts in beats. One that goes on ending waits ever longer."""
RESTART_DELAY_MS_MAX: Final = 30_000
STABLE_MS: Final = 60_000


class UpOptions(NamedTuple):
    """What was asked for."""

    data: Path
    listen: ListenAddress
    context: str
    nodes: int
    regions: tuple[str, ...]
    beat_ms: int
    logging: LoggingOptions
    agent: tuple[str, ...]
    """Words for `remit agent`, beyond those that are always said."""
    secured: TlsOptions | None

    @property
    def server(self) -> Path:
        """Nobody else may look there; but work that runs as another user must find its own place, which is beside it."""
        return self.data / SERVER_DIRECTORY

    @property
    def token(self) -> Path:
        return self.server / TOKEN_FILE

    @property
    def tokens(self) -> Path:
        """Of the parts that are started here."""
        return self.server / TOKENS_DIRECTORY


@click.command(
    epilog=examples(
        "remit up                                        a control plane and one node: this machine",
        "remit up --nodes 20 --regions eu-central,eu-west  twenty nodes to try things out, in two regions",
        "remit up --data /srv/remit --listen 127.0.0.1:9000",
        "remit up --tls --listen 10.0.0.5:7420            for other machines too, over TLS",
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
@heartbeat_interval_option
@click.option("--cpu", default="", help="CPUs of each node.  [default: as found]")
@click.option("--memory", default="", help="Memory of each node.  [default: as found]")
@click.option("--device", "devices", multiple=True, metavar="KIND=N[:MODEL]", help="Devices of each node.  [default: as found]")
@click.option("--sandbox", type=click.Choice(["auto", "bwrap", "none"]), default="auto", show_default=True)
@tls_options
@log_options
@host_options
def up(
    data: Path | None,
    listen: ListenAddress,
    context: str,
    nodes: int,
    regions: str,
    beat_ms: int,
    cpu: str,
    memory: str,
    devices: tuple[str, ...],
    sandbox: str,
    secured: TlsOptions | None,
    log_format: LogFormat | None,
    log_level: LogLevel,
    lending: HostOptions,
) -> None:
    """Run the whole control plane on this machine: API, scheduler, controllers, and an agent with its nodes.

    Everything is kept in one directory. Killed at any moment, it resumes there, and what runs goes on meanwhile. Ctrl-C, or
    `remit down`, ends it with all that it runs; what was applied is there again at the next start.
    """
    said = [("--cpu", cpu), ("--memory", memory), ("--sandbox", sandbox), *(("--device", one) for one in devices)]
    root = (data or default_data_directory()).absolute()
    lending = lending._replace(
        hidden=(*lending.hidden, root / SERVER_DIRECTORY)
    )  # the admin's token is there, and the keys of all secrets
    words = (*(word for name, value in said if value for word in (name, value)), *lending.words())
    named = tuple(name.strip() for name in regions.split(",") if name.strip())
    if not named:
        raise click.UsageError("--regions names none; leave it out, or write names such as eu-central,eu-west")
    if nodes:
        _check_socket_path(root)
    logging = LoggingOptions(log_format, log_level)
    here = UpOptions(root, listen, context, nodes, named, beat_ms, logging, (*words, *logging.words), secured)
    sys.exit(run_until_signalled(lambda: _up(here), quick=True))


def _check_socket_path(root: Path) -> None:
    """Said now, and not by an agent that ends again and again."""
    from remit.agent.directory import SOCKET_BYTES_MAX, AgentDirectory

    socket = AgentDirectory(root / AGENT_DIRECTORY).socket
    if len(os.fsencode(socket)) > SOCKET_BYTES_MAX:
        long = f"{escaped(str(socket))} has more than {SOCKET_BYTES_MAX} bytes, which no socket may"
        raise click.ClickException(f"{long}\n  name a shorter directory with --data")


async def _up(here: UpOptions) -> None:
    from remit.store.protocol import StoreError, StoreInUse
    from remit.world.concurrency import first_failure
    from remit.world.interfaces import WorldError
    from remit.world.production import production

    world = production()
    try:
        with first_failure():
            await _run(here, world)
    except StoreInUse as error:
        raise click.ClickException(_already_running_message(here.data, error.pid)) from error
    except (StoreError, WorldError) as error:
        raise click.ClickException(escaped(str(error))) from error
    finally:
        await world.offload.close()


async def _run(here: UpOptions, world: World) -> None:
    from remit.assembly import api_server, run_controllers, run_scheduler
    from remit.cli.local.server import print_admin_token
    from remit.cli.session.token_files import read_or_create_token
    from remit.client.api import Api
    from remit.client.http_link import connect
    from remit.law.timing import Timing

    say = ErrorReporter(here.logging.of("remit", world.clock))
    token, new = read_or_create_token(here.token, world.ids)
    async with AsyncExitStack() as open_:
        server = await open_.enter_async_context(api_server(
            here.server, world, scope=SCOPE, name=SCOPE, listen=_listen_address(here), token=token,
            timing=Timing(here.beat_ms), report_bug=say.bug, log=say.log, tls_options=here.secured, report=say,
        ))  # fmt: skip
        tokens, trust = await _ensure_tokens(here, server.context), server.trust
        scheduling = await open_.enter_async_context(connect([server.url], tokens["scheduler"], world, trust=trust))
        correcting = await open_.enter_async_context(connect([server.url], tokens["controllers"], world, trust=trust))
        if new:
            print_admin_token(token)
        beside = AgentSupervisor(here, server, world, say)
        try:
            async with asyncio.TaskGroup() as group:
                beat_ms, counted = here.beat_ms, server.context.telemetry.registry
                group.create_task(
                    run_scheduler(scheduling, name="scheduler", heartbeat_ms=beat_ms, on_failure=say, metrics=counted)
                )
                group.create_task(
                    run_controllers(correcting, name="controllers", heartbeat_ms=beat_ms, on_failure=say, metrics=counted)
                )
                async with Api(server.url, token, tenant=TENANT, trust=trust) as api:
                    await _bootstrap(api, here.regions)
                    if here.nodes:
                        group.create_task(beside.watch_over())
                    _announce(here, server)
                    await _report_nodes(here, api, world)
                await asyncio.Event().wait()
        finally:
            await beside.end()


async def _ensure_tokens(here: UpOptions, desk: ServerContext) -> dict[str, str]:
    """A token for each part that this process starts: none of them may do what another may."""
    from remit.cli.local.agent_options import NodeOptions
    from remit.cli.session.token_files import ensure_component_token

    equipment = await desk.world.offload(desk.world.host.inventory)
    nodes = NodeOptions(nodes=here.nodes).names(equipment) if here.nodes else []
    made: dict[str, str] = {}
    for role in ("scheduler", "controllers"):
        made[role] = await ensure_component_token(here.tokens / role, desk, role, subject=role)
    if nodes:
        made[AGENT_DIRECTORY] = await ensure_component_token(
            here.tokens / AGENT_DIRECTORY, desk, "agent", subject=f"agent of {nodes[0]}", nodes=nodes
        )
        if desk.auth.tls is not None:
            await desk.world.offload(lambda: _enroll_local_agent(here, desk, made[AGENT_DIRECTORY], nodes))
    return made


def _enroll_local_agent(here: UpOptions, desk: ServerContext, token: str, nodes: list[str]) -> None:
    """Over TLS an agent is known by its certificate as well: the one beside us is given what others get by joining."""
    from remit.agent.credentials import Credentials
    from remit.agent.directory import PASSABLE, AgentDirectory
    from remit.law.certificate_identity import agent_identity
    from remit.model.identity import JoinResponse
    from remit.world.net.certificates import create_key, create_request

    if desk.auth.tls is None:
        return
    directory, key = AgentDirectory(here.data / AGENT_DIRECTORY), create_key()
    here.data.chmod(PASSABLE)
    directory.create()
    known, servers = Credentials(directory.run / "joined"), b""
    if desk.auth.tls.ca_file is not None:
        servers = desk.auth.tls.ca_file.read_bytes()
    if _is_enrolled(known, token, nodes, desk.auth.tls.ca):
        known.save(desk.world.disk, key=b"", response=JoinResponse("", ""), servers=servers)
        return
    pair = desk.auth.tls.authority.issue_agent(create_request(key), agent_identity(nodes))
    said = JoinResponse("", "", pair.calling.decode(), pair.answering.decode(), desk.auth.tls.ca.decode())
    known.save(desk.world.disk, key=key, response=said, token=token, servers=servers)


def _is_enrolled(known: Credentials, token: str, nodes: list[str], authority: bytes) -> bool:
    """By an earlier start, for the same nodes, and not for much too short a time: its agent renews what it has by itself."""
    from remit.law.certificate_identity import agent_identity
    from remit.world.net.certificates import CertificateError, identity_in, issued_by, renew_in_s

    try:
        if not known.is_joined or not known.uses_tls or known.token != token:
            return False
        calling = (known.directory / "calling.pem").read_bytes()
        return identity_in(calling) == agent_identity(nodes) and issued_by(calling, authority) and renew_in_s(calling) > 0
    except (OSError, CertificateError):
        return False


def _listen_address(here: UpOptions) -> ListenAddress:
    """Any free port is, the next time, the same one if nobody has taken it: whoever knows the address finds it again."""
    from remit.world.host import port_is_free

    known = _read_line(here.server / URL_FILE).rpartition(":")[2]
    if here.listen.port == 0 and known.isdigit() and port_is_free(int(known), here.listen.host):
        return here.listen._replace(port=int(known))
    return here.listen


def _read_line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _already_running_message(data: Path, pid: int | None) -> str:
    place, who = escaped(str(data)), f" (process {pid})" if pid else ""
    known = _read_line(data / SERVER_DIRECTORY / URL_FILE)
    where = f" at {escaped(known)}" if known else ""
    cure = f"use it, end it with `remit down --data {place}`, or name another --data"
    return f"a control plane runs already on {place}{who}{where}\n  {cure}"


async def _bootstrap(api: Api, regions: Sequence[str]) -> None:
    """What a first manifest may refer to. What is there already stays as people have made it."""
    from remit.cli.session.object_lookup import NOT_FOUND
    from remit.client.api import ApiError
    from remit.model.kinds import PriorityClass, PriorityClassSpec, Region, Tenant, TenantSpec
    from remit.model.metadata import Metadata
    from remit.model.resources import Amount

    things: list[AnyObject] = [Region(metadata=Metadata(name=name)) for name in regions]
    things.append(Tenant(metadata=Metadata(name=TENANT), spec=TenantSpec(quota=Amount.parse(TRIAL_QUOTA))))
    for name, value in PRIORITY_CLASSES.items():
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


def _announce(here: UpOptions, server: ApiServer) -> None:
    """Where it is, for people and for the next command that they type."""
    from remit.cli.session.contexts import ContextError, save_and_use_context

    url, ca_file = server.url, str(server.ca_file or "")
    (here.server / URL_FILE).write_text(f"{url}\n")
    click.echo(f"remit: the API is at {url}, all is kept in {escaped(str(here.data))}")
    if not here.context:
        return
    try:
        file = save_and_use_context(here.context, url, here.token, TENANT, ca_file=ca_file)
        click.echo(f"remit: `remit` commands in other terminals find it as context {here.context} ({escaped(str(file))})")
    except ContextError as error:
        said = f"--server {url} --token-file {here.token}{f' --ca-file {ca_file}' if ca_file else ''}"
        click.echo(f"remit: {error.message}\n  say {said} instead", err=True)


async def _report_nodes(here: UpOptions, api: Api, world: World) -> None:
    """Until all are ready, or it has taken long."""
    from remit.client.api import Unanswered
    from remit.model.kinds import Node, NodeHealth

    until_ms = world.clock.now_ms() + READY_HEARTBEATS * here.beat_ms + READY_MS
    ready = 0
    while ready < here.nodes and world.clock.now_ms() < until_ms:
        await world.clock.sleep_ms(max(50, here.beat_ms // 8))
        with suppress(Unanswered):
            ready = sum(one.status.health is NodeHealth.READY for one in (await api.list(Node)).items)
    more = "" if ready >= here.nodes else f" of {here.nodes}; `remit get nodes` says why the others are not"
    many = "1 node is" if ready == 1 else f"{ready} nodes are"
    click.echo(f"remit: {many} ready{more}. Ctrl-C ends everything; try: remit apply -f examples/quickstart/web.yaml --wait")


class AgentSupervisor:
    """The agent of this machine: started, and started again when it ends; one that an earlier `up` has left is watched too."""

    def __init__(self, here: UpOptions, server: ApiServer, world: World, say: ErrorReporter) -> None:
        self._here, self._server, self._world, self._say = here, server, world, say
        self._root = here.data / AGENT_DIRECTORY
        self._running: ProcessHandle | None = None

    async def watch_over(self) -> None:
        from remit.agent.directory import PASSABLE, AgentDirectory
        from remit.agent.keeper.protocol import is_locked
        from remit.cli.local.down import stop_agent

        directory, pause_ms = AgentDirectory(self._root), RESTART_DELAY_MS
        self._here.data.chmod(PASSABLE)
        asked = self._here.server / AGENT_ARGS_FILE
        if is_locked(self._world.disk, directory.agent_lock) and _read_line(asked) != self._words():
            # It outlived the `up` that started it, and asks elsewhere, or plays other nodes. What it runs is not touched.
            await stop_agent(self._root, self._world, with_work=False)
        asked.write_text(self._words() + "\n")
        while True:
            if is_locked(self._world.disk, directory.agent_lock):
                await self._world.clock.sleep_ms(POLL_MS)
                continue
            began_ms = self._world.clock.now_ms()
            self._running = await self._world.runner.start(self._order())
            ended = await self._world.runner.wait(self._running)
            lasted_ms = self._world.clock.now_ms() - began_ms
            if lasted_ms > STABLE_MS:
                pause_ms = RESTART_DELAY_MS
            how = ended.code if ended.code is not None else f"signal {ended.signal}"
            self._say(f"the agent has ended ({how}); its last words are in {self._log}")
            await self._world.clock.sleep_ms(pause_ms)
            pause_ms = min(2 * pause_ms, RESTART_DELAY_MS_MAX)

    @property
    def _log(self) -> Path:
        return self._here.data / "agent.log"

    def _words(self) -> str:
        here = self._here
        regions = [word for name in here.regions for word in ("--region", name)]
        asks = ["--server", self._server.url, "--data", str(self._root)]
        if here.secured is None:
            asks += ["--token-file", str(here.tokens / AGENT_DIRECTORY)]
        return shlex.join([*asks, "--nodes", str(here.nodes), *regions, *here.agent])

    def _order(self) -> ProcessSpec:
        from remit.world.interfaces import ProcessSpec

        words = (sys.executable, "-m", "remit.cli", "agent", *shlex.split(self._words()))
        return ProcessSpec(argv=words, env=dict(os.environ), directory=Path("/"), stdout=self._log, stderr=self._log)

    async def end(self) -> None:
        """The agent, then the keeper with all that it runs."""
        from remit.cli.local.down import stop_agent

        click.echo("remit: ending")
        for line in await stop_agent(self._root, self._world):
            click.echo(f"remit: {line}")
