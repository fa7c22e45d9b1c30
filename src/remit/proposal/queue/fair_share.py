"""Dominant resource shares of tenants, with decaying usage (DRF).

No clock: every method gets the time as a parameter.

A tenant's dominant share is the largest fraction of any cluster resource that it holds, divided by its weight. The tenant
with the smallest share goes first; repeating this is dominant resource fairness (Ghodsi et al., NSDI'11).

**Decayed usage** is the tenant's usage averaged over the past, where usage one half-life ago counts half as much as usage
now: with a constant usage u, the average moves from r to u + (r - u) / 2 in one half-life. A tenant with high recent usage
goes after one without, even when both hold nothing now; otherwise a tenant that submits short jobs in bursts would come
first at the start of every burst. The average stays within the range of the tenant's past usage, so it is bounded by cluster
capacity; it only rises towards a higher usage and falls towards a lower one, and holding more never lowers it. An amount
charged and returned at the same instant leaves no trace. A half-life of 0 disables decay and gives plain DRF.

**Rounding never changes an order.** Usage and decayed usage are integers, and a share is one division of two integers, which
Python rounds correctly: equal shares compare equal, and a larger share never becomes the smaller number. Shares that differ
by less than one part in 2**53 tie, and ties are broken by the tenant's name. The decay is computed with integers too, so
that all machines get the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import isqrt
from types import MappingProxyType
from typing import Final

Vector = tuple[tuple[str, int], ...]
"""Amount of each resource, as in `Amount.pairs`."""

ShareParts = list[tuple[str, int, int]]

HALF_LIFE_MS: Final = 10 * 60_000
FREE_REPLICA_SHARE: Final = 1 / 1024
"""Share charged within one round for a replica that requests no counted resource. If it were 0, an endless supply of such
replicas would always come first.
"""

NO_WEIGHTS: Final[Mapping[str, int]] = MappingProxyType({})
_ONE_BITS: Final = 64
_STEP_BITS: Final = 48
"""Steps per half-life, as a power of 2. A millisecond must span many steps, or charges in every millisecond would leave no
trace.
"""
_UNIT_BITS: Final = 20
"""Resolution of decayed usage, 2**-20 of a unit, so that frequent updates do not wear it away by rounding."""
_SWEEP_MIN: Final = 64


def _roots() -> tuple[int, ...]:
    """2**-(1/2), 2**-(1/4), ... in units of 2**-64, each the square root of the previous one."""
    roots = [isqrt(1 << (2 * _ONE_BITS - 1))]
    while len(roots) < _STEP_BITS:
        roots.append(isqrt(roots[-1] << _ONE_BITS))
    return tuple(roots)


_ROOTS: Final = _roots()


@lru_cache(maxsize=256)  # many tenants were last charged at the same instant
def decayed(elapsed_ms: int, half_life_ms: int) -> int:
    """2**64 decayed by this much time."""
    half_lives, steps = divmod((max(0, elapsed_ms) << _STEP_BITS) // half_life_ms, 1 << _STEP_BITS)
    factor = 1 << _ONE_BITS
    for i, root in enumerate(_ROOTS, 1):
        if steps >> (_STEP_BITS - i) & 1:
            factor = factor * root >> _ONE_BITS
    return factor >> half_lives


class TenantShare:
    """One tenant's share during a round: allocations count at once. It is a copy and charges nothing in the ledger."""

    __slots__ = ("_sums", "_totals", "share")

    def __init__(self, share: float, sums: dict[str, int], totals: Mapping[str, int]) -> None:
        self.share, self._sums, self._totals = share, sums, totals

    def parts(self, amount: Vector) -> ShareParts:
        """The counted resources of an amount, with their totals; reuse the result when the same amount is added many times."""
        sums, totals = self._sums, self._totals
        parts = []
        for name, each in amount:
            if each and name in totals:
                sums.setdefault(name, 0)
                parts.append((name, each, totals[name]))
        return parts

    def add(self, parts: ShareParts, count: int = 1) -> float:
        """Adds the amount `count` times and returns the new share."""
        sums, share = self._sums, self.share
        for name, each, total in parts:
            held = sums[name] = sums[name] + each * count
            part = held / total
            if part > share:
                share = part
        if not parts:
            share += FREE_REPLICA_SHARE * count
        self.share = share
        return share


class _TenantUsage:
    """Current usage of one tenant, and its decayed usage as of `at_ms`."""

    __slots__ = ("at_ms", "decayed", "usage")

    def __init__(self, at_ms: int) -> None:
        self.usage: dict[str, int] = {}
        self.decayed: dict[str, int] = {}
        self.at_ms = at_ms


