"""Agent credentials after a lost answer, a kill, and beyond the lifetime of the first token. Real processes."""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remit.agent.credentials import Credentials, JoinTarget, have_expired, join
from remit.model.identity import token_digest
from remit.world.net.certificates import key_digest
from remit.world.production import production
from tests.integration.client.tcp_proxy import proxied
from tests.integration.serve.server_process import Server

REMIT = str(Path(sys.executable).parent / "remit")


def create_join_token(server: Server, node: str = "n1") -> str:
    text = f"remit_join-{node}-once-and-never-again"
    spec = {"role": "join", "digest": token_digest(text), "expires": "2999-01-01T00:00:00Z", "nodes": [node]}
    server.must(
        "POST", "/v1/tokens", {"apiVersion": "remit/v1", "kind": "Token", "metadata": {"name": f"join-{node}"}, "spec": spec}
    )
    return text


def agent_tokens(server: Server) -> list[dict[str, Any]]:
    found = server.must("GET", "/v1/tokens")["items"]
    return [one["spec"] for one in found if one["spec"]["role"] == "agent"]


class ShortLivedServer(NamedTuple):
    """A server that issues credentials valid for seconds."""

    process: subprocess.Popen[bytes]
    url: str
    data: Path

    def remit(self, *options: str) -> str:
        asks = ["--server", self.url, "--token-file", str(self.data / "token"), "--ca-file", str(self.data / "tls/ca.pem")]
        return subprocess.run([REMIT, *options, *asks], capture_output=True, text=True, check=False, timeout=60).stdout

    def agent(self, root: Path, log: Path, *options: str) -> subprocess.Popen[bytes]:
        """Start an agent. Servers among `options` are tried first."""
        asks = ["--server", self.url, "--ca-file", str(self.data / "tls/ca.pem"), "--sandbox", "none"]
        with log.open("ab") as out:
            return subprocess.Popen(
                [REMIT, "agent", *options, *asks, "--data", str(root), "--name", "n1"], stdout=out, stderr=out
            )


