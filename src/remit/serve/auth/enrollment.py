"""Bootstrap tokens of a new scope and agent join.

A server that runs on its own data directory registers its first tokens; users create all others. The name of a bootstrap
token is derived from its digest, so registering it again changes nothing, and a revoked one stays revoked.

An agent joins with a join token, which works once: a conditional write marks it as spent by the digest of the agent's own
token, key and nodes. The winner may repeat the request, after a lost answer or a crash between any two steps, and gets the
same result; for any other caller the token is spent.

An agent is identified by a token and, with TLS, by a certificate for the same nodes; neither works without the other. A node
that has an agent accepts no other until that agent's token is revoked or expires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.responses import Response

from remit.law.certificate_identity import NO_IDENTITY, CertificateIdentity, acts_for, agent_identity
from remit.model.claims import Actor, Apply, Code, Refused
from remit.model.identity import (
    JoinRequest,
    JoinResponse,
    Principal,
    RenewRequest,
    expiry_after,
    join_fingerprint,
    token_digest,
)
from remit.model.kinds import Token, TokenRole, TokenSpec
from remit.model.metadata import Metadata
from remit.model.objects import decode, key_of
from remit.model.roles import Role
from remit.serve.auth.access_control import forbidden, unauthenticated
from remit.serve.http.bodies import parse_strict_json
from remit.serve.http.media_types import TEXT
from remit.serve.http.replies import ApiProblem
from remit.serve.http.routes import BodySpec, RequestContext, ResponseSpec, Route
from remit.serve.objects.reads import json_response
from remit.serve.server_context import ServerContext
from remit.store.protocol import Store
from remit.world.interfaces import Clock, Offload, WorldError

if TYPE_CHECKING:
    from remit.world.net.server_keys import TlsKeys


BOOTSTRAP: Final = Actor("bootstrap", Role.OPERATOR)
BOOTSTRAP_TOKEN_TTL_MS: Final = 365 * 86_400_000
REMAINING_MS_MIN: Final = 30 * 86_400_000
"""A bootstrap token that expires sooner is replaced."""


class BootstrapTokenRejected(WorldError):
    """The authority refused a bootstrap token."""


def bootstrap_token_name(role: str, token: str) -> str:
    return f"{role}-{token_digest(token)[:12]}"


async def ensure_bootstrap_token(
    server: ServerContext, token: str, role: TokenRole, *, subject: str, nodes: Sequence[str] = ()
) -> bool:
    """Register a bootstrap token unless it exists. False: it exists but cannot be used, because it was revoked, expires soon,
    or is for other nodes.
    """
    name, wall = bootstrap_token_name(role, token), server.clock.wall()
    row = await server.store.get(key_of("Token", name))
    if row is not None:
        await wait_until_cached(server, name)
        stored = decode(row.value)
        spec = stored.spec if isinstance(stored, Token) else None
        return (
            spec is not None
            and not spec.revoked
            and spec.expires > expiry_after(wall, REMAINING_MS_MIN)
            and set(spec.nodes) == set(nodes)
        )
    spec = TokenSpec(
        role=role,
        digest=token_digest(token),
        expires=expiry_after(wall, BOOTSTRAP_TOKEN_TTL_MS),
        subject=subject,
        nodes=tuple(sorted(nodes)),
    )
    verdict = await server.authority.client(BOOTSTRAP).submit(Apply(Token(metadata=Metadata(name=name), spec=spec), expect=0))
    if isinstance(verdict, Refused) and verdict.code is not Code.EXISTS:
        raise BootstrapTokenRejected(
            f"bootstrap token {name} was refused by the authority: {verdict.detail}",
            "check the tokens in the store, then start again",
        )
    await wait_until_cached(server, name)
    return True


async def wait_until_cached(server: ServerContext, name: str) -> None:
    """Wait until this server's watch cache has the token: its owner may use it as soon as it has been answered."""
    while not server.watch_cache.is_current or server.watch_cache.get(key_of("Token", name)) is None:
        await server.clock.sleep_ms(2)


AGENT_TOKEN_TTL_MS: Final = 90 * 86_400_000
T = TypeVar("T")
_join_decoder: msgspec.json.Decoder[JoinRequest] = msgspec.json.Decoder(JoinRequest)
_renew_decoder: msgspec.json.Decoder[RenewRequest] = msgspec.json.Decoder(RenewRequest)


