"""What if our own code trips, or a row is too large for the store? One operation is refused; the authority goes on."""

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
    Role,
)
from remit.model.kinds import Placement
from remit.model.metadata import Metadata, RecordMetadata
from remit.model.objects import encode
from remit.model.records import DecisionSpec, EventSpec, Grant, Lease, LeaseSpec
from remit.model.resources import Duration
from remit.model.secrets import Config, DataSpec
from remit.store import chain
from remit.store.protocol import VALUE_BYTES_MAX, Corrupt
from tests.properties.authority_world import OPERATOR, USER, Scope, furnished, node, run, story, workload
from tests.unit.commitment.authority_fixture import T1, bind, move, slice_of, spawned


def test_a_claim_that_trips_a_check_is_refused_and_the_rest_of_its_batch_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    def tripping(draft: Draft, operation: Operation) -> int | Refused:
        if isinstance(operation.claim, Apply) and operation.claim.thing.metadata.name == "poison":
            decide(draft, operation)
            raise LookupError("half way through")
        return decide(draft, operation)

    monkeypatch.setattr("remit.commitment.batch.decide", tripping)

    @story
    async def told(scope: Scope) -> None:
        names = ("before", "poison", "after")
        operations = [await scope.operation(USER, Apply(workload(name))) for name in names]
        verdicts = await scope.send(operations)
        assert isinstance(verdicts, list)
        assert [type(verdict) for verdict in verdicts] == [Accepted, Refused, Accepted]
        assert isinstance(verdicts[1], Refused) and verdicts[1].code is Code.INTERNAL_ERROR
        assert "half way through" in verdicts[1].detail
        assert "workload/t1/poison" not in await scope.dump(), "nothing of it is kept, though it was half written"
        assert (await scope.send([operations[1]])) == [verdicts[1]], "a retry gets the same answer, and kills nobody"
        await scope.must(USER, Apply(workload("later")))

    told()


