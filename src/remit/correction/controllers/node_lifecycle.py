"""Node controller: suspect and unknown marks, eviction after the fence, NoExecute taints.

The longer a node is silent, the stronger the action. A few missed heartbeats stop new placement (suspect). More make the
node and its replicas unknown. Only after a workload's fence, which the node's own agent enforces too, is a replica given up
as lost. The authority measures the silence itself and refuses requests that come too early, so none is sent before its time.

A node that was unknown joins again, and becomes ready only once its heartbeat reports that it has reconciled its replicas
with this incarnation. Nodes of a zone become unknown at a limited rate, and not at all while most of a region is silent:
events report that, and later call an operator. Draining is in disruption.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from remit.client.authority_client import RetriesExhausted
from remit.correction.controllers.desired_replicas import RUNNING_PHASES
from remit.correction.controllers.disruption import OFF_NODE_PHASES, NodeDrain, PendingEvictions
from remit.correction.framework.actions import Action, ControllerPermissions, ReconcileResult, RequeueAfter
from remit.correction.framework.loop import Controller, ControllerLoop, ReconcileTime
from remit.correction.framework.work_queue import TokenBucket
from remit.law.fit import keeps_work
from remit.law.requirements import is_tolerated
from remit.law.timing import Timing, lost_after_ms
from remit.model.claims import Mark, Move, RecordEvent, Verdict
from remit.model.kinds import Node, NodeHealth, WorkloadSpec
from remit.model.records import EventSpec, Generation, Phase, Replica
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.observation.health import HeartbeatAges
from remit.observation.watch_cache import WatchCache

_ON_NODE_PHASES: Final = RUNNING_PHASES | {Phase.DRAINING, Phase.STOPPING}

UNKNOWN_NODES_BURST: Final = 10
UNKNOWN_NODES_MILLI_PER_S: Final = 100
UNKNOWN_NODES_MILLI_PER_S_SILENT_ZONE: Final = 10
"""Limit on nodes of a zone that become unknown: a burst, then a rate of 0.1 nodes per second; 0.01 if most of the zone is
silent.
"""

HEARTBEAT_AGES_INTERVALS_MAX: Final = 3
"""Heartbeat ages reported longer ago than this many heartbeat intervals are not used as evidence."""

LOST_AFTER_UNKNOWN_TIMES: Final = 4
"""An empty node is marked lost after this many times the silence that makes it unknown."""

_REGION_PREFIX: Final = "region/"


class NodeController(Controller):
    """The node controller. Keys: nodes; and regions, for events about many nodes at once."""

    permissions = ControllerPermissions(Role.NODES, claims=(Mark,), transitions=("evict", "doubt", "lose"))

    def __init__(self, cache: WatchCache, evictions: PendingEvictions) -> None:
        super().__init__(cache)
        self.heartbeat_ages: HeartbeatAges | None = None
        self.evictions, self.drain = evictions, NodeDrain(cache, evictions)
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self._silent_regions: frozenset[str] = frozenset()
        self._silent_zones: frozenset[tuple[str, str]] = frozenset()
        self._mass_silences: dict[str, tuple[int, bool]] = {}
        """By region: when most of its nodes fell silent, and whether an operator was called."""

    # -- watch events and heartbeats ------------------------------------------------------------------------------------------

    def keys_for(self, key: str, old: Any, new: Any) -> Iterable[str]:
        if isinstance(new, Replica) or isinstance(old, Replica):
            names = dict.fromkeys(replica.status.node for replica in (old, new) if replica is not None and replica.status.node)
            return tuple(f"node/{name}" for name in names if self._is_watched(name))
        return (key,) if key.startswith("node/") else ()

    def _is_watched(self, name: str) -> bool:
        """Return whether changes of the node's replicas matter. On most nodes they do not."""
        node: Node | None = self.cache.get(f"node/{name}")
        return node is not None and (
            node.spec.draining or bool(node.spec.taints) or node.status.health in (NodeHealth.UNKNOWN, NodeHealth.LOST)
        )

    def all_keys(self) -> Iterable[str]:
        return (*(key for key, _ in self.cache.of_kind("node/")), *(f"{_REGION_PREFIX}{name}" for name in self._mass_silences))

    def on_lease_acquired(self, time: ReconcileTime) -> None:
        self.heartbeat_ages = None

    async def background(self, loop: ControllerLoop) -> None:
        """Fetch the heartbeat ages at every heartbeat interval: nodes change by the passage of time alone."""
        heartbeat_ms = loop.timing.heartbeat_ms
        while True:
            try:
                self.set_heartbeat_ages(
                    HeartbeatAges(*await loop.client.heartbeat_ages(deadline_ms=heartbeat_ms)), loop.reconcile_time()
                )
            except RetriesExhausted as error:
                loop.report_failure(error)
            else:
                loop.enqueue(self._keys_to_check(loop.reconcile_time()))
            await loop.world.clock.sleep_ms(heartbeat_ms)

    def set_heartbeat_ages(self, heartbeat_ages: HeartbeatAges, time: ReconcileTime) -> None:
        self.heartbeat_ages = heartbeat_ages
        nodes = (row.obj for _, row in self.cache.of_kind("node/"))
        self._silent_regions, self._silent_zones = heartbeat_ages.mass_silences(nodes, time.timing.suspect_ms)

    def _keys_to_check(self, time: ReconcileTime) -> list[str]:
        """Return the keys of nodes and regions that may need action. Almost all nodes are healthy and are skipped."""
        keys = [f"{_REGION_PREFIX}{name}" for name in sorted({*self._mass_silences, *self._silent_regions})]
        for key, row in self.cache.of_kind("node/"):
            node: Node = row.obj
            if not keeps_work(node) or self._silent_ms(node.metadata.name) > time.timing.suspect_ms:
                keys.append(key)
        return keys

    def _silent_ms(self, node: str) -> int:
        return 0 if self.heartbeat_ages is None else self.heartbeat_ages.silent_ms(node)

    def on_verdict(self, key: str, action: Action, verdict: Verdict | None) -> None:
        if isinstance(action.claim, Move):
            self.evictions.on_verdict(action.claim.replica, verdict)

    # -- reconcile ----------------------------------------------------------------------------------------------------------

    def reconcile(self, key: str, time: ReconcileTime) -> Iterator[ReconcileResult]:
        if key.startswith(_REGION_PREFIX):
            yield from self._report_mass_silence(key.removeprefix(_REGION_PREFIX), time)
            return
        row = self.cache.rows.get(key)
        if row is None:
            self.drain.forget_node(key.removeprefix("node/"))
            return
        node: Node = row.obj
        evictions_held = node.spec.region in self._silent_regions
        if self._has_fresh_heartbeat_ages(time):
            yield from self._update_health(node, row.revision, time, held=evictions_held)
            if node.status.health in (NodeHealth.UNKNOWN, NodeHealth.LOST) and not evictions_held:
                yield from self._fail_replicas(node.metadata.name, time)
        if node.status.health not in (NodeHealth.UNKNOWN, NodeHealth.LOST) and not evictions_held:
            yield from self._evict_intolerant(node)
            yield from self.drain.reconcile(node, time)

    def _has_fresh_heartbeat_ages(self, time: ReconcileTime) -> bool:
        """Return whether the heartbeat ages are recent, and come from the incarnation that the watch cache shows."""
        if self.heartbeat_ages is None or self.cache.head is None:
            return False
        is_recent = time.now_ms - self.heartbeat_ages.sent_ms <= HEARTBEAT_AGES_INTERVALS_MAX * time.timing.heartbeat_ms
        return is_recent and self.heartbeat_ages.report.incarnation == self.cache.head.incarnation

    def _update_health(self, node: Node, revision: int, time: ReconcileTime, *, held: bool) -> Iterator[ReconcileResult]:
        if self.heartbeat_ages is None:
            return
        name, timing = node.metadata.name, time.timing
        silent_ms = self.heartbeat_ages.silent_ms(name)
        is_present = self.heartbeat_ages.is_responsive(name, timing.suspect_ms, time.now_ms)
        is_settled = is_present and self.heartbeat_ages.is_reconciled(name)
        target: NodeHealth | None = None
        match node.status.health:
            case NodeHealth.JOINING | NodeHealth.SUSPECT if is_settled:
                target = NodeHealth.READY
            case NodeHealth.READY if silent_ms > timing.suspect_ms:
                target = NodeHealth.SUSPECT
            case NodeHealth.SUSPECT if silent_ms > timing.unknown_ms and not held:
                wait_ms = self._rate_limit_ms(node, time)
                if wait_ms:
                    yield RequeueAfter(wait_ms)
                    return
                target = NodeHealth.UNKNOWN
            case NodeHealth.UNKNOWN | NodeHealth.LOST if is_present:
                target = NodeHealth.JOINING
            case NodeHealth.UNKNOWN if (
                not held and silent_ms > LOST_AFTER_UNKNOWN_TIMES * timing.unknown_ms and self._is_empty(name)
            ):
                target = NodeHealth.LOST
        if target is not None:
            yield Action(
                Mark(
                    name,
                    revision,
                    target,
                    reason=_silence_text(silent_ms) if silent_ms > timing.suspect_ms else "heartbeat received",
                )
            )

    def _rate_limit_ms(self, node: Node, time: ReconcileTime) -> int:
        zone = node.spec.region, node.spec.zone
        rate = UNKNOWN_NODES_MILLI_PER_S_SILENT_ZONE if zone in self._silent_zones else UNKNOWN_NODES_MILLI_PER_S
        return self._buckets.setdefault(zone, TokenBucket(UNKNOWN_NODES_BURST)).wait_ms(time.now_ms, rate)

    def _is_empty(self, node: str) -> bool:
        return all(row.obj.status.phase in OFF_NODE_PHASES for row in self.cache.replicas_on(node))

    # -- replicas of a node ------------------------------------------------------------------------------------------------

    def _fail_replicas(self, node: str, time: ReconcileTime) -> Iterator[ReconcileResult]:
        """Mark replicas on a silent node unknown, and fail unknown ones whose fence has passed. Requeue for the next fence."""
        silent_ms = self._silent_ms(node)
        for row in self.cache.replicas_on(node):
            phase = row.obj.status.phase
            if phase in _ON_NODE_PHASES:
                yield Action(Move(row.key, row.revision, "doubt", reason=f"node {node} sends no heartbeats"))
            elif phase is Phase.UNKNOWN:
                spec = self._spec(row.obj)
                remaining_ms = 0 if spec is None else _fence_ms(spec, time.timing) - silent_ms
                if spec is not None and remaining_ms > 0:
                    yield RequeueAfter(remaining_ms)
                elif spec is not None:
                    yield Action(
                        Move(
                            row.key,
                            row.revision,
                            "lose",
                            result="lost",
                            reason=_lost_reason(node, spec, time.timing),
                        )
                    )

    def _evict_intolerant(self, node: Node) -> Iterator[ReconcileResult]:
        """Evict replicas that do not tolerate a NoExecute taint, regardless of disruption budgets: that is the purpose of the
        taint.
        """
        taints = [taint for taint in node.spec.taints if taint.effect == "NoExecute"]
        for row in self.cache.replicas_on(node.metadata.name) if taints else ():
            spec = self._spec(row.obj) if row.obj.status.phase in RUNNING_PHASES else None
            if spec is not None and not all(is_tolerated(taint, spec.placement.tolerations) for taint in taints):
                yield self.drain.evict(
                    row, f"node {node.metadata.name} has a NoExecute taint that the replica does not tolerate"
                )

    def _spec(self, replica: Replica) -> WorkloadSpec | None:
        meta, spec = replica.metadata, replica.spec
        generation: Generation | None = self.cache.get(f"generation/{meta.tenant}/{spec.workload}/{spec.generation:08d}")
        return None if generation is None else generation.spec.spec

    # -- mass silence of a region ------------------------------------------------------------------------------------------

    def _report_mass_silence(self, region: str, time: ReconcileTime) -> Iterator[ReconcileResult]:
        """Report mass silence when it begins, when it has lasted too long, and when it ends."""
        silent = region in self._silent_regions
        since_ms, operator_called = self._mass_silences.get(region, (time.now_ms, False))
        if silent and region not in self._mass_silences:
            self._mass_silences[region] = since_ms, False
            message = (
                f"most nodes of region {region} send no heartbeats, so none is marked unknown and nothing is evicted there; "
                "check the network and the machines. Nodes that are gone for good and hold no replicas can be deleted"
            )
            yield self._event(region, "MassSilence", message)
        elif not silent and self._mass_silences.pop(region, None) is not None:
            yield self._event(region, "MassSilenceOver", f"most nodes of region {region} send heartbeats again", "Normal")
        elif silent and not operator_called and time.now_ms - since_ms >= time.timing.call_operator_ms:
            self._mass_silences[region] = since_ms, True
            message = (
                f"most nodes of region {region} have sent no heartbeats for {Duration(time.timing.call_operator_ms)}; find out "
                "whether the network or the machines failed, and restore them; Remit never declares a whole region lost"
            )
            yield self._event(region, "CallOperator", message)

    def _event(self, region: str, reason: str, message: str, type_: Any = "Warning") -> Action:
        event = EventSpec(regarding=f"{_REGION_PREFIX}{region}", type=type_, reason=reason, message=message, source=Role.NODES)
        return Action(RecordEvent(f"{reason.lower()}-{region}-{self.cache.revision}", event))


def _silence_text(silent_ms: int) -> str:
    return f"no heartbeat for {Duration(silent_ms // 1_000 * 1_000 or silent_ms)}"


def _lost_reason(node: str, spec: WorkloadSpec, timing: Timing) -> str:
    limit = f"spec.fence ({spec.fence})" if spec.is_fenced else f"{Duration(timing.eager_ms)}"
    return f"node {node} sent no heartbeats for longer than {limit}"


def _fence_ms(spec: WorkloadSpec, timing: Timing) -> int:
    """Return the silence after which the authority accepts that the replica is lost."""
    return lost_after_ms(spec.fence, timing) if spec.is_fenced else timing.eager_ms
