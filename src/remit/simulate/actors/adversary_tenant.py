"""Tenant, nodes and workloads owned by the adversary.

All names begin with `meddler`. Other work does not depend on any of these objects. The workloads have a few replicas each
and never more: surplus replicas that one controller deletes and another creates again would keep both busy forever. The
workloads can only be placed on the adversary's nodes. Those are tainted, so no other work is placed there, and they are
ready only during an attempt, so that the schedulers do not fill them in between. No agent runs on these nodes: the adversary
holds the leases of their agents, and moves what it has placed through the lifecycle step by step until it is released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from msgspec.structs import replace

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.commitment.rulings.registry import UNLEASED_ROLES
from remit.model.claims import (
    Accepted,
    Acquire,
    Actor,
    AnyClaim,
    Apply,
    Bind,
    Close,
    Code,
    DeclareLost,
    Delete,
    Evidence,
    Forget,
    Mark,
    Move,
    Operation,
    Refused,
    Spawn,
    Verdict,
)
from remit.model.kinds import (
    Affinity,
    Device,
    DeviceRequest,
    Gang,
    Node,
    NodeHealth,
    NodeSpec,
    Override,
    OverrideScope,
    OverrideSpec,
    Placement,
    PriorityClass,
    PriorityClassSpec,
    Rollout,
    Spread,
    Taint,
    Template,
    Tenant,
    TenantSpec,
    Toleration,
    Workload,
    WorkloadSpec,
)
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Metadata
from remit.model.objects import key_of
from remit.model.records import Grant, PeerConfirmation, Phase, Replica
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from remit.model.wire.agent_messages import NodeHeartbeat, NodeState
from remit.observation.watch_cache import CachedRow
from remit.simulate.actors.role import RoleContext
from remit.simulate.world import random_streams

NAME: Final = "meddler"
NODE_PREFIX: Final = f"node/{NAME}-"
"""Prefix of nodes that accept work only during an attempt of the adversary."""
TWIN: Final = f"{NAME}-twin"
"""A second tenant and lease holder, used only by the adversary."""
PREEMPTING: Final = f"{NAME}-rank"
NON_PREEMPTING: Final = f"{NAME}-meek"
PRIORITY: Final = 10
"""Priority of both classes; the second one never preempts."""
NOWHERE: Final = f"scope/{NAME}-nowhere"
"""A scope that never existed: capacity granted to it is returned by declaring it lost."""

LEASE_MS: Final = 120_000
REPLICAS: Final[Mapping[str, int]] = {"plain": 3, "shy": 2, "gpu": 2, "gang": 3, "pack": 3}
"""Replicas of each workload; default 1. Few, because the scheduler tries all pending ones repeatedly."""
HOME: Final = f"{NAME}-home"
CORDONED: Final = f"{NAME}-shut"
NEW: Final = f"{NAME}-new"
REPLICA_CPU: Final = 100

TOWARDS_RELEASED: Final[Mapping[Phase, tuple[str, Role]]] = {
    Phase.PENDING: ("cancel", Role.WORKLOADS),
    Phase.RESERVED: ("cancel", Role.WORKLOADS),
    Phase.BOUND: ("remove", Role.WORKLOADS),
    Phase.STARTING: ("remove", Role.WORKLOADS),
    Phase.RUNNING: ("remove", Role.WORKLOADS),
    Phase.READY: ("remove", Role.WORKLOADS),
    Phase.SERVING: ("remove", Role.WORKLOADS),
    Phase.DRAINING: ("stop", Role.AGENT),
    Phase.STOPPING: ("stopped", Role.AGENT),
    Phase.UNKNOWN: ("resume", Role.AGENT),
    Phase.FAILED: ("release", Role.REPAIR),
    Phase.FINISHED: ("settle", Role.WORKLOADS),
}
"""For each phase, the transition towards released and the role that owns it."""

_TOWARDS_READY: Final[Mapping[NodeHealth, NodeHealth]] = {
    NodeHealth.JOINING: NodeHealth.READY,
    NodeHealth.SUSPECT: NodeHealth.READY,
    NodeHealth.UNKNOWN: NodeHealth.JOINING,
    NodeHealth.LOST: NodeHealth.JOINING,
}


def _node(name: str, region: str, *, unschedulable: bool = False) -> Node:
    spec = NodeSpec(
        region=region,
        zone=NAME,
        pool=NAME,
        capacity=Amount({"cpu": 8_000, "memory": 8 << 30}),
        devices=(Device(name="gpu-0", kind="gpu", model="a"), Device(name="gpu-1", kind="gpu", model="b")),
        taints=(Taint(key=NAME, effect="NoSchedule"),),
        unschedulable=unschedulable,
    )
    return Node(metadata=Metadata(name=name), spec=spec)


def _spec(
    where: Mapping[str, Any],
    *,
    cpu: int = REPLICA_CPU,
    gpus: int = 0,
    models: tuple[str, ...] = (),
    gang: int = 0,
    tolerant: bool = True,
) -> WorkloadSpec:
    tolerations = (Toleration(key=NAME, operator="Exists"),) if tolerant else ()
    template = Template(
        command=("work", "-", "0"),
        resources=Amount({"cpu": cpu}),
        devices=(DeviceRequest(kind="gpu", count=gpus, models=models),) if gpus else (),
    )
    placement = Placement(**{"pools": (NAME,), **where}, tolerations=tolerations)
    return WorkloadSpec(
        type="service",
        template=template,
        rollout=Rollout(max_surge=0, max_unavailable=1),
        placement=placement,
        gang=Gang(min=gang) if gang else None,
    )


_NEAR: Final = Affinity(label_selector={NAME: "shy"}, topology_key="node")

SPECS: Final[Mapping[str, WorkloadSpec]] = {
    "plain": _spec({}),
    "shy": _spec({"anti_affinity": (_NEAR,)}),
    "lonely": _spec({"affinity": (Affinity(label_selector={NAME: "nobody"}, topology_key="zone"),)}),
    "skewed": _spec({"topology_spread": (Spread(topology_key="no-such-label"),)}),
    "abroad": _spec({"zones": ("nowhere",)}),
    "barred": _spec({}),
    "choosy": _spec({"node_selector": {"disk": "of-gold"}}),
    "frail": _spec({}, tolerant=False),
    "huge": _spec({}, cpu=9_000_000),
    "greedy": _spec({}, cpu=7_000),
    "gpu": _spec({}, gpus=1, models=("a",)),
    "gpus": _spec({}, gpus=64),
    "gang": _spec({"zones": ("nowhere",)}, gang=3),
    "going": _spec({}),
    "pack": _spec({}, gang=2),
    "ranked": replace(_spec({}), priority_class=PREEMPTING),
    "meek": replace(_spec({}), priority_class=NON_PREEMPTING),
    "once": replace(_spec({}), type="job", rollout=Rollout(), retries=0),
    "errand": replace(_spec({}), type="job", rollout=Rollout()),
}
"""Each breaks one rule on every node, except for `plain`, `shy`, `gpu`, `going` and the ones after it, which fit on `HOME`."""
PAUSE_TTL: Final = Duration(3_600_000)


class AdversaryTenant:
    """One client in many roles, one request at a time. Nothing is retried: the outcome of a lost request stays unknown."""

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        self.view = context.view
        self.world = context.world
        self.rng = context.world.randomness.stream(random_streams.ADVERSARY)
        self.client: AuthorityClient = context.client(Actor(NAME, Role.USER))
        self._epochs: dict[str, tuple[int, int]] = {}
        self._latest_revision = 0

    # -- requests --------------------------------------------------------------------------------------------------------

    async def send(self, role: Role, *claims: AnyClaim, node: str = HOME, age_ms: int | None = None) -> list[Verdict]:
        """Send claims in a role, under its lease if it needs one. Raises `RetriesExhausted`."""
        return await self.send_as(await self.actor(role, node), *claims, age_ms=age_ms)

    async def send_as(self, actor: Actor, *claims: AnyClaim, age_ms: int | None = None) -> list[Verdict]:
        self.client.actor = actor
        evidence = Evidence(self.view.revision, self.view.age_ms() if age_ms is None else age_ms)
        return self._record_verdicts(actor, await self.client.submit_many(claims, evidence=evidence))

    async def resend(self, *operations: Operation) -> list[Verdict]:
        return self._record_verdicts(operations[0].actor, await self.client.resume(operations))

    def _record_verdicts(self, actor: Actor, verdicts: Sequence[Verdict]) -> list[Verdict]:
        for verdict in verdicts:
            self._latest_revision = max(self._latest_revision, verdict.revision)
            if isinstance(verdict, Refused) and verdict.code in (Code.STALE_EPOCH, Code.LEASE_EXPIRED):
                self._epochs.pop(actor.lease, None)
        return list(verdicts)

    async def actor(self, role: Role, node: str = HOME) -> Actor:
        """The actor for a role. Its lease is the adversary's own, never one that a component uses."""
        if role in UNLEASED_ROLES:
            return Actor(NAME, role)
        lease, now_ms = f"{role}/{node if role is Role.AGENT else NAME}", self.world.clock.now_ms()
        epoch, until_ms = self._epochs.get(lease, (0, 0))
        if now_ms >= until_ms:
            verdict = (await self.send_as(Actor(NAME, role), Acquire(lease, Duration(LEASE_MS))))[0]
            epoch = verdict.number if isinstance(verdict, Accepted) else 0
            self._epochs[lease] = epoch, now_ms + LEASE_MS // 2
        return Actor(NAME, role, lease, epoch)

    async def send_heartbeats(self) -> None:
        """Send heartbeats of its nodes forever, so that they do not become silent. They never report readiness, so no
        controller marks them ready.
        """
        client, heartbeat_ms = self.context.client(Actor(NAME, Role.AGENT)), self.context.timing.heartbeat_ms
        while True:
            leases = {name: f"{Role.AGENT}/{name}" for name in (HOME, CORDONED)}
            held = {name: self._epochs[lease][0] for name, lease in leases.items() if lease in self._epochs}
            heartbeats = [
                NodeHeartbeat(Actor(NAME, Role.AGENT, leases[name], epoch), NodeState(name)) for name, epoch in held.items()
            ]
            with suppress(RetriesExhausted):
                await client.heartbeat(heartbeats, deadline_ms=heartbeat_ms)
            await self.world.clock.sleep_ms(heartbeat_ms)

    def forget_lease(self, actor: Actor) -> None:
        """Drop the cached lease; it is acquired again before its next use."""
        self._epochs.pop(actor.lease, None)

    def report_abandoned(self, error: RetriesExhausted) -> None:
        for operation in error.operation_ids:
            self.context.observer.operation_abandoned(self.context.process.name, self.context.scope, operation)

    # -- reads -----------------------------------------------------------------------------------------------------------

    async def read(self, key: str) -> CachedRow | None:
        """The row at `key` after the view has caught up with the last answer, or after one second."""
        for _ in range(20):
            if self.view.revision >= self._latest_revision:
                break
            await self.world.clock.sleep_ms(50)
        return self.view.rows.get(key)

    def own_replicas(self, workload: str, *phases: Phase) -> list[str]:
        keys = self.view.by_workload.get((NAME, f"{NAME}-{workload}"), {})
        return [key for key in keys if self.view.get(key).status.phase in phases]

    def others(self, prefix: str) -> list[tuple[str, CachedRow]]:
        """Rows that do not belong to the adversary."""
        return [(key, row) for key, row in self.view.of_kind(prefix) if f"/{NAME}" not in key]

    # -- its objects -----------------------------------------------------------------------------------------------------

    def own_objects(self) -> list[AnyObject]:
        region = self.context.scope
        quota = Amount({"cpu": 5_000, "memory": 8 << 30, "devices/gpu": 2_000})
        spec = TenantSpec(quota=quota, emergency_quota=Amount({"cpu": 1_000}))
        objects: list[AnyObject] = [Tenant(metadata=Metadata(name=name), spec=spec) for name in (NAME, TWIN)]
        objects += [
            PriorityClass(metadata=Metadata(name=name), spec=PriorityClassSpec(value=PRIORITY, preempts=name == PREEMPTING))
            for name in (PREEMPTING, NON_PREEMPTING)
        ]
        objects += [_node(HOME, region), _node(CORDONED, region, unschedulable=True), _node(NEW, region)]
        # Without this override the scheduler would place the workloads first and leave no pending replicas to the adversary.
        own_scope = OverrideScope(tenants=(NAME,))
        pause = OverrideSpec(effect="pause-expansion", scope=own_scope, ttl=PAUSE_TTL, reason="placed by hand", author=NAME)
        objects.append(Override(metadata=Metadata(name=f"{NAME}-pause"), spec=pause))
        return objects + [self.workload(name) for name in SPECS]

    def workload(self, name: str) -> Workload:
        spec = replace(SPECS[name], replicas=REPLICAS.get(name, 1))
        return Workload(metadata=Metadata(name=f"{NAME}-{name}", tenant=NAME, labels={NAME: name}), spec=spec)

    async def ensure_objects(self) -> None:
        """Create missing objects, and mark two of the nodes ready."""
        missing = [obj for obj in self.own_objects() if self.view.get(_object_key(obj)) is None]
        if missing:
            await self.send(Role.OPERATOR, *(Apply(obj) for obj in missing))
        for name in (HOME, CORDONED):
            for _ in range(2):
                row = await self.read(key_of("Node", name))
                if row is not None and row.obj.status.health in _TOWARDS_READY:
                    await self.send(Role.NODES, Mark(name, row.revision, _TOWARDS_READY[row.obj.status.health]))
        await self._mark_new_node_lost()
        for name in (HOME, CORDONED):
            await self.actor(Role.AGENT, name)
        if self._is_awaited():
            await self.send(Role.OPERATOR, DeclareLost(NOWHERE))  # otherwise no capacity of the restored scope can be placed

    def _is_awaited(self) -> bool:
        """Whether this scope waits for a report of `NOWHERE`. A restored scope waits for every peer it ever dealt with."""
        peer = self.view.get(f"peer/{NOWHERE}")
        return peer is not None and peer.spec.standing is PeerConfirmation.AWAITED

    async def close_nodes(self) -> None:
        """Mark the nodes suspect, so that nothing is placed on them until the next attempt."""
        for name in (HOME, CORDONED):
            row = await self.read(key_of("Node", name))
            if row is not None and row.obj.status.health is NodeHealth.READY:
                await self.send(Role.NODES, Mark(name, row.revision, NodeHealth.SUSPECT))

    async def _mark_new_node_lost(self) -> None:
        new = await self.read(key_of("Node", NEW))
        if new is not None and new.obj.status.health is NodeHealth.UNKNOWN:
            # After a restore every node is unknown, and this one would never become ready.
            await self.send(Role.NODES, Mark(NEW, new.revision, NodeHealth.LOST))

    async def pending(self, workload: str) -> tuple[str, int] | None:
        """A pending replica of that workload and its revision; creates one if there is none."""
        waiting = self.own_replicas(workload, Phase.PENDING)
        if not waiting:
            owner = self.view.get(key_of("Workload", f"{NAME}-{workload}", NAME))
            if owner is None or owner.metadata.deleting:
                return None
            taken = {self.view.get(key).spec.index for key in self.own_replicas(workload, *Phase)}
            index = next((n for n in range(REPLICAS.get(workload, 1)) if n not in taken), None)
            if index is None:
                return None
            await self.send(Role.WORKLOADS, Spawn(NAME, f"{NAME}-{workload}", owner.metadata.generation, index))
            waiting = [key_of("Replica", f"{NAME}-{workload}-{index}", NAME)]
        row = await self.read(waiting[0])
        return None if row is None else (waiting[0], row.revision)

    async def bind(
        self,
        workload: str,
        node: str = HOME,
        *,
        grant: str = f"tenant/{NAME}",
        devices: Mapping[str, int] | None = None,
        age_ms: int | None = None,
    ) -> Verdict | None:
        pending = await self.pending(workload)
        if pending is None:
            return None
        claim = Bind(pending[0], pending[1], node, grant, dict(devices or {}))
        return (await self.send(Role.SCHEDULER, claim, age_ms=age_ms))[0]

    async def placed(self, workload: str = "plain") -> tuple[str, Replica, int] | None:
        """A replica that is bound on `HOME`. Several adversaries share the objects and may undo each other's steps, so it is
        tried a few times.
        """
        for _ in range(4):
            for key in self.own_replicas(workload, Phase.BOUND):
                row = self.view.rows[key]
                if row.obj.status.node == HOME:
                    return key, row.obj, row.revision
            verdict = await self.bind(workload, devices={"gpu-0": 1000} if workload == "gpu" else None)
            if verdict is None:
                await self.clean_up()  # no replica is pending: the bound ones have moved on to later phases
            elif isinstance(verdict, Refused):
                await self.ensure_objects()
            await self.read("")
        return None

    # -- cleanup ---------------------------------------------------------------------------------------------------------

    async def clean_up(self, *, including_pending: bool = False) -> None:
        """Release replicas and close grants, one step at a time. `including_pending`: pending replicas too."""
        spared = () if including_pending else (Phase.PENDING,)
        for _ in range(6):
            await self.read("")
            remaining = [row for _, row in self.view.of_kind(f"replica/{NAME}/") if row.obj.status.phase not in spared]
            if not remaining:
                break
            for row in remaining:
                await self._move_towards_released(row)
        grants: list[Grant] = [row.obj for _, row in self.view.of_kind("grant/") if _is_own_grant(row.obj)]
        for grant in grants:
            if not grant.spec.holder.startswith("scope/") and not grant.spec.issuer:
                await self.send(Role.BUDGETS, Close(grant.metadata.name))
        if self._is_awaited() or any(grant.spec.holder == NOWHERE for grant in grants):
            await self.send(Role.OPERATOR, DeclareLost(NOWHERE))
        for key, row in list(self.view.of_kind(f"workload/{NAME}/")):
            if row.obj.metadata.deleting:
                await self.send(Role.WORKLOADS, Delete("Workload", key.rsplit("/", 1)[1], NAME))

    async def _move_towards_released(self, row: CachedRow) -> None:
        replica: Replica = row.obj
        key, status = key_of("Replica", replica.metadata.name, NAME), replica.status
        if status.phase is Phase.RELEASED:
            await self.send(Role.WORKLOADS, Forget(key, row.revision))
        elif not status.node or status.node.startswith(NAME):  # the lease of another node's agent must not be taken
            transition, role = TOWARDS_RELEASED[status.phase]
            result = "stopped" if transition == "stopped" else ""
            await self.send(role, Move(key, row.revision, transition, status.attempt, result), node=status.node or HOME)

    async def delete_objects(self) -> None:
        """Delete all its objects; retried, because controllers may still use some of them."""
        references = [("Workload", f"{NAME}-{name}", NAME) for name in SPECS]
        references += [("Node", name, "") for name in (HOME, CORDONED, NEW)]
        references += [*(("PriorityClass", name, "") for name in (PREEMPTING, NON_PREEMPTING)), ("Tenant", TWIN, "")]
        for _ in range(10):
            if await self.read(key_of("Tenant", NAME)) is None:
                return
            await self.clean_up(including_pending=True)
            await self.send(Role.OPERATOR, *(Delete(*reference) for reference in (*references, ("Tenant", NAME, ""))))
            await self.world.clock.sleep_ms(self.context.timing.heartbeat_ms)


def _is_own_grant(grant: Grant) -> bool:
    tenants = (NAME, TWIN)
    return grant.spec.tenant in tenants or any(name in grant.spec.shares for name in tenants)


def _object_key(obj: AnyObject) -> str:
    return key_of(type(obj).__name__, obj.metadata.name, obj.metadata.tenant)
