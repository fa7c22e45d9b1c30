"""Who is asked whether it has started? Nobody a second time, whoever asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from remit.agent.probe_runner import ProbeTarget, run_due_probes
from remit.agent.reconciler import AttemptProgress
from remit.model.kinds import HttpProbe, Probe, Probes
from remit.model.records import Phase, ReplicaStatus


def asked_first(status: ReplicaStatus, number: int = 0) -> bool:
    """Would an agent that comes back begin with the probe for the start?"""
    probes = Probes(start=Probe(http=HttpProbe(port=80)), ready=Probe(http=HttpProbe(port=80)))
    course = AttemptProgress()
    patient: Any = ProbeTarget(
        settings=None,  # type: ignore[arg-type]
        record=SimpleNamespace(number=number, key="replica/t/a-0"),  # type: ignore[arg-type]
        replica=SimpleNamespace(status=status),  # type: ignore[arg-type]
        generation=SimpleNamespace(spec=SimpleNamespace(template=SimpleNamespace(probes=probes))),  # type: ignore[arg-type]
        progress=course,
    )
    world: Any = SimpleNamespace(clock=SimpleNamespace(now_ms=lambda: 0))
    run_due_probes(world, patient, lambda work, _: work.close(), lambda: None)
    assert course.health is not None
    return "start" in course.health.states


@pytest.mark.parametrize("before", [Phase.RUNNING, Phase.READY, Phase.SERVING])
def test_what_had_started_before_its_node_fell_silent_is_not_ended_by_the_probe_for_its_start(before: Phase) -> None:
    assert not asked_first(ReplicaStatus(phase=before))
    assert not asked_first(ReplicaStatus(phase=Phase.UNKNOWN, before=before.value))


def test_what_was_only_starting_then_is_asked() -> None:
    assert asked_first(ReplicaStatus(phase=Phase.STARTING))
    assert asked_first(ReplicaStatus(phase=Phase.UNKNOWN, before=Phase.STARTING.value))


def test_of_one_that_was_started_again_its_phase_says_nothing() -> None:
    assert asked_first(ReplicaStatus(phase=Phase.RUNNING), number=1)
