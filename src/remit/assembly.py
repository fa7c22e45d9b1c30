"""Process wiring: builds server, scheduler, controllers and agent from a world, for production and simulation alike.

Every component takes its clock, network, disk and randomness from the given `World`, so that the simulator and the program
run the same code.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.http_link import ScopeConnection, connect
from remit.client.rpc import EndpointStub
from remit.commitment.authority import Authority
from remit.commitment.operation_queue import BATCH_LIMITS, BatchLimits
from remit.commitment.standby import Standby
from remit.correction.controller_set import ControllerSet
from remit.correction.framework.loop import LoopTiming
from remit.law.timing import Timing
from remit.model.claims import Actor
from remit.model.roles import Role
from remit.observation.reflector import Reflector
from remit.observation.scheduler_view import SchedulerView
from remit.observation.watch_cache import WatchCache
from remit.proposal.metrics import OnMark, ignore_mark
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.plugins import Filter, installed_filters, installed_scores
from remit.proposal.placement.preemption_candidates import VictimRateLimit
from remit.proposal.scheduler import LEASE, Scheduler, SchedulerTiming
from remit.serve.auth.secrets import KEY_FILE_NAME as KEYS
from remit.serve.auth.secrets import Keyring
from remit.serve.components.component_rpc import AssignmentFeed, ComponentService
from remit.store.chain import ChainPosition
from remit.store.protocol import Store
from remit.store.sqlite.store import SqliteStore
from remit.world.clock import stopwatch_ns
from remit.world.concurrency import ThreadOffload, first_failure
from remit.world.files.log_files import FileAppendLog
from remit.world.interfaces import Clock, World
from remit.world.net.connections import BoundSocket, ListenAddress
from remit.world.net.tls import Trust
from remit.world.production import production

if TYPE_CHECKING:
    from remit.serve.http.app import ReportBug
    from remit.serve.metrics.exposition import MetricsRegistry
    from remit.serve.server_context import ServerContext
    from remit.world.net.server_keys import TlsKeys, TlsOptions
    from remit.world.structured_log import StructuredLog


AUDIT: Final = "audit"


@asynccontextmanager
async def embedded_authority(
    directory: Path, world: World, *, scope: str = "local", holder: str = "remit", timing: Timing = Timing()
) -> AsyncIterator[Authority]:
    """Open a SQLite store in `directory` and yield the authority of one scope on it. The caller runs the authority."""
    store = await SqliteStore.open(directory, offload=world.offload, holder=holder, incarnation=world.ids.incarnation())
    try:
        authority = await Authority.take_over(
            store, scope=scope, holder=holder, clock=world.clock, ids=world.ids, position=store.position, timing=timing
        )
        tune_interpreter()
        yield authority
    finally:
        await store.close()


async def run_server(
    store: Store,
    world: World,
    *,
    scope: str,
    name: str,
    peers: Sequence[str],
    heartbeat_ms: int = 2_000,
    term_ms: int = 6_000,
    batch_limits: BatchLimits = BATCH_LIMITS,
    timing: Timing = Timing(),
    keys: Path | None = None,
) -> None:
    """Run one of a scope's servers, for ever. It serves at its name, forwards while another server leads, and leads when none
    does.
    """
    parts = build_server(
        store,
        world,
        scope=scope,
        name=name,
        peers=peers,
        heartbeat_ms=heartbeat_ms,
        term_ms=term_ms,
        batch_limits=batch_limits,
        timing=timing,
        keys=keys,
    )
    async with world.link.serve(name, parts.component_service):
        await parts.run()


class ServerParts(NamedTuple):
    """The components of a server, independent of the transport over which clients reach it."""

    standby: Standby
    cache: WatchCache
    reflector: Reflector
    component_service: ComponentService
    heartbeat_ms: int

    async def run(self) -> None:
        """Run the reflector and the standby, for ever."""
        with first_failure():
            async with asyncio.TaskGroup() as group:
                group.create_task(self.reflector.run(), name="board")
                await self.standby.serve(heartbeat_ms=self.heartbeat_ms)


def build_server(
    store: Store,
    world: World,
    *,
    scope: str,
    name: str,
    peers: Sequence[str] = (),
    heartbeat_ms: int = 2_000,
    term_ms: int = 6_000,
    batch_limits: BatchLimits = BATCH_LIMITS,
    timing: Timing = Timing(),
    position: ChainPosition | None = None,
    keys: Path | None = None,
) -> ServerParts:
    """Build one of a scope's servers without making it reachable. `position` is the chain position if opening the store has
    already raised the epoch. `keys` is the file of the keys that seal secrets; without it they are kept only for the life of
    this server.
    """
    peer_stubs = {peer: EndpointStub(world.link, peer) for peer in peers if peer != name}
    standby = Standby(
        store,
        scope=scope,
        name=name,
        clock=world.clock,
        ids=world.ids,
        peers=peer_stubs,
        term_ms=term_ms,
        batch_limits=batch_limits,
        timing=timing,
        position=position,
    )
    cache = WatchCache(world.clock)
    reflector = Reflector(store, store, world, cache, idle_ms=5 * heartbeat_ms)
    component_service = ComponentService(
        standby, store, AssignmentFeed(cache, store, world.clock, timing), Keyring(world.disk, world.ids, keys)
    )
    return ServerParts(standby, cache, reflector, component_service, heartbeat_ms)


class ApiServer(NamedTuple):
    """A running server with an HTTP API at `url`."""

    url: str
    parts: ServerParts
    context: ServerContext
    ca_file: Path | None = None
    """The CA certificate that clients should verify this server with; None without TLS, or if the system's CAs are enough."""

    @property
    def trust(self) -> Trust:
        return Trust(str(self.ca_file or ""))


