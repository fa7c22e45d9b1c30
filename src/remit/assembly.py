"""How is a process put together? Builds each from a world, so that the simulator and the program run the same code."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from remit.agent.building import agent as agent
from remit.agent.building import keeper as keeper
from remit.client.client import Client, NoAnswer
from remit.client.connecting import Connected, connect
from remit.client.remote import Remote
from remit.commitment.authority import Authority, one_failure
from remit.commitment.queueing import BATCH_MAX, BatchMax
from remit.commitment.standby import Standby
from remit.correction.crew import Crew
from remit.correction.loop import Cadence
from remit.law.tempo import Tempo
from remit.model.claims import Actor, Role
from remit.observation.board import Board
from remit.observation.following import Follower
from remit.observation.view import View
from remit.proposal.paths import Tell, untold
from remit.proposal.plugins import Filter, installed_filters, installed_scores
from remit.proposal.scheduler import LEASE, Rhythm, Scheduler
from remit.proposal.scores import DEFAULT
from remit.proposal.victims import Pace
from remit.serve.door import Door
from remit.serve.orders import OrderFeed
from remit.store.chain import Place
from remit.store.protocol import Store
from remit.store.sqlite import SqliteStore
from remit.world.binding import Bound, Listen
from remit.world.offload import ThreadOffload
from remit.world.production import production
from remit.world.promises import Clock, World

if TYPE_CHECKING:
    from remit.serve.app import Complain
    from remit.serve.desk import Desk


@asynccontextmanager
async def embedded(
    directory: Path, world: World, *, scope: str = "local", holder: str = "remit", tempo: Tempo = Tempo()
) -> AsyncIterator[Authority]:
    """The authority of one scope on a SQLite store in `directory`, owned by this process. The caller runs it."""
    store = await SqliteStore.open(directory, offload=world.offload, holder=holder, incarnation=world.ids.incarnation())
    try:
        authority = await Authority.take_over(
            store, scope=scope, holder=holder, clock=world.clock, ids=world.ids, place=store.place, tempo=tempo
        )
        settle_process()
        yield authority
    finally:
        await store.close()


async def server(
    store: Store,
    world: World,
    *,
    scope: str,
    name: str,
    peers: Sequence[str],
    beat_ms: int = 2_000,
    term_ms: int = 6_000,
    batch_max: BatchMax = BATCH_MAX,
    tempo: Tempo = Tempo(),
) -> None:
    """One of a scope's servers, for ever: it answers at its name, passes on while another leads, and leads when nobody does."""
    one = serving(
        store,
        world,
        scope=scope,
        name=name,
        peers=peers,
        beat_ms=beat_ms,
        term_ms=term_ms,
        batch_max=batch_max,
        tempo=tempo,
    )
    async with world.link.serve(name, one.door):
        await one.run()


class Serving(NamedTuple):
    """What a server is made of, whatever the way it is asked."""

    standby: Standby
    board: Board
    follower: Follower
    door: Door
    beat_ms: int

    async def run(self) -> None:
        """For ever."""
        with one_failure():
            async with asyncio.TaskGroup() as group:
                group.create_task(self.follower.follow(), name="board")
                await self.standby.serve(beat_ms=self.beat_ms)


def serving(
    store: Store,
    world: World,
    *,
    scope: str,
    name: str,
    peers: Sequence[str] = (),
    beat_ms: int = 2_000,
    term_ms: int = 6_000,
    batch_max: BatchMax = BATCH_MAX,
    tempo: Tempo = Tempo(),
    place: Place | None = None,
) -> Serving:
    """One of a scope's servers, which nobody can ask yet. `place`: where opening the store has raised the epoch already."""
    others = {peer: Remote(world.link, peer) for peer in peers if peer != name}
    standby = Standby(
        store,
        scope=scope,
        name=name,
        clock=world.clock,
        ids=world.ids,
        peers=others,
        term_ms=term_ms,
        batch_max=batch_max,
        tempo=tempo,
        place=place,
    )
    board = Board(world.clock)
    follower = Follower(store, store, world, board, idle_ms=5 * beat_ms)
    return Serving(standby, board, follower, Door(standby, store, OrderFeed(board, store, world.clock, tempo)), beat_ms)


class ApiServer(NamedTuple):
    """A server that is asked over HTTP at `url`, while it runs."""

    url: str
    serving: Serving
    desk: Desk


