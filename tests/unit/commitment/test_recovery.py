"""Recovery after a restore: awaited nodes, vacant leases, work that must never run twice."""

from __future__ import annotations

from remit.commitment.recovery import LEASE_EPOCHS_PER_STORE_EPOCH, acknowledged_after
from remit.model.claims import Accepted, Acquire, Actor, Apply, Bind, BindGang, Code, Delete, Mark, Refused, Reserve, Vacate
from remit.model.kinds import NodeHealth
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, node, scope_test, workload
from tests.unit.commitment.authority_fixture import (
    T1,
    acquire_leases,
    bind,
    commit_transitions,
    mark_node,
    restore_backup,
    spawn_replicas,
)

AWAITED = "summary/awaited/node/"


def awaited_nodes(scope: Scope) -> list[str]:
    """The awaited nodes by the rows; the books must agree."""
    rows = sorted(key for key in scope.checker.rows if key.startswith(AWAITED))
    assert sorted(scope.books.awaited_nodes) == rows
    return [key.removeprefix(AWAITED) for key in rows]


async def refusal(scope: Scope, claim: Bind | Reserve | BindGang) -> Refused:
    before = await scope.dump()
    (verdict,) = await scope.ask(scope.actors["scheduler"], claim)
    assert isinstance(verdict, Refused)
    assert await scope.dump() == before
    return verdict


# -- nodes ------------------------------------------------------------------------------------------------------------------


@scope_test
async def test_awaited_node_is_not_deleted(scope: Scope) -> None:
    """Work that awaits it would wait for ever; once marked lost it may be deleted."""
    await restore_backup(scope)
    await acquire_leases(scope, "node-lifecycle")
    assert await scope.refused(OPERATOR, Delete("Node", "n2")) is Code.AWAITING_REPORTS
    await mark_node(scope, "n2", NodeHealth.LOST)
    await scope.must(OPERATOR, Delete("Node", "n2"))
    assert awaited_nodes(scope) == ["n1"]


@scope_test
async def test_every_node_is_unknown_and_awaited_after_restore(scope: Scope) -> None:
    """Even a lost node may have come back after the backup."""
    await scope.must(OPERATOR, Apply(node("n3")))
    await mark_node(scope, "n3", NodeHealth.LOST)
    await restore_backup(scope)
    assert [scope.row(f"node/{name}")["status"]["health"] for name in ("n1", "n2", "n3")] == ["unknown"] * 3
    assert awaited_nodes(scope) == ["n1", "n2", "n3"]
    (key,) = await spawn_after_restore(scope, "w")
    assert await scope.refused(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1)) is Code.NODE_UNREADY


async def spawn_after_restore(scope: Scope, name: str, count: int = 1, **shape: object) -> list[str]:
    await acquire_leases(scope, "scheduler", "workloads", "node-lifecycle")
    return await spawn_replicas(scope, name, count, **shape)


@scope_test
async def test_fenced_work_waits_until_every_node_is_ready_or_lost(scope: Scope) -> None:
    """A replica that is pending in the backup may have been bound since, and run on any of them."""
    a, b = await spawn_replicas(scope, "job", 2, type_="job")
    gang = await spawn_replicas(scope, "g", 2, type_="job", gang=2)
    await restore_backup(scope)
    await acquire_leases(scope, "scheduler", "node-lifecycle")
    await mark_node(scope, "n1", NodeHealth.JOINING)
    assert awaited_nodes(scope) == ["n1", "n2"], "a joining node has not reported yet"
    await mark_node(scope, "n1", NodeHealth.READY)
    assert awaited_nodes(scope) == ["n2"]
    refused = await refusal(scope, Bind(a, scope.at(a), "n1", T1))
    assert refused.code is Code.AWAITING_REPORTS and a in refused.detail, "n1 is ready, but it may run on n2"
    assert (await refusal(scope, Reserve(a, scope.at(a), "n1", T1))).code is Code.AWAITING_REPORTS
    together = BindGang(tuple(Bind(key, scope.at(key), "n1", T1) for key in gang))
    refused = await refusal(scope, together)
    assert refused.code is Code.GANG_SHORT and "awaiting_reports" in refused.detail
    await scope.take_over()
    assert awaited_nodes(scope) == ["n2"], "the next authority waits too"
    assert (await refusal(scope, Bind(a, scope.at(a), "n1", T1))).code is Code.AWAITING_REPORTS
    await mark_node(scope, "n2", NodeHealth.LOST)
    assert awaited_nodes(scope) == []
    await bind(scope, a)
    await scope.must(scope.actors["scheduler"], Reserve(b, scope.at(b), "n1", T1), together)


