"""A scope on three machines is set up as deploy/README.md says, over TLS, and unauthorised requests are refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from remit.law.certificate_identity import agent_identity
from remit.world.net.certificates import CertificateAuthority, KeyPair, create_key, create_request
from tests.integration.serve.deploy_guide import Machine, blocks
from tests.integration.serve.network_namespaces import HERE, THERE, YONDER, Machines, machines, unsupported_reason

REMIT = str(Path(sys.executable).parent / "remit")
pytestmark = pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason() or "-")


class Deployment:
    def __init__(self, machines_: Machines, data: Path, url: str) -> None:
        self.wired, self.data, self.url, self.ca = machines_, data, url, str(data / "tls" / "ca.pem")
        self.asks = ["--server", url, "--token-file", str(data / "token"), "--ca-file", self.ca]

    def remit(self, *prefix: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.wired.here, REMIT, *prefix, *self.asks], input=stdin, capture_output=True, text=True, check=False, timeout=60
        )

    def join_token(self, *nodes: str) -> tuple[str, str]:
        """The token, and the hint printed with it."""
        prefix = [word for node in nodes for word in ("--node", node)]
        made = self.remit("token", "create", "--role", "join", *prefix)
        assert made.returncode == 0, made.stderr
        return made.stdout.strip(), made.stderr

    def curl(self, path: str, token: str, body: Any = None, *, certificate: Path | None = None) -> tuple[str, str]:
        """Status and body, requested from the second machine."""
        prefix = ["curl", "-s", "-m", "10", "-w", "\n%{http_code}", "--cacert", self.ca, "-H", f"Authorization: Bearer {token}"]
        prefix += ["--cert", str(certificate)] if certificate is not None else []
        prefix += ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body is not None else []
        done = subprocess.run([*self.wired.there, *prefix, self.url + path], capture_output=True, text=True, check=False)
        text, _, status = done.stdout.rpartition("\n")
        return status, text


def wait_until(condition: str, holds: Callable[[], bool], logs: Callable[[], str] = str) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, f"{condition}: not in time\n{logs()}"
        time.sleep(0.2)


def test_readme_sets_up_three_machines_and_unauthorised_requests_are_refused() -> None:
    """A04, A05, A12: every command of deploy/README.md, word for word."""
    with machines() as machines_, TemporaryDirectory(prefix="walk") as short:
        root = Path(short)  # a socket path is limited in length
        changes = {"remit-1.example": HERE}
        first = Machine("remit-1", machines_.here, root, changes)
        nodes = [
            Machine("node-a", machines_.there, root, {**changes, "10.0.0.11": THERE}),
            Machine("node-b", machines_.yonder, root, {**changes, "10.0.0.11": YONDER, "node-a": "node-b"}),
        ]
        try:
            _follow_readme(first, nodes)
            deployment = Deployment(machines_, first.root / "var" / "server", f"https://{HERE}:7420")
            agent = nodes[0].root / "var" / "agent"
            _wrong_digest(deployment, nodes[0])
            _refused_requests(deployment, agent, (nodes[0].root / "etc" / "join.token").read_text().strip(), root)
            _restart_agent(nodes[0], deployment)
            _revoke_agent(deployment, agent)
        finally:
            for one in (*nodes, first):
                one.end()


def _follow_readme(first: Machine, nodes: list[Machine]) -> None:
    install, ask = blocks("2")
    first.run_block(install)
    wait_until("the server is there", lambda: "remit server: local at https:" in first.logs(), first.logs)
    first.run_block(ask)
    first.run_block(*blocks("3"))
    invite, join = blocks("4")
    for one in nodes:
        first.run_block(invite.replace("node-a", one.name))
        one.run_block(join)
        wait_until("it has joined", lambda one=one: "joined as" in one.logs(), one.logs)  # type: ignore[misc]
    ready = "/opt/remit/bin/remit get nodes -o json"
    wait_until(
        "both are ready",
        lambda: first.run_block(ready).count('"health": "ready"') == 2,
        lambda: nodes[0].logs() + nodes[1].logs(),
    )
    (work,) = blocks("5")
    output = first.run_block(work)
    assert output.count("| hello from") >= 2 and "hello-0" in output and "hello-1" in output, "the logs of both nodes are shown"
    held = json.loads(first.run_block("/opt/remit/bin/remit get replicas -o json"))["items"]
    assert sorted(one["status"]["node"] for one in held) == ["node-a", "node-b"]


def _wrong_digest(deployment: Deployment, node: Machine) -> None:
    """The server has another certificate: the join token is not sent, and not spent."""
    token, line = deployment.join_token("n1")
    assert f"--server {deployment.url} --join FILE" in line and token not in line and "--ca-digest sha256:" in line
    prefix = ["agent", "--server", deployment.url, "--data", str(node.root / "wrong"), "--name", "n1", "--join", token]
    done = subprocess.run(
        [*node.prefix, REMIT, *prefix, "--ca-digest", "sha256:" + "0" * 64],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1 and "does not match --ca-digest" in done.stderr, done.stderr


def _restart_agent(node: Machine, deployment: Deployment) -> None:
    """Without the join token, which is deleted: the agent has its credentials."""
    agent = node.running.pop("remit-agent")
    agent.terminate()
    agent.wait(20)
    (node.root / "etc" / "join.token").unlink()
    node.start("remit-agent")
    wait_until("it tells again", lambda: "hello-1 |" in deployment.remit("logs", "hello").stdout, node.logs)


def _revoke_agent(deployment: Deployment, root: Path) -> None:
    """A03: and then the name is free for another key."""
    mine, calling = (root / "run/joined/token").read_text().strip(), root / "run/joined/calling.pem"
    listed = json.loads(deployment.remit("token", "list", "-o", "json").stdout)["items"]
    name = next(
        one["metadata"]["name"] for one in listed if one["spec"]["role"] == "agent" and "node-a" in one["spec"]["nodes"]
    )
    assert deployment.remit("token", "revoke", name).returncode == 0
    body = {"request": create_request(create_key()).decode()}
    wait_until("it is ended", lambda: deployment.curl("/v1/renew", mine, body, certificate=calling)[0] == "401")
    again, _ = deployment.join_token("node-a")
    assert deployment.curl("/v1/join", again, {"digest": "cd" * 32, "nodes": ["node-a"], **body})[0] == "200"


def _refused_requests(deployment: Deployment, root: Path, spent: str, tmp_path: Path) -> None:
    joined = root / "run" / "joined"
    assert {oct(file.stat().st_mode & 0o777) for file in joined.iterdir()} == {"0o600"}
    mine, calling = (joined / "token").read_text().strip(), joined / "calling.pem"
    request = create_request(create_key()).decode()
    body = {"digest": "ab" * 32, "nodes": ["node-a"], "request": request}
    assert deployment.curl("/v1/join", spent, body)[0] == "401"  # A04: it was spent
    again, _ = deployment.join_token("node-a")
    status, text = deployment.curl("/v1/join", again, body)
    assert status == "409" and "token revoke" in text, text  # A12: the name is taken
    other, _ = deployment.join_token("n2")
    assert deployment.curl("/v1/join", other, body)[0] == "403"  # not the nodes of the token
    assert deployment.curl("/v1/join", other, {**body, "nodes": ["n2"], "request": "none"})[0] == "422"
    assert deployment.curl("/v1/renew", mine, {"request": request})[0] == "401"  # the token without the certificate
    assert deployment.curl("/v1/renew", mine, {"request": request}, certificate=calling)[0] == "200"
    authority = CertificateAuthority(
        KeyPair((deployment.data / "tls/ca.pem").read_bytes(), (deployment.data / "tls/ca.key").read_bytes())
    )
    key = create_key()
    foreign = tmp_path / "foreign.pem"
    foreign.write_bytes(key + authority.issue_agent(create_request(key), agent_identity(["n9"])).calling)
    assert deployment.curl("/v1/renew", mine, {"request": request}, certificate=foreign)[0] == "403"  # another node
    server = deployment.data / "tls" / "caller.pem"
    assert deployment.curl("/v1/renew", mine, {"request": request}, certificate=server)[0] == "403"  # another role
    admin = (deployment.data / "token").read_text().strip()
    assert deployment.curl("/v1/tenants", admin, certificate=calling)[0] == "403"  # A05: it acts only for its nodes
    assert deployment.curl("/v1/tenants", mine, certificate=calling)[0] == "401"
