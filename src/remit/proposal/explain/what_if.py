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

from remit.law.fit import MemoizedPredicate, PeerIndex, Requirements, is_ready, owned_anti_affinity
from remit.law.overrides import ActiveOverrides, PlaceSet
from remit.law.selectors import domain_of
from remit.model.kinds import Node, NodeHealth, NodeStatus
from remit.observation.node_columns import Bools, Ints, NodeColumns, SelectedRows
from remit.observation.scheduler_view import SchedulerView
from remit.observation.topology_counts import ColumnPeerCounts
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES, OverrideFilter
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.kernel import Kernel, Placements
from remit.proposal.placement.plugins import Filter, Score, applies

NODE_HEALTH: Final = "node-health"
SCHEDULABLE: Final = "schedulable"
NODE_STATE_FILTERS: Final = frozenset((NODE_HEALTH, SCHEDULABLE))
"""Filters that are relaxed by repairing nodes rather than by changing the workload."""
OTHERS_ANTI_AFFINITY: Final = "others-anti-affinity"
ANTI_AFFINITY: Final = "anti-affinity"
OVERRIDES: Final = "overrides"

DAEMON_FILTERS: Final = (ANTI_AFFINITY, OTHERS_ANTI_AFFINITY)
"""Filters that give a daemon one replica per node. Its manifest has no antiAffinity that could be removed."""

