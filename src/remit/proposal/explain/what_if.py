"""Trial placement on a frozen copy of a view.

One shape of work on a frozen copy of a view's nodes, where things may be tried. The view itself is not touched.

A trial may be *eased*: as if a filter did not refuse this work. What the workload asks for is then left out of its ask, and
what a node is, is put right on the copy; so the kernel answers as it would if that had been done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from remit.law.fit import Ask, Index, Lookup, carried
from remit.law.overrides import Effects, PlaceSet
from remit.law.selectors import domain_of
from remit.model.kinds import Node, NodeHealth, NodeStatus
from remit.observation.node_columns import Bools, Columns, Ints, Rows
from remit.observation.scheduler_view import View
from remit.observation.topology_counts import ColumnPeers
from remit.proposal.placement.builtin_plugins import DEFAULT, Steering
from remit.proposal.placement.class_scores import Class
from remit.proposal.placement.kernel import Kernel, Placed
from remit.proposal.placement.plugins import Filter, Score, applies

NODE_HEALTH: Final = "node-health"
TAKES_WORK: Final = "takes-work"
MENDED: Final = frozenset((NODE_HEALTH, TAKES_WORK))
"""Those that are eased by putting nodes right."""
SHUNNED: Final = "shunned"
ANTI_AFFINITY: Final = "anti-affinity"
OVERRIDES: Final = "overrides"

ONE_A_NODE: Final = (ANTI_AFFINITY, SHUNNED)
"""What makes a daemon one: there is no antiAffinity in its manifest that could be dropped."""

_ANYWHERE: Final = Lookup(lambda value: True)
_EASED: Final[Mapping[str, Mapping[str, object]]] = {
    "place": {"regions": _ANYWHERE, "zones": _ANYWHERE, "pools": _ANYWHERE},
    "policy": {"allowed_regions": _ANYWHERE, "allowed_zones": _ANYWHERE, "allowed_pools": _ANYWHERE},
    "taints": {"tolerates": _ANYWHERE},
    "labels": {"wanted": ()},
    "spread": {"spread": ()},
    "affinity": {"affinity": ()},
    ANTI_AFFINITY: {"anti": ()},
}
"""By filter, what of an ask it looks at, and what it says when it asks for nothing."""


class Setting(NamedTuple):
    """What a trial is made of beside the nodes: the ask, the pins and overrides, other people's plug-ins."""

    ask: Ask
    pins: tuple[PlaceSet, ...] = ()
    effects: Effects = Effects()
    filters: tuple[Filter, ...] = ()
    scores: tuple[Score, ...] = DEFAULT
    fixed: tuple[str, ...] = ()
    """Filters that nobody can ease, since what they hold to is what the work is."""


Counted = Mapping[Index, Mapping[str, int]]
"""How many by domain."""


class _Peers(ColumnPeers):
    """Counts that were taken from others; eased, nobody shuns. `own` is where its own kind keeps others away: that ends with
    its anti-affinity.
    """

    def __init__(self, columns: Columns, counted: Counted, own: Counted, *, eased: bool) -> None:
        super().__init__(columns, counted)
        self.own: dict[Index, dict[str, int]] = {index: dict(by_domain) for index, by_domain in own.items()}
        self.eased = eased

    def post_in(self, indexes: Iterable[Index], row: int, count: int) -> None:
        super().post_in(indexes, row, count)
        self._count_own(indexes, row, count)

    def post_run(self, indexes: Iterable[Index], rows: Ints, counts: Ints) -> None:
        super().post_run(indexes, rows, counts)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self._count_own(indexes, row, count)

    def _count_own(self, indexes: Iterable[Index], row: int, count: int) -> None:
        """Whatever is placed in a trial is of the one class that it has."""
        node = self._columns.nodes[row]
        if node is None:
            return
        for index in indexes:
            if index.carriers:
                mine, domain = self.own.setdefault(index, {}), domain_of(node, index.key)
                mine[domain] = mine.get(domain, 0) + count

    def indexes(self) -> list[Index]:
        return list(dict.fromkeys((*self._counted, *self._counts)))

    def shunners(self, ask: Ask) -> Sequence[Index]:
        return () if self.eased else super().shunners(ask)


