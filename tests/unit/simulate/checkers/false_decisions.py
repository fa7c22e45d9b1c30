"""How does a history look in which a scheduler says what is not so? They are judged elsewhere. No test is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.unit.simulate.checkers.history_builder import Json, Pen

Breach = Callable[[Pen], None]
SAID: list[tuple[str, Breach]] = []
KEEPS_TWO: dict[str, Json] = {"disruption": {"minAvailable": 2}}


def says(check: str) -> Callable[[Breach], Breach]:
    def register(breach: Breach) -> Breach:
        SAID.append((check, breach))
        return breach

    return register


def decide(pen: Pen, *keys: str, role: str = "scheduler", **more: Any) -> None:
    """A decision about these, lawful unless told: two nodes, of which none fits."""
    whole = {
        "replicas": {key.removeprefix("replica/"): "" for key in keys}, "attempt": 1, "revision": pen.revision, "nodes": 2,
        "funnel": [["resources", 2]], "fits": 0, "verdict": "waiting", "reason": "no_room", "cures": ["room"], **more,
    }  # fmt: skip
    name = f"d{pen.count}"
    row = {"metadata": {"name": name, "tenant": "t1"}, "spec": whole}
    pen.commit({f"decision/t1/{name}": row}, [pen.entry("explain", name, role)])


def override(pen: Pen, name: str, ttl_ms: int = 10_000) -> None:
    deadline = {"boot": pen.boot, "atMs": pen.world.now_ms + ttl_ms}
    spec = {"effect": "avoid", "scope": {"zones": ["b"]}, "ttl": f"{ttl_ms}ms", "reason": "x", "author": "x"}
    row = {"metadata": {"name": name}, "spec": spec, "status": {"deadline": deadline}}
    pen.commit({f"override/{name}": row}, [pen.entry("apply", f"override/{name}", "operator")])


def preempt(pen: Pen, key: str, *victims: str, seen: int, at: str = "n1") -> None:
    rows = {victim: pen.status(victim, phase="draining") for victim in victims}
    copies = {victim: pen.copy(victim) for victim in victims}
    rows[key] = pen.status(key, phase="reserved", node=at, grants=["tenant/t1"], victims=copies)
    pen.commit(rows, [pen.entry("reserve", key, "scheduler", seen=seen)])


def three_that_keep_two(pen: Pen) -> tuple[list[str], list[str]]:
    """Three of a service run that keeps two, and two that rank higher wait; the scheduler is one that explains."""
    pen.declare("s", **KEEPS_TWO)
    low = pen.spawn(0, 1, 2, workload="s")
    for key in low:
        pen.run(key)
    high = pen.spawn(8, 9)
    decide(pen, *high)
    return low, high


@says("decisions_add_up")
def a_node_went_missing(pen: Pen) -> None:
    decide(pen, *pen.spawn(0), fits=1, funnel=[])


@says("decisions_add_up")
def a_node_was_counted_twice(pen: Pen) -> None:
    decide(pen, *pen.spawn(0), fits=1)


@says("decisions_add_up")
def a_node_that_was_not_there_yet(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    decide(pen, a, revision=2)


@says("decisions_add_up")
def the_future_was_seen(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    decide(pen, a, revision=pen.revision + 1)


@says("decisions_add_up")
def it_waits_for_no_reason(pen: Pen) -> None:
    decide(pen, *pen.spawn(0), reason="")


@says("decisions_add_up")
def it_waits_for_nothing(pen: Pen) -> None:
    decide(pen, *pen.spawn(0), cures=[])


@says("ended_overrides_are_not_cited")
def an_override_whose_time_is_over(pen: Pen) -> None:
    override(pen, "o")
    pen.world.now_ms += 10_000
    decide(pen, *pen.spawn(0), overrides=["o"])


@says("ended_overrides_are_not_cited")
def an_override_whose_time_was_over_before_another_led(pen: Pen) -> None:
    override(pen, "o")
    pen.boot = "b2"
    pen.world.now_ms += 11_000
    decide(pen, *pen.spawn(0), overrides=["o"])


@says("ended_overrides_are_not_cited")
def an_override_that_was_deleted(pen: Pen) -> None:
    override(pen, "o")
    pen.commit({"override/o": None}, [pen.entry("delete", "override/o", "operator")])
    decide(pen, *pen.spawn(0), overrides=["o"])


@says("preemption_leaves_enough")
def two_of_three_at_once(pen: Pen) -> None:
    low, high = three_that_keep_two(pen)
    preempt(pen, high[0], low[0], low[1], seen=pen.revision)


@says("preemption_leaves_enough")
def two_of_three_one_after_the_other_before_the_first_is_seen(pen: Pen) -> None:
    low, high = three_that_keep_two(pen)
    seen = pen.revision
    preempt(pen, high[0], low[0], seen=seen)
    preempt(pen, high[1], low[1], seen=seen)
