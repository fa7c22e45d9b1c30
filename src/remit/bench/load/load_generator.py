"""Program: HTTP load generator.

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
        self._load, self._buffer = load, b""
        self._transport: asyncio.Transport | None = None
        self.index = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.on_connection_lost()

    def send(self, index: int, request: bytes) -> None:
        self.index = index
        if self._transport is not None:
            self._transport.write(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        head = buffer.find(_END)
        if head >= 0:
            length_at = buffer.find(_LENGTH, 0, head)
            total = head + 4 + (int(buffer[length_at + len(_LENGTH) : buffer.index(b"\r", length_at)]) if length_at >= 0 else 0)
            if len(buffer) >= total:
                self._buffer = b""
                self._load.on_answer(self, int(buffer[9:12]), buffer)
                return
        self._buffer = buffer


class LoadRun:
    """Runs one plan, as often as requested."""

    def __init__(self, plan: LoadPlan, requests: list[bytes]) -> None:
        self._plan, self._requests = plan, requests
        self._connections: list[LoadConnection] = []
        self._idle: deque[LoadConnection] = deque()
        self._overdue: deque[int] = deque()
        self._closing = False

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self._plan.connections):
            _, caller = await loop.create_connection(lambda: LoadConnection(self), self._plan.host, self._plan.port)
            self._connections.append(caller)

    async def run(self) -> LoadResult:
        self._result = LoadResult([], [], [], [])
        self._done = asyncio.get_running_loop().create_future()
        self._answer_count = self._next = 0
        before = _cpu_s()
        self._until_ns = CLOCK.now_ns() + int(self._plan.for_s * 1e9)
        if self._plan.per_s:
            await self._send_evenly()
        else:
            for caller in self._connections:
                self._send_next(caller)
        await self._done
        self._result.cpu_s = _cpu_s() - before
        return self._result

    async def _send_evenly(self) -> None:
        self._idle = deque(self._connections)
        start, count = CLOCK.now_ns(), len(self._requests)
        if self._plan.for_s:
            count = int(self._plan.for_s * self._plan.per_s)
        self._next = count  # all are scheduled
        self._total = count
        for index in range(count):
            due_ns = start + int(index * 1e9 / self._plan.per_s)
            if (pause_ns := due_ns - CLOCK.now_ns()) > 0:
                await asyncio.sleep(
                    max(SLEEP_S_MIN, pause_ns / 1e9)
                )  # sleeping longer and sending several at once costs less CPU
            if self._idle:
                self._send(self._idle.popleft(), index)
            else:
                self._overdue.append(index)

    def _send_next(self, connection: LoadConnection) -> None:
        again = self._plan.for_s and CLOCK.now_ns() < self._until_ns
        if self._next < len(self._requests) or again:
            self._send(connection, self._next)
            self._next += 1
        elif self._answer_count == self._next and not self._done.done():
            self._done.set_result(None)

    def _send(self, connection: LoadConnection, index: int) -> None:
        result, which = self._result, index % len(self._requests)
        result.which.append(which)
        result.sent_ns.append(CLOCK.now_ns())
        result.done_ns.append(0)
        result.status.append(0)
        connection.send(len(result.which) - 1, self._requests[which])

    def on_answer(self, connection: LoadConnection, status: int, answer: bytes) -> None:
        result = self._result
        result.done_ns[connection.index] = CLOCK.now_ns()
        result.status[connection.index] = status
        if status >= 400 and not result.problem:
            result.problem = answer[-600:].decode(errors="replace")
        self._answer_count += 1
        if not self._plan.per_s:
            self._send_next(connection)
        elif self._answer_count == self._total:
            self._done.set_result(None)
        elif self._overdue:
            self._send(connection, self._overdue.popleft())
        else:
            self._idle.append(connection)

    def on_connection_lost(self) -> None:
        if not self._closing and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed a connection"))

    def close(self) -> None:
        self._closing = True
        for caller in self._connections:
            caller.close()


def _cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system


async def main(plan: LoadPlan, requests: list[bytes], result_file: Path) -> None:
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    load = LoadRun(plan, requests)
    await load.connect()
    _print_line("ready")
    while await stdin.readline():
        _write_result(result_file, await load.run())
        _print_line("done")
    load.close()


def _write_result(path: Path, result: LoadResult) -> None:
    path.write_bytes(msgspec.msgpack.encode(result))


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=LoadPlan)
        requests = msgspec.msgpack.decode(Path(plan.requests).read_bytes(), type=list[bytes])
        runner.run(main(plan, requests, Path(plan.found)))
