"""Machines and processes of a simulated cluster, from a scenario.

Built from a scenario; what goes wrong is in faults.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np

from remit.agent.keeper.keeper import Keeper
from remit.assembly import controllers, scheduler, server
from remit.commitment.operation_queue import BATCH_MAX, BatchMax
from remit.correction.controller_set import Crew
from remit.correction.framework.loop import Cadence
from remit.law.fit import Ask, Peers, Site, Truth
from remit.law.timing import Tempo
from remit.model.claims import Actor, Code, Role
from remit.proposal.metrics import Path
from remit.proposal.placement.plugins import Filter
from remit.proposal.placement.preemption_candidates import Pace as VictimsPace
from remit.proposal.scheduler import Rhythm
from remit.simulate.actors.adversary import Meddler
from remit.simulate.actors.agents import JOURNAL, Farm, Gossip, node_named, tell_warmth
from remit.simulate.actors.budget_controllers import Budgets
from remit.simulate.actors.naive_scheduler import Guesser
from remit.simulate.actors.policy_publishers import Policies
from remit.simulate.actors.role import Ear, Pace, Seat, Watched
from remit.simulate.actors.users import CPU_EACH, People
from remit.simulate.scenarios import Scenario
from remit.simulate.world.event_loop import SimLoop, stream
from remit.simulate.world.network import Network
from remit.simulate.world.power_loss import DurableService
from remit.simulate.world.processes import Machine, Main, Process
from remit.simulate.world.runner import Recorder
from remit.simulate.world.store import StoreService, Witness

_DRIFT_MAX = 0.004
"""Between any two machines that is less than the one percent which the fence allows for."""


_RIVALLED: Final = (Role.WORKLOADS, Role.REPAIR)
"""Controllers of which all copies act at once, where there are rivals."""

PACE: Final = VictimsPace(per_s=1, burst=4)
"""A simulated cluster is small: what pushes others aside is held up here as a large one's would be."""


class Plugin:
    """A filter as others write them. It refuses nothing, and fails when told."""

    def __init__(self) -> None:
        self.broken = False
        self.filter = Filter("outsider", Code.POLICY, self._check, foreign=True)

    def _check(self, ask: Ask, site: Site, peers: Peers) -> Truth:
        if self.broken:
            raise RuntimeError("as it was told to")
        return np.bool_(True)


