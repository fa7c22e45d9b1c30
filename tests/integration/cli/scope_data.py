"""Writes the data directory of a small scope, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CLUSTER = Path(__file__).with_name("cluster.yaml")
MORE = Path(__file__).with_name("more.yaml")


def scope(data: Path, *args: str, cluster: Path = CLUSTER) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "tests.integration.stored_scope", str(data), str(cluster), *args]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def write_scope(data: Path, cluster: Path = CLUSTER) -> Path:
    owner = scope(data, cluster=cluster)
    out, _ = owner.communicate(timeout=60)
    assert owner.returncode == 0 and out.startswith("settled at"), out
    return data
