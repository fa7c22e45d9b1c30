"""Claim client: submits operations until a verdict arrives, under the same id.

Ids, retries, patience; what the answer should be is not decided here.

The rule that everything rests on: **an intent keeps its id.** The authority stores each verdict under its operation id, so
asking again under the same id gets the same answer, from whichever endpoint, however often the first one was lost. A second
id for one intent could do the deed twice. So after silence the client repeats the id; when its patience ends it hands the
ids back (`NoAnswer`), and the caller asks them again (`resume`) or makes sure that they never happen (`abandon`).

One case allows a new id: an authority that refuses as expired what this very call has made and sent, with every earlier try
known to have done nothing. That id was never executed and never will be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from msgspec.structs import replace

from remit.client.endpoint import Endpoint, NoVerdict, Overloaded, Silence, Status, Turned
from remit.client.retry import RetryBudget, RetryShape
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
from remit.model.wire.agent_messages import Beat, Heard, NodeState
from remit.world.interfaces import World

T = TypeVar("T")

NOTHING_SEEN: Final = Evidence()


class NoAnswer(Exception):
    """Patience ended without a verdict. `silent`: the operations may have happened; else none of them has.

    Without `operations` nothing had been asked yet. Otherwise ask the same ones again (`Client.resume(e.operations,
    asked_ms=e.asked_ms)`), or `Client.abandon` each id; never ask the same intent under a new id while `silent`.
    """

    def __init__(self, why: str, *, operations: tuple[Operation, ...] = (), silent: bool = False, asked_ms: int = 0) -> None:
        self.why, self.operations, self.silent, self.asked_ms = why, operations, silent, asked_ms
        if not operations:
            cure = "nothing was asked; ask anew"
        elif silent:
            cure = f"{len(operations)} operations may have happened: resume the same ids, or abandon them"
        else:
            cure = f"none of {len(operations)} operations has happened: resume them later"
        super().__init__(f"no answer: {why}; {cure}")

    @property
    def operation_ids(self) -> tuple[OperationID, ...]:
        return tuple(operation.id for operation in self.operations)


class Renewal(NamedTuple):
    """`sent_ms` is when the try that was answered was sent, on the asker's own clock: its term counts from then."""

    held: bool
    sent_ms: int


class _Course:
    """How one call has fared so far. Not more than one try of it is ever under way."""

    __slots__ = ("asked_ms", "budgeted", "failures", "hurried", "last_why", "operations", "silences", "until_ms")

    def __init__(self, asked_ms: int, until_ms: int, operations: tuple[Operation, ...] = (), *, budgeted: bool = True) -> None:
        self.asked_ms, self.until_ms, self.operations, self.budgeted = asked_ms, until_ms, operations, budgeted
        self.failures = 0
        self.silences = 0
        self.hurried = False
        self.last_why = ""

    def failed(self, error: NoVerdict | TimeoutError) -> None:
        """One try more without an answer. What was said last is kept: a try that ends without a word does not hide it."""
        self.failures += 1
        if isinstance(error, NoVerdict) and error.why:
            self.last_why = error.why

    def no_answer(self, why: str) -> NoAnswer:
        if self.last_why:
            why = f"{why} (the last answer was: {self.last_why})"
        silent = self.silences > 0 and bool(self.operations)
        return NoAnswer(why, operations=self.operations, silent=silent, asked_ms=self.asked_ms)


