"""HTTP load generator (`-m`).

Sends requests that were encoded before, on a few connections.

    python -m remit.bench.load.load_generator PLAN

It shares the CPUs with the server under test, so it does as little as possible: raw streams, and no parsing beyond status
and length. It prints `ready` once connected and starts at the next line on its stdin. Then it writes its results to the
plan's `found` and prints `done`. It repeats this for every line, until its stdin ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from remit.world.clock import BootClock

CLOCK: Final = BootClock()
SLEEP_S_MIN: Final = 0.002
_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length: "


class LoadPlan(msgspec.Struct, omit_defaults=True):
    """The requests to send. `requests` names a msgpack file with a list of encoded requests.

    With `per_s`, requests are sent evenly at that rate; otherwise each connection sends its next request as soon as the last
    one is answered. With `for_s`, the list is repeated until that time has passed.
    """

    host: str
    port: int
    requests: str
    found: str
    connections: int = 64
    per_s: float = 0.0
    for_s: float = 0.0


class LoadResult(msgspec.Struct):
    """Result by request, in order of sending: index of the request, times of sending and answer (boot clock), and status."""

    which: list[int]
    sent_ns: list[int]
    done_ns: list[int]
    status: list[int]
    cpu_s: float = 0.0
    problem: str = ""

    def latencies_ms(self) -> list[float]:
        return [(done - sent) / 1e6 for sent, done in zip(self.sent_ns, self.done_ns, strict=True)]


class LoadConnection(asyncio.Protocol):
    """One connection, with at most one request in flight."""

    def __init__(self, load: LoadRun) -> None:
        self._load, self._held = load, b""
        self._transport: asyncio.Transport | None = None
        self.at = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.lost()

    def send(self, at: int, request: bytes) -> None:
        self.at = at
        if self._transport is not None:
            self._transport.write(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        held = self._held + data if self._held else data
        head = held.find(_END)
        if head >= 0:
            at = held.find(_LENGTH, 0, head)
            whole = head + 4 + (int(held[at + len(_LENGTH) : held.index(b"\r", at)]) if at >= 0 else 0)
            if len(held) >= whole:
                self._held = b""
                self._load.answered(self, int(held[9:12]), held)
                return
        self._held = held


class LoadRun:
    """Runs one plan, as often as requested."""

    def __init__(self, plan: LoadPlan, requests: list[bytes]) -> None:
        self._plan, self._requests = plan, requests
        self._callers: list[LoadConnection] = []
        self._free: deque[LoadConnection] = deque()
        self._due: deque[int] = deque()
        self._ending = False

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self._plan.connections):
            _, caller = await loop.create_connection(lambda: LoadConnection(self), self._plan.host, self._plan.port)
            self._callers.append(caller)

    async def run(self) -> LoadResult:
        self._found = LoadResult([], [], [], [])
        self._over = asyncio.get_running_loop().create_future()
        self._answers = self._next = 0
        before = _cpu_s()
        self._until_ns = CLOCK.now_ns() + int(self._plan.for_s * 1e9)
        if self._plan.per_s:
            await self._evenly()
        else:
            for caller in self._callers:
                self._go_on(caller)
        await self._over
        self._found.cpu_s = _cpu_s() - before
        return self._found

    async def _evenly(self) -> None:
        self._free = deque(self._callers)
        start, count = CLOCK.now_ns(), len(self._requests)
        if self._plan.for_s:
            count = int(self._plan.for_s * self._plan.per_s)
        self._next = count  # all are scheduled
        self._left = count
        for index in range(count):
            due = start + int(index * 1e9 / self._plan.per_s)
            if (pause := due - CLOCK.now_ns()) > 0:
                await asyncio.sleep(max(SLEEP_S_MIN, pause / 1e9))  # sleeping longer and sending several at once costs less CPU
            if self._free:
                self._send(self._free.popleft(), index)
            else:
                self._due.append(index)

    def _go_on(self, caller: LoadConnection) -> None:
        again = self._plan.for_s and CLOCK.now_ns() < self._until_ns
        if self._next < len(self._requests) or again:
            self._send(caller, self._next)
            self._next += 1
        elif self._answers == self._next and not self._over.done():
            self._over.set_result(None)

    def _send(self, caller: LoadConnection, index: int) -> None:
        found, which = self._found, index % len(self._requests)
        found.which.append(which)
        found.sent_ns.append(CLOCK.now_ns())
        found.done_ns.append(0)
        found.status.append(0)
        caller.send(len(found.which) - 1, self._requests[which])

    def answered(self, caller: LoadConnection, status: int, answer: bytes) -> None:
        found = self._found
        found.done_ns[caller.at] = CLOCK.now_ns()
        found.status[caller.at] = status
        if status >= 400 and not found.problem:
            found.problem = answer[-600:].decode(errors="replace")
        self._answers += 1
        if not self._plan.per_s:
            self._go_on(caller)
        elif self._answers == self._left:
            self._over.set_result(None)
        elif self._due:
            self._send(caller, self._due.popleft())
        else:
            self._free.append(caller)

    def lost(self) -> None:
        if not self._ending and not self._over.done():
            self._over.set_exception(ConnectionError("the server closed a connection"))

    def close(self) -> None:
        self._ending = True
        for caller in self._callers:
            caller.close()


def _cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system


async def main(plan: LoadPlan, requests: list[bytes], found_at: Path) -> None:
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    load = LoadRun(plan, requests)
    await load.connect()
    _print_line("ready")
    while await stdin.readline():
        _write_result(found_at, await load.run())
        _print_line("done")
    load.close()


def _write_result(found_at: Path, found: LoadResult) -> None:
    found_at.write_bytes(msgspec.msgpack.encode(found))


def _print_line(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=LoadPlan)
        requests = msgspec.msgpack.decode(Path(plan.requests).read_bytes(), type=list[bytes])
        runner.run(main(plan, requests, Path(plan.found)))
