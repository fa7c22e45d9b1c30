"""Per-node reconciler (pure): decides from assignments, lease and keeper table which attempts to start, stop or report.

Returns actions; does no I/O and reads no clock. Three rules carry the safety argument:

- *No start on a stale assignment.* A process is started only after this agent's own `start` for the attempt is committed, while
  the lease is held, and only if no gap in the renewals since that `start` was long enough for the scope to declare the attempt
  lost. A restart within an attempt needs only that the attempt is still assigned. A workload that must never run twice needs
  certainty of that: no restart after such a gap, nor on assignments older than the lease.
- *A process without an assignment on this node is stopped*, and its record is forgotten only afterwards. A missing answer is no
  reason to stop anything else. Fencing deadlines of workloads that must never run twice are enforced by the keeper (keeper.py).
- *Each end is reported once, by the transition the lifecycle table has for it*; only that frees the capacity. The agent reports
  that nothing runs only if it would know. If another agent with its own keeper held this node before, a workload that must
  never run twice is given time to be fenced there. An attempt that was still bound after this agent acquired the lease is
  exempt: no other agent can have started it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from remit.agent.assignments import Assignment, Assignments
from remit.agent.attempts import (
    FORMER_RESULTS,
    NOT_STARTED,
    OK,
    OOM,
    SCRATCH_FULL,
    START_ABANDONED,
    TIMEOUT,
    UNHEALTHY,
    AttemptId,
    attempt_of,
    result_of,
)
from remit.agent.keeper.protocol import ProcessRecord
from remit.agent.preparation.preparer import PreparationProgress
from remit.agent.probes import ProcessHealth, restart_after_ms
from remit.agent.run_spec import NO_INPUTS, fence_ms, needs_preparation, uses_secrets_or_configs
from remit.law.timing import Timing, lost_after_ms
from remit.model.claims import Move
from remit.model.kinds import NodeHealth, WorkloadSpec
from remit.model.records import PROCESS_ENDED, GenerationSpec, Phase, Replica
from remit.world.interfaces import ExitStatus

RENEWALS_MAX: Final = 128

_TERMINAL: Final = (Phase.RELEASED, Phase.FAILED, Phase.FINISHED)


class ReportAction(NamedTuple):
    """Claim the next lifecycle transition of an attempt from the authority."""

    attempt: AttemptId
    move: Move


class StartAction(NamedTuple):
    """Have the keeper start a process. `restarts` counts the restarts within the attempt; 0 is the first start."""

    attempt: AttemptId
    replica: Replica
    generation: GenerationSpec
    restarts: int


class PrepareAction(NamedTuple):
    """Prepare the inputs of the start after `restarts` restarts; the process starts once they are ready (preparation/)."""

    attempt: AttemptId
    replica: Replica
    generation: GenerationSpec
    restarts: int


class StopAction(NamedTuple):
    """Have the keeper stop a process and its descendants. `result`, if given, is reported instead of the exit
    status.
    """

    attempt: AttemptId
    grace_ms: int
    result: str = ""


class ForgetAction(NamedTuple):
    """Forget an attempt that has ended and is no longer assigned to this node."""

    attempt: AttemptId


AgentAction = ReportAction | PrepareAction | StartAction | StopAction | ForgetAction


class AttemptProgress:
    """State of an attempt that is not in the keeper's table. In memory only: it starts empty with the agent."""

    __slots__ = ("bound_incarnation", "health", "start_blocked", "start_claimed_ms")

    def __init__(self) -> None:
        self.start_claimed_ms: int | None = None
        """When its `start` was claimed."""
        self.start_blocked = False
        """No process of the attempt runs, and the keeper has confirmed that it refuses every later start of it."""
        self.bound_incarnation = ""
        """The incarnation in which assignments newer than the node's lease showed the attempt as bound, so not started."""
        self.health: ProcessHealth | None = None


