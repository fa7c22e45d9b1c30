"""`agent`.

Runs an agent: the node's side of Remit, with the work of one machine or of several nodes that it plays. It is in agent/.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from remit.agent.credentials import Credentials
from remit.cli.local.agent_options import HostOptions, NodeOptions, build_nodes, host_options
from remit.cli.local.daemon_options import (
    ErrorReporter,
    LoggingOptions,
    heartbeat_interval_option,
    log_options,
    metrics_option,
    resolve_servers,
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
    from remit.world.structured_log import LogFormat, LogLevel

CALLBACK_ENDPOINT: Final = "logs"
RETRY_MS: Final = 1_000
ANSWER_TIMEOUT_MS: Final = 3_000
UNAUTHENTICATED: Final = 401
STOP_GRACE_MS: Final = 10_000
CALLBACK_NONCES: Final = 3
SECRET_ENVIRONMENT: Final = ("REMIT_TOKEN", "REMIT_TOKEN_FILE", "REMIT_SERVER", "REMIT_CA_FILE")
"""Of its own environment; a keeper, and what that starts, has no use for them."""


@click.command(
    epilog=examples(
        "remit token create --role join --node NAME > join.token",
        "remit agent --server http://127.0.0.1:7420 --name NAME --join join.token --data agent",
        "remit agent --data agent --nodes 20 --region eu-central --region eu-west    twenty nodes to try things out",
        "remit agent --data agent --cpu 8 --memory 16Gi --device gpu=2:A10           instead of what was found",
    )
)
@server_connection_options
@heartbeat_interval_option
@click.option(
    "--data", type=click.Path(path_type=Path, file_okay=False), required=True, help="Where it keeps what it must find again."
)
@click.option("--name", default="", help="What its node is called.  [default: the machine's name]")
@click.option(
    "--nodes", type=click.IntRange(1, 10_000), default=1, show_default=True, help="How many nodes it plays: NAME-1 to NAME-N."
)
@click.option("--region", "regions", multiple=True, help="Where they are, in turn.  [default: local]")
@click.option("--zone", "zones", multiple=True, help="In which zones, in turn.  [default: REGION-a]")
@click.option("--pool", default="default", show_default=True, help="The pool of nodes that they belong to.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="A label of each node, when it is first declared.")
@click.option(
    "--taint", "taints", multiple=True, metavar="KEY[=VALUE]:EFFECT", help="A taint of each node, when it is first declared."
)
@click.option("--cpu", default="", help="CPUs of each node.  [default: as found]")
@click.option("--memory", default="", help="Memory of each node.  [default: as found]")
@click.option("--device", "devices", multiple=True, metavar="KIND=N[:MODEL]", help="Devices of each node.  [default: as found]")
@click.option("--address", default="127.0.0.1", show_default=True, help="Where its work, and it itself, are reached.")
@click.option(
    "--sandbox",
    type=click.Choice(["auto", "bwrap", "none"]),
    default="auto",
    show_default=True,
    help="For work that does not say.",
)
@host_options
@click.option("--join", "join_token", default="", metavar="TOKEN|FILE", help="Become an agent of the scope, once.")
@click.option("--ca-digest", default="", metavar="sha256:...", help="With --join: by which the server's authority is known.")
@click.option("--end-work", is_flag=True, help="When it is ended, end all work with it, and the keeper.")
@click.option("--log-bounds", default="", hidden=True, help="How much of what work says is kept.")
@metrics_option
@log_options
@click.pass_context
def agent(
    ctx: click.Context,
    servers: tuple[str, ...],
    token_file: Path | None,
    ca_file: Path | None,
    beat_ms: int,
    data: Path,
    name: str,
    nodes: int,
    regions: tuple[str, ...],
    zones: tuple[str, ...],
    pool: str,
    labels: tuple[str, ...],
    taints: tuple[str, ...],
    cpu: str,
    memory: str,
    devices: tuple[str, ...],
    address: str,
    sandbox: str,
    join_token: str,
    ca_digest: str,
    end_work: bool,
    log_bounds: str,
    metrics: ListenAddress | None,
    log_format: LogFormat | None,
    log_level: LogLevel,
    lending: HostOptions,
) -> None:
    """Run the work of this machine, until ended.

    The work outlives it: a keeper beside it, which it starts, holds the deadlines of what must never run twice, and the next
    agent on the same directory finds everything again. `remit keeper --end --data DIR` ends all of that.
    """
    from remit.agent.keeper.log_retention import parse_log_bounds as read_bounds

    joined = Credentials(data.absolute() / "run" / "joined")
    join_token = _read_join_token(join_token, known=joined.is_joined)
    if join_token or (
        joined.is_joined and ctx.get_parameter_source("token_file") is not click.core.ParameterSource.COMMANDLINE
    ):
        urls, token, trust = _server_urls(servers), "", Trust(str(ca_file or ""))
    else:
        urls, token, trust = resolve_servers(servers, token_file, ca_file)
        joined = joined._replace(directory=Path("/nonexistent"))
    declared = NodeOptions(name, nodes, regions or ("local",), zones, pool, labels, taints, cpu, memory, devices, address)
    try:
        bounds = read_bounds(log_bounds).to_text()
    except ValueError as error:
        raise click.BadParameter(escaped(str(error)), param_hint="--log-bounds") from error
    said = ctx.get_parameter_source("beat_ms") is click.core.ParameterSource.COMMANDLINE
    asked = _AgentConfig(
        urls, token, trust, data.absolute(), declared, beat_ms if said else 0, sandbox, end_work, bounds, lending
    )
    asked.joined, asked.join_token, asked.ca_digest = joined, join_token, ca_digest
    asked.metrics, asked.logging = metrics, LoggingOptions(log_format, log_level)
    try:
        sys.exit(run_until_signalled(lambda: _run(asked)))
    except* click.ClickException as group:
        raise group.exceptions[0] from None


class _AgentConfig:
    """What was asked for on the command line. `beat_ms` 0: as the scope has it."""

    def __init__(
        self,
        urls: tuple[str, ...],
        token: str,
        trust: Trust,
        data: Path,
        declared: NodeOptions,
        beat_ms: int,
        sandbox: str,
        end_work: bool,
        bounds: str,
        lending: HostOptions,
    ) -> None:
        self.trust = trust
        self.urls, self.token, self.data, self.declared = urls, token, data, declared
        self.beat_ms, self.sandbox, self.end_work, self.bounds = beat_ms, sandbox, end_work, bounds
        self.metrics: ListenAddress | None = None
        self.joined = Credentials(Path("/nonexistent"))
        self.join_token = self.ca_digest = ""
        self.logging = LoggingOptions()
        self.lending = lending


async def _run(asked: _AgentConfig) -> None:
    from remit.agent.directory import AgentDirectory
    from remit.client.http_link import connect
    from remit.world.interfaces import DiskError, FileBusy, WorldError
    from remit.world.production import production

    directory = AgentDirectory(asked.data)
    try:
        directory.create()
    except (OSError, ValueError, DiskError) as error:
        raise click.ClickException(f"--data: {escaped(str(error))}") from error
    world = production(directory.addresses)
    try:
        with ExitStack() as held:
            try:
                held.enter_context(world.disk.lock(directory.agent_lock))
            except FileBusy:
                other = directory.agent_pid.read_text().strip() if directory.agent_pid.exists() else "unknown"
                where = escaped(str(asked.data))
                raise click.ClickException(
                    f"another agent (process {escaped(other)}) runs on {where}; end it, or use another --data"
                ) from None
            except DiskError as error:
                raise click.ClickException(escaped(str(error))) from error
            directory.write_pid(world.disk, directory.agent_pid, os.getpid())
            try:
                complain = ErrorReporter(asked.logging.of("agent", world.clock))
                await _join(asked, world, complain)
                connected = connect(asked.urls, asked.token, world, trust=asked.trust, log=complain)
            except (ValueError, WorldError) as error:
                raise click.ClickException(escaped(str(error))) from error
            async with connected:
                await _run_agent(asked, directory, connected)
    finally:
        await world.offload.close()


def _server_urls(servers: tuple[str, ...]) -> tuple[str, ...]:
    from remit.cli.session.contexts import server_url

    if not servers:
        raise click.UsageError("say with --server URL where the server is")
    return tuple(map(server_url, servers))


async def _join(asked: _AgentConfig, world: World, complain: ErrorReporter) -> None:
    """Become who it is, if it has not yet, or is not any more; then be that one. The join token is not needed again."""
    from remit.agent.credentials import JoinTarget, join

    if asked.join_token and not (asked.joined.is_joined and await _is_still_enrolled(asked, world)):
        equipment = await world.offload(world.host.inventory)
        nodes = tuple(asked.declared.names(equipment))
        await join(asked.joined, JoinTarget(asked.urls, asked.join_token, nodes, asked.trust, asked.ca_digest), world, complain)
        click.echo(f"agent: joined as {', '.join(nodes[:3])}; who it is stands in {escaped(str(asked.joined.directory))}")
    if asked.joined.is_joined:
        asked.token = asked.joined.token
        asked.trust = asked.joined.client_tls if asked.joined.uses_tls else asked.trust


async def _is_still_enrolled(asked: _AgentConfig, world: World) -> bool:
    """False: a server says that it is not, so it may join again, if its join token lets it. Silence says nothing, unless its
    name has run out: a server that is shown an old certificate hangs up, and says no word to it ever again.
    """
    from remit.agent.credentials import NotJoined, have_expired, renew
    from remit.world.interfaces import WorldError

    try:
        async with world.clock.timeout_ms(ANSWER_TIMEOUT_MS):
            await renew(asked.joined, asked.urls, world)
    except NotJoined as error:
        return error.status != UNAUTHENTICATED
    except (WorldError, TimeoutError):
        return not have_expired(asked.joined, world)
    return True


def _read_join_token(said: str, *, known: bool) -> str:
    """As it was written, or from the file that was named, which may be gone once it has joined."""
    from remit.model.identity import TOKEN_PREFIX

    if not said or said.startswith(TOKEN_PREFIX):
        return said
    try:
        found = Path(said).read_text().strip()
    except (OSError, ValueError) as error:
        if known:
            return ""
        wrong = f"it is neither a token, which begins with {TOKEN_PREFIX}, nor a file that can be read ({escaped(str(error))})"
        raise click.BadParameter(wrong, param_hint="--join") from error
    if not found.startswith(TOKEN_PREFIX) or not found.isascii() or not found.isprintable():
        raise click.BadParameter(f"{escaped(said)} has no token in it; write the whole one", param_hint="--join")
    return found


@asynccontextmanager
async def _credential_renewal(asked: _AgentConfig, connected: ScopeConnection, complain: ErrorReporter) -> AsyncIterator[None]:
    from remit.agent.credentials import run_renewals

    if not asked.joined.is_joined:
        yield
        return
    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            run_renewals(asked.joined, asked.urls, connected.world, connected.link.use_certificate, complain), name="renewing"
        )
        yield
        task.cancel()


def _callback_link(asked: _AgentConfig, port: int) -> SocketLink:
    """Where servers ask it: over TLS as soon as it has a certificate, and then nobody but servers."""
    from remit.world.net.rpc_client import SocketLink

    host = f"[{asked.declared.address}]" if ":" in asked.declared.address else asked.declared.address
    try:
        if asked.joined.uses_tls:
            return SocketLink({CALLBACK_ENDPOINT: f"tls:{host}:{port}"}, asked.joined.link_tls())
        return SocketLink({CALLBACK_ENDPOINT: f"tcp:{host}:{port}"})
    except ValueError as error:
        raise click.BadParameter(escaped(str(error)), param_hint="--address") from error


async def _run_agent(asked: _AgentConfig, directory: AgentDirectory, connected: ScopeConnection) -> None:
    """Everything but the directory's lock: declare, run, and say so."""
    from remit.agent.keeper.protocol import KeeperLauncher
    from remit.agent.setup import build_agent as build
    from remit.agent.setup import build_callbacks
    from remit.law.timing import Timing
    from remit.model.claims import Actor, Role

    world = connected.world
    complain = ErrorReporter(asked.logging.of("agent", world.clock))
    equipment = await world.offload(world.host.inventory)
    confinement = world.runner.isolation_support()
    sandbox = confinement.sandbox if asked.sandbox == "auto" else asked.sandbox == "bwrap"
    if asked.sandbox == "bwrap" and not confinement.sandbox:
        raise click.ClickException("bubblewrap is not installed; apt-get install bubblewrap, or say --sandbox none")
    lends = asked.lending.lends()
    if sandbox and lends.user:
        await world.offload(lambda: _warn_if_sandbox_needs_root(complain))
    port = (await world.ports.find_free(1))[0]
    nodes = build_nodes(asked.declared, equipment, port)
    name = f"{asked.declared.called(equipment)}-{_agent_identity(directory, world)}"
    client = connected.client_for(Actor(name, Role.AGENT))
    callback = "".join(world.ids.nonce() for _ in range(CALLBACK_NONCES))
    status = await _wait_for_status(client, complain, world)
    if asked.beat_ms and asked.beat_ms != status.beat_ms:
        raise click.ClickException(f"this scope beats every {status.beat_ms} ms, not {asked.beat_ms}; start it without --beat")
    one = build(
        world, client, connected.names, directory, nodes,
        name=name, scope=status.scope, timing=Timing(status.beat_ms), sandbox=sandbox, log=complain, on_failure=complain,
        callback_token=callback,
        log_debug=complain.log.debug,
        permissions=lends,
        launch_keeper=KeeperLauncher(world, keeper_process_spec(directory, asked.bounds), directory.keeper_lock, complain),
    )  # fmt: skip
    from remit.cli.local.agent_options import startup_line

    heard = _callback_link(asked, port).serve(CALLBACK_ENDPOINT, build_callbacks(world, one, callback))
    async with heard, _metrics_endpoint(asked, one, complain), _credential_renewal(asked, connected, complain):
        click.echo(startup_line(nodes, confinement, sandbox=sandbox, user=lends.user, servers=connected.names))
        try:
            await one.run()
        except asyncio.CancelledError:
            await _on_shutdown(asked, directory, one, world)
            raise


