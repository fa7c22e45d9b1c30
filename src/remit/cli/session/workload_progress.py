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
"""Stages of a replica, each with the phases that have reached it."""

_PLACED_PHASES: Final = frozenset({P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING, P.FINISHED})
_OK: Final = "ok"
NO_REASONS: Final[PendingReasons] = {}


class ProgressSummary(NamedTuple):
    """Progress of one workload. `stages` counts its replicas by phase (pending ones as queued); `limit` is the code of a
    reason, or a phase.
    """

    desired: int
    ready: int
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
    """Summarize a workload from all of its replicas."""
    spec = workload.spec
    counts = Counter(replica.status.phase for replica in replicas)
    done = completed_replicas(replicas)
    desired = desired_replicas(workload, existing_replicas(spec.type, counts))
    ready = done if spec.type == "job" else sum(counts[phase] for phase in TARGET_PHASES[spec.type])
    placed = sum(counts[phase] for phase in _PLACED_PHASES if spec.type != "job" or phase is not P.FINISHED)
    stages = {QUEUED if phase is P.PENDING else phase.value: counts[phase] for phase in Phase if _is_counted(phase, counts)}
    if spec.type == "job" and done:
        stages = {**{name: count for name, count in stages.items() if name != P.FINISHED.value}, "done": done}
    return ProgressSummary(desired, ready, placed, done, stages, *limit_of(workload, replicas, reasons))


def _is_counted(phase: Phase, counts: Mapping[Phase, int]) -> bool:
    return bool(counts[phase]) and phase is not P.RELEASED


def format_stages(progress: ProgressSummary) -> str:
    """Format the stages as `serving 4, queued 2`, the furthest first."""
    return ", ".join(f"{name} {count:,}" for name, count in reversed(list(progress.stages.items()))) or "none"


def funnel(replicas: Sequence[Replica], desired: int, kind: str) -> list[tuple[str, int]]:
    """Count the replicas that have reached each stage."""
    present = [replica for replica in replicas if replica.status.phase is not P.RELEASED or replica.status.result == _OK]
    stages = [(name, sum(_has_reached(replica, phases) for replica in present)) for name, phases in STAGES]
    if kind == "job":
        runs = sum(_has_reached(replica, TARGET_PHASES["job"]) for replica in present)
        stages = [*stages[:3], ("running", runs), ("done", sum(replica.status.result == _OK for replica in present))]
    return [("admitted", desired), ("queued", len(present)), *stages]


def format_funnel(stages: Sequence[tuple[str, int]]) -> str:
    """Format a funnel as `queued 6 > bound 4 > serving 0`. Of stages with equal counts only the furthest is shown."""
    named = [one for one, after in zip(stages, [*stages[1:], ("", -1)], strict=True) if one[1] != after[1]]
    return " > ".join(f"{name} {count:,}" for name, count in named)


def _has_reached(one: Replica, phases: frozenset[Phase]) -> bool:
    return one.status.phase in phases or (one.status.result == _OK and P.FINISHED in phases)


def is_rolled_out(workload: Workload) -> bool:
    """Check whether controllers report the current generation as rolled out."""
    progressing = condition_of(workload.status.conditions, "Progressing")
    return (
        progressing is not None
        and progressing.reason == ROLLED_OUT
        and progressing.observed_generation == workload.metadata.generation
    )
