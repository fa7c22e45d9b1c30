"""How many examples are tried? As many as `make test` has time for; in the soak, with fresh seeds, more. No test is in here."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

SOAKING = settings.get_current_profile_name() == "soak"


def tries(quick: int, long: int, **more: Any) -> settings:
    """`quick` in `make test`, `long` in the soak. Each is a number of examples, or of whole stories of a state machine."""
    return settings(max_examples=long if SOAKING else quick, **more)
