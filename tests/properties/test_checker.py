"""Would the checker notice? One planted bug at a time in the product; each must be caught, under the name of its promise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from remit.commitment import decide, draft_replicas, outcomes
from remit.commitment.rulings import grants, placement, transitions
from remit.commitment.rulings.registry import RULINGS
from remit.law import ledgers
from remit.law.lifecycle import OWNERS, TRANSITIONS
from remit.model.claims import Adopt, Apply, Bind, Code, Issue, Mark, Move, Operation, Refused, Reserve, Role
from remit.model.kinds import Affinity, DeviceRequest, NodeHealth, Placement, Policy, PolicySpec
from remit.model.kinds import Spread as SpreadTerm
from remit.model.metadata import Metadata
from remit.model.policies import PolicyAllow, PolicyRule
from remit.model.records import GrantSpec
from remit.model.resources import Duration
from remit.simulate.checkers.quota_checks import compare_scopes
from tests.properties.authority_world import HOUR, OPERATOR, TAINTED, Scope, Violated, amounts, furnished, node, run
from tests.unit.commitment.authority_fixture import T1, bind, move, slice_of, spawned

Plant = Callable[[pytest.MonkeyPatch], None]
Tale = Callable[[Scope], Awaitable[object]]

EVERYTHING_FITS = ("placing.misfit", lambda *_: None)
ZONE_B = PolicySpec(rules=(PolicyRule(allow=PolicyAllow(zones=("b",))),))


async def too_much_on_one_node(scope: Scope) -> None:
    for key in await spawned(scope, "w", 2, cpu="3"):
        await bind(scope, key)


async def one_device_twice(scope: Scope) -> None:
    for key in await spawned(scope, "w", 2, devices=(DeviceRequest(kind="gpu", count=1),)):
        await bind(scope, key, devices={"gpu-0": 1000})


async def over_quota(scope: Scope) -> None:
    (key,) = await spawned(scope, "w", cpu="17")
    await scope.must(OPERATOR, Apply(node("n1", "32")))
    await bind(scope, key)


async def quota_of_an_offer(scope: Scope) -> None:
    offered = GrantSpec(holder="scheduler", amount=amounts(cpu=100), tenant="t1", purpose="offer", ttl=HOUR)
    slice_ = GrantSpec(holder="scheduler", amount=amounts(cpu=50), parent="o", tenant="t1", ttl=HOUR)
    await scope.must(scope.actors["budgets"], Issue("o", offered), Issue("q", slice_))


async def over_granted(scope: Scope) -> None:
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("17")))


async def out_of_phase(scope: Scope) -> None:
    (key,) = await spawned(scope, "w")
    await bind(scope, key)
    await move(scope, key, "ready")


async def by_another_role(scope: Scope) -> None:
    (key,) = await spawned(scope, "w")
    await bind(scope, key)
    await move(scope, key, "start", "run", "ready")
    await scope.must(scope.actors["repair"], Move(key, scope.at(key), "serve", 1))


async def with_a_stale_epoch(scope: Scope) -> None:
    (key,) = await spawned(scope, "w")
    actor = scope.actors["scheduler"]
    stale = type(actor)(actor.name, actor.role, actor.lease, actor.epoch - 1)
    await scope.must(stale, Bind(key, scope.at(key), "n1", T1))


async def one_of_a_gang(scope: Scope) -> None:
    key, _ = await spawned(scope, "g", 2, gang=2)
    await bind(scope, key)


async def before_the_victims_went(scope: Scope) -> None:
    (weak,) = await spawned(scope, "weak", cpu="1")
    (strong,) = await spawned(scope, "strong", cpu="1", priority="high")
    await bind(scope, weak)
    claim = Reserve(strong, scope.at(strong), "n1", T1, victims={weak: scope.at(weak)})
    await scope.must(scope.actors["scheduler"], claim)
    await bind(scope, strong)


async def on_an_expired_grant(scope: Scope) -> None:
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("2", "scheduler", Duration(1_000))))
    (key,) = await spawned(scope, "w")
    scope.clock.at_ms += 2_000
    await bind(scope, key, grant="s")


async def the_same_id_again(scope: Scope) -> None:
    operation = await scope.operation(OPERATOR, Apply(node("n1", "5")))
    await scope.send([operation])
    await scope.send([operation])


async def against_the_policy(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(Policy(metadata=Metadata(name="p"), spec=ZONE_B)))
    (key,) = await spawned(scope, "w")
    await bind(scope, key)


async def past_the_policys_lease(scope: Scope) -> None:
    await scope.must(scope.actors["policy"], Adopt(1, {}, Duration(1_000), scope.clock.at_ms))
    (key,) = await spawned(scope, "w")
    scope.clock.at_ms += 2_000
    await bind(scope, key)


async def on_a_tainted_node(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(node("n1", taints=(TAINTED,))))
    (key,) = await spawned(scope, "w")
    await bind(scope, key)


async def on_a_cordoned_node(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(node("n1", unschedulable=True)))
    (key,) = await spawned(scope, "w")
    await bind(scope, key)


async def on_the_wrong_labels(scope: Scope) -> None:
    (key,) = await spawned(scope, "w", placement=Placement(node_selector={"disk": "ssd"}))
    await bind(scope, key)


async def against_the_spread(scope: Scope) -> None:
    spread = Placement(topology_spread=(SpreadTerm(topology_key="zone"),))
    for key in await spawned(scope, "w", 2, placement=spread):
        await bind(scope, key)


async def too_near(scope: Scope) -> None:
    apart = Placement(anti_affinity=(Affinity(label_selector={"app": "x"}, topology_key="node"),))
    for key in await spawned(scope, "w", 2, placement=apart, labels={"app": "x"}):
        await bind(scope, key)


async def too_far(scope: Scope) -> None:
    near = Placement(affinity=(Affinity(label_selector={"app": "y"}, topology_key="node"),))
    (key,) = await spawned(scope, "w", placement=near)
    await bind(scope, key)


async def a_result_on_the_way(scope: Scope) -> None:
    (key,) = await spawned(scope, "w")
    await bind(scope, key)
    await scope.must(scope.actors["agent/n1"], Move(key, scope.at(key), "start", 1, "ok"))


async def marked_across_the_table(scope: Scope) -> None:
    await scope.must(scope.actors["node-lifecycle"], Mark("n1", scope.at("node/n1"), NodeHealth.LOST))


async def bound_and_moved_elsewhere(scope: Scope) -> None:
    (key,) = await spawned(scope, "w")
    await bind(scope, key)
    await move(scope, key, "start")


async def refused_and_done(scope: Scope) -> None:
    (key,) = await spawned(scope, "w")
    await scope.ask(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1))


def _written_then_refused(drawn: Any, operation: Operation, claim: Bind) -> Refused:
    placement.bind(drawn, operation, claim)
    return Refused(Code.NO_ROOM, "or not")


def _moved_and_carried_off(drawn: Any, operation: Operation, claim: Move) -> Any:
    answer = transitions.move(drawn, operation, claim)
    replica = drawn.changes.replicas[claim.replica]
    drawn.changes.replicas[claim.replica] = replace(replica, status=replace(replica.status, node="n2"))
    return answer


BUGS: list[tuple[Tale, str, str, Any]] = [
    (too_much_on_one_node, "node_sums_never_rise_above_capacity", *EVERYTHING_FITS),
    (one_device_twice, "exclusive_device_has_one_owner", "placing._check_devices", lambda *_: None),
    (over_quota, "ledgers_never_rise_above_amount", "GrantLedger.shortage_for", lambda *_: None),
    (over_granted, "ledgers_never_rise_above_amount", "GrantLedger.shortage_for", lambda *_: None),
    (quota_of_an_offer, "quota_comes_from_quota", "granting._check_parent", lambda *_: None),
    (
        out_of_phase,
        "phases_move_along_edges",
        "moving.find_transition",
        lambda name, *_: next(r for r in TRANSITIONS if r.name == name),
    ),
    (by_another_role, "phases_move_along_edges", "moving.OWNERS", {**OWNERS, "serve": Role.REPAIR}),
    (with_a_stale_epoch, "accepted_entries_held_their_lease", "decide.check_fence", lambda *_: None),
    (one_of_a_gang, "gangs_are_bound_together", "DraftReplicas.bound_count", lambda *_: 99),
    (before_the_victims_went, "reservations_are_committed_once", "placing.still_holds", lambda *_: False),
    (on_an_expired_grant, "draws_are_on_living_grants", "placing.check_alive", lambda *_: None),
    (the_same_id_again, "one_outcome_per_operation", "Outcomes.check_id", lambda *_: None),
    (against_the_policy, "hard_constraints_hold_at_the_bind", *EVERYTHING_FITS),
    (past_the_policys_lease, "policy_in_force_is_recorded_and_alive", "placing._is_before", lambda *_: True),
    (on_a_tainted_node, "hard_constraints_hold_at_the_bind", *EVERYTHING_FITS),
    (on_a_cordoned_node, "hard_constraints_hold_at_the_bind", *EVERYTHING_FITS),
    (on_the_wrong_labels, "hard_constraints_hold_at_the_bind", *EVERYTHING_FITS),
    (against_the_spread, "hard_constraints_hold_at_the_bind", *EVERYTHING_FITS),
    (too_near, "hard_constraints_hold_at_the_bind", *EVERYTHING_FITS),
    (too_far, "hard_constraints_hold_at_the_bind", *EVERYTHING_FITS),
    (a_result_on_the_way, "attempts_have_one_result", "moving._carried_result", lambda _, claim: claim.result),
    (
        marked_across_the_table,
        "node_health_moves_by_its_owner",
        "moving.NODE_HEALTH_TRANSITIONS",
        {(NodeHealth.READY, NodeHealth.LOST)},
    ),
    (bound_and_moved_elsewhere, "one_binding_per_attempt", "RULINGS", {Move: _moved_and_carried_off}),
    (refused_and_done, "refusals_change_nothing", "RULINGS", {Bind: _written_then_refused}),
]
PLACES: dict[str, Any] = {
    "granting": grants, "placing": placement, "moving": transitions, "decide": decide,
    "DraftReplicas": draft_replicas.DraftReplicas, "GrantLedger": ledgers.GrantLedger,
    "Outcomes": outcomes.Outcomes,
}  # fmt: skip


@pytest.mark.parametrize(("tale", "promise", "where", "bug"), BUGS, ids=[tale.__name__ for tale, *_ in BUGS])
def test_a_planted_bug_is_caught(tale: Tale, promise: str, where: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell() -> None:
        scope = await furnished()
        if where == "RULINGS":
            for claim, decider in bug.items():
                monkeypatch.setitem(RULINGS, claim, RULINGS[claim]._replace(decide=decider))
        else:
            room, name = where.split(".")
            monkeypatch.setattr(PLACES[room], name, bug)
        with pytest.raises(Violated, match=promise) as caught:
            await tale(scope)
        assert "history of" in str(caught.value)

    run(tell())


def test_without_the_bugs_none_of_these_tales_is_a_violation() -> None:
    """Else the tests above would show nothing. Here the authority refuses, and the tale ends with that."""

    async def tell(tale: Tale) -> None:
        scope = await furnished()
        try:
            await tale(scope)
        except AssertionError as refused:
            assert not isinstance(refused, Violated)
        await scope.close()

    for tale, *_ in BUGS:
        run(tell(tale))


def test_a_grant_in_two_hands_is_caught() -> None:
    issued = {"grant/s": (1, {"spec": {"amount": {"cpu": "4"}}, "status": {"returned": {"cpu": "3"}}})}
    held = {"grant/s": (1, {"spec": {"amount": {"cpu": "2"}, "issuer": "scope/global"}})}
    assert [key for key, _ in compare_scopes(issued, held, "r1")] == ["grant/s"]
    assert amounts(cpu="2").get("cpu") == 2000
