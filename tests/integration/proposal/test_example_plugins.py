"""The example plug-ins work as documented, found like an installed package. Nothing is downloaded or installed."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from remit.law.fit import Requirements
from remit.law.requirements import compile_requirements
from remit.model.claims import Code
from remit.model.kinds import Node, NodeHealth, NodeSpec, NodeStatus, Template, WorkloadSpec
from remit.model.metadata import Metadata
from remit.model.resources import Amount
from remit.observation.node_columns import NodeColumns, NodeFree
from remit.observation.topology_counts import ColumnPeerCounts
from remit.proposal.explain.pending import explain_pending
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import UnblockEvent, installed_filters, installed_scores
from tests.properties.authority_world import workload
from tests.unit.observation.row_fixtures import ready
from tests.unit.proposal.cluster_fixtures import RULES, Cluster, rich

pytestmark = pytest.mark.smoke

PACKAGE = Path(__file__).resolve().parents[3] / "examples" / "plugins"
NODES = {
    "bare": {},
    "weak-gold": {"rack-power": "300", "tier": "gold"},
    "strong": {"rack-power": "800"},
    "strong-silver": {"rack-power": "400", "tier": "silver"},
    "odd-gold": {"rack-power": "plenty", "tier": "gold"},
}


@pytest.fixture
def installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The metadata that an installer would write for the package."""
    project: dict[str, Any] = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    written = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [
        line
        for group, names in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()))
    ]
    (written / "entry_points.txt").write_text("\n".join(points) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(PACKAGE / "src"))
    yield project
    sys.modules.pop("remit_example_plugins", None)


def node(name: str, labels: dict[str, str]) -> NodeFree:
    spec = NodeSpec(region="eu", zone="eu-a", capacity=Amount({"cpu": 16_000}))
    one = Node(metadata=Metadata(name=name, labels=labels), spec=spec, status=NodeStatus(health=NodeHealth.READY))
    return NodeFree(one, {"cpu": 16_000}, {})


def ask(name: str, cpu: int) -> Requirements:
    spec = WorkloadSpec(type="service", template=Template(command=("serve",), resources=Amount({"cpu": cpu * 1_000})))
    return compile_requirements("acme", name, {}, spec, ())


def kernel() -> Kernel:
    columns = NodeColumns([node(name, labels) for name, labels in NODES.items()])
    scores = (*DEFAULT_SCORES, *installed_scores())
    return Kernel(columns, ColumnPeerCounts(columns, {}), filters=installed_filters(), scores=scores)


def places(tested: Kernel, one: Requirements, count: int) -> list[str]:
    return [list(NODES)[row] for row in tested.place_run(tested.class_for(one.generation, one), count).rows]


def test_without_package_there_are_no_plugins() -> None:
    assert installed_filters() == () and installed_scores() == ()


def test_package_is_found_by_entry_points(installed_package: dict[str, Any]) -> None:
    (filter_,), (score,) = installed_filters(), installed_scores()
    assert (filter_.name, filter_.code, filter_.unblock_events) == (
        "rack-power",
        Code.SELECTOR,
        (UnblockEvent.NODE, UnblockEvent.WORKLOAD),
    )
    assert filter_.reason == "the rack has less power than the workload needs"
    assert (score.name, score.weight, score.static) == ("tier", 5, True)
    assert installed_package["dependencies"] == ["remit"]


def test_filter_and_score_place_work_by_power_and_tier(installed_package: dict[str, Any]) -> None:
    tested = kernel()
    assert places(tested, ask("hungry", 4), 20) == ["strong-silver"] * 4 + ["strong"] * 4
    assert places(tested, ask("hungrier", 9), 1) == []
    assert places(tested, ask("modest", 2), 40) == ["weak-gold", "odd-gold"] * 8 + ["bare"] * 8
    assert places(tested, ask("late", 1), 1) == []


def test_filter_holds_for_each_workload_and_explanation_uses_its_reason(installed_package: dict[str, Any]) -> None:
    """Where workloads with equal requirements share a class, the first one must not decide for the rest."""
    weak = ready("n1", "16")
    weak = replace(weak, metadata=replace(weak.metadata, labels={"rack-power": "300"}))
    cluster = Cluster(rich(), weak).work(workload("light", "1")).work(workload("hot", "4", labels={"app": "hot"}))
    rules = RULES._replace(filters=installed_filters(), scores=(*DEFAULT_SCORES, *installed_scores()))
    view = cluster.view()
    explanations = {}
    for name in ("light", "hot"):
        generation = view.shapes.find("t1", name, 1)
        assert generation is not None
        explanations[name] = explain_pending(view, generation, 0, rules)
    assert explanations["light"].verdict == "now"
    assert (explanations["hot"].verdict, explanations["hot"].reason) == ("never", "selector")
    assert explanations["hot"].meaning == "the rack has less power than the workload needs"
    assert explanations["hot"].unblocks[0].changes[0].what == "rack-power"


def test_plugins_ignore_fields_that_differ_within_shape(installed_package: dict[str, Any]) -> None:
    tested = kernel()
    hot = ask("hungry", 4)
    other = hot._replace(labels={"app": "other", "rack-power": "1"}, generation=("acme", "other", 7))
    for filter_ in installed_filters():
        answers = [np.asarray(filter_.check(one, tested.columns, tested.peers)).tolist() for one in (hot, other)]
        assert answers[0] == answers[1] and filter_.applies(hot) is filter_.applies(other) is True


def test_node_with_changed_power_or_tier_is_rescored(installed_package: dict[str, Any]) -> None:
    tested = kernel()
    hungry = ask("hungry", 9)
    one = tested.class_for("hungry", hungry)
    assert tested.best_row(one) == -1
    tested.columns.put(node("bare", {"rack-power": "1000"}).node)
    assert tested.best_row(one) == 0
    tested.columns.put(node("strong", {"rack-power": "950", "tier": "gold"}).node)
    assert tested.best_row(one) == 2
