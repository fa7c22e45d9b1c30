"""Controller loop: triggers, retries, leases, staleness (a real authority, virtual time)."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from remit.correction.framework.actions import Action, ReconcileResult, RequeueAfter
from remit.correction.framework.loop import CACHE_AGE_MS_MAX
from remit.model.claims import Accepted, Acquire, Actor, Code, Delete, Mark, RecordEvent, Refused, SetCondition
from remit.model.kinds import NodeHealth
from remit.model.metadata import Condition
from remit.model.roles import Role
from tests.properties.authority_world import HOUR
from tests.unit.correction.framework.loop_bench import CADENCE, LoopBench, loop_test


@loop_test
async def test_loop_reacts_to_changes_with_one_claim_each(r: LoopBench) -> None:
    _, _, wire, _ = r.loop()
    await r.sleep(500)
    await r.nodes("n1", "n2")
    await r.sleep(300)
    assert [await r.health(name) for name in ("n1", "n2")] == ["ready", "ready"]
    assert len(wire.claims(Mark)) == 2


@loop_test
async def test_single_change_is_reconciled_at_once(r: LoopBench) -> None:
    controller, _, _, _ = r.loop()
    await r.sleep(500)
    asked_ms = r.world.clock.now_ms()
    await r.nodes("n1")
    await r.sleep(300)
    assert [at_ms - asked_ms for key, at_ms in controller.reconciled][:1] == [0]


@loop_test
async def test_late_verdict_triggers_another_reconcile(r: LoopBench) -> None:
    """L6: the next step of a key must not wait for the next resync."""
    controller, _, wire, _ = r.loop()
    await r.sleep(500)
    wire.answer_after_ms = 50
    await r.nodes("n1")
    await r.sleep(300)
    assert await r.health("n1") == "ready"
    assert len(controller.reconciled) == 2, "the second sees the result"


@loop_test
async def test_claims_carry_evidence_and_lease(r: LoopBench) -> None:
    """S22."""
    _, _, wire, _ = r.loop()
    await r.nodes("n1")
    await r.sleep(500)
    (claimed,) = (operation for operation in wire.operations if isinstance(operation.claim, Mark))
    assert claimed.evidence.revision > 0
    assert (claimed.actor.role, claimed.actor.lease, claimed.actor.epoch) == (Role.NODES, "node-lifecycle", 1)


@loop_test
async def test_loop_resyncs_periodically_with_jitter(r: LoopBench) -> None:
    """F05: a resync recovers lost watch events."""
    controller, loop, _, _ = r.loop()
    await r.nodes("n1")
    await r.sleep(500)
    loop.cache._listeners.remove(loop)
    controller.reconciled.clear()
    await r.sleep(4 * CADENCE.resync_ms)
    assert 4 <= len(controller.reconciled) <= 8
    gaps = {later - sooner for (_, sooner), (_, later) in zip(controller.reconciled, controller.reconciled[1:], strict=False)}
    assert all(CADENCE.resync_ms * 3 // 4 <= gap <= CADENCE.resync_ms + 100 for gap in gaps)
    assert len(gaps) > 1, "jitter: instances started together do not resync together"


@loop_test
async def test_idle_loop_makes_no_claims(r: LoopBench) -> None:
    """L10."""
    _, _, wire, _ = r.loop()
    await r.nodes("n1")
    await r.sleep(500)
    before = len(wire.operations)
    await r.sleep(600_000)
    assert len(wire.operations) == before


@loop_test
async def test_one_instance_acts_and_another_takes_over(r: LoopBench) -> None:
    """L8 F33."""
    first, second = r.loop(), r.loop()
    await r.sleep(1_000)
    await r.nodes("n1")
    await r.sleep(200_000)
    acquires = len(first[2].claims(Acquire)) + len(second[2].claims(Acquire))
    assert acquires == 2, "one attempt each"
    active, passive = (first, second) if first[0].reconciled else (second, first)
    assert passive[0].reconciled == []
    active[3].cancel()
    await r.sleep(2 * CADENCE.timing.lease_ms + 5_000)
    await r.nodes("n2")
    await r.sleep(1_000)
    assert await r.health("n2") == "ready"
    assert passive[0].reconciled


@loop_test
async def test_action_outside_permissions_is_not_sent_and_reported_once(r: LoopBench) -> None:
    controller, _, wire, _ = r.loop()
    controller.more = lambda key: (Action(Delete("Node", "n1")),)
    await r.nodes("n1")
    await r.sleep(3 * CADENCE.resync_ms)
    assert wire.claims(Delete) == []
    assert await r.events() == ["UndeclaredOperation"]


@loop_test
async def test_action_undone_twice_is_reported_and_held_back(r: LoopBench) -> None:
    """Another actor marks the node suspect each time."""
    controller, _, wire, _ = r.loop()
    controller.once = "mark n1"
    await r.nodes("n1")
    for _ in range(6):
        await r.sleep(1_000)
        row = await r.store.get("node/n1")
        assert row is not None
        holder = wire.operations[-1].actor
        await r.ask(replace(holder, lease="node-lifecycle"), Mark("n1", row.revision, NodeHealth.SUSPECT))
    await r.sleep(2 * CADENCE.resync_ms)
    assert len(wire.claims(Mark)) == 2
    assert await r.events() == ["RepeatedlyUndone"]
    assert await r.health("n1") == "suspect"
    await r.sleep(CADENCE.undo_hold_ms)
    assert await r.health("n1") == "ready", "retried after a long pause"


@loop_test
async def test_unchanged_condition_is_not_sent_again(r: LoopBench) -> None:
    controller, _, wire, _ = r.loop()

    def set_condition(key: str) -> Iterable[ReconcileResult]:
        condition = Condition(type="Fine", status="True", reason="Why", last_transition=r.world.clock.wall())
        return (Action(SetCondition("Node", "n1", condition)),)

    controller.more = set_condition
    await r.nodes("n1")
    await r.sleep(5 * CADENCE.resync_ms)
    assert len(wire.claims(SetCondition)) == 1


@loop_test
async def test_requeue_after_triggers_reconcile(r: LoopBench) -> None:
    controller, _, _, _ = r.loop()
    controller.more = lambda key: (RequeueAfter(7_000),)
    await r.nodes("n1")
    await r.sleep(1_000)
    (_, at_ms) = controller.reconciled[-1]
    await r.sleep(10_000)
    assert (controller.reconciled[-1][1] - at_ms) in range(6_900, 7_100)


@loop_test
async def test_refused_action_backs_off_and_is_reported_as_stuck(r: LoopBench) -> None:
    """F32: a key that never succeeds costs only an occasional claim."""
    controller, _, wire, _ = r.loop()
    controller.more = lambda key: (Action(Mark("n1", 1, NodeHealth.LOST)),)
    await r.nodes("n1")
    await r.sleep(CADENCE.backoff.stuck_after_ms + 2 * CADENCE.backoff.slow_ms)
    assert "Stuck" in await r.events()
    before = len(wire.claims(Mark))
    assert before < 120
    await r.sleep(10 * CADENCE.backoff.slow_ms)
    assert len(wire.claims(Mark)) - before <= 20
    assert any(
        isinstance(verdict, Refused) and verdict.code is not Code.STALE_EPOCH for _, verdict in controller.verdicts if verdict
    )


@loop_test
async def test_unanswered_operations_are_resent_under_same_ids(r: LoopBench) -> None:
    """F01: redelivery; the action is applied once."""
    _, _, wire, _ = r.loop()
    await r.sleep(500)
    wire.lose = True
    await r.nodes("n1")
    await r.sleep(2_000)
    wire.lose = False
    await r.sleep(30_000)
    marks = [operation for operation in wire.operations if isinstance(operation.claim, Mark)]
    assert len(marks) > 1
    assert len({mark.id for mark in marks}) == 1
    assert await r.health("n1") == "ready"
    assert isinstance(wire.answers[-1], Accepted)


@loop_test
async def test_loop_with_stale_cache_does_not_act(r: LoopBench) -> None:
    """F04."""
    await r.nodes("n1")
    controller, _, _, _ = r.loop(frozen=True)
    await r.sleep(500)
    assert controller.reconciled
    controller.reconciled.clear()
    await r.sleep(CACHE_AGE_MS_MAX)
    before = len(controller.reconciled)
    await r.sleep(5 * CADENCE.resync_ms)
    assert len(controller.reconciled) == before


@loop_test
async def test_deposed_instance_stops_acting_at_its_epoch(r: LoopBench) -> None:
    """F15: the epoch fences late claims."""
    controller, _, wire, _ = r.loop()
    await r.nodes("n1")
    await r.sleep(500)
    usurper = Actor(wire.operations[-1].actor.name, Role.NODES)
    await r.ask(usurper, Acquire("node-lifecycle", HOUR))
    before = len(wire.operations)
    await r.nodes("n2")
    await r.sleep(1_000)
    late = [
        operation for operation in wire.operations[before:] if isinstance(operation.claim, Mark) and operation.actor.epoch == 1
    ]
    assert len(late) <= 1
    refused = [verdict for _, verdict in controller.verdicts if isinstance(verdict, Refused)]
    assert all(one.code is Code.STALE_EPOCH for one in refused)


@loop_test
async def test_events_of_loops_have_distinct_names(r: LoopBench) -> None:
    """A second instance or term must not overwrite the events of the first."""
    controller, _, wire, _ = r.loop()
    controller.more = lambda key: (Action(Delete("Node", "n1")),)
    await r.nodes("n1")
    await r.sleep(500)
    (note,) = wire.claims(RecordEvent)
    assert note.name == "node-lifecycle-1-1"
    assert note.event.source == Role.NODES
