"""In-process endpoint: same serialisation boundary as the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from remit.client.endpoint import InProcessEndpoint, NotLeader, OutcomeUnknown, Overloaded
from remit.model.claims import Accepted, Bind, Operation, OperationID, Verdict
from tests.unit.client.fake_authority import ACTOR, BIND, FakeAuthority
from tests.unit.world.virtual_world import run_virtually, virtual_world


def operation(claim: Any = BIND) -> Operation:
    return Operation(OperationID("inc1.16.x"), ACTOR, claim)


def test_operations_are_copied_not_shared() -> None:
    async def scene() -> None:
        authority = FakeAuthority(virtual_world())
        devices = {"gpu-0": 1000}
        sent = operation(Bind("r", 1, "n", "g", devices))
        assert await InProcessEndpoint(authority).submit([sent]) == [Accepted(1)]
        (arrived,) = authority.submitted
        assert arrived == sent
        assert arrived is not sent
        devices["gpu-0"] = 0
        assert isinstance(arrived.claim, Bind)
        assert arrived.claim.devices == {"gpu-0": 1000}

    run_virtually(scene())


def test_by_reference_endpoint_skips_serialisation() -> None:
    async def scene() -> None:
        authority = FakeAuthority(virtual_world())
        sent = operation()
        endpoint = InProcessEndpoint(authority, by_reference=True)
        await endpoint.submit([sent])
        assert authority.submitted[0] is sent
        assert await endpoint.renew(ACTOR)
        assert (await endpoint.status()).incarnation == "inc1"

    run_virtually(scene())


def test_status_and_renewal_are_forwarded() -> None:
    async def scene() -> None:
        authority = FakeAuthority(virtual_world())
        endpoint = InProcessEndpoint(authority)
        assert await endpoint.status() == await authority.status()
        assert await endpoint.renew(ACTOR) is True
        authority.held = False
        assert await endpoint.renew(ACTOR) is False

    run_virtually(scene())


def test_unserialisable_operation_or_verdict_fails() -> None:
    class InvalidVerdicts(FakeAuthority):
        async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
            return [object()]  # type: ignore[list-item]

    async def scene() -> None:
        too_long = operation(Bind("r" * 513, 1, "n", "g"))
        with pytest.raises(msgspec.ValidationError, match="replica"):
            await InProcessEndpoint(FakeAuthority(virtual_world())).submit([too_long])
        with pytest.raises(TypeError):
            await InProcessEndpoint(InvalidVerdicts(virtual_world())).submit([operation()])

    run_virtually(scene())


@pytest.mark.parametrize("failure", [OutcomeUnknown("lost"), NotLeader("b"), Overloaded(5)])
def test_endpoint_errors_pass_unchanged(failure: Exception) -> None:
    class Failing(FakeAuthority):
        async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
            raise failure

    async def scene() -> None:
        with pytest.raises(type(failure)) as caught:
            await InProcessEndpoint(Failing(virtual_world())).submit([operation()])
        assert caught.value is failure

    run_virtually(scene())


def test_endpoint_error_messages_name_next_step() -> None:
    assert str(NotLeader("b")) == "not the active authority; try b"
    assert str(NotLeader()) == "not the active authority; try another endpoint"
    assert Overloaded(-5).retry_after_ms == 0
    assert str(Overloaded(5)) == "overloaded; retry after 5 ms"


def test_endpoint_errors_carry_reason_when_known() -> None:
    assert [OutcomeUnknown().reason, NotLeader().reason, NotLeader("b").reason, Overloaded().reason, Overloaded(5).reason] == [
        ""
    ] * 5
    assert OutcomeUnknown("the line is dead").reason == str(OutcomeUnknown("the line is dead")) == "the line is dead"
    redirect = NotLeader("b", "deposed by b")
    assert (redirect.hint, redirect.reason) == ("b", "deposed by b")
    assert str(redirect) == "not the active authority (deposed by b); try b"
    full = Overloaded(5, reason="the disk is full")
    assert (full.retry_after_ms, full.reason) == (5, "the disk is full")
    assert str(full) == "overloaded (the disk is full); retry after 5 ms"
