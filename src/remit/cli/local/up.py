"""Command `up`: runs a complete control plane with an agent on this machine.

API, scheduler and controllers run in this process. The agent and its keeper are separate processes: if this process is
killed, replicas continue to run, and the next `remit up` on the same directory recovers them.
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
    from remit.model.kinds.registry import AnyObject
    from remit.serve.server_context import ServerContext
    from remit.world.interfaces import ProcessHandle, ProcessSpec, World
    from remit.world.net.connections import ListenAddress
    from remit.world.net.server_keys import TlsOptions

SCOPE: Final = "local"
TENANT: Final = "default"
NODES_MAX: Final = 1_000
TRIAL_QUOTA: Final = {"cpu": "1000000", "memory": "1Pi", "devices": {"gpu": 100_000}}
"""Quota of the default tenant: practically unlimited, but present, so that quota can be tried out."""
PRIORITY_CLASSES: Final = {"critical": 1_000_000, "high": 10_000, "low": -10_000}
CONTEXT: Final = "local"
READY_HEARTBEATS: Final = 5
READY_MS: Final = 10_000
POLL_MS: Final = 1_000
RESTART_DELAY_MS: Final = 100
"""Delay before the agent is restarted, doubled after each further exit. It is short because the failure detector waits only a
few heartbeat intervals.
"""
RESTART_DELAY_MS_MAX: Final = 30_000
STABLE_MS: Final = 60_000


class UpOptions(NamedTuple):
    """Settings of the command line."""

    data: Path
    listen: ListenAddress
    context: str
    nodes: int
    regions: tuple[str, ...]
    heartbeat_ms: int
    logging: LoggingOptions
    agent: tuple[str, ...]
    """Additional arguments of `remit agent`."""
    secured: TlsOptions | None

    @property
    def server(self) -> Path:
        """Directory of the server, readable by its owner only. The agent directory is separate, because replicas of other users
        need access to it.
        """
        return self.data / SERVER_DIRECTORY

    @property
    def token(self) -> Path:
        return self.server / TOKEN_FILE

    @property
    def tokens(self) -> Path:
        """Directory with the tokens of scheduler, controllers and agent."""
        return self.server / TOKENS_DIRECTORY


@click.command(
    epilog=examples(
        "remit up                                        a control plane and one node: this machine",
        "remit up --nodes 20 --regions eu-central,eu-west  twenty nodes on this machine, in two regions",
        "remit up --data /srv/remit --listen 127.0.0.1:9000",
        "remit up --tls --listen 10.0.0.5:7420            reachable from other machines, over TLS",
        "remit up --cpu 8 --memory 16Gi --device gpu=2:A10 declared instead of detected hardware",
    )
)
@data_option
@click.option(
    "--listen", type=ListenType(), default=LISTEN, show_default=True, help="Listen address of the API; port 0: any free port."
)
@click.option(
    "--context",
    default=CONTEXT,
    show_default=True,
    help="Store the server as this context, so that other commands find it; empty: do not store.",
)
@click.option(
    "--nodes", type=click.IntRange(0, NODES_MAX), default=1, show_default=True, help="Number of nodes to host on this machine."
)
@click.option("--regions", default="local", show_default=True, metavar="A,B", help="Regions assigned to the nodes in turn.")
@heartbeat_interval_option
@click.option("--cpu", default="", help="CPUs of each node.  [default: detected]")
@click.option("--memory", default="", help="Memory of each node.  [default: detected]")
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="KIND=N[:MODEL]",
    help="Devices of each node. Repeatable.  [default: detected]",
)
@click.option(
    "--sandbox",
    type=click.Choice(["auto", "bwrap", "none"]),
    default="auto",
    show_default=True,
    help="Sandbox of replicas whose manifest does not choose one.",
)
@tls_options
@log_options
@host_options
def up(
    data: Path | None,
    listen: ListenAddress,
    context: str,
    nodes: int,
    regions: str,
    heartbeat_ms: int,
    cpu: str,
    memory: str,
    devices: tuple[str, ...],
    sandbox: str,
    secured: TlsOptions | None,
    logging: LoggingOptions,
    permissions: HostOptions,
) -> None:
    """Run a complete control plane on this machine: API, scheduler, controllers, and an agent with its nodes.

    All state is in one data directory. After a kill the next start resumes from it, and replicas run on in the meantime.
    Ctrl-C or `remit down` stops everything including replicas; applied objects are back at the next start.
    """
    args_given = [("--cpu", cpu), ("--memory", memory), ("--sandbox", sandbox), *(("--device", device) for device in devices)]
    root = (data or default_data_directory()).absolute()
    permissions = permissions._replace(
        hidden=(*permissions.hidden, root / SERVER_DIRECTORY)
    )  # contains the admin token and the sealing keys
    args = (*(arg for name, value in args_given if value for arg in (name, value)), *permissions.args())
    region_names = tuple(name.strip() for name in regions.split(",") if name.strip())
    if not region_names:
        raise click.UsageError("--regions is empty; leave it out, or use names such as eu-central,eu-west")
    if nodes:
        _check_socket_path(root)
    options = UpOptions(root, listen, context, nodes, region_names, heartbeat_ms, logging, (*args, *logging.args), secured)
    sys.exit(run_until_signalled(lambda: _up(options), use_uvloop=True))


def _check_socket_path(root: Path) -> None:
    """Fail now if the socket path is too long, rather than in an agent that exits again and again."""
    from remit.agent.directory import SOCKET_BYTES_MAX, AgentDirectory

    socket = AgentDirectory(root / AGENT_DIRECTORY).socket
    if len(os.fsencode(socket)) > SOCKET_BYTES_MAX:
        problem = f"{escaped(str(socket))} is longer than {SOCKET_BYTES_MAX} bytes, the limit of socket paths"
        raise click.ClickException(f"{problem}\n  use a shorter directory with --data")


async def _up(options: UpOptions) -> None:
    from remit.store.protocol import StoreError, StoreInUse
    from remit.world.concurrency import first_failure
    from remit.world.interfaces import WorldError
    from remit.world.production import production

    world = production()
    try:
        with first_failure():
            await _run(options, world)
    except StoreInUse as error:
        raise click.ClickException(_already_running_message(options.data, error.pid)) from error
    except (StoreError, WorldError) as error:
        raise click.ClickException(escaped(str(error))) from error
    finally:
        await world.offload.close()


async def _run(options: UpOptions, world: World) -> None:
    from remit.assembly import LocalConnection, api_server, run_controllers, run_scheduler
    from remit.cli.local.server import print_admin_token
    from remit.cli.session.token_files import read_or_create_token
    from remit.client.api import Api
    from remit.law.timing import Timing

    report = ErrorReporter(options.logging.of("remit", world.clock))
    token, new = read_or_create_token(options.token, world.ids)
    async with AsyncExitStack() as open_:
        server = await open_.enter_async_context(api_server(
            options.server, world, scope=SCOPE, name=SCOPE, listen=_listen_address(options), token=token,
            timing=Timing(options.heartbeat_ms), report_bug=report.bug, log=report.log, tls_options=options.secured,
            report=report,
        ))  # fmt: skip
        await _ensure_agent_token(options, server.context)
        connection = LocalConnection(server, world)
        if new:
            print_admin_token(token)
        supervisor = AgentSupervisor(options, server, world, report)
        try:
            async with asyncio.TaskGroup() as group:
                interval_ms, metrics = options.heartbeat_ms, server.context.telemetry.registry
                group.create_task(
                    run_scheduler(connection, name="scheduler", heartbeat_ms=interval_ms, on_failure=report, metrics=metrics)
                )
                group.create_task(
                    run_controllers(
                        connection, name="controllers", heartbeat_ms=interval_ms, on_failure=report, metrics=metrics
                    )
                )
                async with Api(server.url, token, tenant=TENANT, trust=server.trust) as api:
                    await _bootstrap(api, options.regions)
                    if options.nodes:
                        group.create_task(supervisor.watch_over())
                    _announce(options, server)
                    await _report_nodes(options, api, world)
                await asyncio.Event().wait()
        finally:
            await supervisor.end()


async def _ensure_agent_token(options: UpOptions, server_context: ServerContext) -> None:
    """Create the token of the local agent, and over TLS its certificate. The scheduler and the controllers need none: they
    run in the server's process.
    """
    from remit.cli.local.agent_options import NodeOptions
    from remit.cli.session.token_files import ensure_component_token

    inventory = await server_context.world.offload(server_context.world.host.inventory)
    nodes = NodeOptions(nodes=options.nodes).names(inventory) if options.nodes else []
    if not nodes:
        return
    file = options.tokens / AGENT_DIRECTORY
    token = await ensure_component_token(file, server_context, "agent", subject=f"agent of {nodes[0]}", nodes=nodes)
    if server_context.auth.tls is not None:
        await server_context.world.offload(lambda: _enroll_local_agent(options, server_context, token, nodes))


def _enroll_local_agent(options: UpOptions, server_context: ServerContext, token: str, nodes: list[str]) -> None:
    """Give the local agent a certificate, which agents need over TLS. Other agents get theirs by joining."""
    from remit.agent.credentials import Credentials
    from remit.agent.directory import PASSABLE, AgentDirectory
    from remit.law.certificate_identity import agent_identity
    from remit.model.identity import JoinResponse
    from remit.world.net.certificates import create_key, create_request

    if server_context.auth.tls is None:
        return
    directory, key = AgentDirectory(options.data / AGENT_DIRECTORY), create_key()
    options.data.chmod(PASSABLE)
    directory.create()
    credentials, servers = Credentials(directory.run / "joined"), b""
    if server_context.auth.tls.ca_file is not None:
        servers = server_context.auth.tls.ca_file.read_bytes()
    if _is_enrolled(credentials, token, nodes, server_context.auth.tls.ca):
        credentials.save(server_context.world.disk, key=b"", response=JoinResponse("", ""), servers=servers)
        return
    certificates = server_context.auth.tls.authority.issue_agent(create_request(key), agent_identity(nodes))
    response = JoinResponse(
        "", "", certificates.calling.decode(), certificates.answering.decode(), server_context.auth.tls.ca.decode()
    )
    credentials.save(server_context.world.disk, key=key, response=response, token=token, servers=servers)


def _is_enrolled(credentials: Credentials, token: str, nodes: list[str], authority: bytes) -> bool:
    """Check whether an earlier start enrolled the agent for the same nodes and its certificate is not due for renewal."""
    from remit.law.certificate_identity import agent_identity
    from remit.world.net.certificates import CertificateError, identity_in, issued_by, renew_in_s

    try:
        if not credentials.is_joined or not credentials.uses_tls or credentials.token != token:
            return False
        calling = (credentials.directory / "calling.pem").read_bytes()
        return identity_in(calling) == agent_identity(nodes) and issued_by(calling, authority) and renew_in_s(calling) > 0
    except (OSError, CertificateError):
        return False


def _listen_address(options: UpOptions) -> ListenAddress:
    """Return the listen address. Port 0 prefers the port of the last start, so that stored contexts stay valid."""
    from remit.world.host import port_is_free

    known_port = _read_line(options.server / URL_FILE).rpartition(":")[2]
    if options.listen.port == 0 and known_port.isdigit() and port_is_free(int(known_port), options.listen.host):
        return options.listen._replace(port=int(known_port))
    return options.listen


def _read_line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _already_running_message(data: Path, pid: int | None) -> str:
    place, process = escaped(str(data)), f" (process {pid})" if pid else ""
    url = _read_line(data / SERVER_DIRECTORY / URL_FILE)
    address = f" at {escaped(url)}" if url else ""
    fix = f"use it, stop it with `remit down --data {place}`, or use another --data"
    return f"a control plane is already running on {place}{process}{address}\n  {fix}"


async def _bootstrap(api: Api, regions: Sequence[str]) -> None:
    """Create regions, the default tenant and priority classes, so that first manifests can refer to them. Existing objects are
    not changed.
    """
    from remit.cli.session.object_lookup import NOT_FOUND
    from remit.client.api import ApiError
    from remit.model.kinds import PriorityClass, PriorityClassSpec, Region, Tenant, TenantSpec
    from remit.model.metadata import Metadata
    from remit.model.resources import Amount

    objects: list[AnyObject] = [Region(metadata=Metadata(name=name)) for name in regions]
    objects.append(Tenant(metadata=Metadata(name=TENANT), spec=TenantSpec(quota=Amount.parse(TRIAL_QUOTA))))
    for name, value in PRIORITY_CLASSES.items():
        objects.append(PriorityClass(metadata=Metadata(name=name), spec=PriorityClassSpec(value=value)))
    for obj in objects:
        try:
            await api.get(type(obj), obj.metadata.name)  # a refused create would show up in the audit log
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
        else:
            continue
        try:
            await api.create(obj)
        except ApiError as error:
            if error.code != "exists":
                raise


def _announce(options: UpOptions, server: ApiServer) -> None:
    """Print the URL, and store it as the current context for other commands."""
    from remit.cli.session.contexts import ContextError, save_and_use_context

    url, ca_file = server.url, str(server.ca_file or "")
    (options.server / URL_FILE).write_text(f"{url}\n")
    click.echo(f"remit: the API is at {url}, data in {escaped(str(options.data))}")
    if not options.context:
        return
    try:
        file = save_and_use_context(options.context, url, options.token, TENANT, ca_file=ca_file)
        click.echo(f"remit: other terminals use it through context {options.context} ({escaped(str(file))})")
    except ContextError as error:
        flags = f"--server {url} --token-file {options.token}{f' --ca-file {ca_file}' if ca_file else ''}"
        click.echo(f"remit: {error.message}\n  use {flags} instead", err=True)


async def _report_nodes(options: UpOptions, api: Api, world: World) -> None:
    """Wait until all nodes are ready or a timeout has passed, and print their number."""
    from remit.client.api import Unanswered
    from remit.model.kinds import Node, NodeHealth

    deadline_ms = world.clock.now_ms() + READY_HEARTBEATS * options.heartbeat_ms + READY_MS
    ready = 0
    while ready < options.nodes and world.clock.now_ms() < deadline_ms:
        await world.clock.sleep_ms(max(50, options.heartbeat_ms // 8))
        with suppress(Unanswered):
            ready = sum(item.status.health is NodeHealth.READY for item in (await api.list(Node)).items)
    missing_text = "" if ready >= options.nodes else f" of {options.nodes}; `remit get nodes` shows why the others are not"
    ready_text = "1 node is" if ready == 1 else f"{ready} nodes are"
    click.echo(
        f"remit: {ready_text} ready{missing_text}. Ctrl-C stops everything."
        " Next: remit apply -f examples/quickstart/web.yaml --wait"
    )


class AgentSupervisor:
    """Starts and restarts the agent of this machine. An agent left by an earlier `remit up` is adopted."""

    def __init__(self, options: UpOptions, server: ApiServer, world: World, report: ErrorReporter) -> None:
        self._options, self._server, self._world, self._report = options, server, world, report
        self._root = options.data / AGENT_DIRECTORY
        self._running: ProcessHandle | None = None

    async def watch_over(self) -> None:
        from remit.agent.directory import PASSABLE, AgentDirectory
        from remit.agent.keeper.protocol import is_locked
        from remit.cli.local.down import stop_agent

        directory, pause_ms = AgentDirectory(self._root), RESTART_DELAY_MS
        self._options.data.chmod(PASSABLE)
        args_file = self._options.server / AGENT_ARGS_FILE
        if is_locked(self._world.disk, directory.agent_lock) and _read_line(args_file) != self._agent_args():
            # It was started by an earlier `remit up` with another server or other nodes: restart it. Replicas are kept.
            await stop_agent(self._root, self._world, with_work=False)
        args_file.write_text(self._agent_args() + "\n")
        while True:
            if is_locked(self._world.disk, directory.agent_lock):
                await self._world.clock.sleep_ms(POLL_MS)
                continue
            started_ms = self._world.clock.now_ms()
            self._running = await self._world.runner.start(self._process_spec())
            exit_status = await self._world.runner.wait(self._running)
            lasted_ms = self._world.clock.now_ms() - started_ms
            if lasted_ms > STABLE_MS:
                pause_ms = RESTART_DELAY_MS
            outcome = exit_status.code if exit_status.code is not None else f"signal {exit_status.signal}"
            self._report(f"the agent exited ({outcome}) and is restarted; its log is {self._log}")
            await self._world.clock.sleep_ms(pause_ms)
            pause_ms = min(2 * pause_ms, RESTART_DELAY_MS_MAX)

    @property
    def _log(self) -> Path:
        return self._options.data / "agent.log"

    def _agent_args(self) -> str:
        options = self._options
        regions = [arg for name in options.regions for arg in ("--region", name)]
        connection_args = ["--server", self._server.url, "--data", str(self._root)]
        if options.secured is None:
            connection_args += ["--token-file", str(options.tokens / AGENT_DIRECTORY)]
        return shlex.join([*connection_args, "--nodes", str(options.nodes), *regions, *options.agent])

    def _process_spec(self) -> ProcessSpec:
        from remit.world.interfaces import ProcessSpec

        args = (sys.executable, "-m", "remit.cli", "agent", *shlex.split(self._agent_args()))
        return ProcessSpec(argv=args, env=dict(os.environ), directory=Path("/"), stdout=self._log, stderr=self._log)

    async def end(self) -> None:
        """Stop the agent, then the keeper with all replicas."""
        from remit.cli.local.down import stop_agent

        click.echo("remit: stopping")
        for line in await stop_agent(self._root, self._world):
            click.echo(f"remit: {line}")
