"""Simulated network: delay, loss, duplication, partition.

A network of named processes that delays, loses, repeats and cuts off.

A message is a callback in the process that it reaches: a dead one never runs it, a frozen one runs it when it is thawed. What
happens to a message is drawn when it is sent, from the state of its way (`Way`) then: a cut drops it, a clog holds it back
until the clog is gone, a slow way takes longer, and any way now and then loses, repeats or delays one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from msgspec import Struct
from msgspec.structs import replace

from remit.simulate.world.event_loop import SimLoop, Unit, stream
from remit.world.interfaces import NotServed, Service, Unheard, Unreached

RESET_S: Final = 0.05
"""After so long a caller hears that the far side's process is gone, if its machine is there."""

NEAR_S: Final = 0.000_1
"""What a message takes on one machine."""

LET_GO_S: Final = 1.0
"""How long a service that ends goes on with what it has begun."""

GAP_S: Final = 1.0
"""How long a stream waits for an item that others have overtaken, before it counts as lost."""


class Weather(Struct, frozen=True):
    """How the network is everywhere. Chances are of each message; delays in seconds."""

    delay_s: tuple[float, float] = (0.000_2, 0.003)
    tail_chance: float = 0.0
    tail_s: float = 0.0
    loss: float = 0.0
    repeat: float = 0.0


class Way(Struct):
    """One direction between two processes. Counters, since two faults may lie on one way at once."""

    cuts: int = 0
    clogs: int = 0
    slow_s: float = 0.0
    held: list[tuple[Callable[..., object], tuple[Any, ...], Unit]] = []


class Network:
    def __init__(self, loop: SimLoop, seed: str, weather: Weather = Weather()) -> None:
        self.weather = self._fair = weather
        self._worse: list[dict[str, float]] = []
        self.counts: dict[str, int] = {}
        self.loop = loop
        self._lots = stream(f"{seed}/network")
        self._ways: dict[tuple[str, str], Way] = {}
        self._near: set[tuple[str, str]] = set()
        """Processes of one machine: no network lies between them."""
        self._serving: dict[str, tuple[Unit, Service]] = {}
        self._under_way: dict[Unit, dict[_Call | _Flow, None]] = {}

    # -- faults ----------------------------------------------------------------------------------------------------------

    def way(self, source: str, target: str) -> Way:
        return self._ways.setdefault((source, target), Way(held=[]))

    def cut(self, source: str, target: str) -> None:
        self.way(source, target).cuts += 1

    def mend(self, source: str, target: str) -> None:
        self.way(source, target).cuts -= 1

    def clog(self, source: str, target: str) -> None:
        self.way(source, target).clogs += 1

    def unclog(self, source: str, target: str) -> None:
        way = self.way(source, target)
        way.clogs -= 1
        if way.clogs == 0:
            held, way.held = way.held, []
            for callback, args, unit in held:
                self._carry(self.delay_s(), callback, args, unit)

    def worsen(self, changes: dict[str, float]) -> Callable[[], None]:
        """Make the weather worse everywhere; of two alike the worse counts. Answers how to take this back."""
        self._worse.append(changes)
        self._add_up()

        def back() -> None:
            self._worse = [one for one in self._worse if one is not changes]
            self._add_up()

        return back

    def _add_up(self) -> None:
        worst: dict[str, float] = {}
        for one in self._worse:
            for name, value in one.items():
                worst[name] = max(value, worst.get(name, getattr(self._fair, name)))
        self.weather = replace(self._fair, **worst)

    def bring_near(self, one: str, other: str) -> None:
        """They are on one machine: what they tell each other arrives, once, and soon."""
        self._near |= {(one, other), (other, one)}

    def reaches(self, source: str, target: str) -> bool:
        way = self._ways.get((source, target))
        return way is None or not (way.cuts or way.clogs)

    # -- messages --------------------------------------------------------------------------------------------------------

    def delay_s(self) -> float:
        weather, lots = self.weather, self._lots.random
        low, high = weather.delay_s
        delay_s = low + (high - low) * lots()
        if weather.tail_chance and lots() < weather.tail_chance:
            delay_s += weather.tail_s * lots()
        return delay_s

    def send(self, source: str, target: str, unit: Unit, callback: Callable[..., object], *args: Any) -> None:
        """Let `callback` happen in `unit`, the process `target`; or not, or late, or twice."""
        if (source, target) in self._near:
            self._carry(NEAR_S, callback, args, unit)
            return
        weather, delay_s = self.weather, self.delay_s()
        way = self._ways.get((source, target))
        if way is not None:
            if way.cuts:
                self._count("cut")
                return
            if way.clogs:
                self._count("clogged")
                way.held.append((callback, args, unit))
                return
            delay_s += way.slow_s * self._lots.random()
        if weather.loss and self._lots.random() < weather.loss:
            self._count("lost")
            return
        if weather.repeat and self._lots.random() < weather.repeat:
            self._count("repeated")
            self._carry(delay_s + self.delay_s() + 0.1 * self._lots.random(), callback, args, unit)
        self._carry(delay_s, callback, args, unit)

    def _carry(self, delay_s: float, callback: Callable[..., object], args: tuple[Any, ...], unit: Unit) -> None:
        self.loop.call_later(delay_s, callback, *args, context=unit.context)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # -- who is there ----------------------------------------------------------------------------------------------------

    def serving(self, name: str) -> tuple[Unit, Service] | None:
        found = self._serving.get(name)
        return None if found is None or found[0].dead else found

    def enlist(self, name: str, unit: Unit, service: Service) -> None:
        self._serving[name] = (unit, service)

    def strike(self, name: str, service: Service) -> None:
        if self._serving.get(name, (None, None))[1] is service:
            del self._serving[name]

    def began(self, call: _Call | _Flow, unit: Unit) -> None:
        self._under_way.setdefault(unit, {})[call] = None

    def over(self, call: _Call | _Flow, unit: Unit) -> None:
        self._under_way.get(unit, {}).pop(call, None)

    def under_way(self, unit: Unit) -> list[_Call | _Flow]:
        return list(self._under_way.get(unit, ()))

    def died(self, unit: Unit) -> None:
        """Its machine tells those who wait for it that the connection is gone, if a message gets through."""
        for call in self._under_way.pop(unit, {}):
            call.broke_off()


