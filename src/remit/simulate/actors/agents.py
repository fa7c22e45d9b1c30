"""Simulated agents, and the hints they and a misleading reporter publish.

The agent and its keeper are the real ones.

Agents say what ran on their nodes; a gossip says anything: old, wrong and made up.

A hint binds nobody, so anybody may report one, about any node. What a gossip says is mostly chosen to mislead: it praises the
node that is full, closed, forbidden, without the device, or gone; and it closes what it has just praised.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from remit.agent.agent import Agent, Feed
from remit.agent.hosted_node import Hosted
from remit.agent.keeper.protocol import Keeping
from remit.agent.preparation import Delivering, Preparer
from remit.agent.run_spec import Place
from remit.client.authority_client import Client, NoAnswer
from remit.client.rpc import material_source, order_feed
from remit.law.timing import Tempo
from remit.model.claims import Actor, AnyClaim, Apply, Delete, Evidence, Report, Role
from remit.model.kinds import Device, Node, NodeHealth, NodeSpec, Taint
from remit.model.metadata import Metadata
from remit.model.records import Phase, Replica, SummarySpec
from remit.model.resources import Amount
from remit.model.wire.agent_messages import Orders
from remit.observation.hints import FULL, PREFIX
from remit.simulate.actors.adversary_tenant import MEDDLED
from remit.simulate.actors.policy_publishers import latest
from remit.simulate.actors.role import Seat
from remit.simulate.actors.users import TENANTS, People
from remit.simulate.world.disk import SimVault

JOURNAL: Final = Path("/keeper/journal")
EPOCHS: Final = Path("/agent/epochs")


class Farm:
    """The agent of one process of a run, and the client that it asks by."""

    def __init__(self, seat: Seat, keeper: str, nodes: Sequence[Node]) -> None:
        self.seat = seat
        seat.farm = self
        self.names = tuple(node.metadata.name for node in nodes)
        self.client: Client = seat.client(Actor(seat.process.name, Role.AGENT))
        self.vault = SimVault()
        delivering = Delivering(seat.world, material_source(seat.world.link, seat.servers, seat.world.clock), self.vault)
        self.agent = Agent(
            seat.world,
            self.client,
            _observed(seat, order_feed(seat.world.link, seat.world.chance.shuffled(seat.servers))),
            Keeping(seat.world.link, keeper, seat.world.clock),
            [Hosted(node, place_of(node.metadata.name, seat.scope)) for node in nodes],
            name=seat.process.name,
            tempo=Tempo(seat.pace.beat_ms),
            preparer=Preparer(seat.world, (delivering,)),
            epochs=EPOCHS,
            failed=seat.give_up,
        )
        delivering.speaks = self.agent.actor


def _observed(seat: Seat, feed: Feed) -> Feed:
    """Whoever checks that observers never go back is told how far this one has come."""

    async def told(nodes: Sequence[str]) -> AsyncGenerator[Orders, None]:
        async with aclosing(feed(nodes)) as items:
            async for orders in items:
                yield orders
                seat.observed(orders.incarnation, orders.revision)

    return told


def place_of(node: str, scope: str) -> Place:
    return Place(node, scope, Path("/logs"), Path("/work"), sandbox=True)


def node_named(name: str, number: int, region: str) -> Node:
    """A machine as it describes itself; every third has two devices."""
    gpus = tuple(Device(name=f"gpu-{i}", kind="gpu", model="A10") for i in range(2)) if number % 3 == 0 else ()
    zone = f"{region}-{'abc'[number % 3]}"
    capacity = Amount.parse({"cpu": "4", "memory": "8Gi"})
    labels = {"disk": "ssd" if number % 2 else "hdd"}
    return Node(
        metadata=Metadata(name=name, labels=labels), spec=NodeSpec(region=region, zone=zone, capacity=capacity, devices=gpus)
    )


KEPT_MAX: Final = 16
"""Of how many workloads an agent says that its node is warm: of the last ones."""
ABOUT_MAX: Final = 16
LOUD: Final = 1_000_000
"""An epoch that no agent comes to: what is said at it stands over what the node says itself."""
SHUT: Final = Taint(key="aside", effect="NoSchedule")
PASSING: Final = f"{MEDDLED.removeprefix('node/')}passing-"
"""Nodes that come and go: nobody beats for them."""


async def tell_warmth(farm: Farm) -> None:
    """Now and then, of each node: what ran there last, also what is long gone. That much is true, and soon old."""
    seat, orders = farm.seat, farm.agent.orders
    clock, chance = seat.world.clock, seat.world.chance.stream("warmth")
    lately: dict[str, dict[str, None]] = {name: {} for name in farm.names}
    while True:
        await clock.sleep_ms(seat.pace.beat_ms * 2 + chance.uniform_ms(8 * seat.pace.beat_ms))
        for name in farm.names if not seat.pace.quiet else ():
            known = lately[name]
            for _, order in orders.on(name):
                replica: Replica = order.replica
                work = f"{replica.metadata.tenant}/{replica.spec.workload}"
                known.pop(work, None)
                known[work] = None
            for old in list(known)[:-KEPT_MAX]:
                del known[old]
            actor = farm.agent.actor(name)
            if actor is not None and known:
                counts = dict.fromkeys(known, FULL)
                said = SummarySpec(actor.lease, actor.epoch, clock.now_ms(), counts=counts)
                evidence = Evidence(orders.revision, orders.age_ms())
                try:
                    await farm.client.ask_many([Report(PREFIX + name, said)], actors=[actor], evidence=evidence)
                except NoAnswer as error:
                    seat.give_up(error)


class Gossip:
    """One who asks from where people do. It rests for a beat between two rumours, on average."""

    def __init__(self, people: People) -> None:
        self.people, self.seat, self.view = people, people.seat, people.seat.view
        self.chance = people.seat.world.chance.stream("gossip")
        self._shut: dict[str, int] = {}
        """Until when each node stays closed that was praised."""
        self._count = 0

    async def play(self) -> None:
        clock, beat_ms = self.seat.world.clock, self.seat.pace.beat_ms
        while True:
            await clock.sleep_ms(1 + self.chance.uniform_ms(2 * beat_ms))
            if self.view.head is None:
                continue
            await self._open()
            if not self.seat.pace.quiet:
                await self.chance.choice((self._mislead, self._mislead, self._mislead, self._praise_and_shut, self._passing))()

    # -- rumours ---------------------------------------------------------------------------------------------------------

    async def _mislead(self) -> None:
        """Send what waits, and what may soon, to where it cannot be."""
        said: dict[str, dict[str, int]] = {}
        for path in self._about():
            worst = self.chance.choice((self._full, self._closed, self._forbidden, self._without_device, self._gone))
            nodes = list(worst(path)) or [node.metadata.name for node in self._nodes()]
            if nodes:
                how = self.chance.choice((FULL, FULL, 2**40, -5))
                said.setdefault(self.chance.choice(nodes), {})[path] = how
        for node, counts in said.items():
            await self._say(node, counts)

    async def _praise_and_shut(self) -> None:
        """It was true when it was said."""
        ready = [node for node in self._nodes() if node.metadata.name not in self._shut and _takes(node)]
        if len(ready) < 2:
            return
        node = self.chance.choice(ready)
        await self._say(node.metadata.name, dict.fromkeys(self._about(), FULL))
        beats = 2 + self.chance.below(10)
        self._shut[node.metadata.name] = self.seat.world.clock.now_ms() + beats * self.seat.pace.beat_ms
        await self._declare(node, unschedulable=bool(self.chance.below(2)))

    async def _passing(self) -> None:
        """A node that is there, is praised, and goes."""
        self._count += 1
        node = node_named(f"{PASSING}{self._count}", self._count, self.seat.scope)
        await self.people.insist(Apply(node), operator=True)
        await self._say(node.metadata.name, dict.fromkeys(self._about(), FULL))
        await self.people.insist(Delete("Node", node.metadata.name), operator=True)

    async def _say(self, node: str, counts: dict[str, int]) -> None:
        epoch = LOUD if node[-1] in "02468" else 0  # of the others the agent is believed, once it speaks
        said = SummarySpec("gossip", epoch, self.seat.world.clock.now_ms(), counts=counts)
        claim: AnyClaim = Report(PREFIX + node, said)
        try:
            await self.people.user.ask(claim)
        except NoAnswer as error:
            self.seat.give_up(error)

    # -- who is misled, and where to -------------------------------------------------------------------------------------

    def _about(self) -> list[str]:
        """As `tenant/name`: those that wait, those that are to come, and a few others."""
        waiting = (self.view.get(key) for key in self.view.by_phase[Phase.PENDING])
        found = {f"{replica.metadata.tenant}/{replica.spec.workload}": None for replica in waiting}
        kinds = self.people.load.kinds
        coming = [f"{tenant}/{self.people.named(kind, ahead)}" for tenant in TENANTS for kind in kinds for ahead in (1, 2)]
        others = [key.partition("/")[2] for key, _ in self.view.kind("workload/")]
        return [*found, *self.chance.shuffled([*coming, *others])][:ABOUT_MAX]

    def _nodes(self) -> list[Node]:
        return [seen.thing for key, seen in self.view.kind("node/") if not key.startswith(MEDDLED)]

    def _full(self, path: str) -> Iterator[str]:
        nodes = self._nodes()
        most = max((len(self.view.by_node.get(node.metadata.name, ())) for node in nodes), default=0)
        return (node.metadata.name for node in nodes if len(self.view.by_node.get(node.metadata.name, ())) == most)

    def _closed(self, path: str) -> Iterator[str]:
        return (node.metadata.name for node in self._nodes() if not _takes(node))

    def _forbidden(self, path: str) -> Iterator[str]:
        policy = latest(self.view)
        for rule in (rule for one in (policy.spec.policies.values() if policy else ()) for rule in one.rules):
            zones, tenants = rule.allow.zones, rule.match.tenants
            if zones and (not tenants or path.partition("/")[0] in tenants):
                yield from (node.metadata.name for node in self._nodes() if node.spec.zone not in zones)

    def _without_device(self, path: str) -> Iterator[str]:
        if path.partition("/")[2].startswith("device"):
            yield from (node.metadata.name for node in self._nodes() if not node.spec.devices)

    def _gone(self, path: str) -> Iterator[str]:
        yield f"{self.seat.scope}-n{len(self._nodes()) + 1 + self.chance.below(3)}"
        if self._count:
            yield f"{PASSING}{1 + self.chance.below(self._count)}"

    # -- what was closed -------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Whatever is past its time, or was closed by who had seen it closed: nothing stays so."""
        now_ms = self.seat.world.clock.now_ms()
        for node in self._nodes():
            shut = node.spec.unschedulable or SHUT in node.spec.taints
            if shut and (self.seat.pace.quiet or self._shut.get(node.metadata.name, 0) <= now_ms):
                self._shut.pop(node.metadata.name, None)
                await self._declare(node, unschedulable=False, taints=())

    async def _declare(self, node: Node, *, unschedulable: bool, taints: tuple[Taint, ...] = (SHUT,)) -> None:
        spec = replace(node.spec, unschedulable=unschedulable, taints=() if unschedulable else taints)
        meta = Metadata(name=node.metadata.name, labels=node.metadata.labels)
        await self.people.insist(Apply(replace(node, metadata=meta, spec=spec)), operator=True)


def _takes(node: Node) -> bool:
    spec = node.spec
    return node.status.health is NodeHealth.READY and not (spec.draining or spec.unschedulable or spec.taints)
