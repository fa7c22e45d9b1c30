"""Live demo: real processes, a machine and the server are killed.

Runs a service, a batch job and a job that stays pending; kills a machine, then the server; prints each step, and a summary
at the end.

Everything is real: the processes are those of `remit up` and `remit agent`, requests go over HTTP, and kills are SIGKILL.
Checks use external evidence only: requests to the endpoints, and the process table.
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
from remit.demo.demo_processes import DemoCluster
from remit.model.kinds import Node, NodeHealth, Workload
from remit.model.manifests.reader import read
from remit.model.objects import AnyObject, dec_hook
from remit.model.records import Replica
from remit.model.wire.api_types import EndpointItem
from remit.proposal.explain.result_types import WorkloadExplanation
from remit.world.host import SocketProber
from remit.world.interfaces import Clock
from remit.world.production import production

NAME_WIDTH: Final = 26


class CheckResult(NamedTuple):
    name: str
    holds: bool
    found: str


class DemoReport:
    def __init__(self, console: Console, clock: Clock) -> None:
        self._console, self._clock = console, clock
        self._began_ms = clock.now_ms()
        self._acts = 0
        self.checked: list[CheckResult] = []

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
            show(self._console, msgspec.convert(told, WorkloadExplanation, dec_hook=dec_hook), verbose=False, wall=self._clock.wall())
        for line in captured.get().splitlines():
            self.line(Text.from_ansi(line))

    def held(self, name: str, found: str) -> None:
        self.check(name, True, found)

    def check(self, name: str, holds: bool, found: str) -> None:
        self.checked.append(CheckResult(name, holds, found))
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
FAILING_NODE: Final = "doomed"
WAIT_S: Final = 30
POLL_S: Final = 0.1
PROBE_MS: Final = 1_000
OUTAGE_REQUESTS: Final = 10
"""Requests to each endpoint while the server is down."""


async def run_live_demo(console: Console, examples: Path, *, keep: bool) -> int:
    """Runs the demo in a temporary directory, which is removed afterwards unless `keep`. Returns 0 if all checks hold."""
    world = production()
    root = Path(tempfile.mkdtemp(prefix="remit-demo-"))
    root.chmod(0o711)  # noqa: ASYNC240 - replicas may run as another user
    parts, told = DemoCluster(root, NODES, FAILING_NODE, world.clock), DemoReport(console, world.clock)
    done = False
    try:
        await LiveDemo(parts, examples, told, world.clock).play()
        told.end()
        done = True
    finally:
        if keep and done:
            _print_next_steps(console, parts, root)
        else:
            await parts.end()
            world.disk.remove_tree(root)
        await world.offload.close()
    return 0 if told.holds else 1


def _print_next_steps(console: Console, parts: DemoCluster, root: Path) -> None:
    console.print(f"\nThe demo cluster is still running. To use it: export REMIT_SERVER={parts.url} "
                  f"REMIT_TOKEN_FILE={parts.token_file}")
    console.print("Then try: remit get all, remit describe workload/web, remit explain workload/train")
    console.print(f"To stop it: remit down --data {parts.data}; rm -r {root}", soft_wrap=True)


class ReplicaProcess(NamedTuple):
    """Identity of a replica's process; it stays equal unless the process is started again."""

    replica: str
    attempt: int
    pid: int


