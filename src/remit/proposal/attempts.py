"""One scheduling attempt for a queue of equal replicas: place, preempt, or explain why not.

Who is placed where; and if not, why not, and what would help. It claims nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

import numpy as np

from remit.law.overrides import Effects, PlaceSet
from remit.model.claims import Code, Explain, Reserve
from remit.model.kinds import PRIORITY_MAX
from remit.model.records import Nearest
from remit.model.resources import DEVICES, WHOLE
from remit.observation.node_columns import Rows
from remit.observation.replica_table import PENDING
from remit.observation.scheduler_view import View
from remit.observation.shapes import THERE, Cut
from remit.proposal.metrics import Path, Tell, untold
from remit.proposal.placement.builtin_plugins import Steering
from remit.proposal.placement.class_scores import Class
from remit.proposal.placement.funnel import ever
from remit.proposal.placement.kernel import Kernel, Placed
from remit.proposal.placement.plugins import Cure, PluginError
from remit.proposal.placement.preemption import Eviction
from remit.proposal.placement.preemption_candidates import Victims
from remit.proposal.placement.topology_gates import minds_others
from remit.proposal.proposals import NO_VICTIMS, Decisions, Seen, Verdict, near
from remit.proposal.queue.backlog import Backlog
from remit.proposal.queue.class_queues import Line
from remit.proposal.quota import Purse, purse

NOWHERE: Final = Placed([], [])
SAID_MS: Final = 5_000
"""For so long the same reason of the same work is not recorded again."""
_KEYS_MAX: Final = 1 << 17
_SAID_MAX: Final = 4_096
ROUNDS_MAX: Final = 8
"""How often in one attempt it is asked who should make room; each time for one more on a node."""

FORCED_MAX: Final = 128
"""How many reservations, or victims of theirs, are told of in one record."""

AGAIN_MS: Final = 1_000
"""After so long it is asked again, if some of a line found room by force and others did not, or if room was coming."""


class Key(NamedTuple):
    """What makes replicas stand in one line: they ask the same, of the same tenant, at the same priority. Work that somebody
    looks at by its name (a gang, work with a deadline, work that an override speaks of or that is going) has a line of its own.
    """

    tenant: str
    shape: int
    priority: int
    """0 for a gang: its members must come together, also if their class had another value when the last of them was made."""
    boost: int
    preempts: bool
    generation: int
    """-1 if it does not matter."""
    gang: int
    open: bool
    """Is its workload there, and not going?"""
    paused: str
    pins: tuple[PlaceSet, ...]
    hinted: str


def key_for(view: View, effects: Effects, generation: int, priority: int) -> Key:
    """In which line replicas of this generation and priority stand, by what people's overrides say of them."""
    shapes, at = view.shapes, view.shapes.at
    tenant, workload = shapes.tenant_of(generation), shapes.name(generation)
    rank = view.things.classes.get(shapes.ranks[at.rank[generation]])
    priority = 0 if at.gang[generation] else priority
    paused = effects.paused(tenant, workload) if effects.overrides else ""
    pins = (effects.pinned(tenant, workload) or ()) if effects.overrides else ()
    path = f"{tenant}/{workload}"
    hinted = path if view.things.hints.about(path) else ""
    is_open = shapes.open(generation)
    apart = bool(at.gang[generation] or at.deadline[generation] or paused or pins or hinted or not is_open)
    return Key(
        tenant=tenant,
        shape=at.shape[generation],
        priority=priority,
        boost=effects.boost(tenant, workload, priority) if effects.overrides else 0,
        preempts=rank is None or rank.spec.preempts,
        generation=generation if apart else -1,
        gang=at.gang[generation],
        open=is_open,
        paused=paused,
        pins=pins,
        hinted=hinted,
    )


def least_of(view: View, key: Key) -> int:
    """How many of a gang must be bound at once: its minimum, until so many stand; 0 if they may come one by one."""
    if not key.gang:
        return 0
    return key.gang if view.standing(key.generation) < key.gang else 0


class Short(Enum):
    """Of what there was too little for all that were tried."""

    NOTHING = "nothing"
    ROOM = "room"
    QUOTA = "quota"
    MEMBERS = "members"
    LEAVE = "leave"
    PLUGIN = "plugin"