class Trial:
    """`kernel` and `one` are as the scheduler has them; whatever is posted stays in this trial."""

    def __init__(self, columns: Columns, counted: Counted, own: Counted, setting: Setting, eased: Collection[str]) -> None:
        self.setting, self.columns = setting, columns
        self._eased = frozenset(eased)
        self.peers = _Peers(columns, counted, own, eased=SHUNNED in eased)
        steering = Steering()
        steering.effects = Effects() if OVERRIDES in eased else setting.effects
        others = tuple(one for one in setting.filters if one.name not in eased)
        self.kernel = Kernel(columns, self.peers, filters=(steering.filter, *others), scores=setting.scores)
        pins = () if OVERRIDES in eased else setting.pins
        self.one: Class = self.kernel.known(("trial",), _eased_ask(setting.ask, eased), pins=pins)

    @classmethod
    def of(cls, view: View, setting: Setting) -> Trial:
        ask = setting.ask
        indexes = dict.fromkeys(
            (*(term.of for term in (*ask.spread, *ask.affinity, *ask.anti, *ask.prefer)), *view.peers.shunners(ask))
        )
        counted = {index: _by_domain(view.columns, view.peers, index) for index in indexes}
        own = {index: _of_own(view, ask, index) for index in carried(ask) if index in counted}
        return cls(view.columns.freeze(), counted, own, setting, ())

    def eased(self, *names: str, nodes: Collection[str] | None = None) -> Trial:
        """The same, with what was placed here, as if these filters refused nothing; from now on each goes its own way. Of the
        nodes, all are put right, or these.
        """
        columns = self.columns.freeze()
        mended = MENDED & frozenset(names)
        for node in [node for node in columns.nodes if node is not None] if mended else ():
            if (nodes is None or node.metadata.name in nodes) and (right := _mended(node, mended)) is not node:
                columns.put(right)
        counted = {index: _by_domain(self.columns, self.peers, index) for index in self.peers.indexes()}
        if ANTI_AFFINITY in names and ANTI_AFFINITY not in self._eased:
            for index, own in self.peers.own.items():
                counted[index] = {domain: count - own.get(domain, 0) for domain, count in counted[index].items()}
        return Trial(columns, counted, self.peers.own, self.setting, self._eased | frozenset(names))

    def grown(self, *nodes: Node) -> Trial:
        """The same with these nodes, new ones or others in the place of those of their names; they are as they are given."""
        trial = self.eased()
        for node in nodes:
            trial.columns.put(node)
        return trial

    # -- asking ------------------------------------------------------------------------------------------------------------

    def fits(self) -> Bools:
        """The rows on which one would fit now."""
        found: Bools = self.kernel.numbers(self.one) >= 0
        return found

    def places(self, count: int) -> bool:
        """Do so many find a place, one after another? Nothing stays posted."""
        return len(self.tried(count).rows) == count

    def tried(self, count: int) -> Placed:
        """As many places as there are for so many. Nothing stays posted."""
        found = self.kernel.run(self.one, count)
        self.kernel.undo(self.one, found)
        return found

    def refusing(self, row: int | None = None) -> list[Filter]:
        """The filters that refuse this row; or any row at all."""
        site = self.columns if row is None else Rows(self.columns, np.array([row]))
        there: Bools = self.columns.region >= 0 if row is None else np.ones(1, dtype=np.bool_)
        self.kernel.refresh(self.one)
        return [
            one
            for one in self.kernel.all_filters
            if applies(one, self.one.ask)
            and not np.broadcast_to(self.kernel.checked(one, self.one.over, site), len(there))[there].all()
        ]

    def moved(self, indexes: Collection[Index], row: int, sign: int) -> None:
        """Somebody who counts in these came to this row, or left it."""
        for index in indexes:
            domain = self.columns.domains(index.key)
            if domain.ids[row] >= 0:
                self.peers.add(index, domain.values[domain.ids[row]], sign)


def ready_node(node: Node) -> Node:
    """The same node, healthy and open."""
    return _mended(node, MENDED)


def _mended(node: Node, what: Collection[str]) -> Node:
    if NODE_HEALTH in what and node.status.health is not NodeHealth.READY:
        node = replace(node, status=NodeStatus(health=NodeHealth.READY))
    if TAKES_WORK in what and (node.spec.unschedulable or node.spec.draining):
        node = replace(node, spec=replace(node.spec, unschedulable=False, draining=False))
    return node


def _eased_ask(ask: Ask, names: Collection[str]) -> Ask:
    for name in sorted(names):
        ask = ask._replace(**_EASED.get(name, {}))  # type: ignore[arg-type]  # the table has what each field takes
    return ask


def _by_domain(columns: Columns, peers: ColumnPeers, index: Index) -> dict[str, int]:
    """How many are in each domain, by its name; those in none count in the total, under no name."""
    counts, values = peers.counts(index), columns.domains(index.key).values
    found = {str(values[slot]): int(counts[slot]) for slot in np.flatnonzero(counts[: len(values)]).tolist()}
    return {**found, "": peers.total(index) - sum(found.values())}


def _of_own(view: View, ask: Ask, index: Index) -> dict[str, int]:
    """How many of those in an index are of the workload that asks, by domain."""
    shapes, replicas = view.shapes, view.replicas
    owner = shapes.workloads.ids.get(f"{ask.tenant}/{ask.generation[1]}")
    mine = [one for one in shapes.picked(index).tolist() if shapes.at.workload[one] == owner]
    nodes = replicas.column("node")
    rows = nodes[(nodes >= 0) & np.isin(replicas.column("generation"), mine)]
    domains = view.columns.domains(index.key)
    ids, counts = np.unique(domains.ids[rows], return_counts=True)
    return {str(domains.values[at]) if at >= 0 else "": int(count) for at, count in zip(ids.tolist(), counts, strict=True)}
