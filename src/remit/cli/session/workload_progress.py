"""Progress of a workload by stage, for tables and for waiting. What limits it is decided in law/workload_rules.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from remit.law.workload_rules import (
    ROLLED_OUT,
    TARGET_PHASES,
    PendingReasons,
    completed_replicas,
    condition_of,
    desired_replicas,
    existing_replicas,
    limit_of,
)
from remit.model.kinds import Workload
from remit.model.records import Phase, Replica

P = Phase
QUEUED: Final = "queued"


STAGES: Final = (
    ("scheduled", frozenset({P.RESERVED, P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING, P.FINISHED})),
    ("bound", frozenset({P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING, P.FINISHED})),
    ("starting", frozenset({P.STARTING, P.RUNNING, P.READY, P.SERVING, P.FINISHED})),
    ("ready", frozenset({P.READY, P.SERVING})),
    ("serving", frozenset({P.SERVING})),
)  # fmt: skip
"""How far one may have come, each with the phases that are at least so far."""

_PLACED_PHASES: Final = frozenset({P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING, P.FINISHED})
_OK: Final = "ok"
NO_REASONS: Final[PendingReasons] = {}


class ProgressSummary(NamedTuple):
    """One workload. `stages` counts its replicas by phase (pending ones are queued); `limit` is a reason's code or a phase."""

    wanted: int
    arrived: int
    placed: int
    done: int
    stages: Mapping[str, int]
    limit: str = ""
    detail: str = ""
    never: bool = False

    @property
    def settled(self) -> bool:
        return not self.limit


def summarize_progress(
    workload: Workload, replicas: Sequence[Replica], reasons: PendingReasons = NO_REASONS
) -> ProgressSummary:
    """`replicas` are all of this workload."""
    spec = workload.spec
    counts = Counter(one.status.phase for one in replicas)
    done = completed_replicas(replicas)
    wanted = desired_replicas(workload, existing_replicas(spec.type, counts))
    arrived = done if spec.type == "job" else sum(counts[phase] for phase in TARGET_PHASES[spec.type])
    placed = sum(counts[phase] for phase in _PLACED_PHASES if spec.type != "job" or phase is not P.FINISHED)
    stages = {QUEUED if phase is P.PENDING else phase.value: counts[phase] for phase in Phase if _is_shown(phase, counts)}
    if spec.type == "job" and done:
        stages = {**{name: count for name, count in stages.items() if name != P.FINISHED.value}, "done": done}
    limit = limit_of(workload, replicas, reasons)
    return ProgressSummary(wanted, arrived, placed, done, stages, *limit)


def _is_shown(phase: Phase, counts: Mapping[Phase, int]) -> bool:
    return bool(counts[phase]) and phase is not P.RELEASED


def format_stages(found: ProgressSummary) -> str:
    """`serving 4, queued 2`: those who came furthest first."""
    return ", ".join(f"{name} {count:,}" for name, count in reversed(list(found.stages.items()))) or "none"


def funnel(replicas: Sequence[Replica], wanted: int, kind: str) -> list[tuple[str, int]]:
    """How many have come at least so far: each stage counts also those that are further."""
    standing = [one for one in replicas if one.status.phase is not P.RELEASED or one.status.result == _OK]
    stages = [(name, sum(_has_reached(one, phases) for one in standing)) for name, phases in STAGES]
    if kind == "job":
        runs = sum(_has_reached(one, TARGET_PHASES["job"]) for one in standing)
        stages = [*stages[:3], ("running", runs), ("done", sum(one.status.result == _OK for one in standing))]
    return [("admitted", wanted), ("queued", len(standing)), *stages]


def format_funnel(stages: Sequence[tuple[str, int]]) -> str:
    """`queued 6 > bound 4 > serving 0`: of stages with the same count only the furthest is named."""
    kept = [one for one, after in zip(stages, [*stages[1:], ("", -1)], strict=True) if one[1] != after[1]]
    return " > ".join(f"{name} {count:,}" for name, count in kept)


def _has_reached(one: Replica, phases: frozenset[Phase]) -> bool:
    return one.status.phase in phases or (one.status.result == _OK and P.FINISHED in phases)


def is_rolled_out(workload: Workload) -> bool:
    """Do the controllers say that this very generation is out?"""
    said = condition_of(workload.status.conditions, "Progressing")
    return said is not None and said.reason == ROLLED_OUT and said.observed_generation == workload.metadata.generation
