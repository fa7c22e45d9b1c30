"""Node controller: suspect and unknown marks, eviction after the fence, NoExecute taints.

The evidence ladder, what is on a silent node, and taints that push out.

Each signal decides only what its uncertainty allows. A few missed beats stop new placement (suspect); more make everything
there doubtful (unknown); and only past the fence of a workload, which its own agent keeps too, is a replica given up. The
authority counts the silence and has the last word: what is asked for too early is refused, so nothing is asked before its time.

A node that was unknown joins again, and is ready only once its beat says that it has come to terms with this incarnation. Nodes
become unknown no faster than a zone's rate, and not at all while most of a region is silent: that is told, and after a while an
operator is called. Draining is in draining.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from remit.client.authority_client import NoAnswer
from remit.correction.controllers.desired_replicas import RUNS
from remit.correction.controllers.disruption import OFF_NODE, Draining, Leaving
from remit.correction.framework.actions import Again, Deed, Remit, Wish
from remit.correction.framework.loop import Controller, Loop, Times
from remit.correction.framework.work_queue import Bucket
from remit.law.requirements import tolerated
from remit.law.timing import Tempo, lost_after_ms
from remit.model.claims import Mark, Move, Note, Role, Verdict
from remit.model.kinds import Node, NodeHealth, WorkloadSpec
from remit.model.records import EventSpec, Generation, Phase, Replica
from remit.observation.health import Hearing
from remit.observation.watch_cache import Board

_ON_NODE: Final = RUNS | {Phase.DRAINING, Phase.STOPPING}

GIVEN_UP_BURST: Final = 10
GIVEN_UP_MILLI_PER_S: Final = 100
GIVEN_UP_MILLI_PER_S_SICK: Final = 10
"""How many nodes of a zone become unknown at once, and a second after that: a tenth of one; a hundredth if most are silent."""

HEARING_BEATS: Final = 3
"""What was heard longer ago than so many beats is no evidence."""

LOST_AFTER: Final = 4
"""So many times as long as it takes to become unknown, an empty node is silent before it is lost."""

_REGION: Final = "region/"


class Nodes(Controller):
    """Its keys are those of nodes; and of regions, for what is said of many nodes at once."""

    remit = Remit(Role.NODES, claims=(Mark,), transitions=("evict", "doubt", "lose"))

    def __init__(self, board: Board, leaving: Leaving) -> None:
        super().__init__(board)
        self.hearing: Hearing | None = None
        self.leaving, self.draining = leaving, Draining(board, leaving)
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._silent_regions: frozenset[str] = frozenset()
        self._silent_zones: frozenset[tuple[str, str]] = frozenset()
        self._masses: dict[str, tuple[int, bool]] = {}
        """By region: since when most of it is silent, and whether an operator was called."""

    # -- hearing ---------------------------------------------------------------------------------------------------------

    def concerns(self, key: str, old: Any, new: Any) -> Iterable[str]:
        if isinstance(new, Replica) or isinstance(old, Replica):
            names = dict.fromkeys(one.status.node for one in (old, new) if one is not None and one.status.node)
            return tuple(f"node/{name}" for name in names if self._watched(name))
        return (key,) if key.startswith("node/") else ()

    def _watched(self, name: str) -> bool:
        """Are changes of what is on this node news? On most nodes they are not."""
        node: Node | None = self.board.get(f"node/{name}")
        return node is not None and (
            node.spec.draining or bool(node.spec.taints) or node.status.health in (NodeHealth.UNKNOWN, NodeHealth.LOST)
        )

    def everything(self) -> Iterable[str]:
        return (*(key for key, _ in self.board.kind("node/")), *(f"{_REGION}{name}" for name in self._masses))

    def began(self, times: Times) -> None:
        self.hearing = None

    async def beside(self, loop: Loop) -> None:
        """Time itself is news here: ask at every beat who was heard."""
        beat_ms = loop.cadence.beat_ms
        while True:
            try:
                self.take(Hearing(*await loop.client.heard(deadline_ms=beat_ms)), loop.times())
            except NoAnswer as error:
                loop.gave_up(error)
            else:
                loop.look_at(self._unwell(loop.times()))
            await loop.world.clock.sleep_ms(beat_ms)

    def take(self, hearing: Hearing, times: Times) -> None:
        self.hearing = hearing
        nodes = (kept.thing for _, kept in self.board.kind("node/"))
        self._silent_regions, self._silent_zones = hearing.masses(nodes, times.tempo.suspect_ms)

    def _unwell(self, times: Times) -> list[str]:
        """Those of whom there may be something to say: almost all are well."""
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

    # -- looking ---------------------------------------------------------------------------------------------------------

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
        """Was it heard lately, and by the authority of what is seen?"""
        if self.hearing is None or self.board.head is None:
            return False
        young = times.now_ms - self.hearing.sent_ms <= HEARING_BEATS * times.tempo.beat_ms
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
            yield Deed(Mark(name, at, target, reason=f"silent for {silent_ms} ms" if silent_ms > tempo.suspect_ms else "heard"))

    def _bucket(self, node: Node, times: Times) -> int:
        zone = node.spec.region, node.spec.zone
        rate = GIVEN_UP_MILLI_PER_S_SICK if zone in self._silent_zones else GIVEN_UP_MILLI_PER_S
        return self._buckets.setdefault(zone, Bucket(GIVEN_UP_BURST)).wait_ms(times.now_ms, rate)

    def _is_empty(self, node: str) -> bool:
        return all(one.thing.status.phase in OFF_NODE for one in self.board.on(node))

    # -- what is there ---------------------------------------------------------------------------------------------------

    def _give_up(self, node: str, times: Times) -> Iterator[Wish]:
        """Doubt what is there; what is in doubt fails once its fence has passed. The next fence is waited for."""
        silent_ms = self._silent_ms(node)
        for one in self.board.on(node):
            phase = one.thing.status.phase
            if phase in _ON_NODE:
                yield Deed(Move(one.key, one.revision, "doubt", reason="the node is silent"))
            elif phase is Phase.UNKNOWN:
                spec = self._spec(one.thing)
                left_ms = 0 if spec is None else _fence_ms(spec, times.tempo) - silent_ms
                if spec is not None and left_ms > 0:
                    yield Again(left_ms)
                elif spec is not None:
                    yield Deed(Move(one.key, one.revision, "lose", result="lost", reason="the node is lost"))

    def _push_out(self, node: Node) -> Iterator[Wish]:
        """A NoExecute taint takes away what does not tolerate it, whatever that disrupts: it was put there for that."""
        taints = [taint for taint in node.spec.taints if taint.effect == "NoExecute"]
        for one in self.board.on(node.metadata.name) if taints else ():
            spec = self._spec(one.thing) if one.thing.status.phase in RUNS else None
            if spec is not None and not all(tolerated(taint, spec.placement.tolerations) for taint in taints):
                yield self.draining.evict(one, "the node has a taint that it does not tolerate")

    def _spec(self, replica: Replica) -> WorkloadSpec | None:
        meta, spec = replica.metadata, replica.spec
        found: Generation | None = self.board.get(f"generation/{meta.tenant}/{spec.workload}/{spec.generation:08d}")
        return None if found is None else found.spec.spec

    # -- most of a region ------------------------------------------------------------------------------------------------

    def _mass(self, region: str, times: Times) -> Iterator[Wish]:
        """Said when it begins, when it has lasted for too long, and when it is over."""
        silent = region in self._silent_regions
        since_ms, called = self._masses.get(region, (times.now_ms, False))
        if silent and region not in self._masses:
            self._masses[region] = since_ms, False
            why = "most of its nodes are silent: nothing there is given up meanwhile; delete those that are gone for good"
            yield self._tell(region, "MassSilence", why)
        elif not silent and self._masses.pop(region, None) is not None:
            yield self._tell(region, "MassSilenceOver", "most of its nodes are heard again", "Normal")
        elif silent and not called and times.now_ms - since_ms >= times.tempo.call_operator_ms:
            self._masses[region] = since_ms, True
            why = "most of its nodes have been silent for long: find out whether the region is lost, and say so"
            yield self._tell(region, "CallOperator", why)

    def _tell(self, region: str, reason: str, message: str, type_: Any = "Warning") -> Deed:
        event = EventSpec(regarding=f"{_REGION}{region}", type=type_, reason=reason, message=message, source=Role.NODES)
        return Deed(Note(f"{reason.lower()}-{region}-{self.board.revision}", event))


def _fence_ms(spec: WorkloadSpec, tempo: Tempo) -> int:
    """After so much silence the authority agrees that the copy there is given up."""
    return lost_after_ms(spec.fence, tempo) if spec.never_twice else tempo.eager_ms
