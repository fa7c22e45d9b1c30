"""What is left for others of what one has taken? Bodies that are read, and connections to agents, are counted so."""

from __future__ import annotations

import asyncio

import pytest

from remit.model.identity import Principal
from remit.serve.http import app as module
from remit.serve.http.connection_limits import SharedLimit
from tests.unit.serve.auth.test_access_control import ANN, BOB, people
from tests.unit.serve.in_memory_server import TOKENS, api

ADMIN, AGENT = Principal("root", "root", "admin"), Principal("agent", "agent", "agent", nodes=frozenset({"n1"}))


def of(tenant: str, name: str = "ann") -> Principal:
    return Principal(name, name, "member", tenant)


def taken(shares: SharedLimit, asker: Principal, at_once: int = 1) -> int:
    count = 0
    while shares.acquire(asker, at_once):
        count += at_once
    return count


def test_a_tenant_has_a_quarter_whoever_of_it_asks() -> None:
    shares = SharedLimit(1_000)
    assert taken(shares, of("a")) == 250
    assert taken(shares, of("a", "other")) == 0
    assert taken(shares, of("b"), 100) == 200
    shares.release(of("a", "other"), 3)
    assert taken(shares, of("a")) == 3


def test_whatever_tenants_hold__those_with_little_people_of_none_and_components_come_in() -> None:
    shares = SharedLimit(1_000)
    assert [taken(shares, of(name)) for name in "abcde"] == [250, 250, 250, 15, 15]
    assert taken(shares, ADMIN) == 220
    assert taken(shares, of("f")) == 0
    assert taken(shares, AGENT) == 1_000
    assert shares.held == 2_000


def test_what_was_not_taken_is_not_held() -> None:
    shares = SharedLimit(100)
    assert not shares.acquire(of("a"), 26)
    assert shares.held == 0
    assert shares.acquire(of("a"), 25)
    shares.release(of("a"), 25)
    assert shares.held == 0


def test_bodies_of_one_tenant_leave_room_for_others_and_for_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODIES_BYTES_MAX", 8_000)

    async def main() -> None:
        async with api() as asked:
            await people(asked)
            assert asked.app.bodies.acquire(of("acme"), 2_000)  # as bodies that do not come to their end
            refused = await asked.ask("POST", "/v1/plan", b" " * 100, token=ANN)
            assert (refused.status, refused.json["code"]) == (429, "overloaded")
            assert (await asked.ask("POST", "/v1/plan", b" " * 100, token=BOB)).status != 429
            assert asked.app.bodies.acquire(ADMIN, 6_000)
            assert (await asked.ask("POST", "/v1/plan", b" " * 100, token=BOB)).status == 429
            assert (await asked.ask("POST", "/v1/ask", b"{}", token=TOKENS["agent"])).status != 429

    asyncio.run(main())
