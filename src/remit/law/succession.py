"""Which replicas does a generation begin with, and is one of an older generation as good? By what it runs, where and how.

Every change of a workload's spec makes a new generation. Most of them change what a replica is: it is replaced. Some only say
how many there are to be, or how the rest is to be treated: whoever scales a service does not restart it.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from remit.model.kinds import Disruption, Rollout, WorkloadSpec
from remit.model.records import GenerationSpec
from remit.model.resources import Duration

_NOTHING: Final = Duration(0)


def as_good(old: GenerationSpec, new: GenerationSpec) -> bool:
    """Would a replica of the new generation be any different?"""
    return old.generation == new.generation or (old.labels == new.labels and _bare(old.spec) == _bare(new.spec))


def begins_with(spec: WorkloadSpec) -> int:
    """How many replicas a workload has at once when it is new. A daemon has none, whose nodes must be looked at first, nor has
    what waits for its time.
    """
    if spec.type == "daemon" or spec.schedule:
        return 0
    return min(spec.replicas, spec.completions) if spec.completions else spec.replicas


def _bare(spec: WorkloadSpec) -> WorkloadSpec:
    """All but what the replicas themselves never see."""
    return replace(
        spec,
        replicas=0,
        completions=0,
        retries=0,
        deadline=_NOTHING,
        keep=_NOTHING,
        schedule="",
        disruption=Disruption(),
        rollout=Rollout(),
    )
