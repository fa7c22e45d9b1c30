"""Does the authority know whom it has heard, and tell it without being asked to write anything?"""

from __future__ import annotations

from remit.model.claims import Acquire, Actor, Role, Vacate
from remit.model.resources import Duration
from tests.properties.authority_world import Scope, furnished, run

TERM = Duration(15_000)


async def taken(scope: Scope, name: str, lease: str) -> Actor:
    (epoch,) = await scope.must(Actor(name, Role.SCHEDULER), Acquire(lease, TERM))
    return Actor(name, Role.SCHEDULER, lease, epoch)


def test_the_status_says_for_how_long_each_lease_of_a_role_was_not_renewed() -> None:
    """An agent's is not named: there may be very many of them."""

    async def scene() -> None:
        scope = await furnished("r1")
        holder = await taken(scope, "s1", "scheduler/a")
        scope.clock.at_ms += 4_000
        status = await scope.lead.authority.status()
        assert status.silent["scheduler/a"] == 4_000
        assert not any(lease.startswith("agent/") for lease in status.silent)
        assert await scope.lead.authority.renew(holder)
        assert (await scope.lead.authority.status()).silent["scheduler/a"] == 0
        await scope.close()

    run(scene())


def test_a_lease_that_was_given_back_is_not_named() -> None:
    async def scene() -> None:
        scope = await furnished("r1")
        holder = await taken(scope, "s1", "scheduler/a")
        await scope.must(holder, Vacate("scheduler/a"))
        assert "scheduler/a" not in (await scope.lead.authority.status()).silent
        await scope.close()

    run(scene())


def test_a_new_authority_says_for_how_long_it_has_listened__it_has_heard_nobody_yet() -> None:
    async def scene() -> None:
        scope = await furnished("r1")
        await taken(scope, "s1", "scheduler/a")
        await scope.take_over()
        scope.clock.at_ms += 700
        status = await scope.lead.authority.status()
        assert (status.listened_ms, status.silent) == (700, {})
        await scope.close()

    run(scene())
