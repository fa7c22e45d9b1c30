"""Third-party plug-ins: found by entry points, validated when loaded, and checked at every call."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from remit.model.claims import Code
from remit.observation.hints import Hints
from remit.observation.node_columns import NodeColumns
from remit.proposal.placement import builtin_plugins as built_in
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES, LEAST_ALLOCATED, locality
from remit.proposal.placement.fragmentation import Fragmentation
from remit.proposal.placement.fragmentation_model import Demand
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import (
    BUILTIN_FILTERS,
    FILTER_GROUP,
    FORMER_FILTER_NAMES,
    SCORE_GROUP,
    SCORE_NAMES,
    WEIGHT_MAX,
    Filter,
    PluginError,
    Score,
    UnblockEvent,
    installed_filters,
    installed_scores,
)
from tests.unit.proposal.placement.kernel_fixture import ask, full, kernel, node

PLUGIN_MODULE = "theirs_for_tests"


def passing(ask: Any, site: Any, peers: Any) -> Any:
    return np.ones(len(site), dtype=np.bool_)


def level(ask: Any, site: Any) -> Any:
    return np.full(len(site), 0.5)


FILTER = Filter("theirs", Code.SELECTOR, passing)
SCORE = Score("theirs", level)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A third-party module for entry points to refer to."""
    module = ModuleType(PLUGIN_MODULE)
    monkeypatch.setitem(sys.modules, PLUGIN_MODULE, module)
    return module


def filters_of(module: ModuleType, found: object) -> tuple[Filter, ...]:
    module.found = found  # type: ignore[attr-defined]
    return installed_filters([EntryPoint("theirs", f"{PLUGIN_MODULE}:found", FILTER_GROUP)])


def scores_of(module: ModuleType, found: object) -> tuple[Score, ...]:
    module.found = found  # type: ignore[attr-defined]
    return installed_scores([EntryPoint("theirs", f"{PLUGIN_MODULE}:found", SCORE_GROUP)])


def columns() -> NodeColumns:
    rng = np.random.default_rng(1)
    return NodeColumns([full(node(row, rng)) for row in range(5)])


def placed(filters: tuple[Filter, ...] = (), scores: tuple[Score, ...] = DEFAULT_SCORES) -> int:
    plain = kernel(columns())
    tested = Kernel(plain.columns, plain.peers, filters=filters, scores=scores)
    return tested.best_row(tested.class_for("spread", ask("spread")))


def test_loaded_plugins_are_marked_third_party_in_given_order(plugin: ModuleType) -> None:
    plugin.one, plugin.other = FILTER, FILTER._replace(name="other")  # type: ignore[attr-defined]
    points = [EntryPoint(name, f"{PLUGIN_MODULE}:{name}", FILTER_GROUP) for name in ("other", "one")]
    found = installed_filters(points)
    assert [one.name for one in found] == ["theirs", "other"]
    assert all(one.third_party for one in found)
    assert scores_of(plugin, SCORE) == (SCORE._replace(third_party=True),)


def test_empty_entry_points_do_not_load_installed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "remit.proposal.placement.plugins.entry_points", lambda group: pytest.fail("installed plug-ins must not be read")
    )
    assert installed_filters([]) == () and installed_scores([]) == ()


@pytest.mark.parametrize(
    "value", ["nowhere.to_be_found:IT", f"{PLUGIN_MODULE}:missing", "remit.proposal.placement.plugins:BUILTIN_FILTERS.99"]
)
def test_plugin_that_cannot_be_loaded_is_named_with_reason(plugin: ModuleType, value: str) -> None:
    with pytest.raises(
        PluginError, match=r"plug-in 'bad': .* could not be loaded \(.*\); fix it, or uninstall its package"
    ) as caught:
        installed_filters([EntryPoint("bad", value, FILTER_GROUP)])
    assert caught.value.name == "bad" and caught.value.__cause__ is not None


def test_module_that_raises_on_import_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('no such device')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="no such device"):
        installed_scores([EntryPoint("bad", "breaks_on_import:IT", SCORE_GROUP)])


def test_module_that_exits_on_import_is_named_without_exiting(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves_on_import.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=r"SystemExit\(0\)"):
        installed_filters([EntryPoint("bad", "leaves_on_import:IT", FILTER_GROUP)])


