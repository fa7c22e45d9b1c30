"""How is a condition said? As a claim, and only where it differs from what was said last. What is true others find out."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, Literal

from remit.correction.remits import Deed
from remit.correction.wanted import condition_of
from remit.model.claims import Observe
from remit.model.fields import Condition
from remit.model.kinds import Node, Workload

MESSAGE_MAX: Final = 1_000

Truth = Literal["True", "False", "Unknown"]


def say(thing: Workload | Node, type_: str, status: Truth, reason: str, message: str, wall: str) -> list[Deed]:
    """Nothing if it stands so already."""
    meta, message = thing.metadata, message[:MESSAGE_MAX]
    known = condition_of(thing.status.conditions, type_)
    if known is not None and (known.status, known.reason, known.message, known.observed_generation) == (
        status,
        reason,
        message,
        meta.generation,
    ):
        return []
    condition = Condition(
        type=type_,
        status=status,
        reason=reason,
        message=message,
        observed_generation=meta.generation,
        last_transition=wall if known is None else later(wall, known.last_transition),
    )
    return [Deed(Observe(type(thing).__name__, meta.name, condition, meta.tenant))]


def later(wall: str, known: str) -> str:
    """Of two conditions of one generation the later stands. Whoever said the last may have had a clock that is ahead of this
    one: then a millisecond more than that.
    """
    if wall > known:
        return wall
    try:
        last = datetime.fromisoformat(known)
    except ValueError:
        return wall
    return (last + timedelta(milliseconds=1)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
