"""Fault kinds on network, store, clocks, processes, backups.

Each kind of fault is a function with the rows that it plays.

A fault chooses its victim by its own lots, does its harm, and answers how to take that back; None if it found no victim. Its
lots come from the seed and its number in the plan alone, so leaving another fault out changes nothing here: that is what makes
shrinking honest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple, Protocol

from remit.simulate.scenarios import Injection, Scenario
from remit.simulate.world.event_loop import Lots
from remit.simulate.world.power_loss import CALLS_MAX, DurableService
from remit.simulate.world.processes import Process
from remit.simulate.world.store import StoreService, at_once

Heal = Callable[[], None]


class Hand(Protocol):
    """What a fault may touch: the simulation, see simulation.py."""

    def stores(self, where: str) -> list[StoreService]: ...

    def processes(self, sort: str, where: str) -> list[Process]: ...

    def everyone(self, where: str) -> list[Process]: ...

    def leader(self, scope: str) -> Process | None: ...

    def peers(self, process: Process) -> list[str]:
        """Every name that this process exchanges messages with."""
        ...

    def cut(self, source: str, target: str) -> None: ...

    def mend(self, source: str, target: str) -> None: ...

    def clog(self, source: str, target: str) -> None: ...

    def unclog(self, source: str, target: str) -> None: ...

    def slow(self, source: str, target: str, by_s: float) -> None: ...

    def later(self, delay_s: float, deed: Callable[[], None]) -> None: ...

    def once_reserved(self, scope: str, deed: Callable[[], None]) -> Heal:
        """Do it at the next reservation there, unless that is taken back before."""
        ...

    def power_cut(self, process: Process) -> None: ...

    def weather(self, **changes: float) -> Heal: ...

    def backup(self, scope: str) -> None: ...

    def declare_lost(self, scope: str) -> None: ...

    def restore(self, scope: str) -> bool: ...

    def break_plugin(self, broken: bool, /) -> None: ...


def _nothing_left() -> None:
    """It was over at once."""


Deed = Callable[[Hand, Lots, Injection], Heal | None]


class Where(StrEnum):
    """The scopes in which a kind of fault may be."""

    SCOPE = "any scope"
    NODES = "a scope that has nodes"
    NETWORK = "all scopes at once"


SECONDS: Final = "seconds"
SHARE: Final = "a share, up to 1"


class Kind(NamedTuple):
    """`rows` are those of the table of faults that it plays. `swarms`: may it be drawn at random? `store`: which it needs.
    `size`: what its size is, if it has one. `where`: where it may be. `plugin`: does it need one?
    """

    name: str
    summary: str
    rows: tuple[int, ...]
    deed: Deed
    swarms: bool = True
    scopes_min: int = 1
    store: str = ""
    size: str = ""
    where: Where = Where.SCOPE
    plugin: bool = False

    def lacks(self, scenario: Scenario) -> str:
        """What it takes that this scenario does not have; empty if nothing."""
        if len(scenario.cluster.scopes) < self.scopes_min:
            return f"{self.scopes_min} or more cluster.scopes"
        if self.store not in ("", scenario.cluster.store):
            return f'cluster.store = "{self.store}"'
        if self.plugin and not scenario.cluster.plugin:
            return "cluster.plugin = true"
        return ""

    def meets(self, scenario: Scenario) -> bool:
        return not self.lacks(scenario)


KINDS: Final[dict[str, Kind]] = {}


def fault(
    name: str,
    summary: str,
    *rows: int,
    swarms: bool = True,
    scopes_min: int = 1,
    store: str = "",
    size: str = "",
    where: Where = Where.SCOPE,
    plugin: bool = False,
) -> Callable[[Deed], Deed]:
    def register(deed: Deed) -> Deed:
        KINDS[name] = Kind(name, summary, rows, deed, swarms, scopes_min, store, size, where, plugin)
        return deed

    return register


# --------------------------------------------------------------------------------------------------------------- processes


def _killer(sort: str) -> Deed:
    def deed(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
        victim = living(lots, hand.processes(sort, one.where))
        if victim is None:
            return None
        victim.kill()
        return victim.start

    return deed


def living(lots: Lots, processes: Sequence[Process]) -> Process | None:
    """The first in a drawn order that lives: whom else another fault has killed makes no difference."""
    return next((process for process in lots.sample(processes, len(processes)) if process.alive), None)


fault("kill-server", "an authority or its standby is killed, and started again", 8, 19, 20)(_killer("server"))
fault("kill-scheduler", "a scheduler is killed between any two steps", 19, 20, where=Where.NODES)(_killer("scheduler"))
fault("kill-controllers", "the controllers are killed in the middle of their writes", 20, 31)(_killer("controllers"))
fault("kill-agent", "an agent is killed while its work runs on", 36, where=Where.NODES)(_killer("agent"))
fault("kill-people", "a client is killed while it waits for an answer", 1)(_killer("people"))


@fault("kill-leader", "the active authority is killed", 8, 19, 20)
def kill_leader(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    victim = hand.leader(lots.choice(hand.stores(one.where)).scope)
    if victim is None or not victim.alive:
        return None
    victim.kill()
    return victim.start


@fault("freeze-leader", "the active authority stands still past its term, and wakes", 15, 18)
def freeze_leader(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    victim = hand.leader(lots.choice(hand.stores(one.where)).scope)
    return None if victim is None or not victim.alive else freezing(victim)


@fault("freeze", "a process stands still, and wakes", 15, 18)
def freeze(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    victim = living(lots, [process for process in hand.everyone(one.where) if not process.name.startswith("keeper-")])
    return None if victim is None else freezing(victim)


def freezing(victim: Process) -> Heal:
    unit = victim.unit
    victim.freeze()

    def heal() -> None:
        if victim.unit is unit:
            victim.thaw()

    return heal


@fault("power-cut", "a machine with nodes loses power, and all that ran there with it", 36, where=Where.NODES)
def power_cut(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
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


def cutting(hand: Hand, ways: Sequence[tuple[str, str]]) -> Heal:
    for way in ways:
        hand.cut(*way)

    def heal() -> None:
        for way in ways:
            hand.mend(*way)

    return heal


def _both(one: str, others: Sequence[str]) -> list[tuple[str, str]]:
    return [way for other in others for way in ((one, other), (other, one))]


@fault("isolate", "a process is cut off from everybody", 9, 16, 34)
def isolate(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    victim = lots.choice(hand.everyone(one.where))
    return cutting(hand, _both(victim.name, hand.peers(victim)))


@fault("cut-node", "a node is cut off from everybody, and returns", 34, 39, where=Where.NODES)
def cut_node(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    able = hand.processes("agent", one.where)
    if not able:
        return None
    victim = lots.choice(able)
    return cutting(hand, _both(victim.name, hand.peers(victim)))


@fault("deaf-node", "a node beats and hears nothing: it seems well and starts nothing", 16, 34, swarms=False, where=Where.NODES)
def deaf_node(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    able = hand.processes("agent", one.where)
    if not able:
        return None
    victim = lots.choice(able)
    return cutting(hand, [(other, victim.name) for other in hand.peers(victim)])


@fault("all-silent", "every node falls silent at once", 35, where=Where.NODES)
def all_silent(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    ways = [way for victim in hand.processes("agent", one.where) for way in _both(victim.name, hand.peers(victim))]
    return cutting(hand, ways)


@fault("cut-one-way", "messages between two processes get through in one direction only", 16)
def cut_one_way(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    victim = lots.choice(hand.everyone(one.where))
    other = lots.choice(hand.peers(victim))
    return cutting(hand, [(victim.name, other) if lots.random() < 0.5 else (other, victim.name)])


@fault("cut-store", "the active authority cannot reach its store", 9, 16)
def cut_store(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    store = lots.choice(hand.stores(one.where))
    victim = hand.leader(store.scope)
    return None if victim is None else cutting(hand, _both(victim.name, [store.name]))


@fault("cut-scopes", "scopes cannot reach each other", 34, scopes_min=2)
def cut_scopes(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    stores = hand.stores("")
    apart = one.where or lots.choice(stores[1:]).scope
    inside = [process.name for process in hand.everyone("") if f"-{apart}-" in process.name] + [f"store/{apart}"]
    outside = [process.name for process in hand.everyone("") if process.name not in inside]
    outside += [store.name for store in stores if store.scope != apart]
    return cutting(hand, [way for name in inside for way in _both(name, outside)])


@fault(
    "region-lost",
    "a region's authority dies, and an operator above declares the region lost; it is built anew from a backup",
    10,
    34,
    swarms=False,
    scopes_min=2,
    store="memory",
    where=Where.NODES,
)
def region_lost(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    """What it had is lent to others, so it must not come back as the one that had it: only as one that was restored."""
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
def swizzle_clog(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
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


@fault("slow-links", "the ways of one process are slow", 12, 29, size=SECONDS)
def slow_links(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    victim = lots.choice(hand.everyone(one.where))
    # Replies more than requests: whoever counts a term from the reply counts too long.
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


@fault("loss", "messages are lost", 1, 32, size=SHARE, where=Where.NETWORK)
def loss(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    return hand.weather(loss=one.size or 0.01 + 0.2 * lots.random())


@fault("repeats", "messages arrive twice", 37, size=SHARE, where=Where.NETWORK)
def repeats(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    return hand.weather(repeat=one.size or 0.05 + 0.4 * lots.random())


@fault("delays", "messages overtake each other", 2, 6, size=SECONDS, where=Where.NETWORK)
def delays(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    return hand.weather(tail_chance=0.05 + 0.3 * lots.random(), tail_s=one.size or 0.1 + 2.0 * lots.random())


# ----------------------------------------------------------------------------------------------------------------- clocks


@fault("drift", "a clock runs fast or slow, within what the fence allows for", 17)
def drift(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    clock = lots.choice(hand.everyone(one.where)).machine.clock
    clock.drift(1.0 + 0.004 * (2 * lots.random() - 1))
    return _nothing_left


@fault("wall-jump", "a wall clock jumps by up to an hour", 17)
def wall_jump(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    lots.choice(hand.everyone(one.where)).machine.clock.wall_offset_ms += lots.randrange(-3_600_000, 3_600_000)
    return _nothing_left


# ----------------------------------------------------------------------------------------------------------------- stores


def _trouble(**changes: float | bool) -> Deed:
    def deed(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
        store = lots.choice(hand.stores(one.where))
        drawn: dict[str, float | bool] = {
            name: value if isinstance(value, bool) else (one.size or value * (0.2 + 0.8 * lots.random()))
            for name, value in changes.items()
        }
        return store.worsen(drawn)

    return deed


fault("answers-lost", "commits are applied, and their answers lost", 1, size=SHARE)(_trouble(lost_after=0.5))
fault("applied-late", "commits are called lost, and applied after the look that followed", 1, size=SHARE)(
    _trouble(applied_late=0.5)
)
fault("commits-lost", "commits are lost", 1, 32, size=SHARE)(_trouble(lost_before=0.5))
fault("slow-store", "every request to the store takes its time", 12, size=SECONDS)(_trouble(slow_s=4.5))
fault("no-space", "the store has no room to write", 11)(_trouble(no_space=True))
fault("quorum-lost", "the store serves nobody", 9)(_trouble(away=True))
fault("stale-reads", "observers read from a member that lags, also after a restart", 4, 30, size=SECONDS)(_trouble(lag_s=20.0))
fault("events-lost", "watch events are lost", 5, 22, size=SHARE)(_trouble(events_lost=0.4))
fault("events-late", "watch events are late", 21, 22, size=SHARE)(_trouble(events_late=0.6))
fault("events-repeated", "watch events come again", 6, size=SHARE)(_trouble(events_repeated=0.6))


@fault("leader-change", "the store elects a new leader", 8)
def leader_change(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    store = lots.choice(hand.stores(one.where))
    hand.later(1.4 + 1.3 * lots.random(), store.worsen({"away": True}))
    return _nothing_left


@fault("lagging-member", "observers fail over to a member that lags, in the middle of a watch", 6, size=SECONDS)
def lagging_member(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    store = lots.choice(hand.stores(one.where))
    heal = store.worsen({"lag_s": one.size or 15.0 * (0.2 + 0.8 * lots.random())})
    store.break_watches()
    return heal


@fault("compaction", "the history is compacted away under those who watch", 7, store="memory")
def compaction(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    store = lots.choice(hand.stores(one.where))
    away_s = 1.0 + 4.0 * lots.random()
    store.break_watches(for_s=away_s)

    def compact() -> None:
        at_once(store.store.compact(at_once(store.store.revision())))

    hand.later(away_s * 0.9, compact)
    return _nothing_left


@fault("backup", "a backup is taken", swarms=False, store="memory")
def backup(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    for store in hand.stores(one.where):
        hand.backup(store.scope)
    return _nothing_left


@fault("restore", "an old backup is put in the store's place", 10, store="memory")
def restore(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    store = lots.choice(hand.stores(one.where))
    return _nothing_left if hand.restore(store.scope) else None


@fault(
    "damage",
    "a crash damages the store's index: it stops, until an operator restores a backup",
    13,
    swarms=False,
    store="memory",
)
def damage(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    store = lots.choice(hand.stores(one.where))
    mend = store.worsen({"damaged": True})

    def heal() -> None:
        mend()
        if not hand.restore(store.scope):
            for server in hand.processes("server", store.scope):
                server.start()

    return heal


@fault("torn-write", "the power goes in the middle of a write to the store's files", 13, swarms=False, store="sqlite")
def torn_write(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    able = [store for store in hand.stores(one.where) if isinstance(store, DurableService)]
    return lots.choice(able).cut_power(1 + lots.randrange(CALLS_MAX)) if able else None