class Client:
    """One asker. Its calls may run side by side; they share the endpoint that last worked, the status, and the retry budget.

    `endpoints` are tried in their order, round and round; their names are what `Turned` and `Status` may hint at. A standby
    passes on, which costs a hop and a look into the store each time: so whoever has strayed learns first who leads now. Set
    `actor` anew when the asker has acquired a lease. To survive its own cancellation a caller takes an id from `issue` first,
    and passes it.
    """

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        actor: Actor,
        world: World,
        *,
        shape: RetryShape = RetryShape(),
        budget: RetryBudget | None = None,
    ) -> None:
        if not endpoints:
            raise ValueError("a client needs at least one endpoint")
        self.actor = actor
        self._endpoints = dict(endpoints)
        self._names = tuple(self._endpoints)
        self._current = self._names[0]
        self._strayed = True
        """Has it turned from an endpoint since it last learned who leads?"""
        self._left = ("", 0)
        """Which endpoint it turned from last, and when."""
        self._world = world
        self._shape = shape
        self._budget = RetryBudget() if budget is None else budget
        self._status: Status | None = None
        self._status_ms = 0
        self._status_turn = asyncio.Lock()

    @property
    def incarnation(self) -> str:
        """The scope's, as it was last told; empty before that."""
        return "" if self._status is None else self._status.incarnation

    # ----------------------------------------------------------------------------------------------------------- asking

    async def ask(
        self,
        claim: AnyClaim,
        *,
        evidence: Evidence = NOTHING_SEEN,
        operation_id: OperationID | None = None,
        trace: str = "",
        deadline_ms: int | None = None,
    ) -> Verdict:
        """The verdict on one claim. A given `operation_id` is kept whatever happens: it may have been sent before this call."""
        if operation_id is None:
            return (await self.ask_many([claim], evidence=evidence, trace=trace, deadline_ms=deadline_ms))[0]
        operation = Operation(operation_id, self.actor, claim, evidence, trace)
        return (await self.resume([operation], deadline_ms=deadline_ms))[0]

    async def ask_many(
        self,
        claims: Sequence[AnyClaim],
        *,
        evidence: Evidence = NOTHING_SEEN,
        trace: str = "",
        deadline_ms: int | None = None,
        actors: Sequence[Actor] = (),
    ) -> list[Verdict]:
        """The verdicts on claims that travel together; each stands for itself. `actors`: who asks each, if not `actor` all."""
        if not claims:
            return []
        course = self._begin(deadline_ms)
        status = await self._fresh_status(course)
        askers = actors or [self.actor] * len(claims)
        course.operations = tuple(
            Operation(self._id_in(status), asker, claim, evidence, trace) for asker, claim in zip(askers, claims, strict=True)
        )
        verdicts = await self._send(course)
        expired = [index for index, verdict in enumerate(verdicts) if _is_expired(verdict)]
        if not expired or course.silences:
            return verdicts
        return await self._ask_expired_anew(course, status, verdicts, expired)

    async def resume(
        self, operations: Sequence[Operation], *, asked_ms: int | None = None, deadline_ms: int | None = None
    ) -> list[Verdict]:
        """Ask operations again as they are. `asked_ms`: when their evidence was as old as it says (see `NoAnswer`)."""
        if not operations:
            return []
        course = self._begin(deadline_ms)
        course.operations = tuple(operations)
        if asked_ms is not None:
            course.asked_ms = asked_ms
        return await self._send(course)

    async def abandon(self, operation: OperationID, *, deadline_ms: int | None = None) -> Verdict:
        """Make sure that an operation never happens. Its own verdict if it already has, else Refused(ABANDONED)."""
        return await self.ask(Abandon(operation), deadline_ms=deadline_ms)

    async def renew(self, actor: Actor, *, deadline_ms: int | None = None) -> Renewal:
        """Ask that `actor.lease` go on. Raises `NoAnswer`; then nothing is known, and the old term runs on."""
        # Out of the budget: binds that fail must not use up what keeps a lease alive. The asker's beat bounds these.
        course = self._begin(deadline_ms, budgeted=False)
        if self._strayed:
            await self._fresh_status(course)
        return await self._reach(lambda endpoint: self._renew_once(endpoint, actor), course)

    async def beat(self, beats: Sequence[Beat], *, deadline_ms: int | None = None) -> tuple[Sequence[bool], int]:
        """Say how nodes are, which renews their leases; whether each is held, and when the try that was answered was sent."""
        course = self._begin(deadline_ms, budgeted=False)
        if self._strayed:
            await self._fresh_status(course)
        return await self._reach(lambda endpoint: self._beat_once(endpoint, beats), course)

    async def heard(self, *, deadline_ms: int | None = None) -> tuple[Heard, int]:
        """For how long nothing was heard of each node, counted from no later than the instant that comes with it."""
        return await self._reach(self._heard_once, self._begin(deadline_ms))

    async def states(self, nodes: Sequence[str] = (), *, deadline_ms: int | None = None) -> Sequence[NodeState]:
        return await self._reach(lambda endpoint: endpoint.states(nodes), self._begin(deadline_ms))

    async def status(self, *, deadline_ms: int | None = None) -> Status:
        """Where the scope stands, read anew; calls at the same time share one answer."""
        return await self._fresh_status(self._begin(deadline_ms), stale=self._status)

    async def issue(self, *, deadline_ms: int | None = None) -> OperationID:
        """A new id, for a caller who writes it down before asking."""
        return self._id_in(await self._fresh_status(self._begin(deadline_ms)))

    def authority_ms(self) -> tuple[str, int] | None:
        """The boot of the authority's clock, and the latest that it can show by now; None if no status has told it.

        It showed so much at some time after the question was sent: so what has passed here since the sending, with room for
        drift, is at least what has passed there since. Whoever takes this for the time sees a deadline pass early, by what
        the way to the authority took and by the room for drift, and never late. It asks nobody; ask for the status at times.
        """
        status = self._status
        if status is None or not status.boot:
            return None
        passed_ms = self._world.clock.now_ms() - self._status_ms
        return status.boot, status.now_ms + (passed_ms * (100 + DRIFT_MAX_PERCENT) + 99) // 100

    # ------------------------------------------------------------------------------------------------------ one call

    def _begin(self, deadline_ms: int | None, *, budgeted: bool = True) -> _Course:
        now_ms = self._world.clock.now_ms()
        if budgeted:
            self._budget.first_try(now_ms)
        return _Course(now_ms, now_ms + (self._shape.deadline_ms if deadline_ms is None else deadline_ms), budgeted=budgeted)

    def _id_in(self, status: Status) -> OperationID:
        return operation_id(status.incarnation, status.window, self._world.ids.nonce())

    async def _send(self, course: _Course) -> list[Verdict]:
        return await self._reach(lambda endpoint: self._ask_once(endpoint, course), course)

    async def _ask_once(self, endpoint: Endpoint, course: _Course) -> list[Verdict]:
        passed_ms = self._world.clock.now_ms() - course.asked_ms
        operations = [_aged(operation, passed_ms) for operation in course.operations]
        verdicts = list(await endpoint.ask(operations))
        if len(verdicts) != len(operations):
            # An answer to something else is no answer to this.
            raise Silence(f"{len(verdicts)} verdicts on {len(operations)} operations")
        return verdicts

    async def _renew_once(self, endpoint: Endpoint, actor: Actor) -> Renewal:
        sent_ms = self._world.clock.now_ms()
        return Renewal(await endpoint.renew(actor), sent_ms)

    async def _beat_once(self, endpoint: Endpoint, beats: Sequence[Beat]) -> tuple[Sequence[bool], int]:
        sent_ms = self._world.clock.now_ms()
        return await endpoint.beat(beats), sent_ms

    async def _heard_once(self, endpoint: Endpoint) -> tuple[Heard, int]:
        sent_ms = self._world.clock.now_ms()
        return await endpoint.heard(), sent_ms

    async def _ask_expired_anew(
        self, course: _Course, status: Status, verdicts: list[Verdict], expired: Sequence[int]
    ) -> list[Verdict]:
        """Once more, under ids of the window that is current now. Only after tries that are all known to have done nothing."""
        try:
            status = await self._fresh_status(_Course(course.asked_ms, course.until_ms), stale=status)
        except NoAnswer:
            return verdicts  # still true: these were refused
        operations = list(course.operations)
        for index in expired:
            operations[index] = replace(operations[index], id=self._id_in(status))
        again = _Course(course.asked_ms, course.until_ms, tuple(operations[index] for index in expired))
        again.failures, again.last_why = course.failures, course.last_why
        try:
            answers = await self._send(again)
        except NoAnswer as error:
            # All of them, so that no verdict is lost: resuming those that were answered finds the same answers.
            raise NoAnswer(
                error.why,
                operations=tuple(operations),
                silent=error.silent or len(expired) < len(operations),
                asked_ms=course.asked_ms,
            ) from error
        verdicts = list(verdicts)
        for index, answer in zip(expired, answers, strict=True):
            verdicts[index] = answer
        return verdicts

    # ------------------------------------------------------------------------------------------------------- reaching

    async def _reach(self, call: Callable[[Endpoint], Awaitable[T]], course: _Course) -> T:
        """Try one endpoint after another until one answers. Ends with an answer or `NoAnswer`, by the deadline."""
        clock = self._world.clock
        while (left_ms := course.until_ms - clock.now_ms()) > 0:
            name, rest_ms, hinted = self._current, 0, False
            try:
                async with clock.timeout_ms(min(self._shape.try_ms, left_ms)):
                    return await call(self._endpoints[name])
            except (Silence, TimeoutError) as error:
                course.failed(error)
                course.silences += 1
                self._turn_from(name)
            except Turned as turned:
                course.failed(turned)
                hinted = self._turn_from(name, turned.hint)
            except Overloaded as overloaded:
                course.failed(overloaded)
                rest_ms = overloaded.retry_after_ms
                self._turn_from(name)
            await self._pause(course, rest_ms, hinted)
        raise course.no_answer("the deadline passed")

    async def _pause(self, course: _Course, rest_ms: int, hinted: bool) -> None:
        """Wait before the next try, or raise `NoAnswer` if there will be none."""
        now_ms = self._world.clock.now_ms()
        left_ms = course.until_ms - now_ms
        if course.failures >= self._shape.attempts_max:
            raise course.no_answer(f"{course.failures} tries failed")
        # A hint is followed at once, but not twice in a row: two endpoints that point at each other must not spin us.
        course.hurried = hinted and not course.hurried
        pause_ms = (
            0 if course.hurried else rest_ms + self._shape.pause_ms(course.failures, left_ms - rest_ms, self._world.chance)
        )
        if pause_ms >= left_ms:
            raise course.no_answer("the deadline passes before another try may be made")
        if course.budgeted:
            wait_ms = self._budget.take(now_ms, left_ms - 1)
            if wait_ms is None:
                raise course.no_answer("the retry budget is used up")
            pause_ms = max(pause_ms, wait_ms)
        await self._world.clock.sleep_ms(pause_ms)

    def _turn_from(self, name: str, hint: str = "") -> bool:
        """Leave an endpoint that did not serve; true if the next one is the one hinted at."""
        if self._current == name:  # else another call has turned already: go where it went
            following = (self._names.index(name) + 1) % len(self._names)
            self._current = hint if hint in self._endpoints and hint != name else self._names[following]
            self._strayed, self._left = True, (name, self._world.clock.now_ms())
        return self._current == hint != name

    # --------------------------------------------------------------------------------------------------------- status

    async def _fresh_status(self, course: _Course, stale: Status | None = None) -> Status:
        """A status younger than half a window, and not the one that proved `stale`. One call fetches it for all."""
        if (known := self._known(stale)) is not None:
            return known
        left_ms = course.until_ms - self._world.clock.now_ms()
        try:
            async with self._world.clock.timeout_ms(left_ms), self._status_turn:
                if (known := self._known(stale)) is None:
                    known = self._learn(*await self._reach(self._status_once, course))
                return known
        except TimeoutError:
            raise course.no_answer("the deadline passed before the status was known") from None
        finally:
            course.silences = 0  # a silent status says nothing about operations, which were not sent yet

    def _known(self, stale: Status | None) -> Status | None:
        status = self._status
        if status is None or status is stale or self._strayed:
            return None
        age_ms = self._world.clock.now_ms() - self._status_ms
        return status if 2 * age_ms < status.window_ms else None

    async def _status_once(self, endpoint: Endpoint) -> tuple[Status, int]:
        sent_ms = self._world.clock.now_ms()
        return await endpoint.status(), sent_ms

    def _learn(self, status: Status, sent_ms: int) -> Status:
        known = self._status
        if known is not None and known.incarnation == status.incarnation and known.window > status.window:
            status = replace(status, window=known.window)  # an endpoint that lags does not turn windows back
        # Not back at once to one that was just left: whoever cannot reach the leader does not try that before every call.
        left, left_ms = self._left
        if status.leader in self._endpoints and (status.leader != left or 2 * (sent_ms - left_ms) >= status.window_ms):
            self._current = status.leader
        self._strayed = False
        self._status, self._status_ms = status, sent_ms
        return status


def _is_expired(verdict: Verdict) -> bool:
    return isinstance(verdict, Refused) and verdict.code is Code.OPERATION_EXPIRED


def _aged(operation: Operation, passed_ms: int) -> Operation:
    """Evidence grows older while one asks; it is no part of the payload, so the id stays good. No evidence has no age."""
    if passed_ms <= 0 or operation.evidence == NOTHING_SEEN:
        return operation
    evidence = operation.evidence
    return replace(operation, evidence=replace(evidence, age_ms=evidence.age_ms + passed_ms))
