"""Fault kinds on network, store, clocks, processes, backups.

A fault kind is a function that chooses a victim, injects the fault and returns a function that heals it; or None if it found
no victim. Its random stream depends only on the seed and the number of the fault in the schedule. Removing another fault
does not change it, which shrinking relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple, Protocol

from remit.simulate.scenarios import Injection, Scenario
from remit.simulate.world.power_loss import POWER_CUT_CALLS_MAX, SqliteStoreService
from remit.simulate.world.processes import SimProcess
from remit.simulate.world.random_streams import Random
from remit.simulate.world.store import StoreService, run_sync

Heal = Callable[[], None]


class FaultTarget(Protocol):
    """The operations that faults use to act on a run; implemented by simulation.py."""

    def stores(self, where: str) -> list[StoreService]: ...

    def processes(self, sort: str, where: str) -> list[SimProcess]: ...

    def everyone(self, where: str) -> list[SimProcess]: ...

    def leader(self, scope: str) -> SimProcess | None: ...

    def peers(self, process: SimProcess) -> list[str]:
        """All names that this process exchanges messages with."""
        ...

    def cut(self, source: str, target: str) -> None: ...

    def mend(self, source: str, target: str) -> None: ...

    def clog(self, source: str, target: str) -> None: ...

    def unclog(self, source: str, target: str) -> None: ...

    def slow(self, source: str, target: str, by_s: float) -> None: ...

    def later(self, delay_s: float, deed: Callable[[], None]) -> None: ...

    def once_reserved(self, scope: str, deed: Callable[[], None]) -> Heal:
        """Call `deed` at the next reservation in this scope, unless it is cancelled before."""
        ...

    def power_cut(self, process: SimProcess) -> None: ...

    def weather(self, **changes: float) -> Heal: ...

    def backup(self, scope: str) -> None: ...

    def declare_lost(self, scope: str) -> None: ...

    def restore(self, scope: str) -> bool: ...

    def break_plugin(self, broken: bool, /) -> None: ...


def _no_heal() -> None:
    """Nothing to heal: the fault ended at once."""


FaultFunction = Callable[[FaultTarget, Random, Injection], Heal | None]


class FaultScope(StrEnum):
    """The scopes that a fault kind can affect."""

    SCOPE = "any one scope"
    NODES = "one scope that has nodes"
    NETWORK = "all scopes at once"


SECONDS: Final = "seconds"
SHARE: Final = "a share from 0 to 1"


class FaultKind(NamedTuple):
    """A registered fault kind.

    `rows` are the rows of docs/faults.md that it covers. `swarms`: may be drawn in swarm scenarios. `store`: the store it
    requires. `size`: the meaning of its size, if it has one. `where`: the scopes it can affect. `plugin`: requires a
    plug-in.
    """

    name: str
    summary: str
    rows: tuple[int, ...]
    deed: FaultFunction
    swarms: bool = True
    scopes_min: int = 1
    store: str = ""
    size: str = ""
    where: FaultScope = FaultScope.SCOPE
    plugin: bool = False

    def lacks(self, scenario: Scenario) -> str:
        """A setting that this fault requires and the scenario does not have; empty if nothing is missing."""
        if len(scenario.cluster.scopes) < self.scopes_min:
            return f"{self.scopes_min} or more cluster.scopes"
        if self.store not in ("", scenario.cluster.store):
            return f'cluster.store = "{self.store}"'
        if self.plugin and not scenario.cluster.plugin:
            return "cluster.plugin = true"
        return ""

    def meets(self, scenario: Scenario) -> bool:
        return not self.lacks(scenario)


KINDS: Final[dict[str, FaultKind]] = {}


def fault(
    name: str,
    summary: str,
    *rows: int,
    swarms: bool = True,
    scopes_min: int = 1,
    store: str = "",
    size: str = "",
    where: FaultScope = FaultScope.SCOPE,
    plugin: bool = False,
) -> Callable[[FaultFunction], FaultFunction]:
    def register(deed: FaultFunction) -> FaultFunction:
        KINDS[name] = FaultKind(name, summary, rows, deed, swarms, scopes_min, store, size, where, plugin)
        return deed

    return register


# --------------------------------------------------------------------------------------------------------------- processes


def _kill_fault(sort: str) -> FaultFunction:
    def deed(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
        victim = pick_alive(lots, hand.processes(sort, one.where))
        if victim is None:
            return None
        victim.kill()
        return victim.start

    return deed


def pick_alive(lots: Random, processes: Sequence[SimProcess]) -> SimProcess | None:
    """The first live process in a drawn order. The order does not depend on which processes other faults have killed."""
    return next((process for process in lots.sample(processes, len(processes)) if process.alive), None)


fault("kill-server", "an authority server or a standby is killed and restarted", 8, 19, 20)(_kill_fault("server"))
fault("kill-scheduler", "a scheduler is killed between any two steps", 19, 20, where=FaultScope.NODES)(_kill_fault("scheduler"))
fault("kill-controllers", "the controllers are killed in the middle of their writes", 20, 31)(_kill_fault("controllers"))
fault("kill-agent", "an agent is killed while its work keeps running", 36, where=FaultScope.NODES)(_kill_fault("agent"))
fault("kill-people", "a client is killed while it waits for an answer", 1)(_kill_fault("people"))


@fault("kill-leader", "the active authority is killed", 8, 19, 20)
def kill_leader(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    victim = hand.leader(lots.choice(hand.stores(one.where)).scope)
    if victim is None or not victim.alive:
        return None
    victim.kill()
    return victim.start


@fault("freeze-leader", "the active authority is frozen past its lease, and resumes", 15, 18)
def freeze_leader(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    victim = hand.leader(lots.choice(hand.stores(one.where)).scope)
    return None if victim is None or not victim.alive else freeze_process(victim)


@fault("freeze", "a process is frozen, and resumes", 15, 18)
def freeze(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    victim = pick_alive(lots, [process for process in hand.everyone(one.where) if not process.name.startswith("keeper-")])
    return None if victim is None else freeze_process(victim)


def freeze_process(victim: SimProcess) -> Heal:
    unit = victim.unit
    victim.freeze()

    def heal() -> None:
        if victim.unit is unit:
            victim.thaw()

    return heal


@fault("power-cut", "a machine with nodes loses power, and everything that runs on it", 36, where=FaultScope.NODES)
def power_cut(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    able = hand.processes("agent", one.where)
    if not able:
        return None
    victim = lots.choice(able)
    hand.power_cut(victim)
    others = [process for process in hand.everyone("") if process.machine is victim.machine]

    def heal() -> None:
        for process in others:
            process.start()

    return heal


# ---------------------------------------------------------------------------------------------------------------- network


def cut_paths(hand: FaultTarget, ways: Sequence[tuple[str, str]]) -> Heal:
    for way in ways:
        hand.cut(*way)

    def heal() -> None:
        for way in ways:
            hand.mend(*way)

    return heal


def _both_directions(one: str, others: Sequence[str]) -> list[tuple[str, str]]:
    return [way for other in others for way in ((one, other), (other, one))]


@fault("isolate", "a process is partitioned from all others", 9, 16, 34)
def isolate(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    victim = lots.choice(hand.everyone(one.where))
    return cut_paths(hand, _both_directions(victim.name, hand.peers(victim)))


@fault("cut-node", "a node is partitioned from all others, and returns", 34, 39, where=FaultScope.NODES)
def cut_node(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    able = hand.processes("agent", one.where)
    if not able:
        return None
    victim = lots.choice(able)
    return cut_paths(hand, _both_directions(victim.name, hand.peers(victim)))


@fault(
    "deaf-node",
    "a node sends heartbeats but receives nothing: it looks healthy and starts nothing",
    16,
    34,
    swarms=False,
    where=FaultScope.NODES,
)
def deaf_node(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    able = hand.processes("agent", one.where)
    if not able:
        return None
    victim = lots.choice(able)
    return cut_paths(hand, [(other, victim.name) for other in hand.peers(victim)])


@fault("all-silent", "all nodes become silent at once", 35, where=FaultScope.NODES)
def all_silent(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    ways = [way for victim in hand.processes("agent", one.where) for way in _both_directions(victim.name, hand.peers(victim))]
    return cut_paths(hand, ways)


@fault("cut-one-way", "messages between two processes get through in one direction only", 16)
def cut_one_way(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    victim = lots.choice(hand.everyone(one.where))
    other = lots.choice(hand.peers(victim))
    return cut_paths(hand, [(victim.name, other) if lots.random() < 0.5 else (other, victim.name)])


@fault("cut-store", "the active authority cannot reach its store", 9, 16)
def cut_store(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    store = lots.choice(hand.stores(one.where))
    victim = hand.leader(store.scope)
    return None if victim is None else cut_paths(hand, _both_directions(victim.name, [store.name]))


@fault("cut-scopes", "one scope is partitioned from the others", 34, scopes_min=2)
def cut_scopes(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    stores = hand.stores("")
    apart = one.where or lots.choice(stores[1:]).scope
    inside = [process.name for process in hand.everyone("") if f"-{apart}-" in process.name] + [f"store/{apart}"]
    outside = [process.name for process in hand.everyone("") if process.name not in inside]
    outside += [store.name for store in stores if store.scope != apart]
    return cut_paths(hand, [way for name in inside for way in _both_directions(name, outside)])


@fault(
    "region-lost",
    "the authority of a region fails, an operator of the parent scope declares it lost, and it is rebuilt from a backup",
    10,
    34,
    swarms=False,
    scopes_min=2,
    store="memory",
    where=FaultScope.NODES,
)
def region_lost(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    """The capacity of the region has been granted to others, so the region must return as a restored incarnation, not as the
    one that held this capacity.
    """
    apart = one.where or lots.choice(hand.stores("")[1:]).scope
    servers = hand.processes("server", apart)
    hand.backup(apart)
    for server in servers:
        server.kill()
    hand.later(one.lasts_s / 4, partial(hand.declare_lost, apart))

    def heal() -> None:
        if not hand.restore(apart):
            for server in servers:
                server.start()

    return heal


@fault("swizzle-clog", "links are clogged one by one, and opened in another order", 43)
def swizzle_clog(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    ways = [(process.name, other) for process in hand.everyone(one.where) for other in hand.peers(process)]
    chosen = lots.sample(ways, min(len(ways), 3 + lots.randrange(12)))
    step_s = one.lasts_s / (2 * len(chosen))
    waiting, clogged = dict.fromkeys(chosen), dict[tuple[str, str], None]()

    def clog(way: tuple[str, str]) -> None:
        if way in waiting:
            del waiting[way]
            clogged[way] = None
            hand.clog(*way)

    def unclog(way: tuple[str, str]) -> None:
        if way in clogged:
            del clogged[way]
            hand.unclog(*way)

    for index, way in enumerate(chosen):
        hand.later(index * step_s, partial(clog, way))
    for index, way in enumerate(lots.sample(chosen, len(chosen))):
        hand.later((len(chosen) + index) * step_s, partial(unclog, way))

    def heal() -> None:
        waiting.clear()
        for way in tuple(clogged):
            unclog(way)

    return heal


@fault("slow-links", "messages to one process are delayed", 12, 29, size=SECONDS)
def slow_links(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    victim = lots.choice(hand.everyone(one.where))
    # Replies are delayed more often than requests: a lease that is counted from the reply instead of the request lasts too
    # long.
    others, by_s = hand.peers(victim), one.size or 0.2 + 3.0 * lots.random()
    ways = [(other, victim.name) for other in others] + (
        [(victim.name, other) for other in others] if lots.random() < 0.3 else []
    )
    for way in ways:
        hand.slow(*way, by_s)

    def heal() -> None:
        for way in ways:
            hand.slow(*way, -by_s)

    return heal


@fault("loss", "messages are lost", 1, 32, size=SHARE, where=FaultScope.NETWORK)
def loss(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    return hand.weather(loss=one.size or 0.01 + 0.2 * lots.random())


@fault("repeats", "messages arrive twice", 37, size=SHARE, where=FaultScope.NETWORK)
def repeats(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    return hand.weather(repeat=one.size or 0.05 + 0.4 * lots.random())


@fault("delays", "messages are delayed and reordered", 2, 6, size=SECONDS, where=FaultScope.NETWORK)
def delays(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    return hand.weather(tail_chance=0.05 + 0.3 * lots.random(), tail_s=one.size or 0.1 + 2.0 * lots.random())


# ----------------------------------------------------------------------------------------------------------------- clocks


@fault("drift", "a clock runs fast or slow, within the drift that fencing allows for", 17)
def drift(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    clock = lots.choice(hand.everyone(one.where)).machine.clock
    clock.drift(1.0 + 0.004 * (2 * lots.random() - 1))
    return _no_heal


@fault("wall-jump", "a wall clock jumps by up to an hour", 17)
def wall_jump(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    lots.choice(hand.everyone(one.where)).machine.clock.wall_offset_ms += lots.randrange(-3_600_000, 3_600_000)
    return _no_heal


# ----------------------------------------------------------------------------------------------------------------- stores


def _store_fault(**changes: float | bool) -> FaultFunction:
    def deed(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
        store = lots.choice(hand.stores(one.where))
        drawn: dict[str, float | bool] = {
            name: value if isinstance(value, bool) else (one.size or value * (0.2 + 0.8 * lots.random()))
            for name, value in changes.items()
        }
        return store.worsen(drawn)

    return deed


fault("answers-lost", "commits are applied and their answers are lost", 1, size=SHARE)(_store_fault(lost_after=0.5))
fault("applied-late", "commits are reported lost, and applied after the client has looked for them", 1, size=SHARE)(
    _store_fault(applied_late=0.5)
)
fault("commits-lost", "commits are lost", 1, 32, size=SHARE)(_store_fault(lost_before=0.5))
fault("slow-store", "every request to the store is slow", 12, size=SECONDS)(_store_fault(slow_s=4.5))
fault("no-space", "the store has no space to write", 11)(_store_fault(no_space=True))
fault("quorum-lost", "the store has no quorum and serves no requests", 9)(_store_fault(away=True))
fault("stale-reads", "observers read from a member that lags, also after a restart", 4, 30, size=SECONDS)(
    _store_fault(lag_s=20.0)
)
fault("events-lost", "watch events are lost", 5, 22, size=SHARE)(_store_fault(events_lost=0.4))
fault("events-late", "watch events arrive late", 21, 22, size=SHARE)(_store_fault(events_late=0.6))
fault("events-repeated", "watch events are repeated", 6, size=SHARE)(_store_fault(events_repeated=0.6))


@fault("leader-change", "the store elects a new leader", 8)
def leader_change(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    store = lots.choice(hand.stores(one.where))
    hand.later(1.4 + 1.3 * lots.random(), store.worsen({"away": True}))
    return _no_heal


@fault("lagging-member", "observers fail over to a member that lags, in the middle of a watch", 6, size=SECONDS)
def lagging_member(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    store = lots.choice(hand.stores(one.where))
    heal = store.worsen({"lag_s": one.size or 15.0 * (0.2 + 0.8 * lots.random())})
    store.break_watches()
    return heal


@fault("compaction", "the history is compacted while watches are broken", 7, store="memory")
def compaction(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    store = lots.choice(hand.stores(one.where))
    away_s = 1.0 + 4.0 * lots.random()
    store.break_watches(for_s=away_s)

    def compact() -> None:
        run_sync(store.store.compact(run_sync(store.store.revision())))

    hand.later(away_s * 0.9, compact)
    return _no_heal


@fault("backup", "a backup is taken", swarms=False, store="memory")
def backup(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    for store in hand.stores(one.where):
        hand.backup(store.scope)
    return _no_heal


@fault("restore", "an old backup replaces the store", 10, store="memory")
def restore(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    store = lots.choice(hand.stores(one.where))
    return _no_heal if hand.restore(store.scope) else None


@fault(
    "damage",
    "a crash corrupts the index of the store; it stops until an operator restores a backup",
    13,
    swarms=False,
    store="memory",
)
def damage(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    store = lots.choice(hand.stores(one.where))
    mend = store.worsen({"damaged": True})

    def heal() -> None:
        mend()
        if not hand.restore(store.scope):
            for server in hand.processes("server", store.scope):
                server.start()

    return heal


@fault("torn-write", "the power is cut in the middle of a write to the store's files", 13, swarms=False, store="sqlite")
def torn_write(hand: FaultTarget, lots: Random, one: Injection) -> Heal | None:
    able = [store for store in hand.stores(one.where) if isinstance(store, SqliteStoreService)]
    return lots.choice(able).cut_power(1 + lots.randrange(POWER_CUT_CALLS_MAX)) if able else None
