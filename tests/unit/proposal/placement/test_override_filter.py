"""Do overrides act on whole columns as they do on one node, and only while they are in force?"""

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
from tests.unit.observation.row_fixtures import Told, ready, work

NOW = ("boot-1", 1_000)


def override(name: str, effect: Any, until_ms: int = 2_000, **scope: tuple[str, ...]) -> Override:
    spec = OverrideSpec(effect=effect, scope=OverrideScope(**scope), ttl=Duration(1_000), reason="r", author="a")
    return Override(
        metadata=Metadata(name=name), spec=spec, status=OverrideStatus(deadline=Deadline(at_ms=until_ms, boot="boot-1"))
    )


def columns(*names: str) -> NodeColumns:
    return NodeColumns([NodeFree(ready(name, zone=name[0]), {"cpu": 4000}, {}) for name in names])


def ask() -> Any:
    t = Told(ready("n1"), *work("a"))
    return t.view.shapes.requirements_of(t.shape("a"))


def test_an_avoided_place_is_shut_for_all_rows_and_for_some_as_the_law_says() -> None:
    steering, site = OverrideFilter(), columns("a1", "b1", "a2")
    effects = active_overrides([override("o", "avoid", zones=("a",), nodes=("b1",))], NOW)
    assert steering.update(effects.overrides, NOW)
    found = steering.filter.check(ask(), site, NO_PEERS)
    assert np.asarray(found).tolist() == [not effects.avoided_by("r1", n[0], "default", n) for n in ("a1", "b1", "a2")]
    some = steering.filter.check(ask(), SelectedRows(site, np.array([2, 1])), NO_PEERS)
    assert np.asarray(some).tolist() == [False, False]


def test_pins_all_bind() -> None:
    steering, site = OverrideFilter(), columns("a1", "b1", "a2")
    effects = active_overrides(
        [override("p", "pin", zones=("a",), tenants=("t1",)), override("q", "pin", nodes=("a2", "b1"), tenants=("t1",))], NOW
    )
    steering.update(effects.overrides, NOW)
    pinned = effects.pinned_places("t1", "a")
    assert pinned is not None
    found = steering.filter.check(ask()._replace(pins=pinned), site, NO_PEERS)
    assert np.asarray(found).tolist() == [False, False, True]
    assert np.asarray(steering.filter.check(ask(), site, NO_PEERS)).tolist() == [True, True, True]


def test_it_tells_when_something_began_or_ended_and_only_then() -> None:
    steering, one = OverrideFilter(), override("o", "avoid", nodes=("a1",))
    assert steering.update([one], NOW)
    assert not steering.update([one], ("boot-1", 1_999))
    assert steering.update([one], ("boot-1", 2_000)), "its time is over"
    assert not steering.effects.overrides
    assert not steering.update([one], ("boot-2", 0)), "an instant of another boot says nothing"
    assert not steering.update([one], None)


def test_a_new_list_of_as_many_nodes_is_looked_at_anew() -> None:
    """The rows of before are not those of after, though there are as many of them."""
    steering = OverrideFilter()
    steering.update([override("o", "avoid", nodes=("a1",))], NOW)
    first, second = columns("a1", "b1"), columns("b1", "a1")
    assert np.asarray(steering.filter.check(ask(), first, NO_PEERS)).tolist() == [False, True]
    assert np.asarray(steering.filter.check(ask(), second, NO_PEERS)).tolist() == [True, False]


def test_a_node_that_moves_out_of_an_avoided_zone_is_open() -> None:
    steering, site = OverrideFilter(), columns("a1", "b1")
    steering.update([override("o", "avoid", zones=("a",))], NOW)
    assert np.asarray(steering.filter.check(ask(), site, NO_PEERS)).tolist() == [False, True]
    moved = ready("a1", zone="c")
    site.put(replace(moved))
    assert np.asarray(steering.filter.check(ask(), site, NO_PEERS)).tolist() == [True, True]


def test_it_has_a_say_only_where_something_is_avoided_or_pinned() -> None:
    steering = OverrideFilter()
    assert not steering.filter.applies(ask())
    steering.update([override("o", "boost", tenants=("t1",))], NOW)
    assert not steering.filter.applies(ask())
    steering.update([override("o", "avoid", zones=("a",))], NOW)
    assert steering.filter.applies(ask())
