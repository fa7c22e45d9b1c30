"""Bootstrap tokens of a new scope and agent join.

The server makes them known that runs on its data; all others a person makes.

A token is called after its digest. So making the same one known twice is one deed, and one that was revoked stays so.

With a join token, once: a conditional write spends it, and only who won goes on.

What spends the token says who did: a digest of the agent's own token, key and nodes. So the winner may ask again, after a lost
answer or a kill between any two steps, and is the same agent still; for anybody else the token is spent.

An agent is known by a token and, over TLS, by a certificate that names the same nodes; neither is worth anything without the
other. A node that has an agent takes no other under its name until that one's token is revoked: whoever has a new key is
somebody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.responses import Response

from remit.law.certificate_identity import NOBODY, Bearer, acts_for, agent_of
from remit.model.claims import Actor, Apply, Code, Refused, Role
from remit.model.identity import Joined, Joining, Principal, Renewing, Token, TokenRole, TokenSpec, digest_of, expiry, joiner
from remit.model.metadata import Metadata
from remit.model.objects import decode, key_of
from remit.serve.auth.access_control import forbidden, unknown
from remit.serve.http.bodies import strict
from remit.serve.http.replies import Failure
from remit.serve.http.request_context import Asked
from remit.serve.http.routes import TEXT, Answer, Body, Route
from remit.serve.objects.reads import encoded
from remit.serve.server_context import Desk
from remit.world.interfaces import WorldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remit.serve.server_context import Desk

BOOTSTRAP: Final = Actor("bootstrap", Role.OPERATOR)
BOOTSTRAP_TOKEN_TTL_MS: Final = 365 * 86_400_000
SPARE_MS: Final = 30 * 86_400_000
"""One that runs out sooner is not relied on any more."""


class NotProvided(WorldError):
    """The authority did not take a first token."""


def called(role: str, token: str) -> str:
    return f"{role}-{digest_of(token)[:12]}"


async def provide(desk: Desk, token: str, role: TokenRole, *, subject: str, nodes: Sequence[str] = ()) -> bool:
    """Make it known, if it is not. False: it cannot be relied on: it was revoked, runs out soon, or is for other nodes."""
    name, wall = called(role, token), desk.clock.wall()
    row = await desk.store.get(key_of("Token", name))
    if row is not None:
        await known_here(desk, name)
        known = decode(row.value)
        spec = known.spec if isinstance(known, Token) else None
        return spec is not None and not spec.revoked and spec.expires > expiry(wall, SPARE_MS) and set(spec.nodes) == set(nodes)
    spec = TokenSpec(
        role=role,
        digest=digest_of(token),
        expires=expiry(wall, BOOTSTRAP_TOKEN_TTL_MS),
        subject=subject,
        nodes=tuple(sorted(nodes)),
    )
    verdict = await desk.client(BOOTSTRAP).ask(Apply(Token(metadata=Metadata(name=name), spec=spec), expect=0))
    if isinstance(verdict, Refused) and verdict.code is not Code.EXISTS:
        raise NotProvided(
            f"the token {name} could not be made known: {verdict.detail}", "see what the store holds, and start again"
        )
    await known_here(desk, name)
    return True


async def known_here(desk: Desk, name: str) -> None:
    """Until this server's board shows it: whoever is told of a token may use it at once."""
    while not desk.board.sober or desk.board.get(key_of("Token", name)) is None:
        await desk.clock.sleep_ms(2)


AGENT_TOKEN_TTL_MS: Final = 90 * 86_400_000
T = TypeVar("T")
_joinings: msgspec.json.Decoder[Joining] = msgspec.json.Decoder(Joining)
_renewings: msgspec.json.Decoder[Renewing] = msgspec.json.Decoder(Renewing)


def check_bearer(desk: Desk, principal: Principal, shown: Bearer | None) -> None:
    """Does the certificate go with the token? Raises `Failure`."""
    bearer = shown or NOBODY
    if bearer.role == "agent" and principal.audience not in ("agent", "join"):
        detail = f"the certificate of {bearer.names[0]} is an agent's, and no {principal.role}'s"
        raise forbidden(detail, "show none, or your own")
    if desk.tls is None or principal.audience != "agent":
        return
    if not bearer.role:
        raise unknown(f"the token {principal.token} is an agent's, and no certificate was shown", "show the one from joining")
    if not acts_for(bearer, principal.nodes):
        raise forbidden(f"the certificate is not for the nodes of the token {principal.token}", "show the one from joining")


