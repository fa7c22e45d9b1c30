"""Reservations, preemption victims, gangs and shrinking limits: capacity is never promised twice."""

from __future__ import annotations

from remit.model.claims import Accepted, Apply, Bind, BindGang, Code, Forget, Move, Refused, Reserve, Spawn
from remit.model.kinds import Affinity, DeviceRequest, Placement
from tests.properties.authority_world import OPERATOR, USER, Scope, node, scope_test, tenant, workload
from tests.unit.commitment.authority_fixture import T1, bind, commit_transitions, spawn_replicas, transition_claim, used_on

GPU = (DeviceRequest(kind="gpu", count=1),)


def reserve(scope: Scope, key: str, *victims: str, on: str = "n1", devices: dict[str, int] | None = None) -> Reserve:
    return Reserve(key, scope.at(key), on, T1, devices or {}, victims={victim: scope.at(victim) for victim in victims})


@scope_test
async def test_reservation_charges_capacity_its_victims_do_not_free(scope: Scope) -> None:
    """4 cpu: the victim holds 3, the preemptor needs 4; together never more than 4, and no third replica fits."""
    (weak,) = await spawn_replicas(scope, "weak", cpu="3")
    (strong,) = await spawn_replicas(scope, "strong", cpu="4", priority="high")
    (other,) = await spawn_replicas(scope, "other", cpu="1")
    await bind(scope, weak)
    await scope.must(scope.actors["scheduler"], reserve(scope, strong, weak))
    assert used_on(scope, "n1") == 4000
    assert scope.phase(weak) == "draining"
    assert await scope.refused(scope.actors["scheduler"], Bind(other, scope.at(other), "n1", T1)) is Code.NO_ROOM
    assert await scope.refused(scope.actors["scheduler"], Bind(strong, scope.at(strong), "n1", T1)) is Code.VICTIMS
    await commit_transitions(scope, weak, "stop")
    assert used_on(scope, "n1") == 4000, "F38: stopping frees nothing"
    await commit_transitions(scope, weak, "stopped")
    assert used_on(scope, "n1") == 4000, "freed capacity belongs to the preemptor"
    assert await scope.refused(scope.actors["scheduler"], Bind(other, scope.at(other), "n1", T1)) is Code.NO_ROOM
    await bind(scope, strong)
    assert used_on(scope, "n1") == 4000


@scope_test
async def test_preemption_reason_names_preemptor_of_same_tenant_only(scope: Scope) -> None:
    (weak,) = await spawn_replicas(scope, "weak", cpu="3")
    (strong,) = await spawn_replicas(scope, "strong", cpu="4", priority="high")
    await bind(scope, weak)
    await scope.must(scope.actors["scheduler"], reserve(scope, strong, weak))
    assert scope.row(weak)["status"]["reason"] == f"preempted by {strong}"
    (mine,) = await spawn_replicas(scope, "mine", cpu="3")
    await bind(scope, mine, "n2")
    await scope.must(USER, Apply(workload("zebra", cpu="4", priority="high", replicas=1, owner="t2")))
    await scope.must(scope.actors["workloads"], Spawn("t2", "zebra", 1, 0, 1))
    there = "replica/t2/zebra-0"
    claim = Reserve(there, scope.at(there), "n2", "tenant/t2", victims={mine: scope.at(mine)})
    await scope.must(scope.actors["scheduler"], claim)
    assert scope.row(mine)["status"]["reason"] == "preempted by a replica of another tenant with priority 100"


@scope_test
async def test_surplus_freed_by_victims_is_available_to_others(scope: Scope) -> None:
    weak = await spawn_replicas(scope, "weak", 2, cpu="2")
    (strong,) = await spawn_replicas(scope, "strong", cpu="3", priority="high")
    for key in weak:
        await bind(scope, key)
    await scope.must(scope.actors["scheduler"], reserve(scope, strong, *weak))
    assert used_on(scope, "n1") == 4000
    await commit_transitions(scope, weak[0], "stop", "stopped")
    assert used_on(scope, "n1") == 3000, "2 used by a victim, 1 by the reservation"
    await commit_transitions(scope, weak[1], "stop", "stopped")
    assert used_on(scope, "n1") == 3000


