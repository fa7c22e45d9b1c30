"""Effects of overrides in force at an instant.

From rows and an instant to effects; no clock is read here, and nothing is written.

An override has no effect past its time, whoever looks, however late its knowledge is. So one is in force only for an observer
who can tell that its deadline is still ahead:

- The instant is the authority's, at the latest that it can be by now (`Client.authority_ms`). So an observer errs to the early
  side: for it an override may end a little before its time, and never after.
- A deadline is an instant of one boot of one machine. With one of another boot it cannot be compared: the authority may have
  moved hours after the override ended, or a minute before. It counts as passed, as for grants. Whoever still wants the override
  deletes it and applies it again.
- Who does not know the time has no overrides at all.

A place is named by its node, pool, zone or region: one of them is enough, to `avoid` it as to `pin` to it. Several pins all
bind: a place must be named by each. Boosts add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from remit.model.kinds import USER_PRIORITY_MAX, Override, OverrideEffect, OverrideScope

Instant = tuple[str, int]
"""A boot, and milliseconds on its clock."""


def is_live(override: Override, now: Instant | None) -> bool:
    """Is its deadline on this boot, and still ahead?"""
    deadline = override.status.deadline
    return deadline is not None and now is not None and deadline.boot == now[0] and now[1] < deadline.at_ms


def active_overrides(overrides: Iterable[Override], now: Instant | None) -> ActiveOverrides:
    """The effects at this instant, the same in whatever order the rows come; a name stands for one row."""
    return ActiveOverrides(tuple(sorted((one for one in overrides if is_live(one, now)), key=_name_of)))


class PlaceSet(NamedTuple):
    """The places that one override names."""

    override: str
    regions: frozenset[str]
    zones: frozenset[str]
    pools: frozenset[str]
    nodes: frozenset[str]

    def covers(self, region: str, zone: str, pool: str, node: str) -> bool:
        return node in self.nodes or pool in self.pools or zone in self.zones or region in self.regions


@dataclass(frozen=True)
class ActiveOverrides:
    """What is in force, for a scheduler and the controllers. Made by `active_overrides`.

    Where an answer is a text, it is the name of the override that says so: of several the first by name; empty if none does.
    """

    overrides: tuple[Override, ...] = ()

    @cached_property
    def until_ms(self) -> int | None:
        """On the authority's clock: until then nothing here ends by itself. None: nothing is in force."""
        return min((one.status.deadline.at_ms for one in self.overrides if one.status.deadline is not None), default=None)

    @cached_property
    def excluded_places(self) -> tuple[PlaceSet, ...]:
        """For whoever judges many nodes at once; `avoided` says the same of one."""
        return tuple(_place_set(one) for one in self.overrides if one.spec.effect == "avoid")

    def paused_by(self, tenant: str, workload: str) -> str:
        """Is nothing new to be placed for this work?"""
        return _first_name(self._index_of("pause-expansion").by_work(tenant, workload))

    def avoided_by(self, region: str, zone: str, pool: str, node: str) -> str:
        """Is nothing new to be placed there, whoever's it is?"""
        return _first_name(self._index_of("avoid").by_place(region, zone, pool, node))

    def pinned_places(self, tenant: str, workload: str) -> tuple[PlaceSet, ...] | None:
        """Where this work may be placed: on what each of these covers. None: wherever else it is allowed."""
        pins = self._index_of("pin").by_work(tenant, workload)
        return tuple(self._pins[name] for name in sorted(pins)) or None

    def excluded_by(self, tenant: str, workload: str, region: str, zone: str, pool: str, node: str) -> str:
        """Is this work pinned, and not to there?"""
        pins = self.pinned_places(tenant, workload) or ()
        return next((pin.override for pin in pins if not pin.covers(region, zone, pool, node)), "")

    def boost(self, tenant: str, workload: str, priority: int = 0) -> int:
        """How much is added to this `priority`: never so much that the sum is above what people may have."""
        boosts = self._index_of("boost").by_work(tenant, workload)
        return max(0, min(sum(one.spec.by for one in boosts.values()), USER_PRIORITY_MAX - priority))

    def repair_held_by(self, tenant: str, workload: str, region: str, zone: str, pool: str, node: str) -> str:
        """Is this work, where it is, to be left as it is? If an override names work and places, it holds that work there."""
        held = self._index_of("hold-repair")
        by_work = {**held.by_work(tenant, workload), **held.no_work}
        by_place = {**held.by_place(region, zone, pool, node), **held.no_place}
        return _first_name({name: one for name, one in by_work.items() if name in by_place})

    def autoscaler_frozen_by(self, region: str, zone: str, pool: str) -> str:
        """Are nodes neither to be brought nor taken away there?"""
        return _first_name(self._index_of("freeze-autoscaler").by_place(region, zone, pool, ""))

    def lent_budgets(self, tenant: str, workload: str) -> tuple[str, ...]:
        """The budgets that this work may draw on beside its own."""
        lent = self._index_of("lend-budget").by_work(tenant, workload)
        return tuple(sorted({one.spec.budget for one in lent.values()}))

    def _index_of(self, effect: OverrideEffect) -> _OverrideIndex:
        return self._by_effect.get(effect, _NO_OVERRIDES)

    @cached_property
    def _by_effect(self) -> dict[OverrideEffect, _OverrideIndex]:
        named: dict[OverrideEffect, _OverrideIndex] = {}
        for one in self.overrides:
            named.setdefault(one.spec.effect, _OverrideIndex()).add(one)
        return named

    @cached_property
    def _pins(self) -> dict[str, PlaceSet]:
        return {_name_of(one): _place_set(one) for one in self.overrides if one.spec.effect == "pin"}


