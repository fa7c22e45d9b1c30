"""Retry loop of a call: deadline, backoff with jitter, retry budget, Retry-After and rotation over servers.

Used by authority_client.py and api_caller.py, which define what an attempt sends, what its errors mean (`classify`) and what is
raised in the end. The loop knows no operation ids: it repeats an attempt unchanged, and with it the id.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from remit.client.retry import RetryBudget, RetryPolicy
from remit.world.interfaces import Clock, Randomness

T = TypeVar("T")


class AttemptFailure(NamedTuple):
    """How one attempt failed.

    `outcome_unknown`: the request may have been applied. `retry_after_ms`: the server's Retry-After. `hint`: the server to
    try next.
    """

    reason: str = ""
    outcome_unknown: bool = False
    retry_after_ms: int = 0
    hint: str = ""


class CallProgress(ABC):
    """Progress of one call over its attempts. At most one attempt is in flight at a time."""

    __slots__ = ("budgeted", "deadline_ms", "failures", "followed_hint", "last_reason", "unknown_outcomes")

    def __init__(self, deadline_ms: int, *, budgeted: bool = True) -> None:
        self.deadline_ms, self.budgeted = deadline_ms, budgeted
        self.failures = self.unknown_outcomes = 0
        self.followed_hint = False
        self.last_reason = ""

    def record_failure(self, failure: AttemptFailure) -> None:
        """Count a failed attempt. The last known reason is kept: an attempt that ends without one does not erase it."""
        self.failures += 1
        self.unknown_outcomes += failure.outcome_unknown
        self.last_reason = failure.reason or self.last_reason

    @abstractmethod
    def exhausted(self, reason: str) -> Exception:
        """Return the error of a call whose attempts all failed."""


class ServerRotation:
    """The server in use, of several; after a failure the next one, or the one that a server hinted at.

    `on_switch` is called with the name of each server that is left.
    """

    def __init__(self, names: Sequence[str], on_switch: Callable[[str], None] | None = None) -> None:
        if not names:
            raise ValueError("no server given; name at least one")
        self._names = tuple(names)
        self._on_switch = on_switch
        self.current = self._names[0]

    def switch_from(self, failed: str, hint: str = "") -> bool:
        """Switch away from a failed server; return whether the next one is the hinted one."""
        if self.current == failed:  # otherwise a concurrent call has switched already; use its choice
            following = (self._names.index(failed) + 1) % len(self._names)
            self.current = hint if hint in self._names and hint != failed else self._names[following]
            if self._on_switch is not None:
                self._on_switch(failed)
        return self.current == hint != failed


class RetryLoop:
    """Retries calls to the servers of a scope. Calls may run concurrently; they share the current server and the budget.

    `classify` returns how an attempt failed; None for an error that is an answer, which is raised as it is.
    """

    def __init__(
        self,
        servers: ServerRotation,
        clock: Clock,
        randomness: Randomness,
        policy: RetryPolicy,
        budget: RetryBudget | None,
        classify: Callable[[Exception], AttemptFailure | None],
    ) -> None:
        self._servers, self._clock, self._randomness, self._classify = servers, clock, randomness, classify
        self._policy = policy
        self._budget = RetryBudget() if budget is None else budget

    def start(self, deadline_ms: int | None = None, *, budgeted: bool = True) -> tuple[int, int]:
        """Count a call's first attempt. Return the time now and the time at which the call ends, after `deadline_ms` or as the
        policy says.
        """
        now_ms = self._clock.now_ms()
        if budgeted:
            self._budget.on_first_attempt(now_ms)
        return now_ms, now_ms + (self._policy.deadline_ms if deadline_ms is None else deadline_ms)

    async def run(self, attempt: Callable[[str], Awaitable[T]], progress: CallProgress) -> T:
        """Try one server after another until one answers. Ends with an answer, or with `progress.exhausted` by the deadline."""
        while (remaining_ms := progress.deadline_ms - self._clock.now_ms()) > 0:
            server = self._servers.current
            try:
                async with self._clock.timeout_ms(min(self._policy.try_ms, remaining_ms)):
                    return await attempt(server)
            except TimeoutError as error:
                failure = AttemptFailure(str(error), outcome_unknown=True)
            except Exception as error:
                classified = self._classify(error)
                if classified is None:
                    raise
                failure = classified
            progress.record_failure(failure)
            hinted = self._servers.switch_from(server, failure.hint)
            await self._pause(progress, failure.retry_after_ms, hinted)
        raise progress.exhausted("the deadline passed")

    async def _pause(self, progress: CallProgress, retry_after_ms: int, hinted: bool) -> None:
        """Wait before the next attempt, or raise `progress.exhausted` if there will be none."""
        now_ms = self._clock.now_ms()
        remaining_ms = progress.deadline_ms - now_ms
        if progress.failures >= self._policy.attempts_max:
            raise progress.exhausted(f"{progress.failures} attempts failed")
        # A leader hint is followed at once, but not twice in a row: two servers that point at each other must not cause a busy
        # loop.
        progress.followed_hint = hinted and not progress.followed_hint
        pause_ms = 0
        if not progress.followed_hint:
            backoff_ms = self._policy.backoff_ms(progress.failures, remaining_ms - retry_after_ms, self._randomness)
            pause_ms = retry_after_ms + backoff_ms
        if pause_ms >= remaining_ms:
            raise progress.exhausted("the deadline passes before the next attempt")
        if progress.budgeted:
            wait_ms = self._budget.take(now_ms, remaining_ms - 1)
            if wait_ms is None:
                raise progress.exhausted("the retry budget is exhausted")
            pause_ms = max(pause_ms, wait_ms)
        await self._clock.sleep_ms(pause_ms)
