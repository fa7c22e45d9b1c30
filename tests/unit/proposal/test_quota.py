"""On which ledger does work draw, and for how many is there enough?"""

from __future__ import annotations

from remit.model.claims import Code
from remit.model.metadata import Deadline, RecordMetadata
from remit.model.records import Grant, GrantPhase, GrantSpec, GrantStatus
from remit.proposal.quota import quota_source
from tests.properties.authority_world import amounts
from tests.unit.observation.row_fixtures import Told, ready, replica, tenant, work

NOW_MS = 1_000_000


def slice_(name: str, cpu: str, *, until_ms: int = NOW_MS + 60_000, phase: GrantPhase = GrantPhase.LIVE) -> Grant:
    spec = GrantSpec(holder="scope/r1", issuer="scope/global", amount=amounts(cpu=cpu), tenant="t1")
    status = GrantStatus(phase=phase, deadline=Deadline(at_ms=until_ms, boot="boot-1"))
    return Grant(metadata=RecordMetadata(name=name), spec=spec, status=status)


def test_the_tenants_own_quota_covers_as_many_as_are_left() -> None:
    t = Told(ready("n1"), tenant("t1", "3"), *work("a"), replica("a", phase="bound", on="n1"))
    one = quota_source(t.view, "t1", NOW_MS)
    assert (one.name, one.unusable) == ("tenant/t1", None)
    assert one.covers([("cpu", 1000)], 5) == 2
    assert one.covers([("cpu", 0)], 5) == 5
    assert one.covers([("cpu", 1000), ("devices/gpu", 1000)], 5) == 2
    assert one.covers([("memory", 1)], 5) == 0, "what is not in a quota is not to be had"


def test_what_is_assumed_is_spent() -> None:
    t = Told(ready("n1"), tenant("t1", "2"), *work("a"), replica("a"))
    t.view.holds.assume(t.slot("a-0"), t.view.columns.rows["n1"], {}, ("tenant/t1",))
    assert quota_source(t.view, "t1", NOW_MS).covers([("cpu", 1000)], 5) == 1


def test_a_tenant_that_is_not_there_has_nothing() -> None:
    one = quota_source(Told(ready("n1")).view, "nobody", NOW_MS)
    assert one.covers([], 5) == 0
    assert one.reason == Code.OVER_QUOTA


def test_a_slice_from_above_comes_before_the_tenants_own_quota() -> None:
    t = Told(ready("n1"), tenant("t1", "16"), slice_("s", "2"))
    assert quota_source(t.view, "t1", NOW_MS).name == "s"


def test_a_slice_that_ran_out_or_was_closed_does_not_hide_the_next() -> None:
    t = Told(tenant("t1"), slice_("a", "2", until_ms=NOW_MS), slice_("b", "2", phase=GrantPhase.CLOSED), slice_("c", "2"))
    assert quota_source(t.view, "t1", NOW_MS).name == "c"
    late = quota_source(t.view, "t1", NOW_MS + 60_000)
    assert (late.name, late.reason) == ("a", Code.GRANT_EXPIRED)
    assert late.covers([], 1) == 0


def test_a_slice_that_is_used_up_does_not_hide_the_next() -> None:
    t = Told(ready("n1"), tenant("t1"), slice_("a", "2"), slice_("b", "3"), *work("w", cpu="2"))
    assert quota_source(t.view, "t1", NOW_MS, [("cpu", 2000)]).name == "a"
    assert quota_source(t.view, "t1", NOW_MS, [("cpu", 1000)], 3).name == "b"
    t.tell(replica("w", phase="bound", on="n1", grants=("a",)))
    assert quota_source(t.view, "t1", NOW_MS, [("cpu", 1000)]).name == "b"
    assert quota_source(t.view, "t1", NOW_MS, [("cpu", 9000)]).reason == Code.OVER_QUOTA
