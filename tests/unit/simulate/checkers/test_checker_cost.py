"""Cost of the checkers: a commit costs the same in a small and in a large scope, counted in calls."""

from __future__ import annotations

import sys
from types import FrameType
from unittest import mock

from remit.simulate.checkers import judge
from tests.unit.simulate.checkers.busy_scope import busy_scope, lifecycle_commits


def calls_per_commit(nodes: int, replicas: int, grants: int) -> float:
    history, calls, commits = busy_scope(nodes, replicas, grants), 0, 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and "checkers/history_builder" not in frame.f_code.co_filename

    with mock.patch.object(judge, "RECOUNT_EVERY", 1_000_000):
        sys.setprofile(count)
        try:
            for _ in lifecycle_commits(history):
                commits += 1
        finally:
            sys.setprofile(None)
    assert history.found == [] and commits == 4 * replicas
    return calls / commits


def test_commit_check_cost_does_not_grow_with_scope() -> None:
    small, large = calls_per_commit(10, 20, 3), calls_per_commit(100, 200, 30)
    assert large < 2 * small, f"{small:.0f} calls a commit became {large:.0f}"
