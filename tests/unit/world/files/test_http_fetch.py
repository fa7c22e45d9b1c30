"""Is a source fetched from where it may be, and from nowhere else, whatever names come to and servers answer?"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme

from remit.world.files.artifacts import FileArtifactFetcher
from remit.world.interfaces import FetchLimits, FetchPermissions, NotFetched

HERE = "127.0.0.1"
LOOPBACK = FetchPermissions(hosts=("127.0.0.0/8",))
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Site:
    """A server that says what a test wants it to, byte by byte."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Answer] = {}
        self.asked: list[str] = []
        self.heads: list[str] = []
        self.port = 0
        self.came = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            self.asked.append(path)
            self.came.set()
            self.heads.append(head)
            answer = self.answers.get(path, said(404, b""))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # whoever asked has gone, or the test has ended
        finally:
            writer.transport.abort()

    def url(self, path: str, host: str = HERE) -> str:
        return f"http://{host}:{self.port}{path}"


def said(status: int, body: bytes, **headers: str) -> bytes:
    head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *(f"{name}: {text}" for name, text in headers.items())]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def fetched(
    source: str,
    to: Path,
    sha256: str,
    *,
    reach: FetchPermissions = LOOPBACK,
    carrier: FileArtifactFetcher | None = None,
    **bounds: int,
) -> int:
    return await (carrier or FileArtifactFetcher()).fetch(
        source, to, sha256=sha256, permissions=reach, limits=FetchLimits(**bounds), on_progress=lambda come, total: None
    )


def play(scene: Callable[[Site], Awaitable[Any]]) -> None:
    async def around() -> None:
        site = Site()
        server = await asyncio.start_server(site.serve, HERE, 0)
        site.port = server.sockets[0].getsockname()[1]
        try:
            async with asyncio.timeout(20):
                await scene(site)
        finally:
            server.close()

    asyncio.run(around())


def refused(scene: Callable[[Site], Awaitable[Any]], says: str, *, again: bool = False) -> None:
    with pytest.raises(NotFetched, match=says) as told:
        play(scene)
    assert told.value.retryable is again
    assert told.value.cure


