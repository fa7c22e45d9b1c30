"""Dominant resource shares of tenants, with decaying usage (DRF).

Dominant shares of tenants, with a memory that fades. No clock here: every instant is given.

A tenant's dominant share is the largest part of any one resource of the cluster that it holds, divided by its weight. Whoever
has the least goes first; done again and again, this is dominant resource fairness (Ghodsi et al., NSDI'11).

**What is remembered** is the tenant's use, averaged over the past, where what was held one half-life ago counts half as much as
what is held now: with use u held from now on, the average moves from r to u + (r - u) / 2 in one half-life. So a tenant that
used much lately gives way to one that did not, also when both hold nothing now; else whoever submits short work in bursts would
come first at the start of every burst. The average never leaves the span of what the tenant has held, so it is bounded by what
the cluster can hold; it rises only towards a higher use and falls only towards a lower one; holding more never makes it less.
What is charged and taken back within one instant leaves no trace. With a half-life of 0 nothing is remembered: plain DRF.

**Nothing is decided by a rounding.** Use and memory are integers, and a share is one division of two integers, which Python
rounds correctly: equal shares are equal, and a larger share is never the smaller number. Shares that are nearer to each other
than one part in 2**53 tie, and ties go by the tenant's name. The fading itself is computed with integers too, so that it comes
out the same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import isqrt
from types import MappingProxyType
from typing import Final

Vector = tuple[tuple[str, int], ...]
"""How much of each resource, as in `Amount.pairs`."""

Parts = list[tuple[str, int, int]]

HALF_LIFE_MS: Final = 10 * 60_000
FREE: Final = 1 / 1024
"""What a replica counts, in the turns of one round, that asks for nothing the cluster counts. If it counted nothing, an endless
supply of such work would come first for ever.
"""

NO_WEIGHTS: Final[Mapping[str, int]] = MappingProxyType({})
_ONE_BITS: Final = 64
_STEP_BITS: Final = 48
"""A half-life has 2**48 steps: a millisecond must be many of them, or what is charged every millisecond leaves no trace."""
_UNIT_BITS: Final = 20
"""What is remembered is kept in 2**-20 of a unit: settling it often must not wear it away by rounding."""
_SWEEP_MIN: Final = 64


def _roots() -> tuple[int, ...]:
    """2**-(1/2), 2**-(1/4), ... in 2**-64, each the root of the one before."""
    roots = [isqrt(1 << (2 * _ONE_BITS - 1))]
    while len(roots) < _STEP_BITS:
        roots.append(isqrt(roots[-1] << _ONE_BITS))
    return tuple(roots)


_ROOTS: Final = _roots()


@lru_cache(maxsize=256)  # many tenants were last charged at the same instant
def faded(elapsed_ms: int, half_life_ms: int) -> int:
    """What is left of 2**64 after so long."""
    whole, steps = divmod((max(0, elapsed_ms) << _STEP_BITS) // half_life_ms, 1 << _STEP_BITS)
    left = 1 << _ONE_BITS
    for i, root in enumerate(_ROOTS, 1):
        if steps >> (_STEP_BITS - i) & 1:
            left = left * root >> _ONE_BITS
    return left >> whole


class Standing:
    """One tenant's share while turns are given out: what it is given counts at once. A copy; nothing is charged by it."""

    __slots__ = ("_sums", "_totals", "share")

    def __init__(self, share: float, sums: dict[str, int], totals: Mapping[str, int]) -> None:
        self.share, self._sums, self._totals = share, sums, totals

    def parts(self, amount: Vector) -> Parts:
        """What of an amount counts, and out of how much; kept by whoever adds the same many times."""
        sums, totals = self._sums, self._totals
        found = []
        for name, each in amount:
            if each and name in totals:
                sums.setdefault(name, 0)
                found.append((name, each, totals[name]))
        return found

    def add(self, parts: Parts, count: int = 1) -> float:
        """Its share with `count` times this on top."""
        sums, share = self._sums, self.share
        for name, each, total in parts:
            held = sums[name] = sums[name] + each * count
            part = held / total
            if part > share:
                share = part
        if not parts:
            share += FREE * count
        self.share = share
        return share


class _Tenant:
    """What one tenant holds now, and what is remembered of it, as it was at `at_ms`."""

    __slots__ = ("at_ms", "past", "use")

    def __init__(self, at_ms: int) -> None:
        self.use: dict[str, int] = {}
        self.past: dict[str, int] = {}
        self.at_ms = at_ms


