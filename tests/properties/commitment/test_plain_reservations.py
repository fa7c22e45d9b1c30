"""Property: a reservation on the fast path, and its bind, equal those by all rules.

Two scopes get the same claims, valid or not, batch by batch; in one of them the fast path is disabled. Heads contain a
digest of all rows since the beginning: equal heads mean equal rows.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remit.commitment.rulings import placement
from remit.model.claims import Apply, Bind, Code, Reserve
from remit.model.kinds import Placement, Taint
from tests.properties.authority_world import OPERATOR, Scope, node, populated_scope, run, tenant
from tests.properties.commitment.books_check import stale
from tests.properties.commitment.faulty_scope_machine import books, summed
from tests.unit.commitment.authority_fixture import T1, bind, commit_transitions, spawn_replicas, transition_claim

NODES = ("n1", "n2")
WITHOUT_FAST_PATH: dict[str, Any] = {"fits_plainly": lambda *_: False}
COUNTS = ("population", "reserved", "active", "preemptors")
HERE = Placement(zones=("a",))

STEP_NAMES = ("reserve", "reserve", "stop", "stopped", "stopped", "bind", "bind", "unreserve", "shrink", "quota")
STEPS = st.lists(st.tuples(st.sampled_from(STEP_NAMES), *[st.integers(0, 11)] * 3), min_size=1, max_size=4)


async def full_scope(cpu: str) -> Scope:
    """Two nodes full of weak replicas, and strong ones waiting; some of them fit only one zone, or are large."""
    scope = await populated_scope(nodes=[node("n1", "4"), node("n2", "4", "b")])
    weak = await spawn_replicas(scope, "weak", 8)
    for i, key in enumerate(weak):
        await bind(scope, key, NODES[i % 2])
    await spawn_replicas(scope, "strong", 4, cpu=cpu, priority="top")
    await spawn_replicas(scope, "here", 2, cpu="2", priority="high", placement=HERE)
    return scope


def some(scope: Scope, phase: str, among: list[str], at: int) -> str:
    """A replica in this phase, if there is one."""
    there = [key for key in among if scope.row(key).get("status", {}).get("phase") == phase]
    return (there or among)[at % len(there or among)]


def claim_of(scope: Scope, step: tuple[str, int, int, int]) -> tuple[Any, Any]:
    """A claim on the present rows: mostly valid, sometimes not."""
    step_name, a, b, c = step
    strong = [f"replica/t1/strong-{i}" for i in range(4)] + ["replica/t1/here-0", "replica/t1/here-1"]
    weak = [f"replica/t1/weak-{i}" for i in range(8)]
    match step_name:
        case "reserve":
            key = some(scope, "pending", strong, a)
            on = [one for i, one in enumerate(weak) if i % 2 == b % 2 and scope.phase(one) == "bound"] or weak
            victims = {one: scope.at(one) for one in on[: c % 5]}
            return scope.actors["scheduler"], Reserve(key, scope.at(key), NODES[b % 2], T1, victims=victims)
        case "bind":
            key = some(scope, "reserved", strong, a)
            on_ = scope.row(key).get("status", {}).get("node")
            return scope.actors["scheduler"], Bind(key, scope.at(key), on_ if on_ and c else NODES[b % 2], T1)
        case "unreserve":
            return transition_claim(scope, some(scope, "reserved", strong, a), step_name)
        case "shrink":
            return OPERATOR, Apply(node(NODES[a % 2], str(2 + b % 3), "ab"[a % 2]))
        case "quota":
            return OPERATOR, Apply(tenant("t1", cpu=str(6 + b)))
        case _:
            return transition_claim(
                scope, some(scope, {"stop": "draining", "stopped": "stopping"}[step_name], weak, a), step_name
            )


async def compare_paths(cpu: str, batches: list[list[tuple[str, int, int, int]]]) -> None:
    quick, slow = await full_scope(cpu), await full_scope(cpu)
    try:
        for steps in batches:
            claims = [claim_of(quick, step) for step in steps]
            operations = [await quick.operation(*one) for one in claims]
            found = await quick.send(operations)
            with mock.patch.multiple(placement, **WITHOUT_FAST_PATH):
                expected = await slow.send(operations)
            assert found == expected
            assert quick.row("head") == slow.row("head")
            assert books(quick.books) == books(slow.books) == summed(quick)
            assert quick.books.peers.node_counts == slow.books.peers.node_counts
            assert [getattr(quick.books, name) for name in COUNTS] == [getattr(slow.books, name) for name in COUNTS]
            assert [*stale(quick.books), *stale(slow.books)] == []
    finally:
        await quick.close()
        await slow.close()


@settings(max_examples=settings().max_examples // 2 or 1)
@given(cpu=st.sampled_from(["1", "2", "3"]), batches=st.lists(STEPS, min_size=8, max_size=20))
def test_fast_reservation_equals_reservation_by_rules(cpu: str, batches: list[list[tuple[str, int, int, int]]]) -> None:
    run(compare_paths(cpu, batches))


def test_reservation_and_its_bind_take_fast_path() -> None:
    """Otherwise the property above would compare nothing."""
    taken: list[tuple[str, bool]] = []
    decide = placement.fits_plainly

    def recorded(draft: Any, operation: Any, claim: Any, *arguments: Any) -> bool:
        taken.append((type(claim).__name__, decide(draft, operation, claim, *arguments)))
        return taken[-1][1]

    async def scenario(scope: Scope) -> None:
        key = await cleared_reservation(scope)
        await scope.must(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1))
        assert scope.phase(key) == "bound"

    with mock.patch.object(placement, "fits_plainly", recorded):
        run(run_in_full_scope("2", scenario))
    assert taken[-2:] == [("Reserve", True), ("Bind", True)]


async def cleared_reservation(scope: Scope) -> str:
    """A reservation on n1 whose two victims have stopped."""
    key, victims = "replica/t1/strong-0", ("replica/t1/weak-0", "replica/t1/weak-2")
    claim = Reserve(key, scope.at(key), "n1", T1, victims={victim: scope.at(victim) for victim in victims})
    await scope.must(scope.actors["scheduler"], claim)
    for one in victims:
        await commit_transitions(scope, one, "stop", "stopped")
    return key


async def run_in_full_scope(cpu: str, scenario: Callable[[Scope], Coroutine[Any, Any, None]]) -> None:
    scope = await full_scope(cpu)
    try:
        await scenario(scope)
    finally:
        await scope.close()


@pytest.mark.parametrize(
    ("obj", "code"),
    [
        (node("n1", "3"), Code.NO_ROOM),
        (tenant("t1", cpu="7"), Code.OVER_QUOTA),
        (node("n1", "4", unschedulable=True), Code.DRAINING),
        (node("n1", "4", taints=(Taint(key="k", effect="NoSchedule"),)), Code.TAINT),
    ],
)
def test_reservation_that_no_longer_fits_is_not_bound(obj: Any, code: Code) -> None:
    async def scenario(scope: Scope) -> None:
        key = await cleared_reservation(scope)
        await scope.must(OPERATOR, Apply(obj))
        assert await scope.refused(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1)) is code

    run(run_in_full_scope("2", scenario))
