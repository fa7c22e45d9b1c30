"""Planted bugs of the authority: commit chain, outcomes, epochs, audit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from remit.client.authority_client import AuthorityClient
from remit.commitment import authority, batch, decide, recovery
from remit.commitment.authority import Authority, LeadershipLost
from remit.commitment.books import DecisionTime
from remit.commitment.changes import Changes
from remit.commitment.draft import Draft
from remit.commitment.outcomes import AuditEntry, Outcomes
from remit.commitment.rulings import leases, placement, transitions
from remit.commitment.standby import Standby
from remit.model.claims import Actor, Code, Operation, Refused, Vacate, Verdict, parse_operation_id
from remit.model.objects import key_of
from remit.model.records import LeaseSpec, Phase, Replica
from remit.model.resources import Duration
from remit.store import chain
from remit.store.protocol import Commit, CommitOutcomeUnknown, Committed, Head, Store, Unavailable
from tests.planted.planted_bug import bug, overrule

LEASE_CHECKS = ("accepted_operations_hold_their_lease", "lease_epochs_never_decrease")
SINGLE_OUTCOME_CHECKS = ("one_outcome_per_operation", "one_answer_per_operation")
ACKNOWLEDGEMENT_CHECKS = ("acknowledged_operations_are_in_history", *SINGLE_OUTCOME_CHECKS)


# ------------------------------------------------------------------------------------------------------------ fencing


@bug(15, 16, scenario="restores", seed=2, expects=LEASE_CHECKS)
def the_epoch_check_is_skipped(patch: pytest.MonkeyPatch) -> None:
    """Claims are accepted at any epoch of the lease."""
    patch.setattr(decide, "check_fence", lambda draft, actor: None)


@bug(15, 18, scenario="takeovers", seed=3, expects=LEASE_CHECKS)
def a_lease_is_given_away_at_the_same_epoch(patch: pytest.MonkeyPatch) -> None:
    """An expired lease goes to another holder without a new epoch."""
    original_lease_spec = LeaseSpec

    def buggy_lease_spec(*, holder: str = "", epoch: int = 0, **more: Any) -> Any:
        return original_lease_spec(holder=holder, epoch=max(1, epoch - 1) if holder else epoch, **more)

    patch.setattr(leases, "LeaseSpec", buggy_lease_spec)


@bug(15, 18, scenario="takeovers", expects=("valid_leases_are_not_taken_over",))
def a_lease_is_taken_from_a_living_holder(patch: pytest.MonkeyPatch) -> None:
    """A lease may be acquired in the middle of its holder's term."""
    original_has_lapsed = leases._has_lapsed

    def buggy_has_lapsed(draft: Draft, lease: str, spec: LeaseSpec) -> bool:
        return original_has_lapsed(draft, lease, replace(spec, ttl=Duration(spec.ttl // 2)))

    patch.setattr(leases, "_has_lapsed", buggy_has_lapsed)


@bug(15, 18, scenario="takeovers", expects=("valid_leases_are_not_taken_over",))
def renewals_are_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """A renewal is confirmed, but the term still counts from the acquisition."""
    original_renew_leases = Authority._renew_leases

    async def buggy_renew_leases(self: Authority, actors: Sequence[Actor]) -> list[bool]:
        before = dict(self.renewals.renewed_ms)
        held = await original_renew_leases(self, actors)
        self.renewals.renewed_ms.update({actor.lease: before[actor.lease] for actor in actors if actor.lease in before})
        return held

    patch.setattr(Authority, "_renew_leases", buggy_renew_leases)


@bug(15, scenario="meddlers", expects=("accepted_operations_hold_their_lease", "valid_leases_are_not_taken_over"))
def any_actor_may_vacate_a_lease(patch: pytest.MonkeyPatch) -> None:
    """Vacating does not check who holds the lease."""
    original_vacate = leases.vacate

    def buggy_vacate(draft: Draft, operation: Operation, claim: Vacate) -> int | Refused:
        found = draft.lookup(key_of("Lease", claim.lease))
        if found is not None:
            spec = found[0].spec
            actor = replace(operation.actor, name=spec.holder, epoch=spec.epoch, lease=claim.lease)
            operation = replace(operation, actor=actor)
        return original_vacate(draft, operation, claim)

    overrule(patch, Vacate, buggy_vacate)


@bug(2, 15, scenario="takeovers", expects=("chain_is_unbroken",))
def commits_are_unguarded(patch: pytest.MonkeyPatch) -> None:
    """A batch no longer compares the head that its writer last read."""
    original_batch = chain.batch

    def buggy_batch(place: chain.ChainPosition, *args: Any, **more: Any) -> Commit:
        return original_batch(place, *args, **more)._replace(guards=())

    patch.setattr(chain, "batch", buggy_batch)


@bug(8, 15, scenario="takeovers", expects=("chain_is_unbroken",))
def a_takeover_does_not_raise_the_epoch(patch: pytest.MonkeyPatch) -> None:
    """A standby writes its own name into the head and keeps the epoch."""
    original_raise_epoch = chain.raise_epoch

    async def buggy_raise_epoch(store: Store, holder: str, incarnation: str) -> chain.ChainPosition:
        place = await chain.read_position(store)
        if place is None:
            return await original_raise_epoch(store, holder, incarnation)
        head = replace(chain.advance(place.head, (), ()), holder=holder)
        try:
            answer = await store.commit(chain.batch(place, head, ()))
        except CommitOutcomeUnknown:
            return await buggy_raise_epoch(store, holder, incarnation)
        return (
            chain.ChainPosition(head, answer.revision)
            if isinstance(answer, Committed)
            else await buggy_raise_epoch(store, holder, incarnation)
        )

    patch.setattr(chain, "raise_epoch", buggy_raise_epoch)


@bug(4, 8, scenario="takeovers", expects=(*ACKNOWLEDGEMENT_CHECKS, *LEASE_CHECKS))
def a_takeover_uses_stale_books(patch: pytest.MonkeyPatch) -> None:
    """A standby reads the books while it waits, and takes over with them."""
    original_wait_for_silence = Standby.wait_for_silence
    original_take_over = Standby.take_over
    read: dict[str, Any] = {}

    async def buggy_wait_for_silence(self: Standby) -> None:
        moment = DecisionTime(self.clock.now_ms(), self.clock.boot(), {}, self.clock.now_ms(), 0, "")
        try:
            place = await chain.read_position(self.store)
            read[self.name] = None if place is None else await recovery.load(self.store, place, moment)
        except Unavailable:
            read[self.name] = None
        await original_wait_for_silence(self)

    async def buggy_take_over(self: Standby, beat_ms: int) -> Authority:
        leading, old = await original_take_over(self, beat_ms), read[self.name]
        if old is not None:
            leading.books, leading.outcomes = old
        return leading

    patch.setattr(Standby, "wait_for_silence", buggy_wait_for_silence)
    patch.setattr(Standby, "take_over", buggy_take_over)


# --------------------------------------------------------------------------------------------------------- lost answers


@bug(1, scenario="lost-answers", expects=ACKNOWLEDGEMENT_CHECKS)
def a_lost_commit_is_settled_by_a_read(patch: pytest.MonkeyPatch) -> None:
    """After a lost answer the head is read, and a commit that lands after that read is taken for its own."""

    async def buggy_commit(self: Authority, prepared: batch.PreparedBatch) -> int | None:
        head = prepared.head
        try:
            answer = await self.store.commit(chain.batch(self._position, head, prepared.puts, prepared.deletes))
        except CommitOutcomeUnknown:
            answer = None
        if isinstance(answer, Committed):
            now: chain.ChainPosition | None = chain.ChainPosition(head, answer.revision)
        else:
            now = await chain.read_position(self.store)
        if now is None or now.head.epoch != self.head.epoch:
            raise LeadershipLost(now.head if now else None)
        self._position = now
        if now.head != head:
            return None
        self.books.absorb(prepared.draft.changes, prepared.draft.time, now.revision, dict(prepared.puts))
        self.outcomes.record(head.sequence, prepared.batch, now.revision)
        self.renewals.renewed_ms.update(prepared.draft.changes.renewed_ms)
        self._oldest_batch = prepared.oldest
        return now.revision

    patch.setattr(Authority, "_commit", buggy_commit)


@bug(1, scenario="lost-answers", expects=ACKNOWLEDGEMENT_CHECKS)
def a_landed_batch_is_decided_again(patch: pytest.MonkeyPatch) -> None:
    """A batch that landed is decided once more, as if it had not."""
    original_settle = chain.settle

    async def buggy_settle(store: Store, place: chain.ChainPosition, lost: Head) -> chain.ChainPosition | chain.FencedOut:
        settled = await original_settle(store, place, lost)
        if isinstance(settled, chain.ChainPosition) and settled.head == lost:
            return chain.ChainPosition(replace(settled.head, count=settled.head.count + 1), settled.revision)
        return settled

    patch.setattr(chain, "settle", buggy_settle)


@bug(1, 12, scenario="lost-answers", expects=ACKNOWLEDGEMENT_CHECKS)
def answers_precede_the_write(patch: pytest.MonkeyPatch) -> None:
    """A batch is answered as soon as it is decided, and written later."""
    original_commit = Authority._commit

    async def buggy_commit(self: Authority, prepared: batch.PreparedBatch) -> int | None:
        if not prepared.answers:
            return await original_commit(self, prepared)
        place, head = self._position, prepared.head
        commit = chain.batch(place, head, prepared.puts, prepared.deletes)

        async def later() -> None:
            try:
                await self.store.commit(commit)
            except (CommitOutcomeUnknown, Unavailable):
                return

        later_ = asyncio.ensure_future(later())
        await asyncio.sleep(0)
        del later_
        revision = place.revision + 1
        self._position = chain.ChainPosition(head, revision)
        self.books.absorb(prepared.draft.changes, prepared.draft.time, revision, dict(prepared.puts))
        self.outcomes.record(head.sequence, prepared.batch, revision)
        self.renewals.renewed_ms.update(prepared.draft.changes.renewed_ms)
        self._oldest_batch = prepared.oldest
        return revision

    patch.setattr(Authority, "_commit", buggy_commit)


UNSEEN_CHANGES = (
    "one_binding_per_attempt",
    "phase_changes_match_lifecycle_table",
    "replicas_stay_within_desired_and_surge",
    "node_usage_never_rises_above_capacity",
    "refusals_change_nothing",
)


@bug(2, 12, scenario="small-batches", expects=UNSEEN_CHANGES)
def pipelined_batches_ignore_each_other(patch: pytest.MonkeyPatch) -> None:
    """A batch decided while another is being written does not see its changes."""
    patch.setattr(batch.BatchBase, "draft", lambda self: Draft(self.books, self.time))
    patch.setattr(Changes, "subtract", lambda self, before: None)


@bug(2, 12, scenario="small-batches", expects=UNSEEN_CHANGES)
def a_pipelined_batch_is_written_twice(patch: pytest.MonkeyPatch) -> None:
    """A batch decided on top of one being written contains its changes too."""
    patch.setattr(Changes, "subtract", lambda self, before: None)


@bug(1, 37, scenario="small-batches", expects=SINGLE_OUTCOME_CHECKS)
def ids_in_flight_are_unknown(patch: pytest.MonkeyPatch) -> None:
    """An operation repeated while its batch is being written is decided again, in the next batch."""
    original_prepare = batch.prepare

    def buggy_prepare(ground: batch.BatchBase, operations: Sequence[Operation], *faults: Any) -> batch.PreparedBatch:
        below = None if ground.previous is None else ground.previous._replace(entries={})
        return original_prepare(ground._replace(previous=below), operations, *faults)

    patch.setattr(authority, "prepare", buggy_prepare)


@bug(15, scenario="takeovers", expects=ACKNOWLEDGEMENT_CHECKS)
def refusals_are_answered_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """A refusal is answered at once by any authority that believes to lead; its batch follows, or does not."""
    original_submit = Authority.submit

    async def buggy_submit(self: Authority, operations: Sequence[Operation], /) -> list[Verdict]:
        if self._leadership_lost is None and operations:
            answers = batch.prepare(self.batch_base(), operations).answers
            refused = [
                Refused(Code(answer.code), answer.detail, self._position.revision)
                for answer in answers
                if isinstance(answer, AuditEntry) and answer.code
            ]
            if len(refused) == len(answers):
                return [*refused]
        return await original_submit(self, operations)

    patch.setattr(Authority, "submit", buggy_submit)


@bug(1, scenario="lost-answers", expects=ACKNOWLEDGEMENT_CHECKS)
def operation_ids_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """An operation that was decided before is decided again."""
    original_check_id = Outcomes.check_id

    def buggy_check_id(self: Outcomes, operation_id: str, taken: str) -> Verdict | None:
        return None if operation_id in self._outcomes else original_check_id(self, operation_id, taken)

    patch.setattr(Outcomes, "check_id", buggy_check_id)


@bug(1, scenario="meddlers", expects=("operation_id_has_one_payload",))
def an_id_is_reused_for_other_payloads(patch: pytest.MonkeyPatch) -> None:
    """The payload of an id is not compared: its outcome answers anything."""
    original_check_id = Outcomes.check_id

    def buggy_check_id(self: Outcomes, operation_id: str, taken: str) -> Verdict | None:
        return self.get(operation_id) or original_check_id(self, operation_id, taken)

    patch.setattr(Outcomes, "check_id", buggy_check_id)


@bug(1, scenario="short-windows", expects=SINGLE_OUTCOME_CHECKS)
def expired_ids_are_executed(patch: pytest.MonkeyPatch) -> None:
    """An id from before the horizon is taken for a new one."""
    original_check_id = Outcomes.check_id

    def buggy_check_id(self: Outcomes, operation_id: str, taken: str) -> Verdict | None:
        issued = parse_operation_id(operation_id)
        if issued is not None and issued[0] == self.incarnation and issued[1] < self.horizon:
            return None
        return original_check_id(self, operation_id, taken)

    patch.setattr(Outcomes, "check_id", buggy_check_id)


@bug(10, scenario="restores", expects=("operation_ids_are_executed_within_window",))
def ids_of_an_ended_incarnation_are_executed(patch: pytest.MonkeyPatch) -> None:
    """An id issued before a restore is executed after it."""
    original_check_id = Outcomes.check_id

    def buggy_check_id(self: Outcomes, operation_id: str, taken: str) -> Verdict | None:
        issued = parse_operation_id(operation_id)
        if issued is not None and issued[0] != self.incarnation and operation_id not in self._outcomes:
            return None
        return original_check_id(self, operation_id, taken)

    patch.setattr(Outcomes, "check_id", buggy_check_id)


@bug(1, scenario="meddlers", expects=("abandoned_operations_are_not_applied",))
def abandoned_operations_may_be_applied(patch: pytest.MonkeyPatch) -> None:
    """An abandon is confirmed but not recorded."""
    original_abandon = batch._abandon

    def buggy_abandon(
        ground: Any, draft: Draft, operation: Operation, target: str, entries: dict[str, AuditEntry]
    ) -> int | Refused:
        return original_abandon(ground, draft, operation, target, dict(entries))

    patch.setattr(batch, "_abandon", buggy_abandon)


@bug(1, scenario="lost-answers", seed=3, expects=("abandoned_operations_are_not_applied", *ACKNOWLEDGEMENT_CHECKS))
def applied_operations_are_reported_abandoned(patch: pytest.MonkeyPatch) -> None:
    """Abandoning an accepted operation reports that it will never be applied."""
    original_abandon = batch._abandon

    def buggy_abandon(
        ground: Any, draft: Draft, operation: Operation, target: str, entries: dict[str, AuditEntry]
    ) -> int | Refused:
        ruled = original_abandon(ground, draft, operation, target, entries)
        return ruled if isinstance(ruled, Refused) else Refused(Code.ABANDONED, f"operation {target} was abandoned")

    patch.setattr(batch, "_abandon", buggy_abandon)


@bug(8, 20, scenario="takeovers", seed=2, expects=ACKNOWLEDGEMENT_CHECKS)
def outcomes_are_lost_at_a_takeover(patch: pytest.MonkeyPatch) -> None:
    """A new authority does not read earlier outcomes."""
    original_load_outcomes = recovery._load_outcomes

    async def buggy_load_outcomes(store: Store, head: Head, at: recovery.RevisionSource) -> Outcomes:
        known = await original_load_outcomes(store, head, at)
        return Outcomes(known.incarnation, known.window, known.horizon)

    patch.setattr(recovery, "_load_outcomes", buggy_load_outcomes)


# --------------------------------------------------------------------------------------------------------- evidence


@bug(4, 30, scenario="crowd", seed=2, expects=("cited_evidence_was_true",))
def cited_revisions_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A claim on a replica is accepted whatever revision it was seen at."""
    original_find_replica = placement.find_replica

    def buggy_find_replica(draft: Draft, name: str, at: int) -> Replica | Refused:
        found = draft.replicas.get(name)
        if found is None or found[0].status.phase is Phase.RELEASED:  # what is forgotten too early shows elsewhere
            return original_find_replica(draft, name, at)
        return found[0]

    for room in (placement, transitions):
        patch.setattr(room, "find_replica", buggy_find_replica)


@bug(4, scenario="crowd", expects=("seen_revisions_are_recorded",))
def seen_revisions_are_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """The audit entry of an operation omits the revision it was decided on."""
    original_audit_entry = batch.audit_entry

    def buggy_audit_entry(*args: Any, **more: Any) -> AuditEntry:
        return replace(original_audit_entry(*args, **more), seen=0)

    patch.setattr(batch, "audit_entry", buggy_audit_entry)


@bug(1, 37, scenario="crowd", expects=ACKNOWLEDGEMENT_CHECKS)
def verdicts_are_reordered(patch: pytest.MonkeyPatch) -> None:
    """A client returns the verdicts on several claims in another order."""
    original_submit_once = AuthorityClient._submit_once

    async def buggy_submit_once(self: AuthorityClient, endpoint: Any, course: Any) -> list[Verdict]:
        return list(reversed(await original_submit_once(self, endpoint, course)))

    patch.setattr(AuthorityClient, "_submit_once", buggy_submit_once)


# ------------------------------------------------------------------------------------------------------------ chain


@bug(13, scenario="crowd", expects=("chain_is_unbroken",))
def the_digest_omits_values(patch: pytest.MonkeyPatch) -> None:
    """A batch's digest covers only its keys."""
    digest = chain.digest
    patch.setattr(chain, "digest", lambda before, puts, deletes: digest(before, [(key, b"") for key, _ in puts], deletes))


@bug(33, scenario="crowd", expects=("entries_name_actor_and_operation",))
def the_audit_omits_the_actor(patch: pytest.MonkeyPatch) -> None:
    """An audit entry omits whose claim it was."""
    entry_of = batch.audit_entry
    patch.setattr(batch, "audit_entry", lambda *args, **more: replace(entry_of(*args, **more), actor=""))
