"""The agent's credentials: join with a join token, store, renew before expiry.

It joins once, and writes down who it is. How long that lasts: see renewing.py.

    asking          who it is going to be, written before it asks: so whoever was killed, or not answered, asks as the same one
    token           its own, which it made itself; a server knows the digest alone
    term            from when until when the token is good
    calling.pem     its key, and the certificate with which it calls servers
    answering.pem   the same key, and the certificate with which it answers them
    authority.pem   who signs for servers that call it
    servers.pem     who signs for servers that it calls

Where there is no TLS there are only the token and its term.

Its token and certificates; how it got them: see joining.py.

It asks any of its servers, well before the end. To fail is no reason to hurry: a third of the time is left then, so it asks
again after a pause that grows and differs from that of others, and says so each time. A name that has run out is beyond that:
no server hears who shows an old certificate. It still asks, since a clock may be wrong, and says what a person can do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from remit.client.http_transport import Answered, Untrusted, Wire
from remit.client.retry import RetryShape
from remit.model.identity import TOKEN_PREFIX, Joined, Joining, Renewing, digest_of
from remit.world.interfaces import Disk, LinkError, Missing, Unheard, World, WorldError
from remit.world.net.tls import Secure, Trust, answering, unchecked

if TYPE_CHECKING:
    import ssl

    from remit.law.certificate_identity import Bearer

TOKEN_NONCES: Final = 3
ANSWER_MS: Final = 20_000
"""Longer than a server takes to say that it cannot."""
JOIN_RETRY: Final = RetryShape(base_ms=1_000, cap_ms=30_000)
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
    from remit.world.net.certificates import made_key

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
    from remit.world.net.certificates import request_for

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
            await world.clock.sleep_ms(JOIN_RETRY.base_ms + JOIN_RETRY.pause_ms(failures, 2 * JOIN_RETRY.cap_ms, world.chance))


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
    from remit.world.net.certificates import NoCertificate, certificate_digest

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


LOOK_S_MAX: Final = 3_600.0
"""So often it is looked at, at least: a wall clock may be set, and other hands may write the files."""
LOOK_S_MIN: Final = 1.0
RENEW_PART: Final = 3
"""When less than a third is left."""
RENEW_RETRY: Final = RetryShape(base_ms=2_000, cap_ms=600_000)
JOIN_AGAIN: Final = "make a join token for it with `remit token create --role join --node NODE`, and start it again with --join"
_terms: msgspec.json.Decoder[Term] = msgspec.json.Decoder(Term)


class Lasting(NamedTuple):
    """In how many seconds it should be renewed, and in how many it ends."""

    due_s: float
    left_s: float


def lasting(credentials: Credentials, world: World) -> Lasting:
    """By whatever ends first. If nothing says when that is, it is due at once. Raises `WorldError`."""
    found: list[Lasting] = []
    with suppress(Missing, msgspec.DecodeError, ValueError):
        term = _terms.decode(world.disk.read(credentials.place / "term"))
        now, begun, ends = map(datetime.fromisoformat, (world.clock.wall(), term.begun, term.ends))
        left_s = (ends - now).total_seconds()
        found = [Lasting(left_s - (ends - begun).total_seconds() / RENEW_PART, left_s)]
    if credentials.secure:
        from remit.world.net import certificates

        pem = world.disk.read(credentials.place / "calling.pem")
        found.append(Lasting(certificates.due_s(pem), certificates.left_s(pem)))
    return min(found, default=Lasting(0.0, math.inf))


def has_run_out(credentials: Credentials, world: World) -> bool:
    """By the clock of this machine. Raises `WorldError`."""
    return lasting(credentials, world).left_s <= 0


async def renewing(
    credentials: Credentials, urls: Sequence[str], world: World, shown: Callable[[Trust], None], tell: Callable[[str], None]
) -> None:
    """For ever. `shown`: is told of new certificates, if there are any."""
    failures = 0
    while True:
        left_s = math.inf
        try:
            due_s, left_s = lasting(credentials, world)
            if due_s <= 0:
                await renew(credentials, urls, world)
                if credentials.secure:
                    shown(credentials.trust)
                due_s, left_s = lasting(credentials, world)
            failures = 0
            await world.clock.sleep_ms(int(min(LOOK_S_MAX, max(LOOK_S_MIN, due_s)) * 1000))
        except WorldError as error:
            failures += 1
            tell(f"its name was not renewed, and {_ends(left_s)}: {error}" + (f"; {JOIN_AGAIN}" if left_s <= 0 else ""))
            await world.clock.sleep_ms(pause_ms(failures, world))


def pause_ms(failures: int, world: World) -> int:
    """From half of a ceiling that doubles, up to all of it."""
    ceiling = min(RENEW_RETRY.cap_ms, RENEW_RETRY.base_ms << min(failures - 1, 20))
    return ceiling // 2 + world.chance.uniform_ms(ceiling // 2)


async def renew(credentials: Credentials, urls: Sequence[str], world: World) -> Joined:
    """Asked twice, it is given twice; no harm is in that. Raises `WorldError`."""
    from remit.world.net.certificates import request_for

    key = new_key() if credentials.secure else b""
    asked = msgspec.json.encode(Renewing(request_for(key).decode() if key else ""))
    begun = world.clock.wall()
    said = await ask_any(urls, "/v1/renew", credentials.token, credentials.trust, asked, world)
    credentials.keep(world.disk, key=key, said=said, begun=begun)
    return said


def _ends(left_s: float) -> str:
    if left_s == math.inf:
        return "nothing says when it runs out"
    if left_s <= 0:
        return "has run out"
    return f"runs out in {left_s / 86_400:.1f} days" if left_s > 86_400 else f"runs out in {left_s / 60:.0f} minutes"
