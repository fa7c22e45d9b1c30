"""Does room that is promised stay promised, and is nothing promised twice? Reservations, victims, gangs, shrinking limits."""

from __future__ import annotations

from remit.model.claims import Accepted, Apply, Bind, BindGang, Code, Forget, Move, Refused, Reserve, Spawn
from remit.model.kinds import Affinity, DeviceRequest, Placement
from tests.properties.authority_world import OPERATOR, USER, Scope, node, story, tenant, workload
from tests.unit.commitment.authority_fixture import T1, bind, held, move, moving, spawned

GPU = (DeviceRequest(kind="gpu", count=1),)


def reserve(scope: Scope, key: str, *victims: str, on: str = "n1", devices: dict[str, int] | None = None) -> Reserve:
    return Reserve(key, scope.at(key), on, T1, devices or {}, victims={victim: scope.at(victim) for victim in victims})


@story
async def test_a_reservation_posts_what_its_victims_will_not_free(scope: Scope) -> None:
    """4 cpu: the victim holds 3, the preemptor needs 4; together never more than 4, and nobody else gets in."""
    (weak,) = await spawned(scope, "weak", cpu="3")
    (strong,) = await spawned(scope, "strong", cpu="4", priority="high")
    (other,) = await spawned(scope, "other", cpu="1")
    await bind(scope, weak)
    await scope.must(scope.actors["scheduler"], reserve(scope, strong, weak))
    assert held(scope, "n1") == 4000
    assert scope.phase(weak) == "draining"
    assert await scope.refused(scope.actors["scheduler"], Bind(other, scope.at(other), "n1", T1)) is Code.NO_ROOM
    assert await scope.refused(scope.actors["scheduler"], Bind(strong, scope.at(strong), "n1", T1)) is Code.VICTIMS
    await move(scope, weak, "stop")
    assert held(scope, "n1") == 4000, "F38: stopping frees nothing"
    await move(scope, weak, "stopped")
    assert held(scope, "n1") == 4000, "what the victim freed is its preemptor's"
    assert await scope.refused(scope.actors["scheduler"], Bind(other, scope.at(other), "n1", T1)) is Code.NO_ROOM
    await bind(scope, strong)
    assert held(scope, "n1") == 4000


@story
async def test_a_victim_is_told_by_whom_only_if_that_is_of_its_tenant(scope: Scope) -> None:
    (weak,) = await spawned(scope, "weak", cpu="3")
    (strong,) = await spawned(scope, "strong", cpu="4", priority="high")
    await bind(scope, weak)
    await scope.must(scope.actors["scheduler"], reserve(scope, strong, weak))
    assert scope.row(weak)["status"]["reason"] == f"preempted by {strong}"
    (mine,) = await spawned(scope, "mine", cpu="3")
    await bind(scope, mine, "n2")
    await scope.must(USER, Apply(workload("zebra", cpu="4", priority="high", replicas=1, owner="t2")))
    await scope.must(scope.actors["workloads"], Spawn("t2", "zebra", 1, 0, 1))
    there = "replica/t2/zebra-0"
    claim = Reserve(there, scope.at(there), "n2", "tenant/t2", victims={mine: scope.at(mine)})
    await scope.must(scope.actors["scheduler"], claim)
    assert scope.row(mine)["status"]["reason"] == "preempted by a replica of another tenant with priority 100"


@story
async def test_victims_that_free_more_than_is_needed_leave_the_rest_to_others(scope: Scope) -> None:
    weak = await spawned(scope, "weak", 2, cpu="2")
    (strong,) = await spawned(scope, "strong", cpu="3", priority="high")
    for key in weak:
        await bind(scope, key)
    await scope.must(scope.actors["scheduler"], reserve(scope, strong, *weak))
    assert held(scope, "n1") == 4000
    await move(scope, weak[0], "stop", "stopped")
    assert held(scope, "n1") == 3000, "2 still held by a victim, 1 by the reservation"
    await move(scope, weak[1], "stop", "stopped")
    assert held(scope, "n1") == 3000


@story
async def test_a_victim_that_comes_again_under_its_name_is_no_victim(scope: Scope) -> None:
    """F24: forgotten, and spawned anew, it is in its first attempt again; but nobody waits for that one."""
    workloads = scope.actors["workloads"]
    (weak,) = await spawned(scope, "weak", cpu="3")
    (strong,) = await spawned(scope, "strong", cpu="4", priority="high")
    await bind(scope, weak)
    await scope.must(scope.actors["scheduler"], reserve(scope, strong, weak))
    await move(scope, weak, "stop", "stopped")
    await scope.must(workloads, Forget(weak, scope.at(weak)))
    await scope.must(workloads, Spawn("t1", "weak", 1, 0, 1))
    await bind(scope, weak, "n2")
    assert (held(scope, "n1"), held(scope, "n2")) == (4000, 3000)
    await bind(scope, strong)
    assert (held(scope, "n1"), held(scope, "n2")) == (4000, 3000)
    await move(scope, weak, "remove", "stop", "stopped")
    assert (held(scope, "n1"), held(scope, "n2")) == (4000, 0)


