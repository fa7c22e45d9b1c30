"""How does an agent carry on? Follows its orders and its keeper, beats, and performs what its nodes' minds answer (core.py).

One process may host many nodes: each has its own lease and its own mind; claims, beats and orders of all travel together.
Losing the servers changes nothing that runs: looking goes on by what was last known, and only claims wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from remit.agent.checking import Patient, ask_what_is_due
from remit.agent.continuity import Continuity
from remit.agent.copies import Copy
from remit.agent.core import Act, End, Leave, Say, Start
from remit.agent.hosting import Awaited, Hosted, Site
from remit.agent.keeping import NEVER, Begun, Keeping, Table
from remit.agent.orders import Assigned
from remit.agent.standing import Standing
from remit.agent.work import Place, fence_ms, order_for
from remit.client.client import Client, NoAnswer
from remit.law.tempo import Tempo
from remit.model.claims import Accepted, Actor, Verdict
from remit.model.orders import Orders
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

UNDER_WAY_MAX: Final = 10_000
"""Of so many things asked of the keeper those are forgotten that were asked long ago."""

Feed = Callable[[Sequence[str]], AsyncGenerator[Orders, None]]
"""The orders of these nodes, from whichever server tells them; it ends when that one is gone."""


def _unsaid(_: str) -> None:
    return


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
        epochs: Path | None = None,
        revive: Callable[[], Awaitable[None]] | None = None,
        failed: Callable[[NoAnswer], None] | None = None,
        tell: Callable[[str], None] = _unsaid,
    ) -> None:
        self._world, self._client, self._feed, self._keeping = world, client, feed, keeping
        self._tempo, self._revive, self._told = tempo, revive, tell
        self._sites = {one.node.metadata.name: Site(one.place, tempo, one.node) for one in hosted}
        self._like = hosted[0].place
        self.orders = Assigned(world.clock)
        self._standing = Standing(
            world, client, keeping, self.orders, self._sites, Continuity(world, epochs),
            name=name, tempo=tempo, touch=self._touch, tell=tell, failed=failed,
        )  # fmt: skip
        self._wake = asyncio.Event()
        self._tabled = asyncio.Event()
        self._asking: dict[str, None] = {}
        self._awaited = Awaited()
        self._due_ms: dict[str, int] = {}
        """When each node is looked at next."""
        self._not_before_ms: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._under_way: dict[tuple[str, Copy], int] = {}
        """What was asked of the keeper: when."""
        self._chance = world.chance.stream(f"agent {name}")
        self._group: asyncio.TaskGroup | None = None

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

    def running(self) -> int:
        """How many copies run here, as far as is known."""
        return sum(kept.alive for site in self._sites.values() for kept in site.kept.values())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._follow_keeper(), name="keeper")
            await self._until_tabled()
            await self._clear_rooms()
            group.create_task(self._follow_orders(), name="orders")
            group.create_task(self._standing.hold(), name="leases")
            group.create_task(self._standing.beat(), name="beats")
            group.create_task(self._standing.pass_on(), name="renewals")
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
            self._touch(node)
        for node in (*orders.nodes, *orders.nodes_gone) if not orders.whole else tuple(self._sites):
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
            for site in self._sites.values():
                site.kept.clear()
                self._touch(site.name)
        for kept in table.kept:
            self._keep(kept)
        for gone in table.gone:
            for site in self._sites.values():
                if site.kept.pop(Copy(*gone), None) is not None:
                    self._touch(site.name)
        self._tabled.set()

    def _keep(self, kept: Begun) -> None:
        site = self._sites.get(kept.node)
        if site is None:  # it was hosted here once, under that name: nobody orders anything there, so what is left of it ends
            place = self._like._replace(node=kept.node, logs=self._like.logs.parent / kept.node)
            site = self._sites[kept.node] = Site(place, self._tempo, None)
            self._told(f"{kept.node} is not hosted here any more: what is left of it is ended")
        known = site.kept.get(kept.copy)
        if known is None or kept.stage >= known.stage:
            site.kept[kept.copy] = kept
            self._touch(site.name)

    async def _clear_rooms(self) -> None:
        """Directories of work that the keeper does not know any more: whoever should have removed them was killed before."""
        known = {copy.file_name for site in self._sites.values() for copy in site.kept}
        for work in dict.fromkeys(site.place.work for site in self._sites.values()):
            with suppress(DiskError):
                for name in await self._world.offload(partial(self._world.disk.list, work)):
                    if name not in known:
                        await self._world.offload(partial(self._world.disk.remove_tree, work / name))

    # -- acting ----------------------------------------------------------------------------------------------------------

    async def _act(self) -> None:
        """Look at whoever has news, or whose time has come; and at everybody now and then, whatever was told."""
        clock = self._world.clock
        while True:
            self._wake.clear()
            now_ms = clock.now_ms()
            says: list[tuple[Actor, Say]] = []
            for name in [name for name, due_ms in self._due_ms.items() if due_ms <= now_ms]:
                self._look(self._sites[name], now_ms, says)
            for first in range(0, len(says), CLAIMS_MAX):
                self._spawn(self._say(says[first : first + CLAIMS_MAX]), "say")
            until_ms = min(self._due_ms.values(), default=now_ms + self._tempo.beat_ms)
            with suppress(TimeoutError):
                async with clock.timeout_ms(max(1, until_ms - now_ms)):
                    await self._wake.wait()

    def _look(self, site: Site, now_ms: int, says: list[tuple[Actor, Say]]) -> None:
        sweep_ms = SWEEP_BEATS * self._tempo.beat_ms
        self._due_ms[site.name] = now_ms + sweep_ms - self._chance.uniform_ms(sweep_ms // 4)
        for deed in site.mind.look(now_ms, self.orders, site.kept, may_act=site.may_act(now_ms)):
            self._perform(site, deed, now_ms, says)
        if site.mind.wake_ms is not None:
            self._touch(site.name, site.mind.wake_ms)
        self._probe(site)

    def _touch(self, name: str, at_ms: int | None = None) -> None:
        """There is news of this node, or will be then."""
        if name in self._sites:
            self._due_ms[name] = min(self._world.clock.now_ms() if at_ms is None else at_ms, self._due_ms.get(name, 1 << 62))
            self._wake.set()

    def _probe(self, site: Site) -> None:
        """Ask what runs how it is."""
        for copy, kept in site.kept.items():
            order = self.orders.get(copy.key)
            if not kept.alive or not kept.pid or order is None or not site.mind.ordered(self.orders, copy):
                continue
            generation = self.orders.spec_of(order.replica)
            if generation is not None:
                patient = Patient(site.place, kept, order.replica, generation, site.mind.course(copy))
                due_ms = ask_what_is_due(self._world, patient, self._spawn, lambda: self._touch(site.name))
                if due_ms is not None:
                    self._touch(site.name, due_ms)

    def _perform(self, site: Site, deed: Act, now_ms: int, says: list[tuple[Actor, Say]]) -> None:
        match deed:
            case Say(_, move) if move.transition == "start" and not self._standing.keeper_answers:
                pass  # whoever could not begin it does not say so: after a while it is placed elsewhere
            case Say(copy, _):
                if site.tenure is not None and self._may_say(site, copy.key, now_ms) and self._is_sure(site, deed, now_ms):
                    self._asking[copy.key] = None
                    says.append((site.tenure.actor, deed))
            case Start(copy):
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
            self._touch(site.name, at_ms)
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

    # -- the keeper's hand -----------------------------------------------------------------------------------------------

    def _once(self, what: str, node: str, copy: Copy, now_ms: int, deed: Callable[[], Awaitable[None]]) -> None:
        """Ask for it, and not again while that is under way, or has just been."""
        asked_ms = self._under_way.get((what, copy))
        if asked_ms is not None and now_ms < asked_ms + AGAIN_MS:
            self._touch(node, asked_ms + AGAIN_MS)
            return
        if len(self._under_way) > UNDER_WAY_MAX:
            late_ms = now_ms - 2 * AGAIN_MS
            self._under_way = {one: at_ms for one, at_ms in self._under_way.items() if at_ms > late_ms}
        self._under_way[what, copy] = now_ms
        self._spawn(self._try(what, node, copy, deed), f"{what} {copy.key}")

    async def _try(self, what: str, node: str, copy: Copy, deed: Callable[[], Awaitable[None]]) -> None:
        try:
            await deed()
            if what != "end":  # that one takes its grace; whoever looks meanwhile need not ask again
                self._under_way.pop((what, copy), None)
        except WorldError as error:
            self._under_way[what, copy] = self._world.clock.now_ms()
            self._told(f"{what} {copy.key}: {error}")
        self._touch(node)

    async def _start(self, site: Site, start: Start) -> None:
        template = start.generation.spec.template
        known = site.kept.get(start.copy)
        wanted = {port.name: port.port for port in template.ports}
        ports = known.ports if known is not None else await self._ports(wanted)
        order = order_for(site.place, start.copy, start.replica, start.generation, ports)
        await self._world.offload(lambda: self._make_room(site.place, start.copy))
        fence = fence_ms(start.generation)
        kept = await self._keeping.begin(
            order, number=start.number, fence_ms=fence, grace_ms=self._tempo.kill_grace_ms, ports=ports
        )
        if kept is not None and kept.number == NEVER:
            raise DiskError(kept.failed, kept.cure)
        self._under_way.pop(("end", start.copy), None)
        if kept is not None:
            self._keep(kept)
        else:  # past its deadline, or its renewal is still on its way to the keeper
            await self._pause(self._tempo.beat_ms // 4)

    async def _ports(self, wanted: dict[str, int]) -> dict[str, int]:
        free = iter(await self._world.ports.free(sum(port == 0 for port in wanted.values())))
        return {name: port or next(free) for name, port in wanted.items()}

    def _make_room(self, place: Place, copy: Copy) -> None:
        self._world.disk.make_directory(place.logs, durably=False)
        self._world.disk.make_directory(place.directory(copy), durably=False)

    async def _leave(self, site: Site, copy: Copy) -> None:
        await self._keeping.drop(copy)
        site.kept.pop(copy, None)
        for known in (self._not_before_ms, self._failures):
            known.pop(copy.key, None)
        self._under_way.pop(("end", copy), None)
        with suppress(DiskError):
            await self._world.offload(lambda: self._world.disk.remove_tree(site.place.directory(copy)))

    # -- small things ----------------------------------------------------------------------------------------------------

    async def _pause(self, ms: int) -> None:
        await self._world.clock.sleep_ms(ms // 2 + self._chance.uniform_ms(max(1, ms // 2)))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._group is None:
            raise RuntimeError("an agent that does not run does nothing")
        self._group.create_task(work, name=name)


def _node_of(actor: Actor) -> str:
    return actor.lease.partition("/")[2]
