"""Properties of dominant resource fairness for whole replicas, and of the decayed usage.

The properties are proved for divisible work; with whole replicas each holds up to a slack, derived at its test. All tests
fill the cluster through the real backlog, round by round, with plain counters for the capacity.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from random import Random

from hypothesis import assume, given
from hypothesis import strategies as st

from remit.proposal.queue.backlog import Backlog
from remit.proposal.queue.class_queues import ClassQueue
from remit.proposal.queue.fair_share import FairShareLedger, Vector

Ask = dict[str, int]
Asks = dict[str, Ask]

RESOURCES = ("cpu", "disk", "memory")


def vector(ask: Ask) -> Vector:
    return tuple(sorted(ask.items()))


def fill(capacity: Ask, asks: Asks, limit: int = 50, weights: dict[str, int] | None = None) -> dict[str, int]:
    """Replicas per tenant when each wants more than there is; a tenant that no longer fits waits for capacity."""
    backlog, shares = Backlog(lambda limit: 0), FairShareLedger(capacity, weights or {}, 0)
    free, got = dict(capacity), dict.fromkeys(asks, 0)
    for tenant, ask in asks.items():
        for i in range(1 + min(capacity[name] // count for name, count in ask.items() if count)):
            backlog.add(tenant, lambda: ClassQueue(tenant, tenant, 0, vector(ask)), (tenant, i), 0)  # noqa: B023  (called at once)
    while taken := backlog.take(limit, 0, shares):
        since = {line: backlog.begin_attempt(line) for line, _ in taken}
        for line, members in taken:
            for member in members:
                if line.wait is None and all(free[name] >= count for name, count in line.amount):
                    for name, count in line.amount:
                        free[name] -= count
                    backlog.remove(member)
                    shares.charge(line.tenant, line.amount, 1, 0)
                    got[line.tenant] += 1
                else:
                    backlog.return_member(member)
                    backlog.wait(line, "no_room", frozenset({("room",)}), since=since[line], now_ms=0)
    assert all(line.wait is not None for line in backlog.queues())
    return got


def dominant(capacity: Ask, ask: Ask) -> Fraction:
    return max(Fraction(count, capacity[name]) for name, count in ask.items())


def clusters(tenants_max: int = 4) -> st.SearchStrategy[tuple[Ask, Asks]]:
    """Every tenant requests something of every resource, and little of the total."""
    ask = st.fixed_dictionaries({name: st.integers(1, 6) for name in RESOURCES})
    asks = st.integers(2, tenants_max).flatmap(lambda n: st.fixed_dictionaries({"abcd"[i]: ask for i in range(n)}))
    return st.tuples(st.fixed_dictionaries({name: st.integers(60, 240) for name in RESOURCES}), asks)


def test_example_of_drf_paper_is_reproduced() -> None:
    """9 CPUs and 18 GB; A asks <1 CPU, 4 GB>, B asks <3 CPU, 1 GB>: three tasks and two, two thirds each."""
    capacity = {"cpu": 9, "memory": 18}
    asks = {"a": {"cpu": 1, "memory": 4}, "b": {"cpu": 3, "memory": 1}}
    for limit in (1, 2, 3, 5, 100):
        got = fill(capacity, asks, limit)
        assert got == {"a": 3, "b": 2}
        assert [got[tenant] * dominant(capacity, asks[tenant]) for tenant in "ab"] == [Fraction(2, 3)] * 2
    assert fill(capacity, {"b": asks["a"], "a": asks["b"]}) == {"b": 3, "a": 2}, "independent of names"


def test_weight_of_two_equals_two_tenants() -> None:
    got = fill({"cpu": 90}, {"a": {"cpu": 1}, "b": {"cpu": 1}}, weights={"a": 2})
    assert got == {"a": 60, "b": 30}


@given(clusters(), st.integers(1, 40), st.integers(1, 40))
def test_batch_size_does_not_change_shares(cluster: tuple[Ask, Asks], one: int, other: int) -> None:
    """In-flight replicas count like bound ones."""
    capacity, asks = cluster
    assert fill(capacity, asks, one) == fill(capacity, asks, other)


@given(clusters())
def test_allocation_is_pareto_efficient(cluster: tuple[Ask, Asks]) -> None:
    """No tenant could get more without another getting less."""
    capacity, asks = cluster
    got = fill(capacity, asks)
    free = {name: total - sum(got[tenant] * ask[name] for tenant, ask in asks.items()) for name, total in capacity.items()}
    assert min(free.values()) >= 0
    for tenant, ask in asks.items():
        assert any(free[name] < count for name, count in ask.items()), f"one more replica of {tenant} fits"


@given(clusters())
def test_allocation_gives_sharing_incentive(cluster: tuple[Ask, Asks]) -> None:
    """When tenant i no longer fits, some resource has less than one request of i left, and every other share is at most
    that of i plus one replica: n * share(i) + one replica of every tenant > 1.
    """
    capacity, asks = cluster
    got = fill(capacity, asks)
    slack = sum(dominant(capacity, ask) for ask in asks.values())
    for tenant, ask in asks.items():
        assert len(asks) * got[tenant] * dominant(capacity, ask) + slack > 1


@given(clusters())
def test_allocation_is_envy_free_up_to_slack(cluster: tuple[Ask, Asks]) -> None:
    """While i still fits, j is ahead by at most one replica. After that, j takes what is left of the resource i lacks,
    which is less than one request of i: at most as many replicas as that is requests of j.
    """
    capacity, asks = cluster
    got = fill(capacity, asks)
    for i, mine in asks.items():
        for j, theirs in asks.items():
            ahead = 1 + max(ceil(Fraction(mine[name], theirs[name])) for name in capacity)
            bundle = {name: max(0, got[j] - ahead) * count for name, count in theirs.items()}
            assert min(bundle[name] // count for name, count in mine.items()) <= got[i], f"{i} envies {j}"


@given(clusters(), st.fixed_dictionaries({name: st.integers(0, 6) for name in RESOURCES}))
def test_inflated_request_gains_no_replicas(cluster: tuple[Ask, Asks], more: Ask) -> None:
    """Spot check of strategy-proofness. While all fit, a lie gains at most the replicas others may be ahead; after that, at
    most what is left of one request of another tenant.
    """
    capacity, asks = cluster
    assume(any(more.values()))
    honest = fill(capacity, asks)
    lie = {name: count + more[name] for name, count in asks["a"].items()}
    lied = fill(capacity, {**asks, "a": lie})
    others = [ask for tenant, ask in asks.items() if tenant != "a"]
    ahead = ceil(max(dominant(capacity, ask) for ask in others) / dominant(capacity, asks["a"]))
    rest = max(ceil(Fraction(ask[name], lie[name])) for ask in others for name in capacity)
    assert lied["a"] <= honest["a"] + ahead + 1 + rest


def test_padded_request_loses_replicas() -> None:
    capacity = {"cpu": 900, "memory": 1800}
    asks = {"a": {"cpu": 1, "memory": 4}, "b": {"cpu": 3, "memory": 1}}
    honest = fill(capacity, asks)
    padded = [fill(capacity, {**asks, "a": {"cpu": 1 + more, "memory": 4}})["a"] for more in range(6)]
    assert padded[0] == honest["a"] and padded == sorted(padded, reverse=True) and padded[-1] < honest["a"]


# -- decayed usage -------------------------------------------------------------------------------------------------------

CHARGES = st.lists(st.tuples(st.sampled_from(RESOURCES), st.integers(0, 500)), max_size=8)
STEPS = st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 500)), min_size=1, max_size=8)


@given(CHARGES, st.randoms(use_true_random=False), st.integers(0, 10**6))
def test_charges_at_one_instant_commute(charges: list[tuple[str, int]], random: Random, later_ms: int) -> None:
    shuffled = list(charges)
    random.shuffle(shuffled)
    books = [FairShareLedger(dict.fromkeys(RESOURCES, 1000), half_life_ms=60_000) for _ in range(2)]
    for shares, order in zip(books, (charges, shuffled), strict=True):
        shares.charge("a", (("cpu", 7),), 1, 0)
        for name, count in order:
            shares.charge("a", ((name, count),), 1, 1000)
    assert books[0].share("a", later_ms) == books[1].share("a", later_ms)
    assert books[0].decayed_usage("a", later_ms) == books[1].decayed_usage("a", later_ms)


def replay(steps: list[tuple[int, int]], more: int = 0) -> tuple[FairShareLedger, int, list[int]]:
    """Usage goes from one value to the next, each held for a while."""
    shares, now_ms, held, seen = FairShareLedger({"cpu": 1000}, half_life_ms=60_000), 0, 0, []
    for hold_ms, use in steps:
        shares.charge("a", (("cpu", 1),), use + more - held, now_ms)
        held = use + more
        now_ms += hold_ms
        seen.append(shares.decayed_usage("a", now_ms).get("cpu", 0))
    return shares, now_ms, seen


@given(STEPS)
def test_decayed_usage_stays_between_zero_and_maximum(steps: list[tuple[int, int]]) -> None:
    _, _, seen = replay(steps)
    most = [max(use for _, use in steps[: i + 1]) for i in range(len(steps))]
    assert all(0 <= one <= top for one, top in zip(seen, most, strict=True))


@given(STEPS, st.integers(1, 100), st.integers(0, 10**6))
def test_higher_usage_at_every_instant_gives_larger_share(steps: list[tuple[int, int]], more: int, later_ms: int) -> None:
    less, now_ms, _ = replay(steps)
    greater, _, _ = replay(steps, more)
    assert greater.share("a", now_ms + later_ms) > less.share("a", now_ms + later_ms)


@given(STEPS, st.lists(st.integers(0, 10**6), min_size=2, max_size=6))
def test_past_usage_only_decays_and_reads_change_nothing(steps: list[tuple[int, int]], later: list[int]) -> None:
    shares, now_ms, _ = replay([*steps, (0, 0)])
    shares_seen = [shares.share("a", now_ms + ms) for ms in sorted(later)]
    assert shares_seen == sorted(shares_seen, reverse=True)
    assert [shares.share("a", now_ms + ms) for ms in sorted(later)] == shares_seen
    after, left = shares.share("a", now_ms + 60_000), shares.share("a", now_ms)
    assert abs(after - left / 2) <= 1 / 1000, "half is left after a half-life"


@given(STEPS)
def test_without_half_life_only_present_usage_counts(steps: list[tuple[int, int]]) -> None:
    shares, now_ms, held = FairShareLedger({"cpu": 1000}, half_life_ms=0), 0, 0
    for hold_ms, use in steps:
        shares.charge("a", (("cpu", 1),), use - held, now_ms)
        held = use
        now_ms += hold_ms
        assert shares.share("a", now_ms) == use / 1000
