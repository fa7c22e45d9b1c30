"""Secret material is fetched from another server when one fails, sends nonsense or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from remit.client.rpc import MATERIAL_TIMEOUT_MS, MaterialSource, material_source
from remit.model.claims import Actor
from remit.model.roles import Role
from remit.model.wire.agent_messages import SecretMaterial, SecretMaterialRequest
from remit.serve.auth.secrets import encode_material
from remit.world.interfaces import Clock, LinkError, NotSent, ReplyLost
from tests.unit.world.virtual_world import run_virtually, virtual_world

REQUEST = SecretMaterialRequest(Actor("a", Role.AGENT, "agent/n1", 1), "replica/t/a-0", "u1", 1)
MATERIAL = SecretMaterial(configs={"c": {"a": "b"}})


class FakeServers:
    """A link. Each server answers, fails, sends nonsense, or hangs."""

    def __init__(self, **servers: Callable[[], bytes] | None) -> None:
        self._servers, self.requested = servers, list[str]()

    async def request(self, to: str, body: bytes, /) -> bytes:
        self.requested.append(to)
        assert msgspec.json.decode(body, type=SecretMaterialRequest) == REQUEST
        answer = self._servers[to]
        if answer is None:
            await asyncio.Event().wait()
            raise AssertionError
        return answer()


def unreached() -> bytes:
    raise NotSent("no server", "")


def run_with_source(servers: Any, scenario: Callable[[MaterialSource, Clock], Any]) -> None:
    async def run_test() -> None:
        clock = virtual_world().clock
        await scenario(material_source(servers, ("one", "two"), clock), clock)

    run_virtually(run_test())


@pytest.mark.parametrize(("one", "failure"), [(unreached, NotSent), (lambda: b"{", ReplyLost), (None, ReplyLost)])
def test_failed_server_is_not_tried_first_again(one: Callable[[], bytes] | None, failure: type[LinkError]) -> None:
    servers = FakeServers(one=one, two=lambda: encode_material(MATERIAL))

    async def scenario(source: MaterialSource, clock: Clock) -> None:
        began_ms = clock.now_ms()
        with pytest.raises(failure):
            await source(REQUEST)
        assert clock.now_ms() - began_ms <= MATERIAL_TIMEOUT_MS
        assert await source(REQUEST) == await source(REQUEST) == MATERIAL

    run_with_source(servers, scenario)
    assert servers.requested == ["one", "two", "two"]


def test_timed_out_request_names_server_and_duration() -> None:
    async def scenario(source: MaterialSource, clock: Clock) -> None:
        with pytest.raises(ReplyLost, match="one has not answered for 10 s"):
            await source(REQUEST)

    run_with_source(FakeServers(one=None, two=None), scenario)
