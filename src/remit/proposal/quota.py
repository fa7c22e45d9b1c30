"""Which ledger a tenant's work is charged to, and how much is left in it.

Computed from the view; the authority decides. Grants that this scope holds for a tenant come before the tenant's own quota,
because a scope that holds such a grant is not the tenant's home scope.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from remit.law.ledgers import GrantLedger
from remit.model.claims import Code
from remit.model.resources import DEVICES_PREFIX, Amount
from remit.observation.scheduler_view import SchedulerView


class QuotaSource(NamedTuple):
    """A ledger to charge. `unusable` is the reason why nothing can be charged to it, regardless of its balance."""

    name: str
    ledger: GrantLedger | None
    unusable: Code | None

    def covers(self, charge: Iterable[tuple[str, int]], count: int) -> int:
        """How many replicas with this charge the ledger covers, up to `count`."""
        if self.ledger is None or self.unusable is not None:
            return 0
        available = self.ledger.free
        for name, need in charge:
            if need:
                count = min(count, max(available.get(name, 0), 0) // need)
        return count

    def shortage_text(self, charge: Iterable[tuple[str, int]], count: int) -> str:
        """Why the ledger does not cover `count` replicas with this charge."""
        if self.ledger is None:
            return f"{self.name} does not exist in this scope"
        if self.unusable is not None:
            return f"nothing can be charged to {self.name}"
        needs = {name: need * count for name, need in charge}
        left = {name: max(self.ledger.free.get(name, 0), 0) for name in needs}
        total = {name: self.ledger.amount.get(name, 0) for name in needs}
        text, needed_by = (
            f"{self.name} has too little quota left",
            "one replica needs" if count == 1 else f"{count} replicas need",
        )
        if exceeded := [name for name, need in needs.items() if need > total[name]]:
            cure = "a raised quota" if self.name.startswith("tenant/") else "a larger grant"
            return (
                f"{text}: it has {_listed(total, exceeded)} in total, and {needed_by} {_listed(needs, exceeded)}, "
                f"so only {cure} helps"
            )
        if short := [name for name, need in needs.items() if need > left[name]]:
            return f"{text}: {_listed(left, short)} of {_listed(total, short)}; {needed_by} {_listed(needs, short)}"
        return text

    @property
    def reason(self) -> Code:
        return self.unusable or Code.OVER_QUOTA


def _listed(amounts: Mapping[str, int], names: Iterable[str]) -> str:
    return ", ".join(
        str(Amount({name: amounts[name]})) if amounts[name] else f"no {name.removeprefix(DEVICES_PREFIX)}" for name in names
    )


def quota_source(
    view: SchedulerView, tenant: str, now_ms: int, charge: Iterable[tuple[str, int]] = (), count: int = 1
) -> QuotaSource:
    """The first grant by name that covers `count` of these charges; otherwise the first one that is usable.

    An expired or exhausted grant must not hide the next one.
    """
    slices, pairs = sorted(view.quota_ledgers.slices.get(tenant, ())), tuple(charge)
    sources = [_source(view, name, now_ms) for name in slices or (f"tenant/{tenant}",)]
    sufficient = (source for source in sources if source.unusable is None and source.covers(pairs, count) >= count)
    return next(sufficient, None) or next((source for source in sources if source.unusable is None), sources[0])


def _source(view: SchedulerView, name: str, now_ms: int) -> QuotaSource:
    ledger = view.quota_ledgers.ledgers.get(name)
    if ledger is None:
        return QuotaSource(name, None, Code.OVER_QUOTA)
    if not ledger.is_live:
        return QuotaSource(name, ledger, Code.GRANT_VOID)
    return QuotaSource(name, ledger, None if ledger.is_unexpired(now_ms) else Code.GRANT_EXPIRED)
