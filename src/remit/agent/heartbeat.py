"""Node leases, node registration, and heartbeats carrying the full node state and usage.

Processor time between two looks; how it is counted is the runner's affair.

It holds their leases, declares them, and beats; what they do is core.py's.

A beat is the whole state of every node at a fixed rate, so recovery costs no more than calm. It goes on whatever the keeper
does: a keeper that does not answer can begin and end nothing, but what runs there runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from msgspec.structs import replace

from remit.agent.assignments import WAITS, Assigned, Lineup
from remit.agent.attempts import Copy
from remit.agent.hosted_node import Continuity, Site
from remit.agent.keeper.protocol import Begun, Keeping, Use
from remit.client.authority_client import Client, NoAnswer
from remit.client.lease_holder import Tenure
from remit.law.timing import Tempo
from remit.model.claims import Accepted, Acquire, Actor, Apply, Evidence, Refused, Role, Verdict
from remit.model.kinds import Node
from remit.model.resources import Duration
from remit.model.wire.agent_messages import Beat, NodeState, RunState
from remit.world.interfaces import LinkError, World

LOOKS: Final = 3
"""In beats: so often it is measured."""


class Meter:
    def __init__(self) -> None:
        self._at_ms: int | None = None
        self._last: dict[tuple[str, int], tuple[int, int]] = {}
        self._milli: dict[tuple[str, int], int] = {}

    def due(self, now_ms: int, tempo: Tempo) -> bool:
        return self._at_ms is None or now_ms - self._at_ms >= LOOKS * tempo.beat_ms

    def take(self, now_ms: int, uses: Sequence[Use]) -> None:
        passed_ms = 0 if self._at_ms is None else now_ms - self._at_ms
        last, self._last, self._milli = self._last, {}, {}
        for use in uses:
            one = use.uid, use.attempt
            self._last[one] = use.cpu_ms, use.memory_bytes
            before = last.get(one)
            if before is not None and passed_ms > 0:
                self._milli[one] = max(0, use.cpu_ms - before[0]) * 1000 // passed_ms
        self._at_ms = now_ms

    def of(self, copy: Copy) -> tuple[int, int]:
        """Thousandths of a processor, and bytes of memory."""
        one = copy.uid, copy.attempt
        return self._milli.get(one, 0), self._last.get(one, (0, 0))[1]


SAID_MAX = 200


class Standing:
    """Of all `sites` of one agent, together. `touch` says that there is news of a node; `tell` is for people."""

    def __init__(
        self,
        world: World,
        client: Client,
        keeping: Keeping,
        orders: Assigned,
        sites: Mapping[str, Site],
        continuity: Continuity,
        lineup: Lineup,
        *,
        name: str,
        tempo: Tempo,
        touch: Callable[[str], None],
        tell: Callable[[str], None],
        failed: Callable[[NoAnswer], None] | None = None,
    ) -> None:
        self._world, self._client, self._keeping, self._orders = world, client, keeping, orders
        self._sites, self._continuity, self._name, self._tempo = sites, continuity, name, tempo
        self._lineup = lineup
        self._touch, self._tell, self._failed = touch, tell, failed
        self._meter = Meter()
        self._chance = world.chance.stream(f"standing {name}")
        self._sent_ms: dict[str, int] = {}
        self._answered = asyncio.Event()
        self._refusals: dict[str, str] = {}
        self.keeper_answers = True

    async def ask(self, claims: Sequence[Any], actors: Sequence[Actor]) -> list[Verdict] | None:
        """None: nobody answered."""
        evidence = Evidence(self._orders.revision, self._orders.age_ms())
        try:
            return await self._client.ask_many(claims, evidence=evidence, actors=actors)
        except NoAnswer as error:
            if self._failed is not None:
                self._failed(error)
            return None

    # -- leases ----------------------------------------------------------------------------------------------------------

    async def hold(self) -> None:
        """For ever: acquire whatever lease is not held; declare the node once it is."""
        while True:
            now_ms = self._world.clock.now_ms()
            without = [site for site in self._own() if not site.may_act(now_ms)]
            if without:
                await self._acquire(without)
            if self._orders.known:
                await self._declare([site for site in self._own() if site.tenure is not None])
            pause_ms = self._tempo.beat_ms // (2 if without else 1)
            await self._world.clock.sleep_ms(pause_ms // 2 + self._chance.uniform_ms(max(1, pause_ms // 2)))

    def _own(self) -> list[Site]:
        return [site for site in self._sites.values() if site.node is not None]

    async def _acquire(self, sites: Sequence[Site]) -> None:
        sent_ms = self._world.clock.now_ms()
        claims = [Acquire(site.lease, Duration(self._tempo.lease_ms)) for site in sites]
        verdicts = await self.ask(claims, [Actor(self._name, Role.AGENT)] * len(sites))
        taken: dict[str, int] = {}
        since: dict[str, int] = {}
        for site, verdict in zip(sites, verdicts or (), strict=False):
            self._refused(site.lease, verdict)
            if isinstance(verdict, Accepted):
                taken[site.name], since[site.name] = verdict.number, verdict.revision
        follows = await self._continuity.took_over(taken)
        for name, epoch in taken.items():
            site, now_ms = self._sites[name], self._world.clock.now_ms()
            site.mind.took_over(now_ms, follows=name in follows, revision=since[name])
            site.tenure = Tenure(Actor(self._name, Role.AGENT, site.lease, epoch), self._tempo.lease_ms, sent_ms)
        self._renewed(dict.fromkeys(taken, sent_ms))
        for name in taken:
            self._touch(name)

    async def _declare(self, sites: Sequence[Site]) -> None:
        """A node that is not there yet, or has changed its size. What people have set on it stays as they set it."""
        claims: list[Apply] = []
        actors: list[Actor] = []
        for site in sites:
            declared = None if site.node is None else _declaration(site.node, self._orders.node(site.name))
            if declared is not None and site.tenure is not None:
                claims.append(declared)
                actors.append(site.tenure.actor)
        for claim, verdict in zip(claims, await self.ask(claims, actors) or () if claims else (), strict=False):
            self._refused(f"node {claim.thing.metadata.name}", verdict)

    def _refused(self, what: str, verdict: Verdict) -> None:
        """Said once, and again when it is refused for another reason: somebody may have to do something about it."""
        code = f"{verdict.code}" if isinstance(verdict, Refused) else ""
        if isinstance(verdict, Refused) and code != self._refusals.get(what) and code not in _PASSING:
            self._tell(f"{what}: {verdict.detail}")
        self._refusals[what] = code

    # -- beats -----------------------------------------------------------------------------------------------------------

    async def beat(self) -> None:
        """For ever, at a fixed rate."""
        while True:
            began_ms = self._world.clock.now_ms()
            waiting = self._lineup.waiting()
            beats = [beat for site in self._own() if (beat := self._state(site, waiting.get(site.name, ()))) is not None]
            if beats:
                await self._say_how_it_is(beats)
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
            site = self._sites[beat.state.node]
            if site.tenure is None or site.tenure.actor != beat.actor:
                continue
            if mine:
                could_act = site.may_act(self._world.clock.now_ms())
                site.tenure.renewed(sent_ms)
                renewed[site.name] = sent_ms
                if not could_act:  # what was seen meanwhile, and could not be said, is looked at again
                    self._touch(site.name)
            else:
                site.tenure.end()
        self._renewed(renewed)

    def _state(self, site: Site, waiting: Sequence[Copy]) -> Beat | None:
        if site.tenure is None:
            return None
        alive = [kept for kept in site.kept.values() if kept.alive]
        incarnation = self._orders.incarnation
        if site.settled != incarnation and all(site.mind.ordered(self._orders, kept.copy) for kept in alive):
            site.settled = incarnation
        runs = tuple(self._run(site, kept) for kept in alive)
        if site.mind.making:
            runs += tuple(
                RunState(*copy, said=one.said[:SAID_MAX])
                for copy, one in site.mind.making.items()
                if not one.is_over and not ((kept := site.kept.get(copy)) is not None and kept.alive)
            )
        runs += tuple(RunState(*copy, said=WAITS) for copy in waiting if site.mind.wanted(self._orders, copy))
        cpu, memory = sum(run.cpu_milli for run in runs), sum(run.memory_bytes for run in runs)
        settled = incarnation if site.settled == incarnation else ""
        return Beat(site.tenure.actor, NodeState(site.name, settled, cpu, memory, runs))

    def _run(self, site: Site, kept: Begun) -> RunState:
        cpu_milli, memory = self._meter.of(kept.copy)
        course = site.mind.courses.get(kept.copy)
        said = course.health.said[:SAID_MAX] if course is not None and course.health is not None else ""
        return RunState(kept.key, kept.uid, kept.attempt, kept.pid, kept.number, cpu_milli, memory, said)

    async def measure(self) -> None:
        """For ever, what work uses. In its own time, so that a keeper that is stopped holds up no beat."""
        while True:
            await self._measure(self._world.clock.now_ms())
            await self._world.clock.sleep_ms(self._tempo.beat_ms)

    async def _measure(self, now_ms: int) -> None:
        if self.keeper_answers and self._meter.due(now_ms, self._tempo) and any(site.kept for site in self._sites.values()):
            with suppress(LinkError):
                self._meter.take(now_ms, await self._keeping.uses(within_ms=self._tempo.beat_ms))

    # -- renewals, to the keeper -----------------------------------------------------------------------------------------

    def _renewed(self, sent_ms: Mapping[str, int]) -> None:
        for name, at_ms in sent_ms.items():
            self._sites[name].mind.renewed(at_ms)
        if sent_ms:
            self._sent_ms |= sent_ms
            self._answered.set()

    async def pass_on(self) -> None:
        """For ever: tell the keeper what was answered. In its own time, so that a keeper that is stopped holds up no beat."""
        while True:
            await self._answered.wait()
            self._answered.clear()
            sent_ms, self._sent_ms = self._sent_ms, {}
            try:
                await self._keeping.renewed(sent_ms, within_ms=2 * self._tempo.beat_ms)
                answers = True
            except LinkError:
                self._sent_ms = {**sent_ms, **self._sent_ms}
                answers = False
            if answers != self.keeper_answers:
                self.keeper_answers = answers
                self._tell(
                    "the keeper answers again" if answers else "the keeper does not answer: nothing can be begun or ended"
                )
                for name in self._sites:
                    self._touch(name)


_PASSING = frozenset({"revision", "exists", "stale_epoch", "lease_expired"})
"""Refusals that the next look cures by itself."""


def _declaration(node: Node, found: tuple[Node, int] | None) -> Apply | None:
    if found is None:
        return Apply(node, expect=0)
    there, revision = found
    own, spec = node.spec, there.spec
    wanted = replace(spec, capacity=own.capacity, devices=own.devices, address=own.address, port=own.port)
    if wanted == spec or there.metadata.deleting:
        return None
    return Apply(replace(there, spec=wanted), expect=revision)
