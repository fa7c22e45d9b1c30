"""Lease silence reported by the authority's status."""

from __future__ import annotations

from remit.model.claims import Acquire, Actor, Vacate
from remit.model.resources import Duration
from remit.model.roles import Role
from tests.properties.authority_world import Scope, populated_scope, run

TERM = Duration(15_000)


async def acquire_lease(scope: Scope, name: str, lease: str) -> Actor:
    (epoch,) = await scope.must(Actor(name, Role.SCHEDULER), Acquire(lease, TERM))
    return Actor(name, Role.SCHEDULER, lease, epoch)


def test_status_reports_silence_of_each_role_lease() -> None:
    """Agent leases are left out: there may be very many of them."""

    async def scene() -> None:
        scope = await populated_scope("r1")
        holder = await acquire_lease(scope, "s1", "scheduler/a")
        scope.clock.at_ms += 4_000
        status = await scope.lead.authority.status()
        assert status.silent["scheduler/a"] == 4_000
        assert not any(lease.startswith("agent/") for lease in status.silent)
        assert await scope.lead.authority.renew(holder)
        assert (await scope.lead.authority.status()).silent["scheduler/a"] == 0
        await scope.close()

    run(scene())


def test_vacated_lease_is_not_reported() -> None:
    async def scene() -> None:
        scope = await populated_scope("r1")
        holder = await acquire_lease(scope, "s1", "scheduler/a")
        await scope.must(holder, Vacate("scheduler/a"))
        assert "scheduler/a" not in (await scope.lead.authority.status()).silent
        await scope.close()

    run(scene())


def test_new_authority_reports_listening_time_and_no_silence() -> None:
    async def scene() -> None:
        scope = await populated_scope("r1")
        await acquire_lease(scope, "s1", "scheduler/a")
        await scope.take_over()
        scope.clock.at_ms += 700
        status = await scope.lead.authority.status()
        assert (status.listened_ms, status.silent) == (700, {})
        await scope.close()

    run(scene())