@scope_test
async def test_respawned_victim_is_not_a_victim(scope: Scope) -> None:
    """F24: forgotten and spawned again, it is in its first attempt, but the reservation does not wait for it."""
    workloads = scope.actors["workloads"]
    (weak,) = await spawn_replicas(scope, "weak", cpu="3")
    (strong,) = await spawn_replicas(scope, "strong", cpu="4", priority="high")
    await bind(scope, weak)
    await scope.must(scope.actors["scheduler"], reserve(scope, strong, weak))
    await commit_transitions(scope, weak, "stop", "stopped")
    await scope.must(workloads, Forget(weak, scope.at(weak)))
    await scope.must(workloads, Spawn("t1", "weak", 1, 0, 1))
    await bind(scope, weak, "n2")
    assert (used_on(scope, "n1"), used_on(scope, "n2")) == (4000, 3000)
    await bind(scope, strong)
    assert (used_on(scope, "n1"), used_on(scope, "n2")) == (4000, 3000)
    await commit_transitions(scope, weak, "remove", "stop", "stopped")
    assert (used_on(scope, "n1"), used_on(scope, "n2")) == (4000, 0)


@scope_test
async def test_device_passes_from_victim_to_preemptor_only(scope: Scope) -> None:
    (weak,) = await spawn_replicas(scope, "weak", devices=GPU, cpu="1")
    (strong,) = await spawn_replicas(scope, "strong", devices=GPU, cpu="1", priority="high")
    (third,) = await spawn_replicas(scope, "third", devices=GPU, cpu="1", priority="top")
    await bind(scope, weak, devices={"gpu-0": 1000})
    await scope.must(scope.actors["scheduler"], reserve(scope, strong, weak, devices={"gpu-0": 1000}))
    taking = Bind(third, scope.at(third), "n1", T1, {"gpu-0": 1000})
    assert await scope.refused(scope.actors["scheduler"], taking) is Code.DEVICE_TAKEN
    await commit_transitions(scope, weak, "stop", "stopped")
    assert await scope.refused(scope.actors["scheduler"], taking) is Code.DEVICE_TAKEN
    await bind(scope, strong, devices={"gpu-0": 1000})
    await bind(scope, third, devices={"gpu-1": 1000})


@scope_test
async def test_cancelled_preemptor_releases_reservation_while_victims_drain(scope: Scope) -> None:
    """F24: the preemptor is cancelled, and its reservation with it."""
    (weak,) = await spawn_replicas(scope, "weak", cpu="3")
    (strong,) = await spawn_replicas(scope, "strong", cpu="4", priority="high")
    await bind(scope, weak)
    await scope.must(scope.actors["scheduler"], reserve(scope, strong, weak))
    await commit_transitions(scope, strong, "cancel")
    assert used_on(scope, "n1") == 3000
    await commit_transitions(scope, weak, "stop", "stopped")
    assert used_on(scope, "n1") == 0


@scope_test
async def test_abandoned_reservation_is_reclaimed_after_wait(scope: Scope) -> None:
    """F19: a crash between reserve and bind."""
    (key,) = await spawn_replicas(scope, "w")
    await scope.must(scope.actors["scheduler"], reserve(scope, key))
    actor, claim = transition_claim(scope, key, "reclaim")
    assert await scope.refused(actor, claim) is Code.WAIT
    await scope.take_over()
    scope.clock.at_ms += 59_999
    assert await scope.refused(actor, claim) is Code.WAIT, "a new authority counts from its takeover"
    scope.clock.at_ms += 1
    await scope.must(actor, claim)
    assert used_on(scope, "n1") == 0


