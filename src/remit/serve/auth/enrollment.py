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

from remit.law.certificate_identity import NO_IDENTITY, CertificateIdentity, acts_for, agent_identity
from remit.model.claims import Actor, Apply, Code, Refused, Role
from remit.model.identity import JoinResponse, JoinRequest, Principal, RenewRequest, Token, TokenRole, TokenSpec, token_digest, expiry_after, join_fingerprint
from remit.model.metadata import Metadata
from remit.model.objects import decode, key_of
from remit.serve.auth.access_control import forbidden, unauthenticated
from remit.serve.http.bodies import parse_strict_json
from remit.serve.http.replies import ApiProblem
from remit.serve.http.request_context import RequestContext
from remit.serve.http.routes import TEXT, ResponseSpec, BodySpec, Route
from remit.serve.objects.reads import json_response
from remit.serve.server_context import ServerContext
from remit.world.interfaces import WorldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remit.serve.server_context import ServerContext

BOOTSTRAP: Final = Actor("bootstrap", Role.OPERATOR)
BOOTSTRAP_TOKEN_TTL_MS: Final = 365 * 86_400_000
REMAINING_MS_MIN: Final = 30 * 86_400_000
"""One that runs out sooner is not relied on any more."""


class BootstrapTokenRejected(WorldError):
    """The authority did not take a first token."""


def bootstrap_token_name(role: str, token: str) -> str:
    return f"{role}-{token_digest(token)[:12]}"


async def ensure_bootstrap_token(server: ServerContext, token: str, role: TokenRole, *, subject: str, nodes: Sequence[str] = ()) -> bool:
    """Make it known, if it is not. False: it cannot be relied on: it was revoked, runs out soon, or is for other nodes."""
    name, wall = bootstrap_token_name(role, token), server.clock.wall()
    row = await server.store.get(key_of("Token", name))
    if row is not None:
        await wait_until_cached(server, name)
        stored = decode(row.value)
        spec = stored.spec if isinstance(stored, Token) else None
        return spec is not None and not spec.revoked and spec.expires > expiry_after(wall, REMAINING_MS_MIN) and set(spec.nodes) == set(nodes)
    spec = TokenSpec(
        role=role,
        digest=token_digest(token),
        expires=expiry_after(wall, BOOTSTRAP_TOKEN_TTL_MS),
        subject=subject,
        nodes=tuple(sorted(nodes)),
    )
    verdict = await server.client(BOOTSTRAP).submit(Apply(Token(metadata=Metadata(name=name), spec=spec), expect=0))
    if isinstance(verdict, Refused) and verdict.code is not Code.EXISTS:
        raise BootstrapTokenRejected(
            f"the token {name} could not be made known: {verdict.detail}", "see what the store holds, and start again"
        )
    await wait_until_cached(server, name)
    return True


async def wait_until_cached(server: ServerContext, name: str) -> None:
    """Until this server's board shows it: whoever is told of a token may use it at once."""
    while not server.watch_cache.sober or server.watch_cache.get(key_of("Token", name)) is None:
        await server.clock.sleep_ms(2)


AGENT_TOKEN_TTL_MS: Final = 90 * 86_400_000
T = TypeVar("T")
_join_decoder: msgspec.json.Decoder[JoinRequest] = msgspec.json.Decoder(JoinRequest)
_renew_decoder: msgspec.json.Decoder[RenewRequest] = msgspec.json.Decoder(RenewRequest)


def check_certificate(server: ServerContext, principal: Principal, identity: CertificateIdentity | None) -> None:
    """Does the certificate go with the token? Raises `ApiProblem`."""
    bearer = identity or NO_IDENTITY
    if bearer.role == "agent" and principal.audience not in ("agent", "join"):
        detail = f"the certificate of {bearer.uris[0]} is an agent's, and no {principal.role}'s"
        raise forbidden(detail, "show none, or your own")
    if server.tls is None or principal.audience != "agent":
        return
    if not bearer.role:
        raise unauthenticated(f"the token {principal.token} is an agent's, and no certificate was shown", "show the one from joining")
    if not acts_for(bearer, principal.nodes):
        raise forbidden(f"the certificate is not for the nodes of the token {principal.token}", "show the one from joining")


