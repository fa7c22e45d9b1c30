"""A scope for real agents: servers, scheduler and controllers in the test's process, behind HTTP.

Agents and keepers are real processes; all of them are ended with the test. Contains no tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from remit.agent.directory import AgentDirectory
from remit.agent.keeper.journal import Journal
from remit.agent.keeper.protocol import ProcessRecord
from remit.agent.setup import build_secret_files
from remit.assembly import build_controllers, build_scheduler, run_server
from remit.cli.local.down import stop_keeper
from remit.client.authority_client import AuthorityClient
from remit.client.rpc import EndpointStub
from remit.correction.framework.loop import LoopTiming
from remit.law.timing import Timing
from remit.model.claims import Accepted, Actor, AnyClaim, Apply
from remit.model.kinds import Region, RegionSpec, Template, Tenant, TenantSpec, Workload, WorkloadSpec
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Metadata
from remit.model.objects import decode
from remit.model.records import Replica
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from remit.model.wire.agent_messages import NodeState, RunState
from remit.proposal.scheduler import SchedulerTiming
from remit.store.memory import MemoryStore
from remit.world.files.disk import FileDisk
from remit.world.interfaces import Link, LinkError, World
from remit.world.production import production

REMIT = str(Path(sys.executable).parent / "remit")
ROOT = Path(__file__).resolve().parents[3]
TOKEN = "a-token-of-these-tests"
SERVER = "s1"
BEAT_MS = 200
SLOW_MS = 700
"""Heartbeat where a process is restarted meanwhile: on a busy machine that takes seconds, in which no node may be lost."""
TIMING = Timing(BEAT_MS)
ALL = {"cpu": "1000", "memory": "100Gi", "devices": {"gpu": 100}}


def agent_api(link: Link, callbacks: list[str], *, token: str = TOKEN) -> web.Application:
    """The part of the HTTP API that agents use. `callbacks` collects the callback tokens of agents, the latest last."""

    async def ask(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {token}":
            return web.json_response({"status": 401, "code": "unauthenticated", "detail": "the token is not right"}, status=401)
        return web.Response(body=await link.request(SERVER, await request.read()), content_type="application/json")

    async def follow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        body = await request.read()
        callbacks.append(json.loads(body).get("callback", ""))
        with suppress(LinkError, ConnectionError):
            async with aclosing(link.stream(SERVER, body)) as items:
                async for item in items:
                    await response.write(item + b"\n")
        return response

    app = web.Application(client_max_size=16 << 20)
    app.add_routes([web.post("/v1/ask", ask), web.post("/v1/follow", follow)])
    return app


class Scope:
    """Created by `scope`. While it is closed, the servers cannot be reached."""

    def __init__(self, world: World, root: Path, beat_ms: int) -> None:
        self.world, self.root, self.url, self.timing = world, root, "", Timing(beat_ms)
        self.store = MemoryStore()
        self.operator = self.client(Actor("ann", Role.OPERATOR))
        self.keys = root / "seal.keys"
        self.agents: list[AgentProcess] = []
        self.callbacks: list[str] = []
        self._runner: web.AppRunner | None = None
        self._port = 0

    def client(self, actor: Actor) -> AuthorityClient:
        return AuthorityClient({SERVER: EndpointStub(self.world.link, SERVER)}, actor, self.world)

    async def open(self) -> None:
        self._runner = web.AppRunner(agent_api(self.world.link, self.callbacks), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def close(self) -> None:
        """Stop answering until `open` is called again."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def apply(self, *objects: AnyObject) -> None:
        claims: list[AnyClaim] = [Apply(obj) for obj in objects]
        for claim, verdict in zip(claims, await self.operator.submit_many(claims), strict=True):
            assert isinstance(verdict, Accepted), (claim, verdict)

    async def run(self, name: str, *command: str, spec: dict[str, Any] | None = None, **template: Any) -> None:
        resources = template.pop("resources", {"cpu": "10m", "memory": "32Mi"})
        made = Template(command=command, resources=Amount.parse(resources), **template)
        more = {"type": "job", **(spec or {})}
        await self.apply(Workload(metadata=Metadata(name=name, tenant="t"), spec=WorkloadSpec(template=made, **more)))

    async def replica(self, name: str) -> Replica | None:
        row = await self.store.get(f"replica/t/{name}")
        return None if row is None else decode(row.value)  # type: ignore[return-value]

    async def until(self, name: str, *phases: str) -> Replica:
        """Wait until the replica is in one of these phases."""
        found = None
        for _ in range(2_500):
            found = await self.replica(name)
            if found is not None and found.status.phase in phases:
                return found
            await asyncio.sleep(0.01)
        logs = "\n".join(agent.log_text() for agent in self.agents)
        raise AssertionError(f"{name} is {found and found.status}, not {phases}\n{logs}")

    async def states(self) -> Sequence[NodeState]:
        return await EndpointStub(self.world.link, SERVER).node_states(())

    async def runs(self) -> dict[str, RunState]:
        return {run.replica: run for state in await self.states() for run in state.runs}

    def agent(
        self, *options: str, name: str = "n1", data: str = "a", token: str = TOKEN, program: Sequence[str] = (REMIT, "agent")
    ) -> AgentProcess:
        made = AgentProcess(self, name, AgentDirectory(self.root / data), options, token, program)
        self.agents.append(made)
        return made


