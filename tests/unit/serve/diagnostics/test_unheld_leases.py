"""Is it said that nobody acts, once that is known, and not before? Of a scheduler and of controllers alike."""

from __future__ import annotations

import asyncio
from typing import Any

from remit.correction.controller_set import CONTROLLERS
from remit.model.claims import Accepted, Acquire, Actor, Role, Vacate
from remit.model.resources import Duration
from remit.serve.diagnostics.status_routes import LEASE_COMPONENTS
from tests.unit.serve.in_memory_server import BEAT_MS, Api, node, story, tenant, workload

TERM_S = 12 * BEAT_MS / 1_000
"""So long a new authority gives everybody to be heard."""


async def acts(asked: Api, role: Role, lease: str, ttl_ms: int = 60_000) -> Actor:
    verdict = await asked.desk.authority.client(Actor("one", role)).submit(Acquire(lease, Duration(ttl_ms)))
    assert isinstance(verdict, Accepted), verdict
    async with asyncio.timeout(10):
        while asked.desk.watch_cache.revision < verdict.revision:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
    return Actor("one", role, lease, verdict.number)


async def idle(asked: Api) -> dict[str, Any]:
    told = (await asked.get("/v1/status")).json
    return {one["lease"]: one for one in told.get("idle", ())}


async def until_idle(asked: Api, *leases: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while not set(leases) <= (found := await idle(asked)).keys():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.05)
    return found


def test_everybody_who_should_act_is_looked_for() -> None:
    assert (
        len(LEASE_COMPONENTS) == len(CONTROLLERS) + 1
        and {"scheduler", "workloads", "workloads/cascade"} <= LEASE_COMPONENTS.keys()
    )
    assert set(LEASE_COMPONENTS.values()) == {"scheduler", "controllers"}


@story
async def test_that_nobody_acts_is_told_with_the_lease_and_the_cure_once_there_was_time_to_begin(asked: Api) -> None:
    assert await idle(asked) == {}, "they may be about to begin"
    await acts(asked, Role.REPAIR, "repair")
    mortal = await acts(asked, Role.WORKLOADS, "workloads", 300)
    await asyncio.sleep(TERM_S)
    found = await until_idle(asked, *(LEASE_COMPONENTS.keys() - {"repair"}))
    assert "repair" not in found
    assert found["endpoints"]["why"] == "lease endpoints is not held: it was never acquired"
    assert found["workloads"]["silentMs"] > 300 and "was not renewed for 1" in found["workloads"]["why"]
    assert "start `remit controllers`" in found["workloads"]["cure"] and "start `remit scheduler`" in found["scheduler"]["cure"]
    again = await acts(asked, Role.WORKLOADS, "workloads")
    assert "workloads" not in await idle(asked) and again.epoch > mortal.epoch
    assert isinstance(await asked.desk.authority.client(again).submit(Vacate("workloads")), Accepted)
    found = await until_idle(asked, "workloads")
    assert found["workloads"]["why"] == "lease workloads is not held: it was released"
    await acts(asked, Role.SCHEDULER, "scheduler/second", 60_000)
    assert "scheduler" not in await idle(asked), "one that acts beside others has a lease of its own"


@story
async def test_work_that_nobody_makes_or_places_says_so_when_it_is_explained(asked: Api) -> None:
    every = workload("every", type="daemon")
    del every["spec"]["replicas"]
    await asked.must("POST", "/v1/apply", [tenant(), node("n1"), every, workload("web")])
    early = (await asked.get("/v1/tenants/acme/workloads/every/explain")).json
    assert (early["limit"], early["unattended"]) == ("", "")
    await until_idle(asked, "workloads", "scheduler")
    daemon = (await asked.get("/v1/tenants/acme/workloads/every/explain")).json
    assert daemon["limit"] == "missing"
    assert daemon["unattended"].startswith("lease workloads is not held: it was never acquired; start `remit controllers`")
    service = (await asked.get("/v1/tenants/acme/workloads/web/explain")).json
    assert "lease scheduler" in service["unattended"] and "lease workloads" not in service["unattended"], "it came with its own"
    await acts(asked, Role.WORKLOADS, "workloads")
    assert (await asked.get("/v1/tenants/acme/workloads/every/explain")).json["unattended"] == ""
