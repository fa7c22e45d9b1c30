"""Runs `remit server` as a process, and plain HTTP requests to it. Contains no tests."""

from __future__ import annotations

import http.client
import json
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BEAT = "200ms"
START_S_MAX = 30.0


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """One life of a server. It is killed at the end of the test in any case."""

    def __init__(self, data: Path, listen: str = "127.0.0.1:0", *more: str) -> None:
        argv = [sys.executable, "-m", "remit.cli", "server", "--data", str(data), "--listen", listen, "--beat", BEAT, *more]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.data = data
        line = self._first_line()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, (line, self.process.stderr.read() if self.process.stderr and self.process.poll() is not None else b"")
        self.port = int(found[1])
        self.token = (data / "token").read_text().strip()

    def _first_line(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_S_MAX)
        return self.process.stdout.readline().decode() if ready else ""

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Stop it; return its exit code and the log lines above level info."""
        self.process.send_signal(number)
        code = self.process.wait(30)
        assert self.process.stderr is not None
        lines = self.process.stderr.read().decode().splitlines(keepends=True)
        return code, "".join(line for line in lines if not line.startswith("{") or json.loads(line)["level"] != "info")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def headers(self, **more: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json", **more}

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        connection = self.connect()
        try:
            return ask_on(connection, method, path, body, self.headers(**headers))
        finally:
            connection.close()

    def must(self, method: str, path: str, body: Any = None) -> Any:
        reply = self.ask(method, path, body)
        assert reply.status < 300, reply
        return reply.json

    def until_ready(self) -> None:
        until = time.monotonic() + START_S_MAX
        while self.ask("GET", "/readyz").status != 200:
            assert time.monotonic() < until, "the server did not become ready"
            time.sleep(0.05)

    def watch(self, path: str) -> Iterator[Any]:
        """Lines until the end, in whatever way the connection ends."""
        connection = self.connect()
        try:
            connection.request("GET", path, headers=self.headers())
            reply = connection.getresponse()
            assert reply.status == 200, reply.read()
            while line := reply.readline():
                yield json.loads(line)
        except (OSError, http.client.HTTPException, ValueError):
            return
        finally:
            connection.close()


def ask_on(connection: http.client.HTTPConnection, method: str, path: str, body: Any, headers: dict[str, str]) -> Reply:
    sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, sent, headers)
    reply = connection.getresponse()
    return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())
