"""Users and operators: submit, scale, drain, change quotas.

Users submit a random mix of workloads; an operator drains nodes, changes quotas and creates overrides meanwhile. An intent
keeps its operation id until it is answered or abandoned, however long that takes.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from remit.client.authority_client import RetriesExhausted
from remit.law.ledgers import SCOPE_PREFIX
from remit.model.claims import Actor, AnyClaim, Apply, DeclareLost, Delete, Operation, Verdict
from remit.model.kinds import (
    Affinity,
    Config,
    DataSpec,
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
from remit.model.roles import Role
from remit.simulate.actors.adversary_tenant import NODE_PREFIX
from remit.simulate.actors.role import RoleContext
from remit.simulate.scenario_types import LoadSpec
from remit.simulate.world import random_streams
from remit.simulate.world.runner import SimProgram
from remit.world.interfaces import Randomness

TENANTS = ("acme", "beta")
SETTINGS = "settings"
URGENT = "urgent"
NODE_CPUS: Final = 4
"""CPUs of a node, see `agents.make_node`."""

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

    def __init__(self, context: RoleContext, load: LoadSpec, *, cpu: int, has_parent: bool, is_parent: bool) -> None:
        self.context = context
        self.load = load
        self.cpu = cpu
        """CPUs of all nodes together; quotas are a share of it."""
        self.has_parent, self.is_parent = has_parent, is_parent
        self.rng: Randomness = context.world.randomness.stream(random_streams.USERS)
        self._initial_replicas_rng: Randomness = context.world.randomness.stream(random_streams.INITIAL_REPLICAS)
        self.user = context.client(Actor("ada", Role.USER))
        self.operator = context.client(Actor("ops", Role.OPERATOR))
        self.submitted = self.overridden = 0
        self._client_number = context.process.name.rsplit("-", 1)[1]
        """Distinguishes several client processes of one scope; names of workloads contain it."""
        self._drained: list[str] = []

    # -- requests --------------------------------------------------------------------------------------------------------

    async def submit(self, claim: AnyClaim, *, operator: bool = False) -> Verdict | None:
        """Retry under the same operation id until there is an answer. After several failures the operation may be abandoned
        instead.
        """
        client = self.operator if operator else self.user
        clock, failures = self.context.world.clock, 0
        operations: tuple[Operation, ...] = ()
        while True:
            try:
                if not operations:
                    return await client.submit(claim)
                if failures > 3 and self.rng.randrange(4) == 0:
                    return await client.abandon(operations[0].id)
                return (await client.resume(operations))[0]
            except RetriesExhausted as error:
                failures += 1
                operations = operations or error.operations
                self.context.report_abandoned(error)
                await clock.sleep_ms(500 + self.rng.jitter_ms(4_000))

    # -- actions ---------------------------------------------------------------------------------------------------------

    async def bootstrap(self) -> None:
        """Create the objects that everything else needs."""
        scope = self.context.scope
        await self.submit(Apply(Region(metadata=Metadata(name=scope), spec=RegionSpec())), operator=True)
        priority_class = PriorityClass(metadata=Metadata(name=URGENT), spec=PriorityClassSpec(value=100))
        await self.submit(Apply(priority_class), operator=True)
        for name in TENANTS:
            await self.submit(Apply(self._tenant(name, self.load.quota)), operator=True)
            if self.load.reads:
                data = DataSpec(data={"MODE": "live"})
                await self.submit(Apply(Config(metadata=Metadata(name=SETTINGS, tenant=name), spec=data)))

    def _tenant(self, name: str, percent: int) -> Tenant:
        cpu = 0 if self.has_parent else max(1, self.cpu * percent // 100)
        quota = Amount.parse({"cpu": str(cpu), "memory": f"{2 * cpu}Gi", "devices": {"gpu": max(0, cpu // 6)}})
        extra = Amount.parse({"cpu": str(cpu // 4), "memory": f"{cpu // 2}Gi"})
        return Tenant(metadata=Metadata(name=name), spec=TenantSpec(quota=quota, emergency_quota=extra))

    async def run(self) -> None:
        """Submit, change and delete, until the quiet phase."""
        await self.bootstrap()
        if self.is_parent:
            return  # workloads are submitted only to scopes that have nodes
        pause_ms = 60_000 / max(self.load.per_minute, 0.01)
        while True:
            await self.context.world.clock.sleep_ms(round(pause_ms * (0.3 + 1.4 * self.rng.randrange(1_000) / 1_000)))
            if self.context.timing.quiet:
                continue
            await self._random_action()

    async def _random_action(self) -> None:
        own_workloads = [
            row.obj for key, row in self.context.view.of_kind("workload/") if not key.startswith("workload/meddler/")
        ]
        existing = [workload for workload in own_workloads if not workload.metadata.deleting]
        draw = self.rng.randrange(100) - self.load.deletes
        if len(existing) > self.load.standing_max or (draw < 0 and len(existing) > 3):
            await self._delete(existing)
        elif draw < 10 and existing:
            await self._change(self.rng.choice(existing))
        elif self.load.operations and draw < 10 + self.load.operations:
            await self._operator_action()
        elif self.load.overrides and draw < 10 + self.load.operations + self.load.overrides:
            await self._override()
        else:
            await self.submit(Apply(self._workload(), fill=self._with_initial_replicas()))

    async def _delete(self, existing: list[Workload]) -> None:
        """Delete a workload; finished jobs first."""
        view = self.context.view

        def done(workload: Workload) -> bool:
            keys = view.by_workload.get((workload.metadata.tenant, workload.metadata.name), {})
            return all(view.get(key).status.phase is Phase.RELEASED for key in keys)

        finished = [workload for workload in existing if workload.spec.type == "job" and done(workload)]
        workload = self.rng.choice(finished or existing)
        await self.submit(Delete("Workload", workload.metadata.name, workload.metadata.tenant))

    async def _change(self, workload: Workload) -> None:
        if workload.spec.gang is not None or workload.spec.type == "job":
            return
        if self.rng.randrange(2):
            spec = replace(workload.spec, replicas=1 + self.rng.randrange(2 * self.load.size))
        else:
            env = {"BUILD": str(self.rng.randrange(1_000))}
            spec = replace(workload.spec, template=replace(workload.spec.template, env=env))
        await self.submit(Apply(Workload(metadata=_declared(workload.metadata), spec=spec), fill=self._with_initial_replicas()))

    def _with_initial_replicas(self) -> bool:
        """Half of the requests create the initial replicas with the workload, as the API does; the others leave that to the
        controllers.
        """
        return self._initial_replicas_rng.randrange(2) == 0

    async def declare_lost(self, scope: str) -> None:
        """As an operator: declare a region lost, so that its capacity can be granted to others."""
        await self.submit(DeclareLost(SCOPE_PREFIX + scope), operator=True)

    async def _operator_action(self) -> None:
        view = self.context.view
        nodes = [row.obj for key, row in view.of_kind("node/") if not key.startswith(NODE_PREFIX)]
        draw = self.rng.randrange(3)
        if draw == 0 and not self.has_parent:
            await self.submit(Apply(self._tenant(self.rng.choice(TENANTS), 40 + self.rng.randrange(60))), operator=True)
        elif self._drained and draw == 1:
            await self.uncordon_all()
        elif nodes and len(self._drained) * 3 < len(nodes):
            busy = [node for node in nodes if self._is_starting(node.metadata.name)]
            node = self.rng.choice(busy if busy and self.rng.randrange(4) else nodes)
            self._drained.append(node.metadata.name)
            spec = replace(
                node.spec, draining=True, drain_deadline=Duration(DRAIN_HEARTBEATS * self.context.timing.heartbeat_ms)
            )
            await self.submit(Apply(replace(node, metadata=_declared(node.metadata), spec=spec)), operator=True)

    async def _override(self) -> None:
        """Create an override, or delete one before or after it has expired."""
        rng, scope = self.rng, self.context.scope
        existing = [key.removeprefix("override/") for key, _ in self.context.view.of_kind("override/")]
        if existing and (rng.randrange(3) == 0 or len(existing) > OVERRIDES_MAX):
            await self.submit(Delete("Override", rng.choice(existing)), operator=True)
            return
        work = [key.removeprefix("workload/") for key, _ in self.context.view.of_kind("workload/")]
        tenant, zone = rng.choice(TENANTS), f"{scope}-{rng.choice('abc')}"
        override_scope: dict[str, tuple[str, ...]] = {"tenants": (tenant,)}
        if work and rng.randrange(2):
            override_scope = {"workloads": (rng.choice(work),)}
        effect: OverrideEffect = rng.choice(("avoid", "pin", "pause-expansion", "boost"))
        if effect == "avoid":
            override_scope = {"zones": (zone,)}
        elif effect == "pin":
            override_scope["zones"] = (zone,)
        self.overridden += 1
        spec = OverrideSpec(
            effect=effect,
            scope=OverrideScope(**override_scope),
            ttl=Duration(self.context.timing.heartbeat_ms * (4 + rng.randrange(20))),
            reason="it seems wiser",
            author="ops",
            by=50 if effect == "boost" else 0,
        )
        await self.submit(
            Apply(Override(metadata=Metadata(name=f"word-{self._client_number}-{self.overridden}"), spec=spec)), operator=True
        )

    def _is_starting(self, node: str) -> bool:
        """Whether a replica is being started there. Draining at this moment exercises races."""
        view = self.context.view
        return any(view.get(key).status.phase in (Phase.BOUND, Phase.STARTING) for key in view.by_node.get(node, ()))

    async def uncordon_all(self) -> None:
        """Uncordon all nodes that were drained."""
        drained, self._drained = self._drained, []
        for name in drained:
            node = self.context.view.get(f"node/{name}")
            if node is not None and node.spec.draining:
                spec = replace(node.spec, draining=False)
                await self.submit(Apply(replace(node, metadata=_declared(node.metadata), spec=spec)), operator=True)

    # -- workloads -------------------------------------------------------------------------------------------------------

    def workload_name(self, kind: str, ahead: int = 0) -> str:
        """Return the name of the last submitted workload, or of the one submitted `ahead` workloads later. Names contain the
        kind: the name is right only if that workload is of this kind.
        """
        number = self.submitted + ahead
        return f"{kind}-{number}" if self._client_number == "1" else f"{kind}-{self._client_number}-{number}"

    def _workload(self) -> Workload:
        self.submitted += 1
        rng, kind = self.rng, self.rng.choice(self.load.kinds)
        name = self.workload_name(kind)
        tenant = rng.choice(TENANTS)
        replicas = 1 + rng.randrange(2 * self.load.size)
        placement, gang, priority_class = Placement(), None, ""
        devices: tuple[DeviceRequest, ...] = ()
        cpu = rng.choice(("250m", "500m", "1"))
        replace_ = rng.choice(("", "", "fenced", "eager"))
        type_ = "service" if kind in SERVICES else "job"
        match kind:
            case "gang":
                replicas = 2 + rng.randrange(3)
                gang = Gang(min=2)
            case "urgent":
                priority_class, cpu, replicas = URGENT, "2", 1
            case "herd":
                replicas = self.cpu // NODE_CPUS
                gang, cpu = Gang(min=replicas), "3"
            case "impossible" | "flood":
                priority_class, cpu = URGENT, "64"
                replicas *= FLOOD_FACTOR if kind == "flood" else 1
            case "steadfast":
                replicas = 2 + rng.randrange(2)
            case "device":
                devices, replicas = (DeviceRequest(kind="gpu", count=1),), 1
            case "spread":
                replicas = 2 + rng.randrange(2)
                placement = Placement(
                    topology_spread=(Spread(topology_key="zone"),),
                    anti_affinity=(Affinity(label_selector={"app": name}, topology_key="node"),),
                )
        program = SimProgram(
            None
            if type_ == "service" and kind != "fleeting"
            else (10_000 if kind == "fleeting" else 3_000) + rng.randrange(90_000),
            0 if rng.randrange(10) else 1,
            rng.choice((0, 200, 2_000, None)) if kind != "stubborn" else None,
        )
        template = Template(command=program.argv(), resources=Amount.parse({"cpu": cpu, "memory": "256Mi"}), devices=devices)
        spec = WorkloadSpec(
            type=type_,  # type: ignore[arg-type]
            template=self._service_template(template) if type_ == "service" else template,
            replicas=replicas,
            priority_class=priority_class,
            replace=replace_,  # type: ignore[arg-type]
            fence=Duration(Duration.parse(self.load.fence) * self.context.timing.heartbeat_ms // 2_000),
            placement=placement,
            gang=gang,
            rollout=Rollout(max_surge=1),
            disruption=Disruption(min_available=replicas - 1 if kind == "steadfast" else 0),
        )
        return Workload(metadata=Metadata(name=name, tenant=tenant, labels={"app": name}), spec=spec)

    def _service_template(self, template: Template) -> Template:
        """A template for services: restarted within its attempt after a backoff; some listen on a port and have probes."""
        rng, heartbeat_ms = self.rng, self.context.timing.heartbeat_ms
        if self.load.reads:
            template = replace(template, configs=(Mount(name=SETTINGS, path="settings"),))
        restart = Restart(
            when=rng.choice(("", "", "", "", "never", "failure")),
            backoff=Duration(heartbeat_ms // 2),
            backoff_max=Duration(4 * heartbeat_ms),
        )
        if rng.randrange(3):
            return replace(template, restart=restart)
        arguments = ["listen=$(PORT_http)", f"ready={rng.jitter_ms(4 * heartbeat_ms)}"]
        if rng.randrange(4) == 0:
            arguments.append(f"sick={10_000 + rng.randrange(60_000)}")
        probe = Probe(http=HttpProbe(port="http"), period=Duration(heartbeat_ms), timeout=Duration(heartbeat_ms // 2))
        probes = Probes(
            start=replace(probe, failures=20) if rng.randrange(2) else None,
            ready=probe,
            live=replace(probe, failures=8) if rng.randrange(3) == 0 else None,
        )
        return replace(
            template, command=(*template.command, *arguments), ports=(PortRequest(name="http"),), probes=probes, restart=restart
        )


def _declared(metadata: Metadata) -> Metadata:
    """Metadata as a user would write it, without the fields that the authority sets."""
    return Metadata(name=metadata.name, tenant=metadata.tenant, labels=metadata.labels)
