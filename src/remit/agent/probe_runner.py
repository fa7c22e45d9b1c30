"""Runs the HTTP, TCP and exec probes that are due.

Results are counted in probes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

from remit.agent.keeper.protocol import ProcessRecord
from remit.agent.probes import ProbeName, ProcessHealth
from remit.agent.reconciler import AttemptProgress
from remit.agent.run_spec import NO_INPUTS, NodeSettings, PreparedInputs, build_process_spec
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
    progress = target.progress
    if progress.health is None or progress.health.restarts != target.record.number:
        progress.health = ProcessHealth(probes, now_ms, restarts=target.record.number, started=_has_started(target))
    health = progress.health
    for name in tuple(health.due_probes(now_ms)):
        health.mark_running(name, now_ms)
        spawn(_run_probe(world, target, health, name, on_result), f"{name} probe of {target.record.key}")
    return health.next_run_ms()


def _has_started(target: ProbeTarget) -> bool:
    """Return whether the replica's phase proves that its startup probe has passed. A restarted agent must not repeat that
    probe.
    """
    status = target.replica.status
    phase = Phase(status.before) if status.phase is Phase.UNKNOWN and status.before else status.phase
    return phase in (Phase.READY, Phase.SERVING) or (phase is Phase.RUNNING and target.record.number == 0)


async def _run_probe(
    world: World, target: ProbeTarget, health: ProcessHealth, name: ProbeName, on_result: Callable[[], None]
) -> None:
    probe = health.states[name].probe
    result = await _probe(world, target, probe)
    health.record(name, result.ok, result.detail, world.clock.now_ms())
    on_result()


async def _probe(world: World, target: ProbeTarget, probe: Probe) -> ProbeResult:
    timeout_ms = int(probe.timeout)
    if probe.http is not None:
        port = _port(target, probe.http)
        return _UNKNOWN_PORT if port is None else await world.prober.http(HOST, port, probe.http.path, timeout_ms=timeout_ms)
    if probe.tcp is not None:
        port = _port(target, probe.tcp)
        return _UNKNOWN_PORT if port is None else await world.prober.tcp(HOST, port, timeout_ms=timeout_ms)
    if probe.exec is None:
        return ProbeResult(ok=True, detail="no probe is configured")
    return await _run_command(world, target, probe.exec.command, timeout_ms)


_UNKNOWN_PORT: Final = ProbeResult(ok=False, detail="no port of that name; add it to template.ports")


def _port(target: ProbeTarget, probe: HttpProbe | TcpProbe) -> int | None:
    return probe.port if isinstance(probe.port, int) else target.record.ports.get(probe.port)


async def _run_command(world: World, target: ProbeTarget, command: tuple[str, ...], timeout_ms: int) -> ProbeResult:
    """Run a command in the directory and environment of the process, with a timeout."""
    record = target.record
    base = build_process_spec(
        target.settings, record.attempt_id, target.replica, target.generation, record.ports, target.inputs
    )
    spec = base._replace(argv=command, stdout=None, stderr=None, group="", limits=type(base.limits)(), with_parent=True)
    try:
        process = await world.runner.start(spec)
    except NotStarted as error:
        return ProbeResult(ok=False, detail=error.cause)
    try:
        async with world.clock.timeout_ms(timeout_ms):
            status = await world.runner.wait(process)
    except TimeoutError:
        return ProbeResult(ok=False, detail=f"{command[0]} did not finish within {timeout_ms} ms")
    finally:
        await world.runner.stop(process, grace_ms=0)
    return ProbeResult(ok=status.code == 0, detail=f"{command[0]} exited with {status.code}")