@story
async def test_a_device_passes_from_victim_to_preemptor_and_to_nobody_between(scope: Scope) -> None:
    (weak,) = await spawned(scope, "weak", devices=GPU, cpu="1")
    (strong,) = await spawned(scope, "strong", devices=GPU, cpu="1", priority="high")
    (third,) = await spawned(scope, "third", devices=GPU, cpu="1", priority="top")
    await bind(scope, weak, devices={"gpu-0": 1000})
    await scope.must(scope.actors["scheduler"], reserve(scope, strong, weak, devices={"gpu-0": 1000}))
    taking = Bind(third, scope.at(third), "n1", T1, {"gpu-0": 1000})
    assert await scope.refused(scope.actors["scheduler"], taking) is Code.DEVICE_TAKEN
    await move(scope, weak, "stop", "stopped")
    assert await scope.refused(scope.actors["scheduler"], taking) is Code.DEVICE_TAKEN
    await bind(scope, strong, devices={"gpu-0": 1000})
    await bind(scope, third, devices={"gpu-1": 1000})


@story
async def test_a_reservation_that_is_given_up_leaves_its_victims_draining_and_the_room_free(scope: Scope) -> None:
    """F24: the preemptor goes, and its reservation with it."""
    (weak,) = await spawned(scope, "weak", cpu="3")
    (strong,) = await spawned(scope, "strong", cpu="4", priority="high")
    await bind(scope, weak)
    await scope.must(scope.actors["scheduler"], reserve(scope, strong, weak))
    await move(scope, strong, "cancel")
    assert held(scope, "n1") == 3000
    await move(scope, weak, "stop", "stopped")
    assert held(scope, "n1") == 0


@story
async def test_a_reservation_left_behind_is_reclaimed_after_its_wait(scope: Scope) -> None:
    """F19: a crash between reserving and binding."""
    (key,) = await spawned(scope, "w")
    await scope.must(scope.actors["scheduler"], reserve(scope, key))
    actor, claim = moving(scope, key, "reclaim")
    assert await scope.refused(actor, claim) is Code.WAIT
    await scope.take_over()
    scope.clock.at_ms += 59_999
    assert await scope.refused(actor, claim) is Code.WAIT, "a new authority counts from its takeover"
    scope.clock.at_ms += 1
    await scope.must(actor, claim)
    assert held(scope, "n1") == 0


async def twice_preempted(scope: Scope) -> tuple[str, str, str]:
    """A victim that was queued again and bound again while its first patron still waits, and preempted by a second one."""
    (victim,) = await spawned(scope, "victim", cpu="4")
    (first,) = await spawned(scope, "zz-first", cpu="1", priority="high")
    (second,) = await spawned(scope, "aa-second", cpu="3", priority="top")
    await bind(scope, victim)
    await scope.must(scope.actors["scheduler"], reserve(scope, first, victim))
    await move(scope, victim, "stop", "stopped", "requeue")
    await scope.must(OPERATOR, Apply(node("n1", "5", gpus=2)))
    await bind(scope, victim)
    await scope.must(scope.actors["scheduler"], reserve(scope, second, victim))
    return victim, first, second


@story
async def test_a_victim_in_a_later_attempt_is_no_longer_the_first_patrons(scope: Scope) -> None:
    victim, first, _ = await twice_preempted(scope)
    assert held(scope, "n1") == 5000
    await bind(scope, first)
    await move(scope, victim, "stop", "stopped")
    assert held(scope, "n1") == 4000


@story
async def test_after_a_takeover_a_victim_still_belongs_to_its_latest_patron(scope: Scope) -> None:
    """F20: else the second reservation would never be counted in full, and the room be sold twice."""
    victim, _, _ = await twice_preempted(scope)
    await scope.take_over()
    await move(scope, victim, "stop", "stopped")
    assert held(scope, "n1") == 4000, "1 and 3: both reservations in full"


@story
async def test_victims_are_weaker_on_that_node_and_still_running(scope: Scope) -> None:
    (weak,) = await spawned(scope, "weak")
    (equal,) = await spawned(scope, "equal")
    await bind(scope, weak)
    assert await scope.refused(scope.actors["scheduler"], reserve(scope, equal, weak)) is Code.VICTIMS
    (strong,) = await spawned(scope, "strong", priority="high")
    assert await scope.refused(scope.actors["scheduler"], reserve(scope, strong, weak, on="n2")) is Code.VICTIMS
    await move(scope, weak, "remove")
    assert await scope.refused(scope.actors["scheduler"], reserve(scope, strong, weak)) is Code.VICTIMS


