"""`remit demo` passes its own checks, ends by itself and leaves nothing behind, run as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REMIT = Path(sys.executable).parent / "remit"


def test_demo_survives_node_and_server_kills_and_all_checks_hold(tmp_path: Path) -> None:
    """F34, F36: a lost node is replaced; the control plane dies at once, and work runs on."""
    config = tmp_path / "config.yaml"
    with tempfile.TemporaryDirectory(prefix="r-") as short:  # a socket path is limited to about a hundred characters
        env = {**os.environ, "TMPDIR": short, "REMIT_CONFIG": str(config), "NO_COLOR": "1"}
        done = subprocess.run([str(REMIT), "demo"], env=env, capture_output=True, text=True, check=False, timeout=120)
        left = [place.name for place in Path(short).iterdir()]
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert re.search(r"11 of 11 checks hold\. \d+ s\.", output), output
    for name in ("service recovered", "work keeps running", "no state lost", "no process restarted", "pending job explained"):
        assert f"✓ {name}" in output
    assert not left, "the demo must clean up"
    assert not _processes_of(Path(short))
    assert not config.exists(), "the demo must not create a context"


def _processes_of(place: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command_line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(place) in command_line:
                found.append(command_line)
    return found
