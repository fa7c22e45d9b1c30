"""A world with virtual time, the minimum that implements the interfaces, for unit tests.

The simulator has a world of its own; this one injects no faults.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from remit.world.files.artifacts import FileArtifactFetcher
from remit.world.files.disk import FileDisk
from remit.world.interfaces import (
    ExitStatus,
    HostInventory,
    IsolationSupport,
    NotSent,
    NotStarted,
    OffloadClosed,
    ProbeResult,
    ProcessHandle,
    ProcessSpec,
    Service,
    Usage,
    World,
)
from remit.world.process.exec_session import ExecSession, PtySize
from remit.world.randomness import SeededRandomness

T = TypeVar("T")


class _LeapingSelector(selectors.SelectSelector):
    """Where a real loop would wait, virtual time jumps to the end of the wait."""

    leap: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everybody waits for somebody: no timer, nothing to read")
        if not ready and timeout is not None and timeout > 0:
            self.leap(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 1_000.0
        selector = _LeapingSelector()
        selector.leap = self._leap
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def _leap(self, seconds: float) -> None:
        self._now += seconds


class VirtualClock:
    """Reads the running loop. `suspend` is a suspended machine: this clock advances, the loop's does not."""

    def __init__(self) -> None:
        self._ahead_ms = 0

    def now_ms(self) -> int:
        return round(asyncio.get_running_loop().time() * 1000) + self._ahead_ms

    def suspend(self, ms: int) -> None:
        self._ahead_ms += ms

    def boot(self) -> str:
        return "virtual"

    def wall(self) -> str:
        return "2026-01-01T00:00:00.000Z"

    async def sleep_ms(self, ms: int) -> None:
        if ms < 0:
            raise ValueError(ms)
        until_ms = self.now_ms() + ms
        await asyncio.sleep(0)
        while (left_ms := until_ms - self.now_ms()) > 0:  # noqa: ASYNC110 - it waits for time itself
            await asyncio.sleep(left_ms / 1000)

    def timeout_ms(self, ms: int) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(ms / 1000)


class VirtualIds:
    def __init__(self, randomness: SeededRandomness) -> None:
        self._randomness = randomness

    def nonce(self) -> str:
        return "".join(self._randomness.choice("abcdefghijklmnopqrstuvwxyz234567") for _ in range(16))

    def incarnation(self) -> str:
        return self.nonce()[:8]


class InlineOffload:
    def __init__(self) -> None:
        self._closed = False

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        if self._closed:
            raise OffloadClosed("closed", "start anew")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            answer.set_result(work())
        except Exception as error:  # noqa: BLE001
            answer.set_exception(error)
        return answer

    async def close(self) -> None:
        self._closed = True


class NoLink:
    """A world with a single process."""

    async def request(self, to: str, body: bytes, /) -> bytes:
        raise NotSent(f"nobody is at {to}", "use a world with more processes in it")

    async def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        yield await self.request(to, body)

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        return nullcontext()  # nothing ever calls it


class NoRunner:
    """A world that cannot run processes."""

    async def start(self, order: ProcessSpec, /) -> ProcessHandle:
        raise NotStarted("nothing runs here", "use a world with a machine in it")

    async def wait(self, running: ProcessHandle, /) -> ExitStatus:
        return ExitStatus()

    def is_alive(self, running: ProcessHandle, /) -> bool:
        return False

    async def stop(self, running: ProcessHandle, /, *, grace_ms: int) -> None:
        pass

    async def start_exec(self, running: ProcessHandle, order: ProcessSpec, /, *, window: PtySize | None = None) -> ExecSession:
        raise NotStarted("nothing runs here", "use a world with a machine in it")

    def usage(self, running: ProcessHandle, /) -> Usage:
        return Usage()

    def isolation_support(self) -> IsolationSupport:
        return IsolationSupport("none", (), "nothing runs here", sandbox=False)

    def live_groups(self) -> tuple[str, ...]:
        return ()

    async def kill_group(self, group: str, /) -> None:
        pass


class NoHost:
    def inventory(self) -> HostInventory:
        return HostInventory("virtual", "none", "virtual", 1_000, 1 << 30)


class NoProbes:
    """Ports and probes of a machine on which nothing runs."""

    async def find_free(self, count: int, /) -> list[int]:
        return list(range(20_000, 20_000 + count))

    async def http(self, host: str, port: int, path: str, /, *, timeout_ms: int) -> ProbeResult:
        return ProbeResult(ok=False, detail="nobody is there")

    async def tcp(self, host: str, port: int, /, *, timeout_ms: int) -> ProbeResult:
        return ProbeResult(ok=False, detail="nobody is there")


def virtual_world(seed: str = "1") -> World:
    randomness = SeededRandomness(seed)
    return World(
        clock=VirtualClock(),
        randomness=randomness,
        ids=VirtualIds(randomness.stream("ids")),
        disk=FileDisk(),
        offload=InlineOffload(),
        link=NoLink(),
        runner=NoRunner(),
        host=NoHost(),
        ports=NoProbes(),
        prober=NoProbes(),
        artifacts=FileArtifactFetcher(),
    )


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Raise what `work` raises, or the first error reported to the loop."""
    errors: list[Mapping[str, Any]] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: errors.append(context))
        result = runner.run(work)
    assert not errors, errors
    return result
