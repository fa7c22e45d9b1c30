"""Is what a claim names as its reason held against the history? Revisions true, not true, and unknown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remit.simulate.checkers.client_checks import cited_by
from tests.unit.simulate.checkers.history_builder import Json, Pen

CHECK = "cited_evidence_was_true"
OPERATION = "r1-i1.1.x"


def ask(pen: Pen, claim: Json, *, number: int = 0, code: str = "", revision: int | None = None) -> None:
    """A client hears what came of a claim that was decided in the last commit."""
    payload = json.dumps(["somebody", "scheduler", claim]).encode()
    pen.world.judge.on_answer("r1", OPERATION, code, number, pen.revision if revision is None else revision, payload=payload)


def decide(pen: Pen, rows: dict[str, Json], did: str, subject: str, role: str, **more: Any) -> None:
    pen.commit(rows, [pen.entry(did, subject, role, id=OPERATION, **more)])


def drained() -> tuple[Pen, str, int]:
    """A replica that was seen at a revision, and has just been drained by an operation; its row changed there last before."""
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.run(a)
    seen = pen.revision
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "user")])
    decide(pen, {a: pen.status(a, phase="draining")}, "move drain", a, "workloads")
    return pen, a, seen


def move(key: str, at: int) -> Json:
    return {"do": "move", "replica": key, "at": at, "transition": "drain"}


def test_what_was_true_when_it_was_decided_holds_however_often_and_late_it_is_answered() -> None:
    pen, a, seen = drained()
    decided = pen.revision
    ask(pen, move(a, seen))
    pen.move(a, "stopping", "agent/n1")
    ask(pen, move(a, seen), revision=decided)
    assert pen.found == [] and pen.world.judge.undecided == []


@pytest.mark.parametrize("off", [-1, 1, 2])
def test_another_revision_than_the_last_is_a_breach(off: int) -> None:
    """Also that of the commit itself, which nobody can have seen before it."""
    pen, a, seen = drained()
    ask(pen, move(a, seen + off))
    assert pen.found == [CHECK] and pen.world.judge.violations[0].property == "S16"


def test_a_refusal_may_name_anything() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    decide(pen, {}, "move drain", a, "workloads", code="revision")
    ask(pen, move(a, 1), code="revision")
    assert pen.found == []


def test_what_was_gone_was_not_seen() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.move(a, "released", "workloads")
    seen = pen.revision
    pen.commit({a: None}, [pen.entry("forget", a, "workloads")])
    decide(pen, {}, "forget", a, "workloads")
    ask(pen, {"do": "forget", "replica": a, "at": seen})
    assert pen.found == [CHECK]


@pytest.mark.parametrize(("wrong", "found"), [(0, []), (1, [CHECK])])
def test_victims_are_seen_too(wrong: int, found: list[str]) -> None:
    pen = Pen().furnish()
    a, b = pen.spawn(0, 1)
    spawned = pen.revision
    pen.run(a)
    ran = pen.revision
    held = pen.status(b, phase="reserved", node="n1", grants=["tenant/t1"], victims={a: pen.copy(a)})
    decide(pen, {a: pen.status(a, phase="draining"), b: held}, "reserve", b, "scheduler")
    ask(pen, {"do": "reserve", "replica": b, "at": spawned, "node": "n1", "grant": "t1", "victims": {a: ran - wrong}})
    assert pen.found == found


@pytest.mark.parametrize(("bound", "found"), [(2, []), (3, [CHECK])])
def test_of_a_gang_those_are_left_out_that_have_changed(bound: int, found: list[str]) -> None:
    pen = Pen().furnish()
    members = pen.spawn(0, 1, 2)
    seen = pen.revision
    pen.move(members[2], "released", "workloads")
    placed = {key: pen.status(key, phase="bound", node="n1", grants=["tenant/t1"]) for key in members[:2]}
    decide(pen, placed, "gang", members[0], "scheduler", number=bound)
    ask(pen, {"do": "gang", "members": [{"do": "bind", "replica": key, "at": seen} for key in members]}, number=bound)
    assert pen.found == found


@pytest.mark.parametrize(("expect", "found"), [(None, []), ("last", []), (0, [CHECK]), (1, [CHECK])])
def test_what_is_declared_may_name_what_it_replaces(expect: int | str | None, found: list[str]) -> None:
    pen = Pen().furnish()
    key = "workload/t1/w"
    claim: Json = {"do": "apply", "thing": {"kind": "Workload", "metadata": {"name": "w", "tenant": "t1"}}}
    if expect is not None:
        claim["expect"] = pen.revision if expect == "last" else expect
    decide(pen, {key: pen.rows[key]}, "apply", key, "user")
    ask(pen, claim)
    assert pen.found == found


def test_what_must_not_be_there_may_be_declared_once() -> None:
    pen = Pen().furnish()
    claim = {"do": "apply", "thing": {"kind": "Tenant", "metadata": {"name": "t2"}}, "expect": 0}
    decide(pen, {"tenant/t2": pen.rows["tenant/t1"]}, "apply", "tenant/t2", "operator")
    ask(pen, claim)
    assert pen.found == []


def test_keys_are_those_of_the_store() -> None:
    assert list(cited_by({"do": "mark", "node": "n1", "at": 3})) == [("node/n1", 3)]
    assert list(cited_by({"do": "bind", "replica": "replica/t/a", "at": 4})) == [("replica/t/a", 4)]
    assert list(cited_by({"do": "delete", "kind": "Node", "name": "n", "expect": 5})) == [("node/n", 5)]
    assert list(cited_by({"do": "delete", "kind": "Secret", "name": "s", "tenant": "t", "expect": 6})) == [("secret/t/s", 6)]
    assert list(cited_by({"do": "delete", "kind": "Node", "name": "n"})) == []
    assert list(cited_by({"do": "spawn", "workload": "w"})) == []


# --------------------------------------------------------------------------------------------------------------- restores


def test_an_answer_from_before_a_restore_is_judged_by_what_was_true_before_it() -> None:
    for off, found in ((0, []), (1, [CHECK])):
        pen, a, seen = drained()
        decided, backup = pen.revision, {key: row for key, row in pen.rows.items() if key != a}
        pen.restore(backup, incarnation="r1-i2")
        ask(pen, move(a, seen + off), revision=decided)
        assert pen.found == found


def test_after_a_restore_an_object_has_the_revision_that_it_has_in_the_backup() -> None:
    for at, found in ((1, []), (4, [CHECK])):
        pen = Pen().furnish()
        (a,) = pen.spawn(0)
        pen.restore(pen.rows, incarnation="r1-i2")
        pen.doubt()
        operation = "r1-i2.1.y"
        entry = pen.entry("move cancel", a, "workloads", id=operation)
        pen.commit({a: pen.status(a, phase="released")}, [entry])
        payload = json.dumps(["w", "workloads", move(a, at)]).encode()
        pen.world.judge.on_answer("r1", operation, "", 0, pen.revision, payload=payload)
        assert pen.found == found


@pytest.mark.parametrize(("attempt", "found"), [(1, []), (2, [CHECK])])
def test_an_agent_speaks_of_the_attempt_that_it_saw(attempt: int, found: list[str]) -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.bind(a)
    seen = pen.revision
    operation = "r1-i1.1.y"
    pen.commit({a: pen.status(a, phase="starting")}, [pen.entry("move start", a, "agent/n1", id=operation)])
    claim = {**move(a, seen), "transition": "start", "attempt": attempt}
    payload = json.dumps(["agent/n1!", "agent", claim]).encode()
    pen.world.judge.on_answer("r1", operation, "", 0, pen.revision, payload=payload)
    assert pen.found == found


def test_what_no_batch_tells_of_is_not_decided_here() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    ask(pen, move(a, 1))
    assert CHECK not in pen.found and any(CHECK in why for why in pen.world.judge.undecided)


def test_what_an_unknown_incarnation_did_is_not_decided() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.commit({}, [pen.entry("note", "e", "user", id="other.1.x")])
    payload = json.dumps(["somebody", "scheduler", move(a, 1)]).encode()
    pen.world.judge.on_answer("r1", "other.1.x", "", 0, pen.revision, payload=payload)
    assert CHECK not in pen.found and any("its incarnation is unknown" in why for why in pen.world.judge.undecided)