async def authority(asked: Asked, desk: Desk) -> Response:
    if desk.tls is None:
        raise Failure(404, "not_found", "there is no TLS here, and so no authority", cure="start the server with --tls")
    return Response(desk.tls.ca, media_type=TEXT)


async def join(asked: Asked, desk: Desk) -> Response:
    """Whoever has joined with a token may ask again, and is answered as before: an answer that was lost costs nothing."""
    said, principal = _read(_joinings, asked.body), asked.principal
    if set(said.nodes) != principal.nodes:
        detail = f"the token {principal.token} is for {', '.join(sorted(principal.nodes)[:5])}, and for nothing else"
        raise Failure(403, "not_owner", detail, field="nodes", cure="join as all of them, or let a token be made for others")
    async with desk.joining:  # whether a name is taken is looked up, and then written
        who = joiner(said.digest, await _key_digest(desk, said.request), said.nodes)
        spends = await _spendable(desk, principal, who)
        await _check_free(desk, said)
        pair = await _certified(desk, said.request, said.nodes)
        if spends is not None and isinstance(await desk.client(BOOTSTRAP).ask(spends), Refused):
            await _spendable(desk, principal, who)  # somebody was quicker; at another server it may have been this one
        name, expires = await _made_known(desk, said)
    return encoded(Joined(name, expires, *pair))


async def renew(asked: Asked, desk: Desk) -> Response:
    said, principal = _read(_renewings, asked.body), asked.principal
    pair = await _certified(desk, said.request, principal.nodes)
    known, revision = await _kept(desk, principal.token)
    if known is None or known.spec.revoked:
        raise unknown(f"the token {principal.token} was revoked")
    expires = max(known.spec.expires, expiry(desk.clock.wall(), AGENT_TOKEN_TTL_MS))
    spec = msgspec.structs.replace(known.spec, expires=expires)
    made = Token(metadata=Metadata(name=principal.token, labels=known.metadata.labels), spec=spec)
    if spec != known.spec:
        verdict = await desk.client(BOOTSTRAP).ask(Apply(made, expect=revision))
        if isinstance(verdict, Refused):  # it was revoked, or changed, meanwhile: that stands
            raise Failure(409, verdict.code.value, verdict.detail, cure="ask again")
    return encoded(Joined(principal.token, expires, *pair))


async def _spendable(desk: Desk, principal: Principal, who: str) -> Apply | None:
    """What uses the token up, for good, and by one alone: the authority takes one write at the revision that was read. None: it
    was used, by the one who asks. Raises `Failure` if it was by another.
    """
    known, revision = await _kept(desk, principal.token)
    if known is None or known.spec.revoked or known.spec.spent not in ("", who):
        cure = "let another be made: `remit token create --role join`"
        raise unknown(f"the token {principal.token} was used already, or was revoked", cure)
    if known.spec.spent:
        return None
    spec = msgspec.structs.replace(known.spec, spent=who)
    made = Token(metadata=Metadata(name=principal.token, labels=known.metadata.labels), spec=spec)
    return Apply(made, expect=revision)


async def _check_free(desk: Desk, said: Joining) -> None:
    """Asked before the join token is used up: who is refused here may use it otherwise."""
    mine, _ = await _kept(desk, _called(said))
    same = mine is not None and mine.spec.digest == said.digest and set(mine.spec.nodes) == set(said.nodes)
    if mine is not None and (not same or _is_over(desk, mine)):
        detail = f"the token {mine.metadata.name} was an agent's before, and is not good any more"
        raise Failure(409, "exists", detail, field="digest", cure="make another token of your own, and join with its digest")
    for _, kept in desk.board.kind("token/"):
        token = kept.thing
        if not isinstance(token, Token) or token.spec.role != "agent" or token.metadata.name == _called(said):
            continue
        taken = sorted(set(token.spec.nodes) & set(said.nodes))
        if taken and not _is_over(desk, token):
            detail = f"node {taken[0]} has an agent already, known by the token {token.metadata.name}"
            cure = f"if that one is gone, `remit token revoke {token.metadata.name}`; else join under another name"
            raise Failure(409, "exists", detail, field="nodes", cure=cure)


