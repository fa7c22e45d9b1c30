"""Renewal of an agent's credentials: time of renewal, other servers, backoff (virtual time)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from remit.agent import credentials as credentials_module
from remit.agent.credentials import Credentials, NotJoined
from remit.model.identity import JoinResponse, expiry_after
from remit.world.interfaces import NotSent, World
from tests.unit.world.virtual_world import VirtualClock, run_virtually, virtual_world

DAY_S = 86_400
TERM_MS = 9 * DAY_S * 1000


class WallClock(VirtualClock):
    """Virtual clock whose wall clock advances too."""

    def wall(self) -> str:
        now = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(milliseconds=self.now_ms())
        return now.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


class JoinServers:
    """Fake servers. `at_s` records the time and the server of each request."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.down: set[str] = set()
        self.refuses = False
        self.at_s: list[tuple[float, str]] = []

    async def __call__(self, url: str, path: str, *_: Any) -> JoinResponse:
        self.at_s.append((self.world.clock.now_ms() / 1000, url))
        if url in self.down:
            raise NotSent(f"no server at {url}", "start it")
        if self.refuses:
            raise NotJoined("the token was revoked", "join again", status=401)
        return JoinResponse("agent-1", expiry_after(self.world.clock.wall(), TERM_MS))


def run_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, *, down: set[str], refuses: bool = False) -> Any:
    """Return the requests and the log of an agent without TLS that ran for so many days."""
    logged: list[str] = []

    async def run() -> JoinServers:
        world = replace(virtual_world(), clock=WallClock())
        credentials, servers = Credentials(tmp_path / "joined"), JoinServers(world)
        servers.down, servers.refuses = down, refuses
        monkeypatch.setattr(credentials_module, "_request", servers)
        response = JoinResponse("agent-1", expiry_after(world.clock.wall(), TERM_MS))
        credentials.save(world.disk, key=b"", response=response, valid_from=world.clock.wall(), token="remit_mine")
        task = asyncio.ensure_future(
            credentials_module.run_renewals(
                credentials, ("http://a:1", "http://b:1"), world, lambda _: pytest.fail("no TLS"), logged.append
            )
        )
        await world.clock.sleep_ms(int(days * DAY_S * 1000))
        task.cancel()
        return servers

    return run_virtually(run()), logged


def test_token_without_tls_is_renewed_at_one_third_of_validity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers, logged = run_agent(tmp_path, monkeypatch, 20, down=set())
    days = [round(at_s / DAY_S, 1) for at_s, _ in servers.at_s]
    assert days == [6.0, 12.0, 18.0] and not logged


def test_renewal_falls_back_to_second_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers, logged = run_agent(tmp_path, monkeypatch, 7, down={"http://a:1"})
    assert [url for _, url in servers.at_s] == ["http://a:1", "http://b:1"] and not logged


@pytest.mark.parametrize(("down", "refuses"), [({"http://a:1", "http://b:1"}, False), (set(), True)])
def test_failing_renewal_is_retried_with_backoff_and_logged(
    down: set[str], refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, logged = run_agent(tmp_path, monkeypatch, 6.5, down=down, refuses=refuses)
    at_s = [at for at, url in servers.at_s if url == "http://a:1"]
    gaps = [later - earlier for earlier, later in pairwise(at_s)]
    assert 60 < len(at_s) < 200, "half a day, one request every five to ten minutes"
    assert gaps[0] <= 2 and 200 < max(gaps) <= 600
    assert len({round(gap) for gap in gaps[-20:]}) > 5, "pauses are jittered"
    assert len(logged) == len(at_s) and "they expire in 3.0 days" in logged[0]


def test_expired_credentials_log_rejoin_command_and_retry_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers, logged = run_agent(tmp_path, monkeypatch, 9.5, down={"http://a:1", "http://b:1"})
    at_s = [at for at, url in servers.at_s if url == "http://a:1" and at >= 9 * DAY_S]
    over = [line for line in logged if "they have expired" in line]
    assert 0 <= len(at_s) - len(over) <= 2 and all("remit token create --role join" in line for line in over)
    assert min(later - earlier for earlier, later in pairwise(at_s)) > 200, "no reason to hurry after the expiry"
    assert not any("remit token create" in line for line in logged if line not in over)


def test_credentials_without_expiry_are_renewed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent joined before expiry times were recorded."""

    async def run() -> float:
        world = replace(virtual_world(), clock=WallClock())
        credentials = Credentials(tmp_path / "joined")
        credentials.save(world.disk, key=b"", response=JoinResponse("", ""), token="remit_mine")
        monkeypatch.setattr(credentials_module, "_request", JoinServers(world))
        assert credentials_module.remaining_validity(credentials, world).renew_in_s == 0
        await credentials_module.renew(credentials, ("http://a:1",), world)
        return credentials_module.remaining_validity(credentials, world).renew_in_s

    assert 5 * DAY_S < run_virtually(run()) <= 6 * DAY_S


def test_pending_identity_is_on_disk_before_join_and_survives_kill(tmp_path: Path) -> None:
    """F03, F20."""
    world, place = virtual_world(), tmp_path / "joined"
    first = Credentials(place).pending_identity(world, uses_tls=True)
    assert b"PRIVATE KEY" in first.key and (place / "asking").stat().st_mode & 0o777 == 0o600
    assert Credentials(place).pending_identity(world, uses_tls=True) == first
    assert not Credentials(place).is_joined
    assert Credentials(place).pending_identity(world, uses_tls=True, replace=True).token != first.token
    assert Credentials(place).pending_identity(world, uses_tls=False).key == b"", "no key without TLS"
    Credentials(place).save(world.disk, key=b"", response=JoinResponse("a", "2999-01-01T00:00:00Z"), token="remit_mine")
    assert Credentials(place).is_joined and not (place / "asking").exists()
