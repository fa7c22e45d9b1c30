"""Per-node reconciler (pure): decides from orders, lease and keeper table which attempts to start, stop or report.

Looks, and answers with deeds; no I/O and no clock of its own.

Three rules carry the safety argument; the rest is service:

- *Nothing starts on a stale order.* A process is begun only once this agent's own `start` for that attempt is committed, while
  its lease lasts, and only if there was no silence since that `start` was asked for after which the scope may have given it up.
  What is started again within its attempt needs no more than that the attempt goes on; but what must never run twice needs to
  know that it does: not after such a silence, nor on orders from before the lease was acquired.
- *What is not, or no longer, ordered here is ended*, and only then forgotten; nothing else is ended for want of an answer. The
  deadlines of what must never run twice are the keeper's (keeper.py).
- *Each end is told once, by the move that the table has for it*, and room is freed by nothing but that. That nothing runs is
  said only by one who would know: where another agent held this node before, with a keeper of its own, what must never run
  twice is given the time to be fenced there first; not so what was still bound once this agent held it: nobody else began that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from remit.agent.assignments import Assigned, Ordered
from remit.agent.attempts import GONE, NOT_STARTED, OK, OOM, SCRATCH_FULL, TIMEOUT, UNWELL, Copy, copy_of, result_of
from remit.agent.keeper.protocol import Begun
from remit.agent.preparation import Making
from remit.agent.probes import Health, restart_after_ms
from remit.agent.run_spec import NOTHING, fence_ms, needs_preparing, reads
from remit.law.timing import Tempo, lost_after_ms
from remit.model.claims import Move
from remit.model.kinds import NodeHealth, WorkloadSpec
from remit.model.records import GenerationSpec, Phase, Replica
from remit.world.interfaces import Ended

RENEWALS_KEPT: Final = 128

_OVER: Final = (Phase.RELEASED, Phase.FAILED, Phase.FINISHED)
_RUNS: Final = (Phase.RUNNING, Phase.READY, Phase.SERVING)


class Say(NamedTuple):
    """Ask the authority for the next step of a copy."""

    copy: Copy
    move: Move


class Start(NamedTuple):
    """Let the keeper begin it: the `number`th time within its attempt."""

    copy: Copy
    replica: Replica
    generation: GenerationSpec
    number: int


class Prepare(NamedTuple):
    """Gather what it needs for its `number`th start: it is started once that is there (preparing.py)."""

    copy: Copy
    replica: Replica
    generation: GenerationSpec
    number: int


class End(NamedTuple):
    """Let the keeper end it, and all that came of it; `why` is then the result that is told in place of how it ended."""

    copy: Copy
    grace_ms: int
    why: str = ""


class Leave(NamedTuple):
    """Forget it: it has ended, and is no longer ordered here."""

    copy: Copy


Act = Say | Prepare | Start | End | Leave


class Course:
    """What this agent knows of a copy beyond the keeper's table. It begins anew with the agent."""

    __slots__ = ("asked_ms", "barred", "bound_in", "health")

    def __init__(self) -> None:
        self.asked_ms: int | None = None
        """When its `start` was asked for."""
        self.barred = False
        """It does not run, and the keeper will begin no more of it."""
        self.bound_in = ""
        """In which incarnation it was seen to be not yet started, by orders from after the node's lease was acquired."""
        self.health: Health | None = None


