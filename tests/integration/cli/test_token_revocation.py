"""Revoking a token ends its open streams. A real control plane over TLS."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from remit.agent.credentials import Credentials
from remit.client.http_link import HttpLink
from remit.model.wire.agent_messages import AssignmentsRequest
from remit.world.interfaces import LinkError
from tests.integration.cli.up_process import REMIT, Ups, alive

TALKS = """
apiVersion: remit/v1
kind: Workload
metadata: {name: talks, tenant: default}
spec:
  type: service
  template:
    command: [sh, -c, "while :; do echo still here; sleep 0.2; done"]
    resources: {cpu: 10m, memory: 16Mi}
    stopGrace: 1s
"""
ENDS_S_MAX = 60.0


@pytest.fixture
def ups(tmp_path: Path) -> Iterator[Ups]:
    found = Ups(tmp_path)
    try:
        yield found
    finally:
        found.end()


def sleeping(seconds: str) -> list[int]:
    lines = [file for file in Path("/proc").glob("[0-9]*/cmdline") if _args(file)[:2] == [b"sleep", seconds.encode()]]
    return [int(file.parent.name) for file in lines]


def _args(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().split(b"\0")
    except OSError:
        return []


def lasted_s(ended: Callable[[], bool], since: float) -> float:
    while not ended():
        assert time.monotonic() - since < ENDS_S_MAX, "it has not ended"
        time.sleep(0.05)
    return time.monotonic() - since


@pytest.mark.smoke
def test_revoked_token_ends_watch_logs_and_exec_of_a_user_and_streams_of_an_agent(ups: Ups, tmp_path: Path) -> None:
    """A03."""
    ups.start("--tls", "--nodes", "1")
    ups.until("the context is stored", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    ups.ready(1)
    assert ups.remit("apply", "-f", "-", "--wait", stdin=TALKS).returncode == 0
    created = ups.remit("token", "create", "--role", "member", "--for", "ann", "--name", "ann")
    (tmp_path / "ann").write_text(created.stdout)
    _check_user(ups, ["--token-file", str(tmp_path / "ann")], tmp_path)
    asyncio.run(_check_agent(ups))


def _check_user(ups: Ups, token_option: list[str], tmp_path: Path) -> None:
    open_: dict[str, subprocess.Popen[bytes]] = {}
    for name, args in {
        "watch": ["get", "replicas", "-w"],
        "logs": ["logs", "-f", "talks"],
        "exec": ["exec", "talks", *token_option, "--", "sleep", "36191"],
    }.items():
        with (tmp_path / name).open("wb") as out:
            options = [] if name == "exec" else token_option
            open_[name] = subprocess.Popen(
                [REMIT, *args, *options], env=ups.env, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
    try:
        ups.until("the log is streamed", lambda: (tmp_path / "logs").read_bytes().count(b"still here") > 3)
        ups.until("the watch has started", lambda: b"talks" in (tmp_path / "watch").read_bytes())
        ups.until("the session runs", lambda: bool(sleeping("36191")))
        assert ups.remit("token", "revoke", "ann").returncode == 0
        since = time.monotonic()
        lasted = {name: lasted_s(lambda process=process: process.poll() is not None, since) for name, process in open_.items()}  # type: ignore[misc]
        assert all(process.returncode for process in open_.values()), "each must exit with an error"
        assert lasted_s(lambda: not sleeping("36191"), since) < ENDS_S_MAX, "the command of the session must be stopped"
        assert max(lasted.values()) < ENDS_S_MAX, lasted
        assert "revoked" in (tmp_path / "watch").read_text() + (tmp_path / "logs").read_text()
        assert "was revoked" in (tmp_path / "exec").read_text(), "the error must name the reason"
    finally:
        for process in open_.values():
            process.kill()
            process.wait()


async def _check_agent(ups: Ups) -> None:
    credentials = Credentials(ups.data / "agent" / "run" / "joined")
    url = (ups.data / "server" / "url").read_text().strip()
    node, serves = ups.items("nodes")[0]["metadata"]["name"], ups.serving()
    link = HttpLink({"server": url}, credentials.token, trust=credentials.client_tls)
    try:
        async with aclosing(link.stream("server", msgspec.json.encode(AssignmentsRequest((node,))))) as lines:
            assert b"whole" in await anext(lines)
            name = next(process["metadata"]["name"] for process in ups.items("tokens") if process["spec"]["role"] == "agent")
            assert ups.remit("token", "revoke", name).returncode == 0
            with pytest.raises((LinkError, StopAsyncIteration)):
                async with asyncio.timeout(ENDS_S_MAX):
                    while True:
                        await anext(lines)
        with pytest.raises(LinkError, match="revoked"):
            await link.request("server", b"{}")
    finally:
        await link.close()
    ups.until("its node is no longer ready", lambda: ups.items("nodes")[0]["status"]["health"] != "ready")
    (_, pid), *_ = serves.values()
    assert alive(pid), "its replicas must continue to run"
    assert "revoked" in ups.remit("audit", "-o", "json").stdout, "the refusal must be in the audit log"
    ups.until("the agent logs the reason", lambda: "was revoked" in (ups.data / "agent.log").read_text())
    assert "less and less often" in (ups.data / "agent.log").read_text()
