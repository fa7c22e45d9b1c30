"""Child processes of a benchmark and their CPU time.

Components run in processes of their own, started as an operator would start them, so that the measurement is realistic. CPU
time is read from /proc. Goals are set by the benchmarks.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process  # noqa: TID251 - child processes on pipes, which end with the benchmark
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from remit.agent.directory import AgentDirectory
from remit.cli.session.token_files import ensure_issued_token
from remit.client.api import Api
from remit.model.kinds import Node, NodeHealth, TokenRole
from remit.world.clock import BootClock
from remit.world.interfaces import Clock
from remit.world.process import procfs
from remit.world.process.procfs import process_info
from remit.world.randomness import RandomIds

START_MS_MAX: Final = 60_000
END_MS_MAX: Final = 20_000

CLOCK: Final = BootClock()


class BenchProcessError(Exception):
    """A process of the benchmark ended, or did not print the expected line."""


class BenchProcess:
    """One child process. It is ended by SIGTERM or the end of its stdin, and killed if it does not exit."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name, self._process, self._log = name, process, log

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Return its CPU time so far, including all threads and children that have ended."""
        process = process_info(self.pid)
        if process is None:
            raise self._error("has ended")
        return process.cpu_ms / 1000

    async def read_line(self, timeout_ms: int = START_MS_MAX) -> str:
        """Return the next line it prints on stdout."""
        if self._process.stdout is None:
            raise self._error("has no stdout")
        try:
            async with CLOCK.timeout_ms(timeout_ms):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise self._error(f"printed nothing for {timeout_ms // 1000} s") from None
        if not line:
            raise self._error("ended")
        return line.decode().rstrip("\n")

    def send_line(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(line.encode() + b"\n")

    async def stop(self) -> None:
        process = self._process
        if process.returncode is None:
            process.terminate()
            try:
                async with CLOCK.timeout_ms(END_MS_MAX):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    def _error(self, problem: str) -> BenchProcessError:
        lines = self._log.read_text(errors="replace").splitlines()[-5:] if self._log.exists() else []
        return BenchProcessError(f"{self.name} (process {self.pid}) {problem}: {' / '.join(lines) or 'no output'}")


class BenchProcesses:
    """All processes of one run. `directory` has the stderr of each."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._directory, self._stack = directory, stack
        self.by_name: dict[str, BenchProcess] = {}

    async def start(self, name: str, *args: str, module: str = "remit.cli") -> BenchProcess:
        log = self._directory / f"{name}.log"
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(  # noqa: TID251 - as above
                sys.executable, "-m", module, *args, stdin=PIPE, stdout=PIPE, stderr=errors
            )
        process_ = self.by_name[name] = BenchProcess(name, process, log)
        self._stack.push_async_callback(process_.stop)
        return process_

    def cpu_s(self) -> dict[str, float]:
        return {name: process.cpu_s() for name, process in self.by_name.items()}


@asynccontextmanager
async def bench_processes(directory: Path) -> AsyncIterator[BenchProcesses]:
    """Yield an empty set of processes, and end all of them afterwards."""
    async with AsyncExitStack() as stack:
        yield BenchProcesses(directory, stack)


