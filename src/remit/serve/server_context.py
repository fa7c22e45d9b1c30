"""Everything a request handler needs from one server, grouped into parts.

Builds the parts of an API server. A function that needs one part takes that part, not the context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from remit.commitment.standby import Standby
from remit.law.timing import Timing
from remit.observation.watch_cache import WatchCache
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.plugins import Filter, Score
from remit.serve.auth.access_control import TokenIndex
from remit.serve.auth.secrets import Keyring
from remit.serve.authority_access import AuthorityAccess
from remit.serve.components.component_rpc import ComponentService
from remit.serve.components.replica_logs import AgentConnections
from remit.serve.diagnostics.audit_log import AuditLog, AuditStorage, MemoryAuditStorage
from remit.serve.diagnostics.view_snapshots import ViewSnapshots
from remit.serve.diagnostics.workload_progress import WorkloadProgressReader
from remit.serve.http.request_telemetry import decision_logger
from remit.serve.http.streams import OpenStreams
from remit.serve.metrics.collectors import log_metrics, server_metrics
from remit.serve.metrics.telemetry import Telemetry
from remit.serve.objects.endpoints import EndpointIndex
from remit.serve.objects.watch_hub import WatchHub
from remit.store.protocol import Store
from remit.world.interfaces import Clock, Offload, World
from remit.world.structured_log import StructuredLog

if TYPE_CHECKING:
    from remit.world.net.server_keys import TlsKeys

WATCHES_MAX: Final = 1_000
"""Open watches, logs and sessions of users; components have a limit of the same size of their own."""


class ServerAuth:
    """Authentication and keys of one server.

    - `tokens`: authenticates callers. `keyring`: the keys that seal secrets.
    - `tls`: certificates of this server and the CA that signs agent certificates. None: plain HTTP, on loopback only.
    """

    def __init__(self, tokens: TokenIndex, keyring: Keyring, tls: TlsKeys | None) -> None:
        self.tokens, self.keyring, self.tls = tokens, keyring, tls
        self.rotation_lock = asyncio.Lock()
        """Held during a key rotation."""
        self.join_lock = asyncio.Lock()
        """Held while an agent joins: a join first checks that its nodes have no agent, and then writes."""

    @property
    def hosts(self) -> frozenset[str]:
        """Names and addresses of this server besides loopback. Requests for any other host are rejected."""
        return frozenset() if self.tls is None else self.tls.hosts


class ServerContext:
    """The parts of one API server.

    - `authority`: submits claims to the authority of the scope. `auth`: authenticates callers.
    - `store`: every row, current. `watch_cache`: the same rows in memory, slightly behind the store. `hub`: distributes changes
      of the watch cache to watches.
    - `snapshots`: frozen scheduler views of the watch cache, built on `snapshot_offload` with the filters and scores of this
      scope's schedulers.
    - `workload_progress`: progress of workloads, computed from the watch cache.
    - `endpoints`: endpoints of serving replicas. `agents`: connections to agents, for logs and exec.
    - `component_service`: the protocol of agents, schedulers and controllers.
    - `streams`: open watches, logs and sessions. `audit`: the audit log. `telemetry`: metrics and logs of this server.
    - `cpu_offload`: runs CPU-bound work off the event loop.
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
        self.world, self.timing, self.cpu_offload, self.started_ms = world, timing, cpu_offload, world.clock.now_ms()
        self.authority = AuthorityAccess(standby, world)
        self.auth = ServerAuth(TokenIndex(watch_cache, world.clock), component_service.keyring, tls)
        self.store, self.watch_cache, self.hub = store, watch_cache, WatchHub(watch_cache)
        self.snapshots = ViewSnapshots(
            watch_cache, store, world.clock, snapshot_offload or cpu_offload, filters=filters, scores=scores
        )
        self.workload_progress = WorkloadProgressReader(self.snapshots, cpu_offload)
        self.endpoints = EndpointIndex(watch_cache, world.clock)
        self.agents = AgentConnections(watch_cache, world.clock, component_service.callbacks, tls)
        self.component_service = component_service
        self.streams = OpenStreams(world.clock, self.auth.tokens, timing.heartbeat_ms, watches_max)
        self.audit = AuditLog(audit_storage or MemoryAuditStorage(), world.clock)
        self.telemetry = Telemetry(watch_cache, world.clock, log)
        self.telemetry.registry.add(server_metrics(standby, watch_cache, self.streams, self.telemetry, world.clock))
        if log is not None:
            self.telemetry.registry.add(log_metrics(log))
            standby.metrics.on_entry = decision_logger(log)

    @property
    def clock(self) -> Clock:
        return self.world.clock
