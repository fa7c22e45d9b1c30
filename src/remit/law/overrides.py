"""Effects of overrides in force at an instant.

Computes effects from override rows and an instant; reads no clock and writes nothing.

An override must have no effect after its deadline, on any observer, however stale its view is. So an override is in force
only for an observer that can prove that the deadline has not passed:

- The instant is the latest time that the authority's clock can show now (`AuthorityClient.authority_clock`). So for an
  observer an override may end slightly before its deadline, but never after it.
- A deadline belongs to one boot of one machine and cannot be compared with the clock of another boot: the authority may have
  moved to another machine long after the override ended, or just before. It then counts as passed, as for grants. To continue
  an override after that, delete it and apply it again.
- An observer that does not know the time sees no overrides.

A place is named by its node, pool, zone or region; one of them is enough, for `avoid` and for `pin`. Several pins apply
together: a place must be named by each of them. Boosts add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from remit.model.kinds import USER_PRIORITY_MAX, Override, OverrideEffect, OverrideScope

Instant = tuple[str, int]
"""A boot id, and milliseconds on its clock."""


def is_live(override: Override, now: Instant | None) -> bool:
    """Whether the deadline belongs to this boot and has not passed."""
    deadline = override.status.deadline
    return deadline is not None and now is not None and deadline.boot == now[0] and now[1] < deadline.at_ms


def active_overrides(overrides: Iterable[Override], now: Instant | None) -> ActiveOverrides:
    """Returns the overrides in force at this instant; the order of the rows does not matter. Each name occurs once."""
    return ActiveOverrides(tuple(sorted((override for override in overrides if is_live(override, now)), key=_name_of)))


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
    """The overrides in force, as used by the scheduler and the controllers. Created by `active_overrides`.

    Methods that return a text return the name of the responsible override: the first one by name, or empty if there is none.
    """

    overrides: tuple[Override, ...] = ()

    @cached_property
    def until_ms(self) -> int | None:
        """The earliest deadline on the authority's clock; until then no override here ends. None if none is in force."""
        return min(
            (override.status.deadline.at_ms for override in self.overrides if override.status.deadline is not None),
            default=None,
        )

    @cached_property
    def excluded_places(self) -> tuple[PlaceSet, ...]:
        """The places of all `avoid` overrides, for checks of many nodes at once; `avoided_by` checks a single node."""
        return tuple(_place_set(override) for override in self.overrides if override.spec.effect == "avoid")

    def paused_by(self, tenant: str, workload: str) -> str:
        """Returns the override that forbids to place more replicas of this workload."""
        return _first_name(self._index_of("pause-expansion").by_work(tenant, workload))

    def avoided_by(self, region: str, zone: str, pool: str, node: str) -> str:
        """Returns the override that forbids to place more replicas there, of any workload."""
        return _first_name(self._index_of("avoid").by_place(region, zone, pool, node))

    def pinned_places(self, tenant: str, workload: str) -> tuple[PlaceSet, ...] | None:
        """Returns the places to which the workload is pinned: a place must be covered by all of them. None if it is not
        pinned.
        """
        pins = self._index_of("pin").by_work(tenant, workload)
        return tuple(self._pins[name] for name in sorted(pins)) or None

    def excluded_by(self, tenant: str, workload: str, region: str, zone: str, pool: str, node: str) -> str:
        """Returns the pin of this workload that does not cover this place."""
        pins = self.pinned_places(tenant, workload) or ()
        return next((pin.override for pin in pins if not pin.covers(region, zone, pool, node)), "")

    def boost(self, tenant: str, workload: str, priority: int = 0) -> int:
        """Returns how much is added to this `priority`. The sum never exceeds USER_PRIORITY_MAX."""
        boosts = self._index_of("boost").by_work(tenant, workload)
        return max(0, min(sum(override.spec.by for override in boosts.values()), USER_PRIORITY_MAX - priority))

    def repair_held_by(self, tenant: str, workload: str, region: str, zone: str, pool: str, node: str) -> str:
        """Returns the override that forbids to repair this workload at this place. An override that names workloads and places
        holds only these workloads at these places.
        """
        index = self._index_of("hold-repair")
        by_work = {**index.by_work(tenant, workload), **index.no_work}
        by_place = {**index.by_place(region, zone, pool, node), **index.no_place}
        return _first_name({name: override for name, override in by_work.items() if name in by_place})

    def autoscaler_frozen_by(self, region: str, zone: str, pool: str) -> str:
        """Returns the override that forbids the autoscaler to add or remove nodes there."""
        return _first_name(self._index_of("freeze-autoscaler").by_place(region, zone, pool, ""))

    def lent_budgets(self, tenant: str, workload: str) -> tuple[str, ...]:
        """Returns the budgets that this workload may draw on besides its own."""
        matching = self._index_of("lend-budget").by_work(tenant, workload)
        return tuple(sorted({override.spec.budget for override in matching.values()}))

    def _index_of(self, effect: OverrideEffect) -> _OverrideIndex:
        return self._by_effect.get(effect, _NO_OVERRIDES)

    @cached_property
    def _by_effect(self) -> dict[OverrideEffect, _OverrideIndex]:
        indexes: dict[OverrideEffect, _OverrideIndex] = {}
        for override in self.overrides:
            indexes.setdefault(override.spec.effect, _OverrideIndex()).add(override)
        return indexes

    @cached_property
    def _pins(self) -> dict[str, PlaceSet]:
        return {_name_of(override): _place_set(override) for override in self.overrides if override.spec.effect == "pin"}


class _OverrideIndex:
    """The overrides of one effect, indexed by what they name: there are many more nodes and workloads than overrides."""

    __slots__ = ("_places", "_work", "no_place", "no_work")

    def __init__(self) -> None:
        self._work: dict[str, dict[str, Override]] = {}
        """By tenant, and by tenant/name. The keys cannot collide, because tenant names contain no slash."""
        self._places: dict[tuple[str, str], dict[str, Override]] = {}
        self.no_work: dict[str, Override] = {}
        """Overrides that name only places. An override that names nothing is in none of the indexes."""
        self.no_place: dict[str, Override] = {}

    def add(self, override: Override) -> None:
        name, scope = _name_of(override), override.spec.scope
        work = (*scope.tenants, *scope.workloads)
        places = [(kind, place) for kind, listed in _place_lists(scope) for place in listed]
        for key in work:
            self._work.setdefault(key, {})[name] = override
        for place_key in places:
            self._places.setdefault(place_key, {})[name] = override
        if places and not work:
            self.no_work[name] = override
        elif work and not places:
            self.no_place[name] = override

    def by_work(self, tenant: str, workload: str) -> dict[str, Override]:
        return {**self._work.get(tenant, {}), **self._work.get(f"{tenant}/{workload}", {})}

    def by_place(self, region: str, zone: str, pool: str, node: str) -> dict[str, Override]:
        matching: dict[str, Override] = {}
        for place_key in (("region", region), ("zone", zone), ("pool", pool), ("node", node)):
            matching.update(self._places.get(place_key, {}))
        return matching


_NO_OVERRIDES: Final = _OverrideIndex()


def _first_name(overrides: dict[str, Override]) -> str:
    return min(overrides, default="")


def _name_of(override: Override) -> str:
    return override.metadata.name


def _place_lists(scope: OverrideScope) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return ("region", scope.regions), ("zone", scope.zones), ("pool", scope.pools), ("node", scope.nodes)


def _place_set(override: Override) -> PlaceSet:
    return PlaceSet(_name_of(override), *(frozenset(listed) for _, listed in _place_lists(override.spec.scope)))