@asynccontextmanager
async def served(
    directory: Path,
    world: World,
    *,
    scope: str = "local",
    name: str = "server",
    listen: Listen = Listen(),
    token: str,
    tempo: Tempo = Tempo(),
    complain: Complain,
) -> AsyncIterator[ApiServer]:
    """A server on a SQLite store in `directory`, owned by this process, with its HTTP API, for as long as this lasts.

    The order at the end is the promise: nothing new is taken, what was taken is answered, and only then does the authority stop
    and the store close. So nothing that was acknowledged is lost, and nobody is left without an answer.
    """
    # Only who serves over HTTP pays for loading what speaks it.
    from remit.serve.app import Application
    from remit.serve.desk import Desk
    from remit.serve.table import ROUTES
    from remit.world.http import http_listening

    async with AsyncExitStack() as open_:
        judging, looking = ThreadOffload("judge"), ThreadOffload("look")
        open_.push_async_callback(judging.close)
        open_.push_async_callback(looking.close)
        store = await SqliteStore.open(directory, offload=world.offload, holder=name, incarnation=world.ids.incarnation())
        open_.push_async_callback(store.close)
        with closing(Bound(listen)) as bound:
            one = serving(store, world, scope=scope, name=name, beat_ms=tempo.beat_ms, tempo=tempo, place=store.place)
            desk = Desk(
                one.standby,
                store,
                one.board,
                one.door,
                world,
                token=token,
                judging=judging,
                looking=looking,
                filters=installed_filters(),
                scores=(*DEFAULT, *installed_scores()),
                tempo=tempo,
            )
            settle_process()
            with one_failure():
                async with asyncio.TaskGroup() as group:
                    running = group.create_task(one.run(), name="server")
                    settling = group.create_task(_settle_when_loaded(one, world.clock), name="settling")
                    app = Application(ROUTES, desk, complain)
                    async with http_listening(app, bound, closing=desk.closing.set):
                        yield ApiServer(bound.url, one, desk)
                    settling.cancel()
                    running.cancel()


async def _settle_when_loaded(one: Serving, clock: Clock) -> None:
    """Once more: by then the books and the board are there, and they are what is large."""
    while one.standby.leading is None or not one.board.sober:
        await clock.sleep_ms(one.beat_ms)
    settle_process()


def scheduler(
    store: Store,
    sure: Store,
    client: Client,
    world: World,
    *,
    name: str,
    lease: str = LEASE,
    rhythm: Rhythm = Rhythm(),
    pace: Pace = Pace(),
    failed: Callable[[NoAnswer], None] | None = None,
    view: View | None = None,
    filters: Sequence[Filter] = (),
    tell: Tell = untold,
) -> Scheduler:
    """One of a scope's schedulers, with these filters and those of whatever packages are installed. The caller runs it."""
    return Scheduler(
        store,
        sure,
        client,
        world,
        name=name,
        lease=lease,
        rhythm=rhythm,
        filters=(*filters, *installed_filters()),
        scores=(*DEFAULT, *installed_scores()),
        pace=pace,
        failed=failed,
        view=view,
        tell=tell,
    )


def controllers(
    store: Store,
    sure: Store,
    client_for: Callable[[Actor], Client],
    world: World,
    *,
    name: str,
    cadence: Cadence = Cadence(),
    board: Board | None = None,
    lease_for: Callable[[str], str] = str,
    failed: Callable[[NoAnswer], None] | None = None,
) -> Crew:
    """One copy of a scope's controllers, on one board; `client_for` makes each its own client. The caller runs it."""
    return Crew(store, sure, client_for, world, name=name, cadence=cadence, board=board, lease_for=lease_for, failed=failed)


# -- parts that are processes of their own -------------------------------------------------------------------------------------


def part_name(sort: str) -> str:
    """What a part is called in records, if nobody says otherwise."""
    return f"{sort}-{os.getpid()}"


@asynccontextmanager
async def component_world(servers: Sequence[str], token: str) -> AsyncIterator[Connected]:
    """The real world, in which a scope's servers are reached over HTTP."""
    world = production()
    try:
        async with connect(servers, token, world) as connected:
            yield connected
    finally:
        await world.offload.close()


async def run_scheduler(
    connected: Connected, *, name: str, beat_ms: int, failed: Callable[[NoAnswer], None] | None = None
) -> None:
    """A scheduler over HTTP, for ever."""
    tempo, rows = Tempo(beat_ms), connected.rows
    client = connected.client_for(Actor(name, Role.SCHEDULER))
    rhythm = Rhythm(lease_ms=tempo.lease_ms, idle_ms=5 * beat_ms)
    await scheduler(rows, rows, client, connected.world, name=name, rhythm=rhythm, failed=failed).run()


async def run_controllers(
    connected: Connected, *, name: str, beat_ms: int, failed: Callable[[NoAnswer], None] | None = None
) -> None:
    """All controllers over HTTP, for ever."""
    rows, cadence = connected.rows, Cadence(beat_ms)
    await controllers(rows, rows, connected.client_for, connected.world, name=name, cadence=cadence, failed=failed).run()


SWITCH_S: Final = 0.000_2


def settle_process() -> None:
    """Books are large and have no cycles: what was loaded is set aside, and the collector looks for garbage less often.

    And the thread that writes needs the interpreter a few times in each commit: it gets it soon, although the next batch is
    being decided meanwhile. By default it would wait five milliseconds each time, which is longer than the commit itself.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    sys.setswitchinterval(SWITCH_S)
