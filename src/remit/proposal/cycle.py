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
from remit.model.claims import (
    Accepted,
    AnyClaim,
    Bind,
    BindGang,
    Code,
    Evidence,
    Move,
    RecordDecision,
    Refused,
    Reserve,
    Verdict,
)
from remit.observation.replica_table import PENDING, RESERVED
from remit.observation.scheduler_view import SchedulerView
from remit.proposal.attempts import Attempt, Attempts, AttemptShortage, QueueKey, event_names
from remit.proposal.metrics import CoverageMark, OnMark, ignore_mark
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES, OverrideFilter, locality
from remit.proposal.placement.fragmentation import Fragmentation
from remit.proposal.placement.fragmentation_model import Demand
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import GANG_MEMBER, Filter, Score
from remit.proposal.placement.preemption_candidates import VictimRateLimit, VictimSelector
from remit.proposal.proposals import DecisionOutcome, DecisionRecorder, HeldReplica, InFlightClaim, Proposal
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
RESERVATION_STILL_VALID: Final = frozenset(
    (Code.VICTIMS, Code.REVISION, Code.STALE_EVIDENCE, Code.STALE_EPOCH, Code.LEASE_EXPIRED)
)
"""Refusals of a bind that leave its reservation valid, so the bind is retried."""

SCARCE: Final = frozenset((AttemptShortage.CAPACITY, AttemptShortage.QUOTA))
"""Shortages for which the order of turns matters, because one replica takes what another one needs."""

TERM_OVER: Final = frozenset((Code.STALE_EPOCH, Code.LEASE_EXPIRED, Code.ROLE))
"""Refusals that mean this scheduler's term is over."""

_SLACK: Final = 1_024

Jitter = Callable[[int], int]