@scope_test
async def test_last_report_and_binding_may_share_batch(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "job", type_="job")
    await restore_backup(scope)
    await acquire_leases(scope, "scheduler", "node-lifecycle")
    for name in ("n1", "n2"):
        await mark_node(scope, name, NodeHealth.JOINING)
    await mark_node(scope, "n1", NodeHealth.READY)
    last = await scope.operation(scope.actors["node-lifecycle"], Mark("n2", scope.at("node/n2"), NodeHealth.READY))
    early = await scope.operation(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1))
    late = await scope.operation(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1))
    verdicts = await scope.send([early, last, late])
    assert isinstance(verdicts, list)
    assert [verdict.code if isinstance(verdict, Refused) else None for verdict in verdicts] == [
        Code.AWAITING_REPORTS,
        None,
        None,
    ]


@scope_test
async def test_eager_work_does_not_wait_for_reports(scope: Scope) -> None:
    (service,) = await spawn_replicas(scope, "service")
    (job,) = await spawn_replicas(scope, "eager", type_="job", replace="eager")
    (fenced,) = await spawn_replicas(scope, "fenced", replace="fenced")
    await restore_backup(scope)
    await acquire_leases(scope, "scheduler", "node-lifecycle")
    await mark_node(scope, "n1", NodeHealth.JOINING, NodeHealth.READY)
    assert awaited_nodes(scope) == ["n2"]
    await bind(scope, service)
    await bind(scope, job)
    assert (await refusal(scope, Bind(fenced, scope.at(fenced), "n1", T1))).code is Code.AWAITING_REPORTS


@scope_test
async def test_running_replica_is_unknown_until_node_reports(scope: Scope) -> None:
    pending, reserved, running, finished = await spawn_replicas(scope, "w", 4, type_="job")
    await scope.must(scope.actors["scheduler"], Reserve(reserved, scope.at(reserved), "n1", T1))
    for key in (running, finished):
        await bind(scope, key)
        await commit_transitions(scope, key, "start", "run")
    await commit_transitions(scope, finished, "finish")
    await restore_backup(scope)
    assert [scope.phase(key) for key in (pending, reserved, running, finished)] == [
        "pending",
        "reserved",
        "unknown",
        "finished",
    ]
    status = scope.row(running)["status"]
    assert (status["before"], status["reason"], status["node"]) == ("running", "restored", "n1")
    await acquire_leases(scope, "agent/n1")
    await commit_transitions(scope, running, "resume")
    assert scope.phase(running) == "running"


# -- leases -----------------------------------------------------------------------------------------------------------------


