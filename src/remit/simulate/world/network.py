"""Simulated network: delay, loss, duplication, partition.

A message is a callback in the receiving process: a killed process never runs it, a frozen one runs it after it is thawed.
The fate of a message is drawn when it is sent, from the state of its path (`NetworkPath`) and the conditions of the whole
network (`NetworkConditions`): a cut path drops it, a clogged path holds it until the clog is removed, a slow path adds
delay, and on any path a message may be lost, repeated or delayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from msgspec import Struct
from msgspec.structs import replace

from remit.simulate.world import random_streams
from remit.simulate.world.event_loop import ExecutionUnit, SimLoop
from remit.world.interfaces import ListenFailed, NotSent, ReplyLost, Service

RESET_S: Final = 0.05
"""After this time a caller learns that no process serves the address, if the machine is reachable."""

LOCAL_DELAY_S: Final = 0.000_1
"""Delay of a message between two processes of one machine."""

SHUTDOWN_S: Final = 1.0
"""How long a service that shuts down finishes the requests it has begun."""

STREAM_GAP_S: Final = 1.0
"""How long a stream waits for a missing item after later ones have arrived. Then the stream breaks."""


class NetworkConditions(Struct, frozen=True):
    """Conditions of the whole network. Probabilities are per message; delays are in seconds."""

    delay_s: tuple[float, float] = (0.000_2, 0.003)
    tail_chance: float = 0.0
    tail_s: float = 0.0
    loss: float = 0.0
    repeat: float = 0.0


class NetworkPath(Struct):
    """One direction between two processes. Cuts and clogs are counted, because two faults may affect one path at once."""

    cuts: int = 0
    clogs: int = 0
    slow_s: float = 0.0
    held: list[tuple[Callable[..., object], tuple[Any, ...], ExecutionUnit]] = []


class Network:
    def __init__(self, loop: SimLoop, seed: str, conditions: NetworkConditions = NetworkConditions()) -> None:
        self.conditions = self._baseline = conditions
        self._degradations: list[dict[str, float]] = []
        self.counts: dict[str, int] = {}
        self.loop = loop
        self._rng = random_streams.stream(random_streams.network(seed))
        self._paths: dict[tuple[str, str], NetworkPath] = {}
        self._local_pairs: set[tuple[str, str]] = set()
        """Pairs of processes on one machine. Their messages do not use the network."""
        self._serving: dict[str, tuple[ExecutionUnit, Service]] = {}
        self._in_progress: dict[ExecutionUnit, dict[_Call | _Stream, None]] = {}

    # -- faults ----------------------------------------------------------------------------------------------------------

    def path(self, source: str, target: str) -> NetworkPath:
        return self._paths.setdefault((source, target), NetworkPath(held=[]))

    def cut(self, source: str, target: str) -> None:
        self.path(source, target).cuts += 1

    def heal(self, source: str, target: str) -> None:
        self.path(source, target).cuts -= 1

    def clog(self, source: str, target: str) -> None:
        self.path(source, target).clogs += 1

    def unclog(self, source: str, target: str) -> None:
        path = self.path(source, target)
        path.clogs -= 1
        if path.clogs == 0:
            held, path.held = path.held, []
            for callback, args, unit in held:
                self._deliver_after(self.delay_s(), callback, args, unit)

    def degrade(self, changes: dict[str, float]) -> Callable[[], None]:
        """Make the conditions worse everywhere; for each field the worst active value applies. Returns a function that undoes
        this change.
        """
        self._degradations.append(changes)
        self._apply_worst()

        def undo() -> None:
            self._degradations = [change for change in self._degradations if change is not changes]
            self._apply_worst()

        return undo

    def _apply_worst(self) -> None:
        worst: dict[str, float] = {}
        for change in self._degradations:
            for name, value in change.items():
                worst[name] = max(value, worst.get(name, getattr(self._baseline, name)))
        self.conditions = replace(self._baseline, **worst)

    def colocate(self, first: str, second: str) -> None:
        """Mark two processes as being on one machine: their messages arrive exactly once and quickly."""
        self._local_pairs |= {(first, second), (second, first)}

    def reaches(self, source: str, target: str) -> bool:
        path = self._paths.get((source, target))
        return path is None or not (path.cuts or path.clogs)

    # -- messages --------------------------------------------------------------------------------------------------------

    def delay_s(self) -> float:
        conditions, draw = self.conditions, self._rng.random
        low, high = conditions.delay_s
        delay_s = low + (high - low) * draw()
        if conditions.tail_chance and draw() < conditions.tail_chance:
            delay_s += conditions.tail_s * draw()
        return delay_s

    def send(self, source: str, target: str, unit: ExecutionUnit, callback: Callable[..., object], *args: Any) -> None:
        """Deliver a message: run `callback` in `unit`, the process `target`. It may be lost, delayed or repeated."""
        if (source, target) in self._local_pairs:
            self._deliver_after(LOCAL_DELAY_S, callback, args, unit)
            return
        conditions, delay_s = self.conditions, self.delay_s()
        path = self._paths.get((source, target))
        if path is not None:
            if path.cuts:
                self._count("cut")
                return
            if path.clogs:
                self._count("clogged")
                path.held.append((callback, args, unit))
                return
            delay_s += path.slow_s * self._rng.random()
        if conditions.loss and self._rng.random() < conditions.loss:
            self._count("lost")
            return
        if conditions.repeat and self._rng.random() < conditions.repeat:
            self._count("repeated")
            self._deliver_after(delay_s + self.delay_s() + 0.1 * self._rng.random(), callback, args, unit)
        self._deliver_after(delay_s, callback, args, unit)

    def _deliver_after(
        self, delay_s: float, callback: Callable[..., object], args: tuple[Any, ...], unit: ExecutionUnit
    ) -> None:
        self.loop.call_later(delay_s, callback, *args, context=unit.context)

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    # -- services and calls -------------------------------------------------------------------------------------------------

    def serving(self, name: str) -> tuple[ExecutionUnit, Service] | None:
        server = self._serving.get(name)
        return None if server is None or server[0].dead else server

    def register(self, name: str, unit: ExecutionUnit, service: Service) -> None:
        self._serving[name] = (unit, service)

    def unregister(self, name: str, service: Service) -> None:
        if self._serving.get(name, (None, None))[1] is service:
            del self._serving[name]

    def begin_call(self, call: _Call | _Stream, unit: ExecutionUnit) -> None:
        self._in_progress.setdefault(unit, {})[call] = None

    def end_call(self, call: _Call | _Stream, unit: ExecutionUnit) -> None:
        self._in_progress.get(unit, {}).pop(call, None)

    def calls_in_progress(self, unit: ExecutionUnit) -> list[_Call | _Stream]:
        return list(self._in_progress.get(unit, ()))

    def reset_connections(self, unit: ExecutionUnit) -> None:
        """The machine of a killed process resets its open connections, as a kernel does. The reset itself is a message that may
        be lost.
        """
        for call in self._in_progress.pop(unit, {}):
            call.abort()


class _Call:
    """One request in progress. The network may deliver it twice; the first reply counts."""

    __slots__ = ("body", "link", "reply", "service", "task", "to")

    def __init__(self, link: SimLink, to: str, body: bytes) -> None:
        self.link, self.to, self.body = link, to, body
        self.service: Service | None = None
        self.task: asyncio.Task[None] | None = None
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def arrived(self) -> None:
        """Runs in the receiving process. The service that is registered now handles the request."""
        network = self.link.network
        server = network.serving(self.to)
        if server is None:
            self.send_reply(_refuse_connection)
            return
        network.loop.add_to_digest(self.body)
        network.begin_call(self, server[0])
        self.service = server[1]
        self.task = network.loop.create_task(self._serve(*server), name="serve")

    async def _serve(self, unit: ExecutionUnit, service: Service) -> None:
        try:
            reply = await service.request(self.body)
        except Exception:  # noqa: BLE001 - an exception of a service fails only this call
            self.link.network.end_call(self, unit)
            self.send_reply(_fail_reply)
            return
        self.link.network.end_call(self, unit)
        self.send_reply(_receive_reply, reply)

    def send_reply(self, name: Callable[..., None], *args: object) -> None:
        self.link.network.send(self.to, self.link.name, self.link.unit, name, self.reply, *args)

    def abort(self) -> None:
        if self.task is not None:
            self.task.cancel()
        self.send_reply(_fail_reply)


def _receive_reply(reply: asyncio.Future[bytes], body: bytes) -> None:
    if not reply.done():
        cast(SimLoop, reply.get_loop()).add_to_digest(body)
        reply.set_result(body)


def _fail_reply(reply: asyncio.Future[bytes]) -> None:
    if not reply.done():
        reply.set_exception(ReplyLost("the connection broke", "retry, or use another server"))


def _refuse_connection(reply: asyncio.Future[bytes]) -> None:
    if not reply.done():
        reply.set_exception(NotSent("nothing serves at this address", "use another server"))


class SimLink:
    """Network access of one process: simulated counterpart of `world.net.rpc_client.SocketLink`. A killed process sends
    nothing.
    """

    def __init__(self, network: Network, name: str, unit: ExecutionUnit) -> None:
        self.network = network
        self.name = name
        self.unit = unit

    async def request(self, to: str, body: bytes, /) -> bytes:
        call = _Call(self, to, body)
        server = self.network.serving(to)
        if server is None:
            return await self._await_refusal(to)
        self._send(to, server[0], call, call.arrived)
        try:
            return await call.reply
        finally:
            if call.task is None:
                self.network.end_call(call, server[0])

    def _send(self, to: str, unit: ExecutionUnit, call: _Call | _Stream, arrived: Callable[..., object], *args: Any) -> None:
        """Send a request or open a stream. It counts as in progress from now on, so that the caller learns of the death of the
        receiver even if that dies before the message arrives.
        """
        if not self.unit.dead:
            self.network.begin_call(call, unit)
            self.network.send(self.name, to, unit, arrived, *args)

    async def _await_refusal(self, to: str) -> bytes:
        """No process serves this name. Its machine refuses the connection if messages pass in both directions; over a cut path
        the caller waits without an answer.
        """
        reply = self.network.loop.create_future()
        if not self.unit.dead and self.network.reaches(self.name, to) and self.network.reaches(to, self.name):
            self.network.loop.call_later(RESET_S, _refuse_connection, reply)
        answer: bytes = await reply
        return answer

    async def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        opened = _Stream(self, to, body)
        server = self.network.serving(to)
        if server is None:
            await self._await_refusal(to)
            return
        self._send(to, server[0], opened, opened.opened, *server)
        try:
            while (item := await opened.next()) is not None:
                yield item
        finally:
            opened.close(server[0])

    @asynccontextmanager
    async def serve(self, at: str, service: Service, /) -> AsyncIterator[None]:
        if self.network.serving(at) is not None:
            raise ListenFailed(f"{at} already has a service", "stop that service, or use another name")
        self.network.register(at, self.unit, service)
        try:
            yield
        finally:
            self.network.unregister(at, service)
            await self._shut_down(service)

    async def _shut_down(self, service: Service) -> None:
        """Shut down a service: break its streams now, and give its requests up to `SHUTDOWN_S` to finish."""
        until_s = self.network.loop.time() + SHUTDOWN_S
        while calls := [call for call in self.network.calls_in_progress(self.unit) if call.service is service]:
            late = self.network.loop.time() >= until_s
            for call in calls:
                if late or isinstance(call, _Stream):
                    self.network.end_call(call, self.unit)
                    call.abort()
            await asyncio.sleep(SHUTDOWN_S / 20)


class _Stream:
    """One stream. The network may lose, repeat or reorder messages; a stream delivers its items in order and exactly once, or
    breaks.
    """

    def __init__(self, link: SimLink, to: str, body: bytes) -> None:
        self.link, self.to, self.body = link, to, body
        self._loop = asyncio.get_running_loop()
        self._arrived: dict[int, bytes | Exception | None] = {}
        self._next = 0
        self._sent = 0
        self._waiting: asyncio.Future[None] | None = None
        self.service: Service | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def opened(self, unit: ExecutionUnit, service: Service) -> None:
        """Runs in the receiving process."""
        if self._closed or self._task is not None:
            return
        self.link.network.begin_call(self, unit)
        self.service = service
        self._task = self._loop.create_task(self._pump(unit, service), name="stream")

    async def _pump(self, unit: ExecutionUnit, service: Service) -> None:
        try:
            async for item in service.stream(self.body):
                self._send(item)
        except Exception:  # noqa: BLE001 - an exception of a service fails only this call
            self._send(ReplyLost("the stream broke", "open the stream again"))
        else:
            self._send(None)
        self.link.network.end_call(self, unit)

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._send(ReplyLost("the stream broke", "open the stream again"))

    def _send(self, item: bytes | Exception | None) -> None:
        number, self._sent = self._sent, self._sent + 1
        self.link.network.send(self.to, self.link.name, self.link.unit, self._arrive, number, item)

    def _arrive(self, number: int, item: bytes | Exception | None) -> None:
        if number < self._next:
            return  # a repeated message
        self.link.network.loop.add_to_digest(item if isinstance(item, bytes) else repr(item).encode())
        self._arrived[number] = item
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def next(self) -> bytes | None:
        until_s: float | None = None
        while self._next not in self._arrived:
            if self._arrived and until_s is None:
                until_s = self._loop.time() + STREAM_GAP_S
            await self._wait(until_s)
        item = self._arrived.pop(self._next)
        self._next += 1
        if isinstance(item, Exception):
            raise item
        return item

    async def _wait(self, until_s: float | None) -> None:
        self._waiting = self._loop.create_future()
        try:
            async with asyncio.timeout_at(until_s):  # noqa: TID251 - a timer of the simulated transport, not of a component
                await self._waiting
        except TimeoutError:
            raise ReplyLost("an item of the stream was lost", "open the stream again") from None

    def close(self, unit: ExecutionUnit) -> None:
        self._closed = True
        if self._task is None:
            self.link.network.end_call(self, unit)
        elif not self.link.unit.dead:
            self.link.network.send(self.link.name, self.to, unit, self._end, unit)

    def _end(self, unit: ExecutionUnit) -> None:
        self.link.network.end_call(self, unit)
        if self._task is not None:
            self._task.cancel()
