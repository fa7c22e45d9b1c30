"""Claim checks: a scheduler's claim is compared with the state it had seen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.simulate.checkers.false_decisions import decide
from tests.unit.simulate.checkers.history_builder import HistoryBuilder, Json, node

CHECK = "claims_fit_seen_state"


def explained_history() -> tuple[HistoryBuilder, str]:
    """Two ready nodes, one pending replica, and a scheduler that records decisions."""
    h = HistoryBuilder().prepare(replicas=8)
    (a,) = h.spawn(0)
    decide(h, a)
    return h, a


def claim(h: HistoryBuilder, *keys: str, at: str = "n1", seen: int | None = None, do: str = "bind", **more: Any) -> None:
    rows = h.world.judge.history("r1").rows
    members = [{"do": "bind", "replica": key, "at": rows[key][0], "node": at, **more} for key in keys]
    claimed = {"do": "gang", "members": members} if do == "gang" else {**members[0], "do": do}
    payload = json.dumps(["scheduler!", "scheduler", claimed]).encode()
    h.world.judge.on_scheduler_claim("r1", "scheduler", h.revision if seen is None else seen, payload)


def declare(h: HistoryBuilder, name: str, **spec: Any) -> None:
    key = f"node/{name}"
    row = {**node(name, "a", **spec), **({"status": h.rows[key]["status"]} if key in h.rows else {})}
    h.commit({key: row}, [h.entry("apply", key, "operator")])


TAINT: Json = {"key": "aside", "effect": "NoSchedule"}
CLOSED: dict[str, Json] = {
    "unschedulable": {"unschedulable": True},
    "draining": {"draining": True},
    "tainted": {"taints": [TAINT]},
    "small": {"capacity": {"cpu": "500m", "memory": "8Gi"}},
}


def test_claim_on_open_node_is_lawful() -> None:
    h, a = explained_history()
    claim(h, a)
    assert h.found == []


@pytest.mark.parametrize("spec", CLOSED.values(), ids=CLOSED.keys())
def test_claim_on_node_seen_closed_is_violation_even_if_reopened(spec: dict[str, Json]) -> None:
    h, a = explained_history()
    before = h.revision
    declare(h, "n1", **spec)
    closed = h.revision
    claim(h, a, seen=before)
    assert h.found == [], "closed after the view"
    declare(h, "n1")
    claim(h, a, seen=closed)
    assert h.found == [CHECK] and h.world.judge.violations[0].property == "S26"


@pytest.mark.parametrize("do", ["bind", "reserve", "gang"])
def test_claim_on_missing_or_unready_node_is_violation(do: str) -> None:
    for at in ("n9", "n2"):
        h, a = explained_history()
        h.mark("suspect", "n2")
        claim(h, a, at=at, do=do)
        assert h.found == [CHECK]


def test_claim_on_deleted_node_is_violation_after_deletion_only() -> None:
    h, a = explained_history()
    before = h.revision
    h.commit({"node/n2": None}, [h.entry("delete", "node/n2", "operator")])
    claim(h, a, at="n2", seen=before)
    assert h.found == []
    claim(h, a, at="n2")
    assert h.found == [CHECK]


def test_claim_against_policy_seen_is_violation() -> None:
    h, a = explained_history()
    before = h.revision
    rule = {"match": {"tenants": ["t1"]}, "allow": {"zones": ["b"]}, "reason": "x"}
    spec = {"number": 1, "policies": {"p": {"rules": [rule]}}}
    h.commit({"policyrevision/00000001": {"spec": spec}}, [h.entry("apply", "policyrevision/00000001", "policy")])
    claim(h, a, at="n2")
    claim(h, a, at="n1", seen=before)
    assert h.found == []
    claim(h, a, at="n1")
    assert h.found == [CHECK]


def full(h: HistoryBuilder) -> int:
    """Bind four replicas that fill a node; return the revision before the last."""
    keys = h.spawn(4, 5, 6, 7)
    for key in keys:
        before = h.revision
        h.bind(key)
    return before


def test_claim_is_judged_by_capacity_seen() -> None:
    h, a = explained_history()
    before = full(h)
    claim(h, a, seen=before)
    assert h.found == []
    claim(h, a)
    assert h.found == [CHECK]


def test_preempting_claim_needs_no_free_capacity() -> None:
    h, _ = explained_history()
    full(h)
    (high,) = h.spawn(9)
    claim(h, high, do="reserve", victims={"replica/t1/w-4": 1})
    assert h.found == []


def test_gang_claim_needs_capacity_for_all_members() -> None:
    h, a = explained_history()
    b, c, d, e = h.spawn(4, 5, 6, 7)
    claim(h, a, b, c, d, do="gang")
    assert h.found == []
    claim(h, a, b, c, d, e, do="gang")
    assert h.found == [CHECK]


def test_bind_of_reservation_is_lawful_on_draining_node() -> None:
    h, a = explained_history()
    h.commit({a: h.status(a, phase="reserved", node="n1", grants=["tenant/t1"])}, [h.entry("reserve", a, "scheduler")])
    declare(h, "n1", draining=True)
    claim(h, a)
    assert h.found == []


def test_claims_without_recorded_decisions_are_not_judged() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    claim(h, a, at="n9")
    assert h.found == []


def test_decisions_without_verdict_do_not_count_as_explanations() -> None:
    """The adversary, which also holds a scheduler lease, records such decisions."""
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    decide(h, a, verdict="", reason="", cures=[])
    claim(h, a, at="n9")
    assert h.found == []


def test_policy_forgotten_by_restore_is_not_applied() -> None:
    h, _ = explained_history()
    backup = dict(h.rows)
    rule = {"match": {"tenants": ["t1"]}, "allow": {"zones": ["b"]}, "reason": "x"}
    spec = {"number": 1, "policies": {"p": {"rules": [rule]}}}
    h.commit({"policyrevision/00000001": {"spec": spec}}, [h.entry("apply", "policyrevision/00000001", "policy")])
    h.restore(backup, incarnation="r1-i2")
    h.mark_restored()
    h.mark("joining", "n1", "n2")
    h.mark("ready", "n1", "n2")
    (b,) = h.spawn(1)
    claim(h, b)
    assert h.found == []