class Cluster:
    """Every machine and process of one run, by name."""

    def __init__(self, scenario: Scenario, seed: str, loop: SimLoop, network: Network, record: Record) -> None:
        self.scenario = scenario
        self.loop = loop
        self.network = network
        self.pace = Pace(scenario.cluster.beat_ms)
        self.machines: dict[str, Machine] = {}
        self.processes: dict[str, Process] = {}
        self.people: list[People] = []
        self.seats: dict[tuple[str, str], Seat] = {}
        """By process and scope: that of its last start."""
        self.plugin = Plugin()
        self.paths: dict[str, int] = {}
        """How often schedulers took each of their rare paths."""
        self._record = record
        self._seed = seed
        self._lots = stream(f"{seed}/cluster")
        kept = DurableService if scenario.cluster.store == "sqlite" else StoreService
        self.stores: dict[str, StoreService] = {
            scope: kept(loop, network, scope, seed, record) for scope in scenario.cluster.scopes
        }
        for scope in scenario.cluster.scopes:
            self._build(scope)

    # -- who there is ----------------------------------------------------------------------------------------------------

    def servers(self, scope: str) -> tuple[str, ...]:
        return tuple(f"server-{scope}-{n}" for n in range(1, self.scenario.cluster.servers + 1))

    def named(self, sort: str, scope: str = "") -> list[Process]:
        """Processes of one sort: server, scheduler, controllers, agent, keeper, people."""
        begins = f"{sort}-{scope}-" if scope else f"{sort}-"
        return [process for name, process in self.processes.items() if name.startswith(begins)]

    def nodes(self, scope: str) -> tuple[str, ...]:
        if scope not in self.scenario.cluster.placing:
            return ()
        return tuple(f"{scope}-n{n}" for n in range(1, self.scenario.cluster.nodes + 1))

    def hosted(self, agent: str) -> tuple[str, ...]:
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
            self._add(f"people-{scope}-{n}", self._people_main(scope))
        if scope not in cluster.placing:
            return
        for n in range(1, cluster.schedulers + 1):
            self._add(f"scheduler-{scope}-{n}", self._scheduler_main(scope, n))
        for n in range(1, cluster.guessers + 1):
            self._add(f"guesser-{scope}-{n}", self._guesser_main(scope, n))
        for n in range(1, min(cluster.agents, cluster.nodes) + 1):
            machine = self._machine(f"host-{scope}-{n}")
            agent, keeper = f"agent-{scope}-{n}", f"keeper-{scope}-{n}"
            self.network.bring_near(agent, keeper)
            self._add(keeper, self._keeper_main, machine)
            self._add(agent, self._agent_main(scope, keeper), machine)

    def _machine(self, name: str) -> Machine:
        rate = 1.0 + _DRIFT_MAX * (2 * self._lots.random() - 1)
        start_ms = self._lots.randrange(10_000_000)
        found = self.machines[name] = Machine(self.loop, name, self._record, start_ms=start_ms, rate=rate)
        return found

    def _add(self, name: str, main: Main, machine: Machine | None = None) -> None:
        machine = machine or self._machine(f"host-{name}")
        process = Process(self.loop, self.network, name, machine, self._seed, main)
        process.on_end = self._record.process_ended
        process.on_silence = self._record.process_silenced
        self.processes[name] = process

    # -- what each does --------------------------------------------------------------------------------------------------

    def _seat(self, process: Process, scope: str) -> Seat:
        seat = Seat(process, self.stores[scope], self.servers(scope), self._record, self.pace)
        self.seats[process.name, scope] = seat
        return seat

    def _lease(self, role: Role, number: int) -> str:
        """One for all of a role, of whom one acts; or one for each, so that all act at once."""
        return f"{role}/{number}" if self.scenario.cluster.rivals else ""

    def _batch_max(self) -> BatchMax:
        """If fewer operations than usual, then also few replicas: else no batch would ever end for having changed many."""
        most = self.scenario.cluster.batch
        return BATCH_MAX if most >= BATCH_MAX.operations else BatchMax(most, max(1, most // 2))

    def _server_main(self, scope: str, name: str) -> Main:
        async def main(process: Process) -> None:
            port = process.port(self.stores[scope])
            pace = self.pace
            await server(
                port,
                process.world,
                scope=scope,
                name=name,
                peers=self.servers(scope),
                beat_ms=pace.server_beat_ms,
                term_ms=pace.server_term_ms,
                batch_max=self._batch_max(),
                tempo=Tempo(pace.beat_ms),
            )

        return main

    def _controllers_main(self, scope: str, number: int) -> Main:
        above = self.scenario.cluster.scopes[0]
        alone = above == scope

        async def main(process: Process) -> None:
            seat = self._seat(process, scope)
            upper = None if alone else self._seat(process, above)
            async with asyncio.TaskGroup() as group:
                if upper is not None:
                    group.create_task(upper.view.follow(), name="view above")
                if scope not in self.scenario.cluster.placing:
                    group.create_task(seat.view.follow(), name="view")
                    return
                group.create_task(self._crew(process, seat, number).run(), name="controllers")
                group.create_task(Budgets(seat, upper).play(), name="budgets")
                group.create_task(Policies(seat, upper).play(), name="policies")

        return main

    def _crew(self, process: Process, seat: Seat, number: int) -> Crew:
        return controllers(
            process.port(self.stores[seat.scope], observer=True),
            process.port(self.stores[seat.scope]),
            seat.client,
            process.world,
            name=process.name,
            cadence=Cadence(self.pace.beat_ms),
            board=seat.view,
            lease_for=lambda lease: self._lease(Role(lease), number) or lease if lease in _RIVALLED else lease,
            failed=seat.give_up,
        )

    def _scheduler_main(self, scope: str, number: int) -> Main:
        pace = self.pace

        async def main(process: Process) -> None:
            seat = self._seat(process, scope)
            seat.watched = Watched(process.world.clock, seat.observed)
            placing = scheduler(
                process.port(self.stores[scope], observer=True),
                process.port(self.stores[scope]),
                seat.client(Actor(process.name, Role.SCHEDULER)),
                process.world,
                name=process.name,
                lease=self._lease(Role.SCHEDULER, number) or Role.SCHEDULER.value,
                rhythm=Rhythm(lease_ms=pace.lease_ms, idle_ms=5 * pace.beat_ms, batch=min(64, self.scenario.cluster.batch)),
                failed=seat.give_up,
                view=seat.watched,
                filters=(self.plugin.filter,) if self.scenario.cluster.plugin else (),
                pace=PACE,
                tell=self._tell,
            )
            await placing.run()

        return main

    def _tell(self, path: Path) -> None:
        self.paths[path.value] = self.paths.get(path.value, 0) + 1

    def _guesser_main(self, scope: str, number: int) -> Main:
        async def main(process: Process) -> None:
            seat = self._seat(process, scope)
            async with asyncio.TaskGroup() as group:
                group.create_task(seat.view.follow(), name="view")
                group.create_task(Guesser(seat, lease=f"{Role.SCHEDULER}/guess-{number}").play(), name="guesser")

        return main

    async def _keeper_main(self, process: Process) -> None:
        keeper = Keeper(process.world, JOURNAL)
        async with process.world.link.serve(process.name, keeper):
            await keeper.run()

    def _agent_main(self, scope: str, keeper: str) -> Main:
        async def main(process: Process) -> None:
            nodes = [node_named(name, int(name.rsplit("-n", 1)[1]), scope) for name in self.hosted(process.name)]
            farm = Farm(self._seat(process, scope), keeper, nodes)
            async with asyncio.TaskGroup() as group:
                group.create_task(farm.agent.run(), name="agent")
                if self.scenario.cluster.gossips:
                    group.create_task(tell_warmth(farm), name="warmth")

        return main

    def _people_main(self, scope: str) -> Main:
        cluster, load = self.scenario.cluster, self.scenario.load
        below = scope not in cluster.placing
        above = not below and len(cluster.scopes) > 1
        cpu = CPU_EACH * cluster.nodes * (len(cluster.placing) if below else 1)

        async def main(process: Process) -> None:
            seat = self._seat(process, scope)
            upper = self._seat(process, cluster.scopes[0]) if above and cluster.meddlers else None
            people = People(seat, load, cpu=cpu, above=above, below=below)
            self.people.append(people)
            async with asyncio.TaskGroup() as group:
                group.create_task(seat.view.follow(), name="view")
                group.create_task(people.live(), name="people")
                if upper is not None:
                    group.create_task(upper.view.follow(), name="view above")
                for _ in range(0 if below else cluster.meddlers):
                    meddler = Meddler(seat, upper)
                    group.create_task(meddler.play(), name="meddler")
                    group.create_task(meddler.beat(), name="meddler's nodes")
                for _ in range(0 if below else cluster.gossips):
                    group.create_task(Gossip(people).play(), name="gossip")

        return main

    # -- the phases of a run ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        for store in self.stores.values():
            if isinstance(store, DurableService):
                store.begin()
        for process in self.processes.values():
            process.start()

    def end(self) -> None:
        """Nothing of the run is left on the real disk."""
        for store in self.stores.values():
            if isinstance(store, DurableService):
                store.end()

    def declare_lost(self, scope: str) -> None:
        """Somebody who lives in the scope above does so."""
        for people in self.people:
            process = people.seat.process
            if people.seat.scope == self.scenario.cluster.scopes[0] and process.alive and people.seat.world is process.world:
                self.loop.spawn(people.declare_lost(scope), name="declare lost", unit=process.unit)
                return

    def hush(self) -> None:
        """People ask for nothing new, and open again what they had closed."""
        self.pace.quiet = True
        for people in self.people:
            process = people.seat.process
            if process.alive and people.seat.world is process.world:
                self.loop.spawn(people.open_all(), name="open all", unit=process.unit)


class Record(Ear, Witness, Recorder):
    """Everybody who writes down what happened: see simulation.py."""

    def process_silenced(self, process: Process) -> None:
        raise NotImplementedError

    def process_ended(self, process: Process, failure: BaseException | None) -> None:
        raise NotImplementedError


def of_sort(processes: Sequence[Process], *, alive: bool) -> list[Process]:
    return [process for process in processes if process.alive is alive]
