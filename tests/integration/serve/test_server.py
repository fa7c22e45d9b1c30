"""A real `remit server` keeps what it acknowledged through kills and shutdowns, and survives malformed input."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from remit.model.identity import token_digest
from tests.integration.serve.server_process import Server, ask_on
from tests.unit.serve.in_memory_server import tenant, workload

WORKLOADS = "/v1/tenants/acme/workloads"


@pytest.mark.smoke
def test_server_answers_over_http_and_exits_on_signal(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        server.until_ready()
        assert stat.S_IMODE((tmp_path / "data" / "token").stat().st_mode) == 0o600
        assert server.ask("POST", "/v1/tenants", tenant()).status == 201
        assert server.ask("PUT", f"{WORKLOADS}/web", workload("web")).status == 201
        seen = server.ask("GET", f"{WORKLOADS}/web")
        assert seen.json["spec"]["type"] == "service" and "date" in seen.headers
        patched = server.ask(
            "PATCH", f"{WORKLOADS}/web", {"spec": {"replicas": 5}}, **{"Content-Type": "application/merge-patch+json"}
        )
        assert patched.json["spec"]["replicas"] == 5
        assert server.ask("DELETE", f"{WORKLOADS}/web").status == 202, "the replica created with it remains"
        assert server.ask("PUT", f"{WORKLOADS}/idle", workload("idle", replicas=0)).status == 201
        assert server.ask("DELETE", f"{WORKLOADS}/idle").status == 200
        assert server.ask("GET", f"{WORKLOADS}/idle").status == 404
        assert server.ask("GET", "/v1/tenants", Authorization="Bearer no").status == 401
        assert server.end() == (0, "")
    with Server(tmp_path / "data") as again:
        assert [one["metadata"]["name"] for one in again.must("GET", "/v1/tenants")["items"]] == ["acme"]
        code, output = again.end(signal.SIGINT)
        assert code == 130 and "Traceback" not in output


@pytest.mark.smoke
def test_tokens_stay_valid_and_revocable_after_kill(tmp_path: Path) -> None:
    """A03, A04: a token accepted before the kill can be revoked after it."""
    viewer, join = "remit_" + "v" * 40, "remit_" + "j" * 40
    later = "2999-01-01T00:00:00Z"
    with Server(tmp_path / "data") as first:
        for text, spec in ((viewer, {"role": "viewer"}), (join, {"role": "join", "nodes": ["n1"]})):
            spec |= {"digest": token_digest(text), "expires": later}
            name = {"name": spec["role"]}
            first.must("POST", "/v1/tokens", {"apiVersion": "remit/v1", "kind": "Token", "metadata": name, "spec": spec})
        first.kill()
    with Server(tmp_path / "data") as second:
        second.until_ready()
        mine, merge = f"Bearer {viewer}", {"Content-Type": "application/merge-patch+json"}
        assert second.ask("GET", "/v1/tenants", Authorization=mine).status == 200
        assert second.ask("PATCH", "/v1/tokens/viewer", {"spec": {"revoked": True}}, **merge).status == 200
        assert second.ask("GET", "/v1/tenants", Authorization=mine).status == 401
        digest = token_digest("an agent's own")
        joined = second.ask("POST", "/v1/join", {"digest": digest, "nodes": ["n1"]}, Authorization=f"Bearer {join}")
        assert joined.status == 200, joined
        other = second.ask("POST", "/v1/join", {"digest": "0" * 64, "nodes": ["n1"]}, Authorization=f"Bearer {join}")
        assert other.status == 401, other


def test_directory_has_one_owner_and_port_one_listener(tmp_path: Path) -> None:
    """And A06: no listening beyond loopback without TLS."""
    with Server(tmp_path / "data") as server:
        owned = run("--data", str(tmp_path / "data"))
        assert owned.returncode == 1
        assert str(server.process.pid) in owned.stderr and "--data" in owned.stderr
        taken = run("--data", str(tmp_path / "other"), "--listen", f"127.0.0.1:{server.port}")
        assert taken.returncode == 1 and "already in use" in taken.stderr and "--listen" in taken.stderr
        away = run("--data", str(tmp_path / "other"), "--listen", "0.0.0.0:0")
        assert away.returncode == 1 and "127.0.0.1" in away.stderr
        assert run("--data", str(tmp_path / "other"), "--listen", "nowhere").returncode == 2
        assert run("--data", str(tmp_path / "other"), "--beat", "1ms").returncode == 2
        (tmp_path / "short").write_text("x\n")
        short = run("--data", str(tmp_path / "other"), "--token-file", str(tmp_path / "short"))
        assert short.returncode == 1 and "does not contain a token" in short.stderr
    assert all("Traceback" not in one.stderr for one in (owned, taken, away, short))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "remit.cli", "server", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_watch_continues_by_revision_over_server_kills(tmp_path: Path) -> None:
    """Every object is sent exactly once over three lives of the server, each ended by kill -9 under load."""
    received: list[str] = []
    made: list[str] = []
    after = 0
    port = 0
    for life in range(3):
        with Server(tmp_path / "data", f"127.0.0.1:{port}") as server:
            port = server.port
            server.until_ready()
            if life == 0:
                after = server.must("POST", "/v1/tenants", tenant())["metadata"]["revision"]
            killing = threading.Thread(target=write_until_killed, args=(server, f"l{life}", made))
            killing.start()
            pending: list[str] = []
            for line in server.watch(f"{WORKLOADS}?watch=true&after={after}"):
                if line["type"] == "changed":
                    pending.append(line["object"]["metadata"]["name"])
                elif line["type"] in ("bookmark", "heartbeat"):
                    received, pending, after = [*received, *pending], [], line["revision"]
            killing.join()
    with Server(tmp_path / "data") as server:
        server.until_ready()
        pending = []
        last = server.must("GET", WORKLOADS)
        for line in server.watch(f"{WORKLOADS}?watch=true&after={after}"):
            if line["type"] == "changed":
                pending.append(line["object"]["metadata"]["name"])
            elif line["revision"] >= last["metadata"]["revision"]:
                break
        received += pending
        there = {one["metadata"]["name"] for one in list_all(server, WORKLOADS)}
    assert len(made) > 30
    assert set(made) <= there, "an acknowledged write is lost"
    assert sorted(received) == sorted(there), "sent twice or not at all"


def list_all(server: Server, path: str) -> list[Any]:
    """List all pages."""
    items: list[Any] = []
    then = ""
    while True:
        page = server.must("GET", f"{path}?limit=1000{then}")
        items += page["items"]
        if not page["metadata"].get("continue"):
            return items
        then = f"&continue={page['metadata']['continue']}"


def write_until_killed(server: Server, prefix: str, made: list[str]) -> None:
    connection = server.connect()
    try:
        until = time.monotonic() + 0.7
        for i in range(100_000):
            if time.monotonic() > until:
                server.process.kill()
            name = f"{prefix}-{i}"
            reply = ask_on(connection, "POST", WORKLOADS, workload(name), server.headers())
            assert reply.status == 201, reply
            made.append(name)
    except (OSError, HTTPException):
        pass  # killed, perhaps while answering
    finally:
        connection.close()
        server.process.kill()


def test_shutdown_under_load_answers_accepted_requests(tmp_path: Path) -> None:
    """Every request was either answered or never accepted: acknowledged writes are kept, and no connection hangs."""
    made: list[list[str]] = [[] for _ in range(8)]
    broken: list[str] = []
    with Server(tmp_path / "data") as server:
        server.until_ready()
        server.must("POST", "/v1/tenants", tenant())
        watched: list[Any] = []
        watching = threading.Thread(target=lambda: watched.extend(server.watch("/v1/workloads?watch=true")))
        watching.start()
        writers = [threading.Thread(target=write_until_closed, args=(server, i, made[i], broken)) for i in range(8)]
        for writer in writers:
            writer.start()
        time.sleep(1.0)
        began = time.monotonic()
        code, output = server.end()
        took_s = time.monotonic() - began
        for thread in (*writers, watching):
            thread.join(30)
            assert not thread.is_alive()
        assert (code, output) == (0, "") and took_s < 15
    assert not broken, broken
    assert watched[-1]["type"] == "resync" and watched[-1]["reason"] == "shutdown"
    acknowledged = {name for names in made for name in names}
    assert len(acknowledged) > 50
    with Server(tmp_path / "data") as again:
        found = all_names(again)
    assert acknowledged == found


def write_until_closed(server: Server, number: int, made: list[str], broken: list[str]) -> None:
    connection = server.connect()
    try:
        for i in range(100_000):
            name = f"w{number}-{i}"
            try:
                reply = ask_on(connection, "POST", WORKLOADS, workload(name), server.headers())
            except OSError:
                return
            except HTTPException as error:
                broken.append(f"{name}: {error!r}")
                return
            if reply.status != 201:
                broken.append(f"{name}: {reply}")
                return
            made.append(name)
            if reply.headers.get("connection") == "close":
                return
    finally:
        connection.close()


def all_names(server: Server) -> set[str]:
    found: set[str] = set()
    rest = ""
    while True:
        page = server.must("GET", f"{WORKLOADS}?limit=1000&continue={rest}")
        found |= {one["metadata"]["name"] for one in page["items"]}
        rest = page["metadata"].get("continue", "")
        if not rest:
            return found


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Server(tmp_path_factory.mktemp("standing") / "data") as server:
        server.until_ready()
        yield server
        assert server.end() == (0, "")


def exchange(server: Server, sent: bytes, *, wait_s: float = 15) -> bytes:
    with server.raw() as connection:
        connection.settimeout(wait_s)
        try:
            connection.sendall(sent)
            answer = b""
            while piece := connection.recv(65_536):
                answer += piece
        except (ConnectionError, TimeoutError):
            return b""
    return answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"\r\n\r\n\x00\x00", b"400"),
        (b"GET /healthz HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nA: " + b"a" * 100_000, b"431"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 70_000 + b"\r\n\r\n", b"431"),
        (b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 70_000 + b"\r\nContent-Length: 4\r\n\r\nbody", b"431"),
        (b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", b"200"),
        (
            b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"400",
        ),
        (b"GET /v1/%zz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"401"),
        (b"BREW /v1/tenants HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
    ],
)
def test_malformed_http_gets_problem(shared_server: Server, sent: bytes, status: bytes) -> None:
    answer = exchange(shared_server, sent, wait_s=3) if status != b"200" else first_answer(shared_server, sent)
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:100]
    if status != b"200":
        assert b"application/problem+json" in answer
        received = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert received["code"] and received["cure"]
    assert shared_server.ask("GET", "/healthz").status == 200


def first_answer(server: Server, sent: bytes) -> bytes:
    with server.raw() as connection:
        connection.sendall(sent)
        return connection.recv(65_536)


def test_endless_body_is_cut_off(shared_server: Server) -> None:
    head = f"POST /v1/tenants HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {shared_server.token}\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n"
    sent = 0
    with shared_server.raw() as connection:
        connection.sendall(head.encode())
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        try:
            for _ in range(400):
                connection.sendall(chunk)
                sent += 0x10000
            answer = connection.recv(65_536)
        except ConnectionError:
            answer = b""
    assert sent < 400 * 0x10000 or answer.startswith(b"HTTP/1.1 413")
    assert shared_server.ask("GET", "/healthz").status == 200


def test_refusal_arrives_while_body_is_still_being_sent(shared_server: Server) -> None:
    """Most clients send the whole body before they read; if the connection is closed meanwhile, they get no answer."""
    for _ in range(5):
        connection = shared_server.connect()
        try:
            reply = ask_on(connection, "POST", "/v1/tenants", b"x" * (8 << 20), shared_server.headers())
        finally:
            connection.close()
        assert reply.status == 413 and reply.json["cure"]
    assert shared_server.ask("GET", "/healthz").status == 200


def test_silent_or_slow_connection_is_closed(shared_server: Server) -> None:
    """A34: slow headers hold a connection for seconds, not for ever."""
    began = time.monotonic()
    with shared_server.raw() as silent, shared_server.raw() as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: ")
        for connection in (silent, slow):
            connection.settimeout(30)
            assert connection.recv(1_000).startswith(b"HTTP/1.1 408")
    assert time.monotonic() - began < 60


def test_server_survives_many_connections(shared_server: Server) -> None:
    held: list[socket.socket] = []
    try:
        held += [shared_server.raw() for _ in range(300)]
        assert shared_server.ask("GET", "/healthz").status == 200
    finally:
        for connection in held:
            connection.close()


def test_idle_server_uses_little_cpu(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        server.until_ready()
        before = cpu_ms(server.process.pid)
        time.sleep(3)
        spent_ms = cpu_ms(server.process.pid) - before
    assert spent_ms < 900, f"{spent_ms} ms of processor time in 3 s, at 5 beats a second"


def cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")
