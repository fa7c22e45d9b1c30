"""Attacks by load, slow connections and foreign origins: rows A34 to A40 of docs/faults.md. Contains no tests."""

from __future__ import annotations

import json
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from typing import Final

from tests.integration.attacks.attack_server import Attacker, Outcome, attack, outcome_of
from tests.integration.serve.server_process import Reply, ask_on
from tests.unit.serve.in_memory_server import tenant, workload

MINE: Final = "/v1/tenants/acme/workloads"
HELD: Final = 2_100
"""More connections than a server accepts; further ones cost the same, and the oldest are closed first."""
CLOSED_S: Final = 10.0
SLACK_S: Final = 5.0
FLOOD: Final = 400


@attack(408, "timeout")
def idle_and_slow_connections(by: Attacker) -> list[Outcome]:
    """A34: more idle or dripping connections than the limit. Other clients are served meanwhile."""
    with ExitStack() as open_, selectors.DefaultSelector() as ready:
        began = time.monotonic()
        held = [open_.enter_context(_raw(by)) for _ in range(HELD)]
        slow = [open_.enter_context(_raw(by)) for _ in range(20)]
        for connection in slow:
            connection.sendall(b"GET /v1/tenants HTTP/1.1\r\nHost: localhost\r\nX: ")
        began_request = time.monotonic()
        assert by.target.server.ask("GET", "/v1/tenants").status == 200, "other clients must be served"
        assert time.monotonic() - began_request < 5.0
        for connection in (*held, *slow):
            ready.register(connection, selectors.EVENT_READ)
        log_lines: list[bytes] = []
        while ready.get_map() and time.monotonic() < began + CLOSED_S + SLACK_S:
            for key, _ in ready.select(0.5):
                assert isinstance(key.fileobj, socket.socket)
                log_lines.append(_read_answer(key.fileobj))
                ready.unregister(key.fileobj)
            for connection in slow:
                if connection in ready.get_map():
                    _drip(connection)
        assert not ready.get_map(), f"{len(ready.get_map())} are still open"
    answers = [data for data in log_lines if data]
    assert {data.split()[1] for data in answers} <= {b"408", b"503"}
    return [_refusal(data) for data in answers if data.split()[1] == b"408"][:50]


def _raw(by: Attacker) -> socket.socket:
    return socket.create_connection(("127.0.0.1", by.target.server.port), timeout=20, source_address=(by.address, 0))


def _drip(connection: socket.socket) -> None:
    with suppress(OSError):  # it is being closed
        connection.sendall(b"a")


def _read_answer(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65_536)
    except OSError:
        return b""


def _refusal(data: bytes) -> Outcome:
    head, _, body = data.partition(b"\r\n\r\n")
    return outcome_of(Reply(int(head.split()[1]), {}, body))


