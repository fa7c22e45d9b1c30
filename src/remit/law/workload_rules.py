"""Workload rules: initial replicas, generation equivalence, progress by stage, and what limits a workload.

Progress is computed from the phases of a workload's replicas when it is read. It is not stored, because then every transition
of a replica would need a second write. Each replica is in exactly one stage. A workload is limited by the earliest stage in
which replicas are held up; for people, the reason is added from decisions and conditions. Conditions, explanations and the
progress that the API returns use the same rules.

Every change of a workload's spec creates a new generation. Most changes concern the replicas, which are then replaced.
Changes of the number of replicas, or of how the workload is managed, are equivalent for a replica: scaling a service does
not restart it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from remit.model.kinds import Disruption, Rollout, Workload, WorkloadSpec
from remit.model.metadata import Condition
from remit.model.records import DecisionSpec, GenerationSpec, Phase
from remit.model.resources import Duration

P = Phase

_STAGE: Final[dict[Phase, str]] = {
    P.PENDING: "queued",
    P.RESERVED: "scheduled",
    P.BOUND: "bound",
    P.STARTING: "starting",
    P.RUNNING: "running",
    P.READY: "ready",
    P.SERVING: "serving",
    P.DRAINING: "leaving",
    P.STOPPING: "leaving",
    P.UNKNOWN: "unknown",
    P.FAILED: "failed",
    P.FINISHED: "finished",
    P.RELEASED: "released",
}

STAGE_REASONS: Final[dict[str, str]] = {
    "admitted": "Creating",
    "retriable": "AwaitingRetry",
    "queued": "Queued",
    "scheduled": "WaitingForPreemption",
    "bound": "NotStarted",
    "starting": "Starting",
    "unknown": "NodeUnreachable",
    "failed": "Releasing",
    "leaving": "Terminating",
    "running": "NotReady",
    "ready": "NotInEndpoints",
}
"""The reason word of each stage in which a workload can be held up, in the order in which they are reported."""

_FINAL_STAGES: Final = {"job": ("running", "ready"), "service": (), "daemon": ()}
"""Stages that are sufficient for this type of workload and do not hold it up."""


def stage_reason(type_: Literal["job", "service", "daemon"], desired: int, phases: Iterable[Phase], retriable: int = 0) -> str:
    """Returns the reason word of the earliest stage in which a workload with `desired` replicas is held up, for conditions.
    `retriable` released replicas are not missing: they will be queued for another attempt.
    """
    counts = Counter(_STAGE[phase] for phase in phases)
    # A released replica of a job counts as created; one of a service is replaced.
    created = counts.total() - (0 if type_ == "job" else counts[_STAGE[P.RELEASED]])
    missing = max(0, desired - created)
    counts["retriable"] = min(missing, retriable)
    counts["admitted"] = missing - counts["retriable"]
    return next((reason for stage, reason in STAGE_REASONS.items() if counts[stage] and stage not in _FINAL_STAGES[type_]), "")


TARGET_PHASES: Final = {
    "job": frozenset({P.RUNNING, P.READY, P.SERVING, P.FINISHED}),
    "service": frozenset({P.READY, P.SERVING}),
    "daemon": frozenset({P.READY, P.SERVING}),
}
"""By type of workload, the phases in which a replica is as far as it has to be."""

_PLACED_PHASES: Final = (P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING, P.FINISHED)
QUEUED: Final = "queued"
DONE: Final = "done"

ROLLED_OUT: Final = "RolledOut"
_LIMIT_ORDER: Final = {stage: number for number, stage in enumerate((*STAGE_REASONS, "finished"))}


PHASE_DETAILS: Final = {
    "reserved": "waiting until preempted replicas have stopped",
    "bound": "waiting for the agent of the node",
    "starting": "preparing the process",
    "running": "not ready yet",
    "ready": "waiting for the endpoints controller",
    "unknown": "the node does not report",
    "failed": "waiting to be retried or replaced",
}
"""Why a replica is in a phase, if its status has no reason."""
_LIMIT_DETAILS: Final = {"missing": "replicas have not been created yet", **PHASE_DETAILS}


class PendingReason(NamedTuple):
    """Why a replica is pending, according to the last decision about it. `never`: only a change of the spec can help."""

    reason: str
    detail: str = ""
    never: bool = False
    revision: int = 0


PendingReasons = Mapping[tuple[str, str], PendingReason]
"""Reasons by tenant and replica."""


class ReplicaCounts(NamedTuple):
    """The replicas of one workload by phase, and how many of them have ended well."""

    phases: Mapping[Phase, int] = {}
    completed: int = 0


class Limit(NamedTuple):
    """The obstacle between a workload and its desired state. `code` is the code of a reason, or a phase."""

    code: str = ""
    detail: str = ""
    never: bool = False


NO_LIMIT: Final = Limit()


class WorkloadProgress(NamedTuple):
    """Progress of one workload. `stages` counts its replicas by phase; pending ones are `queued`, completed ones of a job are
    `done`, and released ones are left out.
    """

    desired: int
    ready: int
    placed: int
    done: int
    stages: Mapping[str, int]
    limit: Limit = NO_LIMIT


def workload_progress(
    workload: Workload, counts: ReplicaCounts, pending: Limit | None = None, stated: str = ""
) -> WorkloadProgress:
    """Returns the progress of a workload. The arguments are those of `limit_of`."""
    type_, phases, done = workload.spec.type, counts.phases, counts.completed
    stages = {QUEUED if phase is P.PENDING else phase.value: count for phase in P if (count := phases.get(phase, 0))}
    stages.pop(P.RELEASED.value, None)
    if type_ == "job" and done:
        stages.pop(P.FINISHED.value, None)
        stages[DONE] = done
    return WorkloadProgress(
        desired=desired_replicas(workload, existing_replicas(type_, phases)),
        ready=done if type_ == "job" else sum(phases.get(phase, 0) for phase in TARGET_PHASES[type_]),
        placed=sum(phases.get(phase, 0) for phase in _PLACED_PHASES if type_ != "job" or phase is not P.FINISHED),
        done=done,
        stages=stages,
        limit=limit_of(workload, counts, pending, stated),
    )


def pending_reasons(decisions: Iterable[tuple[int, DecisionSpec]]) -> dict[tuple[str, str], PendingReason]:
    """Returns the reason of the latest decision that left a replica pending, by tenant and replica. Decisions are given with
    their revisions.
    """
    reasons: dict[tuple[str, str], PendingReason] = {}
    for revision, spec in decisions:
        if not spec.reason:
            continue
        for path, node in spec.replicas.items():
            tenant, _, name = path.partition("/")
            known = reasons.get((tenant, name))
            if not node and (known is None or known.revision <= revision):
                reasons[tenant, name] = PendingReason(spec.reason, spec.detail, spec.never, revision)
    return reasons


def pending_reason(tenant: str, replica: str, revision: int, reasons: PendingReasons) -> PendingReason | None:
    """Returns why a replica is pending. Decisions older than the replica's revision are about earlier attempts."""
    reason = reasons.get((tenant, replica))
    return reason if reason is not None and reason.revision >= revision else None


