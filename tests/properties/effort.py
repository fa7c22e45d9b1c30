"""Number of examples of property tests: as many as `make test` has time for, more with fresh seeds in the soak."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

SOAKING = settings.get_current_profile_name() == "soak"


def tries(quick: int, long: int, **more: Any) -> settings:
    """`quick` in `make test`, `long` in the soak: the number of examples, or of runs of a state machine."""
    return settings(max_examples=long if SOAKING else quick, **more)
