"""Does the example of plug-ins do what its page says, found as an installed package is? Nothing is fetched or installed."""

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
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What an installer would write down of the package, where the interpreter looks for it."""
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


def places(told: Kernel, one: Requirements, count: int) -> list[str]:
    return [list(NODES)[row] for row in told.place_run(told.class_for(one.generation, one), count).rows]


def test_without_the_package_there_are_no_plug_ins() -> None:
    assert installed_filters() == () and installed_scores() == ()


def test_the_package_is_found_by_its_entry_points(installed: dict[str, Any]) -> None:
    (filter_,), (score,) = installed_filters(), installed_scores()
    assert (filter_.name, filter_.code, filter_.unblock_events) == (
        "rack-power",
        Code.SELECTOR,
        (UnblockEvent.NODE, UnblockEvent.WORKLOAD),
    )
    assert filter_.reason == "the rack has less power than the workload needs"
    assert (score.name, score.weight, score.static) == ("tier", 5, True)
    assert installed["dependencies"] == ["remit"]


def test_work_that_needs_power_goes_where_it_is__and_the_better_tier_first(installed: dict[str, Any]) -> None:
    told = kernel()
    assert places(told, ask("hungry", 4), 20) == ["strong-silver"] * 4 + ["strong"] * 4
    assert places(told, ask("hungrier", 9), 1) == []
    assert places(told, ask("modest", 2), 40) == ["weak-gold", "odd-gold"] * 8 + ["bare"] * 8
    assert places(told, ask("late", 1), 1) == []


def test_it_holds_for_each_workload_of_a_scope__and_explain_says_it_in_its_words(installed: dict[str, Any]) -> None:
    """Where workloads that need the same share one ask, whoever of them came first must not answer for the rest."""
    weak = ready("n1", "16")
    weak = replace(weak, metadata=replace(weak.metadata, labels={"rack-power": "300"}))
    cluster = Cluster(rich(), weak).work(workload("light", "1")).work(workload("hot", "4", labels={"app": "hot"}))
    rules = RULES._replace(filters=installed_filters(), scores=(*DEFAULT_SCORES, *installed_scores()))
    view = cluster.view()
    told = {}
    for name in ("light", "hot"):
        generation = view.shapes.find("t1", name, 1)
        assert generation is not None
        told[name] = explain_pending(view, generation, 0, rules)
    assert told["light"].verdict == "now"
    assert (told["hot"].verdict, told["hot"].reason) == ("never", "selector")
    assert told["hot"].meaning == "the rack has less power than the workload needs"
    assert told["hot"].unblocks[0].changes[0].what == "rack-power"


def test_it_goes_by_nothing_that_work_of_one_shape_may_differ_in(installed: dict[str, Any]) -> None:
    told = kernel()
    hot = ask("hungry", 4)
    other = hot._replace(labels={"app": "other", "rack-power": "1"}, generation=("acme", "other", 7))
    for filter_ in installed_filters():
        answers = [np.asarray(filter_.check(one, told.columns, told.peers)).tolist() for one in (hot, other)]
        assert answers[0] == answers[1] and filter_.applies(hot) is filter_.applies(other) is True


def test_a_node_that_gets_more_power_or_another_tier_is_seen(installed: dict[str, Any]) -> None:
    told = kernel()
    hungry = ask("hungry", 9)
    one = told.class_for("hungry", hungry)
    assert told.best_row(one) == -1
    told.columns.put(node("bare", {"rack-power": "1000"}).node)
    assert told.best_row(one) == 0
    told.columns.put(node("strong", {"rack-power": "950", "tier": "gold"}).node)
    assert told.best_row(one) == 2