@pytest.mark.parametrize(
    "found", [passing, SCORE, None, ("theirs", Code.SELECTOR, passing)], ids=["a function", "a score", "nothing", "a tuple"]
)
def test_object_that_is_no_filter_is_refused(plugin: ModuleType, found: object) -> None:
    with pytest.raises(PluginError, match=f"is a {type(found).__name__}; expected a Filter"):
        filters_of(plugin, found)


def test_filter_registered_as_score_is_refused(plugin: ModuleType) -> None:
    with pytest.raises(PluginError, match="is a Filter; expected a Score"):
        scores_of(plugin, FILTER)


@pytest.mark.parametrize("rule", BUILTIN_FILTERS, ids=lambda rule: rule.name)
def test_name_of_built_in_filter_is_refused(plugin: ModuleType, rule: Filter) -> None:
    with pytest.raises(PluginError, match=f"'{rule.name}': this name belongs to a built-in filter"):
        filters_of(plugin, FILTER._replace(name=rule.name))


@pytest.mark.parametrize("name", FORMER_FILTER_NAMES)
def test_former_name_of_built_in_filter_is_refused(plugin: ModuleType, name: str) -> None:
    """Stored funnels that contain it are read as the built-in filter."""
    with pytest.raises(PluginError, match=f"'{name}': this name belongs to a built-in filter"):
        filters_of(plugin, FILTER._replace(name=name))


def test_names_of_built_in_scores_are_refused(plugin: ModuleType) -> None:
    built_in_scores = [one for one in vars(built_in).values() if isinstance(one, Score)]
    made = [locality(NodeColumns(), Hints()), Fragmentation(NodeColumns(), Demand()).score]
    assert sorted(one.name for one in (*built_in_scores, *made)) == sorted(SCORE_NAMES)
    for name in SCORE_NAMES:
        with pytest.raises(PluginError, match=f"'{name}': this name belongs to a built-in score"):
            scores_of(plugin, SCORE._replace(name=name))


def test_two_plugins_of_one_name_are_refused_by_kernel() -> None:
    with pytest.raises(PluginError, match="this name is used twice"):
        placed((FILTER, FILTER))
    with pytest.raises(PluginError, match="this name is used twice"):
        placed(scores=(LEAST_ALLOCATED, SCORE, SCORE))


@pytest.mark.parametrize("weight", [-1, WEIGHT_MAX + 1, 1.5, "3", True, None], ids=repr)
def test_weight_out_of_range_is_refused(plugin: ModuleType, weight: Any) -> None:
    with pytest.raises(PluginError, match="its weight is"):
        scores_of(plugin, SCORE._replace(weight=weight))


@pytest.mark.parametrize("weight", [0, WEIGHT_MAX])
def test_weight_in_range_is_accepted(plugin: ModuleType, weight: int) -> None:
    assert placed(scores=(*DEFAULT_SCORES, *scores_of(plugin, SCORE._replace(weight=weight)))) >= 0


def test_sum_of_weights_over_limit_is_refused() -> None:
    heavy = tuple(SCORE._replace(name=name, weight=WEIGHT_MAX) for name in ("a", "b"))
    assert placed(scores=heavy) >= 0
    with pytest.raises(PluginError, match="the weights of all scores add up to 2001; the limit is 2000"):
        placed(scores=(*heavy, LEAST_ALLOCATED))


