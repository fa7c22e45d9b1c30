"""Claim client: retries operations under the same id until a verdict arrives.

It handles operation ids and leader hints; retry_loop.py retries. The claims and their evidence come from the caller.

The rule everything depends on: **an intent keeps its operation id.** The authority stores each verdict under its operation
id, so submitting the same id again returns the same verdict, from any endpoint and however often a reply was lost. A second
id for one intent could apply it twice. After a lost reply the client therefore repeats the id. When its retries are
exhausted it returns the ids to the caller (`RetriesExhausted`), who submits them again (`resume`) or makes sure that they
are never applied (`abandon`).

A new id is allowed in one case: the authority refuses as expired an id that this call itself created and sent, and every
earlier attempt is known to have had no effect. That id was never executed and never will be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from msgspec.structs import replace

from remit.client.endpoint import AuthorityStatus, Endpoint, NotLeader, OutcomeUnknown, Overloaded
from remit.client.retry import RetryBudget, RetryPolicy
from remit.client.retry_loop import AttemptFailure, CallProgress, RetryLoop, ServerRotation
from remit.law.timing import DRIFT_MAX_PERCENT
from remit.model.claims import (
    Abandon,
    Actor,
    AnyClaim,
    Code,
    Evidence,
    Operation,
    OperationID,
    Refused,
    Verdict,
    operation_id,
)
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeState
from remit.world.interfaces import World

T = TypeVar("T")

NO_EVIDENCE: Final = Evidence()


class RetriesExhausted(Exception):
    """Retries ended without a verdict. If `outcome_unknown`, the operations may have been applied; otherwise none was.

    Without `operations` nothing was submitted. Otherwise submit the same ones again (`AuthorityClient.resume(e.operations,
    submitted_ms=e.submitted_ms)`), or `abandon` each id. Never submit the same intent under a new id while the outcome is
    unknown.
    """

    def __init__(
        self, reason: str, *, operations: tuple[Operation, ...] = (), outcome_unknown: bool = False, submitted_ms: int = 0
    ) -> None:
        self.reason, self.operations, self.outcome_unknown, self.submitted_ms = (
            reason,
            operations,
            outcome_unknown,
            submitted_ms,
        )
        if not operations:
            cure = "nothing was submitted; submit again"
        elif outcome_unknown:
            cure = f"{len(operations)} operations may have been applied: resume the same ids, or abandon them"
        else:
            cure = f"none of {len(operations)} operations was applied: resume them later"
        super().__init__(f"no verdict: {reason}; {cure}")

    @property
    def operation_ids(self) -> tuple[OperationID, ...]:
        return tuple(operation.id for operation in self.operations)


class RenewalResult(NamedTuple):
    """Result of a lease renewal. `sent_ms` is when the answered attempt was sent, on the holder's clock: the term counts from
    then.
    """

    held: bool
    sent_ms: int


class _SubmitProgress(CallProgress):
    """Progress of one call; with the operations that it submits, if any."""

    __slots__ = ("operations", "submitted_ms")

    def __init__(
        self, submitted_ms: int, deadline_ms: int, operations: tuple[Operation, ...] = (), *, budgeted: bool = True
    ) -> None:
        super().__init__(deadline_ms, budgeted=budgeted)
        self.submitted_ms, self.operations = submitted_ms, operations

    def exhausted(self, reason: str) -> RetriesExhausted:
        if self.last_reason:
            reason = f"{reason} (last error: {self.last_reason})"
        outcome_unknown = self.unknown_outcomes > 0 and bool(self.operations)
        return RetriesExhausted(
            reason, operations=self.operations, outcome_unknown=outcome_unknown, submitted_ms=self.submitted_ms
        )


def _classify(error: Exception) -> AttemptFailure | None:
    match error:
        case NotLeader():
            return AttemptFailure(error.reason, hint=error.hint)
        case Overloaded():
            return AttemptFailure(error.reason, retry_after_ms=error.retry_after_ms)
        case OutcomeUnknown():
            return AttemptFailure(error.reason, outcome_unknown=True)
        case _:
            return None


class AuthorityClient:
    """Client of one authority, for one actor. Calls may run concurrently; they share the current endpoint, the status and the
    retry budget.

    `endpoints` are tried in order, cyclically; their names are those that `NotLeader` and `AuthorityStatus` hint at. A
    standby forwards operations, which costs a hop and a store read each time. After switching endpoints the client therefore
    asks for the status first, to find the leader. Set `actor` again after acquiring a lease. A caller that must survive its
    own cancellation takes an id from `new_operation_id` first and passes it.
    """

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        actor: Actor,
        world: World,
        *,
        policy: RetryPolicy = RetryPolicy(),
        budget: RetryBudget | None = None,
    ) -> None:
        if not endpoints:
            raise ValueError("a client needs at least one endpoint")
        self.actor = actor
        self._endpoints = dict(endpoints)
        self._servers = ServerRotation(tuple(self._endpoints), self._on_switch)
        self._leader_unknown = True
        """Whether the client has switched endpoints since it last learned which one leads."""
        self._last_failed = ("", 0)
        """The endpoint it switched away from last, and when."""
        self._world = world
        self._loop = RetryLoop(self._servers, world.clock, world.randomness, policy, budget, _classify)
        self._status: AuthorityStatus | None = None
        self._status_ms = 0
        self._status_lock = asyncio.Lock()

    @property
    def incarnation(self) -> str:
        """The scope's incarnation as last reported; empty before the first status."""
        return "" if self._status is None else self._status.incarnation

    # ------------------------------------------------------------------------------------------------------- operations

    async def submit(
        self,
        claim: AnyClaim,
        *,
        evidence: Evidence = NO_EVIDENCE,
        operation_id: OperationID | None = None,
        trace: str = "",
        deadline_ms: int | None = None,
    ) -> Verdict:
        """Return the verdict on one claim. A given `operation_id` is never replaced, since it may have been sent before this
        call.
        """
        if operation_id is None:
            return (await self.submit_many([claim], evidence=evidence, trace=trace, deadline_ms=deadline_ms))[0]
        operation = Operation(operation_id, self.actor, claim, evidence, trace)
        return (await self.resume([operation], deadline_ms=deadline_ms))[0]

    async def submit_many(
        self,
        claims: Sequence[AnyClaim],
        *,
        evidence: Evidence = NO_EVIDENCE,
        trace: str = "",
        deadline_ms: int | None = None,
        actors: Sequence[Actor] = (),
    ) -> list[Verdict]:
        """Return the verdicts on claims sent in one request; each is decided on its own.

        `actors` names the actor of each claim; by default `actor` submits all.
        """
        if not claims:
            return []
        progress = self._start_call(deadline_ms)
        status = await self._recent_status(progress)
        submitters = actors or [self.actor] * len(claims)
        progress.operations = tuple(
            Operation(self._new_id(status), submitter, claim, evidence, trace)
            for submitter, claim in zip(submitters, claims, strict=True)
        )
        verdicts = await self._send(progress)
        expired = [index for index, verdict in enumerate(verdicts) if _is_expired(verdict)]
        # After a lost reply an earlier attempt may have been executed before its id expired; a new id could apply it twice.
        if not expired or progress.unknown_outcomes:
            return verdicts
        return await self._resubmit_expired(progress, status, verdicts, expired)

    async def resume(
        self, operations: Sequence[Operation], *, submitted_ms: int | None = None, deadline_ms: int | None = None
    ) -> list[Verdict]:
        """Submit operations again unchanged. `submitted_ms` is when their evidence had the age it states (see
        `RetriesExhausted`).
        """
        if not operations:
            return []
        progress = self._start_call(deadline_ms)
        progress.operations = tuple(operations)
        if submitted_ms is not None:
            progress.submitted_ms = submitted_ms
        return await self._send(progress)

    async def abandon(self, operation: OperationID, *, deadline_ms: int | None = None) -> Verdict:
        """Make sure that an operation is never applied. Returns its own verdict if it was, else Refused(ABANDONED)."""
        return await self.submit(Abandon(operation), deadline_ms=deadline_ms)

    async def renew(self, actor: Actor, *, deadline_ms: int | None = None) -> RenewalResult:
        """Renew `actor.lease`. Raises `RetriesExhausted`; then the outcome is unknown and the old term runs on."""
        # Renewals do not draw on the retry budget: failing binds must not use up the retries that keep a lease alive. The
        # holder's heartbeat interval bounds their rate.
        progress = self._start_call(deadline_ms, budgeted=False)
        if self._leader_unknown:
            await self._recent_status(progress)
        return await self._retry(lambda endpoint: self._renew_once(endpoint, actor), progress)

    async def heartbeat(
        self, heartbeats: Sequence[NodeHeartbeat], *, deadline_ms: int | None = None
    ) -> tuple[Sequence[bool], int]:
        """Report node states, which renews the nodes' leases. Returns whether each lease is held, and when the answered attempt
        was sent.
        """
        progress = self._start_call(deadline_ms, budgeted=False)
        if self._leader_unknown:
            await self._recent_status(progress)
        return await self._retry(lambda endpoint: self._heartbeat_once(endpoint, heartbeats), progress)

    async def heartbeat_ages(self, *, deadline_ms: int | None = None) -> tuple[HeartbeatReport, int]:
        """Return the time since each node's last heartbeat, with the instant from which these ages count."""
        return await self._retry(self._heartbeat_ages_once, self._start_call(deadline_ms))

    async def node_states(self, nodes: Sequence[str] = (), *, deadline_ms: int | None = None) -> Sequence[NodeState]:
        return await self._retry(lambda endpoint: endpoint.node_states(nodes), self._start_call(deadline_ms))

    async def status(self, *, deadline_ms: int | None = None) -> AuthorityStatus:
        """Return a fresh status; concurrent calls share one request."""
        return await self._recent_status(self._start_call(deadline_ms), stale=self._status)

    async def new_operation_id(self, *, deadline_ms: int | None = None) -> OperationID:
        """Return a new operation id, for callers that record the id before they submit."""
        return self._new_id(await self._recent_status(self._start_call(deadline_ms)))

    def authority_clock(self) -> tuple[str, int] | None:
        """Return the boot id of the authority's clock and the latest time it can show by now; None if no status is known.

        The authority's clock showed `status.now_ms` after the status request was sent. The time since sending, plus the
        allowance for clock drift, is therefore an upper bound on the time passed at the authority. A deadline checked
        against this value may appear to pass early, by the network delay and the drift allowance, but never late. Sends no
        request; call `status` from time to time.
        """
        status = self._status
        if status is None or not status.boot:
            return None
        passed_ms = self._world.clock.now_ms() - self._status_ms
        return status.boot, status.now_ms + (passed_ms * (100 + DRIFT_MAX_PERCENT) + 99) // 100

    # ------------------------------------------------------------------------------------------------------ one call

    def _start_call(self, deadline_ms: int | None, *, budgeted: bool = True) -> _SubmitProgress:
        return _SubmitProgress(*self._loop.start(deadline_ms, budgeted=budgeted), budgeted=budgeted)

    async def _retry(self, call: Callable[[Endpoint], Awaitable[T]], progress: _SubmitProgress) -> T:
        return await self._loop.run(lambda name: call(self._endpoints[name]), progress)

    def _on_switch(self, failed: str) -> None:
        self._leader_unknown, self._last_failed = True, (failed, self._world.clock.now_ms())

    def _new_id(self, status: AuthorityStatus) -> OperationID:
        return operation_id(status.incarnation, status.window, self._world.ids.nonce())

    async def _send(self, progress: _SubmitProgress) -> list[Verdict]:
        return await self._retry(lambda endpoint: self._submit_once(endpoint, progress), progress)

    async def _submit_once(self, endpoint: Endpoint, progress: _SubmitProgress) -> list[Verdict]:
        passed_ms = self._world.clock.now_ms() - progress.submitted_ms
        operations = [_with_age(operation, passed_ms) for operation in progress.operations]
        verdicts = list(await endpoint.submit(operations))
        if len(verdicts) != len(operations):
            # A reply with a wrong number of verdicts belongs to another request; it proves nothing about this one.
            raise OutcomeUnknown(f"{len(verdicts)} verdicts on {len(operations)} operations")
        return verdicts

    async def _renew_once(self, endpoint: Endpoint, actor: Actor) -> RenewalResult:
        sent_ms = self._world.clock.now_ms()
        return RenewalResult(await endpoint.renew(actor), sent_ms)

    async def _heartbeat_once(self, endpoint: Endpoint, heartbeats: Sequence[NodeHeartbeat]) -> tuple[Sequence[bool], int]:
        sent_ms = self._world.clock.now_ms()
        return await endpoint.heartbeat(heartbeats), sent_ms

    async def _heartbeat_ages_once(self, endpoint: Endpoint) -> tuple[HeartbeatReport, int]:
        sent_ms = self._world.clock.now_ms()
        return await endpoint.heartbeat_ages(), sent_ms

    async def _resubmit_expired(
        self, progress: _SubmitProgress, status: AuthorityStatus, verdicts: list[Verdict], expired: Sequence[int]
    ) -> list[Verdict]:
        """Submit expired operations once more, under ids of the current window. Only valid if no earlier attempt had any
        effect.
        """
        try:
            status = await self._recent_status(_SubmitProgress(progress.submitted_ms, progress.deadline_ms), stale=status)
        except RetriesExhausted:
            return verdicts  # they remain correct: these operations were refused
        operations = list(progress.operations)
        for index in expired:
            operations[index] = replace(operations[index], id=self._new_id(status))
        retry = _SubmitProgress(progress.submitted_ms, progress.deadline_ms, tuple(operations[index] for index in expired))
        retry.failures, retry.last_reason = progress.failures, progress.last_reason
        try:
            answers = await self._send(retry)
        except RetriesExhausted as error:
            # Return all operations, so that no verdict is lost: resuming the ones already decided returns the same verdicts.
            raise RetriesExhausted(
                error.reason,
                operations=tuple(operations),
                outcome_unknown=error.outcome_unknown or len(expired) < len(operations),
                submitted_ms=progress.submitted_ms,
            ) from error
        verdicts = list(verdicts)
        for index, answer in zip(expired, answers, strict=True):
            verdicts[index] = answer
        return verdicts

    # --------------------------------------------------------------------------------------------------------- status

    async def _recent_status(self, progress: _SubmitProgress, stale: AuthorityStatus | None = None) -> AuthorityStatus:
        """Return a status younger than half a window that is not `stale`. Concurrent calls share one request."""
        if (known := self._cached_status(stale)) is not None:
            return known
        remaining_ms = progress.deadline_ms - self._world.clock.now_ms()
        try:
            async with self._world.clock.timeout_ms(remaining_ms), self._status_lock:
                if (known := self._cached_status(stale)) is None:
                    known = self._record_status(*await self._retry(self._status_once, progress))
                return known
        except TimeoutError:
            raise progress.exhausted("the deadline passed before the status was known") from None
        finally:
            progress.unknown_outcomes = 0  # a lost status reply does not affect the operations, which were not sent yet

    def _cached_status(self, stale: AuthorityStatus | None) -> AuthorityStatus | None:
        status = self._status
        if status is None or status is stale or self._leader_unknown:
            return None
        age_ms = self._world.clock.now_ms() - self._status_ms
        return status if 2 * age_ms < status.window_ms else None

    async def _status_once(self, endpoint: Endpoint) -> tuple[AuthorityStatus, int]:
        sent_ms = self._world.clock.now_ms()
        return await endpoint.status(), sent_ms

    def _record_status(self, status: AuthorityStatus, sent_ms: int) -> AuthorityStatus:
        known = self._status
        if known is not None and known.incarnation == status.incarnation and known.window > status.window:
            status = replace(status, window=known.window)  # an endpoint that lags must not move the window back
        # Do not return at once to an endpoint that was just left: a client that cannot reach the leader must not try it before
        # every call.
        last_failed, failed_ms = self._last_failed
        if status.leader in self._endpoints and (status.leader != last_failed or 2 * (sent_ms - failed_ms) >= status.window_ms):
            self._servers.current = status.leader
        self._leader_unknown = False
        self._status, self._status_ms = status, sent_ms
        return status


def _is_expired(verdict: Verdict) -> bool:
    return isinstance(verdict, Refused) and verdict.code is Code.OPERATION_EXPIRED


def _with_age(operation: Operation, passed_ms: int) -> Operation:
    """Add the time that has passed to the age of the evidence. Evidence is not part of the hashed payload, so the id stays
    valid.
    """
    if passed_ms <= 0 or operation.evidence == NO_EVIDENCE:
        return operation
    evidence = operation.evidence
    return replace(operation, evidence=replace(evidence, age_ms=evidence.age_ms + passed_ms))
