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
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.reader import read
from remit.model.objects import dec_hook
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
    result: str


class DemoReport:
    def __init__(self, console: Console, clock: Clock) -> None:
        self._console, self._clock = console, clock
        self._began_ms = clock.now_ms()
        self._steps = 0
        self.results: list[CheckResult] = []

    @property
    def holds(self) -> bool:
        return bool(self.results) and all(result.holds for result in self.results)

    def heading(self, title: str) -> None:
        self._steps += 1
        passed_s = (self._clock.now_ms() - self._began_ms) / 1000
        number, passed = (f"{self._steps}  ", "bold cyan"), (f"   {passed_s:.0f} s", "dim")
        self._console.print(Text.assemble("\n", number, (title, "bold"), passed))

    def command(self, text: str) -> None:
        self.line(Text(f"$ {text}", style="cyan"))

    def line(self, text: str | Text) -> None:
        self._console.print(Text.assemble("   ", text), soft_wrap=True)

    def output(self, text: str) -> None:
        for line in text.splitlines():
            self.line(Text(line, style="dim"))

    def endpoints(self, endpoints: Sequence[EndpointItem]) -> None:
        for endpoint in endpoints:
            where = ", ".join(f"{endpoint.host}:{port}" for port in endpoint.ports.values())
            self.line(f"{endpoint.replica:<10} {endpoint.node:<12} {where}")

    def explanation(self, explanation: Mapping[str, Any]) -> None:
        with self._console.capture() as captured:
            show(
                self._console,
                msgspec.convert(explanation, WorkloadExplanation, dec_hook=dec_hook),
                verbose=False,
                wall=self._clock.wall(),
            )
        for line in captured.get().splitlines():
            self.line(Text.from_ansi(line))

    def passed(self, name: str, result: str) -> None:
        self.check(name, True, result)

    def check(self, name: str, holds: bool, result: str) -> None:
        self.results.append(CheckResult(name, holds, result))
        mark = ("✓", "bold green") if holds else ("✗", "bold red")
        self._console.print(Text.assemble("   ", mark, " ", (f"{name:<{NAME_WIDTH}}", "bold"), result), soft_wrap=True)

    def end(self) -> None:
        passed_s = (self._clock.now_ms() - self._began_ms) / 1000
        failed = [result for result in self.results if not result.holds]
        if failed:
            summary = (
                f"{len(failed)} of {len(self.results)} do not hold: {', '.join(result.name for result in failed)}.",
                "bold red",
            )
        else:
            summary = (f"{len(self.results)} of {len(self.results)} checks hold.", "bold green")
        self._console.print(Text.assemble("\n", summary, f" {passed_s:.0f} s."))


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
    cluster, report = DemoCluster(root, NODES, FAILING_NODE, world.clock), DemoReport(console, world.clock)
    done = False
    try:
        await LiveDemo(cluster, examples, report, world.clock).run()
        report.end()
        done = True
    finally:
        if keep and done:
            _print_next_steps(console, cluster, root)
        else:
            await cluster.stop()
            world.disk.remove_tree(root)
        await world.offload.close()
    return 0 if report.holds else 1


def _print_next_steps(console: Console, cluster: DemoCluster, root: Path) -> None:
    console.print(
        f"\nThe demo cluster is still running. To use it: export REMIT_SERVER={cluster.url} "
        f"REMIT_TOKEN_FILE={cluster.token_file}"
    )
    console.print("Then try: remit get all, remit describe workload/web, remit explain workload/train")
    console.print(f"To stop it: remit down --data {cluster.data}; rm -r {root}", soft_wrap=True)


class ReplicaProcess(NamedTuple):
    """Identity of a replica's process; it stays equal unless the process is started again."""

    replica: str
    attempt: int
    pid: int


