"""Agent main loop: follows orders, drives the keeper and performs the actions its node reconcilers return.

Follows its orders and its keeper, beats, and performs what its nodes' minds answer (core.py).

One process may host many nodes: each has its own lease and its own mind; claims, beats and orders of all travel together.
Losing the servers changes nothing that runs: looking goes on by what was last known, and only claims wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from remit.agent.assignments import Assigned, Lineup, held_ms
from remit.agent.attempts import Copy, named
from remit.agent.callbacks import Beside
from remit.agent.heartbeat import Standing
from remit.agent.hosted_node import ALL, Awaited, Continuity, Hosted, Site
from remit.agent.keeper.protocol import NEVER, Begun, Keeping, Table
from remit.agent.preparation import Making, Preparer
from remit.agent.probe_runner import Patient, ask_what_is_due
from remit.agent.reconciler import Act, End, Leave, Prepare, Say, Start
from remit.agent.run_spec import NOTHING, Place, Prepared, fence_ms, needs_preparing, order_for
from remit.agent.volumes import hold_scratch
from remit.client.authority_client import Client, NoAnswer
from remit.law.timing import Tempo
from remit.model.claims import Accepted, Actor, Verdict
from remit.model.counters import LONG_SECONDS, Buckets, Counts
from remit.model.records import GenerationSpec, Replica
from remit.model.wire.agent_messages import Orders
from remit.world.concurrency import Together
from remit.world.interfaces import DiskError, LinkError, NotStarted, World, WorldError

AGAIN_MS: Final = 5_000
"""What was asked of the keeper and has not come about is asked again."""

BACKOFF_MS: Final = 200
BACKOFF_MS_MAX: Final = 15_000
SWEEP_BEATS: Final = 10
"""After so many beats a node is looked at again, whatever was told of it."""

CLAIMS_MAX: Final = 1_000
"""How many travel together."""

SWARM, GATHER_MS = 4, 10
"""Where there was news of so many at once, the next look is so much later."""

_ENDS: Final = ("stopped", "crash", "finish")

UNDER_WAY_MAX: Final = 10_000
"""Of so many things asked of the keeper those are forgotten that were asked long ago."""

Feed = Callable[[Sequence[str]], AsyncGenerator[Orders, None]]
"""The orders of these nodes, from whichever server tells them; it ends when that one is gone."""


def _unsaid(_: str, **fields: object) -> None:
    return


STARTS: Final = ("begun", "late", "failed")


class Agent:
    """One process's. `run` goes on for ever. `revive` is called when the keeper does not answer; `tell` is for people. `epochs`
    is the file in which it writes down which leases it has held (continuity.py).
    """

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
        preparer: Preparer | None = None,
        epochs: Path | None = None,
        revive: Callable[[], Awaitable[None]] | None = None,
        failed: Callable[[NoAnswer], None] | None = None,
        tell: Callable[..., None] = _unsaid,
        note: Callable[..., None] = _unsaid,
    ) -> None:
        self._world, self._client, self._feed, self._keeping = world, client, feed, keeping
        self._tempo, self._revive, self._told, self._note = tempo, revive, tell, note
        self._sites = {one.node.metadata.name: Site(one.place, tempo, one.node) for one in hosted}
        self._like = hosted[0].place
        self._preparer = preparer or Preparer(world, ())
        self.orders = Assigned(world.clock)
        self._lineup = Lineup()
        self._standing = Standing(
            world, client, keeping, self.orders, self._sites, Continuity(world, epochs), self._lineup,
            name=name, tempo=tempo, touch=self._touch, tell=tell, failed=failed,
        )  # fmt: skip
        self._together = Together(world.offload)
        self._wake = asyncio.Event()
        self._tabled = asyncio.Event()
        self._asking: dict[str, None] = {}
        self._awaited = Awaited()
        self._not_before_ms: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._under_way: dict[tuple[str, Copy], int] = {}
        """What was asked of the keeper: when."""
        self._chance = world.chance.stream(f"agent {name}")
        self._group: asyncio.TaskGroup | None = None
        self.starts = Counts(STARTS)
        self.fetches = Buckets(LONG_SECONDS)
        """How long it took to fetch what work needs, once an attempt."""

    def actor(self, node: str) -> Actor | None:
        """As whom it speaks for a node, while it holds that one's lease."""
        tenure = self._sites[node].tenure
        return tenure.actor if tenure is not None and tenure.may_act(self._world.clock.now_ms()) else None

    def log_places(self, copy: Copy) -> tuple[list[Path], bool]:
        """In which directories what a copy says may be kept, and whether it goes on: it runs, or is ordered."""
        for site in self._sites.values():
            kept, ordered = site.kept.get(copy), site.mind.ordered(self.orders, copy)
            if kept is not None or ordered:
                return [site.place.logs], ordered or (kept is not None and kept.alive)
        return [site.place.logs for site in self._sites.values()], False

    def beside(self, copy: Copy) -> Beside | None:
        """What runs of a copy, and how it was started. None: it does not run here, or is not wanted any more. Raises
        `NotStarted` while that cannot be told.
        """
        for site in self._sites.values():
            kept, order = site.kept.get(copy), self.orders.get(copy.key)
            if kept is None or not kept.alive or not kept.pid or order is None or not site.mind.ordered(self.orders, copy):
                continue
            generation = self.orders.spec_of(order.replica)
            if generation is not None:
                prepared = self._prepared(site, copy, order.replica, generation)
                if prepared is None:
                    raise NotStarted("what it was started with is being looked up again", "ask again in a moment")
                like = order_for(site.place, copy, order.replica, generation, kept.ports, prepared)
                return Beside(site.name, kept.running, like)
        return None

    @property
    def hosts(self) -> int:
        return sum(site.tenure is not None for site in self._sites.values())

    def running(self) -> int:
        """How many copies run here, as far as is known."""
        return sum(kept.alive for site in self._sites.values() for kept in site.kept.values())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._follow_keeper(), name="keeper")
            await self._until_tabled()
            known = {copy.file_name for site in self._sites.values() for copy in site.kept}
            await self._preparer.clear([site.place.work for site in self._sites.values()], known)
            group.create_task(self._follow_orders(), name="orders")
            group.create_task(self._standing.hold(), name="leases")
            group.create_task(self._standing.beat(), name="beats")
            group.create_task(self._standing.measure(), name="uses")
            group.create_task(self._standing.pass_on(), name="renewals")
            group.create_task(hold_scratch(self._world, self._keeping, self.orders, self._sites, self._tempo), name="scratch")
            await self._act()

    async def _until_tabled(self) -> None:
        """Until the keeper has said what runs here nothing is known, and no lease is taken: that it does not is told, once."""
        try:
            async with self._world.clock.timeout_ms(self._tempo.unknown_ms):
                await self._tabled.wait()
        except TimeoutError:
            self._told("the keeper does not say what runs here, so its nodes are not taken up; see what is in run/keeper.log")
            await self._tabled.wait()
            self._told("the keeper answers: its nodes are taken up")

    # -- what is known ---------------------------------------------------------------------------------------------------

    async def _follow_orders(self) -> None:
        nodes = tuple(site.name for site in self._sites.values() if site.node is not None)
        while True:
            with suppress(LinkError, TimeoutError):
                async with aclosing(self._feed(nodes)) as told:
                    while True:
                        # A server beats: one that says nothing for long is gone, whatever it looks like.
                        async with self._world.clock.timeout_ms(self._tempo.unknown_ms):
                            orders = await anext(told, None)
                        if orders is None or not self._is_newer(orders):
                            break  # it is over, or told by one who knows less than this agent does
                        self._take(orders)
            await self._pause(self._tempo.beat_ms // 4)

    def _is_newer(self, told: Orders) -> bool:
        """A restored store goes on after its last revision; only a new one, which nobody restored, begins at the first again.
        Whoever stands in the old one's place is known by the one who answers claims.
        """
        if told.revision >= self.orders.revision:
            return True
        return told.whole and self.orders.incarnation != told.incarnation == self._client.incarnation

    def _take(self, orders: Orders) -> None:
        if orders.revision < self.orders.revision:
            self._awaited.clear()
        for key, node in self.orders.take(orders).items():
            self._not_before_ms.pop(key, None)
            self._failures.pop(key, None)
            self._touch(node, key)
        for node in (*orders.nodes, *orders.nodes_gone) if not orders.whole else tuple(self._sites):
            self._touch(node)
        if orders.whole:
            self.orders.let_go()
        for key, node in self._awaited.pop_reached(self.orders.revision).items():
            self._touch(node, key)

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
            for site in self._sites.values():
                site.kept.clear()
                self._touch(site.name)
        for kept in table.kept:
            self._keep(kept)
        for gone in table.gone:
            for site in self._sites.values():
                if site.kept.pop(Copy(*gone), None) is not None:
                    self._touch(site.name, gone[0])
        self._tabled.set()

    def _keep(self, kept: Begun) -> None:
        site = self._sites.get(kept.node)
        if site is None:  # it was hosted here once, under that name: nobody orders anything there, so what is left of it ends
            place = self._like._replace(node=kept.node, logs=self._like.logs.parent / kept.node)
            site = self._sites[kept.node] = Site(place, self._tempo, None)
            self._told(f"{kept.node} is not hosted here any more: what is left of it is ended")
        known = site.kept.get(kept.copy)
        if known is None or (kept.stage >= known.stage and kept != known):  # each start is answered, and told in the table
            site.kept[kept.copy] = kept
            self._touch(site.name, kept.key)

    # -- acting ----------------------------------------------------------------------------------------------------------

    async def _act(self) -> None:
        """Look at whoever has news, or whose time has come; and at everybody now and then, whatever was told."""
        clock = self._world.clock
        while True:
            self._wake.clear()
            now_ms, looks = clock.now_ms(), 0
            says: list[tuple[Actor, Say]] = []
            for site in tuple(self._sites.values()):
                if (due_ms := site.due_ms()) is not None and due_ms <= now_ms:
                    looks += self._look(site, now_ms, says)
            for first in range(0, len(says), CLAIMS_MAX):
                self._spawn(self._say(says[first : first + CLAIMS_MAX]), "say")
            for node, copy in self._lineup.call():
                self._touch(node, copy.key)
            if looks >= SWARM:  # what comes meanwhile travels together; what comes alone is looked at right away
                await clock.sleep_ms(GATHER_MS)
            dues_ms = [due_ms for site in self._sites.values() if (due_ms := site.due_ms()) is not None]
            until_ms = min(dues_ms, default=now_ms + self._tempo.beat_ms)
            with suppress(TimeoutError):
                async with clock.timeout_ms(max(1, until_ms - now_ms)):
                    await self._wake.wait()

    def _look(self, site: Site, now_ms: int, says: list[tuple[Actor, Say]]) -> int:
        """At how many it has looked, as far as they were named."""
        keys = site.take_due(now_ms)
        if keys is None:
            sweep_ms = SWEEP_BEATS * self._tempo.beat_ms
            site.touch(ALL, now_ms + sweep_ms - self._chance.uniform_ms(sweep_ms // 4))
        for deed in site.mind.look(now_ms, self.orders, site.kept, may_act=site.may_act(now_ms), keys=keys):
            self._perform(site, deed, now_ms, says)
        for key, at_ms in site.mind.wakes.items():
            site.touch(key, at_ms)
        if site.mind.making:
            self._abandon_what_nobody_wants(site)
        self._probe(site, keys)
        return 0 if keys is None else len(keys)

    def _touch(self, name: str, key: str = ALL, at_ms: int | None = None) -> None:
        """There is news of a replica of this node, or of the node itself; or will be then."""
        site = self._sites.get(name)
        if site is not None:
            site.touch(key, self._world.clock.now_ms() if at_ms is None else at_ms)
            self._wake.set()

    def _probe(self, site: Site, keys: Collection[str] | None) -> None:
        """Ask what runs how it is."""
        for copy, kept in site.kept.items():
            if keys is not None and copy.key not in keys:
                continue
            order = self.orders.get(copy.key)
            if not kept.alive or not kept.pid or order is None or not site.mind.ordered(self.orders, copy):
                continue
            generation = self.orders.spec_of(order.replica)
            prepared = NOTHING if generation is None else self._prepared(site, copy, order.replica, generation)
            if generation is not None and prepared is not None:
                patient = Patient(site.place, kept, order.replica, generation, site.mind.course(copy), prepared)
                tell = partial(self._touch, site.name, copy.key)
                due_ms = ask_what_is_due(self._world, patient, self._spawn, tell)
                if due_ms is not None:
                    self._touch(site.name, copy.key, due_ms)

    def _perform(self, site: Site, deed: Act, now_ms: int, says: list[tuple[Actor, Say]]) -> None:
        match deed:
            case Say(_, move) if move.transition == "start" and not self._standing.keeper_answers:
                pass  # whoever could not begin it does not say so: after a while it is placed elsewhere
            case Say(copy, _):
                if site.tenure is not None and self._may_say(site, copy.key, now_ms) and self._is_sure(site, deed, now_ms):
                    self._asking[copy.key] = None
                    says.append((site.tenure.actor, deed))
            case Prepare():
                self._prepare(site, deed)
            case Start(copy):
                if self._lineup.may_begin(copy, site.name):
                    self._once("start", site.name, copy, now_ms, lambda: self._start(site, deed))
            case End(copy, grace_ms, why):
                self._once("end", site.name, copy, now_ms, lambda: self._keeping.halt(copy, grace_ms, why))
            case Leave(copy):
                self._once("leave", site.name, copy, now_ms, lambda: self._leave(site, copy))

    def _may_say(self, site: Site, key: str, now_ms: int) -> bool:
        """Not while it is asked, nor before the orders show what was answered, nor soon after a refusal."""
        if key in self._asking or self._awaited.is_ahead(key, self.orders.revision):
            return False
        at_ms = self._not_before_ms.get(key, 0)
        if at_ms > now_ms:
            self._touch(site.name, key, at_ms)
        return at_ms <= now_ms

    def _is_sure(self, site: Site, say: Say, now_ms: int) -> bool:
        """That a copy has ended is told only once the keeper begins no more of it: a start that was asked for may be under way
        there still, also one that an earlier agent asked for. One that ended, and is not started again, is past that.
        """
        known = say.copy in site.kept and say.move.transition != "stopped"
        if say.move.transition not in _ENDS or known or site.mind.course(say.copy).barred:
            return True
        self._once("bar", site.name, say.copy, now_ms, lambda: self._bar(site, say.copy))
        return False

    async def _bar(self, site: Site, copy: Copy) -> None:
        kept = await self._keeping.bar(copy)
        site.mind.course(copy).barred = kept is None or not kept.alive
        if kept is not None:
            self._keep(kept)

    async def _say(self, says: Sequence[tuple[Actor, Say]]) -> None:
        try:
            verdicts = await self._standing.ask([say.move for _, say in says], [actor for actor, _ in says])
            for index, (actor, say) in enumerate(says):
                self._note(say.move.transition, reason=say.move.reason, **named(_node_of(actor), say.copy))
                self._heard(say.copy.key, _node_of(actor), None if verdicts is None else verdicts[index])
        finally:
            for actor, say in says:
                self._asking.pop(say.copy.key, None)
                self._touch(_node_of(actor), say.copy.key)

    def _heard(self, key: str, node: str, verdict: Verdict | None) -> None:
        if isinstance(verdict, Accepted):
            self._awaited.add(key, node, verdict.revision)
            self._failures.pop(key, None)
            return
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause_ms = min(BACKOFF_MS_MAX, BACKOFF_MS << min(failures - 1, 10))
        self._not_before_ms[key] = self._world.clock.now_ms() + pause_ms // 2 + self._chance.uniform_ms(pause_ms // 2)

    # -- the keeper's hand -----------------------------------------------------------------------------------------------

    def _once(self, what: str, node: str, copy: Copy, now_ms: int, deed: Callable[[], Awaitable[None]]) -> None:
        """Ask for it, and not again while that is under way, or has just been."""
        asked_ms = self._under_way.get((what, copy))
        if asked_ms is not None and now_ms < asked_ms + AGAIN_MS:
            self._touch(node, copy.key, asked_ms + AGAIN_MS)
            return
        if len(self._under_way) > UNDER_WAY_MAX:
            late_ms = now_ms - 2 * AGAIN_MS
            self._under_way = {one: at_ms for one, at_ms in self._under_way.items() if at_ms > late_ms}
        self._under_way[what, copy] = now_ms
        if what == "start":
            self._lineup.begins(copy)
        self._spawn(self._try(what, node, copy, deed), f"{what} {copy.key}")

    async def _try(self, what: str, node: str, copy: Copy, deed: Callable[[], Awaitable[None]]) -> None:
        try:
            await deed()
            if what != "end":  # that one takes its grace; whoever looks meanwhile need not ask again
                self._under_way.pop((what, copy), None)
        except WorldError as error:
            self._under_way[what, copy] = self._world.clock.now_ms()
            if what == "start":
                self._lineup.over(copy)
                self.starts.add("failed")
            self._told(f"{what} {copy.key}: {error}", **named(node, copy))
        self._touch(node, copy.key)

    async def _pass_on(self, copy: Copy, after_ms: int) -> None:
        await self._world.clock.sleep_ms(after_ms)
        self._lineup.over(copy)
        self._wake.set()

    async def _start(self, site: Site, start: Start) -> None:
        known, asked = site.kept.get(start.copy), start.generation.spec.template.ports
        ports = known.ports if known is not None else await self._ports({port.name: port.port for port in asked})
        making = site.mind.making.get(start.copy)
        prepared = making.prepared if making is not None and making.prepared is not None else NOTHING
        order = order_for(site.place, start.copy, start.replica, start.generation, ports, prepared)
        fence, rooms = fence_ms(start.generation), (site.place.logs, site.place.directory(start.copy))
        kept = await self._keeping.begin(
            order, number=start.number, fence_ms=fence, grace_ms=self._tempo.kill_grace_ms, ports=ports, rooms=rooms
        )
        self._spawn(self._pass_on(start.copy, held_ms(order)), f"turn of {start.copy.key}")
        if kept is not None and kept.number == NEVER:
            raise DiskError(kept.failed, kept.cure)
        self._under_way.pop(("end", start.copy), None)
        self.starts.add("begun" if kept is not None else "late")
        self._note("work is begun", number=start.number, late=kept is None, **named(site.name, start.copy))
        if kept is not None:
            self._keep(kept)
        else:  # past its deadline, or its renewal is still on its way to the keeper
            await self._pause(self._tempo.beat_ms // 4)

    def _prepare(self, site: Site, deed: Prepare) -> Making:
        making = site.mind.making[deed.copy] = Making(deed.number)
        kept = site.kept.get(deed.copy)
        runs = kept is not None and kept.alive

        async def prepare() -> None:
            began_ms = self._world.clock.now_ms()
            await self._preparer.prepare(site.place, deed.copy, deed.replica, deed.generation, making, runs=runs)
            if deed.generation.spec.template.artifacts or deed.generation.spec.template.rootfs:
                self.fetches.add((self._world.clock.now_ms() - began_ms) / 1000)
            self._touch(site.name)

        making.task = self._task(prepare(), f"prepare {deed.copy.key}")
        return making

    def _prepared(self, site: Site, copy: Copy, replica: Replica, generation: GenerationSpec) -> Prepared | None:
        """What was prepared for one that runs. An agent that finds it running prepares it again, for what runs beside it."""
        if not needs_preparing(generation.spec.template):
            return NOTHING
        making = site.mind.making.get(copy)
        if making is None:
            making = self._prepare(site, Prepare(copy, replica, generation, site.kept[copy].number))
        return (making.prepared or NOTHING) if making.is_over else None

    def _abandon_what_nobody_wants(self, site: Site) -> None:
        mind = site.mind
        for copy in [copy for copy in mind.making if copy not in site.kept and not mind.wanted(self.orders, copy)]:
            task = mind.making.pop(copy).task
            self._spawn(self._abandon(site.place, copy, task), f"abandon {copy.key}")

    async def _abandon(self, place: Place, copy: Copy, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._preparer.abandon(place, copy)

    async def _ports(self, wanted: dict[str, int]) -> dict[str, int]:
        free = iter(await self._world.ports.free(sum(port == 0 for port in wanted.values())))
        return {name: port or next(free) for name, port in wanted.items()}

    async def _leave(self, site: Site, copy: Copy) -> None:
        await self._keeping.drop(copy)
        site.kept.pop(copy, None)
        making = site.mind.making.pop(copy, None)
        if making is not None and making.task is not None:
            making.task.cancel()
        self._preparer.forget(copy)
        for known in (self._not_before_ms, self._failures):
            known.pop(copy.key, None)
        self._under_way.pop(("end", copy), None)
        with suppress(DiskError):
            await self._together(lambda: self._world.disk.remove_tree(site.place.directory(copy)))

    # -- small things ----------------------------------------------------------------------------------------------------

    async def _pause(self, ms: int) -> None:
        await self._world.clock.sleep_ms(ms // 2 + self._chance.uniform_ms(max(1, ms // 2)))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        _ = self._task(work, name)

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        if self._group is None:
            raise RuntimeError("an agent that does not run does nothing")
        return self._group.create_task(work, name=name)


def _node_of(actor: Actor) -> str:
    return actor.lease.partition("/")[2]
