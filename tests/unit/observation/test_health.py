"""Heartbeat ages: which nodes are silent, and which silences are mass silences."""

from __future__ import annotations

from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeatAge
from remit.observation.health import HeartbeatAges, is_mass_silence
from tests.unit.correction.controller_fixture import ready

NODES = {"here": NodeHeartbeatAge(500, "one"), "gone": NodeHeartbeatAge(9_000, "one"), "new": NodeHeartbeatAge(0, "")}
HEARTBEATS = HeartbeatAges(HeartbeatReport("one", 20_000, NODES), sent_ms=100_000)


def test_node_never_heard_is_silent_for_whole_listening_time() -> None:
    assert [HEARTBEATS.silent_ms(name) for name in ("here", "gone", "never")] == [500, 9_000, 20_000]


def test_node_is_responsive_only_within_limit_including_report_age() -> None:
    assert HEARTBEATS.is_responsive("here", 1_000, 100_500)
    assert not HEARTBEATS.is_responsive("here", 1_000, 100_501)
    assert not HEARTBEATS.is_responsive("never", 1 << 40, 100_000)


def test_node_is_reconciled_only_with_current_incarnation() -> None:
    assert [HEARTBEATS.is_reconciled(name) for name in ("here", "new", "never")] == [True, False, False]
    assert not HEARTBEATS._replace(report=HeartbeatReport("two", 0, NODES)).is_reconciled("here")


def test_mass_silences_are_reported_by_region_and_zone() -> None:
    nodes = [ready(f"a{n}") for n in range(4)] + [ready(f"b{n}", zone="b") for n in range(6)]
    ages = {f"b{n}": NodeHeartbeatAge(0) for n in range(6)}
    hearing = HeartbeatAges(HeartbeatReport("one", 20_000, ages), 0)
    regions, zones = hearing.mass_silences(nodes, 6_000)
    assert (sorted(regions), sorted(zones)) == ([], [("r1", "a")])
    regions, zones = HeartbeatAges(HeartbeatReport("one", 20_000, {}), 0).mass_silences(nodes, 6_000)
    assert (sorted(regions), sorted(zones)) == (["r1"], [("r1", "a"), ("r1", "b")])


def test_complete_silence_of_two_nodes_is_mass_but_of_one_node_is_not() -> None:
    """F35."""
    nodes = [ready("a1"), ready("a2")]
    nobody = HeartbeatAges(HeartbeatReport("one", 20_000, {}), 0)
    assert nobody.mass_silences(nodes, 6_000) == (frozenset({"r1"}), frozenset({("r1", "a")}))
    assert nobody.mass_silences(nodes[:1], 6_000) == (frozenset(), frozenset())
    one = HeartbeatAges(HeartbeatReport("one", 20_000, {"a1": NodeHeartbeatAge(0)}), 0)
    assert one.mass_silences(nodes, 6_000) == (frozenset(), frozenset())


def test_mass_silence_needs_more_than_half_of_more_than_two_nodes() -> None:
    assert not is_mass_silence([True, True])
    assert is_mass_silence([True, True, False])
    assert not is_mass_silence([True] * 54 + [False] * 46)
    assert is_mass_silence([True] * 55 + [False] * 45)
