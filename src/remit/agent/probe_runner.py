"""Runs the HTTP, TCP and exec probes that are due.

Results are counted in probes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

from remit.agent.keeper.protocol import ProcessRecord
from remit.agent.probes import ProcessHealth, ProbeName
from remit.agent.reconciler import AttemptProgress
from remit.agent.run_spec import NO_INPUTS, NodeSettings, PreparedInputs, build_order
from remit.model.kinds import HttpProbe, Probe, TcpProbe
from remit.model.records import GenerationSpec, Phase, Replica
from remit.world.interfaces import NotStarted, ProbeResult, World

HOST: Final = "127.0.0.1"

Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class ProbeTarget(NamedTuple):
    """A running process with the context its probes need."""

    settings: NodeSettings
    record: ProcessRecord
    replica: Replica
    generation: GenerationSpec
    progress: AttemptProgress
    inputs: PreparedInputs = NO_INPUTS


def run_due_probes(world: World, target: ProbeTarget, spawn: Spawn, on_result: Callable[[], None]) -> int | None:
    """Start the probes that are due. Returns when the next one is due; None if there are no probes."""
    probes, now_ms = target.generation.spec.template.probes, world.clock.now_ms()
    if probes.start is None and probes.ready is None and probes.live is None:
        return None
    course = target.progress
    if course.health is None or course.health.restarts != target.record.number:
        course.health = ProcessHealth(probes, now_ms, restarts=target.record.number, started=_has_started(target))
    health = course.health
    for which in tuple(health.due_probes(now_ms)):
        health.mark_running(which, now_ms)
        spawn(_run_probe(world, target, health, which, on_result), f"{which} probe of {target.record.key}")
    return health.next_run_ms()


def _has_started(patient: ProbeTarget) -> bool:
    """Return whether the replica's phase proves that its startup probe has passed. A restarted agent must not repeat that
    probe.
    """
    status = patient.replica.status
    phase = Phase(status.before) if status.phase is Phase.UNKNOWN and status.before else status.phase
    return phase in (Phase.READY, Phase.SERVING) or (phase is Phase.RUNNING and patient.record.number == 0)


async def _run_probe(world: World, patient: ProbeTarget, health: ProcessHealth, which: ProbeName, tell: Callable[[], None]) -> None:
    probe = health.states[which].probe
    probed = await _probe(world, patient, probe)
    health.record(which, probed.ok, probed.detail, world.clock.now_ms())
    tell()


async def _probe(world: World, patient: ProbeTarget, probe: Probe) -> ProbeResult:
    timeout_ms = int(probe.timeout)
    if probe.http is not None:
        port = _port(patient, probe.http)
        return _UNKNOWN_PORT if port is None else await world.prober.http(HOST, port, probe.http.path, timeout_ms=timeout_ms)
    if probe.tcp is not None:
        port = _port(patient, probe.tcp)
        return _UNKNOWN_PORT if port is None else await world.prober.tcp(HOST, port, timeout_ms=timeout_ms)
    if probe.exec is None:
        return ProbeResult(ok=True, detail="no probe is configured")
    return await _run_command(world, patient, probe.exec.command, timeout_ms)


_UNKNOWN_PORT: Final = ProbeResult(ok=False, detail="no port of that name; add it to template.ports")


def _port(patient: ProbeTarget, probe: HttpProbe | TcpProbe) -> int | None:
    return probe.port if isinstance(probe.port, int) else patient.record.ports.get(probe.port)


async def _run_command(world: World, patient: ProbeTarget, command: tuple[str, ...], timeout_ms: int) -> ProbeResult:
    """Run a command in the directory and environment of the process, with a timeout."""
    kept = patient.record
    like = build_order(patient.settings, kept.attempt_id, patient.replica, patient.generation, kept.ports, patient.inputs)
    order = like._replace(argv=command, stdout=None, stderr=None, group="", limits=type(like.limits)(), with_parent=True)
    try:
        running = await world.runner.start(order)
    except NotStarted as error:
        return ProbeResult(ok=False, detail=error.cause)
    try:
        async with world.clock.timeout_ms(timeout_ms):
            ended = await world.runner.wait(running)
    except TimeoutError:
        return ProbeResult(ok=False, detail=f"{command[0]} did not finish within {timeout_ms} ms")
    finally:
        await world.runner.stop(running, grace_ms=0)
    return ProbeResult(ok=ended.code == 0, detail=f"{command[0]} exited with {ended.code}")
