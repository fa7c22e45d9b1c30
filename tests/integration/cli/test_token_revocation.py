"""Does everything end that is being told to whoever's token is revoked, over TLS? A real control plane, and open streams."""

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
from tests.integration.cli.test_up import REMIT, Ups, alive

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
    lines = [file for file in Path("/proc").glob("[0-9]*/cmdline") if _words(file)[:2] == [b"sleep", seconds.encode()]]
    return [int(file.parent.name) for file in lines]


def _words(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().split(b"\0")
    except OSError:
        return []


def lasted_s(ended: Callable[[], bool], since: float) -> float:
    while not ended():
        assert time.monotonic() - since < ENDS_S_MAX, "it goes on"
        time.sleep(0.05)
    return time.monotonic() - since


@pytest.mark.smoke
def test_revoked__a_persons_watch_log_and_session_end__then_an_agents_orders_and_its_node_is_silent(
    ups: Ups, tmp_path: Path
) -> None:
    """A03."""
    ups.start("--tls", "--nodes", "1")
    ups.until("the context is there", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    ups.ready(1)
    assert ups.remit("apply", "-f", "-", "--wait", stdin=TALKS).returncode == 0
    made = ups.remit("token", "create", "--role", "member", "--for", "ann", "--name", "ann")
    (tmp_path / "ann").write_text(made.stdout)
    _a_person(ups, ["--token-file", str(tmp_path / "ann")], tmp_path)
    asyncio.run(_an_agent(ups))


def _a_person(ups: Ups, as_ann: list[str], tmp_path: Path) -> None:
    open_: dict[str, subprocess.Popen[bytes]] = {}
    for name, words in {
        "watch": ["get", "replicas", "-w"],
        "logs": ["logs", "-f", "talks"],
        "exec": ["exec", "talks", *as_ann, "--", "sleep", "36191"],
    }.items():
        with (tmp_path / name).open("wb") as out:
            more = [] if name == "exec" else as_ann
            open_[name] = subprocess.Popen(
                [REMIT, *words, *more], env=ups.env, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
    try:
        ups.until("the log is followed", lambda: (tmp_path / "logs").read_bytes().count(b"still here") > 3)
        ups.until("it is watched", lambda: b"talks" in (tmp_path / "watch").read_bytes())
        ups.until("the session runs", lambda: bool(sleeping("36191")))
        assert ups.remit("token", "revoke", "ann").returncode == 0
        since = time.monotonic()
        lasted = {name: lasted_s(lambda one=one: one.poll() is not None, since) for name, one in open_.items()}  # type: ignore[misc]
        assert all(one.returncode for one in open_.values()), "each says that it did not end by itself"
        assert lasted_s(lambda: not sleeping("36191"), since) < ENDS_S_MAX, "and what it ran beside the replica is gone"
        assert max(lasted.values()) < ENDS_S_MAX, lasted
        assert "revoked" in (tmp_path / "watch").read_text() + (tmp_path / "logs").read_text()
        assert "was revoked" in (tmp_path / "exec").read_text(), "and not that nobody answers"
    finally:
        for one in open_.values():
            one.kill()
            one.wait()


async def _an_agent(ups: Ups) -> None:
    here = Credentials(ups.data / "agent" / "run" / "joined")
    url = (ups.data / "server" / "url").read_text().strip()
    node, serves = ups.items("nodes")[0]["metadata"]["name"], ups.serving()
    link = HttpLink({"server": url}, here.token, trust=here.client_tls)
    try:
        async with aclosing(link.stream("server", msgspec.json.encode(AssignmentsRequest((node,))))) as lines:
            assert b"whole" in await anext(lines)
            name = next(one["metadata"]["name"] for one in ups.items("tokens") if one["spec"]["role"] == "agent")
            assert ups.remit("token", "revoke", name).returncode == 0
            with pytest.raises((LinkError, StopAsyncIteration)):
                async with asyncio.timeout(ENDS_S_MAX):
                    while True:
                        await anext(lines)
        with pytest.raises(LinkError, match="revoked"):
            await link.request("server", b"{}")
    finally:
        await link.close()
    ups.until("its node is as any that is silent", lambda: ups.items("nodes")[0]["status"]["health"] != "ready")
    (_, pid), *_ = serves.values()
    assert alive(pid), "and its work goes on"
    assert "revoked" in ups.remit("audit", "-o", "json").stdout, "who was turned away is written down"
    ups.until("the agent says why it does nothing", lambda: "was revoked" in (ups.data / "agent.log").read_text())
    assert "less and less often" in (ups.data / "agent.log").read_text()
