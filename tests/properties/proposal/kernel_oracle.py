"""Oracle for the placement kernel: nested loops over plain values. Strategies for arrivals at both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from remit.law import fit
from remit.observation.node_columns import NodeColumns, NodeFree
from remit.observation.topology_counts import ColumnPeerCounts
from remit.proposal.placement.builtin_plugins import BALANCED, DEFAULT_SCORES, LEAST_ALLOCATED, MOST_ALLOCATED, PREFERRED_TAINTS
from remit.proposal.placement.fragmentation import RANGE, SHAPES_WEIGHED_MAX, Fragmentation
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import Score
from remit.proposal.placement.topology_gates import HIGH_PRECISION_FACTOR, PREFER_WEIGHT, SCALE
from tests.unit.law.fit_oracle import PlacementCase, Work
from tests.unit.law.scalar_fit import OneNode, PlainPeers
from tests.unit.law.strategies import GROUPS, nodes_left, scenes, works
from tests.unit.proposal.placement.fragmentation_oracle import ReferenceScore

FRAGMENTATION = "fragmentation"
PROFILES: dict[str, tuple[Score, ...]] = {
    "default": DEFAULT_SCORES,
    "most": (MOST_ALLOCATED, PREFERRED_TAINTS),
    "balanced": (LEAST_ALLOCATED, BALANCED),
    "none": (),
    FRAGMENTATION: DEFAULT_SCORES,
}
"""With the last one, the fragmentation score, which is computed for columns, counts too."""


class PlainPlacement:
    """The same by nested loops over plain values: rules node by node, plain scores, counts from scratch."""

    def __init__(
        self, left: Sequence[NodeFree], standing: Sequence[tuple[fit.Requirements, int]], profile: Sequence[Score]
    ) -> None:
        self.left, self.standing, self.profile = list(left), list(standing), profile
        self.slow: ReferenceScore | None = None
        """If the fragmentation score counts, it replaces every score that is not static."""

    def place(self, ask: fit.Requirements) -> int:
        found = self.numbers(ask)
        return max(found, key=lambda row: (found[row], -row), default=-1)

    def numbers(self, ask: fit.Requirements) -> dict[int, int]:
        """Scores of the rows where it fits."""
        sites = [OneNode(one) for one in self.left]
        peers = PlainPeers(sites, [(other, self.left[row].node) for other, row in self.standing])
        likes = {bool(ask.untolerated_soft[site.taints]) for site in sites}
        found: dict[int, int] = {}
        for row, site in enumerate(sites):
            if fit.misfits(ask, site, peers):
                continue
            total: Any = None
            fine = 1 if self.slow is None else HIGH_PRECISION_FACTOR
            for score in (one for one in self.profile if not one.static):
                part = float(score.score(ask, _Priced(site))) * float(SCALE * score.weight)
                total = part if total is None else total + part
            if self.slow is not None:
                total = (1 + (self.slow.gain(ask, self.left[row]) - 1) / RANGE) * SCALE * HIGH_PRECISION_FACTOR
            number = max(int(total or 0), 0)
            if any(one.static for one in self.profile) and len(likes) > 1:
                number += 0 if ask.untolerated_soft[site.taints] else PREFERRED_TAINTS.weight * SCALE * fine
            found[row] = number + self._preferred(ask, site, sites, peers) * fine
        return found

    def _preferred(self, ask: fit.Requirements, site: OneNode, sites: Sequence[OneNode], peers: PlainPeers) -> int:
        total = 0.0
        for term in ask.preferred_spread:
            eligible = {
                s.domain(term.peers.topology_key)[1]
                for s in sites
                if s.domain(term.peers.topology_key)[0] and fit.static_misfit(ask, s) is None
            }
            counts = peers.counts(term.peers)
            least = min((counts[domain] for domain in eligible), default=0)
            most = max((counts[domain] for domain in eligible), default=0)
            known, domain = site.domain(term.peers.topology_key)
            total += 1.0 - (counts[domain] - least) / (1.0 + max(most - least, 0)) if known else 0.0
        return max(int(total * (SCALE * PREFER_WEIGHT / len(ask.preferred_spread))), 0) if ask.preferred_spread else 0

    def post(self, ask: fit.Requirements, row: int, devices: dict[str, int]) -> None:
        node, free, used = self.left[row]
        free = {name: free.get(name, 0) - dict(ask.resources).get(name, 0) for name in ("cpu", "memory")}
        self.left[row] = NodeFree(node, free, {name: used.get(name, 0) + devices.get(name, 0) for name in {*used, *devices}})
        self.standing.append((ask, row))

    def gone(self, at: int) -> None:
        ask, row = self.standing.pop(at)
        node, free, used = self.left[row]
        self.left[row] = NodeFree(node, {n: free.get(n, 0) + dict(ask.resources).get(n, 0) for n in ("cpu", "memory")}, used)


class _Priced:
    """A node with the attributes that scores use beyond the rules."""

    def __init__(self, site: OneNode) -> None:
        self.free, self.taints = {name: site.free.get(name, 0) for name, _ in site.node.spec.capacity}, site.taints
        self.share = {name: 1 / count for name, count in site.node.spec.capacity if count}


class LearnedScore:
    """A kernel's fragmentation score with its observed demand, and the same computed slowly."""

    def __init__(self, columns: NodeColumns, profile: str) -> None:
        self.columns = columns
        self.made = Fragmentation(columns) if profile == FRAGMENTATION else None

    @property
    def scores(self) -> tuple[Score, ...]:
        return (self.made.score,) if self.made is not None else ()

    def come(self, ask: fit.Requirements, count: int, plain: PlainPlacement | None = None) -> None:
        if self.made is None:
            return
        self.made.arrived(ask, count)
        before = self.made.score.epoch()
        self.made.update_weights()
        if plain is not None and self.columns.whole_devices and (plain.slow is None or self.made.score.epoch() != before):
            worths = {kind: found.tolist() for kind, found in self.made._worths.items()}
            plain.slow = ReferenceScore(self.made.demand.frequent_shapes(SHAPES_WEIGHED_MAX), worths, plain.left)


