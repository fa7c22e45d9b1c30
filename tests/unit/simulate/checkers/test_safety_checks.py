"""Would each promise's breach be noticed, under its own name? One broken history each; and lawful ones, which pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256

import pytest

from remit.simulate.checkers.judge import CommitTimes
from remit.simulate.checkers.registry import CHECKS
from tests.unit.simulate.checkers.false_decisions import SAID, Breach
from tests.unit.simulate.checkers.history_builder import Json, Pen, World, generation_key, node, replica, tenant

BREACHES: list[tuple[str, Breach]] = [*SAID]
GPU: dict[str, Json] = {
    "devices": [{"name": "gpu-0", "kind": "gpu", "model": "H100"}, {"name": "gpu-1", "kind": "gpu", "model": "L4"}]
}
ASKS_GPU: dict[str, Json] = {
    "template": {"command": ["x"], "resources": {"cpu": "1"}, "devices": [{"kind": "gpu", "count": 1}]}
}
FENCED: dict[str, Json] = {"replace": "fenced", "fence": "1m"}


def breaks(check: str) -> Callable[[Breach], Breach]:
    def register(breach: Breach) -> Breach:
        BREACHES.append((check, breach))
        return breach

    return register


# ------------------------------------------------------------------------------------------------------------- lawful lives


def test_a_lawful_life_breaks_nothing() -> None:
    """Every phase, a grant, a reservation with a victim, a loss past its fence, another attempt, and the end."""
    pen = Pen().furnish()
    a, b, c = pen.spawn(0, 1, 2)
    pen.run(a, until="ready")
    pen.move(a, "serving", "endpoints")
    pen.move(a, "unknown", "node-lifecycle", before="serving")
    pen.move(a, "serving", "agent/n1", before=None)
    pen.grant("s")
    pen.bind(b, "n2", grants=["s"])
    pen.move(b, "unknown", "node-lifecycle", before="bound")
    pen.world.now_ms += 31_000
    pen.move(b, "failed", "node-lifecycle", result="lost")
    pen.move(b, "released", "repair", grants=None)
    pen.requeue(b)
    victim = pen.status(a, phase="draining")
    held = pen.status(c, phase="reserved", node="n1", grants=["tenant/t1"], victims={a: pen.copy(a)})
    pen.commit({a: victim, c: held}, [pen.entry("reserve", c, "scheduler")])
    pen.move(a, "stopping", "agent/n1")
    pen.move(a, "released", "agent/n1", grants=None, result="ok")
    pen.bind(c, victims=None)
    pen.commit({a: None}, [pen.entry("forget", a, "workloads")])
    pen.world.judge.conclude()
    assert pen.world.judge.violations == []
    assert pen.world.judge.edges_seen["reserved", "bound", "scheduler"] == 1
    assert pen.world.judge.accepted_operations["spawn"] == 1 and pen.world.judge.codes_seen["accepted"] == pen.count


@pytest.mark.parametrize(
    ("many", "spec"),
    [
        (3, {}),
        (0, {}),
        (2, {"type": "job", "replicas": 5, "completions": 2}),
        (2, {"type": "job", "replicas": 2, "completions": 5}),
        (0, {"type": "daemon"}),
    ],
)
def test_a_workload_may_come_with_its_first_replicas(many: int, spec: Json) -> None:
    pen = Pen().furnish()
    pen.declare("x", comes_with=range(many), **spec)
    assert pen.found == [] and pen.world.judge.edges_seen.get((None, "pending", "user"), 0) == many
    assert pen.world.judge.rare_events.seen.get("filled", 0) == (many > 0)


def test_a_reservation_holds_only_what_its_victims_will_not_free() -> None:
    """A node that is full is not overfull because somebody waits for a place on it."""
    pen = Pen().furnish(template={"command": ["x"], "resources": {"cpu": "3"}})
    a, b, c = pen.spawn(0, 1, 2)
    pen.run(a)
    victim = pen.status(a, phase="draining")
    held = pen.status(b, phase="reserved", node="n1", grants=["tenant/t1"], victims={a: pen.copy(a)})
    pen.commit({a: victim, b: held}, [pen.entry("reserve", b, "scheduler")])
    assert pen.found == [] and pen.world.judge.history("r1").sums.nodes["n1", "cpu"] == 3000
    pen.bind(c, "n1")
    assert pen.found == ["node_sums_never_rise_above_capacity"]


def test_whoever_holds_room_on_an_overfull_node_is_named_and_the_last_to_come_first() -> None:
    pen = Pen().furnish(template={"command": ["x"], "resources": {"cpu": "700m"}})
    for key in pen.spawn(*range(6)):
        pen.bind(key, "n1")
    violation = next(one for one in pen.world.judge.violations if one.check == "node_sums_never_rise_above_capacity")
    named = ", ".join(f"replica/t1/w-{index}" for index in (5, 0, 1, 2))
    assert violation.key == "node/n1"
    assert violation.why == f"cpu rose from 3500 to 4200, limit 4000; held by {named} and 2 more"


def test_a_lawful_reduction_may_leave_more_than_there_is() -> None:
    pen = Pen().furnish()
    for key in pen.spawn(0, 1, 2):
        pen.bind(key)
    small = {**pen.rows["node/n1"], "spec": {**pen.rows["node/n1"]["spec"], "capacity": {"cpu": "1"}}}
    poor = {"metadata": {"name": "t1"}, "spec": {"quota": {"cpu": "1"}}}
    pen.commit({"node/n1": small, "tenant/t1": poor}, [pen.entry("apply", "node/n1", "operator")])
    pen.release("replica/t1/w-0")
    assert pen.found == []


def test_a_policy_that_runs_out_between_decision_and_commit_is_not_known_to_be_broken() -> None:
    pen = Pen().furnish()
    until = pen.world.now_ms + 1_000
    pen.commit({"policyrevision/1": policy(1, until)}, [pen.entry("adopt", "1", "policy")])
    for key in pen.spawn(0, 1):
        pen.bind(key, policy=1, stand=CommitTimes("b1", until - 1, until, until + 1))
    assert pen.found == [] and len(pen.world.judge.undecided) == 1 and "lease expired" in pen.world.judge.undecided[0]


def test_a_grant_that_runs_out_between_draw_and_commit_is_not_known_to_be_broken() -> None:
    pen = Pen().furnish()
    until = pen.world.now_ms + 1_000
    pen.grant("s", ttl="1s", status={"deadline": {"boot": "b1", "atMs": until}})
    for key in pen.spawn(0, 1):
        pen.bind(key, grants=["s"], stand=CommitTimes("b1", until - 1, until, until))
    assert pen.found == [] and len(pen.world.judge.undecided) == 1 and "a grant expired" in pen.world.judge.undecided[0]


def test_a_takeover_gives_a_grant_a_new_term_and_the_old_one_ends_when_that_does() -> None:
    pen = Pen().furnish()
    a, b = pen.spawn(0, 1)
    pen.grant("s", ttl="10s", status={"deadline": {"boot": "b1", "atMs": pen.world.now_ms + 10_000}})
    pen.world.now_ms += 60_000
    pen.boot = "b2"
    pen.seize("a2")
    pen.bind(a, grants=["s"])
    assert pen.found == []
    pen.world.now_ms += 11_000
    pen.bind(b, grants=["s"])
    assert pen.found == ["draws_are_on_living_grants"]


def test_what_is_held_from_another_scope_has_lapsed_on_another_boot() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.grant("s", issuer="scope/global", parent="")
    pen.boot = "b2"
    pen.seize("a2")
    pen.bind(a, grants=["s"])
    assert pen.found == ["draws_are_on_living_grants"]


def test_a_restore_is_no_breach_and_what_it_lost_is_listed() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    backup = dict(pen.rows)
    pen.bind(a, "n2")
    operation = f"{pen.head['incarnation']}.1.n{pen.count}"
    pen.world.judge.on_answer("r1", operation, "", 0, pen.revision)
    pen.restore({key: row for key, row in backup.items() if key != "head"}, incarnation="r1-i2")
    pen.doubt()
    pen.mark("joining", "n1", "n2")
    pen.mark("ready", "n1", "n2")
    pen.bind(a, "n1")
    pen.world.judge.conclude()
    assert pen.found == [] and pen.world.judge.lost == {"r1": [operation]}


# ------------------------------------------------------------------------------------------------------------ broken ones


def policy(number: int, until: int = 0, **rule: Json) -> Json:
    deadline = {"deadline": {"boot": "b1", "atMs": until}} if until else {}
    return {"spec": {"number": number, "policies": {"p": {"rules": [rule]}}, **deadline}}


@breaks("chain_is_unbroken")
def a_sequence_is_left_out(pen: Pen) -> None:
    pen.commit({}, [], head={"sequence": pen.head["sequence"] + 2})


@breaks("chain_is_unbroken")
def the_digest_is_of_other_rows(pen: Pen) -> None:
    pen.commit({}, [], head={"digest": "0" * 32})


@breaks("chain_is_unbroken")
def an_older_epoch_writes(pen: Pen) -> None:
    pen.seize("a2")
    pen.commit({}, [], head={"epoch": pen.head["epoch"] - 1})


@breaks("chain_is_unbroken")
def two_write_in_one_epoch(pen: Pen) -> None:
    pen.commit({}, [], head={"holder": "somebody else"})


@breaks("chain_is_unbroken")
def rows_are_miscounted(pen: Pen) -> None:
    pen.commit({}, [], head={"count": 7})


@breaks("chain_is_unbroken")
def a_commit_has_no_head(pen: Pen) -> None:
    pen.world.judge.on_commit("r1", [("event/e", b"{}")], [], 99, CommitTimes("b1", 0, 0, 0))


@breaks("chain_is_unbroken")
def an_incarnation_from_nowhere(pen: Pen) -> None:
    pen.commit({}, [], head={"incarnation": "r1-i7"})


@breaks("chain_is_unbroken")
def a_takeover_that_decided_something(pen: Pen) -> None:
    """Its count and digest are those of its rows, so that nothing else is wrong with it."""
    batch = {"epoch": 2, "window": 1, "horizon": 1, "entries": [pen.entry("note", "e", "user", code="role")]}
    table = [f"{pen.head['digest']} 2 a2", [["batch/x", len(json.dumps(batch))]], []]
    hashed = sha256(json.dumps(table, separators=(",", ":")).encode() + json.dumps(batch).encode()).hexdigest()[:32]
    pen.commit({"batch/x": batch}, [], head={"epoch": 2, "holder": "a2", "digest": hashed})
    assert [violation.why for violation in pen.world.judge.violations] == ["a takeover decided operations"]


@breaks("entries_say_who_and_what")
def nobody_did_it(pen: Pen) -> None:
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "user", actor="")])


@breaks("entries_say_who_and_what")
def it_was_seen_before_it_was(pen: Pen) -> None:
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("mark", "e", "node-lifecycle", seen=10_000)])


@breaks("refusals_change_nothing")
def refused_and_done(pen: Pen) -> None:
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "user", code="role")])


@breaks("one_binding_per_attempt")
def it_moved_house(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.bind(a)
    pen.move(a, "starting", "agent/n1", node="n2")


@breaks("phases_move_along_edges_by_their_owners")
def a_phase_is_skipped(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.bind(a)
    pen.move(a, "running", "agent/n1")


@breaks("phases_move_along_edges_by_their_owners")
def another_role_moved_it(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a, until="ready")
    pen.move(a, "serving", "repair")


@breaks("phases_move_along_edges_by_their_owners")
def it_resumed_elsewhere(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.move(a, "unknown", "node-lifecycle", before="running")
    pen.move(a, "ready", "agent/n1", before=None)


@breaks("phases_move_along_edges_by_their_owners")
def what_is_not_there_is_forgotten(pen: Pen) -> None:
    """As by an authority that has lost what it had written."""
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.release(a)
    pen.commit({a: None}, [pen.entry("forget", a, "workloads")])
    pen.commit({a: None}, [pen.entry("forget", a, "workloads")])


@breaks("phases_move_along_edges_by_their_owners")
def a_commit_follows_the_end(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.release(a)
    pen.move(a, "released", "agent/n1", reason="again")


@breaks("phases_move_along_edges_by_their_owners")
def a_restore_bound_it(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.restore(dict(pen.rows), incarnation="r1-i2")
    pen.seize("a2")
    bound = pen.status(a, phase="bound", node="n1", grants=["tenant/t1"])
    pen.commit({a: bound, "incarnation": "r1-i2"}, [pen.entry("bind", a, "scheduler")])


@breaks("phases_move_along_edges_by_their_owners")
def a_changed_workload_comes_with_more(pen: Pen) -> None:
    pen.declare("w", 2, comes_with=(3,), replicas=4)


@breaks("what_comes_with_a_workload_is_what_it_begins_with")
def one_more_than_it_begins_with(pen: Pen) -> None:
    """As many as the surge would allow."""
    pen.declare("x", comes_with=range(4))


@breaks("what_comes_with_a_workload_is_what_it_begins_with")
def one_is_left_out(pen: Pen) -> None:
    pen.declare("x", comes_with=(0, 2))


@breaks("what_comes_with_a_workload_is_what_it_begins_with")
def a_daemon_comes_with_one(pen: Pen) -> None:
    pen.declare("x", comes_with=(0,), type="daemon")


@breaks("what_comes_with_a_workload_is_what_it_begins_with")
def before_its_time(pen: Pen) -> None:
    pen.declare("x", comes_with=range(3), type="job", schedule="0 3 * * *")


@breaks("agents_move_only_what_is_theirs")
def another_nodes_agent_moved_it(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.bind(a, "n1")
    pen.move(a, "starting", "agent/n2")


@breaks("accepted_entries_held_their_lease")
def a_stale_epoch_was_accepted(pen: Pen) -> None:
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "repair", epoch=7)])


@breaks("accepted_entries_held_their_lease")
def with_the_lease_of_another_role(pen: Pen) -> None:
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "scheduler", lease="repair", actor="repair!")])


def taken(pen: Pen, *, epoch: int = 2, holder: str = "another") -> None:
    row = {"metadata": {"name": "repair"}, "spec": {"holder": holder, "epoch": epoch, "ttl": "20s"}}
    pen.commit({"lease/repair": row}, [pen.entry("acquire", "repair", "repair", actor=holder)])


@breaks("leases_are_not_taken_from_the_living")
def a_lease_that_was_renewed_is_taken(pen: Pen) -> None:
    taken(pen, holder="repair!")
    pen.world.now_ms += 15_000
    pen.world.judge.on_lease_renewed("r1", "repair", 2, pen.world.now_ms)
    pen.world.now_ms += 15_000
    taken(pen, epoch=3)


@breaks("leases_are_not_taken_from_the_living")
def a_lease_that_was_just_acquired_is_taken(pen: Pen) -> None:
    taken(pen, holder="repair!")
    pen.world.now_ms += 15_000
    taken(pen, epoch=3)


def test_a_lease_that_lapsed_or_was_vacated_or_is_acquired_anew_is_taken_lawfully() -> None:
    pen = Pen().furnish()
    pen.world.now_ms += 15_000
    taken(pen)
    pen.world.judge.on_lease_renewed("r1", "repair", 2, pen.world.now_ms)
    pen.world.now_ms += 19_900
    taken(pen, epoch=3, holder="third")
    pen.world.judge.on_lease_renewed("r1", "repair", 2, pen.world.now_ms)
    taken(pen, epoch=4, holder="third")
    row = {"metadata": {"name": "repair"}, "spec": {"holder": "fourth", "epoch": 5, "ttl": "20s"}}
    given = pen.entry("vacate", "repair", "repair", actor="third", epoch=4)
    pen.commit({"lease/repair": row}, [given, pen.entry("acquire", "repair", "repair", actor="fourth")])
    assert pen.found == []


@breaks("lease_epochs_never_decrease")
def an_epoch_went_back(pen: Pen) -> None:
    row = {"metadata": {"name": "repair"}, "spec": {"holder": "repair!", "epoch": 9}}
    pen.commit({"lease/repair": row}, [pen.entry("acquire", "repair", "repair")])
    pen.commit({"lease/repair": {**row, "spec": {"holder": "repair!", "epoch": 8}}}, [pen.entry("acquire", "repair", "repair")])


@breaks("lease_epochs_never_decrease")
def an_epoch_was_given_to_another(pen: Pen) -> None:
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "repair")])
    row = {"metadata": {"name": "repair"}, "spec": {"holder": "another", "epoch": 1}}
    pen.commit({"lease/repair": row}, [pen.entry("acquire", "repair", "repair", actor="another")])


@breaks("lease_epochs_never_decrease")
def an_old_epoch_came_back_with_a_backup(pen: Pen) -> None:
    row = {"metadata": {"name": "repair"}, "spec": {"holder": "repair!", "epoch": 2}}
    backup = dict(pen.rows)
    pen.commit({"lease/repair": row}, [pen.entry("acquire", "repair", "repair")])
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "repair", epoch=2)])
    pen.restore(backup, incarnation="r1-i2")
    pen.seize("a2")
    pen.commit({"incarnation": "r1-i2"}, [])
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "repair")])


@breaks("one_outcome_per_operation")
def one_id_came_to_two_ends(pen: Pen) -> None:
    pen.commit({}, [pen.entry("note", "e", "user", id="r1-i1.1.x", code="role")])
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "user", id="r1-i1.1.x")])


@breaks("attempts_have_one_result")
def a_result_on_the_way(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.bind(a)
    pen.move(a, "starting", "agent/n1", result="ok")


@breaks("attempts_have_one_result")
def two_results(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.move(a, "finished", "agent/n1", result="ok")
    pen.move(a, "released", "workloads", result="failed", grants=None)


@breaks("attempts_have_one_result")
def an_attempt_without_a_new_beginning(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.bind(a)
    pen.move(a, "starting", "agent/n1", attempt=2)


@breaks("a_new_attempt_waits_for_the_end_of_the_last")
def a_second_attempt_from_nowhere(pen: Pen) -> None:
    (a,) = pen.spawn(0, phase="pending", attempt=2)
    pen.bind(a, attempt=2)


@breaks("lost_only_after_its_fence")
def given_up_too_early(pen: Pen) -> None:
    pen.declare("f", **FENCED)
    (a,) = pen.spawn(0, workload="f")
    pen.run(a)
    pen.move(a, "unknown", "node-lifecycle", before="running")
    pen.world.now_ms += 65_000
    pen.move(a, "failed", "node-lifecycle", result="lost")


@breaks("lost_only_after_its_fence")
def given_up_too_early_after_a_renewal(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.world.now_ms += 60_000
    pen.world.judge.on_lease_renewed("r1", "agent/n1", 1, pen.world.now_ms)
    pen.move(a, "unknown", "node-lifecycle", before="running")
    pen.world.now_ms += 25_000
    pen.move(a, "failed", "node-lifecycle", result="lost")


def test_an_agent_may_come_back_in_the_batch_that_gives_up_its_work() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.move(a, "unknown", "node-lifecycle", before="running")
    pen.world.now_ms += 3_600_000
    row = {"metadata": {"name": "agent/n1"}, "spec": {"holder": "agent/n1!", "epoch": 2, "ttl": "20s"}}
    came = pen.entry("acquire", "agent/n1", "agent", actor="agent/n1!", lease="", epoch=0)
    lost = pen.status(a, phase="failed", result="lost")
    pen.commit({a: lost, "lease/agent/n1": row}, [pen.entry("move", a, "node-lifecycle"), came])
    assert pen.found == []


@breaks("lost_only_after_its_fence")
def given_up_too_early_after_a_takeover(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.move(a, "unknown", "node-lifecycle", before="running")
    pen.world.now_ms += 60_000
    pen.seize("a2")
    pen.world.now_ms += 1_000
    pen.move(a, "failed", "node-lifecycle", result="lost")


@breaks("evictions_cease_at_mass_silence")
def given_up_while_most_nodes_are_silent(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.commit({"node/n3": node("n3", "c")}, [pen.entry("apply", "node/n3", "operator")])
    pen.mark("ready", "n3")
    for health in ("suspect", "unknown"):
        pen.mark(health, "n1", "n2")
    pen.move(a, "unknown", "node-lifecycle", before="running")
    pen.world.now_ms += 3_600_000
    pen.move(a, "failed", "node-lifecycle", result="lost")


@breaks("nodes_are_given_up_one_after_another")
def a_whole_zone_is_given_up_at_once(pen: Pen) -> None:
    names = [f"z{n}" for n in range(12)]
    made = {f"node/{name}": node(name, "z") for name in names}
    pen.commit(made, [pen.entry("apply", key, "operator") for key in made])
    for health in ("ready", "suspect", "unknown"):
        pen.mark(health, *names)


def test_a_zone_may_be_given_up_one_node_after_another() -> None:
    pen = Pen().furnish()
    names = [f"z{n}" for n in range(30)]
    made = {f"node/{name}": node(name, "z") for name in names}
    pen.commit(made, [pen.entry("apply", key, "operator") for key in made])
    for health in ("ready", "suspect"):
        pen.mark(health, *names)
    for name in names:
        pen.mark("unknown", name)
        pen.world.now_ms += 8_000
    assert pen.found == []


KEEPS: dict[str, Json] = {"replicas": 2, "disruption": {"minAvailable": 1}, "rollout": {"maxUnavailable": 1}}


def two_that_are_ready(pen: Pen, until: str = "ready") -> list[str]:
    pen.declare("s", **KEEPS)
    both = pen.spawn(0, 1, workload="s")
    for key, at in zip(both, ("n1", "n2"), strict=True):
        pen.run(key, at, until="ready")
        if until == "serving":
            pen.move(key, "serving", "endpoints")
    return both


def take(pen: Pen, key: str, role: str, did: str, *, seen: int, phase: str = "draining") -> None:
    pen.commit({key: pen.status(key, phase=phase)}, [pen.entry(did, key, role, seen=seen)])


@breaks("disruption_leaves_enough")
def both_are_drained_before_the_first_is_seen_to_go(pen: Pen) -> None:
    a, b = two_that_are_ready(pen)
    seen = pen.revision
    take(pen, a, "node-lifecycle", "move evict", seen=seen)
    take(pen, b, "node-lifecycle", "move evict", seen=seen)


@breaks("disruption_leaves_enough")
def a_rollout_takes_what_must_stay(pen: Pen) -> None:
    a, b = two_that_are_ready(pen)
    take(pen, a, "rollout", "move retire", seen=pen.revision)
    take(pen, b, "rollout", "move retire", seen=pen.revision)


def test_a_drain_and_a_rollout_take_what_can_be_spared_and_what_is_not_ready() -> None:
    pen = Pen().furnish()
    a, b = two_that_are_ready(pen)
    take(pen, a, "node-lifecycle", "move evict", seen=pen.revision)
    pen.move(b, "running", "agent/n2")
    take(pen, b, "rollout", "move retire", seen=pen.revision)
    assert pen.found == []


@breaks("the_last_endpoint_is_not_withdrawn")
def every_endpoint_is_withdrawn(pen: Pen) -> None:
    a, b = two_that_are_ready(pen, "serving")
    take(pen, a, "endpoints", "move unserve", seen=pen.revision, phase="ready")
    assert pen.found == []
    take(pen, b, "endpoints", "move unserve", seen=pen.revision, phase="ready")


def test_nodes_that_nobody_beats_for_make_no_mass_silence() -> None:
    """One of three is silent, and two more that a meddler has made up and calls so."""
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.run(a)
    for name in ("n3", "meddler-new", "meddler-old"):
        pen.commit({f"node/{name}": node(name, "c")}, [pen.entry("apply", f"node/{name}", "operator")])
        pen.mark("ready", name)
    for health in ("suspect", "unknown"):
        pen.mark(health, "n1", "meddler-new", "meddler-old")
    pen.move(a, "unknown", "node-lifecycle", before="running")
    pen.world.now_ms += 3_600_000
    pen.move(a, "failed", "node-lifecycle", result="lost")
    assert pen.found == []


@breaks("no_more_replicas_than_desired")
def one_too_many(pen: Pen) -> None:
    pen.spawn(0, 1, 2, 3)
    assert pen.found == [], "three, and a surge of one"
    pen.spawn(4)


@breaks("no_more_replicas_than_desired")
def one_of_a_workload_that_goes(pen: Pen) -> None:
    work = pen.rows["workload/t1/w"]
    going = {**work, "metadata": {**work["metadata"], "deleting": True}}
    pen.commit({"workload/t1/w": going}, [pen.entry("delete", "workload/t1/w", "user")])
    pen.spawn(0)


@breaks("node_health_moves_by_its_owner")
def marked_across_the_table(pen: Pen) -> None:
    pen.mark("lost", "n1")


@breaks("node_health_moves_by_its_owner")
def marked_by_another(pen: Pen) -> None:
    row = {**pen.rows["node/n1"], "status": {"health": "suspect"}}
    pen.commit({"node/n1": row}, [pen.entry("mark", "n1", "repair")])


@breaks("nothing_goes_while_something_depends_on_it")
def a_workload_went_before_its_replicas(pen: Pen) -> None:
    pen.spawn(0)
    pen.commit({"workload/t1/w": None}, [pen.entry("delete", "workload/t1/w", "user")])


@breaks("nothing_goes_while_something_depends_on_it")
def a_tenant_went_before_its_work(pen: Pen) -> None:
    pen.spawn(0)
    pen.commit({"tenant/t1": None}, [pen.entry("delete", "tenant/t1", "operator")])


@breaks("nothing_goes_while_something_depends_on_it")
def a_generation_went_before_its_replicas(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.bind(a)
    pen.commit({generation_key("w"): None}, [pen.entry("apply", "workload/t1/w", "user")])


@breaks("exclusive_device_has_one_owner")
def one_device_twice(pen: Pen) -> None:
    pen.commit({"node/n1": {**node("n1", **GPU), "status": {"health": "ready"}}}, [pen.entry("apply", "node/n1", "operator")])
    pen.declare("g", **ASKS_GPU)
    for key in pen.spawn(0, 1, workload="g"):
        pen.bind(key, devices={"gpu-0": 1000})


@breaks("devices_are_those_that_were_asked_for")
def another_device_than_asked(pen: Pen) -> None:
    pen.commit({"node/n1": {**node("n1", **GPU), "status": {"health": "ready"}}}, [pen.entry("apply", "node/n1", "operator")])
    asks = {"command": ["x"], "devices": [{"kind": "gpu", "count": 1, "models": ["H100"]}]}
    pen.declare("g", template=asks)
    (a,) = pen.spawn(0, workload="g")
    pen.bind(a, devices={"gpu-1": 1000})


@breaks("devices_are_those_that_were_asked_for")
def fewer_devices_than_asked(pen: Pen) -> None:
    pen.declare("g", **ASKS_GPU)
    (a,) = pen.spawn(0, workload="g")
    pen.bind(a)


@breaks("node_sums_never_rise_above_capacity")
def too_much_on_one_node(pen: Pen) -> None:
    pen.declare("big", template={"command": ["x"], "resources": {"cpu": "3"}})
    for key in pen.spawn(0, 1, workload="big"):
        pen.bind(key)


@breaks("node_sums_never_rise_above_capacity")
def a_node_went_from_under_its_work(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.bind(a)
    pen.commit({"node/n1": None}, [pen.entry("delete", "node/n1", "operator")])


@breaks("node_sums_never_rise_above_capacity")
@breaks("hard_constraints_hold_at_the_bind")
def bound_to_a_node_that_is_not_there(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.bind(a, "n9")


@breaks("ledgers_never_rise_above_amount")
def over_quota(pen: Pen) -> None:
    pen.declare("big", template={"command": ["x"], "resources": {"cpu": "17"}})
    row = {**node("n1"), "status": {"health": "ready"}}
    row["spec"]["capacity"]["cpu"] = "32"
    pen.commit({"node/n1": row}, [pen.entry("apply", "node/n1", "operator")])
    (a,) = pen.spawn(0, workload="big")
    pen.bind(a)


@breaks("ledgers_never_rise_above_amount")
def over_granted(pen: Pen) -> None:
    pen.grant("s", amount={"cpu": "17"})


@breaks("ledgers_never_rise_above_amount")
def charged_to_nothing(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.bind(a, grants=["tenant/nobody"])


@breaks("ledgers_never_rise_above_amount")
def a_grant_went_from_under_its_draws(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.grant("s")
    pen.bind(a, grants=["s"])
    pen.commit({"grant/s": None}, [pen.entry("close", "s", "budgets")])


@breaks("quota_comes_from_quota")
def quota_of_an_offer(pen: Pen) -> None:
    pen.grant("o", purpose="offer", parent="")
    pen.grant("q", parent="o", amount={"cpu": "1"})


@breaks("grants_are_held_by_somebody")
def drawn_on_what_another_scope_holds(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.grant("s", holder="scope/r2")
    pen.bind(a, grants=["s"])


@breaks("hard_constraints_hold_at_the_bind")
def against_the_labels(pen: Pen) -> None:
    pen.declare("c", placement={"nodeSelector": {"disk": "ssd"}})
    (a,) = pen.spawn(0, workload="c")
    pen.bind(a, "n2")


@breaks("hard_constraints_hold_at_the_bind")
def on_a_node_that_is_not_ready(pen: Pen) -> None:
    pen.mark("suspect", "n1")
    (a,) = pen.spawn(0)
    pen.bind(a)


@breaks("hard_constraints_hold_at_the_bind")
def against_the_policy(pen: Pen) -> None:
    pen.commit({"policyrevision/1": policy(1, allow={"zones": ["b"]})}, [pen.entry("apply", "policy/p", "operator")])
    (a,) = pen.spawn(0)
    pen.bind(a, policy=1)


@breaks("hard_constraints_hold_at_the_bind")
def too_near(pen: Pen) -> None:
    pen.declare("c", placement={"antiAffinity": [{"labelSelector": {"app": "c"}, "topologyKey": "node"}]})
    for key in pen.spawn(0, 1, workload="c"):
        pen.bind(key)


@breaks("hard_constraints_hold_at_the_bind")
def against_the_spread(pen: Pen) -> None:
    pen.declare("c", placement={"topologySpread": [{"topologyKey": "zone"}]})
    for key in pen.spawn(0, 1, workload="c"):
        pen.bind(key)


@breaks("hard_constraints_hold_at_the_bind")
def a_daemon_twice_on_a_node(pen: Pen) -> None:
    pen.declare("d", type="daemon")
    for key in pen.spawn(0, 1, workload="d"):
        pen.bind(key)


@breaks("policy_in_force_is_recorded_and_alive")
def under_another_policy(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.bind(a, policy=3)


@breaks("policy_in_force_is_recorded_and_alive")
def past_the_policys_lease(pen: Pen) -> None:
    pen.commit({"policyrevision/1": policy(1, pen.world.now_ms)}, [pen.entry("adopt", "1", "policy")])
    (a,) = pen.spawn(0)
    pen.bind(a, policy=1)


@breaks("nothing_fenced_is_placed_before_all_nodes_reported")
def bound_while_a_node_is_awaited(pen: Pen) -> None:
    pen.declare("f", **FENCED)
    (a,) = pen.spawn(0, workload="f")
    pen.restore(pen.rows, incarnation="r1-i2")
    pen.doubt()
    pen.mark("joining", "n1")
    pen.mark("ready", "n1")
    pen.bind(a)


@breaks("nothing_fenced_is_placed_before_all_nodes_reported")
def bound_to_a_node_that_is_awaited(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.restore(pen.rows, incarnation="r1-i2")
    pen.doubt()
    pen.bind(a)


@breaks("a_restored_scope_doubts_what_may_run")
def a_backup_is_believed_about_a_node(pen: Pen) -> None:
    pen.restore(pen.rows, incarnation="r1-i2")
    pen.seize("a2")
    pen.commit({"incarnation": "r1-i2"}, [])


@breaks("a_restored_scope_doubts_what_may_run")
def a_backup_is_believed_about_a_replica(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.restore(pen.rows, incarnation="r1-i2")
    pen.seize("a2")
    pen.commit({"incarnation": "r1-i2"}, [])


@breaks("what_is_given_back_is_not_drawn")
def what_is_drawn_was_given_back(pen: Pen) -> None:
    pen.grant("s")
    (a,) = pen.spawn(0)
    pen.bind(a, grants=["s"])
    row = pen.rows["grant/s"]
    less = {**row, "spec": {**row["spec"], "amount": {"cpu": "500m"}}}
    pen.commit({"grant/s": less}, [pen.entry("yield", "s", "budgets")])


def test_a_reissue_may_bring_less_than_is_drawn__also_in_one_batch_with_the_end_of_it() -> None:
    pen = Pen().furnish()
    pen.grant("s", issuer="scope/global", holder="scope/r1")
    (a,) = pen.spawn(0)
    pen.bind(a, grants=["s"])
    row = pen.rows["grant/s"]
    less = {**row, "spec": {**row["spec"], "amount": {}}, "status": {"phase": "closed"}}
    pen.commit({"grant/s": less}, [pen.entry("accept", "s", "budgets"), pen.entry("close", "s", "budgets")])
    assert pen.found == []


@breaks("nothing_is_placed_for_what_goes")
def bound_for_what_goes(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    work = pen.rows["workload/t1/w"]
    going = {**work, "metadata": {**work["metadata"], "deleting": True}}
    pen.commit({"workload/t1/w": going}, [pen.entry("delete", "workload/t1/w", "user")])
    pen.bind(a)


def reserved(pen: Pen, key: str, victim: str, at: str = "n1") -> None:
    held = pen.status(key, phase="reserved", node=at, grants=["tenant/t1"], victims={victim: pen.copy(victim)})
    pen.commit({victim: pen.status(victim, phase="draining"), key: held}, [pen.entry("reserve", key, "scheduler")])


@breaks("victims_rank_lower")
def one_above_makes_room(pen: Pen) -> None:
    a, b = pen.spawn(0, 1)
    pen.run(b)
    reserved(pen, a, b)


@breaks("victims_rank_lower")
def room_is_made_elsewhere(pen: Pen) -> None:
    a, b = pen.spawn(0, 1)
    pen.run(a)
    reserved(pen, b, a, "n2")


@breaks("accepted_evidence_was_fresh")
def bound_on_an_old_view(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    bound = pen.status(a, phase="bound", node="n1", grants=["tenant/t1"])
    pen.commit({a: bound}, [pen.entry("bind", a, "scheduler", age_ms=60_001)])


@breaks("accepted_evidence_was_fresh")
def an_old_report(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.bind(a)
    entry = pen.entry("move start", a, "agent/n1", age_ms=15_001)
    pen.commit({a: pen.status(a, phase="starting")}, [entry])


@breaks("abandoned_is_never_done")
def done_after_it_was_abandoned(pen: Pen) -> None:
    pen.commit({}, [pen.entry("abandon", "r1-i1.1.x", "user", code="abandoned")])
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "user", id="r1-i1.1.x")])


@breaks("abandoned_is_never_done")
def abandoned_after_it_was_done(pen: Pen) -> None:
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "user", id="r1-i1.1.x")])
    pen.commit({}, [pen.entry("abandon", "r1-i1.1.x", "user", code="abandoned")])


@breaks("ids_are_executed_in_their_time")
def an_id_of_another_incarnation(pen: Pen) -> None:
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "user", id="r1-i0.1.x")])


@breaks("ids_are_executed_in_their_time")
def an_id_of_a_window_to_come(pen: Pen) -> None:
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "user", id="r1-i1.2.x")])


@breaks("ids_are_executed_in_their_time")
def an_id_of_a_window_that_is_kept_no_more(pen: Pen) -> None:
    pen.commit({"event/e": {"spec": {}}}, [pen.entry("note", "e", "user", id="r1-i1.0.x")])


@breaks("draws_are_on_ones_own")
def drawn_on_anothers_quota(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.commit({"tenant/t2": tenant("t2")}, [pen.entry("apply", "tenant/t2", "operator")])
    pen.bind(a, grants=["tenant/t2"])


@breaks("draws_are_on_ones_own")
def drawn_on_anothers_grant(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.grant("s", holder="scheduler/other")
    pen.bind(a, grants=["s"])


@breaks("draws_are_on_ones_own")
def drawn_on_what_is_for_another(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.grant("s", tenant="t2")
    pen.bind(a, grants=["s"])


@breaks("victims_rank_lower")
def one_of_a_class_that_preempts_nobody(pen: Pen) -> None:
    rank = {"metadata": {"name": "calm"}, "spec": {"preempts": False}}
    pen.commit({"priorityclass/calm": rank}, [pen.entry("apply", "priorityclass/calm", "operator")])
    pen.declare("w", 2, priorityClass="calm")
    a, b = pen.spawn(0, 1)
    pen.run(a)
    reserved(pen, b, a)


@breaks("accepted_entries_held_their_lease")
def anothers_lease_was_given_up(pen: Pen) -> None:
    row = pen.rows["lease/repair"]
    nobody = {**row, "spec": {**row["spec"], "holder": ""}}
    pen.commit({"lease/repair": nobody}, [pen.entry("vacate", "repair", "scheduler")])


@breaks("only_what_may_go_on_begins_anew")
def what_was_done_begins_anew(pen: Pen) -> None:
    pen.declare("j", type="job")
    (a,) = pen.spawn(0, workload="j")
    pen.run(a)
    pen.release(a)
    pen.requeue(a)


@breaks("only_what_may_go_on_begins_anew")
def tried_once_too_often(pen: Pen) -> None:
    pen.declare("j", type="job", retries=0)
    (a,) = pen.spawn(0, workload="j")
    pen.run(a)
    pen.move(a, "failed", "agent/n1", result="failed")
    pen.move(a, "released", "repair", grants=None)
    pen.requeue(a)


@breaks("nothing_goes_while_something_depends_on_it")
def a_class_goes_and_is_named(pen: Pen) -> None:
    rank = {"metadata": {"name": "calm"}, "spec": {}}
    pen.commit({"priorityclass/calm": rank}, [pen.entry("apply", "priorityclass/calm", "operator")])
    pen.declare("w", 2, priorityClass="calm")
    pen.commit({"priorityclass/calm": None}, [pen.entry("delete", "priorityclass/calm", "operator")])


@breaks("nothing_goes_while_something_depends_on_it")
def a_region_goes_and_has_nodes(pen: Pen) -> None:
    pen.commit({"region/r1": {"metadata": {"name": "r1"}, "spec": {}}}, [pen.entry("apply", "region/r1", "operator")])
    pen.commit({"region/r1": None}, [pen.entry("delete", "region/r1", "operator")])


@breaks("gangs_are_bound_together")
def one_beside_one_that_leaves(pen: Pen) -> None:
    pen.declare("g", gang={"min": 2})
    a, b, c = pen.spawn(0, 1, 2, workload="g")
    both = {key: pen.status(key, phase="bound", node="n1", grants=["tenant/t1"]) for key in (a, b)}
    pen.commit(both, [pen.entry("gang", "", "scheduler")])
    pen.move(b, "draining", "workloads")
    assert pen.found == []
    pen.bind(c)


@breaks("gangs_are_bound_together")
def one_of_a_gang(pen: Pen) -> None:
    pen.declare("g", gang={"min": 2})
    (a, _) = pen.spawn(0, 1, workload="g")
    pen.bind(a)


@breaks("uids_are_given_once")
def one_uid_for_two(pen: Pen) -> None:
    pen.commit({"replica/t1/w-0": replica("w", 0, uid="same")}, [pen.entry("spawn", "w", "workloads")])
    pen.commit({"replica/t1/w-1": replica("w", 1, uid="same")}, [pen.entry("spawn", "w", "workloads")])


@breaks("reservations_are_committed_once_or_released")
def bound_before_the_victims_went(pen: Pen) -> None:
    a, b = pen.spawn(0, 1)
    pen.run(a)
    held = pen.status(b, phase="reserved", node="n1", grants=["tenant/t1"], victims={a: pen.copy(a)})
    pen.commit({a: pen.status(a, phase="draining"), b: held}, [pen.entry("reserve", b, "scheduler")])
    pen.bind(b, victims=None)


@breaks("reservations_are_committed_once_or_released")
def bound_elsewhere_than_reserved(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.commit({a: pen.status(a, phase="reserved", node="n1", grants=["tenant/t1"])}, [pen.entry("reserve", a, "scheduler")])
    pen.bind(a, "n2")


@breaks("reservations_are_committed_once_or_released")
def bound_and_still_waiting_for_victims(pen: Pen) -> None:
    a, b = pen.spawn(0, 1)
    pen.bind(a, victims={b: pen.copy(b)})


@breaks("reservations_are_committed_once_or_released")
def released_and_still_charged(pen: Pen) -> None:
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.move(a, "draining", "workloads")
    pen.move(a, "stopping", "agent/n1")
    pen.move(a, "released", "agent/n1", result="ok")


@breaks("draws_are_on_living_grants")
def on_an_expired_grant(pen: Pen) -> None:
    pen.grant("s", ttl="1s", status={"deadline": {"boot": "b1", "atMs": pen.world.now_ms + 1_000}})
    (a,) = pen.spawn(0)
    pen.world.now_ms += 1_000
    pen.bind(a, grants=["s"])


@breaks("draws_are_on_living_grants")
def on_a_child_of_a_closed_grant(pen: Pen) -> None:
    pen.grant("s", status={"phase": "closed"})
    pen.grant("c", parent="s")
    (a,) = pen.spawn(0)
    pen.bind(a, grants=["c"])


@breaks("replicas_rank_as_policy_allows")
def above_what_the_policy_allows(pen: Pen) -> None:
    """The first of the two is as high as it may be, and is not named."""
    pen.commit({"policyrevision/1": policy(1, priorityMax=1)}, [pen.entry("apply", "policy/p", "operator")])
    pen.spawn(1)
    assert pen.found == []
    pen.spawn(2)


@breaks("replicas_rank_as_policy_allows")
def what_comes_with_its_workload_is_above_what_the_policy_allows(pen: Pen) -> None:
    pen.commit({"policyrevision/1": policy(1, priorityMax=0)}, [pen.entry("apply", "policy/p", "operator")])
    pen.declare("x", comes_with=range(1), replicas=1)
    assert pen.found == []
    pen.declare("y", comes_with=range(3))


@breaks("tenants_declare_no_more_than_their_limits")
def one_workload_too_many(pen: Pen) -> None:
    pen.commit({"tenant/t1": limited(pen, workloads=2)}, [pen.entry("apply", "tenant/t1", "operator")])
    pen.declare("x")
    assert pen.found == []
    pen.declare("y")


@breaks("tenants_declare_no_more_than_their_limits")
def more_replicas_than_it_may_declare(pen: Pen) -> None:
    """What was above a limit already may stay, and shrink."""
    pen.commit({"tenant/t1": limited(pen, replicas=2)}, [pen.entry("apply", "tenant/t1", "operator")])
    pen.declare("w", 2, replicas=3)
    assert pen.found == []
    pen.declare("w", 3, replicas=4)


def limited(pen: Pen, **limits: int) -> Json:
    row = pen.rows["tenant/t1"]
    return {**row, "spec": {**row["spec"], "limits": limits}}


@pytest.mark.parametrize(
    "key",
    [
        "replica/t1/w-9", "workload/t1/w", "secret/t1/s", "config/t1/c", "node/n9", "tenant/t9", "grant/g", "generation/t1/w.9",
        "lease/repair/x", "policyrevision/9", "override/o", "peer/p", "decision/t1/d", "event/t1/e", "batch/9",
    ],
)  # fmt: skip
def test_a_commit_that_deletes_what_is_not_there_is_judged_all_the_same(key: str) -> None:
    pen = Pen().furnish()
    pen.commit({key: None}, [pen.entry("delete", key, "operator")])
    pen.commit({key: None}, [pen.entry("delete", key, "operator")])
    pen.world.judge.conclude()


@pytest.mark.parametrize(("check", "breach"), BREACHES, ids=[f"{breach.__name__}-{check}" for check, breach in BREACHES])
def test_a_breach_is_found_under_its_name(check: str, breach: Breach) -> None:
    pen = Pen().furnish()
    assert pen.found == []
    breach(pen)
    assert check in pen.found, pen.world.judge.violations
    found = next(one for one in pen.world.judge.violations if one.check == check)
    assert found.property == CHECKS[check].property and found.scope == "r1" and found.why


def test_every_promise_is_broken_by_some_history() -> None:
    assert {check for check, _ in BREACHES} == set(CHECKS)


def test_the_first_violation_is_called_out_and_the_rest_are_kept() -> None:
    pen, called = Pen(World()).furnish(), list[str]()
    pen.world.judge.on_violation = lambda violation: called.append(violation.check)
    one_too_many(pen)
    past_the_policys_lease(pen)
    assert called == ["no_more_replicas_than_desired"] and len(pen.world.judge.violations) > 1


def test_the_story_of_an_object_tells_when_who_and_what() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 77)
    told = pen.world.judge.story("r1", a)
    assert "bind by scheduler!" in told and "status.phase 'bound' -> 'starting'" in told and "process 77" in told
    assert f"{pen.world.now_ms} ms, revision {pen.revision}" in told


def test_one_forgotten_and_spawned_again_in_one_batch_is_two_replicas() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.run(a)
    pen.release(a)
    anew = replica("w", 0, uid="other")
    pen.commit({a: anew}, [pen.entry("forget", a, "workloads"), pen.entry("spawn", "w", "workloads")])
    assert pen.found == []
