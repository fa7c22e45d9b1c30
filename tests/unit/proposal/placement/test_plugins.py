"""Are plug-ins of others found, judged before they are used, and watched while they are?"""

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
from tests.unit.proposal.placement.test_kernel import ask, full, kernel, node

THEIRS = "theirs_for_tests"


def passing(ask: Any, site: Any, peers: Any) -> Any:
    return np.ones(len(site), dtype=np.bool_)


def level(ask: Any, site: Any) -> Any:
    return np.full(len(site), 0.5)


FILTER = Filter("theirs", Code.SELECTOR, passing)
SCORE = Score("theirs", level)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of somebody else's, to be pointed at."""
    module = ModuleType(THEIRS)
    monkeypatch.setitem(sys.modules, THEIRS, module)
    return module


def filters_of(module: ModuleType, found: object) -> tuple[Filter, ...]:
    module.found = found  # type: ignore[attr-defined]
    return installed_filters([EntryPoint("theirs", f"{THEIRS}:found", FILTER_GROUP)])


def scores_of(module: ModuleType, found: object) -> tuple[Score, ...]:
    module.found = found  # type: ignore[attr-defined]
    return installed_scores([EntryPoint("theirs", f"{THEIRS}:found", SCORE_GROUP)])


def columns() -> NodeColumns:
    lots = np.random.default_rng(1)
    return NodeColumns([full(node(row, lots)) for row in range(5)])


def placed(filters: tuple[Filter, ...] = (), scores: tuple[Score, ...] = DEFAULT_SCORES) -> int:
    plain = kernel(columns())
    told = Kernel(plain.columns, plain.peers, filters=filters, scores=scores)
    return told.best_row(told.class_for("spread", ask("spread")))


def test_what_is_loaded_is_marked_as_foreign__in_the_order_of_names(theirs: ModuleType) -> None:
    theirs.one, theirs.other = FILTER, FILTER._replace(name="other")  # type: ignore[attr-defined]
    points = [EntryPoint(name, f"{THEIRS}:{name}", FILTER_GROUP) for name in ("other", "one")]
    found = installed_filters(points)
    assert [one.name for one in found] == ["theirs", "other"]
    assert all(one.third_party for one in found)
    assert scores_of(theirs, SCORE) == (SCORE._replace(third_party=True),)


def test_no_entry_points_are_none__and_not_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "remit.proposal.placement.plugins.entry_points", lambda group: pytest.fail("nobody asked for the installed ones")
    )
    assert installed_filters([]) == () and installed_scores([]) == ()


@pytest.mark.parametrize(
    "value", ["nowhere.to_be_found:IT", f"{THEIRS}:missing", "remit.proposal.placement.plugins:BUILTIN_FILTERS.99"]
)
def test_what_does_not_load_is_named_with_why(theirs: ModuleType, value: str) -> None:
    with pytest.raises(
        PluginError, match=r"plug-in 'bad': .* could not be loaded \(.*\); fix it, or uninstall its package"
    ) as caught:
        installed_filters([EntryPoint("bad", value, FILTER_GROUP)])
    assert caught.value.name == "bad" and caught.value.__cause__ is not None


def test_a_module_that_fails_while_it_is_imported_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('no such device')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="no such device"):
        installed_scores([EntryPoint("bad", "breaks_on_import:IT", SCORE_GROUP)])


def test_a_module_that_would_end_the_program_is_named__and_does_not(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves_on_import.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=r"SystemExit\(0\)"):
        installed_filters([EntryPoint("bad", "leaves_on_import:IT", FILTER_GROUP)])


@pytest.mark.parametrize(
    "found", [passing, SCORE, None, ("theirs", Code.SELECTOR, passing)], ids=["a function", "a score", "nothing", "a tuple"]
)
def test_what_is_no_filter_is_refused(theirs: ModuleType, found: object) -> None:
    with pytest.raises(PluginError, match=f"is a {type(found).__name__}; expected a Filter"):
        filters_of(theirs, found)


