"""Simulated agents, and the hints they and a misleading reporter publish.

The agent and its keeper are the real ones. Agents report warm-start hints about what ran on their nodes. Hints authorise
nothing, so any client may report one about any node. `HintReporter` reports hints that are old, wrong or made up: it
recommends nodes that are full, closed, forbidden by policy, without the device, or deleted, and it closes nodes that it has
just recommended.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from remit.agent.agent import Agent, AssignmentFeed
from remit.agent.hosted_node import HostedNodeSpec
from remit.agent.keeper.protocol import KeeperClient
from remit.agent.preparation.preparer import Preparer, SecretAndConfigStep
from remit.agent.run_spec import NodeSettings
from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.rpc import assignment_source, material_source
from remit.law.timing import Timing
from remit.model.claims import Actor, AnyClaim, Apply, Delete, Evidence, Report
from remit.model.kinds import Device, Node, NodeHealth, NodeSpec, Taint
from remit.model.metadata import Metadata
from remit.model.records import Phase, Replica, SummarySpec
from remit.model.resources import Amount
from remit.model.roles import Role
from remit.model.wire.agent_messages import AssignmentsUpdate
from remit.observation.hints import FULL, PREFIX
from remit.simulate.actors.adversary_tenant import NODE_PREFIX
from remit.simulate.actors.policy_publishers import latest_policy
from remit.simulate.actors.role import RoleContext
from remit.simulate.actors.users import TENANTS, Users
from remit.simulate.world import random_streams
from remit.simulate.world.disk import SimSecretFiles

JOURNAL: Final = Path("/keeper/journal")
EPOCHS: Final = Path("/agent/epochs")


class SimulatedAgent:
    """The agent of one process, and its client."""

    def __init__(self, context: RoleContext, keeper: str, nodes: Sequence[Node]) -> None:
        self.context = context
        self.names = tuple(node.metadata.name for node in nodes)
        self.client: AuthorityClient = context.client(Actor(context.process.name, Role.AGENT))
        self.secret_files = SimSecretFiles()
        delivering = SecretAndConfigStep(
            context.world, material_source(context.world.link, context.servers, context.world.clock), self.secret_files
        )
        self.agent = Agent(
            context.world,
            self.client,
            _recorded_feed(context, assignment_source(context.world.link, context.world.randomness.shuffled(context.servers))),
            KeeperClient(context.world.link, keeper, context.world.clock),
            [HostedNodeSpec(node, location_of(node.metadata.name, context.scope)) for node in nodes],
            name=context.process.name,
            timing=Timing(context.timing.heartbeat_ms),
            preparer=Preparer(context.world, (delivering,)),
            epochs=EPOCHS,
            on_failure=context.report_abandoned,
        )
        delivering.actor_for = self.agent.actor
        context.assignments, context.agent_nodes = self.agent.assignments, self.names


def _recorded_feed(context: RoleContext, feed: AssignmentFeed) -> AssignmentFeed:
    """Report how far the agent has observed, for the check that observers never go back."""

    async def recorded(nodes: Sequence[str]) -> AsyncGenerator[AssignmentsUpdate, None]:
        async with aclosing(feed(nodes)) as items:
            async for update in items:
                yield update
                context.report_observed(update.incarnation, update.revision)

    return recorded


def location_of(node: str, scope: str) -> NodeSettings:
    return NodeSettings(node, scope, Path("/logs"), Path("/work"), sandbox=True)


def make_node(name: str, number: int, region: str) -> Node:
    """A node as its machine describes it; every third has two devices."""
    gpus = tuple(Device(name=f"gpu-{i}", kind="gpu", model="A10") for i in range(2)) if number % 3 == 0 else ()
    zone = f"{region}-{'abc'[number % 3]}"
    capacity = Amount.parse({"cpu": "4", "memory": "8Gi"})
    labels = {"disk": "ssd" if number % 2 else "hdd"}
    return Node(
        metadata=Metadata(name=name, labels=labels), spec=NodeSpec(region=region, zone=zone, capacity=capacity, devices=gpus)
    )


WARM_WORKLOADS_MAX: Final = 16
"""For how many of its latest workloads an agent reports a node as warm."""
HINTS_MAX: Final = 16
OVERRIDING_EPOCH: Final = 1_000_000
"""An epoch that no agent reaches, so that such a report overrides the node's own."""
CLOSED_TAINT: Final = Taint(key="aside", effect="NoSchedule")
TEMPORARY_NODE_PREFIX: Final = f"{NODE_PREFIX.removeprefix('node/')}passing-"
"""Name prefix of nodes that are created and deleted. They have no agent and send no heartbeats."""


