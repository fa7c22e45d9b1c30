"""Does everything hold while processes are killed and stopped at random? Real ones, under load, judged by the jobs' records.

    python -m tests.integration.chaos.driver --seconds 300 [--seed N] [--keep DIR]

A server, a scheduler, controllers, agents and keepers are killed (SIGKILL) and stopped for a while (SIGSTOP) again and again,
while jobs are submitted and services run; some jobs are a tree, of which the first process only waits. Jobs write their own
start, beats and end, with their attempt's token, to a file of the judge's.
Afterwards everything is left alone until it has settled. Then:

- *lost*: a job that was acknowledged and never came to its end;
- *doubled*: a replica that must never run twice did, or one attempt was started twice;
- *cut*: something was stopped by an outage shorter than its fence;
- *stuck*: a job that came to its end and is not said to be complete, or a service that is not whole again;
- *leaked*: a replica that holds room, or a process, that nobody asks for any more; looked for while all is up, and afterwards.

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
from tests.integration.chaos.job_records import Judged, Life, Line, Stall, crowds, judge, lives, read, still_alive

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
"""How long a part is stopped, or stays dead; shorter than what makes a service's replica be replaced."""
LONG_STALL_S: Final = FENCE_MS / 1000 + 6
LONG_STALL_SHARE: Final = 0.06
KEEPER_SHARE: Final = 0.25
"""Of what is done to an agent: so often it is its keeper that is killed, alone or with it."""
TREE_SHARE: Final = 0.3
JOB_MS: Final = (300, 4_000)
JOBS_EVERY_S: Final = 0.6
SETTLE_S_MAX: Final = 120
WHOLE_S_MAX: Final = 30


