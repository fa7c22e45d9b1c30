"""The start probe runs once per start of a process, also after an agent restart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from remit.agent.probe_runner import ProbeTarget, run_due_probes
from remit.agent.reconciler import AttemptProgress
from remit.model.kinds import HttpProbe, Probe, Probes
from remit.model.records import Phase, ReplicaStatus


def runs_start_probe(status: ReplicaStatus, number: int = 0) -> bool:
    """Whether a restarted agent begins with the start probe."""
    probes = Probes(start=Probe(http=HttpProbe(port=80)), ready=Probe(http=HttpProbe(port=80)))
    progress = AttemptProgress()
    target: Any = ProbeTarget(
        settings=None,  # type: ignore[arg-type]
        record=SimpleNamespace(number=number, key="replica/t/a-0"),  # type: ignore[arg-type]
        replica=SimpleNamespace(status=status),  # type: ignore[arg-type]
        generation=SimpleNamespace(spec=SimpleNamespace(template=SimpleNamespace(probes=probes))),  # type: ignore[arg-type]
        progress=progress,
    )
    world: Any = SimpleNamespace(clock=SimpleNamespace(now_ms=lambda: 0))
    run_due_probes(world, target, lambda work, _: work.close(), lambda: None)
    assert progress.health is not None
    return "start" in progress.health.states


@pytest.mark.parametrize("before", [Phase.RUNNING, Phase.READY, Phase.SERVING])
def test_started_replica_is_not_start_probed_after_node_silence(before: Phase) -> None:
    assert not runs_start_probe(ReplicaStatus(phase=before))
    assert not runs_start_probe(ReplicaStatus(phase=Phase.UNKNOWN, before=before.value))


def test_starting_replica_is_start_probed_after_agent_restart() -> None:
    assert runs_start_probe(ReplicaStatus(phase=Phase.STARTING))
    assert runs_start_probe(ReplicaStatus(phase=Phase.UNKNOWN, before=Phase.STARTING.value))


def test_restarted_process_is_start_probed_despite_running_phase() -> None:
    assert runs_start_probe(ReplicaStatus(phase=Phase.RUNNING), number=1)