def test_a_row_that_the_store_will_not_take_costs_only_its_own_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims are bounded by their own size; what they add up to may still be too much for one row."""
    monkeypatch.setattr("remit.store.keys.VALUE_BYTES_MAX", 60_000)

    @story
    async def told(scope: Scope) -> None:
        large = Config(metadata=Metadata(name="large", tenant="t1"), spec=DataSpec(data={"k": "x" * 64_000}))
        operations = [await scope.operation(USER, Apply(thing)) for thing in (workload("a"), large, workload("b"))]
        verdicts = await scope.send(operations)
        assert isinstance(verdicts, list)
        assert [type(verdict) for verdict in verdicts] == [Accepted, Refused, Accepted]
        assert isinstance(verdicts[1], Refused) and verdicts[1].code is Code.INTERNAL_ERROR
        await scope.must(USER, Apply(workload("later")))

    told()


@story
async def test_a_cordoned_or_draining_node_takes_nothing_new(scope: Scope) -> None:
    there, late = await spawned(scope, "w", 2)
    await bind(scope, there)
    for closed in (node("n1", gpus=2, unschedulable=True), node("n1", gpus=2, draining=True)):
        await scope.must(OPERATOR, Apply(closed))
        assert await scope.refused(scope.actors["scheduler"], Bind(late, scope.at(late), "n1", T1)) is Code.DRAINING
    assert scope.phase(there) == "bound", "what is there stays until somebody drains it"


@story
async def test_a_workload_is_bound_only_where_it_wants_to_be(scope: Scope) -> None:
    for name, wish in {
        "r": Placement(regions=("mars",)),
        "z": Placement(zones=("no",)),
        "p": Placement(pools=("big",)),
    }.items():
        (key,) = await spawned(scope, name, placement=wish)
        assert await scope.refused(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1)) is Code.PLACE


@story
async def test_a_lease_that_is_held_is_not_given_to_another_until_it_lapses(scope: Scope) -> None:
    rival = Actor("rival", Role.SCHEDULER)
    claim = Acquire("scheduler", Duration(60_000))
    assert await scope.refused(rival, claim) is Code.LEASE_HELD
    scope.clock.at_ms += 3_600_000 * 24
    epoch = scope.actors["scheduler"].epoch
    assert (await scope.must(rival, claim)) == [epoch + 1]


# -- nothing is written that a successor could not read -----------------------------------------------------------------------

UNREADABLE = RecordDecision("d", "t1", DecisionSpec(replicas={"w-0": ""}, attempt=-1))
"""As somebody in this process could hand it over by reference; on a wire it would not have been decoded."""


@story
async def test_what_a_successor_could_not_read_is_refused_and_the_rest_of_its_batch_is_decided(scope: Scope) -> None:
    told = RecordEvent("e", EventSpec(regarding="node/n1", count=-1))
    claims = (Apply(workload("a")), UNREADABLE, Apply(workload("b")), told, Apply(workload("c")))
    operations = [await scope.operation(USER, claim) for claim in claims]
    verdicts = await scope.send(operations)
    assert isinstance(verdicts, list)
    assert [type(verdict) for verdict in verdicts] == [Accepted, Refused, Accepted, Refused, Accepted]
    for verdict, name in zip(verdicts[1::2], ("decision/t1/d", "event/e"), strict=True):
        assert isinstance(verdict, Refused) and verdict.code is Code.INTERNAL_ERROR
        assert verdict.detail.startswith(f"{name} cannot be stored: the row would not decode: ")
    assert await scope.send(operations) == verdicts, "each has one outcome, whatever the batch it was decided in"
    await scope.take_over()
    assert await scope.send(operations) == verdicts
    assert {key for key in await scope.dump() if key.startswith(("decision/", "event/"))} == set()


@pytest.mark.parametrize("where", ["claim", "id", "trace", "lease"])
def test_text_that_is_not_unicode_is_refused_and_the_rest_of_its_batch_is_decided(where: str) -> None:
    @story
    async def told(scope: Scope) -> None:
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

    told()


@pytest.mark.parametrize("where", ["id", "claim", "trace", "name"])
def test_words_that_no_row_could_keep_are_cut_in_the_audit_and_do_not_stop_the_authority(where: str) -> None:
    """The refusal quotes what it refuses: uncut, it would be refused by the store as well, again and again."""

    @story
    async def told(scope: Scope) -> None:
        long = "x" * (VALUE_BYTES_MAX + 1)
        good = await scope.operation(USER, Delete("Secret", "none", "t1"))
        bad, code = {
            "id": (replace(good, id=OperationID(long)), Code.INVALID),
            "claim": (replace(good, claim=Delete("Secret", long, "t1")), Code.LIMIT),
            "trace": (replace(good, trace=long), Code.NOT_FOUND),
            "name": (replace(good, actor=replace(USER, name=long)), Code.LIMIT),
        }[where]
        calls = scope.store.calls
        with bounded(scope, 10):
            verdicts = await scope.lead.ask([bad])
        assert isinstance(verdicts, list) and isinstance(verdicts[0], Refused)
        assert verdicts[0].code is code and scope.store.calls - calls < 10
        entry = decode_batch(await last_batch(scope)).entries[-1]
        cut = {"id": entry.id, "claim": entry.subject, "trace": entry.trace, "name": entry.actor}[where]
        assert len(cut) < 1024 and cut.endswith("…"), "who did it is still on record"
        await scope.must(USER, Apply(workload("later")))

    told()


async def last_batch(scope: Scope) -> bytes:
    row = await scope.store.inner.get(batch_key(scope.lead.authority.head.sequence))
    assert row is not None
    return row.value


@contextmanager
def bounded(scope: Scope, calls: int) -> Iterator[None]:
    """The process dies at a call of the store too many: an authority that goes round in a circle lets no timer ring."""
    scope.store.strikes = {scope.store.calls + calls: "before"}
    yield
    scope.store.strikes = {}


def test_claims_that_trip_are_each_refused_and_the_rest_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trip while they are decided, one when its row is written; the others are not done twice over that."""
    monkeypatch.setattr("remit.store.keys.VALUE_BYTES_MAX", 60_000)

    def tripping(draft: Draft, operation: Operation) -> int | Refused:
        if isinstance(operation.claim, Apply) and operation.claim.thing.metadata.name.startswith("poison"):
            raise LookupError("our own")
        return decide(draft, operation)

    monkeypatch.setattr("remit.commitment.batch.decide", tripping)

    @story
    async def told(scope: Scope) -> None:
        large = Config(metadata=Metadata(name="large", tenant="t1"), spec=DataSpec(data={"k": "x" * 64_000}))
        things = (workload("a"), workload("poison"), workload("poison-too"), large, workload("b"))
        verdicts = await scope.ask(USER, *(Apply(thing) for thing in things))
        assert [verdict.code if isinstance(verdict, Refused) else None for verdict in verdicts] == [
            None,
            *[Code.INTERNAL_ERROR] * 3,
            None,
        ]
        assert isinstance(verdicts[1], Refused) and verdicts[1].detail == "LookupError: our own"
        assert len(scope.checker.versions["workload/t1/a"]) == 1

    told()


@story
async def test_nobody_is_told_that_something_is_done_which_its_own_role_may_not_ask(scope: Scope) -> None:
    """A claim that no room decides, a role that nobody has, a kind that is not declared."""
    assert await scope.refused(Actor("a1", Role.AUTHORITY), Apply(workload("w"))) is Code.ROLE
    assert await scope.refused(USER, Apply(node("n3"))) is Code.ROLE
    assert await scope.refused(scope.actors["repair"], Acquire("scheduler/x", Duration(60_000))) is Code.NOT_OWNER


# -- what was given by reference, and is no operation -------------------------------------------------------------------------

GOOD = Delete("Secret", "none", "t1")


