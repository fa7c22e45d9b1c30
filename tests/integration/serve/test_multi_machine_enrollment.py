"""Does a scope on three machines come about as the README says, over TLS, and is everybody else turned away?"""

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
from tests.integration.serve.network_namespaces import HERE, THERE, YONDER, Machines, machines, why_not

REMIT = str(Path(sys.executable).parent / "remit")
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


class Place:
    def __init__(self, wired: Machines, data: Path, url: str) -> None:
        self.wired, self.data, self.url, self.ca = wired, data, url, str(data / "tls" / "ca.pem")
        self.asks = ["--server", url, "--token-file", str(data / "token"), "--ca-file", self.ca]

    def remit(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.wired.here, REMIT, *words, *self.asks], input=stdin, capture_output=True, text=True, check=False, timeout=60
        )

    def join_token(self, *nodes: str) -> tuple[str, str]:
        """The token, and the line that is printed with it."""
        words = [word for node in nodes for word in ("--node", node)]
        made = self.remit("token", "create", "--role", "join", *words)
        assert made.returncode == 0, made.stderr
        return made.stdout.strip(), made.stderr

    def curl(self, path: str, token: str, body: Any = None, *, show: Path | None = None) -> tuple[str, str]:
        """The status and the body, asked from the other machine."""
        words = ["curl", "-s", "-m", "10", "-w", "\n%{http_code}", "--cacert", self.ca, "-H", f"Authorization: Bearer {token}"]
        words += ["--cert", str(show)] if show is not None else []
        words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body is not None else []
        done = subprocess.run([*self.wired.there, *words, self.url + path], capture_output=True, text=True, check=False)
        text, _, status = done.stdout.rpartition("\n")
        return status, text


def until(what: str, holds: Callable[[], bool], said: Callable[[], str] = str) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, f"{what}: not in time\n{said()}"
        time.sleep(0.2)


def test_three_machines_by_the_readme__work_runs_and_is_told_of__and_everybody_else_is_turned_away() -> None:
    """A04, A05, A12: every command of deploy/README.md, as it stands there."""
    with machines() as wired, TemporaryDirectory(prefix="walk") as short:
        root = Path(short)  # a socket's name has its bounds
        changes = {"remit-1.example": HERE}
        first = Machine("remit-1", wired.here, root, changes)
        nodes = [
            Machine("node-a", wired.there, root, {**changes, "10.0.0.11": THERE}),
            Machine("node-b", wired.yonder, root, {**changes, "10.0.0.11": YONDER, "node-a": "node-b"}),
        ]
        try:
            _walk(first, nodes)
            place = Place(wired, first.root / "var" / "server", f"https://{HERE}:7420")
            agent = nodes[0].root / "var" / "agent"
            _wrong_digest(place, nodes[0])
            _turned_away(place, agent, (nodes[0].root / "etc" / "join.token").read_text().strip(), root)
            _started_again(nodes[0], place)
            _ended_by_revoking(place, agent)
        finally:
            for one in (*nodes, first):
                one.end()


def _walk(first: Machine, nodes: list[Machine]) -> None:
    install, ask = blocks("2")
    first.type(install)
    until("the server is there", lambda: "remit server: local at https:" in first.said(), first.said)
    first.type(ask)
    first.type(*blocks("3"))
    invite, join = blocks("4")
    for one in nodes:
        first.type(invite.replace("node-a", one.name))
        one.type(join)
        until("it has joined", lambda one=one: "joined as" in one.said(), one.said)  # type: ignore[misc]
    ready = "/opt/remit/bin/remit get nodes -o json"
    until(
        "both are ready", lambda: first.type(ready).count('"health": "ready"') == 2, lambda: nodes[0].said() + nodes[1].said()
    )
    (work,) = blocks("5")
    told = first.type(work)
    assert told.count("| hello from") >= 2 and "hello-0" in told and "hello-1" in told, "each node was asked what it says"
    held = json.loads(first.type("/opt/remit/bin/remit get replicas -o json"))["items"]
    assert sorted(one["status"]["node"] for one in held) == ["node-a", "node-b"]