@contextmanager
def short_lived_server(data: Path, seconds: int) -> Iterator[ShortLivedServer]:
    argv = [sys.executable, "-m", "tests.integration.serve.short_credentials_main", str(data), str(seconds)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as serving:
        try:
            assert serving.stdout is not None
            ready, _, _ = select.select([serving.stdout], [], [], 30)
            yield ShortLivedServer(serving, serving.stdout.readline().decode().strip() if ready else "", data)
        finally:
            serving.kill()


def stop_agent(agent: subprocess.Popen[bytes], root: Path) -> None:
    agent.terminate()
    agent.wait(20)
    subprocess.run([REMIT, "keeper", "--end", "--data", str(root)], capture_output=True, check=False)


@pytest.mark.smoke
def test_agent_killed_after_lost_join_answer_is_same_agent_on_retry(tmp_path: Path) -> None:
    """F03, F20: the join token was spent, and the agent never got the answer."""
    with Server(tmp_path / "data") as server:
        server.until_ready()
        text, messages = create_join_token(server), list[str]()
        here = Credentials(tmp_path / "joined")

        async def lives() -> None:
            world = production()
            async with proxied(server.port) as (proxy, url):
                proxy.lose = lambda piece: b"/v1/join" in piece
                place = JoinTarget((url,), text, ("n1",))
                first = asyncio.ensure_future(join(here, place, world, messages.append))
                async with asyncio.timeout(20):
                    while not messages:  # noqa: ASYNC110 - set by another task
                        await asyncio.sleep(0.01)
                first.cancel()
                assert proxy.lost == 1 and len(agent_tokens(server)) == 1, "the join was committed and unanswered"
                assert not here.is_joined and "not joined yet" in messages[0]
                proxy.lose = lambda _: False
                await join(Credentials(tmp_path / "joined"), place, world, messages.append)
            await world.offload.close()

        asyncio.run(lives())
        assert [one["digest"] for one in agent_tokens(server)] == [token_digest(here.token)]
        assert server.ask("POST", "/v1/renew", {}, Authorization=f"Bearer {here.token}").status == 200


def test_server_killed_during_concurrent_joins_admits_one_agent(tmp_path: Path) -> None:
    """A04, F20: thirty connections at once, then a kill, then all retry."""
    digests = [token_digest(f"agent {number}") for number in range(30)]
    with Server(tmp_path / "data") as server:
        server.until_ready()
        text = create_join_token(server)

        def asks(digest: str, server: Server) -> int:
            try:
                body = {"digest": digest, "nodes": ["n1"]}
                return server.ask("POST", "/v1/join", body, Authorization=f"Bearer {text}").status
            except (OSError, HTTPException):
                return 0

        with ThreadPoolExecutor(30) as threads:
            answers = [threads.submit(asks, digest, server) for digest in digests]
            while not any(one.done() for one in answers):
                time.sleep(0.001)
            server.kill()
            before = {digest for digest, one in zip(digests, answers, strict=True) if one.result() == 200}
    with Server(tmp_path / "data") as server:
        server.until_ready()
        with ThreadPoolExecutor(30) as threads:
            again = list(threads.map(lambda digest: asks(digest, server), digests))
        assert sorted(set(again)) == [200, 401] and again.count(200) == 1, again
        winner = digests[again.index(200)]
        assert before <= {winner}, "an agent that got 200 has joined"
        assert [one["digest"] for one in agent_tokens(server)] == [winner]


def test_agent_renews_short_lived_credentials_at_reachable_server(tmp_path: Path) -> None:
    """Its token and certificates end after seconds, and the first of its two servers does not exist.

    A third of the lifetime is left when it renews: for that long both processes may be too busy.
    """
    data, root, log = tmp_path / "data", tmp_path / "agent", tmp_path / "log"
    with short_lived_server(data, 10) as serving:
        remit, file = serving.remit, tmp_path / "join.token"
        file.write_text(remit("token", "create", "--role", "join", "--node", "n1"))
        agent = serving.agent(root, log, "--server", "https://127.0.0.1:1", "--join", str(file))
        try:
            calling, seen, spans = root / "run/joined/calling.pem", set[str](), set[str]()
            until = time.monotonic() + 60
            while len(seen) < 3:  # as it joined, renewed once, and renewed with the renewed credentials
                assert time.monotonic() < until, log.read_text()
                if calling.exists() and (root / "run/joined/term").exists():
                    seen.add(key_digest(calling.read_bytes()[calling.read_bytes().index(b"-----BEGIN CERT") :]))
                    spans.add((root / "run/joined/term").read_text())
                time.sleep(0.1)
            assert len(spans) >= 3
            until = time.monotonic() + 20
            while "n1" not in (output := remit("get", "nodes", "-o", "name")):
                assert time.monotonic() < until, (output, log.read_text())
            token = next(
                one for one in json.loads(remit("token", "list", "-o", "json"))["items"] if one["spec"]["role"] == "agent"
            )
            assert token["spec"]["expires"] == json.loads((root / "run/joined/term").read_text())["ends"]
            assert agent.poll() is None and "not renewed" not in log.read_text()
            serving.process.kill()  # nothing can renew it now: it logs that and continues
            until = time.monotonic() + 40
            while "not renewed" not in log.read_text():
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            assert agent.poll() is None
        finally:
            stop_agent(agent, root)


def test_agent_with_expired_credentials_rejoins_with_new_token(tmp_path: Path) -> None:
    """Every server rejects it: that must not be treated as a temporary silence."""
    data, root, log = tmp_path / "data", tmp_path / "agent", tmp_path / "log"
    with short_lived_server(data, 2) as serving:
        for turn in (1, 2):
            file = tmp_path / f"join.token-{turn}"
            file.write_text(serving.remit("token", "create", "--role", "join", "--node", "n1"))
            agent = serving.agent(root, log, "--join", str(file))
            try:
                until = time.monotonic() + 30
                while log.read_text().count("agent: joined as n1") < turn:
                    assert time.monotonic() < until and agent.poll() is None, log.read_text()
                    time.sleep(0.05)
            finally:
                stop_agent(agent, root)
            if turn == 1:
                while not have_expired(Credentials(root / "run/joined"), production()):
                    time.sleep(0.1)
                # Its certificate has expired, its token perhaps not: revoke the token first.
                for one in json.loads(serving.remit("token", "list", "-o", "json"))["items"]:
                    if one["spec"]["role"] == "agent":
                        serving.remit("token", "revoke", one["metadata"]["name"])
