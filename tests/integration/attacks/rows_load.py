"""What can be done by asking much, slowly, or from elsewhere? Rows A34 to A40 of docs/faults.md. No test is in here."""

from __future__ import annotations

import json
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from typing import Final

from tests.integration.attacks.attack_server import Intruder, Refusal, attack, refusal
from tests.integration.serve.server_process import Reply, ask_on
from tests.unit.serve.in_memory_server import tenant, workload

MINE: Final = "/v1/tenants/acme/workloads"
HELD: Final = 2_100
"""More than a server takes. There may be as many more: each costs the same, and the ones before go first."""
CLOSED_S: Final = 10.0
SLACK_S: Final = 5.0
FLOOD: Final = 400


@attack(408, "timeout")
def idle_and_slow_connections(by: Intruder) -> list[Refusal]:
    """A34: more than there is room for, who say nothing or a letter at a time. Others are answered meanwhile."""
    with ExitStack() as open_, selectors.DefaultSelector() as ready:
        began = time.monotonic()
        held = [open_.enter_context(_raw(by)) for _ in range(HELD)]
        slow = [open_.enter_context(_raw(by)) for _ in range(20)]
        for connection in slow:
            connection.sendall(b"GET /v1/tenants HTTP/1.1\r\nHost: localhost\r\nX: ")
        asked = time.monotonic()
        assert by.stage.server.ask("GET", "/v1/tenants").status == 200, "nobody else is shut out"
        assert time.monotonic() - asked < 5.0
        for connection in (*held, *slow):
            ready.register(connection, selectors.EVENT_READ)
        said: list[bytes] = []
        while ready.get_map() and time.monotonic() < began + CLOSED_S + SLACK_S:
            for key, _ in ready.select(0.5):
                assert isinstance(key.fileobj, socket.socket)
                said.append(_last_words(key.fileobj))
                ready.unregister(key.fileobj)
            for connection in slow:
                if connection in ready.get_map():
                    _drip(connection)
        assert not ready.get_map(), f"{len(ready.get_map())} are still open"
    told = [words for words in said if words]
    assert {words.split()[1] for words in told} <= {b"408", b"503"}
    return [_refusal(words) for words in told if words.split()[1] == b"408"][:50]


def _raw(by: Intruder) -> socket.socket:
    return socket.create_connection(("127.0.0.1", by.stage.server.port), timeout=20, source_address=(by.address, 0))


def _drip(connection: socket.socket) -> None:
    with suppress(OSError):  # it is being closed
        connection.sendall(b"a")


def _last_words(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65_536)
    except OSError:
        return b""


def _refusal(words: bytes) -> Refusal:
    head, _, body = words.partition(b"\r\n\r\n")
    return refusal(Reply(int(head.split()[1]), {}, body))


@attack(400, "malformed")
def what_is_no_http(by: Intruder) -> list[Refusal]:
    """A34: bytes that are no request, two lengths for one body, and a head without an end: closed at once, and told why."""
    said = (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\x00\x00", b"SSH-2.0-x\r\n")
    twice = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    found = []
    for words in (*said, twice, b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
        with _raw(by) as connection:
            connection.sendall(words)
            found.append(_refusal(_last_words(connection)))
    return found


@attack(429, "throttled")
def a_thousand_creates_a_second(by: Intruder) -> list[Refusal]:
    """A35: one tenant's flood. Others are answered at once; a thousand a second for long: test_flood.py."""
    home = f"t-{by.name}"
    by.stage.admin("POST", "/v1/tenants", tenant(home, limits={"requestsPerSecond": 5, "requestsBurst": 20}))
    text, other, found, waits = by.member(home), by.member("acme"), list[Refusal](), list[float]()
    headers = by.stage.server.headers(Authorization=f"Bearer {text}")
    with by.connected() as connection:
        for number in range(FLOOD):
            reply = ask_on(connection, "POST", f"/v1/tenants/{home}/workloads", workload(f"w{number}", home), headers)
            assert reply.status in (201, 429), reply
            if reply.status == 429:
                assert int(reply.headers["retry-after"]) >= 1
                found.append(refusal(reply))
            if number % 20 == 0:
                began = time.monotonic()
                assert by.get(MINE, other).status == 200
                waits.append(time.monotonic() - began)
    assert len(found) > FLOOD // 4, f"only {len(found)} of {FLOOD} were turned away"
    assert sorted(waits)[len(waits) // 2] < 1.0 and max(waits) < 5.0, f"another tenant waited for {max(waits):.2f} s"
    return found


@attack(404)
def a_flood_of_labels(by: Intruder) -> list[Refusal]:
    """A36: paths, names, methods and traces that nobody has seen before make no new series."""
    root, text = by.stage.server.token, by.member()

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
def what_steers_a_terminal(by: Intruder) -> list[Refusal]:
    """A37: controls and newlines in a path, a header or a name are spelt out in logs, in the audit and in answers."""
    text, root = by.member(), by.stage.server.token
    hostile = "%1b[2J%0a%7b%22level%22:%22error%22%7d%0d%e2%80%ae"
    found = [by.get(f"{MINE}/{hostile}", text), by.get(f"/v1/{hostile}", text), by.get(f"/v1/tenants/{hostile}", text)]
    by.ask("POST", "/v1/tenants", tenant("a\x1b[31m\nb"), root, Remit_Trace="\x1b[31m")
    assert by.ask("GET", MINE, None, f"{root}\x1b[31m").status in (400, 401)
    for one in found:
        assert not any(sign in one.body.decode() for sign in "\x1b\r\u202e")
    for file in sorted((by.stage.server.data / "audit").rglob("*")):
        for line in file.read_bytes().splitlines():
            json.loads(line)
            assert not any(sign in line for sign in (b"\x1b", b"\r", "\u202e".encode()))
    time.sleep(0.05)
    for told in by.stage.said:
        assert json.loads(told)["level"] in ("info", "warning", "debug"), told
        assert not any(sign in told for sign in "\x1b\r\u202e"), told
    return found


@attack(403, "cross_site")
def a_post_from_another_page(by: Intruder) -> list[Refusal]:
    """A39: what a browser sends for a page of another origin, even with the token; nothing is done."""
    root, found = by.stage.server.token, []
    for origin in (
        "https://evil.example",
        "null",
        "http://127.0.0.1:1",
        f"https://127.0.0.1:{by.stage.server.port}",
        "http://[",
        "",
    ):
        found.append(by.ask("POST", "/v1/tenants", tenant("crossed"), root, Origin=origin))
        found.append(by.ask("DELETE", "/v1/tenants/acme", None, root, Origin=origin))
        found.append(by.ask("POST", "/v1/tenants", b"a=b", None, Origin=origin, Content_Type="text/plain"))
    assert by.stage.server.ask("GET", "/v1/tenants/crossed").status == 404
    return found


@attack(421, "misdirected")
def a_foreign_host(by: Intruder) -> list[Refusal]:
    """A40: a name that somebody else made to point here, with and without the token."""
    hosts = (
        "evil.example",
        "evil.example:7420",
        "10.0.0.1",
        "localhost.evil.example",
        "[::2]:80",
        "",
        "127.0.0.1.evil.example",
    )
    return [by.get("/v1/tenants", token, Host=host) for host in hosts for token in (None, by.stage.server.token)]