async def preempt_twice(scope: Scope) -> tuple[str, str, str]:
    """A victim that was requeued and bound again while its first preemptor waits, and was preempted by a second one."""
    (victim,) = await spawn_replicas(scope, "victim", cpu="4")
    (first,) = await spawn_replicas(scope, "zz-first", cpu="1", priority="high")
    (second,) = await spawn_replicas(scope, "aa-second", cpu="3", priority="top")
    await bind(scope, victim)
    await scope.must(scope.actors["scheduler"], reserve(scope, first, victim))
    await commit_transitions(scope, victim, "stop", "stopped", "requeue")
    await scope.must(OPERATOR, Apply(node("n1", "5", gpus=2)))
    await bind(scope, victim)
    await scope.must(scope.actors["scheduler"], reserve(scope, second, victim))
    return victim, first, second


@scope_test
async def test_victim_in_later_attempt_frees_nothing_for_first_preemptor(scope: Scope) -> None:
    victim, first, _ = await preempt_twice(scope)
    assert used_on(scope, "n1") == 5000
    await bind(scope, first)
    await commit_transitions(scope, victim, "stop", "stopped")
    assert used_on(scope, "n1") == 4000


@scope_test
async def test_victim_belongs_to_latest_preemptor_after_takeover(scope: Scope) -> None:
    """F20: otherwise the second reservation is never charged in full, and its capacity sold twice."""
    victim, _, _ = await preempt_twice(scope)
    await scope.take_over()
    await commit_transitions(scope, victim, "stop", "stopped")
    assert used_on(scope, "n1") == 4000, "1 and 3: both reservations in full"


@scope_test
async def test_victim_must_be_weaker_running_and_on_same_node(scope: Scope) -> None:
    (weak,) = await spawn_replicas(scope, "weak")
    (equal,) = await spawn_replicas(scope, "equal")
    await bind(scope, weak)
    assert await scope.refused(scope.actors["scheduler"], reserve(scope, equal, weak)) is Code.VICTIMS
    (strong,) = await spawn_replicas(scope, "strong", priority="high")
    assert await scope.refused(scope.actors["scheduler"], reserve(scope, strong, weak, on="n2")) is Code.VICTIMS
    await commit_transitions(scope, weak, "remove")
    assert await scope.refused(scope.actors["scheduler"], reserve(scope, strong, weak)) is Code.VICTIMS


