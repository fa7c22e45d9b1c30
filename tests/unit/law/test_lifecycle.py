"""Invariants of the lifecycle table, checked for every pair of transition and phase."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest

from remit.law import lifecycle, timing
from remit.law.lifecycle import (
    BINDING_TRANSITIONS,
    GUARDS,
    HOLDING_PHASES,
    NODE_HEALTH_TRANSITIONS,
    ON_NODE_PHASES,
    OWNERS,
    PHASE_TIMEOUTS,
    TRANSITIONS,
    Transition,
    find_transition,
)
from remit.model.kinds import NodeHealth
from remit.model.records import Phase
from remit.model.roles import Role

P = Phase
NAMES = sorted({row.name for row in TRANSITIONS})
PLACES: list[Phase | None] = [None, *Phase]


def reachable(start: Phase | None, rows: Iterable[Transition] = TRANSITIONS) -> set[Phase | None]:
    """Phases reachable from `start`; itself only if a path returns to it."""
    rows, found = list(rows), set[Phase | None]()
    todo = [start]
    while todo:
        at = todo.pop()
        for row in rows:
            if row.source == at and row.target not in found:
                found.add(row.target)
                todo.append(row.target)
    return found


# ------------------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("name", NAMES)
def test_every_transition_has_exactly_one_owner(name: str) -> None:
    assert {row.role for row in TRANSITIONS if row.name == name} == {OWNERS[name]}


def test_transition_table_has_no_duplicate_rows() -> None:
    edges = [(row.name, row.source, row.target) for row in TRANSITIONS]
    assert len(set(edges)) == len(edges)


def test_only_resume_has_several_targets_from_one_phase() -> None:
    for name, source in product(NAMES, PLACES):
        rows = [row for row in TRANSITIONS if (row.name, row.source) == (name, source)]
        assert len(rows) <= 1 or name == "resume", (name, source)


def test_every_guard_is_explained_and_used() -> None:
    used = {guard for row in TRANSITIONS for guard in row.guards}
    assert used == set(GUARDS)
    assert all(meaning and meaning == meaning.strip() for meaning in GUARDS.values())


def test_every_row_has_distinct_guards() -> None:
    for row in TRANSITIONS:
        assert row.guards, row
        assert len(set(row.guards)) == len(row.guards), row


def test_every_row_but_authority_rows_needs_current_lease() -> None:
    for row in TRANSITIONS:
        assert ("claimant" in row.guards) == (row.role is not Role.AUTHORITY), row


def test_every_row_on_seen_replica_checks_its_revision() -> None:
    for row in TRANSITIONS:
        assert ("as_seen" in row.guards) == (row.source is not None and row.role is not Role.AUTHORITY), row


def test_agent_rows_need_own_node_current_attempt_and_fresh_evidence() -> None:
    for row in TRANSITIONS:
        mine = row.role is Role.AGENT
        assert mine == ("own_node" in row.guards) == ("attempt" in row.guards), row
        assert row.evidence_age_ms_max == (lifecycle.REPORT_AGE_MS_MAX if mine else lifecycle.SNAPSHOT_AGE_MS_MAX), row


def test_transitions_that_end_attempt_carry_result() -> None:
    ends = {row.name for row in TRANSITIONS if "result" in row.guards}
    assert ends == {"finish", "crash", "stopped", "lose"}
    into = {P.FINISHED, P.FAILED}
    assert {row.name for row in TRANSITIONS if row.target in into} | {"stopped"} == ends


# ------------------------------------------------------------------------------------------------------------- the edges


@pytest.mark.parametrize(("name", "source"), [(name, source) for name in NAMES if name != "resume" for source in PLACES])
def test_find_transition_returns_table_row_or_none(name: str, source: Phase | None) -> None:
    rows = [row for row in TRANSITIONS if row.name == name and row.source == source]
    assert find_transition(name, source) == (rows[0] if rows else None)
    assert find_transition(name, source, "running") == find_transition(name, source), "only resume uses the interrupted phase"


@pytest.mark.parametrize(("source", "before"), list(product(PLACES, ["", "nonsense", *Phase])))
def test_resume_returns_from_unknown_to_interrupted_phase_only(source: Phase | None, before: str) -> None:
    row = find_transition("resume", source, before)
    if source is P.UNKNOWN and before in ON_NODE_PHASES - {P.UNKNOWN}:
        assert row is not None and row.target == before and "was_there" in row.guards
    else:
        assert row is None


@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("name", ["", "teleport", "START", "start ", "pending"])
def test_unknown_transition_name_is_refused_from_every_phase(name: str, source: Phase | None) -> None:
    assert find_transition(name, source) is None


def test_every_phase_that_can_become_unknown_can_resume() -> None:
    for name in ("doubt", "distrust"):
        interrupted = {row.source for row in TRANSITIONS if row.name == name}
        assert interrupted == {row.target for row in TRANSITIONS if row.name == "resume"} == ON_NODE_PHASES - {P.UNKNOWN}


# ------------------------------------------------------------------------------------------------------------- reachability


def test_every_phase_is_reached_from_create() -> None:
    assert {row.name for row in TRANSITIONS if row.source is None} == {"create"}
    assert reachable(None) == {*Phase, None}


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_leads_to_released_and_removal(phase: Phase) -> None:
    assert phase is P.RELEASED or P.RELEASED in reachable(phase)
    assert None in reachable(phase)


@pytest.mark.parametrize("phase", sorted(HOLDING_PHASES))
def test_replica_of_silent_agent_can_be_released(phase: Phase) -> None:
    without_agents = [row for row in TRANSITIONS if row.role is not Role.AGENT]
    assert P.RELEASED in reachable(phase, without_agents)


@pytest.mark.parametrize("phase", sorted(PHASE_TIMEOUTS))
def test_phase_timeout_is_ended_by_its_role_leaving_phase(phase: Phase) -> None:
    wait = PHASE_TIMEOUTS[phase]
    row = find_transition(wait.transition, phase)
    assert row is not None
    assert row.role is wait.role
    assert row.target is not phase
    assert wait.limit_ms >= 0


def test_only_waiting_for_work_phases_have_no_timeout() -> None:
    assert set(Phase) - set(PHASE_TIMEOUTS) == {P.PENDING, P.RUNNING, P.READY, P.SERVING, P.RELEASED}


def test_row_timeout_is_that_of_target_phase() -> None:
    for row in TRANSITIONS:
        assert row.timeout == (PHASE_TIMEOUTS.get(row.target) if row.target is not None else None)


def test_following_timeouts_ends_in_released_or_pending() -> None:
    """A stuck replica gives back its capacity without any action of users."""
    for phase in PHASE_TIMEOUTS:
        at: Phase | None = phase
        steps = 0
        while at in PHASE_TIMEOUTS:
            row = find_transition(PHASE_TIMEOUTS[at].transition, at)
            assert row is not None
            at, steps = row.target, steps + 1
            assert steps <= len(PHASE_TIMEOUTS), f"timeouts form a cycle from {phase}"
        assert at in (P.RELEASED, P.PENDING)


# ------------------------------------------------------------------------------------------------------------- capacity


def test_phases_from_reserved_to_released_hold_capacity() -> None:
    assert set(Phase) - HOLDING_PHASES == {P.PENDING, P.RELEASED}


def test_only_bind_and_reserve_take_capacity_under_all_placement_guards() -> None:
    taking = {row.name: row for row in TRANSITIONS if row.source not in HOLDING_PHASES and row.target in HOLDING_PHASES}
    assert sorted(taking) == ["bind", "reserve"]
    for row in (*taking.values(), *(row for row in TRANSITIONS if row.name == "confirm")):
        assert {"fits", "devices", "grant", "quota", "policy"} <= set(row.guards), row


def test_only_transitions_of_ended_replicas_free_capacity() -> None:
    freeing = {row.name for row in TRANSITIONS if row.source in HOLDING_PHASES and row.target not in HOLDING_PHASES}
    assert freeing == {"stopped", "release", "settle", "cancel", "unreserve", "reclaim"}


def test_capacity_is_freed_only_where_no_process_can_run() -> None:
    for row in TRANSITIONS:
        if row.source in HOLDING_PHASES and row.target not in HOLDING_PHASES:
            ended = row.name == "stopped" and row.role is Role.AGENT
            assert ended or row.source not in ON_NODE_PHASES, row


def test_unknown_replica_is_lost_only_after_fence() -> None:
    for row in TRANSITIONS:
        if row.source is P.UNKNOWN and row.target not in ON_NODE_PHASES:
            assert row.name == "lose" and "fence_passed" in row.guards, row


def test_starting_is_reached_only_by_start_and_resume() -> None:
    assert [row.source for row in TRANSITIONS if row.name == "start"] == [P.BOUND]
    assert {row.name for row in TRANSITIONS if row.target is P.STARTING} == {"start", "resume"}


def test_binding_transitions_lead_to_bound() -> None:
    for source, name in BINDING_TRANSITIONS.items():
        row = find_transition(name, source)
        assert row is not None and row.target is P.BOUND and row.role is Role.SCHEDULER
    assert {row.source for row in TRANSITIONS if row.target is P.BOUND} == {*BINDING_TRANSITIONS, P.UNKNOWN}


def test_on_node_phases_hold_capacity() -> None:
    assert ON_NODE_PHASES < HOLDING_PHASES


# -------------------------------------------------------------------------------------------------------------- the nodes


def healths_after(start: NodeHealth) -> set[NodeHealth]:
    found: set[NodeHealth] = set()
    todo = [start]
    while todo:
        at = todo.pop()
        for source, target in sorted(NODE_HEALTH_TRANSITIONS):
            if source == at and target not in found:
                found.add(target)
                todo.append(target)
    return found


@pytest.mark.parametrize("health", list(NodeHealth))
def test_every_health_is_reached_from_joining_and_returns_to_ready(health: NodeHealth) -> None:
    assert health in healths_after(NodeHealth.JOINING)
    assert NodeHealth.READY in healths_after(health)


def test_lost_node_rejoins_before_it_is_ready() -> None:
    into_ready = {source for source, target in NODE_HEALTH_TRANSITIONS if target is NodeHealth.READY}
    assert into_ready == {NodeHealth.JOINING, NodeHealth.SUSPECT}
    assert all(source is not target for source, target in NODE_HEALTH_TRANSITIONS)


@pytest.mark.parametrize("fence_ms", [0, 1, 99, 100, 30_000, 299_999, 300_000, 10**12])
def test_loss_wait_covers_fence_kill_grace_and_drift_exactly(fence_ms: int) -> None:
    ran_at_most = (fence_ms + timing.Timing().kill_grace_ms) * (100 + timing.DRIFT_MAX_PERCENT)
    waited = timing.lost_after_ms(fence_ms)
    assert waited * 100 >= ran_at_most > (waited - 1) * 100
