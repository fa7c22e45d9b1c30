"""What does a node do with its orders? Starts what is bound to it, stops what is to go, and stops itself when it is cut off.

Three rules of DESIGN sections 4 and 6 are played here as the real agent will keep them:

- a process is started only once this agent's own `start` for that attempt is committed, and the lease is not past the fence,
  nor has it been since that `start` was asked for: its order may have been given up meanwhile, and the view be too old to say;
- what must never run twice is stopped when no renewal was answered for longer than its fence, counted from when the renewal was
  *sent*; the **keeper** does that, also while the agent is dead, frozen or slow;
- the table of processes is the machine's: an agent that was killed finds in it what it had started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from remit.client.client import NoAnswer
from remit.client.tenure import Tenure
from remit.law.tempo import Tempo
from remit.model.beats import Beat, NodeState
from remit.model.claims import Actor, AnyClaim, Apply, Move, Role, Verdict
from remit.model.fields import Metadata
from remit.model.kinds import Device, Node, NodeHealth, NodeSpec
from remit.model.records import Generation, Phase, Replica
from remit.model.resources import Amount
from remit.simulate.actors.seat import Player, Seat, accepted
from remit.simulate.processes import Machine, Process
from remit.simulate.runners import Run
from remit.world.promises import DiskError, Ended, Order

RENEWALS_KEPT: Final = 100
KILL_GRACE_MS: Final = Tempo().kill_grace_ms
_DAWDLES_MS: Final = 5_000
_ACTIVE: Final = (Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING)


class Copy(NamedTuple):
    """One attempt of one replica."""

    key: str
    uid: str
    attempt: int


class Keeper:
    """Holds the deadline of every node of its machine, and ends what is past it. It outlives the agent."""

    def __init__(self, machine: Machine, look_ms: int) -> None:
        self.machine = machine
        self._look_ms = look_ms
        """It looks at least so often, and whenever a deadline comes."""
        self._news = asyncio.Event()

    def renewed(self, node: str, sent_ms: int) -> None:
        pipes = self.machine.pipes
        pipes[node] = max(sent_ms, pipes.get(node, 0))

    def start(self, order: Order) -> Run | None:
        """Start it, unless its deadline has passed. Looking and starting is one step."""
        left_ms = self._left_ms(order)
        if left_ms is not None and left_ms <= 0:
            return None
        machinery = self.machine.machinery
        run = machinery.find(machinery.start(order))
        self._news.set()
        return run

    def _left_ms(self, order: Order) -> int | None:
        """How long it may still run without a renewal; None: for ever."""
        fence_ms = int(order.env["REMIT_FENCE_MS"])
        if not fence_ms:
            return None
        last_ms = self.machine.pipes.get(order.env["REMIT_NODE"])
        return 0 if last_ms is None else last_ms + fence_ms - self.machine.clock.now_ms()

    async def watch(self, process: Process) -> None:
        """The keeper's own process: for ever."""
        self._news = asyncio.Event()
        clock, ending = process.world.clock, set[int]()
        async with asyncio.TaskGroup() as group:
            while True:
                self._news.clear()
                wait_ms = self._look_ms
                for run in tuple(self.machine.machinery.runs.values()):
                    left_ms = self._left_ms(run.order)
                    if left_ms is None or run.running.pid in ending:
                        continue
                    if left_ms > 0:
                        wait_ms = min(wait_ms, left_ms)
                        continue
                    ending.add(run.running.pid)
                    group.create_task(process.world.runner.stop(run.running, grace_ms=KILL_GRACE_MS), name="fence")
                with suppress(TimeoutError):
                    async with clock.timeout_ms(wait_ms):
                        await self._news.wait()


