"""Shared limits on request bodies and agent connections: what one tenant leaves for others."""

from __future__ import annotations

import asyncio

import pytest

from remit.model.identity import Principal
from remit.serve.http import app as module
from remit.serve.http.connection_limits import SharedLimit
from tests.unit.serve.auth.user_tokens import ANN, BOB, create_users
from tests.unit.serve.in_memory_server import TOKENS, api

ADMIN, AGENT = Principal("root", "root", "admin"), Principal("agent", "agent", "agent", nodes=frozenset({"n1"}))


def of(tenant: str, name: str = "ann") -> Principal:
    return Principal(name, name, "member", tenant)


def acquire_all(shares: SharedLimit, principal: Principal, at_once: int = 1) -> int:
    count = 0
    while shares.acquire(principal, at_once):
        count += at_once
    return count


def test_tenant_gets_quarter_regardless_of_user() -> None:
    shares = SharedLimit(1_000)
    assert acquire_all(shares, of("a")) == 250
    assert acquire_all(shares, of("a", "other")) == 0
    assert acquire_all(shares, of("b"), 100) == 200
    shares.release(of("a", "other"), 3)
    assert acquire_all(shares, of("a")) == 3


def test_small_tenants_admins_and_components_are_admitted_under_load() -> None:
    shares = SharedLimit(1_000)
    assert [acquire_all(shares, of(name)) for name in "abcde"] == [250, 250, 250, 15, 15]
    assert acquire_all(shares, ADMIN) == 220
    assert acquire_all(shares, of("f")) == 0
    assert acquire_all(shares, AGENT) == 1_000
    assert shares.held == 2_000


def test_refused_acquire_holds_nothing() -> None:
    shares = SharedLimit(100)
    assert not shares.acquire(of("a"), 26)
    assert shares.held == 0
    assert shares.acquire(of("a"), 25)
    shares.release(of("a"), 25)
    assert shares.held == 0


def test_bodies_of_one_tenant_leave_room_for_others_and_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODIES_BYTES_MAX", 8_000)

    async def main() -> None:
        async with api() as client:
            await create_users(client)
            assert client.app.bodies.acquire(of("acme"), 2_000)  # as bodies that never end
            refused = await client.ask("POST", "/v1/plan", b" " * 100, token=ANN)
            assert (refused.status, refused.json["code"]) == (429, "overloaded")
            assert (await client.ask("POST", "/v1/plan", b" " * 100, token=BOB)).status != 429
            assert client.app.bodies.acquire(ADMIN, 6_000)
            assert (await client.ask("POST", "/v1/plan", b" " * 100, token=BOB)).status == 429
            assert (await client.ask("POST", "/v1/ask", b"{}", token=TOKENS["agent"])).status != 429

    asyncio.run(main())
