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
from remit.correction.controllers.desired_replicas import RUNS
from remit.correction.controllers.disruption import OFF_NODE, Draining, Leaving
from remit.correction.framework.actions import Again, Deed, Remit, Wish
from remit.correction.framework.loop import Controller, Loop, Times
from remit.correction.framework.work_queue import Bucket
from remit.law.requirements import is_tolerated
from remit.law.timing import Timing, lost_after_ms
from remit.model.claims import Mark, Move, RecordEvent, Role, Verdict
from remit.model.kinds import Node, NodeHealth, WorkloadSpec
from remit.model.records import EventSpec, Generation, Phase, Replica
from remit.model.resources import Duration
from remit.observation.health import Hearing
from remit.observation.watch_cache import Board

_ON_NODE: Final = RUNS | {Phase.DRAINING, Phase.STOPPING}

GIVEN_UP_BURST: Final = 10
GIVEN_UP_MILLI_PER_S: Final = 100
GIVEN_UP_MILLI_PER_S_SICK: Final = 10
"""Limit on nodes of a zone that become unknown: a burst, then a rate of 0.1 nodes per second; 0.01 if most of the zone is
silent.
"""

HEARING_BEATS: Final = 3
"""Heartbeat ages reported longer ago than this many heartbeat intervals are not used as evidence."""

LOST_AFTER: Final = 4
"""An empty node is marked lost after this many times the silence that makes it unknown."""

_REGION: Final = "region/"


