"""Kills and stops real processes at random under load, and judges the outcome by records that the jobs write.

python -m tests.integration.chaos.driver --seconds 300 [--seed N] [--keep DIR]

A server, a scheduler, controllers, agents and keepers are killed (SIGKILL) and stopped for a while (SIGSTOP) again and again,
while jobs are submitted and services run; some jobs are process trees, of which the first process only waits. Jobs write their
start, heartbeats and end, with their attempt's token, to a record file of the driver. Afterwards everything is left alone until
it has settled. Then:

- *lost*: a job that was acknowledged and never ended;
- *doubled*: a replica that must never run twice did, or one attempt was started twice;
- *cut*: a process was stopped by an outage shorter than its fence;
- *stuck*: a job that ended and is not reported complete, or a service without its replicas;
- *leaked*: a replica that holds capacity, or a process, that nothing needs any more.

The last line on stdout is JSON: the counts, and how many of these were found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

from remit.client.api import Api, ApiError, Unanswered
from remit.model.kinds import Disruption, Restart, Rollout, Template, Tenant, TenantSpec, Workload, WorkloadSpec
from remit.model.metadata import Metadata
from remit.model.records import Phase, Replica
from remit.model.resources import Amount, Duration
from tests.integration.chaos.cluster import Cluster, Program
from tests.integration.chaos.job_records import (
    Line,
    ProcessLife,
    Stall,
    Verdict,
    duplicates,
    judge,
    process_lives,
    read,
    still_alive,
)

WORK: Final = Path(__file__).with_name("job_main.py")
BEAT_MS: Final = 500
FENCE_MS: Final = 15_000
AGENTS: Final = 3
NODES: Final = 2
SERVICES: Final = 2
TENANT: Final = "chaos"
PAUSE_S: Final = (1.0, 4.0)
"""Between two faults."""
OUTAGE_S: Final = (0.3, 5.0)
"""Time for which a component is stopped or stays dead; shorter than what makes a service's replica be replaced."""
LONG_STALL_S: Final = FENCE_MS / 1000 + 6
LONG_STALL_SHARE: Final = 0.06
KEEPER_SHARE: Final = 0.25
"""Share of faults on an agent that kill its keeper, alone or with it."""
TREE_SHARE: Final = 0.3
JOB_MS: Final = (300, 4_000)
JOBS_EVERY_S: Final = 0.6
SETTLE_S_MAX: Final = 120
WHOLE_S_MAX: Final = 30