def _wrong_digest(place: Place, node: Machine) -> None:
    """Whoever answers is not who was meant: the join token is not sent, let alone spent."""
    token, line = place.join_token("n1")
    assert f"--server {place.url} --join FILE" in line and token not in line and "--ca-digest sha256:" in line
    words = ["agent", "--server", place.url, "--data", str(node.root / "wrong"), "--name", "n1", "--join", token]
    done = subprocess.run(
        [*node.words, REMIT, *words, "--ca-digest", "sha256:" + "0" * 64],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1 and "does not match --ca-digest" in done.stderr, done.stderr


def _started_again(node: Machine, place: Place) -> None:
    """Without the join token, which is gone: it is known."""
    agent = node.running.pop("remit-agent")
    agent.terminate()
    agent.wait(20)
    (node.root / "etc" / "join.token").unlink()
    node.start("remit-agent")
    until("it tells again", lambda: "hello-1 |" in place.remit("logs", "hello").stdout, node.said)


def _ended_by_revoking(place: Place, root: Path) -> None:
    """A03: and then the name is free for another key."""
    mine, calling = (root / "run/joined/token").read_text().strip(), root / "run/joined/calling.pem"
    listed = json.loads(place.remit("token", "list", "-o", "json").stdout)["items"]
    name = next(
        one["metadata"]["name"] for one in listed if one["spec"]["role"] == "agent" and "node-a" in one["spec"]["nodes"]
    )
    assert place.remit("token", "revoke", name).returncode == 0
    body = {"request": create_request(create_key()).decode()}
    until("it is ended", lambda: place.curl("/v1/renew", mine, body, show=calling)[0] == "401")
    again, _ = place.join_token("node-a")
    assert place.curl("/v1/join", again, {"digest": "cd" * 32, "nodes": ["node-a"], **body})[0] == "200"


def _turned_away(place: Place, root: Path, spent: str, tmp_path: Path) -> None:
    joined = root / "run" / "joined"
    assert {oct(file.stat().st_mode & 0o777) for file in joined.iterdir()} == {"0o600"}
    mine, calling = (joined / "token").read_text().strip(), joined / "calling.pem"
    request = create_request(create_key()).decode()
    body = {"digest": "ab" * 32, "nodes": ["node-a"], "request": request}
    assert place.curl("/v1/join", spent, body)[0] == "401"  # A04: it was used
    again, _ = place.join_token("node-a")
    status, text = place.curl("/v1/join", again, body)
    assert status == "409" and "token revoke" in text, text  # A12: the name is taken
    other, _ = place.join_token("n2")
    assert place.curl("/v1/join", other, body)[0] == "403"  # not what the token is for
    assert place.curl("/v1/join", other, {**body, "nodes": ["n2"], "request": "none"})[0] == "422"
    assert place.curl("/v1/renew", mine, {"request": request})[0] == "401"  # the token without the certificate
    assert place.curl("/v1/renew", mine, {"request": request}, show=calling)[0] == "200"
    authority = CertificateAuthority(
        KeyPair((place.data / "tls/ca.pem").read_bytes(), (place.data / "tls/ca.key").read_bytes())
    )
    key = create_key()
    foreign = tmp_path / "foreign.pem"
    foreign.write_bytes(key + authority.issue_agent(create_request(key), agent_identity(["n9"])).calling)
    assert place.curl("/v1/renew", mine, {"request": request}, show=foreign)[0] == "403"  # the right authority, another node
    server = place.data / "tls" / "caller.pem"
    assert place.curl("/v1/renew", mine, {"request": request}, show=server)[0] == "403"  # the right authority, another role
    admin = (place.data / "token").read_text().strip()
    assert place.curl("/v1/tenants", admin, show=calling)[0] == "403"  # A05: an agent's certificate acts for its nodes alone
    assert place.curl("/v1/tenants", mine, show=calling)[0] == "401"
