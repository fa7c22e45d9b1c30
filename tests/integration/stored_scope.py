"""Runs a real authority and scheduler on a data directory and leaves it for commands to inspect.

python -m tests.integration.stored_scope DATA MANIFEST... [--spawn WORKLOAD=COUNT...] [--stay]

Applies the manifests, marks nodes ready, creates replicas, and lets the scheduler place them until nothing changes; then prints
one line and ends, or, with --stay, keeps owning the directory until its stdin ends. Contains no tests.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from remit.assembly import embedded_authority
from remit.client.authority_client import AuthorityClient
from remit.client.endpoint import InProcessEndpoint
from remit.client.lease_holder import LeaseHold, acquire
from remit.commitment.authority import Authority
from remit.demo.authority_process import until_stdin_ends
from remit.model.claims import Accepted, Actor, AnyClaim, Apply, Mark, Spawn
from remit.model.kinds import Node, NodeHealth, Workload
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.reader import read
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.proposal.scheduler import Scheduler, SchedulerTiming
from remit.world.interfaces import World
from remit.world.production import production

TTL = Duration(60_000)
QUIET_MS = 400


async def must(client: AuthorityClient, *claims: AnyClaim) -> None:
    for claim, verdict in zip(claims, await client.submit_many(claims), strict=True):
        if not isinstance(verdict, Accepted):
            raise SystemExit(f"{claim} was {verdict}")


def client_of(authority: Authority, world: World, name: str, role: Role) -> AuthorityClient:
    return AuthorityClient({"authority": InProcessEndpoint(authority)}, Actor(name, role), world)


async def acquire_role(authority: Authority, world: World, role: Role) -> AuthorityClient:
    client = client_of(authority, world, role.value, role)
    lease = await acquire(client, world.clock, role.value, TTL)
    if not isinstance(lease, LeaseHold):
        raise SystemExit(f"{role}: {lease}")
    client.actor = lease.actor
    return client


async def prepare(authority: Authority, world: World, objects: list[AnyObject], spawn: dict[str, int]) -> None:
    people = client_of(authority, world, "ann", Role.OPERATOR)
    first = [obj for obj in objects if not isinstance(obj, Workload)]
    works = [obj for obj in objects if isinstance(obj, Workload)]
    await must(people, *(Apply(obj) for obj in first))
    await must(client_of(authority, world, "bob", Role.USER), *(Apply(obj) for obj in works))
    nodes = await acquire_role(authority, world, Role.NODES)
    for obj in first:
        row = await authority.store.get(f"node/{obj.metadata.name}") if isinstance(obj, Node) else None
        if row is not None:
            await must(nodes, Mark(obj.metadata.name, row.revision, NodeHealth.READY))
    workloads = await acquire_role(authority, world, Role.WORKLOADS)
    for work in works:
        meta = work.metadata
        await must(workloads, Spawn(meta.tenant, meta.name, 1, 0, spawn.get(meta.name, work.spec.replicas)))


async def wait_until_quiet(authority: Authority, world: World) -> None:
    """Wait until there was no commit for a while; a scheduler that only waits writes nothing."""
    before, since_ms = -1, world.clock.now_ms()
    while world.clock.now_ms() - since_ms < QUIET_MS:
        await world.clock.sleep_ms(50)
        now = await authority.store.revision()
        if now != before:
            before, since_ms = now, world.clock.now_ms()


async def run(data: Path, files: list[Path], spawn: dict[str, int], *, stay: bool) -> None:
    objects: list[AnyObject] = []
    for file in files:
        found = read(file.read_bytes(), str(file))
        if found.problems:
            raise SystemExit("\n".join(map(str, found.problems)))
        objects += found.objects
    world = production()
    try:
        async with embedded_authority(data, world) as authority, asyncio.TaskGroup() as group:
            running = group.create_task(authority.run())
            await prepare(authority, world, objects, spawn)
            client = client_of(authority, world, "scheduler-1", Role.SCHEDULER)
            scheduler = Scheduler(
                authority.store, authority.store, client, world, name="scheduler-1", timing=SchedulerTiming(lease_ms=2_000)
            )
            scheduling = group.create_task(scheduler.run())
            while scheduler.cycle is None:
                await world.clock.sleep_ms(20)
            await wait_until_quiet(authority, world)
            sys.stdout.write(f"settled at {await authority.store.revision()}\n")
            sys.stdout.flush()
            if stay:
                await until_stdin_ends()
            scheduling.cancel()
            running.cancel()
    finally:
        await world.offload.close()


def main() -> None:
    arguments = sys.argv[1:]
    stay = "--stay" in arguments
    spawn: dict[str, int] = {}
    while "--spawn" in arguments:
        at = arguments.index("--spawn")
        name, _, count = arguments[at + 1].partition("=")
        spawn[name] = int(count)
        del arguments[at : at + 2]
    data, *files = [Path(word) for word in arguments if word != "--stay"]
    asyncio.run(run(data, files, spawn, stay=stay))


if __name__ == "__main__":
    main()
