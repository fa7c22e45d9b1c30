"""Which policy is in force, and for how long? Publication, rollback, and what comes on lease from the scope above."""

from __future__ import annotations

from remit.model.claims import Adopt, Apply, Bind, Code, Delete, Refused, Reserve, Rollback
from remit.model.fields import Metadata
from remit.model.kinds import Policy, PolicyAllow, PolicyRule, PolicySpec
from remit.model.resources import Duration
from tests.properties.machines import OPERATOR, USER, Scope, story
from tests.unit.commitment.desk import T1, bind, spawned

MINUTE = Duration(60_000)


def only_in(*zones: str) -> PolicySpec:
    return PolicySpec(rules=(PolicyRule(allow=PolicyAllow(zones=zones)),))


def policy(name: str, *zones: str) -> Policy:
    return Policy(metadata=Metadata(name=name), spec=only_in(*zones))


def adopted(scope: Scope, number: int, *zones: str, ttl: Duration = MINUTE, asked_ms: int | None = None) -> Adopt:
    return Adopt(number, {"p": only_in(*zones)}, ttl, scope.clock.at_ms if asked_ms is None else asked_ms)


@story
async def test_a_rollback_publishes_what_was_in_force_then_as_a_new_revision(scope: Scope) -> None:
    assert await scope.must(OPERATOR, Apply(policy("p", "a"))) == [1]
    await scope.must(OPERATOR, Apply(policy("p", "b")), Apply(policy("q", "a", "b")))
    (key, other) = await spawned(scope, "w", 2)
    scheduler = scope.actors["scheduler"]
    assert await scope.refused(scheduler, Bind(key, scope.at(key), "n1", T1)) is Code.POLICY
    assert await scope.must(OPERATOR, Rollback(1)) == [4]
    assert scope.books.keys("policy/") == ["policy/p"], "what was not there then is not there now"
    assert scope.row("policy/p")["spec"]["rules"][0]["allow"] == {"zones": ["a"]}
    await bind(scope, key)
    assert scope.row(key)["status"]["policy"] == 4
    assert await scope.must(OPERATOR, Rollback(3)) == [5], "and forward again"
    assert scope.books.keys("policy/") == ["policy/p", "policy/q"]
    await scope.take_over()
    assert await scope.refused(scheduler, Bind(other, scope.at(other), "n1", T1)) is Code.POLICY
    assert await scope.refused(OPERATOR, Rollback(9)) is Code.NOT_FOUND
    assert await scope.refused(USER, Rollback(1)) is Code.ROLE


@story
async def test_a_policy_that_is_deleted_binds_nobody_any_more(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(policy("p", "b")))
    (key,) = await spawned(scope, "w")
    assert await scope.refused(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1)) is Code.POLICY
    await scope.must(OPERATOR, Delete("Policy", "p"))
    await bind(scope, key)


@story
async def test_past_the_lease_on_its_policy_a_scope_places_nothing(scope: Scope) -> None:
    """What may have been withdrawn since cannot be checked against."""
    agent = scope.actors["policy"]
    await scope.must(agent, adopted(scope, 7, "a"))
    a, b, c = await spawned(scope, "w", 3)
    scheduler = scope.actors["scheduler"]
    scope.clock.at_ms += 59_999
    await bind(scope, a)
    await scope.must(scheduler, Reserve(b, scope.at(b), "n1", T1))
    scope.clock.at_ms += 1
    before = await scope.dump()
    for claim in (Bind(c, scope.at(c), "n1", T1), Reserve(c, scope.at(c), "n1", T1), Bind(b, scope.at(b), "n1", T1)):
        (verdict,) = await scope.ask(scheduler, claim)
        assert isinstance(verdict, Refused) and verdict.code is Code.POLICY_LAPSED
        assert verdict.detail == "policy revision 7 is past its lease here"
    assert await scope.dump() == before
    await scope.must(agent, adopted(scope, 7, "a"))
    await bind(scope, b)
    scope.clock.on = "boot-2"
    await scope.take_over()
    assert await scope.refused(scheduler, Bind(c, scope.at(c), "n1", T1)) is Code.POLICY_LAPSED, "whose clock is not this one"


@story
async def test_a_lease_on_a_policy_counts_from_when_it_was_asked_for_and_the_longer_stands(scope: Scope) -> None:
    agent = scope.actors["policy"]
    (key,) = await spawned(scope, "w")
    assert await scope.refused(agent, adopted(scope, 7, "a", asked_ms=scope.clock.at_ms + 1)) is Code.INVALID
    asked_ms = scope.clock.at_ms
    scope.clock.at_ms += 30_000
    await scope.must(agent, adopted(scope, 7, "a"), adopted(scope, 7, "a", asked_ms=asked_ms))
    scope.clock.at_ms += 59_999
    await bind(scope, key)
    assert scope.row("policyrevision/00000007")["spec"]["deadline"]["atMs"] == asked_ms + 90_000


@story
async def test_one_number_has_one_content_and_the_higher_number_stands(scope: Scope) -> None:
    agent = scope.actors["policy"]
    assert await scope.must(agent, adopted(scope, 7, "a")) == [7]
    assert await scope.refused(agent, adopted(scope, 7, "b")) is Code.OPERATION_MISMATCH
    assert await scope.refused(agent, adopted(scope, 6, "a")) is Code.REVISION
    assert await scope.must(agent, adopted(scope, 9, "b")) == [9]


@story
async def test_where_policies_come_on_lease_none_is_made_or_undone_here(scope: Scope) -> None:
    """A local one would share their numbers."""
    await scope.must(OPERATOR, Apply(policy("own", "a")))
    await scope.must(scope.actors["policy"], adopted(scope, 7, "a"))
    assert await scope.refused(OPERATOR, Apply(policy("own", "b"))) is Code.NOT_OWNER
    assert await scope.refused(OPERATOR, Delete("Policy", "own")) is Code.NOT_OWNER
    assert await scope.refused(OPERATOR, Rollback(1)) is Code.NOT_OWNER
