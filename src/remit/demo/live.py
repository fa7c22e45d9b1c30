"""Live demo: real processes, machine and server killed.

Prints as things happen, and adds up at the end.

A service, a batch, one that waits; a machine and the server are killed.

Everything is real: the processes are those of `remit up` and `remit agent`, the requests go over HTTP, and what is killed gets
SIGKILL. What is said to hold was looked at from outside: by asking the endpoints themselves, and the system for processes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from remit.cli.output.explanations import show
from remit.client.api import Api, ApiError, NotYet, Unanswered
from remit.demo.authority_process import DemoFailed
from remit.demo.demo_processes import Parts
from remit.model.kinds import Node, NodeHealth, Workload
from remit.model.manifests.reader import read
from remit.model.objects import AnyObject, dec_hook
from remit.model.records import Replica
from remit.model.wire.api_types import EndpointItem
from remit.proposal.explain.result_types import WorkloadTold
from remit.world.host import SocketProber
from remit.world.interfaces import Clock
from remit.world.production import production

NAME_WIDTH: Final = 26


class Checked(NamedTuple):
    name: str
    holds: bool
    found: str


class Told:
    def __init__(self, console: Console, clock: Clock) -> None:
        self._console, self._clock = console, clock
        self._began_ms = clock.now_ms()
        self._acts = 0
        self.checked: list[Checked] = []

    @property
    def holds(self) -> bool:
        return bool(self.checked) and all(one.holds for one in self.checked)

    def head(self, title: str) -> None:
        self._acts += 1
        passed_s = (self._clock.now_ms() - self._began_ms) / 1000
        number, passed = (f"{self._acts}  ", "bold cyan"), (f"   {passed_s:.0f} s", "dim")
        self._console.print(Text.assemble("\n", number, (title, "bold"), passed))

    def command(self, words: str) -> None:
        self.line(Text(f"$ {words}", style="cyan"))

    def line(self, text: str | Text) -> None:
        self._console.print(Text.assemble("   ", text), soft_wrap=True)

    def said(self, text: str) -> None:
        for line in text.splitlines():
            self.line(Text(line, style="dim"))

    def endpoints(self, found: Sequence[EndpointItem]) -> None:
        for one in found:
            where = ", ".join(f"{one.host}:{port}" for port in one.ports.values())
            self.line(f"{one.replica:<10} {one.node:<12} {where}")

    def explanation(self, told: Mapping[str, Any]) -> None:
        with self._console.capture() as captured:
            show(self._console, msgspec.convert(told, WorkloadTold, dec_hook=dec_hook), verbose=False, wall=self._clock.wall())
        for line in captured.get().splitlines():
            self.line(Text.from_ansi(line))

    def held(self, name: str, found: str) -> None:
        self.check(name, True, found)

    def check(self, name: str, holds: bool, found: str) -> None:
        self.checked.append(Checked(name, holds, found))
        mark = ("✓", "bold green") if holds else ("✗", "bold red")
        self._console.print(Text.assemble("   ", mark, " ", (f"{name:<{NAME_WIDTH}}", "bold"), found), soft_wrap=True)

    def end(self) -> None:
        passed_s = (self._clock.now_ms() - self._began_ms) / 1000
        wrong = [one for one in self.checked if not one.holds]
        if wrong:
            told = (f"{len(wrong)} of {len(self.checked)} do not hold: {', '.join(one.name for one in wrong)}.", "bold red")
        else:
            told = (f"{len(self.checked)} of {len(self.checked)} checks hold.", "bold green")
        self._console.print(Text.assemble("\n", told, f" {passed_s:.0f} s."))


FILES: Final = ("web.yaml", "sums.yaml", "train.yaml")
NODES: Final = 2
DOOMED: Final = "doomed"
WAIT_S: Final = 30
LOOK_S: Final = 0.1
PROBE_MS: Final = 1_000
DARK_ASKS: Final = 10
"""How often each endpoint is asked while there is no server."""


async def play(console: Console, examples: Path, *, keep: bool) -> int:
    """The whole of it, in a directory of its own, which goes with it. 0 if all that was checked holds."""
    world = production()
    root = Path(tempfile.mkdtemp(prefix="remit-demo-"))
    root.chmod(0o711)  # noqa: ASYNC240 - work may run as another user
    parts, told = Parts(root, NODES, DOOMED, world.clock), Told(console, world.clock)
    done = False
    try:
        await Show(parts, examples, told, world.clock).play()
        told.end()
        done = True
    finally:
        if keep and done:
            _say_how_to_go_on(console, parts, root)
        else:
            await parts.end()
            world.disk.remove_tree(root)
        await world.offload.close()
    return 0 if told.holds else 1


def _say_how_to_go_on(console: Console, parts: Parts, root: Path) -> None:
    console.print(f"\nIt runs on. To look at it: export REMIT_SERVER={parts.url} REMIT_TOKEN_FILE={parts.token_file}")
    console.print("then remit get all, remit describe workload/web, remit explain workload/train")
    console.print(f"To end it: remit down --data {parts.data}; rm -r {root}", soft_wrap=True)


class Copy(NamedTuple):
    """A process of a replica: the same as long as nobody started it anew."""

    replica: str
    attempt: int
    pid: int


class Show:
    """One demo, from nothing; `told` prints it and keeps what was checked."""

    def __init__(self, parts: Parts, examples: Path, told: Told, clock: Clock) -> None:
        self._parts, self._told, self._clock = parts, told, clock
        self._things = {name: _read(examples / name) for name in FILES}
        self._prober = SocketProber(clock)

    async def play(self) -> None:
        await self._begin()
        async with self._parts.api() as api:
            await self._join(api)
            await self._serve(api)
            await self._batch(api)
            await self._waits(api)
            await self._lose_a_machine(api)
            await self._lose_the_server(api)

    # -- the acts ----------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        self._told.head("A control plane and two nodes, on this machine")
        self._told.command(self._parts.up_words)
        began_ms = self._clock.now_ms()
        await self._parts.start_up()
        self._told.line(f"API, scheduler and controllers are process {self._parts.up_pid}, at {self._parts.url}")
        async with self._parts.api() as api:
            await self._until("the nodes are ready", lambda: self._ready(api, NODES))
        self._told.held("nodes ready", f"{NODES}, {self._since(began_ms)} after the start")

    async def _join(self, api: Api) -> None:
        self._told.head("Another machine joins, with an agent and a keeper of its own")
        self._told.command(self._parts.agent_words)
        await self._parts.start_agent()
        await self._until("the node is ready", lambda: self._ready(api, NODES + 1))
        agent, keeper = self._parts.agent_pid, self._parts.keeper_pid()
        self._told.line(f"node {DOOMED}: its agent is process {agent}, its keeper process {keeper}")

    async def _serve(self, api: Api) -> None:
        self._told.head("A service with three replicas")
        self._told.command("remit apply -f examples/quickstart/web.yaml")
        began_ms = self._clock.now_ms()
        await self._apply(api, "web.yaml")
        await self._until("the service serves", lambda: self._serving(api, 3))
        found = await self._endpoints(api)
        self._told.endpoints(found)
        self._told.held("service whole", f"3 replicas serve {self._since(began_ms)} after the apply")
        await self._ask_all(found, "endpoints answer")

    async def _batch(self, api: Api) -> None:
        self._told.head("A batch job: six pieces, three at a time")
        self._told.command("remit apply -f examples/quickstart/sums.yaml")
        began_ms = self._clock.now_ms()
        await self._apply(api, "sums.yaml")
        await self._until("the job is complete", lambda: self._condition(api, "sums", "Complete"))
        self._told.held("batch complete", f"6 of 6 pieces, {self._since(began_ms)} after the apply")
        self._told.command("remit logs sums-5")
        said = await self._log(api, "sums-5")
        self._told.said(said)
        self._told.check("its output is there", "piece 5" in said, "logs of sums-5")

    async def _waits(self, api: Api) -> None:
        self._told.head("A job that waits, and says why")
        self._told.command("remit apply -f examples/quickstart/train.yaml; remit explain workload/train")
        await self._apply(api, "train.yaml")
        await self._until("the job is judged", lambda: self._explained(api))
        told = await api.explain(Workload, "train")
        self._told.explanation(told)
        self._told.check("pending is explained", _reason(told) != "", f"reason: {_reason(told)}")

    async def _lose_a_machine(self, api: Api) -> None:
        self._told.head(f"The machine {DOOMED} dies")
        lost = [one for one in await self._endpoints(api) if one.node == DOOMED]
        if not lost:
            raise DemoFailed(f"no replica of the service stood on {DOOMED}; run the demo again")
        began_ms = self._clock.now_ms()
        pids = self._parts.kill_machine()
        self._told.line(f"SIGKILL to its agent and its keeper (processes {pids[0]} and {pids[1]})")
        for health in (NodeHealth.SUSPECT, NodeHealth.UNKNOWN):
            await self._until(f"the node is {health}", partial(self._health, api, health))
            self._told.line(f"{self._since(began_ms):>6}  node {DOOMED} is {health}")
        await self._until("the service is whole again", lambda: self._moved(api))
        found = await self._endpoints(api)
        self._told.endpoints(found)
        self._told.held("service whole again", f"{lost[0].replica} runs elsewhere, {self._since(began_ms)} after the kill")
        await self._ask_all(found, "endpoints answer again")

    async def _lose_the_server(self, api: Api) -> None:
        self._told.head("The server dies: API, scheduler and controllers at once")
        before, found = await self._copies(api), await self._endpoints(api)
        status = await api.status()
        killed, began_ms = self._parts.kill_up(), self._clock.now_ms()
        self._told.line(f"SIGKILL to process {killed}")
        answered = 0
        for _ in range(DARK_ASKS):
            answered += sum([await self._answers(one) for one in found])
        wanted = DARK_ASKS * len(found)
        self._told.check("work runs on", answered == wanted, f"without a server {answered} of {wanted} requests were answered")
        await self._parts.start_up()
        await self._until("the server is back", lambda: self._is_back(api))
        back = await api.status()
        kept = back.incarnation == status.incarnation and back.revision >= status.revision
        self._told.check("nothing is lost", kept, f"back {self._since(began_ms)} after the kill, at revision {back.revision}")
        await self._until("the nodes are heard again", lambda: self._ready(api, NODES))
        after = await self._copies(api)
        same = len(before) > 0 and all(one in after for one in before)
        self._told.check("nothing was started again", same, f"the same {len(before)} processes as before, and all of them")

    # -- what is looked at -------------------------------------------------------------------------------------------------

    async def _ready(self, api: Api, count: int) -> bool:
        nodes = (await api.list(Node)).items
        return sum(one.status.health is NodeHealth.READY for one in nodes) >= count

    async def _health(self, api: Api, health: NodeHealth) -> bool:
        ladder = (NodeHealth.READY, NodeHealth.SUSPECT, NodeHealth.UNKNOWN, NodeHealth.LOST)
        return ladder.index((await api.get(Node, DOOMED)).status.health) >= ladder.index(health)

    async def _serving(self, api: Api, count: int) -> bool:
        return len(await self._endpoints(api)) >= count

    async def _moved(self, api: Api) -> bool:
        found = await self._endpoints(api)
        return len(found) >= 3 and all(one.node != DOOMED for one in found)

    async def _endpoints(self, api: Api) -> Sequence[EndpointItem]:
        return sorted((await api.endpoints("web")).items, key=lambda one: one.replica)

    async def _condition(self, api: Api, name: str, type_: str) -> bool:
        workload = await api.get(Workload, name)
        return any(one.type == type_ and one.status == "True" for one in workload.status.conditions)

    async def _explained(self, api: Api) -> bool:
        with suppress(ApiError):
            return _reason(await api.explain(Workload, "train")) != ""
        return False

    async def _is_back(self, api: Api) -> bool:
        return await api.ready() == ""

    async def _copies(self, api: Api) -> list[Copy]:
        """What runs of the service, by the nodes' own word."""
        await self._until("the nodes have told what runs", lambda: self._all_told(api))
        replicas = {one.metadata.name: one.status for one in (await api.list(Replica)).items if one.spec.workload == "web"}
        tops = await api.top_replicas()
        return sorted(Copy(one.replica, replicas[one.replica].attempt, one.pid) for one in tops if one.replica in replicas)

    async def _all_told(self, api: Api) -> bool:
        told = {one.replica for one in await api.top_replicas() if one.pid}
        return {one.replica for one in await self._endpoints(api)} <= told

    async def _log(self, api: Api, replica: str) -> str:
        pieces = [piece async for piece in api.logs(replica, stream="stdout")]
        return b"".join(pieces).decode(errors="replace").strip()

    # -- small things ------------------------------------------------------------------------------------------------------

    async def _apply(self, api: Api, name: str) -> None:
        answer = await api.apply(self._things[name])
        refused = [one.problem.detail for one in answer.results if one.problem is not None]
        if refused:
            raise DemoFailed(f"{name} was refused: {refused[0]}")

    async def _ask_all(self, found: Sequence[EndpointItem], name: str) -> None:
        answered = [await self._answers(one) for one in found]
        self._told.check(name, all(answered), f"{sum(answered)} of {len(found)} say 200 to GET /")

    async def _answers(self, one: EndpointItem) -> bool:
        return (await self._prober.http(one.host, one.ports["http"], "/", timeout_ms=PROBE_MS)).ok

    async def _until(self, what: str, holds: Callable[[], Awaitable[bool]]) -> None:
        until_ms = self._clock.now_ms() + WAIT_S * 1000
        while self._clock.now_ms() < until_ms:
            with suppress(Unanswered, NotYet):
                if await holds():
                    return
            await asyncio.sleep(LOOK_S)
        raise DemoFailed(f"{what}: not after {WAIT_S} s; `remit demo --keep` leaves everything to be looked at")

    def _since(self, began_ms: int) -> str:
        return f"{(self._clock.now_ms() - began_ms) / 1000:.1f} s"


def _read(path: Path) -> tuple[AnyObject, ...]:
    found = read(path.read_bytes(), path.name)
    if found.problems:
        raise DemoFailed(f"{path}: {found.problems[0].words}")
    return found.objects


def _reason(told: dict[str, object]) -> str:
    """The dominant reason of what waits in it; empty if nothing was judged yet."""
    groups = told.get("groups")
    for group in groups if isinstance(groups, list) else []:
        waits = group.get("waits") or {}
        if waits.get("reason"):
            return str(waits["reason"])
    return ""
