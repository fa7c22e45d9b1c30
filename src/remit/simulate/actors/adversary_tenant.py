"""Tenant, nodes and workloads owned by the adversary.

In a yard of its own: a tenant, nodes and workloads that nobody's work depends on.

Everything in it is called `meddler…`. Its workloads want a few replicas each and never have more: surplus that one controller
takes away and another brings back would keep both busy for ever. They go only to the yard's nodes, and those are tainted, so
nobody else's work does; and the nodes are ready only during a mischief, so nobody fills them meanwhile. No agent runs there:
the meddler holds the leases of those nodes' agents, and what it has placed it takes away again, step by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from msgspec.structs import replace

from remit.client.authority_client import Client, NoAnswer
from remit.commitment.rulings.registry import UNLEASED
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
    Role,
    Spawn,
    Verdict,
)
from remit.model.kinds import (
    Affinity,
    Device,
    DeviceAsk,
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
from remit.model.metadata import Metadata
from remit.model.objects import AnyObject, key_of
from remit.model.records import Grant, Phase, Replica, Standing
from remit.model.resources import Amount, Duration
from remit.model.wire.agent_messages import Beat, NodeState
from remit.observation.watch_cache import Kept
from remit.simulate.actors.role import Seat

NAME: Final = "meddler"
MEDDLED: Final = f"node/{NAME}-"
"""Nodes that take work only when the meddler says so, who has them."""
TWIN: Final = f"{NAME}-twin"
"""Another tenant, or another holder, with whom nobody else deals either."""
RANK: Final = f"{NAME}-rank"
MEEK: Final = f"{NAME}-meek"
PRIORITY: Final = 10
"""Of the two classes of the yard; the second preempts nobody."""
NOWHERE: Final = f"scope/{NAME}-nowhere"
"""A scope that never was: what is lent to it comes back when it is declared lost."""

LEASE_MS: Final = 120_000
WANTED: Final[Mapping[str, int]] = {"plain": 3, "shy": 2, "gpu": 2, "gang": 3, "pack": 3}
"""How many replicas a workload of the yard has; else one. All that wait are looked at by the scheduler again and again."""
HOME: Final = f"{NAME}-home"
SHUT: Final = f"{NAME}-shut"
NEW: Final = f"{NAME}-new"
ASKED: Final = 100

OUT: Final[Mapping[Phase, tuple[str, Role]]] = {
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
"""From each phase the transition that leads out, and who takes it."""

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


def _shape(
    where: Mapping[str, Any],
    *,
    cpu: int = ASKED,
    gpus: int = 0,
    models: tuple[str, ...] = (),
    gang: int = 0,
    tolerant: bool = True,
) -> WorkloadSpec:
    tolerations = (Toleration(key=NAME, operator="Exists"),) if tolerant else ()
    template = Template(
        command=("work", "-", "0"),
        resources=Amount({"cpu": cpu}),
        devices=(DeviceAsk(kind="gpu", count=gpus, models=models),) if gpus else (),
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

SHAPES: Final[Mapping[str, WorkloadSpec]] = {
    "plain": _shape({}),
    "shy": _shape({"anti_affinity": (_NEAR,)}),
    "lonely": _shape({"affinity": (Affinity(label_selector={NAME: "nobody"}, topology_key="zone"),)}),
    "skewed": _shape({"topology_spread": (Spread(topology_key="no-such-label"),)}),
    "abroad": _shape({"zones": ("nowhere",)}),
    "barred": _shape({}),
    "choosy": _shape({"node_selector": {"disk": "of-gold"}}),
    "frail": _shape({}, tolerant=False),
    "huge": _shape({}, cpu=9_000_000),
    "greedy": _shape({}, cpu=7_000),
    "gpu": _shape({}, gpus=1, models=("a",)),
    "gpus": _shape({}, gpus=64),
    "gang": _shape({"zones": ("nowhere",)}, gang=3),
    "going": _shape({}),
    "pack": _shape({}, gang=2),
    "ranked": replace(_shape({}), priority_class=RANK),
    "meek": replace(_shape({}), priority_class=MEEK),
    "once": replace(_shape({}), type="job", rollout=Rollout(), retries=0),
    "errand": replace(_shape({}), type="job", rollout=Rollout()),
}
"""Each breaks one rule wherever it is put, but for `plain`, `shy`, `gpu`, `going` and those after it, which fit at home."""
PAUSE_TTL: Final = Duration(3_600_000)


class Yard:
    """One asker in many roles, one thing at a time. Nothing is asked twice: what went unanswered is left as it may be."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.view = seat.view
        self.world = seat.world
        self.chance = seat.world.chance.stream(NAME)
        self.client: Client = seat.client(Actor(NAME, Role.USER))
        self._epochs: dict[str, tuple[int, int]] = {}
        self._reached = 0

    # -- asking ----------------------------------------------------------------------------------------------------------

    async def say(self, role: Role, *claims: AnyClaim, node: str = HOME, age_ms: int | None = None) -> list[Verdict]:
        """Ask in a role, at its lease if it needs one. Raises `NoAnswer`."""
        return await self.say_as(await self.actor(role, node), *claims, age_ms=age_ms)

    async def say_as(self, actor: Actor, *claims: AnyClaim, age_ms: int | None = None) -> list[Verdict]:
        self.client.actor = actor
        evidence = Evidence(self.view.revision, self.view.age_ms() if age_ms is None else age_ms)
        return self._noted(actor, await self.client.ask_many(claims, evidence=evidence))

    async def say_again(self, *operations: Operation) -> list[Verdict]:
        return self._noted(operations[0].actor, await self.client.resume(operations))

    def _noted(self, actor: Actor, verdicts: Sequence[Verdict]) -> list[Verdict]:
        for verdict in verdicts:
            self._reached = max(self._reached, verdict.revision)
            if isinstance(verdict, Refused) and verdict.code in (Code.STALE_EPOCH, Code.LEASE_EXPIRED):
                self._epochs.pop(actor.lease, None)
        return list(verdicts)

    async def actor(self, role: Role, node: str = HOME) -> Actor:
        """The lease is of the role, and never one that somebody else works with."""
        if role in UNLEASED:
            return Actor(NAME, role)
        lease, now_ms = f"{role}/{node if role is Role.AGENT else NAME}", self.world.clock.now_ms()
        epoch, until_ms = self._epochs.get(lease, (0, 0))
        if now_ms >= until_ms:
            said = (await self.say_as(Actor(NAME, role), Acquire(lease, Duration(LEASE_MS))))[0]
            epoch = said.number if isinstance(said, Accepted) else 0
            self._epochs[lease] = epoch, now_ms + LEASE_MS // 2
        return Actor(NAME, role, lease, epoch)

    async def beat(self) -> None:
        """For ever: say that its nodes are there, so that nobody takes them for silent. They never say that they have settled:
        so nobody else calls them ready.
        """
        client, beat_ms = self.seat.client(Actor(NAME, Role.AGENT)), self.seat.pace.beat_ms
        while True:
            leases = {name: f"{Role.AGENT}/{name}" for name in (HOME, SHUT)}
            held = {name: self._epochs[lease][0] for name, lease in leases.items() if lease in self._epochs}
            beats = [Beat(Actor(NAME, Role.AGENT, leases[name], epoch), NodeState(name)) for name, epoch in held.items()]
            with suppress(NoAnswer):
                await client.beat(beats, deadline_ms=beat_ms)
            await self.world.clock.sleep_ms(beat_ms)

    def forget_lease(self, actor: Actor) -> None:
        """It is acquired anew before it is next acted under."""
        self._epochs.pop(actor.lease, None)

    def gave_up(self, error: NoAnswer) -> None:
        for operation in error.operation_ids:
            self.seat.ear.gave_up(self.seat.process.name, self.seat.scope, operation)

    # -- looking ---------------------------------------------------------------------------------------------------------

    async def look(self, key: str) -> Kept | None:
        """What stands there, once the view has what was answered here; or, if that takes long, before."""
        for _ in range(20):
            if self.view.revision >= self._reached:
                break
            await self.world.clock.sleep_ms(50)
        return self.view.rows.get(key)

    def own(self, workload: str, *phases: Phase) -> list[str]:
        keys = self.view.by_workload.get((NAME, f"{NAME}-{workload}"), {})
        return [key for key in keys if self.view.get(key).status.phase in phases]

    def others(self, prefix: str) -> list[tuple[str, Kept]]:
        """What is not of the yard."""
        return [(key, seen) for key, seen in self.view.kind(prefix) if f"/{NAME}" not in key]

    # -- the yard --------------------------------------------------------------------------------------------------------

    def furniture(self) -> list[AnyObject]:
        region = self.seat.scope
        quota = Amount({"cpu": 5_000, "memory": 8 << 30, "devices/gpu": 2_000})
        spec = TenantSpec(quota=quota, emergency_quota=Amount({"cpu": 1_000}))
        things: list[AnyObject] = [Tenant(metadata=Metadata(name=name), spec=spec) for name in (NAME, TWIN)]
        things += [
            PriorityClass(metadata=Metadata(name=name), spec=PriorityClassSpec(value=PRIORITY, preempts=name == RANK))
            for name in (RANK, MEEK)
        ]
        things += [_node(HOME, region), _node(SHUT, region, unschedulable=True), _node(NEW, region)]
        # Whoever schedules in earnest is quicker than a meddler, and would leave it nothing to meddle with.
        own = OverrideScope(tenants=(NAME,))
        pause = OverrideSpec(effect="pause-expansion", scope=own, ttl=PAUSE_TTL, reason="placed by hand", author=NAME)
        things.append(Override(metadata=Metadata(name=f"{NAME}-pause"), spec=pause))
        return things + [self.workload(name) for name in SHAPES]

    def workload(self, name: str) -> Workload:
        spec = replace(SHAPES[name], replicas=WANTED.get(name, 1))
        return Workload(metadata=Metadata(name=f"{NAME}-{name}", tenant=NAME, labels={NAME: name}), spec=spec)

    async def furnish(self) -> None:
        """Put there what is missing, and let the two nodes that should be ready be so."""
        missing = [thing for thing in self.furniture() if self.view.get(_key(thing)) is None]
        if missing:
            await self.say(Role.OPERATOR, *(Apply(thing) for thing in missing))
        for name in (HOME, SHUT):
            for _ in range(2):
                seen = await self.look(key_of("Node", name))
                if seen is not None and seen.thing.status.health in _TOWARDS_READY:
                    await self.say(Role.NODES, Mark(name, seen.revision, _TOWARDS_READY[seen.thing.status.health]))
        await self._settle_new()
        for name in (HOME, SHUT):
            await self.actor(Role.AGENT, name)
        if self._awaited():
            await self.say(Role.OPERATOR, DeclareLost(NOWHERE))  # else nobody places anything

    def _awaited(self) -> bool:
        """A restored scope awaits everybody that it ever dealt with."""
        peer = self.view.get(f"peer/{NOWHERE}")
        return peer is not None and peer.spec.standing is Standing.AWAITED

    async def shut_down(self) -> None:
        """Nobody is to place anything here until the next mischief."""
        for name in (HOME, SHUT):
            seen = await self.look(key_of("Node", name))
            if seen is not None and seen.thing.status.health is NodeHealth.READY:
                await self.say(Role.NODES, Mark(name, seen.revision, NodeHealth.SUSPECT))

    async def _settle_new(self) -> None:
        new = await self.look(key_of("Node", NEW))
        if new is not None and new.thing.status.health is NodeHealth.UNKNOWN:
            # After a restore every node is awaited, and this one never becomes ready.
            await self.say(Role.NODES, Mark(NEW, new.revision, NodeHealth.LOST))

    async def pending(self, workload: str) -> tuple[str, int] | None:
        """A replica of that workload that waits, and its revision."""
        waiting = self.own(workload, Phase.PENDING)
        if not waiting:
            owner = self.view.get(key_of("Workload", f"{NAME}-{workload}", NAME))
            if owner is None or owner.metadata.deleting:
                return None
            taken = {self.view.get(key).spec.index for key in self.own(workload, *Phase)}
            index = next((n for n in range(WANTED.get(workload, 1)) if n not in taken), None)
            if index is None:
                return None
            await self.say(Role.WORKLOADS, Spawn(NAME, f"{NAME}-{workload}", owner.metadata.generation, index))
            waiting = [key_of("Replica", f"{NAME}-{workload}-{index}", NAME)]
        seen = await self.look(waiting[0])
        return None if seen is None else (waiting[0], seen.revision)

    async def bind(
        self,
        workload: str,
        node: str = HOME,
        *,
        grant: str = f"tenant/{NAME}",
        devices: Mapping[str, int] | None = None,
        age_ms: int | None = None,
    ) -> Verdict | None:
        found = await self.pending(workload)
        if found is None:
            return None
        claim = Bind(found[0], found[1], node, grant, dict(devices or {}))
        return (await self.say(Role.SCHEDULER, claim, age_ms=age_ms))[0]

    async def placed(self, workload: str = "plain") -> tuple[str, Replica, int] | None:
        """A replica that is bound at home. Others meddle here too: what they have just undone is done again, a few times."""
        for _ in range(4):
            for key in self.own(workload, Phase.BOUND):
                seen = self.view.rows[key]
                if seen.thing.status.node == HOME:
                    return key, seen.thing, seen.revision
            said = await self.bind(workload, devices={"gpu-0": 1000} if workload == "gpu" else None)
            if said is None:
                await self.tidy()  # none waits: those that were placed have gone further
            elif isinstance(said, Refused):
                await self.furnish()
            await self.look("")
        return None

    # -- leaving no trace ------------------------------------------------------------------------------------------------

    async def tidy(self, *, wholly: bool = False) -> None:
        """Take away what was placed and lent, one step after another; `wholly`: also what waits."""
        spared = () if wholly else (Phase.PENDING,)
        for _ in range(6):
            await self.look("")
            left = [seen for _, seen in self.view.kind(f"replica/{NAME}/") if seen.thing.status.phase not in spared]
            if not left:
                break
            for seen in left:
                await self._one_step_out(seen)
        lent: list[Grant] = [seen.thing for _, seen in self.view.kind("grant/") if _of_the_yard(seen.thing)]
        for grant in lent:
            if not grant.spec.holder.startswith("scope/") and not grant.spec.issuer:
                await self.say(Role.BUDGETS, Close(grant.metadata.name))
        if self._awaited() or any(grant.spec.holder == NOWHERE for grant in lent):
            await self.say(Role.OPERATOR, DeclareLost(NOWHERE))
        for key, seen in list(self.view.kind(f"workload/{NAME}/")):
            if seen.thing.metadata.deleting:
                await self.say(Role.WORKLOADS, Delete("Workload", key.rsplit("/", 1)[1], NAME))

    async def _one_step_out(self, seen: Kept) -> None:
        replica: Replica = seen.thing
        key, status = key_of("Replica", replica.metadata.name, NAME), replica.status
        if status.phase is Phase.RELEASED:
            await self.say(Role.WORKLOADS, Forget(key, seen.revision))
        elif not status.node or status.node.startswith(NAME):  # the lease of any other node's agent is not to be touched
            transition, role = OUT[status.phase]
            result = "stopped" if transition == "stopped" else ""
            await self.say(role, Move(key, seen.revision, transition, status.attempt, result), node=status.node or HOME)

    async def leave(self) -> None:
        """Take the whole yard away; again, if somebody was in the way."""
        kinds = [("Workload", f"{NAME}-{name}", NAME) for name in SHAPES]
        kinds += [("Node", name, "") for name in (HOME, SHUT, NEW)]
        kinds += [*(("PriorityClass", name, "") for name in (RANK, MEEK)), ("Tenant", TWIN, "")]
        for _ in range(10):
            if await self.look(key_of("Tenant", NAME)) is None:
                return
            await self.tidy(wholly=True)
            await self.say(Role.OPERATOR, *(Delete(*one) for one in (*kinds, ("Tenant", NAME, ""))))
            await self.world.clock.sleep_ms(self.seat.pace.beat_ms)


def _of_the_yard(grant: Grant) -> bool:
    tenants = (NAME, TWIN)
    return grant.spec.tenant in tenants or any(name in grant.spec.shares for name in tenants)


def _key(thing: AnyObject) -> str:
    return key_of(type(thing).__name__, thing.metadata.name, thing.metadata.tenant)
