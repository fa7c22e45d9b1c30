"""Runs the HTTP, TCP and exec probes that are due.

By HTTP, a connection, or a command beside it; the count is in probing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

from remit.agent.keeper.protocol import Begun
from remit.agent.probes import Health, Which
from remit.agent.reconciler import Course
from remit.agent.run_spec import NOTHING, Place, Prepared, order_for
from remit.model.kinds import HttpProbe, Probe, TcpProbe
from remit.model.records import GenerationSpec, Phase, Replica
from remit.world.interfaces import NotStarted, Probed, World

HOST: Final = "127.0.0.1"

Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class Patient(NamedTuple):
    """A start of a copy that is to be asked."""

    place: Place
    kept: Begun
    replica: Replica
    generation: GenerationSpec
    course: Course
    prepared: Prepared = NOTHING


def ask_what_is_due(world: World, patient: Patient, spawn: Spawn, tell: Callable[[], None]) -> int | None:
    """Begin whatever is due by now, and answer when something will be next; None if nothing is ever asked."""
    probes, now_ms = patient.generation.spec.template.probes, world.clock.now_ms()
    if probes.start is None and probes.ready is None and probes.live is None:
        return None
    course = patient.course
    if course.health is None or course.health.of != patient.kept.number:
        course.health = Health(probes, now_ms, of=patient.kept.number, started=_has_started(patient))
    health = course.health
    for which in tuple(health.due(now_ms)):
        health.asked(which, now_ms)
        spawn(_ask(world, patient, health, which, tell), f"{which} probe of {patient.kept.key}")
    return health.next_ms()


def _has_started(patient: Patient) -> bool:
    """Does its phase say that it passed its start-up probe? An agent that comes back asks that of nobody a second time."""
    status = patient.replica.status
    phase = Phase(status.before) if status.phase is Phase.UNKNOWN and status.before else status.phase
    return phase in (Phase.READY, Phase.SERVING) or (phase is Phase.RUNNING and patient.kept.number == 0)


async def _ask(world: World, patient: Patient, health: Health, which: Which, tell: Callable[[], None]) -> None:
    probe = health.tries[which].probe
    probed = await _answer(world, patient, probe)
    health.told(which, probed.ok, probed.detail, world.clock.now_ms())
    tell()


async def _answer(world: World, patient: Patient, probe: Probe) -> Probed:
    timeout_ms = int(probe.timeout)
    if probe.http is not None:
        port = _port(patient, probe.http)
        return _NOWHERE if port is None else await world.prober.http(HOST, port, probe.http.path, timeout_ms=timeout_ms)
    if probe.tcp is not None:
        port = _port(patient, probe.tcp)
        return _NOWHERE if port is None else await world.prober.tcp(HOST, port, timeout_ms=timeout_ms)
    if probe.exec is None:
        return Probed(ok=True, detail="nothing is asked")
    return await _run(world, patient, probe.exec.command, timeout_ms)


_NOWHERE: Final = Probed(ok=False, detail="it has no port of that name; add it to template.ports")


def _port(patient: Patient, probe: HttpProbe | TcpProbe) -> int | None:
    return probe.port if isinstance(probe.port, int) else patient.kept.ports.get(probe.port)


async def _run(world: World, patient: Patient, command: tuple[str, ...], timeout_ms: int) -> Probed:
    """A command in the work's own place and environment, for so long at most."""
    kept = patient.kept
    like = order_for(patient.place, kept.copy, patient.replica, patient.generation, kept.ports, patient.prepared)
    order = like._replace(argv=command, stdout=None, stderr=None, group="", limits=type(like.limits)(), with_parent=True)
    try:
        running = await world.runner.start(order)
    except NotStarted as error:
        return Probed(ok=False, detail=error.cause)
    try:
        async with world.clock.timeout_ms(timeout_ms):
            ended = await world.runner.wait(running)
    except TimeoutError:
        return Probed(ok=False, detail=f"{command[0]} took longer than {timeout_ms} ms")
    finally:
        await world.runner.stop(running, grace_ms=0)
    return Probed(ok=ended.code == 0, detail=f"{command[0]} exited with {ended.code}")
