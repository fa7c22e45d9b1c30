"""Transitions of replicas: results, attempts, fences, limits, and deletion of objects in use."""

from __future__ import annotations

from msgspec.structs import replace

from remit.model.claims import Apply, Bind, Code, Delete, Evidence, Forget, Mark, Move, Spawn
from remit.model.kinds import NodeHealth, NodeStatus
from tests.properties.authority_world import OPERATOR, USER, Scope, node, scope_test, tenant, workload
from tests.unit.commitment.authority_fixture import T1, bind, commit_transitions, spawn_replicas, transition_claim


@scope_test
async def test_only_final_transitions_set_result(scope: Scope) -> None:
    """S15: an early result would hide the final one."""
    (key,) = await spawn_replicas(scope, "w", type_="job")
    await bind(scope, key)
    agent = scope.actors["agent/n1"]
    for transition in ("start", "run"):
        await scope.must(agent, Move(key, scope.at(key), transition, 1, "ok"))
        assert "result" not in scope.row(key)["status"]
    await scope.must(agent, Move(key, scope.at(key), "finish", 1, "exit 3"))
    assert scope.row(key)["status"]["result"] == "exit 3"
    await scope.must(scope.actors["workloads"], Move(key, scope.at(key), "settle", 1, "ok"))
    assert scope.row(key)["status"]["result"] == "exit 3"


@scope_test
async def test_agent_moves_only_current_attempts_on_its_node(scope: Scope) -> None:
    """F37: an order of an earlier attempt starts nothing."""
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key)
    start = Move(key, scope.at(key), "start", 1)
    assert await scope.refused(scope.actors["agent/n2"], start) is Code.NOT_OWNER
    assert await scope.refused(scope.actors["agent/n1"], replace(start, attempt=2)) is Code.ATTEMPT
    stale = Evidence(age_ms=15_001)
    assert await scope.refused(scope.actors["agent/n1"], start, stale) is Code.STALE_EVIDENCE
    await scope.must(scope.actors["agent/n1"], start)


@scope_test
async def test_lost_replica_waits_for_fence_and_renewal_restarts_wait(scope: Scope) -> None:
    """F34: 308,050 ms for a job whose fence is 5 min; a service that is replaced eagerly waits 30 s."""
    (job,) = await spawn_replicas(scope, "job", type_="job")
    (service,) = await spawn_replicas(scope, "service")
    for key in (job, service):
        await bind(scope, key)
        await commit_transitions(scope, key, "doubt")
    scope.clock.at_ms += 29_999
    assert await scope.refused(*transition_claim(scope, service, "lose")) is Code.FENCE
    scope.clock.at_ms += 1
    await commit_transitions(scope, service, "lose")
    await scope.lead.authority.renew(scope.actors["agent/n1"])
    scope.clock.at_ms += 308_049
    assert await scope.refused(*transition_claim(scope, job, "lose")) is Code.FENCE
    await scope.take_over()
    scope.clock.at_ms += 308_049
    assert await scope.refused(*transition_claim(scope, job, "lose")) is Code.FENCE, "a new authority counts from its takeover"
    scope.clock.at_ms += 1
    await commit_transitions(scope, job, "lose", "release")


@scope_test
async def test_spawn_is_limited_to_replicas_and_surge(scope: Scope) -> None:
    """F29: a second spawn finds the first one's replicas."""
    workloads = scope.actors["workloads"]
    await spawn_replicas(scope, "w", 2, replicas=3)
    assert await scope.refused(workloads, Spawn("t1", "w", 1, 2, 2)) is Code.LIMIT
    assert await scope.refused(workloads, Spawn("t1", "w", 1, 1, 1)) is Code.EXISTS
    assert await scope.refused(workloads, Spawn("t1", "w", 9, 2, 1)) is Code.NOT_FOUND
    await scope.must(workloads, Spawn("t1", "w", 1, 2, 1))


@scope_test
async def test_surplus_replica_is_not_requeued(scope: Scope) -> None:
    """S13: live replicas never exceed the declared number."""
    (key,) = await spawn_replicas(scope, "w")
    await commit_transitions(scope, key, "cancel")
    await scope.must(scope.actors["workloads"], Spawn("t1", "w", 1, 1, 1))
    assert await scope.refused(*transition_claim(scope, key, "requeue")) is Code.LIMIT


