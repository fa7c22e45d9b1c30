"""What can go wrong with one disk, or with one scheduler? More kinds of fault; what a fault is, and all others: faults.py."""

from __future__ import annotations

from remit.simulate.faults import Hand, Heal, Where, cutting, fault, freezing, living
from remit.simulate.lots import Lots
from remit.simulate.processes import Process
from remit.simulate.scenarios import Injection

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
