"""What should be claimed next, and what does an answer teach? One scheduler's mind; no I/O and no clock: see scheduler.py.

A cycle hears the news, takes from the backlog whose turn it is, places it on the view's columns, and answers with claims. What
it claims it assumes from then on, so that the next cycle need not wait for the answer.

A refusal is never met with the same claim again. It was decided on something that this view had not seen, and it says at which
revision: until the view has reached that, the replica is held out of its line; then the view itself knows why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple, cast

import numpy as np

from remit.law.overrides import Instant
from remit.model.claims import Accepted, AnyClaim, Bind, Code, Evidence, Explain, Ganged, Move, Refused, Verdict
from remit.observation.replicas import PENDING, RESERVED
from remit.observation.view import View
from remit.proposal.attempts import SAID_MS, Attempt, Attempts, Short, words
from remit.proposal.backlog import Backlog
from remit.proposal.decisions import Decisions
from remit.proposal.decisions import Verdict as Word
from remit.proposal.fairness import Shares
from remit.proposal.kernel import Kernel
from remit.proposal.lines import Line
from remit.proposal.paths import Path, Tell, untold
from remit.proposal.plugins import Filter, Score
from remit.proposal.scores import DEFAULT
from remit.proposal.steering import Steering
from remit.proposal.victims import Pace, Victims

HELD_MS_MAX: Final = 2_000
"""How long a refused replica is held for the view to catch up; then its line backs off all the same."""

RETELL_MS: Final = 45_000
"""A reason is at most a minute old: so it is said again, also of those whose line is tried by others of it."""
TELL_MAX: Final = 4_096
"""Of so many at once; of the others next time."""

UNRESERVE: Final = "unreserve"
OVER: Final = frozenset((Code.STALE_EPOCH, Code.LEASE_EXPIRED, Code.ROLE))
"""Refusals of the claimant: its term is over."""

Lot = Callable[[int], int]


class Proposal(NamedTuple):
    """Claims that travel together, the slots behind each, and what they were made from."""

    claims: list[AnyClaim]
    slots: list[tuple[int, ...]]
    evidence: Evidence

    def __bool__(self) -> bool:
        return bool(self.claims)

    def add(self, claim: AnyClaim, *slots: int) -> None:
        self.claims.append(claim)
        self.slots.append(slots)


class Held(NamedTuple):
    """Replicas that wait for the view to reach a revision."""

    revision: int
    until_ms: int
    slots: tuple[int, ...]
    refused: str
    """Why they were refused; empty if they were accepted, and only need to be seen."""


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
        self.victims = Victims(pace)
        self.over = False
        """Was it said that the term is over?"""
        self.resigned = False
        self._begin()

    def _begin(self) -> None:
        """Nothing from before means anything now."""
        view = self.view
        self.backlog = Backlog(self._lot)
        self.shares = Shares({})
        self._capacity_at = -1
        self.kernel = Kernel(view.columns, view.peers, filters=(self.steering.filter, *self._filters), scores=self._scores)
        self._attempts = Attempts(view, self.kernel, self.backlog, self.victims, self.decisions, self.steering, self._told)
        self._held: list[Held] = []
        self._ready: dict[int, None] = {}
        self._given_up: dict[int, None] = {}
        """Reservations that could not be bound: their replicas are to be placed anew."""
        self._untold: dict[int, None] = {}
        """Who stands in a line that waits and was not tried with it: the reason is theirs too, and is to be said."""
        self._retell: dict[Line, int] = {}
        """Of lines of which not everybody was told, or not this time: when all in them are to be."""
        self._queued = False

    # -- hearing -----------------------------------------------------------------------------------------------------------

    def hear(self, now_ms: int, authority: Instant | None) -> None:
        """Everything that was observed since: applied, counted and told before anything is tried."""
        view = self.view
        if view.expire(now_ms):
            self._told(Path.EXPIRED)
        news = view.take_news()
        if news.anew or self.kernel.columns is not view.columns:
            self._begin()
        if self.steering.renew(view.things.overrides.values(), authority):
            self.kernel.forget_all()
            self._requeue(now_ms)
            self.backlog.happened(("override",), view.version)
        if not self._queued:
            self._queued = True
            news.pending.update(dict.fromkeys(view.replicas.pending()))
            news.ready.update(dict.fromkeys(np.flatnonzero(view.replicas.column("phase") == RESERVED).tolist()))
        self.backlog.version = max(self.backlog.version, view.version)
        for slot in news.settled:
            self.backlog.remove(slot)
            self._untold.pop(slot, None)
        for slot in news.pending:
            self._queue(slot, now_ms)
        self._ready.update(news.ready)
        self._cured(list(news.cures), now_ms)
        self._let_go(now_ms)

    def _queue(self, slot: int, now_ms: int) -> None:
        line = self.backlog.line_of(slot)
        if line is not None:
            if line.in_flight(slot) and slot not in self.view.assumed:
                self.backlog.returned(slot)
            return
        key = self._attempts.key(slot)
        line = self.backlog.add(key, lambda: self._attempts.line(key, slot, now_ms), slot, now_ms)
        if key.gang:
            self.backlog.happened(("member", key), self.backlog.version)
        if line.wait is not None:
            self._untold[slot] = None

    def _requeue(self, now_ms: int) -> None:
        """Into other lines, maybe: what tells work apart has changed."""
        slots = [slot for line in self.backlog.lines() for slot in line.members()]
        for slot in slots:
            self.backlog.remove(slot)
        self._attempts.forget()
        for slot in slots:
            self._queue(cast(int, slot), now_ms)

    def _cured(self, cures: Sequence[tuple[str | int, ...]], now_ms: int) -> None:
        """Wake whoever waited for this, and nobody else."""
        happened, version = self.backlog.happened, self.view.version
        room = [int(cure[1]) for cure in cures if cure[0] == "room"]
        nodes = [int(cure[1]) for cure in cures if cure[0] == "node"]
        if room:
            happened(("room",), version, self._attempts.fits_on(room))
        if nodes:
            happened(("node",), version, self._attempts.open_on(nodes))
        for cure in cures:
            match cure[0]:
                case "room" | "node":
                    continue
                case "quota" | "grant":
                    happened(("quota", cure[1]), version)
                case "priority":
                    self._requeue(now_ms)
                case _:
                    happened(cure, version)

    def _let_go(self, now_ms: int) -> None:
        """Whoever was held until the view has seen what an answer was based on goes back to its line now."""
        kept = []
        for held in self._held:
            if self.view.revision < held.revision and now_ms < held.until_ms:
                kept.append(held)
                continue
            for slot in held.slots:
                if self.view.replicas.at.phase[slot] == PENDING:
                    self.view.forget(slot)
                    self._return(slot, held.refused, now_ms, seen=self.view.revision >= held.revision)
        self._held = kept

    def _return(self, slot: int, refused: str, now_ms: int, *, seen: bool) -> None:
        line = self.backlog.line_of(slot)
        if line is None or not line.in_flight(slot):
            return
        self.backlog.returned(slot)
        if refused and line.wait is None and (line.failures or not seen):
            # The view knows what the authority knew, and yet they differ; or it does not come to know it.
            self.backlog.back_off(line, refused, now_ms)
        elif refused:
            line.failures += 1

    # -- proposing ---------------------------------------------------------------------------------------------------------

    def propose(self, now_ms: int, limit: int) -> Proposal:
        """What to claim now; nothing, if there is nobody whose turn it is."""
        view = self.view
        proposal = Proposal([], [], Evidence(view.revision, view.age_ms()))
        self.victims.begin(now_ms)
        self._confirm(proposal)
        if self.backlog.active or (self.backlog.next_ms() or now_ms + 1) <= now_ms:
            self._share_out(now_ms)
            runs = self.backlog.take(limit, now_ms, self.shares)
            for attempt in self._tried(cast(list[tuple[Line, list[int]]], runs), now_ms):
                self._claim(proposal, attempt, now_ms)
        for explain in self._tell(now_ms):
            proposal.add(explain)
        return proposal

    def next_ms(self) -> int | None:
        """When to look again although nothing was heard."""
        times = [held.until_ms for held in self._held]
        waits = self.backlog.next_ms()
        return min([*times, *self._retell.values(), *(() if waits is None else (waits,))], default=None)

    def _share_out(self, now_ms: int) -> None:
        """What each tenant holds, for whose turn is next; what is assumed counts."""
        view = self.view
        columns = view.columns
        if self._capacity_at != columns.restood.count:
            self._capacity_at = columns.restood.count
            self.shares.resize(self._attempts.capacity())
        for tenant in dict.fromkeys(line.tenant for line in self.backlog.lines() if line.wait is None):
            spec = view.accounts.tenants.get(tenant)
            self.shares.weigh(tenant, 1 if spec is None else spec.spec.weight)
            held = self._attempts.held(tenant)
            before = self.shares.use(tenant)
            for sign in (1, -1):
                moved = [(name, sign * (held.get(name, 0) - before.get(name, 0))) for name in {**held, **before}]
                self.shares.charge(tenant, tuple((name, count) for name, count in moved if count > 0), sign, now_ms)

    def _tried(self, runs: Sequence[tuple[Line, list[int]]], now_ms: int) -> list[Attempt]:
        """All members of a line at once, as if there were enough for everybody. If there is not, one turn after another:
        then it matters who comes first, and that is what the turns are for.
        """
        lines: dict[Line, list[int]] = {}
        for line, slots in runs:
            lines.setdefault(line, []).extend(slots)
        tried = [self._attempts.attempt(line, list(slots), now_ms) for line, slots in lines.items()]
        if len(lines) == len(runs) or not any(one.short is Short.ROOM for one in tried):
            return tried
        self._told(Path.REDONE)
        for one in reversed(tried):
            self._attempts.undo(one)
            for slot in one.slots[len(lines[one.line]) :]:
                self.backlog.returned(slot)  # the rest of a gang: it is taken anew
        turns: list[tuple[Line, list[int]]] = []
        for line, slots in runs:
            if not self._attempts.together(line):
                turns.append((line, slots))
            elif line in lines:
                turns.append((line, lines.pop(line)))  # whole, at the first of its turns
        return [self._attempts.attempt(line, slots, now_ms) for line, slots in turns]

    def _claim(self, proposal: Proposal, one: Attempt, now_ms: int) -> None:
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
        if binds:
            where = {slot: bind.node for slot, bind in zip(placed, binds, strict=True)}
            for explain in self._attempts.explain(one, where, Word("bound")):
                proposal.add(explain)
        rest = one.slots[len(binds) :]
        if not rest:
            return
        reserved = self._attempts.preempt(one, rest, now_ms) if one.short is Short.ROOM else []
        for claim, slot, explains in reserved:
            proposal.add(claim, slot)
            for explain in explains:
                proposal.add(explain)
        taken = {slot for _, slot, _ in reserved}
        rest = [slot for slot in rest if slot not in taken]
        for slot in rest:
            self.backlog.returned(slot)
        if rest or one.line.queued:
            explains = self._attempts.put_aside(one, rest, now_ms)
            for explain in explains:
                proposal.add(explain)
            if one.line.queued > len(rest):
                self._retell.setdefault(one.line, now_ms)
            elif not explains:
                self._retell.setdefault(one.line, now_ms + RETELL_MS - SAID_MS)

    def _confirm(self, proposal: Proposal) -> None:
        """Reservations whose victims have gone are bound as they were made."""
        view = self.view
        at = view.replicas.at
        ready, self._ready = list(self._ready), {}
        for slot in ready:
            if at.phase[slot] != RESERVED or not view.vacated(slot):
                continue
            held = view.replicas.held(slot)
            node = self.kernel.name(at.node[slot])
            proposal.add(Bind(view.replicas.keys[slot], at.revision[slot], node, held.grants[0], dict(held.devices)), slot)
        for slot in self._given_up:
            if at.phase[slot] == RESERVED:
                proposal.add(Move(view.replicas.keys[slot], at.revision[slot], UNRESERVE, reason="it could not be bound"), slot)
        self._given_up = {}

    def _tell(self, now_ms: int) -> Iterable[Explain]:
        for long in [long for long, at_ms in self._retell.items() if at_ms <= now_ms]:
            del self._retell[long]
            if long.wait is not None:
                self._untold.update(dict.fromkeys(cast(list[int], long.members())))
                self._retell[long] = now_ms + RETELL_MS
        lines: dict[Line, list[int]] = {}
        for slot in list(islice(self._untold, TELL_MAX)):
            line = self.backlog.line_of(slot)
            del self._untold[slot]
            if line is not None and line.wait is not None:  # else it is tried before long, and told what comes of that
                lines.setdefault(line, []).append(slot)
        for line, slots in lines.items():
            if line.wait is not None:
                word = Word("waiting", line.wait.reason, "it waits with those that ask the same", words(line.wait.cures))
                yield from self.decisions.records(line.tenant, slots, word, attempt=line.attempts)

    # -- learning ----------------------------------------------------------------------------------------------------------

    def learn(self, proposal: Proposal, verdicts: Sequence[Verdict], now_ms: int) -> None:
        """Accepted ones need only be seen; refused ones come back once the view knows what they were refused on."""
        if self.resigned:
            return
        for claim, slots, verdict in zip(proposal.claims, proposal.slots, verdicts, strict=True):
            if isinstance(verdict, Refused) and verdict.code in OVER:
                self.over = True
            if not slots:
                continue
            until_ms = now_ms + HELD_MS_MAX
            match verdict:
                case Accepted(revision=revision):
                    if isinstance(claim, Ganged):
                        self._held.append(Held(revision, until_ms, slots, ""))
                case Refused() as refused:
                    self._told(Path.REFUSED)
                    revision = max(refused.revision, proposal.evidence.revision)
                    if refused.code is Code.STALE_EVIDENCE:
                        revision = self.view.revision + 1
                    if self.view.replicas.at.phase[slots[0]] == RESERVED:
                        if refused.code not in (Code.VICTIMS, Code.REVISION):
                            self._given_up[slots[0]] = None
                    else:
                        self._held.append(Held(revision, until_ms, slots, refused.code))

    def unanswered(self, proposal: Proposal, now_ms: int) -> None:
        """Nothing of this has happened, and nothing will under these ids: whoever was in it is tried again later."""
        if self.resigned:
            return
        for slots in proposal.slots:
            for slot in slots:
                if self.view.replicas.at.phase[slot] == PENDING:
                    self.view.forget(slot)
                    self._return(slot, Code.FAULT, now_ms, seen=False)

    def resign(self) -> None:
        """The term is over: what was assumed is no longer ours to assume, and what is answered yet teaches nothing."""
        self.resigned = True
        for slot in list(self.view.assumed):
            self.view.forget(slot)
