"""Base of all simulated roles: view, client, lease; records what it observes.

Told to whoever checks that observers never go back; views and boards are the real ones.

A seat: a view of one scope and a way of asking there; and a player, who holds a role.

A player is level-triggered: it is told which keys changed, looks at what stands, and says what it wants as claims. Those travel
together. It acts only while its tenure lasts, and whatever went unanswered shows again in the view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from remit.client.authority_client import Client, NoAnswer
from remit.client.endpoint import Endpoint, Status
from remit.client.lease_holder import Tenure, acquire
from remit.client.retry import RetryShape
from remit.client.rpc import Remote
from remit.model.claims import Accepted, Actor, AnyClaim, Code, Evidence, Operation, Refused, Role, Vacate, Verdict
from remit.model.resources import Duration
from remit.model.wire.agent_messages import Beat, Heard, NodeState
from remit.observation.cluster_objects import KINDS
from remit.observation.column_table import NONE
from remit.observation.reflector import Follower
from remit.observation.scheduler_view import View
from remit.observation.watch_cache import Board
from remit.simulate.world.processes import Process
from remit.simulate.world.store import StoreService
from remit.store.protocol import Head, Store
from remit.world.interfaces import Clock, World

if TYPE_CHECKING:
    from remit.simulate.actors.agents import Farm

SEEN: Final = ("replica/", *(f"{kind}/" for kind in KINDS))


class Watched(View):
    def __init__(self, clock: Clock, observed: Callable[[str, int], None]) -> None:
        super().__init__(clock)
        self._observed = observed

    def reached(self, head: Head, revision: int) -> None:
        super().reached(head, revision)
        self._observed(head.incarnation, revision)

    def revisions(self) -> dict[str, int]:
        """The revision of each row that it keeps, by key."""
        kept, shapes = self.replicas, self.shapes
        found = {key: kept.at.revision[slot] for key, slot in kept.slots.items()}
        found |= self.things.revisions
        for path, owner in shapes.workloads.ids.items():
            if shapes.workloads.at.state[owner] != NONE:
                found[f"workload/{path}"] = shapes.workloads.at.revision[owner]
        for generation in shapes.ids.values():
            seen = shapes.seen(generation)
            found[f"generation/{seen.tenant}/{seen.workload}/{seen.number:08d}"] = shapes.at.revision[generation]
        return found


Concern = Callable[[str, Any, Any], bool]
"""Does this change of a key, from what it was to what it is, concern one?"""


class WatchedBoard(Board):
    """With its own follower, for whoever plays a part."""

    def __init__(
        self, store: Store, sure: Store, world: World, observed: Callable[[str, int], None], *, idle_ms: int = 10_000
    ) -> None:
        super().__init__(world.clock)
        self._observed = observed
        self._follower = Follower(store, sure, world, self, idle_ms=idle_ms)

    async def follow(self) -> None:
        await self._follower.follow()

    def reached(self, head: Head, revision: int) -> None:
        self._observed(head.incarnation, revision)
        super().reached(head, revision)


class Changes:
    """What changed since its owner last looked, of all that concerns it; or on one node, whatever it is."""

    def __init__(self, board: Board, concerns: Concern, node: str = "") -> None:
        self.keys: dict[str, None] = dict.fromkeys(board.rows)
        self._board, self._concerns, self._all = board, concerns, bool(node)
        self._event = asyncio.Event()
        self._told = False
        board.subscribe(self, node)

    def changed(self, key: str, old: Any, new: Any) -> None:
        if self._all or self._concerns(key, old, new):
            self.keys[key] = None
            self._told = True

    def remind(self) -> None:
        """At the next word from the scope."""
        self._told = True
        self._board.remind(self)

    def reached(self) -> None:
        if self._told:
            self._told = False
            self.wake()

    def wake(self) -> None:
        if self.keys:
            self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def take(self) -> list[str]:
        self._event.clear()
        keys, self.keys = self.keys, {}
        return list(keys)


HANDS_OVER: Final = 250
"""After about so many turns a player lets go of its role."""


class Ear(Protocol):
    """Who hears what clients were told. Nothing is told back."""

    def asked(self, asker: str, scope: str, operation: str) -> None: ...

    def answered(self, asker: str, scope: str, operation: Operation, verdict: Verdict) -> None: ...

    def gave_up(self, asker: str, scope: str, operation: str) -> None: ...

    def renewed(self, asker: str, scope: str, lease: str, epoch: int, sent_s: float) -> None: ...

    def observed(self, observer: str, scope: str, incarnation: str, revision: int) -> None: ...


class Pace:
    """How fast everything goes. DESIGN's figures are for a beat of 2 s; a slower world is slower in proportion."""

    def __init__(self, beat_ms: int = 2_000) -> None:
        self.beat_ms = beat_ms
        self.suspect_ms = 3 * beat_ms
        self.unknown_ms = 15 * beat_ms // 2
        self.lease_ms = 12 * beat_ms
        self.server_beat_ms = beat_ms
        self.server_term_ms = 3 * beat_ms
        self.sweep_ms = 10 * beat_ms
        self.shape = RetryShape(
            deadline_ms=max(10_000, 2 * beat_ms), base_ms=max(50, beat_ms // 20), cap_ms=max(2_000, beat_ms // 2)
        )
        self.quiet = False
        """Once it is set nobody asks for anything new: what is promised about progress is judged from then on."""


class Overheard:
    """An endpoint whose answers are written down the moment they arrive."""

    def __init__(self, endpoint: Endpoint, process: Process, scope: str, ear: Ear) -> None:
        self._endpoint, self._asker, self._scope, self._ear = endpoint, process.name, scope, ear
        self._loop = process.loop

    async def ask(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        for operation in operations:
            self._ear.asked(self._asker, self._scope, operation.id)
        verdicts = await self._endpoint.ask(operations)
        for operation, verdict in zip(operations, verdicts, strict=False):
            self._ear.answered(self._asker, self._scope, operation, verdict)
        return verdicts

    async def status(self) -> Status:
        return await self._endpoint.status()

    async def renew(self, actor: Actor, /) -> bool:
        sent_s = self._loop.time()
        held = await self._endpoint.renew(actor)
        if held:
            self._ear.renewed(self._asker, self._scope, actor.lease, actor.epoch, sent_s)
        return held

    async def beat(self, beats: Sequence[Beat], /) -> Sequence[bool]:
        sent_s = self._loop.time()
        held = await self._endpoint.beat(beats)
        for beat, mine in zip(beats, held, strict=False):
            if mine:
                self._ear.renewed(self._asker, self._scope, beat.actor.lease, beat.actor.epoch, sent_s)
        return held

    async def heard(self) -> Heard:
        return await self._endpoint.heard()

    async def states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return await self._endpoint.states(nodes)


class Asker(Client):
    """A client whose answers are written down once more as its caller gets them: they must be the ones that arrived."""

    def __init__(self, seat: Seat, endpoints: Mapping[str, Endpoint], actor: Actor) -> None:
        super().__init__(endpoints, actor, seat.world, shape=seat.pace.shape)
        self._seat = seat

    async def _send(self, course: Any) -> list[Verdict]:
        verdicts = await super()._send(course)
        for operation, verdict in zip(course.operations, verdicts, strict=True):
            self._seat.ear.answered(self._seat.process.name, self._seat.scope, operation, verdict)
        return verdicts


class Seat:
    """One process in one scope."""

    def __init__(self, process: Process, store: StoreService, servers: Sequence[str], ear: Ear, pace: Pace) -> None:
        self.process = process
        self.world: World = process.world
        self.scope = store.scope
        self.servers = tuple(servers)
        self.ear = ear
        self.pace = pace
        self.farm: Farm | None = None
        """Instead of `view`: what a real agent keeps."""
        self.watched: Watched | None = None
        """Instead of `view`: what a real scheduler keeps."""
        self.view = WatchedBoard(
            process.port(store, observer=True),
            process.port(store),
            process.world,
            self.observed,
            idle_ms=5 * pace.beat_ms,
        )

    def observed(self, incarnation: str, revision: int) -> None:
        self.ear.observed(self.process.name, self.scope, incarnation, revision)

    def give_up(self, error: NoAnswer) -> None:
        for operation in error.operation_ids:
            self.ear.gave_up(self.process.name, self.scope, operation)

    def client(self, actor: Actor) -> Client:
        chance = self.world.chance
        names = chance.shuffled(self.servers)
        endpoints = {name: Overheard(Remote(self.world.link, name), self.process, self.scope, self.ear) for name in names}
        return Asker(self, endpoints, actor)


class Player:
    """One role in one scope."""

    role: ClassVar[Role]

    def __init__(self, seat: Seat, *, lease: str = "", node: str = "") -> None:
        self.seat = seat
        self.world = seat.world
        self.view = seat.view
        self.chance = seat.world.chance.stream(f"{self.role}-{lease}")
        self.lease = lease or self.role.value
        self.changes = Changes(seat.view, self.concerns, node)
        self.actor = Actor(seat.process.name, self.role)
        self.client = seat.client(self.actor)
        self.tenure: Tenure | None = None

    def wants(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        """What should be asked now, these keys having changed. A sweep names every key."""
        raise NotImplementedError

    def concerns(self, key: str, old: Any, new: Any) -> bool:
        """Is this change news to this role? A sweep looks at everything all the same."""
        return True

    def heard(self, claim: AnyClaim, verdict: Verdict) -> None:
        """What came of it."""

    # -- holding the role ------------------------------------------------------------------------------------------------

    async def play(self) -> None:
        """For ever: become the holder, act while that lasts, and begin anew."""
        while True:
            tenure = await self._acquire()
            if tenure is None:
                await self.world.clock.sleep_ms(self.seat.pace.beat_ms + self.chance.uniform_ms(self.seat.pace.beat_ms))
                continue
            self.tenure = tenure
            self.client.actor = self.actor = tenure.actor
            await self.began()
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renew(tenure), name="renew")
                await self._act(tenure)
                renewing.cancel()
            self.tenure = None

    async def began(self) -> None:
        """The role is held anew."""
        self.look_at_all()

    def look_at_all(self) -> None:
        """As if everything had changed: what a level-triggered player does now and then, whatever it was told."""
        self.changes.keys.update(dict.fromkeys(self.view.rows))
        self.changes.wake()

    async def _acquire(self) -> Tenure | None:
        self.client.actor = Actor(self.seat.process.name, self.role)
        try:
            found = await acquire(self.client, self.world.clock, self.lease, Duration(self.seat.pace.lease_ms))
        except NoAnswer as error:
            self.seat.give_up(error)
            return None
        return found if isinstance(found, Tenure) else None

    async def _renew(self, tenure: Tenure) -> None:
        pause_ms = self.seat.pace.lease_ms // 3
        while not tenure.lost:
            await self.world.clock.sleep_ms(pause_ms - self.chance.uniform_ms(pause_ms // 8))
            try:
                await tenure.renew(self.client, deadline_ms=pause_ms)
            except NoAnswer:
                continue
            self.renewed(tenure)

    def renewed(self, tenure: Tenure) -> None:
        """A renewal was answered."""

    async def _act(self, tenure: Tenure) -> None:
        clock, pace = self.world.clock, self.seat.pace
        sweep_ms = clock.now_ms() + self.chance.uniform_ms(pace.sweep_ms)
        while tenure.may_act(now_ms := clock.now_ms()):
            if now_ms >= sweep_ms:
                sweep_ms = now_ms + pace.sweep_ms + self.chance.uniform_ms(pace.sweep_ms // 4)
                self.look_at_all()
            try:
                async with clock.timeout_ms(max(1, min(sweep_ms, tenure.held_until_ms) - now_ms)):
                    await self.changes.wait()
            except TimeoutError:
                continue
            await clock.sleep_ms(1 + self.chance.uniform_ms(20))
            await self.turn(tenure)
            if self.role is not Role.AGENT and self.chance.below(HANDS_OVER) == 0:
                await self._hand_over(tenure)

    async def _hand_over(self, tenure: Tenure) -> None:
        """Let go of the role, so that another may have it. If that is not answered, the term just runs out."""
        tenure.end()
        await self.say([Vacate(self.lease)])
        await self.world.clock.sleep_ms(self.seat.pace.beat_ms // 8)

    async def turn(self, tenure: Tenure) -> None:
        """Look once, and ask once."""
        keys = self.changes.take()
        claims = list(self.wants(keys))
        if claims and tenure.may_act(self.world.clock.now_ms()):
            await self.say(claims)

    async def say(self, claims: Sequence[AnyClaim], **more: Any) -> list[Verdict] | None:
        """Ask; None if there was no answer. What may have happened then shows in the view."""
        evidence = Evidence(self.view.revision, self.view.age_ms())
        try:
            verdicts = await self.client.ask_many(claims, evidence=evidence, **more)
        except NoAnswer as error:
            self.seat.give_up(error)
            return None
        self.learn(claims, verdicts)
        return verdicts

    def learn(self, claims: Sequence[AnyClaim], verdicts: Sequence[Verdict]) -> None:
        for claim, verdict in zip(claims, verdicts, strict=True):
            self.heard(claim, verdict)
        if any(isinstance(verdict, Refused) and verdict.code is Code.STALE_EVIDENCE for verdict in verdicts):
            # The scope has been quiet for longer than a claim may be old: once more, as soon as it is heard of.
            self.changes.keys.update(dict.fromkeys(self.view.rows))
            self.changes.remind()


def accepted(verdict: Verdict) -> bool:
    return isinstance(verdict, Accepted)