class LiveDemo:
    """The steps of the demo. `told` prints them and collects the checks."""

    def __init__(self, parts: DemoCluster, examples: Path, told: DemoReport, clock: Clock) -> None:
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

    # -- steps -------------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        self._told.head("Start a control plane and two nodes on this machine")
        self._told.command(self._parts.up_words)
        began_ms = self._clock.now_ms()
        await self._parts.start_up()
        self._told.line(f"API, scheduler and controllers are process {self._parts.up_pid}, at {self._parts.url}")
        async with self._parts.api() as api:
            await self._until("nodes are ready", lambda: self._ready(api, NODES))
        self._told.held("nodes ready", f"{NODES}, {self._since(began_ms)} after the start")

    async def _join(self, api: Api) -> None:
        self._told.head("Another machine joins, with its own agent and keeper")
        self._told.command(self._parts.agent_words)
        await self._parts.start_agent()
        await self._until("node is ready", lambda: self._ready(api, NODES + 1))
        agent, keeper = self._parts.agent_pid, self._parts.keeper_pid()
        self._told.line(f"node {FAILING_NODE}: agent process {agent}, keeper process {keeper}")

    async def _serve(self, api: Api) -> None:
        self._told.head("Run a service with three replicas")
        self._told.command("remit apply -f examples/quickstart/web.yaml")
        began_ms = self._clock.now_ms()
        await self._apply(api, "web.yaml")
        await self._until("service has 3 endpoints", lambda: self._serving(api, 3))
        found = await self._endpoints(api)
        self._told.endpoints(found)
        self._told.held("service complete", f"3 replicas are serving {self._since(began_ms)} after apply")
        await self._ask_all(found, "endpoints answer")

    async def _batch(self, api: Api) -> None:
        self._told.head("Run a batch job: six pieces, three at a time")
        self._told.command("remit apply -f examples/quickstart/sums.yaml")
        began_ms = self._clock.now_ms()
        await self._apply(api, "sums.yaml")
        await self._until("job is complete", lambda: self._condition(api, "sums", "Complete"))
        self._told.held("batch complete", f"6 of 6 pieces, {self._since(began_ms)} after apply")
        self._told.command("remit logs sums-5")
        said = await self._log(api, "sums-5")
        self._told.said(said)
        self._told.check("logs available", "piece 5" in said, "output of sums-5")

    async def _waits(self, api: Api) -> None:
        self._told.head("A job stays pending, and Remit explains why")
        self._told.command("remit apply -f examples/quickstart/train.yaml; remit explain workload/train")
        await self._apply(api, "train.yaml")
        await self._until("job has a pending reason", lambda: self._explained(api))
        told = await api.explain(Workload, "train")
        self._told.explanation(told)
        self._told.check("pending job explained", _reason(told) != "", f"reason: {_reason(told)}")

    async def _lose_a_machine(self, api: Api) -> None:
        self._told.head(f"Machine {FAILING_NODE} fails")
        lost = [one for one in await self._endpoints(api) if one.node == FAILING_NODE]
        if not lost:
            raise DemoFailed(f"no replica of the service ran on {FAILING_NODE}; run the demo again")
        began_ms = self._clock.now_ms()
        pids = self._parts.kill_machine()
        self._told.line(f"SIGKILL to its agent and keeper (processes {pids[0]} and {pids[1]})")
        for health in (NodeHealth.SUSPECT, NodeHealth.UNKNOWN):
            await self._until(f"node is {health}", partial(self._health, api, health))
            self._told.line(f"{self._since(began_ms):>6}  node {FAILING_NODE} is {health}")
        await self._until("service is complete again", lambda: self._moved(api))
        found = await self._endpoints(api)
        self._told.endpoints(found)
        self._told.held("service recovered", f"{lost[0].replica} runs on another node, {self._since(began_ms)} after the kill")
        await self._ask_all(found, "endpoints answer again")

    async def _lose_the_server(self, api: Api) -> None:
        self._told.head("The server fails: API, scheduler and controllers at once")
        before, found = await self._copies(api), await self._endpoints(api)
        status = await api.status()
        killed, began_ms = self._parts.kill_up(), self._clock.now_ms()
        self._told.line(f"SIGKILL to process {killed}")
        answered = 0
        for _ in range(OUTAGE_REQUESTS):
            answered += sum([await self._answers(one) for one in found])
        wanted = OUTAGE_REQUESTS * len(found)
        self._told.check("work keeps running", answered == wanted, f"{answered} of {wanted} requests answered without a server")
        await self._parts.start_up()
        await self._until("server is back", lambda: self._is_back(api))
        back = await api.status()
        kept = back.incarnation == status.incarnation and back.revision >= status.revision
        self._told.check("no state lost", kept, f"back {self._since(began_ms)} after the kill, at revision {back.revision}")
        await self._until("nodes are ready again", lambda: self._ready(api, NODES))
        after = await self._copies(api)
        same = len(before) > 0 and all(one in after for one in before)
        self._told.check("no process restarted", same, f"the same {len(before)} processes as before the kill")

    # -- checks ------------------------------------------------------------------------------------------------------------

    async def _ready(self, api: Api, count: int) -> bool:
        nodes = (await api.list(Node)).items
        return sum(one.status.health is NodeHealth.READY for one in nodes) >= count

    async def _health(self, api: Api, health: NodeHealth) -> bool:
        ladder = (NodeHealth.READY, NodeHealth.SUSPECT, NodeHealth.UNKNOWN, NodeHealth.LOST)
        return ladder.index((await api.get(Node, FAILING_NODE)).status.health) >= ladder.index(health)

    async def _serving(self, api: Api, count: int) -> bool:
        return len(await self._endpoints(api)) >= count

    async def _moved(self, api: Api) -> bool:
        found = await self._endpoints(api)
        return len(found) >= 3 and all(one.node != FAILING_NODE for one in found)

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

    async def _copies(self, api: Api) -> list[ReplicaProcess]:
        """Processes of the service, as reported by the nodes' agents."""
        await self._until("agents have reported their processes", lambda: self._all_told(api))
        replicas = {one.metadata.name: one.status for one in (await api.list(Replica)).items if one.spec.workload == "web"}
        tops = await api.top_replicas()
        return sorted(ReplicaProcess(one.replica, replicas[one.replica].attempt, one.pid) for one in tops if one.replica in replicas)

    async def _all_told(self, api: Api) -> bool:
        told = {one.replica for one in await api.top_replicas() if one.pid}
        return {one.replica for one in await self._endpoints(api)} <= told

    async def _log(self, api: Api, replica: str) -> str:
        pieces = [piece async for piece in api.logs(replica, stream="stdout")]
        return b"".join(pieces).decode(errors="replace").strip()

    # -- helpers -----------------------------------------------------------------------------------------------------------

    async def _apply(self, api: Api, name: str) -> None:
        answer = await api.apply(self._things[name])
        refused = [one.problem.detail for one in answer.results if one.problem is not None]
        if refused:
            raise DemoFailed(f"{name} was refused: {refused[0]}")

    async def _ask_all(self, found: Sequence[EndpointItem], name: str) -> None:
        answered = [await self._answers(one) for one in found]
        self._told.check(name, all(answered), f"{sum(answered)} of {len(found)} return 200 for GET /")

    async def _answers(self, one: EndpointItem) -> bool:
        return (await self._prober.http(one.host, one.ports["http"], "/", timeout_ms=PROBE_MS)).ok

    async def _until(self, what: str, holds: Callable[[], Awaitable[bool]]) -> None:
        until_ms = self._clock.now_ms() + WAIT_S * 1000
        while self._clock.now_ms() < until_ms:
            with suppress(Unanswered, NotYet):
                if await holds():
                    return
            await asyncio.sleep(POLL_S)
        raise DemoFailed(f"timed out after {WAIT_S} s waiting until {what}; run `remit demo --keep` to inspect the cluster")

    def _since(self, began_ms: int) -> str:
        return f"{(self._clock.now_ms() - began_ms) / 1000:.1f} s"


def _read(path: Path) -> tuple[AnyObject, ...]:
    found = read(path.read_bytes(), path.name)
    if found.problems:
        raise DemoFailed(f"{path}: {found.problems[0].description}")
    return found.objects


def _reason(told: dict[str, object]) -> str:
    """Reason code of the first pending group; empty if no reason is known yet."""
    groups = told.get("groups")
    for group in groups if isinstance(groups, list) else []:
        waits = group.get("waits") or {}
        if waits.get("reason"):
            return str(waits["reason"])
    return ""