class _Call:
    """One request on its way. It may reach the far side twice; the first reply counts."""

    __slots__ = ("body", "link", "reply", "service", "task", "to")

    def __init__(self, link: SimLink, to: str, body: bytes) -> None:
        self.link, self.to, self.body = link, to, body
        self.service: Service | None = None
        self.task: asyncio.Task[None] | None = None
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def arrived(self) -> None:
        """In the far process. What is served there now is what answers."""
        network = self.link.network
        found = network.serving(self.to)
        if found is None:
            self.send_back(_refuse)
            return
        network.loop.note(self.body)
        network.began(self, found[0])
        self.service = found[1]
        self.task = network.loop.create_task(self._serve(*found), name="serve")

    async def _serve(self, unit: Unit, service: Service) -> None:
        try:
            reply = await service.request(self.body)
        except Exception:  # noqa: BLE001 - a service that raises breaks off that one call
            self.link.network.over(self, unit)
            self.send_back(_break_off)
            return
        self.link.network.over(self, unit)
        self.send_back(_hear, reply)

    def send_back(self, what: Callable[..., None], *args: object) -> None:
        self.link.network.send(self.to, self.link.name, self.link.unit, what, self.reply, *args)

    def broke_off(self) -> None:
        if self.task is not None:
            self.task.cancel()
        self.send_back(_break_off)


def _hear(reply: asyncio.Future[bytes], body: bytes) -> None:
    if not reply.done():
        cast(SimLoop, reply.get_loop()).note(body)
        reply.set_result(body)


def _break_off(reply: asyncio.Future[bytes]) -> None:
    if not reply.done():
        reply.set_exception(Unheard("the connection broke", "ask again, or ask another"))


def _refuse(reply: asyncio.Future[bytes]) -> None:
    if not reply.done():
        reply.set_exception(Unreached("nobody serves there", "ask another"))


