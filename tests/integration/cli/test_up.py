"""Does `remit up` run work, outlive a kill, say when it runs already, and leave nothing behind? Real processes throughout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
    """`remit up` on one directory, started as often as a test wants."""

    def __init__(self, root: Path) -> None:
        root.chmod(0o1777)  # work runs as somebody else, and leaves its marks here
        self.data = root / "data"
        self.env = {**os.environ, "REMIT_CONFIG": str(root / "config.yaml"), "NO_COLOR": "1"}
        self._log = root / "log"
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [REMIT, "up", "--data", str(self.data), "--listen", "127.0.0.1:0", "--beat", BEAT, *words]
        with self._log.open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=self.env, start_new_session=True)
        self._running.append(process)
        return process

    def remit(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [REMIT, *words], input=stdin, env=self.env, capture_output=True, text=True, check=False, timeout=60
        )

    def items(self, kind: str) -> list[Any]:
        done = self.remit("get", kind, "-o", "json")
        return list(json.loads(done.stdout)["items"]) if done.returncode == 0 and done.stdout else []

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 40
        while not holds():
            assert time.monotonic() < until, f"{what}: not in time\n{self._log.read_text()}"
            time.sleep(0.1)

    def ready(self, count: int) -> None:
        self.until(
            "nodes are ready", lambda: sum(one["status"].get("health") == "ready" for one in self.items("nodes")) >= count
        )

    def serving(self) -> dict[str, tuple[int, int]]:
        """Of each replica that its node tells of: its attempt and its process."""
        done = self.remit("top", "replicas", "-o", "json")
        found = json.loads(done.stdout)["items"] if done.returncode == 0 and done.stdout else []
        attempts = {one["metadata"]["name"]: one["status"].get("attempt", 1) for one in self.items("replicas")}
        return {one["replica"]: (attempts[one["replica"]], one["pid"]) for one in found if one.get("phase") == "serving"}

    def pid(self, which: str) -> int:
        return int((self.data / "agent" / "run" / f"{which}.pid").read_text())

    def end(self) -> None:
        self.remit("down", "--data", str(self.data))
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()
        shutil.rmtree(
            AgentDirectory(self.data / "agent").work, ignore_errors=True
        )  # they may be elsewhere: world/process/isolation.py


@pytest.fixture
def ups(tmp_path: Path) -> Iterator[Ups]:
    found = Ups(tmp_path)
    try:
        yield found
    finally:
        found.end()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_killed_and_started_again__what_runs_is_the_same_and_down_leaves_nothing(ups: Ups) -> None:
    """F36, F20: all of the control plane dies at once, and resumes from what is stored; the work never noticed."""
    first = ups.start("--nodes", "2")
    ups.until("the context is there", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    ups.ready(2)
    assert ups.remit("apply", "-f", "-", "--wait", stdin=SERVICE).returncode == 0
    ups.until("both serve", lambda: len(ups.serving()) == 2)
    before = ups.serving()

    second = ups.remit("up", "--data", str(ups.data))
    assert second.returncode == 1
    assert f"process {first.pid}" in second.stderr
    assert "remit down" in second.stderr

    first.kill()
    first.wait()
    assert all(alive(pid) for _, pid in before.values())
    assert ups.remit("get", "nodes").returncode == 1
    ups.start("--nodes", "2")
    ups.until("it answers again", lambda: ups.remit("get", "nodes").returncode == 0)
    ups.until("the nodes tell again", lambda: len(ups.serving()) == 2)
    assert ups.serving() == before

    pids = [ups.pid("agent"), ups.pid("keeper"), *(pid for _, pid in before.values())]
    told = ups.remit("down", "--data", str(ups.data))
    assert told.returncode == 0, told.stderr
    assert "has ended" in told.stdout
    assert not [pid for pid in pids if alive(pid)]
    assert ups.remit("down", "--data", str(ups.data)).stdout.startswith("nothing runs")


def test_its_agent_is_killed__it_is_started_again_and_adopts(ups: Ups) -> None:
    """F36."""
    ups.start("--nodes", "1")
    ups.until("the context is there", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    ups.ready(1)
    assert ups.remit("apply", "-f", "-", "--wait", stdin=SERVICE).returncode == 0
    ups.until("both serve", lambda: len(ups.serving()) == 2)
    before, agent = ups.serving(), ups.pid("agent")
    os.kill(agent, signal.SIGKILL)
    ups.until("another agent runs", lambda: ups.pid("agent") != agent and alive(ups.pid("agent")))
    ups.until("it tells of both", lambda: len(ups.serving()) == 2)
    assert ups.serving() == before


def test_up_and_its_agent_and_keeper_are_killed__down_ends_what_is_left(ups: Ups) -> None:
    first = ups.start("--nodes", "1")
    ups.until("the context is there", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    ups.ready(1)
    assert ups.remit("apply", "-f", "-", "--wait", stdin=SERVICE).returncode == 0
    ups.until("both serve", lambda: len(ups.serving()) == 2)
    work = [pid for _, pid in ups.serving().values()]
    first.kill()
    first.wait()
    for which in ("agent", "keeper"):
        os.kill(ups.pid(which), signal.SIGKILL)
    assert all(alive(pid) for pid in work)
    told = ups.remit("down", "--data", str(ups.data))
    assert told.returncode == 0, told.stderr
    assert not [pid for pid in work if alive(pid)]


@pytest.mark.smoke
def test_regions_are_dealt_out_over_the_nodes(ups: Ups) -> None:
    ups.start("--nodes", "4", "--regions", "eu-central,eu-west")
    ups.until("the context is there", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    ups.ready(4)
    regions = [one["spec"]["region"] for one in ups.items("nodes")]
    assert sorted(regions) == ["eu-central", "eu-central", "eu-west", "eu-west"]
    assert {one["metadata"]["name"] for one in ups.items("regions")} == {"eu-central", "eu-west"}


def test_a_directory_that_is_too_deep_for_a_socket_is_refused_at_once(ups: Ups) -> None:
    done = ups.remit("up", "--data", str(ups.data / ("deep" * 30)))
    assert done.returncode == 1
    assert "shorter directory with --data" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--listen", "0.0.0.0:7420"), "listen on 127.0.0.1"),
        (("--listen", "nowhere"), "127.0.0.1:7420"),
        (("--beat", "1ms"), "beat"),
        (("--regions", ","), "--regions"),
        (("--nodes", "-1"), "--nodes"),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(ups: Ups, words: tuple[str, ...], told: str) -> None:
    done = ups.remit("up", "--data", str(ups.data), *words)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr
