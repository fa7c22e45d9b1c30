"""Scheduling cycle (pure): news, backlog, kernel, claims; learns from verdicts.

One scheduler's mind; no I/O and no clock: see scheduler.py.

A cycle hears the news, takes from the backlog whose turn it is, places it on the view's columns, and answers with claims. What
it claims it assumes from then on, so that the next cycle need not wait for the answer.

A refusal is never met with the same claim again. It was decided on something that this view had not seen, and it says at which
revision: until the view has reached that, the replica is held out of its line; then the view itself knows why.

An answer counts only for the claim that it is about. Whoever changed, went, or was claimed anew meanwhile is not touched by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, cast

import numpy as np

from remit.law.overrides import Instant
from remit.model.claims import Accepted, AnyClaim, Bind, Code, Evidence, Explain, Ganged, Move, Refused, Reserve, Verdict
from remit.observation.replica_table import PENDING, RESERVED
from remit.observation.scheduler_view import View
from remit.proposal.attempts import Attempt, Attempts, Key, Short, words
from remit.proposal.metrics import Path, Tell, untold
from remit.proposal.placement.builtin_plugins import DEFAULT, Steering, locality
from remit.proposal.placement.fragmentation import Fragmentation
from remit.proposal.placement.fragmentation_model import Demand
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import Filter, Score
from remit.proposal.placement.preemption_candidates import Pace, Victims
from remit.proposal.proposals import Asked, Decisions, Held, Proposal
from remit.proposal.proposals import Verdict as Word
from remit.proposal.queue.backlog import Backlog
from remit.proposal.queue.class_queues import Line
from remit.proposal.queue.fair_share import Shares
from remit.proposal.queue.wakeups import Waking
from remit.proposal.unreported import Untold

HELD_MS_MAX: Final = 60_000
"""How long a refused replica is held for the view to catch up; then its line backs off all the same. A view that old is not
believed by the authority either.
"""

UNRESERVE: Final = "unreserve"
DETAIL_MAX: Final = 500
NOT_ITS_FAULT: Final = frozenset((Code.VICTIMS, Code.REVISION, Code.STALE_EVIDENCE, Code.STALE_EPOCH, Code.LEASE_EXPIRED))
"""Refusals of a bind after which its reservation is as good as before."""

SCARCE: Final = frozenset((Short.ROOM, Short.QUOTA))
OVER: Final = frozenset((Code.STALE_EPOCH, Code.LEASE_EXPIRED, Code.ROLE))
"""Refusals of the claimant: its term is over."""

_SLACK: Final = 1_024

Lot = Callable[[int], int]


class Cycle:
    """For one term of a scheduler: `term` is in the names of its records."""

    def __init__(
        self,
        view: View,
        lot: Lot,
        term: str,
        *,
        filters: Sequence[Filter] = (),
        scores: Sequence[Score] = DEFAULT,
        pace: Pace = Pace(),
        tell: Tell = untold,
    ) -> None:
        self.view = view
        self._lot, self._told = lot, tell
        self._filters, self._scores = tuple(filters), tuple(scores)
        self.steering = Steering()
        self.decisions = Decisions(view, term)
        self.demand = Demand()
        """What sort of work came in this term. It holds whatever becomes of the view."""
        self.victims = Victims(pace)
        self.over = False
        """Was it said that the term is over?"""
        self.resigned = False
        self._proposals = 0
        self._begin()

    def _begin(self) -> None:
        """Nothing from before means anything now."""
        view = self.view
        self.backlog = Backlog(self._lot)
        self.shares = Shares({})
        self._capacity_at = -1
        self.fragmentation = Fragmentation(view.columns, self.demand)
        scores = (*self._scores, locality(view.columns, view.things.hints), self.fragmentation.score)
        self.kernel = Kernel(view.columns, view.peers, filters=(self.steering.filter, *self._filters), scores=scores)
        self._attempts = Attempts(view, self.kernel, self.backlog, self.victims, self.decisions, self.steering, self._told)
        self._waking = Waking(self.kernel, self._attempts.class_of_line)
        self.victims.forget()
        self._asked: dict[int, Asked] = {}
        """By slot: whose answer is awaited, or was given and is not seen yet."""
        self._held: dict[int, Held] = {}
        self._refusals: dict[tuple[str, str, str], list[int]] = {}
        """Slots by tenant, code and detail: what is to be recorded of refusals."""
        self._override_ms: int | None = None
        self._ready: dict[int, None] = {}
        self._given_up: dict[int, None] = {}
        """Reservations that could not be bound, or must not be any more: their replicas are to be placed anew."""
        self._untold = Untold()
        self._queued = False

    # -- hearing -----------------------------------------------------------------------------------------------------------

    def hear(self, now_ms: int, authority: Instant | None) -> None:
        """Everything that was observed since: applied, counted and told before anything is tried."""
        view = self.view
        if view.expire(now_ms):
            self._told(Path.EXPIRED)
        if self.kernel.columns is view.columns:
            self._let_go(now_ms)  # before the news are taken: what is given up here is news to others
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
        """Is it claimed, as it stands (in this proposal)?"""
        if self.kernel.columns is not self.view.columns:
            return False  # everything was listed anew, and slots from before mean nothing
        asked = self._asked.get(slot)
        return asked is not None and asked.at == self.view.replicas.at.revision[slot] and number in (0, asked.number)

    def _drop(self, slot: int) -> None:
        self.backlog.remove(slot)
        self._untold.goes(slot)
        self._asked.pop(slot, None)
        self._held.pop(slot, None)

    def _arrive(self, slots: Iterable[int], now_ms: int) -> None:
        """Queue them, and count what sort of work it is that comes."""
        by_shape: dict[int, int] = {}
        for slot in slots:
            key = self._queue(slot, now_ms)
            if key is not None:
                by_shape[key.shape] = by_shape.get(key.shape, 0) + 1
        for shape, count in by_shape.items():
            self.demand.arrived(self.view.shapes.ask(shape), count)

    def _queue(self, slot: int, now_ms: int) -> Key | None:
        """Into the line of its like; answers which, unless it is there."""
        line = self.backlog.line_of(slot)
        if line is None:
            return self._join(slot, now_ms)
        if line.in_flight(slot) and slot not in self.view.assumed and slot not in self._held:
            self._return(slot, now_ms)
        return None

    def _join(self, slot: int, arrived_ms: int) -> Key:
        key = self._attempts.key(slot)
        line = self.backlog.add(key, lambda: self._attempts.line(key, slot, arrived_ms), slot, arrived_ms)
        if key.gang:
            self.backlog.happened(("member", key), self.backlog.version)
        self._untold.joins(slot, line)
        return key

    def _reline_all(self, now_ms: int) -> None:
        """What tells work apart has changed."""
        self._attempts.forget()
        slots = [cast(int, slot) for line in self.backlog.lines() for slot in line.members()]
        self._reline(slots, now_ms)

    def _reline(self, slots: Iterable[int], now_ms: int) -> None:
        """Into other lines, whoever no longer belongs where he stands; whoever is in flight, when he comes back."""
        moving = []
        for slot in slots:
            line = self.backlog.line_of(slot)
            if line is not None and not line.in_flight(slot) and self._attempts.key(slot) != line.key:
                moving.append((line.arrived_ms(slot), slot))
        for arrived_ms, slot in sorted(moving):
            self.backlog.remove(slot)
            self._join(slot, arrived_ms)

    def _cured(self, cures: Sequence[tuple[str | int, ...]], now_ms: int) -> None:
        """Wake whoever waited for this, and nobody else."""
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
        """Whose ledger it is. Whoever waits for quota may be helped by any of its tenant's, also by one that is new."""
        ledger = self.view.ledgers.get(name)
        return "" if ledger is None else ledger.tenant

    def _let_go(self, now_ms: int) -> None:
        """Whoever was held until the view has seen what an answer was based on goes back to its line now."""
        failed: dict[Line, str] = {}
        late: dict[Line, str] = {}
        back: Counter[Line] = Counter()
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
            # However many of it were. The view knows now what the authority knew; if they differ again, time may help, and
            # nothing else: not even the cure that the rest of the line waits for, since what was refused gives back just that.
            self.backlog.failed(line, refused, now_ms)
        for line, refused in late.items():
            self.backlog.back_off(line, refused, now_ms)
        for line, count in back.items():
            if line.queued > count:
                self._untold.refused(line, now_ms)

    def _return(self, slot: int, now_ms: int) -> Line | None:
        """From flight to its line, or into another if it belongs there by now; None if it was in none."""
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

    # -- proposing ---------------------------------------------------------------------------------------------------------

    def propose(self, now_ms: int, limit: int) -> Proposal:
        """What to claim now; nothing, if there is nobody whose turn it is."""
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
            bound: dict[Line, tuple[Attempt, dict[int, str]]] = {}
            for attempt in self._tried(cast(list[tuple[Line, list[int]]], runs), now_ms):
                where = bound.setdefault(attempt.line, (attempt, {}))[1]
                self._claim(proposal, attempt, where, now_ms)
            for attempt, where in bound.values():
                for explain in self._attempts.explain(attempt, where, Word("bound")):
                    proposal.add(explain)
        for explain in self._tell(now_ms):
            proposal.add(explain)
        for slots in proposal.slots:
            for slot in slots:
                self._asked[slot] = Asked(proposal.number, at.revision[slot])
        if len(self._asked) > 2 * len(self.backlog) + _SLACK:
            self._asked = {slot: asked for slot, asked in self._asked.items() if self._is_asked(slot)}
        return proposal

    def next_ms(self) -> int | None:
        """When to look again although nothing was heard."""
        times = [*(held.until_ms for held in self._held.values()), *self._untold.times_ms()]
        times += [ms for ms in (self.backlog.next_ms(), self._override_ms) if ms is not None]
        return min(times, default=None)

    def _share_out(self, now_ms: int) -> None:
        """What each tenant holds, for whose turn is next; what is assumed counts."""
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

    def _tried(self, runs: Sequence[tuple[Line, list[int]]], now_ms: int) -> list[Attempt]:
        """All members of a line at once, as if there were enough for everybody. If there is not, one turn after another:
        then it matters who comes first, and that is what the turns are for. Room is made by force in one's turn too: else
        those who come later would take what he was counting on.
        """
        lines: dict[Line, list[int]] = {}
        for line, slots in runs:
            lines.setdefault(line, []).extend(slots)
        if len(lines) < len(runs):
            tried = [self._attempts.attempt(line, slots, now_ms) for line, slots in lines.items()]
            if not any(one.short in SCARCE for one in tried):
                return tried
            self._told(Path.REDONE)
            for one in reversed(tried):
                self._attempts.undo(one)
        ended: dict[Line, Attempt] = {}
        made: list[Attempt] = []
        for line, slots in runs:
            one = ended.get(line)
            if one is not None:
                # What there was too little of has not become more since: it ends as its turn before did.
                one.slots.extend(() if one.whole else slots)
                if one.forced and len(one.forced) == len(one.slots) - len(slots) - len(one.found.rows):
                    self._attempts.force(one, slots)
                continue
            # A gang comes whole in its first turn, with those that it was given beyond the limit.
            whole = self._attempts.is_gang(line)
            one = self._attempts.attempt(line, lines[line] if whole else slots, now_ms)._replace(whole=whole)
            if one.short is Short.ROOM:
                self._attempts.force(one, one.slots[len(one.found.rows) :])
            made.append(one)
            if whole or one.short is not Short.NOTHING:
                ended[line] = one
        return made

    def _claim(self, proposal: Proposal, one: Attempt, where: dict[int, str], now_ms: int) -> None:
        """What comes of one attempt; `where` is to have each that found a place."""
        view, keys = self.view, self.view.replicas.keys
        at = view.replicas.at
        binds = [
            Bind(keys[slot], at.revision[slot], self.kernel.name(row), one.purse.name, dict(devices), one.policy)
            for slot, row, devices in one.placed()
        ]
        placed = one.slots[: len(binds)]
        if one.gang and binds:
            proposal.add(Ganged(tuple(binds)), *placed)
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
        if rest or (one.line.queued and one.short is not Short.NOTHING and not one.forced):
            explains = self._attempts.put_aside(one, rest, now_ms)
            for explain in explains:
                proposal.add(explain)
            self._untold.tried(one.line, rest, bool(explains), now_ms)

    def _confirm(self, proposal: Proposal) -> None:
        """Reservations whose victims have gone are bound as they were made."""
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
                proposal.add(Move(view.replicas.keys[slot], at.revision[slot], UNRESERVE, reason="it could not be bound"), slot)
        self._given_up = {}

    def _tell(self, now_ms: int) -> Iterable[Explain]:
        for (tenant, code, detail), slots in self._refusals.items():
            yield from self.decisions.records(tenant, slots, Word("refused", code, detail), attempt=1)
        self._refusals = {}
        for line, slots in self._untold.take(now_ms, self.backlog.line_of).items():
            if line.wait is not None:
                word = Word("waiting", line.wait.reason, "it waits with those that ask the same", words(line.wait.cures))
                yield from self.decisions.records(line.tenant, slots, word, attempt=line.attempts)

    # -- learning ----------------------------------------------------------------------------------------------------------

    def learn(self, proposal: Proposal, verdicts: Sequence[Verdict], now_ms: int) -> None:
        """Accepted ones need only be seen; refused ones come back once the view knows what they were refused on."""
        if self.resigned:
            return
        until_ms = now_ms + HELD_MS_MAX
        for claim, slots, verdict in zip(proposal.claims, proposal.slots, verdicts, strict=True):
            match verdict:
                case Accepted(revision=revision):
                    if isinstance(claim, Ganged):
                        for slot in slots:
                            if self._is_asked(slot, proposal.number):
                                self._held[slot] = Held(proposal.number, revision, until_ms, "")
                case Refused() as refused:
                    self.over = self.over or refused.code in OVER
                    if slots:
                        self._refused(proposal, claim, slots, refused, until_ms)

    def _refused(self, proposal: Proposal, claim: AnyClaim, slots: Sequence[int], refused: Refused, until_ms: int) -> None:
        self._told(Path.REFUSED)
        revision = max(refused.revision, proposal.evidence.revision)
        if refused.code is Code.STALE_EVIDENCE:
            revision = self.view.revision + 1
        if isinstance(claim, Reserve):
            self.victims.spare(claim.victims, self.view)
        held = Held(proposal.number, revision, until_ms, refused.code, again=refused.code in NOT_ITS_FAULT)
        for slot in slots:
            if self._is_asked(slot, proposal.number):
                self._held[slot] = held
                tenant = self.view.shapes.tenant_of(self.view.replicas.at.generation[slot])
                self._refusals.setdefault((tenant, refused.code, refused.detail[:DETAIL_MAX]), []).append(slot)

    def unanswered(self, proposal: Proposal, now_ms: int) -> None:
        """Nothing of this has happened, and nothing will under these ids: whoever was in it is tried again later."""
        if self.resigned:
            return
        lines: dict[Line, None] = {}
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
        """The term is over: what was assumed is no longer ours to assume, and what is answered yet teaches nothing."""
        self.resigned = True
        for slot in list(self.view.assumed):
            self.view.forget(slot)