class SimLink:
    """One process's way into the network: the twin of `world.link.SocketLink`. A dead process sends nothing."""

    def __init__(self, network: Network, name: str, unit: Unit) -> None:
        self.network = network
        self.name = name
        self.unit = unit

    async def request(self, to: str, body: bytes, /) -> bytes:
        call = _Call(self, to, body)
        found = self.network.serving(to)
        if found is None:
            return await self._nobody(to)
        self._send(to, found[0], call, call.arrived)
        try:
            return await call.reply
        finally:
            if call.task is None:
                self.network.over(call, found[0])

    def _send(self, to: str, unit: Unit, call: _Call | _Flow, arrived: Callable[..., object], *args: Any) -> None:
        """It counts as under way from here on: whoever dies before it arrives is missed just as one who dies after it."""
        if not self.unit.dead:
            self.network.began(call, unit)
            self.network.send(self.name, to, unit, arrived, *args)

    async def _nobody(self, to: str) -> bytes:
        """Nobody has that name now: its machine refuses, if the message gets there and the answer back. A cut is silence."""
        reply = self.network.loop.create_future()
        if not self.unit.dead and self.network.reaches(self.name, to) and self.network.reaches(to, self.name):
            self.network.loop.call_later(RESET_S, _refuse, reply)
        answer: bytes = await reply
        return answer

    async def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        flow = _Flow(self, to, body)
        found = self.network.serving(to)
        if found is None:
            await self._nobody(to)
            return
        self._send(to, found[0], flow, flow.opened, *found)
        try:
            while (item := await flow.next()) is not None:
                yield item
        finally:
            flow.leave(found[0])

    @asynccontextmanager
    async def serve(self, at: str, service: Service, /) -> AsyncIterator[None]:
        if self.network.serving(at) is not None:
            raise NotServed(f"{at} is served already", "stop that one, or use another name")
        self.network.enlist(at, self.unit, service)
        try:
            yield
        finally:
            self.network.strike(at, service)
            await self._let_go(service)

    async def _let_go(self, service: Service) -> None:
        """Streams break now; a request may still be answered for a while."""
        until_s = self.network.loop.time() + LET_GO_S
        while calls := [call for call in self.network.under_way(self.unit) if call.service is service]:
            late = self.network.loop.time() >= until_s
            for call in calls:
                if late or isinstance(call, _Flow):
                    self.network.over(call, self.unit)
                    call.broke_off()
            await asyncio.sleep(LET_GO_S / 20)


class _Flow:
    """One stream. The network may repeat, lose and overtake items; a stream does none of these, it breaks."""

    def __init__(self, link: SimLink, to: str, body: bytes) -> None:
        self.link, self.to, self.body = link, to, body
        self._loop = asyncio.get_running_loop()
        self._arrived: dict[int, bytes | Exception | None] = {}
        self._next = 0
        self._sent = 0
        self._waiting: asyncio.Future[None] | None = None
        self.service: Service | None = None
        self._task: asyncio.Task[None] | None = None
        self._left = False

    def opened(self, unit: Unit, service: Service) -> None:
        """In the far process."""
        if self._left or self._task is not None:
            return
        self.link.network.began(self, unit)
        self.service = service
        self._task = self._loop.create_task(self._pump(unit, service), name="stream")

    async def _pump(self, unit: Unit, service: Service) -> None:
        try:
            async for item in service.stream(self.body):
                self._send(item)
        except Exception:  # noqa: BLE001 - a service that raises breaks off that one call
            self._send(Unheard("the stream broke", "open it anew"))
        else:
            self._send(None)
        self.link.network.over(self, unit)

    def broke_off(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._send(Unheard("the stream broke", "open it anew"))

    def _send(self, item: bytes | Exception | None) -> None:
        number, self._sent = self._sent, self._sent + 1
        self.link.network.send(self.to, self.link.name, self.link.unit, self._arrive, number, item)

    def _arrive(self, number: int, item: bytes | Exception | None) -> None:
        if number < self._next:
            return  # it came again
        self.link.network.loop.note(item if isinstance(item, bytes) else repr(item).encode())
        self._arrived[number] = item
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def next(self) -> bytes | None:
        until_s: float | None = None
        while self._next not in self._arrived:
            if self._arrived and until_s is None:
                until_s = self._loop.time() + GAP_S
            await self._wait(until_s)
        item = self._arrived.pop(self._next)
        self._next += 1
        if isinstance(item, Exception):
            raise item
        return item

    async def _wait(self, until_s: float | None) -> None:
        self._waiting = self._loop.create_future()
        try:
            async with asyncio.timeout_at(until_s):  # noqa: TID251 - the transport's own time
                await self._waiting
        except TimeoutError:
            raise Unheard("part of the stream was lost", "open it anew") from None

    def leave(self, unit: Unit) -> None:
        self._left = True
        if self._task is None:
            self.link.network.over(self, unit)
        elif not self.link.unit.dead:
            self.link.network.send(self.link.name, self.to, unit, self._end, unit)

    def _end(self, unit: Unit) -> None:
        self.link.network.over(self, unit)
        if self._task is not None:
            self._task.cancel()
