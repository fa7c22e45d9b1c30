"""What does a restored scope still believe? Nodes that have not reported, leases of before, work that must never run twice."""

from __future__ import annotations

from remit.commitment.recovery import LEASE_EPOCHS_PER_STORE_EPOCH
from remit.model.claims import Accepted, Acquire, Actor, Apply, Bind, BindGang, Code, Delete, Mark, Refused, Reserve, Vacate
from remit.model.kinds import NodeHealth
from tests.properties.authority_world import HOUR, OPERATOR, Scope, node, story
from tests.unit.commitment.authority_fixture import T1, bind, move, spawned

AWAITED = "summary/awaited/node/"


async def restored(scope: Scope, lease: str = "") -> None:
    """The store as it was a moment ago, under a new authority. Leases are vacant, and every node is awaited; `lease`, if any,
    was taken by somebody after the backup, at epochs that the backup does not know.
    """
    backup = await scope.store.inner.backup()
    for _ in range(3 if lease else 0):
        await scope.acquire(lease)
    await scope.restore(backup)
    scope.reborn = False  # else the harness would let every node report at once
    await scope.take_over()


async def led_again(scope: Scope, *leases: str) -> None:
    for lease in leases:
        await scope.acquire(lease)


async def marked(scope: Scope, name: str, *healths: NodeHealth) -> None:
    for health in healths:
        await scope.must(scope.actors["node-lifecycle"], Mark(name, scope.at(f"node/{name}"), health))


def awaited(scope: Scope) -> list[str]:
    """The nodes that are awaited, as the rows have it; the books must have the same."""
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


@story
async def test_a_node_that_is_awaited_is_not_deleted(scope: Scope) -> None:
    """Whatever waits for it would wait for ever; once it is given up as lost it may go."""
    await restored(scope)
    await led_again(scope, "node-lifecycle")
    assert await scope.refused(OPERATOR, Delete("Node", "n2")) is Code.AWAITING_REPORTS
    await marked(scope, "n2", NodeHealth.LOST)
    await scope.must(OPERATOR, Delete("Node", "n2"))
    assert awaited(scope) == ["n1"]


@story
async def test_every_node_is_unknown_and_awaited_also_one_that_was_lost(scope: Scope) -> None:
    """It may have come back after the backup."""
    await scope.must(OPERATOR, Apply(node("n3")))
    await marked(scope, "n3", NodeHealth.LOST)
    await restored(scope)
    assert [scope.row(f"node/{name}")["status"]["health"] for name in ("n1", "n2", "n3")] == ["unknown"] * 3
    assert awaited(scope) == ["n1", "n2", "n3"]
    (key,) = await spawned_again(scope, "w")
    assert await scope.refused(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1)) is Code.NODE_UNREADY


async def spawned_again(scope: Scope, name: str, count: int = 1, **shape: object) -> list[str]:
    await led_again(scope, "scheduler", "workloads", "node-lifecycle")
    return await spawned(scope, name, count, **shape)


@story
async def test_work_that_must_never_run_twice_waits_until_each_node_is_ready_or_lost(scope: Scope) -> None:
    """A replica that is pending in the backup may have been bound since, and be running on any of them."""
    a, b = await spawned(scope, "job", 2, type_="job")
    gang = await spawned(scope, "g", 2, type_="job", gang=2)
    await restored(scope)
    await led_again(scope, "scheduler", "node-lifecycle")
    await marked(scope, "n1", NodeHealth.JOINING)
    assert awaited(scope) == ["n1", "n2"], "one that joins has not reported yet"
    await marked(scope, "n1", NodeHealth.READY)
    assert awaited(scope) == ["n2"]
    said = await refusal(scope, Bind(a, scope.at(a), "n1", T1))
    assert said.code is Code.AWAITING_REPORTS and a in said.detail, "n1 is ready; but it may be running on n2"
    assert (await refusal(scope, Reserve(a, scope.at(a), "n1", T1))).code is Code.AWAITING_REPORTS
    together = BindGang(tuple(Bind(key, scope.at(key), "n1", T1) for key in gang))
    said = await refusal(scope, together)
    assert said.code is Code.GANG_SHORT and "awaiting_reports" in said.detail
    await scope.take_over()
    assert awaited(scope) == ["n2"], "a successor waits for the same"
    assert (await refusal(scope, Bind(a, scope.at(a), "n1", T1))).code is Code.AWAITING_REPORTS
    await marked(scope, "n2", NodeHealth.LOST)
    assert awaited(scope) == []
    await bind(scope, a)
    await scope.must(scope.actors["scheduler"], Reserve(b, scope.at(b), "n1", T1), together)


@story
async def test_the_last_report_and_the_binding_may_come_in_one_batch(scope: Scope) -> None:
    (key,) = await spawned(scope, "job", type_="job")
    await restored(scope)
    await led_again(scope, "scheduler", "node-lifecycle")
    for name in ("n1", "n2"):
        await marked(scope, name, NodeHealth.JOINING)
    await marked(scope, "n1", NodeHealth.READY)
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


