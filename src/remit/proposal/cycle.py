"""Scheduling cycle (pure): applies view changes, takes work from the backlog, places it, and handles verdicts.

No I/O and no clock: see scheduler.py.

A cycle processes the changes of the view, takes the next replicas from the backlog, places them on the view's columns, and
returns claims. Claimed placements are assumed at once, so the next cycle does not wait for the verdicts.

A refused claim is not repeated as it was. The authority decided on data that this view had not seen, and the refusal carries
the revision of that data: the replica is held until the view has reached that revision, and is then placed on current data.

A verdict applies only to the claim it answers. A replica that changed, disappeared or was claimed again in the meantime is
not affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, cast

import numpy as np

from remit.law.overrides import Instant
from remit.model.claims import Accepted, AnyClaim, Bind, Code, Evidence, RecordDecision, BindGang, Move, Refused, Reserve, Verdict
from remit.observation.replica_table import PENDING, RESERVED
from remit.observation.scheduler_view import View
from remit.proposal.attempts import Attempt, Attempts, QueueKey, AttemptShortage, event_names
from remit.proposal.metrics import CoverageMark, OnMark, ignore_mark
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES, OverrideFilter, locality
from remit.proposal.placement.fragmentation import Fragmentation
from remit.proposal.placement.fragmentation_model import Demand
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import Filter, Score
from remit.proposal.placement.preemption_candidates import VictimRateLimit, VictimSelector
from remit.proposal.proposals import InFlightClaim, DecisionRecorder, HeldReplica, Proposal
from remit.proposal.proposals import DecisionOutcome as Word
from remit.proposal.queue.backlog import Backlog
from remit.proposal.queue.class_queues import ClassQueue
from remit.proposal.queue.fair_share import FairShareLedger
from remit.proposal.queue.wakeups import WakeupMatcher
from remit.proposal.unreported import UnreportedReplicas

HELD_MS_MAX: Final = 60_000
"""How long a refused replica is held for the view to catch up; after that its queue backs off. The authority rejects evidence
of that age in any case.
"""

UNRESERVE: Final = "unreserve"
DETAIL_MAX: Final = 500
RESERVATION_STILL_VALID: Final = frozenset((Code.VICTIMS, Code.REVISION, Code.STALE_EVIDENCE, Code.STALE_EPOCH, Code.LEASE_EXPIRED))
"""Refusals of a bind that leave its reservation valid, so the bind is retried."""

SCARCE: Final = frozenset((AttemptShortage.ROOM, AttemptShortage.QUOTA))
TERM_OVER: Final = frozenset((Code.STALE_EPOCH, Code.LEASE_EXPIRED, Code.ROLE))
"""Refusals that mean this scheduler's term is over."""

_SLACK: Final = 1_024

Jitter = Callable[[int], int]


