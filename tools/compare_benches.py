"""Runs benchmarks of two checkouts alternately and prints each row's ratio of medians.

    tools/compare_benches.py ../before . --rounds 7 commit schedule
    tools/compare_benches.py ../before . --args="--quick" end-to-end

Machines change speed within minutes, so runs of the two checkouts take turns and only ratios are printed. A ratio above 1 means
that the second checkout is better. The exit code is 1 if a row's ratio is below --worst.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

HIGHER = ("jobs_per_s", "binds_per_s", "per_s")
LOWER = ("server_us", "p50_ms", "start_p50_ms", "bytes_a_replica")
LABELS = ("row", "what", "feature", "batch", "sandbox", "mode", "classes", "nodes")


def run(checkout: Path, bench: str, arguments: list[str]) -> list[dict[str, Any]]:
    command = [str(checkout / ".venv" / "bin" / "remit"), "bench", bench, "--json", *arguments]
    done = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if not lines:
        sys.exit(f"{' '.join(command)} printed nothing (exit {done.returncode})")
    return list(json.loads(lines[-1])["rows"])


def values(rows: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Values by row label and metric. Of the throughput metrics a row has, the first in `HIGHER` counts."""
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        label = " ".join(str(row[name]) for name in LABELS if name in row) or "-"
        throughput = next((name for name in HIGHER if name in row), None)
        for metric in (*([throughput] if throughput else []), *LOWER):
            if isinstance(row.get(metric), int | float) and row[metric] > 0:
                found[label, metric] = float(row[metric])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("benches", nargs="+", metavar="BENCH")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each checkout (default 7)")
    parser.add_argument("--args", default="--quick", help="arguments of each run (default --quick)")
    parser.add_argument("--worst", type=float, default=0.95, help="lowest accepted ratio (default 0.95)")
    options = parser.parse_args()
    below = 0
    for bench in options.benches:
        samples: dict[tuple[str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for round_ in range(options.rounds):
            order = (0, 1) if round_ % 2 == 0 else (1, 0)
            for side in order:
                checkout = (options.before, options.after)[side].resolve()
                for key, value in values(run(checkout, bench, options.args.split())).items():
                    samples[key][side].append(value)
            print(f"{bench}: round {round_ + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for (label, metric), (before, after) in samples.items():
            if not before or not after:
                continue
            ratio = median(before) / median(after) if metric in LOWER else median(after) / median(before)
            below += ratio < options.worst
            mark = "  below" if ratio < options.worst else ""
            print(
                f"{bench:12} {label:40} {metric:16} {median(before):12.1f} -> {median(after):12.1f}  x{ratio:.2f}{mark}",
                flush=True,
            )
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
