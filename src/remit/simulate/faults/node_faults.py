"""Fault kinds on agents, keepers, disks, schedulers.

A frozen keeper does not enforce the fence of its processes. That is safe while its agent renews the lease, because no fence
is due then. No process on the machine could enforce a fence if both were frozen at once, so the keeper faults are not drawn
in swarm scenarios.
"""

from __future__ import annotations

from remit.simulate.faults.kinds import SECONDS, FaultScope, FaultTarget, Heal, cut_paths, fault, freeze_process, pick_alive
from remit.simulate.scenario_types import Injection
from remit.simulate.world.processes import SimMachine, SimProcess
from remit.simulate.world.random_streams import Random


def _pick_process(target: FaultTarget, rng: Random, injection: Injection, kind: str) -> SimProcess | None:
    return pick_alive(rng, target.processes(kind, injection.where))


@fault("freeze-agent", "an agent is frozen while its keeper continues", 18, swarms=False, where=FaultScope.NODES)
def freeze_agent(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    victim = _pick_process(target, rng, injection, "agent")
    return None if victim is None else freeze_process(victim)


@fault("freeze-keeper", "a keeper is frozen while its agent continues", 18, 37, swarms=False, where=FaultScope.NODES)
def freeze_keeper(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    victim = _pick_process(target, rng, injection, "keeper")
    return None if victim is None else freeze_process(victim)


@fault(
    "kill-keeper", "a keeper is killed, with the processes that must not outlive it", 36, swarms=False, where=FaultScope.NODES
)
def kill_keeper(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    victim = _pick_process(target, rng, injection, "keeper")
    if victim is None:
        return None
    victim.kill()
    return victim.start


@fault("kill-both", "an agent and its keeper are killed at once, and restarted", 36, swarms=False, where=FaultScope.NODES)
def kill_both(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    candidates = target.processes("agent", injection.where)
    if not candidates:
        return None
    machine = rng.choice(candidates).machine
    victims = [process for process in target.all_processes("") if process.machine is machine]
    for victim in victims:
        victim.kill()

    def heal() -> None:
        for victim in victims:
            victim.start()

    return heal


@fault("slow-starts", "processes start slowly on one machine", 37, 38, swarms=False, size=SECONDS, where=FaultScope.NODES)
def slow_starts(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    machine = _pick_machine(target, rng, injection)
    if machine is None:
        return None
    by_s = injection.size or 1.0 + 20.0 * rng.random()
    machine.slow_start_s += by_s

    def heal() -> None:
        machine.slow_start_s = round(machine.slow_start_s - by_s, 6)

    return heal


@fault("slow-journal", "the disk of a keeper is slow", 12, 14, swarms=False, size=SECONDS, where=FaultScope.NODES)
def slow_journal(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    machine = _pick_machine(target, rng, injection)
    if machine is None:
        return None
    by_ms = round(1000 * (injection.size or 0.5 + 8.0 * rng.random()))
    machine.slow_disk_ms += by_ms

    def heal() -> None:
        machine.slow_disk_ms -= by_ms

    return heal


@fault("bad-journal", "the disk of a keeper is full, fails, or does not sync", 14, swarms=False, where=FaultScope.NODES)
def bad_journal(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    machine = _pick_machine(target, rng, injection)
    if machine is None:
        return None
    fault_name = rng.choice(("full", "failing", "not_syncing"))
    setattr(machine.disk, fault_name, True)

    def heal() -> None:
        setattr(machine.disk, fault_name, False)

    return heal


@fault("silent-zone", "all nodes of one zone become silent at once", 34, 35, swarms=False, where=FaultScope.NODES)
def silent_zone(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    """Partition every third agent. The zone of a node follows from its number modulo 3, and nodes are dealt to agents by
    number, so if the number of agents is a multiple of 3, these agents have all nodes of one zone.
    """
    candidates = target.processes("agent", injection.where)
    if not candidates:
        return None
    first = int(rng.choice(candidates).name.rsplit("-", 1)[1]) % 3
    return cut_paths(
        target,
        [
            path
            for victim in candidates
            if int(victim.name.rsplit("-", 1)[1]) % 3 == first
            for other in target.peers(victim)
            for path in ((victim.name, other), (other, victim.name))
        ],
    )


def _pick_machine(target: FaultTarget, rng: Random, injection: Injection) -> SimMachine | None:
    candidates = target.processes("keeper", injection.where)
    return rng.choice(candidates).machine if candidates else None


# ------------------------------------------------------------------------------------------------------------------ disks


@fault("disk-full", "a machine's disk is full", 11, 14)
def disk_full(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    disk = rng.choice(target.all_processes(injection.where)).machine.disk
    disk.full = True

    def heal() -> None:
        disk.full = False

    return heal


@fault("disk-failing", "a machine's disk returns errors", 14)
def disk_failing(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    disk = rng.choice(target.all_processes(injection.where)).machine.disk
    disk.failing = True

    def heal() -> None:
        disk.failing = False

    return heal


# ------------------------------------------------------------------------------------------------------------- schedulers


@fault(
    "freeze-scheduler", "a scheduler is frozen with claims in flight, and resumes", 15, 18, swarms=False, where=FaultScope.NODES
)
def freeze_scheduler(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    victim = pick_alive(rng, target.processes("scheduler", injection.where))
    return None if victim is None else freeze_process(victim)


@fault(
    "kill-reserving",
    "all schedulers of a scope are killed at the moment one of them makes a reservation",
    19,
    swarms=False,
    where=FaultScope.NODES,
)
def kill_reserving(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    """If no reservation is made in time, the fault counts as injected without effect: the moment depends on the schedulers."""
    candidates = target.processes("scheduler", injection.where)
    if not candidates:
        return None
    victims = target.processes("scheduler", rng.choice(candidates).name.split("-")[1])
    killed: list[SimProcess] = []

    def kill() -> None:
        for victim in victims:
            if victim.alive:
                victim.kill()
                killed.append(victim)

    cancel = target.on_next_reservation(victims[0].name.split("-")[1], kill)

    def heal() -> None:
        cancel()
        for victim in killed:
            victim.start()

    return heal


@fault(
    "unanswered",
    "either the requests of a scheduler or their answers are lost, so it cannot know the outcome",
    1,
    3,
    swarms=False,
    where=FaultScope.NODES,
)
def unanswered(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    candidates = target.processes("scheduler", injection.where)
    if not candidates:
        return None
    victim = rng.choice(candidates).name
    scope = victim.split("-")[1]
    paths = [(server.name, victim) for server in target.processes("server", scope)]
    return cut_paths(target, paths if rng.random() < 0.5 else [(victim, server) for server, victim in paths])


@fault("plugin-fails", "a third-party filter plug-in of the schedulers raises errors", 26, swarms=False, plugin=True)
def plugin_fails(target: FaultTarget, rng: Random, injection: Injection) -> Heal | None:
    target.set_plugin_broken(True)
    return lambda: target.set_plugin_broken(False)
