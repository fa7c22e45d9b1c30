"""Preemption candidates in a view, and the victim rate limit.

Which of them should, preemption.py says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from remit.law.charges import on_node
from remit.law.ledgers import DEVICE
from remit.law.lifecycle import TABLE
from remit.model.records import Phase
from remit.observation.node_columns import Bools, Ints
from remit.observation.replica_table import NUMBER
from remit.observation.scheduler_view import View
from remit.proposal.placement.class_scores import Class
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.preemption import VICTIMS_MAX, Candidates, Eviction, Leaving, Spare, plan

MOVABLE: Final = np.array(sorted(NUMBER[row.source] for row in TABLE if row.name == "preempt" and row.source is not None))


UP: Final = np.array(sorted(NUMBER[phase] for phase in (Phase.RUNNING, Phase.READY, Phase.SERVING)))
"""Those that do their work already; the rest of the movable ones are on the way there."""

GOING: Final = np.array(sorted(NUMBER[phase] for phase in (Phase.DRAINING, Phase.STOPPING)))
"""Those that give their room back in a while, whoever has sent them away."""


class Pace(NamedTuple):
    """So many victims a second, and so many at once: what is wrong with the priorities shows before a cluster is emptied."""

    per_s: int = 100
    burst: int = 1_000


class Victims:
    """The candidates of one view at one version, whom a claim under way has taken, and what is left of the pace."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._left = float(pace.burst)
        self._at_ms = 0
        self.coming = False
        """Was room left to those who go already, since somebody last asked? Others may come first: look again soon."""
        self._lacking = 0
        """How many more than were allowed a plan would have needed, in this cycle."""
        self._kept: tuple[int, Ints] | None = None
        self._taken: dict[int, int] = {}
        """By slot: at which revision somebody was taken who is not seen to go yet."""
        self._owed: dict[int, tuple[int, dict[str, int]]] = {}
        """By the first victim of a claim under way: on which row, and what of theirs its preemptor is to have."""

    def forget(self) -> None:
        """Slots mean nothing any more."""
        self._taken.clear()
        self._owed.clear()
        self._kept = None

    def begin(self, now_ms: int, view: View) -> None:
        """A cycle begins: whoever is seen to have moved on is no longer only taken."""
        self._left = min(float(self.pace.burst), self._left + self.pace.per_s * (now_ms - self._at_ms) / 1000)
        self._at_ms = now_ms
        self._lacking = 0
        self._kept = None
        at = view.replicas.at
        self._taken = {slot: revision for slot, revision in self._taken.items() if at.revision[slot] == revision}
        self._owed = {slot: owed for slot, owed in self._owed.items() if slot in self._taken}

    def spare(self, victims: Iterable[str], view: View) -> None:
        """The claim that took them was refused, or never heard."""
        for key in victims:
            slot = view.replicas.slots.get(key)
            if slot is not None and self._taken.pop(slot, None) is not None:
                self._left = min(float(self.pace.burst), self._left + 1)
                self._owed.pop(slot, None)

    def again_ms(self) -> int:
        """How long until more may be taken, if that is what was lacking."""
        short = max(self._lacking, 1) - self._left
        return 0 if short <= 0 or self._lacking > self.pace.burst else round(short * 1000 / self.pace.per_s) + 1

    def plan(self, view: View, kernel: Kernel, one: Class, open_rows: Bools, priority: int, count: int) -> list[Eviction]:
        """Room for up to `count` of a class, one on a node. Whom it takes is taken from then on."""
        allowed = int(self._left)
        if allowed < 1:
            return []
        found = self.candidates(view, one, priority)
        if found is None:
            return []
        spare = self.limits(view)
        made = plan(one.ask, kernel.columns, open_rows, found, spare, count=count, victims_max=allowed)
        self._lacking = max(self._lacking, made.lacking if made.lacking <= VICTIMS_MAX else 0)
        self.coming = self.coming or made.coming
        for eviction in made.evictions:
            self._left -= len(eviction.victims)
            self._taken.update({slot: view.replicas.at.revision[slot] for slot in eviction.victims})
            self._owed[eviction.victims[0]] = eviction.row, self._given(view, one, eviction)
        return made.evictions

    def _given(self, view: View, one: Class, eviction: Eviction) -> dict[str, int]:
        """How much of what the preemptor needs its victims hold."""
        held: Counter[str] = Counter()
        for slot in eviction.victims:
            held.update(dict(on_node(view.ask(slot), view.replicas.devices.get(slot, {}))))
        return {name: min(held[name], need) for name, need in on_node(one.ask, eviction.devices)}

    def _running(self, view: View) -> Ints:
        """Those that may be taken, and are not."""
        if self._kept is None or self._kept[0] != view.revision:
            phases = view.replicas.column("phase")
            self._kept = view.revision, np.flatnonzero(np.isin(phases, MOVABLE))
        slots = self._kept[1]
        return slots[~np.isin(slots, list(self._taken))] if self._taken else slots

    def candidates(self, view: View, one: Class, priority: int) -> Candidates | None:
        """Who runs below this priority and was not taken; None if nobody does."""
        replicas, shapes = view.replicas, view.shapes
        slots = self._running(view)
        slots = slots[replicas.column("priority")[slots] < priority]
        for term in (*one.ask.affinity, *one.ask.spread):
            # Whoever it wants to be near, or is counted with, is not sent away for it: without him it might not fit there.
            slots = slots[~np.isin(replicas.column("generation")[slots], shapes.picked(term.of))]
        if not len(slots):
            return None
        generations = replicas.column("generation")[slots]
        names = [name for name, _ in one.ask.resources]
        return Candidates(
            slots=slots,
            rows=replicas.column("node")[slots].astype(np.int64),
            priority=replicas.column("priority")[slots].astype(np.int64),
            groups=shapes.column("workload")[generations].astype(np.int64),
            up=np.isin(replicas.column("phase")[slots], UP),
            amounts=_amounts(view, generations, names),
            devices=replicas.devices,
            firm=self._firm(names),
            coming=self._coming(view, names),
        )

    def _firm(self, names: Sequence[str]) -> Leaving:
        """As the authority counts: what victims still hold is not posted a second time for who is to have it."""
        owed = list(self._owed.values())
        amounts = {name: np.array([due.get(name, 0) for _, due in owed], dtype=np.int64) for name in names}
        devices: dict[int, list[Mapping[str, int]]] = {}
        for row, due in owed:
            part = {name.removeprefix(DEVICE): share for name, share in due.items() if name.startswith(DEVICE)}
            devices.setdefault(row, []).append(part)
        return Leaving(np.array([row for row, _ in owed], dtype=np.int64), amounts, devices)

    def _coming(self, view: View, names: Sequence[str]) -> Leaving:
        """What those give back who go already, or whom a claim under way has taken; less what of it is spoken for."""
        replicas = view.replicas
        going = np.flatnonzero(np.isin(replicas.column("phase"), GOING))
        slots = np.concatenate([going, np.array(list(self._taken), dtype=np.int64)])
        rows = replicas.column("node")[slots].astype(np.int64)
        amounts = _amounts(view, replicas.column("generation")[slots], names)
        devices: dict[int, list[Mapping[str, int]]] = {}
        for slot in (slot for slot in slots.tolist() if slot in replicas.devices):
            devices.setdefault(replicas.at.node[slot], []).append(replicas.devices[slot])
        owed = list(view.owed())
        for row, due in owed:
            part = {name.removeprefix(DEVICE): -share for name, share in due.items() if name.startswith(DEVICE)}
            devices.setdefault(row, []).append(part)
        rows = np.concatenate([rows, np.array([row for row, _ in owed], dtype=np.int64)])
        due_of = {name: np.array([-due.get(name, 0) for _, due in owed], dtype=np.int64) for name in names}
        return Leaving(rows, {name: np.concatenate([amounts[name], due_of[name]]) for name in names}, devices)

    def limits(self, view: View) -> Spare:
        """How many of each workload may go, by what it says of disruption."""
        shapes, replicas = view.shapes, view.replicas
        running = self._running(view)
        workloads = shapes.column("workload")
        of = workloads[replicas.column("generation")[running]]
        groups = int(workloads.max(initial=-1)) + 1
        there = np.bincount(of, minlength=groups)
        up = np.bincount(of[np.isin(replicas.column("phase")[running], UP)], minlength=groups)
        least = np.zeros(groups, dtype=np.int64)
        protected = np.flatnonzero(shapes.column("min_available") > 0)
        np.maximum.at(least, workloads[protected], shapes.column("min_available")[protected])
        return Spare(there - least, up - least)


def _amounts(view: View, generations: npt.NDArray[Any], names: Iterable[str]) -> dict[str, Ints]:
    """What replicas of these generations hold of each of these resources."""
    _, first, at = np.unique(view.shapes.column("cut")[generations], return_index=True, return_inverse=True)
    cuts = [dict(view.shapes.cut_of(int(generation)).resources) for generation in generations[first]]
    return {name: np.array([cut.get(name, 0) for cut in cuts], dtype=np.int64)[at] for name in names}
