"""Trial placement on a frozen copy of a view.

A trial places replicas of one shape on a copy of the view's nodes, so the view itself never changes.

A trial can be *relaxed*: it then behaves as if the named filters did not reject this work. A constraint of the workload is
removed from its requirements; a problem of a node is repaired on the copy. The kernel then returns what it would return
after such a change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from remit.law.fit import Requirements, PeerIndex, MemoizedPredicate, owned_anti_affinity
from remit.law.overrides import ActiveOverrides, PlaceSet
from remit.law.selectors import domain_of
from remit.model.kinds import Node, NodeHealth, NodeStatus
from remit.observation.node_columns import Bools, Columns, Ints, Rows
from remit.observation.scheduler_view import View
from remit.observation.topology_counts import ColumnPeers
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES, OverrideFilter
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.kernel import Kernel, Placements
from remit.proposal.placement.plugins import Filter, Score, applies

NODE_HEALTH: Final = "node-health"
TAKES_WORK: Final = "takes-work"
NODE_STATE_FILTERS: Final = frozenset((NODE_HEALTH, TAKES_WORK))
"""Filters that are relaxed by repairing nodes rather than by changing the workload."""
SHUNNED: Final = "shunned"
ANTI_AFFINITY: Final = "anti-affinity"
OVERRIDES: Final = "overrides"

DAEMON_FILTERS: Final = (ANTI_AFFINITY, SHUNNED)
"""Filters that give a daemon one replica per node. Its manifest has no antiAffinity that could be removed."""

_ANYWHERE: Final = MemoizedPredicate(lambda value: True)
_RELAXED_FIELDS: Final[Mapping[str, Mapping[str, object]]] = {
    "place": {"regions": _ANYWHERE, "zones": _ANYWHERE, "pools": _ANYWHERE},
    "policy": {"allowed_regions": _ANYWHERE, "allowed_zones": _ANYWHERE, "allowed_pools": _ANYWHERE},
    "taints": {"tolerates": _ANYWHERE},
    "labels": {"node_expressions": ()},
    "spread": {"spread": ()},
    "affinity": {"affinity": ()},
    ANTI_AFFINITY: {"anti_affinity": ()},
}
"""By filter, the fields of the requirements that it reads, with values that require nothing."""


class TrialSetting(NamedTuple):
    """The inputs of a trial besides the nodes: requirements, pins and overrides, third-party plug-ins."""

    ask: Requirements
    pins: tuple[PlaceSet, ...] = ()
    effects: ActiveOverrides = ActiveOverrides()
    filters: tuple[Filter, ...] = ()
    scores: tuple[Score, ...] = DEFAULT_SCORES
    fixed: tuple[str, ...] = ()
    """Filters that cannot be relaxed because they define the workload type."""


DomainCountsByIndex = Mapping[PeerIndex, Mapping[str, int]]
"""Number of replicas by domain."""


class _TrialPeers(ColumnPeers):
    """Peer counts copied from a view. If relaxed, the anti-affinity of other workloads is ignored.

    `own` counts the part that belongs to the workload on trial: it disappears when the workload's own anti-affinity is
    relaxed.
    """

    def __init__(self, columns: Columns, counted: DomainCountsByIndex, own: DomainCountsByIndex, *, eased: bool) -> None:
        super().__init__(columns, counted)
        self.own: dict[PeerIndex, dict[str, int]] = {index: dict(by_domain) for index, by_domain in own.items()}
        self.eased = eased

    def post_in(self, indexes: Iterable[PeerIndex], row: int, count: int) -> None:
        super().post_in(indexes, row, count)
        self._count_own(indexes, row, count)

    def post_run(self, indexes: Iterable[PeerIndex], rows: Ints, counts: Ints) -> None:
        super().post_run(indexes, rows, counts)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self._count_own(indexes, row, count)

    def _count_own(self, indexes: Iterable[PeerIndex], row: int, count: int) -> None:
        """Every replica placed in a trial belongs to its one class, so it counts as the workload's own."""
        node = self._columns.nodes[row]
        if node is None:
            return
        for index in indexes:
            if index.owners:
                mine, domain = self.own.setdefault(index, {}), domain_of(node, index.topology_key)
                mine[domain] = mine.get(domain, 0) + count

    def indexes(self) -> list[PeerIndex]:
        return list(dict.fromkeys((*self._counted, *self._counts)))

    def anti_affinity_owners(self, ask: Requirements) -> Sequence[PeerIndex]:
        return () if self.eased else super().anti_affinity_owners(ask)


