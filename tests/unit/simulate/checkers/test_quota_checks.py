"""Is a grant in two hands noticed, and a tenant that uses more than it has over all scopes?"""

from __future__ import annotations

from typing import Any

from remit.simulate.checkers.quota_checks import compare_scopes
from tests.unit.simulate.checkers.history_builder import Pen, World, tenant


def two_scopes() -> tuple[Pen, Pen]:
    """A home that has issued 2 cpu to r1, and r1 that has not taken it up yet. Only the home knows the tenant's quota."""
    world = World()
    home, region = Pen(world, "global").furnish(), Pen(world, "r1").furnish()
    home.grant("s", holder="scope/r1")
    return home, region


def accept(region: Pen, cpu: str = "2", **status: Any) -> None:
    held: dict[str, Any] = {"issuer": "scope/global", "parent": "", "holder": "scope/r1", "amount": {"cpu": cpu}}
    region.grant("s", status={"deadline": {"boot": "b1", "atMs": region.world.now_ms + 3_600_000}, **status}, **held)


def returned(home: Pen, cpu: str) -> None:
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


def test_more_taken_up_than_was_issued_is_caught() -> None:
    _, region = two_scopes()
    accept(region, "3")
    assert region.found == ["grants_are_in_one_hand"]


def test_credited_before_it_was_given_back_is_caught() -> None:
    home, region = two_scopes()
    accept(region)
    returned(home, "1")
    assert home.found == ["grants_are_in_one_hand"]


def test_a_grant_that_nobody_issued_is_caught() -> None:
    home, region = two_scopes()
    accept(region)
    home.commit({"grant/s": None}, [home.entry("close", "s", "budgets")])
    assert home.found == ["grants_are_in_one_hand"]


def test_what_an_operator_declared_lost_is_the_operators_word() -> None:
    home, region = two_scopes()
    accept(region)
    home.commit({"grant/s": None}, [home.entry("declare-lost", "scope/r1", "operator")])
    accept(region, "1")
    assert home.found == []
    home.grant("s", holder="scope/r1", amount={"cpu": "0"})
    accept(region, "1")
    assert home.found == ["grants_are_in_one_hand"], "a new one of that name counts anew"


def test_a_void_grant_is_in_nobodys_hand() -> None:
    home, region = two_scopes()
    accept(region, "2", phase="void")
    returned(home, "2")
    assert home.found == []


def test_a_restored_issuer_is_judged_once_its_holder_has_vouched() -> None:
    home, region = two_scopes()
    accept(region)
    backup = {key: row for key, row in home.rows.items() if key != "grant/s"}
    home.restore(backup, incarnation="global-i2")
    awaited = {"metadata": {"name": "scope/r1"}, "spec": {"standing": "awaited"}}
    home.doubt({"peer/scope/r1": awaited})
    accept(region)
    assert home.found == []
    vouched = {**awaited, "spec": {"standing": "vouched"}}
    home.commit({"peer/scope/r1": vouched}, [home.entry("vouch", "scope/r1", "budgets")])
    assert home.found == ["grants_are_in_one_hand"], "and nothing was recorded"


def test_use_over_all_scopes_above_the_quota_is_caught() -> None:
    world = World()
    big = {"template": {"command": ["x"], "resources": {"cpu": "4"}}}
    home, region = Pen(world, "global").furnish(**big), Pen(world, "r1").furnish(**big)
    row = tenant("t1", "3")
    for pen in (home, region):  # one quota of 3 and 2 more for emergencies, in each: 10 in all
        pen.world.judge.cross_scope.quotas.clear()
    for pen in (home, region):
        pen.commit({"tenant/t1": row}, [pen.entry("apply", "tenant/t1", "operator")])
        pen.grant("o", purpose="offer", parent="", amount={"cpu": "9"}, tenant="")
        a, b = pen.spawn(0, 1)
        pen.bind(a, "n1", grants=["o"])
        pen.bind(b, "n2", grants=["o"])
    assert world.found == ["tenants_use_no_more_than_their_quota"]
    assert "16000, highest limit so far 10000" in world.judge.violations[-1].why


def test_a_grant_in_two_hands_is_caught_from_all_rows_too() -> None:
    issued = {"grant/s": (1, {"spec": {"amount": {"cpu": "4"}}, "status": {"returned": {"cpu": "3"}}})}
    held = {"grant/s": (1, {"spec": {"amount": {"cpu": "2"}, "issuer": "scope/global"}})}
    assert [key for key, _ in compare_scopes(issued, held, "r1")] == ["grant/s"]
    assert not list(compare_scopes({"grant/s": (1, {"spec": {"amount": {"cpu": "2"}}})}, held, "r1"))
