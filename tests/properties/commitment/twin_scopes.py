"""Two scopes that receive the same requests: one of them one by one, the other all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from remit.model.claims import Operation, Verdict
from tests.properties.authority_world import Scope
from tests.properties.commitment.authority_machine import AuthorityMachine

EACH = 3
SORTS = st.sets(st.integers(0, 11), min_size=3, max_size=6)


class TwinScopes(AuthorityMachine):
    """The machine as a source of claims: it acts in one scope, and passes the operations on to another."""

    def __init__(self) -> None:
        super().__init__()
        self.batches.stop()
        self.batches = mock.patch.object(Scope, "batch_max", EACH)
        self.batches.start()
        self.other: Scope

    def scopes(self) -> list[Scope]:
        return [self.r, self.other]

    def collected(self, steps: list[tuple[int, int, int]]) -> list[list[Operation]]:
        """Requests of one batch each, made without knowledge of each other's outcome."""
        self.batch = []
        self.run_ordinary_steps(steps=steps)
        batch, self.batch = self.batch, None
        return [batch[i : i + EACH] for i in range(0, len(batch) - len(batch) % EACH, EACH)]

    async def set_up_both(self, sorts: set[int]) -> None:
        await self._set_up(sorts)
        first = self.r
        await self._set_up(sorts)
        self.other, self.r = self.r, first
        assert self.r.row("head") == self.other.row("head")


async def one_by_one(scope: Scope, asks: Sequence[list[Operation]]) -> list[Any]:
    return [await scope.send(ask) for ask in asks]


def plain(answers: list[list[Verdict]]) -> list[Verdict]:
    return [verdict for verdicts in answers for verdict in verdicts]