def test_what_is_no_score_is_refused(theirs: ModuleType) -> None:
    with pytest.raises(PluginError, match="is a Filter; expected a Score"):
        scores_of(theirs, FILTER)


@pytest.mark.parametrize("rule", BUILTIN_FILTERS, ids=lambda rule: rule.name)
def test_the_name_of_a_built_in_filter_is_taken(theirs: ModuleType, rule: Filter) -> None:
    with pytest.raises(PluginError, match=f"'{rule.name}': this name belongs to a built-in filter"):
        filters_of(theirs, FILTER._replace(name=rule.name))


def test_the_names_of_built_in_scores_are_taken(theirs: ModuleType) -> None:
    ours = [one for one in vars(built_in).values() if isinstance(one, Score)]
    made = [locality(NodeColumns(), Hints()), Fragmentation(NodeColumns(), Demand()).score]
    assert sorted(one.name for one in (*ours, *made)) == sorted(SCORE_NAMES)
    for name in SCORE_NAMES:
        with pytest.raises(PluginError, match=f"'{name}': this name belongs to a built-in score"):
            scores_of(theirs, SCORE._replace(name=name))


def test_two_of_one_name_are_refused_by_the_kernel() -> None:
    with pytest.raises(PluginError, match="this name is used twice"):
        placed((FILTER, FILTER))
    with pytest.raises(PluginError, match="this name is used twice"):
        placed(scores=(LEAST_ALLOCATED, SCORE, SCORE))


@pytest.mark.parametrize("weight", [-1, WEIGHT_MAX + 1, 1.5, "3", True, None], ids=repr)
def test_a_weight_out_of_range_is_refused(theirs: ModuleType, weight: Any) -> None:
    with pytest.raises(PluginError, match="its weight is"):
        scores_of(theirs, SCORE._replace(weight=weight))


@pytest.mark.parametrize("weight", [0, WEIGHT_MAX])
def test_a_weight_in_range_is_taken(theirs: ModuleType, weight: int) -> None:
    assert placed(scores=(*DEFAULT_SCORES, *scores_of(theirs, SCORE._replace(weight=weight)))) >= 0


def test_weights_that_come_to_more_than_a_number_holds_are_refused() -> None:
    heavy = tuple(SCORE._replace(name=name, weight=WEIGHT_MAX) for name in ("a", "b"))
    assert placed(scores=heavy) >= 0
    with pytest.raises(PluginError, match="the weights of all scores add up to 2001; the limit is 2000"):
        placed(scores=(*heavy, LEAST_ALLOCATED))


@pytest.mark.parametrize(
    "wrong",
    [{"unblock_events": ("room!",)}, {"unblock_events": ()}, {"code": "selector"}, {"check": None}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_filter_without_a_code_a_check_or_real_cures_is_refused(theirs: ModuleType, wrong: dict[str, Any]) -> None:
    assert filters_of(theirs, FILTER._replace(unblock_events=(UnblockEvent.ROOM, UnblockEvent.TIME)))
    with pytest.raises(PluginError, match=r"its unblock events are|a Filter needs a code"):
        filters_of(theirs, FILTER._replace(**wrong))


def test_a_score_that_cannot_be_asked_is_refused(theirs: ModuleType) -> None:
    half: Any = 0.5
    with pytest.raises(PluginError, match="a Score needs a callable score"):
        scores_of(theirs, SCORE._replace(score=half))


def failing(*_: Any) -> Any:
    raise KeyError("rack")


def leaving(*_: Any) -> Any:
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (failing, r"raised KeyError\('rack'\)"),
        (leaving, r"raised SystemExit\(0\)"),
        (lambda ask, site, peers: np.ones(3, dtype=np.bool_), r"bool of shape \(3,\); expected a bool for each of 5 nodes"),
        (lambda ask, site, peers: np.ones((5, 1), dtype=np.bool_), r"bool of shape \(5, 1\)"),
        (lambda ask, site, peers: None, "returned object"),
        (lambda ask, site, peers: np.ones(5), "returned float64"),
    ],
    ids=["raises", "leaves", "too few", "two ways", "forgot to return", "numbers"],
)
def test_a_filter_that_fails_or_gives_no_answer_stops_the_placement(theirs: ModuleType, answer: Any, said: str) -> None:
    with pytest.raises(PluginError, match=said) as caught:
        placed(filters_of(theirs, FILTER._replace(check=answer)))
    assert caught.value.name == "theirs"