class Cycle:
    """Scheduling state for one term of a scheduler; `term` becomes part of the names of its decision records."""

    def __init__(
        self,
        view: View,
        lot: Jitter,
        term: str,
        *,
        filters: Sequence[Filter] = (),
        scores: Sequence[Score] = DEFAULT_SCORES,
        pace: VictimRateLimit = VictimRateLimit(),
        tell: OnMark = ignore_mark,
    ) -> None:
        self.view = view
        self._lot, self._told = lot, tell
        self._filters, self._scores = tuple(filters), tuple(scores)
        self.steering = OverrideFilter()
        self.decisions = DecisionRecorder(view, term)
        self.demand = Demand()
        """Observed demand by shape during this term. It survives a relist of the view."""
        self.victims = VictimSelector(pace)
        self.over = False
        """Whether a refusal has shown that the term is over."""
        self.resigned = False
        self._proposals = 0
        self._begin()

    def _begin(self) -> None:
        """Resets all state derived from the previous view."""
        view = self.view
        self.backlog = Backlog(self._lot)
        self.shares = FairShareLedger({})
        self._capacity_at = -1
        self.fragmentation = Fragmentation(view.columns, self.demand)
        scores = (*self._scores, locality(view.columns, view.things.hints), self.fragmentation.score)
        self.kernel = Kernel(view.columns, view.peers, filters=(self.steering.filter, *self._filters), scores=scores)
        self._attempts = Attempts(view, self.kernel, self.backlog, self.victims, self.decisions, self.steering, self._told)
        self._waking = WakeupMatcher(self.kernel, self._attempts.class_of_line)
        self.victims.forget()
        self._asked: dict[int, InFlightClaim] = {}
        """By slot, claims whose verdict is pending, or known but not visible in the view yet."""
        self._held: dict[int, HeldReplica] = {}
        self._refusals: dict[tuple[str, str, str], list[int]] = {}
        """Slots by tenant, code and detail: refusals still to be recorded."""
        self._override_ms: int | None = None
        self._ready: dict[int, None] = {}
        self._given_up: dict[int, None] = {}
        """Reservations that could not be bound or may not be bound any more; their replicas must be placed again."""
        self._untold = UnreportedReplicas()
        self._queued = False

    # -- view changes ------------------------------------------------------------------------------------------------------

    def hear(self, now_ms: int, authority: Instant | None) -> None:
        """Applies all changes of the view since the last call, before anything is attempted."""
        view = self.view
        if view.expire(now_ms):
            self._told(CoverageMark.EXPIRED)
        if self.kernel.columns is view.columns:
            self._let_go(now_ms)  # before taking the changes: a released replica frees capacity that other queues wait for
        news = view.take_news()
        if news.anew or self.kernel.columns is not view.columns:
            self._begin()
        if self.steering.renew(view.things.overrides.values(), authority):
            self.kernel.forget_all()
            self._reline_all(now_ms)
            self.backlog.happened(("override",), view.version)
        until_ms = self.steering.effects.until_ms
        self._override_ms = None if until_ms is None or authority is None else now_ms + max(1, until_ms - authority[1])
        if not self._queued:
            self._queued = True
            news.pending.update(dict.fromkeys(view.replicas.pending()))
            news.ready.update(dict.fromkeys(np.flatnonzero(view.replicas.column("phase") == RESERVED).tolist()))
        self.backlog.version = max(self.backlog.version, view.version)
        for slot in news.settled:
            if slot not in news.pending or not self._is_asked(slot):
                self._drop(slot)
        self._arrive(news.pending, now_ms)
        self._ready.update(news.ready)
        self._cured(list(news.cures), now_ms)

    def _is_asked(self, slot: int, number: int = 0) -> bool:
        """Whether the replica has a pending claim for its current revision (in proposal `number`, if given)."""
        if self.kernel.columns is not self.view.columns:
            return False  # the view was relisted, and old slots are invalid
        asked = self._asked.get(slot)
        return asked is not None and asked.at == self.view.replicas.at.revision[slot] and number in (0, asked.number)

    def _drop(self, slot: int) -> None:
        self.backlog.remove(slot)
        self._untold.goes(slot)
        self._asked.pop(slot, None)
        self._held.pop(slot, None)

    def _arrive(self, slots: Iterable[int], now_ms: int) -> None:
        """Queues replicas and counts their shapes as demand."""
        by_shape: dict[int, int] = {}
        for slot in slots:
            key = self._queue(slot, now_ms)
            if key is not None:
                by_shape[key.shape] = by_shape.get(key.shape, 0) + 1
        for shape, count in by_shape.items():
            self.demand.arrived(self.view.shapes.ask(shape), count)

    def _queue(self, slot: int, now_ms: int) -> QueueKey | None:
        """Adds a replica to the queue of its class; returns the queue's key, or None if the replica was queued already."""
        line = self.backlog.line_of(slot)
        if line is None:
            return self._join(slot, now_ms)
        if line.in_flight(slot) and slot not in self.view.assumed and slot not in self._held:
            self._return(slot, now_ms)
        return None

    def _join(self, slot: int, arrived_ms: int) -> QueueKey:
        key = self._attempts.key(slot)
        line = self.backlog.add(key, lambda: self._attempts.line(key, slot, arrived_ms), slot, arrived_ms)
        if key.gang:
            self.backlog.happened(("member", key), self.backlog.version)
        self._untold.joins(slot, line)
        return key

    def _reline_all(self, now_ms: int) -> None:
        """Recomputes the queue of every replica, because data that separates queues has changed (priorities, overrides)."""
        self._attempts.forget()
        slots = [cast(int, slot) for line in self.backlog.lines() for slot in line.members()]
        self._reline(slots, now_ms)

    def _reline(self, slots: Iterable[int], now_ms: int) -> None:
        """Moves replicas whose queue key has changed. Members in flight move when they return."""
        moving = []
        for slot in slots:
            line = self.backlog.line_of(slot)
            if line is not None and not line.in_flight(slot) and self._attempts.key(slot) != line.key:
                moving.append((line.arrived_ms(slot), slot))
        for arrived_ms, slot in sorted(moving):
            self.backlog.remove(slot)
            self._join(slot, arrived_ms)

    def _cured(self, cures: Sequence[tuple[str | int, ...]], now_ms: int) -> None:
        """Wakes the queues that wait for these events, and no others."""
        happened, version = self.backlog.happened, self.view.version
        room = [int(cure[1]) for cure in cures if cure[0] == "room"]
        nodes = [int(cure[1]) for cure in cures if cure[0] == "node"]
        if room:
            happened(("room",), version, self._waking.fits_on(room))
        if nodes:
            happened(("node",), version, self._waking.open_on(nodes))
        if hinted := [str(cure[1]) for cure in cures if cure[0] == "hinted"]:
            self._reline(self._attempts.waiting_of(hinted), now_ms)
        closed = [f"{cure[1]}/{cure[2]}" for cure in cures if cure[0] == "workload"]
        if closed:
            self._reline(self._attempts.closed_to(closed), now_ms)
        for tenant in dict.fromkeys(self._payer(str(cure[1])) for cure in cures if cure[0] in ("quota", "grant")):
            happened(("quota", tenant), version)
        for cure in cures:
            match cure[0]:
                case "room" | "node" | "quota" | "grant" | "hinted":
                    continue
                case "priority":
                    self._reline_all(now_ms)
                case "domains":
                    happened(("node",), version, self._waking.spreads)
                case _:
                    happened(cure, version)

    def _payer(self, name: str) -> str:
        """The tenant of a ledger. Work that waits for quota can be unblocked by any ledger of its tenant, including a new one.
        """
        ledger = self.view.ledgers.get(name)
        return "" if ledger is None else ledger.tenant

    def _let_go(self, now_ms: int) -> None:
        """Returns held replicas to their queues once the view has reached the revision that their verdict was based on."""
        failed: dict[ClassQueue, str] = {}
        late: dict[ClassQueue, str] = {}
        back: Counter[ClassQueue] = Counter()
        for slot, held in list(self._held.items()):
            seen = self.view.revision >= held.revision
            if not seen and now_ms < held.until_ms:
                continue
            del self._held[slot]
            if not self._is_asked(slot, held.number):
                continue
            phase = self.view.replicas.at.phase[slot]
            if phase == RESERVED:
                del self._asked[slot]
                (self._ready if held.again else self._given_up)[slot] = None
            elif phase == PENDING:
                self.view.forget(slot)
                line = self._return(slot, now_ms)
                if line is not None and held.refused:
                    (failed if seen else late)[line] = held.refused
                    back[line] += 1
        for line, refused in failed.items():
            # One failure per queue, however many of its replicas were refused. The view now contains what the authority decided
            # on. If they still disagree only time can help, and not the event that the rest of the queue waits for: a refused
            # claim gives its capacity back, which is that very event.
            self.backlog.failed(line, refused, now_ms)
        for line, refused in late.items():
            self.backlog.back_off(line, refused, now_ms)
        for line, count in back.items():
            if line.queued > count:
                self._untold.refused(line, now_ms)

    def _return(self, slot: int, now_ms: int) -> ClassQueue | None:
        """Returns a replica in flight to its queue, or to another one if its key has changed; None if it did not return to the
        same queue.
        """
        self._asked.pop(slot, None)
        line = self.backlog.line_of(slot)
        if line is None or not line.in_flight(slot):
            return None
        if self._attempts.key(slot) == line.key:
            self.backlog.returned(slot)
            return line
        arrived_ms = line.arrived_ms(slot)
        self.backlog.remove(slot)
        self._join(slot, arrived_ms)
        return None

    # -- proposals ---------------------------------------------------------------------------------------------------------

    def propose(self, now_ms: int, limit: int) -> Proposal:
        """Claims to submit now; empty if nothing is to be placed."""
        view, at = self.view, self.view.replicas.at
        self._proposals += 1
        proposal = Proposal(self._proposals, [], [], Evidence(view.revision, view.age_ms()))
        self.victims.begin(now_ms, view)
        self.fragmentation.renew()
        self._confirm(proposal)
        self.backlog.ripen(now_ms)
        if self.backlog.active:
            self._share_out(now_ms)
            runs = self.backlog.take(limit, now_ms, self.shares)
            bound: dict[ClassQueue, tuple[Attempt, dict[int, str]]] = {}
            for attempt in self._tried(cast(list[tuple[ClassQueue, list[int]]], runs), now_ms):
                where = bound.setdefault(attempt.line, (attempt, {}))[1]
                self._claim(proposal, attempt, where, now_ms)
            for attempt, where in bound.values():
                for explain in self._attempts.explain(attempt, where, Word("bound")):
                    proposal.add(explain)
        for explain in self._tell(now_ms):
            proposal.add(explain)
        for slots in proposal.slots:
            for slot in slots:
                self._asked[slot] = InFlightClaim(proposal.number, at.revision[slot])
        if len(self._asked) > 2 * len(self.backlog) + _SLACK:
            self._asked = {slot: asked for slot, asked in self._asked.items() if self._is_asked(slot)}
        return proposal

    def next_ms(self) -> int | None:
        """When to run again if no change arrives."""
        times = [*(held.until_ms for held in self._held.values()), *self._untold.times_ms()]
        times += [ms for ms in (self.backlog.next_ms(), self._override_ms) if ms is not None]
        return min(times, default=None)

    def _share_out(self, now_ms: int) -> None:
        """Updates the usage of each tenant for fair sharing; assumed placements count."""
        view = self.view
        columns = view.columns
        if self._capacity_at != columns.restood.count:
            self._capacity_at = columns.restood.count
            self.shares.resize(self._attempts.capacity())
        used = self._attempts.held()
        for tenant in self.backlog.tenants():
            spec = view.accounts.tenants.get(tenant)
            self.shares.weigh(tenant, 1 if spec is None else spec.spec.weight)
            held = used.get(tenant, {})
            before = self.shares.use(tenant)
            for sign in (1, -1):
                moved = [(name, sign * (held.get(name, 0) - before.get(name, 0))) for name in {**held, **before}]
                self.shares.charge(tenant, tuple((name, count) for name, count in moved if count > 0), sign, now_ms)

    def _tried(self, runs: Sequence[tuple[ClassQueue, list[int]]], now_ms: int) -> list[Attempt]:
        """Attempts all runs, first with all members of a queue at once, as if there were enough for all.

        If capacity or quota turns out to be short, these attempts are undone and each turn is attempted in order, because
        the order of turns decides who gets the rest. Preemption happens within a turn as well; otherwise later turns would
        take the capacity that an earlier turn relies on.
        """
        lines: dict[ClassQueue, list[int]] = {}
        for line, slots in runs:
            lines.setdefault(line, []).extend(slots)
        if len(lines) < len(runs):
            tried = [self._attempts.attempt(line, slots, now_ms) for line, slots in lines.items()]
            if not any(one.short in SCARCE for one in tried):
                return tried
            self._told(CoverageMark.REDONE)
            for one in reversed(tried):
                self._attempts.undo(one)
        ended: dict[ClassQueue, Attempt] = {}
        made: list[Attempt] = []
        for line, slots in runs:
            one = ended.get(line)
            if one is not None:
                # Nothing was freed since the earlier turn of this queue, so this turn ends with the same result.
                one.slots.extend(() if one.whole else slots)
                if one.forced and len(one.forced) == len(one.slots) - len(slots) - len(one.found.rows):
                    self._attempts.force(one, slots)
                continue
            # A gang is attempted complete in its first turn, including members beyond the batch limit.
            whole = self._attempts.is_gang(line)
            one = self._attempts.attempt(line, lines[line] if whole else slots, now_ms)._replace(whole=whole)
            if one.short is AttemptShortage.ROOM:
                self._attempts.force(one, one.slots[len(one.found.rows) :])
            made.append(one)
            if whole or one.short is not AttemptShortage.NOTHING:
                ended[line] = one
        return made

    def _claim(self, proposal: Proposal, one: Attempt, where: dict[int, str], now_ms: int) -> None:
        """Adds the claims that result from one attempt; records the node of each placed slot in `where`."""
        view, keys = self.view, self.view.replicas.keys
        at = view.replicas.at
        binds = [
            Bind(keys[slot], at.revision[slot], self.kernel.name(row), one.purse.name, dict(devices), one.policy)
            for slot, row, devices in one.placed()
        ]
        placed = one.slots[: len(binds)]
        if one.gang and binds:
            proposal.add(BindGang(tuple(binds)), *placed)
        else:
            for slot, bind in zip(placed, binds, strict=True):
                proposal.add(bind, slot)
        where.update({slot: bind.node for slot, bind in zip(placed, binds, strict=True)})
        for slot, claim in one.forced.items():
            proposal.add(claim, slot)
        for explain in self._attempts.explain_forced(one):
            proposal.add(explain)
        rest = [slot for slot in one.slots[len(binds) :] if slot not in one.forced]
        for slot in rest:
            self.backlog.returned(slot)
        if rest or (one.line.queued and one.short is not AttemptShortage.NOTHING and not one.forced):
            explains = self._attempts.put_aside(one, rest, now_ms)
            for explain in explains:
                proposal.add(explain)
            self._untold.tried(one.line, rest, bool(explains), now_ms)

    def _confirm(self, proposal: Proposal) -> None:
        """Binds reservations whose victims are gone."""
        view = self.view
        at = view.replicas.at
        ready, self._ready = list(self._ready), {}
        for slot in ready:
            if at.phase[slot] != RESERVED or not view.vacated(slot) or self._is_asked(slot):
                continue
            if self._attempts.forbidden(slot):
                self._given_up[slot] = None
                continue
            held = view.replicas.held(slot)
            node = self.kernel.name(at.node[slot])
            proposal.add(Bind(view.replicas.keys[slot], at.revision[slot], node, held.grants[0], dict(held.devices)), slot)
        for slot in self._given_up:
            if at.phase[slot] == RESERVED and slot not in self._ready:
                proposal.add(Move(view.replicas.keys[slot], at.revision[slot], UNRESERVE, reason="the reservation could not be bound"), slot)
        self._given_up = {}

    def _tell(self, now_ms: int) -> Iterable[RecordDecision]:
        for (tenant, code, detail), slots in self._refusals.items():
            yield from self.decisions.records(tenant, slots, Word("refused", code, detail), attempt=1)
        self._refusals = {}
        for line, slots in self._untold.take(now_ms, self.backlog.line_of).items():
            if line.wait is not None:
                word = Word("waiting", line.wait.reason, "waits with other replicas of equal requirements", event_names(line.wait.cures))
                yield from self.decisions.records(line.tenant, slots, word, attempt=line.attempts)

    # -- verdicts ----------------------------------------------------------------------------------------------------------

    def learn(self, proposal: Proposal, verdicts: Sequence[Verdict], now_ms: int) -> None:
        """Handles the verdicts of a proposal. Accepted claims only need to become visible in the view; refused replicas are
        held until the view has reached the revision that the refusal was based on.
        """
        if self.resigned:
            return
        until_ms = now_ms + HELD_MS_MAX
        for claim, slots, verdict in zip(proposal.claims, proposal.slots, verdicts, strict=True):
            match verdict:
                case Accepted(revision=revision):
                    if isinstance(claim, BindGang):
                        for slot in slots:
                            if self._is_asked(slot, proposal.number):
                                self._held[slot] = HeldReplica(proposal.number, revision, until_ms, "")
                case Refused() as refused:
                    self.over = self.over or refused.code in TERM_OVER
                    if slots:
                        self._refused(proposal, claim, slots, refused, until_ms)

    def _refused(self, proposal: Proposal, claim: AnyClaim, slots: Sequence[int], refused: Refused, until_ms: int) -> None:
        self._told(CoverageMark.REFUSED)
        revision = max(refused.revision, proposal.evidence.revision)
        if refused.code is Code.STALE_EVIDENCE:
            revision = self.view.revision + 1
        if isinstance(claim, Reserve):
            self.victims.spare(claim.victims, self.view)
        held = HeldReplica(proposal.number, revision, until_ms, refused.code, again=refused.code in RESERVATION_STILL_VALID)
        for slot in slots:
            if self._is_asked(slot, proposal.number):
                self._held[slot] = held
                tenant = self.view.shapes.tenant_of(self.view.replicas.at.generation[slot])
                self._refusals.setdefault((tenant, refused.code, refused.detail[:DETAIL_MAX]), []).append(slot)

    def unanswered(self, proposal: Proposal, now_ms: int) -> None:
        """Handles a proposal of which nothing was applied and nothing will be: its replicas are tried again after a backoff."""
        if self.resigned:
            return
        lines: dict[ClassQueue, None] = {}
        for claim, slots in zip(proposal.claims, proposal.slots, strict=True):
            if isinstance(claim, Reserve):
                self.victims.spare(claim.victims, self.view)
            for slot in slots:
                if not self._is_asked(slot, proposal.number):
                    continue
                if self.view.replicas.at.phase[slot] == RESERVED:
                    del self._asked[slot]
                    self._ready[slot] = None
                    continue
                self.view.forget(slot)
                line = self._return(slot, now_ms)
                if line is not None:
                    lines[line] = None
        for line in lines:
            self.backlog.back_off(line, Code.FAULT, now_ms)

    def resign(self) -> None:
        """Ends the term: drops all assumptions, and ignores verdicts that arrive later."""
        self.resigned = True
        for slot in list(self.view.assumed):
            self.view.forget(slot)