_ANYWHERE: Final = MemoizedPredicate(lambda value: True)
_RELAXED_FIELDS: Final[Mapping[str, Mapping[str, object]]] = {
    "placement": {"regions": _ANYWHERE, "zones": _ANYWHERE, "pools": _ANYWHERE},
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

    requirements: Requirements
    pins: tuple[PlaceSet, ...] = ()
    effects: ActiveOverrides = ActiveOverrides()
    filters: tuple[Filter, ...] = ()
    scores: tuple[Score, ...] = DEFAULT_SCORES
    fixed: tuple[str, ...] = ()
    """Filters that cannot be relaxed because they define the workload type."""


DomainCountsByIndex = Mapping[PeerIndex, Mapping[str, int]]
"""Number of replicas by domain."""


class _TrialPeers(ColumnPeerCounts):
    """Peer counts copied from a view. If relaxed, the anti-affinity of other workloads is ignored.

    `own` counts the part that belongs to the workload on trial: it disappears when the workload's own anti-affinity is
    relaxed.
    """

    def __init__(self, columns: NodeColumns, counted: DomainCountsByIndex, own: DomainCountsByIndex, *, relaxed: bool) -> None:
        super().__init__(columns, counted)
        self.own: dict[PeerIndex, dict[str, int]] = {index: dict(by_domain) for index, by_domain in own.items()}
        self.relaxed = relaxed

    def post_in(self, indexes: Iterable[PeerIndex], row: int, count: int) -> None:
        super().post_in(indexes, row, count)
        self._count_own(indexes, row, count)

    def post_many(self, indexes: Iterable[PeerIndex], rows: Ints, counts: Ints) -> None:
        super().post_many(indexes, rows, counts)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self._count_own(indexes, row, count)

    def _count_own(self, indexes: Iterable[PeerIndex], row: int, count: int) -> None:
        """Every replica placed in a trial belongs to its one class, so it counts as the workload's own."""
        node = self._columns.nodes[row]
        if node is None:
            return
        for index in indexes:
            if index.owners:
                own_counts, domain = self.own.setdefault(index, {}), domain_of(node, index.topology_key)
                own_counts[domain] = own_counts.get(domain, 0) + count

    def indexes(self) -> list[PeerIndex]:
        return list(dict.fromkeys((*self._counted, *self._counts)))

    def anti_affinity_owners(self, requirements: Requirements) -> Sequence[PeerIndex]:
        return () if self.relaxed else super().anti_affinity_owners(requirements)


class Trial:
    """Trial placements of replicas with equal requirements. `kernel` has the scheduler's scores and its filters, except
    the relaxed ones. Capacity that a trial takes is counted only in its own copy of the nodes.
    """

    def __init__(
        self,
        columns: NodeColumns,
        counted: DomainCountsByIndex,
        own: DomainCountsByIndex,
        setting: TrialSetting,
        relaxed: Collection[str],
    ) -> None:
        self.setting, self.columns = setting, columns
        self._relaxed = frozenset(relaxed)
        self.peers = _TrialPeers(columns, counted, own, relaxed=OTHERS_ANTI_AFFINITY in relaxed)
        override_filter = OverrideFilter()
        override_filter.effects = ActiveOverrides() if OVERRIDES in relaxed else setting.effects
        filters = tuple(filter_ for filter_ in setting.filters if filter_.name not in relaxed)
        self.kernel = Kernel(columns, self.peers, filters=(override_filter.filter, *filters), scores=setting.scores)
        pins = () if OVERRIDES in relaxed else setting.pins
        self.work_class: WorkClass = self.kernel.class_for(
            ("trial",), _relaxed_requirements(setting.requirements, relaxed), pins=pins
        )

    @classmethod
    def of(cls, view: SchedulerView, setting: TrialSetting) -> Trial:
        requirements = setting.requirements
        indexes = dict.fromkeys(
            (
                *(
                    term.peers
                    for term in (
                        *requirements.spread,
                        *requirements.affinity,
                        *requirements.anti_affinity,
                        *requirements.preferred_spread,
                    )
                ),
                *view.peers.anti_affinity_owners(requirements),
            )
        )
        counted = {index: _counts_by_domain(view.columns, view.peers, index) for index in indexes}
        own = {
            index: _own_counts_by_domain(view, requirements, index)
            for index in owned_anti_affinity(requirements)
            if index in counted
        }
        return cls(view.columns.freeze(), counted, own, setting, ())

    def relaxed(self, *names: str, nodes: Collection[str] | None = None) -> Trial:
        """Returns an independent copy of this trial, with its placements, in which these filters reject nothing.

        Filters about the state of nodes are relaxed on `nodes`, or on all nodes if it is None.
        """
        columns = self.columns.freeze()
        repaired_filters = NODE_STATE_FILTERS & frozenset(names)
        for node in [node for node in columns.nodes if node is not None] if repaired_filters else ():
            if (nodes is None or node.metadata.name in nodes) and (repaired := _repaired(node, repaired_filters)) is not node:
                columns.put(repaired)
        counted = {index: _counts_by_domain(self.columns, self.peers, index) for index in self.peers.indexes()}
        if ANTI_AFFINITY in names and ANTI_AFFINITY not in self._relaxed:
            for index, own in self.peers.own.items():
                counted[index] = {domain: count - own.get(domain, 0) for domain, count in counted[index].items()}
        return Trial(columns, counted, self.peers.own, self.setting, self._relaxed | frozenset(names))

    def with_nodes(self, *nodes: Node) -> Trial:
        """Returns a copy with these nodes added; a node with an existing name replaces that node. Nodes are used as given."""
        trial = self.relaxed()
        for node in nodes:
            trial.columns.put(node)
        return trial

    # -- queries -----------------------------------------------------------------------------------------------------------

    def fits(self) -> Bools:
        """Rows on which one replica fits now."""
        fitting: Bools = self.kernel.row_scores(self.work_class) >= 0
        return fitting

    def can_place(self, count: int) -> bool:
        """Whether `count` replicas can be placed one after another. Postings are undone."""
        return len(self.try_place(count).rows) == count

    def try_place(self, count: int) -> Placements:
        """Placements for up to `count` replicas, as many as fit. Postings are undone."""
        placements = self.kernel.place_run(self.work_class, count)
        self.kernel.undo(self.work_class, placements)
        return placements

    def refusing_filters(self, row: int | None = None) -> list[Filter]:
        """Filters that reject this row, or any row if `row` is None."""
        site = self.columns if row is None else SelectedRows(self.columns, np.array([row]))
        exists: Bools = self.columns.region >= 0 if row is None else np.ones(1, dtype=np.bool_)
        self.kernel.refresh(self.work_class)
        return [
            filter_
            for filter_ in self.kernel.all_filters
            if applies(filter_, self.work_class.requirements)
            and not np.broadcast_to(self.kernel.check(filter_, self.work_class.column_requirements, site), len(exists))[
                exists
            ].all()
        ]

    def count_peer(self, indexes: Collection[PeerIndex], row: int, sign: int) -> None:
        """Changes the peer counts as if a replica that counts in these indexes started (`sign` 1) or left (-1) on this row."""
        for index in indexes:
            domain = self.columns.domains(index.topology_key)
            if domain.ids[row] >= 0:
                self.peers.add(index, domain.values[domain.ids[row]], sign)


def ready_node(node: Node) -> Node:
    """The same node, ready and schedulable."""
    return _repaired(node, NODE_STATE_FILTERS)


def _repaired(node: Node, filters: Collection[str]) -> Node:
    if NODE_HEALTH in filters and not is_ready(node):
        node = replace(node, status=NodeStatus(health=NodeHealth.READY))
    if SCHEDULABLE in filters and (node.spec.unschedulable or node.spec.draining):
        node = replace(node, spec=replace(node.spec, unschedulable=False, draining=False))
    return node


def _relaxed_requirements(requirements: Requirements, names: Collection[str]) -> Requirements:
    for name in sorted(names):
        fields = _RELAXED_FIELDS.get(name, {})
        requirements = requirements._replace(**fields)  # type: ignore[arg-type]  # the table holds values of the right types
    return requirements


def _counts_by_domain(columns: NodeColumns, peers: ColumnPeerCounts, index: PeerIndex) -> dict[str, int]:
    """Replicas in each domain, by the domain's name. Replicas outside of any domain are counted under the empty name."""
    counts, values = peers.counts(index), columns.domains(index.topology_key).values
    by_domain = {str(values[slot]): int(counts[slot]) for slot in np.flatnonzero(counts[: len(values)]).tolist()}
    return {**by_domain, "": peers.total(index) - sum(by_domain.values())}


def _own_counts_by_domain(view: SchedulerView, requirements: Requirements, index: PeerIndex) -> dict[str, int]:
    """Replicas of the workload itself in an index, by domain."""
    shapes, replicas = view.shapes, view.replicas
    owner = shapes.workloads.ids.get(f"{requirements.tenant}/{requirements.generation[1]}")
    generations = [
        generation for generation in shapes.generations_in(index).tolist() if shapes.at.workload[generation] == owner
    ]
    nodes = replicas.column("node")
    rows = nodes[(nodes >= 0) & np.isin(replicas.column("generation"), generations)]
    domains = view.columns.domains(index.topology_key)
    ids, counts = np.unique(domains.ids[rows], return_counts=True)
    return {str(domains.values[at]) if at >= 0 else "": int(count) for at, count in zip(ids.tolist(), counts, strict=True)}
