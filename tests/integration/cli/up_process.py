"""`remit up` processes on one data directory, and commands against them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remit.agent.directory import AgentDirectory

REMIT = str(Path(sys.executable).parent / "remit")
BEAT = "200ms"
SERVICE = """
apiVersion: remit/v1
kind: Workload
metadata: {name: sleeper, tenant: default}
spec:
  type: service
  replicas: 2
  template:
    command: [sleep, "3600"]
    resources: {cpu: 10m, memory: 16Mi}
    stopGrace: 1s
"""


class Ups:
    """Starts `remit up` on one data directory, and runs commands against it."""

    def __init__(self, root: Path) -> None:
        root.chmod(0o1777)  # replicas run as another user and write here
        self.data = root / "data"
        self.env = {**os.environ, "REMIT_CONFIG": str(root / "config.yaml"), "NO_COLOR": "1"}
        self._log = root / "log"
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        command = [REMIT, "up", "--data", str(self.data), "--listen", "127.0.0.1:0", "--heartbeat-interval", BEAT, *args]
        with self._log.open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=self.env, start_new_session=True)
        self._running.append(process)
        return process

    def remit(self, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [REMIT, *args], input=stdin, env=self.env, capture_output=True, text=True, check=False, timeout=60
        )

    def items(self, kind: str) -> list[Any]:
        message = self.remit("get", kind, "-o", "json")
        return list(json.loads(message.stdout)["items"]) if message.returncode == 0 and message.stdout else []

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 40
        while not holds():
            assert time.monotonic() < until, f"{what}: not in time\n{self._log.read_text()}"
            time.sleep(0.1)

    def metrics(self) -> str:
        url = (self.data / "server" / "url").read_text().strip()
        token = (self.data / "server" / "token").read_text().strip()
        request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10) as reply:
            return str(reply.read().decode())

    def ready(self, count: int) -> None:
        self.until(
            "nodes are ready", lambda: sum(item["status"].get("health") == "ready" for item in self.items("nodes")) >= count
        )

    def serving(self) -> dict[str, tuple[int, int]]:
        """Return attempt and pid of the serving replicas that nodes report."""
        message = self.remit("top", "replicas", "-o", "json")
        items_ = json.loads(message.stdout)["items"] if message.returncode == 0 and message.stdout else []
        attempts = {item["metadata"]["name"]: item["status"].get("attempt", 1) for item in self.items("replicas")}
        return {item["replica"]: (attempts[item["replica"]], item["pid"]) for item in items_ if item.get("phase") == "serving"}

    def pid(self, name: str) -> int:
        return int((self.data / "agent" / "run" / f"{name}.pid").read_text())

    def end(self) -> None:
        self.remit("down", "--data", str(self.data))
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()
        shutil.rmtree(
            AgentDirectory(self.data / "agent").work, ignore_errors=True
        )  # may be outside of the data directory, see world/process/isolation.py


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
