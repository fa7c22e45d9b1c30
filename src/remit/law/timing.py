"""Timeouts derived from the heartbeat interval: suspect, unknown, lease, fence.

Everything that waits for a node counts in beats, so that all of it is shortened in proportion.

The figures of a beat of two seconds are those that people are told. Who may act on which silence is in lifecycle.py.
"""

from __future__ import annotations

from typing import Final, NamedTuple

DRIFT_MAX_PERCENT: Final = 1
"""By how much the clocks of two machines may differ in speed."""

HEARTBEAT_MS_MIN: Final = 50
HEARTBEAT_MS_MAX: Final = 60_000


class Timing(NamedTuple):
    """`beat_ms` is how often an agent says that it is there, and all that runs there."""

    heartbeat_ms: int = 2_000

    @property
    def suspect_ms(self) -> int:
        """After so much silence a node gets no new work."""
        return 3 * self.heartbeat_ms

    @property
    def unknown_ms(self) -> int:
        """After so much nobody knows what runs there."""
        return 15 * self.heartbeat_ms // 2

    @property
    def eager_ms(self) -> int:
        """After so much what would rather run twice than not at all is replaced."""
        return 15 * self.heartbeat_ms

    @property
    def kill_grace_ms(self) -> int:
        """So long a process that is past its fence may take to end before it is made to."""
        return 5 * self.heartbeat_ms // 2

    @property
    def lease_ms(self) -> int:
        """The term of a lease: of an agent as of a scheduler."""
        return 12 * self.heartbeat_ms

    @property
    def call_operator_ms(self) -> int:
        """For so long a mass silence is held before an operator is called."""
        return 150 * self.heartbeat_ms


def lost_after_ms(fence_ms: int, tempo: Timing = Timing()) -> int:
    """How long a node must be silent before its old copy is surely gone: (fence + kill grace) with room for clock drift."""
    return ((fence_ms + tempo.kill_grace_ms) * (100 + DRIFT_MAX_PERCENT) + 99) // 100
