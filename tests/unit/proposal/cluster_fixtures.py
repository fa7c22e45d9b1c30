"""Small clusters as rows, scheduled by the real scheduling cycle, and the effect of each suggested remedy. No tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from remit.law.overrides import Instant
from remit.model.claims import Bind, BindGang, RecordDecision, Reserve
from remit.model.kinds import (
    Device,
    DeviceRequest,
    Node,
    NodeHealth,
    NodeStatus,
    Override,
    Placement,
    PriorityClass,
    PriorityClassSpec,
    Tenant,
    TenantSpec,
    Toleration,
    Workload,
)
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Deadline, Metadata, RecordMetadata
from remit.model.objects import encode, key
from remit.model.records import (
    Generation,
    GenerationSpec,
    Grant,
    GrantPhase,
    Phase,
    PolicyRevision,
    PolicyRevisionSpec,
    Replica,
    ReplicaSpec,
    ReplicaStatus,
)
from remit.model.resources import DEVICES_PREFIX, Amount
from remit.observation.frozen_view import frozen_view
from remit.observation.scheduler_view import SchedulerView
from remit.proposal.cycle import Cycle
from remit.proposal.explain.pending import PlacementInputs, explain_pending
from remit.proposal.explain.result_types import Change, PendingExplanation, Remedy
from remit.store.protocol import Head, Page, Row
from tests.properties.authority_world import FakeClock, amounts

HEAD_1 = Head("one", 1, 1, "a", 0, "")
NOW: Instant = ("boot-1", 1_000_000)
RULES = PlacementInputs(NOW)
A_GPU = (DeviceRequest(kind="gpu", count=1, models=("A10",)),)


def rich(name: str = "t1") -> Tenant:
    return Tenant(metadata=Metadata(name=name), spec=TenantSpec(quota=amounts(cpu="1000", memory="1000Gi", gpu=100)))


class Result(NamedTuple):
    """The proposals of one scheduling cycle: replicas bound or reserved by node, and the reasons of those that wait."""

    bound: dict[str, str]
    reserved: dict[str, tuple[str, ...]]
    waits: dict[str, tuple[str, bool]]


class Cluster:
    """Rows of one scope. `with_` returns a changed copy; nothing changes in place."""

    def __init__(self, *objects: AnyObject) -> None:
        self.objects = {key(obj): obj for obj in objects}

    def with_(self, *objects: AnyObject, drop: Iterable[str] = ()) -> Cluster:
        left = {name: obj for name, obj in self.objects.items() if name not in set(drop)}
        return Cluster(*left.values(), *objects)

    def of(self, kind: type[Any]) -> list[Any]:
        return [obj for obj in self.objects.values() if isinstance(obj, kind)]

    # -- building ----------------------------------------------------------------------------------------------------------

    def work(self, made: Workload, waiting: int = 1, *, priority: int = 0, on: Iterable[str] = (), **status: Any) -> Cluster:
        """Add a workload with its generation, pending replicas, and replicas that run on the given nodes."""
        meta = made.metadata
        spec = GenerationSpec(workload=meta.name, generation=1, labels=dict(meta.labels), spec=made.spec)
        generation = Generation(metadata=RecordMetadata(name=f"{meta.name}/{1:08d}", tenant=meta.tenant), spec=spec)
        there = list(on)
        replicas = [self.replica(made, n, "", priority) for n in range(waiting)]
        replicas += [self.replica(made, waiting + n, node, priority, **status) for n, node in enumerate(there)]
        return self.with_(made, generation, *replicas)

    @staticmethod
    def replica(made: Workload, index: int, on: str = "", priority: int = 0, **status: Any) -> Replica:
        meta = made.metadata
        held: dict[str, Any] = {"phase": Phase.RUNNING, "node": on, "grants": (f"tenant/{meta.tenant}",)} if on else {}
        return Replica(
            metadata=RecordMetadata(name=f"{meta.name}-{index}", tenant=meta.tenant, uid=f"u{meta.name}{index}"),
            spec=ReplicaSpec(workload=meta.name, generation=1, index=index, priority=priority),
            status=ReplicaStatus(**{**held, **status}),
        )

    # -- scheduling and explaining -----------------------------------------------------------------------------------------

    def view(self, clock: FakeClock | None = None) -> SchedulerView:
        rows = {name: Row(name, encode(obj), 1) for name, obj in self.objects.items()}

        def pages(prefix: str, after: str) -> Iterator[Page]:
            yield Page(tuple(sorted(row for name, row in rows.items() if name.startswith(prefix))), 1, more=False)

        return frozen_view(clock or FakeClock(), HEAD_1, 1, pages)

    def explained(self, workload: str = "w", tenant: str = "t1", priority: int = 0) -> PendingExplanation:
        view = self.view()
        generation = view.shapes.find(tenant, workload, 1)
        assert generation is not None
        return explain_pending(view, generation, priority, RULES)

    def scheduled(self) -> Result:
        cycle = Cycle(self.view(), lambda limit: 0, "t")
        cycle.on_changes(NOW[1], NOW)
        proposal = cycle.propose(NOW[1], 1_000)
        found = Result({}, {}, {})
        for claim in proposal.claims:
            match claim:
                case Bind():
                    found.bound[claim.replica] = claim.node
                case BindGang():
                    found.bound.update({bind.replica: bind.node for bind in claim.members})
                case Reserve():
                    found.reserved[claim.replica] = tuple(claim.victims)
                case RecordDecision(decision=decision) if decision.verdict == "waiting":
                    for name in decision.replicas:
                        found.waits[f"replica/{name}"] = decision.reason, decision.never
        return found

    def bound(self, workload: str = "w") -> int:
        return sum(name.startswith(f"replica/t1/{workload}-") for name in self.scheduled().bound)

    # -- applying a remedy -------------------------------------------------------------------------------------------------

    def with_remedy(self, unblock: Remedy, workload: str = "w") -> Cluster:
        cluster = self
        for change in unblock.changes:
            cluster = cluster._do(change, workload)
        return cluster

    def _do(self, change: Change, workload: str) -> Cluster:
        match change.kind:
            case "quota":
                return self._raised(change)
            case "grant":
                grant = self.objects[f"grant/{change.what}"]
                assert isinstance(grant, Grant)
                status = replace(grant.status, phase=GrantPhase.LIVE, deadline=Deadline(boot=NOW[0], at_ms=NOW[1] + 60_000))
                return self.with_(replace(grant, status=status))
            case "tenant":
                return self.with_(rich(change.what.removeprefix("tenant/")))
            case "override":
                return self.with_(drop=[f"override/{change.what}"])
            case "members":
                made = self.objects[f"workload/t1/{workload}"]
                assert isinstance(made, Workload)
                return self.with_(*(self.replica(made, 100 + n) for n in range(change.count)))
            case "grow":
                return self._grown(change)
            case "shrink":
                return self._shrunk(workload, change.amount)
            case "nodes":
                old = self._node(change.what)
                names = [f"new-{n}" for n in range(change.count)]
                spec = replace(old.spec, unschedulable=False, draining=False)
                health = NodeStatus(health=NodeHealth.READY)
                metas = [replace(old.metadata, name=name) for name in names]
                return self.with_(*(replace(old, metadata=meta, spec=spec, status=health) for meta in metas))
            case "filter":
                return self._relaxed(change, workload)
        raise AssertionError(change.kind)

    def _node(self, name: str) -> Node:
        node = self.objects[f"node/{name}"]
        assert isinstance(node, Node)
        return node

    def _raised(self, change: Change) -> Cluster:
        if change.what.startswith("tenant/"):
            tenant = self.objects[change.what]
            assert isinstance(tenant, Tenant)
            return self.with_(replace(tenant, spec=replace(tenant.spec, quota=tenant.spec.quota + change.amount)))
        grant = self.objects[f"grant/{change.what}"]
        assert isinstance(grant, Grant)
        return self.with_(replace(grant, spec=replace(grant.spec, amount=grant.spec.amount + change.amount)))

    def _grown(self, change: Change) -> Cluster:
        node = self._node(change.what)
        resources = Amount({name: count for name, count in change.amount if not name.startswith(DEVICES_PREFIX)})
        new = [
            Device(name=f"new-{kind}-{n}", kind=kind, model=change.models[0] if change.models else "")
            for name, count in change.amount
            if name.startswith(DEVICES_PREFIX)
            for kind in [name.removeprefix(DEVICES_PREFIX)]
            for n in range(count // 1000)
        ]
        spec = replace(node.spec, capacity=node.spec.capacity + resources, devices=(*node.spec.devices, *new))
        return self.with_(replace(node, spec=spec))

    def _relaxed(self, change: Change, workload: str) -> Cluster:
        match change.what:
            case "node-health":
                found = [self._node(node) for node in change.nodes]
                return self.with_(*(replace(node, status=NodeStatus(health=NodeHealth.READY)) for node in found))
            case "schedulable":
                found = [self._node(node) for node in change.nodes]
                specs = [replace(node.spec, unschedulable=False, draining=False) for node in found]
                return self.with_(*(replace(node, spec=spec) for node, spec in zip(found, specs, strict=True)))
            case "placement":
                return self._respecced(workload, regions=(), zones=(), pools=())
            case "taints":
                return self._respecced(workload, tolerations=(Toleration(operator="Exists"),))
            case "labels":
                return self._respecced(workload, node_selector={}, expressions=())
            case "spread":
                return self._respecced(workload, topology_spread=())
            case "affinity":
                return self._respecced(workload, affinity=())
            case "anti-affinity":
                return self._respecced(workload, anti_affinity=())
            case "policy":
                number = 1 + max(one.spec.number for one in self.of(PolicyRevision))
                spec = PolicyRevisionSpec(number=number, policies={})
                return self.with_(PolicyRevision(metadata=RecordMetadata(name=f"{number:08d}"), spec=spec))
            case "overrides":
                return self.with_(drop=[key(one) for one in self.of(Override)])
            case "others-anti-affinity":
                cluster = self
                for other in self.of(Workload):
                    if other.metadata.name != workload:
                        cluster = cluster._respecced(other.metadata.name, anti_affinity=())
                return cluster
        raise AssertionError(change.what)

    def _shrunk(self, workload: str, by: Amount) -> Cluster:
        """Give the pending replicas a new generation with smaller requests; running replicas keep theirs."""
        generation = next(one for one in self.of(Generation) if one.spec.workload == workload)
        spec = generation.spec.spec
        spec = replace(spec, template=replace(spec.template, resources=spec.template.resources - by))
        made = replace(generation.spec, generation=2, spec=spec)
        waiting = [one for one in self.of(Replica) if one.spec.workload == workload and one.status.phase is Phase.PENDING]
        return self.with_(
            replace(generation, metadata=replace(generation.metadata, name=f"{workload}/{2:08d}"), spec=made),
            *(replace(one, spec=replace(one.spec, generation=2)) for one in waiting),
        )

    def _respecced(self, workload: str, **placement: Any) -> Cluster:
        """Change the placement of the generation in place, as after a finished rollout."""
        generation = next(one for one in self.of(Generation) if one.spec.workload == workload)
        made = self.objects[f"workload/t1/{workload}"]
        assert isinstance(made, Workload)
        where: Placement = replace(made.spec.placement, **placement)
        spec = replace(made.spec, placement=where)
        return self.with_(replace(made, spec=spec), replace(generation, spec=replace(generation.spec, spec=spec)))


def smaller(unblock: Remedy) -> Iterator[Remedy]:
    """Every remedy that is smaller than this one by the least step."""
    for at, change in enumerate(unblock.changes):
        rest = [*unblock.changes[:at], *unblock.changes[at + 1 :]]
        if change.kind in ("quota", "grow", "shrink"):
            for name, count in change.amount:
                by = 1000 if name.startswith(DEVICES_PREFIX) and change.kind == "grow" else 1
                less = Amount({**dict(change.amount.pairs), name: count - by})
                yield replace(unblock, changes=(*rest, replace(change, amount=less)))
        elif change.kind in ("nodes", "members"):
            yield replace(unblock, changes=(*rest, replace(change, count=change.count - 1)))
        elif change.nodes:
            for node in change.nodes:
                less_nodes = tuple(one for one in change.nodes if one != node)
                yield replace(unblock, changes=(*rest, replace(change, nodes=less_nodes)))
        elif len(unblock.changes) > 1:
            yield replace(unblock, changes=tuple(rest))


def ranked(name: str, value: int, **more: Any) -> PriorityClass:
    return PriorityClass(metadata=Metadata(name=name), spec=PriorityClassSpec(value=value, **more))
