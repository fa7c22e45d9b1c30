"""Counts rare events seen in rows and process records.

By rows and by the machines' record, counted by name; nothing is judged here.

A path that no run takes says nothing about it, and does so in green: the standing runs must reach all of these (marks.py).
"""

from __future__ import annotations

from enum import StrEnum

from remit.simulate.checkers.quota_checks import comes_with_its_workload
from remit.simulate.checkers.reference.history import Run, Step
from remit.simulate.checkers.reference.rows import Json, attempt_of, health_of, phase_of


class Sight(StrEnum):
    FENCED = "fenced"
    """A copy was ended on its machine because its fence had passed."""
    ADOPTED = "adopted"
    """Of what one agent started a later one tells."""
    AGAIN = "again"
    """A copy was started again within its attempt."""
    VOID = "void"
    """A start that may have been given up is not made."""
    LATE = "late"
    """A start is refused by its keeper, or by its machine: it would be past its deadline."""
    OVERDUE = "overdue"
    """A drain is not done by its deadline, and it is said who holds it up."""
    MASS = "mass"
    """Most nodes are silent, and it is said that nothing is given up meanwhile."""
    PACED = "paced"
    """A node is given up later than others of its zone."""
    FILLED = "filled"
    """A workload came with its first replicas."""
    FOUGHT = "fought"
    """A deed that somebody undoes again and again is left undone."""


TOLD = {"MassSilence": Sight.MASS, "Fought": Sight.FOUGHT}
"""Events that are written down by those whom it happens to."""


class Sights:
    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self._epochs: dict[Run, int] = {}
        """Of each attempt: at which epoch of its node's lease it was started."""
        self._began: set[Run] = set()
        self._silenced: dict[tuple[int, str], int] = {}

    def see(self, sight: Sight) -> None:
        self.seen[sight.value] = self.seen.get(sight.value, 0) + 1

    def began(self, run: Run) -> None:
        """Its machine started it."""
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
            elif result == "not started" and ("too late" in reason or "fence passed" in reason):
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