@scope_test
async def test_job_is_requeued_up_to_its_retries(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "job", type_="job", retries=1)
    for _ in range(2):
        await bind(scope, key)
        await commit_transitions(scope, key, "start", "crash", "release")
        last = scope.row(key)["status"].get("attempt", 1)
        if last == 1:
            await commit_transitions(scope, key, "requeue")
    assert await scope.refused(*transition_claim(scope, key, "requeue")) is Code.LIMIT


@scope_test
async def test_object_in_use_is_not_deleted(scope: Scope) -> None:
    """F30"""
    (key,) = await spawn_replicas(scope, "w", priority="high")
    await bind(scope, key)
    assert await scope.refused(OPERATOR, Delete("Node", "n1")) is Code.IN_USE
    assert await scope.refused(OPERATOR, Delete("Tenant", "t1")) is Code.IN_USE
    assert await scope.refused(OPERATOR, Delete("PriorityClass", "high")) is Code.IN_USE
    assert await scope.must(USER, Delete("Workload", "w", "t1")) == [0], "marked for deletion while a replica exists"
    assert await scope.refused(USER, Apply(workload("w"))) is Code.DELETING
    assert await scope.refused(scope.actors["workloads"], Spawn("t1", "w", 1, 5, 1)) is Code.DELETING
    await commit_transitions(scope, key, "remove", "stop", "stopped")
    await scope.must(scope.actors["workloads"], Forget(key, scope.at(key)))
    assert await scope.must(USER, Delete("Workload", "w", "t1")) == [1]
    await scope.must(OPERATOR, Delete("Node", "n1"), Delete("Tenant", "t1"), Delete("PriorityClass", "high"))


@scope_test
async def test_agent_applies_only_its_own_node_and_deletes_none(scope: Scope) -> None:
    """Otherwise it could drop labels and taints that operators have set."""
    agent = scope.actors["agent/n1"]
    assert await scope.refused(agent, Delete("Node", "n2")) is Code.NOT_OWNER
    assert await scope.refused(agent, Apply(node("n2"))) is Code.NOT_OWNER
    await scope.must(agent, Apply(node("n1", "2")))
    assert await scope.refused(agent, Delete("Node", "n1")) is Code.NOT_OWNER


@scope_test
async def test_new_node_is_joining_whatever_status_it_sends(scope: Scope) -> None:
    """Only node-lifecycle moves health, along its table."""
    claimed_ready = replace(node("n3"), status=NodeStatus(health=NodeHealth.READY))
    await scope.must(OPERATOR, Apply(claimed_ready))
    assert scope.row("node/n3").get("status", {}).get("health", "joining") == "joining"
    (key,) = await spawn_replicas(scope, "w")
    assert await scope.refused(scope.actors["scheduler"], Bind(key, scope.at(key), "n3", T1)) is Code.NODE_UNREADY
    lost = Mark("n3", scope.at("node/n3"), NodeHealth.UNKNOWN)
    assert await scope.refused(scope.actors["node-lifecycle"], lost) is Code.PHASE


@scope_test
async def test_conditional_apply_needs_current_revision(scope: Scope) -> None:
    seen = scope.at("tenant/t1")
    assert await scope.refused(OPERATOR, Apply(tenant("t1", "1"), expect=0)) is Code.EXISTS
    await scope.must(OPERATOR, Apply(tenant("t1", "1"), expect=seen))
    assert await scope.refused(OPERATOR, Apply(tenant("t1", "2"), expect=seen)) is Code.REVISION
    first, second = await scope.ask(OPERATOR, Apply(tenant("t1", "3")), Apply(tenant("t1", "4"), expect=-1))
    assert getattr(second, "code", None) is Code.REVISION, first


@scope_test
async def test_name_can_be_forgotten_and_reused_in_one_batch(scope: Scope) -> None:
    """F21: two replicas, distinguished by uid."""
    (key,) = await spawn_replicas(scope, "w")
    await commit_transitions(scope, key, "cancel")
    before = scope.row(key)["metadata"]["uid"]
    await scope.must(scope.actors["workloads"], Forget(key, scope.at(key)), Spawn("t1", "w", 1, 0, 1))
    assert scope.row(key)["metadata"]["uid"] != before
    assert scope.phase(key) == "pending"
