"""Warm-start hints of nodes, by workload.

A hint ranks candidates and never authorizes anything: it may be outdated or wrong.

A node's agent reports a summary named `warm/NODE`: for each workload (`tenant/name`) how much of what it needs is already on
the node, in thousandths. Summaries may arrive in any order; the last one of a node is valid until the next.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from remit.model.records import Summary
from remit.observation.node_columns import Floats, NodeColumns

PREFIX: Final = "warm/"
FULL: Final = 1_000


class Hints:
    """How warm each node is, by workload. `version` counts the applied summaries."""

    def __init__(self) -> None:
        self.version = 0
        self._by_node: dict[str, dict[str, int]] = {}
        self._by_workload: dict[str, dict[str, int]] = {}

    def put(self, name: str, summary: Summary | None) -> list[str]:
        """Replace a node's hints; None removes them. Returns the workloads that gained their first or lost their last hint."""
        node = name.removeprefix(PREFIX)
        before = self._by_node.pop(node, {})
        hints = (
            {}
            if summary is None
            else {workload: min(count, FULL) for workload, count in summary.spec.counts.items() if count > 0}
        )
        was_known = {workload: workload in self._by_workload for workload in (*before, *hints)}
        for workload in before:
            nodes = self._by_workload[workload]
            del nodes[node]
            if not nodes:
                del self._by_workload[workload]
        if hints:
            self._by_node[node] = hints
        for workload, count in hints.items():
            self._by_workload.setdefault(workload, {})[node] = count
        self.version += 1
        return [workload for workload, had_hint in was_known.items() if had_hint != (workload in self._by_workload)]

    def __bool__(self) -> bool:
        """Whether there is any hint."""
        return bool(self._by_workload)

    def has_hint(self, workload: str) -> bool:
        return workload in self._by_workload

    def warmth(self, workload: str, columns: NodeColumns) -> Floats:
        """Return the warmth of each row, from 0 to 1. Hints about removed nodes are ignored."""
        warmth = np.zeros(len(columns))
        for node, count in self._by_workload.get(workload, {}).items():
            if node in columns.rows:
                warmth[columns.rows[node]] = count / FULL
        return warmth
