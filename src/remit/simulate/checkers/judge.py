"""Runs all checks of a run and collects violations.

One judge a run: it is told what happened, and writes down what was broken.

Nothing that it finds is raised into whoever tells it; only its own miscounting is, since that would be a bug of these pages.

Names alone; what is not judged yet has its reason here.
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
from remit.simulate.checkers.client_checks import Observers, behind_since_ms
from remit.simulate.checkers.liveness_checks import LOOKS, Bounds, Core, Liveness, Waiting
from remit.simulate.checkers.process_checks import Process, Runs
from remit.simulate.checkers.progress_checks import Tries, decisions
from remit.simulate.checkers.quota_checks import Letters
from remit.simulate.checkers.rare_events import Sights
from remit.simulate.checkers.reference.history import History, Step
from remit.simulate.checkers.reference.past_states import Stand
from remit.simulate.checkers.reference.rows import owner_of, phase_of
from remit.simulate.checkers.registry import PROMISES, UNDECIDED, Found, Violation

__all__ = ["Bounds", "Core", "Judge", "Stand", "Violation"]

RECOUNT_EVERY: Final = 200
"""Commits of a scope between two countings from scratch."""

VIOLATIONS_MAX: Final = 100
COMMIT_CHECKS: Final = (quota_checks, transition_checks, capacity_checks, scheduler_checks, disruption_checks)
"""Modules whose checks run after every commit. Importing them registers the checks."""


class Judge:
    """`on_violation` is called at the first one, and may stop the run."""

    def __init__(self, now_ms: Callable[[], int], bounds: Bounds = Bounds()) -> None:
        self.now_ms = now_ms
        self.violations: list[Violation] = []
        self.unknown: list[str] = []
        self.on_violation: Callable[[Violation], None] | None = None
        self.histories: dict[str, History] = {}
        self.edges_seen: dict[tuple[str | None, str | None, str], int] = {}
        self.codes_seen: dict[str, int] = {}
        self.reasons_seen: dict[str, int] = {}
        """Why schedulers said that something waits."""
        self.marks: dict[str, int] = {}
        """Accepted deeds by name, such as `bind` and `move start`."""
        self.letters = Letters(self.histories)
        self.observers = Observers()
        self.sights = Sights()
        self.runs = Runs(self.histories, now_ms, self.sights)
        self.liveness = Liveness(self.histories, self.runs, now_ms, bounds)

    def history(self, scope: str) -> History:
        found = self.histories.get(scope)
        if found is None:
            found = self.histories[scope] = History(scope, self.liveness.bounds.beat_ms / 2_000)
        return found

    @property
    def waived(self) -> dict[str, int]:
        return self.runs.waived

    @property
    def lost(self) -> dict[str, list[str]]:
        """By scope: what was acknowledged, and a restore has lost."""
        return {scope: history.lost for scope, history in self.histories.items() if history.lost}

    # -- commits -----------------------------------------------------------------------------------------------------

    def applied(
        self, scope: str, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str], revision: int, stand: Stand
    ) -> Step:
        """A scope's store applied one commit."""
        history = self.history(scope)
        step = history.apply(puts, deletes, revision, stand, self.now_ms())
        self._count(step)
        self.sights.absorb(step)
        self.letters.absorb(history, step.changed)
        for name, (property_, check) in PROMISES.items():
            for key, why in check(step):
                self._tell(name, property_, scope, key, why)
        if step.moves or step.accepted or step.doubting:
            self._note("grants_are_in_one_hand", "S4", scope, self.letters.grants_are_in_one_hand(step))
            self._note(
                "tenants_use_no_more_than_their_quota", "S4", scope, self.letters.tenants_use_no_more_than_their_quota(step)
            )
        if step.moves:
            self._note("ended_work_runs_no_more", "S8", scope, self.runs.ended_work_runs_no_more(step))
            self.runs.absorb(step)
        self.liveness.absorb(step, self.now_ms())
        if history.commits % RECOUNT_EVERY == 0:
            self._recount(history)
        return step

    def _count(self, step: Step) -> None:
        for entry in step.entries:
            code = entry.code or "accepted"
            self.codes_seen[code] = self.codes_seen.get(code, 0) + 1
            if entry.did == "abandon":
                step.history.abandons[entry.id] = entry.subject
        for _, spec in decisions(step):
            if reason := spec.get("reason"):
                self.reasons_seen[reason] = self.reasons_seen.get(reason, 0) + 1
        roles: dict[str, str] = {}
        for entry in step.accepted:
            self.marks[entry.did] = self.marks.get(entry.did, 0) + 1
            roles[entry.subject] = entry.role
        for key, old, new in step.moves:
            was, now = phase_of(old), phase_of(new)
            if was != now:
                workload, owner = (old or new)["spec"]["workload"], owner_of(old or new)
                role = roles.get(key) or roles.get(workload) or (roles.get(owner) if was is None else None) or "scheduler"
                edge = was, now, "authority" if step.doubting else role
                self.edges_seen[edge] = self.edges_seen.get(edge, 0) + 1

    def _recount(self, history: History) -> None:
        if not self.violations:  # rows that break promises may not even add up
            history.sums.compare(history.rows)

    def restored(self, scope: str, rows: Sequence[tuple[str, bytes, int]], revision: int) -> None:
        """A scope's store was replaced by a backup; `rows` include the reborn head."""
        history = self.history(scope)
        history.restore(rows, revision, self.now_ms())
        waiting = [key for key, replica in history.kind("replica").items() if phase_of(replica) == "pending"]
        self.liveness.tries.setdefault(scope, Tries()).restore(waiting, self.now_ms())
        self.letters.absorb(history, {key: (None, content) for key, (_, content) in history.rows.items()})

    # -- clients and observers ---------------------------------------------------------------------------------------

    def asked(self, scope: str, operation: str) -> None:
        """A client sent it, for the first time."""
        self.liveness.asked(scope, operation)

    def answered(
        self,
        scope: str,
        operation: str,
        code: str,
        number: int,
        revision: int,
        taken: str = "",
        payload: bytes = b"",
        seen: int | None = None,
    ) -> None:
        """A client heard a verdict; an empty code means accepted. `payload` is what it had asked, `taken` the digest of that,
        and `seen` the revision that it had decided on, if known.
        """
        history = self.history(scope)
        said = operation, code, number, revision
        self._note("acknowledged_is_in_history", "S2", scope, client_checks.acknowledged_is_in_history(history, *said))
        self._note("one_answer_per_operation", "S2", scope, client_checks.one_answer_per_operation(history, *said))
        self._note(
            "an_id_stands_for_one_payload",
            "S2",
            scope,
            client_checks.an_id_stands_for_one_payload(history, operation, code, taken),
        )
        self._note(
            "what_was_seen_is_on_record", "S22", scope, client_checks.what_was_seen_is_on_record(history, operation, code, seen)
        )
        found = client_checks.cited_evidence_was_true(history, operation, code, number, payload)
        self._note("cited_evidence_was_true", "S16", scope, found)
        self._late(scope, operation)

    def claimed(self, scope: str, lease: str, seen: int, payload: bytes) -> None:
        """The holder of a scheduler's lease asked this, on what it had seen at a revision; whatever came of it."""
        found = scheduler_checks.claims_fit_what_was_seen(self.history(scope), lease, seen, payload)
        self._note("claims_fit_what_was_seen", "S26", scope, found)

    def gave_up(self, scope: str, operation: str) -> None:
        """The client ended without an answer: whether it happened is for the history to tell."""
        self._late(scope, operation)

    def _late(self, scope: str, operation: str) -> None:
        for waiting in self.liveness.settled(scope, operation):
            self._waited("calls_are_answered", "L14", waiting)

    def renewed(self, scope: str, lease: str, epoch: int, sent_ms: int) -> None:
        """A holder heard that its lease goes on; it had asked at `sent_ms`, in virtual time."""
        self.history(scope).renew(lease, epoch, sent_ms)
        self.runs.renew(scope, lease, sent_ms)

    def observed(self, observer: str, scope: str, incarnation: str, revision: int) -> None:
        """An observer, by a name that survives its restarts, saw a scope at a revision."""
        found = self.observers.observers_never_go_back(self.history(scope), observer, incarnation, revision)
        self._note("observers_never_go_back", "S10", scope, found)

    def viewed(
        self,
        observer: str,
        scope: str,
        revision: int,
        rows: Mapping[str, int],
        kinds: tuple[str, ...] = (),
        wrong: Sequence[str] = (),
        nodes: frozenset[str] | None = None,
    ) -> None:
        """What a living observer's copy of a scope shows as the run ends: the revision that it stands at, and that of each key,
        of the `kinds` that it keeps, or of all; and which of its sums it finds `wrong` itself. A new incarnation's revisions
        are past all that were ever used, so one that has not seen it is behind. `nodes`: it keeps only what is there.
        """
        history, core, late_ms = self.history(scope), self.liveness.core, None
        if core is not None and revision < history.revision:
            bounds = self.liveness.bounds
            late_ms = self.now_ms() - max(core.since_ms, behind_since_ms(history, revision)) - bounds.view_ms * bounds.pace
        kept = (observer, revision, rows)
        found = self.observers.views_show_what_stands(history, *kept, late_ms=late_ms, kinds=kinds, nodes=nodes)
        self._note("views_show_what_stands", "S23", scope, found)
        self._note("views_show_what_stands", "S23", scope, ((observer, why) for why in wrong))

    # -- what runs ---------------------------------------------------------------------------------------------------

    def started(
        self, node: str, scope: str, replica: str, uid: str, attempt: int, pid: int, *, unrecorded: bool = False
    ) -> None:
        """The runner of a node has started a process; `replica` is the row's key, with or without its kind. `unrecorded`: the
        machine's disk takes nothing just now.
        """
        key = replica if replica.startswith("replica/") else f"replica/{replica}"
        process = Process(scope, (key, uid, attempt), node, pid, self.now_ms())
        self.runs.start(process)
        if unrecorded:
            self.runs.unrecorded.add((node, pid))
        self._note("runs_only_what_was_ordered", "S14", scope, self.runs.runs_only_what_was_ordered(process))
        self._note("one_copy_at_a_time", "S8", scope, self.runs.one_copy_at_a_time(process))

    def told_to_end(self, node: str, pid: int, by: str) -> None:
        """Somebody on the machine asked the process to end, and has it killed if it does not."""
        process = self.runs.tell(node, pid, by)
        if process is not None:
            found = self.runs.what_is_ordered_is_not_stopped(process, by)
            self._note("what_is_ordered_is_not_stopped", "S20", process.scope, found)

    def ended(self, node: str, pid: int) -> None:
        self.runs.end(node, pid)

    # -- liveness ----------------------------------------------------------------------------------------------------

    def heal(self, core: Core) -> None:
        """The faults have ended, but outside this core: from here on work must move on."""
        self.liveness.heal(core)

    def tick(self) -> None:
        """About every second of virtual time since `heal`."""
        for check, property_, waiting in self.liveness.tick():
            self._waited(check, property_, waiting)

    def _waited(self, check: str, property_: str, waiting: Waiting) -> None:
        self._note(check, property_, waiting.scope, iter([(waiting.key, waiting.why)]))

    # -- the end -----------------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """The run is over: what can only be judged at the end, and every sum once more from scratch."""
        for scope in self.histories:
            self._note("intervals_are_disjoint", "S8", scope, self.runs.intervals_are_disjoint(scope))
        for check, property_, waiting in self.liveness.conclude():
            self._waited(check, property_, waiting)
        for waiting in self.liveness.unsettled():
            self._waited("calls_are_answered", "L14", waiting)
        if self.liveness.core is None:
            self._undecided("liveness: the run ended before its faults did")
        for why in self.liveness.undecided:
            self._undecided(why)
        for history in self.histories.values():
            self._recount(history)

    def story(self, scope: str, key: str) -> str:
        """The life of one object, for people."""
        lines = [f"the story of {key} in {scope}:", *self.history(scope).retell(key)]
        lines += self.runs.retell(scope, key)
        return "\n".join(lines)

    def _note(self, check: str, property_: str, scope: str, found: Found) -> None:
        for key, why in found:
            self._tell(check, property_, scope, key, why)

    def _tell(self, check: str, property_: str, scope: str, key: str, why: str) -> None:
        if why.startswith(UNDECIDED):
            self._undecided(f"{check} ({property_}) in {scope}: {why.removeprefix(UNDECIDED).strip()}")
        elif len(self.violations) < VIOLATIONS_MAX:
            violation = Violation(check, property_, scope, key, why, self.now_ms())
            self.violations.append(violation)
            if self.on_violation is not None and len(self.violations) == 1:
                self.on_violation(violation)

    def _undecided(self, why: str) -> None:
        if why not in self.unknown:
            self.unknown.append(why)


