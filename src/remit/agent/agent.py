"""How does an agent carry on? Follows its orders and its keeper, beats, and performs what its nodes' minds answer (core.py).

One process may host many nodes: each has its own lease and its own mind; claims, beats and orders of all travel together.
Losing the servers changes nothing that runs: looking goes on by what was last known, and only claims wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from remit.agent.checking import Patient, ask_what_is_due
from remit.agent.copies import Copy
from remit.agent.core import Act, End, Leave, Mind, Say, Start
from remit.agent.keeping import NEVER, Begun, Keeping, Table
from remit.agent.orders import Assigned
from remit.agent.usage import Meter
from remit.agent.work import Place, fence_ms, order_for
from remit.client.client import Client, NoAnswer
from remit.client.tenure import Tenure
from remit.law.tempo import Tempo
from remit.model.beats import Beat, NodeState, RunState
from remit.model.claims import Accepted, Acquire, Actor, Apply, Evidence, Role, Verdict
from remit.model.kinds import Node
from remit.model.orders import Orders
from remit.model.resources import Duration
from remit.world.promises import DiskError, LinkError, World, WorldError

AGAIN_MS: Final = 5_000
"""What was asked of the keeper and has not come about is asked again."""

BACKOFF_MS: Final = 200
BACKOFF_MS_MAX: Final = 15_000
SWEEP_BEATS: Final = 10
"""After so many beats a node is looked at again, whatever was told of it."""

CLAIMS_MAX: Final = 1_000
"""How many travel together."""

_ENDS: Final = ("stopped", "crash", "finish")

Feed = Callable[[Sequence[str]], AsyncGenerator[Orders, None]]
"""The orders of these nodes, from whichever server tells them; it ends when that one is gone."""


class Hosted(NamedTuple):
    """A node of this agent: as it declares itself, and where what belongs to its work is kept."""

    node: Node
    place: Place


class _Node:
    """What goes on at one node."""

    def __init__(self, hosted: Hosted, tempo: Tempo) -> None:
        self.node, self.place = hosted
        self.name = self.node.metadata.name
        self.lease = f"{Role.AGENT}/{self.name}"
        self.mind = Mind(self.name, tempo)
        self.tenure: Tenure | None = None
        self.kept: dict[Copy, Begun] = {}
        self.settled = ""


class _Awaited:
    """Which replicas' last move the orders do not show yet, and at which revision they will."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[int, str]] = {}

    def add(self, key: str, node: str, revision: int) -> None:
        self._at[key] = revision, node

    def is_ahead(self, key: str, revision: int) -> bool:
        return self._at.get(key, (0, ""))[0] > revision

    def pop_reached(self, revision: int) -> list[str]:
        reached = {key: node for key, (at, node) in self._at.items() if at <= revision}
        for key in reached:
            del self._at[key]
        return list(dict.fromkeys(reached.values()))


