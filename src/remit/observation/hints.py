"""Warm-start hints of nodes, by workload.

What nodes say they are warm for. A hint ranks and never authorises: it may be old or wrong.

A node's agent reports a summary under the name `warm/NODE`: for each workload, as `tenant/name`, how much of what it needs is
there already, in thousandths. Summaries merge in any order; the last one of a node stands until the next.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from remit.model.records import Summary
from remit.observation.node_columns import Columns, Floats

PREFIX: Final = "warm/"
FULL: Final = 1_000


class Hints:
    """By workload, how warm which node is. `version` counts what was heard."""

    def __init__(self) -> None:
        self.version = 0
        self._by_node: dict[str, dict[str, int]] = {}
        self._by_work: dict[str, dict[str, int]] = {}

    def put(self, name: str, summary: Summary | None) -> list[str]:
        """What a node says from now on; nothing, if its summary is gone. Answers of which work something is said for the first
        time now, or nothing any more.
        """
        node = name.removeprefix(PREFIX)
        before = self._by_node.pop(node, {})
        said = {} if summary is None else {work: min(count, FULL) for work, count in summary.spec.counts.items() if count > 0}
        known = {work: work in self._by_work for work in (*before, *said)}
        for work in before:
            nodes = self._by_work[work]
            del nodes[node]
            if not nodes:
                del self._by_work[work]
        if said:
            self._by_node[node] = said
        for work, count in said.items():
            self._by_work.setdefault(work, {})[node] = count
        self.version += 1
        return [work for work, was in known.items() if was != (work in self._by_work)]

    def __bool__(self) -> bool:
        """Was anything said at all?"""
        return bool(self._by_work)

    def about(self, work: str) -> bool:
        return work in self._by_work

    def warmth(self, work: str, columns: Columns) -> Floats:
        """From 0 to 1, by row; nodes that are gone are passed over."""
        found = np.zeros(len(columns))
        for node, count in self._by_work.get(work, {}).items():
            if node in columns.rows:
                found[columns.rows[node]] = count / FULL
        return found
