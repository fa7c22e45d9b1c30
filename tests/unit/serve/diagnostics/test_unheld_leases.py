"""Unheld leases: reported for schedulers and controllers once known, and not before."""

from __future__ import annotations

import asyncio
from typing import Any

from remit.correction.controller_set import CONTROLLERS
from remit.model.claims import Accepted, Acquire, Actor, Vacate
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.serve.diagnostics.status_routes import LEASE_COMPONENTS
from tests.unit.serve.in_memory_server import BEAT_MS, Api, http_test, node, tenant, workload

TERM_S = 12 * BEAT_MS / 1_000
"""Time that a new authority gives components to acquire their leases."""


async def acquire(api: Api, role: Role, lease: str, ttl_ms: int = 60_000) -> Actor:
    verdict = await api.server.authority.client(Actor("one", role)).submit(Acquire(lease, Duration(ttl_ms)))
    assert isinstance(verdict, Accepted), verdict
    async with asyncio.timeout(10):
        while api.server.watch_cache.revision < verdict.revision:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.005)
    return Actor("one", role, lease, verdict.number)


async def unheld_leases(api: Api) -> dict[str, Any]:
    status = (await api.get("/v1/status")).json
    return {one["lease"]: one for one in status.get("idle", ())}


async def wait_for_unheld(api: Api, *leases: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while not set(leases) <= (found := await unheld_leases(api)).keys():  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.05)
    return found


def test_leases_of_scheduler_and_every_controller_are_checked() -> None:
    assert (
        len(LEASE_COMPONENTS) == len(CONTROLLERS) + 1
        and {"scheduler", "workloads", "workloads/cascade"} <= LEASE_COMPONENTS.keys()
    )
    assert set(LEASE_COMPONENTS.values()) == {"scheduler", "controllers"}


@http_test
async def test_unheld_lease_is_reported_with_fix_after_startup_time(api: Api) -> None:
    assert await unheld_leases(api) == {}, "components may be starting"
    await acquire(api, Role.REPAIR, "repair")
    expiring = await acquire(api, Role.WORKLOADS, "workloads", 300)
    await asyncio.sleep(TERM_S)
    found = await wait_for_unheld(api, *(LEASE_COMPONENTS.keys() - {"repair"}))
    assert "repair" not in found
    assert found["endpoints"]["why"] == "lease endpoints (remit controllers) is not held: it was never acquired"
    assert found["workloads"]["silentMs"] > 300 and "not held: not renewed for 1" in found["workloads"]["why"]
    assert "start `remit controllers`" in found["workloads"]["cure"] and "start `remit scheduler`" in found["scheduler"]["cure"]
    again = await acquire(api, Role.WORKLOADS, "workloads")
    assert "workloads" not in await unheld_leases(api) and again.epoch > expiring.epoch
    assert isinstance(await api.server.authority.client(again).submit(Vacate("workloads")), Accepted)
    found = await wait_for_unheld(api, "workloads")
    assert found["workloads"]["why"] == "lease workloads (remit controllers) is not held: it was released"
    await acquire(api, Role.SCHEDULER, "scheduler/second", 60_000)
    assert "scheduler" not in await unheld_leases(api), "a second scheduler has its own lease"


@http_test
async def test_explanation_names_component_whose_lease_is_unheld(api: Api) -> None:
    every = workload("every", type="daemon")
    del every["spec"]["replicas"]
    await api.must("POST", "/v1/apply", [tenant(), node("n1"), every, workload("web")])
    early = (await api.get("/v1/tenants/acme/workloads/every/explain")).json
    assert (early["limit"], early["unattended"]) == ("", "")
    await wait_for_unheld(api, "workloads", "scheduler")
    daemon = (await api.get("/v1/tenants/acme/workloads/every/explain")).json
    assert daemon["limit"] == "missing"
    never = "lease workloads (remit controllers) is not held: it was never acquired; start `remit controllers`"
    assert daemon["unattended"].startswith(never)
    service = (await api.get("/v1/tenants/acme/workloads/web/explain")).json
    assert "lease scheduler" in service["unattended"] and "lease workloads" not in service["unattended"], (
        "its replica was created with it"
    )
    await acquire(api, Role.WORKLOADS, "workloads")
    assert (await api.get("/v1/tenants/acme/workloads/every/explain")).json["unattended"] == ""