def kernel_of(
    left: Sequence[NodeFree], asks: Sequence[fit.Requirements], standing: Sequence[tuple[fit.Requirements, int]], profile: str
) -> tuple[Kernel, LearnedScore]:
    columns = NodeColumns(left)
    learnt = LearnedScore(columns, profile)
    peers = PlainPeers([OneNode(one) for one in left], [(ask, left[row].node) for ask, row in standing])
    kernel = Kernel(columns, ColumnPeerCounts(columns, peers.counted(asks)), scores=(*PROFILES[profile], *learnt.scores))
    for at, ask in enumerate(asks):
        kernel.class_for(at, ask)
    return kernel, learnt


def full(left: NodeFree) -> NodeFree:
    """The drawn node with nothing used: capacity for a run."""
    return NodeFree(left.node, dict(left.node.spec.capacity.pairs), {})


loud = st.sampled_from(
    [frozenset({"resources", "peers"}), frozenset({"resources", "taints"}), frozenset({"devices", "peers"}), frozenset(GROUPS)]
)
Coming = tuple[PlacementCase, list[Work], list[tuple[int, int]], str]


@st.composite
def orders(draw: st.DrawFn, among: st.SearchStrategy[frozenset[str]] = loud, profile: str = "") -> Coming:
    """A case, several classes, and how many replicas of each arrive one after another."""
    groups = draw(among)
    scene = draw(scenes(most=1, loud=groups))
    left = [draw(nodes_left(row, groups)) for row in range(draw(st.integers(1, 6)))]
    left = [full(one) for one in left] if draw(st.booleans()) else left
    scene = scene._replace(left=left, standing=[(work, row % len(left)) for work, row in scene.standing])
    sorts = [scene.work, *draw(st.lists(works(groups), max_size=2))]
    coming = draw(st.lists(st.tuples(st.integers(0, len(sorts) - 1), st.integers(1, 7)), min_size=1, max_size=4))
    return scene, sorts, coming, profile or draw(st.sampled_from(sorted(PROFILES)))
