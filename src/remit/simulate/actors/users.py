"""Users and operators: submit, scale, drain, change quotas.

Users submit a random mix of workloads; an operator drains nodes, changes quotas and creates overrides meanwhile. An intent
keeps its operation id until it is answered or abandoned, however long that takes.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from remit.client.authority_client import RetriesExhausted
from remit.law.ledgers import SCOPE_PREFIX
from remit.model.claims import Actor, AnyClaim, Apply, DeclareLost, Delete, Operation, Role, Verdict
from remit.model.kinds import (
    Affinity,
    DeviceRequest,
    Disruption,
    Gang,
    HttpProbe,
    Mount,
    Override,
    OverrideEffect,
    OverrideScope,
    OverrideSpec,
    Placement,
    PortRequest,
    PriorityClass,
    PriorityClassSpec,
    Probe,
    Probes,
    Region,
    RegionSpec,
    Restart,
    Rollout,
    Spread,
    Template,
    Tenant,
    TenantSpec,
    Workload,
    WorkloadSpec,
)
from remit.model.metadata import Metadata
from remit.model.records import Phase
from remit.model.resources import Amount, Duration
from remit.model.secrets import Config, DataSpec
from remit.simulate.actors.adversary_tenant import NODE_PREFIX
from remit.simulate.actors.role import RoleContext
from remit.simulate.scenarios import LoadSpec
from remit.simulate.world import random_streams
from remit.simulate.world.runner import SimProgram
from remit.world.interfaces import Chance

TENANTS = ("acme", "beta")
SETTINGS = "settings"
URGENT = "urgent"
NODE_CPUS: Final = 4
"""CPUs of a node, see `node_named`."""

WORKLOAD_KINDS: Final = {
    "job": "ends by itself, sometimes with an error",
    "service": "runs until it is stopped",
    "gang": "a job that starts at least two replicas at once, or none",
    "urgent": "a job of higher priority, which may preempt others",
    "device": "a job that needs a whole device",
    "spread": "a service spread over zones, with at most one replica per node",
    "fleeting": "a service that ends by itself after a while",
    "stubborn": "a service that ignores SIGTERM",
    "herd": "a gang that needs most of every node at once",
    "impossible": "an urgent job that fits on no node",
    "flood": "an urgent job of hundreds of replicas that fit on no node",
    "steadfast": "a service that allows one of its replicas to be unavailable",
}
"""Kinds of work that a load may consist of."""
SERVICES: Final = ("service", "spread", "stubborn", "fleeting", "steadfast")
OVERRIDES_MAX: Final = 8
DRAIN_HEARTBEATS: Final = 5
"""Shorter than the time until work that ignores SIGTERM is gone, so that drains report what blocks them."""
FLOOD_FACTOR: Final = 200
"""Replicas of a flood, as a multiple of what other work would have."""


class Users:
    """The users and the operator of one scope."""

    def __init__(self, seat: RoleContext, load: LoadSpec, *, cpu: int, above: bool, below: bool) -> None:
        self.seat = seat
        self.load = load
        self.cpu = cpu
        """CPUs of all nodes together; quotas are a share of it."""
        self.above, self.below = above, below
        self.chance: Chance = seat.world.chance.stream(random_streams.USERS)
        self._filling: Chance = seat.world.chance.stream(random_streams.INITIAL_REPLICAS)
        self.user = seat.client(Actor("ada", Role.USER))
        self.operator = seat.client(Actor("ops", Role.OPERATOR))
        self.submitted = self.overridden = 0
        self._mark = seat.process.name.rsplit("-", 1)[1]
        """Distinguishes several client processes of one scope; names of workloads contain it."""
        self._drained: list[str] = []

    # -- requests --------------------------------------------------------------------------------------------------------

    async def insist(self, claim: AnyClaim, *, operator: bool = False) -> Verdict | None:
        """Retry under the same operation id until there is an answer. After several failures the operation may be abandoned
        instead.
        """
        client = self.operator if operator else self.user
        clock, patience = self.seat.world.clock, 0
        operations: tuple[Operation, ...] = ()
        while True:
            try:
                if not operations:
                    return await client.submit(claim)
                if patience > 3 and self.chance.below(4) == 0:
                    return await client.abandon(operations[0].id)
                return (await client.resume(operations))[0]
            except RetriesExhausted as error:
                patience += 1
                operations = operations or error.operations
                self.seat.give_up(error)
                await clock.sleep_ms(500 + self.chance.uniform_ms(4_000))

    # -- actions ---------------------------------------------------------------------------------------------------------

    async def found(self) -> None:
        """Create the objects that everything else needs."""
        scope = self.seat.scope
        await self.insist(Apply(Region(metadata=Metadata(name=scope), spec=RegionSpec())), operator=True)
        rank = PriorityClass(metadata=Metadata(name=URGENT), spec=PriorityClassSpec(value=100))
        await self.insist(Apply(rank), operator=True)
        for name in TENANTS:
            await self.insist(Apply(self._tenant(name, self.load.quota)), operator=True)
            if self.load.reads:
                data = DataSpec(data={"MODE": "live"})
                await self.insist(Apply(Config(metadata=Metadata(name=SETTINGS, tenant=name), spec=data)))

    def _tenant(self, name: str, percent: int) -> Tenant:
        cpu = 0 if self.above else max(1, self.cpu * percent // 100)
        quota = Amount.parse({"cpu": str(cpu), "memory": f"{2 * cpu}Gi", "devices": {"gpu": max(0, cpu // 6)}})
        extra = Amount.parse({"cpu": str(cpu // 4), "memory": f"{cpu // 2}Gi"})
        return Tenant(metadata=Metadata(name=name), spec=TenantSpec(quota=quota, emergency_quota=extra))

    async def live(self) -> None:
        """Submit, change and delete, until the quiet phase."""
        await self.found()
        if self.below:
            return  # workloads are submitted only to scopes that have nodes
        pause_ms = 60_000 / max(self.load.per_minute, 0.01)
        while True:
            await self.seat.world.clock.sleep_ms(round(pause_ms * (0.3 + 1.4 * self.chance.below(1_000) / 1_000)))
            if self.seat.pace.quiet:
                continue
            await self._something()

    async def _something(self) -> None:
        mine = [seen.thing for key, seen in self.seat.view.kind("workload/") if not key.startswith("workload/meddler/")]
        standing = [one for one in mine if not one.metadata.deleting]
        drawn = self.chance.below(100) - self.load.deletes
        if len(standing) > self.load.standing_max or (drawn < 0 and len(standing) > 3):
            await self._delete(standing)
        elif drawn < 10 and standing:
            await self._change(self.chance.choice(standing))
        elif self.load.operations and drawn < 10 + self.load.operations:
            await self._operate()
        elif self.load.overrides and drawn < 10 + self.load.operations + self.load.overrides:
            await self._override()
        else:
            await self.insist(Apply(self._workload(), fill=self._fills()))

    async def _delete(self, standing: list[Workload]) -> None:
        """Delete a workload; finished jobs first."""
        view = self.seat.view

        def done(workload: Workload) -> bool:
            keys = view.by_workload.get((workload.metadata.tenant, workload.metadata.name), {})
            return all(view.get(key).status.phase is Phase.RELEASED for key in keys)

        finished = [one for one in standing if one.spec.type == "job" and done(one)]
        one = self.chance.choice(finished or standing)
        await self.insist(Delete("Workload", one.metadata.name, one.metadata.tenant))

    async def _change(self, workload: Workload) -> None:
        if workload.spec.gang is not None or workload.spec.type == "job":
            return
        if self.chance.below(2):
            spec = replace(workload.spec, replicas=1 + self.chance.below(2 * self.load.size))
        else:
            env = {"BUILD": str(self.chance.below(1_000))}
            spec = replace(workload.spec, template=replace(workload.spec.template, env=env))
        await self.insist(Apply(Workload(metadata=_declared(workload.metadata), spec=spec), fill=self._fills()))

    def _fills(self) -> bool:
        """Half of the requests create the initial replicas with the workload, as the API does; the others leave that to the
        controllers.
        """
        return self._filling.below(2) == 0

    async def declare_lost(self, scope: str) -> None:
        """As an operator: declare a region lost, so that its capacity can be granted to others."""
        await self.insist(DeclareLost(SCOPE_PREFIX + scope), operator=True)

    async def _operate(self) -> None:
        view = self.seat.view
        nodes = [seen.thing for key, seen in view.kind("node/") if not key.startswith(NODE_PREFIX)]
        drawn = self.chance.below(3)
        if drawn == 0 and not self.above:
            await self.insist(Apply(self._tenant(self.chance.choice(TENANTS), 40 + self.chance.below(60))), operator=True)
        elif self._drained and drawn == 1:
            await self.open_all()
        elif nodes and len(self._drained) * 3 < len(nodes):
            busy = [node for node in nodes if self._is_starting(node.metadata.name)]
            node = self.chance.choice(busy if busy and self.chance.below(4) else nodes)
            self._drained.append(node.metadata.name)
            spec = replace(node.spec, draining=True, drain_deadline=Duration(DRAIN_HEARTBEATS * self.seat.pace.beat_ms))
            await self.insist(Apply(replace(node, metadata=_declared(node.metadata), spec=spec)), operator=True)

    async def _override(self) -> None:
        """Create an override, or delete one before or after it has expired."""
        chance, scope = self.chance, self.seat.scope
        standing = [key.removeprefix("override/") for key, _ in self.seat.view.kind("override/")]
        if standing and (chance.below(3) == 0 or len(standing) > OVERRIDES_MAX):
            await self.insist(Delete("Override", chance.choice(standing)), operator=True)
            return
        work = [key.removeprefix("workload/") for key, _ in self.seat.view.kind("workload/")]
        tenant, place = chance.choice(TENANTS), f"{scope}-{chance.choice('abc')}"
        speaks_of: dict[str, tuple[str, ...]] = {"tenants": (tenant,)}
        if work and chance.below(2):
            speaks_of = {"workloads": (chance.choice(work),)}
        effect: OverrideEffect = chance.choice(("avoid", "pin", "pause-expansion", "boost"))
        if effect == "avoid":
            speaks_of = {"zones": (place,)}
        elif effect == "pin":
            speaks_of["zones"] = (place,)
        self.overridden += 1
        spec = OverrideSpec(
            effect=effect,
            scope=OverrideScope(**speaks_of),
            ttl=Duration(self.seat.pace.beat_ms * (4 + chance.below(20))),
            reason="it seems wiser",
            author="ops",
            by=50 if effect == "boost" else 0,
        )
        await self.insist(
            Apply(Override(metadata=Metadata(name=f"word-{self._mark}-{self.overridden}"), spec=spec)), operator=True
        )

    def _is_starting(self, node: str) -> bool:
        """Whether a replica is being started there. Draining at this moment exercises races."""
        view = self.seat.view
        return any(view.get(key).status.phase in (Phase.BOUND, Phase.STARTING) for key in view.by_node.get(node, ()))

    async def open_all(self) -> None:
        """Uncordon all nodes that were drained."""
        drained, self._drained = self._drained, []
        for name in drained:
            node = self.seat.view.get(f"node/{name}")
            if node is not None and node.spec.draining:
                spec = replace(node.spec, draining=False)
                await self.insist(Apply(replace(node, metadata=_declared(node.metadata), spec=spec)), operator=True)

    # -- workloads -------------------------------------------------------------------------------------------------------

    def named(self, kind: str, ahead: int = 0) -> str:
        """Name of the last submitted workload if it was of this kind, or of the one that comes `ahead` submissions later."""
        number = self.submitted + ahead
        return f"{kind}-{number}" if self._mark == "1" else f"{kind}-{self._mark}-{number}"

    def _workload(self) -> Workload:
        self.submitted += 1
        chance, kind = self.chance, self.chance.choice(self.load.kinds)
        name = self.named(kind)
        tenant = chance.choice(TENANTS)
        many = 1 + chance.below(2 * self.load.size)
        placement, gang, rank = Placement(), None, ""
        devices: tuple[DeviceRequest, ...] = ()
        cpu = chance.choice(("250m", "500m", "1"))
        replace_ = chance.choice(("", "", "fenced", "eager"))
        type_ = "service" if kind in SERVICES else "job"
        match kind:
            case "gang":
                many = 2 + chance.below(3)
                gang = Gang(min=2)
            case "urgent":
                rank, cpu, many = URGENT, "2", 1
            case "herd":
                many = self.cpu // NODE_CPUS
                gang, cpu = Gang(min=many), "3"
            case "impossible" | "flood":
                rank, cpu = URGENT, "64"
                many *= FLOOD_FACTOR if kind == "flood" else 1
            case "steadfast":
                many = 2 + chance.below(2)
            case "device":
                devices, many = (DeviceRequest(kind="gpu", count=1),), 1
            case "spread":
                many = 2 + chance.below(2)
                placement = Placement(
                    topology_spread=(Spread(topology_key="zone"),),
                    anti_affinity=(Affinity(label_selector={"app": name}, topology_key="node"),),
                )
        program = SimProgram(
            None
            if type_ == "service" and kind != "fleeting"
            else (10_000 if kind == "fleeting" else 3_000) + chance.below(90_000),
            0 if chance.below(10) else 1,
            chance.choice((0, 200, 2_000, None)) if kind != "stubborn" else None,
        )
        template = Template(command=program.argv(), resources=Amount.parse({"cpu": cpu, "memory": "256Mi"}), devices=devices)
        spec = WorkloadSpec(
            type=type_,  # type: ignore[arg-type]
            template=self._in_service(template) if type_ == "service" else template,
            replicas=many,
            priority_class=rank,
            replace=replace_,  # type: ignore[arg-type]
            fence=Duration(Duration.parse(self.load.fence) * self.seat.pace.beat_ms // 2_000),
            placement=placement,
            gang=gang,
            rollout=Rollout(max_surge=1),
            disruption=Disruption(min_available=many - 1 if kind == "steadfast" else 0),
        )
        return Workload(metadata=Metadata(name=name, tenant=tenant, labels={"app": name}), spec=spec)

    def _in_service(self, template: Template) -> Template:
        """A template for services: restarted within its attempt after a backoff; some of them listen on a port and have probes.
        """
        chance, beat_ms = self.chance, self.seat.pace.beat_ms
        if self.load.reads:
            template = replace(template, configs=(Mount(name=SETTINGS, path="settings"),))
        again = Restart(
            when=chance.choice(("", "", "", "", "never", "failure")),
            backoff=Duration(beat_ms // 2),
            backoff_max=Duration(4 * beat_ms),
        )
        if chance.below(3):
            return replace(template, restart=again)
        words = ["listen=$(PORT_http)", f"ready={chance.uniform_ms(4 * beat_ms)}"]
        if chance.below(4) == 0:
            words.append(f"sick={10_000 + chance.below(60_000)}")
        probe = Probe(http=HttpProbe(port="http"), period=Duration(beat_ms), timeout=Duration(beat_ms // 2))
        probes = Probes(
            start=replace(probe, failures=20) if chance.below(2) else None,
            ready=probe,
            live=replace(probe, failures=8) if chance.below(3) == 0 else None,
        )
        return replace(
            template, command=(*template.command, *words), ports=(PortRequest(name="http"),), probes=probes, restart=again
        )


def _declared(metadata: Metadata) -> Metadata:
    """Metadata as a user would write it, without the fields that the authority sets."""
    return Metadata(name=metadata.name, tenant=metadata.tenant, labels=metadata.labels)