def test_what_is_served_is_fetched_and_told_of(tmp_path: Path) -> None:
    body, told = b"x" * 700_000, []

    async def scene(site: Site) -> None:
        site.answers["/a?b=c"] = said(200, body)
        carrier = FileArtifactFetcher()
        size = await carrier.fetch(
            site.url("/a?b=c"),
            tmp_path / "a",
            sha256=digest(body),
            permissions=LOOPBACK,
            on_progress=lambda *now: told.append(now),
        )
        assert size == len(body) == (tmp_path / "a").stat().st_size
        assert "Host: 127.0.0.1:" in site.heads[0]

    play(scene)
    assert told[-1] == (len(body), len(body))
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_chunks_are_joined(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        site.answers["/a"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        assert await fetched(site.url("/a"), tmp_path / "a", digest(b"abcde")) == 5

    play(scene)


# -- digests and bounds --------------------------------------------------------------------------------------------------------


def test_another_digest_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        site.answers["/a"] = said(200, b"evil")
        await fetched(site.url("/a"), tmp_path / "a", digest(b"good"))

    refused(scene, "the content has digest")
    assert not list(tmp_path.iterdir())


def test_more_than_allowed_is_refused__announced_or_not(tmp_path: Path) -> None:
    async def announced(site: Site) -> None:
        site.answers["/a"] = said(200, bytes(2_000_000))
        await fetched(site.url("/a"), tmp_path / "a", digest(bytes(2_000_000)), bytes_max=1 << 20)

    async def unannounced(site: Site) -> None:
        site.answers["/a"] = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + bytes(2_000_000)
        await fetched(site.url("/a"), tmp_path / "a", digest(bytes(2_000_000)), bytes_max=1 << 20)

    for scene in (announced, unannounced):
        refused(scene, "more than 1 MiB")
    assert not list(tmp_path.iterdir())


def test_one_that_breaks_off_may_be_tried_again(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        site.answers["/a"] = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
        await fetched(site.url("/a"), tmp_path / "a", digest(b"half"))

    refused(scene, "the connection to", again=True)


@pytest.mark.parametrize(("status", "again"), [(404, False), (403, False), (503, True), (429, True)])
def test_a_status_says_whether_to_try_again(tmp_path: Path, status: int, again: bool) -> None:
    async def scene(site: Site) -> None:
        site.answers["/a"] = said(status, b"")
        await fetched(site.url("/a"), tmp_path / "a", digest(b""))

    refused(scene, f"answered with status {status}", again=again)


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A head that never ends, each byte soon enough."""
    writer.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.02)


def test_one_that_drips_is_ended_at_its_time(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        site.answers["/a"] = drip
        await fetched(site.url("/a"), tmp_path / "a", digest(b""), total_ms=300)

    refused(scene, "took longer than", again=True)
    assert not list(tmp_path.iterdir())


def test_one_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    async def scene(site: Site) -> None:
        site.answers["/a"] = mute
        await fetched(site.url("/a"), tmp_path / "a", digest(b""), idle_ms=200)

    refused(scene, "the connection to", again=True)


def test_one_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        site.answers["/a"] = drip
        task = asyncio.create_task(fetched(site.url("/a"), tmp_path / "a", digest(b"")))
        await site.came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    play(scene)
    assert not list(tmp_path.iterdir())


# -- where it may be fetched from ----------------------------------------------------------------------------------------------


def named(**names: Sequence[str]) -> FileArtifactFetcher:
    """Names come to this, one answer after another."""
    answers = {name.replace("_", "."): list(found) for name, found in names.items()}

    def resolve(host: str, port: int) -> list[str]:
        found = answers.get(host, [host])
        return [found.pop(0) if len(found) > 1 else found[0]]

    return FileArtifactFetcher(resolve)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "169.254.169.254", "localhost", "10.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "2130706433"]
)
def test_addresses_of_the_nodes_own_network_are_refused_without_a_connection(tmp_path: Path, host: str) -> None:
    """A32: what a tenant may name."""

    async def scene(site: Site) -> None:
        try:
            await fetched(site.url("/a", host), tmp_path / "a", digest(b""), reach=FetchPermissions())
        finally:
            assert not site.asked

    refused(scene, "is not allowed")


def test_a_name_that_comes_to_such_an_address_is_refused(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        try:
            carrier = named(good_example_org=["127.0.0.1"])
            await fetched(
                site.url("/a", "good.example.org"), tmp_path / "a", digest(b""), reach=FetchPermissions(), carrier=carrier
            )
        finally:
            assert not site.asked

    refused(scene, "fetching from good.example.org is not allowed: 127.0.0.1 is a loopback address")


def test_one_bad_address_among_good_ones_spoils_the_answer(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        carrier = FileArtifactFetcher(lambda host, port: ["93.184.216.34", "169.254.169.254"])
        await fetched(
            site.url("/a", "good.example.org"), tmp_path / "a", digest(b""), reach=FetchPermissions(), carrier=carrier
        )

    refused(scene, "169.254.169.254 is a link-local address")


def test_a_name_is_looked_up_once_a_connection__and_connected_to_as_it_was_looked_at(tmp_path: Path) -> None:
    """Rebinding: the second answer, which nobody has looked at, is never connected to."""
    looked: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        looked.append(host)
        return ["127.0.0.1"] if len(looked) == 1 else ["169.254.169.254"]

    async def scene(site: Site) -> None:
        site.answers["/a"] = said(200, b"good")
        carrier = FileArtifactFetcher(resolve)
        assert await fetched(site.url("/a", "good.example.org"), tmp_path / "a", digest(b"good"), carrier=carrier) == 4
        assert looked == ["good.example.org"]
        site.answers["/b"] = said(302, b"", Location="/a")
        with pytest.raises(NotFetched, match=r"169\.254\.169\.254 is a link-local address"):
            await fetched(site.url("/b", "good.example.org"), tmp_path / "b", digest(b"good"), carrier=carrier)

    play(scene)


@pytest.mark.parametrize(
    ("to", "says"),
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
def test_a_redirect_is_asked_all_of_it_again(tmp_path: Path, to: str, says: str) -> None:
    async def scene(site: Site) -> None:
        site.answers["/a"] = said(302, b"", Location=to)
        only = FetchPermissions(hosts=(HERE,), directories=(Path("/etc"),))
        await fetched(site.url("/a"), tmp_path / "a", digest(b""), reach=only)

    refused(scene, says)


def test_redirects_are_followed_so_often_and_no_more(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        for number in range(9):
            site.answers[f"/{number}"] = said(307, b"", Location=f"/{number + 1}")
        site.answers["/9"] = said(200, b"end")
        assert await fetched(site.url("/5"), tmp_path / "a", digest(b"end")) == 3
        site.asked.clear()
        try:
            await fetched(site.url("/0"), tmp_path / "b", digest(b"end"))
        finally:
            assert len(site.asked) == 6

    refused(scene, "more than 5 redirects")


def test_from_https_nobody_is_led_to_http(tmp_path: Path) -> None:
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("secure.example.org").configure_cert(server)
    authority.configure_trust(client)

    async def scene() -> None:
        site = Site()
        listening = await asyncio.start_server(site.serve, HERE, 0, ssl=server)
        port = listening.sockets[0].getsockname()[1]
        site.answers = {"/a": said(200, b"good"), "/b": said(302, b"", Location="http://secure.example.org/a")}
        carrier = FileArtifactFetcher(lambda host, port: [HERE], client)
        source = f"https://secure.example.org:{port}"
        try:
            assert await fetched(f"{source}/a", tmp_path / "a", digest(b"good"), carrier=carrier) == 4
            with pytest.raises(NotFetched, match="redirects from https to http"):
                await fetched(f"{source}/b", tmp_path / "b", digest(b"good"), carrier=carrier)
            with pytest.raises(NotFetched, match="cannot be verified") as told:
                await fetched(f"https://other.example.org:{port}/a", tmp_path / "c", digest(b"good"), carrier=carrier)
            assert not told.value.retryable
        finally:
            listening.close()

    asyncio.run(scene())


# -- files of the node ---------------------------------------------------------------------------------------------------------


def test_a_file_of_the_node_is_read_only_below_what_it_lends_and_not_by_links(tmp_path: Path) -> None:
    lent = tmp_path / "lent"
    (lent / "sub").mkdir(parents=True)
    (lent / "sub" / "file").write_bytes(b"good")
    (tmp_path / "secret").write_bytes(b"good")
    (lent / "link").symlink_to(tmp_path / "secret")
    (lent / "up").symlink_to(tmp_path)
    reach = FetchPermissions(directories=(lent,))

    async def get(path: Path) -> int:
        return await fetched(f"file:{path}", tmp_path / "got", digest(b"good"), reach=reach)

    assert asyncio.run(get(lent / "sub" / "file")) == 4
    for path, says in (
        (tmp_path / "secret", "no directory that this node allows"),
        (lent / "link", "contains a symbolic link"),
        (lent / "up" / "secret", "not a directory|contains a symbolic link"),
        (lent / "sub", "is a directory"),
        (lent / "missing", "no such file"),
        (lent, "no directory that this node allows"),
    ):
        with pytest.raises(NotFetched, match=says):
            asyncio.run(get(path))
