"""The scope checker detects planted defects of the authority, each under the name of its invariant."""

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
from remit.model.claims import Adopt, Apply, Bind, Code, Issue, Mark, Move, Operation, Refused, Reserve
from remit.model.kinds import Affinity, DeviceRequest, NodeHealth, Placement, Policy, PolicyAllow, PolicyRule, PolicySpec
from remit.model.kinds import Spread as SpreadTerm
from remit.model.metadata import Metadata
from remit.model.records import GrantSpec
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.simulate.checkers.quota_checks import compare_scopes
from tests.properties.authority_world import HOUR, OPERATOR, TAINTED, Scope, Violated, amounts, node, populated_scope, run
from tests.unit.commitment.authority_fixture import T1, bind, commit_transitions, slice_of, spawn_replicas

Plant = Callable[[pytest.MonkeyPatch], None]
Scenario = Callable[[Scope], Awaitable[object]]

EVERYTHING_FITS = ("placement.misfit", lambda *_: None)
ZONE_B = PolicySpec(rules=(PolicyRule(allow=PolicyAllow(zones=("b",))),))


async def overfill_node(scope: Scope) -> None:
    for key in await spawn_replicas(scope, "w", 2, cpu="3"):
        await bind(scope, key)


async def bind_device_twice(scope: Scope) -> None:
    for key in await spawn_replicas(scope, "w", 2, devices=(DeviceRequest(kind="gpu", count=1),)):
        await bind(scope, key, devices={"gpu-0": 1000})


async def exceed_quota(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w", cpu="17")
    await scope.must(OPERATOR, Apply(node("n1", "32")))
    await bind(scope, key)


async def issue_quota_from_offer(scope: Scope) -> None:
    offered = GrantSpec(holder="scheduler", amount=amounts(cpu=100), tenant="t1", purpose="offer", ttl=HOUR)
    slice_ = GrantSpec(holder="scheduler", amount=amounts(cpu=50), parent="o", tenant="t1", ttl=HOUR)
    await scope.must(scope.actors["budgets"], Issue("o", offered), Issue("q", slice_))


async def issue_over_quota(scope: Scope) -> None:
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("17")))


async def skip_phases(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key)
    await commit_transitions(scope, key, "ready")


async def move_by_other_role(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key)
    await commit_transitions(scope, key, "start", "run", "ready")
    await scope.must(scope.actors["repair"], Move(key, scope.at(key), "serve", 1))


async def bind_at_stale_epoch(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    actor = scope.actors["scheduler"]
    stale = type(actor)(actor.name, actor.role, actor.lease, actor.epoch - 1)
    await scope.must(stale, Bind(key, scope.at(key), "n1", T1))


async def bind_one_of_gang(scope: Scope) -> None:
    key, _ = await spawn_replicas(scope, "g", 2, gang=2)
    await bind(scope, key)


async def bind_before_victims_stopped(scope: Scope) -> None:
    (weak,) = await spawn_replicas(scope, "weak", cpu="1")
    (strong,) = await spawn_replicas(scope, "strong", cpu="1", priority="high")
    await bind(scope, weak)
    claim = Reserve(strong, scope.at(strong), "n1", T1, victims={weak: scope.at(weak)})
    await scope.must(scope.actors["scheduler"], claim)
    await bind(scope, strong)


async def bind_on_expired_grant(scope: Scope) -> None:
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("2", "scheduler", Duration(1_000))))
    (key,) = await spawn_replicas(scope, "w")
    scope.clock.at_ms += 2_000
    await bind(scope, key, grant="s")


async def repeat_operation_id(scope: Scope) -> None:
    operation = await scope.operation(OPERATOR, Apply(node("n1", "5")))
    await scope.send([operation])
    await scope.send([operation])


async def bind_against_policy(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(Policy(metadata=Metadata(name="p"), spec=ZONE_B)))
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key)


async def bind_past_policy_lease(scope: Scope) -> None:
    await scope.must(scope.actors["policy"], Adopt(1, {}, Duration(1_000), scope.clock.at_ms))
    (key,) = await spawn_replicas(scope, "w")
    scope.clock.at_ms += 2_000
    await bind(scope, key)


async def bind_to_tainted_node(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(node("n1", taints=(TAINTED,))))
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key)


async def bind_to_cordoned_node(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(node("n1", unschedulable=True)))
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key)


