"""Quota checks across scopes: a grant counted twice, and a tenant above its quota over all scopes, are reported."""

from __future__ import annotations

from typing import Any

from remit.simulate.checkers.quota_checks import compare_scopes
from tests.unit.simulate.checkers.history_builder import HistoryBuilder, World, tenant


def two_scopes() -> tuple[HistoryBuilder, HistoryBuilder]:
    """A home scope that has issued 2 cpu to r1 (not yet accepted). Only the home scope knows the tenant's quota."""
    world = World()
    home, region = HistoryBuilder(world, "global").prepare(), HistoryBuilder(world, "r1").prepare()
    home.grant("s", holder="scope/r1")
    return home, region


def accept(region: HistoryBuilder, cpu: str = "2", **status: Any) -> None:
    held: dict[str, Any] = {"issuer": "scope/global", "parent": "", "holder": "scope/r1", "amount": {"cpu": cpu}}
    region.grant("s", status={"deadline": {"boot": "b1", "atMs": region.world.now_ms + 3_600_000}, **status}, **held)


def returned(home: HistoryBuilder, cpu: str) -> None:
    row = home.rows["grant/s"]
    home.commit(
        {"grant/s": {**row, "status": {**row["status"], "returned": {"cpu": cpu}}}}, [home.entry("credit", "s", "budgets")]
    )


def test_debit_before_credit_is_lawful_both_ways() -> None:
    home, region = two_scopes()
    accept(region)
    accept(region, "1")
    returned(home, "1")
    home.world.judge.conclude()
    assert home.found == []


def test_accepting_more_than_issued_is_violation() -> None:
    _, region = two_scopes()
    accept(region, "3")
    assert region.found == ["held_grants_are_debited_by_issuer"]


def test_credit_before_return_is_violation() -> None:
    home, region = two_scopes()
    accept(region)
    returned(home, "1")
    assert home.found == ["held_grants_are_debited_by_issuer"]


def test_held_grant_without_issuer_row_is_violation() -> None:
    home, region = two_scopes()
    accept(region)
    home.commit({"grant/s": None}, [home.entry("close", "s", "budgets")])
    assert home.found == ["held_grants_are_debited_by_issuer"]


def test_grant_declared_lost_by_operator_is_lawful() -> None:
    home, region = two_scopes()
    accept(region)
    home.commit({"grant/s": None}, [home.entry("declare-lost", "scope/r1", "operator")])
    accept(region, "1")
    assert home.found == []
    home.grant("s", holder="scope/r1", amount={"cpu": "0"})
    accept(region, "1")
    assert home.found == ["held_grants_are_debited_by_issuer"], "a new grant of that name counts again"


def test_void_grant_counts_for_neither_side() -> None:
    home, region = two_scopes()
    accept(region, "2", phase="void")
    returned(home, "2")
    assert home.found == []


def test_restored_issuer_is_judged_once_holder_has_confirmed() -> None:
    home, region = two_scopes()
    accept(region)
    backup = {key: row for key, row in home.rows.items() if key != "grant/s"}
    home.restore(backup, incarnation="global-i2")
    awaited = {"metadata": {"name": "scope/r1"}, "spec": {"standing": "awaited"}}
    home.mark_restored({"peer/scope/r1": awaited})
    accept(region)
    assert home.found == []
    vouched = {**awaited, "spec": {"standing": "vouched"}}
    home.commit({"peer/scope/r1": vouched}, [home.entry("vouch", "scope/r1", "budgets")])
    assert home.found == ["held_grants_are_debited_by_issuer"], "and the issuer has no record"


def test_use_above_quota_over_all_scopes_is_violation() -> None:
    world = World()
    big = {"template": {"command": ["x"], "resources": {"cpu": "4"}}}
    home, region = HistoryBuilder(world, "global").prepare(**big), HistoryBuilder(world, "r1").prepare(**big)
    row = tenant("t1", "3")
    for h in (home, region):  # one quota of 3 and 2 more for emergencies in each: 10 in all
        h.world.judge.cross_scope.quotas.clear()
    for h in (home, region):
        h.commit({"tenant/t1": row}, [h.entry("apply", "tenant/t1", "operator")])
        h.grant("o", purpose="offer", parent="", amount={"cpu": "9"}, tenant="")
        a, b = h.spawn(0, 1)
        h.bind(a, "n1", grants=["o"])
        h.bind(b, "n2", grants=["o"])
    assert world.found == ["tenant_usage_stays_within_quota"]
    assert "16000, highest limit so far 10000" in world.judge.violations[-1].why


def test_comparison_of_all_rows_finds_grant_counted_twice() -> None:
    issued = {"grant/s": (1, {"spec": {"amount": {"cpu": "4"}}, "status": {"returned": {"cpu": "3"}}})}
    held = {"grant/s": (1, {"spec": {"amount": {"cpu": "2"}, "issuer": "scope/global"}})}
    assert [key for key, _ in compare_scopes(issued, held, "r1")] == ["grant/s"]
    assert not list(compare_scopes({"grant/s": (1, {"spec": {"amount": {"cpu": "2"}}})}, held, "r1"))
