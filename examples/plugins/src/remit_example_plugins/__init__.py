"""Example plug-ins: a filter for the power of a rack, and a score for node tiers.

Each is one expression over columns: `site` has all nodes, or those that changed, and the result has one entry per node in the
same order. The result for a node may depend only on the row of that node, because results are cached per node. Of the
replica it may depend only on the requirements, because workloads with equal requirements share one `Requirements` object.
"""

from __future__ import annotations

from typing import Any, Final

from remit.law.fit import NodeView, PeerCounts, Requirements
from remit.model.claims import Code
from remit.model.kinds import NodeExpression
from remit.proposal.placement.plugins import Filter, Score, UnblockEvent

CPU_MIN: Final = 4_000
"""Replicas that request at least this many thousandths of a CPU are checked."""
WATTS: Final = 100
"""Power that such a replica needs per CPU."""
POWER_LABEL: Final = "rack-power"
"""Node label: the power in watts that the rack provides to the node. Nodes without it are rejected."""
TIERS: Final = {"gold": 1.0, "silver": 0.5}
"""Score by the value of the node label `tier`; other values score 0."""


def watts(requirements: Requirements) -> int:
    cpu = dict(requirements.resources).get("cpu", 0)
    return -(-cpu * WATTS // 1_000) if cpu >= CPU_MIN else 0


def is_checked(requirements: Requirements) -> bool:
    return watts(requirements) > 0


def rack_power(requirements: Requirements, site: NodeView, peers: PeerCounts) -> Any:
    """Accept nodes with enough power. `Gt` compares whole numbers; a label that is not a number does not match."""
    return site.labelled((NodeExpression(key=POWER_LABEL, operator="Gt", values=(str(watts(requirements) - 1),)),))


def tier(requirements: Requirements, site: Any) -> Any:
    return sum(
        worth * site.labelled((NodeExpression(key="tier", operator="In", values=(name,)),)) for name, worth in TIERS.items()
    )


RACK_POWER: Final = Filter(
    "rack-power",
    Code.SELECTOR,
    rack_power,
    unblock_events=(UnblockEvent.NODE, UnblockEvent.WORKLOAD),
    applies=is_checked,
    reason="the rack has less power than the workload needs",
)
TIER: Final = Score("tier", tier, weight=5, static=True)
"""Static: it depends only on labels, so it is not computed again when only the free capacity of a node changes."""
