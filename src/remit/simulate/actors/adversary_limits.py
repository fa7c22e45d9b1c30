"""Sends operations one step past a lawful limit.

A refusal code covers several rules, and adversary.py stops at the first one. These attempts cover other rules: who owns a
quota, grant or lease, what may preempt what, how often a job is retried, which incarnation of a peer is current. Most of
them take valid steps first, so that only the rule itself can refuse the last step. Only the adversary's own objects are
affected.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from remit.law.lifecycle import find_transition
from remit.model.claims import (
    AcceptIncarnation,
    Acquire,
    Actor,
    Bind,
    BindGang,
    Close,
    ConfirmHoldings,
    DeclareLost,
    Delete,
    Issue,
    Move,
    Refused,
    Reserve,
    Spawn,
    Vacate,
)
from remit.model.records import GrantSpec, Phase, Replica
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from remit.observation.watch_cache import CachedRow
from remit.simulate.actors.adversary_tenant import (
    HOME,
    NAME,
    NOWHERE,
    PREEMPTING,
    PRIORITY,
    REPLICA_CPU,
    REPLICAS,
    TWIN,
    AdversaryTenant,
)

ENOUGH: Final = Amount({"cpu": 2 * REPLICA_CPU})
"""Enough for one replica, so that a draw is not refused for lack of capacity."""
OWN_LEASE: Final = f"scheduler/{NAME}"
OWN_QUOTA: Final = f"tenant/{NAME}"


class LimitAdversary(AdversaryTenant):
    """Each attempt returns whether it got as far as the invalid step; its preconditions do not always hold."""

    async def _issue_grant(self, tenant: str = NAME, holder: str = OWN_LEASE) -> str:
        name = f"{NAME}-{self.world.ids.nonce()[:10]}"
        parent, ttl = f"tenant/{tenant}", Duration(60_000)
        spec = GrantSpec(holder=holder, amount=ENOUGH, parent=parent, tenant=tenant, purpose="offer", ttl=ttl)
        await self.send(Role.BUDGETS, Issue(name, spec))
        return name

    async def _draw(self, grant: str) -> bool:
        return await self.bind("plain", grant=grant) is not None

    # -- quota and grants ------------------------------------------------------------------------------------------------

    async def quota_of_another(self) -> bool:
        tenants = [key for key, _ in self.others("tenant/")]
        return bool(tenants) and await self._draw(self.rng.choice(tenants))

    async def grant_for_another(self) -> bool:
        """A grant that it holds itself, but for the work of another tenant."""
        return await self._draw(await self._issue_grant(TWIN))

    async def grant_of_another(self) -> bool:
        return await self._draw(await self._issue_grant(holder=f"{OWN_LEASE}-other"))

    async def grant_held_by_scope(self) -> bool:
        attempted = await self._draw(await self._issue_grant(holder=NOWHERE))
        await self.send(Role.OPERATOR, DeclareLost(NOWHERE))
        return attempted

    async def closed_grant(self) -> bool:
        """A closed grant that is still drawn on, so that it still exists."""
        name = await self._issue_grant()
        if not await self._draw(name):
            return False
        await self.send(Role.BUDGETS, Close(name))
        return await self._draw(name)

    async def emergency_budgets(self) -> bool:
        """Draw on emergency budgets: one with a share for this tenant and one without."""
        attempted = True
        for tenant in (NAME, TWIN):
            name = f"{NAME}-{self.world.ids.nonce()[:10]}"
            spec = GrantSpec(holder=OWN_LEASE, amount=ENOUGH, shares={tenant: ENOUGH}, purpose="budget", ttl=Duration(60_000))
            await self.send(Role.BUDGETS, Issue(name, spec))
            attempted = await self._draw(name) and attempted
        return attempted

    # -- leases ----------------------------------------------------------------------------------------------------------

    async def vacate_foreign_lease(self) -> bool:
        await self.send(Role.SCHEDULER, Vacate(self.rng.choice(("scheduler", "repair", "node-lifecycle", "workloads"))))
        return True

    async def transfer_lease(self) -> bool:
        """A valid hand-over: another holder takes the lease at once, and gives it up again."""
        mine, twin = await self.actor(Role.ROLLOUT), Actor(TWIN, Role.ROLLOUT)
        self.forget_lease(mine)
        await self.send_as(mine, Vacate(mine.lease), Move("none", 1, "retire"))
        verdict = (await self.send_as(twin, Acquire(mine.lease, Duration(1_000))))[0]
        if isinstance(verdict, Refused):
            return False
        await self.send_as(mine, Vacate(mine.lease))
        await self.send_as(Actor(TWIN, Role.ROLLOUT, mine.lease, verdict.number), Vacate(mine.lease))
        return True

    # -- objects in use --------------------------------------------------------------------------------------------------

    async def classes_in_use(self) -> bool:
        await self.send(Role.OPERATOR, Delete("PriorityClass", PREEMPTING))
        return True

    async def region_in_use(self) -> bool:
        if not self.others("node/"):
            return False
        await self.send(Role.OPERATOR, Delete("Region", self.context.scope))
        return True

    # -- preemption and gangs --------------------------------------------------------------------------------------------

    async def victim_elsewhere(self) -> bool:
        """A victim of lower priority, but not on the node where capacity is needed."""
        pending = await self.pending("ranked")
        busy = [(key, row) for key, row in self.others("replica/") if _is_possible_victim(row.obj)]
        if pending is None or not busy:
            return False
        key, row = self.rng.choice(busy)
        await self.send(Role.SCHEDULER, Reserve(*pending, HOME, OWN_QUOTA, victims={key: row.revision}))
        return True

    async def non_preempting(self) -> bool:
        """A replica of higher priority whose class does not preempt."""
        placed, pending = await self.placed(), await self.pending("meek")
        if placed is None or pending is None:
            return False
        await self.send(Role.SCHEDULER, Reserve(*pending, HOME, OWN_QUOTA, victims={placed[0]: placed[2]}))
        return True

    async def bind_before_victims_gone(self) -> bool:
        """Reserve with a valid victim, and bind before the victim is gone."""
        placed, pending = await self.placed(), await self.pending("ranked")
        if placed is None or pending is None:
            return False
        await self.send(Role.SCHEDULER, Reserve(*pending, HOME, OWN_QUOTA, victims={placed[0]: placed[2]}))
        row = await self.read(pending[0])
        if row is None or row.obj.status.phase is not Phase.RESERVED:
            return False
        grant = await self._issue_grant()
        await self.send(Role.SCHEDULER, *(Bind(pending[0], row.revision, HOME, source) for source in (grant, OWN_QUOTA)))
        return True

    async def broken_gang(self) -> bool:
        """Bind two of three replicas as a gang, remove one of them, and bind the third: one more is no longer enough."""
        waiting = [(key, self.view.rows[key].revision) for key in self.own_replicas("pack", Phase.PENDING)]
        if len(waiting) < REPLICAS["pack"]:
            await self.clean_up()
            taken = {self.view.get(key).spec.index for key in self.own_replicas("pack", *Phase)}
            missing = [index for index in range(REPLICAS["pack"]) if index not in taken]
            if missing:
                await self.send(Role.WORKLOADS, *(Spawn(NAME, f"{NAME}-pack", 1, index) for index in missing))
            return False
        bound = (await self.send(Role.SCHEDULER, BindGang(tuple(Bind(*member, HOME, OWN_QUOTA) for member in waiting[:2]))))[0]
        row = await self.read(waiting[0][0])
        if isinstance(bound, Refused) or row is None:
            return False
        await self.send(Role.WORKLOADS, Move(waiting[0][0], row.revision, "remove"))
        await self.send(Role.SCHEDULER, Bind(*waiting[2], HOME, OWN_QUOTA))
        return True

    # -- jobs ------------------------------------------------------------------------------------------------------------

    async def _finish_job(self, workload: str, *steps: tuple[Role, str, str]) -> tuple[str, CachedRow] | None:
        """Place a replica of this workload on `HOME` and move it through these transitions."""
        placed = await self.placed(workload)
        row = None if placed is None else await self.read(placed[0])
        for role, transition, result in steps:
            if placed is None or row is None:
                return None
            await self.send(role, Move(placed[0], row.revision, transition, row.obj.status.attempt, result))
            row = await self.read(placed[0])
        if placed is None or row is None or row.obj.status.phase is not Phase.RELEASED:
            return None
        return placed[0], row

    async def retries_exhausted(self) -> bool:
        """A job without retries left."""
        steps = (Role.AGENT, "start", ""), (Role.AGENT, "crash", "error"), (Role.REPAIR, "release", "")
        return await self._requeue(await self._finish_job("once", *steps))

    async def finished_job(self) -> bool:
        steps = (Role.AGENT, "start", ""), (Role.AGENT, "run", ""), (Role.AGENT, "finish", "ok"), (Role.WORKLOADS, "settle", "")
        return await self._requeue(await self._finish_job("errand", *steps))

    async def _requeue(self, pending: tuple[str, CachedRow] | None) -> bool:
        if pending is None:
            await self.clean_up()
            return False
        await self.send(Role.REPAIR, Move(pending[0], pending[1].revision, "requeue"))
        return True

    # -- peers -----------------------------------------------------------------------------------------------------------

    async def past_incarnations(self) -> bool:
        """A peer is restored and then declared lost: messages from its earlier incarnations must be refused."""
        peer = self.view.get(f"peer/{NOWHERE}")
        first, second, third = (f"{NAME}-{self.world.ids.nonce()[:8]}" for _ in range(3))
        await self.send(Role.OPERATOR, AcceptIncarnation(NOWHERE, first, "" if peer is None else peer.spec.incarnation))
        await self.send(Role.OPERATOR, AcceptIncarnation(NOWHERE, second, first), AcceptIncarnation(NOWHERE, second, first))
        await self.send(Role.OPERATOR, AcceptIncarnation(NOWHERE, first, second), AcceptIncarnation(NOWHERE, third, first))
        await self.send(Role.OPERATOR, DeclareLost(NOWHERE))
        here = self.view.head.incarnation if self.view.head is not None else ""
        await self.send(Role.BUDGETS, *(ConfirmHoldings(NOWHERE, 1, {}, sender, here) for sender in (first, second)))
        await self.send(Role.OPERATOR, AcceptIncarnation(NOWHERE, second))
        return True


def _is_possible_victim(replica: Replica) -> bool:
    return replica.spec.priority < PRIORITY and find_transition("preempt", replica.status.phase) is not None


LIMIT_ATTEMPTS: Final[Mapping[str, Callable[[LimitAdversary], Awaitable[bool]]]] = {
    "quota of another": LimitAdversary.quota_of_another,
    "grant for another": LimitAdversary.grant_for_another,
    "grant of another": LimitAdversary.grant_of_another,
    "grant lent away": LimitAdversary.grant_held_by_scope,
    "closed grant": LimitAdversary.closed_grant,
    "budgets": LimitAdversary.emergency_budgets,
    "lease of another": LimitAdversary.vacate_foreign_lease,
    "lease handed over": LimitAdversary.transfer_lease,
    "class in use": LimitAdversary.classes_in_use,
    "region in use": LimitAdversary.region_in_use,
    "victim elsewhere": LimitAdversary.victim_elsewhere,
    "no preemptor": LimitAdversary.non_preempting,
    "victims not gone": LimitAdversary.bind_before_victims_gone,
    "gang that leaves": LimitAdversary.broken_gang,
    "no retries left": LimitAdversary.retries_exhausted,
    "work that is done": LimitAdversary.finished_job,
    "past peers": LimitAdversary.past_incarnations,
}
"""All attempts, in addition to the codes of adversary.py."""