def now_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class Chaos:
    """One run."""

    def __init__(self, root: Path, seconds: float, seed: int) -> None:
        self.root, self.seconds = root, seconds
        self.lots = random.Random(seed)
        self.cluster = Cluster(root, agents=AGENTS, nodes=NODES, beat=f"{BEAT_MS}ms")
        self.record = root / "record"
        self.counts: Counter[str] = Counter()
        self.stalls: list[Stall] = []
        self.jobs: list[str] = []
        """Names of jobs that were acknowledged."""
        self.leaked: list[str] = []
        self.stuck: list[str] = []
        self._group: asyncio.TaskGroup | None = None
        self._hurt: set[str] = set()

    # -- the whole ---------------------------------------------------------------------------------------------------------

    async def run(self) -> Judged:
        self.cluster.start()
        try:
            async with Api(self.cluster.url, self.cluster.token, tenant=TENANT, timeout_s=60) as api:
                await self._set_up(api)
                until = time.monotonic() + self.seconds
                async with asyncio.TaskGroup() as group:
                    self._group = group
                    group.create_task(self._submit(api, until))
                    group.create_task(self._hurt_things(until))
                say(f"{self.seconds:.0f} s of faults are over: {dict(self.counts)}; {len(self.jobs)} jobs are to end")
                await self._settle(api)
                await self._until_whole(api)
                judged = self._judge()
                await self._clear(api)
        finally:
            self.cluster.end()
        self._look_for_processes(str(self.record), f"{self.root}/")
        return judged

    async def _set_up(self, api: Api) -> None:
        quota = Amount.parse({"cpu": "1000", "memory": "1Ti"})
        services = [workload(f"service-{n}", self.record, 0, service=True) for n in range(SERVICES)]
        answer = await api.apply([Tenant(metadata=Metadata(name=TENANT), spec=TenantSpec(quota=quota)), *services])
        refused = [result for result in answer.results if result.action == "refused"]
        if refused:
            raise RuntimeError(f"the stage could not be set: {refused}")
        until = time.monotonic() + 60
        while not await self._served(api):
            if time.monotonic() > until:
                raise RuntimeError(
                    "the services do not come up:\n" + "\n".join(one.last_words() for one in self.cluster.programs)
                )
            await asyncio.sleep(0.2)

    async def _served(self, api: Api) -> bool:
        replicas = (await api.list(Replica)).items
        return sum(one.status.phase in (Phase.READY, Phase.SERVING) for one in replicas) >= 2 * SERVICES

    # -- load --------------------------------------------------------------------------------------------------------------

    async def _submit(self, api: Api, until: float) -> None:
        number = 0
        while time.monotonic() < until:
            number += 1
            tree = self.lots.random() < TREE_SHARE
            one = workload(f"job-{number}", self.record, self.lots.randrange(*JOB_MS), service=False, tree=tree)
            with suppress(Unanswered):  # then nobody was promised anything: only what was acknowledged counts
                try:
                    await api.apply([one])
                    self.jobs.append(one.metadata.name)
                except ApiError as error:
                    raise RuntimeError(f"a job was refused: {error}") from error
            await asyncio.sleep(self.lots.uniform(0.2, 1.8) * JOBS_EVERY_S)

    # -- faults ------------------------------------------------------------------------------------------------------------

    async def _hurt_things(self, until: float) -> None:
        while time.monotonic() < until and self._group is not None:
            await asyncio.sleep(self.lots.uniform(*PAUSE_S))
            able = [one for one in self.cluster.programs if one.name not in self._hurt]
            if not able:
                continue
            program = self.lots.choice(able)
            self._hurt.add(program.name)
            self._group.create_task(self._hurt_one(program, self.lots.random(), self.lots.uniform(*OUTAGE_S)))

    async def _hurt_one(self, program: Program, lot: float, outage_s: float) -> None:
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
        self._hurt.discard(program.name)

    async def _stall_long(self, agent: Program) -> None:
        """Stopped for longer than fences last: its keeper must end what is fenced, and it is replaced elsewhere."""
        self.counts["stop agent past its fence"] += 1
        from_ms = now_ms()
        agent.signal(signal.SIGSTOP)
        await asyncio.sleep(LONG_STALL_S)
        agent.signal(signal.SIGCONT)
        # What it runs on and was replaced meanwhile it ends when it hears of that.
        to_ms = now_ms() + 20_000
        self.stalls += [Stall(node, from_ms, to_ms) for node in self.cluster.node_names(agent, NODES)]

    async def _kill_keeper(self, agent: Program, outage_s: float, *, alone: bool) -> None:
        """With it dies what is fenced, and its trees; services run on, and are adopted."""
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

    # -- afterwards --------------------------------------------------------------------------------------------------------

    async def _settle(self, api: Api) -> None:
        """Nothing is hurt any more: all that was acknowledged must come to its end by itself."""
        for program in self.cluster.programs:
            program.signal(signal.SIGCONT)
            if not program.runs:
                program.start()
        until = time.monotonic() + SETTLE_S_MAX
        while time.monotonic() < until:
            with suppress(Unanswered):
                left = await self._unfinished(api)
                if not left:
                    return
            await asyncio.sleep(0.5)
        say(f"{len(left)} jobs are not done after {SETTLE_S_MAX} s: {left[:5]}")
        self.stuck += [f"{name} is not complete after {SETTLE_S_MAX} s" for name in left]

    async def _until_whole(self, api: Api) -> None:
        """Each service runs as often as it is to, and no more: what was doubled meanwhile is ended again."""
        until = time.monotonic() + WHOLE_S_MAX
        while not await self._served(api) or crowds(self._lives()):
            if time.monotonic() > until:
                phases = {one.metadata.name: one.status.phase for one in (await api.list(Replica)).items}
                self.stuck += crowds(self._lives()) or [f"the services are not whole: {phases}"]
                return
            await asyncio.sleep(0.5)

    def _lives(self) -> list[Life]:
        return lives(self._lines())

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

    def _judge(self) -> Judged:
        lines = self._lines()
        self.counts["attempts"] = len({line.token for line in lines})
        self.counts["jobs"] = len(self.jobs)
        keys = [f"replica/{TENANT}/{name}-0" for name in self.jobs]
        return judge(lines, jobs=keys, services=(f"replica/{TENANT}/service-",), stalls=self.stalls)

    async def _clear(self, api: Api) -> None:
        """Everything is deleted: then nothing may be left that holds room, and no process of ours may run."""
        for one in (await api.list(Workload)).items:
            await api.delete(Workload, one.metadata.name)
        until = time.monotonic() + 60
        while (left := (await api.list(Replica)).items) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.3)  # it is asked, and tells nobody
        self.leaked += [f"{one.metadata.name} is still there ({one.status.phase}) after all was deleted" for one in left]
        self._look_for_processes(str(self.record))  # before keepers are told to end whatever they have
        tops = await api.top_nodes()
        self.leaked += [
            f"{one.node} still holds {one.requests}" for one in tops if one.requests.cpu_milli or one.requests.memory_bytes
        ]

    def _look_for_processes(self, *marks: str) -> None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and entry.name != str(os.getpid()):
                with suppress(OSError):
                    words = (entry / "cmdline").read_bytes()
                    if any(mark.encode() in words for mark in marks):
                        self.leaked.append(f"process {entry.name} is left: {words.replace(bytes(1), b' ').decode()[:160]}")


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


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--keep", type=Path, help="keep logs and records in this directory")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="remit-chaos-") as scratch:
        root = asked.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        say(f"seed {asked.seed}, in {root}")
        chaos = Chaos(root.absolute(), asked.seconds, asked.seed)
        judged = asyncio.run(chaos.run())
    for words in [*judged.broken, *chaos.stuck, *chaos.leaked]:
        say(f"BROKEN {words}")
    faults = sum(count for name, count in chaos.counts.items() if name.startswith(("kill", "stop")))
    found = {
        "lost": len(judged.lost),
        "doubled": len(judged.doubled),
        "cut": len(judged.cut),
        "stuck": len(chaos.stuck),
        "leaked": len(chaos.leaked),
    }
    print(
        json.dumps(
            {
                "seed": asked.seed,
                "seconds": asked.seconds,
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