def pending_limit(known: Sequence[PendingReason]) -> Limit:
    """Returns the most frequent of the known reasons of pending replicas, as the latest decision states it."""
    if not known:
        return Limit(QUEUED, "no placement attempt yet")
    most_frequent = Counter(reason.reason for reason in known).most_common(1)[0][0]
    latest = max((reason for reason in known if reason.reason == most_frequent), key=lambda reason: reason.revision)
    return Limit(latest.reason, latest.detail, latest.never)


def desired_replicas(workload: Workload, existing: int) -> int:
    """Returns how many replicas a reader should expect. Only the controller knows the number of eligible nodes of a daemon, so
    its existing replicas are counted.
    """
    spec = workload.spec
    if workload.metadata.deleting:
        return 0
    if spec.type == "daemon":
        return existing
    return spec.completions or spec.replicas if spec.type == "job" else spec.replicas


def existing_replicas(type_: str, counts: Mapping[Phase, int]) -> int:
    """Returns how many replicas exist. A finished replica of a job does not, although it may not be released yet."""
    gone = (P.RELEASED, P.FINISHED) if type_ == "job" else (P.RELEASED,)
    return sum(count for phase, count in counts.items() if phase not in gone)


def missing_replicas(workload: Workload, counts: Mapping[Phase, int]) -> int:
    """Returns how many replicas are not created yet; of a job with completions, how many may be created now."""
    spec, existing = workload.spec, existing_replicas(workload.spec.type, counts)
    if workload.metadata.deleting or spec.type == "daemon":
        return 0
    if spec.type != "job":
        return max(0, spec.replicas - existing)
    created = sum(counts.values())
    return 0 if _ended(workload) is not None else max(0, min(desired_replicas(workload, 0) - created, spec.replicas - existing))


