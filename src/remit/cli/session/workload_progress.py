"""Progress of a workload, and what limits it, computed from its replicas and decisions. No server is called here."""

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
"""Stages of a replica, each with the phases that have reached it."""

_TARGET_PHASES: Final = {
    "job": frozenset({P.RUNNING, P.READY, P.SERVING, P.FINISHED}),
    "service": frozenset({P.READY, P.SERVING}),
    "daemon": frozenset({P.READY, P.SERVING}),
}
_PLACED_PHASES: Final = frozenset({P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING, P.FINISHED})
PHASE_DETAILS: Final = {
    "reserved": "waiting until preempted replicas have stopped",
    "bound": "waiting for the agent of the node",
    "starting": "preparing the process",
    "running": "not ready yet",
    "ready": "waiting for the endpoints controller",
    "unknown": "the node does not report",
    "failed": "waiting to be retried or replaced",
}
"""Reason for a replica to be in a phase, if its status has no reason."""
_OK: Final = "ok"
_Limit = tuple[str, str, bool]
_NO_LIMIT: Final[_Limit] = ("", "", False)
ROLLED_OUT: Final = "RolledOut"


class PendingReason(NamedTuple):
    """Why a replica is pending, according to the last decision about it. `never`: it does not fit the cluster as declared."""

    reason: str
    detail: str = ""
    never: bool = False
    revision: int = 0


NO_REASONS: Final[Mapping[tuple[str, str], PendingReason]] = {}


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


def pending_reasons(decisions: Iterable[Decision]) -> dict[tuple[str, str], PendingReason]:
    """Return the reason of the latest decision that left a replica pending, by tenant and replica."""
    progress: dict[tuple[str, str], PendingReason] = {}
    for decision in decisions:
        spec, revision = decision.spec, decision.metadata.revision
        if not spec.reason:
            continue
        reason = PendingReason(spec.reason, spec.detail, spec.never, revision)
        for path, node in spec.replicas.items():
            tenant, _, name = path.partition("/")
            reasons_known = progress.get((tenant, name))
            if not node and (reasons_known is None or reasons_known.revision <= revision):
                progress[tenant, name] = reason
    return progress


def pending_reason(replica: Replica, reasons: Mapping[tuple[str, str], PendingReason]) -> PendingReason | None:
    """Return why a replica is pending. Decisions older than the replica's revision are about earlier attempts."""
    meta = replica.metadata
    progress = reasons.get((meta.tenant, meta.name))
    return progress if progress is not None and progress.revision >= meta.revision else None


def summarize_progress(
    workload: Workload, replicas: Sequence[Replica], reasons: Mapping[tuple[str, str], PendingReason] = NO_REASONS
) -> ProgressSummary:
    """Summarize a workload from all of its replicas."""
    spec = workload.spec
    counts = Counter(replica.status.phase for replica in replicas)
    done = sum(replica.status.result == _OK and replica.status.phase in (P.FINISHED, P.RELEASED) for replica in replicas)
    desired = desired_replicas(workload, replicas)
    ready = done if spec.type == "job" else sum(counts[phase] for phase in _TARGET_PHASES[spec.type])
    placed = sum(counts[phase] for phase in _PLACED_PHASES if spec.type != "job" or phase is not P.FINISHED)
    stages = {QUEUED if phase is P.PENDING else phase.value: counts[phase] for phase in Phase if _is_counted(phase, counts)}
    if spec.type == "job" and done:
        stages = {**{name: count for name, count in stages.items() if name != P.FINISHED.value}, "done": done}
    limit = _limiting_factor(workload, replicas, counts, desired, done, reasons)
    return ProgressSummary(desired, ready, placed, done, stages, *limit)


def desired_replicas(workload: Workload, replicas: Sequence[Replica]) -> int:
    if workload.metadata.deleting:
        return 0
    if workload.spec.type == "daemon":  # one for each eligible node, which only the controller knows
        return sum(replica.status.phase is not P.RELEASED for replica in replicas)
    return workload.spec.completions or workload.spec.replicas if workload.spec.type == "job" else workload.spec.replicas


