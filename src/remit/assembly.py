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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from remit.agent.setup import build_agent as agent
from remit.agent.setup import build_keeper as keeper
from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.http_link import ScopeConnection, connect
from remit.client.rpc import EndpointStub
from remit.commitment.authority import Authority
from remit.commitment.operation_queue import BATCH_LIMITS, BatchLimits
from remit.commitment.standby import Standby
from remit.correction.controller_set import ControllerSet
from remit.correction.framework.loop import LoopTiming
from remit.law.timing import Timing
from remit.model.claims import Actor, Role
from remit.observation.reflector import Reflector
from remit.observation.scheduler_view import SchedulerView
from remit.observation.watch_cache import WatchCache
from remit.proposal.metrics import OnMark, ignore_mark
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.plugins import Filter, installed_filters, installed_scores
from remit.proposal.placement.preemption_candidates import VictimRateLimit
from remit.proposal.scheduler import LEASE, SchedulerTiming, Scheduler
from remit.serve.auth.secrets import KEY_FILE_NAME as KEYS
from remit.serve.auth.secrets import Keyring
from remit.serve.components.component_rpc import ComponentService, AssignmentFeed
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
    from remit.world.net.server_keys import TlsOptions, TlsKeys
    from remit.world.structured_log import StructuredLog


AUDIT: Final = "audit"


@asynccontextmanager
async def embedded_authority(
    directory: Path, world: World, *, scope: str = "local", holder: str = "remit", tempo: Timing = Timing()
) -> AsyncIterator[Authority]:
    """Open a SQLite store in `directory` and yield the authority of one scope on it. The caller runs the authority."""
    store = await SqliteStore.open(directory, offload=world.offload, holder=holder, incarnation=world.ids.incarnation())
    try:
        authority = await Authority.take_over(
            store, scope=scope, holder=holder, clock=world.clock, ids=world.ids, position=store.position, timing=tempo
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
    beat_ms: int = 2_000,
    term_ms: int = 6_000,
    batch_max: BatchLimits = BATCH_LIMITS,
    tempo: Timing = Timing(),
    keys: Path | None = None,
) -> None:
    """Run one of a scope's servers, for ever. It serves at its name, forwards while another server leads, and leads when none
    does.
    """
    one = build_server(
        store,
        world,
        scope=scope,
        name=name,
        peers=peers,
        beat_ms=beat_ms,
        term_ms=term_ms,
        batch_max=batch_max,
        tempo=tempo,
        keys=keys,
    )
    async with world.link.serve(name, one.door):
        await one.run()


class ServerParts(NamedTuple):
    """The components of a server, independent of the transport over which clients reach it."""

    standby: Standby
    cache: WatchCache
    reflector: Reflector
    door: ComponentService
    beat_ms: int

    async def run(self) -> None:
        """Run the reflector and the standby, for ever."""
        with first_failure():
            async with asyncio.TaskGroup() as group:
                group.create_task(self.reflector.run(), name="board")
                await self.standby.serve(heartbeat_ms=self.beat_ms)


def build_server(
    store: Store,
    world: World,
    *,
    scope: str,
    name: str,
    peers: Sequence[str] = (),
    beat_ms: int = 2_000,
    term_ms: int = 6_000,
    batch_max: BatchLimits = BATCH_LIMITS,
    tempo: Timing = Timing(),
    place: ChainPosition | None = None,
    keys: Path | None = None,
) -> ServerParts:
    """Build one of a scope's servers without making it reachable. `place` is the chain position if opening the store has
    already raised the epoch. `keys` is the file of the keys that seal secrets; without it they are kept only for the life of
    this server.
    """
    others = {peer: EndpointStub(world.link, peer) for peer in peers if peer != name}
    standby = Standby(
        store,
        scope=scope,
        name=name,
        clock=world.clock,
        ids=world.ids,
        peers=others,
        term_ms=term_ms,
        batch_limits=batch_max,
        timing=tempo,
        position=place,
    )
    board = WatchCache(world.clock)
    follower = Reflector(store, store, world, board, idle_ms=5 * beat_ms)
    door = ComponentService(standby, store, AssignmentFeed(board, store, world.clock, tempo), Keyring(world.disk, world.ids, keys))
    return ServerParts(standby, board, follower, door, beat_ms)