async def _made_known(desk: Desk, said: Joining) -> tuple[str, str]:
    """The agent's token: its name, and until when it is good. One that it has from an earlier try is the same one."""
    name, nodes = _called(said), tuple(sorted(set(said.nodes)))
    known, _ = await _kept(desk, name)
    if known is None:
        expires = expiry(desk.clock.wall(), AGENT_TOKEN_TTL_MS)
        subject = f"agent of {nodes[0]}"
        spec = TokenSpec(role="agent", digest=said.digest, expires=expires, subject=subject, nodes=nodes, joined=True)
        known = Token(metadata=Metadata(name=name), spec=spec)
        verdict = await desk.client(BOOTSTRAP).ask(Apply(known, expect=0))
        if isinstance(verdict, Refused):  # an earlier try has landed, another agent was quicker, or there is no room for more
            found, _ = await _kept(desk, name)
            if found is None or found.spec.digest != said.digest:
                cure = "ask again; if it has an agent that is gone, `remit token revoke` its token first"
                raise Failure(409, verdict.code.value, verdict.detail, cure=cure)
            known = found
    await known_here(desk, name)
    return name, known.spec.expires


async def _kept(desk: Desk, name: str) -> tuple[Token | None, int]:
    """As the store has it now, and not as a board has seen it."""
    row = await desk.store.get(key_of("Token", name))
    known = None if row is None else decode(row.value)
    return (known, row.revision) if row is not None and isinstance(known, Token) else (None, 0)


def _called(said: Joining) -> str:
    return f"agent-{said.digest[:12]}"


def _is_over(desk: Desk, token: Token) -> bool:
    return token.spec.revoked or token.spec.expires <= desk.clock.wall()


async def _key_digest(desk: Desk, request: str) -> str:
    if desk.tls is None:
        return ""
    from remit.world.net.certificates import requested_digest

    return await _requested(desk, lambda: requested_digest(request.encode()))


async def _certified(desk: Desk, request: str, nodes: Any) -> tuple[str, ...]:
    """Two certificates and their authority; nothing without TLS."""
    if desk.tls is None:
        return ()
    tls = desk.tls
    pair = await _requested(desk, lambda: tls.authority.agent(request.encode(), agent_of(nodes)))
    return pair.calling.decode(), pair.answering.decode(), tls.ca.decode()


async def _requested(desk: Desk, work: Callable[[], T]) -> T:
    from remit.world.net.certificates import NoCertificate

    try:
        return await desk.world.offload(work)
    except NoCertificate as error:
        raise Failure(422, "invalid", error.cause, field="request", cure=error.cure) from error


def _read(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    strict(body)
    try:
        return decoder.decode(body)
    except (msgspec.ValidationError, ValueError) as error:
        detail, _, path = str(error).partition(" - at ")
        field = path.strip("`").removeprefix("$.")
        raise Failure(422, "invalid", detail, field=field, cure="/openapi.json says what joining is") from None


ROUTES: Final = (
    Route(
        "GET", "/v1/ca", "readAuthority", "The certificate of this server's authority, in PEM, for whoever knows its digest.",
        authority, tag="programs", answers=(Answer(200, "the certificate", str, TEXT),), open=True,
    ),
    Route(
        "POST", "/v1/join", "join", "Become the agent of nodes, with a join token, once.",
        join, tag="programs", body=Body((Joining,)), answers=(Answer(200, "who it is now", Joined),), audience=("join",),
        audited=True,
    ),
    Route(
        "POST", "/v1/renew", "renew", "More time for an agent, and new certificates.",
        renew, tag="programs", body=Body((Renewing,)), answers=(Answer(200, "until when", Joined),), audience=("agent",),
        first=True,
    ),
)  # fmt: skip
