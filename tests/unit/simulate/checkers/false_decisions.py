"""Histories with false scheduler decisions, used as planted violations in test_safety_checks.py. No tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.unit.simulate.checkers.history_builder import HistoryBuilder, Json

Breach = Callable[[HistoryBuilder], None]
FALSE_DECISIONS: list[tuple[str, Breach]] = []
KEEPS_TWO: dict[str, Json] = {"disruption": {"minAvailable": 2}}


def false_decision(check: str) -> Callable[[Breach], Breach]:
    def register(breach: Breach) -> Breach:
        FALSE_DECISIONS.append((check, breach))
        return breach

    return register


def decide(h: HistoryBuilder, *keys: str, role: str = "scheduler", **more: Any) -> None:
    """Commit a decision about these replicas, correct by default: two nodes, none of which fits."""
    spec = {
        "replicas": {key.removeprefix("replica/"): "" for key in keys}, "attempt": 1, "revision": h.revision, "nodes": 2,
        "funnel": [["resources", 2]], "fits": 0, "verdict": "waiting", "reason": "no_room", "cures": ["room"], **more,
    }  # fmt: skip
    name = f"d{h.count}"
    row = {"metadata": {"name": name, "tenant": "t1"}, "spec": spec}
    h.commit({f"decision/t1/{name}": row}, [h.entry("explain", name, role)])


def override(h: HistoryBuilder, name: str, ttl_ms: int = 10_000) -> None:
    deadline = {"boot": h.boot, "atMs": h.world.now_ms + ttl_ms}
    spec = {"effect": "avoid", "scope": {"zones": ["b"]}, "ttl": f"{ttl_ms}ms", "reason": "x", "author": "x"}
    row = {"metadata": {"name": name}, "spec": spec, "status": {"deadline": deadline}}
    h.commit({f"override/{name}": row}, [h.entry("apply", f"override/{name}", "operator")])


def preempt(h: HistoryBuilder, key: str, *victims: str, seen: int, at: str = "n1") -> None:
    rows = {victim: h.status(victim, phase="draining") for victim in victims}
    copies = {victim: h.copy(victim) for victim in victims}
    rows[key] = h.status(key, phase="reserved", node=at, grants=["tenant/t1"], victims=copies)
    h.commit(rows, [h.entry("reserve", key, "scheduler", seen=seen)])


def three_running_two_must_stay(h: HistoryBuilder) -> tuple[list[str], list[str]]:
    """Three of a service run that must keep two, and two of higher priority wait; the scheduler records decisions."""
    h.declare("s", **KEEPS_TWO)
    low = h.spawn(0, 1, 2, workload="s")
    for key in low:
        h.run(key)
    high = h.spawn(8, 9)
    decide(h, *high)
    return low, high


@false_decision("decision_counts_are_consistent")
def funnel_omits_node(h: HistoryBuilder) -> None:
    decide(h, *h.spawn(0), fits=1, funnel=[])


@false_decision("decision_counts_are_consistent")
def funnel_counts_node_twice(h: HistoryBuilder) -> None:
    decide(h, *h.spawn(0), fits=1)


@false_decision("decision_counts_are_consistent")
def decision_counts_node_not_yet_created(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    decide(h, a, revision=2)


@false_decision("decision_counts_are_consistent")
def decision_at_future_revision(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    decide(h, a, revision=h.revision + 1)


@false_decision("decision_counts_are_consistent")
def waiting_without_reason(h: HistoryBuilder) -> None:
    decide(h, *h.spawn(0), reason="")


@false_decision("decision_counts_are_consistent")
def waiting_without_unblock_event(h: HistoryBuilder) -> None:
    decide(h, *h.spawn(0), cures=[])


@false_decision("ended_overrides_are_not_cited")
def decision_cites_expired_override(h: HistoryBuilder) -> None:
    override(h, "o")
    h.world.now_ms += 10_000
    decide(h, *h.spawn(0), overrides=["o"])


@false_decision("ended_overrides_are_not_cited")
def decision_cites_override_expired_before_takeover(h: HistoryBuilder) -> None:
    override(h, "o")
    h.boot = "b2"
    h.world.now_ms += 11_000
    decide(h, *h.spawn(0), overrides=["o"])


@false_decision("ended_overrides_are_not_cited")
def decision_cites_deleted_override(h: HistoryBuilder) -> None:
    override(h, "o")
    h.commit({"override/o": None}, [h.entry("delete", "override/o", "operator")])
    decide(h, *h.spawn(0), overrides=["o"])


@false_decision("preemption_keeps_min_available")
def two_of_three_evicted_at_once(h: HistoryBuilder) -> None:
    low, high = three_running_two_must_stay(h)
    preempt(h, high[0], low[0], low[1], seen=h.revision)


@false_decision("preemption_keeps_min_available")
def second_of_three_evicted_before_first_is_seen(h: HistoryBuilder) -> None:
    low, high = three_running_two_must_stay(h)
    seen = h.revision
    preempt(h, high[0], low[0], seen=seen)
    preempt(h, high[1], low[1], seen=seen)
