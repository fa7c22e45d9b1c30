"""The processes of a chaos run: a server, a scheduler, controllers and agents, started by the commands operators use."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

REMIT: Final = str(Path(sys.executable).parent / "remit")
STOP_S_MAX: Final = 20


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Program:
    """One process that is restarted after kills. Only processes started here are ever signalled."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name, self._arguments, self._log = name, list(arguments), log
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        self.starts += 1
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def signal(self, number: int) -> None:
        if self.is_running:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """Stop as an operator would: SIGTERM, wait, then SIGKILL."""
        if not self.is_running or self._process is None:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:]) if self._log.exists() else ""


class Cluster:
    """All of them, in one directory. `beat` is as on the command line."""

    def __init__(self, root: Path, *, agents: int, nodes: int, beat: str) -> None:
        self.root, self.port = root, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data, self.token_file = root / "data", root / "data" / "token"
        self._nodes = nodes
        self.server = self._program(
            "server", ["server", "--data", str(self.data), "--listen", f"127.0.0.1:{self.port}", "--beat", beat]
        )
        self.scheduler = self._program("scheduler", ["scheduler", *self._options("scheduler", beat)])
        self.controllers = self._program("controllers", ["controllers", *self._options("controllers", beat)])
        self.agents = [
            self._program(
                f"agent-{n}",
                [
                    "agent",
                    *self._options(f"agent-{n}", beat),
                    "--data",
                    str(self._agent_data(n)),
                    "--name",
                    f"m{n}",
                    "--nodes",
                    str(nodes),
                    "--sandbox",
                    "none",
                    "--work-user",  # its jobs run this Python and write one record, wherever these are
                    pwd.getpwuid(os.geteuid()).pw_name,
                ],
            )
            for n in range(1, agents + 1)
        ]

    def _options(self, name: str, beat: str) -> list[str]:
        return ["--server", self.url, "--token-file", str(self.root / f"{name}.token"), "--beat", beat]

    def _issue(self) -> None:
        """Create a token for each component, limited to what it needs."""
        for program in self.programs[1:]:
            nodes = self.node_names(program, self._nodes) if program in self.agents else []
            role = "agent" if nodes else program.name
            arguments = [word for node in nodes for word in ("--node", node)]
            options = ["--server", self.url, "--token-file", str(self.token_file)]
            made = subprocess.run(
                [REMIT, "token", "create", "--role", role, *arguments, *options], capture_output=True, check=True
            )
            (self.root / f"{program.name}.token").write_bytes(made.stdout)

    def _agent_data(self, n: int) -> Path:
        return self.root / f"agent-{n}"

    def _program(self, name: str, arguments: list[str]) -> Program:
        return Program(name, [REMIT, *arguments], self.root / f"{name}.log")

    @property
    def programs(self) -> list[Program]:
        return [self.server, self.scheduler, self.controllers, *self.agents]

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()

    def start(self) -> None:
        self.server.start()
        until = time.monotonic() + 30
        while not self._answers():
            if time.monotonic() > until or not self.server.is_running:
                raise RuntimeError(f"the server does not answer:\n{self.server.log_tail()}")
            time.sleep(0.05)
        self._issue()
        for program in self.programs[1:]:
            program.start()

    def _answers(self) -> bool:
        with socket.socket() as one:
            return self.token_file.exists() and one.connect_ex(("127.0.0.1", self.port)) == 0

    def node_names(self, agent: Program, nodes: int) -> list[str]:
        name = f"m{agent.name.removeprefix('agent-')}"
        return [name] if nodes == 1 else [f"{name}-{n}" for n in range(1, nodes + 1)]

    def kill_keeper(self, agent: Program) -> None:
        """Kill the keeper that this agent started, by its pid; it may be between two keepers."""
        with suppress(OSError, ValueError):
            pid = int((self._agent_data(int(agent.name.removeprefix("agent-"))) / "run" / "keeper.pid").read_text())
            if str(self.root) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End everything that was started here, including keepers and their work."""
        for program in reversed(self.programs):
            program.stop()
        for n in range(1, len(self.agents) + 1):
            subprocess.run(
                [REMIT, "keeper", "--data", str(self._agent_data(n)), "--end"], check=False, capture_output=True, timeout=60
            )
