"""Sends operations one step past a lawful limit.

Tries in the yard, each at one rule; nothing of others' is touched.

A code of refusal stands for many rules, and meddler.py is content with one of them. Here are rules that it would pass by: whose
quota, grant or lease it is, what may make room for what, how often a job is tried, which word of a peer still counts. Most
tries go as far as is lawful first, so that nothing but the rule itself stands in the way of the last step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from remit.law.lifecycle import edge
from remit.model.claims import (
    Acquire,
    Actor,
    Bind,
    Close,
    DeclareLost,
    Delete,
    Ganged,
    Issue,
    Move,
    Recognise,
    Refused,
    Reserve,
    Role,
    Spawn,
    Vacate,
    Vouch,
)
from remit.model.records import GrantSpec, Phase, Replica
from remit.model.resources import Amount, Duration
from remit.observation.watch_cache import Kept
from remit.simulate.actors.adversary_tenant import ASKED, HOME, NAME, NOWHERE, PRIORITY, RANK, TWIN, WANTED, Yard

ENOUGH: Final = Amount({"cpu": 2 * ASKED})
"""For one replica, so that it is not for want of amount that a draw is refused."""
MINE: Final = f"scheduler/{NAME}"
QUOTA: Final = f"tenant/{NAME}"


class Trespasser(Yard):
    """Each try answers whether it came to the point: the world is not always so."""

    async def _lent(self, tenant: str = NAME, holder: str = MINE) -> str:
        name = f"{NAME}-{self.world.ids.nonce()[:10]}"
        parent, ttl = f"tenant/{tenant}", Duration(60_000)
        spec = GrantSpec(holder=holder, amount=ENOUGH, parent=parent, tenant=tenant, purpose="offer", ttl=ttl)
        await self.say(Role.BUDGETS, Issue(name, spec))
        return name

    async def _draw(self, grant: str) -> bool:
        return await self.bind("plain", grant=grant) is not None

    # -- quota and grants ------------------------------------------------------------------------------------------------

    async def quota_of_another(self) -> bool:
        tenants = [key for key, _ in self.others("tenant/")]
        return bool(tenants) and await self._draw(self.chance.choice(tenants))

    async def grant_for_another(self) -> bool:
        """It holds the grant itself, but as one for another tenant's work."""
        return await self._draw(await self._lent(TWIN))

    async def grant_of_another(self) -> bool:
        return await self._draw(await self._lent(holder=f"{MINE}-other"))

    async def grant_lent_away(self) -> bool:
        asked = await self._draw(await self._lent(holder=NOWHERE))
        await self.say(Role.OPERATOR, DeclareLost(NOWHERE))
        return asked

    async def closed_grant(self) -> bool:
        """One that is still drawn on, so that it is not gone."""
        name = await self._lent()
        if not await self._draw(name):
            return False
        await self.say(Role.BUDGETS, Close(name))
        return await self._draw(name)

    async def budgets(self) -> bool:
        """Out of quota for emergencies: one with a share for this tenant, and one without."""
        asked = True
        for tenant in (NAME, TWIN):
            name = f"{NAME}-{self.world.ids.nonce()[:10]}"
            spec = GrantSpec(holder=MINE, amount=ENOUGH, shares={tenant: ENOUGH}, purpose="budget", ttl=Duration(60_000))
            await self.say(Role.BUDGETS, Issue(name, spec))
            asked = await self._draw(name) and asked
        return asked

    # -- leases ----------------------------------------------------------------------------------------------------------

    async def vacates_anothers(self) -> bool:
        await self.say(Role.SCHEDULER, Vacate(self.chance.choice(("scheduler", "repair", "node-lifecycle", "workloads"))))
        return True

    async def hands_over(self) -> bool:
        """Lawful: another takes the lease at once, and hands it back."""
        mine, twin = await self.actor(Role.ROLLOUT), Actor(TWIN, Role.ROLLOUT)
        self.forget_lease(mine)
        await self.say_as(mine, Vacate(mine.lease), Move("none", 1, "retire"))
        said = (await self.say_as(twin, Acquire(mine.lease, Duration(1_000))))[0]
        if isinstance(said, Refused):
            return False
        await self.say_as(mine, Vacate(mine.lease))
        await self.say_as(Actor(TWIN, Role.ROLLOUT, mine.lease, said.number), Vacate(mine.lease))
        return True

    # -- what is in use --------------------------------------------------------------------------------------------------

    async def classes_in_use(self) -> bool:
        await self.say(Role.OPERATOR, Delete("PriorityClass", RANK))
        return True

    async def region_in_use(self) -> bool:
        if not self.others("node/"):
            return False
        await self.say(Role.OPERATOR, Delete("Region", self.seat.scope))
        return True

    # -- room ------------------------------------------------------------------------------------------------------------

    async def victim_elsewhere(self) -> bool:
        """A lesser one, but not on the node where room is wanted."""
        found = await self.pending("ranked")
        busy = [(key, seen) for key, seen in self.others("replica/") if _lesser(seen.thing)]
        if found is None or not busy:
            return False
        key, seen = self.chance.choice(busy)
        await self.say(Role.SCHEDULER, Reserve(*found, HOME, QUOTA, victims={key: seen.revision}))
        return True

    async def meek(self) -> bool:
        """Its class has a higher priority, and preempts nobody all the same."""
        placed, found = await self.placed(), await self.pending("meek")
        if placed is None or found is None:
            return False
        await self.say(Role.SCHEDULER, Reserve(*found, HOME, QUOTA, victims={placed[0]: placed[2]}))
        return True

    async def hasty(self) -> bool:
        """Room is made, lawfully; and taken before it is there."""
        placed, found = await self.placed(), await self.pending("ranked")
        if placed is None or found is None:
            return False
        await self.say(Role.SCHEDULER, Reserve(*found, HOME, QUOTA, victims={placed[0]: placed[2]}))
        seen = await self.look(found[0])
        if seen is None or seen.thing.status.phase is not Phase.RESERVED:
            return False
        grant = await self._lent()
        await self.say(Role.SCHEDULER, *(Bind(found[0], seen.revision, HOME, one) for one in (grant, QUOTA)))
        return True

    async def broken_gang(self) -> bool:
        """Two of three are bound together; one of them leaves, so one more is not enough any more."""
        waiting = [(key, self.view.rows[key].revision) for key in self.own("pack", Phase.PENDING)]
        if len(waiting) < WANTED["pack"]:
            await self.tidy()
            taken = {self.view.get(key).spec.index for key in self.own("pack", *Phase)}
            missing = [index for index in range(WANTED["pack"]) if index not in taken]
            if missing:
                await self.say(Role.WORKLOADS, *(Spawn(NAME, f"{NAME}-pack", 1, index) for index in missing))
            return False
        bound = (await self.say(Role.SCHEDULER, Ganged(tuple(Bind(*one, HOME, QUOTA) for one in waiting[:2]))))[0]
        seen = await self.look(waiting[0][0])
        if isinstance(bound, Refused) or seen is None:
            return False
        await self.say(Role.WORKLOADS, Move(waiting[0][0], seen.revision, "remove"))
        await self.say(Role.SCHEDULER, Bind(*waiting[2], HOME, QUOTA))
        return True

    # -- jobs ------------------------------------------------------------------------------------------------------------

    async def _through(self, workload: str, *steps: tuple[Role, str, str]) -> tuple[str, Kept] | None:
        """One replica of it, placed at home and moved on, step by step."""
        placed = await self.placed(workload)
        seen = None if placed is None else await self.look(placed[0])
        for role, transition, result in steps:
            if placed is None or seen is None:
                return None
            await self.say(role, Move(placed[0], seen.revision, transition, seen.thing.status.attempt, result))
            seen = await self.look(placed[0])
        if placed is None or seen is None or seen.thing.status.phase is not Phase.RELEASED:
            return None
        return placed[0], seen

    async def tried_enough(self) -> bool:
        """A job that has no retries left."""
        steps = (Role.AGENT, "start", ""), (Role.AGENT, "crash", "error"), (Role.REPAIR, "release", "")
        return await self._again(await self._through("once", *steps))

    async def done(self) -> bool:
        steps = (Role.AGENT, "start", ""), (Role.AGENT, "run", ""), (Role.AGENT, "finish", "ok"), (Role.WORKLOADS, "settle", "")
        return await self._again(await self._through("errand", *steps))

    async def _again(self, found: tuple[str, Kept] | None) -> bool:
        if found is None:
            await self.tidy()
            return False
        await self.say(Role.REPAIR, Move(found[0], found[1].revision, "requeue"))
        return True

    # -- peers -----------------------------------------------------------------------------------------------------------

    async def past_peers(self) -> bool:
        """A peer that was restored, and is then given up: what any of its past incarnations says is not heeded."""
        peer = self.view.get(f"peer/{NOWHERE}")
        first, second, third = (f"{NAME}-{self.world.ids.nonce()[:8]}" for _ in range(3))
        await self.say(Role.OPERATOR, Recognise(NOWHERE, first, "" if peer is None else peer.spec.incarnation))
        await self.say(Role.OPERATOR, Recognise(NOWHERE, second, first), Recognise(NOWHERE, second, first))
        await self.say(Role.OPERATOR, Recognise(NOWHERE, first, second), Recognise(NOWHERE, third, first))
        await self.say(Role.OPERATOR, DeclareLost(NOWHERE))
        here = self.view.head.incarnation if self.view.head is not None else ""
        await self.say(Role.BUDGETS, *(Vouch(NOWHERE, 1, {}, sender, here) for sender in (first, second)))
        await self.say(Role.OPERATOR, Recognise(NOWHERE, second))
        return True


def _lesser(replica: Replica) -> bool:
    return replica.spec.priority < PRIORITY and edge("preempt", replica.status.phase) is not None


TRESPASSES: Final[Mapping[str, Callable[[Trespasser], Awaitable[bool]]]] = {
    "quota of another": Trespasser.quota_of_another,
    "grant for another": Trespasser.grant_for_another,
    "grant of another": Trespasser.grant_of_another,
    "grant lent away": Trespasser.grant_lent_away,
    "closed grant": Trespasser.closed_grant,
    "budgets": Trespasser.budgets,
    "lease of another": Trespasser.vacates_anothers,
    "lease handed over": Trespasser.hands_over,
    "class in use": Trespasser.classes_in_use,
    "region in use": Trespasser.region_in_use,
    "victim elsewhere": Trespasser.victim_elsewhere,
    "no preemptor": Trespasser.meek,
    "victims not gone": Trespasser.hasty,
    "gang that leaves": Trespasser.broken_gang,
    "no retries left": Trespasser.tried_enough,
    "work that is done": Trespasser.done,
    "past peers": Trespasser.past_peers,
}
"""What is tried, beside the codes that meddler.py aims at."""
