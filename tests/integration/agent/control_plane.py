"""A scope for real agents to speak to: servers, scheduler and controllers in the test's own process, its door behind HTTP.

Agents and their keepers are the processes that people run. Whatever a test finds, nothing of them is left. No test is in here.
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
from remit.model.claims import Accepted, Actor, AnyClaim, Apply, Role
from remit.model.kinds import Region, RegionSpec, Template, Tenant, TenantSpec, Workload, WorkloadSpec
from remit.model.metadata import Metadata
from remit.model.objects import AnyObject, decode
from remit.model.records import Replica
from remit.model.resources import Amount, Duration
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
"""Where a process is started anew meanwhile: on a busy machine that takes seconds, in which nobody must be given up."""
TEMPO = Timing(BEAT_MS)
ALL = {"cpu": "1000", "memory": "100Gi", "devices": {"gpu": 100}}


def door(link: Link, callbacks: list[str], *, token: str = TOKEN) -> web.Application:
    """What of the HTTP API agents use. `callbacks`: what agents have said that they want to be shown, the last one last."""

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
    """Made by `scope`. `cut` is set while the servers cannot be reached."""

    def __init__(self, world: World, root: Path, beat_ms: int) -> None:
        self.world, self.root, self.url, self.tempo = world, root, "", Timing(beat_ms)
        self.store = MemoryStore()
        self.people = self.client(Actor("ann", Role.OPERATOR))
        self.keys = root / "seal.keys"
        self.agents: list[AgentProcess] = []
        self.callbacks: list[str] = []
        self._runner: web.AppRunner | None = None
        self._port = 0

    def client(self, actor: Actor) -> AuthorityClient:
        return AuthorityClient({SERVER: EndpointStub(self.world.link, SERVER)}, actor, self.world)

    async def open(self) -> None:
        self._runner = web.AppRunner(door(self.world.link, self.callbacks), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def close(self) -> None:
        """Nobody answers any more, until it is opened again."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def apply(self, *things: AnyObject) -> None:
        claims: list[AnyClaim] = [Apply(thing) for thing in things]
        for claim, verdict in zip(claims, await self.people.submit_many(claims), strict=True):
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
        """Until the replica is in one of these phases; or was, and is gone again."""
        found = None
        for _ in range(2_500):
            found = await self.replica(name)
            if found is not None and found.status.phase in phases:
                return found
            await asyncio.sleep(0.01)
        told = "\n".join(agent.said() for agent in self.agents)
        raise AssertionError(f"{name} is {found and found.status}, not {phases}\n{told}")

    async def states(self) -> Sequence[NodeState]:
        return await EndpointStub(self.world.link, SERVER).node_states(())

    async def runs(self) -> dict[str, RunState]:
        return {run.replica: run for state in await self.states() for run in state.runs}

    def agent(
        self, *words: str, name: str = "n1", data: str = "a", token: str = TOKEN, program: Sequence[str] = (REMIT, "agent")
    ) -> AgentProcess:
        made = AgentProcess(self, name, AgentDirectory(self.root / data), words, token, program)
        self.agents.append(made)
        return made


class AgentProcess:
    """`remit agent` on a directory, with the keeper that it starts."""

    def __init__(
        self, scope: Scope, name: str, directory: AgentDirectory, words: Sequence[str], token: str, program: Sequence[str]
    ) -> None:
        self.directory = directory
        file = scope.root / f"{directory.root.name[:20]}.token"
        file.write_text(token)
        self._out = scope.root / f"{directory.root.name[:20]}.log"
        command = [*program, "--server", scope.url, "--token-file", str(file)]
        command += ["--data", str(directory.root), "--name", name, "--sandbox", "none", *words]
        with self._out.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=ROOT, start_new_session=True
            )

    def said(self) -> str:
        log = self.directory.keeper_log
        return self._out.read_text() + (log.read_text() if log.exists() else "")

    @property
    def keeper_pid(self) -> int:
        return int(self.directory.keeper_pid.read_text())

    def kept(self) -> dict[str, ProcessRecord]:
        """What the keeper has written down, by the replica's name."""
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
        """Its keeper too, also one that is only just beginning."""
        while keepers := keepers_on(self.directory.root):
            for pid in keepers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            with suppress(Exception):
                await stop_keeper(self.directory.root, 100)
            await asyncio.sleep(0.05)
        build_secret_files(self.directory).destroy()


def keepers_on(root: Path) -> list[int]:
    """The processes that are keepers of this directory, which is this test's own."""
    found = []
    for place in Path("/proc").iterdir():
        with suppress(OSError):
            words = (place / "cmdline").read_bytes().split(b"\0") if place.name.isdigit() else []
            if b"remit.cli.local.keeper_main" in words and str(root).encode() in words:
                found.append(int(place.name))
    return found


@asynccontextmanager
async def scope(beat_ms: int = BEAT_MS) -> AsyncIterator[Scope]:
    root = Path(tempfile.mkdtemp(prefix="remit-"))
    os.chmod(root, 0o1777)  # noqa: PTH101 - work runs as somebody else, and leaves its marks here
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
    world, store, tempo = made.world, made.store, made.tempo
    placing = build_scheduler(
        store, store, made.client(Actor("scheduler", Role.SCHEDULER)), world, name="scheduler",
        timing=SchedulerTiming(lease_ms=tempo.lease_ms, idle_ms=5 * tempo.heartbeat_ms),
    )  # fmt: skip
    crew = build_controllers(store, store, made.client, world, name="crew", timing=LoopTiming(tempo.heartbeat_ms))
    async with asyncio.TaskGroup() as group:
        group.create_task(
            run_server(
                store,
                world,
                scope="local",
                name=SERVER,
                peers=[SERVER],
                heartbeat_ms=tempo.heartbeat_ms,
                term_ms=tempo.lease_ms,
                timing=tempo,
                keys=made.keys,
            )
        )
        await until(lambda: _answers(made))
        group.create_task(placing.run())
        group.create_task(crew.run())


async def _answers(made: Scope) -> bool:
    with suppress(Exception):
        await EndpointStub(made.world.link, SERVER).status()
        return True
    return False


async def until(condition: Callable[[], Awaitable[bool] | bool], seconds: float = 25) -> None:
    """Until it holds; a machine that does other work too is given time."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.02)


def play(scene: Callable[[Scope], Coroutine[Any, Any, None]], beat_ms: int = BEAT_MS) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60), scope(beat_ms) as made:
            await scene(made)

    asyncio.run(bounded())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def shell(script: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", script)


def forever(path: Path) -> tuple[str, ...]:
    """Says that it began, each time that it does, and goes on."""
    return shell(f"echo $$ $REMIT_TOKEN >> {path}; exec sleep 600")


def fence(ms: int) -> dict[str, Any]:
    return {"type": "job", "fence": Duration(ms), "retries": 0}
