"""What does a handler have at hand? Everything that one server is made of, in one value; nothing is decided here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from remit.client.client import Client
from remit.client.endpoint import Turned
from remit.client.retry import RetryShape
from remit.commitment.standby import Standby
from remit.commitment.trying import Tried, tried
from remit.law.tempo import Tempo
from remit.model.claims import Actor, AnyClaim
from remit.observation.board import Board
from remit.proposal.plugins import Filter, Score
from remit.proposal.scores import DEFAULT
from remit.serve.door import Door
from remit.serve.endpoints import Endpoints
from remit.serve.failures import Failure
from remit.serve.hub import Hub
from remit.serve.logs import Agents
from remit.serve.looking import Looking
from remit.store.protocol import Store
from remit.world.promises import Clock, Offload, World

WATCHERS_MAX: Final = 1_000
ASK_MS: Final = 15_000
"""For how long an answer of the authority is waited for: less than a request may take, so that the asker is told."""


class Desk:
    """`standby` is asked what only the authority knows; `store` has every row as of now; `board` has them in memory, a moment
    old, and `hub` shares out what changes there. `judging` runs what takes long and needs nothing but the processor. `closing`
    is set when the server ends.

    `looking` makes still views of the board in a thread of its own (`judging`, if it has none), with the filters and scores of
    this scope's schedulers; `endpoints` are what serves; `agents` are asked for what work has written.
    """

    def __init__(
        self,
        standby: Standby,
        store: Store,
        board: Board,
        door: Door,
        world: World,
        *,
        token: str,
        judging: Offload,
        looking: Offload | None = None,
        filters: Sequence[Filter] = (),
        scores: Sequence[Score] = DEFAULT,
        tempo: Tempo = Tempo(),
        watchers_max: int = WATCHERS_MAX,
    ) -> None:
        self.standby = standby
        self.store = store
        self.board = board
        self.hub = Hub(board)
        self.looking = Looking(board, store, world.clock, looking or judging, filters=filters, scores=scores)
        self.endpoints = Endpoints(board, world.clock)
        self.agents = Agents(board, world.clock, token)
        self.door = door
        self.world = world
        self.token = token
        self.judging = judging
        self.tempo = tempo
        self.closing = asyncio.Event()
        self.began_ms = world.clock.now_ms()
        self.watchers = 0
        self._watchers_max = watchers_max
        self._clients: dict[Actor, Client] = {}

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

    def tried(self, actor: Actor, claims: Sequence[AnyClaim]) -> list[Tried]:
        """What the authority would answer; nothing is written. Only who leads can tell."""
        if self.standby.leading is None:
            raise Turned(why="nobody leads here just now, and only who leads can try a change")
        return tried(self.standby.leading, actor, claims)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """One watcher more, for as long as this lasts."""
        if self.watchers >= self._watchers_max:
            why = f"{self.watchers} watchers listen here already, and no more are taken"
            raise Failure(
                429, "overloaded", why, cure="end a watch that is not needed, or ask another server", retry_after_ms=5_000
            )
        self.watchers += 1
        try:
            yield
        finally:
            self.watchers -= 1
