"""How request handlers reach the authority of the scope, in this process or through the leading server.

Makes no decisions: it submits operations with retries, reads committed objects and runs dry runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from remit.client.authority_client import AuthorityClient
from remit.client.endpoint import EndpointError, NotLeader
from remit.client.retry import RetryPolicy
from remit.commitment.dry_run import DryRunResult, dry_run
from remit.commitment.standby import Standby
from remit.model.claims import Actor, AnyClaim, Operation, OperationID, Verdict, operation_id
from remit.model.kinds.registry import AnyObject
from remit.world.interfaces import World

DEADLINE_MS: Final = 8_000
RETRY_MS: Final = 2_000
"""Deadline of a call to the authority, so that every request is answered within ten seconds (L14), also while the disk is full
and nothing can be written. The last `RETRY_MS` are reserved for a retry when the first call gets no answer.
"""


class AuthorityAccess:
    """The authority behind `standby`, which forwards to the leader; `standby.leading` is set while this server leads."""

    def __init__(self, standby: Standby, world: World) -> None:
        self.standby = standby
        self._world = world
        self._clients: dict[Actor, AuthorityClient] = {}

    @property
    def scope(self) -> str:
        return self.standby.scope

    @property
    def name(self) -> str:
        """Name of this server among the servers of its scope."""
        return self.standby.name

    def client(self, actor: Actor) -> AuthorityClient:
        """Return the client that submits claims of `actor` to the authority, with retries."""
        client = self._clients.get(actor)
        if client is None:
            policy = RetryPolicy(deadline_ms=DEADLINE_MS)
            client = self._clients[actor] = AuthorityClient({self.name: self.standby}, actor, self._world, policy=policy)
        return client

    async def issue_operation_id(self, actor: Actor) -> OperationID:
        """Return a new operation id. The leader knows the current window without a call to the authority."""
        authority = self.standby.leading
        if authority is None:
            return await self.client(actor).new_operation_id()
        return operation_id(authority.head.incarnation, authority.outcomes.window, self._world.ids.nonce())

    async def submit(self, operations: Sequence[Operation]) -> Sequence[Verdict]:
        """Return the verdicts on operations of one actor.

        If this server is the leader, the operations go to the authority in this process. If that fails, they are retried
        under the same ids, like those of any client. Raises `RetriesExhausted`.
        """
        clock = self._world.clock
        authority, deadline_ms = self.standby.leading, clock.now_ms() + DEADLINE_MS
        if authority is not None:
            with suppress(EndpointError, TimeoutError):
                async with clock.timeout_ms(DEADLINE_MS - RETRY_MS):
                    return await authority.submit(operations)
        return await self.client(operations[0].actor).resume(operations, deadline_ms=deadline_ms - clock.now_ms())

    def committed_object(self, name: str) -> tuple[AnyObject, int] | None:
        """Return the committed object under key `name` and its revision, from the authority's books. None if this server is not
        the leader, or there is no such object.

        The books are never ahead of the store, and they contain every write that has been answered.
        """
        authority = self.standby.leading
        return None if authority is None else authority.books.objects.get(name)

    def dry_run(self, actor: Actor, claims: Sequence[AnyClaim]) -> list[DryRunResult]:
        """Return what the authority would answer to these claims, without writing. Raises `NotLeader`: only the leader can try
        claims.
        """
        if self.standby.leading is None:
            raise NotLeader(reason="this server is not the leader, and only the leader can do a dry run")
        return dry_run(self.standby.leading, actor, claims)