class Agent(Player):
    """The agent of one node."""

    role = Role.AGENT

    def __init__(self, seat: Seat, node: Node, keeper: Keeper) -> None:
        self.name = node.metadata.name
        super().__init__(seat, lease=f"agent/{self.name}", node=self.name)
        self.node = node
        self.keeper = keeper
        self.machinery = keeper.machine.machinery
        self._known: set[Copy] = set()
        """What was found running, and is waited for since."""
        self._asked: dict[Copy, int] = {}
        """When the `start` of each was asked for."""
        self._renewals: list[int] = []
        """When the last ones that were answered had been sent."""
        self._ends: dict[Copy, Ended] = {}
        self._stopping: set[int] = set()
        self._reported = ""
        self._not_before: dict[tuple[Copy, Phase], int] = {}

    # -- being there -----------------------------------------------------------------------------------------------------

    async def began(self) -> None:
        if self.tenure is not None:
            self._heard_at(self.tenure)
        await self._read_orders()
        await super().began()
        if self.view.get(f"node/{self.name}") is None:
            await self.say([Apply(self.node)])
            self.look_at_all()

    async def _read_orders(self) -> None:
        """Until they were listed nothing is known: not that there is none for what runs here, nor that the node is not declared
        yet and may not be draining.
        """
        while self.view.head is None:
            await self.world.clock.sleep_ms(self.seat.pace.beat_ms // 8)

    def look_at_all(self) -> None:
        """It looks at all that is on its node, however many keys it is told of."""
        self.changes.keys[f"node/{self.name}"] = None
        self.changes.wake()

    async def _renew(self, tenure: Tenure) -> None:
        """Its beats renew its lease."""

    def renewed(self, tenure: Tenure) -> None:
        if not tenure.lost:
            self._heard_at(tenure)

    def _heard_at(self, tenure: Tenure) -> None:
        sent_ms = tenure.held_until_ms - self.seat.pace.lease_ms
        self.keeper.renewed(self.name, sent_ms)
        self._renewals = [*self._renewals[1 - RENEWALS_KEPT :], sent_ms]

    # -- orders ----------------------------------------------------------------------------------------------------------

    def wants(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        runs = self._runs()
        self._end_strays(runs)
        for key in tuple(self.view.by_node.get(self.name, ())):
            seen = self.view.rows[key]
            replica: Replica = seen.thing
            copy = Copy(key, replica.metadata.uid, replica.status.attempt)
            claim = self._next(copy, replica, seen.revision, runs.get(copy))
            if claim is not None:
                yield claim

    def _next(self, copy: Copy, replica: Replica, at: int, run: Run | None) -> AnyClaim | None:
        phase, attempt = replica.status.phase, replica.status.attempt
        ended = self._ends.get(copy)
        begun = phase is not Phase.STARTING or run is not None  # an order is carried out at once, or is void
        if ended is None and begun and self._dawdles(copy, phase):
            return None
        match phase:
            case Phase.BOUND:
                self._asked[copy] = self.world.clock.now_ms()
                return Move(copy.key, at, "start", attempt)
            case Phase.STARTING if run is not None or ended is not None:
                return Move(copy.key, at, "run", attempt) if ended is None else self._ended(copy, replica, at, ended)
            case Phase.STARTING if self._void(copy, replica):
                return Move(copy.key, at, "crash", attempt, result="gone", reason="it was not started in time")
            case Phase.STARTING:
                self._start(copy, replica)
                return None
            case Phase.RUNNING if ended is None and run is not None:
                found = self._spec_of(replica)
                service = found is not None and found.spec.spec.type != "job"
                return Move(copy.key, at, "ready", attempt) if service and self.chance.below(3) else None
            case Phase.RUNNING | Phase.READY | Phase.SERVING if run is None:
                return self._ended(copy, replica, at, ended or Ended())
            case Phase.READY | Phase.SERVING if self.chance.below(400) == 0:
                return Move(copy.key, at, "unready", attempt, reason="its probe failed")
            case Phase.DRAINING:
                return Move(copy.key, at, "stop", attempt)
            case Phase.STOPPING if run is not None:
                self._stop(run)
                return None
            case Phase.STOPPING:
                return Move(copy.key, at, "stopped", attempt, result=_result(ended or Ended(code=0)))
            case Phase.UNKNOWN if not self._given_up():
                return Move(copy.key, at, "resume", attempt)
            case _:
                return None

    def _dawdles(self, copy: Copy, phase: Phase) -> bool:
        """Now and then a step takes seconds, as pulling an image or a hook before the stop would."""
        if phase not in (Phase.BOUND, Phase.STARTING, Phase.DRAINING):
            return False
        now_ms = self.world.clock.now_ms()
        if (copy, phase) not in self._not_before:
            slow_ms = self.chance.uniform_ms(_DAWDLES_MS) if self.chance.below(4) == 0 else 0
            self._not_before[copy, phase] = now_ms + slow_ms
            if slow_ms:
                self.seat.process.loop.spawn(self._look_in(slow_ms, copy.key), name="look again")
        return now_ms < self._not_before[copy, phase]

    async def _look_in(self, pause_ms: int, key: str) -> None:
        await self.world.clock.sleep_ms(pause_ms)
        self.changes.keys[key] = None
        self.changes.wake()

    def _given_up(self) -> bool:
        """Is this node held for silent? Then what is resumed would be doubted at once, again and again: it joins first."""
        node: Node | None = self.view.get(f"node/{self.name}")
        return node is not None and node.status.health in (NodeHealth.UNKNOWN, NodeHealth.LOST)

    def _ended(self, copy: Copy, replica: Replica, at: int, ended: Ended) -> AnyClaim:
        fits = replica.status.phase in (Phase.RUNNING, Phase.READY)
        transition = "finish" if ended.code == 0 and fits else "crash"
        return Move(copy.key, at, transition, replica.status.attempt, result=_result(ended))

    def heard(self, claim: AnyClaim, verdict: Verdict) -> None:
        if isinstance(claim, Move) and claim.transition == "start" and accepted(verdict):
            self.changes.keys[claim.replica] = None

    # -- processes -------------------------------------------------------------------------------------------------------

    def _runs(self) -> dict[Copy, Run]:
        """What the machine is running for this node and scope."""
        found = {}
        for run in self.machinery.runs.values():
            env = run.order.env
            if env["REMIT_NODE"] == self.name and env["REMIT_SCOPE"] == self.seat.scope:
                found[Copy(env["REMIT_REPLICA"], env["REMIT_UID"], int(env["REMIT_ATTEMPT"]))] = run
        return found

    def _void(self, copy: Copy, replica: Replica) -> bool:
        """Was there a silence, since its `start` was asked for, after which the scope may have given it up?"""
        found = self._spec_of(replica)
        if found is None or not found.spec.spec.never_twice:
            return False
        asked_ms, times = self._asked.get(copy), [*self._renewals, self.world.clock.now_ms()]
        fence_ms = int(found.spec.spec.fence)
        return asked_ms is None or any(b > asked_ms and b - a >= fence_ms for a, b in pairwise(times))

    def _start(self, copy: Copy, replica: Replica) -> None:
        """Its own `start` is committed: only this agent makes that move."""
        found = self._spec_of(replica)
        if found is None or self.tenure is None or not self.tenure.may_act(self.world.clock.now_ms()):
            return
        spec = found.spec.spec
        env = {
            "REMIT_NODE": self.name,
            "REMIT_SCOPE": self.seat.scope,
            "REMIT_REPLICA": copy.key,
            "REMIT_UID": copy.uid,
            "REMIT_ATTEMPT": str(copy.attempt),
            "REMIT_FENCE_MS": str(int(spec.fence) if spec.never_twice else 0),
        }
        if not self._may_start_once(copy):
            return
        run = self.keeper.start(Order(spec.template.command, env))
        if run is not None:
            self.changes.keys[copy.key] = None
            self._watch(copy, run)

    def _may_start_once(self, copy: Copy) -> bool:
        """Write down that it is about to be started, before it is. What stands there already was started before this agent was
        killed, and has ended since: it is not started again. Without a disk that keeps this nothing is started.
        """
        try:
            journal = self._read_journal()
            if copy in journal:
                self._ends[copy] = Ended()
                self.changes.keys[copy.key] = None
                return False
            kept = [one for one in journal if self._ordered(one)]
            lines = "\n".join(f"{one.key} {one.uid} {one.attempt}" for one in (*kept, copy))
            self.world.disk.write_atomically(self._place(), lines.encode())
        except DiskError:
            return False
        return True

    def _read_journal(self) -> list[Copy]:
        disk, place = self.world.disk, self._place()
        disk.make_directory(place.parent)
        words = disk.read(place).decode().splitlines() if disk.exists(place) else []
        return [Copy(key, uid, int(attempt)) for key, uid, attempt in (line.split() for line in words)]

    def _place(self) -> Path:
        return Path("/journal") / self.name

    def _watch(self, copy: Copy, run: Run) -> None:
        """The keeper is the parent of all that runs, and tells how each ended."""

        async def wait() -> None:
            self._ends[copy] = await asyncio.shield(run.ended)
            self.changes.keys[copy.key] = None
            self.changes.wake()

        self.seat.process.loop.spawn(wait(), name=f"wait for {copy.key}")
        self.changes.wake()

    def _end_strays(self, runs: dict[Copy, Run]) -> None:
        """What runs here and is not, or no longer, ordered."""
        for copy, run in runs.items():
            if not self._ordered(copy):
                self._stop(run)
            elif copy not in self._known:
                self._known.add(copy)
                self._watch(copy, run)

    def _ordered(self, copy: Copy) -> bool:
        replica = self.view.get(copy.key)
        return (
            replica is not None
            and (replica.metadata.uid, replica.status.attempt, replica.status.node) == (copy.uid, copy.attempt, self.name)
            and replica.status.phase not in (Phase.RELEASED, Phase.FAILED, Phase.FINISHED)
        )

    def reported(self, incarnation: str) -> bool:
        """Has this node come to terms with that incarnation: does nothing run here any more that it knows nothing of?"""
        if self._reported != incarnation and all(map(self._ordered, self._runs())):
            self._reported = incarnation
        return self._reported == incarnation

    def _stop(self, run: Run) -> None:
        if run.running.pid in self._stopping:
            return
        self._stopping.add(run.running.pid)
        stopping = self.world.runner.stop(run.running, grace_ms=KILL_GRACE_MS)
        self.seat.process.loop.spawn(stopping, name="stop")

    def _spec_of(self, replica: Replica) -> Generation | None:
        meta, spec = replica.metadata, replica.spec
        found: Generation | None = self.view.get(f"generation/{meta.tenant}/{spec.workload}/{spec.generation:08d}")
        return found


def _result(ended: Ended) -> str:
    if ended.code == 0:
        return "ok"
    return f"exit {ended.code}" if ended.code is not None else f"signal {ended.signal}" if ended.signal else "gone"


def node_named(name: str, number: int, region: str) -> Node:
    """A machine as it describes itself; every third has two devices."""
    gpus = tuple(Device(name=f"gpu-{i}", kind="gpu", model="A10") for i in range(2)) if number % 3 == 0 else ()
    zone = f"{region}-{'abc'[number % 3]}"
    capacity = Amount.parse({"cpu": "4", "memory": "8Gi"})
    labels = {"disk": "ssd" if number % 2 else "hdd"}
    return Node(
        metadata=Metadata(name=name, labels=labels), spec=NodeSpec(region=region, zone=zone, capacity=capacity, devices=gpus)
    )


async def beat(seat: Seat, agents: Sequence[Agent]) -> None:
    """Say to the authority, at a fixed rate, which nodes are here, and which incarnation each has come to terms with.

    A node that runs what a restored scope knows nothing of has not: else the same work would be bound elsewhere.
    """
    clock, pace = seat.world.clock, seat.pace
    client = seat.client(Actor(seat.process.name, Role.AGENT))

    async def tell(held: Sequence[tuple[Agent, Tenure]], beats: Sequence[Beat]) -> None:
        with suppress(NoAnswer):
            said, sent_ms = await client.beat(beats, deadline_ms=pace.beat_ms)
            for (agent, tenure), mine in zip(held, said, strict=True):
                if mine:
                    tenure.renewed(sent_ms)
                    agent.renewed(tenure)
                else:
                    tenure.end()

    while True:
        incarnation = seat.view.head.incarnation if seat.view.head is not None else ""
        held = [(agent, agent.tenure) for agent in agents if agent.tenure is not None and not agent.tenure.lost]
        beats = [
            Beat(tenure.actor, NodeState(agent.name, incarnation if agent.reported(incarnation) else ""))
            for agent, tenure in held
        ]
        if incarnation and beats:
            seat.process.loop.spawn(tell(held, beats), name="beat")
        await clock.sleep_ms(pace.beat_ms)
