"""Everything a request handler needs from one server.

One value that holds the parts of an API server and builds those that belong to it. It makes no decisions: claims go to the
authority, and reads to the store or the watch cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from remit.client.authority_client import AuthorityClient
from remit.client.endpoint import EndpointError, NotLeader
from remit.client.retry import RetryPolicy
from remit.commitment.dry_run import DryRunResult, dry_run
from remit.commitment.standby import Standby
from remit.law.timing import Timing
from remit.model.claims import Actor, AnyClaim, Operation, OperationID, Verdict, operation_id
from remit.model.identity import Principal
from remit.model.objects import AnyObject
from remit.model.wire.api_types import AuditItem
from remit.observation.watch_cache import WatchCache
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.plugins import Filter, Score
from remit.serve.auth.access_control import TokenIndex
from remit.serve.components.component_rpc import ComponentService
from remit.serve.components.replica_logs import AgentConnections
from remit.serve.diagnostics.audit_log import AuditLog, AuditStorage, MemoryAuditStorage
from remit.serve.diagnostics.view_snapshots import ViewSnapshots
from remit.serve.http.connection_limits import WatchLimit
from remit.serve.http.request_telemetry import AccessLog, RequestMetrics, decision_logger
from remit.serve.http.streams import HeartbeatTimer
from remit.serve.metrics.collectors import log_metrics, server_metrics
from remit.serve.metrics.exposition import MetricsRegistry
from remit.serve.metrics.lifecycle_metrics import LifecycleMetrics
from remit.serve.objects.endpoints import EndpointIndex
from remit.serve.objects.watch_hub import WatchHub
from remit.store.protocol import Store
from remit.world.interfaces import Clock, Offload, World
from remit.world.structured_log import StructuredLog

if TYPE_CHECKING:
    from remit.world.net.server_keys import TlsKeys

WATCHES_MAX: Final = 1_000
"""Open watches, logs and sessions of users; components have a limit of the same size of their own."""
AUTHORITY_DEADLINE_MS: Final = 8_000
AUTHORITY_RETRY_MS: Final = 2_000
"""Deadline of a call to the authority, so that every request is answered within ten seconds (L14), also while the disk is full
and nothing can be written. The last `AUTHORITY_RETRY_MS` are reserved for a retry when the first call gets no answer.
"""


class ServerContext:
    """The parts of one API server.

    - `standby`: reaches the authority of the scope; `standby.leading` is set while this server is the authority.
    - `store`: every row, current. `watch_cache`: the same rows in memory, slightly behind the store. `hub`: distributes changes
      of the watch cache to watches.
    - `snapshots`: frozen scheduler views of the watch cache, built on `snapshot_offload` with the filters and scores of this
      scope's schedulers.
    - `endpoints`: endpoints of serving replicas. `agents`: connections to agents, for logs and exec.
    - `tokens`: authenticates callers. `audit`: the audit log. `keyring`: the keys that seal secrets.
    - `request_metrics`, `lifecycle_metrics`: what this server counts. `metrics`: exposes it, with the metrics of other
      components in this process.
    - `tls`: certificates of this server and the CA that signs agent certificates. None: plain HTTP, on loopback only.
    - `cpu_offload`: runs CPU-bound work off the event loop. `closing`: set when the server shuts down.
    """

    def __init__(
        self,
        standby: Standby,
        store: Store,
        watch_cache: WatchCache,
        component_service: ComponentService,
        world: World,
        *,
        cpu_offload: Offload,
        snapshot_offload: Offload | None = None,
        filters: Sequence[Filter] = (),
        scores: Sequence[Score] = DEFAULT_SCORES,
        timing: Timing = Timing(),
        audit_storage: AuditStorage | None = None,
        watches_max: int = WATCHES_MAX,
        tls: TlsKeys | None = None,
        log: StructuredLog | None = None,
    ) -> None:
        self.standby = standby
        self.store = store
        self.watch_cache = watch_cache
        self.hub = WatchHub(watch_cache)
        self.snapshots = ViewSnapshots(
            watch_cache, store, world.clock, snapshot_offload or cpu_offload, filters=filters, scores=scores
        )
        self.endpoints = EndpointIndex(watch_cache, world.clock)
        self.agents = AgentConnections(watch_cache, world.clock, component_service.callbacks, tls)
        self.tokens = TokenIndex(watch_cache, world.clock)
        self.audit = AuditLog(audit_storage or MemoryAuditStorage(), world.clock)
        self.component_service = component_service
        self.world = world
        self.keyring = component_service.keyring
        self.rotation_lock = asyncio.Lock()
        """Held during a key rotation."""
        self.join_lock = asyncio.Lock()
        """Held while an agent joins: a join first checks that its nodes have no agent, and then writes."""
        self.cpu_offload = cpu_offload
        self.timing = timing
        self.tls = tls
        self.closing = asyncio.Event()
        self.started_ms = world.clock.now_ms()
        self.user_watches, self.component_watches = WatchLimit(watches_max), WatchLimit(watches_max)
        """Separate limits, so that watches of users never keep agents from following their assignments."""
        self.heartbeat_timer = HeartbeatTimer(world.clock, timing.heartbeat_ms)
        self.request_metrics, self.lifecycle_metrics = RequestMetrics(), LifecycleMetrics(watch_cache, world.clock)
        self.metrics = MetricsRegistry(server_metrics(self))
        self.log, self.access_log = log, None if log is None else AccessLog(log)
        if log is not None:
            self.metrics.add(log_metrics(log))
            standby.metrics.on_entry = decision_logger(log)
        self._clients: dict[Actor, AuthorityClient] = {}
        self._selector_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def hosts(self) -> frozenset[str]:
        """Names and addresses of this server besides loopback. Requests for any other host are rejected."""
        return frozenset() if self.tls is None else self.tls.hosts

    @property
    def scope(self) -> str:
        return self.standby.scope

    @property
    def name(self) -> str:
        """Name of this server among the servers of its scope."""
        return self.standby.name

    @property
    def clock(self) -> Clock:
        return self.world.clock

    def client(self, actor: Actor) -> AuthorityClient:
        """Return the client that submits claims of `actor` to the authority, with retries."""
        client = self._clients.get(actor)
        if client is None:
            policy = RetryPolicy(deadline_ms=AUTHORITY_DEADLINE_MS)
            client = self._clients[actor] = AuthorityClient({self.name: self.standby}, actor, self.world, policy=policy)
        return client

    def audit_rejected_connection(self, address: str, status: int, code: str, reason: str) -> None:
        """Audit a connection that was closed before a request was read. Only its address is known."""
        self.audit.record_refusal(
            AuditItem(time=self.clock.wall(), address=address, action="connect", status=status, code=code, detail=reason)
        )

    async def issue_operation_id(self, actor: Actor) -> OperationID:
        """Return a new operation id. The leader knows the current window without a call to the authority."""
        authority = self.standby.leading
        if authority is None:
            return await self.client(actor).new_operation_id()
        return operation_id(authority.head.incarnation, authority.outcomes.window, self.world.ids.nonce())

    async def submit(self, operations: Sequence[Operation]) -> Sequence[Verdict]:
        """Return the verdicts on operations of one actor.

        If this server is the leader, the operations go to the authority in this process. If that fails, they are retried
        under the same ids, like those of any client. Raises `RetriesExhausted`.
        """
        authority, deadline_ms = self.standby.leading, self.clock.now_ms() + AUTHORITY_DEADLINE_MS
        if authority is not None:
            with suppress(EndpointError, TimeoutError):
                async with self.clock.timeout_ms(AUTHORITY_DEADLINE_MS - AUTHORITY_RETRY_MS):
                    return await authority.submit(operations)
        return await self.client(operations[0].actor).resume(operations, deadline_ms=deadline_ms - self.clock.now_ms())

    def committed_object(self, name: str) -> tuple[AnyObject, int] | None:
        """Return the committed object under key `name` and its revision, from the authority's books. None if this server is not
        the leader, or there is no such object.

        The books are never ahead of the store, and they contain every write that has been answered.
        """
        authority = self.standby.leading
        return None if authority is None else authority.books.objects.get(name)

    def dry_run(self, actor: Actor, claims: Sequence[AnyClaim]) -> list[DryRunResult]:
        """Return what the authority would answer to these claims, without writing. Raises `NotLeader`: only the leader can try
        claims.
        """
        if self.standby.leading is None:
            raise NotLeader(reason="this server is not the leader, and only the leader can do a dry run")
        return dry_run(self.standby.leading, actor, claims)

    @property
    def open_watches(self) -> int:
        return self.user_watches.count + self.component_watches.count

    def selector_lock(self, flow: str) -> asyncio.Lock:
        """Return the lock that serialises selector evaluation over the watches of one flow. It exists as long as a watch of the
        flow refers to it.
        """
        lock = self._selector_locks.get(flow)
        if lock is None:
            lock = self._selector_locks[flow] = asyncio.Lock()
        return lock

    def watch_slot(self, principal: Principal) -> AbstractContextManager[None]:
        """Return a context that counts one open watch. Entering it raises `ApiProblem` if there are too many."""
        if principal.audience != "user":
            return self.component_watches.slot(f"token {principal.token}")
        return self.user_watches.slot(f"tenant {principal.tenant}" if principal.tenant else principal.subject)
