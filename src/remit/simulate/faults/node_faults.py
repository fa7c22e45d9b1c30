"""Fault kinds on agents, keepers, disks, schedulers.

More kinds of fault; what one is: faults.py.

A keeper that stands still keeps no fence. While its agent renews there is none to keep; the two at once are what no process on
that machine can help against, so nobody draws them together.

More kinds of fault; what a fault is, and all others: faults.py.
"""

from __future__ import annotations

from remit.simulate.faults.kinds import SECONDS, Hand, Heal, Where, cutting, fault, freezing, living
from remit.simulate.scenarios import Injection
from remit.simulate.world.event_loop import Lots
from remit.simulate.world.processes import Machine, Process


def _one(hand: Hand, lots: Lots, one: Injection, sort: str) -> Process | None:
    return living(lots, hand.processes(sort, one.where))


@fault("freeze-agent", "an agent's event loop stands still while its keeper runs on", 18, swarms=False, where=Where.NODES)
def freeze_agent(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    victim = _one(hand, lots, one, "agent")
    return None if victim is None else freezing(victim)


@fault("freeze-keeper", "a keeper stands still while its agent runs on", 18, 37, swarms=False, where=Where.NODES)
def freeze_keeper(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    victim = _one(hand, lots, one, "keeper")
    return None if victim is None else freezing(victim)


@fault("kill-keeper", "a keeper is killed, and what must not outlive it goes with it", 36, swarms=False, where=Where.NODES)
def kill_keeper(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    victim = _one(hand, lots, one, "keeper")
    if victim is None:
        return None
    victim.kill()
    return victim.start


@fault("kill-both", "an agent and its keeper are killed at once, and started again", 36, swarms=False, where=Where.NODES)
def kill_both(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    able = hand.processes("agent", one.where)
    if not able:
        return None
    machine = lots.choice(able).machine
    victims = [process for process in hand.everyone("") if process.machine is machine]
    for victim in victims:
        victim.kill()

    def heal() -> None:
        for victim in victims:
            victim.start()

    return heal


@fault("slow-starts", "processes take long to start on a machine", 37, 38, swarms=False, size=SECONDS, where=Where.NODES)
def slow_starts(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    machine = _machine(hand, lots, one)
    if machine is None:
        return None
    by_s = one.size or 1.0 + 20.0 * lots.random()
    machine.slow_start_s += by_s

    def heal() -> None:
        machine.slow_start_s = round(machine.slow_start_s - by_s, 6)

    return heal


@fault("slow-journal", "the disk of a keeper takes long to write", 12, 14, swarms=False, size=SECONDS, where=Where.NODES)
def slow_journal(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    machine = _machine(hand, lots, one)
    if machine is None:
        return None
    by_ms = round(1000 * (one.size or 0.5 + 8.0 * lots.random()))
    machine.slow_disk_ms += by_ms

    def heal() -> None:
        machine.slow_disk_ms -= by_ms

    return heal


@fault("bad-journal", "the disk of a keeper is full, fails, or forces nothing", 14, swarms=False, where=Where.NODES)
def bad_journal(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    machine = _machine(hand, lots, one)
    if machine is None:
        return None
    how = lots.choice(("full", "failing", "unsettling"))
    setattr(machine.disk, how, True)

    def heal() -> None:
        setattr(machine.disk, how, False)

    return heal


@fault("silent-zone", "the nodes of one zone fall silent at once", 34, 35, swarms=False, where=Where.NODES)
def silent_zone(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    """A node's zone follows from its number, and so does its agent: of agents whose number divides by three every
    third has the nodes of one zone.
    """
    able = hand.processes("agent", one.where)
    if not able:
        return None
    first = int(lots.choice(able).name.rsplit("-", 1)[1]) % 3
    return cutting(
        hand,
        [
            way
            for victim in able
            if int(victim.name.rsplit("-", 1)[1]) % 3 == first
            for other in hand.peers(victim)
            for way in ((victim.name, other), (other, victim.name))
        ],
    )


def _machine(hand: Hand, lots: Lots, one: Injection) -> Machine | None:
    able = hand.processes("keeper", one.where)
    return lots.choice(able).machine if able else None


# ------------------------------------------------------------------------------------------------------------------ disks


@fault("disk-full", "a machine's disk is full", 11, 14)
def disk_full(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    disk = lots.choice(hand.everyone(one.where)).machine.disk
    disk.full = True

    def heal() -> None:
        disk.full = False

    return heal


@fault("disk-failing", "a machine's disk answers with errors", 14)
def disk_failing(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    disk = lots.choice(hand.everyone(one.where)).machine.disk
    disk.failing = True

    def heal() -> None:
        disk.failing = False

    return heal


# ------------------------------------------------------------------------------------------------------------- schedulers


@fault("freeze-scheduler", "a scheduler stands still with claims under way, and wakes", 15, 18, swarms=False, where=Where.NODES)
def freeze_scheduler(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    victim = living(lots, hand.processes("scheduler", one.where))
    return None if victim is None else freezing(victim)


@fault(
    "kill-reserving",
    "a scope's schedulers are killed the moment one of them has a reservation",
    19,
    swarms=False,
    where=Where.NODES,
)
def kill_reserving(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    """Whoever waits for that moment in vain has done no harm, and still struck: when it comes is for the schedulers to say."""
    able = hand.processes("scheduler", one.where)
    if not able:
        return None
    victims = hand.processes("scheduler", lots.choice(able).name.split("-")[1])
    killed: list[Process] = []

    def kill() -> None:
        for victim in victims:
            if victim.alive:
                victim.kill()
                killed.append(victim)

    spare = hand.once_reserved(victims[0].name.split("-")[1], kill)

    def heal() -> None:
        spare()
        for victim in killed:
            victim.start()

    return heal


@fault(
    "unanswered",
    "a scheduler's asks arrive unanswered, or do not arrive: it cannot tell",
    1,
    3,
    swarms=False,
    where=Where.NODES,
)
def unanswered(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    able = hand.processes("scheduler", one.where)
    if not able:
        return None
    victim = lots.choice(able).name
    scope = victim.split("-")[1]
    ways = [(server.name, victim) for server in hand.processes("server", scope)]
    return cutting(hand, ways if lots.random() < 0.5 else [(victim, server) for server, victim in ways])


@fault("plugin-fails", "a filter that others wrote for schedulers fails", 26, swarms=False, plugin=True)
def plugin_fails(hand: Hand, lots: Lots, one: Injection) -> Heal | None:
    hand.break_plugin(True)
    return lambda: hand.break_plugin(False)
