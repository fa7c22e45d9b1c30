"""Implementations under each contract, how each is created and how time passes in it. The contracts are test_world*.py.

A twin is made for one test, over a directory of its own, and plays one scenario with `run`. To add one, write a class that
implements the protocols below and add it to the lists.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Protocol

from remit.client.http_link import HttpLink
from remit.client.remote_store import WatchRequest
from remit.law.certificate_identity import agent_identity
from remit.law.timing import Timing
from remit.model.identity import Principal
from remit.serve.auth.access_control import unauthenticated
from remit.serve.components.claim_routes import ROUTES as PROGRAMS
from remit.serve.diagnostics.audit_log import AuditLog, MemoryAuditStorage
from remit.serve.http.app import Application
from remit.serve.http.request_telemetry import RequestMetrics
from remit.serve.http.streams import OpenStreams
from remit.simulate.world.event_loop import SimLoop
from remit.simulate.world.network import Network
from remit.simulate.world.processes import SimMachine, SimProcess
from remit.simulate.world.runner import SimProgram as Behaviour
from remit.world.clock import BootClock
from remit.world.files.disk import FileDisk
from remit.world.host import KernelPorts, LocalHost, SocketProber
from remit.world.interfaces import Clock, Host, Link, Ports, Prober, ProcessSpec, Randomness, Runner, Service, World
from remit.world.net import http_server
from remit.world.net.certificates import create_key, create_request
from remit.world.net.connections import BoundSocket, ListenAddress
from remit.world.net.rpc_client import SocketLink
from remit.world.net.server_keys import TlsKeys, TlsOptions
from remit.world.net.tls import LinkTls, Trust
from remit.world.net.tls import server_context as tls_answering
from remit.world.process.cgroup_discovery import parse_mounts
from remit.world.process.runner import ProcessRunner
from remit.world.production import production
from remit.world.randomness import RandomIds, SeededRandomness
from tests.contracts.http_service import serve_http_service

NAMES: Final = ("a", "b")
"""Names of processes in the link suite."""


HTTP_SERVER: Final = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    while True:
        with server.accept()[0] as one:
            if one.recv(4096):
                one.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
"""


class Program(Enum):
    """Behaviours of programs. None needs an environment or a directory."""

    EXITS_0 = "ends at once, with code 0"
    EXITS_3 = "ends at once, with code 3"
    RUNS = "runs for ever, and is killed by the request to end (signal 15)"
    IGNORES = "runs for ever, and ignores the request to end once it has run for half a second"
    TAKES_64_MIB = "takes that much memory, and then runs for ever"
    ECHOES = "writes what it is fed, and ends with code 0 at the end of that"
    MISSING = "is not there"


class Twin(Protocol):
    def __init__(self, place: Path, /) -> None: ...

    def run(self, scenario: Coroutine[Any, Any, None], /) -> None:
        """Run a scenario to its end in this twin's time. Raises what the scenario raises."""
        ...


class WorldTwin(Twin, Protocol):
    def world(self) -> World:
        """Another world of the same machine and boot."""
        ...

    def chance(self, seed: str) -> Randomness: ...


