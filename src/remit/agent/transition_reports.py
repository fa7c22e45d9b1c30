"""Reports transitions of replicas to the authority: one claim in flight per replica, backoff after a refusal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

from remit.agent.attempts import log_fields
from remit.agent.hosted_node import HostedNode, UnconfirmedWrites
from remit.agent.reconciler import ReportAction
from remit.agent.runtime import AgentRuntime
from remit.model.claims import Accepted, Actor, Verdict

BACKOFF_MS: Final = 200
BACKOFF_MS_MAX: Final = 15_000
CLAIM_BATCH_MAX: Final = 1_000
"""Maximum number of claims in one request."""

Report = tuple[Actor, ReportAction]
Submit = Callable[[Sequence[Any], Sequence[Actor]], Awaitable[list[Verdict] | None]]
"""Submits claims, each with its actor. Returns None if no server answered."""


class TransitionReports:
    """Claims about the replicas of all hosted nodes, and their verdicts."""

    def __init__(self, runtime: AgentRuntime, submit: Submit) -> None:
        self._runtime, self._submit = runtime, submit
        self._in_flight: dict[str, None] = {}
        self._unconfirmed = UnconfirmedWrites()
        self._backoff_until_ms: dict[str, int] = {}
        self._failures: dict[str, int] = {}

    def may_report(self, hosted: HostedNode, key: str, now_ms: int) -> bool:
        """Return whether a claim about this replica may be sent now.

        Not while another is in flight, nor before the assignments show the last accepted one, nor during the backoff after a
        refusal.
        """
        if key in self._in_flight or self._unconfirmed.is_unconfirmed(key, self._runtime.assignments.revision):
            return False
        at_ms = self._backoff_until_ms.get(key, 0)
        if at_ms > now_ms:
            self._runtime.enqueue(hosted.name, key, at_ms)
        return at_ms <= now_ms

    def mark_in_flight(self, key: str) -> None:
        self._in_flight[key] = None

    def send(self, reports: Sequence[Report]) -> None:
        """Send reports that were marked as in flight, in batches."""
        for first in range(0, len(reports), CLAIM_BATCH_MAX):
            self._runtime.spawn(self._send_batch(reports[first : first + CLAIM_BATCH_MAX]), "report")

    async def _send_batch(self, reports: Sequence[Report]) -> None:
        runtime = self._runtime
        try:
            verdicts = await self._submit([report.move for _, report in reports], [actor for actor, _ in reports])
            for index, (actor, report) in enumerate(reports):
                node, move = _node_of(actor), report.move
                runtime.log_debug(move.transition, reason=move.reason, **log_fields(node, report.attempt))
                self._on_verdict(report.attempt.key, node, None if verdicts is None else verdicts[index])
        finally:
            for actor, report in reports:
                self._in_flight.pop(report.attempt.key, None)
                runtime.enqueue(_node_of(actor), report.attempt.key)

    def _on_verdict(self, key: str, node: str, verdict: Verdict | None) -> None:
        if isinstance(verdict, Accepted):
            self._unconfirmed.add(key, node, verdict.revision)
            self._failures.pop(key, None)
            return
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause_ms = min(BACKOFF_MS_MAX, BACKOFF_MS << min(failures - 1, 10))
        jitter_ms = self._runtime.rng.jitter_ms(pause_ms // 2)
        self._backoff_until_ms[key] = self._runtime.world.clock.now_ms() + pause_ms // 2 + jitter_ms

    def pop_confirmed(self) -> Iterator[tuple[str, str]]:
        """Yield the replicas, with their nodes, whose accepted claims the assignments show by now."""
        yield from self._unconfirmed.pop_confirmed(self._runtime.assignments.revision).items()

    def reset_unconfirmed(self) -> None:
        """Forget all accepted claims. Called when a different store takes over, whose revisions cannot be compared."""
        self._unconfirmed.clear()

    def reset_backoff(self, key: str) -> None:
        self._backoff_until_ms.pop(key, None)
        self._failures.pop(key, None)


def _node_of(actor: Actor) -> str:
    return actor.lease.partition("/")[2]