def cpu_spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the CPU seconds between two readings; for processes that started in between, all of theirs."""
    return {name: after[name] - before.get(name, 0.0) for name in after}


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def cpu_micros(cpu: Mapping[str, float], count: int, prefix: str = "") -> dict[str, Any]:
    """Return the CPU microseconds of each process per item."""
    return {f"{prefix}{name}_us": seconds * 1e6 / max(1, count) for name, seconds in cpu.items()}


HEARTBEAT_INTERVAL: Final = "2s"

LAST_LINES: Final = 5
NODE_PREFIX: Final = "bench"


class ClusterStartError(Exception):
    """A process does not start; the message has the last lines of its output."""


class ProcessCluster:
    """All components of a scope, in `root`. `start` returns once every node is ready; the caller must call `stop`."""

    def __init__(self, root: Path, nodes: int, clock: Clock) -> None:
        self._root, self._nodes, self._clock = root, nodes, clock
        self._processes: dict[str, Process] = {}
        self.store, self.agent = root / "server", root / "agent"
        self.token_file = self.store / "token"
        self.url = ""

    def api(self) -> Api:
        return Api(self.url, self.token_file.read_text().strip())

    async def start(self) -> None:
        await self._start("server", "--data", str(self.store), "--listen", "127.0.0.1:0")
        self.url = (await self._wait_for_line("server", " at http")).partition(" at ")[2].partition(",")[0]
        nodes = [f"{NODE_PREFIX}-{number}" for number in range(1, self._nodes + 1)]
        played = (
            "--name",
            NODE_PREFIX,
            "--nodes",
            str(self._nodes),
            "--cpu",
            "64",
            "--memory",
            "256Gi",
            "--data",
            str(self.agent),
        )
        async with self.api() as api:
            await self._start("scheduler", *await self._server_options(api, "scheduler"))
            await self._start("controllers", *await self._server_options(api, "controllers"))
            await self._start("agent", *await self._server_options(api, "agent", nodes), *played, "--end-work")
            await self._wait_until_ready(api)

    async def _server_options(self, api: Api, role: TokenRole, nodes: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the options with which a component reaches the server. Each has its own token."""
        file = self._root / f"{role}.token"
        await ensure_issued_token(file, api, RandomIds(), role, nodes=nodes)
        return "--server", self.url, "--token-file", str(file)

    async def stop(self) -> None:
        """Stop all components. The agent is first: it stops its keeper and all processes."""
        for name in ("agent", "controllers", "scheduler", "server"):
            process = self._processes.get(name)
            if process is not None and process.returncode is None:
                process.terminate()
                await process.wait()

    def cpu_ms(self) -> dict[str, int]:
        """Return the CPU time of each component so far. The keeper's includes its helpers and the replicas it started."""
        used = {name: _cpu_ms([procfs.process_info(process.pid)]) for name, process in self._processes.items()}
        keeper = AgentDirectory(self.agent).keeper_pid
        if keeper.exists():
            used["keeper"] = _cpu_ms(procfs.process_tree(int(keeper.read_text())))
        return used

    async def _start(self, name: str, *args: str) -> None:
        with (self._root / f"{name}.log").open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(  # noqa: TID251 - as above
                sys.executable,
                "-m",
                "remit.cli",
                name,
                *args,
                "--heartbeat-interval",
                HEARTBEAT_INTERVAL,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def _wait_for_line(self, name: str, text: str) -> str:
        until_ms = self._clock.now_ms() + START_MS_MAX
        while True:
            lines = self._lines(name)
            for line in lines:
                if text in line:
                    return line
            if self._processes[name].returncode is not None or self._clock.now_ms() > until_ms:
                raise ClusterStartError(f"`remit {name}` did not start: {' / '.join(lines[-LAST_LINES:]) or 'no output'}")
            await self._clock.sleep_ms(20)

    async def _wait_until_ready(self, api: Api) -> None:
        until_ms = self._clock.now_ms() + START_MS_MAX
        while True:
            nodes: Sequence[Node] = (await api.list(Node)).items
            if sum(node.status.health is NodeHealth.READY for node in nodes) >= self._nodes:
                return
            if self._clock.now_ms() > until_ms or self._processes["agent"].returncode is not None:
                output = " / ".join(self._lines("agent")[-LAST_LINES:])
                raise ClusterStartError(
                    f"{self._nodes} nodes are not ready after {START_MS_MAX // 1000} s: {output or 'no output'}"
                )
            await self._clock.sleep_ms(50)

    def _lines(self, name: str) -> list[str]:
        return (self._root / f"{name}.log").read_text(errors="replace").splitlines()


def _cpu_ms(members: Sequence[procfs.ProcessInfo | None]) -> int:
    return sum(member_.cpu_ms for member_ in members if member_ is not None)
