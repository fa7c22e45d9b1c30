"""What if our own code trips, or a row is too large for the store? One operation is refused; the authority goes on."""

from __future__ import annotations

import pytest

from remit.commitment.decide import decide
from remit.commitment.draft import Draft
from remit.model.claims import Accepted, Acquire, Actor, Apply, Bind, Code, Operation, Refused, Role
from remit.model.fields import Metadata
from remit.model.kinds import Config, DataSpec, Placement
from remit.model.resources import Duration
from tests.properties.machines import OPERATOR, USER, Scope, node, story, workload
from tests.unit.commitment.desk import T1, bind, spawned


def test_a_claim_that_trips_a_check_is_refused_and_the_rest_of_its_batch_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    def tripping(draft: Draft, operation: Operation) -> int | Refused:
        if isinstance(operation.claim, Apply) and operation.claim.thing.metadata.name == "poison":
            decide(draft, operation)
            raise LookupError("half way through")
        return decide(draft, operation)

    monkeypatch.setattr("remit.commitment.batching.decide", tripping)

    @story
    async def told(scope: Scope) -> None:
        names = ("before", "poison", "after")
        operations = [await scope.operation(USER, Apply(workload(name))) for name in names]
        verdicts = await scope.send(operations)
        assert isinstance(verdicts, list)
        assert [type(verdict) for verdict in verdicts] == [Accepted, Refused, Accepted]
        assert isinstance(verdicts[1], Refused) and verdicts[1].code is Code.FAULT
        assert "half way through" in verdicts[1].detail
        assert "workload/t1/poison" not in await scope.dump(), "nothing of it is kept, though it was half written"
        assert (await scope.send([operations[1]])) == [verdicts[1]], "a retry gets the same answer, and kills nobody"
        await scope.must(USER, Apply(workload("later")))

    told()


def test_a_row_that_the_store_will_not_take_costs_only_its_own_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims are bounded by their own size; what they add up to may still be too much for one row."""
    monkeypatch.setattr("remit.store.rules.VALUE_BYTES_MAX", 60_000)

    @story
    async def told(scope: Scope) -> None:
        large = Config(metadata=Metadata(name="large", tenant="t1"), spec=DataSpec(data={"k": "x" * 64_000}))
        operations = [await scope.operation(USER, Apply(thing)) for thing in (workload("a"), large, workload("b"))]
        verdicts = await scope.send(operations)
        assert isinstance(verdicts, list)
        assert [type(verdict) for verdict in verdicts] == [Accepted, Refused, Accepted]
        assert isinstance(verdicts[1], Refused) and verdicts[1].code is Code.FAULT
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