class NodeReconciler:
    """Decides for one node. `reconcile` may be called at any time and as often as needed; it returns the actions for the
    current state.
    """

    def __init__(self, node: str, timing: Timing) -> None:
        self.node, self.timing = node, timing
        self.progress: dict[AttemptId, AttemptProgress] = {}
        self.requeue_at_ms: dict[str, int] = {}
        """When the passage of time alone will require another reconcile, by key, for the keys of the last call."""
        self.preparations: dict[AttemptId, PreparationProgress] = {}
        """Preparations in progress or finished. Maintained by the agent, which performs the actions."""
        self._renewals: deque[int] = deque(maxlen=RENEWALS_MAX)
        self._takeover_ms: int | None = None
        self._lease_revision = self._assignments_revision = 0
        """The revision at which the node's lease was acquired, and the revision of the assignments of this call."""

    def on_lease_acquired(self, now_ms: int, *, continuous: bool, revision: int = 0) -> None:
        """Record that the node's lease was acquired at `revision`.

        `continuous`: no agent with another keeper held the lease since this data directory did. Attempts that were declared
        lost because the lease had no holder were declared lost before `revision`.
        """
        self._lease_revision = revision
        if not continuous:
            self._takeover_ms = now_ms
            for progress in self.progress.values():
                progress.bound_incarnation = ""

    def on_lease_renewed(self, sent_ms: int) -> None:
        """Record that a renewal of the node's lease, sent at `sent_ms`, was accepted."""
        self._renewals.append(sent_ms)

    def progress_of(self, attempt: AttemptId) -> AttemptProgress:
        return self.progress.setdefault(attempt, AttemptProgress())

    def is_assigned(self, assignments: Assignments, attempt: AttemptId) -> bool:
        assignment = assignments.get(attempt.key)
        if assignment is None or attempt_of(attempt.key, assignment.replica) != attempt:
            return False
        status = assignment.replica.status
        return status.node == self.node and status.phase not in _TERMINAL

    def should_run(self, assignments: Assignments, attempt: AttemptId) -> bool:
        """Return whether the attempt should run, or may have to run again."""
        assignment = assignments.get(attempt.key)
        leaving = assignment is not None and assignment.replica.status.phase in (Phase.DRAINING, Phase.STOPPING)
        return not leaving and self.is_assigned(assignments, attempt)

    # -- reconcile -----------------------------------------------------------------------------------------------------

    def reconcile(
        self,
        now_ms: int,
        assignments: Assignments,
        records: Mapping[AttemptId, ProcessRecord],
        *,
        holds_lease: bool,
        keys: Collection[str] | None = None,
    ) -> list[AgentAction]:
        """Return the actions for `keys` (None: all replicas of this node).

        `records` is the part of the keeper's table that belongs to this node; `holds_lease` tells whether the node's lease
        is held. No action is returned before the first assignments arrive, because a running process may have an assignment.
        """
        self._assignments_revision = assignments.revision
        self.requeue_at_ms.clear()
        if not assignments.is_loaded:
            return []
        actions: list[AgentAction] = [
            StopAction(attempt, self.timing.kill_grace_ms) if record.alive else ForgetAction(attempt)
            for attempt, record in records.items()
            if (keys is None or attempt.key in keys) and not self.is_assigned(assignments, attempt)
        ]
        for key, assignment in assignments.on_node(self.node, keys):
            attempt = attempt_of(key, assignment.replica)
            actions += self._reconcile_attempt(now_ms, assignments, attempt, assignment, records.get(attempt), holds_lease)
        if keys is None:
            for attempt in [
                attempt for attempt in self.progress if attempt not in records and not self.is_assigned(assignments, attempt)
            ]:
                del self.progress[attempt]
        return actions

    def _reconcile_attempt(
        self,
        now_ms: int,
        assignments: Assignments,
        attempt: AttemptId,
        assignment: Assignment,
        record: ProcessRecord | None,
        holds_lease: bool,
    ) -> Iterator[AgentAction]:
        replica, generation = assignment.replica, assignments.spec_of(assignment.replica)
        match replica.status.phase:
            case Phase.BOUND if holds_lease:
                progress = self.progress_of(attempt)
                progress.start_claimed_ms = now_ms
                # Assignments older than the lease may show `bound` although another holder has started the attempt since.
                if self._assignments_revision >= self._lease_revision:
                    progress.bound_incarnation = assignments.incarnation
                yield self._report(attempt, assignment, "start")
            case Phase.STARTING | Phase.RUNNING | Phase.READY | Phase.SERVING if generation is not None:
                yield from self._reconcile_active(now_ms, assignments, attempt, assignment, generation, record, holds_lease)
            case Phase.DRAINING if holds_lease:
                yield self._report(attempt, assignment, "stop")
            case Phase.STOPPING if record is not None and record.alive:
                grace_ms = self.timing.kill_grace_ms if generation is None else int(generation.spec.template.stop_grace)
                yield StopAction(attempt, grace_ms)
            case Phase.STOPPING if record is None and self._may_run_under_previous_keeper(
                now_ms, assignments, attempt, generation
            ):
                pass
            case Phase.STOPPING if holds_lease:
                exit_status = ExitStatus(code=0) if record is None or record.ended is None else record.ended
                yield self._report(attempt, assignment, "stopped", result=_result(record, exit_status))
            case Phase.UNKNOWN if holds_lease and not self._is_marked_silent(assignments):
                yield self._report(attempt, assignment, "resume")

    def _is_marked_silent(self, assignments: Assignments) -> bool:
        """Return whether this node is marked unknown or lost. A resumed replica would be marked unknown again at once, so the
        node has to become healthy first.
        """
        node_row = assignments.node(self.node)
        return node_row is not None and node_row[0].status.health in (NodeHealth.UNKNOWN, NodeHealth.LOST)

    def _may_run_under_previous_keeper(
        self, now_ms: int, assignments: Assignments, attempt: AttemptId, generation: GenerationSpec | None
    ) -> bool:
        """Return whether the keeper of a previous holder of this node may still be running this attempt.

        This node's own keeper has no record of it. An attempt that was still bound while this agent held the lease cannot
        run elsewhere: a start needs a committed `start`, and only the lease holder gets one.
        """
        fence = 0 if generation is None else fence_ms(generation)
        if self._takeover_ms is None or not fence:
            return False
        progress = self.progress.get(attempt)
        if progress is not None and progress.bound_incarnation == assignments.incarnation:
            return False
        until_ms = self._takeover_ms + lost_after_ms(fence, self.timing)
        if now_ms < until_ms:
            self._requeue_at(attempt.key, until_ms)
        return now_ms < until_ms

    # -- attempts that run or should run -------------------------------------------------------------------------------

    def _reconcile_active(
        self,
        now_ms: int,
        assignments: Assignments,
        attempt: AttemptId,
        assignment: Assignment,
        generation: GenerationSpec,
        record: ProcessRecord | None,
        holds_lease: bool,
    ) -> Iterator[AgentAction]:
        phase = assignment.replica.status.phase
        if record is None:
            may_be_lost = phase is Phase.STARTING and self._may_have_been_lost(now_ms, attempt, generation)
            if (may_be_lost or phase is not Phase.STARTING) and self._may_run_under_previous_keeper(
                now_ms, assignments, attempt, generation
            ):
                return
            if phase is not Phase.STARTING:
                # It ran, and no record of it is left: its exit status is unknown.
                yield from self._report_end(attempt, assignment, generation.spec, record, ExitStatus(), holds_lease)
            elif may_be_lost:
                if holds_lease:
                    yield self._report(attempt, assignment, "crash", result=START_ABANDONED, reason="not started in time")
            elif holds_lease:
                yield from self._prepare_and_start(attempt, assignment, generation, 0, holds_lease)
        elif record.ended is None:
            yield from self._reconcile_running(now_ms, attempt, assignment, generation.spec, record, holds_lease)
        else:
            yield from self._reconcile_exited(now_ms, attempt, assignment, generation, record, record.ended, holds_lease)

    def _prepare_and_start(
        self, attempt: AttemptId, assignment: Assignment, generation: GenerationSpec, restarts: int, holds_lease: bool
    ) -> Iterator[AgentAction]:
        """Prepare the inputs, then start. A failed preparation ends the attempt; the next one may be placed on another node."""
        preparation = self.preparations.get(attempt) if needs_preparation(generation.spec.template) else _NO_PREPARATION
        if preparation is None or (
            preparation.is_done and preparation.restarts < restarts and uses_secrets_or_configs(generation.spec.template)
        ):
            # Secrets and configs may have changed since the last start: each start gets their current content.
            yield PrepareAction(attempt, assignment.replica, generation, restarts)
        elif preparation.inputs is not None:
            yield StartAction(attempt, assignment.replica, generation, restarts)
        elif preparation.failure and holds_lease:
            yield self._report(attempt, assignment, "crash", result=NOT_STARTED, reason=preparation.failure)

    def _may_have_been_lost(self, now_ms: int, attempt: AttemptId, generation: GenerationSpec) -> bool:
        """Return whether renewals paused, since `start` was claimed, for long enough that the scope may have declared the
        attempt lost.
        """
        fence = fence_ms(generation)
        if not fence:
            return False
        claimed_ms = self.progress_of(attempt).start_claimed_ms
        return claimed_ms is None or self._had_renewal_gap(claimed_ms, now_ms, fence)

    def _had_renewal_gap(self, since_ms: int, now_ms: int, fence: int) -> bool:
        later_ms = now_ms
        for sent_ms in reversed(self._renewals):
            if later_ms <= since_ms:
                return False
            if later_ms - sent_ms >= fence:
                return True
            later_ms = sent_ms
        return False

    def _reconcile_running(
        self,
        now_ms: int,
        attempt: AttemptId,
        assignment: Assignment,
        spec: WorkloadSpec,
        record: ProcessRecord,
        holds_lease: bool,
    ) -> Iterator[AgentAction]:
        progress = self.progress_of(attempt)
        grace_ms = int(spec.template.stop_grace)
        until_ms = record.since_ms + int(spec.timeout)
        if spec.timeout and now_ms >= until_ms:
            yield StopAction(attempt, grace_ms, TIMEOUT)
            return
        if spec.timeout:
            self._requeue_at(attempt.key, until_ms)
        # Probe results of the process before a restart do not count for this one.
        health = progress.health if progress.health is not None and progress.health.restarts == record.number else None
        if health is not None and health.is_dead:
            yield StopAction(attempt, grace_ms, UNHEALTHY)
        elif holds_lease and record.pid:
            yield from self._report_health(attempt, assignment, spec, record, health)

    def _report_health(
        self,
        attempt: AttemptId,
        assignment: Assignment,
        spec: WorkloadSpec,
        record: ProcessRecord,
        health: ProcessHealth | None,
    ) -> Iterator[AgentAction]:
        """Report the transition that the probes of a running process allow, if any."""
        phase, probes = assignment.replica.status.phase, spec.template.probes
        started = not probes.start or (health is not None and health.has_started)
        ready = not probes.ready or (health is not None and health.is_ready)
        if phase is Phase.STARTING and started:
            yield self._report(attempt, assignment, "run", ports=record.ports)
        elif phase is Phase.RUNNING and spec.type != "job" and ready and started:
            yield self._report(attempt, assignment, "ready")
        elif phase in (Phase.READY, Phase.SERVING) and health is not None and health.is_unready:
            yield self._report(attempt, assignment, "unready", reason=health.failure_message)

    def _reconcile_exited(
        self,
        now_ms: int,
        attempt: AttemptId,
        assignment: Assignment,
        generation: GenerationSpec,
        record: ProcessRecord,
        exit_status: ExitStatus,
        holds_lease: bool,
    ) -> Iterator[AgentAction]:
        spec, phase = generation.spec, assignment.replica.status.phase
        policy = spec.template.restart
        when = policy.when or ("never" if spec.type == "job" else "always")
        pause_ms, fence = None, fence_ms(generation)
        may_be_lost = bool(fence) and self._had_renewal_gap(record.since_ms, now_ms, fence)
        if record.why not in (TIMEOUT, SCRATCH_FULL) and not record.fenced and not record.failed and not may_be_lost:
            pause_ms = restart_after_ms(
                when,
                failed=_result(record, exit_status) != OK, restarts=record.number, ran_ms=record.ended_ms - record.since_ms,
                backoff_ms=int(policy.backoff), backoff_max_ms=int(policy.backoff_max), limit=policy.limit,
            )  # fmt: skip
        if pause_ms is None:
            yield from self._report_end(attempt, assignment, spec, record, exit_status, holds_lease)
        elif phase in (Phase.READY, Phase.SERVING):
            if holds_lease:
                yield self._report(
                    attempt,
                    assignment,
                    "unready",
                    reason=f"{PROCESS_ENDED} ({_result(record, exit_status)}) and is restarted",
                )
        elif fence and self._assignments_revision < self._lease_revision:
            # The attempt may have been declared lost and placed elsewhere: restart only on assignments newer than the lease.
            self._requeue_at(attempt.key, now_ms + self.timing.heartbeat_ms)
        elif now_ms >= record.ended_ms + pause_ms:
            yield from self._prepare_and_start(attempt, assignment, generation, record.number + 1, holds_lease)
        else:
            self._requeue_at(attempt.key, record.ended_ms + pause_ms)

    def _report_end(
        self,
        attempt: AttemptId,
        assignment: Assignment,
        spec: WorkloadSpec,
        record: ProcessRecord | None,
        exit_status: ExitStatus,
        holds_lease: bool,
    ) -> Iterator[AgentAction]:
        """Report the end of the attempt."""
        if not holds_lease:
            return
        phase, result = assignment.replica.status.phase, _result(record, exit_status)
        if result != OK:
            yield self._report(
                attempt, assignment, "crash", result=result, reason=self._end_reason(attempt, spec, record, result)
            )
        elif phase is Phase.SERVING:
            yield self._report(attempt, assignment, "unready", reason=PROCESS_ENDED)
        else:
            yield self._report(attempt, assignment, "finish", result=OK)

    def _end_reason(self, attempt: AttemptId, spec: WorkloadSpec, record: ProcessRecord | None, result: str) -> str:
        """Return an explanation of the result for people."""
        if record is None:
            return ""
        if record.failed:
            return f"{record.failed}; {record.cure}"
        if record.fenced:
            return "stopped by fencing: the node could not renew its lease for longer than spec.fence"
        if result == OOM:
            return (
                f"out of memory: the process exceeded its memory limit ({_memory_limit(spec)}); raise template.resources.memory"
            )
        if result == SCRATCH_FULL:
            return "a scratch volume exceeded its size; write less to it, or raise its size in template.volumes"
        if result == TIMEOUT:
            return f"ran longer than its timeout of {spec.timeout}"
        health = self.progress_of(attempt).health
        return health.failure_message if result == UNHEALTHY and health is not None else ""

    def _requeue_at(self, key: str, at_ms: int) -> None:
        self.requeue_at_ms[key] = min(at_ms, self.requeue_at_ms.get(key, at_ms))

    def _report(
        self,
        attempt: AttemptId,
        assignment: Assignment,
        transition: str,
        *,
        result: str = "",
        reason: str = "",
        ports: Mapping[str, int] | None = None,
    ) -> ReportAction:
        return ReportAction(
            attempt, Move(attempt.key, assignment.revision, transition, attempt.number, result, reason[:500], dict(ports or {}))
        )


_NO_PREPARATION: Final = PreparationProgress()
_NO_PREPARATION.inputs = NO_INPUTS


def _result(record: ProcessRecord | None, exit_status: ExitStatus) -> str:
    why = "" if record is None else FORMER_RESULTS.get(record.why, record.why)
    if record is not None and record.failed:
        return why or NOT_STARTED
    return why or result_of(exit_status)


def _memory_limit(spec: WorkloadSpec) -> str:
    return str(spec.template.resources.to_manifest().get("memory", "none set"))