@asynccontextmanager
async def api_server(
    directory: Path,
    world: World,
    *,
    scope: str = "local",
    name: str = "server",
    listen: ListenAddress = ListenAddress(),
    token: str,
    timing: Timing = Timing(),
    report_bug: ReportBug,
    tls_options: TlsOptions | None = None,
    report: Callable[[str], None] = lambda _: None,
    log: StructuredLog | None = None,
) -> AsyncIterator[ApiServer]:
    """Run a server with an HTTP API on a SQLite store in `directory`, for as long as the context lasts.

    `token` is an admin token; it is registered if it is unknown. The audit log is written to `directory`/audit.

    The shutdown order guarantees that nothing acknowledged is lost and that every accepted request is answered: the server
    stops accepting requests, answers those in progress, and only then stops the authority and closes the store.
    """
    # Imported here so that processes without an HTTP API do not load the HTTP stack.
    from remit.serve.auth.enrollment import ensure_bootstrap_token
    from remit.serve.http.app import Application
    from remit.serve.http.route_table import ROUTES
    from remit.serve.metrics.collectors import store_metrics
    from remit.serve.server_context import ServerContext
    from remit.world.net.http_server import serve_http

    async with AsyncExitStack() as stack:
        cpu_offload, snapshot_offload = ThreadOffload("judge"), ThreadOffload("look")
        stack.push_async_callback(cpu_offload.close)
        stack.push_async_callback(snapshot_offload.close)
        store = await SqliteStore.open(
            directory, offload=world.offload, holder=name, incarnation=world.ids.incarnation(), stopwatch_ns=stopwatch_ns
        )
        stack.push_async_callback(store.close)
        audit_storage = FileAppendLog(directory / AUDIT, AUDIT)
        stack.callback(audit_storage.close)
        with closing(BoundSocket(listen, secure=tls_options is not None)) as socket:
            tls = await _tls_keys(directory, world, tls_options, listen)
            keys = directory / KEYS
            parts = build_server(
                store,
                world,
                scope=scope,
                name=name,
                heartbeat_ms=timing.heartbeat_ms,
                timing=timing,
                position=store.position,
                keys=keys,
            )
            await world.offload(lambda: parts.component_service.keyring.sealing_keys)  # fail early if the key file is unusable
            context = ServerContext(
                parts.standby, store, parts.cache, parts.component_service, world,
                cpu_offload=cpu_offload, snapshot_offload=snapshot_offload,
                filters=installed_filters(), scores=(*DEFAULT_SCORES, *installed_scores()),
                timing=timing, audit_storage=audit_storage, tls=tls, log=log,
            )  # fmt: skip
            context.telemetry.registry.add(store_metrics(store))
            tune_interpreter()
            app = Application(ROUTES, context, report_bug)
            tls_context = None if tls is None else lambda: tls.server_context
            async with (
                _background_tasks(parts, context, _renew_certificates(tls, world, report)),
                serve_http(
                    app,
                    socket,
                    on_closing=context.streams.closing.set,
                    tls_context=tls_context,
                    on_rejected=context.audit.record_rejected_connection,
                ),
            ):
                await ensure_bootstrap_token(context, token, "admin", subject="admin")
                yield ApiServer(socket.url, parts, context, None if tls is None else tls.ca_file)


