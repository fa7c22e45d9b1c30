"""Measures the CPU time that the simulator's judge adds to a commit, in a scope of 100 nodes, 300 replicas and 30 grants.

The simulator has about one millisecond for a commit, and the judge should use well below 0.3 of it. The mean includes the
recounts from scratch at every 200th commit.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path


def main() -> None:
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "src")]
    from remit.simulate.checkers.reference.history import CommitStep
    from remit.simulate.checkers.reference.past_states import CommitTimes
    from tests.unit.simulate.checkers.busy_scope import busy_scope, lifecycle_commits

    history = busy_scope()
    judge, inner = history.world.judge, history.world.judge.on_commit
    costs: list[float] = []

    def timed(scope: str, puts: object, deletes: object, revision: int, times: CommitTimes) -> CommitStep:
        began = time.process_time()
        step = inner(scope, puts, deletes, revision, times)  # type: ignore[arg-type]
        costs.append(1e6 * (time.process_time() - began))
        return step

    judge.on_commit = timed  # type: ignore[method-assign]
    gc.collect()
    operations = list(lifecycle_commits(history))
    for action in ("bind", "move"):
        found = sorted(cost for cost, did in zip(costs, operations, strict=True) if did == action)
        mean = sum(found) / len(found)
        print(f"{action}: {len(found)} commits, mean {mean:.0f} us, median {found[len(found) // 2]:.0f} us, "
              f"99th {found[int(len(found) * 0.99)]:.0f} us")  # fmt: skip
    print(f"violations: {len(judge.violations)}")


if __name__ == "__main__":
    main()
