"""Hints about warm nodes: reported, wrong often enough, and withdrawn without leaving nodes closed."""

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
def object_versions() -> dict[str, list[Any]]:
    """Every version of every object of one run, by key."""
    simulation = Simulation(parse("gossip", TEXT), 1)
    run = simulation.run()
    assert run.violations == ()
    versions_by_key = simulation.judge.history("local").versions
    return {key: [one.content for one in versions] for key, versions in versions_by_key.items()}


def hints() -> list[tuple[str, Any]]:
    """Pairs of a node and the hint reported for it."""
    return [
        (key.removeprefix("summary/warm/"), content["spec"])
        for key, versions in object_versions().items()
        if key.startswith("summary/warm/")
        for content in versions
    ]


def test_agents_and_gossips_report_hints_and_some_override() -> None:
    holders = {spec["holder"].partition("/")[0] for _, spec in hints()}
    assert holders == {"agent", "gossip"}
    assert {spec["epoch"] for _, spec in hints() if spec["holder"] == "gossip"} >= {OVERRIDING_EPOCH}
    assert all(spec["epoch"] < OVERRIDING_EPOCH for _, spec in hints() if spec["holder"] != "gossip")


def test_hints_name_closed_missing_and_deleted_nodes() -> None:
    hinted = {node for node, _ in hints()}
    nodes = {key.removeprefix("node/"): versions for key, versions in object_versions().items() if key.startswith("node/")}
    assert hinted - nodes.keys(), "no hint for a missing node"
    assert any(
        name.startswith(TEMPORARY_NODE_PREFIX) and versions[-1] is None for name, versions in nodes.items() if name in hinted
    )
    closed = [name for name, versions in nodes.items() if any(one and one["spec"].get("taints") for one in versions)]
    assert hinted & set(closed)


def test_all_nodes_accept_work_at_end_of_run() -> None:
    nodes = [versions[-1] for key, versions in object_versions().items() if key.startswith("node/local-")]
    assert len(nodes) == 4
    assert all(health_of(one) == "ready" and is_open(one) and not one["spec"].get("taints") for one in nodes)


def test_hints_affect_ranking_of_some_decisions() -> None:
    """Otherwise the scenario would show nothing: the best places of some decisions are warm, and of some they are not."""
    decisions = [
        one["spec"] for key, versions in object_versions().items() if key.startswith("decision/") for one in versions if one
    ]
    ranked = [spec["candidates"] for spec in decisions if spec.get("candidates")]
    warmth = [candidates[0].get("parts", {}).get("locality") for candidates in ranked]
    assert any(warmth) and None in warmth
