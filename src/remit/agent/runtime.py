"""State and services that the parts of one agent share: nodes, assignments, reconcile schedule, tasks, logs.

Decides nothing: agent.py reconciles, and the other parts perform what was decided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from remit.agent.assignments import Assignments, StartQueue
from remit.agent.hosted_node import ALL_KEYS, HostedNode, HostedNodeSpec
from remit.law.timing import Timing
from remit.world.interfaces import World

Log = Callable[..., None]
"""Writes a line, with fields as keyword arguments."""


def discard_log(_: str, **fields: object) -> None:
    """Write nothing."""


class AgentRuntime:
    """Shared state of one agent. `log` writes a line for operators, `log_debug` a debug line."""

    def __init__(
        self,
        world: World,
        hosted: Sequence[HostedNodeSpec],
        *,
        name: str,
        timing: Timing,
        log: Log = discard_log,
        log_debug: Log = discard_log,
    ) -> None:
        self.world, self.name, self.timing, self.log, self.log_debug = world, name, timing, log, log_debug
        self.nodes = {spec.node.metadata.name: HostedNode(spec.settings, timing, spec.node) for spec in hosted}
        self._default_settings = hosted[0].settings
        self.assignments = Assignments(world.clock)
        self.start_queue = StartQueue()
        self.rng = world.randomness.stream(f"agent {name}")
        self.wake = asyncio.Event()
        """Set when a reconcile is due earlier than was known."""
        self.tasks: asyncio.TaskGroup | None = None
        """Set while the agent runs."""

    def enqueue(self, node: str, key: str = ALL_KEYS, at_ms: int | None = None) -> None:
        """Schedule a reconcile of a replica, or of the whole node by default; now, or at `at_ms`."""
        hosted = self.nodes.get(node)
        if hosted is not None:
            hosted.enqueue(key, self.world.clock.now_ms() if at_ms is None else at_ms)
            self.wake.set()

    def next_reconcile_ms(self) -> int | None:
        return min((at_ms for hosted in self.nodes.values() if (at_ms := hosted.next_run_ms()) is not None), default=None)

    def adopt_former_node(self, node: str) -> HostedNode:
        """Host a node that was hosted here under an earlier name. It gets no assignments, so its processes are stopped."""
        settings = self._default_settings._replace(node=node, logs=self._default_settings.logs.parent / node)
        hosted = self.nodes[node] = HostedNode(settings, self.timing, None)
        self.log(f"node {node} is no longer hosted by this agent; stopping its remaining processes")
        return hosted

    async def sleep_with_jitter(self, ms: int) -> None:
        await self.world.clock.sleep_ms(ms // 2 + self.rng.jitter_ms(max(1, ms // 2)))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        _ = self.create_task(work, name)

    def create_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        if self.tasks is None:
            raise RuntimeError("Agent.run is not active: no task can be started")
        return self.tasks.create_task(work, name=name)