@scope_test
async def test_every_lease_is_vacant_and_former_holder_refused(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    old = scope.actors["scheduler"]
    await restore_backup(scope)
    assert "holder" not in scope.row("lease/scheduler")["spec"]
    assert await scope.refused(old, Bind(key, scope.at(key), "n1", T1)) is Code.STALE_EPOCH
    assert not await scope.lead.authority.renew(old)
    rival = Actor("rival", old.role)
    (verdict,) = await scope.ask(rival, Acquire("scheduler", HOUR))
    assert isinstance(verdict, Accepted), "no wait for the term of the former holder"


@scope_test
async def test_epoch_issued_after_backup_is_not_reused(scope: Scope) -> None:
    """The former holder may have the same name as the next one; only the epoch distinguishes them."""
    await scope.acquire("scheduler/x")
    known = scope.row("lease/scheduler/x")["spec"]["epoch"]
    await restore_backup(scope, lease="scheduler/x")
    zombie = scope.actors["scheduler/x"]
    assert zombie.epoch == known + 3, "the backup does not know the last three"
    epoch = scope.row("head")["epoch"]
    assert scope.row("lease/scheduler/x")["spec"]["epoch"] == epoch * LEASE_EPOCHS_PER_STORE_EPOCH
    taken: list[int] = []
    for _ in range(4):
        (number,) = await scope.must(Actor(zombie.name, zombie.role), Acquire("scheduler/x", HOUR))
        taken.append(number)
        assert await scope.refused(zombie, Vacate("scheduler/x")) is Code.STALE_EPOCH
    assert taken == [epoch * LEASE_EPOCHS_PER_STORE_EPOCH + n for n in (1, 2, 3, 4)]


@scope_test
async def test_second_restore_issues_higher_epochs(scope: Scope) -> None:
    backup = await scope.store.inner.backup()
    await scope.restore(backup)
    scope.reborn = False
    await scope.take_over()
    await acquire_leases(scope, "scheduler")
    first = scope.actors["scheduler"].epoch
    await scope.restore(backup)
    scope.reborn = False
    await scope.take_over()
    await acquire_leases(scope, "scheduler")
    assert scope.actors["scheduler"].epoch > first


# -- second takeover, lost commits ------------------------------------------------------------------------------------------


@scope_test
async def test_restored_scope_resets_nodes_and_leases_only_once(scope: Scope) -> None:
    await restore_backup(scope)
    await acquire_leases(scope, "node-lifecycle", "scheduler")
    await mark_node(scope, "n1", NodeHealth.JOINING, NodeHealth.READY)
    held = scope.row("lease/scheduler")["spec"]
    await scope.take_over()
    assert scope.row("node/n1")["status"]["health"] == "ready"
    assert scope.row("lease/scheduler")["spec"] == held
    assert awaited_nodes(scope) == ["n2"]


@scope_test
async def test_commits_after_backup_are_listed_as_lost(scope: Scope) -> None:
    backup = await scope.store.inner.backup()
    last = scope.row("head")["sequence"]
    await scope.must(USER, Apply(workload("a")))
    assert await scope.refused(USER, Delete("Secret", "none", "t1")) is Code.NOT_FOUND
    old = scope.store.inner
    await scope.restore(backup)
    lost = [(sequence, entry.did, entry.subject, entry.code) async for sequence, entry in acknowledged_after(old, last)]
    assert lost == [(last + 1, "apply", "workload/t1/a", ""), (last + 2, "delete", "secret/t1/none", "not_found")]


@scope_test
async def test_lease_unknown_to_backup_does_not_restart_its_epochs(scope: Scope) -> None:
    """F10: acquired after the backup and lost with it; its former holder must not pass for the present one."""
    (key,) = await spawn_replicas(scope, "w")
    await restore_backup(scope, "scheduler/x")
    old = scope.actors["scheduler/x"]
    assert old.epoch == 3
    for _ in range(3):
        await acquire_leases(scope, "scheduler/x")
    assert scope.actors["scheduler/x"].epoch > LEASE_EPOCHS_PER_STORE_EPOCH
    assert await scope.refused(old, Bind(key, scope.at(key), "n1", T1)) is Code.STALE_EPOCH
    await acquire_leases(scope, "scheduler/y")
    before = scope.actors["scheduler/y"].epoch
    await restore_backup(scope, "scheduler/z")
    await acquire_leases(scope, "scheduler/z")
    assert scope.actors["scheduler/z"].epoch > before, "above the epochs of the restore before"
