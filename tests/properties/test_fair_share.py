"""Is the sharing fair? The promises of dominant resource fairness, for work that comes in whole replicas, and of its memory.

The promises are proved for work that can be cut as fine as one likes; with whole replicas each holds up to a slack, which is
worked out beside it. Everything is filled through the backlog itself, round by round, into a room that only counts.
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


def filled(capacity: Ask, asks: Asks, limit: int = 50, weights: dict[str, int] | None = None) -> dict[str, int]:
    """How many replicas each tenant gets, each wanting more than there is. Who does not fit any more waits for room."""
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
    """Everybody asks for something of everything, and for little of what there is."""
    ask = st.fixed_dictionaries({name: st.integers(1, 6) for name in RESOURCES})
    asks = st.integers(2, tenants_max).flatmap(lambda n: st.fixed_dictionaries({"abcd"[i]: ask for i in range(n)}))
    return st.tuples(st.fixed_dictionaries({name: st.integers(60, 240) for name in RESOURCES}), asks)


def test_the_example_of_the_paper_comes_out_exactly() -> None:
    """9 CPUs and 18 GB; A asks <1 CPU, 4 GB>, B asks <3 CPU, 1 GB>: three tasks and two, two thirds each."""
    capacity = {"cpu": 9, "memory": 18}
    asks = {"a": {"cpu": 1, "memory": 4}, "b": {"cpu": 3, "memory": 1}}
    for limit in (1, 2, 3, 5, 100):
        got = filled(capacity, asks, limit)
        assert got == {"a": 3, "b": 2}
        assert [got[tenant] * dominant(capacity, asks[tenant]) for tenant in "ab"] == [Fraction(2, 3)] * 2
    assert filled(capacity, {"b": asks["a"], "a": asks["b"]}) == {"b": 3, "a": 2}, "whatever they are called"


def test_a_weight_of_two_is_worth_two_tenants() -> None:
    got = filled({"cpu": 90}, {"a": {"cpu": 1}, "b": {"cpu": 1}}, weights={"a": 2})
    assert got == {"a": 60, "b": 30}


@given(clusters(), st.integers(1, 40), st.integers(1, 40))
def test_it_does_not_matter_how_many_are_taken_at_once(cluster: tuple[Ask, Asks], one: int, other: int) -> None:
    """What is in flight counts like what is placed."""
    capacity, asks = cluster
    assert filled(capacity, asks, one) == filled(capacity, asks, other)


@given(clusters())
def test_nothing_is_left_that_somebody_could_use(cluster: tuple[Ask, Asks]) -> None:
    """Pareto efficiency: nobody could get more without another getting less."""
    capacity, asks = cluster
    got = filled(capacity, asks)
    free = {name: total - sum(got[tenant] * ask[name] for tenant, ask in asks.items()) for name, total in capacity.items()}
    assert min(free.values()) >= 0
    for tenant, ask in asks.items():
        assert any(free[name] < count for name, count in ask.items()), f"one more of {tenant} fits"


@given(clusters())
def test_nobody_does_better_with_an_equal_part_of_the_cluster_for_himself(cluster: tuple[Ask, Asks]) -> None:
    """Sharing incentive. When i no longer fits, some resource has less than one ask of i left, and every other tenant's share
    is at most that of i and one replica more: n * share(i) + one replica of everybody > 1.
    """
    capacity, asks = cluster
    got = filled(capacity, asks)
    slack = sum(dominant(capacity, ask) for ask in asks.values())
    for tenant, ask in asks.items():
        assert len(asks) * got[tenant] * dominant(capacity, ask) + slack > 1


@given(clusters())
def test_nobody_would_rather_have_what_another_has(cluster: tuple[Ask, Asks]) -> None:
    """No envy. While i still fits, j is ahead of i by one replica at most. After that, j takes of what is left of the resource
    that i lacks, which is less than one ask of i: at most as many replicas as that is asks of j.
    """
    capacity, asks = cluster
    got = filled(capacity, asks)
    for i, mine in asks.items():
        for j, theirs in asks.items():
            ahead = 1 + max(ceil(Fraction(mine[name], theirs[name])) for name in capacity)
            bundle = {name: max(0, got[j] - ahead) * count for name, count in theirs.items()}
            assert min(bundle[name] // count for name, count in mine.items()) <= got[i], f"{i} envies {j}"


@given(clusters(), st.fixed_dictionaries({name: st.integers(0, 6) for name in RESOURCES}))
def test_asking_for_more_than_one_needs_gives_no_more(cluster: tuple[Ask, Asks], more: Ask) -> None:
    """Strategy-proofness, spot-checked. Until somebody no longer fits, a lie brings no more than the replicas by which the
    others may be ahead; and after that, no more than what is left of one ask of another.
    """
    capacity, asks = cluster
    assume(any(more.values()))
    honest = filled(capacity, asks)
    lie = {name: count + more[name] for name, count in asks["a"].items()}
    lied = filled(capacity, {**asks, "a": lie})
    others = [ask for tenant, ask in asks.items() if tenant != "a"]
    ahead = ceil(max(dominant(capacity, ask) for ask in others) / dominant(capacity, asks["a"]))
    rest = max(ceil(Fraction(ask[name], lie[name])) for ask in others for name in capacity)
    assert lied["a"] <= honest["a"] + ahead + 1 + rest


def test_padding_an_ask_costs_the_one_who_pads() -> None:
    capacity = {"cpu": 900, "memory": 1800}
    asks = {"a": {"cpu": 1, "memory": 4}, "b": {"cpu": 3, "memory": 1}}
    honest = filled(capacity, asks)
    padded = [filled(capacity, {**asks, "a": {"cpu": 1 + more, "memory": 4}})["a"] for more in range(6)]
    assert padded[0] == honest["a"] and padded == sorted(padded, reverse=True) and padded[-1] < honest["a"]


# The memory

CHARGES = st.lists(st.tuples(st.sampled_from(RESOURCES), st.integers(0, 500)), max_size=8)
STEPS = st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 500)), min_size=1, max_size=8)


@given(CHARGES, st.randoms(use_true_random=False), st.integers(0, 10**6))
def test_charges_of_one_instant_may_come_in_any_order(charges: list[tuple[str, int]], random: Random, later_ms: int) -> None:
    shuffled = list(charges)
    random.shuffle(shuffled)
    books = [FairShareLedger(dict.fromkeys(RESOURCES, 1000), half_life_ms=60_000) for _ in range(2)]
    for shares, order in zip(books, (charges, shuffled), strict=True):
        shares.charge("a", (("cpu", 7),), 1, 0)
        for name, count in order:
            shares.charge("a", ((name, count),), 1, 1000)
    assert books[0].share("a", later_ms) == books[1].share("a", later_ms)
    assert books[0].decayed_usage("a", later_ms) == books[1].decayed_usage("a", later_ms)


def played(steps: list[tuple[int, int]], more: int = 0) -> tuple[FairShareLedger, int, list[int]]:
    """Use goes from one value to the next, each held for so long."""
    shares, now_ms, held, seen = FairShareLedger({"cpu": 1000}, half_life_ms=60_000), 0, 0, []
    for hold_ms, use in steps:
        shares.charge("a", (("cpu", 1),), use + more - held, now_ms)
        held = use + more
        now_ms += hold_ms
        seen.append(shares.decayed_usage("a", now_ms).get("cpu", 0))
    return shares, now_ms, seen


@given(STEPS)
def test_what_is_remembered_stays_between_nothing_and_the_most_that_was_held(steps: list[tuple[int, int]]) -> None:
    _, _, seen = played(steps)
    most = [max(use for _, use in steps[: i + 1]) for i in range(len(steps))]
    assert all(0 <= one <= top for one, top in zip(seen, most, strict=True))


@given(STEPS, st.integers(1, 100), st.integers(0, 10**6))
def test_who_holds_more_at_every_instant_never_has_the_smaller_share(
    steps: list[tuple[int, int]], more: int, later_ms: int
) -> None:
    less, now_ms, _ = played(steps)
    greater, _, _ = played(steps, more)
    assert greater.share("a", now_ms + later_ms) > less.share("a", now_ms + later_ms)


@given(STEPS, st.lists(st.integers(0, 10**6), min_size=2, max_size=6))
def test_what_is_over_only_fades__and_looking_changes_nothing(steps: list[tuple[int, int]], later: list[int]) -> None:
    shares, now_ms, _ = played([*steps, (0, 0)])
    told = [shares.share("a", now_ms + ms) for ms in sorted(later)]
    assert told == sorted(told, reverse=True)
    assert [shares.share("a", now_ms + ms) for ms in sorted(later)] == told
    after, left = shares.share("a", now_ms + 60_000), shares.share("a", now_ms)
    assert abs(after - left / 2) <= 1 / 1000, "a half-life later, half is left"


@given(STEPS)
def test_without_a_half_life_only_the_present_counts(steps: list[tuple[int, int]]) -> None:
    shares, now_ms, held = FairShareLedger({"cpu": 1000}, half_life_ms=0), 0, 0
    for hold_ms, use in steps:
        shares.charge("a", (("cpu", 1),), use - held, now_ms)
        held = use
        now_ms += hold_ms
        assert shares.share("a", now_ms) == use / 1000
