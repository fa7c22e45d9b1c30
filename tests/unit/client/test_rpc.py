"""Endpoint RPC: operations, verdicts and errors keep their exact meaning over a link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest

from remit.client.endpoint import AuthorityStatus, Endpoint, EndpointError, NotLeader, OutcomeUnknown, Overloaded
from remit.client.rpc import EndpointService, EndpointStub, UnreadableRequest
from remit.model.claims import Accepted, Actor, Bind, Code, Operation, OperationID, Refused, Verdict
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeState
from remit.world.interfaces import LinkError, NotSent, ReplyLost
from tests.unit.client.fake_authority import ACTOR, BIND, FakeAuthority
from tests.unit.client.fake_link import Wire
from tests.unit.world.virtual_world import run_virtually, virtual_world


def connected(endpoint: Endpoint) -> tuple[EndpointStub, Wire]:
    wire = Wire(EndpointService(endpoint))
    return EndpointStub(wire, "eu"), wire


def operation(name: str = "inc1.16.x") -> Operation:
    return Operation(OperationID(name), ACTOR, BIND)


@dataclass
class FailingEndpoint:
    failure: Exception

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        raise self.failure

    async def status(self) -> AuthorityStatus:
        raise self.failure

    async def renew(self, actor: Actor, /) -> bool:
        raise self.failure

    async def heartbeat(self, beats: Sequence[NodeHeartbeat], /) -> Sequence[bool]:
        raise self.failure

    async def heartbeat_ages(self) -> HeartbeatReport:
        raise self.failure

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        raise self.failure


def test_operations_and_verdicts_arrive_unchanged() -> None:
    async def scene() -> None:
        authority = FakeAuthority(virtual_world())
        remote, wire = connected(authority)
        sent = [
            operation(),
            Operation(OperationID("inc1.16.y"), ACTOR, Bind("r", 1, "n", "g", {"gpu-0": 500}), trace="t"),
        ]
        assert list(await remote.submit(sent)) == [Accepted(1), Accepted(2)]
        assert authority.submitted == sent
        assert all(arrived is not one for arrived, one in zip(authority.submitted, sent, strict=True))
        assert await remote.status() == await authority.status()
        assert ((await remote.status()).boot, (await remote.status()).now_ms) == ("far-boot", authority.now_ms())
        assert await remote.renew(ACTOR) is True
        authority.held = False
        assert await remote.renew(ACTOR) is False
        assert {to for to, _ in wire.sent} == {"eu"}

    run_virtually(scene())


def test_empty_submit_is_not_a_status_request() -> None:
    async def scene() -> None:
        authority = FakeAuthority(virtual_world())
        remote, _ = connected(authority)
        assert list(await remote.submit([])) == []
        assert authority.statuses == 0

    run_virtually(scene())


@pytest.mark.parametrize(
    "failure",
    [
        OutcomeUnknown(),
        OutcomeUnknown("lost"),
        NotLeader(),
        NotLeader("b", "deposed"),
        Overloaded(),
        Overloaded(7, "the disk is full"),
    ],
)
def test_endpoint_error_arrives_unchanged(failure: EndpointError) -> None:
    async def scene() -> None:
        remote, _ = connected(FailingEndpoint(failure))
        for call in (remote.submit([operation()]), remote.status(), remote.renew(ACTOR)):
            with pytest.raises(type(failure)) as caught:
                await call
            assert type(caught.value) is type(failure)
            assert (str(caught.value), vars(caught.value)) == (str(failure), vars(failure))

    run_virtually(scene())


@pytest.mark.parametrize(
    ("failure", "meaning"),
    [(NotSent("no server at eu", "start it"), NotLeader), (ReplyLost("the line broke", "ask again"), OutcomeUnknown)],
)
def test_unsent_call_is_not_leader_and_lost_reply_is_outcome_unknown(failure: LinkError, meaning: type[EndpointError]) -> None:
    async def scene() -> None:
        remote, wire = connected(FakeAuthority(virtual_world()))
        wire.failure = failure
        for call in (remote.submit([operation()]), remote.status(), remote.renew(ACTOR)):
            with pytest.raises(meaning) as caught:
                await call
            assert caught.value.reason == failure.cause

    run_virtually(scene())


@pytest.mark.parametrize("garbled", [b"", b"{", b"[]", b'{"verdicts": 3}', b"\xff\xfe", b'{"x":' * 100_000, b"{}"])
def test_undecodable_reply_is_outcome_unknown(garbled: bytes) -> None:
    """The operation was applied: any other error would let a caller apply it twice."""

    async def scene() -> None:
        authority = FakeAuthority(virtual_world())
        remote, wire = connected(authority)
        wire.garbled = garbled
        for call in (remote.submit([operation()]), remote.status(), remote.renew(ACTOR)):
            with pytest.raises(OutcomeUnknown):
                await call
        assert len(authority.applied) == 1

    run_virtually(scene())


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"null",
        b"{",
        b"\xff" * 9,
        b'{"renew":{"name":"\xff","role":"agent"}}',
        b'{"operations": [{}]}',
        b'{"renew": 7}',
        b'{"x":' * 100_000,
    ],
)
def test_malformed_request_is_refused_without_effect(hostile: bytes) -> None:
    async def scene() -> None:
        authority = FakeAuthority(virtual_world())
        wire = Wire(EndpointService(authority))
        wire.garbled = await wire.service.request(hostile)
        with pytest.raises(UnreadableRequest, match=r"the server cannot decode the request: .+ same version"):
            await EndpointStub(wire, "eu").renew(ACTOR)
        assert (authority.submitted, authority.statuses) == ([], 0)

    run_virtually(scene())


def test_unknown_field_of_later_version_is_ignored() -> None:
    async def scene() -> None:
        authority = FakeAuthority(virtual_world())
        assert b'"status"' in await EndpointService(authority).request(b'{"added": [1, {"a": 2}]}')

    run_virtually(scene())


def test_endpoint_bug_propagates_instead_of_reply() -> None:
    async def scene() -> None:
        remote, _ = connected(FailingEndpoint(ZeroDivisionError("ours")))
        with pytest.raises(ZeroDivisionError):
            await remote.status()

    run_virtually(scene())


def test_stream_call_is_refused_with_cure() -> None:
    async def scene() -> None:
        with pytest.raises(UnreadableRequest, match="not streams; send a request"):
            await anext(EndpointService(FakeAuthority(virtual_world())).stream(b""))

    run_virtually(scene())


def test_refusal_code_of_the_previous_version__read_as_its_present_name() -> None:
    verdict = msgspec.json.decode(b'{"verdict":"refused","code":"fault"}', type=Refused)
    assert verdict.code is Code.INTERNAL_ERROR
    assert msgspec.json.encode(verdict) == b'{"verdict":"refused","code":"internal_error"}'
