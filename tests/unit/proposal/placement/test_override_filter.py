"""Override filter: acts on whole columns as on one node, and only while overrides are active."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from remit.law.fit import NO_PEERS
from remit.law.overrides import active_overrides
from remit.model.kinds import Override, OverrideScope, OverrideSpec, OverrideStatus
from remit.model.metadata import Deadline, Metadata
from remit.model.resources import Duration
from remit.observation.node_columns import NodeColumns, NodeFree, SelectedRows
from remit.proposal.placement.builtin_plugins import OverrideFilter
from tests.unit.observation.row_fixtures import ViewFixture, ready, work

NOW = ("boot-1", 1_000)


def override(name: str, effect: Any, until_ms: int = 2_000, **scope: tuple[str, ...]) -> Override:
    spec = OverrideSpec(effect=effect, scope=OverrideScope(**scope), ttl=Duration(1_000), reason="r", author="a")
    return Override(
        metadata=Metadata(name=name), spec=spec, status=OverrideStatus(deadline=Deadline(at_ms=until_ms, boot="boot-1"))
    )


def columns(*names: str) -> NodeColumns:
    return NodeColumns([NodeFree(ready(name, zone=name[0]), {"cpu": 4000}, {}) for name in names])


def ask() -> Any:
    t = ViewFixture(ready("n1"), *work("a"))
    return t.view.shapes.requirements_of(t.shape("a"))


def test_avoided_places_are_closed_on_all_rows_and_selected_rows() -> None:
    override_filter, site = OverrideFilter(), columns("a1", "b1", "a2")
    effects = active_overrides([override("o", "avoid", zones=("a",), nodes=("b1",))], NOW)
    assert override_filter.update(effects.overrides, NOW)
    found = override_filter.filter.check(ask(), site, NO_PEERS)
    assert np.asarray(found).tolist() == [not effects.avoided_by("r1", n[0], "default", n) for n in ("a1", "b1", "a2")]
    some = override_filter.filter.check(ask(), SelectedRows(site, np.array([2, 1])), NO_PEERS)
    assert np.asarray(some).tolist() == [False, False]


def test_all_pins_must_hold() -> None:
    override_filter, site = OverrideFilter(), columns("a1", "b1", "a2")
    effects = active_overrides(
        [override("p", "pin", zones=("a",), tenants=("t1",)), override("q", "pin", nodes=("a2", "b1"), tenants=("t1",))], NOW
    )
    override_filter.update(effects.overrides, NOW)
    pinned = effects.pinned_places("t1", "a")
    assert pinned is not None
    found = override_filter.filter.check(ask()._replace(pins=pinned), site, NO_PEERS)
    assert np.asarray(found).tolist() == [False, False, True]
    assert np.asarray(override_filter.filter.check(ask(), site, NO_PEERS)).tolist() == [True, True, True]


def test_update_reports_change_only_when_override_starts_or_ends() -> None:
    override_filter, one = OverrideFilter(), override("o", "avoid", nodes=("a1",))
    assert override_filter.update([one], NOW)
    assert not override_filter.update([one], ("boot-1", 1_999))
    assert override_filter.update([one], ("boot-1", 2_000)), "the override has expired"
    assert not override_filter.effects.overrides
    assert not override_filter.update([one], ("boot-2", 0)), "a time of another boot is ignored"
    assert not override_filter.update([one], None)


def test_new_columns_of_same_length_are_evaluated_again() -> None:
    """The rows have other nodes, although there are as many of them."""
    override_filter = OverrideFilter()
    override_filter.update([override("o", "avoid", nodes=("a1",))], NOW)
    first, second = columns("a1", "b1"), columns("b1", "a1")
    assert np.asarray(override_filter.filter.check(ask(), first, NO_PEERS)).tolist() == [False, True]
    assert np.asarray(override_filter.filter.check(ask(), second, NO_PEERS)).tolist() == [True, False]


def test_node_that_leaves_avoided_zone_is_open() -> None:
    override_filter, site = OverrideFilter(), columns("a1", "b1")
    override_filter.update([override("o", "avoid", zones=("a",))], NOW)
    assert np.asarray(override_filter.filter.check(ask(), site, NO_PEERS)).tolist() == [False, True]
    moved = ready("a1", zone="c")
    site.put(replace(moved))
    assert np.asarray(override_filter.filter.check(ask(), site, NO_PEERS)).tolist() == [True, True]


def test_filter_applies_only_with_avoid_or_pin_overrides() -> None:
    override_filter = OverrideFilter()
    assert not override_filter.filter.applies(ask())
    override_filter.update([override("o", "boost", tenants=("t1",))], NOW)
    assert not override_filter.filter.applies(ask())
    override_filter.update([override("o", "avoid", zones=("a",))], NOW)
    assert override_filter.filter.applies(ask())
