"""Is silence told for what it is, and a mass for what it is not? Pure."""

from __future__ import annotations

from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeatAge
from remit.observation.health import HeartbeatAges, is_mass_silence
from tests.unit.correction.controller_fixture import ready

NODES = {"here": NodeHeartbeatAge(500, "one"), "gone": NodeHeartbeatAge(9_000, "one"), "new": NodeHeartbeatAge(0, "")}
HEARING = HeartbeatAges(HeartbeatReport("one", 20_000, NODES), sent_ms=100_000)


def test_of_a_node_that_was_never_heard_all_the_time_of_listening_is_silence() -> None:
    assert [HEARING.silent_ms(name) for name in ("here", "gone", "never")] == [500, 9_000, 20_000]


def test_a_node_is_here_only_if_it_was_surely_heard__what_was_told_grows_old() -> None:
    assert HEARING.is_responsive("here", 1_000, 100_500)
    assert not HEARING.is_responsive("here", 1_000, 100_501)
    assert not HEARING.is_responsive("never", 1 << 40, 100_000)


def test_a_node_is_settled_if_it_has_come_to_terms_with_this_incarnation() -> None:
    assert [HEARING.is_reconciled(name) for name in ("here", "new", "never")] == [True, False, False]
    assert not HEARING._replace(report=HeartbeatReport("two", 0, NODES)).is_reconciled("here")


def test_masses_are_told_by_region_and_by_zone() -> None:
    nodes = [ready(f"a{n}") for n in range(4)] + [ready(f"b{n}", zone="b") for n in range(6)]
    heard = {f"b{n}": NodeHeartbeatAge(0) for n in range(6)}
    hearing = HeartbeatAges(HeartbeatReport("one", 20_000, heard), 0)
    regions, zones = hearing.mass_silences(nodes, 6_000)
    assert (sorted(regions), sorted(zones)) == ([], [("r1", "a")])
    regions, zones = HeartbeatAges(HeartbeatReport("one", 20_000, {}), 0).mass_silences(nodes, 6_000)
    assert (sorted(regions), sorted(zones)) == (["r1"], [("r1", "a"), ("r1", "b")])


def test_nobody_at_all_is_a_mass_however_few_they_are__but_one_node_alone_is_none() -> None:
    """F35."""
    nodes = [ready("a1"), ready("a2")]
    nobody = HeartbeatAges(HeartbeatReport("one", 20_000, {}), 0)
    assert nobody.mass_silences(nodes, 6_000) == (frozenset({"r1"}), frozenset({("r1", "a")}))
    assert nobody.mass_silences(nodes[:1], 6_000) == (frozenset(), frozenset())
    one = HeartbeatAges(HeartbeatReport("one", 20_000, {"a1": NodeHeartbeatAge(0)}), 0)
    assert one.mass_silences(nodes, 6_000) == (frozenset(), frozenset())


def test_a_mass_is_more_than_half_of_more_than_two() -> None:
    assert not is_mass_silence([True, True])
    assert is_mass_silence([True, True, False])
    assert not is_mass_silence([True] * 54 + [False] * 46)
    assert is_mass_silence([True] * 55 + [False] * 45)
