"""How does a connection begin that must be a TLS one? Taken, looked at and shaken hands with, in time; nothing is read from it.

All of that is bounded before anybody is known: how many at once, together with those that are known already, and for how long.
Whoever speaks something else than TLS is told so in plain words, if there are any, and is let go.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

from remit.world.crowding import Crowd
from remit.world.tls import CLOSING_S_MAX, HANDSHAKE_S_MAX

TLS_RECORD: Final = 0x16
"""What the first byte of a handshake is, since TLS 1.0."""
READ_BYTES: Final = 64 << 10
REST_S: Final = 0.1
"""After the system could not give a connection, for want of numbers for files, say."""


class Doorstep(NamedTuple):
    """`context` is asked anew for each: a certificate that was renewed is shown to the next. `known` counts those inside."""

    context: Callable[[], ssl.SSLContext]
    known: Callable[[], int]
    connections_max: int
    plain: bytes = b""
    """What whoever does not speak TLS is told."""
    turned: Callable[[str, str], None] = lambda address, why: None
    """Hears of whoever was not let in: from which address, and why."""
    crowd: Crowd | None = None
    """Those inside, by their addresses; None: all who come are as good."""


@asynccontextmanager
async def greeting(
    bound: socket.socket, factory: Callable[[], asyncio.BaseProtocol], doorstep: Doorstep
) -> AsyncGenerator[None, None]:
    """For as long as this lasts, whoever comes has a protocol of the factory, once it is known. The socket stays open."""
    greeter = _Greeter(factory, doorstep)
    taking = asyncio.create_task(greeter.take(bound), name="greeting")
    try:
        yield
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await greeter.close()


class _Greeter:
    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], doorstep: Doorstep) -> None:
        self._factory, self._doorstep = factory, doorstep
        self._greeted: set[asyncio.Task[None]] = set()
        self._coming = Crowd(doorstep.connections_max)

    async def take(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(bound)
            except OSError:
                await asyncio.sleep(REST_S)
                continue
            why = self._why_not(_address(peer))
            if why:
                connection.close()  # to say why would cost what there is too little of
                self._doorstep.turned(_address(peer), why)
                continue
            task = asyncio.create_task(self._greet(connection, _address(peer)))
            self._greeted.add(task)
            task.add_done_callback(self._greeted.discard)

    def _why_not(self, address: str) -> str:
        """Empty: it is let in."""
        crowd = self._doorstep.crowd
        if len(self._greeted) + self._doorstep.known() >= self._doorstep.connections_max:
            return "too many connections"
        if crowd is not None and not crowd.may_come(address, self._coming):
            return "too many connections from this address"
        return ""

    async def close(self) -> None:
        for task in self._greeted:
            task.cancel()
        await asyncio.gather(*self._greeted, return_exceptions=True)

    async def _greet(self, connection: socket.socket, address: str) -> None:
        """From the first byte to the last of the handshake; then the connection is its protocol's."""
        loop = asyncio.get_running_loop()
        handed = False
        self._coming.came(address)
        try:
            async with asyncio.timeout(HANDSHAKE_S_MAX):
                first = await _first_byte(connection)
                if first != TLS_RECORD:
                    await _told(connection, self._doorstep.plain if first is not None else b"")
                    if first is not None:  # else it came and went
                        self._doorstep.turned(address, "this is no TLS")
                    return
                handed = True  # whatever happens, it is closed by whom it was given to
                await loop.connect_accepted_socket(
                    self._factory,
                    connection,
                    ssl=self._doorstep.context(),
                    ssl_handshake_timeout=HANDSHAKE_S_MAX,
                    ssl_shutdown_timeout=CLOSING_S_MAX,
                )
        except TimeoutError:
            self._doorstep.turned(address, "the handshake did not come to its end in time")
        except OSError as error:  # it was none of ours; nobody waits for an answer
            if isinstance(error, ssl.SSLError):
                self._doorstep.turned(address, f"the handshake failed ({error.reason or 'broken off'})")
        finally:
            self._coming.left(address)
            if not handed:
                connection.close()


def _address(peer: Any) -> str:
    return str(peer[0]) if isinstance(peer, tuple) else ""


async def _first_byte(connection: socket.socket) -> int | None:
    """It stays where it is: whoever reads the connection next has it too. None: there is none."""
    loop = asyncio.get_running_loop()
    came = loop.create_future()

    def arrived() -> None:
        if not came.done():
            came.set_result(None)

    loop.add_reader(connection, arrived)
    try:
        await came
    finally:
        loop.remove_reader(connection)
    found = connection.recv(1, socket.MSG_PEEK)
    return found[0] if found else None


async def _told(connection: socket.socket, words: bytes) -> None:
    if words:
        with suppress(BlockingIOError):
            connection.recv(READ_BYTES)  # what is unread when it is closed would take the answer with it
        await asyncio.get_running_loop().sock_sendall(connection, words)
        connection.shutdown(socket.SHUT_WR)