async def get_ca_certificate(request: RequestContext, server: ServerContext) -> Response:
    if server.tls is None:
        raise ApiProblem(404, "not_found", "there is no TLS here, and so no authority", cure="start the server with --tls")
    return Response(server.tls.ca, media_type=TEXT)


async def join(request: RequestContext, server: ServerContext) -> Response:
    """Whoever has joined with a token may ask again, and is answered as before: an answer that was lost costs nothing."""
    joining, principal = _decode_body(_join_decoder, request.body), request.principal
    if set(joining.nodes) != principal.nodes:
        detail = f"the token {principal.token} is for {', '.join(sorted(principal.nodes)[:5])}, and for nothing else"
        raise ApiProblem(403, "not_owner", detail, field="nodes", cure="join as all of them, or let a token be made for others")
    async with server.join_lock:  # whether a name is taken is looked up, and then written
        joiner_digest = join_fingerprint(joining.digest, await _csr_key_digest(server, joining.request), joining.nodes)
        claim = await _claim_to_spend(server, principal, joiner_digest)
        await _check_nodes_free(server, joining)
        certificates = await _issue_certificates(server, joining.request, joining.nodes)
        if claim is not None and isinstance(await server.client(BOOTSTRAP).submit(claim), Refused):
            await _claim_to_spend(server, principal, joiner_digest)  # somebody was quicker; at another server it may have been this one
        name, expires = await _register_agent_token(server, joining)
    return json_response(JoinResponse(name, expires, *certificates))


async def renew(request: RequestContext, server: ServerContext) -> Response:
    renewing, principal = _decode_body(_renew_decoder, request.body), request.principal
    certificates = await _issue_certificates(server, renewing.request, principal.nodes)
    stored, revision = await _stored_token(server, principal.token)
    if stored is None or stored.spec.revoked:
        raise unauthenticated(f"the token {principal.token} was revoked")
    expires = max(stored.spec.expires, expiry_after(server.clock.wall(), AGENT_TOKEN_TTL_MS))
    spec = msgspec.structs.replace(stored.spec, expires=expires)
    renewed = Token(metadata=Metadata(name=principal.token, labels=stored.metadata.labels), spec=spec)
    if spec != stored.spec:
        verdict = await server.client(BOOTSTRAP).submit(Apply(renewed, expect=revision))
        if isinstance(verdict, Refused):  # it was revoked, or changed, meanwhile: that stands
            raise ApiProblem(409, verdict.code.value, verdict.detail, cure="ask again")
    return json_response(JoinResponse(principal.token, expires, *certificates))


async def _claim_to_spend(server: ServerContext, principal: Principal, joiner_digest: str) -> Apply | None:
    """What uses the token up, for good, and by one alone: the authority takes one write at the revision that was read. None: it
    was used, by the one who asks. Raises `ApiProblem` if it was by another.
    """
    stored, revision = await _stored_token(server, principal.token)
    if stored is None or stored.spec.revoked or stored.spec.spent not in ("", joiner_digest):
        cure = "let another be made: `remit token create --role join`"
        raise unauthenticated(f"the token {principal.token} was used already, or was revoked", cure)
    if stored.spec.spent:
        return None
    spec = msgspec.structs.replace(stored.spec, spent=joiner_digest)
    spent = Token(metadata=Metadata(name=principal.token, labels=stored.metadata.labels), spec=spec)
    return Apply(spent, expect=revision)


async def _check_nodes_free(server: ServerContext, joining: JoinRequest) -> None:
    """Asked before the join token is used up: who is refused here may use it otherwise."""
    own, _ = await _stored_token(server, _agent_token_name(joining))
    is_same = own is not None and own.spec.digest == joining.digest and set(own.spec.nodes) == set(joining.nodes)
    if own is not None and (not is_same or _is_invalid(server, own)):
        detail = f"the token {own.metadata.name} was an agent's before, and is not good any more"
        raise ApiProblem(409, "exists", detail, field="digest", cure="make another token of your own, and join with its digest")
    for _, row in server.watch_cache.kind("token/"):
        token = row.thing
        if not isinstance(token, Token) or token.spec.role != "agent" or token.metadata.name == _agent_token_name(joining):
            continue
        taken = sorted(set(token.spec.nodes) & set(joining.nodes))
        if taken and not _is_invalid(server, token):
            detail = f"node {taken[0]} has an agent already, known by the token {token.metadata.name}"
            cure = f"if that one is gone, `remit token revoke {token.metadata.name}`; else join under another name"
            raise ApiProblem(409, "exists", detail, field="nodes", cure=cure)