@story
async def test_work_that_would_rather_run_twice_than_not_at_all_is_not_held_up(scope: Scope) -> None:
    (service,) = await spawned(scope, "service")
    (job,) = await spawned(scope, "eager", type_="job", replace="eager")
    (fenced,) = await spawned(scope, "fenced", replace="fenced")
    await restored(scope)
    await led_again(scope, "scheduler", "node-lifecycle")
    await marked(scope, "n1", NodeHealth.JOINING, NodeHealth.READY)
    assert awaited(scope) == ["n2"]
    await bind(scope, service)
    await bind(scope, job)
    assert (await refusal(scope, Bind(fenced, scope.at(fenced), "n1", T1))).code is Code.AWAITING_REPORTS


@story
async def test_what_ran_is_unknown_until_its_node_says_and_what_did_not_stays_as_it_was(scope: Scope) -> None:
    pending, reserved, running, finished = await spawned(scope, "w", 4, type_="job")
    await scope.must(scope.actors["scheduler"], Reserve(reserved, scope.at(reserved), "n1", T1))
    for key in (running, finished):
        await bind(scope, key)
        await move(scope, key, "start", "run")
    await move(scope, finished, "finish")
    await restored(scope)
    assert [scope.phase(key) for key in (pending, reserved, running, finished)] == [
        "pending",
        "reserved",
        "unknown",
        "finished",
    ]
    status = scope.row(running)["status"]
    assert (status["before"], status["reason"], status["node"]) == ("running", "restored", "n1")
    await led_again(scope, "agent/n1")
    await move(scope, running, "resume")
    assert scope.phase(running) == "running"


# -- leases -----------------------------------------------------------------------------------------------------------------


@story
async def test_every_lease_is_vacant_and_nobody_of_before_may_act(scope: Scope) -> None:
    (key,) = await spawned(scope, "w")
    old = scope.actors["scheduler"]
    await restored(scope)
    assert "holder" not in scope.row("lease/scheduler")["spec"]
    assert await scope.refused(old, Bind(key, scope.at(key), "n1", T1)) is Code.STALE_EPOCH
    assert not await scope.lead.authority.renew(old)
    rival = Actor("rival", old.role)
    (verdict,) = await scope.ask(rival, Acquire("scheduler", HOUR))
    assert isinstance(verdict, Accepted), "it need not wait for the term of a holder that is gone"


@story
async def test_an_epoch_that_was_handed_out_after_the_backup_does_not_come_back(scope: Scope) -> None:
    """Its holder has the name that the next one will have; only the epoch tells them apart."""
    await scope.acquire("scheduler/x")
    known = scope.row("lease/scheduler/x")["spec"]["epoch"]
    await restored(scope, lease="scheduler/x")
    zombie = scope.actors["scheduler/x"]
    assert zombie.epoch == known + 3, "the backup knows nothing of the last three"
    epoch = scope.row("head")["epoch"]
    assert scope.row("lease/scheduler/x")["spec"]["epoch"] == epoch * LEASE_EPOCHS_PER_STORE_EPOCH
    taken: list[int] = []
    for _ in range(4):
        (number,) = await scope.must(Actor(zombie.name, zombie.role), Acquire("scheduler/x", HOUR))
        taken.append(number)
        assert await scope.refused(zombie, Vacate("scheduler/x")) is Code.STALE_EPOCH
    assert taken == [epoch * LEASE_EPOCHS_PER_STORE_EPOCH + n for n in (1, 2, 3, 4)]


@story
async def test_a_second_restore_passes_the_epochs_of_the_first(scope: Scope) -> None:
    backup = await scope.store.inner.backup()
    await scope.restore(backup)
    scope.reborn = False
    await scope.take_over()
    await led_again(scope, "scheduler")
    first = scope.actors["scheduler"].epoch
    await scope.restore(backup)
    scope.reborn = False
    await scope.take_over()
    await led_again(scope, "scheduler")
    assert scope.actors["scheduler"].epoch > first


# -- once, and what is lost -------------------------------------------------------------------------------------------------


@story
async def test_a_restored_scope_doubts_once(scope: Scope) -> None:
    await restored(scope)
    await led_again(scope, "node-lifecycle", "scheduler")
    await marked(scope, "n1", NodeHealth.JOINING, NodeHealth.READY)
    held = scope.row("lease/scheduler")["spec"]
    await scope.take_over()
    assert scope.row("node/n1")["status"]["health"] == "ready"
    assert scope.row("lease/scheduler")["spec"] == held
    assert awaited(scope) == ["n2"]


@story
async def test_a_lease_that_the_backup_does_not_know_does_not_begin_anew(scope: Scope) -> None:
    """F10: taken after the backup and lost with it; whoever held it then must not be taken for whoever holds it now."""
    (key,) = await spawned(scope, "w")
    await restored(scope, "scheduler/x")
    old = scope.actors["scheduler/x"]
    assert old.epoch == 3
    for _ in range(3):
        await led_again(scope, "scheduler/x")
    assert scope.actors["scheduler/x"].epoch > LEASE_EPOCHS_PER_STORE_EPOCH
    assert await scope.refused(old, Bind(key, scope.at(key), "n1", T1)) is Code.STALE_EPOCH
    await led_again(scope, "scheduler/y")
    before = scope.actors["scheduler/y"].epoch
    await restored(scope, "scheduler/z")
    await led_again(scope, "scheduler/z")
    assert scope.actors["scheduler/z"].epoch > before, "and past those of the restore before"
