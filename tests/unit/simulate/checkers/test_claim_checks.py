"""Is a scheduler's claim held against what it had seen? Places that were open, closed since, closed before, and full."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.simulate.checkers.false_decisions import decide
from tests.unit.simulate.checkers.history_builder import Json, Pen, node

CHECK = "claims_fit_what_was_seen"


def written() -> tuple[Pen, str]:
    """Two ready nodes, one replica that waits, and a scheduler that explains."""
    pen = Pen().furnish(replicas=8)
    (a,) = pen.spawn(0)
    decide(pen, a)
    return pen, a


def claim(pen: Pen, *keys: str, at: str = "n1", seen: int | None = None, do: str = "bind", **more: Any) -> None:
    rows = pen.world.judge.history("r1").rows
    members = [{"do": "bind", "replica": key, "at": rows[key][0], "node": at, **more} for key in keys]
    claimed = {"do": "gang", "members": members} if do == "gang" else {**members[0], "do": do}
    payload = json.dumps(["scheduler!", "scheduler", claimed]).encode()
    pen.world.judge.on_scheduler_claim("r1", "scheduler", pen.revision if seen is None else seen, payload)


def declare(pen: Pen, name: str, **spec: Any) -> None:
    key = f"node/{name}"
    row = {**node(name, "a", **spec), **({"status": pen.rows[key]["status"]} if key in pen.rows else {})}
    pen.commit({key: row}, [pen.entry("apply", key, "operator")])


TAINT: Json = {"key": "aside", "effect": "NoSchedule"}
CLOSED: dict[str, Json] = {
    "unschedulable": {"unschedulable": True},
    "draining": {"draining": True},
    "tainted": {"taints": [TAINT]},
    "small": {"capacity": {"cpu": "500m", "memory": "8Gi"}},
}


def test_what_was_open_may_be_claimed() -> None:
    pen, a = written()
    claim(pen, a)
    assert pen.found == []


@pytest.mark.parametrize("spec", CLOSED.values(), ids=CLOSED.keys())
def test_what_was_closed_may_not__however_it_stands_by_the_time_it_is_decided(spec: dict[str, Json]) -> None:
    pen, a = written()
    before = pen.revision
    declare(pen, "n1", **spec)
    closed = pen.revision
    claim(pen, a, seen=before)
    assert pen.found == [], "it was closed later"
    declare(pen, "n1")
    claim(pen, a, seen=closed)
    assert pen.found == [CHECK] and pen.world.judge.violations[0].property == "S26"


@pytest.mark.parametrize("do", ["bind", "reserve", "gang"])
def test_a_node_that_is_not_there_or_not_ready_is_nobodys_place(do: str) -> None:
    for at in ("n9", "n2"):
        pen, a = written()
        pen.mark("suspect", "n2")
        claim(pen, a, at=at, do=do)
        assert pen.found == [CHECK]


def test_a_node_that_went_is_no_place__and_was_one_before() -> None:
    pen, a = written()
    before = pen.revision
    pen.commit({"node/n2": None}, [pen.entry("delete", "node/n2", "operator")])
    claim(pen, a, at="n2", seen=before)
    assert pen.found == []
    claim(pen, a, at="n2")
    assert pen.found == [CHECK]


def test_what_a_policy_forbade_by_then_may_not_be_claimed() -> None:
    pen, a = written()
    before = pen.revision
    rule = {"match": {"tenants": ["t1"]}, "allow": {"zones": ["b"]}, "reason": "x"}
    spec = {"number": 1, "policies": {"p": {"rules": [rule]}}}
    pen.commit({"policyrevision/00000001": {"spec": spec}}, [pen.entry("apply", "policyrevision/00000001", "policy")])
    claim(pen, a, at="n2")
    claim(pen, a, at="n1", seen=before)
    assert pen.found == []
    claim(pen, a, at="n1")
    assert pen.found == [CHECK]


def full(pen: Pen) -> int:
    """Four that fill a node; the revision before the last came."""
    keys = pen.spawn(4, 5, 6, 7)
    for key in keys:
        before = pen.revision
        pen.bind(key)
    return before


def test_room_is_what_was_seen_of_it() -> None:
    pen, a = written()
    before = full(pen)
    claim(pen, a, seen=before)
    assert pen.found == []
    claim(pen, a)
    assert pen.found == [CHECK]


def test_whoever_pushes_others_aside_needs_no_room() -> None:
    pen, _ = written()
    full(pen)
    (high,) = pen.spawn(9)
    claim(pen, high, do="reserve", victims={"replica/t1/w-4": 1})
    assert pen.found == []


def test_the_members_of_a_gang_need_room_together() -> None:
    pen, a = written()
    b, c, d, e = pen.spawn(4, 5, 6, 7)
    claim(pen, a, b, c, d, do="gang")
    assert pen.found == []
    claim(pen, a, b, c, d, e, do="gang")
    assert pen.found == [CHECK]


def test_what_is_reserved_is_bound_as_it_was_reserved() -> None:
    pen, a = written()
    pen.commit({a: pen.status(a, phase="reserved", node="n1", grants=["tenant/t1"])}, [pen.entry("reserve", a, "scheduler")])
    declare(pen, "n1", draining=True)
    claim(pen, a)
    assert pen.found == []


def test_whoever_explains_nothing_guesses() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    claim(pen, a, at="n9")
    assert pen.found == []


def test_whoever_says_nothing_of_what_came_of_it_explains_nothing() -> None:
    """As meddlers do, who hold a scheduler's lease too."""
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    decide(pen, a, verdict="", reason="", cures=[])
    claim(pen, a, at="n9")
    assert pen.found == []


def test_what_a_policy_forbade_before_a_restore_it_forbids_no_more() -> None:
    pen, _ = written()
    backup = dict(pen.rows)
    rule = {"match": {"tenants": ["t1"]}, "allow": {"zones": ["b"]}, "reason": "x"}
    spec = {"number": 1, "policies": {"p": {"rules": [rule]}}}
    pen.commit({"policyrevision/00000001": {"spec": spec}}, [pen.entry("apply", "policyrevision/00000001", "policy")])
    pen.restore(backup, incarnation="r1-i2")
    pen.doubt()
    pen.mark("joining", "n1", "n2")
    pen.mark("ready", "n1", "n2")
    (b,) = pen.spawn(1)
    claim(pen, b)
    assert pen.found == []
