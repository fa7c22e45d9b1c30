"""Is an endpoint inside one process a real boundary?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from remit.client.endpoint import InProcess, Overloaded, Silence, Turned
from remit.model.claims import Accepted, Bind, Operation, OperationID, Verdict
from tests.unit.client.fake_authority import ACTOR, BIND, FakeAuthority
from tests.unit.world.virtual_world import run_virtually, virtual_world


def operation(claim: Any = BIND) -> Operation:
    return Operation(OperationID("inc1.16.x"), ACTOR, claim)


def test_nothing_is_shared_by_reference() -> None:
    async def scene() -> None:
        authority = FakeAuthority(virtual_world())
        devices = {"gpu-0": 1000}
        sent = operation(Bind("r", 1, "n", "g", devices))
        assert await InProcess(authority).ask([sent]) == [Accepted(1)]
        (arrived,) = authority.asked
        assert arrived == sent
        assert arrived is not sent
        devices["gpu-0"] = 0
        assert isinstance(arrived.claim, Bind)
        assert arrived.claim.devices == {"gpu-0": 1000}

    run_virtually(scene())


def test_by_reference_skips_the_bytes() -> None:
    async def scene() -> None:
        authority = FakeAuthority(virtual_world())
        sent = operation()
        endpoint = InProcess(authority, by_reference=True)
        await endpoint.ask([sent])
        assert authority.asked[0] is sent
        assert await endpoint.renew(ACTOR)
        assert (await endpoint.status()).incarnation == "inc1"

    run_virtually(scene())


def test_status_and_renewal_arrive_whole() -> None:
    async def scene() -> None:
        authority = FakeAuthority(virtual_world())
        endpoint = InProcess(authority)
        assert await endpoint.status() == await authority.status()
        assert await endpoint.renew(ACTOR) is True
        authority.held = False
        assert await endpoint.renew(ACTOR) is False

    run_virtually(scene())


def test_what_could_not_travel_fails_here() -> None:
    class Careless(FakeAuthority):
        async def ask(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
            return [object()]  # type: ignore[list-item]

    async def scene() -> None:
        too_long = operation(Bind("r" * 513, 1, "n", "g"))
        with pytest.raises(msgspec.ValidationError, match="replica"):
            await InProcess(FakeAuthority(virtual_world())).ask([too_long])
        with pytest.raises(TypeError):
            await InProcess(Careless(virtual_world())).ask([operation()])

    run_virtually(scene())


@pytest.mark.parametrize("failure", [Silence("lost"), Turned("b"), Overloaded(5)])
def test_failures_pass_as_they_are(failure: Exception) -> None:
    class Failing(FakeAuthority):
        async def ask(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
            raise failure

    async def scene() -> None:
        with pytest.raises(type(failure)) as caught:
            await InProcess(Failing(virtual_world())).ask([operation()])
        assert caught.value is failure

    run_virtually(scene())


def test_failures_say_what_to_do() -> None:
    assert str(Turned("b")) == "not the active authority; ask b"
    assert str(Turned()) == "not the active authority; ask another"
    assert Overloaded(-5).retry_after_ms == 0
    assert str(Overloaded(5)) == "overloaded; ask again after 5 ms"


def test_failures_carry_why_if_it_is_known() -> None:
    assert [Silence().why, Turned().why, Turned("b").why, Overloaded().why, Overloaded(5).why] == [""] * 5
    assert Silence("the line is dead").why == str(Silence("the line is dead")) == "the line is dead"
    turned = Turned("b", "deposed by b")
    assert (turned.hint, turned.why) == ("b", "deposed by b")
    assert str(turned) == "not the active authority (deposed by b); ask b"
    full = Overloaded(5, why="the disk is full")
    assert (full.retry_after_ms, full.why) == (5, "the disk is full")
    assert str(full) == "overloaded (the disk is full); ask again after 5 ms"
