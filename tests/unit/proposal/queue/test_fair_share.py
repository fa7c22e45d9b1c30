"""Fair-share ledger: dominant shares, decayed history, and removal of idle tenants."""

from __future__ import annotations

import pytest

from remit.proposal.queue.fair_share import FREE_REPLICA_SHARE, FairShareLedger, Vector, decayed

CPU: Vector = (("cpu", 1),)
HOUR_MS = 3_600_000


def test_share_is_largest_fraction_of_any_resource() -> None:
    shares = FairShareLedger({"cpu": 9, "memory": 18}, half_life_ms=0)
    shares.charge("a", (("cpu", 1), ("memory", 4)), 1, 0)
    assert shares.share("a", 0) == 4 / 18
    shares.charge("a", (("cpu", 4),), 1, 0)
    assert shares.share("a", 0) == 5 / 9
    assert shares.usage("a") == {"cpu": 5, "memory": 4}
    assert shares.share("b", 0) == 0 and shares.usage("b") == {}


def test_double_weight_halves_share() -> None:
    shares = FairShareLedger({"cpu": 10}, {"a": 2}, 0)
    for tenant in "ab":
        shares.charge(tenant, CPU, 4, 0)
    assert (shares.share("a", 0), shares.share("b", 0)) == (0.2, 0.4)
    shares.set_weight("a", 1)
    assert shares.share("a", 0) == 0.4
    with pytest.raises(ValueError, match="weight 0"):
        shares.set_weight("a", 0)


def test_equal_shares_compare_equal_despite_different_divisors() -> None:
    """Thirds of odd capacities, over weights: a float that is divided twice would differ."""
    shares = FairShareLedger({"cpu": 3 * 7 * 10**15, "memory": 3 << 50, "disk": 9}, {"b": 3, "c": 7}, 0)
    shares.charge("a", (("cpu", 7 * 10**15),), 1, 0)
    shares.charge("b", (("memory", 3 << 50),), 1, 0)
    shares.charge("c", (("disk", 21),), 1, 0)
    assert shares.share("a", 0) == shares.share("b", 0) == shares.share("c", 0) == 1 / 3


def test_capacity_change_applies_at_once_and_zero_capacity_is_ignored() -> None:
    shares = FairShareLedger({"cpu": 10, "gpu": 4}, half_life_ms=0)
    shares.charge("a", (("cpu", 1), ("gpu", 2)), 1, 0)
    assert shares.share("a", 0) == 0.5
    shares.set_capacity({"cpu": 20, "gpu": 0})
    assert shares.share("a", 0) == 1 / 20
    shares.set_capacity({"cpu": 20, "gpu": 8})
    assert shares.share("a", 0) == 0.25


def test_returning_more_than_held_raises_and_changes_nothing() -> None:
    shares = FairShareLedger({"cpu": 10, "memory": 10}, half_life_ms=0)
    shares.charge("a", (("cpu", 2),), 1, 0)
    with pytest.raises(ValueError, match="return 1 of memory"):
        shares.charge("a", (("cpu", 1), ("memory", 1)), -1, 0)
    with pytest.raises(ValueError, match="return 1 of cpu: it holds 0"):
        shares.charge("nobody", CPU, -1, 0)
    assert shares.usage("a") == {"cpu": 2} and len(shares) == 1


def test_past_usage_halves_after_half_life() -> None:
    shares = FairShareLedger({"cpu": 1000}, half_life_ms=HOUR_MS)
    shares.charge("a", CPU, 800, 0)
    assert shares.share("a", 0) == 0.8, "there is no history yet"
    assert shares.decayed_usage("a", HOUR_MS) == {"cpu": 400}
    assert shares.decayed_usage("a", 2 * HOUR_MS) == {"cpu": 600}
    assert shares.share("a", HOUR_MS) == 1.2
    shares.charge("a", CPU, -800, HOUR_MS)
    assert shares.share("a", HOUR_MS) == 0.4
    assert shares.share("a", 2 * HOUR_MS) == 0.2
    assert shares.share("a", 3 * HOUR_MS) == 0.1