class ApiServer(NamedTuple):
    """A running server with an HTTP API at `url`."""

    url: str
    parts: ServerParts
    desk: ServerContext
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
    tempo: Timing = Timing(),
    complain: ReportBug,
    secured: TlsOptions | None = None,
    tell: Callable[[str], None] = lambda _: None,
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

    async with AsyncExitStack() as open_:
        judging, looking = ThreadOffload("judge"), ThreadOffload("look")
        open_.push_async_callback(judging.close)
        open_.push_async_callback(looking.close)
        store = await SqliteStore.open(
            directory, offload=world.offload, holder=name, incarnation=world.ids.incarnation(), stopwatch_ns=stopwatch_ns
        )
        open_.push_async_callback(store.close)
        trail = FileAppendLog(directory / AUDIT, AUDIT)
        open_.callback(trail.close)
        with closing(BoundSocket(listen, secure=secured is not None)) as bound:
            tls = await _tls_keys(directory, world, secured, listen)
            keys = directory / KEYS
            one = build_server(
                store, world, scope=scope, name=name, beat_ms=tempo.heartbeat_ms, tempo=tempo, place=store.position, keys=keys
            )
            await world.offload(lambda: one.door.keyring.sealing_keys)  # fail early if the key file is unusable
            desk = ServerContext(
                one.standby, store, one.cache, one.door, world,
                cpu_offload=judging, snapshot_offload=looking, filters=installed_filters(), scores=(*DEFAULT_SCORES, *installed_scores()),
                timing=tempo, audit_storage=trail, tls=tls, log=log,
            )  # fmt: skip
            desk.metrics.add(store_metrics(store))
            tune_interpreter()
            app = Application(ROUTES, desk, complain)
            secure = None if tls is None else lambda: tls.server_context
            async with (
                _background_tasks(one, desk, _renew_certificates(tls, world, tell)),
                serve_http(app, bound, on_closing=desk.closing.set, tls_context=secure, on_rejected=desk.audit_rejected_connection),
            ):
                await ensure_bootstrap_token(desk, token, "admin", subject="admin")
                yield ApiServer(bound.url, one, desk, None if tls is None else tls.ca_file)


