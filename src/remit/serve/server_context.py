"""Everything a request handler needs from one server.

Everything that one server is made of, in one value; nothing is decided here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from remit.client.authority_client import Client
from remit.client.endpoint import NoVerdict, Turned
from remit.client.retry import RetryShape
from remit.commitment.dry_run import Tried, tried
from remit.commitment.standby import Standby
from remit.law.timing import Tempo
from remit.model.claims import Actor, AnyClaim, Operation, OperationID, Verdict, operation_id
from remit.model.identity import Principal
from remit.model.objects import AnyObject
from remit.model.wire.api_types import AuditItem
from remit.observation.watch_cache import Board
from remit.proposal.placement.builtin_plugins import DEFAULT
from remit.proposal.placement.plugins import Filter, Score
from remit.serve.auth.access_control import Identities
from remit.serve.components.component_rpc import Door
from remit.serve.components.replica_logs import Agents
from remit.serve.diagnostics.audit_log import Audit, MemoryTrail, Trail
from remit.serve.diagnostics.view_snapshots import Looking
from remit.serve.http.connection_limits import Listeners
from remit.serve.http.request_telemetry import Access, Requests, decisions_told
from remit.serve.http.streams import Pulse
from remit.serve.metrics.collectors import of_log, of_server
from remit.serve.metrics.exposition import Metrics
from remit.serve.metrics.lifecycle_metrics import Passages
from remit.serve.objects.endpoints import Endpoints
from remit.serve.objects.watch_hub import Hub
from remit.store.protocol import Store
from remit.world.interfaces import Clock, Offload, World
from remit.world.structured_log import Chronicle

if TYPE_CHECKING:
    from remit.world.net.server_keys import TlsKeys

WATCHERS_MAX: Final = 1_000
ASK_MS: Final = 8_000
AGAIN_MS: Final = 2_000
"""How long the authority may keep an asker waiting in all, so that every call is answered within ten seconds (L14): also while
its disk is full, and nothing can be written. The last of it is for asking again, where the first who was asked said nothing.
"""


class Desk:
    """`standby` is asked what only the authority knows; `store` has every row as of now; `board` has them in memory, a moment
    old, and `hub` shares out what changes there. `judging` runs what takes long and needs nothing but the processor. `closing`
    is set when the server ends.

    `looking` makes still views of the board in a thread of its own (`judging`, if it has none), with the filters and scores of
    this scope's schedulers; `endpoints` are what serves; `agents` are asked for what work has written. `identities` knows who
    asks, and `audit` keeps who did what. `keyring` has the keys that secrets are sealed with. `requests` and `passages` are
    what is counted here; `metrics` tells it, with what other parts of this process have to tell. `tls` has
    what it shows others, and signs for agents with; None: it speaks plain HTTP, on its own machine alone.
    """

    def __init__(
        self,
        standby: Standby,
        store: Store,
        board: Board,
        door: Door,
        world: World,
        *,
        judging: Offload,
        looking: Offload | None = None,
        filters: Sequence[Filter] = (),
        scores: Sequence[Score] = DEFAULT,
        tempo: Tempo = Tempo(),
        trail: Trail | None = None,
        watchers_max: int = WATCHERS_MAX,
        tls: TlsKeys | None = None,
        log: Chronicle | None = None,
    ) -> None:
        self.standby = standby
        self.store = store
        self.board = board
        self.hub = Hub(board)
        self.looking = Looking(board, store, world.clock, looking or judging, filters=filters, scores=scores)
        self.endpoints = Endpoints(board, world.clock)
        self.agents = Agents(board, world.clock, door.callbacks, tls)
        self.identities = Identities(board, world.clock)
        self.audit = Audit(trail or MemoryTrail(), world.clock)
        self.door = door
        self.world = world
        self.keyring = door.keyring
        self.turning = asyncio.Lock()
        """Held by whoever rotates the keys."""
        self.joining = asyncio.Lock()
        """Held by whoever joins."""
        self.judging = judging
        self.tempo = tempo
        self.tls = tls
        self.closing = asyncio.Event()
        self.began_ms = world.clock.now_ms()
        self.people, self.components = Listeners(watchers_max), Listeners(watchers_max)
        """Who is told something without end."""
        self.pulse = Pulse(world.clock, tempo.beat_ms)
        self.requests, self.passages = Requests(), Passages(board, world.clock)
        self.metrics = Metrics(of_server(self))
        self.log, self.access = log, None if log is None else Access(log)
        if log is not None:
            self.metrics.add(of_log(log))
            standby.tally.tell = decisions_told(log)
        self._clients: dict[Actor, Client] = {}
        self._pickings: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def hosts(self) -> frozenset[str]:
        """Names and addresses of this server, beyond the loopback's."""
        return frozenset() if self.tls is None else self.tls.hosts

    @property
    def scope(self) -> str:
        return self.standby.scope

    @property
    def name(self) -> str:
        """Of this server, among those of its scope."""
        return self.standby.name

    @property
    def clock(self) -> Clock:
        return self.world.clock

    def client(self, actor: Actor) -> Client:
        """Asks the authority in somebody's name, again and again until it answers."""
        found = self._clients.get(actor)
        if found is None:
            shape = RetryShape(deadline_ms=ASK_MS)
            found = self._clients[actor] = Client({self.name: self.standby}, actor, self.world, shape=shape)
        return found

    def turned_away(self, address: str, status: int, code: str, why: str) -> None:
        """A connection was closed before anybody had heard a request. Nobody knows who it was, only whence."""
        self.audit.refused(
            AuditItem(time=self.clock.wall(), address=address, action="connect", status=status, code=code, detail=why)
        )

    async def issue(self, actor: Actor) -> OperationID:
        """An id for one intent. Who leads here knows without asking which window is recorded."""
        leading = self.standby.leading
        if leading is None:
            return await self.client(actor).issue()
        return operation_id(leading.head.incarnation, leading.outcomes.window, self.world.ids.nonce())

    async def ask(self, operations: Sequence[Operation]) -> Sequence[Verdict]:
        """The verdicts on operations of one actor. Who leads here is asked at once; whatever keeps it from answering, the same
        ids are asked again as a client does. Raises `NoAnswer`.
        """
        leading, until_ms = self.standby.leading, self.clock.now_ms() + ASK_MS
        if leading is not None:
            with suppress(NoVerdict, TimeoutError):
                async with self.clock.timeout_ms(ASK_MS - AGAIN_MS):
                    return await leading.ask(operations)
        return await self.client(operations[0].actor).resume(operations, deadline_ms=until_ms - self.clock.now_ms())

    def declared(self, name: str) -> tuple[AnyObject, int] | None:
        """What stands under a key, and since which revision, as who leads here has it; None if nobody leads here, or it has
        none. It is never ahead of what is committed, and shows whatever was answered before.
        """
        leading = self.standby.leading
        return None if leading is None else leading.books.things.get(name)

    def tried(self, actor: Actor, claims: Sequence[AnyClaim]) -> list[Tried]:
        """What the authority would answer; nothing is written. Only who leads can tell."""
        if self.standby.leading is None:
            raise Turned(why="nobody leads here just now, and only who leads can try a change")
        return tried(self.standby.leading, actor, claims)

    @property
    def watchers(self) -> int:
        return self.people.count + self.components.count

    def picking(self, flow: str) -> asyncio.Lock:
        """Held while a selector of one of this flow's watches is asked about much; it lives as long as whoever has it."""
        found = self._pickings.get(flow)
        if found is None:
            found = self._pickings[flow] = asyncio.Lock()
        return found

    def watching(self, asker: Principal) -> AbstractContextManager[None]:
        """One watcher more, for as long as this lasts. Raises `Failure`, once it is entered, if there are too many."""
        if asker.audience != "user":
            return self.components.one(f"the token {asker.token}")
        return self.people.one(f"tenant {asker.tenant}" if asker.tenant else asker.subject)
