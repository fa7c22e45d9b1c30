"""Overrides at the authority: permission, deadline, renewal and expiry."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from remit.commitment.rulings import kind_rules
from remit.law.overrides import ActiveOverrides, active_overrides
from remit.model.claims import Accepted, Apply, Code, Delete, Refused
from remit.model.kinds import Override, OverrideScope, OverrideSpec, OverrideStatus
from remit.model.metadata import Deadline, Metadata
from remit.model.objects import decode
from remit.model.resources import Duration
from tests.properties.authority_world import LEASES, OPERATOR, USER, Scope, scope_test

TTL = Duration(60_000)
KEY = "override/o"


def override(name: str = "o", **more: object) -> Override:
    spec = OverrideSpec(effect="avoid", scope=OverrideScope(zones=("a",)), ttl=TTL, reason="dark", author="ada")
    return Override(metadata=Metadata(name=name), spec=replace(spec, **more))


def until_ms(scope: Scope) -> int:
    deadline = scope.row(KEY)["status"]["deadline"]
    assert deadline["boot"] == scope.clock.on
    return int(deadline["atMs"])


async def effects(scope: Scope) -> ActiveOverrides:
    """Active overrides for an observer whose clock equals the authority's."""
    page = await scope.store.inner.range("override/")
    rows = [obj for row in page.rows if isinstance(obj := decode(row.value), Override)]
    return active_overrides(rows, (scope.clock.on, scope.clock.at_ms))


@scope_test
async def test_override_term_starts_at_apply_by_authority_clock(scope: Scope) -> None:
    assert await scope.must(OPERATOR, Apply(override())) == [1]
    assert until_ms(scope) == scope.clock.at_ms + TTL
    assert (await effects(scope)).avoided_by("r1", "a", "p", "n") == "o"
    scope.clock.at_ms += TTL
    assert (await effects(scope)) == ActiveOverrides()


@scope_test
async def test_deadline_sent_by_client_is_ignored(scope: Scope) -> None:
    sent_status = OverrideStatus(deadline=Deadline(boot=scope.clock.on, at_ms=9_999_999_999))
    await scope.must(OPERATOR, Apply(replace(override(), status=sent_status)))
    assert until_ms(scope) == scope.clock.at_ms + TTL
    at_first = until_ms(scope)
    scope.clock.at_ms += 1_000
    await scope.must(OPERATOR, Apply(replace(override(), status=sent_status)))
    assert until_ms(scope) == at_first


@scope_test
async def test_identical_override_is_accepted_without_longer_term(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(override()))
    at_first = until_ms(scope)
    for _ in range(3):
        scope.clock.at_ms += 10_000
        assert await scope.must(OPERATOR, Apply(override())) == [1]
        assert until_ms(scope) == at_first
    labelled = replace(override(), metadata=Metadata(name="o", labels={"ticket": "7"}))
    await scope.must(OPERATOR, Apply(labelled))
    assert until_ms(scope) == at_first, "a change of metadata does not extend it"


@scope_test
async def test_changed_override_spec_starts_new_term(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(override()))
    scope.clock.at_ms += 10_000
    assert await scope.must(OPERATOR, Apply(override(reason="still dark"))) == [2]
    assert until_ms(scope) == scope.clock.at_ms + TTL
    assert await scope.must(OPERATOR, Apply(override(reason="still dark", ttl=Duration(1)))) == [3]
    assert until_ms(scope) == scope.clock.at_ms + 1, "a shorter term applies too"


@scope_test
async def test_expired_override_is_not_revived_by_same_spec(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(override()))
    scope.clock.at_ms += TTL - 1
    await scope.must(OPERATOR, Apply(override()))
    scope.clock.at_ms += 1
    (verdict,) = await scope.ask(OPERATOR, Apply(override()))
    assert isinstance(verdict, Refused) and verdict.code is Code.EXISTS
    assert "has expired" in verdict.detail and "delete it first" in verdict.detail
    assert await scope.must(OPERATOR, Apply(override(reason="again"))) == [2], "a changed spec is a new override"
    assert (await effects(scope)).avoided_by("r1", "a", "p", "n") == "o"


@scope_test
async def test_deleted_override_ends_at_once_and_may_be_reapplied(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(override()), Delete("Override", "o"))
    assert (await effects(scope)) == ActiveOverrides()
    assert KEY not in scope.checker.rows
    scope.clock.at_ms += 5
    await scope.must(OPERATOR, Apply(override()))
    assert until_ms(scope) == scope.clock.at_ms + TTL
    assert await scope.refused(OPERATOR, Delete("Override", "other")) is Code.NOT_FOUND


@scope_test
async def test_only_operator_may_override(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(override()))
    for actor in (USER, *(scope.actors[lease] for lease in LEASES), scope.actors["agent/n1"]):
        assert await scope.refused(actor, Apply(override("mine"))) is Code.ROLE
        assert await scope.refused(actor, Apply(override(reason="longer"))) is Code.ROLE
        assert await scope.refused(actor, Delete("Override", "o")) is Code.ROLE


@scope_test
async def test_invalid_override_fields_are_refused(scope: Scope) -> None:
    (verdict,) = await scope.ask(OPERATOR, Apply(override(ttl=Duration(0), reason=" ", scope=OverrideScope())))
    assert isinstance(verdict, Refused) and verdict.code is Code.INVALID
    assert [line.split(":")[0] for line in verdict.detail.split(" | ")] == ["spec.reason", "spec.scope", "spec.ttl"]


@scope_test
async def test_takeover_keeps_override_term_on_same_boot_only(scope: Scope) -> None:
    """The time between two boots is unknown."""
    await scope.must(OPERATOR, Apply(override()))
    at_first = until_ms(scope)
    scope.clock.at_ms += 1_000
    await scope.take_over()
    await scope.must(OPERATOR, Apply(override()))
    assert until_ms(scope) == at_first
    assert (await effects(scope)).avoided_by("r1", "a", "p", "n") == "o"
    scope.clock.on, scope.clock.at_ms = "boot-2", 5
    await scope.take_over()
    assert (await effects(scope)) == ActiveOverrides()
    assert await scope.refused(OPERATOR, Apply(override())) is Code.EXISTS
    await scope.must(OPERATOR, Delete("Override", "o"), Apply(override()))
    assert until_ms(scope) == 5 + TTL


@scope_test
async def test_number_of_overrides_is_limited(scope: Scope) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind_rules, "OVERRIDES_MAX", 2)
        await scope.must(OPERATOR, Apply(override("o")), Apply(override("p")))
        assert await scope.refused(OPERATOR, Apply(override("q"))) is Code.LIMIT
        await scope.must(OPERATOR, Apply(override("p", reason="changed")), Delete("Override", "o"), Apply(override("q")))


@scope_test
async def test_status_reports_authority_clock(scope: Scope) -> None:
    status = await scope.lead.authority.status()
    assert (status.boot, status.now_ms) == (scope.clock.on, scope.clock.at_ms)
    scope.clock.at_ms += 1_234
    later = await scope.lead.authority.status()
    assert later.now_ms - status.now_ms == 1_234


@scope_test
async def test_retried_override_keeps_first_deadline(scope: Scope) -> None:
    operation = await scope.operation(OPERATOR, Apply(override()))
    scope.store.plan.append("landed")
    await scope.send([operation])
    at_first = until_ms(scope)
    scope.clock.at_ms += 7_000
    answers = await scope.send([operation])
    assert isinstance(answers, list) and isinstance(answers[0], Accepted)
    assert until_ms(scope) == at_first
