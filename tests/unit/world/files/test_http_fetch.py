"""Artifact fetching: only from permitted hosts, for all resolutions of names and answers of servers."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme

from remit.world.files.artifacts import FetchLimits, FetchPermissions, FileArtifactFetcher, NotFetched

HERE = "127.0.0.1"
LOOPBACK = FetchPermissions(hosts=("127.0.0.0/8",))
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ScriptedServer:
    """A server that answers byte by byte as the test says."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Answer] = {}
        self.requests: list[str] = []
        self.heads: list[str] = []
        self.port = 0
        self.requested = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            self.requests.append(path)
            self.requested.set()
            self.heads.append(head)
            answer = self.answers.get(path, response(404, b""))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or the test has ended
        finally:
            writer.transport.abort()

    def url(self, path: str, host: str = HERE) -> str:
        return f"http://{host}:{self.port}{path}"


def response(status: int, body: bytes, **headers: str) -> bytes:
    head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *(f"{name}: {text}" for name, text in headers.items())]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def fetch_artifact(
    source: str,
    to: Path,
    sha256: str,
    *,
    permissions: FetchPermissions = LOOPBACK,
    fetcher: FileArtifactFetcher | None = None,
    **bounds: int,
) -> int:
    return await (fetcher or FileArtifactFetcher()).fetch(
        source, to, sha256=sha256, permissions=permissions, limits=FetchLimits(**bounds), on_progress=lambda come, total: None
    )


def play(scenario: Callable[[ScriptedServer], Awaitable[Any]]) -> None:
    async def around() -> None:
        server_ = ScriptedServer()
        server = await asyncio.start_server(server_.serve, HERE, 0)
        server_.port = server.sockets[0].getsockname()[1]
        try:
            async with asyncio.timeout(20):
                await scenario(server_)
        finally:
            server.close()

    asyncio.run(around())


def refused(scenario: Callable[[ScriptedServer], Awaitable[Any]], message: str, *, retryable: bool = False) -> None:
    with pytest.raises(NotFetched, match=message) as error:
        play(scenario)
    assert error.value.retryable is retryable
    assert error.value.cure