class FairShareLedger:
    """Usage of each tenant relative to the cluster's capacity.

    share = max over resources of (usage + history_weight * decayed usage) / capacity / weight. A resource without capacity is
    ignored, so that usage on removed nodes does not block a tenant from the remaining ones.
    """

    def __init__(
        self,
        capacity: Mapping[str, int],
        weights: Mapping[str, int] = NO_WEIGHTS,
        half_life_ms: int = HALF_LIFE_MS,
        *,
        history_weight: int = 1,
    ) -> None:
        if half_life_ms < 0 or history_weight < 0:
            raise ValueError(f"half_life_ms and history_weight must not be negative: {half_life_ms}, {history_weight}")
        self._half_life_ms = half_life_ms
        self._history_weight = history_weight if half_life_ms else 0
        self._tenants: dict[str, _TenantUsage] = {}
        self._sweep_at = _SWEEP_MIN
        self._weights: dict[str, int] = {}
        self._totals: dict[int, dict[str, int]] = {}
        self.set_capacity(capacity)
        for tenant, weight in weights.items():
            self.set_weight(tenant, weight)

    def __len__(self) -> int:
        """Number of tenants with usage or decayed usage."""
        return len(self._tenants)

    def set_capacity(self, capacity: Mapping[str, int]) -> None:
        """Sets the cluster's capacity of each resource."""
        self._capacity = {name: count for name, count in capacity.items() if count > 0}
        self._totals.clear()

    def set_weight(self, tenant: str, weight: int) -> None:
        """Sets a tenant's weight (default 1). Twice the weight gives half the share for the same usage."""
        if weight < 1:
            raise ValueError(f"tenant {tenant}: weight {weight} is invalid; it must be at least 1")
        if weight == 1:
            self._weights.pop(tenant, None)
        else:
            self._weights[tenant] = weight

    def charge(self, tenant: str, amount: Vector, sign: int, now_ms: int) -> None:
        """Adds `sign` times the amount to the tenant's usage; a negative sign returns it."""
        entry = self._tenants.get(tenant)
        usage = {} if entry is None else entry.usage
        for name, count in amount:
            if usage.get(name, 0) + sign * count < 0:
                raise ValueError(f"tenant {tenant} cannot return {-sign * count} of {name}: it holds {usage.get(name, 0)}")
        if entry is None:
            entry = self._add_tenant(tenant, now_ms)
        self._advance(entry, now_ms)
        usage = entry.usage
        for name, count in amount:
            usage[name] = held = usage.get(name, 0) + sign * count
            if not held:
                del usage[name]
        if not usage and not entry.decayed:
            del self._tenants[tenant]

    def usage(self, tenant: str) -> Mapping[str, int]:
        """Current usage."""
        entry = self._tenants.get(tenant)
        return {} if entry is None else dict(entry.usage)

    def decayed_usage(self, tenant: str, now_ms: int) -> Mapping[str, int]:
        """Usage averaged over the past, rounded down."""
        entry = self._tenants.get(tenant)
        if entry is None or not self._half_life_ms:
            return {}
        return {name: amount >> _UNIT_BITS for name, amount in self._decayed(entry, now_ms).items() if amount >> _UNIT_BITS}

    def share(self, tenant: str, now_ms: int) -> float:
        return self.tenant_share(tenant, now_ms).share

    def tenant_share(self, tenant: str, now_ms: int) -> TenantShare:
        """A copy of the tenant's share, to which a round adds its allocations."""
        weight = self._weights.get(tenant, 1)
        totals = self._totals.get(weight)
        if totals is None:
            totals = self._totals[weight] = {name: count * weight for name, count in self._capacity.items()}
        entry = self._tenants.get(tenant)
        if entry is None:
            return TenantShare(0.0, {}, totals)
        sums = dict(entry.usage)
        if self._history_weight:
            for name, amount in self._decayed(entry, now_ms).items():
                sums[name] = sums.get(name, 0) + (self._history_weight * amount >> _UNIT_BITS)
        share = max((count / totals[name] for name, count in sums.items() if name in totals), default=0.0)
        return TenantShare(share, sums, totals)

    def _decayed(self, tenant: _TenantUsage, now_ms: int) -> dict[str, int]:
        """Decayed usage at `now_ms`. Reading changes nothing, so the result does not depend on how often it is read."""
        if now_ms <= tenant.at_ms:
            return tenant.decayed
        factor = decayed(now_ms - tenant.at_ms, self._half_life_ms)
        amounts = {}
        for name in {**tenant.decayed, **tenant.usage}:
            usage = tenant.usage.get(name, 0) << _UNIT_BITS
            amount = usage + ((tenant.decayed.get(name, 0) - usage) * factor >> _ONE_BITS)
            if amount:
                amounts[name] = amount
        return amounts

    def _advance(self, tenant: _TenantUsage, now_ms: int) -> None:
        if self._half_life_ms and now_ms > tenant.at_ms:
            tenant.decayed = self._decayed(tenant, now_ms)
            tenant.at_ms = now_ms

    def _add_tenant(self, tenant: str, now_ms: int) -> _TenantUsage:
        """Adds a tenant. From time to time, tenants with less than one unit of decayed usage are dropped, which bounds the
        ledger.
        """
        if len(self._tenants) >= self._sweep_at:
            expired = [
                name for name, entry in self._tenants.items() if not entry.usage and not self.decayed_usage(name, now_ms)
            ]
            for name in expired:
                del self._tenants[name]
            self._sweep_at = max(_SWEEP_MIN, 2 * len(self._tenants))
        added = self._tenants[tenant] = _TenantUsage(now_ms)
        return added
