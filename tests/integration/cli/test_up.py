"""`remit up` and `remit down` with real processes: kills, restarts and cleanup."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.up_process import SERVICE, Ups, alive


@pytest.fixture
def ups(tmp_path: Path) -> Iterator[Ups]:
    items_ = Ups(tmp_path)
    try:
        yield items_
    finally:
        items_.end()


def test_killed_up_resumes_with_the_same_processes_and_down_stops_all(ups: Ups) -> None:
    """F36, F20: the whole control plane is killed and resumes from its store; replicas continue to run."""
    first = ups.start("--nodes", "2")
    ups.until("the context is stored", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    ups.ready(2)
    assert ups.remit("apply", "-f", "-", "--wait", stdin=SERVICE).returncode == 0
    ups.until("both serve", lambda: len(ups.serving()) == 2)
    before = ups.serving()

    second = ups.remit("up", "--data", str(ups.data))
    assert second.returncode == 1
    assert f"process {first.pid}" in second.stderr
    assert "remit down" in second.stderr

    first.kill()
    first.wait()
    assert all(alive(pid) for _, pid in before.values())
    assert ups.remit("get", "nodes").returncode == 1
    ups.start("--nodes", "2")
    ups.until("the server responds again", lambda: ups.remit("get", "nodes").returncode == 0)
    ups.until("the nodes report again", lambda: len(ups.serving()) == 2)
    assert ups.serving() == before

    pids = [ups.pid("agent"), ups.pid("keeper"), *(pid for _, pid in before.values())]
    message = ups.remit("down", "--data", str(ups.data))
    assert message.returncode == 0, message.stderr
    assert "stopped" in message.stdout
    assert not [pid for pid in pids if alive(pid)]
    assert ups.remit("down", "--data", str(ups.data)).stdout.startswith("nothing is running")


def test_killed_agent_is_restarted_and_adopts_replicas(ups: Ups) -> None:
    """F36."""
    ups.start("--nodes", "1")
    ups.until("the context is stored", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    ups.ready(1)
    assert ups.remit("apply", "-f", "-", "--wait", stdin=SERVICE).returncode == 0
    ups.until("both serve", lambda: len(ups.serving()) == 2)
    before, agent = ups.serving(), ups.pid("agent")
    os.kill(agent, signal.SIGKILL)
    ups.until("another agent runs", lambda: ups.pid("agent") != agent and alive(ups.pid("agent")))
    ups.until("it reports both", lambda: len(ups.serving()) == 2)
    assert ups.serving() == before


def test_down_stops_replicas_left_by_killed_up_agent_and_keeper(ups: Ups) -> None:
    first = ups.start("--nodes", "1")
    ups.until("the context is stored", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    ups.ready(1)
    assert ups.remit("apply", "-f", "-", "--wait", stdin=SERVICE).returncode == 0
    ups.until("both serve", lambda: len(ups.serving()) == 2)
    work = [pid for _, pid in ups.serving().values()]
    first.kill()
    first.wait()
    for name in ("agent", "keeper"):
        os.kill(ups.pid(name), signal.SIGKILL)
    assert all(alive(pid) for pid in work)
    message = ups.remit("down", "--data", str(ups.data))
    assert message.returncode == 0, message.stderr
    assert not [pid for pid in work if alive(pid)]


def test_scheduler_and_controllers_reach_the_authority_without_http(ups: Ups) -> None:
    """Without nodes no agent runs, so that any call of the component routes would come from a scheduler or a controller."""
    ups.start("--nodes", "0")
    ups.until("the context is there", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    assert ups.remit("apply", "-f", "-", stdin=SERVICE).returncode == 0

    def reasons() -> list[str]:
        conditions = [item["status"].get("conditions", []) for item in ups.items("workloads")]
        return [item["reason"] for items in conditions for item in items if item["type"] == "Scheduled"]

    ups.until(
        "controllers report that the scheduler found no node", lambda: bool(reasons()) and len(ups.items("replicas")) == 2
    )
    assert not (ups.data / "server" / "tokens").exists()
    routes = [line for line in ups.metrics().splitlines() if line.startswith("remit_http_requests_total")]
    assert any('route="apply"' in line for line in routes), routes
    assert not [line for line in routes if 'route="ask"' in line or 'route="follow"' in line or 'route="claim"' in line]


@pytest.mark.smoke
def test_regions_are_assigned_to_nodes_in_turn(ups: Ups) -> None:
    ups.start("--nodes", "4", "--regions", "eu-central,eu-west")
    ups.until("the context is stored", lambda: Path(ups.env["REMIT_CONFIG"]).exists())
    ups.ready(4)
    regions = [item["spec"]["region"] for item in ups.items("nodes")]
    assert sorted(regions) == ["eu-central", "eu-central", "eu-west", "eu-west"]
    assert {item["metadata"]["name"] for item in ups.items("regions")} == {"eu-central", "eu-west"}


def test_too_long_socket_path_is_refused_at_once(ups: Ups) -> None:
    result = ups.remit("up", "--data", str(ups.data / ("deep" * 30)))
    assert result.returncode == 1
    assert "shorter directory with --data" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--listen", "0.0.0.0:7420"), "listen on 127.0.0.1"),
        (("--listen", "nowhere"), "127.0.0.1:7420"),
        (("--heartbeat-interval", "1ms"), "out of range"),
        (("--regions", ","), "--regions"),
        (("--nodes", "-1"), "--nodes"),
    ],
)
def test_invalid_option_is_refused_with_a_fix(ups: Ups, args: tuple[str, ...], message: str) -> None:
    result = ups.remit("up", "--data", str(ups.data), *args)
    assert result.returncode in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
