"""Quota source: the ledger that work is charged to, and for how many replicas it suffices."""

from __future__ import annotations

from remit.model.claims import Code
from remit.model.metadata import Deadline, RecordMetadata
from remit.model.records import Grant, GrantPhase, GrantSpec, GrantStatus
from remit.proposal.quota import quota_source
from tests.properties.authority_world import amounts
from tests.unit.observation.row_fixtures import ViewFixture, ready, replica, tenant, work

NOW_MS = 1_000_000


def slice_(name: str, cpu: str, *, until_ms: int = NOW_MS + 60_000, phase: GrantPhase = GrantPhase.LIVE) -> Grant:
    spec = GrantSpec(holder="scope/r1", issuer="scope/global", amount=amounts(cpu=cpu), tenant="t1")
    status = GrantStatus(phase=phase, deadline=Deadline(at_ms=until_ms, boot="boot-1"))
    return Grant(metadata=RecordMetadata(name=name), spec=spec, status=status)


def test_tenant_quota_covers_as_many_as_are_left() -> None:
    t = ViewFixture(ready("n1"), tenant("t1", "3"), *work("a"), replica("a", phase="bound", on="n1"))
    one = quota_source(t.view, "t1", NOW_MS)
    assert (one.name, one.unusable) == ("tenant/t1", None)
    assert one.covers([("cpu", 1000)], 5) == 2
    assert one.covers([("cpu", 0)], 5) == 5
    assert one.covers([("cpu", 1000), ("devices/gpu", 1000)], 5) == 2
    assert one.covers([("memory", 1)], 5) == 0, "a resource missing from the quota is not available"


def test_assumed_replica_is_charged_to_quota() -> None:
    t = ViewFixture(ready("n1"), tenant("t1", "2"), *work("a"), replica("a"))
    t.view.holds.assume(t.slot("a-0"), t.view.columns.rows["n1"], {}, ("tenant/t1",))
    assert quota_source(t.view, "t1", NOW_MS).covers([("cpu", 1000)], 5) == 1


def test_unknown_tenant_has_no_quota() -> None:
    one = quota_source(ViewFixture(ready("n1")).view, "nobody", NOW_MS)
    assert one.covers([], 5) == 0
    assert one.reason == Code.OVER_QUOTA


def test_granted_slice_precedes_tenant_quota() -> None:
    t = ViewFixture(ready("n1"), tenant("t1", "16"), slice_("s", "2"))
    assert quota_source(t.view, "t1", NOW_MS).name == "s"


def test_expired_or_closed_slice_does_not_hide_next() -> None:
    t = ViewFixture(
        tenant("t1"), slice_("a", "2", until_ms=NOW_MS), slice_("b", "2", phase=GrantPhase.CLOSED), slice_("c", "2")
    )
    assert quota_source(t.view, "t1", NOW_MS).name == "c"
    late = quota_source(t.view, "t1", NOW_MS + 60_000)
    assert (late.name, late.reason) == ("a", Code.GRANT_EXPIRED)
    assert late.covers([], 1) == 0


def test_exhausted_slice_does_not_hide_next() -> None:
    t = ViewFixture(ready("n1"), tenant("t1"), slice_("a", "2"), slice_("b", "3"), *work("w", cpu="2"))
    assert quota_source(t.view, "t1", NOW_MS, [("cpu", 2000)]).name == "a"
    assert quota_source(t.view, "t1", NOW_MS, [("cpu", 1000)], 3).name == "b"
    t.apply(replica("w", phase="bound", on="n1", grants=("a",)))
    assert quota_source(t.view, "t1", NOW_MS, [("cpu", 1000)]).name == "b"
    assert quota_source(t.view, "t1", NOW_MS, [("cpu", 9000)]).reason == Code.OVER_QUOTA


def test_shortage_says_whether_only_a_raised_quota_helps() -> None:
    t = ViewFixture(ready("n1"), tenant("t1", "3"), *work("a", "2"), replica("a", phase="bound", on="n1"))
    source = quota_source(t.view, "t1", NOW_MS)
    text = "tenant/t1 has too little quota left"
    assert source.shortage_text([("cpu", 1500)], 1) == f"{text}: cpu 1 of cpu 3; one replica needs cpu 1500m"
    assert source.shortage_text([("cpu", 2000)], 2) == (
        f"{text}: it has cpu 3 in total, and 2 replicas need cpu 4, so only a raised quota helps"
    )
    assert source.shortage_text([("cpu", 500)], 1) == text
    assert quota_source(t.view, "nobody", NOW_MS).shortage_text([], 1) == "tenant/nobody does not exist in this scope"
    expired = ViewFixture(tenant("t1"), slice_("a", "2", until_ms=NOW_MS))
    assert quota_source(expired.view, "t1", NOW_MS).shortage_text([("cpu", 500)], 1) == "nothing can be charged to a"