class LiveDemo:
    """The steps of the demo. `report` prints them and collects the checks."""

    def __init__(self, cluster: DemoCluster, examples: Path, report: DemoReport, clock: Clock) -> None:
        self._cluster, self._report, self._clock = cluster, report, clock
        self._objects = {name: _read(examples / name) for name in FILES}
        self._prober = SocketProber(clock)

    async def run(self) -> None:
        await self._start_cluster()
        async with self._cluster.api() as api:
            await self._join_machine(api)
            await self._run_service(api)
            await self._run_batch(api)
            await self._explain_pending(api)
            await self._kill_machine(api)
            await self._kill_server(api)

    # -- steps -------------------------------------------------------------------------------------------------------------

    async def _start_cluster(self) -> None:
        self._report.heading("Start a control plane and two nodes on this machine")
        self._report.command(self._cluster.up_command)
        began_ms = self._clock.now_ms()
        await self._cluster.start_up()
        self._report.line(f"API, scheduler and controllers are process {self._cluster.up_pid}, at {self._cluster.url}")
        async with self._cluster.api() as api:
            await self._until("nodes are ready", lambda: self._ready(api, NODES))
        self._report.passed("nodes ready", f"{NODES}, {self._since(began_ms)} after the start")

    async def _join_machine(self, api: Api) -> None:
        self._report.heading("Another machine joins, with its own agent and keeper")
        self._report.command(self._cluster.agent_command)
        await self._cluster.start_agent()
        await self._until("node is ready", lambda: self._ready(api, NODES + 1))
        agent, keeper = self._cluster.agent_pid, self._cluster.keeper_pid()
        self._report.line(f"node {FAILING_NODE}: agent process {agent}, keeper process {keeper}")

    async def _run_service(self, api: Api) -> None:
        self._report.heading("Run a service with three replicas")
        self._report.command("remit apply -f examples/quickstart/web.yaml")
        began_ms = self._clock.now_ms()
        await self._apply(api, "web.yaml")
        await self._until("service has 3 endpoints", lambda: self._serving(api, 3))
        endpoints = await self._endpoints(api)
        self._report.endpoints(endpoints)
        self._report.passed("service complete", f"3 replicas are serving {self._since(began_ms)} after apply")
        await self._request_all(endpoints, "endpoints answer")

    async def _run_batch(self, api: Api) -> None:
        self._report.heading("Run a batch job: six pieces, three at a time")
        self._report.command("remit apply -f examples/quickstart/sums.yaml")
        began_ms = self._clock.now_ms()
        await self._apply(api, "sums.yaml")
        await self._until("job is complete", lambda: self._condition(api, "sums", "Complete"))
        self._report.passed("batch complete", f"6 of 6 pieces, {self._since(began_ms)} after apply")
        self._report.command("remit logs sums-5")
        output = await self._log(api, "sums-5")
        self._report.output(output)
        self._report.check("logs available", "piece 5" in output, "output of sums-5")

    async def _explain_pending(self, api: Api) -> None:
        self._report.heading("A job stays pending, and Remit explains why")
        self._report.command("remit apply -f examples/quickstart/train.yaml; remit explain workload/train")
        await self._apply(api, "train.yaml")
        await self._until("job has a pending reason", lambda: self._explained(api))
        explanation = await api.explain(Workload, "train")
        self._report.explanation(explanation)
        self._report.check("pending job explained", _reason(explanation) != "", f"reason: {_reason(explanation)}")

    async def _kill_machine(self, api: Api) -> None:
        self._report.heading(f"Machine {FAILING_NODE} fails")
        lost = [endpoint for endpoint in await self._endpoints(api) if endpoint.node == FAILING_NODE]
        if not lost:
            raise DemoFailed(f"no replica of the service ran on {FAILING_NODE}; run the demo again")
        began_ms = self._clock.now_ms()
        pids = self._cluster.kill_machine()
        self._report.line(f"SIGKILL to its agent and keeper (processes {pids[0]} and {pids[1]})")
        for health in (NodeHealth.SUSPECT, NodeHealth.UNKNOWN):
            await self._until(f"node is {health}", partial(self._health, api, health))
            self._report.line(f"{self._since(began_ms):>6}  node {FAILING_NODE} is {health}")
        await self._until("service is complete again", lambda: self._has_moved(api))
        endpoints = await self._endpoints(api)
        self._report.endpoints(endpoints)
        self._report.passed(
            "service recovered", f"{lost[0].replica} runs on another node, {self._since(began_ms)} after the kill"
        )
        await self._request_all(endpoints, "endpoints answer again")

    async def _kill_server(self, api: Api) -> None:
        self._report.heading("The server fails: API, scheduler and controllers at once")
        before, endpoints = await self._processes(api), await self._endpoints(api)
        status = await api.status()
        killed, began_ms = self._cluster.kill_up(), self._clock.now_ms()
        self._report.line(f"SIGKILL to process {killed}")
        answered = 0
        for _ in range(OUTAGE_REQUESTS):
            answered += sum([await self._responds(endpoint) for endpoint in endpoints])
        total = OUTAGE_REQUESTS * len(endpoints)
        self._report.check("work keeps running", answered == total, f"{answered} of {total} requests answered without a server")
        await self._cluster.start_up()
        await self._until("server is back", lambda: self._is_back(api))
        new_status = await api.status()
        is_preserved = new_status.incarnation == status.incarnation and new_status.revision >= status.revision
        self._report.check(
            "no state lost", is_preserved, f"back {self._since(began_ms)} after the kill, at revision {new_status.revision}"
        )
        await self._until("nodes are ready again", lambda: self._ready(api, NODES))
        after = await self._processes(api)
        same = len(before) > 0 and all(endpoint in after for endpoint in before)
        self._report.check("no process restarted", same, f"the same {len(before)} processes as before the kill")

    # -- checks ------------------------------------------------------------------------------------------------------------

    async def _ready(self, api: Api, count: int) -> bool:
        nodes = (await api.list(Node)).items
        return sum(node.status.health is NodeHealth.READY for node in nodes) >= count

    async def _health(self, api: Api, health: NodeHealth) -> bool:
        ladder = (NodeHealth.READY, NodeHealth.SUSPECT, NodeHealth.UNKNOWN, NodeHealth.LOST)
        return ladder.index((await api.get(Node, FAILING_NODE)).status.health) >= ladder.index(health)

    async def _serving(self, api: Api, count: int) -> bool:
        return len(await self._endpoints(api)) >= count

    async def _has_moved(self, api: Api) -> bool:
        endpoints = await self._endpoints(api)
        return len(endpoints) >= 3 and all(endpoint.node != FAILING_NODE for endpoint in endpoints)

    async def _endpoints(self, api: Api) -> Sequence[EndpointItem]:
        return sorted((await api.endpoints("web")).items, key=lambda endpoint: endpoint.replica)

    async def _condition(self, api: Api, name: str, type_: str) -> bool:
        workload = await api.get(Workload, name)
        return any(condition.type == type_ and condition.status == "True" for condition in workload.status.conditions)

    async def _explained(self, api: Api) -> bool:
        with suppress(ApiError):
            return _reason(await api.explain(Workload, "train")) != ""
        return False

    async def _is_back(self, api: Api) -> bool:
        return await api.ready() == ""

    async def _processes(self, api: Api) -> list[ReplicaProcess]:
        """Processes of the service, as reported by the nodes' agents."""
        await self._until("agents have reported their processes", lambda: self._all_reported(api))
        replicas = {item.metadata.name: item.status for item in (await api.list(Replica)).items if item.spec.workload == "web"}
        tops = await api.top_replicas()
        return sorted(
            ReplicaProcess(item.replica, replicas[item.replica].attempt, item.pid) for item in tops if item.replica in replicas
        )

    async def _all_reported(self, api: Api) -> bool:
        reported = {usage.replica for usage in await api.top_replicas() if usage.pid}
        return {usage.replica for usage in await self._endpoints(api)} <= reported

    async def _log(self, api: Api, replica: str) -> str:
        pieces = [piece async for piece in api.logs(replica, stream="stdout")]
        return b"".join(pieces).decode(errors="replace").strip()

    # -- helpers -----------------------------------------------------------------------------------------------------------

    async def _apply(self, api: Api, name: str) -> None:
        answer = await api.apply(self._objects[name])
        refused = [result.problem.detail for result in answer.results if result.problem is not None]
        if refused:
            raise DemoFailed(f"{name} was refused: {refused[0]}")

    async def _request_all(self, endpoints: Sequence[EndpointItem], name: str) -> None:
        answered = [await self._responds(endpoint) for endpoint in endpoints]
        self._report.check(name, all(answered), f"{sum(answered)} of {len(endpoints)} return 200 for GET /")

    async def _responds(self, endpoint: EndpointItem) -> bool:
        return (await self._prober.http(endpoint.host, endpoint.ports["http"], "/", timeout_ms=PROBE_MS)).ok

    async def _until(self, condition: str, holds: Callable[[], Awaitable[bool]]) -> None:
        until_ms = self._clock.now_ms() + WAIT_S * 1000
        while self._clock.now_ms() < until_ms:
            with suppress(Unanswered, NotYet):
                if await holds():
                    return
            await asyncio.sleep(POLL_S)
        raise DemoFailed(
            f"timed out after {WAIT_S} s waiting until {condition}; run `remit demo --keep` to inspect the cluster"
        )

    def _since(self, began_ms: int) -> str:
        return f"{(self._clock.now_ms() - began_ms) / 1000:.1f} s"


def _read(path: Path) -> tuple[AnyObject, ...]:
    result = read(path.read_bytes(), path.name)
    if result.problems:
        raise DemoFailed(f"{path}: {result.problems[0].description}")
    return result.objects


def _reason(explanation: dict[str, object]) -> str:
    """Reason code of the first pending group; empty if no reason is known yet."""
    groups = explanation.get("groups")
    for group in groups if isinstance(groups, list) else []:
        pending = group.get("waits") or {}
        if pending.get("reason"):
            return str(pending["reason"])
    return ""