def _warn_if_sandbox_needs_root(complain: ErrorReporter) -> None:
    """Some systems let root alone make one: said now, since work will only say that it has ended."""
    import shutil

    from remit.world.host_checks import NO_UNPRIVILEGED_SANDBOX, USER_NAMESPACES_FIX, can_create_sandbox
    from remit.world.process.isolation import BUBBLEWRAP, UID_FIRST

    program = shutil.which(BUBBLEWRAP)
    if program is not None and not can_create_sandbox(program, UID_FIRST):
        complain(f"bubblewrap {NO_UNPRIVILEGED_SANDBOX}; {USER_NAMESPACES_FIX}")


@asynccontextmanager
async def _metrics_endpoint(asked: _AgentConfig, one: Agent, complain: ErrorReporter) -> AsyncIterator[None]:
    """Tell what is counted, if that was asked for: else nothing is loaded for it, for an agent must be back soon."""
    if asked.metrics is None:
        yield
        return
    from remit.serve.metrics.collectors import agent_metrics, log_metrics
    from remit.serve.metrics.exposition import MetricsRegistry, serve_metrics

    async with serve_metrics(MetricsRegistry(agent_metrics(one), log_metrics(complain.log)), asked.metrics) as where:
        click.echo(f"agent: what it counts is at {where}")
        yield