@scope_test
async def test_reservation_binds_only_to_its_own_node(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    await scope.must(scope.actors["scheduler"], reserve(scope, key))
    assert await scope.refused(scope.actors["scheduler"], Bind(key, scope.at(key), "n2", T1)) is Code.INVALID


@scope_test
async def test_reserved_gang_members_bind_only_together(scope: Scope) -> None:
    """F25: a reservation is not a binding; single binds would split the gang."""
    a, b = await spawn_replicas(scope, "g", 2, gang=2)
    scheduler = scope.actors["scheduler"]
    await scope.must(scheduler, reserve(scope, a))
    await scope.must(scheduler, reserve(scope, b))
    assert await scope.refused(scheduler, Bind(a, scope.at(a), "n1", T1)) is Code.GANG_SHORT
    await scope.must(scheduler, BindGang(tuple(Bind(key, scope.at(key), "n1", T1) for key in (a, b))))
    assert [scope.phase(key) for key in (a, b)] == ["bound", "bound"]


@scope_test
async def test_gang_binds_fitting_members_if_minimum_is_met(scope: Scope) -> None:
    members = await spawn_replicas(scope, "g", 3, gang=2, cpu="2")
    binds = tuple(Bind(key, scope.at(key), "n1", T1) for key in members)
    assert await scope.must(scope.actors["scheduler"], BindGang(binds)) == [2]
    last = members[2]
    await bind(scope, last, "n2")
    assert used_on(scope, "n2") == 2000, "after the minimum is bound, a member may bind alone"


@scope_test
async def test_claim_with_uncommitted_revision_is_refused(scope: Scope) -> None:
    """Inside a batch an uncommitted change has revision -1, which no client can have seen."""
    (key,) = await spawn_replicas(scope, "w")
    scheduler = scope.actors["scheduler"]
    first, second = await scope.ask(scheduler, reserve(scope, key), Bind(key, -1, "n1", T1))
    assert isinstance(first, Accepted)
    assert isinstance(second, Refused) and second.code is Code.REVISION
    first, second = await scope.ask(scheduler, Bind(key, scope.at(key), "n1", T1), Move(key, -1, "preempt", 1))
    assert isinstance(second, Refused) and second.code is Code.REVISION


@scope_test
async def test_zone_change_of_node_counts_for_next_claim_of_batch(scope: Scope) -> None:
    apart = Placement(anti_affinity=(Affinity(label_selector={"app": "x"}, topology_key="zone"),))
    a, b = await spawn_replicas(scope, "w", 2, placement=apart, labels={"app": "x"})
    await bind(scope, a, "n1")
    moved = await scope.operation(OPERATOR, Apply(node("n1", gpus=2, zone="b")))
    into = await scope.operation(scope.actors["scheduler"], Bind(b, scope.at(b), "n2", T1))
    verdicts = await scope.send([moved, into])
    assert isinstance(verdicts, list)
    assert isinstance(verdicts[1], Refused) and verdicts[1].code is Code.ANTI_AFFINITY


@scope_test
async def test_shrunk_quota_lists_excess_and_admits_no_more(scope: Scope) -> None:
    """F27: running replicas stay charged; the sum may exceed the limit but not grow."""
    a, b, c = await spawn_replicas(scope, "w", 3, cpu="2")
    await bind(scope, a)
    await bind(scope, b)
    await scope.must(OPERATOR, Apply(tenant("t1", "3")))
    assert dict(scope.books.excess()) == {"tenant/t1": "cpu 1"}
    assert await scope.refused(scope.actors["scheduler"], Bind(c, scope.at(c), "n2", T1)) is Code.OVER_QUOTA
    await commit_transitions(scope, a, "remove", "stop", "stopped")
    assert dict(scope.books.excess()) == {}


@scope_test
async def test_shrunk_node_keeps_running_replicas_and_admits_no_more(scope: Scope) -> None:
    a, b = await spawn_replicas(scope, "w", 2, cpu="2")
    await bind(scope, a)
    await scope.must(OPERATOR, Apply(node("n1", "1")))
    assert dict(scope.books.excess()) == {"node/n1": "cpu 1"}
    assert await scope.refused(scope.actors["scheduler"], Bind(b, scope.at(b), "n1", T1)) is Code.NO_ROOM


@scope_test
async def test_refusals_follow_order_of_guards(scope: Scope) -> None:
    """Role, lease, object, revision, phase, node, fit, devices, grant."""
    (key,) = await spawn_replicas(scope, "w", cpu="9", devices=GPU)
    good = scope.actors["scheduler"]
    stale = type(good)(good.name, good.role, good.lease, good.epoch + 1)
    everything_wrong = Bind("replica/t1/none-0", 1, "n9", "tenant/t9", {"gpu-9": 1})
    assert await scope.refused(scope.actors["repair"], everything_wrong) is Code.ROLE
    assert await scope.refused(stale, everything_wrong) is Code.STALE_EPOCH
    assert await scope.refused(good, everything_wrong) is Code.NOT_FOUND
    assert await scope.refused(good, Bind(key, 1, "n9", "tenant/t9", {"gpu-9": 1})) is Code.REVISION
    at = scope.at(key)
    assert await scope.refused(good, Bind(key, at, "n9", "tenant/t9", {"gpu-9": 1})) is Code.NOT_FOUND
    assert await scope.refused(good, Bind(key, at, "n1", "tenant/t9", {"gpu-9": 1})) is Code.NO_ROOM
    await scope.must(OPERATOR, Apply(node("n1", "16", gpus=2)))
    assert await scope.refused(good, Bind(key, at, "n1", "tenant/t9", {"gpu-9": 1})) is Code.DEVICE_MISMATCH
    assert await scope.refused(good, Bind(key, at, "n1", "tenant/t9", {"gpu-0": 1000})) is Code.NOT_FOUND
    assert await scope.refused(good, Bind(key, at, "n1", "tenant/t2", {"gpu-0": 1000})) is Code.NOT_OWNER
    await bind(scope, key, devices={"gpu-0": 1000})