async def _register_agent_token(server: ServerContext, joining: JoinRequest) -> tuple[str, str]:
    """The agent's token: its name, and until when it is good. One that it has from an earlier try is the same one."""
    name, nodes = _agent_token_name(joining), tuple(sorted(set(joining.nodes)))
    token, _ = await _stored_token(server, name)
    if token is None:
        expires = expiry_after(server.clock.wall(), AGENT_TOKEN_TTL_MS)
        subject = f"agent of {nodes[0]}"
        spec = TokenSpec(role="agent", digest=joining.digest, expires=expires, subject=subject, nodes=nodes, joined=True)
        token = Token(metadata=Metadata(name=name), spec=spec)
        verdict = await server.client(BOOTSTRAP).submit(Apply(token, expect=0))
        if isinstance(verdict, Refused):  # an earlier try has landed, another agent was quicker, or there is no room for more
            stored, _ = await _stored_token(server, name)
            if stored is None or stored.spec.digest != joining.digest:
                cure = "ask again; if it has an agent that is gone, `remit token revoke` its token first"
                raise ApiProblem(409, verdict.code.value, verdict.detail, cure=cure)
            token = stored
    await wait_until_cached(server, name)
    return name, token.spec.expires


async def _stored_token(server: ServerContext, name: str) -> tuple[Token | None, int]:
    """As the store has it now, and not as a board has seen it."""
    row = await server.store.get(key_of("Token", name))
    token = None if row is None else decode(row.value)
    return (token, row.revision) if row is not None and isinstance(token, Token) else (None, 0)


def _agent_token_name(joining: JoinRequest) -> str:
    return f"agent-{joining.digest[:12]}"


def _is_invalid(server: ServerContext, token: Token) -> bool:
    return token.spec.revoked or token.spec.expires <= server.clock.wall()


async def _csr_key_digest(server: ServerContext, csr: str) -> str:
    if server.tls is None:
        return ""
    from remit.world.net.certificates import requested_digest

    return await _offload_csr(server, lambda: requested_digest(csr.encode()))


async def _issue_certificates(server: ServerContext, csr: str, nodes: Any) -> tuple[str, ...]:
    """Two certificates and their authority; nothing without TLS."""
    if server.tls is None:
        return ()
    tls = server.tls
    pair = await _offload_csr(server, lambda: tls.authority.agent(csr.encode(), agent_identity(nodes)))
    return pair.calling.decode(), pair.answering.decode(), tls.ca.decode()


async def _offload_csr(server: ServerContext, work: Callable[[], T]) -> T:
    from remit.world.net.certificates import NoCertificate

    try:
        return await server.world.offload(work)
    except NoCertificate as error:
        raise ApiProblem(422, "invalid", error.cause, field="request", cure=error.cure) from error


def _decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    parse_strict_json(body)
    try:
        return decoder.decode(body)
    except (msgspec.ValidationError, ValueError) as error:
        detail, _, path = str(error).partition(" - at ")
        field = path.strip("`").removeprefix("$.")
        raise ApiProblem(422, "invalid", detail, field=field, cure="/openapi.json says what joining is") from None


ROUTES: Final = (
    Route(
        "GET", "/v1/ca", "readAuthority", "The certificate of this server's authority, in PEM, for whoever knows its digest.",
        get_ca_certificate, tag="programs", responses=(ResponseSpec(200, "the certificate", str, TEXT),), anonymous=True,
    ),
    Route(
        "POST", "/v1/join", "join", "Become the agent of nodes, with a join token, once.",
        join, tag="programs", body=BodySpec((JoinRequest,)), responses=(ResponseSpec(200, "who it is now", JoinResponse),), audience=("join",),
        audited=True,
    ),
    Route(
        "POST", "/v1/renew", "renew", "More time for an agent, and new certificates.",
        renew, tag="programs", body=BodySpec((RenewRequest,)), responses=(ResponseSpec(200, "until when", JoinResponse),), audience=("agent",),
        unqueued=True,
    ),
)  # fmt: skip