async def _wait_for_status(client: AuthorityClient, complain: ErrorReporter, world: World) -> AuthorityStatus:
    """Of the scope; waited for, since an agent without one has nothing to do."""
    from remit.client.authority_client import RetriesExhausted

    while True:
        try:
            return await client.status(deadline_ms=ANSWER_TIMEOUT_MS)
        except RetriesExhausted as error:
            complain(f"no server answers yet: {error.reason}")
            await world.clock.sleep_ms(RETRY_MS)


def _agent_identity(directory: AgentDirectory, world: World) -> str:
    """What tells this agent from another of the same name: made once, and kept."""
    from remit.world.interfaces import DiskError, FileMissing

    try:
        try:
            return world.disk.read(directory.identity).decode().strip()
        except FileMissing:
            made = world.ids.incarnation()
            world.disk.write_atomically(directory.identity, f"{made}\n".encode())
            return made
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


async def _on_shutdown(asked: _AgentConfig, directory: AgentDirectory, one: Agent, world: World) -> None:
    from remit.agent.directory import KEEPER
    from remit.agent.keeper.protocol import KeeperClient
    from remit.agent.setup import build_secret_files
    from remit.world.interfaces import LinkError

    count = one.running_attempts()
    if not asked.end_work:
        if count:
            end = f"`remit keeper --end --data {directory.root}` ends it"
            click.echo(f"agent: {count} replicas run on, and the keeper with them; start the agent again to go on, or {end}")
        return
    click.echo(f"agent: ends {count} replicas, and the keeper")
    try:
        await KeeperClient(world.link, KEEPER, world.clock).shut_down(STOP_GRACE_MS)
    except LinkError as error:
        click.echo(f"agent: {error}", err=True)
        return
    await world.offload(build_secret_files(directory).destroy)  # what that work was to read
