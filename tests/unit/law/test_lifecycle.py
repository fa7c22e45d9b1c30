"""Does the lifecycle table keep what its essay promises? Every (transition, phase) pair is looked at; nothing is sampled."""

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
from remit.model.claims import Role
from remit.model.kinds import NodeHealth
from remit.model.records import Phase

P = Phase
NAMES = sorted({row.name for row in TRANSITIONS})
PLACES: list[Phase | None] = [None, *Phase]


def reach(start: Phase | None, rows: Iterable[Transition] = TRANSITIONS) -> set[Phase | None]:
    """Where one can come to from `start`, itself left out unless a path returns to it."""
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


def test_no_row_stands_twice() -> None:
    edges = [(row.name, row.source, row.target) for row in TRANSITIONS]
    assert len(set(edges)) == len(edges)


def test_only_resume_has_several_targets_from_one_phase() -> None:
    for name, source in product(NAMES, PLACES):
        rows = [row for row in TRANSITIONS if (row.name, row.source) == (name, source)]
        assert len(rows) <= 1 or name == "resume", (name, source)


def test_guards_are_all_explained_and_all_used() -> None:
    used = {guard for row in TRANSITIONS for guard in row.guards}
    assert used == set(GUARDS)
    assert all(meaning and meaning == meaning.strip() for meaning in GUARDS.values())


def test_no_row_is_unguarded__and_none_names_a_guard_twice() -> None:
    for row in TRANSITIONS:
        assert row.guards, row
        assert len(set(row.guards)) == len(row.guards), row


def test_every_row_but_the_authoritys_own_asks_for_a_lease_at_the_current_epoch() -> None:
    for row in TRANSITIONS:
        assert ("claimant" in row.guards) == (row.role is not Role.AUTHORITY), row


def test_every_move_of_something_seen_names_the_revision_that_was_seen() -> None:
    for row in TRANSITIONS:
        assert ("as_seen" in row.guards) == (row.source is not None and row.role is not Role.AUTHORITY), row


def test_an_agent_moves_only_the_current_attempt_on_its_own_node__on_fresh_evidence() -> None:
    for row in TRANSITIONS:
        mine = row.role is Role.AGENT
        assert mine == ("own_node" in row.guards) == ("attempt" in row.guards), row
        assert row.evidence_age_ms_max == (lifecycle.REPORT_AGE_MS_MAX if mine else lifecycle.SNAPSHOT_AGE_MS_MAX), row


def test_whatever_ends_an_attempt_carries_its_one_result() -> None:
    ends = {row.name for row in TRANSITIONS if "result" in row.guards}
    assert ends == {"finish", "crash", "stopped", "lose"}
    into = {P.FINISHED, P.FAILED}
    assert {row.name for row in TRANSITIONS if row.target in into} | {"stopped"} == ends


# ------------------------------------------------------------------------------------------------------------- the edges


@pytest.mark.parametrize(("name", "source"), [(name, source) for name in NAMES if name != "resume" for source in PLACES])
def test_a_pair_is_in_the_table_or_it_is_refused(name: str, source: Phase | None) -> None:
    rows = [row for row in TRANSITIONS if row.name == name and row.source == source]
    assert find_transition(name, source) == (rows[0] if rows else None)
    assert find_transition(name, source, "running") == find_transition(name, source), (
        "only resume looks at what was interrupted"
    )


@pytest.mark.parametrize(("source", "before"), list(product(PLACES, ["", "nonsense", *Phase])))
def test_resume_goes_from_unknown_back_to_the_interrupted_phase_and_nowhere_else(source: Phase | None, before: str) -> None:
    row = find_transition("resume", source, before)
    if source is P.UNKNOWN and before in ON_NODE_PHASES - {P.UNKNOWN}:
        assert row is not None and row.target == before and "was_there" in row.guards
    else:
        assert row is None


@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("name", ["", "teleport", "START", "start ", "pending"])
def test_a_name_that_no_row_has_is_refused_from_everywhere(name: str, source: Phase | None) -> None:
    assert find_transition(name, source) is None


def test_what_can_be_doubted_can_be_resumed() -> None:
    for name in ("doubt", "distrust"):
        interrupted = {row.source for row in TRANSITIONS if row.name == name}
        assert interrupted == {row.target for row in TRANSITIONS if row.name == "resume"} == ON_NODE_PHASES - {P.UNKNOWN}


# ----------------------------------------------------------------------------------------------------------- the journeys


def test_every_phase_is_reached_from_create() -> None:
    assert {row.name for row in TRANSITIONS if row.source is None} == {"create"}
    assert reach(None) == {*Phase, None}


@pytest.mark.parametrize("phase", list(Phase))
def test_from_every_phase_a_way_leads_to_released_and_then_away(phase: Phase) -> None:
    assert phase is P.RELEASED or P.RELEASED in reach(phase)
    assert None in reach(phase)