async def report_hints(simulated: SimulatedAgent) -> None:
    """Periodically report, for each node, what ran there recently. The reports are true, but soon out of date."""
    context, assignments = simulated.context, simulated.agent.assignments
    clock, rng = context.world.clock, context.world.randomness.stream(random_streams.NODE_HINTS)
    recent: dict[str, dict[str, None]] = {name: {} for name in simulated.names}
    while True:
        await clock.sleep_ms(context.timing.heartbeat_ms * 2 + rng.jitter_ms(8 * context.timing.heartbeat_ms))
        for name in simulated.names if not context.timing.quiet else ():
            known = recent[name]
            for _, assignment in assignments.on_node(name):
                replica: Replica = assignment.replica
                work = f"{replica.metadata.tenant}/{replica.spec.workload}"
                known.pop(work, None)
                known[work] = None
            for old in list(known)[:-WARM_WORKLOADS_MAX]:
                del known[old]
            actor = simulated.agent.actor(name)
            if actor is not None and known:
                counts = dict.fromkeys(known, FULL)
                summary = SummarySpec(actor.lease, actor.epoch, clock.now_ms(), counts=counts)
                evidence = Evidence(assignments.revision, assignments.age_ms())
                try:
                    await simulated.client.submit_many([Report(PREFIX + name, summary)], actors=[actor], evidence=evidence)
                except RetriesExhausted as error:
                    context.report_abandoned(error)


