"""Workload rules: initial replicas, generation equivalence, progress by stage, and what limits a workload.

Progress is counted from the phases of a workload's replicas when it is read. It is not stored, because then every transition
of a replica would need a second write. Each replica is in exactly one stage. A workload is limited by the earliest stage in
which replicas are held up; for people, `limiting_factor` adds the reason, from decisions and conditions.

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
from remit.model.records import Decision, GenerationSpec, Phase, Replica
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
    "queued": "Queued",
    "scheduled": "WaitsForRoom",
    "bound": "NotStarted",
    "starting": "Starting",
    "unknown": "NodeSilent",
    "failed": "BeingReleased",
    "leaving": "Leaving",
    "running": "NotReady",
    "ready": "NotServed",
}
"""The reason word of each stage in which a workload can be held up, in the order in which they are reported."""

_FINAL_STAGES: Final = {"job": ("running", "ready"), "service": (), "daemon": ()}
"""Stages that are sufficient for this type of workload and do not hold it up."""


class WorkloadProgress(NamedTuple):
    """`admitted` is the number of desired replicas that are not created yet; the other fields count replicas by stage."""

    admitted: int = 0
    queued: int = 0
    scheduled: int = 0
    bound: int = 0
    starting: int = 0
    running: int = 0
    ready: int = 0
    serving: int = 0
    leaving: int = 0
    unknown: int = 0
    failed: int = 0
    finished: int = 0
    released: int = 0
    limit: str = ""


def progress(type_: Literal["job", "service", "daemon"], desired: int, phases: Iterable[Phase]) -> WorkloadProgress:
    """Returns the progress of a workload with `desired` replicas in all."""
    counts = dict.fromkeys(_STAGE.values(), 0)
    created = 0
    for phase in phases:
        counts[_STAGE[phase]] += 1
        created += (
            type_ == "job" or phase is not P.RELEASED
        )  # a released replica of a job counts as created; one of a service is replaced
    counts["admitted"] = max(0, desired - created)
    limit = next((reason for stage, reason in STAGE_REASONS.items() if counts[stage] and stage not in _FINAL_STAGES[type_]), "")
    return WorkloadProgress(**counts, limit=limit)


TARGET_PHASES: Final = {
    "job": frozenset({P.RUNNING, P.READY, P.SERVING, P.FINISHED}),
    "service": frozenset({P.READY, P.SERVING}),
    "daemon": frozenset({P.READY, P.SERVING}),
}
"""By type of workload, the phases in which a replica is as far as it has to be."""

ROLLED_OUT: Final = "RolledOut"
_LIMIT_ORDER: Final = {stage: number for number, stage in enumerate((*STAGE_REASONS, "finished"))}


class PendingReason(NamedTuple):
    """Why a replica is pending, according to the last decision about it. `never`: only a change of the spec can help."""

    reason: str
    detail: str = ""
    never: bool = False
    revision: int = 0


PendingReasons = Mapping[tuple[str, str], PendingReason]
"""Reasons by tenant and replica."""


class Limit(NamedTuple):
    """What keeps a workload from its desired state. `code` is the code of a reason or a phase; empty if nothing does."""

    code: str = ""
    detail: str = ""
    never: bool = False


NO_LIMIT: Final = Limit()


def pending_reasons(decisions: Iterable[Decision]) -> dict[tuple[str, str], PendingReason]:
    """Returns the reason of the latest decision that left a replica pending, by tenant and replica."""
    reasons: dict[tuple[str, str], PendingReason] = {}
    for decision in decisions:
        spec, revision = decision.spec, decision.metadata.revision
        if not spec.reason:
            continue
        for path, node in spec.replicas.items():
            tenant, _, name = path.partition("/")
            known = reasons.get((tenant, name))
            if not node and (known is None or known.revision <= revision):
                reasons[tenant, name] = PendingReason(spec.reason, spec.detail, spec.never, revision)
    return reasons


def pending_reason(replica: Replica, reasons: PendingReasons) -> PendingReason | None:
    """Returns why a replica is pending. Decisions older than the replica's revision are about earlier attempts."""
    reason = reasons.get((replica.metadata.tenant, replica.metadata.name))
    return reason if reason is not None and reason.revision >= replica.metadata.revision else None


