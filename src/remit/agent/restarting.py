"""When is a process that has ended started again within its attempt? Arithmetic over how often and how long it ran."""

from __future__ import annotations

from typing import Final, Literal

STEADY_MS: Final = 60_000
"""What ran for so long had come up well: its pause begins anew."""

_DOUBLINGS_MAX: Final = 30


def restart_after_ms(
    when: Literal["always", "failure", "never"],
    *,
    failed: bool,
    restarts: int,
    ran_ms: int,
    backoff_ms: int,
    backoff_max_ms: int,
    limit: int,
) -> int | None:
    """How long to wait, from its end on; None: it is not started again. `restarts`: how often it was, within this attempt."""
    if when == "never" or (when == "failure" and not failed):
        return None
    if limit and restarts >= limit:
        return None
    if ran_ms >= STEADY_MS:
        return backoff_ms
    return min(max(backoff_ms, backoff_max_ms), backoff_ms << min(restarts, _DOUBLINGS_MAX))