class _OverrideIndex:
    """The overrides of one effect, found by what they name: a cluster has many more nodes and workloads than overrides."""

    __slots__ = ("_places", "_work", "no_place", "no_work")

    def __init__(self) -> None:
        self._work: dict[str, dict[str, Override]] = {}
        """By tenant, and by tenant/name: no tenant has a slash in it."""
        self._places: dict[tuple[str, str], dict[str, Override]] = {}
        self.no_work: dict[str, Override] = {}
        """Those that name places only; one that names nothing at all is in neither of these."""
        self.no_place: dict[str, Override] = {}

    def add(self, one: Override) -> None:
        name, scope = _name_of(one), one.spec.scope
        work = (*scope.tenants, *scope.workloads)
        places = [(sort, place) for sort, listed in _place_lists(scope) for place in listed]
        for key in work:
            self._work.setdefault(key, {})[name] = one
        for at in places:
            self._places.setdefault(at, {})[name] = one
        if places and not work:
            self.no_work[name] = one
        elif work and not places:
            self.no_place[name] = one

    def by_work(self, tenant: str, workload: str) -> dict[str, Override]:
        return {**self._work.get(tenant, {}), **self._work.get(f"{tenant}/{workload}", {})}

    def by_place(self, region: str, zone: str, pool: str, node: str) -> dict[str, Override]:
        found: dict[str, Override] = {}
        for at in (("region", region), ("zone", zone), ("pool", pool), ("node", node)):
            found.update(self._places.get(at, {}))
        return found


_NO_OVERRIDES: Final = _OverrideIndex()


def _first_name(found: dict[str, Override]) -> str:
    return min(found, default="")


def _name_of(override: Override) -> str:
    return override.metadata.name


def _place_lists(scope: OverrideScope) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return ("region", scope.regions), ("zone", scope.zones), ("pool", scope.pools), ("node", scope.nodes)


def _place_set(override: Override) -> PlaceSet:
    return PlaceSet(_name_of(override), *(frozenset(listed) for _, listed in _place_lists(override.spec.scope)))