def now_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class Chaos:
    """One chaos run."""

    def __init__(self, root: Path, seconds: float, seed: int) -> None:
        self.root, self.seconds = root, seconds
        self.rng = random.Random(seed)
        self.cluster = Cluster(root, agents=AGENTS, nodes=NODES, beat=f"{BEAT_MS}ms")
        self.record = root / "record"
        self.counts: Counter[str] = Counter()
        self.stalls: list[Stall] = []
        self.jobs: list[str] = []
        """Names of acknowledged jobs."""
        self.leaked: list[str] = []
        self.stuck: list[str] = []
        self._group: asyncio.TaskGroup | None = None
        self._faulty: set[str] = set()

    # -- the run -----------------------------------------------------------------------------------------------------------

    async def run(self) -> Verdict:
        self.cluster.start()
        try:
            async with Api(self.cluster.url, self.cluster.token, tenant=TENANT, timeout_s=60) as api:
                await self._set_up(api)
                until = time.monotonic() + self.seconds
                async with asyncio.TaskGroup() as group:
                    self._group = group
                    group.create_task(self._submit(api, until))
                    group.create_task(self._inject_faults(until))
                log(f"{self.seconds:.0f} s of faults are over: {dict(self.counts)}; {len(self.jobs)} jobs are to end")
                await self._settle(api)
                await self._wait_until_settled(api)
                verdict = self._judge()
                await self._clear(api)
        finally:
            self.cluster.end()
        self._find_leaked_processes(str(self.record), f"{self.root}/")
        return verdict

    async def _set_up(self, api: Api) -> None:
        quota = Amount.parse({"cpu": "1000", "memory": "1Ti"})
        services = [workload(f"service-{n}", self.record, 0, service=True) for n in range(SERVICES)]
        answer = await api.apply([Tenant(metadata=Metadata(name=TENANT), spec=TenantSpec(quota=quota)), *services])
        refused = [result for result in answer.results if result.action == "refused"]
        if refused:
            raise RuntimeError(f"the objects could not be created: {refused}")
        until = time.monotonic() + 60
        while not await self._services_ready(api):
            if time.monotonic() > until:
                raise RuntimeError(
                    "the services do not come up:\n" + "\n".join(one.log_tail() for one in self.cluster.programs)
                )
            await asyncio.sleep(0.2)

    async def _services_ready(self, api: Api) -> bool:
        replicas = (await api.list(Replica)).items
        return sum(one.status.phase in (Phase.READY, Phase.SERVING) for one in replicas) >= 2 * SERVICES

    # -- load --------------------------------------------------------------------------------------------------------------

    async def _submit(self, api: Api, until: float) -> None:
        number = 0
        while time.monotonic() < until:
            number += 1
            tree = self.rng.random() < TREE_SHARE
            one = workload(f"job-{number}", self.record, self.rng.randrange(*JOB_MS), service=False, tree=tree)
            with suppress(Unanswered):  # without an answer nothing was promised: only acknowledged jobs count
                try:
                    await api.apply([one])
                    self.jobs.append(one.metadata.name)
                except ApiError as error:
                    raise RuntimeError(f"a job was refused: {error}") from error
            await asyncio.sleep(self.rng.uniform(0.2, 1.8) * JOBS_EVERY_S)

    # -- faults ------------------------------------------------------------------------------------------------------------

    async def _inject_faults(self, until: float) -> None:
        while time.monotonic() < until and self._group is not None:
            await asyncio.sleep(self.rng.uniform(*PAUSE_S))
            able = [one for one in self.cluster.programs if one.name not in self._faulty]
            if not able:
                continue
            program = self.rng.choice(able)
            self._faulty.add(program.name)
            self._group.create_task(self._inject_fault(program, self.rng.random(), self.rng.uniform(*OUTAGE_S)))

    async def _inject_fault(self, program: Program, lot: float, outage_s: float) -> None:
        sort = program.name.partition("-")[0]
        if sort == "agent" and lot < LONG_STALL_SHARE:
            await self._stall_long(program)
        elif sort == "agent" and lot < LONG_STALL_SHARE + KEEPER_SHARE:
            await self._kill_keeper(program, outage_s, alone=lot < LONG_STALL_SHARE + KEEPER_SHARE / 2)
        elif lot < 0.55:
            self.counts[f"kill {sort}"] += 1
            program.kill()
            await asyncio.sleep(outage_s)
            program.start()
        else:
            self.counts[f"stop {sort}"] += 1
            program.signal(signal.SIGSTOP)
            await asyncio.sleep(outage_s)
            program.signal(signal.SIGCONT)
        self._faulty.discard(program.name)

    async def _stall_long(self, agent: Program) -> None:
        """Stop an agent for longer than fences last: its keeper must stop fenced work, which is replaced elsewhere."""
        self.counts["stop agent past its fence"] += 1
        from_ms = now_ms()
        agent.signal(signal.SIGSTOP)
        await asyncio.sleep(LONG_STALL_S)
        agent.signal(signal.SIGCONT)
        # On its return it stops work that was replaced meanwhile.
        to_ms = now_ms() + 20_000
        self.stalls += [Stall(node, from_ms, to_ms) for node in self.cluster.node_names(agent, NODES)]

    async def _kill_keeper(self, agent: Program, outage_s: float, *, alone: bool) -> None:
        """Fenced work and its process trees die with the keeper; services run on and are adopted."""
        self.counts["kill keeper" if alone else "kill keeper and agent"] += 1
        from_ms = now_ms()
        if not alone:
            agent.kill()
        self.cluster.kill_keeper(agent)
        if not alone:
            await asyncio.sleep(outage_s)
            agent.start()
        nodes = self.cluster.node_names(agent, NODES)
        self.stalls += [Stall(node, from_ms - 1_000, from_ms + 1_000, fenced_only=True) for node in nodes]

    # -- after the faults --------------------------------------------------------------------------------------------------

    async def _settle(self, api: Api) -> None:
        """End all faults and wait: all acknowledged jobs must end."""
        for program in self.cluster.programs:
            program.signal(signal.SIGCONT)
            if not program.is_running:
                program.start()
        until = time.monotonic() + SETTLE_S_MAX
        while time.monotonic() < until:
            with suppress(Unanswered):
                left = await self._unfinished(api)
                if not left:
                    return
            await asyncio.sleep(0.5)
        log(f"{len(left)} jobs are not done after {SETTLE_S_MAX} s: {left[:5]}")
        self.stuck += [f"{name} is not complete after {SETTLE_S_MAX} s" for name in left]

    async def _wait_until_settled(self, api: Api) -> None:
        """Wait until each service runs with its number of replicas and no more."""
        until = time.monotonic() + WHOLE_S_MAX
        while not await self._services_ready(api) or duplicates(self._lives()):
            if time.monotonic() > until:
                phases = {one.metadata.name: one.status.phase for one in (await api.list(Replica)).items}
                self.stuck += duplicates(self._lives()) or [f"the services lack replicas: {phases}"]
                return
            await asyncio.sleep(0.5)

    def _lives(self) -> list[ProcessLife]:
        return process_lives(self._lines())

    def _lines(self) -> list[Line]:
        lines = read(self.record.read_text())
        alive = frozenset(line.pid for line in lines if Path(f"/proc/{line.pid}").exists())
        return [*lines, *still_alive(lines, alive, now_ms())]

    async def _unfinished(self, api: Api) -> list[str]:
        jobs = (await api.list(Workload)).items
        done = {
            one.metadata.name for one in jobs if any(c.type == "Complete" and c.status == "True" for c in one.status.conditions)
        }
        return [name for name in self.jobs if name not in done]

    def _judge(self) -> Verdict:
        lines = self._lines()
        self.counts["attempts"] = len({line.token for line in lines})
        self.counts["jobs"] = len(self.jobs)
        keys = [f"replica/{TENANT}/{name}-0" for name in self.jobs]
        return judge(lines, jobs=keys, services=(f"replica/{TENANT}/service-",), stalls=self.stalls)

    async def _clear(self, api: Api) -> None:
        """Delete everything: then nothing may hold capacity, and no process of this run may be left."""
        for one in (await api.list(Workload)).items:
            await api.delete(Workload, one.metadata.name)
        until = time.monotonic() + 60
        while (left := (await api.list(Replica)).items) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.3)  # there is no event to wait for
        self.leaked += [f"{one.metadata.name} is still there ({one.status.phase}) after all was deleted" for one in left]
        self._find_leaked_processes(str(self.record))  # before keepers end all work
        tops = await api.top_nodes()
        self.leaked += [
            f"{one.node} still holds {one.requests}" for one in tops if one.requests.cpu_milli or one.requests.memory_bytes
        ]

    def _find_leaked_processes(self, *marks: str) -> None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and entry.name != str(os.getpid()):
                with suppress(OSError):
                    message = (entry / "cmdline").read_bytes()
                    if any(mark.encode() in message for mark in marks):
                        self.leaked.append(f"process {entry.name} is left: {message.replace(bytes(1), b' ').decode()[:160]}")