def run_in(twin: WorldTwin, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def run_scenario() -> None:
        world = twin.world()
        try:
            await scenario(world)
        finally:
            await world.offload.close()

    twin.run(run_scenario())


class LinkTwin(Twin, Protocol):
    def clock(self) -> Clock: ...

    def link(self, name: str) -> Link:
        """The link of another process called `name`. It reaches, and may serve, each of `NAMES`."""
        ...


class RunnerTwin(Twin, Protocol):
    def clock(self) -> Clock: ...

    def runner(self) -> Runner:
        """Another runner of the same machine, as after a restart of its process."""
        ...

    def order(self, program: Program) -> ProcessSpec: ...


class HostTwin(RunnerTwin, Protocol):
    def host(self) -> Host: ...

    def ports(self) -> Ports: ...

    def prober(self) -> Prober: ...

    def http_program(self, port: int) -> ProcessSpec:
        """Listens at `port` of 127.0.0.1 shortly after its start and answers a GET of / with 200."""
        ...


class ArtifactsTwin(WorldTwin, Protocol):
    def offer(self, world: World, path: Path, content: bytes) -> str:
        """The source from which this content can be fetched, below a permitted directory."""
        ...


class Production:
    """The real machine; processes communicate over Unix sockets."""

    def __init__(self, place: Path, /) -> None:
        self._addresses = {name: f"unix:{place}/{name}.socket" for name in NAMES}
        self._groups = f"remit-tests/{os.getpid()}-{place.name}"

    def run(self, scenario: Coroutine[Any, Any, None], /) -> None:
        try:
            asyncio.run(scenario)
        finally:
            remove_groups(self._groups)

    def world(self) -> World:
        return production(self._addresses)

    def chance(self, seed: str) -> Randomness:
        return SeededRandomness(seed)

    def clock(self) -> Clock:
        return BootClock()

    def link(self, name: str) -> Link:
        return SocketLink(self._addresses)

    def runner(self) -> Runner:
        return ProcessRunner(BootClock(), parent=self._groups)

    def host(self) -> Host:
        return LocalHost(BootClock())

    def ports(self) -> Ports:
        return KernelPorts(BootClock())

    def prober(self) -> Prober:
        return SocketProber(BootClock())

    def offer(self, world: World, path: Path, content: bytes) -> str:
        world.disk.make_directory(path.parent)
        world.disk.write_atomically(path, content)
        return f"file:{path}"

    def http_program(self, port: int) -> ProcessSpec:
        return ProcessSpec((sys.executable, "-c", HTTP_SERVER, str(port)))

    def order(self, program: Program) -> ProcessSpec:
        script = {
            Program.EXITS_0: "exit 0",
            Program.EXITS_3: "exit 3",
            Program.RUNS: "while :; do sleep 0.1; done",
            Program.IGNORES: "trap '' TERM; while :; do sleep 0.1; done",
            Program.ECHOES: "exec cat",
        }
        if program is Program.MISSING:
            return ProcessSpec(("/no/such/program",))
        if program is Program.TAKES_64_MIB:
            return ProcessSpec((sys.executable, "-c", "import time; held = bytearray(b'x') * (64 << 20); time.sleep(600)"))
        return ProcessSpec(("/bin/sh", "-c", script[program]), {"PATH": os.defpath})


class OverTcp(Production):
    """The same over TCP on the loopback interface."""

    def __init__(self, place: Path, /) -> None:
        super().__init__(place)
        self._addresses = {name: f"tcp:127.0.0.1:{_free_port()}" for name in NAMES}


class OverTls(OverTcp):
    """The same over TLS, with a certificate at either end."""

    def __init__(self, place: Path, /) -> None:
        super().__init__(place)
        self._addresses = {name: text.replace("tcp:", "tls:") for name, text in self._addresses.items()}
        keys, key = _keys(place), create_key()
        (place / "agent.pem").write_bytes(
            key + keys.authority.issue_agent(create_request(key), agent_identity(NAMES)).answering
        )
        context = tls_answering(place / "agent.pem", place / "agent.pem", keys.ca, required=True)
        self._secure = LinkTls(lambda bearer: bool(bearer.role), lambda: keys.client_context, lambda: context)

    def link(self, name: str) -> Link:
        return SocketLink(self._addresses, self._secure)


def _keys(place: Path) -> TlsKeys:
    return TlsKeys(place / "tls", FileDisk(), TlsOptions(), "127.0.0.1")


class OverHttp(OverTcp):
    """The client over HTTP. This link serves nothing itself: a small server stands in for serve/."""

    def __init__(self, place: Path, /) -> None:
        super().__init__(place)
        self._ports = {name: _free_port() for name in NAMES}
        self._made: list[_Http] = []

    def run(self, scenario: Coroutine[Any, Any, None], /) -> None:
        async def closed() -> None:
            try:
                await scenario
            finally:
                for link in self._made:
                    await link.close()

        super().run(closed())

    def link(self, name: str) -> Link:
        link = _Http(self._ports)
        self._made.append(link)
        return link


class _Http(HttpLink):
    _TOKEN: Final = "a-token"

    def __init__(self, ports: dict[str, int], keys: TlsKeys | None = None) -> None:
        scheme, trust = ("http", Trust()) if keys is None else ("https", Trust(str(keys.ca_file)))
        super().__init__({name: f"{scheme}://127.0.0.1:{port}" for name, port in ports.items()}, self._TOKEN, trust=trust)
        self._ports, self._keys = ports, keys

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        return serve_http_service(self._ports[at], service, token=self._TOKEN)


class OverServe(OverHttp):
    """The same, answered by the real application: its routes, its limits and the real listener."""

    def run(self, scenario: Coroutine[Any, Any, None], /) -> None:
        drain_s, http_server.DRAIN_S = http_server.DRAIN_S, 1.0  # type: ignore[misc]
        try:
            super().run(scenario)
        finally:
            http_server.DRAIN_S = drain_s  # type: ignore[misc]

    def link(self, name: str) -> Link:
        link = _Serve(self._ports, self._keys)
        self._made.append(link)
        return link

    @property
    def _keys(self) -> TlsKeys | None:
        return None


class OverHttps(OverServe):
    """The same over TLS."""

    def __init__(self, place: Path, /) -> None:
        super().__init__(place)
        self._ring = _keys(place)

    @property
    def _keys(self) -> TlsKeys | None:
        return self._ring


class _Serve(_Http):
    @asynccontextmanager
    async def serve(self, at: str, service: Service, /) -> AsyncGenerator[None, None]:
        """The server context has only what these two routes use."""
        keys = self._keys
        bound = BoundSocket(ListenAddress(port=self._ports[at]), secure=keys is not None)
        try:
            clock = BootClock()
            tokens: Any = _SingleToken(self._TOKEN)
            server: Any = SimpleNamespace(
                clock=clock,
                telemetry=SimpleNamespace(requests=RequestMetrics(), access_log=None),
                auth=SimpleNamespace(tokens=tokens, hosts=(), tls=None),
                audit=AuditLog(MemoryAuditStorage(), clock),
                world=SimpleNamespace(ids=RandomIds()),
                component_service=_ComponentRoutes(service),
                streams=OpenStreams(clock, tokens, Timing().heartbeat_ms, 1_000),
                watch_cache=None,
                timing=Timing(),
            )
            app = Application(PROGRAMS, server, lambda request, error: None)
            secure = None if keys is None else lambda: keys.server_context
            async with http_server.serve_http(app, bound, on_closing=server.streams.closing.set, tls_context=secure):
                yield
        finally:
            bound.close()


class _ComponentRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self.stream = service.stream

    async def request(self, body: bytes, principal: Principal, judged: object, /) -> bytes:
        return await self._service.request(body)

    def parse_stream_request(self, body: bytes) -> WatchRequest:
        """Every stream request is read as rows, which callers with access to rows may read."""
        return WatchRequest()


class _SingleToken:
    """One component with one token that stays valid."""

    def __init__(self, token: str) -> None:
        self._token = token

    def authenticate(self, authorization: str) -> Principal:
        if authorization != f"Bearer {self._token}":
            raise unauthenticated("the token is not right")
        return Principal("component", "component", "scheduler")

    def is_valid(self, principal: Principal) -> bool:
        return True

    async def wait_until_revoked(self, principal: Principal) -> None:
        await asyncio.Event().wait()


def remove_groups(parent: str) -> None:
    """Remove the cgroup directory of a test. Fails if a process is left in it."""
    for mount in parse_mounts(Path("/proc/self/mountinfo").read_text()):
        with suppress(FileNotFoundError):
            (mount.path / parent).rmdir()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Simulated:
    """The simulated world: virtual time, its own network, disk and machine. Each process is a unit of its own."""

    def __init__(self, place: Path, /) -> None:
        self._loop = SimLoop.seeded("contract")
        self._network = Network(self._loop, "contract")
        self._machine = SimMachine(self._loop, "machine", _NoRecorder(), start_ms=1_000, rate=1.003)
        self._made = 0
        self._process("maker").world.disk.make_directory(place)

    def run(self, scenario: Coroutine[Any, Any, None], /) -> None:
        ended: list[BaseException | None] = []

        async def run_scenario() -> None:
            try:
                await scenario
            except Exception as error:  # noqa: BLE001 - raised again in the test
                ended.append(error)
            else:
                ended.append(None)
            self._loop.stop()

        self._loop.spawn(run_scenario(), name="scene", unit=self._process("scene").unit)
        self._loop.run(3_600.0)
        self._loop.finish()
        assert ended, "the scene did not end within an hour"
        if ended[0] is not None:
            raise ended[0]

    def world(self) -> World:
        return self._process("world").world

    def chance(self, seed: str) -> Randomness:
        return SeededRandomness(seed)

    def clock(self) -> Clock:
        return self._machine.clock

    def link(self, name: str) -> Link:
        return self._process(name).world.link

    def runner(self) -> Runner:
        return self._process("runner").world.runner

    def host(self) -> Host:
        return self._process("host").world.host

    def ports(self) -> Ports:
        return self._process("ports").world.ports

    def prober(self) -> Prober:
        return self._process("prober").world.prober

    def offer(self, world: World, path: Path, content: bytes) -> str:
        self._machine.artifact_sources.files[f"file:{path}"] = content
        return f"file:{path}"

    def http_program(self, port: int) -> ProcessSpec:
        return ProcessSpec(Behaviour(None, listen=port, ready=100).argv())

    def order(self, program: Program) -> ProcessSpec:
        behaviours = {
            Program.EXITS_0: Behaviour(1, 0),
            Program.EXITS_3: Behaviour(1, 3),
            Program.RUNS: Behaviour(None, 0, 10),
            Program.IGNORES: Behaviour(None, 0, None),
            Program.TAKES_64_MIB: Behaviour(None, memory=64 << 20, ready=100),
            Program.ECHOES: Behaviour(None, 0, echo=1),
        }
        return ProcessSpec(("missing",)) if program is Program.MISSING else ProcessSpec(behaviours[program].argv())

    def _process(self, name: str) -> SimProcess:
        """Another process, numbered, because several may have the same name."""
        self._made += 1
        process = SimProcess(self._loop, self._network, name, self._machine, f"contract-{self._made}", _unused)
        process.prepare_start()
        return process


async def _unused(process: SimProcess) -> None:
    raise AssertionError("these processes have no main function")


class _NoRecorder:
    def program_started(self, machine: str, order: ProcessSpec, pid: int) -> None:
        """Not recorded here."""

    def program_stop_requested(self, machine: str, pid: int, by: str) -> None:
        """Not recorded here."""

    def program_ended(self, machine: str, pid: int) -> None:
        """Not recorded here."""


WORLDS: list[type[WorldTwin]] = [Production, Simulated]
LINKS: list[type[LinkTwin]] = [Production, OverTcp, OverTls, OverHttp, OverServe, OverHttps, Simulated]
RUNNERS: list[type[RunnerTwin]] = [Production, Simulated]
HOSTS: list[type[HostTwin]] = [Production, Simulated]
ARTIFACTS: list[type[ArtifactsTwin]] = [Production, Simulated]
