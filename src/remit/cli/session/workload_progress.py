"""Progress of a workload and what limits it.

Counted from its replicas as they were told; no server is asked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from remit.model.kinds import Workload
from remit.model.metadata import Condition
from remit.model.records import Decision, Phase, Replica

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

_TARGET_PHASES: Final = {
    "job": frozenset({P.RUNNING, P.READY, P.SERVING, P.FINISHED}),
    "service": frozenset({P.READY, P.SERVING}),
    "daemon": frozenset({P.READY, P.SERVING}),
}
_PLACED_PHASES: Final = frozenset({P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING, P.FINISHED})
_OK: Final = "ok"
ROLLED_OUT: Final = "RolledOut"


class PendingReason(NamedTuple):
    """Why a replica waits, as the last decision about it says."""

    reason: str
    detail: str = ""
    never: bool = False
    revision: int = 0


NO_REASONS: Final[Mapping[tuple[str, str], PendingReason]] = {}


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


def pending_reasons(decisions: Iterable[Decision]) -> dict[tuple[str, str], PendingReason]:
    """By tenant and replica: the latest decision that left it waiting."""
    found: dict[tuple[str, str], PendingReason] = {}
    for decision in decisions:
        spec, revision = decision.spec, decision.metadata.revision
        if not spec.reason:
            continue
        why = PendingReason(spec.reason, spec.detail, spec.never, revision)
        for path, node in spec.replicas.items():
            tenant, _, name = path.partition("/")
            known = found.get((tenant, name))
            if not node and (known is None or known.revision <= revision):
                found[tenant, name] = why
    return found


def pending_reason(replica: Replica, reasons: Mapping[tuple[str, str], PendingReason]) -> PendingReason | None:
    """Why this one waits. A decision from before it came to wait was about another of its name, or another attempt."""
    meta = replica.metadata
    found = reasons.get((meta.tenant, meta.name))
    return found if found is not None and found.revision >= meta.revision else None


def summarize_progress(
    workload: Workload, replicas: Sequence[Replica], reasons: Mapping[tuple[str, str], PendingReason] = NO_REASONS
) -> ProgressSummary:
    """`replicas` are all of this workload."""
    spec = workload.spec
    counts = Counter(replica.status.phase for replica in replicas)
    done = sum(replica.status.result == _OK and replica.status.phase in (P.FINISHED, P.RELEASED) for replica in replicas)
    wanted = desired_replicas(workload, replicas)
    arrived = done if spec.type == "job" else sum(counts[phase] for phase in _TARGET_PHASES[spec.type])
    placed = sum(counts[phase] for phase in _PLACED_PHASES if spec.type != "job" or phase is not P.FINISHED)
    stages = {QUEUED if phase is P.PENDING else phase.value: counts[phase] for phase in Phase if _is_shown(phase, counts)}
    if spec.type == "job" and done:
        stages = {**{name: count for name, count in stages.items() if name != P.FINISHED.value}, "done": done}
    limit = _limiting_factor(workload, replicas, counts, wanted, done, reasons)
    return ProgressSummary(wanted, arrived, placed, done, stages, *limit)


def desired_replicas(workload: Workload, replicas: Sequence[Replica]) -> int:
    if workload.metadata.deleting:
        return 0
    if workload.spec.type == "daemon":  # as many as there are nodes for it; who makes them knows
        return sum(replica.status.phase is not P.RELEASED for replica in replicas)
    return workload.spec.completions or workload.spec.replicas if workload.spec.type == "job" else workload.spec.replicas


def _is_shown(phase: Phase, counts: Mapping[Phase, int]) -> bool:
    return bool(counts[phase]) and phase is not P.RELEASED


def _limiting_factor(
    workload: Workload,
    replicas: Sequence[Replica],
    counts: Mapping[Phase, int],
    wanted: int,
    done: int,
    reasons: Mapping[tuple[str, str], PendingReason],
) -> tuple[str, str, bool]:
    """What keeps it from being whole: a word, its detail, and whether that can never end as things are declared."""
    if workload.metadata.deleting:
        return "deleting", "", False
    failed = condition_of(workload.status.conditions, "Failed")
    if failed is not None and failed.status == "True":
        return failed.reason or "Failed", failed.message, True
    if workload.spec.type == "job" and wanted and done >= wanted:
        return "", "", False
    waiting = [replica for replica in replicas if replica.status.phase is P.PENDING]
    if waiting:
        return _pending_limit(waiting, reasons)
    admitted = condition_of(workload.status.conditions, "Admitted")
    if admitted is not None and (admitted.status, admitted.observed_generation) == ("False", workload.metadata.generation):
        return admitted.reason, admitted.message, False
    rolls = condition_of(workload.status.conditions, "Progressing")
    current = rolls is not None and rolls.observed_generation == workload.metadata.generation
    if rolls is not None and current and rolls.message and rolls.reason != ROLLED_OUT:
        return "rollout", rolls.message, False
    job = workload.spec.type == "job"  # of which what has ended takes nobody's place, although nobody has settled it yet
    standing = sum(count for phase, count in counts.items() if phase is not P.RELEASED and not (job and phase is P.FINISHED))
    at_once = min(wanted - done, workload.spec.replicas) if job else wanted
    if standing < at_once:
        return "missing", "replicas that are not made yet", False
    arrived = _TARGET_PHASES[workload.spec.type]
    under_way = {phase: counts[phase] for phase in Phase if _is_shown(phase, counts) and phase not in arrived}
    if not under_way:
        return "", "", False
    most = max(under_way, key=lambda phase: under_way[phase])
    said = next((replica.status.reason for replica in replicas if replica.status.phase is most and replica.status.reason), "")
    return most.value, said or ("not ready yet" if most is P.RUNNING else ""), False


def _pending_limit(waiting: Sequence[Replica], reasons: Mapping[tuple[str, str], PendingReason]) -> tuple[str, str, bool]:
    known = [why for replica in waiting if (why := pending_reason(replica, reasons)) is not None]
    if not known:
        return QUEUED, "not tried yet", False
    most = Counter(why.reason for why in known).most_common(1)[0][0]
    last = max((why for why in known if why.reason == most), key=lambda why: why.revision)
    return last.reason, last.detail, last.never


def condition_of(conditions: Iterable[Condition], type_: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == type_), None)


def format_stages(found: ProgressSummary) -> str:
    """`serving 4, queued 2`: those who came furthest first."""
    return ", ".join(f"{name} {count:,}" for name, count in reversed(list(found.stages.items()))) or "none"


def funnel(replicas: Sequence[Replica], wanted: int, kind: str) -> list[tuple[str, int]]:
    """How many have come at least so far: each stage counts also those that are further."""
    standing = [replica for replica in replicas if replica.status.phase is not P.RELEASED or replica.status.result == _OK]
    stages = [(name, sum(_has_reached(replica, phases) for replica in standing)) for name, phases in STAGES]
    if kind == "job":
        runs = sum(_has_reached(replica, _TARGET_PHASES["job"]) for replica in standing)
        stages = [*stages[:3], ("running", runs), ("done", sum(replica.status.result == _OK for replica in standing))]
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