def workload(name: str, record: Path, duration_ms: int, *, service: bool, tree: bool = False) -> Workload:
    command: tuple[str, ...] = (sys.executable, "-I", "-S", str(WORK), str(record), str(duration_ms), "200")
    if tree:
        command = ("/bin/sh", "-c", '"$@"; exit $?', "tree", *command)
    template = Template(
        command=command,
        resources=Amount.parse({"cpu": "50m", "memory": "32Mi"}),
        stop_grace=Duration(2_000),
        sandbox="none",
        restart=Restart(),
    )
    spec = WorkloadSpec(
        type="service" if service else "job",
        template=template,
        replicas=2 if service else 1,
        fence=Duration(FENCE_MS),
        retries=3 if service else 100,
        rollout=Rollout(),
        disruption=Disruption(),
    )
    return Workload(metadata=Metadata(name=name, tenant=TENANT), spec=spec)


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--keep", type=Path, help="keep logs and records in this directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="remit-chaos-") as scratch:
        root = options.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        log(f"seed {options.seed}, in {root}")
        chaos = Chaos(root.absolute(), options.seconds, options.seed)
        verdict = asyncio.run(chaos.run())
    for message in [*verdict.broken, *chaos.stuck, *chaos.leaked]:
        log(f"BROKEN {message}")
    faults = sum(count for name, count in chaos.counts.items() if name.startswith(("kill", "stop")))
    found = {
        "lost": len(verdict.lost),
        "doubled": len(verdict.doubled),
        "cut": len(verdict.cut),
        "stuck": len(chaos.stuck),
        "leaked": len(chaos.leaked),
    }
    print(
        json.dumps(
            {
                "seed": options.seed,
                "seconds": options.seconds,
                "faults": faults,
                **chaos.counts,
                **found,
                "violations": sum(found.values()),
            }
        )
    )
    return 1 if sum(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