class Shares:
    """The books of fairness: what each tenant holds of what there is.

    `memory_weight` says how much the remembered use counts beside the present one: share = max over the resources of (use +
    memory_weight * remembered) / capacity / weight. A resource of which there is none is nobody's share: what was held on nodes
    that are gone must not keep a tenant from the rest.
    """

    def __init__(
        self,
        capacity: Mapping[str, int],
        weights: Mapping[str, int] = NO_WEIGHTS,
        half_life_ms: int = HALF_LIFE_MS,
        *,
        memory_weight: int = 1,
    ) -> None:
        if half_life_ms < 0 or memory_weight < 0:
            raise ValueError(f"no memory: a half-life of {half_life_ms} ms, a weight of {memory_weight}")
        self._half_life_ms = half_life_ms
        self._memory_weight = memory_weight if half_life_ms else 0
        self._tenants: dict[str, _Tenant] = {}
        self._sweep_at = _SWEEP_MIN
        self._weights: dict[str, int] = {}
        self._totals: dict[int, dict[str, int]] = {}
        self.resize(capacity)
        for tenant, weight in weights.items():
            self.weigh(tenant, weight)

    def __len__(self) -> int:
        """Tenants that hold something, or of whom something is remembered."""
        return len(self._tenants)

    def resize(self, capacity: Mapping[str, int]) -> None:
        """There is so much of each resource from now on."""
        self._capacity = {name: count for name, count in capacity.items() if count > 0}
        self._totals.clear()

    def weigh(self, tenant: str, weight: int) -> None:
        """A tenant with twice the weight has half the share for the same use. Without one, it is 1."""
        if weight < 1:
            raise ValueError(f"tenant {tenant} cannot have the weight {weight}")
        if weight == 1:
            self._weights.pop(tenant, None)
        else:
            self._weights[tenant] = weight

    def charge(self, tenant: str, amount: Vector, sign: int, now_ms: int) -> None:
        """It holds this more (`sign` 1) or less (-1) from now on; 3 is three times as much more."""
        found = self._tenants.get(tenant)
        use = {} if found is None else found.use
        for name, count in amount:
            if use.get(name, 0) + sign * count < 0:
                raise ValueError(f"tenant {tenant} cannot give back {-sign * count} of {name}: it holds {use.get(name, 0)}")
        if found is None:
            found = self._enter(tenant, now_ms)
        self._settle(found, now_ms)
        use = found.use
        for name, count in amount:
            use[name] = held = use.get(name, 0) + sign * count
            if not held:
                del use[name]
        if not use and not found.past:
            del self._tenants[tenant]

    def use(self, tenant: str) -> Mapping[str, int]:
        """What it holds now."""
        found = self._tenants.get(tenant)
        return {} if found is None else dict(found.use)

    def remembered(self, tenant: str, now_ms: int) -> Mapping[str, int]:
        """Its use averaged over the past, rounded down."""
        found = self._tenants.get(tenant)
        if found is None or not self._half_life_ms:
            return {}
        return {name: past >> _UNIT_BITS for name, past in self._past(found, now_ms).items() if past >> _UNIT_BITS}

    def share(self, tenant: str, now_ms: int) -> float:
        return self.standing(tenant, now_ms).share

    def standing(self, tenant: str, now_ms: int) -> Standing:
        """Its share now, to count on from."""
        weight = self._weights.get(tenant, 1)
        totals = self._totals.get(weight)
        if totals is None:
            totals = self._totals[weight] = {name: count * weight for name, count in self._capacity.items()}
        found = self._tenants.get(tenant)
        if found is None:
            return Standing(0.0, {}, totals)
        sums = dict(found.use)
        if self._memory_weight:
            for name, past in self._past(found, now_ms).items():
                sums[name] = sums.get(name, 0) + (self._memory_weight * past >> _UNIT_BITS)
        share = max((count / totals[name] for name, count in sums.items() if name in totals), default=0.0)
        return Standing(share, sums, totals)

    def _past(self, tenant: _Tenant, now_ms: int) -> dict[str, int]:
        """What is remembered at `now_ms`; nothing is changed by looking, so it does not matter how often one looks."""
        if now_ms <= tenant.at_ms:
            return tenant.past
        left = faded(now_ms - tenant.at_ms, self._half_life_ms)
        found = {}
        for name in {**tenant.past, **tenant.use}:
            use = tenant.use.get(name, 0) << _UNIT_BITS
            past = use + ((tenant.past.get(name, 0) - use) * left >> _ONE_BITS)
            if past:
                found[name] = past
        return found

    def _settle(self, tenant: _Tenant, now_ms: int) -> None:
        if self._half_life_ms and now_ms > tenant.at_ms:
            tenant.past = self._past(tenant, now_ms)
            tenant.at_ms = now_ms

    def _enter(self, tenant: str, now_ms: int) -> _Tenant:
        """Every so often, those are forgotten of whom less than one unit is left: the books stay as long as those in them."""
        if len(self._tenants) >= self._sweep_at:
            gone = [name for name, one in self._tenants.items() if not one.use and not self.remembered(name, now_ms)]
            for name in gone:
                del self._tenants[name]
            self._sweep_at = max(_SWEEP_MIN, 2 * len(self._tenants))
        found = self._tenants[tenant] = _Tenant(now_ms)
        return found
