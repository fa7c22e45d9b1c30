"""Machines and processes of a simulated cluster, from a scenario.

All product components are the real ones, wired by assembly.py. Faults are injected by simulation.py.
"""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np

from remit.agent.keeper.keeper import Keeper
from remit.assembly import build_controllers, build_scheduler, run_server
from remit.commitment.operation_queue import BATCH_LIMITS, BatchLimits
from remit.correction.controller_set import ControllerSet
from remit.correction.framework.loop import LoopTiming
from remit.law.fit import BoolOrMask, NodeView, PeerCounts, Requirements
from remit.law.timing import Timing
from remit.model.claims import Actor, Code
from remit.model.roles import Role
from remit.proposal.metrics import CoverageMark
from remit.proposal.placement.plugins import Filter
from remit.proposal.placement.preemption_candidates import VictimRateLimit as VictimsPace
from remit.proposal.scheduler import SchedulerTiming
from remit.simulate.actors.adversary import Adversary
from remit.simulate.actors.agents import JOURNAL, HintReporter, SimulatedAgent, make_node, report_hints
from remit.simulate.actors.budget_controllers import BudgetHolder
from remit.simulate.actors.naive_scheduler import NaiveScheduler
from remit.simulate.actors.policy_publishers import PolicyAdopter
from remit.simulate.actors.role import ClientObserver, RecordedSchedulerView, RoleContext, RunTiming
from remit.simulate.actors.users import NODE_CPUS, Users
from remit.simulate.scenario_types import Scenario
from remit.simulate.world import random_streams
from remit.simulate.world.event_loop import SimLoop
from remit.simulate.world.network import Network
from remit.simulate.world.power_loss import SqliteStoreService
from remit.simulate.world.processes import ProcessMain, SimMachine, SimProcess
from remit.simulate.world.runner import RunRecorder
from remit.simulate.world.store import CommitObserver, StoreService

_DRIFT_MAX = 0.004
"""The rates of any two machines differ by less than the one percent of drift that fencing allows for."""


_RIVAL_ROLES: Final = (Role.WORKLOADS, Role.REPAIR)
"""Controllers of which all instances act at the same time if the scenario sets `rivals`."""

VICTIM_RATE_LIMIT: Final = VictimsPace(per_s=1, burst=4)
"""Preemption rate limit. A simulated cluster is small, so the limit is low enough to be reached."""