def test_artifact_is_fetched_with_progress(tmp_path: Path) -> None:
    body, progress = b"x" * 700_000, []

    async def scenario(server_: ScriptedServer) -> None:
        server_.answers["/a?b=c"] = response(200, body)
        fetcher = FileArtifactFetcher()
        size = await fetcher.fetch(
            server_.url("/a?b=c"),
            tmp_path / "a",
            sha256=digest(body),
            permissions=LOOPBACK,
            on_progress=lambda *now: progress.append(now),
        )
        assert size == len(body) == (tmp_path / "a").stat().st_size
        assert "Host: 127.0.0.1:" in server_.heads[0]

    play(scenario)
    assert progress[-1] == (len(body), len(body))
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_chunked_response_is_joined(tmp_path: Path) -> None:
    async def scenario(server_: ScriptedServer) -> None:
        server_.answers["/a"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        assert await fetch_artifact(server_.url("/a"), tmp_path / "a", digest(b"abcde")) == 5

    play(scenario)


# -- digests and limits --------------------------------------------------------------------------------------------------------


def test_wrong_digest_leaves_no_file(tmp_path: Path) -> None:
    async def scenario(server_: ScriptedServer) -> None:
        server_.answers["/a"] = response(200, b"evil")
        await fetch_artifact(server_.url("/a"), tmp_path / "a", digest(b"good"))

    refused(scenario, "the content has digest")
    assert not list(tmp_path.iterdir())


def test_oversized_response_is_refused_with_or_without_length(tmp_path: Path) -> None:
    async def announced(server_: ScriptedServer) -> None:
        server_.answers["/a"] = response(200, bytes(2_000_000))
        await fetch_artifact(server_.url("/a"), tmp_path / "a", digest(bytes(2_000_000)), bytes_max=1 << 20)

    async def unannounced(server_: ScriptedServer) -> None:
        server_.answers["/a"] = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + bytes(2_000_000)
        await fetch_artifact(server_.url("/a"), tmp_path / "a", digest(bytes(2_000_000)), bytes_max=1 << 20)

    for scenario in (announced, unannounced):
        refused(scenario, "more than 1 MiB")
    assert not list(tmp_path.iterdir())


def test_truncated_response_is_retryable(tmp_path: Path) -> None:
    async def scenario(server_: ScriptedServer) -> None:
        server_.answers["/a"] = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
        await fetch_artifact(server_.url("/a"), tmp_path / "a", digest(b"half"))

    refused(scenario, "the connection to", retryable=True)


@pytest.mark.parametrize(("status", "retryable"), [(404, False), (403, False), (503, True), (429, True)])
def test_status_determines_whether_fetch_is_retryable(tmp_path: Path, status: int, retryable: bool) -> None:
    async def scenario(server_: ScriptedServer) -> None:
        server_.answers["/a"] = response(status, b"")
        await fetch_artifact(server_.url("/a"), tmp_path / "a", digest(b""))

    refused(scenario, f"answered with status {status}", retryable=retryable)


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A header that never ends, each byte within the idle limit."""
    writer.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.02)


def test_dripping_response_ends_at_total_timeout(tmp_path: Path) -> None:
    async def scenario(server_: ScriptedServer) -> None:
        server_.answers["/a"] = drip
        await fetch_artifact(server_.url("/a"), tmp_path / "a", digest(b""), total_ms=300)

    refused(scenario, "took longer than", retryable=True)
    assert not list(tmp_path.iterdir())


def test_silent_server_is_given_up_after_idle_timeout(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    async def scenario(server_: ScriptedServer) -> None:
        server_.answers["/a"] = silent
        await fetch_artifact(server_.url("/a"), tmp_path / "a", digest(b""), idle_ms=200)

    refused(scenario, "the connection to", retryable=True)


def test_cancelled_fetch_leaves_no_file(tmp_path: Path) -> None:
    async def scenario(server_: ScriptedServer) -> None:
        server_.answers["/a"] = drip
        task = asyncio.create_task(fetch_artifact(server_.url("/a"), tmp_path / "a", digest(b"")))
        await server_.requested.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    play(scenario)
    assert not list(tmp_path.iterdir())


# -- permitted sources ---------------------------------------------------------------------------------------------------------


def with_names(**names: Sequence[str]) -> FileArtifactFetcher:
    """A fetcher in whose resolver these names give these answers, one after another."""
    answers = {name.replace("_", "."): list(found) for name, found in names.items()}

    def resolve(host: str, port: int) -> list[str]:
        found = answers.get(host, [host])
        return [found.pop(0) if len(found) > 1 else found[0]]

    return FileArtifactFetcher(resolve)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "169.254.169.254", "localhost", "10.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "2130706433"]
)
def test_private_addresses_are_refused_without_connecting(tmp_path: Path, host: str) -> None:
    """A32: sources that a tenant may name."""

    async def scenario(server_: ScriptedServer) -> None:
        try:
            await fetch_artifact(server_.url("/a", host), tmp_path / "a", digest(b""), permissions=FetchPermissions())
        finally:
            assert not server_.requests

    refused(scenario, "is not allowed")


def test_name_resolving_to_private_address_is_refused(tmp_path: Path) -> None:
    async def scenario(server_: ScriptedServer) -> None:
        try:
            fetcher = with_names(good_example_org=["127.0.0.1"])
            await fetch_artifact(
                server_.url("/a", "good.example.org"),
                tmp_path / "a",
                digest(b""),
                permissions=FetchPermissions(),
                fetcher=fetcher,
            )
        finally:
            assert not server_.requests

    refused(scenario, "fetching from good.example.org is not allowed: 127.0.0.1 is a loopback address")


def test_one_private_address_among_public_ones_refuses_name(tmp_path: Path) -> None:
    async def scenario(server_: ScriptedServer) -> None:
        fetcher = FileArtifactFetcher(lambda host, port: ["93.184.216.34", "169.254.169.254"])
        await fetch_artifact(
            server_.url("/a", "good.example.org"), tmp_path / "a", digest(b""), permissions=FetchPermissions(), fetcher=fetcher
        )

    refused(scenario, "169.254.169.254 is a link-local address")


def test_name_is_resolved_once_per_connection_and_that_address_used(tmp_path: Path) -> None:
    """DNS rebinding: the second answer, which was not checked, is never connected to."""
    resolved: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        resolved.append(host)
        return ["127.0.0.1"] if len(resolved) == 1 else ["169.254.169.254"]

    async def scenario(server_: ScriptedServer) -> None:
        server_.answers["/a"] = response(200, b"good")
        fetcher = FileArtifactFetcher(resolve)
        assert (
            await fetch_artifact(server_.url("/a", "good.example.org"), tmp_path / "a", digest(b"good"), fetcher=fetcher) == 4
        )
        assert resolved == ["good.example.org"]
        server_.answers["/b"] = response(302, b"", Location="/a")
        with pytest.raises(NotFetched, match=r"169\.254\.169\.254 is a link-local address"):
            await fetch_artifact(server_.url("/b", "good.example.org"), tmp_path / "b", digest(b"good"), fetcher=fetcher)

    play(scenario)


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("http://169.254.169.254/latest/meta-data/", "link-local"),
        ("http://10.0.0.1/", "private"),
        ("http://localhost/", "own network"),
        ("//[::1]/", "loopback"),
        ("file:///etc/passwd", "redirects from http to file"),
        ("gopher://example.org/", "unsupported scheme"),
        ("http://user:word@example.org/", "contains a user name or password"),
    ],
)
def test_redirect_target_is_checked_like_source(tmp_path: Path, to: str, message: str) -> None:
    async def scenario(server_: ScriptedServer) -> None:
        server_.answers["/a"] = response(302, b"", Location=to)
        only = FetchPermissions(hosts=(HERE,), directories=(Path("/etc"),))
        await fetch_artifact(server_.url("/a"), tmp_path / "a", digest(b""), permissions=only)

    refused(scenario, message)


def test_number_of_redirects_is_limited(tmp_path: Path) -> None:
    async def scenario(server_: ScriptedServer) -> None:
        for number in range(9):
            server_.answers[f"/{number}"] = response(307, b"", Location=f"/{number + 1}")
        server_.answers["/9"] = response(200, b"end")
        assert await fetch_artifact(server_.url("/5"), tmp_path / "a", digest(b"end")) == 3
        server_.requests.clear()
        try:
            await fetch_artifact(server_.url("/0"), tmp_path / "b", digest(b"end"))
        finally:
            assert len(server_.requests) == 6

    refused(scenario, "more than 5 redirects")


def test_redirect_from_https_to_http_is_refused(tmp_path: Path) -> None:
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("secure.example.org").configure_cert(server)
    authority.configure_trust(client)

    async def scenario() -> None:
        server_ = ScriptedServer()
        listening = await asyncio.start_server(server_.serve, HERE, 0, ssl=server)
        port = listening.sockets[0].getsockname()[1]
        server_.answers = {"/a": response(200, b"good"), "/b": response(302, b"", Location="http://secure.example.org/a")}
        fetcher = FileArtifactFetcher(lambda host, port: [HERE], client)
        source = f"https://secure.example.org:{port}"
        try:
            assert await fetch_artifact(f"{source}/a", tmp_path / "a", digest(b"good"), fetcher=fetcher) == 4
            with pytest.raises(NotFetched, match="redirects from https to http"):
                await fetch_artifact(f"{source}/b", tmp_path / "b", digest(b"good"), fetcher=fetcher)
            with pytest.raises(NotFetched, match="cannot be verified") as error:
                await fetch_artifact(f"https://other.example.org:{port}/a", tmp_path / "c", digest(b"good"), fetcher=fetcher)
            assert not error.value.retryable
        finally:
            listening.close()

    asyncio.run(scenario())


# -- node files ----------------------------------------------------------------------------------------------------------------


def test_node_file_is_read_only_below_permitted_directories_without_links(tmp_path: Path) -> None:
    permitted = tmp_path / "lent"
    (permitted / "sub").mkdir(parents=True)
    (permitted / "sub" / "file").write_bytes(b"good")
    (tmp_path / "secret").write_bytes(b"good")
    (permitted / "link").symlink_to(tmp_path / "secret")
    (permitted / "up").symlink_to(tmp_path)
    permissions = FetchPermissions(directories=(permitted,))

    async def get(path: Path) -> int:
        return await fetch_artifact(f"file:{path}", tmp_path / "got", digest(b"good"), permissions=permissions)

    assert asyncio.run(get(permitted / "sub" / "file")) == 4
    for path, message in (
        (tmp_path / "secret", "no directory that this node allows"),
        (permitted / "link", "contains a symbolic link"),
        (permitted / "up" / "secret", "not a directory|contains a symbolic link"),
        (permitted / "sub", "is a directory"),
        (permitted / "missing", "no such file"),
        (permitted, "no directory that this node allows"),
    ):
        with pytest.raises(NotFetched, match=message):
            asyncio.run(get(path))
