"""Node controller: suspect and unknown marks, eviction after the fence, NoExecute taints.

Each signal decides only what its uncertainty allows. A few missed heartbeats stop new placement (suspect). More make the
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
from remit.law.requirements import is_tolerated
from remit.law.timing import Timing, lost_after_ms
from remit.model.claims import Mark, Move, RecordEvent, Role, Verdict
from remit.model.kinds import Node, NodeHealth, WorkloadSpec
from remit.model.records import EventSpec, Generation, Phase, Replica
from remit.model.resources import Duration
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
    """Keys: nodes; and regions, for events about many nodes at once."""

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
            names = dict.fromkeys(one.status.node for one in (old, new) if one is not None and one.status.node)
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

    def on_lease_acquired(self, times: ReconcileTime) -> None:
        self.heartbeat_ages = None

    async def background(self, loop: ControllerLoop) -> None:
        """Fetch the heartbeat ages at every heartbeat interval: nodes change by the passage of time alone."""
        beat_ms = loop.timing.heartbeat_ms
        while True:
            try:
                self.set_heartbeat_ages(
                    HeartbeatAges(*await loop.client.heartbeat_ages(deadline_ms=beat_ms)), loop.reconcile_time()
                )
            except RetriesExhausted as error:
                loop.report_failure(error)
            else:
                loop.enqueue(self._keys_to_check(loop.reconcile_time()))
            await loop.world.clock.sleep_ms(beat_ms)

    def set_heartbeat_ages(self, hearing: HeartbeatAges, times: ReconcileTime) -> None:
        self.heartbeat_ages = hearing
        nodes = (kept.obj for _, kept in self.cache.of_kind("node/"))
        self._silent_regions, self._silent_zones = hearing.mass_silences(nodes, times.timing.suspect_ms)

    def _keys_to_check(self, times: ReconcileTime) -> list[str]:
        """Return the keys of nodes and regions that may need action. Almost all nodes are healthy and are skipped."""
        found = [f"{_REGION_PREFIX}{name}" for name in sorted({*self._mass_silences, *self._silent_regions})]
        for key, kept in self.cache.of_kind("node/"):
            node: Node = kept.obj
            well = node.status.health is NodeHealth.READY and not node.spec.draining
            if not well or self._silent_ms(node.metadata.name) > times.timing.suspect_ms:
                found.append(key)
        return found

    def _silent_ms(self, node: str) -> int:
        return 0 if self.heartbeat_ages is None else self.heartbeat_ages.silent_ms(node)

    def on_verdict(self, key: str, deed: Action, verdict: Verdict | None) -> None:
        if isinstance(deed.claim, Move):
            self.evictions.on_verdict(deed.claim.replica, verdict)

    # -- reconcile ----------------------------------------------------------------------------------------------------------

    def reconcile(self, key: str, times: ReconcileTime) -> Iterator[ReconcileResult]:
        if key.startswith(_REGION_PREFIX):
            yield from self._report_mass_silence(key.removeprefix(_REGION_PREFIX), times)
            return
        kept = self.cache.rows.get(key)
        if kept is None:
            self.drain.forget_node(key.removeprefix("node/"))
            return
        node: Node = kept.obj
        held = node.spec.region in self._silent_regions
        if self._has_fresh_heartbeat_ages(times):
            yield from self._update_health(node, kept.revision, times, held=held)
            if node.status.health in (NodeHealth.UNKNOWN, NodeHealth.LOST) and not held:
                yield from self._fail_replicas(node.metadata.name, times)
        if node.status.health not in (NodeHealth.UNKNOWN, NodeHealth.LOST) and not held:
            yield from self._evict_intolerant(node)
            yield from self.drain.reconcile(node, times)

    def _has_fresh_heartbeat_ages(self, times: ReconcileTime) -> bool:
        """Return whether the heartbeat ages are recent, and come from the incarnation that the watch cache shows."""
        if self.heartbeat_ages is None or self.cache.head is None:
            return False
        young = times.now_ms - self.heartbeat_ages.sent_ms <= HEARTBEAT_AGES_INTERVALS_MAX * times.timing.heartbeat_ms
        return young and self.heartbeat_ages.report.incarnation == self.cache.head.incarnation

    def _update_health(self, node: Node, at: int, times: ReconcileTime, *, held: bool) -> Iterator[ReconcileResult]:
        if self.heartbeat_ages is None:
            return
        name, tempo = node.metadata.name, times.timing
        silent_ms = self.heartbeat_ages.silent_ms(name)
        here = self.heartbeat_ages.is_responsive(name, tempo.suspect_ms, times.now_ms)
        settled = here and self.heartbeat_ages.is_reconciled(name)
        target: NodeHealth | None = None
        match node.status.health:
            case NodeHealth.JOINING | NodeHealth.SUSPECT if settled:
                target = NodeHealth.READY
            case NodeHealth.READY if silent_ms > tempo.suspect_ms:
                target = NodeHealth.SUSPECT
            case NodeHealth.SUSPECT if silent_ms > tempo.unknown_ms and not held:
                wait_ms = self._rate_limit_ms(node, times)
                if wait_ms:
                    yield RequeueAfter(wait_ms)
                    return
                target = NodeHealth.UNKNOWN
            case NodeHealth.UNKNOWN | NodeHealth.LOST if here:
                target = NodeHealth.JOINING
            case NodeHealth.UNKNOWN if (
                not held and silent_ms > LOST_AFTER_UNKNOWN_TIMES * tempo.unknown_ms and self._is_empty(name)
            ):
                target = NodeHealth.LOST
        if target is not None:
            yield Action(
                Mark(
                    name,
                    at,
                    target,
                    reason=f"no heartbeat for {silent_ms} ms" if silent_ms > tempo.suspect_ms else "heartbeat received",
                )
            )

    def _rate_limit_ms(self, node: Node, times: ReconcileTime) -> int:
        zone = node.spec.region, node.spec.zone
        rate = UNKNOWN_NODES_MILLI_PER_S_SILENT_ZONE if zone in self._silent_zones else UNKNOWN_NODES_MILLI_PER_S
        return self._buckets.setdefault(zone, TokenBucket(UNKNOWN_NODES_BURST)).wait_ms(times.now_ms, rate)

    def _is_empty(self, node: str) -> bool:
        return all(one.obj.status.phase in OFF_NODE_PHASES for one in self.cache.replicas_on(node))

    # -- replicas of a node ------------------------------------------------------------------------------------------------

    def _fail_replicas(self, node: str, times: ReconcileTime) -> Iterator[ReconcileResult]:
        """Mark replicas on a silent node unknown, and fail unknown ones whose fence has passed. Requeue for the next fence."""
        silent_ms = self._silent_ms(node)
        for one in self.cache.replicas_on(node):
            phase = one.obj.status.phase
            if phase in _ON_NODE_PHASES:
                yield Action(Move(one.key, one.revision, "doubt", reason=f"node {node} sends no heartbeats"))
            elif phase is Phase.UNKNOWN:
                spec = self._spec(one.obj)
                left_ms = 0 if spec is None else _fence_ms(spec, times.timing) - silent_ms
                if spec is not None and left_ms > 0:
                    yield RequeueAfter(left_ms)
                elif spec is not None:
                    yield Action(
                        Move(
                            one.key,
                            one.revision,
                            "lose",
                            result="lost",
                            reason=f"node {node} sent no heartbeats for longer than the fence of the workload",
                        )
                    )

    def _evict_intolerant(self, node: Node) -> Iterator[ReconcileResult]:
        """Evict replicas that do not tolerate a NoExecute taint, regardless of disruption budgets: that is the purpose of the
        taint.
        """
        taints = [taint for taint in node.spec.taints if taint.effect == "NoExecute"]
        for one in self.cache.replicas_on(node.metadata.name) if taints else ():
            spec = self._spec(one.obj) if one.obj.status.phase in RUNNING_PHASES else None
            if spec is not None and not all(is_tolerated(taint, spec.placement.tolerations) for taint in taints):
                yield self.drain.evict(
                    one, f"node {node.metadata.name} has a NoExecute taint that the replica does not tolerate"
                )

    def _spec(self, replica: Replica) -> WorkloadSpec | None:
        meta, spec = replica.metadata, replica.spec
        found: Generation | None = self.cache.get(f"generation/{meta.tenant}/{spec.workload}/{spec.generation:08d}")
        return None if found is None else found.spec.spec

    # -- mass silence of a region ------------------------------------------------------------------------------------------

    def _report_mass_silence(self, region: str, times: ReconcileTime) -> Iterator[ReconcileResult]:
        """Report mass silence when it begins, when it has lasted too long, and when it ends."""
        silent = region in self._silent_regions
        since_ms, called = self._mass_silences.get(region, (times.now_ms, False))
        if silent and region not in self._mass_silences:
            self._mass_silences[region] = since_ms, False
            why = (
                f"most nodes of region {region} send no heartbeats, so none is marked unknown and nothing is evicted "
                "there; check the "
                "network and delete nodes that are gone for good"
            )
            yield self._event(region, "MassSilence", why)
        elif not silent and self._mass_silences.pop(region, None) is not None:
            yield self._event(region, "MassSilenceOver", f"most nodes of region {region} send heartbeats again", "Normal")
        elif silent and not called and times.now_ms - since_ms >= times.timing.call_operator_ms:
            self._mass_silences[region] = since_ms, True
            why = (
                f"most nodes of region {region} have sent no heartbeats for {Duration(times.timing.call_operator_ms)}; "
                "find out whether "
                "the region is lost, and if so declare it lost"
            )
            yield self._event(region, "CallOperator", why)

    def _event(self, region: str, reason: str, message: str, type_: Any = "Warning") -> Action:
        event = EventSpec(regarding=f"{_REGION_PREFIX}{region}", type=type_, reason=reason, message=message, source=Role.NODES)
        return Action(RecordEvent(f"{reason.lower()}-{region}-{self.cache.revision}", event))


def _fence_ms(spec: WorkloadSpec, tempo: Timing) -> int:
    """Return the silence after which the authority accepts that the replica is lost."""
    return lost_after_ms(spec.fence, tempo) if spec.is_fenced else tempo.eager_ms
