"""Faults while deciding, rows over the limits, malformed operations, damaged rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from remit.commitment.authority import Authority
from remit.commitment.decide import decide
from remit.commitment.draft import Draft
from remit.commitment.outcomes import batch_key, decode_batch
from remit.model.claims import (
    Abandon,
    Accepted,
    Acquire,
    Actor,
    Apply,
    Bind,
    Code,
    Delete,
    Evidence,
    Move,
    Operation,
    OperationID,
    RecordDecision,
    RecordEvent,
    Refused,
)
from remit.model.kinds import Config, DataSpec, Placement
from remit.model.metadata import Metadata, RecordMetadata
from remit.model.objects import encode
from remit.model.records import DecisionSpec, EventSpec, Grant, Lease, LeaseSpec
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.store import chain
from remit.store.protocol import VALUE_BYTES_MAX, Corrupt
from tests.properties.authority_world import OPERATOR, USER, Scope, node, populated_scope, run, scope_test, workload
from tests.unit.commitment.authority_fixture import T1, bind, commit_transitions, slice_of, spawn_replicas


def test_exception_in_one_claim_is_fault_and_batch_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    def tripping(draft: Draft, operation: Operation) -> int | Refused:
        if isinstance(operation.claim, Apply) and operation.claim.thing.metadata.name == "poison":
            decide(draft, operation)
            raise LookupError("half way through")
        return decide(draft, operation)

    monkeypatch.setattr("remit.commitment.batch.decide", tripping)

    @scope_test
    async def run_test(scope: Scope) -> None:
        names = ("before", "poison", "after")
        operations = [await scope.operation(USER, Apply(workload(name))) for name in names]
        verdicts = await scope.send(operations)
        assert isinstance(verdicts, list)
        assert [type(verdict) for verdict in verdicts] == [Accepted, Refused, Accepted]
        assert isinstance(verdicts[1], Refused) and verdicts[1].code is Code.INTERNAL_ERROR
        assert "half way through" in verdicts[1].detail
        assert "workload/t1/poison" not in await scope.dump(), "its partial changes are dropped"
        assert (await scope.send([operations[1]])) == [verdicts[1]], "a retry gets the same answer, without a crash"
        await scope.must(USER, Apply(workload("later")))

    run_test()


def test_oversized_row_is_fault_of_its_own_operation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims are bounded by their own size; together they may still exceed one row."""
    monkeypatch.setattr("remit.store.keys.VALUE_BYTES_MAX", 60_000)

    @scope_test
    async def run_test(scope: Scope) -> None:
        large = Config(metadata=Metadata(name="large", tenant="t1"), spec=DataSpec(data={"k": "x" * 64_000}))
        operations = [await scope.operation(USER, Apply(obj)) for obj in (workload("a"), large, workload("b"))]
        verdicts = await scope.send(operations)
        assert isinstance(verdicts, list)
        assert [type(verdict) for verdict in verdicts] == [Accepted, Refused, Accepted]
        assert isinstance(verdicts[1], Refused) and verdicts[1].code is Code.INTERNAL_ERROR
        await scope.must(USER, Apply(workload("later")))

    run_test()


@scope_test
async def test_cordoned_or_draining_node_refuses_bind(scope: Scope) -> None:
    there, late = await spawn_replicas(scope, "w", 2)
    await bind(scope, there)
    for closed in (node("n1", gpus=2, unschedulable=True), node("n1", gpus=2, draining=True)):
        await scope.must(OPERATOR, Apply(closed))
        assert await scope.refused(scope.actors["scheduler"], Bind(late, scope.at(late), "n1", T1)) is Code.DRAINING
    assert scope.phase(there) == "bound", "bound replicas stay until they are evicted"


@scope_test
async def test_bind_outside_requested_region_zone_or_pool_is_refused(scope: Scope) -> None:
    for name, wish in {
        "r": Placement(regions=("mars",)),
        "z": Placement(zones=("no",)),
        "p": Placement(pools=("big",)),
    }.items():
        (key,) = await spawn_replicas(scope, name, placement=wish)
        assert await scope.refused(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1)) is Code.PLACE