def check_certificate(tls: TlsKeys | None, principal: Principal, identity: CertificateIdentity | None) -> None:
    """Check that the client certificate matches the token. Raises `ApiProblem`."""
    certificate = identity or NO_IDENTITY
    if certificate.role == "agent" and principal.audience not in ("agent", "join"):
        detail = f"the certificate of {certificate.uris[0]} belongs to an agent, but the token has the role {principal.role}"
        raise forbidden(detail, "send no client certificate, or your own")
    if tls is None or principal.audience != "agent":
        return
    if not certificate.role:
        raise unauthenticated(
            f"token {principal.token} belongs to an agent and needs a client certificate",
            "send the certificate received when joining",
        )
    if not acts_for(certificate, principal.nodes):
        raise forbidden(
            f"the client certificate is not for the nodes of token {principal.token}",
            "send the certificate received when joining",
        )


async def get_ca_certificate(request: RequestContext, server: ServerContext) -> Response:
    if server.auth.tls is None:
        raise ApiProblem(
            404, "not_found", "this server has no CA, because it runs without TLS", cure="start the server with --tls"
        )
    return Response(server.auth.tls.ca, media_type=TEXT)


async def join(request: RequestContext, server: ServerContext) -> Response:
    """Redeem a join token. An agent that joined may repeat the request and gets the same answer, so that a lost answer costs
    nothing.
    """
    joining, principal = _decode_body(_join_decoder, request.body), request.principal
    if set(joining.nodes) != principal.nodes:
        detail = f"nodes: token {principal.token} is for exactly these nodes: {', '.join(sorted(principal.nodes)[:5])}"
        raise ApiProblem(403, "not_owner", detail, field="nodes", cure="join with all of them, or create another join token")
    async with server.auth.join_lock:  # the check for nodes with an agent and the write must not interleave with another join
        joiner_digest = join_fingerprint(joining.digest, await _csr_key_digest(server, joining.request), joining.nodes)
        claim = await _claim_to_spend(server, principal, joiner_digest)
        await _check_nodes_free(server, joining)
        certificates = await _issue_certificates(server, joining.request, joining.nodes)
        if claim is not None and isinstance(await server.authority.client(BOOTSTRAP).submit(claim), Refused):
            await _claim_to_spend(
                server, principal, joiner_digest
            )  # another request spent it first; through another server it may have been this agent
        name, expires = await _register_agent_token(server, joining)
    return json_response(JoinResponse(name, expires, *certificates))


async def renew(request: RequestContext, server: ServerContext) -> Response:
    renewing, principal = _decode_body(_renew_decoder, request.body), request.principal
    certificates = await _issue_certificates(server, renewing.request, principal.nodes)
    stored, revision = await _stored_token(server.store, principal.token)
    if stored is None or stored.spec.revoked:
        raise unauthenticated(f"token {principal.token} was revoked", reason="token_revoked")
    expires = max(stored.spec.expires, expiry_after(server.clock.wall(), AGENT_TOKEN_TTL_MS))
    spec = msgspec.structs.replace(stored.spec, expires=expires)
    renewed = Token(metadata=Metadata(name=principal.token, labels=stored.metadata.labels), spec=spec)
    if spec != stored.spec:
        verdict = await server.authority.client(BOOTSTRAP).submit(Apply(renewed, expect=revision))
        if isinstance(verdict, Refused):  # it was revoked or changed in the meantime, which takes precedence
            raise ApiProblem(409, verdict.code.value, verdict.detail, cure="retry")
    return json_response(JoinResponse(principal.token, expires, *certificates))


async def _claim_to_spend(server: ServerContext, principal: Principal, joiner_digest: str) -> Apply | None:
    """Return the claim that marks the join token as spent, conditional on the revision that was read. None: this agent has
    spent it already. Raises `ApiProblem` if it was spent by another agent, or revoked.
    """
    stored, revision = await _stored_token(server.store, principal.token)
    if stored is None or stored.spec.revoked or stored.spec.spent not in ("", joiner_digest):
        cure = "create another join token: `remit token create --role join`"
        raise unauthenticated(f"join token {principal.token} was already used, or was revoked", cure)
    if stored.spec.spent:
        return None
    spec = msgspec.structs.replace(stored.spec, spent=joiner_digest)
    spent = Token(metadata=Metadata(name=principal.token, labels=stored.metadata.labels), spec=spec)
    return Apply(spent, expect=revision)


async def _check_nodes_free(server: ServerContext, joining: JoinRequest) -> None:
    """Check that the nodes have no other agent. Comes before the join token is spent, so that a rejected agent can use it
    again.
    """
    own, _ = await _stored_token(server.store, _agent_token_name(joining))
    is_same = own is not None and own.spec.digest == joining.digest and set(own.spec.nodes) == set(joining.nodes)
    if own is not None and (not is_same or _is_invalid(own, server.clock)):
        detail = f"digest: token {own.metadata.name} belonged to an agent and is no longer valid"
        raise ApiProblem(409, "exists", detail, field="digest", cure="generate a new agent token, and join with its digest")
    for _, row in server.watch_cache.of_kind("token/"):
        token = row.obj
        if not isinstance(token, Token) or token.spec.role != "agent" or token.metadata.name == _agent_token_name(joining):
            continue
        taken = sorted(set(token.spec.nodes) & set(joining.nodes))
        if taken and not _is_invalid(token, server.clock):
            detail = f"nodes: node {taken[0]} already has an agent, with token {token.metadata.name}"
            cure = (
                f"if that agent is gone, run `remit token revoke {token.metadata.name}`; otherwise join under another node name"
            )
            raise ApiProblem(409, "exists", detail, field="nodes", cure=cure)