@pytest.mark.parametrize("phase", sorted(HOLDING_PHASES))
def test_a_replica_whose_agent_is_silent_for_ever_is_still_released(phase: Phase) -> None:
    without_agents = [row for row in TRANSITIONS if row.role is not Role.AGENT]
    assert P.RELEASED in reach(phase, without_agents)


@pytest.mark.parametrize("phase", sorted(PHASE_TIMEOUTS))
def test_a_wait_is_ended_by_its_own_role_with_a_transition_that_leaves_the_phase(phase: Phase) -> None:
    wait = PHASE_TIMEOUTS[phase]
    row = find_transition(wait.transition, phase)
    assert row is not None
    assert row.role is wait.role
    assert row.target is not phase
    assert wait.limit_ms >= 0


def test_the_phases_that_last_as_long_as_the_work_does_are_the_ones_without_a_wait() -> None:
    assert set(Phase) - set(PHASE_TIMEOUTS) == {P.PENDING, P.RUNNING, P.READY, P.SERVING, P.RELEASED}


def test_a_row_knows_the_wait_of_the_phase_it_leads_to() -> None:
    for row in TRANSITIONS:
        assert row.timeout == (PHASE_TIMEOUTS.get(row.target) if row.target is not None else None)


def test_following_waits_alone_ends_in_released() -> None:
    """Nobody has to do anything of their own accord for a stuck replica to give its room back."""
    for phase in PHASE_TIMEOUTS:
        at: Phase | None = phase
        steps = 0
        while at in PHASE_TIMEOUTS:
            row = find_transition(PHASE_TIMEOUTS[at].transition, at)
            assert row is not None
            at, steps = row.target, steps + 1
            assert steps <= len(PHASE_TIMEOUTS), f"waits go round in a circle from {phase}"
        assert at in (P.RELEASED, P.PENDING)


# ------------------------------------------------------------------------------------------------------------- the room


def test_every_phase_from_reserved_until_released_holds_room() -> None:
    assert set(Phase) - HOLDING_PHASES == {P.PENDING, P.RELEASED}


def test_room_is_taken_by_reserve_and_bind_alone__under_every_guard_of_a_placement() -> None:
    taking = {row.name: row for row in TRANSITIONS if row.source not in HOLDING_PHASES and row.target in HOLDING_PHASES}
    assert sorted(taking) == ["bind", "reserve"]
    for row in (*taking.values(), *(row for row in TRANSITIONS if row.name == "confirm")):
        assert {"fits", "devices", "grant", "quota", "policy"} <= set(row.guards), row


def test_room_is_freed_only_by_transitions_that_know_that_nothing_runs() -> None:
    freeing = {row.name for row in TRANSITIONS if row.source in HOLDING_PHASES and row.target not in HOLDING_PHASES}
    assert freeing == {"stopped", "release", "settle", "cancel", "unreserve", "reclaim"}


def test_what_frees_room_leaves_from_where_no_process_can_be() -> None:
    for row in TRANSITIONS:
        if row.source in HOLDING_PHASES and row.target not in HOLDING_PHASES:
            ended = row.name == "stopped" and row.role is Role.AGENT
            assert ended or row.source not in ON_NODE_PHASES, row


def test_nothing_fails_out_of_unknown_before_the_fence_has_passed() -> None:
    for row in TRANSITIONS:
        if row.source is P.UNKNOWN and row.target not in ON_NODE_PHASES:
            assert row.name == "lose" and "fence_passed" in row.guards, row


def test_start_leaves_only_from_bound__and_nothing_else_leads_to_starting_but_resume() -> None:
    assert [row.source for row in TRANSITIONS if row.name == "start"] == [P.BOUND]
    assert {row.name for row in TRANSITIONS if row.target is P.STARTING} == {"start", "resume"}


def test_the_binding_transitions_bind() -> None:
    for source, name in BINDING_TRANSITIONS.items():
        row = find_transition(name, source)
        assert row is not None and row.target is P.BOUND and row.role is Role.SCHEDULER
    assert {row.source for row in TRANSITIONS if row.target is P.BOUND} == {*BINDING_TRANSITIONS, P.UNKNOWN}


def test_on_node_phases_hold_room() -> None:
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


def test_a_node_that_was_given_up_joins_again_before_it_takes_work() -> None:
    into_ready = {source for source, target in NODE_HEALTH_TRANSITIONS if target is NodeHealth.READY}
    assert into_ready == {NodeHealth.JOINING, NodeHealth.SUSPECT}
    assert all(source is not target for source, target in NODE_HEALTH_TRANSITIONS)


@pytest.mark.parametrize("fence_ms", [0, 1, 99, 100, 30_000, 299_999, 300_000, 10**12])
def test_the_loss_of_a_node_waits_for_fence_and_kill_grace_with_room_for_drift__to_the_millisecond(fence_ms: int) -> None:
    ran_at_most = (fence_ms + timing.Timing().kill_grace_ms) * (100 + timing.DRIFT_MAX_PERCENT)
    waited = timing.lost_after_ms(fence_ms)
    assert waited * 100 >= ran_at_most > (waited - 1) * 100
