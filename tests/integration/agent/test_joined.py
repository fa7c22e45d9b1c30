"""Does an agent stay who it is: after a lost answer, a kill, and past the end of its first token? With real processes."""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

from remit.agent.joining import Credentials, Place, join
from remit.model.identity import digest_of
from remit.world.certificates import key_digest
from remit.world.production import production
from tests.integration.client.proxy import proxied
from tests.integration.serve.a_server import Server

REMIT = str(Path(sys.executable).parent / "remit")


def invited(server: Server, node: str = "n1") -> str:
    text = f"remit_join-{node}-once-and-never-again"
    spec = {"role": "join", "digest": digest_of(text), "expires": "2999-01-01T00:00:00Z", "nodes": [node]}
    server.must(
        "POST", "/v1/tokens", {"apiVersion": "remit/v1", "kind": "Token", "metadata": {"name": f"join-{node}"}, "spec": spec}
    )
    return text


def agents(server: Server) -> list[dict[str, Any]]:
    found = server.must("GET", "/v1/tokens")["items"]
    return [one["spec"] for one in found if one["spec"]["role"] == "agent"]


def test_the_answer_to_joining_is_lost_and_the_agent_killed__the_next_is_the_same_agent(tmp_path: Path) -> None:
    """F03, F20: the join token was spent by somebody who never heard of it."""
    with Server(tmp_path / "data") as server:
        server.until_ready()
        text, told = invited(server), list[str]()
        here = Credentials(tmp_path / "joined")

        async def lives() -> None:
            world = production()
            async with proxied(server.port) as (proxy, url):
                proxy.lose = lambda piece: b"/v1/join" in piece
                place = Place((url,), text, ("n1",))
                first = asyncio.ensure_future(join(here, place, world, told.append))
                async with asyncio.timeout(20):
                    while not told:  # noqa: ASYNC110 - it is told by another
                        await asyncio.sleep(0.01)
                first.cancel()
                assert proxy.lost == 1 and len(agents(server)) == 1, "it was done, and nobody heard of it"
                assert not here.known and "not joined yet" in told[0]
                proxy.lose = lambda _: False
                await join(Credentials(tmp_path / "joined"), place, world, told.append)
            await world.offload.close()

        asyncio.run(lives())
        assert [one["digest"] for one in agents(server)] == [digest_of(here.token)]
        assert server.ask("POST", "/v1/renew", {}, Authorization=f"Bearer {here.token}").status == 200


def test_the_server_is_killed_while_many_join_with_one_token__one_agent_comes_of_it(tmp_path: Path) -> None:
    """A04, F20: thirty connections at once, then a kill, then all ask again."""
    digests = [digest_of(f"agent {number}") for number in range(30)]
    with Server(tmp_path / "data") as server:
        server.until_ready()
        text = invited(server)

        def asks(digest: str, server: Server) -> int:
            try:
                body = {"digest": digest, "nodes": ["n1"]}
                return server.ask("POST", "/v1/join", body, Authorization=f"Bearer {text}").status
            except (OSError, HTTPException):
                return 0

        with ThreadPoolExecutor(30) as threads:
            said = [threads.submit(asks, digest, server) for digest in digests]
            while not any(one.done() for one in said):
                time.sleep(0.001)
            server.kill()
            before = {digest for digest, one in zip(digests, said, strict=True) if one.result() == 200}
    with Server(tmp_path / "data") as server:
        server.until_ready()
        with ThreadPoolExecutor(30) as threads:
            again = list(threads.map(lambda digest: asks(digest, server), digests))
        assert sorted(set(again)) == [200, 401] and again.count(200) == 1, again
        winner = digests[again.index(200)]
        assert before <= {winner}, "who was told that it has joined has"
        assert [one["digest"] for one in agents(server)] == [winner]


def test_terms_of_seconds__the_agent_renews_over_the_server_that_is_there_and_goes_on(tmp_path: Path) -> None:
    """Its token and certificates end after three seconds each; the first of its two servers is not there."""
    data, root, log = tmp_path / "data", tmp_path / "agent", tmp_path / "log"
    argv = [sys.executable, "-m", "tests.integration.serve.short_terms", str(data), "3"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as serving:
        assert serving.stdout is not None
        ready, _, _ = select.select([serving.stdout], [], [], 30)
        url = serving.stdout.readline().decode().strip() if ready else ""
        asks = ["--server", url, "--token-file", str(data / "token"), "--ca-file", str(data / "tls" / "ca.pem")]

        def remit(*words: str) -> str:
            return subprocess.run([REMIT, *words, *asks], capture_output=True, text=True, check=False, timeout=60).stdout

        file = tmp_path / "join.token"
        file.write_text(remit("token", "create", "--role", "join", "--node", "n1"))
        words = ["--server", "https://127.0.0.1:1", "--server", url, "--data", str(root), "--name", "n1", "--join", str(file)]
        with log.open("wb") as out:
            agent = subprocess.Popen(
                [REMIT, "agent", *words, "--sandbox", "none", "--ca-file", str(data / "tls" / "ca.pem")], stdout=out, stderr=out
            )
        try:
            calling, seen, spans = root / "run/joined/calling.pem", set[str](), set[str]()
            until = time.monotonic() + 40
            while len(seen) < 4:
                assert time.monotonic() < until, log.read_text()
                if calling.exists() and (root / "run/joined/term").exists():
                    seen.add(key_digest(calling.read_bytes()[calling.read_bytes().index(b"-----BEGIN CERT") :]))
                    spans.add((root / "run/joined/term").read_text())
                time.sleep(0.1)
            assert len(spans) >= 4
            until = time.monotonic() + 20
            while "n1" not in (said := remit("get", "nodes", "-o", "name")):
                assert time.monotonic() < until, (said, log.read_text())
            token = next(
                one for one in json.loads(remit("token", "list", "-o", "json"))["items"] if one["spec"]["role"] == "agent"
            )
            assert token["spec"]["expires"] == json.loads((root / "run/joined/term").read_text())["ends"]
            assert agent.poll() is None and "not renewed" not in log.read_text()
            serving.kill()  # nobody renews it now: it says so, and lives on
            until = time.monotonic() + 20
            while "not renewed" not in log.read_text():
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            assert agent.poll() is None
        finally:
            agent.terminate()
            agent.wait(20)
            subprocess.run([REMIT, "keeper", "--end", "--data", str(root)], capture_output=True, check=False)
            serving.kill()