def _is_counted(phase: Phase, counts: Mapping[Phase, int]) -> bool:
    return bool(counts[phase]) and phase is not P.RELEASED


def _limiting_factor(
    workload: Workload,
    replicas: Sequence[Replica],
    counts: Mapping[Phase, int],
    desired: int,
    done: int,
    reasons: Mapping[tuple[str, str], PendingReason],
) -> _Limit:
    """Return what keeps the workload from its desired state: code, detail, and whether only a change of the spec can help."""
    is_job = workload.spec.type == "job"
    if workload.metadata.deleting:
        return "deleting", "", False
    failed = condition_of(workload.status.conditions, "Failed")
    if failed is not None and failed.status == "True":
        return failed.reason or "Failed", failed.message, True
    if is_job and desired and done >= desired:
        return _NO_LIMIT
    pending = [replica for replica in replicas if replica.status.phase is P.PENDING]
    if pending:
        return _pending_limit(pending, reasons)
    return (
        _controller_limit(workload)
        or _missing_limit(workload, counts, desired, done)
        or _phase_limit(workload, replicas, counts)
    )


def _controller_limit(workload: Workload) -> _Limit | None:
    """The limit that controllers report for the current generation: refused admission, or a rollout in progress."""
    generation = workload.metadata.generation
    admitted = condition_of(workload.status.conditions, "Admitted")
    if admitted is not None and (admitted.status, admitted.observed_generation) == ("False", generation):
        return admitted.reason, admitted.message, False
    rollout = condition_of(workload.status.conditions, "Progressing")
    if rollout is None or rollout.observed_generation != generation or not rollout.message or rollout.reason == ROLLED_OUT:
        return None
    return "rollout", rollout.message, False


def _missing_limit(workload: Workload, counts: Mapping[Phase, int], desired: int, done: int) -> _Limit | None:
    is_job = workload.spec.type == "job"
    # A finished replica of a job leaves its slot free, even before a controller has released it.
    gone = (P.RELEASED, P.FINISHED) if is_job else (P.RELEASED,)
    present = sum(count for phase, count in counts.items() if phase not in gone)
    if present >= (min(desired - done, workload.spec.replicas) if is_job else desired):
        return None
    return "missing", "replicas that are not created yet", False


def _phase_limit(workload: Workload, replicas: Sequence[Replica], counts: Mapping[Phase, int]) -> _Limit:
    """The phase in which most of the unready replicas are."""
    ready = _TARGET_PHASES[workload.spec.type]
    unready = {phase: counts[phase] for phase in Phase if _is_counted(phase, counts) and phase not in ready}
    if not unready:
        return _NO_LIMIT
    phase = max(unready, key=lambda phase: unready[phase])
    reports = (replica.status.reason for replica in replicas if replica.status.phase is phase and replica.status.reason)
    return phase.value, next(reports, PHASE_DETAILS.get(phase.value, "")), False


def _pending_limit(pending: Sequence[Replica], reasons: Mapping[tuple[str, str], PendingReason]) -> _Limit:
    reasons_known = [reason for replica in pending if (reason := pending_reason(replica, reasons)) is not None]
    if not reasons_known:
        return QUEUED, "no placement attempt yet", False
    most_common = Counter(reason.reason for reason in reasons_known).most_common(1)[0][0]
    last = max((reason for reason in reasons_known if reason.reason == most_common), key=lambda reason: reason.revision)
    return last.reason, last.detail, last.never


def condition_of(conditions: Iterable[Condition], type_: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == type_), None)


def format_stages(progress: ProgressSummary) -> str:
    """Format the stages as `serving 4, queued 2`, the furthest first."""
    return ", ".join(f"{name} {count:,}" for name, count in reversed(list(progress.stages.items()))) or "none"


def funnel(replicas: Sequence[Replica], desired: int, kind: str) -> list[tuple[str, int]]:
    """Count the replicas that have reached each stage."""
    present = [replica for replica in replicas if replica.status.phase is not P.RELEASED or replica.status.result == _OK]
    stages = [(name, sum(_has_reached(replica, phases) for replica in present)) for name, phases in STAGES]
    if kind == "job":
        runs = sum(_has_reached(replica, _TARGET_PHASES["job"]) for replica in present)
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