@asynccontextmanager
async def _background_tasks(
    parts: ServerParts, context: ServerContext, certificate_renewal: Coroutine[Any, Any, None]
) -> AsyncIterator[None]:
    """Run the background tasks of a server for as long as the context lasts."""
    with first_failure():
        async with asyncio.TaskGroup() as group:
            running = (
                parts.run(),
                _tune_when_loaded(parts, context.clock, context.telemetry.log),
                _sync_audit(context),
                certificate_renewal,
            )
            tasks = [group.create_task(coroutine) for coroutine in running]
            yield
            for task in tasks:
                task.cancel()
    context.audit.flush_counts(all_=True)
    context.audit.sync()


async def _renew_certificates(tls: TlsKeys | None, world: World, report: Callable[[str], None]) -> None:
    if tls is not None:
        await tls.run_renewal(world.clock, world.offload, report)


async def _tls_keys(directory: Path, world: World, tls_options: TlsOptions | None, listen: ListenAddress) -> TlsKeys | None:
    """Load or create the server's TLS keys. Imported here so that servers without TLS do not load the certificate code."""
    if tls_options is None:
        return None
    from remit.world.net.server_keys import TlsKeys

    return await world.offload(partial(TlsKeys, directory / "tls", world.disk, tls_options, listen.host))


async def _tune_when_loaded(parts: ServerParts, clock: Clock, log: StructuredLog | None) -> None:
    """Tune the interpreter again once the books and the cache, which hold most of the memory, are loaded.

    Also warns if the scope was restored from a backup and is not confirmed yet.
    """
    while parts.standby.leading is None or not parts.cache.is_current:
        await clock.sleep_ms(parts.heartbeat_ms)
    tune_interpreter()
    if log is not None:
        from remit.serve.diagnostics.status_routes import unconfirmed_after_restore

        unconfirmed = unconfirmed_after_restore(parts.cache)
        if unconfirmed:
            log.warning("this scope was restored from a backup and waits for reports of its nodes and peers", **unconfirmed)


async def _sync_audit(context: ServerContext) -> None:
    """Sync the audit log to disk in a worker thread, for ever."""
    from remit.serve.diagnostics.audit_log import SYNC_INTERVAL_MS

    while True:
        await context.clock.sleep_ms(SYNC_INTERVAL_MS)
        context.audit.flush_counts()
        await context.cpu_offload(context.audit.sync)


def build_scheduler(
    store: Store,
    linearizable: Store,
    client: AuthorityClient,
    world: World,
    *,
    name: str,
    lease: str = LEASE,
    timing: SchedulerTiming = SchedulerTiming(),
    victim_rate: VictimRateLimit = VictimRateLimit(),
    on_failure: Callable[[RetriesExhausted], None] | None = None,
    view: SchedulerView | None = None,
    filters: Sequence[Filter] = (),
    on_mark: OnMark = ignore_mark,
    stopwatch_ns: Callable[[], int] | None = None,
) -> Scheduler:
    """Build one of a scope's schedulers, with the given filters and those of installed packages. The caller runs it."""
    return Scheduler(
        store,
        linearizable,
        client,
        world,
        name=name,
        lease=lease,
        timing=timing,
        filters=(*filters, *installed_filters()),
        scores=(*DEFAULT_SCORES, *installed_scores()),
        victim_rate=victim_rate,
        on_failure=on_failure,
        view=view,
        on_mark=on_mark,
        stopwatch_ns=stopwatch_ns,
    )


