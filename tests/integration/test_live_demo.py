"""Does `remit demo` hold what it shows, end by itself, and leave nothing behind? As a user would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REMIT = Path(sys.executable).parent / "remit"


def test_the_demo_runs_work_kills_a_machine_and_the_server_and_all_checks_hold(tmp_path: Path) -> None:
    """F34, F36: a node that is lost is replaced; the control plane dies at once, and what runs goes on."""
    env = {**os.environ, "TMPDIR": str(tmp_path), "REMIT_CONFIG": str(tmp_path / "config.yaml"), "NO_COLOR": "1"}
    done = subprocess.run([str(REMIT), "demo"], env=env, capture_output=True, text=True, check=False, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert re.search(r"11 of 11 checks hold\. \d+ s\.", said), said
    for name in ("service whole again", "work runs on", "nothing is lost", "nothing was started again", "pending is explained"):
        assert f"✓ {name}" in said
    assert not [place for place in tmp_path.iterdir() if place.name.startswith("remit-demo-")], "it tidies up"
    assert not _processes_of(tmp_path)
    assert not (tmp_path / "config.yaml").exists(), "a demo is no context"


def _processes_of(place: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(place) in words:
                found.append(words)
    return found
