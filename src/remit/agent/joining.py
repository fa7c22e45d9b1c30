"""How does an agent come by a name of its own? It joins once, and writes down who it is. How long that lasts: see renewing.py.

    asking          who it is going to be, written before it asks: so whoever was killed, or not answered, asks as the same one
    token           its own, which it made itself; a server knows the digest alone
    term            from when until when the token is good
    calling.pem     its key, and the certificate with which it calls servers
    answering.pem   the same key, and the certificate with which it answers them
    authority.pem   who signs for servers that call it
    servers.pem     who signs for servers that it calls

Where there is no TLS there are only the token and its term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from remit.client.retry import RetryShape
from remit.client.wire import Answered, Untrusted, Wire
from remit.model.identity import TOKEN_PREFIX, digest_of
from remit.model.joining import Joined, Joining
from remit.world.promises import Disk, LinkError, Missing, Unheard, World, WorldError
from remit.world.tls import Secure, Trust, answering, unchecked

if TYPE_CHECKING:
    import ssl

    from remit.law.bearers import Bearer

TOKEN_NONCES: Final = 3
ANSWER_MS: Final = 20_000
"""Longer than a server takes to say that it cannot."""
AGAIN: Final = RetryShape(base_ms=1_000, cap_ms=30_000)
TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_joined: msgspec.json.Decoder[Joined] = msgspec.json.Decoder(Joined)


class NotJoined(WorldError):
    """The server did not take it, or is not the one that was meant. `field`: what of it the server did not like, if it says."""

    def __init__(self, cause: str, cure: str, *, status: int = 0, field: str = "") -> None:
        super().__init__(cause, cure)
        self.status, self.field = status, field


class Term(msgspec.Struct, frozen=True):
    """Of a token; instants in UTC."""

    begun: str
    ends: str


class Asking(NamedTuple):
    """Who somebody is going to be, as it stands in `asking`. `key` in PEM; empty without TLS."""

    token: str
    key: bytes


class Credentials(NamedTuple):
    """Who an agent is, in a directory of its own."""

    place: Path

    @property
    def known(self) -> bool:
        return (self.place / "token").exists()

    @property
    def secure(self) -> bool:
        return (self.place / "calling.pem").exists()

    @property
    def token(self) -> str:
        return (self.place / "token").read_text().strip()

    @property
    def trust(self) -> Trust:
        if not self.secure:
            return Trust()
        ca, calling = self.place / "servers.pem", str(self.place / "calling.pem")
        return Trust(str(ca) if ca.exists() else "", calling, calling)

    def asking(self, world: World, *, secure: bool, anew: bool = False) -> Asking:
        """Whoever was going to join here, if there is one already; else somebody new, who is on the disk when this returns."""
        file = self.place / "asking"
        with suppress(Missing):
            token, _, key = world.disk.read(file).partition(b"\n")
            if not anew and token.startswith(TOKEN_PREFIX.encode()) and bool(key) == secure:
                return Asking(token.decode(), key)
        made = Asking(TOKEN_PREFIX + "".join(world.ids.nonce() for _ in range(TOKEN_NONCES)), new_key() if secure else b"")
        world.disk.make_directory(self.place)
        world.disk.write_atomically(file, made.token.encode() + b"\n" + made.key)
        return made

    def keep(self, disk: Disk, *, key: bytes, said: Joined, begun: str = "", token: str = "", servers: bytes = b"") -> None:
        """The token last: without it nothing of the rest counts. `begun`: when the term began that the server speaks of."""
        disk.make_directory(self.place)
        if begun:
            disk.write_atomically(self.place / "term", msgspec.json.encode(Term(begun, said.expires)))
        if said.calling:
            disk.write_atomically(self.place / "authority.pem", said.authority.encode())
            disk.write_atomically(self.place / "answering.pem", key + said.answering.encode())
            disk.write_atomically(self.place / "calling.pem", key + said.calling.encode())
        if servers:
            disk.write_atomically(self.place / "servers.pem", servers)
        if token:
            disk.write_atomically(self.place / "token", f"{token}\n".encode())
            disk.remove(self.place / "asking")

    def answers(self) -> ssl.SSLContext:
        """For the agent's own port: only who has a certificate is heard there."""
        file = self.place / "answering.pem"
        return answering(file, file, (self.place / "authority.pem").read_bytes(), required=True)

    def listening(self) -> Secure:
        """To servers alone: what an agent, or anybody else, was given by the same authority opens nothing here."""
        held = self.answers()
        seen = (self.place / "answering.pem").stat().st_mtime_ns

        def context() -> ssl.SSLContext:
            nonlocal held, seen
            now = (self.place / "answering.pem").stat().st_mtime_ns
            if now != seen:
                held, seen = self.answers(), now
            return held

        return Secure(_is_server, answering=context)


