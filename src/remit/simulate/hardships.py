"""What can go wrong between an agent, its keeper and what they run? More kinds of fault; what one is: faults.py.

A keeper that stands still keeps no fence. While its agent renews there is none to keep; the two at once are what no process on
that machine can help against, so nobody draws them together.
"""

from __future__ import annotations

from remit.simulate.faults import SECONDS, Hand, Heal, Where, cutting, fault, freezing, living
from remit.simulate.lots import Lots
from remit.simulate.processes import Machine, Process
from remit.simulate.scenarios import Injection


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
