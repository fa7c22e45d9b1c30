"""Who becomes a node's agent, and what is a certificate good for? Rows A04, A05, A12 of docs/faults.md. No test in here."""

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
from tests.integration.attacks.attack_server import Intruder, Refusal, attack, refusal
from tests.integration.serve.server_process import Reply, ask_on
from tests.integration.serve.test_tls import serving


def joining(by: Intruder, *nodes: str, digest: str = "ab") -> dict[str, Any]:
    return {"digest": token_digest(f"{by.name}{digest}"), "nodes": list(nodes), "request": ""}


@attack(401, "unauthenticated")
def a_join_token_a_second_time(by: Intruder) -> list[Refusal]:
    """A04: it was spent, and is nobody else's. Who spent it and asks again gets the same answer, and nothing more."""
    name = f"j-{by.name}"
    text = by.token("join", nodes=[name])
    first = by.ask("POST", "/v1/join", joining(by, name), text)
    assert first.status == 200, first
    repeated = by.ask("POST", "/v1/join", joining(by, name), text)
    assert (repeated.status, repeated.body) == (200, first.body), "an answer that was lost is told again"
    again = [by.ask("POST", "/v1/join", joining(by, name, digest=one), text) for one in ("cd", "ef")]
    return [*again, by.ask("POST", "/v1/renew", {"request": ""}, text), by.get("/v1/nodes", text)]


@attack(403, "not_owner")
def a_join_token_for_other_nodes(by: Intruder) -> list[Refusal]:
    """A04: more, fewer or others than it was made for."""
    text = by.token("join", nodes=["j1", "j2"])
    return [by.ask("POST", "/v1/join", joining(by, *nodes), text) for nodes in (("n2",), ("j1",), ("j1", "j2", "n2"))]


@attack(409, "exists")
def a_name_that_is_taken(by: Intruder) -> list[Refusal]:
    """A12: with a new key, a new token, and the right to join under that name."""
    name = f"j-{by.name}"
    assert by.ask("POST", "/v1/join", joining(by, name), by.token("join", nodes=[name])).status == 200
    found = []
    for nodes in ((name,), (name, f"{name}-2"), ("n2",)):
        text = by.token("join", nodes=list(nodes))
        found.append(by.ask("POST", "/v1/join", joining(by, *nodes, digest="other"), text))
    return found


@attack(403, "not_owner", noted=())
def an_agents_certificate_in_another_role(by: Intruder) -> list[Refusal]:
    """A05: as a person's, a component's, another node's, a server's. That server has an audit of its own, which is asked."""
    with secured(by) as (server, sign):
        mine, admin = sign("n1"), server.admin
        certified = server.ask(
            "POST", "/v1/join", {**joining(by, "n1"), "request": create_request(create_key()).decode()}, server.made("join")
        )
        assert certified.status == 200, certified
        agent = f"{by.name}ab"
        found = [
            server.ask("GET", "/v1/tenants", None, admin, show=mine),
            server.ask("GET", "/v1/tenants", None, server.made("viewer"), show=mine),
        ]
        call = {"type": "call"}
        found += [server.ask("POST", "/v1/ask", call, server.made("scheduler"), show=mine)]
        found += [
            server.ask("POST", "/v1/ask", call, agent, show=one) for one in (sign("n9"), server.data / "tls" / "caller.pem")
        ]
        assert server.ask("POST", "/v1/ask", call, agent).status == 401, "the token without the certificate"
        assert server.ask("POST", "/v1/ask", call, agent, show=mine).status == 200
        refused = server.ask("POST", "/v1/ask", call, agent, show=server.foreign())
        assert refused.status in (0, 401), "another authority's certificate is none"
        noted = json.loads(server.ask("GET", "/v1/audit?limit=1000", None, admin).body)["items"]
        assert sum(one.get("count", 1) for one in noted if one["status"] == 403) >= len({one.code for one in found})
    return found


class Secured:
    """A server that speaks TLS alone."""

    def __init__(self, data: Path, url: str, address: str) -> None:
        self.data, self._address = data, address
        self._place = urlsplit(url)
        self.admin = (data / "token").read_text().strip()
        self._made = 0

    def ask(self, method: str, path: str, body: Any, token: str, show: Path | None = None) -> Refusal:
        context = ssl.create_default_context(cafile=str(self.data / "tls" / "ca.pem"))
        if show is not None:
            context.load_cert_chain(show)
        host, port = self._place.hostname or "", self._place.port
        connection = http.client.HTTPSConnection(host, port, timeout=20, context=context, source_address=(self._address, 0))
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            return refusal(ask_on(connection, method, path, body, headers))
        except (ssl.SSLError, ConnectionError):
            return refusal(Reply(0, {}, b""))
        finally:
            connection.close()

    def made(self, role: str) -> str:
        self._made += 1
        text = f"remit_{role}_{self._made}_{'x' * 32}"
        spec: dict[str, Any] = {"role": role, "digest": token_digest(text), "expires": "2999-01-01T00:00:00Z", "subject": role}
        spec |= {"nodes": ["n1"]} if role == "join" else {}
        made = {"apiVersion": "remit/v1", "kind": "Token", "metadata": {"name": f"{role}-{self._made}"}, "spec": spec}
        assert self.ask("POST", "/v1/tokens", made, self.admin).status == 201
        for _ in range(1_000):
            if self.ask("GET", "/v1/nothing", None, text).status != 401:
                break
        return text

    def foreign(self) -> Path:
        """What another authority would have signed for the same node."""
        key, file = create_key(), self.data / "foreign.pem"
        file.write_bytes(
            key
            + CertificateAuthority(CertificateAuthority.create("another"))
            .issue_agent(create_request(key), agent_identity(["n1"]))
            .calling
        )
        return file


@contextmanager
def secured(by: Intruder) -> Iterator[tuple[Secured, Any]]:
    data = by.stage.server.data.parent / f"secured-{by.name}"
    with serving(data, "--tls") as url:
        server = Secured(data, url, by.address)
        by.stage.until(lambda: server.ask("GET", "/readyz", None, server.admin).status == 200, 30)
        authority = CertificateAuthority(KeyPair((data / "tls/ca.pem").read_bytes(), (data / "tls/ca.key").read_bytes()))

        def sign(node: str) -> Path:
            key, file = create_key(), data / f"{node}.pem"
            file.write_bytes(key + authority.issue_agent(create_request(key), agent_identity([node])).calling)
            return file

        yield server, sign
