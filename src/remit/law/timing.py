"""Timeouts derived from the heartbeat interval: suspect, unknown, lease, fence.

All timeouts for nodes are multiples of the heartbeat interval, so that a shorter interval shortens all of them in
proportion. The documented values are those of the default interval of two seconds. Which role acts on which timeout is
defined in lifecycle.py.
"""

from __future__ import annotations

from typing import Final, NamedTuple

DRIFT_MAX_PERCENT: Final = 1
"""Maximum difference in speed between the clocks of two machines."""

HEARTBEAT_MS_MIN: Final = 50
HEARTBEAT_MS_MAX: Final = 60_000


class Timing(NamedTuple):
    """`heartbeat_ms` is the interval at which an agent reports the state of its nodes."""

    heartbeat_ms: int = 2_000

    @property
    def suspect_ms(self) -> int:
        """After this time without a heartbeat a node gets no new work."""
        return 3 * self.heartbeat_ms

    @property
    def unknown_ms(self) -> int:
        """After this time without a heartbeat the node's replicas become unknown."""
        return 15 * self.heartbeat_ms // 2

    @property
    def eager_ms(self) -> int:
        """After this time without a heartbeat, replicas with `replace: eager` are replaced, even if both may run for a
        while.
        """
        return 15 * self.heartbeat_ms

    @property
    def kill_grace_ms(self) -> int:
        """How long a process may take to end after its fence before it is killed."""
        return 5 * self.heartbeat_ms // 2

    @property
    def lease_ms(self) -> int:
        """Lease duration of agents, schedulers and controllers."""
        return 12 * self.heartbeat_ms

    @property
    def call_operator_ms(self) -> int:
        """How long a mass silence is waited out before an operator is alerted."""
        return 150 * self.heartbeat_ms


def lost_after_ms(fence_ms: int, timing: Timing = Timing()) -> int:
    """Returns how long a node must be silent until its old attempts have certainly ended: (fence + kill grace), with a margin
    for clock drift.
    """
    return ((fence_ms + timing.kill_grace_ms) * (100 + DRIFT_MAX_PERCENT) + 99) // 100
