"""Is what a copy reads asked for at another server where one fails, refuses to speak, or says nothing at all?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from remit.client.rpc import MATERIAL_TIMEOUT_MS, MaterialSource, material_source
from remit.model.claims import Actor, Role
from remit.model.wire.agent_messages import SecretMaterial, SecretMaterialRequest
from remit.serve.auth.secrets import encode_material
from remit.world.interfaces import Clock, LinkError, NotSent, ReplyLost
from tests.unit.world.virtual_world import run_virtually, virtual_world

ASKED = SecretMaterialRequest(Actor("a", Role.AGENT, "agent/n1", 1), "replica/t/a-0", "u1", 1)
FOUND = SecretMaterial(configs={"c": {"a": "b"}})


class Ways:
    """A link. Each server answers, fails, answers nonsense, or never does."""

    def __init__(self, **servers: Callable[[], bytes] | None) -> None:
        self._servers, self.asked = servers, list[str]()

    async def request(self, to: str, body: bytes, /) -> bytes:
        self.asked.append(to)
        assert msgspec.json.decode(body, type=SecretMaterialRequest) == ASKED
        answer = self._servers[to]
        if answer is None:
            await asyncio.Event().wait()
            raise AssertionError
        return answer()


def unreached() -> bytes:
    raise NotSent("nobody is there", "")


def told(ways: Any, story: Callable[[MaterialSource, Clock], Any]) -> None:
    async def whole() -> None:
        clock = virtual_world().clock
        await story(material_source(ways, ("one", "two"), clock), clock)

    run_virtually(whole())


@pytest.mark.parametrize(("one", "failure"), [(unreached, NotSent), (lambda: b"{", ReplyLost), (None, ReplyLost)])
def test_whoever_does_not_tell_is_not_asked_first_again(one: Callable[[], bytes] | None, failure: type[LinkError]) -> None:
    ways = Ways(one=one, two=lambda: encode_material(FOUND))

    async def story(source: MaterialSource, clock: Clock) -> None:
        began_ms = clock.now_ms()
        with pytest.raises(failure):
            await source(ASKED)
        assert clock.now_ms() - began_ms <= MATERIAL_TIMEOUT_MS
        assert await source(ASKED) == await source(ASKED) == FOUND

    told(ways, story)
    assert ways.asked == ["one", "two", "two"]


def test_a_question_that_was_lost_says_who_was_asked_and_for_how_long() -> None:
    async def story(source: MaterialSource, clock: Clock) -> None:
        with pytest.raises(ReplyLost, match="one has not answered for 10 s"):
            await source(ASKED)

    told(Ways(one=None, two=None), story)