class Attempt(NamedTuple):
    """One line's turn: whose it was, what the attempt saw, and where they go, the first ones first."""

    line: Line
    since: int
    slots: list[int]
    found: Placed
    purse: Purse
    one: Class | None
    seen: Seen | None
    short: Short
    policy: int
    gang: bool
    why: str = ""
    left: Seen | None = None
    """How things stood when no more of them found room."""
    forced: dict[int, Reserve] = {}  # noqa: RUF012  (each attempt is given its own)
    """By slot: who gets room at the cost of others."""
    pause_ms: list[int] = []  # noqa: RUF012
    """After how long it is to be looked again whether room can be made."""
    whole: bool = False
    """Was it tried with everybody whose turn would come yet?"""

    def placed(self) -> Iterator[tuple[int, int, Mapping[str, int]]]:
        """Slot, row and devices of each that found a place."""
        devices = self.found.devices or [{}] * len(self.found.rows)
        return zip(self.slots[: len(self.found.rows)], self.found.rows, devices, strict=True)


class Said(NamedTuple):
    """What was last recorded of a line that waits: when, why, and of whom."""

    at_ms: int
    reason: Code
    slots: dict[int, None]


class Attempts:
    def __init__(
        self,
        view: View,
        kernel: Kernel,
        backlog: Backlog,
        victims: Victims,
        decisions: Decisions,
        steering: Steering,
        tell: Tell = untold,
    ) -> None:
        self._tell = tell
        self._view, self._kernel, self._backlog = view, kernel, backlog
        self._victims, self._decisions, self._steering = victims, decisions, steering
        self._keys: dict[tuple[int, str, int], Key] = {}
        self._said: dict[Line, Said] = {}

    # -- lines -------------------------------------------------------------------------------------------------------------

    def key(self, slot: int) -> Key:
        at, shapes = self._view.replicas.at, self._view.shapes
        generation, priority = at.generation[slot], at.priority[slot]
        of = shapes.at
        apart = of.gang[generation] or of.deadline[generation] or not shapes.open(generation)
        if apart or self._steering.effects.overrides or self._view.things.hints:
            return key_for(self._view, self._steering.effects, generation, priority)
        # Nobody looks at it by its name: all of its shape and rank have one key.
        known = (of.shape[generation], shapes.ranks[of.rank[generation]], priority)
        found = self._keys.get(known)
        if found is None:
            if len(self._keys) >= _KEYS_MAX:
                self._keys.clear()
            found = self._keys[known] = key_for(self._view, self._steering.effects, generation, priority)
        return found

    def line(self, key: Key, slot: int, now_ms: int) -> Line:
        shapes = self._view.shapes
        generation = self._view.replicas.at.generation[slot]
        deadline_ms = shapes.at.deadline[generation]
        charge = shapes.cut_of(generation).charge
        priority = min(self._view.replicas.at.priority[slot] + key.boost, PRIORITY_MAX)
        return Line(key, key.tenant, priority, charge, now_ms + deadline_ms if deadline_ms else None)

    def forget(self) -> None:
        self._keys.clear()

    def class_of(self, key: Key) -> Class:
        ask = self._view.shapes.ask(key.shape)
        if not (key.pins or key.hinted):
            return self._kernel.known(key.shape, ask)
        return self._kernel.known((key.shape, key.pins, key.hinted), ask, pins=key.pins, hinted=key.hinted)

    def closed_to(self, paths: Iterable[str]) -> list[int]:
        """Who waits for a node of those workloads, by `tenant/name`, of which no more is placed."""
        return self.waiting_of(paths, lambda owner: self._view.shapes.workloads.at.state[owner] != THERE)

    def waiting_of(self, paths: Iterable[str], which: Callable[[int], bool] = lambda owner: True) -> list[int]:
        """Who waits for a node, of those workloads by `tenant/name`."""
        shapes, replicas = self._view.shapes, self._view.replicas
        owners = [owner for path in paths if (owner := shapes.workloads.ids.get(path)) is not None and which(owner)]
        if not owners:
            return []
        of = np.flatnonzero(np.isin(shapes.column("workload"), owners))
        waits = replicas.column("phase") == PENDING
        found: list[int] = np.flatnonzero(waits & np.isin(replicas.column("generation"), of)).tolist()
        return found

    def class_of_line(self, line: Line) -> Class | None:
        """The same for a line; None if its shape has gone, so that it is about to."""
        key = _key_of(line)
        return self.class_of(key) if self._view.shapes.has(key.shape) else None

    def capacity(self) -> dict[str, int]:
        """Of all nodes together, as shares are counted: what an ask may be charged for."""
        columns = self._view.columns
        found = {name: int(columns.capacity[at].sum()) for name, at in columns.resources.items()}
        for node in columns.nodes:
            for device in node.spec.devices if node is not None else ():
                name = DEVICES + device.kind
                found[name] = found.get(name, 0) + WHOLE
        return found

    def held(self) -> dict[str, dict[str, int]]:
        """What each tenant holds by all the ledgers of its quota, without what is only assumed: the backlog counts that, as
        what is in flight.
        """
        found: dict[str, dict[str, int]] = {}
        for name, ledger in self._view.ledgers.items():
            if ledger.tenant and not name.endswith("/emergency"):
                theirs = found.setdefault(ledger.tenant, {})
                for resource, count in ledger.used.items():
                    theirs[resource] = theirs.get(resource, 0) + max(count, 0)
        shapes = self._view.shapes
        for generation, times in Counter(one.generation for one in self._view.assumed.values()).items():
            theirs = found.get(shapes.tenant_of(generation), {})
            for resource, count in shapes.cut_of(generation).charge:
                theirs[resource] = max(0, theirs.get(resource, 0) - times * count)
        return found

    # -- one turn ----------------------------------------------------------------------------------------------------------

    def attempt(self, line: Line, slots: list[int], now_ms: int) -> Attempt:
        """Place as many as can be; they are assumed from now on."""
        key, view = _key_of(line), self._view
        since = self._backlog.begin(line)
        cut, least = view.shapes.cut_of(view.replicas.at.generation[slots[0]]), least_of(view, key)
        from_ = purse(view, key.tenant, now_ms, cut.charge, max(least, 1))
        policy = view.policy.spec.number if view.policy is not None else 0

        def ended(short: Short, one: Class | None = None, seen: Seen | None = None, why: str = "") -> Attempt:
            return Attempt(line, since, slots, NOWHERE, from_, one, seen, short, policy, False, why)

        if key.paused or (key.generation >= 0 and not view.shapes.open(key.generation)):
            return ended(Short.LEAVE)
        covered = from_.covers(cut.charge, len(slots))
        if least > 1 and len(slots) < least:
            rest = [slot for slot in self._backlog.take_rest(line) if isinstance(slot, int)]
            slots += rest
            if rest:
                self._tell(Path.WHOLE)
            covered = from_.covers(cut.charge, len(slots))
            if len(slots) < least:
                return ended(Short.MEMBERS)
        try:
            one = self.class_of(key)
            if covered < max(least, 1):
                return ended(Short.QUOTA, one)
            seen = self._decisions.look(self._kernel, one, now_ms)
            found = self._kernel.run(one, covered)
        except PluginError as error:
            self._tell(Path.PLUGIN)
            return ended(Short.PLUGIN, why=str(error))
        self._kernel.undo(one, found)
        if len(found.rows) < least:
            return self._roomless(ended(Short.ROOM, one, seen), one, now_ms)
        made = Attempt(line, since, slots, found, from_, one, seen, Short.NOTHING, policy, least > 0)
        view.assume_run(made.placed(), (from_.name,))
        if len(found.rows) < covered:
            return self._roomless(made, one, now_ms)
        return made if covered == len(slots) else made._replace(short=Short.QUOTA)

    def _roomless(self, attempt: Attempt, one: Class, now_ms: int) -> Attempt:
        """Why it found no room is found out at once: what is placed after it changes the picture, and is news to it."""
        try:
            left = self._decisions.look(self._kernel, one, now_ms, anew=True)
            return attempt._replace(short=Short.ROOM, left=left, forced={}, pause_ms=[])
        except PluginError as error:
            return attempt._replace(short=Short.PLUGIN, why=str(error))

    def is_gang(self, line: Line) -> bool:
        return least_of(self._view, _key_of(line)) > 0

    def undo(self, attempt: Attempt) -> None:
        for slot, _, _ in attempt.placed():
            self._view.forget(slot)

    def explain(
        self, attempt: Attempt, where: Mapping[int, str], word: Verdict, victims: Mapping[str, str] = NO_VICTIMS
    ) -> list[Explain]:
        line = attempt.line
        return self._decisions.records(
            line.tenant,
            where,
            word,
            attempt=line.attempts,
            purse=attempt.purse,
            seen=attempt.seen,
            overrides=self._named(_key_of(line)),
            victims=victims,
        )

    def _named(self, key: Key) -> tuple[str, ...]:
        """The overrides that have a say here."""
        effects = self._steering.effects
        avoids = [one.override for one in effects.avoids]
        return tuple(dict.fromkeys((*avoids, *(pin.override for pin in key.pins), *((key.paused,) if key.paused else ()))))

    def forbidden(self, slot: int) -> bool:
        """Does an override forbid by now what is reserved for this replica?"""
        if not self._steering.effects.overrides:
            return False
        key, row = self.key(slot), np.array([self._view.replicas.at.node[slot]])
        ask = self._view.ask(slot)._replace(pins=key.pins)
        allowed = self._steering.filter.check(ask, Rows(self._kernel.columns, row), self._view.peers)
        return bool(key.paused) or not allowed.all()

    # -- room made by force ------------------------------------------------------------------------------------------------

    def force(self, attempt: Attempt, slots: Sequence[int]) -> None:
        """Reservations at the cost of others, for those that found no room; none for a gang, which must come at once."""
        key, one, view, victims = _key_of(attempt.line), attempt.one, self._view, self._victims
        if one is None or not key.preempts or key.gang:
            return
        count = attempt.purse.covers(self._cut(slots[0]).charge, len(slots))
        left = list(slots)
        victims.coming = False
        try:
            for _ in range(ROUNDS_MAX if count and ever(self._kernel, one) else 0):
                # On each node for one of them in a round; where they mind each other, one of them in all.
                most = 1 if minds_others(one.ask) or view.peers.shunners(one.ask) else count
                plans = victims.plan(view, self._kernel, one, self._kernel.roomless(one), key.priority, most)
                count -= len(plans)
                for plan in plans:
                    slot = left.pop(0)
                    attempt.forced[slot] = self._reserve(attempt, slot, plan)
                if not plans or not count:
                    break
        except PluginError:
            return
        if left:
            soon = attempt.forced or victims.coming
            attempt.pause_ms.append(max(victims.again_ms(), AGAIN_MS if soon else 0))

    def _reserve(self, attempt: Attempt, slot: int, plan: Eviction) -> Reserve:
        view, purse_ = self._view, attempt.purse
        at, keys = view.replicas.at, view.replicas.keys
        victims = {keys[victim]: at.revision[victim] for victim in plan.victims}
        view.assume(slot, plan.row, plan.devices, (purse_.name,))
        node = self._kernel.name(plan.row)
        return Reserve(keys[slot], at.revision[slot], node, purse_.name, plan.devices, attempt.policy, victims)

    def explain_forced(self, attempt: Attempt) -> list[Explain]:
        """Who makes room for whom; as many in one record as have few victims in all."""
        made, where, victims = list[Explain](), dict[int, str](), dict[str, str]()
        last = next(reversed(attempt.forced), None)
        for slot, claim in attempt.forced.items():
            where[slot] = claim.node
            victims.update(dict.fromkeys(claim.victims, claim.replica))
            if slot == last or max(len(where), len(victims)) >= FORCED_MAX:
                word = Verdict("reserved", Code.NO_ROOM, f"{len(victims)} of lower priority make room for {len(where)}")
                made += self.explain(attempt, where, word, victims)
                where, victims = {}, {}
        return made

    def _cut(self, slot: int) -> Cut:
        return self._view.shapes.cut_of(self._view.replicas.at.generation[slot])

    # -- waiting -----------------------------------------------------------------------------------------------------------

    def put_aside(self, attempt: Attempt, slots: Sequence[int], now_ms: int) -> list[Explain]:
        """The line waits, with a reason, cures and a deadline; what is recorded of it."""
        line, key, short = attempt.line, _key_of(attempt.line), attempt.short
        if short is Short.QUOTA and attempt.found.rows and self._has_more(line, now_ms):
            return []  # the rest of them draw on another slice, at once
        reason, cures, detail, never = self._reason(attempt)
        pause_ms = max(attempt.pause_ms, default=0)
        until_ms = now_ms + pause_ms if pause_ms else None
        if pause_ms:
            self._tell(Path.PACED)
        waits = self._backlog.wait(line, reason, cures, since=attempt.since, now_ms=now_ms, until_ms=until_ms)
        if not waits or not slots or self._is_said(line, reason, slots, now_ms):
            return []
        seen, closest = attempt.left or attempt.seen, None
        if short is Short.ROOM and attempt.one is not None:
            closest = self._near(attempt.one)
        return self._decisions.records(
            line.tenant,
            slots,
            Verdict("waiting", reason, detail, words(cures), never),
            attempt=line.attempts,
            purse=attempt.purse,
            seen=seen,
            near=closest,
            overrides=self._named(key),
        )

    def _has_more(self, line: Line, now_ms: int) -> bool:
        return purse(self._view, line.tenant, now_ms, line.amount).covers(line.amount, 1) > 0

    def _is_said(self, line: Line, reason: Code, slots: Sequence[int], now_ms: int) -> bool:
        """Was the very same recorded of all these a moment ago? Else whatever wakes a line again and again fills the store."""
        last = self._said.get(line)
        if last is not None and last.reason is reason and now_ms - last.at_ms < SAID_MS:
            return all(slot in last.slots for slot in slots)
        if len(self._said) >= _SAID_MAX:
            self._said.clear()
        self._said[line] = Said(now_ms, reason, dict.fromkeys(slots))
        return False

    def _near(self, one: Class) -> Nearest | None:
        try:
            return near(self._kernel, one)
        except PluginError:
            return None

    def _reason(self, attempt: Attempt) -> tuple[Code, frozenset[Hashable], str, bool]:
        key = _key_of(attempt.line)
        workload = ("workload", key.tenant, self._view.shapes.name(key.generation)) if key.generation >= 0 else None
        match attempt.short:
            case Short.LEAVE if key.paused:
                return Code.OVERRIDE, frozenset({("override",)}), f"override {key.paused} pauses it", False
            case Short.LEAVE:
                return Code.DELETING, frozenset({workload}), "its workload is gone or going", True
            case Short.QUOTA:
                cures = frozenset({("quota", key.tenant)})
                return attempt.purse.reason, cures, f"{attempt.purse.name} does not cover it", False
            case Short.MEMBERS:
                return Code.GANG_SHORT, frozenset({("member", key), workload}), f"fewer than {key.gang} members wait", False
            case Short.PLUGIN:
                return Code.FAULT, frozenset({("node",)}), attempt.why, False
            case Short.ROOM | Short.NOTHING:
                return self._refused(key, attempt.one, attempt.left)

    def _refused(self, key: Key, one: Class | None, left: Seen | None) -> tuple[Code, frozenset[Hashable], str, bool]:
        if one is None or left is None:
            return Code.NO_ROOM, frozenset({("room",), ("node",)}), "", False
        funnel = left.funnel
        try:
            never = not ever(self._kernel, one)
        except PluginError as error:
            return Code.FAULT, frozenset({("node",)}), str(error), False
        cures: set[Hashable] = {self._cure(cure, key) for cure in funnel.cures()}
        if key.gang or funnel.fits:
            # There was room for some of them: more of it may be enough for all.
            cures.add(("room",))
        reason = Code.GANG_SHORT if key.gang and funnel.fits else funnel.reason
        step = funnel.dominant
        detail = f"{funnel.nodes} nodes; {step.filter.name} refused the last {step.refused}" if step is not None else ""
        return reason, frozenset(cures), detail, never

    def _cure(self, cure: Cure, key: Key) -> Hashable:
        match cure:
            case Cure.PEERS:
                return ("peers", key.tenant)
            case _:
                return (cure.value,)


def words(cures: Iterable[Hashable]) -> tuple[str, ...]:
    """The sorts of events that end a wait; where none does, time alone."""
    return tuple(sorted({str(cure[0]) if isinstance(cure, tuple) else str(cure) for cure in cures})) or (Cure.TIME.value,)


def _key_of(line: Line) -> Key:
    if not isinstance(line.key, Key):
        raise TypeError(f"{line!r} is not a line of this scheduler")
    return line.key
