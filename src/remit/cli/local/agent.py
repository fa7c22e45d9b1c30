"""Command `agent`: enrolls this machine and runs its node agent. The agent itself is in agent/."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from remit.agent.credentials import Credentials
from remit.cli.local.agent_options import (
    EnrollmentOptions,
    HostOptions,
    NodeOptions,
    build_nodes,
    enrollment_options,
    host_options,
    node_options,
)
from remit.cli.local.daemon_options import (
    ErrorReporter,
    LoggingOptions,
    ServerConnection,
    heartbeat_interval_option,
    log_options,
    metrics_option,
    run_until_signalled,
    server_connection_options,
)
from remit.cli.local.down import KEEPER_MODULE
from remit.cli.main import examples
from remit.model.problems import escaped
from remit.world.net.tls import Trust

if TYPE_CHECKING:
    from remit.agent.agent import Agent
    from remit.agent.directory import AgentDirectory
    from remit.client.authority_client import AuthorityClient
    from remit.client.endpoint import AuthorityStatus
    from remit.client.http_link import ScopeConnection
    from remit.world.interfaces import ProcessSpec, World
    from remit.world.net.connections import ListenAddress
    from remit.world.net.rpc_client import SocketLink

CALLBACK_ENDPOINT: Final = "logs"
RETRY_MS: Final = 1_000
ANSWER_TIMEOUT_MS: Final = 3_000
UNAUTHENTICATED: Final = 401
STOP_GRACE_MS: Final = 10_000
CALLBACK_NONCES: Final = 3
SECRET_ENVIRONMENT: Final = ("REMIT_TOKEN", "REMIT_TOKEN_FILE", "REMIT_SERVER", "REMIT_CA_FILE")
"""Environment variables of the agent that are not passed on to the keeper and the replicas."""


@click.command(
    epilog=examples(
        "remit token create --role join --node NAME > join.token",
        "remit agent --server http://127.0.0.1:7420 --name NAME --join join.token --data agent",
        "remit agent --data agent --nodes 20 --region eu-central --region eu-west    twenty nodes on this machine, for trials",
        "remit agent --data agent --cpu 8 --memory 16Gi --device gpu=2:A10           instead of the detected hardware",
    )
)
@server_connection_options
@heartbeat_interval_option
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), required=True, help="Data directory of the agent.")
@node_options
@click.option(
    "--sandbox",
    type=click.Choice(["auto", "bwrap", "none"]),
    default="auto",
    show_default=True,
    help="Sandbox of replicas whose manifest does not choose one.",
)
@host_options
@enrollment_options
@click.option("--end-work", is_flag=True, help="At shutdown, also stop all replicas and the keeper.")
@click.option("--log-bounds", default="", hidden=True, help="Retention of replica logs.")
@metrics_option
@log_options
@click.pass_context
def agent(
    ctx: click.Context,
    connection: ServerConnection,
    heartbeat_ms: int,
    data: Path,
    declared: NodeOptions,
    sandbox: str,
    permissions: HostOptions,
    enrollment: EnrollmentOptions,
    end_work: bool,
    log_bounds: str,
    metrics: ListenAddress | None,
    logging: LoggingOptions,
) -> None:
    """Run the agent of this machine, as one node or several.

    Replicas continue to run when the agent stops: its keeper process supervises them and enforces fencing deadlines, and the
    next agent on the same directory recovers them. `remit keeper --end --data DIR` stops the replicas and the keeper.
    """
    from remit.agent.keeper.log_retention import parse_log_bounds as read_bounds

    def is_given(option: str) -> bool:
        return ctx.get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE

    credentials = Credentials(data.absolute() / "run" / "joined")
    join_token = _read_join_token(enrollment.join, has_credentials=credentials.is_joined)
    if join_token or (credentials.is_joined and not is_given("token_file")):
        urls, token, trust = _server_urls(connection.servers), "", Trust(str(connection.ca_file or ""))
    else:
        urls, token, trust = connection.resolve()
        credentials = credentials._replace(directory=Path("/nonexistent"))
    try:
        bounds = read_bounds(log_bounds).to_text()
    except ValueError as error:
        raise click.BadParameter(escaped(str(error)), param_hint="--log-bounds") from error
    config = _AgentConfig(
        urls=urls, token=token, trust=trust, data=data.absolute(), declared=declared,
        heartbeat_ms=heartbeat_ms if is_given("heartbeat_ms") else 0,
        sandbox=sandbox, permissions=permissions, credentials=credentials, join_token=join_token,
        ca_digest=enrollment.ca_digest,
        end_work=end_work, bounds=bounds, metrics=metrics, logging=logging,
    )  # fmt: skip
    try:
        sys.exit(run_until_signalled(lambda: _run(config)))
    except* click.ClickException as group:
        raise group.exceptions[0] from None


@dataclass(slots=True)
class _AgentConfig:
    """Settings of the command line. `heartbeat_ms` 0: use the heartbeat interval of the scope. `token` and `trust` are replaced
    once the agent has joined.
    """

    urls: tuple[str, ...]
    token: str
    trust: Trust
    data: Path
    declared: NodeOptions
    heartbeat_ms: int
    sandbox: str
    permissions: HostOptions
    credentials: Credentials
    join_token: str
    ca_digest: str
    end_work: bool
    bounds: str
    metrics: ListenAddress | None
    logging: LoggingOptions


async def _run(config: _AgentConfig) -> None:
    from remit.agent.directory import AgentDirectory
    from remit.client.http_link import connect
    from remit.world.interfaces import DiskError, FileBusy, WorldError
    from remit.world.production import production

    directory = AgentDirectory(config.data)
    try:
        directory.create()
    except (OSError, ValueError, DiskError) as error:
        raise click.ClickException(f"--data: {escaped(str(error))}") from error
    world = production(directory.addresses)
    try:
        with ExitStack() as locks:
            try:
                locks.enter_context(world.disk.lock(directory.agent_lock))
            except FileBusy:
                other_pid = directory.agent_pid.read_text().strip() if directory.agent_pid.exists() else "unknown"
                place = escaped(str(config.data))
                raise click.ClickException(
                    f"another agent (process {escaped(other_pid)}) runs on {place}; stop it, or use another --data"
                ) from None
            except DiskError as error:
                raise click.ClickException(escaped(str(error))) from error
            directory.write_pid(world.disk, directory.agent_pid, os.getpid())
            try:
                report = ErrorReporter(config.logging.of("agent", world.clock))
                await _join(config, world, report)
                connected = connect(config.urls, config.token, world, trust=config.trust, log=report)
            except (ValueError, WorldError) as error:
                raise click.ClickException(escaped(str(error))) from error
            async with connected:
                await _run_agent(config, directory, connected)
    finally:
        await world.offload.close()


def _server_urls(servers: tuple[str, ...]) -> tuple[str, ...]:
    from remit.cli.session.contexts import server_url

    if not servers:
        raise click.UsageError("no server given; use --server URL")
    return tuple(map(server_url, servers))


async def _join(config: _AgentConfig, world: World, report: ErrorReporter) -> None:
    """Enroll with the join token unless valid credentials exist, and use the credentials from then on."""
    from remit.agent.credentials import JoinTarget, join

    if config.join_token and not (config.credentials.is_joined and await _is_still_enrolled(config, world)):
        inventory = await world.offload(world.host.inventory)
        nodes = tuple(config.declared.names(inventory))
        await join(
            config.credentials, JoinTarget(config.urls, config.join_token, nodes, config.trust, config.ca_digest), world, report
        )
        click.echo(f"agent: joined as {', '.join(nodes[:3])}; credentials are in {escaped(str(config.credentials.directory))}")
    if config.credentials.is_joined:
        config.token = config.credentials.token
        config.trust = config.credentials.client_tls if config.credentials.uses_tls else config.trust


async def _is_still_enrolled(config: _AgentConfig, world: World) -> bool:
    """Check whether a server still accepts the credentials. If no server responds, the expiry of the certificate decides,
    because a server closes connections with an expired certificate without a response.
    """
    from remit.agent.credentials import NotJoined, have_expired, renew
    from remit.world.interfaces import WorldError

    try:
        async with world.clock.timeout_ms(ANSWER_TIMEOUT_MS):
            await renew(config.credentials, config.urls, world)
    except NotJoined as error:
        return error.status != UNAUTHENTICATED
    except (WorldError, TimeoutError):
        return not have_expired(config.credentials, world)
    return True


def _read_join_token(value: str, *, has_credentials: bool) -> str:
    """Return the join token, given literally or as a file. The file may be missing once the agent has joined."""
    from remit.model.identity import TOKEN_PREFIX

    if not value or value.startswith(TOKEN_PREFIX):
        return value
    try:
        token = Path(value).read_text().strip()
    except (OSError, ValueError) as error:
        if has_credentials:
            return ""
        message = f"this is neither a token (tokens begin with {TOKEN_PREFIX}) nor a readable file ({escaped(str(error))})"
        raise click.BadParameter(message, param_hint="--join") from error
    if not token.startswith(TOKEN_PREFIX) or not token.isascii() or not token.isprintable():
        raise click.BadParameter(f"{escaped(value)} does not contain a complete token", param_hint="--join")
    return token


@asynccontextmanager
async def _credential_renewal(config: _AgentConfig, connected: ScopeConnection, report: ErrorReporter) -> AsyncIterator[None]:
    from remit.agent.credentials import run_renewals

    if not config.credentials.is_joined:
        yield
        return
    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            run_renewals(config.credentials, config.urls, connected.world, connected.link.use_certificate, report),
            name="renewing",
        )
        yield
        task.cancel()


def _callback_link(config: _AgentConfig, port: int) -> SocketLink:
    """Return the link on which servers call the agent. With a certificate it uses TLS and accepts only servers."""
    from remit.world.net.rpc_client import SocketLink

    host = f"[{config.declared.address}]" if ":" in config.declared.address else config.declared.address
    try:
        if config.credentials.uses_tls:
            return SocketLink({CALLBACK_ENDPOINT: f"tls:{host}:{port}"}, config.credentials.link_tls())
        return SocketLink({CALLBACK_ENDPOINT: f"tcp:{host}:{port}"})
    except ValueError as error:
        raise click.BadParameter(escaped(str(error)), param_hint="--address") from error


async def _run_agent(config: _AgentConfig, directory: AgentDirectory, connected: ScopeConnection) -> None:
    """Register the nodes and run the agent. The caller holds the lock of the directory."""
    from remit.agent.keeper.protocol import KeeperLauncher
    from remit.agent.setup import build_agent as build
    from remit.agent.setup import build_callbacks
    from remit.law.timing import Timing
    from remit.model.claims import Actor
    from remit.model.roles import Role

    world = connected.world
    report = ErrorReporter(config.logging.of("agent", world.clock))
    inventory = await world.offload(world.host.inventory)
    isolation = world.runner.isolation_support()
    sandbox = isolation.sandbox if config.sandbox == "auto" else config.sandbox == "bwrap"
    if config.sandbox == "bwrap" and not isolation.sandbox:
        raise click.ClickException("bubblewrap is not installed; apt-get install bubblewrap, or use --sandbox none")
    host_options = config.permissions.host_options()
    if sandbox and host_options.user:
        await world.offload(lambda: _warn_if_sandbox_needs_root(report))
    port = (await world.ports.find_free(1))[0]
    nodes = build_nodes(config.declared, inventory, port)
    name = f"{config.declared.base_name(inventory)}-{_agent_identity(directory, world)}"
    client = connected.client_for(Actor(name, Role.AGENT))
    callback = "".join(world.ids.nonce() for _ in range(CALLBACK_NONCES))
    status = await _wait_for_status(client, report, world)
    if config.heartbeat_ms and config.heartbeat_ms != status.beat_ms:
        raise click.ClickException(
            f"the heartbeat interval of this scope is {status.beat_ms} ms, not {config.heartbeat_ms} ms; "
            "leave out --heartbeat-interval"
        )
    agent_ = build(
        world, client, connected.names, directory, nodes,
        name=name, scope=status.scope, timing=Timing(status.beat_ms), sandbox=sandbox, log=report, on_failure=report,
        callback_token=callback,
        log_debug=report.log.debug,
        permissions=host_options,
        launch_keeper=KeeperLauncher(world, keeper_process_spec(directory, config.bounds), directory.keeper_lock, report),
    )  # fmt: skip
    from remit.cli.local.agent_options import startup_line

    callbacks = _callback_link(config, port).serve(CALLBACK_ENDPOINT, build_callbacks(world, agent_, callback))
    async with callbacks, _metrics_endpoint(config, agent_, report), _credential_renewal(config, connected, report):
        click.echo(startup_line(nodes, isolation, sandbox=sandbox, user=host_options.user, servers=connected.names))
        try:
            await agent_.run()
        except asyncio.CancelledError:
            await _on_shutdown(config, directory, agent_, world)
            raise


def _warn_if_sandbox_needs_root(report: ErrorReporter) -> None:
    """Warn if only root can create sandboxes here. Otherwise replicas would just fail to start."""
    import shutil

    from remit.world.host_checks import NO_UNPRIVILEGED_SANDBOX, USER_NAMESPACES_FIX, can_create_sandbox
    from remit.world.process.isolation import BUBBLEWRAP, UID_FIRST

    program = shutil.which(BUBBLEWRAP)
    if program is not None and not can_create_sandbox(program, UID_FIRST):
        report(f"bubblewrap {NO_UNPRIVILEGED_SANDBOX}; {USER_NAMESPACES_FIX}")


@asynccontextmanager
async def _metrics_endpoint(config: _AgentConfig, agent_: Agent, report: ErrorReporter) -> AsyncIterator[None]:
    """Serve metrics if --metrics is given. Otherwise nothing is imported for them, to keep agent restarts fast."""
    if config.metrics is None:
        yield
        return
    from remit.serve.metrics.collectors import agent_metrics, log_metrics
    from remit.serve.metrics.exposition import MetricsRegistry, serve_metrics

    async with serve_metrics(MetricsRegistry(agent_metrics(agent_), log_metrics(report.log)), config.metrics) as address:
        click.echo(f"agent: metrics at {address}")
        yield


async def _wait_for_status(client: AuthorityClient, report: ErrorReporter, world: World) -> AuthorityStatus:
    """Return the status of the scope. Waits until a server responds."""
    from remit.client.authority_client import RetriesExhausted

    while True:
        try:
            return await client.status(deadline_ms=ANSWER_TIMEOUT_MS)
        except RetriesExhausted as error:
            report(f"no server responds yet: {error.reason}")
            await world.clock.sleep_ms(RETRY_MS)


def _agent_identity(directory: AgentDirectory, world: World) -> str:
    """Return the persistent random id that distinguishes this agent from others of the same name."""
    from remit.world.interfaces import DiskError, FileMissing

    try:
        try:
            return world.disk.read(directory.identity).decode().strip()
        except FileMissing:
            identity = world.ids.incarnation()
            world.disk.write_atomically(directory.identity, f"{identity}\n".encode())
            return identity
    except DiskError as error:
        raise click.ClickException(escaped(str(error))) from error


def keeper_process_spec(directory: AgentDirectory, bounds: str = "") -> ProcessSpec:
    from remit.world.interfaces import ProcessSpec

    return ProcessSpec(
        argv=(sys.executable, "-m", KEEPER_MODULE, str(directory.root), bounds),
        env={name: text for name, text in os.environ.items() if name not in SECRET_ENVIRONMENT},
        directory=Path("/"),
        stdout=directory.keeper_log,
        stderr=directory.keeper_log,
    )


async def _on_shutdown(config: _AgentConfig, directory: AgentDirectory, agent_: Agent, world: World) -> None:
    from remit.agent.directory import KEEPER
    from remit.agent.keeper.protocol import KeeperClient
    from remit.agent.setup import build_secret_files
    from remit.world.interfaces import LinkError

    count = agent_.running_attempts()
    if not config.end_work:
        if count:
            end = f"`remit keeper --end --data {directory.root}` stops them"
            click.echo(
                f"agent: stopped; {count} replicas and the keeper continue. Start the agent again to manage them, or {end}"
            )
        return
    click.echo(f"agent: stopping {count} replicas and the keeper")
    try:
        await KeeperClient(world.link, KEEPER, world.clock).shut_down(STOP_GRACE_MS)
    except LinkError as error:
        click.echo(f"agent: {error}", err=True)
        return
    await world.offload(build_secret_files(directory).destroy)  # secrets of the stopped replicas