@scope_test
async def test_held_lease_is_refused_until_it_expires(scope: Scope) -> None:
    rival = Actor("rival", Role.SCHEDULER)
    claim = Acquire("scheduler", Duration(60_000))
    assert await scope.refused(rival, claim) is Code.LEASE_HELD
    scope.clock.at_ms += 3_600_000 * 24
    epoch = scope.actors["scheduler"].epoch
    assert (await scope.must(rival, claim)) == [epoch + 1]


# -- rows that a later authority could not read ---------------------------------------------------------------------------

UNREADABLE = RecordDecision("d", "t1", DecisionSpec(replicas={"w-0": ""}, attempt=-1))
"""Only a caller in this process can pass it, by reference; the decoder would refuse it."""


@scope_test
async def test_undecodable_row_is_fault_and_batch_is_decided(scope: Scope) -> None:
    run_test = RecordEvent("e", EventSpec(regarding="node/n1", count=-1))
    claims = (Apply(workload("a")), UNREADABLE, Apply(workload("b")), run_test, Apply(workload("c")))
    operations = [await scope.operation(USER, claim) for claim in claims]
    verdicts = await scope.send(operations)
    assert isinstance(verdicts, list)
    assert [type(verdict) for verdict in verdicts] == [Accepted, Refused, Accepted, Refused, Accepted]
    for verdict, name in zip(verdicts[1::2], ("decision/t1/d", "event/e"), strict=True):
        assert isinstance(verdict, Refused) and verdict.code is Code.INTERNAL_ERROR
        assert verdict.detail.startswith(f"{name} cannot be stored: the row would not decode: ")
    assert await scope.send(operations) == verdicts, "each has one outcome in any batch"
    await scope.take_over()
    assert await scope.send(operations) == verdicts
    assert {key for key in await scope.dump() if key.startswith(("decision/", "event/"))} == set()


@pytest.mark.parametrize("where", ["claim", "id", "trace", "lease"])
def test_invalid_unicode_is_refused_and_batch_is_decided(where: str) -> None:
    @scope_test
    async def run_test(scope: Scope) -> None:
        before, good, after = [await scope.operation(USER, Delete("Secret", "none", "t1")) for _ in range(3)]
        bad = {
            "claim": replace(good, claim=Delete("Secret", "\ud800", "t1")),
            "id": replace(good, id=OperationID(good.id + "\ud800")),
            "trace": replace(good, trace="\ud800"),
            "lease": replace(good, actor=replace(USER, lease="\ud800")),
        }[where]
        verdicts = await scope.lead.ask([before, bad, after])
        assert isinstance(verdicts, list)
        codes = [verdict.code for verdict in verdicts if isinstance(verdict, Refused)]
        assert codes == [Code.NOT_FOUND, Code.INVALID, Code.NOT_FOUND]
        await scope.must(USER, Apply(workload("later")))

    run_test()


@pytest.mark.parametrize("where", ["id", "claim", "trace", "name"])
def test_oversized_text_is_truncated_in_audit(where: str) -> None:
    """The refusal quotes it: at full length the store would refuse that row too, again and again."""

    @scope_test
    async def run_test(scope: Scope) -> None:
        long = "x" * (VALUE_BYTES_MAX + 1)
        good = await scope.operation(USER, Delete("Secret", "none", "t1"))
        bad, code = {
            "id": (replace(good, id=OperationID(long)), Code.INVALID),
            "claim": (replace(good, claim=Delete("Secret", long, "t1")), Code.LIMIT),
            "trace": (replace(good, trace=long), Code.NOT_FOUND),
            "name": (replace(good, actor=replace(USER, name=long)), Code.LIMIT),
        }[where]
        calls = scope.store.calls
        with limit_store_calls(scope, 10):
            verdicts = await scope.lead.ask([bad])
        assert isinstance(verdicts, list) and isinstance(verdicts[0], Refused)
        assert verdicts[0].code is code and scope.store.calls - calls < 10
        entry = decode_batch(await last_batch(scope)).entries[-1]
        cut = {"id": entry.id, "claim": entry.subject, "trace": entry.trace, "name": entry.actor}[where]
        assert len(cut) < 1024 and cut.endswith("…"), "the audit still records it"
        await scope.must(USER, Apply(workload("later")))

    run_test()