def build_controllers(
    store: Store,
    linearizable: Store,
    client_for: Callable[[Actor], AuthorityClient],
    world: World,
    *,
    name: str,
    timing: LoopTiming = LoopTiming(),
    cache: WatchCache | None = None,
    lease_for: Callable[[str], str] = str,
    on_failure: Callable[[RetriesExhausted], None] | None = None,
) -> ControllerSet:
    """Build one instance of a scope's controllers over a shared watch cache; `client_for` makes a client for each. The caller
    runs it.
    """
    return ControllerSet(
        store,
        linearizable,
        client_for,
        world,
        name=name,
        timing=timing,
        cache=cache,
        lease_for=lease_for,
        on_failure=on_failure,
    )


# -- schedulers and controllers ---------------------------------------------------------------------------------------------


class ComponentConnection(Protocol):
    """How a scheduler or the controllers reach a scope: over HTTP (`ScopeConnection`), or in the server's own process
    (`LocalConnection`).
    """

    @property
    def world(self) -> World: ...

    @property
    def store(self) -> Store:
        """The scope's rows, for lists and watches."""
        ...

    def client_for(self, actor: Actor, /) -> AuthorityClient:
        """Return a client for one actor, with its own retry budget."""
        ...


class LocalConnection:
    """Reaches the authority of a server in the same process, without HTTP. Refused claims are audited as over HTTP."""

    def __init__(self, server: ApiServer, world: World) -> None:
        self.world = world
        self.store: Store = server.context.store
        self._server = server

    def client_for(self, actor: Actor, /) -> AuthorityClient:
        from remit.serve.components.refusal_audit import AuditedEndpoint

        name, context = self._server.parts.standby.name, self._server.context
        return AuthorityClient(
            {name: AuditedEndpoint(context.authority.standby, context.audit, context.clock, actor)}, actor, self.world
        )


def component_name(role: str) -> str:
    """Return the default name of a component in records."""
    return f"{role}-{os.getpid()}"


@asynccontextmanager
async def component_world(
    servers: Sequence[str], token: str, trust: Trust = Trust(), log: Callable[[str], None] | None = None
) -> AsyncIterator[ScopeConnection]:
    """Yield a production world whose link reaches the scope's servers over HTTP. `log` reports rejections of the token."""
    world = production()
    try:
        async with connect(servers, token, world, trust=trust, log=log) as connected:
            yield connected
    finally:
        await world.offload.close()


async def run_scheduler(
    connection: ComponentConnection,
    *,
    name: str,
    heartbeat_ms: int,
    on_failure: Callable[[RetriesExhausted], None] | None = None,
    metrics: MetricsRegistry | None = None,
) -> None:
    """Run a scheduler, for ever. Its metrics are added to `metrics`."""
    timing, store = Timing(heartbeat_ms), connection.store
    client = connection.client_for(Actor(name, Role.SCHEDULER))
    scheduler_timing = SchedulerTiming(lease_ms=timing.lease_ms, idle_ms=5 * heartbeat_ms)
    tune_interpreter()
    scheduler = build_scheduler(
        store,
        store,
        client,
        connection.world,
        name=name,
        timing=scheduler_timing,
        on_failure=on_failure,
        stopwatch_ns=stopwatch_ns,
    )
    if metrics is not None:
        from remit.serve.metrics.collectors import scheduler_metrics

        metrics.add(scheduler_metrics(scheduler))
    await scheduler.run()


async def run_controllers(
    connection: ComponentConnection,
    *,
    name: str,
    heartbeat_ms: int,
    on_failure: Callable[[RetriesExhausted], None] | None = None,
    metrics: MetricsRegistry | None = None,
) -> None:
    """Run all controllers, for ever. Their metrics are added to `metrics`."""
    store, timing = connection.store, LoopTiming(heartbeat_ms)
    tune_interpreter()
    controllers = build_controllers(
        store, store, connection.client_for, connection.world, name=name, timing=timing, on_failure=on_failure
    )
    if metrics is not None:
        from remit.serve.metrics.collectors import controller_metrics

        metrics.add(controller_metrics(controllers))
    await controllers.run()


SWITCH_INTERVAL_S: Final = 0.000_2


def tune_interpreter() -> None:
    """Reduce garbage collection work and the interpreter's thread switch interval.

    The books are large and have no reference cycles: objects loaded so far are frozen and the collector runs less often. The
    writer thread needs the interpreter lock a few times per commit while the next batch is being decided. With the default
    switch interval it would wait five milliseconds each time, longer than the commit itself.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
