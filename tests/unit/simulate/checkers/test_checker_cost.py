"""Does a commit cost the same in a small scope and in a large one? Counted in calls, which no busy machine changes."""

from __future__ import annotations

import sys
from types import FrameType
from unittest import mock

from remit.simulate.checkers import judge
from tests.unit.simulate.checkers.busy_scope import crowd, lives


def calls_per_commit(nodes: int, replicas: int, grants: int) -> float:
    pen, calls, commits = crowd(nodes, replicas, grants), 0, 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and "checkers/pen" not in frame.f_code.co_filename

    with mock.patch.object(judge, "RECOUNT_EVERY", 1_000_000):
        sys.setprofile(count)
        try:
            for _ in lives(pen):
                commits += 1
        finally:
            sys.setprofile(None)
    assert pen.found == [] and commits == 4 * replicas
    return calls / commits


def test_a_commit_costs_the_same_in_a_small_scope_and_in_a_large_one() -> None:
    small, large = calls_per_commit(10, 20, 3), calls_per_commit(100, 200, 30)
    assert large < 2 * small, f"{small:.0f} calls a commit became {large:.0f}"
