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

from remit.simulate.scenario_types import Injection, Scenario
from remit.simulate.world.power_loss import POWER_CUT_CALLS_MAX, SqliteStoreService
from remit.simulate.world.processes import SimProcess
from remit.simulate.world.random_streams import Random
from remit.simulate.world.store import StoreService, run_sync

Heal = Callable[[], None]


class FaultTarget(Protocol):
    """The operations that faults use to act on a run; implemented by simulation.py."""

    def stores(self, where: str) -> list[StoreService]: ...

    def processes(self, kind: str, where: str) -> list[SimProcess]: ...

    def all_processes(self, where: str) -> list[SimProcess]: ...

    def leader(self, scope: str) -> SimProcess | None: ...

    def peers(self, process: SimProcess) -> list[str]:
        """All names that this process exchanges messages with."""
        ...

    def cut(self, source: str, target: str) -> None: ...

    def heal_cut(self, source: str, target: str) -> None: ...

    def clog(self, source: str, target: str) -> None: ...

    def unclog(self, source: str, target: str) -> None: ...

    def slow(self, source: str, target: str, by_s: float) -> None: ...

    def later(self, delay_s: float, action: Callable[[], None]) -> None: ...

    def on_next_reservation(self, scope: str, action: Callable[[], None]) -> Heal:
        """Call `action` at the next reservation in this scope, unless it is cancelled before."""
        ...

    def power_cut(self, process: SimProcess) -> None: ...

    def degrade_network(self, **changes: float) -> Heal: ...

    def backup(self, scope: str) -> None: ...

    def declare_lost(self, scope: str) -> None: ...

    def restore(self, scope: str) -> bool: ...

    def set_plugin_broken(self, broken: bool, /) -> None: ...


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
    inject: FaultFunction
    swarms: bool = True
    scopes_min: int = 1
    store: str = ""
    size: str = ""
    where: FaultScope = FaultScope.SCOPE
    plugin: bool = False

    def missing_requirement(self, scenario: Scenario) -> str:
        """A setting that this fault requires and the scenario does not have; empty if nothing is missing."""
        if len(scenario.cluster.scopes) < self.scopes_min:
            return f"{self.scopes_min} or more cluster.scopes"
        if self.store not in ("", scenario.cluster.store):
            return f'cluster.store = "{self.store}"'
        if self.plugin and not scenario.cluster.plugin:
            return "cluster.plugin = true"
        return ""

    def is_supported_by(self, scenario: Scenario) -> bool:
        return not self.missing_requirement(scenario)


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
    def register(inject: FaultFunction) -> FaultFunction:
        KINDS[name] = FaultKind(name, summary, rows, inject, swarms, scopes_min, store, size, where, plugin)
        return inject

    return register


# --------------------------------------------------------------------------------------------------------------- processes


