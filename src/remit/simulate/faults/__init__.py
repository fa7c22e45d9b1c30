"""Fault kinds and schedules. Importing this package registers every fault kind."""

from remit.simulate.faults import kinds, node_faults

__all__ = ["kinds", "node_faults"]
