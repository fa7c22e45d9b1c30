"""TLS listener: identifies callers, limits handshakes, and serves renewed certificates. Real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from remit.law.certificate_identity import SERVER_IDENTITY, CertificateIdentity, agent_identity
from remit.world.files.disk import FileDisk
from remit.world.net import tls
from remit.world.net.certificates import CertificateLifetimes, create_key, create_request
from remit.world.net.connections import BoundSocket, ListenAddress
from remit.world.net.http_server import serve_http
from remit.world.net.server_keys import TlsKeys, TlsOptions
from remit.world.net.tls import Trust, client_context
from remit.world.production import production

pytestmark = pytest.mark.smoke

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def report_identity(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the identity of the caller."""
    bearer: CertificateIdentity = scope["bearer"]
    data = json.dumps([scope["scheme"], bearer.role, bearer.nodes]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(data)).encode())]})
    await send({"type": "http.response.body", "body": data})


def run_on_both_loops(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On both event loops: servers run on uvloop, tests of the SDK on asyncio."""
    asyncio.run(main())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@asynccontextmanager
async def listening(keys: TlsKeys, **more: Any) -> AsyncIterator[BoundSocket]:
    bound = BoundSocket(ListenAddress("127.0.0.1", 0), secure=True)
    try:
        async with serve_http(report_identity, bound, on_closing=lambda: None, tls_context=lambda: keys.server_context, **more):
            yield bound
    finally:
        bound.close()


@pytest.fixture
def keys(tmp_path: Path) -> TlsKeys:
    return TlsKeys(tmp_path / "tls", FileDisk(), TlsOptions(), "127.0.0.1")


async def ask(bound: BoundSocket, trust: Trust, data: bytes = GET) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", bound.port, ssl=client_context(trust), server_hostname="localhost"
    )
    writer.write(data)
    return reader, writer


async def read_answer(reader: asyncio.StreamReader) -> Any:
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    return json.loads(await reader.readuntil(b"]]"))


def test_application_gets_caller_identity(keys: TlsKeys, tmp_path: Path) -> None:
    key = create_key()
    pair = keys.authority.issue_agent(create_request(key), agent_identity(["n1", "n2"]))
    (tmp_path / "agent.pem").write_bytes(key + pair.calling)
    trust = Trust(str(keys.ca_file))

    async def main() -> None:
        async with listening(keys) as bound:
            assert bound.url == f"https://127.0.0.1:{bound.port}"
            for shown, expected in (
                ("", ["https", "", []]),
                (str(tmp_path / "agent.pem"), ["https", "agent", ["n1", "n2"]]),
                (str(tmp_path / "tls" / "caller.pem"), ["https", "server", []]),
            ):
                reader, writer = await ask(bound, trust._replace(certificate_file=shown), GET * 3)
                assert [await read_answer(reader) for _ in range(3)] == [expected] * 3
                writer.close()

    assert SERVER_IDENTITY.role == "server"
    run_on_both_loops(main)


def test_client_without_tls_is_refused_with_hint(keys: TlsKeys) -> None:
    async def main() -> None:
        async with listening(keys) as bound:
            reader, writer = await asyncio.open_connection("127.0.0.1", bound.port)
            writer.write(GET)
            data = await reader.read()
            assert data.startswith(b"HTTP/1.1 400") and "https://" in json.loads(data.partition(b"\r\n\r\n")[2])["cure"]
            writer.close()
            for garbage in (b"\x00" * 100, b"\x16\x03\x01\xff\xffrubbish" * 50, b"SSH-2.0-x\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", bound.port)
                writer.write(garbage)
                with suppress(ConnectionError):
                    assert b"200" not in await reader.read()
                writer.close()
            reader, writer = await ask(bound, Trust(str(keys.ca_file)))
            assert (await read_answer(reader))[0] == "https"
            writer.close()

    run_on_both_loops(main)


def test_unfinished_handshakes_are_closed(keys: TlsKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A34: during the handshake."""
    monkeypatch.setattr(tls, "HANDSHAKE_S_MAX", 0.5)

    async def main() -> None:
        async with listening(keys) as bound:
            began = time.monotonic()
            idle = [await asyncio.open_connection("127.0.0.1", bound.port) for _ in range(20)]
            for _, writer in idle[10:]:
                writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a handshake and nothing more
            for reader, writer in idle:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
            assert 0.3 < time.monotonic() - began < 30

    run_on_both_loops(main)


def test_one_address_cannot_take_all_handshakes(keys: TlsKeys) -> None:
    """A34: another address is still accepted."""

    async def main() -> None:
        rejected: list[str] = []
        async with listening(keys, connections_max=100, on_rejected=lambda address, *why: rejected.append(address)) as bound:
            idle = [await asyncio.open_connection("127.0.0.1", bound.port, local_addr=("127.0.0.2", 0)) for _ in range(60)]
            await asyncio.sleep(0.1)
            assert rejected == ["127.0.0.2"] * 10, "half of the limit"
            reader, writer = await ask(bound, Trust(str(keys.ca_file)))
            await read_answer(reader)
            for _, one in (*idle, (reader, writer)):
                one.close()

    run_on_both_loops(main)


def test_handshakes_count_as_connections(keys: TlsKeys) -> None:
    async def main() -> None:
        async with listening(keys, connections_max=4) as bound:
            reader, writer = await ask(bound, Trust(str(keys.ca_file)))
            await read_answer(reader)
            idle = [await asyncio.open_connection("127.0.0.1", bound.port) for _ in range(3)]
            await asyncio.sleep(0.1)
            over, over_writer = await asyncio.open_connection("127.0.0.1", bound.port)
            with suppress(ConnectionError):
                assert await over.read() == b""
            over_writer.close()
            writer.write(GET)
            await read_answer(reader)  # established connections are not affected
            for _, one in idle:
                one.close()
            await asyncio.sleep(0.1)
            again, again_writer = await ask(bound, Trust(str(keys.ca_file)))
            await read_answer(again)
            for one in (writer, again_writer):
                one.close()

    run_on_both_loops(main)


def test_shutdown_during_handshake_completes(keys: TlsKeys) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            async with listening(keys) as bound:
                _, idle = await asyncio.open_connection("127.0.0.1", bound.port)
                reader, writer = await ask(bound, Trust(str(keys.ca_file)))
                await read_answer(reader)
            assert await reader.read() == b""
            for one in (idle, writer):
                one.close()
        with pytest.raises(OSError, match=r".*"):
            await asyncio.open_connection("127.0.0.1", bound.port)

    run_on_both_loops(main)


def test_certificate_is_renewed_while_in_use(tmp_path: Path) -> None:
    """New connections get the new certificate, and open ones stay."""
    keys = TlsKeys(tmp_path / "tls", FileDisk(), TlsOptions(lifetimes=CertificateLifetimes(server_s=4)), "127.0.0.1")

    def serial(writer: asyncio.StreamWriter) -> str:
        found: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return str((found.getpeercert() or {})["serialNumber"])

    async def main() -> None:
        world, messages = production(), list[str]()
        renewing = asyncio.create_task(keys.run_renewal(world.clock, world.offload, messages.append))
        async with listening(keys) as bound:
            trust = Trust(str(keys.ca_file))
            reader, writer = await ask(bound, trust)
            await read_answer(reader)
            first = serial(writer)
            until = time.monotonic() + 6  # longer than the first one lasts
            seen = {first}
            while time.monotonic() < until:
                await asyncio.sleep(0.2)
                new, new_writer = await ask(bound, trust)
                await read_answer(new)
                seen.add(serial(new_writer))
                new_writer.close()
            assert len(seen) >= 2 and messages
            writer.write(GET)
            await read_answer(reader)
            writer.close()
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        await world.offload.close()

    asyncio.run(main())


def test_listening_beyond_loopback_needs_tls() -> None:
    """A06."""
    bound = BoundSocket(ListenAddress("0.0.0.0", 0), secure=True)
    try:
        assert bound.url.startswith("https://127.0.0.1:")
        with socket.create_connection(("127.0.0.1", bound.port), timeout=5):
            pass
    finally:
        bound.close()
