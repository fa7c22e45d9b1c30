"""Effects of active overrides: what they cover, and until when."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from remit.law.overrides import ActiveOverrides, active_overrides
from remit.model.kinds import USER_PRIORITY_MAX, Override
from tests.unit.law.override_fixture import BOOT, override

NOW = (BOOT, 5_000)
NODE = ("eu", "eu-a", "gpu", "n1")


def now(*overrides: Override) -> ActiveOverrides:
    return active_overrides(overrides, NOW)


def test_override_is_active_until_its_deadline_exclusive() -> None:
    one = override("o", "pause-expansion", tenants=["t"], until_ms=5_000)
    assert active_overrides([one], (BOOT, 4_999)).paused_by("t", "w") == "o"
    assert active_overrides([one], (BOOT, 5_000)).paused_by("t", "w") == ""
    assert active_overrides([one], (BOOT, 5_001)) == ActiveOverrides()


def test_no_override_is_active_without_comparable_time() -> None:
    one = override("o", "avoid", regions=["eu"])
    assert active_overrides([one], NOW).avoided_by(*NODE) == "o"
    assert active_overrides([one], None) == ActiveOverrides(), "the time is unknown"
    assert active_overrides([one], ("boot-2", 0)) == ActiveOverrides(), "times of another boot cannot be compared"
    unstamped = Override(metadata=one.metadata, spec=one.spec)
    assert active_overrides([unstamped], NOW) == ActiveOverrides(), "not accepted by an authority yet"


def test_pause_covers_tenant_or_workload() -> None:
    effects = now(override("b", "pause-expansion", tenants=["t"]), override("a", "pause-expansion", workloads=["t/w", "u/w"]))
    assert effects.paused_by("t", "w") == "a", "the first of two by name"
    assert effects.paused_by("t", "other") == "b"
    assert effects.paused_by("u", "w") == "a"
    assert effects.paused_by("u", "other") == effects.paused_by("w", "t") == ""


@pytest.mark.parametrize(("field", "name"), [("regions", "eu"), ("zones", "eu-a"), ("pools", "gpu"), ("nodes", "n1")])
def test_avoid_covers_node_by_any_of_its_places(field: str, name: str) -> None:
    named: dict[str, Any] = {field: ["other", name]}
    effects = now(override("o", "avoid", **named))
    assert effects.avoided_by(*NODE) == "o"
    assert [places.covers(*NODE) for places in effects.excluded_places] == [True]
    assert effects.avoided_by("x", "x", "x", "x") == ""
    shifted = (NODE[-1], *NODE[:-1])
    assert effects.avoided_by(*shifted) == "", "a node name is not a region name"


def left_out_by(effects: ActiveOverrides, tenant: str, workload: str, *place: str) -> str:
    """Return the first pin of a workload that does not cover a place."""
    pins = effects.pinned_places(tenant, workload) or ()
    return next((pin.override for pin in pins if not pin.covers(*place)), "")


def test_pin_restricts_to_its_places_and_pins_intersect() -> None:
    zone, pool = override("b", "pin", tenants=["t"], zones=["eu-a"]), override("a", "pin", workloads=["t/w"], pools=["gpu"])
    effects = now(zone, pool)
    assert [places.override for places in effects.pinned_places("t", "w") or ()] == ["a", "b"]
    assert left_out_by(effects, "t", "w", *NODE) == ""
    assert left_out_by(effects, "t", "w", "eu", "eu-b", "gpu", "n2") == "b"
    assert left_out_by(effects, "t", "w", "eu", "eu-a", "cpu", "n3") == "a"
    assert left_out_by(effects, "t", "other", "eu", "eu-a", "cpu", "n3") == ""
    assert effects.pinned_places("u", "w") is None
    assert left_out_by(effects, "u", "w", "x", "x", "x", "x") == ""


def test_any_place_of_one_pin_suffices() -> None:
    effects = now(override("o", "pin", tenants=["t"], zones=["eu-b"], nodes=["n1"]))
    assert left_out_by(effects, "t", "w", *NODE) == ""
    assert left_out_by(effects, "t", "w", "eu", "eu-b", "cpu", "n9") == ""
    assert left_out_by(effects, "t", "w", "eu", "eu-c", "gpu", "n9") == "o"


def test_boosts_add_up_and_count_once_per_override() -> None:
    effects = now(override("a", "boost", by=5, tenants=["t"], workloads=["t/w"]), override("b", "boost", by=70, tenants=["t"]))
    assert effects.boost("t", "w") == 75
    assert effects.boost("u", "w") == 0


def test_boost_is_capped_at_user_priority_maximum() -> None:
    effects = now(*(override(f"o{n}", "boost", by=USER_PRIORITY_MAX, tenants=["t"]) for n in range(3)))
    assert effects.boost("t", "w") == USER_PRIORITY_MAX
    assert effects.boost("t", "w", 1_000) == USER_PRIORITY_MAX - 1_000
    assert effects.boost("t", "w", -1_000) == USER_PRIORITY_MAX + 1_000
    assert effects.boost("t", "w", USER_PRIORITY_MAX + 1) == 0, "system priorities are not lowered"


def test_hold_repair_needs_matching_workload_and_place() -> None:
    effects = now(
        override("a", "hold-repair", tenants=["t"], zones=["eu-a"]),
        override("b", "hold-repair", workloads=["u/w"]),
        override("c", "hold-repair", nodes=["n9"]),
    )
    assert effects.repair_held_by("t", "w", *NODE) == "a"
    assert effects.repair_held_by("t", "w", "eu", "eu-b", "gpu", "n2") == ""
    assert effects.repair_held_by("v", "w", *NODE) == ""
    assert effects.repair_held_by("u", "w", "eu", "eu-b", "gpu", "n2") == "b"
    assert effects.repair_held_by("u", "w", "eu", "eu-b", "gpu", "n9") == "b"
    assert effects.repair_held_by("v", "w", "eu", "eu-b", "gpu", "n9") == "c"


def test_override_with_empty_scope_has_no_effect() -> None:
    effects = now(*(override(effect, effect) for effect in ("hold-repair", "avoid", "pause-expansion", "pin")))
    assert effects.repair_held_by("t", "w", *NODE) == effects.avoided_by(*NODE) == effects.paused_by("t", "w") == ""
    assert effects.pinned_places("t", "w") is None


def test_effects_are_not_confused_with_each_other() -> None:
    effects = now(override("o", "boost", by=3, tenants=["t"]), override("p", "freeze-autoscaler", regions=["eu"]))
    assert effects.paused_by("t", "w") == effects.avoided_by(*NODE) == effects.repair_held_by("t", "w", *NODE) == ""
    assert effects.pinned_places("t", "w") is None
    assert effects.excluded_places == ()


def test_until_is_earliest_deadline_of_active_overrides() -> None:
    over = override("over", "avoid", regions=["eu"], until_ms=5_000)
    late, soon = (override(f"o{ms}", "avoid", regions=["eu"], until_ms=ms) for ms in (8_000, 6_000))
    assert now(over, late, soon).until_ms == 6_000
    assert now(over).until_ms is None


def test_active_overrides_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        now().overrides = ()  # type: ignore[misc]