@pytest.mark.parametrize(("answer", "row"), [(True, True), (np.bool_(True), True), (False, False)])
def test_one_bool_speaks_for_every_node(theirs: ModuleType, answer: Any, row: bool) -> None:
    assert (placed(filters_of(theirs, FILTER._replace(check=lambda ask, site, peers: answer))) >= 0) == row


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (failing, r"raised KeyError\('rack'\)"),
        (leaving, r"raised SystemExit\(0\)"),
        (lambda ask, site: np.ones(4), r"float64 of shape \(4,\); expected a number for each of 5 nodes"),
        (lambda ask, site: None, "returned object"),
        (lambda ask, site: "best", "returned <U4"),
    ],
    ids=["raises", "leaves", "too few", "forgot to return", "text"],
)
@pytest.mark.parametrize("static", [False, True])
def test_a_score_that_fails_or_gives_no_answer_stops_the_placement(
    theirs: ModuleType, answer: Any, said: str, static: bool
) -> None:
    with pytest.raises(PluginError, match=said):
        placed(scores=scores_of(theirs, SCORE._replace(score=answer, static=static)))


@pytest.mark.parametrize("static", [False, True])
def test_what_is_no_number_is_the_worst_place_and_what_is_beyond_is_at_the_end(theirs: ModuleType, static: bool) -> None:
    told = [np.nan, -np.inf, 0.25, np.inf, 7.0]
    (score,) = scores_of(theirs, SCORE._replace(score=lambda ask, site: np.array(told), static=static))
    plain = kernel(columns())
    one_kernel = Kernel(plain.columns, plain.peers, scores=(score,))
    one = one_kernel.class_for("plain", ask("spread"))
    assert one_kernel.refresh(one).tolist() == [0, 0, 250_000, 1_000_000, 1_000_000]
    assert one_kernel.best_row(one) == 3


def test_no_number_anywhere_forbids_nothing(theirs: ModuleType) -> None:
    assert placed(scores=scores_of(theirs, SCORE._replace(score=lambda ask, site: np.nan))) == 0


@pytest.mark.parametrize("plug", ["filter", "score"])
def test_to_fail_at_whether_it_applies_is_named_too(theirs: ModuleType, plug: str) -> None:
    with pytest.raises(PluginError, match=r"applies\(\) raised"):
        if plug == "filter":
            placed(filters_of(theirs, FILTER._replace(applies=failing)))
        else:
            placed(scores=scores_of(theirs, SCORE._replace(applies=failing)))


def test_another_epoch_has_every_node_scored_anew__and_a_failing_one_is_named(theirs: ModuleType) -> None:
    best = [1]
    (score,) = scores_of(
        theirs,
        SCORE._replace(
            score=lambda ask, site: (np.arange(5) == best[0]).astype(float) if len(site) == 5 else np.zeros(len(site)),
            epoch=lambda: best[0],
        ),
    )
    plain = kernel(columns())
    told = Kernel(plain.columns, plain.peers, scores=(score,))
    one = told.class_for("spread", ask("spread"))
    assert told.best_row(one) == 1
    best[0] = 4
    assert told.best_row(one) == 4
    with pytest.raises(PluginError, match=r"epoch\(\) raised"):
        placed(scores=scores_of(theirs, SCORE._replace(epoch=failing)))
