"""Placement benchmark: cases, baselines, report, aims and chart."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from remit.bench import placement
from remit.bench.growth_chart import ChartLine, draw
from remit.bench.placement import (
    AIMED_CASES,
    BY_CLASS,
    FEATURES,
    FULL,
    ONE_BY_ONE,
    QUICK,
    RESOURCES,
    KernelRun,
    PlacementCase,
    PlacementFeature,
    PlacementPlan,
    SyntheticCluster,
    baseline_loops,
    class_requirements,
    placement_chart,
)
from remit.cli.main import remit
from remit.observation.topology_counts import ColumnPeerCounts
from remit.proposal.placement.kernel import Kernel

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def cluster() -> SyntheticCluster:
    return SyntheticCluster(300)


def test_plans_contain_every_case_with_an_aim() -> None:
    for plan in (FULL, QUICK):
        assert next(iter(plan.cases)) == AIMED_CASES[0], "the baselines run with the first case"
        assert 50_000 in plan.cases[AIMED_CASES[0]]
        assert all(5_000 in plan.cases[case] for case in AIMED_CASES)
        assert {nodes for sizes in plan.cases.values() for nodes in sizes} == set(plan.cases[AIMED_CASES[0]])
    sizes = {(case, nodes) for case, sizes in FULL.cases.items() for nodes in sizes}
    assert len(sizes) == 4 * 2 * 2 * len(FEATURES)


@pytest.mark.parametrize("mode", [BY_CLASS, ONE_BY_ONE])
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_case_counts_placements_also_after_capacity_is_used_up(
    cluster: SyntheticCluster, feature: PlacementFeature, mode: str
) -> None:
    placing = KernelRun(PlacementCase(7, mode, feature), cluster)
    placing.measure(0.02)
    before = placing.spent.placements
    assert before >= placing.batch and placing.spent.ns >= 0.02 * 1e9
    placing._remaining = 0
    placing.measure(0.005)
    assert placing.spent.placements > before
    assert placing.class_bytes >= 6 * len(cluster)
    posted = placing._kernel.columns.capacity - placing._kernel.columns.amounts
    assert posted.sum() > 0
    assert (cluster.columns.capacity == cluster.columns.amounts).all(), "the empty cluster stays empty"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_each_feature_is_requested(feature: PlacementFeature) -> None:
    (ask, other) = class_requirements(2, feature)
    found = (bool(ask.spread), bool(ask.affinity), bool(ask.anti_affinity), bool(ask.whole_devices), bool(ask.device_shares))
    assert found == tuple(feature.name == name for name in ("spread", "affinity", "anti-affinity", "whole GPU", "GPU share"))
    assert ask.resources != other.resources
    assert [requirement.resources for requirement in class_requirements(2, feature)] == [
        ask.resources,
        other.resources,
    ], "drawn by a fixed seed"


def test_feasibility_differs_between_classes(cluster: SyntheticCluster) -> None:
    kernel = Kernel(cluster.columns, ColumnPeerCounts(cluster.columns, {}))
    shares = [
        float((kernel.refresh(kernel.class_for(at, ask)) >= 0).mean())
        for at, ask in enumerate(class_requirements(40, RESOURCES))
    ]
    assert min(shares) < 0.35 and max(shares) == 1.0


def test_baseline_loops_choose_same_nodes_as_kernel(cluster: SyntheticCluster) -> None:
    loop, first = baseline_loops(cluster)
    columns = cluster.columns.freeze()
    kernel = Kernel(columns, ColumnPeerCounts(columns, {}))
    for at, ask in enumerate(class_requirements(20, RESOURCES)):
        one = kernel.class_for(at, ask)
        row = kernel.best_row(one)
        assert loop._best_fit(ask) == row
        assert first._first_fit(ask) == int((one.score >= 0).argmax())
        kernel.post(one, row)
        loop._ledgers[row].post(ask.resources, 1)


def test_json_report_is_one_line_and_missed_aim_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small, large = 60, 120
    monkeypatch.setattr(placement, "AIM_NODES", small)
    monkeypatch.setattr(placement, "LARGE_NODES", large)
    monkeypatch.setattr(placement, "AIMS_PER_S", (10**12, 1, 1))
    monkeypatch.setattr(placement, "QUICK", PlacementPlan(dict.fromkeys(AIMED_CASES, (small, large)), 0.005))
    monkeypatch.setattr(placement, "tune_interpreter", lambda: None)  # this process has other tests to run
    plot = tmp_path / "place.svg"
    words = ["bench", "place", "--quick", "--json", "--plot", str(plot)]
    result = CliRunner().invoke(remit, words, prog_name="remit")
    assert result.exit_code == 1, "10**12 placements a second are out of reach, so an aim is missed"
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert list(found) == ["bench", "revision", "machine", "rows", "aims"]
    assert [aim["met"] for aim in found["aims"][:3]] == [False, True, True]
    assert found["aims"][3]["aim"] == 0.5
    rows = {(row["mode"], row["classes"], row["nodes"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 2 * (3 + 2)
    for (_, _, nodes), row in rows.items():
        assert row["per_s"] == pytest.approx(row["placements"] / row["seconds"])
        assert row["ratio"] == pytest.approx(row["per_s"] / rows["plain loop", 40, nodes]["per_s"])
    assert ElementTree.parse(plot).getroot().tag == f"{SVG}svg"


def test_unwritable_chart_path_is_refused_before_measuring(tmp_path: Path) -> None:
    words = ["bench", "place", "--quick", "--plot", str(tmp_path / "none" / "place.svg")]
    result = CliRunner().invoke(remit, words, prog_name="remit")
    assert result.exit_code == 2
    assert f"directory {tmp_path / 'none'} does not exist" in result.output and "building" not in result.output


def test_aims_have_their_agreed_values() -> None:
    assert placement.AIMS_PER_S == (300_000, 60_000, 18_000)
    assert (placement.AIM_NODES, placement.LARGE_NODES, placement.AIM_LARGE_RATIO) == (5_000, 50_000, 0.5)
    assert [(case.classes, case.mode) for case in AIMED_CASES] == [(40, BY_CLASS), (40, ONE_BY_ONE), (400, ONE_BY_ONE)]


def test_chart_labels_axes_and_lines_without_overlap() -> None:
    lines = [ChartLine(f"line <{at}>", [(1_000, 5 + at / 100), (50_000, 6 + at / 100)]) for at in range(10)]
    tree = ElementTree.fromstring(draw("Growth", "nodes", "microseconds", lines))
    texts = [element.text for element in tree.iter(f"{SVG}text")]
    assert {"Growth", "nodes", "microseconds", "1,000", "100,000", "1", "10"} <= set(texts)
    places = [float(element.get("y", "0")) for element in tree.iter(f"{SVG}text") if (element.text or "").startswith("line")]
    assert len(places) == 10
    assert all(below - above >= 19.9 for above, below in zip(sorted(places), sorted(places)[1:], strict=False))
    curves = [element.get("d", "") for element in tree.iter(f"{SVG}path") if element.get("class", "").startswith("line line-0")]
    assert len(curves[0].split("L")) == 2


def test_chart_line_rises_on_both_logarithmic_axes() -> None:
    tree = ElementTree.fromstring(draw("t", "x", "y", [ChartLine("a", [(1, 1), (10, 10), (100, 100)])]))
    (path,) = (
        e.get("d", "")
        for e in tree.iter(f"{SVG}path")
        if e.get("class") == "line line-0" and e.get("stroke-dasharray") is not None
    )
    points = [tuple(map(float, point.split())) for point in path.removeprefix("M").split("L")]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x0 < x1 < x2 and y0 > y1 > y2
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)


def test_empty_chart_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw("t", "x", "y", [])
    rows = [{"nodes": 1, "classes": 1, "mode": "else", "features": "else", "per_s": 1.0}]
    with pytest.raises(ValueError, match="nothing to draw"):
        placement_chart(rows)