BESIDE: Final[dict[str, str]] = {
    "acknowledged_is_in_history": "S2",
    "one_answer_per_operation": "S2",
    "an_id_stands_for_one_payload": "S2",
    "grants_are_in_one_hand": "S4",
    "tenants_use_no_more_than_their_quota": "S4",
    "one_copy_at_a_time": "S8",
    "ended_work_runs_no_more": "S8",
    "intervals_are_disjoint": "S8",
    "observers_never_go_back": "S10",
    "runs_only_what_was_ordered": "S14",
    "cited_evidence_was_true": "S16",
    "what_is_ordered_is_not_stopped": "S20",
    "what_was_seen_is_on_record": "S22",
    "views_show_what_stands": "S23",
    "claims_fit_what_was_seen": "S26",
    "work_is_bound_soon": "L1",
    "writes_cease": "L10",
    "refusals_back_off": "L10",
    "calls_are_answered": "L14",
}
"""What is asked neither of every commit nor at every look: of answers, of processes, of views, and as a run ends."""

NOT_YET: Final[dict[str, str]] = {
    "S11": "schedules",
    "S19": "two versions of the format side by side",
    "S21": "identities",
    "L9": "schedules",
    "L11": "the API server",
    "L12": "the API server",
}
"""What a promise needs before it can be judged."""


def judged() -> dict[str, list[str]]:
    """By promise, the names of its checks in order."""
    found: dict[str, list[str]] = {}
    named = [(one.property, name) for name, one in PROMISES.items()]
    named += [(property_, name) for name, (property_, _) in LOOKS.items()]
    for property_, name in sorted([*named, *((property_, name) for name, property_ in BESIDE.items())]):
        found.setdefault(property_, []).append(name)
    return found
