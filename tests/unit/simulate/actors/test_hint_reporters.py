"""Is what is said of warm nodes heard, wrong often enough, and taken back with nothing left closed?"""

from __future__ import annotations

from functools import cache
from typing import Any

from remit.simulate.actors.agents import OVERRIDING_EPOCH, TEMPORARY_NODE_PREFIX
from remit.simulate.checkers.reference.rows import health_of, is_open
from remit.simulate.scenarios import parse
from remit.simulate.simulation import Simulation

TEXT = """
summary = "s"
duration = "90s"
heal = "30s"
[cluster]
nodes = 4
gossips = 1
[load]
per_minute = 20
operations = 0
"""


@cache
def told() -> dict[str, list[Any]]:
    """Every version of every object of one run."""
    simulation = Simulation(parse("gossip", TEXT), 1)
    run = simulation.run()
    assert run.violations == ()
    stories = simulation.judge.history("local").versions
    return {key: [one.content for one in versions] for key, versions in stories.items()}


def said() -> list[tuple[str, Any]]:
    """Which node, and what was said of it."""
    return [
        (key.removeprefix("summary/warm/"), content["spec"])
        for key, versions in told().items()
        if key.startswith("summary/warm/")
        for content in versions
    ]


def test_nodes_speak_for_themselves_and_others_for_them() -> None:
    holders = {spec["holder"].partition("/")[0] for _, spec in said()}
    assert holders == {"agent", "gossip"}
    assert {spec["epoch"] for _, spec in said() if spec["holder"] == "gossip"} >= {OVERRIDING_EPOCH}
    assert all(spec["epoch"] < OVERRIDING_EPOCH for _, spec in said() if spec["holder"] != "gossip")


def test_nodes_are_praised_that_are_closed__that_never_were__and_that_are_gone() -> None:
    praised = {node for node, _ in said()}
    nodes = {key.removeprefix("node/"): versions for key, versions in told().items() if key.startswith("node/")}
    assert praised - nodes.keys(), "none that never was"
    assert any(
        name.startswith(TEMPORARY_NODE_PREFIX) and versions[-1] is None for name, versions in nodes.items() if name in praised
    )
    closed = [name for name, versions in nodes.items() if any(one and one["spec"].get("taints") for one in versions)]
    assert praised & set(closed)


def test_in_the_end_every_node_takes_work() -> None:
    ours = [versions[-1] for key, versions in told().items() if key.startswith("node/local-")]
    assert len(ours) == 4
    assert all(health_of(one) == "ready" and is_open(one) and not one["spec"].get("taints") for one in ours)


def test_a_hint_ranks() -> None:
    """Else nothing would be shown: the best places of some decisions are warm ones, and of some they are not."""
    decisions = [one["spec"] for key, versions in told().items() if key.startswith("decision/") for one in versions if one]
    ranked = [spec["candidates"] for spec in decisions if spec.get("candidates")]
    warmth = [candidates[0].get("parts", {}).get("locality") for candidates in ranked]
    assert any(warmth) and None in warmth
