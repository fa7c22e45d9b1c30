"""An active override in short form."""

from __future__ import annotations

from typing import Any

from remit.model.kinds import Override, OverrideScope, OverrideSpec, OverrideStatus
from remit.model.metadata import Deadline, Metadata
from remit.model.resources import Duration

BOOT = "boot-1"


def override(name: str, effect: Any, *, until_ms: int = 9_000, boot: str = BOOT, **more: Any) -> Override:
    by, budget = more.pop("by", 0), more.pop("budget", "")
    scope = OverrideScope(**{field: tuple(listed) for field, listed in more.items()})
    spec = OverrideSpec(effect=effect, scope=scope, ttl=Duration(4_000), reason="r", author="a", by=by, budget=budget)
    return Override(
        metadata=Metadata(name=name), spec=spec, status=OverrideStatus(deadline=Deadline(boot=boot, at_ms=until_ms))
    )