def _kill_fault(kind: str) -> FaultFunction:
    def inject(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
        victim = pick_alive(rng, target.processes(kind, injection.where))
        if victim is None:
            return None
        victim.kill()
        return victim.start

    return inject


def pick_alive(rng: Random, processes: Sequence[SimProcess]) -> SimProcess | None:
    """The first live process in a drawn order. The order does not depend on which processes other faults have killed."""
    return next((process for process in rng.sample(processes, len(processes)) if process.alive), None)


fault("kill-server", "an authority server or a standby is killed and restarted", 8, 19, 20)(_kill_fault("server"))
fault("kill-scheduler", "a scheduler is killed between any two steps", 19, 20, where=FaultScope.NODES)(_kill_fault("scheduler"))
fault("kill-controllers", "the controllers are killed in the middle of their writes", 20, 31)(_kill_fault("controllers"))
fault("kill-agent", "an agent is killed while its work keeps running", 36, where=FaultScope.NODES)(_kill_fault("agent"))
fault("kill-people", "a client is killed while it waits for an answer", 1)(_kill_fault("people"))


@fault("kill-leader", "the active authority is killed", 8, 19, 20)
def kill_leader(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    victim = target.leader(rng.choice(target.stores(injection.where)).scope)
    if victim is None or not victim.alive:
        return None
    victim.kill()
    return victim.start


@fault("freeze-leader", "the active authority is frozen past its lease, and resumes", 15, 18)
def freeze_leader(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    victim = target.leader(rng.choice(target.stores(injection.where)).scope)
    return None if victim is None or not victim.alive else freeze_process(victim)


@fault("freeze", "a process is frozen, and resumes", 15, 18)
def freeze(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    victim = pick_alive(
        rng, [process for process in target.all_processes(injection.where) if not process.name.startswith("keeper-")]
    )
    return None if victim is None else freeze_process(victim)


def freeze_process(victim: SimProcess) -> Heal:
    unit = victim.unit
    victim.freeze()

    def heal() -> None:
        if victim.unit is unit:
            victim.thaw()

    return heal


@fault("power-cut", "a machine with nodes loses power, and everything that runs on it", 36, where=FaultScope.NODES)
def power_cut(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    candidates = target.processes("agent", injection.where)
    if not candidates:
        return None
    victim = rng.choice(candidates)
    target.power_cut(victim)
    others = [process for process in target.all_processes("") if process.machine is victim.machine]

    def heal() -> None:
        for process in others:
            process.start()

    return heal


# ---------------------------------------------------------------------------------------------------------------- network


def cut_paths(target: FaultTarget, paths: Sequence[tuple[str, str]]) -> Heal:
    for path in paths:
        target.cut(*path)

    def heal() -> None:
        for path in paths:
            target.heal_cut(*path)

    return heal


def _both_directions(name: str, others: Sequence[str]) -> list[tuple[str, str]]:
    return [path for other in others for path in ((name, other), (other, name))]


@fault("isolate", "a process is partitioned from all others", 9, 16, 34)
def isolate(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    victim = rng.choice(target.all_processes(injection.where))
    return cut_paths(target, _both_directions(victim.name, target.peers(victim)))


@fault("cut-node", "a node is partitioned from all others, and returns", 34, 39, where=FaultScope.NODES)
def cut_node(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    candidates = target.processes("agent", injection.where)
    if not candidates:
        return None
    victim = rng.choice(candidates)
    return cut_paths(target, _both_directions(victim.name, target.peers(victim)))


@fault(
    "deaf-node",
    "a node sends heartbeats but receives nothing: it looks healthy and starts nothing",
    16,
    34,
    swarms=False,
    where=FaultScope.NODES,
)
def deaf_node(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    candidates = target.processes("agent", injection.where)
    if not candidates:
        return None
    victim = rng.choice(candidates)
    return cut_paths(target, [(other, victim.name) for other in target.peers(victim)])


@fault("all-silent", "all nodes become silent at once", 35, where=FaultScope.NODES)
def all_silent(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    paths = [
        path
        for victim in target.processes("agent", injection.where)
        for path in _both_directions(victim.name, target.peers(victim))
    ]
    return cut_paths(target, paths)


@fault("cut-one-way", "messages between two processes get through in one direction only", 16)
def cut_one_way(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    victim = rng.choice(target.all_processes(injection.where))
    other = rng.choice(target.peers(victim))
    return cut_paths(target, [(victim.name, other) if rng.random() < 0.5 else (other, victim.name)])


@fault("cut-store", "the active authority cannot reach its store", 9, 16)
def cut_store(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    store = rng.choice(target.stores(injection.where))
    victim = target.leader(store.scope)
    return None if victim is None else cut_paths(target, _both_directions(victim.name, [store.name]))


@fault("cut-scopes", "one scope is partitioned from the others", 34, scopes_min=2)
def cut_scopes(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    stores = target.stores("")
    apart = injection.where or rng.choice(stores[1:]).scope
    inside = [process.name for process in target.all_processes("") if f"-{apart}-" in process.name] + [f"store/{apart}"]
    outside = [process.name for process in target.all_processes("") if process.name not in inside]
    outside += [store.name for store in stores if store.scope != apart]
    return cut_paths(target, [path for name in inside for path in _both_directions(name, outside)])


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
def region_lost(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    """The capacity of the region has been granted to others, so the region must return as a restored incarnation, not as the
    one that held this capacity.
    """
    apart = injection.where or rng.choice(target.stores("")[1:]).scope
    servers = target.processes("server", apart)
    target.backup(apart)
    for server in servers:
        server.kill()
    target.later(injection.lasts_s / 4, partial(target.declare_lost, apart))

    def heal() -> None:
        if not target.restore(apart):
            for server in servers:
                server.start()

    return heal


@fault("swizzle-clog", "links are clogged one by one, and opened in another order", 43)
def swizzle_clog(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    paths = [(process.name, other) for process in target.all_processes(injection.where) for other in target.peers(process)]
    chosen = rng.sample(paths, min(len(paths), 3 + rng.randrange(12)))
    step_s = injection.lasts_s / (2 * len(chosen))
    waiting, clogged = dict.fromkeys(chosen), dict[tuple[str, str], None]()

    def clog(path: tuple[str, str]) -> None:
        if path in waiting:
            del waiting[path]
            clogged[path] = None
            target.clog(*path)

    def unclog(path: tuple[str, str]) -> None:
        if path in clogged:
            del clogged[path]
            target.unclog(*path)

    for index, path in enumerate(chosen):
        target.later(index * step_s, partial(clog, path))
    for index, path in enumerate(rng.sample(chosen, len(chosen))):
        target.later((len(chosen) + index) * step_s, partial(unclog, path))

    def heal() -> None:
        waiting.clear()
        for path in tuple(clogged):
            unclog(path)

    return heal


@fault("slow-links", "messages to one process are delayed", 12, 29, size=SECONDS)
def slow_links(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    victim = rng.choice(target.all_processes(injection.where))
    # Replies are delayed more often than requests: a lease that is counted from the reply instead of the request lasts too
    # long.
    others, by_s = target.peers(victim), injection.size or 0.2 + 3.0 * rng.random()
    paths = [(other, victim.name) for other in others] + (
        [(victim.name, other) for other in others] if rng.random() < 0.3 else []
    )
    for path in paths:
        target.slow(*path, by_s)

    def heal() -> None:
        for path in paths:
            target.slow(*path, -by_s)

    return heal


@fault("loss", "messages are lost", 1, 32, size=SHARE, where=FaultScope.NETWORK)
def loss(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    return target.degrade_network(loss=injection.size or 0.01 + 0.2 * rng.random())


@fault("repeats", "messages arrive twice", 37, size=SHARE, where=FaultScope.NETWORK)
def repeats(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    return target.degrade_network(repeat=injection.size or 0.05 + 0.4 * rng.random())


@fault("delays", "messages are delayed and reordered", 2, 6, size=SECONDS, where=FaultScope.NETWORK)
def delays(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    return target.degrade_network(tail_chance=0.05 + 0.3 * rng.random(), tail_s=injection.size or 0.1 + 2.0 * rng.random())


# ----------------------------------------------------------------------------------------------------------------- clocks


@fault("drift", "a clock runs fast or slow, within the drift that fencing allows for", 17)
def drift(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    clock = rng.choice(target.all_processes(injection.where)).machine.clock
    clock.drift(1.0 + 0.004 * (2 * rng.random() - 1))
    return _no_heal


@fault("wall-jump", "a wall clock jumps by up to an hour", 17)
def wall_jump(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    rng.choice(target.all_processes(injection.where)).machine.clock.wall_offset_ms += rng.randrange(-3_600_000, 3_600_000)
    return _no_heal


# ----------------------------------------------------------------------------------------------------------------- stores


def _store_fault(**changes: float | bool) -> FaultFunction:
    def inject(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
        store = rng.choice(target.stores(injection.where))
        drawn: dict[str, float | bool] = {
            name: value if isinstance(value, bool) else (injection.size or value * (0.2 + 0.8 * rng.random()))
            for name, value in changes.items()
        }
        return store.degrade(drawn)

    return inject


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
def leader_change(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    store = rng.choice(target.stores(injection.where))
    target.later(1.4 + 1.3 * rng.random(), store.degrade({"away": True}))
    return _no_heal


@fault("lagging-member", "observers fail over to a member that lags, in the middle of a watch", 6, size=SECONDS)
def lagging_member(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    store = rng.choice(target.stores(injection.where))
    heal = store.degrade({"lag_s": injection.size or 15.0 * (0.2 + 0.8 * rng.random())})
    store.break_watches()
    return heal


@fault("compaction", "the history is compacted while watches are broken", 7, store="memory")
def compaction(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    store = rng.choice(target.stores(injection.where))
    away_s = 1.0 + 4.0 * rng.random()
    store.break_watches(for_s=away_s)

    def compact() -> None:
        run_sync(store.store.compact(run_sync(store.store.revision())))

    target.later(away_s * 0.9, compact)
    return _no_heal


@fault("backup", "a backup is taken", swarms=False, store="memory")
def backup(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    for store in target.stores(injection.where):
        target.backup(store.scope)
    return _no_heal


@fault("restore", "an old backup replaces the store", 10, store="memory")
def restore(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    store = rng.choice(target.stores(injection.where))
    return _no_heal if target.restore(store.scope) else None


@fault(
    "damage",
    "a crash corrupts the index of the store; it stops until an operator restores a backup",
    13,
    swarms=False,
    store="memory",
)
def damage(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    store = rng.choice(target.stores(injection.where))
    mend = store.degrade({"damaged": True})

    def heal() -> None:
        mend()
        if not target.restore(store.scope):
            for server in target.processes("server", store.scope):
                server.start()

    return heal


@fault("torn-write", "the power is cut in the middle of a write to the store's files", 13, swarms=False, store="sqlite")
def torn_write(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    candidates = [store for store in target.stores(injection.where) if isinstance(store, SqliteStoreService)]
    return rng.choice(candidates).cut_power(1 + rng.randrange(POWER_CUT_CALLS_MAX)) if candidates else None