class Nodes(Controller):
    """Keys: nodes; and regions, for events about many nodes at once."""

    remit = Remit(Role.NODES, claims=(Mark,), transitions=("evict", "doubt", "lose"))

    def __init__(self, board: Board, leaving: Leaving) -> None:
        super().__init__(board)
        self.hearing: Hearing | None = None
        self.leaving, self.draining = leaving, Draining(board, leaving)
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._silent_regions: frozenset[str] = frozenset()
        self._silent_zones: frozenset[tuple[str, str]] = frozenset()
        self._masses: dict[str, tuple[int, bool]] = {}
        """By region: when most of its nodes fell silent, and whether an operator was called."""

    # -- watch events and heartbeats ------------------------------------------------------------------------------------------

    def concerns(self, key: str, old: Any, new: Any) -> Iterable[str]:
        if isinstance(new, Replica) or isinstance(old, Replica):
            names = dict.fromkeys(one.status.node for one in (old, new) if one is not None and one.status.node)
            return tuple(f"node/{name}" for name in names if self._watched(name))
        return (key,) if key.startswith("node/") else ()

    def _watched(self, name: str) -> bool:
        """Return whether changes of the node's replicas matter. On most nodes they do not."""
        node: Node | None = self.board.get(f"node/{name}")
        return node is not None and (
            node.spec.draining or bool(node.spec.taints) or node.status.health in (NodeHealth.UNKNOWN, NodeHealth.LOST)
        )

    def everything(self) -> Iterable[str]:
        return (*(key for key, _ in self.board.kind("node/")), *(f"{_REGION}{name}" for name in self._masses))

    def began(self, times: Times) -> None:
        self.hearing = None

    async def beside(self, loop: Loop) -> None:
        """Fetch the heartbeat ages at every heartbeat interval: nodes change by the passage of time alone."""
        beat_ms = loop.cadence.beat_ms
        while True:
            try:
                self.take(Hearing(*await loop.client.heartbeat_ages(deadline_ms=beat_ms)), loop.times())
            except RetriesExhausted as error:
                loop.gave_up(error)
            else:
                loop.look_at(self._unwell(loop.times()))
            await loop.world.clock.sleep_ms(beat_ms)

    def take(self, hearing: Hearing, times: Times) -> None:
        self.hearing = hearing
        nodes = (kept.thing for _, kept in self.board.kind("node/"))
        self._silent_regions, self._silent_zones = hearing.masses(nodes, times.tempo.suspect_ms)

    def _unwell(self, times: Times) -> list[str]:
        """Return the keys of nodes and regions that may need action. Almost all nodes are healthy and are skipped."""
        found = [f"{_REGION}{name}" for name in sorted({*self._masses, *self._silent_regions})]
        for key, kept in self.board.kind("node/"):
            node: Node = kept.thing
            well = node.status.health is NodeHealth.READY and not node.spec.draining
            if not well or self._silent_ms(node.metadata.name) > times.tempo.suspect_ms:
                found.append(key)
        return found

    def _silent_ms(self, node: str) -> int:
        return 0 if self.hearing is None else self.hearing.silent_ms(node)

    def heard(self, key: str, deed: Deed, verdict: Verdict | None) -> None:
        if isinstance(deed.claim, Move):
            self.leaving.heard(deed.claim.replica, verdict)

    # -- reconcile ----------------------------------------------------------------------------------------------------------

    def reconcile(self, key: str, times: Times) -> Iterator[Wish]:
        if key.startswith(_REGION):
            yield from self._mass(key.removeprefix(_REGION), times)
            return
        kept = self.board.rows.get(key)
        if kept is None:
            self.draining.gone(key.removeprefix("node/"))
            return
        node: Node = kept.thing
        held = node.spec.region in self._silent_regions
        if self._is_evidence(times):
            yield from self._ladder(node, kept.revision, times, held=held)
            if node.status.health in (NodeHealth.UNKNOWN, NodeHealth.LOST) and not held:
                yield from self._give_up(node.metadata.name, times)
        if node.status.health not in (NodeHealth.UNKNOWN, NodeHealth.LOST) and not held:
            yield from self._push_out(node)
            yield from self.draining.reconcile(node, times)

    def _is_evidence(self, times: Times) -> bool:
        """Return whether the heartbeat ages are recent, and come from the incarnation that the watch cache shows."""
        if self.hearing is None or self.board.head is None:
            return False
        young = times.now_ms - self.hearing.sent_ms <= HEARING_BEATS * times.tempo.heartbeat_ms
        return young and self.hearing.heard.incarnation == self.board.head.incarnation

    def _ladder(self, node: Node, at: int, times: Times, *, held: bool) -> Iterator[Wish]:
        if self.hearing is None:
            return
        name, tempo = node.metadata.name, times.tempo
        silent_ms = self.hearing.silent_ms(name)
        here = self.hearing.is_here(name, tempo.suspect_ms, times.now_ms)
        settled = here and self.hearing.is_settled(name)
        target: NodeHealth | None = None
        match node.status.health:
            case NodeHealth.JOINING | NodeHealth.SUSPECT if settled:
                target = NodeHealth.READY
            case NodeHealth.READY if silent_ms > tempo.suspect_ms:
                target = NodeHealth.SUSPECT
            case NodeHealth.SUSPECT if silent_ms > tempo.unknown_ms and not held:
                wait_ms = self._bucket(node, times)
                if wait_ms:
                    yield Again(wait_ms)
                    return
                target = NodeHealth.UNKNOWN
            case NodeHealth.UNKNOWN | NodeHealth.LOST if here:
                target = NodeHealth.JOINING
            case NodeHealth.UNKNOWN if not held and silent_ms > LOST_AFTER * tempo.unknown_ms and self._is_empty(name):
                target = NodeHealth.LOST
        if target is not None:
            yield Deed(
                Mark(
                    name,
                    at,
                    target,
                    reason=f"no heartbeat for {silent_ms} ms" if silent_ms > tempo.suspect_ms else "heartbeat received",
                )
            )

    def _bucket(self, node: Node, times: Times) -> int:
        zone = node.spec.region, node.spec.zone
        rate = GIVEN_UP_MILLI_PER_S_SICK if zone in self._silent_zones else GIVEN_UP_MILLI_PER_S
        return self._buckets.setdefault(zone, Bucket(GIVEN_UP_BURST)).wait_ms(times.now_ms, rate)

    def _is_empty(self, node: str) -> bool:
        return all(one.thing.status.phase in OFF_NODE for one in self.board.on(node))

    # -- replicas of a node ------------------------------------------------------------------------------------------------

    def _give_up(self, node: str, times: Times) -> Iterator[Wish]:
        """Mark replicas on a silent node unknown, and fail unknown ones whose fence has passed. Requeue for the next fence."""
        silent_ms = self._silent_ms(node)
        for one in self.board.on(node):
            phase = one.thing.status.phase
            if phase in _ON_NODE:
                yield Deed(Move(one.key, one.revision, "doubt", reason=f"node {node} sends no heartbeats"))
            elif phase is Phase.UNKNOWN:
                spec = self._spec(one.thing)
                left_ms = 0 if spec is None else _fence_ms(spec, times.tempo) - silent_ms
                if spec is not None and left_ms > 0:
                    yield Again(left_ms)
                elif spec is not None:
                    yield Deed(
                        Move(
                            one.key,
                            one.revision,
                            "lose",
                            result="lost",
                            reason=f"node {node} sent no heartbeats for longer than the fence of the workload",
                        )
                    )

    def _push_out(self, node: Node) -> Iterator[Wish]:
        """Evict replicas that do not tolerate a NoExecute taint, regardless of disruption budgets: that is the purpose of the
        taint.
        """
        taints = [taint for taint in node.spec.taints if taint.effect == "NoExecute"]
        for one in self.board.on(node.metadata.name) if taints else ():
            spec = self._spec(one.thing) if one.thing.status.phase in RUNS else None
            if spec is not None and not all(is_tolerated(taint, spec.placement.tolerations) for taint in taints):
                yield self.draining.evict(
                    one, f"node {node.metadata.name} has a NoExecute taint that the replica does not tolerate"
                )

    def _spec(self, replica: Replica) -> WorkloadSpec | None:
        meta, spec = replica.metadata, replica.spec
        found: Generation | None = self.board.get(f"generation/{meta.tenant}/{spec.workload}/{spec.generation:08d}")
        return None if found is None else found.spec.spec

    # -- mass silence of a region ------------------------------------------------------------------------------------------

    def _mass(self, region: str, times: Times) -> Iterator[Wish]:
        """Report mass silence when it begins, when it has lasted too long, and when it ends."""
        silent = region in self._silent_regions
        since_ms, called = self._masses.get(region, (times.now_ms, False))
        if silent and region not in self._masses:
            self._masses[region] = since_ms, False
            why = (
                f"most nodes of region {region} send no heartbeats, so none is marked unknown and nothing is evicted "
                "there; check the "
                "network and delete nodes that are gone for good"
            )
            yield self._tell(region, "MassSilence", why)
        elif not silent and self._masses.pop(region, None) is not None:
            yield self._tell(region, "MassSilenceOver", f"most nodes of region {region} send heartbeats again", "Normal")
        elif silent and not called and times.now_ms - since_ms >= times.tempo.call_operator_ms:
            self._masses[region] = since_ms, True
            why = (
                f"most nodes of region {region} have sent no heartbeats for {Duration(times.tempo.call_operator_ms)}; "
                "find out whether "
                "the region is lost, and if so declare it lost"
            )
            yield self._tell(region, "CallOperator", why)

    def _tell(self, region: str, reason: str, message: str, type_: Any = "Warning") -> Deed:
        event = EventSpec(regarding=f"{_REGION}{region}", type=type_, reason=reason, message=message, source=Role.NODES)
        return Deed(RecordEvent(f"{reason.lower()}-{region}-{self.board.revision}", event))


def _fence_ms(spec: WorkloadSpec, tempo: Timing) -> int:
    """Return the silence after which the authority accepts that the replica is lost."""
    return lost_after_ms(spec.fence, tempo) if spec.is_fenced else tempo.eager_ms
