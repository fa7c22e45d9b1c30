"""Child processes of the demos: `remit up`, an agent for a second machine, and the authority of the race.

Each is started, watched and killed by its process handle.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process  # noqa: TID251 - children are started and killed as an operator would
from pathlib import Path
from typing import Final

import msgspec

from remit.agent.directory import AgentDirectory
from remit.cli.local.daemon_options import AGENT_DIRECTORY, SERVER_DIRECTORY, TOKEN_FILE, URL_FILE
from remit.cli.session.token_files import ensure_issued_token
from remit.client.api import Api
from remit.demo.authority_process import AuthorityReady, DemoFailed
from remit.world.interfaces import Clock
from remit.world.process.procfs import send_termination
from remit.world.randomness import RandomIds

HEARTBEAT: Final = "250ms"
START_MS_MAX: Final = 30_000
LOG_TAIL_LINES: Final = 5


class DemoCluster:
    """`remit up` and one agent, in one directory. Only processes started here are killed, by process id."""

    def __init__(self, root: Path, nodes: int, machine: str, clock: Clock) -> None:
        self._root, self._clock, self._machine = root, clock, machine
        self.data = root / "up"
        self._machine_data = root / machine
        self._up: Process | None = None
        self._agent: Process | None = None
        self._listen = "127.0.0.1:0"
        self._nodes = nodes

    # -- commands as a user would type them -----------------------------------------------------------------------------------

    @property
    def up_command(self) -> str:
        return f"remit up --nodes {self._nodes} --heartbeat-interval {HEARTBEAT}"

    @property
    def agent_command(self) -> str:
        return f"remit agent --name {self._machine} --data {shlex.quote(str(self._machine_data))}"

    # -- processes -------------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return (self.data / SERVER_DIRECTORY / URL_FILE).read_text().strip()

    @property
    def token_file(self) -> Path:
        return self.data / SERVER_DIRECTORY / TOKEN_FILE

    @property
    def up_pid(self) -> int:
        return 0 if self._up is None else self._up.pid

    @property
    def agent_pid(self) -> int:
        return 0 if self._agent is None else self._agent.pid

    def keeper_pid(self) -> int:
        return int(AgentDirectory(self._machine_data).keeper_pid.read_text())

    def api(self) -> Api:
        return Api(self.url, self.token_file.read_text().strip())

    async def start_up(self) -> None:
        """Starts `remit up` and waits for its API; a restart uses the same address."""
        (self.data / SERVER_DIRECTORY / URL_FILE).unlink(missing_ok=True)
        options = ["--listen", self._listen, "--nodes", str(self._nodes), "--heartbeat-interval", HEARTBEAT, "--context", ""]
        self._up = await self._start("up", ["--data", str(self.data), *options])
        until_ms = self._clock.now_ms() + START_MS_MAX
        while not (self.data / SERVER_DIRECTORY / URL_FILE).exists():
            if self._up.returncode is not None or self._clock.now_ms() > until_ms:
                raise DemoFailed(f"`remit up` did not start: {self._log_tail('up')}")
            await self._clock.sleep_ms(20)
        self._listen = self.url.removeprefix("http://")

    async def start_agent(self) -> None:
        token_file = self._root / f"{self._machine}.token"
        async with self.api() as api:
            await ensure_issued_token(token_file, api, RandomIds(), "agent", nodes=[self._machine])
        options = ["--server", self.url, "--token-file", str(token_file)]
        self._agent = await self._start("agent", [*options, "--name", self._machine, "--data", str(self._machine_data)])

    async def _start(self, name: str, options: list[str]) -> Process:
        with (self._root / f"{name}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(  # noqa: TID251 - as above
                sys.executable, "-m", "remit.cli", name, *options, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    # -- kills ----------------------------------------------------------------------------------------------------------------

    def kill_machine(self) -> tuple[int, int]:
        """Kills the agent and its keeper; returns their process ids."""
        pids = self.agent_pid, self.keeper_pid()
        for pid in pids:
            send_termination(pid, kill=True)
        return pids

    def kill_up(self) -> int:
        if self._up is not None:
            self._up.kill()
        return self.up_pid

    async def stop(self) -> None:
        """Stops everything started here, including the replicas that the agents started."""
        from remit.cli.local.down import stop_agent
        from remit.world.production import production

        for process in (self._agent, self._up):
            if process is not None and process.returncode is None:
                process.terminate()
                await process.wait()
        world = production()
        try:
            for root in (self._machine_data, self.data / AGENT_DIRECTORY):
                await stop_agent(root, world)
        finally:
            await world.offload.close()

    def _log_tail(self, name: str) -> str:
        lines = (self._root / f"{name}.log").read_text(errors="replace").splitlines()
        return " / ".join(lines[-LOG_TAIL_LINES:]) or "no output"


STOP_MS_MAX: Final = 10_000
LOG_LINES: Final = 5


class AuthorityProcess:
    """The authority process of the race. `start` returns once the authority has taken over and listens."""

    def __init__(self, process: Process, ready: AuthorityReady) -> None:
        self._process = process
        self.ready = ready

    @classmethod
    async def start(cls, data: Path, socket: Path, clock: Clock) -> AuthorityProcess:
        log = socket.with_suffix(".log")
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(  # noqa: TID251 - as above
                sys.executable,
                "-m",
                "remit.demo.authority_process",
                str(data),
                str(socket),
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
            )
        try:
            ready = await _ready(process, log, clock)
        except BaseException:
            await _end(process)
            raise
        return cls(process, ready)

    def kill(self) -> None:
        """SIGKILL: the process cannot finish, flush or close anything."""
        self._process.kill()

    async def wait(self) -> None:
        await self._process.wait()

    async def stop(self, clock: Clock) -> None:
        """Lets the process finish its work and close its store."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with clock.timeout_ms(STOP_MS_MAX):
                code = await self._process.wait()
        except TimeoutError:
            raise DemoFailed(
                f"process {self._process.pid} did not stop within {STOP_MS_MAX // 1000} s; the machine may be overloaded"
            ) from None
        finally:
            await _end(self._process)
        if code:
            raise DemoFailed(f"process {self._process.pid} exited with code {code}; please report it")

    async def kill_if_running(self) -> None:
        """Kills the process if it is still running."""
        await _end(self._process)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def _ready(process: Process, log: Path, clock: Clock) -> AuthorityReady:
    if process.stdout is None:
        raise DemoFailed("the authority process has no stdout; please report it")
    try:
        async with clock.timeout_ms(START_MS_MAX):
            line = await process.stdout.readline()
    except TimeoutError:
        raise DemoFailed(
            f"the authority did not start within {START_MS_MAX // 1000} s; try again on a less busy machine"
        ) from None
    if not line:
        raise DemoFailed(f"the authority process exited at once: {_log_tail(log)}; fix that, then try again")
    ready = msgspec.json.decode(line, type=AuthorityReady)
    if ready.failed:
        raise DemoFailed(f"the authority could not take over: {ready.failed}")
    return ready


def _log_tail(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").split("\n")[-LOG_LINES:]).strip(" /") or "no output"
