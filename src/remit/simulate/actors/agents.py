"""What are the nodes of a run, and what is written down of those who run them? The agent and its keeper are the real ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from remit.agent.agent import Agent, Feed
from remit.agent.delivering import Delivering
from remit.agent.hosting import Hosted
from remit.agent.keeping import Keeping
from remit.agent.preparing import Preparer
from remit.agent.work import Place
from remit.client.client import Client
from remit.client.material import material_source
from remit.client.orders import order_feed
from remit.law.tempo import Tempo
from remit.model.claims import Actor, Role
from remit.model.fields import Metadata
from remit.model.kinds import Device, Node, NodeSpec
from remit.model.orders import Orders
from remit.model.resources import Amount
from remit.simulate.actors.seat import Seat
from remit.simulate.vaults import SimVault

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