def desired_replicas(workload: Workload, replicas: Iterable[Replica]) -> int:
    """Returns how many replicas a reader should expect. Only the controller knows the number of eligible nodes of a daemon, so
    its existing replicas are counted.
    """
    spec = workload.spec
    if workload.metadata.deleting:
        return 0
    if spec.type == "daemon":
        return sum(replica.status.phase is not P.RELEASED for replica in replicas)
    return spec.completions or spec.replicas if spec.type == "job" else spec.replicas


def completed_replicas(replicas: Iterable[Replica]) -> int:
    """Returns how many replicas of a job have ended well."""
    return sum(replica.status.result == "ok" and replica.status.phase in (P.FINISHED, P.RELEASED) for replica in replicas)


def limiting_factor(workload: Workload, replicas: Sequence[Replica], reasons: PendingReasons) -> Limit:
    """Returns what limits a workload, given all of its replicas and the reasons of the pending ones."""
    is_job = workload.spec.type == "job"
    desired, completed = desired_replicas(workload, replicas), completed_replicas(replicas)
    if workload.metadata.deleting:
        return Limit("deleting")
    failed = condition_of(workload.status.conditions, "Failed")
    if failed is not None and failed.status == "True":
        return Limit(failed.reason or "Failed", failed.message, True)
    if is_job and desired and completed >= desired:
        return NO_LIMIT
    pending = [replica for replica in replicas if replica.status.phase is P.PENDING]
    if pending:
        return _pending_limit(pending, reasons)
    reported = _reported_limit(workload)
    if reported is not None:
        return reported
    # A finished replica of a job is not replaced, although it may not be released yet.
    existing = sum(replica.status.phase not in ((P.RELEASED, P.FINISHED) if is_job else (P.RELEASED,)) for replica in replicas)
    if existing < (min(desired - completed, workload.spec.replicas) if is_job else desired):
        return Limit("missing", "replicas that are not made yet")
    return _phase_limit(workload, replicas)


def _pending_limit(pending: Iterable[Replica], reasons: PendingReasons) -> Limit:
    """Returns the most frequent reason, as the latest decision states it."""
    known = [reason for replica in pending if (reason := pending_reason(replica, reasons)) is not None]
    if not known:
        return Limit("queued", "not tried yet")
    most_frequent = Counter(reason.reason for reason in known).most_common(1)[0][0]
    latest = max((reason for reason in known if reason.reason == most_frequent), key=lambda reason: reason.revision)
    return Limit(latest.reason, latest.detail, latest.never)


def _reported_limit(workload: Workload) -> Limit | None:
    """Returns the limit that controllers report for this generation: replicas refused, or a rollout held up."""
    generation = workload.metadata.generation
    admitted = condition_of(workload.status.conditions, "Admitted")
    if admitted is not None and (admitted.status, admitted.observed_generation) == ("False", generation):
        return Limit(admitted.reason, admitted.message)
    rollout = condition_of(workload.status.conditions, "Progressing")
    if rollout is None or rollout.observed_generation != generation or rollout.reason == ROLLED_OUT or not rollout.message:
        return None
    return Limit("rollout", rollout.message)


def _phase_limit(workload: Workload, replicas: Sequence[Replica]) -> Limit:
    """Returns the phase of the replicas that are held up in the earliest stage, in the order of `progress`."""
    target = TARGET_PHASES[workload.spec.type]
    counts = Counter(replica.status.phase for replica in replicas if replica.status.phase not in (*target, P.RELEASED))
    if not counts:
        return NO_LIMIT
    phase = min(counts, key=lambda phase: (_LIMIT_ORDER[_STAGE[phase]], -counts[phase]))
    reason = next(
        (replica.status.reason for replica in replicas if replica.status.phase is phase and replica.status.reason), ""
    )
    return Limit(phase.value, reason or ("not ready yet" if phase is P.RUNNING else ""))


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
