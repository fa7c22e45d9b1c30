"""Builders of rows and watch events as an authority would write them. Contains no tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from remit.model.kinds import Node, NodeHealth, NodeStatus, PolicyRule, PolicySpec, Tenant, TenantSpec, Workload
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Metadata, RecordMetadata
from remit.model.objects import encode, key
from remit.model.records import (
    Generation,
    GenerationSpec,
    Phase,
    PolicyRevision,
    PolicyRevisionSpec,
    Replica,
    ReplicaSpec,
    ReplicaStatus,
)
from remit.observation.frozen_view import recompute
from remit.observation.scheduler_view import SchedulerView
from remit.store.protocol import Head, Row, RowChange, WatchEvent
from tests.properties.authority_world import FakeClock, amounts, node, workload

HEAD_1 = Head("one", 1, 1, "a", 0, "")


def ready(name: str, cpu: str = "4", **more: Any) -> Node:
    return replace(node(name, cpu, **more), status=NodeStatus(health=NodeHealth.READY))


def tenant(name: str, cpu: str = "16") -> Tenant:
    return Tenant(metadata=Metadata(name=name), spec=TenantSpec(quota=amounts(cpu=cpu, gpu=4)))


def work(name: str, cpu: str = "1", **more: Any) -> list[AnyObject]:
    """A workload and its first generation."""
    made = workload(name, cpu, **more)
    return [made, generation(made)]


def generation(made: Workload, number: int = 1) -> Generation:
    meta = made.metadata
    spec = GenerationSpec(workload=meta.name, generation=number, labels=dict(meta.labels), spec=made.spec)
    return Generation(metadata=RecordMetadata(name=f"{meta.name}/{number:08d}", tenant=meta.tenant), spec=spec)


def replica(name: str, index: int = 0, phase: str = "pending", on: str = "", uid: str = "u", **status: Any) -> Replica:
    holds = {"grants": ("tenant/t1",)} if on else {}
    return Replica(
        metadata=RecordMetadata(name=f"{name}-{index}", tenant="t1", uid=f"{uid}{name}{index}"),
        spec=ReplicaSpec(workload=name, generation=1, index=index),
        status=ReplicaStatus(phase=Phase(phase), node=on, **{**holds, **status}),
    )


def policy(number: int, *rules: PolicyRule) -> PolicyRevision:
    spec = PolicyRevisionSpec(number=number, policies={"p": PolicySpec(rules=rules)} if rules else {})
    return PolicyRevision(metadata=RecordMetadata(name=f"{number:08d}"), spec=spec)


class ViewFixture:
    """A scheduler view that is fed rows and events as an authority might have written them."""

    def __init__(self, *objects: AnyObject) -> None:
        self.clock = FakeClock()
        self.view = SchedulerView(self.clock)
        self.rows: dict[str, Row] = {}
        self.revision = 1
        for obj in objects:
            self.rows[key(obj)] = Row(key(obj), encode(obj), 1)
        self.list()
        self.view.changes.take()

    def list(self, head: Head = HEAD_1) -> None:
        self.view.begin_list(head, self.revision)
        order = ("incarnation", "node", "tenant", "policyrevision", "workload", "generation", "grant", "replica")
        self.view.add_page(sorted(self.rows.values(), key=lambda row: order.index(row.key.split("/")[0])))
        self.view.end_list()

    def write(self, *objects: AnyObject, drop: Iterable[str] = ()) -> WatchEvent:
        """Write to the rows alone, as one batch; the view does not receive the event yet."""
        self.revision += 1
        changes = [RowChange(key(obj), encode(obj), self.revision) for obj in objects]
        changes += [RowChange(name, None, self.revision) for name in drop]
        for change in changes:
            self.rows.pop(change.key, None)
            if change.value is not None:
                self.rows[change.key] = Row(change.key, change.value, self.revision)
        return WatchEvent(self.revision - 1, self.revision, tuple(changes), 0, 0, None, HEAD_1)

    def apply(self, *objects: AnyObject, drop: Iterable[str] = ()) -> None:
        self.view.apply(self.write(*objects, drop=drop))
        self.assert_consistent()

    def assert_consistent(self) -> None:
        differences = list(recompute(self.view))
        assert not differences, "\n".join(differences)

    def slot(self, name: str) -> int:
        return self.view.replicas.slots[f"replica/t1/{name}"]

    def free(self, name: str, resource: str = "cpu") -> int:
        return int(self.view.columns.free[resource][self.view.columns.rows[name]])

    def left(self, ledger: str = "tenant/t1", resource: str = "cpu") -> int:
        return self.view.quota_ledgers.ledgers[ledger].free.get(resource, 0)

    def shape(self, name: str) -> int:
        found = self.view.shapes.find("t1", name, 1)
        assert found is not None
        return self.view.shapes.info(found).shape