@asynccontextmanager
async def _background_tasks(one: ServerParts, desk: ServerContext, renewing: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the background tasks of a server for as long as the context lasts."""
    with first_failure():
        async with asyncio.TaskGroup() as group:
            running = (one.run(), _tune_when_loaded(one, desk.clock, desk.log), _sync_audit(desk), renewing)
            tasks = [group.create_task(each) for each in running]
            yield
            for task in tasks:
                task.cancel()
    desk.audit.flush_counts(all_=True)
    desk.audit.sync()


async def _renew_certificates(tls: TlsKeys | None, world: World, tell: Callable[[str], None]) -> None:
    if tls is not None:
        await tls.run_renewal(world.clock, world.offload, tell)


async def _tls_keys(directory: Path, world: World, secured: TlsOptions | None, listen: ListenAddress) -> TlsKeys | None:
    """Load or create the server's TLS keys. Imported here so that servers without TLS do not load the certificate code."""
    if secured is None:
        return None
    from remit.world.net.server_keys import TlsKeys

    return await world.offload(partial(TlsKeys, directory / "tls", world.disk, secured, listen.host))


async def _tune_when_loaded(one: ServerParts, clock: Clock, log: StructuredLog | None) -> None:
    """Tune the interpreter again once the books and the cache, which hold most of the memory, are loaded.

    Also warns if the scope was restored from a backup and is not confirmed yet.
    """
    while one.standby.leading is None or not one.cache.is_current:
        await clock.sleep_ms(one.beat_ms)
    tune_interpreter()
    if log is not None:
        from remit.serve.diagnostics.status_routes import unconfirmed_after_restore

        waits = unconfirmed_after_restore(one.cache)
        if waits:
            log.warning("this scope was restored from a backup and waits for reports of its nodes and peers", **waits)


async def _sync_audit(desk: ServerContext) -> None:
    """Sync the audit log to disk in a worker thread, for ever."""
    from remit.serve.diagnostics.audit_log import SYNC_INTERVAL_MS

    while True:
        await desk.clock.sleep_ms(SYNC_INTERVAL_MS)
        desk.audit.flush_counts()
        await desk.cpu_offload(desk.audit.sync)


def build_scheduler(
    store: Store,
    linearizable: Store,
    client: AuthorityClient,
    world: World,
    *,
    name: str,
    lease: str = LEASE,
    rhythm: SchedulerTiming = SchedulerTiming(),
    pace: VictimRateLimit = VictimRateLimit(),
    failed: Callable[[RetriesExhausted], None] | None = None,
    view: SchedulerView | None = None,
    filters: Sequence[Filter] = (),
    tell: OnMark = ignore_mark,
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
        timing=rhythm,
        filters=(*filters, *installed_filters()),
        scores=(*DEFAULT_SCORES, *installed_scores()),
        victim_rate=pace,
        on_failure=failed,
        view=view,
        on_mark=tell,
        stopwatch_ns=stopwatch_ns,
    )


def build_controllers(
    store: Store,
    linearizable: Store,
    client_for: Callable[[Actor], AuthorityClient],
    world: World,
    *,
    name: str,
    cadence: LoopTiming = LoopTiming(),
    board: WatchCache | None = None,
    lease_for: Callable[[str], str] = str,
    failed: Callable[[RetriesExhausted], None] | None = None,
) -> ControllerSet:
    """Build one instance of a scope's controllers over a shared watch cache; `client_for` makes a client for each. The caller
    runs it.
    """
    return ControllerSet(store, linearizable, client_for, world, name=name, timing=cadence, cache=board, lease_for=lease_for, on_failure=failed)


# -- components that run as processes of their own --------------------------------------------------------------------------


def component_name(sort: str) -> str:
    """Return the default name of a component in records."""
    return f"{sort}-{os.getpid()}"


@asynccontextmanager
async def component_world(
    servers: Sequence[str], token: str, trust: Trust = Trust(), log: Callable[[str], None] | None = None
) -> AsyncIterator[ScopeConnection]:
    """Yield a production world in which the scope's servers are reached over HTTP. `log` reports servers that reject the token.
    """
    world = production()
    try:
        async with connect(servers, token, world, trust=trust, log=log) as connected:
            yield connected
    finally:
        await world.offload.close()


async def run_scheduler(
    connected: ScopeConnection,
    *,
    name: str,
    beat_ms: int,
    failed: Callable[[RetriesExhausted], None] | None = None,
    metrics: MetricsRegistry | None = None,
) -> None:
    """Run a scheduler over HTTP, for ever. Its metrics are added to `metrics`."""
    tempo, rows = Timing(beat_ms), connected.store
    client = connected.client_for(Actor(name, Role.SCHEDULER))
    rhythm = SchedulerTiming(lease_ms=tempo.lease_ms, idle_ms=5 * beat_ms)
    tune_interpreter()
    one = build_scheduler(rows, rows, client, connected.world, name=name, rhythm=rhythm, failed=failed, stopwatch_ns=stopwatch_ns)
    if metrics is not None:
        from remit.serve.metrics.collectors import scheduler_metrics

        metrics.add(scheduler_metrics(one))
    await one.run()


async def run_controllers(
    connected: ScopeConnection,
    *,
    name: str,
    beat_ms: int,
    failed: Callable[[RetriesExhausted], None] | None = None,
    metrics: MetricsRegistry | None = None,
) -> None:
    """Run all controllers over HTTP, for ever. Their metrics are added to `metrics`."""
    rows, cadence = connected.store, LoopTiming(beat_ms)
    tune_interpreter()
    crew = build_controllers(rows, rows, connected.client_for, connected.world, name=name, cadence=cadence, failed=failed)
    if metrics is not None:
        from remit.serve.metrics.collectors import controller_metrics

        metrics.add(controller_metrics(crew))
    await crew.run()


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