def ill_formed(good: Operation) -> dict[str, Any]:
    looped: dict[str, Any] = {}
    looped["itself"] = looped
    return {
        "nothing": None,
        "a number": 7,
        "id": replace(good, id=None),
        "claim": replace(good, claim=None),
        "a claim of no kind": replace(good, claim=good.actor),
        "actor": replace(good, actor=None),
        "name": replace(good, actor=replace(USER, name=7)),
        "role": replace(good, actor=replace(USER, role=None)),
        "a word for a role": replace(good, actor=replace(USER, role="user")),
        "epoch": replace(good, actor=replace(USER, epoch="x")),
        "half an epoch": replace(good, actor=replace(USER, epoch=1.5)),
        "evidence": replace(good, evidence=None),
        "revision": replace(good, evidence=Evidence(1.5, 0)),  # type: ignore[arg-type]
        "age": replace(good, evidence=Evidence(0, None)),  # type: ignore[arg-type]
        "trace": replace(good, trace=None),
        "subject": replace(good, claim=RecordEvent(["a"], EventSpec(regarding="x"))),  # type: ignore[arg-type]
        "target": replace(good, claim=Abandon(7)),  # type: ignore[arg-type]
        "thing": replace(good, claim=Apply(None)),  # type: ignore[arg-type]
        "kind": replace(good, claim=Delete([], "x")),  # type: ignore[arg-type]
        "what cannot be written": replace(good, claim=RecordEvent("e", object())),  # type: ignore[arg-type]
        "what has no end": replace(good, claim=RecordEvent("e", looped)),  # type: ignore[arg-type]
    }


@story
async def test_what_is_no_operation_is_refused_and_harms_nobody(scope: Scope) -> None:
    good = await scope.operation(USER, GOOD)
    for name, bad in ill_formed(good).items():
        other = await scope.operation(USER, Apply(workload(name.replace(" ", "-"))))
        refused, accepted = await scope.lead.authority.submit([bad, other])
        assert isinstance(refused, Refused) and refused.code is Code.INVALID, (name, refused)
        assert isinstance(accepted, Accepted), name
    await scope.take_over()
    assert await scope.refused(USER, GOOD) is Code.NOT_FOUND, "a successor can read everything"


@story
async def test_a_role_may_name_the_lease_of_its_own_name(scope: Scope) -> None:
    """It is a text, and more than that."""
    actor = Actor("x", Role.AUTOSCALER)
    scope.clock.at_ms += 24 * 3_600_000
    (epoch,) = await scope.must(actor, Acquire(Role.AUTOSCALER, Duration(60_000)))
    await scope.must(Actor("x", Role.AUTOSCALER, Role.AUTOSCALER, epoch), RecordEvent("e", EventSpec(regarding="node/n1")))
    await scope.take_over()


@story
async def test_a_result_that_is_no_text_is_not_written(scope: Scope) -> None:
    (key,) = await spawned(scope, "w", type_="job")
    await bind(scope, key)
    await move(scope, key, "start", "run")
    agent = scope.actors["agent/n1"]
    claim = Move(key, scope.at(key), "finish", 1, ["done"])  # type: ignore[arg-type]
    (verdict,) = await scope.ask(agent, claim)
    assert isinstance(verdict, Refused), verdict
    await scope.take_over()
    assert scope.phase(key) == "running"


@pytest.mark.parametrize("change", [lambda asked: asked.append(asked[0]), lambda asked: asked.clear()])
def test_a_list_that_is_changed_after_asking_is_answered_as_it_was(change: Any) -> None:
    @story
    async def told(scope: Scope) -> None:
        asked = [await scope.operation(USER, GOOD) for _ in range(300)]
        asking = asyncio.create_task(scope.lead.authority.submit(asked))
        for _ in range(4):
            await asyncio.sleep(0)
        change(asked)
        assert len(await asyncio.wait_for(asking, 5)) == 300
        assert scope.lead.authority._queue.count == 0

    told()


@story
async def test_whatever_can_be_gone_through_may_be_asked(scope: Scope) -> None:
    operations = [await scope.operation(USER, GOOD) for _ in range(3)]
    asked: Any = (operation for operation in operations)
    assert len(await scope.lead.authority.submit(asked)) == 3


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


@pytest.mark.parametrize("told", DAMAGE)
def test_rows_that_make_no_sense_are_told_with_a_cure(told: str) -> None:
    """F13: nobody leads on books that cannot be read."""

    async def tell() -> None:
        scope = await furnished(checked=False)
        place = await chain.read_position(scope.store)
        assert place is not None
        puts = DAMAGE[told]
        await scope.store.inner.commit(chain.batch(place, chain.advance(place.head, puts, ()), puts))
        with pytest.raises(Corrupt, match=rf"{told}.*restore a backup"):
            await Authority.take_over(scope.store, scope="r1", holder="b", clock=scope.clock, ids=scope.ids)
        await scope.close()

    run(tell())


def test_a_batch_that_does_not_decode_is_told_with_a_cure() -> None:
    """F13"""

    async def tell() -> None:
        scope = await furnished(checked=False)
        await scope.must(USER, Apply(workload("w")))
        place = await chain.read_position(scope.store)
        assert place is not None
        puts = [(batch_key(place.head.sequence), b"{}")]
        await scope.store.inner.commit(chain.batch(place, chain.advance(place.head, puts, ()), puts))
        with pytest.raises(Corrupt, match=r"does not decode: .* restore a backup"):
            await Authority.take_over(scope.store, scope="r1", holder="b", clock=scope.clock, ids=scope.ids)
        await scope.close()

    run(tell())