def test_tenant_with_more_recent_usage_has_larger_share_when_idle() -> None:
    shares = FairShareLedger({"cpu": 1000}, half_life_ms=HOUR_MS)
    for tenant, used in (("burst", 900), ("quiet", 10)):
        shares.charge(tenant, CPU, used, 0)
        shares.charge(tenant, CPU, -used, HOUR_MS)
    assert shares.share("quiet", HOUR_MS + 1) < shares.share("burst", HOUR_MS + 1)
    plain = FairShareLedger({"cpu": 1000}, half_life_ms=0)
    plain.charge("burst", CPU, 900, 0)
    plain.charge("burst", CPU, -900, HOUR_MS)
    assert plain.share("burst", HOUR_MS + 1) == 0


def test_history_weight_scales_past_usage() -> None:
    for weight in (0, 1, 3):
        shares = FairShareLedger({"cpu": 1000}, half_life_ms=HOUR_MS, history_weight=weight)
        shares.charge("a", CPU, 800, 0)
        shares.charge("a", CPU, -800, HOUR_MS)
        assert shares.share("a", HOUR_MS) == 400 * weight / 1000
    with pytest.raises(ValueError, match="must not be negative"):
        FairShareLedger({}, half_life_ms=-1)


@pytest.mark.parametrize("half_life_ms", [10_000, HOUR_MS, 168 * HOUR_MS])
def test_decay_does_not_depend_on_update_frequency(half_life_ms: int) -> None:
    often, once = (FairShareLedger({"cpu": 10**6}, half_life_ms=half_life_ms) for _ in range(2))
    for shares in (often, once):
        shares.charge("a", CPU, 500_000, 0)
    for now_ms in range(1, 10_000):
        often.charge("a", CPU, 1, now_ms)
        often.charge("a", CPU, -1, now_ms)
    assert once.decayed_usage("a", 10_000)["cpu"] > 0
    assert abs(often.decayed_usage("a", 10_000)["cpu"] - once.decayed_usage("a", 10_000)["cpu"]) <= 1


def test_clock_going_back_changes_nothing() -> None:
    shares = FairShareLedger({"cpu": 1000}, half_life_ms=HOUR_MS)
    shares.charge("a", CPU, 800, HOUR_MS)
    shares.charge("a", CPU, -400, 0)
    assert shares.share("a", 0) == shares.share("a", HOUR_MS) == 0.4


def test_idle_tenants_are_forgotten() -> None:
    shares = FairShareLedger({"cpu": 1000}, half_life_ms=1000)
    for i in range(5000):
        shares.charge(f"t{i}", CPU, 100, i * 1000)
        shares.charge(f"t{i}", CPU, -100, i * 1000 + 500)
        assert len(shares) <= 130
    shares.charge("a", CPU, 1, 5_000_000)
    shares.charge("a", CPU, -1, 5_000_000)
    assert shares.usage("a") == {} and not shares.decayed_usage("a", 5_000_001), "held for no time"


def test_replica_without_counted_resources_adds_minimal_share() -> None:
    share = FairShareLedger({"cpu": 10}, half_life_ms=0).tenant_share("a", 0)
    assert share.add(share.parts((("unheard-of", 3), ("cpu", 0)))) == FREE_REPLICA_SHARE
    assert share.add(share.parts((("cpu", 5),))) == 0.5
    assert share.add(share.parts(()), 2) == 0.5 + 2 * FREE_REPLICA_SHARE


def test_tenant_share_is_copy() -> None:
    shares = FairShareLedger({"cpu": 10}, half_life_ms=0)
    shares.charge("a", CPU, 1, 0)
    share = shares.tenant_share("a", 0)
    assert share.add(share.parts(CPU), 4) == 0.5
    assert shares.share("a", 0) == 0.1 and shares.usage("a") == {"cpu": 1}


def test_decay_is_exact_at_half_lives_and_close_between() -> None:
    for n in range(5):
        assert decayed(n * 1000, 1000) == 1 << 64 - n
    for elapsed_ms in range(0, 5000, 37):
        assert abs(decayed(elapsed_ms, 1000) / 2**64 - 0.5 ** (elapsed_ms / 1000)) < 2e-6
    assert decayed(10**9, 1) == 0
