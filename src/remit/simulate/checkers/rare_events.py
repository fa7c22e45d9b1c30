"""Counts rare events seen in rows and process records.

A path that no run takes is not tested, although all runs pass. The standing runs must therefore reach all of these events
(coverage.py). Nothing is checked here.
"""

from __future__ import annotations

from enum import StrEnum

from remit.simulate.checkers.quota_checks import created_with_workload
from remit.simulate.checkers.reference.history import AttemptKey, CommitStep
from remit.simulate.checkers.reference.rows import Json, attempt_of, health_of, phase_of


class RareEvent(StrEnum):
    FENCED = "fenced"
    """An attempt was stopped on its machine because its fence had passed."""
    ADOPTED = "adopted"
    """An agent reports on an attempt that an earlier agent started."""
    AGAIN = "again"
    """A process was started again within its attempt."""
    VOID = "void"
    """A start that may have been declared lost is not made."""
    LATE = "late"
    """A start is refused by the keeper or the machine because its deadline has passed."""
    OVERDUE = "overdue"
    """A drain missed its deadline, and its condition names what blocks it."""
    MASS = "mass"
    """Most nodes are silent, and an event records that evictions are suspended."""
    PACED = "paced"
    """A node is marked unknown later than others of its zone, because of the rate limit."""
    FILLED = "filled"
    """A workload was created together with its first replicas."""
    FOUGHT = "fought"
    """A controller stopped repeating an action that something else keeps undoing."""


EVENT_REASONS = {"MassSilence": RareEvent.MASS, "RepeatedlyUndone": RareEvent.FOUGHT}
"""Event reasons that controllers record themselves."""


class RareEvents:
    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self._epochs: dict[AttemptKey, int] = {}
        """The epoch of its node's lease at which each attempt was started."""
        self._started: set[AttemptKey] = set()
        self._unknown_counts: dict[tuple[int, str], int] = {}

    def count(self, sight: RareEvent) -> None:
        self.seen[sight.value] = self.seen.get(sight.value, 0) + 1

    def on_start(self, run: AttemptKey) -> None:
        """The machine started the attempt."""
        if run in self._started:
            self.count(RareEvent.AGAIN)
        self._started.add(run)

    def on_commit(self, step: CommitStep) -> None:
        for _, old, new in step.of_kind("event"):
            reason = "" if new is None or old is not None else new.get("spec", {}).get("reason", "")
            if reason in EVENT_REASONS:
                self.count(EVENT_REASONS[reason])
        for key, old, new in step.moves:
            if new is None:
                continue
            self._on_agent_report(step, key, old, new)
            if old is None and new["spec"].get("index", 0) == 0 and created_with_workload(step, new):
                self.count(RareEvent.FILLED)
        for _, old, new in step.of_kind("node"):
            if old is not None and new is not None:
                self._on_node_change(step, old, new)

    def _on_agent_report(self, step: CommitStep, key: str, old: Json, new: Json) -> None:
        run = key, new["metadata"]["uid"], attempt_of(new)
        for entry in step.accepted:
            is_report = entry.subject == key and entry.role == "agent"
            if is_report and self._epochs.setdefault(run, entry.epoch) < entry.epoch:
                self.count(RareEvent.ADOPTED)
        if (phase_of(old), phase_of(new)) == ("starting", "failed"):
            match new["status"].get("result", ""):
                case "start abandoned":
                    self.count(RareEvent.VOID)
                case "start too late":
                    self.count(RareEvent.LATE)

    def _on_node_change(self, step: CommitStep, old: Json, new: Json) -> None:
        drained = [condition for condition in new.get("status", {}).get("conditions", ()) if condition["type"] == "Drained"]
        before = [condition for condition in old.get("status", {}).get("conditions", ()) if condition["type"] == "Drained"]
        if drained != before and drained and drained[0].get("reason") == "DeadlinePassed":
            self.count(RareEvent.OVERDUE)
        if (health_of(old), health_of(new)) == ("suspect", "unknown"):
            epoch = max((entry.epoch for entry in step.accepted if entry.operation == "mark"), default=0)
            zone = epoch, str(new.get("spec", {}).get("zone", ""))
            self._unknown_counts[zone] = self._unknown_counts.get(zone, 0) + 1
            if self._unknown_counts[zone] > 10:
                self.count(RareEvent.PACED)
