"""Is there power enough in the rack, and which tier is better? A filter and a score, to start your own from.

Each is one expression over columns: `site` is all nodes, or those that changed, and the answer is one entry a node, in its
order. Only the node's own row may matter, for else an answer would be kept after it has become wrong. Of the work, only what
it needs of a node may: all that needs the same shares one ask, whatever its name and labels are.
"""

from __future__ import annotations

from typing import Any, Final

from remit.law.fit import NodeView, PeerCounts, Requirements
from remit.model.claims import Code
from remit.model.kinds import NodeExpression
from remit.proposal.placement.plugins import Filter, Score, UnblockEvent

HOT: Final = 4_000
"""Work that asks for so many thousandths of a processor runs hot; lesser work needs no power that anybody counts."""
WATTS: Final = 100
"""What hot work takes for each processor."""
HAS: Final = "rack-power"
"""A label of the node: how many watts its rack gives it. A node without it gives none that anybody knows of."""
TIERS: Final = {"gold": 1.0, "silver": 0.5}
"""The label `tier` of the node, and how good it is; any other is worth nothing."""


def watts(ask: Requirements) -> int:
    cpu = dict(ask.resources).get("cpu", 0)
    return -(-cpu * WATTS // 1_000) if cpu >= HOT else 0


def is_hot(ask: Requirements) -> bool:
    return watts(ask) > 0


def rack_power(ask: Requirements, site: NodeView, peers: PeerCounts) -> Any:
    """At least so many watts: `Gt` compares whole numbers, and a label that is none is no match."""
    return site.labelled((NodeExpression(key=HAS, operator="Gt", values=(str(watts(ask) - 1),)),))


def tier(ask: Requirements, site: Any) -> Any:
    return sum(
        worth * site.labelled((NodeExpression(key="tier", operator="In", values=(name,)),)) for name, worth in TIERS.items()
    )


RACK_POWER: Final = Filter(
    "rack-power",
    Code.SELECTOR,
    rack_power,
    unblock_events=(UnblockEvent.NODE, UnblockEvent.WORKLOAD),
    applies=is_hot,
    reason="the rack has less power than the workload needs",
)
TIER: Final = Score("tier", tier, weight=5, static=True)
"""Static: what a node is tells it, so it is not asked again when only what is left of the node has changed."""