async def bind_to_unlabelled_node(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w", placement=Placement(node_selector={"disk": "ssd"}))
    await bind(scope, key)


async def bind_against_spread(scope: Scope) -> None:
    spread = Placement(topology_spread=(SpreadTerm(topology_key="zone"),))
    for key in await spawn_replicas(scope, "w", 2, placement=spread):
        await bind(scope, key)


async def bind_against_anti_affinity(scope: Scope) -> None:
    apart = Placement(anti_affinity=(Affinity(label_selector={"app": "x"}, topology_key="node"),))
    for key in await spawn_replicas(scope, "w", 2, placement=apart, labels={"app": "x"}):
        await bind(scope, key)


async def bind_against_affinity(scope: Scope) -> None:
    near = Placement(affinity=(Affinity(label_selector={"app": "y"}, topology_key="node"),))
    (key,) = await spawn_replicas(scope, "w", placement=near)
    await bind(scope, key)


async def report_result_early(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key)
    await scope.must(scope.actors["agent/n1"], Move(key, scope.at(key), "start", 1, "ok"))


async def mark_lost_from_ready(scope: Scope) -> None:
    await scope.must(scope.actors["node-lifecycle"], Mark("n1", scope.at("node/n1"), NodeHealth.LOST))


async def move_bound_replica_to_other_node(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key)
    await commit_transitions(scope, key, "start")


async def apply_refused_claim(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    await scope.ask(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1))


def _apply_and_refuse(drawn: Any, operation: Operation, claim: Bind) -> Refused:
    placement.bind(drawn, operation, claim)
    return Refused(Code.NO_ROOM, "or not")


def _move_to_other_node(drawn: Any, operation: Operation, claim: Move) -> Any:
    answer = transitions.move(drawn, operation, claim)
    replica = drawn.changes.replicas[claim.replica]
    drawn.changes.replicas[claim.replica] = replace(replica, status=replace(replica.status, node="n2"))
    return answer


BUGS: list[tuple[Scenario, str, str, Any]] = [
    (overfill_node, "node_usage_never_rises_above_capacity", *EVERYTHING_FITS),
    (bind_device_twice, "exclusive_device_has_one_owner", "placement._check_devices", lambda *_: None),
    (exceed_quota, "ledger_charges_never_rise_above_amount", "GrantLedger.shortage_for", lambda *_: None),
    (issue_over_quota, "ledger_charges_never_rise_above_amount", "GrantLedger.shortage_for", lambda *_: None),
    (issue_quota_from_offer, "quota_slices_are_part_of_own_quota", "grants._check_parent", lambda *_: None),
    (
        skip_phases,
        "phase_changes_match_lifecycle_table",
        "transitions.find_transition",
        lambda name, *_: next(r for r in TRANSITIONS if r.name == name),
    ),
    (move_by_other_role, "phase_changes_match_lifecycle_table", "transitions.OWNERS", {**OWNERS, "serve": Role.REPAIR}),
    (bind_at_stale_epoch, "accepted_operations_hold_their_lease", "decide.check_fence", lambda *_: None),
    (bind_one_of_gang, "gangs_are_bound_together", "DraftReplicas.bound_count", lambda *_: 99),
    (bind_before_victims_stopped, "reservations_are_committed_once", "placement.still_holds", lambda *_: False),
    (bind_on_expired_grant, "charges_are_on_live_grants", "placement.check_alive", lambda *_: None),
    (repeat_operation_id, "one_outcome_per_operation", "Outcomes.check_id", lambda *_: None),
    (bind_against_policy, "hard_constraints_hold_at_bind", *EVERYTHING_FITS),
    (bind_past_policy_lease, "placement_policy_is_recorded_and_in_force", "placement._is_before", lambda *_: True),
    (bind_to_tainted_node, "hard_constraints_hold_at_bind", *EVERYTHING_FITS),
    (bind_to_cordoned_node, "hard_constraints_hold_at_bind", *EVERYTHING_FITS),
    (bind_to_unlabelled_node, "hard_constraints_hold_at_bind", *EVERYTHING_FITS),
    (bind_against_spread, "hard_constraints_hold_at_bind", *EVERYTHING_FITS),
    (bind_against_anti_affinity, "hard_constraints_hold_at_bind", *EVERYTHING_FITS),
    (bind_against_affinity, "hard_constraints_hold_at_bind", *EVERYTHING_FITS),
    (report_result_early, "attempts_have_one_result", "transitions._carried_result", lambda _, claim: claim.result),
    (
        mark_lost_from_ready,
        "node_health_is_changed_by_its_owner",
        "transitions.NODE_HEALTH_TRANSITIONS",
        {(NodeHealth.READY, NodeHealth.LOST)},
    ),
    (move_bound_replica_to_other_node, "one_binding_per_attempt", "RULINGS", {Move: _move_to_other_node}),
    (apply_refused_claim, "refusals_change_nothing", "RULINGS", {Bind: _apply_and_refuse}),
]
PATCHED: dict[str, Any] = {
    "grants": grants, "placement": placement, "transitions": transitions, "decide": decide,
    "DraftReplicas": draft_replicas.DraftReplicas, "GrantLedger": ledgers.GrantLedger,
    "Outcomes": outcomes.Outcomes,
}  # fmt: skip


@pytest.mark.parametrize(("scenario", "check", "where", "bug"), BUGS, ids=[scenario.__name__ for scenario, *_ in BUGS])
def test_planted_defect_is_detected(
    scenario: Scenario, check: str, where: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_scenario() -> None:
        scope = await populated_scope()
        if where == "RULINGS":
            for claim, decider in bug.items():
                monkeypatch.setitem(RULINGS, claim, RULINGS[claim]._replace(decide=decider))
        else:
            room, name = where.split(".")
            monkeypatch.setattr(PATCHED[room], name, bug)
        with pytest.raises(Violated, match=check) as caught:
            await scenario(scope)
        assert "history of" in str(caught.value)

    run(run_scenario())


def test_scenarios_without_defect_violate_nothing() -> None:
    """Otherwise the tests above prove nothing. Here the authority refuses, which ends the scenario."""

    async def run_scenario(scenario: Scenario) -> None:
        scope = await populated_scope()
        try:
            await scenario(scope)
        except AssertionError as refused:
            assert not isinstance(refused, Violated)
        await scope.close()

    for scenario, *_ in BUGS:
        run(run_scenario(scenario))


def test_grant_held_by_two_scopes_is_detected() -> None:
    issued = {"grant/s": (1, {"spec": {"amount": {"cpu": "4"}}, "status": {"returned": {"cpu": "3"}}})}
    held = {"grant/s": (1, {"spec": {"amount": {"cpu": "2"}, "issuer": "scope/global"}})}
    assert [key for key, _ in compare_scopes(issued, held, "r1")] == ["grant/s"]
    assert amounts(cpu="2").get("cpu") == 2000
