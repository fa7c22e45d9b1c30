"""The judge of chaos runs finds lost, doubled and cut-off jobs in records, and nothing else."""

from __future__ import annotations

import pytest

from tests.integration.chaos.job_records import Line, Stall, Verdict, duplicates, judge, process_lives, read, still_alive

pytestmark = pytest.mark.smoke

JOB = "replica/chaos/job-1-0"
SERVICE = "replica/chaos/service-0-0"


def verdict_on(*lines: str, jobs: tuple[str, ...] = (JOB,), stalls: tuple[Stall, ...] = ()) -> Verdict:
    return judge(read("\n".join(lines)), jobs=jobs, services=("replica/chaos/service-",), stalls=stalls)


def test_job_that_starts_and_ends_is_no_violation() -> None:
    assert not verdict_on(f"10 start {JOB} u.1 n1 7", f"20 beat {JOB} u.1 n1 7", f"30 end {JOB} u.1 n1 7").broken


def test_job_that_never_ends_is_lost_and_cut() -> None:
    found = verdict_on(f"10 start {JOB} u.1 n1 7", f"20 beat {JOB} u.1 n1 7")
    assert len(found.lost) == 1
    assert len(found.cut) == 1


def test_job_that_never_starts_is_lost() -> None:
    assert verdict_on().lost == [f"{JOB} never came to its end"]


def test_two_concurrent_attempts_are_doubled() -> None:
    found = verdict_on(
        f"10 start {JOB} u.1 n1 7", f"20 start {JOB} u.2 n2 8", f"25 beat {JOB} u.1 n1 7", f"30 end {JOB} u.2 n2 8",
        stalls=(Stall("n1", 0, 100),),
    )  # fmt: skip
    assert len(found.doubled) == 1
    assert not found.cut


def test_consecutive_attempts_are_not_doubled_but_first_is_cut() -> None:
    found = verdict_on(
        f"10 start {JOB} u.1 n1 7", f"15 beat {JOB} u.1 n1 7", f"20 start {JOB} u.2 n2 8", f"30 end {JOB} u.2 n2 8"
    )
    assert not found.doubled
    assert len(found.cut) == 1


def test_attempt_started_twice_is_doubled_even_consecutively() -> None:
    found = verdict_on(
        f"10 start {JOB} u.1 n1 7", f"15 end {JOB} u.1 n1 7", f"20 start {JOB} u.1 n1 9", f"30 end {JOB} u.1 n1 9"
    )
    assert len(found.doubled) == 1


def test_services_may_run_twice_but_not_be_cut() -> None:
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


def test_work_stalled_past_its_fence_may_be_cut_on_that_node_only() -> None:
    cut = (f"10 start {JOB} u.1 n1 7", f"50 term {JOB} u.1 n1 7", f"60 start {JOB} u.2 n2 8", f"70 end {JOB} u.2 n2 8")
    assert not verdict_on(*cut, stalls=(Stall("n1", 40, 90),)).broken
    assert verdict_on(*cut, stalls=(Stall("n2", 40, 90),)).cut
    assert verdict_on(*cut, stalls=(Stall("n1", 55, 90),)).cut


def test_running_processes_are_not_cut() -> None:
    lines = read(f"10 start {SERVICE} u.1 n1 7\n20 beat {SERVICE} u.1 n1 7\n10 start {SERVICE} u.3 n1 9\n")
    alive = still_alive(lines, frozenset({7}), 30)
    assert [one.token for one in alive] == ["u.1"]
    assert {one.token: one.last for one in process_lives([*lines, *alive])} == {"u.1": "alive", "u.3": "start"}


def test_killed_keeper_excuses_cut_of_fenced_work_but_not_services() -> None:
    stall = Stall("n1", 40, 90, fenced_only=True)
    cut = (f"10 start {JOB} u.1 n1 7", f"50 beat {JOB} u.1 n1 7", f"60 start {JOB} u.2 n2 8", f"70 end {JOB} u.2 n2 8")
    assert not verdict_on(*cut, stalls=(stall,)).broken
    assert verdict_on(f"10 start {SERVICE} u.1 n1 7", f"50 beat {SERVICE} u.1 n1 7", jobs=(), stalls=(stall,)).cut


def test_replica_running_twice_after_settling_is_duplicate() -> None:
    lines = read(f"10 start {SERVICE} u.1 n1 7\n20 start {SERVICE} u.2 n2 8\n")
    assert duplicates(process_lives([*lines, *still_alive(lines, frozenset({7, 8}), 30)])) == [
        f"{SERVICE} runs 2 times still: u.1 on n1, u.2 on n2"
    ]
    assert not duplicates(process_lives([*lines, *still_alive(lines, frozenset({8}), 30)]))