class SimFilterPlugin:
    """A third-party filter plug-in. It accepts every node, and raises errors while `broken` is set."""

    def __init__(self) -> None:
        self.broken = False
        self.filter = Filter("outsider", Code.POLICY, self._check, third_party=True)

    def _check(self, requirements: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
        if self.broken:
            raise RuntimeError("injected fault: plugin-fails")
        return np.bool_(True)


class SimCluster:
    """All machines and processes of one run, by name."""

    def __init__(self, scenario: Scenario, seed: str, loop: SimLoop, network: Network, record: RunObserver) -> None:
        self.scenario = scenario
        self.loop = loop
        self.network = network
        self.timing = RunTiming(scenario.cluster.heartbeat_ms)
        self.machines: dict[str, SimMachine] = {}
        self.processes: dict[str, SimProcess] = {}
        self.users: list[Users] = []
        self.contexts: dict[tuple[str, str], RoleContext] = {}
        """By process and scope; the context of the latest start."""
        self.plugin = SimFilterPlugin()
        self.scheduler_paths: dict[str, int] = {}
        """How often schedulers took each of their rare code paths."""
        self._record = record
        self._seed = seed
        self._rng = random_streams.stream(random_streams.machine_clocks(seed))
        service_type = SqliteStoreService if scenario.cluster.store == "sqlite" else StoreService
        self.stores: dict[str, StoreService] = {
            scope: service_type(loop, network, scope, seed, record) for scope in scenario.cluster.scopes
        }
        for scope in scenario.cluster.scopes:
            self._build(scope)

    # -- inventory -------------------------------------------------------------------------------------------------------

    def servers(self, scope: str) -> tuple[str, ...]:
        return tuple(f"server-{scope}-{n}" for n in range(1, self.scenario.cluster.servers + 1))

    def processes_of_kind(self, kind: str, scope: str = "") -> list[SimProcess]:
        """Processes of one kind: server, scheduler, guesser, controllers, agent, keeper, people."""
        prefix = f"{kind}-{scope}-" if scope else f"{kind}-"
        return [process for name, process in self.processes.items() if name.startswith(prefix)]

    def nodes(self, scope: str) -> tuple[str, ...]:
        if scope not in self.scenario.cluster.scopes_with_nodes:
            return ()
        return tuple(f"{scope}-n{n}" for n in range(1, self.scenario.cluster.nodes + 1))

    def nodes_of_agent(self, agent: str) -> tuple[str, ...]:
        """The nodes of one agent process."""
        scope, number = agent.removeprefix("agent-").rsplit("-", 1)
        agents = min(self.scenario.cluster.agents, self.scenario.cluster.nodes)
        return self.nodes(scope)[int(number) - 1 :: agents]

    def _build(self, scope: str) -> None:
        cluster = self.scenario.cluster
        for name in self.servers(scope):
            self._add(name, self._server_main(scope, name))
        for n in range(1, cluster.controllers + 1):
            self._add(f"controllers-{scope}-{n}", self._controllers_main(scope, n))
        for n in range(1, cluster.people + 1):
            self._add(f"people-{scope}-{n}", self._users_main(scope))
        if scope not in cluster.scopes_with_nodes:
            return
        for n in range(1, cluster.schedulers + 1):
            self._add(f"scheduler-{scope}-{n}", self._scheduler_main(scope, n))
        for n in range(1, cluster.guessers + 1):
            self._add(f"guesser-{scope}-{n}", self._naive_scheduler_main(scope, n))
        for n in range(1, min(cluster.agents, cluster.nodes) + 1):
            machine = self._machine(f"host-{scope}-{n}")
            agent, keeper = f"agent-{scope}-{n}", f"keeper-{scope}-{n}"
            self.network.colocate(agent, keeper)
            self._add(keeper, self._keeper_main, machine)
            self._add(agent, self._agent_main(scope, keeper), machine)

    def _machine(self, name: str) -> SimMachine:
        rate = 1.0 + _DRIFT_MAX * (2 * self._rng.random() - 1)
        start_ms = self._rng.randrange(10_000_000)
        machine = self.machines[name] = SimMachine(self.loop, name, self._record, start_ms=start_ms, rate=rate)
        return machine

    def _add(self, name: str, main: ProcessMain, machine: SimMachine | None = None) -> None:
        machine = machine or self._machine(f"host-{name}")
        process = SimProcess(self.loop, self.network, name, machine, self._seed, main)
        process.on_end = self._record.process_ended
        process.on_unresponsive = self._record.process_silenced
        self.processes[name] = process

    # -- main functions --------------------------------------------------------------------------------------------------

    def _context(self, process: SimProcess, scope: str) -> RoleContext:
        context = RoleContext(process, self.stores[scope], self.servers(scope), self._record, self.timing)
        self.contexts[process.name, scope] = context
        return context

    def _lease(self, role: Role, number: int) -> str:
        """A lease per instance if the scenario sets `rivals`, so that all act at once; else empty for the shared lease of the
        role.
        """
        return f"{role}/{number}" if self.scenario.cluster.rivals else ""

    def _batch_max(self) -> BatchLimits:
        """Limits of a batch. With fewer operations than the default, the replica limit is lowered too, so that it is reached at
        all.
        """
        limit = self.scenario.cluster.batch
        return BATCH_LIMITS if limit >= BATCH_LIMITS.operations else BatchLimits(limit, max(1, limit // 2))

    def _server_main(self, scope: str, name: str) -> ProcessMain:
        async def main(process: SimProcess) -> None:
            port = process.port(self.stores[scope])
            timing = self.timing
            await run_server(
                port,
                process.world,
                scope=scope,
                name=name,
                peers=self.servers(scope),
                heartbeat_ms=timing.server_heartbeat_ms,
                term_ms=timing.server_term_ms,
                batch_limits=self._batch_max(),
                timing=Timing(timing.heartbeat_ms),
            )

        return main

    def _controllers_main(self, scope: str, number: int) -> ProcessMain:
        parent_scope = self.scenario.cluster.scopes[0]
        is_top = parent_scope == scope

        async def main(process: SimProcess) -> None:
            context = self._context(process, scope)
            parent = None if is_top else self._context(process, parent_scope)
            async with asyncio.TaskGroup() as group:
                if parent is not None:
                    group.create_task(parent.view.follow(), name="parent view")
                if scope not in self.scenario.cluster.scopes_with_nodes:
                    group.create_task(context.view.follow(), name="view")
                    return
                group.create_task(self._controller_set(process, context, number).run(), name="controllers")
                group.create_task(BudgetHolder(context, parent).run(), name="budgets")
                group.create_task(PolicyAdopter(context, parent).run(), name="policies")

        return main

    def _controller_set(self, process: SimProcess, context: RoleContext, number: int) -> ControllerSet:
        return build_controllers(
            process.port(self.stores[context.scope], observer=True),
            process.port(self.stores[context.scope]),
            context.client,
            process.world,
            name=process.name,
            timing=LoopTiming(self.timing.heartbeat_ms),
            cache=context.view,
            lease_for=lambda lease: self._lease(Role(lease), number) or lease if lease in _RIVAL_ROLES else lease,
            on_failure=context.report_abandoned,
        )

    def _scheduler_main(self, scope: str, number: int) -> ProcessMain:
        timing = self.timing

        async def main(process: SimProcess) -> None:
            context = self._context(process, scope)
            context.scheduler_view = RecordedSchedulerView(process.world.clock, context.report_observed)
            placing = build_scheduler(
                process.port(self.stores[scope], observer=True),
                process.port(self.stores[scope]),
                context.client(Actor(process.name, Role.SCHEDULER)),
                process.world,
                name=process.name,
                lease=self._lease(Role.SCHEDULER, number) or Role.SCHEDULER.value,
                timing=SchedulerTiming(
                    lease_ms=timing.lease_ms, idle_ms=5 * timing.heartbeat_ms, batch_max=min(64, self.scenario.cluster.batch)
                ),
                on_failure=context.report_abandoned,
                view=context.scheduler_view,
                filters=(self.plugin.filter,) if self.scenario.cluster.plugin else (),
                victim_rate=VICTIM_RATE_LIMIT,
                on_mark=self._count_path,
            )
            await placing.run()

        return main

    def _count_path(self, path: CoverageMark) -> None:
        self.scheduler_paths[path.value] = self.scheduler_paths.get(path.value, 0) + 1

    def _naive_scheduler_main(self, scope: str, number: int) -> ProcessMain:
        async def main(process: SimProcess) -> None:
            context = self._context(process, scope)
            async with asyncio.TaskGroup() as group:
                group.create_task(context.view.follow(), name="view")
                group.create_task(
                    NaiveScheduler(context, lease=f"{Role.SCHEDULER}/guess-{number}").run(), name="naive scheduler"
                )

        return main

    async def _keeper_main(self, process: SimProcess) -> None:
        keeper = Keeper(process.world, JOURNAL)
        async with process.world.link.serve(process.name, keeper):
            await keeper.run()

    def _agent_main(self, scope: str, keeper: str) -> ProcessMain:
        async def main(process: SimProcess) -> None:
            nodes = [make_node(name, int(name.rsplit("-n", 1)[1]), scope) for name in self.nodes_of_agent(process.name)]
            agent = SimulatedAgent(self._context(process, scope), keeper, nodes)
            async with asyncio.TaskGroup() as group:
                group.create_task(agent.agent.run(), name="agent")
                if self.scenario.cluster.gossips:
                    group.create_task(report_hints(agent), name="hints")

        return main

    def _users_main(self, scope: str) -> ProcessMain:
        cluster, load = self.scenario.cluster, self.scenario.load
        is_parent = scope not in cluster.scopes_with_nodes
        has_parent = not is_parent and len(cluster.scopes) > 1
        cpu = NODE_CPUS * cluster.nodes * (len(cluster.scopes_with_nodes) if is_parent else 1)

        async def main(process: SimProcess) -> None:
            context = self._context(process, scope)
            parent = self._context(process, cluster.scopes[0]) if has_parent and cluster.meddlers else None
            users = Users(context, load, cpu=cpu, has_parent=has_parent, is_parent=is_parent)
            self.users.append(users)
            async with asyncio.TaskGroup() as group:
                group.create_task(context.view.follow(), name="view")
                group.create_task(users.run(), name="users")
                if parent is not None:
                    group.create_task(parent.view.follow(), name="parent view")
                for _ in range(0 if is_parent else cluster.meddlers):
                    adversary = Adversary(context, parent)
                    group.create_task(adversary.run(), name="adversary")
                    group.create_task(adversary.send_heartbeats(), name="adversary heartbeats")
                for _ in range(0 if is_parent else cluster.gossips):
                    group.create_task(HintReporter(users).run(), name="hint reporter")

        return main

    # -- phases of a run ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for store in self.stores.values():
            if isinstance(store, SqliteStoreService):
                store.begin()
        for process in self.processes.values():
            process.start()

    def end(self) -> None:
        """Remove the files of the stores from the real disk."""
        for store in self.stores.values():
            if isinstance(store, SqliteStoreService):
                store.end()

    def declare_lost(self, scope: str) -> None:
        """Let an operator of the parent scope declare `scope` lost."""
        for users in self.users:
            process = users.context.process
            if (
                users.context.scope == self.scenario.cluster.scopes[0]
                and process.alive
                and users.context.world is process.world
            ):
                self.loop.spawn(users.declare_lost(scope), name="declare lost", unit=process.unit)
                return

    def start_quiet_phase(self) -> None:
        """Start the quiet phase: users submit nothing new, and nodes that were drained are opened again."""
        self.timing.quiet = True
        for users in self.users:
            process = users.context.process
            if process.alive and users.context.world is process.world:
                self.loop.spawn(users.uncordon_all(), name="uncordon all", unit=process.unit)


class RunObserver(ClientObserver, CommitObserver, RunRecorder):
    """Receives all events of a run; implemented by simulation.py."""

    def process_silenced(self, process: SimProcess) -> None:
        raise NotImplementedError

    def process_ended(self, process: SimProcess, failure: BaseException | None) -> None:
        raise NotImplementedError