@pytest.mark.parametrize(
    "wrong",
    [{"unblock_events": ("room!",)}, {"unblock_events": ()}, {"code": "selector"}, {"check": None}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_filter_without_code_check_or_valid_unblock_events_is_refused(plugin: ModuleType, wrong: dict[str, Any]) -> None:
    assert filters_of(plugin, FILTER._replace(unblock_events=(UnblockEvent.ROOM, UnblockEvent.TIME)))
    with pytest.raises(PluginError, match=r"its unblock events are|a Filter needs a code"):
        filters_of(plugin, FILTER._replace(**wrong))


def test_score_that_is_not_callable_is_refused(plugin: ModuleType) -> None:
    half: Any = 0.5
    with pytest.raises(PluginError, match="a Score needs a callable score"):
        scores_of(plugin, SCORE._replace(score=half))


def failing(*_: Any) -> Any:
    raise KeyError("rack")


def exiting(*_: Any) -> Any:
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (failing, r"raised KeyError\('rack'\)"),
        (exiting, r"raised SystemExit\(0\)"),
        (lambda ask, site, peers: np.ones(3, dtype=np.bool_), r"bool of shape \(3,\); expected a bool for each of 5 nodes"),
        (lambda ask, site, peers: np.ones((5, 1), dtype=np.bool_), r"bool of shape \(5, 1\)"),
        (lambda ask, site, peers: None, "returned object"),
        (lambda ask, site, peers: np.ones(5), "returned float64"),
    ],
    ids=["raises", "exits", "too few", "two dimensions", "returns nothing", "numbers"],
)
def test_filter_that_fails_or_returns_wrong_type_stops_placement(plugin: ModuleType, answer: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        placed(filters_of(plugin, FILTER._replace(check=answer)))
    assert caught.value.name == "theirs"


@pytest.mark.parametrize(("answer", "row"), [(True, True), (np.bool_(True), True), (False, False)])
def test_single_bool_applies_to_every_node(plugin: ModuleType, answer: Any, row: bool) -> None:
    assert (placed(filters_of(plugin, FILTER._replace(check=lambda ask, site, peers: answer))) >= 0) == row


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (failing, r"raised KeyError\('rack'\)"),
        (exiting, r"raised SystemExit\(0\)"),
        (lambda ask, site: np.ones(4), r"float64 of shape \(4,\); expected a number for each of 5 nodes"),
        (lambda ask, site: None, "returned object"),
        (lambda ask, site: "best", "returned <U4"),
    ],
    ids=["raises", "exits", "too few", "returns nothing", "text"],
)
@pytest.mark.parametrize("static", [False, True])
def test_score_that_fails_or_returns_wrong_type_stops_placement(
    plugin: ModuleType, answer: Any, message: str, static: bool
) -> None:
    with pytest.raises(PluginError, match=message):
        placed(scores=scores_of(plugin, SCORE._replace(score=answer, static=static)))


@pytest.mark.parametrize("static", [False, True])
def test_nan_score_is_worst_and_out_of_range_score_is_clamped(plugin: ModuleType, static: bool) -> None:
    tested = [np.nan, -np.inf, 0.25, np.inf, 7.0]
    (score,) = scores_of(plugin, SCORE._replace(score=lambda ask, site: np.array(tested), static=static))
    plain = kernel(columns())
    one_kernel = Kernel(plain.columns, plain.peers, scores=(score,))
    one = one_kernel.class_for("plain", ask("spread"))
    assert one_kernel.refresh(one).tolist() == [0, 0, 250_000, 1_000_000, 1_000_000]
    assert one_kernel.best_row(one) == 3


def test_nan_everywhere_forbids_no_node(plugin: ModuleType) -> None:
    assert placed(scores=scores_of(plugin, SCORE._replace(score=lambda ask, site: np.nan))) == 0


@pytest.mark.parametrize("plug", ["filter", "score"])
def test_error_in_applies_names_plugin(plugin: ModuleType, plug: str) -> None:
    with pytest.raises(PluginError, match=r"applies\(\) raised"):
        if plug == "filter":
            placed(filters_of(plugin, FILTER._replace(applies=failing)))
        else:
            placed(scores=scores_of(plugin, SCORE._replace(applies=failing)))


def test_new_epoch_rescores_every_node_and_failing_epoch_is_named(plugin: ModuleType) -> None:
    best = [1]
    (score,) = scores_of(
        plugin,
        SCORE._replace(
            score=lambda ask, site: (np.arange(5) == best[0]).astype(float) if len(site) == 5 else np.zeros(len(site)),
            epoch=lambda: best[0],
        ),
    )
    plain = kernel(columns())
    tested = Kernel(plain.columns, plain.peers, scores=(score,))
    one = tested.class_for("spread", ask("spread"))
    assert tested.best_row(one) == 1
    best[0] = 4
    assert tested.best_row(one) == 4
    with pytest.raises(PluginError, match=r"epoch\(\) raised"):
        placed(scores=scores_of(plugin, SCORE._replace(epoch=failing)))