class Cycle:
    """Scheduling state for one term of a scheduler; `term` becomes part of the names of its decision records."""

    def __init__(
        self,
        view: SchedulerView,
        jitter: Jitter,
        term: str,
        *,
        filters: Sequence[Filter] = (),
        scores: Sequence[Score] = DEFAULT_SCORES,
        victim_rate: VictimRateLimit = VictimRateLimit(),
        on_mark: OnMark = ignore_mark,
    ) -> None:
        self.view = view
        self._jitter, self._on_mark = jitter, on_mark
        self._filters, self._scores = tuple(filters), tuple(scores)
        self.override_filter = OverrideFilter()
        self.decisions = DecisionRecorder(view, term)
        self.demand = Demand()
        """Observed demand by shape during this term. It survives a relist of the view."""
        self.victims = VictimSelector(victim_rate)
        self.term_over = False
        """Whether a refusal has shown that the term is over."""
        self.stepped_down = False
        self._proposals = 0
        self._reset()

    def _reset(self) -> None:
        """Resets all state derived from the previous view."""
        view = self.view
        self.backlog = Backlog(self._jitter)
        self.shares = FairShareLedger({})
        self._capacity_version = -1
        self.fragmentation = Fragmentation(view.columns, self.demand)
        scores = (*self._scores, locality(view.columns, view.objects.hints), self.fragmentation.score)
        self.kernel = Kernel(view.columns, view.peers, filters=(self.override_filter.filter, *self._filters), scores=scores)
        self._attempts = Attempts(
            view, self.kernel, self.backlog, self.victims, self.decisions, self.override_filter, self._on_mark
        )
        self._wakeups = WakeupMatcher(self.kernel, self._attempts.class_of_queue)
        self.victims.forget()
        self._in_flight: dict[int, InFlightClaim] = {}
        """By slot, claims whose verdict is pending, or known but not visible in the view yet."""
        self._held: dict[int, HeldReplica] = {}
        self._refusals: dict[tuple[str, str, str], list[int]] = {}
        """Slots by tenant, code and detail: refusals still to be recorded."""
        self._override_ms: int | None = None
        self._ready: dict[int, None] = {}
        self._abandoned: dict[int, None] = {}
        """Reservations that could not be bound or may not be bound any more; their replicas must be placed again."""
        self._unreported = UnreportedReplicas()
        self._initial_scan_done = False

    # -- view changes ------------------------------------------------------------------------------------------------------

    def on_changes(self, now_ms: int, authority: Instant | None) -> None:
        """Applies all changes of the view since the last call, before anything is attempted."""
        view = self.view
        if view.holds.expire_assumed(now_ms):
            self._on_mark(CoverageMark.EXPIRED)
        if self.kernel.columns is view.columns:
            # Before taking the changes: a released replica frees capacity that other queues wait for.
            self._release_held(now_ms)
        changes = view.changes.take()
        if changes.reset or self.kernel.columns is not view.columns:
            self._reset()
        if self.override_filter.update(view.objects.overrides.values(), authority):
            self.kernel.forget_all()
            self._requeue_all(now_ms)
            self.backlog.on_event(("override",), view.changes.version)
        until_ms = self.override_filter.effects.until_ms
        self._override_ms = None if until_ms is None or authority is None else now_ms + max(1, until_ms - authority[1])
        if not self._initial_scan_done:
            self._initial_scan_done = True
            changes.pending.update(dict.fromkeys(view.replicas.pending()))
            changes.ready.update(dict.fromkeys(np.flatnonzero(view.replicas.column("phase") == RESERVED).tolist()))
        self.backlog.version = max(self.backlog.version, view.changes.version)
        for slot in changes.no_longer_pending:
            if slot not in changes.pending or not self._is_in_flight(slot):
                self._drop(slot)
        self._enqueue_arrivals(changes.pending, now_ms)
        self._ready.update(changes.ready)
        self._wake_queues(list(changes.unblock_events), now_ms)

    def _is_in_flight(self, slot: int, number: int = 0) -> bool:
        """Whether the replica has a pending claim for its current revision (in proposal `number`, if given)."""
        if self.kernel.columns is not self.view.columns:
            return False  # the view was relisted, and old slots are invalid
        claim = self._in_flight.get(slot)
        return claim is not None and claim.revision == self.view.replicas.at.revision[slot] and number in (0, claim.proposal)

    def _drop(self, slot: int) -> None:
        self.backlog.remove(slot)
        self._unreported.remove(slot)
        self._in_flight.pop(slot, None)
        self._held.pop(slot, None)

    def _enqueue_arrivals(self, slots: Iterable[int], now_ms: int) -> None:
        """Queues replicas and counts their shapes as demand."""
        by_shape: dict[int, int] = {}
        for slot in slots:
            key = self._enqueue(slot, now_ms)
            if key is not None:
                by_shape[key.shape] = by_shape.get(key.shape, 0) + 1
        for shape, count in by_shape.items():
            self.demand.arrived(self.view.shapes.requirements_of(shape), count)

    def _enqueue(self, slot: int, now_ms: int) -> QueueKey | None:
        """Adds a replica to the queue of its class; returns the queue's key, or None if the replica was queued already."""
        queue = self.backlog.queue_of(slot)
        if queue is None:
            return self._add_to_queue(slot, now_ms)
        if queue.in_flight(slot) and slot not in self.view.assumed and slot not in self._held:
            self._return_to_queue(slot, now_ms)
        return None

    def _add_to_queue(self, slot: int, arrived_ms: int) -> QueueKey:
        key = self._attempts.key(slot)
        queue = self.backlog.add(key, lambda: self._attempts.make_queue(key, slot, arrived_ms), slot, arrived_ms)
        if key.gang:
            self.backlog.on_event((GANG_MEMBER, key), self.backlog.version)
        self._unreported.add(slot, queue)
        return key

    def _requeue_all(self, now_ms: int) -> None:
        """Recomputes the queue of every replica, because data that separates queues has changed (priorities, overrides)."""
        self._attempts.forget()
        slots = [cast(int, slot) for queue in self.backlog.queues() for slot in queue.members()]
        self._requeue_changed(slots, now_ms)

    def _requeue_changed(self, slots: Iterable[int], now_ms: int) -> None:
        """Moves replicas whose queue key has changed. Members in flight move when they return."""
        moving = []
        for slot in slots:
            queue = self.backlog.queue_of(slot)
            if queue is not None and not queue.in_flight(slot) and self._attempts.key(slot) != queue.key:
                moving.append((queue.arrived_ms(slot), slot))
        for arrived_ms, slot in sorted(moving):
            self.backlog.remove(slot)
            self._add_to_queue(slot, arrived_ms)

    def _wake_queues(self, events: Sequence[tuple[str | int, ...]], now_ms: int) -> None:
        """Wakes the queues that wait for these events, and no others."""
        on_event, version = self.backlog.on_event, self.view.changes.version
        capacity_rows = [int(event[1]) for event in events if event[0] == "room"]
        node_rows = [int(event[1]) for event in events if event[0] == "node"]
        if capacity_rows:
            on_event(("room",), version, self._wakeups.fits_on(capacity_rows))
        if node_rows:
            on_event(("node",), version, self._wakeups.open_on(node_rows))
        if hinted := [str(event[1]) for event in events if event[0] == "hinted"]:
            self._requeue_changed(self._attempts.pending_of(hinted), now_ms)
        closed = [f"{event[1]}/{event[2]}" for event in events if event[0] == "workload"]
        if closed:
            self._requeue_changed(self._attempts.pending_of_closed(closed), now_ms)
        for tenant in dict.fromkeys(
            self._tenant_of_ledger(str(event[1])) for event in events if event[0] in ("quota", "grant")
        ):
            on_event(("quota", tenant), version)
        for event in events:
            match event[0]:
                case "room" | "node" | "quota" | "grant" | "hinted":
                    continue
                case "priority":
                    self._requeue_all(now_ms)
                case "domains":
                    on_event(("node",), version, self._wakeups.uses_spread)
                case _:
                    on_event(event, version)

    def _tenant_of_ledger(self, name: str) -> str:
        """The tenant of a ledger. Any ledger of its tenant, including a new one, can unblock work that waits for quota."""
        ledger = self.view.quota_ledgers.ledgers.get(name)
        return "" if ledger is None else ledger.tenant

    def _release_held(self, now_ms: int) -> None:
        """Returns held replicas to their queues once the view has reached the revision that their verdict was based on."""
        failed: dict[ClassQueue, str] = {}
        timed_out: dict[ClassQueue, str] = {}
        returned: Counter[ClassQueue] = Counter()
        for slot, held in list(self._held.items()):
            caught_up = self.view.revision >= held.revision
            if not caught_up and now_ms < held.until_ms:
                continue
            del self._held[slot]
            if not self._is_in_flight(slot, held.proposal):
                continue
            phase = self.view.replicas.at.phase[slot]
            if phase == RESERVED:
                del self._in_flight[slot]
                (self._ready if held.rebind else self._abandoned)[slot] = None
            elif phase == PENDING:
                self.view.holds.forget(slot)
                queue = self._return_to_queue(slot, now_ms)
                if queue is not None and held.refusal:
                    (failed if caught_up else timed_out)[queue] = held.refusal
                    returned[queue] += 1
        for queue, refused in failed.items():
            # One failure per queue, however many of its replicas were refused. The view now contains what the authority decided
            # on. If they still disagree only time can help, and not the event that the rest of the queue waits for: a refused
            # claim gives its capacity back, which is that very event.
            self.backlog.record_failure(queue, refused, now_ms)
        for queue, refused in timed_out.items():
            self.backlog.back_off(queue, refused, now_ms)
        for queue, count in returned.items():
            if queue.queued > count:
                self._unreported.on_refusal(queue, now_ms)

    def _return_to_queue(self, slot: int, now_ms: int) -> ClassQueue | None:
        """Returns a replica in flight to its queue, or to another one if its key has changed; None if it did not return to the
        same queue.
        """
        self._in_flight.pop(slot, None)
        queue = self.backlog.queue_of(slot)
        if queue is None or not queue.in_flight(slot):
            return None
        if self._attempts.key(slot) == queue.key:
            self.backlog.return_member(slot)
            return queue
        arrived_ms = queue.arrived_ms(slot)
        self.backlog.remove(slot)
        self._add_to_queue(slot, arrived_ms)
        return None

    # -- proposals ---------------------------------------------------------------------------------------------------------

    def propose(self, now_ms: int, limit: int) -> Proposal:
        """Claims to submit now; empty if nothing is to be placed."""
        view, at = self.view, self.view.replicas.at
        self._proposals += 1
        proposal = Proposal(self._proposals, [], [], Evidence(view.revision, view.age_ms()))
        self.victims.begin(now_ms, view)
        self.fragmentation.update_weights()
        self._bind_reservations(proposal)
        self.backlog.wake_expired(now_ms)
        if self.backlog.active:
            self._update_shares(now_ms)
            runs = self.backlog.take(limit, now_ms, self.shares)
            bound: dict[ClassQueue, tuple[Attempt, dict[int, str]]] = {}
            for attempt in self._attempt_runs(cast(list[tuple[ClassQueue, list[int]]], runs), now_ms):
                nodes = bound.setdefault(attempt.queue, (attempt, {}))[1]
                self._add_claims(proposal, attempt, nodes, now_ms)
            for attempt, nodes in bound.values():
                for explain in self._attempts.explain(attempt, nodes, DecisionOutcome("bound")):
                    proposal.add(explain)
        for explain in self._pending_records(proposal, now_ms):
            proposal.add(explain)
        for slots in proposal.slots:
            for slot in slots:
                self._in_flight[slot] = InFlightClaim(proposal.number, at.revision[slot])
        if len(self._in_flight) > 2 * len(self.backlog) + _SLACK:
            self._in_flight = {slot: claim for slot, claim in self._in_flight.items() if self._is_in_flight(slot)}
        return proposal

    def next_ms(self) -> int | None:
        """When to run again if no change arrives."""
        times = [*(held.until_ms for held in self._held.values()), *self._unreported.due_times_ms()]
        times += [ms for ms in (self.backlog.next_ms(), self._override_ms) if ms is not None]
        return min(times, default=None)

    def _update_shares(self, now_ms: int) -> None:
        """Updates the usage of each tenant for fair sharing; assumed placements count."""
        view = self.view
        columns = view.columns
        if self._capacity_version != columns.attributes_changed.count:
            self._capacity_version = columns.attributes_changed.count
            self.shares.set_capacity(self._attempts.capacity())
        used = self._attempts.usage_by_tenant()
        for tenant in self.backlog.tenants():
            spec = view.quota_ledgers.tenants.get(tenant)
            self.shares.set_weight(tenant, 1 if spec is None else spec.spec.weight)
            held = used.get(tenant, {})
            previous = self.shares.usage(tenant)
            for sign in (1, -1):
                difference = [(name, sign * (held.get(name, 0) - previous.get(name, 0))) for name in {**held, **previous}]
                self.shares.charge(tenant, tuple((name, count) for name, count in difference if count > 0), sign, now_ms)

    def _attempt_runs(self, runs: Sequence[tuple[ClassQueue, list[int]]], now_ms: int) -> list[Attempt]:
        """Attempts all runs, first with all members of a queue at once, as if there were enough for all.

        If capacity or quota turns out to be short, these attempts are undone and each turn is attempted in order, because
        the order of turns decides who gets the rest. Preemption happens within a turn as well; otherwise later turns would
        take the capacity that an earlier turn relies on.
        """
        queues: dict[ClassQueue, list[int]] = {}
        for queue, slots in runs:
            queues.setdefault(queue, []).extend(slots)
        if len(queues) < len(runs):
            attempts = [self._attempts.attempt(queue, slots, now_ms) for queue, slots in queues.items()]
            if not any(attempt.shortage in SCARCE for attempt in attempts):
                return attempts
            self._on_mark(CoverageMark.REDONE)
            for attempt in reversed(attempts):
                self._attempts.undo(attempt)
        final_attempts: dict[ClassQueue, Attempt] = {}
        results: list[Attempt] = []
        for queue, slots in runs:
            attempt = final_attempts.get(queue)
            if attempt is not None:
                # Nothing was freed since the earlier turn of this queue, so this turn ends with the same result.
                attempt.slots.extend(() if attempt.complete else slots)
                if attempt.reservations and len(attempt.reservations) == len(attempt.slots) - len(slots) - len(
                    attempt.placements.rows
                ):
                    self._attempts.preempt(attempt, slots)
                continue
            # A gang is attempted complete in its first turn, including members beyond the batch limit.
            is_gang = self._attempts.is_gang(queue)
            attempt = self._attempts.attempt(queue, queues[queue] if is_gang else slots, now_ms)._replace(complete=is_gang)
            if attempt.shortage is AttemptShortage.CAPACITY:
                self._attempts.preempt(attempt, attempt.slots[len(attempt.placements.rows) :])
            results.append(attempt)
            if is_gang or attempt.shortage is not AttemptShortage.NONE:
                final_attempts[queue] = attempt
        return results

    def _add_claims(self, proposal: Proposal, attempt: Attempt, nodes: dict[int, str], now_ms: int) -> None:
        """Adds the claims that result from one attempt; records the node of each placed slot in `nodes`."""
        view, keys = self.view, self.view.replicas.keys
        at = view.replicas.at
        binds = [
            Bind(
                keys[slot],
                at.revision[slot],
                self.kernel.node_name(row),
                attempt.quota_source.name,
                dict(devices),
                attempt.policy,
            )
            for slot, row, devices in attempt.placed()
        ]
        placed = attempt.slots[: len(binds)]
        if attempt.gang and binds:
            proposal.add(BindGang(tuple(binds)), *placed)
        else:
            for slot, bind in zip(placed, binds, strict=True):
                proposal.add(bind, slot)
        nodes.update({slot: bind.node for slot, bind in zip(placed, binds, strict=True)})
        for slot, claim in attempt.reservations.items():
            proposal.add(claim, slot)
        for explain in self._attempts.explain_reservations(attempt):
            proposal.add(explain)
        unplaced = [slot for slot in attempt.slots[len(binds) :] if slot not in attempt.reservations]
        for slot in unplaced:
            self.backlog.return_member(slot)
        if unplaced or (attempt.queue.queued and attempt.shortage is not AttemptShortage.NONE and not attempt.reservations):
            explains = self._attempts.begin_wait(attempt, unplaced, now_ms)
            for explain in explains:
                proposal.add(explain)
            self._unreported.on_attempt(attempt.queue, unplaced, bool(explains), now_ms)

    def _bind_reservations(self, proposal: Proposal) -> None:
        """Binds reservations whose victims are gone."""
        view = self.view
        at = view.replicas.at
        ready, self._ready = list(self._ready), {}
        for slot in ready:
            if at.phase[slot] != RESERVED or not view.holds.reservations.victims_gone(slot) or self._is_in_flight(slot):
                continue
            if self._attempts.is_forbidden(slot):
                self._abandoned[slot] = None
                continue
            held = view.replicas.hold_of(slot)
            node = self.kernel.node_name(at.node[slot])
            proposal.add(Bind(view.replicas.keys[slot], at.revision[slot], node, held.grants[0], dict(held.devices)), slot)
        for slot in self._abandoned:
            if at.phase[slot] == RESERVED and slot not in self._ready:
                proposal.add(
                    Move(view.replicas.keys[slot], at.revision[slot], UNRESERVE, reason="the reservation could not be bound"),
                    slot,
                )
        self._abandoned = {}

    def _pending_records(self, proposal: Proposal, now_ms: int) -> list[RecordDecision]:
        """Decision records of refusals, and of pending replicas that no attempt of this cycle has reached."""
        records, claimed = list[RecordDecision](), {slot for slots in proposal.slots for slot in slots}
        for (tenant, code, detail), slots in self._refusals.items():
            records += self.decisions.records(tenant, slots, DecisionOutcome("refused", code, detail), attempt=1)
        self._refusals = {}
        for queue, slots in self._unreported.take_due(now_ms, self.backlog.queue_of).items():
            if queue.wait is not None:
                detail = queue.wait.detail[:DETAIL_MAX] or "same reason as the last attempt"
                outcome = DecisionOutcome(
                    "waiting",
                    queue.wait.reason,
                    f"{detail}; not tried again since",
                    event_names(queue.wait.unblock_events),
                )
                # A claimed replica is not pending for this reason, although its queue is.
                unclaimed = [slot for slot in slots if slot not in claimed]
                records += self.decisions.records(queue.tenant, unclaimed, outcome, attempt=queue.attempts)
        return records

    # -- verdicts ----------------------------------------------------------------------------------------------------------

    def on_verdicts(self, proposal: Proposal, verdicts: Sequence[Verdict], now_ms: int) -> None:
        """Handles the verdicts of a proposal. Accepted claims only need to become visible in the view; refused replicas are
        held until the view has reached the revision that the refusal was based on.
        """
        if self.stepped_down:
            return
        until_ms = now_ms + HELD_MS_MAX
        for claim, slots, verdict in zip(proposal.claims, proposal.slots, verdicts, strict=True):
            match verdict:
                case Accepted(revision=revision):
                    if isinstance(claim, BindGang):
                        for slot in slots:
                            if self._is_in_flight(slot, proposal.number):
                                self._held[slot] = HeldReplica(proposal.number, revision, until_ms, "")
                case Refused() as refused:
                    self.term_over = self.term_over or refused.code in TERM_OVER
                    if slots:
                        self._hold_refused(proposal, claim, slots, refused, until_ms)

    def _hold_refused(self, proposal: Proposal, claim: AnyClaim, slots: Sequence[int], refused: Refused, until_ms: int) -> None:
        self._on_mark(CoverageMark.REFUSED)
        revision = max(refused.revision, proposal.evidence.revision)
        if refused.code is Code.STALE_EVIDENCE:
            revision = self.view.revision + 1
        if isinstance(claim, Reserve):
            self.victims.release(claim.victims, self.view)
        held = HeldReplica(proposal.number, revision, until_ms, refused.code, rebind=refused.code in RESERVATION_STILL_VALID)
        for slot in slots:
            if self._is_in_flight(slot, proposal.number):
                self._held[slot] = held
                tenant = self.view.shapes.tenant_of(self.view.replicas.at.generation[slot])
                self._refusals.setdefault((tenant, refused.code, refused.detail[:DETAIL_MAX]), []).append(slot)

    def on_no_answer(self, proposal: Proposal, now_ms: int) -> None:
        """Handles a proposal of which nothing was applied and nothing will be: its replicas are tried again after a backoff."""
        if self.stepped_down:
            return
        queues: dict[ClassQueue, None] = {}
        for claim, slots in zip(proposal.claims, proposal.slots, strict=True):
            if isinstance(claim, Reserve):
                self.victims.release(claim.victims, self.view)
            for slot in slots:
                if not self._is_in_flight(slot, proposal.number):
                    continue
                if self.view.replicas.at.phase[slot] == RESERVED:
                    del self._in_flight[slot]
                    self._ready[slot] = None
                    continue
                self.view.holds.forget(slot)
                queue = self._return_to_queue(slot, now_ms)
                if queue is not None:
                    queues[queue] = None
        for queue in queues:
            self.backlog.back_off(queue, Code.INTERNAL_ERROR, now_ms)

    def step_down(self) -> None:
        """Ends the term: drops all assumptions, and ignores verdicts that arrive later."""
        self.stepped_down = True
        for slot in list(self.view.assumed):
            self.view.holds.forget(slot)
