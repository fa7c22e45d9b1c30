"""Lifecycle metrics: start durations, including replicas that finish before `running` is reported."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest

from remit.model.metadata import RecordMetadata
from remit.model.records import Phase, Replica, ReplicaSpec, ReplicaStatus
from remit.serve.metrics.lifecycle_metrics import LifecycleMetrics
from tests.unit.world.virtual_world import VirtualClock, run_virtually


class NoCache:
    def subscribe(self, _: object) -> None:
        return


def at(phase: Phase) -> Replica:
    meta, spec = RecordMetadata(name="a-0", tenant="t", uid="u1"), ReplicaSpec(workload="a", generation=1)
    return Replica(metadata=meta, spec=spec, status=ReplicaStatus(phase=phase, attempt=1))


@pytest.mark.parametrize("then", [(Phase.RUNNING, Phase.FINISHED), (Phase.FINISHED,)])
def test_start_is_counted_once_with_or_without_running_phase(then: tuple[Phase, ...]) -> None:
    async def scenario() -> None:
        metrics = LifecycleMetrics(cast(Any, NoCache()), VirtualClock())
        rows = [None, *(at(phase) for phase in (Phase.PENDING, Phase.BOUND, Phase.STARTING, *then, Phase.RELEASED))]
        for old, new in pairwise(rows):
            metrics.on_change("replica/t/a-0", old, new)
        assert sum(metrics.start_durations.counts) == 1

    run_virtually(scenario())
