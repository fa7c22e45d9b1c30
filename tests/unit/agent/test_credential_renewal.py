"""Is an agent's name renewed well before it ends, over any of its servers, without haste when that fails? In virtual time."""

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


class Calendar(VirtualClock):
    """Whose wall clock goes as well."""

    def wall(self) -> str:
        now = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(milliseconds=self.now_ms())
        return now.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


class Asked:
    """Servers, of which some answer. `at_s`: when they were asked, and which."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.down: set[str] = set()
        self.refuses = False
        self.at_s: list[tuple[float, str]] = []

    async def __call__(self, url: str, path: str, *_: Any) -> JoinResponse:
        self.at_s.append((self.world.clock.now_ms() / 1000, url))
        if url in self.down:
            raise NotSent(f"nobody is at {url}", "start it")
        if self.refuses:
            raise NotJoined("the token was revoked", "join again", status=401)
        return JoinResponse("agent-1", expiry_after(self.world.clock.wall(), TERM_MS))


def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, *, down: set[str], refuses: bool = False) -> Any:
    """What was asked, and what was told, in so many days of an agent without TLS."""
    told: list[str] = []

    async def life() -> Asked:
        world = replace(virtual_world(), clock=Calendar())
        credentials, asked = Credentials(tmp_path / "joined"), Asked(world)
        asked.down, asked.refuses = down, refuses
        monkeypatch.setattr(credentials_module, "_request", asked)
        said = JoinResponse("agent-1", expiry_after(world.clock.wall(), TERM_MS))
        credentials.save(world.disk, key=b"", response=said, valid_from=world.clock.wall(), token="remit_mine")
        task = asyncio.ensure_future(
            credentials_module.run_renewals(
                credentials, ("http://a:1", "http://b:1"), world, lambda _: pytest.fail("no TLS"), told.append
            )
        )
        await world.clock.sleep_ms(int(days * DAY_S * 1000))
        task.cancel()
        return asked

    return run_virtually(life()), told


def test_a_token_without_tls_is_renewed_when_a_third_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, told = lives(tmp_path, monkeypatch, 20, down=set())
    days = [round(at_s / DAY_S, 1) for at_s, _ in asked.at_s]
    assert days == [6.0, 12.0, 18.0] and not told


def test_the_first_server_is_gone__the_second_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, told = lives(tmp_path, monkeypatch, 7, down={"http://a:1"})
    assert [url for _, url in asked.at_s] == ["http://a:1", "http://b:1"] and not told


@pytest.mark.parametrize(("down", "refuses"), [({"http://a:1", "http://b:1"}, False), (set(), True)])
def test_no_server_renews_it__it_asks_again_at_growing_pauses_and_says_so(
    down: set[str], refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, told = lives(tmp_path, monkeypatch, 6.5, down=down, refuses=refuses)
    at_s = [at for at, url in asked.at_s if url == "http://a:1"]
    gaps = [later - one for one, later in pairwise(at_s)]
    assert 60 < len(at_s) < 200, "half a day, every five to ten minutes"
    assert gaps[0] <= 2 and 200 < max(gaps) <= 600
    assert len({round(gap) for gap in gaps[-20:]}) > 5, "no two agents come back in step"
    assert len(told) == len(at_s) and "they expire in 3.0 days" in told[0]


def test_its_name_has_run_out__it_says_what_to_do_and_asks_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, told = lives(tmp_path, monkeypatch, 9.5, down={"http://a:1", "http://b:1"})
    at_s = [at for at, url in asked.at_s if url == "http://a:1" and at >= 9 * DAY_S]
    over = [line for line in told if "they have expired" in line]
    assert 0 <= len(at_s) - len(over) <= 2 and all("remit token create --role join" in line for line in over)
    assert min(later - one for one, later in pairwise(at_s)) > 200, "nothing that it could still hurry for"
    assert not any("remit token create" in line for line in told if line not in over)


def test_nothing_says_when_it_ends__it_is_renewed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever joined before terms were written down."""

    async def life() -> float:
        world = replace(virtual_world(), clock=Calendar())
        credentials = Credentials(tmp_path / "joined")
        credentials.save(world.disk, key=b"", response=JoinResponse("", ""), token="remit_mine")
        monkeypatch.setattr(credentials_module, "_request", Asked(world))
        assert credentials_module.remaining_validity(credentials, world).renew_in_s == 0
        await credentials_module.renew(credentials, ("http://a:1",), world)
        return credentials_module.remaining_validity(credentials, world).renew_in_s

    assert 5 * DAY_S < run_virtually(life()) <= 6 * DAY_S


def test_who_is_going_to_join_is_on_the_disk_before_it_asks__and_is_the_same_after_a_kill(tmp_path: Path) -> None:
    """F03, F20."""
    world, place = virtual_world(), tmp_path / "joined"
    first = Credentials(place).pending_identity(world, uses_tls=True)
    assert b"PRIVATE KEY" in first.key and (place / "asking").stat().st_mode & 0o777 == 0o600
    assert Credentials(place).pending_identity(world, uses_tls=True) == first
    assert not Credentials(place).is_joined
    assert Credentials(place).pending_identity(world, uses_tls=True, replace=True).token != first.token
    assert Credentials(place).pending_identity(world, uses_tls=False).key == b"", "it has no use for a key there"
    Credentials(place).save(world.disk, key=b"", response=JoinResponse("a", "2999-01-01T00:00:00Z"), token="remit_mine")
    assert Credentials(place).is_joined and not (place / "asking").exists()
