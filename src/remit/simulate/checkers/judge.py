"""Runs all checks of a run and collects violations.

There is one judge per run. The simulation reports every commit, answer and process to it. Violations are recorded and never
raised into the caller; only an error in the checker's own sums is raised, because that is a bug of this package.

At the end of the module: the checks that run at events other than commits, and the properties that are not checked yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from remit.simulate.checkers import (
    capacity_checks,
    client_checks,
    disruption_checks,
    quota_checks,
    scheduler_checks,
    transition_checks,
)
from remit.simulate.checkers.client_checks import ObserverPositions, behind_since_ms
from remit.simulate.checkers.liveness_checks import LIVENESS_CHECKS, Bounds, Core, Liveness, WaitingItem
from remit.simulate.checkers.process_checks import ProcessRecords, RunningProcess
from remit.simulate.checkers.progress_checks import SchedulingAttempts, decisions
from remit.simulate.checkers.quota_checks import CrossScopeGrants
from remit.simulate.checkers.rare_events import RareEvents
from remit.simulate.checkers.reference.history import CommitStep, History
from remit.simulate.checkers.reference.past_states import CommitTimes
from remit.simulate.checkers.reference.rows import owner_of, phase_of
from remit.simulate.checkers.registry import CHECKS, UNDECIDED, Findings, Violation

__all__ = ["Bounds", "Core", "Judge", "CommitTimes", "Violation"]

RECOUNT_EVERY: Final = 200
"""Commits of a scope between two comparisons of the incremental sums with sums from scratch."""

VIOLATIONS_MAX: Final = 100
COMMIT_CHECKS: Final = (quota_checks, transition_checks, capacity_checks, scheduler_checks, disruption_checks)
"""Modules whose checks run after every commit. Importing them registers the checks."""


class Judge:
    """Receives the events of a run. `on_violation` is called at the first violation and may stop the run."""

    def __init__(self, now_ms: Callable[[], int], bounds: Bounds = Bounds()) -> None:
        self.now_ms = now_ms
        self.violations: list[Violation] = []
        self.undecided: list[str] = []
        self.on_violation: Callable[[Violation], None] | None = None
        self.histories: dict[str, History] = {}
        self.edges_seen: dict[tuple[str | None, str | None, str], int] = {}
        self.codes_seen: dict[str, int] = {}
        self.reasons_seen: dict[str, int] = {}
        """How often schedulers recorded each reason for pending work."""
        self.accepted_operations: dict[str, int] = {}
        """Accepted operations by name, such as `bind` and `move start`."""
        self.cross_scope = CrossScopeGrants(self.histories)
        self.observers = ObserverPositions()
        self.rare_events = RareEvents()
        self.processes = ProcessRecords(self.histories, now_ms, self.rare_events)
        self.liveness = Liveness(self.histories, self.processes, now_ms, bounds)

    def history(self, scope: str) -> History:
        history = self.histories.get(scope)
        if history is None:
            history = self.histories[scope] = History(scope, self.liveness.bounds.heartbeat_ms / 2_000)
        return history

    @property
    def waived(self) -> dict[str, int]:
        return self.processes.waived

    @property
    def lost(self) -> dict[str, list[str]]:
        """Acknowledged operations that a restore has lost, by scope."""
        return {scope: history.lost for scope, history in self.histories.items() if history.lost}

    # -- commits -----------------------------------------------------------------------------------------------------

    def on_commit(
        self, scope: str, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str], revision: int, times: CommitTimes
    ) -> CommitStep:
        """Apply one commit of a scope's store and run the commit checks."""
        history = self.history(scope)
        step = history.apply(puts, deletes, revision, times, self.now_ms())
        self._count(step)
        self.rare_events.on_commit(step)
        self.cross_scope.on_commit(history, step.changed)
        for name, (property_, check) in CHECKS.items():
            for key, reason in check(step):
                self._report(name, property_, scope, key, reason)
        if step.moves or step.accepted or step.after_restore:
            self._report_all(
                "held_grants_are_debited_by_issuer", "S4", scope, self.cross_scope.held_grants_are_debited_by_issuer(step)
            )
            self._report_all(
                "tenant_usage_stays_within_quota", "S4", scope, self.cross_scope.tenant_usage_stays_within_quota(step)
            )
        if step.moves:
            self._report_all("ended_attempts_have_no_process", "S8", scope, self.processes.ended_attempts_have_no_process(step))
            self.processes.on_commit(step)
        self.liveness.on_commit(step, self.now_ms())
        if history.commits % RECOUNT_EVERY == 0:
            self._recount(history)
        return step

    def _count(self, step: CommitStep) -> None:
        for entry in step.entries:
            code = entry.code or "accepted"
            self.codes_seen[code] = self.codes_seen.get(code, 0) + 1
            if entry.operation == "abandon":
                step.history.abandons[entry.id] = entry.subject
        for _, spec in decisions(step):
            if reason := spec.get("reason"):
                self.reasons_seen[reason] = self.reasons_seen.get(reason, 0) + 1
        roles: dict[str, str] = {}
        for entry in step.accepted:
            self.accepted_operations[entry.operation] = self.accepted_operations.get(entry.operation, 0) + 1
            roles[entry.subject] = entry.role
        for key, old, new in step.moves:
            old_phase, new_phase = phase_of(old), phase_of(new)
            if old_phase != new_phase:
                workload, owner = (old or new)["spec"]["workload"], owner_of(old or new)
                role = roles.get(key) or roles.get(workload) or (roles.get(owner) if old_phase is None else None) or "scheduler"
                edge = old_phase, new_phase, "authority" if step.after_restore else role
                self.edges_seen[edge] = self.edges_seen.get(edge, 0) + 1

    def _recount(self, history: History) -> None:
        if not self.violations:  # rows that violate a property may not add up
            history.sums.compare(history.rows)

    def on_restore(self, scope: str, rows: Sequence[tuple[str, bytes, int]], revision: int) -> None:
        """Replace a scope's state by a backup; `rows` include the new head."""
        history = self.history(scope)
        history.restore(rows, revision, self.now_ms())
        waiting = [key for key, replica in history.kind("replica").items() if phase_of(replica) == "pending"]
        self.liveness.attempts.setdefault(scope, SchedulingAttempts()).restore(waiting, self.now_ms())
        self.cross_scope.on_commit(history, {key: (None, content) for key, (_, content) in history.rows.items()})

    # -- clients and observers ---------------------------------------------------------------------------------------

    def on_submit(self, scope: str, operation: str) -> None:
        """Record that a client sent an operation for the first time."""
        self.liveness.on_submit(scope, operation)

    def on_answer(
        self,
        scope: str,
        operation: str,
        code: str,
        number: int,
        revision: int,
        digest: str = "",
        payload: bytes = b"",
        seen: int | None = None,
    ) -> None:
        """Check a verdict that a client received; an empty code means accepted. `payload` is what the client submitted,
        `digest` its hash, and `seen` the revision the client decided on, if known.
        """
        history = self.history(scope)
        answer = operation, code, number, revision
        self._report_all(
            "acknowledged_operations_are_in_history",
            "S2",
            scope,
            client_checks.acknowledged_operations_are_in_history(history, *answer),
        )
        self._report_all("one_answer_per_operation", "S2", scope, client_checks.one_answer_per_operation(history, *answer))
        self._report_all(
            "operation_id_has_one_payload",
            "S2",
            scope,
            client_checks.operation_id_has_one_payload(history, operation, code, digest),
        )
        self._report_all(
            "seen_revisions_are_recorded",
            "S22",
            scope,
            client_checks.seen_revisions_are_recorded(history, operation, code, seen),
        )
        findings = client_checks.cited_evidence_was_true(history, operation, code, number, payload)
        self._report_all("cited_evidence_was_true", "S16", scope, findings)
        self._check_latency(scope, operation)

    def on_scheduler_claim(self, scope: str, lease: str, seen: int, payload: bytes) -> None:
        """Check a claim by the holder of a scheduler's lease against the revision it was decided on, with any verdict."""
        findings = scheduler_checks.claims_fit_seen_state(self.history(scope), lease, seen, payload)
        self._report_all("claims_fit_seen_state", "S26", scope, findings)

    def on_abandoned(self, scope: str, operation: str) -> None:
        """Record that a client stopped waiting for an answer. Only the history shows whether the operation was applied."""
        self._check_latency(scope, operation)

    def _check_latency(self, scope: str, operation: str) -> None:
        for waiting in self.liveness.on_settled(scope, operation):
            self._report_overdue("calls_are_answered", "L14", waiting)

    def on_lease_renewed(self, scope: str, lease: str, epoch: int, sent_ms: int) -> None:
        """Record that a holder's renewal succeeded; the holder had sent it at `sent_ms`, in virtual time."""
        self.history(scope).renew(lease, epoch, sent_ms)
        self.processes.on_renewal(scope, lease, sent_ms)

    def on_observed(self, observer: str, scope: str, incarnation: str, revision: int) -> None:
        """Record that an observer saw a scope at a revision. The observer's name survives its restarts."""
        findings = self.observers.observed_revisions_never_go_back(self.history(scope), observer, incarnation, revision)
        self._report_all("observed_revisions_never_go_back", "S10", scope, findings)

    def on_view(
        self,
        observer: str,
        scope: str,
        revision: int,
        rows: Mapping[str, int],
        kinds: tuple[str, ...] = (),
        wrong: Sequence[str] = (),
        nodes: frozenset[str] | None = None,
    ) -> None:
        """Check an observer's copy of a scope at the end of the run: its revision, and the revision of each key of the `kinds`
        that it stores, or of all kinds. `wrong` lists the sums that the observer itself found wrong. With `nodes`, it stores
        only replicas on these nodes. Revisions of a new incarnation are higher than all earlier ones, so an observer that
        has not seen it is behind.
        """
        history, core, late_ms = self.history(scope), self.liveness.core, None
        if core is not None and revision < history.revision:
            bounds = self.liveness.bounds
            late_ms = self.now_ms() - max(core.since_ms, behind_since_ms(history, revision)) - bounds.view_ms * bounds.pace
        copy = (observer, revision, rows)
        findings = self.observers.views_match_store(history, *copy, late_ms=late_ms, kinds=kinds, nodes=nodes)
        self._report_all("views_match_store", "S23", scope, findings)
        self._report_all("views_match_store", "S23", scope, ((observer, reason) for reason in wrong))

    # -- processes ---------------------------------------------------------------------------------------------------

    def on_process_started(
        self, node: str, scope: str, replica: str, uid: str, attempt: int, pid: int, *, unrecorded: bool = False
    ) -> None:
        """Record that a node's runner started a process; `replica` is the row's key, with or without its kind. `unrecorded`
        means that the machine's disk could not record the start.
        """
        key = replica if replica.startswith("replica/") else f"replica/{replica}"
        process = RunningProcess(scope, (key, uid, attempt), node, pid, self.now_ms())
        self.processes.on_start(process)
        if unrecorded:
            self.processes.unrecorded.add((node, pid))
        self._report_all("processes_have_committed_start", "S14", scope, self.processes.processes_have_committed_start(process))
        self._report_all("fenced_replica_has_one_process", "S8", scope, self.processes.fenced_replica_has_one_process(process))

    def on_stop_requested(self, node: str, pid: int, requester: str) -> None:
        """Record that a component of the machine asked the process to stop; it is killed if it does not."""
        process = self.processes.on_stop_request(node, pid, requester)
        if process is not None:
            findings = self.processes.assigned_processes_are_not_stopped(process, requester)
            self._report_all("assigned_processes_are_not_stopped", "S20", process.scope, findings)

    def on_process_ended(self, node: str, pid: int) -> None:
        self.processes.on_end(node, pid)

    # -- liveness ----------------------------------------------------------------------------------------------------

    def heal(self, core: Core) -> None:
        """Faults have ended except outside this core: from here on work must make progress."""
        self.liveness.heal(core)

    def tick(self) -> None:
        """Run the liveness checks; called about every second of virtual time after `heal`."""
        for check, property_, waiting in self.liveness.tick():
            self._report_overdue(check, property_, waiting)

    def _report_overdue(self, check: str, property_: str, waiting: WaitingItem) -> None:
        self._report_all(check, property_, waiting.scope, iter([(waiting.key, waiting.reason)]))

    # -- the end -----------------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Run the checks that need the complete run, and compare every sum once more with one from scratch."""
        for scope in self.histories:
            self._report_all("run_intervals_are_disjoint", "S8", scope, self.processes.run_intervals_are_disjoint(scope))
        for check, property_, waiting in self.liveness.conclude():
            self._report_overdue(check, property_, waiting)
        for waiting in self.liveness.open_calls():
            self._report_overdue("calls_are_answered", "L14", waiting)
        if self.liveness.core is None:
            self._record_undecided("liveness: the run ended before its faults did")
        for reason in self.liveness.undecided:
            self._record_undecided(reason)
        for history in self.histories.values():
            self._recount(history)

    def story(self, scope: str, key: str) -> str:
        """Return the history of one object as text for people."""
        lines = [f"history of {key} in {scope}:", *self.history(scope).describe(key)]
        lines += self.processes.describe(scope, key)
        return "\n".join(lines)

    def _report_all(self, check: str, property_: str, scope: str, findings: Findings) -> None:
        for key, reason in findings:
            self._report(check, property_, scope, key, reason)

    def _report(self, check: str, property_: str, scope: str, key: str, reason: str) -> None:
        if reason.startswith(UNDECIDED):
            self._record_undecided(f"{check} ({property_}) in {scope}: {reason.removeprefix(UNDECIDED).strip()}")
        elif len(self.violations) < VIOLATIONS_MAX:
            violation = Violation(check, property_, scope, key, reason, self.now_ms())
            self.violations.append(violation)
            if self.on_violation is not None and len(self.violations) == 1:
                self.on_violation(violation)

    def _record_undecided(self, reason: str) -> None:
        if reason not in self.undecided:
            self.undecided.append(reason)