def count_replicas(replicas: Iterable[tuple[Phase, str]]) -> ReplicaCounts:
    """Counts replicas, given by phase and result."""
    phases, completed = dict[Phase, int](), 0
    for (phase, result), count in Counter(replicas).items():
        phases[phase] = phases.get(phase, 0) + count
        if result == "ok" and phase in (P.FINISHED, P.RELEASED):
            completed += count
    return ReplicaCounts(phases, completed)


def limiting_factor(workload: Workload, counts: Mapping[Phase, int], pending: Limit | None) -> Limit:
    """Returns what limits a workload, given its replicas by phase and, if some are pending, why they are."""
    if workload.metadata.deleting:
        return Limit("deleting", "waiting for its replicas to stop")
    limit = _ended(workload) or pending or _reported_limit(workload)
    if limit is not None:
        return limit
    if missing_replicas(workload, counts):
        return Limit("missing")
    return phase_limit(workload.spec.type, counts)


def phase_limit(type_: Literal["job", "service", "daemon"], counts: Mapping[Phase, int]) -> Limit:
    """Returns the phase of the replicas that are held up in the earliest stage, in the order of `progress`."""
    held_up = [phase for phase, count in counts.items() if count and phase not in (*TARGET_PHASES[type_], P.RELEASED)]
    if not held_up:
        return NO_LIMIT
    phase = min(held_up, key=lambda phase: (_LIMIT_ORDER[_STAGE[phase]], -counts[phase]))
    return Limit(phase.value)


def limit_of(workload: Workload, counts: ReplicaCounts, pending: Limit | None = None, stated: str = "") -> Limit:
    """Returns what limits a workload. `pending` is the reason of its pending replicas, None if there are none; `stated` is the
    reason that a replica in the phase of `phase_limit` has in its status.
    """
    if workload.spec.type == "job" and 0 < desired_replicas(workload, 0) <= counts.completed:
        return NO_LIMIT
    limit = limiting_factor(workload, counts.phases, pending)
    if limit.detail:
        return limit
    is_phase = limit == phase_limit(workload.spec.type, counts.phases)
    return limit._replace(detail=(stated if is_phase else "") or _LIMIT_DETAILS.get(limit.code, ""))


def _ended(workload: Workload) -> Limit | None:
    """Returns how a job ended, if its controllers do nothing more for it."""
    failed = _current_condition(workload, "Failed")
    if failed is not None and failed.status == "True":
        return Limit(failed.reason or "Failed", failed.message, True)
    complete = _current_condition(workload, "Complete")
    return Limit(detail="the job is complete") if complete is not None and complete.status == "True" else None


def _reported_limit(workload: Workload) -> Limit | None:
    """Returns the limit that controllers report for this generation: replicas refused, or a rollout held up."""
    admitted, rollout = _current_condition(workload, "Admitted"), _current_condition(workload, "Progressing")
    if admitted is not None and admitted.status == "False":
        return Limit(admitted.reason, admitted.message)
    held_up = rollout is not None and rollout.reason != ROLLED_OUT and rollout.message
    return Limit("rollout", held_up) if held_up else None


def _current_condition(workload: Workload, type_: str) -> Condition | None:
    """Returns a condition if it describes the current generation."""
    condition = condition_of(workload.status.conditions, type_)
    is_current = condition is not None and condition.observed_generation == workload.metadata.generation
    return condition if is_current else None


def condition_of(conditions: Iterable[Condition], type_: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == type_), None)


_ZERO: Final = Duration(0)


def is_equivalent(old: GenerationSpec, new: GenerationSpec) -> bool:
    """Whether replicas of both generations would be the same."""
    return old.generation == new.generation or (old.labels == new.labels and _replica_spec(old.spec) == _replica_spec(new.spec))


def initial_replicas(spec: WorkloadSpec) -> int:
    """Returns how many replicas a new workload starts with. A daemon starts with none, because its nodes must be determined
    first; so does a scheduled job.
    """
    if spec.type == "daemon" or spec.schedule:
        return 0
    return min(spec.replicas, spec.completions) if spec.completions else spec.replicas


def _replica_spec(spec: WorkloadSpec) -> WorkloadSpec:
    """Returns the spec without the fields that do not concern replicas."""
    return replace(
        spec,
        replicas=0,
        completions=0,
        retries=0,
        deadline=_ZERO,
        keep=_ZERO,
        schedule="",
        disruption=Disruption(),
        rollout=Rollout(),
    )