class Trial:
    """Trial placements of one class. `kernel` is configured like the scheduler's; postings stay inside this trial."""

    def __init__(self, columns: Columns, counted: DomainCountsByIndex, own: DomainCountsByIndex, setting: TrialSetting, eased: Collection[str]) -> None:
        self.setting, self.columns = setting, columns
        self._eased = frozenset(eased)
        self.peers = _TrialPeers(columns, counted, own, eased=SHUNNED in eased)
        steering = OverrideFilter()
        steering.effects = ActiveOverrides() if OVERRIDES in eased else setting.effects
        others = tuple(one for one in setting.filters if one.name not in eased)
        self.kernel = Kernel(columns, self.peers, filters=(steering.filter, *others), scores=setting.scores)
        pins = () if OVERRIDES in eased else setting.pins
        self.one: WorkClass = self.kernel.known(("trial",), _relaxed_requirements(setting.ask, eased), pins=pins)

    @classmethod
    def of(cls, view: View, setting: TrialSetting) -> Trial:
        ask = setting.ask
        indexes = dict.fromkeys(
            (*(term.peers for term in (*ask.spread, *ask.affinity, *ask.anti_affinity, *ask.preferred_spread)), *view.peers.anti_affinity_owners(ask))
        )
        counted = {index: _counts_by_domain(view.columns, view.peers, index) for index in indexes}
        own = {index: _own_counts_by_domain(view, ask, index) for index in owned_anti_affinity(ask) if index in counted}
        return cls(view.columns.freeze(), counted, own, setting, ())

    def eased(self, *names: str, nodes: Collection[str] | None = None) -> Trial:
        """Returns an independent copy of this trial, with its placements, in which these filters reject nothing.

        Filters about the state of nodes are relaxed on `nodes`, or on all nodes if it is None.
        """
        columns = self.columns.freeze()
        mended = NODE_STATE_FILTERS & frozenset(names)
        for node in [node for node in columns.nodes if node is not None] if mended else ():
            if (nodes is None or node.metadata.name in nodes) and (right := _repaired(node, mended)) is not node:
                columns.put(right)
        counted = {index: _counts_by_domain(self.columns, self.peers, index) for index in self.peers.indexes()}
        if ANTI_AFFINITY in names and ANTI_AFFINITY not in self._eased:
            for index, own in self.peers.own.items():
                counted[index] = {domain: count - own.get(domain, 0) for domain, count in counted[index].items()}
        return Trial(columns, counted, self.peers.own, self.setting, self._eased | frozenset(names))

    def grown(self, *nodes: Node) -> Trial:
        """Returns a copy with these nodes added; a node with an existing name replaces that node. The nodes are used as given.
        """
        trial = self.eased()
        for node in nodes:
            trial.columns.put(node)
        return trial

    # -- queries -----------------------------------------------------------------------------------------------------------

    def fits(self) -> Bools:
        """Rows on which one replica fits now."""
        found: Bools = self.kernel.numbers(self.one) >= 0
        return found

    def places(self, count: int) -> bool:
        """Whether `count` replicas can be placed one after another. Postings are undone."""
        return len(self.tried(count).rows) == count

    def tried(self, count: int) -> Placements:
        """Placements for up to `count` replicas, as many as fit. Postings are undone."""
        found = self.kernel.run(self.one, count)
        self.kernel.undo(self.one, found)
        return found

    def refusing(self, row: int | None = None) -> list[Filter]:
        """Filters that reject this row, or any row if `row` is None."""
        site = self.columns if row is None else Rows(self.columns, np.array([row]))
        there: Bools = self.columns.region >= 0 if row is None else np.ones(1, dtype=np.bool_)
        self.kernel.refresh(self.one)
        return [
            one
            for one in self.kernel.all_filters
            if applies(one, self.one.ask)
            and not np.broadcast_to(self.kernel.checked(one, self.one.over, site), len(there))[there].all()
        ]

    def moved(self, indexes: Collection[PeerIndex], row: int, sign: int) -> None:
        """Changes the peer counts as if a replica that counts in these indexes started (`sign` 1) or left (-1) on this row."""
        for index in indexes:
            domain = self.columns.domains(index.topology_key)
            if domain.ids[row] >= 0:
                self.peers.add(index, domain.values[domain.ids[row]], sign)


def ready_node(node: Node) -> Node:
    """The same node, ready and schedulable."""
    return _repaired(node, NODE_STATE_FILTERS)


def _repaired(node: Node, what: Collection[str]) -> Node:
    if NODE_HEALTH in what and node.status.health is not NodeHealth.READY:
        node = replace(node, status=NodeStatus(health=NodeHealth.READY))
    if TAKES_WORK in what and (node.spec.unschedulable or node.spec.draining):
        node = replace(node, spec=replace(node.spec, unschedulable=False, draining=False))
    return node


def _relaxed_requirements(ask: Requirements, names: Collection[str]) -> Requirements:
    for name in sorted(names):
        ask = ask._replace(**_RELAXED_FIELDS.get(name, {}))  # type: ignore[arg-type]  # the table has what each field takes
    return ask


def _counts_by_domain(columns: Columns, peers: ColumnPeers, index: PeerIndex) -> dict[str, int]:
    """Replicas in each domain, by the domain's name. Replicas outside of any domain are counted under the empty name."""
    counts, values = peers.counts(index), columns.domains(index.topology_key).values
    found = {str(values[slot]): int(counts[slot]) for slot in np.flatnonzero(counts[: len(values)]).tolist()}
    return {**found, "": peers.total(index) - sum(found.values())}


def _own_counts_by_domain(view: View, ask: Requirements, index: PeerIndex) -> dict[str, int]:
    """Replicas of the workload itself in an index, by domain."""
    shapes, replicas = view.shapes, view.replicas
    owner = shapes.workloads.ids.get(f"{ask.tenant}/{ask.generation[1]}")
    mine = [one for one in shapes.picked(index).tolist() if shapes.at.workload[one] == owner]
    nodes = replicas.column("node")
    rows = nodes[(nodes >= 0) & np.isin(replicas.column("generation"), mine)]
    domains = view.columns.domains(index.topology_key)
    ids, counts = np.unique(domains.ids[rows], return_counts=True)
    return {str(domains.values[at]) if at >= 0 else "": int(count) for at, count in zip(ids.tolist(), counts, strict=True)}
