"""Which ledger a tenant's work draws on and what is left of it.

As this view has it; the authority decides.

A slice that this scope holds from another comes before the tenant's own quota: where a slice is held is not the tenant's home.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from remit.law.ledgers import GrantLedger
from remit.model.claims import Code
from remit.observation.scheduler_view import View


class Purse(NamedTuple):
    """`dead` says why nothing can be drawn on it, whatever is left."""

    name: str
    ledger: GrantLedger | None
    dead: Code | None

    def covers(self, charge: Iterable[tuple[str, int]], count: int) -> int:
        """For how many of these, up to `count`, there is enough."""
        if self.ledger is None or self.dead is not None:
            return 0
        left = self.ledger.left
        for name, need in charge:
            if need:
                count = min(count, max(left.get(name, 0), 0) // need)
        return count

    @property
    def reason(self) -> Code:
        return self.dead or Code.OVER_QUOTA


def purse(view: View, tenant: str, now_ms: int, charge: Iterable[tuple[str, int]] = (), count: int = 1) -> Purse:
    """Of several slices the first by name that covers so many of these charges; if none does, that can be drawn on at all: one
    that ran out or is used up must not hide the next.
    """
    slices, pairs = sorted(view.accounts.slices.get(tenant, ())), tuple(charge)
    found = [_opened(view, name, now_ms) for name in slices or (f"tenant/{tenant}",)]
    enough = (one for one in found if one.dead is None and one.covers(pairs, count) >= count)
    return next(enough, None) or next((one for one in found if one.dead is None), found[0])


def _opened(view: View, name: str, now_ms: int) -> Purse:
    ledger = view.ledgers.get(name)
    if ledger is None:
        return Purse(name, None, Code.OVER_QUOTA)
    if not ledger.live:
        return Purse(name, ledger, Code.GRANT_VOID)
    return Purse(name, ledger, None if ledger.alive(now_ms) else Code.GRANT_EXPIRED)
