"""Uncommitted changes of one batch: rows, ledgers and counts, as plain dictionaries. Decides nothing, no I/O.

Entries hide those of the books; None means deleted. Counts are differences to the counts of the books.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from remit.law.charges import LimitUsage
from remit.law.ledgers import GrantLedger, NodeLedger
from remit.model.kinds.registry import AnyObject
from remit.model.records import PolicyRevision, Replica

GenerationKey = tuple[str, str, int]
"""Tenant, workload, generation number. All replicas of one generation have the same requirements."""

_ROWS: Final = ("replicas", "objects", "notes", "nodes", "grants", "preemptors", "renewed_ms")
_COUNTS: Final = ("population", "reserved", "active", "used")


class Changes:
    """Everything that the books absorb when the batch is committed."""

    __slots__ = (*_ROWS, *_COUNTS, "changed_workloads", "node_counts", "policy", "topology_changed")

    def __init__(self) -> None:
        self.replicas: dict[str, Replica | None] = {}
        self.objects: dict[str, AnyObject | None] = {}
        self.notes: dict[str, AnyObject | None] = {}
        self.nodes: dict[str, NodeLedger | None] = {}
        self.grants: dict[str, GrantLedger | None] = {}
        self.preemptors: dict[str, str | None] = {}
        self.renewed_ms: dict[str, int] = {}
        self.node_counts: dict[GenerationKey, dict[str, int]] = {}
        self.population: dict[GenerationKey, int] = {}
        self.reserved: dict[GenerationKey, int] = {}
        self.active: dict[tuple[str, str], int] = {}
        self.used: LimitUsage = {}
        self.policy: PolicyRevision | None = None
        self.changed_workloads: dict[tuple[str, str], None] = {}
        """Workloads, by tenant and name, that were changed, or of which a generation was."""
        self.topology_changed = False

    def copy(self) -> Changes:
        other = Changes()
        for name in (*_ROWS, *_COUNTS, "changed_workloads"):
            setattr(other, name, getattr(self, name).copy())
        other.node_counts = {generation: counts.copy() for generation, counts in self.node_counts.items()}
        other.policy, other.topology_changed = self.policy, self.topology_changed
        return other

    def replace_with(self, other: Changes) -> None:
        """Take over the contents of a copy of these changes."""
        for name in Changes.__slots__:
            setattr(self, name, getattr(other, name))

    def subtract(self, previous: Changes) -> None:
        """Keep only the changes made since this was copied from `previous`."""
        for name in _ROWS:
            own = getattr(self, name)
            for key, value in getattr(previous, name).items():
                if own[key] is value:
                    del own[key]
        for name in _COUNTS:
            add_counts(getattr(self, name), {key: -count for key, count in getattr(previous, name).items()})
        for generation, counts in previous.node_counts.items():
            add_counts(self.node_counts[generation], {node: -count for node, count in counts.items()})
            if not self.node_counts[generation]:
                del self.node_counts[generation]
        if self.policy is previous.policy:
            self.policy = None


def apply_changes(into: dict[Any, Any], changes: Mapping[Any, Any]) -> None:
    for name, value in changes.items():
        if value is None:
            into.pop(name, None)
        else:
            into[name] = value


def add_counts(into: dict[Any, int], changes: Mapping[Any, int]) -> None:
    for name, count in changes.items():
        total = into.get(name, 0) + count
        if total:
            into[name] = total
        else:
            into.pop(name, None)
