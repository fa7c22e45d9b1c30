"""Safety checks: one violating history per property, reported under its own name, and lawful histories that pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256

import pytest

from remit.simulate.checkers.judge import CommitTimes
from remit.simulate.checkers.registry import CHECKS
from tests.unit.simulate.checkers.false_decisions import FALSE_DECISIONS, Breach
from tests.unit.simulate.checkers.history_builder import HistoryBuilder, Json, World, generation_key, node, replica, tenant

VIOLATIONS: list[tuple[str, Breach]] = [*FALSE_DECISIONS]
GPU: dict[str, Json] = {
    "devices": [{"name": "gpu-0", "kind": "gpu", "model": "H100"}, {"name": "gpu-1", "kind": "gpu", "model": "L4"}]
}
ASKS_GPU: dict[str, Json] = {
    "template": {"command": ["x"], "resources": {"cpu": "1"}, "devices": [{"kind": "gpu", "count": 1}]}
}
FENCED: dict[str, Json] = {"replace": "fenced", "fence": "1m"}


def violates(check: str) -> Callable[[Breach], Breach]:
    def register(breach: Breach) -> Breach:
        VIOLATIONS.append((check, breach))
        return breach

    return register


# ---------------------------------------------------------------------------------------------------- lawful histories


def test_valid_lifecycle_is_no_violation() -> None:
    """Every phase, a grant, a reservation with a victim, a loss past its fence, another attempt, and the end."""
    h = HistoryBuilder().prepare()
    a, b, c = h.spawn(0, 1, 2)
    h.run(a, until="ready")
    h.move(a, "serving", "endpoints")
    h.move(a, "unknown", "node-lifecycle", before="serving")
    h.move(a, "serving", "agent/n1", before=None)
    h.grant("s")
    h.bind(b, "n2", grants=["s"])
    h.move(b, "unknown", "node-lifecycle", before="bound")
    h.world.now_ms += 31_000
    h.move(b, "failed", "node-lifecycle", result="lost")
    h.move(b, "released", "repair", grants=None)
    h.requeue(b)
    victim = h.status(a, phase="draining")
    held = h.status(c, phase="reserved", node="n1", grants=["tenant/t1"], victims={a: h.copy(a)})
    h.commit({a: victim, c: held}, [h.entry("reserve", c, "scheduler")])
    h.move(a, "stopping", "agent/n1")
    h.move(a, "released", "agent/n1", grants=None, result="ok")
    h.bind(c, victims=None)
    h.commit({a: None}, [h.entry("forget", a, "workloads")])
    h.world.judge.conclude()
    assert h.world.judge.violations == []
    assert h.world.judge.edges_seen["reserved", "bound", "scheduler"] == 1
    assert h.world.judge.accepted_operations["spawn"] == 1 and h.world.judge.codes_seen["accepted"] == h.count


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
def test_workload_may_be_created_with_first_replicas(many: int, spec: Json) -> None:
    h = HistoryBuilder().prepare()
    h.declare("x", comes_with=range(many), **spec)
    assert h.found == [] and h.world.judge.edges_seen.get((None, "pending", "user"), 0) == many
    assert h.world.judge.rare_events.seen.get("filled", 0) == (many > 0)


def test_reservation_charges_only_what_victims_do_not_free() -> None:
    """A full node is not over capacity because a reservation waits for it."""
    h = HistoryBuilder().prepare(template={"command": ["x"], "resources": {"cpu": "3"}})
    a, b, c = h.spawn(0, 1, 2)
    h.run(a)
    victim = h.status(a, phase="draining")
    held = h.status(b, phase="reserved", node="n1", grants=["tenant/t1"], victims={a: h.copy(a)})
    h.commit({a: victim, b: held}, [h.entry("reserve", b, "scheduler")])
    assert h.found == [] and h.world.judge.history("r1").sums.nodes["n1", "cpu"] == 3000
    h.bind(c, "n1")
    assert h.found == ["node_usage_never_rises_above_capacity"]


def test_overfull_node_violation_names_replicas_latest_first() -> None:
    h = HistoryBuilder().prepare(template={"command": ["x"], "resources": {"cpu": "700m"}})
    for key in h.spawn(*range(6)):
        h.bind(key, "n1")
    violation = next(one for one in h.world.judge.violations if one.check == "node_usage_never_rises_above_capacity")
    named = ", ".join(f"replica/t1/w-{index}" for index in (5, 0, 1, 2))
    assert violation.key == "node/n1"
    assert violation.why == f"cpu rose from 3500 to 4200, limit 4000; held by {named} and 2 more"


def test_capacity_or_quota_reduction_below_use_is_no_violation() -> None:
    h = HistoryBuilder().prepare()
    for key in h.spawn(0, 1, 2):
        h.bind(key)
    small = {**h.rows["node/n1"], "spec": {**h.rows["node/n1"]["spec"], "capacity": {"cpu": "1"}}}
    poor = {"metadata": {"name": "t1"}, "spec": {"quota": {"cpu": "1"}}}
    h.commit({"node/n1": small, "tenant/t1": poor}, [h.entry("apply", "node/n1", "operator")])
    h.release("replica/t1/w-0")
    assert h.found == []


def test_policy_lease_expiring_between_decision_and_commit_is_undecided() -> None:
    h = HistoryBuilder().prepare()
    until = h.world.now_ms + 1_000
    h.commit({"policyrevision/1": policy(1, until)}, [h.entry("adopt", "1", "policy")])
    for key in h.spawn(0, 1):
        h.bind(key, policy=1, stand=CommitTimes("b1", until - 1, until, until + 1))
    assert h.found == [] and len(h.world.judge.undecided) == 1 and "lease expired" in h.world.judge.undecided[0]


def test_grant_expiring_between_draw_and_commit_is_undecided() -> None:
    h = HistoryBuilder().prepare()
    until = h.world.now_ms + 1_000
    h.grant("s", ttl="1s", status={"deadline": {"boot": "b1", "atMs": until}})
    for key in h.spawn(0, 1):
        h.bind(key, grants=["s"], stand=CommitTimes("b1", until - 1, until, until))
    assert h.found == [] and len(h.world.judge.undecided) == 1 and "a grant expired" in h.world.judge.undecided[0]


def test_takeover_extends_grant_by_one_term() -> None:
    h = HistoryBuilder().prepare()
    a, b = h.spawn(0, 1)
    h.grant("s", ttl="10s", status={"deadline": {"boot": "b1", "atMs": h.world.now_ms + 10_000}})
    h.world.now_ms += 60_000
    h.boot = "b2"
    h.take_over("a2")
    h.bind(a, grants=["s"])
    assert h.found == []
    h.world.now_ms += 11_000
    h.bind(b, grants=["s"])
    assert h.found == ["charges_are_on_live_grants"]


def test_grant_from_other_scope_lapses_on_other_boot() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.grant("s", issuer="scope/global", parent="")
    h.boot = "b2"
    h.take_over("a2")
    h.bind(a, grants=["s"])
    assert h.found == ["charges_are_on_live_grants"]


def test_restore_is_no_violation_and_lists_lost_answers() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    backup = dict(h.rows)
    h.bind(a, "n2")
    operation = f"{h.head['incarnation']}.1.n{h.count}"
    h.world.judge.on_answer("r1", operation, "", 0, h.revision)
    h.restore({key: row for key, row in backup.items() if key != "head"}, incarnation="r1-i2")
    h.mark_restored()
    h.mark("joining", "n1", "n2")
    h.mark("ready", "n1", "n2")
    h.bind(a, "n1")
    h.world.judge.conclude()
    assert h.found == [] and h.world.judge.lost == {"r1": [operation]}


# --------------------------------------------------------------------------------------------------- violating histories


def policy(number: int, until: int = 0, **rule: Json) -> Json:
    deadline = {"deadline": {"boot": "b1", "atMs": until}} if until else {}
    return {"spec": {"number": number, "policies": {"p": {"rules": [rule]}}, **deadline}}


@violates("chain_is_unbroken")
def sequence_number_skipped(h: HistoryBuilder) -> None:
    h.commit({}, [], head={"sequence": h.head["sequence"] + 2})


@violates("chain_is_unbroken")
def digest_of_other_rows(h: HistoryBuilder) -> None:
    h.commit({}, [], head={"digest": "0" * 32})


@violates("chain_is_unbroken")
def write_in_older_epoch(h: HistoryBuilder) -> None:
    h.take_over("a2")
    h.commit({}, [], head={"epoch": h.head["epoch"] - 1})


@violates("chain_is_unbroken")
def two_writers_in_one_epoch(h: HistoryBuilder) -> None:
    h.commit({}, [], head={"holder": "somebody else"})


@violates("chain_is_unbroken")
def wrong_row_count(h: HistoryBuilder) -> None:
    h.commit({}, [], head={"count": 7})


@violates("chain_is_unbroken")
def commit_without_head(h: HistoryBuilder) -> None:
    h.world.judge.on_commit("r1", [("event/e", b"{}")], [], 99, CommitTimes("b1", 0, 0, 0))


@violates("chain_is_unbroken")
def unknown_incarnation(h: HistoryBuilder) -> None:
    h.commit({}, [], head={"incarnation": "r1-i7"})


@violates("chain_is_unbroken")
def takeover_with_decisions(h: HistoryBuilder) -> None:
    """Its count and digest match its rows, so that nothing else is wrong with it."""
    batch = {"epoch": 2, "window": 1, "horizon": 1, "entries": [h.entry("note", "e", "user", code="role")]}
    table = [f"{h.head['digest']} 2 a2", [["batch/x", len(json.dumps(batch))]], []]
    hashed = sha256(json.dumps(table, separators=(",", ":")).encode() + json.dumps(batch).encode()).hexdigest()[:32]
    h.commit({"batch/x": batch}, [], head={"epoch": 2, "holder": "a2", "digest": hashed})
    assert [violation.why for violation in h.world.judge.violations] == ["a takeover decided operations"]


@violates("entries_name_actor_and_operation")
def entry_without_actor(h: HistoryBuilder) -> None:
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "user", actor="")])


@violates("entries_name_actor_and_operation")
def entry_seen_at_future_revision(h: HistoryBuilder) -> None:
    h.commit({"event/e": {"spec": {}}}, [h.entry("mark", "e", "node-lifecycle", seen=10_000)])


@violates("refusals_change_nothing")
def refused_entry_with_effect(h: HistoryBuilder) -> None:
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "user", code="role")])


@violates("one_binding_per_attempt")
def node_changed_after_bind(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.bind(a)
    h.move(a, "starting", "agent/n1", node="n2")


@violates("phase_changes_match_lifecycle_table")
def phase_skipped(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.bind(a)
    h.move(a, "running", "agent/n1")


@violates("phase_changes_match_lifecycle_table")
def transition_by_wrong_role(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a, until="ready")
    h.move(a, "serving", "repair")


@violates("phase_changes_match_lifecycle_table")
def resumed_in_other_phase(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a)
    h.move(a, "unknown", "node-lifecycle", before="running")
    h.move(a, "ready", "agent/n1", before=None)


@violates("phase_changes_match_lifecycle_table")
def missing_replica_forgotten(h: HistoryBuilder) -> None:
    """As by an authority that has lost a write."""
    (a,) = h.spawn(0)
    h.run(a)
    h.release(a)
    h.commit({a: None}, [h.entry("forget", a, "workloads")])
    h.commit({a: None}, [h.entry("forget", a, "workloads")])


@violates("phase_changes_match_lifecycle_table")
def transition_after_release(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a)
    h.release(a)
    h.move(a, "released", "agent/n1", reason="again")


@violates("phase_changes_match_lifecycle_table")
def bind_in_restore_commit(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.restore(dict(h.rows), incarnation="r1-i2")
    h.take_over("a2")
    bound = h.status(a, phase="bound", node="n1", grants=["tenant/t1"])
    h.commit({a: bound, "incarnation": "r1-i2"}, [h.entry("bind", a, "scheduler")])


@violates("phase_changes_match_lifecycle_table")
def update_creates_replicas(h: HistoryBuilder) -> None:
    h.declare("w", 2, comes_with=(3,), replicas=4)


@violates("initial_replicas_match_workload_spec")
def too_many_initial_replicas(h: HistoryBuilder) -> None:
    """As many as the surge would allow."""
    h.declare("x", comes_with=range(4))


@violates("initial_replicas_match_workload_spec")
def initial_replica_missing(h: HistoryBuilder) -> None:
    h.declare("x", comes_with=(0, 2))


@violates("initial_replicas_match_workload_spec")
def daemon_with_initial_replica(h: HistoryBuilder) -> None:
    h.declare("x", comes_with=(0,), type="daemon")


@violates("initial_replicas_match_workload_spec")
def scheduled_job_with_initial_replicas(h: HistoryBuilder) -> None:
    h.declare("x", comes_with=range(3), type="job", schedule="0 3 * * *")


@violates("agents_change_only_own_replicas")
def transition_by_agent_of_other_node(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.bind(a, "n1")
    h.move(a, "starting", "agent/n2")


@violates("accepted_operations_hold_their_lease")
def stale_epoch_accepted(h: HistoryBuilder) -> None:
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "repair", epoch=7)])


@violates("accepted_operations_hold_their_lease")
def lease_of_other_role_accepted(h: HistoryBuilder) -> None:
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "scheduler", lease="repair", actor="repair!")])


def acquire_lease(h: HistoryBuilder, *, epoch: int = 2, holder: str = "another") -> None:
    row = {"metadata": {"name": "repair"}, "spec": {"holder": holder, "epoch": epoch, "ttl": "20s"}}
    h.commit({"lease/repair": row}, [h.entry("acquire", "repair", "repair", actor=holder)])


@violates("valid_leases_are_not_taken_over")
def renewed_lease_taken(h: HistoryBuilder) -> None:
    acquire_lease(h, holder="repair!")
    h.world.now_ms += 15_000
    h.world.judge.on_lease_renewed("r1", "repair", 2, h.world.now_ms)
    h.world.now_ms += 15_000
    acquire_lease(h, epoch=3)


@violates("valid_leases_are_not_taken_over")
def fresh_lease_taken(h: HistoryBuilder) -> None:
    acquire_lease(h, holder="repair!")
    h.world.now_ms += 15_000
    acquire_lease(h, epoch=3)


def test_lapsed_vacated_or_own_lease_may_be_acquired() -> None:
    h = HistoryBuilder().prepare()
    h.world.now_ms += 15_000
    acquire_lease(h)
    h.world.judge.on_lease_renewed("r1", "repair", 2, h.world.now_ms)
    h.world.now_ms += 19_900
    acquire_lease(h, epoch=3, holder="third")
    h.world.judge.on_lease_renewed("r1", "repair", 2, h.world.now_ms)
    acquire_lease(h, epoch=4, holder="third")
    row = {"metadata": {"name": "repair"}, "spec": {"holder": "fourth", "epoch": 5, "ttl": "20s"}}
    given = h.entry("vacate", "repair", "repair", actor="third", epoch=4)
    h.commit({"lease/repair": row}, [given, h.entry("acquire", "repair", "repair", actor="fourth")])
    assert h.found == []


@violates("lease_epochs_never_decrease")
def lease_epoch_decreased(h: HistoryBuilder) -> None:
    row = {"metadata": {"name": "repair"}, "spec": {"holder": "repair!", "epoch": 9}}
    h.commit({"lease/repair": row}, [h.entry("acquire", "repair", "repair")])
    h.commit({"lease/repair": {**row, "spec": {"holder": "repair!", "epoch": 8}}}, [h.entry("acquire", "repair", "repair")])


@violates("lease_epochs_never_decrease")
def lease_epoch_reused_by_other_holder(h: HistoryBuilder) -> None:
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "repair")])
    row = {"metadata": {"name": "repair"}, "spec": {"holder": "another", "epoch": 1}}
    h.commit({"lease/repair": row}, [h.entry("acquire", "repair", "repair", actor="another")])


@violates("lease_epochs_never_decrease")
def lease_epoch_reused_after_restore(h: HistoryBuilder) -> None:
    row = {"metadata": {"name": "repair"}, "spec": {"holder": "repair!", "epoch": 2}}
    backup = dict(h.rows)
    h.commit({"lease/repair": row}, [h.entry("acquire", "repair", "repair")])
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "repair", epoch=2)])
    h.restore(backup, incarnation="r1-i2")
    h.take_over("a2")
    h.commit({"incarnation": "r1-i2"}, [])
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "repair")])


@violates("one_outcome_per_operation")
def operation_with_two_outcomes(h: HistoryBuilder) -> None:
    h.commit({}, [h.entry("note", "e", "user", id="r1-i1.1.x", code="role")])
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "user", id="r1-i1.1.x")])


@violates("attempts_have_one_result")
def result_before_end(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.bind(a)
    h.move(a, "starting", "agent/n1", result="ok")


@violates("attempts_have_one_result")
def two_results_of_one_attempt(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a)
    h.move(a, "finished", "agent/n1", result="ok")
    h.move(a, "released", "workloads", result="failed", grants=None)


@violates("attempts_have_one_result")
def attempt_changed_while_starting(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.bind(a)
    h.move(a, "starting", "agent/n1", attempt=2)


@violates("new_attempt_follows_release_of_previous")
def second_attempt_without_first(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0, phase="pending", attempt=2)
    h.bind(a, attempt=2)


@violates("attempts_are_lost_only_after_fence")
def lost_before_fence(h: HistoryBuilder) -> None:
    h.declare("f", **FENCED)
    (a,) = h.spawn(0, workload="f")
    h.run(a)
    h.move(a, "unknown", "node-lifecycle", before="running")
    h.world.now_ms += 65_000
    h.move(a, "failed", "node-lifecycle", result="lost")


@violates("attempts_are_lost_only_after_fence")
def lost_too_soon_after_renewal(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a)
    h.world.now_ms += 60_000
    h.world.judge.on_lease_renewed("r1", "agent/n1", 1, h.world.now_ms)
    h.move(a, "unknown", "node-lifecycle", before="running")
    h.world.now_ms += 25_000
    h.move(a, "failed", "node-lifecycle", result="lost")


def test_agent_may_return_in_batch_that_declares_its_replica_lost() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.run(a)
    h.move(a, "unknown", "node-lifecycle", before="running")
    h.world.now_ms += 3_600_000
    row = {"metadata": {"name": "agent/n1"}, "spec": {"holder": "agent/n1!", "epoch": 2, "ttl": "20s"}}
    came = h.entry("acquire", "agent/n1", "agent", actor="agent/n1!", lease="", epoch=0)
    lost = h.status(a, phase="failed", result="lost")
    h.commit({a: lost, "lease/agent/n1": row}, [h.entry("move", a, "node-lifecycle"), came])
    assert h.found == []


@violates("attempts_are_lost_only_after_fence")
def lost_too_soon_after_takeover(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a)
    h.move(a, "unknown", "node-lifecycle", before="running")
    h.world.now_ms += 60_000
    h.take_over("a2")
    h.world.now_ms += 1_000
    h.move(a, "failed", "node-lifecycle", result="lost")


@violates("evictions_stop_at_mass_silence")
def lost_during_mass_silence(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a)
    h.commit({"node/n3": node("n3", "c")}, [h.entry("apply", "node/n3", "operator")])
    h.mark("ready", "n3")
    for health in ("suspect", "unknown"):
        h.mark(health, "n1", "n2")
    h.move(a, "unknown", "node-lifecycle", before="running")
    h.world.now_ms += 3_600_000
    h.move(a, "failed", "node-lifecycle", result="lost")


@violates("marking_nodes_unknown_is_rate_limited")
def zone_marked_unknown_at_once(h: HistoryBuilder) -> None:
    names = [f"z{n}" for n in range(12)]
    made = {f"node/{name}": node(name, "z") for name in names}
    h.commit(made, [h.entry("apply", key, "operator") for key in made])
    for health in ("ready", "suspect", "unknown"):
        h.mark(health, *names)


def test_zone_may_be_marked_unknown_node_by_node() -> None:
    h = HistoryBuilder().prepare()
    names = [f"z{n}" for n in range(30)]
    made = {f"node/{name}": node(name, "z") for name in names}
    h.commit(made, [h.entry("apply", key, "operator") for key in made])
    for health in ("ready", "suspect"):
        h.mark(health, *names)
    for name in names:
        h.mark("unknown", name)
        h.world.now_ms += 8_000
    assert h.found == []


KEEPS: dict[str, Json] = {"replicas": 2, "disruption": {"minAvailable": 1}, "rollout": {"maxUnavailable": 1}}


def two_ready_replicas(h: HistoryBuilder, until: str = "ready") -> list[str]:
    h.declare("s", **KEEPS)
    both = h.spawn(0, 1, workload="s")
    for key, at in zip(both, ("n1", "n2"), strict=True):
        h.run(key, at, until="ready")
        if until == "serving":
            h.move(key, "serving", "endpoints")
    return both


def take(h: HistoryBuilder, key: str, role: str, did: str, *, seen: int, phase: str = "draining") -> None:
    h.commit({key: h.status(key, phase=phase)}, [h.entry(did, key, role, seen=seen)])


@violates("disruption_keeps_min_available")
def second_drained_before_first_is_seen(h: HistoryBuilder) -> None:
    a, b = two_ready_replicas(h)
    seen = h.revision
    take(h, a, "node-lifecycle", "move evict", seen=seen)
    take(h, b, "node-lifecycle", "move evict", seen=seen)


@violates("disruption_keeps_min_available")
def rollout_below_min_available(h: HistoryBuilder) -> None:
    a, b = two_ready_replicas(h)
    take(h, a, "rollout", "move retire", seen=h.revision)
    take(h, b, "rollout", "move retire", seen=h.revision)


def test_drain_and_rollout_may_take_spare_or_unready_replicas() -> None:
    h = HistoryBuilder().prepare()
    a, b = two_ready_replicas(h)
    take(h, a, "node-lifecycle", "move evict", seen=h.revision)
    h.move(b, "running", "agent/n2")
    take(h, b, "rollout", "move retire", seen=h.revision)
    assert h.found == []


@violates("last_endpoint_is_not_withdrawn")
def last_endpoint_withdrawn(h: HistoryBuilder) -> None:
    a, b = two_ready_replicas(h, "serving")
    take(h, a, "endpoints", "move unserve", seen=h.revision, phase="ready")
    assert h.found == []
    take(h, b, "endpoints", "move unserve", seen=h.revision, phase="ready")


def test_nodes_without_agents_do_not_count_for_mass_silence() -> None:
    """One of three nodes is silent; two more were made up by the adversary, which marks them silent."""
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.run(a)
    for name in ("n3", "meddler-new", "meddler-old"):
        h.commit({f"node/{name}": node(name, "c")}, [h.entry("apply", f"node/{name}", "operator")])
        h.mark("ready", name)
    for health in ("suspect", "unknown"):
        h.mark(health, "n1", "meddler-new", "meddler-old")
    h.move(a, "unknown", "node-lifecycle", before="running")
    h.world.now_ms += 3_600_000
    h.move(a, "failed", "node-lifecycle", result="lost")
    assert h.found == []


@violates("replicas_stay_within_desired_and_surge")
def surplus_replica(h: HistoryBuilder) -> None:
    h.spawn(0, 1, 2, 3)
    assert h.found == [], "three and a surge of one"
    h.spawn(4)


@violates("replicas_stay_within_desired_and_surge")
def replica_for_deleted_workload(h: HistoryBuilder) -> None:
    work = h.rows["workload/t1/w"]
    going = {**work, "metadata": {**work["metadata"], "deleting": True}}
    h.commit({"workload/t1/w": going}, [h.entry("delete", "workload/t1/w", "user")])
    h.spawn(0)


@violates("node_health_is_changed_by_its_owner")
def node_health_transition_not_in_table(h: HistoryBuilder) -> None:
    h.mark("lost", "n1")


@violates("node_health_is_changed_by_its_owner")
def node_marked_by_wrong_role(h: HistoryBuilder) -> None:
    row = {**h.rows["node/n1"], "status": {"health": "suspect"}}
    h.commit({"node/n1": row}, [h.entry("mark", "n1", "repair")])


@violates("objects_in_use_are_not_removed")
def workload_deleted_before_replicas(h: HistoryBuilder) -> None:
    h.spawn(0)
    h.commit({"workload/t1/w": None}, [h.entry("delete", "workload/t1/w", "user")])


@violates("objects_in_use_are_not_removed")
def tenant_deleted_before_its_work(h: HistoryBuilder) -> None:
    h.spawn(0)
    h.commit({"tenant/t1": None}, [h.entry("delete", "tenant/t1", "operator")])


@violates("objects_in_use_are_not_removed")
def generation_deleted_before_replicas(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.bind(a)
    h.commit({generation_key("w"): None}, [h.entry("apply", "workload/t1/w", "user")])


@violates("exclusive_device_has_one_owner")
def device_assigned_twice(h: HistoryBuilder) -> None:
    h.commit({"node/n1": {**node("n1", **GPU), "status": {"health": "ready"}}}, [h.entry("apply", "node/n1", "operator")])
    h.declare("g", **ASKS_GPU)
    for key in h.spawn(0, 1, workload="g"):
        h.bind(key, devices={"gpu-0": 1000})


@violates("assigned_devices_match_request")
def device_of_wrong_model(h: HistoryBuilder) -> None:
    h.commit({"node/n1": {**node("n1", **GPU), "status": {"health": "ready"}}}, [h.entry("apply", "node/n1", "operator")])
    asks = {"command": ["x"], "devices": [{"kind": "gpu", "count": 1, "models": ["H100"]}]}
    h.declare("g", template=asks)
    (a,) = h.spawn(0, workload="g")
    h.bind(a, devices={"gpu-1": 1000})


@violates("assigned_devices_match_request")
def too_few_devices(h: HistoryBuilder) -> None:
    h.declare("g", **ASKS_GPU)
    (a,) = h.spawn(0, workload="g")
    h.bind(a)


@violates("node_usage_never_rises_above_capacity")
def node_over_capacity(h: HistoryBuilder) -> None:
    h.declare("big", template={"command": ["x"], "resources": {"cpu": "3"}})
    for key in h.spawn(0, 1, workload="big"):
        h.bind(key)


@violates("node_usage_never_rises_above_capacity")
def node_deleted_under_replicas(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.bind(a)
    h.commit({"node/n1": None}, [h.entry("delete", "node/n1", "operator")])


@violates("node_usage_never_rises_above_capacity")
@violates("hard_constraints_hold_at_bind")
def bind_to_missing_node(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.bind(a, "n9")


@violates("ledger_charges_never_rise_above_amount")
def tenant_over_quota(h: HistoryBuilder) -> None:
    h.declare("big", template={"command": ["x"], "resources": {"cpu": "17"}})
    row = {**node("n1"), "status": {"health": "ready"}}
    row["spec"]["capacity"]["cpu"] = "32"
    h.commit({"node/n1": row}, [h.entry("apply", "node/n1", "operator")])
    (a,) = h.spawn(0, workload="big")
    h.bind(a)


@violates("ledger_charges_never_rise_above_amount")
def grant_over_quota(h: HistoryBuilder) -> None:
    h.grant("s", amount={"cpu": "17"})


@violates("ledger_charges_never_rise_above_amount")
def charged_to_missing_ledger(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.bind(a, grants=["tenant/nobody"])


@violates("ledger_charges_never_rise_above_amount")
def grant_deleted_under_draws(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.grant("s")
    h.bind(a, grants=["s"])
    h.commit({"grant/s": None}, [h.entry("close", "s", "budgets")])


@violates("quota_slices_are_part_of_own_quota")
def quota_granted_from_offer(h: HistoryBuilder) -> None:
    h.grant("o", purpose="offer", parent="")
    h.grant("q", parent="o", amount={"cpu": "1"})


@violates("grants_are_charged_only_in_holding_scope")
def draw_on_grant_of_other_scope(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.grant("s", holder="scope/r2")
    h.bind(a, grants=["s"])


@violates("hard_constraints_hold_at_bind")
def bind_against_node_selector(h: HistoryBuilder) -> None:
    h.declare("c", placement={"nodeSelector": {"disk": "ssd"}})
    (a,) = h.spawn(0, workload="c")
    h.bind(a, "n2")


@violates("hard_constraints_hold_at_bind")
def bind_to_unready_node(h: HistoryBuilder) -> None:
    h.mark("suspect", "n1")
    (a,) = h.spawn(0)
    h.bind(a)


@violates("hard_constraints_hold_at_bind")
def bind_against_policy(h: HistoryBuilder) -> None:
    h.commit({"policyrevision/1": policy(1, allow={"zones": ["b"]})}, [h.entry("apply", "policy/p", "operator")])
    (a,) = h.spawn(0)
    h.bind(a, policy=1)


@violates("hard_constraints_hold_at_bind")
def bind_against_anti_affinity(h: HistoryBuilder) -> None:
    h.declare("c", placement={"antiAffinity": [{"labelSelector": {"app": "c"}, "topologyKey": "node"}]})
    for key in h.spawn(0, 1, workload="c"):
        h.bind(key)


@violates("hard_constraints_hold_at_bind")
def bind_against_spread(h: HistoryBuilder) -> None:
    h.declare("c", placement={"topologySpread": [{"topologyKey": "zone"}]})
    for key in h.spawn(0, 1, workload="c"):
        h.bind(key)


@violates("hard_constraints_hold_at_bind")
def two_daemon_replicas_on_node(h: HistoryBuilder) -> None:
    h.declare("d", type="daemon")
    for key in h.spawn(0, 1, workload="d"):
        h.bind(key)


@violates("placement_policy_is_recorded_and_in_force")
def bind_under_unknown_policy(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.bind(a, policy=3)


@violates("placement_policy_is_recorded_and_in_force")
def bind_after_policy_lease(h: HistoryBuilder) -> None:
    h.commit({"policyrevision/1": policy(1, h.world.now_ms)}, [h.entry("adopt", "1", "policy")])
    (a,) = h.spawn(0)
    h.bind(a, policy=1)


@violates("fenced_replicas_wait_for_all_nodes_after_restore")
def fenced_bind_before_all_nodes_reported(h: HistoryBuilder) -> None:
    h.declare("f", **FENCED)
    (a,) = h.spawn(0, workload="f")
    h.restore(h.rows, incarnation="r1-i2")
    h.mark_restored()
    h.mark("joining", "n1")
    h.mark("ready", "n1")
    h.bind(a)


@violates("fenced_replicas_wait_for_all_nodes_after_restore")
def bind_to_node_not_yet_reported(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.restore(h.rows, incarnation="r1-i2")
    h.mark_restored()
    h.bind(a)


@violates("restore_marks_replicas_and_nodes_unknown")
def node_health_kept_after_restore(h: HistoryBuilder) -> None:
    h.restore(h.rows, incarnation="r1-i2")
    h.take_over("a2")
    h.commit({"incarnation": "r1-i2"}, [])


@violates("restore_marks_replicas_and_nodes_unknown")
def replica_phase_kept_after_restore(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a)
    h.restore(h.rows, incarnation="r1-i2")
    h.take_over("a2")
    h.commit({"incarnation": "r1-i2"}, [])


@violates("charged_capacity_is_not_returned")
def returned_capacity_still_drawn(h: HistoryBuilder) -> None:
    h.grant("s")
    (a,) = h.spawn(0)
    h.bind(a, grants=["s"])
    row = h.rows["grant/s"]
    less = {**row, "spec": {**row["spec"], "amount": {"cpu": "500m"}}}
    h.commit({"grant/s": less}, [h.entry("yield", "s", "budgets")])


def test_reissued_grant_may_be_smaller_than_its_draws() -> None:
    h = HistoryBuilder().prepare()
    h.grant("s", issuer="scope/global", holder="scope/r1")
    (a,) = h.spawn(0)
    h.bind(a, grants=["s"])
    row = h.rows["grant/s"]
    less = {**row, "spec": {**row["spec"], "amount": {}}, "status": {"phase": "closed"}}
    h.commit({"grant/s": less}, [h.entry("accept", "s", "budgets"), h.entry("close", "s", "budgets")])
    assert h.found == []


@violates("deleting_workloads_are_not_placed")
def bind_for_deleted_workload(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    work = h.rows["workload/t1/w"]
    going = {**work, "metadata": {**work["metadata"], "deleting": True}}
    h.commit({"workload/t1/w": going}, [h.entry("delete", "workload/t1/w", "user")])
    h.bind(a)


def reserved(h: HistoryBuilder, key: str, victim: str, at: str = "n1") -> None:
    held = h.status(key, phase="reserved", node=at, grants=["tenant/t1"], victims={victim: h.copy(victim)})
    h.commit({victim: h.status(victim, phase="draining"), key: held}, [h.entry("reserve", key, "scheduler")])


@violates("victims_have_lower_priority")
def victim_of_higher_priority(h: HistoryBuilder) -> None:
    a, b = h.spawn(0, 1)
    h.run(b)
    reserved(h, a, b)


@violates("victims_have_lower_priority")
def victim_on_other_node(h: HistoryBuilder) -> None:
    a, b = h.spawn(0, 1)
    h.run(a)
    reserved(h, b, a, "n2")


@violates("accepted_evidence_was_fresh")
def bind_on_stale_view(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    bound = h.status(a, phase="bound", node="n1", grants=["tenant/t1"])
    h.commit({a: bound}, [h.entry("bind", a, "scheduler", age_ms=60_001)])


@violates("accepted_evidence_was_fresh")
def transition_on_stale_report(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.bind(a)
    entry = h.entry("move start", a, "agent/n1", age_ms=15_001)
    h.commit({a: h.status(a, phase="starting")}, [entry])


@violates("abandoned_operations_are_not_applied")
def executed_after_abandoned(h: HistoryBuilder) -> None:
    h.commit({}, [h.entry("abandon", "r1-i1.1.x", "user", code="abandoned")])
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "user", id="r1-i1.1.x")])


@violates("abandoned_operations_are_not_applied")
def abandoned_after_executed(h: HistoryBuilder) -> None:
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "user", id="r1-i1.1.x")])
    h.commit({}, [h.entry("abandon", "r1-i1.1.x", "user", code="abandoned")])


@violates("operation_ids_are_executed_within_window")
def operation_id_of_other_incarnation(h: HistoryBuilder) -> None:
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "user", id="r1-i0.1.x")])


@violates("operation_ids_are_executed_within_window")
def operation_id_of_future_window(h: HistoryBuilder) -> None:
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "user", id="r1-i1.2.x")])


@violates("operation_ids_are_executed_within_window")
def operation_id_of_expired_window(h: HistoryBuilder) -> None:
    h.commit({"event/e": {"spec": {}}}, [h.entry("note", "e", "user", id="r1-i1.0.x")])


@violates("charges_are_on_own_tenant_and_grants")
def draw_on_quota_of_other_tenant(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.commit({"tenant/t2": tenant("t2")}, [h.entry("apply", "tenant/t2", "operator")])
    h.bind(a, grants=["tenant/t2"])


@violates("charges_are_on_own_tenant_and_grants")
def draw_on_grant_of_other_holder(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.grant("s", holder="scheduler/other")
    h.bind(a, grants=["s"])


@violates("charges_are_on_own_tenant_and_grants")
def draw_on_grant_for_other_tenant(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.grant("s", tenant="t2")
    h.bind(a, grants=["s"])


@violates("victims_have_lower_priority")
def preemption_by_non_preempting_class(h: HistoryBuilder) -> None:
    rank = {"metadata": {"name": "calm"}, "spec": {"preempts": False}}
    h.commit({"priorityclass/calm": rank}, [h.entry("apply", "priorityclass/calm", "operator")])
    h.declare("w", 2, priorityClass="calm")
    a, b = h.spawn(0, 1)
    h.run(a)
    reserved(h, b, a)


@violates("accepted_operations_hold_their_lease")
def lease_of_other_component_vacated(h: HistoryBuilder) -> None:
    row = h.rows["lease/repair"]
    nobody = {**row, "spec": {**row["spec"], "holder": ""}}
    h.commit({"lease/repair": nobody}, [h.entry("vacate", "repair", "scheduler")])


@violates("only_retryable_replicas_are_requeued")
def finished_job_requeued(h: HistoryBuilder) -> None:
    h.declare("j", type="job")
    (a,) = h.spawn(0, workload="j")
    h.run(a)
    h.release(a)
    h.requeue(a)


@violates("only_retryable_replicas_are_requeued")
def requeued_beyond_retries(h: HistoryBuilder) -> None:
    h.declare("j", type="job", retries=0)
    (a,) = h.spawn(0, workload="j")
    h.run(a)
    h.move(a, "failed", "agent/n1", result="failed")
    h.move(a, "released", "repair", grants=None)
    h.requeue(a)


@violates("objects_in_use_are_not_removed")
def priority_class_in_use_deleted(h: HistoryBuilder) -> None:
    rank = {"metadata": {"name": "calm"}, "spec": {}}
    h.commit({"priorityclass/calm": rank}, [h.entry("apply", "priorityclass/calm", "operator")])
    h.declare("w", 2, priorityClass="calm")
    h.commit({"priorityclass/calm": None}, [h.entry("delete", "priorityclass/calm", "operator")])


@violates("objects_in_use_are_not_removed")
def region_with_nodes_deleted(h: HistoryBuilder) -> None:
    h.commit({"region/r1": {"metadata": {"name": "r1"}, "spec": {}}}, [h.entry("apply", "region/r1", "operator")])
    h.commit({"region/r1": None}, [h.entry("delete", "region/r1", "operator")])


@violates("gangs_are_bound_together")
def gang_member_bound_with_draining_one(h: HistoryBuilder) -> None:
    h.declare("g", gang={"min": 2})
    a, b, c = h.spawn(0, 1, 2, workload="g")
    both = {key: h.status(key, phase="bound", node="n1", grants=["tenant/t1"]) for key in (a, b)}
    h.commit(both, [h.entry("gang", "", "scheduler")])
    h.move(b, "draining", "workloads")
    assert h.found == []
    h.bind(c)


@violates("gangs_are_bound_together")
def single_gang_member_bound(h: HistoryBuilder) -> None:
    h.declare("g", gang={"min": 2})
    (a, _) = h.spawn(0, 1, workload="g")
    h.bind(a)


@violates("uids_are_never_reused")
def uid_used_twice(h: HistoryBuilder) -> None:
    h.commit({"replica/t1/w-0": replica("w", 0, uid="same")}, [h.entry("spawn", "w", "workloads")])
    h.commit({"replica/t1/w-1": replica("w", 1, uid="same")}, [h.entry("spawn", "w", "workloads")])


@violates("reservations_are_committed_once_or_released")
def bind_before_victims_left(h: HistoryBuilder) -> None:
    a, b = h.spawn(0, 1)
    h.run(a)
    held = h.status(b, phase="reserved", node="n1", grants=["tenant/t1"], victims={a: h.copy(a)})
    h.commit({a: h.status(a, phase="draining"), b: held}, [h.entry("reserve", b, "scheduler")])
    h.bind(b, victims=None)


@violates("reservations_are_committed_once_or_released")
def bind_on_other_node_than_reserved(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.commit({a: h.status(a, phase="reserved", node="n1", grants=["tenant/t1"])}, [h.entry("reserve", a, "scheduler")])
    h.bind(a, "n2")


@violates("reservations_are_committed_once_or_released")
def bound_with_pending_victims(h: HistoryBuilder) -> None:
    a, b = h.spawn(0, 1)
    h.bind(a, victims={b: h.copy(b)})


@violates("reservations_are_committed_once_or_released")
def released_but_still_charged(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a)
    h.move(a, "draining", "workloads")
    h.move(a, "stopping", "agent/n1")
    h.move(a, "released", "agent/n1", result="ok")


@violates("charges_are_on_live_grants")
def draw_on_expired_grant(h: HistoryBuilder) -> None:
    h.grant("s", ttl="1s", status={"deadline": {"boot": "b1", "atMs": h.world.now_ms + 1_000}})
    (a,) = h.spawn(0)
    h.world.now_ms += 1_000
    h.bind(a, grants=["s"])


@violates("charges_are_on_live_grants")
def draw_on_child_of_closed_grant(h: HistoryBuilder) -> None:
    h.grant("s", status={"phase": "closed"})
    h.grant("c", parent="s")
    (a,) = h.spawn(0)
    h.bind(a, grants=["c"])


@violates("replica_priorities_stay_within_policy")
def priority_above_policy_limit(h: HistoryBuilder) -> None:
    """The first of the two is at the limit and is not reported."""
    h.commit({"policyrevision/1": policy(1, priorityMax=1)}, [h.entry("apply", "policy/p", "operator")])
    h.spawn(1)
    assert h.found == []
    h.spawn(2)


@violates("replica_priorities_stay_within_policy")
def initial_replica_above_policy_limit(h: HistoryBuilder) -> None:
    h.commit({"policyrevision/1": policy(1, priorityMax=0)}, [h.entry("apply", "policy/p", "operator")])
    h.declare("x", comes_with=range(1), replicas=1)
    assert h.found == []
    h.declare("y", comes_with=range(3))


@violates("tenant_objects_stay_within_limits")
def workload_limit_exceeded(h: HistoryBuilder) -> None:
    h.commit({"tenant/t1": limited(h, workloads=2)}, [h.entry("apply", "tenant/t1", "operator")])
    h.declare("x")
    assert h.found == []
    h.declare("y")


@violates("tenant_objects_stay_within_limits")
def replica_limit_exceeded(h: HistoryBuilder) -> None:
    """A workload already above a limit may stay, and shrink."""
    h.commit({"tenant/t1": limited(h, replicas=2)}, [h.entry("apply", "tenant/t1", "operator")])
    h.declare("w", 2, replicas=3)
    assert h.found == []
    h.declare("w", 3, replicas=4)


def limited(h: HistoryBuilder, **limits: int) -> Json:
    row = h.rows["tenant/t1"]
    return {**row, "spec": {**row["spec"], "limits": limits}}


@pytest.mark.parametrize(
    "key",
    [
        "replica/t1/w-9", "workload/t1/w", "secret/t1/s", "config/t1/c", "node/n9", "tenant/t9", "grant/g", "generation/t1/w.9",
        "lease/repair/x", "policyrevision/9", "override/o", "peer/p", "decision/t1/d", "event/t1/e", "batch/9",
    ],
)  # fmt: skip
def test_deletion_of_missing_row_does_not_stop_judge(key: str) -> None:
    h = HistoryBuilder().prepare()
    h.commit({key: None}, [h.entry("delete", key, "operator")])
    h.commit({key: None}, [h.entry("delete", key, "operator")])
    h.world.judge.conclude()
    assert key not in h.world.judge.history("r1").rows
    assert h.world.judge.accepted_operations["delete"] == 2


@pytest.mark.parametrize(("check", "breach"), VIOLATIONS, ids=[f"{breach.__name__}-{check}" for check, breach in VIOLATIONS])
def test_violation_is_reported_under_its_name(check: str, breach: Breach) -> None:
    h = HistoryBuilder().prepare()
    assert h.found == []
    breach(h)
    assert check in h.found, h.world.judge.violations
    found = next(one for one in h.world.judge.violations if one.check == check)
    assert found.property == CHECKS[check].property and found.scope == "r1" and found.why


def test_every_safety_check_has_violating_history() -> None:
    assert {check for check, _ in VIOLATIONS} == set(CHECKS)


def test_first_violation_calls_back_and_later_ones_are_kept() -> None:
    h, called = HistoryBuilder(World()).prepare(), list[str]()
    h.world.judge.on_violation = lambda violation: called.append(violation.check)
    surplus_replica(h)
    bind_after_policy_lease(h)
    assert called == ["replicas_stay_within_desired_and_surge"] and len(h.world.judge.violations) > 1


def test_object_story_lists_commits_and_processes() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.run(a)
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 77)
    story = h.world.judge.story("r1", a)
    assert "bind by scheduler!" in story and "status.phase 'bound' -> 'starting'" in story and "process 77" in story
    assert f"{h.world.now_ms} ms, revision {h.revision}" in story


def test_replica_forgotten_and_recreated_in_one_batch_is_lawful() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.run(a)
    h.release(a)
    recreated = replica("w", 0, uid="other")
    h.commit({a: recreated}, [h.entry("forget", a, "workloads"), h.entry("spawn", "w", "workloads")])
    assert h.found == []
