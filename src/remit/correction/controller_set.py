"""Runs all controllers of a scope on one watch cache, each with its own client and lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.correction.controllers.desired_replicas import Census
from remit.correction.controllers.disruption import Leaving
from remit.correction.controllers.endpoints import Endpoints
from remit.correction.controllers.garbage_collection import Cascade
from remit.correction.controllers.node_lifecycle import Nodes
from remit.correction.controllers.repair import Repair
from remit.correction.controllers.rollout import Rollouts
from remit.correction.controllers.workloads import Workloads
from remit.correction.framework.loop import Cadence, Controller, Loop
from remit.model.claims import Actor
from remit.observation.reflector import Follower
from remit.observation.watch_cache import Board
from remit.store.protocol import Store
from remit.world.interfaces import World

CONTROLLERS: Final[tuple[type[Controller], ...]] = (Workloads, Cascade, Nodes, Repair, Endpoints, Rollouts)
"""All controllers of a scope, in the order in which their tasks start."""


class Crew:
    """One process's set of controllers. `run` runs until cancelled.

    The watch cache follows `store`; its first list is read from `sure`, which must be linearizable. `lease_for` maps a
    controller's usual lease name to the one to use: processes that share a lease take turns, processes with different leases
    act concurrently.
    """

    def __init__(
        self,
        store: Store,
        sure: Store,
        client_for: Callable[[Actor], AuthorityClient],
        world: World,
        *,
        name: str,
        cadence: Cadence = Cadence(),
        board: Board | None = None,
        lease_for: Callable[[str], str] = str,
        failed: Callable[[RetriesExhausted], None] | None = None,
    ) -> None:
        self.board = Board(world.clock) if board is None else board
        census, leaving = Census(self.board), Leaving(self.board)
        controllers: tuple[Controller, ...] = (
            Workloads(census, world.clock, cadence.tempo),
            Cascade(self.board),
            Nodes(self.board, leaving),
            Repair(census, world.clock),
            Endpoints(self.board),
            Rollouts(census, leaving),
        )
        self.loops = tuple(
            Loop(
                one,
                client_for(Actor(name, one.remit.role)),
                world,
                name=name,
                lease=lease_for(one.lease or one.remit.role.value),
                cadence=cadence,
                failed=failed,
            )
            for one in controllers
        )
        self._follower = Follower(store, sure, world, self.board, idle_ms=cadence.idle_ms)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follow(), name="follow")
            for loop in self.loops:
                group.create_task(loop.run(), name=f"{loop.lease}")

    async def follow(self) -> None:
        """Keep the watch cache up to date. Runs until cancelled."""
        await self._follower.follow()