async def _register_agent_token(server: ServerContext, joining: JoinRequest) -> tuple[str, str]:
    """Register the agent's token and return its name and expiry. A token from an earlier try is reused."""
    name, nodes = _agent_token_name(joining), tuple(sorted(set(joining.nodes)))
    token, _ = await _stored_token(server.store, name)
    if token is None:
        expires = expiry_after(server.clock.wall(), AGENT_TOKEN_TTL_MS)
        subject = f"agent of {nodes[0]}"
        spec = TokenSpec(role="agent", digest=joining.digest, expires=expires, subject=subject, nodes=nodes, joined=True)
        token = Token(metadata=Metadata(name=name), spec=spec)
        verdict = await server.authority.client(BOOTSTRAP).submit(Apply(token, expect=0))
        if isinstance(
            verdict, Refused
        ):  # an earlier try succeeded, another agent was faster, or the limit of tokens is reached
            stored, _ = await _stored_token(server.store, name)
            if stored is None or stored.spec.digest != joining.digest:
                cure = "retry; if a node has an agent that is gone, revoke its token first: `remit token revoke`"
                raise ApiProblem(409, verdict.code.value, verdict.detail, cure=cure)
            token = stored
    await wait_until_cached(server, name)
    return name, token.spec.expires


async def _stored_token(store: Store, name: str) -> tuple[Token | None, int]:
    """Return a token and its revision from the store, which is current, unlike the watch cache."""
    row = await store.get(key_of("Token", name))
    token = None if row is None else decode(row.value)
    return (token, row.revision) if row is not None and isinstance(token, Token) else (None, 0)


def _agent_token_name(joining: JoinRequest) -> str:
    return f"agent-{joining.digest[:12]}"


def _is_invalid(token: Token, clock: Clock) -> bool:
    return token.spec.revoked or token.spec.expires <= clock.wall()


async def _csr_key_digest(server: ServerContext, csr: str) -> str:
    if server.auth.tls is None:
        return ""
    from remit.world.net.certificates import key_digest_of_request

    return await _offload_csr(server.world.offload, lambda: key_digest_of_request(csr.encode()))


async def _issue_certificates(server: ServerContext, csr: str, nodes: Any) -> tuple[str, ...]:
    """Return the two certificates of an agent and the CA certificate; empty without TLS."""
    if server.auth.tls is None:
        return ()
    tls = server.auth.tls
    pair = await _offload_csr(server.world.offload, lambda: tls.authority.issue_agent(csr.encode(), agent_identity(nodes)))
    return pair.calling.decode(), pair.answering.decode(), tls.ca.decode()


async def _offload_csr(offload: Offload, work: Callable[[], T]) -> T:
    from remit.world.net.certificates import CertificateError

    try:
        return await offload(work)
    except CertificateError as error:
        raise ApiProblem(422, "invalid", error.cause, field="request", cure=error.cure) from error


def _decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    parse_strict_json(body)
    try:
        return decoder.decode(body)
    except (msgspec.ValidationError, ValueError) as error:
        detail, _, path = str(error).partition(" - at ")
        field = path.strip("`").removeprefix("$.")
        raise ApiProblem(
            422, "invalid", detail, field=field, cure="see /openapi.json for the fields of a join request"
        ) from None


ROUTES: Final = (
    Route(
        "GET",
        "/v1/ca",
        "readAuthority",
        "The CA certificate of this server, in PEM. Clients compare it with a known digest.",
        get_ca_certificate,
        tag="components",
        responses=(ResponseSpec(200, "the CA certificate", str, TEXT),),
        anonymous=True,
    ),
    Route(
        "POST",
        "/v1/join",
        "join",
        "Register an agent for its nodes with a join token, which works once.",
        join,
        tag="components",
        body=BodySpec((JoinRequest,)),
        responses=(ResponseSpec(200, "token name, expiry and certificates of the agent", JoinResponse),),
        audience=("join",),
        audited=True,
    ),
    Route(
        "POST",
        "/v1/renew",
        "renew",
        "Extend the token of an agent and renew its certificates.",
        renew,
        tag="components",
        body=BodySpec((RenewRequest,)),
        responses=(ResponseSpec(200, "new expiry and certificates", JoinResponse),),
        audience=("agent",),
        unqueued=True,
    ),
)
