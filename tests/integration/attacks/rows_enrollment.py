"""Attacks on enrollment and certificates: rows A04, A05, A12 of docs/faults.md. Contains no tests."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from remit.law.certificate_identity import agent_identity
from remit.model.identity import token_digest
from remit.world.net.certificates import CertificateAuthority, KeyPair, create_key, create_request
from tests.integration.attacks.attack_server import Attacker, Outcome, attack, outcome_of
from tests.integration.serve.server_process import Reply, ask_on
from tests.integration.serve.tls_server import serving


def join_body(by: Attacker, *nodes: str, digest: str = "ab") -> dict[str, Any]:
    return {"digest": token_digest(f"{by.name}{digest}"), "nodes": list(nodes), "request": ""}


@attack(401, "unauthenticated")
def join_token_reused(by: Attacker) -> list[Outcome]:
    """A04: a spent join token is used by others. The agent that spent it gets the same answer again, and nothing more."""
    name = f"j-{by.name}"
    text = by.token("join", nodes=[name])
    first = by.ask("POST", "/v1/join", join_body(by, name), text)
    assert first.status == 200, first
    repeated = by.ask("POST", "/v1/join", join_body(by, name), text)
    assert (repeated.status, repeated.body) == (200, first.body), "the retry of a lost answer gets the same answer"
    again = [by.ask("POST", "/v1/join", join_body(by, name, digest=one), text) for one in ("cd", "ef")]
    return [*again, by.ask("POST", "/v1/renew", {"request": ""}, text), by.get("/v1/nodes", text)]


@attack(403, "not_owner")
def join_token_for_other_nodes(by: Attacker) -> list[Outcome]:
    """A04: more, fewer or other nodes than the token was created for."""
    text = by.token("join", nodes=["j1", "j2"])
    return [by.ask("POST", "/v1/join", join_body(by, *nodes), text) for nodes in (("n2",), ("j1",), ("j1", "j2", "n2"))]


@attack(409, "exists")
def join_under_taken_name(by: Attacker) -> list[Outcome]:
    """A12: with a new key, a new token, and permission to join under that name."""
    name = f"j-{by.name}"
    assert by.ask("POST", "/v1/join", join_body(by, name), by.token("join", nodes=[name])).status == 200
    found = []
    for nodes in ((name,), (name, f"{name}-2"), ("n2",)):
        text = by.token("join", nodes=list(nodes))
        found.append(by.ask("POST", "/v1/join", join_body(by, *nodes, digest="other"), text))
    return found


@attack(403, "not_owner", audited=())
def agent_certificate_in_other_role(by: Attacker) -> list[Outcome]:
    """A05: an agent certificate used as a user, a component, another node or a server. The TLS server has its own audit."""
    with tls_server(by) as (server, sign):
        mine, admin = sign("n1"), server.admin
        certified = server.ask(
            "POST",
            "/v1/join",
            {**join_body(by, "n1"), "request": create_request(create_key()).decode()},
            server.create_token("join"),
        )
        assert certified.status == 200, certified
        agent = f"{by.name}ab"
        found = [
            server.ask("GET", "/v1/tenants", None, admin, certificate=mine),
            server.ask("GET", "/v1/tenants", None, server.create_token("viewer"), certificate=mine),
        ]
        call = {"type": "call"}
        found += [server.ask("POST", "/v1/ask", call, server.create_token("scheduler"), certificate=mine)]
        found += [
            server.ask("POST", "/v1/ask", call, agent, certificate=one)
            for one in (sign("n9"), server.data / "tls" / "caller.pem")
        ]
        assert server.ask("POST", "/v1/ask", call, agent).status == 401, "the token requires the certificate"
        assert server.ask("POST", "/v1/ask", call, agent, certificate=mine).status == 200
        refused = server.ask("POST", "/v1/ask", call, agent, certificate=server.foreign())
        assert refused.status in (0, 401), "a certificate of another authority must not be accepted"
        audited = json.loads(server.ask("GET", "/v1/audit?limit=1000", None, admin).body)["items"]
        assert sum(one.get("count", 1) for one in audited if one["status"] == 403) >= len({one.code for one in found})
    return found


class TlsServer:
    """A server that accepts only TLS."""

    def __init__(self, data: Path, url: str, address: str) -> None:
        self.data, self._address = data, address
        self._place = urlsplit(url)
        self.admin = (data / "token").read_text().strip()
        self._made = 0

    def ask(self, method: str, path: str, body: Any, token: str, certificate: Path | None = None) -> Outcome:
        context = ssl.create_default_context(cafile=str(self.data / "tls" / "ca.pem"))
        if certificate is not None:
            context.load_cert_chain(certificate)
        host, port = self._place.hostname or "", self._place.port
        connection = http.client.HTTPSConnection(host, port, timeout=20, context=context, source_address=(self._address, 0))
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            return outcome_of(ask_on(connection, method, path, body, headers))
        except (ssl.SSLError, ConnectionError):
            return outcome_of(Reply(0, {}, b""))
        finally:
            connection.close()

    def create_token(self, role: str) -> str:
        self._made += 1
        text = f"remit_{role}_{self._made}_{'x' * 32}"
        spec: dict[str, Any] = {"role": role, "digest": token_digest(text), "expires": "2999-01-01T00:00:00Z", "subject": role}
        spec |= {"nodes": ["n1"]} if role == "join" else {}
        create_token = {"apiVersion": "remit/v1", "kind": "Token", "metadata": {"name": f"{role}-{self._made}"}, "spec": spec}
        assert self.ask("POST", "/v1/tokens", create_token, self.admin).status == 201
        for _ in range(1_000):
            if self.ask("GET", "/v1/nothing", None, text).status != 401:
                break
        return text

    def foreign(self) -> Path:
        """A certificate for the same node from another authority."""
        key, file = create_key(), self.data / "foreign.pem"
        file.write_bytes(
            key
            + CertificateAuthority(CertificateAuthority.create("another"))
            .issue_agent(create_request(key), agent_identity(["n1"]))
            .calling
        )
        return file


@contextmanager
def tls_server(by: Attacker) -> Iterator[tuple[TlsServer, Any]]:
    data = by.target.server.data.parent / f"secured-{by.name}"
    with serving(data, "--tls") as url:
        server = TlsServer(data, url, by.address)
        by.target.until(lambda: server.ask("GET", "/readyz", None, server.admin).status == 200, 30)
        authority = CertificateAuthority(KeyPair((data / "tls/ca.pem").read_bytes(), (data / "tls/ca.key").read_bytes()))

        def sign(node: str) -> Path:
            key, file = create_key(), data / f"{node}.pem"
            file.write_bytes(key + authority.issue_agent(create_request(key), agent_identity([node])).calling)
            return file

        yield server, sign