class AgentProcess:
    """`remit agent` on a directory, with the keeper that it starts."""

    def __init__(
        self, scope: Scope, name: str, directory: AgentDirectory, options: Sequence[str], token: str, program: Sequence[str]
    ) -> None:
        self.directory = directory
        file = scope.root / f"{directory.root.name[:20]}.token"
        file.write_text(token)
        self._out = scope.root / f"{directory.root.name[:20]}.log"
        command = [*program, "--server", scope.url, "--token-file", str(file)]
        command += ["--data", str(directory.root), "--name", name, "--sandbox", "none", *options]
        with self._out.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=ROOT, start_new_session=True
            )

    def log_text(self) -> str:
        log = self.directory.keeper_log
        return self._out.read_text() + (log.read_text() if log.exists() else "")

    @property
    def keeper_pid(self) -> int:
        return int(self.directory.keeper_pid.read_text())

    def journal(self) -> dict[str, ProcessRecord]:
        """The keeper's journal, by replica name."""
        found = Journal(FileDisk(), self.directory.journal).read() if self.directory.journal.exists() else {}
        return {copy.key.rsplit("/", 1)[1]: one for copy, one in found.items()}

    def signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.signal(signal.SIGCONT)
        self.kill()

    async def end(self) -> None:
        """End its keeper too, also one that is only just starting."""
        while keepers := keepers_on(self.directory.root):
            for pid in keepers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            with suppress(Exception):
                await stop_keeper(self.directory.root, 100)
            await asyncio.sleep(0.05)
        build_secret_files(self.directory).destroy()


def keepers_on(root: Path) -> list[int]:
    """Pids of the keepers of this directory, which belongs to this test alone."""
    found = []
    for place in Path("/proc").iterdir():
        with suppress(OSError):
            options = (place / "cmdline").read_bytes().split(b"\0") if place.name.isdigit() else []
            if b"remit.cli.local.keeper_main" in options and str(root).encode() in options:
                found.append(int(place.name))
    return found


@asynccontextmanager
async def scope(beat_ms: int = BEAT_MS) -> AsyncIterator[Scope]:
    root = Path(tempfile.mkdtemp(prefix="remit-"))
    os.chmod(root, 0o1777)  # noqa: PTH101 - work runs as another user and writes files here
    world = production({SERVER: f"unix:{root}/s.sock"})
    made = Scope(world, root, beat_ms)
    tasks: list[asyncio.Task[Any]] = []
    try:
        tasks.append(asyncio.create_task(_serve(made)))
        await until(lambda: _answers(made))
        await made.apply(
            Region(metadata=Metadata(name="local"), spec=RegionSpec()),
            Tenant(metadata=Metadata(name="t"), spec=TenantSpec(quota=Amount.parse(ALL))),
        )
        await made.open()
        yield made
        failed = [task for task in tasks if task.done()]
        assert not failed, failed
    finally:
        for agent in made.agents:
            agent.stop()
        for agent in made.agents:
            await agent.end()
        await made.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await world.offload.close()
        for agent in made.agents:
            shutil.rmtree(agent.directory.work, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)


async def _serve(made: Scope) -> None:
    world, store, timing = made.world, made.store, made.timing
    scheduler = build_scheduler(
        store, store, made.client(Actor("scheduler", Role.SCHEDULER)), world, name="scheduler",
        timing=SchedulerTiming(lease_ms=timing.lease_ms, idle_ms=5 * timing.heartbeat_ms),
    )  # fmt: skip
    controllers = build_controllers(store, store, made.client, world, name="crew", timing=LoopTiming(timing.heartbeat_ms))
    async with asyncio.TaskGroup() as group:
        group.create_task(
            run_server(
                store,
                world,
                scope="local",
                name=SERVER,
                peers=[SERVER],
                heartbeat_ms=timing.heartbeat_ms,
                term_ms=timing.lease_ms,
                timing=timing,
                keys=made.keys,
            )
        )
        await until(lambda: _answers(made))
        group.create_task(scheduler.run())
        group.create_task(controllers.run())


async def _answers(made: Scope) -> bool:
    with suppress(Exception):
        await EndpointStub(made.world.link, SERVER).status()
        return True
    return False


async def until(condition: Callable[[], Awaitable[bool] | bool], seconds: float = 25) -> None:
    """Wait until the condition holds, with time for a busy machine."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.02)


def run_scenario(scenario: Callable[[Scope], Coroutine[Any, Any, None]], beat_ms: int = BEAT_MS) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60), scope(beat_ms) as made:
            await scenario(made)

    asyncio.run(bounded())


def has_exited(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def shell(script: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", script)


def record_and_sleep(path: Path) -> tuple[str, ...]:
    """A command that records each of its starts and then runs on."""
    return shell(f"echo $$ $REMIT_TOKEN >> {path}; exec sleep 600")


def fence(ms: int) -> dict[str, Any]:
    return {"type": "job", "fence": Duration(ms), "retries": 0}
