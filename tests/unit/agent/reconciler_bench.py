"""A node reconciler with one replica and the keeper's records of it. No I/O, no clock."""

from __future__ import annotations

from typing import Any

from remit.agent.assignments import Assignments, generation_name
from remit.agent.attempts import AttemptId
from remit.agent.keeper.protocol import ProcessRecord
from remit.agent.reconciler import AgentAction, NodeReconciler, ReportAction
from remit.law.timing import Timing
from remit.model.kinds import Template, WorkloadSpec
from remit.model.metadata import RecordMetadata
from remit.model.records import Generation, GenerationSpec, Phase, Replica, ReplicaSpec, ReplicaStatus
from remit.model.resources import Amount
from remit.model.wire.agent_messages import AssignmentRow, AssignmentsUpdate
from remit.world.interfaces import ExitStatus
from tests.unit.world.virtual_world import VirtualClock, run_virtually

TEMPO = Timing(100)
KEY, NOW_MS = "replica/t/a-0", 100_000
COPY = AttemptId(KEY, "u1", 1)


def template(**more: Any) -> Template:
    return Template(command=("work",), resources=Amount.parse({"cpu": "1", "memory": "64Mi"}), **more)


class Bench:
    """One reconciler, one replica in some phase, and the keeper's records of it."""

    def __init__(self, phase: Phase, *, kind: str = "job", before: str = "", made: Template | None = None, **spec: Any) -> None:
        self.reconciler = NodeReconciler("n1", TEMPO)
        self.orders = Assignments(VirtualClock())
        self.spec = WorkloadSpec(type=kind, template=made or template(), **spec)  # type: ignore[arg-type]
        self.kept: dict[AttemptId, ProcessRecord] = {}
        self.phase(phase, before)

    def phase(self, phase: Phase, before: str = "", *, node: str = "n1", uid: str = "u1", attempt: int = 1) -> None:
        replica = Replica(
            metadata=RecordMetadata(name="a-0", tenant="t", uid=uid),
            spec=ReplicaSpec(workload="a", generation=1),
            status=ReplicaStatus(phase=phase, node=node, attempt=attempt, before=before),
        )
        generation = Generation(
            metadata=RecordMetadata(name="a-1", tenant="t"),
            spec=GenerationSpec(workload="a", generation=1, labels={}, spec=self.spec),
        )
        assert generation_name("t", "a", 1)
        rows = (AssignmentRow(KEY, 7, replica),)

        async def take() -> None:
            self.orders.apply(
                AssignmentsUpdate("i1", self.orders.revision + 1, whole=True, replicas=rows, generations=(generation,))
            )

        run_virtually(take())

    def runs(self, **more: Any) -> None:
        common = {"node": "n1", "scope": "local", "key": KEY, "uid": "u1", "attempt": 1, "pid": 5, "since_ms": NOW_MS}
        self.kept[COPY] = ProcessRecord(**{**common, **more})

    def ended(self, *, code: int | None = 0, signal: int | None = None, oom: bool = False, **more: Any) -> None:
        self.runs(ended=ExitStatus(code, signal, oom), ended_ms=NOW_MS, **more)

    def actions(self, at_ms: int = NOW_MS, *, holds_lease: bool = True) -> list[AgentAction]:
        return self.reconciler.reconcile(at_ms, self.orders, self.kept, holds_lease=holds_lease)

    def only_report(self, at_ms: int = NOW_MS) -> tuple[str, str]:
        """The transition and the result of the only action, a report."""
        actions = self.actions(at_ms)
        assert len(actions) == 1, actions
        assert isinstance(actions[0], ReportAction), actions
        assert (actions[0].move.replica, actions[0].move.attempt) == (KEY, 1)
        return actions[0].move.transition, actions[0].move.result