@story
async def test_a_reservation_is_bound_as_it_was_made_or_not_at_all(scope: Scope) -> None:
    (key,) = await spawned(scope, "w")
    await scope.must(scope.actors["scheduler"], reserve(scope, key))
    assert await scope.refused(scope.actors["scheduler"], Bind(key, scope.at(key), "n2", T1)) is Code.INVALID


@story
async def test_reserved_members_of_a_gang_are_bound_together_too(scope: Scope) -> None:
    """F25: a reservation is not a binding; one by one they would break the gang's promise."""
    a, b = await spawned(scope, "g", 2, gang=2)
    scheduler = scope.actors["scheduler"]
    await scope.must(scheduler, reserve(scope, a))
    await scope.must(scheduler, reserve(scope, b))
    assert await scope.refused(scheduler, Bind(a, scope.at(a), "n1", T1)) is Code.GANG_SHORT
    await scope.must(scheduler, BindGang(tuple(Bind(key, scope.at(key), "n1", T1) for key in (a, b))))
    assert [scope.phase(key) for key in (a, b)] == ["bound", "bound"]


@story
async def test_a_gang_binds_what_fits_of_it_if_that_is_enough(scope: Scope) -> None:
    members = await spawned(scope, "g", 3, gang=2, cpu="2")
    binds = tuple(Bind(key, scope.at(key), "n1", T1) for key in members)
    assert await scope.must(scope.actors["scheduler"], BindGang(binds)) == [2]
    last = members[2]
    await bind(scope, last, "n2")
    assert held(scope, "n2") == 2000, "once the gang stands, a straggler may join alone"


@story
async def test_a_claim_cannot_name_the_revision_of_what_is_not_committed_yet(scope: Scope) -> None:
    """`at: -1` is what an uncommitted change looks like from inside; from outside it is seen by nobody."""
    (key,) = await spawned(scope, "w")
    scheduler = scope.actors["scheduler"]
    first, second = await scope.ask(scheduler, reserve(scope, key), Bind(key, -1, "n1", T1))
    assert isinstance(first, Accepted)
    assert isinstance(second, Refused) and second.code is Code.REVISION
    first, second = await scope.ask(scheduler, Bind(key, scope.at(key), "n1", T1), Move(key, -1, "preempt", 1))
    assert isinstance(second, Refused) and second.code is Code.REVISION


@story
async def test_a_node_that_moves_zone_is_counted_there_by_the_next_claim_of_the_same_batch(scope: Scope) -> None:
    apart = Placement(anti_affinity=(Affinity(label_selector={"app": "x"}, topology_key="zone"),))
    a, b = await spawned(scope, "w", 2, placement=apart, labels={"app": "x"})
    await bind(scope, a, "n1")
    moved = await scope.operation(OPERATOR, Apply(node("n1", gpus=2, zone="b")))
    into = await scope.operation(scope.actors["scheduler"], Bind(b, scope.at(b), "n2", T1))
    verdicts = await scope.send([moved, into])
    assert isinstance(verdicts, list)
    assert isinstance(verdicts[1], Refused) and verdicts[1].code is Code.ANTI_AFFINITY


@story
async def test_a_quota_that_shrinks_lists_its_excess_and_admits_nothing_more(scope: Scope) -> None:
    """F27: what runs stays charged; the sum may stand above the limit, and may not grow."""
    a, b, c = await spawned(scope, "w", 3, cpu="2")
    await bind(scope, a)
    await bind(scope, b)
    await scope.must(OPERATOR, Apply(tenant("t1", "3")))
    assert dict(scope.books.excess()) == {"tenant/t1": "cpu 1"}
    assert await scope.refused(scope.actors["scheduler"], Bind(c, scope.at(c), "n2", T1)) is Code.OVER_QUOTA
    await move(scope, a, "remove", "stop", "stopped")
    assert dict(scope.books.excess()) == {}


@story
async def test_a_node_that_shrinks_keeps_what_runs_and_takes_nothing_more(scope: Scope) -> None:
    a, b = await spawned(scope, "w", 2, cpu="2")
    await bind(scope, a)
    await scope.must(OPERATOR, Apply(node("n1", "1")))
    assert dict(scope.books.excess()) == {"node/n1": "cpu 1"}
    assert await scope.refused(scope.actors["scheduler"], Bind(b, scope.at(b), "n1", T1)) is Code.NO_ROOM


@story
async def test_refusals_come_in_the_order_of_the_guards(scope: Scope) -> None:
    """Role, lease, the object, its revision, its phase, the node, the fit, the devices, the grant."""
    (key,) = await spawned(scope, "w", cpu="9", devices=GPU)
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