async def last_batch(scope: Scope) -> bytes:
    row = await scope.store.inner.get(batch_key(scope.lead.authority.head.sequence))
    assert row is not None
    return row.value


@contextmanager
def limit_store_calls(scope: Scope, calls: int) -> Iterator[None]:
    """Crash after too many calls of the store: an authority in an endless loop never yields to a timer."""
    scope.store.strikes = {scope.store.calls + calls: "before"}
    yield
    scope.store.strikes = {}


def test_several_faulty_claims_are_refused_and_rest_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fail while being decided, one when its row is written; the others must not be applied twice."""
    monkeypatch.setattr("remit.store.keys.VALUE_BYTES_MAX", 60_000)

    def tripping(draft: Draft, operation: Operation) -> int | Refused:
        if isinstance(operation.claim, Apply) and operation.claim.thing.metadata.name.startswith("poison"):
            raise LookupError("our own")
        return decide(draft, operation)

    monkeypatch.setattr("remit.commitment.batch.decide", tripping)

    @scope_test
    async def run_test(scope: Scope) -> None:
        large = Config(metadata=Metadata(name="large", tenant="t1"), spec=DataSpec(data={"k": "x" * 64_000}))
        objects = (workload("a"), workload("poison"), workload("poison-too"), large, workload("b"))
        verdicts = await scope.ask(USER, *(Apply(obj) for obj in objects))
        assert [verdict.code if isinstance(verdict, Refused) else None for verdict in verdicts] == [
            None,
            *[Code.INTERNAL_ERROR] * 3,
            None,
        ]
        assert isinstance(verdicts[1], Refused) and verdicts[1].detail == "LookupError: our own"
        assert len(scope.checker.versions["workload/t1/a"]) == 1

    run_test()


@scope_test
async def test_claim_outside_role_is_refused(scope: Scope) -> None:
    """A role without claims, a kind the role may not declare, a lease of another role."""
    assert await scope.refused(Actor("a1", Role.AUTHORITY), Apply(workload("w"))) is Code.ROLE
    assert await scope.refused(USER, Apply(node("n3"))) is Code.ROLE
    assert await scope.refused(scope.actors["repair"], Acquire("scheduler/x", Duration(60_000))) is Code.NOT_OWNER


# -- malformed operations passed by reference -----------------------------------------------------------------------------

GOOD = Delete("Secret", "none", "t1")


def malformed_operations(good: Operation) -> dict[str, Any]:
    looped: dict[str, Any] = {}
    looped["itself"] = looped
    return {
        "none": None,
        "number": 7,
        "id": replace(good, id=None),
        "claim": replace(good, claim=None),
        "claim of wrong type": replace(good, claim=good.actor),
        "actor": replace(good, actor=None),
        "name": replace(good, actor=replace(USER, name=7)),
        "role": replace(good, actor=replace(USER, role=None)),
        "role as text": replace(good, actor=replace(USER, role="user")),
        "epoch": replace(good, actor=replace(USER, epoch="x")),
        "fractional epoch": replace(good, actor=replace(USER, epoch=1.5)),
        "evidence": replace(good, evidence=None),
        "revision": replace(good, evidence=Evidence(1.5, 0)),  # type: ignore[arg-type]
        "age": replace(good, evidence=Evidence(0, None)),  # type: ignore[arg-type]
        "trace": replace(good, trace=None),
        "subject": replace(good, claim=RecordEvent(["a"], EventSpec(regarding="x"))),  # type: ignore[arg-type]
        "target": replace(good, claim=Abandon(7)),  # type: ignore[arg-type]
        "thing": replace(good, claim=Apply(None)),  # type: ignore[arg-type]
        "kind": replace(good, claim=Delete([], "x")),  # type: ignore[arg-type]
        "unencodable event": replace(good, claim=RecordEvent("e", object())),  # type: ignore[arg-type]
        "cyclic event": replace(good, claim=RecordEvent("e", looped)),  # type: ignore[arg-type]
    }


@scope_test
async def test_malformed_operation_is_refused_without_harm(scope: Scope) -> None:
    good = await scope.operation(USER, GOOD)
    for name, bad in malformed_operations(good).items():
        other = await scope.operation(USER, Apply(workload(name.replace(" ", "-"))))
        refused, accepted = await scope.lead.authority.submit([bad, other])
        assert isinstance(refused, Refused) and refused.code is Code.INVALID, (name, refused)
        assert isinstance(accepted, Accepted), name
    await scope.take_over()
    assert await scope.refused(USER, GOOD) is Code.NOT_FOUND, "a later authority can read everything"


@scope_test
async def test_lease_may_be_named_by_role_enum(scope: Scope) -> None:
    """A role is a subclass of `str`."""
    actor = Actor("x", Role.AUTOSCALER)
    scope.clock.at_ms += 24 * 3_600_000
    (epoch,) = await scope.must(actor, Acquire(Role.AUTOSCALER, Duration(60_000)))
    await scope.must(Actor("x", Role.AUTOSCALER, Role.AUTOSCALER, epoch), RecordEvent("e", EventSpec(regarding="node/n1")))
    await scope.take_over()
    assert scope.row("lease/autoscaler")["spec"]["holder"] == "x"


@scope_test
async def test_result_that_is_not_text_is_not_written(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w", type_="job")
    await bind(scope, key)
    await commit_transitions(scope, key, "start", "run")
    agent = scope.actors["agent/n1"]
    claim = Move(key, scope.at(key), "finish", 1, ["done"])  # type: ignore[arg-type]
    (verdict,) = await scope.ask(agent, claim)
    assert isinstance(verdict, Refused), verdict
    await scope.take_over()
    assert scope.phase(key) == "running"


@pytest.mark.parametrize("change", [lambda operations: operations.append(operations[0]), lambda operations: operations.clear()])
def test_list_changed_after_submit_is_answered_unchanged(change: Any) -> None:
    @scope_test
    async def run_test(scope: Scope) -> None:
        operations = [await scope.operation(USER, GOOD) for _ in range(300)]
        submission = asyncio.create_task(scope.lead.authority.submit(operations))
        for _ in range(4):
            await asyncio.sleep(0)
        change(operations)
        assert len(await asyncio.wait_for(submission, 5)) == 300
        assert scope.lead.authority._queue.count == 0

    run_test()


@scope_test
async def test_generator_of_operations_is_accepted(scope: Scope) -> None:
    operations = [await scope.operation(USER, GOOD) for _ in range(3)]
    generator: Any = (operation for operation in operations)
    assert len(await scope.lead.authority.submit(generator)) == 3


def cycle() -> list[tuple[str, bytes]]:
    made = [
        Grant(metadata=RecordMetadata(name=name), spec=slice_of("1", "x", parent=other))
        for name, other in (("a", "b"), ("b", "a"))
    ]
    return [(f"grant/{grant.metadata.name}", encode(grant)) for grant in made]


DAMAGE = {
    "does not decode": [("node/n1", b"{")],
    "contains a Lease": [("replica/t1/w-0", encode(Lease(metadata=RecordMetadata(name="w-0"), spec=LeaseSpec())))],
    "form a cycle of parents": cycle(),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_row_ends_takeover_with_cure(message: str) -> None:
    """F13: no authority leads on books that cannot be read."""

    async def run_test() -> None:
        scope = await populated_scope(checked=False)
        place = await chain.read_position(scope.store)
        assert place is not None
        puts = DAMAGE[message]
        await scope.store.inner.commit(chain.batch(place, chain.advance(place.head, puts, ()), puts))
        with pytest.raises(Corrupt, match=rf"{message}.*restore a backup"):
            await Authority.take_over(scope.store, scope="r1", holder="b", clock=scope.clock, ids=scope.ids)
        await scope.close()

    run(run_test())


def test_undecodable_batch_ends_takeover_with_cure() -> None:
    """F13"""

    async def run_test() -> None:
        scope = await populated_scope(checked=False)
        await scope.must(USER, Apply(workload("w")))
        place = await chain.read_position(scope.store)
        assert place is not None
        puts = [(batch_key(place.head.sequence), b"{}")]
        await scope.store.inner.commit(chain.batch(place, chain.advance(place.head, puts, ()), puts))
        with pytest.raises(Corrupt, match=r"does not decode: .* restore a backup"):
            await Authority.take_over(scope.store, scope="r1", holder="b", clock=scope.clock, ids=scope.ids)
        await scope.close()

    run(run_test())
