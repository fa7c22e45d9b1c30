"""Property: active overrides equal an independent evaluation of every row, at any time."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

from hypothesis import event, given
from hypothesis import strategies as st

from remit.law.overrides import ActiveOverrides, active_overrides
from remit.model.kinds import USER_PRIORITY_MAX, Override, OverrideEffect, OverrideScope, OverrideSpec, OverrideStatus
from remit.model.metadata import Deadline, Metadata
from remit.model.resources import Duration

NAMES = ("a", "b")
"""Shared by tenants, workloads and places: names of one sort must not match another."""

WORK = tuple(product(NAMES, NAMES))
PLACES = tuple(product(NAMES, NAMES, NAMES, NAMES))
SORTS = ("regions", "zones", "pools", "nodes")
BOOTS = ("boot-1", "boot-2")

few = st.lists(st.sampled_from(NAMES), max_size=2, unique=True).map(tuple)
scopes = st.builds(
    OverrideScope,
    tenants=few,
    workloads=st.lists(st.sampled_from([f"{t}/{w}" for t, w in WORK]), max_size=2, unique=True).map(tuple),
    **dict.fromkeys(SORTS, few),
)
specs = st.builds(
    OverrideSpec,
    effect=st.sampled_from(get_args(OverrideEffect)),
    scope=scopes,
    ttl=st.just(Duration(1_000)),
    reason=st.just("r"),
    author=st.just("a"),
    by=st.sampled_from((1, 30, USER_PRIORITY_MAX)),
    budget=st.sampled_from(NAMES),
)
deadlines = st.none() | st.builds(Deadline, boot=st.sampled_from(BOOTS), at_ms=st.integers(1, 6))


@st.composite
def rows(draw: st.DrawFn) -> list[Override]:
    names = draw(st.lists(st.sampled_from("opqrst"), max_size=6, unique=True))
    return [
        Override(metadata=Metadata(name=name), spec=draw(specs), status=OverrideStatus(deadline=draw(deadlines)))
        for name in names
    ]


class IndependentEvaluation:
    """Evaluates each question row by row."""

    def __init__(self, rows: list[Override], now: tuple[str, int] | None) -> None:
        self.now = now
        self.live = [row for row in sorted(rows, key=lambda row: row.metadata.name) if self._live(row.status.deadline)]

    def _live(self, deadline: Deadline | None) -> bool:
        return self.now is not None and deadline is not None and self.now[0] == deadline.boot and deadline.at_ms > self.now[1]

    def of(self, effect: str) -> list[Override]:
        return [row for row in self.live if row.spec.effect == effect]

    @staticmethod
    def works(row: Override, work: tuple[str, str]) -> bool:
        return work[0] in row.spec.scope.tenants or "/".join(work) in row.spec.scope.workloads

    @staticmethod
    def stands(row: Override, place: tuple[str, ...]) -> bool:
        return any(name in getattr(row.spec.scope, sort) for sort, name in zip(SORTS, place, strict=False))

    def everything(self) -> dict[Any, Any]:
        effects_seen: dict[Any, Any] = {
            "until": min((row.status.deadline.at_ms for row in self.live if row.status.deadline), default=None)
        }
        for work in WORK:
            effects_seen["paused", work] = first(row for row in self.of("pause-expansion") if self.works(row, work))
            effects_seen["boost", work] = min(
                USER_PRIORITY_MAX - 7, sum(row.spec.by for row in self.of("boost") if self.works(row, work))
            )
            pins = [row for row in self.of("pin") if self.works(row, work)]
            effects_seen["pinned", work] = [row.metadata.name for row in pins] or None
            for place in PLACES:
                effects_seen["kept off", work, place] = first(row for row in pins if not self.stands(row, place))
                effects_seen["held", work, place] = first(
                    row for row in self.of("hold-repair") if self._holds(row, work, place)
                )
        for place in PLACES:
            effects_seen["avoided", place] = first(row for row in self.of("avoid") if self.stands(row, place))
        return effects_seen

    def _holds(self, row: Override, work: tuple[str, str], place: tuple[str, ...]) -> bool:
        scope = row.spec.scope
        names_work, names_places = bool(scope.tenants + scope.workloads), any(getattr(scope, sort) for sort in SORTS)
        if not (names_work or names_places):
            return False
        return (self.works(row, work) or not names_work) and (self.stands(row, place) or not names_places)


def first(rows: Any) -> str:
    return next((row.metadata.name for row in rows), "")


def everything(effects: ActiveOverrides) -> dict[Any, Any]:
    effects_seen: dict[Any, Any] = {"until": effects.until_ms}
    for work in WORK:
        effects_seen["paused", work] = effects.paused_by(*work)
        effects_seen["boost", work] = effects.boost(*work, 7)
        pins = effects.pinned_places(*work)
        effects_seen["pinned", work] = None if pins is None else [pin.override for pin in pins]
        for place in PLACES:
            effects_seen["kept off", work, place] = next((pin.override for pin in pins or () if not pin.covers(*place)), "")
            effects_seen["held", work, place] = effects.repair_held_by(*work, *place)
    for place in PLACES:
        effects_seen["avoided", place] = effects.avoided_by(*place)
        assert (effects.avoided_by(*place) != "") == any(places.covers(*place) for places in effects.excluded_places)
    return effects_seen


@given(rows(), st.none() | st.tuples(st.sampled_from(BOOTS), st.integers(0, 7)))
def test_active_overrides_equal_independent_evaluation(rows: list[Override], now: tuple[str, int] | None) -> None:
    effects = active_overrides(rows, now)
    event(f"{len(effects.overrides)} in force")
    assert everything(effects) == IndependentEvaluation(rows, now).everything()


@given(rows())
def test_expired_overrides_have_no_effect(rows: list[Override]) -> None:
    for now in product(BOOTS, range(8)):
        ahead = [row for row in rows if row.status.deadline is not None and row.status.deadline.at_ms > now[1]]
        assert everything(active_overrides(rows, now)) == everything(active_overrides(ahead, now))
        latest = max((row.status.deadline.at_ms for row in ahead if row.status.deadline), default=0)
        if now[1] >= latest:
            assert active_overrides(rows, now) == ActiveOverrides()


@given(rows(), st.tuples(st.sampled_from(BOOTS), st.integers(0, 7)))
def test_effects_are_constant_until_reported_change(rows: list[Override], now: tuple[str, int]) -> None:
    effects = active_overrides(rows, now)
    until_ms = 8 if effects.until_ms is None else effects.until_ms
    assert until_ms > now[1]
    for at_ms in range(now[1], until_ms):
        assert active_overrides(rows, (now[0], at_ms)) == effects
    if effects.until_ms is not None:
        assert active_overrides(rows, (now[0], until_ms)) != effects


@given(rows().flatmap(lambda drawn: st.tuples(st.just(drawn), st.permutations(drawn))), st.integers(0, 7))
def test_order_of_overrides_does_not_matter(drawn: tuple[list[Override], list[Override]], at_ms: int) -> None:
    one, other = (active_overrides(rows, (BOOTS[0], at_ms)) for rows in drawn)
    assert one == other
    assert everything(one) == everything(other)
