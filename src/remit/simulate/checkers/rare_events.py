"""Counts rare events seen in rows and process records.

A path that no run takes is not tested, although all runs pass. The standing runs must therefore reach all of these events
(coverage.py). Nothing is checked here.
"""

from __future__ import annotations

from enum import StrEnum

from remit.simulate.checkers.quota_checks import comes_with_its_workload
from remit.simulate.checkers.reference.history import Run, Step
from remit.simulate.checkers.reference.rows import Json, attempt_of, health_of, phase_of


class Sight(StrEnum):
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


TOLD = {"MassSilence": Sight.MASS, "Fought": Sight.FOUGHT}
"""Event reasons that controllers record themselves."""


class Sights:
    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self._epochs: dict[Run, int] = {}
        """The epoch of its node's lease at which each attempt was started."""
        self._began: set[Run] = set()
        self._silenced: dict[tuple[int, str], int] = {}

    def see(self, sight: Sight) -> None:
        self.seen[sight.value] = self.seen.get(sight.value, 0) + 1

    def began(self, run: Run) -> None:
        """The machine started the attempt."""
        if run in self._began:
            self.see(Sight.AGAIN)
        self._began.add(run)

    def absorb(self, step: Step) -> None:
        for _, old, new in step.of_kind("event"):
            reason = "" if new is None or old is not None else new.get("spec", {}).get("reason", "")
            if reason in TOLD:
                self.see(TOLD[reason])
        for key, old, new in step.moves:
            if new is None:
                continue
            self._agent_told(step, key, old, new)
            if old is None and new["spec"].get("index", 0) == 0 and comes_with_its_workload(step, new):
                self.see(Sight.FILLED)
        for _, old, new in step.of_kind("node"):
            if old is not None and new is not None:
                self._node_changed(step, old, new)

    def _agent_told(self, step: Step, key: str, old: Json, new: Json) -> None:
        run = key, new["metadata"]["uid"], attempt_of(new)
        for entry in step.accepted:
            told = entry.subject == key and entry.role == "agent"
            if told and self._epochs.setdefault(run, entry.epoch) < entry.epoch:
                self.see(Sight.ADOPTED)
        if (phase_of(old), phase_of(new)) == ("starting", "failed"):
            result, reason = new["status"].get("result", ""), new["status"].get("reason", "")
            if result == "gone" and "in time" in reason:
                self.see(Sight.VOID)
            elif result == "not started" and ("start deadline has passed" in reason or "fencing deadline passed" in reason):
                self.see(Sight.LATE)

    def _node_changed(self, step: Step, old: Json, new: Json) -> None:
        said = [one for one in new.get("status", {}).get("conditions", ()) if one["type"] == "Drained"]
        before = [one for one in old.get("status", {}).get("conditions", ()) if one["type"] == "Drained"]
        if said != before and said and said[0].get("reason") == "DeadlinePassed":
            self.see(Sight.OVERDUE)
        if (health_of(old), health_of(new)) == ("suspect", "unknown"):
            epoch = max((entry.epoch for entry in step.accepted if entry.did == "mark"), default=0)
            zone = epoch, str(new.get("spec", {}).get("zone", ""))
            self._silenced[zone] = self._silenced.get(zone, 0) + 1
            if self._silenced[zone] > 10:
                self.see(Sight.PACED)
