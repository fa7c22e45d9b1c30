"""Does the example of plug-ins do what its page says, found as an installed package is? Nothing is fetched or installed."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remit.law.asks import make_ask
from remit.law.columns import Columns, Left
from remit.law.fit import Ask
from remit.law.peers import ColumnPeers
from remit.model.claims import Code
from remit.model.fields import Metadata
from remit.model.kinds import Node, NodeHealth, NodeSpec, NodeStatus, Template, WorkloadSpec
from remit.model.resources import Amount
from remit.proposal.kernel import Kernel
from remit.proposal.plugins import Cure, installed_filters, installed_scores
from remit.proposal.scores import DEFAULT

PACKAGE = Path(__file__).resolve().parents[2] / "examples" / "plugins"
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


def node(name: str, labels: dict[str, str]) -> Left:
    spec = NodeSpec(region="eu", zone="eu-a", capacity=Amount({"cpu": 4_000}))
    one = Node(metadata=Metadata(name=name, labels=labels), spec=spec, status=NodeStatus(health=NodeHealth.READY))
    return Left(one, {"cpu": 4_000}, {})


def ask(name: str, **labels: str) -> Ask:
    spec = WorkloadSpec(type="service", template=Template(command=("serve",), resources=Amount({"cpu": 1_000})))
    return make_ask("acme", name, {key.replace("_", "-"): value for key, value in labels.items()}, spec, ())


def kernel() -> Kernel:
    columns = Columns([node(name, labels) for name, labels in NODES.items()])
    scores = (*DEFAULT, *installed_scores())
    return Kernel(columns, ColumnPeers(columns, {}), filters=installed_filters(), scores=scores)


def places(told: Kernel, one: Ask, count: int) -> list[str]:
    return [list(NODES)[row] for row in told.run(told.known(one.generation, one), count).rows]


def test_without_the_package_there_are_no_plug_ins() -> None:
    assert installed_filters() == () and installed_scores() == ()


def test_the_package_is_found_by_its_entry_points(installed: dict[str, Any]) -> None:
    (filter_,), (score,) = installed_filters(), installed_scores()
    assert (filter_.name, filter_.code, filter_.cures) == ("rack-power", Code.SELECTOR, (Cure.NODE, Cure.WORKLOAD))
    assert filter_.reason == "the rack has less power than the workload needs"
    assert (score.name, score.weight, score.static) == ("tier", 5, True)
    assert installed["dependencies"] == ["remit"]


def test_work_that_needs_power_goes_where_it_is__and_the_better_tier_first(installed: dict[str, Any]) -> None:
    told = kernel()
    assert places(told, ask("hungry", needs_power="400"), 20) == ["strong-silver"] * 4 + ["strong"] * 4
    assert places(told, ask("hungrier", needs_power="900"), 1) == []
    assert places(told, ask("modest"), 20) == ["weak-gold", "odd-gold"] * 4 + ["bare"] * 4
    assert places(told, ask("late"), 1) == []


def test_a_label_that_is_no_number_asks_for_nothing(installed: dict[str, Any]) -> None:
    assert places(kernel(), ask("vague", needs_power="much"), 1) == ["weak-gold"]


def test_a_node_that_gets_more_power_or_another_tier_is_seen(installed: dict[str, Any]) -> None:
    told = kernel()
    hungry = ask("hungry", needs_power="900")
    one = told.known("hungry", hungry)
    assert told.place(one) == -1
    told.columns.put(node("bare", {"rack-power": "1000"}).node)
    assert told.place(one) == 0
    told.columns.put(node("strong", {"rack-power": "950", "tier": "gold"}).node)
    assert told.place(one) == 2