class Agent:
    """One process's. `run` goes on for ever. `revive` is called when the keeper does not answer."""

    def __init__(
        self,
        world: World,
        client: Client,
        feed: Feed,
        keeping: Keeping,
        hosted: Sequence[Hosted],
        *,
        name: str,
        tempo: Tempo,
        revive: Callable[[], Awaitable[None]] | None = None,
        failed: Callable[[NoAnswer], None] | None = None,
    ) -> None:
        self._world, self._client, self._feed, self._keeping = world, client, feed, keeping
        self._name, self._tempo, self._revive, self._failed = name, tempo, revive, failed
        self._nodes = {one.name: one for one in (_Node(each, tempo) for each in hosted)}
        self.orders = Assigned(world.clock)
        self._wake = asyncio.Event()
        self._tabled = asyncio.Event()
        self._asking: dict[str, None] = {}
        self._awaited = _Awaited()
        self._due_ms: dict[str, int] = {}
        """When each node is looked at next."""
        self._not_before_ms: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._under_way: dict[tuple[str, Copy], int] = {}
        """What was asked of the keeper: when."""
        self._meter = Meter()
        self._measuring = False
        self._chance = world.chance.stream(f"agent {name}")
        self._group: asyncio.TaskGroup | None = None

    def actor(self, node: str) -> Actor | None:
        """As whom it speaks for a node, while it holds that one's lease."""
        tenure = self._nodes[node].tenure
        return tenure.actor if tenure is not None and tenure.may_act(self._world.clock.now_ms()) else None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._follow_keeper(), name="keeper")
            await self._tabled.wait()
            group.create_task(self._follow_orders(), name="orders")
            group.create_task(self._hold_leases(), name="leases")
            group.create_task(self._beat(), name="beats")
            await self._act()

    # -- what is known ---------------------------------------------------------------------------------------------------

    async def _follow_orders(self) -> None:
        while True:
            with suppress(LinkError, TimeoutError):
                async with aclosing(self._feed(tuple(self._nodes))) as told:
                    while True:
                        # A server beats: one that says nothing for long is gone, whatever it looks like.
                        async with self._world.clock.timeout_ms(self._tempo.unknown_ms):
                            orders = await anext(told, None)
                        if orders is None or orders.revision < self.orders.revision:
                            break  # it is over, or told by one who knows less than this agent does
                        self._take(orders)
            await self._pause(self._tempo.beat_ms // 4)

    def _take(self, orders: Orders) -> None:
        for key, node in self.orders.take(orders).items():
            self._not_before_ms.pop(key, None)
            self._failures.pop(key, None)
            self._touch(node)
        for node in (*orders.nodes, *orders.nodes_gone) if not orders.whole else tuple(self._nodes):
            self._touch(node)
        if orders.whole:
            self.orders.let_go()
        for node in self._awaited.pop_reached(self.orders.revision):
            self._touch(node)

    async def _follow_keeper(self) -> None:
        while True:
            with suppress(LinkError):
                async with aclosing(self._keeping.table()) as tables:
                    async for table in tables:
                        self._take_table(table)
            if self._revive is not None:
                await self._revive()
            await self._pause(self._tempo.beat_ms // 8)

    def _take_table(self, table: Table) -> None:
        if table.whole:
            for node in self._nodes.values():
                node.kept.clear()
                self._touch(node.name)
        for kept in table.kept:
            self._keep(kept)
        for gone in table.gone:
            for node in self._nodes.values():
                if node.kept.pop(Copy(*gone), None) is not None:
                    self._touch(node.name)
        self._tabled.set()

    def _keep(self, kept: Begun) -> None:
        node = self._nodes.get(kept.node)
        if node is not None:
            known = node.kept.get(kept.copy)
            if known is None or kept.stage >= known.stage:
                node.kept[kept.copy] = kept
                self._touch(node.name)

    # -- leases ----------------------------------------------------------------------------------------------------------

    async def _hold_leases(self) -> None:
        """Acquire whatever lease is not held; declare the node once it is."""
        while True:
            now_ms = self._world.clock.now_ms()
            without = [node for node in self._nodes.values() if node.tenure is None or not node.tenure.may_act(now_ms)]
            if without:
                await self._acquire(without)
            undeclared = [node for node in self._nodes.values() if node.tenure is not None and self.orders.known]
            await self._declare(undeclared)
            await self._pause(self._tempo.beat_ms // (2 if without else 1))

    async def _acquire(self, nodes: Sequence[_Node]) -> None:
        sent_ms = self._world.clock.now_ms()
        claims = [Acquire(node.lease, Duration(self._tempo.lease_ms)) for node in nodes]
        actors = [Actor(self._name, Role.AGENT) for _ in nodes]
        verdicts = await self._ask(claims, actors)
        renewed: dict[str, int] = {}
        for node, verdict in zip(nodes, verdicts or (), strict=False):
            if isinstance(verdict, Accepted):
                actor = Actor(self._name, Role.AGENT, node.lease, verdict.number)
                node.tenure = Tenure(actor, self._tempo.lease_ms, sent_ms)
                renewed[node.name] = sent_ms
        await self._renewed(renewed)
        for name in renewed:
            self._touch(name)

    async def _declare(self, nodes: Sequence[_Node]) -> None:
        """A node that is not there yet, or has changed its size. What people have set on it stays as they set it."""
        claims, actors = [], []
        for node in nodes:
            declared = _declaration(node.node, self.orders.node(node.name))
            if declared is not None and node.tenure is not None:
                claims.append(declared)
                actors.append(node.tenure.actor)
        if claims:
            await self._ask(claims, actors)

    async def _beat(self) -> None:
        """The whole state of every node, at a fixed rate: recovery costs no more than calm."""
        while True:
            began_ms = self._world.clock.now_ms()
            self._measure(began_ms)
            beats = [self._state(node) for node in self._nodes.values() if node.tenure is not None]
            if beats:
                await self._say_how_it_is([one for one in beats if one is not None])
            passed_ms = self._world.clock.now_ms() - began_ms
            await self._world.clock.sleep_ms(
                max(1, self._tempo.beat_ms - passed_ms - self._chance.uniform_ms(self._tempo.beat_ms // 16))
            )

    async def _say_how_it_is(self, beats: Sequence[Beat]) -> None:
        try:
            held, sent_ms = await self._client.beat(beats, deadline_ms=max(500, 2 * self._tempo.beat_ms))
        except NoAnswer:
            return
        renewed = {}
        for beat, mine in zip(beats, held, strict=True):
            node = self._nodes[beat.state.node]
            if node.tenure is None or node.tenure.actor != beat.actor:
                continue
            if mine:
                node.tenure.renewed(sent_ms)
                renewed[node.name] = sent_ms
            else:
                node.tenure.end()
        await self._renewed(renewed)

    async def _renewed(self, sent_ms: dict[str, int]) -> None:
        for name, at_ms in sent_ms.items():
            self._nodes[name].mind.renewed(at_ms)
        if sent_ms:
            self._spawn(self._pass_on(sent_ms), "renewals")

    async def _pass_on(self, sent_ms: dict[str, int]) -> None:
        """Beats do not wait for it: a keeper that stands still is no reason to fall silent."""
        with suppress(LinkError):
            await self._keeping.renewed(sent_ms)

    def _state(self, node: _Node) -> Beat | None:
        if node.tenure is None:
            return None
        alive = [kept for kept in node.kept.values() if kept.alive]
        incarnation = self.orders.incarnation
        if node.settled != incarnation and all(node.mind.ordered(self.orders, kept.copy) for kept in alive):
            node.settled = incarnation
        runs = []
        for kept in alive:
            cpu_milli, memory = self._meter.of(kept.copy)
            runs.append(RunState(kept.key, kept.uid, kept.attempt, kept.pid, kept.number, cpu_milli, memory))
        cpu, memory = sum(run.cpu_milli for run in runs), sum(run.memory_bytes for run in runs)
        settled = incarnation if node.settled == incarnation else ""
        return Beat(node.tenure.actor, NodeState(node.name, settled, cpu, memory, tuple(runs)))

    def _measure(self, now_ms: int) -> None:
        if self._meter.due(now_ms, self._tempo) and any(node.kept for node in self._nodes.values()) and not self._measuring:
            self._measuring = True
            self._spawn(self._take_measure(now_ms), "measure")

    async def _take_measure(self, now_ms: int) -> None:
        with suppress(LinkError):
            self._meter.take(now_ms, await self._keeping.uses())
        self._measuring = False

    # -- acting ----------------------------------------------------------------------------------------------------------

    async def _act(self) -> None:
        """Look at whoever has news, or whose time has come; and at everybody now and then, whatever was told."""
        clock = self._world.clock
        while True:
            self._wake.clear()
            now_ms = clock.now_ms()
            says: list[tuple[Actor, Say]] = []
            for name in [name for name, due_ms in self._due_ms.items() if due_ms <= now_ms]:
                self._look(self._nodes[name], now_ms, says)
            for first in range(0, len(says), CLAIMS_MAX):
                self._spawn(self._say(says[first : first + CLAIMS_MAX]), "say")
            until_ms = min(self._due_ms.values(), default=now_ms + self._tempo.beat_ms)
            with suppress(TimeoutError):
                async with clock.timeout_ms(max(1, until_ms - now_ms)):
                    await self._wake.wait()

    def _look(self, node: _Node, now_ms: int, says: list[tuple[Actor, Say]]) -> None:
        sweep_ms = SWEEP_BEATS * self._tempo.beat_ms
        self._due_ms[node.name] = now_ms + sweep_ms - self._chance.uniform_ms(sweep_ms // 4)
        may_act = node.tenure is not None and node.tenure.may_act(now_ms)
        for deed in node.mind.look(now_ms, self.orders, node.kept, may_act=may_act):
            self._perform(node, deed, now_ms, says)
        if node.mind.wake_ms is not None:
            self._touch(node.name, node.mind.wake_ms)
        self._probe(node)

    def _touch(self, name: str, at_ms: int | None = None) -> None:
        """There is news of this node, or will be then."""
        if name in self._nodes:
            self._due_ms[name] = min(self._world.clock.now_ms() if at_ms is None else at_ms, self._due_ms.get(name, 1 << 62))
            self._wake.set()

    def _probe(self, node: _Node) -> None:
        """Ask what runs how it is."""
        for copy, kept in node.kept.items():
            order = self.orders.get(copy.key)
            if not kept.alive or not kept.pid or order is None or not node.mind.ordered(self.orders, copy):
                continue
            generation = self.orders.spec_of(order.replica)
            if generation is not None:
                patient = Patient(node.place, kept, order.replica, generation, node.mind.course(copy))
                due_ms = ask_what_is_due(self._world, patient, self._spawn, lambda: self._touch(node.name))
                if due_ms is not None:
                    self._touch(node.name, due_ms)

    def _perform(self, node: _Node, deed: Act, now_ms: int, says: list[tuple[Actor, Say]]) -> None:
        match deed:
            case Say(copy, _):
                if node.tenure is not None and self._may_say(node, copy.key, now_ms) and self._is_sure(node, deed, now_ms):
                    self._asking[copy.key] = None
                    says.append((node.tenure.actor, deed))
            case Start(copy):
                self._once("start", node.name, copy, now_ms, lambda: self._start(node, deed))
            case End(copy, grace_ms):
                self._once("end", node.name, copy, now_ms, lambda: self._keeping.halt(copy, grace_ms))
            case Leave(copy):
                self._once("leave", node.name, copy, now_ms, lambda: self._leave(node, copy))

    def _may_say(self, node: _Node, key: str, now_ms: int) -> bool:
        """Not while it is asked, nor before the orders show what was answered, nor soon after a refusal."""
        if key in self._asking or self._awaited.is_ahead(key, self.orders.revision):
            return False
        at_ms = self._not_before_ms.get(key, 0)
        if at_ms > now_ms:
            self._touch(node.name, at_ms)
        return at_ms <= now_ms

    def _is_sure(self, node: _Node, say: Say, now_ms: int) -> bool:
        """That a copy has ended is told only once the keeper begins no more of it: a start that was asked for may be under way
        there still, also one that an earlier agent asked for. One that ended, and is not started again, is past that.
        """
        known = say.copy in node.kept and say.move.transition != "stopped"
        if say.move.transition not in _ENDS or known or node.mind.course(say.copy).barred:
            return True
        self._once("bar", node.name, say.copy, now_ms, lambda: self._bar(node, say.copy))
        return False

    async def _bar(self, node: _Node, copy: Copy) -> None:
        kept = await self._keeping.bar(copy)
        node.mind.course(copy).barred = kept is None or not kept.alive
        if kept is not None:
            self._keep(kept)

    async def _say(self, says: Sequence[tuple[Actor, Say]]) -> None:
        try:
            verdicts = await self._ask([say.move for _, say in says], [actor for actor, _ in says])
            for index, (actor, say) in enumerate(says):
                self._heard(say.copy.key, _node_of(actor), None if verdicts is None else verdicts[index])
        finally:
            for actor, say in says:
                self._asking.pop(say.copy.key, None)
                self._touch(_node_of(actor))

    def _heard(self, key: str, node: str, verdict: Verdict | None) -> None:
        if isinstance(verdict, Accepted):
            self._awaited.add(key, node, verdict.revision)
            self._failures.pop(key, None)
            return
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause_ms = min(BACKOFF_MS_MAX, BACKOFF_MS << min(failures - 1, 10))
        self._not_before_ms[key] = self._world.clock.now_ms() + pause_ms // 2 + self._chance.uniform_ms(pause_ms // 2)

    async def _ask(self, claims: Sequence[Any], actors: Sequence[Actor]) -> list[Verdict] | None:
        evidence = Evidence(self.orders.revision, self.orders.age_ms())
        try:
            return await self._client.ask_many(claims, evidence=evidence, actors=actors)
        except NoAnswer as error:
            if self._failed is not None:
                self._failed(error)
            return None

    # -- the keeper's hand -----------------------------------------------------------------------------------------------

    def _once(self, what: str, node: str, copy: Copy, now_ms: int, deed: Callable[[], Awaitable[None]]) -> None:
        """Ask for it, and not again while that is under way, or has just been."""
        asked_ms = self._under_way.get((what, copy))
        if asked_ms is not None and now_ms < asked_ms + AGAIN_MS:
            self._touch(node, asked_ms + AGAIN_MS)
            return
        self._under_way[what, copy] = now_ms
        self._spawn(self._try(what, node, copy, deed), f"{what} {copy.key}")

    async def _try(self, what: str, node: str, copy: Copy, deed: Callable[[], Awaitable[None]]) -> None:
        try:
            await deed()
            if what != "end":  # that one takes its grace; whoever looks meanwhile need not ask again
                self._under_way.pop((what, copy), None)
        except WorldError:
            self._under_way[what, copy] = self._world.clock.now_ms()
        self._touch(node)

    async def _start(self, node: _Node, start: Start) -> None:
        template = start.generation.spec.template
        known = node.kept.get(start.copy)
        wanted = {port.name: port.port for port in template.ports}
        ports = known.ports if known is not None else await self._ports(wanted)
        order = order_for(node.place, start.copy, start.replica, start.generation, ports)
        await self._world.offload(lambda: self._make_room(node.place, start.copy))
        fence = fence_ms(start.generation)
        kept = await self._keeping.begin(
            order, number=start.number, fence_ms=fence, grace_ms=self._tempo.kill_grace_ms, ports=ports
        )
        if kept is not None and kept.number == NEVER:
            raise DiskError(kept.failed, kept.cure)
        if kept is not None:
            self._keep(kept)

    async def _ports(self, wanted: dict[str, int]) -> dict[str, int]:
        free = iter(await self._world.ports.free(sum(port == 0 for port in wanted.values())))
        return {name: port or next(free) for name, port in wanted.items()}

    def _make_room(self, place: Place, copy: Copy) -> None:
        self._world.disk.make_directory(place.logs, durably=False)
        self._world.disk.make_directory(place.directory(copy), durably=False)

    async def _leave(self, node: _Node, copy: Copy) -> None:
        await self._keeping.drop(copy)
        node.kept.pop(copy, None)
        for known in (self._not_before_ms, self._failures):
            known.pop(copy.key, None)
        self._under_way.pop(("end", copy), None)
        with suppress(DiskError):
            await self._world.offload(lambda: self._world.disk.remove_tree(node.place.directory(copy)))

    # -- small things ----------------------------------------------------------------------------------------------------

    async def _pause(self, ms: int) -> None:
        await self._world.clock.sleep_ms(ms // 2 + self._chance.uniform_ms(max(1, ms // 2)))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._group is None:
            raise RuntimeError("an agent that does not run does nothing")
        self._group.create_task(work, name=name)


def _declaration(node: Node, found: tuple[Node, int] | None) -> Apply | None:
    if found is None:
        return Apply(node, expect=0)
    there, revision = found
    own, spec = node.spec, there.spec
    wanted = replace(spec, capacity=own.capacity, devices=own.devices, address=own.address, port=own.port)
    if wanted == spec or there.metadata.deleting:
        return None
    return Apply(replace(there, spec=wanted), expect=revision)


def _node_of(actor: Actor) -> str:
    return actor.lease.partition("/")[2]
