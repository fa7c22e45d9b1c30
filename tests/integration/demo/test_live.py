"""Does `remit demo` hold what it shows, end by itself, and leave nothing behind? As a user would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REMIT = Path(sys.executable).parent / "remit"


def test_the_demo_runs_work_kills_a_machine_and_the_server_and_all_checks_hold(tmp_path: Path) -> None:
    """F34, F36: a node that is lost is replaced; the control plane dies at once, and what runs goes on."""
    config = tmp_path / "config.yaml"
    with tempfile.TemporaryDirectory(prefix="r-") as short:  # a socket's path may have about a hundred letters
        env = {**os.environ, "TMPDIR": short, "REMIT_CONFIG": str(config), "NO_COLOR": "1"}
        done = subprocess.run([str(REMIT), "demo"], env=env, capture_output=True, text=True, check=False, timeout=120)
        left = [place.name for place in Path(short).iterdir()]
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert re.search(r"11 of 11 checks hold\. \d+ s\.", said), said
    for name in ("service recovered", "work keeps running", "no state lost", "no process restarted", "pending job explained"):
        assert f"✓ {name}" in said
    assert not left, "it tidies up"
    assert not _processes_of(Path(short))
    assert not config.exists(), "a demo is no context"


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