class HintReporter:
    """Sends a misleading hint about once per heartbeat interval, from a client process of users."""

    def __init__(self, users: Users) -> None:
        self.users, self.context, self.view = users, users.context, users.context.view
        self.rng = users.context.world.randomness.stream(random_streams.FALSE_HINTS)
        self._closed_until: dict[str, int] = {}
        """Time at which each node that was recommended and then closed is opened again."""
        self._count = 0

    async def run(self) -> None:
        clock, heartbeat_ms = self.context.world.clock, self.context.timing.heartbeat_ms
        while True:
            await clock.sleep_ms(1 + self.rng.jitter_ms(2 * heartbeat_ms))
            if self.view.head is None:
                continue
            await self._reopen()
            if not self.context.timing.quiet:
                await self.rng.choice(
                    (self._mislead, self._mislead, self._mislead, self._recommend_and_close, self._temporary_node)
                )()

    # -- hints -----------------------------------------------------------------------------------------------------------

    async def _mislead(self) -> None:
        """Recommend nodes that cannot take pending or upcoming work."""
        summary: dict[str, dict[str, int]] = {}
        for path in self._workloads():
            choose_nodes = self.rng.choice((self._full, self._closed, self._forbidden, self._without_device, self._deleted))
            nodes = list(choose_nodes(path)) or [node.metadata.name for node in self._nodes()]
            if nodes:
                count = self.rng.choice((FULL, FULL, 2**40, -5))
                summary.setdefault(self.rng.choice(nodes), {})[path] = count
        for node, counts in summary.items():
            await self._report(node, counts)

    async def _recommend_and_close(self) -> None:
        """Recommend a node, then close it: the hint was correct when it was reported, and is wrong when it is used."""
        ready = [node for node in self._nodes() if node.metadata.name not in self._closed_until and _accepts_work(node)]
        if len(ready) < 2:
            return
        node = self.rng.choice(ready)
        await self._report(node.metadata.name, dict.fromkeys(self._workloads(), FULL))
        heartbeats = 2 + self.rng.randrange(10)
        self._closed_until[node.metadata.name] = (
            self.context.world.clock.now_ms() + heartbeats * self.context.timing.heartbeat_ms
        )
        await self._declare(node, unschedulable=bool(self.rng.randrange(2)))

    async def _temporary_node(self) -> None:
        """Create a node, recommend it, and delete it."""
        self._count += 1
        node = make_node(f"{TEMPORARY_NODE_PREFIX}{self._count}", self._count, self.context.scope)
        await self.users.submit(Apply(node), operator=True)
        await self._report(node.metadata.name, dict.fromkeys(self._workloads(), FULL))
        await self.users.submit(Delete("Node", node.metadata.name), operator=True)

    async def _report(self, node: str, counts: dict[str, int]) -> None:
        epoch = OVERRIDING_EPOCH if node[-1] in "02468" else 0  # for other nodes the agent's own report wins, once there is one
        summary = SummarySpec("gossip", epoch, self.context.world.clock.now_ms(), counts=counts)
        claim: AnyClaim = Report(PREFIX + node, summary)
        try:
            await self.users.user.submit(claim)
        except RetriesExhausted as error:
            self.context.report_abandoned(error)

    # -- workloads and unsuitable nodes -------------------------------------------------------------------------------------

    def _workloads(self) -> list[str]:
        """Workloads to report about, as `tenant/name`: pending ones, future ones, and a few others."""
        waiting = (self.view.get(key) for key in self.view.by_phase[Phase.PENDING])
        waiting_workloads = {f"{replica.metadata.tenant}/{replica.spec.workload}": None for replica in waiting}
        kinds = self.users.load.kinds
        coming = [
            f"{tenant}/{self.users.workload_name(kind, ahead)}" for tenant in TENANTS for kind in kinds for ahead in (1, 2)
        ]
        others = [key.partition("/")[2] for key, _ in self.view.of_kind("workload/")]
        return [*waiting_workloads, *self.rng.shuffled([*coming, *others])][:HINTS_MAX]

    def _nodes(self) -> list[Node]:
        return [row.obj for key, row in self.view.of_kind("node/") if not key.startswith(NODE_PREFIX)]

    def _full(self, path: str) -> Iterator[str]:
        nodes = self._nodes()
        most = max((len(self.view.by_node.get(node.metadata.name, ())) for node in nodes), default=0)
        return (node.metadata.name for node in nodes if len(self.view.by_node.get(node.metadata.name, ())) == most)

    def _closed(self, path: str) -> Iterator[str]:
        return (node.metadata.name for node in self._nodes() if not _accepts_work(node))

    def _forbidden(self, path: str) -> Iterator[str]:
        policy = latest_policy(self.view)
        for rule in (rule for policy_spec in (policy.spec.policies.values() if policy else ()) for rule in policy_spec.rules):
            zones, tenants = rule.allow.zones, rule.match.tenants
            if zones and (not tenants or path.partition("/")[0] in tenants):
                yield from (node.metadata.name for node in self._nodes() if node.spec.zone not in zones)

    def _without_device(self, path: str) -> Iterator[str]:
        if path.partition("/")[2].startswith("device"):
            yield from (node.metadata.name for node in self._nodes() if not node.spec.devices)

    def _deleted(self, path: str) -> Iterator[str]:
        yield f"{self.context.scope}-n{len(self._nodes()) + 1 + self.rng.randrange(3)}"
        if self._count:
            yield f"{TEMPORARY_NODE_PREFIX}{1 + self.rng.randrange(self._count)}"

    # -- closed nodes ----------------------------------------------------------------------------------------------------

    async def _reopen(self) -> None:
        """Open nodes whose closed time has passed. This includes nodes that another client has closed again by
        writing an outdated manifest.
        """
        now_ms = self.context.world.clock.now_ms()
        for node in self._nodes():
            closed = node.spec.unschedulable or CLOSED_TAINT in node.spec.taints
            if closed and (self.context.timing.quiet or self._closed_until.get(node.metadata.name, 0) <= now_ms):
                self._closed_until.pop(node.metadata.name, None)
                await self._declare(node, unschedulable=False, taints=())

    async def _declare(self, node: Node, *, unschedulable: bool, taints: tuple[Taint, ...] = (CLOSED_TAINT,)) -> None:
        spec = replace(node.spec, unschedulable=unschedulable, taints=() if unschedulable else taints)
        meta = Metadata(name=node.metadata.name, labels=node.metadata.labels)
        await self.users.submit(Apply(replace(node, metadata=meta, spec=spec)), operator=True)


def _accepts_work(node: Node) -> bool:
    spec = node.spec
    return node.status.health is NodeHealth.READY and not (spec.draining or spec.unschedulable or spec.taints)
