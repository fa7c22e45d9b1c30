"""The judge of chaos is itself judged: what is lost, doubled or cut off in a record is found, and nothing else."""

from __future__ import annotations

import pytest

from tests.integration.chaos.job_records import Judged, Line, Stall, crowds, judge, lives, read, still_alive

pytestmark = pytest.mark.smoke

JOB = "replica/chaos/job-1-0"
SERVICE = "replica/chaos/service-0-0"


def judged(*lines: str, jobs: tuple[str, ...] = (JOB,), stalls: tuple[Stall, ...] = ()) -> Judged:
    return judge(read("\n".join(lines)), jobs=jobs, services=("replica/chaos/service-",), stalls=stalls)


def test_one_that_starts_beats_and_ends_is_well() -> None:
    assert not judged(f"10 start {JOB} u.1 n1 7", f"20 beat {JOB} u.1 n1 7", f"30 end {JOB} u.1 n1 7").broken


def test_one_that_never_ends_is_lost_and_was_cut() -> None:
    found = judged(f"10 start {JOB} u.1 n1 7", f"20 beat {JOB} u.1 n1 7")
    assert len(found.lost) == 1
    assert len(found.cut) == 1


def test_one_that_never_began_is_lost() -> None:
    assert judged().lost == [f"{JOB} never came to its end"]


def test_two_attempts_at_once_are_doubled() -> None:
    found = judged(
        f"10 start {JOB} u.1 n1 7", f"20 start {JOB} u.2 n2 8", f"25 beat {JOB} u.1 n1 7", f"30 end {JOB} u.2 n2 8",
        stalls=(Stall("n1", 0, 100),),
    )  # fmt: skip
    assert len(found.doubled) == 1
    assert not found.cut


def test_one_attempt_after_another_is_not_doubled__the_first_was_cut() -> None:
    found = judged(f"10 start {JOB} u.1 n1 7", f"15 beat {JOB} u.1 n1 7", f"20 start {JOB} u.2 n2 8", f"30 end {JOB} u.2 n2 8")
    assert not found.doubled
    assert len(found.cut) == 1


def test_one_attempt_that_is_started_twice_is_doubled__also_one_after_the_other() -> None:
    found = judged(f"10 start {JOB} u.1 n1 7", f"15 end {JOB} u.1 n1 7", f"20 start {JOB} u.1 n1 9", f"30 end {JOB} u.1 n1 9")
    assert len(found.doubled) == 1


def test_services_may_run_twice_but_are_not_cut_off() -> None:
    lines = (
        f"10 start {SERVICE} u.1 n1 7",
        f"20 start {SERVICE} u.2 n2 8",
        f"25 term {SERVICE} u.1 n1 7",
        f"30 beat {SERVICE} u.2 n2 8",
    )
    alive = Line(40, "alive", SERVICE, "u.2", "n2", 8)
    found = judge([*read("\n".join(lines)), alive], jobs=(), services=("replica/chaos/service-",), stalls=())
    assert not found.doubled
    assert len(found.cut) == 1
    assert "u.1" in found.cut[0]


def test_what_was_stalled_past_its_fence_may_be_cut__on_that_node_and_then_only() -> None:
    cut = (f"10 start {JOB} u.1 n1 7", f"50 term {JOB} u.1 n1 7", f"60 start {JOB} u.2 n2 8", f"70 end {JOB} u.2 n2 8")
    assert not judged(*cut, stalls=(Stall("n1", 40, 90),)).broken
    assert judged(*cut, stalls=(Stall("n2", 40, 90),)).cut
    assert judged(*cut, stalls=(Stall("n1", 55, 90),)).cut


def test_those_that_run_still_are_told_apart_from_those_that_were_cut() -> None:
    lines = read(f"10 start {SERVICE} u.1 n1 7\n20 beat {SERVICE} u.1 n1 7\n10 start {SERVICE} u.3 n1 9\n")
    told = still_alive(lines, frozenset({7}), 30)
    assert [one.token for one in told] == ["u.1"]
    assert {one.token: one.last for one in lives([*lines, *told])} == {"u.1": "alive", "u.3": "start"}


def test_a_keeper_that_was_killed_takes_what_is_fenced_with_it__and_no_service() -> None:
    stall = Stall("n1", 40, 90, fenced_only=True)
    cut = (f"10 start {JOB} u.1 n1 7", f"50 beat {JOB} u.1 n1 7", f"60 start {JOB} u.2 n2 8", f"70 end {JOB} u.2 n2 8")
    assert not judged(*cut, stalls=(stall,)).broken
    assert judged(f"10 start {SERVICE} u.1 n1 7", f"50 beat {SERVICE} u.1 n1 7", jobs=(), stalls=(stall,)).cut


def test_what_runs_twice_when_all_has_settled_is_told() -> None:
    lines = read(f"10 start {SERVICE} u.1 n1 7\n20 start {SERVICE} u.2 n2 8\n")
    assert crowds(lives([*lines, *still_alive(lines, frozenset({7, 8}), 30)])) == [
        f"{SERVICE} runs 2 times still: u.1 on n1, u.2 on n2"
    ]
    assert not crowds(lives([*lines, *still_alive(lines, frozenset({8}), 30)]))
