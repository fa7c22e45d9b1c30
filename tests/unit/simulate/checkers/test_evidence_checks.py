"""Evidence checks: revisions cited by claims are compared with the history."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remit.simulate.checkers.client_checks import cited_by
from tests.unit.simulate.checkers.history_builder import HistoryBuilder, Json

CHECK = "cited_evidence_was_true"
OPERATION = "r1-i1.1.x"


def ask(h: HistoryBuilder, claim: Json, *, number: int = 0, code: str = "", revision: int | None = None) -> None:
    """Report the answer to a claim that was decided in the last commit."""
    payload = json.dumps(["somebody", "scheduler", claim]).encode()
    h.world.judge.on_answer("r1", OPERATION, code, number, h.revision if revision is None else revision, payload=payload)


def decide(h: HistoryBuilder, rows: dict[str, Json], did: str, subject: str, role: str, **more: Any) -> None:
    h.commit(rows, [h.entry(did, subject, role, id=OPERATION, **more)])


def drained() -> tuple[HistoryBuilder, str, int]:
    """A replica seen at a revision and drained by the last operation; its row last changed at that revision."""
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.run(a)
    seen = h.revision
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "user")])
    decide(h, {a: h.status(a, phase="draining")}, "move drain", a, "workloads")
    return h, a, seen


def move(key: str, at: int) -> Json:
    return {"do": "move", "replica": key, "at": at, "transition": "drain"}


def test_true_evidence_holds_however_often_and_late_answered() -> None:
    h, a, seen = drained()
    decided = h.revision
    ask(h, move(a, seen))
    h.move(a, "stopping", "agent/n1")
    ask(h, move(a, seen), revision=decided)
    assert h.found == [] and h.world.judge.undecided == []


@pytest.mark.parametrize("off", [-1, 1, 2])
def test_cited_revision_other_than_last_is_violation(off: int) -> None:
    """Including the revision of the commit itself, which nothing can have seen before it."""
    h, a, seen = drained()
    ask(h, move(a, seen + off))
    assert h.found == [CHECK] and h.world.judge.violations[0].property == "S16"


def test_refused_claim_may_cite_anything() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    decide(h, {}, "move drain", a, "workloads", code="revision")
    ask(h, move(a, 1), code="revision")
    assert h.found == []


def test_cited_revision_of_deleted_row_is_violation() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.move(a, "released", "workloads")
    seen = h.revision
    h.commit({a: None}, [h.entry("forget", a, "workloads")])
    decide(h, {}, "forget", a, "workloads")
    ask(h, {"do": "forget", "replica": a, "at": seen})
    assert h.found == [CHECK]


@pytest.mark.parametrize(("wrong", "found"), [(0, []), (1, [CHECK])])
def test_cited_revisions_of_victims_are_checked(wrong: int, found: list[str]) -> None:
    h = HistoryBuilder().prepare()
    a, b = h.spawn(0, 1)
    spawned = h.revision
    h.run(a)
    ran = h.revision
    held = h.status(b, phase="reserved", node="n1", grants=["tenant/t1"], victims={a: h.copy(a)})
    decide(h, {a: h.status(a, phase="draining"), b: held}, "reserve", b, "scheduler")
    ask(h, {"do": "reserve", "replica": b, "at": spawned, "node": "n1", "grant": "t1", "victims": {a: ran - wrong}})
    assert h.found == found


@pytest.mark.parametrize(("bound", "found"), [(2, []), (3, [CHECK])])
def test_gang_members_that_changed_are_left_out(bound: int, found: list[str]) -> None:
    h = HistoryBuilder().prepare()
    members = h.spawn(0, 1, 2)
    seen = h.revision
    h.move(members[2], "released", "workloads")
    placed = {key: h.status(key, phase="bound", node="n1", grants=["tenant/t1"]) for key in members[:2]}
    decide(h, placed, "gang", members[0], "scheduler", number=bound)
    ask(h, {"do": "gang", "members": [{"do": "bind", "replica": key, "at": seen} for key in members]}, number=bound)
    assert h.found == found


@pytest.mark.parametrize(("expect", "found"), [(None, []), ("last", []), (0, [CHECK]), (1, [CHECK])])
def test_apply_may_cite_replaced_revision(expect: int | str | None, found: list[str]) -> None:
    h = HistoryBuilder().prepare()
    key = "workload/t1/w"
    claim: Json = {"do": "apply", "thing": {"kind": "Workload", "metadata": {"name": "w", "tenant": "t1"}}}
    if expect is not None:
        claim["expect"] = h.revision if expect == "last" else expect
    decide(h, {key: h.rows[key]}, "apply", key, "user")
    ask(h, claim)
    assert h.found == found


def test_apply_expecting_absence_is_lawful_for_new_object() -> None:
    h = HistoryBuilder().prepare()
    claim = {"do": "apply", "thing": {"kind": "Tenant", "metadata": {"name": "t2"}}, "expect": 0}
    decide(h, {"tenant/t2": h.rows["tenant/t1"]}, "apply", "tenant/t2", "operator")
    ask(h, claim)
    assert h.found == []


def test_cited_keys_are_store_keys() -> None:
    assert list(cited_by({"do": "mark", "node": "n1", "at": 3})) == [("node/n1", 3)]
    assert list(cited_by({"do": "bind", "replica": "replica/t/a", "at": 4})) == [("replica/t/a", 4)]
    assert list(cited_by({"do": "delete", "kind": "Node", "name": "n", "expect": 5})) == [("node/n", 5)]
    assert list(cited_by({"do": "delete", "kind": "Secret", "name": "s", "tenant": "t", "expect": 6})) == [("secret/t/s", 6)]
    assert list(cited_by({"do": "delete", "kind": "Node", "name": "n"})) == []
    assert list(cited_by({"do": "spawn", "workload": "w"})) == []


# --------------------------------------------------------------------------------------------------------------- restores


def test_answer_from_before_restore_is_judged_by_old_history() -> None:
    for off, found in ((0, []), (1, [CHECK])):
        h, a, seen = drained()
        decided, backup = h.revision, {key: row for key, row in h.rows.items() if key != a}
        h.restore(backup, incarnation="r1-i2")
        ask(h, move(a, seen + off), revision=decided)
        assert h.found == found


def test_object_keeps_backup_revision_after_restore() -> None:
    for at, found in ((1, []), (4, [CHECK])):
        h = HistoryBuilder().prepare()
        (a,) = h.spawn(0)
        h.restore(h.rows, incarnation="r1-i2")
        h.mark_restored()
        operation = "r1-i2.1.y"
        entry = h.entry("move cancel", a, "workloads", id=operation)
        h.commit({a: h.status(a, phase="released")}, [entry])
        payload = json.dumps(["w", "workloads", move(a, at)]).encode()
        h.world.judge.on_answer("r1", operation, "", 0, h.revision, payload=payload)
        assert h.found == found


@pytest.mark.parametrize(("attempt", "found"), [(1, []), (2, [CHECK])])
def test_agent_evidence_includes_attempt(attempt: int, found: list[str]) -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.bind(a)
    seen = h.revision
    operation = "r1-i1.1.y"
    h.commit({a: h.status(a, phase="starting")}, [h.entry("move start", a, "agent/n1", id=operation)])
    claim = {**move(a, seen), "transition": "start", "attempt": attempt}
    payload = json.dumps(["agent/n1!", "agent", claim]).encode()
    h.world.judge.on_answer("r1", operation, "", 0, h.revision, payload=payload)
    assert h.found == found


def test_claim_without_batch_record_is_undecided() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    ask(h, move(a, 1))
    assert CHECK not in h.found and any(CHECK in why for why in h.world.judge.undecided)


def test_claim_of_unknown_incarnation_is_undecided() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.commit({}, [h.entry("note", "e", "user", id="other.1.x")])
    payload = json.dumps(["somebody", "scheduler", move(a, 1)]).encode()
    h.world.judge.on_answer("r1", "other.1.x", "", 0, h.revision, payload=payload)
    assert CHECK not in h.found and any("its incarnation is unknown" in why for why in h.world.judge.undecided)