@attack(400, "malformed")
def malformed_http(by: Attacker) -> list[Outcome]:
    """A34: bytes that are no request, conflicting lengths, and an invalid length: refused and closed at once."""
    log_lines = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n\r\n\x00\x00",
        b"SSH-2.0-x\r\n",
    )
    twice = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    found = []
    for data in (*log_lines, twice, b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
        with _raw(by) as connection:
            connection.sendall(data)
            found.append(_refusal(_read_answer(connection)))
    return found


@attack(429, "throttled")
def request_flood(by: Attacker) -> list[Outcome]:
    """A35: a flood of one tenant. Others are answered at once; a sustained flood: test_flood.py."""
    home = f"t-{by.name}"
    by.target.admin("POST", "/v1/tenants", tenant(home, limits={"requestsPerSecond": 5, "requestsBurst": 20}))
    text, other, found, waits = by.member(home), by.member("acme"), list[Outcome](), list[float]()
    headers = by.target.server.headers(Authorization=f"Bearer {text}")
    with by.connected() as connection:
        for number in range(FLOOD):
            reply = ask_on(connection, "POST", f"/v1/tenants/{home}/workloads", workload(f"w{number}", home), headers)
            assert reply.status in (201, 429), reply
            if reply.status == 429:
                assert int(reply.headers["retry-after"]) >= 1
                found.append(outcome_of(reply))
            if number % 20 == 0:
                began = time.monotonic()
                assert by.get(MINE, other).status == 200
                waits.append(time.monotonic() - began)
    assert len(found) > FLOOD // 4, f"only {len(found)} of {FLOOD} were turned away"
    assert sorted(waits)[len(waits) // 2] < 1.0 and max(waits) < 5.0, f"another tenant waited for {max(waits):.2f} s"
    return found


@attack(404)
def flood_of_label_values(by: Attacker) -> list[Outcome]:
    """A36: new paths, names, methods and traces create no new time series."""
    root, text = by.target.server.token, by.member()

    def series() -> set[str]:
        lines = by.get("/metrics", root).body.decode().splitlines()
        return {line.rsplit(" ", 1)[0] for line in lines if line and line[0] != "#"}

    by.get(f"{MINE}/first", text), by.get("/v1/first", text), by.get("/v1/tenants/first/workloads", text)
    series()
    before, found = series(), []
    for number in range(100):
        found += [
            by.get(f"{MINE}/x{number}", text, Remit_Trace=f"t{number}"),
            by.get(f"/v1/x{number}", text, User_Agent=f"u{number}"),
        ]
        found.append(by.get(f"/v1/tenants/x{number}/workloads", text))
    assert series() == before, series() ^ before
    return found


@attack(404)
def terminal_control_characters(by: Attacker) -> list[Outcome]:
    """A37: control characters and newlines in paths, headers and names are escaped in logs, audit and answers."""
    text, root = by.member(), by.target.server.token
    hostile = "%1b[2J%0a%7b%22level%22:%22error%22%7d%0d%e2%80%ae"
    found = [by.get(f"{MINE}/{hostile}", text), by.get(f"/v1/{hostile}", text), by.get(f"/v1/tenants/{hostile}", text)]
    by.ask("POST", "/v1/tenants", tenant("a\x1b[31m\nb"), root, Remit_Trace="\x1b[31m")
    assert by.ask("GET", MINE, None, f"{root}\x1b[31m").status in (400, 401)
    for one in found:
        assert not any(sign in one.body.decode() for sign in "\x1b\r\u202e")
    for file in sorted((by.target.server.data / "audit").rglob("*")):
        for line in file.read_bytes().splitlines():
            json.loads(line)
            assert not any(sign in line for sign in (b"\x1b", b"\r", "\u202e".encode()))
    time.sleep(0.05)
    for answers in by.target.log_lines:
        assert json.loads(answers)["level"] in ("info", "warning", "debug"), answers
        assert not any(sign in answers for sign in "\x1b\r\u202e"), answers
    return found


@attack(403, "cross_site")
def cross_site_post(by: Attacker) -> list[Outcome]:
    """A39: requests of a page of another origin, even with the token; nothing is applied."""
    root, found = by.target.server.token, []
    for origin in (
        "https://evil.example",
        "null",
        "http://127.0.0.1:1",
        f"https://127.0.0.1:{by.target.server.port}",
        "http://[",
        "",
    ):
        found.append(by.ask("POST", "/v1/tenants", tenant("crossed"), root, Origin=origin))
        found.append(by.ask("DELETE", "/v1/tenants/acme", None, root, Origin=origin))
        found.append(by.ask("POST", "/v1/tenants", b"a=b", None, Origin=origin, Content_Type="text/plain"))
    assert by.target.server.ask("GET", "/v1/tenants/crossed").status == 404
    return found


@attack(421, "misdirected")
def foreign_host_header(by: Attacker) -> list[Outcome]:
    """A40: a host name that was made to resolve here, with and without the token."""
    hosts = (
        "evil.example",
        "evil.example:7420",
        "10.0.0.1",
        "localhost.evil.example",
        "[::2]:80",
        "",
        "127.0.0.1.evil.example",
    )
    return [by.get("/v1/tenants", token, Host=host) for host in hosts for token in (None, by.target.server.token)]
