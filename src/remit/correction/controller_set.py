"""Runs all controllers of a scope on one watch cache, each with its own client and lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.correction.controllers.desired_replicas import DesiredReplicas
from remit.correction.controllers.disruption import PendingEvictions
from remit.correction.controllers.endpoints import EndpointController
from remit.correction.controllers.garbage_collection import GarbageCollector
from remit.correction.controllers.node_lifecycle import NodeController
from remit.correction.controllers.repair import RepairController
from remit.correction.controllers.rollout import RolloutController
from remit.correction.controllers.workloads import WorkloadController
from remit.correction.framework.loop import Controller, ControllerLoop, LoopTiming
from remit.model.claims import Actor
from remit.observation.reflector import Reflector
from remit.observation.watch_cache import WatchCache
from remit.store.protocol import Store
from remit.world.interfaces import World

CONTROLLERS: Final[tuple[type[Controller], ...]] = (
    WorkloadController,
    GarbageCollector,
    NodeController,
    RepairController,
    EndpointController,
    RolloutController,
)
"""All controllers of a scope, in the order in which their tasks start."""


class ControllerSet:
    """One process's set of controllers. `run` runs until cancelled.

    The watch cache follows `store`; its first list is read from `list_store`, which must be linearizable. `lease_for` maps a
    controller's usual lease name to the one to use: processes that share a lease take turns, processes with different leases
    act concurrently.
    """

    def __init__(
        self,
        store: Store,
        list_store: Store,
        client_for: Callable[[Actor], AuthorityClient],
        world: World,
        *,
        name: str,
        timing: LoopTiming = LoopTiming(),
        cache: WatchCache | None = None,
        lease_for: Callable[[str], str] = str,
        on_failure: Callable[[RetriesExhausted], None] | None = None,
    ) -> None:
        self.cache = WatchCache(world.clock) if cache is None else cache
        desired, evictions = DesiredReplicas(self.cache), PendingEvictions(self.cache)
        controllers: tuple[Controller, ...] = (
            WorkloadController(desired, world.clock, timing.timing),
            GarbageCollector(self.cache),
            NodeController(self.cache, evictions),
            RepairController(desired, world.clock),
            EndpointController(self.cache),
            RolloutController(desired, evictions),
        )
        self.loops = tuple(
            ControllerLoop(
                controller,
                client_for(Actor(name, controller.permissions.role)),
                world,
                name=name,
                lease=lease_for(controller.lease or controller.permissions.role.value),
                timing=timing,
                on_failure=on_failure,
            )
            for controller in controllers
        )
        self._reflector = Reflector(store, list_store, world, self.cache, idle_ms=timing.watch_idle_ms)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follow(), name="follow")
            for loop in self.loops:
                group.create_task(loop.run(), name=f"{loop.lease}")

    async def follow(self) -> None:
        """Keep the watch cache up to date. Runs until cancelled."""
        await self._reflector.run()