def new_key() -> bytes:
    from remit.world.certificates import made_key

    return made_key()


def _is_server(bearer: Bearer) -> bool:
    return bearer.role == "server"


class Place(NamedTuple):
    """Where to join, and by what: `urls` of servers of one scope, a join token, and the nodes that it is for. `digest`: by
    which the servers' authority is known, if there is no file of it.
    """

    urls: tuple[str, ...]
    token: str
    nodes: tuple[str, ...]
    trust: Trust = Trust()
    digest: str = ""

    @property
    def secure(self) -> bool:
        return any(url.startswith("https:") for url in self.urls)


async def join(credentials: Credentials, place: Place, world: World, tell: Callable[[str], None]) -> None:
    """Once; from then on `credentials` are all that is needed. While no server answers, it asks again; and as the same one, so
    what came of an answer that was lost is found. Raises `NotJoined`, and `LinkError` where nobody can be believed.
    """
    from remit.world.certificates import request_for

    failures, who = 0, credentials.asking(world, secure=place.secure)
    while True:
        try:
            trust = await _believed(credentials, place, world.disk)
            request = request_for(who.key).decode() if who.key else ""
            asked = msgspec.json.encode(Joining(digest=digest_of(who.token), nodes=place.nodes, request=request))
            begun = world.clock.wall()
            said = await ask_any(place.urls, "/v1/join", place.token, trust, asked, world)
            credentials.keep(world.disk, key=who.key, said=said, begun=begun, token=who.token)
            return
        except NotJoined as error:
            if error.field != "digest" or failures:
                raise
            who = credentials.asking(world, secure=place.secure, anew=True)  # it was somebody here once, and is over
            failures += 1
        except Untrusted:
            raise
        except LinkError as error:
            failures += 1
            tell(f"it has not joined yet: {error}")
            await world.clock.sleep_ms(AGAIN.base_ms + AGAIN.pause_ms(failures, 2 * AGAIN.cap_ms, world.chance))


async def _believed(credentials: Credentials, place: Place, disk: Disk) -> Trust:
    """Whom to believe when joining. What is found out about that is kept."""
    if not place.secure or not (place.digest or place.trust.ca_file):
        return place.trust
    if place.digest:
        servers = await _pinned(place.urls, place.digest)
    else:
        servers = Path(place.trust.ca_file).read_bytes()  # noqa: ASYNC240
    credentials.keep(disk, key=b"", said=Joined("", ""), servers=servers)
    return Trust(str(credentials.place / "servers.pem"))


async def ask_any(urls: Sequence[str], path: str, token: str, trust: Trust, body: bytes, world: World) -> Joined:
    """What the first says that answers. Raises `NotJoined` if that is a refusal; if none does, what the last one failed of."""
    failed: LinkError = Unheard("no server was named", "name one with --server")
    for url in urls:
        try:
            async with world.clock.timeout_ms(ANSWER_MS):
                return await _asked(url, path, token, trust, body)
        except TimeoutError:
            failed = Unheard(f"{url} takes longer than {ANSWER_MS // 1000} s", "see what it says")
        except LinkError as error:
            failed = error
    raise failed


async def _asked(url: str, path: str, token: str, trust: Trust, body: bytes) -> Joined:
    wire = Wire(token, trust)
    try:
        answer: Answered = await wire.call("POST", url + path, body)
    finally:
        await wire.close()
    if answer.status != 200:
        problem = answer.problem()
        said, cure = problem.detail or f"the server said {answer.status}", problem.cure or "see what the server says"
        if answer.status in TRANSIENT:
            raise Unheard(f"{url}: {said}", cure)
        raise NotJoined(said, cure, status=answer.status, field=problem.field)
    try:
        return _joined.decode(answer.body)
    except msgspec.DecodeError as error:
        raise NotJoined(f"the answer cannot be read ({error})", "do both run the same version?") from error


async def _pinned(urls: Sequence[str], digest: str) -> bytes:
    """The authority's certificate, from whoever answers there: believed because its digest was known before. Nothing secret is
    sent.
    """
    from remit.world.certificates import NoCertificate, certificate_digest

    failed: WorldError = NotJoined("no server was named", "name one with --server")
    for url in urls:
        wire = Wire("none-is-needed")
        wire.unchecked(unchecked())
        try:
            answer = await wire.call("GET", f"{url}/v1/ca")
            if certificate_digest(answer.body) == digest:
                return answer.body
            failed = NotJoined(f"who answers at {url} is not the server that --ca-digest names", "see what listens there")
        except NoCertificate:
            failed = NotJoined(f"who answers at {url} has no authority to show", "see what listens there; or give --ca-file")
        except LinkError as error:
            failed = error
        finally:
            await wire.close()
    raise failed


__all__ = ["Asking", "Credentials", "LinkError", "NotJoined", "Place", "Term", "ask_any", "join", "new_key"]