class Mind:
    """One node's. `look` may be called at any time, and as often; it answers what is to be done by what is known now."""

    def __init__(self, node: str, tempo: Tempo) -> None:
        self.node, self.tempo = node, tempo
        self.courses: dict[Copy, Course] = {}
        self.wakes: dict[str, int] = {}
        """When time alone makes a difference next to whom of those last looked at, by key: a look then may do more."""
        self.making: dict[Copy, Making] = {}
        """What is being prepared, or was: whoever performs the deeds keeps it up to date."""
        self._renewals: deque[int] = deque(maxlen=RENEWALS_KEPT)
        self._strange_since_ms: int | None = None
        self._held_from = self._seen = 0
        """At which revision the node's lease was acquired, and which one the orders of this look show."""

    def took_over(self, now_ms: int, *, follows: bool, revision: int = 0) -> None:
        """The node's lease was acquired. `follows`: nobody else, with another keeper, held it since this agent's data did.
        Whatever was given up here for want of a holder was given up before `revision`.
        """
        self._held_from = revision
        if not follows:
            self._strange_since_ms = now_ms
            for course in self.courses.values():
                course.bound_in = ""

    def renewed(self, sent_ms: int) -> None:
        """A renewal of the node's lease that was sent then was answered."""
        self._renewals.append(sent_ms)

    def course(self, copy: Copy) -> Course:
        return self.courses.setdefault(copy, Course())

    def ordered(self, orders: Assigned, copy: Copy) -> bool:
        found = orders.get(copy.key)
        if found is None or copy_of(copy.key, found.replica) != copy:
            return False
        status = found.replica.status
        return status.node == self.node and status.phase not in _OVER

    def wanted(self, orders: Assigned, copy: Copy) -> bool:
        """Is it to run, or may it be again?"""
        found = orders.get(copy.key)
        leaving = found is not None and found.replica.status.phase in (Phase.DRAINING, Phase.STOPPING)
        return not leaving and self.ordered(orders, copy)

    # -- a look ----------------------------------------------------------------------------------------------------------

    def look(
        self,
        now_ms: int,
        orders: Assigned,
        kept: Mapping[Copy, Begun],
        *,
        may_act: bool,
        keys: Collection[str] | None = None,
    ) -> list[Act]:
        """`kept` is what the keeper's table has of this node; `may_act`: its lease is held; `keys`: only at these, where there
        was news of no other. Until the orders are known nothing is done: what runs here may have one.
        """
        self._seen = orders.revision
        self.wakes.clear()
        if not orders.known:
            return []
        deeds: list[Act] = [
            End(copy, self.tempo.kill_grace_ms) if one.alive else Leave(copy)
            for copy, one in kept.items()
            if (keys is None or copy.key in keys) and not self.ordered(orders, copy)
        ]
        for key, order in orders.on(self.node, keys):
            copy = copy_of(key, order.replica)
            deeds += self._next(now_ms, orders, copy, order, kept.get(copy), may_act)
        if keys is None:
            for copy in [copy for copy in self.courses if copy not in kept and not self.ordered(orders, copy)]:
                del self.courses[copy]
        return deeds

    def _next(
        self, now_ms: int, orders: Assigned, copy: Copy, order: Ordered, kept: Begun | None, may_act: bool
    ) -> Iterator[Act]:
        replica, generation = order.replica, orders.spec_of(order.replica)
        match replica.status.phase:
            case Phase.BOUND if may_act:
                course = self.course(copy)
                course.asked_ms = now_ms
                if self._seen >= self._held_from:
                    course.bound_in = orders.incarnation
                yield self._say(copy, order, "start")
            case Phase.STARTING | Phase.RUNNING | Phase.READY | Phase.SERVING if generation is not None:
                yield from self._go_on(now_ms, orders, copy, order, generation, kept, may_act)
            case Phase.DRAINING if may_act:
                yield self._say(copy, order, "stop")
            case Phase.STOPPING if kept is not None and kept.alive:
                grace_ms = self.tempo.kill_grace_ms if generation is None else int(generation.spec.template.stop_grace)
                yield End(copy, grace_ms)
            case Phase.STOPPING if kept is None and self._may_run_elsewhere(now_ms, orders, copy, generation):
                pass
            case Phase.STOPPING if may_act:
                ended = Ended(code=0) if kept is None or kept.ended is None else kept.ended
                yield self._say(copy, order, "stopped", result=_result(kept, ended))
            case Phase.UNKNOWN if may_act and not self._given_up(orders):
                yield self._say(copy, order, "resume")

    def _given_up(self, orders: Assigned) -> bool:
        """Is this node held for silent? Then what is resumed would be doubted at once, again and again: it joins first."""
        found = orders.node(self.node)
        return found is not None and found[0].status.health in (NodeHealth.UNKNOWN, NodeHealth.LOST)

    def _may_run_elsewhere(self, now_ms: int, orders: Assigned, copy: Copy, generation: GenerationSpec | None) -> bool:
        """Its keeper knows nothing of it. But may that of another, who held this node before, be running it still? Not if it
        was still bound when this agent held the node already: whoever begins it needs a `start`, and only the holder gets one.
        """
        fence = 0 if generation is None else fence_ms(generation)
        if self._strange_since_ms is None or not fence:
            return False
        course = self.courses.get(copy)
        if course is not None and course.bound_in == orders.incarnation:
            return False
        until_ms = self._strange_since_ms + lost_after_ms(fence, self.tempo)
        if now_ms < until_ms:
            self._wake_at(copy.key, until_ms)
        return now_ms < until_ms

    # -- what runs, or is to ---------------------------------------------------------------------------------------------

    def _go_on(
        self,
        now_ms: int,
        orders: Assigned,
        copy: Copy,
        order: Ordered,
        generation: GenerationSpec,
        kept: Begun | None,
        may_act: bool,
    ) -> Iterator[Act]:
        phase = order.replica.status.phase
        if kept is None:
            void = phase is Phase.STARTING and self._void(now_ms, copy, generation)
            if (void or phase is not Phase.STARTING) and self._may_run_elsewhere(now_ms, orders, copy, generation):
                return
            if phase is not Phase.STARTING:
                yield from self._over(copy, order, generation.spec, kept, Ended(), may_act)  # it ran: nobody knows of it now
            elif void:
                if may_act:
                    yield self._say(copy, order, "crash", result=GONE, reason="it was not started in time")
            elif may_act:
                yield from self._begin(copy, order, generation, 0, may_act)
        elif kept.ended is None:
            yield from self._while_it_runs(now_ms, copy, order, generation.spec, kept, may_act)
        else:
            yield from self._when_it_ended(now_ms, copy, order, generation, kept, kept.ended, may_act)

    def _begin(self, copy: Copy, order: Ordered, generation: GenerationSpec, number: int, may_act: bool) -> Iterator[Act]:
        """Once all that it needs is there. What cannot be had is an end of this attempt: the next may be placed elsewhere."""
        making = self.making.get(copy) if needs_preparing(generation.spec.template) else _NOTHING_TO_MAKE
        if making is None or (making.is_over and making.number < number and reads(generation.spec.template)):
            # What it reads may have changed since: each start has it as it is by then.
            yield Prepare(copy, order.replica, generation, number)
        elif making.prepared is not None:
            yield Start(copy, order.replica, generation, number)
        elif making.failed and may_act:
            yield self._say(copy, order, "crash", result=NOT_STARTED, reason=making.failed)

    def _void(self, now_ms: int, copy: Copy, generation: GenerationSpec) -> bool:
        """Was there a silence, since its `start` was asked for, after which the scope may have given it up?"""
        fence = fence_ms(generation)
        if not fence:
            return False
        asked_ms = self.course(copy).asked_ms
        return asked_ms is None or self._silent_since(asked_ms, now_ms, fence)

    def _silent_since(self, since_ms: int, now_ms: int, fence: int) -> bool:
        later_ms = now_ms
        for at_ms in reversed(self._renewals):
            if later_ms <= since_ms:
                return False
            if later_ms - at_ms >= fence:
                return True
            later_ms = at_ms
        return False

    def _while_it_runs(
        self, now_ms: int, copy: Copy, order: Ordered, spec: WorkloadSpec, kept: Begun, may_act: bool
    ) -> Iterator[Act]:
        course, phase = self.course(copy), order.replica.status.phase
        grace_ms = int(spec.template.stop_grace)
        until_ms = kept.since_ms + int(spec.timeout)
        if spec.timeout and now_ms >= until_ms:
            yield End(copy, grace_ms, TIMEOUT)
            return
        if spec.timeout:
            self._wake_at(copy.key, until_ms)
        health = course.health if course.health is not None and course.health.of == kept.number else None
        if health is not None and health.is_dead:
            yield End(copy, grace_ms, UNWELL)
            return
        started = not spec.template.probes.start or (health is not None and health.has_started)
        ready = not spec.template.probes.ready or (health is not None and health.is_ready)
        if not may_act or not kept.pid:
            return
        if phase is Phase.STARTING and started:
            yield self._say(copy, order, "run", ports=kept.ports)
        elif phase is Phase.RUNNING and spec.type != "job" and ready and started:
            yield self._say(copy, order, "ready")
        elif phase in (Phase.READY, Phase.SERVING) and health is not None and health.is_unready:
            yield self._say(copy, order, "unready", reason=health.said)

    def _when_it_ended(
        self, now_ms: int, copy: Copy, order: Ordered, generation: GenerationSpec, kept: Begun, ended: Ended, may_act: bool
    ) -> Iterator[Act]:
        spec, phase = generation.spec, order.replica.status.phase
        again = spec.template.restart
        when = again.when or ("never" if spec.type == "job" else "always")
        pause_ms, fence = None, fence_ms(generation)
        given_up = bool(fence) and self._silent_since(kept.since_ms, now_ms, fence)
        if kept.why not in (TIMEOUT, SCRATCH_FULL) and not kept.fenced and not kept.failed and not given_up:
            pause_ms = restart_after_ms(
                when, failed=_result(kept, ended) != OK, restarts=kept.number, ran_ms=kept.ended_ms - kept.since_ms,
                backoff_ms=int(again.backoff), backoff_max_ms=int(again.backoff_max), limit=again.limit,
            )  # fmt: skip
        if pause_ms is None:
            yield from self._over(copy, order, spec, kept, ended, may_act)
        elif phase in (Phase.READY, Phase.SERVING):
            if may_act:
                yield self._say(copy, order, "unready", reason=f"it ended ({_result(kept, ended)}) and is started again")
        elif fence and self._seen < self._held_from:
            self._wake_at(copy.key, now_ms + self.tempo.beat_ms)
        elif now_ms >= kept.ended_ms + pause_ms:
            yield from self._begin(copy, order, generation, kept.number + 1, may_act)
        else:
            self._wake_at(copy.key, kept.ended_ms + pause_ms)

    def _over(
        self, copy: Copy, order: Ordered, spec: WorkloadSpec, kept: Begun | None, ended: Ended, may_act: bool
    ) -> Iterator[Act]:
        """The attempt has come to its end."""
        if not may_act:
            return
        phase, result = order.replica.status.phase, _result(kept, ended)
        if result != OK:
            yield self._say(copy, order, "crash", result=result, reason=self._reason(copy, spec, kept, result))
        elif phase is Phase.SERVING:
            yield self._say(copy, order, "unready", reason="it ended")
        else:
            yield self._say(copy, order, "finish", result=OK)

    def _reason(self, copy: Copy, spec: WorkloadSpec, kept: Begun | None, result: str) -> str:
        """Why it ended as it did, for people."""
        if kept is None:
            return ""
        if kept.failed:
            return f"{kept.failed}; {kept.cure}"
        if kept.fenced:
            return "nobody answered its agent for longer than its fence"
        if result == OOM:
            return f"it used all the memory that it may take; ask for more than {_memory(spec)} in template.resources"
        if result == SCRATCH_FULL:
            return "it kept more in a scratch volume than its size; keep less there, or raise the size in template.volumes"
        if result == TIMEOUT:
            return f"it ran for longer than its timeout of {spec.timeout}"
        health = self.course(copy).health
        return health.said if result == UNWELL and health is not None else ""

    def _wake_at(self, key: str, at_ms: int) -> None:
        self.wakes[key] = min(at_ms, self.wakes.get(key, at_ms))

    def _say(
        self,
        copy: Copy,
        order: Ordered,
        transition: str,
        *,
        result: str = "",
        reason: str = "",
        ports: Mapping[str, int] | None = None,
    ) -> Say:
        return Say(copy, Move(copy.key, order.revision, transition, copy.attempt, result, reason[:500], dict(ports or {})))


_NOTHING_TO_MAKE: Final = Making()
_NOTHING_TO_MAKE.prepared = NOTHING


def _result(kept: Begun | None, ended: Ended) -> str:
    if kept is not None and kept.failed:
        return NOT_STARTED
    return kept.why if kept is not None and kept.why else result_of(ended)


def _memory(spec: WorkloadSpec) -> str:
    return str(spec.template.resources.written().get("memory", "nothing"))
