"""Prints the behaviour digest of every scenario for a few seeds, to compare two revisions.

    .venv/bin/python tools/behavior_digests.py --seeds 3 > before.txt

Each line is `scenario seed digest`. Equal files mean that both revisions committed the same rows at the same virtual times and
started and ended the same processes; texts for people may differ (see remit/simulate/behavior_digest.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from multiprocessing import get_context

from remit.simulate.scenarios import load, names
from remit.simulate.simulation import simulate


def line(task: tuple[str, int]) -> str:
    name, seed = task
    run = simulate(load(name), seed, behavior=True)
    return f"{name} {seed} {run.behavior} violations={len(run.violations)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the behaviour digest of every scenario.")
    parser.add_argument("--seeds", type=int, default=3, help="seeds per scenario (default 3)")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="only these (default: all)")
    options = parser.parse_args()
    tasks = [(name, seed) for name in options.scenarios or names() for seed in range(1, options.seeds + 1)]
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        for printed in pool.imap(line, tasks):
            print(printed, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
