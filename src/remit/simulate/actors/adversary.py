"""Sends invalid operations to reach every refusal code.

The adversary sends one invalid operation at a time, in every role. Each aims at one code of `model.claims.Code` (see
`ATTEMPTS_BY_CODE`), most of them inside its own tenant (adversary_tenant.py); adversary_limits.py has further attempts
there. About objects of other tenants it only sends what cannot be accepted: from the wrong role, at an old revision, from
the wrong phase, with a device that does not exist. It uses its own leases only, `<role>/meddler`. So no valid work is
affected.

`POLICY_LAPSED` is reached when the policies of the region are past their lease, `AWAITING_REPORTS` also after a restore;
both are tried each time it is their turn. `INTERNAL_ERROR` needs a bug in Remit, so nothing aims at it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from remit.client.authority_client import RetriesExhausted
from remit.law.lifecycle import NODE_HEALTH_TRANSITIONS, OWNERS, find_transition
from remit.model.claims import (
    Abandon,
    Accept,
    AcceptIncarnation,
    Acquire,
    Actor,
    Adopt,
    AnyClaim,
    Apply,
    Bind,
    BindGang,
    Close,
    Code,
    ConfirmHoldings,
    Credit,
    DeclareLost,
    Delete,
    Evidence,
    Forget,
    Issue,
    Mark,
    Move,
    Operation,
    OperationID,
    RecordDecision,
    RecordEvent,
    Refused,
    Renew,
    Report,
    Reserve,
    ReturnCapacity,
    Rollback,
    SetCondition,
    Spawn,
    Vacate,
    Verdict,
    operation_id,
)
from remit.model.kinds import NodeHealth, Policy, PolicyAllow, PolicyMatch, PolicyRule, PolicySpec, Region
from remit.model.metadata import Condition, Metadata
from remit.model.objects import key_of
from remit.model.records import DecisionSpec, EventSpec, GrantSpec, Phase, SummarySpec
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from remit.simulate.actors.adversary_limits import LIMIT_ATTEMPTS, LimitAdversary
from remit.simulate.actors.adversary_tenant import CORDONED, HOME, NAME, NEW, NOWHERE
from remit.simulate.actors.role import RoleContext

SMALL_AMOUNT: Final = Amount({"cpu": 10})
OWN_CLAIM_TRANSITIONS: Final = frozenset({"create", "reserve", "bind", "confirm", "forget", "distrust"})
"""Transitions that have claim types of their own: a `Move` that names one is invalid."""


class Adversary(LimitAdversary):
    """Sends an invalid operation every `mean_beats` heartbeat intervals on average. `parent` is the scope where policies are
    published, if it is not this one.

    In the quiet phase it sends nothing invalid and deletes its own objects, again whenever a restore brings them back.
    """

    def __init__(self, context: RoleContext, parent: RoleContext | None = None, *, mean_beats: int = 2) -> None:
        super().__init__(context)
        self.refusal_counts: dict[Code, int] = {}
        self.attempt_counts: dict[str, int] = {}
        """How often each attempt of adversary_limits.py got as far as the invalid step."""
        self._remaining: list[Code | str] = []
        self._mean_ms = mean_beats * context.timing.heartbeat_ms
        self._parent = parent

    async def run(self) -> None:
        while True:
            await self.world.clock.sleep_ms(1 + self.rng.jitter_ms(2 * self._mean_ms))
            if self.view.head is not None:
                await self._try(self.delete_objects if self.context.timing.quiet else self._attempt)

    async def _try(self, attempt: Callable[[], Awaitable[object]]) -> None:
        try:
            await attempt()
        except RetriesExhausted as error:
            self.report_abandoned(error)

    async def _attempt(self) -> None:
        drawn = self.rng.randrange(12)
        if drawn == 0:
            await self.clean_up()
        elif drawn == 1:
            await self.send_soft_claims()
        else:
            self._remaining = self._remaining or self.rng.shuffled([*ATTEMPTS_BY_CODE, *LIMIT_ATTEMPTS])
            attempt = self._remaining.pop()
            await self.ensure_objects()
            if not await self._try_attempt(attempt):
                self._remaining.insert(0, attempt)  # the preconditions did not hold; retried after all others
            await self.close_nodes()

    async def _try_attempt(self, attempt: Code | str) -> bool:
        if isinstance(attempt, Code):
            await ATTEMPTS_BY_CODE[attempt](self)
            return attempt in self.refusal_counts
        reached_limit = await LIMIT_ATTEMPTS[attempt](self)
        self.attempt_counts[attempt] = self.attempt_counts.get(attempt, 0) + reached_limit
        return reached_limit

    def _record_verdicts(self, actor: Actor, verdicts: Any) -> list[Verdict]:
        for verdict in verdicts:
            if isinstance(verdict, Refused):
                self.refusal_counts[verdict.code] = self.refusal_counts.get(verdict.code, 0) + 1
        return super()._record_verdicts(actor, verdicts)

    # -- soft claims -----------------------------------------------------------------------------------------------------

    async def send_soft_claims(self) -> None:
        """Send soft claims (events, decisions, reports, conditions) in a random role. They have no effect on placement, so they
        may be about any object.
        """
        role = self.rng.choice([role for role in Role if role is not Role.AUTHORITY])
        names = [key for key, _ in self.others("node/")] or [f"node/{HOME}"]
        about, number = self.rng.choice(names), self.rng.randrange(100)
        claims: list[AnyClaim] = [
            RecordEvent(f"{NAME}-{number}", EventSpec(regarding=about, reason="Seen", source=NAME)),
            RecordDecision(f"{NAME}-{number}", NAME, DecisionSpec(replicas={about: ""}, reason="a guess")),
            Report(f"{NAME}-{number % 8}", SummarySpec(holder=NAME, epoch=1, sequence=number, used=SMALL_AMOUNT)),
            SetCondition("Node", HOME, Condition(type=f"Odd{number % 4}", status="Unknown", observed_generation=number)),
            SetCondition("Node", f"{NAME}-none", Condition(type="Odd", status="True")),
            Report("", SummarySpec(holder=NAME, epoch=1, sequence=1)),
        ]
        await self.send(role, *self.rng.shuffled(claims)[:3])

    # -- roles and leases ------------------------------------------------------------------------------------------------

    async def wrong_role(self) -> None:
        await self.send(Role.USER, Delete("Node", HOME), AcceptIncarnation(NOWHERE, "one"), Acquire("user", Duration(1_000)))
        await self.send(Role.ENDPOINTS, Spawn(NAME, f"{NAME}-plain", 1, 0), Renew("none"))
        for key, row in self.others("replica/")[:1]:
            transition = self.rng.choice([name for name, owner in OWNERS.items() if owner is not Role.ENDPOINTS])
            await self.send(Role.ENDPOINTS, Move(key, row.revision, transition, row.obj.status.attempt))

    async def not_owner(self) -> None:
        """Claims on leases, nodes and grants that it does not own."""
        await self.send(Role.SCHEDULER, Acquire("repair", Duration(1_000)), Close("clock"))
        nodes = self.others("node/")
        if nodes:
            key, row = self.rng.choice(nodes)
            await self.send(Role.AGENT, Apply(row.obj), Delete("Node", key.removeprefix("node/")))
        busy = [(key, row) for key, row in self.others("replica/") if row.obj.status.phase is Phase.BOUND]
        for key, row in busy[:1]:
            await self.send(Role.AGENT, Move(key, row.revision, "start", row.obj.status.attempt))

    async def old_epoch(self) -> None:
        actor = await self.actor(Role.REPAIR)
        await self.send_as(replace(actor, epoch=actor.epoch + 1), Close("none"))
        await self.send_as(Actor(NAME, Role.SCHEDULER, "scheduler", 1), Close("none"), Vacate("scheduler"))
        await self.send_as(Actor(NAME, Role.NODES), Mark(HOME, 1, NodeHealth.LOST))

    async def expired_lease(self) -> None:
        lease = f"{Role.ROLLOUT}/{NAME}-short"
        verdict = (await self.send_as(Actor(NAME, Role.ROLLOUT), Acquire(lease, Duration(100))))[0]
        if not isinstance(verdict, Refused):
            await self.world.clock.sleep_ms(2_000)
            await self.send_as(Actor(NAME, Role.ROLLOUT, lease, verdict.number), Move("none", 1, "retire"))

    async def held_lease(self) -> None:
        mine = await self.actor(Role.REPAIR)
        await self.send_as(Actor(f"{NAME}-twin", Role.REPAIR), Acquire(mine.lease, Duration(1_000)))

    # -- operations ------------------------------------------------------------------------------------------------------

    async def _operation(self, claim: AnyClaim, id_: OperationID | None = None) -> Operation:
        return Operation(
            id_ or await self.client.new_operation_id(), Actor(NAME, Role.USER), claim, Evidence(self.view.revision, 0)
        )

    async def expired_operation(self) -> None:
        status = await self.client.status()
        for id_ in (
            operation_id("before", status.window, self.world.ids.nonce()),
            operation_id(status.incarnation, status.window + 1_000, self.world.ids.nonce()),
        ):
            await self.resend(await self._operation(Delete("Config", "none", NAME), id_))
            await self.send(Role.USER, Abandon(id_))

    async def reused_operation_id(self) -> None:
        first = await self._operation(Delete("Config", "none", NAME))
        await self.resend(first, await self._operation(Delete("Config", "other", NAME), first.id))
        await self.resend(replace(first, claim=Delete("Secret", "none", NAME)))
        await self.resend(first)

    async def abandoned(self) -> None:
        operation = await self._operation(Delete("Config", "none", NAME))
        await self.send(Role.USER, Abandon(operation.id))
        await self.resend(operation)

    # -- objects ---------------------------------------------------------------------------------------------------------

    async def contradictory_claims(self) -> None:
        """Claims that contradict themselves."""
        await self.send(Role.OPERATOR, DeclareLost(HOME), AcceptIncarnation("nobody", "one"), Delete("Replica", "none"))
        await self.send(
            Role.BUDGETS, Issue("NO LABEL", self._offer_spec()), Issue(f"{NAME}-x", self._offer_spec(amount=Amount()))
        )
        far = Accept(f"{NAME}-far", GrantSpec(holder=NAME, amount=SMALL_AMOUNT, ttl=Duration(1)), 1, 0, "a", "b")
        await self.send(Role.BUDGETS, far, ReturnCapacity("clock", SMALL_AMOUNT))
        transition = self.rng.choice(sorted(OWN_CLAIM_TRANSITIONS))
        await self.send(Role.REPAIR, Move("none", 1, transition), Acquire(f"repair/{NAME}", Duration(1)))

    async def reserved_label(self) -> None:
        """A label that only Remit itself may set."""
        await self.send(Role.OPERATOR, Apply(Region(metadata=Metadata(name=f"{NAME}-own", labels={"remit/mine": "yes"}))))

    async def other_tenant(self) -> None:
        """As a user of one tenant, delete an object of another."""
        mine, theirs = f"{NAME}-one", f"{NAME}-two"
        await self.send_as(Actor(NAME, Role.USER, tenant=mine), Delete("Workload", "none", theirs))

    async def missing_objects(self) -> None:
        await self.send(Role.OPERATOR, Delete("Node", f"{NAME}-none"), Rollback(99_999_999))
        await self.send(Role.SCHEDULER, Bind("replica/none/none-0", 1, HOME, "none"), Close("none"))
        await self.send(
            Role.BUDGETS, Renew("none"), ReturnCapacity("none", SMALL_AMOUNT), Credit("none", 1, 1, SMALL_AMOUNT, "a", "b")
        )
        await self.bind("plain", f"{NAME}-none")

    async def existing_objects(self) -> None:
        await self.send(Role.OPERATOR, Apply(self.rng.choice(self.own_objects()), expect=0))
        pending = await self.pending("plain")
        if pending is not None:
            index = self.view.get(pending[0]).spec.index if self.view.get(pending[0]) else 0
            await self.send(Role.WORKLOADS, Spawn(NAME, f"{NAME}-plain", 1, index))

    async def old_revision(self) -> None:
        """On any replica: an old revision is never the current one."""
        for key, row in self.others("replica/")[:2]:
            await self.send(Role.WORKLOADS, Move(key, row.revision - 1, "cancel"), Forget(key, row.revision - 1))
            await self.send(Role.SCHEDULER, Bind(key, row.revision - 1, HOME, f"tenant/{NAME}"))
        seen_home = await self.read(key_of("Node", HOME))
        if seen_home is not None:
            await self.send(Role.NODES, Mark(HOME, seen_home.revision - 1, NodeHealth.SUSPECT))

    async def wrong_phase(self) -> None:
        """On any object, but only transitions that the table does not have from its current phase."""
        replicas, nodes = self.others("replica/"), self.others("node/")
        if replicas:
            key, row = self.rng.choice(replicas)
            status = row.obj.status
            names = [
                n for n in OWNERS if n not in OWN_CLAIM_TRANSITIONS and find_transition(n, status.phase, status.before) is None
            ]
            name = self.rng.choice(names)
            if OWNERS[name] is not Role.AUTHORITY:
                await self.send(OWNERS[name], Move(key, row.revision, name, status.attempt, "odd"))
            if status.phase is not Phase.RELEASED:
                await self.send(Role.WORKLOADS, Forget(key, row.revision))
        if nodes:
            key, row = self.rng.choice(nodes)
            here = row.obj.status.health
            there = self.rng.choice([health for health in NodeHealth if (here, health) not in NODE_HEALTH_TRANSITIONS])
            await self.send(Role.NODES, Mark(key.removeprefix("node/"), row.revision, there))
        placed = await self.placed()
        if placed is not None:
            await self.send(Role.SCHEDULER, Bind(placed[0], placed[2], HOME, f"tenant/{NAME}"))

    async def wrong_attempt(self) -> None:
        placed = await self.placed()
        if placed is not None:
            await self.send(Role.AGENT, Move(placed[0], placed[2], "start", placed[1].status.attempt + 7))

    async def in_use(self) -> None:
        await self.send(Role.OPERATOR, Delete("Tenant", NAME))
        if await self.placed() is not None:
            await self.send(Role.OPERATOR, Delete("Node", HOME))

    async def deleting_workload(self) -> None:
        """A workload that is being deleted while it still has a replica."""
        if await self.pending("going") is None:
            return
        name = f"{NAME}-going"
        await self.send(Role.USER, Delete("Workload", name, NAME), Apply(self.workload("going")))
        await self.bind("going")

    # -- time ------------------------------------------------------------------------------------------------------------

    async def too_early(self) -> None:
        placed = await self.placed()
        if placed is not None:
            await self.send(Role.REPAIR, Move(placed[0], placed[2], "abort"))
        offer = await self._issue(self._offer_spec())
        await self.send(Role.REPAIR, Close(offer))

    async def fenced(self) -> None:
        """The agent of its own node has just renewed its lease, so the replica there may still run and must not be declared
        lost.
        """
        placed = await self.placed()
        if placed is None:
            return
        await self.client.renew(await self.actor(Role.AGENT))
        await self.send(Role.NODES, Move(placed[0], placed[2], "doubt"))
        row = await self.read(placed[0])
        if row is not None:
            await self.send(Role.NODES, Move(placed[0], row.revision, "lose", row.obj.status.attempt, "lost"))

    async def stale_evidence(self) -> None:
        await self.bind("plain", age_ms=3_600_000)
        placed = await self.placed()
        if placed is not None:
            await self.send(Role.AGENT, Move(placed[0], placed[2], "start", placed[1].status.attempt), age_ms=3_600_000)

    # -- placement -------------------------------------------------------------------------------------------------------

    async def unready_node(self) -> None:
        await self.bind("plain", NEW)

    async def cordoned_node(self) -> None:
        await self.bind("plain", CORDONED)

    async def device_taken(self) -> None:
        await self.placed("gpu")
        await self.bind("gpu", devices={"gpu-0": 1000})
        await self.bind("gpus")

    async def wrong_device(self) -> None:
        """Also on replicas of others: no node has this device, so it is never accepted."""
        await self.bind("plain", devices={"gpu-1": 1000})
        waiting = [(key, row) for key, row in self.others("replica/") if row.obj.status.phase is Phase.PENDING]
        nodes = self.others("node/")
        if waiting and nodes:
            key, row = self.rng.choice(waiting)
            node = self.rng.choice(nodes)[0].removeprefix("node/")
            claim = Bind(key, row.revision, node, f"tenant/{row.obj.metadata.tenant}", {f"{NAME}-device": 1000})
            await self.send(Role.SCHEDULER, claim)

    async def excluded_by_policy(self) -> None:
        """Publish a policy that excludes one of its own workloads. It takes effect here at once, or with the next adopted
        revision.
        """
        rule = PolicyRule(match=PolicyMatch(labels={NAME: "barred"}), allow=PolicyAllow(zones=("nowhere",)))
        claim = Apply(Policy(metadata=Metadata(name=NAME), spec=PolicySpec(rules=(rule,))))
        if isinstance(await self.bind("barred"), Refused):
            return
        if self._parent is None:
            await self.send(Role.OPERATOR, claim)
        else:
            await _publish(self._parent, claim)
        await self.clean_up()
        await self.bind("barred")

    async def bind_unplaceable(self, workload: str) -> None:
        await self.bind(workload)

    async def anti_affinity(self) -> None:
        await self.placed("shy")
        await self.bind("shy")

    async def expired_policy(self) -> None:
        """Bind while the policies may be past their lease, and adopt an older policy revision."""
        await self.bind("plain")
        rows = [row.obj.spec for _, row in self.view.of_kind("policyrevision/")]
        number = max((spec.number for spec in rows if spec.deadline is not None), default=0)
        if number > 1:
            await self.send(Role.POLICY, Adopt(number - 1, {}, Duration(1_000), 0), Rollback(number))

    async def short_gang(self) -> None:
        pending = await self.pending("gang")
        if pending is not None:
            await self.send(Role.SCHEDULER, BindGang((Bind(*pending, HOME, f"tenant/{NAME}"),)))
            await self.bind("gang")

    async def wrong_victims(self) -> None:
        placed, pending = await self.placed(), await self.pending("plain")
        if placed is not None and pending is not None:
            claim = Reserve(*pending, HOME, f"tenant/{NAME}", victims={placed[0]: placed[2]})
            await self.send(Role.SCHEDULER, claim)

    async def too_many(self) -> None:
        await self.send(Role.WORKLOADS, Spawn(NAME, f"{NAME}-plain", 1, 1_000, 100))

    # -- grants ----------------------------------------------------------------------------------------------------------

    def _offer_spec(self, amount: Amount = SMALL_AMOUNT, ttl_ms: int = 60_000, holder: str = f"scheduler/{NAME}") -> GrantSpec:
        return GrantSpec(
            holder=holder, amount=amount, parent=f"tenant/{NAME}", tenant=NAME, purpose="offer", ttl=Duration(ttl_ms)
        )

    async def _issue(self, spec: GrantSpec) -> str:
        name = f"{NAME}-{self.world.ids.nonce()[:10]}"
        await self.send(Role.BUDGETS, Issue(name, spec))
        return name

    async def short_grant(self) -> None:
        await self._issue(self._offer_spec(Amount({"cpu": 1 << 40})))
        await self.bind("plain", grant=await self._issue(self._offer_spec()))

    async def expired_grant(self) -> None:
        name = await self._issue(self._offer_spec(Amount({"cpu": 500}), ttl_ms=50))
        await self.world.clock.sleep_ms(500)
        await self.bind("plain", grant=name)

    async def void_peer_messages(self) -> None:
        """Send peer messages with incarnations that this scope and its peer never had."""
        spec = GrantSpec(holder=NOWHERE, issuer=NOWHERE, amount=SMALL_AMOUNT, ttl=Duration(1_000))
        await self.send(Role.BUDGETS, Accept(f"{NAME}-letter", spec, 1, 0, "a", "b"), ConfirmHoldings(NOWHERE, 1, {}, "a", "b"))

    async def awaiting_reports(self) -> None:
        name = await self._issue(replace(self._offer_spec(ttl_ms=50), holder=NOWHERE))
        await self.world.clock.sleep_ms(500)
        await self.send(Role.BUDGETS, Close(name))
        await self.send(Role.OPERATOR, DeclareLost(NOWHERE))

    async def limits(self) -> None:
        await self.too_many()
        region = Region(metadata=Metadata(name=f"{NAME}-none"))
        await self.send(Role.OPERATOR, Apply(region, expect=1))


async def _publish(parent: RoleContext, claim: AnyClaim) -> None:
    try:
        await parent.client(Actor(NAME, Role.OPERATOR)).submit(claim)
    except RetriesExhausted as error:
        for operation in error.operation_ids:
            parent.observer.operation_abandoned(parent.process.name, parent.scope, operation)


def _bind_attempt(workload: str) -> Callable[[Adversary], Awaitable[None]]:
    return lambda adversary: adversary.bind_unplaceable(workload)


ATTEMPTS_BY_CODE: Final[Mapping[Code, Callable[[Adversary], Awaitable[None]]]] = {
    Code.INVALID: Adversary.contradictory_claims,
    Code.RESERVED: Adversary.reserved_label,
    Code.TENANT: Adversary.other_tenant,
    Code.ROLE: Adversary.wrong_role,
    Code.NOT_OWNER: Adversary.not_owner,
    Code.STALE_EPOCH: Adversary.old_epoch,
    Code.LEASE_EXPIRED: Adversary.expired_lease,
    Code.LEASE_HELD: Adversary.held_lease,
    Code.STALE_EVIDENCE: Adversary.stale_evidence,
    Code.OPERATION_EXPIRED: Adversary.expired_operation,
    Code.OPERATION_MISMATCH: Adversary.reused_operation_id,
    Code.ABANDONED: Adversary.abandoned,
    Code.NOT_FOUND: Adversary.missing_objects,
    Code.EXISTS: Adversary.existing_objects,
    Code.REVISION: Adversary.old_revision,
    Code.PHASE: Adversary.wrong_phase,
    Code.ATTEMPT: Adversary.wrong_attempt,
    Code.IN_USE: Adversary.in_use,
    Code.DELETING: Adversary.deleting_workload,
    Code.WAIT: Adversary.too_early,
    Code.FENCE: Adversary.fenced,
    Code.NODE_UNREADY: Adversary.unready_node,
    Code.DRAINING: Adversary.cordoned_node,
    Code.NO_ROOM: _bind_attempt("huge"),
    Code.DEVICE_TAKEN: Adversary.device_taken,
    Code.DEVICE_MISMATCH: Adversary.wrong_device,
    Code.SELECTOR: _bind_attempt("choosy"),
    Code.TAINT: _bind_attempt("frail"),
    Code.PLACE: _bind_attempt("abroad"),
    Code.POLICY: Adversary.excluded_by_policy,
    Code.POLICY_LAPSED: Adversary.expired_policy,
    Code.SPREAD: _bind_attempt("skewed"),
    Code.AFFINITY: _bind_attempt("lonely"),
    Code.ANTI_AFFINITY: Adversary.anti_affinity,
    Code.OVER_QUOTA: _bind_attempt("greedy"),
    Code.GRANT_SHORT: Adversary.short_grant,
    Code.GRANT_EXPIRED: Adversary.expired_grant,
    Code.GRANT_VOID: Adversary.void_peer_messages,
    Code.AWAITING_REPORTS: Adversary.awaiting_reports,
    Code.GANG_SHORT: Adversary.short_gang,
    Code.VICTIMS: Adversary.wrong_victims,
    Code.LIMIT: Adversary.limits,
}
"""The method that aims at each code. Every code except `INTERNAL_ERROR` has one."""