EVENT_CHECKS: Final[dict[str, str]] = {
    "acknowledged_operations_are_in_history": "S2",
    "one_answer_per_operation": "S2",
    "operation_id_has_one_payload": "S2",
    "held_grants_are_debited_by_issuer": "S4",
    "tenant_usage_stays_within_quota": "S4",
    "fenced_replica_has_one_process": "S8",
    "ended_attempts_have_no_process": "S8",
    "run_intervals_are_disjoint": "S8",
    "observed_revisions_never_go_back": "S10",
    "processes_have_committed_start": "S14",
    "cited_evidence_was_true": "S16",
    "assigned_processes_are_not_stopped": "S20",
    "seen_revisions_are_recorded": "S22",
    "views_match_store": "S23",
    "claims_fit_seen_state": "S26",
    "scheduling_latency_is_bounded": "L1",
    "writes_cease": "L10",
    "refused_requests_back_off": "L10",
    "calls_are_answered": "L14",
}
"""Checks that run neither at commits nor at ticks: on answers, processes and views, and at the end of a run."""

UNCHECKED_PROPERTIES: Final[dict[str, str]] = {
    "S11": "schedules, which Remit does not have yet",
    "S19": "two versions of the format side by side",
    "S21": "the API server, which the simulator does not run",
    "L9": "schedules, which Remit does not have yet",
    "L11": "the API server, which the simulator does not run",
    "L12": "the API server, which the simulator does not run",
}
"""Properties that the simulator does not check, and what each check would need."""


def checks_by_property() -> dict[str, list[str]]:
    """Return the names of the checks of each property, in order."""
    names: dict[str, list[str]] = {}
    named = [(check.property, name) for name, check in CHECKS.items()]
    named += [(property_, name) for name, (property_, _) in LIVENESS_CHECKS.items()]
    for property_, name in sorted([*named, *((property_, name) for name, property_ in EVENT_CHECKS.items())]):
        names.setdefault(property_, []).append(name)
    return names
